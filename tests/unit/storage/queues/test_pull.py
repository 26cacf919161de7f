"""Finding messages, compared with a model: a plain list of tags codes."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from duemq.protocol.records.record import decode_all
from duemq.storage.files import OsFile, OsFiles, Ranges
from duemq.storage.queues.consume_queue import WITHDRAWN_SIZE, ConsumeQueue
from duemq.storage.queues.pull import MAX_UNITS, ColdRead, PullStatus, ReadAhead, find, read
from duemq.storage.store import MessageStore
from tests.crash.simulated_files import SimulatedFiles
from tests.unit.storage.conftest import HOST, NOW_MS, append, make_store


def store_with(codes: list[int], size: int = 10) -> MessageStore:
    store = make_store("/s", SimulatedFiles(), segment_size=4096)
    store.open()
    for number, code in enumerate(codes):
        store.appender.begin(NOW_MS)
        store.appender.add(store.ensure_queue("t", 0), b"%d" % number * size, b"", code, 1, HOST)
        store.appender.add(store.ensure_queue("other", 0), b"between", b"", 0, 1, HOST)
        store.appender.commit()
    return store


@given(
    st.lists(st.integers(1, 3), min_size=1, max_size=30),
    st.integers(0, 29),
    st.integers(1, 10),
    st.one_of(st.none(), st.frozensets(st.integers(1, 3), min_size=1)),
    st.booleans(),
)
def test_a_pull_finds_what_a_list_has(
    codes: list[int], start: int, count: int, wanted: frozenset[int] | None, in_files: bool
) -> None:
    start = min(start, len(codes) - 1)
    store = store_with(codes)
    if in_files:
        for queue in store.all_queues():
            queue.write_tail()
    found = find(store.queue("t", 0), start, count, 1 << 20, wanted, 0)
    expected = [n for n in range(start, len(codes)) if wanted is None or codes[n] in wanted][:count]
    body = bytes(read(store.log, found.ranges, 0) or b"")
    assert bytes(read(store.log, found.ranges, store.log.end // 2) or b"") == body
    assert bytes(read(store.log, found.ranges, store.log.end) or b"") == body
    assert [message.queue_offset for message in decode_all(body)] == expected
    assert found.count == len(expected)
    assert found.size == len(body)
    assert body == (ColdRead(store.log, found.ranges).run() if found.ranges else b"")
    assert found.status is (PullStatus.FOUND if expected else PullStatus.NO_MATCHED_MESSAGE)
    between = [n for n in range(start, found.next_offset) if wanted is None or codes[n] in wanted]
    assert between == expected, "the next pull neither misses a message nor gets one twice"


def test_a_pull_is_bounded_in_bytes_but_gives_one_message_at_least() -> None:
    store = store_with([1] * 5, size=1000)
    found = find(store.queue("t", 0), 0, 32, 2500, None, 0)
    assert (found.count, found.next_offset) == (2, 2)
    found = find(store.queue("t", 0), 0, 32, 10, None, 0)
    assert (found.count, found.next_offset) == (1, 1)


def test_a_pull_is_bounded_in_bytes_if_all_messages_have_its_tag() -> None:
    store = store_with([1] * 5, size=1000)
    found = find(store.queue("t", 0), 0, 32, 2500, frozenset({1}), 0)
    assert (found.count, found.next_offset) == (2, 2)


def test_a_pull_reads_no_more_units_than_it_returns_if_all_messages_have_its_tag(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    queue = store_with([1] * 100).queue("t", 0)
    assert queue is not None
    asked: list[int] = []

    def counting(read: Callable[[ConsumeQueue, int, int], bytes]) -> Callable[[ConsumeQueue, int, int], bytes]:
        def counted(queue: ConsumeQueue, offset: int, count: int) -> bytes:
            asked.append(count)
            return read(queue, offset, count)

        return counted

    monkeypatch.setattr(ConsumeQueue, "read", counting(ConsumeQueue.read))
    monkeypatch.setattr(ConsumeQueue, "read_stored", counting(ConsumeQueue.read_stored))
    assert find(queue, 0, 32, 1 << 20, frozenset({1, 2}), 0).count == 32
    assert asked == [32]


@pytest.mark.parametrize("count", [3, 100])
def test_an_expression_without_tags_matches_nothing(count: int) -> None:
    found = find(store_with([1] * count).queue("t", 0), 0, 32, 1 << 20, frozenset(), 0)
    assert (found.status, found.next_offset) == (PullStatus.NO_MATCHED_MESSAGE, count)


def test_a_pull_for_many_messages_looks_at_no_more_units_than_rocketmq() -> None:
    queue = store_with([1] * 900).queue("t", 0)
    assert queue is not None
    assert find(queue, 0, 10_000, 1 << 20, frozenset({1}), 0).count == MAX_UNITS


def test_a_pull_passes_over_withdrawn_messages_between_those_with_its_tag() -> None:
    queue = store_with([1, 1, 1, 2, 1]).queue("t", 0)
    assert queue is not None
    queue.mark(1, WITHDRAWN_SIZE)
    found = find(queue, 0, 3, 1 << 20, frozenset({1}), 0)
    assert (found.status, found.count, found.next_offset) == (PullStatus.FOUND, 3, 5)


@pytest.mark.parametrize(
    ("offset", "status", "moved_to"),
    [
        (-5, PullStatus.OFFSET_TOO_SMALL, 0),
        (3, PullStatus.OFFSET_OVERFLOW_ONE, 3),
        (4, PullStatus.OFFSET_OVERFLOW_BADLY, 3),
        (2**62, PullStatus.OFFSET_OVERFLOW_BADLY, 3),
    ],
)
def test_offsets_outside_a_queue(offset: int, status: PullStatus, moved_to: int) -> None:
    found = find(store_with([1, 1, 1]).queue("t", 0), offset, 32, 1000, None, 0)
    assert (found.status, found.next_offset, found.min_offset, found.max_offset) == (status, moved_to, 0, 3)


def test_a_queue_that_is_not_there_or_empty() -> None:
    store = store_with([])
    assert find(None, 7, 32, 1000, None, 0).status is PullStatus.NO_MATCHED_LOGIC_QUEUE
    assert find(store.ensure_queue("t", 0), 0, 32, 1000, None, 0).status is PullStatus.NO_MESSAGE_IN_QUEUE


def test_messages_that_are_deleted_are_stepped_over() -> None:
    store = store_with([1, 1, 1])
    third = store.queue("t", 0).unit(2)  # type: ignore[union-attr]
    assert third is not None
    found = find(store.queue("t", 0), 0, 32, 1000, None, third[0])
    assert (found.status, found.count, found.next_offset) == (PullStatus.FOUND, 1, 3)
    found = find(store.queue("t", 0), 0, 2, 1000, None, third[0])
    assert (found.status, found.next_offset) == (PullStatus.MESSAGE_WAS_REMOVING, 2)


def test_an_address_in_the_extension_file_is_left_to_the_consumer() -> None:
    store = store_with([-(2**31) - 5])
    assert find(store.queue("t", 0), 0, 32, 1000, frozenset({1}), 0).status is PullStatus.FOUND


@given(st.lists(st.integers(0, 5), min_size=1, max_size=20), st.integers(-2, 60))
def test_searching_by_time(steps: list[int], at: int) -> None:
    store = make_store("/s", SimulatedFiles())
    store.open()
    times = list(accumulate(steps))
    for now_ms in times:
        append(store, "t", 0, b"x", now_ms=now_ms)
    queue = store.ensure_queue("t", 0)
    expected = next((n for n, time in enumerate(times) if time >= at), len(times))
    assert store.offset_by_time(queue, at) == expected
    last = max((n for n, time in enumerate(times) if time <= at), default=0)
    assert store.offset_by_time(queue, at, upper=True) == last


def test_records_are_cached_in_whatever_order_they_are_asked_for(tmp_path: Path) -> None:
    """Records count as cached in any order of the ranges, such as that of their deliver times, and in several files."""
    store = make_store(str(tmp_path), OsFiles(), segment_size=4096)
    store.open()
    at = append(store, "t", 0, *[b"x" * 300] * 20)
    ranges = [(offset, 100) for offset in at]
    assert store.log.end > 4096
    for hot_from in (0, store.log.end):
        store._cached_from = hot_from
        assert store.is_cached(ranges)
        assert store.is_cached(ranges[::-1])
    assert not store.is_cached([(store.log.end, 100)])


def test_what_was_not_cached_tells_of_what_lies_before_it() -> None:
    """A read that turns out not to be cached tells the store about older records too: in a small container the system
    keeps less than expected, and the loop waits once, not at each read."""
    files = SimulatedFiles()
    store = make_store("/s", files)
    store.open()
    at = append(store, "t", 0, *[b"x" * 300] * 101)
    ranges = [(offset, at[1] - at[0]) for offset in at]

    def is_read(number: int) -> bool:
        return store.read(ranges[number : number + 1]) is not None

    files.uncached = at[90]
    assert is_read(20), "taken for cached: the loop waits"
    assert not any(is_read(number) for number in range(60))
    assert is_read(70), "half of the rest still is taken for cached"
    assert not any(is_read(number) for number in range(85))
    assert is_read(86)
    assert [is_read(number) for number in (89, 91, 100)] == [False, True, True]
    # A range that was only asked for says nothing about the newest ones.
    assert not is_read(80)
    assert is_read(100)
    files.uncached = at[97]
    assert [is_read(number) for number in (92, 95)] == [False, True]


def test_records_are_read_ahead(tmp_path: Path) -> None:
    """Records are read ahead in any order and from several files; ranges close together are read as one."""
    store = make_store(str(tmp_path), OsFiles(), segment_size=1 << 20)
    store.open()
    at = append(store, "t", 0, *[b"x" * 1000] * 2200)
    sizes = np.full(len(at), at[1] - at[0])
    asked: list[tuple[str, int, int]] = []

    def read_ahead(self: OsFile, ranges: Ranges) -> None:
        asked.extend((Path(self.path).name, offset, size) for offset, size in ranges)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OsFile, "read_ahead", read_ahead)
        # The first and the last record, and one of each file in between.
        chosen = np.array([2199, 1000, 0, 2, 1])
        ReadAhead(store.log, np.array(at)[chosen], sizes[chosen]).run()
    size = int(sizes[0])
    names = [f"{number << 20:020}" for number in range(3)]
    assert asked == [
        (names[0], 0, 3 * size),
        (names[at[1000] >> 20], at[1000] % (1 << 20), size),
        (names[2], at[2199] % (1 << 20), size),
    ]
    asked.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OsFile, "read_ahead", read_ahead)
        ReadAhead(store.log, np.array(at), sizes).run()
        files = [[offset for offset in at if offset >> 20 == number] for number in range(3)]
        assert asked == [(names[n], files[n][0] % (1 << 20), size * len(files[n])) for n in range(3)]
        asked.clear()
        patch.setattr("duemq.storage.queues.pull._AHEAD_BYTES", asked_size := size * len(files[0]) + 1000)
        ReadAhead(store.log, np.array(at), sizes).run()
        assert [ask[2] for ask in asked] == [size * len(files[0]), 1000, 0]
        assert sum(ask[2] for ask in asked) == asked_size
    ReadAhead(store.log, np.array(at), sizes).run()
    assert store.is_cached([(offset, size) for offset in at])
