from __future__ import annotations

import pytest

from duemq import ArgumentError, Retries


def test_pauses_grow_to_the_longest_and_are_spread() -> None:
    retries = Retries(first_pause=0.1, longest_pause=1.0, jitter=0.0)
    assert [retries.pause(failures) for failures in (1, 2, 3, 4, 5, 1000)] == [0.1, 0.2, 0.4, 0.8, 1.0, 1.0]
    spread = {Retries(jitter=0.5).pause(9) for _ in range(100)}
    assert 0.5 <= min(spread) < max(spread) <= 1.0


@pytest.mark.parametrize(
    "options",
    [
        {"times": -1},
        {"times": 1.5},
        {"times": True},
        {"first_pause": 0},
        {"first_pause": 2.0},
        {"longest_pause": 0.01},
        {"jitter": 1.1},
        {"jitter": -0.1},
    ],
)
def test_wrong_ones_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ArgumentError):
        Retries(**options)  # type: ignore[arg-type]
