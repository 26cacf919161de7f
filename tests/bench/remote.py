"""A blocking connection for the few requests that a benchmark makes beside its load, so that they disturb little."""

from __future__ import annotations

import socket
from collections.abc import Iterable
from types import TracebackType

from duemq.protocol.codes import RequestCode
from duemq.protocol.frames import codec
from duemq.protocol.frames.command import Command
from duemq.protocol.frames.frame import FrameReader


class Remote:
    """One connection. Requests made together are written together."""

    def __init__(self, address: tuple[str, int], timeout: float = 30) -> None:
        self._socket = socket.create_connection(address, timeout)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._reader = FrameReader()
        self._opaque = 0

    def __enter__(self) -> Remote:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()

    def requests(self, code: int, all_ext: Iterable[dict[str, str]]) -> list[Command]:
        """Return the answers to requests of one code, in the order of the requests."""
        frames = []
        first = self._opaque + 1
        for ext in all_ext:
            self._opaque += 1
            frames.append(codec.encode(Command(code=code, language="JAVA", opaque=self._opaque, ext=ext)))
        return self.exchange(b"".join(frames), first, len(frames))

    def exchange(self, frames: bytes, first_opaque: int, count: int) -> list[Command]:
        """Write frames unchanged, and return their answers sorted by opaque."""
        self._socket.sendall(frames)
        answers: dict[int, Command] = {}
        while len(answers) < count:
            data = self._socket.recv(1 << 20)
            if not data:
                raise ConnectionError("the broker closed the connection")
            for frame in self._reader.receive_data(data):
                answer = codec.decode(frame)
                answers[answer.opaque] = answer
        return [answers[first_opaque + n] for n in range(count)]

    def max_offsets(self, topic: str, queues: int) -> list[int]:
        """Number of messages that each queue of a topic has ever had, as consumers see it."""
        wanted = [{"topic": topic, "queueId": str(queue_id)} for queue_id in range(queues)]
        return [int(answer.ext["offset"]) for answer in self.requests(RequestCode.GET_MAX_OFFSET, wanted)]
