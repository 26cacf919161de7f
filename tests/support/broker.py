"""A whole broker in the test's process, without sockets: a `Peer` hands bytes to a connection of the broker and takes
the bytes that the broker writes, through a transport in memory with the flow control of a socket.

Time stands still: the store and the tables read a `ManualClock`, timers belong to the test's loop.
"""

from __future__ import annotations

import asyncio
import gc
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

from duemq.broker.access.auth.store import AuthStore, RocksStore
from duemq.broker.daemon import Broker
from duemq.broker.names.nameserver import NameServer
from duemq.broker.net.connection import Connection
from duemq.broker.net.request_turns import RequestBudget
from duemq.broker.net.router import Router
from duemq.broker.settings.config import BrokerConfig, Origin, load
from duemq.broker.tables.clients import Clients
from duemq.broker.tables.consumer_offsets import ConsumerOffsets
from duemq.broker.tables.groups import Groups
from duemq.broker.tables.topics import Topics
from duemq.broker.workers import Background, ThreadWorkers
from duemq.protocol.codes import FLAG_ONEWAY, FLAG_RESPONSE
from duemq.protocol.frames import codec
from duemq.protocol.frames.command import Command
from duemq.protocol.frames.frame import JSON, FrameReader
from duemq.scheduler.levels.service import LevelQueues
from duemq.scheduler.timers.service import Timers
from duemq.storage.clock import ManualClock
from duemq.storage.durability.jobs import Lane
from duemq.storage.durability.owner import Durability
from duemq.storage.files import Files
from duemq.storage.store import MessageStore
from tests.support import canary
from tests.support.loop import CountBudget

SEGMENT = 8 * 1024 * 1024
T = TypeVar("T")


class MemoryTransport(asyncio.Transport):
    """The transport that a connection writes to, with its flow control. Bytes arrive at the peer at once unless
    `is_blocked`."""

    def __init__(self, peer: Peer, address: tuple[str, int] | None) -> None:
        super().__init__()
        self._peer = peer
        self._address = address
        self._protocol: asyncio.BaseProtocol | None = None
        self._high = 64 * 1024
        self._is_paused = False
        self._held = bytearray()
        self._is_closing = False
        self.is_blocked = False
        self.is_gone = False
        """Whether the peer has gone without closing: the first write finds that out."""
        self.takes_data = True
        """Whether the broker reads from this connection."""
        self.is_aborted = False
        self.most_held = 0

    def attach(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = protocol
        protocol.connection_made(self)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._address if name == "peername" else default

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        assert high is not None
        self._high = high

    def get_write_buffer_size(self) -> int:
        return len(self._held)

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        assert self._protocol is not None, "written to before the connection was made"
        if self._is_closing:
            return
        if self.is_gone:
            self._is_closing = True
            self._held.clear()
            self._lose()
            return
        self._held += data
        self.most_held = max(self.most_held, len(self._held))
        if not self.is_blocked:
            self._deliver()
        elif len(self._held) > self._high and not self._is_paused:
            self._is_paused = True
            self._protocol.pause_writing()

    def block(self) -> None:
        """The peer stops reading."""
        self.is_blocked = True

    def unblock(self) -> None:
        """The peer reads everything that was held back, and goes on reading."""
        self.is_blocked = False
        self._deliver()
        assert self._protocol is not None
        if self._is_closing:
            self._protocol.connection_lost(None)
        elif self._is_paused:
            self._is_paused = False
            self._protocol.resume_writing()

    def _deliver(self) -> None:
        data, self._held = bytes(self._held), bytearray()
        self._peer.received(data)

    def pause_reading(self) -> None:
        self.takes_data = False

    def resume_reading(self) -> None:
        self.takes_data = True

    def is_reading(self) -> bool:
        return self.takes_data

    def is_closing(self) -> bool:
        return self._is_closing

    def close(self) -> None:
        """Close as uvloop's transport does: bytes already held back are sent first, later writes are discarded."""
        if not self._is_closing:
            self._is_closing = True
            if not self._held:
                self._lose()

    def abort(self) -> None:
        if not self.is_aborted:
            self.is_aborted = self._is_closing = True
            self._held.clear()
            self._lose()

    def _lose(self) -> None:
        assert self._protocol is not None
        asyncio.get_running_loop().call_soon(self._protocol.connection_lost, None)


class Peer:
    """A client of the broker. Responses are awaited by opaque; requests from the broker are collected in `requests`."""

    def __init__(self, connection: Connection, address: tuple[str, int] | None = ("127.0.0.1", 40000)) -> None:
        self.connection = connection
        self.transport = MemoryTransport(self, address)
        self._reader = FrameReader()
        self._waiting: dict[int, asyncio.Future[Command]] = {}
        self._asked: dict[int, bool] = {}
        """By opaque: whether the answer may have secrets."""
        self.frames: list[tuple[int, Command]] = []
        """All commands received, in order, with the codec of each header."""
        self.requests: list[Command] = []
        self.responses: list[Command] = []
        """The responses among the frames, in order."""
        self.transport.attach(connection)

    def forget(self) -> None:
        """Drop the frames and responses received so far."""
        self.frames.clear()
        self.responses.clear()

    def received(self, data: bytes) -> None:
        for frame in self._reader.receive_data(data):
            command = codec.decode(frame)
            self.frames.append((frame[0], command))
            if not command.flag & FLAG_RESPONSE:
                self.requests.append(command)
                continue
            self.responses.append(command)
            if not self._asked.get(command.opaque):
                canary.look(f"the answer {command.remark}", f"{command.remark} {command.ext}")
                canary.look(f"the answer {command.remark}", bytes(command.body))
            waiting = self._waiting.pop(command.opaque, None)
            if waiting is not None and not waiting.done():
                waiting.set_result(command)
        assert self._reader.error is None, self._reader.error

    def feed(self, data: bytes) -> None:
        """Give bytes to the broker as one read of its socket, if it is reading."""
        assert self.transport.takes_data, "the broker does not read from this peer"
        self.connection.data_received(data)

    def post(self, *commands: Command, frame_codec: int = JSON) -> None:
        """Give commands to the broker in one read."""
        self._asked.update((command.opaque, canary.is_asked_for(command)) for command in commands)
        self.feed(b"".join(codec.encode(command, frame_codec) for command in commands))

    async def ask(self, command: Command, frame_codec: int = JSON) -> Command:
        """Return the response to a request."""
        return (await self.ask_all([command], frame_codec))[0]

    async def ask_all(self, commands: list[Command], frame_codec: int = JSON) -> list[Command]:
        """Return the responses to requests that arrive in one read, in the order of the requests."""
        loop = asyncio.get_running_loop()
        waiting: list[asyncio.Future[Command]] = [loop.create_future() for _ in commands]
        for command, future in zip(commands, waiting, strict=True):
            assert not command.flag & FLAG_ONEWAY, "a one-way request has no response"
            assert command.opaque not in self._waiting, f"opaque {command.opaque} is in use"
            self._waiting[command.opaque] = future
        self.post(*commands, frame_codec=frame_codec)
        return await asyncio.gather(*waiting)

    def answer_of(self, command: Command) -> Command | None:
        """Return the response to a request, or None if it has not arrived."""
        return next((answer for answer in self.responses if answer.opaque == command.opaque), None)


class GatedWorkers(ThreadWorkers):
    """Threads of which a test may hold back some lanes: work given to a held lane waits in `held` until the test lets
    it go."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        self.held: dict[Lane | Background, list[Callable[[], None]]] = {}

    def hold(self, lane: Lane | Background) -> None:
        self.held.setdefault(lane, [])

    def let_go(self, lane: Lane | Background) -> None:
        for start in self.held.pop(lane):
            start()

    def run(self, lane: Lane | Background, work: Callable[[], T]) -> asyncio.Future[T]:
        if lane not in self.held:
            return super().run(lane, work)
        result: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def finished(done: asyncio.Future[T]) -> None:
            error = done.exception()
            if error is not None:
                result.set_exception(error)
            else:
                result.set_result(done.result())

        self.held[lane].append(lambda: super(GatedWorkers, self).run(lane, work).add_done_callback(finished))
        return result


class UnboundBroker(Broker):
    """A broker that listens on no port. Its workers, `lanes`, are gated."""

    def __init__(
        self,
        config: BrokerConfig,
        clock: ManualClock | None = None,
        files: Files | None = None,
        origin: Origin | None = None,
        budget: RequestBudget | None = None,
        open_auth_store: Callable[[str], AuthStore] = RocksStore,
    ) -> None:
        self.clock = clock or ManualClock()
        super().__init__(
            config,
            clock=self.clock,
            files=files,
            origin=origin,
            workers=GatedWorkers,
            request_budget=budget or CountBudget(),
            open_auth_store=open_auth_store,
        )

    @property
    def lanes(self) -> GatedWorkers:
        assert isinstance(self.running.core.workers, GatedWorkers)
        return self.running.core.workers

    @property
    def store(self) -> MessageStore:
        return self.running.core.store

    @property
    def topics(self) -> Topics:
        return self.running.tables.topics

    @property
    def groups(self) -> Groups:
        return self.running.tables.groups

    @property
    def offsets(self) -> ConsumerOffsets:
        return self.running.tables.offsets

    @property
    def clients(self) -> Clients:
        return self.running.tables.clients

    @property
    def nameserver(self) -> NameServer:
        return self.running.tables.nameserver

    @property
    def levels(self) -> LevelQueues:
        return self.running.storage.levels

    @property
    def timers(self) -> Timers:
        return self.running.storage.timers

    @property
    def durability(self) -> Durability:
        return self.running.storage.durability

    @property
    def router(self) -> Router:
        return self.running.net.router

    def _bind(self, opened: ExitStack) -> list[socket.socket]:
        """Take no port."""
        return []

    def connect(self, address: tuple[str, int] = ("127.0.0.1", 40000)) -> Peer:
        """Connect a new client."""
        return Peer(self.running.net.accept(), address)


@asynccontextmanager
async def running(
    root: Path,
    *settings: str,
    clock: ManualClock | None = None,
    files: Files | None = None,
    origin: Origin | None = None,
    budget: RequestBudget | None = None,
    open_auth_store: Callable[[str], AuthStore] = RocksStore,
) -> AsyncIterator[UnboundBroker]:
    """Run a broker with RocketMQ's defaults and these settings over them. Everything from one read is handled at once,
    unless a budget limits it."""
    thresholds = gc.get_threshold()
    broker = UnboundBroker(config(root, *settings), clock, files, origin, budget, open_auth_store)
    with patch("gc.freeze", lambda: None):  # the broker must be collectable when its test is over
        await broker.start()
    try:
        yield broker
    finally:
        for lane in list(broker.lanes.held):
            broker.lanes.let_go(lane)
        await broker.stop()
        gc.set_threshold(*thresholds)


def config(root: Path, *settings: str) -> BrokerConfig:
    """Settings for a test: a store of small files under `root`, the broker named broker-a."""
    usual = [
        f"storePathRootDir={root}",
        "brokerName=broker-a",
        f"mappedFileSizeCommitLog={SEGMENT}",
        "diskSpaceWarningLevelRatio=1.0",
        "diskSpaceCleanForciblyRatio=1.0",
    ]
    return load(None, [*usual, *settings], {}).config
