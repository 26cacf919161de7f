"""Tells those in the broker who wait for the store what has become of it."""

from __future__ import annotations

import asyncio
import contextlib

import structlog

from duemq.broker.net.held_answers import HeldAnswers
from duemq.scheduler.levels.service import LevelQueues
from duemq.storage.store import MessageStore

log = structlog.get_logger(__name__)


class NotedLevels:
    """Lets a change of the table of levels wait for a checkpoint that has the new table."""

    def __init__(self, store: MessageStore, levels: LevelQueues, timeout: float) -> None:
        """`timeout`: the longest wait, in seconds."""
        self._store = store
        self._levels = levels
        self._timeout = timeout
        self._next_checkpoint = asyncio.Event()

    def noted(self) -> None:
        """Note that a new checkpoint is on the disk: those who wait check whether this was the one."""
        made, self._next_checkpoint = self._next_checkpoint, asyncio.Event()
        made.set()

    async def wait(self) -> bool:
        """Wait for a checkpoint with the current table of levels. Return whether there is one in time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._timeout):
                while not self._is_noted:
                    await self._next_checkpoint.wait()
        return self._is_noted

    @property
    def _is_noted(self) -> bool:
        return self._levels.is_noted(self._store.checkpoint)


class StoreWatcher:
    """Receives the events of the owner of durability, see `storage.durability.owner.Watcher`. Belongs to the event
    loop."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, held: HeldAnswers, levels: LevelQueues, noted_levels: NotedLevels
    ) -> None:
        self._held = held
        self._levels = levels
        self._noted_levels = noted_levels
        self.failed: asyncio.Future[str] = loop.create_future()
        """Resolved with the reason once the store accepts nothing more: the broker must then be stopped and
        restarted."""
        self.end: asyncio.Future[Exception | None] = loop.create_future()
        """Resolved once the store has stopped: with the reason why it may not be durable, None if it is."""

    def released(self, position: int) -> None:
        """Send the answers and count the deliveries up to a position."""
        self._held.released(position)
        self._levels.note_flushed(position)

    def noted(self) -> None:
        """Note that a new checkpoint is on the disk."""
        self._noted_levels.noted()

    def poisoned(self, reason: str) -> None:
        """Give up the held answers, and resolve `failed`, which ends the process."""
        log.error("store_broken", reason=reason)
        self._held.give_up()
        if not self.failed.done():
            self.failed.set_result(reason)

    def stopped(self, error: Exception | None) -> None:
        """Note that the store has stopped. `error`: why it may not be durable; None if it is."""
        if not self.end.done():
            self.end.set_result(error)
