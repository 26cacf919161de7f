"""Questions that many tasks ask at once: one request is sent, and all get its answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class SingleFlight(Generic[T]):
    """At most one call under way per key. A caller that is cancelled does not end the call of the others."""

    def __init__(self) -> None:
        self._calls: dict[object, asyncio.Task[T]] = {}

    async def get(self, key: object, ask: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Return what the call under way for `key` returns, or a new call of `ask`. Raises what that call raises."""
        call = self._calls.get(key)
        if call is None:
            call = self._calls[key] = asyncio.create_task(ask(), name=f"duemq asks for {key}")
            call.add_done_callback(lambda done: self._end(key, done))
        return await asyncio.shield(call)

    def _end(self, key: object, call: asyncio.Task[T]) -> None:
        del self._calls[key]
        if not call.cancelled():
            call.exception()  # looked at, also where all callers were cancelled
