"""The threads for work that waits for the disk, one set for the whole broker: a component names a lane for its work,
and is called back in the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from enum import Enum, auto
from typing import Final, Protocol, TypeVar

from duemq.broker.errors import ConfigError
from duemq.storage.durability.jobs import Lane

T = TypeVar("T")


class Background(Enum):
    """The broker's own lanes, in addition to those of `storage.durability.jobs.Lane`."""

    PULLS = auto()
    """Reads of messages that consumers pull and that are not in memory."""
    READS = auto()
    """All other reads from the disk."""
    TABLES = auto()
    """Writes of the JSON tables."""


_THREADS: Final = {
    Lane.FLUSH: 1,
    Lane.FILES: 1,
    Lane.ALLOCATE: 1,
    Background.PULLS: 2,
    Background.READS: 2,
    Background.TABLES: 1,
}


class Workers(Protocol):
    """Runs work that waits for the disk: `storage.durability.jobs.Workers`, extended for coroutines."""

    def start(
        self, lane: Lane | Background, work: Callable[[], object], done: Callable[[Exception | None], None]
    ) -> None:
        """See `storage.durability.jobs.Workers`."""

    def run(self, lane: Lane | Background, work: Callable[[], T]) -> asyncio.Future[T]:
        """Run `work` in a lane; the future holds its result, or the error that kept it from running."""

    def stop(self) -> None:
        """Wait until all started work is done; nothing may be started afterwards."""


class ThreadWorkers:
    """Implements `storage.durability.jobs.Workers`, and runs work that coroutines await. Belongs to an event loop.

    All threads are started at once: the system may have none to give later (the pids limit of a container, `ulimit
    -u`), and that must not make work fail that other components depend on."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """Raises ConfigError if the system does not give enough threads."""
        self._loop = loop
        self._lanes = {
            lane: ThreadPoolExecutor(count, thread_name_prefix=lane.name.lower()) for lane, count in _THREADS.items()
        }
        try:
            for lane, count in _THREADS.items():
                _start_threads(self._lanes[lane], count)
        except RuntimeError as error:
            self.stop()
            raise ConfigError(
                f"{error}: the broker needs {sum(_THREADS.values())}; raise the limit (ulimit -u, TasksMax "
                "of a systemd unit, the pids limit of a container)"
            ) from None

    def start(
        self, lane: Lane | Background, work: Callable[[], object], done: Callable[[Exception | None], None]
    ) -> None:
        """See `storage.durability.jobs.Workers`."""

        def finished(future: asyncio.Future[object]) -> None:
            error = future.exception()
            if error is not None and not isinstance(error, Exception):
                raise error
            done(error)

        self.run(lane, work).add_done_callback(finished)

    def run(self, lane: Lane | Background, work: Callable[[], T]) -> asyncio.Future[T]:
        """See Workers."""
        try:
            return self._loop.run_in_executor(self._lanes[lane], work)
        except Exception as error:  # for example no memory: the future of the work must still be resolved
            failed: asyncio.Future[T] = self._loop.create_future()
            failed.set_exception(error)
            return failed

    def stop(self) -> None:
        """See Workers."""
        for lane in self._lanes.values():
            lane.shutdown(wait=True)


def _start_threads(pool: ThreadPoolExecutor, count: int) -> None:
    """Make a pool start all its threads. Raises RuntimeError if the system does not give enough."""
    together = threading.Barrier(count)
    try:
        for _ in range(count):
            pool.submit(together.wait)  # none ends before all have begun, so each needs a thread of its own
    except BaseException:
        together.abort()
        raise
