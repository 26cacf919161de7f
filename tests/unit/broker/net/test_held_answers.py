"""Answers that wait for the disk: sent when their position is released, and not before; bounded in number and time."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest

from duemq.broker.net.connection import Connection
from duemq.broker.net.held_answers import HeldAnswers
from duemq.protocol.codes import RequestCode, ResponseCode
from duemq.protocol.requests.headers import QueueOfTopic
from duemq.storage.durability.health import Verdict
from duemq.storage.durability.jobs import Lane
from tests.support.broker import running
from tests.support.loop import SteppedLoop, turns
from tests.support.wire import request, send

TIMEOUT, CAPACITY = 5.0, 10


class Client:
    """The part of a connection that waits for the disk."""

    def __init__(self) -> None:
        self.writes: list[list[bytes]] = []

    def write_many(self, frames: list[bytes]) -> None:
        self.writes.append(frames)


class Bench:
    """Answers of one client."""

    def __init__(self, loop: SteppedLoop) -> None:
        self.wanted: list[int] = []
        self.answers = HeldAnswers(loop, TIMEOUT, lambda: CAPACITY, self.wanted.append)
        self.client = Client()

    def hold(self, name: str, position: int = 0, messages: int = 1) -> None:
        frame = name.encode()
        self.answers.hold(position, cast("Connection", self.client), [frame], messages, lambda: [b"late " + frame])

    def taken(self) -> list[str]:
        """Return the frames sent to the client since the last call."""
        written = [frame.decode() for frames in self.client.writes for frame in frames]
        self.client.writes.clear()
        return written


@pytest.fixture
async def bench(loop: SteppedLoop) -> Bench:
    return Bench(loop)


async def test_answers_go_out_up_to_the_position_that_is_released(bench: Bench) -> None:
    for position, name in ((10, "a"), (20, "b"), (30, "c")):
        bench.hold(name, position)
    assert bench.wanted == [10, 20, 30]
    bench.answers.released(9)
    assert bench.taken() == []
    bench.answers.released(20)
    assert bench.taken() == ["a", "b"]
    bench.answers.released(31)
    assert bench.taken() == ["c"]
    assert bench.answers.waiting == 0


async def test_a_client_gets_the_answers_of_one_release_in_one_write(bench: Bench) -> None:
    for name in "abc":
        bench.hold(name)
    bench.answers.released(0)
    assert bench.client.writes == [[b"a", b"b", b"c"]]


async def test_who_waits_too_long_is_told_so_and_the_message_counts_no_more(bench: Bench, loop: SteppedLoop) -> None:
    bench.hold("a")
    loop.advance(3)
    bench.hold("b")
    loop.advance(TIMEOUT - 3)
    await turns()
    assert bench.taken() == ["late a"]
    assert bench.answers.waiting == 1
    loop.advance(3)
    await turns()
    assert bench.taken() == ["late b"]
    bench.answers.released(0)
    assert bench.taken() == []


async def test_when_as_many_wait_as_may_it_is_full(bench: Bench) -> None:
    bench.hold("a", messages=CAPACITY - 1)
    assert not bench.answers.is_full
    bench.hold("b")
    assert bench.answers.is_full
    bench.answers.released(0)
    assert not bench.answers.is_full
    assert bench.taken() == ["a", "b"]


async def test_timeouts_make_room(bench: Bench, loop: SteppedLoop) -> None:
    bench.hold("a", messages=CAPACITY)
    assert bench.answers.is_full
    loop.advance(TIMEOUT)
    await turns()
    assert not bench.answers.is_full


async def test_how_long_the_first_has_waited_is_told(bench: Bench, loop: SteppedLoop) -> None:
    assert bench.answers.head_wait_ms == 0
    bench.hold("a")
    loop.advance(1.5)
    bench.hold("b")
    assert bench.answers.head_wait_ms == 1500


async def test_when_nothing_will_be_released_any_more_nobody_waits_any_more(bench: Bench, loop: SteppedLoop) -> None:
    bench.hold("a")
    bench.answers.give_up()
    bench.hold("b")
    assert bench.taken() == ["late a", "late b"]
    assert bench.answers.waiting == 0
    loop.advance(TIMEOUT)
    await turns()
    assert bench.taken() == []


# --- in a broker


async def test_sends_beyond_the_capacity_are_busy(tmp_path: Path) -> None:
    settings = ("flushDiskType=SYNC_FLUSH", "sendThreadPoolQueueCapacity=3")
    async with running(tmp_path, *settings) as broker:
        peer = broker.connect()
        assert (await peer.ask(send("T"))).code == 0
        broker.lanes.hold(Lane.FLUSH)
        waiting = [send("T") for _ in range(3)]
        peer.post(*waiting)
        refused = await peer.ask_all([send("T"), send("T", batch=True), send("New")])
        assert {answer.code for answer in refused} == {ResponseCode.SYSTEM_BUSY}
        assert "[OVERLOAD]" in (refused[0].remark or "")
        answer = await peer.ask(request(RequestCode.GET_MAX_OFFSET, QueueOfTopic("T", 0)))
        assert answer.ext["offset"] == "4"
        await turns(10)
        assert [peer.answer_of(command) for command in waiting] == [None] * 3
        broker.lanes.let_go(Lane.FLUSH)
        while peer.answer_of(waiting[-1]) is None:
            await asyncio.sleep(0)
        assert [answer.code for answer in map(peer.answer_of, waiting) if answer] == [0, 0, 0]
        assert (await peer.ask(send("T"))).code == 0


async def test_those_who_came_before_a_flush_began_share_it(tmp_path: Path) -> None:
    """Messages that came before a flush began share it: the flush begins after the other sockets that are ready in a
    turn. One flush runs at a time, and later messages are served by the next."""
    async with running(tmp_path, "flushDiskType=SYNC_FLUSH") as broker:
        peers = [broker.connect() for _ in range(3)]
        await peers[0].ask(send("T"))
        broker.lanes.hold(Lane.FLUSH)
        early, late = [send("T"), send("T")], send("T")
        for peer, command in zip(peers, early, strict=False):
            peer.post(command)
        await turns(10)
        peers[2].post(late)
        await turns(10)
        assert len(broker.lanes.held[Lane.FLUSH]) == 1
        broker.lanes.let_go(Lane.FLUSH)
        broker.lanes.hold(Lane.FLUSH)
        while not broker.lanes.held[Lane.FLUSH]:
            await asyncio.sleep(0)
        assert all(peer.answer_of(command) for peer, command in zip(peers, early, strict=False))
        assert peers[2].answer_of(late) is None, "it came after that flush began"
        broker.lanes.let_go(Lane.FLUSH)
        while peers[2].answer_of(late) is None:
            await asyncio.sleep(0)


async def test_a_poisoned_store_ends_the_broker_and_nobody_waits_for_it(tmp_path: Path, logged: list[Any]) -> None:
    """A poisoned store ends the broker: the content of the disk is unknown, so no message is acknowledged as durable,
    and no more are accepted."""
    async with running(tmp_path, "flushDiskType=SYNC_FLUSH") as broker:
        peer = broker.connect()
        assert (await peer.ask(send("T"))).code == 0
        released = broker.store.log.flushed
        broker.lanes.hold(Lane.FLUSH)
        waiting = send("T")
        peer.post(waiting)
        await turns(10)
        broker.store.health.poison("the disk is broken")
        await turns(10)
        answer = peer.answer_of(waiting)
        assert answer is not None
        assert answer.code == ResponseCode.FLUSH_DISK_TIMEOUT
        assert (await broker.failed) == "the disk is broken"
        refused = await peer.ask(send("T"))
        assert (refused.code, "the disk is broken" in (refused.remark or "")) == (
            ResponseCode.SERVICE_NOT_AVAILABLE,
            True,
        )
        broker.lanes.let_go(Lane.FLUSH)
        await turns(10)
        assert broker.store.log.flushed == released, "a flush that ended well after that says nothing"
    assert broker.store.health.verdict is Verdict.CLOSED
    assert (tmp_path / "abort").exists(), "the next start has to find out what the disk holds"
