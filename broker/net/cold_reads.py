"""Looking into files from the event loop, which must not wait for the disk: what is not in memory is read by a thread
first, and whoever wanted it looks again."""

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
"""How often something may have to be read that was read before: whoever takes memory takes it faster than it is filled
then. A search that goes through more files than that reads each of them once."""
_MAX_PLACES: Final = 10_000


class Repeats:
    """Counts what one piece of work has read again."""

    def __init__(self) -> None:
        self._places: set[Hashable] = set()
        self._repeated = 0

    @property
    def are_too_many(self) -> bool:
        """Whether the work is to wait for the disk itself now, or would never end."""
        return self._repeated >= TRIES

    def add(self, place: Hashable) -> None:
        """Something has to be read; see `NotInMemory.place`."""
        self._repeated += place in self._places
        if len(self._places) < _MAX_PLACES:
            self._places.add(place)

    def clear(self) -> None:
        """The work went on."""
        if self._places:
            self._places.clear()
            self._repeated = 0


class ColdReads:
    """Runs what looks into files. It must change nothing before its last read, as it may be run several times."""

    def __init__(self, files: Files, workers: Workers, share: Callable[[], Awaitable[Budget]]) -> None:
        """`share` gives a part of the next turn of the event loop."""
        self._files = files
        self._workers = workers
        self._share = share

    def at_once(self, look: Callable[..., T], *arguments: Any) -> T:
        """Look now. Raises NotInMemory where the disk would have to be waited for, and what `look` raises."""
        files = self._files
        before, files.may_wait = files.may_wait, False
        try:
            return look(*arguments)
        finally:
            files.may_wait = before  # whoever looks may be looked into

    async def run(self, look: Callable[..., T], *arguments: Any) -> T:
        """Look, as often as something had to be read before. Raises what `look` raises, OSError for one."""
        repeats = Repeats()
        while not repeats.are_too_many:
            try:
                return self.at_once(look, *arguments)
            except NotInMemory as missing:
                repeats.add(missing.place)
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
        has_failed, repeats, under_way = False, Repeats(), set[Hashable]()

        def read(place: Hashable, error: Exception | None) -> None:
            nonlocal has_failed
            under_way.discard(place)
            has_failed |= error is not None
            wake()

        def run(now: Moment, budget: Budget) -> float | None:
            nonlocal has_failed
            if has_failed or repeats.are_too_many:
                # It is told what is wrong, in its own words; or others take memory faster than it is filled.
                has_failed = False
                repeats.clear()
                return step(now, budget)
            try:
                wait = self.at_once(step, now, budget)
            except NotInMemory as missing:
                if missing.place not in under_way:  # it may be called for something else meanwhile
                    under_way.add(missing.place)
                    repeats.add(missing.place)
                    self._workers.start(Background.READS, missing.read, partial(read, missing.place))
                return None
            repeats.clear()
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
