"""MOVE_CLOCK: the parts that follow the clock moved by users' tests, and those that do not."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from duemq.broker.tables.clients import EXPIRE_MS
from duemq.protocol.codes import RequestCode, ResponseCode
from duemq.protocol.frames.command import Command
from duemq.protocol.frames.frame import BINARY, JSON
from duemq.protocol.requests.headers import MoveClock, MoveClockResponse, decode_ext
from duemq.storage.clock import MAX_AHEAD_MS
from tests.support.broker import Peer, UnboundBroker, running
from tests.support.loop import SteppedLoop, turns
from tests.support.wire import pull, request, send
from tests.unit.broker.tables.test_clients import beat, members

HOUR_MS = 3_600_000


def move(ms: int) -> Command:
    return request(RequestCode.MOVE_CLOCK, MoveClock(ms))


async def moved(peer: Peer, ms: int, codec: int = JSON) -> int:
    """Move the clock; return the new time."""
    answer = await peer.ask(move(ms), codec)
    assert answer.code == ResponseCode.SUCCESS, answer.remark
    return decode_ext(MoveClockResponse, answer.ext).now


@pytest.fixture
async def movable(tmp_path: Path) -> AsyncIterator[UnboundBroker]:
    async with running(tmp_path, "testClock=true", "fileReservedTime=1", "deleteWhen=" + ALL_DAY) as broker:
        yield broker


ALL_DAY = ";".join(f"{hour:02}" for hour in range(24))


@pytest.mark.parametrize("codec", [JSON, BINARY])
async def test_the_new_time_is_told_in_every_codec(movable: UnboundBroker, codec: int) -> None:
    """The answer has the new time in every codec. The code has to fit into the 16 bits of the binary header."""
    peer = movable.connect()
    now_ms = movable.clock.now_ms()
    assert await moved(peer, 0, codec) == now_ms
    assert await moved(peer, HOUR_MS, codec) == now_ms + HOUR_MS
    movable.clock.advance(500)
    assert await moved(peer, 1, codec) == now_ms + HOUR_MS + 501


async def test_a_message_is_due_by_the_moved_clock_and_not_before(movable: UnboundBroker, loop: SteppedLoop) -> None:
    peer = movable.connect()
    await peer.ask(send("T"))
    await peer.ask(send("T", b"later", properties="DELAY\x0118"))
    held = pull("T", 1, suspend_ms=30_000)
    peer.post(held)
    await moved(peer, 2 * HOUR_MS - 1)
    await turns(10)
    assert peer.answer_of(held) is None
    await moved(peer, 1)
    while peer.answer_of(held) is None:
        await turns()
    answer = peer.answer_of(held)
    assert answer is not None
    assert answer.code == ResponseCode.SUCCESS


async def test_messages_are_stored_at_the_moved_time(movable: UnboundBroker) -> None:
    peer = movable.connect()
    now_ms = await moved(peer, HOUR_MS)
    await peer.ask(send("T"))
    assert movable.store.appender.last_store_timestamp == now_ms


async def test_a_jump_throws_no_client_out_and_deletes_no_message(movable: UnboundBroker, loop: SteppedLoop) -> None:
    peer = movable.connect()
    await peer.ask(send("T"))
    await beat(peer, "c1", "g")
    await moved(peer, 48 * HOUR_MS)
    loop.advance(11)  # housekeeping looks at clients, locks and files
    await turns(10)
    assert await members(peer, "g") == ["c1"]
    assert movable.durability.retention.deletable_before(movable.clock.now_ms()) == movable.store.log.begin
    assert (await peer.ask(pull("T"))).code == ResponseCode.SUCCESS
    movable.clock.advance(EXPIRE_MS + 1)
    loop.advance(11)
    await turns(10)
    assert await members(movable.connect(), "g") == []


@pytest.mark.parametrize("ms", [-1, MAX_AHEAD_MS + 1, 2**63 - 1])
async def test_times_out_of_reach_are_refused(movable: UnboundBroker, ms: int) -> None:
    peer = movable.connect()
    answer = await peer.ask(move(ms))
    assert answer.code == ResponseCode.SYSTEM_ERROR
    assert f"advanceMillis={ms}: a clock can" in (answer.remark or "")
    assert await moved(peer, 0) == movable.clock.now_ms()


async def test_only_a_broker_for_tests_lets_its_clock_be_moved(broker: UnboundBroker, peer: Peer, logged: Any) -> None:
    for ms in (0, HOUR_MS):
        answer = await peer.ask(move(ms))
        assert answer.code == ResponseCode.NO_PERMISSION
        assert "--set testClock=true" in (answer.remark or "")
    await peer.ask(send("T"))
    assert broker.store.appender.last_store_timestamp == broker.clock.now_ms()
