from __future__ import annotations

import errno

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from duemq.storage.queues.consume_queue import PADDING_SIZE, UNIT, ConsumeQueue
from tests.crash.simulated_files import SimulatedFiles

SIZE = 20 * 7


def queue_on(files: SimulatedFiles, queue_id: int = 0) -> ConsumeQueue:
    return ConsumeQueue(files, "/q", SIZE, "topic", queue_id)


def fill(queue: ConsumeQueue, count: int, size: int = 10) -> None:
    for _ in range(count):
        offset = queue.next_offset
        queue.tail += UNIT.pack(offset * size, size, offset + 1000)
        queue.next_offset += 1


class QueueMachine(RuleBasedStateMachine):
    """A queue compared with a plain list of units."""

    def __init__(self) -> None:
        super().__init__()
        self.files = SimulatedFiles()
        self.queue = queue_on(self.files)
        self.units: list[tuple[int, int, int]] = []

    @rule(count=st.integers(1, 20))
    def append(self, count: int) -> None:
        fill(self.queue, count)
        start = len(self.units)
        self.units += [(offset * 10, 10, offset + 1000) for offset in range(start, start + count)]

    @rule()
    def write_tail(self) -> None:
        self.queue.write_tail()

    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        offset = data.draw(st.integers(0, len(self.units)))
        self.queue.truncate(offset)
        del self.units[offset:]

    @rule(data=st.data())
    def reload_and_cut(self, data: st.DataObject) -> None:
        self.queue.write_tail()
        offset = data.draw(st.integers(0, len(self.units)))
        self.queue = queue_on(self.files)
        self.queue.load()
        self.queue.cut(offset * 10 + data.draw(st.integers(0, 9)))
        del self.units[offset:]

    @invariant()
    def reads_the_same(self) -> None:
        assert self.queue.next_offset == len(self.units)
        data = self.queue.read(0, len(self.units) + 5)
        assert list(UNIT.iter_unpack(data)) == self.units
        middle = len(self.units) // 2
        assert list(UNIT.iter_unpack(self.queue.read(middle, 9))) == self.units[middle : middle + 9]
        assert self.queue.unit(len(self.units)) is None


TestQueueMachine = QueueMachine.TestCase
TestQueueMachine.settings = settings(stateful_step_count=30)


def test_a_queue_that_starts_late_is_filled_up_as_in_rocketmq() -> None:
    files = SimulatedFiles()
    queue = queue_on(files)
    queue.start_at(10)
    fill(queue, 2)
    queue.write_tail()
    (name,) = files.list("/q/topic/0")
    assert name == f"{SIZE:020}"
    data = files.read_whole(f"/q/topic/0/{name}")
    assert data is not None
    assert data[:60] == UNIT.pack(0, PADDING_SIZE, 0) * 3
    assert UNIT.unpack(data[60:80]) == (100, 10, 1010)
    again = queue_on(files)
    again.load()
    again.cut(10_000)
    again.advance_min(begin=90)
    assert (again.min_offset, again.next_offset) == (10, 12)


def test_advance_min_drops_the_files_whose_messages_are_gone() -> None:
    files = SimulatedFiles()
    queue = queue_on(files)
    fill(queue, 20)
    queue.write_tail()
    assert queue.advance_min(begin=95) == [f"/q/topic/0/{0:020}"]
    assert queue.min_offset == 10
    assert queue.unit(9) is not None
    assert queue.unit(3) is None


def test_everything_expired_leaves_an_empty_queue_at_its_end() -> None:
    queue = queue_on(SimulatedFiles())
    fill(queue, 10)
    queue.write_tail()
    queue.advance_min(begin=10_000)
    assert (queue.min_offset, queue.next_offset) == (10, 10)


def test_a_queue_of_which_everything_expired_goes_on_after_a_restart() -> None:
    """A queue whose units have all expired keeps its offsets after a restart, also if its last file was full."""
    files = SimulatedFiles()
    queue = queue_on(files)
    fill(queue, 14)
    queue.write_tail()
    for path in queue.advance_min(begin=10_000):
        files.remove(path)
    assert queue.min_offset == queue.next_offset == 14
    again = queue_on(files)
    again.load()
    again.cut(10_000)
    assert again.next_offset == 14


def test_a_first_file_that_could_not_be_filled_up_is_filled_up_later() -> None:
    files = SimulatedFiles()
    queue = queue_on(files)
    queue.start_at(10)
    fill(queue, 2)
    files.fail("write", errno.ENOSPC)
    with pytest.raises(OSError, match="No space"):
        queue.write_tail()
    assert queue.written_offset == 10
    files.heal()
    queue.write_tail()
    data = files.read_whole(f"/q/topic/0/{SIZE:020}") or b""
    assert data[:60] == UNIT.pack(0, PADDING_SIZE, 0) * 3
    assert UNIT.unpack(data[60:80]) == (100, 10, 1010)


def test_garbage_behind_a_cut_is_gone_for_whoever_opens_the_file_next() -> None:
    files = SimulatedFiles()
    queue = queue_on(files)
    fill(queue, 20)
    queue.write_tail()
    queue.cut(55)
    fill(queue, 1)
    queue.write_tail()
    data = b"".join(files.read_whole(f"/q/topic/0/{name}") or b"" for name in files.list("/q/topic/0"))
    assert data.rstrip(b"\0").endswith(UNIT.pack(50, 10, 1005).rstrip(b"\0"))


def test_what_is_left_of_a_removed_queue_does_not_hide_the_one_that_was_made_anew() -> None:
    """The rest of a removed queue does not hide the queue made anew: the process died when the first file was removed
    and the second was not."""
    files = SimulatedFiles()
    queue = queue_on(files)
    fill(queue, 10)
    queue.write_tail()
    files.remove(f"/q/topic/0/{0:020}")
    queue = queue_on(files)
    queue.load()
    queue.cut(10_000)
    queue.truncate(0)
    fill(queue, 2)
    queue.advance_min(begin=0)
    assert (queue.min_offset, queue.next_offset) == (0, 2)
    queue.write_tail()
    assert files.list("/q/topic/0") == [f"{0:020}"]


def test_a_queue_that_is_no_more_writes_nothing() -> None:
    """A removed queue writes nothing, although callers that still have it may have put units into it."""
    files = SimulatedFiles()
    queue = queue_on(files)
    fill(queue, 10)
    queue.write_tail()
    fill(queue, 1)
    queue.forget()
    files.remove_tree("/q/topic")
    fill(queue, 3)
    queue.write_tail()
    assert files.list("/q") == []


def test_a_queue_that_is_held_keeps_its_units_in_memory() -> None:
    files = SimulatedFiles()
    queue = queue_on(files)
    queue.is_held = True
    fill(queue, 10)
    queue.write_tail()
    assert (files.list("/q"), queue.written_offset) == ([], 0)
    assert len(queue.read(0, 20)) == 10 * UNIT.size
    queue.is_held = False
    queue.write_tail()
    assert queue.written_offset == 10


def test_watchers_come_and_go() -> None:
    queue = queue_on(SimulatedFiles())
    calls: list[str] = []
    first, second = (lambda _: calls.append("a")), (lambda _: calls.append("b"))
    queue.watch(first)
    queue.watch(second)
    queue.unwatch(first)
    for watcher in queue.watchers:
        watcher(queue)
    assert calls == ["b"]
