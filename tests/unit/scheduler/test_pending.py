"""Listing and changing the waiting messages of wheel and levels in one store."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

import pytest

from duemq.protocol.records import properties
from duemq.protocol.records.record import StoredMessage
from duemq.scheduler.levels.delivery import DeliveryConfig
from duemq.scheduler.levels.table import DelayLevels
from duemq.scheduler.search import SearchPosition, Selection, WaitingMessage
from duemq.scheduler.timers.config import Cancelled, TimerConfig
from duemq.scheduler.timers.index.ids import first_offset
from duemq.scheduler.timers.policy.policies import policy_of
from duemq.storage.budget import Pieces
from duemq.storage.clock import look
from duemq.storage.errors import StoreFull
from duemq.storage.queues.pull import ColdRead
from tests.soak import sampled
from tests.unit.scheduler.timer_world import START_MS, TimerWorld, last

DAY_MS = 86_400_000
LEVELS = "1s 5s 30s 2h"
EVERYTHING = Selection()


class PendingWorld(TimerWorld):
    """A store with timers and levels."""

    def __init__(self, config: TimerConfig | None = None) -> None:
        super().__init__(config, levels=LEVELS)

    def search(
        self, selection: Selection = EVERYTHING, after: SearchPosition | None = None
    ) -> Iterator[WaitingMessage | ColdRead | None]:
        return self.pending.select(selection, self.now_ms, after)

    def select(self, selection: Selection = EVERYTHING, after: SearchPosition | None = None) -> list[WaitingMessage]:
        return [each for each in self.search(selection, after) if isinstance(each, WaitingMessage)]

    def count(self, selection: Selection) -> int:
        found = last(self.pending.count(selection, self.now_ms))
        assert isinstance(found, int)
        return found

    def told(self, **selection: object) -> list[bytes]:
        """Return the bodies of a selection, and check that counting agrees."""
        wanted = Selection(**selection)  # type: ignore[arg-type]
        found = [each.message.body for each in self.select(wanted)]
        assert self.count(wanted) == len(found)
        return found


@pytest.fixture
def world() -> PendingWorld:
    return PendingWorld()


def test_everything_that_waits_is_told_with_its_time(world: PendingWorld) -> None:
    timer = world.send(START_MS + 90_123, text="KEYS\x01a b\x02", topic="bills")
    level = world.schedule(3)
    world.run()
    second, first = world.select()
    assert (first.message.physical_offset, first.due_ms, first.topic) == (timer, START_MS + 90_123, "bills")
    assert (second.message.physical_offset, second.due_ms, second.topic) == (level, START_MS + 30_000, "orders")
    assert (first.delay_level, second.delay_level) == (0, 3)


def test_nothing_waits(world: PendingWorld) -> None:
    assert world.told() == []
    assert world.curve(START_MS, 1000, 3) == [0, 0, 0]


def test_a_selection_by_topic(world: PendingWorld) -> None:
    """A selection by topic keeps topics with the same hash apart."""
    assert properties.java_hash("Aa") == properties.java_hash("BB")
    for topic in ("Aa", "BB", "Aa"):
        world.send(START_MS + 60_000, topic=topic)
        world.schedule(4, topic=topic)
    world.run()
    found = {topic: [each.message.body for each in world.select(Selection(topic))] for topic in ("Aa", "BB", "C")}
    assert found == {"Aa": [b"m2", b"m6", b"m1", b"m5"], "BB": [b"m4", b"m3"], "C": []}
    assert world.count(Selection("BB", key="K3")) == 1


def test_a_selection_by_key(world: PendingWorld) -> None:
    """A selection by key matches whole words of KEYS, or the UNIQ_KEY."""
    world.send(START_MS + 60_000, text="KEYS\x01red green\x02")
    world.schedule(4, text="KEYS\x01green\x02")
    world.send(START_MS + 60_000)
    world.run()
    for key, bodies in {"green": [b"m2", b"m1"], "red": [b"m1"], "K3": [b"m3"], "gree": [], "red green": []}.items():
        assert world.told(key=key) == bodies
        assert world.told(topic="orders", key=key) == bodies
        assert world.told(topic="bills", key=key) == []


def test_a_selection_by_time(world: PendingWorld) -> None:
    """A selection by time includes its begin and excludes its end."""
    for seconds in (10, 20, 30):
        world.send(START_MS + seconds * 1000)
    world.schedule(3)
    world.run()
    assert world.told(begin_ms=START_MS + 20_000) == [b"m4", b"m2", b"m3"]
    assert world.told(end_ms=START_MS + 20_000) == [b"m1"]
    assert world.told(begin_ms=START_MS + 10_001, end_ms=START_MS + 30_000) == [b"m2"]
    assert world.told(begin_ms=START_MS + 30_000, end_ms=START_MS + 30_001) == [b"m4", b"m3"]
    assert world.told(begin_ms=START_MS + 30_000, end_ms=START_MS + 30_000) == []


def test_what_is_delivered_or_cancelled_waits_no_more(world: PendingWorld) -> None:
    places = [world.send(START_MS + 5_000 * (n + 1)) for n in range(3)] + [world.schedule(n) for n in (1, 3, 4)]
    world.run()
    assert world.told() == [b"m4", b"m5", b"m6", b"m1", b"m2", b"m3"]
    assert world.cancel(places[1]) is Cancelled.CANCELLED
    assert world.cancel(places[4]) is Cancelled.CANCELLED
    assert world.told() == [b"m4", b"m6", b"m1", b"m3"]
    world.pass_time(5_000)
    assert world.told() == [b"m6", b"m3"]
    assert [
        world.cancel(search_position) for search_position in (places[0], places[1], places[3], places[4], 10**9)
    ] == [
        Cancelled.DELIVERED,
        Cancelled.CANCELLED_BEFORE,
        Cancelled.DELIVERED,
        Cancelled.CANCELLED_BEFORE,
        Cancelled.UNKNOWN,
    ]


def test_of_the_current_second_only_what_is_not_delivered(world: PendingWorld) -> None:
    for ms in (100, 400, 900):
        world.send(START_MS + 60_000 + ms)
    world.pass_time(60_400)
    assert world.bodies() == [b"m1", b"m2"]
    assert world.told() == [b"m3"]


def test_what_is_overdue_and_not_delivered_waits(world: PendingWorld) -> None:
    world.config.stop_dequeue = True
    world.send(START_MS + 5_000)
    world.send(START_MS + 5_500)
    world.pass_time(60_000)
    assert world.told() == [b"m1", b"m2"]
    assert world.told(end_ms=START_MS + 5_500) == [b"m1"]


def test_what_is_not_in_the_wheel_yet_waits_too(world: PendingWorld) -> None:
    world.config.stop_enqueue = True
    places = [world.send(START_MS + 60_000 + n, topic=topic) for n, topic in enumerate(("orders", "bills", "orders"))]
    world.run()
    assert world.state().behind_messages == 3
    assert world.told() == [b"m1", b"m2", b"m3"]
    assert world.told(topic="orders") == [b"m1", b"m3"]
    assert world.told(begin_ms=START_MS + 60_001, end_ms=START_MS + 60_002) == [b"m2"]
    assert world.curve(START_MS + 60_000, 1, 3, topic="orders") == [1, 0, 1]
    assert world.cancel(places[1]) is Cancelled.CANCELLED
    assert world.told() == [b"m1", b"m3"]


def test_a_message_far_ahead_is_told_once_with_its_own_time(world: PendingWorld) -> None:
    """A message far ahead is listed once, with its own time, while it waits in the slots of earlier times."""
    world.config.roll_window = 100
    due = START_MS + 555_123
    world.send(due)
    for _ in range(5):
        world.pass_time(100_000)
        (found,) = world.select(Selection(begin_ms=due, end_ms=due + 1))
        assert (found.due_ms, found.message.body) == (due, b"m1")
    world.pass_time(56_000)
    assert world.told() == []


@pytest.mark.parametrize("clean", [True, False])
def test_after_a_restart_the_same_waits(world: PendingWorld, clean: bool) -> None:
    places = [world.send(START_MS + 1000 * n) for n in (1, 100, 200, 100 * 86_400)] + [
        world.schedule(n) for n in (1, 3, 4)
    ]
    world.pass_time(2_000)
    world.checkpoint()
    for search_position in (places[1], places[5]):
        assert world.cancel(search_position) is Cancelled.CANCELLED
    told = world.told()
    assert told == [b"m7", b"m3", b"m4"]
    if clean:
        world.close()
    world.open()
    world.run()
    assert world.told() == told
    assert world.cancel(places[1]) is Cancelled.CANCELLED_BEFORE


def test_a_search_goes_on_behind_any_message(world: PendingWorld) -> None:
    """A search continues behind any message: places survive a restart, and new messages are listed if they are behind
    the place."""
    for n in range(700):
        world.send(START_MS + 60_000 + n % 7)
    for level in (4, 3, 4):
        world.schedule(level)
    world.run()
    world.config.stop_enqueue = True
    for _ in range(3):
        world.send(START_MS + 70_000)
    found = world.select()
    assert [each.message.body for each in found[:5]] == [b"m702", b"m701", b"m703", b"m1", b"m2"]
    assert [each.message.body for each in found[-4:]] == [b"m700", b"m704", b"m705", b"m706"]
    assert [each.search_position for each in found] == sorted(each.search_position for each in found)
    for at in (0, 1, 2, 3, 513, 514, 515, 701, 702, 703, 704, 705):
        search_position = SearchPosition.parse(str(found[at].search_position))
        assert [each.search_position for each in world.select(after=search_position)] == [
            each.search_position for each in found[at + 1 :]
        ]
    world.checkpoint()
    world.open()
    assert [each.search_position for each in world.select(after=found[699].search_position)] == [
        each.search_position for each in found[700:]
    ]


@pytest.mark.parametrize(
    "text", ["", "1", "1.2", "1.2.3.4", "-1.0.0", "2.0.0", "a.b.c", "0.0.٣", f"0.0.{2**63}", "0" * 99]
)
def test_what_is_no_place(text: str) -> None:
    with pytest.raises(ValueError, match="is not a valid position"):
        SearchPosition.parse(text)


def test_a_search_does_a_bounded_amount_at_each_step(world: PendingWorld) -> None:
    for _ in range(300):
        world.send(START_MS + 60_000, topic="bills")
    world.run()
    steps = list(world.search(Selection("orders", key="x")))
    assert steps == [None] * len(steps)
    read: list[int] = []
    message_at = world.store.message_at

    def noted(physical_offset: int, size: int | None = None) -> StoredMessage | None:
        read.append(physical_offset)
        return message_at(physical_offset, size)

    world.store.message_at = noted  # type: ignore[method-assign]
    most = 0
    for _ in world.search(Selection("bills", key="x")):
        most, read[:] = max(most, len(read)), []
    assert most == 1
    world.count(Selection("bills"))
    assert read == [], "counting by topic and time reads no records"


def test_a_search_beside_which_everything_changes_tells_each_once(world: PendingWorld) -> None:
    for n in range(400):
        world.send(START_MS + 10_000 + n)
        world.schedule(3)
    world.run()
    found = []
    for number, each in enumerate(world.search(EVERYTHING)):
        if isinstance(each, WaitingMessage):
            found.append(each.message.physical_offset)
            if number % 10 == 0:
                result, _ = world.reschedule(each.message.physical_offset, START_MS + 90_000)
                assert result is Cancelled.CANCELLED
        if number % 100 == 0:
            world.send(START_MS + 20_000)
            world.pass_time(10)
    assert len(set(found)) == len(found) >= 700


# --- changes during a search


@pytest.mark.parametrize("how", ["rolled", "spread", "paused"])
@pytest.mark.parametrize("chance", sampled(range(5), range(2)))
def test_what_is_moved_beside_a_search_is_told_once(how: str, chance: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A message that moves during a search is listed once, whether the search has reached its old unit or not."""
    monkeypatch.setattr("duemq.scheduler.timers.files.log._SCAN_UNITS", 8)
    monkeypatch.setattr("duemq.scheduler.timers.seconds.slots._ROLL_UNITS", 16)
    random = Random(chance)
    world = PendingWorld(TimerConfig(log_segment_size=5200, roll_window=10 if how == "rolled" else 1000))
    if how != "rolled":
        attributes = {"timer.spread.seconds": "600"} if how == "spread" else {"timer.paused": "true"}
        world.timers.set_policy("orders", policy_of(attributes))
    count = 150
    for number in range(count):
        world.send(START_MS + (100_000 if how == "rolled" else 1000) + number)
    world.run()
    for _ in range(4):
        searches: list[Iterator[Any]] = [
            world.pending.count(EVERYTHING, world.now_ms),
            world.pending.curve(START_MS, 1000, 3000, world.now_ms, "orders"),
            world.search(EVERYTHING),
        ]
        found: list[list[Any]] = [[], [], []]
        left = [0, 1, 2]
        while left:
            which = random.choice(left)
            each = next(searches[which], StopIteration)
            if each is StopIteration:
                left.remove(which)
            elif each is not None:
                found[which].append(each)
            if random.random() < 0.1:
                world.clock.advance(500)
            world.step(Pieces(random.choice((1, 2, 5))))
        ((counted,), (curve,), told) = found
        delivered = len(world.bodies())
        assert counted >= count - delivered
        assert sum(curve) >= count - delivered
        places = [each.message.physical_offset for each in told]
        assert len(set(places)) == len(places) >= count - delivered
        assert [each.search_position for each in told] == sorted(each.search_position for each in told)
        assert max(counted, sum(curve), len(places)) <= count
        world.pass_time(5000)


def filled(random: Random) -> PendingWorld:
    """Return a world with 200 waiting messages, of levels and with timers."""
    world = PendingWorld()
    for number in range(200):
        if number % 3:
            world.send(START_MS + 100_000 + number)
        else:
            world.schedule(random.choice((3, 4)))
    world.run()
    return world


def beside_moves(
    world: PendingWorld, search: Iterator[Any], random: Random, places: list[int], chance: float
) -> Iterator[Any]:
    """Run a search while messages get other records: from a random step on all messages, as if their files were about
    to go, and in half of the runs before that some that are rescheduled."""
    is_keeping, changes = False, random.random() < 0.5
    for each in search:
        yield each
        is_keeping = is_keeping or random.random() < chance
        for _ in range(random.choice((0, 1, 3))):
            if is_keeping:
                world.timers.keep_next(world.store.log.end, look(world.clock))
            elif changes:
                world.reschedule(random.choice(places), START_MS + 100_000 + random.randrange(1000))
            world.step(Pieces(random.choice((0, 2))))


@pytest.mark.parametrize("chance", sampled(range(10), range(4)))
def test_what_is_appended_once_more_beside_a_search_is_told_once(chance: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A message that is appended once more during a search, as its file is about to go or as it is rescheduled, is
    listed once."""
    monkeypatch.setattr("duemq.scheduler.timers.files.log._SCAN_UNITS", 8)
    random = Random(chance)
    world = filled(random)
    for _ in range(3):
        before = {first_offset(each.message): each.message.physical_offset for each in world.select()}
        assert len(before) == 200
        search, told = world.search(), []
        for each in beside_moves(world, search, random, list(before.values()), 0.01):
            if isinstance(each, WaitingMessage):
                told.append(each)
        firsts = [first_offset(each.message) for each in told]
        assert sorted(firsts) == sorted(before)
        assert [each.search_position for each in told] == sorted(each.search_position for each in told)
        world.run()


@pytest.mark.parametrize("topic", [None, "orders"])
@pytest.mark.parametrize("chance", sampled(range(5), range(2)))
def test_what_is_appended_once_more_beside_a_count_counts_once(
    chance: int, topic: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("duemq.scheduler.timers.files.log._SCAN_UNITS", 8)
    random = Random(chance)
    world = filled(random)
    for step_ms in (0, 1000, 1500):
        places = [each.message.physical_offset for each in world.select()]
        if step_ms:
            search: Iterator[Any] = world.pending.curve(START_MS, step_ms, 10_000, world.now_ms, topic)
        else:
            search = world.pending.count(Selection(topic), world.now_ms)
        counted = None
        for each in beside_moves(world, search, random, places, 0.05):
            counted = each if each is not None and not isinstance(each, ColdRead) else counted
        assert (sum(counted) if isinstance(counted, list) else counted) == 200
        world.run()


@pytest.mark.parametrize("chance", sampled(range(40), range(6)))
def test_a_list_of_many_pages_tells_each_once(chance: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A list of many pages has each message once, whatever slots messages get between the pages: held back by a pause,
    brought back, rolled, put off, over restarts and the ends of timer log files, in the wheel or not yet."""
    random = Random(chance)
    if chance % 2:
        monkeypatch.setattr("duemq.scheduler.timers.index.positions.BLOCK_UNITS", 8)
        monkeypatch.setattr("duemq.scheduler.timers.index.positions._BLOCK", 8 * 52)
        monkeypatch.setattr("duemq.scheduler.timers.index.positions._PART_BLOCKS", 2)
    world = PendingWorld(TimerConfig(log_segment_size=52 * 24, roll_window=random.choice((7, 1000))))
    policy = {"timer.paused": "true"}
    world.timers.set_policy("orders", policy_of(policy))
    for _ in range(300):
        world.send(world.now_ms + random.randrange(1, 20_000), topic=random.choice(("orders", "orders", "others")))
        if not random.randrange(20):
            world.schedule(random.choice((3, 4)))
    world.pass_time(random.choice((0, 8_000)))
    waiting = {each.message.physical_offset for each in world.select()}
    told: list[int] = []
    search_position, size = None, random.choice((20, 70))
    while True:
        page = world.select(after=search_position)[:size]
        if not page:
            break
        told += [each.message.physical_offset for each in page]
        search_position = SearchPosition.parse(str(page[-1].search_position))
        happens = random.randrange(7)
        if happens == 0:
            world.pass_time(random.choice((500, 3_000)))
        elif happens == 1:
            policy = {} if policy else random.choice(({"timer.paused": "true"}, {"timer.spread.seconds": "30"}))
            world.timers.set_policy("orders", policy_of(policy) if policy else None)
            world.run()
        elif happens == 2:
            world.checkpoint()
            world.owned.expire()
        elif happens == 3:
            world.open()
            world.timers.set_policy("orders", policy_of(policy) if policy else None)
        elif happens == 4:
            for _ in range(30):
                world.send(world.now_ms + random.randrange(1, 20_000))
            world.config.stop_enqueue = not world.config.stop_enqueue
            world.step(Pieces(random.choice((1, 5))))
        elif happens == 5:
            world.step(Pieces(random.choice((1, 5))))
    assert len(set(told)) == len(told)
    assert told
    left = {each.message.physical_offset for each in world.select()}
    assert waiting & left <= set(told)


def test_a_page_reads_what_it_needs_of_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page reads only the part of the timer log that it needs, however long the log is and wherever the page
    begins."""
    world = PendingWorld(TimerConfig(log_segment_size=5_200_000))
    world.timers.set_policy("orders", policy_of({"timer.paused": "true"}))
    places = [world.send(START_MS + 1000) for _ in range(30_000)]
    world.pass_time(2000)
    log, counts = world.timers._slots.log, list[int]()
    read = log.read

    def counted(position: int, count: int) -> Any:
        counts.append(count)
        return read(position, count)

    monkeypatch.setattr(log, "read", counted)
    for at in (0, 10_000, 29_000):
        counts.clear()
        steps = world.search(EVERYTHING, SearchPosition(1, 0, places[at]))
        page = [
            each
            for each, _ in zip((each for each in steps if isinstance(each, WaitingMessage)), range(100), strict=False)
        ]
        assert [each.search_position.offset for each in page] == places[at + 1 : at + 101]
        assert sum(counts) < 30_000


def test_while_a_second_is_loaded_what_waits_in_it_is_told(world: PendingWorld) -> None:
    """While a second is being loaded, as after a restart in its middle, its waiting messages are listed."""
    for n in range(5):
        world.send(START_MS + 60_001 + 100 * n)
    world.pass_time(60_150)
    world.checkpoint()
    world.open()
    assert world.told() == [b"m3", b"m4", b"m5"]


def test_a_run_of_a_level_may_end_beside_a_search(world: PendingWorld) -> None:
    for _ in range(3):
        world.schedule(3)
    world.levels.set_table(DelayLevels("1s 5s 2s 2h"), world.now_ms)
    world.schedule(4)
    steps = world.search(EVERYTHING)
    while next(steps) is None:
        pass
    world.clock.advance(30_000)
    world.run()
    assert b"m4" in [each.message.body for each in steps if isinstance(each, WaitingMessage)]


def test_runs_of_a_level_may_end_beside_a_search(world: PendingWorld) -> None:
    """Several runs of a level may end during a search that has not reached some of them."""
    for table in ("1s 5s 25s 2h", "1s 5s 20s 2h", "1s 5s 60s 2h"):
        world.schedule(3)
        world.table = DelayLevels(table)
        world.levels.set_table(world.table, world.now_ms)
    world.schedule(3, b"newest")
    select, count = world.search(EVERYTHING), world.pending.count(Selection("orders"), world.now_ms)
    next(select), next(count)
    assert len(world.levels.levels[3].runs) == 3
    world.clock.advance(31_000)
    world.run()
    assert len(world.levels.levels[3].runs) == 1
    assert [each.message.body for each in select if isinstance(each, WaitingMessage)] == [b"newest"]
    assert [each for each in count if isinstance(each, int)] == [2]


def test_files_of_the_timer_log_may_expire_beside_a_search() -> None:
    world = PendingWorld(TimerConfig(log_segment_size=52 * 4))
    for ms in [1000] * 9 + [4000] + [60_000] * 10:
        world.send(START_MS + ms)
    world.run()
    steps = world.search(EVERYTHING)
    next(steps)
    world.pass_time(5000)
    world.checkpoint()
    before = world.files.list("/s/timerlog")
    world.owned.expire()
    assert len(world.files.list("/s/timerlog")) < len(before)
    assert [each.message.body for each in steps if isinstance(each, WaitingMessage)][-10:] == [
        f"m{n}".encode() for n in range(11, 21)
    ]


# --- the curve


def test_the_curve_has_what_is_due_in_each_span(world: PendingWorld) -> None:
    for ms in (0, 999, 1000, 5999, 6000, 100 * DAY_MS):
        world.send(START_MS + 60_000 + ms, topic="bills")
    world.schedule(3)
    world.run()
    assert world.curve(START_MS + 60_000, 1000, 6) == [2, 1, 0, 0, 0, 1]
    assert world.curve(START_MS + 60_001, 1000, 6) == [2, 0, 0, 0, 0, 2]
    assert world.curve(START_MS, 30_000, 3) == [0, 1, 5]
    assert world.curve(START_MS, 30_000, 3, topic="bills") == [0, 0, 5]
    assert world.curve(START_MS, 30_000, 3, topic="orders") == [0, 1, 0]
    assert sum(world.curve(START_MS, DAY_MS, 101)) == 7


def test_in_the_curve_what_is_overdue_is_due_now(world: PendingWorld) -> None:
    world.config.stop_dequeue = True
    world.send(START_MS + 1_000)
    world.send(START_MS + 90_000)
    world.pass_time(60_000)
    now_ms = START_MS + 60_000
    assert world.curve(now_ms, 10_000, 4) == [1, 0, 0, 1]
    assert world.curve(START_MS, 10_000, 10) == [0, 0, 0, 0, 0, 0, 1, 0, 0, 1]
    assert world.curve(now_ms + 10_000, 10_000, 3) == [0, 0, 1]


# --- changing


@pytest.mark.parametrize("by", ["timer", "level"])
def test_a_message_gets_another_time(world: PendingWorld, by: str) -> None:
    search_position = world.send(START_MS + 60_000) if by == "timer" else world.schedule(3)
    world.run()
    result, new_place = world.reschedule(search_position, START_MS + 20_123)
    assert result is Cancelled.CANCELLED
    world.run()
    (found,) = world.select()
    assert (found.message.physical_offset, found.due_ms, found.delay_level) == (new_place, START_MS + 20_123, 0)
    assert world.reschedule(search_position, START_MS + 30_000)[0] is Cancelled.CANCELLED
    result, new_place = world.reschedule(search_position, START_MS + 20_123)
    assert result is Cancelled.CANCELLED
    world.pass_time(20_122)
    assert world.bodies() == []
    world.pass_time(1)
    assert world.bodies() == [b"m1"]
    world.pass_time(60_000)
    assert world.bodies() == [b"m1"]
    assert new_place is not None
    for each in (search_position, new_place):
        assert world.reschedule(each, START_MS) == (Cancelled.DELIVERED, None)


@pytest.mark.parametrize("by", ["timer", "level"])
def test_a_time_that_is_past_is_at_once(world: PendingWorld, by: str) -> None:
    search_position = world.send(START_MS + 60_000) if by == "timer" else world.schedule(3)
    world.run()
    assert world.reschedule(search_position, 0)[0] is Cancelled.CANCELLED
    world.pass_time(0)
    assert world.bodies() == [b"m1"]
    assert world.told() == []
    world.pass_time(DAY_MS)
    assert world.bodies() == [b"m1"]


def test_what_cannot_be_written_is_not_changed(world: PendingWorld) -> None:
    search_position = world.send(START_MS + 60_000)
    world.run()
    world.store.health.fill("full")
    for change in (world.cancel, lambda search_position: world.reschedule(search_position, START_MS)):
        with pytest.raises(StoreFull):
            change(search_position)
    world.store.health.has_room()
    assert world.told() == [b"m1"]


def test_a_store_with_another_log_size(world: PendingWorld) -> None:
    """A search continues over the ends of the timer log's files."""
    world = PendingWorld(TimerConfig(log_segment_size=52 * 10))
    for _ in range(50):
        world.send(START_MS + 60_000)
    world.run()
    assert len(world.told()) == 50


def test_a_level_message_that_is_to_be_tried_again_waits() -> None:
    """A message of a level that will be tried again counts as waiting, since its commitlog file may not go before it is
    delivered or appended once more."""
    world = TimerWorld(levels="1s 2s")
    world.delivery.value = DeliveryConfig(is_async=True)
    search_position = world.schedule(1)
    world.run()
    world.store.health.fill("full")
    world.pass_time(1500)
    assert world.bodies() == []
    found = [
        each[0].physical_offset
        for each in world.levels.waiting_before(world.store.log.end, world.now_ms)
        if isinstance(each, tuple)
    ]
    assert found == [search_position]
    world.store.health.has_room()
    assert world.keep() == 1
    world.pass_time(3000)
    assert world.bodies() == [b"m1"]


def test_a_search_after_a_kill_changes_nothing_of_what_was_found_delivered(world: PendingWorld) -> None:
    """A search after a kill does not affect deliveries: it lists only waiting messages while the current second is not
    loaded yet, and each message is delivered once."""
    for number in range(4):
        world.send(START_MS + 500 + 1000 * number)
    world.pass_time(600)
    world.checkpoint()
    world.pass_time(1400)
    assert world.bodies() == [b"m1", b"m2"]
    world.open()
    assert not world.timers._slots.turns.current.is_loaded
    assert world.told() == [b"m3", b"m4"]
    world.pass_time(5000)
    assert world.bodies() == [b"m1", b"m2", b"m3", b"m4"]
