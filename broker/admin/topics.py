"""Requests of administrators about topics: to create, change, delete and list them, and to see their offsets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from duemq.broker.access.permission import ADMINISTER, LOOK, SEE_TOPIC
from duemq.broker.admin.stats_items import StatsItems
from duemq.broker.consume.long_poll import LongPolls
from duemq.broker.errors import Refused
from duemq.broker.limits import MAX_ATTRIBUTES, MAX_ATTRIBUTES_LENGTH
from duemq.broker.net.cold_reads import ColdReads
from duemq.broker.net.connection import Connection
from duemq.broker.net.router import Answer, Router
from duemq.broker.settings.live_settings import LiveSettings
from duemq.broker.tables.consumer_offsets import ConsumerOffsets
from duemq.broker.tables.topics import DELAY_LEVELS, PERM_READ, Topics, check_name
from duemq.protocol.codes import RequestCode, ResponseCode
from duemq.protocol.frames import fastjson
from duemq.protocol.requests import bodies, headers
from duemq.protocol.requests.bodies import BrokerQueue, TopicConfig
from duemq.protocol.requests.headers import NoFields, Request, response
from duemq.scheduler.levels.service import LevelQueues
from duemq.scheduler.levels.table import DelayLevels
from duemq.scheduler.timers.policy.policies import ATTRIBUTES, policy_of
from duemq.storage.durability.owner import Durability
from duemq.storage.store import MessageStore


class TopicHandlers:
    """Handles the requests of RocketMQ's admin API about topics."""

    def __init__(
        self,
        *,
        settings: LiveSettings,
        store: MessageStore,
        topics: Topics,
        offsets: ConsumerOffsets,
        levels: LevelQueues,
        items: StatsItems,
        polls: LongPolls,
        durability: Durability,
        reads: ColdReads,
        on_topics_changed: Callable[[], asyncio.Future[None] | None],
    ) -> None:
        """`on_topics_changed`: registers the topics with external name servers; the future that it returns is done when
        each of them has answered or failed. None without external name servers."""
        self._settings = settings
        self._store = store
        self._topics = topics
        self._offsets = offsets
        self._levels = levels
        self._items = items
        self._polls = polls
        self._durability = durability
        self._reads = reads
        self._on_topics_changed = on_topics_changed

    def register(self, router: Router) -> None:
        """Add the handlers to a router."""
        add = router.add
        add(RequestCode.UPDATE_AND_CREATE_TOPIC, headers.CreateTopic, ADMINISTER, self.create_topic)
        add(RequestCode.UPDATE_AND_CREATE_TOPIC_LIST, NoFields, ADMINISTER, self.create_topics)
        add(RequestCode.DELETE_TOPIC_IN_BROKER, headers.TopicName, ADMINISTER, self.delete_topic)
        add(RequestCode.GET_ALL_TOPIC_CONFIG, NoFields, LOOK, self.all_topics)
        add(RequestCode.GET_TOPIC_CONFIG, headers.TopicName, SEE_TOPIC, self.topic_config)
        add(RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_BROKER, NoFields, LOOK, self.system_topics)
        add(RequestCode.GET_TOPIC_STATS_INFO, headers.TopicName, LOOK, self.topic_stats)

    async def create_topic(self, _: Connection, request: Request[headers.CreateTopic]) -> Answer:
        """Create or change a topic; it is routable when this is answered."""
        return await self._put_topics([self._checked(request.header)])

    async def create_topics(self, _: Connection, request: Request[NoFields]) -> Answer:
        """Create or change several topics, or none of them if one is refused."""
        listed = bodies.decode_request(request.body, bodies.TopicConfigList).topic_config_list
        return await self._put_topics([self._checked(_create_header(config)) for config in listed])

    async def _put_topics(self, configs: list[TopicConfig]) -> Answer:
        for config in configs:
            self._topics.put(config)
            self._polls.end(config.topic_name, config.read_queue_nums if config.perm & PERM_READ else 0)
        await self._topics.save()
        await self._told_name_servers()
        return response(ResponseCode.SUCCESS)

    def _checked(self, header: headers.CreateTopic) -> TopicConfig:
        """Return the configuration of a topic that is to be created or changed. Raises Refused."""
        check_name(header.topic)
        if self._topics.is_own(header.topic):
            raise Refused(ResponseCode.SYSTEM_ERROR, f"The topic[{header.topic}] is conflict with system topic.")
        for name, value in (("readQueueNums", header.read_queue_nums), ("writeQueueNums", header.write_queue_nums)):
            if value < 0:
                raise Refused(ResponseCode.SYSTEM_ERROR, f"{name}={value}: a topic has 0 queues or more")
        if not 0 <= header.perm <= 7:
            raise Refused(ResponseCode.SYSTEM_ERROR, f"perm={header.perm}: it must be 0 to 7")
        if header.topic_filter_type not in ("SINGLE_TAG", "MULTI_TAG"):
            raise Refused(
                ResponseCode.SYSTEM_ERROR,
                f"topicFilterType={header.topic_filter_type}: it must be SINGLE_TAG or MULTI_TAG",
            )
        old = self._topics.get(header.topic)
        attributes = _attributes(old.config.attributes if old is not None else None, header.attributes)
        _check_attributes(attributes or {})
        self._check_delay_levels((attributes or {}).get(DELAY_LEVELS))
        try:
            policy_of(attributes or {})
        except ValueError as error:
            raise Refused(ResponseCode.SYSTEM_ERROR, str(error)) from None
        return TopicConfig(
            topic_name=header.topic,
            read_queue_nums=header.read_queue_nums,
            write_queue_nums=header.write_queue_nums,
            perm=header.perm,
            topic_filter_type=header.topic_filter_type,
            topic_sys_flag=header.topic_sys_flag or 0,
            order=header.order,
            attributes=attributes,
        )

    def _check_delay_levels(self, text: str | None) -> None:
        """Check a topic's own table of levels: each delay needs a queue, that is, one of the broker's levels."""
        if text is None:
            return
        table = self._levels.table
        try:
            own = DelayLevels(text)
        except ValueError as error:
            raise Refused(ResponseCode.SYSTEM_ERROR, f"{DELAY_LEVELS}={text}: {error}") from None
        for level in range(1, own.maximum + 1):
            if table.level_of(own.delay_ms(level)) is None:
                raise Refused(
                    ResponseCode.SYSTEM_ERROR,
                    f"{DELAY_LEVELS}={text}: messageDelayLevel has no level of {own.delay_ms(level) // 1000} s "
                    f"({table.text}): add it there first",
                )

    async def delete_topic(self, _: Connection, request: Request[headers.TopicName]) -> Answer:
        """Remove a topic, its queues and its consumer offsets."""
        name = request.header.topic
        if self._topics.is_own(name):
            raise Refused(ResponseCode.SYSTEM_ERROR, f"The topic[{name}] is conflict with system topic.")
        error = await self._remove_topic(name)
        await self._topics.save()
        await self._offsets.save()  # otherwise they would apply to a later topic of the same name
        await self._told_name_servers()
        if error is not None:
            raise Refused(
                ResponseCode.SYSTEM_ERROR,
                f"the topic[{name}] is deleted, but its files are not yet: {error}. Their removal is tried again; they "
                "take up space until then",
            )
        return response(ResponseCode.SUCCESS)

    async def _remove_topic(self, name: str) -> Exception | None:
        """Remove a topic; return the error if its files could not be removed."""
        self._topics.remove(name)
        self._items.remove_topic(name, self._offsets.groups_of(name))
        self._polls.end(name)
        self._offsets.remove_topic(name)
        removed: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()
        self._durability.remove_topic(name, lambda error: None if removed.done() else removed.set_result(error))
        return await removed

    async def _told_name_servers(self) -> None:
        told = self._on_topics_changed()
        if told is not None:
            await told

    def all_topics(self, _: Connection, __: Request[NoFields]) -> Answer:
        """Return the table of topics."""
        return response(ResponseCode.SUCCESS, body=fastjson.dumps(self._topics.to_json()))

    def topic_config(self, _: Connection, request: Request[headers.TopicName]) -> Answer:
        """Return one topic."""
        topic = self._topics.get(request.header.topic)
        if topic is None:
            raise Refused(ResponseCode.TOPIC_NOT_EXIST, f"No topic in this broker. topic: {request.header.topic}")
        return response(ResponseCode.SUCCESS, body=fastjson.dumps({**topic.extra, **topic.config.to_json()}))

    def system_topics(self, _: Connection, __: Request[NoFields]) -> Answer:
        """Return the names of the broker's own topics."""
        return response(ResponseCode.SUCCESS, body=fastjson.dumps({"topicList": self._topics.own_names()}))

    async def topic_stats(self, _: Connection, request: Request[headers.TopicName]) -> Answer:
        """Return the offsets of a topic's queues, and the store time of the last message in each."""
        name = request.header.topic
        topic = self._topics.get(name)
        if topic is None:
            raise Refused(ResponseCode.TOPIC_NOT_EXIST, f"topic[{name}] not exist")
        entries = await self._reads.each(
            partial(self._offsets_of, name, queue_id) for queue_id in range(topic.queue_limit)
        )
        body = b'{"offsetTable":%b}' % fastjson.dump_object_keys(entries)
        return response(ResponseCode.SUCCESS, body=body)

    def _offsets_of(self, topic: str, queue_id: int) -> tuple[dict[str, Any], dict[str, int]]:
        queue = self._store.queue(topic, queue_id)
        low, high = (queue.min_offset, queue.next_offset) if queue is not None else (0, 0)
        last = self._store.store_timestamp_of(queue, high - 1) if queue is not None and high > low else 0
        return self._queue(topic, queue_id), {"lastUpdateTimestamp": last, "maxOffset": high, "minOffset": low}

    def _queue(self, topic: str, queue_id: int) -> dict[str, Any]:
        return BrokerQueue(self._settings.config.broker_name, queue_id, topic).to_json()


_OWN_PREFIXES: Final = ("timer.", "delay.")
_OWN_ATTRIBUTES: Final = (*ATTRIBUTES, DELAY_LEVELS)
"""The attributes that duemq supports. Others are kept for the brokers that know them, but an unknown attribute that has
one of duemq's prefixes is refused: it would have no effect, and nobody would notice."""


def _create_header(config: TopicConfig) -> headers.CreateTopic:
    """Return the header of a request for one topic, made from an entry of a list of topics. There too, attributes are
    changes: +name or -name, with values."""
    changes = [name if name.startswith("-") else f"{name}={value}" for name, value in (config.attributes or {}).items()]
    return headers.CreateTopic(
        topic=config.topic_name,
        default_topic="",
        read_queue_nums=config.read_queue_nums,
        write_queue_nums=config.write_queue_nums,
        perm=config.perm,
        topic_filter_type=config.topic_filter_type,
        topic_sys_flag=config.topic_sys_flag,
        order=config.order,
        attributes=",".join(changes),
    )


def _attributes(old: dict[str, str] | None, changes: str | None) -> dict[str, str] | None:
    """Return 5.x's topic attributes after changes such as "+a=b,-c". Raises Refused."""
    # Room for all attributes that a topic may have, twice, with the characters that make each of them a change.
    if len(changes or "") > 2 * (MAX_ATTRIBUTES_LENGTH + 3 * MAX_ATTRIBUTES):
        raise Refused(
            ResponseCode.SYSTEM_ERROR,
            f"attributes of {len(changes or '')} characters: a topic has at most {MAX_ATTRIBUTES} attributes, with "
            f"{MAX_ATTRIBUTES_LENGTH} characters in all",
        )
    result = dict(old or {})
    for change in filter(None, (part.strip() for part in (changes or "").split(","))):
        name, separator, value = change[1:].partition("=")
        if change[0] == "+" and separator and name:
            if name.startswith(_OWN_PREFIXES) and name not in _OWN_ATTRIBUTES:
                raise Refused(
                    ResponseCode.SYSTEM_ERROR, f"unsupported key: {name}, supported are {', '.join(_OWN_ATTRIBUTES)}"
                )
            result[name] = value
        elif change[0] == "-" and name:
            result.pop(name, None)
        else:
            raise Refused(ResponseCode.SYSTEM_ERROR, f"attributes={changes}: write +name=value or -name")
    return result or None


def _check_attributes(attributes: dict[str, str]) -> None:
    """Raise Refused for more attributes than a topic may have."""
    length = sum(len(name) + len(value) for name, value in attributes.items())
    if len(attributes) > MAX_ATTRIBUTES or length > MAX_ATTRIBUTES_LENGTH:
        raise Refused(
            ResponseCode.SYSTEM_ERROR,
            f"{len(attributes)} attributes with {length} characters: a topic has at most {MAX_ATTRIBUTES}, with "
            f"{MAX_ATTRIBUTES_LENGTH} characters in all. Remove some (-name) in the same change",
        )
