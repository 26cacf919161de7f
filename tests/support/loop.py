"""An event loop whose time a test advances, so that no test waits for real time.

Time stands still between the test's calls of `advance`; timers that have become due then fire in the next turns.
"""

from __future__ import annotations

import asyncio

from duemq.broker.net.request_turns import RequestBudget, RequestTurns
from duemq.broker.turns import Turns
from duemq.storage.budget import UNLIMITED
from duemq.storage.clock import ManualClock


class SteppedLoop(asyncio.SelectorEventLoop):
    """See the module."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 1000.0

    def time(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        """Let time pass; callbacks that have become due run when the caller next waits."""
        self._now += seconds


class CountBudget:
    """A budget of a fixed number of pieces of work per turn and per share, whatever time they take. Endless by
    default."""

    def __init__(self, turn: float = float("inf"), share: float = float("inf")) -> None:
        self._turn = turn
        self._share = share
        self._left = turn
        self._share_left = share
        self.turns = 0
        """Number of turns begun."""

    def renew(self) -> None:
        self._left = self._turn
        self.turns += 1

    def begin_share(self) -> None:
        self._share_left = min(self._left, self._share)

    def is_spent(self) -> bool:
        return self._left <= 0

    def spend(self) -> bool:
        self._left -= 1
        return self._left <= 0

    def spend_share(self) -> bool:
        self._share_left -= 1
        return self.spend() or self._share_left <= 0


def request_turns(loop: asyncio.AbstractEventLoop, budget: RequestBudget | None = None) -> RequestTurns:
    """Started turns for requests only, with an endless budget unless one is given."""
    everything = Turns(loop, ManualClock(), lambda _: UNLIMITED)
    made = RequestTurns(everything, budget or CountBudget())
    everything.start()
    return made


async def turns(count: int = 3) -> None:
    """Run the callbacks that are due, and those that they schedule soon."""
    for _ in range(count):
        await asyncio.sleep(0)
