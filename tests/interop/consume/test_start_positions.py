"""Where a new group begins, by the consumer's consumeFromWhere. RocketMQ's broker has a group begin with the first
message of a young queue, whatever the consumer wants, and leaves the choice to the consumer for other queues.

EXPECTED is what Apache's brokers do; the tests pass with --target apache-4.9.7 and apache-5.3.3.
"""

import asyncio
import itertools
import random
import time
from collections.abc import Sequence
from datetime import datetime
from functools import partial

import pytest

from duemq import Message, Producer
from tests.interop.environment import BrokerFactory, ClientPool
from tests.interop.support import eventually, numbered
from tests.peers.brokers.broker import Broker
from tests.peers.clients import JavaClient, unique
from tests.peers.messages import Outgoing

VERSIONS = ("4.9.7", "5.3.3")
OLD, NEW = "old", "new"
"""The messages sent before a time, and those sent later. Some more are sent when the consumers are there."""

EXPECTED: dict[str, dict[str, tuple[str, ...]]] = {
    # A queue that begins at offset 0, in the part of the commitlog that the broker takes to be in memory.
    "young": {"first": (OLD, NEW), "last": (OLD, NEW), "time": (OLD, NEW)},
    # The same queue in a commitlog of which nothing is taken to be in memory.
    "on disk": {"first": (OLD, NEW), "last": (), "time": (NEW,)},
    # A queue whose first messages are deleted with the commitlog's first files.
    "shortened": {"first": (OLD, NEW), "last": (), "time": (NEW,)},
}
EVERY_HOUR = ";".join(f"{hour:02}" for hour in range(24))
STATES: dict[str, dict[str, object]] = {
    "young": {},
    "on disk": {"accessMessageInMemoryMaxRatio": 0},
    "shortened": {
        "mappedFileSizeCommitLog": 4 << 20,
        "maxMessageSize": 131072,
        "fileReservedTime": 0,
        "deleteWhen": EVERY_HOUR,
    },
}


def bodies(parts: Sequence[str]) -> list[bytes]:
    return [message.body for part in parts for message in numbered(part, 4)]


async def shorten(broker: Broker, java: JavaClient, topic: str) -> None:
    """Fill some files of the commitlog with what no client can compress, and wait until the broker has deleted all but
    the last ones."""
    async with Producer(broker.nameserver) as producer:  # timers keep 16 MiB of the commitlog
        await producer.send_many(Message(topic, random.randbytes(100_000)) for _ in range(200))
    for queue_id in range(2):
        offset = partial(java.offset, broker.nameserver, topic, queue_id, "min")
        await eventually(offset, lambda low: low > 0, timeout=100)  # Apache's brokers look after a minute


@pytest.mark.parametrize("state", EXPECTED)
async def test_where_a_new_group_begins(brokers: BrokerFactory, clients: ClientPool, state: str) -> None:
    broker = brokers.make(brokers.target, STATES[state])
    await broker.start()
    java = await clients.java("4.9.7")
    topic = unique("positions")
    await java.admin(broker.nameserver).create_topic(broker.address, topic, 2)
    await eventually(partial(java.queues, broker.nameserver, topic), lambda queues: len(queues) == 2)
    if state == "shortened":
        await shorten(broker, java, topic)
    async with await java.producer(broker.nameserver) as producer:
        await producer.send(topic, numbered(OLD, 4))
        # The time that a consumer asks for is in whole seconds.
        between = int(time.time()) + 2
        await asyncio.sleep(between - time.time())
        await producer.send(topic, numbered(NEW, 4))
        begins = {"first": "first", "last": "last", "time": f"time:{datetime.fromtimestamp(between):%Y%m%d%H%M%S}"}
        consumers = {
            (version, where): await (await clients.java(version)).consumer(
                broker.nameserver, unique("group"), topic, begin=begin
            )
            for version in VERSIONS
            for where, begin in begins.items()
        }
        for number in itertools.count():
            # A consumer has found its position when it gets a message that was sent meanwhile, in each queue.
            for queue_id in range(2):
                await producer.send(topic, [Outgoing(b"after-%d" % number)], queue_id=queue_id)
            if all(len({m.queue_id for m in c.messages if b"after" in m.body}) == 2 for c in consumers.values()):
                break
            await asyncio.sleep(0.5)
        for (version, where), consumer in consumers.items():
            expected = bodies(EXPECTED[state][where])
            await consumer.receive_bodies(expected)  # its threads may have handled a later message first
            got = sorted(body for body in consumer.bodies if body.startswith((b"old", b"new")))
            assert got == sorted(expected), (version, where)
            await consumer.stop()


@pytest.mark.parametrize("version", VERSIONS)
async def test_a_group_begins_with_the_first_retry_wherever_it_begins(
    brokers: BrokerFactory, clients: ClientPool, version: str
) -> None:
    """Retries that came before the group had an offset for them are not passed over."""
    broker = brokers.make(brokers.target, {"accessMessageInMemoryMaxRatio": 0, "messageDelayLevel": "1s 1s 1s"})
    await broker.start()
    java = await clients.java(version)
    topic, group = unique("positions"), unique("group")
    admin = java.admin(broker.nameserver)
    await admin.create_topic(broker.address, topic, 1)
    await admin.create_topic(broker.address, f"%RETRY%{group}", 1)
    for name in (topic, f"%RETRY%{group}"):
        await eventually(partial(java.queues, broker.nameserver, name))
    async with await java.producer(broker.nameserver) as producer:
        await producer.send(f"%RETRY%{group}", [Outgoing(b"retry")])
        await producer.send(topic, [Outgoing(b"before")])
        async with await java.consumer(broker.nameserver, group, topic, begin="last") as consumer:
            await consumer.receive_bodies([b"retry"])
