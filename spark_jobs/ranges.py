"""Ranges of the commitlog that tasks read independently of each other, each starting with a record.

A range starts where a record says that it lies there (magic and its own physical offset), and where the unit of the
consume queue that the record names agrees. Without such a unit the body's checksum has to be right, and the same has to
hold for what follows, until a unit agrees, or for _FOLLOWING records: so what looks like a record inside a message's
body is not taken for the start of a range.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from spark_jobs.errors import JobError
from spark_jobs.records import (
    MAGIC_END,
    MIN_SIZE,
    PADDING,
    ZEROS,
    Damage,
    Records,
    Walk,
    joined_damages,
    starts_in,
    walk,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from spark_jobs.store_files import Segment, StoreFiles

    Integers = NDArray[np.int64]

RANGE_SIZE: Final = 128 << 20
CHUNK_SIZE: Final = 4 << 20
"""Bytes that are read and decoded at a time: they stay in the processor's cache from one column to the next."""
_WINDOW: Final = 1 << 20
_TRIES: Final = 64
_FOLLOWING: Final = 64


class Range(NamedTuple):
    """Physical offsets from a record's start to another's, or to the end of what can be read. In one file."""

    start: int
    end: int


def plan(store: StoreFiles, size: int = RANGE_SIZE, *, start: int = 0, end: int | None = None) -> list[Range]:
    """The ranges of a store, of about `size` bytes, from one physical offset (a record's start) to another."""
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
            cut = _boundary(store, segment, cuts[-1] + size, last)
            if cut is None:
                break
            cuts.append(cut)
        cuts.append(last)
        ranges += [Range(a, b) for a, b in pairwise(cuts)]
    return ranges


def _boundary(store: StoreFiles, segment: Segment, offset: int, end: int) -> int | None:
    """The first record's start at or behind an offset; None where there is none any more."""
    while offset < end:
        size = min(_WINDOW, end - offset)
        data = np.zeros(size + PADDING, np.uint8)
        got = store.read_into(segment.path, offset - segment.first_offset, memoryview(data)[:size])  # type: ignore[arg-type]
        for tried, start in enumerate(starts_in(data, offset, got)):
            if _is_record(store, segment, offset + start, end):
                return offset + start
            if tried > _TRIES:
                break
        if got < size:
            return None
        offset += max(size - MIN_SIZE, 1)
    return None


def _is_record(store: StoreFiles, segment: Segment, offset: int, end: int) -> bool:
    """Whether a record starts at an offset, by the consume queue, else by what it is itself and what follows it."""
    at = offset
    for _ in range(_FOLLOWING):
        if at > offset and (at >= end or _ends(store, segment, at)):
            return True
        found = _looks_like(store, segment, at, end)
        if found is None:
            return False
        unit, size = found
        if unit is not None:
            return unit == (at, size) or unit[1] == 1
        at += size
    return True


def _looks_like(
    store: StoreFiles, segment: Segment, offset: int, end: int
) -> tuple[tuple[int, int] | None, int] | None:
    """Of what looks like a record: the unit of the consume queue that it names, and its size."""
    at = offset - segment.first_offset
    size = int.from_bytes(store.read(segment.path, at, 4), "big")
    if not MIN_SIZE <= size <= end - offset:
        return None
    data = np.zeros(size + PADDING, np.uint8)
    store.read_into(segment.path, at, memoryview(data)[:size])  # type: ignore[arg-type]
    records = walk(data, offset, size, check_crc=True, is_last=True).records
    if not len(records) or records.starts[0]:
        return None
    return store.unit(records.topics()[1][0], int(records.queue_id[0]), int(records.queue_offset[0])), size


def _ends(store: StoreFiles, segment: Segment, offset: int) -> bool:
    """Whether records end at an offset: zeros, or the end marker."""
    head = store.read(segment.path, offset - segment.first_offset, 8)
    return not any(head) or int.from_bytes(head[4:], "big") == MAGIC_END


def walks(store: StoreFiles, part: Range, *, check_crc: bool, chunk_size: int = CHUNK_SIZE) -> Iterator[Walk]:
    """The records of a range, a few MiB at a time. The bytes of one are overwritten by the next: use or copy them
    before going on. Damages may be continued by those of the next walk (see `damages_of`). Raises OSError."""
    segment = store.segment_of(part.start)
    if segment is None:
        raise JobError(f"{store.path}: the file with physical offset {part.start} is gone since the job was planned")
    data = np.zeros(chunk_size + PADDING, np.uint8)
    at = part.start
    zeros_at: int | None = None
    while at < part.end:
        size = min(len(data) - PADDING, part.end - at)
        got = store.read_into(segment.path, at - segment.first_offset, memoryview(data)[:size])  # type: ignore[arg-type]
        data[got : got + PADDING] = 0
        is_last = at + got >= part.end or got < size
        found = walk(data, at, got, check_crc=check_crc, is_last=is_last, room=segment.end - at)
        # Zeros are the end of the log if nothing comes behind, and damage if something does.
        if zeros_at is not None and (found.zeros_at or found.at_end_marker):
            found.damages.insert(0, Damage(zeros_at, at - zeros_at, ZEROS))
            zeros_at = None
        if found.zeros_at < found.end:
            zeros_at = at + found.zeros_at if zeros_at is None else zeros_at
            if is_last and part.end < store.readable_end:
                found.damages.append(Damage(zeros_at, part.end - zeros_at, ZEROS))
        yield found
        if found.at_end_marker or is_last:
            return
        if found.end == 0:
            # A record that is larger than what was read.
            data = np.zeros(2 * len(data), np.uint8)
        at += found.end


def damages_of(store: StoreFiles, part: Range, *, check_crc: bool) -> list[Damage]:
    """What of a range is no record."""
    return joined_damages([damage for found in walks(store, part, check_crc=check_crc) for damage in found.damages])


def at_offsets(store: StoreFiles, offsets: Integers, sizes: Integers, *, gap: int = 64 << 10) -> Iterator[Records]:
    """The records at given physical offsets, ascending, with their sizes; those near each other are read together.
    Offsets at which no record lies are left out."""
    at = 0
    while at < len(offsets):
        segment = store.segment_of(int(offsets[at]))
        if segment is None:
            at += 1
            continue
        ends = offsets + sizes
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
    """The records at given physical offsets, ascending, one by one: for a few. Offsets at which no record lies are left
    out."""
    for offset in offsets.tolist():
        segment = store.segment_of(offset)
        if segment is not None:
            size = int.from_bytes(store.read(segment.path, offset - segment.first_offset, 4), "big")
            if MIN_SIZE <= size <= segment.end - offset:
                yield from at_offsets(store, np.array([offset], np.int64), np.array([size], np.int64))


def first_store_ms(store: StoreFiles, part: Range) -> int | None:
    """The store time of a range's first record; None where there is none at its start."""
    for records in records_at(store, np.array([part.start], np.int64)):
        return int(records.store_ms[0])
    for found in walks(store, Range(part.start, min(part.end, part.start + (1 << 16))), check_crc=False):
        if len(found.records):
            return int(found.records.store_ms[0])
    return None
