"""The producer: sends messages, now or due later.

A send is retried, at another broker where there is one, as RocketMQ's synchronous send is. After a timeout or a lost
connection the first attempt may have been stored after all: messages are delivered at least once, and both copies have
the same message id.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterable, Iterable, Mapping, Sequence
from contextlib import aclosing
from datetime import tzinfo
from types import TracebackType
from typing import TYPE_CHECKING, Final, NamedTuple, Self, overload

from duemq._net import timeouts
from duemq._net.client import Client, typed_header
from duemq._net.connection import Codec
from duemq._net.keys import signer_of
from duemq._net.tls import Tls, context_of
from duemq._producing.changing import Changing
from duemq._producing.delay import AT_ONCE, DelaySpec, read_delay_spec
from duemq._producing.many import Job, Many
from duemq._producing.outgoing import Outgoing, compressed, one_key, prepare
from duemq._producing.sending import OVERHEAD_BYTES, STATUS, Choose, Sender, primary
from duemq._producing.unique_keys import UniqueKeys
from duemq._producing.window import Window
from duemq._values import checks
from duemq._values.intervals import CONNECT_TIMEOUT, Intervals, with_timeouts
from duemq._values.retries import Retries
from duemq._values.times import Clock, Span, Time, now_ms, span_ms, time_ms
from duemq.errors import ArgumentError, ClosedError, DueMQError, NoRouteError, PeerError, TopicNotFoundError
from duemq.messages import Message, MessageQueue, SendOutcome, SendResult
from duemq.protocol.codes import RequestCode
from duemq.protocol.errors import RemoteProtocolError
from duemq.protocol.records import batch
from duemq.protocol.records.properties import (
    TIMER_COUNT,
    TIMER_CRON,
    TIMER_END,
    TIMER_EVERY,
    TIMER_START,
    TIMER_ZONE,
    UNIQ_KEY,
)
from duemq.protocol.requests import recall_handle as recall_handles
from duemq.protocol.requests.bodies import HeartbeatData, ProducerData
from duemq.protocol.requests.headers import (
    OffsetResponse,
    QueueOfTopic,
    RecallMessage,
    RecallMessageResponse,
    UnregisterClient,
)

if TYPE_CHECKING:
    from duemq._consuming.group import GroupApi
    from duemq._producing.changes import PendingChanges
    from duemq._producing.intercepting import SendHooks
    from duemq.interceptors import ProducerInterceptor

READING_GROUP: Final = "TOOLS_CONSUMER"
"""The consumer group with which a producer reads back what it sent. RocketMQ's brokers have it for tools."""

LONGEST_PAUSE: Final = Retries().longest_pause

log = logging.getLogger("duemq.producer")


class _Send(NamedTuple):
    """One send, checked."""

    message: Outgoing
    spec: DelaySpec
    choose: Choose
    begun: float
    """Time of the call by the event loop's clock, in seconds: the time-out and the delay count from it."""
    timeout: float

    @property
    def size(self) -> int:
        """Bytes that the send occupies in the window of sends in flight."""
        return len(self.message.body) + OVERHEAD_BYTES


class Producer(Changing):
    """Sends messages.

        async with Producer("127.0.0.1:9876") as producer:
            await producer.send("orders", b"hello")
            result = await producer.send("orders", b"remember", delay="1h30m")
            await producer.reschedule(result.handle, delay="2h")

    One producer serves any number of concurrent tasks of one event loop. Arguments:

    `nameserver`: "host:port" of the name server; several are joined by semicolons.
    `group`: the producer group, a name that operators see.
    `codec`: the encoding of request headers; "auto" is MessagePack with a duemq broker and JSON with any other.
    `timeout`: time limit of each send, all its attempts included, in seconds.
    `retries`: how many times a send is retried after a failure that leaves open whether the message was stored, or a
        `Retries`, which sets the pauses too. A failure after which the message is certainly not stored, such as that
        of a broker which is restarting, is retried until the time is up. 0: a single attempt, whatever happens.
    `max_in_flight`, `max_in_flight_bytes`: limits of the sends in flight and of their bytes; a send beyond a limit
        waits for its turn, within its time-out.
    `compress_from_bytes`: bodies of at least this size are compressed with zlib; None: never.
    `max_body_bytes`: larger bodies are refused. The broker has a limit of its own, 4 MiB by default.
    `connect_timeout`: time limit for opening a connection, in seconds.
    `access_key`, `secret_key`: the account that signs the requests, for brokers with access control.
    `tls`: True for TLS with the certificates that the machine trusts, or an `ssl.SSLContext`, such as
        `ssl.create_default_context(cafile="ca.pem")`.
    `interceptors`: objects that see each message before and after it is sent, see `duemq.interceptors`.

    Raises ArgumentError for invalid arguments.
    """

    def __init__(
        self,
        nameserver: str = "127.0.0.1:9876",
        *,
        group: str = "duemq",
        codec: Codec = "auto",
        timeout: float = 10.0,
        retries: int | Retries = 2,
        max_in_flight: int = 10_000,
        max_in_flight_bytes: int = 64 * 1024 * 1024,
        compress_from_bytes: int | None = 4096,
        max_body_bytes: int = checks.MAX_BODY_BYTES,
        connect_timeout: float = CONNECT_TIMEOUT,
        access_key: str | None = None,
        secret_key: str | None = None,
        tls: Tls = False,
        interceptors: Iterable[ProducerInterceptor] = (),
        _intervals: Intervals | None = None,
        _clock: Clock = now_ms,
    ) -> None:
        checks.check_group(group)
        self.group = group
        self._max_in_flight = checks.check_limit(max_in_flight, "max_in_flight")
        self._window = Window(self._max_in_flight, checks.check_limit(max_in_flight_bytes, "max_in_flight_bytes"))
        self._max_body_bytes = checks.check_limit(max_body_bytes, "max_body_bytes")
        self._compress_from_bytes = checks.check_compress_from_bytes(compress_from_bytes)
        self._timeout = checks.check_timeout(timeout)
        intervals = with_timeouts(_intervals, checks.check_timeout(connect_timeout, "connect_timeout"))
        self._client = Client(
            nameserver,
            codec=codec,
            heartbeat=self._heartbeat,
            intervals=intervals,
            signer=signer_of(access_key, secret_key),
            tls=context_of(tls),
        )
        if not isinstance(retries, Retries):
            longest = min(intervals.longest_pause, LONGEST_PAUSE)
            retries = Retries(times=retries, first_pause=min(intervals.first_pause, longest), longest_pause=longest)
        self._sender = Sender(self._client, group, self._window, retries, _clock)
        self._changes: PendingChanges | None = None
        self._group_api: GroupApi | None = None
        self._hooks: SendHooks | None = None
        if checks.may_be_given(interceptors):
            # Imported late, since most producers have no interceptors.
            from duemq._producing.intercepting import SendHooks

            self._hooks = SendHooks.of(interceptors, group, self._client.client_id, self.new_message_id)
        self._starting = asyncio.Lock()
        self._keys: UniqueKeys | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def start(self) -> None:
        """Connect to a name server. Raises ConnectError if none answers; `start` can then be called again. Raises
        ClosedError if the producer is closed."""
        if self._closed:
            raise ClosedError("the producer is closed")
        async with self._starting:
            if self._keys is None:
                # In a thread, since it asks the resolver for this host's address, which may take seconds.
                keys = await asyncio.to_thread(UniqueKeys)
                await self._client.start()
                if self._closed:
                    await self._client.close()
                    raise ClosedError("the producer was closed while it started")
                self._loop, self._keys = asyncio.get_running_loop(), keys

    async def flush(self) -> None:
        """Wait until no send is in flight, sends that begin in the meantime included. Never raises: the caller of each
        send gets its outcome."""
        await self._window.empty()

    async def close(self, timeout: float | None = None) -> None:
        """Accept no more sends, wait for those in flight, and close the connections. Never raises, except ArgumentError
        in an event loop other than that of `start`.

        `timeout`: time limit of the wait, in seconds, by default that of a send. Sends that are still in flight after
        it fail with ConnectionLostError.
        """
        if self._closed:
            return
        checks.check_loop(self._loop, "producer")
        self._closed = True
        try:
            try:
                async with timeouts.timeout(self._timeout if timeout is None else timeout):
                    await self._window.empty()
            except TimeoutError:
                log.warning("the producer is closed with %d sends in flight", self._window.count)
            header = UnregisterClient(client_id=self._client.client_id, producer_group=self.group)
            for address in self._client.broker_addresses:
                try:
                    await self._client.call(address, RequestCode.UNREGISTER_CLIENT, header, timeout=1.0)
                except DueMQError as error:
                    log.debug("no goodbye: %s", error)
        finally:
            await self._client.close()

    # --- sending --------------------------------------------------------------------------------------------------

    @overload
    async def send(
        self, message: Message, /, *, retries: int | None = None, timeout: float | None = None
    ) -> SendResult: ...

    @overload
    async def send(
        self,
        topic: str,
        body: bytes | str,
        *,
        tags: str | None = None,
        keys: str | Iterable[str] = (),
        properties: Mapping[str, str] | None = None,
        level: int | None = None,
        delay: Span | None = None,
        deliver_at: Time | None = None,
        replace: bool = False,
        sharding_key: str | None = None,
        queue: MessageQueue | None = None,
        message_id: str | None = None,
        retries: int | None = None,
        timeout: float | None = None,
    ) -> SendResult: ...

    async def send(
        self,
        topic: str | Message,
        body: bytes | str | None = None,
        *,
        tags: str | None = None,
        keys: str | Iterable[str] = (),
        properties: Mapping[str, str] | None = None,
        level: int | None = None,
        delay: Span | None = None,
        deliver_at: Time | None = None,
        replace: bool = False,
        sharding_key: str | None = None,
        queue: MessageQueue | None = None,
        message_id: str | None = None,
        retries: int | None = None,
        timeout: float | None = None,
    ) -> SendResult:
        """Send a message and wait until the broker has stored it: `send(Message(...))` or `send(topic, body, ...)`.

        `body`: must not be empty; text is sent as UTF-8. `tags`: one tag, by which consumers may filter. `keys`: the
        keys under which the broker indexes the message. `properties`: the application's own, for consumers to read.

        Without a delay the message is delivered immediately. A delay is one of
        `delay`: the time from this call to the delivery: seconds, a timedelta, or text such as "1h30m". Exact to the
        millisecond by the broker's clock, even if this machine's clock is wrong;
        `deliver_at`: the time of delivery: a datetime with a time zone, or seconds since the epoch. Exact to the
        millisecond by the broker's clock; a time in the past means immediately;
        `level`: the delay of that level of the topic, or of the broker if the topic has no levels of its own (1: 1 s,
        2: 5 s, 3: 10 s ... by default).
        The producer asks the broker which delays it supports. Brokers with timers (duemq, RocketMQ from 5.0 on) support
        any. For an older broker, a delay that equals a level is sent as that level, and any other raises DelayError,
        since that broker would deliver the message immediately. RocketMQ's timers have a precision of one second: they
        deliver up to a second late.

        The result of a delayed send has a `handle` for `cancel`, `reschedule` and `deliver_now`.

        `replace`: the message replaces the waiting message that was sent with this option to the same topic with the
        same key (`keys` must have exactly one), so that only the last one is delivered, at its own time: a deadline
        that moves, or a burst of changes that becomes one message. A message that has already been delivered is not
        affected. Needs a duemq broker. Messages with the same key go to the same queue unless `queue` names another;
        then all of them must name that one.

        The queues take turns by default. With `sharding_key` the same key always goes to the same queue (by RocketMQ's
        hash, so a Java producer chooses the same queue); `queue` names the queue itself, and a retry then goes to no
        other. Messages of one queue are stored in the order of their sends if each send waits for the previous one,
        or by `send_many`.

        `message_id`: an id from `new_message_id`, for applications that record the id before the send: `stored` then
        tells whether a send that failed was stored after all. None: a new id. `retries`: for this send; 0 for a message
        that must not be stored twice.

        `timeout`: time limit in seconds for all attempts, including the wait for a turn when `max_in_flight` sends are
        in flight.

        Raises ArgumentError, ClosedError; NoRouteError if no broker has the topic or creates it; NotSupportedError for
        `replace` at a broker other than duemq; the last attempt's BrokerError, ConnectError, ConnectionLostError or
        RequestTimeoutError. The error's `maybe_stored` tells whether the message may have been stored.
        """
        if self._hooks is None and not isinstance(topic, Message):
            send = self._make_send(
                topic,
                body,
                tags=tags,
                keys=keys,
                properties=properties,
                level=level,
                delay=delay,
                deliver_at=deliver_at,
                replace=replace,
                sharding_key=sharding_key,
                queue=queue,
                message_id=message_id,
                timeout=timeout,
            )
            return await self._deliver(send, retries)
        given = _message_of(
            topic,
            body,
            tags=tags,
            keys=keys,
            properties=properties,
            level=level,
            delay=delay,
            deliver_at=deliver_at,
            replace=replace,
            sharding_key=sharding_key,
            queue=queue,
            message_id=message_id,
        )
        if self._hooks is None:
            return await self._deliver(self._send_of(given, timeout), retries)
        return await self._hooks.around_send(
            given, lambda message: self._deliver(self._send_of(message, timeout), retries)
        )

    @overload
    async def send_oneway(self, message: Message, /, *, timeout: float | None = None) -> str: ...

    @overload
    async def send_oneway(
        self,
        topic: str,
        body: bytes | str,
        *,
        tags: str | None = None,
        keys: str | Iterable[str] = (),
        properties: Mapping[str, str] | None = None,
        level: int | None = None,
        delay: Span | None = None,
        deliver_at: Time | None = None,
        replace: bool = False,
        sharding_key: str | None = None,
        queue: MessageQueue | None = None,
        timeout: float | None = None,
    ) -> str: ...

    async def send_oneway(
        self,
        topic: str | Message,
        body: bytes | str | None = None,
        *,
        tags: str | None = None,
        keys: str | Iterable[str] = (),
        properties: Mapping[str, str] | None = None,
        level: int | None = None,
        delay: Span | None = None,
        deliver_at: Time | None = None,
        replace: bool = False,
        sharding_key: str | None = None,
        queue: MessageQueue | None = None,
        timeout: float | None = None,
    ) -> str:
        """Send a message without waiting for the broker's answer, so that it is unknown whether the message was stored.
        Return the message id.

        Arguments and errors are those of `send`; there is a single attempt.
        """
        if self._hooks is None and not isinstance(topic, Message):
            send = self._make_send(
                topic,
                body,
                tags=tags,
                keys=keys,
                properties=properties,
                level=level,
                delay=delay,
                deliver_at=deliver_at,
                replace=replace,
                sharding_key=sharding_key,
                queue=queue,
                message_id=None,
                timeout=timeout,
            )
            return await self._deliver_oneway(send)
        given = _message_of(
            topic,
            body,
            tags=tags,
            keys=keys,
            properties=properties,
            level=level,
            delay=delay,
            deliver_at=deliver_at,
            replace=replace,
            sharding_key=sharding_key,
            queue=queue,
            message_id=None,
        )
        if self._hooks is None:
            return await self._deliver_oneway(self._send_of(given, timeout))
        return await self._hooks.around_send(
            given, lambda message: self._deliver_oneway(self._send_of(message, timeout))
        )

    async def send_many(
        self,
        messages: Iterable[Message] | AsyncIterable[Message],
        *,
        retries: int | None = None,
        timeout: float | None = None,
    ) -> list[SendResult]:
        """Send messages to any topics, and return their results in the same order.

        They are sent in batches by topic and queue, several batches at a time; at most `max_in_flight` messages and
        `max_in_flight_bytes` are taken from the source before the broker has stored them. Delayed messages, and those
        that are to be compressed, are sent one by one. Messages with the same `sharding_key`, or for the same `queue`,
        are stored in the given order, unless they have delays.

        If all messages are stored, their results are returned. Otherwise SendManyError is raised once nothing is in
        flight; it lists the messages that were stored, those that were not, and those of which that is unknown. A
        message that is refused for its own sake (ArgumentError, MessageRejectedError, NotSupportedError) does not keep
        others from being sent. After any other failure no more messages are taken from the source; the rest are not
        sent and not among the error's outcomes. An exception of the source is raised after the messages before it have
        been sent.

        The results are kept until the end, about 400 bytes each. For an endless source use `send_each`.

        `retries`, `timeout`: for each message or its batch, as in `send`. Raises SendManyError, ClosedError;
        ArgumentError if the source yields anything but a Message.
        """
        return await self._many(retries, timeout, gives_up=True).collect(messages)

    async def send_each(
        self,
        messages: Iterable[Message] | AsyncIterable[Message],
        *,
        retries: int | None = None,
        timeout: float | None = None,
    ) -> AsyncGenerator[SendOutcome, None]:
        """Send messages as `send_many` does, and yield the outcome of each, in the same order.

            async for outcome in producer.send_each(messages()):
                if outcome.error is not None: ...

        It goes on after a failure. To end early, leave the loop or close the generator: then no more messages are taken
        from the source, and it is unknown which of those in flight were stored. At most `max_in_flight` messages are
        taken ahead of the loop, so the source may be endless. Raises the errors of `send_many`, except SendManyError.
        """
        async with aclosing(self._many(retries, timeout, gives_up=False).each(messages)) as outcomes:
            async for outcome in outcomes:
                yield outcome

    async def schedule(
        self,
        topic: str,
        body: bytes | str,
        *,
        name: str,
        every: Span | None = None,
        cron: str | None = None,
        zone: str | tzinfo | None = None,
        start: Time | None = None,
        end: Time | None = None,
        count: int | None = None,
        tags: str | None = None,
        properties: Mapping[str, str] | None = None,
        retries: int | None = None,
        timeout: float | None = None,
    ) -> SendResult:
        """Have the broker deliver a message again and again until it is removed. It replaces the topic's recurring
        message of the same name, so a program may call this at each start.

            await producer.schedule("reports", b"nightly", name="nightly", cron="0 3 * * *", zone="Europe/Paris")

        `name`: text without blanks; it is the key of each delivered message. Give either
        `every`: the interval, at least 1 s: seconds, a timedelta, or text such as "1h30m". The first delivery is at
        `start`, or one interval from now; or
        `cron`: five fields, minute to day of the week, or six that begin with the seconds, in the time zone `zone`: a
        name such as "Europe/Paris" or a ZoneInfo; UTC by default.
        `start`, `end`: nothing is delivered before `start` or after `end`: each a datetime with a time zone, or seconds
        since the epoch. `count`: the number of deliveries.

        The result's `due_time_ms` is the time of the first delivery.

        Each delivery is a message of its own and comes exactly once, even if the broker crashes. After an outage the
        topic's catch-up policy decides about missed deliveries. `Admin.recurring` lists recurring messages;
        `Admin.pause_recurring`, `resume_recurring` and `remove_recurring` change them.

        Needs a duemq broker. `tags`, `properties`, `retries`, `timeout` and errors are those of `send`. Raises
        ArgumentError also unless one of `every` and `cron` is given, and for a `count` below 1; MessageRejectedError
        for a cron expression or a zone that the broker cannot read.
        """
        if (every is None) == (cron is None):
            raise ArgumentError("give one of `every` and `cron`")
        if count is not None and count < 1:
            raise ArgumentError(f"count={count}; a message recurs at least once")
        recurrence = {
            TIMER_EVERY: f"{span_ms(every)}ms" if every is not None else None,
            TIMER_CRON: cron,
            TIMER_ZONE: str(zone) if zone is not None else None,
            TIMER_START: str(time_ms(start)) if start is not None else None,
            TIMER_END: str(time_ms(end)) if end is not None else None,
            TIMER_COUNT: str(count) if count is not None else None,
        }
        given = {each: value for each, value in recurrence.items() if value is not None}
        return await self.send(
            topic,
            body,
            tags=tags,
            keys=(name,),
            properties={**(properties or {}), **given},
            replace=True,
            retries=retries,
            timeout=timeout,
        )

    async def send_batch(
        self,
        messages: Iterable[Message],
        *,
        queue: MessageQueue | None = None,
        retries: int | None = None,
        timeout: float | None = None,
    ) -> list[SendResult]:
        """Send messages of one topic in one request: either all are stored, one after the other in one queue, or none.

        Together they must not exceed `max_body_bytes`. They are neither compressed nor delayed, since brokers accept
        neither in a batch. Without `queue`, all must have the same sharding key, or none. `queue`, `retries`, `timeout`
        and errors are those of `send`. `send_many` makes batches without these conditions.
        """
        given = list(messages)
        hooks = self._hooks
        if hooks is None:
            return await self._deliver_batch(given, queue, retries, timeout)
        sendings = [hooks.sending(each, batched=True) for each in given]
        results: Sequence[SendResult | None] = [None] * len(given)
        failure: BaseException | None = None
        try:
            intercepted = [hooks.before(each) for each in sendings]
            stored = await hooks.around_batch(sendings, self._deliver_batch(intercepted, queue, retries, timeout))
            results = stored
            return stored
        except BaseException as error:
            failure = error
            raise
        finally:
            for sending, result in zip(sendings, results, strict=True):
                hooks.after(sending, result, failure)

    async def _deliver_batch(
        self, given: list[Message], queue: MessageQueue | None, retries: int | None, timeout: float | None
    ) -> list[SendResult]:
        begun = asyncio.get_running_loop().time()
        if any(each.level is not None or each.delay is not None or each.deliver_at is not None for each in given):
            raise ArgumentError("a message of a batch cannot be delayed; send_many accepts delayed messages")
        if any(each.replace for each in given):
            raise ArgumentError("a message of a batch cannot replace another")
        prepared = [self._prepare(each) for each in given]
        if len({message.topic for message in prepared}) != 1:
            raise ArgumentError("a batch needs at least one message, and all its messages must have the same topic")
        bound = {each.queue for each in given} - {None}
        if queue is None and len(bound) == 1 and all(each.queue is not None for each in given):
            (queue,) = bound
        elif bound - {queue}:
            raise ArgumentError("a batch goes to one queue, and its messages name several")
        if queue is None and len({each.sharding_key for each in given}) != 1:
            raise ArgumentError("a batch goes to one queue: give its messages the same sharding key, or give `queue`")
        topic = prepared[0].topic
        choose = self._sender.chooser(topic, given[0].sharding_key if queue is None else None, queue)
        body = batch.encode((0, message.body, message.property_text({})) for message in prepared)
        checks.check_body(body, self._max_body_bytes)
        limit = self._limit(timeout)
        size = len(body) + OVERHEAD_BYTES
        await self._sender.enter(size, begun + limit, limit)
        try:
            return await self._sender.send_batch(Outgoing(topic, body, 0, {}, ""), prepared, choose, limit, retries)
        finally:
            self._window.leave(size)

    # --- what was stored ------------------------------------------------------------------------------------------

    def new_message_id(self) -> str:
        """Return a message id for a later send. Raises ClosedError before `start` and after `close`, and ArgumentError
        in an event loop other than that of `start`."""
        return self._check_open().make()

    async def choose_queue(self, topic: str, sharding_key: str | None = None) -> MessageQueue:
        """Return the queue that a send to the topic would choose, for applications that record it before the send.
        Raises ArgumentError for an invalid sharding key, ClosedError, NoRouteError, ConnectError, ConnectionLostError
        and RequestTimeoutError."""
        self._check_open()
        choose = self._sender.chooser(topic, sharding_key, None)
        return choose(await self._client.routes.find_to_send(topic), None)

    async def end_offset(self, queue: MessageQueue) -> int:
        """Return the offset that the queue's next message will get; 0 for a topic that the queue's broker does not have
        yet. Raises the errors of `choose_queue`, and BrokerError."""
        self._check_open()
        try:
            return await self._reading.end_offset(queue)
        except NoRouteError as error:
            # A name server forgets the topics of a broker that is down. Only the broker itself knows that it has none.
            address = primary(await self._client.routes.find_to_send(queue.topic), queue)
            header = QueueOfTopic(topic=queue.topic, queue_id=queue.queue_id)
            try:
                answer = await self._client.call(address, RequestCode.GET_MAX_OFFSET, header)
            except TopicNotFoundError:
                return 0
            if typed_header(answer, OffsetResponse, address).offset > 0:
                raise error
            return 0

    async def stored(self, message_ids: Iterable[str], queue: MessageQueue, from_offset: int) -> dict[str, int]:
        """Find the messages with these ids in a queue, at `from_offset` or later; return their queue offsets by id.

        The request uses the connection over which this producer sends, and brokers answer a connection's requests in
        order. So no finished send of this producer has stored a message that is not found here, nor will it. A message
        that waits for its delivery is not in its queue yet: `Admin.pending` finds it by its id. Raises the errors of
        `end_offset`, and PeerError if the broker returns nothing although the queue goes on.
        """
        self._check_open()
        wanted, found = set(message_ids), dict[str, int]()
        from duemq._consuming.subscription import ALL_TAGS, make_subscription

        everything = make_subscription(queue.topic, ALL_TAGS, 0)
        offset, end = from_offset, await self.end_offset(queue)
        while offset < end and len(found) < len(wanted):
            pulled = await self._reading.pull(queue, offset, everything, hold=False)
            for message in pulled.messages:
                message_id = message.properties.get(UNIQ_KEY)
                if message_id in wanted:
                    found.setdefault(message_id, message.queue_offset)
            if pulled.next_offset <= offset:
                raise PeerError(self._client.broker_addresses[0], f"it returned nothing of {queue} at offset {offset}")
            offset = pulled.next_offset
        return found

    # --- messages that wait: see `Changing` ---------------------------------------------------------------------------

    async def recall(self, topic: str, recall_handle: str, *, timeout: float | None = None) -> str:
        """Cancel a message with a timer by RocketMQ's own request, with the recall handle that its broker returned.
        Return the message id. `cancel` does the same and reports more.

        A duemq broker accepts a second recall of the same message. RocketMQ's brokers from 5.3 on need
        recallMessageEnable=true, and do not check whether the message exists. Raises IllegalOperationError if the
        message has been delivered or is unknown, ArgumentError for a handle that is not one of the topic's, and the
        errors of `send`; there is a single attempt.
        """
        self._check_open()
        if not isinstance(recall_handle, str):
            raise ArgumentError(f"recall_handle={recall_handle!r}: only a send to a broker with recalls returns one")
        try:
            handle = recall_handles.decode(recall_handle)
        except RemoteProtocolError:
            raise ArgumentError(f"{recall_handle!r} is not a recall handle") from None
        if handle.topic != topic:
            raise ArgumentError(f"the recall handle belongs to the topic {handle.topic}, not to {topic}")
        route = await self._client.routes.find_to_send(topic)
        address = primary(route, MessageQueue(topic, handle.broker_name, 0))
        header = RecallMessage(topic, recall_handle, self.group)
        answer = await self._client.call(
            address, RequestCode.RECALL_MESSAGE, header, timeout=self._limit(timeout), expected=tuple(STATUS)
        )
        return typed_header(answer, RecallMessageResponse, address).msg_id

    def _pending_changes(self) -> PendingChanges:
        self._check_open()
        if self._changes is None:
            # Imported late: most producers only send, and need neither these modules nor those of `_reading`.
            from duemq._producing.changes import PendingChanges

            self._changes = PendingChanges(self._client, self.group, self._timeout)
        return self._changes

    @property
    def _reading(self) -> GroupApi:
        if self._group_api is None:
            from duemq._consuming.group import GroupApi

            self._group_api = GroupApi(self._client, READING_GROUP, max_reconsume_times=0)
        return self._group_api

    # --- one send -------------------------------------------------------------------------------------------------

    def _send_of(self, message: Message, timeout: float | None) -> _Send:
        return self._make_send(
            message.topic,
            message.body,
            tags=message.tags,
            keys=message.keys,
            properties=message.properties,
            level=message.level,
            delay=message.delay,
            deliver_at=message.deliver_at,
            replace=message.replace,
            sharding_key=message.sharding_key,
            queue=message.queue,
            message_id=message.message_id,
            timeout=timeout,
        )

    def _make_send(
        self,
        topic: str,
        body: bytes | str | None,
        *,
        tags: str | None,
        keys: str | Iterable[str],
        properties: Mapping[str, str] | None,
        level: int | None,
        delay: Span | None,
        deliver_at: Time | None,
        replace: bool,
        sharding_key: str | None,
        queue: MessageQueue | None,
        message_id: str | None,
        timeout: float | None,
    ) -> _Send:
        """Check the arguments of a send. Raises ArgumentError, ClosedError."""
        unique_keys = self._check_open()
        begun = asyncio.get_running_loop().time()
        if level is None and delay is None and deliver_at is None and not replace:
            spec = AT_ONCE
        else:
            spec = read_delay_spec(level, delay, deliver_at, replaces=replace)
        if not isinstance(keys, str | tuple):
            keys = tuple(keys)
        if body is None:
            raise ArgumentError("give a body, or a Message alone")
        choose = self._sender.chooser(topic, sharding_key, queue, one_key(keys) if replace else None)
        message = prepare(
            topic,
            body,
            tags,
            keys,
            properties,
            message_id=message_id or unique_keys.make(),
            max_body_bytes=self._max_body_bytes,
            sharding_key=sharding_key,
        )
        return _Send(message, spec, choose, begun, self._timeout if timeout is None else checks.check_timeout(timeout))

    async def _deliver(self, send: _Send, retries: int | None) -> SendResult:
        size, deadline = send.size, send.begun + send.timeout
        if not self._window.try_enter(size):
            await self._sender.enter(size, deadline, send.timeout)
        try:
            message = send.message
            if self._is_compressed(message):
                message = await compressed(message, self._compress_from_bytes)
            return await self._sender.send(message, send.choose, send.spec, send.begun, deadline, send.timeout, retries)
        finally:
            self._window.leave(size)

    async def _deliver_oneway(self, send: _Send) -> str:
        size = send.size
        await self._sender.enter(size, send.begun + send.timeout, send.timeout)
        try:
            message = await compressed(send.message, self._compress_from_bytes)
            return await self._sender.send_oneway(message, send.choose, send.spec, send.begun, send.timeout)
        finally:
            self._window.leave(size)

    def _is_compressed(self, message: Outgoing) -> bool:
        return self._compress_from_bytes is not None and len(message.body) >= self._compress_from_bytes

    def _many(self, retries: int | None, timeout: float | None, *, gives_up: bool) -> Many:
        self._check_open()
        return Many(
            self._sender,
            self._prepare_job,
            self._send_job,
            self._limit(timeout),
            retries,
            self._max_body_bytes,
            self._max_in_flight,
            self._hooks,
            gives_up=gives_up,
        )

    def _prepare_job(self, message: Message) -> Job:
        send = self._send_of(message, None)
        return Job(message, send.message, send.spec, send.choose, send.begun, self._is_compressed(send.message))

    async def _send_job(self, job: Job, timeout: float, retries: int | None) -> SendResult:
        message = job.outgoing
        if job.is_compressed:
            message = await compressed(message, self._compress_from_bytes)
        # The wait for a place in the window does not count against the message's time-out.
        deadline = asyncio.get_running_loop().time() + timeout
        return await self._sender.send(message, job.choose, job.spec, job.begun, deadline, timeout, retries)

    def _prepare(self, message: Message) -> Outgoing:
        unique_keys = self._check_open()
        return prepare(
            message.topic,
            message.body,
            message.tags,
            message.keys,
            message.properties,
            message_id=message.message_id or unique_keys.make(),
            max_body_bytes=self._max_body_bytes,
            sharding_key=message.sharding_key,
        )

    def _limit(self, timeout: float | None) -> float:
        """The time limit of a call, in seconds. Raises ArgumentError."""
        return self._timeout if timeout is None else checks.check_timeout(timeout)

    def _check_open(self) -> UniqueKeys:
        """Return the maker of message ids. Raises ClosedError, and ArgumentError in an event loop other than that of
        `start`."""
        if self._closed or self._keys is None:
            raise ClosedError("the producer is closed" if self._closed else "start the producer first: async with ...")
        checks.check_loop(self._loop, "producer")
        return self._keys

    def _heartbeat(self, client_id: str) -> HeartbeatData:
        return HeartbeatData(client_id=client_id, producer_data_set=[ProducerData(self.group)], consumer_data_set=[])


def _message_of(
    topic: str | Message,
    body: bytes | str | None,
    *,
    tags: str | None,
    keys: str | Iterable[str],
    properties: Mapping[str, str] | None,
    level: int | None,
    delay: Span | None,
    deliver_at: Time | None,
    replace: bool,
    sharding_key: str | None,
    queue: MessageQueue | None,
    message_id: str | None,
) -> Message:
    """Return the arguments of a send as a Message. Raises ArgumentError if there is no body, and if a Message came with
    other arguments that describe a message."""
    if isinstance(topic, Message):
        others = (body, tags, keys, properties, level, delay, deliver_at, replace, sharding_key, queue, message_id)
        if any(each is not None and each is not False and each != () for each in others):
            raise ArgumentError("give a Message alone: it has its own body, delay and other fields")
        return topic
    if body is None:
        raise ArgumentError("give a body, or a Message alone")
    return Message(
        topic,
        body,
        tags=tags,
        keys=keys if isinstance(keys, str) else tuple(keys),
        properties=properties or {},
        level=level,
        delay=delay,
        deliver_at=deliver_at,
        replace=replace,
        sharding_key=sharding_key,
        queue=queue,
        message_id=message_id,
    )
