"""After an outage only the newest overdue message of a key is delivered, for topics that ask for it."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import cast

import numpy as np
import pytest
from structlog.testing import capture_logs

from duemq.scheduler.timers.config import Cancelled, TimerConfig
from duemq.scheduler.timers.policy import catch_up
from duemq.scheduler.timers.policy.catch_up import Offsets
from duemq.scheduler.timers.policy.policies import TimerPolicy
from duemq.storage.budget import Pieces
from duemq.storage.clock import look
from duemq.storage.queues.pull import ColdRead
from tests.soak import sampled
from tests.unit.scheduler.timer_world import START_MS, TimerWorld

NEWEST = TimerPolicy(newest=True)


@pytest.fixture
def world() -> TimerWorld:
    return TimerWorld(TimerConfig(log_segment_size=52 * 1000))


def send(world: TimerWorld, delay: int, key: str = "", topic: str = "orders") -> int:
    return world.send(START_MS + delay, text=f"KEYS\x01{key}\x02" if key else "", topic=topic)


def go_down(world: TimerWorld, seconds: int = 100) -> None:
    """Keep the broker down for a number of seconds."""
    world.run()
    world.checkpoint()
    world.clock.advance(seconds * 1000)
    open_again(world)


def open_again(world: TimerWorld, policy: TimerPolicy | None = NEWEST) -> None:
    world.open()
    world.timers.set_policy("orders", policy)


def test_of_each_key_the_newest_is_delivered(world: TimerWorld) -> None:
    for delay, key in ((3000, "a"), (2000, "b"), (9000, "a"), (60_000, "b"), (5000, "a"), (60_000, "b"), (4000, "c")):
        send(world, delay, key)
    go_down(world)
    world.pass_time(10_000)
    assert sorted(world.bodies()) == [b"m3", b"m6", b"m7"], "the last by time, then by arrival"
    assert world.timers.dropped == 4
    assert world.timers.metrics() == {}


def test_messages_without_keys_and_other_topics_are_all_delivered(world: TimerWorld) -> None:
    for delay in (1000, 2000, 3000):
        send(world, delay)
        send(world, delay, "a", topic="others")
    go_down(world)
    at = world.clock.now_ms()
    world.pass_time(10_000)
    assert world.bodies() == [b"m1", b"m3", b"m5"]
    assert world.bodies("others") == [b"m2", b"m4", b"m6"]
    assert {message.store_timestamp for message in world.delivered("others")} == {at}, "they do not wait for the search"


def test_what_is_late_by_a_busy_moment_is_not_overdue(world: TimerWorld) -> None:
    for delay in (80_000, 95_000, 98_000, 105_000):
        send(world, delay, "a")
    go_down(world)
    world.pass_time(20_000)
    assert world.bodies() == [b"m1", b"m2", b"m3", b"m4"]
    assert world.lateness()[-1] == 0


def test_without_an_outage_every_message_is_delivered_at_its_time(world: TimerWorld) -> None:
    world.timers.set_policy("orders", NEWEST)
    for delay in (1000, 1000, 2000, 40_000):
        send(world, delay, "a")
    world.pass_time(50_000)
    assert world.bodies() == [b"m1", b"m2", b"m3", b"m4"]
    assert set(world.lateness()) == {0}


def test_a_second_outage_is_looked_at_as_the_first(world: TimerWorld) -> None:
    world.timers.set_policy("orders", NEWEST)
    for round_ in range(2):
        for delay in (1000, 2000, 3000):
            send(world, round_ * 200_000 + delay, "a")
        world.run()
        world.timers.config.stop_dequeue = True
        world.pass_time(100_000)
        world.timers.config.stop_dequeue = False
        world.pass_time(100_000)
    assert world.bodies() == [b"m3", b"m6"]


def test_what_comes_meanwhile_waits_for_the_search_and_no_longer(
    world: TimerWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catch_up, "_LOOK_UNITS", 1)
    for number in range(300):
        send(world, 1000 + number, "ab"[number % 2])
    send(world, 100_500, "a")
    go_down(world)
    for _ in range(5):
        world.step()
    world.clock.advance(1000)
    world.pass_time(10_000)
    assert world.bodies() == [b"m299", b"m300", b"m301"]


@pytest.mark.parametrize("seed", sampled(range(25), range(8)))
def test_a_kill_in_the_middle_changes_nothing(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(seed)
    monkeypatch.setattr(catch_up, "_LOOK_UNITS", 2)
    monkeypatch.setattr(catch_up, "_SCAN_UNITS", 7)
    monkeypatch.setattr("duemq.scheduler.timers.service._DROP_UNITS", 3)
    world = TimerWorld(TimerConfig(log_segment_size=52 * 40, roll_window=40))
    world.budget = lambda: Pieces(1)
    expected, newest = set(), dict[str, tuple[int, int]]()
    for number in range(1, chance.randrange(20, 120)):
        delay, key = chance.randrange(500, 90_000, 500), chance.choice(["", *"abcdef"])
        send(world, delay, key)
        if key:
            newest[key] = max(newest.get(key, (0, 0)), (delay, number))
        else:
            expected.add(number)
        if chance.random() < 0.1:
            world.checkpoint()
    expected |= {number for _, number in newest.values()}
    go_down(world, 200)
    for _ in range(chance.randrange(1, 6)):
        for _ in range(chance.randrange(60)):
            world.step()
        world.clock.advance(chance.choice((0, 1, 900, 2500)))
        action = chance.random()
        if action < 0.5:
            open_again(world)
        elif action < 0.7:
            world.close()
            open_again(world)
        else:
            world.checkpoint()
    world.pass_time(60_000)
    assert Counter(world.bodies()) == {f"m{number}".encode(): 1 for number in expected}
    assert world.timers.metrics() == {}


def test_what_is_put_off_can_be_cancelled(world: TimerWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catch_up, "_LOOK_UNITS", 1)
    for number in range(50):
        send(world, 1000 + number, "a")
    other = send(world, 1000, "b")
    go_down(world)
    world.step()
    assert world.cancel(other) is Cancelled.CANCELLED
    world.pass_time(10_000)
    assert world.bodies() == [b"m50"]


def test_where_the_policy_goes_all_are_delivered(world: TimerWorld) -> None:
    for delay in (1000, 2000):
        send(world, delay, "a")
    go_down(world)
    world.timers.set_policy("orders", None)
    world.pass_time(10_000)
    assert world.bodies() == [b"m1", b"m2"]


def test_beyond_the_memory_there_is_for_it_messages_are_delivered(
    world: TimerWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catch_up, "MAX_KEYS", 2)
    monkeypatch.setattr(catch_up, "MAX_OLDER", 1)
    for number, key in enumerate("abcabcab"):
        send(world, 1000 * number + 1, key)
    go_down(world)
    with capture_logs() as lines:
        world.pass_time(10_000)
    assert world.timers.dropped == 1
    assert len(world.bodies()) == 7
    assert [line["delivered"] for line in lines if line["event"] == "overdue_messages_beyond"] == [5]


def test_what_is_dropped_is_said(world: TimerWorld) -> None:
    for number in range(700):
        send(world, 1000 + number, "a")
    go_down(world)
    with capture_logs() as lines:
        world.pass_time(10_000)
        world.timers.report(look(world.clock))
        world.timers.report(look(world.clock))
    assert [line["messages"] for line in lines if line["event"] == "overdue_messages_dropped"] == [699]


def test_a_store_that_takes_nothing_is_waited_for(world: TimerWorld) -> None:
    for delay in (1000, 2000, 3000):
        send(world, delay, "a")
    go_down(world)
    world.store.health.fill("full")
    world.pass_time(30_000)
    assert world.bodies() == []
    world.store.health.has_room()
    world.pass_time(10_000)
    assert world.bodies() == [b"m3"]


def test_records_that_are_not_in_memory_are_read_by_a_thread(
    world: TimerWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    for delay in (1000, 2000, 3000):
        send(world, delay, "a")
    go_down(world)
    reads: list[tuple[ColdRead, Callable[[], None]]] = []
    monkeypatch.setattr(world.store, "is_cached", lambda _: False)
    world.timers._catch_up._read_cold = lambda job, done: reads.append((cast("ColdRead", job), done))
    world.pass_time(5000)
    assert len(reads) == 1, "it waits"
    job, done = reads[0]
    assert job.run().count(b"KEYS\x01a") == 3
    done()
    world.pass_time(10_000)
    assert world.bodies() == [b"m3"]


def test_what_retention_appends_once_more_is_still_not_the_newest(world: TimerWorld) -> None:
    for delay in (1000, 2000, 3000):
        send(world, delay, "a")
    go_down(world)
    for _ in range(20):
        world.step()
    assert world.bodies() == []
    assert world.keep() == 3
    world.pass_time(20_000)
    (body,) = world.bodies()
    assert body == b"m3"


def test_what_retention_appends_once_more_during_the_search_is_looked_at_again(
    world: TimerWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catch_up, "_LOOK_UNITS", 1)
    for number in range(20):
        send(world, 1000 + number, "a")
    go_down(world)
    search = None
    while search is None or search.newest.looked < 10:
        assert world.bodies() == []
        world.step(Pieces(1))
        search = world.timers._catch_up._search
    assert world.keep() == 20
    world.pass_time(30_000)
    assert world.bodies() == [b"m20"]


def test_offsets_are_a_set() -> None:
    chance, offsets, model = random.Random(3), Offsets(), set[int]()
    for _ in range(40_000):
        number = chance.randrange(100_000)
        offsets.add(number)
        model.add(number)
    numbers = np.arange(100_000)
    assert set(numbers[offsets.has(numbers)].tolist()) == model
