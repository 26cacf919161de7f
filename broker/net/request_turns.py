"""Requests that take turns: what is left of many goes on a slice at a time, so that nobody waits long for others.

What just arrived begins at once while the turn of the event loop has time for it, and is mostly done then. What has to
wait does so in one of two lanes, that for little and that for much, and a turn serves both alternately, a share each
time. So who asks for little waits for others who do, however many ask for much; and those get at least half of the
requests' part of each turn. That part is what `turns.Turns` gives them beside the broker's other work: what arrivals
have used of a turn is not there for the rest of it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol

from duemq.broker.turns import Turns
from duemq.storage.budget import Budget
from duemq.storage.clock import Moment

ARRIVAL_SECONDS: Final = 0.002
"""So long a turn goes on with what just arrived, before the rest of it waits."""
LANE_SECONDS: Final = 0.001
"""A share of one of the lanes."""

IsOver = Callable[[], bool]
"""Called after each piece of work, of whoever does it: whether to leave the rest for later."""


class Work(Protocol):
    """Something that can be done piece by piece."""

    def work(self, is_over: IsOver) -> bool:
        """Do at least one piece, and more until `is_over`; whether there is more to do. Does not raise."""


class RequestBudget(Protocol):
    """How much may be done for requests in one turn of the loop, and in one share of it."""

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


class RequestTime:
    """A budget in seconds of `now`."""

    def __init__(
        self,
        turn: float = ARRIVAL_SECONDS,
        share: float = LANE_SECONDS,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._turn = turn
        self._share = share
        self._now = now
        self._end = self._share_end = now()

    def renew(self) -> None:
        """See RequestBudget."""
        self._end = self._now() + self._turn

    def begin_share(self) -> None:
        """See RequestBudget."""
        self._share_end = min(self._end, self._now() + self._share)

    def is_spent(self) -> bool:
        """See RequestBudget."""
        return self._now() >= self._end

    spend = is_spent

    def spend_share(self) -> bool:
        """See RequestBudget."""
        return self._now() >= self._share_end


class RequestTurns:
    """The lanes of requests that are not done yet. Belongs to the event loop."""

    def __init__(self, turns: Turns, budget: RequestBudget) -> None:
        self._turns = turns
        self._budget = budget
        self._little: deque[Work] = deque()
        self._much: deque[Work] = deque()
        self._is_scheduled = False
        self._own = turns.work("requests")
        self._own.step = self._step

    def begin(self) -> IsOver | None:
        """For work that just arrived: what tells it when to stop, or None where it has to wait from the start."""
        budget = self._budget
        if budget.is_spent():
            if self._is_scheduled:
                return None
            budget.renew()
            self._turns.open()
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
            self._own.wake()

    def _step(self, _: Moment, turn: Budget) -> float | None:
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
            if turn.is_spent:
                break
        if not (little or much):
            return None
        self._is_scheduled = True
        return 0.0
