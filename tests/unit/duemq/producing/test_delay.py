"""Never early: with any broker, a delay is kept to the millisecond or refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from duemq import ArgumentError, DelayError
from duemq._producing.delay import (
    Delays,
    DelaySpec,
    TopicLevels,
    make_plan,
    read_delay_spec,
    read_delays,
    read_topic_levels,
)
from duemq.protocol.frames.command import Command
from duemq.protocol.requests.bodies import TopicConfig
from duemq.scheduler.levels.table import DelayLevels

NOW = 1_800_000_000_000
OLD = Delays((1_000, 5_000, 60_000))
TIMERS = Delays((1_000, 5_000, 60_000), timers=True)
OWN = TopicLevels("T", (60_000, 1_000))
WITH_OWN = replace(OLD, own=OWN)


def config(text: str, language: str = "JAVA", version: int = 407) -> Delays:
    return read_delays(Command(code=0, language=language, version=version, body=text.encode()))


@pytest.mark.parametrize(
    ("text", "language", "version", "timers"),
    [
        ("messageDelayLevel=1s 5s 1m\n", "JAVA", 407, False),
        ("messageDelayLevel=1s 5s 1m\ntimerWheelEnable=true\n", "JAVA", 479, True),
        ("messageDelayLevel=1s 5s 1m\ntimerWheelEnable=false\n", "JAVA", 479, False),
        # A 4.9 broker with this setting in its file shows it, but ignores it.
        ("messageDelayLevel=1s 5s 1m\ntimerWheelEnable=true\n", "JAVA", 407, False),
        ("a=b=c\n#x\n\ntimerWheelEnable = TRUE\r\nmessageDelayLevel = 1s 5s  1m\r\n", "PYTHON", 407, True),
        ("messageDelayLevel=1s 5s 1m\n", "PYTHON", 407, False),
    ],
)
def test_the_brokers_settings_tell_its_delays(text: str, language: str, version: int, timers: bool) -> None:
    expected = Delays((1_000, 5_000, 60_000), timers, language == "PYTHON", language == "PYTHON")
    assert config(text, language, version) == expected


@pytest.mark.parametrize("text", ["", "\xff", "messageDelayLevel=", "messageDelayLevel=1s soon"])
def test_a_broker_that_does_not_tell_has_none(text: str) -> None:
    assert config(text, "JAVA", 479) == Delays()


def own_levels(text: str) -> tuple[int, ...] | None:
    levels = read_topic_levels("T", TopicConfig("T", attributes={"delay.levels": text}))
    return None if levels is None else levels.levels_ms


@pytest.mark.parametrize("text", ["1m 1s", " 1m\t 1s ", "1d", "0s", "", " ", "1m soon", "1.5m", "1h30m", "250ms",
                                  "1m,1s", "1M", "+1m", "1234567890s", "٣s"])  # fmt: skip
def test_a_topics_table_is_read_as_the_broker_reads_it(text: str) -> None:
    """A topic's table is read as the broker reads it: accepting a table that the broker ignores would give the wrong
    level."""
    try:
        table = DelayLevels(text)
    except ValueError:
        assert own_levels(text) is None
    else:
        assert own_levels(text) == tuple(table.delay_ms(level) for level in range(1, table.maximum + 1))


@pytest.mark.parametrize("attributes", [None, {}, {"cleanup.policy": "COMPACTION"}])
def test_most_topics_have_no_table(attributes: dict[str, str] | None) -> None:
    assert read_topic_levels("T", TopicConfig("T", attributes=attributes)) is None


@pytest.mark.parametrize(
    ("arguments", "spec"),
    [
        ((None, None, None), DelaySpec()),
        ((3, None, None), DelaySpec(level=3)),
        ((None, 5, None), DelaySpec(delay_ms=5_000)),
        ((None, "1m", None), DelaySpec(delay_ms=60_000)),
        ((None, 0, None), DelaySpec()),
        ((None, None, 5.0), DelaySpec(time_ms=5_000)),
    ],
)
def test_a_wish_is_read(arguments: tuple[Any, Any, Any], spec: DelaySpec) -> None:
    assert read_delay_spec(*arguments) == spec


@pytest.mark.parametrize("arguments", [(0, None, None), (-1, None, None), (True, None, None), ("3", None, None),
                                       (3, 5, None), (None, 5, 5.0), (3, None, 5.0), (None, -5, None)])  # fmt: skip
def test_a_wish_that_makes_no_sense_is_refused(arguments: tuple[Any, Any, Any]) -> None:
    with pytest.raises(ArgumentError):
        read_delay_spec(*arguments)


def planned(spec: DelaySpec, delays: Delays, elapsed_ms: int = 0) -> tuple[dict[str, str], int | None]:
    """Return the properties and the deliver time of a plan. `elapsed_ms`: time since the call."""
    plan = make_plan(spec, delays, NOW + elapsed_ms, "h:1", elapsed_ms)
    return plan.properties, plan.due_time_ms


def delay(milliseconds: int) -> DelaySpec:
    return DelaySpec(delay_ms=milliseconds)


@pytest.mark.parametrize(
    ("spec", "delays", "waits"),
    [
        (DelaySpec(), OLD, False),
        (DelaySpec(level=1), OLD, True),
        (DelaySpec(level=1), Delays(), True),
        (delay(5_000), OLD, True),
        (delay(7_000), TIMERS, True),
        (DelaySpec(time_ms=NOW - 1), OLD, False),
        (DelaySpec(time_ms=NOW + 1), TIMERS, True),
        (DelaySpec(replaces=True), replace(TIMERS, replaces=True), False),
        (DelaySpec(delay_ms=7_000, replaces=True), replace(TIMERS, replaces=True), True),
    ],
)
def test_a_plan_knows_whether_the_message_waits(spec: DelaySpec, delays: Delays, waits: bool) -> None:
    assert make_plan(spec, delays, NOW, "h:1").waits is waits


def test_at_once_needs_nothing() -> None:
    assert planned(DelaySpec(), Delays()) == ({}, None)


def test_a_delay_that_equals_a_level_is_sent_as_that_level_where_there_are_no_timers() -> None:
    assert planned(delay(5_000), OLD) == ({"DELAY": "2", "DUE_MS": str(NOW + 5_000)}, NOW + 5_000)
    assert planned(delay(5_000), TIMERS) == ({"TIMER_DELAY_MS": "5000"}, NOW + 5_000)


def test_a_broker_with_timers_gets_a_delay_as_a_delay_and_a_time_as_a_time() -> None:
    """A delay is sent as a delay, and a time as a time, so that a delay counts by the broker's clock:
    the sender's may be slow or fast."""
    assert planned(delay(5_001), TIMERS) == ({"TIMER_DELAY_MS": "5001"}, NOW + 5_001)
    assert planned(DelaySpec(time_ms=NOW + 5_000), TIMERS) == ({"TIMER_DELIVER_MS": str(NOW + 5_000)}, NOW + 5_000)


def test_a_retried_send_keeps_its_first_due_time() -> None:
    assert planned(delay(5_001), TIMERS, 700) == ({"TIMER_DELAY_MS": "4301"}, NOW + 5_001)
    # Once that time has passed, the properties still say that the message was to be delayed.
    assert planned(delay(5_001), TIMERS, 9_000)[0] == {"TIMER_DELAY_MS": "1"}


def test_without_timers_the_error_names_the_levels() -> None:
    with pytest.raises(
        DelayError, match=r"the broker h:1 cannot keep a delay of 7s: .* delay levels 1s 5s 1m$"
    ) as caught:
        planned(delay(7_000), OLD)
    assert caught.value.levels_ms == OLD.levels_ms
    with pytest.raises(DelayError, match="cannot keep a time of delivery"):
        planned(DelaySpec(time_ms=NOW + 5_000), OLD)
    with pytest.raises(DelayError, match="delay levels none"):
        planned(delay(5_000), Delays())


@pytest.mark.parametrize("delays", [WITH_OWN, replace(TIMERS, own=OWN)])
def test_a_topics_own_table_is_the_one_that_counts(delays: Delays) -> None:
    assert planned(delay(60_000), WITH_OWN)[0]["DELAY"] == "1"
    assert planned(DelaySpec(level=1), delays) == ({"DELAY": "1", "DUE_MS": str(NOW + 60_000)}, NOW + 60_000)
    with pytest.raises(DelayError, match=r"has no delay level 3 for the topic T, only 2: 1m 1s$") as caught:
        planned(DelaySpec(level=3), delays)
    assert caught.value.levels_ms == OWN.levels_ms


def test_what_is_not_in_the_topics_table_needs_timers() -> None:
    for milliseconds, text in ((7_000, "7s"), (5_000, "5s")):
        with pytest.raises(
            DelayError, match=rf"keep a delay of {text}: .* 1m 1s of the topic T; the broker's own .*: 1s 5s 1m$"
        ) as caught:
            planned(delay(milliseconds), WITH_OWN)
        assert caught.value.levels_ms == OWN.levels_ms
        assert "TIMER_DELAY_MS" in planned(delay(milliseconds), replace(TIMERS, own=OWN))[0]
    with pytest.raises(DelayError, match="keep a time of delivery"):
        planned(DelaySpec(time_ms=NOW + 60_000), WITH_OWN)


def test_a_time_that_has_passed_is_at_once_at_any_broker() -> None:
    """A time that has passed means delivery at once at any broker. A broker with timers decides itself whether it has
    passed, since the sender's clock may be fast."""
    for delays in (OLD, Delays()):
        assert planned(DelaySpec(time_ms=NOW), delays) == ({"DUE_MS": str(NOW)}, NOW)
    assert planned(DelaySpec(time_ms=NOW), TIMERS) == ({"TIMER_DELIVER_MS": str(NOW)}, NOW)


def test_a_level_is_checked_against_the_table_since_brokers_take_the_last_one_instead() -> None:
    assert planned(DelaySpec(level=3), OLD) == ({"DELAY": "3", "DUE_MS": str(NOW + 60_000)}, NOW + 60_000)
    with pytest.raises(DelayError, match="has no delay level 4, only 3: 1s 5s 1m"):
        planned(DelaySpec(level=4), OLD)


def test_a_level_is_trusted_where_the_broker_does_not_tell_its_table() -> None:
    assert planned(DelaySpec(level=4), Delays()) == ({"DELAY": "4"}, None)


TABLES = st.lists(st.integers(1, 20) | st.integers(1, 10**7), unique=True, max_size=18)


@given(st.integers(1, 20) | st.integers(1, 10**9), st.booleans(), TABLES, st.none() | TABLES.filter(bool))
def test_no_plan_is_early(milliseconds: int, timers: bool, brokers: list[int], topics: list[int] | None) -> None:
    own = None if topics is None else TopicLevels("T", tuple(topics))
    delays, levels = Delays(tuple(brokers), timers, own=own), brokers if topics is None else topics
    try:
        properties, due = planned(delay(milliseconds), delays)
    except DelayError:
        assert not timers
        assert milliseconds not in levels
        return
    kept = levels[int(properties["DELAY"]) - 1] if "DELAY" in properties else int(properties["TIMER_DELAY_MS"])
    assert kept == milliseconds
    assert due == NOW + milliseconds
