"""The cases of duemq's own client, with each broker: how fast one process sends, by `send_many` and one by one."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.bench.brokers import MakeBroker, running
from tests.bench.figures import Figure, Figures
from tests.peers.broker import Broker

FIGURES: Mapping[str, Figure] = {
    "python_many": Figure("Python client, send_many of 1 KiB", "/s", True),
    "python_many_cpu_us": Figure("  client CPU a message", "us", False),
    "python_single": Figure("Python client, 1 KiB one by one, 256 under way", "/s", True),
    "python_single_cpu_us": Figure("  client CPU a message", "us", False),
    "python_each": Figure("Python client, send_each of 1 KiB", "/s", True),
    "python_each_growth_mib": Figure("  growth of the client's memory meanwhile, anonymous", "MiB", False),
}


@dataclass(frozen=True)
class Sizes:
    """Messages of each case."""

    many: int
    single: int
    each: int


REAL = Sizes(many=300_000, single=150_000, each=1_000_000)
TINY = Sizes(many=1000, single=500, each=1000)


async def python_sends(broker: Broker, sizes: Sizes) -> Figures:
    """Each kind of send in a process of its own."""
    many = await _send(broker, sizes.many, "many")
    single = await _send(broker, sizes.single, "single")
    each = await _send(broker, sizes.each, "each")
    return {
        "python_many": many["per_second"],
        "python_many_cpu_us": many["cpu_us"],
        "python_single": single["per_second"],
        "python_single_cpu_us": single["cpu_us"],
        "python_each": each["per_second"],
        "python_each_growth_mib": each["growth_mib"],
    }


async def _send(broker: Broker, count: int, kind: str) -> dict[str, Any]:
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.bench.python_client",
        broker.nameserver,
        str(count),
        kind,
        stdout=asyncio.subprocess.PIPE,
    )
    out, _ = await child.communicate()
    if child.returncode != 0:
        raise RuntimeError(f"the client failed with {child.returncode}")
    figures: dict[str, Any] = json.loads(out)
    return figures


NAMES = (python_sends.__name__,)


async def run(
    make: MakeBroker, directory: Path, sizes: Sizes, only: Collection[str], say: Callable[[str], None]
) -> Figures:
    """Return the figures of the cases whose names are in `only`, for one broker."""
    if python_sends.__name__ not in only:
        return {}
    say(python_sends.__name__)
    async with running(make, directory / "client", {}) as broker:
        return await python_sends(broker, sizes)
