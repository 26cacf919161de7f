"""Looking through the timer log for messages that wait: one by its record, all of them, or a part at a time.

A unit of the log says where a message was put, not whether it waits there still: a slot that is past means nothing any
more, of the second whose turn it is only what is in memory counts, and recovery knows of what was delivered.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np

from duemq.scheduler import waiting as decided
from duemq.scheduler.timers.files.log import NO_MESSAGE, UNIT, seconds_of
from duemq.scheduler.timers.second import NONE, waits_of
from duemq.storage.queues.pull import ColdRead, patiently

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from duemq.scheduler.timers.files.log import Positions, Units
    from duemq.scheduler.timers.second import Waits
    from duemq.scheduler.timers.slots import Slots

LOOK_UNITS: Final = 32
"""So many records are read in one piece of work, where units do not tell what their messages are."""
_CENSUS_UNITS: Final = 2048


class _Pass:
    """A search through the log."""

    def __init__(self, start: int, end: int) -> None:
        self.reached = start
        """The units from here on..."""
        self.end = end
        """...and before here have not been looked at."""
        self.moved: deque[Waits] = deque()
        """Messages that had units there, and got others, behind."""


class TimerSearch:
    """Searches the log of some slots. Raises OSError where it cannot be read."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._log = slots.log
        self._passes: list[_Pass] = []
        """Searches that are under way."""

    def is_waiting(self, waits: Waits, number: int) -> bool:
        """Whether a message, as `wait_at` gave it, is still to be delivered from the slot of a second by its unit."""
        slots = self._slots
        if number < slots.second or int(waits["magic"][0]) & NO_MESSAGE:
            return False
        if number < slots.start.recovered_to and not self._left(waits, np.array([number]))[0]:
            return False
        second = slots.resident.get(number)
        # Nothing of it is delivered before all of it is loaded.
        return second is None or not second.is_loaded or second.has(waits)

    def _left(self, waits: Waits, seconds: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which messages, by their units in slots that are not past, are still to be delivered for all that is known
        of the time before the start."""
        start = self._slots.start
        return decided.left_of(
            waits["physical"], waits["position"], waits["magic"], waits["due"], seconds, start.second, start.found
        ).kept

    def wait_at(self, position: int, number: int) -> Waits:
        """The message of a unit in the slot of a second. Raises OSError."""
        slots = self._slots
        waits = waits_of(self._log.read(position, 1), np.array([position]))
        if waits["due"][0] == 0:
            slots.learn(waits, 0, number)
        return waits

    def units_waiting(self, start: int = 0) -> Iterator[Waits | ColdRead]:
        """The messages in the wheel, each once, in parts of bounded size, in the order of the timer log, from a
        position of it on; and reads that have to be made before the next step (`patiently`). Of the messages that get
        another slot meanwhile, those to whose units it had not come are last, by their new units."""
        this = _Pass(start, self._log.end)
        self._passes.append(this)
        try:
            while (part := (yield from patiently(partial(self._log.part, this.reached, this.end)))) is not None:
                position, units = part
                waits, seconds = self._waiting_of(_following(position, units), units)
                yield from patiently(partial(self._learn, waits, seconds))
                this.reached = position + len(units) * UNIT.itemsize
                yield waits
            while this.moved:
                yield this.moved.popleft()
        finally:
            self._passes.remove(this)

    def by_record(self, after: int, end: int) -> Iterator[Waits | ColdRead]:
        """As `units_waiting`, in the order of the messages' records, of those between two physical offsets, which are
        not among them: whatever gets another unit meanwhile, or before one goes on, is in its place."""
        while after + 1 < end and (found := (yield from patiently(partial(self._slots.places.after, after)))):
            positions, units, after = found
            waits, seconds = self._waiting_of(positions, units)
            yield from patiently(partial(self._learn, waits, seconds))
            yield waits[waits["physical"] < end]

    def moved(self, old: NDArray[np.int64], waits: Waits) -> None:
        """Messages got other slots: `old` says where their units were."""
        for each in self._passes:
            missed = (old >= each.reached) & (old < each.end)
            if missed.any():
                each.moved.append(waits[missed])

    def _learn(self, waits: Waits, seconds: NDArray[np.int64]) -> None:
        """See `Slots.learn`, for those of some messages whose units do not tell."""
        for at in np.flatnonzero(waits["due"] == 0).tolist():
            self._slots.learn(waits, at, int(seconds[at]))

    def _waiting_of(self, positions: Positions, units: Units) -> tuple[Waits, NDArray[np.int64]]:
        """Those messages that wait by units at some positions of the log, and the seconds of their slots. Where
        Apache's broker wrote a unit the deliver time is 0."""
        slots = self._slots
        seconds = seconds_of(units)
        at = np.flatnonzero(decided.is_live(units, seconds, slots.second))
        waits, seconds = waits_of(units[at], positions[at]), seconds[at]
        kept = self._left(waits, seconds)
        current = seconds == slots.second
        if slots.current.is_loaded and current.any():
            # Of the current second the unit does not tell.
            positions = waits["position"]
            here = slots.current.positions_between(int(positions.min()), int(positions.max()))
            kept &= ~current | np.isin(positions, here)
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
            return *self._waiting_of(_following(position, units), units), position + len(units) * UNIT.itemsize
        file_end = start - start % self._log.segment_size + self._log.segment_size
        return (NONE, np.empty(0, np.int64), file_end) if file_end < end else None


def _following(position: int, units: Units) -> Positions:
    """Where units lie that follow each other from a position on."""
    return position + np.arange(len(units)) * UNIT.itemsize
