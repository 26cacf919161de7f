"""Each kind of work gets the time of its own slice: store times never go back within a turn."""

from __future__ import annotations

import asyncio

import pytest

from duemq.broker.turns import Turns
from duemq.storage.budget import Budget
from duemq.storage.clock import ManualClock, Moment
from tests.support.loop import turns


async def test_a_step_is_told_no_older_time_than_the_one_before_it_in_the_turn() -> None:
    clock = ManualClock()
    everything = Turns(asyncio.get_running_loop(), clock)
    told: list[int] = []

    def step(now: Moment, _: Budget) -> float | None:
        told.append(now.wall_ms)
        clock.advance(7)  # held-back requests are handled, at the time that it is by then
        return None

    for name in ("requests", "levels", "timers"):
        everything.work(name, step)
    begin = clock.now_ms()
    everything.start()
    await turns(1)
    everything.stop()
    assert told == [begin, begin + 7, begin + 14]


async def test_work_that_is_woken_before_the_start_has_a_turn_once_it_has_its_step() -> None:
    everything = Turns(asyncio.get_running_loop(), ManualClock())
    work, called = everything.work("levels"), list[str]()
    work.wake()
    await turns(1)

    def step(now: Moment, _: Budget) -> float | None:
        called.append("levels")
        return None

    everything.start({work: step})
    await turns(1)
    assert called == ["levels"]
    work.wake()
    await turns(1)
    everything.stop()
    assert called == ["levels", "levels"]


async def test_turns_do_not_start_without_all_steps() -> None:
    everything = Turns(asyncio.get_running_loop(), ManualClock())
    everything.work("levels")
    with pytest.raises(ValueError, match="'levels' has no step"):
        everything.start()
