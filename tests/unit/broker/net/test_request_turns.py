"""Large requests wait for their turn and do not delay small ones; requests of clients that left are dropped. Work is
counted, not timed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from duemq.broker.net.request_turns import IsOver, RequestTime
from duemq.protocol.codes import RequestCode
from duemq.protocol.requests.headers import QueueOfTopic
from tests.support.broker import Peer, UnboundBroker, running
from tests.support.loop import CountBudget, request_turns, turns
from tests.support.wire import encode_all, pull, request, send

TURN, SHARE = 20, 5


class Pieces:
    """Work of a number of pieces, recorded as they are done."""

    def __init__(self, name: str, count: int, done: list[str]) -> None:
        self.name = name
        self.left = count
        self._done = done

    def work(self, is_over: IsOver) -> bool:
        while self.left:
            self.left -= 1
            self._done.append(self.name)
            if is_over():
                break
        return self.left > 0


# --- the queues


async def test_little_and_much_alternate_share_by_share() -> None:
    done: list[str] = []
    waiting = request_turns(asyncio.get_running_loop(), CountBudget(turn=6, share=2))
    for name, count, is_little in (("a", 5, False), ("b", 3, False), ("x", 3, True), ("y", 1, True)):
        waiting.add(Pieces(name, count, done), is_little=is_little)
    await turns(1)
    assert "".join(done) == "xxaayb", "the share of b ended with the turn"
    await turns(1)
    assert "".join(done) == "xxaayb" + "xaabba"


async def test_a_turn_ends_with_its_budget_and_the_next_one_comes_by_itself() -> None:
    done: list[str] = []
    budget = CountBudget(turn=10, share=3)
    waiting = request_turns(asyncio.get_running_loop(), budget)
    waiting.add(Pieces("a", 25, done), is_little=False)
    for expected in (10, 20, 25, 25):
        await turns(1)
        assert len(done) == expected
    assert budget.turns == 3


async def test_what_just_arrived_begins_at_once_while_the_turn_has_time() -> None:
    budget = CountBudget(turn=3, share=1)
    waiting = request_turns(asyncio.get_running_loop(), budget)
    done: list[str] = []

    def arrive(name: str, count: int, *, is_little: bool) -> None:
        work, is_over = Pieces(name, count, done), waiting.begin()
        if is_over is None or work.work(is_over):
            waiting.add(work, is_little=is_little)

    arrive("a", 3, is_little=False)
    arrive("b", 2, is_little=False)
    assert "".join(done) == "aaa" + "bb", "with nothing left to do, the next turn begins with what comes next"
    arrive("c", 3, is_little=False)
    arrive("d", 1, is_little=True)
    assert "".join(done) == "aaabb" + "c"
    await turns(1)
    assert "".join(done) == "aaabbc" + "d" + "cc"


def test_time_is_a_budget() -> None:
    now = 100.0
    budget = RequestTime(turn=0.002, share=0.0005, now=lambda: now)
    assert budget.is_spent()
    budget.renew()
    budget.begin_share()
    now += 0.0004
    assert not budget.spend_share()
    now += 0.0002
    assert budget.spend_share()
    assert not budget.spend()
    now += 0.0013
    budget.begin_share()
    now += 0.0002
    assert budget.spend_share(), "a share ends with its turn"
    assert budget.is_spent()


# --- requests


@pytest.fixture
async def sliced(tmp_path: Path) -> AsyncIterator[UnboundBroker]:
    """A broker that handles a few requests per turn."""
    async with running(tmp_path, budget=CountBudget(TURN, SHARE)) as started:
        assert (await started.connect().ask(send("T", bytes(50_000)))).code == 0
        yield started


def asks(count: int) -> bytes:
    return encode_all(request(RequestCode.GET_MAX_OFFSET, QueueOfTopic("T", 0)) for _ in range(count))


async def test_one_read_of_thousands_of_requests_keeps_nobody_waiting(sliced: UnboundBroker) -> None:
    hoarders = [sliced.connect() for _ in range(30)]
    for hoarder in hoarders:
        hoarder.feed(asks(1000))
    for _ in range(10):
        answered = sum(len(hoarder.responses) for hoarder in hoarders)
        assert (await sliced.connect().ask(request(RequestCode.GET_MAX_OFFSET, QueueOfTopic("T", 0)))).code == 0
        assert sum(len(hoarder.responses) for hoarder in hoarders) <= answered + 2 * TURN
    while any(len(hoarder.responses) < 1000 for hoarder in hoarders):
        await turns(1)
    for hoarder in hoarders:
        opaques = [answer.opaque for answer in hoarder.responses]
        assert opaques == sorted(opaques)
        assert hoarder.transport.takes_data


async def test_nobody_is_forgotten_over_newcomers(sliced: UnboundBroker) -> None:
    """No client is forgotten for newcomers: when other clients' small requests fill every turn, a large request still
    gets half of each turn."""
    hoarder = sliced.connect()
    hoarder.feed(asks(500))
    for _ in range(500 // (TURN // 2) + 2):
        for _ in range(2 * TURN):
            sliced.connect().feed(asks(1))
        await turns(1)
    assert len(hoarder.responses) == 500


async def test_those_who_wait_share_their_turns(sliced: UnboundBroker) -> None:
    hoarders = [sliced.connect() for _ in range(8)]
    for hoarder in hoarders:
        hoarder.feed(asks(400))
    await turns(40)
    counts = [len(hoarder.responses) for hoarder in hoarders]
    assert max(counts) - min(counts) <= TURN + 2 * SHARE


async def test_sends_over_several_turns_are_stored_and_answered_in_order(sliced: UnboundBroker) -> None:
    peer = sliced.connect()
    answers = await peer.ask_all([send("T") for _ in range(300)])
    assert [int(answer.ext["queueOffset"]) for answer in answers] == list(range(1, 301))
    opaques = [answer.opaque for answer in peer.responses]
    assert opaques == sorted(opaques)


async def test_a_broken_stream_is_refused_after_the_requests_before_the_fault(
    sliced: UnboundBroker, logged: list[Any]
) -> None:
    peer = sliced.connect()
    peer.feed(asks(100) + b"GET / HTTP/1.1\r\n")
    assert not peer.transport.is_closing()
    await turns(20)
    assert len(peer.responses) == 100
    assert peer.transport.is_closing()
    assert [line["event"] for line in logged] == ["connection_refused"]


# --- clients that are gone


class Reads:
    """Counts the reads of the log for answers."""

    def __init__(self, broker: UnboundBroker, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        self._read = broker.store.read
        monkeypatch.setattr(broker.store, "read", self.read)

    def read(self, *arguments: Any) -> Any:
        self.count += 1
        return self._read(*arguments)


@pytest.fixture
def reads(broker: UnboundBroker, monkeypatch: pytest.MonkeyPatch) -> Reads:
    return Reads(broker, monkeypatch)


def pulls(count: int) -> bytes:
    return encode_all(pull("T", 0, count=1) for _ in range(count))


@pytest.fixture
async def pulling(broker: UnboundBroker, peer: Peer, reads: Reads) -> Peer:
    """A connected client, and a message of 200 kB in the broker."""
    assert (await peer.ask(send("T", bytes(200_000)))).code == 0
    return broker.connect()


async def test_for_a_client_that_left_one_answer_is_made_at_most(pulling: Peer, reads: Reads) -> None:
    """For a client that left at most one answer is made: its write fails."""
    pulling.transport.is_gone = True
    pulling.feed(pulls(200))
    assert reads.count == 1
    await turns()
    assert reads.count == 1
    assert pulling.connection.is_closed


async def test_what_a_client_asked_that_read_a_bit_and_left_is_dropped(pulling: Peer, reads: Reads) -> None:
    pulling.transport.block()
    pulling.feed(pulls(200))
    stalled = reads.count
    assert stalled < 5
    pulling.transport.is_gone = True
    pulling.transport.unblock()
    await turns()
    assert reads.count == stalled + 1
    assert pulling.connection.is_closed


async def test_what_a_client_asked_whose_connection_we_close_is_dropped(pulling: Peer, reads: Reads) -> None:
    """The requests of a client whose connection the broker closes are dropped: its transport resumes once more, when
    the held bytes are sent."""
    pulling.transport.block()
    pulling.feed(pulls(200))
    stalled = reads.count
    pulling.connection.close()
    pulling.connection.resume_writing()
    await turns()
    pulling.transport.unblock()
    await turns()
    assert reads.count == stalled


async def test_what_waits_for_its_turn_goes_with_its_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(tmp_path, budget=CountBudget(TURN, SHARE)) as broker:
        assert (await broker.connect().ask(send("T", bytes(1000)))).code == 0
        reads = Reads(broker, monkeypatch)
        leaving = [broker.connect() for _ in range(100)]
        for peer in leaving:
            peer.feed(pulls(100))
        begun = reads.count
        for peer in leaving:
            peer.transport.abort()
        await turns(20)
        assert reads.count == begun
        assert not broker.router.connections & {peer.connection for peer in leaving}


async def test_a_request_whose_handling_fails_in_the_connection_ends_only_that(
    sliced: UnboundBroker, monkeypatch: pytest.MonkeyPatch, logged: list[Any]
) -> None:
    bad, good = sliced.connect(), sliced.connect()
    bad.feed(asks(100))
    handle = sliced.router.handle

    def fail(connection: Any, *arguments: Any) -> int:
        if connection is bad.connection:
            raise ZeroDivisionError("by zero")
        return handle(connection, *arguments)

    monkeypatch.setattr(sliced.router, "handle", fail)
    await turns(5)
    assert bad.transport.is_aborted
    assert [line["event"] for line in logged] == ["connection_failed"]
    assert (await good.ask(request(RequestCode.GET_MAX_OFFSET, QueueOfTopic("T", 0)))).code == 0
