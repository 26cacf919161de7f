"""Pulls that wait for messages. The append itself wakes them, once for all messages that one turn of the event loop
brought; nothing polls.

A held pull costs about a kilobyte. How many there may be is bounded: beyond that a pull is answered at once. A client
that does not read its responses gets no messages pushed into its buffer; its pulls stay held until their time is up.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final, TypeVar

from broker.connection import Connection
from protocol.headers import PullMessage, Request
from storage.consume_queue import ConsumeQueue

SLICE_SECONDS: Final = 0.002
MAX_HOLD_SECONDS: Final = 60.0


class HeldPull:
    """A pull that waits. `offset` is where to look next: messages before it were looked at and not wanted."""

    __slots__ = ("codes", "connection", "deadline", "offset", "queue", "request")

    def __init__(
        self,
        connection: Connection,
        request: Request[PullMessage],
        queue: ConsumeQueue,
        offset: int,
        codes: frozenset[int] | None,
        deadline: float,
    ) -> None:
        self.connection = connection
        self.request = request
        self.queue = queue
        self.offset = offset
        self.codes = codes
        self.deadline = deadline

    @property
    def second(self) -> int:
        """The second at whose end it is answered at the latest."""
        return int(self.deadline) + 1


class LongPolls:
    """All held pulls. `serve` answers a pull if there are messages for it, and says whether it did; `expire` answers
    that there are none; `fail` answers where one of them raised."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        capacity: int,
        serve: Callable[[HeldPull], bool],
        expire: Callable[[HeldPull], None],
        fail: Callable[[HeldPull, Exception], None],
    ) -> None:
        self._loop = loop
        self.capacity = capacity
        """How many may wait; whoever waits already stays."""
        self._serve = serve
        self._expire = expire
        self._fail = fail
        self._held: dict[ConsumeQueue, dict[HeldPull, None]] = {}
        self._by_second: dict[int, dict[HeldPull, None]] = {}
        self._by_connection: dict[Connection, dict[HeldPull, None]] = {}
        self._woken: dict[ConsumeQueue, None] = {}
        self._to_serve: deque[HeldPull] = deque()
        """The rest of the pulls of a queue that got messages, for the next slice."""
        self._is_serving = False
        self._timer: asyncio.TimerHandle | None = None
        self.count = 0
        """Pulls that wait."""

    def hold(self, pull: HeldPull) -> bool:
        """Let a pull wait for its queue; False where too many wait already."""
        if self.count >= self.capacity:
            return False
        self.count += 1
        held = self._held.get(pull.queue)
        if held is None:
            self._held[pull.queue] = {pull: None}
            pull.queue.watch(self._arrived)
        else:
            held[pull] = None
        self._by_second.setdefault(pull.second, {})[pull] = None
        self._by_connection.setdefault(pull.connection, {})[pull] = None
        if self._timer is None:
            self._timer = self._loop.call_later(1.0, self._tick)
        return True

    def connection_lost(self, connection: Connection) -> None:
        """Whoever waited over a connection is gone."""
        for pull in list(self._by_connection.get(connection, ())):
            self._forget(pull)

    def stop(self) -> None:
        """Answer everybody."""
        if self._timer is not None:
            self._timer.cancel()
        for pulls in list(self._held.values()):
            for pull in list(pulls):
                self._end(pull)

    # ---

    def _arrived(self, queue: ConsumeQueue) -> None:
        self._woken[queue] = None
        if not self._is_serving:
            self._is_serving = True
            self._loop.call_soon(self._serve_woken)

    def _serve_woken(self) -> None:
        """Answer the pulls of the queues that got messages; what takes longer than a slice goes on in the next turn
        of the loop."""
        self._is_serving = False
        end = self._loop.time() + SLICE_SECONDS
        while self._to_serve or self._woken:
            if not self._to_serve:
                queue = next(iter(self._woken))
                del self._woken[queue]
                self._to_serve.extend(self._held.get(queue, ()))
            while self._to_serve:
                if self._loop.time() > end:
                    self._is_serving = True
                    self._loop.call_soon(self._serve_woken)
                    return
                self._serve_one(self._to_serve.popleft())

    def _serve_one(self, pull: HeldPull) -> None:
        if pull not in self._held.get(pull.queue, ()):
            return
        try:
            is_served = self._serve(pull)
        except Exception as error:  # the others go on
            self._fail(pull, error)
            is_served = True
        if is_served:
            self._forget(pull)

    def _forget(self, pull: HeldPull) -> None:
        self.count -= 1
        _take_out(self._by_second, pull.second, pull)
        _take_out(self._by_connection, pull.connection, pull)
        if _take_out(self._held, pull.queue, pull):
            pull.queue.unwatch(self._arrived)

    def _tick(self) -> None:
        """Once a second, as long as somebody waits: answer those whose time is up."""
        now = self._loop.time()
        for second in [second for second in self._by_second if second <= now]:
            for pull in list(self._by_second[second]):
                self._end(pull)
        self._timer = self._loop.call_later(1.0, self._tick) if self._by_second else None

    def _end(self, pull: HeldPull) -> None:
        self._forget(pull)
        try:
            self._expire(pull)
        except Exception as error:
            self._fail(pull, error)


K = TypeVar("K")


def _take_out(table: dict[K, dict[HeldPull, None]], key: K, pull: HeldPull) -> bool:
    """Take a pull out of its group in a table; whether that was the last of its group."""
    pulls = table[key]
    del pulls[pull]
    if pulls:
        return False
    del table[key]
    return True
