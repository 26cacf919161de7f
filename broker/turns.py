"""Work in slices: what takes longer than a few ms is done a bit in each turn of the event loop, all of it under one
budget for the turn, so that five kinds of work are no worse for those who send than one is.

A kind of work is a step that is told the time and a budget, and gives when it wants to be called again. Nothing below
the broker reads a clock: the time of a turn is read here."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Final

import structlog

from duemq.storage.budget import Budget
from duemq.storage.clock import Clock, Moment, look

log = structlog.get_logger(__name__)

TURN_SECONDS: Final = 0.003
"""How long all work of one turn may go on..."""
SHARE_SECONDS: Final = 0.0005
"""...and each kind at least."""
FAILED_SECONDS: Final = 1.0
"""A step that raised is called again after this."""
LATER_SECONDS: Final = 0.01
"""So long work that can wait is gathered."""

Step = Callable[[Moment, Budget], float | None]
"""Does some of what there is to do; gives in how many seconds there is more, 0 for "in the next turn", None for "when
it is woken"."""


class TimeBudget:
    """A budget that is spent at a time of `time.perf_counter`."""

    __slots__ = ("_until",)

    def __init__(self, seconds: float) -> None:
        self._until = time.perf_counter() + seconds

    @property
    def is_spent(self) -> bool:
        """See `storage.budget.Budget`."""
        return time.perf_counter() >= self._until


class Work:
    """One kind of work. Whoever brings it more to do wakes it."""

    def __init__(self, turns: Turns, name: str) -> None:
        self._turns = turns
        self.name = name
        self.step: Step | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._at = 0.0
        """When the timer is up, by the loop's clock; uvloop's handles do not tell."""

    def wake(self) -> None:
        """There is something to do now."""
        self._turns.ready(self)

    def wake_later(self) -> None:
        """There is something to do that can wait for some ms."""
        self.wake_in(LATER_SECONDS)

    def wake_in(self, seconds: float) -> None:
        """There is something to do in so many seconds, or earlier if it was said so before."""
        at = self._turns.loop.time() + seconds
        if self._timer is not None:
            if self._at <= at:
                return
            self._timer.cancel()
        self._at = at
        self._timer = self._turns.loop.call_later(seconds, self._time_is_up)

    def _time_is_up(self) -> None:
        self._timer = None
        self._turns.ready(self)

    def cancel_timer(self) -> None:
        """Forget when there would have been something to do."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class Turns:
    """Gives each kind of work its slices."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        clock: Clock,
        budget: Callable[[float], Budget] = TimeBudget,
    ) -> None:
        """`clock` is what steps are told the time by. `budget` makes one of so many seconds."""
        self.loop = loop
        self._clock = clock
        self._budget = budget
        self._all: list[Work] = []
        self._ready: dict[Work, None] = {}
        self._is_called = False
        self._is_running = False
        self._end: float | None = None
        """When the turn that is open is over."""
        self._sharing: list[asyncio.Future[Budget]] = []
        self._shares = self.work("coroutines")
        self._shares.step = self._share_out

    def work(self, name: str) -> Work:
        """A kind of work; it has no turns before it is given its step (`run`) and `start` is called."""
        made = Work(self, name)
        self._all.append(made)
        return made

    async def share(self) -> Budget:
        """Wait for the next turn; gives a coroutine its part of that turn's budget."""
        mine: asyncio.Future[Budget] = self.loop.create_future()
        self._sharing.append(mine)
        self._shares.wake()
        return await mine

    def _share_out(self, _: Moment, budget: Budget) -> None:
        sharing, self._sharing = self._sharing, []
        for waiting in sharing:
            if not waiting.done():
                waiting.set_result(self._budget(SHARE_SECONDS) if len(sharing) > 1 else budget)

    def open(self) -> None:
        """A turn begins with what just arrived: what that takes is not there for the turn's other work."""
        self._end = time.perf_counter() + TURN_SECONDS

    def start(self) -> None:
        """Begin, with a step of each kind."""
        self._is_running = True
        for work in self._all:
            self.ready(work)

    def stop(self) -> None:
        """No more turns. Coroutines that wait for one are cancelled."""
        self._is_running = False
        for waiting in self._sharing:
            waiting.cancel()
        self._ready.clear()
        for work in self._all:
            work.cancel_timer()

    def ready(self, work: Work) -> None:
        """A kind of work wants its turn."""
        if work.step is None or not self._is_running:
            return
        self._ready[work] = None
        if not self._is_called:
            self._is_called = True
            self.loop.call_soon(self._turn)

    def _turn(self) -> None:
        """One slice for each that is ready, in the order in which they were made: of what is left of the budget, an
        equal part."""
        self._is_called = False
        ready = [work for work in self._all if work in self._ready]
        self._ready = {}
        left = len(ready)
        end = self._end or time.perf_counter() + TURN_SECONDS
        self._end = None
        for work in ready:
            share = max(SHARE_SECONDS, (end - time.perf_counter()) / left)
            left -= 1
            # Each by its own look at the clock: what a step appends is not older than what one before it appended.
            self._give_turn(work, look(self._clock), self._budget(share))

    def _give_turn(self, work: Work, now: Moment, budget: Budget) -> None:
        work.cancel_timer()
        if work.step is None or not self._is_running:
            return
        wait: float | None = FAILED_SECONDS
        try:
            wait = work.step(now, budget)
        except Exception:  # no other work may wait for that of one
            with contextlib.suppress(MemoryError):  # nor this one for a line that there is no memory for
                log.exception("step_failed", of=work.name)
        if wait is None:
            return
        if wait <= 0:
            self.ready(work)
        else:
            work.wake_in(wait)
