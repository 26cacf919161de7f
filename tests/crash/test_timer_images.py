"""A store with timers opens after any power cut, and each acknowledged message is delivered once.

As test_crash_images, for the timer wheel: the life of a store on simulated files, with sends, flushes, checkpoints,
passing time, cancels and restarts; then the disks that power cuts at many moments of it may leave.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

from duemq.broker.produce.message import ByTimer
from duemq.scheduler.timers.config import Cancelled, TimerConfig
from duemq.scheduler.timers.index.keys import key_hash
from duemq.scheduler.timers.policy.policies import TimerPolicy
from duemq.storage.budget import UNLIMITED, Pieces
from duemq.storage.clock import ManualClock, look
from duemq.storage.current import Current
from duemq.storage.log.copies import origin_of
from duemq.storage.store import StoreConfig
from tests.crash.simulated_files import SimulatedFiles, Sync
from tests.support.messages import with_time
from tests.support.store import Assembly

pytestmark = pytest.mark.crash

CONFIG = StoreConfig("/s", commitlog_segment_size=1 << 16, queue_segment_size=2000)
TIMERS = TimerConfig(log_segment_size=52 * 30, roll_window=40)
PAUSING = TimerConfig(log_segment_size=52 * 30, roll_window=172_800)
DELAYS = (-50, 0, 1, 500, 1000, 1500, 3000, 12_000, 41_000, 130_000)
EVERY_MS = 17_000
"""The time between two deliveries of a recurring message, in ms."""
STYLES = ("nothing", "some", "everything")


@dataclass
class World:
    """A store on simulated files, and the messages that were acknowledged."""

    files: SimulatedFiles
    clock: ManualClock
    chance: random.Random
    config: TimerConfig
    policy: TimerPolicy | None = None
    """The policy of the only topic, as its attributes give it."""
    sent: dict[bytes, int] = field(default_factory=dict)
    """Physical offsets by body."""
    acknowledged: list[tuple[int, bytes]] = field(default_factory=list)
    """Number of the operation after which a message was acknowledged, and its body."""
    cancelled: list[tuple[int, bytes]] = field(default_factory=list)
    """Number of the operation after which a cancel was acknowledged, and the message's body."""
    maybe_cancelled: set[bytes] = field(default_factory=set)
    newest: dict[str, bytes] = field(default_factory=dict)
    """The last message of each key."""
    replaced: dict[bytes, bytes] = field(default_factory=dict)
    """Replacements by the body of the replaced message."""
    recurring: dict[bytes, int] = field(default_factory=dict)
    """Recurring messages: the time of the first delivery, ms since the epoch, by body."""

    def open(self) -> None:
        """Open, also after a kill -9; sometimes after a start that failed once the timers had opened their files."""
        for fails in (self.chance.random() < 0.3, False):
            self.files.after_kill()
            opened = Assembly(self.files, CONFIG, self.clock, timers=Current(self.config))
            opened.timers.set_policy("orders", self.policy)
            if fails:
                opened.abandon()
        self.store, self.timers, self.sender, self.owned = opened.store, opened.timers, opened.sender, opened.owned
        self.unacknowledged: list[bytes] = []
        self.uncancelled: list[bytes] = []

    def send(self, count: int) -> None:
        for _ in range(count):
            body = f"m{len(self.sent)}".encode()
            due = self.clock.now_ms() + self.chance.choice(DELAYS)
            text = with_time(f"UNIQ_KEY\x01{body.decode()}", due)
            self.sent[body] = self.sender.stage(body, ByTimer(due), text, "orders", 0)
            self.unacknowledged.append(body)
        self.store.appender.commit()

    def recur(self) -> None:
        """Send a message that recurs, to a topic of its own."""
        name = f"r{len(self.recurring)}"
        due = self.clock.now_ms() + EVERY_MS
        text = f"UNIQ_KEY\x01{name}\x02KEYS\x01{name}\x02TIMER_REPLACE\x01true\x02TIMER_EVERY\x01{EVERY_MS}ms"
        text = with_time(f"{text}\x02TIMER_START\x01{due}", due)
        self.sender.stage(name.encode(), ByTimer(due, key=key_hash(name), recurs=True), text, "beats", 0)
        self.recurring[name.encode()] = due
        self.unacknowledged.append(name.encode())
        self.store.appender.commit()

    def replace(self) -> None:
        """Send a message that replaces the last one with its key, if that still waits."""
        key = self.chance.choice("xy")
        self.replace_last(key, self.clock.now_ms() + max(0, self.chance.choice(DELAYS)))

    def replace_last(self, key: str, due: int) -> None:
        body = f"m{len(self.sent)}".encode()
        self.timers.count()
        while not self.timers.is_counted:
            self.some()
        delivered = set(self.delivered())
        _, self.sent[body] = self.sender.replace(due, key, body.decode(), body, "orders", 0)
        self.unacknowledged.append(body)
        before = self.newest.get(key)
        if before is not None and before not in delivered and before not in self.maybe_cancelled:
            self.uncancelled.append(before)
            self.maybe_cancelled.add(before)
            self.replaced[before] = body
        self.newest[key] = body

    def cancel(self) -> None:
        body = self.chance.choice(list(self.sent)) if self.sent else b""
        if body and self.timers.changes.cancel(self.sent[body], self.clock.now_ms()) is Cancelled.CANCELLED:
            self.uncancelled.append(body)
            self.maybe_cancelled.add(body)

    def flush(self) -> None:
        sent, self.unacknowledged = self.unacknowledged, []
        cancelled, self.uncancelled = self.uncancelled, []
        assert self.owned.flush(Pieces(1))
        when = len(self.files.operations)
        self.acknowledged += [(when, body) for body in sent]
        self.cancelled += [(when, body) for body in cancelled]

    def checkpoint(self) -> None:
        for _ in self.owned.writing():
            if self.chance.random() < 0.1:
                self.send(1)
                self.some()
        if self.chance.random() < 0.5:
            self.send(1)
            self.some()
        self.owned.sync()

    def work(self) -> None:
        """Do a bit of the owner's own work: a step, which may begin a due checkpoint or remove old files of the timer
        log, or one job."""
        if self.chance.random() < 0.5:
            self.owned.step(Pieces(1))
        else:
            self.owned.workers.run_one()

    def change_policy(self) -> None:
        """Pause the topic or resume it; most changes leave it as it is."""
        choices = TimerPolicy(is_paused=True), TimerPolicy(is_paused=True), None, None, None, TimerPolicy(rate=3)
        self.policy = self.chance.choice(choices)
        self.timers.set_policy("orders", self.policy)

    def some(self) -> int | None:
        """Take a step of the timers."""
        return self.timers.step(look(self.clock), UNLIMITED)

    def step(self) -> None:
        while (due := self.timers.step(look(self.clock), Pieces(3))) is not None and due <= self.clock.now_ms():
            if self.chance.random() < 0.2:
                break

    def close(self) -> None:
        self.flush()
        while self.timers.hand_over_next(self.clock.now_ms()):
            pass
        self.owned.stop()
        self.timers.close()

    def deliver_all(self) -> None:
        end = self.clock.now_ms() + 200_000
        while (due := self.some()) is not None and due <= end:
            self.clock.advance(max(0, due - self.clock.now_ms()))

    def delivered(self) -> list[bytes]:
        return [body for body, _ in self.deliveries("orders")]

    def deliveries(self, topic: str) -> list[tuple[bytes, int]]:
        """Return the bodies and deliver times of the messages in a topic's queue."""
        queue = self.store.queue(topic, 0)
        if queue is None:
            return []
        units = [queue.unit(offset) for offset in range(queue.min_offset, queue.next_offset)]
        messages = [self.store.message_at(unit[0], unit[1]) for unit in units if unit is not None]
        found = []
        for message in messages:
            assert message is not None
            due = message.get_property("TIMER_DELIVER_MS")
            assert due is not None
            assert message.store_timestamp >= int(due)
            assert origin_of(message.prepared_transaction_offset) is not None
            found.append((message.body, int(due)))
        return found


def run_scenario(seed: int, steps: int, *, has_pauses: bool = False) -> World:
    chance = random.Random(seed)
    config = PAUSING if has_pauses else TIMERS
    world = World(SimulatedFiles(), ManualClock(), chance, config)
    world.open()
    for _ in range(steps):
        if has_pauses and chance.random() < 0.2:
            world.change_policy()
        action = chance.random()
        if len(world.recurring) < 2 and chance.random() < 0.1:
            world.recur()
        elif action < 0.3:
            world.send(chance.randrange(1, 6))
        elif action < 0.5:
            world.flush()
        elif action < 0.6:
            world.checkpoint()
        elif action < 0.64:
            world.work()
        elif action < 0.82:
            world.clock.advance(chance.choice((1, 100, 1000, 6000, 45_000)))
            world.step()
        elif action < 0.87:
            world.cancel()
        elif action < 0.92:
            world.replace()
        elif action < 0.95:
            world.close()
            world.open()
        else:
            world.open()
    return world


def check_image(image: SimulatedFiles, world: World, when: int, end_ms: int) -> None:
    """Open the files left by a crash, deliver everything, and compare with the messages acknowledged before the
    crash."""
    after = World(image, ManualClock(end_ms), random.Random(when), world.config)
    after.open()
    after.deliver_all()
    counts = Counter(after.delivered())
    assert [body for body, count in counts.items() if count > 1] == []
    acknowledged = {body for at, body in world.acknowledged if at <= when}
    cancelled = {body for at, body in world.cancelled if at <= when}
    assert acknowledged - world.recurring.keys() - world.maybe_cancelled - set(counts) == set()
    assert cancelled & set(counts) == set()
    check_recurring(after, world, acknowledged, end_ms)
    acknowledged |= cancelled
    for old, new in world.replaced.items():
        assert not {old, new} <= set(counts), "a message and the one that took its place"
        if old in acknowledged and new not in world.maybe_cancelled:
            assert {old, new} & set(counts), "neither a message nor the one that took its place"


def check_recurring(after: World, world: World, acknowledged: set[bytes], end_ms: int) -> None:
    """Compare the deliveries of recurring messages: each one once, none left out, until long after the crash."""
    deliveries = after.deliveries("beats")
    for body, first_ms in world.recurring.items():
        times = [due for each, due in deliveries if each == body]
        assert times == list(range(first_ms, first_ms + len(times) * EVERY_MS, EVERY_MS))
        if times or body in acknowledged:
            assert times[-1] > end_ms + 100_000


@pytest.mark.parametrize("has_pauses", [False, True], ids=["", "pauses"])
@pytest.mark.parametrize(
    ("seed", "most"),
    [*((seed, 2) for seed in range(2)), *(pytest.param(seed, 4, marks=pytest.mark.soak) for seed in range(10))],
)
def test_any_image_a_power_cut_leaves_delivers_each_message_once(seed: int, most: int, has_pauses: bool) -> None:
    world = run_scenario(seed, 60, has_pauses=has_pauses)
    operations = world.files.operations
    syncs = [number for number, operation in enumerate(operations) if isinstance(operation, Sync)]
    chance = random.Random(seed)
    moments = {
        len(operations),
        *chance.sample(syncs, min(most, len(syncs))),
        *chance.sample(range(len(operations)), most),
    }
    end_ms = world.clock.now_ms()
    for when in sorted(moments):
        for style in STYLES:
            check_image(world.files.after_crash(when, chance, style), world, when, end_ms)


def _change(world: World, how: str, body: bytes) -> None:
    now_ms = world.clock.now_ms()
    if how == "cancel":
        assert world.timers.changes.cancel(world.sent[body], now_ms) is Cancelled.CANCELLED
    elif how == "reschedule":
        result = world.timers.changes.reschedule(world.sent[body], now_ms + 30_000, now_ms)
        assert result is Cancelled.CANCELLED
    elif how == "keep":
        kept = []
        while (was_needed := world.timers.keep_next(world.store.log.end, look(world.clock))) is not None:
            kept.append(was_needed)
        assert any(kept)
    else:
        world.replace_last("x", now_ms + 30_000)


@pytest.mark.parametrize("how", ["cancel", "reschedule", "keep", "replace"])
def test_a_power_cut_leaves_a_message_or_what_took_its_place(how: str) -> None:
    """After a power cut either the replaced message or its replacement is delivered. The disk may have the last write
    and lack an earlier one, so the mark of a replaced message has to wait until its replacement's record is durable."""
    world = World(SimulatedFiles(), ManualClock(), random.Random(1), TIMERS)
    world.open()
    world.replace_last("x", world.clock.now_ms() + 20_000)
    (body,) = world.sent
    world.step()
    world.flush()
    for _ in range(3):
        world.owned.checkpoint()
    _change(world, how, body)
    world.step()
    before = len(world.files.operations)
    for durable in (False, True):
        if durable:
            world.owned.checkpoint()
        for seed in range(15):
            image = world.files.after_crash(len(world.files.operations), random.Random(seed), "some")
            after = World(image, ManualClock(world.clock.now_ms()), random.Random(1), TIMERS)
            after.open()
            after.deliver_all()
            delivered = after.delivered()
            assert len(delivered) == 1 or how == "cancel", "neither, or both"
            if durable:
                assert delivered == ([] if how == "cancel" else [list(world.sent)[-1]])
    assert len(world.files.operations) > before
