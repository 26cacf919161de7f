"""The clock that users' tests move."""

from __future__ import annotations

import pytest

from duemq.storage.clock import MAX_AHEAD_MS, ManualClock, MovableClock


def test_it_goes_on_and_moves_ahead_with_both_its_times() -> None:
    base = ManualClock()
    clock = MovableClock(base)
    now_ms, monotonic = clock.now_ms(), clock.monotonic()
    assert now_ms == base.now_ms()
    clock.advance(7_200_000)
    assert clock.now_ms() == now_ms + 7_200_000
    assert clock.monotonic() == monotonic + 7200
    base.advance(500)
    clock.advance(0)
    assert clock.now_ms() == now_ms + 7_200_500
    assert clock.monotonic() == monotonic + 7200.5


@pytest.mark.parametrize("ms", [-1, MAX_AHEAD_MS])
def test_it_moves_neither_back_nor_out_of_reach(ms: int) -> None:
    clock = MovableClock(ManualClock())
    clock.advance(1)
    before = clock.now_ms()
    with pytest.raises(ValueError, match="a clock can"):
        clock.advance(ms)
    assert clock.now_ms() == before


def test_by_default_it_is_the_machines() -> None:
    clock = MovableClock()
    first = clock.monotonic()
    assert clock.monotonic() >= first
    assert clock.now_ms() > 1_700_000_000_000
