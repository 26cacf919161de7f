"""Tests that run at the same time, since they spend most of their time waiting: for processes, for timers, for clients
that try again.

A fixture of a folder, in its conftest.py, takes those of the folder's tests that have all they use to themselves. The
first test of the folder starts all of them, a few at a time, each with fixtures of its own, and each test awaits its
own outcome.
"""

import asyncio
import inspect
import shutil
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

Fixtures = Callable[[Path], AbstractAsyncContextManager[Mapping[str, object]]]
"""Makes the fixtures of one test, by name, in a directory that nobody else uses."""

BEGAN = pytest.StashKey[float]()
"""The time at which a test began, seconds since the epoch, if that was not when pytest came to it."""


class AtOnce:
    """Runs tests at the same time, `room` of them at most, in the order in which they were given."""

    def __init__(self, room: int, new_directory: Callable[[], Path]) -> None:
        self._room = asyncio.Semaphore(room)
        self._new_directory = new_directory
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, item: pytest.Function, fixtures: Fixtures) -> None:
        """Start a test once there is room. When pytest comes to it, it awaits the outcome."""
        task = asyncio.create_task(self._run(item, item.obj, fixtures))
        self._tasks.append(task)

        async def outcome(**_: object) -> None:
            await task

        item.obj = outcome

    async def close(self) -> None:
        """Cancel tests that pytest did not come to."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _run(self, item: pytest.Function, test: Callable[..., Awaitable[None]], fixtures: Fixtures) -> None:
        async with self._room:
            item.stash[BEGAN] = time.time()
            directory = self._new_directory()
            async with fixtures(directory) as made:
                given = {**made, **parameters(item)}
                await test(**{name: given[name] for name in inspect.signature(test).parameters})
            shutil.rmtree(directory)


def parameters(item: pytest.Function) -> dict[str, Any]:
    """The parameters of a test, by name."""
    return dict(item.callspec.params) if hasattr(item, "callspec") else {}
