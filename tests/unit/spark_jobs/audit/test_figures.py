"""Figures of cases: the sum of the parts equals the whole, and plain counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from duemq.spark_jobs.audit.figures import (
    CANCELLED,
    CASE,
    DELIVERED,
    LOST,
    PENDING,
    STATUSES,
    TWICE,
    UNCLAIMED,
    Figures,
)
from duemq.spark_jobs.audit.lateness import stats

STEP_MS, BEGIN = 10_000, 500
ROW = st.tuples(
    st.integers(0, 2000),  # physical offset
    st.integers(91, 300),  # size
    st.integers(0, 100_000),  # at
    st.integers(0, 3_000_000) | st.integers(0, 100_000_000),  # due; within some 30 minutes, or a day
    st.integers(0, 3),  # level
    st.integers(0, 3),  # topic
    st.integers(0, 5),  # status
    st.integers(0, 3_000),  # late
    st.integers(-1, 1000),  # origin
)


def cases_of(rows: list[tuple[int, ...]]) -> np.ndarray[Any, Any]:
    cases = np.zeros(len(rows), CASE)
    for case, (offset, size, at, due, level, topic, status, late, origin) in zip(cases, rows, strict=True):
        count = {DELIVERED: 1, TWICE: 2 + late % 3, UNCLAIMED: 1}.get(status, 0)
        first = due + late if count else 0
        last = first + 5 * (count - 1) if count else 0
        named = origin if status == UNCLAIMED else -1
        is_level = 0 if status == UNCLAIMED else level
        fields = (
            offset,
            size,
            at,
            due,
            is_level,
            topic,
            status,
            count,
            first,
            last,
            first * 2,
            last * 2,
            named,
            offset // 2,
            offset % 2,
        )
        for name, value in zip(CASE.names or (), fields, strict=True):
            case[name] = value
    return cases


def same(one: Figures, other: Figures) -> None:
    for name in Figures.NAMES:
        a, b = getattr(one, name), getattr(other, name)
        if name == "offenders":
            a, b = np.sort(a, order=CASE.names), np.sort(b, order=CASE.names)
        assert a.dtype == b.dtype
        assert a.tolist() == b.tolist(), name


@given(st.lists(ROW, max_size=40), st.integers(0, 40), st.integers(0, 40))
def test_parts_add_up_to_the_whole(rows: list[tuple[int, ...]], one: int, other: int) -> None:
    cases = cases_of(rows)
    a, b = sorted((one, other))
    parts = [Figures.of(part, STEP_MS, BEGIN) for part in (cases[:a], cases[a:b], cases[b:])]
    whole = Figures.of(cases, STEP_MS, BEGIN)
    same(Figures.added(parts), whole)
    same(Figures.added([Figures.decode(part.encode()) for part in parts]), whole)
    same(Figures.added([whole]), whole)


@given(st.lists(ROW, max_size=40))
def test_they_are_what_is_counted(rows: list[tuple[int, ...]]) -> None:
    cases = cases_of(rows)
    figures = Figures.of(cases, STEP_MS, BEGIN)
    plain = cases.tolist()
    names = CASE.names or ()
    found = [dict(zip(names, row, strict=True)) for row in plain]
    counts = Counter(case["status"] for case in found)
    for status in range(len(STATUSES)):
        assert figures.count(status) == counts[status]
        if status != UNCLAIMED:
            of_levels = sum(case["status"] == status and case["delay_level"] > 0 for case in found)
            assert figures.count(status, is_level=True) == of_levels
            assert figures.count(status, is_level=False) == counts[status] - of_levels
    assert figures.superfluous == sum(case["deliveries"] - 1 for case in found if case["status"] == TWICE)
    is_expired = [case["status"] == UNCLAIMED and 0 <= case["origin"] < BEGIN for case in found]
    assert figures.expired == sum(is_expired)
    for statuses in ((DELIVERED, TWICE), (CANCELLED,), (LOST, PENDING)):
        mine = [case for case in found if case["status"] in statuses]
        assert figures.bytes_of(*statuses) == (len(mine), sum(case["size"] for case in mine))
    done = [case for case in found if case["status"] in (DELIVERED, TWICE)]
    ahead = Counter(case["delay_level"] for case in done if case["delay_level"] and not case["passed"])
    assert dict(figures.again.tolist()) == ahead
    seconds = Counter(case["first_ms"] // 1000 for case in done)
    assert {row["second"]: row["count"] for row in figures.delivered} == seconds
    late = Counter(case["first_ms"] // 1000 for case in done if case["first_ms"] - case["due_ms"] > 1000)
    assert {row["second"]: row["late"] for row in figures.delivered if row["late"]} == late
    waits = [case for case in found if case["status"] == PENDING]
    assert {row["second"]: row["count"] for row in figures.pending} == Counter(case["due_ms"] // 1000 for case in waits)
    minutes = [case["due_ms"] // 60_000 for case in waits]
    step = 1 if not waits or max(minutes) - min(minutes) <= 30 else 60
    starts = Counter((case["due_ms"] // 1000 // step * step, case["topic_hash"]) for case in waits)
    assert {(row["second"], row["topic"]): row["count"] for row in figures.pending_by_topic} == starts
    in_order = sorted(waits, key=lambda case: case["physical_offset"])
    expected = [(case["physical_offset"], case["size"], case["delay_level"]) for case in in_order]
    assert figures.waiting.tolist() == expected
    left = [case for case, expired in zip(found, is_expired, strict=True) if not expired]
    wrong = [case for case in left if case["status"] in (LOST, TWICE, UNCLAIMED)]
    assert sorted(figures.offenders["physical_offset"].tolist()) == sorted(case["physical_offset"] for case in wrong)
    keys: dict[str, Callable[[dict[str, int]], int]] = {
        "late_by_topic": lambda case: case["topic_hash"],
        "late_by_level": lambda case: case["delay_level"],
        "late_by_hour": lambda case: case["due_ms"] // 3_600_000 % 24,
        "late_by_minute": lambda case: case["due_ms"] // 60_000 % 1440,
        "late_over_time": lambda case: case["due_ms"] // STEP_MS,
    }
    for name, key in keys.items():
        told = {number: (one.number, one.greatest) for number, one in stats(getattr(figures, name), (50,))}
        values: dict[int, list[int]] = {}
        for case in done:
            values.setdefault(key(case), []).append(case["first_ms"] - case["due_ms"])
        assert told == {number: (len(ms), max(ms)) for number, ms in values.items()}, name
