"""Handlers and listeners that are ordinary functions: they are called in threads, for `duemq.sync`."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

from duemq.messages import ReceivedMessage

T = TypeVar("T")

log = logging.getLogger("duemq.consumer")


class ThreadedHandler(Generic[T]):
    """A consumer's handler that calls `function` with each message, after `wrap`, in one of `most` threads.

    A thread cannot be ended. If a call exceeds its time limit, its message is retried, but the thread is busy until the
    function returns. Therefore each task of the consumer waits in `ready` until the function that it called last has
    returned. So there is always a free thread for the next call, and no call's time runs while it waits for one.
    """

    def __init__(
        self, group: str, function: Callable[[T], object], wrap: Callable[[ReceivedMessage], T], most: int
    ) -> None:
        self._function = function
        self._wrap = wrap
        self._pool = ThreadPoolExecutor(most, f"duemq {group}")
        self._calls: dict[asyncio.Task[object], Future[None]] = {}
        """The last call of each task."""
        self._local = threading.local()

    async def __call__(self, message: ReceivedMessage) -> None:
        """Call the function, and wait until it returns. Raises what the function raises."""
        task = asyncio.current_task()
        assert task is not None
        # As `asyncio.to_thread` does: the function sees the context variables that interceptors have set.
        run = contextvars.copy_context().run
        call = self._calls[task] = self._pool.submit(run, self._call, task, self._wrap(message))
        await asyncio.wrap_future(call)

    async def ready(self) -> None:
        """Wait until the function that the current task called last has returned."""
        task = asyncio.current_task()
        call = self._calls.get(task) if task is not None else None
        if call is None or call.done():
            return
        returned = asyncio.wrap_future(call)
        await asyncio.wait((returned,))
        if not returned.cancelled() and (error := returned.exception()) is not None:
            log.warning("a handler failed after its time limit", exc_info=error)

    @property
    def caller(self) -> asyncio.Task[object] | None:
        """The task for which the current thread calls the function now; None if it calls no function."""
        task: asyncio.Task[object] | None = getattr(self._local, "task", None)
        return task

    def close(self) -> None:
        """Make no further calls. Does not wait for the threads."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _call(self, task: asyncio.Task[object], message: T) -> None:
        self._local.task = task
        try:
            returning(self._function, message)
        finally:
            self._local.task = None


def returning(function: Callable[[T], object], argument: T) -> None:
    """Call a function in a thread. Raises what the function raises, except that StopIteration and GeneratorExit become
    RuntimeError."""
    try:
        function(argument)
    except (StopIteration, GeneratorExit) as error:
        # These two would have another meaning in the coroutine that waits for the thread.
        raise RuntimeError(f"{function!r} raised {error!r}") from error
