"""Goal: the store opens on any files that a power cut may leave, and keeps its promises.

Method: a scenario runs on a file layer in memory that records every write and sync. At every sync boundary (just before
and just after it) the test builds the disks that a cut there could leave; each is opened, checked, written to, closed
and opened again. The promises: nothing acknowledged under SYNC_FLUSH (an answer goes out when a flush job that began
after the message was written has run) is missing or changed; the consume queues say what the commitlog says; no
scheduled message is lost or delivered twice, whatever the state of delayOffset.json; nothing raises.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import pytest

from duemq.broker.produce.message import ByLevel
from duemq.scheduler.levels.delivery import DeliveryConfig
from duemq.scheduler.levels.service import LevelQueues
from duemq.scheduler.levels.table import DelayLevels
from duemq.storage.budget import UNLIMITED, Pieces
from duemq.storage.clock import ManualClock, look
from duemq.storage.current import Current
from duemq.storage.log.copies import origin_of
from duemq.storage.store import MessageStore, StoreConfig
from tests.crash.simulated_files import SimulatedFiles, Sync, SyncDirectory
from tests.support.messages import HOST
from tests.support.store import Assembly
from tests.support.store_problems import problems

pytestmark = pytest.mark.crash

ROOT = "/store"
CONFIG = StoreConfig(
    ROOT,
    commitlog_segment_size=8192,
    queue_segment_size=20 * 16,
    extension_segment_size=1024,
    max_message_size=4096,
)
EXTENSIONS = f"{ROOT}/consumequeue_ext"
LEVELS = DelayLevels("1s 5s")


@dataclass
class World:
    """A store on simulated files, and the messages that were acknowledged."""

    files: SimulatedFiles
    clock: ManualClock
    chance: random.Random
    delivery: DeliveryConfig
    acknowledged: list[tuple[int, int, bytes]] = field(default_factory=list)
    """Number of the operation after which a message was acknowledged, its physical offset, its body."""

    def open(self) -> None:
        """Open, also after a kill -9; sometimes after a start that failed once the store was open."""
        self.files.after_kill()
        if self.chance.random() < 0.3:
            opened(self.files, self.clock, self.delivery).abandon()
        found = opened(self.files, self.clock, self.delivery)
        self.store, self.levels, self.sender, self.owned = found.store, found.levels, found.sender, found.owned
        self.unacknowledged: list[tuple[int, bytes]] = []

    def send(self, count: int) -> None:
        """Send a batch, some of it delayed."""
        for _ in range(count):
            body = self.chance.randbytes(self.chance.choice((0, 1, 30, 200, 900)))
            if self.chance.random() < 0.3:
                due = ByLevel(self.chance.choice((1, 2)))
                offset = self.sender.stage(body, due, "TAGS\x01d", "later", 0)
            else:
                topic, queue_id = self.chance.choice(("a", "b")), self.chance.randrange(2)
                offset = self.sender.stage(body, None, "TAGS\x01plain", topic, queue_id)
            self.unacknowledged.append((offset, body))
        self.store.appender.commit()

    def flush(self) -> None:
        waiting, self.unacknowledged = self.unacknowledged, []
        assert self.owned.flush(Pieces(1))
        when = len(self.files.operations)
        self.acknowledged += [(when, offset, body) for offset, body in waiting]

    def checkpoint(self) -> None:
        for _ in self.owned.writing():
            if self.chance.random() < 0.3:
                self.send(1)
        if self.chance.random() < 0.5:
            self.send(1)
        self.owned.sync()

    def work(self) -> None:
        """Do a bit of the owner's own work: a step, which may begin a due checkpoint, or one job."""
        if self.chance.random() < 0.5:
            self.owned.step(Pieces(1))
        else:
            self.owned.workers.run_one()

    def deliver(self) -> None:
        """Take a step of the levels, sometimes after one in which the store refuses writes: with the async path, later
        messages may then be delivered before earlier ones."""
        if self.chance.random() < 0.3:
            self.store.health.fill("full")
            self.levels.step(look(self.clock), UNLIMITED)
            self.store.health.has_room()
        self.levels.step(look(self.clock), UNLIMITED)

    def close(self) -> None:
        self.flush()
        self.owned.stop()

    def tamper(self) -> None:
        """Remove the file of the levels' progress, or replace it with an old one."""
        path = f"{ROOT}/config/delayOffset.json"
        if self.chance.random() < 0.5:
            self.files.remove(path)
            self.files.remove(f"{path}.bak")
        else:
            self.files.make_directories(f"{ROOT}/config")
            self.files.write_whole(path, b'{"offsetTable":{"1":0,"2":0}}')


def opened(files: SimulatedFiles, clock: ManualClock, delivery: DeliveryConfig | None = None) -> Assembly:
    config = replace(CONFIG, is_extended=files.exists(EXTENSIONS))
    return Assembly(files, config, clock, table=LEVELS, delivery=Current(delivery or DeliveryConfig()))


def run_scenario(seed: int, steps: int) -> World:
    """Run the life of a store, with clean restarts and crashes that lose nothing (kill -9)."""
    chance = random.Random(seed)
    delivery = DeliveryConfig(
        is_async=seed % 2 == 1, batch_size=chance.choice((1, 2, 512)), save_interval=chance.choice((0.0, 3.0))
    )
    world = World(SimulatedFiles(), ManualClock(), chance, delivery)
    if seed % 3 == 0:  # with enableConsumeQueueExt
        world.files.make_directories(EXTENSIONS, durable=True)
    world.open()
    for _ in range(steps):
        action = chance.random()
        if action < 0.45:
            world.send(chance.randrange(1, 6))
        elif action < 0.7:
            world.flush()
        elif action < 0.8:
            world.checkpoint()
        elif action < 0.9:
            world.clock.advance(chance.choice((100, 1000, 6000)))
            world.deliver()
        elif action < 0.94:
            world.work()
        elif action < 0.97:
            world.close()
            if chance.random() < 0.5:
                world.tamper()
            world.open()
        else:
            if chance.random() < 0.5:
                world.tamper()
            world.open()
    return world


def check_image(image: SimulatedFiles, world: World, when: int) -> None:
    """Open the files left by a crash, and check the promises."""
    clock = ManualClock(world.clock.now_ms())
    found = opened(image, clock)
    store, levels = found.store, found.levels
    assert list(problems(store)) == []
    for acknowledged_at, offset, body in world.acknowledged:
        if acknowledged_at <= when:
            message = store.message_at(offset)
            assert message is not None, f"the message at {offset} is gone"
            assert message.body == body
    check_schedules(store, levels)
    clock.advance(10_000)
    while (due := levels.step(look(clock), UNLIMITED)) is not None and due <= clock.now_ms():
        pass
    check_each_once(store, levels)
    appender = store.appender
    appender.begin(clock.now_ms())
    appender.add(store.ensure_queue("a", 0), b"after", b"", 0, 1, HOST)
    appender.commit()
    assert list(problems(store)) == []
    image.after_kill()
    again = opened(image, clock)
    assert again.levels.step(look(clock), UNLIMITED) is None
    assert list(problems(again.store)) == []
    assert again.store.log.end == store.log.end


def origins(store: MessageStore) -> list[int]:
    """Return the records named by deliveries, one for each delivery."""
    queue = store.queue("later", 0)
    found = []
    for offset in range(queue.min_offset, queue.next_offset) if queue is not None else ():
        unit = queue.unit(offset) if queue is not None else None
        assert unit is not None
        message = store.message_at(unit[0], unit[1])
        assert message is not None
        origin = origin_of(message.prepared_transaction_offset)
        assert origin is not None
        found.append(origin)
    return found


def check_each_once(store: MessageStore, levels: LevelQueues) -> None:
    """Check that all scheduled messages are due and delivered, each by one record."""
    scheduled = []
    for level in levels.levels.values():
        for offset in range(level.queue.min_offset, level.queue.next_offset):
            unit = level.queue.unit(offset)
            assert unit is not None
            scheduled.append(unit[0])
    assert sorted(origins(store)) == sorted(scheduled)


def check_schedules(store: MessageStore, levels: LevelQueues) -> None:
    """Check that every scheduled message before a level's progress is in its topic."""
    delivered = set(origins(store))
    for level in levels.levels.values():
        for offset in range(level.queue.min_offset, level.offset):
            unit = level.queue.unit(offset)
            assert unit is not None
            assert unit[0] in delivered, f"level {level.number} lost its message {offset}"


def boundaries(world: World) -> list[int]:
    """Return the moments just before and just after each sync."""
    found = [
        when
        for number, operation in enumerate(world.files.operations)
        if isinstance(operation, Sync | SyncDirectory)
        for when in (number, number + 1)
    ]
    return sorted(set(found))


# All moments of all seeds take half an hour. Each run takes 24 of each of six lives: with and without an extension,
# with both paths of delivery.
ALL_MOMENTS = [pytest.param(seed, None, marks=pytest.mark.soak) for seed in range(40)]


@pytest.mark.parametrize(("seed", "most"), [*((seed, 24) for seed in range(4)), *ALL_MOMENTS])
def test_any_image_a_crash_leaves_opens_and_keeps_what_was_acknowledged(seed: int, most: int | None) -> None:
    world = run_scenario(seed, 60)
    chance = random.Random(seed)
    moments = boundaries(world)
    for when in moments if most is None else chance.sample(moments, min(most, len(moments))):
        for style in ("nothing", "everything", "some", "some"):
            image = world.files.after_crash(when, chance, style)
            try:
                check_image(image, world, when)
            except BaseException as error:
                error.add_note(f"seed {seed}, before operation {when}, {style}")
                raise


@pytest.mark.parametrize(
    ("seed", "most"),
    [
        *((seed, 6) for seed in range(100, 104)),
        *(pytest.param(seed, 24, marks=pytest.mark.soak) for seed in range(100, 112)),
    ],
)
def test_a_crash_while_the_store_recovers_from_one_changes_nothing(seed: int, most: int) -> None:
    world = run_scenario(seed, 60)
    chance = random.Random(seed)
    for when in chance.sample(boundaries(world), most):
        first = world.files.after_crash(when, chance, chance.choice(("everything", "some")))
        first.remember()
        begun = len(first.operations)
        check_image(first, world, when)
        moments = range(begun, len(first.operations) + 1)
        for again in chance.sample(moments, min(len(moments), 6)):
            image = first.after_crash(again, chance, chance.choice(("nothing", "everything", "some")))
            try:
                check_image(image, world, when)
            except BaseException as error:
                error.add_note(f"seed {seed}, before operation {when}, and again before {again} of {begun} and more")
                raise
