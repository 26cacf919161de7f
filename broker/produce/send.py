"""SEND_MESSAGE (10), SEND_MESSAGE_V2 (310), SEND_BATCH_MESSAGE (320).

Messages are staged here (see `storage.log.append`) and written by the router, once for all sends that one read brought.
A plain send to a known topic takes the short way through `send`, one with a timer that through `_send_timer`; whatever
is special about a message or its topic is looked at in `_send_special`.
"""

from __future__ import annotations

import random
import re
import struct
from collections.abc import Callable
from functools import partial
from typing import Final, Protocol

from duemq.broker.errors import BrokerError, Refused
from duemq.broker.limits import Limits
from duemq.broker.net.cold_reads import ColdReads
from duemq.broker.net.connection import Connection
from duemq.broker.net.held_answers import HeldAnswers
from duemq.broker.net.router import Answer, Router
from duemq.broker.produce.replace import Replacements
from duemq.broker.produce.retries import dead_letters, retry_limit
from duemq.broker.produce.staging import (
    HOST_FLAGS,
    TIMER_NAMES,
    Staging,
    is_delayed,
    is_special,
    level_of,
    replace_key_of,
)
from duemq.broker.settings.changes import LiveSettings
from duemq.broker.tables.groups import Groups
from duemq.broker.tables.topics import PERM_WRITE, RETRY_PREFIX, Topic, Topics, check_name, check_sendable
from duemq.protocol.codes import FLAG_ONEWAY, LANGUAGE, VERSION, RequestCode, ResponseCode
from duemq.protocol.frames import fastjson
from duemq.protocol.frames.command import Command
from duemq.protocol.frames.frame import JSON
from duemq.protocol.records import batch, properties
from duemq.protocol.records.message_id import offset_message_id
from duemq.protocol.records.properties import tags_code_of
from duemq.protocol.records.record import FLAG_TRANSACTION, TRANSACTION_NONE
from duemq.protocol.records.timer_properties import AGAIN_ROOM, out_ms
from duemq.protocol.requests import recall_handle
from duemq.protocol.requests.headers import Request, SendMessage, SendMessageResponse, SendMessageV2, response
from duemq.scheduler.levels.service import LevelQueues
from duemq.scheduler.timers.index.keys import key_hash
from duemq.scheduler.timers.service import Timers
from duemq.storage.clock import Clock
from duemq.storage.errors import NotInMemory, RecordTooLarge
from duemq.storage.store import MessageStore

_FRAME: Final = struct.Struct(">II").pack
_WAIT_TRUE: Final = "\x02WAIT\x01true\x02"
_SPECIAL_FLAGS: Final = FLAG_TRANSACTION | HOST_FLAGS
_DELAY: Final = f"{properties.DELAY}{properties.NAME_END}"
_DUE: Final = f"{properties.DUE_MS}{properties.NAME_END}"
_UNIQ_KEY: Final = f"{properties.UNIQ_KEY}{properties.NAME_END}"
_UNIQ_KEY_SIZE: Final = len(_UNIQ_KEY)
_find_timer: Final = re.compile(
    "TIMER_DEL(?<![^\x02]TIMER_DEL)(IVER_MS|AY_MS|AY_SEC)\x01([0-9]{1,13})(?:\x02|\\Z)"
).search
"""Finds one of the properties that ask for a time. The letters before the lookbehind are what makes it quick."""


class _NotSaved(BrokerError):
    """A message cannot be taken before its topic is durable. Attribute: `topic`."""

    def __init__(self, topic: Topic) -> None:
        super().__init__(topic.name)
        self.topic = topic


class Stage(Protocol):
    """Stages the messages of a request."""

    def __call__(self, connection: Connection, request: Request[SendMessage], *, at_once: bool) -> Answer:
        """The answer, or None where that comes later. `at_once`: see `Router.spawn`; then whoever calls sees to it that
        the disk is not waited for. Raises _NotSaved, NotInMemory; then nothing of the request is staged."""


class SendHandlers:
    """Takes messages in."""

    def __init__(
        self,
        settings: LiveSettings,
        store: MessageStore,
        topics: Topics,
        groups: Groups,
        levels: LevelQueues,
        timers: Timers,
        staging: Staging,
        held: HeldAnswers,
        router: Router,
        clock: Clock,
        reads: ColdReads,
        limits: Limits,
    ) -> None:
        """`clock`: the messages' clock."""
        self._settings = settings
        self._clock = clock
        self._limits = limits
        self._appender = store.appender
        self._max_properties = store.appender.max_properties_size
        self._max_timer_properties = store.appender.max_properties_size - AGAIN_ROOM
        self._topics = topics
        self._table = topics.table
        self._groups = groups
        self._levels = levels
        self._timers = timers
        self._staging = staging
        self._held = held
        self._router = router
        self._reads = reads
        self._replacements = Replacements(store, timers, clock, reads)
        config = settings.config  # of what follows nothing changes while the broker runs
        self._cluster = f"{properties.CLUSTER}{properties.NAME_END}{config.cluster_name}"
        self._extra_ext = {"MSG_REGION": config.region, "TRACE_ON": "true" if config.trace_on else "false"}
        host = store.appender.store_host.hex().upper()
        region = fastjson.dumps(config.region).replace(b"%", b"%%")
        switch = self._extra_ext["TRACE_ON"].encode()

        def answer_format(more: bytes) -> bytes:
            return (
                b'{"code":0,"extFields":{"MSG_REGION":%b,"TRACE_ON":"%b","msgId":"%b%%016X","queueId":"%%d",'
                b'"queueOffset":"%%d"%b},"flag":1,"language":"%b","opaque":%%d,"serializeTypeCurrentRPC":"JSON",'
                b'"version":%d}' % (region, switch, host.encode(), more, LANGUAGE.encode(), VERSION)
            )

        self._gives_handles = " " not in config.broker_name
        """A handle is words parted by blanks."""
        self._answer_format = answer_format(b"")
        self._timer_answer_format = answer_format(b',"recallHandle":"%b"')

    def register(self, router: Router) -> None:
        """Add the handlers to a router."""
        router.add(RequestCode.SEND_MESSAGE, SendMessage, self.send, stages=True)
        router.add(RequestCode.SEND_MESSAGE_V2, SendMessageV2, self.send, stages=True)
        router.add(RequestCode.SEND_BATCH_MESSAGE, SendMessageV2, self.send_batch, stages=True)

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
            or _DELAY in text
            or "TRAN_MSG" in text
            or "\0" in text
            or self._held.is_full
        ):
            return self._send_special(connection, request)
        if "TIMER_" in text:
            return self._send_timer(connection, request, text)
        body = request.body
        property_bytes = self._stored_properties(text)
        appender = self._appender
        if len(body) > appender.max_body_size or len(property_bytes) > self._max_properties or 0 in property_bytes:
            appender.check(body, property_bytes)
        if not appender.has_begun:
            appender.begin(request.now_ms)
        offset = appender.add(
            topic.queues[queue_id] or topic.queue(queue_id),
            body,
            property_bytes,
            tags_code_of(text),
            header.born_timestamp,
            connection.born_host,
            header.flag,
            header.sys_flag,
            header.reconsume_times or 0,
        )
        if request.codec != JSON or request.flag & FLAG_ONEWAY:
            return self._accepted(request, queue_id, offset)
        head = self._answer_format % (appender.last_physical_offset, queue_id, offset, request.opaque)
        size = len(head)
        return _FRAME(size + 4, size) + head

    def _send_timer(self, connection: Connection, request: Request[SendMessage], text: str) -> Answer:
        """Take one message that asks for a time, for a known topic that takes messages."""
        found = _find_timer(text)
        if found is None or text.count("TIMER_") != 1 or "REAL_" in text:
            # It asks for no time after all, or a broker has added to its properties before.
            return self._send_special(connection, request)
        appender, timers = self._appender, self._timers
        now_ms = appender.store_timestamp if appender.has_begun else appender.begin(request.now_ms)
        kind, digits = found.groups()
        deliver_ms = int(digits) if kind == "IVER_MS" else now_ms + int(digits) * (1000 if kind == "AY_SEC" else 1)
        if deliver_ms <= now_ms:
            return self._send_special(connection, request)
        if not timers.is_limited:
            refusal = timers.refusal(deliver_ms, now_ms)
        else:
            try:
                refusal = self._reads.at_once(timers.refusal, deliver_ms, now_ms)
            except NotInMemory:
                return self._send_special(connection, request)
        if refusal is not None:
            raise self._staging.refused(refusal, deliver_ms - now_ms)
        header, body = request.header, request.body
        queue_id, slot_ms = header.queue_id, out_ms(deliver_ms)
        # What a delay comes to is told to consumers, as that of a message with a time is.
        told = f"\x02TIMER_DELIVER_MS\x01{deliver_ms}" if kind != "IVER_MS" else ""
        property_bytes = (
            self._stored_properties(text)
            + f"{told}\x02TIMER_OUT_MS\x01{slot_ms}\x02REAL_TOPIC\x01{header.topic}\x02REAL_QID\x01{queue_id}".encode()
        )
        if (
            len(body) > appender.max_body_size
            or len(property_bytes) > self._max_timer_properties
            or 0 in property_bytes
        ):
            appender.check(body, property_bytes, AGAIN_ROOM)
        offset = appender.add(
            timers.queue,
            body,
            property_bytes,
            deliver_ms,
            header.born_timestamp,
            connection.born_host,
            header.flag,
            header.sys_flag,
            header.reconsume_times or 0,
            deliver_ms,
        )
        timers.staged(offset, header.topic)
        return self._accepted_timer(request, queue_id, offset, deliver_ms, slot_ms)

    def _accepted(self, request: Request[SendMessage], queue_id: int, offset: int) -> Answer:
        """The answer for the message staged last."""
        if request.flag & FLAG_ONEWAY:
            return None
        physical_offset = self._appender.last_physical_offset
        if request.codec == JSON:
            head = self._answer_format % (physical_offset, queue_id, offset, request.opaque)
            size = len(head)
            return _FRAME(size + 4, size) + head
        return self._answer(offset_message_id(self._appender.store_host, physical_offset), queue_id, offset)

    def _accepted_timer(
        self, request: Request[SendMessage], queue_id: int, offset: int, deliver_ms: int, slot_ms: int
    ) -> Answer:
        """The answer for the message staged last, which waits for its time. It has a handle to recall the message by,
        if that has a UNIQ_KEY."""
        if request.flag & FLAG_ONEWAY:
            return None
        header = request.header
        unique_key = _unique_key(header.properties or "")
        if not unique_key or not self._gives_handles:
            return self._accepted(request, queue_id, offset)
        physical_offset = self._appender.last_physical_offset
        handle = recall_handle.encode(
            header.topic, self._settings.config.broker_name, slot_ms, unique_key, physical_offset, deliver_ms
        )
        if request.codec == JSON:
            head = self._timer_answer_format % (physical_offset, queue_id, offset, handle, request.opaque)
            return _FRAME(len(head) + 4, len(head)) + head
        message_id = offset_message_id(self._appender.store_host, physical_offset)
        return self._answer(message_id, queue_id, offset, handle.decode())

    def _answer(self, message_id: str, queue_id: int, offset: int, handle: str | None = None) -> Command:
        header = SendMessageResponse(message_id, queue_id, offset, recall_handle=handle)
        answer = response(ResponseCode.SUCCESS, None, header)
        answer.ext.update(self._extra_ext)
        return answer

    def _stored_properties(self, text: str) -> bytes:
        """The properties as stored: without WAIT, which is for us only, and with CLUSTER, as RocketMQ has them."""
        if _WAIT_TRUE in text:
            text = text.replace(_WAIT_TRUE, properties.PROPERTY_END, 1)
        elif "WAIT\x01" in text:
            text = properties.without(text, properties.WAIT)
        if "CLUSTER\x01" in text:
            text = properties.without(text, properties.CLUSTER)
        if text and text[-1] != properties.PROPERTY_END:
            return f"{text}\x02{self._cluster}".encode()
        return f"{text}{self._cluster}".encode()

    # --- what is special about a message or a topic

    def _send_special(self, connection: Connection, request: Request[SendMessage]) -> Answer:
        return self._stage_or_wait(connection, request, self._stage_special)

    def _stage_or_wait(self, connection: Connection, request: Request[SendMessage], stage: Stage) -> Answer:
        """Stage messages: now, or when their topic is durable, as an acknowledged message must not lose its topic, and
        when what decides about them has been read."""
        topic: Topic | None
        try:
            return stage(connection, request, at_once=False)
        except _NotSaved as error:
            topic = error.topic
        except NotInMemory:
            topic = None
        self._router.spawn(connection, request, self._stage_later(connection, request, stage, topic))
        return None

    async def _stage_later(
        self, connection: Connection, request: Request[SendMessage], stage: Stage, topic: Topic | None
    ) -> Answer:
        """Stage messages when their topic is durable, if one is not yet, and what decides about them has been read."""
        while True:
            if topic is not None:
                await self._topics.saved(topic)
            try:
                answer = await self._reads.run(self._stage_again, connection, request, stage)
                break
            except _NotSaved as error:
                topic = error.topic
        self._appender.commit()  # nothing else has had a turn since they were staged
        return self._router.answer_when_flushed(connection, request, answer)

    def _stage_again(self, connection: Connection, request: Request[SendMessage], stage: Stage) -> Answer:
        request.now_ms = self._clock.now_ms()
        try:
            return stage(connection, request, at_once=True)
        except BaseException:
            self._appender.roll_back()
            raise

    def _stage_special(self, connection: Connection, request: Request[SendMessage], *, at_once: bool) -> Answer:
        header = request.header
        if header.batch:
            return self._stage_batch(connection, request, at_once=at_once)
        self._prepare(request)
        text = header.properties or ""
        self._refuse_transactions(header, text)
        topic_name, queue_id = header.topic, header.queue_id
        reconsume_times = header.reconsume_times or 0
        level = level_of(text)
        is_retry = topic_name.startswith(RETRY_PREFIX)
        if properties.TIMER_REPLACE in text and not is_retry and (key := replace_key_of(text)) is not None:
            self._replacements.check(len(request.body))
            work = self._replacements.send(
                topic_name, key, len(request.body), partial(self._look_instead, connection, request, key)
            )
            self._router.spawn(connection, request, work, at_once=at_once)
            return None
        if "TIMER_" in text and (level > 0 or is_retry):
            # The level counts; and what a retry has of a timer is left of the message's first delivery.
            text = properties.without_all(text, TIMER_NAMES)
        if is_retry:
            group = topic_name.removeprefix(RETRY_PREFIX)
            if reconsume_times >= retry_limit(self._groups, group, request.version, header.max_reconsume_times):
                dead = dead_letters(self._topics, group)
                if not dead.is_saved:
                    raise _NotSaved(dead)
                topic_name, queue_id, level = dead.name, 0, 0
                text = properties.without(text, properties.DELAY)
        topic = self._table[topic_name]
        if queue_id < 0:
            queue_id = random.randrange(topic.config.write_queue_nums)
        deliver_ms = None
        if "TIMER_D" in text:
            if at_once:
                deliver_ms, text = self._staging.timer_of(text, request.now_ms)
            else:
                deliver_ms, text = self._reads.at_once(self._staging.timer_of, text, request.now_ms)
        if level > 0 and not is_retry and _DUE in text:
            # Our producer's reckoning, by a clock that may be slow or fast.
            now_ms = self._appender.begin(request.now_ms)
            due_ms = self._levels.table.deliver_time(self._staging.level_for(topic_name, level), now_ms)
            text = properties.with_property(text, properties.DUE_MS, str(due_ms))
        offset = self._staging.stage(
            topic.queue(queue_id),
            level,
            deliver_ms,
            request.body,
            self._stored_properties(text),
            header.born_timestamp,
            connection.born_host,
            header.flag,
            header.sys_flag,
            reconsume_times,
            request.now_ms,
        )
        if deliver_ms is not None:
            return self._accepted_timer(request, queue_id, offset, deliver_ms, out_ms(deliver_ms))
        return self._accepted(request, queue_id, offset)

    def _look_instead(self, connection: Connection, request: Request[SendMessage], key: str) -> Callable[[], Answer]:
        """Look at the messages that one replaces, which wait for its topic and key; gives what takes it, to be called
        before anything else happens. All that has to be read is read here, where nothing is staged yet. Raises Refused,
        StoreError, OSError."""
        request.now_ms = self._clock.now_ms()
        try:
            stage = self._to_stage_instead(connection, request, key)
        except _NotSaved as error:
            raise Refused(
                ResponseCode.SYSTEM_ERROR, f"the topic {error.topic.name} was deleted meanwhile: send again"
            ) from None
        except BaseException:
            self._appender.roll_back()
            raise

        def take() -> Answer:
            try:
                answer = stage()
            except BaseException:
                self._appender.roll_back()
                raise
            return self._router.answer_when_flushed(connection, request, answer)

        return take

    def _to_stage_instead(
        self, connection: Connection, request: Request[SendMessage], key: str
    ) -> Callable[[], Answer]:
        header = request.header
        topic = self._prepare(request)
        text = header.properties or ""
        queue_id = header.queue_id if header.queue_id >= 0 else random.randrange(topic.config.write_queue_nums)
        queue, level = topic.queue(queue_id), level_of(text)
        now_ms = self._appender.begin(request.now_ms)
        if level > 0:
            # By the wheel: the queue of a level does not tell what waits there for which key.
            deliver_ms: int | None = self._levels.table.deliver_time(self._staging.level_for(topic.name, level), now_ms)
            text = properties.without_all(text, (properties.DELAY, *properties.TIMERS))
            text = properties.with_property(text, properties.TIMER_DELIVER_MS, str(deliver_ms))
        deliver_ms, text = self._staging.timer_of(text, now_ms)
        changes = self._timers.changes
        places = changes.to_replace(topic.name, key, now_ms)
        answers: list[Answer] = []

        def stage(origin: int) -> None:
            due_ms, stored = deliver_ms, text
            if due_ms is None and origin:
                # Through the wheel all the same: there one record tells both, that it is due and what it replaces.
                due_ms = now_ms
                stored = properties.without_all(text, properties.TIMERS)
                stored = properties.with_property(stored, properties.TIMER_DELIVER_MS, str(due_ms))
            offset = self._staging.stage(
                queue,
                0,
                due_ms,
                request.body,
                self._stored_properties(stored),
                header.born_timestamp,
                connection.born_host,
                header.flag,
                header.sys_flag,
                header.reconsume_times or 0,
                now_ms,
                origin,
                key_hash(key),
            )
            if due_ms is None:
                answers.append(self._accepted(request, queue_id, offset))
            else:
                answers.append(self._accepted_timer(request, queue_id, offset, due_ms, out_ms(due_ms)))

        def replace() -> Answer:
            unique_key = properties.get(text, properties.UNIQ_KEY)
            changes.replace(places, unique_key, deliver_ms or now_ms, now_ms, stage)
            return answers[0]

        return replace

    def _prepare(self, request: Request[SendMessage]) -> Topic:
        """The topic of a send, checked, and made if it is not there. Raises Refused, and _NotSaved."""
        header = request.header
        if self._held.is_full:
            raise Refused(
                ResponseCode.SYSTEM_BUSY,
                f"[OVERLOAD]broker busy, start flow control for a while: {self._held.waiting} messages wait for "
                "the disk",
            )
        topic = self._table.get(header.topic)
        if topic is None:
            check_name(header.topic)
            topic = self._create(header)
        if not topic.is_saved:
            raise _NotSaved(topic)
        check_sendable(header.topic)
        if not topic.config.perm & PERM_WRITE or not self._settings.config.broker_permission & PERM_WRITE:
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

    def _refuse_transactions(self, header: SendMessage, text: str) -> None:
        """Refuse half messages, which this broker cannot hold back until they are committed."""
        transaction = properties.get(text, properties.TRAN_MSG)
        if header.sys_flag & FLAG_TRANSACTION != TRANSACTION_NONE or (transaction or "").lower() == "true":
            raise Refused(
                ResponseCode.NO_PERMISSION,
                f"the broker[{self._settings.config.advertised_host}] sending transaction message is forbidden",
            )

    # --- batches

    def send_batch(self, connection: Connection, request: Request[SendMessage]) -> Answer:
        """Take the messages of a batch, all or none."""
        return self._stage_or_wait(connection, request, self._stage_batch)

    def _stage_batch(self, connection: Connection, request: Request[SendMessage], *, at_once: bool) -> Answer:
        topic = self._prepare(request)
        header = request.header
        request_text = header.properties or ""
        if is_special(request_text) or topic.name.startswith(RETRY_PREFIX):
            raise Refused(ResponseCode.MESSAGE_ILLEGAL, "a batch can neither be delayed nor be a retry nor replace")
        self._refuse_transactions(header, request_text)
        queue_id = header.queue_id
        if queue_id < 0:
            queue_id = random.randrange(topic.config.write_queue_nums)
        if len(request.body) > self._appender.max_body_size:
            raise RecordTooLarge("a batch", len(request.body), self._appender.max_body_size)
        most = self._limits.batch_messages
        decoded = batch.decode(request.body, most + 1)
        if len(decoded) > most:
            raise Refused(
                ResponseCode.MESSAGE_ILLEGAL,
                f"the batch has more messages than maxBatchMessages={most}: send several, or raise that setting",
            )
        common = self._common_properties(request_text)
        parts = [(flag, body, _part_properties(text, common)) for flag, body, text in decoded]
        if not parts:
            raise Refused(ResponseCode.MESSAGE_ILLEGAL, "the batch has no messages")
        for _, body, property_bytes in parts:
            self._appender.check(body, property_bytes)
        queue = topic.queue(queue_id)
        self._appender.begin(request.now_ms)
        offsets, message_ids = [], []
        for flag, body, property_bytes in parts:
            offsets.append(
                self._appender.add(
                    queue,
                    body,
                    property_bytes,
                    tags_code_of(property_bytes.decode()),
                    header.born_timestamp,
                    connection.born_host,
                    flag,
                    header.sys_flag & ~HOST_FLAGS,
                    header.reconsume_times or 0,
                )
            )
            message_ids.append(offset_message_id(self._appender.store_host, self._appender.last_physical_offset))
        if request.flag & FLAG_ONEWAY:
            return None
        return self._answer(",".join(message_ids), queue_id, offsets[0])

    def _common_properties(self, text: str) -> str:
        """What each message of a batch is stored with besides its own properties: those of the request, and CLUSTER.
        They come last, and so they count where a message has one of the same name. All as in RocketMQ, which also
        leaves WAIT in both."""
        common = properties.parse(text)
        common[properties.CLUSTER] = self._settings.config.cluster_name
        return properties.format_properties(common)


def _part_properties(text: str, common: str) -> bytes:
    """The stored properties of a message of a batch; one that asks for a time of its own is refused."""
    if properties.TIMER_REPLACE in text and replace_key_of(text) is not None:
        raise Refused(ResponseCode.MESSAGE_ILLEGAL, "a message of a batch cannot replace another: send it on its own")
    if ("DELAY" in text or "TIMER_" in text) and is_delayed(text):
        raise Refused(ResponseCode.MESSAGE_ILLEGAL, "a message of a batch cannot be delayed: send it on its own")
    if not text or text[-1] == properties.PROPERTY_END:
        return f"{text}{common}".encode()
    return f"{text}\x02{common}".encode()


def _unique_key(text: str) -> str | None:
    """The UNIQ_KEY of a message, None without one or with one that a recall handle cannot have."""
    at = text.find(_UNIQ_KEY)
    if at < 0:
        return None
    start = at + _UNIQ_KEY_SIZE
    end = text.find(properties.PROPERTY_END, start)
    unique_key = text[start:end] if end >= 0 else text[start:]
    if (at and text[at - 1] != properties.PROPERTY_END) or text.count(_UNIQ_KEY) != 1:
        unique_key = properties.get(text, properties.UNIQ_KEY) or ""
    return unique_key if " " not in unique_key else None
