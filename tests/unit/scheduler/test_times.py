"""When messages are due: the clock that somebody sets, tables that change, RocketMQ's older records."""

from __future__ import annotations

import struct

import pytest
from structlog.testing import capture_logs

from scheduler.clock_watch import ClockWatch
from scheduler.delay_levels import DelayLevels
from storage.clock import ManualClock, look
from storage.clock import look as observe
from storage.consume_queue import SCHEDULE_TOPIC
from tests.unit.scheduler.world import World

HOUR_MS = 3_600_000


def delivery_times(world: World, ms: int) -> dict[bytes, int]:
    """Let time pass, and note how long after the start each message came."""
    found: dict[bytes, int] = {}
    for passed in range(0, ms + 1, 100):
        world.run()
        for body in world.bodies():
            found.setdefault(body, passed)
        world.clock.advance(100)
    return found


@pytest.mark.parametrize("jump", [HOUR_MS, -HOUR_MS])
def test_setting_the_clock_makes_nothing_early_and_nothing_stall(jump: int) -> None:
    world = World()
    world.clock.advance(2 * HOUR_MS)
    world.run()
    world.schedule(3, b"before 30")
    world.schedule(2, b"before 5")
    world.clock.advance(1000)
    with capture_logs() as logs:
        world.clock.set_wall(world.clock.now_ms() + jump)
        world.schedule(1, b"after 1")
        world.schedule(2, b"after 5")
        world.schedule(3, b"after 30")
        times = delivery_times(world, 40_000)
    assert times == {b"before 30": 29_000, b"before 5": 4000, b"after 1": 1000, b"after 5": 5000, b"after 30": 30_000}
    events = [line for line in logs if line["event"].startswith("clock_set")]
    assert [(line["event"], line["ms"]) for line in events] == [
        ("clock_set_forward" if jump > 0 else "clock_set_back", HOUR_MS)
    ]


@pytest.mark.parametrize("jump", [HOUR_MS, -HOUR_MS])
def test_a_message_that_was_withdrawn_does_not_hide_when_the_clock_was_set(jump: int) -> None:
    world = World()
    world.clock.advance(2 * HOUR_MS)
    world.schedule(2, b"before 5")
    world.run()
    world.clock.set_wall(world.clock.now_ms() + jump)
    for body in (b"after 5", b"cancelled"):
        world.schedule(2, body)
    queue = world.levels.levels[2].queue
    physical, size, _ = queue.unit(2) or (0, 0, 0)
    message = world.store.message_at(physical, size)
    assert message is not None
    world.levels.withdraw(message)
    assert delivery_times(world, 6000) == {b"before 5": 5000, b"after 5": 5000}


@pytest.mark.parametrize("jump", [-20_000, -5000, -600, 600, 5000, 20_000, 40_000])
@pytest.mark.parametrize("look", ["step", "report"])
def test_a_message_that_has_waited_is_not_taken_for_one_that_came_after_the_clock_was_set(jump: int, look: str) -> None:
    """Its store time may be as near to the new time as that of a new one."""
    world = World()
    world.clock.advance(2 * HOUR_MS)
    world.schedule(3, b"x")
    if look == "step":
        world.run()
    world.clock.advance(20_000)
    if look == "report":
        world.levels.report(observe(world.clock))
    world.clock.set_wall(world.clock.now_ms() + jump)
    assert delivery_times(world, 40_000) == {b"x": 10_000}


def test_the_clock_set_back_and_forward_again_with_restarts_between() -> None:
    world = World()
    world.clock.advance(2 * HOUR_MS)
    world.run()
    world.schedule(3, b"0")
    world.clock.set_wall(world.clock.now_ms() - HOUR_MS)
    world.run()
    world.schedule(3, b"1")
    world.checkpoint()
    world.open()
    world.clock.advance(10_000)
    world.schedule(3, b"2")
    world.clock.set_wall(world.clock.now_ms() + HOUR_MS)
    assert delivery_times(world, 40_000) == {b"0": 20_000, b"1": 20_000, b"2": 30_000}


def test_the_clock_set_after_the_table_was_shortened() -> None:
    world = World()
    world.schedule(3, b"30 s")
    world.set_table("1s 5s 2s")
    world.clock.advance(5000)
    world.clock.set_wall(world.clock.now_ms() + 10_000)
    assert delivery_times(world, 26_000) == {b"30 s": 25_000}


class HeldUpClock(ManualClock):
    """The process is held up between two readings, sometimes."""

    def __init__(self) -> None:
        super().__init__()
        self.pauses = 0

    def now_ms(self) -> int:
        if self.pauses:
            self.pauses -= 1
            self.advance(700)
        return super().now_ms()


def test_a_process_that_is_held_up_sees_no_clock_set() -> None:
    clock = HeldUpClock()
    watch = ClockWatch(look(clock))
    for pauses in (0, 1, 3):
        clock.pauses = pauses
        assert watch.jump_ms(look(clock)) == 0
    clock.set_wall(clock.now_ms() + 5000)
    clock.pauses = 1
    assert watch.jump_ms(look(clock)) == 5000


def test_files_that_expire_under_several_runs_are_counted() -> None:
    world = World(segment_size=4096)
    for number in range(3):
        world.schedule(3, b"%d" % number + bytes(1000))
    world.set_table("1s 5s 20s")
    for number in range(3, 8):
        world.schedule(3, b"%d" % number + bytes(1000))
    world.store.log.drop_before(8192)
    for queue in world.store.all_queues():
        queue.advance_min(world.store.log.begin)
    lost = world.store.ensure_queue(SCHEDULE_TOPIC, 2).min_offset
    assert lost > 3
    level = world.levels.levels[3]
    assert level.waiting == 8 - lost
    with capture_logs() as logs:
        world.pass_time(31_000)
    assert [body[:1] for body in world.bodies()] == [b"%d" % number for number in range(lost, 8)]
    assert (level.waiting, level.skipped) == (0, lost)
    assert [line["event"] for line in logs if line["event"] == "level_offset_corrected"]


def test_the_clock_set_back_while_the_broker_was_down() -> None:
    world = World()
    world.clock.advance(2 * HOUR_MS)
    world.schedule(2, b"0")
    world.stop()
    world.clock.set_wall(world.clock.now_ms() - HOUR_MS)
    with capture_logs() as logs:
        world.open()
    assert [line["while_running"] for line in logs if line["event"] == "clock_set_back"] == [False]
    world.schedule(2, b"1")
    assert delivery_times(world, 6000) == {b"0": 5000, b"1": 5000}, "not early, and not an hour late"


def test_levels_change_while_messages_wait_and_promises_are_kept() -> None:
    world = World()
    world.schedule(3, b"30 s")
    world.set_table("1s 10s 2s 7s")
    for level, body in ((2, b"10 s"), (3, b"2 s"), (4, b"7 s")):
        world.schedule(level, body)
    assert delivery_times(world, 31_000) == {b"30 s": 30_000, b"10 s": 10_000, b"2 s": 2000, b"7 s": 7000}
    assert len(world.levels.levels[3].runs) == 1


def test_a_shortened_level_is_known_after_a_kill() -> None:
    world = World()
    world.schedule(3, b"old 0")
    world.schedule(3, b"old 1")
    shorter = world.set_table("1s 5s 2s")
    world.schedule(3, b"new 0")
    world.pass_time(2000)
    assert world.bodies() == [b"new 0"]
    world.schedule(3, b"new 1")
    world.checkpoint()
    world.open(shorter)
    world.pass_time(2000)
    assert world.bodies() == [b"new 0", b"new 1"]
    world.open(shorter)
    world.pass_time(26_000)
    assert world.bodies() == [b"new 0", b"new 1", b"old 0", b"old 1"], "at the time they were promised"
    assert world.twice() == []


def test_a_promise_survives_consume_queues_that_are_made_anew() -> None:
    world = World()
    world.schedule(3, b"30 s")
    world.set_table("1s 5s 60s")
    world.stop()
    for name in [name for name in world.files.names if "/consumequeue/" in name]:
        world.files.remove(name)
    world.open(DelayLevels("1s 5s 60s"))
    assert delivery_times(world, 31_000) == {b"30 s": 30_000}


def test_records_of_rocketmq_say_no_deliver_time_and_get_one_from_the_table() -> None:
    world = World()
    world.schedule(3, b"30 s", promises=False)
    world.stop()
    for name in [name for name in world.files.names if "/consumequeue/" in name]:
        world.files.remove(name)
    world.open(DelayLevels("1s 5s 60s"))
    assert delivery_times(world, 61_000) == {b"30 s": 60_000}


def test_tags_codes_that_are_consumequeue_ext_addresses() -> None:
    """RocketMQ with enableConsumeQueueExt keeps the deliver time elsewhere: record and level tell it as well."""
    world = World()
    world.schedule(2, b"0")
    world.schedule(2, b"1")
    queue = world.store.ensure_queue(SCHEDULE_TOPIC, 1)
    queue.write_tail()
    data = world.files.names[f"/s/consumequeue/{SCHEDULE_TOPIC}/1/{0:020}"].data
    data[12:20] = struct.pack(">q", -(2**63) + 5)
    world.open()
    assert delivery_times(world, 6000) == {b"0": 5000, b"1": 5000}


def test_a_level_that_is_late_is_logged_with_the_reason() -> None:
    world = World()
    world.schedule(1)
    world.clock.advance(2500)
    with capture_logs() as logs:
        world.levels.report(look(world.clock))
        world.levels.report(look(world.clock))
    (line,) = [line for line in logs if line["event"] == "level_late"]
    assert (line["delay_level"], line["late_ms"], line["waiting"]) == (1, 1500, 1)
    assert line["reason"] == "many messages are due at once"
    world.run()
    world.levels.report(look(world.clock))
    described = world.levels.describe(world.levels.levels[1], world.clock.now_ms())
    assert described.startswith("pending=0 nextDue=- lateMillis=0 lastLateMillis=1500")
