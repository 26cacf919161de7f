"""Reads by offset: pull consumers, the lite pull consumer, and the offsets that a broker reports."""

from collections.abc import Awaitable, Callable
from functools import partial

import pytest

from tests.interop.environment import ClientPool
from tests.interop.support import eventually, need, not_on, numbered
from tests.peers.admin import Admin
from tests.peers.brokers.broker import Broker
from tests.peers.capabilities import Can
from tests.peers.clients import Client, JavaClient, unique
from tests.peers.messages import Outgoing

COUNT = 100


async def _filled(broker: Broker, client: Client, java: JavaClient, topic: str) -> list[bytes]:
    """Fill queue 0, and wait until its end has moved: a broker may report a message a moment later."""
    messages = [Outgoing(f"{n}".encode(), tags="even" if n % 2 == 0 else "odd") for n in range(COUNT)]
    async with await client.producer(broker.nameserver) as producer:
        await producer.send(topic, messages, queue_id=0)
    await eventually(partial(java.offset, broker.nameserver, topic, 0, "max"), lambda end: end == COUNT)
    return [message.body for message in messages]


async def test_queue_is_read_from_any_offset(
    broker: Broker, new_topic: Callable[[int], Awaitable[str]], client: Client, java: JavaClient
) -> None:
    topic = await new_topic(1)
    bodies = await _filled(broker, client, java, topic)
    for begin in (0, 1, COUNT // 2, COUNT - 1):
        messages = await client.pull_all(broker.nameserver, topic, 0, begin)
        assert [message.body for message in messages] == bodies[begin:]
        assert [message.queue_offset for message in messages] == list(range(begin, COUNT))


async def test_pull_gives_no_more_than_was_asked_for_and_tells_the_ends(
    broker: Broker, new_topic: Callable[[int], Awaitable[str]], client: Client, java: JavaClient
) -> None:
    topic = await new_topic(1)
    await _filled(broker, client, java, topic)
    pulled = await client.pull(broker.nameserver, topic, 0, 10, count=7)
    assert pulled.status == "FOUND"
    assert len(pulled.messages) == 7
    assert (pulled.next_offset, pulled.min_offset, pulled.max_offset) == (17, 0, COUNT)


async def test_pull_selects_by_tag(
    broker: Broker, new_topic: Callable[[int], Awaitable[str]], client: Client, java: JavaClient
) -> None:
    topic = await new_topic(1)
    bodies = await _filled(broker, client, java, topic)
    messages = await client.pull_all(broker.nameserver, topic, 0, expression="odd")
    assert [message.body for message in messages] == bodies[1::2]


async def test_offset_beyond_the_end_is_corrected(
    broker: Broker, new_topic: Callable[[int], Awaitable[str]], client: Client, java: JavaClient
) -> None:
    topic = await new_topic(1)
    await _filled(broker, client, java, topic)
    pulled = await client.pull(broker.nameserver, topic, 0, COUNT + 50)
    assert (pulled.status, pulled.next_offset, pulled.messages) == ("OFFSET_ILLEGAL", COUNT, [])


async def test_all_clients_read_the_same(
    broker: Broker, new_topic: Callable[[int], Awaitable[str]], client: Client, java: JavaClient
) -> None:
    topic = await new_topic(1)
    await _filled(broker, java, java, topic)
    ours = await client.pull_all(broker.nameserver, topic, 0)
    theirs = await java.pull_all(broker.nameserver, topic, 0)
    for got, expected in zip(ours, theirs, strict=True):
        for name in ("body", "msg_id", "queue_offset", "store_time", "born_time", "tags", "commitlog_offset"):
            assert getattr(got, name) == getattr(expected, name)


async def test_queues_of_a_topic(broker: Broker, topic: str, client: Client) -> None:
    assert await client.queues(broker.nameserver, topic) == [0, 1, 2, 3]


@pytest.mark.parametrize("version", ["4.9.7", "5.3.3"])
async def test_offsets_of_a_queue(
    broker: Broker, new_topic: Callable[[int], Awaitable[str]], clients: ClientPool, java: JavaClient, version: str
) -> None:
    client = await clients.java(version)
    topic = await new_topic(1)
    await _filled(broker, client, java, topic)
    messages = await client.pull_all(broker.nameserver, topic, 0)

    async def offset(which: str, timestamp: int | None = None) -> int:
        return await client.offset(broker.nameserver, topic, 0, which, timestamp)  # type: ignore[arg-type]

    assert await offset("min") == 0
    assert await offset("max") == COUNT
    assert await offset("earliest") == messages[0].store_time
    for n in (0, COUNT // 3, COUNT - 1):
        # Several messages can have one store time; RocketMQ does not define which of them is returned.
        found = await offset("search", messages[n].store_time)
        assert messages[found].store_time == messages[n].store_time
    assert await offset("search", messages[0].store_time - 60_000) == 0
    assert await offset("search", messages[-1].store_time + 60_000) in {COUNT - 1, COUNT}


async def test_committed_offset_is_told(broker: Broker, topic: str, client: Client, admin: Admin) -> None:
    need(client, Can.CONSUMER_OFFSET)
    group = unique("group")
    await admin.create_group(broker.address, group)  # 5.x commits no offset of a group it does not know (26)
    async with await client.producer(broker.nameserver) as producer:
        await producer.send(topic, numbered("message", 20), queue_id=2)
    await admin.update_consumer_offset(broker.address, group, topic, 2, offset=12)
    assert await client.consumer_offset(broker.nameserver, group, topic, 2) == 12


@pytest.mark.parametrize("version", ["4.9.7", "5.3.3"])
async def test_lite_pull_consumer_reads_a_topic_and_commits(
    broker: Broker, topic: str, clients: ClientPool, admin: Admin, version: str
) -> None:
    if version == "5.3.3":
        not_on(broker, "apache-4.9.7", "the lite pull consumer of 5.x uses request code 361, which came with 5.0")
    client = await clients.java(version)
    group = unique("group")
    messages = numbered("lite", COUNT)
    async with await client.producer(broker.nameserver) as producer:
        await producer.send(topic, messages)
        received = await client.lite_pull(broker.nameserver, group, topic, COUNT)
        assert sorted(message.body for message in received) == sorted(message.body for message in messages)

        async def behind() -> int:
            table = await admin.consume_stats(group, topic)
            return sum(queue.broker - queue.consumer for queue in table.values())

        await eventually(behind, lambda count: count == 0)
        await producer.send(topic, numbered("more", 10))
        received = await client.lite_pull(broker.nameserver, group, topic, 10)
        assert sorted(message.body for message in received) == sorted(m.body for m in numbered("more", 10))
