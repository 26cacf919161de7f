"""Detection of a wall clock that was set."""

from __future__ import annotations

from typing import Final

from duemq.storage.clock import Moment

TOLERANCE_MS: Final = 500
"""Difference in ms below which a change counts as an ordinary correction of the clock."""


class ClockWatch:
    """Detects changes of the wall clock, by comparing it with the monotonic clock."""

    def __init__(self, now: Moment) -> None:
        self._difference = _difference(now)

    def jump_ms(self, now: Moment) -> int:
        """Return by how many ms the wall clock was set since the last call, negative if it was set back; 0 if it was
        not set."""
        difference = _difference(now)
        jump = difference - self._difference
        self._difference = difference
        return jump if abs(jump) >= TOLERANCE_MS else 0

    def has_jumped(self, now: Moment) -> bool:
        """Whether `jump_ms` would return a jump. Changes nothing."""
        return abs(_difference(now) - self._difference) >= TOLERANCE_MS


def _difference(now: Moment) -> int:
    """Return wall time minus monotonic time, ms."""
    return now.wall_ms - round(now.monotonic * 1000)
