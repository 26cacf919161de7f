"""A timeout raises TimeoutError also in a task that cleans up after it was cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, suppress
from functools import partial
from typing import Any

import pytest

from duemq._net import timeouts
from duemq._net.timeouts import Timeout

Within = Callable[[], AbstractAsyncContextManager[Any]]
"""Makes a timeout that has expired when its block begins to wait."""
WITHIN: dict[str, Within] = {
    "asyncio's or ours": partial(timeouts.timeout, 0),
    "ours": partial(Timeout, 0),
}


@pytest.fixture(params=WITHIN)
def within(request: pytest.FixtureRequest) -> Within:
    return WITHIN[request.param]


async def test_a_block_that_takes_too_long(within: Within) -> None:
    with pytest.raises(TimeoutError):
        async with within():
            await asyncio.Event().wait()


async def test_in_a_task_that_was_cancelled(within: Within) -> None:
    told: list[str] = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            try:
                async with within():
                    await asyncio.Event().wait()
            except TimeoutError:
                told.append("timeout")

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    assert told == ["timeout"]
    assert task.cancelled()


async def test_a_task_that_is_cancelled_meanwhile(within: Within) -> None:
    """The task ends as cancelled if somebody cancels it in the turn in which the timeout expires."""

    async def work() -> None:
        async with within():
            await asyncio.Event().wait()

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_no_timeout() -> None:
    async with Timeout(None), timeouts.timeout(None), timeouts.timeout_at(None):
        await asyncio.sleep(0)
