"""Streams whose store was replaced by another, or changed: the checkpoint's offsets mean nothing there, and no record
may be skipped or repeated silently."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from duemq.spark_jobs.compact.compact import compact
from duemq.spark_jobs.errors import JobError
from tests.support.copies import copy_tree
from tests.unit.spark_jobs.compact_world import Broker
from tests.unit.spark_jobs.source.test_queue_offsets import Stream, fill, read
from tests.unit.spark_jobs.store.test_store_files import idle

ADVICE = "give the query a new checkpoint, or set failOnDataLoss=false, which reads all of this store"


def another(root: Path, count: int = 50) -> None:
    """Put another store at that path."""
    shutil.rmtree(root)
    fill(root, [("other", 0)] * count)


def restored(root: Path, more: int = 0) -> None:
    """Restore the store from an earlier backup, to which a broker may have written since."""
    shutil.rmtree(root)
    copy_tree(root.parent / "backup", root)
    if more:
        broker = Broker(root, fill(root.parent / "clock", []).clock)
        for _ in range(more):
            broker.send("orders", b"z" * 2000, "", 0)
        broker.close()


def compacted(root: Path) -> None:
    """Replace the store with its compaction."""
    compact(str(root), str(root.parent / "smaller"), workers=1)
    shutil.rmtree(root)
    (root.parent / "smaller").rename(root)


CHANGES = [
    pytest.param(another, "has other bytes before physical offset", id="exchanged"),
    pytest.param(lambda root: another(root, 3), "ends at physical offset", id="exchanged by a smaller one"),
    pytest.param(restored, "ends at physical offset", id="restored"),
    pytest.param(lambda root: restored(root, 90), "has other bytes before physical offset", id="cut and written on"),
    pytest.param(compacted, "has other bytes before physical offset", id="compacted"),
]
"""Changes of the store, each with the expected error."""


def grown(root: Path) -> Stream:
    """A stream that has read a store of which there is an older backup."""
    broker = fill(root, [("orders", 0)] * 10)
    copy_tree(root, root.parent / "backup")
    again = Broker(root, broker.clock)
    for _ in range(30):
        again.send("orders", b"y" * 3000, "", 0)
    again.close()
    query = Stream(root)
    assert [len(batch) for batch in query.run()] == [40]
    return query


@pytest.mark.parametrize("tells_start", [True, False])
@pytest.mark.parametrize(("change", "why"), CHANGES)
def test_a_restart_on_another_store_says_so(
    tmp_path: Path, change: Callable[[Path], None], why: str, *, tells_start: bool
) -> None:
    query = grown(tmp_path / "store")
    change(tmp_path / "store")
    with pytest.raises(JobError) as caught:
        query.run(tells_start=tells_start)
    assert str(caught.value).startswith(f"{tmp_path}/store: {why}")
    assert str(caught.value).endswith(ADVICE)
    # If allowed, all of it is read, once.
    found = query.run(3, tells_start=tells_start, failOnDataLoss="false")
    assert found == [read(tmp_path / "store"), [], []]
    assert query.run() == [[]]


def test_a_broker_of_rocketmq_that_was_started_since(tmp_path: Path) -> None:
    """A stream goes on after RocketMQ's broker started on the store, although that holds its last record back from
    readers and the stream has read it."""
    query = grown(tmp_path / "store")
    with idle(tmp_path / "store"):
        assert query.run(2) == [[], []]
    assert query.run() == [[]]


@pytest.mark.parametrize(("change", "why"), CHANGES)
def test_a_store_that_is_exchanged_between_two_batches(
    tmp_path: Path, change: Callable[[Path], None], why: str
) -> None:
    root = tmp_path / "store"
    query = grown(root)
    steps = query.steps()
    assert next(steps) == []
    change(root)
    with pytest.raises(JobError, match=why):
        next(steps)
    shutil.rmtree(root)
    copy_tree(tmp_path / "backup", root)
    allowed = Stream(root)
    steps = allowed.steps(failOnDataLoss="false")
    assert len(next(steps)) == 10
    another(root)
    assert [next(steps), next(steps)] == [read(root), []]


def test_a_batch_that_was_planned_of_the_former_store(tmp_path: Path) -> None:
    """A batch that was planned on the former store is refused: Spark plans a batch, is killed, and asks for that very
    batch when it starts again."""
    root = tmp_path / "store"
    broker = fill(root, [("orders", 0)] * 10)
    query = Stream(root)
    query.run()
    start = json.loads(query.at)
    again = Broker(root, broker.clock)
    again.send("orders", b"y" * 3000, "", 0)
    again.close()
    end = query.reader().latestOffset(start)
    assert len(query.reader().partitions(start, end)) == 1
    shutil.rmtree(root)
    fill(root, [("orders", 0)] * 10 + [("other", 0)] * 10)
    with pytest.raises(JobError, match="has other bytes before physical offset"):
        query.reader().partitions(start, end)
    reader = query.reader(failOnDataLoss="false")
    assert reader.partitions(start, end) == []
    query.at = json.dumps(end)
    assert query.run(failOnDataLoss="false") == [read(root)]


def test_a_store_that_is_compacted_into_files_behind(tmp_path: Path) -> None:
    """A store that is compacted into later files is refused: everything that the stream has read lies before its first
    file, as if it had expired."""
    root = tmp_path / "store"
    fill(root, [("orders", 0)] * 10)
    query = Stream(root)
    query.run()
    compacted(root)
    with pytest.raises(JobError, match="have expired before they were read, or the store was compacted since; set"):
        query.run()
    assert query.run(failOnDataLoss="false") == [read(root)]


def test_one_of_several_stores_is_exchanged(tmp_path: Path) -> None:
    for name in ("a-1", "a-2"):
        fill(tmp_path / name, [(name, 0)] * 5)
    query = Stream(f"{tmp_path}/a-*")
    query.run()
    another(tmp_path / "a-2")
    with pytest.raises(JobError, match=f"^{tmp_path}/a-2: has other bytes"):
        query.run()
    assert query.run(failOnDataLoss="false") == [read(tmp_path / "a-2")]


def test_offsets_of_earlier_versions_are_taken(tmp_path: Path) -> None:
    root = tmp_path / "store"
    broker = fill(root, [("orders", 0)] * 10)
    query = Stream(root)
    query.run()
    query.at = json.dumps({"physical_offset": json.loads(query.at)["physical_offset"]})
    before = query.at
    assert query.run() == [[]]
    assert query.at == before  # no micro-batch without records
    again = Broker(root, broker.clock)
    again.send("orders", b"y", "", 0)
    again.close()
    assert query.run() == [[("orders", 0, 10)]]
    assert "tail" in json.loads(query.at)


def test_a_stream_that_has_read_nothing_yet(tmp_path: Path) -> None:
    """A stream that has read nothing yet, as it begins at a store's end or behind, notices a replaced store: its
    identity is known before anything was read."""
    root = tmp_path / "store"
    fill(root, [("orders", 0)] * 10)
    query = Stream(root)
    assert query.run(startingOffsets="latest") == [[]]
    another(root)
    with pytest.raises(JobError, match="has other bytes"):
        query.run()
    later = Stream(root)
    assert later.run(startingOffset=1 << 40) == [[]]
    assert later.run() == [[]]


def test_a_file_that_expired_is_no_exchange(tmp_path: Path) -> None:
    root = tmp_path / "store"
    broker = fill(root, [("orders", 0)] * 60)
    query = Stream(root)
    query.run()
    again = Broker(root, broker.clock)
    for _ in range(60):
        again.send("orders", b"y" * 3000, "", 0)
    again.close()
    files = sorted((root / "commitlog").iterdir())
    files[0].unlink()
    assert len(query.run()[0]) == 60
    for path in files[1:-1]:
        path.unlink()
    query.at = json.dumps({"physical_offset": 65536, "tail": 1})
    with pytest.raises(JobError, match="have expired before they were read; set failOnDataLoss=false"):
        query.run()
    assert 0 < len(query.run(failOnDataLoss="false")[0]) < 60
