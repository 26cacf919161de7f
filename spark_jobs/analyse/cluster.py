"""The analysis of a cluster: of the stores of several brokers together.

Each store is analysed, and its messages are matched, by itself: a message and its delivery are in one store. The
cluster's figures are those that one analysis over the records of all stores would have: sums are added up, percentiles
are of the histograms of all deliveries together, and a topic or a consumer group that several brokers have counts as
one. Figures that depend on where a broker's own log ends are computed for each store: overdue messages, and how far
behind a group is at a queue. Brokers do not help each other, so the forecast treats each by itself (`forecast`).

A message that a producer sent again to another broker is not detected: `duplicates` counts those within a store.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from duemq.spark_jobs.analyse.analyse import Analysed, analyse_for_cluster, figures_of
from duemq.spark_jobs.analyse.analysis import Analysis, Space, StoreInCluster
from duemq.spark_jobs.analyse.comparison import Compared, worst_first
from duemq.spark_jobs.audit.audit import Cluster, Input, Lateness, Missing, Summary, lateness_of, sign, warn, write
from duemq.spark_jobs.errors import JobError
from duemq.spark_jobs.report.verdict import verdict_of
from duemq.spark_jobs.store.local_files import each_once, expand, local_path, shown

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from duemq.spark_jobs.audit.audit import Session

_SUMS: Final = (
    "records",
    "scheduled",
    "delivered",
    "cancelled",
    "pending",
    "lost",
    "twice",
    "destroyed",
    "unreachable",
    "overdue",
    "superfluous",
    "unclaimed",
    "expired",
    "damaged",
)
_TOLD: Final = (
    "records",
    "scheduled",
    "delivered",
    "cancelled",
    "pending",
    "overdue",
    "lost",
    "twice",
    "destroyed",
    "unclaimed",
    "damaged",
)
"""The fields of a store's audit that its StoreInCluster has."""


class StoreRun(NamedTuple):
    """An analysed store of a cluster, and where its files are."""

    analysed: Analysed
    directory: str
    """The directory with its offenders.parquet."""
    report: str
    """The path of its report, in or below that directory."""
    compared: Compared | None = None
    """Its comparison with the run before, if there is one."""

    @property
    def store(self) -> str:
        """Path or URI of the store."""
        return self.analysed.analysis.store


def analyse_cluster(
    session: Session,
    stores: str | Sequence[str],
    *,
    name: str | None = None,
    delay_levels: str | None = None,
    rate: float | None = None,
    check_bodies: bool = False,
    state: str | None = None,
    anew: bool = False,
    tell: Callable[[str], None] = warn,
    made_ms: int | None = None,
) -> Analysis:
    """Analyse a cluster. `stores`: their paths or URIs, or a pattern that names them; each is read once, and those that
    cannot be read are in `audit.missing` of the result. `name`: that of the cluster, by default the pattern. `rate`:
    messages per second that each broker delivers. All others as for `analyse.analyse`. Raises JobError if no store can
    be read."""
    paths = each_once(expand(stores) if isinstance(stores, str) else stores, tell)
    name = name or (shown(stores) if isinstance(stores, str) else ", ".join(map(shown, paths)))
    parts, missing, names = list[Analysed](), list[Missing](), list[str]()
    for path in paths:
        try:
            part = analyse_for_cluster(
                session,
                path,
                delay_levels=delay_levels,
                rate=rate,
                check_bodies=check_bodies,
                state=state,
                anew=anew,
                tell=tell,
                made_ms=made_ms,
            )
        except (JobError, OSError) as error:
            missing.append(missing_of(path, str(error)))
            names.append(missing[-1].store)
        else:
            parts.append(part)
            names.append(part.analysis.store)
    if not parts:
        raise none_of(name, missing)
    return join(name, parts, stores=names, missing=missing, made_ms=made_ms)


def missing_of(path: str, why: str) -> Missing:
    """Return a store that could not be read, with the text of its error as the reason."""
    return Missing(shown(path), why.removeprefix(f"{shown(path)}: "))


def none_of(name: str, missing: Sequence[Missing]) -> JobError:
    """Return the error to raise if none of a cluster's stores could be read."""
    return JobError(f"{shown(name)}: none of the {len(missing)} stores could be read")


def join(
    name: str,
    parts: Sequence[Analysed],
    *,
    stores: Sequence[str] | None = None,
    missing: Sequence[Missing] = (),
    made_ms: int | None = None,
) -> Analysis:
    """Return the analysis of a cluster, from those of its stores, at least one. `name`: that of the cluster. `stores`:
    all of its stores, in order; `missing`: those that could not be read. `made_ms`: the time of the analysis, ms since
    the epoch; now by default. The audit in it is not yet signed."""
    analyses = [part.analysis for part in parts]
    materials = [part.material for part in parts]
    made_ms = time.time_ns() // 1_000_000 if made_ms is None else made_ms
    lateness = lateness_of([one.figures for one in materials])
    summary = _summary(name, [one.audit for one in analyses], lateness, made_ms)
    stores = stores if stores is not None else [one.store for one in analyses]
    summary.cluster = Cluster(list(stores), list(missing))
    members = {one.store: _member(one) for one in analyses}
    members |= {one.store: StoreInCluster(store=one.store, why=one.why) for one in missing}
    return Analysis(
        store=name,
        made_ms=made_ms,
        last_ms=max(one.last_ms for one in analyses),
        audit=summary,
        duplicates=sum(one.duplicates for one in analyses),
        overdue=summary.overdue,
        consumers=sorted(
            (msgspec.structs.replace(each, store=one.store) for one in analyses for each in one.consumers),
            key=lambda each: (-(each.lag or 0), each.consumer_group, each.topic),
        ),
        space=_space(analyses),
        stores=[members[store] for store in stores],
        **figures_of(materials),
    )


def _summary(name: str, audits: Sequence[Summary], lateness: Lateness, made_ms: int) -> Summary:
    sums = {field: sum(getattr(one, field) for one in audits) for field in _SUMS}
    checked = [one.corrupt for one in audits if one.corrupt is not None]
    inputs = [Input(one.begin, one.end, one.inputs_sha256, one.records, one.store) for one in audits]
    return Summary(
        store=name,
        written_by=", ".join(sorted({one.written_by for one in audits})),
        is_running=any(one.is_running for one in audits),
        made_ms=made_ms,
        begin=0,
        end=sum(one.end - one.begin for one in audits),
        starts=[msgspec.structs.replace(start, store=one.store) for one in audits for start in one.starts],
        levels=_added(one.levels for one in audits),
        timers=_added(one.timers for one in audits),
        lateness=lateness,
        damages=[(at, size, f"{one.store}: {why}") for one in audits for at, size, why in one.damages],
        corrupt=sum(checked) if checked else None,
        corruptions=[(at, size, f"{one.store}: {why}") for one in audits for at, size, why in one.corruptions],
        offenders=worst_first(
            msgspec.structs.replace(each, store=one.store) for one in audits for each in one.offenders
        ),
        inputs=inputs,
        inputs_sha256=hashlib.sha256("".join(part.sha256 for part in inputs).encode()).hexdigest(),
        **sums,
    )


def _added(counts: Iterable[dict[str, int]]) -> dict[str, int]:
    total: dict[str, int] = {}
    for each in counts:
        for name, count in each.items():
            total[name] = total.get(name, 0) + count
    return total


def _space(analyses: Sequence[Analysis]) -> list[Space]:
    records, sizes = Counter[str](), Counter[str]()
    for space in (each for one in analyses for each in one.space):
        records[space.reason] += space.records
        sizes[space.reason] += space.bytes
    found = [Space(reason, count, sizes[reason]) for reason, count in records.items()]
    return sorted(found, key=lambda space: -space.bytes)


def _member(analysis: Analysis) -> StoreInCluster:
    summary = analysis.audit
    late, verdict = summary.lateness.percentiles_ms, verdict_of(summary)
    told: dict[str, Any] = {field: getattr(summary, field) for field in _TOLD}
    return StoreInCluster(
        store=analysis.store,
        mood=verdict.mood,
        headline=verdict.headline,
        last_ms=analysis.last_ms,
        bytes=analysis.bytes,
        p50_ms=late.get("p50"),
        p99_ms=late.get("p99"),
        max_ms=late.get("p100"),
        **told,
    )


def finish(analysis: Analysis, runs: Sequence[StoreRun], out: str, key: bytes | None = None) -> None:
    """Sign the audit of a cluster (`key`: as for `audit.finish`), write its files to the directory `out`, and set the
    addresses of its stores' reports relative to `out`. offenders.parquet has the offenders of all stores, each with its
    store. Raises JobError."""
    out = local_path(out)
    reports = {run.store: os.path.relpath(run.report, out) for run in runs}
    for member in analysis.stores:
        member.report = reports.get(member.store)
    sign(analysis.audit, key)
    tables = []
    for run in runs:
        path = os.path.join(local_path(run.directory), "offenders.parquet")
        try:
            table = pq.read_table(path)
        except (OSError, pa.ArrowException) as error:
            raise JobError(f"{path}: {error}") from None
        tables.append(table.add_column(0, "store", pa.array([run.store] * len(table), pa.string())))
    write(analysis.audit, pa.concat_tables(tables, promote_options="default"), out)
