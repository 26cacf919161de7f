"""Looking through the timer log for messages that wait: one by its record, all of them, or a part at a time.

A unit of the log says where a message was put, not whether it waits there still: a slot that is past means nothing any
more, of the second whose turn it is only what is in memory counts, and recovery knows of what was delivered.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

import numpy as np

from protocol.timer_properties import PRECISION_MS
from scheduler.timer_log import APPLIED, NO_MESSAGE, UNIT, seconds_of
from scheduler.timer_second import NONE, is_among, waits_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from scheduler.timer_log import Units
    from scheduler.timer_second import Waits
    from scheduler.timer_slots import Slots

LOOK_UNITS: Final = 32
"""So many records are read in one piece of work, where units do not tell what their messages are."""
_CENSUS_UNITS: Final = 2048
_NEAR_SECONDS: Final = 8
_LATE_UNITS: Final = 65_536


class TimerSearch:
    """Searches the log of some slots. Raises OSError where it cannot be read."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._log = slots.log

    def find_unit(self, physical_offset: int, second: int, stored: int) -> tuple[int, int] | None:
        """Position and second of the newest unit of a message that is due in a second and was stored in another; None
        where it has none."""
        slots = self._slots
        window = slots.window
        slot = second
        if second > slots.second:
            slot -= (second - slots.second - 1) // window * window
        found = []
        # A clean stop hands what is left of a second over to the next one.
        candidates = [slot, min(slot + window, second), slots.second, slot + 1, slot + 2]
        if slots.is_handing_on:
            candidates.append(slots.second + 1)
        if second <= stored:  # late already when it came
            candidates += range(max(second, stored - _NEAR_SECONDS), stored + 2)
        for candidate in dict.fromkeys(candidates):
            for positions, units in self._log.chain(slots.wheel.last(candidate)):
                hits = np.flatnonzero(units["physical_offset"] == physical_offset)
                if len(hits):
                    found.append((int(positions[hits[-1]]), candidate))
                    break
            if found and candidate > slots.second:
                break  # it has one unit in a slot to come
        if slots.held_to >= slots.second:
            return self._scan_for_unit(physical_offset)
        if found:
            return max(found)
        if second >= slots.second:
            return self._scan_for_unit(physical_offset)
        # It came into the wheel when its time was past, after an outage: not long after it was stored, in the log.
        start = self._log.written_since(stored * PRECISION_MS)
        return self._scan_for_unit(physical_offset, start, start + _LATE_UNITS * UNIT.itemsize)

    def _scan_for_unit(
        self, physical_offset: int, start: int | None = None, end: int | None = None
    ) -> tuple[int, int] | None:
        """As `find_unit`, in the whole log or a part of it: the roll window was changed, or the clock set."""
        found = None
        start, end = self._log.begin if start is None else start, self._log.end if end is None else end
        for position, units in self._log.scan(start, end):
            hits = np.flatnonzero((units["physical_offset"] == physical_offset) & (units["due_ms"] != APPLIED))
            if len(hits):
                found = position + int(hits[-1]) * UNIT.itemsize, int(seconds_of(units[hits[-1] :])[0])
        return found

    def last_units(self, physical_offsets: NDArray[np.int64]) -> tuple[Waits, NDArray[np.int64]]:
        """Of some messages, by ascending physical offsets, those that have units: what the last unit of each says, and
        the second of its slot. One look at all of the log, however many they are."""
        parts, slots = [NONE], [np.empty(0, np.int64)]
        if len(physical_offsets):
            for position, units in self._log.scan(self._log.begin, self._log.end):
                is_one = is_among(units["physical_offset"].astype(np.int64), physical_offsets)
                at = np.flatnonzero(is_one & (units["due_ms"] != APPLIED))
                if len(at):
                    parts.append(waits_of(units[at], position + at * UNIT.itemsize))
                    slots.append(seconds_of(units[at]))
        waits, seconds = np.concatenate(parts), np.concatenate(slots)
        _, last = np.unique(waits["physical"][::-1], return_index=True)
        waits, seconds = waits[::-1][last], seconds[::-1][last]
        self._learn(waits, seconds)
        return waits, seconds

    def is_waiting(self, number: int, physical_offset: int) -> bool:
        """Whether a message of a second, whose unit is there, is still to be delivered."""
        slots = self._slots
        if number not in slots.resident:
            return True
        return bool((slots.loaded(number).physical() == physical_offset).any())

    def wait_at(self, position: int, number: int) -> Waits:
        """The message of a unit in the slot of a second, which waits. Raises OSError."""
        slots = self._slots
        waits = waits_of(self._log.read(position, 1), np.array([position]))
        if waits["due"][0] == 0:
            slots.learn(waits, 0, number)
        return waits

    def units_waiting(self, start: int = 0) -> Iterator[Waits]:
        """The messages in the wheel, in parts of bounded size, in the order of the timer log, from a position of it
        on."""
        for position, units in self._log.scan(start, self._log.end):
            waits, seconds = self._waiting_of(position, units)
            self._learn(waits, seconds)
            yield waits

    def _learn(self, waits: Waits, seconds: NDArray[np.int64]) -> None:
        """See `Slots.learn`, for those of some messages whose units do not tell."""
        for at in np.flatnonzero(waits["due"] == 0).tolist():
            self._slots.learn(waits, at, int(seconds[at]))

    def _waiting_of(self, position: int, units: Units) -> tuple[Waits, NDArray[np.int64]]:
        """Those messages that wait by some units of the log, and the seconds of their slots. Where Apache's broker
        wrote a unit the deliver time is 0."""
        slots = self._slots
        seconds = seconds_of(units)
        at = np.flatnonzero((seconds >= slots.second) & (units["magic"] & NO_MESSAGE == 0))
        waits, seconds = waits_of(units[at], position + at * UNIT.itemsize), seconds[at]
        kept = np.ones(len(at), bool)
        current = seconds == slots.second
        if current.any():
            # Of the current second the unit does not tell.
            kept = ~current | np.isin(waits["physical"], slots.loaded(slots.second).physical())
        if len(slots.start.done):
            kept &= (seconds >= slots.start.recovered_to) | ~is_among(waits["physical"], slots.start.done)
        return waits[kept], seconds[kept]

    def take_census(self) -> bool:
        """Look at a bit of the log for the census; whether there was anything to do."""
        census = self._slots.census
        if not census.is_begun or census.is_complete:
            return False
        found = self.look_on(census.reached, _CENSUS_UNITS)
        if found is None:
            census.complete()
            return True
        waits, seconds, reached = found
        self._learn(waits, seconds)
        census.took(waits, reached)
        return True

    def look_on(self, start: int, limit: int, end: int | None = None) -> tuple[Waits, NDArray[np.int64], int] | None:
        """As `_waiting_of`, for at most `limit` units from a position on, fewer where there are many that Apache's
        broker wrote; and the position behind them. None at the end of the log, or at the one given."""
        start, end = max(start, self._log.begin), self._log.end if end is None else end
        for position, found in self._log.scan(start, min(end, start + limit * UNIT.itemsize)):
            unknown = np.flatnonzero(found["due_ms"] == 0)
            units = found[: unknown[LOOK_UNITS]] if len(unknown) > LOOK_UNITS else found
            return *self._waiting_of(position, units), position + len(units) * UNIT.itemsize
        file_end = start - start % self._log.segment_size + self._log.segment_size
        return (NONE, np.empty(0, np.int64), file_end) if file_end < end else None
