"""The cases of duemq's own client, with each broker: how fast one process sends, by `send_many` and one by one, and
receives; and how long a program takes until it has the client. Apache's Java client has the same tasks in `cases`."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.bench.brokers import MakeBroker, running
from tests.bench.figures import Figure, Figures
from tests.peers.brokers.broker import Broker

FIGURES: Mapping[str, Figure] = {
    "python_many": Figure("Python client, send_many of 1 KiB", "/s", True),
    "python_many_cpu_us": Figure("  client CPU a message", "us", False),
    "python_single": Figure("Python client, 1 KiB one by one, 256 under way", "/s", True),
    "python_single_cpu_us": Figure("  client CPU a message", "us", False),
    "python_each": Figure("Python client, send_each of 1 KiB", "/s", True),
    "python_each_growth_mib": Figure("  growth of the client's memory meanwhile, anonymous", "MiB", False),
    "python_handle": Figure("backlog of 1 KiB to a Python consumer's handler", "/s", True),
    "python_handle_cpu_us": Figure("  client CPU a message", "us", False),
    "python_handle_growth_mib": Figure("  growth of the client's memory meanwhile, anonymous", "MiB", False),
    "python_take": Figure("backlog of 1 KiB to a Python consumer, receive_many and ack", "/s", True),
    "python_take_cpu_us": Figure("  client CPU a message", "us", False),
    "python_import_ms": Figure("Python's start, and import duemq", "ms", False),
    "python_producer_ms": Figure("  and the first use of duemq.Producer", "ms", False),
    "python_help_ms": Figure("duemq --help", "ms", False),
}


@dataclass(frozen=True)
class Sizes:
    """Messages of each case."""

    many: int
    single: int
    each: int
    handle: int
    take: int
    starts: int
    """Starts of a program, the fastest of which counts."""


REAL = Sizes(many=300_000, single=150_000, each=1_000_000, handle=1_200_000, take=300_000, starts=20)
TINY = Sizes(many=1000, single=500, each=1000, handle=1000, take=1000, starts=1)


async def python_sends(broker: Broker, sizes: Sizes) -> Figures:
    """Each kind of send in a process of its own."""
    many = await _measure(broker, sizes.many, "many")
    single = await _measure(broker, sizes.single, "single")
    each = await _measure(broker, sizes.each, "each")
    return {
        "python_many": many["per_second"],
        "python_many_cpu_us": many["cpu_us"],
        "python_single": single["per_second"],
        "python_single_cpu_us": single["cpu_us"],
        "python_each": each["per_second"],
        "python_each_growth_mib": each["growth_mib"],
    }


async def python_receives(broker: Broker, sizes: Sizes) -> Figures:
    """Each kind of consumer in a process of its own. With the warm-up, a handler gets more than a million messages."""
    handle = await _measure(broker, sizes.handle, "handle")
    take = await _measure(broker, sizes.take, "take")
    return {
        "python_handle": handle["per_second"],
        "python_handle_cpu_us": handle["cpu_us"],
        "python_handle_growth_mib": handle["growth_mib"],
        "python_take": take["per_second"],
        "python_take_cpu_us": take["cpu_us"],
    }


async def python_starts(broker: Broker, sizes: Sizes) -> Figures:
    """How long programs take that do nothing else, the interpreter's own start included. No broker has a part in it."""
    return {
        "python_import_ms": await _start(sizes.starts, "-c", "import duemq"),
        "python_producer_ms": await _start(sizes.starts, "-c", "import duemq; duemq.Producer"),
        "python_help_ms": await _start(sizes.starts, "-m", "duemq", "--help"),
    }


async def _start(times: int, *arguments: str) -> float:
    """The shortest of several runs of an interpreter, in ms. The first one, which compiles, does not count."""
    # As installed packages are: with the compiled files of a run before.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    found = []
    for _ in range(1 + times):
        begun = time.perf_counter()
        child = await asyncio.create_subprocess_exec(
            sys.executable, *arguments, stdout=asyncio.subprocess.DEVNULL, env=environment
        )
        if await child.wait() != 0:
            raise RuntimeError(f"{arguments} ended with {child.returncode}")
        found.append((time.perf_counter() - begun) * 1000)
    return min(found[1:])


async def _measure(broker: Broker, count: int, kind: str) -> dict[str, Any]:
    return await measure("tests.bench.python_client", broker.nameserver, count, kind)


async def measure(program: str, address: str, count: int, kind: str) -> dict[str, Any]:
    """Run a client program, `python_client` or `kafka_client`, in a process of its own and return what it printed."""
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", program, address, str(count), kind, stdout=asyncio.subprocess.PIPE
    )
    out, _ = await child.communicate()
    if child.returncode != 0:
        raise RuntimeError(f"the client failed with {child.returncode}")
    figures: dict[str, Any] = json.loads(out)
    return figures


CASES = (python_sends, python_receives, python_starts)
NAMES = tuple(case.__name__ for case in CASES)


async def run(
    make: MakeBroker, directory: Path, sizes: Sizes, only: Collection[str], say: Callable[[str], None]
) -> Figures:
    """Return the figures of the cases whose names are in `only`, for one broker."""
    figures: Figures = {}
    wanted = [case for case in CASES if case.__name__ in only]
    if not wanted:
        return figures
    async with running(make, directory / "client", {}) as broker:
        for case in wanted:
            say(case.__name__)
            figures |= await case(broker, sizes)
    return figures
