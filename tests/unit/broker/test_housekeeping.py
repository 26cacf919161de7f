"""What housekeeping does at a time, and what one of its works that fails leaves to the others."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from storage.store import MessageStore
from tests.support.broker import Peer, UnboundBroker
from tests.support.loop import SteppedLoop, turns
from tests.support.wire import send


async def test_a_failed_expiry_does_not_let_a_second_checkpoint_begin_beside_the_first(
    broker: UnboundBroker, peer: Peer, loop: SteppedLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, planned, expired = threading.Event(), [], []
    real = MessageStore.plan_checkpoint

    def plan(store: MessageStore) -> Any:
        job = real(store)
        run = job.run

        def slowly() -> None:
            disk.wait(30)
            run()

        monkeypatch.setattr(job, "run", slowly)
        planned.append(job)
        return job

    def expire(_: MessageStore) -> Iterator[list[str]]:
        expired.append(1)
        yield []
        raise OSError("the disk is broken")

    monkeypatch.setattr(MessageStore, "plan_checkpoint", plan)
    monkeypatch.setattr(MessageStore, "expire", expire)
    try:
        await peer.ask(send("T"))
        for _ in range(40):
            loop.advance(1)
            await turns(5)
            await peer.ask(send("T"))
        assert len(expired) > 1, "one that failed does not keep the next from being tried"
        assert len(planned) == 1, "the first is still being made"
    finally:
        disk.set()
