"""Counts of due messages, compared with a plain counter."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest

from duemq.scheduler.timers.index.census import DueCounts

START = 1_700_000_000


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("range_s", [5, 4000, 40 * 86_400])
def test_counts_are_those_of_a_counter(seed: int, range_s: int) -> None:
    chance, counts, model = random.Random(seed), DueCounts(), Counter[int]()
    for _ in range(30):
        if chance.random() < 0.65 or not model:
            due = [START * 1000 + chance.randrange(range_s * 1000) for _ in range(chance.randrange(1, 300))]
            sign = 1
        else:
            due = chance.sample(sorted(model.elements()), chance.randrange(1, model.total() + 1))
            sign = -1
        counts.change(np.array(due), sign)
        model.update(due) if sign > 0 else model.subtract(due)
        model = +model
        now, begin = (START + chance.randrange(-100, range_s) for _ in range(2))
        step, steps = chance.choice((1, 7, 60, 3600, 10_000)), chance.randrange(1, 200)
        expected = Counter[int]()
        for each, number in model.items():
            expected[(max(each // 1000, now) - begin) // step] += number
        *_, curve = counts.curve(begin, step, steps, now)
        assert curve.tolist() == [expected[number] for number in range(steps)]
    counts.change(np.array(sorted(model.elements()), np.int64), -1) if model else None
    assert not counts._rows


def test_a_second_may_have_more_than_sixteen_bits_can_count() -> None:
    counts = DueCounts()
    burst, other = np.full(150_000, START * 1000 + 3), np.array([START * 1000 + 1000])
    counts.change(other, 1)
    for sign, expected in ((1, 150_000), (1, 300_000), (-1, 150_000), (-1, 0)):
        counts.change(burst, sign)
        *_, curve = counts.curve(START, 1, 3, START)
        assert curve.tolist() == [expected, 1, 0]
    counts.change(other, -1)
    assert not counts._rows
    assert not counts._more
