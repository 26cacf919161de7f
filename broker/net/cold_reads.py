"""Lookups in files from the event loop, which must not wait for the disk: bytes that are not in memory are first read
by a thread, and the lookup is then repeated."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable, Iterable
from functools import partial
from typing import Any, Final, TypeVar

from duemq.broker.turns import Step
from duemq.broker.workers import Background, Workers
from duemq.storage.budget import Budget
from duemq.storage.clock import Moment
from duemq.storage.errors import NotInMemory
from duemq.storage.files import Files

T = TypeVar("T")

TRIES: Final = 100
"""How many times a lookup may read bytes again that it read before. If it needs more, other processes take memory
faster than reads fill it. A search through more files than this is not affected: it reads each of them only once."""
_MAX_POSITIONS: Final = 10_000


class RereadCounter:
    """Counts the repeated reads of one piece of work."""

    def __init__(self) -> None:
        self._positions: set[Hashable] = set()
        self._repeated = 0

    @property
    def are_too_many(self) -> bool:
        """Whether the work should now wait for the disk itself, since it might otherwise never end."""
        return self._repeated >= TRIES

    def add(self, position: Hashable) -> None:
        """Count a read; for `position` see `NotInMemory.position`."""
        self._repeated += position in self._positions
        if len(self._positions) < _MAX_POSITIONS:
            self._positions.add(position)

    def clear(self) -> None:
        """Start again from zero, after the work made progress."""
        if self._positions:
            self._positions.clear()
            self._repeated = 0


class ColdReads:
    """Runs lookups in files. A lookup must change nothing before its last read, as it may run several times."""

    def __init__(self, files: Files, workers: Workers, share: Callable[[], Awaitable[Budget]]) -> None:
        """`share` returns a part of the budget of the event loop's next turn."""
        self._files = files
        self._workers = workers
        self._share = share

    def at_once(self, look: Callable[..., T], *arguments: Any) -> T:
        """Run a lookup now. Raises NotInMemory if it would have to wait for the disk, and any error of `look`."""
        files = self._files
        before, files.may_wait = files.may_wait, False
        try:
            return look(*arguments)
        finally:
            files.may_wait = before  # lookups may be nested

    async def run(self, look: Callable[..., T], *arguments: Any) -> T:
        """Run a lookup, and repeat it after each read that it needs first. Raises any error of `look`, for example
        OSError."""
        repeats = RereadCounter()
        while not repeats.are_too_many:
            try:
                return self.at_once(look, *arguments)
            except NotInMemory as missing:
                repeats.add(missing.position)
                read = missing.read
            if not await self.read(read):
                break  # the last call of `look` then raises the error in its own words
        return look(*arguments)

    async def read(self, read: Callable[[], object]) -> bool:
        """Run `read` in a thread, where it may wait for the disk; return whether it succeeded. The caller then repeats
        its lookup, which finds the bytes in memory, or meets the error itself."""
        try:
            await self._workers.run(Background.READS, read)
        except OSError:
            return False
        return True

    def step(self, step: Step, wake: Callable[[], None]) -> Step:
        """Return a step that ends early instead of waiting for the disk; `wake` is called when the read has ended."""
        has_failed, repeats, under_way = False, RereadCounter(), set[Hashable]()

        def read(position: Hashable, error: Exception | None) -> None:
            nonlocal has_failed
            under_way.discard(position)
            has_failed |= error is not None
            wake()

        def run(now: Moment, budget: Budget) -> float | None:
            nonlocal has_failed
            if has_failed or repeats.are_too_many:
                # This call may wait for the disk. The step raises the error in its own words, or it reads what other
                # processes would push out of memory again.
                has_failed = False
                repeats.clear()
                return step(now, budget)
            try:
                wait = self.at_once(step, now, budget)
            except NotInMemory as missing:
                if missing.position not in under_way:  # the step may be called for another reason meanwhile
                    under_way.add(missing.position)
                    repeats.add(missing.position)
                    self._workers.start(Background.READS, missing.read, partial(read, missing.position))
                return None
            repeats.clear()
            return wait

        return run

    async def each(self, looks: Iterable[Callable[[], T]]) -> list[T]:
        """Return the results of many lookups, and let the event loop continue whenever a turn's budget is spent."""
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
