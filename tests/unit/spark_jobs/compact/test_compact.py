"""Compaction of stores written by duemq's storage and scheduler: the removed records, the kept ones, and a broker that
goes on with the result unchanged."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from duemq.protocol.records.record import StoredMessage
from duemq.protocol.topics import SCHEDULE_TOPIC
from duemq.scheduler.levels.table import DelayLevels
from duemq.scheduler.timers.files.log import TimerLog
from duemq.scheduler.timers.files.superseded import Superseded
from duemq.scheduler.timers.policy.policies import TimerPolicy
from duemq.spark_jobs.cli.output import print_compacted
from duemq.spark_jobs.compact import compact as compacting
from duemq.spark_jobs.compact.compact import CompactOptions, CompactResult, compact
from duemq.spark_jobs.errors import JobError
from duemq.spark_jobs.store.progress import waiting
from duemq.spark_jobs.store.store_files import StoreFiles
from duemq.storage.clock import ManualClock
from duemq.storage.files import OsFiles
from duemq.storage.queues.consume_queue import PADDING_SIZE, WITHDRAWN_SIZE
from tests.soak import examples
from tests.support.copies import copy_tree, data_of
from tests.unit.spark_jobs.compact_world import (
    HOST_V6,
    QUEUE_UNITS,
    SEGMENT,
    START_MS,
    Broker,
    as_apache,
    new_broker,
    save_offsets,
)
from tests.unit.spark_jobs.forked import exit_code

HOUR_MS = 3_600_000


def run(root: Path, out: Path, **options: object) -> CompactResult:
    """Compact in this process, with ranges of the smallest size."""
    return compact(
        str(root),
        str(out),
        workers=1,
        options=CompactOptions(range_size=4 << 20, **options),  # type: ignore[arg-type]
    )


def tree(root: Path, *, but: str = "") -> dict[str, tuple[int, dict[int, bytes]]]:
    """All files, with size and content, except those of one directory."""
    paths = [path.relative_to(root) for path in sorted(root.rglob("*")) if path.is_file()]
    return {str(path): data_of(root / path) for path in paths if path.parts[0] != but}


def same(a: StoredMessage, b: StoredMessage) -> bool:
    """Whether two messages are the same, apart from their positions and those of their origins."""
    return all(
        getattr(a, name) == getattr(b, name)
        for name in a.__struct_fields__
        if name not in ("physical_offset", "prepared_transaction_offset")
    )


def busy(root: Path) -> Broker:
    """A store with delivered and waiting messages of all kinds."""
    broker = new_broker(root)
    for i in range(120):
        broker.send("plain", b"p%d" % i * 20, f"KEYS\x01a{i} b{i % 7}\x02UNIQ_KEY\x01U{i}", i % 2)
        broker.schedule(1, b"level%d" % i * 30, f"L{i}")
        broker.timer(broker.clock.now_ms() + 2000 + i * 10, b"timer%d" % i * 30, f"T{i}")
    broker.pass_time(10_000)
    for i in range(30):
        broker.schedule(4, b"hour%d" % i)
        broker.timer(broker.clock.now_ms() + HOUR_MS + i, b"far%d" % i)
    broker.pass_time(1000)
    return broker


def test_the_note_of_the_consume_queues_is_of_the_old_store_and_stays_there(tmp_path: Path) -> None:
    broker = busy(tmp_path / "old")
    broker.close()
    assert (tmp_path / "old" / "queuecheck").exists()
    run(tmp_path / "old", tmp_path / "new")
    assert not (tmp_path / "new" / "queuecheck").exists()
    with capture_logs() as lines:
        after = Broker(tmp_path / "new", broker.clock)
        after.close()
        assert (tmp_path / "new" / "queuecheck").exists()
        Broker(tmp_path / "new", broker.clock).close()
    told = {line["event"] for line in lines}
    assert not told & {"consume_queues_made_again", "queuecheck_passed_over"}


def test_what_was_delivered_goes_and_what_waits_arrives_once(tmp_path: Path) -> None:
    broker = busy(tmp_path / "old")
    delivered = broker.messages("orders")
    plain = [broker.messages("plain", queue_id) for queue_id in (0, 1)]
    assert len(delivered) == 240
    broker.close()
    before = tree(tmp_path / "old")
    result = run(tmp_path / "old", tmp_path / "new")
    assert tree(tmp_path / "old") == before
    assert result.removed == {"delivered": 240}
    assert result.kept == 120 + 240 + 60
    after = Broker(tmp_path / "new", broker.clock)
    assert (after.recovered.records, after.recovered.rebuilt, after.recovered.torn) == (0, False, None)
    assert after.timers.state(after.clock.now_ms()).pending == 30
    found = after.messages("orders")
    assert list(found) == list(delivered)
    assert all(same(found[at], delivered[at]) for at in delivered)
    for queue_id in (0, 1):
        found = after.messages("plain", queue_id)
        assert list(found) == list(plain[queue_id])
        assert all(same(found[at], plain[queue_id][at]) for at in found)
    after.pass_time(2 * HOUR_MS)
    assert sorted(after.bodies()[240:]) == sorted(
        [b"hour%d" % i for i in range(30)] + [b"far%d" % i for i in range(30)]
    )
    # New messages get the next queue offsets, also in the system queues.
    after.send("plain", b"next")
    assert max(after.messages("plain", 0)) == 60
    after.schedule(1, b"new level")
    after.timer(after.clock.now_ms() + 5000, b"new timer")
    after.pass_time(10_000)
    assert after.bodies()[300:] == [b"new level", b"new timer"]
    after.close()


@pytest.mark.parametrize("has_marks", [True, False])
def test_what_a_pause_held_back_arrives_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_marks: bool) -> None:
    """Messages held back by a pause are delivered once after a compaction. Half of them came back before the broker
    ended, and have units left in later slots; if it ended in the middle of a checkpoint, only the checkpoint says that
    these do not count any more."""
    if not has_marks:
        monkeypatch.setattr(Superseded, "plan", lambda superseded: lambda: None)
    broker = new_broker(tmp_path / "old")
    topics = "orders", "others"
    for topic in topics:
        broker.timers.set_policy(topic, TimerPolicy(is_paused=True))
        for i in range(20):
            broker.timer(broker.clock.now_ms() + 1000, b"%d" % i, topic=topic)
    broker.pass_time(10_000)
    broker.timers.set_policy("orders", None)
    broker.pass_time(10_000)
    assert len(broker.bodies()) == 20
    broker.owned.checkpoint()
    broker.close()
    found = StoreFiles.open(tmp_path / "old")
    assert len(waiting(found).offsets) == 20
    run(tmp_path / "old", tmp_path / "new")
    after = Broker(tmp_path / "new", broker.clock)
    after.pass_time(3 * 24 * HOUR_MS)
    assert [len(after.messages(topic)) for topic in topics] == [20, 20]
    assert after.timers.state(after.clock.now_ms()).pending == 0
    after.close()


def test_every_record_says_where_it_lies_and_delivered_ones_that_their_origin_is_gone(tmp_path: Path) -> None:
    busy(tmp_path / "old").close()
    run(tmp_path / "old", tmp_path / "new")
    store = StoreFiles.open(str(tmp_path / "new"))
    count = 0
    for segment in store.segments:
        for records in store.chunks(segment.first_offset, min(segment.end, store.readable_end)):
            assert (records.stored_physical_offset == records.physical_offset).all()
            codes, names = records.topics()
            for name in names:
                prepared = records.prepared_offset[codes == names.index(name)]
                if name == "orders":
                    assert (prepared == -1).all()
                if name == "plain":
                    assert (prepared == 0).all()
            count += len(records)
    assert count == 420


def test_a_store_of_delivered_messages_is_half_as_large(tmp_path: Path) -> None:
    broker = new_broker(tmp_path / "old", 1 << 20)
    for i in range(1500):
        broker.schedule(1, bytes(1000), f"L{i}")
    broker.pass_time(5000)
    broker.close()
    result = run(tmp_path / "old", tmp_path / "new")
    assert result.saved >= 0.45
    assert Broker(tmp_path / "new", broker.clock, 1 << 20).bodies() == [bytes(1000)] * 1500


def test_cancelled_messages_go_with_the_marks_that_cancelled_them(tmp_path: Path) -> None:
    broker = new_broker(tmp_path / "old")
    timers = [broker.timer(START_MS + HOUR_MS + i, b"t%d" % i, f"T{i}") for i in range(10)]
    levels = [broker.schedule(4, b"l%d" % i, f"L{i}") for i in range(10)]
    for physical in (*timers[3:6], timers[9], *levels[0:2], levels[5]):
        broker.cancel(physical)
    broker.run()
    broker.close()
    result = run(tmp_path / "old", tmp_path / "new")
    # The last record of the timer topic stays, and no other cancelled record.
    assert result.removed == {"cancelled": 7 + 6}
    assert result.holes == 4 + 6 + 1
    after = Broker(tmp_path / "new", broker.clock)
    after.pass_time(2 * HOUR_MS)
    expected = {b"t%d" % i for i in range(10) if i not in (3, 4, 5, 9)}
    expected |= {b"l%d" % i for i in range(10) if i not in (0, 1, 5)}
    assert sorted(after.bodies()) == sorted(expected)
    after.close()


def test_a_queue_whose_last_messages_were_cancelled_keeps_those_before(tmp_path: Path) -> None:
    broker = new_broker(tmp_path / "old")
    offsets = [broker.schedule(4, b"l%d" % i) for i in range(13)]
    for physical in offsets[10:]:
        broker.cancel(physical)
    broker.run()
    broker.close()
    result = run(tmp_path / "old", tmp_path / "new")
    assert result.removed["cancelled"] >= 3
    store = StoreFiles.open(str(tmp_path / "new"))
    (file,) = (file for file in store.queue_files() if (file.topic, file.queue_id) == ("SCHEDULE_TOPIC_XXXX", 3))
    units = store.units(file)
    # A search for the queue's first message, which 5.3.3 begins at the last unit, finds some.
    assert (np.diff(units["physical_offset"]) >= 0).all()
    assert (units["physical_offset"] >= store.segments[0].first_offset).all()
    after = Broker(tmp_path / "new", broker.clock)
    after.pass_time(2 * HOUR_MS)
    assert after.bodies() == [b"l%d" % i for i in range(10)]
    after.close()


@pytest.mark.parametrize("is_foreign", [False, True])
def test_twice_compacted_is_as_once(tmp_path: Path, *, is_foreign: bool) -> None:
    broker = busy(tmp_path / "old")
    broker.close()
    if is_foreign:
        as_apache(tmp_path / "old")
    run(tmp_path / "old", tmp_path / "once")
    result = run(tmp_path / "once", tmp_path / "twice")
    assert result.removed == {}
    after = Broker(tmp_path / "twice", broker.clock)
    after.pass_time(2 * HOUR_MS)
    assert len(after.bodies()) == 300
    after.close()


def test_a_store_that_rocketmq_had_last_goes_by_its_books(tmp_path: Path) -> None:
    broker = busy(tmp_path / "old")
    broker.close()
    as_apache(tmp_path / "old")
    result = run(tmp_path / "old", tmp_path / "new")
    assert result.removed == {"delivered": 240}
    assert (tmp_path / "new" / "lock").read_bytes() == b"lock"
    after = Broker(tmp_path / "new", broker.clock)
    assert after.recovered.is_foreign
    after.pass_time(2 * HOUR_MS)
    assert len(after.bodies()) == 300
    after.close()


def test_without_books_only_origins_tell(tmp_path: Path) -> None:
    broker = busy(tmp_path / "old")
    broker.close()
    as_apache(tmp_path / "old")
    for name in ("config/delayOffset.json", "config/timercheck"):
        (tmp_path / "old" / name).unlink()
    subprocess.run(["rm", "-r", str(tmp_path / "old" / "timerlog")], check=True)
    result = run(tmp_path / "old", tmp_path / "new")
    assert result.removed == {"delivered": 240}


def test_a_timer_log_of_several_files_is_made_anew(tmp_path: Path) -> None:
    broker = new_broker(tmp_path / "old")
    for i in range(400):
        broker.timer(START_MS + (HOUR_MS if i % 3 else 2000) + i, b"t%d" % i)
    broker.pass_time(10_000)
    broker.close()
    run(tmp_path / "old", tmp_path / "new")
    log = TimerLog(OsFiles(), str(tmp_path / "new/timerlog"), 5200)
    log.load()
    log.recover(0)
    count = sum(len(units) for _, units in log.scan(0, log.end))
    # The waiting ones; the newest of all waits, so no mark is needed behind it. It is written at the next stop.
    assert count - 266 in (0, 1)
    after = Broker(tmp_path / "new", broker.clock)
    after.pass_time(2 * HOUR_MS)
    assert len(after.bodies()) == 400
    after.close()


def test_messages_expire_and_what_waits_does_not(tmp_path: Path) -> None:
    broker = new_broker(tmp_path / "old")
    for i in range(120):
        broker.send("plain", b"p%d" % i)
        broker.clock.advance(1000)
    broker.schedule(4, b"waits")
    broker.timer(broker.clock.now_ms() + HOUR_MS, b"waits too")
    broker.clock.advance(60_000)
    broker.send("plain", b"young")
    broker.close()
    now_ms = broker.clock.now_ms()
    result = run(tmp_path / "old", tmp_path / "new", reserved_hours=90.5 / 3600, now_ms=now_ms)
    assert result.removed == {"expired": 90}
    after = Broker(tmp_path / "new", broker.clock)
    assert list(after.messages("plain", 0)) == list(range(90, 121))
    after.pass_time(2 * HOUR_MS)
    assert sorted(after.bodies()) == [b"waits", b"waits too"]
    after.close()
    result = run(tmp_path / "old", tmp_path / "empty", reserved_hours=0, now_ms=now_ms + 1)
    after = Broker(tmp_path / "empty", broker.clock)
    assert after.messages("plain", 0) == {}
    after.send("plain", b"next")
    assert list(after.messages("plain", 0)) == [121]
    after.close()


def test_ended_transactions_go(tmp_path: Path) -> None:
    half, op = "RMQ_SYS_TRANS_HALF_TOPIC", "RMQ_SYS_TRANS_OP_HALF_TOPIC"
    broker = new_broker(tmp_path / "old")
    offsets = [broker.send(half, b"h%d" % i, f"REAL_TOPIC\x01T\x02UNIQ_KEY\x01{i}") for i in range(20)]
    for i in range(15):
        broker.send(op, b"%d" % i, "TAGS\x01d")
    appender, queue = broker.store.appender, broker.store.ensure_queue("T", 0)
    for i in (3, 18):
        now_ms = appender.begin(broker.clock.now_ms())
        appender.add(queue, b"h%d" % i, b"", 0, now_ms, HOST_V6[:8], 0, 8, 0, offsets[i])
        appender.commit()
    broker.close()
    result = run(tmp_path / "old", tmp_path / "all")
    assert result.removed == {}
    group = "CID_RMQ_SYS_TRANS"
    save_offsets(tmp_path / "old", {f"{half}@{group}": {"0": 12}, f"{op}@{group}": {"0": 10}})
    result = run(tmp_path / "old", tmp_path / "new")
    assert result.removed == {"ended": 22}
    after = Broker(tmp_path / "new", broker.clock)
    assert list(after.messages(half, 0)) == list(range(12, 20))
    assert list(after.messages(op, 0)) == list(range(10, 15))
    committed = after.messages("T", 0)
    # A commit names its half message: at its new offset, or nowhere.
    assert committed[0].prepared_transaction_offset == 0
    assert committed[1].prepared_transaction_offset == after.messages(half, 0)[18].physical_offset
    after.close()


def keyed(root: Path) -> Broker:
    broker = new_broker(root)
    for i in range(230):
        key = f"KEYS\x01k{i % 10 if i < 100 else i % 40}\x02TAGS\x01t"
        broker.send("table", b"v%d" % i * 50, key)
        if i % 3 == 0:
            broker.send("other", b"o%d" % i)
    broker.close()
    return broker


def newest() -> dict[str, int]:
    return {f"k{i % 10 if i < 100 else i % 40}": i for i in range(230)}


def test_superseded_messages_go_where_nothing_before_them_stays(tmp_path: Path) -> None:
    broker = keyed(tmp_path / "old")
    (tmp_path / "old/config").mkdir(exist_ok=True)
    (tmp_path / "old/config/topics.json").write_text(
        json.dumps({"topicConfigTable": {"table": {"attributes": {"cleanup.policy": "COMPACTION"}}, "other": {}}})
    )
    result = run(tmp_path / "old", tmp_path / "new")
    first = min(newest().values())
    assert result.removed == {"superseded": first}
    assert result.superseded_kept == 230 - 40 - first
    after = Broker(tmp_path / "new", broker.clock)
    assert list(after.messages("table", 0)) == list(range(first, 230))
    assert len(after.messages("other", 0)) == 77
    after.close()


def test_with_holes_superseded_messages_go_from_the_middle(tmp_path: Path) -> None:
    root = tmp_path / "old"
    broker = new_broker(root)
    broker.send("table", b"stays", "KEYS\x01first")
    for i in range(230):
        broker.send("table", b"v%d" % i * 50, f"KEYS\x01k{i % 40}" if i % 50 else "")
    broker.close()
    last = {f"k{i % 40}": i + 1 for i in range(230) if i % 50}
    result = run(root, tmp_path / "new", keyed_topics=("table",), holes=True)
    without_key = {1 + i for i in range(0, 230, 50)}
    ends_of_files = set(range(QUEUE_UNITS - 1, 231, QUEUE_UNITS))
    expected = {0} | set(last.values()) | without_key | ends_of_files
    assert result.removed == {"superseded": 231 - len(expected)}
    assert result.superseded_kept == len(expected - {0} - set(last.values()) - without_key)
    after = Broker(tmp_path / "new", broker.clock)
    assert set(after.messages("table", 0)) == expected
    assert after.store.queue("table", 0).min_offset == 0  # type: ignore[union-attr]
    # A consumer that pulls gets these, and no others.
    offset, got = 0, []
    while offset < 231:
        found = after.store.find("table", 0, offset, 32, 1 << 20, None)
        assert found.next_offset > offset
        data = after.store.read(found.ranges) if found.ranges else b""
        from duemq.protocol.records.record import decode_all

        got += [message.queue_offset for message in decode_all(bytes(data or b""))]
        offset = found.next_offset
    assert got == sorted(expected)
    after.close()


@pytest.mark.parametrize("end", ["cancelled", "delivered before others"])
@pytest.mark.parametrize("times", [1, 2])
def test_a_level_whose_last_message_is_marked_goes_on_where_it_was(tmp_path: Path, end: str, times: int) -> None:
    broker = new_broker(tmp_path / "old")
    waiting = [broker.schedule(4, b"waits %d" % number) for number in range(5)]
    queue = broker.levels.levels[4].queue
    if end == "cancelled":
        for offset in waiting[-2:]:
            broker.cancel(offset)
    else:
        broker.levels.set_table(DelayLevels("1s 1s 1s 1s"), broker.clock.now_ms())
        broker.schedule(4, b"soon")
        broker.pass_time(2000)
        assert broker.bodies() == [b"soon"]
    expected = queue.next_offset
    while broker.levels.hand_over_next():
        pass
    broker.close()
    root = broker.root
    for number in range(times):
        run(root, tmp_path / f"new {number}")
        root = tmp_path / f"new {number}"
    after = Broker(root, broker.clock)
    assert after.levels.levels[4].queue.next_offset == expected
    after.close()


def test_index_files_find_every_key(tmp_path: Path) -> None:
    broker = busy(tmp_path / "old")
    broker.close()
    result = run(tmp_path / "old", tmp_path / "new")
    assert result.index_files == 1
    after = Broker(tmp_path / "new", broker.clock)
    (path,) = (tmp_path / "new/index").iterdir()
    assert path.stat().st_size == 420_000_040
    found = query(path, "plain#b3")
    bodies = []
    for physical in found:
        message = after.store.message_at(physical)
        assert message is not None
        bodies.append(message.body)
    assert sorted(bodies) == sorted(b"p%d" % i * 20 for i in range(120) if i % 7 == 3)
    (offset,) = query(path, "orders#T7")
    message = after.store.message_at(offset)
    assert message is not None
    assert message.body == b"timer7" * 30
    assert query(path, "plain#T7") == []
    after.close()


def query(path: Path, key: str) -> list[int]:
    """The physical offsets that an index file has for a key, newest first, as RocketMQ looks them up."""
    value = 0
    for char in key:
        value = (value * 31 + ord(char)) & 0xFFFFFFFF
    value = abs(value - (1 << 32) if value >> 31 else value)
    with path.open("rb") as file:

        def integer(at: int, size: int = 4) -> int:
            file.seek(at)
            return int.from_bytes(file.read(size), "big", signed=True)

        at, found = integer(40 + value % 5_000_000 * 4), []
        while at:
            item = 40 + 20_000_000 + at * 20
            if integer(item) == value:
                found.append(integer(item + 4, 8))
            at = integer(item + 16)
        return found


# --- refusals and interruptions


def refused(root: Path, out: Path, **options: object) -> str:
    before = tree(root) if root.exists() else {}
    listing = sorted(os.listdir(out.parent))
    with pytest.raises(JobError) as caught:
        run(root, out, **options)
    assert "\n" not in str(caught.value)
    if before:
        assert tree(root) == before
    assert sorted(os.listdir(out.parent)) == listing
    return str(caught.value)


def test_a_store_that_a_broker_has_open_is_refused(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from tests.unit.spark_jobs.compact_world import new_broker\n"
        "broker = new_broker(Path(sys.argv[1])); broker.send('T', b'x'); print('up', flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path / "old")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        while process.stdout.readline() not in (b"up\n", b""):
            pass
        assert "a broker has this store open" in refused_while_running(tmp_path)
    finally:
        process.kill()
        process.wait()
    assert "not stopped in order" in refused_while_running(tmp_path)


def refused_while_running(tmp_path: Path) -> str:
    with pytest.raises(JobError) as caught:
        run(tmp_path / "old", tmp_path / "new")
    assert not (tmp_path / "new").exists()
    return str(caught.value)


def test_what_cannot_be_done_is_refused_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broker = new_broker(tmp_path / "old")
    broker.send("T", b"x")
    broker.close()
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").write_text("x")
    assert "not empty" in refused(tmp_path / "old", tmp_path / "full")
    assert "lies in the store" in refused(tmp_path / "old", tmp_path / "old/new")
    assert "no such directory" in refused(tmp_path / "none", tmp_path / "new")
    (tmp_path / "old/batchconsumequeue/T/0").mkdir(parents=True)
    assert "not understood" in refused(tmp_path / "old", tmp_path / "new")
    subprocess.run(["rm", "-r", str(tmp_path / "old/batchconsumequeue")], check=True)
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1000))
    assert "are needed there" in refused(tmp_path / "old", tmp_path / "new")


def test_what_has_no_contents_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The other files of a store are copied through links; a FIFO or a link to nothing ended the run at its last
    step."""
    new_broker(tmp_path / "old", 1 << 20).close()
    folder = tmp_path / "old/config/kept"
    folder.mkdir()
    (folder / "file").write_bytes(b"content")
    (folder / "link").symlink_to("file")
    (folder / "nowhere").symlink_to("missing")
    os.mkfifo(folder / "fifo")
    result = run(tmp_path / "old", tmp_path / "new")
    assert result.left_out == ["config/kept/fifo", "config/kept/nowhere"]
    assert sorted(os.listdir(tmp_path / "new/config/kept")) == ["file", "link"]
    assert (tmp_path / "new/config/kept/link").read_bytes() == b"content"
    print_compacted(result)
    assert "config/kept/fifo is a FIFO, a socket, a device or a link to nothing" in capsys.readouterr().out


@pytest.mark.parametrize("leads_to", [".", "..", "../..", "/", "../../new.partial", "back"])
def test_a_circle_of_links_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leads_to: str) -> None:
    """A link to the directory that it lies in was followed, and the store copied into itself until the disk was
    full."""
    new_broker(tmp_path / "old", 1 << 20).close()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/up").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "old/config/back").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "old/config/a").symlink_to(leads_to)
    monkeypatch.setattr(compacting, "plan", lambda *_: pytest.fail("the work began"))
    with pytest.raises(JobError) as found:
        compact(str(tmp_path / "old"), str(tmp_path / "new"), workers=1)
    where = "old/config/a/up" if leads_to == "back" else "old/config/a"
    assert str(found.value).startswith(f"{tmp_path}/{where}: is a link to ")
    assert "has this link or the new store in it, so a copy would have no end; remove the link" in str(found.value)
    assert len(str(found.value).splitlines()) == 1
    assert sorted(os.listdir(tmp_path)) == ["elsewhere", "old"]


def test_links_to_other_directories_are_followed(tmp_path: Path) -> None:
    new_broker(tmp_path / "old", 1 << 20).close()
    (tmp_path / "elsewhere/folder").mkdir(parents=True)
    (tmp_path / "elsewhere/folder/file").write_bytes(b"content")
    (tmp_path / "elsewhere/again").symlink_to("folder")
    (tmp_path / "elsewhere").chmod(0o555)
    (tmp_path / "old/config/kept").symlink_to(tmp_path / "elsewhere")
    run(tmp_path / "old", tmp_path / "new")
    kept = tmp_path / "new/config/kept"
    assert not kept.is_symlink()
    assert kept.stat().st_mode & 0o777 == 0o555
    assert (kept / "folder/file").read_bytes() == (kept / "again/file").read_bytes() == b"content"


def test_a_file_that_cannot_be_copied_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writing to a descriptor fails without a file's name."""
    new_broker(tmp_path / "old", 1 << 20).close()
    (tmp_path / "old/config/kept").write_bytes(b"content")

    def fail(source: str, target: str) -> None:
        if source.endswith("kept"):
            raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(shutil, "copy2", fail)
    with pytest.raises(
        JobError, match=r"^[^ ]*/old/config/kept: cannot be copied to .*/config/kept: Invalid argument$"
    ):
        compact(str(tmp_path / "old"), str(tmp_path / "new"), workers=1)
    (tmp_path / "old/config/kept").unlink()
    (tmp_path / "old/config/kept").symlink_to("kept")
    with pytest.raises(JobError, match=r"^[^ ]*/old/config/kept: is a link that leads back to itself"):
        compact(str(tmp_path / "old"), str(tmp_path / "new"), workers=1)


def test_an_empty_directory_is_a_target(tmp_path: Path) -> None:
    broker = new_broker(tmp_path / "old")
    broker.send("T", b"x")
    broker.close()
    (tmp_path / "new").mkdir()
    run(tmp_path / "old", tmp_path / "new")
    assert Broker(tmp_path / "new", broker.clock).bodies("T", 0) == [b"x"]
    assert sorted(os.listdir(tmp_path)) == ["new", "old"]


def test_what_is_damaged_is_refused_or_left_out(tmp_path: Path) -> None:
    broker = new_broker(tmp_path / "old")
    offsets = [broker.send("T", b"m%d" % i * 10) for i in range(300)]
    broker.close()
    path = tmp_path / "old/commitlog" / f"{0:020}"
    with path.open("r+b") as file:
        file.seek(offsets[5] + 4)
        file.write(b"\xff" * 20)
    assert f"damaged at {offsets[5]}" in refused(tmp_path / "old", tmp_path / "new")
    result = run(tmp_path / "old", tmp_path / "new", skip_damaged=True)
    assert (result.damaged, result.kept, result.holes) == (1, 299, 1)
    after = Broker(tmp_path / "new", broker.clock)
    assert list(after.messages("T", 0)) == [i for i in range(300) if i != 5]
    after.close()


STEPS = (
    "_scan",
    "_decide",
    "_lay_out",
    "_map",
    "_write_log",
    "_write_queues",
    "_write_index",
    "_write_small",
)


class Closed(NamedTuple):
    """A store that `busy` made, closed, and its files."""

    root: Path
    clock: ManualClock
    files: dict[str, tuple[int, dict[int, bytes]]]

    def copy(self, target: Path) -> ManualClock:
        """Copy the store; return a clock that shows its time."""
        copy_tree(self.root, target)
        return ManualClock(self.clock.now_ms())


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory) -> Closed:
    root = tmp_path_factory.mktemp("busy") / "store"
    broker = busy(root)
    broker.close()
    return Closed(root, broker.clock, tree(root))


@pytest.mark.parametrize("step", STEPS)
def test_a_failure_at_any_step_leaves_nothing_and_a_second_run_succeeds(
    closed: Closed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    clock = closed.copy(tmp_path / "old")
    original = getattr(compacting._Compaction, step)

    def fails(self: object, *args: object) -> None:
        original(self, *args)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(compacting._Compaction, step, fails)
    with pytest.raises(JobError, match="No space left on device"):
        run(tmp_path / "old", tmp_path / "new")
    monkeypatch.undo()
    assert sorted(os.listdir(tmp_path)) == ["old"]
    assert tree(tmp_path / "old") == closed.files
    run(tmp_path / "old", tmp_path / "new")
    after = Broker(tmp_path / "new", clock)
    assert len(after.bodies()) == 240
    after.close()


def compact_and_die(step: str, old: str, new: str) -> None:
    """Compact, and be killed after that step."""

    def dies(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if step == "finish":
        os.rename = dies  # type: ignore[assignment]
    else:
        original = getattr(compacting._Compaction, step)

        def dies_after(self: object, *args: object) -> None:
            original(self, *args)
            dies()

        setattr(compacting._Compaction, step, dies_after)
    compact(old, new, workers=1)


@pytest.mark.parametrize("step", [*STEPS, "finish"])
def test_a_kill_at_any_step_leaves_the_original_and_a_second_run_succeeds(
    closed: Closed, tmp_path: Path, step: str
) -> None:
    clock = closed.copy(tmp_path / "old")
    assert exit_code(compact_and_die, step, str(tmp_path / "old"), str(tmp_path / "new")) == -signal.SIGKILL
    assert not (tmp_path / "new").exists()
    assert tree(tmp_path / "old") == closed.files
    run(tmp_path / "old", tmp_path / "new")
    assert sorted(os.listdir(tmp_path)) == ["new", "old"]
    after = Broker(tmp_path / "new", clock)
    assert len(after.bodies()) == 240
    after.close()


def test_two_runs_to_one_directory_do_not_meet(tmp_path: Path) -> None:
    from duemq.spark_jobs.writers.new_directory import NewDirectory

    first, second = NewDirectory(str(tmp_path / "new")), NewDirectory(str(tmp_path / "new"))
    first.begin()
    with pytest.raises(JobError, match="another run"):
        second.begin()
    second.give_up()
    assert (tmp_path / "new.partial").exists()
    first.give_up()
    assert os.listdir(tmp_path) == []


def test_processes_do_as_one_does(tmp_path: Path) -> None:
    busy(tmp_path / "old").close()
    alone = run(tmp_path / "old", tmp_path / "one")
    seen: list[tuple[int, int]] = []
    together = compact(
        str(tmp_path / "old"), str(tmp_path / "two"), workers=2, progress=lambda done, total: seen.append((done, total))
    )
    assert (together.kept, together.removed) == (alone.kept, alone.removed)
    one, two = tree(tmp_path / "one"), tree(tmp_path / "two")
    for name in one:
        if not name.startswith("index/"):
            assert one[name] == two[name], name
    assert seen[-1][0] == seen[-1][1]
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_units_of_what_is_gone(tmp_path: Path) -> None:
    broker = new_broker(tmp_path / "old")
    for _ in range(QUEUE_UNITS + 7):
        broker.schedule(1, b"x")
    broker.pass_time(3000)
    broker.schedule(4, b"cancelled")
    offsets = [broker.schedule(4, b"y") for _ in range(4)]
    broker.cancel(offsets[1])
    broker.close()
    run(tmp_path / "old", tmp_path / "new")
    store = StoreFiles.open(str(tmp_path / "new"))
    files = {(f.topic, f.queue_id, f.first_unit): store.units(f) for f in store.queue_files()}
    delivered = files["SCHEDULE_TOPIC_XXXX", 0, QUEUE_UNITS]
    assert delivered["physical_offset"].tolist() == [SEGMENT - 1] * 7
    assert delivered["size"].tolist() == [WITHDRAWN_SIZE] * 7
    assert ("SCHEDULE_TOPIC_XXXX", 0, 0) not in files
    waiting = files["SCHEDULE_TOPIC_XXXX", 3, 0]
    assert waiting["size"].tolist()[2] == WITHDRAWN_SIZE
    assert waiting["physical_offset"][2] == waiting["physical_offset"][3]
    assert (np.diff(waiting["physical_offset"]) >= 0).all()
    assert PADDING_SIZE not in waiting["size"]


operations = st.lists(
    st.one_of(
        st.tuples(st.just("plain"), st.integers(0, 3000)),
        st.tuples(st.just("level"), st.integers(1, 4)),
        st.tuples(st.just("timer"), st.integers(100, 200_000)),
        st.tuples(st.just("cancel"), st.integers(0, 20)),
        st.tuples(st.just("wait"), st.integers(1, 60_000)),
        st.tuples(st.just("restart"), st.just(0)),
    ),
    max_size=40,
)


@examples(1 / 4)
@given(operations, st.booleans(), st.integers(0, 1))
def test_a_broker_does_with_the_new_store_what_it_does_with_the_old(
    tmp_path_factory: pytest.TempPathFactory, drawn: list[tuple[str, int]], is_foreign: bool, times: int
) -> None:
    tmp_path = tmp_path_factory.mktemp("any")
    broker = new_broker(tmp_path / "old")
    broker.send("first", b"")
    waiting: list[int] = []
    for number, (what, value) in enumerate(drawn):
        body = b"%s %d " % (what.encode(), number)
        if what == "plain":
            broker.send("plain", body + bytes(value), f"KEYS\x01{value}")
        elif what == "level":
            waiting.append(broker.schedule(value, body))
        elif what == "timer":
            waiting.append(broker.timer(broker.clock.now_ms() + value, body))
        elif what == "cancel" and waiting:
            broker.run()
            broker.timers.changes.cancel(waiting[value % len(waiting)], broker.clock.now_ms())
        elif what == "wait":
            broker.pass_time(value)
        elif what == "restart":
            broker.close()
            broker = Broker(tmp_path / "old", broker.clock)
    broker.close()
    if is_foreign:
        as_apache(tmp_path / "old")
    run(tmp_path / "old", tmp_path / "new")
    for number in range(times):
        run(tmp_path / "new", tmp_path / f"again{number}")
        (tmp_path / "new").rename(tmp_path / f"before{number}")
        (tmp_path / f"again{number}").rename(tmp_path / "new")
    outcomes = []
    for name in ("old", "new"):
        after = Broker(tmp_path / name, ManualClock(broker.clock.now_ms()))
        assert not after.recovered.rebuilt
        after.schedule(1, b"another level")
        after.timer(after.clock.now_ms() + 500, b"another timer")
        after.pass_time(2 * HOUR_MS)
        ends = {
            (topic, queue_id): queue.next_offset
            for topic, queues in after.store.queues.items()
            for queue_id, queue in queues.items()
            # Withdrawn units at the end of a level's queue are cut off when a store opens; those of a queue without any
            # record left are not.
            if topic != SCHEDULE_TOPIC
        }
        messages = {(offset, message.body) for offset, message in after.messages("plain", 0).items()}
        outcomes.append((sorted(after.bodies()), messages, ends))
        after.close()
    assert outcomes[0] == outcomes[1]
