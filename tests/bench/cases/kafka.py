"""duemq's own client beside aiokafka, an asyncio client whose API has the same shape. In the rounds of Apache's broker
the cases measure aiokafka with Apache Kafka's broker, in the others duemq's client with duemq's broker."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from tests.bench.brokers import MakeBroker, ours, running
from tests.bench.cases.clients import measure
from tests.bench.figures import Figure, Figures
from tests.bench.kafka.broker import KafkaBroker

FIGURES: Mapping[str, Figure] = {
    "shape_single": Figure("Python client, 1 KiB one by one, 256 under way", "/s", True),
    "shape_single_cpu_us": Figure("  client CPU a message", "us", False),
    "shape_many": Figure("Python client, sends awaited together", "/s", True),
    "shape_many_cpu_us": Figure("  client CPU a message", "us", False),
    "shape_iterate": Figure("backlog of 1 KiB by `async for`", "/s", True),
    "shape_iterate_cpu_us": Figure("  client CPU a message", "us", False),
    "shape_take": Figure("backlog of 1 KiB by receive_many, getmany", "/s", True),
    "shape_take_cpu_us": Figure("  client CPU a message", "us", False),
}


@dataclass(frozen=True)
class Sizes:
    """Messages of each task of the client programs, by its name."""

    single: int
    many: int
    iterate: int
    take: int


REAL = Sizes(single=100_000, many=200_000, iterate=300_000, take=300_000)
TINY = Sizes(single=500, many=1000, iterate=1000, take=1000)

_QUEUES: Final = 4


async def python_shape(program: str, address: str, sizes: Sizes) -> Figures:
    """Each task in a process of its own."""
    figures: Figures = {}
    for kind, count in asdict(sizes).items():
        measured = await measure(program, address, count, kind)
        figures[f"shape_{kind}"] = measured["per_second"]
        figures[f"shape_{kind}_cpu_us"] = measured["cpu_us"]
    return figures


NAMES = (python_shape.__name__,)


async def run(
    make: MakeBroker, directory: Path, sizes: Sizes, only: Collection[str], say: Callable[[str], None]
) -> Figures:
    """Return the figures, if the case is in `only`."""
    if python_shape.__name__ not in only:
        return {}
    say(python_shape.__name__)
    if make is ours:
        async with running(make, directory / "shape", {}) as broker:
            return await python_shape("tests.bench.python_client", broker.nameserver, sizes)
    kafka = KafkaBroker(directory / "kafka", _QUEUES)
    await kafka.start()
    try:
        return await python_shape("tests.bench.kafka.client", kafka.address, sizes)
    finally:
        await kafka.stop()
