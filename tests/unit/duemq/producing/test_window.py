from __future__ import annotations

import asyncio

from duemq._producing.window import Window


def begin(window: Window, size: int) -> asyncio.Task[None]:
    return asyncio.create_task(window.enter(size))


async def settle() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


async def test_a_full_window_lets_in_in_order() -> None:
    window = Window(2, 100)
    await window.enter(60)
    large, small = begin(window, 50), begin(window, 1)
    await settle()
    assert not large.done()
    assert not small.done(), "nobody overtakes"
    assert not window.try_enter(1)
    window.leave(60)
    await settle()
    assert large.done()
    assert small.done()
    assert (window.count, window.bytes) == (2, 51)


async def test_one_that_is_too_large_goes_alone() -> None:
    window = Window(5, 100)
    await window.enter(1)
    huge = begin(window, 1000)
    await settle()
    assert not huge.done()
    window.leave(1)
    await huge
    assert not window.try_enter(1)
    window.leave(1000)
    assert window.try_enter(1)


async def test_who_gives_up_waiting_holds_up_nobody() -> None:
    window = Window(1, 100)
    await window.enter(1)
    first, second, third = (begin(window, 1) for _ in range(3))
    await settle()
    first.cancel()
    await settle()
    window.leave(1)
    second.cancel()  # it has been let in, and does not know yet
    await settle()
    assert third.done()
    assert (window.count, window.bytes) == (1, 1)


async def test_an_empty_window_is_waited_for() -> None:
    window = Window(1, 100)
    await window.empty()
    await window.enter(1)
    waiting, empty = begin(window, 1), asyncio.create_task(window.empty())
    await settle()
    window.leave(1)
    await settle()
    assert waiting.done()
    assert not empty.done()
    window.leave(1)
    await empty
