"""The promises for every waiting message, whichever way it came to wait and however the broker runs meanwhile.

The ways are those by which a message can get a deliver time; the lives are the events that may happen between any two
others. A new way to wait, or a new kind of restart, is a line in `WAYS` or `LIVES`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import pytest

from duemq.protocol.records import properties
from duemq.scheduler.levels.delivery import DeliveryConfig
from duemq.scheduler.search import Selection, WaitingMessage
from duemq.scheduler.timers.config import Cancelled, TimerConfig
from duemq.storage.errors import StoreFull
from tests.support.messages import HOST
from tests.unit.scheduler.timer_world import START_MS, TimerWorld, last

DUE_MS: Final = START_MS + 30_000
"""Time at which the messages of all ways are delivered."""
LEVEL: Final = 3
OVER: Final = (Cancelled.DELIVERED, Cancelled.NO_LONGER_WAITS)
"""Possible answers about a delivered message: some time after a kill, the broker no longer knows whether it was
delivered or cancelled."""
TEXT: Final = "TAGS\x01t\x02KEYS\x01k\x02own\x01value\x02"
ROLLED: Final = TimerConfig(log_segment_size=5200, roll_window=7)


class Waits:
    """A world with one waiting message, and the id by which its sender knows the message."""

    def __init__(self, config: TimerConfig | None = None, *, is_async: bool = True) -> None:
        self.world = TimerWorld(config, levels="1s 5s 30s 2h")
        self.world.delivery.value = DeliveryConfig(is_async=is_async)
        self.place = -1

    def by_level(self) -> None:
        self.place = self.world.schedule(LEVEL, b"body", TEXT)

    def by_timer(self) -> None:
        self.place = self.world.send(DUE_MS, b"body", TEXT)

    def moved(self, begin: Callable[[], None], *others: int) -> None:
        """Move the message to its deliver time by way of other times."""
        begin()
        self.world.run()
        for due_ms in (*others, DUE_MS):
            assert self.world.reschedule(self.place, due_ms)[0] is Cancelled.CANCELLED

    def replacing(self) -> None:
        self.world.send_instead(DUE_MS - 20_000, "k", b"replaced")
        self.world.run()
        assert self.world.send_instead(DUE_MS, "k", b"body") == 1
        self.place = self.world.last_physical_offset

    def told(self) -> list[tuple[bytes, int]]:
        """Body and deliver time of each message that operators see waiting."""
        selected = self.world.pending.select(Selection(), self.world.now_ms, None)
        return [(each.message.body, each.due_ms) for each in selected if isinstance(each, WaitingMessage)]

    def counted(self) -> int:
        found = last(self.world.pending.count(Selection(), self.world.now_ms))
        assert isinstance(found, int)
        return found


class Way(NamedTuple):
    """A way in which the message comes to wait."""

    begin: Callable[[Waits], None]
    config: TimerConfig | None = None
    is_async: bool = True


REPLACING: Final = "in place of another"
WAYS: Final = {
    "a level": Way(Waits.by_level),
    "a level with sync delivery": Way(Waits.by_level, is_async=False),
    "a timer": Way(Waits.by_timer),
    "a timer beyond the roll window": Way(Waits.by_timer, ROLLED),
    "a level that was moved": Way(lambda waits: waits.moved(waits.by_level, DUE_MS + 3_600_000)),
    "a timer that was moved nearer": Way(lambda waits: waits.moved(waits.by_timer, DUE_MS + 3_600_000), ROLLED),
    "a timer that was moved away": Way(lambda waits: waits.moved(waits.by_timer, DUE_MS - 29_000)),
    REPLACING: Way(Waits.replacing),
}


def begun(name: str) -> Waits:
    """Return a world in which a message waits in the named way."""
    way = WAYS[name]
    waits = Waits(way.config, is_async=way.is_async)
    way.begin(waits)
    return waits


def nothing(world: TimerWorld) -> None:
    pass


def a_stop(world: TimerWorld) -> None:
    world.close()
    world.open()


def a_kill(world: TimerWorld) -> None:
    world.open()


def a_checkpoint_and_a_kill(world: TimerWorld) -> None:
    world.checkpoint()
    world.open()


def three_kills(world: TimerWorld) -> None:
    for _ in range(3):
        world.open()
        world.step()
        world.step_levels()


def without_derived_files(world: TimerWorld) -> None:
    """Kill the broker, and remove everything but the commitlog."""
    for path in ("consumequeue", "timerlog", "timerwheel", "config/delayOffset.json", "checkpoint", "queuecheck"):
        try:
            world.files.remove_tree(f"/s/{path}")
        except (NotADirectoryError, FileNotFoundError):
            world.files.remove(f"/s/{path}")
    world.open()


LIVES: Final = (nothing, a_stop, a_kill, a_checkpoint_and_a_kill, three_kills, without_derived_files)

Life = Callable[[TimerWorld], None]
every_way = pytest.mark.parametrize("way", WAYS)
every_life = pytest.mark.parametrize("life", LIVES)


@every_way
@every_life
def test_it_is_delivered_once_at_its_time_and_as_it_was_sent(way: str, life: Life) -> None:
    waits = begun(way)
    world = waits.world
    life(world)
    world.pass_time(DUE_MS - 1 - world.now_ms)
    assert world.bodies() == []
    life(world)
    world.run()
    assert world.bodies() == []
    world.pass_time(1)
    assert world.bodies() == [b"body"]
    life(world)
    world.pass_time(100_000)
    (message,) = world.delivered()
    assert (message.topic, message.queue_id, message.body) == ("orders", 3, b"body")
    assert (message.born_host, message.queue_offset) == (HOST, 0)
    if way != REPLACING:
        wanted = {"TAGS": "t", "KEYS": "k", "own": "value"}
        assert {name: properties.get(message.properties_text, name) for name in wanted} == wanted
    assert world.cancel(waits.place) in OVER


@every_way
@every_life
def test_it_is_told_as_waiting_until_it_is_delivered(way: str, life: Life) -> None:
    waits = begun(way)
    world = waits.world
    for _ in range(2):
        world.run()
        assert waits.told() == [(b"body", DUE_MS)]
        assert waits.counted() == 1
        assert world.curve(DUE_MS - 1, 1, 3) == [0, 1, 0]
        life(world)
    world.pass_time(DUE_MS - world.now_ms)
    assert (waits.told(), waits.counted()) == ([], 0)
    life(world)
    world.run()
    assert (waits.told(), waits.counted()) == ([], 0)
    assert world.curve(world.now_ms, 1000, 100) == [0] * 100


@every_way
@every_life
def test_cancelled_it_never_comes(way: str, life: Life) -> None:
    waits = begun(way)
    world = waits.world
    world.run()
    life(world)
    world.run()
    assert world.cancel(waits.place) is Cancelled.CANCELLED
    life(world)
    world.run()
    assert world.cancel(waits.place) is Cancelled.CANCELLED_BEFORE
    assert world.reschedule(waits.place, DUE_MS) == (Cancelled.CANCELLED_BEFORE, None)
    assert (waits.told(), waits.counted()) == ([], 0)
    world.pass_time(100_000)
    life(world)
    world.pass_time(100_000)
    assert world.bodies() == []


@pytest.mark.parametrize(
    ("way", "life", "new_ms"),
    [
        pytest.param(way, life, new_ms, marks=() if (row + column + number) % 4 == 0 else pytest.mark.soak)
        for row, way in enumerate(WAYS)
        for column, life in enumerate(LIVES)
        for number, new_ms in enumerate((DUE_MS - 20_000, DUE_MS + 3_000, DUE_MS + 50_123, 0))
    ],
)
def test_moved_it_comes_at_its_new_time_alone(way: str, life: Life, new_ms: int) -> None:
    """Each run has each way with each life, each way with each time and each life with each time; `make soak` has all
    three together."""
    waits = begun(way)
    world = waits.world
    world.run()
    assert world.reschedule(waits.place, new_ms)[0] is Cancelled.CANCELLED
    life(world)
    world.pass_time(max(0, new_ms - world.now_ms) - bool(new_ms))
    assert world.bodies() == ([] if new_ms else [b"body"])
    world.pass_time(1)
    assert world.bodies() == [b"body"]
    life(world)
    world.pass_time(100_000)
    assert world.bodies() == [b"body"]
    assert world.cancel(waits.place) in OVER


@every_way
@every_life
def test_where_the_store_takes_nothing_it_waits_and_comes_once_afterwards(way: str, life: Life) -> None:
    waits = begun(way)
    world = waits.world
    world.run()
    world.store.health.fill("full")
    for change in (world.cancel, lambda place: world.reschedule(place, START_MS)):
        with pytest.raises(StoreFull):
            change(waits.place)
    world.pass_time(DUE_MS - world.now_ms)
    world.clock.advance(5000)
    world.step()
    world.step_levels()
    assert world.bodies() == []
    life(world)
    world.store.health.has_room()
    world.pass_time(5000)
    assert world.bodies() == [b"body"]
    life(world)
    world.pass_time(100_000)
    assert world.bodies() == [b"body"]
