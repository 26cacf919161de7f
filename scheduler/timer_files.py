"""The small files of the timers, and their part of the checkpoint.

    config/timercheck, 4096 bytes, seven int64:
    | read time | log position | queue offset | master's queue offset | state version | version time | counter |
    read time: ms; the slot to be read next. log position: the timer log is flushed up to there. queue offset: next of
    the timer topic's queue to be put into the wheel.

    config/timermetrics: {"dataVersion": {...}, "timingCount": {"<topic>": {"count": n, "timeStamp": ms}}}

    the note "timers" in the checkpoint (see `storage.checkpoint`), as of its recovery offset:
    | version | second | since | log since | log end | log crc32 | queue offset | held to | counted at |
    | uint8 2 | int64  | int64 | int64     | int64   | uint32    | int64        | int64   | int64      |
    | topics | hash  | waiting |
    | uint32 | int32 | int64   |
    the last two for each topic that has messages waiting
    second:       the messages of all slots before it have been delivered, or withdrawn, by records before the recovery
                  offset, or have got other slots
    since:        where the commitlog ended when that second's turn came: records behind that tell what of the second
                  itself was delivered
    log since:    likewise of the timer log: units behind that tell what of the second got another slot
    log end:      the timer log's end; log crc32: of its last units, since a log that was lost is made again, otherwise
    queue offset: next of the timer topic's queue to be put into the wheel
    held to:      no second beyond has a message whose time its topic's policy chose (see `timer_policies`)
    counted at:   `waiting` is without the second's messages that records before this physical offset delivered. Those
                  of later seconds that were delivered before a crash are in it still: each second's are taken out
                  when it has its turn
    All integers big-endian.

Mirrors apache/rocketmq store/timer/{TimerCheckpoint,TimerMetrics}.java (5.3.3).
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Final

import msgspec

from storage.files import Files

CHECK_SIZE: Final = 4096
_CHECK: Final = struct.Struct(">7q")
_NOTE: Final = struct.Struct(">BqqqqIqqqI")
_NOTE_1: Final = struct.Struct(">BqqqqIqqI")
"""As earlier versions wrote it, without `counted_at`."""
_EVERYTHING: Final = 2**62
_WAITING: Final = struct.Struct(">iq")
_NOTE_VERSION: Final = 2


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


class TimerNote(msgspec.Struct):
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
        return head + b"".join([_WAITING.pack(*item) for item in self.waiting.items()])


def needed_from(notes: Mapping[str, bytes]) -> int | None:
    """The physical offset from which recovery, by the notes of a checkpoint, will read the commitlog for the timers;
    None where they say nothing of timers."""
    note = decode_note(notes.get("timers", b""))
    return note.since if note is not None else None


def decode_note(data: bytes) -> TimerNote | None:
    """What a note says; None for one that is empty or of another make."""
    head = {1: _NOTE_1, _NOTE_VERSION: _NOTE}.get(data[0]) if data else None
    if head is None or len(data) < head.size:
        return None
    _, second, since, log_since, log_end, log_crc, queue_offset, held_to, *rest, count = head.unpack_from(data)
    if len(data) != head.size + count * _WAITING.size:
        return None
    counted_at = rest[0] if rest else _EVERYTHING
    waiting = dict(_WAITING.iter_unpack(data[head.size :]))
    return TimerNote(second, since, log_since, log_end, log_crc, queue_offset, held_to, counted_at, waiting)
