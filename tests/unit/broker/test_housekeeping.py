"""Regular work, and the effect of one failing job on the others."""

from __future__ import annotations

from typing import Any

import pytest

from duemq.storage.durability.jobs import Lane
from duemq.storage.durability.retention import Retention
from tests.support.broker import Peer, UnboundBroker
from tests.support.loop import SteppedLoop, turns
from tests.support.wire import send


async def test_a_failed_expiry_does_not_let_a_second_checkpoint_begin_beside_the_first(
    broker: UnboundBroker, peer: Peer, loop: SteppedLoop, monkeypatch: pytest.MonkeyPatch, logged: list[Any]
) -> None:
    looks: list[int] = []

    def look(_: Retention) -> bool:
        looks.append(1)
        raise OSError("the disk is broken")

    monkeypatch.setattr(Retention, "look", look)
    broker.lanes.hold(Lane.FILES)

    async def second() -> None:
        broker.clock.advance(1000)
        loop.advance(1)
        await turns(5)
        await peer.ask(send("T"))

    while not broker.lanes.held[Lane.FILES]:
        await second()
    for _ in range(40):
        await second()
    assert len(looks) > 1, "one that failed does not keep the next from being tried"
    assert {line["event"] for line in logged} >= {"nothing_expired"}
    assert len(broker.lanes.held[Lane.FILES]) == 1, "the first checkpoint is still being made"
    broker.lanes.let_go(Lane.FILES)
