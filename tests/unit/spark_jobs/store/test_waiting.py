"""The jobs list the same waiting messages as a broker that opens the same bytes."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from structlog.testing import capture_logs

from duemq.protocol.records.timer_properties import out_ms
from duemq.protocol.topics import SCHEDULE_TOPIC, TIMER_TOPIC
from duemq.scheduler.search import Selection, WaitingMessage, WaitingMessages
from duemq.scheduler.timers.policy.policies import TimerPolicy
from duemq.spark_jobs.compact.compact import CompactOptions, compact
from duemq.spark_jobs.store.progress import destroyed, read_progress, waiting
from duemq.spark_jobs.store.store_files import StoreFiles
from duemq.storage.clock import look
from tests.support.copies import copy_tree
from tests.unit.spark_jobs.compact_world import SEGMENT, START_MS, Broker, as_apache, new_broker

HOUR_MS = 3_600_000


def jobs_say(root: Path) -> set[int]:
    """Physical offsets of the waiting messages, by the jobs."""
    store = StoreFiles.open(str(root))
    found = waiting(store)
    assert (np.diff(found.offsets) > 0).all()
    return set(found.offsets.tolist())


def broker_says(broker: Broker) -> set[int]:
    """Physical offsets of the waiting messages, by an open broker."""
    pending = WaitingMessages(broker.store, broker.timers, broker.levels)
    found = [each for each in pending.select(Selection(), broker.clock.now_ms()) if isinstance(each, WaitingMessage)]
    offsets = [each.message.physical_offset for each in found]
    assert len(offsets) == len(set(offsets))
    return set(offsets)


def killed(broker: Broker, name: str) -> Broker:
    """Start a broker after a kill -9, in a copy of the store, and check that it and the jobs list the same messages."""
    root = broker.root.parent / name
    copy_tree(broker.root, root)
    said = jobs_say(root)
    after = Broker(root, broker.clock)
    assert said == broker_says(after)
    return after


def test_what_was_delivered_before_two_kills(tmp_path: Path) -> None:
    """Messages delivered before two kills do not wait: the second start knows of them by the note alone."""
    broker = new_broker(tmp_path / "old")
    far = {broker.schedule(4, b"far"), broker.timer(START_MS + 3_600_000, b"far")}
    for number in range(20):
        broker.schedule(1, b"soon")
        broker.timer(START_MS + 1500 + number, b"soon")
    broker.run()
    broker.owned.checkpoint()
    broker.pass_time(1510)
    after = killed(broker, "once")
    assert len(after.bodies()) == 31
    after.owned.checkpoint()
    again = killed(after, "twice")
    left = broker_says(again)
    assert len(left) == 11
    assert far < left


def test_compaction_takes_no_message_for_one_that_was_delivered(tmp_path: Path) -> None:
    """A compaction takes no message for a delivered one, although the offsets of messages delivered ahead of the
    cursors are those of the old store."""
    broker = new_broker(tmp_path / "old")
    while broker.store.log.end % SEGMENT < SEGMENT - 150:
        broker.send("plain", b"expires")
    broker.clock.advance(5 * HOUR_MS)
    assert broker.schedule(4, b"long") == SEGMENT, "where the new store begins"
    for _ in range(30):
        broker.schedule(1, b"soon")
    for _ in range(60):
        broker.schedule(3, b"late")
    broker.owned.checkpoint()
    broker.pass_time(1500)
    after = killed(broker, "once")
    after.close()
    options = CompactOptions(reserved_hours=1, now_ms=broker.clock.now_ms())
    compact(str(after.root), str(tmp_path / "new"), workers=1, options=options)
    new = Broker(tmp_path / "new", broker.clock)
    assert len(broker_says(new)) == 61
    new.pass_time(3_700_000)
    assert sorted(new.bodies())[-91:] == sorted([b"long"] + [b"late"] * 60 + [b"soon"] * 30)


def test_what_was_sent_and_cancelled_just_before_a_kill(tmp_path: Path) -> None:
    """Messages sent and cancelled just before a kill do not wait, although their units are in memory only: the records
    that cancel are written at once."""
    broker = new_broker(tmp_path / "old")
    first = [broker.timer(START_MS + 60_000 * number, b"t") for number in range(1, 5)]
    first += [broker.schedule(4, b"l") for _ in range(3)]
    broker.run()
    broker.owned.checkpoint()
    assert len(broker_says(killed(broker, "noted"))) == 7
    broker.cancel(first[0])
    broker.cancel(first[4])
    broker.timer(START_MS + 90_000, b"new")
    broker.schedule(3, b"new")
    after = killed(broker, "changed")
    assert len(broker_says(after)) == 7
    assert not {first[0], first[4]} & broker_says(after)


def test_a_timer_log_that_was_lost(tmp_path: Path) -> None:
    """After the loss of a timer log the broker asks all records, and so do the jobs."""
    broker = new_broker(tmp_path / "old")
    for number in range(1, 40):
        broker.timer(START_MS + 1000 * number, b"t")
    broker.pass_time(10_500)
    broker.close()
    for name, damage in (("gone", None), ("zeros", bytes(5200)), ("flipped", b"\1")):
        root = tmp_path / name
        copy_tree(broker.root, root)
        (path,) = (root / "timerlog").iterdir()
        if damage is None:
            path.unlink()
        else:
            path.write_bytes(damage + path.read_bytes()[len(damage) :])
        said = jobs_say(root)
        assert len(said) == 29, name
        assert said == broker_says(Broker(root, broker.clock)), name


@pytest.mark.parametrize("is_in_wheel", [True, False])
def test_compaction_delivers_nothing_once_more(tmp_path: Path, *, is_in_wheel: bool) -> None:
    """A compaction leads to no second delivery, although the last record of the timer topic stays when it is delivered,
    in a slot that is not past yet, or before the checkpoint had it in the wheel: a broker that is stopped at once after
    a kill leaves it so."""
    broker = new_broker(tmp_path / "old")
    broker.timer(START_MS + HOUR_MS, b"far")
    for number in range(5):
        broker.timer(START_MS + 1500 + number, b"soon")
    if is_in_wheel:
        broker.run()
    broker.owned.checkpoint()
    broker.pass_time(1600)
    copy_tree(broker.root, tmp_path / "killed")
    after = Broker(tmp_path / "killed", broker.clock)
    after.owned.stop()
    after.timers.close()
    compact(str(after.root), str(tmp_path / "new"), workers=1)
    new = Broker(tmp_path / "new", broker.clock)
    assert len(broker_says(new)) == 1
    new.pass_time(2 * HOUR_MS)
    assert sorted(new.bodies()) == [b"far"] + [b"soon"] * 5


def test_rocketmq_deletes_in_one_slot_only(tmp_path: Path) -> None:
    """RocketMQ's mark deletes in one slot only, as its broker does when the slot comes."""
    broker = new_broker(tmp_path / "old")
    due = START_MS + 60_000
    here, there = broker.timer(due, b"here", "a"), broker.timer(due, b"there", "b")
    for key, ms in (("a", due), ("b", due + 5000)):
        text = f"TIMER_DEL_UNIQKEY\x01orders+{key}\x02UNIQ_KEY\x01{key}\x02TIMER_OUT_MS\x01{out_ms(ms)}\x02"
        broker.send(TIMER_TOPIC, b"x", text + "REAL_TOPIC\x01orders\x02REAL_QID\x010")
    broker.run()
    broker.close()
    as_apache(broker.root)
    assert jobs_say(broker.root) == {there}
    after = Broker(broker.root, broker.clock)
    assert broker_says(after) == {here, there}, "the slot has not had its turn"
    after.pass_time(70_000)
    assert after.bodies() == [b"there"]


@pytest.mark.parametrize("policy", [TimerPolicy(is_paused=True), TimerPolicy(spread_ms=60_000)])
def test_what_a_policy_holds_is_not_lost_in_a_store_that_rocketmq_had_since(
    tmp_path: Path, policy: TimerPolicy
) -> None:
    """Messages held by a policy are not lost in a store that RocketMQ had since: their units still show them, though no
    note does."""
    broker = new_broker(tmp_path / "old")
    held = [broker.timer(START_MS + 1500 + number, b"held") for number in range(3)]
    broker.timers.set_policy("orders", policy)
    broker.pass_time(9000)
    broker.close()
    delivered = len(broker.bodies())
    as_apache(broker.root)
    known, slot = read_progress(StoreFiles.open(str(broker.root))), np.full(3, (START_MS + 1500) // 1000)
    assert slot[0] < known.timer_second
    done = known.is_timer_done(slot, np.arange(3), np.array(held)).tolist()
    assert done == [True] * delivered + [False] * (3 - delivered)
    assert jobs_say(broker.root) == set(held[delivered:])


def test_what_a_paused_topic_holds_is_not_lost(tmp_path: Path) -> None:
    """Messages held by a paused topic are not lost, although they wait until a time that is not in their record, in
    slots later than that time."""
    broker = new_broker(tmp_path / "old")
    held = broker.timer(START_MS + 1500, b"held")
    broker.timer(START_MS + 8500, b"other", topic="other")
    broker.timers.set_policy("orders", TimerPolicy(is_paused=True))
    broker.pass_time(9000)
    broker.owned.checkpoint()
    store = StoreFiles.open(str(broker.root))
    known, slot = read_progress(store), np.array([(START_MS + 1500) // 1000])
    assert jobs_say(broker.root) == {held}
    assert slot[0] < known.timer_second
    assert known.timer_queue_offset == 2
    assert known.is_timer_done(slot, np.array([0]), np.array([held])).tolist() == [False]


def test_what_was_put_off_to_the_second_that_is_read_is_not_lost(tmp_path: Path) -> None:
    """A message that was put off to the second being read is not lost: its topic was paused then, and a later start
    does not know that."""
    broker = new_broker(tmp_path / "old")
    sent = [broker.timer(START_MS + 1500 + number, b"put off") for number in range(20)]
    broker.timers.set_policy("orders", TimerPolicy(spread_ms=2000))
    broker.pass_time(1700)
    broker.timers.set_policy("orders", TimerPolicy(is_paused=True))
    broker.pass_time(600)
    broker.close()
    as_apache(broker.root)
    after = Broker(broker.root, broker.clock)
    after.owned.checkpoint()
    waits = jobs_say(after.root)
    assert waits == broker_says(after)
    known, slot = read_progress(StoreFiles.open(str(after.root))), np.full(20, (START_MS + 1499) // 1000)
    assert slot[0] < known.timer_second
    done = known.is_timer_done(slot, np.arange(20), np.array(sent)).tolist()
    assert waits == {offset for offset, is_done in zip(sent, done, strict=True) if not is_done}


def test_a_kill_while_a_damaged_queue_is_made_again(tmp_path: Path) -> None:
    """After a kill while a damaged queue is made again the checkpoint says that this has to be done again: then all
    records decide."""
    broker = new_broker(tmp_path / "old")
    broker.timer(START_MS + 60_000, b"t")
    broker.schedule(4, b"l")
    for number in range(1, 5):
        broker.timer(START_MS + 1000 * number, b"soon")
    broker.pass_time(5000)
    broker.owned.checkpoint()
    broker.owned.checkpoint()
    broker.store.remake([(SCHEDULE_TOPIC, 3, 0)])
    path = tmp_path / "old" / "consumequeue" / SCHEDULE_TOPIC / "3" / f"{0:020}"
    path.write_bytes(bytes(path.stat().st_size))
    assert len(broker_says(killed(broker, "killed"))) == 2


def test_what_came_back_from_a_pause_just_before_a_kill(tmp_path: Path) -> None:
    """Messages that came back from a pause just before a kill wait: the units of their delivery are cut off, and those
    from the pause lie ahead."""
    broker = new_broker(tmp_path / "old")
    broker.timers.set_policy("orders", TimerPolicy(is_paused=True))
    for number in range(20):
        broker.timer(START_MS + 1000 + number, b"held", topic="orders")
    broker.pass_time(10_000)
    broker.owned.checkpoint()
    assert len(broker_says(killed(broker, "held"))) == 20
    broker.timers.set_policy("orders", None)
    broker.pass_time(3000)
    assert len(broker.bodies()) == 20
    assert broker_says(killed(broker, "back")) == set()


@pytest.mark.parametrize("loss", ["timerlog", "cut", "timercheck", "empty timercheck"])
def test_timers_of_a_store_that_rocketmq_had_are_not_lost_with_its_files(tmp_path: Path, loss: str) -> None:
    """Timers of a store that RocketMQ had are not lost with its files; they are delivered at least once: deliveries by
    RocketMQ are unknown, but duemq's deliveries and cancels are in its records."""
    broker = new_broker(tmp_path / "old")
    far = {broker.timer(START_MS + 60_000 + number, b"far %d" % number) for number in range(150)}
    for number in range(10):
        broker.timer(START_MS + 1500 + number, b"soon")
    broker.pass_time(3000)
    broker.close()
    assert len(broker.bodies()) == 10
    as_apache(broker.root)
    log, check = broker.root / "timerlog", broker.root / "config" / "timercheck"
    if loss == "timerlog":
        shutil.rmtree(log)
    elif loss == "cut":
        last = max(log.iterdir())
        data = last.read_bytes().rstrip(b"\0")
        last.write_bytes(data[: len(data) // 2].ljust(last.stat().st_size, b"\0"))
    elif loss == "timercheck":
        check.unlink()
    else:
        check.write_bytes(b"")
    assert jobs_say(broker.root) == far
    with capture_logs() as logs:
        after = Broker(broker.root, broker.clock)
    assert [line["event"] for line in logs if line["log_level"] == "warning"] == ["timers_rebuilt"]
    assert broker_says(after) == far
    after.pass_time(70_000)
    assert len(after.bodies()) == 160, "each once"


def write_over(root: Path, start: int, end: int) -> None:
    """Put zeros into the commitlog between two physical offsets."""
    for path in (root / "commitlog").iterdir():
        base = int(path.name)
        low, high = max(start, base), min(end, base + path.stat().st_size)
        if low < high:
            with path.open("r+b") as file:
                file.seek(low - base)
                file.write(bytes(high - low))


@pytest.mark.parametrize("writer", ["duemq", "killed", "rocketmq"])
def test_what_waits_and_was_destroyed_is_found_by_the_queues(tmp_path: Path, writer: str) -> None:
    broker = new_broker(tmp_path / "store")
    waits: dict[int, tuple[int, int]] = {}
    for number in range(60):
        broker.timer(START_MS + 500, b"delivered" + bytes(300))
        cancelled = broker.timer(START_MS + 60_000, b"cancelled" + bytes(300), f"c{number}")
        waits[broker.timer(START_MS + 90_000 + number, b"timer" + bytes(300))] = 0, START_MS + 90_000 + number
        waits[broker.schedule(4, b"level" + bytes(300))] = 4, START_MS + broker.levels.table.delay_ms(4)
        broker.cancel(cancelled)
    broker.pass_time(3000)
    last = broker.store.log.end
    if writer == "killed":
        broker.owned.checkpoint()
    else:
        broker.close()
    if writer == "rocketmq":
        as_apache(broker.root)
    root = broker.root
    start, end = sorted(waits)[5] + 20, sorted(waits)[65] + 20
    write_over(root, start, end)
    inside = {offset: found for offset, found in waits.items() if sorted(waits)[5] <= offset <= sorted(waits)[65]}
    store = StoreFiles.open(str(root))
    found = destroyed(store, [(sorted(waits)[5], sorted(waits)[65] + 400)])
    told = {offset: (level, due) for offset, _, level, due in found.tolist()}
    assert told == inside
    assert len(destroyed(store, [])) == 0
    assert len(destroyed(store, [(last, last + 100)])) == 0


def test_what_the_queues_have_behind_the_last_record_was_destroyed(tmp_path: Path) -> None:
    broker = new_broker(tmp_path / "store")
    for number in range(20):
        broker.send("orders", b"plain")
        broker.timer(START_MS + 90_000 + number, b"timer")
    last = broker.timer(START_MS + 100_000, b"last")
    broker.close()
    write_over(broker.root, last - 50, last + 10_000)
    found = destroyed(StoreFiles.open(str(broker.root)), [])
    assert last in found["physical_offset"].tolist()
    assert len(found) <= 2, "the record before it lies in part there"


@pytest.mark.parametrize("how", ["removed", "emptied", "with its queues"])
@pytest.mark.parametrize("writer", ["duemq", "killed", "rocketmq"])
def test_what_waits_and_has_gone_with_the_first_file(tmp_path: Path, writer: str, how: str) -> None:
    broker = new_broker(tmp_path / "store")
    waits: dict[int, tuple[int, int]] = {}
    for number in range(60):
        broker.timer(START_MS + 500, b"delivered" + bytes(300))
        broker.schedule(1, b"delivered" + bytes(300))
        cancelled = broker.timer(START_MS + 60_000, b"cancelled" + bytes(300), f"c{number}")
        waits[broker.timer(START_MS + 90_000 + number, b"timer" + bytes(300))] = 0, START_MS + 90_000 + number
        waits[broker.schedule(4, b"level" + bytes(300))] = 4, START_MS + broker.levels.table.delay_ms(4)
        broker.cancel(cancelled)
    broker.pass_time(3000)
    if writer == "killed":
        broker.owned.checkpoint()
    else:
        broker.close()
    if writer == "rocketmq":
        as_apache(broker.root)
    root = broker.root
    assert len(destroyed(StoreFiles.open(str(root)), [])) == 0
    first = root / "commitlog" / f"{0:020}"
    first.write_bytes(b"") if how == "emptied" else first.unlink()
    expected = {offset: found for offset, found in waits.items() if offset < SEGMENT}
    assert len(expected) > 20
    if how == "with its queues":
        (root / "consumequeue" / TIMER_TOPIC / "0" / f"{0:020}").unlink()
    store = StoreFiles.open(str(root))
    gaps = [(offset, offset + size) for offset, size, _ in store.gaps()]
    assert gaps == ([(0, SEGMENT)] if how == "emptied" else [])
    found = {offset: (level, due) for offset, _, level, due in destroyed(store, gaps).tolist()}
    assert found.keys() == expected.keys()
    assert {offset: level for offset, (level, _) in found.items()} == {at: level for at, (level, _) in expected.items()}
    if how != "with its queues":
        assert found == expected


def test_what_was_delivered_before_its_file_expired_is_not_destroyed(tmp_path: Path) -> None:
    """A message delivered before its file expired does not count as destroyed, even if the notes and queues that would
    show it are gone."""
    broker = new_broker(tmp_path / "store")
    for _ in range(200):
        broker.timer(broker.clock.now_ms() + 500, b"timer" + bytes(300))
        broker.schedule(1, b"level" + bytes(300))
    broker.pass_time(5000)
    broker.close()
    as_apache(broker.root)
    (broker.root / "commitlog" / f"{0:020}").unlink()
    assert len(destroyed(StoreFiles.open(str(broker.root)), [])) == 0
    for name in ("delayOffset.json", "timercheck"):
        (broker.root / "config" / name).unlink()
    assert len(destroyed(StoreFiles.open(str(broker.root)), [])) == 0


def test_what_waits_on_in_a_new_record_was_not_destroyed_with_its_file(tmp_path: Path) -> None:
    """A message that waits on in a new record was not destroyed with its file, as when duemq's retention removes a
    file."""
    broker = new_broker(tmp_path / "store")
    for number in range(80):
        broker.timer(START_MS + 90_000_000 + number, b"timer" + bytes(500))
        broker.schedule(4, b"level" + bytes(500))
    broker.run()
    while broker.timers.keep_next(SEGMENT, look(broker.clock)) is not None:
        broker.run()
    broker.run()
    broker.close()
    (broker.root / "commitlog" / f"{0:020}").unlink()
    assert len(jobs_say(broker.root)) == 160
    assert len(destroyed(StoreFiles.open(str(broker.root)), [])) == 0
