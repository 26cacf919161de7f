"""Goal: whichever of the three is killed with -9 at any moment, no message is lost, and with QoS 2 none comes twice.

Method: numbered messages go one way while one of the processes is killed after a random time and started again, again
and again, by a seed. Towards RocketMQ the topic is read in the end; towards MQTT a subscriber with a session of its own
counts. A message that is published after the last kill, and a clean stop of the bridge, tell that nothing more comes.

Mosquitto keeps its sessions in memory, and what it saves of them is what its last autosave saw. With `autosave_interval
1` and `autosave_on_changes` it saves in its loop, after it has answered: a kill between the two loses what it had
acknowledged, which no bridge can mend. So where Mosquitto is killed, messages come at least once, and lost may be only
what Mosquitto had acknowledged in its last moments.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import shutil
import sqlite3
from collections import Counter
from pathlib import Path

import aiomqtt
import pytest

from duemq import DueMQError, Producer
from tests.interop.mqtt.environment import World, take

RULES = """
[[to_rocketmq]]
filter = "in/#"
topic = "In"
qos = 2

[[to_mqtt]]
topic = "Out"
mqtt_topic = "out/{topic}"
qos = QOS
"""
KILLS = 5
MIN_MESSAGES = 100
"""Number of messages that are acknowledged before a test may end, also on a busy machine."""
PAUSE_SECONDS = 0.04
"""Between two batches of messages: a process that is killed has some under way at most moments all the same."""


def rules(qos: int) -> str:
    return RULES.replace("QOS", str(qos))


class Kills:
    """Kills one of the processes at random moments while `work` goes on, and lets `work` end after the last."""

    def __init__(self, world: World, who: str, seed: int, count: int) -> None:
        self._world = world
        self._who = who
        self._chance = random.Random(seed)
        self._count = count
        self.over = asyncio.Event()

    async def run(self) -> None:
        for _ in range(self._count):
            # The moment of death is what the test varies.
            await asyncio.sleep(self._chance.uniform(0.02, 0.5))
            world = self._world
            if self._who == "bridge":
                await world.bridge.kill()
                await world.bridge.launch()
                if self._chance.random() < 0.5:
                    await world.bridge.logged("connected", 0)
            elif self._who == "duemq":
                await world.broker.kill()
                await world.broker.start()
            else:
                await world.mosquitto.kill()
                await world.mosquitto.start()
        self.over.set()


async def publish_numbers(world: World, qos: int, over: asyncio.Event) -> int:
    """Publish 0, 1, 2 ... until all kills are over and MIN_MESSAGES are acknowledged. Return how many were published,
    all of them acknowledged."""
    number = 0
    async with world.client(name="publisher", max_inflight_messages=20) as client:
        client.pending_calls_threshold = 1000
        while not over.is_set() or number < MIN_MESSAGES:
            numbers = range(number, number + 20)
            await asyncio.gather(*(client.publish("in/x", str(each), qos=qos) for each in numbers))
            number += len(numbers)
            await asyncio.sleep(PAUSE_SECONDS)
    return number


async def from_mqtt(world: World, who: str, qos: int, seed: int, kills: int) -> tuple[Counter[int], set[int]]:
    """How often each number is in RocketMQ's topic, and those that Mosquitto had acknowledged."""
    await world.start(rules(qos))
    killing = Kills(world, who, seed, kills)
    publishing = asyncio.create_task(publish_numbers(world, qos, killing.over))
    await killing.run()
    count = await publishing
    await world.publish("in/last", "-1", qos=qos)
    async with world.consumer("In", "waits") as consumer, asyncio.timeout(60):
        seen = set[int]()
        while len(seen) < count + 1:
            message = await consumer.receive()
            seen.add(int(message.body))
            await message.ack()
    await world.bridge.stop()
    found = Counter(int(message.body) for message in await world.all_messages("In"))
    del found[-1]
    return found, set(range(count))


async def to_mqtt(world: World, who: str, qos: int, seed: int, kills: int) -> tuple[Counter[int], set[int]]:
    """How often each number came to a subscriber, and those that RocketMQ had acknowledged."""
    await world.start(rules(qos))
    killing = Kills(world, who, seed, kills)
    found: Counter[int] = Counter()
    progress, ended = asyncio.Event(), asyncio.Event()

    async def listen() -> None:
        async with world.client(name="listener") as client:
            await client.subscribe("out/#", qos=2)
            listening.set()
            async for message in client.messages:
                if message.topic.value == "out/end":
                    ended.set()
                    return
                found[int(str(message.payload, "utf-8"))] += 1
                progress.set()

    listening = asyncio.Event()
    listener = asyncio.create_task(listen())
    await listening.wait()

    sending = asyncio.create_task(send_numbers(world, killing.over))
    await killing.run()
    acknowledged = await sending
    while not acknowledged <= found.keys():
        progress.clear()
        async with asyncio.timeout(60):  # Mosquitto may have thousands that were sent again
            await progress.wait()
    async with asyncio.timeout(60):
        await world.bridge.stop()
        await world.publish("out/end", "", qos=2)
        await ended.wait()
    await listener
    return found, acknowledged


async def send_numbers(world: World, over: asyncio.Event) -> set[int]:
    """Send 0, 1, 2 ... to RocketMQ, each once, until all kills are over and it has acknowledged MIN_MESSAGES. Return
    the acknowledged numbers; others may be there all the same."""
    acknowledged = set[int]()

    async def send(number: int) -> None:
        with contextlib.suppress(DueMQError):
            await producer.send("Out", str(number), retries=0, timeout=1.0)
            acknowledged.add(number)

    numbers = itertools.count()
    async with world.producer() as producer:
        while not over.is_set() or len(acknowledged) < MIN_MESSAGES:
            await asyncio.gather(*(send(next(numbers)) for _ in range(10)))
            await asyncio.sleep(PAUSE_SECONDS)
    return acknowledged


def report(found: Counter[int], acknowledged: set[int], kills: int) -> None:
    """Print the counts, which pytest's -rP shows."""
    lost, twice = len(acknowledged - found.keys()), sum(times > 1 for times in found.values())
    print(f"{len(acknowledged)} messages, {kills} kills, {lost} lost, {twice} more than once")


def check(found: Counter[int], acknowledged: set[int], kills: int, *, once: bool) -> None:
    report(found, acknowledged, kills)
    assert len(acknowledged) >= MIN_MESSAGES
    assert acknowledged - found.keys() == set(), "lost"
    if once:
        assert {number: times for number, times in found.items() if times > 1} == {}, "twice"


SEEDS = [pytest.param(KILLS, 1, id="seed 1"), pytest.param(KILLS, 2, id="seed 2", marks=pytest.mark.soak)]
ONE_SEED = SEEDS[:1]
SOAK = [pytest.param(50, 100, id="50 kills", marks=(pytest.mark.soak, pytest.mark.timeout(1200)))]


@pytest.mark.parametrize(("kills", "seed"), [*SEEDS, *SOAK])
@pytest.mark.parametrize("qos", [1, 2])
@pytest.mark.parametrize("who", ["bridge", "duemq"])
async def test_kills_from_mqtt(world: World, who: str, qos: int, kills: int, seed: int) -> None:
    found, acknowledged = await from_mqtt(world, who, qos, seed, kills)
    check(found, acknowledged, kills, once=qos == 2)


@pytest.mark.parametrize(("kills", "seed"), [*SEEDS, *SOAK])
@pytest.mark.parametrize("qos", [1, 2])
@pytest.mark.parametrize("who", ["bridge", "duemq"])
async def test_kills_to_mqtt(world: World, who: str, qos: int, kills: int, seed: int) -> None:
    found, acknowledged = await to_mqtt(world, who, qos, seed, kills)
    check(found, acknowledged, kills, once=qos == 2)


async def test_offsets_that_a_killed_broker_had_not_saved(tmp_path: Path) -> None:
    """RocketMQ's brokers save offsets every five seconds: after a kill they give again what was published long ago."""
    world = World(tmp_path, broker={"flushConsumerOffsetInterval": 600_000})
    try:
        await world.start(rules(2))
        async with world.client(name="listener") as client, world.producer() as producer:
            await client.subscribe("out/#", qos=2)
            for number in range(50):
                await producer.send("Out", str(number))
            first = await take(client, 50)
            await forgotten(world)
            await world.broker.kill()
            await world.bridge.kill()
            await world.broker.start()
            await world.bridge.start()
            await insist_on_sending(producer, "Out", "last")
            [last] = await take(client, 1)
        assert {int(str(message.payload, "utf-8")) for message in first} == set(range(50))
        assert last.payload == b"last"
    finally:
        await world.close()


async def forgotten(world: World) -> None:
    """Wait until the journal has no message any more that is done."""
    state, copy = world.bridge.config.parent / "state", world.bridge.config.parent / "copy"
    while True:
        copy.mkdir(exist_ok=True)
        for name in ("journal.db", "journal.db-wal"):
            shutil.copyfile(state / name, copy / name)
        with contextlib.closing(sqlite3.connect(copy / "journal.db")) as journal:
            if journal.execute("SELECT count(*) FROM published").fetchone() == (0,):
                return
        await asyncio.sleep(0.1)


async def insist_on_sending(producer: Producer, topic: str, body: str) -> None:
    while True:
        with contextlib.suppress(DueMQError):
            await producer.send(topic, body)
            return
        await asyncio.sleep(0.05)


@pytest.mark.parametrize(("kills", "seed"), [*ONE_SEED, *SOAK])
@pytest.mark.parametrize("qos", [1, 2])
async def test_killed_mosquitto_from_mqtt(tmp_path: Path, qos: int, kills: int, seed: int) -> None:
    """What Mosquitto has on its disk comes, however often it is killed meanwhile."""
    world = World(tmp_path, settings=("autosave_on_changes true", "autosave_interval 1"))
    count = min(1500, 100 * kills)
    try:
        # Without a window Mosquitto hands over everything at once.
        await world.start(rules(qos), "receive_maximum = 20")
        await world.broker.kill()
        async with world.client() as client:
            client.pending_calls_threshold = count
            for begin in range(0, count, 20):
                numbers = range(begin, begin + 20)
                await asyncio.gather(*(client.publish("in/x", str(each), qos=qos) for each in numbers))
        await world.mosquitto.stop()
        await asyncio.gather(world.broker.start(), world.mosquitto.start())
        await Kills(world, "mosquitto", seed, kills).run()
        await world.publish("in/last", "-1", qos=qos)
        await arrived(world, -1)
        await world.bridge.stop()
        found = Counter(int(message.body) for message in await world.all_messages("In"))
    finally:
        await world.close()
    report(found, set(range(count)), kills)
    assert set(range(count)) - found.keys() == set(), "lost"
    if qos == 2:
        assert {each: times for each, times in found.items() if times > 1} == {}, "twice"


@pytest.mark.parametrize(("kills", "seed"), [*ONE_SEED, *SOAK])
@pytest.mark.parametrize("qos", [1, 2])
async def test_killed_mosquitto_to_mqtt(tmp_path: Path, qos: int, kills: int, seed: int) -> None:
    """All but what Mosquitto had acknowledged to the bridge in the turn of its loop in which it was killed."""
    world = World(tmp_path, settings=("autosave_on_changes true", "autosave_interval 1"))
    found: Counter[int] = Counter()
    ended, subscribed, progress = asyncio.Event(), asyncio.Event(), asyncio.Event()
    subscribed_to = 0

    async def listen() -> None:
        nonlocal subscribed_to
        while not ended.is_set():
            with contextlib.suppress(aiomqtt.MqttError):
                # aiomqtt does not notice that a connection has ended before its CONNACK or SUBACK came: it waits.
                async with world.client(name="listener", timeout=5) as client:
                    await client.subscribe("out/#", qos=qos)
                    subscribed_to = world.mosquitto.process.pid
                    subscribed.set()
                    async for message in client.messages:
                        if message.topic.value == "out/end":
                            ended.set()
                            return
                        found[int(str(message.payload, "utf-8"))] += 1
                        progress.set()
            await asyncio.sleep(0.05)

    async def work() -> set[int]:
        await subscribed.wait()
        killing = Kills(world, "mosquitto", seed, kills)
        sending = asyncio.create_task(send_numbers(world, killing.over))
        await killing.run()
        acknowledged = await sending
        async with asyncio.timeout(60):
            # A Mosquitto killed before its first autosave knows no subscription until the listener is back.
            while subscribed_to != world.mosquitto.process.pid:
                subscribed.clear()
                await subscribed.wait()
            async with world.producer() as producer:
                await producer.send("Out", "-1")
            while -1 not in found:
                progress.clear()
                await progress.wait()
            await world.bridge.stop()
            await world.publish("out/end", "", qos=2)
            await ended.wait()
        return acknowledged

    try:
        await world.start(rules(qos))
        async with asyncio.TaskGroup() as group:
            group.create_task(listen())
            working = group.create_task(work())
        acknowledged = working.result()
    finally:
        await world.close()
    report(found, acknowledged, kills)
    lost = acknowledged - found.keys()
    assert len(lost) <= 20 * kills, sorted(lost)


async def arrived(world: World, number: int) -> None:
    """Wait until a number is in RocketMQ's topic."""
    async with world.consumer("In", "arrives") as consumer, asyncio.timeout(60):
        while int((message := await consumer.receive()).body) != number:
            await message.ack()
