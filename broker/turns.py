"""Work that takes turns: what is left of many requests goes on a slice at a time, so that nobody waits long for others.

A turn of the event loop has one budget for all such work. What just arrived begins at once while there is some of it
left, and is mostly done then. What has to wait does so in one of two lanes, that for little and that for much, and a
turn serves both alternately, a share each time. So who asks for little waits for others who do, however many ask for
much; and those get at least half of each turn.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol

TURN_SECONDS: Final = 0.002
SHARE_SECONDS: Final = 0.001

IsOver = Callable[[], bool]
"""Called after each piece of work, of whoever does it: whether to leave the rest for later."""


class Work(Protocol):
    """Something that can be done piece by piece."""

    def work(self, is_over: IsOver) -> bool:
        """Do at least one piece, and more until `is_over`; whether there is more to do. Does not raise."""


class Budget(Protocol):
    """How much may be done in one turn of the loop, and in one share of it."""

    def renew(self) -> None:
        """A turn begins."""

    def begin_share(self) -> None:
        """Within the turn, somebody's share begins."""

    def is_spent(self) -> bool:
        """Whether the turn is over."""

    def spend(self) -> bool:
        """A piece of work is done; whether the turn is over."""

    def spend_share(self) -> bool:
        """A piece of work is done; whether the share or the turn is over."""


class TimeBudget:
    """A budget in seconds of `now`."""

    def __init__(
        self,
        turn: float = TURN_SECONDS,
        share: float = SHARE_SECONDS,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._turn = turn
        self._share = share
        self._now = now
        self._end = self._share_end = now()

    def renew(self) -> None:
        """See Budget."""
        self._end = self._now() + self._turn

    def begin_share(self) -> None:
        """See Budget."""
        self._share_end = min(self._end, self._now() + self._share)

    def is_spent(self) -> bool:
        """See Budget."""
        return self._now() >= self._end

    spend = is_spent

    def spend_share(self) -> bool:
        """See Budget."""
        return self._now() >= self._share_end


class Turns:
    """The lanes of work that is not done yet. Belongs to the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, budget: Budget) -> None:
        self._loop = loop
        self._budget = budget
        self._little: deque[Work] = deque()
        self._much: deque[Work] = deque()
        self._is_scheduled = False

    def begin(self) -> IsOver | None:
        """For work that just arrived: what tells it when to stop, or None where it has to wait from the start."""
        budget = self._budget
        if budget.is_spent():
            if self._is_scheduled:
                return None
            budget.renew()
            self._schedule()
        if not self._much:
            return budget.spend
        budget.begin_share()
        return budget.spend_share

    def add(self, work: Work, *, is_little: bool) -> None:
        """Let work wait for its turn. It waits in no lane yet. What of little work is not done in one share counts as
        much."""
        (self._little if is_little else self._much).append(work)
        self._schedule()

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        self._is_scheduled = False
        budget, little, much = self._budget, self._little, self._much
        budget.renew()
        while (little or much) and not budget.is_spent():
            for lane in (little, much):
                if lane and not budget.is_spent():
                    work = lane.popleft()
                    budget.begin_share()
                    if work.work(budget.spend_share):
                        much.append(work)
        if little or much:
            self._schedule()
