"""Goal: requests for old messages, of operators or clients, never make the event loop wait for the disk.

Method: a file layer in which nothing is in memory before a thread has read it, and which fails if the loop reads
anything else while it handles requests."""

from __future__ import annotations

import asyncio
import threading
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pytest

from duemq.broker.net.cold_reads import TRIES, ColdReads
from duemq.broker.net.slices import Slices
from duemq.broker.workers import ThreadWorkers
from duemq.protocol.codes import RequestCode
from duemq.protocol.frames import fastjson
from duemq.protocol.frames.command import Command
from duemq.protocol.requests.headers import (
    CancelMessage,
    ChangePending,
    ConsumerSendMsgBack,
    CreateTopic,
    GetConsumeStats,
    ListPending,
    QueryDueCurve,
    QueueOfTopic,
    RecallMessage,
    ResetOffset,
    SearchOffset,
    TopicName,
    ViewMessage,
)
from duemq.scheduler.timers.files.small_files import TimerCheck
from duemq.storage.budget import UNLIMITED, Budget
from duemq.storage.clock import ManualClock, Moment
from duemq.storage.errors import NotInMemory
from duemq.storage.files import OsFile, OsFiles, Ranges
from duemq.storage.queues.pull import ColdRead, patiently
from tests.support.broker import UnboundBroker, running
from tests.support.copies import copy_tree
from tests.support.wire import pull, request, send
from tests.unit.broker.tables.test_clients import heartbeat

BLOCK = 4096


@pytest.fixture
def tmp_path(on_disk: Path) -> Path:
    return on_disk


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
        if not owner.is_cold:
            return super().read(offset, size)
        # Also after a thread has just read it: the memory may have been taken since.
        if owner.may_wait:
            owner.note_wait(self.path, offset, size)
            return super().read(offset, size)
        if not self._blocks([(offset, size)]) - owner.in_memory:
            return super().read(offset, size)
        raise NotInMemory(self.path, (self.path, offset), lambda: self.read_apart([(offset, size)]))

    def read_ranges(self, ranges: Ranges) -> bytes:
        owner = self._owner
        assert isinstance(owner, ColdFiles)
        if owner.is_cold and threading.current_thread() is threading.main_thread():
            owner.note_wait(self.path, *ranges[0])
        return super().read_ranges(ranges)

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
    """Files of which nothing is in memory once `is_cold` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.is_cold = False
        self.in_memory: set[tuple[str, int]] = set()
        self.reads = 0
        self.would_wait: list[str] = []

    def open(self, path: str, *, for_reading: bool = False) -> OsFile:
        return ColdFile(self, path)

    def note_wait(self, path: str, offset: int, size: int) -> None:
        callers = [frame.name for frame in reversed(traceback.extract_stack(limit=12)[:-2])]
        if "_read_records" not in callers:  # deliveries assume that the newest messages are in memory
            self.would_wait.append(f"{path}, {size} bytes at {offset}: {' < '.join(callers)}")


async def old_messages(root: Path, count: int = 300) -> None:
    """Write a store whose messages were all there before the broker started."""
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
    "topic stats": lambda _: request(RequestCode.GET_TOPIC_STATS_INFO, TopicName("T")),
    "consume stats": _update,
    "reset": _reset,
    "pull": lambda _: pull("T", queue_id=1),
    "send back": lambda _: request(RequestCode.CONSUMER_SEND_MSG_BACK, ConsumerSendMsgBack(0, "consumers", 3)),
}


@pytest.mark.parametrize("name", ASKED)
async def test_the_loop_does_not_wait(tmp_path: Path, name: str) -> None:
    """The loop does not wait for cold files, and the answer is the same as with everything in memory."""
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
    "curve": request(RequestCode.DUE_CURVE, QueryDueCurve(60_000, 10)),
    "curve of a topic": request(RequestCode.DUE_CURVE, QueryDueCurve(60_000, 10, topic="T")),
}


@pytest.mark.parametrize("name", PENDING)
async def test_what_is_not_in_the_wheel_yet_is_told_from_the_disk(tmp_path: Path, name: str) -> None:
    """After a start with a backlog, messages that the wheel does not have yet, although settings have just released
    them, are listed from the disk."""
    stopped = "timerStopEnqueue=true"
    async with running(tmp_path / "warm", stopped) as broker:
        sends = [send("T", b"later", properties="TIMER_DELAY_MS\x01300000") for _ in range(50)]
        assert {answer.code for answer in await broker.connect().ask_all(sends)} == {0}
    copy_tree(tmp_path / "warm", tmp_path / "cold")
    answers = []
    for temperature in ("warm", "cold"):
        files = ColdFiles()
        async with running(tmp_path / temperature, stopped, files=files) as broker:
            peer = broker.connect()
            files.is_cold = temperature == "cold"
            broker.settings.update({"timerStopEnqueue": "false"})
            answer = await peer.ask(PENDING[name])
            files.is_cold = False
            answers.append((answer.code, answer.remark, answer.ext, bytes(answer.body)))
    assert answers[0][0] == 0
    assert answers[0] == answers[1]


async def test_who_never_gets_what_was_read_waits_in_the_end(tmp_path: Path) -> None:
    """A request whose pages are taken from memory again and again lets the loop wait in the end, and is answered."""
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
    """A search through many files does not make the loop wait: each file is read once, which is no sign that memory is
    being taken."""
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

    # In steps that begin where the last one ended.
    known.clear()
    searching, woken = search(), asyncio.Event()

    def step(now: Moment, budget: Budget) -> float | None:
        for found in searching:
            raise NotInMemory("a file", found.position, found.run)
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
    """A step that is called again while its read is under way reads once. The step that keeps the store durable is
    called in this way, for each flush."""
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


# --- waiting messages, whose times are not in memory

HOUR_MS = 3_600_000
TIMERS = 120
WAITING_SETTINGS = ("timerMaxDelaySec=31622400", "timerCongestNumEachSlot=1000")
"""A limit on the messages per second makes every send look up how many that second has already."""


def timer(number: int, **more: str) -> Command:
    """A message that waits until an hour of its own."""
    named = {"UNIQ_KEY": f"u{number}", "KEYS": f"k{number % 7}", "TIMER_DELAY_MS": f"{(number + 2) * HOUR_MS}", **more}
    return send(
        "T", b"%d" % number * 200, properties="\x02".join(f"{name}\x01{value}" for name, value in named.items())
    )


class Stored(NamedTuple):
    """A store with waiting messages, and their ids."""

    root: Path
    ids: list[str]
    handles: list[str]
    level_id: str


async def waiting_messages(root: Path) -> Stored:
    """Write a store of timers, some rescheduled and some to be replaced by the next message of their key, and one
    message with a level; all in the wheel."""
    async with running(root, *WAITING_SETTINGS) as broker:
        peer = broker.connect()
        answers = await peer.ask_all([timer(number) for number in range(TIMERS)])
        for number in range(2):
            answers.append(await peer.ask(timer(7 * 99 + number, KEYS=f"r{number}", TIMER_REPLACE="true")))
        level = await peer.ask(send("T", b"level", properties="UNIQ_KEY\x01level\x02DELAY\x0118\x02"))
        ids = [answer.ext["msgId"] for answer in answers]
        header = ChangePending("reschedule", msg_id=ids[5], delay_ms=400 * HOUR_MS)
        changed = await peer.ask(request(RequestCode.CHANGE_PENDING, header))
        assert b"RESCHEDULED" in bytes(changed.body)
    for _ in range(2):  # each checkpoint writes the hours of the wheel's file as they are: no start reads others
        async with running(root, *WAITING_SETTINGS):
            pass
    return Stored(root, ids, [answer.ext["recallHandle"] for answer in answers], level.ext["msgId"])


def change(action: str, **more: Any) -> Command:
    """A request for a change of waiting messages."""
    return request(RequestCode.CHANGE_PENDING, ChangePending(action, **more))


Say = Callable[[Stored], list[Command]]

OF_WAITING: dict[str, Say] = {
    "replace": lambda _: [timer(0, UNIQ_KEY="z", KEYS="r0", TIMER_REPLACE="true", TIMER_DELAY_MS=f"{77 * HOUR_MS}")],
    "replace and replace": lambda _: [
        timer(number, KEYS="r1", TIMER_REPLACE="true", TIMER_DELAY_MS=f"{number * HOUR_MS}") for number in (90, 91)
    ],
    "replace, now": lambda _: [send("T", b"now", properties="UNIQ_KEY\x01z\x02KEYS\x01r0\x02TIMER_REPLACE\x01true")],
    "runtime info": lambda _: [request(RequestCode.GET_BROKER_RUNTIME_INFO)],
    "reschedule": lambda store: [change("reschedule", msg_id=store.ids[9], delay_ms=300 * HOUR_MS)],
    "reschedule once more, by the first id": lambda store: [
        change("reschedule", msg_id=store.ids[5], delay_ms=200 * HOUR_MS)
    ],
    "reschedule once more, what was rescheduled since the start": lambda store: [
        change("reschedule", msg_id=store.ids[7], delay_ms=201 * HOUR_MS)
    ],
    "reschedule by key": lambda _: [change("reschedule", topic="T", key="k3", delay_ms=250 * HOUR_MS)],
    "reschedule of a level's": lambda store: [change("reschedule", msg_id=store.level_id, delay_ms=99 * HOUR_MS)],
    "deliver": lambda store: [change("deliver", msg_id=store.ids[11])],
    "cancel by key": lambda _: [change("cancel", topic="T", key="k2")],
    "cancel by time": lambda _: [change("cancel", topic="T", begin_ms=0, end_ms=2**50)],
    "cancel": lambda store: [request(RequestCode.CANCEL_MESSAGE, CancelMessage(",".join(store.ids[:30])))],
    "cancel of a level's": lambda store: [request(RequestCode.CANCEL_MESSAGE, CancelMessage(store.level_id))],
    "recall": lambda store: [request(RequestCode.RECALL_MESSAGE, RecallMessage("T", store.handles[4]))],
    "recall of what was rescheduled": lambda store: [
        request(RequestCode.RECALL_MESSAGE, RecallMessage("T", store.handles[5]))
    ],
    "send with a timer": lambda _: [timer(50, UNIQ_KEY="z")],
    "sends with timers in one read": lambda _: [
        *(timer(number, UNIQ_KEY=f"z{number}") for number in range(60, 70)),
        send("T", b"now"),
        timer(7, UNIQ_KEY="z"),
    ],
    "send with a timer, to a new topic": lambda _: [
        send("N", b"later", properties=f"UNIQ_KEY\x01z\x02TIMER_DELAY_MS\x01{40 * HOUR_MS}")
    ],
    "send with a time": lambda _: [send("T", b"x", properties="UNIQ_KEY\x01z\x02TIMER_DELIVER_MS\x011700000000\x02")],
    "send with a level": lambda _: [send("T", b"x", properties="UNIQ_KEY\x01z\x02DELAY\x0117\x02")],
    "list": lambda _: [request(RequestCode.LIST_PENDING, ListPending(limit=200))],
    "list of a key": lambda _: [request(RequestCode.LIST_PENDING, ListPending(topic="T", key="k4", limit=200))],
    "count": lambda _: [request(RequestCode.LIST_PENDING, ListPending(count_only=True))],
    "curve": lambda _: [request(RequestCode.DUE_CURVE, QueryDueCurve(HOUR_MS, 200))],
    "curve of a topic": lambda _: [request(RequestCode.DUE_CURVE, QueryDueCurve(HOUR_MS, 200, topic="T"))],
    "timer metrics": lambda _: [request(RequestCode.GET_TIMER_METRICS)],
    "timer check point": lambda _: [request(RequestCode.GET_TIMER_CHECK_POINT)],
    "delay offsets": lambda _: [request(RequestCode.GET_ALL_DELAY_OFFSET)],
    "pause": lambda _: [
        request(
            RequestCode.UPDATE_AND_CREATE_TOPIC,
            CreateTopic("T", "TBW102", 4, 4, 6, "SINGLE_TAG", attributes=f"+timer.paused={on}"),
        )
        for on in ("true", "false")
    ],
    "shorter levels": lambda _: [request(RequestCode.UPDATE_BROKER_CONFIG, body=b"messageDelayLevel=1s 5s 1m\n")],
    "a limit to seconds": lambda _: [request(RequestCode.UPDATE_BROKER_CONFIG, body=b"timerCongestNumEachSlot=7\n")],
    "delete topic": lambda _: [request(RequestCode.DELETE_TOPIC_IN_BROKER, TopicName("T"))],
}


DELIVERED = {"replace, now", "deliver", "send with a time"}
"""After these the queue has a message once the timers have delivered it."""


async def pending_of(broker: UnboundBroker) -> list[tuple[Any, ...]]:
    """The waiting messages, without the fields that depend on the position of their records."""
    page = fastjson.loads((await broker.connect().ask(request(RequestCode.LIST_PENDING, ListPending(limit=1000)))).body)
    return sorted((each["uniqueKey"], each["deliverMs"], each["bodySize"]) for each in page["messages"])


def _told(answers: list[Command]) -> list[tuple[Any, ...]]:
    """The content of answers, without positions that depend on the order of simultaneous requests, and without figures
    that do not depend on the store."""
    told = []
    for answer in answers:
        places = ("msgId", "queueOffset", "recallHandle") if len(answers) > 1 else ()
        ext = {name: value for name, value in answer.ext.items() if name not in places}
        body: Any = bytes(answer.body)
        if body.startswith(b'{"table":{"brokerVersionDesc"'):
            table = fastjson.loads(body)["table"]
            body = {name: table[name] for name in ("earliestMessageTimeStamp", "commitLogMaxOffset", "timerCongestNum")}
        if len(body) == len(TimerCheck().encode()):
            body = None  # it has the timers' progress
        told.append((answer.code, answer.remark, ext, body))
    return told


@pytest.fixture(scope="module")
def world() -> list[Stored]:
    """The store with waiting messages, once a test has written it; all tests have copies of it."""
    return []


@pytest.fixture(scope="module")
def disk() -> Iterator[Path]:
    """A directory for that store, on a real disk as `on_disk`."""
    with TemporaryDirectory(prefix="duemq-") as path:
        yield Path(path) / "store"


@pytest.mark.parametrize("name", OF_WAITING)
async def test_the_loop_does_not_wait_for_what_waits(
    tmp_path: Path, world: list[Stored], disk: Path, name: str
) -> None:
    """The loop does not wait in requests about waiting messages: the answers, the messages that wait afterwards, and
    the size of the logs are the same as with everything in memory."""
    stored = world[0] if world else await waiting_messages(disk)
    world[:] = [stored]
    results = []
    for is_cold in (False, True):
        copy_tree(stored.root, tmp_path / str(is_cold))
        files = ColdFiles()
        clock = ManualClock()
        clock.advance(60_000)
        async with running(tmp_path / str(is_cold), *WAITING_SETTINGS, clock=clock, files=files) as broker:
            peer = broker.connect()
            # Messages since the start are not in memory either.
            await peer.ask_all([timer(3, UNIQ_KEY="since", KEYS="k2"), timer(4, KEYS="r1", TIMER_REPLACE="true")])
            await peer.ask(change("reschedule", msg_id=stored.ids[7], delay_ms=350 * HOUR_MS))
            files.is_cold = is_cold
            answers = await peer.ask_all(OF_WAITING[name](stored))
            files.is_cold = False
            if name in DELIVERED:
                assert (await peer.ask(pull("T", suspend_ms=30_000))).code == 0
            results.append((_told(answers), broker.timers.queue.next_offset, await pending_of(broker)))
        assert not files.would_wait, "\n".join(files.would_wait)
    assert {code for code, *_ in results[0][0]} == {0}, results
    assert results[0] == results[1]
