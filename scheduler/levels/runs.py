"""The progress of the levels, and its note in the checkpoint.

A level's queue is in the order of deliver times as long as its delay and the clock are not changed. When the delay is
shortened or the clock is set, another run begins: the order holds within a run, and each run has its own cursor. A
level nearly always has one run.

The checkpoint keeps the runs of all levels as a note (`storage.durability.checkpoint`), for its recovery offset: every
message before a cursor was delivered by a record before that offset, or was given up. Together with the deliveries that
recovery finds behind that offset, the note tells exactly which messages were delivered.

    | crc32 of the table's text | number of levels | level  | number of runs | start | cursor | shift ms | ...
    | uint32                    | uint16           | uint16 | uint16         | int64 | int64  | int64    |
    | number of delivered      | physical offset | ...
    | uint32                   | int64           |
    | number of limits | level  | run    | limit ms | ... | physical offset | clock ms | monotonic ms | boot id  |
    | uint32           | uint16 | uint16 | int64    |     | int64           | int64    | int64        | 16 bytes |
    First the levels one after another, each with its runs. Then those scheduled records behind the cursors that an
    earlier recovery found delivered, since their deliveries may lie before the recovery offset. Then the limits of
    runs, each with the run's number in its level. Finally, for the last reading of the clock, the end of the commitlog,
    the wall time, the monotonic time, and the id of the boot from which the monotonic time counts (zeros if unknown).
    Notes of earlier versions end before the monotonic time, before the end of the commitlog, or before the limits. All
    integers are big-endian.

Keeps invariants 15 and 16 of ARCHITECTURE.md.
"""

from __future__ import annotations

import struct
import zlib
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from duemq.storage.clock import Moment

_START: Final = struct.Struct(">IH")
_LEVEL: Final = struct.Struct(">HH")
_RUN: Final = struct.Struct(">qqq")
_COUNT: Final = struct.Struct(">I")
_LIMIT: Final = struct.Struct(">HHq")
_SEEN: Final = struct.Struct(">qqq16s")
_SEEN_BEFORE: Final = struct.Struct(">qq")
_NO_BOOT_ID: Final = bytes(16)


class Run(NamedTuple):
    """A part of a level's queue, from `start` to the start of the next run. `cursor`: the next queue offset to deliver.
    `shift_ms`: by how much the clock was set since these messages were stored; their deliver times move with it.
    `limit_ms`: the longest time from being stored to being due, if the table was changed while the broker was down;
    None if there is no limit."""

    start: int
    cursor: int
    shift_ms: int = 0
    limit_ms: int | None = None


class Seen(NamedTuple):
    """The last reading of the clock: the end of the commitlog at that time (`end`, a physical offset), the wall time in
    ms since the epoch, and the monotonic time in ms with the id of the boot from which it counts. The runs' shifts
    include all changes of the clock before it."""

    end: int
    wall_ms: int
    monotonic_ms: int = 0
    boot_id: bytes = b""

    def jump_ms(self, now: Moment) -> int | None:
        """Return by how many ms the wall clock was set since this reading; None if the machine was rebooted since, or
        may have been."""
        monotonic_ms = round(now.monotonic * 1000)
        if not self.boot_id or self.boot_id != now.boot_id or monotonic_ms < self.monotonic_ms:
            return None
        return now.wall_ms - self.wall_ms - (monotonic_ms - self.monotonic_ms)


class Note(NamedTuple):
    """The decoded note of the checkpoint. `table_crc`: identifies the table of levels, see the function of this
    name."""

    table_crc: int
    runs: dict[int, list[Run]]
    """Runs by level."""
    delivered: array[int]
    """Physical offsets of scheduled records behind the cursors that were delivered."""
    seen: Seen | None = None
    """The last reading of the clock; None in notes of earlier versions."""


def from_start(note: Note) -> Note:
    """Return a note with the cursors of its runs at their starts, and without delivered records."""
    found = {level: [run._replace(cursor=run.start) for run in each] for level, each in note.runs.items()}
    return note._replace(runs=found, delivered=array("q"))


def table_crc(text: str) -> int:
    """Return the checksum by which the note identifies the table of levels."""
    return zlib.crc32(text.encode())


def encode(
    crc: int, levels: Mapping[int, Iterable[Run]], delivered: Sequence[int] = (), seen: Seen | None = None
) -> bytes:
    """Encode a note. `crc`: of the table (`table_crc`); `levels`: the runs of each; `delivered`: physical offsets."""
    parts = [_START.pack(crc, len(levels))]
    for level, runs in levels.items():
        packed = [_RUN.pack(*run[:3]) for run in runs]
        parts += (_LEVEL.pack(level, len(packed)), *packed)
    parts.append(struct.pack(f">I{len(delivered)}q", len(delivered), *delivered))
    limits = [
        _LIMIT.pack(level, number, run.limit_ms)
        for level, runs in levels.items()
        for number, run in enumerate(runs)
        if run.limit_ms is not None
    ]
    if limits or seen is not None:
        parts += (_COUNT.pack(len(limits)), *limits)
    if seen is not None:
        parts.append(_SEEN.pack(seen.end, seen.wall_ms, seen.monotonic_ms, seen.boot_id or _NO_BOOT_ID))
    return b"".join(parts)


def decode(note: bytes) -> Note | None:
    """Decode a note; None if it is empty or has another format."""
    try:
        crc, count = _START.unpack_from(note)
        at = _START.size
        levels: dict[int, list[Run]] = {}
        for _ in range(count):
            level, number = _LEVEL.unpack_from(note, at)
            at += _LEVEL.size
            end = at + number * _RUN.size
            if number == 0 or end > len(note):
                return None
            levels[level] = [Run(*fields) for fields in _RUN.iter_unpack(note[at:end])]
            at = end
        if at == len(note):
            return Note(crc, levels, array("q"))  # the format of earlier versions
        (count,) = _COUNT.unpack_from(note, at)
        at += _COUNT.size
        delivered = array("q", struct.unpack_from(f">{count}q", note, at))
        at += 8 * count
        seen = None
        if at < len(note):
            (count,) = _COUNT.unpack_from(note, at)
            at += _COUNT.size
            end = at + count * _LIMIT.size
            if end > len(note):
                return None
            for level, number, limit in _LIMIT.iter_unpack(note[at:end]):
                levels[level][number] = levels[level][number]._replace(limit_ms=limit)
            seen = _decode_seen(note[end:])
    except (struct.error, LookupError):
        return None
    return Note(crc, levels, delivered, seen)


def _decode_seen(data: bytes) -> Seen | None:
    """Decode the end of a note, which may be missing, or without the boot id as in earlier versions. Raises
    struct.error."""
    if not data:
        return None
    if len(data) == _SEEN_BEFORE.size:
        return Seen(*_SEEN_BEFORE.unpack(data))
    seen = Seen(*_SEEN.unpack(data))
    return seen._replace(boot_id=b"") if seen.boot_id == _NO_BOOT_ID else seen
