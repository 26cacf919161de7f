"""SEND_MESSAGE (10) and SEND_MESSAGE_V2 (310).

Messages are staged here (see `storage.log.append`) and written by the router, once for all sends of a read. For known
topics there are three fast paths: `send` for a message without a delay, `_send_level` for one with a delay level, and
`_send_timer` for one with a time. They search the property text for the few names that matter. Their effect is the same
as that of the general path (`special_sends`), which is right for every message but slower.
"""

from __future__ import annotations

import re
from typing import Final

from duemq.broker.access.permission import SEND
from duemq.broker.net.cold_reads import ColdReads
from duemq.broker.net.connection import Connection
from duemq.broker.net.router import Answer, Router
from duemq.broker.produce.answers import FRAME, SendAnswers
from duemq.broker.produce.message import as_stored
from duemq.broker.produce.send_topics import SendTopics
from duemq.broker.produce.special_sends import SpecialSends
from duemq.broker.produce.staging import BROKERS_FLAGS, DUE_NAME, Staging
from duemq.broker.produce.when_ready import WhenReady
from duemq.broker.tables.topics import Topic
from duemq.protocol.codes import FLAG_ONEWAY, RequestCode
from duemq.protocol.frames.frame import JSON
from duemq.protocol.records import checksum, properties
from duemq.protocol.records.properties import tags_code_of
from duemq.protocol.records.record import FLAG_TRANSACTION
from duemq.protocol.records.timer_properties import AGAIN_ROOM, out_ms
from duemq.protocol.requests.headers import Request, SendMessage, SendMessageV2
from duemq.protocol.topics import SCHEDULE_TOPIC
from duemq.scheduler.levels.service import LevelQueues
from duemq.scheduler.levels.table import queue_id_of
from duemq.scheduler.timers.service import Timers
from duemq.storage.errors import NotInMemory
from duemq.storage.store import MessageStore

_SPECIAL_FLAGS: Final = FLAG_TRANSACTION | BROKERS_FLAGS
_DELAY: Final = f"{properties.DELAY}{properties.NAME_END}"
_CHECKSUM: Final = checksum.NAME
_find_level: Final = re.compile("(?:\\A|\x02)DELAY\x01([1-9][0-9]{0,3})(?:\x02|\\Z)").search
_find_timer: Final = re.compile(
    "TIMER_DEL(?<![^\x02]TIMER_DEL)(IVER_MS|AY_MS|AY_SEC)\x01([0-9]{1,13})(?:\x02|\\Z)"
).search
"""Finds one of the properties that ask for a time. The literal before the lookbehind makes the search fast."""


class SendHandlers:
    """Handles sends."""

    def __init__(
        self,
        *,
        store: MessageStore,
        topics: SendTopics,
        levels: LevelQueues,
        timers: Timers,
        staging: Staging,
        when_ready: WhenReady,
        special: SpecialSends,
        answers: SendAnswers,
        reads: ColdReads,
    ) -> None:
        self._store = store
        self._appender = store.appender
        self._max_properties = store.appender.max_properties_size
        self._max_waiting_properties = store.appender.max_properties_size - AGAIN_ROOM
        self._table = topics.table
        self._held = topics.held
        self._levels = levels
        self._timers = timers
        self._staging = staging
        self._added = staging.added
        self._when_ready = when_ready
        self._special = special
        self._answers = answers
        self._answer_format = answers.plain
        self._reads = reads

    def register(self, router: Router) -> None:
        """Add the handlers to a router."""
        router.add(RequestCode.SEND_MESSAGE, SendMessage, SEND, self.send, stages=True)
        router.add(RequestCode.SEND_MESSAGE_V2, SendMessageV2, SEND, self.send, stages=True)

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
            or "TRAN_MSG" in text
            or _CHECKSUM in text
            or "\0" in text
            or self._held.is_full
        ):
            return self._send_special(connection, request)
        if "TIMER_" in text:
            return self._send_timer(connection, request, text)
        if _DELAY in text:
            return self._send_level(connection, request, topic, text)
        body = request.body
        property_bytes = as_stored(text, self._added).encode()
        appender = self._appender
        if (
            len(body) > appender.max_body_size.value
            or len(property_bytes) > self._max_properties
            or 0 in property_bytes
        ):
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
            return self._answers.accepted(request, queue_id, offset, appender.last_physical_offset)
        head = self._answer_format % (appender.last_physical_offset, queue_id, offset, request.opaque)
        size = len(head)
        return FRAME(size + 4, size) + head

    def _send_timer(self, connection: Connection, request: Request[SendMessage], text: str) -> Answer:
        """Take one message that asks for a time, for a known topic that accepts messages."""
        found = _find_timer(text)
        if found is None or text.count("TIMER_") != 1 or _DELAY in text or "REAL_" in text:
            # It asks for no time after all, or a broker has already added to its properties.
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
        # The deliver time computed from a delay is passed on to consumers, as an explicit time is.
        told = f"\x02TIMER_DELIVER_MS\x01{deliver_ms}" if kind != "IVER_MS" else ""
        property_bytes = (
            f"{as_stored(text, self._added)}{told}\x02TIMER_OUT_MS\x01{slot_ms}"
            f"\x02REAL_TOPIC\x01{header.topic}\x02REAL_QID\x01{queue_id}"
        ).encode()
        if (
            len(body) > appender.max_body_size.value
            or len(property_bytes) > self._max_waiting_properties
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
        physical_offset = appender.last_physical_offset
        return self._answers.accepted_timer(
            request, queue_id, offset, physical_offset, deliver_ms=deliver_ms, slot_ms=slot_ms
        )

    def _send_level(self, connection: Connection, request: Request[SendMessage], topic: Topic, text: str) -> Answer:
        """Take one message with a delay level, for a known topic that accepts messages."""
        found = _find_level(text)
        table = self._levels.table
        if (
            found is None
            or (level := int(found[1])) > table.maximum
            or text.count(_DELAY) != 1
            or topic.delay_levels is not None
            or DUE_NAME in text
            or "REAL_" in text
        ):
            return self._send_special(connection, request)
        appender = self._appender
        header, body = request.header, request.body
        queue_id = header.queue_id
        now_ms = appender.store_timestamp if appender.has_begun else appender.begin(request.now_ms)
        property_bytes = (
            f"{as_stored(text, self._added)}\x02REAL_TOPIC\x01{header.topic}\x02REAL_QID\x01{queue_id}".encode()
        )
        if (
            len(body) > appender.max_body_size.value
            or len(property_bytes) > self._max_waiting_properties
            or 0 in property_bytes
        ):
            appender.check(body, property_bytes, AGAIN_ROOM)
        due_ms = table.deliver_time(level, now_ms)
        offset = appender.add(
            self._store.ensure_queue(SCHEDULE_TOPIC, queue_id_of(level)),
            body,
            property_bytes,
            due_ms,
            header.born_timestamp,
            connection.born_host,
            header.flag,
            header.sys_flag,
            header.reconsume_times or 0,
            due_ms,
        )
        return self._answers.accepted(request, queue_id, offset, appender.last_physical_offset)

    # --- the general path

    def _send_special(self, connection: Connection, request: Request[SendMessage]) -> Answer:
        return self._when_ready.stage(connection, request, self._special.stage)
