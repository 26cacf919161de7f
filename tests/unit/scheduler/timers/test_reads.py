"""Goal: a failed read loses no message. It is tried again until it succeeds, and no second is passed before.

Method: the same life again and again, each time with another read failing, once or for a while; every message is
delivered once, and cancelled ones are not delivered."""

from __future__ import annotations

import errno
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TypeVar

import pytest
from structlog.testing import capture_logs

from duemq.protocol.records import properties
from duemq.scheduler.timers.config import Cancelled, TimerConfig
from duemq.scheduler.timers.policy.policies import TimerPolicy
from duemq.storage.budget import Budget
from duemq.storage.clock import look
from duemq.storage.errors import NotInMemory
from tests.crash.simulated_files import Call
from tests.unit.scheduler.timer_world import START_MS, TimerWorld

T = TypeVar("T")

READS = {"/s/timerlog": 30, "/s/timerwheel": 1, "/s/commitlog": 30, "/s/consumequeue": 10}
"""Minimum number of reads in a life, by path."""
EACH_RUN_AND_SOAK = [5, pytest.param(1, marks=pytest.mark.soak)]
"""Which reads fail: each run tries every fifth. Where five in a row fail, each read fails once all the same."""
NEAR_THE_HOUR_MS = START_MS - START_MS % 3_600_000 + 3_590_000
"""A start time by which a life needs two hours of the wheel."""


class FailingReads:
    """Makes `count` reads of a path fail, beginning with number `first`."""

    def __init__(self, world: TimerWorld, path: str, first: int, count: int) -> None:
        self.reads = 0
        self._failing = range(first, first + count)
        self._path = path
        self._files = world.files
        self._check = world.files.check

    def __enter__(self) -> FailingReads:
        self._files.check = self.check  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        self._files.check = self._check  # type: ignore[method-assign]

    def check(self, call: Call, path: str) -> None:
        if call == "read" and path.startswith(self._path):
            self.reads += 1
            if self.reads - 1 in self._failing:
                raise OSError(errno.EIO, "Input/output error", path)
        self._check(call, path)

    @property
    def is_over(self) -> bool:
        """Whether the life had fewer reads than that."""
        return self.reads <= self._failing.start


def again(ask: Iterator[object]) -> object:
    """Ask until there is an answer, as a client that gets an error asks again."""
    for answer in ask:
        if not isinstance(answer, OSError):
            return answer
    raise AssertionError("never answered")


def cancelled(world: TimerWorld, place: int) -> Iterator[object]:
    while True:
        try:
            yield world.cancel(place)
        except OSError as error:
            yield error
        world.pass_time(1)


def prepared(world: TimerWorld) -> dict[bytes, int]:
    """Send messages for several seconds and open the store again; return their physical offsets."""
    start = world.now_ms
    places = {f"b{n}".encode(): world.send(start + 700 * n, f"b{n}".encode()) for n in range(30)}
    text = "TIMER_DELAY_MS\x012500\x02UNIQ_KEY\x01RMQ\x02REAL_TOPIC\x01orders\x02REAL_QID\x013"
    world.put(text + f"\x02TIMER_OUT_MS\x01{start + 2500}", b"theirs")
    world.run()
    world.checkpoint()
    world.open()
    return places


def live(world: TimerWorld, places: dict[bytes, int]) -> tuple[set[bytes], set[bytes]]:
    """Cancel some messages, and let time pass; return the bodies that must be delivered, and those that must not."""
    start = world.now_ms
    gone = {b"b7", b"b12", b"b25"}
    for body in gone:
        assert again(cancelled(world, places[body])) in (Cancelled.CANCELLED, Cancelled.CANCELLED_BEFORE)
    world.pass_time(1000)
    deleting = {
        properties.TIMER_DEL_UNIQKEY: "orders+K16",
        properties.TIMER_OUT_MS: str(start + 10_499),
        properties.REAL_TOPIC: "orders",
    }
    world.put(properties.format_properties(deleting) + f"\x02TIMER_DELIVER_MS\x01{start + 10_500}")
    world.checkpoint_or_not()
    world.pass_time(40_000)
    return {*places, b"theirs"} - gone - {b"b15"}, gone | {b"b15"}


@pytest.mark.parametrize("path", READS)
@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.parametrize("every", EACH_RUN_AND_SOAK)
def test_any_read_may_fail(path: str, count: int, every: int) -> None:
    for first in itertools.count(step=every):
        world = TimerWorld(TimerConfig(log_segment_size=520, roll_window=7), start_ms=NEAR_THE_HOUR_MS)
        places = prepared(world)
        with FailingReads(world, path, first, count) as reads:
            come, gone = live(world, places)
        counts = Counter(world.bodies())
        assert counts == Counter(come), first
        assert not gone & set(counts)
        assert world.state().pending == 0
        if reads.is_over:
            assert first >= READS[path], "a life in which nothing is read"
            return


def test_a_second_is_not_passed_before_it_is_loaded() -> None:
    """A second is not passed before it is loaded: the read of its units fails while the time of several seconds
    comes."""
    world = TimerWorld()
    for at in range(0, 5000, 100):
        world.send(START_MS + 20_000 + at)
    world.run()
    world.checkpoint()
    world.open()
    world.files.fail("read", errno.EIO, "/s/timerlog")
    world.pass_time(23_000)
    assert world.bodies() == []
    world.files.heal()
    world.pass_time(3000)
    assert world.bodies() == [f"m{n + 1}".encode() for n in range(50)]


def test_records_that_cannot_be_read_are_not_lost_but_wait() -> None:
    world = TimerWorld()
    for at in range(10):
        world.send(START_MS + 500 + at)
    world.run()
    world.files.fail("read", errno.EIO, "/s/commitlog")
    world.pass_time(3000)
    assert world.bodies() == []
    assert world.timers.lost == 0
    world.files.heal()
    world.pass_time(200)
    assert len(world.bodies()) == 10


def test_what_cannot_be_read_ahead_does_not_hold_up_what_is_due() -> None:
    world = TimerWorld()
    world.send(START_MS + 15_000)
    world.run()
    world.pass_time(4990)
    world.files.fail("read", errno.EIO, "/s/timerlog")
    due = world.now_ms + 900
    world.send(due)
    world.pass_time(900)
    assert world.lateness() == [0]
    world.files.heal()
    world.pass_time(15_000)
    assert world.lateness() == [0, 0]


def test_the_same_trouble_is_told_once() -> None:
    world = TimerWorld()
    world.send(START_MS + 500)
    world.run()
    world.files.fail("read", errno.EIO, "/s/commitlog")
    with capture_logs() as logs:
        world.pass_time(2000)
    assert [line["event"] for line in logs].count("timer_delivery_refused") == 1


def test_the_newest_of_each_key_are_found_over_reads_that_fail() -> None:
    """The newest message of each key is found over failing reads: the search goes on where it was, and looks at each
    record once."""
    for first in range(0, 40, 2):
        world = TimerWorld(TimerConfig(log_segment_size=5200))
        for n in range(60):
            world.send(START_MS + 1000 + n, text=f"KEYS\x01k{n % 20}\x02")
        world.run()
        world.checkpoint()
        world.clock.advance(60_000)
        world.open()
        world.timers.set_policy("orders", TimerPolicy(newest=True))
        with FailingReads(world, "/s/commitlog", first, 2), capture_logs() as logs:
            world.pass_time(30_000)
        looked = [line["messages"] for line in logs if line["event"] == "overdue_messages_looked_at"]
        assert looked == [60], first
        assert sorted(world.bodies()) == sorted(f"m{n + 1}".encode() for n in range(40, 60)), first


# --- reads outside memory


class ColdWorld(TimerWorld):
    """As in the broker: a step that may not wait for the disk is tried again after a thread has read."""

    may_wait = True

    def _tried(self, look: Callable[[], T]) -> T:
        for _ in range(1000):
            self.may_wait = False
            try:
                return look()
            except NotInMemory:
                continue
            finally:
                self.may_wait = True
        raise AssertionError("never done")

    def step(self, budget: Budget | None = None) -> int | None:
        return self._tried(lambda: super(ColdWorld, self).step(budget))

    def step_levels(self) -> int | None:
        return self._tried(super().step_levels)

    def keep(self) -> int:
        count = 0
        while (
            was_needed := self._tried(lambda: self.timers.keep_next(self.store.log.end, look(self.clock)))
        ) is not None:
            count += was_needed
        return count

    def _outcome(self, change: Callable[[], Cancelled | None]) -> Cancelled:
        return super()._outcome(lambda: self._tried(change))


class NothingInMemory(FailingReads):
    """Makes one read of a step or a change, given by its number, need a thread first."""

    def __init__(self, world: ColdWorld, number: int) -> None:
        super().__init__(world, "/s", number, 1)
        self._world = world

    def check(self, call: Call, path: str) -> None:
        if call == "read" and not self._world.may_wait:
            self.reads += 1
            if self.reads - 1 in self._failing:
                raise NotInMemory(path, self.reads, lambda: None)
        self._check(call, path)


HOUR_MS = 3_600_000


def catch_up(world: ColdWorld) -> None:
    """Apply policies to overdue messages: drop them, spread them over hours, or pause them and drop some when they come
    back."""
    for n in range(5):
        for topic in ("dropped", "spread", "paused"):
            world.send(START_MS + 1000 + 12_000 * n, f"{topic}{n}".encode(), topic=topic)
    world.run()
    world.checkpoint()
    world.clock.advance(60_000)
    world.open()
    world.timers.set_policy("dropped", TimerPolicy(drop_after_ms=30_000))
    world.timers.set_policy("spread", TimerPolicy(drop_after_ms=40_000, spread_ms=20 * HOUR_MS))
    world.timers.set_policy("paused", TimerPolicy(is_paused=True))
    world.pass_time(2000)
    world.checkpoint()
    world.timers.set_policy("paused", TimerPolicy(drop_after_ms=35_000, spread_ms=9 * HOUR_MS))
    world.pass_time(21 * HOUR_MS)


def changes(world: ColdWorld) -> None:
    """Cancel, reschedule and append messages once more, of the wheel and of levels."""
    places = [world.send(START_MS + HOUR_MS * (n + 1), f"b{n}".encode()) for n in range(5)]
    levels = [world.schedule(1, f"l{n}".encode()) for n in range(5)]
    world.run()
    world.checkpoint()
    world.open()
    assert world.cancel(places[1]) is Cancelled.CANCELLED
    assert world.cancel(levels[1]) is Cancelled.CANCELLED
    for place in (places[2], levels[2]):
        assert world.reschedule(place, START_MS + 30 * HOUR_MS)[0] is Cancelled.CANCELLED
    assert world.reschedule(places[2], START_MS + 40 * HOUR_MS)[0] is Cancelled.CANCELLED
    world.keep()
    assert world.reschedule(places[3], START_MS + 50 * HOUR_MS)[0] is Cancelled.CANCELLED
    assert world.cancel(levels[3]) is Cancelled.CANCELLED
    world.pass_time(60 * HOUR_MS)


def recovered(world: ColdWorld) -> None:
    """Kill the broker behind a checkpoint: messages that were rescheduled and then delivered are put into the wheel
    again, together with messages that wait for other hours."""
    places = [world.send(START_MS + HOUR_MS * (n + 30), f"b{n}".encode()) for n in range(4)]
    world.run()
    world.checkpoint()
    for place in places[:2]:
        assert world.reschedule(place, world.now_ms)[0] is Cancelled.CANCELLED
    for n in range(3):
        world.send(START_MS + HOUR_MS * (n + 60), f"c{n}".encode())
    world.run()
    world.open()
    world.pass_time(80 * HOUR_MS)


@pytest.mark.parametrize("life", [catch_up, changes, recovered])
@pytest.mark.parametrize("every", EACH_RUN_AND_SOAK)
def test_what_is_tried_again_is_not_done_twice(life: Callable[[ColdWorld], None], every: int) -> None:
    """A step that is tried again is not done twice: whichever read has to be made by a thread first, the commitlog and
    the timer log end at the same place."""
    ends = set()
    for number in itertools.chain((-1,), itertools.count(step=every)):
        world = ColdWorld(TimerConfig(log_segment_size=5200), levels="2h")
        with NothingInMemory(world, number) as reads:
            life(world)
        slots = world.timers._slots
        ends.add((world.store.log.end, slots.log.end))
        assert len(ends) == 1, (number, ends)
        assert world.state().pending == 0
        if number >= 0 and reads.is_over:
            assert number > 20, "a life in which nothing is read"
            return


def test_one_second_is_handed_on_whatever_has_to_be_read_first(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = set()
    for number in itertools.count(-1):
        with monkeypatch.context() as patch:
            world = ColdWorld()
            world.send(START_MS + 500)
            world.pass_time(100)
            world.clock.set_wall(START_MS - 24 * HOUR_MS)
            for n in range(4):
                world.send(START_MS + HOUR_MS + n)
            world.run()
            world.checkpoint()
            patch.setattr("duemq.scheduler.timers.checkpoint._MAX_SINCE_BYTES", 100)
            patch.setattr("duemq.scheduler.timers.checkpoint._MAX_TURN_SECONDS", -1)
            before = world.timers._slots.turns.second
            with NothingInMemory(world, number) as reads:
                world.timers.begin_write()
                while world._tried(lambda world=world: world.timers.write_next(look(world.clock))):  # type: ignore[misc]
                    pass
            seconds.add(world.timers._slots.turns.second - before)
        assert seconds == {1}, number
        if number >= 0 and reads.is_over:
            assert number > 0, "nothing is read"
            return
