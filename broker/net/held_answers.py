"""Answers that are held until their records are released, that is, are on the disk (`Durability.released`).

With SYNC_FLUSH the answers to sends wait here; all answers that one flush releases are sent together, one write per
connection (group commit). With ASYNC_FLUSH nothing waits.

The number of waiting messages is bounded: beyond `capacity` messages the send handler refuses (`is_full`). A wait
longer than syncFlushTimeout is answered FLUSH_DISK_TIMEOUT, as in RocketMQ: the message is stored, but its durability
is unknown.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from duemq.broker.net.connection import Connection


class _HeldAnswer(NamedTuple):
    position: int
    deadline: float
    connection: Connection
    frames: list[bytes]
    messages: int
    on_timeout: Callable[[], list[bytes]]


class HeldAnswers:
    """All held answers. Belongs to the event loop."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        timeout: float,
        capacity: Callable[[], int],
        want: Callable[[int], None],
    ) -> None:
        """`timeout` in seconds. `capacity` returns the number of messages that may wait; it may change. `want` is
        called, when an answer begins to wait, with the position that has to be released."""
        self._loop = loop
        self._timeout = timeout
        self._capacity = capacity
        self._want = want
        self._held: deque[_HeldAnswer] = deque()
        self._messages = 0
        self._timer: asyncio.TimerHandle | None = None
        self._is_over = False
        self.is_full = False
        """Whether the number of messages that wait for the disk has reached the capacity."""

    @property
    def waiting(self) -> int:
        """The number of messages that wait for the disk."""
        return self._messages

    @property
    def head_wait_ms(self) -> int:
        """How long the first held answer has waited, in ms."""
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
        """Send frames to a client once everything before a physical offset is durable; send the result of `on_timeout`
        instead if that takes too long, or will never happen."""
        if self._is_over:
            connection.write_many(on_timeout())
            return
        deadline = self._loop.time() + self._timeout
        self._held.append(_HeldAnswer(position, deadline, connection, frames, messages, on_timeout))
        self._count(messages)
        if self._timer is None:
            self._timer = self._loop.call_at(deadline, self._time_out)
        self._want(position)

    def released(self, position: int) -> None:
        """Send the answers whose messages lie before a physical offset, since everything before it is durable."""
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
        """Send all held and all future answers as if they had timed out, since nothing more will be released."""
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
        """Answer the requests that have waited too long; set the timer again for the next."""
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
        self.is_full = self._messages >= self._capacity()
