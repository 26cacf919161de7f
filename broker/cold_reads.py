"""Looking into files from the event loop, which must not wait for the disk: what is not in memory is read by a thread
first, and whoever wanted it looks again."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Final, TypeVar

from broker.turns import Step
from broker.workers import Background, Workers
from storage.budget import Budget
from storage.clock import Moment
from storage.errors import NotInMemory
from storage.files import Files

T = TypeVar("T")

TRIES: Final = 100
"""A search by time among the messages of a queue makes some 60 reads. Where more are in vain, others take memory faster
than it is filled."""


class ColdReads:
    """Runs what looks into files. It must change nothing before its last read, as it may be run several times."""

    def __init__(self, files: Files, workers: Workers, share: Callable[[], Awaitable[Budget]]) -> None:
        """`share` gives a part of the next turn of the event loop."""
        self._files = files
        self._workers = workers
        self._share = share

    def at_once(self, look: Callable[..., T], *arguments: Any) -> T:
        """Look now. Raises NotInMemory where the disk would have to be waited for, and what `look` raises."""
        self._files.may_wait = False
        try:
            return look(*arguments)
        finally:
            self._files.may_wait = True

    async def run(self, look: Callable[..., T], *arguments: Any) -> T:
        """Look, as often as something had to be read before. Raises what `look` raises, OSError for one."""
        for _ in range(TRIES):
            try:
                return self.at_once(look, *arguments)
            except NotInMemory as missing:
                read = missing.read
            if not await self.read(read):
                break  # whoever looks is told what is wrong, in its own words
        return look(*arguments)

    async def read(self, read: Callable[[], object]) -> bool:
        """Have a thread read, which may wait for the disk. Gives whether it could: whoever looks after that finds the
        bytes in memory, or is told what is wrong."""
        try:
            await self._workers.run(Background.READS, read)
        except OSError:
            return False
        return True

    def step(self, step: Step, wake: Callable[[], None]) -> Step:
        """A step that ends where it would have to wait for the disk; `wake` is called when a thread has read."""
        failed = tries = 0

        def read(error: Exception | None) -> None:
            nonlocal failed
            failed += error is not None
            wake()

        def run(now: Moment, budget: Budget) -> float | None:
            nonlocal failed, tries
            if failed or tries == TRIES:
                # It is told what is wrong, in its own words; or others take memory faster than it is filled.
                failed = tries = 0
                return step(now, budget)
            try:
                wait = self.at_once(step, now, budget)
            except NotInMemory as missing:
                tries += 1
                self._workers.start(Background.READS, missing.read, read)
                return None
            tries = 0
            return wait

        return run

    async def each(self, looks: Iterable[Callable[[], T]]) -> list[T]:
        """What each of many looks gives, with the loop's turns in between."""
        found: list[T] = []
        budget = await self._share()
        for look in looks:
            if budget.is_spent:
                budget = await self._share()
            try:
                found.append(self.at_once(look))
            except NotInMemory:
                found.append(await self.run(look))
        return found
