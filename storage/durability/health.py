"""Whether the store accepts messages, and if not, why: one verdict, read everywhere and changed only by code that
writes.

    CLOSED     not open yet, or no longer open
    HEALTHY    accepts messages
    FULL       there is no room; everything else works, and messages are accepted again once there is room
    POISONED   a write or a sync failed, so the bytes on the disk are unknown, or a write could not be noted in
               memory: nothing is appended, acknowledged or noted in a checkpoint from then on. Only reopening the
               store, which reads the bytes on the disk, helps.

From POISONED the verdict changes only to CLOSED, when the process lets go of the store.

Keeps invariant 5 of ARCHITECTURE.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum, auto

from duemq.storage.errors import StoreBroken, StoreClosed, StoreError, StoreFull


class Verdict(Enum):
    """The verdicts; see the module."""

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
    """The verdict on one store. `on_change` is called after each change, in the thread that made it, except for the
    change that `making_room` makes and undoes."""

    def __init__(self, on_change: Callable[[], None]) -> None:
        self._on_change = on_change
        self.verdict = Verdict.CLOSED
        self.reason = "the store is not open yet"

    def error(self) -> StoreError:
        """Return a new error that says why the store accepts nothing. It is new each time: an exception that is raised
        repeatedly would collect the traceback of each raise, and with it the messages that were to be stored."""
        return _ERRORS[self.verdict](self.reason)

    def opened(self) -> None:
        """Note that the store is open."""
        self._change(Verdict.HEALTHY, "")

    def closed(self) -> None:
        """Note that the store is closed, or about to be: it accepts nothing more."""
        self._change(Verdict.CLOSED, "the store is closed")

    def fill(self, reason: str) -> None:
        """Note that there is no room."""
        if self.verdict in (Verdict.HEALTHY, Verdict.FULL):
            self._change(Verdict.FULL, reason)

    def has_room(self) -> None:
        """Note that there is room again."""
        if self.verdict is Verdict.FULL:
            self._change(Verdict.HEALTHY, "")

    @contextmanager
    def making_room(self) -> Iterator[None]:
        """Allow appends within this block although the verdict is FULL, since they lead to more room. Afterwards the
        verdict is the one from before, unless another one was noted meanwhile."""
        verdict, reason = self.verdict, self.reason
        if verdict is Verdict.FULL:
            self.verdict, self.reason = Verdict.HEALTHY, ""
        try:
            yield
        finally:
            if self.verdict is Verdict.HEALTHY:
                self.verdict, self.reason = verdict, reason

    def poison(self, reason: str) -> None:
        """Note that a write or a sync failed. The first reason is kept."""
        if self.verdict is not Verdict.POISONED:
            self._change(Verdict.POISONED, reason)

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Guard code that notes in memory what was just written. If that code fails, for lack of memory, the files are
        ahead of this process, which would then write the same bytes again. So the store is poisoned, and only a restart
        helps. Raises StoreBroken."""
        try:
            yield
        except BaseException as error:
            raise self.not_noted(error) from error

    def not_noted(self, error: BaseException) -> StoreError:
        """Poison the store because a write could not be noted in memory (see `noting`); return the error to raise."""
        self.poison(f"what was written could not be noted: {error!r}")
        return self.error()

    def _change(self, verdict: Verdict, reason: str) -> None:
        if (verdict, reason) != (self.verdict, self.reason):
            self.verdict, self.reason = verdict, reason
            self._on_change()
