"""What RocketMQ's rules for retries say: how often a message is tried again, and which topics are made for that."""

from __future__ import annotations

from duemq.broker.errors import Refused
from duemq.broker.tables.groups import Groups
from duemq.broker.tables.topics import DLQ_PREFIX, RETRY_PREFIX, Topic, Topics, check_name
from duemq.protocol.codes import VERSION_MAX_RECONSUME_TIMES, ResponseCode
from duemq.protocol.requests.headers import Request, SendMessage


class Retries:
    """The rules, for the topics and groups of a broker."""

    def __init__(self, topics: Topics, groups: Groups) -> None:
        self._topics = topics
        self._groups = groups

    def limit(self, group_name: str, version: int, asked: int | None) -> int:
        """After how many deliveries a message of a group is a dead letter, `asked` by a client of a version. Raises
        Refused where there is no such group."""
        group = self._groups.get(group_name)
        if group is None:
            raise Refused(ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, f"subscription group not exist, {group_name}")
        if asked is not None and version >= VERSION_MAX_RECONSUME_TIMES:
            return asked
        return group.retry_max_times

    def retry_topic(self, group_name: str, queues: int, sys_flag: int = 0) -> Topic:
        """The topic of a group's retries, made if need be. Raises Refused, see `dead_letters`."""
        return self._topic(f"{RETRY_PREFIX}{group_name}", queues, sys_flag)

    def dead_letters(self, group_name: str, sys_flag: int = 0) -> Topic:
        """The topic of a group's dead letters, made if need be. Raises Refused where it cannot have that name, or where
        somebody left it without queues."""
        return self._topic(f"{DLQ_PREFIX}{group_name}", 1, sys_flag)

    def dead_letters_of(self, request: Request[SendMessage]) -> Topic | None:
        """The topic of dead letters to which a retry goes that its consumer sends; None where the message is to be
        tried again. Raises Refused."""
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
