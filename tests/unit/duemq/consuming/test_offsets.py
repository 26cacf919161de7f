from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duemq import ArgumentError, BrokerError, MessageQueue, RequestTimeoutError
from duemq._consuming.group import BrokerOffsets, GroupApi
from duemq._consuming.offsets import LocalOffsets, OffsetTracker

QUEUE = MessageQueue("demo", "broker-a", 3)


def test_an_empty_queue_commits_where_it_reads_on() -> None:
    tracker = OffsetTracker(7)
    assert (tracker.committable, len(tracker)) == (7, 0)
    tracker.read([], 12)  # all of them filtered out
    assert tracker.committable == 12


def test_the_lowest_unfinished_offset_is_committed() -> None:
    tracker = OffsetTracker(0)
    tracker.read([0, 1, 4], 5)
    tracker.finish(1)
    assert (tracker.committable, len(tracker)) == (0, 2)
    tracker.finish(0)
    assert tracker.committable == 4
    tracker.finish(4)
    assert (tracker.committable, len(tracker)) == (5, 0)


def test_what_is_finished_twice_or_was_never_read_changes_nothing() -> None:
    tracker = OffsetTracker(0)
    tracker.read([0, 2], 3)
    for offset in (5, 1, 2, 2):
        tracker.finish(offset)
    assert (tracker.committable, len(tracker)) == (0, 1)


def test_what_is_finished_beyond_an_unfinished_message_is_ahead() -> None:
    tracker = OffsetTracker(0)
    tracker.read(range(10), 10)
    for offset, ahead in ((3, 1), (9, 2), (0, 2), (1, 2), (2, 1), (4, 1)):
        tracker.finish(offset)
        assert tracker.ahead == ahead


def test_after_a_reset_nothing_of_before_counts() -> None:
    tracker = OffsetTracker(50)
    tracker.read([50, 51], 52)
    tracker.reset(10)
    tracker.finish(50)
    assert (tracker.committable, tracker.next_offset, len(tracker)) == (10, 10, 0)


@given(st.lists(st.integers(1, 3), max_size=30), st.randoms(use_true_random=False))
def test_no_unfinished_message_is_ever_passed(gaps: list[int], random: object) -> None:
    """The tracker never passes an unfinished message: random reads and finishes, compared with the set of unfinished
    offsets."""
    tracker, model, next_offset = OffsetTracker(0), set[int](), 0
    waiting = list(gaps)
    while waiting or model:
        if waiting and (not model or random.random() < 0.5):  # type: ignore[attr-defined]
            offset = next_offset + waiting.pop() - 1
            next_offset = offset + 1
            tracker.read([offset], next_offset)
            model.add(offset)
        else:
            offset = random.choice(sorted(model))  # type: ignore[attr-defined]
            tracker.finish(offset)
            model.remove(offset)
        assert tracker.committable == min(model, default=next_offset)
        assert len(tracker) == len(model)


async def test_offsets_without_a_file_are_kept_in_memory() -> None:
    offsets = LocalOffsets()
    assert await offsets.load(QUEUE) is None
    await offsets.save({QUEUE: 5})
    assert await offsets.load(QUEUE) == 5


async def test_offsets_in_a_file_outlive_the_consumer(tmp_path: Path) -> None:
    path = tmp_path / "offsets.json"
    other = MessageQueue("%RETRY%g", "b:1", 0)
    await LocalOffsets(path).save({QUEUE: 5, other: 1})
    again = LocalOffsets(path)
    assert (await again.load(QUEUE), await again.load(other)) == (5, 1)
    await again.save({QUEUE: 6})
    assert await LocalOffsets(path).load(other) == 1
    assert [file.name for file in tmp_path.iterdir()] == ["offsets.json"]


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b'{"t":{"b:x":1}}',
        b'{"t":{"3":1}}',
        b'{"t":{"b:3":"1"}}',
        b'{"t\xc2":{"b:3":1}}',
        '{"t":{"b:²":1}}'.encode(),
        b'{"t":{"b:2147483648":1}}',
        b'{"t":{"b:%s":1}}' % (b"9" * 5000),
        b'{"t":{"b:3":-1}}',
        b'{"t":{"b:3":9223372036854775808}}',
    ],
)
def test_another_file_is_not_taken_for_offsets(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "offsets.json"
    path.write_bytes(text)
    with pytest.raises(ArgumentError, match="is not an offset file"):
        LocalOffsets(path)


@pytest.mark.parametrize("name", ["", "no/such/file", "file/offsets.json", "x" * 5000, "null\0"])
def test_a_path_where_no_offsets_can_be_kept_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ArgumentError, match="offset file"):
        LocalOffsets(tmp_path / name)


@pytest.mark.parametrize("kind", ["fifo", "link to a fifo", "/dev/full", "/dev/zero", "/dev/null", "socket"])
@pytest.mark.timeout(20)
async def test_what_is_no_regular_file_is_refused_without_a_wait(tmp_path: Path, kind: str) -> None:
    """Neither read as the offsets nor written as their next version: opening a FIFO would wait for its other end, and
    a device may be read without end."""
    path, fifo = tmp_path / "offsets", tmp_path / "fifo"
    os.mkfifo(fifo)
    if kind == "socket":
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(path))
    else:
        path.symlink_to(kind if kind.startswith("/") else fifo)
    reason = "No such device" if kind == "socket" else "it is not a regular file"
    with pytest.raises(ArgumentError, match=f"cannot read the offset file '.*': {reason}"):
        LocalOffsets(fifo if kind == "fifo" else path)
    next_version = tmp_path / "own.new"
    path.rename(next_version)
    with pytest.raises(OSError, match=r"not a regular file|No such device"):
        await LocalOffsets(tmp_path / "own").save({QUEUE: 5})
    assert not (tmp_path / "own").exists()


async def test_a_link_to_a_file_of_offsets_is_read(tmp_path: Path) -> None:
    await LocalOffsets(tmp_path / "file").save({QUEUE: 5})
    (tmp_path / "link").symlink_to("file")
    assert await LocalOffsets(tmp_path / "link").load(QUEUE) == 5


async def test_offsets_of_the_largest_queue_and_number_are_read(tmp_path: Path) -> None:
    path = tmp_path / "offsets.json"
    path.write_bytes(b'{"t":{"b:2147483647":9223372036854775807}}')
    assert await LocalOffsets(path).load(MessageQueue("t", "b", 2**31 - 1)) == 2**63 - 1


class RacingBroker:
    """Stores offsets as RocketMQ's broker does: a commit that finds no table of a topic makes one, which replaces the
    table that another commit has made meanwhile."""

    def __init__(self, refused: int = 0) -> None:
        self.tables: dict[str, dict[int, int]] = {}
        self._refused = refused

    async def commit(self, queue: MessageQueue, offset: int) -> None:
        if self._refused:
            self._refused -= 1
            raise BrokerError(1, "busy", "127.0.0.1:10911")
        table = self.tables.get(queue.topic)
        await asyncio.sleep(0)  # other commits run
        if table is None:
            table = self.tables[queue.topic] = {}
        table[queue.queue_id] = offset


OFFSETS = {MessageQueue(topic, "broker-a", queue_id): queue_id + 5 for topic in "ab" for queue_id in range(3)}
STORED = {topic: {queue_id: queue_id + 5 for queue_id in range(3)} for topic in "ab"}


async def test_the_first_offsets_of_a_topic_are_all_stored() -> None:
    broker = RacingBroker()
    await BrokerOffsets(cast(GroupApi, broker)).save(OFFSETS)
    assert broker.tables == STORED


async def test_what_is_stored_after_a_refused_first_offset_is_stored() -> None:
    """The others followed all at the same time, and made the table twice."""
    broker = RacingBroker(1)
    with pytest.raises(BrokerError):
        await BrokerOffsets(cast(GroupApi, broker)).save(OFFSETS)
    assert broker.tables == {"a": {1: 6, 2: 7}, "b": STORED["b"]}


async def test_the_first_offsets_are_all_stored_by_a_broker_that_lost_them() -> None:
    broker = RacingBroker()
    offsets = BrokerOffsets(cast(GroupApi, broker))
    await offsets.save(OFFSETS)
    broker.tables.clear()
    offsets.forget_tables()
    await offsets.save(OFFSETS)
    assert broker.tables == STORED


async def test_a_broker_that_does_not_answer_is_not_asked_for_each_queue() -> None:
    asked = []

    class Silent:
        async def commit(self, queue: MessageQueue, offset: int) -> None:
            asked.append(queue)
            raise RequestTimeoutError("127.0.0.1:10911", "UPDATE_CONSUMER_OFFSET", 3.0)

    with pytest.raises(RequestTimeoutError):
        await BrokerOffsets(cast(GroupApi, Silent())).save(OFFSETS)
    assert len(asked) == len({(queue.broker, queue.topic) for queue in OFFSETS})


@pytest.mark.parametrize("refused", [1, 2, 4])
async def test_the_first_offsets_are_all_stored_after_an_error(refused: int) -> None:
    broker = RacingBroker(refused)
    offsets = BrokerOffsets(cast(GroupApi, broker))
    with pytest.raises(BrokerError):
        await offsets.save(OFFSETS)
    await offsets.save(OFFSETS)
    assert broker.tables == STORED
