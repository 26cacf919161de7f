"""Goal: reading the topics of many messages that are not in memory takes one read, not one each."""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np
import pytest

from duemq.scheduler.timers.index import names
from duemq.scheduler.timers.index.names import RealTopics
from duemq.storage.errors import NotInMemory
from tests.unit.scheduler.timer_world import START_MS, TimerWorld


@pytest.mark.parametrize("at_once", [1, 1500, 1 << 20])
def test_what_is_wanted_next_is_read_with_what_is_missing(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "_AT_ONCE_BYTES", at_once)
    world = TimerWorld()
    places = [world.send(START_MS + 60_000, bytes(100), topic=f"topic{number % 3}") for number in range(20)]
    waits = np.zeros(20, [("physical", np.int64), ("size", np.int32)])
    waits["physical"] = places
    waits["size"] = [len(world.store.record_at(place) or b"") for place in places]
    log = world.store.log
    in_memory: set[int] = set()
    asked: list[int] = []
    read, locate = log.read, log.locate

    def look(offset: int, size: int) -> bytes | None:
        if offset not in in_memory:
            asked.append(offset)
            raise NotInMemory("a file", offset, lambda: None)
        return read(offset, size)

    def located(offset: int, size: int) -> object:
        in_memory.add(offset)
        return locate(offset, size)

    monkeypatch.setattr(log, "read", look)
    monkeypatch.setattr(log, "locate", located)
    found, positions_missing = None, list[Hashable]()
    while found is None:
        try:
            found = RealTopics(world.store).of(waits)
        except NotInMemory as missing:
            missing.read()
            positions_missing.append(missing.position)
    assert found == [f"topic{number % 3}" for number in range(20)]
    assert positions_missing == asked, "one that fails again and again is known"
    size = int(waits["size"][0])
    assert len(asked) == -(-20 // max(1, at_once // size))
