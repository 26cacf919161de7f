"""The connected producers and consumers, by group, as reported in their heartbeats."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Set
from functools import lru_cache
from itertools import chain
from typing import Final, NamedTuple

import structlog

from duemq.broker.errors import LimitReached, Refused
from duemq.broker.limits import MAX_CLIENT_ID_LENGTH, MAX_EXPRESSION_LENGTH, MAX_NAME_LENGTH, Limits
from duemq.broker.net.connection import Connection
from duemq.broker.net.member_notifications import MemberNotifications
from duemq.broker.net.request_turns import RequestTurns
from duemq.broker.settings.live_settings import LiveSettings
from duemq.protocol.codes import ResponseCode
from duemq.protocol.records.properties import java_hash, tags_in
from duemq.protocol.requests.bodies import BROADCASTING, ConsumerData, HeartbeatData, SubscriptionData
from duemq.storage.clock import Clock

log = structlog.get_logger(__name__)

EXPIRE_MS: Final = 120_000
"""Milliseconds without a heartbeat after which a client counts as gone."""
_MAX_KNOWN: Final = 256
_MAX_LANGUAGE: Final = 32
"""Characters of a client's language that are kept; RocketMQ's longest is UNKNOWN."""
_ENTRY_CHARACTERS: Final = 256
"""Number of characters of a subscription that count as one more entry."""


class GroupMember:
    """A member of a group. `last_heartbeat_ms` is in ms since the epoch, for people; `last_heartbeat` is in seconds of
    the monotonic clock."""

    __slots__ = ("client_id", "connection", "language", "last_heartbeat", "last_heartbeat_ms", "version")

    def __init__(self, client_id: str, connection: Connection, language: str | None, version: int) -> None:
        self.client_id = client_id
        self.connection = connection
        self.language = (language or "OTHER")[:_MAX_LANGUAGE]
        self.version = version
        self.last_heartbeat = 0.0
        self.last_heartbeat_ms = 0


class GroupSubscription:
    """A group's subscription to a topic."""

    __slots__ = ("_codes", "_is_known", "data")

    def __init__(self, data: SubscriptionData) -> None:
        data.tags_set = data.code_set = None  # unused here, and as large as the expression itself
        self.data = data
        self._codes: frozenset[int] | None = None
        self._is_known = False

    @property
    def codes(self) -> frozenset[int] | None:
        """The tags codes, None for all; computed on first use."""
        if not self._is_known:
            self._codes = tags_codes(self.data.sub_string)
            self._is_known = True
        return self._codes

    @property
    def entries(self) -> int:
        """The number of entries that the subscription counts as for maxHeartbeatEntries."""
        return 1 + (len(self.data.sub_string or "") + len(self.data.topic)) // _ENTRY_CHARACTERS


def tags_codes(expression: str | None) -> frozenset[int] | None:
    """Return the tags codes of a tag expression, "a || b"; None for all. As in RocketMQ, an expression of blanks has no
    codes, so that no message matches, and " * " is the tag *."""
    if not expression or expression == "*":
        return None
    return _known_codes(expression) if len(expression) <= _MAX_KNOWN else _codes_in(expression)


def check_expression_type(expression_type: str | None) -> None:
    """Raise Refused for a subscription by anything but tags."""
    if expression_type not in (None, "", "TAG"):
        raise Refused(
            ResponseCode.SYSTEM_ERROR, f"The broker does not support consumer to filter message by {expression_type}"
        )


def check_separators(expression: str | None) -> None:
    """Raise Refused for an expression of a pull that has nothing but separators, as RocketMQ does."""
    if expression and not expression.replace("||", ""):
        raise Refused(
            ResponseCode.SUBSCRIPTION_PARSE_FAILED,
            f"parse the consumer's subscription failed: {expression[:MAX_NAME_LENGTH]!r} has no tags; write * for all",
        )


def check_expression(expression: str | None, most_tags: int) -> None:
    """Raise Refused for an expression that is too long or has too many tags."""
    if not expression or len(expression) <= min(most_tags, _MAX_KNOWN):
        return
    tags = expression.count("||") + 1
    if tags > most_tags:
        raise LimitReached(
            "maxTagsPerSubscription",
            ResponseCode.SUBSCRIPTION_PARSE_FAILED,
            f"parse the consumer's subscription failed: it has {tags} tags, and maxTagsPerSubscription={most_tags}. "
            "Subscribe to all (*) and filter in the consumer, or raise that setting",
        )
    if len(expression) > MAX_EXPRESSION_LENGTH:
        raise Refused(
            ResponseCode.SUBSCRIPTION_PARSE_FAILED,
            f"parse the consumer's subscription failed: it has {len(expression)} characters, at most "
            f"{MAX_EXPRESSION_LENGTH} are possible. Subscribe to all (*) and filter in the consumer",
        )


def _codes_in(expression: str) -> frozenset[int]:
    return frozenset(map(java_hash, tags_in(expression)))


_known_codes = lru_cache(maxsize=4096)(_codes_in)
"""Caches expressions of usual length only, so that expressions that clients make up take little memory."""


class ConsumerGroup:
    """A consumer group with members online."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.members: dict[str, GroupMember] = {}
        self.subscriptions: dict[str, GroupSubscription] = {}
        self.consume_type = ""
        self.message_model = ""
        self.consume_from_where = ""

    @property
    def is_broadcasting(self) -> bool:
        """Whether every member gets every message."""
        return self.message_model == BROADCASTING

    @property
    def entries(self) -> int:
        """The number of entries that the group's subscriptions count as."""
        return sum(subscription.entries for subscription in self.subscriptions.values())

    def update(self, data: ConsumerData) -> bool:
        """Apply a heartbeat to the group; return whether the subscriptions changed."""
        self.consume_type = data.consume_type or ""
        self.message_model = data.message_model or ""
        self.consume_from_where = data.consume_from_where or ""
        changed = False
        wanted = {subscription.topic: subscription for subscription in data.subscription_data_set or ()}
        for topic, subscription in wanted.items():
            old = self.subscriptions.get(topic)
            if old is None or subscription.sub_version > old.data.sub_version:
                changed = changed or old is None or old.data.sub_string != subscription.sub_string
                self.subscriptions[topic] = GroupSubscription(subscription)
        for topic in [topic for topic in self.subscriptions if topic not in wanted]:
            del self.subscriptions[topic]
            changed = True
        return changed


class _Membership(NamedTuple):
    """A client's place in a group."""

    is_consumer: bool
    group: str
    client_id: str


class Clients:
    """All members of all groups. Belongs to the event loop."""

    def __init__(self, settings: LiveSettings, clock: Clock, limits: Limits, turns: RequestTurns) -> None:
        self._settings = settings
        self._clock = clock
        self._limits = limits
        self.consumers: dict[str, ConsumerGroup] = {}
        self.producers: dict[str, dict[str, GroupMember]] = {}
        self._of_connection: dict[Connection, set[_Membership]] = {}
        self._by_age: OrderedDict[_Membership, GroupMember] = OrderedDict()
        """All members, ordered by their last heartbeat, oldest first."""
        self._entries = 0
        """The number of members, plus the entries that the groups' subscriptions count as."""
        self._notifications = MemberNotifications(turns, self._connections_of)

    def check(self, connection: Connection, data: HeartbeatData) -> None:
        """Raise Refused for a heartbeat that would exceed the limits; no part of it may then be applied."""
        limits = self._limits
        if len(data.client_id) > MAX_CLIENT_ID_LENGTH:
            raise _over_limit(
                f"a client id of {len(data.client_id)} characters: at most {MAX_CLIENT_ID_LENGTH} are allowed"
            )
        mine = self._of_connection.get(connection, set())
        wanted = set(_memberships(data))
        for membership in wanted:
            if len(membership.group) > MAX_NAME_LENGTH:
                raise _over_limit(
                    f"a group's name of {len(membership.group)} characters: at most {MAX_NAME_LENGTH} are allowed"
                )
        count = len(mine | wanted)
        if count > limits.groups_per_connection:
            raise LimitReached(
                "maxGroupsPerConnection",
                ResponseCode.SYSTEM_ERROR,
                f"{count} groups over one connection, and maxGroupsPerConnection={limits.groups_per_connection}: use "
                "fewer groups in a process, or raise that setting",
            )
        more = sum(self._member(membership) is None for membership in wanted)
        for consumer in data.consumer_data_set or ():
            more += self._check_subscriptions(consumer)
        if more > 0 and self._entries + more > limits.heartbeat_entries:
            raise LimitReached(
                "maxHeartbeatEntries",
                ResponseCode.SYSTEM_BUSY,
                f"[OVERLOAD]broker busy: {self._entries} members and subscriptions are known, and "
                f"maxHeartbeatEntries={limits.heartbeat_entries}. Try again later, or raise that setting",
            )

    def _check_subscriptions(self, consumer: ConsumerData) -> int:
        """Return how many more entries a group's subscriptions count as after a heartbeat. Raises Refused."""
        subscriptions = consumer.subscription_data_set or ()
        if len(subscriptions) > self._limits.subscriptions:
            raise LimitReached(
                "maxSubscriptionsPerGroup",
                ResponseCode.SYSTEM_ERROR,
                f"the group {consumer.group_name} subscribes to {len(subscriptions)} topics, and "
                f"maxSubscriptionsPerGroup={self._limits.subscriptions}: use several groups, or raise that setting",
            )
        words = (consumer.consume_type, consumer.message_model, consumer.consume_from_where)
        if max(len(word or "") for word in words) > MAX_NAME_LENGTH:
            raise _over_limit(
                f"the group {consumer.group_name}: consumeType, messageModel and consumeFromWhere have at most "
                f"{MAX_NAME_LENGTH} characters"
            )
        entries = 0
        for subscription in subscriptions:
            if max(len(subscription.topic), len(subscription.expression_type or "")) > MAX_NAME_LENGTH:
                raise _over_limit(
                    f"the group {consumer.group_name}: the name of a topic, and expressionType, have at most "
                    f"{MAX_NAME_LENGTH} characters"
                )
            check_expression(subscription.sub_string, self._limits.tags)
            entries += GroupSubscription(subscription).entries
        group = self.consumers.get(consumer.group_name)
        return entries - (group.entries if group is not None else 0)

    def heartbeat(
        self, connection: Connection, data: HeartbeatData, language: str | None, version: int, quiet: Iterable[str]
    ) -> None:
        """Apply the group memberships in a client's heartbeat. `quiet`: groups that are not notified of changes."""
        if connection.is_closed:
            return
        for producer in data.producer_data_set or ():
            membership = _Membership(False, producer.group_name, data.client_id)
            self._join(membership, self.producers.setdefault(producer.group_name, {}), connection, language, version)
        for consumer in data.consumer_data_set or ():
            group = self.consumers.get(consumer.group_name)
            if group is None:
                group = self.consumers[consumer.group_name] = ConsumerGroup(consumer.group_name)
            membership = _Membership(True, group.name, data.client_id)
            is_new = self._join(membership, group.members, connection, language, version)
            self._entries -= group.entries
            changed = group.update(consumer)
            self._entries += group.entries
            if (changed or is_new) and group.name not in quiet:
                self._notify_later(group.name)

    def unregister(
        self, connection: Connection, client_id: str, producer_group: str | None, consumer_group: str | None
    ) -> None:
        """Remove a client from a producer group and a consumer group. Nothing happens to a membership whose last
        heartbeat came over another connection: no other client may end it."""
        mine = self._of_connection.get(connection, ())
        for is_consumer, group in ((False, producer_group), (True, consumer_group)):
            if group is not None and (membership := _Membership(is_consumer, group, client_id)) in mine:
                self._leave(membership)

    def connection_lost(self, connection: Connection) -> None:
        """Remove all members that use a connection."""
        for membership in list(self._of_connection.get(connection, ())):
            self._leave(membership)
        self._of_connection.pop(connection, None)

    def expire(self) -> None:
        """Close the connections of clients whose heartbeats stopped, which removes them from their groups."""
        limit = self._clock.monotonic() - EXPIRE_MS / 1000
        late: dict[Connection, None] = {}
        for client in self._by_age.values():
            if client.last_heartbeat >= limit:
                break
            late[client.connection] = None
        for connection in late:
            log.warning("client_expired", peer=connection.peer)
            connection.abort()

    def consumer(self, group: str, client_id: str) -> GroupMember | None:
        """Return a member of a consumer group, or None."""
        return self._member(_Membership(True, group, client_id))

    # --- members

    def _member(self, membership: _Membership) -> GroupMember | None:
        return self._by_age.get(membership)

    def _join(
        self,
        membership: _Membership,
        members: dict[str, GroupMember],
        connection: Connection,
        language: str | None,
        version: int,
    ) -> bool:
        """Make a client a member, or note its heartbeat; return whether it is new or has changed its connection."""
        client = self._by_age.get(membership)
        is_new = client is None or client.connection is not connection
        if client is None or is_new:
            if client is None:
                self._entries += 1
            else:
                self._of_connection[client.connection].discard(membership)
            client = GroupMember(membership.client_id, connection, language, version)
            self._by_age[membership] = members[membership.client_id] = client
            self._of_connection.setdefault(connection, set()).add(membership)
        client.last_heartbeat = self._clock.monotonic()
        client.last_heartbeat_ms = self._clock.now_ms()
        self._by_age.move_to_end(membership)
        return is_new

    def _leave(self, membership: _Membership) -> None:
        client = self._by_age.pop(membership, None)
        if client is None:
            return
        self._entries -= 1
        self._of_connection[client.connection].discard(membership)
        if not membership.is_consumer:
            members = self.producers[membership.group]
            del members[membership.client_id]
            if not members:
                del self.producers[membership.group]
            return
        group = self.consumers[membership.group]
        del group.members[membership.client_id]
        if group.members:
            self._notify_later(group.name)
        else:
            self._entries -= group.entries
            del self.consumers[membership.group]

    # --- notifications

    def rebalance(self, topics: Set[str]) -> None:
        """Notify the members of the groups that subscribe to any of these topics, so that they rebalance now."""
        for group in self.consumers.values() if topics else ():
            if not topics.isdisjoint(group.subscriptions):
                self._notify_later(group.name)

    def _notify_later(self, group: str) -> None:
        if self._settings.config.notify_consumers:
            self._notifications.add(group)

    def _connections_of(self, name: str) -> list[Connection]:
        group = self.consumers.get(name)
        return [member.connection for member in group.members.values()] if group is not None else []


def _memberships(data: HeartbeatData) -> Iterator[_Membership]:
    return chain(
        (_Membership(False, producer.group_name, data.client_id) for producer in data.producer_data_set or ()),
        (_Membership(True, consumer.group_name, data.client_id) for consumer in data.consumer_data_set or ()),
    )


def _over_limit(remark: str) -> Refused:
    return Refused(ResponseCode.SYSTEM_ERROR, remark)
