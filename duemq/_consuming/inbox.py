"""The bounded buffer between the readers of the queues and the handlers: messages that are read and unfinished.

When it is full, readers stop pulling until a message is finished. A reader puts in everything that a pull returned, so
the bounds may be exceeded by one pull for each queue: at most 32 messages, 256 KiB with RocketMQ's defaults.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence

from duemq.messages import MessageQueue, ReceivedMessage


class Inbox:
    """Messages to be handled, in no particular order, bounded by their number and by the bytes of their records.

    Messages of a paused queue are set aside and not counted: they must not take the room of other queues.
    """

    def __init__(self, max_messages: int, max_bytes: int) -> None:
        self.max_messages = max_messages
        self.max_bytes = max_bytes
        self._waiting: asyncio.Queue[ReceivedMessage | None] = asyncio.Queue()
        self._paused: dict[MessageQueue, deque[ReceivedMessage]] = {}
        """The messages that are set aside, by paused queue."""
        self._room = asyncio.Event()
        self._room.set()
        self._closed = False
        self.messages = 0
        """The number of messages that were put in and are not released yet, without those of paused queues."""
        self.bytes = 0
        """The size of the records of these messages."""

    @property
    def is_closed(self) -> bool:
        """Whether messages are no longer handed out."""
        return self._closed

    async def wait_for_room(self, queue: MessageQueue) -> None:
        """Wait until there is room for another pull of a queue."""
        await self._room.wait()

    def put(self, messages: Sequence[ReceivedMessage]) -> None:
        """Put in messages of one queue that were just read."""
        if self._closed or not messages:
            return
        aside = self._paused.get(messages[0].queue)
        if aside is not None:
            aside.extend(messages)
            return
        self._count(messages, 1)
        for message in messages:
            self._waiting.put_nowait(message)

    def put_again(self, message: ReceivedMessage, again: ReceivedMessage, seconds: float) -> None:
        """Hand out a message that was handed out and is not released once more, as `again`, after `seconds`."""
        if not self._closed:
            asyncio.get_running_loop().call_later(seconds, self._put_again, again)

    def _put_again(self, message: ReceivedMessage) -> None:
        if self._closed:
            return
        if message.lost:
            self.release(message)
        elif message.queue in self._paused:
            self._count((message,), -1)
            self._paused[message.queue].append(message)
        else:
            self._waiting.put_nowait(message)

    async def get(self) -> ReceivedMessage | None:
        """Wait for the next message that is still this member's; return None once the inbox is closed."""
        waiting = self._waiting
        while True:
            # Most messages have already arrived; for these, the cost of another coroutine is saved.
            message = await waiting.get() if waiting.empty() else waiting.get_nowait()
            if message is None:
                self._waiting.put_nowait(None)  # wake the next waiter
                return None
            if not message.lost:
                return message
            self.release(message)

    def get_more(self, most: int) -> list[ReceivedMessage]:
        """Return up to `most` messages that have arrived and are still this member's. Does not wait."""
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
        """Count a message as finished, whatever its result: its room is free."""
        self.messages -= 1
        self.bytes -= message.stored_size
        if not self._room.is_set() and self.messages < self.max_messages and self.bytes < self.max_bytes:
            self._room.set()

    def pause(self, queue: MessageQueue) -> None:
        """Hand out nothing more of a queue until `resume`."""
        if self._closed or queue in self._paused:
            return
        self._paused[queue] = self._take_out(queue)

    def resume(self, queue: MessageQueue) -> None:
        """Hand out the messages of a queue again. Does nothing if the queue is not paused."""
        aside = self._paused.pop(queue, None)
        if aside:
            self.put(aside)

    def set_aside(self, queue: MessageQueue) -> int:
        """Return the number of messages that are set aside for a paused queue."""
        return len(self._paused.get(queue, ()))

    def discard(self, queue: MessageQueue) -> None:
        """Drop the messages of a queue that are not handed out yet: they are no longer this member's. The queue is no
        longer paused."""
        if self._paused.pop(queue, None) is None and not self._closed:
            self._take_out(queue)

    def close(self) -> None:
        """Drop the messages that are not handed out yet, and wake all waiting calls of `get`, which return None."""
        self._closed = True
        self._paused.clear()
        while not self._waiting.empty():
            self._waiting.get_nowait()
        self._waiting.put_nowait(None)

    def _take_out(self, queue: MessageQueue) -> deque[ReceivedMessage]:
        """Remove and return the messages of a queue that are not handed out yet, and no longer count them."""
        found, others = deque[ReceivedMessage](), list[ReceivedMessage]()
        while not self._waiting.empty():
            message = self._waiting.get_nowait()
            assert message is not None
            (found if message.queue == queue else others).append(message)
        for message in others:
            self._waiting.put_nowait(message)
        self._count(found, -1)
        return found

    def _count(self, messages: Iterable[ReceivedMessage], sign: int) -> None:
        for message in messages:
            self.messages += sign
            self.bytes += sign * message.stored_size
        if self.messages < self.max_messages and self.bytes < self.max_bytes:
            self._room.set()
        else:
            self._room.clear()
