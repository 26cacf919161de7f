"""An audit compared with the one before it: which offenders are new, known or gone, and which figures grew worse.

Two offenders are the same if they agree in status, physical offset and store time. So both audits must be of one store;
after a compaction, which moves records, all offenders are new.

A cluster is compared store by store, each store with the last run that read it. So if a store cannot be read one night,
none of its offenders counts as new, or as gone, the night after. The cluster's comparison has sums over the stores, and
percentiles if both runs read the same stores.
"""

from __future__ import annotations

import os
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from duemq.spark_jobs.audit.audit import MAX_LISTED, Cluster, Lateness, Offender, Summary
from duemq.spark_jobs.errors import JobError
from duemq.spark_jobs.store.local_files import local_path
from duemq.storage.regular_files import open_regular, read_regular

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from duemq.spark_jobs.analyse.history import Lag

STATUSES: Final = ("lost", "destroyed", "twice", "unclaimed")
"""Statuses of offenders, the worst first."""
_IDENTITY: Final = ("status", "physical_offset", "store_ms")
_COUNTS: Final = {"damaged": "damaged stretches", "overdue": "overdue"}
"""Figures of a summary that are worse if greater. Offenders are not among them: new offenders are listed instead."""
_PERCENTILES: Final = {"p99": "late, p99", "p100": "latest"}
_LATE_MS: Final = 10
"""Least difference of lateness, in ms, that counts as grown."""
_LATE_FACTOR: Final = 1.5
"""Least factor by which a lateness must grow to count."""
_BEHIND_MS: Final = 60_000
"""Least growth, in ms, of how far behind a consumer group is that counts."""


class Before(msgspec.Struct):
    """The fields of the earlier audit.json that a comparison needs."""

    store: str
    made_ms: int
    lateness: Lateness
    damaged: int = 0
    overdue: int = 0
    cluster: Cluster | None = None


class Worse(msgspec.Struct):
    """A figure that grew. `unit`: "count" or "ms"."""

    name: str
    unit: str
    before: int
    now: int


class Comparison(msgspec.Struct, omit_defaults=True):
    """comparison.json. Offenders by status: `new`; `known`, those that the audit before had too; and `gone`, those that
    only the audit before had."""

    made_ms: int
    """The time of the audit before, ms since the epoch."""
    store: str
    """The name of the store in the audit before."""
    new: dict[str, int]
    known: dict[str, int]
    gone: dict[str, int]
    worse: list[Worse]
    new_offenders: list[Offender]
    """The first of the new ones, the worst first; the column is_new of offenders.parquet marks all."""
    first_read: list[str] = []
    """Stores of a cluster without a run before: their offenders count neither as new nor as known."""
    stores_gone: list[str] = []
    """Stores of a cluster that were taken away since."""

    @property
    def is_worse(self) -> bool:
        """Whether there are new offenders, or a figure grew."""
        return bool(sum(self.new.values()) or self.worse)


class Earlier:
    """The audit before, read from the files in its directory."""

    def __init__(self, directory: str, lags: Sequence[Lag] = ()) -> None:
        """`lags`: those of consumer groups at that time. Raises JobError if the files are missing or cannot be read."""
        directory = local_path(directory)
        self.before = read_before(directory)
        with _readable(directory):
            self.offenders = _identities(directory)
        self.lags = {(lag.consumer_group, lag.topic): lag.behind_ms for lag in lags}

    def compare(self, summary: Summary, out: str, lags: Sequence[Lag] = ()) -> Comparison:
        """Compare an audit, whose files are in the directory `out`, with this one; add a column is_new to its
        offenders.parquet. Raises JobError."""
        path = os.path.join(local_path(out), "offenders.parquet")
        try:
            table = pq.read_table(path)
            is_new = _is_new(_identity(table), self.offenders)
            at = table.schema.get_field_index("is_new")
            table = table.remove_column(at) if at >= 0 else table
            table = table.append_column("is_new", is_new)
            pq.write_table(table, f"{path}.tmp", compression="zstd")
            os.replace(f"{path}.tmp", path)
        except (OSError, pa.ArrowException) as error:
            raise JobError(f"{path}: {error}") from None
        gone = self.offenders.filter(_is_new(self.offenders, _identity(table)))
        return Comparison(
            made_ms=self.before.made_ms,
            store=self.before.store,
            new=_by_status(table.filter(is_new)),
            known=_by_status(table.filter(pc.invert(is_new))),
            gone=_by_status(gone),
            worse=[*_worse(self.before, summary), *_further_behind(self.lags, lags)],
            new_offenders=_first(table.filter(is_new)),
        )


def read_before(directory: str) -> Before:
    """Return what a comparison needs of an audit, from its files in a directory. Raises JobError if they are missing or
    damaged."""
    with _readable(directory):
        return msgspec.json.decode(read_regular(os.path.join(directory, "audit.json")), type=Before)


@contextmanager
def _readable(directory: str) -> Iterator[None]:
    """Raise JobError for errors in reading the files of an audit in a directory."""
    try:
        yield
    except FileNotFoundError as error:
        name = os.path.basename(error.filename or "offenders.parquet")
        raise JobError(f"{directory}: has no {name}, so there is nothing to compare with") from None
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, pa.ArrowException, KeyError) as error:
        raise JobError(f"{directory}: its audit cannot be read: {error}") from None


class Compared(NamedTuple):
    """A store of a cluster, compared with its own run before."""

    summary: Summary
    lags: Sequence[Lag]
    earlier: Earlier
    comparison: Comparison


def compare_cluster(summary: Summary, stores: Sequence[Compared], before: Before | None) -> Comparison | None:
    """Return the comparison of a cluster, from those of all its stores that have one. `before`: the cluster's own audit
    before. None if no store has one."""
    if not stores:
        return None
    missing = {one.store for one in summary.missing}
    read = {store for store in summary.stores if store not in missing}
    known = {one.summary.store for one in stores}
    is_same_whole = before is not None and _read_of(before) == read == known
    made_ms = before.made_ms if before is not None else min(one.comparison.made_ms for one in stores)
    earlier = Before(
        summary.store,
        made_ms,
        before.lateness if before is not None and is_same_whole else summary.lateness,
        sum(one.earlier.before.damaged for one in stores),
        sum(one.earlier.before.overdue for one in stores),
    )
    damaged, overdue = (sum(getattr(one.summary, name) for one in stores) for name in ("damaged", "overdue"))
    now = Before(summary.store, summary.made_ms, summary.lateness, damaged, overdue)
    lags_before: dict[tuple[str, str], int] = {}
    lags: dict[tuple[str, str], Lag] = {}
    for one in stores:
        for key, behind_ms in one.earlier.lags.items():
            lags_before[key] = max(lags_before.get(key, 0), behind_ms)
        for lag in one.lags:
            key = (lag.consumer_group, lag.topic)
            lags[key] = max(lags.get(key, lag), lag, key=lambda each: each.behind_ms)
    new = [
        msgspec.structs.replace(offender, store=one.summary.store)
        for one in stores
        for offender in one.comparison.new_offenders
    ]
    there = set(summary.stores)
    return Comparison(
        made_ms=made_ms,
        store=summary.store,
        new=_summed(one.comparison.new for one in stores),
        known=_summed(one.comparison.known for one in stores),
        gone=_summed(one.comparison.gone for one in stores),
        worse=[*_worse(earlier, now), *_further_behind(lags_before, list(lags.values()))],
        new_offenders=worst_first(new),
        first_read=[store for store in summary.stores if store in read - known],
        stores_gone=[store for store in stores_of(before) if store not in there],
    )


def worst_first(offenders: Iterable[Offender]) -> list[Offender]:
    """Return the first MAX_LISTED offenders, ordered by status, the worst first."""
    return sorted(offenders, key=lambda one: STATUSES.index(one.what))[:MAX_LISTED]


def stores_of(before: Before | None) -> list[str]:
    """Return the stores of a cluster in the audit before; none if it was of one store."""
    return before.cluster.stores if before is not None and before.cluster is not None else []


def _read_of(before: Before) -> set[str]:
    missing = {one.store for one in before.cluster.missing} if before.cluster is not None else set()
    return set(stores_of(before)) - missing


def _summed(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total = Counter[str]()
    for each in counts:
        total.update(each)
    return {status: total[status] for status in STATUSES if total[status]}


def _further_behind(before: Mapping[tuple[str, str], int], lags: Sequence[Lag]) -> list[Worse]:
    found = []
    for lag in lags:
        behind_ms = before.get((lag.consumer_group, lag.topic))
        if behind_ms is not None and _has_grown(behind_ms, lag.behind_ms, _BEHIND_MS):
            found.append(Worse(f"{lag.consumer_group} behind at {lag.topic}", "ms", behind_ms, lag.behind_ms))
    return sorted(found, key=lambda worse: worse.before - worse.now)


def _identities(directory: str) -> pa.Table:
    with os.fdopen(open_regular(os.path.join(directory, "offenders.parquet")), "rb") as file:
        return _identity(pq.read_table(file, columns=list(_IDENTITY)))


def _identity(table: pa.Table) -> pa.Table:
    """Return the identities of offenders. Destroyed ones have no store time: null is replaced, since it equals
    nothing."""
    return table.select(list(_IDENTITY)).set_column(2, "store_ms", pc.fill_null(table["store_ms"], -1))


def _is_new(offenders: pa.Table, known: pa.Table) -> pa.ChunkedArray:
    """Return for each offender whether it is missing among `known`."""
    numbered = offenders.append_column("at", pa.array(range(len(offenders)), pa.int64()))
    new = numbered.join(known, list(_IDENTITY), join_type="left anti")["at"]
    return pa.chunked_array([pc.is_in(numbered["at"].combine_chunks(), value_set=new.combine_chunks())])


def _by_status(offenders: pa.Table) -> dict[str, int]:
    counts = {row["values"]: row["counts"] for row in pc.value_counts(offenders["status"]).to_pylist()}
    return {status: counts[status] for status in STATUSES if status in counts}


def _first(offenders: pa.Table) -> list[Offender]:
    """Return the first of some offenders, the worst first, as a summary lists them."""
    rank = pc.index_in(offenders["status"], value_set=pa.array(STATUSES))
    order = pc.sort_indices(
        pa.table({"rank": rank, "at": offenders["physical_offset"]}),
        sort_keys=[("rank", "ascending"), ("at", "ascending")],
    )
    rows: list[dict[str, Any]] = offenders.take(order[:MAX_LISTED]).to_pylist()
    names = {field.name for field in msgspec.structs.fields(Offender)} - {"what", "store"}
    found = []
    for row in rows:
        if row["deliveries"] < 2:
            row["last_delivered_ms"] = row["last_delivered_offset"] = None
        found.append(Offender(what=row["status"], **{name: row[name] for name in names}))
    return found


def _has_grown(before: int, now: int, least: int) -> bool:
    return now - before >= least and now >= before * _LATE_FACTOR


def _worse(before: Before, now: Before | Summary) -> list[Worse]:
    found = []
    for name, told in _COUNTS.items():
        counts = getattr(before, name), getattr(now, name)
        if counts[1] > counts[0]:
            found.append(Worse(told, "count", *counts))
    for name, told in _PERCENTILES.items():
        late = (summary.lateness.percentiles_ms.get(name, 0) for summary in (before, now))
        one, other = late
        if _has_grown(one, other, _LATE_MS):
            found.append(Worse(told, "ms", one, other))
    return found
