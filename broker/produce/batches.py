"""SEND_BATCH_MESSAGE (320), and sends marked as a batch: several messages for one queue, all stored or none."""

from __future__ import annotations

from duemq.broker.access.permission import SEND
from duemq.broker.errors import LimitReached, Refused
from duemq.broker.limits import Limits
from duemq.broker.net.connection import Connection
from duemq.broker.net.router import Answer, Router
from duemq.broker.produce.answers import SendAnswers
from duemq.broker.produce.message import read_request, without_recurrence
from duemq.broker.produce.send_topics import SendTopics
from duemq.broker.produce.staging import BROKERS_FLAGS
from duemq.broker.produce.when_ready import WhenReady
from duemq.broker.settings.live_settings import LiveSettings
from duemq.protocol.codes import FLAG_ONEWAY, RequestCode, ResponseCode
from duemq.protocol.records import batch, properties
from duemq.protocol.records.message_id import offset_message_id
from duemq.protocol.records.properties import tags_code_of
from duemq.protocol.requests.headers import Request, SendMessage, SendMessageV2
from duemq.protocol.topics import RETRY_PREFIX
from duemq.storage.errors import RecordTooLarge
from duemq.storage.log.append import Appender


class BatchHandlers:
    """Handles batches."""

    def __init__(
        self,
        *,
        settings: LiveSettings,
        appender: Appender,
        topics: SendTopics,
        when_ready: WhenReady,
        answers: SendAnswers,
        limits: Limits,
        added: str,
    ) -> None:
        """`added`: the properties that the broker adds to new messages, see `message.of_broker`."""
        self._added = properties.parse(added)
        self._settings = settings
        self._appender = appender
        self._topics = topics
        self._when_ready = when_ready
        self._answers = answers
        self._limits = limits

    def register(self, router: Router) -> None:
        """Add the handler to a router."""
        router.add(RequestCode.SEND_BATCH_MESSAGE, SendMessageV2, SEND, self.send, stages=True)

    def send(self, connection: Connection, request: Request[SendMessage]) -> Answer:
        """Take the messages of a batch, all or none."""
        return self._when_ready.stage(connection, request, self.stage)

    def stage(self, connection: Connection, request: Request[SendMessage], *, at_once: bool) -> Answer:
        """Stage the messages of a batch. Raises Refused, TopicNotSaved, StoreError; then none is staged."""
        header = request.header
        topic = self._topics.topic_of(header)
        request_text = without_recurrence(header.properties or "")
        asked = read_request(request_text)
        if asked.is_delayed or asked.replace_key is not None or topic.name.startswith(RETRY_PREFIX):
            raise Refused(
                ResponseCode.MESSAGE_ILLEGAL, "a batch can neither be delayed, nor be a retry, nor replace messages"
            )
        self._topics.check_not_half(header, asked)
        queue_id = topic.send_queue_id(header.queue_id)
        appender = self._appender
        parts = self._parts(request.body, request_text)
        for _, body, property_bytes in parts:
            appender.check(body, property_bytes)
        queue = topic.queue(queue_id)
        appender.begin(request.now_ms)
        offsets, message_ids = [], []
        for flag, body, property_bytes in parts:
            offsets.append(
                appender.add(
                    queue,
                    body,
                    property_bytes,
                    tags_code_of(property_bytes.decode()),
                    header.born_timestamp,
                    connection.born_host,
                    flag,
                    header.sys_flag & ~BROKERS_FLAGS,
                    header.reconsume_times or 0,
                )
            )
            message_ids.append(offset_message_id(appender.store_host, appender.last_physical_offset))
        if request.flag & FLAG_ONEWAY:
            return None
        return self._answers.answer(",".join(message_ids), queue_id, offsets[0])

    def _parts(self, data: bytes, request_text: str) -> list[tuple[int, bytes, bytes]]:
        """Return the messages of a batch: flag, body, and properties as stored. Raises Refused, BodyFormatError,
        RecordTooLarge."""
        if len(data) > self._appender.max_body_size.value:
            raise RecordTooLarge("a batch", len(data), self._appender.max_body_size.value)
        most = self._limits.batch_messages
        decoded = batch.decode(data, most + 1)
        if len(decoded) > most:
            raise LimitReached(
                "maxBatchMessages",
                ResponseCode.MESSAGE_ILLEGAL,
                f"the batch has more messages than maxBatchMessages={most}: send several, or raise that setting",
            )
        if not decoded:
            raise Refused(ResponseCode.MESSAGE_ILLEGAL, "the batch has no messages")
        common = self._common_properties(request_text)
        return [(flag, body, _part_properties(text, common)) for flag, body, text in decoded]

    def _common_properties(self, text: str) -> str:
        """Return the properties that are stored with each message of a batch in addition to its own: those of the
        request and those of the broker. They come last, and so win over properties of the same name in a message, as in
        RocketMQ."""
        return properties.format_properties({**properties.parse(text), **self._added})


def _part_properties(text: str, common: str) -> bytes:
    """Return the stored properties of a message of a batch. Raises Refused if the message is delayed or replaces
    another."""
    text = without_recurrence(text)
    asked = read_request(text)
    if asked.replace_key is not None:
        raise Refused(ResponseCode.MESSAGE_ILLEGAL, "a message of a batch cannot replace another: send it on its own")
    if asked.is_delayed:
        raise Refused(ResponseCode.MESSAGE_ILLEGAL, "a message of a batch cannot be delayed: send it on its own")
    if not text or text[-1] == properties.PROPERTY_END:
        return f"{text}{common}".encode()
    return f"{text}\x02{common}".encode()
