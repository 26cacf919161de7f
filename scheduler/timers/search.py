"""Searches the timer log for waiting messages: for one of them by its unit, for all, or for a part at a time.

A unit of the log says where a message was put, not whether it still waits there: a unit in a past slot stands for no
message, in the current second only messages in memory count, and recovery has found messages that were delivered.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np

from duemq.scheduler import waiting as decided
from duemq.scheduler.timers.deliver_times import LOOK_UNITS, learn
from duemq.scheduler.timers.files.log import TimerLog
from duemq.scheduler.timers.files.unit import NO_MESSAGE, UNIT, seconds_of
from duemq.scheduler.timers.index.census import Census
from duemq.scheduler.timers.index.positions import UnitPositions
from duemq.scheduler.timers.seconds.findings import Findings
from duemq.scheduler.timers.seconds.second import NO_WAITS, waits_of
from duemq.scheduler.timers.seconds.turns import SecondTurns
from duemq.storage.queues.pull import ColdRead, patiently
from duemq.storage.store import MessageStore

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from duemq.scheduler.timers.files.log import Positions
    from duemq.scheduler.timers.files.unit import Units
    from duemq.scheduler.timers.seconds.second import Waits

_CENSUS_UNITS: Final = 2048


class _Pass:
    """A search through the log that is in progress."""

    def __init__(self, start: int, end: int) -> None:
        self.reached = start
        """Position of the first unit that has not been looked at."""
        self.end = end
        """Position behind the last unit to look at."""
        self.moved: deque[Waits] = deque()
        """Messages whose units between `reached` and `end` were replaced by units behind `end`."""


class TimerSearch:
    """Searches the timer log. Raises OSError if it cannot be read."""

    def __init__(
        self,
        store: MessageStore,
        timer_log: TimerLog,
        positions: UnitPositions,
        turns: SecondTurns,
        *,
        findings: Findings,
        census: Census,
    ) -> None:
        self._store = store
        self._log = timer_log
        self._positions = positions
        self._turns = turns
        self._findings = findings
        self._census = census
        self._passes: list[_Pass] = []
        """Searches in progress."""

    def is_waiting(self, waits: Waits, number: int) -> bool:
        """Whether a message, as `wait_at` returned it, is still to be delivered by its unit in the slot of the second
        `number`."""
        turns, findings = self._turns, self._findings
        if number < turns.second or int(waits["magic"][0]) & NO_MESSAGE:
            return False
        if number < findings.start.recovered_to and not findings.is_left(waits, np.array([number]))[0]:
            return False
        second = turns.resident.get(number)
        # No message of a second is delivered before all of them are loaded.
        return second is None or not second.is_loaded or second.has(waits)

    def wait_at(self, position: int, number: int) -> Waits:
        """Return the message of the unit at a position, in the slot of the second `number`, as an array of one message.
        Raises OSError."""
        waits = waits_of(self._log.read(position, 1), np.array([position]))
        if waits["due"][0] == 0:
            learn(self._store, waits, 0, number)
        return waits

    def units_waiting(self, start: int = 0) -> Iterator[Waits | ColdRead]:
        """Iterate over the messages in the wheel whose units lie in the timer log from position `start` on. Yields each
        message once, in parts of bounded size, in the order of the log; and reads to be made before the next step
        (`patiently`). Messages that get another slot before the search comes to their units come last, with their new
        units."""
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
        """Iterate as `units_waiting` does, but in the order of the messages' records, and only over records between two
        physical offsets, both exclusive. A message keeps its position if it gets another unit in the meantime, or
        before a search is continued."""
        while after + 1 < end and (found := (yield from patiently(partial(self._positions.after, after)))):
            positions, units, after = found
            waits, seconds = self._waiting_of(positions, units)
            yield from patiently(partial(self._learn, waits, seconds))
            yield waits[waits["physical"] < end]

    def note_moved(self, old: NDArray[np.int64], waits: Waits) -> None:
        """Note that messages got other slots. `old`: the positions of their former units; `waits`: the messages with
        their new units."""
        for each in self._passes:
            missed = (old >= each.reached) & (old < each.end)
            if missed.any():
                each.moved.append(waits[missed])

    def _learn(self, waits: Waits, seconds: NDArray[np.int64]) -> None:
        """Call `learn` for the messages whose units do not have their deliver times. Raises OSError."""
        for at in np.flatnonzero(waits["due"] == 0).tolist():
            learn(self._store, waits, at, int(seconds[at]))

    def _waiting_of(self, positions: Positions, units: Units) -> tuple[Waits, NDArray[np.int64]]:
        """Return the messages that wait by these units, and the seconds of their slots. The deliver time is 0 if
        Apache's broker wrote the unit. `positions`: the positions of the units in the log."""
        turns = self._turns
        seconds = seconds_of(units)
        at = np.flatnonzero(decided.is_live(units, seconds, turns.second))
        waits, seconds = waits_of(units[at], positions[at]), seconds[at]
        kept = self._findings.is_left(waits, seconds)
        current = seconds == turns.second
        if turns.current.is_loaded and current.any():
            # In the current second, the unit does not tell whether its message was delivered.
            positions = waits["position"]
            here = turns.current.positions_between(int(positions.min()), int(positions.max()))
            kept &= ~current | np.isin(positions, here)
        return waits[kept], seconds[kept]

    def take_census(self) -> bool:
        """Look at a part of the log for the census. Return whether there was anything to do. Raises OSError,
        MemoryError."""
        census = self._census
        if not census.is_begun or census.is_complete:
            return False
        found = self.look_on(census.reached, _CENSUS_UNITS)
        if found is None:
            census.complete()
            return True
        waits, seconds, reached = found
        self._learn(waits, seconds)
        census.counted_to(waits, reached)
        return True

    def look_on(self, start: int, limit: int, end: int | None = None) -> tuple[Waits, NDArray[np.int64], int] | None:
        """Look at up to `limit` units from a position on; fewer if Apache's broker wrote many of them. Return the
        messages that wait by these units, the seconds of their slots, and the position behind the units; None at `end`,
        by default the end of the log."""
        start, end = max(start, self._log.begin), self._log.end if end is None else end
        for position, found in self._log.scan(start, min(end, start + limit * UNIT.itemsize)):
            unknown = np.flatnonzero(found["due_ms"] == 0)
            units = found[: unknown[LOOK_UNITS]] if len(unknown) > LOOK_UNITS else found
            return *self._waiting_of(_following(position, units), units), position + len(units) * UNIT.itemsize
        file_end = start - start % self._log.segment_size + self._log.segment_size
        return (NO_WAITS, np.empty(0, np.int64), file_end) if file_end < end else None


def _following(position: int, units: Units) -> Positions:
    """Return the positions of adjacent units from a position on."""
    return position + np.arange(len(units)) * UNIT.itemsize
