"""The times at which recurring messages are delivered."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import pairwise
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duemq.protocol.errors import TimerIllegal
from duemq.protocol.records import recurrence
from duemq.protocol.records.recurrence import RecurrenceRule
from duemq.scheduler.recurring.times import next_ms

NONE = RecurrenceRule(0, "", "UTC", None, None, None, None)
TIMES = st.integers(0, 4_000_000_000_000)


def ms(text: str, zone: str = "UTC") -> int:
    return int(datetime.fromisoformat(text).replace(tzinfo=ZoneInfo(zone)).timestamp() * 1000)


def times(cron: str, zone: str, after: str, count: int) -> list[str]:
    """Return the next deliveries, in the zone's own time with its offset."""
    found, after_ms = [], ms(after, zone)
    for _ in range(count):
        following = next_ms(NONE._replace(cron=cron, zone=zone), after_ms)
        assert following is not None
        after_ms = following
        found.append(datetime.fromtimestamp(after_ms / 1000, UTC).astimezone(ZoneInfo(zone)).isoformat())
    return found


@given(every=st.integers(1000, recurrence.MAX_EVERY_MS), start=TIMES, after=TIMES)
def test_every_keeps_the_beat_of_its_start(every: int, start: int, after: int) -> None:
    found = next_ms(NONE._replace(every_ms=every, start_ms=start), after)
    assert found is not None
    assert found > after
    assert found >= start
    assert (found - start) % every == 0
    assert found - every <= after or found == start


@given(every=st.integers(1000, recurrence.MAX_EVERY_MS), after=TIMES)
def test_without_a_start_the_first_delivery_is_one_duration_ahead(every: int, after: int) -> None:
    assert next_ms(NONE._replace(every_ms=every), after) == after + every


@given(
    minute=st.sampled_from(["*", "*/7", "0", "5,50", "10-20"]),
    hour=st.sampled_from(["*", "*/5", "3", "0,23"]),
    day=st.sampled_from(["*", "1", "15,31", "L"]),
    week_day=st.sampled_from(["*", "MON-FRI", "0", "6,2"]),
    after=st.integers(ms("2024-01-01T00:00:00"), ms("2030-01-01T00:00:00")),
)
def test_cron_finds_the_first_minute_that_matches(minute: str, hour: str, day: str, week_day: str, after: int) -> None:
    found = next_ms(NONE._replace(cron=f"{minute} {hour} {day} * {week_day}"), after)
    at = datetime.fromtimestamp(after // 60_000 * 60, UTC)
    while True:
        at += timedelta(minutes=1)
        days = [at.day in _numbers(day, at), (at.isoweekday() % 7) in _numbers(week_day, at)]
        # As in cron: with both a day of the month and a day of the week, one of them is enough.
        right_day = any(days) if "*" not in (day, week_day) else all(days)
        if not right_day:
            at = at.replace(hour=23, minute=59)
            continue
        if at.hour not in _numbers(hour, at, 24):
            at = at.replace(minute=59)
            continue
        if at.minute in _numbers(minute, at, 60):
            break
    assert found == int(at.timestamp() * 1000)


def _numbers(field: str, at: datetime, most: int = 32) -> set[int]:
    if field == "L":
        return {at.day} if (at + timedelta(days=1)).day == 1 else set()
    if field == "MON-FRI":
        return {1, 2, 3, 4, 5}
    if field.startswith("*"):
        return set(range(0, most, int(field[2:] or "1")))
    if "-" in field:
        first, last = field.split("-")
        return set(range(int(first), int(last) + 1))
    return set(map(int, field.split(",")))


def test_a_time_that_does_not_exist_is_moved_behind_the_gap() -> None:
    assert times("30 2 * * *", "Europe/Paris", "2026-03-28T03:00:00", 2) == [
        "2026-03-29T03:00:00+02:00",
        "2026-03-30T02:30:00+02:00",
    ]


def test_a_time_that_comes_twice_counts_once() -> None:
    assert times("30 2 * * *", "Europe/Paris", "2026-10-24T03:00:00", 2) == [
        "2026-10-25T02:30:00+02:00",
        "2026-10-26T02:30:00+01:00",
    ]


def test_every_half_hour_goes_on_through_the_change() -> None:
    found = times("*/30 * * * *", "Europe/Paris", "2026-10-25T01:45:00", 6)
    moments = [datetime.fromisoformat(text) for text in found]
    assert {later - sooner for sooner, later in pairwise(moments)} == {timedelta(minutes=30)}


def test_six_fields_have_seconds() -> None:
    assert times("*/20 * * * * *", "UTC", "2026-01-01T00:00:05", 3) == [
        "2026-01-01T00:00:20+00:00",
        "2026-01-01T00:00:40+00:00",
        "2026-01-01T00:01:00+00:00",
    ]


def test_start_and_end_bound_it() -> None:
    daily = NONE._replace(cron="0 9 * * *", start_ms=ms("2026-05-01T09:00:00"), end_ms=ms("2026-05-02T09:00:00"))
    assert next_ms(daily, ms("2026-01-01T00:00:00")) == ms("2026-05-01T09:00:00")
    assert next_ms(daily, ms("2026-05-01T09:00:00")) == ms("2026-05-02T09:00:00")
    assert next_ms(daily, ms("2026-05-02T09:00:00")) is None


@pytest.mark.parametrize("after_ms", [253_370_764_800_000, 2**53])
def test_there_is_an_end_of_time(after_ms: int) -> None:
    assert next_ms(NONE._replace(cron="* * * * *"), after_ms) is None
    assert next_ms(NONE._replace(every_ms=1000), after_ms) is None


@given(st.text(max_size=30))
def test_any_text_is_an_expression_or_refused(cron: str) -> None:
    if not cron:
        return
    try:
        found = next_ms(NONE._replace(cron=cron), 1_700_000_000_000)
    except TimerIllegal:
        return
    assert found is None or found > 1_700_000_000_000


@given(st.text(max_size=30))
def test_any_text_is_a_zone_or_refused(zone: str) -> None:
    try:
        next_ms(NONE._replace(cron="* * * * *", zone=zone or "UTC"), 1_700_000_000_000)
    except TimerIllegal:
        return


@given(
    st.lists(st.sampled_from(["TIMER_EVERY\x01", "1s", "TIMER_CRON\x01", "\x02", "TIMER_COUNT\x01", "9", "\x00", "٣"]))
)
def test_any_properties_are_read_or_refused(parts: list[str]) -> None:
    text = "".join(parts)
    if recurrence.recurs(text):
        try:
            recurrence.read(text)
        except TimerIllegal:
            return
