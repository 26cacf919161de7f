"""Long work of a request, in slices with turns of the event loop in between."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator
from typing import TypeVar

from duemq.broker.errors import Refused
from duemq.broker.net.cold_reads import ColdReads, RereadCounter
from duemq.protocol.codes import ResponseCode
from duemq.storage.budget import SPENT, Budget
from duemq.storage.queues.pull import ColdRead

T = TypeVar("T")


def always() -> bool:
    """The `goes_on` of work that is finished whether or not its client still waits."""
    return True


class Slices:
    """Runs the long work of all requests."""

    def __init__(self, share: Callable[[], Awaitable[Budget]], reads: ColdReads) -> None:
        """`share` returns the part of the loop's next turn that a piece of work may use."""
        self._reads = reads
        self._share = share
        self._is_stopped = False

    def stop(self) -> None:
        """End the work in progress, before the store is closed: its requests are answered with an error."""
        self._is_stopped = True

    async def of(
        self, steps: Iterable[T | ColdRead | None], goes_on: Callable[[], bool] = always, *, is_patient: bool = False
    ) -> AsyncGenerator[T, None]:
        """Yield the results of the steps of some work, with turns of the loop in between. `is_patient`: the steps never
        wait for the disk, see `storage.queues.pull.patiently`. Raises Refused when the broker stops, or when nobody
        waits for the results any longer (`goes_on` returns False)."""
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
        """Yield the steps' results; no step may wait for the disk."""
        iterator, repeats = iter(steps), RereadCounter()
        while True:
            try:
                found = next(iterator) if repeats.are_too_many else self._reads.at_once(next, iterator)
            except StopIteration:
                return
            if isinstance(found, ColdRead) and not repeats.are_too_many:
                repeats.add(found.position)
            else:
                repeats.clear()
            yield found
