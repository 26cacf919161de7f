"""Goal: the unit of a message is found by the physical offset of its record, at a cost that does not depend on the
number of waiting messages.

Method: units written in every order, compared with a dictionary; and whole worlds, in which the units read are
counted."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from duemq.scheduler.timers.config import Cancelled, TimerConfig
from duemq.scheduler.timers.files.log import TimerLog
from duemq.scheduler.timers.files.unit import APPLIED, UNIT, UNIT_SIZE
from duemq.scheduler.timers.index import positions as timer_positions
from duemq.scheduler.timers.index.positions import UnitPositions
from duemq.scheduler.timers.policy.policies import policy_of
from duemq.scheduler.timers.seconds.loading import Loading
from tests.crash.simulated_files import SimulatedFiles
from tests.soak import sampled
from tests.unit.scheduler.timer_world import START_MS, TimerWorld

LATER = START_MS + 90_000


@pytest.mark.parametrize("seed", sampled(range(15), range(6)))
def test_the_newest_unit_of_each_message_is_found(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(seed)
    monkeypatch.setattr(timer_positions, "_BLOCK", chance.choice((1, 3, 30)) * UNIT_SIZE)
    log = TimerLog(SimulatedFiles(), "/s/timerlog", chance.choice((5, 23, 1000)) * UNIT_SIZE + 7)
    places, known = UnitPositions(log), dict[int, int]()
    for _ in range(40):
        new = sorted(chance.sample(range(len(known) * 10, len(known) * 10 + 100), chance.choice((0, 1, 5, 20))))
        moved = [chance.choice(list(known)) for _ in range(chance.choice((0, 0, 1, 7)))] if known else []
        physical = chance.choice((new, moved, new + moved))
        if not physical:
            continue
        units = np.zeros(len(physical), UNIT)
        units["size"], units["physical_offset"] = UNIT_SIZE, physical
        units["due_ms"] = [chance.choice((5, 5, 5, APPLIED)) for _ in physical]
        positions = log.positions(len(units))
        log.append(units, positions)
        places.note(positions, units)
        for at, due, position in zip(physical, units["due_ms"].tolist(), positions.tolist(), strict=True):
            if due != APPLIED:
                known[at] = position
    again = UnitPositions(log)
    for position, units in log.scan(0, log.end):
        again.note(position + np.arange(len(units)) * UNIT_SIZE, units)
    for each in (places, again):
        for physical_offset in range(max(known) + 100):
            found = each.find(physical_offset)
            assert (found[0] if found is not None else None) == known.get(physical_offset)
            assert found is None or found[1]["physical_offset"].tolist() == [physical_offset]
    monkeypatch.setattr(timer_positions, "_PART_BLOCKS", 2)
    monkeypatch.setattr(timer_positions, "BLOCK_UNITS", 4)
    for share in (0, 0.3, 0.9):
        log.drop_before(int(log.end * share))
        late = UnitPositions(log)  # of a start now, whose first units are not the messages' first ones
        for position, units in log.scan(0, log.end):
            late.note(position + np.arange(len(units)) * UNIT_SIZE, units)
        for each in (places, again, late):
            for start in (-1, max(known) // 2, max(known)):
                left = {at: position for at, position in known.items() if position >= log.begin and at > start}
                assert by_record(each, start) == sorted(left.items())


def by_record(places: UnitPositions, reached: int) -> list[tuple[int, int]]:
    """Return all messages behind a physical offset with the positions of their newest units, as `after` returns
    them."""
    result: list[tuple[int, int]] = []
    while (part := places.after(reached)) is not None:
        positions, units, now = part
        assert now > reached
        assert all(reached < physical <= now for physical in units["physical_offset"].tolist())
        result += zip(units["physical_offset"].tolist(), positions.tolist(), strict=True)
        reached = now
    return result


def counted(world: TimerWorld, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the number of units of each read of the timer log from now on."""
    log, read = world.timers._slots.log, list[int]()
    read_units, chunks, chain = log.read, log._chunks, log.chain

    def noted_read(*each: int) -> Any:
        units = read_units(*each)
        read.append(len(units))
        return units

    def noted(parts: Iterator[tuple[Any, Any]]) -> Iterator[tuple[Any, Any]]:
        for position, units in parts:
            read.append(len(units))
            yield position, units

    monkeypatch.setattr(log, "read", noted_read)
    monkeypatch.setattr(log, "_chunks", lambda *each: noted(chunks(*each)))
    monkeypatch.setattr(log, "chain", lambda *each: noted(chain(*each)))
    return read


@pytest.mark.parametrize("count", [1000, 20_000])
@pytest.mark.parametrize("how", ["one second", "rolled", "held", "loaded"])
def test_a_cancel_looks_at_as_many_units_however_many_wait(
    monkeypatch: pytest.MonkeyPatch, how: str, count: int
) -> None:
    world = TimerWorld(TimerConfig(log_segment_size=5_200_000, roll_window=20), segment_size=1 << 24)
    due = {"one second": START_MS + 15_000, "rolled": LATER, "held": START_MS + 100, "loaded": START_MS + 5000}[how]
    if how == "held":
        world.timers.set_policy("orders", policy_of({"timer.spread.seconds": "600"}))
    places = [world.send(due, b"") for _ in range(count)]
    world.pass_time(30_000 if how == "rolled" else 200)
    read = counted(world, monkeypatch)
    for place in places[:: count // 50]:
        assert world.cancel(place) in (Cancelled.CANCELLED, Cancelled.DELIVERED)
    assert sum(read) <= 51 * 550
    monkeypatch.undo()
    assert world.cancel(places[0]) is not Cancelled.CANCELLED


def test_a_message_that_is_cancelled_while_its_second_is_loaded_is_not_delivered() -> None:
    """A message that is cancelled while its second is being loaded is not delivered, although its unit, written by
    Apache's broker, was read already and its record is being read."""
    world = TimerWorld()
    places = [world.send(LATER) for _ in range(100)]
    world.run()
    slots = world.timers._slots
    number = LATER // 1000 - 1
    chain = slots.log.chain

    def theirs(last: int) -> Iterator[tuple[Any, Any]]:
        for positions, units in chain(last):
            without = units.copy()
            without["due_ms"] = 0
            yield positions, without

    slots.log.chain = theirs  # type: ignore[method-assign,assignment]
    slots.turns.open(number)
    second = slots.turns.resident[number]
    assert isinstance(second.loader, Loading)
    while second.loader._part is None or len(second.loader._part.waits) < 60:
        assert second.load_next()
    for place in places[::2]:
        assert world.cancel(place) is Cancelled.CANCELLED
    world.pass_time(90_000)
    assert len(world.bodies()) == 50


def test_what_the_log_has_no_more_is_not_found() -> None:
    log = TimerLog(SimulatedFiles(), "/s/timerlog", 10 * UNIT_SIZE)
    places = UnitPositions(log)
    for number in range(500):
        units = np.zeros(1, UNIT)
        units["size"], units["physical_offset"] = UNIT_SIZE, number
        positions = log.positions(1)
        log.append(units, positions)
        places.note(positions, units)
        log.drop_before(log.end - 100 * UNIT_SIZE)
        assert places.find(number) is not None
    assert places.find(0) is None
    assert len(places._starts) < 200
