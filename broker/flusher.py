"""Flushing the commitlog: one thread waits for the disk, all who wait are answered together (group commit).

With SYNC_FLUSH the answers to sends are held here until a flush that began after their messages were written has
ended. One flush runs at a time; whoever comes meanwhile is served by the next. With ASYNC_FLUSH nobody waits and a
flush runs every flushIntervalCommitLog.

What waits is bounded: beyond `capacity` messages the send handler refuses (`is_full`). A wait that takes longer than
syncFlushTimeout is answered FLUSH_DISK_TIMEOUT, as RocketMQ does: the message is stored, its durability unknown.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import structlog

from broker.connection import Connection
from storage.flush import FlushJob
from storage.store import MessageStore

log = structlog.get_logger(__name__)


class _Waiting(NamedTuple):
    position: int
    deadline: float
    connection: Connection | None
    frames: list[bytes]
    messages: int
    on_timeout: Callable[[], list[bytes]]
    on_flushed: Callable[[], None] | None


class Flusher:
    """Runs flushes of one store. Belongs to the event loop."""

    def __init__(
        self, store: MessageStore, loop: asyncio.AbstractEventLoop, interval: float, timeout: float, capacity: int
    ) -> None:
        """`interval` and `timeout` in seconds, `capacity` in messages."""
        self._store = store
        self._loop = loop
        self._interval = interval
        self._timeout = timeout
        self._capacity = capacity
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="flush")
        self._waiting: deque[_Waiting] = deque()
        self._messages = 0
        self._running: asyncio.Future[None] | None = None
        self._is_kicked = False
        self._timer: asyncio.TimerHandle | None = None
        self._timeout_timer: asyncio.TimerHandle | None = None
        self._is_stopped = False
        self.is_full = False
        """Whether as many messages wait for the disk as may."""
        self.failure: Exception | None = None
        """Why flushing failed; nothing is flushed any more then."""

    def start(self) -> None:
        """Begin to flush at intervals."""
        self._timer = self._loop.call_later(self._interval, self._tick)

    def reconfigure(self, interval: float, capacity: int) -> None:
        """Flush at other intervals (seconds), let another number of messages wait."""
        self._capacity = capacity
        self._count(0)
        if interval != self._interval:
            self._interval = interval
            if self._timer is not None and not self._is_stopped:
                self._timer.cancel()
                self.start()

    @property
    def waiting(self) -> int:
        """Messages that wait for the disk."""
        return self._messages

    @property
    def head_wait_ms(self) -> int:
        """How long the first of them has waited."""
        first = next((entry for entry in self._waiting if entry.connection is not None), None)
        return max(0, int((self._loop.time() - first.deadline + self._timeout) * 1000)) if first is not None else 0

    def wait(
        self, connection: Connection, frames: list[bytes], messages: int, on_timeout: Callable[[], list[bytes]]
    ) -> None:
        """Send frames to a client when everything written so far is durable; what `on_timeout` gives if that takes
        too long."""
        self._add(_Waiting(self._store.log.end, self._deadline(), connection, frames, messages, on_timeout, None))

    def call_when_flushed(self, position: int, callback: Callable[[], None]) -> None:
        """Call back when everything before a physical offset is durable."""
        if self._store.log.flushed >= position:
            callback()
            return
        self._add(_Waiting(position, float("inf"), None, [], 0, list, callback))

    def flush_soon(self) -> None:
        """Flush without being waited for."""
        if self._running is None and not self._is_kicked and self.failure is None and not self._is_stopped:
            self._is_kicked = True
            self._loop.call_soon(self._flush)

    async def stop(self) -> None:
        """Serve those who wait, then flush no more."""
        self._is_stopped = True
        for timer in (self._timer, self._timeout_timer):
            if timer is not None:
                timer.cancel()
        while (self._is_kicked or self._running is not None) and self.failure is None:
            if self._running is not None:
                await asyncio.wait([self._running])
            await asyncio.sleep(0)
        self._thread.shutdown(wait=True)

    # ---

    def _deadline(self) -> float:
        return self._loop.time() + self._timeout

    def _add(self, waiting: _Waiting) -> None:
        self._waiting.append(waiting)
        self._count(waiting.messages)
        if self._timeout_timer is None and waiting.connection is not None:
            self._timeout_timer = self._loop.call_at(waiting.deadline, self._time_out)
        if self._running is None and not self._is_kicked and self.failure is None:
            # After the other sockets that are ready in this turn of the loop, so that their messages share the flush.
            self._is_kicked = True
            self._loop.call_soon(self._flush)

    def _tick(self) -> None:
        self._timer = self._loop.call_later(self._interval, self._tick)
        if self._running is None and self._store.log.flushed < self._store.log.end and self.failure is None:
            self._flush()

    def _flush(self) -> None:
        self._is_kicked = False
        if self._running is not None:
            return
        job = self._store.plan_flush()
        self._running = self._loop.run_in_executor(self._thread, job.run)
        self._running.add_done_callback(lambda future: self._flushed(job, future))

    def _flushed(self, job: FlushJob, future: asyncio.Future[None]) -> None:
        self._running = None
        error = future.exception()
        if error is not None:
            self._fail(error)
            return
        self._store.note_flushed(job)
        self._release(job.target)
        if self._waiting:
            self._flush()

    def _release(self, position: int) -> None:
        """Answer those whose messages lie before a position: one write a connection."""
        by_connection: dict[Connection, list[bytes]] = {}
        waiting = self._waiting
        while waiting and waiting[0].position <= position:
            entry = waiting.popleft()
            self._count(-entry.messages)
            if entry.connection is not None:
                frames = by_connection.get(entry.connection)
                if frames is None:
                    by_connection[entry.connection] = entry.frames
                else:
                    frames += entry.frames
            elif entry.on_flushed is not None:
                entry.on_flushed()
        for connection, frames in by_connection.items():
            connection.write_many(frames)

    def _time_out(self) -> None:
        """Answer those who have waited too long; the timer is set again for the next."""
        self._timeout_timer = None
        now = self._loop.time()
        waiting: deque[_Waiting] = deque()
        for entry in self._waiting:
            if entry.connection is not None and entry.deadline <= now:
                self._count(-entry.messages)
                entry.connection.write_many(entry.on_timeout())
            else:
                waiting.append(entry)
        self._waiting = waiting
        first = next((entry for entry in waiting if entry.connection is not None), None)
        if first is not None:
            self._timeout_timer = self._loop.call_at(first.deadline, self._time_out)

    def _fail(self, error: BaseException) -> None:
        """A failed flush leaves it unknown what the disk has: nothing is taken or confirmed any more."""
        log.error("flush_failed", reason=str(error))
        self.failure = error if isinstance(error, Exception) else OSError(str(error))
        self._store.flush_failed(OSError(str(error)))
        for entry in self._waiting:
            if entry.connection is not None:
                entry.connection.write_many(entry.on_timeout())
        self._waiting.clear()
        self._count(-self._messages)

    def _count(self, messages: int) -> None:
        self._messages += messages
        self.is_full = self._messages >= self._capacity
