"""The cases of delay levels, for one broker at a time. Every case has brokers of its own, and checks in the commitlog
that each message was delivered once and none early."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.bench.blast import DelayedFrames, blast, blast_delayed
from tests.bench.brokers import MakeBroker, Started, java, ours, running, start_timed
from tests.bench.figures import Figure, Figures, figures_of, part
from tests.bench.measure import memory
from tests.bench.probe import Sample, pull_regularly, send_regularly
from tests.bench.remote import Remote
from tests.bench.stored import Delivered, delivered
from tests.peers.brokers.broker import HOST, Broker

FIGURES: Mapping[str, Figure] = {
    "overdue_s": Figure("overdue after a restart, 1 level: first to last stored", "s", False),
    "overdue_open_s": Figure("  port open to last stored", "s", False),
    "levels_s": Figure("overdue after a restart, 18 levels: first to last", "s", False),
    "levels_open_s": Figure("  port open to last stored", "s", False),
    "overdue_java": Figure("overdue to a Java push consumer, first to last", "/s", True),
    "overdue_java_open": Figure("  port open to last received", "/s", True),
    "drain_send_p50_ms": Figure("overdue being delivered: sends at 100/s, p50", "ms", False),
    "drain_send_p99_ms": Figure("  p99", "ms", False),
    "drain_pull_p50_ms": Figure("  pulls at 100/s, p50", "ms", False),
    "drain_pull_p99_ms": Figure("  p99", "ms", False),
    "steady_in": Figure("15,000/s at one level: in", "/s", True),
    "steady_out": Figure("  out", "/s", True),
    "steady_refused": Figure("  sends refused", "", False),
    "steady_p50_ms": Figure("  lateness p50", "ms", False),
    "steady_p99_ms": Figure("  p99", "ms", False),
    "steady_max_ms": Figure("  max", "ms", False),
    "pending_open_s": Figure("1,000,000 pending, start after kill -9: port open", "s", False),
    "pending_answer_s": Figure("  first answer", "s", False),
    "pending_anonymous_mib": Figure("  anonymous memory", "MiB", False),
    "path_sync": Figure("SYNC_FLUSH, overdue, sync path", "/s", True),
    "path_async": Figure("  async path", "/s", True),
    "path_sync_single": Figure("  batch size 1, sync path", "/s", True),
    "path_async_single": Figure("  batch size 1, async path", "/s", True),
}


@dataclass(frozen=True)
class Sizes:
    """The size of each case. Numbers of messages, unless a name says seconds."""

    overdue: int
    delay_seconds: int
    """Delay of the messages that are to be overdue: longer than it takes to send them and to stop the broker."""
    drains: int
    """Number of drains in which sends and pulls are sampled, since one drain is short."""
    steady_rate: int
    steady_seconds: int
    warm: int
    pending: int
    settle_seconds: float
    """Seconds from a broker's start to the measurement of its memory."""
    paths: int


REAL = Sizes(
    overdue=300_000,
    delay_seconds=40,
    drains=3,
    steady_rate=15_000,
    steady_seconds=60,
    warm=100_000,
    pending=1_000_000,
    settle_seconds=5,
    paths=10_000,
)
TINY = Sizes(
    overdue=900,
    delay_seconds=2,
    drains=1,
    steady_rate=1000,
    steady_seconds=1,
    warm=320,
    pending=2000,
    settle_seconds=0.1,
    paths=900,
)

_TOPIC = "overdue"
_LEVELS = 18
_STEADY_DELAY_MS = 2000
_APACHE_STOP_SECONDS = 10
"""Seconds that Apache's broker may take to stop before its messages are due."""
_PATIENCE = 300
"""Seconds after which a case gives up a broker that has not delivered everything."""


class Bench:
    """One broker's run. `sizes`: the size of each case; stores of overdue messages are filled once and copied for each
    use."""

    def __init__(self, make: MakeBroker, directory: Path, sizes: Sizes) -> None:
        self.make = make
        self.directory = directory
        self.sizes = sizes
        self.delay_seconds = sizes.delay_seconds + (0 if make is ours else _APACHE_STOP_SECONDS)
        self._copies = 0

    @asynccontextmanager
    async def restarted(
        self, properties: Mapping[str, object], *, levels: int = 1, count: int | None = None
    ) -> AsyncIterator[Drain]:
        """Run a broker on a store with `count` overdue messages, spread over levels; stop it at the end."""
        count = count or self.sizes.overdue
        filled = await self._filled(levels, count)
        self._copies += 1
        directory = self.directory / f"drain-{self._copies}"
        directory.mkdir()
        # Sync the copy to the disk before the clock starts, or writing it would be part of the measurement.
        copy = f"cp -a --sparse=always '{filled}' '{directory / 'store'}' && sync -f '{directory}'"
        await asyncio.to_thread(subprocess.run, copy, shell=True, check=True)
        broker = self.make(directory, self._table(levels) | dict(properties))
        try:
            yield Drain(broker, await start_timed(broker), count, self.delay_seconds * 1000)
        finally:
            await broker.stop()
            await asyncio.to_thread(shutil.rmtree, directory)

    def _table(self, levels: int) -> dict[str, object]:
        return {"messageDelayLevel": " ".join([f"{self.delay_seconds}s"] * levels)}

    async def _filled(self, levels: int, count: int) -> Path:
        """Return a store with that many messages, all of them overdue and none delivered."""
        directory = self.directory / f"overdue-{levels}-{count}"
        if not directory.exists():
            frames = DelayedFrames(_TOPIC, levels=tuple(range(1, levels + 1)), delay_ms=self.delay_seconds * 1000)
            async with running(self.make, directory, self._table(levels)) as broker:
                address = (HOST, broker.port)
                await asyncio.to_thread(blast, address, "probe", 32)  # the topic of the sends during a drain
                await asyncio.to_thread(blast_delayed, address, frames, count)
                sent = time.monotonic()
            await asyncio.sleep(sent + self.delay_seconds + 0.1 - time.monotonic())
        return directory / "store"


@dataclass(frozen=True)
class Drain:
    """A broker that delivers the messages that were overdue when it started."""

    broker: Broker
    started: Started
    count: int
    delay_ms: int

    async def end(self) -> None:
        """Wait until consumers see all messages."""
        await wait_for(self.broker, _TOPIC, self.count)

    async def stored(self) -> Delivered:
        """Stop the broker, after the end, and read its commitlog."""
        await self.broker.stop()
        result = await asyncio.to_thread(delivered, self.broker.store, _TOPIC, self.count, self.delay_ms)
        if result.first_ms < self.started.began_ms:
            raise RuntimeError("messages were due before the broker had been stopped: the delay is too short")
        return result

    def open_s(self, last_ms: float) -> float:
        """Seconds from the open port to a time, ms since the epoch."""
        return max(0.001, (last_ms - self.started.opened_ms) / 1000)


async def wait_for(broker: Broker, topic: str, count: int) -> None:
    """Wait until consumers can see `count` messages of a topic with four queues, and check that no more follow."""

    def watch() -> None:
        deadline = time.monotonic() + _PATIENCE
        with Remote((HOST, broker.port)) as remote:
            while sum(remote.max_offsets(topic, 4)) < count:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{topic}: {remote.max_offsets(topic, 4)} of {count} after {_PATIENCE} s")
                time.sleep(0.05)
            time.sleep(0.2)
            there = sum(remote.max_offsets(topic, 4))
            if there != count:
                raise RuntimeError(f"{topic}: {there} messages instead of {count}")

    await asyncio.to_thread(watch)


async def overdue(bench: Bench) -> Figures:
    """1 KiB messages of one level that became due while the broker was down, until they are in their topic."""
    async with bench.restarted({}) as drain:
        await drain.end()
        result = await drain.stored()
    return {"overdue_s": (result.last_ms - result.first_ms) / 1000, "overdue_open_s": drain.open_s(result.last_ms)}


async def overdue_levels(bench: Bench) -> Figures:
    """The same number of messages, spread evenly over 18 levels."""
    async with bench.restarted({}, levels=_LEVELS) as drain:
        await drain.end()
        result = await drain.stored()
    return {"levels_s": (result.last_ms - result.first_ms) / 1000, "levels_open_s": drain.open_s(result.last_ms)}


async def overdue_java(bench: Bench) -> Figures:
    """The same number of messages of one level, while a Java push consumer, started when the port is open, receives
    them."""
    async with bench.restarted({}) as drain:
        name = f"nameserver={drain.broker.nameserver}"
        received = await java("consume", name, f"topic={_TOPIC}", "group=overdue", f"count={drain.count}")
        await drain.end()
        await drain.stored()
    return {
        "overdue_java": received["per_second"],
        "overdue_java_open": drain.count / drain.open_s(received["last_ms"]),
    }


async def drain_latency(bench: Bench) -> Figures:
    """Latency of sends to another topic and of pulls of the delivered messages, each from one connection at 100 a
    second."""
    sends: list[Sample] = []
    pulls: list[Sample] = []
    for _ in range(bench.sizes.drains):
        async with bench.restarted({}) as drain:
            address, done = (HOST, drain.broker.port), threading.Event()
            sending = asyncio.create_task(asyncio.to_thread(send_regularly, address, "probe", done))
            pulling = asyncio.create_task(asyncio.to_thread(pull_regularly, address, _TOPIC, done))
            try:
                await drain.end()
            finally:
                done.set()
                sampled = await asyncio.gather(sending, pulling)
            result = await drain.stored()
        during = range(result.first_ms - 1, result.last_ms + 1)
        for all_samples, taken in zip((sends, pulls), sampled, strict=True):
            # A drain may be over before the first request is made; then the first request stands for it.
            all_samples.extend([sample for sample in taken if int(sample.wall_ms) in during] or taken[:1])
    return {
        f"drain_{kind}_p{percent}_ms": part([sample.latency_ms for sample in samples], percent / 100)
        for kind, samples in (("send", sends), ("pull", pulls))
        for percent in (50, 99)
    }


async def steady(bench: Bench) -> Figures:
    """1 KiB messages at a steady rate to one level of 2 s, in and out at the same time. Messages that a broker refuses
    are counted; it has to deliver the others."""
    sizes, directory = bench.sizes, bench.directory / "steady"
    async with running(bench.make, directory, {"messageDelayLevel": f"{_STEADY_DELAY_MS // 1000}s"}) as broker:
        await asyncio.to_thread(blast, (HOST, broker.port), "warm", sizes.warm)
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.bench.paced",
            str(broker.port), "steady", str(sizes.steady_rate), str(sizes.steady_seconds), str(_STEADY_DELAY_MS),
            stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        output, _ = await process.communicate()
        if process.returncode != 0:
            raise RuntimeError("the paced client failed")
        paced = json.loads(output)
        count, refused = paced["count"], paced["failed"]
        await wait_for(broker, "steady", count - refused)
    result = await asyncio.to_thread(delivered, broker.store, "steady", count, _STEADY_DELAY_MS, refused=refused)
    await asyncio.to_thread(shutil.rmtree, directory)
    late = result.late_ms
    return {
        "steady_in": result.scheduled_per_second,
        "steady_out": result.per_second,
        "steady_refused": refused,
        "steady_p50_ms": part(late, 0.5),
        "steady_p99_ms": part(late, 0.99),
        "steady_max_ms": part(late, 1),
    }


async def pending(bench: Bench) -> Figures:
    """100-byte messages that wait for 2 h, and a start after SIGKILL."""
    count, directory = bench.sizes.pending, bench.directory / "pending"
    frames = DelayedFrames("pending", size=100, levels=(18,), delay_ms=7_200_000)
    broker = bench.make(directory, {})
    await broker.start()
    try:
        await asyncio.to_thread(blast_delayed, (HOST, broker.port), frames, count)
        await broker.kill()
        started = await start_timed(broker)
        await asyncio.sleep(bench.sizes.settle_seconds)
        used = memory(broker.pid)
        with Remote((HOST, broker.port)) as remote:
            waiting = remote.max_offsets("SCHEDULE_TOPIC_XXXX", 18)[17]
    finally:
        await broker.kill()
    if waiting != count:
        raise RuntimeError(f"{waiting} of {count} messages wait after the crash")
    await asyncio.to_thread(shutil.rmtree, directory)
    return {
        "pending_open_s": started.open_s,
        "pending_answer_s": started.answer_s,
        "pending_anonymous_mib": used.anonymous,
    }


async def paths(bench: Bench) -> Figures:
    """Overdue messages of one level under SYNC_FLUSH, by the sync and by the async delivery path: in the broker's own
    batches, and one at a time, which is all that Apache's broker does."""
    batches: dict[str, dict[str, object]] = {"": {}}
    if bench.make is ours:
        batches["_single"] = {"scheduleDeliverBatchSize": 1}
    figures = {}
    for suffix, batch in batches.items():
        for path, is_async in (("sync", "false"), ("async", "true")):
            flush = {"flushDiskType": "SYNC_FLUSH", "enableScheduleAsyncDeliver": is_async}
            async with bench.restarted(flush | batch, count=bench.sizes.paths) as drain:
                await drain.end()
                figures[f"path_{path}{suffix}"] = (await drain.stored()).per_second
    return figures


CASES: tuple[Callable[[Bench], Awaitable[Figures]], ...] = (
    overdue,
    overdue_levels,
    overdue_java,
    drain_latency,
    steady,
    pending,
    paths,
)
NAMES = tuple(case.__name__ for case in CASES)


async def run(
    make: MakeBroker, directory: Path, sizes: Sizes, only: Collection[str], say: Callable[[str], None]
) -> Figures:
    """Return the figures of the cases whose names are in `only`, for one broker."""
    bench = Bench(make, directory / "levels", sizes)
    bench.directory.mkdir(parents=True)
    return await figures_of(CASES, bench, only, say)
