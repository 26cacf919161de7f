"""Long work of a request, in slices between which everything else has its turn."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator
from typing import TypeVar

from duemq.broker.errors import Refused
from duemq.broker.net.cold_reads import ColdReads, Repeats
from duemq.protocol.codes import ResponseCode
from duemq.storage.budget import SPENT, Budget
from duemq.storage.queues.pull import ColdRead

T = TypeVar("T")


def always() -> bool:
    """For work that is done whether its client waits or not."""
    return True


class Slices:
    """Does the work of all requests that have much."""

    def __init__(self, share: Callable[[], Awaitable[Budget]], reads: ColdReads) -> None:
        """`share` gives a piece of work its part of the next turn of the loop."""
        self._reads = reads
        self._share = share
        self._is_stopped = False

    def stop(self) -> None:
        """End what is under way, before the store is closed: it is answered with an error."""
        self._is_stopped = True

    async def of(
        self, steps: Iterable[T | ColdRead | None], goes_on: Callable[[], bool] = always, *, is_patient: bool = False
    ) -> AsyncGenerator[T, None]:
        """What the steps of some work give, with the loop's turns in between. `is_patient`: they never wait for the
        disk, see `storage.queues.pull.patiently`. Raises Refused when the broker stops, or nobody waits for it any more
        (`goes_on`)."""
        budget: Budget = SPENT
        for found in self._at_once(steps) if is_patient else steps:
            if budget.is_spent:
                budget = await self._share()
                if self._is_stopped or not goes_on():
                    raise Refused(ResponseCode.SERVICE_NOT_AVAILABLE, "the search was given up")
            if isinstance(found, ColdRead):
                await self._reads.read(found.run)
            elif found is not None:
                yield found

    def _at_once(self, steps: Iterable[T | ColdRead | None]) -> Iterator[T | ColdRead | None]:
        """The steps, none of which may wait for the disk."""
        iterator, repeats = iter(steps), Repeats()
        while True:
            try:
                found = next(iterator) if repeats.are_too_many else self._reads.at_once(next, iterator)
            except StopIteration:
                return
            if isinstance(found, ColdRead) and not repeats.are_too_many:
                repeats.add(found.place)
            else:
                repeats.clear()
            yield found
