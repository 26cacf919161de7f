"""Answers that are held until what they speak of is released, that is: until the disk has it (`Durability.released`).

With SYNC_FLUSH the answers to sends wait here; all that one flush releases go out together, one write a connection
(group commit). With ASYNC_FLUSH nothing waits.

What waits is bounded: beyond `capacity` messages the send handler refuses (`is_full`). A wait that takes longer than
syncFlushTimeout is answered FLUSH_DISK_TIMEOUT, as RocketMQ does: the message is stored, its durability unknown.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from duemq.broker.net.connection import Connection


class _Held(NamedTuple):
    position: int
    deadline: float
    connection: Connection
    frames: list[bytes]
    messages: int
    on_timeout: Callable[[], list[bytes]]


class HeldAnswers:
    """All answers that wait. Belongs to the event loop."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, timeout: float, capacity: int, want: Callable[[int], None]
    ) -> None:
        """`timeout` in seconds, `capacity` in messages. `want` is called with the position that
        has to be released, when an answer begins to wait."""
        self._loop = loop
        self._timeout = timeout
        self._capacity = capacity
        self._want = want
        self._held: deque[_Held] = deque()
        self._messages = 0
        self._timer: asyncio.TimerHandle | None = None
        self._is_over = False
        self.is_full = False
        """Whether as many messages wait for the disk as may."""

    def reconfigure(self, capacity: int) -> None:
        """Let another number of messages wait."""
        self._capacity = capacity
        self._count(0)

    @property
    def waiting(self) -> int:
        """Messages that wait for the disk."""
        return self._messages

    @property
    def head_wait_ms(self) -> int:
        """How long the first of them has waited."""
        if not self._held:
            return 0
        return max(0, int((self._loop.time() - self._held[0].deadline + self._timeout) * 1000))

    def hold(
        self,
        position: int,
        connection: Connection,
        frames: list[bytes],
        messages: int,
        on_timeout: Callable[[], list[bytes]],
    ) -> None:
        """Send frames to a client when everything before a physical offset is durable; what `on_timeout` gives if that
        takes too long, or will never be."""
        if self._is_over:
            connection.write_many(on_timeout())
            return
        deadline = self._loop.time() + self._timeout
        self._held.append(_Held(position, deadline, connection, frames, messages, on_timeout))
        self._count(messages)
        if self._timer is None:
            self._timer = self._loop.call_at(deadline, self._time_out)
        self._want(position)

    def released(self, position: int) -> None:
        """Everything before a physical offset is durable: answer those whose messages lie before it."""
        by_connection: dict[Connection, list[bytes]] = {}
        held = self._held
        while held and held[0].position <= position:
            entry = held.popleft()
            self._count(-entry.messages)
            frames = by_connection.get(entry.connection)
            if frames is None:
                by_connection[entry.connection] = entry.frames
            else:
                frames += entry.frames
        for connection, frames in by_connection.items():
            connection.write_many(frames)

    def give_up(self) -> None:
        """Nothing is released any more: answer all that wait, and all that are to come, as late ones."""
        self._is_over = True
        held, self._held = self._held, deque()
        self._count(-self._messages)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for entry in held:
            entry.connection.write_many(entry.on_timeout())

    # ---

    def _time_out(self) -> None:
        """Answer those who have waited too long; the timer is set again for the next."""
        self._timer = None
        now = self._loop.time()
        held = self._held
        while held and held[0].deadline <= now:
            entry = held.popleft()
            self._count(-entry.messages)
            entry.connection.write_many(entry.on_timeout())
        if held:
            self._timer = self._loop.call_at(held[0].deadline, self._time_out)

    def _count(self, messages: int) -> None:
        self._messages += messages
        self.is_full = self._messages >= self._capacity
