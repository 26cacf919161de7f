"""The push consumer: receives messages as a member of a consumer group.

How it works: a rebalance determines the queues of this member (`_consuming.member`). Each queue gets a reader task
(`_consuming.reader`), and all readers put their messages into one bounded inbox (`_consuming.inbox`). A fixed number of
worker tasks take the messages out and call the handler; without a handler, the application takes them out. Offsets of
finished messages are committed every few seconds (`_consuming.offsets`).

Messages are delivered at least once: after a crash, or when a queue moves to another member, messages that were being
handled, or were finished but not committed, are delivered again. A member whose process stopped for minutes while
others had its queues resumes at the group's present offsets.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from datetime import datetime
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
    from duemq._net.complaints import Complaints
    from duemq.interceptors import ConsumerInterceptor

Model = Literal["clustering", "broadcasting"]
From = Literal["first", "last"] | Time

Position = Literal["first", "last"]

HANDLER_TIMEOUT: Final = 900.0
"""RocketMQ's default of consumeTimeout, in seconds."""


class Consumer:
    """Receives messages as a member of a consumer group.

    With a handler, which is called with each message. If it returns, the message is consumed; if it raises, the message
    is delivered again later:

        async def on_message(message):
            print(message.body)

        consumer = Consumer("billing", on_message)
        consumer.subscribe("orders", "paid || refunded")
        async with consumer:
            await consumer.wait_closed()

    Without a handler, the application takes the messages and settles each; until then the message is unfinished:

        async with consumer:
            async for message in consumer:
                print(message.body)
                await message.ack()

    `group`: the consumer group. Its members share the messages of its topics, and the broker stores its offsets. All
        members must subscribe to the same topics and tags.
    `on_message`: the handler. It is called for up to `concurrency` messages at a time, in no particular order.
    `nameserver`: "host:port" of the name server; several are joined by semicolons.
    `model`: "clustering", or "broadcasting": each member gets all messages. A broadcasting consumer has no retries, and
        keeps offsets of its own: in memory, or in `offset_file`, which lasts from run to run.
    `from_`: where to begin with a queue for which the group has no offset yet: "last", after the messages that exist
        when `start` returns; "first", at the oldest message; or at a time, a datetime with a time zone or seconds since
        the epoch. Queues that are created after the group's first start are read from their beginning. RocketMQ 4.9's
        brokers let a new group read a young queue from its beginning whatever `from_` says, as long as the queue's
        first messages are still in memory.
    `max_reconsume_times`: how many times a message is retried before it goes to the dead-letter topic, whose name is
        %DLQ% followed by the group's; 0 for no retries.
    `ordered`: the messages of a queue, such as those with the same sharding key, are handled one after the other, in
        their order, by one member at a time: members lock their queues at the broker. A message that fails is retried
        in place after a second, and holds up its queue until it succeeds or becomes a dead letter. Either all members
        of a group are ordered, or none.
    `handler_timeout`: time limit of the handler, in seconds. A handler that exceeds it is cancelled, which is logged,
        and its message is retried. None: no limit.
    `on_assigned`, `on_revoked`: coroutine functions that are called with the queues that this member gets, before it
        reads them, and with those that it gives up, before another member can get them. At that point no more of their
        messages are handed out, and offsets can still be stored. The queues wait until the call returns, for at most
        `close_timeout`. An exception is logged.
    `max_cached_messages`, `max_cached_bytes`: limits of the messages that are read and unfinished; reading pauses at a
        limit.
    `max_ahead`: how many messages of a queue may be finished beyond one that is not; reading of that queue then pauses.
        After a crash the finished ones would be delivered again.
    `close_timeout`: how long `close` waits for handlers, in seconds; also how long an ordered consumer waits for the
        handler of a queue that it gives up.
    `codec`: the encoding of request headers; "auto" is MessagePack with a duemq broker and JSON with any other.
    `access_key`, `secret_key`: the account that signs the requests, for brokers with access control.
    `tls`: True for TLS with the certificates that the machine trusts, or an `ssl.SSLContext`, such as
        `ssl.create_default_context(cafile="ca.pem")`.
    `interceptors`: objects that see each message before and after it is handled, or when it is received, see
        `duemq.interceptors`.

    Raises ArgumentError for invalid arguments.
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
        _complaints: Complaints | None = None,
    ) -> None:
        _check_options(group, on_message, model, offset_file)
        concurrency = checks.check_concurrency(concurrency)
        if handler_timeout is not None:
            handler_timeout = checks.check_timeout(handler_timeout, "handler_timeout", "seconds, more than 0, or None")
        checks.check_flag(ordered, "ordered")
        _check_listeners(on_assigned=on_assigned, on_revoked=on_revoked)
        self.group = group
        self._close_timeout = checks.check_close_timeout(close_timeout)
        local_offsets: LocalOffsets | None = None
        if model == "broadcasting":
            local_offsets = LocalOffsets(Path(offset_file) if offset_file is not None else None)
        config = MemberConfig(
            group=group,
            nameserver=nameserver,
            codec=codec,
            start=_read_start(from_),
            max_reconsume_times=checks.check_retries(max_reconsume_times),
            max_ahead=checks.check_limit(max_ahead, "max_ahead"),
            max_cached_messages=checks.check_limit(max_cached_messages, "max_cached_messages"),
            max_cached_bytes=checks.check_limit(max_cached_bytes, "max_cached_bytes"),
            ordered=ordered,
            exclusive=_exclusive,
            client_id=_client_id,
            in_hand=_in_hand or {},
            close_timeout=self._close_timeout,
            on_assigned=on_assigned,
            on_revoked=on_revoked,
            local_offsets=local_offsets,
            intervals=_intervals or Intervals(),
            signer=signer_of(access_key, secret_key),
            tls=context_of(tls),
            clock=_clock,
            monotonic=_monotonic,
        )
        self._member = Member(config, _complaints)
        self._inbox = self._member.inbox
        self._hooks: ReceiveHooks | None = None
        if checks.may_be_given(interceptors):
            # Imported late, since most consumers have no interceptors.
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
        """The task that closes the consumer; None before `close` is called."""

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def __aiter__(self) -> AsyncIterator[ReceivedMessage]:
        """Yield messages until the consumer is closed."""
        while True:
            try:
                yield await self.receive()
            except ClosedError:
                return

    def subscribe(self, topic: str, tags: str = ALL_TAGS) -> None:
        """Receive the messages of a topic that have one of `tags`, which are joined by ||; "*" is all messages.

        May be called before or after `start`; a second call for a topic replaces its tags. If the topic does not exist
        yet, the consumer waits for it. Raises ArgumentError.
        """
        self._member.subscribe(topic, tags)

    async def start(self) -> None:
        """Join the group and begin to receive. Raises ConnectError or RequestTimeoutError if no name server answers;
        `start` can then be called again. Raises ClosedError if the consumer is closed or was started before."""
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
        """Take no more messages, wait for running handlers, store the offsets, and leave the group.

        Handlers that do not end within `close_timeout` are cancelled, and their messages are delivered again. If this
        call is cancelled, they are cancelled immediately. Never raises, except ArgumentError in an event loop other
        than that of `start`; a second call waits for the first to finish.

        A handler may call this too; the call then waits for the other handlers. The handler's own message is delivered
        again unless the handler called its `ack` before.
        """
        await self._close(asyncio.current_task())

    async def _close(self, caller: asyncio.Task[object] | None) -> None:
        """Close the consumer. `caller`: the task that waits for this call, which may be one that calls the handler."""
        if self._state == "closing":
            # The closing task waits for handlers and calls listeners: if one of them waited for it, none would go on.
            is_waited_for = caller is self._closer or (self._workers is not None and self._workers.has(caller))
            if not is_waited_for:
                await self._closed.wait()
            return
        checks.check_loop(self._loop, "consumer")
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
                    # Nobody waits for the handlers any longer, and their messages are delivered again.
                    if self._workers is not None:
                        self._workers.cancel(caller)
                    raise
                finally:
                    await self._member.leave()
            async with self._starting:
                pass  # wait for a start in progress, which checks whether the consumer is being closed
        finally:
            self._closed.set()

    async def wait_closed(self) -> None:
        """Wait until the consumer is closed. Raises ArgumentError in an event loop other than that of `start`."""
        checks.check_loop(self._loop, "consumer")
        await self._closed.wait()

    async def receive(self) -> ReceivedMessage:
        """Wait for the next message. The application settles it with its `ack`, `retry` or `dead_letter`.

        The call may be cancelled without losing a message. Raises ClosedError before `start`, once the consumer is
        closed, and for a consumer with a handler; ArgumentError in an event loop other than that of `start`.
        """
        if self._hooks is not None:
            return (await self._hooks.receive(lambda: self._take(1), single=True))[0]
        return await self._take_one()

    async def receive_many(self, most: int) -> list[ReceivedMessage]:
        """Wait for the next message, and return up to `most` messages that have arrived. Otherwise like `receive`."""
        if self._hooks is not None:
            return await self._hooks.receive(lambda: self._take(most), single=False)
        return await self._take(most)

    async def _take(self, most: int) -> list[ReceivedMessage]:
        return [await self._take_one(), *self._inbox.get_more(most - 1)]

    async def _take_one(self) -> ReceivedMessage:
        if self._workers is not None:
            raise ClosedError("this consumer passes its messages to its handler")
        if self._state == "new":
            raise ClosedError("start the consumer first: async with ...")
        checks.check_loop(self._loop, "consumer")
        message = await self._inbox.get()
        if message is None:
            raise ClosedError("the consumer is closed")
        return message

    async def commit(self) -> dict[MessageQueue, int]:
        """Store the offsets of finished messages now, rather than with the next periodic commit. Return the offsets
        that are known to be stored, by queue: messages before them are not delivered to the group again. An offset that
        cannot be stored now is stored later, and a line is logged. Raises ArgumentError in an event loop other than
        that of `start`.
        """
        checks.check_loop(self._loop, "consumer")
        await self._member.commit()
        return self._member.committed

    async def caught_up(self) -> None:
        """Wait until all messages are finished that were in this member's queues when it got them.

        Waits on while a subscribed topic does not exist. Raises ClosedError if the consumer is closed first, and
        ArgumentError in an event loop other than that of `start`.
        """
        checks.check_loop(self._loop, "consumer")
        await self._member.caught_up()

    async def seek(
        self,
        target: Target,
        position: Position | None = None,
        *,
        offset: int | None = None,
        time: Time | None = None,
    ) -> None:
        """Continue elsewhere in a queue, or in all of a topic's queues that this member has now.

        Give one of `position`: "first", at the oldest message, or "last", after the newest; `offset`: a queue offset;
        `time`: near the first message that was stored at that time or later, a datetime with a time zone or seconds
        since the epoch. An offset at which the queue has no message is moved to the nearest one.

        Messages that were read and are unfinished are dropped: each of them is `lost`, and settling it has no effect.
        The group's new offset is stored immediately, or later if the broker cannot be reached, which is logged. To move
        all queues of a group, each member must call this. Right after `start` the call waits for the queues.

        Raises ArgumentError for a queue of another member and for a topic without subscription; NoRouteError for a
        topic that does not exist; ClosedError; and the errors of the broker.
        """
        if self._state != "running":
            raise ClosedError("start the consumer first: async with ...")
        checks.check_loop(self._loop, "consumer")
        given = [
            name for name, value in (("position", position), ("offset", offset), ("time", time)) if value is not None
        ]
        if len(given) != 1:
            raise ArgumentError(f"{' and '.join(given) or 'nothing'} given: give one of position, offset and time")
        if offset is not None and (not isinstance(offset, int) or isinstance(offset, bool) or offset < 0):
            raise ArgumentError(f"offset={offset!r}: give a number, 0 or more")
        if position is not None and (not isinstance(position, str) or position not in get_args(Position)):
            raise ArgumentError(f"position={position!r}: write 'first' or 'last', or give offset= or time=")
        start: Start | None = begin_ms(time) if time is not None else position
        await self._member.seek(_checked_target(target), start, offset)

    def pause(self, *targets: Target) -> None:
        """Hand out no more messages of these queues or topics until `resume`; without arguments, of all topics with a
        subscription. The queues remain this member's. Running handlers continue; `caught_up` waits for `resume`.

        A queue that moves to another member and back is still paused. Retries come from a topic whose name is %RETRY%
        followed by the group's; it is paused by its own name. Raises ArgumentError.
        """
        self._member.pause([_checked_target(target) for target in targets])

    def resume(self, *targets: Target) -> None:
        """Continue with paused queues or topics; without arguments, with all of them. Raises ArgumentError."""
        self._member.resume([_checked_target(target) for target in targets])

    @property
    def assignment(self) -> frozenset[MessageQueue]:
        """The queues that this member reads now, without those of the group's retry topic."""
        return self._member.assignment

    def _is_closing(self) -> bool:
        return self._state == "closing"


PushConsumer = Consumer
"""RocketMQ's name for `Consumer`. The documentation does not use it."""


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
            raise ArgumentError(f"{name}={listener!r} is not an async function: write `async def`")


def _check_options(group: str, on_message: Handler | None, model: Model, offset_file: Path | str | None) -> None:
    checks.check_choice(model, "model", get_args(Model))
    if model == "broadcasting":
        checks.check_group(group)
    else:
        checks.check_retried_group(group)
    if on_message is not None and not _may_be_async(on_message):
        raise ArgumentError(f"on_message={on_message!r} is not an async function: write `async def`")
    if offset_file is not None and not _is_path(offset_file):
        raise ArgumentError(f"offset_file={offset_file!r}: give a path, or None")
    if offset_file is not None and model != "broadcasting":
        raise ArgumentError("offset_file is for broadcasting consumers: the broker stores the offsets of others")


def _is_path(path: object) -> bool:
    """Whether an object is a path in text that is not empty."""
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else None
    return isinstance(text, str) and bool(text)


def _may_be_async(handler: Handler | Listener) -> bool:
    """Whether a call may return an awaitable. False for a plain `def` whose annotation does not say so, which is most
    likely an `async def` without its first word."""
    if not callable(handler):
        return False
    if not inspect.isroutine(handler) or inspect.iscoroutinefunction(handler) or handler.__name__ == "<lambda>":
        return True
    return getattr(handler, "__annotations__", {}).get("return") not in (None, "None")


def _read_start(from_: From) -> Start:
    if isinstance(from_, str) and from_ in (FIRST, LAST):
        return FIRST if from_ == FIRST else LAST
    if isinstance(from_, bool) or not isinstance(from_, int | float | datetime):
        raise ArgumentError(
            f"from_={from_!r}; write 'first', 'last' or give a time: seconds since the epoch, or a datetime with a "
            "time zone"
        )
    try:
        return begin_ms(from_)
    except ArgumentError as error:  # it begins with the time
        raise ArgumentError(f"from_={error}") from None
