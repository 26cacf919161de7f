"""Goal: what an operator or a client asks of old messages never makes the event loop wait for the disk.

Method: a file layer of which nothing is in memory before a thread has read it, and which fails where the loop reads
something else while requests are handled."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from broker.cold_reads import TRIES, ColdReads
from broker.handlers.slices import Slices
from broker.workers import ThreadWorkers
from protocol.codes import RequestCode
from protocol.command import Command
from protocol.headers import (
    ConsumerSendMsgBack,
    DueCurve,
    GetConsumeStats,
    ListPending,
    QueueOfTopic,
    ResetOffset,
    SearchOffset,
    Topic,
    ViewMessage,
)
from storage.budget import UNLIMITED, Budget
from storage.clock import Moment
from storage.errors import NotInMemory
from storage.files import OsFile, OsFiles, Ranges
from storage.pull import ColdRead, patiently
from tests.support.broker import UnboundBroker, running
from tests.support.wire import pull, request, send
from tests.unit.broker.test_clients import heartbeat

BLOCK = 4096


class ColdFile(OsFile):
    __slots__ = ()

    def _blocks(self, ranges: Ranges) -> set[tuple[str, int]]:
        return {
            (self.path, block)
            for offset, size in ranges
            for block in range(offset // BLOCK, (offset + max(size, 1) - 1) // BLOCK + 1)
        }

    def read(self, offset: int, size: int) -> bytes:
        owner = self._owner
        assert isinstance(owner, ColdFiles)
        missing = self._blocks([(offset, size)]) - owner.in_memory
        if not missing or not owner.is_cold:
            return super().read(offset, size)
        assert not owner.may_wait, f"the loop would wait for the disk: {self.path}, {size} bytes at {offset}"
        raise NotInMemory(self.path, (self.path, offset), lambda: self.read_apart([(offset, size)]))

    def read_cached(self, ranges: Ranges) -> bytes | bytearray | None:
        owner = self._owner
        assert isinstance(owner, ColdFiles)
        return None if owner.is_cold and self._blocks(ranges) - owner.in_memory else super().read_cached(ranges)

    def read_apart(self, ranges: Ranges) -> bytes:
        owner = self._owner
        assert isinstance(owner, ColdFiles)
        assert threading.current_thread() is not threading.main_thread()
        owner.in_memory |= self._blocks(ranges)
        owner.reads += 1
        return super().read_apart(ranges)


class ColdFiles(OsFiles):
    """Files of which nothing is in memory from `is_cold` on."""

    def __init__(self) -> None:
        super().__init__()
        self.is_cold = False
        self.in_memory: set[tuple[str, int]] = set()
        self.reads = 0

    def open(self, path: str) -> OsFile:
        return ColdFile(self, path)


async def old_messages(root: Path, count: int = 300) -> None:
    """A store whose messages were all there before the broker started."""
    async with running(root) as broker:
        peer = broker.connect()
        sends = [send("T", b"%d" % number * 20, queue_id=number % 2) for number in range(count)]
        for part in range(0, count, 20):
            broker.clock.advance(1000)
            assert {answer.code for answer in await peer.ask_all(sends[part : part + 20])} == {0}


Ask = Callable[[UnboundBroker], Command]


def _update(broker: UnboundBroker) -> Command:
    broker.offsets.commit("consumers", "T", 0, 100)
    return request(RequestCode.GET_CONSUME_STATS, GetConsumeStats("consumers", "T"))


def _reset(broker: UnboundBroker) -> Command:
    for queue_id in range(4):
        broker.offsets.commit("consumers", "T", queue_id, 0)
    time = broker.clock.now_ms() - 5000
    return request(RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, ResetOffset("T", "consumers", time, True))


ASKED: dict[str, Ask] = {
    "search": lambda broker: request(
        RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, SearchOffset("T", 0, broker.clock.now_ms() - 8000)
    ),
    "earliest": lambda _: request(RequestCode.GET_EARLIEST_MSG_STORETIME, QueueOfTopic("T", 0)),
    "view": lambda _: request(RequestCode.VIEW_MESSAGE_BY_ID, ViewMessage(0)),
    "topic stats": lambda _: request(RequestCode.GET_TOPIC_STATS_INFO, Topic("T")),
    "consume stats": _update,
    "reset": _reset,
    "pull": lambda _: pull("T", queue_id=1),
    "send back": lambda _: request(RequestCode.CONSUMER_SEND_MSG_BACK, ConsumerSendMsgBack(0, "consumers", 3)),
}


@pytest.mark.parametrize("name", ASKED)
async def test_the_loop_does_not_wait(tmp_path: Path, name: str) -> None:
    """And the answer is the one that is given where everything is in memory."""
    await old_messages(tmp_path)
    answers = []
    for is_cold in (False, True):
        files = ColdFiles()
        async with running(tmp_path, files=files) as broker:
            peer = broker.connect()
            await peer.ask(heartbeat("c", "consumers"))
            files.is_cold = is_cold
            answer = await peer.ask(ASKED[name](broker))
            assert not is_cold or files.reads
            files.is_cold = False
            answers.append((answer.code, answer.remark, answer.ext, bytes(answer.body)))
    assert answers[0][0] == 0
    assert answers[0] == answers[1]


PENDING: dict[str, Command] = {
    "list": request(RequestCode.LIST_PENDING, ListPending(limit=10)),
    "list of a topic": request(RequestCode.LIST_PENDING, ListPending(topic="T", limit=10)),
    "count": request(RequestCode.LIST_PENDING, ListPending(count_only=True)),
    "curve": request(RequestCode.DUE_CURVE, DueCurve(60_000, 10)),
    "curve of a topic": request(RequestCode.DUE_CURVE, DueCurve(60_000, 10, topic="T")),
}


@pytest.mark.parametrize("name", PENDING)
async def test_what_is_not_in_the_wheel_yet_is_told_from_the_disk(tmp_path: Path, name: str) -> None:
    """After a start with a backlog, where the settings have just let the wheel have it: it is not there yet."""
    stopped = "timerStopEnqueue=true"
    async with running(tmp_path / "warm", stopped) as broker:
        sends = [send("T", b"later", properties="TIMER_DELAY_MS\x01300000") for _ in range(50)]
        assert {answer.code for answer in await broker.connect().ask_all(sends)} == {0}
    shutil.copytree(tmp_path / "warm", tmp_path / "cold")
    answers = []
    for temperature in ("warm", "cold"):
        files = ColdFiles()
        async with running(tmp_path / temperature, stopped, files=files) as broker:
            peer = broker.connect()
            files.is_cold = temperature == "cold"
            broker.timers.config = replace(broker.timers.config, stop_enqueue=False)
            answer = await peer.ask(PENDING[name])
            files.is_cold = False
            answers.append((answer.code, answer.remark, answer.ext, bytes(answer.body)))
    assert answers[0][0] == 0
    assert answers[0] == answers[1]


async def test_who_never_gets_what_was_read_waits_in_the_end(tmp_path: Path) -> None:
    """Others take the memory faster than it is filled: the answer comes all the same."""
    files = OsFiles()
    reads: list[int] = []

    def look() -> str:
        if files.may_wait:
            return "found"
        raise NotInMemory("a file", 0, lambda: reads.append(1))

    async def share() -> Budget:
        return UNLIMITED

    workers = ThreadWorkers(asyncio.get_running_loop())
    cold = ColdReads(files, workers, share)
    with pytest.raises(NotInMemory):
        cold.at_once(look)
    assert files.may_wait
    assert await cold.run(look) == "found"
    assert len(reads) == 1 + TRIES
    assert await cold.each([look, lambda: "at once"]) == ["found", "at once"]
    workers.stop()


async def test_a_disk_that_cannot_be_read_is_told_after_one_try(tmp_path: Path) -> None:
    files, tries = OsFiles(), []

    def fail() -> None:
        tries.append(files.may_wait)
        raise OSError(5, "Input/output error")

    def look() -> str:
        if not files.may_wait:
            raise NotInMemory("a file", 0, fail)
        fail()
        return ""

    async def share() -> Budget:
        return UNLIMITED

    workers = ThreadWorkers(asyncio.get_running_loop())
    with pytest.raises(OSError, match="Input/output"):
        await ColdReads(files, workers, share).run(look)
    assert len(tries) == 2
    workers.stop()


async def test_what_goes_through_many_files_waits_for_none(tmp_path: Path) -> None:
    """Each is read once: that is no sign of somebody who takes the memory."""
    files, known = OsFiles(), set[int]()
    count = 3 * TRIES

    def look(place: int) -> None:
        assert not files.may_wait
        if place not in known:
            raise NotInMemory("a file", place, lambda: known.add(place))

    def look_at_all() -> int:
        for place in range(count):
            look(place)
        return count

    async def share() -> Budget:
        return UNLIMITED

    workers = ThreadWorkers(asyncio.get_running_loop())
    cold = ColdReads(files, workers, share)
    # At once, though from the start again after each read.
    assert await cold.run(look_at_all) == count

    def search() -> Iterator[ColdRead]:
        for place in range(count):
            yield from patiently(partial(look, place))

    # In steps that begin where they ended.
    known.clear()
    searching, woken = search(), asyncio.Event()

    def step(now: Moment, budget: Budget) -> float | None:
        for found in searching:
            raise NotInMemory("a file", found.place, found.run)
        return 1.0

    run = cold.step(step, woken.set)
    while run(Moment(0, 0.0), UNLIMITED) is None:
        await woken.wait()
        woken.clear()

    # For a request.
    known.clear()
    async for _ in Slices(share, cold).of(search(), is_patient=True):
        raise AssertionError("a search that finds nothing")
    assert len(known) == count
    workers.stop()


async def test_a_step_that_is_called_while_it_reads_reads_once(tmp_path: Path) -> None:
    """As the step that keeps the store durable is, for each flush."""
    files, goes_on, reads, steps = OsFiles(), threading.Event(), [], 0

    def read() -> None:
        goes_on.wait(10)
        reads.append(1)

    def step(now: Moment, budget: Budget) -> float | None:
        nonlocal steps
        steps += 1
        if reads:
            return 1.0
        assert not files.may_wait
        raise NotInMemory("a file", 0, read)

    async def share() -> Budget:
        return UNLIMITED

    workers, woken = ThreadWorkers(asyncio.get_running_loop()), asyncio.Event()
    run = ColdReads(files, workers, share).step(step, woken.set)
    for _ in range(2 * TRIES):
        assert run(Moment(0, 0.0), UNLIMITED) is None
    goes_on.set()
    await woken.wait()
    assert run(Moment(0, 0.0), UNLIMITED) == 1.0
    assert (len(reads), steps) == (1, 2 * TRIES + 1)
    workers.stop()
