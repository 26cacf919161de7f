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
"""How many times a lookup may have to read again what it read before. Beyond that, other processes take memory faster
than it is filled. A search through more files than this reads each of them only once."""
_MAX_PLACES: Final = 10_000


class RereadCounter:
    """Counts the repeated reads of one piece of work."""

    def __init__(self) -> None:
        self._places: set[Hashable] = set()
        self._repeated = 0

    @property
    def are_too_many(self) -> bool:
        """Whether the work should now wait for the disk itself, as it would otherwise never end."""
        return self._repeated >= TRIES

    def add(self, place: Hashable) -> None:
        """Count a read; for `place` see `NotInMemory.place`."""
        self._repeated += place in self._places
        if len(self._places) < _MAX_PLACES:
            self._places.add(place)

    def clear(self) -> None:
        """Start again from zero, after the work went on."""
        if self._places:
            self._places.clear()
            self._repeated = 0


class ColdReads:
    """Runs lookups in files. A lookup must change nothing before its last read, as it may run several times."""

    def __init__(self, files: Files, workers: Workers, share: Callable[[], Awaitable[Budget]]) -> None:
        """`share` gives a part of the event loop's next turn."""
        self._files = files
        self._workers = workers
        self._share = share

    def at_once(self, look: Callable[..., T], *arguments: Any) -> T:
        """Look now. Raises NotInMemory if that would have to wait for the disk, and whatever `look` raises."""
        files = self._files
        before, files.may_wait = files.may_wait, False
        try:
            return look(*arguments)
        finally:
            files.may_wait = before  # lookups may be nested

    async def run(self, look: Callable[..., T], *arguments: Any) -> T:
        """Look, repeatedly if something has to be read first. Raises whatever `look` raises, OSError for example."""
        repeats = RereadCounter()
        while not repeats.are_too_many:
            try:
                return self.at_once(look, *arguments)
            except NotInMemory as missing:
                repeats.add(missing.place)
                read = missing.read
            if not await self.read(read):
                break  # `look` then raises the error in its own words
        return look(*arguments)

    async def read(self, read: Callable[[], object]) -> bool:
        """Have a thread read, which may wait for the disk; return whether it could. The caller then looks again, and
        finds the bytes in memory, or the error."""
        try:
            await self._workers.run(Background.READS, read)
        except OSError:
            return False
        return True

    def step(self, step: Step, wake: Callable[[], None]) -> Step:
        """Return a step that ends early instead of waiting for the disk; `wake` is called when a thread has read."""
        has_failed, repeats, under_way = False, RereadCounter(), set[Hashable]()

        def read(place: Hashable, error: Exception | None) -> None:
            nonlocal has_failed
            under_way.discard(place)
            has_failed |= error is not None
            wake()

        def run(now: Moment, budget: Budget) -> float | None:
            nonlocal has_failed
            if has_failed or repeats.are_too_many:
                # The step then raises the error in its own words, or others take memory faster than it is filled.
                has_failed = False
                repeats.clear()
                return step(now, budget)
            try:
                wait = self.at_once(step, now, budget)
            except NotInMemory as missing:
                if missing.place not in under_way:  # the step may be called for another reason meanwhile
                    under_way.add(missing.place)
                    repeats.add(missing.place)
                    self._workers.start(Background.READS, missing.read, partial(read, missing.place))
                return None
            repeats.clear()
            return wait

        return run

    async def each(self, looks: Iterable[Callable[[], T]]) -> list[T]:
        """Return the result of each of many lookups, with the loop's turns in between."""
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
