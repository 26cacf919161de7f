"""Offsets of queues (29, 30, 31, 32), of consumer groups (14, 15, 43) and of levels (45); one message (33)."""

from __future__ import annotations

from duemq.broker.access.permission import ASK_TOPIC, CONSUME, LOOK, needs
from duemq.broker.errors import Refused
from duemq.broker.net.connection import Connection
from duemq.broker.net.router import Answer, Router
from duemq.broker.tables.consumer_offsets import ConsumerOffsets
from duemq.broker.tables.groups import Groups
from duemq.broker.tables.topics import Topics
from duemq.protocol.codes import RequestCode, ResponseCode
from duemq.protocol.frames import fastjson
from duemq.protocol.requests.headers import (
    NoFields,
    OffsetResponse,
    QueryConsumerOffset,
    QueueOfTopic,
    Request,
    SearchOffset,
    TimestampResponse,
    UpdateConsumerOffset,
    ViewMessage,
    response,
)
from duemq.scheduler.levels.service import LevelQueues
from duemq.storage.store import MessageStore


class OffsetHandlers:
    """Answers requests for the offsets of queues, groups and levels."""

    def __init__(
        self, store: MessageStore, topics: Topics, groups: Groups, offsets: ConsumerOffsets, levels: LevelQueues
    ) -> None:
        self._store = store
        self._topics = topics
        self._groups = groups
        self._offsets = offsets
        self._levels = levels

    def register(self, router: Router) -> None:
        """Add the handlers to a router."""
        router.add(RequestCode.QUERY_CONSUMER_OFFSET, QueryConsumerOffset, CONSUME, self.query, reads=True)
        router.add(RequestCode.UPDATE_CONSUMER_OFFSET, UpdateConsumerOffset, CONSUME, self.update)
        router.add(RequestCode.GET_MAX_OFFSET, QueueOfTopic, ASK_TOPIC, self.maximum)
        router.add(RequestCode.GET_MIN_OFFSET, QueueOfTopic, ASK_TOPIC, self.minimum)
        router.add(RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, SearchOffset, ASK_TOPIC, self.search, reads=True)
        router.add(RequestCode.GET_EARLIEST_MSG_STORETIME, QueueOfTopic, ASK_TOPIC, self.earliest, reads=True)
        router.add(RequestCode.VIEW_MESSAGE_BY_ID, ViewMessage, needs(record="offset"), self.view, reads=True)
        router.add(RequestCode.GET_ALL_CONSUMER_OFFSET, NoFields, LOOK, self.all_consumer_offsets)
        router.add(RequestCode.GET_ALL_DELAY_OFFSET, NoFields, LOOK, self.all_delay_offsets)

    def query(self, _: Connection, request: Request[QueryConsumerOffset]) -> Answer:
        """Return a group's offset in a queue. A group that has none begins at 0, with two exceptions: the queue's first
        messages are so old that they are only on the disk, or the consumer does not want 0 (setZeroIfNotFound=false).
        Then Refused is raised, and the consumer decides by its consumeFromWhere."""
        header = request.header
        offset = self._offsets.get(header.consumer_group, header.topic, header.queue_id)
        if offset is not None:
            return response(ResponseCode.SUCCESS, None, OffsetResponse(offset))
        if header.set_zero_if_not_found is not False and self._begins_in_memory(header.topic, header.queue_id):
            return response(ResponseCode.SUCCESS, None, OffsetResponse(0))
        raise Refused(ResponseCode.QUERY_NOT_FOUND, "Not found, maybe this group consumer boot first")

    def _begins_in_memory(self, topic: str, queue_id: int) -> bool:
        queue = self._store.queue(topic, queue_id)
        if queue is None:
            return True
        unit = queue.unit(0) if queue.min_offset == 0 else None
        if unit is None:
            return queue.min_offset == 0
        return self._store.log.end - unit[0] <= self._store.config.cached_size

    def update(self, _: Connection, request: Request[UpdateConsumerOffset]) -> Answer:
        """Commit a group's offset. As in 5.x, group, topic and queue must exist, since offsets are kept for good."""
        header = request.header
        if self._groups.get(header.consumer_group) is None:
            raise Refused(ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, f"Group {header.consumer_group} not exist!")
        topic = self._topics.get(header.topic)
        if topic is None:
            raise Refused(ResponseCode.TOPIC_NOT_EXIST, f"Topic {header.topic} not exist!")
        if not 0 <= header.queue_id < topic.queue_limit:
            raise Refused(
                ResponseCode.SYSTEM_ERROR,
                f"queueId={header.queue_id}: the topic {header.topic} has {topic.queue_limit} queues",
            )
        self._offsets.commit(header.consumer_group, header.topic, header.queue_id, header.commit_offset)
        return response(ResponseCode.SUCCESS)

    def maximum(self, _: Connection, request: Request[QueueOfTopic]) -> Answer:
        """Return the offset of a queue's next message."""
        queue = self._store.queue(request.header.topic, request.header.queue_id)
        return response(ResponseCode.SUCCESS, None, OffsetResponse(queue.next_offset if queue is not None else 0))

    def minimum(self, _: Connection, request: Request[QueueOfTopic]) -> Answer:
        """Return the offset of a queue's oldest message."""
        queue = self._store.queue(request.header.topic, request.header.queue_id)
        return response(ResponseCode.SUCCESS, None, OffsetResponse(queue.min_offset if queue is not None else 0))

    def search(self, _: Connection, request: Request[SearchOffset]) -> Answer:
        """Return the offset of the first message stored at or after a time (UPPER: the last at or before it)."""
        header = request.header
        queue = self._store.queue(header.topic, header.queue_id)
        upper = (header.boundary_type or "").upper() == "UPPER"
        offset = self._store.offset_by_time(queue, header.timestamp, upper=upper) if queue is not None else 0
        return response(ResponseCode.SUCCESS, None, OffsetResponse(offset))

    def earliest(self, _: Connection, request: Request[QueueOfTopic]) -> Answer:
        """Return the store time of a queue's oldest message, in ms since the epoch; -1 if there is none."""
        queue = self._store.queue(request.header.topic, request.header.queue_id)
        timestamp = self._store.store_timestamp_of(queue, queue.min_offset) if queue is not None else -1
        return response(ResponseCode.SUCCESS, None, TimestampResponse(timestamp))

    def view(self, _: Connection, request: Request[ViewMessage]) -> Answer:
        """Return the record at a physical offset."""
        record = self._store.named_record_at(request.header.offset)
        if record is None:
            raise Refused(ResponseCode.SYSTEM_ERROR, f"can not find message by offset: {request.header.offset}")
        return response(ResponseCode.SUCCESS, body=record)

    def all_consumer_offsets(self, _: Connection, __: Request[NoFields]) -> Answer:
        """Return the table of all consumer offsets."""
        return response(ResponseCode.SUCCESS, body=fastjson.dumps(self._offsets.to_json()))

    def all_delay_offsets(self, _: Connection, __: Request[NoFields]) -> Answer:
        """Return the levels' progress."""
        return response(ResponseCode.SUCCESS, body=fastjson.dumps(self._levels.to_json()))
