"""Matching of messages and deliveries as arrays, compared with a matcher of dictionaries."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from duemq.spark_jobs.audit.events import CANCELLED, CONTINUED, DELIVERED, DONE, WAITS
from duemq.spark_jobs.audit.figures import STATUSES
from duemq.spark_jobs.audit.matching import GONE, cases_of, match, match_by_key, match_by_origin

Rows = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Wait:
    """A waiting record."""

    offset: int
    message: int
    key: int
    level: int = 0
    slot: int = 0
    again: bool = False
    passed: bool = False


@dataclass(frozen=True)
class Done:
    """A record that delivers, cancels or continues another."""

    offset: int
    what: int
    origin: int = -1
    message: int = 0
    key: int = 0
    slot: int = 0

    @property
    def at_ms(self) -> int:
        return self.offset * 3 + 5


def waits_of(waits: Sequence[Wait]) -> Rows:
    rows = np.zeros(len(waits), WAITS)
    for name in ("offset", "message", "key", "level", "slot", "again", "passed"):
        rows[name] = [getattr(wait, name) for wait in waits]
    rows["at_ms"], rows["due_ms"], rows["topic"] = rows["offset"] * 2, rows["offset"] * 2 + 9, rows["message"] + 100
    rows["size"] = 91
    return rows


def done_of(done: Sequence[Done]) -> Rows:
    rows = np.zeros(len(done), DONE)
    for name in ("origin", "offset", "at_ms", "message", "key", "slot", "what"):
        rows[name] = [getattr(one, name) for one in done]
    return rows


Verdict = tuple[int, str, int, int, int]


def verdicts_of(cases: Rows) -> list[Verdict]:
    """Physical offset, status, deliveries, first and last delivery of each case."""
    fields = ("physical_offset", "status", "deliveries", "first_ms", "last_ms")
    return sorted((row[0], STATUSES[row[1]], *row[2:]) for row in cases[list(fields)].tolist())


def verdict(wait: Wait, deliveries: list[Done], *, is_cancelled: bool) -> Verdict:
    times = sorted(done.at_ms for done in deliveries)
    if deliveries:
        status = "delivered" if len(deliveries) == 1 else "twice"
    else:
        status = "cancelled" if is_cancelled else "lost" if wait.passed else "pending"
    return wait.offset, status, len(times), times[0] if times else 0, times[-1] if times else 0


def unclaimed(done: Done) -> Verdict:
    return done.offset, "unclaimed", 1, done.at_ms, done.at_ms


def plain_by_origin(waits: Sequence[Wait], done: Sequence[Done]) -> tuple[list[Verdict], set[int]]:
    """Verdicts of the cases closed by origins, and the offsets of those that stay open."""
    by_offset = {wait.offset: wait for wait in waits}
    of: dict[int, list[Done]] = defaultdict(list)
    found = []
    for one in done:
        if one.origin in by_offset:
            of[one.origin].append(one)
        elif one.origin >= 0 and one.what == DELIVERED:
            found.append(unclaimed(one))
    left = set()
    for wait in waits:
        mine = of[wait.offset]
        if any(one.what == CONTINUED and one.key == wait.key for one in mine):
            continue  # It waits as another record's message now.
        deliveries = [one for one in mine if one.what == DELIVERED]
        is_cancelled = any(one.what in (CANCELLED, CONTINUED) for one in mine)
        if deliveries or is_cancelled:
            found.append(verdict(wait, deliveries, is_cancelled=is_cancelled))
        else:
            left.add(wait.offset)
    return sorted(found), left


def plain_by_key(waits: Sequence[Wait], done: Sequence[Done]) -> list[Verdict]:
    of_key: dict[int, list[Wait]] = defaultdict(list)
    for wait in sorted(waits, key=lambda wait: wait.offset):
        of_key[wait.key].append(wait)
    deliveries: dict[int, list[Done]] = defaultdict(list)
    for one in sorted(done, key=lambda one: one.offset):
        if one.what == DELIVERED:
            deliveries[one.key].append(one)
    marks = {(one.message, one.slot) for one in done if one.what == CANCELLED}
    found = []
    for key, records in of_key.items():
        messages = records[-max(1, sum(not wait.again for wait in records)) :]
        mine = deliveries.pop(key, [])
        for number, wait in enumerate(messages):
            last = number == len(messages) - 1
            part = mine[number:] if last else mine[number : number + 1]
            cancelled = wait.level == 0 and (wait.message, wait.slot) in marks
            found.append(verdict(wait, part, is_cancelled=cancelled))
    found += [unclaimed(one) for rest in deliveries.values() for one in rest]
    return sorted(found)


OFFSETS = st.integers(0, 60)
WAIT = st.builds(
    Wait,
    offset=OFFSETS,
    message=st.just(0),
    key=st.integers(0, 6),
    level=st.integers(0, 2),
    slot=st.integers(0, 2),
    again=st.booleans(),
    passed=st.booleans(),
)
DONE_NAMED = st.builds(
    Done,
    offset=st.integers(61, 200),
    what=st.sampled_from((DELIVERED, DELIVERED, CANCELLED, CONTINUED)),
    origin=OFFSETS,
    key=st.integers(0, 6),
)
DONE_NAMELESS = st.builds(
    Done,
    offset=st.integers(61, 200),
    what=st.sampled_from((DELIVERED, DELIVERED, CANCELLED)),
    key=st.integers(0, 8),
    message=st.integers(0, 4),
    slot=st.integers(0, 2),
)


def some(strategy: st.SearchStrategy[Any], most: int) -> st.SearchStrategy[list[Any]]:
    return st.lists(strategy, max_size=most, unique_by=lambda row: row.offset)


def with_messages(waits: list[Wait]) -> list[Wait]:
    """Make each key belong to one message."""
    return [Wait(**(vars(wait) | {"message": wait.key // 2})) for wait in waits]


@given(some(WAIT, 20), some(DONE_NAMED, 30), some(DONE_NAMELESS, 5))
def test_by_origin(waits: list[Wait], done: list[Done], nameless: list[Done]) -> None:
    found = match_by_origin(waits_of(waits), done_of([*nameless, *done]))
    closed, left = plain_by_origin(waits, done)
    cases = cases_of(found.closed[found.closed["status"] != GONE])
    assert verdicts_of(np.concatenate([cases, found.stray])) == closed
    assert set(found.waits["offset"].tolist()) == left
    assert sorted(found.done["offset"].tolist()) == sorted(one.offset for one in nameless)


@given(some(WAIT.map(lambda wait: wait), 20), some(DONE_NAMELESS, 30))
def test_by_key(waits: list[Wait], done: list[Done]) -> None:
    waits = with_messages(waits)
    found = match_by_key(waits_of(waits), done_of(done))
    assert verdicts_of(found) == plain_by_key(waits, done)
    deliveries = sum(one.what == DELIVERED for one in done)
    assert found["deliveries"].sum() == deliveries, "each delivery is of one case"


@given(some(WAIT, 20), some(DONE_NAMELESS, 30), st.integers(1, 5))
def test_buckets_by_message_give_the_same(waits: list[Wait], done: list[Done], buckets: int) -> None:
    waits = with_messages(waits)
    done = [Done(**(vars(one) | {"message": one.key // 2})) for one in done]
    parts = [
        match_by_key(
            waits_of([wait for wait in waits if wait.message % buckets == number]),
            done_of([one for one in done if one.message % buckets == number]),
        )
        for number in range(buckets)
    ]
    whole = match_by_key(waits_of(waits), done_of(done))
    assert verdicts_of(np.concatenate(parts)) == verdicts_of(whole)


@given(some(WAIT, 20), some(DONE_NAMED, 20), some(DONE_NAMELESS, 20))
def test_both_rounds(waits: list[Wait], named: list[Done], nameless: list[Done]) -> None:
    waits = with_messages(waits)
    found = match(waits_of(waits), done_of([*nameless, *named]))
    assert verdicts_of(found) == plain_both(waits, named, nameless)


def plain_both(waits: list[Wait], named: list[Done], nameless: list[Done]) -> list[Verdict]:
    """All verdicts: of a key the open messages come first, then those that are closed by their origins."""
    stray, left = plain_by_origin(waits, named)
    closed = {offset: row for offset, *row in stray if row[0] != "unclaimed"}
    found = [row for row in stray if row[1] == "unclaimed"]
    rest = sorted(nameless, key=lambda one: one.offset)
    marks = {(one.message, one.slot) for one in rest if one.what == CANCELLED}
    for key in {wait.key for wait in waits}:
        records = sorted((wait for wait in waits if wait.key == key), key=lambda wait: wait.offset)
        records = [wait for wait in records if wait.offset in left or wait.offset in closed]
        if not records:
            continue
        gone = [wait for wait in waits if wait.key == key and wait.again and wait not in records]
        messages = records[-max(1, sum(not wait.again for wait in records) - len(gone)) :]
        messages.sort(key=lambda wait: (wait.offset in closed, wait.offset))
        names = {wait.offset for wait in records}
        mine: dict[int, list[Done]] = {wait.offset: [] for wait in messages}
        for one in named:
            if one.what == DELIVERED and one.origin in names:
                mine[one.origin if one.origin in mine else messages[0].offset].append(one)
        deliveries = [one for one in rest if one.what == DELIVERED and one.key == key]
        for number, one in enumerate(deliveries):
            mine[messages[min(number, len(messages) - 1)].offset].append(one)
        for wait in messages:
            is_marked = wait.offset in left and wait.level == 0 and (wait.message, wait.slot) in marks
            is_cancelled = is_marked or closed.get(wait.offset, [""])[0] == "cancelled"
            found.append(verdict(wait, mine[wait.offset], is_cancelled=is_cancelled))
        rest = [one for one in rest if one not in deliveries]
    return sorted(found + [unclaimed(one) for one in rest if one.what == DELIVERED])


# --- each status once


def by_origin(waits: list[Wait], done: list[Done]) -> dict[int, str]:
    rows = match(waits_of(waits), done_of(done))
    return {offset: status for offset, status, *_ in verdicts_of(rows)}


def test_what_names_its_origin() -> None:
    waits = [Wait(offset, offset, offset, passed=offset != 5) for offset in (0, 1, 2, 3, 4, 5)]
    done = [
        Done(10, DELIVERED, 0),
        Done(11, DELIVERED, 1),
        Done(12, DELIVERED, 1),
        Done(13, CANCELLED, 2),
        Done(14, DELIVERED, 99),
    ]
    statuses = by_origin(waits, done)
    assert statuses == {0: "delivered", 1: "twice", 2: "cancelled", 3: "lost", 4: "lost", 5: "pending", 14: "unclaimed"}


def test_a_message_that_was_given_another_time_is_one_message() -> None:
    waits = [Wait(1, 7, 7, passed=True), Wait(5, 7, 7, again=True), Wait(9, 7, 7, again=True)]
    moved = [Done(5, CONTINUED, 1, key=7), Done(9, CONTINUED, 5, key=7)]
    assert by_origin(waits, moved) == {9: "pending"}
    assert by_origin(waits, [*moved, Done(20, DELIVERED, 9)]) == {9: "delivered"}
    assert by_origin(waits, [*moved, Done(20, CANCELLED, 9)]) == {9: "cancelled"}


def test_a_message_that_was_replaced_is_cancelled_and_the_new_one_another() -> None:
    waits = [Wait(1, 7, 7, passed=True), Wait(5, 8, 8, again=True)]
    replaced = [Done(5, CONTINUED, 1, key=8), Done(6, CANCELLED, 1)]
    assert by_origin(waits, replaced) == {1: "cancelled", 5: "pending"}
    assert by_origin(waits, [*replaced, Done(20, DELIVERED, 5)]) == {1: "cancelled", 5: "delivered"}
    # A message delivered before stays so.
    assert by_origin(waits, [Done(3, DELIVERED, 1), *replaced]) == {1: "delivered", 5: "pending"}


def test_a_delivery_counts_although_a_cancellation_came_too_late() -> None:
    assert by_origin([Wait(1, 7, 7)], [Done(3, DELIVERED, 1), Done(4, CANCELLED, 1)]) == {1: "delivered"}


def test_several_messages_with_one_key() -> None:
    """Of several messages with one key, from a producer that sent twice, the n-th delivery is the n-th message's."""
    waits = [Wait(1, 7, 7, level=1, passed=True), Wait(2, 7, 7, level=1, passed=True), Wait(3, 7, 7, level=1)]
    assert by_origin(waits, [Done(10, DELIVERED, key=7)]) == {1: "delivered", 2: "lost", 3: "pending"}
    deliveries = [Done(at, DELIVERED, key=7) for at in (10, 11, 12, 13)]
    assert by_origin(waits, deliveries) == {1: "delivered", 2: "delivered", 3: "twice"}


def test_rolled_by_rocketmq() -> None:
    """Rolled records of RocketMQ name no origin: the last record of a key counts, also if the first one has expired."""
    waits = [Wait(1, 7, 7, passed=True), Wait(5, 7, 7, again=True, passed=True), Wait(9, 7, 7, again=True, slot=3)]
    assert by_origin(waits, []) == {9: "pending"}
    assert by_origin(waits[1:], [Done(10, DELIVERED, key=7)]) == {9: "delivered"}
    assert by_origin(waits, [Done(10, CANCELLED, message=7, slot=3)]) == {9: "cancelled"}


def test_what_both_brokers_delivered_came_twice() -> None:
    """A message that both brokers delivered counts as delivered twice, in either order: RocketMQ's delivery names no
    origin, and duemq's does."""
    for level in (0, 1):
        waits = [Wait(1, 7, 7, level=level, passed=True), Wait(2, 7, 8, level=level)]
        ours, theirs = Done(10, DELIVERED, 1), Done(11, DELIVERED, key=7)
        assert by_origin(waits, [ours, theirs]) == {1: "twice", 2: "pending"}
        assert by_origin(waits, [Done(12, DELIVERED, 1), theirs]) == {1: "twice", 2: "pending"}
        assert by_origin(waits, [Done(8, CANCELLED, 1), theirs]) == {1: "delivered", 2: "pending"}
    # Open messages come first: each of two messages was delivered.
    assert by_origin([Wait(1, 7, 7), Wait(2, 7, 7)], [ours, theirs]) == {1: "delivered", 2: "delivered"}


def test_what_rocketmq_rolled_and_duemq_delivered_is_one_message() -> None:
    waits = [Wait(1, 7, 7, passed=True), Wait(5, 7, 7, again=True, passed=True)]
    assert by_origin(waits, [Done(10, DELIVERED, 5)]) == {5: "delivered"}
    assert by_origin(waits, [Done(10, DELIVERED, 5), Done(11, DELIVERED, 1)]) == {5: "twice"}
    assert by_origin(waits, [Done(10, CANCELLED, 5)]) == {5: "cancelled"}
    assert by_origin(waits, [Done(10, DELIVERED, 1)]) == {5: "delivered"}


def test_what_rocketmq_rolled_and_duemq_gave_another_time_is_one_message() -> None:
    """A message that RocketMQ rolled and duemq rescheduled is one message, although only the second of its records
    names the one before."""
    waits = [Wait(1, 7, 7, passed=True), Wait(5, 7, 7, again=True), Wait(9, 7, 7), Wait(12, 7, 7)]
    moved = [Done(9, CONTINUED, 5, key=7), Done(12, CONTINUED, 9, key=7)]
    assert by_origin(waits[:3], moved[:1]) == {9: "pending"}
    assert by_origin(waits, moved) == {12: "pending"}
    assert by_origin(waits, [*moved, Done(20, DELIVERED, 12)]) == {12: "delivered"}
    assert by_origin(waits[1:], [*moved, Done(20, DELIVERED, 12), Done(21, DELIVERED, key=7)]) == {12: "twice"}
    # Another message with the same key stays another one.
    assert by_origin([*waits, Wait(30, 7, 7)], moved) == {12: "pending", 30: "pending"}


def test_of_two_messages_with_one_key_one_may_be_given_another_time() -> None:
    waits = [Wait(1, 7, 7), Wait(2, 7, 7), Wait(9, 7, 7)]
    moved = Done(9, CONTINUED, 2, key=7)
    assert by_origin(waits, [moved]) == {1: "pending", 9: "pending"}
    assert by_origin(waits, [moved, Done(20, DELIVERED, 1)]) == {1: "delivered", 9: "pending"}
    assert by_origin(waits, [moved, Done(20, DELIVERED, 1), Done(21, DELIVERED, 9)]) == {1: "delivered", 9: "delivered"}


def test_rocketmq_cancels_in_one_slot_only_and_timers_only() -> None:
    mark = Done(10, CANCELLED, message=7, slot=3)
    assert by_origin([Wait(1, 7, 7, slot=3)], [mark]) == {1: "cancelled"}
    assert by_origin([Wait(1, 7, 7, slot=4)], [mark]) == {1: "pending"}
    assert by_origin([Wait(1, 7, 7, level=1)], [mark]) == {1: "pending"}


def test_nothing() -> None:
    found = match_by_origin(waits_of([]), done_of([]))
    assert [len(part) for part in found] == [0, 0, 0, 0]
    assert len(match_by_key(waits_of([]), done_of([]))) == 0
    assert verdicts_of(match_by_key(waits_of([]), done_of([Done(3, DELIVERED)]))) == [(3, "unclaimed", 1, 14, 14)]
