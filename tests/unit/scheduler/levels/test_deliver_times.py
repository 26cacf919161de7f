"""Deliver times of level messages: clocks that are set, tables that change, RocketMQ's older records."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from duemq.protocol.topics import SCHEDULE_TOPIC
from duemq.scheduler.clock_watch import ClockWatch
from duemq.scheduler.levels.delivery import DeliveryConfig
from duemq.scheduler.levels.level import Level
from duemq.scheduler.levels.table import DelayLevels
from duemq.storage.clock import ManualClock, look
from duemq.storage.clock import look as observe
from tests.unit.scheduler.world import World
from tests.unit.storage.conftest import append

HOUR_MS = 3_600_000


EXACT_MS = 60_000
"""Longer than any delay whose message is expected at an exact time."""


def delivery_times(world: World, ms: int) -> dict[bytes, int]:
    """Let time pass, and return how long after the start each message was delivered: to 100 ms within the first
    `EXACT_MS`, then to 10 s."""
    found: dict[bytes, int] = {}
    known = passed = 0
    while passed <= ms:
        world.run()
        for message in world.delivered(first=known):
            found.setdefault(message.body, passed)
            known += 1
        step = 100 if passed < EXACT_MS else 10_000
        world.clock.advance(step)
        passed += step
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
    """A message that has waited is not taken for one that came after the clock was set, although its store time may be
    as near to the new time."""
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


@pytest.mark.parametrize("ms", [3_600_000, 15_000, -3_600_000, -15_000])
def test_the_clock_set_wrong_and_right_again_before_anybody_looks(ms: int) -> None:
    """The clock may be set wrong and right again between two steps: a message stored meanwhile triggers a look at the
    clock."""
    world = World()
    world.schedule(3, b"before")
    world.step()
    for body, jump in ((b"while", ms), (b"after", -ms)):
        world.clock.set_wall(world.clock.now_ms() + jump)
        wakes = world.wakes
        world.schedule(3, body)
        assert world.wakes == wakes + 1
        world.step()
    assert delivery_times(world, 31_000) == {b"before": 30_000, b"while": 30_000, b"after": 30_000}


def test_a_report_that_sees_the_clock_set_has_it_looked_at() -> None:
    world = World()
    world.schedule(3, b"before")
    world.step()
    wakes = world.wakes
    world.levels.report(observe(world.clock))
    assert world.wakes == wakes
    world.clock.set_wall(world.clock.now_ms() + 1000)
    world.levels.report(observe(world.clock))
    assert world.wakes == wakes + 1


class HeldUpClock(ManualClock):
    """A clock with which the process is sometimes held up between two readings."""

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
    with capture_logs() as logs:
        world.step()
        assert level.waiting == 8 - lost
        world.pass_time(31_000)
    assert [body[:1] for body in world.bodies()] == [b"%d" % number for number in range(lost, 8)]
    assert (level.waiting, level.skipped) == (0, lost)
    assert [line["event"] for line in logs if line["event"] == "level_offset_corrected"]


def expire_half(world: World, level: Level) -> int:
    """Let half of the commitlog files and their units expire, whose messages were replaced by new records as retention
    does; return their number."""
    end = world.store.log.end // 2 // world.segment_size * world.segment_size
    units = [level.queue.unit(offset) for offset in range(level.queue.next_offset)]
    gone = [unit for unit in units if unit is not None and unit[0] < end]
    for unit in gone:
        message = world.store.message_at(unit[0])
        assert message is not None
        world.levels.withdraw(message)
    world.store.log.drop_before(end)
    for queue in world.store.all_queues():
        queue.advance_min(world.store.log.begin)
    assert 0 < level.queue.min_offset == len(gone) < level.queue.next_offset
    world.levels.expire_next()
    return len(gone)


@pytest.mark.parametrize("is_due", [False, True], ids=["not due", "due and refused"])
def test_what_retention_appended_once_more_is_no_loss(*, is_due: bool) -> None:
    """Messages that retention appended once more do not count as lost, and the counts are right at once. A put that the
    store refused goes on with the messages that are left."""
    world = World(None, DeliveryConfig(is_async=True), segment_size=4096)
    for number in range(300):
        world.schedule(1, b"%d" % number)
    level = world.levels.levels[1]
    world.step()
    if is_due:
        world.clock.advance(1000)
        world.store.health.fill("full")
        world.step()
        assert level.failed
        assert level.runs[0].cursor == 300
        world.store.health.has_room()
    with capture_logs() as logs:
        gone = expire_half(world, level)
        assert gone > 100, "a file of the level's queue is gone, too"
        assert level.waiting == 300 - gone
        world.step()
        assert level.waiting == 300 - gone - level.delivered
        world.pass_time(60_000)
    assert world.bodies() == [b"%d" % number for number in range(gone, 300)]
    assert (level.waiting, level.skipped, level.withdrawn, level.pending, level.failed) == (0, 0, 0, 0, {})
    assert [line for line in logs if line["log_level"] != "info"] == []
    assert level.offset == 300


def test_what_waits_behind_files_that_expired_is_found() -> None:
    """Messages behind expired files are found, although the head of the level is not due and no step has looked where
    its queue begins now."""
    world = World(segment_size=4096)
    for number in range(8):
        world.schedule(3, b"%d" % number + bytes(1000))
    world.step()
    world.store.log.drop_before(8192)
    for queue in world.store.all_queues():
        queue.advance_min(world.store.log.begin)
    level = world.levels.levels[3]
    lost = level.queue.min_offset
    assert level.runs[0].cursor < lost < 8
    now_ms = world.clock.now_ms()
    found = [each for each in world.levels.waiting_before(world.store.log.end, now_ms) if isinstance(each, tuple)]
    assert [message.body[:1] for message, _ in found] == [b"%d" % number for number in range(lost, 8)]
    assert sum(len(part[2]) for part in world.levels.deliver_times(now_ms) if isinstance(part, tuple)) == 8 - lost


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


@pytest.mark.parametrize("is_running", [False, True])
@pytest.mark.parametrize("end", ["stop", "kill"])
def test_the_clock_that_was_set_back_counts_once_however_often_the_broker_starts(end: str, is_running: bool) -> None:
    """A clock set back counts once however often the broker starts, also if no message was stored since: then the
    newest record stays in the future."""
    world = World()
    world.clock.advance(10 * HOUR_MS)
    world.schedule(3, b"0")
    world.run()
    if not is_running:
        world.stop()
    world.clock.set_wall(world.clock.now_ms() - HOUR_MS)
    if not is_running:
        world.open()
    world.run()
    for _ in range(3):
        if end == "stop":
            world.stop()
        else:
            world.checkpoint()
        world.clock.advance(2000)
        world.open()
        world.run()
        assert world.levels.next_due_ms is not None
    assert delivery_times(world, 60_000) == {b"0": 30_000 - 6000}


@given(
    st.lists(
        st.sampled_from(
            ["schedule", "back", "back while down", "forward", "stop", "kill", "checkpoint", "wait", "report", "run"]
        ),
        max_size=14,
    )
)
def test_no_message_is_early_whatever_the_clock_and_the_broker_do(steps: list[str]) -> None:
    """No message is early although the clock is set forward while the broker runs and back at any time, also while the
    broker is down, which it can notice only in part. Each message is delivered when its delay is over by a clock that
    is never set, or later by the part that was not noticed."""
    world = World()
    world.clock.advance(100 * HOUR_MS)
    promised = dict[bytes, float]()
    for number, step in enumerate([*steps, "schedule"]):
        if step == "schedule":
            world.run()
            promised[b"%d" % number] = world.clock.monotonic() + 30
            world.schedule(3, b"%d" % number)
        elif step in ("back", "forward"):
            world.run()
            world.clock.set_wall(world.clock.now_ms() + (-HOUR_MS if step == "back" else HOUR_MS))
            world.run()
        elif step in ("stop", "kill", "back while down"):
            if step == "kill":
                world.checkpoint()
            else:
                world.stop()
            if step == "back while down":
                world.clock.set_wall(world.clock.now_ms() - HOUR_MS)
            world.open()
        elif step == "checkpoint":
            world.checkpoint()
        elif step == "report":
            world.levels.report(observe(world.clock))
        elif step == "wait":
            world.clock.advance(2000)
        else:
            world.run()
    while promised:
        due = world.run()
        for message in world.delivered():
            if (at := promised.pop(message.body, None)) is not None:
                assert world.clock.monotonic() >= at - 0.001
        assert due is not None or not promised
        world.clock.advance(max(1, (due or 0) - world.clock.now_ms()))


def test_levels_change_while_messages_wait_and_promises_are_kept() -> None:
    world = World()
    world.schedule(3, b"30 s")
    world.set_table("1s 10s 2s 7s")
    for level, body in ((2, b"10 s"), (3, b"2 s"), (4, b"7 s")):
        world.schedule(level, body)
    assert delivery_times(world, 31_000) == {b"30 s": 30_000, b"10 s": 10_000, b"2 s": 2000, b"7 s": 7000}
    assert len(world.levels.levels[3].runs) == 1


@pytest.mark.parametrize("then", ["live", "restart", "kill"])
def test_a_level_that_was_gone_comes_back_shorter(then: str) -> None:
    """Messages that wait in a level from before it was removed do not hold up new ones when it comes back shorter."""
    world = World()
    world.schedule(3, b"30 s")
    world.set_table("1s")
    table = world.set_table("1s 5s 2s")
    if then == "restart":
        world.stop()
    elif then == "kill":
        world.checkpoint()
    if then != "live":
        world.open(table)
    world.schedule(3, b"2 s")
    assert delivery_times(world, 31_000) == {b"30 s": 30_000, b"2 s": 2000}


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
    world.put(3, b"30 s", "REAL_TOPIC\x01orders\x02REAL_QID\x013")
    world.stop()
    for name in [name for name in world.files.names if "/consumequeue/" in name]:
        world.files.remove(name)
    world.open(DelayLevels("1s 5s 60s"))
    assert delivery_times(world, 61_000) == {b"30 s": 60_000}


def test_tags_codes_that_are_consumequeue_ext_addresses() -> None:
    """Tags codes that are addresses into consumequeue_ext are replaced: RocketMQ with enableConsumeQueueExt keeps the
    deliver time there, but record and level give it as well."""
    world = World()
    world.schedule(2, b"0")
    world.schedule(2, b"1")
    queue = world.store.ensure_queue(SCHEDULE_TOPIC, 1)
    queue.write_tail()
    data = world.files.names[f"/s/consumequeue/{SCHEDULE_TOPIC}/1/{0:020}"].data
    data[12:20] = struct.pack(">q", -(2**63) + 5)
    world.open()
    assert delivery_times(world, 6000) == {b"0": 5000, b"1": 5000}


@pytest.mark.parametrize("damage", [None, *range(20), "removed", "zeroed"])
def test_levels_keep_their_times_with_an_extension_in_any_state(damage: int | str | None) -> None:
    """`damage`: a byte of the first unit that is changed, or what becomes of the file."""
    world = World(is_extended=True)
    world.schedule(2, b"0")
    world.clock.advance(500)
    world.schedule(2, b"1")
    path = f"/s/consumequeue_ext/{SCHEDULE_TOPIC}/1/{0:020}"
    data = world.files.names[path].data
    assert struct.unpack(">hqqhhqqh", data[:40]) == (20, 1_005_000, 1_000_000, 0, 20, 1_005_500, 1_000_500, 0)
    world.stop()
    if damage == "removed":
        world.files.remove(path)
    elif damage == "zeroed":
        data[:40] = bytes(40)
    elif isinstance(damage, int):
        data[damage] ^= 0x55
    world.open()
    assert delivery_times(world, 6000) == {b"0": 4500, b"1": 5000}
    assert world.twice() == []


@pytest.mark.parametrize("jump_ms", [HOUR_MS, -HOUR_MS])
def test_messages_whose_units_say_no_time_wait_as_long_where_the_clock_is_set(jump_ms: int) -> None:
    world = World(is_extended=True)
    world.clock.advance(2 * HOUR_MS)
    world.schedule(3, b"before")
    world.stop()
    world.files.remove(f"/s/consumequeue_ext/{SCHEDULE_TOPIC}/2/{0:020}")
    world.open()
    world.run()
    world.clock.advance(10_000)
    world.clock.set_wall(world.clock.now_ms() + jump_ms)
    world.run()
    world.schedule(3, b"after")
    assert delivery_times(world, 31_000) == {b"before": 20_000, b"after": 30_000}


def test_a_promise_survives_an_extension_that_does_not_fit_the_table() -> None:
    """The deliver times in the extension do not follow from the new table, and are not believed: the records tell."""
    world = World(is_extended=True)
    world.schedule(3, b"30 s")
    world.stop()
    world.open(DelayLevels("1s 5s 60s"))
    world.stop()
    world.open(DelayLevels("1s 5s 90s"))
    assert delivery_times(world, 91_000) == {b"30 s": 30_000}


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


def test_no_level_is_late_because_somebody_sets_the_clock() -> None:
    world = World()
    world.schedule(3)
    world.run()
    world.clock.set_wall(world.clock.now_ms() + HOUR_MS)
    with capture_logs() as logs:
        world.levels.report(look(world.clock))
        world.run()
        world.levels.report(look(world.clock))
    assert [line["event"] for line in logs] == ["clock_set_forward"]


@pytest.mark.parametrize("jump_ms", [-HOUR_MS, -20_000])
@pytest.mark.parametrize("end", ["stop", "kill after a checkpoint", "kill"])
@pytest.mark.parametrize("stored", ["level", "plain"])
def test_the_clock_set_back_and_something_stored_right_before_the_end(jump_ms: int, end: str, stored: str) -> None:
    """A clock set back right before the end, unnoticed by any step, is noticed by the records stored after it."""
    world = World()
    world.clock.advance(2 * HOUR_MS)
    world.run()
    world.schedule(3, b"before")
    world.levels.report(observe(world.clock))
    world.clock.advance(1000)
    if end == "kill":
        world.checkpoint()
    world.schedule(3, b"not seen")
    world.clock.set_wall(world.clock.now_ms() + jump_ms)
    if stored == "level":
        world.schedule(3, b"after")
    else:
        append(world.store, "plain", 0, b"x", now_ms=world.clock.now_ms())
    if end == "stop":
        world.stop()
    elif end != "kill":
        world.checkpoint()
    world.clock.advance(2000)
    for _ in range(2):
        world.open()
    expected = {b"before": 27_000, b"not seen": 28_000} | ({b"after": 28_000} if stored == "level" else {})
    # The time between the last look and that record is unknown: messages are late by so much, and never early.
    times = delivery_times(world, 40_000)
    assert times.keys() == expected.keys()
    for body, passed in expected.items():
        assert passed <= times[body] <= passed + 2000, (body, times)


@pytest.mark.parametrize("jump_ms", [HOUR_MS, -HOUR_MS])
def test_the_clock_set_right_before_a_clean_stop(jump_ms: int) -> None:
    """A clock set right before a clean stop is noticed, although no message is stored after it: the stop looks at the
    clock."""
    world = World()
    world.clock.advance(2 * HOUR_MS)
    world.run()
    world.schedule(3, b"x")
    world.run()
    world.clock.advance(1000)
    world.clock.set_wall(world.clock.now_ms() + jump_ms)
    world.stop()
    world.clock.advance(2000)
    world.open()
    assert delivery_times(world, 40_000) == {b"x": 27_000}


@pytest.mark.parametrize("jump_ms", [HOUR_MS, -HOUR_MS, 20_000, -20_000])
@pytest.mark.parametrize("end", ["stop", "kill", "kill, and something stored"])
@pytest.mark.parametrize("is_down", [False, True])
@pytest.mark.parametrize("is_same_boot", [False, True])
def test_the_clock_set_that_nobody_looked_at_before_the_end(
    jump_ms: int, end: str, *, is_down: bool, is_same_boot: bool
) -> None:
    """A clock set unnoticed before the end is detected by a clock that is never set, as long as the machine was not
    restarted. After a restart a step back is known in part, and a step forward counts as passed time."""
    world = World()
    world.clock.boot_id = b"the first boot.."
    world.clock.advance(2 * HOUR_MS)
    world.schedule(3, b"before")
    world.run()
    world.checkpoint()
    world.clock.advance(1000)
    world.schedule(3, b"not noted")
    world.clock.advance(1000)
    if end == "stop":
        world.stop()
    if not is_down or end != "stop":
        world.clock.set_wall(world.clock.now_ms() + jump_ms)
    if end == "kill, and something stored":
        world.schedule(3, b"after")
    if end == "stop" and not is_down:
        world.open()
        world.stop()
    if is_down and end == "stop":
        world.clock.set_wall(world.clock.now_ms() + jump_ms)
    if not is_same_boot:
        world.clock.boot_id = b"the second boot."
    world.clock.advance(2000)
    with capture_logs() as logs:
        for _ in range(3):  # it counts once
            world.open()
    expected = {b"before": 26_000, b"not noted": 27_000}
    if end == "kill, and something stored":
        expected[b"after"] = 28_000
    times = delivery_times(world, 2 * HOUR_MS if not is_same_boot else 40_000)
    assert times.keys() == expected.keys()
    if is_same_boot:
        assert times == expected
        told = [line["event"] for line in logs if line["event"].startswith("clock_set")]
        if not (end == "stop" and not is_down):  # otherwise the first of the two starts has logged it
            assert set(told) == {"clock_set_forward" if jump_ms > 0 else "clock_set_back"}
    elif jump_ms < 0:
        assert all(passed >= expected[body] for body, passed in times.items())


@given(
    st.lists(
        st.sampled_from(["schedule", "set", "set and kill", "set while down", "stop", "kill", "checkpoint", "wait"]),
        max_size=14,
    ),
    st.sampled_from((HOUR_MS, -HOUR_MS, 100_000, -100_000)),
)
def test_messages_keep_their_delay_whatever_the_clock_does_until_the_machine_is_started_again(
    steps: list[str], jump_ms: int
) -> None:
    world = World()
    world.clock.boot_id = b"the only boot..."
    world.clock.advance(100 * HOUR_MS)
    world.run()
    world.checkpoint()
    promised = dict[bytes, float]()

    def schedule(name: str) -> None:
        promised[name.encode()] = world.clock.monotonic() + 30
        world.schedule(3, name.encode())

    for number, step in enumerate([*steps, "schedule"]):
        if step == "schedule":
            world.run()
            schedule(f"{number}")
        elif step == "set":
            world.clock.set_wall(world.clock.now_ms() + jump_ms)
            world.run()
        elif step == "set and kill":
            world.clock.set_wall(world.clock.now_ms() + jump_ms)
            schedule(f"{number}")
            world.open()
        elif step in ("stop", "kill", "set while down"):
            if step != "kill":
                world.stop()
            if step == "set while down":
                world.clock.set_wall(world.clock.now_ms() + jump_ms)
            world.open()
        elif step == "checkpoint":
            world.checkpoint()
        else:
            world.clock.advance(2000)
        if world.levels.wants_checkpoint:  # the broker makes it at once
            world.checkpoint()
    while promised:
        due = world.run()
        for message in world.delivered():
            if (at := promised.pop(message.body, None)) is not None:
                assert at - 0.001 <= world.clock.monotonic() <= at + 0.001 + 2.0 * steps.count("wait")
        assert due is not None or not promised
        world.clock.advance(max(1, (due or 0) - world.clock.now_ms()))


@pytest.mark.parametrize("jump_ms", [3000, -3000, 1000, 10_000, -10_000, HOUR_MS])
@pytest.mark.parametrize("since_ms", [500, 2700, 6000])
def test_the_clock_set_while_a_killed_broker_is_down(jump_ms: int, since_ms: int) -> None:
    """When the clock is set while a killed broker is down, messages stored since the last look at the clock may be from
    before or after the change; they are late by at most the change."""
    world = World()
    world.clock.boot_id = b"the only boot..."
    world.clock.advance(2 * HOUR_MS)
    world.run()
    world.checkpoint()
    world.clock.advance(since_ms)
    world.schedule(2, b"5 s")
    world.clock.advance(40)
    world.clock.set_wall(world.clock.now_ms() + jump_ms)
    world.open()
    (came_ms,) = delivery_times(world, 20_000).values()
    can_be_both = abs(jump_ms) <= since_ms + 40
    assert 4960 <= came_ms <= 5000 + abs(jump_ms) * can_be_both
