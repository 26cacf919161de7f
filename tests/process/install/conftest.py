"""What the tests of installing and of releases share."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from tests.process.install.environments import environment, run_pip

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="session")
def builder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment with nothing but the project's build backend."""
    python = environment(tmp_path_factory.mktemp("builder"))
    requirements = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    done = run_pip(python, "install", *requirements, "editables")
    assert done.returncode == 0, done.stderr
    return python
