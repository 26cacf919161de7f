"""The timer log: one unit for each message that waits in the timer wheel; the units of a second are linked backwards.

    timerlog/00000000000000000000, ...     files of 100 MiB (mappedFileSizeTimerLog)
    0      4          12      16           24         28                36            40           44
    | size | previous | magic | write time | delay    | physical offset | record size | topic hash | deliver time |
    | 52   | int64    | int32 | int64, ms  | int32, ms| int64           | int32       | int32      | int64, ms    |

    previous:     position of the preceding unit of the same second, -1 for the first
    magic:        1; plus 2 if the message is due later than its slot (it gets another unit when the slot comes); plus 4
                  if the record cancels another message. 8 and 4 without 2 (duemq's): the message was withdrawn, that
                  is, cancelled or appended again. 4 with a deliver time and without 8 (duemq's): the message got
                  another unit before this one's turn (`timers.files.superseded`). Without 1 (duemq's): the message was
                  appended again with this record. RocketMQ reads 2 and 4: it skips a unit with 4 and without 2 whose
                  record deletes nothing. At a start it cuts the log at the first unit with any bit other than these
                  four
    write time:   time of the unit's write, rounded down to a second; write time + delay is the slot's second
    topic hash:   Java's hash of the name of the message's real topic
    deliver time: 0 in RocketMQ; in duemq the lower 43 bits are the exact time (up to the year 2248), and the 20 bits
                  above are a hash of the key if the next message with that key replaces this one
                  (`timers.index.keys`); the whole number is negative if the topic's policy chose the time
    file end:     if fewer than 68 bytes are left: | int32 space left | int64 0 | uint32 0xCBD43194 |

A position counts bytes over all files. All integers are big-endian.
Mirrors apache/rocketmq store/timer/TimerLog.java (5.3.3) except for the parts called duemq's.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

import numpy as np
import structlog

from duemq.scheduler.timers.files.sums import LogSums
from duemq.scheduler.timers.files.superseded import Superseded
from duemq.scheduler.timers.files.unit import ANY_MAGIC, UNIT, UNIT_SIZE, withdrawn
from duemq.storage.files import File, Files
from duemq.storage.log.marks import Marks
from duemq.storage.log.segments import Segments

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from duemq.scheduler.timers.files.unit import Units

    Positions = NDArray[np.int64]

log = structlog.get_logger(__name__)

DEFAULT_SEGMENT_SIZE: Final = 100 * 1024 * 1024
_MAGIC_AT: Final = 12
_BLANK: Final = struct.Struct(">iqI")
BLANK_SIZE: Final = _BLANK.size
"""Size in bytes of the blank unit that ends a file."""
_BLANK_MAGIC: Final = 0xCBD43194
_SCAN_UNITS: Final = 16_384
_CRC_UNITS: Final = 64
_FIRST_LOOK: Final = 64
_MAX_LOOK: Final = 8192
_DENSE: Final = 32
"""Ratio of units: the blocks that are read get longer as long as at least one in this many of their units belongs to
the second."""


class TimerLog:
    """The files of the timer log. Owned by one thread."""

    def __init__(self, files: Files, directory: str, segment_size: int = DEFAULT_SEGMENT_SIZE) -> None:
        self._segments = Segments(files, directory, segment_size)
        self._room = (segment_size - UNIT_SIZE - _BLANK.size) // UNIT_SIZE * UNIT_SIZE + UNIT_SIZE
        """Number of bytes of units in a full file."""
        self._marks = Marks(self._segments)
        self.superseded = Superseded(self._segments)
        """Units in future slots whose messages got newer units."""
        self.sums = LogSums(segment_size)
        """Checksums of all units before the end, with their present marks."""
        self.end = 0
        """Position of the next unit, or of the blank unit that ends a file."""
        self._last_record: int | None = None
        """Physical offset of the last unit's record; None if it is not known, because nothing was appended since the
        start or since the log was cut."""

    def use_sums(self, sums: LogSums) -> None:
        """Use checksums that were computed from all units of these files."""
        self.sums = sums

    @property
    def begin(self) -> int:
        """Position of the first unit."""
        return self._segments.begin

    @property
    def segment_size(self) -> int:
        """Size of a file in bytes."""
        return self._segments.segment_size

    @property
    def directory(self) -> str:
        """The directory of the files."""
        return self._segments.directory

    def load(self) -> list[str]:
        """Find the files; `recover` finds the end. Return the paths in the directory that are not files of the log;
        they stay as they are. Raises StoreFormatError, OSError."""
        others = self._segments.load(passes_over_others=True)
        self.end = self._segments.end
        return others

    def recover(self, start: int) -> None:
        """Find the end: it lies behind the last valid unit of the gapless sequence that begins at `start`, the position
        of a unit or of a file. Raises OSError."""
        position = min(max(start, self.begin), self._segments.end)
        self.end = position
        for at, units in self._chunks(position, self._segments.end):
            magic = units["magic"]
            right = (units["size"] == UNIT_SIZE) & (magic >= 0) & (magic <= ANY_MAGIC)
            right &= units["previous"] < at + UNIT_SIZE * np.arange(len(units))
            count = len(right) if right.all() else int(np.argmin(right))
            self.end = at + count * UNIT_SIZE
            if count < len(right):
                return

    def truncate(self, position: int) -> None:
        """Cut the log at a position. Raises OSError."""
        if position < self._segments.end:
            self._segments.clear_from(position)
        self.end = position
        self._last_record = None

    def remove_all(self) -> None:
        """Remove all files and begin an empty log. Raises OSError."""
        self._segments.remove_from(0)
        self.superseded = Superseded(self._segments)
        self.sums = LogSums(self.segment_size)
        self.end = 0
        self._last_record = None

    def positions(self, count: int) -> Positions:
        """Return the positions of the next `count` units."""
        size = self._segments.segment_size
        base, at = divmod(self.end, size)
        first = base * (self._room // UNIT_SIZE) + min(at, self._room) // UNIT_SIZE
        numbers = np.arange(first, first + count)
        per_file = self._room // UNIT_SIZE
        return numbers // per_file * size + numbers % per_file * UNIT_SIZE

    def append(self, units: Units, positions: Positions) -> None:
        """Write units at the positions that `positions` returned for them. Raises OSError; then none of the units
        counts."""
        data = memoryview(units.tobytes())
        size, done, end = self._segments.segment_size, 0, self.end
        parts: list[tuple[int, int, int]] = []
        while done < len(data):
            position = int(positions[done // UNIT_SIZE])
            base = position - position % size
            if position != end:
                self._segments.write(end, _BLANK.pack(base - end, 0, _BLANK_MAGIC))
            self._segments.ensure(position)
            count = min(len(data) - done, base + self._room - position)
            self._segments.write(position, bytes(data[done : done + count]))
            parts.append((position, done // UNIT_SIZE, (done + count) // UNIT_SIZE))
            done += count
            end = position + count
        for position, first, last in parts:
            self.sums.add(position, units[first:last])
        self.end = end
        self._last_record = int(units["physical_offset"][-1])

    def read(self, position: int, count: int) -> Units:
        """Read up to `count` units from a position on, within one file. Raises OSError."""
        file_end = position - position % self._segments.segment_size + self._room
        count = min(count, (min(file_end, self.end) - position) // UNIT_SIZE)
        data = self._segments.read(position, max(0, count) * UNIT_SIZE)
        return self._units(position, data)

    def _units(self, position: int, data: bytes) -> Units:
        """Return the units in bytes read at a position, with their present marks."""
        units = np.frombuffer(self._marks.over(position, data), UNIT, len(data) // UNIT_SIZE)
        return self.superseded.over(position, units)

    def crc(self, end: int) -> int:
        """Return the checksum that notes of earlier versions have: CRC-32 of up to 64 units before a position, within
        its file, with 0 for their magic numbers, which may change."""
        start = max(self._segments.base_of(max(0, end - 1)), end - _CRC_UNITS * UNIT_SIZE)
        data = self._segments.read(start, end - start)
        units = np.frombuffer(data, UNIT, len(data) // UNIT_SIZE).copy()
        units["magic"] = 0
        return zlib.crc32(units.tobytes())

    def last(self) -> np.void | None:
        """Return the last unit, None in an empty log. Raises OSError."""
        base = self._segments.base_of(self.end)
        position = self.end - UNIT_SIZE if self.end > base else base - self.segment_size + self._room - UNIT_SIZE
        units = self.read(max(position, self.begin), 1)
        return units[0] if len(units) else None

    def last_record(self) -> int | None:
        """Return the physical offset of the last unit's record, None in an empty log. Reads only if nothing was
        appended since the start or since the log was cut. Raises OSError."""
        if self._last_record is None and (last := self.last()) is not None:
            self._last_record = int(last["physical_offset"])
        return self._last_record

    def first(self) -> np.void | None:
        """Return the first unit, None in an empty log. Raises OSError."""
        units = self.read(self.begin, 1)
        return units[0] if len(units) else None

    def scan(self, start: int, end: int) -> Iterator[tuple[int, Units]]:
        """Iterate over all units between two positions, in order. Yields parts of the sequence, each with the position
        of its first unit."""
        start = max(start, self.begin)
        start -= start % self._segments.segment_size % UNIT_SIZE
        return self._chunks(start, min(end, self.end))

    def part(self, start: int, end: int) -> tuple[int, Units] | None:
        """Return the first part of `scan(start, end)`, None if there is none."""
        return next(self.scan(start, end), None)

    def _chunks(self, position: int, end: int) -> Iterator[tuple[int, Units]]:
        size = self._segments.segment_size
        while position < end:
            base = position - position % size
            stop = min(base + self._room, end)
            if position >= stop:
                position = base + size
                continue
            data = self._segments.read(position, min(_SCAN_UNITS * UNIT_SIZE, stop - position))
            units = self._units(position, data)
            if not len(units):
                if position >= self.begin:
                    return
                position = self.begin  # earlier files have expired in the meantime
                continue
            yield position, units
            position += len(units) * UNIT_SIZE

    def chain(self, last: int) -> Chain:
        """Return an iterator over the units of a second, backwards from the position of its last unit. See `Chain`."""
        return Chain(self, last)

    def withdraw(self, position: int, magic: int) -> None:
        """Mark the unit at a position as withdrawn: its message no longer waits here. `magic`: the unit's present magic
        number. It is passed so that nothing needs to be read: a read might fail, and the record that withdraws the
        message is in the commitlog already. Every reader sees the mark immediately; `plan_marks` puts it into the files
        (see `storage.log.marks`)."""
        self._marks.set(position + _MAGIC_AT, withdrawn(magic).to_bytes(4, "big"))
        self.sums.change(position, magic, withdrawn(magic))

    def begin_marks(self) -> None:
        """Begin another checkpoint: it covers the records stored so far, and the marks and superseded positions noted
        so far."""
        self._marks.begin()
        self.superseded.begin()

    def plan_marks(self) -> Callable[[], None]:
        """Return the work that puts the marks set before the last `begin_marks` into the files, and makes them durable.
        Any thread may run the work, one at a time, once the records stored at the time of that call are durable. The
        work raises OSError; the marks then go on waiting."""
        return self._marks.plan(self.end)

    def files_between(self, start: int, end: int) -> list[File]:
        """Return the files with units between two positions."""
        return self._segments.files_between(start, end)

    def drop_before(self, position: int) -> list[str]:
        """Forget the files that end at or before a position. Return their paths, for the caller to remove."""
        paths = self._segments.drop_before(min(position, self._segments.base_of(self.end)))
        self.sums.drop_before(self.begin)
        self.superseded.drop_before(self.begin)
        return paths

    def file_ends(self) -> list[int]:
        """Return the end positions of the full files, oldest first."""
        size = self._segments.segment_size
        return list(range(self.begin + size, self.end + 1, size))

    def close(self) -> None:
        """Close the descriptors."""
        self._segments.close()


class Chain:
    """Iterates over the units of a second, backwards from its last unit. Yields parts, the newest one first: positions
    and units, ascending within each part. Ends at a unit that the log no longer has. Raises OSError if a part cannot be
    read; the next call tries that part again."""

    def __init__(self, log: TimerLog, last: int) -> None:
        self._log = log
        self._position = last
        """Position of the last unit of the next part."""
        self._look = _FIRST_LOOK
        """Number of units in one read: it is larger if many of them belong to the second."""

    def __iter__(self) -> Chain:
        return self

    def __next__(self) -> tuple[Positions, Units]:
        position = self._position
        if not self._log.begin <= position < self._log.end:
            raise StopIteration
        base = max(position - position % self._log.segment_size, position - (self._look - 1) * UNIT_SIZE)
        block = self._log.read(base, (position - base) // UNIT_SIZE + 1)
        if not len(block) or base + (len(block) - 1) * UNIT_SIZE != position:
            raise StopIteration
        runs, self._position = self._runs(base, block)
        if not runs:
            raise StopIteration
        if len(runs) == 1:
            at = np.arange(runs[0][0], runs[0][1] + 1)
        else:
            firsts, lasts = np.array(runs[::-1]).T
            counts = lasts - firsts + 1
            at = np.arange(int(counts.sum())) + np.repeat(firsts - (np.cumsum(counts) - counts), counts)
        is_dense = len(at) * _DENSE >= len(block)
        self._look = min(_MAX_LOOK, self._look * 2) if is_dense else max(_FIRST_LOOK, self._look // 2)
        return base + at * UNIT_SIZE, block[at]

    @staticmethod
    def _runs(base: int, block: Units) -> tuple[list[tuple[int, int]], int]:
        """Return the units of a block that belong to the chain which ends with the block's last unit, as runs of
        adjacent units (first and last index), beginning at the end; and the position of the chain's next unit before
        the block, -1 without one."""
        numbers = np.arange(len(block))
        previous = block["previous"].astype(np.int64)
        # A run continues as long as each unit is linked to the one directly before it; the block's first unit begins a
        # run in any case.
        is_first = previous != base + (numbers - 1) * UNIT_SIZE
        is_first[0] = True
        first_of = np.maximum.accumulate(np.where(is_first, numbers, 0)).tolist()
        links, sizes = previous.tolist(), block["size"].tolist()
        runs: list[tuple[int, int]] = []
        at = len(block) - 1
        while True:
            first = first_of[at]
            if sizes[first] != UNIT_SIZE:
                return runs, -1
            runs.append((first, at))
            before = links[first]
            if before >= base + first * UNIT_SIZE:
                return runs, -1
            if before < base:
                return runs, before
            at = (before - base) // UNIT_SIZE
