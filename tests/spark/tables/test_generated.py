"""The generated stores of the benchmarks are valid: the oracle finds in them the figures of their generator, and
brokers go on with them."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from tests.bench.spark import stores as spark_stores
from tests.bench.spark.stores import GROUPS, TOPICS, Generated
from tests.interop.environment import make_broker
from tests.interop.support import eventually
from tests.soak import sampled
from tests.spark.world import audit, oracle
from tests.spark.world.audit import Audit
from tests.spark.world.oracle import SCHEDULE_TOPIC, TIMER_TOPIC, Contents
from tests.spark.world.peers import Peers
from tests.spark.world.stores import copy_store

SEGMENT = 4 << 20
GIGABYTES = 0.025
SENDS = 1000
AGO = 6
"""Ticks of 10 s for which no broker has delivered what is due."""
TOPIC, QUEUE = "reminders_of_customers", 3


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> Generated:
    path = tmp_path_factory.mktemp("generated") / "store"
    return spark_stores.write(path, GIGABYTES, segment=SEGMENT, sends=SENDS, ticks_ago=AGO)


@pytest.fixture(scope="module")
def contents(generated: Generated) -> Contents:
    return oracle.contents(generated.path)


@pytest.fixture(scope="module")
def judged(generated: Generated, contents: Contents) -> Audit:
    return audit.audit(generated.path, contents)


def test_records_are_what_was_counted(generated: Generated, contents: Contents) -> None:
    assert contents.damages == []
    assert contents.end == generated.size
    assert contents.end_markers == generated.size // SEGMENT >= 5
    assert len(contents.records) == generated.records
    assert generated.records == generated.plain + generated.scheduled + generated.delivered
    times = [record.store_ms for record in contents.records]
    assert times == sorted(times)
    assert generated.begun_ms <= times[0] <= times[-1] < generated.ended_ms
    assert len({record.unique_key for record in contents.records}) == generated.plain + generated.scheduled


def test_consume_queues_fit(generated: Generated, contents: Contents) -> None:
    records = {record.physical_offset: record for record in contents.records}
    count = 0
    for topic, queue_id in oracle.queues(generated.path):
        units = oracle.consume_queue(generated.path, topic, queue_id)
        assert len(units) == generated.offsets[f"{topic}@{queue_id}"]
        count += len(units)
        for number, unit in enumerate(units):
            record = records[unit.physical_offset]
            assert (record.topic, record.queue_id, record.queue_offset, record.size) == (
                topic,
                queue_id,
                number,
                unit.size,
            )
            if topic in (SCHEDULE_TOPIC, TIMER_TOPIC):
                assert unit.tags_code == record.prepared_offset
            else:
                assert unit.tags_code == oracle.java_hash(record.properties["TAGS"])
    assert count == generated.records


def test_scheduled_messages_are_delivered_once_or_wait(generated: Generated, judged: Audit) -> None:
    assert judged.totals == {"delivered": generated.delivered, "pending": generated.pending}
    assert generated.delivered > 0 < generated.pending
    late = [message.late_ms for message in judged.of("delivered")]
    assert all(ms is not None and 0 <= ms < 1000 for ms in late)
    assert sum(ms for ms in late if ms is not None) == generated.late_ms
    assert all(message.due_ms is not None and message.due_ms >= generated.ended_ms for message in judged.of("pending"))


def test_timers_are_linked(generated: Generated, contents: Contents) -> None:
    units = {unit.position: unit for unit in oracle.timer_units(generated.path)}
    assert len(units) == generated.timers
    records = {record.physical_offset: record for record in contents.records}
    for unit in units.values():
        record = records[unit.physical_offset]
        assert unit.due_ms == record.prepared_offset == int(record.properties["TIMER_DELIVER_MS"])
        if not unit.magic & 2:
            assert unit.write_ms + unit.delay_ms == int(record.properties["TIMER_OUT_MS"])
        if unit.previous != -1:
            before = units[unit.previous]
            assert before.position < unit.position
            assert before.write_ms + before.delay_ms == unit.write_ms + unit.delay_ms


def test_offsets_and_topics_are_there(generated: Generated) -> None:
    offsets = oracle.consumer_offsets(generated.path)
    assert set(offsets) == {f"{topic}@{group}" for topic in TOPICS for group in GROUPS}
    assert offsets[f"orders@{GROUPS[0]}"] == {queue: generated.offsets[f"orders@{queue}"] for queue in range(4)}
    table = oracle.read_json(generated.path / "config" / "topics.json")["topicConfigTable"]
    assert set(TOPICS) <= set(table)


@pytest.mark.interop
@pytest.mark.parametrize("kind", sampled(["duemq", "apache-4.9.7"], ["duemq"]))
def test_brokers_go_on_with_it(
    generated: Generated, contents: Contents, judged: Audit, peers: Peers, kind: str, tmp_path: Path
) -> None:
    store = copy_store(generated.path, tmp_path / "store")
    now = time.time_ns() // 1_000_000
    # Messages that have become due since the store's time ended: 4.9.7 knows no timers.
    known = [one for one in judged.of("pending") if one.level or kind == "duemq"]
    due = {one.origin.physical_offset for one in known if one.due_ms is not None and one.due_ms <= now}
    assert len(due) > 1000
    count = sum(end for name, end in generated.offsets.items() if name.split("@")[0] in TOPICS)

    async def serve() -> None:
        settings = {"mappedFileSizeCommitLog": SEGMENT, "maxMessageSize": SEGMENT // 4}
        broker = make_broker(kind, tmp_path / "broker", settings, store=store)
        java, _ = await asyncio.gather(peers.client_for(broker), broker.start())
        try:
            admin = java.admin(broker.nameserver)

            async def stored() -> int:
                stats = [await admin.topic_stats(topic) for topic in TOPICS]
                return sum(queue.max for topic in stats for queue in topic.values())

            await eventually(stored, lambda found: found >= count + len(due), timeout=60)
            end = generated.offsets[f"{TOPIC}@{QUEUE}"]
            pulled = (await java.pull_all(broker.nameserver, TOPIC, QUEUE))[:end]
            records = [one for one in contents.records if (one.topic, one.queue_id) == (TOPIC, QUEUE)]
            assert [message.body for message in pulled] == [record.body for record in records]
            assert await java.consumer_offset(broker.nameserver, GROUPS[-1], TOPIC, QUEUE) == end // 2
        finally:
            await broker.stop()

    peers.run(serve())
    grown = oracle.contents(store)
    assert grown.damages == []
    assert grown.records[: len(contents.records)] == contents.records
    after = audit.audit(store, grown)
    assert len(after.scheduled) == len(judged.scheduled)
    assert {"twice", "lost"} & set(after.totals) == set()
    delivered = {one.origin.physical_offset for one in after.of("delivered")}
    assert delivered >= due | {one.origin.physical_offset for one in judged.of("delivered")}
