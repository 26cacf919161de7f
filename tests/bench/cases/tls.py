"""What TLS costs: sends and a backlog with TLS and without to the same broker, handshakes, and idle connections.

Both brokers are as they come: permissive, with the certificate that each makes for itself.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

from duemq.protocol.codes import RequestCode
from duemq.protocol.frames import codec
from tests.bench.blast import blast, send_frame
from tests.bench.brokers import MakeBroker, running
from tests.bench.figures import Figure, Figures
from tests.bench.measure import cpu_seconds, memory
from tests.peers.brokers.broker import HOST, Broker
from tests.support.wire import request

T = TypeVar("T")

FIGURES: Mapping[str, Figure] = {
    "tls_without": Figure("1 KiB sends, 512 under way, without TLS", "/s", True),
    "tls_without_cpu_us": Figure("  broker CPU a message", "us", False),
    "tls_sends": Figure("  with TLS", "/s", True),
    "tls_sends_cpu_us": Figure("  broker CPU a message", "us", False),
    "tls_one_without_cpu_us": Figure("one send at a time, without TLS, CPU a message", "us", False),
    "tls_one_cpu_us": Figure("  with TLS", "us", False),
    "tls_handshake_cpu_us": Figure("a TLS connection with one request, broker CPU", "us", False),
    "tls_connection_kib": Figure("memory of an idle TLS connection", "KiB", False),
}


@dataclass(frozen=True)
class Sizes:
    """Messages of each run, and connections."""

    many: int
    single: int
    connections: int


REAL = Sizes(many=200_000, single=20_000, connections=10_000)
TINY = Sizes(many=3200, single=200, connections=50)
_RUNS: Final = 3
"""Runs of each kind; the one with the least CPU counts, since the first ones warm up a JVM."""
_WARM: Final = 20
_PROPERTIES: Final = "UNIQ_KEY\x017F00000100002A9F0000000000000000\x02WAIT\x01true\x02TAGS\x01blast\x02"


def context() -> ssl.SSLContext:
    """A client that checks nothing, as RocketMQ's are by default."""
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    made.check_hostname = False
    made.verify_mode = ssl.CERT_NONE
    return made


async def tls(make: MakeBroker, directory: Path, sizes: Sizes) -> Figures:
    """The same work with TLS and without."""
    figures: Figures = {}
    async with running(make, directory, {}) as broker:
        for many, single, secured in (
            ("tls_without", "tls_one_without_cpu_us", None),
            ("tls_sends", "tls_one_cpu_us", context()),
        ):
            for _ in range(_RUNS):
                used, result = await _used(broker, partial(_many, broker, sizes.many, secured))
                figures[many] = max(figures.get(many, 0), result)
                _keep_least(figures, f"{many}_cpu_us", used / sizes.many * 1e6)
                used, _ = await _used(broker, partial(_one_by_one, broker, sizes.single, secured))
                _keep_least(figures, single, used / sizes.single * 1e6)
        warm = await asyncio.to_thread(_connect_all, broker, _WARM)
        before = memory(broker.pid).resident
        try:
            used, kept = await _used(broker, partial(_connect_all, broker, sizes.connections))
            figures["tls_handshake_cpu_us"] = used / sizes.connections * 1e6
            figures["tls_connection_kib"] = max(0.0, memory(broker.pid).resident - before) * 1024 / sizes.connections
        finally:
            for connection in (*warm, *kept):
                connection.close()
    return figures


NAMES = (tls.__name__,)


async def run(
    make: MakeBroker, directory: Path, sizes: Sizes, only: Collection[str], say: Callable[[str], None]
) -> Figures:
    """Return the figures of the cases whose names are in `only`, for one broker."""
    if tls.__name__ not in only:
        return {}
    say(tls.__name__)
    return await tls(make, directory / "tls", sizes)


async def _used(broker: Broker, work: Callable[[], T]) -> tuple[float, T]:
    before = cpu_seconds(broker.pid)
    result = await asyncio.to_thread(work)
    return cpu_seconds(broker.pid) - before, result


def _keep_least(figures: Figures, name: str, value: float) -> None:
    figures[name] = min(figures.get(name, value), value)


def _many(broker: Broker, count: int, secured: ssl.SSLContext | None) -> float:
    result = blast((HOST, broker.port), "tls", count, tls=secured)
    if result.failed:
        raise RuntimeError(f"{result.failed} sends were refused")
    return result.per_second


def _connect(broker: Broker, secured: ssl.SSLContext | None) -> socket.socket:
    connection = socket.create_connection((HOST, broker.port))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return secured.wrap_socket(connection) if secured is not None else connection


def _one_by_one(broker: Broker, count: int, secured: ssl.SSLContext | None) -> float:
    frame = send_frame("tls", 0, 1, b"x" * 1024, _PROPERTIES)
    with _connect(broker, secured) as connection:
        for _ in range(count):
            connection.sendall(frame)
            if b'"code":0,' not in connection.recv(65536):
                raise RuntimeError("a send was refused")
    return 0.0


def _connect_all(broker: Broker, count: int) -> list[socket.socket]:
    """Open connections, each with one request, and keep them open."""
    frame, secured = codec.encode(request(RequestCode.CHECK_CLIENT_CONFIG, body=b"{}")), context()
    kept = []
    for _ in range(count):
        connection = _connect(broker, secured)
        connection.sendall(frame)
        if not connection.recv(65536):
            raise RuntimeError("the broker closed a connection")
        kept.append(connection)
    return kept
