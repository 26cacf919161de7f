"""A broker's own capacity: frames encoded beforehand, pipelined over raw sockets, so that the client costs little.

Answers are counted, not parsed: their success is the text `"code":0,` in the header.
"""

from __future__ import annotations

import select
import socket
import time
from dataclasses import dataclass

from protocol import codec
from protocol.codes import RequestCode
from protocol.command import Command
from protocol.headers import SendMessageV2

_ANY, _GOOD = b'"code":', b'"code":0,'
_BLOCK = 32
_KEPT = len(_GOOD) - 1


@dataclass(frozen=True)
class Blast:
    """What a run gave."""

    per_second: float
    failed: int


def send_frame(topic: str, queue_id: int, opaque: int, body: bytes, properties: str) -> bytes:
    """A send as Java clients make it, with a JSON header."""
    header = SendMessageV2(
        producer_group="bench",
        topic=topic,
        default_topic="TBW102",
        default_topic_queue_nums=4,
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
    return codec.encode(command)


class _Connection:
    def __init__(self, address: tuple[str, int], blocks: list[bytes]) -> None:
        self.socket = socket.create_connection(address)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.blocks = blocks
        self.sent = self.answered = self.good = 0
        self.pending = memoryview(b"")
        self._rest = b""

    def write(self) -> None:
        while True:
            if not self.pending:
                return
            try:
                self.pending = self.pending[self.socket.send(self.pending) :]
            except BlockingIOError:
                return

    def next_block(self) -> None:
        self.pending = memoryview(self.blocks[self.sent // _BLOCK % len(self.blocks)])
        self.sent += _BLOCK
        self.write()

    def read(self) -> None:
        data = self._rest + self.socket.recv(1 << 20)
        self.answered += data.count(_ANY) - self._rest.count(_ANY)
        self.good += data.count(_GOOD) - self._rest.count(_GOOD)
        self._rest = data[-_KEPT:]


def blast(
    address: tuple[str, int], topic: str, count: int, *, size: int = 1024, window: int = 512, connections: int = 4
) -> Blast:
    """Send about `count` messages, a multiple of what a block holds, and wait for all answers."""
    properties = "UNIQ_KEY\x017F00000100002A9F0000000000000000\x02WAIT\x01true\x02TAGS\x01blast\x02"
    body = b"x" * size
    everyone = []
    for number in range(connections):
        frames = [send_frame(topic, n % 4, number + n, body, properties) for n in range(256)]
        blocks = [b"".join(frames[at : at + _BLOCK]) for at in range(0, 256, _BLOCK)]
        everyone.append(_Connection(address, blocks))
    _make_topic(everyone[0], frames[0])
    for connection in everyone:
        connection.socket.setblocking(False)
    each = window // connections
    left = count // _BLOCK
    start = time.perf_counter()
    while left or any(connection.answered < connection.sent for connection in everyone):
        for connection in everyone:
            while left and not connection.pending and connection.sent - connection.answered + _BLOCK <= each:
                connection.next_block()
                left -= 1
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


def _make_topic(connection: _Connection, frame: bytes) -> None:
    connection.socket.sendall(frame)
    while not connection.answered:
        connection.read()
    if not connection.good:
        raise RuntimeError("the broker refused the first send")
    connection.answered = connection.good = 0
