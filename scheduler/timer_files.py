"""The small files of the timers, and their part of the checkpoint.

    config/timercheck, 4096 bytes, seven int64:
    | read time | log position | queue offset | master's queue offset | state version | version time | counter |
    read time: ms; the slot to be read next. log position: the timer log is flushed up to there. queue offset: next of
    the timer topic's queue to be put into the wheel.

    config/timermetrics: {"dataVersion": {...}, "timingCount": {"<topic>": {"count": n, "timeStamp": ms}}}

    the note "timers" in the checkpoint (see `storage.checkpoint`), as of its recovery offset:
    | version | second | since | log since | log end | log crc32 | queue offset | held to | counted at |
    | uint8 3 | int64  | int64 | int64     | int64   | uint32    | int64        | int64   | int64      |
    | topics | hash  | waiting |
    | uint32 | int32 | int64   |
    the last two for each topic that has messages waiting
    | recovered to | done   | withdrawn | moved  | done: offset << 1 | withdrawn: | moved: offset | position |
    | int64        | uint32 | uint32    | uint32 | counted, int64    | int64      | int64         | int64    |
    first the numbers, then so many of each
    second:       the messages of all slots before it have been delivered, or withdrawn, by records before the recovery
                  offset, or have got other slots
    since:        where the commitlog ended when that second's turn came, or when the store was opened, if that was
                  later: records behind that tell what of the second itself was delivered
    log since:    likewise of the timer log: units behind that tell what of the second got another unit
    log end:      the timer log's end; log crc32: of its last units, since a log that was lost is made again, otherwise
    queue offset: next of the timer topic's queue to be put into the wheel
    held to:      no second beyond has a message whose time its topic's policy chose (see `timer_policies`)
    counted at:   `waiting` is without the second's messages that records before this physical offset delivered. Those
                  of later seconds that were delivered before a crash are in it still: each second's are taken out
                  when it has its turn
    The rest is what the start before this found of the time before it, and what matters still:
    recovered to: no second from this one on has a message that was found delivered
    done:         physical offsets of messages that were delivered, and are in a slot that is not past or not in the
                  wheel yet; counted: 1 where `waiting` is without the message, if it is in the slot of `second`
    withdrawn:    of those that were cancelled, or appended once more, and are not in the wheel yet
    moved:        of those that got another unit since the turn of `second` began, and that unit's position
    Versions 1, without counted at, and 2 end with the topics.
    All integers big-endian.

Mirrors apache/rocketmq store/timer/{TimerCheckpoint,TimerMetrics}.java (5.3.3).
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
import numpy as np

from scheduler.timer_second import is_among
from storage.files import Files

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Offsets = NDArray[np.int64]

CHECK_SIZE: Final = 4096
_CHECK: Final = struct.Struct(">7q")
_NOTE: Final = struct.Struct(">BqqqqIqqqI")
_NOTE_1: Final = struct.Struct(">BqqqqIqqI")
"""As earlier versions wrote it, without `counted_at`."""
_EVERYTHING: Final = 2**62
_WAITING: Final = struct.Struct(">iq")
_FOUND: Final = struct.Struct(">qIII")
_OFFSET: Final = np.dtype(">i8")
_NOTE_VERSION: Final = 3
NO_OFFSETS: Final = np.empty(0, np.int64)


class TimerCheck(msgspec.Struct):
    """What timercheck says. Times in ms since the epoch."""

    read_ms: int = 0
    log_position: int = 0
    queue_offset: int = 0
    master_queue_offset: int = 0
    state_version: int = 0
    version_ms: int = 0
    counter: int = 0

    def encode(self) -> bytes:
        """The 56 bytes that matter."""
        return _CHECK.pack(*msgspec.structs.astuple(self))


def load_check(files: Files, path: str) -> TimerCheck | None:
    """What the file says; None where there is none, or one that is too short."""
    data = files.read_whole(path)
    if data is None or len(data) < _CHECK.size:
        return None
    return TimerCheck(*_CHECK.unpack_from(data))


def save_check(files: Files, path: str, check: TimerCheck) -> None:
    """Write the file. May wait for the disk. Raises OSError."""
    files.write_whole(path, check.encode().ljust(CHECK_SIZE, b"\0"))


class _Metric(msgspec.Struct):
    count: int = 0
    timeStamp: int = 0  # noqa: N815, the file's name for it


class _Metrics(msgspec.Struct):
    dataVersion: dict[str, int] = {}  # noqa: N815
    timingCount: dict[str, _Metric] = {}  # noqa: N815


def metrics_json(counts: Mapping[str, int], now_ms: int, version: int) -> bytes:
    """The text of timermetrics, and the answer to GET_TIMER_METRICS."""
    data_version = {"counter": version, "stateVersion": 0, "timestamp": now_ms}
    return msgspec.json.encode(_Metrics(data_version, {name: _Metric(n, now_ms) for name, n in counts.items()}))


def load_topics(files: Files, path: str) -> dict[str, int]:
    """The topics that timermetrics names, and how many messages of each waited; none where it is missing or broken,
    since it is only statistics."""
    data = files.read_whole(path)
    try:
        counts = msgspec.json.decode(data, type=_Metrics).timingCount if data else {}
    except msgspec.DecodeError:
        return {}
    return {topic: metric.count for topic, metric in counts.items()}


class Found(NamedTuple):
    """What a start found of the time before it. Physical offsets, ascending."""

    recovered_to: int = 0
    done: Offsets = NO_OFFSETS
    counted: Offsets = NO_OFFSETS
    """Some of `done`."""
    withdrawn: Offsets = NO_OFFSETS
    moved: Offsets = NO_OFFSETS
    moved_by: Offsets = NO_OFFSETS
    """Positions in the timer log, by the places in `moved`."""

    def encode(self) -> bytes:
        """See the module."""
        head = _FOUND.pack(self.recovered_to, len(self.done), len(self.withdrawn), len(self.moved))
        done = self.done << 1 | is_among(self.done, self.counted)
        moved = np.stack((self.moved, self.moved_by), axis=1)
        return head + b"".join([part.astype(_OFFSET).tobytes() for part in (done, self.withdrawn, moved)])


def _decode_found(data: bytes) -> Found | None:
    if len(data) < _FOUND.size:
        return None
    recovered_to, *counts = _FOUND.unpack_from(data)
    numbers = np.frombuffer(data[_FOUND.size :], _OFFSET, (len(data) - _FOUND.size) // _OFFSET.itemsize)
    done_count, withdrawn_count, moved_count = counts
    if len(data) != _FOUND.size + (done_count + withdrawn_count + 2 * moved_count) * _OFFSET.itemsize:
        return None
    done, withdrawn, moved = np.split(numbers.astype(np.int64), np.cumsum(counts[:2]))
    moved = moved.reshape(-1, 2)
    offsets = done >> 1
    return Found(recovered_to, offsets, offsets[done & 1 == 1], withdrawn, moved[:, 0], moved[:, 1])


class TimerNote(msgspec.Struct, eq=False):
    """What the note says."""

    second: int
    since: int
    log_since: int
    log_end: int
    log_crc: int
    queue_offset: int
    held_to: int
    counted_at: int
    waiting: dict[int, int]
    """Messages in the wheel by topic hash."""
    found: Found = Found()

    def encode(self) -> bytes:
        """The note's bytes."""
        head = _NOTE.pack(
            _NOTE_VERSION,
            self.second,
            self.since,
            self.log_since,
            self.log_end,
            self.log_crc,
            self.queue_offset,
            self.held_to,
            self.counted_at,
            len(self.waiting),
        )
        return head + b"".join([_WAITING.pack(*item) for item in self.waiting.items()]) + self.found.encode()


def needed_from(notes: Mapping[str, bytes]) -> int | None:
    """The physical offset from which recovery, by the notes of a checkpoint, will read the commitlog for the timers;
    None where they say nothing of timers."""
    note = decode_note(notes.get("timers", b""))
    return note.since if note is not None else None


def decode_note(data: bytes) -> TimerNote | None:
    """What a note says; None for one that is empty or of another make."""
    head = {1: _NOTE_1, 2: _NOTE, _NOTE_VERSION: _NOTE}.get(data[0]) if data else None
    if head is None or len(data) < head.size:
        return None
    version, second, since, log_since, log_end, log_crc, queue_offset, held_to, *rest, count = head.unpack_from(data)
    end = head.size + count * _WAITING.size
    if len(data) < end or (version < _NOTE_VERSION and len(data) != end):
        return None
    counted_at = rest[0] if rest else _EVERYTHING
    waiting = dict(_WAITING.iter_unpack(data[head.size : end]))
    found = _decode_found(data[end:]) if version == _NOTE_VERSION else Found()
    if found is None:
        return None
    return TimerNote(second, since, log_since, log_end, log_crc, queue_offset, held_to, counted_at, waiting, found)
