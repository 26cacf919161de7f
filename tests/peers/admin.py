"""The Java admin API (DefaultMQAdminExt) for tests; java/src/duemq/peer/Admins.java is the other side."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tests.peers.brokers.broker import BROKER
from tests.peers.messages import Json, Received

PERM_READ_WRITE = 6


@dataclass(frozen=True, slots=True)
class QueueRoute:
    """A broker's queues of a topic in a route."""

    broker: str
    read: int
    write: int
    perm: int


@dataclass(frozen=True, slots=True)
class Route:
    """The route of a topic: its queues by broker, and the brokers' addresses."""

    queues: list[QueueRoute]
    brokers: dict[str, dict[str, str]]
    order_conf: str | None


@dataclass(frozen=True, slots=True)
class QueueStats:
    """The ends of a queue, and the store time of its last message (0 for none)."""

    min: int
    max: int
    last_update: int


@dataclass(frozen=True, slots=True)
class Progress:
    """A group's progress in a queue: the queue's end, the group's offset, and the store time of the last message
    consumed."""

    broker: int
    consumer: int
    last_time: int


class Admin:
    """The admin API for one name server's brokers. Queues are keyed `topic@queue id` in results."""

    def __init__(self, call: Callable[..., Awaitable[Json]]) -> None:
        self._call = call

    async def create_topic(
        self,
        broker: str,
        topic: str,
        queues: int = 4,
        *,
        perm: int = PERM_READ_WRITE,
        order: bool = False,
        attributes: Mapping[str, str] | None = None,
    ) -> None:
        """Create a topic or change it, at the broker with this address."""
        await self._call(
            "create_topic",
            broker=broker,
            topic=topic,
            queues=queues,
            perm=perm,
            order=order,
            attributes=dict(attributes) if attributes is not None else None,
        )

    async def delete_topic(self, broker: str, topic: str) -> None:
        """Delete a topic at a broker and at the name server."""
        await self._call("delete_topic", broker=broker, topic=topic)

    async def create_group(
        self, broker: str, group: str, *, retry_max_times: int = 16, retry_queues: int = 1, enable: bool = True
    ) -> None:
        """Create a consumer group or change it."""
        await self._call(
            "create_group",
            broker=broker,
            group=group,
            retry_max_times=retry_max_times,
            retry_queues=retry_queues,
            enable=enable,
        )

    async def delete_group(self, broker: str, group: str, *, remove_offset: bool = True) -> None:
        """Delete a consumer group."""
        await self._call("delete_group", broker=broker, group=group, remove_offset=remove_offset)

    async def topics(self) -> list[str]:
        """Return the names of all topics."""
        topics: list[str] = (await self._call("topics"))["topics"]
        return topics

    async def route(self, topic: str) -> Route:
        """Return the route of a topic; CallError with code 17 if there is none."""
        route = (await self._call("route", topic=topic))["route"]
        queues = [QueueRoute(**queue) for queue in route["queues"]]
        return Route(queues, route["brokers"], route.get("order_conf"))

    async def topic_stats(self, topic: str) -> dict[str, QueueStats]:
        """Return the ends of a topic's queues."""
        queues = (await self._call("topic_stats", topic=topic))["queues"]
        return {name: QueueStats(**stats) for name, stats in queues.items()}

    async def consume_stats(self, group: str, topic: str | None = None) -> dict[str, Progress]:
        """Return a group's progress in the queues of its topics."""
        queues = (await self._call("consume_stats", group=group, topic=topic))["queues"]
        return {name: Progress(**progress) for name, progress in queues.items()}

    async def runtime_stats(self, broker: str) -> dict[str, str]:
        """Return the broker's own figures."""
        table: dict[str, str] = (await self._call("runtime_stats", broker=broker))["table"]
        return table

    async def cluster(self) -> tuple[dict[str, list[str]], dict[str, dict[str, str]]]:
        """Return the brokers by cluster, and the addresses by broker."""
        reply = await self._call("cluster")
        return reply["clusters"], reply["brokers"]

    async def consumer_connection(self, group: str) -> Json:
        """Return the clients of a consumer group and what they subscribe; CallError with code 206 if it has none."""
        return await self._call("consumer_connection", group=group)

    async def producer_connection(self, group: str, topic: str) -> list[Json]:
        """Return the clients of a producer group."""
        clients: list[Json] = (await self._call("producer_connection", group=group, topic=topic))["clients"]
        return clients

    async def running_info(self, group: str, client_id: str) -> Json:
        """Ask a consumer, through the broker, for its queues and settings."""
        return await self._call("running_info", group=group, client_id=client_id)

    async def who_consumes(self, topic: str) -> list[str]:
        """Return the groups that consume a topic or have an offset in it."""
        groups: list[str] = (await self._call("who_consumes", topic=topic))["groups"]
        return groups

    async def reset_offset(self, group: str, topic: str, timestamp: int) -> dict[str, int]:
        """Set the offsets of a group with live consumers to a time; return the new ones."""
        offsets: dict[str, int] = (await self._call("reset_offset", group=group, topic=topic, timestamp=timestamp))[
            "offsets"
        ]
        return offsets

    async def query_by_key(self, topic: str, key: str) -> list[Received]:
        """Return the messages with a key."""
        reply = await self._call("query_by_key", topic=topic, key=key)
        return [Received.from_json(message) for message in reply["messages"]]

    async def view(self, topic: str, msg_id: str) -> Received:
        """Return the message with this id, the broker's or the client's."""
        return Received.from_json((await self._call("view", topic=topic, msg_id=msg_id))["message"])

    async def broker_config(self, broker: str) -> dict[str, str]:
        """Return all settings of a broker."""
        table: dict[str, str] = (await self._call("broker_config", broker=broker))["table"]
        return table

    async def update_broker_config(self, broker: str, **properties: Any) -> None:
        """Change settings of a running broker."""
        await self._call("update_broker_config", broker=broker, properties=properties)

    async def update_consumer_offset(
        self, broker: str, group: str, topic: str, queue_id: int, *, offset: int, broker_name: str = BROKER
    ) -> None:
        """Set the offset of a group in one queue."""
        await self._call(
            "update_consumer_offset",
            broker=broker,
            broker_name=broker_name,
            group=group,
            topic=topic,
            queue_id=queue_id,
            offset=offset,
        )
