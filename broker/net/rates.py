"""Limits on requests per second, for each connection, address or account. Here each of these is a name.

Each name may make the requests of one second in one burst, and regains them at the rate. One number is kept for each
name: the time at which it has regained all of them (the generic cell rate algorithm, which allows the same requests as
a token bucket). A name that has regained all of them is forgotten.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Final, Generic, TypeVar

N = TypeVar("N", bound=Hashable)

_FEW: Final = 1000
"""With at most this many names, none is checked for whether it can be forgotten."""
_ROUNDING: Final = 1e-3
"""The fraction of a request that may be missing only because times are floating-point numbers."""


class Rates(Generic[N]):
    """The requests that each name has left. Times are in seconds of one monotonic clock, rates in requests a second."""

    __slots__ = ("_full_at", "_look_at")

    def __init__(self) -> None:
        self._full_at: dict[N, float] = {}
        self._look_at = _FEW
        """The number of names beyond which those that have regained all their requests are forgotten."""

    def __len__(self) -> int:
        return len(self._full_at)

    def take(self, name: N, wanted: int, rate: int, now: float) -> int:
        """Return how many of `wanted` requests a name may make now. They are counted as made."""
        full_at = self._full_at.get(name, now)
        if full_at <= now:
            allowed, full_at = min(wanted, rate), now
        else:
            allowed = max(0, min(wanted, int(rate - (full_at - now) * rate + _ROUNDING)))
        if allowed:
            self._full_at[name] = full_at + allowed / rate
            if len(self._full_at) > self._look_at:
                self._forget(now)
        return allowed

    def give_back(self, name: N, count: int, rate: int) -> None:
        """Uncount requests that `take` counted but that were not made. At a rate of 0 none were counted."""
        if count and rate and name in self._full_at:
            self._full_at[name] -= count / rate

    def drop(self, name: N) -> None:
        """Forget a name."""
        self._full_at.pop(name, None)

    def _forget(self, now: float) -> None:
        self._full_at = {name: full_at for name, full_at in self._full_at.items() if full_at > now}
        self._look_at = max(_FEW, 2 * len(self._full_at))
