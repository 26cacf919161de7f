"""Histograms of lateness, compared with numpy over the values themselves."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from duemq.spark_jobs.audit.lateness import HISTOGRAM, added, bins_of, histogram, stats, value_of

MS = st.one_of(st.integers(-2000, 2000), st.integers(-(2**40), 2**40), st.integers(0, 255))
PERCENTS = (0, 1, 50, 90, 99, 99.9, 100)


@given(st.lists(MS, min_size=1, max_size=300))
def test_percentiles_are_right_to_one_percent(values: list[int]) -> None:
    ms = np.array(values, np.int64)
    ((key, found),) = stats(histogram(np.full(len(ms), 7), ms), PERCENTS)
    assert key == 7
    assert (found.number, found.early, found.greatest) == (len(ms), (ms < 0).sum(), ms.max())
    assert found.mean == float(ms.sum() / len(ms))
    for percent, told in zip(PERCENTS, found.percentiles, strict=True):
        exact = int(np.percentile(ms, percent, method="inverted_cdf"))
        assert abs(told - exact) <= abs(exact) // 100, (percent, told, exact)
    # The maximum is kept apart; a bin is represented by its value farthest from 0.
    assert found.percentiles[-1] == ms.max() or ms.max() < 0


@given(st.lists(st.integers(-255, 255), min_size=1))
def test_up_to_a_quarter_of_a_second_they_are_exact(values: list[int]) -> None:
    ms = np.array(values, np.int64)
    ((_, found),) = stats(histogram(np.zeros(len(ms), np.int64), ms), PERCENTS)
    assert found.percentiles == [int(np.percentile(ms, p, method="inverted_cdf")) for p in PERCENTS]


@given(st.lists(st.tuples(st.integers(0, 3), MS), max_size=60), st.lists(st.integers(0, 60), max_size=4))
def test_parts_add_up_to_the_whole(rows: list[tuple[int, int]], cuts: list[int]) -> None:
    key, ms = (np.array([row[i] for row in rows], np.int64) for i in (0, 1))
    whole = histogram(key, ms)
    bounds = [0, *sorted(cuts), len(rows)]
    parts = [histogram(key[a:b], ms[a:b]) for a, b in itertools.pairwise(bounds)]
    assert added(parts).tobytes() == whole.tobytes()
    assert added([whole]).tobytes() == whole.tobytes()
    for number, found in stats(whole, (50,)):
        assert found.number == (key == number).sum()
        assert found.greatest == ms[key == number].max()


@given(st.lists(MS, min_size=1))
def test_bins_are_in_the_order_of_their_values_and_hold_them(values: list[int]) -> None:
    ms = np.array(sorted(values), np.int64)
    bins = bins_of(ms)
    assert (np.diff(bins) >= 0).all()
    edge = value_of(bins)
    assert (np.abs(edge) >= np.abs(ms)).all()
    assert (bins_of(edge) == bins).all()
    assert (np.sign(edge) == np.sign(ms)).all()


def test_nothing_adds_up_to_nothing() -> None:
    assert len(added([])) == 0
    assert added([np.zeros(0, HISTOGRAM)]).dtype == HISTOGRAM
    assert list(stats(added([]), (50,))) == []
