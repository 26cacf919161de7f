"""The stores contain the messages that they should, by the oracle: the tests of the jobs rely on them."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path

import pytest

from tests.spark.world import audit, oracle
from tests.spark.world.load import LEVEL_MS, Sent
from tests.spark.world.oracle import HALF_TOPIC, OP_TOPIC, SCHEDULE_TOPIC, TIMER_TOPIC, Contents, Record
from tests.spark.world.stores import SEGMENT, WrittenStore

# RocketMQ checks levels every 100 ms, and delivers timers at the next whole second; the rest is for a busy machine.
LATE_MS = 30_000


def read(store: WrittenStore) -> Contents:
    contents = oracle.contents(store.path)
    assert contents.damages == []
    return contents


def of_topic(contents: Contents, topic: str) -> list[Record]:
    return [record for record in contents.records if record.topic == topic]


def is_same(record: Record, sent: Sent) -> bool:
    """Whether a record has all fields of the sent message."""
    found = record.properties
    return (
        record.content == sent.body
        and (not sent.unique_key or f"UNIQ_KEY\x01{sent.unique_key}".encode() in record.properties_text)
        and found.get("TAGS") == sent.tags
        and found.get("KEYS") == sent.keys
        and set(sent.properties) <= set(found.items())
    )


def test_there_are_several_files_of_each_kind(written: WrittenStore) -> None:
    contents = read(written)
    assert contents.end_markers >= 2
    assert contents.end > 2 * SEGMENT
    assert max(len(list(path.iterdir())) for path in (written.path / "consumequeue").glob("*/*")) >= 2
    assert {path.stat().st_size for path in (written.path / "commitlog").iterdir()} == {SEGMENT}
    if written.kind != "duemq":
        assert [path.stat().st_size for path in (written.path / "index").iterdir()] == [420_000_040]
    assert not (written.path / "abort").exists()


def test_records_are_of_the_time_of_the_run(written: WrittenStore) -> None:
    records = read(written).records
    assert written.begun_ms <= records[0].store_ms
    assert records[-1].store_ms <= written.ended_ms
    assert all(earlier.store_ms <= later.store_ms for earlier, later in itertools.pairwise(records))


def test_every_message_is_there_as_it_was_sent(written: WrittenStore) -> None:
    contents = read(written)
    at = {record.physical_offset: record for record in contents.records}
    waiting = {"plain": None, "level": SCHEDULE_TOPIC, "timer": TIMER_TOPIC}
    for sent in written.sent:
        if sent.physical_offset is not None:
            record = at[sent.physical_offset]
            assert is_same(record, sent), (record, sent)
            assert record.topic == (waiting[sent.kind] or sent.topic)
            if sent.kind == "level":
                assert record.queue_id == sent.level - 1
    assert Counter(record.sys_flag & oracle.COMPRESSED for record in contents.records)[oracle.COMPRESSED] >= 90


def test_consume_queues_index_the_commitlog(written: WrittenStore) -> None:
    contents = read(written)
    at = {record.physical_offset: record for record in contents.records}
    expected = Counter((one.topic, one.queue_id) for one in contents.records if one.sys_flag & oracle.TRANSACTION != 12)
    expected = Counter({queue: count for queue, count in expected.items() if count})
    found: Counter[tuple[str, int]] = Counter()
    for topic, queue_id in oracle.queues(written.path):
        units = oracle.consume_queue(written.path, topic, queue_id)
        assert [unit.queue_offset for unit in units] == list(range(len(units)))
        found[topic, queue_id] = len(units)
        for unit in units:
            record = at[unit.physical_offset]
            assert (record.topic, record.queue_id, record.queue_offset) == (topic, queue_id, unit.queue_offset)
            assert unit.size in (record.size, 1)
            if topic == SCHEDULE_TOPIC:
                assert unit.tags_code == record.store_ms + LEVEL_MS[queue_id]
            elif topic != TIMER_TOPIC:
                assert unit.tags_code == oracle.java_hash(record.properties.get("TAGS", ""))
    assert +found == expected


def test_scheduled_messages_have_the_outcome_that_was_meant(written: WrittenStore) -> None:
    result = audit.audit(written.path)
    assert len(result.scheduled) == written.scheduled == result.totals.total()
    assert result.orphans == []
    for sent in (*written.of("level"), *written.of("timer")):
        (message,) = [one for one in result.by_key(sent.unique_key) if one.real_topic == sent.topic]
        assert message.verdict == sent.outcome, (message, sent)
        assert message.level == sent.level
        assert message.due_ms is not None
        if sent.deliver_ms is not None:
            assert message.due_ms == sent.deliver_ms
        if sent.delay_ms is not None:
            assert message.due_ms == message.origin.store_ms + sent.delay_ms
        if message.verdict == "delivered":
            assert is_same(message.deliveries[0], sent)
    lateness = [message.late_ms for message in result.of("delivered")]
    assert all(late is not None and 0 <= late < LATE_MS for late in lateness)


def test_what_is_rolled_is_understood(written: WrittenStore) -> None:
    if written.kind == "apache-4.9.7":
        pytest.skip("timers came with 5.0")
    result = audit.audit(written.path)
    rolled = [message for message in result.scheduled if message.last is not message.origin]
    assert {"pending", "delivered"} <= {message.verdict for message in rolled}
    assert all(message.due_ms is not None for message in rolled)


def test_retries_go_through_the_levels_and_some_end_as_dead_letters(written: WrittenStore) -> None:
    contents = read(written)
    result = audit.audit(written.path, contents)
    for retry in written.retried:
        target = f"%RETRY%{retry.group}"
        attempts = [one for one in result.by_key(retry.unique_key) if one.real_topic == target]
        assert [one.verdict for one in attempts] == ["delivered"] * retry.attempts
        assert [one.level for one in attempts] == list(range(3, 3 + retry.attempts))
        dead = [one for one in of_topic(contents, f"%DLQ%{retry.group}") if one.unique_key == retry.unique_key]
        assert len(dead) == retry.is_dead
    assert {retry.is_dead for retry in written.retried} == {False, True}


def test_transactions_end_as_they_were_ended(written: WrittenStore) -> None:
    halves = {record.unique_key: record for record in of_topic(read(written), HALF_TOPIC)}
    if written.kind == "duemq":
        assert halves == {}
        return
    bodies = [record.body for record in of_topic(read(written), OP_TOPIC)]
    ended = {int(number) for body in bodies for number in body.rstrip(b",").split(b",")}
    for sent in written.of("half"):
        half = halves[sent.unique_key]
        assert is_same(half, sent)
        committed = [record for record in of_topic(read(written), sent.topic) if record.unique_key == sent.unique_key]
        assert [record.prepared_offset for record in committed] == [half.physical_offset] * (
            sent.outcome == "committed"
        )
        assert (half.queue_offset in ended) == (sent.outcome != "open")
    assert {sent.outcome for sent in written.of("half")} == {"committed", "rolled back", "open"}


def test_offsets_are_those_of_the_groups(written: WrittenStore) -> None:
    offsets = oracle.consumer_offsets(written.path)
    assert {name: offsets[name] for name in written.progress} == written.progress
    (midway,) = [name for name in written.progress if "midway" in name]
    topic = midway.split("@")[0]
    assert 0 < sum(written.progress[midway].values()) < len(of_topic(read(written), topic))
    delivered = Counter(one.level for one in audit.audit(written.path).of("delivered"))
    for level, offset in oracle.delay_offsets(written.path).items():
        assert offset == delivered[level] or written.kind == "duemq"


def test_timer_logs_name_what_waits(written: WrittenStore) -> None:
    if written.kind == "apache-4.9.7":
        assert oracle.timer_units(written.path) == []
        return
    contents = read(written)
    at = {record.physical_offset: record for record in contents.records}
    units = oracle.timer_units(written.path)
    assert {at[unit.physical_offset].topic for unit in units} == {TIMER_TOPIC}
    assert all(unit.record_size == at[unit.physical_offset].size for unit in units)
    for unit in units:
        if unit.last_field != -1:  # duemq's, for no message
            assert unit.topic_hash == oracle.java_hash(at[unit.physical_offset].properties["REAL_TOPIC"])
    waiting = {one.last.physical_offset for one in audit.audit(written.path, contents).of("pending") if not one.level}
    assert waiting <= {unit.physical_offset for unit in units}
    assert any(unit.magic & 2 for unit in units)
    due = {one.last.physical_offset: one.due_ms for one in audit.audit(written.path, contents).scheduled}
    for unit in units:
        if unit.due_ms:
            assert unit.due_ms == due.get(unit.physical_offset, unit.due_ms)
    assert any(unit.due_ms for unit in units) == (written.kind == "duemq")


def test_a_killed_broker_leaves_what_it_had_acknowledged(killed: WrittenStore) -> None:
    assert (killed.path / "abort").exists()
    contents = oracle.contents(killed.path)
    # The record that was being copied into the file when the broker ended may be torn; it was never acknowledged.
    assert [damage for damage in contents.damages if damage.physical_offset + damage.size != contents.end] == []
    at = {record.physical_offset: record for record in contents.records}
    assert all(is_same(at[sent.physical_offset], sent) for sent in killed.sent if sent.physical_offset is not None)
    result = audit.audit(killed.path, contents)
    assert len(result.scheduled) == killed.scheduled
    for sent in (*killed.of("level"), *killed.of("timer")):
        (message,) = [one for one in result.by_key(sent.unique_key) if one.real_topic == sent.topic]
        may = ("delivered", "pending") if sent.outcome == "either" else (sent.outcome,)
        assert message.verdict in may, (message, sent)
    assert "delivered" in {result.by_key(sent.unique_key)[0].verdict for sent in killed.of("level", "either")}


def test_the_oracle_shares_no_code_with_what_it_judges() -> None:
    for name in ("oracle.py", "audit.py", "faults.py"):
        text = (Path(__file__).parent / "world" / name).read_text()
        for package in ("spark_jobs", "storage", "protocol", "scheduler", "numpy"):
            assert f"import {package}" not in text
            assert f"from {package}" not in text
