"""An event loop whose time a test moves, so that nothing has to be waited for.

Its time stands still between the test's calls of `advance`; timers that are due then fire in the next turns.
"""

from __future__ import annotations

import asyncio


class SteppedLoop(asyncio.SelectorEventLoop):
    """See the module."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 1000.0

    def time(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        """Let time pass; what is due runs when the caller next waits for something."""
        self._now += seconds


async def turns(count: int = 3) -> None:
    """Let the callbacks run that are due, and what they call soon."""
    for _ in range(count):
        await asyncio.sleep(0)
