"""The census: the messages in the timer wheel, counted by the second in which they are due, and indexed by key
(`timers.index.keys`).

It is taken at the first request: the units of the timer log are read once, in slices, and from then on all code that
puts a message into a slot, takes it out or moves it reports that. So a store whose messages are never counted or
replaced pays nothing for it, not even at its start.

If memory runs out in the middle of a change, the census starts over: it is derived data, and the reported change has
already happened.

While the census is being taken, a change is counted only if the message's unit lies before the position reached: a new
unit lies at the end of the log, and will be read there.

Counts are kept by the hour, with 16 bits for each second and the excess kept separately: 7200 bytes for an hour in
which messages are due. The numbers in the slots cannot be used instead: a slot has units of messages that are
delivered, cancelled, or due much later, and a message due at a whole second is in the slot of the second before.
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

    from duemq.scheduler.timers.seconds.second import Waits

    Integers = NDArray[np.int64]

_NOT_BEGUN: Final = -1
_ALL: Final = 2**63 - 1
_CURVE_HOURS: Final = 32
_BITS: Final = 16
_MOST: Final = (1 << _BITS) - 1
_FIRST_HOURS: Final = 32
_MORE_HOURS: Final = 512


class DueCounts:
    """The number of messages that are due in each second of the clock: second s is the interval [s, s + 1)."""

    def __init__(self) -> None:
        self._rows: dict[int, int] = {}
        """The row of each hour in the two arrays."""
        self._free: list[int] = []
        self._counts = np.zeros(0, np.uint16)
        self._totals = np.zeros(0, np.int64)
        self._more: dict[int, int] = {}
        """The excess of a second in multiples of 65,536, by index in `_counts`."""

    def change(self, due: Integers, sign: int) -> None:
        """Add (`sign` 1) or subtract (-1) messages with these deliver times, ms since the epoch."""
        seconds, _, counts = distinct_of(due // PRECISION_MS)
        hours, _, seconds_of = distinct_of(seconds // HOUR)
        of_second = np.repeat(np.arange(len(hours)), seconds_of)
        rows = np.array([self._rows[hour] if hour in self._rows else self._add_row(hour) for hour in hours.tolist()])
        indexes = rows[of_second] * HOUR + seconds % HOUR
        new = self._counts[indexes] + sign * counts
        odd = np.flatnonzero((new < 0) | (new > _MOST))
        for at in odd.tolist():
            self._carry(int(indexes[at]), int(new[at]) >> _BITS)
        self._counts[indexes] = new & _MOST
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

    def _carry(self, index: int, times: int) -> None:
        self._more[index] = self._more.get(index, 0) + times
        if not self._more[index]:
            del self._more[index]

    def curve(self, begin: int, step: int, steps: int, now: int) -> Iterator[Integers]:
        """Count the messages that are due in each of `steps` spans of `step` seconds, from the second `begin` on.
        Yields the counts so far, now and then, and the complete ones at the end. Messages due before `now` count as due
        at `now`. The cost grows with the number of hours with messages, and with the number of seconds in hours that
        lie in several spans."""
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
            for index, times in self._more.items():
                if index // HOUR == row:
                    counts[index % HOUR] += times << _BITS
            numbers = (np.maximum(np.arange(first, first + HOUR), now) - begin) // step
            right = (numbers >= 0) & (numbers < steps)
            low = int(numbers[right][0]) if right.any() else 0
            added = np.bincount(numbers[right] - low, counts[right]).astype(np.int64)
            result[low : low + len(added)] += added
        yield result


class Census:
    """The counts and keys of waiting messages. Changes are ignored before `begin`."""

    def __init__(self) -> None:
        self.counts = DueCounts()
        self.keys = KeyIndex()
        self.reached = _NOT_BEGUN
        """Position in the timer log before which all units have been looked at."""

    @property
    def is_begun(self) -> bool:
        """Whether the census was begun."""
        return self.reached != _NOT_BEGUN

    @property
    def is_complete(self) -> bool:
        """Whether all units have been looked at."""
        return self.reached == _ALL

    def begin(self, position: int) -> None:
        """Begin the census at the position of the timer log's first unit, unless it was begun before."""
        if not self.is_begun:
            self.reached = position

    def counted_to(self, waits: Waits, reached: int) -> None:
        """Note that the units before a position have been looked at, and add the waiting messages of the last part.
        Raises MemoryError; then the census has started over."""
        self.reached = reached
        try:
            self._change(waits, 1)
        except MemoryError:
            self._begin_again()
            raise

    def complete(self) -> None:
        """Note that all units have been looked at."""
        self.reached = _ALL

    def added(self, waits: Waits) -> None:
        """Add messages that got units at the end of the log. Never fails."""
        if self.is_complete:
            self._change_or_begin_again(waits, 1)

    def removed(self, waits: Waits) -> None:
        """Remove messages that no longer wait by their present units. Never fails."""
        if self.is_begun:
            self._change_or_begin_again(waits, -1)

    def _change_or_begin_again(self, waits: Waits, sign: int) -> None:
        try:
            self._change(waits if self.is_complete else waits[waits["position"] < self.reached], sign)
        except MemoryError:
            self._begin_again()

    def _begin_again(self) -> None:
        self.reached = 0  # `TimerSearch.look_on` then continues at the beginning of the log
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
