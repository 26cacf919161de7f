"""How far a level is.

A level's queue is in order of deliver times as long as its delay and the clock stay what they are. Where the delay was
shortened, or the clock set, another run begins: within a run the order holds, and each run has a cursor of its own.
Nearly always there is one run.

The checkpoint keeps the runs of all levels as a note (`storage.checkpoint`), as of its recovery offset: every message
before a cursor has been delivered by a record before that offset, or was given up. With the deliveries that recovery
finds behind it that tells exactly what was delivered.

    | crc32 of the table's text | number of levels | level  | number of runs | start | cursor | shift ms | ...
    | uint32                    | uint16           | uint16 | uint16         | int64 | int64  | int64    |
    | number of delivered ones | physical offset | ...
    | uint32                   | int64           |
    | number of limits | level  | run    | limit ms | ...
    | uint32           | uint16 | uint16 | int64    |
    a level follows the other, in it a run the other; then the scheduled records behind the cursors that an earlier
    recovery found delivered: their deliveries may lie before the recovery offset; then, where there are any, the
    limits of runs, by their numbers in their levels. All integers big-endian
"""

from __future__ import annotations

import struct
import zlib
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

_START: Final = struct.Struct(">IH")
_LEVEL: Final = struct.Struct(">HH")
_RUN: Final = struct.Struct(">qqq")
_COUNT: Final = struct.Struct(">I")
_LIMIT: Final = struct.Struct(">HHq")


class Run(NamedTuple):
    """Queue offsets of a part of a level's queue, which ends where the next run starts. `cursor`: the next to deliver.
    `shift_ms`: by how much the clock was set since these messages were stored; their deliver times move with it.
    `limit_ms`: none is due later than this after it was stored, since the table was shortened between two runs of the
    broker; None for no limit."""

    start: int
    cursor: int
    shift_ms: int = 0
    limit_ms: int | None = None


class Note(NamedTuple):
    """What the checkpoint's note says."""

    table_crc: int
    runs: dict[int, list[Run]]
    """By level."""
    delivered: array[int]
    """Physical offsets of scheduled records behind the cursors that were delivered."""


def table_crc(text: str) -> int:
    """What the note keeps of the table of levels."""
    return zlib.crc32(text.encode())


def encode(crc: int, levels: Mapping[int, Iterable[Run]], delivered: Sequence[int] = ()) -> bytes:
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
    if limits:
        parts += (_COUNT.pack(len(limits)), *limits)
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
        if at < len(note):
            (count,) = _COUNT.unpack_from(note, at)
            limits = list(_LIMIT.iter_unpack(note[at + _COUNT.size :]))
            if len(limits) != count:
                return None
            for level, number, limit in limits:
                levels[level][number] = levels[level][number]._replace(limit_ms=limit)
    except (struct.error, LookupError):
        return None
    return Note(crc, levels, delivered)
