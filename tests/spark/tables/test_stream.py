"""Stores as streams, and stores that a broker is writing to."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from duemq.spark_jobs.audit import audit as job
from duemq.spark_jobs.store.store_files import StoreFiles
from tests.interop.environment import make_broker
from tests.interop.support import eventually
from tests.peers.clients import unique
from tests.peers.messages import Outgoing
from tests.soak import sampled
from tests.spark.tables.test_queries import ROOT
from tests.spark.world import audit, oracle, spark_home
from tests.spark.world.peers import Peers
from tests.spark.world.stores import PROPERTIES, Kind, Stores, WrittenStore
from tests.unit.spark_jobs.compact_world import Broker, new_broker


class Stream:
    """A query from a store into Parquet files, with a checkpoint. Both outlive a query."""

    def __init__(self, spark: SparkSession, store: Path, directory: Path, **options: str) -> None:
        self._spark, self._store, self._directory = spark, store, directory
        self.options = options

    def start(self, **trigger: Any) -> StreamingQuery:
        reader = self._spark.readStream.format("rocketmq").options(**self.options)
        writer = reader.load(str(self._store)).writeStream.format("parquet")
        writer = writer.option("checkpointLocation", str(self._directory / "checkpoint"))
        writer = writer.trigger(**trigger) if trigger else writer
        return writer.start(str(self._directory / "out"))

    def run(self) -> list[int]:
        """Read everything that there is now; return the physical offsets of all rows so far."""
        query = self.start()
        try:
            query.processAllAvailable()
        finally:
            query.stop()
        return self.offsets()

    def offsets(self) -> list[int]:
        frame = self._spark.read.parquet(str(self._directory / "out"))
        return sorted(row.physical_offset for row in frame.select("physical_offset").collect())

    def batches(self) -> int:
        return len([path for path in (self._directory / "checkpoint" / "commits").iterdir() if path.name.isdecimal()])


class Growing:
    """A store of several files, to which a broker appends from time to time."""

    def __init__(self, root: Path) -> None:
        broker = new_broker(root)
        self.root, self._clock = root, broker.clock
        broker.close()

    def grow(self, count: int) -> list[int]:
        """Append messages; return their physical offsets."""
        broker = Broker(self.root, self._clock)
        try:
            return [broker.send("orders", b"x" * 500, f"KEYS\x01{number}", number % 4) for number in range(count)]
        finally:
            broker.close()


@pytest.fixture
def growing(tmp_path: Path) -> Growing:
    store = Growing(tmp_path / "store")
    store.grow(300)
    return store


def everything(store: Growing) -> list[int]:
    return [record.physical_offset for record in oracle.contents(store.root).records]


def test_a_stream_reads_what_is_there_and_then_what_comes(
    spark: SparkSession, growing: Growing, tmp_path: Path
) -> None:
    stream = Stream(spark, growing.root, tmp_path)
    query = stream.start()
    try:
        query.processAllAvailable()
        assert stream.offsets() == everything(growing)
        growing.grow(200)
        query.processAllAvailable()
        assert stream.offsets() == everything(growing)
    finally:
        query.stop()
    # Stopped, and started again elsewhere: the checkpoint has its position.
    more = growing.grow(150)
    found = stream.run()
    assert found == everything(growing)
    assert set(more) <= set(found)
    assert stream.run() == found


def test_a_stream_begins_where_it_is_told_and_in_batches(spark: SparkSession, growing: Growing, tmp_path: Path) -> None:
    before = everything(growing)
    latest = Stream(spark, growing.root, tmp_path / "latest", startingOffset="latest", columns="physical_offset")
    query = latest.start()
    try:
        query.processAllAvailable()
        new = growing.grow(10)
        query.processAllAvailable()
    finally:
        query.stop()
    assert latest.offsets() == new
    middle = before[100]
    given = Stream(spark, growing.root, tmp_path / "given", startingOffset=str(middle), columns="physical_offset")
    assert given.run() == [offset for offset in everything(growing) if offset >= middle]
    # Files of 64 KiB: a batch ends at the end of a file at the latest.
    small = Stream(spark, growing.root, tmp_path / "small", maxBytesPerTrigger="100000", columns="physical_offset")
    assert small.run() == everything(growing)
    assert small.batches() >= 3


def test_a_stream_and_a_table_begin_at_queue_offsets(spark: SparkSession, growing: Growing, tmp_path: Path) -> None:
    """A stream and a table begin at queue offsets given with the options of Spark's source for Kafka; a restart goes by
    the stream's checkpoint."""
    asked = json.dumps({"orders": {"0": 23, "1": -2, "2": -2, "3": 70}})
    records = oracle.contents(growing.root).records
    starts = {0: 23, 1: 0, 2: 0, 3: 70}
    expected = [record.physical_offset for record in records if record.queue_offset >= starts[record.queue_id]]
    options = {"topics": "orders", "startingOffsets": asked, "columns": "physical_offset"}
    frame = spark.read.format("rocketmq").options(**options).load(str(growing.root))
    assert sorted(row.physical_offset for row in frame.collect()) == expected
    stream = Stream(spark, growing.root, tmp_path, maxOffsetsPerTrigger="50", **options)
    assert stream.run() == expected
    assert stream.batches() == -(-len(expected) // 50)
    more = growing.grow(20)
    stream.options["startingOffsets"] = "latest"
    assert stream.run() == [*expected, *more]
    stream.options["startingOffsets"] = '{"orders": {"0": 23}}'
    with pytest.raises(PySparkException, match="does not name queues 1, 2, 3 of orders"):
        Stream(spark, growing.root, tmp_path / "new", **stream.options).run()


def test_what_is_there_now_is_read_in_batches_and_then_it_ends(
    spark: SparkSession, growing: Growing, tmp_path: Path
) -> None:
    """With Trigger.AvailableNow, as in nightly jobs, a stream reads the present records in batches and then ends. Later
    records are for the next night."""
    before, seen, sizes = everything(growing), list[int](), list[int]()

    def take(batch: DataFrame, _: int) -> None:
        found = [row.physical_offset for row in batch.select("physical_offset").collect()]
        seen.extend(found)
        sizes.append(len(found))
        growing.grow(5)

    def night() -> None:
        reader = spark.readStream.format("rocketmq").option("columns", "physical_offset")
        frame = reader.option("maxBytesPerTrigger", "100000").load(str(growing.root))
        writer = frame.writeStream.foreachBatch(take).trigger(availableNow=True)
        query = writer.option("checkpointLocation", str(tmp_path / "state")).start()
        assert query.awaitTermination(120), "it ends by itself"

    night()
    assert sorted(seen) == before
    assert len(sizes) >= 3
    more = everything(growing)
    night()
    assert sorted(seen) == more


def test_all_at_once_is_all_whatever_the_limits(spark: SparkSession, growing: Growing, tmp_path: Path) -> None:
    """Trigger.Once reads everything in one micro-batch, whatever the limits."""
    reader = spark.readStream.format("rocketmq").option("columns", "physical_offset").option("maxOffsetsPerTrigger", 7)
    writer = reader.load(str(growing.root)).writeStream.format("parquet").trigger(once=True)
    query = writer.option("checkpointLocation", str(tmp_path / "state")).start(str(tmp_path / "out"))
    assert query.awaitTermination(120)
    found = spark.read.parquet(str(tmp_path / "out"))
    assert sorted(row.physical_offset for row in found.collect()) == everything(growing)


def test_a_stream_with_the_oldest_spark(growing: Growing, tmp_path: Path) -> None:
    """A stream reads everything with the oldest Spark, which does not pass the start of a batch."""
    stdout, _ = with_the_oldest_spark(
        "options = {'maxBytesPerTrigger': '100000', 'columns': 'physical_offset'}\n"
        "stream = Stream(make_session('old'), Path(sys.argv[1]), Path(sys.argv[2]), **options)\n"
        "first, batches = stream.run(), stream.batches()\n"
        "print(first, batches, stream.run() == first)",
        growing.root,
        tmp_path / "old",
    )
    found, batches, is_same = stdout.strip().rpartition("] ")[0] + "]", *stdout.split()[-2:]
    assert json.loads(found) == everything(growing)
    assert (int(batches) >= 3, is_same) == (True, "True")


@pytest.mark.soak
def test_the_oldest_spark_ends_before_the_end_not_without_a_word(growing: Growing, tmp_path: Path) -> None:
    """With the oldest Spark, which takes one micro-batch for Trigger.AvailableNow, a stream with a limit ends early and
    says so."""
    stdout, stderr = with_the_oldest_spark(
        "options = {'maxOffsetsPerTrigger': '200', 'columns': 'physical_offset'}\n"
        "stream = Stream(make_session('old'), Path(sys.argv[1]), Path(sys.argv[2]), **options)\n"
        "for _ in range(3):\n"
        "    stream.start(availableNow=True).awaitTermination()\n"
        "    print(len(stream.offsets()), flush=True)\n"
        "    print('and then', file=sys.stderr, flush=True)",
        growing.root,
        tmp_path / "old",
    )
    assert stdout.split() == ["200", "300", "300"]
    assert f"duemq: {growing.root}: this micro-batch ends before the store does, and Spark before 4.2" in stderr
    assert stderr.count("start it again until nothing comes") == 1


def with_the_oldest_spark(code: str, *arguments: Path) -> tuple[str, str]:
    """Run Python with Spark 4.1; return its standard output and standard error."""
    begin = (
        "import sys; from pathlib import Path; from duemq.spark_jobs.session import make_session\n"
        "from tests.spark.tables.test_stream import Stream\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", begin + code, *map(str, arguments)],
        cwd=ROOT, env=spark_home.oldest(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    return run.stdout, run.stderr


def test_what_has_expired_is_an_error_unless_that_is_allowed(
    spark: SparkSession, growing: Growing, tmp_path: Path
) -> None:
    stream = Stream(spark, growing.root, tmp_path, columns="physical_offset")
    found = stream.run()
    growing.grow(500)
    files = sorted((growing.root / "commitlog").iterdir())
    for path in files[:-2]:
        path.unlink()
    left = [offset for offset in everything(growing) if offset not in set(found)]
    with pytest.raises(PySparkException, match="have expired before they were read; set failOnDataLoss=false"):
        stream.run()
    stream.options["failOnDataLoss"] = "false"
    assert stream.run() == sorted([*found, *left])


def test_only_messages_and_schedules_are_streams(spark: SparkSession, growing: Growing, tmp_path: Path) -> None:
    with pytest.raises(
        PySparkException, match="the table pending cannot be read as a stream; messages and schedules can"
    ):
        Stream(spark, growing.root, tmp_path, table="pending").run()
    with pytest.raises(PySparkException, match="startingOffset=now is neither earliest nor latest nor a number"):
        Stream(spark, growing.root, tmp_path, startingOffset="now").run()


def test_a_stream_of_several_stores(spark: SparkSession, growing: Growing, tmp_path: Path) -> None:
    other = Growing(tmp_path / "store-2")
    other.grow(40)
    growing.root.rename(tmp_path / "store-1")
    growing.root = tmp_path / "store-1"
    asked = {
        str(growing.root): {"orders": dict.fromkeys("0123", 70)},
        str(other.root): {"orders": dict.fromkeys("0123", -2)},
    }
    options = {"startingOffsets": json.dumps(asked), "columns": "physical_offset,store"}
    stream = Stream(spark, tmp_path / "store-*", tmp_path, maxOffsetsPerTrigger="16", **options)
    expected = [record.physical_offset for record in oracle.contents(growing.root).records if record.queue_offset >= 70]
    assert stream.run() == sorted(expected + everything(other))
    assert stream.batches() == 5
    more = growing.grow(10) + other.grow(10)
    third = Growing(tmp_path / "store-3")
    third.grow(8)
    assert stream.run() == sorted(expected + everything(other)[:40] + more + everything(third))


def test_schedules_as_a_stream(spark: SparkSession, duemq_store: WrittenStore, tmp_path: Path) -> None:
    contents = oracle.contents(duemq_store.path)
    waiting = [r for r in contents.records if r.topic in (oracle.SCHEDULE_TOPIC, oracle.TIMER_TOPIC)]
    expected = [r.physical_offset for r in waiting if "TIMER_DEL_UNIQKEY" not in r.properties]
    assert Stream(spark, duemq_store.path, tmp_path, table="schedules").run() == expected


@pytest.mark.parametrize("kind", sampled(("duemq", "apache-4.9.7"), ("duemq",)))
def test_a_store_is_read_while_a_broker_writes_it(
    spark: SparkSession, stores: Stores, peers: Peers, kind: Kind, tmp_path: Path
) -> None:
    """Tables, a stream and audits read a store whose broker takes and delivers messages: they never fail, see only
    flushed records, and lose none."""
    path = stores.get(kind).copy(tmp_path / "store")
    peers.run(_read_while_written(spark, path, peers, kind, tmp_path))


async def _read_while_written(spark: SparkSession, path: Path, peers: Peers, kind: Kind, tmp_path: Path) -> None:
    broker = make_broker(kind, tmp_path / "broker", PROPERTIES, store=path)
    stream = Stream(spark, path, tmp_path, columns="physical_offset,topic,role")
    topic, count = unique("meanwhile"), 2000
    java, _ = await asyncio.gather(peers.client_for(broker), broker.start())
    try:
        admin = java.admin(broker.nameserver)
        await admin.create_topic(broker.address, topic, 4)
        await eventually(lambda: admin.route(topic))
        done = asyncio.Event()

        async def send() -> None:
            async with await java.producer(broker.nameserver) as producer:
                for part in range(10):
                    messages = [Outgoing(b"%d of %d" % (n, part) * 20, level=1 + n % 2) for n in range(count // 10)]
                    assert all(sent.status for sent in await producer.send(topic, messages, "async"))
            done.set()

        def look() -> tuple[list[int], job.Summary]:
            """Return the offsets of the flushed records, and the audit."""
            store = StoreFiles.open(path)
            assert store.is_running
            frame = spark.read.format("rocketmq").option("columns", "physical_offset").load(str(path))
            offsets = sorted(row.physical_offset for row in frame.collect())
            damaged = spark.read.format("rocketmq").option("table", "damaged").load(str(path)).collect()
            assert damaged == []
            for table in ("schedules", "pending", "consume_queue", "timers", "offsets"):
                spark.read.format("rocketmq").option("table", table).load(str(path)).collect()
            return offsets, job.audit(spark, str(path))

        sending = asyncio.create_task(send())
        query = await asyncio.to_thread(stream.start)
        looks: list[tuple[list[int], job.Summary]] = []
        while len(looks) < 2 or not done.is_set():
            looks.append(await asyncio.to_thread(look))
        await sending
        for _, summary in looks:
            counts = summary.delivered + summary.cancelled + summary.pending
            assert (summary.lost, summary.twice, summary.unclaimed) == (0, 0, 0), summary.offenders
            assert summary.scheduled == counts
            assert summary.is_running

        async def delivered() -> int:
            return sum(queue.max for queue in (await admin.topic_stats(topic)).values())

        await eventually(delivered, lambda found: found == count, timeout=60)
        await asyncio.to_thread(query.processAllAvailable)
        await asyncio.to_thread(query.stop)
        while_running = stream.offsets()
        await broker.stop()
    finally:
        if broker.running:
            await broker.kill()
    records = {record.physical_offset: record for record in oracle.contents(path).records}
    for offsets, _ in looks:
        assert offsets == sorted(records)[: len(offsets)], "what is read is the beginning of what is there"
    assert while_running == sorted(records)[: len(while_running)]
    assert await asyncio.to_thread(stream.run) == sorted(records)
    summary = await asyncio.to_thread(job.audit, spark, str(path))
    expected = audit.audit(path)
    assert Counter({name: getattr(summary, name) for name in ("delivered", "cancelled", "pending")}) == expected.totals
    assert summary.is_good
    assert [len(offsets) for offsets, _ in looks] == sorted(len(offsets) for offsets, _ in looks)
