"""The position up to which the commitlog is wanted durable."""

from __future__ import annotations

from collections.abc import Callable


class WantedPosition:
    """The physical offset before which everything has to be durable. Those who wait for the disk raise it; `Durability`
    flushes until it is reached."""

    __slots__ = ("_wake", "offset")

    def __init__(self, wake: Callable[[], None] = lambda: None) -> None:
        """`wake` asks for a step of `Durability`; the step must follow once all writes of the same turn are done."""
        self._wake = wake
        self.offset = 0

    def want(self, offset: int) -> None:
        """Ask for everything before a physical offset to be made durable soon."""
        self.offset = max(self.offset, offset)
        self._wake()

    def raise_to(self, offset: int) -> None:
        """Raise the position to a physical offset, for the next step."""
        self.offset = max(self.offset, offset)
