"""Steps of curves: round, and with few enough points for any span."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from duemq.spark_jobs.analyse.analyse import _due_by_step, _over_time
from duemq.spark_jobs.analyse.analysis import Ahead
from duemq.spark_jobs.audit.figures import CASE, PENDING, Figures
from duemq.spark_jobs.audit.lateness import histogram
from duemq.spark_jobs.audit.steps import BARS, POINTS, STEPS_MS, is_by_minute, seconds_kept, step_of

SECOND, MINUTE, HOUR, DAY = 1000, 60_000, 3_600_000, 86_400_000


@pytest.mark.parametrize(
    ("span", "line", "bars"),
    [
        (0, SECOND, SECOND), (MINUTE, SECOND, SECOND), (HOUR, 10 * SECOND, 30 * SECOND),
        (DAY, 5 * MINUTE, 10 * MINUTE), (7 * DAY, 15 * MINUTE, HOUR), (30 * DAY, 2 * HOUR, 6 * HOUR),
        (365 * DAY, DAY, 7 * DAY),
    ],
)  # fmt: skip
def test_the_step_goes_with_the_span(span: int, line: int, bars: int) -> None:
    assert step_of(span, POINTS) == line
    assert step_of(span, BARS) == bars


@given(st.integers(0, 20 * 365 * DAY), st.sampled_from(STEPS_MS))
def test_a_curve_has_neither_too_many_points_nor_needlessly_few(span: int, known: int) -> None:
    step = step_of(span, POINTS, known)
    assert step % known == 0
    assert span // step < POINTS
    smaller = [one for one in STEPS_MS if one < step and one % known == 0]
    assert not smaller or span // smaller[-1] >= POINTS


@given(st.lists(st.integers(0, 2500), min_size=1), st.integers(0, 30))
def test_seconds_that_are_kept_add_up_in_any_parts(seconds: list[int], cut: int) -> None:
    whole = seconds_kept(np.array(seconds))
    parts = [seconds_kept(np.array(part, np.int64)) for part in (seconds[:cut], seconds[cut:])]
    assert seconds_kept(np.concatenate(parts)).tolist() == whole.tolist()
    assert whole.tolist() == ([s // 60 * 60 for s in seconds] if is_by_minute(min(seconds), max(seconds)) else seconds)


def test_lateness_of_a_store_read_in_one_piece_gets_a_step_of_its_span() -> None:
    """The lateness of a store read in one piece gets a step that fits its span, although the tasks count by seconds:
    with a single range they do not know that it spans a day."""
    due = np.arange(0, DAY, 10 * SECOND)
    rows = histogram(due // 1000, np.where(due % HOUR == 0, 700, 3))
    points, step = _over_time(rows, 1000)
    assert step == 2 * MINUTE
    assert [point.start_ms for point in points] == list(range(0, DAY, step))
    assert {point.count for point in points} == {12}
    assert {point.max_ms for point in points if point.start_ms % HOUR == 0} == {700}
    assert {point.p50_ms for point in points} == {3}


def waiting(due_ms: list[int]) -> tuple[list[Ahead], int]:
    """The pending messages of one topic by time, as the tasks count them and the driver adds them up."""
    cases = np.zeros(len(due_ms), CASE)
    cases["status"], cases["due_ms"], cases["topic_hash"] = PENDING, due_ms, 5
    parts = [Figures.of(part, 1000, 0) for part in np.array_split(cases, 3)]
    return _due_by_step(Figures.added(parts).pending_by_topic, {5: "orders"})


def test_what_is_ahead_in_the_next_minutes_is_told_by_seconds() -> None:
    found, step = waiting([HOUR + 500 * i for i in range(200)])
    assert step == SECOND
    assert [(one.start_ms, one.topic, one.count) for one in found] == [
        (HOUR + i * SECOND, "orders", 2) for i in range(100)
    ]


def test_what_is_ahead_in_days_is_told_by_bars_that_can_be_seen() -> None:
    found, step = waiting([HOUR * i for i in range(48)])
    assert step == 15 * MINUTE
    assert sum(one.count for one in found) == 48
    # A single message a month ahead does not merge the next two hours into one bar, though the step is no longer one of
    # seconds.
    found, step = waiting([*(30 * SECOND * i for i in range(240)), 30 * DAY])
    assert step == MINUTE
    assert [one.count for one in found] == [2] * 120 + [1]


def test_a_few_deliveries_due_long_before_do_not_make_one_point_of_the_rest() -> None:
    due = np.arange(0, HOUR, SECOND) + 365 * DAY
    rows = histogram(np.concatenate([[0], due // 1000]), np.full(len(due) + 1, 5))
    points, step = _over_time(rows, 1000)
    assert step == 5 * SECOND
    assert len(points) == 721
