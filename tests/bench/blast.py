"""Measures a broker's own capacity: frames encoded beforehand and pipelined over raw sockets, so that the client costs
little.

Answers are counted, not parsed: a successful one contains the text `"code":0,` in its header.
"""

from __future__ import annotations

import itertools
import math
import select
import socket
import ssl
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from duemq.protocol.codes import RequestCode
from duemq.protocol.frames import codec
from duemq.protocol.frames.command import Command
from duemq.protocol.requests.headers import SendMessageV2
from tests.support.access import signed

_ANY, _GOOD = b'"code":', b'"code":0,'
_BLOCK = 32
_KEPT = len(_GOOD) - 1
_QUEUES = 4
NUMBER_DIGITS = 7
_NUMBER = "@" * NUMBER_DIGITS
DUE_DIGITS = 13
_DUE = "#" * DUE_DIGITS


@dataclass(frozen=True)
class Blast:
    """The result of a run."""

    per_second: float
    failed: int


@dataclass(frozen=True)
class Block:
    """Frames that are written together."""

    data: bytes
    count: int


def send_frame(
    topic: str, queue_id: int, opaque: int, body: bytes, properties: str, account: tuple[str, str] | None = None
) -> bytes:
    """Encode a send as Java clients do, with a JSON header; signed by an account, if there is one."""
    header = SendMessageV2(
        producer_group="bench",
        topic=topic,
        default_topic="TBW102",
        default_topic_queue_nums=_QUEUES,
        queue_id=queue_id,
        sys_flag=0,
        born_timestamp=int(time.time() * 1000),
        flag=0,
        properties=properties,
        reconsume_times=0,
        unit_mode=False,
        batch=False,
    )
    command = Command(
        code=RequestCode.SEND_MESSAGE_V2,
        language="JAVA",
        version=401,
        opaque=opaque,
        ext=header.to_ext(),
        body=body,
    )
    return codec.encode(signed(command, account))


class Frames(ABC):
    """Frames of delayed messages, each with a number, in `number` and in UNIQ_KEY, and its deliver time in `due`, which
    tests.bench.stored and the Java load read again.

    The parts that differ between frames have a fixed width, so that a frame can be joined from pieces.
    """

    @abstractmethod
    def block(self, first: int, count: int) -> Block:
        """Return the frames of the messages from a number on."""

    def blocks(self, count: int) -> Iterator[Block]:
        """Yield the blocks of all messages, the first message alone: it makes the topic."""
        yield self.block(0, 1)
        for first in range(1, count, _BLOCK):
            yield self.block(first, min(_BLOCK, count - first))


def _delayed_frame(topic: str, n: int, size: int, delay: str, due: int | str) -> bytes:
    properties = (
        f"UNIQ_KEY\x017F00000100002A9F000000000{_NUMBER}\x02WAIT\x01true\x02TAGS\x01load\x02"
        f"{delay}\x02due\x01{due}\x02number\x01{_NUMBER}\x02"
    )
    return send_frame(topic, n % _QUEUES, n, b"x" * size, properties)


class PlainFrames(Frames):
    """Frames of messages without a delay, all alike but for their queue."""

    def __init__(self, topic: str, *, size: int = 1024) -> None:
        properties = "UNIQ_KEY\x017F00000100002A9F0000000000000000\x02WAIT\x01true\x02"
        self._frames = [send_frame(topic, n, n, b"x" * size, properties) for n in range(_QUEUES)]

    def block(self, first: int, count: int) -> Block:
        """Return the frames of the messages from a number on."""
        return Block(b"".join([self._frames[number % _QUEUES] for number in range(first, first + count)]), count)


class DelayedFrames(Frames):
    """Frames of messages with a level: message n goes to queue n % 4 with level n % `levels` + 1."""

    def __init__(self, topic: str, *, size: int = 1024, levels: tuple[int, ...] = (1,), delay_ms: int = 0) -> None:
        due = int(time.time() * 1000) + delay_ms
        self._pieces = []
        for n in range(math.lcm(_QUEUES, len(levels))):
            frame = _delayed_frame(topic, n, size, f"DELAY\x01{levels[n % len(levels)]}", due)
            head, middle, tail = frame.split(_NUMBER.encode())
            self._pieces.append((head, middle, tail))

    def block(self, first: int, count: int) -> Block:
        """Return the frames of the messages from a number on."""
        pieces: list[bytes] = []
        every = len(self._pieces)
        for number in range(first, first + count):
            digits = b"%07d" % number
            head, middle, tail = self._pieces[number % every]
            pieces += (head, digits, middle, digits, tail)
        return Block(b"".join(pieces), count)


class TimedFrames(Frames):
    """Frames of messages with a timer: message n goes to queue n % 4 and is due at `due(n)`, ms since the epoch."""

    def __init__(self, topic: str, due: Callable[[int], int], *, size: int = 1024) -> None:
        self._due = due
        self._pieces = []
        for n in range(_QUEUES):
            frame = _delayed_frame(topic, n, size, f"TIMER_DELIVER_MS\x01{_DUE}", _DUE)
            head, rest = frame.split(_NUMBER.encode(), 1)
            before, between, rest = rest.split(_DUE.encode())
            middle, tail = rest.split(_NUMBER.encode())
            self._pieces.append((head, before, between, middle, tail))

    def block(self, first: int, count: int) -> Block:
        """Return the frames of the messages from a number on."""
        pieces: list[bytes] = []
        for number in range(first, first + count):
            digits, due = b"%07d" % number, b"%013d" % self._due(number)
            head, before, between, middle, tail = self._pieces[number % _QUEUES]
            pieces += (head, digits, before, due, between, due, middle, digits, tail)
        return Block(b"".join(pieces), count)


class Pipeline:
    """One connection with many requests under way."""

    def __init__(self, address: tuple[str, int], tls: ssl.SSLContext | None = None) -> None:
        self.socket = socket.create_connection(address)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if tls is not None:
            self.socket = tls.wrap_socket(self.socket)
        self.sent = self.answered = self.good = 0
        self.pending = memoryview(b"")
        self._rest = b""

    @property
    def waiting(self) -> int:
        """Number of requests without an answer yet."""
        return self.sent - self.answered

    def write(self) -> None:
        """Write as much of the pending bytes as the socket takes."""
        while self.pending:
            try:
                self.pending = self.pending[self.socket.send(self.pending) :]
            except (BlockingIOError, ssl.SSLWantWriteError):
                return

    def add(self, block: Block) -> None:
        """Write one more block, as far as the socket takes it."""
        self.pending = memoryview(bytes(self.pending) + block.data if self.pending else block.data)
        self.sent += block.count
        self.write()

    def read(self) -> None:
        """Count the answers that have arrived."""
        try:
            received = self.socket.recv(1 << 20)
        except ssl.SSLWantReadError:
            return
        if not received:
            raise ConnectionError("the broker closed the connection")
        data = self._rest + received
        self.answered += data.count(_ANY) - self._rest.count(_ANY)
        self.good += data.count(_GOOD) - self._rest.count(_GOOD)
        self._rest = data[-_KEPT:]


def blast(
    address: tuple[str, int],
    topic: str,
    count: int,
    *,
    size: int = 1024,
    window: int = 512,
    connections: int = 4,
    dues: Sequence[int] = (),
    account: tuple[str, str] | None = None,
    tls: ssl.SSLContext | None = None,
) -> Blast:
    """Send about `count` messages, a multiple of a block's size, and wait for all answers. With `dues` (also a multiple
    of a block's size) the messages have timers for these times in turn. `account` signs the requests. `tls`: used for
    the connections."""
    properties = "UNIQ_KEY\x017F00000100002A9F0000000000000000\x02WAIT\x01true\x02TAGS\x01blast\x02"
    timers = [f"TIMER_DELIVER_MS\x01{due}\x02" for due in dues] or [""] * 256
    body = b"x" * size
    frames = [send_frame(topic, n % _QUEUES, n, body, properties + timer, account) for n, timer in enumerate(timers)]
    blocks = [Block(b"".join(frames[at : at + _BLOCK]), _BLOCK) for at in range(0, len(frames), _BLOCK)]
    endless = itertools.chain([Block(frames[0], 1)], itertools.cycle(blocks))
    return _pipelined(address, itertools.islice(endless, 1 + count // _BLOCK), window, connections, tls)


def blast_delayed(
    address: tuple[str, int], frames: Frames, count: int, *, window: int = 512, connections: int = 4
) -> None:
    """Send delayed messages 0 to `count` - 1 and wait for all answers. Raises RuntimeError if one is refused."""
    result = _pipelined(address, frames.blocks(count), window, connections)
    if result.failed:
        raise RuntimeError(f"{result.failed} delayed sends were refused")


def _pipelined(
    address: tuple[str, int],
    blocks: Iterator[Block],
    window: int,
    connections: int,
    tls: ssl.SSLContext | None = None,
) -> Blast:
    """Write blocks. The first one makes the topic and is written before the clock starts."""
    everyone = [Pipeline(address, tls) for _ in range(connections)]
    _make_topic(everyone[0], next(blocks))
    for connection in everyone:
        connection.socket.setblocking(False)
    each = window // connections
    block = next(blocks, None)
    start = time.perf_counter()
    while block is not None or any(connection.waiting for connection in everyone):
        for connection in everyone:
            while block is not None and not connection.pending and connection.waiting + _BLOCK <= each:
                connection.add(block)
                block = next(blocks, None)
        writers = [connection.socket for connection in everyone if connection.pending]
        readable, writable, _ = select.select([connection.socket for connection in everyone], writers, [], 30)
        if not readable and not writable:
            raise TimeoutError("the broker does not answer")
        for connection in everyone:
            if connection.socket in readable:
                connection.read()
            if connection.socket in writable:
                connection.write()
    seconds = time.perf_counter() - start
    sent = sum(connection.sent for connection in everyone)
    good = sum(connection.good for connection in everyone)
    for connection in everyone:
        connection.socket.close()
    return Blast(per_second=sent / seconds, failed=sent - good)


def _make_topic(connection: Pipeline, block: Block) -> None:
    connection.socket.settimeout(30)
    connection.socket.sendall(block.data)
    while not connection.answered:
        connection.read()
    if not connection.good:
        raise RuntimeError("the broker refused the first send")
    connection.answered = connection.good = 0
