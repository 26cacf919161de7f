"""The tasks that call a consumer's handler: `concurrency` tasks, each of which takes one message at a time."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable
from types import CoroutineType

from duemq._consuming.inbox import Inbox
from duemq._net.client import Tasks
from duemq._values.failures import is_cancelled, is_passed_on
from duemq._values.intervals import Intervals
from duemq.messages import ReceivedMessage, acknowledge

Handler = Callable[[ReceivedMessage], Awaitable[object]]

log = logging.getLogger("duemq.consumer")


class _Worker:
    """A task, and the message that it is handling."""

    def __init__(self) -> None:
        self.task: asyncio.Task[None] | None = None
        self.message: ReceivedMessage | None = None
        self.since = 0.0
        """When the time limit of the handler began to run, in seconds of the loop's clock."""
        self.times_late = 0
        """How many times the task was cancelled because its handler exceeded the time limit."""
        self.is_waiting = False
        """Whether the task waits in `ready` before it takes a message, see `HandlerWorkers`."""


class HandlerWorkers:
    """Calls `on_message` with the messages of `inbox`, for up to `concurrency` messages at a time.

    A handler that has not returned after `timeout` seconds is cancelled, and its message is retried; None: no limit.
    One timer watches all handlers. `ready`, if given, is awaited by each task before it takes a message.
    """

    def __init__(
        self,
        group: str,
        on_message: Handler,
        inbox: Inbox,
        *,
        concurrency: int,
        timeout: float | None,
        intervals: Intervals,
        ready: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._ready = ready
        self._group = group
        self._on_message = on_message
        self._inbox = inbox
        self._timeout = timeout
        self._intervals = intervals
        self._workers = [_Worker() for _ in range(concurrency)]
        self._tasks = Tasks()
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin to take messages."""
        for worker in self._workers:
            worker.task = self._tasks.supervise(
                lambda worker=worker: self._work(worker),  # type: ignore[misc]
                f"duemq {self._group}",
                self._intervals,
            )
        if self._timeout is not None:
            self._watch()

    def has(self, task: asyncio.Task[object] | None) -> bool:
        """Whether a task is one of the tasks that call the handler."""
        return task is not None and any(worker.task is task for worker in self._workers)

    async def end(self, timeout: float, caller: asyncio.Task[object] | None) -> None:
        """Wait until the handlers have returned; the inbox is already closed. Handlers that do not return within
        `timeout` seconds are cancelled, and those that still do not end are abandoned. `caller`: a task whose handler
        waits for this call, which therefore must not wait for that task."""
        running = {
            worker.task
            for worker in self._workers
            if worker.task is not None and worker.task is not caller and not worker.task.done()
        }
        for worker in self._workers:
            if worker.is_waiting and worker.task in running:
                worker.task.cancel()
        late = await _wait(running, timeout)
        if late:
            log.warning(
                "%d handlers did not end within %g s; their messages will be delivered again", len(late), timeout
            )
            self.cancel(caller)
            late = await _wait(late, self._intervals.cancelled_handlers)
        if late:
            log.error("%d handlers did not end although they were cancelled; they are abandoned", len(late))
        if self._timer is not None:
            self._timer.cancel()

    def cancel(self, caller: asyncio.Task[object] | None) -> None:
        """Cancel the handlers, except that of `caller`, without waiting for them."""
        if self._timer is not None:
            self._timer.cancel()
        for worker in self._workers:
            if worker.task is not None and worker.task is not caller:
                worker.task.cancel()

    async def _work(self, worker: _Worker) -> None:
        loop = asyncio.get_running_loop()
        while True:
            if self._ready is not None:
                worker.is_waiting = True
                try:
                    await self._ready()
                finally:
                    worker.is_waiting = False
            message = await self._inbox.get()
            if message is None:
                return
            worker.message, worker.since = message, loop.time()
            try:
                succeeded = await self._succeeds(worker, message)
            finally:
                worker.message = None
            if succeeded:
                acknowledge(message)
            else:
                await message.retry()

    async def _succeeds(self, worker: _Worker, message: ReceivedMessage) -> bool:
        succeeded = False
        try:
            await call_handler(self._on_message, message)
        except asyncio.CancelledError:
            # `close` or `_watch` cancelled this worker, or something that the handler waited for was cancelled.
            was_late = _forget_cancelling(worker) > 0
            if is_cancelled():
                raise
            if not was_late:
                log.warning("the handler failed for %r: something that it waited for was cancelled", message)
        except BaseException as error:
            if is_passed_on(error):
                raise
            # Whatever the handler raises concerns only its message, which is retried.
            log.warning("the handler failed for %r", message, exc_info=True)
        else:
            succeeded = True
        _forget_cancelling(worker)
        return succeeded

    def _watch(self) -> None:
        """Cancel the handlers that exceed the time limit, and schedule the next check for when another one may."""
        assert self._timeout is not None
        loop = asyncio.get_running_loop()
        now = loop.time()
        first = now + self._timeout
        for worker in self._workers:
            if worker.message is None:
                continue
            if worker.since + self._timeout <= now:
                self._end_late(worker, worker.message)
                worker.since = now
            first = min(first, worker.since + self._timeout)
        self._timer = loop.call_at(first, self._watch)

    def _end_late(self, worker: _Worker, message: ReceivedMessage) -> None:
        if not worker.times_late:
            log.warning("the handler did not end within %g s for %r: cancelling it", self._timeout, message)
        worker.times_late += 1
        if worker.task is not None:
            worker.task.cancel()


def call_handler(on_message: Handler, message: ReceivedMessage) -> Awaitable[object]:
    """Call a handler; return its awaitable. Raises TypeError if the handler returned something else."""
    result = on_message(message)
    if type(result) is not CoroutineType and not inspect.isawaitable(result):
        raise TypeError(f"the handler {on_message!r} returned {result!r}, which is not awaitable")
    return result


async def _wait(tasks: set[asyncio.Task[None]], timeout: float) -> set[asyncio.Task[None]]:
    """Wait for tasks, for at most `timeout` seconds; return the tasks that have not ended."""
    return (await asyncio.wait(tasks, timeout=timeout))[1] if tasks else set()


def _forget_cancelling(worker: _Worker) -> int:
    """Undo the cancellations of the current task by `HandlerWorkers._watch`; return their number."""
    if not worker.times_late:
        return 0
    times, worker.times_late = worker.times_late, 0
    task = asyncio.current_task()
    for _ in range(times):
        if task is not None:
            task.uncancel()
    return times
