"""Goal: for each first number the second number that was added last is found, unless it has become useless.

Method: random pairs, added one by one and many at once, compared with a dictionary."""

from __future__ import annotations

import random

import numpy as np
import pytest

from duemq.scheduler.timers.index import sorted_pairs
from duemq.scheduler.timers.index.sorted_pairs import SortedPairs


@pytest.mark.parametrize("seed", range(20))
def test_pairs_are_found(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(seed)
    monkeypatch.setattr(sorted_pairs, "_MAX_UNSORTED", chance.choice((2, 10, 1000)))
    monkeypatch.setattr(sorted_pairs, "_MOST_SORTED", chance.choice((8, 100, 10_000)))
    least = [0]
    pairs, known = SortedPairs(lambda: least[0]), dict[int, int]()
    for _ in range(60):
        many = [(chance.randrange(200), chance.randrange(1000)) for _ in range(chance.choice((0, 1, 3, 40)))]
        if chance.random() < 0.3:
            for first, second in many:
                pairs.add_one(first, second)
        else:
            array = np.array(many, np.int64).reshape(-1, 2)
            pairs.add(array[:, 0], array[:, 1])
        for first, second in many:
            known[first] = second
        least[0] = chance.choice((least[0], least[0] + 10))
        for first in range(200):
            if known.get(first, -1) >= least[0]:
                assert pairs.find(first) == known[first]
            elif first not in known:
                assert pairs.find(first) is None


def test_what_is_of_no_use_goes() -> None:
    least = [0]
    pairs = SortedPairs(lambda: least[0])
    for start in range(0, 100_000, 5000):
        least[0] = max(0, start - 10_000)
        pairs.add(np.arange(start, start + 5000), np.arange(start, start + 5000))
        assert len(pairs) <= 25_000
