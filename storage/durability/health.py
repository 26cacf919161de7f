"""Whether the store takes messages, and if not, why: one verdict, which everybody asks and only those who write change.

    CLOSED     not open yet, or not any more
    HEALTHY    takes messages
    FULL       there is no room; everything else goes on, and messages are taken again when there is room
    POISONED   a write or a sync failed, so what the disk holds is unknown, or what was written could not be noted:
               nothing is appended, acknowledged or noted in a checkpoint from then on. Only opening the store anew,
               which reads what the disk holds, helps.

Nothing leads from POISONED to another verdict but the end of the process's use of the store (CLOSED).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum, auto

from duemq.storage.errors import StoreBroken, StoreClosed, StoreError, StoreFull


class Verdict(Enum):
    """See the module."""

    CLOSED = auto()
    HEALTHY = auto()
    FULL = auto()
    POISONED = auto()


_ERRORS: dict[Verdict, type[StoreError]] = {
    Verdict.CLOSED: StoreClosed,
    Verdict.FULL: StoreFull,
    Verdict.POISONED: StoreBroken,
}


class Health:
    """The verdict on one store. `on_change` is called after each change of it, by whoever made the change."""

    def __init__(self, on_change: Callable[[], None]) -> None:
        self._on_change = on_change
        self.verdict = Verdict.CLOSED
        self.reason = "the store is not open yet"

    def error(self) -> StoreError:
        """A new error that says why nothing is taken. New each time: one that is raised again and again would collect
        the traceback of each raise, and with it what was to be stored."""
        return _ERRORS[self.verdict](self.reason)

    def opened(self) -> None:
        """The store is open."""
        self._change(Verdict.HEALTHY, "")

    def closed(self) -> None:
        """The store is closed, or about to be: it takes nothing more."""
        self._change(Verdict.CLOSED, "the store is closed")

    def fill(self, reason: str) -> None:
        """There is no room."""
        if self.verdict in (Verdict.HEALTHY, Verdict.FULL):
            self._change(Verdict.FULL, reason)

    def has_room(self) -> None:
        """There is room again."""
        if self.verdict is Verdict.FULL:
            self._change(Verdict.HEALTHY, "")

    @contextmanager
    def making_room(self) -> Iterator[None]:
        """What is appended within makes room, and is taken although there is said to be none; not where a write finds
        that so."""
        verdict, reason = self.verdict, self.reason
        if verdict is Verdict.FULL:
            self.verdict, self.reason = Verdict.HEALTHY, ""
        try:
            yield
        finally:
            if self.verdict is Verdict.HEALTHY:
                self.verdict, self.reason = verdict, reason

    def poison(self, reason: str) -> None:
        """A write or a sync failed. The first reason stays."""
        if self.verdict is not Verdict.POISONED:
            self._change(Verdict.POISONED, reason)

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Within, what was written just now is noted in memory. Where that fails, for want of memory, the files know
        what this process does not: it would write the same once more. Only a start helps then. Raises StoreBroken."""
        try:
            yield
        except BaseException as error:
            raise self.not_noted(error) from error

    def not_noted(self, error: BaseException) -> StoreError:
        """What was written could not be noted, see `noting`; gives the error to raise."""
        self.poison(f"what was written could not be noted: {error!r}")
        return self.error()

    def _change(self, verdict: Verdict, reason: str) -> None:
        if (verdict, reason) != (self.verdict, self.reason):
            self.verdict, self.reason = verdict, reason
            self._on_change()
