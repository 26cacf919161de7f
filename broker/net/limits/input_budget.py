"""Limit on the unfinished frames that all connections hold together, and the order in which connections with large
frames read.

Beyond the limit, one of the connections that hold most is closed. While many connections send large frames at the same
time, each reads a little and then waits for its turn, so that a turn of the loop does not read gigabytes.

Keeps invariant 11 of ARCHITECTURE.md.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final, Protocol

READ_BYTES: Final = 256 * 1024
"""The maximum number of bytes of one read."""
SHORT_READ_BYTES: Final = 64 * 1024
"""The maximum number of bytes of one read while many connections send large frames."""
LARGE_FRAME_BYTES: Final = 64 * 1024
"""The size from which on a frame is large. Connections with smaller frames neither wait for those with large frames,
nor are closed because of their memory."""
READERS: Final = 8
"""How many connections may send large frames without waiting for each other. If there are more, this many of those that
wait continue to read in one turn."""
INPUT_BYTES: Final = 256 * 1024 * 1024
"""The default limit of the unfinished frames of all connections."""


class Reader(Protocol):
    """A connection, as a holder of unfinished frames."""

    def read_on(self) -> None:
        """Continue to read: this connection's turn has come."""

    def drop(self, reason: str) -> None:
        """Close immediately, with one log line."""


class InputBudget:
    """The bytes of unfinished frames that all connections together may hold, and the order in which connections that
    send large frames continue to read."""

    def __init__(self, loop: asyncio.AbstractEventLoop, limit: int = INPUT_BYTES) -> None:
        self._loop = loop
        self.limit = limit
        self.used = 0
        self._by_size: list[dict[Reader, None]] = [{}]
        """The connections with unfinished large frames, by the bytes they hold in steps of LARGE_FRAME_BYTES."""
        self._large = 0
        """The number of connections with unfinished large frames."""
        self._waiting: deque[Reader] = deque()
        self._is_scheduled = False
        self._buffer = memoryview(bytearray(READ_BYTES))
        self.short_buffer = self._buffer[:SHORT_READ_BYTES]
        """A shorter part of the same buffer. With TLS all reads are short, since the smallest records take a
        microsecond each to decrypt."""

    @property
    def is_crowded(self) -> bool:
        """Whether many connections send large frames, so that each reads only a little and then waits."""
        return self._large > READERS

    def buffer(self) -> memoryview:
        """The buffer of the next read, shared by all connections: its bytes are used before the next read begins."""
        return self.short_buffer if self._large > READERS else self._buffer

    def hold(self, connection: Reader, before: int, after: int) -> Reader | None:
        """Note that a connection now holds `after` bytes instead of `before`. If all connections together hold too
        much, return one of those that hold most, to be closed."""
        self.used += after - before
        if after <= before or self.used <= self.limit:
            return None
        for connections in reversed(self._by_size):
            if connections:
                return connections.popitem()[0]
        return connection

    def move(self, connection: Reader, before: int, after: int) -> None:
        """Note that a connection now holds `after` bytes of a large frame instead of `before`; -1: no large frame."""
        steps = self._by_size
        old, new = (size // LARGE_FRAME_BYTES for size in (before, after))
        if old == new:
            return
        if old >= 0:
            steps[old].pop(connection, None)
        if new >= 0:
            while len(steps) <= new:
                steps.append({})
            steps[new][connection] = None
        self._large += (new >= 0) - (old >= 0)

    def wait(self, connection: Reader) -> None:
        """Call `read_on` of a connection when its turn comes."""
        self._waiting.append(connection)
        self._schedule()

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._let_read)

    def _let_read(self) -> None:
        self._is_scheduled = False
        for _ in range(min(READERS, len(self._waiting))):
            self._waiting.popleft().read_on()
        if self._waiting:
            self._schedule()
