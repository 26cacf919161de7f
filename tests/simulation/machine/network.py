"""Connections between simulated clients and the broker: bytes arrive late, in pieces, and not at all once either side
has gone; bytes for a client that does not read are held back."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from duemq.broker.net.connection import Connection
from tests.simulation.machine.loop import WORLD, Process, SimulatedLoop


class Receiver(Protocol):
    """The client's end."""

    def received(self, data: bytes) -> None: ...

    def lost(self) -> None: ...


class Link(asyncio.Transport):
    """One connection. The broker uses it as a transport; `send` and `hang_up` are the client's operations."""

    def __init__(
        self,
        loop: SimulatedLoop,
        chance: random.Random,
        process: Process,
        protocol: Connection,
        client: Receiver,
        port: int,
        latency: Callable[[], float],
    ) -> None:
        super().__init__()
        self._loop = loop
        self._chance = chance
        self._process = process
        self._protocol = protocol
        self._client = client
        self._port = port
        self._latency = latency
        self._high, self._low = 65_536, 16_384
        self._is_paused = False
        self._is_reading = True
        self._incoming: deque[bytes] = deque()
        self._outgoing: deque[bytes] = deque()
        self._held = 0
        self._to_broker_at = self._to_client_at = loop.time()
        self._is_closing = self._is_lost = False
        self.is_read = True
        """Whether the client reads."""
        loop.call_for(process, latency(), self._made)

    def _made(self) -> None:
        if not self._is_lost:
            self._protocol.connection_made(self)

    # --- the client's side

    def send(self, data: bytes) -> None:
        """Put bytes on their way to the broker, in pieces."""
        at = 0
        while at < len(data) and not self._is_lost:
            count = len(data) - at if self._chance.random() < 0.7 else self._chance.randint(1, len(data) - at)
            self._to_broker_at = max(self._to_broker_at, self._loop.time() + self._latency()) + 1e-6
            delay = self._to_broker_at - self._loop.time()
            self._loop.call_for(self._process, delay, self._arrived, data[at : at + count])
            at += count

    def hang_up(self) -> None:
        """Close the connection from the client's side."""
        if not self._is_lost:
            self._loop.call_for(self._process, self._latency(), self._lose)

    def _arrived(self, data: bytes) -> None:
        if self._is_closing or self._is_lost:
            return
        if self._is_reading:
            self._protocol.data_received(data)
        else:
            self._incoming.append(data)

    def read_again(self) -> None:
        """Let the client read the bytes that were held back, and go on reading."""
        self.is_read = True
        self._drain()

    def _drain(self) -> None:
        while self._outgoing and self.is_read and not self._is_lost:
            data = self._outgoing.popleft()
            self._to_client_at = max(self._to_client_at, self._loop.time() + self._latency()) + 1e-6
            self._loop.call_for(WORLD, self._to_client_at - self._loop.time(), self._taken, data)

    def _taken(self, data: bytes) -> None:
        self._held -= len(data)
        if self._is_lost and not self._is_closing:
            return
        self._client.received(data)
        self._loop.call_for(self._process, 0.0, self._flow)

    def _flow(self) -> None:
        if self._is_paused and self._held <= self._low and not self._is_lost:
            self._is_paused = False
            self._protocol.resume_writing()
        if self._is_closing and not self._held:
            self._lose()

    # --- asyncio.Transport

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return ("127.0.0.1", self._port) if name == "peername" else default

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        assert high is not None
        self._high, self._low = high, high // 4

    def get_write_buffer_size(self) -> int:
        return self._held

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        if self._is_closing or self._is_lost or not data:
            return
        self._held += len(data)
        self._outgoing.append(bytes(data))
        self._drain()
        if self._held > self._high and not self._is_paused:
            self._is_paused = True
            self._protocol.pause_writing()

    def pause_reading(self) -> None:
        self._is_reading = False

    def resume_reading(self) -> None:
        self._is_reading = True
        self._loop.call_for(self._process, 0.0, self._read_on)

    def _read_on(self) -> None:
        while self._incoming and self._is_reading and not self._is_closing:
            self._protocol.data_received(self._incoming.popleft())

    def is_reading(self) -> bool:
        return self._is_reading

    def is_closing(self) -> bool:
        return self._is_closing or self._is_lost

    def close(self) -> None:
        if not self._is_closing:
            self._is_closing = True
            if not self._held:
                self._loop.call_for(self._process, 0.0, self._lose)

    def abort(self) -> None:
        self._is_closing = True
        self._outgoing.clear()
        self._loop.call_for(self._process, 0.0, self._lose)

    def _lose(self) -> None:
        if self._is_lost:
            return
        self._is_lost = True
        self._protocol.connection_lost(None)
        self._loop.call_for(WORLD, self._latency(), self._client.lost)

    def process_ended(self) -> None:
        """Close the connection because the broker's process was killed, as the system does."""
        if not self._is_lost:
            self._is_lost = True
            self._loop.call_for(WORLD, self._latency(), self._client.lost)
