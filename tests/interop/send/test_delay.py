"""Delayed messages by level: never early, never lost, in the order of a level.

Earliness is measured by the broker's clock: the store time of the delivered record minus that of the record that waited
in SCHEDULE_TOPIC_XXXX.
"""

from collections.abc import Awaitable, Callable

from tests.interop.environment import LEVEL_MS
from tests.interop.support import need, waiting_record
from tests.peers.brokers.broker import Broker
from tests.peers.capabilities import Can
from tests.peers.clients import Client, JavaClient, unique
from tests.peers.messages import Outgoing, Sent

SCHEDULE = "SCHEDULE_TOPIC_XXXX"


async def _waiting_since(java: JavaClient, broker: Broker, level: int, result: Sent, body: bytes) -> int:
    """Return the store time of the record that waits for its level, found by the offset in the send result."""
    record = await waiting_record(java, broker, SCHEDULE, level - 1, result)
    assert record.body == body
    return record.store_time


async def test_levels_are_kept_and_a_higher_one_is_the_highest(
    broker: Broker, topic: str, client: Client, java: JavaClient
) -> None:
    highest = len(LEVEL_MS)
    sent_levels = [1, 2, highest, highest + 3]
    messages = [Outgoing(f"level-{level}".encode(), level=level, tags="late") for level in sent_levels]
    async with (
        await client.producer(broker.nameserver) as producer,
        await client.consumer(broker.nameserver, unique("group"), topic) as consumer,
    ):
        results = await producer.send(topic, messages)
        received = {message.body: message for message in await consumer.receive(len(messages))}
        assert len(consumer.messages) == len(messages)
    for level, message, result in zip(sent_levels, messages, results, strict=True):
        effective = min(level, highest)
        since = await _waiting_since(java, broker, effective, result, message.body)
        got = received[message.body]
        assert got.store_time >= since + LEVEL_MS[effective - 1]
        assert (got.topic, got.tags, got.reconsume_times) == (topic, "late", 0)
        assert got.born_time <= since
        assert got.msg_id == result.msg_id


async def test_level_keeps_the_order_of_sending(
    broker: Broker, new_topic: Callable[[int], Awaitable[str]], client: Client
) -> None:
    topic = await new_topic(1)
    messages = [Outgoing(f"{n}".encode(), level=1) for n in range(50)]
    async with (
        await client.producer(broker.nameserver) as producer,
        await client.consumer(broker.nameserver, unique("group"), topic, orderly=True) as consumer,
    ):
        await producer.send(topic, messages)
        received = await consumer.receive(len(messages))
    assert [message.body for message in received] == [message.body for message in messages]


async def test_asynchronous_and_one_way_sends_are_delayed_as_well(
    broker: Broker, topic: str, client: Client, java: JavaClient
) -> None:
    async with (
        await client.producer(broker.nameserver) as producer,
        await client.consumer(broker.nameserver, unique("group"), topic) as consumer,
    ):
        (result,) = await producer.send(topic, [Outgoing(b"async", level=1)], "async")
        await producer.send(topic, [Outgoing(b"oneway", level=1)], "oneway")
        received = {message.body: message for message in await consumer.receive(2)}
    since = await _waiting_since(java, broker, 1, result, b"async")
    for body in (b"async", b"oneway"):
        assert received[body].store_time >= since + LEVEL_MS[0]


async def test_delivered_message_is_on_the_queue_it_was_sent_to(
    broker: Broker, topic: str, client: Client, java: JavaClient
) -> None:
    async with (
        await client.producer(broker.nameserver) as producer,
        await java.consumer(broker.nameserver, unique("group"), topic) as consumer,
    ):
        for queue in range(4):
            await producer.send(topic, [Outgoing(f"{queue}".encode(), level=1)], queue_id=queue)
        received = await consumer.receive(4)
    assert {message.body: message.queue_id for message in received} == {f"{n}".encode(): n for n in range(4)}
    assert {message.properties["REAL_TOPIC"] for message in received} == {topic}


async def test_message_with_a_level_is_found_by_its_key_before_it_is_due(
    broker: Broker, topic: str, client: Client, java: JavaClient
) -> None:
    need(client, Can.OFFSET_MSG_ID)
    async with await client.producer(broker.nameserver) as producer:
        (result,) = await producer.send(topic, [Outgoing(b"waiting", level=2)])
    assert result.offset_msg_id is not None
    record = await java.admin(broker.nameserver).view(SCHEDULE, result.offset_msg_id)
    assert (record.topic, record.queue_id, record.body) == (SCHEDULE, 1, b"waiting")
    assert record.properties["REAL_TOPIC"] == topic
    assert record.properties["DELAY"] == "2"


async def test_batch_with_a_level_is_refused(broker: Broker, topic: str, java: JavaClient) -> None:
    async with await java.producer(broker.nameserver) as producer:
        (result,) = await producer.send(topic, [Outgoing(b"a", level=1), Outgoing(b"b", level=1)], "batch", check=False)
    assert not result.stored  # the library refuses it before the broker could
