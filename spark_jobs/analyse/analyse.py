"""The analysis: what a store is used for, how late its deliveries were, and what waits.

One scan of the store returns the cases (`cases`) and the usage (`usage`); all figures are computed from these two and
from the tables of offsets. The result is an `analysis.Analysis`. The figures of a cluster are computed in the same way,
from the sums of its stores' cases and usage (`cluster`).
"""

from __future__ import annotations

import copy
import math
import time
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
import numpy as np

from duemq.protocol.topics import DLQ_PREFIX, HALF_TOPIC, OP_HALF_TOPIC
from duemq.spark_jobs.analyse.analysis import (
    Ahead,
    Analysis,
    BusySecond,
    Count,
    GroupAtQueue,
    HeatCell,
    Key,
    LatenessFigures,
    LatePoint,
    SentBack,
    Space,
    TopicSize,
    Traffic,
)
from duemq.spark_jobs.analyse.forecast import Forecast, Load, forecast, measured_rate
from duemq.spark_jobs.analyse.usage import Usage, body_percentile, frequent_keys
from duemq.spark_jobs.audit import lateness
from duemq.spark_jobs.audit.audit import Audit, finish, summarise, warn
from duemq.spark_jobs.audit.figures import CANCELLED, CASE, DELIVERED, TWICE, WAITING, Figures
from duemq.spark_jobs.audit.steps import BARS, POINTS, is_by_minute, step_of
from duemq.spark_jobs.source import tables
from duemq.spark_jobs.source.offset_rows import offset_rows
from duemq.spark_jobs.store.local_files import refuse_within
from duemq.spark_jobs.store.progress import known_delays
from duemq.spark_jobs.store.ranges import records_at
from duemq.spark_jobs.store.roles import CANCEL, DELIVERY, HALF, HALF_END, LEVEL, MESSAGE, NAMES, TIMER

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray
    from pyspark.sql import SparkSession

    from duemq.spark_jobs.audit.audit import Session
    from duemq.spark_jobs.store.store_files import StoreFiles

TOP: Final = 50
SERIES: Final = 8
"""Number of topics with a curve of their own among waiting messages."""
MAX_TOPICS: Final = 1000
OTHERS: Final = "others"
MINUTE_MS: Final = 60_000
_TIMER: Final = "timer"
_GROUP_OF_HALF: Final = "CID_RMQ_SYS_TRANS"
_NO_CONSUMER: Final = GroupAtQueue("", "", 0, 0, None, None, None)


class Material(NamedTuple):
    """The data from which a store's figures are computed, apart from figures that only a store can have."""

    store: StoreFiles
    figures: Figures
    """Without `waiting` and `offenders`, except while the store's own figures are computed."""
    usage: Usage
    step_ms: int
    """Step of the curve of lateness in `figures`, ms."""
    topics: dict[int, str]
    """Names of topics by their hash."""
    delays_ms: dict[int, int]
    """Delays of the levels, ms, as far as they are known (`progress.known_delays`)."""
    load: Load
    """The waiting messages, and the rate of delivery."""


class Analysed(NamedTuple):
    """A store's analysis, and the data for that of a cluster."""

    analysis: Analysis
    material: Material


def analyse(
    session: Session,
    path: str,
    *,
    delay_levels: str | None = None,
    rate: float | None = None,
    out: str | None = None,
    key: bytes | None = None,
    check_bodies: bool = False,
    state: str | None = None,
    anew: bool = False,
    tell: Callable[[str], None] = warn,
    made_ms: int | None = None,
) -> Analysis:
    """Analyse a store. `rate`: messages per second that the broker delivers, by default as measured. All others as for
    `audit.audit`. Raises JobError."""
    return analyse_for_cluster(
        session,
        path,
        delay_levels=delay_levels,
        rate=rate,
        out=out,
        key=key,
        check_bodies=check_bodies,
        state=state,
        anew=anew,
        tell=tell,
        made_ms=made_ms,
    ).analysis


def analyse_for_cluster(
    session: Session,
    path: str,
    *,
    delay_levels: str | None = None,
    rate: float | None = None,
    out: str | None = None,
    key: bytes | None = None,
    check_bodies: bool = False,
    state: str | None = None,
    anew: bool = False,
    tell: Callable[[str], None] = warn,
    made_ms: int | None = None,
) -> Analysed:
    """Analyse a store as `analyse` does, and also return the data for a cluster's analysis. Raises JobError."""
    refuse_within(path, out, state)
    work = Audit(
        session,
        path,
        delay_levels=delay_levels,
        with_usage=True,
        check_bodies=check_bodies,
        state=state,
        anew=anew,
        tell=tell,
    )
    analysed = _Analysis(work).run(rate, time.time_ns() // 1_000_000 if made_ms is None else made_ms)
    finish(work, analysed.analysis.audit, out, key)
    return analysed


def forecast_of(
    session: SparkSession, path: str, *, delay_levels: str | None = None, rate: float | None = None
) -> Forecast:
    """Return only the forecast. Raises JobError."""
    work = Audit(session, path, delay_levels=delay_levels)
    return forecast([load_of(work.figures, work.last_ms, rate)])


def load_of(figures: Figures, last_ms: int, rate: float | None) -> Load:
    """Return the waiting messages with the rate of delivery: the given one, or the measured one. `last_ms`: store time
    of the last record, ms since the epoch."""
    measured, source = 0, "given"
    if rate is None:
        rate, measured = measured_rate(*(figures.delivered[name] for name in ("second", "count", "late")))
        source = "measured" if measured else "fastest"
    # Overdue messages are delivered when the broker starts: not before the last store time.
    due = np.maximum(figures.pending["second"], last_ms // 1000)
    seconds, which = np.unique(due, return_inverse=True)
    counts = np.bincount(which, figures.pending["count"], len(seconds)).astype(np.int64)
    return Load(seconds, counts, rate, measured, source)


def figures_of(materials: Sequence[Material]) -> dict[str, Any]:
    """Return the fields of an Analysis that are sums or percentiles, of one store or of several together. Percentiles
    are over all deliveries, and figures of a topic over all stores that have it. Raises JobError, and OSError if the
    store cannot be read; of several stores, the keys of an unreadable one are left out."""
    figures, step_ms = _added(materials)
    topics = {key: name for one in materials for key, name in one.topics.items()}
    usage = materials[0].usage if len(materials) == 1 else Usage([one.usage.summary() for one in materials])
    traffic, traffic_step = _traffic(usage)
    lateness_points, lateness_step = _over_time(figures.late_over_time, step_ms)
    ahead, ahead_step = _due_by_step(figures.pending_by_topic, topics)
    return {
        "first_ms": traffic[0].start_ms if traffic else 0,
        "bytes": sum(part.bytes for part in traffic),
        "traffic": traffic,
        "traffic_step_ms": traffic_step,
        "topics": _topics(usage),
        "producers": _top(usage.producers),
        "keys": _keys(materials),
        "key_error": usage.key_error,
        "retries": _retries(usage),
        "late_by_topic": _by_count(_late(figures.late_by_topic, lambda key: topics.get(key, "?"))),
        "late_by_level": _late_by_level(materials),
        "late_by_hour": _late(figures.late_by_hour, lambda hour: f"{hour:02}"),
        "lateness": lateness_points,
        "lateness_step_ms": lateness_step,
        "heat": _heat_cells(figures.late_by_minute),
        "ahead": ahead,
        "ahead_step_ms": ahead_step,
        "busiest": _busiest(figures.pending),
        "forecast": forecast([one.load for one in materials]),
    }


def _added(materials: Sequence[Material]) -> tuple[Figures, int]:
    """Return the sum of the figures of some stores, and the step of their curve of lateness, ms: the least common
    multiple of the stores' steps."""
    if len(materials) == 1:
        return materials[0].figures, materials[0].step_ms
    step = math.lcm(*(one.step_ms for one in materials))
    parts = []
    for one in materials:
        part = copy.copy(one.figures)
        part.late_over_time = part.late_over_time.copy()
        part.late_over_time["key"] = part.late_over_time["key"] * one.step_ms // step
        parts.append(part)
    return Figures.added(parts), step


def _traffic(usage: Usage) -> tuple[list[Traffic], int]:
    """Return records by store time, and the step, ms."""
    rows = usage.traffic
    if not rows:
        return [], MINUTE_MS
    low, high = min(rows), max(rows)
    step = step_of((high - low) * 1000, POINTS, MINUTE_MS if is_by_minute(low, high) else 1000)
    sums: dict[int, NDArray[Any]] = {}
    for second, row in sorted(rows.items()):
        start = second * 1000 // step * step
        sums[start] = sums[start] + row if start in sums else row
    found = [
        Traffic(start, *_by_purpose(row[: len(NAMES)]), bytes=int(row[len(NAMES) :].sum()))
        for start, row in sums.items()
    ]
    return found, step


def _topics(usage: Usage) -> list[TopicSize]:
    found = []
    for name, hours in usage.topics.items():
        row = sum(hours.values(), np.zeros(2 * len(NAMES), np.int64))
        bins = usage.sizes[name]
        found.append(
            TopicSize(
                name,
                *_by_purpose(row[: len(NAMES)]),
                bytes=int(row[len(NAMES) :].sum()),
                body_p50=body_percentile(bins, 50),
                body_p99=body_percentile(bins, 99),
                first_ms=min(hours) * 3_600_000,
                last_ms=max(hours) * 3_600_000,
            )
        )
    return sorted(found, key=lambda topic: -topic.bytes)


def _keys(materials: Sequence[Material]) -> list[Key]:
    """Return the most frequent keys. The text of each key is read from a record that has it, in the first store with
    one."""
    keys = []
    for one, counts in zip(materials, frequent_keys([each.usage for each in materials], TOP), strict=True):
        try:
            for records in records_at(one.store, np.array(sorted(counts), np.int64)):
                batch = tables.RecordColumns(records)
                columns = [batch.column(name).to_pylist() for name in ("physical_offset", "topic", "keys")]
                keys += [Key(topic, key or "", counts[offset]) for offset, topic, key in zip(*columns, strict=True)]
        except OSError:
            if len(materials) == 1:  # one of several may be gone since its analysis
                raise
    return sorted(keys, key=lambda key: -key.count)


def _late_by_level(materials: Sequence[Material]) -> list[LatenessFigures]:
    """Return lateness by delay level. Levels of the same number with different delays are separate."""
    if len(materials) == 1:
        delays = materials[0].delays_ms
        return _late(materials[0].figures.late_by_level, lambda level: _level_name(level, delays))
    names: dict[tuple[int, int], str] = {}
    for one in materials:
        for level in np.unique(one.figures.late_by_level["key"]).tolist():
            names[_level_and_delay(level, one.delays_ms)] = _level_name(level, one.delays_ms)
    ordered = {key: number for number, key in enumerate(sorted(names))}
    parts = []
    for one in materials:
        rows = one.figures.late_by_level.copy()
        rows["key"] = [ordered[_level_and_delay(level, one.delays_ms)] for level in rows["key"].tolist()]
        parts.append(rows)
    told = [names[key] for key in ordered]
    return _late(lateness.added(parts), lambda number: told[number])


def _level_and_delay(level: int, delays_ms: Mapping[int, int]) -> tuple[int, int]:
    return level, delays_ms.get(level, 0)


def _level_name(level: int, delays_ms: Mapping[int, int]) -> str:
    if not level:
        return _TIMER
    return f"level {level} ({delays_ms[level] / 1000:g} s)" if level in delays_ms else f"level {level}"


def _busiest(pending: NDArray[Any]) -> list[BusySecond]:
    best = pending[np.argsort(-pending["count"], kind="stable")[:TOP]]
    return [BusySecond(int(row["second"]) * 1000, int(row["count"])) for row in best]


class _Analysis:
    def __init__(self, work: Audit) -> None:
        self._work = work
        self._figures = work.figures
        self._usage = Usage(work.found.usage)

    def run(self, rate: float | None, made_ms: int) -> Analysed:
        work = self._work
        summary = summarise(work, made_ms)
        self._offsets = offset_rows(work.store)
        material = Material(
            work.store,
            self._figures,
            self._usage,
            work.step_ms,
            work.topics,
            known_delays(work.store, work.delay_levels),
            load_of(self._figures, work.last_ms, rate),
        )
        analysis = Analysis(
            store=work.store.path,
            made_ms=made_ms,
            last_ms=work.last_ms,
            audit=summary,
            duplicates=work.found.duplicates,
            overdue=summary.overdue,
            consumers=_consumers(work.store, self._offsets, work.last_ms),
            space=self._space(),
            **figures_of([material]),
        )
        # The physical offsets of waiting messages are many, and a cluster's figures do not need them.
        small = copy.copy(self._figures)
        small.waiting, small.offenders = np.zeros(0, WAITING), np.zeros(0, CASE)
        return Analysed(analysis, material._replace(figures=small))

    def _space(self) -> list[Space]:
        found = [
            Space("delivered", *self._figures.bytes_of(DELIVERED, TWICE)),
            Space("cancelled", *self._figures.bytes_of(CANCELLED)),
            Space("marks of cancellations", *self._role_sum(CANCEL)),
            self._ended_half(),
        ]
        return sorted((space for space in found if space.records), key=lambda space: -space.bytes)

    def _role_sum(self, role: int) -> tuple[int, int]:
        rows = list(self._usage.traffic.values())
        return sum(int(row[role]) for row in rows), sum(int(row[len(NAMES) + role]) for row in rows)

    def _ended_half(self) -> Space:
        """Estimate the half messages that the broker has passed: their number by its progress, their bytes by the mean
        size."""
        records, size = 0, 0
        passed = {
            row["topic"]: row["next_offset"] - (row["min_offset"] or 0)
            for row in self._offsets
            if row["consumer_group"] == _GROUP_OF_HALF and row["min_offset"] is not None
        }
        for topic, role in ((HALF_TOPIC, HALF), (OP_HALF_TOPIC, HALF_END)):
            count, total = self._role_sum(role)
            done = min(max(passed.get(topic, 0), 0), count)
            records += done
            size += total * done // count if count else 0
        return Space("ended transactions", records, size)


def _late(rows: NDArray[Any], name: Callable[[int], str]) -> list[LatenessFigures]:
    found = []
    for key, late in lateness.stats(rows, (50, 90, 99)):
        p50, p90, p99 = late.percentiles
        found.append(LatenessFigures(name(key), late.number, late.early, p50, p90, p99, late.greatest))
    return found


def _by_count(found: list[LatenessFigures]) -> list[LatenessFigures]:
    return sorted(found, key=lambda late: -late.count)[:MAX_TOPICS]


def _due_by_step(rows: NDArray[Any], topic_names: dict[int, str]) -> tuple[list[Ahead], int]:
    """Return the waiting messages by deliver time, and the step, ms. `rows`: Figures.pending_by_topic."""
    if not len(rows):
        return [], MINUTE_MS
    start_ms = rows["second"] * 1000
    is_coarse = is_by_minute(int(rows["second"][0]), int(rows["second"][-1]))
    # A few messages due in a month must not squeeze the many that are due in the next hour into one point.
    most = np.searchsorted(np.cumsum(rows["count"]), 0.99 * rows["count"].sum())
    span = int(start_ms[most] - start_ms[0])
    step = step_of(span, BARS, MINUTE_MS if is_coarse else 1000)
    topics, which = np.unique(rows["topic"], return_inverse=True)
    biggest = np.argsort(-np.bincount(which, rows["count"]), kind="stable")[:SERIES]
    series = np.full(len(topics), SERIES)
    series[biggest] = np.arange(len(biggest))
    cell, index = np.unique(start_ms // step * (SERIES + 1) + series[which], return_inverse=True)
    counts = np.bincount(index, rows["count"])
    names = [topic_names.get(topic, "?") for topic in topics[biggest].tolist()]
    found = []
    for value, count in zip(cell.tolist(), counts.tolist(), strict=True):
        at, number = divmod(value, SERIES + 1)
        found.append(Ahead(at * step, names[number] if number < len(names) else OTHERS, int(count)))
    return found, step


def _over_time(rows: NDArray[Any], step_ms: int) -> tuple[list[LatePoint], int]:
    """Return lateness by deliver time, and the step, ms. Histograms are added up, rather than percentiles averaged."""
    if len(rows):
        # A few messages due long before or after the others must not squeeze the others into one point.
        up_to = np.cumsum(rows["count"])
        low, high = np.searchsorted(up_to, np.array([0.005, 0.995]) * up_to[-1])
        span = int(rows["key"][high] - rows["key"][low]) * step_ms
        coarser = step_of(span, POINTS, step_ms)
        rows = rows.copy()
        rows["key"] = rows["key"] * step_ms // coarser
        rows, step_ms = lateness.added([rows]), coarser
    found = []
    for key, late in lateness.stats(rows, (50, 99)):
        p50, p99 = late.percentiles
        found.append(LatePoint(key * step_ms, late.number, p50, p99, late.greatest))
    return found, step_ms


def _heat_cells(rows: NDArray[Any]) -> list[HeatCell]:
    cells = lateness.stats(rows, (99,))
    return [HeatCell(minute // 60, minute % 60, late.number, late.percentiles[0]) for minute, late in cells]


def _by_purpose(counts: Any) -> tuple[int, int, int, int]:
    """Return the numbers of messages sent for now, of messages sent for later, of deliveries of the latter, and of
    other records."""
    first = int(counts[MESSAGE]), int(counts[LEVEL] + counts[TIMER]), int(counts[DELIVERY])
    return (*first, int(counts.sum()) - sum(first))


def _top(counts: dict[str, list[int]]) -> list[Count]:
    ordered = sorted(counts.items(), key=lambda item: -item[1][0])
    return [Count(name, count, size) for name, (count, size) in ordered[:TOP]]


def _retries(usage: Usage) -> list[SentBack]:
    found = []
    for name, count in usage.retries.items():
        topic, origin, times = name.split("\t")
        is_dead = topic.startswith(DLQ_PREFIX)
        found.append(SentBack(topic.split("%", 2)[2], origin, int(times), count, is_dead))
    return sorted(found, key=lambda retry: (retry.is_dead, retry.consumer_group, retry.topic, retry.attempt))


def _consumers(store: StoreFiles, offsets: list[dict[str, Any]], now_ms: int) -> list[GroupAtQueue]:
    found = []
    for row in offsets:
        if row["kind"] != "consumer" or row["consumer_group"] == _GROUP_OF_HALF:
            continue
        behind = None
        if row["lag"] == 0:
            behind = 0
        elif row["lag"] is not None:
            unit = store.unit(row["topic"], row["queue_id"], max(row["next_offset"], row["min_offset"]))
            for records in records_at(store, np.array([unit[0]] if unit else [], np.int64)):
                behind = max(now_ms - int(records.store_ms[0]), 0)
        known = {name: row[name] for name in msgspec.structs.asdict(_NO_CONSUMER) if name in row}
        found.append(msgspec.structs.replace(_NO_CONSUMER, **known, behind_ms=behind))
    return sorted(found, key=lambda consumer: (-(consumer.lag or 0), consumer.consumer_group, consumer.topic))
