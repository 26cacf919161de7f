"""The allocation has to be Java's to the queue: members with different results would read a queue twice, or never."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duemq import MessageQueue
from duemq._consuming.allocation import allocate_averagely, java_order


def queues(count: int) -> list[MessageQueue]:
    return [MessageQueue("t", "b", number) for number in range(count)]


def allocated(queue_count: int, member_count: int) -> list[list[int]]:
    members = [f"m{number:03}" for number in range(member_count)]
    return [[queue.queue_id for queue in allocate_averagely(queues(queue_count), members, me)] for me in members]


# By hand from AllocateMessageQueueAveragely.java.
@pytest.mark.parametrize(
    ("queue_count", "member_count", "expected"),
    [
        (4, 1, [[0, 1, 2, 3]]),
        (4, 2, [[0, 1], [2, 3]]),
        (4, 3, [[0, 1], [2], [3]]),
        (4, 4, [[0], [1], [2], [3]]),
        (3, 5, [[0], [1], [2], [], []]),
        (1, 2, [[0], []]),
        (8, 3, [[0, 1, 2], [3, 4, 5], [6, 7]]),
        (10, 4, [[0, 1, 2], [3, 4, 5], [6, 7], [8, 9]]),
        (0, 2, [[], []]),
    ],
)
def test_members_get_runs_of_neighbours_the_first_one_more(
    queue_count: int, member_count: int, expected: list[list[int]]
) -> None:
    assert allocated(queue_count, member_count) == expected


def java(queue_count: int, member_count: int, index: int) -> list[int]:
    """Java's calculation, with Java's variables."""
    mod = queue_count % member_count
    longer = mod > 0 and index < mod
    average = 1 if queue_count <= member_count else queue_count // member_count + longer
    start = index * average if longer else index * average + mod
    return [(start + i) % queue_count for i in range(min(average, queue_count - start))]


@given(st.integers(1, 200), st.integers(1, 60))
def test_every_member_gets_what_java_gives_it(queue_count: int, member_count: int) -> None:
    result = allocated(queue_count, member_count)
    assert result == [java(queue_count, member_count, index) for index in range(member_count)]
    assert sorted(number for numbers in result for number in numbers) == list(range(queue_count))


@given(st.permutations(queues(7)), st.permutations(["a", "b", "c"]))
def test_the_order_in_which_things_are_told_does_not_matter(order: list[MessageQueue], members: list[str]) -> None:
    assert allocate_averagely(order, members, "b") == queues(7)[3:5]


def test_who_is_not_in_the_group_gets_nothing() -> None:
    assert allocate_averagely(queues(4), ["a", "b"], "c") == []


def test_several_brokers_come_one_after_the_other() -> None:
    both = [MessageQueue("t", broker, number) for broker in ("b2", "b1") for number in (0, 1)]
    assert [str(queue) for queue in allocate_averagely(both, ["x", "y"], "x")] == ["t@b1:0", "t@b1:1"]


def test_client_ids_sort_by_utf16_units_as_in_java() -> None:
    # U+1F600 is D83D DE00 in UTF-16: before U+FF5E there, behind it in Python's order.
    high, low = "\U0001f600", "\uff5e"
    assert sorted([high, low]) == [low, high]
    assert sorted([low, high], key=java_order) == [high, low]
