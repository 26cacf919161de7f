"""Requests that take turns: large numbers of requests proceed slice by slice, so that no client waits long for others.

New requests begin immediately while the turn of the event loop has time for them, and most finish then. The rest wait
in one of two lanes, one for little work and one for much, and a turn serves both alternately, a share each time. So a
client with little work waits only for others with little, however many have much; and clients with much work get at
least half of the requests' part of each turn. `turns.Turns` divides a turn between requests and the broker's other
work. The time that new requests have used is deducted from the rest of the turn.
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
"""How long a turn handles new requests; the rest of them then wait."""
LANE_SECONDS: Final = 0.001
"""The length of one share of a lane."""

IsOver = Callable[[], bool]
"""Called after each piece of work; returns whether to leave the rest for later."""


class RequestWork(Protocol):
    """Work that can be done piece by piece."""

    def work(self, is_over: IsOver) -> bool:
        """Do at least one piece, and more until `is_over`; return whether there is more to do. Does not raise."""


class RequestBudget(Protocol):
    """Bounds the work for requests in one turn of the loop, and in one share of it."""

    def renew(self) -> None:
        """Begin a turn."""

    def begin_share(self) -> None:
        """Begin a share within the turn."""

    def is_spent(self) -> bool:
        """Whether the turn is over."""

    def spend(self) -> bool:
        """Count one piece of work as done; return whether the turn is over."""

    def spend_share(self) -> bool:
        """Count one piece of work as done; return whether the share or the turn is over."""


class RequestTime:
    """A budget of time for the work in one turn, and in one share of it, in seconds of the clock `now`."""

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
        """Begin a turn."""
        self._end = self._now() + self._turn

    def begin_share(self) -> None:
        """Begin a share within the turn."""
        self._share_end = min(self._end, self._now() + self._share)

    def is_spent(self) -> bool:
        """Whether the turn is over."""
        return self._now() >= self._end

    spend = is_spent

    def spend_share(self) -> bool:
        """Return whether the share or the turn is over."""
        return self._now() >= self._share_end


class RequestTurns:
    """The lanes of requests that are not done yet. Belongs to the event loop."""

    def __init__(self, turns: Turns, budget: RequestBudget) -> None:
        self._turns = turns
        self._budget = budget
        self._light: deque[RequestWork] = deque()
        self._heavy: deque[RequestWork] = deque()
        self._is_scheduled = False
        self._own = turns.work("requests", self._step)

    def begin(self) -> IsOver | None:
        """Begin work that just arrived: return the function that tells it when to stop, or None if it has to wait."""
        budget = self._budget
        if budget.is_spent():
            if self._is_scheduled:
                return None
            budget.renew()
            self._turns.open()
            self._schedule()
        if not self._heavy:
            return budget.spend
        budget.begin_share()
        return budget.spend_share

    def add(self, work: RequestWork, *, is_little: bool) -> None:
        """Queue work for its turn; it must not be in a lane yet. Little work that one share does not finish continues
        in the lane for much."""
        (self._light if is_little else self._heavy).append(work)
        self._schedule()

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            self._own.wake()

    def _step(self, _: Moment, turn: Budget) -> float | None:
        self._is_scheduled = False
        budget, little, much = self._budget, self._light, self._heavy
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
