"""The buffer between readers and handlers of an ordered consumer: it hands out one message of each queue at a time.

The bounds are divided among the queues, so that a queue whose message fails again and again takes no room from the
others. A reader puts in everything that a pull returned, so a queue may exceed its share by one pull.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

from duemq._consuming.inbox import Inbox
from duemq.messages import MessageQueue, ReceivedMessage


class _Lane:
    """The messages of one queue."""

    def __init__(self) -> None:
        self.messages: deque[ReceivedMessage] = deque()
        self.bytes = 0
        """The size of the records of `messages`."""
        self.current: ReceivedMessage | None = None
        """The message that is handed out and unfinished."""
        self.rest: asyncio.TimerHandle | None = None
        """The timer of the pause before the first message is handed out once more."""
        self.is_paused = False
        self.is_offered = False
        """Whether the lane is in the inbox's queue of lanes that have a message to hand out."""
        self.idle = asyncio.Event()
        self.idle.set()
        self.room = asyncio.Event()
        self.room.set()

    def end_rest(self) -> None:
        """End the pause of the first message, without handing it out."""
        if self.rest is not None:
            self.rest.cancel()
            self.rest = None


class OrderedInbox(Inbox):
    """Messages to be handled, those of a queue one at a time and in their order."""

    def __init__(self, max_messages: int, max_bytes: int) -> None:
        super().__init__(max_messages, max_bytes)
        self._lanes: dict[MessageQueue, _Lane] = {}
        self._ready: asyncio.Queue[_Lane | None] = asyncio.Queue()

    async def wait_for_room(self, queue: MessageQueue) -> None:
        """Wait until a queue holds less than its share."""
        while not self._has_room(lane := self._lane(queue)):
            lane.room.clear()
            await lane.room.wait()

    def put(self, messages: Sequence[ReceivedMessage]) -> None:
        """Put in messages of one queue that were just read, in their order."""
        if self._closed or not messages:
            return
        lane = self._lane(messages[0].queue)
        lane.messages.extend(messages)
        lane.bytes += sum(message.stored_size for message in messages)
        self._count(messages, 1)
        self._offer(lane)

    def put_again(self, message: ReceivedMessage, again: ReceivedMessage, seconds: float) -> None:
        """Hand out the queue's current message once more, as `again`, after `seconds`. Until then, no message of its
        queue is handed out."""
        lane = self._lane(message.queue)
        if lane.current is not message:
            return
        lane.current = None
        lane.idle.set()
        if self._closed:
            return
        lane.messages.appendleft(again)
        lane.bytes += again.stored_size
        lane.rest = asyncio.get_running_loop().call_later(seconds, self._end_rest, lane)

    async def get(self) -> ReceivedMessage | None:
        """Wait for the next message of a queue that has no message handed out; return None once the inbox is closed."""
        while True:
            lane = await self._ready.get()
            if lane is None:
                self._ready.put_nowait(None)  # wake the next waiter
                return None
            message = self._take(lane)
            if message is not None:
                return message

    def get_more(self, most: int) -> list[ReceivedMessage]:
        """Return up to `most` messages that can be handed out now, each of a different queue. Does not wait."""
        found: list[ReceivedMessage] = []
        while len(found) < most and not self._ready.empty():
            lane = self._ready.get_nowait()
            if lane is None:
                self._ready.put_nowait(None)
                break
            message = self._take(lane)
            if message is not None:
                found.append(message)
        return found

    def release(self, message: ReceivedMessage) -> None:
        """Count a message as finished: the next message of its queue may be handed out."""
        self._count((message,), -1)
        lane = self._lanes.get(message.queue)
        if lane is not None and lane.current is message:
            lane.current = None
            lane.idle.set()
            lane.room.set()
            self._offer(lane)

    def is_idle(self, queue: MessageQueue) -> bool:
        """Whether no message of a queue is handed out and unfinished."""
        return queue not in self._lanes or self._lanes[queue].current is None

    async def idle(self, queue: MessageQueue) -> None:
        """Wait until no message of a queue is handed out and unfinished."""
        if queue in self._lanes:
            await self._lanes[queue].idle.wait()

    def pause(self, queue: MessageQueue) -> None:
        """Hand out nothing more of a queue until `resume`."""
        self._lane(queue).is_paused = True

    def resume(self, queue: MessageQueue) -> None:
        """Hand out the messages of a queue again. Does nothing if the queue is not paused."""
        if queue in self._lanes:
            lane = self._lanes[queue]
            lane.is_paused = False
            self._offer(lane)

    def discard(self, queue: MessageQueue) -> None:
        """Drop the messages of a queue that are not handed out yet: they are no longer this member's. The queue is no
        longer paused. Until the message that is handed out is finished, no other message of the queue is handed out."""
        lane = self._lanes.get(queue)
        if lane is None:
            return
        self._count(lane.messages, -1)
        lane.messages.clear()
        lane.bytes = 0
        lane.end_rest()
        lane.is_paused = False
        lane.room.set()
        if lane.current is None:
            del self._lanes[queue]

    def close(self) -> None:
        """Drop the messages that are not handed out yet, and wake all waiting calls of `get`, which return None."""
        self._closed = True
        for lane in self._lanes.values():
            lane.messages.clear()
            lane.end_rest()
        while not self._ready.empty():
            self._ready.get_nowait()
        self._ready.put_nowait(None)

    def _lane(self, queue: MessageQueue) -> _Lane:
        lane = self._lanes.get(queue)
        if lane is None:
            lane = self._lanes[queue] = _Lane()
        return lane

    def _has_room(self, lane: _Lane) -> bool:
        share = len(self._lanes)
        held = len(lane.messages) + (lane.current is not None)
        return held < max(1, self.max_messages // share) and lane.bytes < max(1, self.max_bytes // share)

    def _offer(self, lane: _Lane) -> None:
        if lane.messages and not self._is_held_up(lane) and not lane.is_offered and not self._closed:
            lane.is_offered = True
            self._ready.put_nowait(lane)

    def _is_held_up(self, lane: _Lane) -> bool:
        return lane.current is not None or lane.is_paused or lane.rest is not None

    def _end_rest(self, lane: _Lane) -> None:
        lane.rest = None
        self._offer(lane)

    def _take(self, lane: _Lane) -> ReceivedMessage | None:
        lane.is_offered = False
        if self._is_held_up(lane):
            return None
        while lane.messages:
            message = lane.messages.popleft()
            lane.bytes -= message.stored_size
            if message.lost:
                self._count((message,), -1)
                continue
            lane.current = message
            lane.idle.clear()
            return message
        lane.room.set()
        return None
