"""Requests that wait for their responses: correlation by opaque, with deadlines. Part of the sans-IO core: time is an
argument, and the object that waits for a response (a future, a callback) belongs to the caller."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

T = TypeVar("T")


class InFlightRequests(Generic[T]):
    """Numbers the requests of one connection, and finds them again by the opaque of their responses."""

    def __init__(self) -> None:
        self._next = 0
        self._waiting: OrderedDict[int, tuple[float, T]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._waiting)

    def new_opaque(self) -> int:
        """Return the next request id, also for a request without an answer. It wraps around so that it is never
        negative as an int32."""
        self._next = self._next + 1 & 0x7FFF_FFFF
        return self._next

    def add(self, waiter: T, deadline: float) -> int:
        """Note a request that is about to be sent; return its opaque. `deadline`: in seconds of the caller's clock."""
        opaque = self.new_opaque()
        self._waiting[opaque] = (deadline, waiter)
        return opaque

    def take(self, opaque: int) -> T | None:
        """Remove and return the waiter for an opaque; None if there is none (expired, or never noted)."""
        entry = self._waiting.pop(opaque, None)
        return entry[1] if entry is not None else None

    def expire(self, now: float) -> list[T]:
        """Remove and return the waiters whose deadlines have passed."""
        late = [opaque for opaque, (deadline, _) in self._waiting.items() if deadline <= now]
        return [self._waiting.pop(opaque)[1] for opaque in late]

    def first_deadline(self) -> float | None:
        """Return the earliest deadline; None if no request waits."""
        return min((deadline for deadline, _ in self._waiting.values()), default=None)

    def clear(self) -> list[T]:
        """Remove and return all waiters, when the connection is lost."""
        waiters = [waiter for _, waiter in self._waiting.values()]
        self._waiting.clear()
        return waiters
