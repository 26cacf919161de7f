"""The limit of sends in flight."""

from __future__ import annotations

import asyncio
from collections import deque


class Window:
    """Admits sends, in the order of their calls, as long as at most `most` sends with at most `most_bytes` bytes in
    total are in flight. A send that is larger than `most_bytes` itself is admitted when no other is in flight."""

    def __init__(self, most: int, most_bytes: int) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self.count = 0
        """The number of sends in flight."""
        self.bytes = 0
        self._waiting: deque[tuple[asyncio.Future[None], int, int]] = deque()
        self._empty: list[asyncio.Future[None]] = []

    def try_enter(self, size: int, count: int = 1) -> bool:
        """Admit `count` sends of `size` bytes in total, if there is room and no other send waits for it; return whether
        they were admitted."""
        if self._waiting or not self._has_room(size, count):
            return False
        self.count += count
        self.bytes += size
        return True

    async def enter(self, size: int, count: int = 1) -> None:
        """Wait until there is room for `count` sends of `size` bytes in total, and admit them."""
        if self.try_enter(size, count):
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((turn, size, count))
        try:
            await turn
        except BaseException:
            if turn.done() and not turn.cancelled():
                self.leave(size, count)
            else:
                turn.cancel()
                self._let_in()
            raise

    def leave(self, size: int, count: int = 1) -> None:
        """Free the room of sends that have ended."""
        self.count -= count
        self.bytes -= size
        if self._waiting or self._empty:
            self._let_in()

    async def empty(self) -> None:
        """Wait until no send is in flight or waits for room."""
        if self.count or self._waiting:
            done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._empty.append(done)
            await done

    def _has_room(self, size: int, count: int) -> bool:
        return not self.count or (self.count + count <= self._most and self.bytes + size <= self._most_bytes)

    def _let_in(self) -> None:
        while self._waiting:
            turn, size, count = self._waiting[0]
            if turn.done():
                self._waiting.popleft()
            elif self._has_room(size, count):
                self._waiting.popleft()
                self.count += count
                self.bytes += size
                turn.set_result(None)
            else:
                return
        if not self.count:
            waiting, self._empty = self._empty, []
            for each in waiting:
                if not each.done():
                    each.set_result(None)
