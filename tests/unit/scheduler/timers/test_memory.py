"""Memory that runs out at one place of the timers' work: no message is delivered twice, lost, or listed wrongly."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from duemq.scheduler.timers.config import Cancelled
from duemq.scheduler.timers.files.sums import LogSums
from duemq.scheduler.timers.files.wheel import TimerWheel
from duemq.scheduler.timers.index.census import Census, DueCounts
from duemq.scheduler.timers.index.positions import UnitPositions
from duemq.scheduler.timers.seconds.second import Second
from duemq.scheduler.timers.seconds.slots import Slots
from duemq.scheduler.timers.seconds.turns import SecondTurns
from duemq.storage.errors import StoreBroken
from tests.unit.scheduler.timer_world import START_MS, TimerWorld

PLACES: list[tuple[type, str]] = [
    (DueCounts, "_add_row"),
    (Census, "_change"),
    (LogSums, "_settle"),
    (UnitPositions, "_add"),
    (UnitPositions, "note"),
    (TimerWheel, "plan"),
    (TimerWheel, "put"),
    (Second, "add"),
    (Second, "_take_in"),
    (Second, "drop"),
    (SecondTurns, "add"),
    (Slots, "gone"),
    (Slots, "_units_of_past"),
]


@contextmanager
def without_memory(monkeypatch: pytest.MonkeyPatch, where: type, name: str, times: int) -> Iterator[None]:
    """Make a method raise MemoryError `times` times before it does anything."""
    original: Callable[..., Any] = getattr(where, name)
    left = times

    def fails(*arguments: Any, **named: Any) -> Any:
        nonlocal left
        if left:
            left -= 1
            raise MemoryError
        return original(*arguments, **named)

    with monkeypatch.context() as patch:
        patch.setattr(where, name, fails)
        yield


@pytest.mark.parametrize("times", [1, 2, 30])
@pytest.mark.parametrize("end", ["none", "stop", "kill"])
@pytest.mark.parametrize(("where", "name"), PLACES, ids=lambda each: getattr(each, "__name__", each))
def test_each_message_comes_once(where: type, name: str, end: str, times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    world = TimerWorld()
    monkeypatch.setattr("duemq.scheduler.timers.index.positions._MAX_COLLECTED", 2)
    monkeypatch.setattr("duemq.scheduler.timers.files.sums._MAX_PENDING", 2)
    world.send(START_MS + 500)
    world.pass_time(100)
    taken = [b"m1"]
    with without_memory(monkeypatch, where, name, times):
        world.timers.count(lambda: None)
        for number in range(5):
            with suppress(StoreBroken):  # the process would end here
                world.send(START_MS + 1000 + number * 400)
                taken.append(b"m%d" % world.sent)
            with suppress(MemoryError):
                world.run()
            world.clock.advance(120)
        with suppress(MemoryError):
            world.pass_time(1000)
    if end == "stop":
        with suppress(MemoryError, StoreBroken):
            world.close()
    if end != "none" or world.store.health.verdict.name == "POISONED":
        world.open()
    place = world.send(world.now_ms + 3000, b"cancelled")
    assert world.cancel(place) is Cancelled.CANCELLED
    world.pass_time(20_000)
    assert sorted(world.bodies()) == taken
    world.timers.count(lambda: None)
    world.run()
    assert world.timers.is_counted
    assert world.timers.counts is not None
