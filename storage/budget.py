"""The amount of work that one step may do. The caller of a step hands the budget in: no module below the broker reads a
clock, and a test decides exactly how much work a step does."""

from __future__ import annotations

from typing import Protocol


class Budget(Protocol):
    """The part of one step's budget that is left."""

    @property
    def is_spent(self) -> bool:
        """Whether the step must end now. A step checks this after each piece of work, and does at least one piece."""


class Unlimited:
    """A budget that is never spent: for a start, a stop, and tests that need all of the work done."""

    @property
    def is_spent(self) -> bool:
        """False: a step may do all of its work."""
        return False


class Spent:
    """A budget that is spent from the start."""

    @property
    def is_spent(self) -> bool:
        """True: a step does one piece of work."""
        return True


class Pieces:
    """A budget of a number of pieces of work."""

    def __init__(self, count: int) -> None:
        self._left = count

    @property
    def is_spent(self) -> bool:
        """Whether the pieces are used up. Each call counts as one piece."""
        self._left -= 1
        return self._left <= 0


UNLIMITED = Unlimited()
SPENT = Spent()
