"""Requests that several tasks make at the same time: one request is sent, and all tasks get its answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class SingleFlight(Generic[T]):
    """Calls, at most one at a time per key. A caller that is cancelled does not end the call, since others may wait."""

    def __init__(self) -> None:
        self._calls: dict[object, asyncio.Task[T]] = {}

    async def get(self, key: object, ask: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Wait for the call in progress for `key`, or for a new call of `ask`, and return its result. Raises what that
        call raises."""
        call = self._calls.get(key)
        if call is None:
            call = self._calls[key] = asyncio.create_task(ask(), name=f"duemq asks for {key}")
            call.add_done_callback(lambda done: self._end(key, done))
        return await asyncio.shield(call)

    def _end(self, key: object, call: asyncio.Task[T]) -> None:
        del self._calls[key]
        if not call.cancelled():
            call.exception()  # marks it as retrieved: if all callers were cancelled, asyncio would log it otherwise
