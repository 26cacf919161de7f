"""The bounded buffer between the readers of the queues and the handlers: messages that are read and not finished.

When it is full, readers stop pulling until a message is finished. A reader puts in everything that a pull returned, so
the bounds may be exceeded by one pull of each queue: at most 32 messages, 256 KiB with RocketMQ's defaults.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from duemq.messages import ReceivedMessage


class Inbox:
    """Messages to be handled, bounded by their number and by the bytes of their records."""

    def __init__(self, max_messages: int, max_bytes: int) -> None:
        self._max_messages = max_messages
        self._max_bytes = max_bytes
        self._waiting: asyncio.Queue[ReceivedMessage | None] = asyncio.Queue()
        self._room = asyncio.Event()
        self._room.set()
        self._closed = False
        self.messages = 0
        """Put in and not released yet."""
        self.bytes = 0
        """Of their records."""

    async def wait_for_room(self) -> None:
        """Wait until there is room for another pull."""
        await self._room.wait()

    def put(self, messages: Iterable[ReceivedMessage]) -> None:
        """Messages that were just read."""
        if self._closed:
            return
        for message in messages:
            self.messages += 1
            self.bytes += message.stored_size
            self._waiting.put_nowait(message)
        self._update_room()

    def put_again(self, message: ReceivedMessage) -> None:
        """A message that was handled without success and is not released yet."""
        if not self._closed:
            self._waiting.put_nowait(message)

    async def get(self) -> ReceivedMessage | None:
        """The next message that is still this member's; None when closed."""
        while True:
            message = await self._waiting.get()
            if message is None:
                self._waiting.put_nowait(None)  # wake the next waiter
                return None
            if not message.lost:
                return message
            self.release(message)

    def get_more(self, most: int) -> list[ReceivedMessage]:
        """Up to so many messages that are there now and are still this member's."""
        found: list[ReceivedMessage] = []
        while len(found) < most and not self._waiting.empty():
            message = self._waiting.get_nowait()
            if message is None:
                self._waiting.put_nowait(None)
                break
            if message.lost:
                self.release(message)
            else:
                found.append(message)
        return found

    def release(self, message: ReceivedMessage) -> None:
        """A message is finished, one way or another."""
        self.messages -= 1
        self.bytes -= message.stored_size
        self._update_room()

    def close(self) -> None:
        """Drop what nobody has got yet, and tell those who wait that there will be nothing more."""
        self._closed = True
        while not self._waiting.empty():
            self._waiting.get_nowait()
        self._waiting.put_nowait(None)

    def _update_room(self) -> None:
        if self.messages < self._max_messages and self.bytes < self._max_bytes:
            self._room.set()
        else:
            self._room.clear()
