"""The tables of stores as DataFrames, for sessions and notebooks."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any

from duemq.spark_jobs.errors import JobError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Offsets = str | Mapping[str, Mapping[int, int]] | Mapping[str, Mapping[str, Mapping[int, int]]]
"""earliest, latest, or a queue offset for each queue of a topic, {"orders": {0: 23, 1: -2}} (-2: earliest, -1: latest);
for several stores also {store: {topic: {queue: offset}}}."""


def load(
    session: SparkSession,
    *stores: str | os.PathLike[str],
    table: str = "messages",
    columns: Iterable[str] | None = None,
    topics: Iterable[str] | None = None,
    since: datetime | int | None = None,
    until: datetime | int | None = None,
    starting_offsets: Offsets | None = None,
    ending_offsets: Offsets | None = None,
    delay_levels: str | None = None,
    **options: object,
) -> DataFrame:
    """Return a table of one or several stores, given by paths or URIs, which may have wildcards.

    `table`: messages, schedules, pending, consume_queue, timers, offsets or damaged. `columns`: by default all but
    those meant for jobs. `since`, `until`: records stored at or after `since` and before `until`; ms since the epoch,
    or a datetime, which without a zone is in this machine's. `delay_levels`: the broker's messageDelayLevel, if the
    store does not have it. `options`: others of the data source, see `spark_jobs.source.source`, such as checkCrc=True.

    The table is as the store was at the first query of it. Raises JobError; PySparkException for errors that only Spark
    finds.
    """
    chosen = {
        "table": table,
        "columns": columns,
        "topics": topics,
        "startingTimestamp": since,
        "endingTimestamp": until,
        "startingOffsets": starting_offsets,
        "endingOffsets": ending_offsets,
        "delayLevels": delay_levels,
        **options,
    }
    return _reader(session, session.read, chosen).load(_paths(stores))  # type: ignore[no-any-return]


def stream(
    session: SparkSession,
    *stores: str | os.PathLike[str],
    table: str = "messages",
    columns: Iterable[str] | None = None,
    topics: Iterable[str] | None = None,
    since: datetime | int | None = None,
    starting_offsets: Offsets | None = None,
    max_offsets_per_trigger: int | None = None,
    max_bytes_per_trigger: int | None = None,
    fail_on_data_loss: bool | None = None,
    **options: object,
) -> DataFrame:
    """Return a stream of the records that stores have and that are appended to them: the tables messages and schedules.

    A query begins at `since` or `starting_offsets`, and continues from its checkpoint. `max_offsets_per_trigger`,
    `max_bytes_per_trigger`: records, and bytes of the commitlog, in a micro-batch. `fail_on_data_loss`: whether the
    query stops if messages expired before they were read, as by default. All others as for `load`. Raises JobError;
    PySparkException for errors that only Spark finds."""
    chosen = {
        "table": table,
        "columns": columns,
        "topics": topics,
        "startingTimestamp": since,
        "startingOffsets": starting_offsets,
        "maxOffsetsPerTrigger": max_offsets_per_trigger,
        "maxBytesPerTrigger": max_bytes_per_trigger,
        "failOnDataLoss": fail_on_data_loss,
        **options,
    }
    return _reader(session, session.readStream, chosen).load(_paths(stores))  # type: ignore[no-any-return]


def _paths(stores: tuple[str | os.PathLike[str], ...]) -> str | list[str]:
    paths = [os.fspath(store) for store in stores]
    if not all([paths, *paths]):
        raise JobError("no store is given: pass its path")
    return paths[0] if len(paths) == 1 else paths


def _reader(session: SparkSession, reader: Any, options: Mapping[str, object]) -> Any:
    from duemq.spark_jobs.source.source import register

    register(session)
    reader = reader.format("rocketmq")
    for name, value in options.items():
        if value is not None:
            reader = reader.option(name, _text(value))
    return reader


def _text(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, datetime):
        return str(round(value.timestamp() * 1000))
    if isinstance(value, Mapping):
        return json.dumps(value)
    if isinstance(value, Iterable) and not isinstance(value, str):
        return ",".join(map(str, value))
    return str(value)
