"""Ranges of the commitlog that tasks read independently of each other, each starting with a record.

A message's body can contain any bytes, even whole records that state the physical offsets at which they happen to lie.
So a record's own fields prove nothing. A range starts at a position for which a consume queue has a unit with exactly
this physical offset and size, since the broker writes units only for records. If no unit is found, the records are
followed, size by size, from a known one.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice, pairwise
from typing import TYPE_CHECKING, Final

import numpy as np

from duemq.protocol.records.record import MIN_SIZE
from duemq.spark_jobs.columns.records import (
    PADDING,
    Records,
    starts_in,
)
from duemq.spark_jobs.errors import JobError
from duemq.spark_jobs.store.walks import CHUNK_SIZE, Range, Segment, walks

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from duemq.spark_jobs.store.store_files import StoreFiles

    Integers = NDArray[np.int64]

RANGE_SIZE: Final = 128 << 20
_WINDOW: Final = 1 << 20
_WINDOWS: Final = 8
"""Number of windows searched for a record with a unit before records are followed: more than the largest message."""
_TRIES: Final = 64
"""Number of positions in a window that are compared with their units."""


def plan(store: StoreFiles, size: int = RANGE_SIZE, *, start: int = 0, end: int | None = None) -> list[Range]:
    """Return the ranges of a store, of about `size` bytes, from the physical offset `start` (a record's start) to
    `end`. Raises JobError for a `size` below CHUNK_SIZE."""
    if size < CHUNK_SIZE:
        raise JobError(f"a range of {size} bytes is too small; at least {CHUNK_SIZE}")
    limit = store.readable_end if end is None else min(end, store.readable_end)
    ranges: list[Range] = []
    for segment in store.segments:
        first, last = max(segment.first_offset, start), min(segment.end, limit)
        if first >= last:
            continue
        cuts = [first]
        while last - cuts[-1] > size * 3 // 2:
            cut = boundary(store, segment, cuts[-1] + size, last, known=cuts[-1])
            if cut is None:
                break
            cuts.append(cut)
        cuts.append(last)
        ranges += [Range(a, b) for a, b in pairwise(cuts)]
    return ranges


def boundary(store: StoreFiles, segment: Segment, offset: int, end: int, *, known: int) -> int | None:
    """Return a record's start at or soon behind an offset; None where none follows. `known`: a record's start before
    it, in the same file, from which records are followed where the consume queues do not tell. Raises OSError."""
    at = offset
    for _ in range(_WINDOWS):
        if at >= end:
            break
        size = min(_WINDOW, end - at)
        data = np.zeros(size + PADDING, np.uint8)
        got = store.read_into(segment.path, at - segment.first_offset, memoryview(data)[:size])  # type: ignore[arg-type]
        for start in islice(starts_in(data, at, got), _TRIES):
            if _has_unit(store, segment, at + start, end):
                return at + start
        if got < size:
            break
        at += max(size - MIN_SIZE, 1)
    return _followed(store, known, offset, end)


def _has_unit(store: StoreFiles, segment: Segment, offset: int, end: int) -> bool:
    """Return whether bytes that look like a record are listed in the consume queue, at the unit that they name."""
    at = offset - segment.first_offset
    size = int.from_bytes(store.read(segment.path, at, 4), "big")
    if not MIN_SIZE <= size <= end - offset:
        return False
    data = np.zeros(size + PADDING, np.uint8)
    got = store.read_into(segment.path, at, memoryview(data)[:size])  # type: ignore[arg-type]
    record = Records(data, offset, np.zeros(1, np.int64)).whole(got)
    if not len(record):
        return False
    unit = store.unit(record.topics()[1][0], int(record.queue_id[0]), int(record.queue_offset[0]))
    return unit == (offset, size)


def _followed(store: StoreFiles, known: int, offset: int, end: int) -> int | None:
    """Return the start of the first record at or behind an offset, following the records from a known one."""
    for found in walks(store, Range(known, end), check_crc=False):
        at = found.records.physical_offset
        behind = int(np.searchsorted(at, offset))
        if behind < len(at):
            return int(at[behind])
    return None


def at_offsets(store: StoreFiles, offsets: Integers, sizes: Integers, *, gap: int = 64 << 10) -> Iterator[Records]:
    """Yield the records at given physical offsets, ascending, with their sizes; neighbouring ones are read together.
    Offsets at which no record lies are left out."""
    at, ends = 0, offsets + sizes
    while at < len(offsets):
        segment = store.segment_of(int(offsets[at]))
        if segment is None:
            at += 1
            continue
        last = at
        while (
            last + 1 < len(offsets)
            and offsets[last + 1] - ends[last] <= gap
            and ends[last + 1] - offsets[at] <= CHUNK_SIZE
            and ends[last + 1] <= segment.end
        ):
            last += 1
        size = int(ends[last] - offsets[at])
        data = np.zeros(size + PADDING, np.uint8)
        base = int(offsets[at])
        got = store.read_into(segment.path, base - segment.first_offset, memoryview(data)[:size])  # type: ignore[arg-type]
        records = Records(data, base, (offsets[at : last + 1] - base).astype(np.int64)).whole(got)
        if len(records):
            yield records
        at = last + 1


def records_at(store: StoreFiles, offsets: Integers) -> Iterator[Records]:
    """Yield the records at given physical offsets, ascending, one by one, which suits a few. Offsets at which no record
    lies are left out."""
    for offset in offsets.tolist():
        segment = store.segment_of(offset)
        if segment is not None:
            size = int.from_bytes(store.read(segment.path, offset - segment.first_offset, 4), "big")
            if MIN_SIZE <= size <= segment.end - offset:
                yield from at_offsets(store, np.array([offset], np.int64), np.array([size], np.int64))


def begin_ms_of(store: StoreFiles) -> int:
    """Return the store time (ms since the epoch) of the first record of a log whose first files are gone; 0 where none
    are."""
    first = next((segment for segment in store.segments if segment.size), store.segments[0])
    if not store.segments[0].first_offset:
        return 0
    return first_store_ms(store, Range(first.first_offset, first.end)) or 0


def first_store_ms(store: StoreFiles, part: Range) -> int | None:
    """Return the store time of a range's first record; None where its first 64 KiB have none."""
    for records in records_at(store, np.array([part.start], np.int64)):
        return int(records.store_ms[0])
    for found in walks(store, Range(part.start, min(part.end, part.start + (1 << 16))), check_crc=False):
        if len(found.records):
            return int(found.records.store_ms[0])
    return None
