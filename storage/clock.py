"""The clock, injected everywhere: tests move it, the broker reads the machine's."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Wall and monotonic time."""

    def now_ms(self) -> int:
        """Wall time, ms since the epoch; may jump."""

    def monotonic(self) -> float:
        """Seconds of a clock that only goes forward."""


class SystemClock:
    """The machine's clock."""

    def now_ms(self) -> int:
        """Wall time, ms since the epoch."""
        return time.time_ns() // 1_000_000

    def monotonic(self) -> float:
        """Seconds since some start."""
        return time.monotonic()


class ManualClock:
    """A clock that stands still until it is moved."""

    def __init__(self, now_ms: int = 1_700_000_000_000) -> None:
        self._now_ms = now_ms
        self._monotonic = 1000.0

    def now_ms(self) -> int:
        """Wall time, ms since the epoch."""
        return self._now_ms

    def monotonic(self) -> float:
        """Seconds since some start."""
        return self._monotonic

    def advance(self, ms: int) -> None:
        """Let time pass."""
        self._now_ms += ms
        self._monotonic += ms / 1000

    def set_wall(self, now_ms: int) -> None:
        """Set the wall clock, as an operator or NTP would; monotonic time does not follow."""
        self._now_ms = now_ms
