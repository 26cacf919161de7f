"""An index from the physical offset of a record to the position of its newest unit in the timer log.

Most units are written in the order of their records, as messages come. For these, one entry of 16 bytes is enough for
each block of 512 units, and a search reads the block. The units of messages that got another slot later are in sorted
runs, 16 bytes for each unit (`sorted_pairs`), until their file of the log is removed.

The index is filled by `note` alone: with each appended unit, and at a start with all units of the log.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import numpy as np

from duemq.scheduler.timers.files.log import TimerLog
from duemq.scheduler.timers.files.unit import APPLIED, UNIT, UNIT_SIZE
from duemq.scheduler.timers.index.sorted_pairs import SortedPairs

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from duemq.scheduler.timers.files.log import Positions
    from duemq.scheduler.timers.files.unit import Units

BLOCK_UNITS: Final = 512
"""Most units that are read to find one unit."""
_BLOCK: Final = BLOCK_UNITS * UNIT_SIZE
_MAX_COLLECTED: Final = 4096
_PART_BLOCKS: Final = 16
_ALL: Final = 2**63 - 1


class UnitPositions:
    """The index from records to the positions of their newest units. Owned by one thread."""

    def __init__(self, timer_log: TimerLog) -> None:
        self._log = timer_log
        self._firsts, self._starts = array("q"), array("q")
        """For each block with units in the order of their records, the physical offset of the first such record
        (`_firsts`), and the position of its unit (`_starts`), both ascending."""
        self._moved = SortedPairs(lambda: timer_log.begin)
        """For all other units, the physical offsets of their records, and their positions."""
        self._last = -1
        """Physical offset of the last record whose unit is in order."""
        self._waiting: list[tuple[Positions, Units]] = []
        """Units not in the index yet: adding one costs as much as adding many."""
        self._count = 0
        """Number of units in `_waiting`."""

    def clear(self) -> None:
        """Forget all units, since the log no longer has any."""
        self._firsts, self._starts = array("q"), array("q")
        self._moved = SortedPairs(lambda: self._log.begin)
        self._last = -1
        self._waiting, self._count = [], 0

    def note(self, positions: Positions, units: Units) -> None:
        """Note units at ascending positions, behind all known ones. The caller must not change the arrays. Never fails,
        since the units are already in the log."""
        self._waiting.append((positions, units))
        self._count += len(units)
        if self._count >= _MAX_COLLECTED:
            with suppress(MemoryError):  # tried again later
                self._settle()

    def _settle(self) -> None:
        if not self._waiting:
            return
        # If memory runs out halfway, all units are added again later; duplicates do no harm.
        if len(self._waiting) == 1:
            self._add(*self._waiting[0])
        else:
            positions, units = zip(*self._waiting, strict=True)
            # The units are joined as bytes, since numpy would join them field by field.
            self._add(np.concatenate(positions), np.frombuffer(b"".join(units), UNIT))
        self._waiting, self._count = [], 0

    def _add(self, positions: Positions, units: Units) -> None:
        physical = units["physical_offset"].astype(np.int64)
        if (units["due_ms"] == APPLIED).any():
            kept = units["due_ms"] != APPLIED  # the other units stand for no message
            physical, positions = physical[kept], positions[kept]
            if not len(physical):
                return
        if physical[0] <= self._last or (physical[1:] <= physical[:-1]).any():
            before = np.maximum.accumulate(np.concatenate(([self._last], physical[:-1])))
            is_next = physical > before
            self._moved.add(physical[~is_next], positions[~is_next])
            physical, positions = physical[is_next], positions[is_next]
            if not len(physical):
                return
        self._last = int(physical[-1])
        blocks = self._block_of(positions)
        known = int(self._block_of(np.array(self._starts[-1:], np.int64))[0]) if self._starts else -1
        begins = np.flatnonzero(np.concatenate(([blocks[0] != known], blocks[1:] != blocks[:-1])))
        self._firsts.extend(physical[begins].tolist())
        self._starts.extend(positions[begins].tolist())
        if len(self._starts) > 2 and self._starts[len(self._starts) // 2] < self._log.begin:
            gone = bisect_right(self._starts, self._log.begin) - 1
            del self._starts[:gone], self._firsts[:gone]

    def _block_of(self, positions: Positions) -> NDArray[np.int64]:
        """Return the beginning of the block of each position; positions are ascending. No block spans two files."""
        size = self._log.segment_size
        base = int(positions[0]) // size * size if len(positions) else 0
        # Positions in one file, the usual case, cost one division less.
        is_one_file = len(positions) and int(positions[-1]) < base + size
        return positions - (positions - base if is_one_file else positions % size) % _BLOCK

    def find(self, physical_offset: int) -> tuple[int, Units] | None:
        """Return the position of the newest unit of a record, and the unit (an array of one); None if there is none.
        Raises OSError."""
        self._settle()
        moved = self._moved.find(physical_offset)
        if moved is not None and moved >= self._log.begin:
            return moved, self._log.read(moved, 1)
        at = bisect_right(self._firsts, physical_offset) - 1
        if at < 0 or self._starts[at] < self._log.begin:
            return None
        start = self._starts[at]
        units = self._log.read(start, self._units_from(start))
        is_unit = (units["physical_offset"] == physical_offset) & (units["due_ms"] != APPLIED)
        hits = np.flatnonzero(is_unit)
        if not len(hits):
            return None
        return start + int(hits[-1]) * UNIT_SIZE, units[hits[-1] :][:1]

    def after(self, physical_offset: int) -> tuple[Positions, Units, int] | None:
        """Return some messages behind a physical offset, in the order of their records, each with its newest unit:
        positions, units, and the physical offset for the next call. Return None if the log has no more. A search that
        continues in this way finds each message once, whatever units it gets in the meantime. Raises OSError."""
        self._settle()
        oldest = bisect_left(self._starts, self._log.begin)
        at = max(oldest, bisect_right(self._firsts, physical_offset) - 1)
        positions, units = np.empty(0, np.int64), np.empty(0, UNIT)
        while at < len(self._starts) and not len(positions):
            parts = [self._in_order(each) for each in range(at, min(at + _PART_BLOCKS, len(self._starts)))]
            at += len(parts)
            positions = np.concatenate([part for part, _ in parts])
            units = np.frombuffer(b"".join([part.tobytes() for _, part in parts]), UNIT)
            is_next = units["physical_offset"] > physical_offset
            positions, units = positions[is_next], units[is_next]
        physical = units["physical_offset"].astype(np.int64)
        reached = int(physical[-1]) if len(physical) else _ALL
        # Some messages have only later units, as the files with their first units are gone.
        moved = self._moved.between(physical_offset, reached, _PART_BLOCKS * BLOCK_UNITS + 1)
        if len(moved) > _PART_BLOCKS * BLOCK_UNITS:
            reached = int(moved[-2])
            moved = moved[:-1]
            kept = physical <= reached
            positions, units, physical = positions[kept], units[kept], physical[kept]
        if not len(moved) and not len(physical):
            return None
        together = np.union1d(physical, moved)
        found, old = np.full(len(together), -1), np.searchsorted(together, physical)
        found[old] = positions
        newest = self._moved.newest(together, found)
        result = np.empty(len(together), UNIT)
        result[old] = units
        is_other = newest != found
        result[is_other] = self._read(newest[is_other])
        kept = newest >= self._log.begin
        return newest[kept], result[kept], int(together[-1])

    def _in_order(self, number: int) -> tuple[Positions, Units]:
        """Return those units of a block, given by its number, that are in the order of their records, with their
        positions. Raises OSError."""
        start, first = self._starts[number], self._firsts[number]
        units = self._log.read(start, self._units_from(start))
        physical = np.where(units["due_ms"] != APPLIED, units["physical_offset"].astype(np.int64), -1)
        before = np.maximum.accumulate(np.concatenate(([first - 1], physical[:-1])))
        at = np.flatnonzero(physical > before)
        return start + at * UNIT_SIZE, units[at]

    def _units_from(self, start: int) -> int:
        """Return the number of units from a position to the end of its block."""
        return (int(self._block_of(np.array([start]))[0]) + _BLOCK - start) // UNIT_SIZE

    def _read(self, positions: Positions) -> Units:
        """Read the units at positions in any order. The units of one block are read together. Raises OSError."""
        order = np.argsort(positions)
        ascending = positions[order]
        blocks = self._block_of(ascending)
        starts = np.flatnonzero(np.concatenate(([True], blocks[1:] != blocks[:-1]))) if len(order) else order
        units = np.empty(len(positions), UNIT)
        for at, part in zip(np.split(order, starts[1:]), np.split(ascending, starts[1:]), strict=True):
            if len(part) and part[0] >= self._log.begin:
                found = self._log.read(int(part[0]), int(part[-1] - part[0]) // UNIT_SIZE + 1)
                units[at] = found[(part - part[0]) // UNIT_SIZE]
        return units
