"""The producer: sends messages, now or due later.

A send tries again at another broker where that may help, as RocketMQ's synchronous send does. After a timeout or a lost
connection the first try may have been stored all the same: messages are delivered at least once, and the two copies
have the same message id.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterable, Iterable, Mapping, Sequence
from contextlib import aclosing
from datetime import tzinfo
from types import TracebackType
from typing import TYPE_CHECKING, Final, NamedTuple, Self, overload

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
"""As whom a producer reads what it has sent: the consumer group that RocketMQ's brokers have for tools."""

LONGEST_PAUSE: Final = Retries().longest_pause

log = logging.getLogger("duemq.producer")


class _Send(NamedTuple):
    """One send, checked."""

    message: Outgoing
    spec: DelaySpec
    choose: Choose
    begun: float
    """When it was called, by the loop's clock: time-out and delay count from then."""
    timeout: float

    @property
    def size(self) -> int:
        """The room that it takes in the window, in bytes."""
        return len(self.message.body) + OVERHEAD_BYTES


class Producer(Changing):
    """Sends messages.

        async with Producer("127.0.0.1:9876") as producer:
            await producer.send("orders", b"hello")
            result = await producer.send("orders", b"remember", delay="1h30m")
            await producer.reschedule(result.handle, delay="2h")

    One producer serves any number of tasks at once, in one event loop. Arguments:

    `nameserver`: "host:port" of the name server, several joined by ;.
    `group`: name of the producer group, as operators see it.
    `codec`: of the request headers; "auto" is MessagePack with a duemq broker and JSON with any other.
    `timeout`: for each send with all its tries, in seconds.
    `retries`: how often a send is tried again after a failure at which the message may have been stored, or a `Retries`
        with pauses of its own. Failures at which it was not, such as a broker that is being restarted, are tried again
        until the time is up. 0: one try only, whatever happens.
    `max_in_flight`, `max_in_flight_bytes`: most sends on their way, and most bytes of theirs; a further send waits
        within its time-out.
    `compress_from_bytes`: bodies of at least this size are compressed with zlib; None: never.
    `max_body_bytes`: larger bodies are refused; the broker has its own limit, 4 MiB by default.
    `connect_timeout`: for a connection, in seconds.
    `access_key`, `secret_key`: of the account that signs the requests, where brokers have access control.
    `tls`: True for TLS with certificates that the machine trusts, or an `ssl.SSLContext`, such as
        `ssl.create_default_context(cafile="ca.pem")`.
    `interceptors`: what sees each message before and after it is sent, see `duemq.interceptors`.
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
        if max_in_flight < 1 or max_in_flight_bytes < 1:
            raise ArgumentError(
                f"max_in_flight={max_in_flight!r}, max_in_flight_bytes={max_in_flight_bytes!r}: give 1 or more"
            )
        self.group = group
        self._timeout = checks.check_timeout(timeout)
        self._compress_from_bytes = compress_from_bytes
        self._max_body_bytes = max_body_bytes
        self._max_in_flight = max_in_flight
        intervals = with_timeouts(_intervals, checks.check_timeout(connect_timeout))
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
        self._window = Window(max_in_flight, max_in_flight_bytes)
        self._sender = Sender(self._client, group, self._window, retries, _clock)
        self._changes: PendingChanges | None = None
        self._group_api: GroupApi | None = None
        self._hooks: SendHooks | None = None
        if interceptors:
            # Imported only where it is used, since most producers have none.
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
        """Connect to a name server. Raises ConnectError where none answers; it can be tried again then."""
        if self._closed:
            raise ClosedError("the producer is closed")
        async with self._starting:
            if self._keys is None:
                # In a thread: it asks the resolver for this host's address, which may take its time.
                keys = await asyncio.to_thread(UniqueKeys)
                await self._client.start()
                if self._closed:
                    await self._client.close()
                    raise ClosedError("the producer was closed while it started")
                self._loop, self._keys = asyncio.get_running_loop(), keys

    async def flush(self) -> None:
        """Wait until no send is on its way, those that begin meanwhile included. Does not raise: what became of a send
        is told where it was called."""
        await self._window.empty()

    async def close(self, timeout: float | None = None) -> None:
        """Wait for the sends on their way, take no more, and close the connections. Does not raise.

        `timeout`: how long to wait for them, in seconds, by default as long as for a send; what is not over then fails
        with ConnectionLostError.
        """
        if self._closed:
            return
        self._closed = True
        try:
            try:
                async with asyncio.timeout(self._timeout if timeout is None else timeout):
                    await self._window.empty()
            except TimeoutError:
                log.warning("the producer is closed with %d sends on their way", self._window.count)
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

        `body`: not empty; text is sent as UTF-8. `tags`: one tag, by which consumers may filter. `keys`: under which
        the broker indexes the message. `properties`: the caller's own, for consumers to read.

        When it is delivered: at once, or with one of
        `delay`: so long after the call: seconds, a timedelta, or text such as "1h30m". To the millisecond, by the
        broker's clock, whatever this machine's says;
        `deliver_at`: at that time: a datetime with a time zone, or seconds since the epoch. To the millisecond, by the
        broker's clock; a time that has passed means at once;
        `level`: after the delay of that level of the topic, or of the broker where the topic has no levels of its own
        (1: 1 s, 2: 5 s, 3: 10 s ... by default).
        The broker is asked what delays it has. Those with timers (duemq, RocketMQ from 5.0 on) keep any. With an older
        one, a delay that equals a level is sent as that level, and for any other DelayError is raised, since the broker
        would deliver the message at once. RocketMQ's timers have a precision of a second: up to that, it is late.

        The result of a delayed send has a `handle`, with which to `cancel` or `reschedule` the message, or to
        `deliver_now`.

        `replace`: the message takes the place of the one that waits with this option for the same topic and key, of
        which `keys` has to have exactly one: only the last one is delivered, at its own time. So a deadline moves, or
        a burst of changes becomes one message. One that is delivered already stays so. Needs a duemq broker, and goes
        to the same queue for the same key, unless another one is chosen; the others must use that one, too.

        Which queue: all in turn, or with `sharding_key` always the same for the same key (RocketMQ's hash of it, so a
        Java producer chooses the same), or `queue` itself. A fixed queue is not given up for another in a retry.
        Messages of one queue are stored in the order of their sends, if each send waits for the one before, or by
        `send_many`.

        `message_id`: from `new_message_id`, for one who notes it before the send: with `stored` it is found out later
        whether a send that failed was stored all the same. None: a new one. `retries`: for this send; 0 for one that
        must not be stored twice.

        `timeout`: with all tries, in seconds, and with the wait for its turn where `max_in_flight` sends are on their
        way.

        Raises ArgumentError, ClosedError; NoRouteError where no broker has the topic or creates it; NotSupportedError
        for `replace` at a broker that is no duemq; the last try's BrokerError, ConnectError, ConnectionLostError or
        RequestTimeoutError. `maybe_stored` of the error tells whether the message may be stored all the same.
        """
        if isinstance(topic, Message):
            _check_alone(
                body, tags, keys, properties, level, delay, deliver_at, replace, sharding_key, queue, message_id
            )
        if self._hooks is not None:
            message = _message_of(
                topic, body, tags, keys, properties, level, delay, deliver_at, replace, sharding_key, queue, message_id
            )
            return await self._hooks.around_send(
                message, lambda message: self._deliver(self._send_of(message, timeout), retries)
            )
        if isinstance(topic, Message):
            send = self._send_of(topic, timeout)
        else:
            send = self._make_send(
                topic,
                body,
                tags,
                keys,
                properties,
                level,
                delay,
                deliver_at,
                replace,
                sharding_key,
                queue,
                message_id,
                timeout,
            )
        return await self._deliver(send, retries)

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
        """Send a message without waiting for the broker: whether it is stored remains unknown. Returns the message id.

        Arguments and errors as of `send`; there is one try only.
        """
        if isinstance(topic, Message):
            _check_alone(body, tags, keys, properties, level, delay, deliver_at, replace, sharding_key, queue, None)
        if self._hooks is not None:
            given = _message_of(
                topic, body, tags, keys, properties, level, delay, deliver_at, replace, sharding_key, queue, None
            )
            return await self._hooks.around_send(
                given, lambda message: self._deliver_oneway(self._send_of(message, timeout))
            )
        if isinstance(topic, Message):
            send = self._send_of(topic, timeout)
        else:
            send = self._make_send(
                topic,
                body,
                tags,
                keys,
                properties,
                level,
                delay,
                deliver_at,
                replace,
                sharding_key,
                queue,
                None,
                timeout,
            )
        return await self._deliver_oneway(send)

    async def send_many(
        self,
        messages: Iterable[Message] | AsyncIterable[Message],
        *,
        retries: int | None = None,
        timeout: float | None = None,
    ) -> list[SendResult]:
        """Send messages of any topics, and return their results in the same order.

        They go in batches, per topic and queue, several on their way at once, with at most `max_in_flight` messages and
        `max_in_flight_bytes` taken from the source ahead of the broker. Delayed messages, and those that are to be
        compressed, are sends of their own. Messages with the same `sharding_key`, or for the same `queue`, are stored
        in the order given, unless they have delays.

        If all messages are stored, their results are returned. Otherwise SendManyError is raised when nothing is on its
        way any more; it tells which are stored, which are not, and of which that is not known. A message that is
        refused for itself (ArgumentError, MessageRejectedError, NotSupportedError) does not keep others from being
        sent. After any other failure no more messages are taken from the source: those behind are not sent, and not
        among the error's outcomes. What the source raises is raised when the messages before are sent.

        The results are kept until the end, some 400 bytes each. For a source without an end use `send_each`.

        `retries`, `timeout`: of each message, or of its batch, as of `send`. Raises SendManyError, ClosedError;
        ArgumentError if the source gives something that is no Message.
        """
        return await self._many(retries, timeout, gives_up=True).collect(messages)

    async def send_each(
        self,
        messages: Iterable[Message] | AsyncIterable[Message],
        *,
        retries: int | None = None,
        timeout: float | None = None,
    ) -> AsyncGenerator[SendOutcome, None]:
        """Send messages as `send_many` does, and yield what became of each, in the same order.

            async for outcome in producer.send_each(messages()):
                if outcome.error is not None: ...

        A failure ends nothing. To end early, leave the loop or close the generator: then no more messages are taken,
        and it remains unknown which of those on their way were stored. At most `max_in_flight` messages are taken
        ahead of the loop, so a source may have no end. Raises as `send_many`, but no SendManyError.
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
        """Have the broker deliver a message again and again, until it is removed. It takes the place of the one of this
        topic that has the same name, so a program may say at each start what it wants.

            await producer.schedule("reports", b"nightly", name="nightly", cron="0 3 * * *", zone="Europe/Paris")

        `name`: a text without blanks, the key of each delivered message. One of
        `every`: a time of at least 1 s: seconds, a timedelta, or text such as "1h30m". The first delivery is at
        `start`, or after that time;
        `cron`: five fields, minute to day of the week, or six with the seconds in front, in the time zone `zone`: a
        name such as "Europe/Paris" or a ZoneInfo; UTC by default.
        `start`, `end`: nothing is delivered before the one and after the other: each a datetime with a time zone, or
        seconds since the epoch. `count`: the number of deliveries.

        Each delivery is a message of its own, once, whatever happens to the broker. After an outage the topic's policy
        for catching up decides about missed ones. `Admin.recurring` lists them; `Admin.pause_recurring`,
        `resume_recurring` and `remove_recurring` change them.

        Needs a duemq broker. `tags`, `properties`, `retries`, `timeout` and errors as of `send`; MessageRejectedError
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
        """Send messages of one topic in one request; they are stored all or none, one after the other in one queue.

        Together they must not exceed `max_body_bytes`; they are neither compressed nor delayed, since brokers read a
        batch in no other form. Without `queue` all have the same sharding key, or none. `queue`, `retries`, `timeout`
        and errors as of `send`. To have messages batched without these conditions, use `send_many`.
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
            raise ArgumentError("a message of a batch cannot be delayed; send_many takes delayed ones, too")
        if any(each.replace for each in given):
            raise ArgumentError("a message of a batch cannot replace another")
        prepared = [self._prepare(each) for each in given]
        if len({message.topic for message in prepared}) != 1:
            raise ArgumentError("a batch has at least one message, and all are of one topic")
        bound = {each.queue for each in given} - {None}
        if queue is None and len(bound) == 1 and all(each.queue is not None for each in given):
            (queue,) = bound
        elif bound - {queue}:
            raise ArgumentError("a batch lies in one queue, and its messages have several")
        if queue is None and len({each.sharding_key for each in given}) != 1:
            raise ArgumentError("a batch lies in one queue: give messages with one sharding key, or `queue`")
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
        """A message id for a send that is still to come. Raises ClosedError."""
        return self._check_open().make()

    async def choose_queue(self, topic: str, sharding_key: str | None = None) -> MessageQueue:
        """The queue that a send to the topic would choose, for one who notes it before the send. Raises ClosedError,
        NoRouteError, ConnectError, ConnectionLostError and RequestTimeoutError."""
        self._check_open()
        choose = self._sender.chooser(topic, sharding_key, None)
        return choose(await self._client.routes.find_to_send(topic), None)

    async def end_offset(self, queue: MessageQueue) -> int:
        """The offset that the queue's next message will get; 0 for a topic that its broker does not have yet. Raises as
        `choose_queue` does, and BrokerError."""
        self._check_open()
        try:
            return await self._reading.end_offset(queue)
        except NoRouteError as error:
            # A name server forgets the topics of a broker that is away. Only the broker can say that there is none.
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
        """Which messages with these ids lie in the queue at `from_offset` or behind it, with their offsets there.

        It is asked over the connection by which this producer sends, and brokers answer that in order: what is not
        found was not stored by a send of this producer that is over, and will not be. A message that waits for its time
        is not in its queue yet: `Admin.pending` finds it by its id. Raises as `end_offset` does.
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
                raise PeerError(self._client.broker_addresses[0], f"it gives nothing of {queue} at offset {offset}")
            offset = pulled.next_offset
        return found

    # --- messages that wait: see `Changing` ---------------------------------------------------------------------------

    async def recall(self, topic: str, recall_handle: str, *, timeout: float | None = None) -> str:
        """RocketMQ's own request: cancel a message with a timer by the recall handle that its broker gave; gives its
        message id. `cancel` does so, too, and tells more. Once more is no error with a duemq broker. With RocketMQ's
        from 5.3 on, which does not look whether there is such a message; with its recallMessageEnable=true.

        Raises IllegalOperationError where the message is delivered already or not known, ArgumentError for what is no
        handle of the topic, and what `send` raises; there is one try only.
        """
        self._check_open()
        if not isinstance(recall_handle, str):
            raise ArgumentError(f"recall_handle={recall_handle!r}: only a send to a broker with recall gives a handle")
        try:
            handle = recall_handles.decode(recall_handle)
        except RemoteProtocolError:
            raise ArgumentError(f"{recall_handle!r} is no recall handle") from None
        if handle.topic != topic:
            raise ArgumentError(f"the recall handle is of the topic {handle.topic}, not of {topic}")
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
            # Most producers only send, and need neither these modules nor those of `_reading`.
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
            message.tags,
            message.keys,
            message.properties,
            message.level,
            message.delay,
            message.deliver_at,
            message.replace,
            message.sharding_key,
            message.queue,
            message.message_id,
            timeout,
        )

    def _make_send(
        self,
        topic: str,
        body: bytes | str | None,
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
        """Check a send. Raises ArgumentError, ClosedError."""
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
        # The wait for a place in the window is none of the message's own time.
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
        """Return the maker of ids. Raises ClosedError, and ArgumentError in another event loop than that of `start`."""
        if self._closed or self._keys is None:
            raise ClosedError("the producer is closed" if self._closed else "start the producer first: async with ...")
        if asyncio.get_running_loop() is not self._loop:
            raise ArgumentError("the producer was started in another event loop; use one producer for each loop")
        return self._keys

    def _heartbeat(self, client_id: str) -> HeartbeatData:
        return HeartbeatData(client_id=client_id, producer_data_set=[ProducerData(self.group)], consumer_data_set=[])


def _check_alone(*others: object) -> None:
    """Raise ArgumentError unless a Message is the only one that says what to send."""
    if any(each is not None and each is not False and each != () for each in others):
        raise ArgumentError("a Message goes alone: it has body, delay and all else itself")


def _message_of(
    topic: str | Message,
    body: bytes | str | None,
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
    """The arguments of a send as a Message. Raises ArgumentError if there is no body."""
    if isinstance(topic, Message):
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
