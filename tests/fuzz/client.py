"""A raw client: bytes over a socket, with helpers for frames and commands."""

from __future__ import annotations

import contextlib
import socket
import struct
from typing import Self

from duemq.protocol.frames import codec
from duemq.protocol.frames.command import Command
from duemq.protocol.frames.frame import JSON, FrameReader
from tests.fuzz.live import HOST, PATIENCE_SECONDS


class RawClient:
    """One connection."""

    def __init__(self, port: int, receive_buffer: int | None = None) -> None:
        self.socket = socket.socket()
        if receive_buffer is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.socket.settimeout(PATIENCE_SECONDS)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.connect((HOST, port))
        self.local_port: int = self.socket.getsockname()[1]
        self._reader = FrameReader()
        self._commands: list[tuple[int, Command]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def send(self, data: bytes) -> bool:
        """Send bytes; return whether the broker took them all instead of closing."""
        try:
            self.socket.sendall(data)
        except (ConnectionError, BrokenPipeError):
            return False
        return True

    def next(self) -> tuple[int, Command] | None:
        """Return the next command and the codec of its header; None when the broker closed."""
        while not self._commands:
            try:
                data = self.socket.recv(1 << 20)
            except ConnectionError:
                return None
            if not data:
                return None
            for frame in self._reader.receive_data(data):
                self._commands.append((frame[0], codec.decode(frame)))
            assert self._reader.error is None, self._reader.error
        return self._commands.pop(0)

    def response(self) -> Command:
        """Return the next response, skipping requests from the broker."""
        while (found := self.next()) is not None:
            if found[1].is_response:
                return found[1]
        raise AssertionError("the broker closed the connection")

    def ask(self, command: Command, frame_codec: int = JSON) -> Command:
        """Send a request and return its response, which must be the next command to arrive."""
        assert self.send(codec.encode(command, frame_codec)), "the broker closed the connection"
        answer = self.response()
        assert answer.opaque == command.opaque, "the response to another request"
        return answer

    def wait_closed(self) -> None:
        """Wait until the broker closes."""
        while self.next() is not None:
            pass

    def end_of_input(self) -> None:
        """Tell the broker that no more bytes follow."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self.socket.close()

    def reset(self) -> None:
        """Close with a reset, as a client that dies."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()
