"""Requests that are under way: begun, and answered later, because they wait for the disk or for somebody else.

How much memory they may hold is bounded, of one connection and of all. Beyond that nobody is refused: the connection's
next request waits where it is, in what was read of the socket, and the socket is not read on.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final, Protocol

from duemq.broker.errors import NotNow

OWN_BYTES: Final = 16 * 1024
"""What a request counts as, besides its body and its answer: a task, a stack, its header."""
CONNECTION_BYTES: Final = 4 * 1024 * 1024
"""So much may be under way of one connection."""
_ADMITTED_A_TURN: Final = 8


class Guest(Protocol):
    """A connection, as far as its requests are admitted."""

    under_way: int
    """Bytes of its requests that are."""

    def hold_back(self) -> None:
        """Hand over no more requests."""

    def go_on(self) -> None:
        """Hand over requests again."""


class Admission:
    """Counts what is under way. Belongs to the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, limit: int) -> None:
        self._loop = loop
        self.limit = limit
        self.used = 0
        self._full: set[Guest] = set()
        """Who waits for requests of its own to end..."""
        self._waiting: deque[Guest] = deque()
        """...and who for any."""
        self._is_scheduled = False

    def begin(self, guest: Guest, size: int, *, at_once: bool = False) -> None:
        """A request begins that holds so many bytes. Raises NotNow, unless `at_once`."""
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
        """The request has ended."""
        guest.under_way -= size
        self.used -= size
        if guest in self._full and guest.under_way < CONNECTION_BYTES:
            self._full.discard(guest)
            self._waiting.append(guest)
        self._schedule()

    def lost(self, guest: Guest) -> None:
        """A connection is gone, and hands nothing over any more; what is under way of it ends as ever."""
        self._full.discard(guest)

    def _schedule(self) -> None:
        if self._waiting and self.used < self.limit and not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._admit)

    def _admit(self) -> None:
        """Let some of those who wait go on. They need not use the room; therefore again, as long as there is some."""
        self._is_scheduled = False
        if self.used < self.limit:
            for _ in range(min(_ADMITTED_A_TURN, len(self._waiting))):
                self._waiting.popleft().go_on()
            self._schedule()
