"""Who is connected: producers and consumers, by group, as their heartbeats tell."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Final

import structlog

from broker.connection import Connection
from protocol.bodies import BROADCASTING, ConsumerData, HeartbeatData, SubscriptionData
from protocol.codes import RequestCode
from protocol.command import Command
from protocol.headers import ConsumerGroup as GroupHeader
from protocol.properties import java_hash
from storage.clock import Clock

log = structlog.get_logger(__name__)

EXPIRE_MS: Final = 120_000
"""A client without a heartbeat for this long is gone."""
_MAX_KNOWN: Final = 256


class Client:
    """A member of a group. `last_heartbeat_ms` in ms since the epoch."""

    __slots__ = ("client_id", "connection", "language", "last_heartbeat_ms", "version")

    def __init__(self, client_id: str, connection: Connection, language: str | None, version: int) -> None:
        self.client_id = client_id
        self.connection = connection
        self.language = language or "OTHER"
        self.version = version
        self.last_heartbeat_ms = 0


class Subscription:
    """What a group wants of a topic. `codes`: the tags codes, None for all."""

    __slots__ = ("codes", "data")

    def __init__(self, data: SubscriptionData) -> None:
        self.data = data
        self.codes = tags_codes(data.sub_string)


def tags_codes(expression: str | None) -> frozenset[int] | None:
    """The tags codes of a tag expression, "a || b"; None for all."""
    if not expression or expression == "*":
        return None
    return _known_codes(expression) if len(expression) <= _MAX_KNOWN else _codes_in(expression)


def _codes_in(expression: str) -> frozenset[int] | None:
    text = expression.strip()
    if text in ("", "*"):
        return None
    tags = [tag.strip() for tag in text.split("||")]
    return frozenset(java_hash(tag) for tag in tags if tag) or None


_known_codes = lru_cache(maxsize=4096)(_codes_in)
"""For expressions of usual length only: what is remembered of those that clients make up stays small."""


class ConsumerGroup:
    """A consumer group with members online."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.members: dict[str, Client] = {}
        self.subscriptions: dict[str, Subscription] = {}
        self.consume_type = ""
        self.message_model = ""
        self.consume_from_where = ""

    @property
    def is_broadcasting(self) -> bool:
        """Whether every member gets every message."""
        return self.message_model == BROADCASTING

    def update(self, data: ConsumerData) -> bool:
        """Take over what a heartbeat says; whether that changed the subscriptions."""
        self.consume_type = data.consume_type or ""
        self.message_model = data.message_model or ""
        self.consume_from_where = data.consume_from_where or ""
        changed = False
        wanted = {subscription.topic: subscription for subscription in data.subscription_data_set or ()}
        for topic, subscription in wanted.items():
            old = self.subscriptions.get(topic)
            if old is None or subscription.sub_version > old.data.sub_version:
                changed = changed or old is None or old.data.sub_string != subscription.sub_string
                self.subscriptions[topic] = Subscription(subscription)
        for topic in [topic for topic in self.subscriptions if topic not in wanted]:
            del self.subscriptions[topic]
            changed = True
        return changed


class Clients:
    """All members of all groups."""

    def __init__(self, clock: Clock, *, notify: bool) -> None:
        self._clock = clock
        self.notify = notify
        """Whether a group's members are told when they change."""
        self.consumers: dict[str, ConsumerGroup] = {}
        self.producers: dict[str, dict[str, Client]] = {}
        self._of_connection: dict[Connection, set[tuple[bool, str, str]]] = {}

    def heartbeat(
        self, connection: Connection, data: HeartbeatData, language: str | None, version: int, quiet: Iterable[str]
    ) -> None:
        """A client tells which groups it is in. `quiet`: groups that do not want to be told of changes."""
        now_ms = self._clock.now_ms()
        for producer in data.producer_data_set or ():
            members = self.producers.setdefault(producer.group_name, {})
            self._member(members, data.client_id, connection, language, version).last_heartbeat_ms = now_ms
            self._note(connection, False, producer.group_name, data.client_id)
        for consumer in data.consumer_data_set or ():
            group = self.consumers.get(consumer.group_name)
            if group is None:
                group = self.consumers[consumer.group_name] = ConsumerGroup(consumer.group_name)
            old = group.members.get(data.client_id)
            member = self._member(group.members, data.client_id, connection, language, version)
            member.last_heartbeat_ms = now_ms
            self._note(connection, True, group.name, data.client_id)
            changed = group.update(consumer)
            if (changed or member is not old) and group.name not in quiet:
                self._tell(group)

    def unregister(self, client_id: str, producer_group: str | None, consumer_group: str | None) -> None:
        """A client leaves a group."""
        if producer_group is not None:
            self._remove(False, producer_group, client_id)
        if consumer_group is not None:
            self._remove(True, consumer_group, client_id)

    def connection_lost(self, connection: Connection) -> None:
        """All that came over a connection is gone."""
        for is_consumer, group, client_id in self._of_connection.pop(connection, ()):
            members = self._members(is_consumer, group)
            if members is not None and client_id in members and members[client_id].connection is connection:
                self._remove(is_consumer, group, client_id)

    def expire(self) -> None:
        """Forget clients that stopped their heartbeats, and close their connections."""
        limit_ms = self._clock.now_ms() - EXPIRE_MS
        groups = list(self.producers.values())
        groups += [group.members for group in self.consumers.values()]
        late = {
            member.connection
            for members in groups
            for member in members.values()
            if member.last_heartbeat_ms < limit_ms
        }
        for connection in late:
            log.warning("client_expired", peer=connection.peer)
            connection.abort()

    def consumer(self, group: str, client_id: str) -> Client | None:
        """A member of a consumer group."""
        found = self.consumers.get(group)
        return found.members.get(client_id) if found is not None else None

    # ---

    @staticmethod
    def _member(
        members: dict[str, Client], client_id: str, connection: Connection, language: str | None, version: int
    ) -> Client:
        member = members.get(client_id)
        if member is None or member.connection is not connection:
            member = members[client_id] = Client(client_id, connection, language, version)
        return member

    def _members(self, is_consumer: bool, group: str) -> dict[str, Client] | None:
        if is_consumer:
            found = self.consumers.get(group)
            return found.members if found is not None else None
        return self.producers.get(group)

    def _note(self, connection: Connection, is_consumer: bool, group: str, client_id: str) -> None:
        if connection.is_closed:
            return
        self._of_connection.setdefault(connection, set()).add((is_consumer, group, client_id))

    def _remove(self, is_consumer: bool, group: str, client_id: str) -> None:
        members = self._members(is_consumer, group)
        member = members.pop(client_id, None) if members is not None else None
        if member is None:
            return
        if member.connection in self._of_connection:
            self._of_connection[member.connection].discard((is_consumer, group, client_id))
        if is_consumer:
            consumers = self.consumers[group]
            if members:
                self._tell(consumers)
            else:
                del self.consumers[group]
        elif not members:
            del self.producers[group]

    def _tell(self, group: ConsumerGroup) -> None:
        """Tell all members of a group that they have to share anew."""
        if not self.notify:
            return
        for member in list(group.members.values()):
            ext = GroupHeader(group.name).to_ext()
            member.connection.notify(Command(code=RequestCode.NOTIFY_CONSUMER_IDS_CHANGED, ext=ext))
