"""Writing the JSON tables in a thread: the event loop never waits for their disk.

A table is saved as it is when its write begins; who asks for a save while one runs is served by one more write, not by
one each.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import structlog

from broker.workers import Background, Workers
from storage.config_file import ConfigFile

log = structlog.get_logger(__name__)


class Persister:
    """All tables, which are written one at a time."""

    def __init__(self, loop: asyncio.AbstractEventLoop, workers: Workers) -> None:
        self.loop = loop
        self._workers = workers
        self.tables: list[SavedTable] = []
        self.is_stopped = False

    def write(self, file: ConfigFile, table: dict[str, Any]) -> asyncio.Future[None]:
        """Write a table; the future fails with OSError."""
        return self._workers.run(Background.TABLES, lambda: file.write(table))

    async def stop(self) -> None:
        """Wait for the writes that run, and write what was to be written after them. Raises OSError."""
        self.is_stopped = True
        for table in self.tables:
            await table.finish()


class SavedTable:
    """A table that lives in memory and is saved into one file."""

    def __init__(self, persister: Persister, file: ConfigFile, snapshot: Callable[[], dict[str, Any]]) -> None:
        self._persister = persister
        self._file = file
        self._snapshot = snapshot
        self._running: asyncio.Future[None] | None = None
        self._next: asyncio.Future[None] | None = None
        persister.tables.append(self)

    def save(self) -> asyncio.Future[None]:
        """Save the table as it is now or later; the future is done when that is durable, and fails with OSError."""
        if self._running is None and not self._persister.is_stopped:
            return self._start(self._persister.loop.create_future())
        if self._next is None:
            self._next = self._persister.loop.create_future()
        return self._next

    def save_now(self) -> None:
        """Save and wait for it; for the end of the broker."""
        self._file.write(self._snapshot())

    async def finish(self) -> None:
        """Write what waits for the write that runs; no other is started any more. Raises OSError."""
        if self._running is not None:
            await asyncio.wait([self._running])
        if self._next is not None:
            self.save_now()
            if not self._next.done():
                self._next.set_result(None)
            self._next = None

    def _start(self, done: asyncio.Future[None]) -> asyncio.Future[None]:
        self._running = done
        self._persister.write(self._file, self._snapshot()).add_done_callback(self._written)
        return done

    def _written(self, work: asyncio.Future[None]) -> None:
        done, self._running = self._running, None
        error = work.exception()
        if error is not None:
            log.error("table_not_saved", file=self._file.path, reason=str(error))
        if done is not None and not done.cancelled():
            if error is None:
                done.set_result(None)
            else:
                done.set_exception(error)
                done.exception()  # whoever waits gets it; nobody has to
        if self._next is not None and not self._persister.is_stopped:
            following, self._next = self._next, None
            self._start(following)
