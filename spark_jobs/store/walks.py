"""The records of a range of the commitlog, one after the other.

Keeps invariant 24 of ARCHITECTURE.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple, Protocol

import numpy as np

from duemq.spark_jobs.columns.records import PADDING, ZEROS, Damage, Walk, joined_damages, walk_records
from duemq.spark_jobs.errors import JobError

CHUNK_SIZE: Final = 4 << 20
"""Bytes that are read and decoded at a time: they stay in the processor's cache from one column to the next."""


class Segment(NamedTuple):
    """A commitlog file. `size`: that of the file, in bytes; its written part may be shorter."""

    first_offset: int
    path: str
    size: int

    @property
    def end(self) -> int:
        """Physical offset behind the file."""
        return self.first_offset + self.size


class Range(NamedTuple):
    """Physical offsets from the start of a record to the start of another, or to the end of the readable log. In one
    file."""

    start: int
    end: int


class LogFiles(Protocol):
    """The commitlog files of a store, as `store_files.StoreFiles` has them."""

    path: str
    readable_end: int

    def segment_of(self, offset: int) -> Segment | None:
        """Return the file that has a physical offset; None if there is none."""

    def read_into(self, path: str, at: int, buffer: memoryview) -> int:
        """Fill a buffer from a file; return the number of bytes read. Raises OSError."""


def walks(store: LogFiles, part: Range, *, check_crc: bool, chunk_size: int = CHUNK_SIZE) -> Iterator[Walk]:
    """Yield the records of a range, a few MiB at a time. The next walk overwrites the bytes of the last one: use or
    copy them before continuing. Damage may extend into the next walk (see `damages_of`). Raises OSError, and JobError
    if the file is gone."""
    segment = store.segment_of(part.start)
    if segment is None:
        raise JobError(
            f"{store.path}: the file with physical offset {part.start} was removed since the job was planned"
        )
    data = np.zeros(chunk_size + PADDING, np.uint8)
    at = part.start
    zeros_at: int | None = None
    while at < part.end:
        size = min(len(data) - PADDING, part.end - at)
        got = store.read_into(segment.path, at - segment.first_offset, memoryview(data)[:size])  # type: ignore[arg-type]
        data[got : got + PADDING] = 0
        is_last = at + got >= part.end or got < size
        found = walk_records(data, at, got, check_crc=check_crc, is_last=is_last, room=segment.end - at)
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
            # A record larger than the buffer.
            data = np.zeros(2 * len(data), np.uint8)
        at += found.end


def damages_of(store: LogFiles, part: Range, *, check_crc: bool) -> list[Damage]:
    """Return the damage in a range."""
    return joined_damages([damage for found in walks(store, part, check_crc=check_crc) for damage in found.damages])
