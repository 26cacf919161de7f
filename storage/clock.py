"""Time. Only the broker's asyncio part reads a clock; everything below gets the time as an argument."""

from __future__ import annotations

import time
import uuid
from typing import Final, NamedTuple, Protocol

MAX_AHEAD_MS: Final = 100 * 365 * 86_400_000
"""The farthest a time may lie ahead, in ms, so that all code can still compute with it."""


_AT_ONCE_SECONDS: Final = 0.01
_TRIES: Final = 10


class Moment(NamedTuple):
    """One moment by both clocks."""

    wall_ms: int
    """Wall time, ms since the epoch; may jump."""
    monotonic: float
    """Seconds of a clock that only goes forward."""
    boot_id: bytes = b""
    """The boot from which `monotonic` counts; see `Clock.boot_id`."""

    def later(self, ms: int) -> Moment:
        """Return the moment a number of ms later, by both clocks."""
        return self._replace(wall_ms=self.wall_ms + ms, monotonic=self.monotonic + ms / 1000)


class Clock(Protocol):
    """Wall and monotonic time."""

    def now_ms(self) -> int:
        """Return the wall time, ms since the epoch; it may jump."""

    def monotonic(self) -> float:
        """Return the seconds of a clock that only goes forward."""

    @property
    def boot_id(self) -> bytes:
        """Identifies the boot from which monotonic time counts, 16 bytes: the same for every process on the machine
        until the machine is restarted. Empty where it is not known: then the monotonic times of two processes cannot
        be compared."""


def look(clock: Clock) -> Moment:
    """Read a clock. Both readings are of the same moment: if the process was held up between them, the clock is read
    again, up to _TRIES times."""
    for _ in range(_TRIES):
        before = clock.monotonic()
        wall_ms = clock.now_ms()
        if clock.monotonic() - before < _AT_ONCE_SECONDS:
            break
    return Moment(wall_ms, before, clock.boot_id)


class SystemClock:
    """The machine's clock."""

    def __init__(self) -> None:
        self._boot_id = _boot_id()

    @property
    def boot_id(self) -> bytes:
        """Identifies the boot from which monotonic time counts: Linux's random/boot_id, 16 bytes; empty where there is
        none."""
        return self._boot_id

    def now_ms(self) -> int:
        """Return the wall time, ms since the epoch."""
        return time.time_ns() // 1_000_000

    def monotonic(self) -> float:
        """Return the seconds since boot, including those during which the machine was suspended."""
        return time.clock_gettime(time.CLOCK_BOOTTIME)


def _boot_id() -> bytes:
    """Return Linux's random/boot_id; empty bytes where there is none."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return uuid.UUID(file.read().strip()).bytes
    except (OSError, ValueError):
        return b""


class MovableClock:
    """A running clock that can be moved ahead, for users' tests: a delay of two hours need not take two hours. Wall and
    monotonic time move together, so that a move is not mistaken for a change of the wall clock alone."""

    def __init__(self, base: Clock | None = None) -> None:
        """Make the clock. `base`: the clock by which it runs; the machine's by default."""
        self._base = base or SystemClock()
        self._ahead_ms = 0

    @property
    def boot_id(self) -> bytes:
        """Identifies the boot from which monotonic time counts, 16 bytes: that of the clock by which this one runs."""
        return self._base.boot_id

    def now_ms(self) -> int:
        """Return the wall time, ms since the epoch."""
        return self._base.now_ms() + self._ahead_ms

    def monotonic(self) -> float:
        """Return the seconds since some start."""
        return self._base.monotonic() + self._ahead_ms / 1000

    def advance(self, ms: int) -> None:
        """Move the clock ahead. Raises ValueError for a negative number, and beyond MAX_AHEAD_MS in all."""
        if ms < 0:
            raise ValueError(f"a clock can only be moved forward, not by {ms} ms")
        if self._ahead_ms + ms > MAX_AHEAD_MS:
            raise ValueError(f"a clock can be moved ahead by at most a hundred years, {MAX_AHEAD_MS} ms in all")
        self._ahead_ms += ms


class ManualClock:
    """A clock that stands still until it is moved."""

    def __init__(self, now_ms: int = 1_700_000_000_000) -> None:
        self._now_ms = now_ms
        self._monotonic = 1000.0
        self.boot_id = b""
        """Identifies the boot from which monotonic time counts. A test that simulates a restart of the machine sets
        another one."""

    def now_ms(self) -> int:
        """Return the wall time, ms since the epoch."""
        return self._now_ms

    def monotonic(self) -> float:
        """Return the seconds since some start."""
        return self._monotonic

    def advance(self, ms: int) -> None:
        """Let time pass."""
        self._now_ms += ms
        self._monotonic += ms / 1000

    def set_wall(self, now_ms: int) -> None:
        """Set the wall clock, as an operator or NTP would; monotonic time does not follow."""
        self._now_ms = now_ms
