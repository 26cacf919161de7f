"""How much work one step may do: whoever calls a step hands its budget in, so that no module below the broker reads a
clock, and a test can give a step exactly as much as it wants to see done."""

from __future__ import annotations

from typing import Protocol


class Budget(Protocol):
    """What is left of one step."""

    @property
    def is_spent(self) -> bool:
        """Whether the step has to end now. To be asked after each piece of work; a step does at least one piece."""


class Unlimited:
    """A budget that is never spent: for a start, a stop, and tests that want all of the work done."""

    @property
    def is_spent(self) -> bool:
        """See Budget."""
        return False


class Spent:
    """A budget of nothing."""

    @property
    def is_spent(self) -> bool:
        """See Budget."""
        return True


class Pieces:
    """A budget of so many pieces of work."""

    def __init__(self, count: int) -> None:
        self._left = count

    @property
    def is_spent(self) -> bool:
        """See Budget. Each call counts as one piece."""
        self._left -= 1
        return self._left <= 0


UNLIMITED = Unlimited()
SPENT = Spent()
