"""Parking: messages of a paused topic are parked, and brought back when the pause ends.

A message that is due while its topic is paused gets another unit, with its present deliver time, in a slot about as far
ahead as slots may be (`timerRollWindowSlot`). So a pause costs 52 bytes of the timer log and 16 bytes of memory for
each message, and nothing further while it lasts, except for another unit if it lasts longer than that window. All
messages of an hour are put into the same slot, up to `SLOT_UNITS`, then into the next one: so a slot is read in a few
pieces, and no slot is large.

When the pause ends, the parked messages get units in the current second: some at a time, in the order of their deliver
times, as soon as that second has few messages left. Messages that come due in the meantime are parked behind them, so
that the order is kept. The units by which messages were parked are then superseded (`timers.files.superseded`). If two
topics share a hash and the pause of only one ends, the parked messages of both are read once, and those of the topic
that is still paused stay parked.

Slots with parked messages are known by the hash of the topic. A start recognizes them in the timer log by units in the
slot of a later second than the one in which their messages are due.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final

import numpy as np

from duemq.scheduler.timers.files.log import TimerLog
from duemq.scheduler.timers.files.wheel import HOUR, TimerWheel
from duemq.scheduler.timers.seconds.findings import Findings
from duemq.scheduler.timers.seconds.roll_window import RollWindow
from duemq.scheduler.timers.seconds.second import NO_WAITS, joined, picked, waits_of
from duemq.scheduler.timers.seconds.turns import SecondTurns
from duemq.scheduler.waiting import is_parked

if TYPE_CHECKING:
    from duemq.scheduler.timers.files.log import Chain
    from duemq.scheduler.timers.seconds.second import Waits

SLOT_UNITS: Final = 65_536
"""Approximate limit of the number of messages parked in one slot."""
_GROUPS: Final = 4
"""Slots are filled one after the other from the beginning of an hour, or of this fraction (1 / _GROUPS) of the window
if that is shorter."""

IsPaused = Callable[[int], bool]
"""Returns whether a topic with this hash is paused."""


class Parking:
    """The slots with parked messages, and the slot whose messages are being brought back. Owned by one thread."""

    def __init__(
        self,
        timer_log: TimerLog,
        wheel: TimerWheel,
        turns: SecondTurns,
        window: RollWindow,
        findings: Findings,
        *,
        is_shared: Callable[[int], bool],
        read_ahead: Callable[[Waits], None],
    ) -> None:
        """Begin without parked messages. `is_shared`: returns whether several topics may have this hash; `read_ahead`:
        called with messages, many at a time, whose records will be read soon."""
        self._log = timer_log
        self._wheel = wheel
        self._turns = turns
        self._window = window
        self._findings = findings
        self._is_shared = is_shared
        self._read_ahead = read_ahead
        self._seconds: dict[int, set[int]] = {}
        """The seconds in whose slots messages are parked, by the hash of their topic. A slot may have none left."""
        self._asked: set[tuple[int, int]] = set()
        """Seconds and hashes to look through, since the pause of one topic with the hash may have ended while another
        topic is still paused."""
        self._least = 0
        """The first second in whose slot messages may still be parked."""
        self._of: tuple[int, int] | None = None
        """Second and hash of the messages that are being brought back."""
        self._chain: Chain | None = None
        """The units of that second, while they are being read."""
        self._parts: list[Waits] = []
        self._waits = NO_WAITS
        """The messages left to be brought back, in order, once all units are read."""
        self._withdrawn: set[int] = set()
        """Positions of units that were withdrawn in the meantime."""

    # --- parking

    def found(self, keys: Iterable[tuple[int, int]]) -> None:
        """Note the seconds, each with the hash of a topic, for which a start found parked messages."""
        for key in keys:
            self._add(*key)
            self._asked.add(key)

    def _add(self, second: int, topic_hash: int) -> None:
        self._seconds.setdefault(topic_hash, set()).add(second)

    def second_for(self, now_ms: int) -> int:
        """Return the second in whose slot messages that are due now are to be parked. Raises OSError."""
        end = self._window.end(now_ms)
        group = max(1, min(HOUR, self._window.size // _GROUPS))
        second = max(end // group * group - group, self._least)
        while second < end and self._wheel.count(second) >= SLOT_UNITS:
            second += 1
        self._least = second = min(second, end)
        return second

    def added(self, second: int, waits: Waits) -> None:
        """Note that messages were parked in the slot of a second."""
        for topic_hash in set(waits["hash"].tolist()):
            self._add(second, topic_hash)

    def ask(self, topic_hash: int) -> None:
        """Note that the pause of a topic with this hash may have ended."""
        self._asked.update((second, topic_hash) for second in self._seconds.get(topic_hash, ()))

    def withdrawn(self, position: int) -> None:
        """Note that the unit at a position was withdrawn."""
        if self._of is not None:
            self._withdrawn.add(position)

    # --- bringing back

    def going_on(self, is_paused: IsPaused) -> list[int]:
        """Return the hashes of topics that are not paused and may have parked messages."""
        if not self._seconds:
            return []
        # Messages in a slot that is loaded or past are delivered like all others of the slot.
        turned = self._turns.preloaded
        for topic_hash, seconds in list(self._seconds.items()):
            left = {second for second in seconds if second > turned}
            if left:
                self._seconds[topic_hash] = left
            else:
                del self._seconds[topic_hash]
        return [topic_hash for topic_hash in self._seconds if not is_paused(topic_hash)]

    def is_busy(self, is_paused: IsPaused) -> bool:
        """Whether `next_messages` has work."""
        return self._next(is_paused) is not None

    def _next(self, is_paused: IsPaused) -> tuple[int, int] | None:
        """Return second and hash of the parked messages to be brought back next; None without any."""
        going_on = self.going_on(is_paused)
        of = self._of
        if of is not None and of[0] > self._turns.preloaded and (of[1] in going_on or of in self._asked):
            return of
        keys = [(min(self._seconds[topic_hash]), topic_hash) for topic_hash in going_on]
        if self._asked:
            self._asked = {
                (second, topic_hash)
                for second, topic_hash in self._asked
                if second in self._seconds.get(topic_hash, ()) and self._is_shared(topic_hash)
            }
            keys += self._asked
        return min(keys, default=None)

    def next_messages(self, limit: int, is_paused: IsPaused) -> Waits | None:
        """Return the next messages to be brought back, at most `limit`. The result is empty if this call only read
        units or finished a slot, and None if no messages are left. Returns the same messages until `finished` is
        called. Raises OSError; then nothing has changed."""
        key = self._next(is_paused)
        if key is None:
            self._of = None
            return None
        if key != self._of:
            self._chain = self._log.chain(self._wheel.last(key[0]))
            self._of, self._parts, self._waits, self._withdrawn = key, [], NO_WAITS, set()
            # Nothing more is parked in this slot.
            self._least = max(self._least, key[0] + 1)
        if self._chain is not None:
            self._read(*key)
            return NO_WAITS
        if self._withdrawn:
            self._waits = picked(self._waits, ~np.isin(self._waits["position"], list(self._withdrawn)))
            self._withdrawn = set()
        if not len(self._waits):
            self._is_over(is_paused)
        return self._waits[:limit]

    def finished(self, count: int) -> None:
        """Note that the first `count` messages are done: they have newer units, were cancelled, or are to stay
        parked."""
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
        """Read a part of a slot's units; behind the last part, sort the messages."""
        assert self._chain is not None
        found = next(self._chain, None)
        if found is not None:
            positions, units = found
            at = np.flatnonzero((units["topic_hash"] == topic_hash) & is_parked(units, second))
            waits = waits_of(units[at], positions[at])
            kept = self._findings.left_of(second, waits, waits["magic"].astype(np.int32)).kept
            self._parts.append(picked(waits, kept))
            return
        self._chain = None
        waits = joined(self._parts[::-1]) if self._parts else NO_WAITS
        self._waits = picked(waits, np.argsort(waits["due"], kind="stable"))
        self._parts = []
        if len(self._waits):
            self._read_ahead(self._waits)
