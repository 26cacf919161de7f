"""The files that pip installs: an installed duemq owns one top-level name, whatever packages the application has."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.process.install.environments import ENVIRONMENT, environment, run_pip

ROOT = Path(__file__).parents[3]
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

WALK = """
import json
import sys
import traceback

import click
from click.testing import CliRunner

from duemq.cli import main

VALUES = {"bool": [], "integer": ["1"], "integer range": ["1"], "float": ["1"]}

def value(parameter):
    if isinstance(parameter.type, click.Choice):
        return [str(parameter.type.choices[0])]
    if parameter.name in ("config", "config_file"):
        return ["bridge.toml"]
    return VALUES.get(parameter.type.name, ["2030-01-31T08:30+02:00" if parameter.type.name == "time" else "a"])

def arguments(command):
    for parameter in command.params:
        if parameter.required or parameter.name == "config" or parameter.name in ("query", "host"):
            name = [parameter.opts[0]] if isinstance(parameter, click.Option) else []
            yield from [*name, *value(parameter)]

def walk(command, context, words):
    if isinstance(command, click.Group):
        if command.invoke_without_command:
            yield words, list(arguments(command))
        for name in command.list_commands(context):
            try:
                found = command.get_command(context, name)
            except SystemExit:  # the module of the command says what it needs
                yield [*words, name], []
                continue
            yield from walk(found, click.Context(found, parent=context, info_name=name), [*words, name])
    else:
        yield words, list(arguments(command))

said = {}
for words, given in walk(main, click.Context(main, info_name="duemq"), []):
    result = CliRunner().invoke(main, [*words, *given], prog_name="duemq")
    is_traceback = result.exception is not None and not isinstance(result.exception, SystemExit)
    text = "".join(traceback.format_exception(result.exception)) if is_traceback else ""
    said[" ".join(words)] = {"output": result.output, "traceback": text, "given": given}
json.dump(said, sys.stdout)
"""


def built(builder: Path, source: Path, directory: Path) -> Path:
    """Have pip build a wheel in a directory, with no other packages than the backend; return its path."""
    options = ["--no-build-isolation", "--no-deps", "--wheel-dir", str(directory)]
    done = run_pip(builder, "wheel", *options, source)
    assert done.returncode == 0, done.stderr
    (made,) = directory.iterdir()
    return made


@pytest.fixture(scope="module")
def wheel(builder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that pip builds from the source tree."""
    return built(builder, ROOT, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment with duemq and a client's dependencies."""
    python = environment(tmp_path_factory.mktemp("environment"))
    done = run_pip(python, "install", wheel)
    assert done.returncode == 0, done.stderr
    return python


def test_a_wheel_owns_one_name(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    owned = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert owned == {"duemq"}
    assert {f"duemq/{part}/__init__.py" for part in PARTS} | {f"duemq/{part}/py.typed" for part in PARTS} <= set(names)
    assert {"duemq/spark_jobs/report/static/page.html", "duemq/spark_jobs/log4j2.properties"} <= set(names)
    assert len(names) == len(set(names))


def test_a_source_distribution_builds_the_same_wheel(wheel: Path, builder: Path, tmp_path: Path) -> None:
    # pip builds no source distributions: the backend is called as each program that builds calls it.
    call = f"import hatchling.build; hatchling.build.build_sdist({str(tmp_path)!r})"
    subprocess.run([builder, "-c", call], cwd=ROOT, check=True, capture_output=True, env=ENVIRONMENT)
    (source,) = tmp_path.iterdir()
    with tarfile.open(source) as archive:
        names = {name.split("/")[1] for name in archive.getnames()}
    assert {"duemq", "tests", "docs", "hatch_build.py"} <= names
    assert not names & {*PARTS, ".editable", ".venv", "data"}
    made = built(builder, source, tmp_path / "wheel")
    with zipfile.ZipFile(made) as one, zipfile.ZipFile(wheel) as other:
        assert sorted(one.namelist()) == sorted(other.namelist())


def install(builder: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Install the project from a source tree with the backend and without dependencies."""
    return run_pip(builder, "install", "--no-build-isolation", "--no-deps", *arguments)


@pytest.mark.parametrize("editable", [(), ("--editable",)])
def test_a_checkout_without_symbolic_links_is_refused(builder: Path, tmp_path: Path, editable: tuple[str, ...]) -> None:
    """git without core.symlinks, and programs that unpack archives without links, write a file with the link's text."""
    tree = tmp_path / "tree"
    left_out = shutil.ignore_patterns(".*", "__pycache__", "data", "tests", "site")
    shutil.copytree(ROOT, tree, symlinks=True, ignore=left_out)
    for link in [path for path in tree.rglob("*") if path.is_symlink()]:
        text = os.readlink(link)
        link.unlink()
        link.write_text(text)
    run = install(builder, *editable, tree)
    assert run.returncode != 0
    assert "is not a symbolic link" in run.stdout + run.stderr
    assert "git config core.symlinks true" in run.stdout + run.stderr
    assert "Traceback" not in run.stdout + run.stderr


def test_an_editable_install_owns_one_name(builder: Path, tmp_path: Path) -> None:
    run = install(builder, "--editable", ROOT)
    assert run.returncode == 0, run.stdout + run.stderr
    others = [*PARTS, "tests", "deploy", "docs"]
    for name in others:  # a package without __init__.py comes last, wherever it stands on the path
        (tmp_path / name).mkdir()
        (tmp_path / name / "of_the_application.py").touch()
    look = f"""
import duemq, duemq.broker, importlib.util
print(duemq.__file__)
print(duemq.broker.__path__)
for name in {others}:
    print(list(importlib.util.find_spec(name).submodule_search_locations))
"""
    run = subprocess.run(
        [builder, "-c", look], cwd=tmp_path, capture_output=True, text=True, check=False, env=ENVIRONMENT
    )
    client, broker, *found = run.stdout.splitlines()
    assert Path(client).samefile(ROOT / "duemq" / "__init__.py")
    assert Path(broker[2:-2]).samefile(ROOT / "broker")
    assert found == [str([str(tmp_path / name)]) for name in others], run.stderr


@pytest.mark.parametrize("order", ["application first", "duemq first"])
def test_an_application_keeps_its_names(installed: Path, tmp_path: Path, order: str) -> None:
    for part in PARTS:
        (tmp_path / part).mkdir()
        (tmp_path / part / "__init__.py").write_text('OWNER = "the application"\n')
    (tmp_path / "application.py").write_text(APPLICATION)
    run = subprocess.run(
        [str(installed), "application.py", order],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        env=ENVIRONMENT,
    )
    assert (run.stdout, run.returncode) == ("both work\n", 0), run.stderr


def test_each_command_says_what_is_missing(installed: Path, tmp_path: Path) -> None:
    """Calls every command of an environment with a client's dependencies only. None may fail with a traceback, and one
    that needs more names the extra."""
    assert (
        subprocess.run(
            [installed.with_name("duemq"), "--help"], capture_output=True, check=False, env=ENVIRONMENT
        ).returncode
        == 0
    )
    (tmp_path / "walk.py").write_text(WALK)
    shutil.copy(ROOT / "deploy" / "mqtt" / "bridge.toml", tmp_path)
    nobody = "127.0.0.1:1"
    environment = {**ENVIRONMENT, "DUEMQ_NAMESERVER": nobody, "NAMESRV_ADDR": nobody}
    run = subprocess.run(
        [installed, "walk.py"], cwd=tmp_path, capture_output=True, text=True, check=False, env=environment, timeout=120
    )
    assert run.returncode == 0, run.stderr
    said = json.loads(run.stdout)
    failed = {name: answer["traceback"] for name, answer in said.items() if answer["traceback"]}
    assert failed == {}
    needs = {
        name: extra
        for name, answer in said.items()
        for extra in re.findall(r"needs? the package .*(duemq\[\w+\])", answer["output"])
    }
    for command, extra in (
        ("serve", "broker"),
        ("doctor", "broker"),
        ("tls self-signed", "broker"),
        ("store repair", "broker"),
        ("mqtt-bridge", "mqtt"),
        ("spark sql", "spark"),
    ):
        assert needs.get(command) == f"duemq[{extra}]", said[command]
    assert not {"send", "receive", "cancel", "pending list", "clock advance", "user list"} & set(needs)
