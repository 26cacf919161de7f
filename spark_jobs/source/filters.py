"""The records that a reader of a store returns, as its options say: by topic, store time, physical offset and queue
offset.

They are options because Spark 4.1 to 4.3 keep one Python reader for a DataFrame, a view, and everything derived from
it: a reader that took one query's filters (`pushFilters`) would apply them to the next query too, and in a union or a
self-join the last filters to every side.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from duemq.spark_jobs.columns.records import Records
    from duemq.spark_jobs.source.tables import RecordColumns

ALL: Final = (-(1 << 63), (1 << 63) - 1)
"""A span that includes everything."""


class Span(NamedTuple):
    """The part of a queue that is read: records within all of these bounds. Starts are inclusive, ends exclusive."""

    start_queue: int = ALL[0]
    """A queue offset, as `end_queue`."""
    end_queue: int = ALL[1]
    start: int = ALL[0]
    """A physical offset."""
    start_ms: int = ALL[0]
    """Store time, ms since the epoch, as `end_ms`."""
    end_ms: int = ALL[1]


@dataclass(frozen=True)
class Filters:
    """The conditions for records to be read. A span is its first value and the value behind its last."""

    topics: frozenset[str] | None = None
    """None for all."""
    store_ms: tuple[int, int] = ALL
    physical_offset: tuple[int, int] = ALL
    queues: Mapping[str, Mapping[int, Span]] = field(default_factory=dict)
    """Spans by topic and queue id; a queue that is not named is read as a whole."""
    until: int = ALL[1]
    """The physical offset from which on `store_ms` and `queues` no longer apply."""

    def keep(self, records: Records) -> Records:
        """Return the records within all spans; `topics` is not checked here."""
        low, high = self.physical_offset
        if (low, high) != ALL and len(records):
            records = only(records, (records.physical_offset >= low) & (records.physical_offset < high))
        if not len(records) or (self.store_ms == ALL and not self.queues):
            return records
        low, high = self.store_ms
        wanted = (records.store_ms >= low) & (records.store_ms < high)
        if self.queues:
            wanted &= self._in_queues(records)
        if self.until != ALL[1]:
            wanted |= records.physical_offset >= self.until
        return only(records, wanted)

    def _in_queues(self, records: Records) -> NDArray[np.bool_]:
        """Return which records are within the spans of their queues."""
        codes, names = records.topics()
        known = [
            ((code << 32) | queue, span)
            for code, name in enumerate(names)
            for queue, span in self.queues.get(name, {}).items()
        ]
        if not known:
            return np.ones(len(records), np.bool_)
        known.sort(key=lambda item: item[0])
        keys = np.array([key for key, _ in known], np.int64)
        spans = np.array([span for _, span in known], np.int64)
        mine = (codes.astype(np.int64) << 32) | records.queue_id
        at = np.minimum(np.searchsorted(keys, mine), len(keys) - 1)
        start_queue, end_queue, start, start_ms, end_ms = spans[at].T
        is_within: NDArray[np.bool_] = (records.queue_offset >= start_queue) & (records.queue_offset < end_queue)
        is_within &= records.physical_offset >= start
        is_within &= (records.store_ms >= start_ms) & (records.store_ms < end_ms)
        is_within |= keys[at] != mine
        return is_within


_Rows = TypeVar("_Rows", "Records", "RecordColumns")


def only(rows: _Rows, wanted: NDArray[np.bool_]) -> _Rows:
    """Return the wanted rows; the same object where all are wanted."""
    return rows if wanted.all() else rows.take(wanted)
