"""Changes of the messages that wait for a topic and key (TIMER_REPLACE), one change after the other.

The broker has to know which messages wait for which key. So the first change after a start waits until the timers have
indexed the waiting messages by key. Each change reads the records of the messages that it concerns, in a thread if that
has to wait for the disk.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from duemq.broker.net.cold_reads import ColdReads
from duemq.scheduler.timers.service import Timers
from duemq.storage.clock import Clock
from duemq.storage.queues.pull import ColdRead
from duemq.storage.store import MessageStore

P = ParamSpec("P")
T = TypeVar("T")


class KeyTurns:
    """Runs one change at a time. `clock` is the messages' clock."""

    def __init__(self, store: MessageStore, timers: Timers, clock: Clock, reads: ColdReads) -> None:
        self._store = store
        self._timers = timers
        self._clock = clock
        self._reads = reads
        self._turn = asyncio.Lock()

    async def change(
        self, topic: str, key: str, look: Callable[P, Callable[[], T]], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Wait for a turn, call `look`, then call the function that it returns, with nothing else running in between.
        Return that function's result. `look` may call `TimerChanges.to_replace`. It is repeated if it would have to
        wait for the disk, so it must not change anything. Raises any error of the two functions."""
        async with self._turn:
            await self._known()
            # Only now all waiting messages are known: see `recurring.records.left_out`.
            await self._reads.run(self._timers.follow, self._clock.now_ms())
            ranges = await self._reads.run(self._timers.changes.replaced_by, topic, key, self._clock.now_ms())
            if ranges and not self._store.is_cached(ranges):
                await self._reads.read(ColdRead(self._store.log, ranges).run)
            change = await self._reads.run(look, *args, **kwargs)
            return change()

    async def _known(self) -> None:
        """Wait until the index of waiting messages by key is complete."""
        if self._timers.is_counted:
            return
        counted = asyncio.Event()
        self._timers.count(counted.set)
        await counted.wait()
