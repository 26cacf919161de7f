"""Stores with consumequeue_ext change hands: RocketMQ's 4.9.7 with enableConsumeQueueExt writes, and the broker under
test goes on; and the other way round, with the property on and off.

A filled store is written once and copied for each case. The broker under test reads it with its clock moved, so that
no test waits for a delay level.
"""

import struct
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from duemq.storage.files import OsFiles
from duemq.storage.queues.consume_queue import UNIT
from duemq.storage.store import MessageStore, StoreConfig
from duemq.testing import TestClock
from tests.interop.environment import BrokerFactory, ClientPool, SharedBroker
from tests.interop.support import eventually, make_topic
from tests.peers.brokers.broker import Broker
from tests.peers.clients import JavaClient
from tests.peers.messages import Outgoing
from tests.soak import sampled
from tests.support.copies import copy_tree

SCHEDULE = "SCHEDULE_TOPIC_XXXX"
APACHE = "apache-4.9.7"
ON: dict[str, object] = {"messageDelayLevel": "1s 1h 2s", "enableConsumeQueueExt": "true"}
OFF: dict[str, object] = {"messageDelayLevel": "1s 1h 2s"}
HOUR = 2
"""The delay level of an hour."""
COUNT = 40
ADDRESSES = -(2**31) - 1


def hash_of(tags: str) -> int:
    """Java's hash of a short ASCII text."""
    value = 0
    for char in tags:
        value = 31 * value + ord(char)
    assert value < 2**31
    return value


@dataclass(frozen=True)
class Filled:
    """A store of RocketMQ's, stopped."""

    store: Path
    topic: str


def queue_units(store: Path, topic: str, queue_id: int) -> list[tuple[int, int, int]]:
    """Read the units of a consume queue's first file as they are stored."""
    data = (store / "consumequeue" / topic / str(queue_id) / f"{0:020}").read_bytes()
    end = -(-len(data.rstrip(b"\0")) // 20) * 20  # a file of 6 MB of which a few units are written
    return [unit for unit in UNIT.iter_unpack(data[:end]) if unit[1]]


def extension_file(store: Path, topic: str, queue_id: int) -> Path:
    return store / "consumequeue_ext" / topic / str(queue_id) / f"{0:020}"


def extension_units(store: Path, topic: str, queue_id: int) -> Iterator[tuple[int, int, int]]:
    """Read the units of an extension's first file: their offsets, tags codes and store times."""
    data, at = extension_file(store, topic, queue_id).read_bytes(), 0
    while True:
        size, code, stored, bitmap = struct.unpack_from(">hqqh", data, at)
        if size <= 0:
            return
        assert size == 20 + bitmap
        yield at, code, stored
        at += size


async def fill(broker: Broker, java: JavaClient, topic: str, prefix: str) -> None:
    """Send messages with the tags a and b in turn to one queue, one with a tag of its own, and one due in an hour."""
    async with await java.producer(broker.nameserver) as producer:
        bodies = [f"{prefix}-{number}" for number in range(COUNT)]
        await producer.send(topic, [Outgoing(body.encode(), tags="ab"[n % 2]) for n, body in enumerate(bodies)])
        await producer.send(topic, [Outgoing(f"{prefix}-rare".encode(), tags="rare")])
        await producer.send(topic, [Outgoing(f"{prefix}-hour".encode(), tags="hour", level=HOUR)])


async def pulled(broker: Broker, java: JavaClient, topic: str, expression: str) -> list[bytes]:
    return [message.body for message in await java.pull_all(broker.nameserver, topic, 0, expression=expression)]


def tagged(prefix: str, tag: str) -> list[bytes]:
    return [f"{prefix}-{number}".encode() for number in range(COUNT) if "ab"[number % 2] == tag]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def filled(
    target: str, shared_broker: SharedBroker, clients: ClientPool, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Filled]:
    """A store that RocketMQ wrote with the property on, and stopped cleanly."""
    await shared_broker.make_room()
    java = await clients.java("4.9.7")
    factory = BrokerFactory(target, tmp_path_factory.mktemp("filled"))
    writer = factory.make(APACHE, ON)
    await writer.start()
    topic = await make_topic(java.admin(writer.nameserver), writer, 1)
    await fill(writer, java, topic, "old")
    await writer.stop()
    yield Filled(writer.store, topic)
    await factory.close()


def removed(path: Path) -> None:
    path.unlink()


def zeroed(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(bytes(20 * (COUNT + 1)))


def flipped(path: Path) -> None:
    """Change one byte of the tags code in each of the first units, each time another one."""
    data = bytearray(path.read_bytes()[: 20 * (COUNT + 1)])
    for number in range(COUNT // 2):
        data[20 * number + 2 + number % 8] ^= 1 + number
    with path.open("r+b") as file:
        file.write(data)


async def test_rocketmq_writes_what_the_module_extension_says(filled: Filled) -> None:
    for topic, queue_id in ((filled.topic, 0), (SCHEDULE, HOUR - 1)):
        units = queue_units(filled.store, topic, queue_id)
        found = list(extension_units(filled.store, topic, queue_id))
        assert [code for _, _, code in units] == [at - 2**63 for at, _, _ in found]
    codes = [code for _, code, _ in extension_units(filled.store, filled.topic, 0)]
    assert codes == [hash_of("ab"[number % 2]) for number in range(COUNT)] + [hash_of("rare")]
    ((_, due, stored),) = extension_units(filled.store, SCHEDULE, HOUR - 1)
    assert due == stored + 3_600_000


async def test_a_store_of_rocketmqs_reads_as_if_it_had_no_extension(filled: Filled, tmp_path: Path) -> None:
    copy_tree(filled.store, tmp_path / "store")
    store = MessageStore(
        StoreConfig(str(tmp_path / "store")), OsFiles(), ("127.0.0.1", 1), lambda level, stored: stored + 3_600_000
    )
    store.open()
    codes = [unit[2] for unit in UNIT.iter_unpack(store.ensure_queue(filled.topic, 0).read(0, 100))]
    assert codes == [*(hash_of("ab"[number % 2]) for number in range(COUNT)), hash_of("rare")]
    unit = store.ensure_queue(SCHEDULE, HOUR - 1).unit(0)
    assert unit is not None
    ((_, due, _),) = extension_units(filled.store, SCHEDULE, HOUR - 1)
    assert unit[2] == due
    store.abandon()


@pytest.mark.parametrize(
    ("damage", "properties"),
    sampled([(None, ON), (None, OFF), (removed, ON), (zeroed, ON), (flipped, OFF)], [(None, ON), (flipped, OFF)]),
    ids=["on", "off", "removed", "zeroed", "flipped"],
)
async def test_tags_and_levels_of_a_store_of_rocketmqs(
    brokers: BrokerFactory,
    target: str,
    java: JavaClient,
    filled: Filled,
    damage: Callable[[Path], None] | None,
    properties: dict[str, object],
) -> None:
    if target != "duemq":
        pytest.skip("moves the clock of the broker")
    reader = brokers.make(target, {**properties, "testClock": "true"})
    copy_tree(filled.store, reader.store)
    for topic, queue_id in ((filled.topic, 0), (SCHEDULE, HOUR - 1)):
        if damage is not None:
            damage(extension_file(reader.store, topic, queue_id))
    await reader.start()
    assert await pulled(reader, java, filled.topic, "a") == tagged("old", "a")
    assert await pulled(reader, java, filled.topic, "b || rare") == [*tagged("old", "b"), b"old-rare"]
    clock = TestClock(reader.nameserver)
    ((_, due, _),) = extension_units(filled.store, SCHEDULE, HOUR - 1)
    now = await clock.now()  # minutes after the store was filled, on a slow machine
    await clock.advance(ms=due - 600_000 - int(now.timestamp() * 1000))
    assert await pulled(reader, java, filled.topic, "hour") == []
    await clock.advance("10m")
    await eventually(lambda: pulled(reader, java, filled.topic, "hour"), lambda found: found == [b"old-hour"])
    await fill(reader, java, filled.topic, "new")
    await reader.stop()
    codes = [code for _, _, code in queue_units(reader.store, filled.topic, 0)]
    assert all(code <= ADDRESSES for code in codes[: COUNT + 1])
    new = codes[COUNT + 1 :]
    assert len(new) == COUNT + 2
    if properties == OFF:
        assert new == [hash_of("hour"), *(hash_of("ab"[n % 2]) for n in range(COUNT)), hash_of("rare")]
    else:
        assert all(code <= ADDRESSES for code in new)
        assert codes == sorted(set(codes)), "no address is used twice"
    await reader.start()
    assert await pulled(reader, java, filled.topic, "a") == [*tagged("old", "a"), *tagged("new", "a")]
    assert await pulled(reader, java, filled.topic, "hour") == [b"old-hour"]
    await TestClock(reader.nameserver).advance("1h")
    hours = [b"old-hour", b"new-hour"]
    await eventually(lambda: pulled(reader, java, filled.topic, "hour"), lambda found: found == hours)
    await reader.kill()


@pytest.mark.parametrize(("end", "properties"), [("stop", OFF), ("kill", ON)], ids=["off", "on"])
async def test_rocketmq_goes_on_with_a_store_that_has_extensions(
    brokers: BrokerFactory, target: str, java: JavaClient, end: str, properties: dict[str, object]
) -> None:
    writer = brokers.make(target, ON)
    await writer.start()
    topic = await make_topic(java.admin(writer.nameserver), writer, 1)
    await fill(writer, java, topic, "old")
    async with await java.producer(writer.nameserver) as producer:
        await producer.send(topic, [Outgoing(b"soon", tags="soon", level=3)])
    await (writer.stop() if end == "stop" else writer.kill())
    if end == "stop":
        units = queue_units(writer.store, topic, 0)
        assert [code + 2**63 for _, _, code in units] == [20 * number for number in range(len(units))]
        assert [code for _, code, _ in extension_units(writer.store, topic, 0)][:COUNT] == [
            hash_of("ab"[number % 2]) for number in range(COUNT)
        ]
    reader = brokers.make(APACHE, properties)
    await reader.start()
    assert await pulled(reader, java, topic, "a") == tagged("old", "a")
    assert await pulled(reader, java, topic, "rare") == [b"old-rare"]
    await eventually(lambda: pulled(reader, java, topic, "soon"), lambda found: found == [b"soon"])
    await fill(reader, java, topic, "new")
    await reader.stop()
    again = brokers.make(target, ON)
    await again.start()
    assert await pulled(again, java, topic, "a") == [*tagged("old", "a"), *tagged("new", "a")]
    assert await pulled(again, java, topic, "rare || soon") == [b"old-rare", b"soon", b"new-rare"]
    assert await pulled(again, java, topic, "hour") == []
    async with await java.producer(again.nameserver) as producer:
        await producer.send(topic, [Outgoing(b"last", tags="a")])
    await again.stop()
    addresses = [code for _, _, code in queue_units(again.store, topic, 0) if code <= ADDRESSES]
    assert addresses == sorted(set(addresses)), "no address is used twice"
    last = [code for _, code, _ in extension_units(again.store, topic, 0)][-1]
    assert last == hash_of("a")
