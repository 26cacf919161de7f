"""Writing the JSON tables in a thread, so that the event loop never waits for the disk.

A table is saved as it is when its write begins; all saves requested while a write runs share one further write. The
outcome of a write is a value, not an exception: many callers may wait for it, and each raises an error of its own. The
tables in memory are authoritative: a table that could not be written is written again later, and once more when the
broker stops.
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
"""Seconds after which a failed write is tried again."""

Table = dict[str, Any]
Outcome = asyncio.Future[OSError | None]
"""The result of a write: None, or the error."""
Written = Callable[[OSError | None], None]


class Persister:
    """Writes all tables of one broker, one at a time."""

    def __init__(self, loop: asyncio.AbstractEventLoop, workers: Workers) -> None:
        self.loop = loop
        self._workers = workers
        self.tables: list[SavedTable] = []
        self.is_stopped = False

    def write(self, file: ConfigFile, table: Table) -> asyncio.Future[None]:
        """Write a table; the future fails with OSError."""
        return self._workers.run(Background.TABLES, lambda: file.write(table))

    async def stop(self) -> None:
        """Wait for running writes, and do those that are queued behind them. Failures are logged."""
        self.is_stopped = True
        for table in self.tables:
            await table.finish()


class SavedTable:
    """A table that lives in memory and is saved into one file. `snapshot` is called when a write begins; it returns the
    data to write, which must not change afterwards, and a function to call with the outcome: None, or the error."""

    def __init__(self, persister: Persister, file: ConfigFile, snapshot: Callable[[], tuple[Table, Written]]) -> None:
        self._persister = persister
        self._file = file
        self._snapshot = snapshot
        self._running: Outcome | None = None
        self._next: Outcome | None = None
        self._failure = ""
        """Why the last write failed; empty if the file has the table."""
        persister.tables.append(self)

    def save(self) -> Outcome:
        """Save the table as it is now or later; the caller need not wait for the outcome."""
        if self._running is None and not self._persister.is_stopped:
            return self._start(self._persister.loop.create_future())
        if self._next is None:
            self._next = self._persister.loop.create_future()
        return self._next

    async def saved(self) -> None:
        """Save the table as it is now or later, and wait until that is durable. Raises OSError."""
        await _succeeded(self.save())

    async def written(self) -> None:
        """Wait for the running write, if there is one. Raises OSError."""
        if self._running is not None:
            await _succeeded(self._running)

    def save_now(self) -> None:
        """Save and wait, without the event loop: for the start and stop of the broker. Raises OSError."""
        table, written = self._snapshot()
        self._file.write(table)
        written(None)

    def loaded(self) -> None:
        """Note that the file has the current table."""
        _, written = self._snapshot()
        written(None)

    async def finish(self) -> None:
        """Do the write that is queued or has failed. No write is started after this."""
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
            self._failure = ""  # so that it is logged again: this was the last try
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
        if str(error) != self._failure:  # a repeated failure is logged once
            log.error("table_not_saved", file=self._file.path, reason=str(error))
        self._failure = str(error) or type(error).__name__
        return error if isinstance(error, OSError) else OSError(f"{type(error).__name__}: {error}")


async def _succeeded(outcome: Outcome) -> None:
    error = await asyncio.shield(outcome)
    if error is not None:
        raise OSError(error.errno, error.strerror or str(error), error.filename)
