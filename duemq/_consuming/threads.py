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
    """A consumer's handler that calls `function` with each message, as `wrap` shows it, in one of `most` threads.

    A thread cannot be ended: when the time of a call is over, its message is tried again, but the thread is busy until
    the function returns. Each task of the consumer therefore waits, by `ready`, until the function that it called last
    has returned. So there is always a thread for the next call, and no call waits for one while its time runs.
    """

    def __init__(
        self, group: str, function: Callable[[T], object], wrap: Callable[[ReceivedMessage], T], most: int
    ) -> None:
        self._function = function
        self._wrap = wrap
        self._pool = ThreadPoolExecutor(most, f"duemq {group}")
        self._calls: dict[asyncio.Task[object], Future[None]] = {}
        """The call that each task made last."""
        self._local = threading.local()

    async def __call__(self, message: ReceivedMessage) -> None:
        """Call the function, and wait until it returns. Raises what it raises."""
        task = asyncio.current_task()
        assert task is not None
        # With the context variables of interceptors, as `asyncio.to_thread` does it.
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
            log.warning("a handler failed after its time was over", exc_info=error)

    @property
    def caller(self) -> asyncio.Task[object] | None:
        """The task for which the present thread calls the function now, if it does."""
        task: asyncio.Task[object] | None = getattr(self._local, "task", None)
        return task

    def close(self) -> None:
        """Call the function no more. Waits for no thread."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _call(self, task: asyncio.Task[object], message: T) -> None:
        self._local.task = task
        try:
            returning(self._function, message)
        finally:
            self._local.task = None


def returning(function: Callable[[T], object], argument: T) -> None:
    """Call a function in a thread. Raises what it raises, as an exception that an event loop can pass on."""
    try:
        function(argument)
    except (StopIteration, GeneratorExit) as error:
        # They have another meaning in the coroutine that waits for the thread.
        raise RuntimeError(f"{function!r} raised {error!r}") from error
