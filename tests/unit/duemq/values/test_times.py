from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duemq import ArgumentError
from duemq._values.times import begin_ms, now_ms, span_ms, time_ms


@pytest.mark.parametrize(
    ("span", "milliseconds"),
    [
        (5, 5_000),
        (1.1, 1_100),  # 1.1 * 1000 is a little more than 1100
        (0.0001, 1),
        (0, 0),
        ("1h30m", 5_400_000),
        (timedelta(minutes=2), 120_000),
        (timedelta(microseconds=1), 1),
        (timedelta(milliseconds=7), 7),
    ],
)
def test_a_span_is_rounded_up_to_the_millisecond(span: Any, milliseconds: int) -> None:
    assert span_ms(span) == milliseconds


@pytest.mark.parametrize("span", [1e306, 10**400, -(10**400)])
def test_a_span_beyond_all_floats_is_refused(span: Any) -> None:
    """These were an OverflowError."""
    with pytest.raises(ArgumentError, match="too long"):
        span_ms(span)


def test_the_longest_timedelta_is_a_span() -> None:
    assert span_ms(timedelta.max) == 10**9 * 24 * 60 * 60 * 1000


@pytest.mark.parametrize("span", [-1, -0.5, timedelta(seconds=-1), float("nan"), float("inf"), True, None, b"5s", "5"])
def test_what_is_no_span_is_refused(span: Any) -> None:
    with pytest.raises(ArgumentError):
        span_ms(span)


@given(st.integers(min_value=0, max_value=4_000_000_000_000))
def test_a_time_in_seconds_keeps_its_milliseconds(milliseconds: int) -> None:
    assert time_ms(milliseconds / 1000) == milliseconds


def test_a_time_may_be_a_datetime_with_a_zone() -> None:
    assert time_ms(datetime(2030, 1, 1, 0, 0, 0, 250_000, tzinfo=UTC)) == 1_893_456_000_250


@pytest.mark.parametrize(
    "moment", [datetime(2030, 1, 1), -1, float("nan"), float("inf"), 10**400, True, "2030-01-01", None]
)
def test_what_is_no_time_or_has_no_zone_is_refused(moment: Any) -> None:
    with pytest.raises(ArgumentError):
        time_ms(moment)


def test_milliseconds_in_place_of_seconds_are_noticed() -> None:
    with pytest.raises(ArgumentError, match="looks like milliseconds"):
        time_ms(now_ms())


def test_what_begins_at_a_time_begins_with_its_millisecond() -> None:
    assert [begin_ms(time) for time in (1.0, 1.0015, 1.0019999)] == [1000, 1001, 1002]
    assert begin_ms(datetime(2023, 11, 14, 22, 13, 20, 1999, tzinfo=UTC)) == 1_700_000_000_001
    with pytest.raises(ArgumentError):
        begin_ms(-1)
