"""The cases of sending, pulling and idling, for one broker at a time; see tests.bench.cases.levels for delays."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.bench.blast import blast
from tests.bench.brokers import MakeBroker, java, running, start_timed
from tests.bench.figures import Figure, Figures
from tests.bench.measure import cpu_seconds, memory
from tests.peers.brokers.broker import HOST, Broker

FIGURES: Mapping[str, Figure] = {
    "start_s": Figure("start, empty store", "s", False),
    "blast": Figure("pipelined sends acknowledged, warm", "/s", True),
    "blast_cpu_us": Figure("  broker CPU a message", "us", False),
    "java_async": Figure("Java client, async sends, window 256", "/s", True),
    "java_async_cpu_us": Figure("  broker CPU a message", "us", False),
    "java_sync": Figure("Java client, sync sends, 8 threads", "/s", True),
    "java_sync_p99_us": Figure("  latency p99", "us", False),
    "flush_async": Figure("SYNC_FLUSH: Java async sends, window 256", "/s", True),
    "flush_sync": Figure("SYNC_FLUSH: Java sync sends, 8 threads", "/s", True),
    "pull": Figure("backlog to a Java push consumer", "/s", True),
    "pull_cpu_us": Figure("  broker CPU a message", "us", False),
    "late_p50_ms": Figure("level 1 at 200/s, lateness when stored, p50", "ms", False),
    "late_p99_ms": Figure("  p99", "ms", False),
    "received_p99_ms": Figure("  when received, p99", "ms", False),
    "idle_percent": Figure("CPU when idle", "%", False),
    "anonymous_mib": Figure("memory after all that, anonymous", "MiB", False),
    "resident_mib": Figure("  resident", "MiB", False),
}


@dataclass(frozen=True)
class Sizes:
    """The size of each case."""

    blast: int
    java: int
    flush: int
    backlog: int
    late_seconds: int
    idle_seconds: int


REAL = Sizes(blast=400_000, java=150_000, flush=40_000, backlog=500_000, late_seconds=30, idle_seconds=10)
TINY = Sizes(blast=3200, java=500, flush=200, backlog=2000, late_seconds=2, idle_seconds=1)


async def start_time(make: MakeBroker, directory: Path) -> Figures:
    """Time from the process's start until its port takes a connection. Apache's name server runs beforehand."""
    broker = make(directory, {})
    started = await start_timed(broker)
    await broker.stop()
    return {"start_s": started.open_s}


async def idle(broker: Broker, sizes: Sizes) -> Figures:
    """CPU of a broker without requests."""
    await asyncio.sleep(1)
    before = cpu_seconds(broker.pid)
    await asyncio.sleep(sizes.idle_seconds)
    return {"idle_percent": (cpu_seconds(broker.pid) - before) / sizes.idle_seconds * 100}


async def pipelined(broker: Broker, sizes: Sizes) -> Figures:
    """1 KiB sends over four raw sockets, 512 unanswered at a time; the third run counts."""
    address = (HOST, broker.port)
    for _ in range(2):
        await asyncio.to_thread(blast, address, "blast", sizes.blast)
    before = cpu_seconds(broker.pid)
    result = await asyncio.to_thread(blast, address, "blast", sizes.blast)
    if result.failed:
        raise RuntimeError(f"{result.failed} sends were refused")
    return {
        "blast": result.per_second,
        "blast_cpu_us": (cpu_seconds(broker.pid) - before) / sizes.blast * 1e6,
    }


async def java_sends(broker: Broker, sizes: Sizes) -> Figures:
    """1 KiB sends with the Java client."""
    name = f"nameserver={broker.nameserver}"
    warm = max(1, sizes.java // 3)
    before = cpu_seconds(broker.pid)
    async_ = await java("send", name, "topic=async", f"count={sizes.java}", f"warm={warm}")
    used = cpu_seconds(broker.pid) - before
    sync = await java("send", name, "topic=sync", f"count={sizes.java // 3}", f"warm={warm // 3}", "sync=true")
    return {
        "java_async": async_["per_second"],
        "java_async_cpu_us": used / (sizes.java + warm) * 1e6,
        "java_sync": sync["per_second"],
        "java_sync_p99_us": sync["p99_us"],
    }


async def backlog(broker: Broker, sizes: Sizes) -> Figures:
    """1 KiB messages that already wait in the broker, read by one Java push consumer."""
    name = f"nameserver={broker.nameserver}"
    await java("send", name, "topic=backlog", f"count={sizes.backlog}", "warm=1", "window=2048")
    before = cpu_seconds(broker.pid)
    result = await java("consume", name, "topic=backlog", "group=backlog", f"count={sizes.backlog}")
    return {
        "pull": result["per_second"],
        "pull_cpu_us": (cpu_seconds(broker.pid) - before) / sizes.backlog * 1e6,
    }


async def lateness(broker: Broker, sizes: Sizes) -> Figures:
    """Level 1 (1 s) at a steady 200 a second, received by a Java push consumer."""
    name, count = f"nameserver={broker.nameserver}", 200 * sizes.late_seconds
    await java("send", name, "topic=late", "count=0", "warm=1")  # a consumer must find the topic when it starts
    consuming = asyncio.create_task(
        java("consume", name, "topic=late", "group=late", f"count={count}", f"timeout={sizes.late_seconds + 60}")
    )
    await java("send", name, "topic=late", f"count={count}", "warm=1", "rate=200", "level=1", "delay=1000")
    result = await consuming
    if result["stored_late_min_ms"] < 0:
        raise RuntimeError(f"messages were early: {result}")
    return {
        "late_p50_ms": result["stored_late_p50_ms"],
        "late_p99_ms": result["stored_late_p99_ms"],
        "received_p99_ms": result["late_p99_ms"],
    }


async def sync_flush(broker: Broker, sizes: Sizes) -> Figures:
    """1 KiB sends that are answered once they are on the disk."""
    name, warm = f"nameserver={broker.nameserver}", max(1, sizes.flush // 8)
    async_ = await java("send", name, "topic=async", f"count={sizes.flush}", f"warm={warm}")
    sync = await java("send", name, "topic=sync", f"count={sizes.flush // 4}", f"warm={warm}", "sync=true")
    return {"flush_async": async_["per_second"], "flush_sync": sync["per_second"]}


async def memory_after(broker: Broker, sizes: Sizes) -> Figures:
    """Memory of a broker after the other cases."""
    used = memory(broker.pid)
    return {"anonymous_mib": used.anonymous, "resident_mib": used.resident}


Case = Callable[[Broker, Sizes], Awaitable[Figures]]
_SHARED: tuple[tuple[str, Mapping[str, object], tuple[Case, ...]], ...] = (
    ("async", {}, (idle, pipelined, java_sends, backlog, lateness, memory_after)),
    ("sync", {"flushDiskType": "SYNC_FLUSH"}, (sync_flush,)),
)
"""Cases that share a broker: the broker's directory, its properties, and the cases in order."""
NAMES = (start_time.__name__, *(case.__name__ for _, _, cases in _SHARED for case in cases))


async def run(
    make: MakeBroker, directory: Path, sizes: Sizes, only: Collection[str], say: Callable[[str], None]
) -> Figures:
    """Return the figures of the cases whose names are in `only`, for one broker."""
    figures: Figures = {}
    if start_time.__name__ in only:
        say(start_time.__name__)
        figures |= await start_time(make, directory / "start")
    for name, properties, cases in _SHARED:
        chosen = [case for case in cases if case.__name__ in only]
        if chosen:
            async with running(make, directory / name, properties) as broker:
                for case in chosen:
                    say(case.__name__)
                    figures |= await case(broker, sizes)
    return figures
