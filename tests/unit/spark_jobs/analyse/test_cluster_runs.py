"""Runs of the command over several stores written by brokers of this process: one report of all of them, beside those
of each, full or incremental."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result
from pyarrow import fs

from duemq.spark_jobs import session
from duemq.spark_jobs.analyse import analyse
from duemq.spark_jobs.analyse.analyse import analyse_for_cluster
from duemq.spark_jobs.analyse.analysis import Analysis
from duemq.spark_jobs.analyse.cluster import StoreRun, analyse_cluster, finish, join
from duemq.spark_jobs.analyse.comparison import Comparison
from duemq.spark_jobs.analyse.history import Night
from duemq.spark_jobs.analyse.nights import nights
from duemq.spark_jobs.audit.audit import Missing, verify
from duemq.spark_jobs.cli.commands import main
from duemq.spark_jobs.errors import JobError
from duemq.spark_jobs.store import directories
from duemq.spark_jobs.store.local_files import distinct_names
from tests.spark.world import audit, faults, oracle
from tests.support.copies import copy_tree
from tests.unit.spark_jobs.analyse.test_cluster import check_percentile
from tests.unit.spark_jobs.compact_world import Broker
from tests.unit.spark_jobs.growing_world import MADE_MS, World, make_small
from tests.unit.spark_jobs.report.test_report import parse


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    make_small(monkeypatch)
    monkeypatch.setattr(session, "make_session", lambda *_, **__: pytest.fail("Spark was wanted"))
    yield
    Broker.let_go_of_all()


def world(root: Path, seed: int, count: int = 120, *, is_apache: bool = False, days: int = 0) -> World:
    """A broker with messages of all kinds, some of them delivered. `days`: how much later than others."""
    root.mkdir(parents=True)
    made = World(root, seed, is_apache=is_apache)
    made.clock.advance(days * 86_400_000)
    grow(made, count)
    return made


def grow(made: World, count: int) -> None:
    for number in range(count):
        made.chance.choice([made.send, made.schedule, made.timer])()
        if number % 10 == 9:
            made.pass_time()
    made.publish()


def joined(worlds: list[World], out: Path, *, is_kept: bool) -> tuple[Analysis, bytes]:
    """The analysis of a cluster, and its whole output."""
    runs = []
    for number, made in enumerate(worlds):
        into = out / str(number)
        shutil.rmtree(into, ignore_errors=True)
        found = analyse_for_cluster(
            lambda: pytest.fail("Spark was wanted"),
            str(made.copy),
            delay_levels=made.table,
            out=str(into),
            state=str(made.state) if is_kept else None,
            made_ms=MADE_MS,
        )
        runs.append(StoreRun(found, str(into), str(into / "report.html")))
    analysis = join("all", [run.analysed for run in runs], made_ms=MADE_MS)
    finish(analysis, runs, str(out))
    return analysis, msgspec.json.encode(analysis) + (out / "offenders.parquet").read_bytes()


def test_runs_of_what_came_since_say_the_same_of_the_cluster(tmp_path: Path) -> None:
    """Incremental runs say the same of a cluster as full ones, with different tables of levels, days apart, of duemq
    and of Apache's; and they agree with the plain rules."""
    worlds = [world(tmp_path / "a", 1), world(tmp_path / "b", 2, is_apache=True), world(tmp_path / "c", 3, days=50)]
    worlds[2].table = "2s 5s 30s 1h"
    for number in range(3):
        _, expected = joined(worlds, tmp_path / "full", is_kept=False)
        found, kept = joined(worlds, tmp_path / "kept", is_kept=True)
        assert kept == expected, number
        grow(worlds[number], 30)
    assert all(made.told == [] for made in worlds)
    found, _ = joined(worlds[::2], tmp_path / "ours", is_kept=True)
    scheduled = [one for made in worlds[::2] for one in audit.audit(made.copy).scheduled]
    totals = Counter(one.verdict for one in scheduled)
    assert {verdict: getattr(found.audit, verdict) for verdict in totals} == totals
    late = [one.late_ms for one in scheduled if one.deliveries and one.late_ms is not None]
    assert found.audit.lateness.count == len(late)
    for name, told in found.audit.lateness.percentiles_ms.items():
        check_percentile(told, late, float(name[1:]))
    (topic,) = found.late_by_topic
    assert (topic.name, topic.count, topic.max_ms) == ("orders", len(late), max(late))
    records = [record for made in worlds[::2] for record in oracle.contents(made.copy).records]
    assert found.bytes == sum(record.size for record in records)
    assert {one.topic: one.bytes for one in found.topics} == {
        name: sum(record.size for record in records if record.topic == name)
        for name in {record.topic for record in records}
    }


def test_a_cluster_in_python(tmp_path: Path) -> None:
    """The Python function gives the same figures for a cluster as the joined parts, and names a store that cannot be
    read."""
    worlds = [world(tmp_path / name, seed) for name, seed in (("a", 1), ("b", 2))]
    (tmp_path / "c" / "store").mkdir(parents=True)
    expected, _ = joined(worlds, tmp_path / "out", is_kept=False)

    def no_spark() -> Any:
        pytest.fail("Spark was wanted")

    table = worlds[0].table
    found = analyse_cluster(no_spark, f"{tmp_path}/?/store", delay_levels=table, made_ms=MADE_MS)
    assert found.audit.stores == [f"{tmp_path}/{name}/store" for name in "abc"]
    assert found.audit.missing == [Missing(f"{tmp_path}/c/store", "is empty: no broker wrote here")]
    names = ("traffic", "topics", "keys", "late_by_topic", "lateness", "ahead", "busiest", "forecast", "consumers")
    for name in names:
        assert getattr(found, name) == getattr(expected, name), name
    listed = analyse_cluster(no_spark, [str(made.copy) for made in worlds], delay_levels=table, made_ms=MADE_MS)
    assert (listed.audit.missing, listed.audit.pending) == ([], expected.audit.pending)
    with pytest.raises(JobError, match="none of the 1 stores could be read"):
        analyse_cluster(no_spark, [str(tmp_path / "c" / "store")])


# --- the command


def run(*arguments: str | Path) -> Result:
    done = CliRunner().invoke(main, ["analyse", *map(str, arguments)])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of two brokers' stores: `a/store` and `c/store`."""
    root = tmp_path_factory.mktemp("clusters")
    for name, seed in (("a", 1), ("c", 2)):
        made = world(root / "worlds" / name, seed, 150)
        (root / "data" / name).mkdir(parents=True)
        made.copy.rename(root / "data" / name / "store")
    return root / "data"


@pytest.fixture
def stores(written: Path, tmp_path: Path) -> Path:
    """Their directory of a test's own, with an invalid one in between: `a/store`, `b/store`, ..."""
    copy_tree(written, tmp_path / "data")
    (tmp_path / "data" / "b" / "store").mkdir(parents=True)
    return tmp_path / "data"


def lose(store: Path, number: int) -> faults.AuditFault:
    """Remove the delivery of a message, so that it counts as lost."""
    mine = [one for one in audit.audit(store).of("delivered") if one.level]
    return faults.remove_delivery(store, mine[number])


def cluster_nights(folder: Path) -> list[tuple[Path, Night]]:
    return [(folder / one.name, one.night) for one in nights(str(folder)) if one.night.stores]


def test_the_nights_of_a_cluster(stores: Path, tmp_path: Path) -> None:
    pattern, folder, told = f"{stores}/*/store", tmp_path / "nights", tmp_path / "told"
    hook = ("--hook", f"cat > {told}")
    first = lose(stores / "a" / "store", 3)
    done = run(pattern, "--nights", folder, *hook)
    assert done.exit_code == 1, done.output
    assert f"{stores}/b/store: is empty: no broker wrote here" in done.stderr
    assert f"lost: orders {first.unique_key} at {first.origin_offset} of {stores}/a/store, due" in done.stdout
    ((directory, night),) = cluster_nights(folder)
    assert [one.store for one in night.stores] == [f"{stores}/{name}/store" for name in "abc"]
    assert [one.name is None for one in night.stores] == [False, True, False]
    assert (night.mood, night.run.store, night.compared_ms) == ("bad", pattern, None)
    hooked = json.loads(told.read_text())
    assert (hooked["exit"], hooked["store"], hooked["report"]) == (1, pattern, str(directory / "report.html"))
    assert [(one["store"][-7], one["report"] is None, one["error"]) for one in hooked["stores"]] == [
        ("a", False, None), ("b", True, "is empty: no broker wrote here"), ("c", False, None),
    ]  # fmt: skip
    page = parse((directory / "report.html").read_text(encoding="utf-8"))
    links = [attrs["href"] for tag, attrs in page.tags if tag == "a" and ".." in attrs["href"]]
    assert len(links) == 3, "all nights, and the reports of the two stores that could be read"
    for link in links:
        assert (directory / link).is_file()
    assert "1 of 3 stores could not be read. In the others: 1 scheduled message was lost." in page.text
    assert "is empty: no broker wrote here" in page.text
    rows = pq.read_table(directory / "offenders.parquet").to_pylist()
    assert [(row["store"], row["unique_key"]) for row in rows if row["status"] == "lost"] == [
        (f"{stores}/a/store", first.unique_key)
    ]
    summary = verify((directory / "audit.json").read_bytes())
    assert [one.store for one in summary.missing] == [f"{stores}/b/store"]
    checked = CliRunner().invoke(main, ["verify", str(directory / "audit.json")])
    assert f"without {stores}/b/store, which could not be read: is empty: no broker" in checked.stdout
    made = json.loads((directory / "analysis.json").read_text())
    assert made["audit"]["lost"] == 1
    assert [row["store"] for row in pq.read_table(directory / "parquet" / "stores.parquet").to_pylist()] == [
        f"{stores}/{name}/store" for name in "abc"
    ]

    # The night after: another message is lost, in another store; the missing store is there again.
    second = lose(stores / "c" / "store", 2)
    (stores / "b" / "store" / "commitlog").mkdir()
    done = run(pattern, "--nights", folder, "--fail-worse", *hook)
    assert done.exit_code == 1, done.output
    (directory, night), _ = cluster_nights(folder)
    compared = msgspec.json.decode((directory / "comparison.json").read_bytes(), type=Comparison)
    assert (compared.new, compared.known, compared.gone) == ({"lost": 1}, {"lost": 1}, {})
    assert [(one.store, one.unique_key) for one in compared.new_offenders] == [(f"{stores}/c/store", second.unique_key)]
    assert compared.first_read == [f"{stores}/b/store"]
    assert "over the limit: 1 new lost" in done.stderr
    assert night.new == 1
    rows = pq.read_table(directory / "offenders.parquet").to_pylist()
    assert {row["unique_key"]: row["is_new"] for row in rows if row["status"] == "lost"} == {
        first.unique_key: False, second.unique_key: True,
    }  # fmt: skip
    index = parse((folder / "index.html").read_text(encoding="utf-8"))
    links = [attrs["href"] for tag, attrs in index.tags if tag == "a"]
    assert links[0] == f"{directory.name}/report.html", "the cluster is told before its stores"
    # For a removed store and a kept night: the files linked from the cluster's report stay, too.
    shutil.rmtree(stores / "b")
    done = run(pattern, "--nights", folder, "--keep-nights", "1", "--retired", f"{stores}/b/store")
    ((directory, night),) = cluster_nights(folder)
    compared = msgspec.json.decode((directory / "comparison.json").read_bytes(), type=Comparison)
    assert (compared.new, compared.known, compared.stores_gone) == ({}, {"lost": 2}, [f"{stores}/b/store"])
    assert sorted(one.name or "" for one in night.stores) == sorted(
        path.name for path in folder.iterdir() if path.is_dir() and (path / "night.json").exists()
        and path != directory and f"{stores}/b/store" not in (path / "night.json").read_text()
    )  # fmt: skip


@pytest.mark.parametrize("option", ["--nights", "--out"])
def test_a_store_that_is_not_there_any_more_is_missing_until_it_is_retired(
    stores: Path, tmp_path: Path, option: str
) -> None:
    """A store that has gone counts as missing until it is retired, also if it leaves one store alone, or a link that
    leads nowhere; a store that was never there does not."""
    pattern, where = f"{stores}/*/store", (option, tmp_path / "there", "--state", tmp_path / "state")
    shutil.rmtree(stores / "b")
    assert run(pattern, *where).exit_code == 0
    (stores / "c").rename(tmp_path / "c")
    for _ in range(2):
        done = run(pattern, *where)
        assert done.exit_code == 2, done.output
        assert f"{stores}/c/store: the last run had this store, which no longer exists" in done.stderr
        assert "1 of 2 stores" in done.stdout
    (stores / "c").mkdir()
    (stores / "c" / "store").symlink_to("/nowhere")
    done = run(pattern, *where)
    assert (done.exit_code, "1 of 2 stores" in done.stdout) == (2, True)
    assert f"{stores}/c/store: " in done.stderr
    shutil.rmtree(stores / "c")
    done = run(pattern, *where, "--retired", os.path.relpath(f"{stores}/c/store"))
    for _ in range(2):
        assert (done.exit_code, done.stderr) == (0, "")
        assert "1 of 1 stores" in done.stdout
        done = run(pattern, *where)


def test_what_the_report_of_a_cluster_links_stays_with_it(stores: Path, tmp_path: Path) -> None:
    """The nights that the report of a cluster links stay with it, also if a store has had newer nights of its own
    since; they go with the cluster's."""
    shutil.rmtree(stores / "b")
    folder = tmp_path / "nights"
    keep = ("--nights", folder, "--keep-nights", "1")
    run(f"{stores}/*/store", *keep)
    ((_, night),) = cluster_nights(folder)
    for _ in range(2):
        run(f"{stores}/a/store", *keep)
        for one in night.stores:
            assert one.name is not None
            assert (folder / one.name / "report.html").is_file()
    assert len(nights(str(folder))) == 4
    run(f"{stores}/*/store", *keep)
    assert len(nights(str(folder))) == 3
    ((_, after),) = cluster_nights(folder)
    assert not {one.name for one in night.stores} & {one.name for one in after.stores}


def test_a_cluster_in_one_directory(stores: Path, tmp_path: Path) -> None:
    shutil.rmtree(stores / "b")
    out = tmp_path / "out"
    for number in range(2):
        done = run(f"{stores}/*/store", "--out", out, "--state", tmp_path / "state")
        assert (done.exit_code, done.stderr) == (0, "")
        assert f"report: {out}/report.html" in done.stdout
        assert (out / "comparison.json").exists() == bool(number)
    assert sorted(path.name for path in (out / "stores").iterdir()) == ["a", "c"]
    page = parse((out / "report.html").read_text(encoding="utf-8"))
    links = [attrs["href"] for tag, attrs in page.tags if tag == "a" and not attrs["href"].startswith("#")]
    assert links == ["stores/a/report.html", "stores/c/report.html"]
    each = [json.loads((out / "stores" / name / "audit.json").read_text()) for name in ("a", "c")]
    whole = json.loads((out / "audit.json").read_text())
    for field in ("scheduled", "delivered", "pending", "records"):
        assert whole[field] == sum(one[field] for one in each) > 0
    assert len((out / "history.jsonl").read_text().splitlines()) == 2


def test_a_cluster_behind_a_uri(stores: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files of a cluster and of each store go to a URI, and the next run finds those that it compares with."""
    bucket = tmp_path / "bucket"
    bucket.mkdir()
    monkeypatch.setattr(directories, "file_system", lambda _: (fs.LocalFileSystem(), str(bucket)))
    done = run(f"{stores}/*/store", "--out", "hdfs://name-node/reports")
    assert done.exit_code == 2
    assert "report: hdfs://name-node/reports/stores/a/report.html" in done.stdout
    assert "report: hdfs://name-node/reports/report.html" in done.stdout
    lost = lose(stores / "c" / "store", 2)
    done = run(f"{stores}/*/store", "--out", "hdfs://name-node/reports")
    assert done.exit_code == 1
    compared = msgspec.json.decode((bucket / "comparison.json").read_bytes(), type=Comparison)
    assert [(one.store, one.unique_key) for one in compared.new_offenders] == [(f"{stores}/c/store", lost.unique_key)]
    for folder in (bucket, bucket / "stores" / "a", bucket / "stores" / "c"):
        assert {path.name for path in folder.iterdir()} >= {
            "report.html", "analysis.json", "audit.json", "offenders.parquet", "comparison.json", "parquet",
        }  # fmt: skip
    assert not (bucket / "stores" / "b").exists()


def test_a_disk_that_does_not_give_a_file_hides_no_other_store(
    stores: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = analyse.analyse_for_cluster

    def broken(session: Any, path: str, **options: Any) -> analyse.Analysed:
        if path == f"{stores}/a/store":
            raise OSError(errno.EIO, os.strerror(errno.EIO), f"{path}/commitlog/00000000000000000000")
        return whole(session, path, **options)

    monkeypatch.setattr(analyse, "analyse_for_cluster", broken)
    done = run(f"{stores}/*/store", "--nights", tmp_path / "nights")
    assert done.exit_code == 2
    ((directory, night),) = cluster_nights(tmp_path / "nights")
    assert [one.name is None for one in night.stores] == [True, True, False]
    assert "Input/output error" in parse((directory / "report.html").read_text(encoding="utf-8")).text


def test_limits_are_of_the_whole(stores: Path, tmp_path: Path) -> None:
    shutil.rmtree(stores / "b")
    for name, number in (("a", 2), ("c", 5)):
        store = stores / name / "store"
        faults.double_delivery(store, [one for one in audit.audit(store).of("delivered") if one.level][number])
    arguments = (f"{stores}/*/store", "--out", tmp_path / "out")
    assert run(*arguments, "--fail-twice", "2").exit_code == 0
    done = run(*arguments, "--fail-twice", "1")
    assert (done.exit_code, done.stderr) == (3, "over the limit: delivered more than once: 2, over 1\n")


def test_where_no_store_can_be_read_there_is_no_report(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name / "store").mkdir(parents=True)
    done = run(f"{tmp_path}/*/store", "--nights", tmp_path / "nights", "--hook", f"cat > {tmp_path}/told")
    assert done.exit_code == 2
    assert done.stderr.splitlines()[-1] == f"duemq: {tmp_path}/*/store: none of the 2 stores could be read"
    assert json.loads((tmp_path / "told").read_text())["exit"] == 2
    done = run(f"{tmp_path}/*/store", "--nights", tmp_path / "nights", "--previous", "x")
    assert (done.exit_code, "--previous is for one store" in done.stderr) == (2, True)


@pytest.mark.parametrize(
    ("pattern", "paths", "names"),
    [
        ("/data/*/store", ["/data/a/store", "/data/b b/store"], ["a", "b%20b"]),
        ("file:///data/*/store", ["/data/a/store"], ["a"]),
        ("data/?/*/", ["data/x/y/", "data/x/y+z/"], ["x+y", "x+y%2Bz"]),
        ("s3://k:s@bucket/*/st?region=x", ["s3://k:s@bucket/a/st?region=x"], ["a"]),
    ],
)
def test_names_for_the_stores_of_a_pattern(pattern: str, paths: list[str], names: list[str]) -> None:
    assert distinct_names(pattern, paths) == names


def test_the_report_of_one_store_is_as_ever(stores: Path, tmp_path: Path) -> None:
    """A pattern that names one store gives the report of that store alone."""
    for name in "bc":
        shutil.rmtree(stores / name)
    outs: list[dict[str, Any]] = []
    for number, store in enumerate((f"{stores}/*/store", f"{stores}/a/store")):
        assert run(store, "--out", tmp_path / str(number)).exit_code == 0
        assert not (tmp_path / str(number) / "stores").exists()
        made = json.loads((tmp_path / str(number) / "analysis.json").read_text())
        for part in (made, made["audit"]):
            part["made_ms"] = part["digest"] = None
        outs.append(made)
    assert outs[0] == outs[1]
    assert "stores" not in outs[0]
    assert "cluster" not in outs[0]["audit"]


def test_a_store_of_several_names_is_counted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = world(tmp_path / "a", 1)
    (tmp_path / "link").mkdir()
    (tmp_path / "link" / "store").symlink_to(made.copy)
    told: list[str] = []
    names = [str(made.copy), f"{made.copy}/", str(tmp_path / "link" / "store")]
    found = analyse_cluster(lambda: pytest.fail("Spark was wanted"), names, delay_levels=made.table, tell=told.append)
    alone = analyse_cluster(lambda: pytest.fail("Spark was wanted"), names[:1], delay_levels=made.table)
    assert found.audit.records == alone.audit.records
    assert told == [f"{name} is {made.copy} by another name, and is read once" for name in names[1:]]
    monkeypatch.chdir(tmp_path)
    options = ("--out", "out", "--delay-levels", made.table)
    result = CliRunner().invoke(main, ["analyse", "*/store", *options])
    assert result.stderr.count("link/store is a/store by another name, and is read once") == 1
    assert re.search(rf"^scheduled +{alone.audit.scheduled}$", result.stdout, re.MULTILINE)
