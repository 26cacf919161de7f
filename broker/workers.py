"""The threads for work that waits for the disk, one set for the whole broker: a component names a lane for its work,
and is called back in the event loop."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from enum import Enum, auto
from functools import partial
from typing import Any, Final, Protocol, TypeVar

import structlog

from duemq.broker.errors import ConfigError
from duemq.storage.durability.jobs import Lane

log = structlog.get_logger(__name__)

T = TypeVar("T")


class Background(Enum):
    """The broker's own lanes, in addition to those of `storage.durability.jobs.Lane`."""

    PULLS = auto()
    """Reads of messages that consumers pull and that are not in memory."""
    READS = auto()
    """All other reads from the disk."""
    TABLES = auto()
    """Writes of the JSON tables."""
    ACCESS = auto()
    """Reads and writes of files that are not in the store: accounts, certificates. They may be on a mount that hangs.
    So nothing else waits for this lane, and a stop waits for it only a few seconds."""


_THREADS: Final[dict[Lane | Background, int]] = {
    Lane.FLUSH: 1,
    Lane.FILES: 1,
    Lane.ALLOCATE: 1,
    Background.PULLS: 2,
    Background.READS: 2,
    Background.TABLES: 1,
    Background.ACCESS: 1,
}
_LEAVE_SECONDS: Final = 5.0
"""How long a stop waits for work of the lane ACCESS."""


class Workers(Protocol):
    """Runs work that waits for the disk: `storage.durability.jobs.JobWorkers`, extended for coroutines."""

    def start(
        self, lane: Lane | Background, work: Callable[[], object], done: Callable[[Exception | None], None]
    ) -> None:
        """Run `work` in a lane, by a thread that may wait. `done` is called in the event loop, never before `start` has
        returned: with None, or with the exception if `work` failed or could not be run. Raises nothing."""

    def run(self, lane: Lane | Background, work: Callable[[], T]) -> asyncio.Future[T]:
        """Run `work` in a lane; the future holds its result, or the error that it raised or that kept it from
        running."""

    def stop(self) -> None:
        """Wait until all started work is done, but only a few seconds for the lane ACCESS. Nothing may be started
        afterwards."""


class ThreadWorkers:
    """Threads that run work which waits for the disk, in lanes, for callbacks and for coroutines. Belongs to an event
    loop.

    All threads are started by the constructor. Later the system may refuse to create one (the pids limit of a
    container, `ulimit -u`), and work that other components depend on must not fail because of that."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """Raises ConfigError if the system cannot create enough threads."""
        self._loop = loop
        self._lanes: dict[Lane | Background, ThreadPoolExecutor] = {
            lane: ThreadPoolExecutor(count, thread_name_prefix=lane.name.lower())
            for lane, count in _THREADS.items()
            if lane is not Background.ACCESS
        }
        self._access = _Abandonable(Background.ACCESS.name.lower())
        try:
            for lane, pool in self._lanes.items():
                _start_threads(pool, _THREADS[lane])
            self._access.start()
        except RuntimeError as error:
            self.stop()
            raise ConfigError(
                f"{error}: the broker needs {sum(_THREADS.values())} threads; raise the limit (ulimit -u, TasksMax "
                "of a systemd unit, the pids limit of a container)"
            ) from None

    def start(
        self, lane: Lane | Background, work: Callable[[], object], done: Callable[[Exception | None], None]
    ) -> None:
        """Run `work` in a lane, by a thread that may wait. `done` is called in the event loop, never before `start` has
        returned: with None, or with the exception if `work` failed or could not be run. Raises nothing."""

        def finished(future: asyncio.Future[object]) -> None:
            error = future.exception()
            if error is not None and not isinstance(error, Exception):
                raise error
            done(error)

        self.run(lane, work).add_done_callback(finished)

    def run(self, lane: Lane | Background, work: Callable[[], T]) -> asyncio.Future[T]:
        """Run `work` in a lane; the future holds its result, or the error that it raised or that kept it from
        running."""
        try:
            if lane is Background.ACCESS:
                return asyncio.wrap_future(self._access.submit(work), loop=self._loop)
            return self._loop.run_in_executor(self._lanes[lane], work)
        except Exception as error:  # for example no memory: the future of the work must still be resolved
            failed: asyncio.Future[T] = self._loop.create_future()
            failed.set_exception(error)
            return failed

    def stop(self) -> None:
        """Wait until all started work is done, but only 5 s for the lane ACCESS. Nothing may be started
        afterwards."""
        for lane in self._lanes.values():
            lane.shutdown(wait=True)
        if not self._access.stop(_LEAVE_SECONDS):
            log.warning("work_abandoned", reason="files of accounts or certificates cannot be read: a mount may hang")


class _Abandonable:
    """A thread that runs work in the order of submission. Unlike the threads of a ThreadPoolExecutor, it does not keep
    the process from ending."""

    def __init__(self, name: str) -> None:
        self._work: queue.SimpleQueue[tuple[Future[Any], Callable[[], object]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread. Raises RuntimeError if the system cannot create it."""
        self._thread.start()

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Queue work. It is not done if its future is cancelled before it begins, or if the process ends first."""
        future: Future[T] = Future()
        self._work.put((future, work))
        return future

    def stop(self, timeout: float) -> bool:
        """Wait until all work is done, up to `timeout` s; return whether it is."""
        self._work.put(None)
        if self._thread.ident is not None:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (next_one := self._work.get()) is not None:
            future, work = next_one
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = work()
            except BaseException as error:  # it belongs to the caller that awaits the work
                set_outcome = partial(future.set_exception, error)
            else:
                set_outcome = partial(future.set_result, result)
            set_outcome()
            del next_one, future, work, set_outcome


def _start_threads(pool: ThreadPoolExecutor, count: int) -> None:
    """Make a pool start all its threads. Raises RuntimeError if the system cannot create enough."""
    together = threading.Barrier(count)
    try:
        for _ in range(count):
            pool.submit(together.wait)  # none ends before all have begun, so each needs a thread of its own
    except BaseException:
        together.abort()
        raise
