"""Connections by address: each is opened once, shared, and reopened after it was lost."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from duemq._net.connection import ClientConnection
from duemq.errors import ClosedError

Open = Callable[[str], Awaitable[ClientConnection]]


class Pool:
    """Connections, at most one per address. `open_` opens a connection to an address and makes it ready for use."""

    def __init__(self, open_: Open) -> None:
        self._open = open_
        self._connections: dict[str, ClientConnection] = {}
        self._locks: dict[str, asyncio.Lock] = {}
        self._closed = False

    async def get(self, address: str) -> ClientConnection:
        """Return the connection to an address; open it if necessary. Raises ClosedError, and the errors of `open_`."""
        connection = self._connections.get(address)
        if connection is not None and connection.is_open:
            return connection
        async with self._locks.setdefault(address, asyncio.Lock()):
            connection = self._connections.get(address)
            if connection is None or not connection.is_open:
                self._check_open()
                connection = await self._open(address)
                if self._closed:
                    connection.close()
                self._check_open()
                self._connections[address] = connection
        return connection

    def open_one(self, address: str) -> ClientConnection | None:
        """Return the connection to an address, or None if none is open."""
        connection = self._connections.get(address)
        return connection if connection is not None and connection.is_open else None

    @property
    def addresses(self) -> list[str]:
        """The addresses of the open connections."""
        return [address for address, connection in self._connections.items() if connection.is_open]

    def silent(self, seconds: float) -> list[str]:
        """Return the addresses of open connections with unanswered requests over which nothing was received for more
        than `seconds`."""
        return [
            address
            for address, connection in self._connections.items()
            if connection.is_open and connection.silence > seconds
        ]

    def drop(self, address: str) -> None:
        """Close the connection to an address, so that the next use opens a new one."""
        connection = self._connections.pop(address, None)
        if connection is not None:
            connection.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the client is closed")

    async def close(self) -> None:
        """Close all connections; no further connection is opened."""
        self._closed = True
        connections = list(self._connections.values())
        self._connections.clear()
        for connection in connections:
            connection.close()
        for connection in connections:
            await connection.wait_closed()
