"""Sends one message or one batch: chooses the queue, delays the message as its broker can, and retries the send if that
may help."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Final, TypeVar

from duemq._net import timeouts
from duemq._net.client import Client, typed_header
from duemq._net.connection import ClientConnection
from duemq._net.routes import AUTO_CREATE_QUEUES, AUTO_CREATE_TOPIC, RoundRobin, Route
from duemq._producing.delay import PLAIN, DelayPlan, DelaySpec, make_plan
from duemq._producing.delay_tables import DelayTables
from duemq._producing.outgoing import Outgoing
from duemq._producing.window import Window
from duemq._values.retries import Retries
from duemq._values.times import Clock
from duemq.errors import (
    ArgumentError,
    BrokerError,
    BrokerFailureError,
    BusyError,
    ConnectError,
    ConnectionLostError,
    DueMQError,
    NoRouteError,
    PeerError,
    RequestTimeoutError,
    UnavailableError,
    error_of,
)
from duemq.handles import MessageHandle
from duemq.messages import MessageQueue, SendResult, SendStatus
from duemq.protocol.codes import RequestCode, ResponseCode
from duemq.protocol.errors import RemoteProtocolError
from duemq.protocol.frames.command import Command
from duemq.protocol.records.properties import java_hash
from duemq.protocol.requests import recall_handle as recall_handles
from duemq.protocol.requests.headers import Header, SendMessageResponse, SendMessageV2

T = TypeVar("T")

STATUS: Final = {
    int(ResponseCode.SUCCESS): SendStatus.SEND_OK,
    int(ResponseCode.FLUSH_DISK_TIMEOUT): SendStatus.FLUSH_DISK_TIMEOUT,
    int(ResponseCode.FLUSH_SLAVE_TIMEOUT): SendStatus.FLUSH_SLAVE_TIMEOUT,
    int(ResponseCode.SLAVE_NOT_AVAILABLE): SendStatus.SLAVE_NOT_AVAILABLE,
}
"""The response codes that mean that the broker has stored a message, and the status for each."""

NAME_SERVERS: Final = "the name servers"
OVERHEAD_BYTES: Final = 256
"""The approximate size of a send without its body, in bytes."""

_NOT_STORED: Final = (ConnectError, UnavailableError, BusyError, NoRouteError)
"""Temporary failures after which a message is certainly not stored."""
_MAYBE_STORED: Final = (ConnectionLostError, RequestTimeoutError, PeerError, BrokerFailureError)

Choose = Callable[[Route, str | None], MessageQueue]
"""Chooses a queue of a route; the second argument is the broker that just failed, if any."""
Failure = tuple[DueMQError, str, str | None]
"""A failed attempt: the error, and the address and the name of the broker."""

log = logging.getLogger("duemq.producer")


class _Fields(Header):
    """A header whose extension fields are already built."""

    ext: dict[str, str]

    def to_ext(self) -> dict[str, str]:
        """Return the extension fields, by name."""
        return self.ext


_NAMES: Final = dict(zip(SendMessageV2.__struct_fields__, SendMessageV2.__struct_encode_fields__, strict=True))
_QUEUE_ID: Final = _NAMES["queue_id"]
_SYS_FLAG: Final = _NAMES["sys_flag"]
_BORN: Final = _NAMES["born_timestamp"]
_PROPERTIES: Final = _NAMES["properties"]


class Sender:
    """Sends for one producer. `group`: its producer group; `window`: the limit of sends in flight."""

    def __init__(self, client: Client, group: str, window: Window, retries: Retries, clock: Clock) -> None:
        self._client = client
        self._group = group
        self.window = window
        self._retries = retries
        self._clock = clock
        self._delay_tables = DelayTables(client)
        self._round_robin: dict[str, RoundRobin] = {}
        self._fields: dict[tuple[str, bool], dict[str, str]] = {}
        self._failing: set[str] = set()
        """The addresses to which sends fail now; each was logged when that began."""

    def chooser(
        self, topic: str, sharding_key: str | None, queue: MessageQueue | None, replaced_key: str | None = None
    ) -> Choose:
        """Return the function that chooses the queue of a message. Raises ArgumentError."""
        if queue is not None:
            if sharding_key is not None or queue.topic != topic:
                raise ArgumentError("`queue` must be of the topic, and cannot be combined with a sharding key")
            return lambda route, failed: queue
        sharding_key = sharding_key if sharding_key is not None else replaced_key
        if sharding_key is not None:
            if not isinstance(sharding_key, str):
                raise ArgumentError(f"a sharding key must be a non-empty string, not {sharding_key!r}")
            number = shard_number(sharding_key)
            return lambda route, failed: route.write_queues[number % len(route.write_queues)]
        turn = self._round_robin.get(topic)
        if turn is None:
            turn = self._round_robin[topic] = RoundRobin()
        choose = turn.choose
        return lambda route, failed: choose(route.write_queues, failed)

    async def enter(self, size: int, deadline: float, timeout: float) -> None:
        """Wait until the window has room for a send of `size` bytes. Raises RequestTimeoutError."""
        if self.window.try_enter(size):
            return
        try:
            async with timeouts.timeout_at(deadline):
                await self.window.enter(size)
        except TimeoutError:
            raise RequestTimeoutError("the producer's own limit of sends in flight", "a send", timeout) from None

    async def send(
        self,
        message: Outgoing,
        choose: Choose,
        spec: DelaySpec,
        begun: float,
        deadline: float,
        timeout: float,
        retries: int | None = None,
    ) -> SendResult:
        """Send a message that is in the window. By the loop's clock: `begun`, from which its delay counts, and
        `deadline`, at which its `timeout` ends. Raises the errors of `Producer.send`."""
        failure: Failure | None = None
        route = self._client.routes.known_to_send(message.topic)
        if route is not None:
            # The usual case: this attempt needs no timer and no further coroutine.
            chosen = choose(route, None)
            address = route.primary(chosen.broker)
            connection = self._client.open_connection(address) if address is not None else None
            plan = PLAIN if spec.is_plain else self._known_plan(connection, spec, begun)
            if address is not None and connection is not None and plan is not None:
                try:
                    return await self._ask(connection, message, chosen, plan, deadline, timeout)
                except DueMQError as error:
                    failure = error, address, chosen.broker

        async def attempt(route: Route, chosen: MessageQueue) -> SendResult:
            address = primary(route, chosen)
            plan = PLAIN if spec.is_plain else await self._plan(address, chosen.topic, spec, begun)
            connection = await self._client.broker(address)
            return await self._ask(connection, message, chosen, plan, deadline, timeout)

        return await self.insist(message.topic, choose, attempt, deadline, timeout, retries, failure)

    async def send_oneway(
        self, message: Outgoing, choose: Choose, spec: DelaySpec, begun: float, timeout: float
    ) -> str:
        """Send a message that is in the window without waiting for an answer; return its id."""

        async def attempt(route: Route, chosen: MessageQueue) -> str:
            address = primary(route, chosen)
            plan = PLAIN if spec.is_plain else await self._plan(address, chosen.topic, spec, begun)
            connection = await self._client.broker(address)
            header = self._header(message, chosen, plan)
            await connection.send_oneway(RequestCode.SEND_MESSAGE_V2, header, message.body, timeout=timeout)
            return message.message_id

        return await self.insist(message.topic, choose, attempt, begun + timeout, timeout, 0)

    async def send_batch(
        self,
        batch: Outgoing,
        messages: Sequence[Outgoing],
        choose: Choose,
        timeout: float,
        retries: int | None = None,
    ) -> list[SendResult]:
        """Send a batch that is in the window. `batch` has the topic, and the encoded `messages` as its body."""
        deadline = asyncio.get_running_loop().time() + timeout

        async def attempt(route: Route, chosen: MessageQueue) -> list[SendResult]:
            address = primary(route, chosen)
            connection = await self._client.broker(address)
            header = self._header(batch, chosen, PLAIN, batch=True)
            answer = await connection.request(
                RequestCode.SEND_BATCH_MESSAGE, header, batch.body, timeout=_rest(deadline)
            )
            if answer.code not in STATUS:
                raise error_of(answer, address)
            return _batch_results(answer, address, chosen, messages)

        return await self.insist(batch.topic, choose, attempt, deadline, timeout, retries)

    def known_route(self, topic: str) -> Route | None:
        """Return the route of a topic, or None if a name server would have to be asked."""
        return self._client.routes.known_to_send(topic)

    async def route(self, topic: str, timeout: float) -> Route:
        """Return the route of a topic; look it up until `timeout` if necessary. Raises the errors of
        `Producer.choose_queue`."""
        known = self._client.routes.known_to_send(topic)
        if known is not None:
            return known

        async def attempt(route: Route, _: MessageQueue) -> Route:
            return route

        deadline = asyncio.get_running_loop().time() + timeout
        return await self.insist(topic, lambda route, _: route.write_queues[0], attempt, deadline, timeout, None)

    async def insist(
        self,
        topic: str,
        choose: Choose,
        attempt: Callable[[Route, MessageQueue], Awaitable[T]],
        deadline: float,
        timeout: float,
        retries: int | None,
        failure: Failure | None = None,
    ) -> T:
        """Make attempts until one succeeds, and return its result. `failure`: that of an attempt that was already made.
        Raises the last error, whose `maybe_stored` says whether the message may be stored."""
        tries = 1 + (self._retries.times if retries is None else retries)
        address, failed_broker = NAME_SERVERS, None
        failures = counted = 0
        failed: set[str] = set()
        last: DueMQError | None = None
        may_be_stored = is_asking = False
        try:
            async with timeouts.timeout_at(deadline):
                while True:
                    try:
                        if failure is not None:
                            (error, address, failed_broker), failure = failure, None
                            raise error
                        address = NAME_SERVERS
                        route = await self._client.routes.find_to_send(topic)
                        chosen = choose(route, failed_broker)
                        if chosen.broker not in failed:
                            address, failed_broker = primary(route, chosen), chosen.broker
                            last, is_asking = None, True
                            result = await attempt(route, chosen)
                            if self._failing:
                                self._going_on(address)
                            return result
                    except DueMQError as error:
                        is_asking = False
                        may_be_stored |= isinstance(error, _MAYBE_STORED) or type(error) is BrokerError
                        counted += not isinstance(error, _NOT_STORED)
                        if tries in (1, counted) or not self._may_pass(error, topic):
                            error.maybe_stored = may_be_stored
                            raise
                        failures += 1
                        self._complain(address, error)
                        last = error
                        if failed_broker is not None:
                            failed.add(failed_broker)
                        if failures == 1 and isinstance(error, ConnectionLostError):
                            # Perhaps the network only dropped an idle connection: retry without a pause, even at the
                            # same broker.
                            failed.clear()
                            continue
                        if address is not NAME_SERVERS:
                            continue
                    await asyncio.sleep(self._retries.pause(failures))
                    failed.clear()
        except TimeoutError as error:
            if isinstance(error, DueMQError):
                raise
            if last is None:
                last = RequestTimeoutError(address, "a send", timeout)
            else:
                last.add_note(f"the send was attempted {failures} times within {timeout:g} s")
            last.maybe_stored = may_be_stored or is_asking
            raise last from None

    # --- one attempt

    async def _ask(
        self,
        connection: ClientConnection,
        message: Outgoing,
        chosen: MessageQueue,
        plan: DelayPlan,
        deadline: float,
        timeout: float,
    ) -> SendResult:
        header = self._header(message, chosen, plan)
        try:
            answer = await connection.request(
                RequestCode.SEND_MESSAGE_V2, header, message.body, timeout=_rest(deadline)
            )
        except RequestTimeoutError:
            raise RequestTimeoutError(connection.address, "a send", timeout) from None
        if answer.code not in STATUS:
            raise error_of(answer, connection.address)
        if self._failing:
            self._going_on(connection.address)
        return _result(answer, connection.address, chosen, message.message_id, plan)

    async def _plan(self, address: str, topic: str, spec: DelaySpec, begun: float) -> DelayPlan:
        delays = await self._delay_tables.find(address, topic, spec)
        elapsed_ms = int((asyncio.get_running_loop().time() - begun) * 1000)
        return make_plan(spec, delays, self._clock(), address, elapsed_ms)

    def _known_plan(self, connection: ClientConnection | None, spec: DelaySpec, begun: float) -> DelayPlan | None:
        """Return the plan, or None if the broker would have to be asked or could not keep the plan."""
        delays = self._delay_tables.known(connection, spec) if connection is not None else None
        if connection is None or delays is None or (spec.replaces and not delays.replaces):
            return None
        elapsed_ms = int((asyncio.get_running_loop().time() - begun) * 1000)
        return make_plan(spec, delays, self._clock(), connection.address, elapsed_ms)

    def _header(self, message: Outgoing, queue: MessageQueue, plan: DelayPlan, *, batch: bool = False) -> Header:
        usual = self._fields.get((message.topic, batch))
        if usual is None:
            usual = SendMessageV2(
                producer_group=self._group,
                topic=message.topic,
                default_topic=AUTO_CREATE_TOPIC,
                default_topic_queue_nums=AUTO_CREATE_QUEUES,
                queue_id=0,
                sys_flag=0,
                born_timestamp=0,
                flag=0,
                properties="",
                reconsume_times=0,
                unit_mode=False,
                batch=batch,
            ).to_ext()
            if len(self._fields) >= _MOST_TOPICS:
                self._fields.clear()
            self._fields[message.topic, batch] = usual
        ext = usual.copy()
        ext[_QUEUE_ID] = str(queue.queue_id)
        ext[_SYS_FLAG] = str(message.sys_flag)
        ext[_BORN] = str(self._clock())
        ext[_PROPERTIES] = message.property_text(plan.properties)
        return _Fields(ext)

    # --- failures

    def _may_pass(self, error: DueMQError, topic: str) -> bool:
        """Whether a failed send may succeed a little later. This includes NoRouteError for a topic that had a route: a
        name server that has just started does not know the topics of its brokers yet."""
        return error.retriable or (isinstance(error, NoRouteError) and self._client.routes.was_found(topic))

    def _complain(self, address: str, error: DueMQError) -> None:
        """Log that sends to an address fail, but only once until one succeeds."""
        if address not in self._failing:
            self._failing.add(address)
            log.warning("sends to %s fail and are retried: %s", address, error)

    def _going_on(self, address: str) -> None:
        """Log that sends to an address succeed again."""
        self._failing.discard(NAME_SERVERS)
        if address in self._failing:
            self._failing.discard(address)
            log.warning("sends to %s succeed again", address)


_MOST_TOPICS: Final = 1024
"""Maximum number of topics whose usual header fields are cached."""


def shard_number(sharding_key: str) -> int:
    """Return a number for a sharding key, whose remainder by the number of queues is the index of the queue. RocketMQ's
    SelectMessageQueueByHash takes the remainder first, which has the sign of the hash in Java, and then its absolute
    value; the result is the same."""
    return abs(java_hash(sharding_key))


def primary(route: Route, queue: MessageQueue) -> str:
    """Return the address of a queue's broker. Raises NoRouteError."""
    address = route.primary(queue.broker)
    if address is None:
        raise NoRouteError(queue.topic, f"the broker {queue.broker} has no primary now")
    return address


def _rest(deadline: float) -> float:
    return max(0.001, deadline - asyncio.get_running_loop().time())


def _result(answer: Command, address: str, queue: MessageQueue, message_id: str, plan: DelayPlan) -> SendResult:
    header = typed_header(answer, SendMessageResponse, address)
    status = STATUS[answer.code]
    if header.queue_id != queue.queue_id:
        queue = queue._replace(queue_id=header.queue_id)
    if plan is PLAIN:
        return SendResult(status, message_id, header.msg_id, queue, header.queue_offset)
    handle, due_time_ms = None, plan.due_time_ms
    if plan.waits:
        handle = MessageHandle(queue.topic, queue.broker, message_id, header.msg_id)
    if header.recall_handle is not None:
        with suppress(RemoteProtocolError):
            if plan.waits:
                handle = MessageHandle.of_recall_handle(header.recall_handle, header.msg_id)
            stored = recall_handles.decode(header.recall_handle).stored
            # The exact deliver time, by the duemq broker's clock; for a recurring message, of its first delivery.
            due_time_ms = stored[1] if stored is not None else due_time_ms
    return SendResult(status, message_id, header.msg_id, queue, header.queue_offset, due_time_ms, handle)


def _batch_results(answer: Command, address: str, queue: MessageQueue, sent: Sequence[Outgoing]) -> list[SendResult]:
    """Return a result for each message. The answer has the ids of all messages, and the queue offset of the first."""
    header = typed_header(answer, SendMessageResponse, address)
    ids = header.msg_id.split(",")
    if len(ids) != len(sent):
        ids = [header.msg_id] * len(sent)
    status, offset = STATUS[answer.code], header.queue_offset
    if header.queue_id != queue.queue_id:
        queue = queue._replace(queue_id=header.queue_id)
    return [
        SendResult(status, message.message_id, ids[number], queue, offset + number)
        for number, message in enumerate(sent)
    ]
