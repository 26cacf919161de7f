"""The policies that a topic may have for its deliveries: a rate, a spread, a pause, a way to catch up; other topics are
not affected."""

from __future__ import annotations

import contextlib
import errno
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from duemq.protocol.records.properties import java_hash
from duemq.scheduler.search import Selection
from duemq.scheduler.timers.config import Cancelled, TimerConfig
from duemq.scheduler.timers.policy.policies import CATCH_UP, PAUSED, RATE, SPREAD, TimerPolicy, policy_of
from duemq.storage.budget import Pieces
from duemq.storage.errors import NotInMemory
from tests.unit.scheduler.timer_world import START_MS, TimerWorld, last

if TYPE_CHECKING:
    from duemq.scheduler.timers.seconds.second import Waits


@pytest.fixture
def world() -> TimerWorld:
    return TimerWorld(TimerConfig(log_segment_size=52 * 1000))


def times(world: TimerWorld, topic: str = "orders") -> list[int]:
    return [message.store_timestamp - START_MS for message in world.delivered(topic)]


def test_a_rate_releases_evenly_and_leaves_others_alone(world: TimerWorld) -> None:
    world.timers.set_policy("orders", TimerPolicy(rate=10))
    for _ in range(35):
        world.send(START_MS + 1000)
        world.send(START_MS + 1000, topic="others")
    world.pass_time(10_000)
    assert times(world) == [1000 + 100 * n for n in range(35)]
    assert times(world, "others") == [1000] * 35
    assert world.bodies() == [f"m{n}".encode() for n in range(1, 71, 2)]


def test_what_comes_later_waits_behind_what_is_released(world: TimerWorld) -> None:
    world.timers.set_policy("orders", TimerPolicy(rate=10))
    for second in (1, 2):
        for _ in range(15):
            world.send(START_MS + second * 1000)
    world.pass_time(10_000)
    counts = Counter(time // 1000 for time in times(world))
    assert counts == {1: 10, 2: 10, 3: 10}


def test_a_spread_makes_a_stream_of_a_burst(world: TimerWorld) -> None:
    world.timers.set_policy("orders", TimerPolicy(spread_ms=60_000))
    for _ in range(600):
        world.send(START_MS + 5000)
    world.pass_time(70_000)
    found = times(world)
    assert len(found) == 600
    assert min(found) >= 5000
    assert max(found) < 65_000
    counts = Counter((time - 5000) // 10_000 for time in found)
    assert min(counts.values()) > 50
    assert len(counts) == 6


@pytest.mark.parametrize("is_withdrawn", [False, True])
def test_what_was_put_off_within_its_second_comes_once_over_a_kill(world: TimerWorld, *, is_withdrawn: bool) -> None:
    """A message that was put off within its second is delivered once over a kill: of its two units in one slot the last
    one counts."""
    world.timers.set_policy("orders", TimerPolicy(spread_ms=800))
    places = [world.send(START_MS + 5010) for _ in range(50)]
    world.pass_time(5010)
    left = len(places) - len(world.bodies())
    assert left > 20
    gone = [place for place in places if is_withdrawn and world.cancel(place) is Cancelled.CANCELLED]
    assert len(gone) == (left if is_withdrawn else 0)
    world.checkpoint()
    world.open()
    world.timers.set_policy("orders", TimerPolicy(spread_ms=800))
    world.pass_time(5000)
    assert sorted(Counter(world.bodies()).values()) == [1] * (len(places) - len(gone))


@pytest.mark.parametrize("down_ms", [0, 30_000])
def test_what_was_put_off_to_a_later_second_and_delivered_is_so_over_a_kill(world: TimerWorld, down_ms: int) -> None:
    """A message that was put off to a later second and delivered is not repeated after a kill: its unit in the slot of
    the current second does not affect the one in the later second."""
    world.timers.set_policy("orders", TimerPolicy(spread_ms=3000))
    for _ in range(50):
        world.send(START_MS + 5900)
    world.pass_time(5900)
    world.checkpoint()
    world.pass_time(2000)
    before = len(world.bodies())
    assert 10 < before < 40
    world.clock.advance(down_ms)
    world.open()
    world.timers.set_policy("orders", TimerPolicy(spread_ms=3000))
    world.pass_time(5000)
    assert sorted(Counter(world.bodies()).values()) == [1] * 50
    assert world.state().pending == 0


def test_a_paused_topic_waits_until_it_goes_on(world: TimerWorld) -> None:
    world.timers.set_policy("orders", TimerPolicy(is_paused=True))
    world.send(START_MS + 1000)
    world.send(START_MS + 1000, topic="others")
    world.pass_time(60_000)
    assert times(world) == []
    assert times(world, "others") == [1000]
    world.timers.set_policy("orders", None)
    world.pass_time(15_000)
    assert len(times(world)) == 1
    assert world.timers.metrics() == {}


def test_overdue_messages_are_dropped(world: TimerWorld) -> None:
    for delay in (1000, 30_000, 59_000):
        world.send(START_MS + delay)
    world.send(START_MS + 2000)
    world.run()
    world.checkpoint()
    world.clock.advance(60_000)
    world.open()
    world.timers.set_policy("orders", TimerPolicy(drop_after_ms=40_000))
    world.run()
    assert world.bodies() == [b"m2", b"m3"]
    assert world.timers.dropped == 2
    world.open()
    world.run()
    assert world.bodies() == [b"m2", b"m3"]
    assert world.timers.metrics() == {}


def test_a_store_that_refuses_a_drop_does_not_double_what_is_held(world: TimerWorld) -> None:
    dropping, rate = TimerPolicy(drop_after_ms=40_000), TimerPolicy(rate=1)
    for _ in range(4):
        world.send(START_MS + 1000)
        world.send(START_MS + 1000, topic="others")
    world.run()
    world.checkpoint()
    world.clock.advance(60_000)
    world.open()
    world.timers.set_policy("orders", dropping)
    world.timers.set_policy("others", rate)
    world.store.health.fill("full")
    world.pass_time(2000)
    world.store.health.has_room()
    world.pass_time(30_000)
    assert world.bodies() == []
    assert len(world.bodies("others")) == 4
    assert world.timers.metrics() == {}


def test_overdue_messages_are_spread(world: TimerWorld) -> None:
    for _ in range(200):
        world.send(START_MS + 1000)
    world.run()
    world.checkpoint()
    world.clock.advance(60_000)
    world.open()
    world.timers.set_policy("orders", TimerPolicy(catch_up_spread_ms=20_000))
    world.send(world.clock.now_ms() + 1000)
    world.pass_time(20_000)
    found = times(world)
    assert len(found) == 201
    assert len(set(found)) > 150
    assert max(found) < 80_000
    assert 61_000 in found


@pytest.mark.parametrize("policy", [TimerPolicy(rate=5), TimerPolicy(spread_ms=9000), TimerPolicy(is_paused=True)])
@pytest.mark.parametrize("at_ms", [900, 2500, 6000])
def test_what_is_held_is_delivered_once_over_a_kill(world: TimerWorld, policy: TimerPolicy, at_ms: int) -> None:
    world.timers.set_policy("orders", policy)
    for _ in range(40):
        world.send(START_MS + 1500)
    world.pass_time(800)
    world.checkpoint()
    world.pass_time(at_ms)
    world.open()
    world.timers.set_policy("orders", policy)
    world.pass_time(2000)
    world.checkpoint()
    world.open()
    world.pass_time(40_000)
    assert Counter(world.bodies()) == {f"m{n}".encode(): 1 for n in range(1, 41)}


def test_what_is_held_can_be_cancelled(world: TimerWorld) -> None:
    world.timers.set_policy("orders", TimerPolicy(rate=1))
    places = [world.send(START_MS + 500) for _ in range(5)]
    world.pass_time(1000)
    assert world.cancel(places[0]) is Cancelled.DELIVERED
    assert world.cancel(places[3]) is Cancelled.CANCELLED
    assert world.cancel(places[3]) is Cancelled.CANCELLED_BEFORE
    world.pass_time(10_000)
    assert world.bodies() == [b"m1", b"m2", b"m3", b"m5"]


def test_the_attributes() -> None:
    assert policy_of({}) is None
    assert policy_of({"delay.levels": "1s"}) is None
    assert policy_of({RATE: "7", SPREAD: "3", PAUSED: "True"}) == TimerPolicy(7, 3000, True)
    assert policy_of({CATCH_UP: "drop:60"}) == TimerPolicy(drop_after_ms=60_000)
    assert policy_of({CATCH_UP: "spread:5"}) == TimerPolicy(catch_up_spread_ms=5000)
    assert policy_of({CATCH_UP: "all"}) == TimerPolicy()
    assert policy_of({CATCH_UP: "newest"}) == TimerPolicy(newest=True)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (RATE, "-1"),
        (RATE, "1.5"),
        (RATE, ""),
        (RATE, "10000001"),
        (SPREAD, "x"),
        (SPREAD, "604801"),
        (PAUSED, "yes"),
        (CATCH_UP, "drop"),
        (CATCH_UP, "all:1"),
        (CATCH_UP, "newest:5"),
        (CATCH_UP, "oldest"),
    ],
)
def test_wrong_attributes_are_named(name: str, value: str) -> None:
    with pytest.raises(ValueError, match=name):
        policy_of({name: value})


# --- two topics with the same hash

TWINS = ("ordersAa", "ordersBB")


def twins(count: int = 20, due_ms: int = START_MS + 1000) -> TimerWorld:
    """A world with the same number of messages of two topics whose names have the same Java hash."""
    assert java_hash(TWINS[0]) == java_hash(TWINS[1])
    world = TimerWorld()
    for number in range(count):
        for topic in TWINS:
            world.send(due_ms, f"{topic} {number}".encode(), topic=topic, text=f"KEYS\x01k{number % 2}\x02")
    world.run()
    return world


@pytest.mark.parametrize("attributes", [{"timer.catch.up": "drop:5"}, {"timer.paused": "true"}])
def test_a_policy_is_of_its_own_topic_whatever_hash_that_has(attributes: dict[str, str]) -> None:
    world = twins()
    world.timers.set_policy(TWINS[0], policy_of(attributes))
    world.clock.advance(60_000)
    world.run()
    assert (len(world.bodies(TWINS[0])), len(world.bodies(TWINS[1]))) == (0, 20)
    assert world.timers.metrics() == ({TWINS[0]: 20} if "timer.paused" in attributes else {})


def test_each_of_two_topics_with_one_hash_has_its_own_policy() -> None:
    world = twins()
    world.timers.set_policy(TWINS[0], policy_of({"timer.release.rate": "10"}))
    world.timers.set_policy(TWINS[1], policy_of({"timer.catch.up": "newest"}))
    world.pass_time(2000)
    assert (len(world.bodies(TWINS[0])), len(world.bodies(TWINS[1]))) == (11, 20)
    world.timers.set_policy(TWINS[0], None)
    world.pass_time(60_000)
    assert len(world.bodies(TWINS[0])) == 20


def test_only_the_topic_that_asks_for_the_newest_loses_the_older_ones() -> None:
    world = twins()
    world.timers.set_policy(TWINS[1], policy_of({"timer.catch.up": "newest"}))
    world.clock.advance(60_000)
    world.pass_time(10_000)
    assert (len(world.bodies(TWINS[0])), len(world.bodies(TWINS[1]))) == (20, 2)


@pytest.mark.parametrize("is_restarted", [False, True])
def test_messages_are_counted_by_their_topics_name(is_restarted: bool) -> None:
    world = twins(10, START_MS + 60_000)
    for number in range(5):
        world.send(START_MS + 60_000 + number, topic=TWINS[1])
    world.schedule(1, topic=TWINS[0])
    world.run()
    if is_restarted:
        world.close()
        world.open()
    assert world.timers.metrics() == {TWINS[0]: 10, TWINS[1]: 15}
    for topic, count in zip(TWINS, (11, 15), strict=True):
        assert last(world.pending.count(Selection(topic), world.now_ms)) == count
        assert sum(world.curve(START_MS, 1000, 100, topic)) == count
    world.pass_time(60_000)
    assert world.timers.metrics() == {TWINS[1]: 4}


@pytest.mark.parametrize("is_torn", [False, True])
def test_counts_by_name_are_right_after_a_kill(*, is_torn: bool) -> None:
    """Counts by topic are right after a kill, also of messages that came in the middle of the last checkpoint; if that
    checkpoint failed, at least their sum is right."""
    world = twins(10, START_MS + 60_000)
    for step, _ in enumerate(world.owned.writing()):
        if step < 3:
            for _ in range(step + 1):
                world.send(START_MS + 60_000, topic=TWINS[step % 2])
            world.run()
    before = world.timers.metrics()
    if is_torn:
        world.files.faults["open", "/s/checkpoint"] = errno.EIO
    with pytest.raises(OSError, match="checkpoint") if is_torn else contextlib.nullcontext():
        world.owned.sync()
    world.open()
    world.run()
    assert sum(before.values()) == sum(world.timers.metrics().values()) == 26
    if not is_torn:
        assert world.timers.metrics() == before


@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), NotInMemory("a file", 0, lambda: None)])
def test_counts_by_name_that_cannot_be_read_harm_no_message(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure to read the names of counted topics affects no message. Earlier the names were read after a batch was
    put into the wheel or delivered, and a failure repeated that step."""
    world = twins(10, START_MS + 1000)
    topics = world.timers._topics

    def fail(_: Waits) -> list[str]:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(topics, "_topics_of", fail)
        for number in range(10):
            for topic in TWINS:
                world.send(START_MS + 90_000, b"%d" % number, topic=topic)
        world.run()
        world.pass_time(2000)
    assert (len(world.bodies(TWINS[0])), len(world.bodies(TWINS[1]))) == (10, 10)
    assert sum(topics.waiting().values()) == 20
    assert set(topics.numbers()) == set(TWINS), "the next start has to know both names"
    assert last(world.pending.count(Selection(), world.now_ms)) == 20
    world.close()
    world.open()
    assert not world.timers.is_alone(TWINS[0])
    world.pass_time(120_000)
    assert (len(world.bodies(TWINS[0])), len(world.bodies(TWINS[1]))) == (20, 20)
    assert world.timers.metrics() == {}


def test_counting_a_topic_whose_hash_is_its_own_reads_no_record() -> None:
    world = twins(10, START_MS + 60_000)
    world.send(START_MS + 60_000, topic="alone")
    world.run()
    world.store.message_at = None  # type: ignore[method-assign,assignment]
    assert last(world.pending.count(Selection("alone"), world.now_ms)) == 1


@pytest.mark.parametrize("keeps", [1, 2], ids=["kept once", "kept twice"])
@pytest.mark.parametrize(
    ("policy", "down_ms"),
    [
        (TimerPolicy(is_paused=True), 0),
        (TimerPolicy(rate=1), 0),
        (TimerPolicy(spread_ms=9000), 0),
        (TimerPolicy(drop_after_ms=5000), 60_000),
        (TimerPolicy(catch_up_spread_ms=9000), 60_000),
        (TimerPolicy(newest=True), 60_000),
    ],
)
def test_a_level_that_waits_on_as_a_timer_has_no_policy(policy: TimerPolicy, down_ms: int, keeps: int) -> None:
    """A message of a level that waits on as a timer, since its file was about to expire, has no policy: its topic's
    policies are for timers."""
    world = TimerWorld(levels="1s 5s 30s")
    for _ in range(10):
        world.schedule(3, text="KEYS\x01one\x02")
    world.run()
    for _ in range(keeps):
        assert world.keep() == 10
        world.run()
    world.timers.set_policy("orders", policy)
    world.clock.advance(down_ms)
    world.pass_time(31_000)
    assert times(world) == [max(down_ms, 30_000)] * 10


def test_a_level_that_waits_on_as_a_timer_is_nobodys_newer_one() -> None:
    world = TimerWorld(levels="1s 5s 30s")
    for due_ms in (10_000, 20_000):
        world.send(START_MS + due_ms, text="KEYS\x01one\x02")
    world.schedule(3, text="KEYS\x01one\x02")
    world.run()
    assert world.keep() == 3
    world.run()
    world.timers.set_policy("orders", TimerPolicy(newest=True))
    world.clock.advance(60_000)
    for _ in range(30):
        world.step(Pieces(1))  # so that the search comes to the level's message before that is delivered
    world.pass_time(31_000)
    assert sorted(world.bodies()) == [b"m2", b"m3"]


def test_a_level_that_is_given_a_time_is_a_timer() -> None:
    world = TimerWorld(levels="1s 5s 30s")
    place = world.schedule(3)
    world.run()
    assert world.keep() == 1
    world.timers.set_policy("orders", TimerPolicy(is_paused=True))
    assert world.reschedule(place, START_MS + 2000)[0] is Cancelled.CANCELLED
    world.pass_time(40_000)
    assert times(world) == []


def test_a_store_without_room_has_no_record_read_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full store does not make deliveries read records again and again, although only the records tell which of two
    topics with one hash has the policy."""
    world = twins(10, START_MS + 1000)
    world.timers.set_policy(TWINS[0], TimerPolicy(rate=1000))
    world.store.health.fill("the disk is full")
    reads = 0
    read = world.store.log.read

    def counted(offset: int, size: int) -> bytes | None:
        nonlocal reads
        reads += 1
        return read(offset, size)

    monkeypatch.setattr(world.store.log, "read", counted)
    world.pass_time(5000)
    assert reads == 0
    assert world.state().late_ms == 4000
    world.store.health.has_room()
    world.pass_time(1000)
    assert (len(world.bodies(TWINS[0])), len(world.bodies(TWINS[1]))) == (10, 10)
