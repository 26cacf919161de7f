"""Simulated clients. They keep their requests and the answers, which the oracle compares with the messages they saw."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from duemq.protocol.codes import FLAG_RESPONSE
from duemq.protocol.frames import codec
from duemq.protocol.frames.command import Command
from duemq.protocol.frames.frame import JSON, FrameReader
from duemq.protocol.records import record
from tests.simulation.machine.network import Link
from tests.simulation.world import World
from tests.support.wire import pull

TIMEOUT = 3.0


@dataclass
class Attempt:
    """One try to send one message, with a unique body. Times: virtual seconds, and ms since the epoch."""

    body: bytes
    topic: str
    queue: int
    asked: float
    level: int = 0
    deliver_ms: int | None = None
    """The requested deliver time, ms since the epoch."""
    delay_ms: int = 0
    key: str | None = None
    answer: Command | None = None
    answered: float = 0.0
    changes: list[Change] = field(default_factory=list)

    @property
    def code(self) -> int | None:
        return self.answer.code if self.answer is not None else None

    @property
    def message_id(self) -> str | None:
        return self.answer.ext.get("msgId") if self.answer is not None and self.answer.code == 0 else None


@dataclass
class Change:
    """An operator's attempt to cancel a message or to change its time."""

    how: str
    asked: float
    deliver_ms: int | None
    outcome: str | None = None
    """The broker's answer, None without one."""
    answered: float = 0.0


class Client:
    """A connection that is made anew after it is lost."""

    def __init__(self, world: World, asked: Callable[[Command], None] = lambda command: None) -> None:
        """`asked` gets the requests that the broker sends."""
        self._world = world
        self._on_request = asked
        self._link: Link | None = None
        self._reader = FrameReader()
        self._waiting: dict[int, asyncio.Future[Command | None]] = {}
        self._opaque = 1000

    def received(self, data: bytes) -> None:
        for frame in self._reader.receive_data(data):
            command = codec.decode(frame)
            if not command.flag & FLAG_RESPONSE:
                self._on_request(command)
                continue
            waiting = self._waiting.pop(command.opaque, None)
            if waiting is not None and not waiting.done():
                waiting.set_result(command)
        assert self._reader.error is None, f"the broker sent nonsense: {self._reader.error}"

    def lost(self) -> None:
        self._link = None
        self._reader = FrameReader()
        waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            if not future.done():
                future.set_result(None)

    @property
    def is_connected(self) -> bool:
        """Whether there is a connection that is not lost, as far as the client knows."""
        return self._link is not None

    def link(self) -> Link | None:
        if self._link is None:
            self._link = self._world.connect(self)
        return self._link

    async def ask_all(self, commands: list[Command], timeout: float = TIMEOUT) -> list[Command | None]:
        """Return the answers to requests that are sent at once; None for each without an answer in time."""
        link = self.link()
        if link is None:
            return [None] * len(commands)
        loop = asyncio.get_running_loop()
        futures: list[asyncio.Future[Command | None]] = [loop.create_future() for _ in commands]
        for command, future in zip(commands, futures, strict=True):
            self._opaque += 1
            command.opaque = self._opaque
            self._waiting[command.opaque] = future
        link.send(b"".join(codec.encode(command, JSON) for command in commands))
        await asyncio.wait(futures, timeout=timeout)
        for command in commands:
            self._waiting.pop(command.opaque, None)
        return [future.result() if future.done() else None for future in futures]

    async def ask(self, command: Command, timeout: float = TIMEOUT) -> Command | None:
        return (await self.ask_all([command], timeout))[0]

    def hang_up(self) -> None:
        if self._link is not None:
            self._link.hang_up()


@dataclass
class Seen:
    """A message as a consumer received it."""

    body: bytes
    store_timestamp: int
    at: float
    broker_start: int


class Consumer:
    """Reads one queue of one topic from its beginning on, waiting for new messages at its end."""

    def __init__(self, world: World, topic: str, queue: int) -> None:
        self._world = world
        self.topic = topic
        self.queue = queue
        self._client = Client(world)
        self.offset = 0
        self.seen: dict[int, Seen] = {}
        self.conflicts: list[str] = []
        self.history: list[tuple[int, Seen]] = []
        self.is_over = False

    async def run(self) -> None:
        while not self.is_over:
            command = pull(self.topic, self.offset, queue_id=self.queue, suspend_ms=1000, group="readers")
            answer = await self._client.ask(command, 4.0)
            if answer is None:
                await asyncio.sleep(0.05)
                continue
            self._take(answer)
            if answer.code not in (0, 19, 20, 21):
                await asyncio.sleep(0.1)

    def _take(self, answer: Command) -> None:
        following = int(answer.ext.get("nextBeginOffset", self.offset))
        if answer.code == 0:
            for message in record.decode_all(bytes(answer.body)):
                if message.topic != self.topic or message.queue_id != self.queue:
                    self.conflicts.append(f"{self.topic} {self.queue} gave {message.body[:20]!r} of {message.topic}")
                if message.queue_offset != self.offset:
                    self.conflicts.append(f"{self.topic} {self.queue} gave {message.queue_offset} after {self.offset}")
                self.offset = message.queue_offset + 1
                now = self._world.loop.time()
                seen = Seen(message.body, message.store_timestamp, now, self._world.starts)
                self.seen[message.queue_offset] = seen
                self.history.append((message.queue_offset, seen))
        if answer.code == 21 and following != self.offset:
            self.history.append((-1, Seen(b"", following, self._world.loop.time(), self._world.starts)))
        self.offset = following


def properties_of(values: dict[str, Any]) -> str:
    return "\x02".join(f"{name}\x01{value}" for name, value in values.items())
