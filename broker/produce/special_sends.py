"""The sends that no fast path of `send` takes: batches, retries, dead letters, messages that replace others, and levels
and times that need a closer look. This path is right for every message but slower."""

from __future__ import annotations

from duemq.broker.net.cold_reads import ColdReads
from duemq.broker.net.connection import Connection
from duemq.broker.net.router import Answer
from duemq.broker.produce.answers import SendAnswers
from duemq.broker.produce.batches import BatchHandlers
from duemq.broker.produce.message import (
    DelayRequest,
    Due,
    NewMessage,
    as_stored,
    read_request,
    sent_message,
    without_recurrence,
)
from duemq.broker.produce.replace import Replacements
from duemq.broker.produce.retries_and_dead_letters import RetriesAndDeadLetters
from duemq.broker.produce.send_topics import SendTopics, TopicNotSaved
from duemq.broker.produce.staging import DUE_NAME, TIMER_NAMES, Staging, check_deletes
from duemq.broker.tables.topics import Topic
from duemq.protocol.records import properties
from duemq.protocol.requests.headers import Request, SendMessage
from duemq.protocol.topics import RETRY_PREFIX
from duemq.storage.log.append import Appender


class SpecialSends:
    """Stages the messages that the fast paths of `SendHandlers` do not take."""

    def __init__(
        self,
        *,
        appender: Appender,
        topics: SendTopics,
        retries: RetriesAndDeadLetters,
        staging: Staging,
        batches: BatchHandlers,
        replacements: Replacements,
        answers: SendAnswers,
        reads: ColdReads,
    ) -> None:
        self._appender = appender
        self._topics = topics
        self._retries = retries
        self._staging = staging
        self._added = staging.added
        self._batches = batches
        self._replacements = replacements
        self._answers = answers
        self._reads = reads

    def stage(self, connection: Connection, request: Request[SendMessage], *, at_once: bool) -> Answer:
        """Stage the message or the batch of a send. See `when_ready.Stage`."""
        header = request.header
        if header.batch:
            return self._batches.stage(connection, request, at_once=at_once)
        topic = self._topics.topic_of(header)
        text = header.properties or ""
        is_retry = header.topic.startswith(RETRY_PREFIX)
        if is_retry and "TIMER_" in text:
            # Timer properties of a retry are left over from the message's first delivery.
            text = properties.without_all(text, TIMER_NAMES)
        text = without_recurrence(text)
        asked = read_request(text)
        self._topics.check_not_half(header, asked)
        if asked.replace_key is not None:
            self._replacements.take(connection, request, asked, at_once=at_once)
            return None
        message = self._message_of(connection, request, topic, asked, text, is_retry=is_retry, at_once=at_once)
        queue_offset = self._staging.stage(message, request.now_ms)
        return self._answers.staged(request, message, queue_offset, self._appender.last_physical_offset)

    def _message_of(
        self,
        connection: Connection,
        request: Request[SendMessage],
        topic: Topic,
        asked: DelayRequest,
        text: str,
        *,
        is_retry: bool,
        at_once: bool,
    ) -> NewMessage:
        """Return the message of a send, with its queue and deliver time. Raises Refused, TopicNotSaved, NotInMemory."""
        header = request.header
        queue_id, level = header.queue_id, asked.level
        if is_retry and (dead := self._retries.dead_letters_of(request)) is not None:
            topic, queue_id, level, text = dead, 0, 0, properties.without(text, properties.DELAY)
            if not topic.is_saved:
                raise TopicNotSaved(topic)
        queue_id = topic.send_queue_id(queue_id)
        due: Due = None
        if level > 0:
            # A level takes precedence over a time.
            text = properties.without_all(text, TIMER_NAMES) if "TIMER_" in text else text
            # DUE_MS from duemq's producer is its own estimate, by a clock that may be slow or fast.
            due = self._staging.by_level(topic, level, tells_due=DUE_NAME in text and not is_retry)
        elif "TIMER_D" in text:
            if at_once:
                due, text = self._staging.by_timer(text, request.now_ms)
            else:
                due, text = self._reads.at_once(self._staging.by_timer, text, request.now_ms)
            if due is not None and due.deletes:
                check_deletes(text, topic.name)
        return sent_message(connection, request, topic.queue(queue_id), due, as_stored(text, self._added))
