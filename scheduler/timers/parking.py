"""What pauses hold back: parked, and brought back when they end.

A message that is due while its topic is paused gets one more unit, in a slot about as far ahead as slots may be
(`timerRollWindowSlot`), with the deliver time that it has. So a pause costs 52 bytes of the timer log and 16 of memory
a message, and nothing while it lasts, but for another unit where it lasts longer than that. All of an hour go to the
same slot, up to `SLOT_UNITS`, then to the next one: so a slot is read in a few pieces, and none is large.

When the pause ends the parked messages get units in the current second, some at a time, in the order of their deliver
times, as soon as that has few messages left. What comes due meanwhile is parked behind them, so that all come in order.
The units that they had are superseded (`timers.files.superseded`). Where two topics have one hash and only one goes on,
all of both are looked at once, and those of the other stay.

Which slots have parked messages of which topics is known by the hash of these, and found in the timer log by a start:
units of a later second than that in which their messages are due.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final

import numpy as np

from duemq.scheduler.timers.files.wheel import HOUR
from duemq.scheduler.timers.second import NONE, Second, joined, picked, waits_of
from duemq.scheduler.waiting import is_parked

if TYPE_CHECKING:
    from duemq.scheduler.timers.files.log import Chain
    from duemq.scheduler.timers.second import Waits
    from duemq.scheduler.timers.slots import Slots

SLOT_UNITS: Final = 65_536
"""About as many messages are parked in one slot."""
_GROUPS: Final = 4
"""The slots of one hour, or of this part of the window if that is shorter, are filled one after the other."""

IsPaused = Callable[[int], bool]
"""Whether a topic is paused that has a hash."""


class Parking:
    """The slots with parked messages, and the one whose messages are being brought back. One thread owns it."""

    def __init__(self, slots: Slots, is_shared: Callable[[int], bool]) -> None:
        """`is_shared` tells whether several topics have a hash."""
        self._slots = slots
        self._is_shared = is_shared
        self._seconds: dict[int, set[int]] = {}
        """The slots with messages of each topic, by its hash: the seconds. There may be none left."""
        self._asked: set[tuple[int, int]] = set()
        """Slots and hashes of which one topic may go on while another is paused."""
        self._least = 0
        """Nothing is parked in the slot of an earlier second than this."""
        self._of: tuple[int, int] | None = None
        """Second and hash of what is being brought back..."""
        self._chain: Chain | None = None
        """...whose units are being read..."""
        self._parts: list[Waits] = []
        self._waits = NONE
        """...or, when that is done, what is left to be brought back, in order."""
        self._withdrawn: set[int] = set()
        """Positions of units that were withdrawn meanwhile."""

    # --- in

    def found(self, places: Iterable[tuple[int, int]]) -> None:
        """A start found messages in the slots of some seconds, of topics with some hashes."""
        for place in places:
            self._add(*place)
            self._asked.add(place)

    def _add(self, second: int, topic_hash: int) -> None:
        self._seconds.setdefault(topic_hash, set()).add(second)

    def second_for(self, now_ms: int) -> int:
        """The second in whose slot what is due now is to be parked. Raises OSError."""
        slots = self._slots
        end = slots.base(now_ms) + slots.window
        group = max(1, min(HOUR, slots.window // _GROUPS))
        second = max(end // group * group - group, self._least)
        while second < end and slots.wheel.count(second) >= SLOT_UNITS:
            second += 1
        self._least = second = min(second, end)
        return second

    def added(self, second: int, waits: Waits) -> None:
        """Messages were parked in the slot of a second."""
        for topic_hash in set(waits["hash"].tolist()):
            self._add(second, topic_hash)

    def ask(self, topic_hash: int) -> None:
        """A topic that has a hash may go on."""
        self._asked.update((second, topic_hash) for second in self._seconds.get(topic_hash, ()))

    def withdrawn(self, position: int) -> None:
        """The message of a unit waits no more."""
        if self._of is not None:
            self._withdrawn.add(position)

    # --- out

    def going_on(self, is_paused: IsPaused) -> list[int]:
        """The hashes of topics that are not paused and have messages here."""
        if not self._seconds:
            return []
        # What is about to have its turn, or has had it, goes the way of all others.
        turned = self._slots.preloaded
        for topic_hash, seconds in list(self._seconds.items()):
            left = {second for second in seconds if second > turned}
            if left:
                self._seconds[topic_hash] = left
            else:
                del self._seconds[topic_hash]
        return [topic_hash for topic_hash in self._seconds if not is_paused(topic_hash)]

    def is_busy(self, is_paused: IsPaused) -> bool:
        """Whether `some` has something to do."""
        return self._next(is_paused) is not None

    def _next(self, is_paused: IsPaused) -> tuple[int, int] | None:
        """The second of the slot that is to be emptied next, and the hash."""
        going_on = self.going_on(is_paused)
        of = self._of
        if of is not None and of[0] > self._slots.preloaded and (of[1] in going_on or of in self._asked):
            return of
        places = [(min(self._seconds[topic_hash]), topic_hash) for topic_hash in going_on]
        if self._asked:
            self._asked = {
                (second, topic_hash)
                for second, topic_hash in self._asked
                if second in self._seconds.get(topic_hash, ()) and self._is_shared(topic_hash)
            }
            places += self._asked
        return min(places, default=None)

    def next_messages(self, limit: int, is_paused: IsPaused) -> Waits | None:
        """Some of the messages that are to go on, the first ones, at most `limit`; none where it had to look for more,
        None where there are no more. It gives the same again until `took`. Raises OSError; then it is where it was."""
        place = self._next(is_paused)
        if place is None:
            self._of = None
            return None
        if place != self._of:
            self._chain = self._slots.log.chain(self._slots.wheel.last(place[0]))
            self._of, self._parts, self._waits, self._withdrawn = place, [], NONE, set()
            # From now on nothing more comes there.
            self._least = max(self._least, place[0] + 1)
        if self._chain is not None:
            self._read(*place)
            return NONE
        if self._withdrawn:
            self._waits = picked(self._waits, ~np.isin(self._waits["position"], list(self._withdrawn)))
            self._withdrawn = set()
        if not len(self._waits):
            self._is_over(is_paused)
        return self._waits[:limit]

    def took(self, count: int) -> None:
        """The first messages have other units, or stay where they are."""
        self._waits = self._waits[count:]

    def _is_over(self, is_paused: IsPaused) -> None:
        assert self._of is not None
        second, topic_hash = self._of
        self._asked.discard(self._of)
        self._of = None
        if is_paused(topic_hash):
            return
        self._seconds[topic_hash].discard(second)
        if not self._seconds[topic_hash]:
            del self._seconds[topic_hash]

    def _read(self, second: int, topic_hash: int) -> None:
        """Read a part of a slot's units; at its end have the messages in order."""
        assert self._chain is not None
        found = next(self._chain, None)
        if found is not None:
            positions, units = found
            at = np.flatnonzero((units["topic_hash"] == topic_hash) & is_parked(units, second))
            waits = waits_of(units[at], positions[at])
            kept = self._slots.left_of(Second(second), waits, waits["magic"].astype(np.int32))[0]
            self._parts.append(picked(waits, kept))
            return
        self._chain = None
        waits = joined(self._parts[::-1]) if self._parts else NONE
        self._waits = picked(waits, np.argsort(waits["due"], kind="stable"))
        self._parts = []
        if len(self._waits):
            self._slots.read_ahead(self._waits)
