"""The broker's topics: config/topics.json, and for each topic what the hot path needs to know about it.

Keeps invariant 8 of ARCHITECTURE.md.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Container, Iterator, Mapping
from copy import copy
from typing import Any, Final

import msgspec
import structlog

from duemq.broker.errors import LimitReached, Refused
from duemq.broker.limits import Limits
from duemq.broker.settings.config import BrokerConfig
from duemq.broker.settings.live_settings import LiveSettings
from duemq.broker.tables.persister import Persister, SavedTable, Table, Written
from duemq.broker.tables.table import Fields, check_queues, refuse, section, typed
from duemq.protocol.codes import ResponseCode
from duemq.protocol.frames import fastjson
from duemq.protocol.requests.bodies import DataVersion, TopicConfig
from duemq.protocol.topics import NAME, NOT_FOR_CLIENTS, RETRY_PREFIX, SCHEDULE_TOPIC, TIMER_TOPIC
from duemq.scheduler.levels.table import DelayLevels
from duemq.scheduler.timers.policy.policies import TimerPolicy, policy_of
from duemq.storage.clock import Clock
from duemq.storage.config_file import ConfigFile
from duemq.storage.queues.consume_queue import ConsumeQueue
from duemq.storage.store import MessageStore

log = structlog.get_logger(__name__)

PERM_INHERIT: Final = 1
PERM_WRITE: Final = 2
PERM_READ: Final = 4
PERM_BOTH: Final = PERM_READ | PERM_WRITE
FLAG_UNIT: Final = 1
"""The flag of topicSysFlag of a topic to which clients of a unit send."""
FLAG_UNIT_SUB: Final = 2
"""The flag of topicSysFlag of a topic of retries or dead letters, for a group whose clients are of a unit."""

AUTO_CREATE_TOPIC: Final = "TBW102"
MAX_TOPIC_LENGTH: Final = 127
_MAX_NAMED: Final = 20
"""Maximum number of topics that a warning names."""

_SYSTEM: Final = NOT_FOR_CLIENTS | {AUTO_CREATE_TOPIC, "BenchmarkTest", "RMQ_SYS_TRACE_TOPIC"}
_SYSTEM_PREFIX: Final = "rmq_sys_"


DELAY_LEVELS: Final = "delay.levels"
"""A topic attribute of duemq's own: a table of levels in the form of messageDelayLevel, for the messages of this topic
only. Its delays are among the broker's."""


class Topic:
    """A topic at run time. `queues` holds, by queue id, the queues that have received a message, else None."""

    __slots__ = (
        "config",
        "delay_levels",
        "extra",
        "is_direct",
        "is_saved",
        "json",
        "queues",
        "store",
        "takes_messages",
    )

    def __init__(self, store: MessageStore, config: TopicConfig, extra: Fields, *, takes_messages: bool) -> None:
        """`takes_messages`: whether the broker accepts messages at all."""
        self.store = store
        self.takes_messages = takes_messages
        self.config = config
        self.extra = extra
        self.is_saved = False
        self.is_direct = False
        """Whether a plain send needs no further check of the topic."""
        self.delay_levels: DelayLevels | None = None
        """The topic's own table of levels, if it has one (attribute delay.levels)."""
        self.queues: list[ConsumeQueue | None] = []
        self.json = msgspec.Raw()
        """The topic in the JSON form of topics.json."""
        self.change(config)

    @property
    def name(self) -> str:
        """The topic's name."""
        return self.config.topic_name

    @property
    def queue_limit(self) -> int:
        """All queue ids are below this."""
        return max(self.config.read_queue_nums, self.config.write_queue_nums)

    def send_queue_id(self, asked: int) -> int:
        """Return the id of the queue that a send goes to. `asked`: the queue id in the request; below 0 for any queue,
        which there must be."""
        return asked if asked >= 0 else random.randrange(self.config.write_queue_nums)

    def change(self, config: TopicConfig) -> None:
        """Apply a new configuration."""
        self.config = config
        self.json = msgspec.Raw(fastjson.dumps({**self.extra, **config.to_json()}))
        known = self.store.queues.get(config.topic_name, {})
        self.queues = [known.get(queue_id) for queue_id in range(self.queue_limit)]
        self.delay_levels = delay_levels_of(config)
        self.refresh()

    def refresh(self) -> None:
        """Recompute `is_direct`."""
        config = self.config
        self.is_direct = (
            self.is_saved
            and self.takes_messages
            and bool(config.perm & PERM_WRITE)
            and config.topic_name not in NOT_FOR_CLIENTS
            and not config.topic_name.startswith(RETRY_PREFIX)
        )

    def queue(self, queue_id: int) -> ConsumeQueue:
        """Return a queue, creating it if missing. The id must be below `queue_limit`."""
        queue = self.queues[queue_id]
        if queue is None:
            queue = self.queues[queue_id] = self.store.ensure_queue(self.config.topic_name, queue_id)
        return queue


def delay_levels_of(config: TopicConfig) -> DelayLevels | None:
    """Return the table of levels in a topic's attributes; None if there is none, or an invalid one, which the admin API
    refuses."""
    text = (config.attributes or {}).get(DELAY_LEVELS)
    try:
        return DelayLevels(text) if text is not None else None
    except ValueError:
        return None


def timer_policy_of(config: TopicConfig) -> TimerPolicy | None:
    """Return the timer policy in a topic's attributes; None if there is none, or an invalid one, which the admin API
    refuses."""
    try:
        return policy_of(config.attributes or {})
    except ValueError:
        return None


class Topics:
    """All topics of one broker."""

    def __init__(
        self,
        *,
        settings: LiveSettings,
        store: MessageStore,
        file: ConfigFile,
        clock: Clock,
        persister: Persister,
        limits: Limits,
    ) -> None:
        self._limits = limits
        self._queues = 0
        """The number of queues of all topics together."""
        self._settings = settings
        self._store = store
        self._clock = clock
        self._file = file
        self._saved = SavedTable(persister, file, self._snapshot)
        self._unsaved: list[Topic] = []
        """Topics that are not part of any write of the table yet."""
        self._in_write: set[Topic] = set()
        """Topics that the running write is the first to contain."""
        self._extra: Fields = {}
        self._has_all = False
        """Whether the table that was read had all topics that accepted messages."""
        self.table: dict[str, Topic] = {}
        self.version = DataVersion()
        self._on_change: list[Callable[[], object]] = []
        self._on_policy: list[Callable[[str, TimerPolicy | None], None]] = []
        self._on_created: list[Callable[[str, str], None]] = []
        self._follow_settings()

    def on_change(self, callback: Callable[[], object]) -> None:
        """Call `callback` after each time topics were added, changed or removed."""
        self._on_change.append(callback)

    def on_policy(self, callback: Callable[[str, TimerPolicy | None], None]) -> None:
        """Call `callback` with the name and the timer policy of each topic that has one when the topics begin to accept
        messages (`begin`), and of each topic that is added, changed or removed later; None for no policy."""
        self._on_policy.append(callback)

    def on_created(self, callback: Callable[[str, str], None]) -> None:
        """Call `callback` with "topic" and the name of each topic that is created because a client used it."""
        self._on_created.append(callback)

    # --- start

    def load(self) -> None:
        """Read the table; changes nothing on the disk. Raises StoreFormatError, OSError."""
        data = self._file.read()
        self._has_all = self._file.is_newest
        self.version = typed(self._file, data.pop("dataVersion", None) or {}, DataVersion, "dataVersion")
        known = {field.encode_name for field in msgspec.structs.fields(TopicConfig)}
        for name, fields in section(self._file, data, "topicConfigTable", Fields).items():
            config = typed(self._file, {**fields, "topicName": name}, TopicConfig, f"topic {name}")
            if "/" in name or "\0" in name or name in ("", ".", ".."):
                refuse(self._file, f"{name!r} cannot be a topic: its messages would be in a directory of that name")
            queues = {"readQueueNums": config.read_queue_nums, "writeQueueNums": config.write_queue_nums}
            check_queues(self._file, f"topic {name}", **queues)
            extra = {key: value for key, value in fields.items() if key not in known}
            self._add(config, extra)
        self._extra = data

    def begin(self) -> None:
        """Add RocketMQ's own topics that are missing, and let all topics accept messages. The store must be open.

        If the table was lost, or an earlier edition was read, the topics that have queues are created again, since
        nobody could otherwise read their messages. Raises OSError."""
        loaded = copy(self.version)
        if not self._file.is_newest:
            self._has_all = self._store.log.end == 0
            self._make_again()
        for config in self._own_topics():
            if config.topic_name not in self.table:
                self._add(config, {})
                self._next_version()
        if self.version == loaded and self._file.is_newest:
            self._saved.loaded()
        else:
            self._saved.save_now()
        for topic in self.table.values():
            policy = timer_policy_of(topic.config)
            if policy is not None:
                self._tell_policy(topic.name, policy)

    def _make_again(self) -> None:
        made = []
        for config in missing_topics(self._store, self.table, self.is_own):
            self._add(config, {})
            made.append(config.topic_name)
        if made:
            self._next_version()
            log.warning(
                "topics_made_again",
                topics=len(made),
                names=sorted(made)[:_MAX_NAMED],
                reason=f"{self._file.path} does not have them, but the store has their messages",
                help="set their numbers of queues, permissions and attributes again with mqadmin updateTopic",
            )

    def _own_topics(self) -> list[TopicConfig]:
        config = self._settings.config
        own = [
            ("SELF_TEST_TOPIC", 1, PERM_BOTH),
            ("BenchmarkTest", 1024, PERM_BOTH),
            ("OFFSET_MOVED_EVENT", 1, PERM_BOTH),
            (SCHEDULE_TOPIC, 18, PERM_BOTH),
            (TIMER_TOPIC, 1, PERM_BOTH),
            (f"{config.cluster_name}_REPLY_TOPIC", 1, PERM_BOTH),
        ]
        if config.auto_create_topic:
            own.append((AUTO_CREATE_TOPIC, config.default_topic_queues, PERM_INHERIT | PERM_BOTH))
        own.append((config.cluster_name, 16, PERM_INHERIT | (PERM_BOTH if config.cluster_topic else 0)))
        own.append((config.broker_name, 1, PERM_INHERIT | (PERM_BOTH if config.broker_topic else 0)))
        if config.trace_topic_enabled:
            own.append((config.trace_topic, 1, PERM_BOTH))
        return [TopicConfig(name, queues, queues, perm) for name, queues, perm in own if NAME.fullmatch(name)]

    def _follow_settings(self) -> None:
        on = self._settings.on_change
        on("autoCreateTopicEnable", lambda config: self._make_default_topic(config, is_changed=False))
        on("defaultTopicQueueNums", lambda config: self._make_default_topic(config, is_changed=True))
        on("brokerPermission", self._change_permission)

    def _make_default_topic(self, config: BrokerConfig, *, is_changed: bool) -> None:
        if config.auto_create_topic and (is_changed or AUTO_CREATE_TOPIC not in self.table):
            queues = config.default_topic_queues
            self.put(TopicConfig(AUTO_CREATE_TOPIC, queues, queues, PERM_INHERIT | PERM_BOTH))
            self.save_later()

    def _change_permission(self, config: BrokerConfig) -> None:
        for topic in self.table.values():
            topic.takes_messages = bool(config.broker_permission & PERM_WRITE)
            topic.refresh()
        self._next_version()
        self._tell_change()

    # --- finding

    def get(self, name: str) -> Topic | None:
        """Return a topic, or None."""
        return self.table.get(name)

    def is_own(self, name: str) -> bool:
        """Return whether the broker creates this topic for itself."""
        return is_own_topic(name, self._settings.config)

    def own_names(self) -> list[str]:
        """Return the names of the broker's own topics that exist."""
        return [name for name in self.table if self.is_own(name)]

    # --- changing

    def create_for_send(self, name: str, default_topic: str, queues: int, sys_flag: int) -> Topic | None:
        """Create a topic because a message was sent to it, modelled on a default topic that allows this; return None if
        it is not allowed. The topic accepts messages once `save` is done. Raises Refused if there are too many."""
        default = self.table.get(default_topic)
        if default is None or not default.config.perm & PERM_INHERIT:
            return None
        if default_topic == AUTO_CREATE_TOPIC and not self._settings.config.auto_create_topic:
            return None
        queues = max(0, min(queues, default.config.write_queue_nums, self._limits.queues_per_topic))
        self._check_room(None, queues, ResponseCode.TOPIC_NOT_EXIST)
        perm = default.config.perm & ~PERM_INHERIT
        kind = default.config.topic_filter_type
        created = self.put(
            TopicConfig(
                topic_name=name,
                read_queue_nums=queues,
                write_queue_nums=queues,
                perm=perm,
                topic_filter_type=kind,
                topic_sys_flag=sys_flag,
            )
        )
        self._tell_created(name)
        return created

    def create_for_group(self, name: str, queues: int, sys_flag: int = 0) -> Topic:
        """Return the retry or dead-letter topic of a group, creating it if missing. Raises Refused if there are too
        many."""
        topic = self.table.get(name)
        if topic is not None:
            return topic
        created = self.put(TopicConfig(name, queues, queues, PERM_BOTH, topic_sys_flag=sys_flag))
        self._tell_created(name)
        return created

    def check_for_groups(self, queues: Mapping[str, int]) -> None:
        """Raise Refused if `create_for_group` would raise it for one of these topics. `queues`: the number of queues of
        each topic, by name. Changes nothing."""
        topics_before = queues_before = 0
        for name, count in queues.items():
            if name not in self.table:
                self._check_room(None, count, ResponseCode.SYSTEM_ERROR, topics_before, queues_before)
                topics_before, queues_before = topics_before + 1, queues_before + count

    def put(self, config: TopicConfig) -> Topic:
        """Add or change a topic; durable only after `save`. Raises Refused if there are too many topics or queues."""
        topic = self.table.get(config.topic_name)
        if not self.is_own(config.topic_name):
            self._check_room(topic, max(config.read_queue_nums, config.write_queue_nums), ResponseCode.SYSTEM_ERROR)
        if topic is None:
            topic = self._add(config, {})
            log.info("topic_created", topic=config.topic_name, queues=config.write_queue_nums)
        else:
            self._queues -= topic.queue_limit
            topic.change(config)
            self._store.limit_queues(config.topic_name, config.read_queue_nums)
            self._queues += topic.queue_limit
            log.info("topic_changed", topic=config.topic_name)
        self._tell_policy(config.topic_name, timer_policy_of(config))
        self._next_version()
        self._tell_change()
        return topic

    def remove(self, name: str) -> bool:
        """Remove a topic; the caller removes its queues. Durable only after `save`. Return whether it existed."""
        topic = self.table.pop(name, None)
        if topic is None:
            return False
        self._queues -= topic.queue_limit
        self._store.limit_queues(name, None)
        log.info("topic_deleted", topic=name)
        self._tell_policy(name, None)
        self._next_version()
        self._tell_change()
        return True

    def is_deleted(self, name: str) -> bool:
        """Whether a topic that has accepted messages was deleted. The table has every topic that accepts messages, see
        invariant 8 of ARCHITECTURE.md. If the table was lost, or an earlier edition was read, this is False for all
        topics until the next start."""
        return self._has_all and name not in self.table

    async def save(self) -> None:
        """Make the table durable. Raises OSError."""
        await self._saved.saved()

    async def saved(self, topic: Topic) -> None:
        """Wait until a topic is durable: by the running write if that contains it. Raises OSError."""
        if not topic.is_saved:
            await (self._saved.written() if topic in self._in_write else self._saved.saved())

    def save_later(self) -> None:
        """Make the table durable in the background."""
        self._saved.save()

    def to_json(self) -> dict[str, Any]:
        """Return the table in the form of topics.json and GET_ALL_TOPIC_CONFIG; topics are already JSON."""
        return {
            **self._extra,
            "dataVersion": self.version.to_json(),
            "topicConfigTable": {name: topic.json for name, topic in self.table.items()},
        }

    def announced(self, topic: Topic) -> TopicConfig:
        """Return a topic's configuration as it is registered with name servers: without the permissions that
        brokerPermission denies, so that clients go to other brokers."""
        permission = self._settings.config.broker_permission
        if permission & PERM_READ and permission & PERM_WRITE:
            return topic.config
        return msgspec.structs.replace(topic.config, perm=topic.config.perm & permission)

    def announcement(self) -> dict[str, Any]:
        """Return the table as it is registered with name servers, see `announced`."""
        permission = self._settings.config.broker_permission
        if permission & PERM_READ and permission & PERM_WRITE:
            return self.to_json()
        return {
            **self.to_json(),
            "topicConfigTable": {
                name: {**topic.extra, **self.announced(topic).to_json()} for name, topic in self.table.items()
            },
        }

    def _add(self, config: TopicConfig, extra: Fields) -> Topic:
        takes_messages = bool(self._settings.config.broker_permission & PERM_WRITE)
        topic = self.table[config.topic_name] = Topic(self._store, config, extra, takes_messages=takes_messages)
        self._queues += topic.queue_limit
        self._unsaved.append(topic)
        self._store.limit_queues(config.topic_name, config.read_queue_nums)
        return topic

    def _tell_change(self) -> None:
        for callback in self._on_change:
            callback()

    def _tell_policy(self, name: str, policy: TimerPolicy | None) -> None:
        for callback in self._on_policy:
            callback(name, policy)

    def _tell_created(self, name: str) -> None:
        for callback in self._on_created:
            callback("topic", name)

    def _check_room(
        self, topic: Topic | None, queues: int, code: int, topics_before: int = 0, queues_before: int = 0
    ) -> None:
        """Raise Refused if a topic cannot be created (None), or cannot have this many queues. `topics_before`,
        `queues_before`: how many other topics and queues are to be created before it."""
        limits = self._limits
        had = topic.queue_limit if topic is not None else 0
        if topic is None and len(self.table) + topics_before >= limits.topics:
            limit = "maxTopics"
            why = f"there are {len(self.table)} topics, and maxTopics={limits.topics}: delete some"
        elif queues > max(had, limits.queues_per_topic):
            limit = "maxQueuesPerTopic"
            why = f"{queues} queues, and maxQueuesPerTopic={limits.queues_per_topic}: use fewer"
        elif queues > had and self._queues + queues_before + queues - had > limits.queues:
            limit = "maxQueues"
            more = queues_before + queues
            why = f"{more} more queues than the {self._queues} there are, and maxQueues={limits.queues}: use fewer"
        else:
            return
        raise LimitReached(limit, code, f"{why}, or raise that setting")

    def _snapshot(self) -> tuple[Table, Written]:
        """Return the table for a write, and the function that, once it is durable, lets its new topics accept
        messages."""
        unsaved, self._unsaved = self._unsaved, []
        self._in_write.update(unsaved)

        def written(failure: OSError | None) -> None:
            self._in_write.difference_update(unsaved)
            if failure is not None:
                self._unsaved += unsaved
                return
            for topic in unsaved:
                topic.is_saved = True
                topic.refresh()

        return self.to_json(), written

    def _next_version(self) -> None:
        self.version.timestamp = self._clock.now_ms()
        self.version.counter += 1


def is_own_topic(name: str, config: BrokerConfig) -> bool:
    """Return whether a broker with these settings creates this topic for itself."""
    return (
        name in _SYSTEM
        or name.startswith(_SYSTEM_PREFIX)
        or name in (config.cluster_name, config.broker_name, f"{config.cluster_name}_REPLY_TOPIC")
    )


def missing_topics(store: MessageStore, known: Container[str], is_own: Callable[[str], bool]) -> Iterator[TopicConfig]:
    """Yield the topics that have messages but are unknown, with default permissions and enough queues for these
    messages."""
    for name, queues in store.queues.items():
        count = 1 + max((queue_id for queue_id, queue in queues.items() if queue.next_offset), default=-1)
        if count and name not in known and not is_own(name):
            yield TopicConfig(name, count, count, PERM_BOTH)


def check_name(name: str) -> None:
    """Raise Refused unless a topic may have this name."""
    if not name.strip():
        raise Refused(ResponseCode.SYSTEM_ERROR, "The specified topic is blank.")
    if not NAME.fullmatch(name):
        raise Refused(
            ResponseCode.SYSTEM_ERROR,
            "The specified topic contains illegal characters, allowing only ^[%|a-zA-Z0-9_-]+$",
        )
    if len(name) > MAX_TOPIC_LENGTH:
        raise Refused(
            ResponseCode.SYSTEM_ERROR,
            f"The specified topic is longer than topic max length {MAX_TOPIC_LENGTH}.",
        )


def check_sendable(name: str) -> None:
    """Raise Refused if clients may not send to a topic."""
    if name in NOT_FOR_CLIENTS:
        raise Refused(ResponseCode.NO_PERMISSION, f"Sending message to topic[{name}] is forbidden.")
