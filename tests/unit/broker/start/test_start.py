"""Goal: a start that fails leaves the store as it was, so that the next one knows the deliveries of the last run.

Method: a broker writes a store with messages in levels and timers, some of them delivered; it ends cleanly or is cut
off. An obstacle makes the next start fail, which has to end with one sentence. The files are compared byte by byte; if
the start fails so late that it has changed some, the messages are compared after one more start.
"""

from __future__ import annotations

import asyncio
import gc
import shutil
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import pytest

from duemq.broker import daemon
from duemq.broker.daemon import Broker
from duemq.broker.errors import ConfigError
from duemq.broker.workers import ThreadWorkers
from duemq.protocol.frames import codec
from duemq.protocol.records import record
from duemq.scheduler.timers.files import small_files
from duemq.scheduler.timers.files.wheel import FILE_SIZE as WHEEL_SIZE
from duemq.scheduler.timers.service import Timers
from duemq.storage.clock import ManualClock
from duemq.storage.durability.jobs import FlushJob, Lane
from duemq.storage.durability.recovery import Recovery
from duemq.storage.errors import StoreError
from duemq.storage.files import OsFile
from duemq.storage.store import MessageStore
from tests.peers.ports import free_broker_port, free_port
from tests.support.broker import SEGMENT, UnboundBroker, config
from tests.support.copies import copy_tree, data_of
from tests.support.loop import SteppedLoop, turns
from tests.support.wire import pull, send

START_MS = 1_700_000_000_000
SENDS = 30
WRITTEN_MS = 2000
"""How long a life has lasted when its store is written."""


class Life:
    """A store and its brokers, one after the other."""

    def __init__(
        self, root: Path, loop: SteppedLoop, settings: Sequence[str] = (), size: int = 0, written: Path | None = None
    ) -> None:
        """`size`: minimum size of the bodies. `written`: a directory with stores of other lives with these settings."""
        self.root = root
        self.loop = loop
        self._settings = settings
        self._size = size
        self._written = written
        self.clock = ManualClock(START_MS)

    async def start(self) -> UnboundBroker:
        thresholds = gc.get_threshold()
        broker = UnboundBroker(config(self.root, *self._settings), self.clock)
        try:
            with patch("gc.freeze", lambda: None):
                await broker.start()
        finally:
            gc.set_threshold(*thresholds)
        return broker

    async def pass_time(self, seconds: float) -> None:
        self.clock.advance(int(seconds * 1000))
        self.loop.advance(seconds)
        await turns(20)

    async def write(self, *, cleanly: bool) -> None:
        """Schedule messages, have half of them delivered, and end. The first life does, the others copy its store."""
        kept = self._written / f"{cleanly} {self._size}" if self._written is not None else None
        if kept is not None and kept.exists():
            copy_tree(kept, self.root)
            self.clock.advance(WRITTEN_MS)
            return
        await self._write(cleanly)
        assert self.clock.now_ms() == START_MS + WRITTEN_MS
        if kept is not None:
            copy_tree(self.root, kept)

    async def _write(self, cleanly: bool) -> None:
        broker = await self.start()
        peer = broker.connect()
        for number in range(SENDS):
            delay = "DELAY\x01" + ("1" if number % 2 else "3")
            timer = f"TIMER_DELAY_MS\x01{500 if number % 2 else 9000}\x02UNIQ_KEY\x01K{number}"
            for text in (delay, timer):
                assert (await peer.ask(send("T", self.body(number), properties=text))).code == 0
        await until(lambda: broker.store.checkpoint.recovery_offset is not None)
        await self.pass_time(0.4)
        await until(lambda: broker.store.checkpoint.recovery_offset == broker.store.log.end)
        for _ in range(8):
            await self.pass_time(0.2)
        await until(lambda: bool(list((self.root / "consumequeue").glob("T/*/*"))))
        assert len(await self.bodies(broker)) == SENDS
        if cleanly:
            await broker.stop()
        else:
            await self.cut_off(broker)

    async def cut_off(self, broker: UnboundBroker) -> None:
        """End as kill -9 does: only the written data stays."""
        broker.running.housekeeping.stop()
        broker.running.turns.stop()
        await asyncio.to_thread(broker.lanes.stop)
        await turns()
        broker.store.abandon()
        broker.timers.close()

    async def bodies(self, broker: UnboundBroker) -> list[bytes]:
        peer, found, offset = broker.connect(), list[bytes](), 0
        while True:
            answer = await peer.ask(pull("T", offset))
            if answer.code != 0:
                return found
            found += [message.body for message in record.decode_all(bytes(answer.body))]
            offset = int(answer.ext["nextBeginOffset"])

    def tree(self) -> dict[str, tuple[int, dict[int, bytes]] | None]:
        """The data of all files, None for directories."""
        return {
            str(path.relative_to(self.root)): data_of(path) if path.is_file() else None
            for path in sorted(self.root.rglob("*"))
        }

    def put_back(self, whole: Path) -> None:
        """Replace the store by a copy."""
        shutil.rmtree(self.root)
        copy_tree(whole, self.root)

    async def refused(self) -> str:
        """Make a start that fails; return its sentence."""
        with pytest.raises((StoreError, OSError)) as raised:
            await self.start()
        return str(raised.value)

    async def each_once(self) -> None:
        """Start, and check that each message is delivered once."""
        broker = await self.start()
        end_ms = self.clock.now_ms() + 60_000
        for _ in range(40):
            await self.pass_time(0.5)
        while len(bodies := await self.bodies(broker)) < 2 * SENDS and self.clock.now_ms() < end_ms:
            await self.pass_time(0.1)  # rebuilding may take time
        counts = Counter(bodies)
        await broker.stop()
        assert counts == {self.body(number): 2 for number in range(SENDS)}

    def body(self, number: int) -> bytes:
        return (b"%d" % number).ljust(self._size, b"x")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("written")


@pytest.fixture
async def life(tmp_path: Path, loop: SteppedLoop, written: Path) -> Life:
    return Life(tmp_path / "store", loop, written=written)


async def until(holds: Callable[[], bool]) -> None:
    """Let threads and callbacks run while time stands still, until a condition holds."""
    while not holds():
        await turns(1)


def unreadable(name: str) -> Callable[[Path], None]:
    def damage(root: Path) -> None:
        path = root / "config" / name
        for each in (path, path.with_name(f"{name}.bak")):
            each.parent.mkdir(exist_ok=True)
            each.write_bytes(b'{"half":')

    return damage


def too_short(root: Path) -> None:
    path = root / "commitlog" / f"{0:020}"
    with path.open("r+b") as file:
        file.truncate(SEGMENT - 1)


def misnamed(root: Path) -> None:
    (root / "commitlog" / "notes.txt").write_text("mine")


DAMAGES = [
    *map(unreadable, ["topics.json", "subscriptionGroup.json", "consumerOffset.json", "kvConfig.json"]),
    too_short,
    misnamed,
]


@pytest.mark.parametrize(
    ("damage", "cleanly"),
    [
        # Tables are read in the same way after a stop and after a kill: two of them after each. All of both: soak.
        pytest.param(damage, cleanly, marks=() if number > 3 or number % 2 == cleanly else pytest.mark.soak)
        for number, damage in enumerate(DAMAGES)
        for cleanly in (True, False)
    ],
)
async def test_what_cannot_be_read_stops_the_start_and_nothing_is_changed(
    life: Life, tmp_path: Path, damage: Callable[[Path], None], cleanly: bool
) -> None:
    await life.write(cleanly=cleanly)
    whole = copy_tree(life.root, tmp_path / "whole")
    damage(life.root)
    found = life.tree()
    assert str(life.root) in await life.refused()
    assert life.tree() == found
    life.put_back(whole)
    await life.each_once()


async def test_where_there_was_no_store_a_failed_start_leaves_none(life: Life) -> None:
    life.root.mkdir()
    unreadable("topics.json")(life.root)
    before = life.tree()
    await life.refused()
    assert life.tree() == before


def fails(*_: Any, **__: Any) -> Any:
    raise OSError(5, "Input/output error")


class FailingWrites:
    """The n-th write of a process fails, and each one after it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
        self.left = count
        for name in ("write", "clear"):
            monkeypatch.setattr(OsFile, name, self._counted(getattr(OsFile, name)))

    def _counted(self, real: Callable[..., None]) -> Callable[..., None]:
        def call(*arguments: Any) -> None:
            self.left -= 1
            if self.left < 0:
                raise OSError(28, "No space left on device")
            real(*arguments)

        return call


@pytest.mark.parametrize(
    "point", [(Recovery, "run"), (Timers, "_load"), (daemon, "assemble_storage"), (Recovery, "_read_from")]
)
@pytest.mark.parametrize("cleanly", [True, False], ids=["stopped", "killed"])
async def test_a_start_that_fails_half_way_forgets_nothing(
    life: Life, point: tuple[Any, str], cleanly: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    await life.write(cleanly=cleanly)
    with monkeypatch.context() as patched:
        patched.setattr(*point, fails)
        assert "Input/output error" in await life.refused()
    await life.each_once()


@pytest.mark.parametrize("writes", range(0, 12, 2))
async def test_a_start_that_fails_in_its_writes_forgets_nothing(
    life: Life, writes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    await life.write(cleanly=False)
    with monkeypatch.context() as patched:
        FailingWrites(patched, writes)
        try:
            broker = await life.start()
        except OSError:
            pass
        else:
            await life.cut_off(broker)
    await life.each_once()


async def test_a_start_reads_no_holes_of_the_timer_wheel(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    await life.write(cleanly=False)
    read, sizes = OsFile.read, list[int]()

    def noting(file: OsFile, offset: int, size: int) -> bytes:
        if file.path.endswith("timerwheel"):
            sizes.append(size)
        return read(file, offset, size)

    with monkeypatch.context() as patched:
        patched.setattr(OsFile, "read", noting)
        broker = await life.start()
    assert 0 < sum(sizes) < WHEEL_SIZE // 20
    await life.cut_off(broker)


async def test_a_damaged_table_that_nobody_needs_is_told_and_made_anew(life: Life, logged: list[Any]) -> None:
    await life.write(cleanly=False)
    unreadable("delayOffset.json")(life.root)
    await life.each_once()
    assert "delay_offsets_passed_over" in {line["event"] for line in logged}
    logged.clear()
    await life.each_once()
    assert "delay_offsets_passed_over" not in {line["event"] for line in logged}


@pytest.mark.parametrize("backup", ["gone", "an earlier edition"])
async def test_topics_whose_table_is_lost_are_made_again_and_told(life: Life, backup: str, logged: list[Any]) -> None:
    await life.write(cleanly=True)
    table = life.root / "config" / "topics.json"
    lines = table.read_text().splitlines(keepends=True)
    earlier = "".join(line for line in lines if '"T"' not in line and "crc32" not in line)
    (life.root / "config" / "topics.json.bak").write_text(earlier)
    table.unlink()
    if backup == "gone":
        (life.root / "config" / "topics.json.bak").unlink()
    logged.clear()
    await life.each_once()
    (told,) = [line for line in logged if line["event"] == "topics_made_again"]
    assert (told["log_level"], told["topics"], told["names"]) == ("warning", 1, ["T"])
    logged.clear()
    await life.each_once()
    assert "topics_made_again" not in {line["event"] for line in logged}


async def test_topics_of_a_table_that_is_there_are_all_there_are(life: Life) -> None:
    """An existing table of topics is complete: a deleted topic, whose files a kill left, does not come back."""
    await life.write(cleanly=True)
    table = life.root / "config" / "topics.json"
    lines = table.read_text().splitlines(keepends=True)
    table.write_text("".join(line for line in lines if '"T"' not in line and "crc32" not in line))
    broker = await life.start()
    assert broker.topics.get("T") is None
    await broker.stop()


def longer(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"x")


def zeroed(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def without_first_unit(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(bytes(20))


QUEUES = [
    ("T/0", True),
    ("SCHEDULE_TOPIC_XXXX/0", True),
    ("SCHEDULE_TOPIC_XXXX/2", False),
    ("rmq_sys_wheel_timer/0", False),
]


@pytest.mark.parametrize(("queue", "cleanly"), QUEUES)
@pytest.mark.parametrize("damage", [longer, zeroed, without_first_unit, Path.unlink])
async def test_consume_queues_that_are_lost_or_wrong_are_made_again_and_everything_comes_once(
    life: Life, damage: Callable[[Path], None], queue: str, cleanly: bool, logged: list[Any]
) -> None:
    await life.write(cleanly=cleanly)
    (path,) = (life.root / "consumequeue" / queue).iterdir()
    damage(path)
    logged.clear()
    await life.each_once()
    (told,) = [line for line in logged if line["event"] == "consume_queues_made_again"]
    assert (told["log_level"], told["queues"]) == ("warning", 1)
    assert str(path) in told["reason"]


FILE_SIZE = 131_072


@pytest.mark.parametrize(
    ("gone", "cleanly"),
    [
        (slice(0, 2), True),
        (slice(-1, None), True),
        (slice(2, 3), True),
        (slice(None), True),
        (slice(None), False),
    ],
    ids=str,
)
async def test_commitlog_files_that_are_missing_and_needed_are_told(
    tmp_path: Path, loop: SteppedLoop, written: Path, gone: slice, cleanly: bool
) -> None:
    settings = [f"mappedFileSizeCommitLog={FILE_SIZE}", "maxMessageSize=16384"]
    life = Life(tmp_path / "store", loop, settings, size=9000, written=written)
    await life.write(cleanly=cleanly)
    whole = copy_tree(life.root, tmp_path / "whole")
    for path in sorted((life.root / "commitlog").iterdir())[gone]:
        path.unlink(missing_ok=True)
    found = life.tree()
    if gone == slice(0, 2) and cleanly:
        # As retention leaves it: the missing files are not needed to open the store.
        broker = await life.start()
        assert broker.store.log.begin == 2 * FILE_SIZE
        await broker.stop()
        return
    told = await life.refused()
    assert str(life.root / "commitlog") in told
    assert "missing" in told
    assert life.tree() == found
    life.put_back(whole)
    await life.each_once()


async def test_a_commitlog_that_begins_behind_what_timers_need_is_told(
    life: Life, monkeypatch: pytest.MonkeyPatch
) -> None:
    await life.write(cleanly=False)
    found = life.tree()
    with monkeypatch.context() as patched:
        patched.setattr(small_files, "needed_from", lambda notes: SEGMENT + 1)
        told = await life.refused()
    assert f"{SEGMENT:020}: is missing" in told
    assert life.tree() == found
    await life.each_once()


def a_directory(path: Path) -> None:
    gone(path)
    path.mkdir()


def a_file(path: Path) -> None:
    gone(path)
    path.write_bytes(b"")


def a_broken_link(path: Path) -> None:
    gone(path)
    path.symlink_to(path.parent / "no" / "where")


def gone(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


KINDS = [
    *[(a_directory, name) for name in ("checkpoint", "queuecheck", "lock", "abort", "config/topics.json")],
    *[(a_file, name) for name in ("commitlog", "consumequeue", "config")],
    *[(a_broken_link, name) for name in ("commitlog", "lock", "config")],
]


@pytest.mark.parametrize("cleanly", [True, False])
@pytest.mark.parametrize(("kind", "name"), KINDS)
async def test_what_is_not_of_its_kind_ends_a_start_with_one_sentence_that_names_it(
    life: Life, kind: Callable[[Path], None], name: str, cleanly: bool
) -> None:
    await life.write(cleanly=cleanly)
    kind(life.root / name)
    found = life.tree()
    assert name in await life.refused()
    assert life.tree() == found


@pytest.mark.parametrize("kind", [a_file, gone])
async def test_a_timer_log_that_is_no_directory_is_replaced(life: Life, kind: Callable[[Path], None]) -> None:
    await life.write(cleanly=False)
    kind(life.root / "timerlog")
    await life.each_once()


@pytest.mark.parametrize("name", ["T", "T/0", "SCHEDULE_TOPIC_XXXX", "SCHEDULE_TOPIC_XXXX/0", "rmq_sys_wheel_timer/0"])
async def test_a_consume_queue_that_is_no_directory_is_replaced(life: Life, name: str) -> None:
    await life.write(cleanly=False)
    a_file(life.root / "consumequeue" / name)
    await life.each_once()


async def test_a_stop_that_cannot_flush_ends_and_says_so(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    broker = await life.start()
    peer = broker.connect()
    assert (await peer.ask(send("T", b"x"))).code == 0

    def full(job: FlushJob) -> None:
        raise OSError(24, "Too many open files", "commitlog")

    monkeypatch.setattr(FlushJob, "run", full)
    stopping = asyncio.ensure_future(broker.stop())
    while not stopping.done():
        await life.pass_time(1.0)
    assert "Too many open files" in (stopping.result() or "")
    assert (life.root / "abort").exists()
    monkeypatch.undo()
    broker = await life.start()
    assert await life.bodies(broker) == [b"x"]
    assert await broker.stop() is None


@pytest.mark.parametrize("turns_before", [0, 1, 2, 3, 5, 10])
async def test_a_stop_that_is_cancelled_goes_on(life: Life, turns_before: int) -> None:
    """Further stops wait for it, and have the same result, also once it has ended."""
    broker = await life.start()
    assert (await broker.connect().ask(send("T", b"x"))).code == 0
    stopping = asyncio.ensure_future(broker.stop())
    for _ in range(turns_before):
        await asyncio.sleep(0)
    stopping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stopping
    again = asyncio.ensure_future(broker.stop())
    while not again.done():
        await life.pass_time(0.1)
    assert (again.result(), await broker.stop()) == (None, None)
    broker = await life.start()
    assert await life.bodies(broker) == [b"x"]
    assert await broker.stop() is None


async def test_a_port_that_is_taken_ends_the_start_before_there_is_a_store(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        broker = Broker(config(tmp_path / "of" / "nobody", f"listenPort={port}"))
        with pytest.raises(ConfigError, match=f"port {port} on 127.0.0.1 is taken"):
            await broker.start()
    assert list(tmp_path.iterdir()) == []


async def test_a_start_that_cannot_listen_lets_go_of_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The threads end before the files are closed that they may use, and the ports are free."""
    loop, closed, listening = asyncio.get_running_loop(), list[str](), list[asyncio.Server]()
    create_server = loop.create_server

    def note(of: type, name: str) -> None:
        real = getattr(of, name)

        def call(closing: Any) -> None:
            closed.append(of.__name__)
            real(closing)

        monkeypatch.setattr(of, name, call)

    async def create_one(*arguments: Any, **others: Any) -> asyncio.Server:
        if listening:
            fails()
        listening.append(await create_server(*arguments, **others))
        return listening[0]

    for of, name in ((ThreadWorkers, "stop"), (Timers, "close"), (MessageStore, "abandon")):
        note(of, name)
    monkeypatch.setattr(loop, "create_server", create_one)
    broker = Broker(config(tmp_path / "store", f"listenPort={free_broker_port()}", f"nameserverPort={free_port()}"))
    with pytest.raises(OSError, match="Input/output error"):
        await broker.start()
    assert closed == ["ThreadWorkers", "Timers", "MessageStore"]
    assert not listening[0].is_serving()
    for port in broker.config.ports:
        with socket.socket() as again:
            again.bind((broker.config.host, port))
    with pytest.raises(RuntimeError, match="has not started"):
        await broker.stop()


@pytest.mark.parametrize("is_slow", [False, True], ids=["at once", "in turns"])
async def test_a_stop_takes_nothing_more_from_those_who_are_connected(tmp_path: Path, is_slow: bool) -> None:
    """A stop accepts nothing more from connected clients. Clients that send on and on would make each flush need
    another one: earlier requests are answered, and later bytes are not handled, whether already read or not."""
    life = Life(tmp_path / "store", cast("SteppedLoop", asyncio.get_running_loop()), ["flushDiskType=SYNC_FLUSH"])
    broker = await life.start()
    peer = broker.connect()
    assert (await peer.ask(send("T", b"stored"))).code == 0
    broker.lanes.hold(Lane.FLUSH)
    under_way, too_late = send("T", b"under way"), [send("T", b"too late") for _ in range(3)]
    peer.post(under_way)
    await turns()
    if is_slow:
        peer.transport.block()
        peer.connection.pause_writing()
        peer.post(too_late.pop())
    stopping = asyncio.ensure_future(broker.stop())
    await turns()
    assert not peer.transport.takes_data
    if is_slow:
        peer.connection.resume_writing()
        peer.transport.unblock()
    peer.connection.data_received(b"".join(map(codec.encode, too_late)))
    await turns()
    end = broker.store.log.end
    broker.lanes.let_go(Lane.FLUSH)
    await until(lambda: peer.answer_of(under_way) is not None)
    while not stopping.done():
        await life.pass_time(0.1)
    assert stopping.result() is None
    assert broker.store.log.end == end
    assert [answer.code for answer in peer.responses] == [0, 0]
    broker = await life.start()
    assert await life.bodies(broker) == [b"stored", b"under way"]
    await broker.stop()
