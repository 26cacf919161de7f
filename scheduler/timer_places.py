"""Where in the timer log the newest unit of a message lies, by the physical offset of its record.

Most units are written in the order of their records, as messages come: of those one entry a block of the log is
enough, 16 bytes for 512 units, and the block is read. The units of messages that got another slot since are in sorted
runs, 16 bytes each (`sorted_pairs`), until their file of the log goes.

Both entrances are one: `note` takes what is appended, and at a start all that the log has.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from typing import TYPE_CHECKING, Final

import numpy as np

from scheduler.sorted_pairs import SortedPairs
from scheduler.timer_log import APPLIED, UNIT, UNIT_SIZE, TimerLog

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from scheduler.timer_log import Positions, Units

BLOCK_UNITS: Final = 512
"""At most so many units are read to find one."""
_BLOCK: Final = BLOCK_UNITS * UNIT_SIZE
_SOME: Final = 4096


class UnitPlaces:
    """The index. One thread owns it."""

    def __init__(self, timer_log: TimerLog) -> None:
        self._log = timer_log
        self._firsts, self._starts = array("q"), array("q")
        """Of each block that has units in the order of their records: the first such record, and its unit's position,
        both ascending."""
        self._moved = SortedPairs(lambda: timer_log.begin)
        """Records and positions of the other units."""
        self._last = -1
        """The last record of those in order."""
        self._waiting: list[tuple[Positions, Units]] = []
        """What is noted and not in the index yet: that costs as much for one unit as for many."""
        self._count = 0
        """How many units those are."""

    def note(self, positions: Positions, units: Units) -> None:
        """Units, at ascending positions, that lie behind all that are known. The caller leaves both as they are."""
        self._waiting.append((positions, units))
        self._count += len(units)
        if self._count >= _SOME:
            self._settle()

    def _settle(self) -> None:
        if not self._waiting:
            return
        waiting, self._waiting, self._count = self._waiting, [], 0
        if len(waiting) == 1:
            self._add(*waiting[0])
            return
        positions, units = zip(*waiting, strict=True)
        # numpy would join units field by field.
        self._add(np.concatenate(positions), np.frombuffer(b"".join(units), UNIT))

    def _add(self, positions: Positions, units: Units) -> None:
        physical = units["physical_offset"].astype(np.int64)
        if (units["due_ms"] == APPLIED).any():
            kept = units["due_ms"] != APPLIED  # the others stand for no message
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
        """Where the blocks of ascending positions begin; none is of two files."""
        size = self._log.segment_size
        base = int(positions[0]) // size * size if len(positions) else 0
        # Those of one file, as most are, cost one division less.
        is_one_file = len(positions) and int(positions[-1]) < base + size
        return positions - (positions - base if is_one_file else positions % size) % _BLOCK

    def find(self, physical_offset: int) -> tuple[int, Units] | None:
        """Position of the newest unit of a message, and the unit; None where the log has none. Raises OSError."""
        self._settle()
        moved = self._moved.find(physical_offset)
        if moved is not None and moved >= self._log.begin:
            return moved, self._log.read(moved, 1)
        at = bisect_right(self._firsts, physical_offset) - 1
        if at < 0 or self._starts[at] < self._log.begin:
            return None
        start = self._starts[at]
        units = self._log.read(start, (int(self._block_of(np.array([start]))[0]) + _BLOCK - start) // UNIT_SIZE)
        is_unit = (units["physical_offset"] == physical_offset) & (units["due_ms"] != APPLIED)
        hits = np.flatnonzero(is_unit)
        if not len(hits):
            return None
        return start + int(hits[-1]) * UNIT_SIZE, units[hits[-1] :][:1]
