"""The files that pip installs: an installed duemq owns one top-level name, whatever packages the application has."""

from __future__ import annotations

import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PARTS = ("broker", "protocol", "scheduler", "spark_jobs", "storage")
APPLICATION = """
import sys

def of_the_application():
    import broker, protocol, scheduler, spark_jobs, storage
    return {module.__name__: module.OWNER for module in (broker, protocol, scheduler, spark_jobs, storage)}

first = of_the_application() if sys.argv[1] == "application first" else {}
import duemq
from duemq import Admin, Message, Producer, Consumer, errors
owners = first or of_the_application()
assert set(owners.values()) == {"the application"}, owners
assert "site-packages" in duemq.__file__
heavy = {"click", "numpy", "structlog", "uvloop", "pyarrow", "pyspark"} & set(sys.modules)
ours = [name for name in sys.modules if name.startswith(("duemq.broker", "duemq.storage", "duemq.scheduler"))]
assert not heavy and not ours, (heavy, ours)
print("both work")
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that pip builds from the source tree."""
    directory = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(directory), str(ROOT)]
    subprocess.run(command, check=True)
    (made,) = directory.iterdir()
    return made


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment with duemq and a client's dependencies."""
    directory = tmp_path_factory.mktemp("environment")
    venv.create(directory, with_pip=True)
    python = directory / "bin" / "python"
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", str(wheel)]
    subprocess.run(command, check=True)
    return python


def test_a_wheel_owns_one_name(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    owned = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert owned == {"duemq"}
    assert {f"duemq/{part}/__init__.py" for part in PARTS} | {f"duemq/{part}/py.typed" for part in PARTS} <= set(names)
    assert {"duemq/spark_jobs/report/static/page.html", "duemq/spark_jobs/log4j2.properties"} <= set(names)
    assert len(names) == len(set(names))


def test_a_source_distribution_builds_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    build = [sys.executable, "-m", "build", "--sdist", "--outdir", str(tmp_path), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True)
    (source,) = tmp_path.iterdir()
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path / "wheel")]
    subprocess.run([*command, str(source)], check=True)
    (made,) = (tmp_path / "wheel").iterdir()
    with zipfile.ZipFile(made) as one, zipfile.ZipFile(wheel) as other:
        assert sorted(one.namelist()) == sorted(other.namelist())


@pytest.mark.parametrize("order", ["application first", "duemq first"])
def test_an_application_keeps_its_names(installed: Path, tmp_path: Path, order: str) -> None:
    for part in PARTS:
        (tmp_path / part).mkdir()
        (tmp_path / part / "__init__.py").write_text('OWNER = "the application"\n')
    (tmp_path / "application.py").write_text(APPLICATION)
    run = subprocess.run(
        [str(installed), "application.py", order], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (run.stdout, run.returncode) == ("both work\n", 0), run.stderr


def test_the_command_line_says_what_is_missing(installed: Path, tmp_path: Path) -> None:
    command = installed.with_name("duemq")
    assert subprocess.run([str(command), "--help"], capture_output=True, check=False).returncode == 0
    for arguments, extra in ((["serve"], "duemq[broker]"), (["spark", "sql", "store", "select 1"], "duemq[spark]")):
        run = subprocess.run(
            [str(command), *arguments], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60
        )
        assert run.returncode != 0
        assert extra in run.stderr, run.stderr
        assert "Traceback" not in run.stderr
