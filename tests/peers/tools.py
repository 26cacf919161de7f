"""The programs of the machine that build and run the peers."""

import os
import shutil
import subprocess
from pathlib import Path

from tests.peers.errors import BuildError, MissingToolError

_PACKAGES = {
    "java": "a JDK, 17 or newer (Debian: openjdk-17-jdk-headless)",
    "javac": "a JDK, 17 or newer (Debian: openjdk-17-jdk-headless)",
    "jar": "a JDK, 17 or newer (Debian: openjdk-17-jdk-headless)",
    "mvn": "Maven (Debian: maven)",
    "chromium": "Chromium (Debian: chromium; as root on Debian this is done for you)",
    "mosquitto": "Mosquitto (Debian: mosquitto; as root on Debian this is done for you)",
    "mosquitto_pub": "Mosquitto's clients (Debian: mosquitto-clients; as root on Debian this is done for you)",
    "ssh-keygen": "OpenSSH's clients (Debian: openssh-client; as root on Debian this is done for you)",
    "go": "Go, 1.22 or newer (Debian: golang-go)",
}


def which(tool: str) -> str | None:
    """Return the path of a program, None if it is missing. Debian has daemons where users' shells do not look."""
    path = os.environ.get("PATH", os.defpath)
    return shutil.which(tool, path=os.pathsep.join((path, "/usr/sbin", "/usr/local/sbin")))


def find(tool: str) -> str:
    """Return the path of a program. Raises MissingToolError, which names the package that has it."""
    path = which(tool)
    if path is None:
        raise MissingToolError(tool, _PACKAGES.get(tool, tool))
    return path


def find_or_install(tool: str, package: str) -> str:
    """Return the path of a program; on Debian, as root, install its package if it is missing."""
    apt = shutil.which("apt-get")
    if which(tool) is None and apt is not None and os.geteuid() == 0:
        env = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
        install = [apt, "install", "--yes", "--quiet", "--no-install-recommends", package]
        try:
            run(f"Debian's {package}", install, env=env)
        except BuildError:
            # There is no list of packages yet, or an outdated one.
            run("the list of Debian's packages", [apt, "update", "--quiet"], env=env)
            run(f"Debian's {package}", install, env=env)
    return find(tool)


def run(what: str, command: list[str], cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
    """Run one step of building `what` and return its output; raise BuildError with that output if the step fails."""
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
