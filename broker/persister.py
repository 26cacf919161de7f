"""Writing the JSON tables in a thread: the event loop never waits for their disk.

A table is saved as it is when its write begins; who asks for a save while one runs is served by one more write, not by
one each.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import structlog

from storage.config_file import ConfigFile

log = structlog.get_logger(__name__)


class Persister:
    """One thread for all tables."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="tables")
        self.tables: list[SavedTable] = []
        self.is_stopped = False

    def stop(self) -> None:
        """Wait for the write that runs, and write what was to be written after it. Raises OSError."""
        self.is_stopped = True
        self.thread.shutdown(wait=True)
        for table in self.tables:
            table.finish()


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

    def finish(self) -> None:
        """Write, here and now, what waits for the write that ran; no other is started any more."""
        if self._next is not None:
            self.save_now()
            if not self._next.done():
                self._next.set_result(None)
            self._next = None

    def _start(self, done: asyncio.Future[None]) -> asyncio.Future[None]:
        self._running = done
        work = self._persister.loop.run_in_executor(self._persister.thread, self._file.write, self._snapshot())
        work.add_done_callback(self._written)
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
        if self._next is not None:
            following, self._next = self._next, None
            self._start(following)
