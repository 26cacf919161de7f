"""Group commit: who waits for the disk is answered when a flush that began after its message has ended, and not before;
what waits is bounded in number and time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest

from broker.connection import Connection
from broker.daemon import store_config
from broker.flusher import Flusher
from protocol.codes import RequestCode, ResponseCode
from protocol.headers import QueueOfTopic
from storage.clock import ManualClock
from storage.errors import StoreBroken
from storage.files import OsFiles
from storage.store import MessageStore
from tests.support.broker import config, running
from tests.support.loop import SteppedLoop, turns
from tests.support.wire import request, send

TIMEOUT, CAPACITY = 5.0, 10


class Disk:
    """Flushes that end when the test says so."""

    def __init__(self, loop: SteppedLoop, monkeypatch: pytest.MonkeyPatch) -> None:
        self._loop = loop
        self.jobs: list[tuple[asyncio.Future[None], Callable[[], None]]] = []
        monkeypatch.setattr(loop, "run_in_executor", self._start)

    def _start(self, thread: ThreadPoolExecutor, job: Callable[[], None]) -> asyncio.Future[None]:
        assert not thread._shutdown, "the thread that flushes has ended"
        future = self._loop.create_future()
        self.jobs.append((future, job))
        return future

    async def finish(self, error: BaseException | None = None) -> None:
        future, job = self.jobs.pop(0)
        if error is not None:
            future.set_exception(error)
        else:
            job()
            future.set_result(None)
        await turns()


class Client:
    """As much of a connection as waits for the disk."""

    def __init__(self) -> None:
        self.writes: list[list[bytes]] = []

    def write_many(self, frames: list[bytes]) -> None:
        self.writes.append(frames)


class Bench:
    """A flusher over a store, and a client that waits."""

    def __init__(self, root: Path, loop: SteppedLoop, disk: Disk) -> None:
        settings = store_config(config(root))
        self.store = MessageStore(settings, OsFiles(), ManualClock(), ("127.0.0.1", 10911), lambda level, _: level)
        self.store.open()
        self.disk = disk
        self.flusher = Flusher(self.store, loop, 0.5, TIMEOUT, CAPACITY)
        self.client = Client()

    def append(self) -> None:
        """Write a message to the commitlog."""
        queue = self.store.ensure_queue("T", 0)
        self.store.appender.begin()
        self.store.appender.add(queue, b"body", b"", 0, 0, self.store.appender.store_host)
        self.store.appender.commit()

    def wait(self, name: str, messages: int = 1) -> None:
        """Append a message and wait for it to be durable."""
        self.append()
        frame = name.encode()
        self.flusher.wait(cast("Connection", self.client), [frame], messages, lambda: [b"late " + frame])

    def taken(self) -> list[str]:
        """What the client was sent since the last time."""
        written = [frame.decode() for frames in self.client.writes for frame in frames]
        self.client.writes.clear()
        return written


@pytest.fixture
async def bench(tmp_path: Path, loop: SteppedLoop, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Bench]:
    with monkeypatch.context() as patch:
        made = Bench(tmp_path, loop, Disk(loop, patch))
        yield made
    made.store.close()


async def test_those_who_came_before_a_flush_began_share_it(bench: Bench) -> None:
    """The flush begins in the next turn of the loop, so that messages of one turn are flushed together."""
    bench.wait("a")
    bench.wait("b")
    assert bench.disk.jobs == []
    await turns(1)
    assert len(bench.disk.jobs) == 1
    bench.wait("c")
    await turns()
    assert len(bench.disk.jobs) == 1, "one flush at a time"
    await bench.disk.finish()
    assert bench.taken() == ["a", "b"], "c came after that flush began"
    await bench.disk.finish()
    assert bench.taken() == ["c"]
    assert bench.disk.jobs == []
    assert bench.flusher.waiting == 0


async def test_a_client_gets_the_answers_of_one_flush_in_one_write(bench: Bench) -> None:
    for name in "abc":
        bench.wait(name)
    await turns()
    await bench.disk.finish()
    assert bench.client.writes == [[b"a", b"b", b"c"]]


async def test_who_waits_too_long_is_told_so_and_the_message_counts_no_more(bench: Bench, loop: SteppedLoop) -> None:
    bench.wait("a")
    loop.advance(3)
    bench.wait("b")
    loop.advance(TIMEOUT - 3)
    await turns()
    assert bench.taken() == ["late a"]
    assert bench.flusher.waiting == 1
    loop.advance(3)
    await turns()
    assert bench.taken() == ["late b"]
    await bench.disk.finish()
    assert bench.taken() == []


async def test_when_as_many_wait_as_may_it_is_full(bench: Bench) -> None:
    bench.wait("a", CAPACITY - 1)
    assert not bench.flusher.is_full
    bench.wait("b", 1)
    assert bench.flusher.is_full
    await turns()
    await bench.disk.finish()
    assert not bench.flusher.is_full
    assert bench.taken() == ["a", "b"]


async def test_timeouts_make_room(bench: Bench, loop: SteppedLoop) -> None:
    bench.wait("a", CAPACITY)
    assert bench.flusher.is_full
    loop.advance(TIMEOUT)
    await turns()
    assert not bench.flusher.is_full


async def test_how_long_the_first_has_waited_is_told(bench: Bench, loop: SteppedLoop) -> None:
    assert bench.flusher.head_wait_ms == 0
    bench.wait("a")
    loop.advance(1.5)
    bench.wait("b")
    assert bench.flusher.head_wait_ms == 1500


async def test_a_failed_flush_ends_everything(bench: Bench, logged: list[Any]) -> None:
    """What the disk has is unknown then: nobody is told that a message is durable, and no more are taken."""
    called: list[str] = []
    bench.wait("a")
    await turns()
    bench.flusher.call_when_flushed(bench.store.log.end, lambda: called.append("flushed"))
    await bench.disk.finish(OSError(5, "Input/output error"))
    assert bench.taken() == ["late a"]
    assert bench.flusher.failure is not None
    assert isinstance(bench.store.appender.refusal, StoreBroken)
    assert called == []
    assert [line["event"] for line in logged] == ["flush_failed"]
    assert bench.disk.jobs == []


async def test_callbacks_come_when_a_position_is_durable(bench: Bench) -> None:
    called: list[str] = []
    bench.append()
    position = bench.store.log.end
    bench.append()
    bench.flusher.call_when_flushed(position, lambda: called.append("first"))
    bench.flusher.call_when_flushed(0, lambda: called.append("at once"))
    assert called == ["at once"]
    await turns()
    await bench.disk.finish()
    assert called == ["at once", "first"]


async def test_without_anybody_waiting_a_flush_runs_at_intervals(bench: Bench, loop: SteppedLoop) -> None:
    bench.flusher.start()
    loop.advance(0.6)
    await turns()
    assert bench.disk.jobs == [], "nothing was written"
    bench.append()
    loop.advance(0.4)
    await turns()
    assert bench.disk.jobs == []
    loop.advance(0.2)
    await turns()
    assert len(bench.disk.jobs) == 1
    await bench.disk.finish()
    assert bench.store.log.flushed == bench.store.log.end
    loop.advance(0.6)
    await turns()
    assert bench.disk.jobs == []


async def test_stopping_serves_those_who_wait(bench: Bench) -> None:
    bench.wait("a")
    await turns()
    bench.wait("b")
    stopping = asyncio.ensure_future(bench.flusher.stop())
    await turns()
    assert not stopping.done()
    await bench.disk.finish()
    await bench.disk.finish()
    await turns(5)
    assert bench.taken() == ["a", "b"]
    await stopping


async def test_stopping_serves_those_who_came_in_the_same_turn(bench: Bench) -> None:
    """Their flush has not begun yet."""
    bench.wait("a")
    stopping = asyncio.ensure_future(bench.flusher.stop())
    await turns(2)
    while bench.disk.jobs:
        await bench.disk.finish()
    await stopping
    assert bench.taken() == ["a"]


# --- in a broker


async def test_sends_beyond_the_capacity_are_busy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ("flushDiskType=SYNC_FLUSH", "sendThreadPoolQueueCapacity=3")
    async with running(tmp_path, *settings) as broker:
        peer, loop = broker.connect(), asyncio.get_running_loop()
        assert (await peer.ask(send("T"))).code == 0
        with monkeypatch.context() as patch:
            disk = Disk(loop, patch)  # type: ignore[arg-type]
            waiting = [send("T") for _ in range(3)]
            peer.post(*waiting)
            refused = await peer.ask_all([send("T"), send("T", batch=True), send("New")])
            assert {answer.code for answer in refused} == {ResponseCode.SYSTEM_BUSY}
            assert "[OVERLOAD]" in (refused[0].remark or "")
            answer = await peer.ask(request(RequestCode.GET_MAX_OFFSET, QueueOfTopic("T", 0)))
            assert answer.ext["offset"] == "4"
            await turns()
            await disk.finish()
        assert [answer.code for answer in map(peer.answer_of, waiting) if answer] == [0, 0, 0]
        assert (await peer.ask(send("T"))).code == 0
