"""Every table agrees with the plain reader of tests/spark/world/oracle.py over the same files."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import DataSourceReader
from pyspark.sql.types import LongType, StructField, StructType

from duemq.spark_jobs.audit import audit as job
from duemq.spark_jobs.errors import JobError
from duemq.spark_jobs.source import source
from duemq.spark_jobs.source.source import RangePart, RocketmqSource, StorePart, StoreReader
from duemq.spark_jobs.source.tables import COLUMNS, NOT_BY_DEFAULT, STORE
from duemq.spark_jobs.writers.tasks import SharedDirectory, SparkTasks
from tests.spark.world import audit, faults, oracle
from tests.spark.world.oracle import HALF_TOPIC, OP_TOPIC, SCHEDULE_TOPIC, TIMER_TOPIC, Record
from tests.spark.world.stores import SEGMENT, WrittenStore
from tests.unit.spark_jobs.test_spark_errors import spoil, write
from tests.unit.spark_jobs.writers.simple_tasks import die

Row = dict[str, Any]
RANGE = str(4 << 20)
MESSAGES = [name for name in COLUMNS["messages"] if not name.endswith("_time") and name != STORE]
SCHEDULES = [name for name in COLUMNS["schedules"] if not name.endswith("_time") and name != STORE]


def table(spark: SparkSession, path: Path | str, name: str = "messages", **options: str) -> DataFrame:
    reader = spark.read.format("rocketmq").option("table", name).option("rangeBytes", RANGE)
    return reader.options(**options).load(str(path))


def rows(frame: DataFrame) -> list[Row]:
    return frame.toArrow().to_pylist()  # type: ignore[no-any-return]


def offsets(frame: DataFrame) -> list[int]:
    return sorted(row["physical_offset"] for row in rows(frame.select("physical_offset")))


def host_of(data: bytes) -> str:
    address, port = ipaddress.ip_address(data[:-4]), int.from_bytes(data[-4:], "big")
    return f"[{address}]:{port}" if address.version == 6 else f"{address}:{port}"


def message_row(record: Record, deliveries: dict[int, int]) -> Row:
    """Return the row of `messages`. `deliveries`: physical offsets of the deliveries, each with that of its origin."""
    found = record.properties
    roles = {SCHEDULE_TOPIC: "level", TIMER_TOPIC: "timer", HALF_TOPIC: "half", OP_TOPIC: "half_end"}
    role = roles.get(record.topic, "delivery" if record.physical_offset in deliveries else "message")
    role = "cancel" if role == "timer" and "TIMER_DEL_UNIQKEY" in found else role
    waits = role in ("level", "timer", "cancel", "half")
    names_origin = role in ("delivery", "cancel") or (role == "timer" and "TIMER_ROLL_TIMES" in found)
    prepared = record.prepared_offset
    return {
        "physical_offset": record.physical_offset,
        "size": record.size,
        "topic": record.topic,
        "queue_id": record.queue_id,
        "queue_offset": record.queue_offset,
        "store_ms": record.store_ms,
        "born_ms": record.born_ms,
        "role": role,
        "real_topic": found.get("REAL_TOPIC", record.topic) if waits else record.topic,
        "real_queue_id": int(found.get("REAL_QID", record.queue_id)) if waits else record.queue_id,
        "origin": {0: None, -1: 0}.get(prepared, prepared) if names_origin else None,
        "delay_level": record.queue_id + 1 if role == "level" else 0,
        "unique_key": record.unique_key,
        "keys": found.get("KEYS"),
        "tags": found.get("TAGS"),
        "reconsume_times": record.reconsume_times,
        "flag": record.flag,
        "sys_flag": record.sys_flag,
        "prepared_offset": prepared,
        "born_host": host_of(record.born_host),
        "store_host": host_of(record.store_host),
        "body_size": len(record.body),
        "body_crc": record.body_crc,
        "properties": found,
        "body": record.body,
    }


def test_messages(spark: SparkSession, written: WrittenStore) -> None:
    contents = oracle.contents(written.path)
    result = audit.audit(written.path, contents)
    deliveries = {d.physical_offset: m.last.physical_offset for m in result.scheduled for d in m.deliveries}
    found = rows(table(spark, written.path, columns=",".join(MESSAGES)))
    for row in found:
        row["properties"] = dict(row["properties"])
    found.sort(key=lambda row: int(row["physical_offset"]))
    expected = [message_row(record, deliveries) for record in contents.records]
    assert len(found) == len(expected)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine == theirs


def test_times_are_those_of_the_ms(spark: SparkSession, duemq_store: WrittenStore) -> None:
    for name, times in (("messages", ("store", "born")), ("schedules", ("store", "due"))):
        wrong = " or ".join(f"{time}_ms != unix_millis({time}_time)" for time in times)
        assert table(spark, duemq_store.path, name).where(wrong).count() == 0


def test_schedules_and_pending(spark: SparkSession, written: WrittenStore) -> None:
    contents = oracle.contents(written.path)
    result = audit.audit(written.path, contents)
    due = {message.last.physical_offset: message.due_ms for message in result.scheduled}
    waiting = [r for r in contents.records if r.topic in (SCHEDULE_TOPIC, TIMER_TOPIC)]
    waiting = [r for r in waiting if "TIMER_DEL_UNIQKEY" not in r.properties]
    found = {row["physical_offset"]: row for row in rows(table(spark, written.path, "schedules", columns="*"))}
    assert sorted(found) == [record.physical_offset for record in waiting]
    for record in waiting:
        row = found[record.physical_offset]
        assert row["due_ms"] == due.get(record.physical_offset, row["due_ms"])
        assert row["real_topic"] == record.properties["REAL_TOPIC"]
        assert row["real_queue_id"] == int(record.properties["REAL_QID"])
        assert row["kind"] == ("level" if record.topic == SCHEDULE_TOPIC else "timer")
        assert row["is_again"] == ("TIMER_ROLL_TIMES" in record.properties)
        assert (row["unique_key"], row["body"]) == (record.unique_key, record.body)
    pending = rows(table(spark, written.path, "pending"))
    expected = {message.last.physical_offset: message for message in result.of("pending")}
    assert {row["physical_offset"]: row["due_ms"] for row in pending} == {at: m.due_ms for at, m in expected.items()}
    assert len(pending) == len(expected) == result.totals["pending"]
    assert {row["physical_offset"]: row["unique_key"] for row in pending} == {
        at: message.unique_key for at, message in expected.items()
    }


def test_what_is_pending_after_a_kill(spark: SparkSession, killed: WrittenStore) -> None:
    expected = {m.last.physical_offset for m in audit.audit(killed.path).of("pending")}
    found = offsets(table(spark, killed.path, "pending"))
    # RocketMQ saves its progress from time to time: started again it would deliver some messages once more.
    assert expected <= set(found)
    if killed.kind == "duemq":
        assert found == sorted(expected)


def test_consume_queues(spark: SparkSession, written: WrittenStore) -> None:
    found = {
        (row["topic"], row["queue_id"], row["queue_offset"]): (row["physical_offset"], row["size"], row["tags_code"])
        for row in rows(table(spark, written.path, "consume_queue"))
    }
    expected = {
        (topic, queue_id, unit.queue_offset): (unit.physical_offset, unit.size, unit.tags_code)
        for topic, queue_id in oracle.queues(written.path)
        for unit in oracle.consume_queue(written.path, topic, queue_id)
    }
    assert found == expected


def test_timers(spark: SparkSession, written: WrittenStore) -> None:
    found = sorted(rows(table(spark, written.path, "timers", columns="*")), key=lambda row: int(row["position"]))
    units = oracle.timer_units(written.path)
    assert [row["position"] for row in found] == [unit.position for unit in units]
    for row, unit in zip(found, units, strict=True):
        assert row["due_ms"] == unit.due_ms
        assert row["slot_ms"] == (unit.write_ms + unit.delay_ms) // 1000 * 1000
        assert (row["previous"], row["magic"], row["write_ms"]) == (unit.previous, unit.magic, unit.write_ms)
        assert (row["physical_offset"], row["record_size"]) == (unit.physical_offset, unit.record_size)
        assert row["topic_hash"] == unit.topic_hash
        is_delete = bool(unit.magic & 4) and (unit.last_field == -1 or (unit.last_field == 0 and not unit.magic & 8))
        assert (row["is_rolled"], row["is_delete"]) == (bool(unit.magic & 2), is_delete)
    assert bool(units) == (written.kind != "apache-4.9.7")


def test_offsets(spark: SparkSession, written: WrittenStore) -> None:
    found = rows(table(spark, written.path, "offsets"))
    ends = {
        queue: len(oracle.consume_queue(written.path, *queue)) for queue in oracle.queues(written.path)
    }  # no record has expired: they begin with 0
    groups = {
        (f"{row['topic']}@{row['consumer_group']}", row["queue_id"]): row for row in found if row["kind"] == "consumer"
    }
    expected = oracle.consumer_offsets(written.path)
    assert {key: row["next_offset"] for key, row in groups.items()} == {
        (name, queue): offset for name, queues in expected.items() for queue, offset in queues.items()
    }
    for (name, queue), row in groups.items():
        end = ends.get((name.split("@")[0], queue))
        assert row["max_offset"] == end
        assert row["lag"] == (None if end is None else end - row["next_offset"])
    levels = {row["queue_id"] + 1: row["next_offset"] for row in found if row["kind"] == "delay_level"}
    assert levels == oracle.delay_offsets(written.path)


# --- options that choose records


def test_a_reader_takes_no_note_of_filters() -> None:
    """The reader does not accept pushed filters, since Spark 4 keeps one reader for all queries of a DataFrame."""
    assert StoreReader.pushFilters is DataSourceReader.pushFilters


def test_options_choose_records(spark: SparkSession, duemq_store: WrittenStore) -> None:
    path = duemq_store.path
    contents = oracle.contents(path)
    middle = contents.records[len(contents.records) // 2]
    topics = sorted({record.topic for record in contents.records})

    def found(**options: str) -> list[int]:
        return offsets(table(spark, path, columns="physical_offset", **options))

    assert found(topics=topics[3]) == [r.physical_offset for r in contents.records if r.topic == topics[3]]
    assert found(topics=f" {topics[0]}, {topics[1]},no such topic") == [
        r.physical_offset for r in contents.records if r.topic in topics[:2]
    ]
    assert found(topics="no such topic") == []
    assert found(startingTimestamp=str(middle.store_ms)) == [
        r.physical_offset for r in contents.records if r.store_ms >= middle.store_ms
    ]
    assert found(endingTimestamp=str(middle.store_ms), startingTimestamp=str(middle.store_ms - 500)) == [
        r.physical_offset for r in contents.records if middle.store_ms - 500 <= r.store_ms < middle.store_ms
    ]
    at = middle.physical_offset
    assert found(endingOffset=str(at)) == [r.physical_offset for r in contents.records if r.physical_offset < at]
    assert found(startingOffset=str(at)) == [r.physical_offset for r in contents.records if r.physical_offset >= at]
    assert found(startingOffset="earliest", endingOffset="latest") == [r.physical_offset for r in contents.records]


def test_options_choose_what_waits_by_its_real_topic(spark: SparkSession, duemq_store: WrittenStore) -> None:
    contents = oracle.contents(duemq_store.path)
    waiting = [r for r in contents.records if r.topic in (SCHEDULE_TOPIC, TIMER_TOPIC)]
    waiting = [r for r in waiting if "TIMER_DEL_UNIQKEY" not in r.properties]
    for topic in sorted({record.properties["REAL_TOPIC"] for record in waiting}):
        of_it = [r.physical_offset for r in waiting if r.properties["REAL_TOPIC"] == topic]
        assert offsets(table(spark, duemq_store.path, "schedules", topics=topic)) == of_it
        pending = {m.last.physical_offset for m in audit.audit(duemq_store.path).of("pending")}
        assert offsets(table(spark, duemq_store.path, "pending", topics=topic)) == sorted(pending & set(of_it))
    topic, queue_id = next(iter(oracle.queues(duemq_store.path)))
    of_queue = {row["topic"] for row in rows(table(spark, duemq_store.path, "consume_queue", topics=topic))}
    assert of_queue == {topic}, queue_id


def reader_of(path: Path, **options: str) -> StoreReader:
    made = RocketmqSource({"path": str(path), "rangeBytes": RANGE, **options})
    reader = made.reader(StructType([StructField("physical_offset", LongType())]))
    assert isinstance(reader, StoreReader)
    return reader


def ranges_of(path: Path, **options: str) -> list[tuple[int, int]]:
    parts = reader_of(path, **options).partitions()
    inner = [part.part for part in parts if isinstance(part, StorePart)]
    return [(part.part.start, part.part.end) for part in inner if isinstance(part, RangePart)]


def test_options_leave_out_ranges(written: WrittenStore) -> None:
    """Offset and time options leave out ranges; each file of the commitlog is a range here."""
    contents = oracle.contents(written.path)
    path, everything = written.path, ranges_of(written.path)
    assert [start for start, _ in everything] == list(range(0, contents.end, SEGMENT))
    assert ranges_of(path, endingOffset=str(SEGMENT)) == everything[:1]
    assert ranges_of(path, startingOffset=str(SEGMENT)) == everything[1:]
    assert ranges_of(path, startingOffset=str(everything[-1][1])) == []
    # All of the store was written within the time by which a clock may have been set back.
    first, first_of_last = (
        next(r.store_ms for r in contents.records if r.physical_offset >= everything[at][0]) for at in (0, -1)
    )
    late = {"startingTimestamp": str(first_of_last + 1)}
    assert ranges_of(path, **late) == everything
    assert ranges_of(path, **late, timeSlackMs="0") == everything[-1:]
    assert ranges_of(path, endingTimestamp=str(first), timeSlackMs="0") == []
    assert ranges_of(path, endingTimestamp=str(first + 1), timeSlackMs="0") == everything[:1]
    for topic in sorted({record.topic for record in contents.records}):
        starts = sorted({r.physical_offset // SEGMENT * SEGMENT for r in contents.records if r.topic == topic})
        assert [start for start, _ in ranges_of(path, topics=topic)] == starts, topic
    # For a topic without a consume queue the ranges are unknown, so none is left out.
    assert ranges_of(path, topics="no such topic") == everything


def test_topics_leave_out_no_range_where_consume_queues_may_lack_units(killed: WrittenStore) -> None:
    contents = oracle.contents(killed.path)
    for topic in sorted({record.topic for record in contents.records}):
        starts = {r.physical_offset // SEGMENT * SEGMENT for r in contents.records if r.topic == topic}
        assert starts <= {start for start, _ in ranges_of(killed.path, topics=topic)}, topic


# --- columns and options


def test_columns_are_chosen(spark: SparkSession, duemq_store: WrittenStore) -> None:
    path = duemq_store.path
    for name, known in COLUMNS.items():
        assert table(spark, path, name).columns == [column for column in known if column not in NOT_BY_DEFAULT]
        assert table(spark, path, name, columns="*").columns == list(known)
    assert table(spark, path, columns="body, topic,body").columns == ["body", "topic"]
    frame = spark.read.format("rocketmq").schema("body binary, queue_id int").load(str(path))
    assert frame.columns == ["body", "queue_id"]
    bodies = sorted(bytes(row["body"]) for row in rows(frame))
    assert bodies == sorted(record.body for record in oracle.contents(path).records)
    assert table(spark, path).count() == len(bodies)


def test_several_stores_are_one_table(
    spark: SparkSession, duemq_store: WrittenStore, apache_497_store: WrittenStore, tmp_path: Path
) -> None:
    """A pattern or a list of stores gives one table; a column names the store of each row."""
    (tmp_path / "broker-a").symlink_to(duemq_store.path)
    (tmp_path / "broker-b").symlink_to(apache_497_store.path)
    stores = {f"{tmp_path}/{name}": oracle.contents(tmp_path / name).records for name in ("broker-a", "broker-b")}
    expected = sorted((path, record.physical_offset) for path, records in stores.items() for record in records)
    reader = spark.read.format("rocketmq").option("columns", "physical_offset,store")
    for frame in (reader.load(f"{tmp_path}/broker-*"), reader.load(list(stores)), reader.load([*stores, *stores])):
        assert sorted((row["store"], row["physical_offset"]) for row in rows(frame)) == expected
    for name in COLUMNS:
        both = table(spark, f"{tmp_path}/broker-*", name)
        counted = {row["store"]: row["count"] for row in rows(both.groupBy("store").count())}
        alone = {path: table(spark, path, name).count() for path in stores}
        assert counted == {path: count for path, count in alone.items() if count}, name
        only_store = table(spark, f"{tmp_path}/broker-*", name, columns="store")
        assert sum(alone.values()) == only_store.count() == len(rows(only_store)), name


def test_a_list_with_what_is_no_store_is_refused(spark: SparkSession, duemq_store: WrittenStore) -> None:
    with pytest.raises(PySparkException, match="nowhere: there is no such directory"):
        spark.read.format("rocketmq").load([str(duemq_store.path), "nowhere"]).count()
    with pytest.raises(PySparkException, match=r"nowhere\*: there is no such directory"):
        spark.read.format("rocketmq").load("nowhere*").count()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"table": "message"}, "there is no table 'message'; there are messages, schedules"),
        ({"columns": "topic,boddy"}, "the table messages has no column 'boddy'; it has physical_offset, size"),
        ({"rangeBytes": "128m"}, "the option rangeBytes=128m is not a number"),
        ({"rangeBytes": "4096"}, "a range of 4096 bytes is too small; at least 4194304"),
        ({"checkCrc": "yes"}, "the option checkCrc=yes is neither true nor false"),
        ({"table": "pending", "delayLevels": "1s 2x"}, "the option delayLevels: "),
        ({"colums": "topic"}, "there is no option colums; there are path, table, columns"),
        ({"topics": ", "}, "the option topics is empty"),
        ({"startingTimestamp": "yesterday"}, "the option startingTimestamp=yesterday is not a number"),
        ({"endingOffset": "last"}, "the option endingOffset=last is neither latest nor a number"),
        ({"startingOffset": "latest"}, "the option startingOffset=latest is for streams"),
        ({"table": "timers", "topics": "orders"}, "the table timers has no option topics; messages, schedules"),
    ],
    ids=lambda value: next(iter(value.values())) if isinstance(value, dict) else "",
)
def test_a_wrong_option_is_told(
    spark: SparkSession, duemq_store: WrittenStore, options: dict[str, str], told: str
) -> None:
    with pytest.raises(PySparkException) as caught:
        spark.read.format("rocketmq").options(**options).load(str(duemq_store.path)).count()
    assert told in str(caught.value)


@pytest.mark.parametrize(
    ("schema", "told"),
    [
        ("topic binary", "the column topic of messages is string, not binary"),
        ("subject string", "the table messages has no column 'subject'"),
    ],
)
def test_a_wrong_schema_is_told(spark: SparkSession, duemq_store: WrittenStore, schema: str, told: str) -> None:
    with pytest.raises(PySparkException) as caught:
        spark.read.format("rocketmq").schema(schema).load(str(duemq_store.path)).count()
    assert told in str(caught.value)


def test_what_is_no_store_is_told(spark: SparkSession, tmp_path: Path) -> None:
    with pytest.raises(PySparkException) as caught:
        table(spark, tmp_path / "nowhere").count()
    assert "there is no such directory" in str(caught.value)
    with pytest.raises(JobError, match="no store is given"):
        source.Options({})


# --- damage


def test_damage_is_told_and_other_rows_stay(spark: SparkSession, writable: WrittenStore) -> None:
    """The table of damage lists a flipped byte, a stretch of zeros and a torn tail in one store, and all other rows
    stay."""
    path, before = writable.path, oracle.contents(writable.path)
    assert rows(table(spark, path, "damaged")) == []
    victims = [record for record in before.records if len(record.body) > 900 and record.physical_offset < SEGMENT]
    stretch = next(faults.stretches(before.records[len(before.records) // 3 :], 10))
    found = [
        faults.flip_byte(path, victims[3]),
        faults.zero_stretch(path, *stretch),
        faults.tear_tail(path, "zeros"),
    ]
    lost = {offset for fault in found for offset in fault.lost}
    damaged = sorted(rows(table(spark, path, "damaged")), key=lambda row: int(row["physical_offset"]))
    assert [row["physical_offset"] for row in damaged] == [fault.damage_at for fault in sorted_by_offset(found)]
    for row, fault in zip(damaged, sorted_by_offset(found), strict=True):
        assert row["path"] == f"commitlog/{row['physical_offset'] // SEGMENT * SEGMENT:020d}"
        assert row["reason"]
        if fault.resumes_at is not None:
            assert row["physical_offset"] + row["size"] == fault.resumes_at
    whole = [record.physical_offset for record in before.records if record.physical_offset not in lost]
    assert offsets(table(spark, path, checkCrc="true")) == whole
    # Without the checksums a body may contain anything.
    assert victims[3].physical_offset in offsets(table(spark, path))
    assert set(whole) <= set(offsets(table(spark, path)))


def sorted_by_offset(found: list[faults.DiskFault]) -> list[faults.DiskFault]:
    return sorted(found, key=lambda fault: fault.damage_at)


def test_a_missing_file_is_damage(spark: SparkSession, writable: WrittenStore) -> None:
    before = oracle.contents(writable.path)
    (writable.path / "commitlog" / f"{SEGMENT:020d}").unlink()
    (row,) = rows(table(spark, writable.path, "damaged"))
    assert (row["physical_offset"], row["size"], row["reason"]) == (SEGMENT, SEGMENT, "a file is missing")
    kept = [r.physical_offset for r in before.records if r.physical_offset // SEGMENT != 1]
    assert offsets(table(spark, writable.path)) == kept


def test_what_a_task_cannot_read_is_told_shortly(
    spark: SparkSession, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error of a task is reported in a few lines by every job, without a page of Java before it."""
    write(tmp_path / "store")
    why = f"{spoil(tmp_path / 'store')}: is a directory, and a file belongs there"
    monkeypatch.delenv("DUEMQ_TRACEBACK", raising=False)
    frame = table(spark, tmp_path / "store")
    with pytest.raises(PySparkException) as caught:
        frame.collect()
    lines = str(caught.value).strip().splitlines()
    assert len(lines) <= 6, lines
    assert [line for line in lines if f"duemq.spark_jobs.errors.JobError: {why}" in line]
    with pytest.raises(JobError, match=f"^{why}"):
        job.audit(spark, str(tmp_path / "store"))
    tasks = SparkTasks(spark, SharedDirectory("/"))
    try:
        with pytest.raises(JobError, match="its process was killed: let fewer tasks run"):
            tasks.run(die, ["kill"])
    finally:
        tasks.close()
    assert capfd.readouterr().err == ""
