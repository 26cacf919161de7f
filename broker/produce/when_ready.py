"""Staging that may have to wait: until a new topic is durable, or until the data that decides about a message is
read."""

from __future__ import annotations

from typing import Protocol

from duemq.broker.net.cold_reads import ColdReads
from duemq.broker.net.connection import Connection
from duemq.broker.net.router import Answer, Router
from duemq.broker.produce.send_topics import TopicNotSaved
from duemq.broker.tables.topics import Topic, Topics
from duemq.protocol.requests.headers import Request, SendMessage
from duemq.storage.clock import Clock
from duemq.storage.errors import NotInMemory
from duemq.storage.log.append import Appender


class Stage(Protocol):
    """Stages the messages of a request."""

    def __call__(self, connection: Connection, request: Request[SendMessage], *, at_once: bool) -> Answer:
        """Stage; return the answer, or None if it comes later. `at_once`: see `Router.spawn`; the caller then ensures
        that staging does not wait for the disk. Raises TopicNotSaved, NotInMemory; then nothing of the request is
        staged."""


class WhenReady:
    """Stages the messages of requests, now or later."""

    def __init__(self, topics: Topics, appender: Appender, router: Router, clock: Clock, reads: ColdReads) -> None:
        """`clock`: the messages' clock."""
        self._topics = topics
        self._appender = appender
        self._router = router
        self._clock = clock
        self._reads = reads

    def stage(self, connection: Connection, request: Request[SendMessage], stage: Stage) -> Answer:
        """Stage the messages of a request by `stage`: now, or in a task of its own, in which case the answer is
        None."""
        topic: Topic | None
        try:
            return stage(connection, request, at_once=False)
        except TopicNotSaved as error:
            topic = error.topic
        except NotInMemory:
            topic = None
        self._router.spawn(connection, request, self._stage_later(connection, request, stage, topic))
        return None

    async def _stage_later(
        self, connection: Connection, request: Request[SendMessage], stage: Stage, topic: Topic | None
    ) -> Answer:
        while True:
            if topic is not None:
                await self._topics.saved(topic)
            try:
                answer = await self._reads.run(self._stage_again, connection, request, stage)
                break
            except TopicNotSaved as error:
                topic = error.topic
        self._appender.commit()  # nothing else has run since they were staged
        return self._router.answer_when_flushed(connection, request, answer)

    def _stage_again(self, connection: Connection, request: Request[SendMessage], stage: Stage) -> Answer:
        request.now_ms = self._clock.now_ms()
        try:
            return stage(connection, request, at_once=True)
        except BaseException:
            self._appender.roll_back()
            raise
