"""Writing the JSON tables in a thread: the event loop never waits for their disk.

A table is saved as it is when its write begins; who asks for a save while one runs is served by one more write, not by
one each. How a write ended is a value, not an exception: many may wait for it, and each raises an error of its own.
What is in memory counts: a table that could not be written is written again later, and once more when the broker stops.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

import structlog

from duemq.broker.workers import Background, Workers
from duemq.storage.config_file import ConfigFile

log = structlog.get_logger(__name__)

RETRY_SECONDS: Final = 3.0
"""After this a write that failed is tried again."""

Table = dict[str, Any]
Outcome = asyncio.Future[OSError | None]
"""Done when a write has ended: None, or what went wrong."""
Written = Callable[[OSError | None], None]


class Persister:
    """All tables, which are written one at a time."""

    def __init__(self, loop: asyncio.AbstractEventLoop, workers: Workers) -> None:
        self.loop = loop
        self._workers = workers
        self.tables: list[SavedTable] = []
        self.is_stopped = False

    def write(self, file: ConfigFile, table: Table) -> asyncio.Future[None]:
        """Write a table; the future fails with OSError."""
        return self._workers.run(Background.TABLES, lambda: file.write(table))

    async def stop(self) -> None:
        """Wait for the writes that run, and write what was to be written after them. What fails is logged."""
        self.is_stopped = True
        for table in self.tables:
            await table.finish()


class SavedTable:
    """A table that lives in memory and is saved into one file. `snapshot` is called when a write begins; it gives what
    to write, which nobody changes any more, and what to call with the outcome: None, or what went wrong."""

    def __init__(self, persister: Persister, file: ConfigFile, snapshot: Callable[[], tuple[Table, Written]]) -> None:
        self._persister = persister
        self._file = file
        self._snapshot = snapshot
        self._running: Outcome | None = None
        self._next: Outcome | None = None
        self._failure = ""
        """Why the file does not have the table, as far as the last write tells; empty where it has."""
        persister.tables.append(self)

    def save(self) -> Outcome:
        """Save the table as it is now or later, without being waited for."""
        if self._running is None and not self._persister.is_stopped:
            return self._start(self._persister.loop.create_future())
        if self._next is None:
            self._next = self._persister.loop.create_future()
        return self._next

    async def saved(self) -> None:
        """Save the table as it is now or later, and wait until that is durable. Raises OSError."""
        await _succeeded(self.save())

    async def written(self) -> None:
        """Wait for the write that runs, if one does. Raises OSError."""
        if self._running is not None:
            await _succeeded(self._running)

    def save_now(self) -> None:
        """Save and wait for it, without the event loop: for the begin and the end of the broker. Raises OSError."""
        table, written = self._snapshot()
        self._file.write(table)
        written(None)

    def loaded(self) -> None:
        """The file has the table as it is now."""
        _, written = self._snapshot()
        written(None)

    async def finish(self) -> None:
        """Write what waits for the write that runs, or could not be written; no other is started any more."""
        if self._running is not None:
            await asyncio.wait([self._running])
        done, self._next = self._next, None
        if done is None and not self._failure:
            return
        table, written = self._snapshot()
        failure = None
        try:
            self._file.write(table)
        except OSError as error:
            self._failure = ""  # it is told again: the last try of all
            failure = self._failed(error)
        written(failure)
        if done is not None and not done.done():
            done.set_result(failure)

    def _retry(self) -> None:
        if self._failure and self._running is None and not self._persister.is_stopped:
            self.save()

    def _start(self, done: Outcome) -> Outcome:
        self._running = done
        table, written = self._snapshot()
        self._persister.write(self._file, table).add_done_callback(lambda work: self._ended(work, written))
        return done

    def _ended(self, work: asyncio.Future[None], written: Written) -> None:
        done, self._running = self._running, None
        error = work.exception()
        failure = self._failed(error) if error is not None else None
        if failure is None:
            self._failure = ""
        else:
            self._persister.loop.call_later(RETRY_SECONDS, self._retry)
        written(failure)
        if done is not None and not done.done():
            done.set_result(failure)
        if self._next is not None and not self._persister.is_stopped:
            following, self._next = self._next, None
            self._start(following)

    def _failed(self, error: BaseException) -> OSError:
        if str(error) != self._failure:  # told once
            log.error("table_not_saved", file=self._file.path, reason=str(error))
        self._failure = str(error) or type(error).__name__
        return error if isinstance(error, OSError) else OSError(f"{type(error).__name__}: {error}")


async def _succeeded(outcome: Outcome) -> None:
    error = await asyncio.shield(outcome)
    if error is not None:
        raise OSError(error.errno, error.strerror or str(error), error.filename)
