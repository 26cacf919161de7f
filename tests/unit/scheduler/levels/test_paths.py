"""The sync and the async delivery path: awaited results, failing puts, order, limits."""

from __future__ import annotations

import contextlib
import errno
import itertools
from collections.abc import Callable
from typing import Any

import pytest
from structlog.testing import capture_logs

from duemq.protocol.topics import SCHEDULE_TOPIC
from duemq.scheduler.levels.delivery import DeliveryConfig
from duemq.scheduler.levels.level import MAX_RESENDS, Level, PutStatus
from duemq.storage.errors import NotInMemory
from tests.unit.scheduler.world import World


def sync_world(batch_size: int = 2) -> World:
    return World(delivery=DeliveryConfig(batch_size=batch_size), sync_flush=True)


def async_world(batch_size: int = 1, **settings: int) -> World:
    return World(delivery=DeliveryConfig(is_async=True, batch_size=batch_size, **settings), sync_flush=True)


def fill(world: World, count: int) -> Level:
    """Schedule messages of level 1, and let them become due."""
    for number in range(count):
        world.schedule(1, b"%d" % number)
    world.clock.advance(1000)
    return world.levels.levels[1]


def lose_record(world: World, offset: int) -> None:
    """Damage the record of a message of level 1 on the disk."""
    unit = world.store.ensure_queue(SCHEDULE_TOPIC, 0).unit(offset)
    assert unit is not None
    world.files.names[f"/s/commitlog/{0:020}"].data[unit[0] + 4] ^= 0xFF


def test_the_sync_path_awaits_each_batch() -> None:
    world = sync_world()
    level = fill(world, 5)
    assert world.run() is None, "it waits for a result"
    assert world.bodies() == [b"0", b"1"]
    assert (level.offset, level.waiting) == (0, 3)
    world.flush()
    assert level.offset == 2
    assert world.wakes
    world.run()
    assert world.bodies() == [b"0", b"1", b"2", b"3"]
    world.flush()
    world.run()
    world.flush()
    assert (level.offset, len(world.bodies())) == (5, 5)


def test_the_async_path_goes_on_up_to_the_pending_limit() -> None:
    world = async_world(pending_limit=3)
    level = fill(world, 5)
    world.run()
    assert world.bodies() == [b"0", b"1", b"2"]
    assert [put.status for put in level.puts] == [PutStatus.RUNNING] * 3
    assert (level.offset, level.pending) == (0, 3)
    assert world.levels.levels[1].trouble == "flow control: scheduleAsyncDeliverMaxPendingLimit"
    world.flush()
    assert level.offset == 3
    world.run()
    world.flush()
    assert (level.offset, len(world.bodies())) == (5, 5)


def test_a_batch_never_exceeds_the_pending_limit() -> None:
    world = async_world(batch_size=4, pending_limit=6)
    level = fill(world, 20)
    world.run()
    assert (len(world.bodies()), level.pending) == (6, 6)


def test_progress_never_passes_an_unfinished_put() -> None:
    world = async_world()
    level = fill(world, 4)
    lose_record(world, 0)
    lose_record(world, 2)
    world.run()
    world.flush()
    expected = [PutStatus.EXCEPTION, PutStatus.SUCCESS, PutStatus.EXCEPTION, PutStatus.SUCCESS]
    assert [put.status for put in level.puts] == expected
    assert level.offset == 0
    level.fail(level.puts[0], world.clock.now_ms(), origin_is_gone=True)
    level.puts[0].status = PutStatus.SKIP
    level.failed.pop(level.puts[0])
    level.drop_finished()
    assert (level.offset, len(level.puts)) == (2, 2)


def test_what_failed_is_sent_again_later_and_later() -> None:
    world = async_world(max_resends=100)
    fill(world, 1)
    world.store.health.fill("full")
    waits = []
    for _ in range(700):
        due = world.run()
        assert due is not None
        waits.append(due - world.clock.now_ms())
        world.clock.advance(waits[-1])
    assert waits[:4] == [100, 200, 300, 400]
    assert max(waits) == 60_000
    world.store.health.has_room()
    world.run()
    world.flush()
    assert world.bodies() == [b"0"]
    assert world.levels.levels[1].offset == 1


def test_a_level_with_a_missing_record_is_held_back_after_some_tries() -> None:
    world = async_world(max_resends=3)
    level = fill(world, 1)
    lose_record(world, 0)
    world.run()
    for number in range(1, 5):
        assert level.is_held_back(3) == (number > 3)
        world.schedule(1, b"%d" % number)
        world.clock.advance(1000)
        world.run()
        world.flush()
    assert world.bodies() == [b"1", b"2"]
    for _ in range(3):
        world.clock.advance(1000)
        world.run()
        world.flush()
    assert world.bodies() == [b"1", b"2", b"3", b"4"]
    assert (level.offset, level.skipped) == (5, 1)


def test_nothing_overtakes_what_the_store_refused() -> None:
    world = async_world(max_resends=3)
    level = fill(world, 1)
    world.store.health.fill("full")
    world.run()
    assert level.is_held_back(3)
    world.store.health.has_room()
    for number in (1, 2):
        world.schedule(1, b"%d" % number)
    world.clock.advance(60_000)
    put = level.puts[0]
    put.retry_ms = world.clock.now_ms() + 500
    world.run()
    assert world.bodies() == [], "nothing overtakes"
    world.clock.advance(500)
    world.run()
    world.flush()
    world.run()
    world.flush()
    assert world.bodies() == [b"0", b"1", b"2"]


def test_what_is_gone_is_skipped_after_six_more_tries() -> None:
    world = async_world()
    level = fill(world, 3)
    lose_record(world, 1)
    with capture_logs() as logs:
        world.run()
        world.flush()
        assert (world.bodies(), level.offset) == ([b"0", b"2"], 1)
        for _ in range(MAX_RESENDS):
            assert level.offset == 1
            world.clock.advance(1000)
            world.run()
    assert (level.offset, level.skipped, level.puts) == (3, 1, type(level.puts)())
    assert [line["event"] for line in logs][-1] == "scheduled_messages_skipped"


def test_what_is_gone_takes_nothing_with_it_that_is_there() -> None:
    """A refused batch with messages whose records are gone delivers the others once there is room."""
    world = async_world(batch_size=10, max_resends=100)
    level = fill(world, 6)
    lose_record(world, 0)
    lose_record(world, 3)
    world.store.health.fill("full")
    world.run()
    world.store.health.has_room()
    for _ in range(40):
        world.clock.advance(1000)
        world.run()
        world.flush()
    assert world.bodies() == [b"1", b"2", b"4", b"5"]
    assert (level.offset, level.skipped) == (6, 2)


def test_the_path_may_change_while_results_are_awaited() -> None:
    world = async_world()
    level = fill(world, 6)
    world.delivery.value.pending_limit = 2
    world.run()
    world.delivery.value.is_async = False
    world.run()
    assert len(world.bodies()) == 2
    for _ in range(6):
        world.flush()
        world.run()
    assert (level.offset, len(world.bodies())) == (6, 6)
    assert world.bodies() == [b"%d" % number for number in range(6)]


@pytest.mark.parametrize("is_async", [False, True])
def test_nothing_is_lost_or_doubled_when_the_store_takes_only_some(is_async: bool) -> None:
    world = World(delivery=DeliveryConfig(is_async=is_async, batch_size=3, max_resends=2), sync_flush=True)
    fill(world, 50)
    for turn in range(400):
        if turn % 3 == 1:
            world.store.health.fill("full")
        world.step()
        world.store.health.has_room()
        if turn % 5 == 0:
            world.flush()
        world.clock.advance(50)
    world.flush()
    assert sorted(world.bodies(), key=int) == [b"%d" % number for number in range(50)]
    assert world.levels.levels[1].offset == 50
    if not is_async:
        assert world.bodies() == [b"%d" % number for number in range(50)]


# --- reads that fail


@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), NotInMemory("a file", 0, lambda: None)])
@pytest.mark.parametrize("failing", range(1, 8))
@pytest.mark.parametrize("is_async", [False, True])
def test_whichever_read_fails_once_everything_is_delivered(
    failing: int, is_async: bool, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any failing read only delays the deliveries. A read that would have to wait for the disk is treated like an
    error: the level looks again, and does not wait for a thread that was never asked."""
    world = World(delivery=DeliveryConfig(is_async=is_async, batch_size=2))
    for number in range(7):
        world.schedule(1, b"%d" % number)
    reading: list[Callable[[], None]] = []
    delivery = world.levels.delivery
    monkeypatch.setattr(delivery, "_read_cold", lambda job, done: reading.append(done))
    world.files.uncached = world.store.log.end
    world.clock.advance(1000)
    read, reads = delivery._batches.read, itertools.count(1)

    def read_some(*arguments: Any) -> Any:
        if next(reads) == failing:
            raise error
        return read(*arguments)

    monkeypatch.setattr(delivery._batches, "read", read_some)
    for _ in range(40):
        with contextlib.suppress(NotInMemory):
            world.step()
        while reading:
            reading.pop()()
        world.clock.advance(100)
    assert world.bodies() == [b"%d" % number for number in range(7)]
