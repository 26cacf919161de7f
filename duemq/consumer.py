"""The push consumer: receives messages as a member of a consumer group.

How it works: a rebalance works out which queues are this member's (`_consuming.member`), each of which gets a reader
task (`_consuming.reader`); readers put messages into one bounded inbox (`_consuming.inbox`); a fixed number of worker
tasks takes them out and calls the handler, or the caller does that itself. What is finished is committed from time to
time (`_consuming.offsets`).

Messages are delivered at least once: after a crash, or when queues change hands, those that were finished but not
committed, or handled at that moment, are delivered again. A member whose process stopped for minutes, while others had
its queues, goes on where the group is by then.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Final, Literal, Self, get_args

from duemq._consuming.member import Listener, Member, MemberConfig, Target
from duemq._consuming.offsets import LocalOffsets
from duemq._consuming.reader import FIRST, LAST, Start
from duemq._consuming.subscription import ALL_TAGS
from duemq._consuming.workers import Handler, HandlerWorkers
from duemq._net.connection import Codec
from duemq._net.keys import signer_of
from duemq._net.tls import Tls, context_of
from duemq._values import checks
from duemq._values.intervals import Intervals
from duemq._values.times import Clock, Time, begin_ms, now_ms
from duemq.errors import ArgumentError, ClosedError
from duemq.messages import MessageQueue, ReceivedMessage

if TYPE_CHECKING:
    from duemq._consuming.intercepting import ReceiveHooks
    from duemq.interceptors import ConsumerInterceptor

Model = Literal["clustering", "broadcasting"]
From = Literal["first", "last"] | Time

Position = Literal["first", "last"]

MAX_CONCURRENCY: Final = 1000
HANDLER_TIMEOUT: Final = 900.0
"""Seconds: RocketMQ's consumeTimeout."""


class Consumer:
    """Receives messages as a member of a consumer group.

    With a handler, which is called with each message; returning means consumed, raising means deliver it again later:

        async def on_message(message):
            print(message.body)

        consumer = Consumer("billing", on_message)
        consumer.subscribe("orders", "paid || refunded")
        async with consumer:
            await consumer.wait_closed()

    Without one, the caller takes the messages and says what became of each; until then it counts as unfinished:

        async with consumer:
            async for message in consumer:
                print(message.body)
                await message.ack()

    `group`: its members share the messages of its topics, and it remembers what it has consumed. All members have to
        subscribe to the same topics and tags.
    `on_message`: the handler. It is called for up to `concurrency` messages at once, in no certain order.
    `nameserver`: "host:port" of the name server, several joined by ;.
    `model`: "clustering", or "broadcasting": each member gets all messages. A broadcasting consumer has no retries, and
        its offsets are its own: in memory, or from run to run in `offset_file`.
    `from_`: where to begin with a queue of which the group has no offset yet: "last", behind the messages there are
        when `start` returns; "first", at the oldest; or at a time, a datetime with a time zone or seconds since the
        epoch. Queues that are newer than the group's first start are read from their beginning. RocketMQ 4.9's brokers
        have a new group read a young queue, which still has its first messages in memory, from its beginning, too,
        whatever this says.
    `max_reconsume_times`: how often a message is retried before it goes to the dead-letter topic, %DLQ% and the
        group's name.
    `ordered`: the messages of a queue, such as those with the same sharding key, are handled one after the other, in
        their order, by one member at a time: the members lock the queues at the broker. A message that fails is tried
        again in its place, after a second, and holds up its queue until it succeeds or goes to the dead letters. All
        members of a group have to be ordered, or none.
    `handler_timeout`: a handler that takes longer, in seconds, is cancelled, with a line in the log, and its message
        retried. None: it may take any time.
    `on_assigned`, `on_revoked`: coroutine functions that are called with the queues that this member gets, before it
        reads them, and gives away, before another member can get them: then nothing more of them is handed out, and
        offsets can still be stored. The queues wait until they return, for `close_timeout` at most. An error is logged.
    `max_cached_messages`, `max_cached_bytes`: limits for the messages that are read and not finished; at a limit,
        reading waits.
    `max_ahead`: how many messages of a queue may be finished behind one that is not; then reading of that queue waits
        for that one. After a crash the finished ones would be delivered again.
    `close_timeout`: how long `close` waits for handlers, in seconds; and an ordered consumer for that of a queue which
        it gives away.
    `codec`: of the request headers; "auto" is MessagePack with a duemq broker and JSON with any other.
    `access_key`, `secret_key`: of the account that signs the requests, where brokers have access control.
    `tls`: True for TLS with certificates that the machine trusts, or an `ssl.SSLContext`, such as
        `ssl.create_default_context(cafile="ca.pem")`.
    `interceptors`: what sees each message before and after it is handled, or when it is received, see
        `duemq.interceptors`.

    Raises ArgumentError for arguments that make no sense.
    """

    def __init__(
        self,
        group: str,
        on_message: Handler | None = None,
        *,
        nameserver: str = "127.0.0.1:9876",
        model: Model = "clustering",
        from_: From = "last",
        max_reconsume_times: int = 16,
        ordered: bool = False,
        handler_timeout: float | None = HANDLER_TIMEOUT,
        on_assigned: Listener | None = None,
        on_revoked: Listener | None = None,
        concurrency: int = 20,
        max_cached_messages: int = 1000,
        max_cached_bytes: int = 64 * 1024 * 1024,
        max_ahead: int = 2000,
        offset_file: Path | str | None = None,
        close_timeout: float = 30.0,
        codec: Codec = "auto",
        access_key: str | None = None,
        secret_key: str | None = None,
        tls: Tls = False,
        interceptors: Iterable[ConsumerInterceptor] = (),
        _intervals: Intervals | None = None,
        _clock: Clock = now_ms,
        _monotonic: Callable[[], float] = time.monotonic,
        _ready: Callable[[], Awaitable[None]] | None = None,
        _exclusive: bool = False,
        _client_id: str | None = None,
        _in_hand: Mapping[MessageQueue, int] | None = None,
    ) -> None:
        _check_options(group, on_message, model, concurrency, offset_file)
        if max_ahead < 1:
            raise ArgumentError(f"max_ahead={max_ahead}: allowed are numbers from 1 on")
        if handler_timeout is not None and not handler_timeout > 0:
            raise ArgumentError(f"handler_timeout={handler_timeout}: give seconds, more than 0, or None")
        _check_listeners(on_assigned=on_assigned, on_revoked=on_revoked)
        self.group = group
        self._close_timeout = close_timeout
        config = MemberConfig(
            group=group,
            nameserver=nameserver,
            codec=codec,
            start=_read_start(from_),
            max_reconsume_times=max_reconsume_times,
            max_ahead=max_ahead,
            max_cached_messages=max_cached_messages,
            max_cached_bytes=max_cached_bytes,
            ordered=ordered,
            exclusive=_exclusive,
            client_id=_client_id,
            in_hand=_in_hand or {},
            close_timeout=close_timeout,
            on_assigned=on_assigned,
            on_revoked=on_revoked,
            local_offsets=LocalOffsets(Path(offset_file) if offset_file else None) if model == "broadcasting" else None,
            intervals=_intervals or Intervals(),
            signer=signer_of(access_key, secret_key),
            tls=context_of(tls),
            clock=_clock,
            monotonic=_monotonic,
        )
        self._member = Member(config)
        self._inbox = self._member.inbox
        self._hooks: ReceiveHooks | None = None
        if interceptors:
            # Imported only where it is used, since most consumers have none.
            from duemq._consuming.intercepting import ReceiveHooks

            self._hooks = ReceiveHooks.of(interceptors, group, self._member.client_id, model)
            if self._hooks is not None and on_message is not None:
                on_message = self._hooks.around(on_message)
        self._workers: HandlerWorkers | None = None
        if on_message is not None:
            self._workers = HandlerWorkers(
                group,
                on_message,
                self._inbox,
                concurrency=concurrency,
                timeout=handler_timeout,
                intervals=config.intervals,
                ready=_ready,
            )
        self._starting = asyncio.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._state: Literal["new", "running", "closing"] = "new"
        self._closed = asyncio.Event()
        self._closer: asyncio.Task[object] | None = None
        """The task that closes it; None before."""

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def __aiter__(self) -> AsyncIterator[ReceivedMessage]:
        """The messages, until the consumer is closed."""
        while True:
            try:
                yield await self.receive()
            except ClosedError:
                return

    def subscribe(self, topic: str, tags: str = ALL_TAGS) -> None:
        """Receive the messages of a topic that have one of `tags`, which are joined by ||; "*" is all messages.

        May be called before the start or later; a second call for a topic replaces its tags. A topic that does not
        exist yet is waited for. Raises ArgumentError.
        """
        self._member.subscribe(topic, tags)

    async def start(self) -> None:
        """Join the group and begin to receive. Raises ConnectError or RequestTimeoutError if no name server answers;
        it can be tried again then. Raises ClosedError if the consumer is closed, or was started before."""
        async with self._starting:
            if self._state != "new":
                raise ClosedError("a consumer is started only once")
            await self._member.start()
            if self._is_closing():
                await self._member.stop_reading()
                await self._member.leave()
                raise ClosedError("the consumer was closed while it started")
            self._loop, self._state = asyncio.get_running_loop(), "running"
            if self._workers is not None:
                self._workers.start()

    async def close(self) -> None:
        """Take no more messages, wait for the handlers that run, store the offsets, and leave the group.

        Handlers that do not end within `close_timeout` are cancelled; their messages are delivered again. So they are
        at once if this call is cancelled. Does not raise; called a second time, it waits for the first to finish.

        A handler may call it, too: it waits for the other handlers then. The handler's own message is delivered again,
        unless the handler has called its `ack` before.
        """
        await self._close(asyncio.current_task())

    async def _close(self, caller: asyncio.Task[object] | None) -> None:
        """Close it. `caller`: the task that waits for this call, which may be one that calls the handler."""
        if self._state == "closing":
            # A handler that is waited for does not wait itself, nor does a listener that the closing task calls.
            is_waited_for = caller is self._closer or (self._workers is not None and self._workers.has(caller))
            if not is_waited_for:
                await self._closed.wait()
            return
        self._check_loop()
        started, self._state = self._state == "running", "closing"
        self._closer = asyncio.current_task()
        try:
            self._inbox.close()
            if started:
                try:
                    await self._member.stop_reading()
                    if self._workers is not None:
                        await self._workers.end(self._close_timeout, caller)
                except BaseException:
                    # Nobody waits for the handlers any more, and their messages are delivered again.
                    if self._workers is not None:
                        self._workers.cancel(caller)
                    raise
                finally:
                    await self._member.leave()
            async with self._starting:
                pass  # a start under way ends first, since it looks whether the consumer is being closed
        finally:
            self._closed.set()

    async def wait_closed(self) -> None:
        """Wait until the consumer is closed."""
        self._check_loop()
        await self._closed.wait()

    async def receive(self) -> ReceivedMessage:
        """The next message, which then has to be settled with its `ack`, `retry` or `dead_letter`.

        May be cancelled without losing a message. Raises ClosedError once the consumer is closed, and where it has a
        handler.
        """
        if self._hooks is not None:
            return (await self._hooks.receive(lambda: self._take(1), single=True))[0]
        return await self._take_one()

    async def receive_many(self, most: int) -> list[ReceivedMessage]:
        """The next message, and up to `most` in all with what is there already. Otherwise as `receive`."""
        if self._hooks is not None:
            return await self._hooks.receive(lambda: self._take(most), single=False)
        return await self._take(most)

    async def _take(self, most: int) -> list[ReceivedMessage]:
        return [await self._take_one(), *self._inbox.get_more(most - 1)]

    async def _take_one(self) -> ReceivedMessage:
        if self._workers is not None:
            raise ClosedError("this consumer gives its messages to its handler")
        if self._state == "new":
            raise ClosedError("start the consumer first: async with ...")
        self._check_loop()
        message = await self._inbox.get()
        if message is None:
            raise ClosedError("the consumer is closed")
        return message

    async def commit(self) -> dict[MessageQueue, int]:
        """Store the offsets of what is finished now, not only from time to time; for one who keeps notes of what the
        group would get again. Gives the offsets that are known to be stored, by queue: what lies before them is not
        delivered to the group again. An offset that cannot be stored now is stored later, which is logged.
        """
        self._check_loop()
        await self._member.commit()
        return self._member.committed

    async def caught_up(self) -> None:
        """Wait until all is finished that was in this member's queues when it got them.

        While a subscribed topic does not exist, that is not so. Raises ClosedError if the consumer is closed before.
        """
        self._check_loop()
        await self._member.caught_up()

    async def seek(
        self,
        target: Target,
        position: Position | None = None,
        *,
        offset: int | None = None,
        time: Time | None = None,
    ) -> None:
        """Go on elsewhere in a queue, or in all queues of a topic that are this member's now.

        Give one of `position`, "first", the oldest message, or "last", behind the newest one; `offset`, a queue offset;
        and `time`: at about the first message that was stored then or later, a datetime with a time zone or seconds
        since the epoch. An offset at which the queue has no message is moved to the nearest one.

        What was read and is not finished is dropped: such a message is `lost`, and what becomes of it does not matter.
        The new offset is stored at once, for the group; where the broker cannot be reached, later, which is logged. For
        all queues of a group each member has to call it. Right after `start` it waits for the queues.

        Raises ArgumentError for a queue that is another member's and for a topic that is not subscribed to;
        NoRouteError for a topic that does not exist; ClosedError; and the errors of a broker that is asked.
        """
        if self._state != "running":
            raise ClosedError("start the consumer first: async with ...")
        self._check_loop()
        given = [
            name for name, value in (("position", position), ("offset", offset), ("time", time)) if value is not None
        ]
        if len(given) != 1:
            raise ArgumentError(f"{' and '.join(given) or 'nothing'} given: give one of position, offset and time")
        if offset is not None and (not isinstance(offset, int) or isinstance(offset, bool) or offset < 0):
            raise ArgumentError(f"offset={offset!r}: give a number, 0 or more")
        if position is not None and position not in get_args(Position):
            raise ArgumentError(f"position={position!r}: write 'first' or 'last', or give offset= or time=")
        start: Start | None = begin_ms(time) if time is not None else position
        await self._member.seek(_checked_target(target), start, offset)

    def pause(self, *targets: Target) -> None:
        """Hand out nothing more of queues or topics until `resume`; without arguments, of all that are subscribed to
        now. The queues stay this member's. Handlers that run go on; `caught_up` waits until they are resumed.

        It holds for a queue also if that goes to another member and comes back. Retries come through the topic %RETRY%
        and the group's name, which is paused by itself. Raises ArgumentError.
        """
        self._member.pause([_checked_target(target) for target in targets])

    def resume(self, *targets: Target) -> None:
        """Go on with queues or topics that were paused; without arguments, with all. Raises ArgumentError."""
        self._member.resume([_checked_target(target) for target in targets])

    @property
    def assignment(self) -> frozenset[MessageQueue]:
        """The queues that this member reads now. Those of the group's retry topic, which it may read too, are not
        listed."""
        return self._member.assignment

    def _is_closing(self) -> bool:
        return self._state == "closing"

    def _check_loop(self) -> None:
        """Raise ArgumentError in another event loop than that of `start`."""
        if self._loop is not None and asyncio.get_running_loop() is not self._loop:
            raise ArgumentError("the consumer was started in another event loop; use one consumer for each loop")


PushConsumer = Consumer
"""RocketMQ's name for it, which the pages do not use."""


def _checked_target(target: Target) -> Target:
    if isinstance(target, MessageQueue):
        return target
    if not isinstance(target, str):
        raise ArgumentError(f"{target!r} is neither a topic nor a MessageQueue")
    checks.check_topic(target)
    return target


def _check_listeners(**listeners: Listener | None) -> None:
    for name, listener in listeners.items():
        if listener is not None and not _may_be_async(listener):
            raise ArgumentError(f"{name}={listener!r} is no async function: write `async def`")


def _check_options(
    group: str, on_message: Handler | None, model: Model, concurrency: int, offset_file: Path | str | None
) -> None:
    checks.check_group(group)
    if on_message is not None and not _may_be_async(on_message):
        raise ArgumentError(f"the handler {on_message!r} is no async function: write `async def`")
    if model not in get_args(Model):
        raise ArgumentError(f"the model {model!r}; there are {', '.join(get_args(Model))}")
    if not 1 <= concurrency <= MAX_CONCURRENCY:
        raise ArgumentError(f"a concurrency of {concurrency}; allowed are 1 to {MAX_CONCURRENCY}")
    if offset_file is not None and model != "broadcasting":
        raise ArgumentError("only a broadcasting consumer keeps its offsets in a file; the broker has the others'")


def _may_be_async(handler: Handler | Listener) -> bool:
    """Whether a handler may return something to await: all but a `def` that does not say so in its annotation, which is
    most likely an `async def` that lacks its first word."""
    if not callable(handler):
        return False
    if not inspect.isroutine(handler) or inspect.iscoroutinefunction(handler) or handler.__name__ == "<lambda>":
        return True
    return getattr(handler, "__annotations__", {}).get("return") not in (None, "None")


def _read_start(from_: From) -> Start:
    if from_ in (FIRST, LAST):
        return FIRST if from_ == FIRST else LAST
    if isinstance(from_, str):
        raise ArgumentError(f"from_={from_!r}; write 'first', 'last' or give a time")
    return begin_ms(from_)
