"""Noticing that somebody set the wall clock."""

from __future__ import annotations

from typing import Final

from storage.clock import Clock

TOLERANCE_MS: Final = 500
"""Smaller differences are the clock being corrected."""
_AT_ONCE_SECONDS: Final = 0.01
_TRIES: Final = 10


class ClockWatch:
    """Compares the wall clock with one that only goes forward."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._difference = self._look()

    def jump_ms(self) -> int:
        """By how much the wall clock was set since the last call; 0 where it just went on."""
        difference = self._look()
        jump = difference - self._difference
        self._difference = difference
        return jump if abs(jump) >= TOLERANCE_MS else 0

    def _look(self) -> int:
        """Wall time less monotonic time, ms, both of one moment: this process may be held up between two readings."""
        for _ in range(_TRIES):
            before = self._clock.monotonic()
            now_ms = self._clock.now_ms()
            if self._clock.monotonic() - before < _AT_ONCE_SECONDS:
                break
        return now_ms - round(before * 1000)
