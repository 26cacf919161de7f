"""The analysis, compared with counts by the plain reader."""

from __future__ import annotations

import zlib
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
from pyspark.sql import SparkSession

from duemq.spark_jobs.analyse import output
from duemq.spark_jobs.analyse.analyse import analyse, analyse_for_cluster, forecast_of
from duemq.spark_jobs.analyse.analysis import TABLES, Analysis, figures
from duemq.spark_jobs.analyse.cluster import StoreRun, finish, join
from duemq.spark_jobs.analyse.comparison import Comparison
from duemq.spark_jobs.analyse.history import read_history
from duemq.spark_jobs.analyse.nights import RunOutput
from duemq.spark_jobs.analyse.usage import KEYS_KEPT
from tests.spark.test_audit import check_totals
from tests.spark.world import audit, faults, oracle
from tests.spark.world.oracle import HALF_TOPIC, OP_TOPIC, SCHEDULE_TOPIC, TIMER_TOPIC, Record
from tests.spark.world.stores import WrittenStore
from tests.unit.spark_jobs.analyse.test_cluster import check_percentile
from tests.unit.spark_jobs.compact_world import new_broker

SYSTEM = {SCHEDULE_TOPIC, TIMER_TOPIC, HALF_TOPIC, OP_TOPIC}


def purposes(records: list[Record], deliveries: set[int]) -> tuple[int, int, int, int]:
    """Return the purpose of each record: message, scheduled, delivered, or other."""
    found: Counter[str] = Counter()
    for record in records:
        if record.physical_offset in deliveries:
            found["delivered"] += 1
        elif record.topic in (SCHEDULE_TOPIC, TIMER_TOPIC) and "TIMER_DEL_UNIQKEY" not in record.properties:
            found["scheduled"] += 1
        else:
            found["other" if record.topic in SYSTEM else "messages"] += 1
    return found["messages"], found["scheduled"], found["delivered"], found["other"]


def test_an_analysis(spark: SparkSession, written: WrittenStore) -> None:
    found = analyse(spark, str(written.path))
    contents = oracle.contents(written.path)
    result = audit.audit(written.path, contents)
    records = contents.records
    deliveries = {record.physical_offset for message in result.scheduled for record in message.deliveries}
    check_totals(found.audit, result)
    check_traffic(found, records, deliveries)
    check_lateness(found, result)
    check_ahead(found, result)
    check_consumers(found, written)
    # The other figures, by counting.
    sent = [r for r in records if r.topic not in SYSTEM and r.physical_offset not in deliveries]
    keyed = Counter((r.topic, r.unique_key) for r in sent if r.unique_key)
    assert found.duplicates == sum(count - 1 for count in keyed.values())
    retried = Counter(
        (r.topic.split("%", 2)[2], r.properties.get("RETRY_TOPIC", ""), r.reconsume_times, r.topic.startswith("%DLQ%"))
        for r in records
        if r.topic.startswith(("%RETRY%", "%DLQ%"))
    )
    told = {(one.consumer_group, one.topic, one.attempt, one.is_dead): one.count for one in found.retries}
    assert told == retried
    keys = Counter((r.topic, r.properties["KEYS"]) for r in records if "KEYS" in r.properties)
    error = found.key_error  # 0 unless a range has more keys than are kept
    assert error == 0 or len(keys) > KEYS_KEPT
    for key, (_, count) in zip(found.keys, keys.most_common(50), strict=True):
        assert count - error <= key.count <= count
        assert keys[key.topic, key.key] - error <= key.count <= keys[key.topic, key.key]
    space = {one.reason: (one.records, one.bytes) for one in found.space}
    for reason, verdicts in (("delivered", ("delivered", "twice")), ("cancelled", ("cancelled",))):
        mine = [message.last.size for message in result.scheduled if message.verdict in verdicts]
        assert space.get(reason, (0, 0)) == (len(mine), sum(mine))


def check_traffic(found: Analysis, records: list[Record], deliveries: set[int]) -> None:
    assert found.bytes == sum(record.size for record in records)
    assert found.last_ms == records[-1].store_ms
    step = found.traffic_step_ms
    span = records[-1].store_ms - records[0].store_ms
    assert step <= max(1000, span // 20), "enough points for a curve"
    stretches: dict[int, list[Record]] = {}
    for record in records:
        stretches.setdefault(record.store_ms // step * step, []).append(record)
    assert [part.start_ms for part in found.traffic] == sorted(stretches)
    for part in found.traffic:
        mine = stretches[part.start_ms]
        told = (part.messages, part.scheduled, part.delivered, part.other)
        assert told == purposes(mine, deliveries)
        assert part.bytes == sum(record.size for record in mine)
    topics = {topic.topic: topic for topic in found.topics}
    assert set(topics) == {record.topic for record in records}
    for name, topic in topics.items():
        mine = [record for record in records if record.topic == name]
        assert (topic.messages, topic.scheduled, topic.delivered, topic.other) == purposes(mine, deliveries)
        assert topic.bytes == sum(record.size for record in mine)
        bodies = sorted(len(record.body) for record in mine)
        half = bodies[(len(bodies) - 1) // 2]
        assert topic.body_p50 // 2 <= half < max(topic.body_p50, 1)
    producers = {one.name: (one.count, one.bytes) for one in found.producers}
    skipped = {HALF_TOPIC, OP_TOPIC}
    mine = [r for r in records if r.topic not in skipped and r.physical_offset not in deliveries]
    mine = [r for r in mine if "TIMER_DEL_UNIQKEY" not in r.properties]
    addresses = Counter(".".join(map(str, record.born_host[:4])) for record in mine)
    assert {name: count for name, (count, _) in producers.items()} == addresses
    assert sum(size for _, size in producers.values()) == sum(record.size for record in mine)


def check_lateness(found: Analysis, result: audit.Audit) -> None:
    done = [message for message in result.scheduled if message.deliveries]
    by_topic = Counter(message.real_topic for message in done)
    assert {late.name: late.count for late in found.late_by_topic} == by_topic
    worst: dict[str, int] = {}
    for message in done:
        worst[message.real_topic] = max(worst.get(message.real_topic, -1), message.late_ms or 0)
    assert {late.name: late.max_ms for late in found.late_by_topic} == worst
    assert sum(late.count for late in found.late_by_level) == len(done)
    levels = Counter("timer" if m.last.topic == TIMER_TOPIC else f"level {m.last.queue_id + 1}" for m in done)
    assert {late.name.partition(" (")[0]: late.count for late in found.late_by_level} == levels
    hours = Counter(f"{(m.due_ms or 0) // 3_600_000 % 24:02}" for m in done)
    assert {late.name: late.count for late in found.late_by_hour} == hours
    assert sum(point.count for point in found.lateness) == len(done) == sum(cell.due for cell in found.heat)


def check_ahead(found: Analysis, result: audit.Audit) -> None:
    waits = result.of("pending")
    assert sum(ahead.count for ahead in found.ahead) == len(waits)
    seconds = Counter((message.due_ms or 0) // 1000 * 1000 for message in waits)
    assert {one.second_ms: one.count for one in found.busiest}.items() <= seconds.items()
    assert [one.count for one in found.busiest] == sorted(seconds.values(), reverse=True)[:50]
    assert found.forecast.messages == len(waits)
    assert found.forecast.rate > 0


def check_consumers(found: Analysis, written: WrittenStore) -> None:
    expected = {
        (*name.split("@"), queue): offset
        for name, queues in oracle.consumer_offsets(written.path).items()
        for queue, offset in queues.items()
        if not name.endswith("@CID_RMQ_SYS_TRANS")
    }
    told = {(one.topic, one.consumer_group, one.queue_id): one for one in found.consumers}
    assert {key: one.next_offset for key, one in told.items()} == expected
    last_ms = found.last_ms
    records = {(r.topic, r.queue_id, r.queue_offset): r for r in oracle.contents(written.path).records}
    for (topic, _, queue), one in told.items():
        if one.lag:
            behind = records[topic, queue, one.next_offset]
            assert one.behind_ms == last_ms - behind.store_ms
        elif one.lag == 0:
            assert one.behind_ms == 0
    assert any(one.lag for one in found.consumers)


def test_a_cluster_of_two_stores(
    spark: SparkSession, duemq_store: WrittenStore, apache_533_store: WrittenStore, tmp_path: Path
) -> None:
    """An analysis of two stores as a cluster agrees with the plain rules, by which each store is judged, and with
    counts over both."""
    paths = [duemq_store.path, apache_533_store.path]
    runs = []
    for number, path in enumerate(paths):
        out = str(tmp_path / str(number))
        runs.append(StoreRun(analyse_for_cluster(spark, str(path), out=out), out, f"{out}/report.html"))
    found = join("both", [run.analysed for run in runs])
    finish(found, runs, str(tmp_path / "both"))
    results = [audit.audit(path) for path in paths]
    check_totals(found.audit, audit.Audit([one for result in results for one in result.scheduled], []))
    done = [one for result in results for one in result.scheduled if one.deliveries and one.late_ms is not None]
    late = [one.late_ms or 0 for one in done]
    for name, told in found.audit.lateness.percentiles_ms.items():
        check_percentile(told, late, float(name[1:]))
    of_topics: dict[str, list[int]] = {}
    for one in done:
        of_topics.setdefault(one.real_topic, []).append(one.late_ms or 0)
    check = {row.name: (row.count, row.max_ms) for row in found.late_by_topic}
    assert check == {topic: (len(values), max(values)) for topic, values in of_topics.items()}
    for row in found.late_by_topic:
        check_percentile(row.p99_ms, of_topics[row.name], 99)
    assert sum(point.count for point in found.lateness) == len(done) == sum(cell.due for cell in found.heat)
    waits = [one for result in results for one in result.of("pending")]
    seconds = Counter((one.due_ms or 0) // 1000 * 1000 for one in waits)
    assert [one.count for one in found.busiest] == sorted(seconds.values(), reverse=True)[:50]
    assert sum(ahead.count for ahead in found.ahead) == found.forecast.messages == len(waits)
    records = [record for path in paths for record in oracle.contents(path).records]
    assert found.bytes == sum(record.size for record in records)
    assert found.last_ms == max(record.store_ms for record in records)
    topics = Counter(record.topic for record in records)
    assert {one.topic: one.messages + one.scheduled + one.delivered + one.other for one in found.topics} == topics
    stretches: Counter[int] = Counter()
    for record in records:
        stretches[record.store_ms // found.traffic_step_ms * found.traffic_step_ms] += record.size
    assert {part.start_ms: part.bytes for part in found.traffic} == stretches
    keys = Counter((r.topic, r.properties["KEYS"]) for r in records if "KEYS" in r.properties)
    assert found.key_error or [key.count for key in found.keys] == [count for _, count in keys.most_common(50)]
    for key in found.keys:
        assert keys[key.topic, key.key] - found.key_error <= key.count <= keys[key.topic, key.key]
    assert {one.store for one in found.consumers} == set(map(str, paths))
    assert len(found.consumers) == sum(len(run.analysed.analysis.consumers) for run in runs)
    output.write(found, str(tmp_path / "both"))
    assert {path.stem for path in (tmp_path / "both" / "parquet").iterdir()} == {*TABLES, "stores"}


def test_its_tables_and_files(spark: SparkSession, duemq_store: WrittenStore, tmp_path: Path) -> None:
    found = analyse(spark, str(duemq_store.path), out=str(tmp_path))
    tables = figures(found)
    assert set(tables) == set(TABLES)
    for name, table in tables.items():
        assert table.num_rows == len(getattr(found, name))
    for _ in range(2):
        output.write(found, str(tmp_path))
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"report.html", "analysis.json", "audit.json", "offenders.parquet", "history.jsonl", "parquet"}
    assert {path.stem for path in (tmp_path / "parquet").iterdir()} == set(TABLES)
    runs = read_history(str(tmp_path / "history.jsonl"))
    assert [run.delivered for run in runs] == [found.audit.delivered] * 2


def test_a_night_is_compared_with_the_one_before(spark: SparkSession, writable: WrittenStore, tmp_path: Path) -> None:
    """The analysis of a second night reports only the two losses and the duplicate that are new since the first."""
    store, folder = str(writable.path), tmp_path / "nights"
    delivered = [one for one in audit.audit(writable.path).of("delivered") if one.real_topic.startswith("levels")]
    faults.remove_delivery(writable.path, delivered[3])

    def night() -> Comparison | None:
        with RunOutput(store, folder=str(folder)) as output:
            found = analyse(spark, store, out=output.out)
            _, comparison, left = output.finish(found, keep=1)
        assert left == []
        return comparison

    assert night() is None
    seeded = [faults.remove_delivery(writable.path, delivered[number]) for number in (7, 12)]
    seeded.append(faults.double_delivery(writable.path, delivered[17]))
    comparison = night()
    assert comparison is not None
    assert (comparison.new, comparison.known, comparison.gone) == ({"lost": 2, "twice": 1}, {"lost": 1}, {})
    assert {(one.what, one.unique_key) for one in comparison.new_offenders} == {
        (fault.verdict, fault.unique_key) for fault in seeded
    }
    (left,) = [path for path in folder.iterdir() if path.is_dir()]
    rows = pq.read_table(left / "offenders.parquet").to_pylist()
    told = {row["unique_key"]: row["is_new"] for row in rows}
    assert sorted(told.values()) == [False, True, True, True]
    assert not told[delivered[3].unique_key]


def test_a_killed_store_can_be_analysed(spark: SparkSession, killed: WrittenStore) -> None:
    found = analyse(spark, str(killed.path))
    check_totals(found.audit, audit.audit(killed.path))


def test_a_forecast_at_a_rate(spark: SparkSession, duemq_store: WrittenStore) -> None:
    waits = [message.due_ms or 0 for message in audit.audit(duemq_store.path).of("pending")]
    found = forecast_of(spark, str(duemq_store.path), rate=0.01)
    assert (found.rate, found.messages, found.measured_seconds) == (0.01, len(waits), 0)
    # At one message per 100 s, the messages due in the first hour take more than another hour.
    assert found.late_messages > 40
    assert found.episodes[0].start_ms == min(waits) // 1000 * 1000
    fast = forecast_of(spark, str(duemq_store.path), rate=1_000_000)
    assert (fast.late_messages, fast.episodes) == (0, [])


def test_a_store_in_which_nothing_was_ever_delivered(spark: SparkSession, tmp_path: Path) -> None:
    broker = new_broker(tmp_path / "store")
    broker.send("orders", zlib.compress(b"x"))
    broker.schedule(4, b"later")
    broker.close()
    found = analyse(spark, str(tmp_path / "store"))
    assert (found.audit.scheduled, found.audit.pending, found.forecast.rate) == (1, 1, 0.0)
    assert (found.late_by_topic, found.lateness, found.heat) == ([], [], [])
    output.write(found, str(tmp_path / "out"))
    assert all(table.num_rows >= 0 for table in figures(found).values())
