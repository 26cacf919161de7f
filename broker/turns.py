"""Work in slices: work that takes longer than a few ms is done a slice per turn of the event loop. All slices of a turn
share one budget, so that five kinds of work delay clients no more than one does.

A kind of work is a step: a function that receives the time and a budget, and returns how long to wait before its next
call. Nothing below the broker reads a clock: the time of a turn is read here."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping
from typing import Final

import structlog

from duemq.storage.budget import Budget
from duemq.storage.clock import Clock, Moment, look

log = structlog.get_logger(__name__)

TURN_SECONDS: Final = 0.003
"""The budget of one turn, for all kinds of work together."""
SHARE_SECONDS: Final = 0.0005
"""The smallest slice of each kind of work in a turn."""
FAILED_SECONDS: Final = 1.0
"""The delay before a step that raised is called again."""
LATER_SECONDS: Final = 0.01
"""How long deferrable work is gathered before its step runs."""

Step = Callable[[Moment, Budget], float | None]
"""Does part of the work; returns the seconds until the next call: 0 for "in the next turn", None for "when woken"."""


class TimeBudget:
    """A budget that is spent at a given time of `time.perf_counter`."""

    __slots__ = ("_until",)

    def __init__(self, seconds: float) -> None:
        self._until = time.perf_counter() + seconds

    @property
    def is_spent(self) -> bool:
        """Whether the time is over. A step checks this after each piece of work, and does at least one piece."""
        return time.perf_counter() >= self._until


class SlicedWork:
    """One kind of work. The component that gives it something to do wakes it."""

    def __init__(self, turns: Turns, name: str) -> None:
        self._turns = turns
        self.name = name
        self.is_stopped = False
        """Whether the work takes no more turns."""
        self._timer: asyncio.TimerHandle | None = None
        self._at = 0.0
        """When the timer fires, by the loop's clock. uvloop's handles do not expose it."""

    def stop(self) -> None:
        """Take no more turns."""
        self.is_stopped = True

    def wake(self) -> None:
        """Ask for a turn now."""
        self._turns.ready(self)

    def wake_later(self) -> None:
        """Ask for a turn after some ms, for work that can wait."""
        self.wake_in(LATER_SECONDS)

    def wake_in(self, seconds: float) -> None:
        """Ask for a turn in `seconds` seconds; an earlier time that is already set stays."""
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
        """Cancel the turn that `wake_in` asked for."""
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
        """`clock`: each step receives its time. `budget` makes a budget from a number of seconds."""
        self.loop = loop
        self._clock = clock
        self._budget = budget
        self._kinds: list[SlicedWork] = []
        self._steps: dict[SlicedWork, Step] = {}
        self._ready: dict[SlicedWork, None] = {}
        self._is_called = False
        self._is_running = False
        self._end: float | None = None
        """When the current turn ends, by `time.perf_counter`; None if none has been opened."""
        self._sharing: list[asyncio.Future[Budget]] = []
        self._shares = self.work("coroutines", self._divide_budget)

    def work(self, name: str, step: Step | None = None) -> SlicedWork:
        """Make a kind of work, whose step runs once the turns are started. `step`: None if `start` receives it, for
        work that has to be made before the objects on which its step works."""
        made = SlicedWork(self, name)
        self._kinds.append(made)
        if step is not None:
            self._steps[made] = step
        return made

    async def share(self) -> Budget:
        """Wait for the next turn, and return the calling coroutine's part of its budget."""
        part: asyncio.Future[Budget] = self.loop.create_future()
        self._sharing.append(part)
        self._shares.wake()
        return await part

    def _divide_budget(self, _: Moment, budget: Budget) -> None:
        sharing, self._sharing = self._sharing, []
        for waiting in sharing:
            if not waiting.done():
                waiting.set_result(self._budget(SHARE_SECONDS) if len(sharing) > 1 else budget)

    def open(self) -> None:
        """Begin a turn with requests that just arrived: the time they take is deducted from the turn's other work."""
        self._end = time.perf_counter() + TURN_SECONDS

    def start(self, steps: Mapping[SlicedWork, Step] | None = None) -> None:
        """Begin to give turns, with one step of each kind of work: so no earlier `wake` is lost. `steps`: the steps of
        the kinds that were made without one. Raises ValueError if a kind has no step."""
        self._steps.update(steps or {})
        for work in self._kinds:
            if work not in self._steps:
                raise ValueError(f"the work {work.name!r} has no step: pass one to `work` or `start`")
        self._is_running = True
        for work in self._kinds:
            self.ready(work)

    def stop(self) -> None:
        """Give no more turns. Coroutines that wait for one are cancelled."""
        self._is_running = False
        for waiting in self._sharing:
            waiting.cancel()
        self._ready.clear()
        for work in self._kinds:
            work.cancel_timer()

    def ready(self, work: SlicedWork) -> None:
        """Queue a kind of work for the next turn."""
        if work.is_stopped or not self._is_running:
            return
        self._ready[work] = None
        if not self._is_called:
            self._is_called = True
            self.loop.call_soon(self._turn)

    def _turn(self) -> None:
        """Give each ready kind of work one slice, in the order in which the kinds were made. Each slice is an equal
        part of the budget that is left."""
        self._is_called = False
        ready = [work for work in self._kinds if work in self._ready]
        self._ready = {}
        left = len(ready)
        end = self._end or time.perf_counter() + TURN_SECONDS
        self._end = None
        for work in ready:
            share = max(SHARE_SECONDS, (end - time.perf_counter()) / left)
            left -= 1
            # The clock is read for each step: the records it appends must not be older than those of the step before.
            self._give_turn(work, look(self._clock), self._budget(share))

    def _give_turn(self, work: SlicedWork, now: Moment, budget: Budget) -> None:
        work.cancel_timer()
        if work.is_stopped or not self._is_running:
            return
        wait: float | None = FAILED_SECONDS
        try:
            wait = self._steps[work](now, budget)
        except Exception:  # one kind of work must not stop the others
            with contextlib.suppress(MemoryError):  # nor must this one stop because there is no memory for a log line
                log.exception("step_failed", of=work.name)
        if wait is None:
            return
        if wait <= 0:
            self.ready(work)
        else:
            work.wake_in(wait)
