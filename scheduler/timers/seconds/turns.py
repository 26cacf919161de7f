"""The turns of the seconds: which second is the current one, and when the next second has its turn. The messages of the
current second, and of the next seconds that were loaded ahead, are in memory, in the order of their deliver times.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import numpy as np

from duemq.protocol.records.timer_properties import PRECISION_MS, slot_second
from duemq.scheduler.timers.files.log import TimerLog
from duemq.scheduler.timers.files.wheel import HOUR, SLOTS, TimerWheel
from duemq.scheduler.timers.recovery import Start
from duemq.scheduler.timers.seconds.findings import Findings
from duemq.scheduler.timers.seconds.loading import Loading, sort_in
from duemq.scheduler.timers.seconds.second import Second
from duemq.scheduler.timers.topics import TimerTopics
from duemq.storage.store import MessageStore

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from duemq.scheduler.timers.seconds.second import Waits

PRELOAD_SECONDS: Final = 10
"""How many seconds before their time slots are loaded."""


class SecondTurns:
    """The current second, and the next ones in memory. Owned by one thread."""

    def __init__(
        self,
        store: MessageStore,
        timer_log: TimerLog,
        wheel: TimerWheel,
        findings: Findings,
        topics: TimerTopics,
        *,
        read_ahead: Callable[[Waits], None],
    ) -> None:
        """Begin before any second's turn; `load` sets the current second. `read_ahead`: called with messages, many at a
        time, whose records will be read soon."""
        self._store = store
        self._log = timer_log
        self._wheel = wheel
        self._findings = findings
        self._topics = topics
        self._read_ahead = read_ahead
        self.second = 0
        """The current second: everything in slots before it is done."""
        self.since = 0
        """The end of the commitlog when the current second's turn began."""
        self.log_since = 0
        """The end of the timer log when the current second's turn began."""
        self.resident: dict[int, Second] = {}
        """The seconds in memory: the current one, and those up to `preloaded` that have messages."""
        self.preloaded = 0
        """The last second that is loaded, or being loaded, or has no messages."""

    def load(self, start: Start) -> None:
        """Begin with the state that recovery found."""
        self.second, self.since, self.log_since = start.second, start.since, start.log_since
        self.preloaded = start.second

    @property
    def current(self) -> Second:
        """The second whose turn it is, with its messages."""
        return self.resident[self.second]

    @property
    def counted_at(self) -> int:
        """The present value of the note's `counted at` (`timers.files.small_files`)."""
        if self.current.is_loaded:
            return self._store.log.end
        start = self._findings.start
        return start.counted_at if self.second == start.second else 0

    # --- seconds in memory

    def open(self, number: int) -> None:
        """Begin to load a second, unless it is in memory. Raises OSError; then nothing has changed."""
        if number in self.resident:
            return
        last = self._wheel.last(number)
        second = self.resident[number] = Second(number, self._read_ahead)
        if last >= 0:
            loader = Loading(self._store, self._log.chain(last), second, self._findings, self._count_delivered)
            second.begin_loading(loader)

    def _count_delivered(self, second: Second) -> None:
        """Once a second is loaded and is the current one, subtract those of its messages that recovery found delivered
        from the counts: the note can tell only for the current second whether this was done."""
        if second.number == self.second and second.is_loaded:
            for waits in second.take_uncounted():
                self._topics.count(waits, -1)

    def loaded(self, number: int) -> Second:
        """Load the rest of a second in memory and return it. Raises OSError."""
        second = self.resident[number]
        while second.load_next():
            pass
        return second

    def add(self, waits: Waits, magic: NDArray[np.int32], seconds: NDArray[np.int64]) -> None:
        """Add those messages with new units whose seconds are in memory. `magic`: the units' magic numbers; `seconds`:
        the seconds of their slots."""
        near = seconds <= self.preloaded
        for number in sorted(set(seconds[near].tolist())):
            second = self.resident.get(number)
            if second is None:
                second = self.resident[number] = Second(number)
            mine = seconds == number
            sort_in(second, waits[mine], magic[mine], second.add)

    # --- time

    def advance(self, now_ms: int, *, is_idle: bool = False) -> bool:
        """Begin the turn of the next second if the current one is done and its time is over. Return whether a second
        got its turn. Seconds without messages get no turn, except once an hour, or if `is_idle`: so while nothing
        happens, nothing changes that a checkpoint would note. Raises OSError; then nothing has changed."""
        frontier = slot_second(now_ms)
        if self.second >= frontier or not self.current.is_done:
            return False
        following = self._wheel.next_second(self.second + 1, frontier + 1)
        if following is None and not is_idle and frontier - self.second < HOUR:
            return False
        self._turn(following if following is not None else frontier)
        return True

    def turn_up_to(self, number: int) -> None:
        """Begin the turn of the next second with messages before `number`, or else the turn of `number`, whether or not
        it has messages. The current second must be done. Raises OSError; then nothing has changed."""
        following = self._wheel.next_second(self.second + 1, number)
        self._turn(following if following is not None else number)

    def _turn(self, number: int) -> None:
        """Begin the turn of a second behind the current one. Raises OSError; then nothing has changed."""
        self.open(number)
        old = self.resident.pop(self.second)
        self._findings.forget(old.found_done)
        self.second = number
        self.preloaded = max(self.preloaded, number)
        self._count_delivered(self.current)
        self.since, self.log_since = self._store.log.end, self._log.end
        self._findings.turned_to(number)

    def preload(self, now_ms: int) -> bool:
        """Load a part of the next seconds. Return whether there was anything to do. Raises OSError."""
        for second in self.resident.values():
            if second.load_next():
                return True
        start, end = max(self.preloaded, self.second) + 1, now_ms // PRECISION_MS + PRELOAD_SECONDS
        if start > end:
            return False
        following = self._wheel.next_second(start, end + 1)
        if following is not None:
            self.open(following)
        self.preloaded = following if following is not None else end
        return following is not None

    def next_ms(self, now_ms: int, preload_ms: int = 0) -> int | None:
        """Return when there will be something to deliver or to load, ms since the epoch; None if nothing waits. Future
        seconds are not loaded before `preload_ms`. Raises OSError."""
        current, times = self.current, []
        if current.loader is not None or current.again or current.deletes:
            return now_ms
        if any(second.loader is not None for second in self.resident.values()):
            times.append(preload_ms)
        for number in sorted(self.resident):
            second = self.resident[number]
            head = second.head_ms
            if number != self.second and (head is not None or second.again or second.deletes):
                head = max(head or 0, number * PRECISION_MS + 1)
            if head is not None:
                times.append(head)
                break
        following = self._wheel.next_second(self.preloaded + 1, self.second + SLOTS)
        if following is not None:
            times.append(max(preload_ms, (following - PRELOAD_SECONDS) * PRECISION_MS))
        return max(now_ms, min(times)) if times else None
