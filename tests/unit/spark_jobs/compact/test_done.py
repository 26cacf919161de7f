"""A message that is done, and that a compaction keeps, stays done: for the audit, for `duemq store repair`, and for a
broker that makes the queues again."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from duemq.broker.repair.repair import repair
from duemq.scheduler.timers.config import Cancelled
from duemq.spark_jobs.audit.audit import Audit, Summary, summarise
from duemq.spark_jobs.audit.shuffle import Here
from duemq.spark_jobs.compact.compact import CompactOptions, CompactResult, compact
from duemq.spark_jobs.store.store_files import StoreFiles
from duemq.storage.clock import look
from tests.support.copies import copy_tree
from tests.support.messages import HOST
from tests.unit.broker.commands.test_repair import PREPARED_AT, SETTINGS
from tests.unit.spark_jobs.compact_world import START_MS, TABLE, Broker, as_apache, new_broker

HOUR_MS = 3_600_000


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Match without Spark, and remove the directory, as copies of stores are large."""
    monkeypatch.setattr(Audit, "_shuffle", lambda _: Here())
    yield
    Broker.let_go_of_all()
    shutil.rmtree(tmp_path)


def run(root: Path, **options: object) -> CompactResult:
    """Compact a store into the directory `new` beside it."""
    given = CompactOptions(range_size=4 << 20, index=False, **options)  # type: ignore[arg-type]
    return compact(str(root), str(root.parent / "new"), workers=1, options=given)


def audited(root: Path) -> Summary:
    """The audit of a store."""
    found = Audit(lambda: pytest.fail("Spark was wanted"), str(root), delay_levels=TABLE.text)
    return summarise(found)


def deliver_now(broker: Broker, physical_offset: int, *, later_ms: int = 0) -> None:
    """Reschedule a waiting message, by default to now."""
    broker.run()
    now = broker.clock.now_ms()
    assert broker.timers.changes.reschedule(physical_offset, now + later_ms, now) is Cancelled.CANCELLED


def arrive(root: Path, broker: Broker) -> list[bytes]:
    """Return all messages that ever arrive in `orders` when a broker starts on a copy of the store and goes on until
    nothing waits."""
    copy = root.parent / f"{root.name} started"
    copy_tree(root, copy)
    after = Broker(copy, broker.clock)
    after.pass_time(3 * HOUR_MS)
    after.close()
    return sorted(after.bodies())


def made_again(root: Path, broker: Broker) -> list[bytes]:
    """Return the same as `arrive` for a copy that has lost its queues."""
    copy = root.parent / f"{root.name} bare"
    copy_tree(root, copy)
    shutil.rmtree(copy / "consumequeue")
    (copy / "queuecheck").unlink(missing_ok=True)
    found = arrive(copy, broker)
    repair(str(copy), now=look(broker.clock), settings=SETTINGS)
    shutil.rmtree(root.parent / f"{copy.name} started")
    assert arrive(copy, broker) == found
    return found


def wrong_to_repair(root: Path, broker: Broker) -> list[str]:
    """The differences that a repair would make in the queues and the timer log."""
    report = repair(str(root), now=look(broker.clock), settings=SETTINGS, dry_run=True)
    return [str(each) for each in report.differences if not each.path.startswith("config/")]


@pytest.mark.parametrize("what", ["cancelled", "at once", "rescheduled", "rescheduled and cancelled", "twice"])
@pytest.mark.parametrize("is_level", [True, False], ids=["level", "timer"])
def test_the_last_of_a_queue(tmp_path: Path, what: str, is_level: bool) -> None:
    broker = new_broker(tmp_path / "old")
    broker.send("plain", b"first")
    due = START_MS + HOUR_MS

    def wait(body: bytes) -> int:
        return broker.schedule(4, body, body.decode()) if is_level else broker.timer(due, body, body.decode())

    wait(b"A")
    broker.clock.advance(10)
    gone = wait(b"gone")
    broker.clock.advance(10)
    last = wait(b"B")
    broker.cancel(gone)
    if what == "cancelled":
        broker.cancel(last)
    elif what == "at once":
        deliver_now(broker, last)
    else:
        deliver_now(broker, last, later_ms=2000)
        if what == "rescheduled and cancelled":
            broker.cancel(broker.store.log.end - size_of_last(broker))
        elif what == "twice":
            deliver_now(broker, broker.store.log.end - size_of_last(broker))
    broker.pass_time(10_000)
    for body in (b"another", b"one more"):
        broker.timer(due + 1000, body, body.decode())
        broker.run()
    broker.close()
    before = audited(tmp_path / "old")
    expected = arrive(tmp_path / "old", broker)
    assert expected.count(b"B") == (what not in ("cancelled", "rescheduled and cancelled"))
    run(tmp_path / "old")
    new = tmp_path / "new"
    after = audited(new)
    assert (after.pending, after.lost, after.twice, after.destroyed) == (before.pending, 0, 0, 0)
    assert wrong_to_repair(new, broker) == []
    assert arrive(new, broker) == expected
    assert made_again(new, broker) == expected


def size_of_last(broker: Broker) -> int:
    """Bytes of the record at the end of the log."""
    return broker.store.log.end - broker.store.appender.last_physical_offset


@pytest.mark.parametrize("is_keyed", [False, True], ids=["expired", "superseded"])
def test_the_delivery_of_a_record_that_stays_does_not_go(tmp_path: Path, is_keyed: bool) -> None:
    """The delivery of a kept record is kept as well, even if it is too old, or another message of its key is newer."""
    broker = new_broker(tmp_path / "old")
    broker.schedule(4, b"far", "far")
    now = broker.schedule(4, b"now", "now")
    deliver_now(broker, now)
    broker.pass_time(10_000)
    for number in range(20):
        broker.send("orders", b"%d" % number, "KEYS\x01k\x02UNIQ_KEY\x01u", 3)
    broker.clock.advance(HOUR_MS // 2)
    broker.send("orders", b"young", "KEYS\x01k\x02UNIQ_KEY\x01u", 3)
    broker.close()
    options = {"keyed_topics": ("orders",)} if is_keyed else {"reserved_hours": 0.25, "now_ms": broker.clock.now_ms()}
    run(tmp_path / "old", **options)
    new = tmp_path / "new"
    after = audited(new)
    assert (after.pending, after.lost, after.twice) == (1, 0, 0)
    assert wrong_to_repair(new, broker) == []
    found = made_again(new, broker)
    assert found.count(b"now") == 1
    assert found.count(b"far") == 1
    assert found == arrive(new, broker)


def as_lost(root: Path, level: int, offset: int) -> None:
    """Make the store as RocketMQ's broker leaves it, with a level's progress beyond its deliveries; records then name
    no origins."""
    store = StoreFiles.open(str(root))
    for segment in store.segments:
        with (root / segment.path).open("r+b") as file:
            for records in store.chunks(segment.first_offset, min(segment.end, store.readable_end)):
                for at in records.physical_offset.tolist():
                    file.seek(at - segment.first_offset + PREPARED_AT)
                    file.write(bytes(8))
    as_apache(root)
    path = root / "config" / "delayOffset.json"
    table = json.loads(path.read_text())["offsetTable"]
    path.write_text(json.dumps({"offsetTable": table | {str(level): offset}}))


@pytest.mark.parametrize("reserved_hours", [None, 0.0], ids=["all stay", "expired go"])
def test_what_the_broker_passed_and_did_not_deliver_stays(tmp_path: Path, reserved_hours: float | None) -> None:
    broker = new_broker(tmp_path / "old")
    for number in range(10):
        broker.schedule(1, b"done %d" % number, f"done{number}")
    broker.pass_time(3000)
    lost = {f"lost{number}" for number in range(7)}
    for key in sorted(lost):
        broker.schedule(4, key.encode(), key)
    broker.schedule(4, b"waits", "waits")
    broker.timer(broker.clock.now_ms() + 2000, b"a timer", "a timer")
    broker.pass_time(5000)
    broker.close()
    as_lost(tmp_path / "old", 4, 7)
    before = audited(tmp_path / "old")
    assert (before.lost, before.pending, before.delivered) == (7, 1, 11)
    result = run(tmp_path / "old", reserved_hours=reserved_hours, now_ms=broker.clock.now_ms() + 1)
    # The last record of the timer topic stays, so that its queue ends where it did, and its delivery with it.
    assert (result.lost, result.removed["delivered"]) == (7, 10)
    after = audited(tmp_path / "new")
    assert (after.lost, after.pending, after.twice) == (7, 1, 0)
    assert {each.unique_key for each in after.offenders if each.what == "lost"} == lost
    repair(str(tmp_path / "new"), now=look(broker.clock), settings=SETTINGS)
    found = arrive(tmp_path / "new", broker)
    assert sorted(body for body in found if body.startswith((b"lost", b"waits"))) == sorted(
        [*(key.encode() for key in lost), b"waits"]
    )
    assert found.count(b"a timer") == 1


def test_a_message_that_is_not_in_the_timer_log_any_more_stays(tmp_path: Path) -> None:
    broker = new_broker(tmp_path / "old")
    for number in range(400):
        broker.timer(START_MS + HOUR_MS + number, b"%d" % number, str(number))
    broker.run()
    broker.close()
    as_lost(tmp_path / "old", 4, 0)
    first, *_ = sorted((tmp_path / "old" / "timerlog").iterdir())
    first.write_bytes(bytes(first.stat().st_size))
    before = audited(tmp_path / "old")
    result = run(tmp_path / "old")
    assert result.removed == {}
    assert audited(tmp_path / "new").pending == before.pending == 400


@pytest.mark.parametrize("how", ["expired", "compacted"])
def test_deliveries_by_rocketmq_whose_messages_are_gone_are_no_offenders(tmp_path: Path, how: str) -> None:
    broker = new_broker(tmp_path / "old")
    for number in range(150):
        broker.schedule(1, b"l" * 300, f"level{number}")
        broker.timer(broker.clock.now_ms() + 2000, b"t" * 300, f"timer{number}")
    broker.pass_time(3000)
    broker.timer(broker.clock.now_ms() + HOUR_MS, b"waits", "waits")
    broker.run()
    broker.close()
    root = tmp_path / "old"
    as_lost(root, 1, 150)
    before = audited(root)
    assert (before.delivered, before.unclaimed, before.expired, before.lost) == (300, 0, 0, 0)
    if how == "expired":
        (root / "commitlog" / f"{0:020}").unlink()
    else:
        run(root)
        root = tmp_path / "new"
    after = audited(root)
    assert after.expired > 90
    assert (after.unclaimed, after.lost, after.twice, after.destroyed) == (0, 0, 0, 0)
    assert after.expired + after.delivered == 300


def test_a_delivery_of_what_never_was_scheduled_is_unclaimed_still(tmp_path: Path) -> None:
    """A delivery of a message that never was scheduled stays unclaimed, also after files expired and after a
    compaction, if it came since."""
    broker = new_broker(tmp_path / "old")
    for number in range(150):
        broker.schedule(1, b"l" * 300, f"level{number}")
        broker.send("plain", b"x" * 300)
    broker.pass_time(3000)
    broker.close()
    as_lost(tmp_path / "old", 1, 150)
    run(tmp_path / "old")
    broker = Broker(tmp_path / "new", broker.clock)
    broker.clock.advance(60_000)
    text = "DELAY\x011\x02UNIQ_KEY\x01phantom\x02REAL_TOPIC\x01orders\x02REAL_QID\x013"
    appender = broker.store.appender
    appender.begin(broker.clock.now_ms())
    born_ms = broker.clock.now_ms() - 5000
    appender.add(broker.store.ensure_queue("orders", 3), b"x", text.encode(), 0, born_ms, HOST, 8, 0, 0, 0)
    appender.commit()
    broker.close()
    after = audited(tmp_path / "new")
    assert (after.unclaimed, after.lost) == (1, 0)
    assert after.expired == 150
