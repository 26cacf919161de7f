"""Compaction of stores in which topics were deleted, and maybe made again: their records stay in the commitlog, but
belong to no topic."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from duemq.spark_jobs.compact.compact import CompactOptions, CompactResult, compact
from duemq.spark_jobs.errors import JobError
from duemq.spark_jobs.store.store_files import StoreFiles
from tests.unit.spark_jobs.compact_world import Broker, as_apache, new_broker

APACHE = pytest.param(True, id="apache")
OURS = pytest.param(False, id="duemq")


def run(root: Path, out: Path, **options: object) -> CompactResult:
    """Compact in this process, with ranges of the smallest size."""
    return compact(
        str(root),
        str(out),
        workers=1,
        options=CompactOptions(range_size=4 << 20, **options),  # type: ignore[arg-type]
    )


def delete(broker: Broker, *topics: str) -> None:
    """Remove the queues of topics, as DELETE_TOPIC does."""
    for topic in topics:
        broker.owned.durability.remove_topic(topic, lambda error: None)
    broker.owned.settle()


def close(broker: Broker, *, apache: bool, topics: tuple[str, ...]) -> None:
    """Stop the broker of a store that has these topics. An Apache store has no note of deleted ones."""
    broker.close()
    table = {topic: {"topicName": topic, "writeQueueNums": 4} for topic in topics}
    (broker.root / "config/topics.json").write_text(json.dumps({"topicConfigTable": table}))
    if apache:
        as_apache(broker.root)
        (broker.root / "queuecheck").unlink()


def anew(broker: Broker, root: Path) -> Broker:
    """Restart the broker so that it has to make the consume queues from the commitlog."""
    shutil.rmtree(root / "consumequeue")
    (root / "queuecheck").unlink(missing_ok=True)
    (root / "checkpoint").unlink()
    return Broker(root, broker.clock)


@pytest.mark.parametrize("apache", [OURS, APACHE])
def test_the_records_of_a_deleted_topic_go(tmp_path: Path, *, apache: bool) -> None:
    broker = new_broker(tmp_path / "old")
    for number in range(20):
        broker.send("plain", b"old %d" % number)
        broker.send("stays", b"stays %d" % number)
    delete(broker, "plain")
    broker.send("stays", b"later")
    close(broker, apache=apache, topics=("stays",))
    result = run(tmp_path / "old", tmp_path / "new")
    assert (result.removed, result.kept) == ({"deleted": 20}, 21)
    after = anew(broker, tmp_path / "new")
    assert (after.bodies("plain", 0), len(after.bodies("stays", 0))) == ([], 21)


@pytest.mark.parametrize("apache", [OURS, APACHE])
def test_a_topic_that_was_made_again_has_what_it_got_since(tmp_path: Path, *, apache: bool) -> None:
    broker = new_broker(tmp_path / "old")
    for number in range(30):
        broker.send("plain", b"old %d" % number, queue_id=number % 3)
    delete(broker, "plain")
    for number in range(4):
        broker.send("plain", b"new %d" % number)
    close(broker, apache=apache, topics=("plain",))
    # Queues 1 and 2 have got nothing since.
    result = run(tmp_path / "old", tmp_path / "new")
    assert (result.removed, result.kept) == ({"deleted": 30}, 4)
    after = anew(broker, tmp_path / "new")
    assert [after.bodies("plain", queue_id) for queue_id in range(3)] == [[b"new %d" % n for n in range(4)], [], []]
    assert list(after.messages("plain", 0)) == list(range(4))


@pytest.mark.parametrize("apache", [OURS, APACHE])
@pytest.mark.parametrize("holes", [False, True])
def test_an_old_message_of_a_key_supersedes_none_of_the_topic_made_again(
    tmp_path: Path, *, apache: bool, holes: bool
) -> None:
    broker = new_broker(tmp_path / "old")
    for number in range(30):
        broker.send("table", b"old %d" % number, f"KEYS\x01k{number % 5}")
    delete(broker, "table")
    for number in range(5):
        broker.send("table", b"new %d" % number, f"KEYS\x01k{number}")
    close(broker, apache=apache, topics=("table",))
    result = run(tmp_path / "old", tmp_path / "new", keyed_topics=("table",), holes=holes)
    after = Broker(tmp_path / "new", broker.clock)
    assert after.bodies("table", 0) == [b"new %d" % number for number in range(5)]
    assert (result.removed, result.superseded_kept) == ({"deleted": 30}, 0)


@pytest.mark.parametrize("apache", [OURS, APACHE])
def test_what_waits_for_a_deleted_topic_is_delivered_as_without_a_compaction(tmp_path: Path, *, apache: bool) -> None:
    broker = new_broker(tmp_path / "old")
    broker.schedule(1, b"delivered", "a")
    broker.timer(broker.clock.now_ms() + 1000, b"delivered too", "b")
    broker.pass_time(5000)
    broker.schedule(3, b"level", "c")
    broker.timer(broker.clock.now_ms() + 30_000, b"timer", "d")
    broker.run()
    assert len(broker.bodies()) == 2
    delete(broker, "orders")
    close(broker, apache=apache, topics=())
    result = run(tmp_path / "old", tmp_path / "new")
    assert result.lost == 0
    bodies = []
    for root in (tmp_path / "old", tmp_path / "new"):
        after = Broker(root, broker.clock)
        after.pass_time(60_000)
        bodies.append(sorted(after.bodies()))
        after.close()
    assert bodies == [[b"level", b"timer"]] * 2


def test_topics_that_no_table_tells_of_stay(tmp_path: Path) -> None:
    """Topics that no table has stay: if topics.json is lost, or consume queues were removed by hand, a topic without
    queues was not deleted."""
    broker = new_broker(tmp_path / "old")
    for number in range(9):
        broker.send("plain", b"%d" % number)
        broker.send("%RETRY%group", b"%d" % number)
        broker.send("other", b"%d" % number)
    close(broker, apache=True, topics=("plain",))
    for topic in ("plain", "%RETRY%group"):
        shutil.rmtree(tmp_path / "old/consumequeue" / topic)
    assert run(tmp_path / "old", tmp_path / "new").removed == {}
    shutil.rmtree(tmp_path / "old/consumequeue/other")
    (tmp_path / "old/config/topics.json").unlink()
    assert run(tmp_path / "old", tmp_path / "newer").removed == {}
    shutil.rmtree(tmp_path / "old/consumequeue")
    (tmp_path / "old/config/topics.json").write_text('{"topicConfigTable":{}}')
    assert run(tmp_path / "old", tmp_path / "newest").removed == {}
    assert StoreFiles.open(str(tmp_path / "newest")).queue_files() == []


def test_a_note_that_is_no_file_is_refused_in_one_line(tmp_path: Path) -> None:
    """The run ended with a traceback."""
    broker = new_broker(tmp_path / "old")
    broker.send("stays", b"x")
    broker.close()
    path = tmp_path / "old/queuecheck"
    path.unlink()
    for make in (os.mkfifo, lambda path: path.symlink_to("/dev/zero"), os.mkdir):
        make(path)
        with pytest.raises(JobError, match=rf"^{path}: is (not a regular file|a directory)[^\n]*; move it away"):
            run(tmp_path / "old", tmp_path / "new")
        assert not (tmp_path / "new").exists()
        path.rmdir() if make is os.mkdir else path.unlink()
