"""The one-line output of the commands before Spark is started, or without it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from unittest.mock import Mock

import msgspec
import pyarrow as pa
import pytest
from click.testing import CliRunner, Result
from pyspark.errors import PySparkException

from duemq import spark_jobs
from duemq.spark_jobs import session
from duemq.spark_jobs.audit.audit import Lateness, Summary, sign
from duemq.spark_jobs.cli.commands import main
from duemq.spark_jobs.cli.output import print_summary, print_table
from duemq.spark_jobs.errors import JobError
from tests.unit.spark_jobs.compact_world import new_broker
from tests.unit.spark_jobs.report.report_analyses import offender

ROOT = Path(__file__).parents[3]

COMMANDS = {
    "analyse": ["--out", "out"],
    "audit": [],
    "forecast": [],
    "compact": ["new"],
    "archive": ["out"],
    "sql": ["select 1"],
}


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def check_failed(result: Result, *parts: str) -> None:
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("duemq: ")
    assert result.stderr.count("\n") == 1
    for part in parts:
        assert part in result.stderr


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--adopt"], "are for --append"),
        (["--table-format", "delta"], "are for --append"),
        (["--append", "--catalog", "x"], "a catalog is for Iceberg tables"),
        (["--append", "--table-format", "orc"], "'orc' is not one of 'parquet', 'iceberg', 'delta'"),
    ],
)
def test_options_of_appending(tmp_path: Path, options: list[str], why: str) -> None:
    new_broker(tmp_path / "store").close()
    result = run("archive", tmp_path / "store", tmp_path / "table", *options)
    assert result.exit_code == 2
    assert why in result.stderr
    for name in ("one", "two"):
        new_broker(tmp_path / name).close()
    result = run("archive", tmp_path / "[ot][nw][eo]", tmp_path / "table", "--append", "--adopt")
    assert "--store-name and --adopt are for one store" in result.stderr
    assert not (tmp_path / "table").exists()


@pytest.mark.parametrize("command", COMMANDS)
def test_what_is_no_store_is_told_before_spark_is_started(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(session, "make_session", lambda *_, **__: pytest.fail("Spark was started"))
    (tmp_path / "empty").mkdir()
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "notes.txt").write_text("hello")
    rest = COMMANDS[command]
    check_failed(run(command, "nowhere", *rest), "nowhere: there is no such directory")
    check_failed(run(command, "empty", *rest), "empty: is empty: no broker wrote here")
    check_failed(run(command, "foreign", *rest), "foreign: has no commitlog/")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "foreign"], "nothing is written then"


@pytest.mark.parametrize(
    ("command", "rest"),
    [
        ("archive", ["PATH"]),
        ("archive", ["PATH", "--append"]),
        ("compact", ["PATH"]),
        ("audit", ["--out", "PATH"]),
        ("audit", ["--state", "PATH"]),
        ("analyse", ["--out", "PATH"]),
        ("analyse", ["--nights", "PATH"]),
        ("analyse", ["--out", "out", "--state", "PATH"]),
    ],
)
def test_nothing_is_written_into_the_store_that_is_read(
    command: str, rest: list[str], store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(session, "make_session", lambda *_, **__: pytest.fail("Spark was started"))
    (tmp_path / "link").symlink_to("store")
    before = sorted(tmp_path.rglob("*"))
    for path in ("store", "store/arch", "./store/", "link/arch", "store/commitlog/x", "store/../link/a/b"):
        arguments = [path if argument == "PATH" else argument for argument in rest]
        for name in (store, "link", "s*e") if command == "analyse" else (store, "link"):
            check_failed(run(command, name, *arguments), f"duemq: {path}: lies in the store that is read, ")
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("command", "rest", "why"),
    [
        ("analyse", ["--nights", "hdfs://name-node/report"], "nights need a directory of this machine"),
        ("compact", ["hdfs://name-node/new"], "this has to be a directory of this machine"),
        (
            "archive",
            ["--append", "--table-format", "iceberg", "s3://bucket/archive"],
            "this has to be a directory of this machine",
        ),
    ],
)
def test_what_has_to_be_of_this_machine_is_told(
    command: str, rest: list[str], why: str, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(session, "make_session", lambda *_, **__: pytest.fail("Spark was started"))
    check_failed(run(command, store, *rest), rest[-1], why)
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


def test_what_is_no_archive_is_told_before_spark_is_started(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "make_session", lambda *_, **__: pytest.fail("Spark was started"))
    check_failed(run("restore", store, tmp_path / "new"), "has no manifest.json, so it is not an archive")
    check_failed(run("restore", store, "hdfs://name-node/new"), "this has to be a directory of this machine")


@pytest.fixture
def store(tmp_path: Path) -> Path:
    broker = new_broker(tmp_path / "store")
    broker.send("orders", b"x")
    broker.close()
    return tmp_path / "store"


def test_java_that_is_missing_or_old_is_told(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.delenv("SPARK_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    hint = "install Java 17 or newer (Debian: apt-get install openjdk-17-jre-headless) or set JAVA_HOME"
    check_failed(run("audit", store), "there is no java on the PATH", hint)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "nothing"))
    check_failed(run("audit", store), f"JAVA_HOME is {tmp_path}/nothing, where there is no bin/java", hint)
    java = tmp_path / "jdk" / "bin" / "java"
    java.parent.mkdir(parents=True)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "jdk"))
    for version, named in (('openjdk version "11.0.2"', "11"), ('java version "1.8.0_292"', "8"), ("hello", "unknown")):
        java.write_text(f"#!/bin/sh\necho '{version}' >&2\n")
        java.chmod(0o755)
        check_failed(run("audit", store), f"Spark needs Java 17 or newer, and {java} is version {named}", hint)
    java.write_text("not a program")
    check_failed(run("audit", store), "does not run", hint)
    java.write_text("#!/bin/sh\necho 'openjdk version \"21\" 2023-09-19' >&2\n")
    session.check_java()


@pytest.mark.parametrize("library", ["pyspark", "numpy", "pyarrow", "rich"])
def test_a_missing_extra_is_told(store: Path, tmp_path: Path, library: str) -> None:
    """A missing extra is reported, as after `pip install duemq` without the packages that the jobs need."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "class Hide:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name.split('.')[0] == '{library}':\n"
        f"            raise ModuleNotFoundError('No module named {library}', name=name)\n"
        "sys.meta_path.insert(0, Hide())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", "from duemq.cli import main; main()", "spark", "audit", str(store)],
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": f"{tmp_path}:{Path.cwd()}", "PATH": "/nowhere"},
    )
    assert done.returncode == 2
    assert done.stderr.startswith("duemq: the Spark jobs need")
    assert "pip install 'duemq[spark]'" in done.stderr
    assert done.stderr.count("\n") == 1


def test_settings_of_spark_that_are_none_are_told(store: Path) -> None:
    result = run("audit", store, "--conf", "spark.eventLog.enabled")
    assert result.exit_code == 2
    assert "'spark.eventLog.enabled' is not KEY=VALUE" in result.output


def test_what_a_task_ended_with_is_told_in_one_line(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        told = "duemq.spark_jobs.errors.JobError: the file is gone"
        raise PySparkException(f"[PYTHON_EXCEPTION] An exception was thrown\n  File x, line 1\n{told}\n\nat a.b.C")

    monkeypatch.setattr(session, "make_session", fail)
    check_failed(run("audit", store), "duemq: the file is gone")
    task = "Traceback (most recent call last):\n  File x, line 1\nOSError: [Errno 5] broken\n SQLSTATE: 38000"
    broken = PySparkException(f"An exception was thrown from the Python worker:\n{task}")
    monkeypatch.setattr(session, "make_session", Mock(side_effect=broken))
    check_failed(run("audit", store), "duemq: Spark: OSError: [Errno 5] broken (DUEMQ_TRACEBACK=1 shows")
    monkeypatch.setattr(session, "make_session", Mock(side_effect=JobError("Spark did not start")))
    check_failed(run("audit", store), "duemq: Spark did not start")
    monkeypatch.setattr(session, "make_session", Mock(side_effect=KeyError("a bug")))
    assert isinstance(run("audit", store).exception, KeyError), "a bug is not hidden"


def summary() -> Summary:
    made = Summary(
        store="x", written_by="duemq", is_running=False, made_ms=1_700_000_000_000, begin=0, end=1, records=0,
        scheduled=0, delivered=0, cancelled=0, pending=0, lost=0, destroyed=0, unreachable=0, starts=[],
        twice=0, levels={}, timers={}, overdue=0,
        superfluous=0, unclaimed=0, expired=0, lateness=Lateness(0, 0, 0.0, {}), damaged=0, damages=[], corrupt=None,
        corruptions=[], offenders=[],
        inputs=[], inputs_sha256="e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
    )  # fmt: skip
    sign(made, None)
    return made


def test_verify(tmp_path: Path) -> None:
    path = tmp_path / "audit.json"
    path.write_bytes(msgspec.json.encode(summary()))
    result = run("verify", path)
    assert (result.exit_code, result.stdout) == (0, "unchanged since 2023-11-14 22:13:20 UTC; not signed\n")
    changed = json.loads(path.read_text()) | {"delivered": 5}
    path.write_text(json.dumps(changed))
    check_failed(run("verify", path), "its digest differs")
    path.write_text("[]")
    check_failed(run("verify", path), "this is not an audit.json")
    path.write_bytes(msgspec.json.encode(summary()))
    (tmp_path / "key.pub").write_text("not a key")
    check_failed(run("verify", path, "--public-key", tmp_path / "key.pub"), "the public key is not readable")


def test_a_package_has_what_tasks_import(tmp_path: Path) -> None:
    result = run("package", tmp_path / "duemq-spark.zip")
    assert result.exit_code == 0
    with zipfile.ZipFile(tmp_path / "duemq-spark.zip") as archive:
        names = set(archive.namelist())
    assert "__main__.py" in names
    # All of duemq: on a path the archive comes before an installed duemq, whose modules nobody finds then.
    folders = os.walk(ROOT / "duemq", followlinks=True)
    modules = {Path(folder, file).relative_to(ROOT).as_posix() for folder, _, files in folders for file in files}
    assert {module for module in modules if module.endswith(".py")} <= names
    assert {"duemq/spark_jobs/report/static/page.html", "duemq/spark_jobs/log4j2.properties"} <= names
    assert not any("__pycache__" in name for name in names)
    # Alone in a directory, as on a cluster, the package is complete.
    wanted = ("cli.commands", "source.source", "analyse.output", "compact.compact", "archive.archive")
    imported = [f"duemq.spark_jobs.{name}" for name in wanted]
    code = (
        "import importlib, sys; sys.path[:] = [sys.argv[1], *(path for path in sys.path if 'lib' in path)];"
        "from duemq.spark import load; from duemq import Producer, sync;"
        "print({importlib.import_module(name).__file__.startswith(sys.argv[1]) for name in sys.argv[2:]})"
    )
    arguments = [sys.executable, "-I", "-c", code, str(tmp_path / "duemq-spark.zip"), *imported]
    done = subprocess.run(arguments, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("{True}\n", 0), done.stderr


_IMPORTS = """
import importlib, os, sys
import numpy, pandas, pyarrow, pyspark
known = set(sys.modules)
for name in sys.argv[1:]:
    importlib.import_module("duemq.spark_jobs." + name)
files = {name: getattr(module, "__file__", None) or "" for name, module in sys.modules.items() if name not in known}
print(*sorted({name.split(".")[0] for name, file in files.items() if "site-packages" in file}))
"""


@pytest.mark.parametrize("where", ["tasks", "driver"])
def test_what_is_imported_is_what_is_asked_for(where: str) -> None:
    """The code imports only the packages that executors are said to need, and those of the extra `spark` for
    installations without a broker."""
    folder = Path(spark_jobs.__file__).parent
    names = ["source.source", "audit.matching", "compact.scan", "archive.rows"]
    if where == "driver":
        found = (path.relative_to(folder).with_suffix("") for path in folder.rglob("*.py"))
        names = [".".join(path.parts) for path in found if not path.name.startswith("__")]
    done = subprocess.run(
        [sys.executable, "-c", _IMPORTS, *names], cwd=ROOT, capture_output=True, text=True, check=True
    )
    imported = {name.replace("_", "-") for name in done.stdout.split()}
    assert {"msgspec", "structlog"} <= imported
    if where == "tasks":
        missing = [name for name in imported if name not in run("package", "--help").stdout]
    else:
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        wanted = [*project["dependencies"], *project["optional-dependencies"]["spark"]]
        missing = sorted(imported - {re.match(r"[\w-]+", name)[0] for name in wanted})  # type: ignore[index]
    # Packages that these bring along or use if present.
    known = {
        "cffi",
        "colorama",
        "greenlet",
        "markdown-it",
        "markupsafe",
        "mdurl",
        "py4j",
        "pygments",
        "typing-extensions",
    }
    assert set(missing) - known <= ({"pyspark", "rich"} if where == "tasks" else set())


def test_results_are_printed_whatever_they_are(capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    table = pa.table(
        [
            pa.array([[("a", "b")], None], pa.map_(pa.string(), pa.string())),
            pa.array([b"\xff", None]),
            pa.array([1, 2]),
        ],
        ["properties", "body", "body"],
    )
    print_table(table, "json")
    lines = capsysbinary.readouterr().out.decode().splitlines()
    assert json.loads(lines[0]) == {"properties": "{'a': 'b'}", "body": "\\xff", "body_2": 1}
    print_table(table, "csv")
    assert capsysbinary.readouterr().out.decode().splitlines()[0] == '"properties","body","body_2"'
    print_table(table, "table")
    assert "properties" in capsysbinary.readouterr().out.decode()


def by_itself(*arguments: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    """Run the command line in a process of its own, with additional environment variables."""
    command = [sys.executable, "-m", "duemq", "spark", *arguments]
    return subprocess.run(command, capture_output=True, env={**os.environ, **environment}, timeout=120, check=False)


def test_a_name_that_is_no_text_is_told_in_one_line(tmp_path: Path) -> None:
    new_broker(tmp_path / "plain").close()
    odd = os.fsdecode(os.fsencode(tmp_path) + b"/bad\xff")
    os.symlink(tmp_path / "plain", odd)
    kept = ("--state", str(tmp_path / "kept"))
    for arguments in (("audit", odd, *kept), ("audit", str(tmp_path / "plain"), *kept, "--out", odd + "out")):
        done = by_itself(*arguments)
        assert done.returncode in (0, 2), done.stderr
        assert b"Traceback" not in done.stderr
        if done.returncode:
            assert b"bad\\udcff" in done.stderr
            assert b"is not text in utf-8: rename it" in done.stderr
            assert done.stderr.count(b"\n") == 1


def test_what_the_output_has_no_letter_for_is_replaced(tmp_path: Path) -> None:
    broker = new_broker(tmp_path / "store")
    broker.send("plain", b"x")
    broker.close()
    arguments = ("--out", str(tmp_path / "\u03a9"), "--state", str(tmp_path / "kept"))
    done = by_itself("analyse", str(tmp_path / "store"), *arguments, PYTHONIOENCODING="latin-1")
    assert (done.returncode, done.stderr) == (0, b"")
    assert f"report: {tmp_path}/?/report.html".encode() in done.stdout


def test_texts_of_producers_are_no_markup_and_stay_on_their_lines(capsys: pytest.CaptureFixture[str]) -> None:
    texts = ["[/x]", "[red]y[/red]", ":smile:", "a\nlost  0\x07\x1b]0;title\u202e"]
    print_table(pa.table({"[key]": texts}), "table")
    shown = capsys.readouterr().out
    for text in ("[key]", "[/x]", "[red]y[/red]", ":smile:", "a\\nlost  0\\x07\\x1b]0;title\\u202e"):
        assert text in shown
    assert shown.count("\n") == 4 + len(texts)
    found = summary()
    found.offenders.append(
        msgspec.structs.replace(offender(1, "lost"), topic="to\npic", unique_key="k\x1b]0;title\x07")
    )
    print_summary(found)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("lost:")]
    assert line.startswith("lost: to\\npic k\\x1b]0;title\\x07 at ")
