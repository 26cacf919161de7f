"""Limits on what clients can make the broker keep and do. A request beyond a limit is refused with one of RocketMQ's
codes and a remark that says what to do; what is already kept stays. brokerStatus shows how often each was reached."""

from __future__ import annotations

from collections import Counter
from typing import Final

from duemq.broker.errors import LimitReached
from duemq.broker.settings.config import BrokerConfig
from duemq.broker.settings.live_settings import LiveSettings
from duemq.protocol.codes import ResponseCode

MAX_NAME_LENGTH: Final = 255
"""Maximum length, in characters, of the name of a topic, a group or a broker that the broker keeps because a client
names it."""
MAX_CLIENT_ID_LENGTH: Final = 1024
MAX_EXPRESSION_LENGTH: Final = 65_536
"""Maximum length of a subscription's tag expression, in characters."""
MAX_ATTRIBUTES: Final = 100
"""Maximum number of attributes of one topic."""
MAX_ATTRIBUTES_LENGTH: Final = 32_768
"""Maximum length of all attributes of one topic together, in characters."""

PROPERTIES: Final = {
    "maxGroupsPerConnection": "groups_per_connection",
    "maxHeartbeatEntries": "heartbeat_entries",
    "maxSubscriptionsPerGroup": "subscriptions",
    "maxTagsPerSubscription": "tags",
    "maxBatchMessages": "batch_messages",
    "maxQueueLocks": "queue_locks",
    "maxSubscriptionGroups": "groups",
    "maxTopics": "topics",
    "maxQueuesPerTopic": "queues_per_topic",
    "maxQueues": "queues",
    "maxKVConfigEntries": "kv_entries",
    "maxKVConfigBytes": "kv_bytes",
    "maxRegisteredBrokers": "registered_brokers",
    "maxRegistrationBytes": "registration_bytes",
    "maxConnections": "connections",
    "maxConnectionsPerAddress": "connections_per_address",
    "maxNewConnections": "new_connections",
    "maxNewConnectionSeconds": "new_connection_seconds",
    "maxRequestsPerSecond": "requests_per_second",
    "maxRequestsPerSecondPerAccount": "requests_per_second_per_account",
    "maxRequestsPerSecondPerAddress": "requests_per_second_per_address",
}


class Limits:
    """The limits currently in force; the settings of the same names explain them."""

    groups_per_connection: int
    heartbeat_entries: int
    subscriptions: int
    tags: int
    batch_messages: int
    queue_locks: int
    groups: int
    topics: int
    queues_per_topic: int
    queues: int
    kv_entries: int
    kv_bytes: int
    registered_brokers: int
    registration_bytes: int
    connections: int
    connections_per_address: int
    new_connections: int
    new_connection_seconds: int
    requests_per_second: int
    requests_per_second_per_account: int
    requests_per_second_per_address: int

    def __init__(self, settings: LiveSettings) -> None:
        self.reached: Counter[str] = Counter()
        """How often each limit was reached since the start, by its property."""
        self.reached.update(dict.fromkeys(PROPERTIES, 0))
        self._follow(settings.config)
        settings.on_change(PROPERTIES, self._follow)

    def _follow(self, config: BrokerConfig) -> None:
        for name in PROPERTIES.values():
            setattr(self, name, getattr(config, f"max_{name}"))


def too_many_requests(limit: str, rate: int, who: str, of_each: str) -> LimitReached:
    """Return the refusal of a request beyond a limit per second. The code is SYSTEM_BUSY, which RocketMQ's brokers
    answer when they have too much to do: consumers then pull again after 3 s (with FLOW_CONTROL after 20 ms). `who`:
    the sender that made too many, for the log. `of_each`: what the limit is for."""
    setting = f"{limit}={rate}"
    return LimitReached(
        limit,
        ResponseCode.SYSTEM_BUSY,
        f"[REJECTREQUEST]system busy, start flow control for a while: {setting} for each {of_each}",
        f"{who} has made {setting} requests",
    )
