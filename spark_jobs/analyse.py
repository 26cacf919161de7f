"""The analysis: what a store is used for, how late its deliveries were, what is ahead.

One scan of the store gives the cases (`cases`) and the usage (`usage`); all figures are made of these two and of the
tables of offsets. What comes out is an `analysis.Analysis`.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np

from spark_jobs import lateness, tables
from spark_jobs.analysis import (
    Ahead,
    Analysis,
    BusySecond,
    Consumer,
    Count,
    HeatCell,
    Key,
    Late,
    LatePoint,
    Minute,
    Retry,
    Space,
    Topic,
)
from spark_jobs.audit import MAX_POINTS, STEPS_MS, Audit, finish, summarise
from spark_jobs.figures import CANCELLED, DELIVERED, TWICE
from spark_jobs.forecast import Forecast, forecast, measured_rate
from spark_jobs.offsets import offset_rows
from spark_jobs.ranges import records_at
from spark_jobs.roles import (
    CANCEL,
    DELIVERY,
    HALF,
    HALF_END,
    HALF_END_TOPIC,
    HALF_TOPIC,
    LEVEL,
    MESSAGE,
    NAMES,
    TIMER,
)
from spark_jobs.usage import MINUTE_MS, Usage, body_percentile

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray
    from pyspark.sql import SparkSession

    from spark_jobs.store_files import StoreFiles

TOP: Final = 50
SERIES: Final = 8
"""Topics that the curve of what is ahead tells apart."""
MAX_TOPICS: Final = 1000
OTHERS: Final = "others"
_GROUP_OF_HALF: Final = "CID_RMQ_SYS_TRANS"
_NOBODY: Final = Consumer("", "", 0, 0, None, None, None)


def analyse(
    session: SparkSession,
    path: str,
    *,
    delay_levels: str | None = None,
    rate: float | None = None,
    out: str | None = None,
    key: bytes | None = None,
) -> Analysis:
    """Analyse a store. `rate`: messages a second that the broker delivers, by default as measured. `out`, `key`: as for
    `audit.audit`. Raises JobError."""
    work = Audit(session, path, delay_levels=delay_levels, with_usage=True)
    analysis = _Analysis(work).run(rate)
    finish(work, analysis.audit, out, key)
    return analysis


def forecast_of(
    session: SparkSession, path: str, *, delay_levels: str | None = None, rate: float | None = None
) -> Forecast:
    """The forecast alone. Raises JobError."""
    return _Analysis(Audit(session, path, delay_levels=delay_levels)).forecast(rate)


class _Analysis:
    def __init__(self, work: Audit) -> None:
        self._work = work
        self._figures = work.figures

    def run(self, rate: float | None) -> Analysis:
        work, figures = self._work, self._figures
        usage = self._usage = Usage(work.found.usage)
        summary = summarise(work)
        minutes = self._minutes()
        ahead, ahead_step = self._ahead()
        return Analysis(
            store=work.store.path,
            made_ms=time.time_ns() // 1_000_000,
            first_ms=minutes[0].minute_ms if minutes else 0,
            last_ms=work.last_ms,
            bytes=sum(minute.bytes for minute in minutes),
            audit=summary,
            minutes=minutes,
            topics=self._topics(),
            producers=_top(usage.producers),
            keys=self._keys(),
            key_error=usage.key_error,
            duplicates=work.found.duplicates,
            retries=_retries(usage),
            late_by_topic=_by_count(_late(figures.late_by_topic, lambda key: work.topics.get(key, "?"))),
            late_by_level=_late(figures.late_by_level, self._level_name),
            late_by_hour=_late(figures.late_by_hour, lambda hour: f"{hour:02}"),
            lateness=_over_time(figures.late_over_time, work.step_ms),
            lateness_step_ms=work.step_ms,
            heat=_heat(figures.late_by_minute),
            ahead=ahead,
            ahead_step_ms=ahead_step,
            busiest=self._busiest(),
            overdue=summary.overdue,
            consumers=_consumers(work.store, work.last_ms),
            space=self._space(),
            forecast=self.forecast(rate),
        )

    # --- from the usage

    def _minutes(self) -> list[Minute]:
        found = []
        for minute, row in sorted(self._usage.minutes.items()):
            counts = row[: len(NAMES)]
            found.append(Minute(minute * MINUTE_MS, *_by_purpose(counts), bytes=int(row[len(NAMES) :].sum())))
        return _coarser(found)

    def _topics(self) -> list[Topic]:
        found = []
        for name, hours in self._usage.topics.items():
            row = sum(hours.values(), np.zeros(2 * len(NAMES), np.int64))
            bins = self._usage.sizes[name]
            found.append(
                Topic(
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

    def _keys(self) -> list[Key]:
        found = self._usage.frequent_keys(TOP)
        counts = {offset: count for count, offset in found}
        keys = []
        for records in records_at(self._work.store, np.array(sorted(counts), np.int64)):
            batch = tables.Batch(records)
            columns = [batch.column(name).to_pylist() for name in ("physical_offset", "topic", "keys")]
            keys += [Key(topic, key or "", counts[offset]) for offset, topic, key in zip(*columns, strict=True)]
        return sorted(keys, key=lambda key: -key.count)

    def _space(self) -> list[Space]:
        found = [
            Space("delivered", *self._figures.bytes_of(DELIVERED, TWICE)),
            Space("cancelled", *self._figures.bytes_of(CANCELLED)),
            Space("marks of cancellations", *self._role_sum(CANCEL)),
            self._ended_half(),
        ]
        return sorted((space for space in found if space.records), key=lambda space: -space.bytes)

    def _role_sum(self, role: int) -> tuple[int, int]:
        rows = list(self._usage.minutes.values())
        return sum(int(row[role]) for row in rows), sum(int(row[len(NAMES) + role]) for row in rows)

    def _ended_half(self) -> Space:
        """Half messages that the broker's own progress has passed: as many of them, by their mean size."""
        records, size = 0, 0
        passed = {
            row["topic"]: row["next_offset"] - (row["min_offset"] or 0)
            for row in offset_rows(self._work.store)
            if row["consumer_group"] == _GROUP_OF_HALF and row["min_offset"] is not None
        }
        for topic, role in ((HALF_TOPIC, HALF), (HALF_END_TOPIC, HALF_END)):
            count, total = self._role_sum(role)
            done = min(max(passed.get(topic, 0), 0), count)
            records += done
            size += total * done // count if count else 0
        return Space("ended transactions", records, size)

    # --- from the cases

    def _level_name(self, level: int) -> str:
        delays = self._work.progress.delays_ms
        return f"level {level} ({delays[level - 1] / 1000:g} s)" if 0 < level <= len(delays) else "timer"

    def _ahead(self) -> tuple[list[Ahead], int]:
        rows = self._figures.pending_by_topic
        if not len(rows):
            return [], MINUTE_MS
        start_ms = rows["minute"] * MINUTE_MS
        # A few messages in a month must not make one point of the many in the next hour.
        most = np.searchsorted(np.cumsum(rows["count"]), 0.99 * rows["count"].sum())
        span = int(start_ms[most] - start_ms[0])
        step = next((s for s in STEPS_MS if s >= MINUTE_MS and span // s < MAX_POINTS), STEPS_MS[-1])
        topics, which = np.unique(rows["topic"], return_inverse=True)
        biggest = np.argsort(-np.bincount(which, rows["count"]), kind="stable")[:SERIES]
        series = np.full(len(topics), SERIES)
        series[biggest] = np.arange(len(biggest))
        cell, index = np.unique(start_ms // step * (SERIES + 1) + series[which], return_inverse=True)
        counts = np.bincount(index, rows["count"])
        names = [self._work.topics.get(topic, "?") for topic in topics[biggest].tolist()]
        found = []
        for value, count in zip(cell.tolist(), counts.tolist(), strict=True):
            at, number = divmod(value, SERIES + 1)
            found.append(Ahead(at * step, names[number] if number < len(names) else OTHERS, int(count)))
        return found, step

    def _busiest(self) -> list[BusySecond]:
        rows = self._figures.pending
        best = rows[np.argsort(-rows["count"], kind="stable")[:TOP]]
        return [BusySecond(int(row["second"]) * 1000, int(row["count"])) for row in best]

    def forecast(self, rate: float | None) -> Forecast:
        """What is ahead, at a rate, or the one measured."""
        figures, measured, source = self._figures, 0, "given"
        if rate is None:
            rate, measured = measured_rate(*(figures.delivered[name] for name in ("second", "count", "late")))
            source = "measured" if measured else "fastest"
        # What is overdue is delivered when the broker starts: at the end of what it has stored, at the earliest.
        due = np.maximum(figures.pending["second"], self._work.last_ms // 1000)
        seconds, which = np.unique(due, return_inverse=True)
        counts = np.bincount(which, figures.pending["count"], len(seconds)).astype(np.int64)
        found = forecast(seconds, counts, rate, measured_seconds=measured)
        found.source = source
        return found


def _late(rows: NDArray[Any], name: Callable[[int], str]) -> list[Late]:
    found = []
    for key, late in lateness.stats(rows, (50, 90, 99)):
        p50, p90, p99 = late.percentiles
        found.append(Late(name(key), late.number, late.early, p50, p90, p99, late.greatest))
    return found


def _by_count(found: list[Late]) -> list[Late]:
    return sorted(found, key=lambda late: -late.count)[:MAX_TOPICS]


def _over_time(rows: NDArray[Any], step_ms: int) -> list[LatePoint]:
    found = []
    for key, late in lateness.stats(rows, (50, 99)):
        p50, p99 = late.percentiles
        found.append(LatePoint(key * step_ms, late.number, p50, p99, late.greatest))
    return found


def _heat(rows: NDArray[Any]) -> list[HeatCell]:
    cells = lateness.stats(rows, (99,))
    return [HeatCell(minute // 60, minute % 60, late.number, late.percentiles[0]) for minute, late in cells]


def _by_purpose(counts: Any) -> tuple[int, int, int, int]:
    """Messages sent for now, sent for later, delivered of those; and other records."""
    first = int(counts[MESSAGE]), int(counts[LEVEL] + counts[TIMER]), int(counts[DELIVERY])
    return (*first, int(counts.sum()) - sum(first))


def _coarser(minutes: list[Minute]) -> list[Minute]:
    """Not more than MAX_POINTS, by adding up neighbours."""
    if not minutes:
        return []
    span = minutes[-1].minute_ms - minutes[0].minute_ms
    step = next((s for s in STEPS_MS if s >= MINUTE_MS and span // s < MAX_POINTS), STEPS_MS[-1])
    found: dict[int, Minute] = {}
    for minute in minutes:
        start = minute.minute_ms // step * step
        known = found.setdefault(start, Minute(start, 0, 0, 0, 0, 0))
        for name in ("messages", "scheduled", "delivered", "other", "bytes"):
            setattr(known, name, getattr(known, name) + getattr(minute, name))
    return list(found.values())


def _top(counts: dict[str, list[int]]) -> list[Count]:
    ordered = sorted(counts.items(), key=lambda item: -item[1][0])
    return [Count(name, count, size) for name, (count, size) in ordered[:TOP]]


def _retries(usage: Usage) -> list[Retry]:
    found = []
    for name, count in usage.retries.items():
        topic, origin, times = name.split("\t")
        is_dead = topic.startswith("%DLQ%")
        found.append(Retry(topic.split("%", 2)[2], origin, int(times), count, is_dead))
    return sorted(found, key=lambda retry: (retry.is_dead, retry.consumer_group, retry.topic, retry.attempt))


def _consumers(store: StoreFiles, now_ms: int) -> list[Consumer]:
    found = []
    for row in offset_rows(store):
        if row["kind"] != "consumer" or row["consumer_group"] == _GROUP_OF_HALF:
            continue
        behind = None
        if row["lag"] == 0:
            behind = 0
        elif row["lag"] is not None:
            unit = store.unit(row["topic"], row["queue_id"], max(row["next_offset"], row["min_offset"]))
            for records in records_at(store, np.array([unit[0]] if unit else [], np.int64)):
                behind = max(now_ms - int(records.store_ms[0]), 0)
        known = {name: row[name] for name in msgspec.structs.asdict(_NOBODY) if name in row}
        found.append(msgspec.structs.replace(_NOBODY, **known, behind_ms=behind))
    return sorted(found, key=lambda consumer: (-(consumer.lag or 0), consumer.consumer_group, consumer.topic))
