"""Exactly-once delivery over crashes, by the checkpoint's note and the log, whatever the state of delayOffset.json."""

from __future__ import annotations

from array import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from duemq.protocol.topics import SCHEDULE_TOPIC
from duemq.scheduler.levels import runs
from duemq.scheduler.levels.delivery import DeliveryConfig
from duemq.scheduler.levels.runs import Run, Seen
from duemq.scheduler.levels.service import NAME
from duemq.storage.clock import Moment
from duemq.storage.queues.pull import ColdRead
from tests.unit.scheduler.world import World

OFFSETS = st.integers(0, 2**62)
PROGRESS = "/s/config/delayOffset.json"


@pytest.mark.parametrize("checkpoint_after", [None, 0, 3, 5, 8])
@pytest.mark.parametrize("tampering", ["none", "deleted", "old"])
def test_nothing_comes_twice_after_a_kill(checkpoint_after: int | None, tampering: str) -> None:
    world = World()
    for number in range(10):
        world.schedule(1 + number % 2, b"%d" % number)
        if number == 4:
            world.save()
        world.pass_time(700)
        if number == checkpoint_after:
            world.checkpoint()
    before = len(world.bodies())
    assert 0 < before < 10
    if tampering == "deleted":
        world.files.remove(PROGRESS)
        world.files.remove(f"{PROGRESS}.bak")
    elif tampering == "old":
        world.files.write_whole(PROGRESS, b'{"offsetTable":{"1":0,"2":0}}')
    world.open()
    world.pass_time(10_000)
    assert sorted(world.bodies(), key=int) == [b"%d" % number for number in range(10)]
    assert world.twice() == []


def test_rocketmq_that_was_killed_before_it_wrote_the_checkpoint_is_noticed() -> None:
    """The start notices that RocketMQ had the store, although it was killed before it wrote the checkpoint: RocketMQ
    writes that file about once a minute, but its lock at every start."""
    world = World()
    for number in range(4):
        world.schedule(1, b"%d" % number)
    world.stop()
    world.files.write_whole("/s/lock", b"lock")
    world.files.write_whole(PROGRESS, b'{"offsetTable":{1:3}}')
    world.open()
    assert world.levels.levels[1].offset == 3
    assert world.files.read_whole("/s/lock") == b"duemq"
    world.open()
    assert world.levels.levels[1].offset == 3, "still so after a crash before our own checkpoint"


def test_a_table_changed_since_the_last_append_is_in_the_next_checkpoint() -> None:
    world = World()
    world.schedule(3, b"30 s")
    world.checkpoint()
    assert not world.levels.wants_checkpoint
    shorter = world.set_table("1s 5s 2s")
    assert world.levels.wants_checkpoint
    before = world.store.checkpoint
    world.owned.settle()
    assert not world.levels.wants_checkpoint
    assert world.store.checkpoint.recovery_offset == before.recovery_offset
    assert world.store.checkpoint.notes[NAME] != before.notes[NAME]
    world.open(shorter)
    world.pass_time(29_999)
    assert world.bodies() == []
    world.pass_time(1)
    assert world.bodies() == [b"30 s"]


def test_what_was_delivered_out_of_order_is_known_as_well() -> None:
    """Messages delivered out of order, because a record could not be read for a while, are not delivered again after a
    kill."""
    world = World(delivery=DeliveryConfig(is_async=True, batch_size=1, max_resends=50), sync_flush=True)
    for number in range(4):
        world.schedule(1, b"%d" % number)
    unit = world.store.ensure_queue(SCHEDULE_TOPIC, 0).unit(1)
    assert unit is not None
    data = world.files.names[f"/s/commitlog/{0:020}"].data
    data[unit[0] + 4] ^= 0xFF
    world.clock.advance(1000)
    world.run()
    world.flush()
    assert world.bodies() == [b"0", b"2", b"3"]
    level = world.levels.levels[1]
    assert level.appended() == [Run(0, 1), Run(2, 4)]
    world.checkpoint()
    data[unit[0] + 4] ^= 0xFF
    world.open()
    world.run()
    world.flush()
    assert sorted(world.bodies()) == [b"0", b"1", b"2", b"3"]
    assert world.twice() == []
    world.checkpoint()
    world.open()
    assert [Run(run.start, run.cursor, run.shift_ms) for run in world.levels.levels[1].runs][-1].cursor == 4


@pytest.mark.parametrize("checkpoint_first", [True, False])
def test_what_was_delivered_out_of_order_is_not_counted(*, checkpoint_first: bool) -> None:
    """A message that failed when the cursor passed it is counted as waiting; messages delivered ahead of it are not,
    also after a kill."""
    world = World(delivery=DeliveryConfig(is_async=True, batch_size=1, max_resends=50), sync_flush=True)
    for number in range(4):
        world.schedule(1, b"%d" % number)
    unit = world.store.ensure_queue(SCHEDULE_TOPIC, 0).unit(1)
    assert unit is not None
    data = world.files.names[f"/s/commitlog/{0:020}"].data
    data[unit[0] + 4] ^= 0xFF
    world.clock.advance(1000)
    world.run()
    world.flush()
    data[unit[0] + 4] ^= 0xFF

    def counted() -> tuple[int, int]:
        told = [each for each in world.levels.waiting_before(world.store.log.end, world.clock.now_ms()) if each]
        return len(told), sum(
            len(part[2]) for part in world.levels.deliver_times(world.clock.now_ms()) if not isinstance(part, ColdRead)
        )

    assert counted() == (1, 1)
    if checkpoint_first:
        world.checkpoint()
    world.open()
    assert counted() == (1, 1)


def test_a_store_that_rocketmq_wrote_last_goes_by_its_progress() -> None:
    world = World()
    for number in range(4):
        world.schedule(1, b"%d" % number)
    world.pass_time(1000)
    world.stop()
    data = bytearray(world.files.read_whole("/s/checkpoint") or b"")
    data[7] ^= 1  # RocketMQ writes its own timestamps
    world.files.write_whole("/s/checkpoint", bytes(data))
    world.files.write_whole(PROGRESS, b'{"offsetTable":{1:1}}')
    world.open()
    world.run()
    assert world.bodies() == [b"0", b"1", b"2", b"3", b"1", b"2", b"3"], "at least once, as RocketMQ"


@given(
    st.integers(0, 2**32 - 1),
    st.dictionaries(
        st.integers(1, 65535),
        st.lists(
            st.builds(Run, OFFSETS, OFFSETS, st.integers(-(2**40), 2**40), st.none() | OFFSETS), min_size=1, max_size=50
        ),
    ),
    st.lists(OFFSETS),
    st.none()
    | st.builds(Seen, OFFSETS, OFFSETS, OFFSETS, st.just(b"") | st.binary(min_size=16, max_size=16).filter(any)),
    st.binary(max_size=60),
)
def test_a_note_is_read_as_it_was_written_and_rubbish_is_none(
    crc: int, levels: dict[int, list[Run]], delivered: list[int], seen: Seen | None, rubbish: bytes
) -> None:
    note = runs.encode(crc, levels, delivered, seen)
    assert runs.decode(note) == runs.Note(crc, levels, array("q", delivered), seen)
    assert runs.decode(note[:-1]) is None
    levels = {level: [run._replace(limit_ms=None) for run in found] for level, found in levels.items()}
    earlier = runs.encode(crc, levels)[:-4]
    assert runs.decode(earlier) == runs.Note(crc, levels, array("q")), "as versions wrote it that did not know of these"
    runs.decode(rubbish)


def test_what_was_found_delivered_behind_a_refused_message_stays_known() -> None:
    """Messages that Apache's broker delivered before others in front of them are not repeated after the take-over: the
    disk is full when those are due, a checkpoint is made meanwhile, and the broker is killed before it can try
    again."""
    world = World(delivery=DeliveryConfig(is_async=True), sync_flush=True)
    for body in (b"A", b"B"):
        world.schedule(1, body)
    unit = world.levels.levels[1].queue.unit(1)
    assert unit is not None
    world.levels._batches.set_delivered(np.array([unit[0]]))
    world.clock.advance(1000)
    world.store.health.fill("full")
    world.step()
    assert world.bodies() == []
    world.checkpoint()
    world.open()
    world.pass_time(1000)
    assert world.bodies() == [b"A"]


@pytest.mark.parametrize(
    ("boot", "monotonic", "jump"),
    [(b"b", 10.0, 2000), (b"b", 8.0, 4000), (b"b", 4.0, None), (b"c", 10.0, None), (b"", 10.0, None)],
)
def test_by_how_much_the_clock_was_set_is_known_within_one_run_of_the_machine(
    boot: bytes, monotonic: float, jump: int | None
) -> None:
    """A monotonic clock that went back counts from another start, whatever the boot id says."""
    assert Seen(0, 100_000, 5000, b"b").jump_ms(Moment(107_000, monotonic, boot)) == jump
