"""Messages held back by a pause are parked once, and come back once, in order, whatever happens meanwhile."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

from duemq.protocol.records.record import StoredMessage
from duemq.scheduler.search import Selection
from duemq.scheduler.timers import service
from duemq.scheduler.timers.config import Cancelled, TimerConfig
from duemq.scheduler.timers.files.superseded import Superseded
from duemq.scheduler.timers.files.unit import DELETE, UNIT_SIZE, seconds_of
from duemq.scheduler.timers.files.wheel import SLOTS
from duemq.scheduler.timers.policy.policies import TimerPolicy
from duemq.scheduler.timers.seconds import parking
from duemq.storage.budget import SPENT
from duemq.storage.clock import look
from duemq.storage.queues.pull import ColdRead
from tests.unit.scheduler.timer_world import START_MS, TimerWorld, last

PAUSED = TimerPolicy(is_paused=True)
DAY_MS = 86_400_000


@pytest.fixture
def world() -> TimerWorld:
    return TimerWorld(TimerConfig(log_segment_size=52 * 10_000))


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Process few messages in one step, so that other events can happen in between."""
    monkeypatch.setattr(service, "_DELIVER_UNITS", 7)
    monkeypatch.setattr(service, "_BRING_BACK_UNITS", 3)
    monkeypatch.setattr(parking, "SLOT_UNITS", 20)


def parked(world: TimerWorld, count: int = 60, seconds: int = 6) -> list[int]:
    """Send messages for a paused topic, and let them become due; return their physical offsets."""
    world.timers.set_policy("orders", PAUSED)
    places = [world.send(START_MS + 1000 + number * 1000 * seconds // count) for number in range(count)]
    world.pass_time(seconds * 1000 + 2000)
    assert world.bodies() == []
    return places


def names(first: int, end: int) -> list[bytes]:
    return [f"m{number}".encode() for number in range(first, end)]


def appended(world: TimerWorld) -> int:
    return world.timers._slots.log.end


def drain(world: TimerWorld, enough: Callable[[], bool]) -> None:
    """Step until the condition holds, and no further."""
    for _ in range(100_000):
        if enough():
            return
        world.step(SPENT)
    raise AssertionError("never")


# --- once


@pytest.mark.parametrize("policy", [PAUSED, TimerPolicy(rate=1)])
def test_what_is_held_back_is_written_once(world: TimerWorld, policy: TimerPolicy) -> None:
    world.timers.set_policy("orders", policy)
    for _ in range(500):
        world.send(START_MS + 1000)
    world.pass_time(2000)
    before, steps = appended(world), 0
    assert before <= 2 * 500 * UNIT_SIZE
    end = world.now_ms + 300_000
    while (due := world.run()) is not None and due <= end:
        world.clock.advance(due - world.now_ms)
        steps += 1
    assert appended(world) == before
    assert steps <= (4 * 300 if policy.rate else 0), "nothing is looked at while it waits"
    assert world.state().pending == 500 - len(world.bodies())


def test_what_waits_for_longer_than_a_slot_may_be_ahead_is_written_once_in_that_time() -> None:
    world = TimerWorld(TimerConfig(log_segment_size=52 * 10_000, roll_window=3600))
    parked(world, 40)
    world.pass_time(DAY_MS // 2)
    assert 2 + 11 <= appended(world) / UNIT_SIZE / 40 <= 2 + 17
    world.timers.set_policy("orders", None)
    world.run()
    assert world.bodies() == names(1, 41)
    assert world.timers.metrics() == {}


def test_one_slot_does_not_take_all(world: TimerWorld, few: None) -> None:
    parked(world, 100)
    log = world.timers._slots.log
    seconds = np.concatenate([seconds_of(units) for _, units in log.scan(100 * UNIT_SIZE, log.end)])
    counts = Counter(seconds.tolist())
    assert sum(counts.values()) == 100
    assert max(counts.values()) < 20 + 7
    assert max(counts) <= world.now_ms // 1000 + world.config.roll_window
    assert min(counts) > world.now_ms // 1000 + world.config.roll_window - 2 * 3600


# --- back, in order


def test_it_comes_back_in_order_and_at_once(world: TimerWorld, few: None) -> None:
    parked(world)
    world.send(START_MS + 1, topic="others")
    wakes = world.wakes
    world.timers.set_policy("orders", None)
    assert world.wakes > wakes
    world.run()
    assert world.bodies() == names(1, 61)
    assert len(world.bodies("others")) == 1
    assert world.timers.metrics() == {}
    before = appended(world)
    assert before == (61 + 2 * 60) * UNIT_SIZE
    world.pass_time(3 * DAY_MS)
    assert appended(world) == before, "what was parked has its slot's turn, and nothing is there"
    assert len(world.bodies()) == 60


def test_what_is_due_meanwhile_comes_behind(world: TimerWorld, few: None) -> None:
    parked(world)
    world.timers.set_policy("orders", None)
    drain(world, lambda: len(world.bodies()) >= 10)
    for _ in range(5):
        world.send(world.now_ms)
    world.run()
    assert world.bodies() == names(1, 66)


def test_others_do_not_wait_for_it(world: TimerWorld, few: None) -> None:
    parked(world, 200)
    world.timers.set_policy("orders", None)
    drain(world, lambda: len(world.bodies()) >= 1)
    world.send(world.now_ms, topic="others")
    drain(world, lambda: len(world.bodies("others")) == 1)
    assert len(world.bodies()) < 100


def test_a_topic_that_is_paused_again_waits_on(world: TimerWorld, few: None) -> None:
    parked(world)
    world.timers.set_policy("orders", None)
    drain(world, lambda: len(world.bodies()) >= 10)
    world.timers.set_policy("orders", PAUSED)
    world.pass_time(100_000)
    came = len(world.bodies())
    assert came < 30
    world.timers.set_policy("orders", None)
    world.run()
    assert world.bodies() == names(1, 61)


@pytest.mark.parametrize("is_restarted", [False, True])
def test_topics_go_on_one_by_one(world: TimerWorld, few: None, is_restarted: bool) -> None:
    topics = ("orders", "others", "ordersAa", "ordersBB")  # the last two have one hash
    for topic in topics:
        world.timers.set_policy(topic, PAUSED)
    for number in range(40):
        for topic in topics:
            world.send(START_MS + 1000 + number, b"%d" % number, topic=topic)
    world.pass_time(5000)
    for count, topic in enumerate(topics, 1):
        if is_restarted:
            world.close()
            world.open()
            for each in topics[count:]:
                world.timers.set_policy(each, PAUSED)
        world.timers.set_policy(topic, None)
        world.pass_time(1000)
        for each in topics:
            assert world.bodies(each) == ([b"%d" % number for number in range(40)] if each in topics[:count] else [])


@pytest.mark.parametrize(
    ("policy", "seconds", "count"),
    [
        (TimerPolicy(rate=10), 5.9, 60),
        (TimerPolicy(spread_ms=20_000), 20, 60),
        (TimerPolicy(catch_up_spread_ms=20_000), 20, 60),
        (TimerPolicy(drop_after_ms=100_000), 0, 0),
        (TimerPolicy(newest=True), 20, 2),
    ],
)
def test_the_policy_that_follows_a_pause_counts(
    world: TimerWorld, few: None, policy: TimerPolicy, seconds: float, count: int
) -> None:
    world.timers.set_policy("orders", PAUSED)
    for number in range(60):
        world.send(START_MS + 1000 + number, text=f"KEYS\x01k{number % 2}\x02")
    world.pass_time(200_000)
    before = world.now_ms
    world.timers.set_policy("orders", policy)
    world.pass_time(30_000)
    assert len(world.bodies()) == count
    times = [message.store_timestamp - before for message in world.delivered()]
    assert max(times, default=0) <= seconds * 1000
    assert not policy.rate or times == [100 * number for number in range(60)]
    assert not policy.newest or world.bodies() == [b"m59", b"m60"]
    assert world.timers.metrics() == {}
    assert world.timers.dropped == 60 - count
    world.pass_time(3 * DAY_MS)
    assert len(world.bodies()) == count


# --- crashes


POLICIES = {
    "none": None,
    "rate": TimerPolicy(rate=20),
    "spread": TimerPolicy(spread_ms=3000),
    "newest": TimerPolicy(newest=True),
}
CHECKPOINTS = ("none", "at first", "each", "each, and a clean stop")
# Each run has each policy and each kind of checkpoint at least once; `make soak` has all pairs.
EACH_RUN = {
    ("none", "at first"),
    ("none", "each"),
    ("rate", "none"),
    ("spread", "each"),
    ("newest", "each, and a clean stop"),
}


@pytest.mark.parametrize(
    ("policy", "checkpoints", "window"),
    [
        pytest.param(
            POLICIES[policy],
            checkpoints,
            window,
            id=f"{policy}-{checkpoints}-{window}",
            marks=() if (policy, checkpoints) in EACH_RUN and window > 20 else pytest.mark.soak,
        )
        for policy in POLICIES
        for checkpoints in CHECKPOINTS
        for window in (20, 172_800)
    ],
)
def test_it_comes_once_over_kills(few: None, policy: TimerPolicy | None, checkpoints: str, window: int) -> None:
    """Messages that come back from a pause are delivered once over kills, one after every few messages."""
    world = TimerWorld(TimerConfig(log_segment_size=52 * 30, roll_window=window))
    places = parked(world, 60)
    assert world.cancel(places[30]) is Cancelled.CANCELLED
    if checkpoints != "none":
        world.checkpoint()
    for number in range(200):
        world.timers.set_policy("orders", policy)
        came = len(world.bodies())
        for _ in range(5 + number % 7):
            world.step(SPENT)
        if policy is not None:
            world.clock.advance(150)
        if "each" in checkpoints:
            world.checkpoint()
            for _ in range(number % 3):
                world.step(SPENT)
        if number % 50 == 10 and "stop" in checkpoints:
            world.close()
        world.open()
        new = set(world.bodies()[came:])
        for place, body in zip(places, names(1, 61), strict=True):
            if body in new:
                assert world.cancel(place) in (Cancelled.DELIVERED, Cancelled.NO_LONGER_WAITS)
        if len(world.bodies()) == came == 59 and not world.state().pending:
            break
    assert checkpoints == "none" or number > 10
    world.timers.set_policy("orders", policy)
    world.pass_time(90_000)
    expected = Counter(names(1, 31) + names(32, 61))
    assert Counter(world.bodies()) == expected
    assert world.timers.metrics() == {}
    world.close()
    world.open()
    world.pass_time(3 * DAY_MS)
    assert Counter(world.bodies()) == expected
    assert world.timers.metrics() == {}


def test_a_kill_between_a_checkpoint_and_the_marks_that_follow_it(
    world: TimerWorld, few: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a kill between a checkpoint and the marks that follow it, messages brought back before the checkpoint are
    known to be superseded."""
    parked(world)
    world.timers.set_policy("orders", None)
    drain(world, lambda: len(world.bodies()) >= 30)
    with monkeypatch.context() as patched:
        patched.setattr(Superseded, "plan", lambda superseded: lambda: None)
        world.pass_time(0)
        world.checkpoint()
    world.open()
    assert world.timers.metrics() == {}
    world.pass_time(3 * DAY_MS)
    assert world.bodies() == names(1, 61)
    # The next checkpoint has them marked, and the one after that need not record them.
    world.checkpoint()
    world.checkpoint()
    assert world.timers._slots.log.superseded.encode() == b""
    world.open()
    world.pass_time(3 * DAY_MS)
    assert world.bodies() == names(1, 61)


def test_a_kill_before_a_checkpoint_is_durable_leaves_no_mark(world: TimerWorld, few: None) -> None:
    """A kill before a checkpoint is durable leaves no mark: the start cuts off the newer units, and the older ones are
    all that is left."""
    parked(world)
    world.checkpoint()
    world.timers.set_policy("orders", None)
    drain(world, lambda: len(world.timers._slots.turns.current) > 0)
    now = look(world.clock)
    world.timers.note()
    world.timers.begin_write()
    while world.timers.write_next(now):
        pass
    world.timers.plan_sync(now, is_last=False)()
    world.open()
    world.run()
    assert world.bodies() == names(1, 61)


def test_what_is_parked_is_found_by_a_start(world: TimerWorld) -> None:
    parked(world)
    for stop in (world.checkpoint, world.close):
        stop()
        world.open()
        world.timers.set_policy("orders", PAUSED)
        world.pass_time(60_000)
        assert world.bodies() == []
        assert world.timers.metrics() == {"orders": 60}
    world.timers.set_policy("orders", None)
    world.run()
    assert world.bodies() == names(1, 61)


# --- listing and changing


def test_what_is_parked_is_found_and_changed(world: TimerWorld, few: None) -> None:
    """Parked messages are counted, cancelled and rescheduled, with true answers also while they come back."""
    places = parked(world)
    assert last(world.pending.count(Selection("orders"), world.now_ms)) == 60
    assert sum(world.curve(START_MS, 1000, 100, "orders")) == 60
    assert world.curve(START_MS, 1000, 100)[world.now_ms // 1000 - START_MS // 1000] == 60
    reads = count_reads(world)
    assert world.cancel(places[0]) is Cancelled.CANCELLED
    assert world.cancel(places[0]) is Cancelled.CANCELLED_BEFORE
    assert world.reschedule(places[1], world.now_ms + 60_000)[0] is Cancelled.CANCELLED
    assert len(reads) < 30
    world.timers.set_policy("orders", None)
    drain(world, lambda: len(world.bodies()) >= 5)
    came = len(world.bodies())
    assert last(world.pending.count(Selection("orders"), world.now_ms)) == 59 - came
    results = Counter(world.cancel(place) for place in places[2::2])
    assert results[Cancelled.CANCELLED] + results[Cancelled.DELIVERED] == 29
    assert 1 <= results[Cancelled.DELIVERED] < 10
    world.run()
    assert len(world.bodies()) == 58 - results[Cancelled.CANCELLED]
    assert sum(world.curve(START_MS, 1000, 1000)) == 1
    world.pass_time(60_000)
    assert world.bodies()[-1] == b"m2"
    assert world.timers.metrics() == {}


def count_reads(world: TimerWorld) -> list[int]:
    """Record the reads of the timer log from now on."""
    reads: list[int] = []
    timer_log = world.timers._slots.log
    read = timer_log._segments.read

    def counted(offset: int, size: int) -> bytes:
        reads.append(size)
        return read(offset, size)

    timer_log._segments.read = counted  # type: ignore[method-assign]
    return reads


def test_a_list_has_each_once_while_it_comes_back(world: TimerWorld, few: None) -> None:
    parked(world, 500)
    search = world.timers.units_waiting()
    found: list[int] = []

    def look() -> bool:
        part = next(search, None)
        if part is not None:
            assert not isinstance(part, ColdRead)
            found.extend(part["physical"].tolist())
        return part is not None

    world.timers.set_policy("orders", None)
    while look():
        world.step(SPENT)
    assert len(found) == len(set(found))
    assert len(found) + len(world.bodies()) >= 500


@pytest.mark.parametrize("is_going_on", [False, True])
def test_it_is_kept_when_its_file_goes(world: TimerWorld, few: None, is_going_on: bool) -> None:
    parked(world)
    came = 0
    if is_going_on:
        world.timers.set_policy("orders", None)
        drain(world, lambda: len(world.bodies()) >= 20)
        came = len(world.bodies())
    assert world.keep() == 60 - came
    world.checkpoint()
    world.open()
    world.timers.set_policy("orders", None)
    world.run()
    assert Counter(world.bodies()) == Counter(names(1, 61))


# --- Apache's broker


def apaches(world: TimerWorld) -> list[StoredMessage]:
    """Return the messages that Apache's broker would deliver from the wheel of a store: the units of each slot from
    timercheck's second on, except those with RocketMQ's 4."""
    world.open()
    slots = world.timers._slots
    slots.log.superseded._blocks.clear()  # Apache's broker does not know duemq's note
    found = []
    for second in range(slots.turns.second, slots.turns.second + SLOTS // 2):
        position = slots.wheel.last(second)
        while position >= 0:
            unit = slots.log.read(position, 1)[0]
            if not unit["magic"] & DELETE:
                message = world.store.message_at(int(unit["physical_offset"]), int(unit["record_size"]))
                assert message is not None
                found.append(message)
            position = int(unit["previous"])
    return found


@pytest.mark.parametrize("came", [0, 20, 60])
def test_apaches_broker_delivers_what_is_parked_and_nothing_twice(world: TimerWorld, few: None, came: int) -> None:
    parked(world)
    if came:
        world.timers.set_policy("orders", None)
        drain(world, lambda: len(world.bodies()) >= came)
    left = set(names(1, 61)) - set(world.bodies())
    world.close()
    assert sorted(message.body for message in apaches(world)) == sorted(left)
