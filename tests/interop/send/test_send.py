"""Every way of sending that a client has, and the messages as consumers receive them."""

from collections.abc import Awaitable, Callable
from functools import partial

import pytest

from tests.interop.environment import ClientPool
from tests.interop.support import eventually, need, not_on
from tests.peers.admin import Admin
from tests.peers.brokers.broker import BROKER, Broker
from tests.peers.capabilities import Can
from tests.peers.clients import MODES, Client, JavaClient, Mode, unique
from tests.peers.errors import CallError
from tests.peers.messages import Outgoing

COUNT = 40


def _messages(mode: Mode) -> list[Outgoing]:
    return [
        Outgoing(f"{mode}-{n}".encode(), tags="blue", keys=f"key-{n}", properties={"colour": f"no. {n}"})
        for n in range(COUNT)
    ]


@pytest.mark.parametrize("mode", MODES)
async def test_messages_arrive_as_they_were_sent(broker: Broker, topic: str, client: Client, mode: Mode) -> None:
    if mode == "batch":
        need(client, Can.BATCH)
    messages = _messages(mode)
    async with (
        await client.producer(broker.nameserver) as producer,
        await client.consumer(broker.nameserver, unique("group"), topic, property_names=["colour"]) as consumer,
    ):
        results = await producer.send(topic, messages, mode)
        received = await consumer.receive(COUNT)
    by_body = {message.body: message for message in received}
    assert len(received) == len(by_body) == COUNT
    for sent in messages:
        got = by_body[sent.body]
        assert (got.topic, got.tags, got.keys) == (topic, "blue", sent.keys)
        assert got.properties["colour"] == sent.properties["colour"]
        assert got.reconsume_times == 0
    if mode in {"sync", "async"}:
        assert all(result.stored for result in results)
        assert {result.msg_id for result in results} == {message.msg_id for message in received}


async def test_queue_offsets_of_a_queue_are_consecutive(
    broker: Broker, new_topic: Callable[[int], Awaitable[str]], client: Client
) -> None:
    topic = await new_topic(1)
    async with await client.producer(broker.nameserver) as producer:
        results = await producer.send(topic, _messages("sync"))
    assert [result.queue_offset for result in results] == list(range(COUNT))


async def test_result_of_a_send_names_the_place_of_the_message(broker: Broker, topic: str, client: Client) -> None:
    need(client, Can.RESULT_QUEUE)
    async with await client.producer(broker.nameserver) as producer:
        (result,) = await producer.send(topic, [Outgoing(b"here")])
    assert result.queue_id is not None
    assert result.queue_offset is not None
    pulled = await client.pull(broker.nameserver, topic, result.queue_id, result.queue_offset)
    assert [(message.body, message.msg_id) for message in pulled.messages] == [(b"here", result.msg_id)]


async def test_message_is_found_by_both_ids_and_by_key(
    broker: Broker, topic: str, client: Client, admin: Admin
) -> None:
    not_on(broker, "duemq", "it keeps no index of keys yet")
    key = unique("key")
    async with await client.producer(broker.nameserver) as producer:
        (result,) = await producer.send(topic, [Outgoing(b"sought", keys=f"first {key}")])
    assert result.msg_id is not None
    msg_id = result.msg_id
    # RocketMQ indexes a message just after it has answered the send.
    found = await eventually(partial(admin.view, topic, msg_id))
    assert (found.body, found.msg_id) == (b"sought", msg_id)
    for word in ("first", key):
        found_by_key = await eventually(partial(admin.query_by_key, topic, word))
        assert [message.body for message in found_by_key] == [b"sought"]
    if result.offset_msg_id is not None:
        found = await admin.view(topic, result.offset_msg_id)
        assert (found.body, found.offset_msg_id) == (b"sought", result.offset_msg_id)


async def test_body_may_be_any_bytes(broker: Broker, topic: str, client: Client) -> None:
    need(client, Can.BINARY_BODY)
    body = bytes(range(256)) * 5
    async with (
        await client.producer(broker.nameserver) as producer,
        await client.consumer(broker.nameserver, unique("group"), topic) as consumer,
    ):
        await producer.send(topic, [Outgoing(body)])
        (message,) = await consumer.receive(1)
    assert message.body == body


async def test_compressed_body_arrives_uncompressed(
    broker: Broker, topic: str, client: Client, java: JavaClient
) -> None:
    need(client, Can.COMPRESS)
    body = b"the same again and again, " * 4000
    async with await client.producer(broker.nameserver, compress_over=1024) as producer:
        (result,) = await producer.send(topic, [Outgoing(body)])
    assert result.queue_id is not None
    for reader in (client, java):
        pulled = await reader.pull(broker.nameserver, topic, result.queue_id, 0)
        assert [message.body for message in pulled.messages] == [body]


async def test_body_of_a_megabyte(broker: Broker, topic: str, client: Client) -> None:
    body = b"0123456789abcdef" * 65536
    async with (
        await client.producer(broker.nameserver) as producer,
        await client.consumer(broker.nameserver, unique("group"), topic) as consumer,
    ):
        await producer.send(topic, [Outgoing(body)])
        (message,) = await consumer.receive(1)
    assert message.body == body


async def test_sending_creates_the_topic(broker: Broker, client: Client, admin: Admin) -> None:
    topic = unique("created_by_send")
    async with await client.producer(broker.nameserver) as producer:
        await producer.send(topic, [Outgoing(b"first")])
    (queues,) = (await admin.route(topic)).queues
    assert (queues.broker, queues.read, queues.write, queues.perm) == (BROKER, 4, 4, 6)


@pytest.mark.parametrize("version", ["4.9.7", "5.3.3"])
async def test_refusals_have_the_codes_of_rocketmq(
    broker: Broker, topic: str, clients: ClientPool, version: str
) -> None:
    client = await clients.java(version)
    async with await client.producer(broker.nameserver, retries=0) as producer:
        (result,) = await producer.send(topic, [Outgoing(b"x", properties={"big": "y" * 40_000})], check=False)
        assert isinstance(result.error, CallError)
        assert result.error.code == 13  # MESSAGE_ILLEGAL: more than 32,767 bytes of properties
        (result,) = await producer.send("SCHEDULE_TOPIC_XXXX", [Outgoing(b"x")], check=False)
        assert isinstance(result.error, CallError)


async def test_vip_channel_takes_the_same_messages(broker: Broker, topic: str, java: JavaClient) -> None:
    async with (
        await java.producer(broker.nameserver, vip=True) as producer,
        await java.consumer(broker.nameserver, unique("group"), topic) as consumer,
    ):
        await producer.send(topic, [Outgoing(b"by port minus two")])
        assert [message.body for message in await consumer.receive(1)] == [b"by port minus two"]
