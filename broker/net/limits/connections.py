"""Limits on the number of connections (in all, from one address, without a request yet) and of requests per second.

A connection is new until one of its requests is handled. With access control, a request whose sender is refused does
not count, so a client without an account has `maxNewConnectionSeconds` in all, including the TLS handshake. This bounds
the cost of clients that only connect, or that begin a handshake and stop.

Beyond a limit, a connection is closed, with a log line, and a request is answered SYSTEM_BUSY.

Keeps invariants 10 and 11 of ARCHITECTURE.md.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Final

import structlog

from duemq.broker.errors import LimitReached
from duemq.broker.limits import Limits, too_many_requests
from duemq.broker.net.connection import Connection
from duemq.broker.net.rates import Rates

log = structlog.get_logger(__name__)

LOOK_SECONDS: Final = 1.0
"""The interval between looks for connections that have been new for too long."""
_PEERS_TOLD: Final = 10
_LOOKED_AT: Final = 1000
"""The maximum number of connections that one look closes: other clients must not wait while thousands are closed."""


class ConnectionLimits:
    """Counts the connections and requests of one broker, and applies their limits. Belongs to the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, limits: Limits, descriptors: int) -> None:
        """`descriptors`: how many connections the process has descriptors for, in addition to those for files."""
        self._loop = loop
        self._limits = limits
        self.descriptors = descriptors
        self._count = 0
        self._by_host: Counter[str] = Counter()
        self._new: dict[Connection, float] = {}
        """New connections, the oldest first, with the loop's time at which they were made."""
        self._of_connection: Rates[Connection] = Rates()
        self._of_address: Rates[str] = Rates()

    @property
    def new(self) -> int:
        """The number of new connections."""
        return len(self._new)

    def admit(self, connection: Connection) -> str | None:
        """Count a connection; return why it has to be closed, or None if it may stay."""
        self._count += 1
        self._by_host[connection.host] += 1
        limits, reached, why = self._limits, "", None
        if self._count > self.descriptors:
            why = f"there are {self.descriptors} connections; more descriptors make room (ulimit -n)"
            reached = "maxConnections"
        elif 0 < limits.connections < self._count:
            reached, why = "maxConnections", f"there are maxConnections={limits.connections} connections"
        elif 0 < limits.connections_per_address < self._by_host[connection.host]:
            reached = "maxConnectionsPerAddress"
            why = f"its address has {reached}={limits.connections_per_address} connections"
        elif len(self._new) >= limits.new_connections:
            reached = "maxNewConnections"
            why = f"{reached}={limits.new_connections} connections have made no request yet"
        if why is not None:
            limits.reached[reached] += 1
            return why
        if connection.is_new:
            self._new[connection] = self._loop.time()
        return None

    def left(self, connection: Connection) -> None:
        """Stop counting a connection that is gone, whether it was admitted or refused."""
        self._count -= 1
        self._by_host[connection.host] -= 1
        if not self._by_host[connection.host]:
            del self._by_host[connection.host]
        self._new.pop(connection, None)
        self._of_connection.drop(connection)

    def made_request(self, connection: Connection) -> None:
        """Note that a request of the connection was handled: the connection is no longer new."""
        connection.is_new = False
        self._new.pop(connection, None)

    def close_old(self) -> None:
        """Close connections that have been new for too long."""
        seconds = self._limits.new_connection_seconds
        before = self._loop.time() - seconds
        late: list[Connection] = []
        for connection, since in self._new.items():
            if since > before or len(late) >= _LOOKED_AT:
                break
            late.append(connection)
        for connection in late:
            del self._new[connection]
            connection.discard()
        if late:
            self._limits.reached["maxNewConnectionSeconds"] += len(late)
            # One line for all: there may be thousands, and a client that only connected has done nothing wrong.
            peers = [connection.peer for connection in late[:_PEERS_TOLD]]
            log.info("connections_without_request_closed", count=len(late), peers=peers, seconds=seconds)

    @property
    def count_requests(self) -> bool:
        """Whether requests are limited before it is known who made them."""
        return bool(self._limits.requests_per_second or self._limits.requests_per_second_per_address)

    def allowance(self, connection: Connection, wanted: int) -> tuple[int, LimitReached | None]:
        """Return how many of `wanted` requests a connection may make now, and, if not all, the limit that it reached.
        The allowed requests are counted as made."""
        limits, now = self._limits, self._loop.time()
        allowed, why = wanted, None
        rate = limits.requests_per_second
        if rate:
            allowed = self._of_connection.take(connection, wanted, rate, now)
            if allowed < wanted:
                why = too_many_requests("maxRequestsPerSecond", rate, "it", "connection")
        rate = limits.requests_per_second_per_address
        if rate and connection.is_stranger and allowed:
            mine, allowed = allowed, self._of_address.take(connection.host, allowed, rate, now)
            if allowed < mine:
                why = too_many_requests("maxRequestsPerSecondPerAddress", rate, "its address", "address")
                self._of_connection.give_back(connection, mine - allowed, limits.requests_per_second)
        return allowed, why

    def give_back(self, connection: Connection, count: int) -> None:
        """Uncount requests that `allowance` allowed but that were not handled yet: they will be counted again."""
        limits = self._limits
        self._of_connection.give_back(connection, count, limits.requests_per_second)
        if connection.is_stranger:
            self._of_address.give_back(connection.host, count, limits.requests_per_second_per_address)
