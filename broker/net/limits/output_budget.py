"""Limit on the unread responses that all connections hold together.

Only stalled connections count: those whose write buffer is above its high-water mark. Beyond the limit, one of the
connections that hold most is closed so that all others can continue. Clients that read nothing are closed before
clients that read slowly, and a client that was just sent a large response has a few seconds to read it.

Keeps invariant 11 of ARCHITECTURE.md.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Final, Protocol

OUTPUT_BYTES: Final = 512 * 1024 * 1024
"""The default limit of the unread responses of all connections."""
PATIENCE_SECONDS: Final = 2.0
"""A client that has read nothing for this long is closed before clients that hold more but had less time."""
_MAX_LOOKED_AT: Final = 32
"""Maximum number of connections that are looked at to find one to close."""


class Holder(Protocol):
    """A connection, as a holder of responses."""

    @property
    def buffered(self) -> int:
        """Bytes of responses that the client has not taken yet."""

    @property
    def queued(self) -> int:
        """Bytes that the kernel holds for the client. A changed number shows that the client has read some, long before
        there is room for more of `buffered`. -1 if unknown."""

    def drop(self, reason: str) -> None:
        """Close immediately, with one log line."""


class _Account:
    """The account of one stalled connection."""

    __slots__ = ("buffered", "given", "held", "largest", "queued", "since")

    def __init__(self, since: float, queued: int) -> None:
        self.queued = queued
        """Bytes that the kernel held at the last look."""
        self.since = since
        """When the client last read something, or else when it stalled; in seconds of the loop's clock."""
        self.buffered = 0
        """Bytes not taken by the client at the last look."""
        self.given = 0
        """Bytes that were written to the connection since it stalled."""
        self.largest = 0
        """The most bytes that one write gave the connection since it stalled."""
        self.held = 0
        """Bytes that the connection counts for. The bytes of one write count as a whole until the client has taken all
        of them."""

    @property
    def size(self) -> int:
        """The size class n of the connection: it holds less than 2 to the power of n bytes."""
        return self.held.bit_length()


class OutputBudget:
    """Counts the bytes, and closes connections beyond the limit. Belongs to the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, limit: int = OUTPUT_BYTES) -> None:
        self._loop = loop
        self.limit = limit
        self.used = 0
        self._accounts: dict[Holder, _Account] = {}
        self._by_size: list[OrderedDict[Holder, None]] = []
        """The stalled connections by class of size; within a class, those that have been in it longest come first."""

    def hold(self, holder: Holder, given: int) -> None:
        """Note that `given` more bytes were written to a stalled connection, or, if `given` is 0, that it has just
        stalled. Close connections, possibly this one, as long as all together hold too much."""
        buffered, now = holder.buffered, self._loop.time()
        account = self._accounts.get(holder)
        if account is None:
            account = self._accounts[holder] = _Account(now, holder.queued)
            self._class_of(account.size)[holder] = None
        elif buffered < account.buffered + given:
            account.since = now
        account.given += given
        account.largest = max(account.largest, given)
        self._note(holder, account, buffered)
        while self.used > self.limit and (payer := self._payer()) is not None:
            account = self._accounts[payer]
            seconds = self._loop.time() - account.since
            self.release(payer)
            payer.drop(
                f"it has not read {account.held} bytes of responses for {seconds:.0f} s, and all clients together "
                f"leave more than maxUnreadResponseBytes={self.limit} unread"
            )

    def release(self, holder: Holder) -> None:
        """Stop counting a connection, since it is no longer stalled or is gone."""
        account = self._accounts.pop(holder, None)
        if account is not None:
            self.used -= account.held
            del self._by_size[account.size][holder]

    def _note(self, holder: Holder, account: _Account, buffered: int) -> None:
        """Note how much a connection's client has not taken."""
        before = account.size
        self.used -= account.held
        account.buffered = buffered
        account.held = max(buffered, min(buffered + account.largest, account.given))
        self.used += account.held
        if account.size != before:
            del self._by_size[before][holder]
            self._class_of(account.size)[holder] = None

    def _class_of(self, size: int) -> OrderedDict[Holder, None]:
        while len(self._by_size) <= size:
            self._by_size.append(OrderedDict())
        return self._by_size[size]

    def _payer(self) -> Holder | None:
        """Return the connection to close; None if clients have meanwhile read enough."""
        now = self._loop.time()
        most: Holder | None = None
        looks = 0
        for holders in reversed(self._by_size):
            while holders:
                holder = next(iter(holders))
                account = self._accounts[holder]
                buffered, queued = holder.buffered, holder.queued
                looks += 1
                if buffered < account.buffered or queued != account.queued:
                    account.since, account.queued = now, queued
                    holders.move_to_end(holder)
                    self._note(holder, account, buffered)
                    if self.used <= self.limit:
                        return None
                elif now - account.since < PATIENCE_SECONDS:
                    most = most or holder
                    break  # the connections behind it had no more time either
                else:
                    return holder
                if looks >= _MAX_LOOKED_AT:
                    return most or holder
        return most
