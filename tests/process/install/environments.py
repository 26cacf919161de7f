"""Environments of Python for the tests of installing."""

from __future__ import annotations

import os
import subprocess
import venv
from pathlib import Path

import pip

# PYTHONPATH may lead to the source tree.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def environment(directory: Path) -> Path:
    """Make an environment with no package but the pip of this one, whose copy would take longer than most tests; return
    its Python."""
    venv.create(directory)
    (packages,) = directory.glob("lib/python*/site-packages")
    (packages / "pip").symlink_to(Path(pip.__file__).parent)
    return directory / "bin" / "python"


def run_pip(python: Path, command: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run an environment's pip. Python compiles the modules that a test imports, and pip need not compile the rest."""
    options = ["--disable-pip-version-check", *(["--no-compile"] if command == "install" else [])]
    return subprocess.run(
        [python, "-m", "pip", command, *options, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=ENVIRONMENT,
        timeout=120,
    )
