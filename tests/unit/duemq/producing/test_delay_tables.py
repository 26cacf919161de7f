"""Known delays of a broker are never used for longer than their lifetime."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from duemq._net.connection import connect
from duemq._producing.delay_tables import Answers
from tests.unit.duemq.fake import FakeBroker


class Asked:
    """Answers with its number when it is let go, and fails when told to."""

    def __init__(self, *failures: int) -> None:
        self.count = 0
        self.failures = failures
        self.begun = asyncio.Event()
        self.may_end = asyncio.Event()
        self.may_end.set()

    async def __call__(self) -> int:
        self.count = number = self.count + 1
        self.begun.set()
        await self.may_end.wait()
        if number in self.failures:
            raise TimeoutError
        return number


@pytest.fixture
async def get(broker: FakeBroker) -> Any:
    """Ask through `Answers`, with a lifetime for each answer."""
    answers = Answers[int](0.0)
    connection = await connect(broker.address, codec="json", on_request=lambda command: None, timeout=5)

    async def get(ask: Asked, lifetime: float, name: str = "") -> int:
        answers.lifetime = lifetime
        return await answers.get(connection, name, ask)

    yield get
    connection.close()
    await connection.wait_closed()


Get = Callable[..., Any]


async def test_an_answer_is_kept_for_its_lifetime(get: Get) -> None:
    ask = Asked()
    assert [await get(ask, 0.0), await get(ask, 60.0), await get(ask, 60.0)] == [1, 2, 2]
    assert await get(ask, 60.0, "another") == 3


async def test_who_asks_meanwhile_takes_what_is_known(get: Get) -> None:
    ask = Asked()
    await get(ask, 0.0)
    ask.begun.clear()
    ask.may_end.clear()
    asking = asyncio.create_task(get(ask, 60.0))
    await ask.begun.wait()
    assert await get(ask, 60.0) == 1
    ask.may_end.set()
    assert (await asking, await get(ask, 60.0)) == (2, 2)


@pytest.mark.parametrize("cancelled", [False, True])
async def test_nothing_is_believed_for_longer_because_asking_again_failed(get: Get, cancelled: bool) -> None:
    ask = Asked(*[] if cancelled else [2])
    await get(ask, 0.0)
    ask.begun.clear()
    if cancelled:
        ask.may_end.clear()
    asking = asyncio.create_task(get(ask, 60.0))
    await ask.begun.wait()
    if cancelled:
        asking.cancel()
    with pytest.raises(asyncio.CancelledError if cancelled else TimeoutError):
        await asking
    ask.may_end.set()
    # One caller that is cancelled does not end the question, which others may have asked too.
    assert await get(ask, 60.0) == (2 if cancelled else 3)


async def test_many_who_ask_at_once_ask_once(get: Get) -> None:
    ask = Asked()
    assert await asyncio.gather(*(get(ask, 60.0) for _ in range(100))) == [1] * 100
    assert ask.count == 1
