"""Archives of stores that real brokers wrote: Spark reads them, and brokers go on with the restored stores."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from duemq.spark_jobs.archive.archive import archive, restore
from duemq.spark_jobs.compact.compact import CompactOptions, compact
from duemq.spark_jobs.errors import JobError
from duemq.spark_jobs.writers.new_directory import NewDirectory
from tests.interop.environment import make_broker
from tests.interop.support import eventually
from tests.soak import sampled
from tests.spark.rewrite.test_compact import running
from tests.spark.world import oracle
from tests.spark.world.peers import Peers
from tests.spark.world.stores import KINDS, PROPERTIES, Kind, Stores, WrittenStore

pytestmark = pytest.mark.interop


def test_records_come_back_byte_for_byte(written: WrittenStore, tmp_path: Path) -> None:
    archived = archive(str(written.path), str(tmp_path / "archive"), workers=1)
    old = oracle.contents(written.path)
    assert archived.records == len(old.records)
    restore(str(tmp_path / "archive"), str(tmp_path / "back"), workers=1)
    new = oracle.contents(tmp_path / "back")
    assert new == old
    assert oracle.queues(tmp_path / "back") == oracle.queues(written.path)
    for topic, queue_id in oracle.queues(written.path):
        units = oracle.consume_queue(written.path, topic, queue_id)
        assert oracle.consume_queue(tmp_path / "back", topic, queue_id) == units
    assert oracle.consumer_offsets(tmp_path / "back") == oracle.consumer_offsets(written.path)
    for name in ("checkpoint", "lock", "timerwheel", "config/delayOffset.json", "config/timercheck"):
        if (written.path / name).exists():
            assert (tmp_path / "back" / name).read_bytes() == (written.path / name).read_bytes()


@pytest.mark.parametrize("kind", sampled(KINDS, ("apache-5.3.3",)))
def test_a_broker_goes_on_with_what_was_restored(stores: Stores, peers: Peers, kind: Kind, tmp_path: Path) -> None:
    written = stores.get(kind)
    archive(str(written.path), str(tmp_path / "archive"), workers=1)
    restore(str(tmp_path / "archive"), str(tmp_path / "back"), workers=1)
    topic = next(sent.topic for sent in written.of("plain") if sent.topic.startswith("plain"))
    records = [one for one in oracle.contents(written.path).records if (one.topic, one.queue_id) == (topic, 0)]
    broker = make_broker(written.kind, tmp_path / "broker", PROPERTIES, store=tmp_path / "back")

    async def go_on() -> None:
        async with running(broker):
            java = await peers.client_for(broker)
            await eventually(partial(java.admin(broker.nameserver).route, topic))
            got = await java.pull_all(broker.nameserver, topic, 0)
            assert [(one.queue_offset, one.body) for one in got] == [(one.queue_offset, one.content) for one in records]
            for name, offsets in written.progress.items():
                progressed, group = name.split("@")
                for queue_id, offset in offsets.items():
                    assert await java.consumer_offset(broker.nameserver, group, progressed, queue_id) == offset
            if written.kind != "duemq":
                sent = next(sent for sent in written.of("plain") if sent.topic == topic and sent.keys)
                admin = java.admin(broker.nameserver)
                assert (await admin.view(topic, sent.unique_key)).body == sent.body

    peers.run(go_on())


@pytest.mark.parametrize("job", [archive, compact])
def test_a_directory_that_tasks_do_not_see_is_told(
    job: Callable[..., object],
    duemq_store: WrittenStore,
    spark: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The job refuses a directory that its tasks do not see, such as one with executors on other machines, which would
    write into a directory of the same name there."""
    begin = NewDirectory.begin

    def begin_elsewhere(new: NewDirectory) -> None:
        begin(new)
        os.unlink(new.mark)

    monkeypatch.setattr(NewDirectory, "begin", begin_elsewhere)
    with pytest.raises(JobError, match=f"^{tmp_path}/new: .* does not see this directory of the driver's; give one"):
        job(str(duemq_store.path), str(tmp_path / "new"), spark=spark)
    assert not list(tmp_path.iterdir())


def test_spark_reads_an_archive_that_its_tasks_made(duemq_store: WrittenStore, spark: Any, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    archive(
        str(duemq_store.path),
        str(tmp_path / "archive"),
        spark=spark,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert seen[-1][0] == seen[-1][1] > 0
    old = oracle.contents(duemq_store.path).records
    frame = spark.read.parquet(str(tmp_path / "archive/messages"))
    counts = {row["topic"]: row["count"] for row in frame.groupBy("topic").count().collect()}
    assert counts == dict(Counter(record.topic for record in old))
    sent = next(sent for sent in duemq_store.of("plain") if sent.keys and sent.properties)
    (row,) = frame.where(frame.unique_key == sent.unique_key).collect()
    assert (bytes(row["body"]), row["tags"], row["keys"]) == (sent.body, sent.tags, sent.keys)
    assert set(sent.properties) <= set(row["properties"].items())
    restore(str(tmp_path / "archive"), str(tmp_path / "back"), spark=spark)
    assert oracle.contents(tmp_path / "back").records == old


def test_sparks_tasks_compact_as_processes_do(duemq_store: WrittenStore, spark: Any, tmp_path: Path) -> None:
    by_spark = compact(str(duemq_store.path), str(tmp_path / "one"), spark=spark)
    alone = compact(str(duemq_store.path), str(tmp_path / "two"), workers=1, options=CompactOptions(range_size=4 << 20))
    assert (by_spark.kept, by_spark.removed) == (alone.kept, alone.removed)
    assert oracle.contents(tmp_path / "one") == oracle.contents(tmp_path / "two")
