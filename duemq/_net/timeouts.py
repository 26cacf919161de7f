"""Timeouts of blocks of code: `asyncio.timeout` and `asyncio.timeout_at`, as Python has them from 3.11.4 on.

Before, a timeout in a task that is already cancelled, such as one that is cleaning up, does not raise TimeoutError when
it expires: the CancelledError with which it interrupts the block comes out.
"""

from __future__ import annotations

import asyncio
import sys
from types import TracebackType


class Timeout(asyncio.Timeout):  # type: ignore[misc]  # it is final only for type checkers
    """A timeout that also raises TimeoutError in a task that was cancelled before the block began."""

    async def __aenter__(self) -> Timeout:
        task = asyncio.current_task()
        self._cancelled_before = task.cancelling() if task is not None else 0
        await super().__aenter__()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> None:
        has_expired, task = self.expired(), asyncio.current_task()
        await super().__aexit__(exc_type, exc_val, exc_tb)
        is_over = has_expired and exc_type is asyncio.CancelledError
        # Unless somebody else has cancelled the task since the block began.
        if is_over and task is not None and task.cancelling() <= self._cancelled_before:
            raise TimeoutError from exc_val


def _timeout_at(when: float | None) -> asyncio.Timeout:
    return Timeout(when)


def _timeout(delay: float | None) -> asyncio.Timeout:
    return Timeout(asyncio.get_running_loop().time() + delay if delay is not None else None)


_IS_FIXED = sys.version_info >= (3, 11, 4)
timeout = asyncio.timeout if _IS_FIXED else _timeout
"""Return a context manager that raises TimeoutError if its block takes longer than a number of seconds; None: never."""
timeout_at = asyncio.timeout_at if _IS_FIXED else _timeout_at
"""Return a context manager that raises TimeoutError if its block has not ended at a time of the event loop's clock, in
seconds; None: never."""
