"""What all connections together hold of responses that their clients do not read.

Only connections that are stalled count: those whose write buffer is above its high mark. Beyond the limit whoever holds
most pays: a stalled connection is closed, so that all others go on. A client that takes its responses slowly is not
closed before those that take nothing, and one that was just given much has some seconds to take it.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Final, Protocol

OUTPUT_BYTES: Final = 512 * 1024 * 1024
PATIENCE_SECONDS: Final = 2.0
"""Who has taken nothing for so long goes before those who hold more, but have not had the time."""
_LOOKS: Final = 32
"""So many connections are looked at to find one to close."""


class Holder(Protocol):
    """A connection, as far as it holds responses."""

    @property
    def buffered(self) -> int:
        """Bytes of responses that the client has not taken yet."""

    @property
    def queued(self) -> int:
        """Bytes that the kernel holds for the client: another number tells that the client has taken some, long before
        there is room for more of `buffered`. -1 where nobody can tell."""

    def drop(self, reason: str) -> None:
        """Close at once, with one log line."""


class _Account:
    """What is known of one stalled connection."""

    __slots__ = ("buffered", "given", "held", "largest", "queued", "since")

    def __init__(self, since: float, queued: int) -> None:
        self.queued = queued
        """Bytes that the kernel held, when last looked at."""
        self.since = since
        """When its client last took something, or else when it was stalled; in seconds of the loop's clock."""
        self.buffered = 0
        """Bytes not taken, when last looked at."""
        self.given = 0
        """Bytes that it was given since it was stalled..."""
        self.largest = 0
        """...and the most of them at once."""
        self.held = 0
        """Bytes that it counts for: what was given at once is held as a whole until all of it is taken."""

    @property
    def size(self) -> int:
        """The class of its size: what it holds is less than 2 to the power of that."""
        return self.held.bit_length()


class OutputBudget:
    """Counts the bytes, and closes who has to pay. Belongs to the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, limit: int = OUTPUT_BYTES) -> None:
        self._loop = loop
        self.limit = limit
        self.used = 0
        self._accounts: dict[Holder, _Account] = {}
        self._by_size: list[OrderedDict[Holder, None]] = []
        """Who holds how much, by the class of its size; in each, those first that have been in it longest."""

    def hold(self, holder: Holder, given: int) -> None:
        """A stalled connection was given so many bytes more, or, without any, has just become stalled. Closes
        connections, maybe this one, as long as all hold too much."""
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
                f"{account.held} bytes of responses that it has not read for {seconds:.0f} s, and all clients together "
                f"leave more than maxUnreadResponseBytes={self.limit} unread"
            )

    def release(self, holder: Holder) -> None:
        """A connection is not stalled any more, or gone."""
        account = self._accounts.pop(holder, None)
        if account is not None:
            self.used -= account.held
            del self._by_size[account.size][holder]

    def _note(self, holder: Holder, account: _Account, buffered: int) -> None:
        """Note how much a connection has not taken."""
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
        """Who is to be closed; None where it turns out that clients have read enough meanwhile."""
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
                elif now - account.since < PATIENCE_SECONDS and looks < _LOOKS:
                    most = most or holder
                    break  # those behind it had no more time
                else:
                    return holder
                if looks >= _LOOKS:
                    return holder
        return most
