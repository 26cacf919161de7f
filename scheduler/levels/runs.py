"""How far a level is.

A level's queue is in order of deliver times as long as its delay and the clock stay what they are. Where the delay was
shortened, or the clock set, another run begins: within a run the order holds, and each run has a cursor of its own.
Nearly always there is one run.

The checkpoint keeps the runs of all levels as a note (`storage.durability.checkpoint`), as of its recovery offset:
every message before a cursor has been delivered by a record before that offset, or was given up. With the deliveries
that recovery finds behind it that tells exactly what was delivered.

    | crc32 of the table's text | number of levels | level  | number of runs | start | cursor | shift ms | ...
    | uint32                    | uint16           | uint16 | uint16         | int64 | int64  | int64    |
    | number of delivered ones | physical offset | ...
    | uint32                   | int64           |
    | number of limits | level  | run    | limit ms | ... | physical offset | clock ms | monotonic ms | boot id  |
    | uint32           | uint16 | uint16 | int64    |     | int64           | int64    | int64        | 16 bytes |
    a level follows the other, in it a run the other; then the scheduled records behind the cursors that an earlier
    recovery found delivered: their deliveries may lie before the recovery offset; then the limits of runs, by their
    numbers in their levels; then up to where the log was when the clock was looked at last, what it said, and the time
    by a clock that nobody sets, with what that counts from (zeros if that is not known). Earlier versions end before
    the monotonic time, before that offset, or before the limits. All integers big-endian
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
    """Queue offsets of a part of a level's queue, which ends where the next run starts. `cursor`: the next to deliver.
    `shift_ms`: by how much the clock was set since these messages were stored; their deliver times move with it.
    `limit_ms`: none is due later than this after it was stored, since the table was shortened between two runs of the
    broker; None for no limit."""

    start: int
    cursor: int
    shift_ms: int = 0
    limit_ms: int | None = None


class Seen(NamedTuple):
    """Up to which physical offset the log was written when the wall clock was looked at last, what that said, ms since
    the epoch, and the monotonic time then, ms, with what that counts from. By how much the clock had been set until
    then, the runs' shifts tell."""

    end: int
    wall_ms: int
    monotonic_ms: int = 0
    boot_id: bytes = b""

    def jump_ms(self, now: Moment) -> int | None:
        """By how much the wall clock was set since; None where the machine was started again, or nobody can tell."""
        monotonic_ms = round(now.monotonic * 1000)
        if not self.boot_id or self.boot_id != now.boot_id or monotonic_ms < self.monotonic_ms:
            return None
        return now.wall_ms - self.wall_ms - (monotonic_ms - self.monotonic_ms)


class Note(NamedTuple):
    """What the checkpoint's note says."""

    table_crc: int
    runs: dict[int, list[Run]]
    """By level."""
    delivered: array[int]
    """Physical offsets of scheduled records behind the cursors that were delivered."""
    seen: Seen | None = None
    """None in notes of earlier versions."""


def from_start(note: Note) -> Note:
    """The same runs, with nothing delivered of them as far as the note tells."""
    found = {level: [run._replace(cursor=run.start) for run in each] for level, each in note.runs.items()}
    return note._replace(runs=found, delivered=array("q"))


def table_crc(text: str) -> int:
    """What the note keeps of the table of levels."""
    return zlib.crc32(text.encode())


def encode(
    crc: int, levels: Mapping[int, Iterable[Run]], delivered: Sequence[int] = (), seen: Seen | None = None
) -> bytes:
    """The note's bytes."""
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
    """What a note says; None for one that is empty or of another make."""
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
            return Note(crc, levels, array("q"))  # as earlier versions wrote it
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
            if len(note) - end == _SEEN_BEFORE.size:
                seen = Seen(*_SEEN_BEFORE.unpack(note[end:]))
            elif end < len(note):
                seen = Seen(*_SEEN.unpack(note[end:]))
                if seen.boot_id == _NO_BOOT_ID:
                    seen = seen._replace(boot_id=b"")
    except (struct.error, LookupError):
        return None
    return Note(crc, levels, delivered, seen)
