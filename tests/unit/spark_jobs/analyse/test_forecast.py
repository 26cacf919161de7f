"""The forecast, compared with a second-by-second simulation of a broker."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from duemq.spark_jobs.analyse.forecast import MAX_LISTED, Episode, Load, backlog, forecast, measured_rate

START = 1_700_000_000
DUE = st.dictionaries(st.integers(0, 60), st.integers(1, 200), min_size=1, max_size=40)
RATES = st.sampled_from((1.0, 3.5, 16.0, 64.0, 1000.0))


def play(due: dict[int, int], rate: float) -> dict[int, float]:
    """Messages left at the end of each second, for a broker that does `rate` of them per second."""
    left, found = 0.0, {}
    for second in range(max(due) + 1):
        left = max(left + due.get(second, 0) - rate, 0.0)
        found[second] = left
    return found


def arrays(due: dict[int, int]) -> tuple[np.ndarray, np.ndarray]:
    seconds = sorted(due)
    return np.array(seconds, np.int64) + START, np.array([due[second] for second in seconds], np.int64)


@given(DUE, RATES)
def test_what_is_left_is_what_a_broker_has_left(due: dict[int, int], rate: float) -> None:
    played = play(due, rate)
    np.testing.assert_allclose(backlog(*arrays(due), rate), [played[second] for second in sorted(due)], atol=1e-6)


@given(DUE, RATES)
def test_late_seconds_and_episodes(due: dict[int, int], rate: float) -> None:
    played, found = play(due, rate), forecast([Load(*arrays(due), rate)])
    late = {second: math.ceil(left / rate * 1000) for second, left in played.items() if left > 0 and second in due}
    assert {row.second_ms // 1000 - START: (row.late_ms, row.due) for row in found.late_seconds} == {
        second: (ms, due[second]) for second, ms in late.items()
    }
    assert found.messages == sum(due.values())
    assert found.late_messages == sum(min(due[second], math.ceil(played[second])) for second in late)
    # An episode lasts as long as the broker has a backlog.
    covered = [s for e in found.episodes for s in late if e.start_ms <= (START + s) * 1000 < e.end_ms]
    assert sorted(covered) == sorted(late), "each late second is in one episode"
    for one, following in zip(found.episodes, found.episodes[1:], strict=False):
        assert one.end_ms <= following.start_ms
    for episode in found.episodes:
        mine = [s for s in late if episode.start_ms <= (START + s) * 1000 < episode.end_ms]
        assert episode.worst_ms == max(late[second] for second in mine)
        assert episode.messages == sum(due[second] for second in mine)
        assert episode.end_ms == (START + mine[-1] + 1) * 1000 + late[mine[-1]]


def test_a_burst_is_late_by_what_it_takes() -> None:
    found = forecast([Load(np.array([START, START + 100]), np.array([1000, 5]), 100.0)])
    (second,), (episode,) = found.late_seconds, found.episodes
    assert (second.second_ms, second.late_ms) == (START * 1000, 9000)
    assert (episode.start_ms, episode.end_ms, episode.worst_ms) == (START * 1000, (START + 10) * 1000, 9000)
    assert found.late_messages == 900


def test_the_worst_are_listed() -> None:
    seconds = np.arange(0, 3 * MAX_LISTED * 10, 10) + START
    due = np.arange(len(seconds)) % 7 + 2
    found = forecast([Load(seconds, due, 1.0)])
    assert len(found.late_seconds) == len(found.episodes) == MAX_LISTED
    assert [row.second_ms for row in found.late_seconds] == sorted(row.second_ms for row in found.late_seconds)
    assert min(row.late_ms for row in found.late_seconds) >= 5000


def test_nothing_ahead_and_no_rate() -> None:
    nothing = forecast([Load(np.zeros(0, np.int64), np.zeros(0, np.int64), 10.0)])
    assert (nothing.messages, nothing.late_seconds, nothing.episodes) == (0, [], [])
    unknown = forecast([Load(np.array([START]), np.array([5]), 0.0)])
    assert (unknown.messages, unknown.late_messages, unknown.episodes) == (5, 0, [])


@given(st.lists(st.tuples(DUE, RATES), max_size=4))
def test_brokers_do_not_help_each_other(brokers: list[tuple[dict[int, int], float]]) -> None:
    """The backlog of each broker is played by itself: a second is late if it is late at any broker, and by as much as
    at the latest."""
    found = forecast([Load(*arrays(due), rate) for due, rate in brokers])
    late: dict[int, list[tuple[int, int]]] = {}
    behind = Counter[int]()
    messages = 0
    for due, rate in brokers:
        for second, left in play(due, rate).items():
            if left > 0 and second in due:
                late.setdefault(second, []).append((due[second], math.ceil(left / rate * 1000)))
                messages += min(due[second], math.ceil(left))
                behind[second] += due[second]
    assert {row.second_ms // 1000 - START: (row.due, row.late_ms) for row in found.late_seconds} == {
        second: (sum(count for count, _ in rows), max(ms for _, ms in rows)) for second, rows in late.items()
    }
    assert (found.messages, found.late_messages) == (sum(sum(due.values()) for due, _ in brokers), messages)
    assert found.rate == sum(rate for _, rate in brokers)
    for one, following in zip(found.episodes, found.episodes[1:], strict=False):
        assert one.end_ms <= following.start_ms
    for one in found.episodes:
        mine = [second for second in late if one.start_ms <= (START + second) * 1000 < one.end_ms]
        worst = max(ms for second in mine for _, ms in late[second])
        ends = [(START + second + 1) * 1000 + ms for second in mine for _, ms in late[second]]
        assert one == Episode(min(START + s for s in mine) * 1000, max(ends), sum(behind[s] for s in mine), worst)
    assert sum(one.messages for one in found.episodes) == sum(behind.values())


def test_rates_of_several_brokers() -> None:
    """The rates of several brokers add up; if some are the fastest seen, and others measured, the sum counts as the
    fastest seen."""
    seconds, due = np.array([START]), np.array([5])
    for sources, told in (
        (["given", "given"], "given"),
        (["measured", "measured"], "measured"),
        (["measured", "fastest"], "fastest"),
    ):
        found = forecast([Load(seconds, due, 2.0, 3, source) for source in sources])
        assert (found.rate, found.measured_seconds, found.source) == (4.0, 6, told)
    # A broker that has never delivered anything says nothing about the rates of the others.
    quiet = Load(seconds, due, 0.0, 0, "fastest")
    assert forecast([Load(seconds, due, 2.0, 3, "measured"), quiet]).source == "measured"


def rate_of(rows: list[tuple[int, int, int]]) -> tuple[float, int]:
    seconds, delivered, late = (np.array([row[i] for row in rows], np.int64) for i in range(3))
    return measured_rate(seconds, delivered, late)


def test_the_rate_is_that_of_seconds_that_were_busy_throughout() -> None:
    assert rate_of([]) == (0.0, 0)
    # Without a backlog: the fastest second there was.
    assert rate_of([(1, 10, 0), (2, 70, 0), (5, 30, 1)]) == (70.0, 0)
    # The first and the last second of a backlog were not busy all the time.
    busy = [(1, 5, 5), (2, 900, 900), (3, 1000, 990), (4, 1100, 1100), (5, 20, 20), (9, 3000, 0)]
    assert rate_of(busy) == (1000.0, 3)
    # Two seconds with a gap between are no backlog.
    assert rate_of([(1, 50, 50), (3, 60, 60), (5, 70, 70)]) == (70.0, 0)
