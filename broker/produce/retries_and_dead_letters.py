"""RocketMQ's rules for retries: how many times a message is tried again, and which topics are created for that."""

from __future__ import annotations

from duemq.broker.errors import Refused
from duemq.broker.tables.groups import Groups
from duemq.broker.tables.topics import Topic, Topics, check_name
from duemq.protocol.codes import VERSION_MAX_RECONSUME_TIMES, ResponseCode
from duemq.protocol.requests.headers import Request, SendMessage
from duemq.protocol.topics import DLQ_PREFIX, RETRY_PREFIX


class RetriesAndDeadLetters:
    """Applies RocketMQ's rules for retries to the topics and groups of a broker."""

    def __init__(self, topics: Topics, groups: Groups) -> None:
        self._topics = topics
        self._groups = groups

    def limit(self, group_name: str, version: int, asked: int | None) -> int:
        """Return the number of deliveries after which a message of a group becomes a dead letter. `asked`: the number
        that a client of this version asked for. Raises Refused if there is no such group."""
        group = self._groups.get(group_name)
        if group is None:
            raise Refused(ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, f"subscription group not exist, {group_name}")
        if asked is not None and version >= VERSION_MAX_RECONSUME_TIMES:
            return asked
        return group.retry_max_times

    def retry_topic(self, group_name: str, queues: int, sys_flag: int = 0) -> Topic:
        """Return the retry topic of a group, creating it if missing. Raises Refused, see `dead_letters`."""
        return self._topic(f"{RETRY_PREFIX}{group_name}", queues, sys_flag)

    def dead_letters(self, group_name: str, sys_flag: int = 0) -> Topic:
        """Return the dead-letter topic of a group, creating it if missing. Raises Refused if the name is not allowed,
        or if the topic was left without queues."""
        return self._topic(f"{DLQ_PREFIX}{group_name}", 1, sys_flag)

    def dead_letters_of(self, request: Request[SendMessage]) -> Topic | None:
        """Return the dead-letter topic for a retry that its consumer sends; None if the message is to be tried again.
        Raises Refused."""
        header = request.header
        group_name = header.topic.removeprefix(RETRY_PREFIX)
        limit = self.limit(group_name, request.version, header.max_reconsume_times)
        return self.dead_letters(group_name) if (header.reconsume_times or 0) >= limit else None

    def _topic(self, name: str, queues: int, sys_flag: int) -> Topic:
        check_name(name)
        topic = self._topics.create_for_group(name, queues, sys_flag)
        if topic.queue_limit <= 0:
            raise Refused(ResponseCode.SYSTEM_ERROR, f"the topic[{topic.name}] has no queues")
        return topic
