"""What groups have consumed, for administrators and their tools: progress, lags, time spans, copies of offsets, and the
units of consume queues."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Final

import msgspec

from duemq.broker.access.permission import LOOK, OPERATE
from duemq.broker.admin.stats_items import StatsItems
from duemq.broker.errors import Refused
from duemq.broker.net.cold_reads import ColdReads
from duemq.broker.net.connection import Connection
from duemq.broker.net.router import Answer, Router
from duemq.broker.settings.live_settings import LiveSettings
from duemq.broker.tables.clients import Clients, GroupSubscription
from duemq.broker.tables.consumer_offsets import ConsumerOffsets
from duemq.broker.tables.groups import Groups
from duemq.broker.tables.topics import Topic, Topics
from duemq.protocol.codes import RequestCode, ResponseCode
from duemq.protocol.frames import fastjson
from duemq.protocol.requests import headers
from duemq.protocol.requests.bodies import BrokerQueue
from duemq.protocol.requests.headers import Request, response
from duemq.storage.clock import Clock
from duemq.storage.queues.consume_queue import UNIT
from duemq.storage.store import MessageStore

MAX_UNITS: Final = 1000
"""Maximum number of units of a consume queue in one answer."""
_NEVER: Final = 2**63 - 1
"""RocketMQ's correction where the other groups are ahead of the compared one: no offset."""

_Look = Callable[[], tuple[dict[str, Any], dict[str, int]]]


class ConsumptionHandlers:
    """Answers questions about what groups have consumed."""

    def __init__(
        self,
        *,
        settings: LiveSettings,
        store: MessageStore,
        topics: Topics,
        groups: Groups,
        offsets: ConsumerOffsets,
        clients: Clients,
        items: StatsItems,
        reads: ColdReads,
        address: str,
        clock: Clock,
    ) -> None:
        """`address`: the broker's HOST:PORT as it is advertised. `clock`: the clock of store times."""
        self._settings = settings
        self._store = store
        self._topics = topics
        self._groups = groups
        self._offsets = offsets
        self._clients = clients
        self._items = items
        self._reads = reads
        self._address = address
        self._clock = clock

    def register(self, router: Router) -> None:
        """Add the handlers to a router."""
        add = router.add
        add(RequestCode.GET_CONSUME_STATS, headers.GetConsumeStats, LOOK, self.consume_stats)
        add(RequestCode.GET_BROKER_CONSUME_STATS, headers.GetBrokerConsumeStats, LOOK, self.broker_consume_stats)
        add(RequestCode.QUERY_TOPIC_CONSUME_BY_WHO, headers.TopicName, LOOK, self.groups_of_topic)
        add(RequestCode.QUERY_TOPICS_BY_CONSUMER, headers.Group, LOOK, self.topics_of_group)
        add(RequestCode.QUERY_SUBSCRIPTION_BY_CONSUMER, headers.GroupOfTopic, LOOK, self.subscription)
        add(RequestCode.QUERY_CONSUME_TIME_SPAN, headers.GroupOfTopic, LOOK, self.time_spans)
        add(RequestCode.QUERY_CORRECTION_OFFSET, headers.QueryCorrectionOffset, LOOK, self.corrections)
        add(RequestCode.QUERY_CONSUME_QUEUE, headers.QueryConsumeQueue, LOOK, self.units)
        add(RequestCode.CLONE_GROUP_OFFSET, headers.CloneGroupOffset, OPERATE, self.clone_offsets)

    # --- progress

    async def consume_stats(self, _: Connection, request: Request[headers.GetConsumeStats]) -> Answer:
        """Return a group's progress in each queue, and its rate of consumption."""
        header = request.header
        group = header.consumer_group
        looks: list[_Look] = []
        rate = 0.0
        for topic in self._consumed(group, [header.topic] if header.topic else self._offsets.topics_of(group)):
            rate += self._items.group_rate(topic.name, group)
            looks += self._looks(group, topic, topic.config.read_queue_nums)
        entries = await self._reads.each(looks)
        body = b'{"consumeTps":%b,"offsetTable":%b}' % (fastjson.dumps(rate), fastjson.dump_object_keys(entries))
        return response(ResponseCode.SUCCESS, body=body)

    async def broker_consume_stats(self, _: Connection, request: Request[headers.GetBrokerConsumeStats]) -> Answer:
        """Return the progress of all groups, by group and topic, and how far they are behind in all."""
        groups = []
        behind = in_flight = 0
        for group in list(self._groups.table):
            stats = []
            for topic in self._consumed(group, self._offsets.topics_of(group)):
                if request.header.is_order and not topic.config.order:
                    continue
                entries = await self._reads.each(self._looks(group, topic, topic.config.write_queue_nums))
                behind += sum(each["brokerOffset"] - each["consumerOffset"] for _, each in entries)
                in_flight += sum(each["pullOffset"] - each["consumerOffset"] for _, each in entries)
                rate = fastjson.dumps(self._items.group_rate(topic.name, group))
                stats.append(b'{"consumeTps":%b,"offsetTable":%b}' % (rate, fastjson.dump_object_keys(entries)))
            groups.append(b"{%b:[%b]}" % (fastjson.dumps(group), b",".join(stats)))
        body = b'{"brokerAddr":%b,"consumeStatsList":[%b],"totalDiff":%d,"totalInflightDiff":%d}' % (
            fastjson.dumps(self._address),
            b",".join(groups),
            behind,
            in_flight,
        )
        return response(ResponseCode.SUCCESS, body=body)

    def _consumed(self, group: str, names: Iterable[str]) -> Iterable[Topic]:
        """Yield the topics of these names that exist, without those to which the group, if it is online, no longer
        subscribes."""
        online = self._clients.consumers.get(group)
        for name in names:
            topic = self._topics.get(name)
            if topic is not None and (online is None or not online.subscriptions or name in online.subscriptions):
                yield topic

    def _looks(self, group: str, topic: Topic, queues: int) -> list[_Look]:
        return [partial(self._progress, group, topic.name, queue_id) for queue_id in range(queues)]

    def _progress(self, group: str, topic: str, queue_id: int) -> tuple[dict[str, Any], dict[str, int]]:
        queue = self._store.queue(topic, queue_id)
        offset = max(0, self._offsets.get(group, topic, queue_id) or 0)
        last = self._store.store_timestamp_of(queue, offset - 1) if queue is not None and offset > 0 else 0
        high = queue.next_offset if queue is not None else 0
        pulled = max(offset, self._offsets.pull_offset(group, topic, queue_id) or 0)
        progress = {
            "brokerOffset": high,
            "consumerOffset": offset,
            "lastTimestamp": max(0, last),
            "pullOffset": min(pulled, max(high, offset)),
        }
        return self._queue(topic, queue_id), progress

    def _queue(self, topic: str, queue_id: int) -> dict[str, Any]:
        return BrokerQueue(self._settings.config.broker_name, queue_id, topic).to_json()

    async def time_spans(self, _: Connection, request: Request[headers.GroupOfTopic]) -> Answer:
        """Return for each queue of a topic the store times of its first and last message and of the message that the
        group consumed last, and for how long the next one has been waiting for the group. Times are in ms since the
        epoch; -1 where there is no message."""
        topic = self._existing(request.header.topic)
        spans = await self._reads.each(
            partial(self._time_span, request.header.group, topic.name, queue_id)
            for queue_id in range(topic.config.write_queue_nums)
        )
        return response(ResponseCode.SUCCESS, body=fastjson.dumps({"consumeTimeSpanSet": spans}))

    def _time_span(self, group: str, topic: str, queue_id: int) -> dict[str, Any]:
        queue, store = self._store.queue(topic, queue_id), self._store
        span = {"consumeTimeStamp": -1, "delayTime": 0, "maxTimeStamp": -1, "minTimeStamp": -1}
        if queue is not None:
            offset = self._offsets.get(group, topic, queue_id) or 0
            span["minTimeStamp"] = store.store_timestamp_of(queue, queue.min_offset)
            span["maxTimeStamp"] = store.store_timestamp_of(queue, queue.next_offset - 1)
            span["consumeTimeStamp"] = (
                store.store_timestamp_of(queue, offset - 1) if offset > 0 else span["minTimeStamp"]
            )
            if offset < queue.next_offset:
                following = store.store_timestamp_of(queue, max(offset, queue.min_offset))
                span["delayTime"] = self._clock.now_ms() - following if following >= 0 else 0
        return {**span, "messageQueue": self._queue(topic, queue_id)}

    # --- groups and topics

    def groups_of_topic(self, _: Connection, request: Request[headers.TopicName]) -> Answer:
        """Return the groups that read a topic, now or earlier."""
        topic = request.header.topic
        names = dict.fromkeys(self._offsets.groups_of(topic))
        names.update(
            dict.fromkeys(group.name for group in self._clients.consumers.values() if topic in group.subscriptions)
        )
        return response(ResponseCode.SUCCESS, body=fastjson.dumps({"groupList": list(names)}))

    def topics_of_group(self, _: Connection, request: Request[headers.Group]) -> Answer:
        """Return the topics for which a group has offsets."""
        body = {"brokerAddr": self._address, "topicList": self._offsets.topics_of(request.header.group)}
        return response(ResponseCode.SUCCESS, body=fastjson.dumps(body))

    def subscription(self, _: Connection, request: Request[headers.GroupOfTopic]) -> Answer:
        """Return an online group's subscription to a topic."""
        group, topic = request.header.group, request.header.topic
        found = self._subscription(group, topic)
        body: dict[str, Any] = {"group": group, "topic": topic}
        if found is not None:
            body["subscriptionData"] = msgspec.to_builtins(found.data)
        return response(ResponseCode.SUCCESS, body=fastjson.dumps(body))

    def _subscription(self, group: str, topic: str) -> GroupSubscription | None:
        online = self._clients.consumers.get(group)
        return online.subscriptions.get(topic) if online is not None else None

    def _existing(self, name: str) -> Topic:
        topic = self._topics.get(name)
        if topic is None:
            raise Refused(ResponseCode.TOPIC_NOT_EXIST, f"topic[{name}] not exist")
        return topic

    # --- offsets

    def corrections(self, _: Connection, request: Request[headers.QueryCorrectionOffset]) -> Answer:
        """Return for each queue the smallest offset of all groups except those to ignore, or 2^63 - 1 where that is
        larger than the offset of the group that is compared."""
        header = request.header
        ignored = set((header.filter_groups or "").split(","))
        smallest: dict[int, int] = {}
        for group in self._offsets.groups_of(header.topic):
            if group not in ignored:
                for queue_id, offset in self._offsets.all_of(group, header.topic).items():
                    smallest[queue_id] = min(smallest.get(queue_id, offset), offset)
        for queue_id, offset in self._offsets.all_of(header.compare_group, header.topic).items():
            if smallest.get(queue_id, 0) > offset:
                smallest[queue_id] = _NEVER
        return response(ResponseCode.SUCCESS, body=b'{"correctionOffsets":%b}' % fastjson.dumps(smallest))

    async def clone_offsets(self, _: Connection, request: Request[headers.CloneGroupOffset]) -> Answer:
        """Copy the offsets of a group to another group, for one topic or for all topics in which it has offsets."""
        header = request.header
        if self._groups.get(header.dest_group) is None:
            raise Refused(ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, f"Group {header.dest_group} not exist!")
        names = [header.topic] if header.topic else self._offsets.topics_of(header.src_group)
        for name in names:
            if self._topics.get(name) is None:
                continue
            is_online = header.src_group in self._clients.consumers
            if not header.offline and is_online and self._subscription(header.src_group, name) is None:
                continue
            for queue_id, offset in self._offsets.all_of(header.src_group, name).items():
                self._offsets.commit(header.dest_group, name, queue_id, offset)
        await self._offsets.save()
        return response(ResponseCode.SUCCESS)

    # --- units

    async def units(self, _: Connection, request: Request[headers.QueryConsumeQueue]) -> Answer:
        """Return at most MAX_UNITS units of a consume queue, each with the physical offset and size of a record, and
        the tags code."""
        header = request.header
        queue = self._store.queue(header.topic, header.queue_id)
        if queue is None:
            raise Refused(ResponseCode.SYSTEM_ERROR, f"{header.queue_id}@{header.topic} is not exist!")
        body: dict[str, Any] = {"maxQueueIndex": queue.next_offset, "minQueueIndex": queue.min_offset}
        if header.consumer_group is not None:
            found = self._subscription(header.consumer_group, header.topic)
            if found is None:
                body["filterData"] = f"{header.consumer_group}@{header.topic} is not online!"
            else:
                body["subscriptionData"] = msgspec.to_builtins(found.data)
        if not queue.min_offset <= header.index < queue.next_offset:
            remark = f"Index {header.index} of {header.queue_id}@{header.topic} is not exist!"
            return response(ResponseCode.SUCCESS, remark, body=fastjson.dumps(body))
        count = min(max(0, header.count), MAX_UNITS)
        data = await self._reads.run(queue.read, header.index, count)
        body["queueData"] = [
            {"eval": False, "physicOffset": physical, "physicSize": size, "tagsCode": code}
            for physical, size, code in UNIT.iter_unpack(data)
        ]
        return response(ResponseCode.SUCCESS, body=fastjson.dumps(body))
