"""Work that fails now and then: it is tried again after a pause, and the log tells of the same trouble once."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Final

import structlog

from duemq.storage.errors import NotInMemory, StoreError

log = structlog.get_logger(__name__)

RETRY_MS: Final = 100


class Retry:
    """One kind of work. What fails of one kind does not hold up another."""

    def __init__(self, event: str) -> None:
        """`event` is what the log calls it when the work fails."""
        self._event = event
        self.at_ms = 0
        """No try before this, ms since the epoch."""
        self.reason: str | None = None
        """Why the last try failed; None after one that did not."""
        self._since_ms = 0
        """When the first of the tries failed that have failed since one did not, ms since the epoch."""

    def run(self, now_ms: int, work: Callable[[], bool]) -> bool:
        """Do a part of the work, unless that failed just now; whether there was anything to do. An error of the store
        or of a file ends this try, and so does memory that runs out."""
        if now_ms < self.at_ms:
            return False
        try:
            worked = work()
        except NotInMemory:
            raise  # whoever gives us our turns has it read, and calls again
        except (StoreError, OSError, MemoryError) as error:
            self.failed(now_ms, error)
            return False
        if worked:
            self.reason = None
        return worked

    def failed(self, now_ms: int, error: Exception) -> None:
        """A try failed."""
        self.at_ms = now_ms + RETRY_MS
        if self.reason is None:
            self._since_ms = now_ms
        reason = "memory ran out" if isinstance(error, MemoryError) else str(error)
        if self.reason != reason:
            self.reason = reason
            with suppress(MemoryError):
                log.warning(self._event, reason=reason)

    def has_failed_for(self, ms: int, now_ms: int) -> bool:
        """Whether no try has done any work for some time, though there was work."""
        return self.reason is not None and now_ms - self._since_ms >= ms
