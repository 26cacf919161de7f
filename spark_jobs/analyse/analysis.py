"""The contents of an analysis: figures, and lists, each of which is a table too. Times in ms since the epoch, durations
in ms, sizes in bytes. `analysis.json` is an `Analysis` as JSON."""

from __future__ import annotations

from typing import Any, Final, get_args

import msgspec

from duemq.spark_jobs.analyse.forecast import Forecast
from duemq.spark_jobs.audit.audit import Summary


class Traffic(msgspec.Struct):
    """Records stored in a stretch of time."""

    start_ms: int
    messages: int
    """Messages sent for now."""
    scheduled: int
    """Messages sent for later."""
    delivered: int
    """Deliveries of scheduled messages."""
    other: int
    bytes: int


class TopicSize(msgspec.Struct):
    """A topic on the disk: its records and their sizes."""

    topic: str
    messages: int
    scheduled: int
    delivered: int
    other: int
    bytes: int
    body_p50: int
    """Half of the bodies are smaller than this power of two; 0 if they are empty."""
    body_p99: int
    first_ms: int
    last_ms: int
    """`first_ms` and `last_ms`: start of the first and of the last hour that has records."""


class Count(msgspec.Struct):
    """A name and how often it occurs, and bytes where known."""

    name: str
    count: int
    bytes: int = 0


class Key(msgspec.Struct):
    """A key (the property KEYS), and the least number of times that it occurs in its topic."""

    topic: str
    key: str
    count: int


class SentBack(msgspec.Struct):
    """Messages that consumers sent back, or gave up."""

    consumer_group: str
    topic: str
    """The topic that they were consumed from."""
    attempt: int
    count: int
    is_dead: bool
    """Whether they are in the group's dead letter queue."""


class LatenessFigures(msgspec.Struct):
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
    """Messages due in a minute of an hour of the day (UTC), over all days."""

    hour: int
    minute: int
    due: int
    p99_ms: int


class Ahead(msgspec.Struct):
    """Waiting messages due in a stretch of time."""

    start_ms: int
    topic: str
    count: int


class BusySecond(msgspec.Struct):
    """A second ahead with many messages due."""

    second_ms: int
    count: int


class GroupAtQueue(msgspec.Struct, omit_defaults=True):
    """A consumer group at a queue."""

    consumer_group: str
    topic: str
    queue_id: int
    next_offset: int
    max_offset: int | None
    lag: int | None
    """Number of messages that the group has not consumed."""
    behind_ms: int | None
    """Time from the first message that it has not consumed to the last record in the store; 0 without a lag."""
    store: str | None = None
    """In a cluster, the store that has the queue: its brokers have queues with the same numbers."""


class Space(msgspec.Struct):
    """Space that a compaction would free, and why."""

    reason: str
    records: int
    bytes: int


class StoreInCluster(msgspec.Struct, kw_only=True):
    """A store of a cluster: the main figures of its own report. A store that could not be read has none."""

    store: str
    why: str | None = None
    """Why it could not be read."""
    report: str | None = None
    """The address of its report, relative to that of the cluster."""
    mood: str | None = None
    """The verdict's mood: good, warn or bad."""
    headline: str | None = None
    """The verdict in a sentence."""
    last_ms: int | None = None
    """Store time of its last record."""
    bytes: int | None = None
    records: int | None = None
    scheduled: int | None = None
    delivered: int | None = None
    cancelled: int | None = None
    pending: int | None = None
    overdue: int | None = None
    lost: int | None = None
    twice: int | None = None
    destroyed: int | None = None
    unclaimed: int | None = None
    damaged: int | None = None
    p50_ms: int | None = None
    p99_ms: int | None = None
    max_ms: int | None = None
    """Lateness of the latest delivery."""


class Analysis(msgspec.Struct, kw_only=True, omit_defaults=True):
    """All figures. Times in ms since the epoch, durations in ms, sizes in bytes."""

    store: str
    made_ms: int
    first_ms: int
    last_ms: int
    bytes: int
    audit: Summary
    traffic: list[Traffic]
    traffic_step_ms: int
    topics: list[TopicSize]
    producers: list[Count]
    keys: list[Key]
    key_error: int
    """The most by which a key's true count can exceed the given one."""
    duplicates: int
    """Messages that producers stored again, by topic and unique key."""
    retries: list[SentBack]
    late_by_topic: list[LatenessFigures]
    late_by_level: list[LatenessFigures]
    late_by_hour: list[LatenessFigures]
    """By hour of the deliver time, UTC."""
    lateness: list[LatePoint]
    lateness_step_ms: int
    heat: list[HeatCell]
    ahead: list[Ahead]
    ahead_step_ms: int
    busiest: list[BusySecond]
    overdue: int
    consumers: list[GroupAtQueue]
    space: list[Space]
    forecast: Forecast
    stores: list[StoreInCluster] = []
    """The stores of a cluster, in order; empty for one store."""


TABLES: Final[dict[str, type[msgspec.Struct]]] = {
    "traffic": Traffic,
    "topics": TopicSize,
    "producers": Count,
    "keys": Key,
    "retries": SentBack,
    "late_by_topic": LatenessFigures,
    "late_by_level": LatenessFigures,
    "late_by_hour": LatenessFigures,
    "lateness": LatePoint,
    "heat": HeatCell,
    "ahead": Ahead,
    "busiest": BusySecond,
    "consumers": GroupAtQueue,
    "space": Space,
}
"""The lists of an analysis that are tables, each with its row; a cluster's analysis also has `stores`."""


def figures(analysis: Analysis) -> dict[str, Any]:
    """Return each of the lists in TABLES as an Arrow table, and a cluster's stores."""
    import pyarrow as pa

    kinds: dict[Any, Any] = {str: pa.string(), bool: pa.bool_()}

    def kind_of(field: Any) -> Any:
        return next((kinds[kind] for kind in (field, *get_args(field)) if kind in kinds), pa.int64())

    tables = TABLES | ({"stores": StoreInCluster} if analysis.stores else {})
    result = {}
    for name, row in tables.items():
        fields = [
            pa.field(field.name, kind_of(field.type))
            for field in msgspec.structs.fields(row)
            if field.name != "store" or analysis.stores
        ]
        rows = [
            {key: _in_64_bits(value) for key, value in msgspec.structs.asdict(item).items()}
            for item in getattr(analysis, name)
        ]
        result[name] = pa.Table.from_pylist(rows, pa.schema(fields))
    return result


def _in_64_bits(value: Any) -> Any:
    """Return an integer clamped to 64 bits: a damaged record's time may lie in a step that begins before the first of
    them."""
    return min(max(value, -(1 << 63)), (1 << 63) - 1) if isinstance(value, int) else value
