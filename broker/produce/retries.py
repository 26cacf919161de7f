"""What RocketMQ's rules for retries say: how often a message is tried again, and which topics are made for that."""

from __future__ import annotations

from duemq.broker.errors import Refused
from duemq.broker.tables.groups import Groups
from duemq.broker.tables.topics import DLQ_PREFIX, Topic, Topics, check_name
from duemq.protocol.codes import VERSION_MAX_RECONSUME_TIMES, ResponseCode


def retry_limit(groups: Groups, group_name: str, version: int, asked: int | None) -> int:
    """After how many deliveries a message of a group is a dead letter, `asked` by a client of a version. Raises Refused
    where there is no such group."""
    group = groups.get(group_name)
    if group is None:
        raise Refused(ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, f"subscription group not exist, {group_name}")
    if asked is not None and version >= VERSION_MAX_RECONSUME_TIMES:
        return asked
    return group.retry_max_times


def group_topic(topics: Topics, name: str, queues: int, sys_flag: int = 0) -> Topic:
    """The topic of a group's retries or dead letters, made if need be. Raises Refused where it cannot have that name,
    or where somebody left it without queues."""
    check_name(name)
    topic = topics.create_for_group(name, queues, sys_flag)
    if topic.queue_limit <= 0:
        raise Refused(ResponseCode.SYSTEM_ERROR, f"the topic[{topic.name}] has no queues")
    return topic


def dead_letters(topics: Topics, group_name: str, sys_flag: int = 0) -> Topic:
    """The topic of a group's dead letters. Raises Refused."""
    return group_topic(topics, f"{DLQ_PREFIX}{group_name}", 1, sys_flag)
