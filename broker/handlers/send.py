"""SEND_MESSAGE (10), SEND_MESSAGE_V2 (310), SEND_BATCH_MESSAGE (320), CONSUMER_SEND_MSG_BACK (36).

Messages are staged here (see `storage.append`) and written by the router, once for all sends that one read brought.
A plain send to a known topic takes the short way through `send`; whatever is special about a message or its topic is
looked at in `_send_special`.
"""

from __future__ import annotations

import random
import struct
from typing import Final

from broker.config import BrokerConfig
from broker.connection import Connection
from broker.errors import Refused
from broker.flusher import Flusher
from broker.groups import Groups
from broker.router import Answer, Router
from broker.topics import (
    DLQ_PREFIX,
    PERM_WRITE,
    RETRY_PREFIX,
    Topic,
    Topics,
    check_name,
    check_sendable,
)
from protocol import batch, fastjson, properties
from protocol.codes import FLAG_ONEWAY, LANGUAGE, VERSION, VERSION_MAX_RECONSUME_TIMES, RequestCode, ResponseCode
from protocol.command import Body, Command
from protocol.frame import JSON
from protocol.headers import ConsumerSendMsgBack, Request, SendMessage, SendMessageResponse, SendMessageV2, response
from protocol.message_id import offset_message_id
from protocol.record import (
    FLAG_BORN_IPV6,
    FLAG_STORE_IPV6,
    FLAG_TRANSACTION,
    TRANSACTION_NONE,
    StoredMessage,
)
from scheduler.delay_levels import queue_id_of
from scheduler.level_queues import LevelQueues
from storage.consume_queue import SCHEDULE_TOPIC, ConsumeQueue
from storage.errors import RecordTooLarge
from storage.store import MessageStore

_FRAME: Final = struct.Struct(">II").pack
_WAIT_TRUE: Final = "WAIT\x01true\x02"
_FIRST_RETRY_LEVEL: Final = 3
_MAX_RECONSUME_TIMES: Final = 2**31 - 1
_HOST_FLAGS: Final = FLAG_BORN_IPV6 | FLAG_STORE_IPV6
"""How long the hosts in a record are: that is ours to say, and not what a client's sysflag says of it."""
_SPECIAL_FLAGS: Final = FLAG_TRANSACTION | _HOST_FLAGS
_TIMERS: Final = (properties.TIMER_DELIVER_MS, properties.TIMER_DELAY_MS, properties.TIMER_DELAY_SEC)


class SendHandlers:
    """Takes messages in."""

    def __init__(
        self,
        config: BrokerConfig,
        store: MessageStore,
        topics: Topics,
        groups: Groups,
        levels: LevelQueues,
        flusher: Flusher,
        router: Router,
    ) -> None:
        self._store = store
        self._appender = store.appender
        self._topics = topics
        self._table = topics.table
        self._groups = groups
        self._levels = levels
        self._flusher = flusher
        self._router = router
        self._cluster = f"{properties.CLUSTER}{properties.NAME_END}{config.cluster_name}"
        self.reconfigure(config)
        self._extra_ext = {"MSG_REGION": config.region, "TRACE_ON": "true" if config.trace_on else "false"}
        host = store.appender.store_host.hex().upper()
        region = fastjson.dumps(config.region).replace(b"%", b"%%")
        self._answer_format = (
            b'{"code":0,"extFields":{"MSG_REGION":%b,"TRACE_ON":"%b","msgId":"%b%%016X","queueId":"%%d",'
            b'"queueOffset":"%%d"},"flag":1,"language":"%b","opaque":%%d,"serializeTypeCurrentRPC":"JSON","version":%d}'
            % (region, self._extra_ext["TRACE_ON"].encode(), host.encode(), LANGUAGE.encode(), VERSION)
        )

    def reconfigure(self, config: BrokerConfig) -> None:
        """Take over settings that changed: maxMessageSize, brokerPermission."""
        self._config = config
        self._max_body_size = config.max_message_size

    def register(self, router: Router) -> None:
        """Add the handlers to a router."""
        router.add(RequestCode.SEND_MESSAGE, SendMessage, self.send, stages=True)
        router.add(RequestCode.SEND_MESSAGE_V2, SendMessageV2, self.send, stages=True)
        router.add(RequestCode.SEND_BATCH_MESSAGE, SendMessageV2, self.send_batch, stages=True)
        router.add(RequestCode.CONSUMER_SEND_MSG_BACK, ConsumerSendMsgBack, self.send_back)

    # --- one message

    def send(self, connection: Connection, request: Request[SendMessage]) -> Answer:
        """Take one message."""
        header = request.header
        topic = self._table.get(header.topic)
        queue_id = header.queue_id
        text = header.properties or ""
        if (
            topic is None
            or not topic.is_direct
            or not 0 <= queue_id < len(topic.queues)
            or header.batch
            or header.sys_flag & _SPECIAL_FLAGS
            or "DELAY" in text
            or "TIMER_D" in text
            or "TRAN_MSG" in text
            or "\0" in text
            or self._flusher.is_full
        ):
            return self._send_special(connection, request)
        body = request.body
        property_bytes = self._stored_properties(text)
        if len(body) > self._max_body_size or len(property_bytes) > properties.MAX_BYTES or 0 in property_bytes:
            self._appender.check(body, property_bytes)
        self._appender.begin()
        offset = self._appender.add(
            topic.queues[queue_id] or topic.queue(queue_id),
            body,
            property_bytes,
            properties.tags_code_of(text),
            header.born_timestamp,
            connection.born_host,
            header.flag,
            header.sys_flag,
            header.reconsume_times or 0,
        )
        return self._accepted(request, queue_id, offset)

    def _accepted(self, request: Request[SendMessage], queue_id: int, offset: int) -> Answer:
        """The answer for the message staged last."""
        if request.flag & FLAG_ONEWAY:
            return None
        physical_offset = self._appender.last_physical_offset
        if request.codec == JSON:
            head = self._answer_format % (physical_offset, queue_id, offset, request.opaque)
            return _FRAME(len(head) + 4, len(head)) + head
        return self._answer(offset_message_id(self._appender.store_host, physical_offset), queue_id, offset)

    def _answer(self, message_id: str, queue_id: int, offset: int) -> Command:
        answer = response(ResponseCode.SUCCESS, None, SendMessageResponse(message_id, queue_id, offset))
        answer.ext.update(self._extra_ext)
        return answer

    def _stored_properties(self, text: str) -> bytes:
        """The properties as stored: without WAIT, which is for us only, and with CLUSTER, as RocketMQ has them."""
        at = text.find(_WAIT_TRUE)
        if at >= 0 and (at == 0 or text[at - 1] == properties.PROPERTY_END):
            text = text[:at] + text[at + len(_WAIT_TRUE) :]
        elif "WAIT\x01" in text:
            text = properties.without(text, properties.WAIT)
        if "CLUSTER\x01" in text:
            text = properties.without(text, properties.CLUSTER)
        if text and text[-1] != properties.PROPERTY_END:
            return f"{text}\x02{self._cluster}".encode()
        return f"{text}{self._cluster}".encode()

    # --- what is special about a message or a topic

    def _send_special(self, connection: Connection, request: Request[SendMessage]) -> Answer:
        header = request.header
        if header.batch:
            return self._stage_batch(connection, request)
        if self._prepare(connection, request) is None:
            return None
        text = header.properties or ""
        self._refuse_what_is_missing(header, text)
        topic_name, queue_id = header.topic, header.queue_id
        reconsume_times = header.reconsume_times or 0
        level = _level(text)
        if topic_name.startswith(RETRY_PREFIX):
            group = topic_name.removeprefix(RETRY_PREFIX)
            if reconsume_times >= self._max_reconsume_times(group, request.version, header.max_reconsume_times):
                dead = _with_queues(self._topics.create_for_group(f"{DLQ_PREFIX}{group}", 1))
                if not dead.is_saved:
                    self._later(connection, request)
                    return None
                topic_name, queue_id, level = dead.name, 0, 0
                text = properties.without(text, properties.DELAY)
        topic = self._table[topic_name]
        if queue_id < 0:
            queue_id = random.randrange(topic.config.write_queue_nums)
        offset = self._stage(
            topic.queue(queue_id),
            level,
            request.body,
            self._stored_properties(text),
            header.born_timestamp,
            connection.born_host,
            header.flag,
            header.sys_flag,
            reconsume_times,
        )
        return self._accepted(request, queue_id, offset)

    def _stage(
        self,
        queue: ConsumeQueue,
        level: int,
        body: Body,
        property_bytes: bytes,
        born_timestamp: int,
        born_host: bytes,
        flag: int,
        sys_flag: int,
        reconsume_times: int,
    ) -> int:
        """Stage a message for a queue, at once or by way of a delay level."""
        text = property_bytes.decode()
        if level > 0:
            level = self._level_for(queue.topic, level)
            text = properties.with_property(text, properties.DELAY, str(level))
            text = properties.with_property(text, properties.REAL_TOPIC, queue.topic)
            text = properties.with_property(text, properties.REAL_QID, str(queue.queue_id))
            property_bytes = text.encode()
            queue = self._store.ensure_queue(SCHEDULE_TOPIC, queue_id_of(level))
        self._appender.check(body, property_bytes)
        store_timestamp = self._appender.begin()
        is_delayed = level > 0
        code = self._levels.table.deliver_time(level, store_timestamp) if is_delayed else properties.tags_code_of(text)
        return self._appender.add(
            queue,
            body,
            property_bytes,
            code,
            born_timestamp,
            born_host,
            flag,
            sys_flag & ~_HOST_FLAGS,
            reconsume_times,
            code if is_delayed else 0,  # the promise: see MessageStore.tags_code
        )

    def _level_for(self, topic_name: str, level: int) -> int:
        """The level of the broker's table for the level that a message asks for. Raises Refused where the topic has a
        table of its own with a delay that the broker's has not: that would have no queue."""
        table = self._levels.table
        topic = self._table.get(topic_name)
        if topic is None or topic.delay_levels is None:
            return table.cap(level)
        own = topic.delay_levels
        delay_ms = own.delay_ms(own.cap(level))
        found = table.level_of(delay_ms)
        if found is None:
            raise Refused(
                ResponseCode.MESSAGE_ILLEGAL,
                f"level {own.cap(level)} of the topic {topic_name} is {delay_ms // 1000} s, which "
                f"messageDelayLevel has not ({table.text}): add it there",
            )
        return found

    def _prepare(self, connection: Connection, request: Request[SendMessage]) -> Topic | None:
        """The topic of a send, checked; None where the request has to wait for the topic to be made. Raises Refused."""
        header = request.header
        if self._flusher.is_full:
            raise Refused(
                ResponseCode.SYSTEM_BUSY,
                f"[OVERLOAD]broker busy, start flow control for a while: {self._flusher.waiting} messages wait for "
                "the disk",
            )
        topic = self._table.get(header.topic)
        if topic is None:
            check_name(header.topic)
            topic = self._create(header)
        if not topic.is_saved:
            self._later(connection, request)
            return None
        check_sendable(header.topic)
        if not topic.config.perm & PERM_WRITE or not self._config.broker_permission & PERM_WRITE:
            raise Refused(ResponseCode.NO_PERMISSION, f"the topic[{header.topic}] sending message is forbidden")
        if header.queue_id >= topic.queue_limit or (header.queue_id < 0 and not topic.config.write_queue_nums):
            raise Refused(
                ResponseCode.SYSTEM_ERROR,
                f"request queueId[{header.queue_id}] is illegal, topic[{header.topic}] has {topic.queue_limit} queues",
            )
        return topic

    def _create(self, header: SendMessage) -> Topic:
        """Make the topic of a send, if that is allowed."""
        name = header.topic
        check_sendable(name)
        is_retry = name.startswith(RETRY_PREFIX)
        sys_flag = (2 if is_retry else 1) if header.unit_mode else 0
        topic = self._topics.create_for_send(name, header.default_topic, header.default_topic_queue_nums, sys_flag)
        if topic is None and is_retry:
            topic = self._topics.create_for_group(name, 1, sys_flag)
        if topic is None:
            raise Refused(
                ResponseCode.TOPIC_NOT_EXIST,
                f"topic[{name}] not exist, apply first please! Create it with mqadmin updateTopic, or set "
                "autoCreateTopicEnable=true",
            )
        return topic

    def _later(self, connection: Connection, request: Request[SendMessage]) -> None:
        """Handle a send again when its topic is durable: an acknowledged message must not lose its topic."""
        self._router.spawn(connection, request, self._send_when_saved(connection, request))

    async def _send_when_saved(self, connection: Connection, request: Request[SendMessage]) -> Answer:
        await self._topics.save()
        is_batch = request.header.batch or request.code == RequestCode.SEND_BATCH_MESSAGE
        answer = self._stage_batch(connection, request) if is_batch else self._send_special(connection, request)
        self._appender.commit()
        return self._router.answer_when_flushed(connection, request, answer)

    def _refuse_what_is_missing(self, header: SendMessage, text: str) -> None:
        """Refuse what this broker cannot do, so that nothing is delivered at the wrong time."""
        transaction = properties.get(text, properties.TRAN_MSG)
        if header.sys_flag & FLAG_TRANSACTION != TRANSACTION_NONE or (transaction or "").lower() == "true":
            raise Refused(
                ResponseCode.NO_PERMISSION,
                f"the broker[{self._config.advertised_host}] sending transaction message is forbidden",
            )
        if properties.get(text, "TIMER_OUT_MS") is None and _level(text) <= 0:
            for name in _TIMERS:
                if properties.get(text, name) is not None:
                    raise Refused(
                        ResponseCode.SYSTEM_ERROR,
                        f"accurate timer message is not enabled, timerWheelEnable is false: the property {name} would "
                        "have no effect. Use a delay level",
                    )

    def _max_reconsume_times(self, group_name: str, version: int, asked: int | None) -> int:
        group = self._groups.get(group_name)
        if group is None:
            raise Refused(
                ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST,
                f"subscription group not exist, {group_name}",
            )
        if asked is not None and version >= VERSION_MAX_RECONSUME_TIMES:
            return asked
        return group.retry_max_times

    # --- batches

    def send_batch(self, connection: Connection, request: Request[SendMessage]) -> Answer:
        """Take the messages of a batch, all or none."""
        return self._stage_batch(connection, request)

    def _stage_batch(self, connection: Connection, request: Request[SendMessage]) -> Answer:
        topic = self._prepare(connection, request)
        if topic is None:
            return None
        header = request.header
        request_text = header.properties or ""
        if _level(request_text) > 0 or topic.name.startswith(RETRY_PREFIX):
            raise Refused(ResponseCode.MESSAGE_ILLEGAL, "a batch can neither be delayed nor be a retry")
        self._refuse_what_is_missing(header, request_text)
        queue_id = header.queue_id
        if queue_id < 0:
            queue_id = random.randrange(topic.config.write_queue_nums)
        if len(request.body) > self._max_body_size:
            raise RecordTooLarge("a batch", len(request.body), self._max_body_size)
        parts = [(flag, body, self._part_properties(text)) for flag, body, text in batch.decode(request.body)]
        if not parts:
            raise Refused(ResponseCode.MESSAGE_ILLEGAL, "the batch has no messages")
        for _, body, property_bytes in parts:
            self._appender.check(body, property_bytes)
        queue = topic.queue(queue_id)
        self._appender.begin()
        offsets, message_ids = [], []
        for flag, body, property_bytes in parts:
            offsets.append(
                self._appender.add(
                    queue,
                    body,
                    property_bytes,
                    properties.tags_code_of(property_bytes.decode()),
                    header.born_timestamp,
                    connection.born_host,
                    flag,
                    header.sys_flag & ~_HOST_FLAGS,
                    header.reconsume_times or 0,
                )
            )
            message_ids.append(offset_message_id(self._appender.store_host, self._appender.last_physical_offset))
        if request.flag & FLAG_ONEWAY:
            return None
        return self._answer(",".join(message_ids), queue_id, offsets[0])

    def _part_properties(self, text: str) -> bytes:
        """The stored properties of a message of a batch; one that asks for a time of its own is refused."""
        if _level(text) > 0 or any(properties.get(text, name) is not None for name in _TIMERS):
            raise Refused(ResponseCode.MESSAGE_ILLEGAL, "a message of a batch cannot be delayed: send it on its own")
        return self._stored_properties(text)

    # --- retries

    async def send_back(self, connection: Connection, request: Request[ConsumerSendMsgBack]) -> Answer:
        """A consumer could not process a message: deliver it again later, or put it to the dead letters."""
        header = request.header
        group = self._groups.get(header.group)
        if group is None:
            raise Refused(ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, f"subscription group not exist, {header.group}")
        if not self._config.broker_permission & PERM_WRITE:
            raise Refused(
                ResponseCode.NO_PERMISSION, f"the broker[{self._config.advertised_host}] sending is forbidden"
            )
        if group.retry_queue_nums <= 0:
            return response(ResponseCode.SUCCESS)
        message = self._store.message_at(header.offset)
        if message is None:
            raise Refused(ResponseCode.SYSTEM_ERROR, f"look message by offset failed, {header.offset}")
        limit = self._max_reconsume_times(header.group, request.version, header.max_reconsume_times)
        level = header.delay_level
        if message.reconsume_times >= limit or level < 0:
            name, queues, level = f"{DLQ_PREFIX}{header.group}", 1, 0
        else:
            name, queues = f"{RETRY_PREFIX}{header.group}", group.retry_queue_nums
            level = level or _FIRST_RETRY_LEVEL + message.reconsume_times
        check_name(name)
        topic = _with_queues(self._topics.create_for_group(name, queues, 2 if header.unit_mode else 0))
        if not topic.is_saved:
            await self._topics.save()
        if not topic.config.perm & PERM_WRITE:
            raise Refused(ResponseCode.NO_PERMISSION, f"the topic[{name}] sending message is forbidden")
        self._stage_again(message, topic, level)
        self._appender.commit()
        return self._router.answer_when_flushed(connection, request, response(ResponseCode.SUCCESS))

    def _stage_again(self, message: StoredMessage, topic: Topic, level: int) -> None:
        """Stage a message that was delivered before, one more time."""
        text = message.properties_text
        if properties.get(text, properties.RETRY_TOPIC) is None:
            text = properties.with_property(text, properties.RETRY_TOPIC, message.topic)
        if properties.get(text, properties.ORIGIN_MESSAGE_ID) is None:
            text = properties.with_property(text, properties.ORIGIN_MESSAGE_ID, message.offset_message_id)
        for name in (properties.DELAY, properties.REAL_TOPIC, properties.REAL_QID, properties.WAIT):
            text = properties.without(text, name)
        self._stage(
            topic.queue(random.randrange(topic.queue_limit)),
            level,
            message.body,
            text.encode(),
            message.born_timestamp,
            message.born_host,
            message.flag,
            message.sys_flag,
            min(message.reconsume_times + 1, _MAX_RECONSUME_TIMES),
        )


def _with_queues(topic: Topic) -> Topic:
    """A topic that has queues. Raises Refused."""
    if topic.queue_limit <= 0:
        raise Refused(ResponseCode.SYSTEM_ERROR, f"the topic[{topic.name}] has no queues")
    return topic


def _level(text: str) -> int:
    """The delay level that a message asks for, 0 without. Raises Refused where it is no number."""
    level = properties.get(text, properties.DELAY)
    if level is None:
        return 0
    try:
        return int(level)
    except ValueError:
        raise Refused(ResponseCode.MESSAGE_ILLEGAL, f"the property DELAY={level} is no delay level") from None
