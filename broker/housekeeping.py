"""Periodic work outside the turns: each piece is short, and may fail."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import NamedTuple

import structlog

log = structlog.get_logger(__name__)


class Chore(NamedTuple):
    """A piece of work that is repeated at an interval."""

    name: str
    seconds: Callable[[], float]
    """Returns the interval in seconds; called before each wait."""
    work: Callable[[], None]


class Housekeeping:
    """The chores of one broker, each with a timer of its own. Belongs to the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, chores: Iterable[Chore]) -> None:
        self._loop = loop
        self._chores = {chore.name: chore for chore in chores}
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._is_stopped = False

    def start(self) -> None:
        """Begin to wait for the first run of each chore."""
        for chore in self._chores.values():
            self._wait(chore)

    def wait_anew(self, name: str) -> None:
        """Wait for a chore's interval from now on, because the interval has changed."""
        if name in self._timers and not self._is_stopped:
            self._timers[name].cancel()
            self._wait(self._chores[name])

    def stop(self) -> None:
        """Run no more chores."""
        self._is_stopped = True
        for timer in self._timers.values():
            timer.cancel()

    def _wait(self, chore: Chore) -> None:
        self._timers[chore.name] = self._loop.call_later(chore.seconds(), self._run, chore)

    def _run(self, chore: Chore) -> None:
        self._wait(chore)
        try:
            chore.work()
        except Exception:  # one failure must not end the repetition
            log.exception("housekeeping_failed", work=chore.name)
