"""A value that may change while other components use it: a live setting, or several of them together."""

from __future__ import annotations

from typing import Generic, TypeVar

T = TypeVar("T")


class Current(Generic[T]):
    """Holds the value in force. Its owner sets `value`; the components that were given this object only read `value`,
    afresh each time they need it."""

    __slots__ = ("value",)

    def __init__(self, value: T) -> None:
        self.value = value
