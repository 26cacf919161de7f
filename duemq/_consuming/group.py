"""The typed requests of a consumer group's member to brokers."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Iterable

import msgspec

from duemq._consuming.subscription import Subscription
from duemq._net.client import Client, typed_body, typed_header
from duemq._net.routes import PRIMARY, Route
from duemq._producing.delay import DelaySpec
from duemq._producing.delay_tables import DelayTables
from duemq._values.durations import format_duration
from duemq.errors import DelayError, DueMQError, NoRouteError, NotFoundError, PeerError
from duemq.messages import MessageQueue, ReceivedMessage
from duemq.protocol.codes import RequestCode, ResponseCode
from duemq.protocol.errors import RecordError
from duemq.protocol.frames import fastjson
from duemq.protocol.records import record
from duemq.protocol.records.record import StoredMessage
from duemq.protocol.requests import bodies
from duemq.protocol.requests.bodies import ConsumerIdList, LockBatch, LockedQueues
from duemq.protocol.requests.headers import (
    PULL_SUBSCRIPTION,
    PULL_SUSPEND,
    ConsumerGroupName,
    ConsumerSendMsgBack,
    Header,
    OffsetResponse,
    PullMessage,
    PullMessageResponse,
    QueryConsumerOffset,
    QueueOfTopic,
    SearchOffset,
    UnregisterClient,
    UpdateConsumerOffset,
)
from duemq.protocol.topics import RETRY_PREFIX

PULL_MESSAGES = 32
"""The number of messages requested in one pull: RocketMQ's default, and its brokers' limit."""

_PULL_ANSWERS = (
    ResponseCode.SUCCESS,
    ResponseCode.PULL_NOT_FOUND,
    ResponseCode.PULL_RETRY_IMMEDIATELY,
    ResponseCode.PULL_OFFSET_MOVED,
)

log = logging.getLogger("duemq.consumer")


class PullAnswer(msgspec.Struct, frozen=True):
    """The result of a pull."""

    messages: list[StoredMessage]
    next_offset: int
    """The queue offset at which to continue."""
    end_offset: int
    """The end of the queue when the broker answered: the offset that its next message will get."""
    moved: bool
    """Whether there will never be a message at the requested offset; `next_offset` is the nearest offset that may have
    one."""


class GroupApi:
    """The requests of one member of a consumer group. All raise what `Client.call` raises, and NoRouteError."""

    def __init__(self, client: Client, group: str, max_reconsume_times: int) -> None:
        self._client = client
        self._group = group
        self._max_reconsume_times = max_reconsume_times
        self._delays = DelayTables(client)
        self._pull_from: dict[MessageQueue, int] = {}
        """The broker id to pull from, for each queue, as the last answer suggested it: the primary's or a replica's."""

    async def members(self, route: Route) -> list[str]:
        """Return the client ids of the group's members that one of the topic's brokers knows. Raises NoRouteError if
        that broker has no address at present."""
        broker = random.choice(list(route.brokers))
        address = route.address(broker)
        if address is None:
            raise NoRouteError(route.topic, f"the broker {broker} has no address now")
        header = ConsumerGroupName(consumer_group=self._group)
        answer = await self._client.call(address, RequestCode.GET_CONSUMER_LIST_BY_GROUP, header)
        return typed_body(answer, ConsumerIdList, address).consumer_id_list

    async def pull(self, queue: MessageQueue, offset: int, subscription: Subscription, *, hold: bool) -> PullAnswer:
        """Return messages from an offset on. `hold`: if there is none yet, the broker answers when one arrives, or
        after `Intervals.suspend`. Raises PeerError if the answer continues before the offset, or does not decode."""
        intervals = self._client.intervals
        address = await self._address(queue, self._pull_from.get(queue, PRIMARY))
        header = PullMessage(
            consumer_group=self._group,
            topic=queue.topic,
            queue_id=queue.queue_id,
            queue_offset=offset,
            max_msg_nums=PULL_MESSAGES,
            sys_flag=PULL_SUBSCRIPTION | (PULL_SUSPEND if hold else 0),
            commit_offset=0,
            suspend_timeout_millis=round(intervals.suspend * 1000),
            sub_version=subscription.version,
            subscription=subscription.text,
            expression_type="TAG",
        )
        answer = await self._client.call(
            address, RequestCode.PULL_MESSAGE, header, timeout=intervals.pull_timeout, expected=_PULL_ANSWERS
        )
        fields = typed_header(answer, PullMessageResponse, address)
        self._pull_from[queue] = fields.suggest_which_broker_id
        next_offset = fields.next_begin_offset
        messages: list[StoredMessage] = []
        moved = answer.code == ResponseCode.PULL_OFFSET_MOVED
        if next_offset < (0 if moved else offset):
            raise PeerError(address, f"its answer to a pull of {queue} from offset {offset} continues at {next_offset}")
        if answer.code == ResponseCode.SUCCESS:
            messages, next_offset = _read_records(bytes(answer.body), queue, offset, next_offset, address)
        return PullAnswer(messages, next_offset, fields.max_offset, moved)

    async def stored_offset(self, queue: MessageQueue) -> int | None:
        """Return the group's consumer offset, or None if it has none yet. RocketMQ 4.9's brokers return 0 to a group
        without an offset if the queue's first messages are still in memory; the request switches that off for RocketMQ
        5.0 and later and for duemq."""
        header = QueryConsumerOffset(
            consumer_group=self._group, topic=queue.topic, queue_id=queue.queue_id, set_zero_if_not_found=False
        )
        try:
            return await self._offset(queue, RequestCode.QUERY_CONSUMER_OFFSET, header)
        except NotFoundError:
            return None

    async def commit(self, queue: MessageQueue, offset: int) -> None:
        """Store the group's consumer offset."""
        header = UpdateConsumerOffset(
            consumer_group=self._group, topic=queue.topic, queue_id=queue.queue_id, commit_offset=offset
        )
        await self._client.call(await self._address(queue), RequestCode.UPDATE_CONSUMER_OFFSET, header)

    async def first_offset(self, queue: MessageQueue) -> int:
        """Return the offset of the oldest message in a queue."""
        header = QueueOfTopic(topic=queue.topic, queue_id=queue.queue_id)
        return await self._offset(queue, RequestCode.GET_MIN_OFFSET, header)

    async def end_offset(self, queue: MessageQueue) -> int:
        """Return the offset that the next message of a queue will get."""
        header = QueueOfTopic(topic=queue.topic, queue_id=queue.queue_id)
        return await self._offset(queue, RequestCode.GET_MAX_OFFSET, header)

    async def offset_at(self, queue: MessageQueue, time_ms: int) -> int:
        """Return the approximate offset of the first message stored at a time (ms since the epoch) or later."""
        header = SearchOffset(topic=queue.topic, queue_id=queue.queue_id, timestamp=time_ms)
        return await self._offset(queue, RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, header)

    async def send_back(self, message: ReceivedMessage, level: int) -> None:
        """Have the broker deliver a message again, see `ReceivedMessage.retry`."""
        header = ConsumerSendMsgBack(
            offset=message.physical_offset,
            group=self._group,
            delay_level=level,
            origin_msg_id=message.message_id,
            origin_topic=message.topic,
            unit_mode=False,
            max_reconsume_times=self._max_reconsume_times,
        )
        await self._client.call(await self._address(message.queue), RequestCode.CONSUMER_SEND_MSG_BACK, header)

    async def retry_level(self, queue: MessageQueue, delay_ms: int) -> int:
        """Return the level with the shortest delay of at least `delay_ms` at the queue's broker. Raises DelayError if
        there is none: the broker would use its longest level."""
        address = await self._address(queue)
        # The spec asks for a level, since a retry can have no timer. The retry topic may have levels of its own.
        delays = await self._delays.find(address, RETRY_PREFIX + self._group, DelaySpec(level=1))
        levels = delays.valid_levels_ms
        long_enough = [(level_ms, number) for number, level_ms in enumerate(levels, 1) if level_ms >= delay_ms]
        if long_enough:
            return min(long_enough)[1]
        if not levels:
            raise DelayError(f"the broker {address} does not report its delay levels: give one with level=", levels)
        raise DelayError(
            f"the broker {address} cannot delay a retry by {format_duration(delay_ms)}: its longest delay level is "
            f"{format_duration(max(levels))}. Give a shorter delay, or send a new message with that delay",
            levels,
        )

    async def lock(self, broker: str, queues: Iterable[MessageQueue]) -> set[MessageQueue]:
        """Lock queues of one broker for this member, or renew their locks. Return the queues whose locks it holds."""
        address, body = await self._lock_request(broker, queues)
        answer = await self._client.call(address, RequestCode.LOCK_BATCH_MQ, None, body)
        held = typed_body(answer, LockedQueues, address).queues or ()
        return {MessageQueue(each.topic, each.broker_name, each.queue_id) for each in held}

    async def unlock(self, broker: str, queues: Iterable[MessageQueue]) -> None:
        """Unlock queues of one broker."""
        address, body = await self._lock_request(broker, queues)
        await self._client.call(address, RequestCode.UNLOCK_BATCH_MQ, None, body)

    async def _lock_request(self, broker: str, queues: Iterable[MessageQueue]) -> tuple[str, bytes]:
        wanted = sorted(queues)
        listed = [bodies.BrokerQueue(broker, queue.queue_id, queue.topic) for queue in wanted]
        return await self._address(wanted[0]), fastjson.dumps(LockBatch(self._group, self._client.client_id, listed))

    async def leave(self) -> None:
        """Notify all brokers that this member leaves, so that other members take over its queues immediately. Errors
        are only logged."""
        header = UnregisterClient(client_id=self._client.client_id, consumer_group=self._group)
        leaving = (
            self._client.call(address, RequestCode.UNREGISTER_CLIENT, header)
            for address in self._client.broker_addresses
        )
        for error in await asyncio.gather(*leaving, return_exceptions=True):
            if isinstance(error, DueMQError):
                log.debug("cannot notify a broker that this member leaves: %s", error)

    async def _offset(self, queue: MessageQueue, code: RequestCode, header: Header) -> int:
        address = await self._address(queue)
        answer = await self._client.call(address, code, header)
        # RocketMQ's broker returns -1 for a queue that has no file yet.
        return max(0, typed_header(answer, OffsetResponse, address).offset)

    async def _address(self, queue: MessageQueue, broker_id: int = PRIMARY) -> str:
        route = await self._client.routes.find(queue.topic)
        address = route.address(queue.broker, broker_id)
        if address is None:
            raise NoRouteError(queue.topic, f"the broker {queue.broker} is gone")
        return address


def _read_records(
    body: bytes, queue: MessageQueue, offset: int, next_offset: int, address: str
) -> tuple[list[StoredMessage], int]:
    """Return the messages in the answer to a pull, and the offset at which to continue. If a record is broken, these
    are the messages before it, and reading continues after the last of them.

    A broken record at the beginning is skipped and an error is logged, since it would otherwise block the queue for
    good. Raises PeerError if there are no messages, or messages of other offsets: continuing after them could skip
    sound ones.
    """
    messages: list[StoredMessage] = []
    position = 0
    try:
        while position < len(body):
            message = record.decode(body, position)
            messages.append(message)
            position += message.size
    except RecordError as error:
        log.error("%s returned a broken record to a pull of %s from offset %d: %s", address, queue, offset, error)
        return messages, (messages[-1].queue_offset if messages else offset) + 1
    if not messages:
        raise PeerError(
            address, f"its answer to a pull of {queue} from offset {offset} should have messages, and has none"
        )
    if not offset <= messages[0].queue_offset <= messages[-1].queue_offset < next_offset:
        raise PeerError(address, f"its answer to a pull of {queue} from offset {offset} has messages of other offsets")
    return messages, next_offset


class BrokerOffsets:
    """The consumer offsets of a clustering group, which the brokers keep."""

    def __init__(self, api: GroupApi) -> None:
        self._api = api
        self._has_table: set[tuple[str, str]] = set()
        """Brokers' names and topics for which the broker has acknowledged an offset."""

    async def load(self, queue: MessageQueue) -> int | None:
        """Return the group's offset in a queue, or None if it has none yet."""
        return await self._api.stored_offset(queue)

    async def save(self, offsets: dict[MessageQueue, int]) -> None:
        """Store offsets. Raises the first error, after an attempt to store every offset at a broker that answers.

        Until a broker has an offset of the group for a topic, one offset is stored alone and the others after it: when
        the first two arrive at the same time, RocketMQ's broker makes the table of that topic twice and loses one of
        them, though it has acknowledged both (`ConsumerOffsetManager.commitOffset`, 4.9.7 and 5.3.3).
        """
        errors: dict[MessageQueue, BaseException] = {}
        rest = dict(offsets)
        while alone := self._firsts(rest):
            first = {queue: rest.pop(queue) for queue in alone.values()}
            failed = await self._commit(first)
            self._has_table.update(key for key, queue in alone.items() if queue not in failed)
            errors |= failed
            # The others at a broker that does not answer would fail one by one, each after its time-out.
            silent = {queue.broker for queue, error in failed.items() if isinstance(error, OSError)}
            rest = {queue: offset for queue, offset in rest.items() if queue.broker not in silent}
        errors |= await self._commit(rest)
        for error in errors.values():
            raise error

    def forget_tables(self) -> None:
        """Store the next offset of each topic alone again: a broker that was killed may have lost its tables."""
        self._has_table.clear()

    def _firsts(self, queues: Iterable[MessageQueue]) -> dict[tuple[str, str], MessageQueue]:
        """Return one queue for each broker and topic of which no offset is known to be stored."""
        found: dict[tuple[str, str], MessageQueue] = {}
        for queue in queues:
            if (queue.broker, queue.topic) not in self._has_table:
                found.setdefault((queue.broker, queue.topic), queue)
        return found

    async def _commit(self, offsets: dict[MessageQueue, int]) -> dict[MessageQueue, BaseException]:
        """Store offsets at the same time; return the errors of those that could not be stored."""
        commits = (self._api.commit(queue, offset) for queue, offset in offsets.items())
        results = await asyncio.gather(*commits, return_exceptions=True)
        return {queue: error for queue, error in zip(offsets, results, strict=True) if error is not None}
