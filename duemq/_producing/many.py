"""Sends many messages: in batches if possible, with several batches in flight, and with the results in order.

A batch is a request for one queue. A message without a delay goes into the open batch of its lane: that of its topic,
or, if it is bound to a queue by sharding key or by name, that of its queue. A batch is sent when it is full, or when
the source has no more messages for the moment and at most one batch of the lane is in flight. So the messages of a slow
source are sent immediately, and those of a fast source fill their batches. The batches of a queue to which messages are
bound are sent one after the other, which keeps their order. Delayed messages and compressed messages are sent singly:
brokers accept neither in a batch.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Coroutine, Iterable
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from duemq._producing.delay import DelaySpec
from duemq._producing.outgoing import Outgoing
from duemq._producing.sending import OVERHEAD_BYTES, Choose, Sender, shard_number
from duemq.errors import ArgumentError, ClosedError, DueMQError, MessageRejectedError, NotSupportedError
from duemq.messages import Message, MessageQueue, SendManyError, SendOutcome, SendResult
from duemq.protocol.records import batch

if TYPE_CHECKING:
    from duemq._producing.intercepting import SendHooks
    from duemq.interceptors import Sending

BATCH_MESSAGES: Final = 256
BATCH_BYTES: Final = 256 * 1024
"""Maximum size of a batch. Larger ones make neither side faster, and would keep each busy for longer at a time. Brokers
accept 4 MiB by default."""
_PART_BYTES: Final = 22
"""The size of a message in a batch besides its body and properties, in bytes."""
_FEW: Final = 2
"""A batch that is not full waits while this many batches of its lane are in flight."""

_OF_THE_MESSAGE: Final = (ArgumentError, MessageRejectedError, NotSupportedError)
"""Failures that concern only the message itself: other messages may still be sent."""


class Job(NamedTuple):
    """A message that is ready to be sent."""

    message: Message
    outgoing: Outgoing
    spec: DelaySpec
    choose: Choose
    begun: float
    """When the message was taken from the source, by the loop's clock: its delay counts from then."""
    is_compressed: bool
    """Whether the message is to be compressed."""


class _Slot:
    """A message that was taken from the source, and the state of its send."""

    __slots__ = ("error", "job", "message", "result", "sending", "size", "text")

    def __init__(self, message: Message) -> None:
        self.message: Message | None = message
        """The caller's message; None once it is no longer needed."""
        self.job: Job | None = None
        self.sending: Sending | None = None
        """The object that interceptors get for this send, until it ends."""
        self.text = ""
        """The properties in their wire form, of a message without a delay."""
        self.size = 0
        """The room that the message takes in the window, in bytes; 0 if it is not in the window."""
        self.result: SendResult | None = None
        self.error: DueMQError | None = None


class _Lane:
    """The batches of one topic, or of one queue to which messages are bound."""

    __slots__ = ("bytes", "choose", "is_ordered", "on_their_way", "open", "ready", "topic")

    def __init__(self, topic: str, choose: Choose, *, is_ordered: bool) -> None:
        self.topic = topic
        self.choose = choose
        self.is_ordered = is_ordered
        self.open: list[_Slot] = []
        self.bytes = 0
        self.ready: deque[list[_Slot]] = deque()
        self.on_their_way = 0


class Many:
    """One call of `Producer.send_many` or `send_each`.

    `prepare` checks a message, and raises ArgumentError; `send_one` sends one that is in the window. `timeout`: for
    each message, in seconds, from the time when it, or its batch, is sent. `most_bytes`: maximum size of a batch.
    `most_kept`: maximum number of messages that are taken from the source and not yet passed on. `hooks`: those of the
    producer's interceptors, if it has any. `gives_up`: whether to take no more messages after a failure that does not
    concern only one message.
    """

    def __init__(
        self,
        sender: Sender,
        prepare: Callable[[Message], Job],
        send_one: Callable[[Job, float, int | None], Awaitable[SendResult]],
        timeout: float,
        retries: int | None,
        most_bytes: int,
        most_kept: int,
        hooks: SendHooks | None,
        *,
        gives_up: bool,
    ) -> None:
        self._sender = sender
        self._window = sender.window
        self._prepare = prepare
        self._send_one = send_one
        self._timeout = timeout
        self._retries = retries
        self._most_bytes = min(BATCH_BYTES, most_bytes)
        self._most_kept = most_kept
        self._hooks = hooks
        self._gives_up = gives_up
        self._has_given_up = False
        self._is_over = False
        self._keeps_messages = False
        self._loop = asyncio.get_running_loop()
        self._slots: deque[_Slot] = deque()
        """The messages that were taken and whose results are not passed on yet, in the order of the source."""
        self._lanes: dict[str | MessageQueue, _Lane] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._crash: BaseException | None = None
        self._is_idle_set = False
        self._progress = asyncio.Event()
        self._room = asyncio.Event()

    async def collect(self, source: Iterable[Message] | AsyncIterable[Message]) -> list[SendResult]:
        """Send all messages; return their results in the order of the source. Raises SendManyError if any failed."""
        outcomes: list[SendResult | DueMQError] = []
        failed: list[SendOutcome] = []
        async with aclosing(self._done(source)) as done:
            async for slots in done:
                for slot in slots:
                    if slot.result is not None:
                        outcomes.append(slot.result)
                    else:
                        assert slot.error is not None
                        assert slot.message is not None
                        outcomes.append(slot.error)
                        failed.append(SendOutcome(slot.message, error=slot.error))
        if failed:
            raise SendManyError(outcomes, failed) from failed[0].error
        return [each for each in outcomes if isinstance(each, SendResult)]

    async def each(self, source: Iterable[Message] | AsyncIterable[Message]) -> AsyncGenerator[SendOutcome, None]:
        """Send all messages; yield the outcome of each, in the order of the source."""
        self._keeps_messages = True
        async with aclosing(self._done(source)) as done:
            async for slots in done:
                for slot in slots:
                    assert slot.message is not None
                    yield SendOutcome(slot.message, slot.result, slot.error)

    async def _done(self, source: Iterable[Message] | AsyncIterable[Message]) -> AsyncGenerator[list[_Slot], None]:
        """Yield messages that were sent or have failed, in the order of the source."""
        feeding = asyncio.create_task(self._feed(source), name="duemq send_many")
        feeding.add_done_callback(lambda _: self._progress.set())
        try:
            while True:
                found = []
                while self._slots and (self._slots[0].result is not None or self._slots[0].error is not None):
                    found.append(self._slots.popleft())
                if found:
                    self._room.set()
                    yield found
                    continue
                if self._crash is not None:
                    raise self._crash
                if feeding.done() and (not self._slots or not self._tasks):
                    for slot in self._slots:  # an error in the source kept them from being sent
                        self._leave(slot)
                    feeding.result()
                    assert not self._slots, "each message that was taken has an outcome"
                    return
                if self._has_given_up and not self._slots:
                    # Do not wait for the source: its next message is no longer wanted.
                    return
                self._progress.clear()
                await self._progress.wait()
        finally:
            self._is_over = True
            feeding.cancel()
            self._drop_open()

    # --- taking

    async def _feed(self, source: Iterable[Message] | AsyncIterable[Message]) -> None:
        try:
            if isinstance(source, AsyncIterable):
                async for message in source:
                    pause = self._take(message)
                    if pause is not None:
                        await pause
                    if self._has_given_up:
                        break
            else:
                for message in source:
                    pause = self._take(message)
                    if pause is not None:
                        await pause
                    if self._has_given_up:
                        break
        finally:
            if not self._is_over:
                self._send_open()

    def _take(self, message: Message) -> Awaitable[None] | None:
        """Take a message. Return an awaitable that must be awaited before the next one, or None. Raises ArgumentError
        for anything but a Message."""
        if not isinstance(message, Message):
            raise ArgumentError(f"{message!r} is not a Message")
        slot = _Slot(message)
        self._slots.append(slot)
        try:
            if self._hooks is not None:
                slot.sending = self._hooks.sending(message, batched=True)
                message = self._hooks.before(slot.sending)
            slot.job = job = self._prepare(message)
            slot.text = job.outgoing.property_text({}) if job.spec.is_plain else ""
        except DueMQError as error:
            self._end(slot, None, error)
            return self._wait_for_room() if len(self._slots) > self._most_kept else None
        except BaseException as error:
            self._tell(slot, None, error)
            raise
        size = len(job.outgoing.body) + OVERHEAD_BYTES
        if len(self._slots) >= self._most_kept or not self._window.try_enter(size):
            return self._wait_and_put(slot, job, size)
        slot.size = size
        return self._put(slot, job)

    async def _wait_and_put(self, slot: _Slot, job: Job, size: int) -> None:
        # Messages in open batches hold room in the window: send them before waiting for room.
        self._send_open()
        try:
            await self._wait_for_room()
            await self._window.enter(size)
        except BaseException as error:
            self._tell(slot, None, error)
            raise
        slot.size = size
        pause = self._put(slot, job)
        if pause is not None:
            await pause

    async def _wait_for_room(self) -> None:
        """Wait until no more than `most_kept` messages are kept."""
        while len(self._slots) > self._most_kept:
            self._room.clear()
            await self._room.wait()

    def _put(self, slot: _Slot, job: Job) -> Awaitable[None] | None:
        message = job.message
        if not job.spec.is_plain:
            self._start(self._send_single(slot, job))
            return None
        part_bytes = _PART_BYTES + len(job.outgoing.body) + len(slot.text)
        is_large = job.is_compressed or part_bytes > self._most_bytes
        if message.queue is None and message.sharding_key is None:
            if is_large:
                self._start(self._send_single(slot, job))
                return None
            lane = self._lanes.get(message.topic)
            if lane is None:
                lane = self._lanes[message.topic] = _Lane(message.topic, job.choose, is_ordered=False)
            return self._add(lane, slot, part_bytes)
        queue = message.queue
        if queue is None:
            assert message.sharding_key is not None
            route = self._sender.known_route(message.topic)
            if route is None:
                return self._find_route_and_put(slot, job)
            queue = route.write_queues[shard_number(message.sharding_key) % len(route.write_queues)]
        lane = self._lanes.get(queue)
        if lane is None:
            lane = self._lanes[queue] = _Lane(message.topic, _always(queue), is_ordered=True)
        if not is_large:
            return self._add(lane, slot, part_bytes)
        if lane.open:
            self._close(lane)
        lane.open.append(slot)
        self._close(lane)
        return asyncio.sleep(0)

    async def _find_route_and_put(self, slot: _Slot, job: Job) -> None:
        try:
            await self._sender.route(job.outgoing.topic, self._timeout)
        except BaseException as error:
            self._leave(slot)
            if not isinstance(error, DueMQError):
                self._tell(slot, None, error)
                raise
            self._end(slot, None, error)
            return
        pause = self._put(slot, job)
        if pause is not None:
            await pause

    def _add(self, lane: _Lane, slot: _Slot, part_bytes: int) -> Awaitable[None] | None:
        is_full = False
        if lane.bytes + part_bytes > self._most_bytes:
            self._close(lane)
            is_full = True
        lane.open.append(slot)
        lane.bytes += part_bytes
        if len(lane.open) >= BATCH_MESSAGES:
            self._close(lane)
            is_full = True
        if not self._is_idle_set:
            self._is_idle_set = True
            self._loop.call_soon(self._idle)
        # Let other tasks run after each batch.
        return asyncio.sleep(0) if is_full else None

    def _idle(self) -> None:
        """Send the open batches, except those of lanes with enough batches in flight. Called after the source had its
        turn in the event loop."""
        self._is_idle_set = False
        if not self._is_over:
            for lane in list(self._lanes.values()):
                if lane.open and lane.on_their_way < _FEW:
                    self._close(lane)

    # --- sending

    def _send_open(self) -> None:
        for lane in list(self._lanes.values()):
            if lane.open:
                self._close(lane)

    def _close(self, lane: _Lane) -> None:
        """Close the open batch of a lane: it gets no more messages, and is sent."""
        lane.ready.append(lane.open)
        lane.open, lane.bytes = [], 0
        self._go_on(lane)

    def _go_on(self, lane: _Lane) -> None:
        while lane.ready and not (lane.is_ordered and lane.on_their_way):
            lane.on_their_way += 1
            self._start(self._send_batch(lane, lane.ready.popleft()))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._crash = self._crash or (asyncio.CancelledError() if task.cancelled() else task.exception())
        if self._crash is not None or not self._tasks:
            self._progress.set()

    async def _send_single(self, slot: _Slot, job: Job) -> None:
        try:
            sent = self._send_one(job, self._timeout, self._retries)
            if self._hooks is not None and slot.sending is not None:
                sent = self._hooks.around_batch((slot.sending,), sent)
            result = await sent
        except DueMQError as error:
            self._end(slot, None, error)
        else:
            self._end(slot, result, None)
        finally:
            self._leave(slot)

    async def _send_batch(self, lane: _Lane, slots: list[_Slot]) -> None:
        try:
            if len(slots) == 1:
                await self._send_singly(lane, slots)
                return
            messages = [slot.job.outgoing for slot in slots if slot.job is not None]
            body = batch.encode((0, each.body, slot.text) for each, slot in zip(messages, slots, strict=True))
            whole = Outgoing(lane.topic, body, 0, {}, "")
            sent: Awaitable[list[SendResult]] = self._sender.send_batch(
                whole, messages, lane.choose, self._timeout, self._retries
            )
            if self._hooks is not None:
                sendings = [slot.sending for slot in slots if slot.sending is not None]
                sent = self._hooks.around_batch(sendings, sent)
            try:
                results = await sent
            except MessageRejectedError:
                # Send the messages singly, to find out which of them the broker rejects.
                await self._send_singly(lane, slots)
            except DueMQError as error:
                for slot in slots:
                    self._end(slot, None, error)
            else:
                for slot, result in zip(slots, results, strict=True):
                    self._end(slot, result, None)
        finally:
            for slot in slots:
                self._leave(slot)
            lane.on_their_way -= 1
            if lane.open and lane.on_their_way < (1 if lane.is_ordered else _FEW) and not self._is_over:
                self._close(lane)
            else:
                self._go_on(lane)

    async def _send_singly(self, lane: _Lane, slots: list[_Slot]) -> None:
        for slot in slots:
            assert slot.job is not None
            await self._send_single(slot, slot.job._replace(choose=lane.choose))

    def _tell(self, slot: _Slot, result: SendResult | None, error: BaseException | None) -> None:
        """Report the result of a message to the interceptors, once."""
        sending, slot.sending = slot.sending, None
        if self._hooks is not None and sending is not None:
            self._hooks.after(sending, result, error)

    def _end(self, slot: _Slot, result: SendResult | None, error: DueMQError | None) -> None:
        if slot.sending is not None:
            self._tell(slot, result, error)
        slot.result, slot.error, slot.job = result, error, None
        if error is None:
            if not self._keeps_messages:
                # There may be many messages: those that are stored need not be kept in memory.
                slot.message = None
        elif self._gives_up and not isinstance(error, _OF_THE_MESSAGE):
            self._has_given_up = True
        self._progress.set()

    def _leave(self, slot: _Slot) -> None:
        if slot.size:
            self._window.leave(slot.size)
            slot.size = 0

    def _drop_open(self) -> None:
        """Drop the messages that are not in flight, since the caller no longer waits. Those in flight continue."""
        for lane in self._lanes.values():
            for slots in (lane.open, *lane.ready):
                for slot in slots:
                    self._leave(slot)
                    if slot.sending is not None:
                        self._tell(slot, None, ClosedError("the caller left before the message was sent"))
            lane.open, lane.bytes = [], 0
            lane.ready.clear()


def _always(queue: MessageQueue) -> Choose:
    return lambda route, failed: queue
