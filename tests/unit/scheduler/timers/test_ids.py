"""Goal: the id that a sender got is valid for the message's whole life, and answers about it are true.

Method: messages are rescheduled, delivered now, kept when their files go, and cancelled, each time by the physical
offset of the first record, in one life of the broker and in the next."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from duemq.protocol.records import properties
from duemq.protocol.records.message_id import offset_message_id
from duemq.protocol.records.timer_properties import AGAIN_ROOM
from duemq.scheduler.search import Selection, WaitingMessage
from duemq.scheduler.timers.config import Cancelled, TimerConfig
from duemq.scheduler.timers.files.unit import NORMAL
from duemq.scheduler.timers.index.ids import given_id
from duemq.scheduler.timers.policy.policies import policy_of
from duemq.storage.durability.retention import RetentionConfig
from tests.unit.scheduler.timer_world import ANY_HOUR, START_MS, TimerWorld

DAY_MS = 86_400_000
LATER = START_MS + 90_000
EVERYTHING = Selection()


@pytest.fixture(params=["timer", "level"])
def sent(request: pytest.FixtureRequest) -> tuple[TimerWorld, int]:
    """Return a world with a waiting message, and the physical offset of its first record."""
    world = TimerWorld(levels="1s 100s")
    world.send(START_MS + 1, b"first")
    place = world.send(LATER) if request.param == "timer" else world.schedule(2)
    world.run()
    return world, place


def same_life(world: TimerWorld) -> None:
    pass


def next_life(world: TimerWorld) -> None:
    world.close()
    world.open()


def after_a_kill(world: TimerWorld) -> None:
    world.open()


def after_the_log_was_lost(world: TimerWorld) -> None:
    world.files.remove_tree("/s/timerlog")
    world.open()


LIVES = [same_life, next_life, after_a_kill, after_the_log_was_lost]


@pytest.mark.parametrize("life", LIVES)
def test_a_message_with_another_time_is_cancelled_by_its_first_id(
    sent: tuple[TimerWorld, int], life: Callable[[TimerWorld], None]
) -> None:
    world, place = sent
    for ahead in (80_000, 70_000, 5_000):
        assert world.reschedule(place, START_MS + ahead)[0] is Cancelled.CANCELLED
        life(world)
    assert world.cancel(place) is Cancelled.CANCELLED
    life(world)
    assert world.cancel(place) is Cancelled.CANCELLED_BEFORE
    world.pass_time(100_000)
    assert world.bodies() == [b"first"]


@pytest.mark.parametrize("life", LIVES)
def test_what_was_delivered_now_is_told_to_be_delivered(
    sent: tuple[TimerWorld, int], life: Callable[[TimerWorld], None]
) -> None:
    world, place = sent
    assert world.reschedule(place, 0)[0] is Cancelled.CANCELLED
    world.pass_time(1)
    assert world.bodies() == [b"first", b"m2"] or world.bodies() == [b"m2", b"first"]
    life(world)
    assert world.cancel(place) is Cancelled.DELIVERED
    world.pass_time(100_000)
    life(world)
    assert world.cancel(place) is Cancelled.DELIVERED


def test_each_id_that_it_has_had_names_it(sent: tuple[TimerWorld, int]) -> None:
    world, place = sent
    places = [place]
    for ahead in (80_000, 70_000, 60_000):
        result, newer = world.reschedule(places[-1], START_MS + ahead)
        assert (result, newer is not None) == (Cancelled.CANCELLED, True)
        places.append(newer or 0)
    for number, each in enumerate(places):
        assert world.reschedule(each, START_MS + 50_000 + number)[0] is Cancelled.CANCELLED
    world.pass_time(50_002)
    assert world.bodies() == [b"first"]
    world.pass_time(1)
    assert world.bodies() == [b"first", b"m2"]


def test_what_waits_is_told_by_the_id_that_its_sender_was_given(sent: tuple[TimerWorld, int]) -> None:
    world, place = sent
    first = world.store.message_at(place)
    assert first is not None
    for _ in range(2):
        world.reschedule(place, START_MS + 5_000)
        world.keep()
    world.pass_time(1)
    (found,) = (each for each in world.pending.select(EVERYTHING, world.now_ms) if isinstance(each, WaitingMessage))
    assert given_id(found.message) == first.offset_message_id
    assert found.message.physical_offset > place


def test_an_id_whose_records_are_gone_names_its_message() -> None:
    """An id whose records are gone still names its message, which was appended once more several times as its files
    went."""
    world = TimerWorld(segment_size=20_000, retention=RetentionConfig(delete_when=ANY_HOUR))
    place = world.send(START_MS + 60 * DAY_MS, b"far")
    gone = world.send(START_MS + 2_000, b"near")
    for day in range(40):
        for _ in range(3):
            world.send(world.now_ms + 1000, bytes(3000), topic="traffic")
        world.pass_time(DAY_MS)
        world.owned.expire()
        if day == 20:
            world.close()
            world.open()
    assert world.store.log.begin > gone
    assert world.cancel(gone) is Cancelled.NO_LONGER_WAITS
    assert world.reschedule(place, world.now_ms + 5_000)[0] is Cancelled.CANCELLED
    assert world.cancel(place) is Cancelled.CANCELLED
    world.pass_time(30 * DAY_MS)
    assert b"far" not in world.bodies()


def test_what_never_waited_is_told_to_be_delivered() -> None:
    world = TimerWorld()
    place = world.send(START_MS + 5)
    world.pass_time(5)
    (message,) = world.delivered()
    assert world.cancel(message.physical_offset) is Cancelled.DELIVERED
    assert world.cancel(place + 1) is Cancelled.UNKNOWN


def test_a_message_that_its_topics_policy_cancelled_is_told_to_be_cancelled() -> None:
    world = TimerWorld()
    place = world.send(START_MS + 1000)
    world.run()
    world.timers.set_policy("orders", policy_of({"timer.catch.up": "drop:5"}))
    world.clock.advance(60_000)
    world.run()
    assert world.bodies() == []
    assert world.cancel(place) is Cancelled.CANCELLED_BEFORE


def test_units_of_what_was_appended_again_keep_that_in_every_slot() -> None:
    """Units of a rescheduled message keep that flag in every slot that it rolls to, so that the next life knows."""
    world = TimerWorld(TimerConfig(log_segment_size=5200, roll_window=10))
    place = world.send(START_MS + 200_000)
    world.reschedule(place, START_MS + 150_000)
    world.pass_time(60_000)
    log = world.timers._slots.log
    units = [unit for _, part in log.scan(log.begin, log.end) for unit in part]
    assert [int(unit["magic"]) & NORMAL for unit in units] == [1] + [0] * (len(units) - 1)
    assert len(units) > 5
    assert all(0 <= int(unit["magic"]) <= 15 for unit in units), "Apache's broker takes no other for its own"


def test_only_records_that_were_appended_again_are_read() -> None:
    world = TimerWorld()
    places = [world.send(LATER + number) for number in range(300)]
    for place in places[:3]:
        world.reschedule(place, LATER + 5000)
    world.run()
    world.close()
    world.open()
    ids, read = world.timers.changes.ids, []
    message_at = world.store.message_at
    world.store.message_at = lambda *each: (read.append(each), message_at(*each))[1]  # type: ignore[method-assign,func-returns-value]
    while not ids.is_complete:
        assert ids.look(world.now_ms) is None
    assert len(read) == 3


def test_a_read_that_fails_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    world = TimerWorld()
    place = world.send(LATER)
    world.reschedule(place, LATER + 5000)
    world.run()
    log = world.timers._slots.log
    scan, fails = log.scan, [True, False, True]

    def failing(*range_: Any) -> Any:
        if fails and fails.pop(0):
            raise OSError(5, "EIO")
        return scan(*range_)

    ids = world.timers.changes.ids
    monkeypatch.setattr(log, "scan", failing)
    errors = 0
    while not ids.is_complete:
        try:
            ids.look(world.now_ms)
        except OSError:
            errors += 1
    assert errors == 1 + (not fails)
    assert world.cancel(place) is Cancelled.CANCELLED


def test_what_was_kept_more_than_once_and_delivered_before_a_kill_is_told_to_be_delivered() -> None:
    world = TimerWorld()
    place = world.send(START_MS + 1000)
    world.run()
    assert [world.keep(), world.run(), world.keep()][::2] == [1, 1]
    world.pass_time(1000)
    assert world.bodies() == [b"m1"]
    world.open()
    assert world.cancel(place) is Cancelled.DELIVERED


def test_what_is_appended_again_meanwhile_is_newer() -> None:
    world = TimerWorld()
    place = world.send(LATER)
    _, second = world.reschedule(place, LATER + 1000)
    world.run()
    world.close()
    world.open()
    ids = world.timers.changes.ids
    world.run()
    assert ids.look(world.now_ms) is None
    ids._reached = 0  # as if there were a long log before
    _, third = world.reschedule(second or 0, LATER + 2000)
    while not ids.is_complete:
        ids.look(world.now_ms)
    assert ids.newest(place) == third
    assert world.cancel(place) is Cancelled.CANCELLED


def test_a_message_with_as_many_properties_as_there_may_be_gets_another_time() -> None:
    world = TimerWorld()
    probe = world.store.message_at(world.send(LATER, b"x"))
    assert probe is not None
    room = properties.MAX_BYTES - AGAIN_ROOM - len(probe.properties_text) - len("A\x01\x02")
    place = world.send(LATER, b"large", text=f"A\x01{'x' * room}\x02")
    assert world.reschedule(place, LATER + 1000)[0] is Cancelled.CANCELLED
    assert world.cancel(place) is Cancelled.CANCELLED


def test_an_id_of_a_store_that_was_written_anew_is_none() -> None:
    """TIMER_FIRST_ID is ignored in a store that was written anew, where the record before lies elsewhere."""
    world = TimerWorld()
    world.send(LATER)
    place = world.send(LATER)
    _, again = world.reschedule(place, LATER + 1)
    message = world.store.message_at(again or 0)
    assert message is not None
    assert given_id(message) == offset_message_id(message.store_host, place)
    moved = msgspec.structs.replace(message, physical_offset=5000, prepared_transaction_offset=-1)
    assert given_id(moved) == moved.offset_message_id


@pytest.mark.parametrize("life", [same_life, next_life, after_a_kill])
@pytest.mark.parametrize("late_ms", [0, 700, 999])
def test_what_a_level_had_is_not_told_to_be_cancelled_where_the_log_no_longer_tells(
    life: Callable[[TimerWorld], None], late_ms: int
) -> None:
    """The answer about a delivered level message is NO_LONGER_WAITS, and not cancelled, when the unit of its last
    record was in a removed file while other units of the same second remain."""
    world = TimerWorld(levels="1s 100s", start_ms=START_MS + late_ms)
    place = world.schedule(2)
    assert world.reschedule(place, 0)[0] is Cancelled.CANCELLED
    for _ in range(300):
        world.send(world.now_ms, b"")
    world.pass_time(1)
    world.send(world.now_ms + 2000)
    world.pass_time(3000)
    world.checkpoint()
    world.owned.expire()
    life(world)
    assert world.timers._slots.log.begin > 0
    assert world.cancel(place) is Cancelled.NO_LONGER_WAITS


def test_after_a_kill_units_of_what_was_delivered_lie_behind_those_of_the_first_records() -> None:
    """After a kill the units of rescheduled and delivered messages lie behind those of their first records: the file
    with the first ones is removed first, or a first unit that stayed alone would look like a cancel."""
    world = TimerWorld()
    world.send(START_MS + 600_000)
    world.pass_time(100)
    world.checkpoint()
    places = [world.send(START_MS + 600_000) for _ in range(5)]
    world.run()
    for place in places:
        assert world.timers.changes.reschedule(place, START_MS + 500, world.now_ms) is Cancelled.CANCELLED
    world.pass_time(1500)
    assert len(world.bodies()) == 5
    world.open()
    world.run()
    log = world.timers._slots.log
    order = [int(unit["physical_offset"]) for _, units in log.scan(log.begin, log.end) for unit in units]
    assert len(order) == 1 + 2 * 5
    assert sorted(order.index(place) for place in places) == [1, 2, 3, 4, 5]
