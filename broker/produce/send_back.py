"""CONSUMER_SEND_MSG_BACK (36): a consumer could not process a message."""

from __future__ import annotations

import random
from typing import Final

from duemq.broker.access.permission import PlainAction, group, needs
from duemq.broker.admin.stats import BrokerStats
from duemq.broker.errors import Refused
from duemq.broker.net.cold_reads import ColdReads
from duemq.broker.net.connection import Connection
from duemq.broker.net.router import Answer, Router
from duemq.broker.produce.message import NewMessage
from duemq.broker.produce.retries_and_dead_letters import RetriesAndDeadLetters
from duemq.broker.produce.staging import TIMER_NAMES, Staging
from duemq.broker.settings.live_settings import LiveSettings
from duemq.broker.tables.groups import Groups
from duemq.broker.tables.topics import FLAG_UNIT_SUB, PERM_WRITE, Topic, Topics
from duemq.protocol.codes import RequestCode, ResponseCode
from duemq.protocol.records import properties
from duemq.protocol.records.record import (
    FLAG_COMPRESSED,
    FLAG_COMPRESSION_TYPE,
    FLAG_MULTI_TAGS,
    StoredMessage,
)
from duemq.protocol.requests.headers import ConsumerSendMsgBack, Request, response
from duemq.storage.clock import Clock
from duemq.storage.store import MessageStore

_FIRST_RETRY_LEVEL: Final = 3
_MAX_RECONSUME_TIMES: Final = 2**31 - 1
_NOT_FOR_RETRIES: Final = (
    properties.DELAY,
    properties.REAL_TOPIC,
    properties.REAL_QID,
    properties.WAIT,
    *TIMER_NAMES,
)
_RETRY_FLAGS: Final = FLAG_COMPRESSED | FLAG_COMPRESSION_TYPE | FLAG_MULTI_TAGS
"""The flags of a record that a retry keeps: those that say how to read its body and tags. The flags of transactions
would make it a record that no consume queue has."""


class SendBackHandlers:
    """Schedules retries of messages that could not be processed."""

    def __init__(
        self,
        *,
        settings: LiveSettings,
        store: MessageStore,
        topics: Topics,
        groups: Groups,
        retries: RetriesAndDeadLetters,
        staging: Staging,
        router: Router,
        clock: Clock,
        reads: ColdReads,
        stats: BrokerStats,
    ) -> None:
        """`clock`: the messages' clock."""
        self._stats = stats
        self._settings = settings
        self._clock = clock
        self._reads = reads
        self._store = store
        self._topics = topics
        self._groups = groups
        self._retries = retries
        self._staging = staging
        self._router = router

    def register(self, router: Router) -> None:
        """Add the handler to a router."""
        router.add(
            RequestCode.CONSUMER_SEND_MSG_BACK,
            ConsumerSendMsgBack,
            needs(group(PlainAction.SUB, "group"), record="offset"),
            self.send_back,
        )

    async def send_back(self, connection: Connection, request: Request[ConsumerSendMsgBack]) -> Answer:
        """A consumer could not process a message: deliver it again later, or move it to the dead letters."""
        header = request.header
        group = self._groups.get(header.group)
        if group is None:
            raise Refused(ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, f"subscription group not exist, {header.group}")
        if not self._settings.config.broker_permission & PERM_WRITE:
            raise Refused(
                ResponseCode.NO_PERMISSION, f"the broker[{self._settings.config.advertised_host}] sending is forbidden"
            )
        if group.retry_queue_nums <= 0:
            return response(ResponseCode.SUCCESS)
        message = await self._reads.run(self._store.named_message_at, header.offset)
        if message is None:
            raise Refused(ResponseCode.SYSTEM_ERROR, f"look message by offset failed, {header.offset}")
        limit = self._retries.limit(header.group, request.version, header.max_reconsume_times)
        level = header.delay_level
        sys_flag = FLAG_UNIT_SUB if header.unit_mode else 0
        is_dead = message.reconsume_times >= limit or level < 0
        level = 0 if is_dead else level or _FIRST_RETRY_LEVEL + message.reconsume_times
        while True:
            if is_dead:
                topic = self._retries.dead_letters(header.group, sys_flag)
            else:
                topic = self._retries.retry_topic(header.group, group.retry_queue_nums, sys_flag)
            if topic.is_saved:
                break
            await self._topics.saved(topic)  # it may be deleted meanwhile: then look it up again
        if not topic.config.perm & PERM_WRITE:
            raise Refused(ResponseCode.NO_PERMISSION, f"the topic[{topic.name}] sending message is forbidden")
        appender = self._store.appender
        try:
            self._stage_again(message, topic, level)
            appender.commit()
        except BaseException:
            appender.roll_back()
            raise
        origin = properties.get(message.properties_text, properties.RETRY_TOPIC) or message.topic
        self._stats.items.sent_back(origin, header.group)
        return self._router.answer_when_flushed(connection, request, response(ResponseCode.SUCCESS))

    def _stage_again(self, message: StoredMessage, topic: Topic, level: int) -> None:
        """Stage a previously delivered message once more."""
        text = message.properties_text
        if properties.get(text, properties.RETRY_TOPIC) is None:
            text = properties.with_property(text, properties.RETRY_TOPIC, message.topic)
        if properties.get(text, properties.ORIGIN_MESSAGE_ID) is None:
            text = properties.with_property(text, properties.ORIGIN_MESSAGE_ID, message.offset_message_id)
        text = properties.without_all(text, _NOT_FOR_RETRIES)
        again = NewMessage(
            queue=topic.queue(random.randrange(topic.queue_limit)),
            due=self._staging.by_level(topic, level) if level > 0 else None,
            text=text,
            body=message.body,
            born_timestamp=message.born_timestamp,
            born_host=message.born_host,
            flag=message.flag,
            sys_flag=message.sys_flag & _RETRY_FLAGS,
            reconsume_times=min(message.reconsume_times + 1, _MAX_RECONSUME_TIMES),
        )
        self._staging.stage(again, self._clock.now_ms(), is_stored=True)
