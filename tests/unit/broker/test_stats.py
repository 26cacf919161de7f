"""Counters and rates, and the tables from which administrators' tools read them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from duemq.broker.admin.stats import PUT_TIME_LIMITS_MS, Stats
from duemq.broker.settings.config import FIELDS
from duemq.protocol.codes import RequestCode
from duemq.protocol.requests.headers import PullMessage
from duemq.storage.clock import ManualClock
from duemq.storage.queues.pull import Pulled, PullStatus
from tests.support.broker import Peer, UnboundBroker
from tests.support.wire import pull, request, send

DAY_MS = 86_400_000


class Appender:
    """The part of an appender that is counted."""

    appended = 0


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(10 * DAY_MS + 1000)


@pytest.fixture
def appender() -> Appender:
    return Appender()


@pytest.fixture
def stats(appender: Any, clock: ManualClock) -> Stats:
    return Stats(appender, clock)


def test_rates_are_over_ten_seconds_a_minute_and_ten_minutes(
    stats: Stats, clock: ManualClock, appender: Appender
) -> None:
    assert stats.rates("put") == "0.0 0.0 0.0"
    for second in range(1, 121):
        clock.advance(1000)
        appender.appended += 10 if second <= 110 else 100
        stats.sample()
    assert stats.rates("put") == f"100.0 {(50 * 10 + 10 * 100) / 60} {(110 * 10 + 10 * 100) / 120}"


def given(stats: Stats, topic: str, group: str, count: int) -> None:
    header = PullMessage(group, topic, 0, 0, 32, 0, 0, 0, 0)
    stats.pulled(header, Pulled(PullStatus.FOUND, 0, count=count))


def test_the_rate_of_a_group_is_over_the_last_minute(stats: Stats, clock: ManualClock) -> None:
    assert stats.group_rate("T", "g") == 0.0
    for second in range(300):
        given(stats, "T", "g", 10 if second < 200 else 30)
        given(stats, "T", "other", 7)
        clock.advance(1000)
        stats.sample()
        if second == 5:
            assert stats.group_rate("T", "g") == 10.0
        if second == 229:
            assert 19 < stats.group_rate("T", "g") < 21
    assert stats.group_rate("T", "g") == 30.0
    assert stats.group_rate("T", "other") == 7.0
    assert stats.group_rate("U", "g") == 0.0


def test_of_groups_that_read_no_more_nothing_is_kept(stats: Stats, clock: ManualClock) -> None:
    """Nothing is kept of groups that have stopped reading, since clients can make up names."""
    for second in range(1000):
        given(stats, "T", f"made-up-{second}", 1)
        clock.advance(1000)
        stats.sample()
        kept = sum(len(counts) for _, counts in stats._groups_before) + len(stats._by_group)
        assert kept <= 71


def test_setting_the_wall_clock_changes_neither_the_uptime_nor_the_mornings(
    stats: Stats, clock: ManualClock, appender: Appender
) -> None:
    appender.appended = 5
    clock.advance(DAY_MS)
    stats.sample()
    assert stats.day_starts() == ((0, 0), (5, 0))
    for step_ms in (-DAY_MS, DAY_MS):
        clock.set_wall(clock.now_ms() + step_ms)
        appender.appended += 10
        stats.sample()
    assert stats.day_starts() == ((0, 0), (5, 0))
    assert stats.running_ms == DAY_MS


def test_writes_are_counted_by_how_long_they_took(stats: Stats) -> None:
    for seconds in (0.0005, 0.001, 0.009, 0.010, 0.049, 9.999, 10.0, 1000.0):
        stats.add_write(seconds)
    assert stats.put_times == [1, 2, 2, 0, 0, 0, 0, 0, 0, 0, 0, 1, 2]
    assert len(stats.put_times) == len(PUT_TIME_LIMITS_MS) + 1
    assert stats.put_time_max_ms == 1_000_000
    assert stats.put_time_percentile(0.5) == 50.0
    assert stats.put_time_percentile(0.99) == 1_000_000.0


def test_without_writes_there_is_no_percentile(stats: Stats) -> None:
    assert stats.put_time_percentile(0.99) == 0.0


def test_the_counts_of_two_mornings_are_kept(stats: Stats, clock: ManualClock, appender: Appender) -> None:
    assert stats.day_starts() == ((0, 0), (0, 0))
    appender.appended, stats.transferred = 5, 3
    clock.advance(DAY_MS)
    stats.sample()
    assert stats.day_starts() == ((0, 0), (5, 3))
    appender.appended, stats.transferred = 9, 7
    clock.advance(DAY_MS)
    stats.sample()
    assert stats.day_starts() == ((5, 3), (9, 7))


async def test_what_is_put_and_got_is_told(broker: UnboundBroker, peer: Peer) -> None:
    await peer.ask_all([send("T") for _ in range(5)])
    await peer.ask(pull("T", 0))
    await peer.ask(pull("T", 5))
    answer = await peer.ask(request(RequestCode.GET_BROKER_RUNTIME_INFO))
    table = json.loads(bytes(answer.body))["table"]
    assert all(isinstance(value, str) for value in table.values())
    assert (table["msgPutTotalTodayNow"], table["msgGetTotalTodayNow"]) == ("5", "5")
    assert (broker.router._stats.found, broker.router._stats.missed) == (1, 1)
    assert (table["brokerVersionDesc"], table["brokerVersion"], table["brokerActive"]) == ("V4_9_7", "407", "true")
    assert table["scheduleMessageOffset_1"] == "0,0"
    assert table["bootTimestamp"] == table["earliestMessageTimeStamp"] == "1700000000000"


async def test_every_setting_is_told(broker: UnboundBroker, peer: Peer) -> None:
    answer = await peer.ask(request(RequestCode.GET_BROKER_CONFIG))
    lines = dict(line.split("=", 1) for line in bytes(answer.body).decode().splitlines())
    assert set(FIELDS) <= set(lines)
    assert (lines["brokerName"], lines["autoCreateTopicEnable"]) == ("broker-a", "true")
    assert json.loads(answer.ext["version"])["counter"] == 0
