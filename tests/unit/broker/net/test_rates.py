"""How many requests a second somebody may make, and what that keeps."""

from __future__ import annotations

import random

from duemq.broker.net.rates import Rates


def test_as_many_at_once_as_in_a_second_and_then_by_the_time() -> None:
    rates: Rates[str] = Rates()
    assert rates.take("a", 25, 10, 1e6) == 10
    assert rates.take("a", 1, 10, 1e6) == 0
    assert rates.take("b", 4, 10, 1e6) == 4, "each name has its own"
    assert rates.take("a", 9, 10, 1e6 + 0.5) == 5
    assert rates.take("a", 99, 10, 1e6 + 60) == 10, "a pause is not saved up"


def test_what_was_given_back_can_be_taken_again() -> None:
    rates: Rates[str] = Rates()
    assert rates.take("a", 10, 10, 0.0) == 10
    rates.give_back("a", 3, 10)
    assert rates.take("a", 9, 10, 0.0) == 3


def test_a_rate_that_changes_counts_at_once() -> None:
    rates: Rates[str] = Rates()
    assert rates.take("a", 10, 10, 0.0) == 10
    assert rates.take("a", 99, 20, 0.5) == 10
    assert rates.take("a", 99, 1, 0.5) == 0


def test_never_more_than_the_rate_over_any_time() -> None:
    """Beside what may come at once, which is the requests of one second."""
    chance, rates, rate = random.Random(17), Rates[str](), 7
    now, taken = 1e9, 0
    for _ in range(20_000):
        now += chance.expovariate(20)
        taken += rates.take("a", chance.randrange(4), rate, now)
    assert (now - 1e9) * rate - rate <= taken <= (now - 1e9) * rate + rate


def test_names_that_ask_for_nothing_any_more_are_forgotten() -> None:
    rates: Rates[int] = Rates()
    for number in range(100_000):
        assert rates.take(number, 1, 10, number / 1000) == 1
    assert len(rates) < 5000
