"""The timer wheel: for each second of two weeks, the first and the last unit of its messages in the timer log.

    timerwheel, 38,707,200 bytes: 1,209,600 slots, that of second s (since the epoch) at s mod 1,209,600
    0        8          16         24      28
    | second | first    | last     | count | magic |
    | int64  | int64    | int64    | int32 | int32, 0 |
    first, last: positions in the timer log. A slot that holds another second is empty. All integers are big-endian.

The cost of inserting or finding a second's messages does not depend on how many messages wait. Above the wheel of
seconds is a wheel of hours, which knows the hours with a slot in use: so the next slot is found without looking at
empty ones. The slots of the current hour, of the next hour, and of each hour that was used lately are in memory.
`write_next` writes the changed hours into the file and then releases the others. So the file may mix states from
different moments of the last write, and recovery makes it agree with the timer log.

Mirrors apache/rocketmq store/timer/{TimerWheel,Slot}.java (5.3.3), whose precision is a second.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from duemq.protocol.records.record import crc32
from duemq.scheduler.timers.index.sorted_offsets import distinct_of
from duemq.storage.errors import StoreFormatError
from duemq.storage.files import File, Files

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Integers = NDArray[np.int64]

SLOT: Final = np.dtype([("second", ">i8"), ("first", ">i8"), ("last", ">i8"), ("count", ">i4"), ("magic", ">i4")])
SLOTS: Final = 14 * 86_400
HOUR: Final = 3600
HOURS: Final = SLOTS // HOUR
FILE_SIZE: Final = SLOTS * SLOT.itemsize
_HOUR_BYTES: Final = HOUR * SLOT.itemsize
_PAGE: Final = mmap.PAGESIZE
_EMPTY_HOUR: Final = bytes(_HOUR_BYTES)
_EMPTY_CRC: Final = crc32(_EMPTY_HOUR)


class SlotPlan(NamedTuple):
    """The changes of slots for a set of units. See `TimerWheel.plan`."""

    previous: Integers
    """For each unit, the position of the preceding unit of its second, -1 without one."""
    seconds: Integers
    """The units' seconds, each once, ascending."""
    firsts: Integers
    lasts: Integers
    counts: Integers
    slots: Integers
    hours: Integers
    """The hour of each second. It is a part of the plan so that `put` needs no memory."""


class _Column:
    """One field of all slots. Needs memory only for hours in use."""

    def __init__(self, kind: str) -> None:
        dtype = np.dtype(kind)
        self._memory = mmap.mmap(-1, SLOTS * dtype.itemsize)
        self.values: NDArray[Any] = np.frombuffer(self._memory, dtype)

    def release(self, hour: int) -> None:
        """Release the memory of an hour, except for pages shared with other hours; the hour then reads as zeros."""
        size = self.values.itemsize * HOUR
        start, end = -(-hour * size // _PAGE) * _PAGE, (hour + 1) * size // _PAGE * _PAGE
        self.values[hour * HOUR : (hour + 1) * HOUR] = 0
        if end > start:
            self._memory.madvise(mmap.MADV_DONTNEED, start, end - start)


class TimerWheel:
    """The slots and their file. Owned by one thread."""

    def __init__(self, files: Files, path: str) -> None:
        self._files = files
        self._path = path
        self._file: File | None = None
        self._second, self._first, self._last = _Column("i8"), _Column("i8"), _Column("i8")
        self._count = _Column("i4")
        self._is_resident = np.zeros(HOURS, bool)
        self._is_filled = np.zeros(HOURS, bool)
        """Whether the memory of an hour may hold anything but zeros."""
        self._is_dirty = np.zeros(HOURS, bool)
        self._to_write: list[int] = []
        """Hours that `begin_write` found to be changed and that are not written yet."""
        self._crcs = np.zeros(HOURS, np.uint32)
        """CRC-32 of each hour's bytes in the file."""
        self._is_used = np.zeros(HOURS, bool)
        """The wheel of hours: whether an hour may have slots in use."""
        self._next_hour = 0
        """The hour in which `next_second` last found a second; it is kept in memory, since each step calls that
        method."""

    # --- the file

    def open(self) -> bool:
        """Open the file. Return whether it exists; if not, the caller fills the slots and calls `establish`. Raises
        StoreFormatError for a file of another size, OSError."""
        if not self._files.exists(self._path):
            return False
        file = self._files.open(self._path)
        if file.size() != FILE_SIZE:
            raise StoreFormatError(self._path, f"has {file.size()} bytes, but a timer wheel has {FILE_SIZE}")
        self._file = file
        return True

    def establish(self) -> None:
        """Make the file from the slots in memory, replacing any present file. The new file gets its name only once it
        is durable, so that a file with this name always has all its slots. Raises OSError."""
        new = f"{self._path}.new"
        self._files.remove(new)
        self._file = file = self._files.create(new, FILE_SIZE)
        try:
            self.begin_write()
            while self.write_next(0):
                pass
            file.sync()
            file.close()
            self._files.link(new, self._path)
        except OSError:
            with suppress(OSError):  # on a full disk the unfinished file would take up the last room
                self._files.remove(new)
            raise
        self._files.remove(new)
        self._file = self._files.open(self._path)

    def survey(self, second: int, end: int) -> bool:
        """Read all slots to learn which hours have slots of a second or later. Return whether the last unit of each of
        those slots lies before `end`, a position in the timer log. Raises OSError."""
        is_right = True
        for hour, seconds, last in self._look():
            used = (seconds >= second) & (seconds % SLOTS // HOUR == hour)
            self._is_used[hour] = bool(used.any())
            is_right &= not (last[used] >= end).any()
        return is_right

    @property
    def sums(self) -> NDArray[np.uint32]:
        """CRC-32 of each hour; 0 for an hour that has changed since it was written."""
        return np.where(self._is_dirty, 0, self._crcs).astype(np.uint32)

    def check(self, second: int, sums: NDArray[np.uint32]) -> NDArray[np.bool_]:
        """Read all slots to learn which hours have slots of a second or later. Return which hours of the file differ
        from their checksums in `sums`: these hours are then empty in memory, and the caller fills them. Raises
        OSError."""
        self.survey(second, 0)
        is_other: NDArray[np.bool_] = self._crcs != sums
        for hour in np.flatnonzero(is_other).tolist():
            self._release(hour)
            self._is_resident[hour] = self._is_dirty[hour] = True
            self._is_used[hour] = False
        return is_other

    def _look(self) -> Iterator[tuple[int, NDArray[Any], NDArray[Any]]]:
        """Read the file, except for its holes: in most wheels nearly all hours are holes. Yield each hour with a slot
        in use, and the seconds and last units of its slots. Raises OSError."""
        assert self._file is not None
        data_at = 0
        for hour in range(HOURS):
            if self._is_resident[hour]:  # the file may lack changes that `take_back` made
                yield hour, self._part(self._second, hour), self._part(self._last, hour)
                continue
            self._crcs[hour], self._is_used[hour] = _EMPTY_CRC, False
            if data_at <= hour * _HOUR_BYTES:
                data_at = self._file.next_data(hour * _HOUR_BYTES)
            if data_at >= (hour + 1) * _HOUR_BYTES:
                continue
            data = self._read_bytes(hour)
            if data != _EMPTY_HOUR:
                self._crcs[hour] = crc32(data)
                slots = np.frombuffer(data, SLOT)
                yield hour, slots["second"], slots["last"]

    def clear(self) -> None:
        """Empty all slots in memory. `establish` then makes the file, in which an hour that stays empty is a hole."""
        for hour in range(HOURS):
            self._release(hour)
        self._is_resident[:] = True
        self._is_dirty[:] = self._is_used[:] = False
        self._crcs[:] = _EMPTY_CRC

    def begin_write(self) -> None:
        """Choose the hours to be written: all hours that have changed until now."""
        self._to_write = np.flatnonzero(self._is_dirty).tolist()

    def write_next(self, second: int) -> bool:
        """Write the next chosen hour into the file. Return whether there was one. After the last one, unchanged hours
        are released, except for the hour of `second`, the hour after it, and the hour in which `next_second` last found
        a second. Raises OSError; then the next call tries the same hour again."""
        assert self._file is not None
        if self._to_write:
            hour = self._to_write[-1]
            slots = np.zeros(HOUR, SLOT)
            for name, column in self._columns():
                slots[name] = self._part(column, hour)
            data = slots.tobytes()
            self._file.write(hour * _HOUR_BYTES, data)
            self._crcs[hour] = crc32(data)
            self._is_dirty[hour] = False
            self._to_write.pop()
            return True
        kept = {second // HOUR % HOURS, (second // HOUR + 1) % HOURS, self._next_hour}
        for hour in np.flatnonzero(self._is_resident & ~self._is_dirty).tolist():
            if hour not in kept:
                self._release(hour)
        return False

    @property
    def file(self) -> File | None:
        """The file, for the caller to sync; None as long as it is not open."""
        return self._file

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def _release(self, hour: int) -> None:
        if self._is_filled[hour]:
            for _, column in self._columns():
                column.release(hour)
        self._is_filled[hour] = self._is_resident[hour] = False

    def _columns(self) -> tuple[tuple[str, _Column], ...]:
        return ("second", self._second), ("first", self._first), ("last", self._last), ("count", self._count)

    def _part(self, column: _Column, hour: int) -> NDArray[Any]:
        return column.values[hour * HOUR : (hour + 1) * HOUR]

    def _read(self, hour: int) -> NDArray[Any]:
        return np.frombuffer(self._read_bytes(hour), SLOT)

    def _read_bytes(self, hour: int) -> bytes:
        assert self._file is not None
        return self._file.read(hour * _HOUR_BYTES, _HOUR_BYTES)

    def _need(self, hours: Integers) -> None:
        """Read the hours that are not in memory. Raises OSError."""
        if self._is_resident[hours].all():
            return
        for hour in set(hours[~self._is_resident[hours]].tolist()):
            slots = self._read(hour)
            for name, column in self._columns():
                self._part(column, hour)[:] = slots[name]
            self._is_resident[hour] = self._is_filled[hour] = True

    # --- slots

    def prepare(self, seconds: Integers) -> None:
        """Read the hours that `plan` and `put` need for units of these seconds. Raises OSError."""
        self._need(seconds % SLOTS // HOUR)

    def plan(self, seconds: Integers, positions: Integers) -> SlotPlan:
        """Compute the changes of slots for units at ascending positions. No slot changes before `put`. Raises
        OSError."""
        count = len(seconds)
        previous = np.empty(count, np.int64)
        if (seconds == seconds[0]).all():
            unique, starts, ends = seconds[:1], np.zeros(1, np.int64), np.array([count])
            order = np.arange(count)
        else:
            order = np.argsort(seconds, kind="stable")
            ordered = seconds[order]
            starts = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1])))
            ends = np.concatenate((starts[1:], [count]))
            unique = ordered[starts]
        slots = unique % SLOTS
        self._need(slots // HOUR)
        is_same = self._second.values[slots] == unique
        last = np.where(is_same, self._last.values[slots], -1)
        placed = positions[order]
        previous[order[1:]] = placed[:-1]
        previous[order[starts]] = last
        first = np.where(is_same, self._first.values[slots], placed[starts])
        counts = ends - starts + np.where(is_same, self._count.values[slots], 0)
        return SlotPlan(
            previous=previous,
            seconds=unique,
            firsts=first,
            lasts=placed[ends - 1],
            counts=np.minimum(counts, 2**31 - 1),
            slots=slots,
            hours=slots // HOUR,
        )

    def put(self, plan: SlotPlan) -> None:
        """Apply a plan."""
        slots, hours = plan.slots, plan.hours
        self._second.values[slots] = plan.seconds
        self._first.values[slots] = plan.firsts
        self._last.values[slots] = plan.lasts
        self._count.values[slots] = plan.counts
        self._is_dirty[hours] = self._is_used[hours] = self._is_filled[hours] = True

    def take_back(self, seconds: Integers, positions: Integers, previous: Integers) -> None:
        """Remove the newest units of the log from their slots, as far as the slots have them: each slot returns to its
        state before the first of these units. The units are given in the order of the log. Raises OSError."""
        slots = seconds % SLOTS
        self._need(slots // HOUR)
        there = (self._second.values[slots] == seconds) & (self._last.values[slots] >= positions)
        unique, at, counts = distinct_of(seconds[there])
        slots, before = unique % SLOTS, previous[there][at]
        self._last.values[slots] = before
        self._count.values[slots] = np.maximum(0, self._count.values[slots] - counts)
        empty = slots[before < 0]
        self._second.values[empty] = 0
        self._count.values[empty] = 0
        self._is_dirty[slots // HOUR] = True

    def is_taken_later(self, seconds: Integers) -> NDArray[np.bool_]:
        """Whether the slot of each second holds a later second. Raises OSError."""
        slots = seconds % SLOTS
        self._need(slots // HOUR)
        taken: NDArray[np.bool_] = self._second.values[slots] > seconds
        return taken

    def last(self, second: int) -> int:
        """Return the position of the last unit of a second, -1 without one. Raises OSError."""
        slot = self._slot(second)
        return int(self._last.values[slot]) if self._second.values[slot] == second else -1

    def count(self, second: int) -> int:
        """Return the number of units of a second, delivered or not. Raises OSError."""
        slot = self._slot(second)
        return int(self._count.values[slot]) if self._second.values[slot] == second else 0

    def _slot(self, second: int) -> int:
        slot = second % SLOTS
        if not self._is_resident[slot // HOUR]:
            self._need(np.array([slot // HOUR]))
        return slot

    def next_second(self, start: int, end: int) -> int | None:
        """Return the first second in [start, end) that has units; None if there is none. Looks only at hours in use.
        Raises OSError."""
        end = min(end, start + SLOTS)
        for hour in range(start // HOUR, (end - 1) // HOUR + 1):
            number = hour % HOURS
            if not self._is_used[number]:
                continue
            self._need(np.array([number]))
            begin = hour * HOUR
            is_used = self._part(self._second, number) == np.arange(begin, begin + HOUR)
            low, high = max(0, start - begin), min(HOUR, end - begin)
            found = np.flatnonzero(is_used[low:high])
            if len(found):
                self._next_hour = number
                return begin + low + int(found[0])
            if (low, high) == (0, HOUR):
                self._is_used[number] = False
        return None
