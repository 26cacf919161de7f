"""Levels from an operator's view: both delivery paths, changed tables, a topic's own table, and a backlog that RocketMQ
wrote.

The tests read the delivered messages from the queues of the topic, where a second copy would show.
"""

import asyncio
import json
from collections import Counter
from functools import partial

import pytest

from tests.interop.at_once import alone
from tests.interop.environment import LEVEL_MS, BrokerFactory, MqAdmins
from tests.interop.support import eventually, make_topic, not_on, waiting_record
from tests.peers.brokers.broker import Broker
from tests.peers.clients import JavaClient, unique
from tests.peers.messages import Outgoing, Received
from tests.peers.mqadmin.tool import MqAdmin

SCHEDULE = "SCHEDULE_TOPIC_XXXX"
QUEUES = 2
CHECKPOINT_OF_OURS = b"DUEMQCP3"
# The first three become due while no broker runs: RocketMQ's is killed before that.
BACKLOG_LEVELS = "15s 16s 16s 1s"
BACKLOG_MS = 15_000
BACKLOG = 1000


async def _topic(broker: Broker, java: JavaClient) -> str:
    return await make_topic(java.admin(broker.nameserver), broker, QUEUES)


async def _stored(broker: Broker, java: JavaClient, topic: str) -> list[list[Received]]:
    """Return the messages in each queue of a topic."""
    return [await java.pull_all(broker.nameserver, topic, queue) for queue in range(QUEUES)]


async def _stored_so_far(broker: Broker, java: JavaClient, topic: str, count: int) -> None:
    """Wait until a topic has this many messages."""

    async def stored() -> int:
        return sum(queue.max for queue in (await java.admin(broker.nameserver).topic_stats(topic)).values())

    await eventually(stored, lambda found: found >= count, timeout=60)


async def _set(tool: MqAdmin, broker: Broker, name: str, value: str) -> None:
    """Change a setting with mqadmin."""
    command = ("updateBrokerConfig", "-b", broker.address, "-k", name, "-v", value)
    output = await tool.run(*command, nameserver=broker.nameserver)
    assert "update broker config success" in output, output


async def _warmed(broker: Broker, *tools: MqAdmin) -> None:
    """Have mqadmin run, so that its next command takes no time in which messages become due."""
    await asyncio.gather(
        *(tool.run("brokerStatus", "-b", broker.address, nameserver=broker.nameserver) for tool in tools)
    )


@pytest.mark.parametrize("path", ["sync", "async"])
async def test_both_paths_deliver_everything_once_and_in_order_also_when_they_change(
    brokers: BrokerFactory, target: str, java: JavaClient, mqadmins: MqAdmins, path: str
) -> None:
    is_async = path == "async"
    properties = {
        "messageDelayLevel": "1s 2s 1s",
        "flushDiskType": "SYNC_FLUSH",
        "enableScheduleAsyncDeliver": str(is_async).lower(),
    }
    broker = brokers.make(target, properties)
    await broker.start()
    topic = await _topic(broker, java)
    other = str(not is_async).lower()
    await _warmed(broker, mqadmins["4.9.7"])
    sent: list[bytes] = []
    async with await java.producer(broker.nameserver) as producer:
        for number in range(5):
            bodies = [f"{len(sent) + n}".encode() for n in range(90)]
            messages = [Outgoing(body, level=1 + n % 3) for n, body in enumerate(bodies)]
            await producer.send(topic, messages, "async")
            sent += bodies
            # Some of these are delivered while others wait, when the next ones arrive and when the path changes.
            await _stored_so_far(broker, java, topic, len(sent) - 60)
            if number == 1:
                await _set(mqadmins["4.9.7"], broker, "enableScheduleAsyncDeliver", other)
    config = await java.admin(broker.nameserver).broker_config(broker.address)
    assert config["enableScheduleAsyncDeliver"] == other
    await _stored_so_far(broker, java, topic, len(sent))
    stored = await _stored(broker, java, topic)
    bodies = [message.body for queue in stored for message in queue]
    assert sorted(bodies) == sorted(sent)
    for level in (1, 2, 3):
        waited = await java.pull_all(broker.nameserver, SCHEDULE, level - 1)
        for queue in range(QUEUES):
            in_order = [message.body for message in waited if message.properties["REAL_QID"] == f"{queue}"]
            found = [message.body for message in stored[queue] if message.properties["DELAY"] == f"{level}"]
            assert found == in_order


@alone  # it asserts how late messages are
async def test_levels_change_while_messages_wait(
    brokers: BrokerFactory, target: str, java: JavaClient, mqadmins: MqAdmins
) -> None:
    for kind in ("apache-4.9.7", "apache-5.3.3"):
        not_on(target, kind, "a change of messageDelayLevel has no effect before its next start")
    broker = brokers.make(target, {"messageDelayLevel": "1s 6s"})
    await broker.start()
    topic = await _topic(broker, java)
    await _warmed(broker, mqadmins["4.9.7"], mqadmins["5.3.3"])
    promised = {b"old": 6000, b"shortened": 3000, b"added": 2000, b"shortened again": 1000, b"longer": 4000}
    async with await java.producer(broker.nameserver) as producer:
        await producer.send(topic, [Outgoing(b"old", level=2)])
        await _set(mqadmins["4.9.7"], broker, "messageDelayLevel", "1s 3s 2s")
        await producer.send(topic, [Outgoing(b"shortened", level=2), Outgoing(b"added", level=3)])
        await _set(mqadmins["5.3.3"], broker, "messageDelayLevel", "1s 1s 4s")
        await producer.send(topic, [Outgoing(b"shortened again", level=2), Outgoing(b"longer", level=3)])
    await _stored_so_far(broker, java, topic, len(promised))
    found = {message.body: message for queue in await _stored(broker, java, topic) for message in queue}
    assert len(found) == len(promised)
    waited = [message for level in (2, 3) for message in await java.pull_all(broker.nameserver, SCHEDULE, level - 1)]
    waits = {message.body: found[message.body].store_time - message.store_time for message in waited}
    # Not early by a ms; late by less than the difference from the next longer delay.
    assert {body: ms for body, ms in waits.items() if not promised[body] <= ms < promised[body] + 900} == {}


async def test_rocketmq_does_not_deliver_again_what_overtook_others(
    brokers: BrokerFactory, target: str, java: JavaClient, mqadmins: MqAdmins
) -> None:
    """RocketMQ does not repeat messages that duemq delivered ahead of others when it takes over the store, although its
    progress is one offset per level: the offset of the first message that waits."""
    for kind in ("apache-4.9.7", "apache-5.3.3"):
        not_on(target, kind, "nothing overtakes others there")
    properties = {"messageDelayLevel": "1s 6s"}
    writer = brokers.make(target, properties)
    await writer.start()
    topic = await _topic(writer, java)
    await _warmed(writer, mqadmins["4.9.7"])
    slow, fast = ([f"{what} {number}".encode() for number in range(20)] for what in ("slow", "fast"))
    async with await java.producer(writer.nameserver) as producer:
        await producer.send(topic, [Outgoing(body, level=2) for body in slow])
        await _set(mqadmins["4.9.7"], writer, "messageDelayLevel", "1s 1s")
        await producer.send(topic, [Outgoing(body, level=2) for body in fast])
    await _stored_so_far(writer, java, topic, len(fast))
    await writer.stop()
    reader = brokers.make("apache-4.9.7", properties)
    await reader.start()
    await _stored_so_far(reader, java, topic, len(fast) + len(slow))
    async with await java.producer(reader.nameserver) as producer:
        await producer.send(topic, [Outgoing(b"behind them all", level=2)])
    await _stored_so_far(reader, java, topic, len(fast) + len(slow) + 1)
    counts = Counter(message.body for queue in await _stored(reader, java, topic) for message in queue)
    assert counts == dict.fromkeys([*slow, *fast, b"behind them all"], 1)


async def test_a_topic_has_levels_of_its_own(broker: Broker, target: str, java: JavaClient, mqadmins: MqAdmins) -> None:
    for kind in ("apache-4.9.7", "apache-5.3.3"):
        not_on(target, kind, "there is no such attribute")
    topic, other = unique("topic"), unique("topic")
    command = ("updateTopic", "-b", broker.address, "-r", f"{QUEUES}", "-w", f"{QUEUES}")
    run = partial(mqadmins["5.3.3"].run, nameserver=broker.nameserver)
    made = await run(*command, "-t", topic, "-a", "+delay.levels=3s 1s")
    assert f"create topic to {broker.address} success." in made, made
    refused = await run(*command, "-t", other, "-a", "+delay.levels=7m 1s")
    assert "delay.levels=7m 1s: messageDelayLevel has no level of 420 s" in refused
    # The broker's own first two levels are 1 s and 2 s; a level beyond the topic's table means the table's highest.
    assert LEVEL_MS[:2] == (1000, 2000)
    promised = {b"1": 3000, b"2": 1000, b"9": 1000}
    messages = [Outgoing(body, level=int(body)) for body in promised]
    async with await java.producer(broker.nameserver) as producer:
        results = await producer.send(topic, messages)
    await _stored_so_far(broker, java, topic, len(promised))
    found = {message.body: message for queue in await _stored(broker, java, topic) for message in queue}
    assert found.keys() == promised.keys()
    for message, result in zip(messages, results, strict=True):
        level = int(found[message.body].properties["DELAY"])
        assert LEVEL_MS[level - 1] == promised[message.body], "the level of the broker's table with that delay"
        waited = await waiting_record(java, broker, SCHEDULE, level - 1, result)
        assert waited.body == message.body
        assert found[message.body].store_time >= waited.store_time + promised[message.body]


async def test_there_may_be_more_levels_than_the_schedule_topic_says_queues(
    brokers: BrokerFactory, target: str, java: JavaClient
) -> None:
    broker = brokers.make(target, {"messageDelayLevel": " ".join(["1m"] * 19 + ["1s"])})
    await broker.start()
    topic = await _topic(broker, java)
    async with await java.producer(broker.nameserver) as producer:
        await producer.send(topic, [Outgoing(b"twentieth", level=20)])
    await _stored_so_far(broker, java, topic, 1)
    ((found,),) = [queue for queue in await _stored(broker, java, topic) if queue]
    assert (found.body, found.properties["DELAY"]) == (b"twentieth", "20")
    topics = json.loads((broker.store / "config" / "topics.json").read_text())["topicConfigTable"]
    assert topics[SCHEDULE]["writeQueueNums"] == 18


async def test_a_backlog_of_rocketmq_is_delivered_once_over_kills(
    brokers: BrokerFactory, target: str, java: JavaClient
) -> None:
    for kind in ("apache-4.9.7", "apache-5.3.3"):
        not_on(target, kind, "after a crash it delivers again what it delivered since delayOffset.json was written")
    writer = brokers.make("apache-4.9.7", {"messageDelayLevel": BACKLOG_LEVELS})
    await writer.start()
    topic = await _topic(writer, java)
    backlog = [f"{level} {number}".encode() for number in range(BACKLOG) for level in (1, 2, 3)]
    async with await java.producer(writer.nameserver) as producer:
        await producer.send(topic, [Outgoing(backlog[0], level=1)])
        first_sent = asyncio.get_running_loop().time()
        await producer.send(topic, [Outgoing(body, level=int(body.split()[0])) for body in backlog[1:]], "async")
    await writer.kill()
    due_in = first_sent + BACKLOG_MS / 1000 - asyncio.get_running_loop().time()
    assert due_in > 0, "this machine was too slow: RocketMQ's broker may have delivered some of it itself"
    await asyncio.sleep(due_in)  # no consumer or client is connected here

    # Each level has two deliveries at a time on their way to the disk, so that a kill hits the middle of the backlog.
    properties = {
        "messageDelayLevel": BACKLOG_LEVELS,
        "flushDiskType": "SYNC_FLUSH",
        "enableScheduleAsyncDeliver": "true",
        "scheduleAsyncDeliverMaxPendingLimit": "2",
        "scheduleDeliverBatchSize": "1",
    }
    reader = brokers.make(target, properties)
    await reader.start()
    await _stored_so_far(reader, java, topic, BACKLOG // 10)
    await reader.kill()
    await reader.start()
    await _stored_so_far(reader, java, topic, len(backlog))
    await eventually(partial(_when_checkpoint_of_ours, reader))
    more = [f"4 {number}".encode() for number in range(BACKLOG)]
    async with await java.producer(reader.nameserver) as producer:
        await producer.send(topic, [Outgoing(body, level=4) for body in more], "async")
    await _stored_so_far(reader, java, topic, len(backlog) + BACKLOG // 10)
    await reader.kill()
    await reader.start()
    await _stored_so_far(reader, java, topic, len(backlog) + len(more))
    await eventually(partial(_nothing_waits, reader, java))
    counts = Counter(message.body for queue in await _stored(reader, java, topic) for message in queue)
    assert counts == dict.fromkeys([*backlog, *more], 1)


def _has_checkpoint_of_ours(broker: Broker) -> bool:
    return CHECKPOINT_OF_OURS in (broker.store / "checkpoint").read_bytes()


async def _when_checkpoint_of_ours(broker: Broker) -> bool:
    return _has_checkpoint_of_ours(broker)


async def _nothing_waits(broker: Broker, java: JavaClient) -> bool:
    table = await java.admin(broker.nameserver).runtime_stats(broker.address)
    return all(value.startswith("pending=0 ") for name, value in table.items() if name.startswith("scheduleLevel_"))
