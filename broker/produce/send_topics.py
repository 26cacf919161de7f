"""The topic that a send names: checks whether it accepts the message, and creates it if that is allowed."""

from __future__ import annotations

from duemq.broker.errors import BrokerBaseError, Refused
from duemq.broker.net.held_answers import HeldAnswers
from duemq.broker.produce.message import DelayRequest
from duemq.broker.settings.live_settings import LiveSettings
from duemq.broker.tables.topics import FLAG_UNIT, FLAG_UNIT_SUB, PERM_WRITE, Topic, Topics, check_name, check_sendable
from duemq.protocol.codes import ResponseCode
from duemq.protocol.records.record import FLAG_TRANSACTION
from duemq.protocol.requests.headers import SendMessage
from duemq.protocol.topics import RETRY_PREFIX


class TopicNotSaved(BrokerBaseError):
    """A message cannot be accepted before its topic is durable: an acknowledged message must not lose its topic.
    Attribute: `topic`."""

    def __init__(self, topic: Topic) -> None:
        super().__init__(topic.name)
        self.topic = topic


class SendTopics:
    """Finds the topics of sends."""

    def __init__(self, settings: LiveSettings, topics: Topics, held: HeldAnswers) -> None:
        self._settings = settings
        self._topics = topics
        self.table = topics.table
        self.held = held

    def topic_of(self, header: SendMessage) -> Topic:
        """Return the topic of a send, created if missing, after checking that it accepts the send. Raises Refused,
        TopicNotSaved."""
        if self.held.is_full:
            raise Refused(
                ResponseCode.SYSTEM_BUSY,
                f"[OVERLOAD]broker busy, start flow control for a while: {self.held.waiting} messages wait for "
                "the disk",
            )
        topic = self.table.get(header.topic)
        if topic is None:
            check_name(header.topic)
            topic = self._create(header)
        if not topic.is_saved:
            raise TopicNotSaved(topic)
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
        """Create the topic of a send. Raises Refused if that is not allowed."""
        name = header.topic
        check_sendable(name)
        is_retry = name.startswith(RETRY_PREFIX)
        sys_flag = (FLAG_UNIT_SUB if is_retry else FLAG_UNIT) if header.unit_mode else 0
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

    def check_not_half(self, header: SendMessage, asked: DelayRequest) -> None:
        """Raise Refused for the half message of a transaction, which this broker cannot hold back until its commit.
        `asked`: what the properties of the send ask for."""
        if asked.is_half or header.sys_flag & FLAG_TRANSACTION:
            raise Refused(
                ResponseCode.NO_PERMISSION,
                f"the broker[{self._settings.config.advertised_host}] sending transaction message is forbidden",
            )
