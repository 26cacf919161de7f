"""Retries of work that may fail: a pause before each new try, and one log line per distinct failure.

Work that is tried again are reads, and writes for which there was no room. Any other failed write poisons the store;
see `storage.durability.owner`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Final

import structlog

from duemq.storage.errors import NotInMemory, StoreError

log = structlog.get_logger(__name__)

RETRY_MS: Final = 100
"""Pause after a failure, in ms."""


class Retry:
    """The retry state of one kind of work, so that a failing kind does not hold up the others."""

    def __init__(self, event: str) -> None:
        """Make the state. `event`: the name of the log line for a failure."""
        self._event = event
        self.at_ms = 0
        """Time before which nothing is tried, ms since the epoch."""
        self.reason: str | None = None
        """Why the last try failed; None after a success."""
        self._since_ms = 0
        """Time when the present series of failures began, ms since the epoch."""

    def run(self, now_ms: int, work: Callable[[], bool]) -> bool:
        """Do a part of the work, unless the pause after a failure is still on. `work` returns whether there was
        anything to do, and so does this; it returns False in a pause, or if the try fails. A StoreError, OSError or
        MemoryError of `work` ends the try and begins a pause. Raises NotInMemory."""
        if now_ms < self.at_ms:
            return False
        try:
            worked = work()
        except NotInMemory:
            raise  # the caller has the data read and calls again
        except (StoreError, OSError, MemoryError) as error:
            self.failed(now_ms, error)
            return False
        if worked:
            self.reason = None
        return worked

    def failed(self, now_ms: int, error: Exception) -> None:
        """Note a failed try, and begin a pause."""
        self.at_ms = now_ms + RETRY_MS
        if self.reason is None:
            self._since_ms = now_ms
        reason = "memory ran out" if isinstance(error, MemoryError) else str(error)
        if self.reason != reason:
            self.reason = reason
            with suppress(MemoryError):
                log.warning(self._event, reason=reason)

    def has_failed_for(self, ms: int, now_ms: int) -> bool:
        """Whether the work has been failing for at least `ms`."""
        return self.reason is not None and now_ms - self._since_ms >= ms
