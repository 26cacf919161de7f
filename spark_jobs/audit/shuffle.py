"""Brings the parts of a matching together: by Spark, or in this process if there are few.

A shuffle takes three functions of Arrow data (`PART`): `scan` makes rows from the numbers of ranges; `by_origin` and
`by_key` make new rows from all rows of a bucket. It returns kind and data of the rows of `by_key`, in any order.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np
import pyarrow as pa

from duemq.spark_jobs.spark_errors import in_one_line
from duemq.spark_jobs.worker import prepare_worker

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PART: Final = pa.schema([("bucket", pa.int64()), ("kind", pa.int8()), ("data", pa.binary())])
_DDL: Final = "bucket bigint, kind tinyint, data binary"
_CHECKS_A_PROCESSOR: Final = 4
"""Number of tasks for each processor that check for a directory."""

Scan = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]
Match = Callable[[pa.Table], pa.Table]


class Shuffle(Protocol):
    """Brings parts together."""

    def __call__(self, count: int, scan: Scan, by_origin: Match, by_key: Match) -> Iterable[tuple[int, bytes]]:
        """Run the functions for `count` ranges."""

    def sees(self, directory: str) -> bool:
        """Return whether a directory of this process is visible to the functions too."""


class Here:
    """Runs the functions in this process, with all rows in memory."""

    def __call__(self, count: int, scan: Scan, by_origin: Match, by_key: Match) -> Iterable[tuple[int, bytes]]:
        """Run the functions for `count` ranges: `scan` once for all ranges, then each match for each bucket. Return the
        parts, each with its kind."""
        numbers = pa.RecordBatch.from_pydict({"id": pa.array(range(count), pa.int64())})
        parts = pa.Table.from_batches(list(scan(iter([numbers]))), PART)
        for match in (by_origin, by_key):
            parts = pa.concat_tables([PART.empty_table(), *(match(group) for group in _groups(parts))])
        return list(zip(parts["kind"].to_pylist(), parts["data"].to_pylist(), strict=True))

    def sees(self, directory: str) -> bool:
        """Return whether a directory exists."""
        return os.path.isdir(directory)


class BySpark:
    """Runs the functions in Spark's tasks."""

    def __init__(self, session: SparkSession, partitions: int) -> None:
        """`partitions`: their number in a round; each has one bucket of matching, or a few."""
        self._session, self._partitions = session, partitions

    def __call__(self, count: int, scan: Scan, by_origin: Match, by_key: Match) -> Iterable[tuple[int, bytes]]:
        """Run the functions for `count` ranges, in tasks: `scan` for some ranges each, then each match for each bucket.
        Return the parts, each with its kind."""

        def scan_task(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            prepare_worker()
            yield from scan(batches)

        def origin_task(table: pa.Table) -> pa.Table:
            prepare_worker()
            return by_origin(table)

        def key_task(table: pa.Table) -> pa.Table:
            prepare_worker()
            return by_key(table)

        session = self._session
        session.conf.set("spark.sql.shuffle.partitions", str(self._partitions))
        parts = session.range(0, count, 1, count).mapInArrow(scan_task, _DDL)
        first = parts.groupBy("bucket").applyInArrow(origin_task, _DDL)
        with in_one_line():
            ended = first.groupBy("bucket").applyInArrow(key_task, _DDL).select("kind", "data").collect()
        return [(row.kind, bytes(row.data)) for row in ended]

    def sees(self, directory: str) -> bool:
        """Return whether a directory of this process is visible to the tasks too. Starts tasks to find out, which must
        be able to write to the directory."""
        context = self._session.sparkContext
        if (context.master or "").startswith("local"):
            return os.path.isdir(directory)

        def look(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            for batch in batches:
                is_there = os.access(directory, os.W_OK)
                yield pa.RecordBatch.from_pydict({"is_there": [is_there] * len(batch)})

        count = context.defaultParallelism * _CHECKS_A_PROCESSOR
        rows = self._session.range(0, count, 1, count).mapInArrow(look, "is_there boolean").collect()
        return all(row.is_there for row in rows)


def _groups(table: pa.Table) -> Iterator[pa.Table]:
    buckets = table["bucket"].to_numpy()
    for bucket in np.unique(buckets).tolist():
        yield table.filter(pa.array(buckets == bucket))
