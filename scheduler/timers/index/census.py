"""What waits in the timer wheel, counted by the second in which it is due, and found by its key (`timers.index.keys`).

Taken when somebody asks for it: the units of the timer log are looked at once, in slices, and from then on whatever
puts a message into a slot, takes it out or moves it tells it. So a store whose messages nobody counts or replaces pays
nothing for it, not at its start either.

Where memory runs out in the middle of a change it begins once more: it is derived, and what is told to it has happened.

While it is taken, a message is counted if its unit lies before the place that has been reached: what gets a unit
meanwhile gets it at the log's end, and is met there.

Counts are held by the hour, 16 bits for each second, and what is more than that apart: 7200 bytes for an hour in which
messages are due. Slots cannot be counted instead: one has units of messages that are
delivered, cancelled, or due much later, and a slot's second ends where the clock's begins.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

import numpy as np

from duemq.protocol.records.timer_properties import PRECISION_MS
from duemq.scheduler.timers.files.wheel import HOUR
from duemq.scheduler.timers.index.keys import KeyIndex, tag_of
from duemq.scheduler.timers.index.sorted_offsets import distinct_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from duemq.scheduler.timers.second import Waits

    Integers = NDArray[np.int64]

_NOT_BEGUN: Final = -1
_ALL: Final = 2**63 - 1
_CURVE_HOURS: Final = 32
_BITS: Final = 16
_MOST: Final = (1 << _BITS) - 1
_FIRST_HOURS: Final = 32
_MORE_HOURS: Final = 512


class DueCounts:
    """How many messages are due in each second of the clock: that of s has [s, s + 1)."""

    def __init__(self) -> None:
        self._rows: dict[int, int] = {}
        """By hour, its row in the two arrays."""
        self._free: list[int] = []
        self._counts = np.zeros(0, np.uint16)
        self._totals = np.zeros(0, np.int64)
        self._more: dict[int, int] = {}
        """By place in `_counts`, how many times 65536 its second has besides."""

    def change(self, due: Integers, sign: int) -> None:
        """Messages that are due at some times, ms, came (1) or went (-1)."""
        seconds, _, counts = distinct_of(due // PRECISION_MS)
        hours, _, seconds_of = distinct_of(seconds // HOUR)
        of_second = np.repeat(np.arange(len(hours)), seconds_of)
        rows = np.array([self._rows[hour] if hour in self._rows else self._add_row(hour) for hour in hours.tolist()])
        places = rows[of_second] * HOUR + seconds % HOUR
        new = self._counts[places] + sign * counts
        odd = np.flatnonzero((new < 0) | (new > _MOST))
        for at in odd.tolist():
            self._carry(int(places[at]), int(new[at]) >> _BITS)
        self._counts[places] = new & _MOST
        self._totals[rows] += np.bincount(of_second, sign * counts, len(rows)).astype(np.int64)
        for hour, row in zip(hours.tolist(), rows.tolist(), strict=True):
            if sign < 0 and not self._totals[row]:
                self._free.append(self._rows.pop(hour))

    def _add_row(self, hour: int) -> int:
        if not self._free:
            count = len(self._totals)
            more = max(_FIRST_HOURS, min(count, _MORE_HOURS))
            self._counts = np.concatenate((self._counts, np.zeros(more * HOUR, np.uint16)))
            self._totals = np.concatenate((self._totals, np.zeros(more, np.int64)))
            self._free = list(range(count, count + more))
        row = self._rows[hour] = self._free.pop()
        return row

    def _carry(self, place: int, times: int) -> None:
        self._more[place] = self._more.get(place, 0) + times
        if not self._more[place]:
            del self._more[place]

    def curve(self, begin: int, step: int, steps: int, now: int) -> Iterator[Integers]:
        """How many are due in each of so many spans of `step` seconds from a second on; at its end all, before it what
        is counted so far. What was due before `now` counts as due then. Costs as much as there are hours with messages,
        and seconds of those hours that more than one span has a part of."""
        result = np.zeros(steps, np.int64)
        end = begin + step * steps
        for number, hour in enumerate(list(self._rows)):
            if number % _CURVE_HOURS == _CURVE_HOURS - 1:
                yield result
            first, row = hour * HOUR, self._rows.get(hour)
            if row is None or max(first + HOUR, now + 1) <= begin or max(first, now) >= end:
                continue
            spans = [(max(second, now) - begin) // step for second in (first, first + HOUR - 1)]
            if spans[0] == spans[1]:
                result[spans[0]] += self._totals[row]
                continue
            counts = self._counts[row * HOUR : (row + 1) * HOUR].astype(np.int64)
            for place, times in self._more.items():
                if place // HOUR == row:
                    counts[place % HOUR] += times << _BITS
            numbers = (np.maximum(np.arange(first, first + HOUR), now) - begin) // step
            right = (numbers >= 0) & (numbers < steps)
            low = int(numbers[right][0]) if right.any() else 0
            added = np.bincount(numbers[right] - low, counts[right]).astype(np.int64)
            result[low : low + len(added)] += added
        yield result


class Census:
    """Counts and keys. Nothing changes before it is begun."""

    def __init__(self) -> None:
        self.counts = DueCounts()
        self.keys = KeyIndex()
        self.reached = _NOT_BEGUN
        """The units of the timer log before this position have been looked at."""

    @property
    def is_begun(self) -> bool:
        """Whether somebody has asked for it."""
        return self.reached != _NOT_BEGUN

    @property
    def is_complete(self) -> bool:
        """Whether it has everything."""
        return self.reached == _ALL

    def begin(self, position: int) -> None:
        """Take it, from the first unit of the timer log on."""
        if not self.is_begun:
            self.reached = position

    def took(self, waits: Waits, reached: int) -> None:
        """The units before a position have been looked at; these messages of the last of them wait. Raises MemoryError:
        then it has begun once more."""
        self.reached = reached
        try:
            self._change(waits, 1)
        except MemoryError:
            self._begin_again()
            raise

    def complete(self) -> None:
        """All units have been looked at."""
        self.reached = _ALL

    def added(self, waits: Waits) -> None:
        """Messages got units at the end of the log. Never fails."""
        if self.is_complete:
            self._change_or_begin_again(waits, 1)

    def removed(self, waits: Waits) -> None:
        """Messages wait no more by the units that they have. Never fails."""
        if self.is_begun:
            self._change_or_begin_again(waits, -1)

    def _change_or_begin_again(self, waits: Waits, sign: int) -> None:
        try:
            self._change(waits if self.is_complete else waits[waits["position"] < self.reached], sign)
        except MemoryError:
            self._begin_again()

    def _begin_again(self) -> None:
        self.reached = 0  # whoever looks begins where the log does
        self.counts, self.keys = DueCounts(), KeyIndex()

    def _change(self, waits: Waits, sign: int) -> None:
        if not len(waits):
            return
        self.counts.change(waits["due"], sign)
        keyed = waits["key"] != 0
        if not keyed.any():
            return
        change = self.keys.add if sign > 0 else self.keys.remove
        for topic_hash, key, position in waits[keyed][["hash", "key", "position"]].tolist():
            change(tag_of(topic_hash, key), position)
