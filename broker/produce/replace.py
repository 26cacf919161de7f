"""Sends that take the place of a message that waits (TIMER_REPLACE), one after the other.

Each is written on its own, and as it came: the last one counts. It has to know what waits for its key. So the first one
after a start waits until the timers have counted that, and each one reads the record of the message that it replaces,
in a thread where the disk has to be waited for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from duemq.broker.errors import Refused
from duemq.broker.net.cold_reads import ColdReads
from duemq.broker.net.router import Answer
from duemq.protocol.codes import ResponseCode
from duemq.scheduler.timers.service import Timers
from duemq.storage.clock import Clock
from duemq.storage.queues.pull import ColdRead
from duemq.storage.store import MessageStore

MAX_WAITING: Final = 10_000
MAX_WAITING_BYTES: Final = 64 * 1024 * 1024
"""So many sends wait, or so large ones, until further ones are refused."""


class Replacements:
    """The sends that wait for their turn."""

    def __init__(self, store: MessageStore, timers: Timers, clock: Clock, reads: ColdReads) -> None:
        """`clock`: the messages' clock."""
        self._store = store
        self._clock = clock
        self._timers = timers
        self._reads = reads
        self._turn = asyncio.Lock()
        self._waiting = self._waiting_bytes = 0

    def check(self, size: int) -> None:
        """Raises Refused where a send of a size is too much now."""
        if self._waiting >= MAX_WAITING or self._waiting_bytes + size > MAX_WAITING_BYTES:
            raise Refused(
                ResponseCode.SYSTEM_BUSY,
                f"[OVERLOAD]broker busy, start flow control for a while: {self._waiting} messages wait to replace "
                "others",
            )

    async def send(self, topic: str, key: str, size: int, look: Callable[[], Callable[[], Answer]]) -> Answer:
        """The answer to a send for a topic and a key, when that has its turn. `look` reads what it has to know of those
        that it replaces, and changes nothing, as it may be called several times; what it gives takes the message."""
        self._waiting += 1
        self._waiting_bytes += size
        try:
            async with self._turn:
                await self._known()
                ranges = await self._reads.run(self._timers.changes.replaced_by, topic, key, self._clock.now_ms())
                if ranges and not self._store.is_cached(ranges):
                    await self._reads.read(ColdRead(self._store.log, ranges).run)
                take = await self._reads.run(look)
                return take()  # nothing else has had a turn since `look`
        finally:
            self._waiting -= 1
            self._waiting_bytes -= size

    async def _known(self) -> None:
        """Wait until it is known what waits for which key."""
        if self._timers.is_counted:
            return
        counted = asyncio.Event()
        self._timers.count(counted.set)
        await counted.wait()
