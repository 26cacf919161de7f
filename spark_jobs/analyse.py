"""The analysis: what a store is used for, how late its deliveries were, what is ahead.

One scan of the store gives the cases (`cases`) and the usage (`usage`); all figures are made of these two and of the
tables of offsets. `Analysis` has them all; `figures` gives each list of it as a table.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np

from spark_jobs import tables
from spark_jobs.audit import Audit, Summary, finish, summarise
from spark_jobs.cases import CANCELLED, DELIVERED, PENDING, TWICE
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
    from pyspark.sql import Column, DataFrame, SparkSession

    from spark_jobs.store_files import StoreFiles

TOP: Final = 50
SERIES: Final = 8
"""Topics that the curve of what is ahead tells apart."""
MAX_POINTS: Final = 1500
"""Of a curve."""
_STEPS_MS: Final = (1000, 10_000, 60_000, 300_000, 900_000, 3_600_000, 6 * 3_600_000, 86_400_000, 7 * 86_400_000)
_GROUP_OF_HALF: Final = "CID_RMQ_SYS_TRANS"


class Minute(msgspec.Struct):
    """Records stored in a minute."""

    minute_ms: int
    messages: int
    """Sent for now."""
    scheduled: int
    """Sent for later."""
    delivered: int
    """Of those for later."""
    other: int
    bytes: int


class Topic(msgspec.Struct):
    """A topic, as it is on disk."""

    topic: str
    messages: int
    scheduled: int
    delivered: int
    other: int
    bytes: int
    body_p50: int
    """Bodies smaller than this are half of them; a power of two."""
    body_p99: int
    first_ms: int
    last_ms: int
    """Start of the first and of the last hour that has records."""


class Count(msgspec.Struct):
    """A name and how often it comes, and bytes where they are known."""

    name: str
    count: int
    bytes: int = 0


class Key(msgspec.Struct):
    """A key (the property KEYS) and how often it comes at least in its topic."""

    topic: str
    key: str
    count: int


class Retry(msgspec.Struct):
    """Messages that consumers sent back, or gave up."""

    consumer_group: str
    topic: str
    """The one they were consumed from."""
    attempt: int
    count: int
    is_dead: bool
    """Whether they are in the group's dead letter queue."""


class Late(msgspec.Struct):
    """Lateness of deliveries: store time of the first delivery minus deliver time, ms."""

    name: str
    count: int
    early: int
    p50_ms: int
    p90_ms: int
    p99_ms: int
    max_ms: int


class LatePoint(msgspec.Struct):
    """Deliveries due in a stretch of time."""

    start_ms: int
    count: int
    p50_ms: int
    p99_ms: int
    max_ms: int


class HeatCell(msgspec.Struct):
    """What was due in a minute of an hour of the day (UTC), over all days."""

    hour: int
    minute: int
    due: int
    p99_ms: int


class Ahead(msgspec.Struct):
    """Messages that wait, due in a stretch of time."""

    start_ms: int
    topic: str
    count: int


class BusySecond(msgspec.Struct):
    """A second ahead with many messages due."""

    second_ms: int
    count: int


class Consumer(msgspec.Struct):
    """A consumer group at a queue."""

    consumer_group: str
    topic: str
    queue_id: int
    next_offset: int
    max_offset: int | None
    lag: int | None
    """Messages."""
    behind_ms: int | None
    """Time from the first message it has not consumed to the last record in the store; 0 without a lag."""


_NOBODY: Final = Consumer("", "", 0, 0, None, None, None)


class Space(msgspec.Struct):
    """What compaction would give back, and why."""

    reason: str
    records: int
    bytes: int


class Analysis(msgspec.Struct, kw_only=True):
    """All figures. Times in ms since the epoch, durations in ms, sizes in bytes."""

    store: str
    made_ms: int
    first_ms: int
    last_ms: int
    bytes: int
    audit: Summary
    minutes: list[Minute]
    topics: list[Topic]
    producers: list[Count]
    keys: list[Key]
    key_error: int
    """How much higher the counts of keys may be."""
    duplicates: int
    """Messages that producers stored again, by topic and unique key."""
    retries: list[Retry]
    late_by_topic: list[Late]
    late_by_level: list[Late]
    late_by_hour: list[Late]
    """By hour of the deliver time, UTC."""
    lateness: list[LatePoint]
    lateness_step_ms: int
    heat: list[HeatCell]
    ahead: list[Ahead]
    ahead_step_ms: int
    busiest: list[BusySecond]
    overdue: int
    consumers: list[Consumer]
    space: list[Space]
    forecast: Forecast


TABLES: Final[dict[str, type[msgspec.Struct]]] = {
    "minutes": Minute,
    "topics": Topic,
    "producers": Count,
    "keys": Key,
    "retries": Retry,
    "late_by_topic": Late,
    "late_by_level": Late,
    "late_by_hour": Late,
    "lateness": LatePoint,
    "heat": HeatCell,
    "ahead": Ahead,
    "busiest": BusySecond,
    "consumers": Consumer,
    "space": Space,
}
"""The lists of an analysis that are tables, each with its row."""


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
    with Audit(session, path, delay_levels=delay_levels, with_usage=True) as work:
        analysis = _Analysis(work).run(rate)
        finish(work, analysis.audit, out, key)
        return analysis


def forecast_of(
    session: SparkSession, path: str, *, delay_levels: str | None = None, rate: float | None = None
) -> Forecast:
    """The forecast alone. Raises JobError."""
    with Audit(session, path, delay_levels=delay_levels) as work:
        return _Analysis(work).forecast(rate)


class _Analysis:
    def __init__(self, work: Audit) -> None:
        from pyspark.sql import functions as f

        self._f = f
        self._work = work
        self._delivered = work.cases.where(f"status in ('{DELIVERED}', '{TWICE}')").withColumn(
            "late_ms", f.col("first_ms") - f.col("due_ms")
        )
        self._pending = work.cases.where(f"status = '{PENDING}'")

    def run(self, rate: float | None) -> Analysis:
        work = self._work
        usage = self._usage = Usage(work.found.usage())
        summary = summarise(work)
        minutes = self._minutes()
        lateness, late_step = self._lateness()
        ahead, ahead_step = self._ahead()
        now_ms = max((read["last_ms"] for read in work.reads), default=0)
        return Analysis(
            store=work.store.path,
            made_ms=time.time_ns() // 1_000_000,
            first_ms=minutes[0].minute_ms if minutes else 0,
            last_ms=now_ms,
            bytes=sum(minute.bytes for minute in minutes),
            audit=summary,
            minutes=minutes,
            topics=self._topics(),
            producers=_top(usage.producers),
            keys=self._keys(),
            key_error=usage.key_error,
            duplicates=work.found.duplicates(),
            retries=_retries(usage),
            late_by_topic=self._late_by_topic(),
            late_by_level=self._late_by_level(),
            late_by_hour=self._late_by(self._f.expr("cast(due_ms div 3600000 % 24 as int)"), lambda hour: f"{hour:02}"),
            lateness=lateness,
            lateness_step_ms=late_step,
            heat=self._heat(),
            ahead=ahead,
            ahead_step_ms=ahead_step,
            busiest=self._busiest(),
            overdue=summary.overdue,
            consumers=_consumers(work.store, now_ms),
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
        f = self._f
        done = self._work.cases.where(f"status in ('{DELIVERED}', '{TWICE}', '{CANCELLED}')")
        sums = done.groupBy(f.col("status") == CANCELLED).agg(f.count(f.lit(1)), f.sum("size")).collect()
        found = [Space("cancelled" if row[0] else "delivered", row[1], row[2]) for row in sums]
        marks = self._role_sum(CANCEL)
        ended = self._ended_half()
        return sorted(
            (space for space in (*found, Space("marks of cancellations", *marks), ended) if space.records),
            key=lambda space: -space.bytes,
        )

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

    def _late_by(self, by: Column, name: Any) -> list[Late]:
        f = self._f
        rows = (
            self._delivered.groupBy(by.alias("by"))
            .agg(
                f.count(f.lit(1)).alias("count"),
                f.count(f.when(f.col("late_ms") < 0, 1)).alias("early"),
                f.percentile_approx("late_ms", [0.5, 0.9, 0.99], f.lit(2000)).alias("p"),
                f.max("late_ms").alias("max"),
            )
            .orderBy(f.desc("count"))
            .limit(1000)
            .collect()
        )
        return [
            Late(
                name(row.by), row["count"], row.early, p50_ms=row.p[0], p90_ms=row.p[1], p99_ms=row.p[2], max_ms=row.max
            )
            for row in rows
        ]

    def _late_by_topic(self) -> list[Late]:
        names = self._work.topics
        return self._late_by(self._f.col("topic_hash"), lambda key: names.get(key, "?"))

    def _late_by_level(self) -> list[Late]:
        delays = self._work.progress.delays_ms

        def name(level: int) -> str:
            return f"level {level} ({delays[level - 1] / 1000:g} s)" if 0 < level <= len(delays) else "timer"

        found = self._late_by(self._f.col("delay_level"), str)
        found.sort(key=lambda late: int(late.name))
        return [msgspec.structs.replace(late, name=name(int(late.name))) for late in found]

    def _span(self, frame: DataFrame, column: str) -> tuple[int, int, int]:
        """Least and greatest time of a column, and a step that cuts what is between into at most MAX_POINTS."""
        row = frame.agg(self._f.min(column), self._f.max(column)).first()
        assert row is not None
        if row[0] is None:
            return 0, 0, _STEPS_MS[0]
        return row[0], row[1], next((s for s in _STEPS_MS if (row[1] - row[0]) // s < MAX_POINTS), _STEPS_MS[-1])

    def _lateness(self) -> tuple[list[LatePoint], int]:
        f = self._f
        _, _, step = self._span(self._delivered, "due_ms")
        rows = (
            self._delivered.groupBy(f.expr(f"due_ms div {step}").alias("at"))
            .agg(
                f.count(f.lit(1)).alias("count"),
                f.percentile_approx("late_ms", [0.5, 0.99], f.lit(1000)).alias("p"),
                f.max("late_ms").alias("max"),
            )
            .orderBy("at")
            .collect()
        )
        points = [
            LatePoint(row.at * step, row["count"], p50_ms=row.p[0], p99_ms=row.p[1], max_ms=row.max) for row in rows
        ]
        return points, step

    def _heat(self) -> list[HeatCell]:
        f = self._f
        rows = (
            self._delivered.groupBy(f.expr("cast(due_ms div 60000 % 1440 as int)").alias("at"))
            .agg(f.count(f.lit(1)).alias("due"), f.percentile_approx("late_ms", 0.99, f.lit(1000)).alias("p99"))
            .orderBy("at")
            .collect()
        )
        return [HeatCell(row.at // 60, row.at % 60, row.due, row.p99) for row in rows]

    def _ahead(self) -> tuple[list[Ahead], int]:
        f = self._f
        _, _, step = self._span(self._pending, "due_ms")
        frame = self._pending.groupBy(f.expr(f"due_ms div {step}").alias("at"), "topic_hash").count()
        totals = frame.groupBy("topic_hash").agg(f.sum("count").alias("count")).orderBy(f.desc("count"))
        biggest = [row.topic_hash for row in totals.limit(SERIES).collect()]
        named = frame.withColumn("topic_hash", f.when(f.col("topic_hash").isin(biggest), f.col("topic_hash")))
        rows = named.groupBy("at", "topic_hash").agg(f.sum("count").alias("count")).orderBy("at").collect()
        names = self._work.topics
        return [Ahead(row.at * step, names.get(row.topic_hash, "others"), row["count"]) for row in rows], step

    def _by_second(self, frame: DataFrame, column: str, *more: Column) -> DataFrame:
        """How many rows each second has, by a column of ms; in no order."""
        f = self._f
        return frame.groupBy(f.expr(f"{column} div 1000").alias("second")).agg(f.count(f.lit(1)).alias("due"), *more)

    def _busiest(self) -> list[BusySecond]:
        f = self._f
        rows = self._by_second(self._pending, "due_ms").orderBy(f.desc("due"), "second").limit(TOP).collect()
        return [BusySecond(row.second * 1000, row.due) for row in rows]

    def forecast(self, rate: float | None) -> Forecast:
        """What is ahead, at a rate, or the one measured."""
        f = self._f
        now_ms = max((read["last_ms"] for read in self._work.reads), default=0)
        measured = 0
        if rate is None:
            late = f.count(f.when(f.col("late_ms") > 1000, 1)).alias("late")
            rows = self._by_second(self._delivered, "first_ms", late).orderBy("second").toArrow()
            rate, measured = measured_rate(*(rows[name].to_numpy() for name in ("second", "due", "late")))
        # What is overdue is delivered when the broker starts: at the end of what it has stored, at the earliest.
        due = self._pending.select(f.greatest(f.col("due_ms"), f.lit(now_ms)).alias("due_ms"))
        table = self._by_second(due, "due_ms").orderBy("second").toArrow()
        return forecast(table["second"].to_numpy(), table["due"].to_numpy(), rate, measured_seconds=measured)


def _by_purpose(counts: Any) -> tuple[int, int, int, int]:
    """Messages sent for now, sent for later, delivered of those; and other records."""
    first = int(counts[MESSAGE]), int(counts[LEVEL] + counts[TIMER]), int(counts[DELIVERY])
    return (*first, int(counts.sum()) - sum(first))


def _coarser(minutes: list[Minute]) -> list[Minute]:
    """Not more than MAX_POINTS, by adding up neighbours."""
    if not minutes:
        return []
    span = minutes[-1].minute_ms - minutes[0].minute_ms
    step = next((s for s in _STEPS_MS if s >= MINUTE_MS and span // s < MAX_POINTS), _STEPS_MS[-1])
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


def figures(analysis: Analysis) -> dict[str, Any]:
    """Each of the lists in TABLES as an Arrow table."""
    import pyarrow as pa

    kinds = {int: pa.int64(), str: pa.string(), bool: pa.bool_()}
    result = {}
    for name, row in TABLES.items():
        fields = [
            pa.field(field.name, next((kinds[t] for t in kinds if t is field.type), pa.int64()))
            for field in msgspec.structs.fields(row)
        ]
        rows = [msgspec.structs.asdict(item) for item in getattr(analysis, name)]
        result[name] = pa.Table.from_pylist(rows, pa.schema(fields))
    return result
