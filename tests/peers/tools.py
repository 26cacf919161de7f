"""The programs of the machine that peers are built and run with."""

import shutil
import subprocess
from pathlib import Path

from tests.peers.errors import BuildError, MissingToolError

_PACKAGES = {
    "java": "a JDK, 17 or newer (Debian: openjdk-17-jdk-headless)",
    "javac": "a JDK, 17 or newer (Debian: openjdk-17-jdk-headless)",
    "mvn": "Maven (Debian: maven)",
    "chromium": "Chromium (Debian: chromium)",
    "go": "Go, 1.22 or newer (Debian: golang-go)",
}


def find(tool: str) -> str:
    """Return the path of a program, or say which package has it."""
    path = shutil.which(tool)
    if path is None:
        raise MissingToolError(tool, _PACKAGES.get(tool, tool))
    return path


def run(what: str, command: list[str], cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
    """Run one step of building `what` and return its output; raise BuildError with it if the step fails."""
    done = subprocess.run(
        command,
        check=False,
        cwd=cwd,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode != 0:
        raise BuildError(what, command, done.stdout)
    return done.stdout
