"""The producer: sends messages, now or due later.

A send tries again at another broker where that may help, as RocketMQ's synchronous send does. After a timeout or a lost
connection the first try may have been stored all the same: messages are delivered at least once, and the two copies
have the same message id.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Iterable, Mapping
from types import TracebackType
from typing import Final, Self, TypeVar

from duemq._consuming.group import GroupApi
from duemq._consuming.subscription import ALL_TAGS, make_subscription
from duemq._net.client import Client, typed_body, typed_header
from duemq._net.connection import Codec
from duemq._net.id_brokers import is_of_none
from duemq._net.keys import signer_of
from duemq._net.routes import AUTO_CREATE_QUEUES, AUTO_CREATE_TOPIC, RoundRobin, Route
from duemq._producing.delay import DelaySpec, Plan, make_plan, read_delay_spec
from duemq._producing.delay_tables import DelayTables
from duemq._producing.outgoing import Outgoing, compressed, one_key, prepare
from duemq._producing.unique_keys import UniqueKeys
from duemq._values import checks
from duemq._values.intervals import Intervals
from duemq._values.times import Clock, Span, Time, now_ms
from duemq.errors import (
    ArgumentError,
    BusyError,
    ClosedError,
    ConnectError,
    ConnectionLostError,
    DueMQError,
    NoRouteError,
    NotSupportedError,
    PeerError,
    RequestTimeoutError,
    TopicNotFoundError,
    UnavailableError,
)
from duemq.messages import CancelResult, Message, MessageQueue, SendResult, SendStatus
from duemq.protocol.codes import RequestCode, ResponseCode
from duemq.protocol.errors import RemoteProtocolError
from duemq.protocol.frames.command import Command
from duemq.protocol.records import batch
from duemq.protocol.records.properties import UNIQ_KEY, java_hash
from duemq.protocol.requests import recall_handle as recall_handles
from duemq.protocol.requests.bodies import CancelledMessage, HeartbeatData, ProducerData
from duemq.protocol.requests.headers import (
    CancelMessage,
    OffsetResponse,
    QueueOfTopic,
    RecallMessage,
    RecallMessageResponse,
    SendMessageResponse,
    SendMessageV2,
    UnregisterClient,
)

T = TypeVar("T")

_STATUS: Final = {
    ResponseCode.SUCCESS: SendStatus.SEND_OK,
    ResponseCode.FLUSH_DISK_TIMEOUT: SendStatus.FLUSH_DISK_TIMEOUT,
    ResponseCode.FLUSH_SLAVE_TIMEOUT: SendStatus.FLUSH_SLAVE_TIMEOUT,
    ResponseCode.SLAVE_NOT_AVAILABLE: SendStatus.SLAVE_NOT_AVAILABLE,
}

_NOT_STORED: Final = (ConnectError, UnavailableError, BusyError, NoRouteError)
"""Failures after which a message is certainly not stored."""

LONGEST_PAUSE: Final = 1.0
"""The longest pause between two tries of a send, in seconds."""

NAME_SERVERS: Final = "the name servers"

READING_GROUP: Final = "TOOLS_CONSUMER"
"""As whom a producer reads what it has sent: the consumer group that RocketMQ's brokers have for tools."""

MOST_CANCELLED: Final = 1000
"""Most message ids that a broker takes in one request."""

Choose = Callable[[Route, str | None], MessageQueue]
"""Chooses a queue of a route; the second argument is the broker that just failed, if any."""

log = logging.getLogger("duemq.producer")


class Producer:
    """Sends messages.

        async with Producer("127.0.0.1:9876") as producer:
            await producer.send("orders", b"hello")
            await producer.send("orders", b"remember", delay="1h30m")

    One producer serves any number of tasks at once. Arguments:

    `nameserver`: "host:port" of the name server, several joined by ;.
    `group`: name of the producer group, as operators see it.
    `codec`: of the request headers; "auto" is MessagePack with a duemq broker and JSON with any other.
    `timeout`: for each send with all its tries, in seconds.
    `retries`: how often a send is tried again after a failure at which the message may have been stored. Failures at
    which it was not, such as a broker that is being restarted, are tried again until the time is up. Another broker is
    tried at once, the same one after a pause that grows to a second. 0: one try only, whatever happens.
    `compress_from_bytes`: bodies of at least this size are compressed with zlib; None: never.
    `max_body_bytes`: larger bodies are refused; the broker has its own limit, 4 MiB by default.
    `access_key`, `secret_key`: of the account that signs the requests, where brokers have access control.
    """

    def __init__(
        self,
        nameserver: str = "127.0.0.1:9876",
        *,
        group: str = "duemq",
        codec: Codec = "auto",
        timeout: float = 10.0,
        retries: int = 2,
        compress_from_bytes: int | None = 4096,
        max_body_bytes: int = checks.MAX_BODY_BYTES,
        access_key: str | None = None,
        secret_key: str | None = None,
        _intervals: Intervals | None = None,
        _clock: Clock = now_ms,
    ) -> None:
        checks.check_group(group)
        self.group = group
        self._timeout = _check_timeout(timeout)
        self._retries = retries
        self._compress_from_bytes = compress_from_bytes
        self._max_body_bytes = max_body_bytes
        self._clock = _clock
        self._client = Client(
            nameserver,
            codec=codec,
            heartbeat=self._heartbeat,
            intervals=_intervals,
            signer=signer_of(access_key, secret_key),
        )
        self._reading = GroupApi(self._client, READING_GROUP, max_reconsume_times=0)
        self._round_robin: dict[str, RoundRobin] = {}
        self._delay_tables = DelayTables(self._client)
        self._keys: UniqueKeys | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._failing: set[str] = set()
        """Addresses to which sends fail now, each of which is logged."""
        self._closed = False

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def start(self) -> None:
        """Connect to a name server. Raises ConnectError where none answers."""
        if self._closed:
            raise ClosedError("the producer is closed")
        if self._keys is None:
            # In a thread: it asks the resolver for this host's address, which may take its time.
            keys = await asyncio.to_thread(UniqueKeys)
            await self._client.start()
            self._loop, self._keys = asyncio.get_running_loop(), keys

    async def close(self) -> None:
        """Say goodbye to the brokers and close the connections; sends under way fail. Does not raise."""
        if self._closed:
            return
        self._closed = True
        header = UnregisterClient(client_id=self._client.client_id, producer_group=self.group)
        for address in self._client.broker_addresses:
            try:
                await self._client.call(address, RequestCode.UNREGISTER_CLIENT, header, timeout=1.0)
            except DueMQError as error:
                log.debug("no goodbye: %s", error)
        await self._client.close()

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
    ) -> SendResult:
        """Send a message and wait until the broker has stored it.

        `body`: not empty; text is sent as UTF-8. `tags`: one tag, by which consumers may filter. `keys`: under which
        the broker indexes the message. `properties`: the caller's own, for consumers to read.

        When it is delivered: at once, or with one of
        `level`: after the delay of that level of the topic, or of the broker where the topic has no levels of its own
        (1: 1 s, 2: 5 s, 3: 10 s ... by default);
        `delay`: so long after the call: seconds, a timedelta, or text such as "1h30m". To the millisecond, by the
        broker's clock, whatever this machine's says;
        `deliver_at`: at that time: a datetime with a time zone, or seconds since the epoch. To the millisecond, by the
        broker's clock; a time that has passed means at once.
        The broker is asked what delays it has, and whether the topic has its own. A delay that equals a level is sent
        as that level. Any other needs a broker with timers (duemq, or RocketMQ from 5.0 on); with an older one
        DelayError is raised, since it would deliver the message at once.

        `replace`: the message takes the place of the one that waits with this option for the same topic and key, of
        which `keys` has to have exactly one: only the last one is delivered, at its own time. So a deadline moves, or
        a burst of changes becomes one message. One that is delivered already stays so. Needs a duemq broker, and goes
        to the same queue for the same key, unless another one is chosen; the others must use that one, too.

        Which queue: all in turn, or with `sharding_key` always the same for the same key (RocketMQ's hash of it, so a
        Java producer chooses the same), or `queue` itself. A fixed queue is not given up for another in a retry.

        `message_id`: from `new_message_id`, for one who notes it before the send: with `stored` it is found out later
        whether a send that failed was stored all the same. None: a new one. `retries`: for this send; 0 for one that
        must not be stored twice.

        `timeout`: with all tries, in seconds.

        Raises ArgumentError, ClosedError; NoRouteError where no broker has the topic or creates it; NotSupportedError
        for `replace` at a broker that is no duemq; the last try's BrokerError, ConnectError, ConnectionLostError or
        RequestTimeoutError.
        """
        begun = asyncio.get_running_loop().time()
        spec = read_delay_spec(level, delay, deliver_at, replaces=replace)
        keys = keys if isinstance(keys, str) else tuple(keys)
        choose = self._chooser(topic, sharding_key, queue, one_key(keys) if replace else None)
        message = await self._prepare(topic, body, tags, keys, properties, sharding_key, message_id)
        limit = self._limit(timeout)

        async def attempt(route: Route, chosen: MessageQueue) -> SendResult:
            address, plan = await self._plan(route, chosen, spec, begun)
            answer = await self._client.call(
                address,
                RequestCode.SEND_MESSAGE_V2,
                self._header(message, chosen, plan),
                message.body,
                timeout=limit,
                expected=_STATUS,
            )
            return _result(answer, address, chosen, message.message_id, plan)

        return await self._try(topic, choose, attempt, limit, retries)

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
    ) -> str:
        """Send a message without waiting for the broker: nobody tells whether it was stored. Gives the message id.

        Arguments and errors as of `send`; there is one try only.
        """
        begun = asyncio.get_running_loop().time()
        spec = read_delay_spec(level, delay, deliver_at, replaces=replace)
        keys = keys if isinstance(keys, str) else tuple(keys)
        choose = self._chooser(topic, sharding_key, queue, one_key(keys) if replace else None)
        message = await self._prepare(topic, body, tags, keys, properties, sharding_key, None)
        limit = self._limit(timeout)

        async def attempt(route: Route, chosen: MessageQueue) -> str:
            address, plan = await self._plan(route, chosen, spec, begun)
            connection = await self._client.broker(address)
            header = self._header(message, chosen, plan)
            await connection.send_oneway(RequestCode.SEND_MESSAGE_V2, header, message.body, timeout=limit)
            return message.message_id

        return await self._try(topic, choose, attempt, limit, retries=0)

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
        and errors as of `send`.
        """
        given = list(messages)
        prepared = [self._prepare_for_batch(each) for each in given]
        if len({message.topic for message in prepared}) != 1:
            raise ArgumentError("a batch has at least one message, and all are of one topic")
        if queue is None and len({each.sharding_key for each in given}) != 1:
            raise ArgumentError("a batch lies in one queue: give messages with one sharding key, or `queue`")
        choose = self._chooser(prepared[0].topic, given[0].sharding_key if queue is None else None, queue)
        topic = prepared[0].topic
        body = batch.encode((0, message.body, message.property_text({})) for message in prepared)
        checks.check_body(body, self._max_body_bytes)
        whole = Outgoing(topic, body, 0, {}, "")
        limit = self._limit(timeout)

        async def attempt(route: Route, chosen: MessageQueue) -> list[SendResult]:
            address = _primary(route, chosen)
            header = self._header(whole, chosen, Plan({}), batch=True)
            answer = await self._client.call(
                address, RequestCode.SEND_BATCH_MESSAGE, header, body, timeout=limit, expected=_STATUS
            )
            return _batch_results(answer, address, chosen, prepared)

        return await self._try(topic, choose, attempt, limit, retries)

    # --- what was stored ------------------------------------------------------------------------------------------

    def new_message_id(self) -> str:
        """A message id for a send that is still to come. Raises ClosedError."""
        return self._check_open().make()

    async def choose_queue(self, topic: str, sharding_key: str | None = None) -> MessageQueue:
        """The queue that a send to the topic would choose, for one who notes it before the send. Raises ClosedError,
        NoRouteError, ConnectError, ConnectionLostError and RequestTimeoutError."""
        self._check_open()
        choose = self._chooser(topic, sharding_key, None)
        return choose(await self._client.routes.find_to_send(topic), None)

    async def end_offset(self, queue: MessageQueue) -> int:
        """The offset that the queue's next message will get; 0 for a topic that its broker does not have yet. Raises as
        `choose_queue` does, and BrokerError."""
        self._check_open()
        try:
            return await self._reading.end_offset(queue)
        except NoRouteError as error:
            # A name server forgets the topics of a broker that is away. Only the broker can say that there is none.
            address = _primary(await self._client.routes.find_to_send(queue.topic), queue)
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

    # --- messages that wait ---------------------------------------------------------------------------------------

    async def recall(self, topic: str, recall_handle: str, *, timeout: float | None = None) -> str:
        """Cancel a message that waits for its time, by the handle that its `SendResult` has; gives its message id.
        Once more is no error with a duemq broker. With RocketMQ's from 5.3 on, which does not look whether there is
        such a message; with its recallMessageEnable=true.

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
        address = _primary(route, MessageQueue(topic, handle.broker_name, 0))
        header = RecallMessage(topic, recall_handle, self.group)
        answer = await self._client.call(
            address, RequestCode.RECALL_MESSAGE, header, timeout=self._limit(timeout), expected=_STATUS
        )
        return typed_header(answer, RecallMessageResponse, address).msg_id

    async def cancel(
        self, offset_message_ids: Iterable[str], *, timeout: float | None = None
    ) -> dict[str, CancelResult]:
        """Cancel messages that wait, for a time or a delay level, by the ids that their broker gave them
        (`SendResult.offset_message_id`); gives what became of each. All brokers that the name servers know are asked;
        duemq's answer.

        Raises ArgumentError, ClosedError, NotSupportedError where no broker is a duemq, NoPermissionError where
        recallMessageEnable=false, ConnectError, ConnectionLostError and RequestTimeoutError. `timeout`: of each
        request, in seconds.
        """
        self._check_open()
        ids = list(dict.fromkeys(offset_message_ids))
        for each in ids:
            checks.check_offset_message_id(each)
        if not ids:
            return {}
        addresses = await self._client.all_brokers()
        found = await asyncio.gather(
            *(self._cancel_at(address, ids, self._limit(timeout)) for address in addresses), return_exceptions=True
        )
        results = dict.fromkeys(ids, CancelResult.NEVER_EXISTED)
        for answer in found:
            if not isinstance(answer, BaseException):
                results.update(answer)
        errors = [error for error in found if isinstance(error, BaseException)]
        if len(errors) < len(found):
            # Apache's brokers have none of them; one that cannot be asked may have those that nobody else has.
            errors = [error for error in errors if not isinstance(error, NotSupportedError)]
        if errors and CancelResult.NEVER_EXISTED in results.values():
            raise errors[0]
        for each, result in results.items():
            if result is CancelResult.NEVER_EXISTED and is_of_none(each, addresses):
                results[each] = CancelResult.BROKER_UNKNOWN
        return results

    async def _cancel_at(self, address: str, ids: list[str], timeout: float) -> dict[str, CancelResult]:
        """What became of those messages that are at one broker."""
        results = {}
        for first in range(0, len(ids), MOST_CANCELLED):
            header = CancelMessage(",".join(ids[first : first + MOST_CANCELLED]))
            answer = await self._client.call(
                address, RequestCode.CANCEL_MESSAGE, header, timeout=timeout, expected=_STATUS
            )
            for each in typed_body(answer, list[CancelledMessage], address):
                if each.result != CancelResult.NEVER_EXISTED:
                    results[each.msg_id] = CancelResult(each.result)
        return results

    # --- one send -------------------------------------------------------------------------------------------------

    async def _try(
        self,
        topic: str,
        choose: Choose,
        attempt: Callable[[Route, MessageQueue], Awaitable[T]],
        timeout: float,
        retries: int | None = None,
    ) -> T:
        tries = 1 + (self._retries if retries is None else retries)
        address, failed_broker = NAME_SERVERS, None
        failures = counted = 0
        failed: set[str] = set()
        last: DueMQError | None = None
        try:
            async with asyncio.timeout(timeout):
                while True:
                    try:
                        address = NAME_SERVERS
                        route = await self._client.routes.find_to_send(topic)
                        chosen = choose(route, failed_broker)
                        if chosen.broker not in failed:
                            address, failed_broker = _primary(route, chosen), chosen.broker
                            last = None
                            result = await attempt(route, chosen)
                            if self._failing:
                                self._going_on(address)
                            return result
                    except DueMQError as error:
                        counted += not isinstance(error, _NOT_STORED)
                        if tries in (1, counted) or not self._may_pass(error, topic):
                            raise
                        failures += 1
                        self._complain(address, error)
                        last = error
                        if failed_broker is not None:
                            failed.add(failed_broker)
                        if failures == 1 and isinstance(error, ConnectionLostError):
                            # An idle connection that was cut on the way: a new one will do.
                            failed.clear()
                            continue
                        if address is not NAME_SERVERS:
                            continue
                    pause = min(self._client.intervals.pause(failures), LONGEST_PAUSE) * random.uniform(0.5, 1.0)
                    await asyncio.sleep(pause)
                    failed.clear()
        except TimeoutError as error:
            if isinstance(error, DueMQError):
                raise
            if last is None:
                raise RequestTimeoutError(address, "a send", timeout) from None
            last.add_note(f"the send was tried {failures} times within {timeout:g} s")
            raise last from None

    def _may_pass(self, error: DueMQError, topic: str) -> bool:
        """Whether a send that failed may succeed a little later. A name server that has just started does not know the
        topics of its brokers yet."""
        return error.retriable or (isinstance(error, NoRouteError) and self._client.routes.was_found(topic))

    def _complain(self, address: str, error: DueMQError) -> None:
        """Log that sends to an address fail: once until one succeeds."""
        if address not in self._failing:
            self._failing.add(address)
            log.warning("sends to %s fail and are tried again: %s", address, error)

    def _going_on(self, address: str) -> None:
        """Log that sends to an address succeed again."""
        self._failing.discard(NAME_SERVERS)
        if address in self._failing:
            self._failing.discard(address)
            log.warning("sends to %s succeed again", address)

    def _limit(self, timeout: float | None) -> float:
        """The time limit of a call, in seconds. Raises ArgumentError."""
        return self._timeout if timeout is None else _check_timeout(timeout)

    async def _prepare(
        self,
        topic: str,
        body: bytes | str,
        tags: str | None,
        keys: str | Iterable[str],
        properties: Mapping[str, str] | None,
        sharding_key: str | None,
        message_id: str | None,
    ) -> Outgoing:
        unique_keys = self._check_open()
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
        return await compressed(message, self._compress_from_bytes)

    def _prepare_for_batch(self, message: Message) -> Outgoing:
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

    def _check_open(self) -> UniqueKeys:
        """What makes message ids. Raises ClosedError, and ArgumentError in another event loop than that of `start`."""
        if self._closed or self._keys is None:
            raise ClosedError("the producer is closed" if self._closed else "start the producer first: async with ...")
        if asyncio.get_running_loop() is not self._loop:
            raise ArgumentError("the producer was started in another event loop; use one producer for each loop")
        return self._keys

    def _chooser(
        self, topic: str, sharding_key: str | None, queue: MessageQueue | None, replaced_key: str | None = None
    ) -> Choose:
        if queue is not None:
            if sharding_key is not None or queue.topic != topic:
                raise ArgumentError("`queue` has to be of the topic, and goes without a sharding key")
            return lambda route, failed: queue
        sharding_key = sharding_key if sharding_key is not None else replaced_key
        if sharding_key is not None:
            # As RocketMQ's SelectMessageQueueByHash: the remainder's absolute value, with Java's sign of a remainder.
            number = abs(java_hash(sharding_key))
            return lambda route, failed: route.write_queues[number % len(route.write_queues)]
        turn = self._round_robin.setdefault(topic, RoundRobin())
        return lambda route, failed: turn.choose(route.write_queues, failed)

    async def _plan(self, route: Route, queue: MessageQueue, spec: DelaySpec, begun: float) -> tuple[str, Plan]:
        """`begun`: when the send was called, by the loop's clock."""
        address = _primary(route, queue)
        if spec.is_plain:
            return address, Plan({})
        delays = await self._delay_tables.find(address, queue.topic, spec)
        elapsed_ms = int((asyncio.get_running_loop().time() - begun) * 1000)
        return address, make_plan(spec, delays, self._clock(), address, elapsed_ms)

    def _header(self, message: Outgoing, queue: MessageQueue, plan: Plan, *, batch: bool = False) -> SendMessageV2:
        return SendMessageV2(
            producer_group=self.group,
            topic=message.topic,
            default_topic=AUTO_CREATE_TOPIC,
            default_topic_queue_nums=AUTO_CREATE_QUEUES,
            queue_id=queue.queue_id,
            sys_flag=message.sys_flag,
            born_timestamp=self._clock(),
            flag=0,
            properties=message.property_text(plan.properties),
            reconsume_times=0,
            unit_mode=False,
            batch=batch,
        )

    def _heartbeat(self, client_id: str) -> HeartbeatData:
        return HeartbeatData(client_id=client_id, producer_data_set=[ProducerData(self.group)], consumer_data_set=[])


def _check_timeout(timeout: float) -> float:
    if not timeout > 0:
        raise ArgumentError(f"timeout={timeout!r}: give seconds, more than 0")
    return timeout


def _primary(route: Route, queue: MessageQueue) -> str:
    address = route.primary(queue.broker)
    if address is None:
        raise NoRouteError(queue.topic, f"the broker {queue.broker} has no primary now")
    return address


def _result(answer: Command, address: str, queue: MessageQueue, message_id: str, plan: Plan) -> SendResult:
    header = typed_header(answer, SendMessageResponse, address)
    return SendResult(
        status=_STATUS[ResponseCode(answer.code)],
        message_id=message_id,
        offset_message_id=header.msg_id,
        queue=queue._replace(queue_id=header.queue_id),
        queue_offset=header.queue_offset,
        due_time_ms=_due_time(header.recall_handle) or plan.due_time_ms,
        recall_handle=header.recall_handle,
    )


def _due_time(handle: str | None) -> int | None:
    """When a message is due by the clock of a duemq broker, which its recall handle tells."""
    try:
        place = recall_handles.decode(handle).place if handle is not None else None
    except RemoteProtocolError:
        return None
    return place[1] if place is not None else None


def _batch_results(answer: Command, address: str, queue: MessageQueue, sent: list[Outgoing]) -> list[SendResult]:
    """One result per message: the broker gives all their ids, and the queue offset of the first."""
    header = typed_header(answer, SendMessageResponse, address)
    ids = header.msg_id.split(",")
    return [
        SendResult(
            status=_STATUS[ResponseCode(answer.code)],
            message_id=message.message_id,
            offset_message_id=ids[number] if len(ids) == len(sent) else header.msg_id,
            queue=queue._replace(queue_id=header.queue_id),
            queue_offset=header.queue_offset + number,
        )
        for number, message in enumerate(sent)
    ]
