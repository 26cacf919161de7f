"""Noticing that somebody set the wall clock."""

from __future__ import annotations

from typing import Final

from duemq.storage.clock import Moment

TOLERANCE_MS: Final = 500
"""Smaller differences are the clock being corrected."""


class ClockWatch:
    """Compares the wall clock with one that only goes forward."""

    def __init__(self, now: Moment) -> None:
        self._difference = _difference(now)

    def jump_ms(self, now: Moment) -> int:
        """By how much the wall clock was set since the last call; 0 where it just went on."""
        difference = _difference(now)
        jump = difference - self._difference
        self._difference = difference
        return jump if abs(jump) >= TOLERANCE_MS else 0

    def has_jumped(self, now: Moment) -> bool:
        """Whether `jump_ms` would tell of something."""
        return abs(_difference(now) - self._difference) >= TOLERANCE_MS


def _difference(now: Moment) -> int:
    """Wall time less monotonic time, ms."""
    return now.wall_ms - round(now.monotonic * 1000)
