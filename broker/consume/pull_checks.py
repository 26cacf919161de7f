"""Checks whether a pull is allowed, and finds out which tags it asks for."""

from __future__ import annotations

from duemq.broker.access.guard import Guard
from duemq.broker.access.permission import CONSUME
from duemq.broker.consume.long_poll import HeldPull
from duemq.broker.errors import Refused
from duemq.broker.limits import Limits
from duemq.broker.settings.live_settings import LiveSettings
from duemq.broker.tables.clients import Clients, check_expression, check_expression_type, check_separators, tags_codes
from duemq.broker.tables.groups import Groups
from duemq.broker.tables.topics import PERM_READ, Topics
from duemq.protocol.codes import ResponseCode
from duemq.protocol.requests.headers import PULL_SUBSCRIPTION, PullMessage


class PullChecks:
    """Checks pulls against the tables of topics, groups and clients."""

    def __init__(
        self,
        *,
        settings: LiveSettings,
        topics: Topics,
        groups: Groups,
        clients: Clients,
        limits: Limits,
        guard: Guard | None,
    ) -> None:
        """`guard`: checks held pulls again when accounts have changed; None without access control."""
        self._settings = settings
        self._topics = topics
        self._groups = groups
        self._clients = clients
        self._limits = limits
        self._guard = guard

    def check(self, header: PullMessage) -> None:
        """Raise Refused if the broker, the group, the topic or its queue does not allow the pull. Any of them may
        change while a pull is held."""
        if not self._settings.config.broker_permission & PERM_READ:
            raise Refused(
                ResponseCode.NO_PERMISSION,
                f"the broker[{self._settings.config.advertised_host}] pulling message is forbidden",
            )
        group = self._groups.get(header.consumer_group)
        if group is None:
            raise Refused(
                ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST,
                f"subscription group [{header.consumer_group}] does not exist",
            )
        if not group.consume_enable:
            raise Refused(ResponseCode.NO_PERMISSION, f"subscription group no permission, {header.consumer_group}")
        topic = self._topics.get(header.topic)
        if topic is None:
            raise Refused(ResponseCode.TOPIC_NOT_EXIST, f"topic[{header.topic}] not exist, apply first please!")
        if not topic.config.perm & PERM_READ:
            raise Refused(ResponseCode.NO_PERMISSION, f"the topic[{header.topic}] pulling message is forbidden")
        if not 0 <= header.queue_id < topic.config.read_queue_nums:
            raise Refused(
                ResponseCode.SYSTEM_ERROR,
                f"queueId[{header.queue_id}] is illegal, topic:[{header.topic}] "
                f"topicConfig.readQueueNums:[{topic.config.read_queue_nums}]",
            )

    def codes(self, header: PullMessage) -> frozenset[int] | None:
        """Return the tags codes that a pull asks for; None for all. Raises Refused."""
        group = self._clients.consumers.get(header.consumer_group)
        if header.sys_flag & PULL_SUBSCRIPTION:
            check_expression_type(header.expression_type)
            known = group.subscriptions.get(header.topic) if group is not None else None
            if known is not None and known.data.sub_string == header.subscription:
                return known.codes
            check_expression(header.subscription, self._limits.tags)
            check_separators(header.subscription)
            return tags_codes(header.subscription)
        if group is None:
            raise Refused(ResponseCode.SUBSCRIPTION_NOT_EXIST, "the consumer's group info not exist")
        config = self._groups.get(header.consumer_group)
        if group.is_broadcasting and config is not None and not config.consume_broadcast_enable:
            raise Refused(
                ResponseCode.NO_PERMISSION,
                f"the consumer group[{header.consumer_group}] can not consume by broadcast way",
            )
        subscription = group.subscriptions.get(header.topic)
        if subscription is None:
            raise Refused(ResponseCode.SUBSCRIPTION_NOT_EXIST, "the consumer's subscription not exist")
        if subscription.data.sub_version < header.sub_version:
            raise Refused(ResponseCode.SUBSCRIPTION_NOT_LATEST, "the consumer's subscription not latest")
        check_expression_type(subscription.data.expression_type)
        return subscription.codes

    def check_account(self, held: HeldPull) -> None:
        """Raise AccessRefused if the account of a held pull may no longer pull."""
        if self._guard is not None:
            self._guard.recheck(held.connection, CONSUME, held.request)
