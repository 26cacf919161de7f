"""Requests that are under way: begun but not answered yet, because they wait for the disk or for another client.

The memory that they may hold is bounded, for one connection and for all together. Beyond that, requests are not refused
but wait: the connection's next request stays in the bytes already read, and its socket is not read further.

Keeps invariant 11 of ARCHITECTURE.md.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final, Protocol

from duemq.broker.errors import NotNow

OWN_BYTES: Final = 16 * 1024
"""The bytes that a request counts for in addition to its body and its answer: a task, a stack, its header."""
CONNECTION_BYTES: Final = 4 * 1024 * 1024
"""Bytes of requests that may be under way on one connection."""
_ADMITTED_A_TURN: Final = 8


class Guest(Protocol):
    """A connection, as a source of requests to admit."""

    under_way: int
    """Bytes of the connection's requests that are under way."""

    def hold_back(self) -> None:
        """Hand over no more requests."""

    def go_on(self) -> None:
        """Hand over requests again."""


class Admission:
    """Counts the bytes under way. Belongs to the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, limit: int) -> None:
        self._loop = loop
        self.limit = limit
        self.used = 0
        self._full: set[Guest] = set()
        """Connections that wait until requests of their own end."""
        self._waiting: deque[Guest] = deque()
        """Connections that wait until any requests end."""
        self._is_scheduled = False

    def begin(self, guest: Guest, size: int, *, at_once: bool = False) -> None:
        """Begin a request that holds `size` bytes. Raises NotNow if there is no room, unless `at_once`."""
        if not at_once:
            if guest.under_way >= CONNECTION_BYTES:
                self._full.add(guest)
                guest.hold_back()
                raise NotNow
            if self.used >= self.limit:
                self._waiting.append(guest)
                guest.hold_back()
                raise NotNow
        guest.under_way += size
        self.used += size

    def end(self, guest: Guest, size: int) -> None:
        """End a request that `begin` admitted."""
        guest.under_way -= size
        self.used -= size
        if guest in self._full and guest.under_way < CONNECTION_BYTES:
            self._full.discard(guest)
            self._waiting.append(guest)
        self._schedule()

    def lost(self, guest: Guest) -> None:
        """Forget a lost connection. It hands over no more requests; those under way still end with `end`."""
        self._full.discard(guest)

    def _schedule(self) -> None:
        if self._waiting and self.used < self.limit and not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._admit)

    def _admit(self) -> None:
        """Let some waiting connections continue. They may leave room unused, so this repeats while there is room."""
        self._is_scheduled = False
        if self.used < self.limit:
            for _ in range(min(_ADMITTED_A_TURN, len(self._waiting))):
                self._waiting.popleft().go_on()
            self._schedule()
