"""The threads in which what waits for the disk is run, one set for the whole broker: who has something to wait for
names a lane, and is called back in the event loop."""

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
    """Lanes of the broker's own, beside those of `storage.durability.jobs.Lane`."""

    PULLS = auto()
    """Messages that consumers want and that are not in memory."""
    READS = auto()
    """What else has to be read from the disk."""
    TABLES = auto()
    """The JSON tables are written."""


_THREADS: Final = {
    Lane.FLUSH: 1,
    Lane.FILES: 1,
    Lane.ALLOCATE: 1,
    Background.PULLS: 2,
    Background.READS: 2,
    Background.TABLES: 1,
}


class Workers(Protocol):
    """Runs what waits: `storage.durability.jobs.Workers`, and for coroutines."""

    def start(
        self, lane: Lane | Background, work: Callable[[], object], done: Callable[[Exception | None], None]
    ) -> None:
        """See `storage.durability.jobs.Workers`."""

    def run(self, lane: Lane | Background, work: Callable[[], T]) -> asyncio.Future[T]:
        """Run something in a lane; the future has what it gives, or why it could not be run."""

    def stop(self) -> None:
        """Wait until everything that was started is done; nothing may be started any more."""


class ThreadWorkers:
    """Implements `storage.durability.jobs.Workers`, and runs what coroutines wait for. Belongs to an event loop.

    All threads are started at once. The system may have none to give later (the pids limit of a container, `ulimit
    -u`), and work that somebody counts on must not fail for that."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """Raises ConfigError where the system does not give so many threads."""
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
        except Exception as error:  # memory ran out, say: whoever waits for the end of the work is told
            failed: asyncio.Future[T] = self._loop.create_future()
            failed.set_exception(error)
            return failed

    def stop(self) -> None:
        """See Workers."""
        for lane in self._lanes.values():
            lane.shutdown(wait=True)


def _start_threads(pool: ThreadPoolExecutor, count: int) -> None:
    """Have a pool start all its threads. Raises RuntimeError."""
    together = threading.Barrier(count)
    try:
        for _ in range(count):
            pool.submit(together.wait)  # none is done before all have begun, so each needs a thread of its own
    except BaseException:
        together.abort()
        raise
