"""The commands in processes of their own, as users and clusters run them. Several of those that start Spark share one
process (tests.spark.world.commands)."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import subprocess
import sys
import zipfile
from datetime import UTC, datetime
from pathlib import Path

import pyspark
import pytest
from click.testing import CliRunner
from pyspark.sql import SparkSession

from duemq.spark_jobs import session
from duemq.spark_jobs.cli.commands import main
from tests.spark.world import audit, faults, oracle, spark_home
from tests.spark.world.commands import Commands
from tests.spark.world.stores import WrittenStore
from tests.unit.spark_jobs.analyse.test_nights import night, run

ROOT = Path(__file__).resolve().parents[2]
SMALL = ("--master", "local[1]", "--memory", "512m")


def duemq(*arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run `duemq spark ...`."""
    code = "from duemq.cli import main; main()"
    command = [sys.executable, "-c", code, "spark", *map(str, arguments)]
    environment = spark_home.of_a_user() | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False, env=environment, timeout=200)


def test_an_analysis_that_finds_something_lost_ends_with_1(
    apache_533_store: WrittenStore, commands: Commands, tmp_path: Path
) -> None:
    path = apache_533_store.copy(tmp_path / "store")
    levels = [message for message in audit.audit(path).of("delivered") if message.level == 1]
    fault = faults.remove_delivery(path, levels[0])
    done = commands.run("spark", "analyse", path, "--out", "out", *SMALL, cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    totals = audit.audit(path).totals
    told = {line.split()[0]: line.split()[1] for line in done.stdout.splitlines() if len(line.split()) > 1}
    for verdict in ("delivered", "cancelled", "pending", "lost", "twice"):
        assert told[verdict] == str(totals[verdict])
    assert f"lost: {levels[0].real_topic} {fault.unique_key} at {fault.origin_offset}, due " in done.stdout
    assert "wait; the broker delivers" in done.stdout
    assert "report: out/report.html" in done.stdout
    made = json.loads((tmp_path / "out" / "analysis.json").read_text())
    assert made["audit"] == json.loads((tmp_path / "out" / "audit.json").read_text())
    assert [one["unique_key"] for one in made["audit"]["offenders"]] == [fault.unique_key]
    assert {path.name for path in (tmp_path / "out").iterdir()} >= {"report.html", "parquet", "history.jsonl"}
    checked = commands.run("spark", "verify", "out/audit.json", cwd=tmp_path)
    assert checked.stdout.endswith("; not signed\n")
    # The night after, in a folder of nights, from which an older one is removed.
    nights = tmp_path / "nights"
    run(nights, night(0, store=str(path)))
    second = faults.remove_delivery(path, levels[1])
    done = commands.run(
        "spark", "analyse", path, "--nights", nights, "--keep-nights", "1", "--previous", "out", *SMALL, cwd=tmp_path
    )
    assert done.returncode == 1, done.stderr
    assert re.search(r"^since \d{4}-.* UTC: 1 new lost, 1 known$", done.stdout, re.MULTILINE)
    (left,) = [one for one in nights.iterdir() if one.is_dir() and not one.name.startswith(".")]
    assert f"report: {left}/report.html" in done.stdout
    assert f'href="{left.name}/report.html"' in (nights / "index.html").read_text(encoding="utf-8")
    compared = json.loads((left / "comparison.json").read_text())
    assert [one["unique_key"] for one in compared["new_offenders"]] == [second.unique_key]


def test_good_answers_come_without_complaints(
    duemq_store: WrittenStore, apache_497_store: WrittenStore, commands: Commands, tmp_path: Path
) -> None:
    """A good answer comes without complaints by Java's modules, or by workers whose rows a limit cuts off; and an
    unknown column is reported in one line."""
    (tmp_path / "a").symlink_to(duemq_store.path)
    (tmp_path / "b").symlink_to(apache_497_store.path)
    query = "select store, topic, body from messages"
    done = commands.run(
        "spark", "sql", f"{tmp_path}/[ab]", query, "--limit", "2", "--format", "csv", *SMALL, cwd=tmp_path
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout.splitlines()) == 1 + 2
    done = commands.run("spark", "sql", tmp_path / "a", "select bodi from messages", *SMALL, cwd=tmp_path)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("duemq: there is no column bodi; messages has physical_offset, size, topic")


def test_what_is_over_a_limit_ends_with_3_and_a_hook_is_told(
    duemq_store: WrittenStore, commands: Commands, tmp_path: Path
) -> None:
    hook = ("--hook", "cat >> told")
    limits = ("--fail-late", "p50=1h", "--fail-twice", "0", "--fail-damaged", "0", "--fail-unclaimed", "0")
    good = commands.run(
        "spark", "analyse", duemq_store.path, "--nights", "nights", *limits, "--fail-worse", *hook, *SMALL, cwd=tmp_path
    )
    assert (good.returncode, good.stderr) == (0, "")
    over = commands.run(
        "spark", "audit", duemq_store.path, *limits, "--fail-late", "p50=0ms", "--json", *hook, *SMALL, cwd=tmp_path
    )
    late_ms = json.loads(over.stdout)["lateness"]["percentiles_ms"]["p50"]
    assert over.returncode == (3 if late_ms else 0)
    one, other = (json.loads(line) for line in (tmp_path / "told").read_text().replace("}{", "}\n{").splitlines())
    assert (one["exit"], one["job"], one["store"]) == (0, "analyse", str(duemq_store.path))
    assert (tmp_path / one["report"]).exists()
    assert one["totals"]["delivered"] == audit.audit(duemq_store.path).totals["delivered"]
    assert other["exit"] == over.returncode
    told = f"over the limit: lateness p50 is {late_ms:,} ms, over p50=0ms\n" if late_ms else ""
    assert over.stderr == told


def test_several_stores_are_analysed_by_one_command(
    duemq_store: WrittenStore, apache_497_store: WrittenStore, tmp_path: Path
) -> None:
    """One command analyses several stores: each has its nights, and all of them together have one; a directory that is
    not a store does not stop the others."""
    for name, path in (("a", duemq_store.path), ("c", apache_497_store.path)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "store").symlink_to(path)
    (tmp_path / "b" / "store").mkdir(parents=True)
    done = duemq("analyse", "*/store", "--nights", "nights", "--hook", "cat >> told", *SMALL, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (2, "duemq: b/store: is empty: no broker wrote here\n")
    told = [json.loads(line) for line in (tmp_path / "told").read_text().replace("}{", "}\n{").splitlines()]
    ((one,),) = [told]
    assert (one["store"], one["exit"]) == ("*/store", 2)
    totals = [audit.audit(path).totals for path in (duemq_store.path, apache_497_store.path)]
    for verdict in ("delivered", "pending", "cancelled"):
        assert one["totals"][verdict] == sum(each[verdict] for each in totals)
    assert [(each["store"], each["error"]) for each in one["stores"]] == [
        ("a/store", None), ("b/store", "is empty: no broker wrote here"), ("c/store", None),
    ]  # fmt: skip
    reports = [one["report"], *(each["report"] for each in one["stores"] if each["report"])]
    assert len(set(reports)) == 3
    for report in reports:
        assert (tmp_path / report).exists()
    assert "*/store: 2 of 3 stores\n" in done.stdout


def test_a_store_without_a_message_is_audited_and_analysed(commands: Commands, tmp_path: Path) -> None:
    (tmp_path / "store" / "commitlog").mkdir(parents=True)
    done = commands.run("spark", "analyse", tmp_path / "store", "--out", "out", *SMALL, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "out" / "report.html").exists()


def test_on_a_cluster(duemq_store: WrittenStore, tmp_path: Path) -> None:
    """The package runs under spark-submit in a directory, and with a Python, that do not have this project."""
    zipped = tmp_path / "duemq-spark.zip"
    assert CliRunner().invoke(main, ["package", str(zipped)]).exit_code == 0
    with zipfile.ZipFile(zipped) as archive:
        (tmp_path / "duemq_spark.py").write_bytes(archive.read("__main__.py"))
    # Python's own libraries and those of the extras, but no link to this project's sources.
    libraries = tmp_path / "libraries"
    libraries.mkdir()
    site = Path(pyspark.__file__).parent.parent
    for path in site.iterdir():
        if not path.name.startswith(("duemq", "_duemq", "__editable__")) and path.suffix != ".pth":
            (libraries / path.name).symlink_to(path)
    base = str(Path(sys.base_prefix) / "bin" / "python3")
    names = ("PATH", "JAVA_HOME", "HOME", "LANG", "SPARK_SUBMIT_OPTS", "SPARK_HOME")
    environment = {name: os.environ[name] for name in names if name in os.environ}
    environment |= {"PYTHONPATH": str(libraries), "PYSPARK_PYTHON": base, "SPARK_LOCAL_IP": "127.0.0.1"}
    found = subprocess.run([base, "-c", "import duemq"], env=environment, cwd=tmp_path, check=False)
    assert found.returncode != 0, "the project is importable here: this would prove nothing"
    submit = Path(pyspark.__file__).parent / "bin" / "spark-submit"
    command = [submit, "--master", "local[1]", "--driver-memory", "512m", "--conf", "spark.ui.enabled=false"]
    command += ["--py-files", zipped, "duemq_spark.py", "audit", duemq_store.path, "--json"]
    done = subprocess.run(
        list(map(str, command)), cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout[done.stdout.index("{") :])
    assert summary["delivered"] == audit.audit(duemq_store.path).totals["delivered"]


@pytest.fixture
def shared(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make commands in this process use the session of all tests: a session of their own takes seconds to start."""
    monkeypatch.setattr(spark, "stop", lambda: None)
    monkeypatch.setattr(session, "make_session", lambda *_, **__: spark)


@pytest.mark.usefixtures("shared")
def test_forecast(duemq_store: WrittenStore) -> None:
    waits = audit.audit(duemq_store.path).totals["pending"]
    done = CliRunner().invoke(main, ["forecast", str(duemq_store.path), "--rate", "0.01", "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert (found["rate"], found["messages"]) == (0.01, waits)
    told = CliRunner().invoke(main, ["forecast", str(duemq_store.path), "--rate", "0.01"]).stdout
    assert f"{waits} wait; the broker delivers 0 a second" in told
    assert "late from" in told


@pytest.mark.usefixtures("shared")
def test_sql(duemq_store: WrittenStore) -> None:
    records = oracle.contents(duemq_store.path).records
    query = "select topic, count(*) as number, sum(size) as bytes from messages group by topic"
    done = CliRunner().invoke(main, ["sql", str(duemq_store.path), query, "--format", "csv"])
    assert done.exit_code == 0, done.output
    rows = {row["topic"]: (int(row["number"]), int(row["bytes"])) for row in csv.DictReader(io.StringIO(done.stdout))}
    assert {topic: count for topic, (count, _) in rows.items()} == {
        topic: sum(record.topic == topic for record in records) for topic in {record.topic for record in records}
    }
    assert sum(size for _, size in rows.values()) == sum(record.size for record in records)
    # Two tables in one query; properties and bodies are read when they are named.
    query = (
        "select m.physical_offset, m.properties['TAGS'] as tag, length(m.body) as size from messages m "
        "join pending p on p.physical_offset = m.physical_offset order by p.due_ms"
    )
    done = CliRunner().invoke(main, ["sql", str(duemq_store.path), query, "--format", "json", "--limit", "20"])
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(lines) == 20
    at = {record.physical_offset: record for record in records}
    for line in lines:
        record = at[line["physical_offset"]]
        assert (line["tag"], line["size"]) == (record.properties.get("TAGS"), len(record.body))


@pytest.mark.usefixtures("shared")
def test_sql_of_a_part(duemq_store: WrittenStore) -> None:
    records = oracle.contents(duemq_store.path).records
    topic, middle = records[0].topic, records[len(records) // 2].store_ms
    moment = datetime.fromtimestamp(middle / 1000, UTC).isoformat(timespec="milliseconds")
    query = "select (select count(*) from messages) as m, (select count(*) from timers) as t"
    parts = (("--topic", topic), ("--since", moment), ("--until", moment), ())
    found = []
    for options in parts:
        done = CliRunner().invoke(main, ["sql", str(duemq_store.path), query, "--format", "json", *options])
        assert done.exit_code == 0, done.output
        found.append(json.loads(done.stdout))
    assert [row["m"] for row in found] == [
        sum(record.topic == topic for record in records),
        sum(record.store_ms >= middle for record in records),
        sum(record.store_ms < middle for record in records),
        len(records),
    ]
    assert {row["t"] for row in found} == {len(oracle.timer_units(duemq_store.path))}
    wrong = CliRunner().invoke(main, ["sql", str(duemq_store.path), query, "--since", "yesterday"])
    assert (wrong.exit_code, "'yesterday' is not a time" in wrong.stderr) == (2, True)


@pytest.mark.usefixtures("shared")
def test_what_spark_refuses_is_told_in_one_line(duemq_store: WrittenStore) -> None:
    done = CliRunner().invoke(main, ["sql", str(duemq_store.path), "selekt 1"])
    assert done.exit_code == 2
    assert done.stderr.startswith("duemq: Spark: ")
    assert done.stderr.count("\n") == 1
