"""Counters and rates, and the tables from which administrators' tools read them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duemq.broker.admin.stats import PUT_TIME_LIMITS_MS, BrokerStats
from duemq.broker.admin.stats_items import CountTable, StatsItems
from duemq.broker.settings.config import FIELDS
from duemq.protocol.codes import RequestCode, ResponseCode
from duemq.protocol.requests.headers import PullMessage, TopicName, ViewBrokerStatsData
from duemq.storage.clock import ManualClock
from duemq.storage.queues.pull import Pulled, PullStatus
from tests.support.broker import Peer, UnboundBroker
from tests.support.wire import pull, request, send

DAY_MS = 86_400_000


class Appender:
    """The part of an appender that is counted."""

    appended = 0

    @staticmethod
    def take_uncounted() -> list[Any]:
        return []


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(10 * DAY_MS + 1000)


@pytest.fixture
def appender() -> Appender:
    return Appender()


@pytest.fixture
def stats(appender: Any, clock: ManualClock) -> BrokerStats:
    no_reads: Any = None
    return BrokerStats(appender, clock, StatsItems(appender, clock, no_reads, "DefaultCluster"))


def test_rates_are_over_ten_seconds_a_minute_and_ten_minutes(
    stats: BrokerStats, clock: ManualClock, appender: Appender
) -> None:
    assert stats.rates("put") == "0.0 0.0 0.0"
    for second in range(1, 121):
        clock.advance(1000)
        appender.appended += 10 if second <= 110 else 100
        stats.sample()
    assert stats.rates("put") == f"100.0 {(50 * 10 + 10 * 100) / 60} {(110 * 10 + 10 * 100) / 120}"


def pulled(stats: BrokerStats, topic: str, group: str, count: int) -> None:
    header = PullMessage(group, topic, 0, 0, 32, 0, 0, 0, 0)
    stats.pulled(header, Pulled(PullStatus.FOUND, 0, count=count))


def test_the_rate_of_a_group_is_over_the_last_minute(stats: BrokerStats, clock: ManualClock) -> None:
    assert stats.items.group_rate("T", "g") == 0.0
    for second in range(300):
        pulled(stats, "T", "g", 10 if second < 200 else 30)
        pulled(stats, "T", "other", 7)
        clock.advance(1000)
        stats.sample()
        if second == 5:
            assert stats.items.group_rate("T", "g") == 10.0
        if second == 229:
            assert 19 < stats.items.group_rate("T", "g") < 21
    assert stats.items.group_rate("T", "g") == 30.0
    assert stats.items.group_rate("T", "other") == 7.0
    assert stats.items.group_rate("U", "g") == 0.0


def test_groups_that_read_no_more_are_forgotten_after_a_day() -> None:
    """Clients can make up names, so no table grows with all the names that there have ever been."""
    table = CountTable(0.0)
    for second in range(0, 40 * 3600, 10):
        if second % 60 == 0:
            table.add(f"made-up-{second // 60}", 1, 1, 1)
        table.step(float(second))
        assert len(table) <= 27 * 60
    assert len(table) >= 24 * 60
    assert table._counts.nbytes <= 4096 * 1000


@given(
    st.lists(
        st.tuples(
            st.sampled_from("abc"), st.integers(1, 50), st.sampled_from([0, 1, 9, 10, 11, 61, 700, 3600, 80_000])
        ),
        max_size=60,
    )
)
def test_the_counts_of_the_last_minute_hour_and_day(added: list[tuple[str, int, int]]) -> None:
    """A window covers at least its length, or the time since the start, and at most one period more."""
    table, now = CountTable(0.0), 0
    history: list[tuple[int, str, int]] = []
    for key, messages, seconds in added:
        table.add(key, messages, messages * 7, 1)
        history.append((now, key, messages))
        for _ in range(seconds):
            now += 1
            table.step(float(now))
        for asked in "abc":
            windows = table.windows(asked, float(now))
            if windows is None:
                assert not any(k == asked and time >= now - 24 * 3600 for time, k, _ in history)
                continue
            for (counts, covered), (length, period) in zip(
                windows, ((60, 10), (3600, 600), (86400, 3600)), strict=True
            ):
                assert min(now, length) <= covered <= length + period
                mine = [m for time, k, m in history if k == asked and time >= now - covered]
                assert counts == [sum(mine), sum(mine) * 7, len(mine)]


def test_a_deleted_topic_is_forgotten() -> None:
    table = CountTable(0.0)
    table.add("T", 1, 1, 1)
    table.step(10.0)
    table.add("T", 1, 1, 1)
    table.add("U", 2, 2, 1)
    table.remove("T")
    assert table.windows("T", 11.0) is None
    table.add("V", 3, 3, 1)
    table.step(20.0)
    assert [counts for counts, _ in table.windows("V", 21.0) or []] == [[3, 3, 1]] * 3
    assert [counts for counts, _ in table.windows("U", 21.0) or []] == [[2, 2, 1]] * 3


async def stats_data(peer: Peer, name: str, key: str) -> dict[str, Any]:
    answer = await peer.ask(request(RequestCode.VIEW_BROKER_STATS_DATA, ViewBrokerStatsData(name, key)))
    assert answer.code == ResponseCode.SUCCESS, answer.remark
    data: dict[str, Any] = json.loads(bytes(answer.body))
    return data


async def test_counts_by_topic_and_group(broker: UnboundBroker, peer: Peer) -> None:
    await peer.ask_all([send("T", b"x" * 100, queue_id=n % 2) for n in range(6)])
    await peer.ask(send("U"))
    pulled = await peer.ask(pull("T", 0, queue_id=1))
    size = len(pulled.body) * 2
    broker.clock.advance(5000)
    await peer.ask(send("T", properties="DELAY\x011\x02"))
    for name, key, expected, calls in (
        ("TOPIC_PUT_NUMS", "T", 6, 6),
        ("TOPIC_PUT_SIZE", "T", size, 6),
        ("TOPIC_PUT_NUMS", "U", 1, 1),
        ("TOPIC_PUT_NUMS", "SCHEDULE_TOPIC_XXXX", 1, 1),
        ("GROUP_GET_NUMS", "T@consumers", 3, 1),
        ("GROUP_GET_SIZE", "T@consumers", len(pulled.body), 1),
        ("BROKER_PUT_NUMS", "DefaultCluster", 8, 8),
        ("BROKER_GET_NUMS", "DefaultCluster", 3, 1),
    ):
        data = await stats_data(peer, name, key)
        assert list(data) == ["statsDay", "statsHour", "statsMinute"]
        for window in data.values():
            assert window == {"avgpt": expected / calls, "sum": expected, "tps": expected / 5}, name


async def test_a_deleted_topic_has_no_counts(peer: Peer) -> None:
    await peer.ask_all([send("T"), send("U")])
    await peer.ask(pull("T", 0))
    await peer.ask(send("T"))
    await peer.ask(request(RequestCode.DELETE_TOPIC_IN_BROKER, TopicName("T")))
    for name, key in (("TOPIC_PUT_NUMS", "T"), ("TOPIC_PUT_NUMS", "no-topic"), ("MADE_UP", "T")):
        answer = await peer.ask(request(RequestCode.VIEW_BROKER_STATS_DATA, ViewBrokerStatsData(name, key)))
        assert (answer.code, answer.remark) == (ResponseCode.SYSTEM_ERROR, f"The stats <{name}> <{key}> not exist")
    assert (await stats_data(peer, "TOPIC_PUT_NUMS", "U"))["statsDay"]["sum"] == 1


def test_setting_the_wall_clock_changes_neither_the_uptime_nor_the_mornings(
    stats: BrokerStats, clock: ManualClock, appender: Appender
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


def test_writes_are_counted_by_how_long_they_took(stats: BrokerStats) -> None:
    for seconds in (0.0005, 0.001, 0.009, 0.010, 0.049, 9.999, 10.0, 1000.0):
        stats.add_write(seconds)
    assert stats.put_times == [1, 2, 2, 0, 0, 0, 0, 0, 0, 0, 0, 1, 2]
    assert len(stats.put_times) == len(PUT_TIME_LIMITS_MS) + 1
    assert stats.put_time_max_ms == 1_000_000
    assert stats.put_time_percentile(0.5) == 50.0
    assert stats.put_time_percentile(0.99) == 1_000_000.0


def test_without_writes_there_is_no_percentile(stats: BrokerStats) -> None:
    assert stats.put_time_percentile(0.99) == 0.0


def test_the_counts_of_two_mornings_are_kept(stats: BrokerStats, clock: ManualClock, appender: Appender) -> None:
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
