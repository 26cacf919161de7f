"""Sends that replace a waiting message (TIMER_REPLACE), handled one after the other.

Each is written separately and in order of arrival: the last one wins. Recurring messages take the same path.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from duemq.broker.errors import Refused
from duemq.broker.net.connection import Connection
from duemq.broker.net.router import Answer, Router
from duemq.broker.produce.answers import SendAnswers
from duemq.broker.produce.key_turns import KeyTurns
from duemq.broker.produce.message import ByTimer, DelayRequest, NewMessage, as_stored, sent_message
from duemq.broker.produce.send_topics import SendTopics, TopicNotSaved
from duemq.broker.produce.staging import Staging
from duemq.protocol.codes import ResponseCode
from duemq.protocol.records import properties
from duemq.protocol.requests.headers import Request, SendMessage
from duemq.scheduler.levels.service import LevelQueues
from duemq.scheduler.timers.index.keys import key_hash
from duemq.scheduler.timers.service import Timers
from duemq.storage.clock import Clock
from duemq.storage.store import MessageStore

MAX_WAITING: Final = 10_000
MAX_WAITING_BYTES: Final = 64 * 1024 * 1024
"""Further sends are refused once MAX_WAITING sends wait, or sends with bodies of this size in total."""


class Replacements:
    """The sends that wait for their turn to replace a message."""

    def __init__(
        self,
        *,
        store: MessageStore,
        topics: SendTopics,
        levels: LevelQueues,
        timers: Timers,
        staging: Staging,
        answers: SendAnswers,
        router: Router,
        clock: Clock,
        turns: KeyTurns,
    ) -> None:
        """`clock`: the messages' clock."""
        self._store = store
        self._appender = store.appender
        self._topics = topics
        self._levels = levels
        self._timers = timers
        self._staging = staging
        self._answers = answers
        self._router = router
        self._clock = clock
        self._turns = turns
        self._waiting = self._waiting_bytes = 0

    def take(
        self, connection: Connection, request: Request[SendMessage], asked: DelayRequest, *, at_once: bool
    ) -> None:
        """Take a send that replaces a message; it is handled and answered when its turn comes. `at_once`: see
        `Router.spawn`. Raises Refused if too many wait."""
        self._check(len(request.body))
        self._router.spawn(connection, request, self._send(connection, request, asked), at_once=at_once)

    def _check(self, size: int) -> None:
        """Raise Refused if there is no room for a send of this size now."""
        if self._waiting >= MAX_WAITING or self._waiting_bytes + size > MAX_WAITING_BYTES:
            raise Refused(
                ResponseCode.SYSTEM_BUSY,
                f"[OVERLOAD]broker busy, start flow control for a while: {self._waiting} messages wait to replace "
                "others",
            )

    async def _send(self, connection: Connection, request: Request[SendMessage], asked: DelayRequest) -> Answer:
        topic, key, size = request.header.topic, asked.replace_key or "", len(request.body)
        self._waiting += 1
        self._waiting_bytes += size
        try:
            return await self._turns.change(topic, key, self._look, connection, request, asked, key)
        finally:
            self._waiting -= 1
            self._waiting_bytes -= size

    def _staged(self, connection: Connection, request: Request[SendMessage], stage: Callable[[], Answer]) -> Answer:
        try:
            answer = stage()
        except BaseException:
            self._appender.roll_back()
            raise
        return self._router.answer_when_flushed(connection, request, answer)

    def _look(
        self, connection: Connection, request: Request[SendMessage], asked: DelayRequest, key: str
    ) -> Callable[[], Answer]:
        """Look at the messages to replace, which wait for the same topic and key. Return a function that stages the new
        message, to be called before anything else happens.

        Everything that must be read is read here, where nothing is staged yet, because a look that would have to wait
        for the disk is repeated. Raises Refused, NotInMemory, StoreError, OSError."""
        request.now_ms = self._clock.now_ms()
        try:
            stage = self._replacement(connection, request, asked, key)
        except TopicNotSaved as error:
            raise Refused(
                ResponseCode.SYSTEM_ERROR, f"the topic {error.topic.name} was deleted meanwhile: send again"
            ) from None
        except BaseException:
            self._appender.roll_back()
            raise
        return lambda: self._staged(connection, request, stage)

    def _replacement(
        self, connection: Connection, request: Request[SendMessage], asked: DelayRequest, key: str
    ) -> Callable[[], Answer]:
        header = request.header
        topic = self._topics.topic_of(header)
        queue_id = topic.send_queue_id(header.queue_id)
        now_ms = self._appender.begin(request.now_ms)
        text = header.properties or ""
        if asked.level > 0:
            # It waits in the timer wheel: a level's queue cannot tell which of its messages wait for which key.
            level = self._staging.by_level(topic, asked.level).level
            text = properties.without_all(text, (properties.DELAY, *properties.TIMERS))
            due_ms = self._levels.table.deliver_time(level, now_ms)
            text = properties.with_property(text, properties.TIMER_DELIVER_MS, str(due_ms))
        due: ByTimer | None
        if asked.recurrence is not None:
            due, text = self._staging.recurring(asked.recurrence, text, now_ms)
        else:
            due, text = self._staging.by_timer(text, now_ms)
        due = due and due._replace(key=key_hash(key))
        message = sent_message(connection, request, topic.queue(queue_id), due, as_stored(text, self._staging.added))
        changes = self._timers.changes
        replaced = changes.to_replace(topic.name, key, now_ms)
        answers: list[Answer] = []

        def stage(origin: int) -> None:
            staged = _in_place_of(message, origin, key, now_ms) if origin else message
            queue_offset = self._staging.stage(staged, now_ms)
            answers.append(self._answers.staged(request, staged, queue_offset, self._appender.last_physical_offset))

        def replace() -> Answer:
            unique_key = properties.get(text, properties.UNIQ_KEY)
            changes.replace(replaced, unique_key, due.deliver_ms if due else now_ms, now_ms, stage)
            return answers[0]

        return replace


def _in_place_of(message: NewMessage, origin: int, key: str, now_ms: int) -> NewMessage:
    """Return a message that replaces the record at a physical offset."""
    due = message.due
    if isinstance(due, ByTimer):
        return message._replace(due=due._replace(origin=origin))
    # An overdue message also goes through the wheel: one record there says that it is due and what it replaces.
    text = properties.without_all(message.text, properties.TIMERS)
    text = properties.with_property(text, properties.TIMER_DELIVER_MS, str(now_ms))
    return message._replace(due=ByTimer(now_ms, origin=origin, key=key_hash(key)), text=text)
