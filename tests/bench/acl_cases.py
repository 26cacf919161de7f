"""What access control costs: signed sends to a broker that checks them, and to one that does not."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from tests.bench.blast import blast, send_frame
from tests.bench.brokers import MakeBroker, running
from tests.bench.figures import Figure, Figures
from tests.bench.measure import cpu_seconds
from tests.peers.broker import HOST, Broker
from tests.support.access import ADMIN, write_accounts

FIGURES: Mapping[str, Figure] = {
    "signed_unchecked": Figure("signed 1 KiB sends, 512 under way, not checked", "/s", True),
    "signed_unchecked_cpu_us": Figure("  broker CPU a message", "us", False),
    "signed": Figure("  with access control", "/s", True),
    "signed_cpu_us": Figure("  broker CPU a message", "us", False),
    "signed_more_percent": Figure("  more CPU", "%", False),
    "signed_one_unchecked_cpu_us": Figure("one signed send at a time, not checked, CPU a message", "us", False),
    "signed_one_cpu_us": Figure("  with access control", "us", False),
    "signed_one_more_percent": Figure("  more CPU", "%", False),
}


@dataclass(frozen=True)
class Sizes:
    """Messages of each run."""

    many: int
    single: int


REAL = Sizes(many=200_000, single=20_000)
TINY = Sizes(many=3200, single=200)
_RUNS: Final = 3
"""Runs of each kind; the one with the least CPU counts, since the first ones warm up a JVM."""
_PROPERTIES: Final = "UNIQ_KEY\x017F00000100002A9F0000000000000000\x02WAIT\x01true\x02TAGS\x01blast\x02"


async def access_control(make: MakeBroker, directory: Path, sizes: Sizes) -> Figures:
    """The same signed requests to a broker without and with access control."""
    figures: Figures = {}
    for name, enabled in (("signed{}_unchecked", "false"), ("signed{}", "true")):
        home = directory / enabled / "broker"
        write_accounts(home)
        properties = {"aclEnable": enabled, "rocketmqHome": str(home)}
        async with running(make, directory / enabled, properties) as broker:
            many, single = name.format(""), name.format("_one")
            for _ in range(_RUNS):
                used, result = await _used(broker, partial(_many, broker, sizes.many))
                figures[many] = max(figures.get(many, 0), result)
                _keep_least(figures, f"{many}_cpu_us", used / sizes.many * 1e6)
                used, _ = await _used(broker, partial(_one_by_one, broker, sizes.single))
                _keep_least(figures, f"{single}_cpu_us", used / sizes.single * 1e6)
    for name in ("signed", "signed_one"):
        unchecked = figures[f"{name}_unchecked_cpu_us"]
        # A run of the smallest size may take less than the system's unit of CPU time.
        figures[f"{name}_more_percent"] = 100 * (figures[f"{name}_cpu_us"] / unchecked - 1) if unchecked else 0.0
    return figures


NAMES = (access_control.__name__,)


async def run(
    make: MakeBroker, directory: Path, sizes: Sizes, only: Collection[str], say: Callable[[str], None]
) -> Figures:
    """Return the figures of the cases whose names are in `only`, for one broker."""
    if access_control.__name__ not in only:
        return {}
    say(access_control.__name__)
    return await access_control(make, directory / "acl", sizes)


async def _used(broker: Broker, work: Callable[[], float]) -> tuple[float, float]:
    before = cpu_seconds(broker.pid)
    result = await asyncio.to_thread(work)
    return cpu_seconds(broker.pid) - before, result


def _keep_least(figures: Figures, name: str, value: float) -> None:
    figures[name] = min(figures.get(name, value), value)


def _many(broker: Broker, count: int) -> float:
    result = blast((HOST, broker.port), "signed", count, account=ADMIN)
    if result.failed:
        raise RuntimeError(f"{result.failed} sends were refused")
    return result.per_second


def _one_by_one(broker: Broker, count: int) -> float:
    frame = send_frame("signed", 0, 1, b"x" * 1024, _PROPERTIES, ADMIN)
    with socket.create_connection((HOST, broker.port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(count):
            connection.sendall(frame)
            if b'"code":0,' not in connection.recv(65536):
                raise RuntimeError("a send was refused")
    return 0.0
