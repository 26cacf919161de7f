"""Timers, one behaviour per test. For sequences of events see test_machine."""

from __future__ import annotations

import errno
import random
import struct
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray
from structlog.testing import capture_logs

from duemq.protocol.records import properties, timer_properties
from duemq.protocol.records.record import StoredMessage
from duemq.protocol.topics import SCHEDULE_TOPIC
from duemq.scheduler.timers.config import Cancelled, Refusal, TimerConfig
from duemq.scheduler.timers.deliver_times import LOOK_UNITS
from duemq.scheduler.timers.files import small_files
from duemq.scheduler.timers.files.small_files import StartFacts, Sums, TimerNote
from duemq.scheduler.timers.files.sums import FileSum
from duemq.scheduler.timers.files.superseded import RUN
from duemq.scheduler.timers.files.unit import UNIT, UNIT_SIZE
from duemq.scheduler.timers.files.wheel import TimerWheel
from duemq.scheduler.timers.policy.policies import TimerPolicy
from duemq.storage.budget import Pieces
from duemq.storage.clock import look
from duemq.storage.durability.retention import RetentionConfig
from duemq.storage.log.commitlog import Commitlog
from duemq.storage.log.copies import origin_of
from duemq.storage.log.origins import Origins
from duemq.storage.queues.pull import ColdRead, ReadAhead
from tests.support.messages import HOST
from tests.unit.scheduler.timer_world import ANY_HOUR, START_MS, TimerWorld
from tests.unit.scheduler.timers.policy.test_policies import TWINS

DAY_MS = 86_400_000


@pytest.fixture
def world() -> TimerWorld:
    return TimerWorld()


@pytest.mark.parametrize("delay", [1, 2, 999, 1000, 1001, 9_999, 10_000, 10_001, 3_600_000, 5 * DAY_MS + 123])
def test_a_message_is_stored_at_its_millisecond(world: TimerWorld, delay: int) -> None:
    world.send(START_MS + delay)
    world.pass_time(delay - 1)
    assert world.bodies() == []
    world.pass_time(1)
    assert world.lateness() == [0]


def test_delivered_are_topic_queue_and_properties_of_the_sender_and_the_origin(world: TimerWorld) -> None:
    place = world.send(START_MS + 10, b"body", "TAGS\x01t\x02KEYS\x01k\x02")
    world.pass_time(10)
    (message,) = world.delivered()
    assert (message.topic, message.queue_id, message.body) == ("orders", 3, b"body")
    assert message.born_timestamp == START_MS
    assert message.prepared_transaction_offset == (place or -1)
    assert message.get_property("TAGS") == "t"
    queue = world.store.queue("orders", 3)
    assert queue is not None
    unit = queue.unit(0)
    assert unit is not None
    assert unit[2] == properties.tags_code("t")


def test_what_is_due_at_one_time_keeps_its_order(world: TimerWorld) -> None:
    for _ in range(700):
        world.send(START_MS + 5000)
    world.pass_time(5000)
    assert world.bodies() == [f"m{n}".encode() for n in range(1, 701)]
    assert set(world.lateness()) == {0}


def test_the_records_of_a_second_are_read_ahead_of_it(world: TimerWorld) -> None:
    """The records of a second are read ahead of it, in one job for all, however far they lie from each other, while
    other messages are delivered."""
    jobs: list[ReadAhead] = []
    world.timers._read_cold = lambda job, _: jobs.append(cast("ReadAhead", job))
    hour_ms = START_MS + 3_600_000
    places = []
    for number in range(5):
        places.append(world.send(hour_ms + 100 * number + 1))
        world.send(hour_ms + 60_000 + number)
        world.run()
    world.pass_time(3_580_000)
    assert jobs == []
    world.pass_time(11_000)
    assert [type(job) for job in jobs] == [ReadAhead]
    assert sorted(jobs[0]._offsets.tolist()) == places
    world.pass_time(10_000)
    assert world.bodies() == [b"m1", b"m3", b"m5", b"m7", b"m9"]


def test_the_records_of_a_second_are_read_ahead_again_where_memory_has_lost_them(world: TimerWorld) -> None:
    jobs: list[tuple[type, int]] = []
    waiting: list[Callable[[], None]] = []

    def read_cold(job: ColdRead | ReadAhead, done: Callable[[], None]) -> None:
        jobs.append((type(job), len(job._offsets) if isinstance(job, ReadAhead) else 0))
        waiting.append(done)

    world.timers._read_cold = read_cold
    hour_ms = START_MS + 3_600_000
    for number in range(2000):
        world.send(hour_ms + 1 + 7 * number % 1000)
    world.pass_time(3_595_000)
    assert jobs == [(ReadAhead, 2000)]
    world.files.uncached = world.store.log.end
    world.clock.advance(6_000)
    while len(world.bodies()) < 2000:
        world.run()
        while waiting:
            waiting.pop()()
    assert world.store.ensure_queue("orders", 3).next_offset == 2000
    assert Counter(jobs)[ReadAhead, 2000] == 2, "not for each batch"
    assert Counter(jobs)[ColdRead, 0] >= 2
    assert max(world.lateness()) <= 1000


def test_nothing_ticks_while_nothing_is_due(world: TimerWorld) -> None:
    assert world.run() is None
    world.send(START_MS + 7_200_500)
    assert world.wakes == 1
    assert world.run() == (START_MS + 7_200_500) // 1000 * 1000 - 10_000
    world.clock.advance(7_195_000)
    assert world.run() == START_MS + 7_200_500


def test_an_earlier_message_is_told_of(world: TimerWorld) -> None:
    world.send(START_MS + 60_000)
    world.run()
    wakes = world.wakes
    world.send(START_MS + 100)
    assert world.wakes == wakes + 1
    assert world.run() == START_MS + 100


def test_a_deep_second_is_delivered_in_slices(world: TimerWorld) -> None:
    for _ in range(6000):
        world.send(START_MS + 1000, b"")
    world.run()
    world.clock.advance(1000)
    queue = world.store.ensure_queue("orders", 3)
    ends = [queue.next_offset]
    while world.step(Pieces(1)) == world.clock.now_ms():
        ends.append(queue.next_offset)
    assert queue.next_offset == 6000
    assert max(after - before for before, after in pairwise(ends)) < 6000


def test_refusals(world: TimerWorld) -> None:
    now = START_MS
    config = world.config
    config.max_delay = 100
    assert world.timers.refusal(now + 100_000, now) is None
    assert world.timers.refusal(now + 100_001, now) is Refusal.TOO_FAR
    config.congest_limit = 3
    for _ in range(3):
        world.send(now + 5000)
    assert world.timers.refusal(now + 5000, now) is Refusal.CONGESTED  # although the wheel has no message yet
    world.run()
    assert world.timers.refusal(now + 5000, now) is Refusal.CONGESTED
    assert world.timers.refusal(now + 6000, now) is None
    config.is_enabled = False
    assert world.timers.refusal(now + 6000, now) is Refusal.DISABLED


def test_stop_and_go_on(world: TimerWorld) -> None:
    world.config.stop_dequeue = True
    world.send(START_MS + 100)
    world.pass_time(5000)
    assert world.bodies() == []
    world.config.stop_dequeue, world.config.stop_enqueue = False, True
    world.send(START_MS + 5100)
    world.pass_time(1000)
    assert world.bodies() == [b"m1"]
    assert world.state().behind_messages == 1
    world.config.stop_enqueue = False
    world.run()
    assert world.bodies() == [b"m1", b"m2"]


def test_what_the_store_refuses_is_tried_again(world: TimerWorld) -> None:
    world.send(START_MS + 100)
    world.run()
    world.store.health.fill("full")
    world.pass_time(3000)
    assert world.bodies() == []
    world.store.health.has_room()
    world.pass_time(100)
    assert world.bodies() == [b"m1"]


def test_when_the_timer_log_cannot_be_written_the_message_waits_in_its_queue(world: TimerWorld) -> None:
    world.send(START_MS + 100)
    world.files.fail("write", errno.ENOSPC)
    world.run()
    assert world.state().behind_messages == 1
    world.files.heal()
    world.pass_time(1000)
    assert world.bodies() == [b"m1"]


# --- cancelling


def test_a_cancelled_message_of_a_level_is_not_delivered() -> None:
    world = TimerWorld(levels="1s 5s")
    places = [world.schedule(2, body) for body in (b"one", b"two")]
    assert world.cancel(places[0]) is Cancelled.CANCELLED
    assert world.cancel(places[0]) is Cancelled.CANCELLED_BEFORE
    world.pass_time(5000)
    assert world.bodies() == [b"two"]
    assert world.cancel(places[1]) is Cancelled.DELIVERED
    level = world.levels.levels[2]
    assert (level.delivered, level.skipped) == (1, 0)


def test_cancel_tells_what_it_found(world: TimerWorld) -> None:
    place = world.send(START_MS + 90_000)
    world.send(START_MS + 90_000)
    assert world.cancel(place) is Cancelled.CANCELLED
    assert world.cancel(place) is Cancelled.CANCELLED_BEFORE
    assert world.cancel(place + 1) is Cancelled.UNKNOWN
    assert world.cancel(1 << 40) is Cancelled.UNKNOWN
    world.pass_time(90_000)
    assert world.bodies() == [b"m2"]
    assert world.cancel(world.delivered()[0].physical_offset) is Cancelled.DELIVERED


def test_a_message_is_found_by_topic_key_and_time(world: TimerWorld) -> None:
    place = world.send(START_MS + 90_000)
    world.send(START_MS + 90_000, topic=TWINS[0])
    world.run()

    def found(topic: str, key: str) -> list[int | ColdRead]:
        return [each for each in world.timers.changes.find(topic, key, START_MS + 90_000) if each is not None]

    assert found("orders", "K1") == [place]
    assert found("orders", "K2") == found("other", "K1") == []
    assert (len(found(TWINS[0], "K2")), found(TWINS[1], "K2")) == (1, []), "their names have one hash"


def test_looking_for_a_message_by_its_key_reads_some_records_a_step(world: TimerWorld) -> None:
    for _ in range(1000):
        world.send(START_MS + 90_000)
    world.run()
    read: list[int] = []
    message_at = world.store.message_at

    def noted(physical_offset: int, size: int | None = None) -> StoredMessage | None:
        read.append(physical_offset)
        return message_at(physical_offset, size)

    world.store.message_at = noted  # type: ignore[method-assign]
    most = total = 0
    for _ in world.timers.changes.find("orders", "K0", START_MS + 90_000):
        most, total = max(most, len(read)), total + len(read)
        read.clear()
    assert (most, total) == (LOOK_UNITS, 1000)
    world.store.is_cached = lambda ranges: False  # type: ignore[method-assign]
    steps = list(world.timers.changes.find("orders", "K0", START_MS + 90_000))
    assert sum(isinstance(step, ColdRead) for step in steps) >= 1000 // LOOK_UNITS, "what is cold a thread reads"


@pytest.mark.parametrize(
    ("key", "topic", "left"),
    [
        ("orders+K1", "orders", [b"m2"]),
        ("K1", "orders", [b"m2"]),
        ("orders+K1", "other", [b"m1", b"m2"]),
        ("K1", "other", [b"m1", b"m2"]),
        ("other+K1", "orders", [b"m1", b"m2"]),
    ],
)
def test_a_record_of_rocketmq_deletes_by_key_a_message_of_its_own_topic(
    world: TimerWorld, key: str, topic: str, left: list[bytes]
) -> None:
    due = START_MS + 5000
    world.send(due)
    world.send(due)
    out_ms = timer_properties.out_ms(due)
    text = f"TIMER_DEL_UNIQKEY\x01{key}\x02TIMER_OUT_MS\x01{out_ms}\x02REAL_TOPIC\x01{topic}\x02REAL_QID\x010"
    world.put(text)
    world.pass_time(5000)
    assert world.bodies() == left


def test_a_message_of_rocketmq_is_delivered_at_its_time(world: TimerWorld) -> None:
    """A message of RocketMQ is delivered at its time, which is only in its properties; its unit has the hash of its
    tags."""
    due = START_MS + 5321
    asked = [f"TIMER_DELIVER_MS\x01{due}", "TIMER_DELAY_MS\x015321", "X\x01y"]
    for text in asked:
        out_ms = timer_properties.out_ms(due)
        world.put(f"{text}\x02TIMER_OUT_MS\x01{out_ms}\x02REAL_TOPIC\x01orders\x02REAL_QID\x013", text.encode())
    world.pass_time(10_000)
    assert [message.store_timestamp for message in world.delivered()] == [due, due, START_MS + 6000]


# --- the files


def test_the_files_are_rocketmqs(world: TimerWorld) -> None:
    due = START_MS + 90_500
    first, second = world.send(due), world.send(due)
    world.run()
    world.checkpoint()
    slot = due // 1000
    wheel = world.files.names["/s/timerwheel"].data
    assert len(wheel) == 14 * 86_400 * 32
    at = slot % (14 * 86_400) * 32
    assert struct.unpack(">qqqii", wheel[at : at + 32]) == (slot, 0, 52, 2, 0)
    units = world.files.names[f"/s/timerlog/{0:020}"].data
    assert len(units) == 5200
    size = struct.Struct(">iqiqiqiiq")
    java_hash = properties.java_hash("orders")
    record = world.store.message_at(first)
    assert record is not None
    sizes = [unit[1] for unit in (world.timers.queue.unit(0), world.timers.queue.unit(1)) if unit is not None]
    assert size.unpack(units[:52]) == (52, -1, 1, START_MS, 90_000, first, sizes[0], java_hash, due)
    assert size.unpack(units[52:104]) == (52, 0, 1, START_MS, 90_000, second, sizes[1], java_hash, due)
    check = world.files.names["/s/config/timercheck"].data
    assert len(check) == 4096
    assert struct.unpack(">qqqq", check[:32]) == (START_MS - 1000, 104, 2, 2)


def test_a_file_of_the_timer_log_ends_with_a_blank_unit() -> None:
    world = TimerWorld(TimerConfig(log_segment_size=52 * 3 + 20))
    for _ in range(5):
        world.send(START_MS + 5000)
    world.run()
    data = world.files.names[f"/s/timerlog/{0:020}"].data
    assert struct.unpack(">iqI", data[156:172]) == (20, 0, 0xCBD43194)
    world.pass_time(5000)
    assert len(world.bodies()) == 5


def test_old_files_of_the_timer_log_go() -> None:
    world = TimerWorld(TimerConfig(log_segment_size=52 * 4))
    for number in range(20):
        world.send(START_MS + number * 1000)
    world.run()
    assert len(world.files.list("/s/timerlog")) == 7
    world.pass_time(60_000)
    while world.owned.step() == 0:
        pass
    assert len(world.files.list("/s/timerlog")) == 7, "recovery would need them"
    world.checkpoint()
    world.owned.expire()
    assert len(world.files.list("/s/timerlog")) == 1
    world.send(world.clock.now_ms() + 1000)
    world.pass_time(1000)
    assert len(world.bodies()) == 21


def test_a_note_is_read_as_it_was_written() -> None:
    offsets = np.array([0, 3, 2**40, 2**61])
    hours = np.arange(336).astype(np.uint32)
    runs = np.array([(52, 3), (2**40, 1)], RUN).tobytes()
    found = StartFacts(77, offsets, offsets[1:3], offsets[:1], offsets[2:], np.array([52, 104]))
    for note in (
        TimerNote(1, 2, 3, 4, 6, 7, 8, {-9: 10, 11: 12}),
        TimerNote(1, 2, 3, 4, 6, 7, 8, {}, found, runs, Sums({520: FileSum(7, 2**63), 1040: FileSum()}, hours)),
        TimerNote(1, 2, 3, 4, 6, 7, 8, {}, unfollowed=(0, 2**40)),
    ):
        data = note.encode()
        again = small_files.decode_note(data)
        assert again is not None
        assert again.encode() == data
        assert [each.tolist() for each in again.found[1:]] == [each.tolist() for each in note.found[1:]]
        assert (again.second, again.waiting, again.found.recovered_to) == (1, note.waiting, note.found.recovered_to)
        assert small_files.decode_note(data[:-1]) is None
        assert small_files.decode_note(data + b"\0") is None
        assert small_files.decode_note(b"\x06" + data[1:]) is None
        assert (again.superseded, again.unfollowed) == (note.superseded, note.unfollowed)
    assert small_files.decode_note(b"") is None


def test_a_note_without_runs_or_unfollowed_is_read() -> None:
    """Notes of versions 3 and 4 can be read: without runs, and without the records of recurring messages."""
    note = TimerNote(1, 2, 3, 4, 6, 7, 8, {-9: 10}, StartFacts(77), b"", Sums({520: FileSum(7, 2**63)}))
    data = note.encode()
    sums = note.sums.encode()  # type: ignore[union-attr]
    for version, left_out in ((3, 8), (4, 4)):
        without = bytes([version]) + data[1 : -len(sums) - left_out] + sums
        again = small_files.decode_note(without)
        assert again is not None
        assert again.encode() == data
        assert small_files.decode_note(without[:-1]) is None


@pytest.mark.parametrize("version", [1, 2])
def test_a_note_of_an_earlier_version_is_read(world: TimerWorld, monkeypatch: pytest.MonkeyPatch, version: int) -> None:
    """A note of an earlier version can be read. The first version did not record how far the counts reach: to the time
    of the note."""
    for ms in (100, 400, 900):
        world.send(START_MS + 60_000 + ms)
    world.pass_time(60_400)

    def encode(note: TimerNote) -> bytes:
        head = struct.pack(">Bqqqq", version, note.second, note.since, note.log_since, note.log_end)
        head += struct.pack(">Iqq", world.timers._slots.log.crc(note.log_end), note.queue_offset, note.policy_end)
        head += struct.pack(">q", note.counted_at) if version > 1 else b""
        head += struct.pack(">I", len(note.waiting))
        return head + b"".join(struct.pack(">iq", *item) for item in note.waiting.items())

    with monkeypatch.context() as patch:
        patch.setattr(TimerNote, "encode", encode)
        world.checkpoint()
    world.pass_time(500)
    world.open()
    world.run()
    assert world.bodies() == [b"m1", b"m2", b"m3"]
    assert world.state().pending == 0


def test_each_start_reads_what_was_written_since_the_last_checkpoint_only() -> None:
    """Each start reads only the part since the last checkpoint, also after many kills while messages wait, are
    delivered, cancelled and put off: the findings of a start are in the next note."""
    world = TimerWorld(TimerConfig(log_segment_size=52 * 1000), segment_size=1 << 22)
    places = [world.send(START_MS + 1000 + 10 * n) for n in range(1000)]
    world.run()
    cancelled = set()
    for n in range(8):
        world.pass_time(300)
        for place in places[900 + n * 10 : 900 + n * 10 + 2]:
            assert world.cancel(place) is Cancelled.CANCELLED
            cancelled.add(place)
        since = world.timers._slots.turns.since
        world.checkpoint()
        world.pass_time(55)
        with reads_of(Origins) as origins:
            world.open()
        assert all(start >= since for start, end in origins if end > start)
        world.checkpoint()
        with reads_of(Origins) as origins:
            world.open()
        assert sum(end - start for start, end in origins if end > start) == 0
        world.run()
        assert world.state().pending == len(places) - len(cancelled) - len(world.bodies())
    world.pass_time(12_000)
    counts = Counter(world.bodies())
    assert set(counts.values()) == {1}
    assert len(counts) == len(places) - len(cancelled)
    assert world.timers.metrics() == {}


@contextmanager
def reads_of(origins: type[Origins]) -> Iterator[list[tuple[int, int]]]:
    """Record the ranges of the commitlog that are read in addition to recovery."""
    found: list[tuple[int, int]] = []
    read = origins.read

    def noted(self: Origins, log: Commitlog, start: int, end: int) -> None:
        found.append((start, end))
        read(self, log, start, end)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(origins, "read", noted)
        yield found


def test_no_file_goes_that_the_checkpoint_on_the_disk_needs() -> None:
    """No file goes that the checkpoint on the disk needs, also when the next checkpoint failed after it had written the
    timers' own files."""
    world = TimerWorld(TimerConfig(log_segment_size=52 * 4))
    for number in range(20):
        world.send(START_MS + number * 1000)
    world.run()
    world.checkpoint()
    needed, names = world.timers.needed_from(), world.files.list("/s/timerlog")
    world.pass_time(60_000)
    world.files.fail("write", errno.ENOSPC, "/s/checkpoint")
    with pytest.raises(OSError, match="No space"):
        world.checkpoint()
    for _ in range(3):
        world.owned.expire()
    assert world.timers.needed_from() == needed
    assert world.files.list("/s/timerlog") == names
    world.open()
    world.run()
    assert world.bodies() == [f"m{n}".encode() for n in range(1, 21)]
    world.send(world.clock.now_ms() + 5000)
    world.pass_time(10_000)
    world.checkpoint()
    world.owned.expire()
    assert world.timers.needed_from() > needed
    assert len(world.files.list("/s/timerlog")) < len(names)


def test_no_file_goes_to_which_a_message_goes_back_at_a_crash() -> None:
    """No file goes to which a crash returns a message: the crash takes the unit of the slot that the message moved to
    after the checkpoint, and the unit before, in a slot already past, is its only one."""
    world = TimerWorld(TimerConfig(log_segment_size=52 * 4, roll_window=40))
    world.send(START_MS + 130_000, b"far")
    for _ in range(8):
        world.send(START_MS + 1)
    world.pass_time(1000)
    world.checkpoint()
    world.pass_time(60_000)
    while (paths := world.timers.expire_next()) is not None:
        for path in paths:
            world.files.remove(path)
    world.open()
    world.pass_time(100_000)
    assert world.bodies().count(b"far") == 1
    world.checkpoint()
    begin = world.timers._slots.log.begin
    world.owned.expire()
    assert world.timers._slots.log.begin > begin, "they go when there is a checkpoint of a later second"


def test_what_waits_is_counted_after_a_kill_in_the_middle_of_a_second(world: TimerWorld) -> None:
    """Waiting messages are counted right after a kill in the middle of a second, some of whose messages were delivered
    before the checkpoint and some after it, also when the next starts die before they have loaded it again."""
    for ms in (100, 400, 500, 900):
        world.send(START_MS + 60_000 + ms)
    world.send(START_MS + 90_000)
    world.pass_time(60_400)
    world.checkpoint()
    world.pass_time(100)
    for _ in range(2):
        world.open()
        world.checkpoint()
    world.open()
    world.run()
    assert world.bodies() == [b"m1", b"m2", b"m3"]
    assert world.state().pending == 2
    world.pass_time(30_000)
    assert len(world.bodies()) == 5
    assert world.state().pending == 0


@pytest.mark.parametrize("size", [0, 10, 38_707_201])
def test_a_wheel_of_another_size_is_made_again(world: TimerWorld, size: int) -> None:
    world.send(START_MS + 5000)
    world.run()
    world.checkpoint()
    world.files.names["/s/timerwheel"].data[:] = bytes(size)
    world.open()
    world.pass_time(5000)
    assert world.lateness() == [0]


def test_the_clock_may_be_set_back(world: TimerWorld) -> None:
    world.send(START_MS + 5000)
    world.pass_time(3000)
    world.clock.set_wall(START_MS - 3_600_000)
    world.send(START_MS - 3_600_000 + 700)
    world.pass_time(700)
    assert world.bodies() == [b"m2"]
    world.pass_time(3_600_000 + 4300)
    assert world.lateness() == [0, 0]


def test_the_clock_may_be_set_forward(world: TimerWorld) -> None:
    world.send(START_MS + 5000)
    world.send(START_MS + 7_200_000)
    world.pass_time(1000)
    world.clock.set_wall(START_MS + 3_600_000)
    world.run()
    assert world.bodies() == [b"m1"]


def test_a_store_without_timers_is_taken_over() -> None:
    world = TimerWorld()
    world.close()
    for path in [path for path in world.files.names if "timer" in path]:
        world.files.remove(path)
    world.files.write_whole("/s/lock", b"lock")
    world.open()
    world.send(START_MS + 100)
    world.pass_time(100)
    assert world.bodies() == [b"m1"]


@pytest.mark.parametrize("style", ["nothing", "everything", "some"])
@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.soak)])
def test_kills_do_not_undo_taking_over(style: str, every: int) -> None:
    """Kills during a take-over do not undo it, although only timercheck tells that RocketMQ delivered a message."""
    world = TimerWorld()
    world.send(START_MS + 5000, b"delivered by RocketMQ")
    world.send(START_MS + 60_000, b"waits")
    world.run()
    world.close()
    check = bytearray(world.files.read_whole("/s/config/timercheck") or b"")
    check[:8] = (START_MS + 10_000).to_bytes(8, "big")
    world.files.write_whole("/s/config/timercheck", bytes(check))
    world.files.write_whole("/s/lock", b"lock")
    world.clock.advance(10_000)
    before = len(world.files.operations)
    world.open()
    files, ms = world.files, world.now_ms
    for when in range(len(files.operations), before - 1, -every):
        world.files = files.after_crash(when, random.Random(when), style)
        world.clock.set_wall(ms)
        world.open()
        world.open()
        assert not world.recovered.is_foreign, "the start before has taken it over"
        world.pass_time(60_000)
        assert world.bodies() == [b"waits"]


@pytest.mark.parametrize("style", ["nothing", "everything", "some"])
@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.soak)])
def test_what_the_timer_log_has_behind_timercheck_is_not_put_there_again(style: str, every: int) -> None:
    """Units that the timer log has behind timercheck are not put there again: RocketMQ's broker writes timercheck once
    a second, and after a kill the log has more units. A message that was due on arrival has no unit, and may not have
    been delivered."""
    world = TimerWorld()
    for number in range(40):
        world.send(START_MS + 60_000 + number * 100, b"%d" % number)
    world.run()
    world.close()
    assert world.timers.queue.next_offset == 40
    path = f"/s/timerlog/{0:020}"
    units = np.frombuffer(world.files.read_whole(path) or b"", UNIT).copy()
    was_due = 33
    units[was_due:39] = units[was_due + 1 : 40]
    units[39] = np.zeros(1, UNIT)[0]
    units["previous"][was_due:39] = np.maximum(units["previous"][was_due:39] - UNIT_SIZE, -1)
    check = small_files.TimerCheck(START_MS, 32 * UNIT_SIZE, 32, 32)
    for name, data in (path, units.tobytes()), ("/s/config/timercheck", check.encode()), ("/s/lock", b"lock"):
        world.files.write_whole(name, data)
    world.files.remove("/s/timerwheel")
    before = len(world.files.operations)
    world.open()
    assert world.recovered.is_foreign
    files, ms = world.files, world.now_ms
    for when in range(len(files.operations), before - 1, -every):
        world.files = files.after_crash(when, random.Random(when), style)
        world.clock.set_wall(ms)
        world.open()
        world.pass_time(60_000 + 5000)
        assert Counter(world.bodies()) == Counter(b"%d" % number for number in range(40)), when
        assert world.state().pending == 0


def test_a_cancel_survives_a_power_cut_long_after(world: TimerWorld) -> None:
    """A cancel survives a later power cut, although its mark is in a file of the timer log that was synced before."""
    places = [world.send(START_MS + 500_000) for _ in range(250)]
    world.run()
    world.checkpoint()
    world.checkpoint()
    assert world.cancel(places[3]) is Cancelled.CANCELLED
    world.run()
    world.checkpoint()
    world.checkpoint()
    world.files = world.files.after_crash(len(world.files.operations), random.Random(0), "nothing")
    world.open()
    world.pass_time(500_000)
    assert len(world.bodies()) == 249
    assert b"m4" not in world.bodies()


def test_a_message_that_moves_is_kept_when_its_file_goes() -> None:
    """A message is kept when its file goes although it moves to another slot while the search for messages to keep is
    on its way to its old unit."""
    world = TimerWorld(TimerConfig(log_segment_size=52 * 4, roll_window=40))
    for _ in range(6):
        world.send(START_MS + 1000)
    world.send(START_MS + 130_000, b"far")
    world.run()
    limit, kept = world.store.log.end, 0
    assert world.timers.keep_next(limit, look(world.clock)), "the first one"
    world.pass_time(60_000)
    while (was_needed := world.timers.keep_next(limit, look(world.clock))) is not None:
        kept += was_needed
    assert kept == 1
    world.pass_time(100_000)
    assert world.bodies().count(b"far") == 1
    (far,) = [message for message in world.delivered() if message.body == b"far"]
    assert (origin_of(far.prepared_transaction_offset) or 0) >= limit, "delivered by the record that stays"


@pytest.mark.parametrize("kind", ["retry", "level of RocketMQ's", "timer of RocketMQ's"])
def test_what_has_as_many_properties_as_there_may_be_is_kept(kind: str) -> None:
    """A message with the most properties possible is kept when its file goes: otherwise no file before it would ever
    go."""
    world = TimerWorld(levels="1s 1h")
    text = "MSG_REGION\x01DefaultRegion\x02CLUSTER\x01DefaultCluster\x02TRACE_ON\x01true\x02"
    if kind == "retry":
        text = "CLUSTER\x01c\x02RETRY_TOPIC\x01orders\x02ORIGIN_MESSAGE_ID\x010A0B0C0D00002A9F0000000000001234\x02"
    due_ms = START_MS + 3_600_000
    rest = "UNIQ_KEY\x01K\x02REAL_TOPIC\x01orders\x02REAL_QID\x013"
    wish = f"TIMER_DELAY_SEC\x013600\x02TIMER_OUT_MS\x01{due_ms}" if "timer" in kind else "DELAY\x012"
    text += f"{wish}\x02{rest}\x02MINE\x01"
    text += "x" * (properties.MAX_BYTES - len(text))
    appender = world.store.appender
    appender.begin(world.now_ms)
    queue = world.timers.queue if "timer" in kind else world.store.ensure_queue(SCHEDULE_TOPIC, 1)
    promise = due_ms if kind == "retry" else 0
    appender.add(queue, b"body", text.encode(), due_ms, START_MS, HOST, prepared_transaction_offset=promise)
    appender.commit()
    world.run()
    for _ in range(3):
        assert world.keep() == 1
        world.pass_time(1000)
    world.pass_time(3_600_000)
    (message,) = world.delivered()
    assert message.store_timestamp == due_ms
    assert properties.get(message.properties_text, "MINE") == properties.get(text, "MINE")
    assert properties.get(message.properties_text, "UNIQ_KEY") == "K"
    assert "RETRY_TOPIC" in message.properties_text or kind != "retry"


def test_what_a_policy_holds_is_kept_when_its_file_goes() -> None:
    retention = RetentionConfig(reserved_hours=0, delete_when=ANY_HOUR)
    world = TimerWorld(segment_size=20_000, retention=retention)
    world.timers.set_policy("orders", TimerPolicy(rate=1))
    for _ in range(30):
        world.send(START_MS + 1000, bytes(500))
    world.pass_time(1500)
    for _ in range(3):
        world.send(world.clock.now_ms() + 1, bytes(15_000), topic="traffic")
        world.pass_time(1000)
        for _ in range(3):
            world.owned.expire()
    assert world.store.log.begin > 0
    world.pass_time(60_000)
    queue = world.store.ensure_queue("orders", 3)
    assert queue.next_offset == 30
    assert world.timers.lost == 0
    assert world.timers.metrics() == {}


def test_what_is_not_in_the_wheel_yet_is_kept() -> None:
    """A message that is not in the wheel yet, as may last long with timerStopEnqueue, keeps its commitlog file, since
    only the timer topic's queue knows it."""
    config = TimerConfig(log_segment_size=5200, stop_enqueue=True)
    world = TimerWorld(config, segment_size=20_000, retention=RetentionConfig(reserved_hours=0, delete_when=ANY_HOUR))
    for number in range(30):
        world.send(START_MS + 1000 + 5000 * number, bytes(500))

    def traffic() -> None:
        for _ in range(4):
            world.store.appender.begin(world.now_ms)
            queue = world.store.ensure_queue("traffic", 0)
            world.store.appender.add(queue, bytes(15_000), b"", 0, world.now_ms, HOST)
            world.store.appender.commit()
            world.pass_time(1000)
            world.checkpoint()
            world.owned.expire()

    traffic()
    assert world.store.log.begin == 0
    world.open()
    traffic()
    assert world.store.log.begin == 0
    world.settings.value = replace(config, stop_enqueue=False)
    world.pass_time(20_000)
    traffic()
    assert world.store.log.begin > 0, "what waits in the wheel is appended again"
    world.pass_time(200_000)
    assert world.store.ensure_queue("orders", 3).next_offset == 30
    assert world.timers.lost == 0
    assert world.timers.metrics() == {}


@pytest.mark.parametrize("days", [3, 13, 15, 38, 200])
@pytest.mark.parametrize("is_down", [True, False])
def test_nothing_is_lost_when_weeks_are_missed(days: int, is_down: bool) -> None:
    """No message is lost when the broker was down, or its clock was set, for longer than the wheel reaches."""
    world = TimerWorld()
    for number in range(1, days):
        world.send(START_MS + number * DAY_MS + number)
    world.run()
    world.checkpoint()
    world.clock.advance(days * DAY_MS)
    if is_down:
        world.open()
    world.send(world.clock.now_ms() + 100)
    world.pass_time(100)
    assert len(world.bodies()) == days
    assert world.lateness()[-1] == 0


def test_recovery_need_not_read_all_since_the_clock_was_set_back(
    world: TimerWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("duemq.scheduler.timers.checkpoint._MAX_SINCE_BYTES", 1000)
    for number in range(20):
        world.send(START_MS + 2000 + number)
    world.pass_time(2010)
    world.clock.set_wall(START_MS - 30 * DAY_MS)
    for turn in range(12):
        for _ in range(3):
            world.send(world.clock.now_ms() + 700)
        world.pass_time(40_000)
        world.checkpoint()
        if turn in (5, 11):
            world.open()
    assert world.recovered.start - world.timers._slots.turns.since < 8000
    world.pass_time(31 * DAY_MS)
    assert Counter(world.bodies()) == {f"m{n}".encode(): 1 for n in range(1, 57)}


def test_a_turn_is_not_longer_for_the_time_in_which_nothing_happened(
    world: TimerWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Idle time does not make a turn longer: otherwise a checkpoint would needlessly put the rest of a large second
    into the next one."""
    monkeypatch.setattr("duemq.scheduler.timers.checkpoint._MAX_SINCE_BYTES", 1000)
    for number in range(20):
        world.send(START_MS + 60_200 + number * 20)
    for _ in range(60):
        world.pass_time(1000)
        world.checkpoint()
    world.pass_time(400)
    second = world.timers._slots.turns.second
    assert 0 < len(world.bodies()) < 20
    for _ in range(2):
        world.checkpoint()
    assert world.timers._slots.turns.second == second
    world.pass_time(1000)
    assert world.bodies() == [f"m{n}".encode() for n in range(1, 21)]


@pytest.mark.parametrize("is_killed", [False, True])
@pytest.mark.parametrize("steps", range(1, 7))
def test_a_second_that_takes_long_is_handed_on_bit_by_bit(
    world: TimerWorld, monkeypatch: pytest.MonkeyPatch, steps: int, is_killed: bool
) -> None:
    monkeypatch.setattr("duemq.scheduler.timers.checkpoint._MAX_SINCE_BYTES", 500)
    monkeypatch.setattr("duemq.scheduler.timers.seconds.slots._ROLL_UNITS", 3)
    places = [world.send(START_MS + 100 + number // 2 * 100) for number in range(16)]
    world.pass_time(250)
    world.checkpoint()
    now_ms = world.clock.now_ms()
    world.clock.advance(40_000)
    world.clock.set_wall(now_ms)
    delivered, wakes = world.bodies(), world.wakes
    assert delivered == [b"m1", b"m2", b"m3", b"m4"]
    writing = world.owned.writing()
    slots = world.timers._slots
    for _ in range(100):
        next(writing)
        if slots.is_handing_on:
            break
    taken = 1
    while taken < steps and slots.is_handing_on:
        next(writing, None)
        taken += 1
    if slots.is_handing_on:
        world.clock.advance(500)
        world.run()
        assert world.bodies() == delivered, "what is handed on first would come behind what is not yet"
    cancelled = {}
    for at in (4, 9, 15):
        if world.cancel(places[at]) is Cancelled.CANCELLED:
            cancelled[at] = f"m{at + 1}".encode()
    assert len(cancelled) == 3
    if is_killed:
        world.open()
    else:
        for _ in writing:
            pass
        assert not slots.is_handing_on
        assert world.wakes > wakes
    world.pass_time(3000)
    assert world.bodies() == [f"m{n}".encode() for n in range(1, 17) if n - 1 not in cancelled]
    world.open()
    world.pass_time(5000)
    assert len(world.bodies()) == 13


def test_what_is_handed_on_was_deleted_before(world: TimerWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """A message in a second that is handed on is not delivered if it was deleted before by a record of Apache's broker,
    by unique key, which is evaluated when its second comes."""
    monkeypatch.setattr("duemq.scheduler.timers.checkpoint._MAX_SINCE_BYTES", 100)
    monkeypatch.setattr("duemq.scheduler.timers.checkpoint._MAX_TURN_SECONDS", -1)
    world.send(START_MS + 5500)
    world.send(START_MS + 5600)
    out_ms = timer_properties.out_ms(START_MS + 5500)
    text = f"TIMER_DEL_UNIQKEY\x01orders+K1\x02TIMER_OUT_MS\x01{out_ms}\x02REAL_TOPIC\x01orders\x02REAL_QID\x010"
    world.put(text)
    world.run()
    slots = world.timers._slots
    while slots.turns.second < START_MS // 1000 + 5:
        world.clock.advance(100)
        slots.turns.advance(world.clock.now_ms())
    world.send(START_MS + DAY_MS)
    world.checkpoint()
    assert slots.turns.second > START_MS // 1000 + 5
    world.pass_time(3000)
    assert world.bodies() == [b"m2"]


@pytest.mark.parametrize("is_moved", [False, True])
def test_what_is_handed_on_again_and_again_is_found(
    world: TimerWorld, monkeypatch: pytest.MonkeyPatch, is_moved: bool
) -> None:
    monkeypatch.setattr("duemq.scheduler.timers.checkpoint._MAX_SINCE_BYTES", 100)
    monkeypatch.setattr("duemq.scheduler.timers.checkpoint._MAX_TURN_SECONDS", -1)
    place = world.send(START_MS + 500)
    world.pass_time(100)
    slots = world.timers._slots
    second = slots.turns.second
    world.clock.set_wall(START_MS - DAY_MS)
    for _ in range(6):
        world.send(START_MS + DAY_MS)
        world.run()
        world.checkpoint()
    assert slots.turns.second == second + 6
    world.send(START_MS + DAY_MS)
    world.run()
    writing = world.owned.writing()
    while not slots.is_handing_on:
        next(writing)
    assert slots.turns.current.is_done, "it has another unit, and its second is not over"
    if is_moved:
        for _ in writing:
            pass
    assert world.cancel(place) is Cancelled.CANCELLED
    for _ in writing:
        pass
    world.pass_time(2 * DAY_MS + 1)
    assert b"m1" not in world.bodies()
    assert len(world.bodies()) == 7


def test_what_cannot_be_handed_over_is_delivered_all_the_same(world: TimerWorld) -> None:
    for delay in (100, 800, 900):
        world.send(START_MS + delay)
    world.pass_time(500)
    world.files.fail("write", errno.ENOSPC)
    with pytest.raises(OSError, match="No space"):
        world.hand_over()
    world.files.heal()
    world.pass_time(1000)
    assert world.bodies() == [b"m1", b"m2", b"m3"]


@pytest.mark.parametrize("starts", [1, 2, 3])
@pytest.mark.parametrize("days", [6, 7, 8, 13, 40])
@pytest.mark.parametrize("end", ["stop", "kill"])
def test_a_machine_that_slept_for_long(days: int, starts: int, end: str) -> None:
    """After a long sleep of the machine messages are delivered once, even if a send happens first and the next starts
    have no time to do anything."""
    world = TimerWorld()
    world.send(START_MS + 500)
    world.pass_time(1000)
    world.clock.advance(days * DAY_MS)
    world.send(world.now_ms + 20_000, b"after it")
    for _ in range(starts):
        if end == "stop":
            world.close()
        else:
            world.checkpoint()
        world.open()
    world.pass_time(20_001)
    assert world.bodies() == [b"m1", b"after it"]


@pytest.mark.parametrize("is_loaded", [False, True])
def test_what_was_delivered_before_the_clock_was_set_back_is_handed_over_as_delivered(is_loaded: bool) -> None:
    """Messages delivered before the clock was set back are handed over as delivered: after a kill the next start finds
    messages delivered whose deliver times are in the future."""
    world = TimerWorld()
    for delay in (3100, 3200, 5500, 300_000):
        world.send(START_MS + delay)
    world.run()
    world.checkpoint()
    world.pass_time(4000)
    assert world.bodies() == [b"m1", b"m2"]
    world.clock.set_wall(START_MS - (0 if is_loaded else 200_000))
    world.open()
    world.run()
    world.close()
    world.files.write_whole("/s/lock", b"lock")  # RocketMQ's broker had it
    world.open()
    assert world.recovered.is_foreign
    world.pass_time(600_000)
    assert world.bodies() == [b"m1", b"m2", b"m3", b"m4"]


def test_a_log_that_was_made_anew_is_not_taken_for_the_one_that_the_checkpoint_knows() -> None:
    """A rebuilt timer log is not taken for the one that the checkpoint knows: it may have the same units, while the
    wheel's file has none of them yet."""
    world = TimerWorld(TimerConfig(log_segment_size=5200))
    for delay in (2393, 146, 999, 1):
        world.send(START_MS + delay)
    world.run()
    world.checkpoint()
    world.files.remove_tree("/s/timerlog")
    for _ in range(2):
        world.open()
        world.run()
    world.pass_time(3000)
    assert sorted(world.bodies()) == [b"m1", b"m2", b"m3", b"m4"]


def test_what_was_cancelled_after_it_moved_on_stays_cancelled() -> None:
    world = TimerWorld(TimerConfig(log_segment_size=5200, roll_window=40))
    place = world.send(START_MS + 113_907)
    world.pass_time(36_000)
    assert world.timers._slots.turns.second == START_MS // 1000 + 33, "the second in whose slot it has waited until now"
    assert world.cancel(place) is Cancelled.CANCELLED
    world.close()
    world.open()
    assert world.timers.metrics() == {}
    world.pass_time(120_000)
    assert world.bodies() == []


def test_the_hour_of_the_next_message_is_read_once(world: TimerWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hour of the next message is read once, although each step asks for its deliver time and each checkpoint frees
    the memory of other hours."""
    world.send(START_MS + 7_200_000)
    world.run()
    world.checkpoint()
    reads: list[int] = []
    read = TimerWheel._read

    def counted(wheel: TimerWheel, hour: int) -> NDArray[Any]:
        reads.append(hour)
        return read(wheel, hour)

    monkeypatch.setattr(TimerWheel, "_read", counted)
    for _ in range(5):
        world.send(START_MS + 100)
        world.pass_time(200)
        world.checkpoint()
    assert len(reads) <= 1


def test_what_is_put_into_the_wheel_after_a_start_is_read_in_ranges() -> None:
    """Messages put into the wheel after a start are read in ranges: the topics of messages staged before the start are
    in their records, and a step reads thousands together."""
    world = TimerWorld(segment_size=1 << 22)
    for n in range(3000):
        world.send(START_MS + 60_000 + n % 7, topic=f"topic{n % 3}")
    world.open()
    reads, read = 0, world.store.log.read

    def counted(offset: int, size: int) -> bytes | None:
        nonlocal reads
        reads += 1
        return read(offset, size)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(world.store.log, "read", counted)
        world.run()
    assert world.state().behind_messages == 0
    assert reads < 10
    assert world.timers.metrics() == {f"topic{n}": 1000 for n in range(3)}
    world.pass_time(61_000)
    assert sorted(world.bodies("topic1")) == sorted(f"m{n + 1}".encode() for n in range(1, 3000, 3))


def test_records_of_every_make_are_put_into_the_wheel_after_a_start() -> None:
    """Records of every kind are put into the wheel after a start: usual ones, Apache's, deleting ones, and messages
    that were cancelled, in any order."""
    world = TimerWorld()
    text = "TIMER_DELAY_MS\x0130000\x02UNIQ_KEY\x01R{0}\x02REAL_TOPIC\x01orders\x02REAL_QID\x013"
    bodies = []
    for n in range(120):
        if n % 3:
            world.send(START_MS + 30_000 + n, f"o{n}".encode())
            bodies.append(f"o{n}".encode())
        elif n % 2:
            world.put(text.format(n) + f"\x02TIMER_OUT_MS\x01{START_MS + 29_000}", f"r{n}".encode())
            bodies.append(f"r{n}".encode())
        else:
            place = world.send(START_MS + 30_000, b"gone")
            assert world.cancel(place) is Cancelled.CANCELLED
    world.open()
    world.run()
    assert world.state().behind_messages == 0
    world.pass_time(32_000)
    assert sorted(world.bodies()) == sorted(bodies)


def test_a_second_that_is_scattered_over_the_log_is_loaded_in_few_reads() -> None:
    """A second scattered over the log is loaded in few reads, although each link of its chain leads to a distant unit:
    messages for any of 20 seconds follow one another."""
    world = TimerWorld(TimerConfig(log_segment_size=52 * 10_000), segment_size=1 << 22)
    chance = random.Random(1)
    for _ in range(2000):
        world.send(START_MS + 30_000 + chance.randrange(20_000))
    world.run()
    world.checkpoint()
    world.open()
    reads, read = 0, world.timers._slots.log.read

    def counted(position: int, count: int) -> Any:
        nonlocal reads
        reads += 1
        return read(position, count)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(world.timers._slots.log, "read", counted)
        world.pass_time(51_000)
    assert len(world.bodies()) == 2000
    assert reads < 20 * 10


def test_what_a_start_found_is_known_until_its_second_is_over_whoever_looks_meanwhile() -> None:
    """A search before the current second is loaded does not make the start forget its findings about other seconds."""
    world = TimerWorld()
    world.send(START_MS + 27_891)
    world.send(START_MS + 1001)
    world.send(START_MS + 19_801)
    world.run()
    world.pass_time(19_000)
    world.checkpoint()
    world.pass_time(8900)
    assert len(world.bodies()) == 3
    world.open()
    world.curve(START_MS, 1000, 30)
    world.pass_time(3000)
    assert len(world.bodies()) == 3


@pytest.mark.parametrize("damage", ["cut", "zeros", "flipped in ours", "flipped in theirs"])
def test_a_checkpoint_that_is_damaged_is_not_one_of_somebody_else(damage: str) -> None:
    """A damaged checkpoint is not taken for one of another broker, since the lock says that duemq wrote the store: the
    start reads the whole commitlog, and no message is delivered twice."""
    world = TimerWorld()
    for number in range(10):
        world.send(world.now_ms + 1000 + 500 * number)
    world.schedule(1)
    world.pass_time(2500)
    world.checkpoint()
    world.pass_time(1000)
    delivered = len(world.bodies())
    assert 0 < delivered < 11
    data = world.files.names["/s/checkpoint"].data
    if damage == "cut":
        del data[985:]
    elif damage == "zeros":
        data[2048:] = bytes(len(data) - 2048)
    else:
        data[2100 if damage == "flipped in ours" else 5] ^= 1
    with capture_logs() as lines:
        world.open()
    assert next(line["event"] for line in lines if line["log_level"] == "warning") == "checkpoint_damaged"
    world.pass_time(10_000)
    assert len(world.bodies()) == len(set(world.bodies())) == 11


@pytest.mark.parametrize(
    "text",
    [
        "A\x01\x02B\x01c",
        "\x01v\x02A\x01b",
        "A\x01b\x02A\x01d",
        "A\x01b\x01c",
        "TAGS\x01a\x02TAGS\x01b",
        "A\x02B\x01c",
        "A\x01b",
    ],
)
@pytest.mark.parametrize("how", ["keep", "reschedule"])
def test_what_is_appended_once_more_has_the_properties_that_it_had(world: TimerWorld, text: str, how: str) -> None:
    place = world.send(START_MS + 5000, text=f"{text}\x02")
    world.run()
    if how == "keep":
        assert world.keep() == 1
    else:
        assert world.reschedule(place, START_MS + 5000)[0] is Cancelled.CANCELLED
    world.pass_time(6000)
    (message,) = world.delivered()
    assert message.properties_text.startswith(f"{text}\x02")


def test_a_timer_log_that_takes_nothing(world: TimerWorld) -> None:
    """While the timer log cannot be written, its messages cannot be delivered: the broker reports them as late, and
    after a while refuses new ones."""
    world.files.fail("write", errno.ENOSPC, "/s/timerlog")
    world.send(START_MS + 500)
    world.send(START_MS + 2500)
    world.run()
    assert world.state().late_ms == 0
    world.pass_time(2000)
    assert world.timers.refusal(world.now_ms + 5000, world.now_ms) is None, "it may pass"
    assert world.state().late_ms == 1500
    world.pass_time(1500)
    assert world.timers.refusal(world.now_ms + 5000, world.now_ms) is Refusal.STALLED
    assert "No space left" in (world.timers.enqueue_failure or "")
    assert world.state().late_ms == 3000
    assert world.bodies() == []
    world.files.heal()
    world.pass_time(200)
    assert sorted(world.bodies()) == [b"m1", b"m2"]
    assert world.timers.refusal(world.now_ms + 5000, world.now_ms) is None
    assert world.state().late_ms == 0


def test_records_of_the_timer_topic_without_a_deliver_time_are_passed() -> None:
    world = TimerWorld()
    world.put("REAL_TOPIC\x01orders\x02REAL_QID\x010\x02UNIQ_KEY\x01x")
    world.send(START_MS + 2000)
    with capture_logs() as logs:
        world.pass_time(5000)
    assert [line["physical_offset"] for line in logs if line["event"] == "timer_message_illegal"] == [0]
    assert world.bodies() == [b"m1"]


def test_an_hour_without_messages_is_noted_once() -> None:
    """Otherwise a start after a long time looks at all seconds since the last message."""
    world = TimerWorld()
    world.send(START_MS + 2000)
    world.pass_time(60_000)
    before = world.timers._slots.turns.second
    world.clock.advance(3_500_000)
    world.run()
    assert world.timers._slots.turns.second == before
    world.clock.advance(200_000)
    world.run()
    assert world.timers._slots.turns.second == world.clock.now_ms() // 1000 - 1
