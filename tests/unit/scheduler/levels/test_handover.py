"""Goal: after a clean stop RocketMQ's broker delivers the messages that wait in levels, and none that was delivered;
and so does duemq, when it takes the store over from a broker that did nothing.

Method: the files are read as RocketMQ's broker (4.9.7) reads them, by their bytes: each level from its offset in
delayOffset.json on, passing over units whose sizes are those of no record."""

from __future__ import annotations

import errno
import json
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import pytest
from structlog.testing import capture_logs

from duemq.protocol.errors import RecordError
from duemq.protocol.records.record import decode
from duemq.protocol.topics import SCHEDULE_TOPIC
from duemq.scheduler.levels import service
from duemq.scheduler.levels.delivery import DeliveryConfig
from duemq.scheduler.levels.table import DelayLevels
from duemq.storage.errors import NotDurable, StoreFull
from tests.crash.simulated_files import Call
from tests.unit.scheduler.levels.test_deliver_times import delivery_times
from tests.unit.scheduler.world import World

PROGRESS = "/s/config/delayOffset.json"
SHORT = DelayLevels("1s 5s 5s")


def rocketmq_delivers(world: World) -> list[bytes]:
    """Return the bodies that RocketMQ's broker would deliver sooner or later from the closed store of a world."""
    offsets = json.loads(world.files.read_whole(PROGRESS) or b"{}")["offsetTable"]
    log = world.files.read_whole(f"/s/commitlog/{0:020}") or b""
    bodies = []
    for level, offset in offsets.items():
        directory = f"/s/consumequeue/{SCHEDULE_TOPIC}/{int(level) - 1}"
        files = [world.files.read_whole(f"{directory}/{name}") or b"" for name in sorted(world.files.list(directory))]
        units = list(struct.iter_unpack(">qiq", b"".join(files)))
        for physical, size, _ in units[offset:]:
            if size:
                try:
                    bodies.append(decode(log[physical : physical + size]).body)
                except RecordError:
                    continue
    return sorted(bodies)


def overtaken(world: World) -> None:
    """Deliver messages of a shortened level ahead of those that were promised more time."""
    for number in range(3):
        world.schedule(3, b"30 s %d" % number)
    world.set_table(SHORT.text)
    for number in range(3):
        world.schedule(3, b"5 s %d" % number)
        world.pass_time(1000)
    world.schedule(3, b"waits as well")
    world.pass_time(4500)
    assert world.bodies() == [b"5 s 0", b"5 s 1", b"5 s 2"]


LEFT = [b"30 s 0", b"30 s 1", b"30 s 2", b"waits as well"]


@pytest.mark.parametrize("kill", [False, True])
def test_what_was_delivered_before_others_is_not_delivered_again(*, kill: bool) -> None:
    world = World()
    overtaken(world)
    if kill:
        world.open(SHORT)
    world.stop()
    assert rocketmq_delivers(world) == LEFT
    world.files.write_whole("/s/lock", b"lock")
    world.open(SHORT)
    world.pass_time(30_000)
    assert sorted(world.bodies()) == sorted([b"5 s 0", b"5 s 1", b"5 s 2", *LEFT])
    assert world.twice() == []


def test_it_is_known_to_have_been_delivered_and_not_withdrawn() -> None:
    world = World()
    overtaken(world)
    world.stop()
    world.open(SHORT)
    queue = world.levels.levels[3].queue
    known = {}
    for offset in range(7):
        unit = queue.unit(offset)
        assert unit is not None
        message = world.store.message_at(unit[0])
        assert message is not None
        known[message.body] = world.levels.is_waiting(message)
    assert known == {b"30 s 0": True, b"30 s 1": True, b"30 s 2": True, b"waits as well": True} | {
        b"5 s %d" % number: False for number in range(3)
    }


def test_too_many_are_told() -> None:
    world = World()
    overtaken(world)
    with capture_logs() as logs:
        world.stop(most_handed_over=2)
    assert [line["delay_level"] for line in logs if line["event"] == "levels_not_handed_over"] == [3]
    world.open(SHORT)
    world.pass_time(30_000)
    assert world.twice() == []


def test_what_is_not_known_to_be_on_the_disk_when_the_stop_begins_counts_as_delivered() -> None:
    """The stop waits for deliveries that are not known to be on the disk when it begins, so RocketMQ does not repeat
    them."""
    world = World(delivery=DeliveryConfig(is_async=True), sync_flush=True)
    for number in range(3):
        world.schedule(1, b"%d" % number)
    world.clock.advance(1000)
    world.run()
    assert world.levels.levels[1].offset == 0, "nothing is flushed"
    world.stop()
    assert rocketmq_delivers(world) == []


@contextmanager
def rocketmqs_store(world: World, call: Call, number: int) -> Iterator[None]:
    """A store that RocketMQ had last, with a message, in which a call fails when the checkpoint is to be written."""
    world.schedule(1, b"x")
    world.stop()
    world.files.write_whole("/s/lock", b"lock")
    with patch.object(world.files, "heal"):
        world.files.faults[call, "/s/checkpoint"] = number
        yield
    assert world.files.read_whole("/s/lock") == b"lock"
    assert not world.files.exists("/s/abort"), "it was stopped cleanly"


def test_a_store_is_taken_over_once_that_is_on_the_disk() -> None:
    """duemq takes over RocketMQ's store only once the checkpoint that says so is durable: a start that fails before
    leaves the store RocketMQ's."""
    world = World()
    with rocketmqs_store(world, "sync", errno.EIO), pytest.raises(NotDurable, match="checkpoint"):
        world.open()
    world.open()
    assert world.files.read_whole("/s/lock") == b"duemq"
    assert world.files.exists("/s/abort")
    world.pass_time(1000)
    assert world.bodies() == [b"x"]


def test_a_store_is_not_taken_over_where_there_is_no_room_to_say_so() -> None:
    world = World()
    with rocketmqs_store(world, "name", errno.ENOSPC), pytest.raises(StoreFull, match="take over"):
        world.open()


@pytest.mark.parametrize("loss", ["RocketMQ had the store", "the checkpoint is gone"])
def test_messages_keep_their_times_where_nobody_noted_how_the_table_changed(
    loss: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages keep their times when no note says how the table changed, although their queue is then not in the order
    of their times."""
    monkeypatch.setattr(service, "_SETTLE_UNITS", 3)
    world = World()
    for seconds in (15, 60, 20, 50, 5, 60):
        table = world.set_table(f"1s 5s {seconds}s")
        for number in range(4):
            world.schedule(3, b"%d s, %d" % (seconds, number))
    world.stop()
    if loss == "RocketMQ had the store":
        world.files.write_whole("/s/lock", b"lock")
    else:
        world.files.remove("/s/checkpoint")
    world.open(table)
    times = delivery_times(world, 62_000)
    assert {body: ms for body, ms in times.items() if ms != int(body.split()[0]) * 1000} == {}
    assert len(times) == 20, "those of 60 s have the same bodies"
    assert len(world.bodies()) == 24


def test_a_level_of_many_runs_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "_MOST_RUNS", 3)
    world = World()
    for seconds in (30, 25, 20, 15):
        world.set_table(f"1s 5s {seconds}s")
        world.schedule(3, b"%d" % seconds)
    world.stop()
    world.files.write_whole("/s/lock", b"lock")
    with capture_logs() as logs:
        world.open(SHORT)
    (line,) = (line for line in logs if line["event"] == "level_not_in_order")
    assert (line["delay_level"], line["offset"]) == (3, 3)
    world.pass_time(30_000)
    assert sorted(world.bodies()) == [b"15", b"20", b"25", b"30"], "late, if need be"


@pytest.mark.parametrize("which", [0, 2])
def test_a_message_that_was_cancelled_holds_up_none_of_a_level_that_was_shortened_between_two_runs(which: int) -> None:
    world = World()
    for number in range(5):
        world.schedule(3, b"%d" % number)
    unit = world.levels.levels[3].queue.unit(which)
    assert unit is not None
    message = world.store.message_at(unit[0])
    assert message is not None
    world.levels.withdraw(message)
    world.stop()
    world.open(SHORT)
    assert delivery_times(world, 31_000) == {b"%d" % number: 5000 for number in range(5) if number != which}


@pytest.mark.parametrize("end", ["stop", "kill"])
def test_a_table_that_was_shortened_between_two_runs_stays_so(end: str) -> None:
    """After a table was shortened between two runs its messages keep the shorter delay, also at later starts with the
    same table; a longer table later delays none of them."""
    world = World()
    for number in range(3):
        world.schedule(3, b"%d" % number)
    world.stop()
    for table in (SHORT, SHORT, DelayLevels("1s 5s 20s")):
        world.open(table)
        world.run()
        world.checkpoint()
        now = world.clock.now_ms()
        due = [time for part in world.levels.deliver_times(now) for time in part[2]]  # type: ignore[index]
        assert due == [now + 5000] * 3
        told = [each for each in world.levels.waiting_before(world.store.log.end, now) if each is not None]
        assert [each[1] for each in told if isinstance(each, tuple)] == due
        if end == "stop":
            world.stop()
    world.open(DelayLevels("1s 5s 20s"))
    world.schedule(3, b"new")
    times = delivery_times(world, 21_000)
    assert times == {b"0": 5000, b"1": 5000, b"2": 5000, b"new": 20_000}


def test_without_delay_offsets_of_rocketmq_what_we_delivered_is_known() -> None:
    world = World()
    for number in range(3):
        world.schedule(1, b"%d" % number)
    world.schedule(3, b"waits")
    world.pass_time(1000)
    world.stop()
    world.files.write_whole("/s/lock", b"lock")
    world.files.remove(PROGRESS)
    with capture_logs() as logs:
        world.open()
    assert "delay_offsets_missing" in [line["event"] for line in logs]
    world.pass_time(30_000)
    assert world.bodies() == [b"0", b"1", b"2", b"waits"]
