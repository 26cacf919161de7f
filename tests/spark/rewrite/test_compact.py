"""Compaction of stores of real brokers, and brokers that go on with the result."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from itertools import product
from pathlib import Path

import pytest

from duemq.spark_jobs.compact.compact import CompactOptions, CompactResult, compact
from tests.interop.environment import make_broker
from tests.interop.support import eventually
from tests.peers.brokers.broker import Broker
from tests.peers.clients import JavaClient, unique
from tests.peers.messages import Outgoing
from tests.soak import sampled
from tests.spark.world import oracle
from tests.spark.world.oracle import HALF_TOPIC, OP_TOPIC, SCHEDULE_TOPIC, TIMER_TOPIC, Record
from tests.spark.world.peers import Peers
from tests.spark.world.stores import KINDS, PROPERTIES, Kind, Stores, WrittenStore

pytestmark = pytest.mark.interop

SYSTEM = {SCHEDULE_TOPIC, TIMER_TOPIC, HALF_TOPIC, OP_TOPIC}
WITH_TIMERS: tuple[Kind, ...] = ("duemq", "apache-5.3.3")
GOES_ON = (("duemq", "apache-4.9.7"), ("apache-4.9.7", "apache-5.3.3"), ("apache-5.3.3", "duemq"))
KEEPS_TIMERS = (("duemq", "duemq"),)
"""The pair of brokers that every run tries with many timers; the soak tries all pairs. Timers that change hands are in
`test_a_broker_goes_on`."""
AT_ONCE = "1s 1s 1s 1s 1s 1s"
"""A table of levels by which every waiting message is due."""


def run(store: Path, out: Path) -> CompactResult:
    return compact(str(store), str(out), workers=1, options=CompactOptions(range_size=4 << 20))


def by_unit(records: list[Record]) -> dict[tuple[str, int, int], Record]:
    return {(record.topic, record.queue_id, record.queue_offset): record for record in records}


def is_same(a: Record, b: Record) -> bool:
    """Whether two records are the same, apart from their positions and those of their origins."""
    a, b = (dataclasses.replace(one, physical_offset=0, stored_physical_offset=0, prepared_offset=0) for one in (a, b))
    return a == b


def test_what_stays_is_as_it_was_and_only_what_is_done_goes(written: WrittenStore, tmp_path: Path) -> None:
    result = run(written.path, tmp_path / "new")
    old, new = oracle.contents(written.path), oracle.contents(tmp_path / "new")
    assert new.damages == []
    before, after = by_unit(old.records), by_unit(new.records)
    assert len(after) == len(new.records) == result.kept
    assert len(old.records) - len(new.records) == sum(result.removed.values())
    for key, record in after.items():
        assert is_same(record, before[key])
        assert record.stored_physical_offset == record.physical_offset
    assert {record.topic for key, record in before.items() if key not in after} <= SYSTEM
    waiting = Counter(record.unique_key for record in new.records if record.topic in (SCHEDULE_TOPIC, TIMER_TOPIC))
    for sent in written.sent:
        if sent.kind in ("level", "timer") and sent.outcome == "pending":
            assert waiting[sent.unique_key] >= 1, sent
    half = {record.unique_key for record in new.records if record.topic == HALF_TOPIC}
    assert half >= {sent.unique_key for sent in written.of("half", "open")}
    done = {s.unique_key for s in written.sent if s.kind in ("level", "timer") and s.outcome == "delivered"}
    left = [record for record in new.records if record.topic in (SCHEDULE_TOPIC, TIMER_TOPIC)]
    # In a queue with a waiting message the last record stays.
    assert sum(record.unique_key in done for record in left) <= 3
    last = oracle.queues(written.path)
    assert sorted(oracle.queues(tmp_path / "new")) == sorted(last)
    by_offset = {record.physical_offset: record for record in new.records}
    for topic, queue_id in last:
        old_units = oracle.consume_queue(written.path, topic, queue_id)
        units = oracle.consume_queue(tmp_path / "new", topic, queue_id)
        assert units[-1].queue_offset == old_units[-1].queue_offset
        for unit in units:
            found = by_offset.get(unit.physical_offset)
            if found is not None and unit.size == found.size:
                assert (found.topic, found.queue_id) == (topic, queue_id)
                assert found.queue_offset == unit.queue_offset
        indexed = {(topic, queue_id, u.queue_offset) for u in units if u.physical_offset in by_offset}
        assert indexed >= {each for each in after if each[:2] == (topic, queue_id)}


@asynccontextmanager
async def running(broker: Broker) -> AsyncIterator[Broker]:
    """Run a broker, and stop it in any case."""
    await broker.start()
    try:
        yield broker
    finally:
        if broker.running:
            await broker.kill()


@pytest.mark.parametrize(("kind", "target"), sampled(product(KINDS, KINDS), GOES_ON))
def test_a_broker_goes_on(stores: Stores, peers: Peers, kind: Kind, target: Kind, tmp_path: Path) -> None:
    written = stores.get(kind)
    run(written.path, tmp_path / "new")
    old = oracle.contents(written.path).records
    # Settings by which the broker does not change the expected content.
    settings = {**PROPERTIES, "messageDelayLevel": AT_ONCE, "flushDelayOffsetInterval": "1000"}
    broker = make_broker(target, tmp_path / "broker", settings, store=tmp_path / "new")

    async def go_on() -> None:
        async with running(broker):
            java = await peers.client_for(broker)
            await _pull_everything(broker, java, old)
            await _progress(broker, java, written)
            await _pending_levels(broker, java, written, old)
            if {kind, target} <= set(WITH_TIMERS):
                await _pending_timers(broker, java, written)
            if target != "duemq":
                await _keys(broker, java, written)
            await _next(broker, java, written, old)
            # After a kill it goes on as well, and does not deliver again.
            await broker.kill()
            await broker.start()
            topic = _plain_topic(written)
            await eventually(lambda: java.admin(broker.nameserver).route(topic))
            (*_, last) = await java.pull_all(broker.nameserver, topic, 0)
            assert last.body == b"next"

    peers.run(go_on())


def _user_queues(records: list[Record]) -> dict[tuple[str, int], list[Record]]:
    queues: dict[tuple[str, int], list[Record]] = {}
    for record in records:
        if record.topic not in SYSTEM and not record.topic.startswith(("%", "rmq_sys", "RMQ_SYS", "TRANS")):
            queues.setdefault((record.topic, record.queue_id), []).append(record)
    return queues


def _plain_topic(written: WrittenStore) -> str:
    return next(sent.topic for sent in written.of("plain") if sent.topic.startswith("plain"))


async def _pull_everything(broker: Broker, java: JavaClient, old: list[Record]) -> None:
    queues = _user_queues(old)
    admin = java.admin(broker.nameserver)
    for topic in {topic for topic, _ in queues}:
        await eventually(partial(admin.route, topic))
    for (topic, queue_id), records in queues.items():
        got = await java.pull_all(broker.nameserver, topic, queue_id)
        wanted = [(record.queue_offset, record.content) for record in records]
        assert [(one.queue_offset, one.body) for one in got][: len(wanted)] == wanted, (topic, queue_id)


async def _progress(broker: Broker, java: JavaClient, written: WrittenStore) -> None:
    for name, offsets in written.progress.items():
        topic, group = name.split("@")
        for queue_id, offset in offsets.items():
            assert await java.consumer_offset(broker.nameserver, group, topic, queue_id) == offset, name


async def _pending_levels(broker: Broker, java: JavaClient, written: WrittenStore, old: list[Record]) -> None:
    """Check that the messages that waited for a level are delivered once, and no others again."""
    (topic,) = {sent.topic for sent in written.of("level", "pending")}
    pending = {sent.unique_key for sent in written.of("level", "pending")}
    before = sum(record.topic == topic for record in old)
    admin = java.admin(broker.nameserver)

    async def stored() -> int:
        return sum(queue.max for queue in (await admin.topic_stats(topic)).values())

    await eventually(stored, lambda count: count >= before + len(pending), timeout=60, every=0.3)
    found: Counter[str] = Counter()
    for queue_id in await java.queues(broker.nameserver, topic):
        for one in await java.pull_all(broker.nameserver, topic, queue_id):
            found[one.properties["UNIQ_KEY"]] += 1
    assert sum(found.values()) == before + len(pending)
    assert {key for key, count in found.items() if count > 1} == set()
    assert pending <= set(found)


async def _pending_timers(broker: Broker, java: JavaClient, written: WrittenStore) -> None:
    """Check that the timers which were to come soon after the store was written come once, and no cancelled one."""
    (topic,) = {sent.topic for sent in written.of("timer")}
    last = max(sent.deliver_ms or 0 for sent in written.of("timer", "delivered")) + 60_000
    soon = {sent.unique_key for sent in written.of("timer", "pending") if (sent.deliver_ms or 0) <= last}
    assert len(soon) == 20
    found: Counter[str] = Counter()

    async def come() -> set[str]:
        found.clear()
        for queue_id in await java.queues(broker.nameserver, topic):
            found.update(one.properties["UNIQ_KEY"] for one in await java.pull_all(broker.nameserver, topic, queue_id))
        return soon & set(found)

    await eventually(come, lambda keys: keys == soon, timeout=90, every=0.5)
    await asyncio.sleep(2)  # a second copy of a message would follow
    await come()
    assert {key: count for key, count in found.items() if count > 1} == {}
    assert not {sent.unique_key for sent in written.of("timer", "cancelled")} & set(found)


async def _keys(broker: Broker, java: JavaClient, written: WrittenStore) -> None:
    """Check that messages are found by their keys, and by the client's ids."""
    admin = java.admin(broker.nameserver)
    with_keys = [sent for sent in written.of("plain") if sent.keys and sent.topic.startswith("plain")]
    for sent in with_keys[:: len(with_keys) // 4]:
        order, *customer = (sent.keys or "").split(" ")
        assert [one.body for one in await admin.query_by_key(sent.topic, order)] == [sent.body]
        for key in customer:  # which has more messages than one answer holds
            assert all(key in (one.keys or "") for one in await admin.query_by_key(sent.topic, key))
        assert (await admin.view(sent.topic, sent.unique_key)).body == sent.body
    for sent in written.of("level", "delivered")[:2]:
        assert (await admin.view(sent.topic, sent.unique_key)).body == sent.body


async def _next(broker: Broker, java: JavaClient, written: WrittenStore, old: list[Record]) -> None:
    """Check that new messages get the next queue offsets."""
    topic = _plain_topic(written)
    last = max(record.queue_offset for record in old if (record.topic, record.queue_id) == (topic, 0))
    async with await java.producer(broker.nameserver) as producer:
        (result,) = await producer.send(topic, [Outgoing(b"next")], queue_id=0)
    assert result.queue_offset == last + 1
    got = await java.pull_all(broker.nameserver, topic, 0, last + 1)
    assert [one.body for one in got] == [b"next"]


@pytest.mark.parametrize(("kind", "target"), sampled(product(WITH_TIMERS, WITH_TIMERS), KEEPS_TIMERS))
def test_timers_that_wait_come_once(peers: Peers, kind: Kind, target: Kind, tmp_path: Path) -> None:
    settings: dict[str, object] = {**PROPERTIES, "timerRollWindowSlot": 172_800}
    source = make_broker(kind, tmp_path / "broker", settings, store=tmp_path / "old")

    async def come() -> None:
        async with running(source):
            await _timers(source, await peers.client_for(source), target, settings, tmp_path)

    peers.run(come())


async def _timers(source: Broker, java: JavaClient, target: Kind, settings: dict[str, object], tmp_path: Path) -> None:
    topic = unique("timers")
    admin = java.admin(source.nameserver)
    await admin.create_topic(source.address, topic, 2)
    await eventually(partial(admin.route, topic))
    now = time.time_ns() // 1_000_000
    soon = {b"soon %d" % n: now + 3000 + n * 20 for n in range(60)}
    later = {b"later %d" % n: now + 15_000 + n * 100 for n in range(60)}
    messages = [Outgoing(body, properties={"TIMER_DELIVER_MS": str(at)}) for body, at in {**soon, **later}.items()]
    async with await java.producer(source.nameserver) as producer:
        results = await producer.send(topic, messages, "async")
        handles = [results[60 + n].recall_handle for n in (7, 31)]
        for handle in handles:
            assert handle is not None
            await producer.recall(topic, handle)

    async def stored(broker: Broker) -> int:
        found = await java.admin(broker.nameserver).topic_stats(topic)
        return sum(queue.max for queue in found.values())

    await eventually(partial(stored, source), lambda count: count >= 60, timeout=40)
    await source.stop()
    result = run(tmp_path / "old", tmp_path / "new")
    assert result.removed["delivered"] >= 55
    broker = make_broker(target, tmp_path / "next", settings, store=tmp_path / "new")
    async with running(broker):
        wanted = {*soon, *later} - {b"later 7", b"later 31"}
        await eventually(partial(stored, broker), lambda count: count >= len(wanted), timeout=90)
        await asyncio.sleep(2)  # a second copy of a message would follow
        found: Counter[bytes] = Counter()
        for queue_id in (0, 1):
            found.update(one.body for one in await java.pull_all(broker.nameserver, topic, queue_id))
        assert found == Counter(wanted)


@dataclasses.dataclass(frozen=True)
class KeyedStore:
    """A store of duemq's, and its keyed topic of 4000 messages in one queue."""

    path: Path
    topic: str


@pytest.fixture(scope="module")
def keyed(peers: Peers, tmp_path_factory: pytest.TempPathFactory) -> KeyedStore:
    topic, keys = unique("table"), 50
    directory = tmp_path_factory.mktemp("keyed")
    source = make_broker("duemq", directory / "source", PROPERTIES, store=directory / "store")

    async def write() -> None:
        async with running(source):
            java = await peers.client_for(source)
            await java.admin(source.nameserver).create_topic(source.address, topic, 1)
            await eventually(partial(java.admin(source.nameserver).route, topic))
            bodies = [b"%d " % number * 60 for number in range(4000)]
            # Some of the first keys do not occur again.
            messages = [
                Outgoing(body, keys=f"k{number % keys if number % 40 else number}")
                for number, body in enumerate(bodies)
            ]
            async with await java.producer(source.nameserver) as producer:
                await producer.send(topic, messages, "async")
            await source.stop()

    peers.run(write())
    return KeyedStore(source.store, topic)


@pytest.mark.parametrize("target", sampled(KINDS, ("duemq", "apache-5.3.3")))
def test_consumers_pass_over_the_holes_of_a_keyed_topic(
    keyed: KeyedStore, peers: Peers, target: Kind, tmp_path: Path
) -> None:
    topic = keyed.topic
    options = CompactOptions(range_size=4 << 20, keyed_topics=(topic,), holes=True)
    result = compact(str(keyed.path), str(tmp_path / "new"), workers=1, options=options)
    assert result.removed["superseded"] > 3000
    assert result.holes > 3000
    kept = [record for record in oracle.contents(tmp_path / "new").records if record.topic == topic]
    sent = [record for record in oracle.contents(keyed.path).records if record.topic == topic]
    newest = {record.properties["KEYS"]: record.body for record in sent}
    stay = {record.body for record in kept}
    assert stay >= set(newest.values())
    broker = make_broker(target, tmp_path / "broker", PROPERTIES, store=tmp_path / "new")

    async def consume() -> None:
        async with running(broker):
            java = await peers.client_for(broker)
            await eventually(partial(java.admin(broker.nameserver).route, topic))
            stats = await java.admin(broker.nameserver).topic_stats(topic)
            assert [(queue.min, queue.max) for queue in stats.values()] == [(kept[0].queue_offset, 4000)]
            got = await java.pull_all(broker.nameserver, topic, 0)
            assert [(one.queue_offset, one.body) for one in got] == [(one.queue_offset, one.body) for one in kept]
            # From the middle of a hole on as well.
            got = await java.pull_all(broker.nameserver, topic, 0, 2003)
            assert [one.body for one in got] == [one.body for one in kept if one.queue_offset >= 2003]
            async with await java.consumer(broker.nameserver, unique("group"), topic) as consumer:
                received = await consumer.receive_bodies(sorted(stay))
            assert Counter(one.body for one in received) == Counter(stay)

    peers.run(consume())
