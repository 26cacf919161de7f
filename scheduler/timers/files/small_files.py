"""The small files of the timers, and their note in the checkpoint.

    config/timercheck, 4096 bytes, seven int64:
    | read time | log position | queue offset | master's queue offset | state version | version time | counter |
    read time: of the slot to be read next, ms since the epoch. log position: the timer log is flushed up to here. queue
    offset: the next unit of the timer topic's queue to be put into the wheel.

    config/timermetrics: {"dataVersion": {...}, "timingCount": {"<topic>": {"count": n, "timeStamp": ms}}}

    the note "timers" in the checkpoint (see `storage.durability.checkpoint`), for its recovery offset:
    | version | second | since | log since | log end | queue offset | held to | counted at | topics | hash  | waiting |
    | uint8 4 | int64  | int64 | int64     | int64   | int64        | int64   | int64      | uint32 | int32 | int64   |
    hash and waiting are repeated for each topic that has waiting messages
    | recovered to | done   | withdrawn | moved  | done: offset << 1 | withdrawn: | moved: offset | position |
    | int64        | uint32 | uint32    | uint32 | counted, int64    | int64      | int64         | int64    |
    first the three counts, then as many entries of each kind
    | runs   | position | units  |
    | uint32 | int64    | uint32 |
    position and units are repeated for each run of superseded units
    | files  | base  | crc32  | magic  | hours  | crc32  |
    | uint32 | int64 | uint32 | uint64 | uint32 | uint32 |
    base, crc32 and magic are repeated for each file of the timer log, the last crc32 for each hour of the wheel
    second:       the messages in all slots before it were delivered or withdrawn by records before the recovery offset,
                  or got other slots
    since:        the end of the commitlog when that second's turn began, or when the store was opened if that was
                  later: records behind it tell which messages of the second were delivered
    log since:    the end of the timer log at the same time: units behind it tell which messages of the second got
                  another unit
    log end:      the end of the timer log
    queue offset: the next unit of the timer topic's queue to be put into the wheel
    held to:      no later second has a message whose time its topic's policy chose (see `timers.policy.policies`)
    counted at:   `waiting` does not include messages of the second that were delivered by records before this physical
                  offset. It still includes messages of later seconds that were delivered before a crash: those of each
                  second are subtracted when its turn comes
    The following are the facts that the last start found about the time before it, as far as they still matter:
    recovered to: no second from this one on has a message that was found delivered
    done:         physical offsets of messages that were delivered, and that are in a slot that is not past or not in
                  the wheel yet; counted: 1 if the message is in the slot of `second` and `waiting` does not include it
    withdrawn:    physical offsets of messages that were cancelled or appended again, and are not in the wheel yet
    moved:        physical offsets of messages that got another unit since the turn of `second` began, each with the
                  position of that unit
    runs:         superseded units of the timer log that are not marked yet (`timers.files.superseded`): the position of
                  the first one, and the number of adjacent ones
    The next start compares the checksums, and rebuilds the parts that differ:
    base:         position at which the file begins; for its checksums see `timers.files.sums`
    hours:        number of checksums: one for each hour of the wheel's file, in the order of the file, 0 for an hour
                  that changed and is not written yet
    unfollowed:   physical offsets of the records of recurring messages that were delivered or dropped and whose next
                  records are missing (`recurring.records.left_out`): their number as uint32, then each as int64. They
                  lie between the runs and the checksums
    Version 4 lacks `unfollowed`, version 3 also lacks the runs. Versions 1 (without `counted at`) and 2 end with the
    topics; behind `log end` they have the crc32 of the log's last units.
    All integers are big-endian.

Mirrors apache/rocketmq store/timer/{TimerCheckpoint,TimerMetrics}.java (5.3.3).
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
import numpy as np

from duemq.scheduler.timers.files.sums import FileSum
from duemq.scheduler.timers.files.superseded import RUN
from duemq.scheduler.timers.index.sorted_offsets import is_among
from duemq.storage import file_names
from duemq.storage.durability.checkpoint import Checkpoint
from duemq.storage.files import Files

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Offsets = NDArray[np.int64]

CHECK_SIZE: Final = 4096
_CHECK: Final = struct.Struct(">7q")
_NOTE: Final = struct.Struct(">BqqqqqqqI")
_NOTE_2: Final = struct.Struct(">BqqqqIqqqI")
_NOTE_1: Final = struct.Struct(">BqqqqIqqI")
_NO_END: Final = 2**62
_WAITING: Final = struct.Struct(">iq")
_FOUND: Final = struct.Struct(">qIII")
_OFFSET: Final = np.dtype(">i8")
_COUNT: Final = struct.Struct(">I")
_FILE: Final = struct.Struct(">qIQ")
_CRC: Final = np.dtype(">u4")
_NOTE_VERSION: Final = 5
_WITHOUT_UNFOLLOWED: Final = 4
_WITHOUT_RUNS: Final = 3
NO_OFFSETS: Final = np.empty(0, np.int64)


class TimerCheck(msgspec.Struct):
    """The numbers in timercheck; the module describes them. Times are ms since the epoch."""

    read_ms: int = 0
    log_position: int = 0
    queue_offset: int = 0
    master_queue_offset: int = 0
    state_version: int = 0
    version_ms: int = 0
    counter: int = 0

    def encode(self) -> bytes:
        """Encode the numbers: the 56 bytes of the file that are in use."""
        return _CHECK.pack(*msgspec.structs.astuple(self))


def load_check(files: Files, path: str) -> TimerCheck | None:
    """Read timercheck; return None if the file is missing or too short. Raises StoreFormatError, OSError."""
    data = files.read_whole(path)
    return decode_check(data) if data is not None else None


def decode_check(data: bytes) -> TimerCheck | None:
    """Decode the bytes of timercheck; return None if they are too few."""
    return TimerCheck(*_CHECK.unpack_from(data)) if len(data) >= _CHECK.size else None


def save_check(files: Files, path: str, check: TimerCheck) -> None:
    """Write timercheck. May wait for the disk. Raises OSError."""
    files.write_whole(path, check.encode().ljust(CHECK_SIZE, b"\0"))


class _Metric(msgspec.Struct):
    count: int = 0
    timeStamp: int = 0  # noqa: N815, its name in the file


class _Metrics(msgspec.Struct):
    dataVersion: dict[str, int] = {}  # noqa: N815
    timingCount: dict[str, _Metric] = {}  # noqa: N815


def metrics_json(counts: Mapping[str, int], now_ms: int, version: int) -> bytes:
    """Return the contents of timermetrics, which are also the body of the answer to GET_TIMER_METRICS. `counts`: number
    of waiting messages by topic; `now_ms`: ms since the epoch."""
    data_version = {"counter": version, "stateVersion": 0, "timestamp": now_ms}
    return msgspec.json.encode(_Metrics(data_version, {name: _Metric(n, now_ms) for name, n in counts.items()}))


def load_topics(files: Files, path: str) -> dict[str, int]:
    """Return the topics in timermetrics, each with its number of waiting messages; none if the file is missing or
    invalid, since it has only statistics. Raises StoreFormatError, OSError."""
    data = files.read_whole(path)
    try:
        counts = msgspec.json.decode(data, type=_Metrics).timingCount if data else {}
    except (msgspec.DecodeError, UnicodeDecodeError):
        return {}
    return {topic: metric.count for topic, metric in counts.items()}


class StartFacts(NamedTuple):
    """The facts that a start found about the time before it; the module describes them. The arrays have physical
    offsets, ascending, unless said otherwise."""

    recovered_to: int = 0
    done: Offsets = NO_OFFSETS
    counted: Offsets = NO_OFFSETS
    """A part of `done`: messages that the noted counts of waiting messages no longer include."""
    withdrawn: Offsets = NO_OFFSETS
    moved: Offsets = NO_OFFSETS
    moved_by: Offsets = NO_OFFSETS
    """Positions in the timer log: for each offset in `moved`, the position of the newer unit."""

    def encode(self) -> bytes:
        """Encode the facts for the note; the module has the layout."""
        head = _FOUND.pack(self.recovered_to, len(self.done), len(self.withdrawn), len(self.moved))
        done = self.done << 1 | is_among(self.done, self.counted)
        moved = np.stack((self.moved, self.moved_by), axis=1)
        return head + b"".join([part.astype(_OFFSET).tobytes() for part in (done, self.withdrawn, moved)])


def _decode_found(data: bytes) -> tuple[StartFacts, bytes] | None:
    """Decode the `StartFacts` at the beginning of `data`; return them with the remaining bytes, None if there are too
    few."""
    if len(data) < _FOUND.size:
        return None
    recovered_to, *counts = _FOUND.unpack_from(data)
    done_count, withdrawn_count, moved_count = counts
    count = done_count + withdrawn_count + 2 * moved_count
    end = _FOUND.size + count * _OFFSET.itemsize
    if len(data) < end:
        return None
    numbers = np.frombuffer(data[_FOUND.size : end], _OFFSET, count)
    done, withdrawn, moved = np.split(numbers.astype(np.int64), np.cumsum(counts[:2]))
    moved = moved.reshape(-1, 2)
    offsets = done >> 1
    return StartFacts(
        recovered_to=recovered_to,
        done=offsets,
        counted=offsets[done & 1 == 1],
        withdrawn=withdrawn,
        moved=moved[:, 0],
        moved_by=moved[:, 1],
    ), data[end:]


class Sums(NamedTuple):
    """Checksums of the timer log's files, by their positions, and of the wheel's hours."""

    log: Mapping[int, FileSum] = MappingProxyType({})
    wheel: NDArray[np.uint32] = np.empty(0, np.uint32)

    def encode(self) -> bytes:
        """Encode the checksums for the note; the module has the layout."""
        files = b"".join([_FILE.pack(base, *each) for base, each in self.log.items()])
        hours = self.wheel.astype(_CRC).tobytes()
        return _COUNT.pack(len(self.log)) + files + _COUNT.pack(len(self.wheel)) + hours


def _decode_sums(data: bytes) -> Sums | None:
    if len(data) < _COUNT.size:
        return None
    end = _COUNT.size + _COUNT.unpack_from(data)[0] * _FILE.size
    if len(data) < end + _COUNT.size:
        return None
    files = {base: FileSum(*sums) for base, *sums in _FILE.iter_unpack(data[_COUNT.size : end])}
    (hours,) = _COUNT.unpack_from(data, end)
    if len(data) != end + _COUNT.size + hours * _CRC.itemsize:
        return None
    return Sums(files, np.frombuffer(data[end + _COUNT.size :], _CRC).astype(np.uint32))


class TimerNote(msgspec.Struct, eq=False):
    """The decoded note of the timers; the module describes the fields."""

    second: int
    since: int
    log_since: int
    log_end: int
    queue_offset: int
    policy_end: int
    counted_at: int
    waiting: dict[int, int]
    """Number of messages in the wheel, by topic hash."""
    found: StartFacts = StartFacts()
    superseded: bytes = b""
    """The superseded units, as `Superseded.encode` returns them."""
    sums: Sums | None = None
    """The checksums; None in a note of version 1 or 2."""
    log_crc: int = 0
    """CRC-32 of the log's last units (`TimerLog.crc`), in notes of version 1 and 2 only."""
    unfollowed: tuple[int, ...] = ()

    def encode(self) -> bytes:
        """Encode the note."""
        head = _NOTE.pack(
            _NOTE_VERSION,
            self.second,
            self.since,
            self.log_since,
            self.log_end,
            self.queue_offset,
            self.policy_end,
            self.counted_at,
            len(self.waiting),
        )
        waiting = b"".join([_WAITING.pack(*item) for item in self.waiting.items()])
        superseded = _COUNT.pack(len(self.superseded) // RUN.itemsize) + self.superseded
        offsets = np.array(self.unfollowed, _OFFSET).tobytes()
        unfollowed = _COUNT.pack(len(self.unfollowed)) + offsets
        return head + waiting + self.found.encode() + superseded + unfollowed + (self.sums or Sums()).encode()


def decode_note(data: bytes) -> TimerNote | None:
    """Decode a note; None if it is empty or has another format."""
    if data and data[0] in (1, 2):
        return _decode_earlier(data)
    if len(data) < _NOTE.size or data[0] not in (_NOTE_VERSION, _WITHOUT_UNFOLLOWED, _WITHOUT_RUNS):
        return None
    _, second, since, log_since, log_end, queue_offset, policy_end, counted_at, count = _NOTE.unpack_from(data)
    end = _NOTE.size + count * _WAITING.size
    if len(data) < end:
        return None
    found = _decode_found(data[end:])
    if found is None:
        return None
    rest, superseded, unfollowed = found[1], b"", np.empty(0, _OFFSET)
    if data[0] != _WITHOUT_RUNS:
        if len(rest) < _COUNT.size:
            return None
        behind = _COUNT.size + _COUNT.unpack_from(rest)[0] * RUN.itemsize
        superseded, rest = rest[_COUNT.size : behind], rest[behind:]
    if data[0] == _NOTE_VERSION:
        if len(rest) < _COUNT.size:
            return None
        behind = _COUNT.size + _COUNT.unpack_from(rest)[0] * _OFFSET.itemsize
        if len(rest) < behind:
            return None
        unfollowed, rest = np.frombuffer(rest[_COUNT.size : behind], _OFFSET), rest[behind:]
    sums = _decode_sums(rest)
    if sums is None:
        return None
    waiting = dict(_WAITING.iter_unpack(data[_NOTE.size : end]))
    return TimerNote(
        second=second,
        since=since,
        log_since=log_since,
        log_end=log_end,
        queue_offset=queue_offset,
        policy_end=policy_end,
        counted_at=counted_at,
        waiting=waiting,
        found=found[0],
        superseded=superseded,
        sums=sums,
        unfollowed=tuple(unfollowed.tolist()),
    )


def _decode_earlier(data: bytes) -> TimerNote | None:
    head = _NOTE_1 if data[0] == 1 else _NOTE_2
    if len(data) < head.size:
        return None
    _, second, since, log_since, log_end, log_crc, queue_offset, policy_end, *rest, count = head.unpack_from(data)
    if len(data) != head.size + count * _WAITING.size:
        return None
    counted_at = rest[0] if rest else _NO_END
    waiting = dict(_WAITING.iter_unpack(data[head.size :]))
    return TimerNote(
        second=second,
        since=since,
        log_since=log_since,
        log_end=log_end,
        queue_offset=queue_offset,
        policy_end=policy_end,
        counted_at=counted_at,
        waiting=waiting,
        log_crc=log_crc,
    )


def log_end_of(notes: Mapping[str, bytes]) -> int | None:
    """Return the end of the timer log according to the notes of a checkpoint; None without a note of the timers."""
    note = decode_note(notes.get("timers", b""))
    return note.log_end if note is not None else None


def reached(checkpoint: Checkpoint, files: Files, root: str) -> int:
    """Return the queue offset up to which the timer topic's queue was read, according to the checkpoint, or to
    the file timercheck if RocketMQ had the store last; 0 if that source has none. `root`: the store's directory. Raises
    StoreFormatError, OSError."""
    if checkpoint.is_foreign:
        check = load_check(files, os.path.join(root, file_names.TIMER_CHECK))
        return check.queue_offset if check is not None else 0
    note = decode_note(checkpoint.notes.get("timers", b""))
    return note.queue_offset if note is not None else 0


def needed_from(notes: Mapping[str, bytes]) -> int | None:
    """Return the physical offset from which recovery will read the commitlog for the timers, according to the notes of
    a checkpoint; None without a note of the timers."""
    note = decode_note(notes.get("timers", b""))
    return note.since if note is not None else None
