"""What waits in the timer wheel, counted by the second in which it is due, and found by its key (`timer_keys`).

Taken when somebody asks for it: the units of the timer log are looked at once, in slices, and from then on whatever
puts a message into a slot, takes it out or moves it tells it. So a store whose messages nobody counts or replaces pays
nothing for it, not at its start either.

While it is taken, a message is counted if its unit lies before the place that has been reached: what gets a unit
meanwhile gets it at the log's end, and is met there.

Counts are held by the hour, a number for each second, as narrow as the largest of the hour allows: 3600 bytes for an
hour in which no second has more than 255 messages. Slots cannot be counted instead: one has units of messages that are
delivered, cancelled, or due much later, and a slot's second ends where the clock's begins.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

import numpy as np

from protocol.timer_properties import PRECISION_MS
from scheduler.timer_keys import KeyIndex, tag_of
from scheduler.timer_wheel import HOUR

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from scheduler.timer_second import Waits

    Integers = NDArray[np.int64]

_NOT_BEGUN: Final = -1
_ALL: Final = 2**63 - 1
_CURVE_HOURS: Final = 64
_WIDTHS: Final = (np.uint8, np.uint16, np.int64)


class DueCounts:
    """How many messages are due in each second of the clock: that of s has [s, s + 1)."""

    def __init__(self) -> None:
        self._hours: dict[int, NDArray[np.int64]] = {}
        self._totals: dict[int, int] = {}

    def change(self, due: Integers, sign: int) -> None:
        """Messages that are due at some times, ms, came (1) or went (-1)."""
        seconds, counts = np.unique(due // PRECISION_MS, return_counts=True)
        hours = seconds // HOUR
        starts = np.flatnonzero(np.concatenate(([True], hours[1:] != hours[:-1]))).tolist()
        for start, end in zip(starts, [*starts[1:], len(hours)], strict=True):
            self._change_hour(int(hours[start]), seconds[start:end] % HOUR, sign * counts[start:end])

    def _change_hour(self, hour: int, seconds: Integers, changes: Integers) -> None:
        counts = self._hours.get(hour)
        if counts is None:
            counts = self._hours[hour] = np.zeros(HOUR, _WIDTHS[0])
        total = self._totals.get(hour, 0) + int(changes.sum())
        if not total:
            self._hours.pop(hour)
            self._totals.pop(hour, None)
            return
        self._totals[hour] = total
        new = counts[seconds] + changes
        largest = int(new.max())
        if largest > np.iinfo(counts.dtype).max:
            width = next(width for width in _WIDTHS if largest <= np.iinfo(width).max)
            counts = self._hours[hour] = counts.astype(width)
        counts[seconds] = new

    def curve(self, begin: int, step: int, steps: int, now: int) -> Iterator[Integers]:
        """How many are due in each of so many spans of `step` seconds from a second on; at its end all, before it what
        is counted so far. What was due before `now` counts as due then. Costs as much as there are hours with messages,
        and seconds of those hours that more than one span has a part of."""
        result = np.zeros(steps, np.int64)
        end = begin + step * steps
        for number, hour in enumerate(list(self._totals)):
            if number % _CURVE_HOURS == _CURVE_HOURS - 1:
                yield result
            first = hour * HOUR
            if hour not in self._totals or max(first + HOUR, now + 1) <= begin or max(first, now) >= end:
                continue
            spans = [(max(second, now) - begin) // step for second in (first, first + HOUR - 1)]
            if spans[0] == spans[1]:
                result[spans[0]] += self._totals[hour]
                continue
            counts = self._hours[hour]
            seconds = np.flatnonzero(counts)
            numbers = (np.maximum(first + seconds, now) - begin) // step
            right = (numbers >= 0) & (numbers < steps)
            np.add.at(result, numbers[right], counts[seconds[right]])
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
        """The units before a position have been looked at; these messages of the last of them wait."""
        self.reached = reached
        self._change(waits, 1)

    def complete(self) -> None:
        """All units have been looked at."""
        self.reached = _ALL

    def added(self, waits: Waits) -> None:
        """Messages got units at the end of the log."""
        if self.is_complete:
            self._change(waits, 1)

    def removed(self, waits: Waits) -> None:
        """Messages wait no more by the units that they have."""
        if self.is_begun:
            self._change(waits if self.is_complete else waits[waits["position"] < self.reached], -1)

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
