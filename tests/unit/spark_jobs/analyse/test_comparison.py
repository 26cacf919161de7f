"""An audit compared with the one before it, by means of sets."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from duemq.spark_jobs.analyse.comparison import STATUSES, Before, Compared, Comparison, Earlier, compare_cluster
from duemq.spark_jobs.analyse.history import Lag
from duemq.spark_jobs.audit.audit import Cluster, Lateness, Missing, Summary
from duemq.spark_jobs.errors import JobError
from duemq.spark_jobs.store.local_files import is_same
from tests.unit.spark_jobs.report import report_analyses as given_by
from tests.unit.spark_jobs.report.report_analyses import write_audit

IDENTITIES = st.sets(
    st.tuples(st.sampled_from(STATUSES), st.integers(0, 12), st.sampled_from((None, 1, 2))), max_size=25
)
Identity = tuple[str, int, int | None]


def summary_of(identities: set[Identity], **changes: Any) -> Summary:
    offenders = [
        given_by.offender(at, what, physical_offset=at, store_ms=ms) for what, at, ms in sorted(identities, key=str)
    ]
    return given_by.summary(offenders=offenders, **changes)


def compared(
    before: Summary, now: Summary, lags: tuple[list[Lag], list[Lag]] = ([], [])
) -> tuple[Comparison, list[dict[str, Any]]]:
    with TemporaryDirectory() as directory:
        one, other = Path(directory) / "before", Path(directory) / "now"
        write_audit(before, one)
        write_audit(now, other)
        found = Earlier(str(one), lags[0]).compare(now, str(other), lags[1])
        return found, pq.read_table(other / "offenders.parquet").to_pylist()


@given(IDENTITIES, IDENTITIES)
def test_what_is_new_known_and_gone(before: set[Identity], now: set[Identity]) -> None:
    found, rows = compared(summary_of(before), summary_of(now))
    assert found.new == Counter(what for what, _, _ in now - before)
    assert found.known == Counter(what for what, _, _ in now & before)
    assert found.gone == Counter(what for what, _, _ in before - now)
    assert found.is_worse == bool(now - before)
    assert {(row["status"], row["physical_offset"], row["store_ms"]): row["is_new"] for row in rows} == {
        one: one not in before for one in now
    }
    told = [(one.what, one.physical_offset, one.store_ms) for one in found.new_offenders]
    assert set(told) == now - before
    ranks = [(STATUSES.index(what), at) for what, at, _ in told]
    assert ranks == sorted(ranks)
    assert msgspec.json.decode(msgspec.json.encode(found), type=Comparison) == found


def test_new_offenders_are_told_with_all_that_is_known_of_them() -> None:
    new = given_by.offender(5, "twice"), given_by.offender(2, "lost")
    old = [given_by.offender(number, "twice") for number in range(200, 500)]
    found, _ = compared(given_by.summary(offenders=old), given_by.summary(offenders=[*old, *new]))
    assert (found.new, found.known, found.gone) == ({"lost": 1, "twice": 1}, {"twice": 300}, {})
    assert found.new_offenders == [new[1], new[0]]


def test_many_new_offenders_are_counted_and_the_first_told() -> None:
    offenders = [given_by.offender(number, "lost") for number in range(5000)]
    found, rows = compared(given_by.summary(), given_by.summary(offenders=offenders))
    assert found.new == {"lost": 5000}
    assert found.new_offenders == offenders[:100]
    assert sum(row["is_new"] for row in rows) == 5000


def late(**percentiles: int) -> Lateness:
    return Lateness(100, 0, 1.0, percentiles)


@pytest.mark.parametrize(
    ("before", "now", "worse"),
    [
        ({}, {}, []),
        ({"damaged": 1, "overdue": 5}, {"damaged": 1, "overdue": 4}, []),
        ({"damaged": 1, "overdue": 5}, {"damaged": 2, "overdue": 6}, ["damaged stretches", "overdue"]),
        ({"lateness": late(p99=8)}, {"lateness": late(p99=17)}, []),
        ({"lateness": late(p99=800)}, {"lateness": late(p99=900)}, []),
        ({"lateness": late(p99=8, p100=90)}, {"lateness": late(p99=18, p100=4000)}, ["late, p99", "latest"]),
        ({}, {"lateness": late(p99=18)}, ["late, p99"]),
    ],
)
def test_what_grew_worse(before: dict[str, Any], now: dict[str, Any], worse: list[str]) -> None:
    found, _ = compared(given_by.summary(**before), given_by.summary(**now))
    assert [one.name for one in found.worse] == worse
    assert found.is_worse == bool(worse)


def test_groups_that_are_further_behind_are_told() -> None:
    before = [Lag("billing", "orders", 5, 10_000), Lag("mailer", "mails", 5, 10_000), Lag("gone", "x", 0, 0)]
    now = [Lag("billing", "orders", 900, 90_000), Lag("mailer", "mails", 9, 12_000), Lag("new", "y", 9, 900_000)]
    found, _ = compared(given_by.summary(), given_by.summary(), (before, now))
    assert [(one.name, one.before, one.now) for one in found.worse] == [("billing behind at orders", 10_000, 90_000)]


def cluster_of(stores: dict[str, Summary], p99: int, **changes: Any) -> Summary:
    """The audit of a cluster of these stores."""
    missing = [Missing(name, "is empty") for name in changes.pop("missing", ())]
    names = [*stores, *(one.store for one in missing)]
    return given_by.summary(cluster=Cluster(names, missing), lateness=late(p99=p99), store="/*", **changes)


def compared_of(before: Summary, now: Summary, lags: tuple[int, int]) -> Compared:
    """Compare a store with its run before, with these lags of one group."""
    with TemporaryDirectory() as directory:
        write_audit(before, Path(directory) / "before")
        write_audit(now, Path(directory) / "now")
        earlier = Earlier(str(Path(directory) / "before"), [Lag("billing", "orders", 1, lags[0])])
        mine = [Lag("billing", "orders", 1, lags[1])]
        return Compared(now, mine, earlier, earlier.compare(now, str(Path(directory) / "now"), mine))


def test_a_cluster_is_compared_store_by_store() -> None:
    """A cluster is compared store by store: the same offsets in another store are another offender; sums cover the
    stores that have a run before."""
    one = compared_of(
        summary_of({("lost", 1, 1), ("twice", 9, 9)}, store="/a", overdue=5),
        summary_of({("lost", 1, 1), ("lost", 2, 2)}, store="/a", overdue=9),
        (10_000, 20_000),
    )
    other = compared_of(
        summary_of({("twice", 2, 2)}, store="/b", overdue=8),
        summary_of({("twice", 2, 2), ("twice", 1, 1)}, store="/b", overdue=3, damaged=1),
        (50_000, 300_000),
    )
    stores = {"/a": one.summary, "/b": other.summary}
    before = Before("/*", 77, late(p99=8), cluster=Cluster(["/a", "/b"], []))
    found = compare_cluster(cluster_of(stores, 400), [one, other], before)
    assert found is not None
    assert (found.made_ms, found.store) == (77, "/*")
    assert (found.new, found.known, found.gone) == (
        {"lost": 1, "twice": 1}, {"lost": 1, "twice": 1}, {"twice": 1},
    )  # fmt: skip
    assert [(each.store, each.what, each.physical_offset) for each in found.new_offenders] == [
        ("/a", "lost", 2), ("/b", "twice", 1),
    ]  # fmt: skip
    assert [(each.name, each.before, each.now) for each in found.worse] == [
        ("damaged stretches", 0, 1), ("late, p99", 8, 400), ("billing behind at orders", 50_000, 300_000),
    ]  # fmt: skip
    assert msgspec.json.decode(msgspec.json.encode(found), type=Comparison) == found


def test_lateness_of_a_cluster_is_compared_where_both_runs_have_read_the_same() -> None:
    one = compared_of(summary_of(set(), store="/a"), summary_of(set(), store="/a"), (0, 0))
    stores = {"/a": one.summary}
    for before, now in (
        (Cluster(["/a", "/b"], []), cluster_of(stores, 400, missing=["/b"])),  # one is missing now
        (Cluster(["/a"], []), cluster_of(stores | {"/b": given_by.summary()}, 400)),  # one is new
        (Cluster(["/a", "/b"], [Missing("/b", "?")]), cluster_of(stores | {"/b": given_by.summary()}, 400)),
        (Cluster(["/a", "/b"], []), cluster_of(stores, 400)),  # one is gone
    ):
        found = compare_cluster(now, [one], Before("/*", 77, late(p99=8), cluster=before))
        assert found is not None
        assert (found.worse, found.is_worse) == ([], False)
        assert found.first_read == (["/b"] if "/b" in now.stores and not now.missing else [])
        assert found.stores_gone == (["/b"] if "/b" not in now.stores and "/b" in before.stores else [])
    # Without an earlier audit of the cluster there are those of its stores.
    found = compare_cluster(cluster_of(stores, 400), [one], None)
    assert found is not None
    assert (found.worse, found.made_ms) == ([], given_by.summary().made_ms)
    assert compare_cluster(cluster_of(stores, 400), [], None) is None


def test_an_audit_is_compared_again_as_the_first_time(tmp_path: Path) -> None:
    before, now = summary_of({("lost", 1, 1)}), summary_of({("lost", 1, 1), ("twice", 2, 2)})
    write_audit(before, tmp_path / "before")
    write_audit(now, tmp_path / "now")
    found = [Earlier(str(tmp_path / "before")).compare(now, str(tmp_path / "now")) for _ in range(2)]
    assert found[0] == found[1]
    assert sorted(path.name for path in (tmp_path / "now").iterdir()) == ["audit.json", "offenders.parquet"]


def test_what_is_no_audit_is_told(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"has no audit\.json, so there is nothing to compare with"):
        Earlier(str(tmp_path))
    write_audit(given_by.summary(), tmp_path)
    (tmp_path / "offenders.parquet").write_bytes(b"PAR1, but not quite")
    with pytest.raises(JobError, match="cannot be read"):
        Earlier(str(tmp_path))
    (tmp_path / "offenders.parquet").unlink()
    with pytest.raises(JobError, match=r"has no offenders\.parquet"):
        Earlier(str(tmp_path))
    (tmp_path / "audit.json").write_text("[1]")
    with pytest.raises(JobError, match="cannot be read"):
        Earlier(str(tmp_path))
    for name in ("audit.json", "offenders.parquet"):
        write_audit(given_by.summary(), tmp_path)
        (tmp_path / name).unlink()
        os.mkfifo(tmp_path / name)
        with pytest.raises(JobError, match=rf"cannot be read: .*is not a regular file: '{tmp_path}/{name}'"):
            Earlier(str(tmp_path))
        (tmp_path / name).unlink()
    with pytest.raises(JobError, match="this has to be a directory of this machine"):
        Earlier("hdfs://name-node/report")


def test_names_of_a_store() -> None:
    assert is_same("/var/lib/duemq/", "/var/lib//duemq")
    assert not is_same("/var/lib/duemq", "/var/lib/duemq2")
    assert is_same("file:///var/lib/duemq", "/var/lib/./duemq")
    assert is_same("s3://key:secret@bucket/store/?region=x", "s3://bucket/store")


def test_an_audit_of_before_there_was_a_figure_can_be_compared(tmp_path: Path) -> None:
    summary: dict[str, Any] = msgspec.to_builtins(given_by.summary(overdue=3, damaged=1))
    write_audit(given_by.summary(), tmp_path)
    del summary["overdue"], summary["destroyed"]
    (tmp_path / "audit.json").write_bytes(msgspec.json.encode(summary))
    before = Earlier(str(tmp_path)).before
    assert (before.overdue, before.damaged) == (0, 1)
