"""A mark that the disk does not take leads neither to a second delivery nor to a checkpoint that forgets the mark."""

from __future__ import annotations

import errno
import random
from collections.abc import Sequence

import pytest
from structlog.testing import capture_logs

from duemq.scheduler.timers.config import Cancelled, TimerConfig
from duemq.scheduler.timers.policy.policies import policy_of
from duemq.storage.durability.health import Verdict
from tests.crash.simulated_files import SimulatedFile
from tests.unit.scheduler.test_pending import PendingWorld
from tests.unit.scheduler.timer_world import START_MS, TimerWorld


class BrokenMarks:
    """A disk that takes no marks, permanently or for lack of descriptors."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_broken = True
        self.number = errno.EMFILE
        self.refused = 0
        real = SimulatedFile.write_apart

        def write_apart(file: SimulatedFile, writes: Sequence[tuple[int, bytes]]) -> None:
            if self.is_broken:
                self.refused += 1
                raise OSError(self.number, "no mark is taken")
            real(file, writes)

        monkeypatch.setattr(SimulatedFile, "write_apart", write_apart)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> BrokenMarks:
    return BrokenMarks(monkeypatch)


@pytest.fixture
def world() -> TimerWorld:
    return TimerWorld(TimerConfig(log_segment_size=52 * 1000))


def checkpoint_in_vain(world: TimerWorld, disk: BrokenMarks, *, is_kill: bool) -> None:
    """Make a checkpoint that fails at a mark: after an error of the disk only a start helps, a temporary failure is
    tried again."""
    assert not disk.refused, "it may be on the disk only when the record is that says so"
    disk.number = errno.EIO if is_kill else errno.EMFILE
    with pytest.raises(OSError, match="no mark is taken"):
        world.checkpoint()
    assert disk.refused
    assert world.store.health.verdict is (Verdict.POISONED if is_kill else Verdict.HEALTHY)
    if is_kill:
        world.open()


@pytest.mark.parametrize("delay", [3000, 60_000])
@pytest.mark.parametrize("how", ["cancel", "reschedule", "replace", "keep"])
@pytest.mark.parametrize("is_kill", [False, True])
def test_what_was_withdrawn_is_gone_at_once_and_after_a_restart(
    world: TimerWorld, disk: BrokenMarks, delay: int, how: str, is_kill: bool
) -> None:
    world.send_instead(START_MS + delay, "a")
    place = world.last_physical_offset
    world.run()
    world.checkpoint()
    expected = [b"m1"]
    if how == "cancel":
        assert world.cancel(place) is Cancelled.CANCELLED
        assert world.cancel(place) is Cancelled.CANCELLED_BEFORE
        expected = []
    elif how == "reschedule":
        assert world.reschedule(place, START_MS + delay + 500)[0] is Cancelled.CANCELLED
    elif how == "replace":
        assert world.send_instead(START_MS + delay, "a") == 1
        expected = [b"m2"]
    else:
        assert world.keep() == 1
    checkpoint_in_vain(world, disk, is_kill=is_kill)
    world.pass_time(delay + 1000)
    assert world.bodies() == expected
    assert world.timers.metrics() == {}
    disk.is_broken = False
    world.checkpoint()
    world.open()
    world.pass_time(delay)
    assert world.bodies() == expected


def test_the_mark_is_written_when_the_disk_takes_it_again(world: TimerWorld, disk: BrokenMarks) -> None:
    place = world.send(START_MS + 60_000)
    world.run()
    world.checkpoint()
    world.cancel(place)
    disk.is_broken = False
    world.checkpoint()
    world.open()
    assert world.timers.metrics() == {}
    world.pass_time(61_000)
    assert world.bodies() == []


@pytest.mark.parametrize("is_kill", [False, True])
def test_what_was_withdrawn_of_a_level_is_gone(disk: BrokenMarks, is_kill: bool) -> None:
    world = PendingWorld(TimerConfig(log_segment_size=52 * 1000))
    place = world.schedule(3)
    world.checkpoint()
    assert world.cancel(place) is Cancelled.CANCELLED
    assert world.cancel(place) is Cancelled.CANCELLED_BEFORE
    checkpoint_in_vain(world, disk, is_kill=is_kill)
    world.pass_time(60_000)
    assert world.bodies() == []
    disk.is_broken = False
    world.checkpoint()
    world.open()
    world.pass_time(60_000)
    assert world.bodies() == []


@pytest.mark.parametrize("what", ["level", "timer"])
def test_a_mark_that_a_killed_process_left_in_memory_only_survives_a_power_cut(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mark that a killed process wrote without syncing survives a power cut after the next process: that process
    reads the mark, and must not assume that it is on the disk."""
    world = PendingWorld(TimerConfig(log_segment_size=52 * 1000))
    place = world.schedule(3) if what == "level" else world.send(START_MS + 60_000)
    world.run()
    world.checkpoint()
    assert world.cancel(place) is Cancelled.CANCELLED

    real = SimulatedFile.write_apart

    def write_unsynced(file: SimulatedFile, writes: Sequence[tuple[int, bytes]]) -> None:
        if "queuecheck" in file.path:
            return real(file, writes)
        for offset, data in writes:
            file.write(offset, data)
        raise OSError(errno.EIO, "killed before the sync")

    with monkeypatch.context() as patch:
        patch.setattr(SimulatedFile, "write_apart", write_unsynced)
        with pytest.raises(OSError, match="killed"):
            world.checkpoint()
    world.open()
    world.checkpoint()
    world.checkpoint()
    world.files = world.files.after_crash(len(world.files.operations), random.Random(0), "nothing")
    world.open()
    world.pass_time(70_000)
    assert world.bodies() == []


@pytest.mark.parametrize("how", ["cancel", "reschedule"])
@pytest.mark.parametrize("stop", ["close", "checkpoint"])
def test_what_a_stop_wrote_of_the_newest_message_is_no_mark(world: TimerWorld, how: str, stop: str) -> None:
    """The unit of the newest message that a clean stop writes for Apache's broker is not taken for a mark, although it
    looks like the mark of a withdrawn message; also when that message is withdrawn."""
    world.send(START_MS + 900)
    later = world.send(START_MS + 60_000)
    world.run()
    world.timers.set_policy("orders", policy_of({"timer.paused": "true"}))
    world.pass_time(5000)  # the held-back message has the last unit
    if stop == "close":
        world.close()
        world.open()
    else:
        world.checkpoint()
    newest = world.timers._slots.log.last_record()
    assert stop != "close" or newest == later
    world.run()
    world.cancel(later) if how == "cancel" else world.reschedule(later, START_MS + 30_000)
    world.run()
    with capture_logs() as logs:
        world.open()  # after a kill -9
    assert [line for line in logs if "rebuilt" in line["event"]] == []
