"""The cases of timers, for one broker at a time; beside Apache's 5.3.3, since 4.9.7 has none. Every case has a broker
of its own, and checks in the commitlog that each message was delivered once and none early."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from duemq.protocol.codes import RequestCode, ResponseCode
from duemq.protocol.frames.fastjson import loads
from tests.bench.blast import TimedFrames, blast, blast_delayed
from tests.bench.brokers import MakeBroker, apache, apache_with_timers, ours, running, start_timed
from tests.bench.cases.levels import wait_for
from tests.bench.figures import Figure, Figures, figures_of, part
from tests.bench.measure import cpu_seconds, memory
from tests.bench.probe import send_regularly
from tests.bench.remote import Remote
from tests.bench.stored import delivered
from tests.peers.brokers.broker import HOST, Broker

FIGURES: Mapping[str, Figure] = {
    "timers_second_s": Figure("timers, 300,000 due at one second: to the last stored", "s", False),
    "timers_second_send_p50_ms": Figure("  sends at 100/s meanwhile, p50", "ms", False),
    "timers_second_send_p99_ms": Figure("  p99", "ms", False),
    "timers_spread_s": Figure("timers, 300,000 due at any ms of one second: from its end", "s", False),
    "timers_late_p50_ms": Figure("timers for random times, 200/s: lateness p50", "ms", False),
    "timers_late_p99_ms": Figure("  p99", "ms", False),
    "timers_accepted": Figure("pipelined sends with a timer acknowledged", "/s", True),
    "timers_accepted_plain": Figure("  without one", "/s", True),
    "timers_accepted_share": Figure("  with one, of those without", "", True),
    "timers_accepted_cpu_us": Figure("  broker CPU a message with one", "us", False),
    "timers_accepted_plain_cpu_us": Figure("  without one", "us", False),
    "timers_pending_open_s": Figure("1,000,000 timers pending, after kill -9: port open", "s", False),
    "timers_pending_answer_s": Figure("  first answer", "s", False),
    "timers_pending_before_mib": Figure("  anonymous memory before the kill", "MiB", False),
    "timers_pending_after_mib": Figure("  after the start", "MiB", False),
    "timers_pending_big_open_s": Figure("10,000,000 timers pending, after kill -9: port open", "s", False),
    "timers_pending_big_answer_s": Figure("  first answer", "s", False),
    "timers_pending_big_before_mib": Figure("  anonymous memory before the kill", "MiB", False),
    "timers_pending_big_after_mib": Figure("  after the start", "MiB", False),
}
BIG = "pending_timers_big"


@dataclass(frozen=True)
class Sizes:
    """The size of each case. Numbers of messages, unless a name says seconds."""

    second: int
    second_lead_seconds: int
    """Seconds from the first send to the common deliver time: longer than it takes to send all messages and to put them
    into the wheel."""
    random_rate: int
    random_seconds: int
    random_spread_ms: int
    accepted: int
    accepted_dues: int
    """Number of different deliver times."""
    pending: int
    pending_big: int
    settle_seconds: float


REAL = Sizes(
    second=300_000,
    second_lead_seconds=60,
    random_rate=200,
    random_seconds=30,
    random_spread_ms=10_000,
    accepted=400_000,
    accepted_dues=8192,
    pending=1_000_000,
    pending_big=10_000_000,
    settle_seconds=5,
)
TINY = Sizes(
    second=900,
    second_lead_seconds=3,
    random_rate=200,
    random_seconds=1,
    random_spread_ms=1000,
    accepted=3200,
    accepted_dues=256,
    pending=2000,
    pending_big=4000,
    settle_seconds=0.1,
)

_DAY_MS = 86_400_000
_SPREAD_MS = 20 * 3_600_000
_PROPERTIES = {"timerWheelEnable": "true"}
_PATIENCE = 300


@dataclass(frozen=True)
class TimerBench:
    """One broker's run."""

    make: MakeBroker
    directory: Path
    sizes: Sizes


def now_ms() -> int:
    """Wall time, ms since the epoch."""
    return time.time_ns() // 1_000_000


def wait_until_in_wheel(broker: Broker) -> None:
    """Wait until the broker reports that it has put all accepted timers into its wheel."""
    deadline = time.monotonic() + _PATIENCE
    with Remote((HOST, broker.port)) as remote:
        while True:
            (answer,) = remote.requests(RequestCode.GET_BROKER_RUNTIME_INFO, [{}])
            # Apache's broker cannot report this just after its start.
            if answer.code == ResponseCode.SUCCESS and loads(answer.body)["table"]["timerOffsetBehind"] == "0":
                return
            if time.monotonic() > deadline:
                raise TimeoutError(f"the wheel was not filled within {_PATIENCE} s")
            time.sleep(0.05)


async def _send_for(broker: Broker, topic: str, due: Callable[[int], int], first_ms: int, count: int) -> None:
    """Put 1 KiB messages into the wheel, and wait until just before the first of them is due."""
    await asyncio.to_thread(blast_delayed, (HOST, broker.port), TimedFrames(topic, due), count)
    await asyncio.to_thread(wait_until_in_wheel, broker)
    left = first_ms / 1000 - time.time()
    if left < 0:
        raise RuntimeError(f"they were in the wheel {-left:.1f} s after they were due: the lead is too short")
    await asyncio.sleep(max(0, left - 0.2))


async def one_second(bench: TimerBench) -> Figures:
    """1 KiB messages that are all due at the beginning of one second, the precision that Apache's broker has as
    well."""
    count, directory = bench.sizes.second, bench.directory / "second"
    async with running(bench.make, directory, _PROPERTIES) as broker:
        address, done = (HOST, broker.port), threading.Event()
        await asyncio.to_thread(blast, address, "probe", 32)  # the topic of the sends meanwhile
        due = (now_ms() // 1000 + bench.sizes.second_lead_seconds) * 1000
        await _send_for(broker, "second", lambda _: due, due, count)
        sending = asyncio.create_task(asyncio.to_thread(send_regularly, address, "probe", done))
        try:
            await wait_for(broker, "second", count)
        finally:
            done.set()
            samples = await sending
    result = await asyncio.to_thread(delivered, broker.store, "second", count, None)
    await asyncio.to_thread(shutil.rmtree, directory)
    during = range(due, result.last_ms + 1)
    latencies = [sample.latency_ms for sample in samples if int(sample.wall_ms) in during]
    latencies = latencies or [samples[-1].latency_ms]
    return {
        "timers_second_s": (result.last_ms - due) / 1000,
        "timers_second_send_p50_ms": part(latencies, 0.5),
        "timers_second_send_p99_ms": part(latencies, 0.99),
    }


async def spread_second(bench: TimerBench) -> Figures:
    """The same number of messages, each due at a random ms of one second: neighbours in time are far from each other in
    the commitlog."""
    count, directory, chance = bench.sizes.second, bench.directory / "spread", random.Random(1)
    async with running(bench.make, directory, _PROPERTIES) as broker:
        first = (now_ms() // 1000 + bench.sizes.second_lead_seconds) * 1000
        await _send_for(broker, "spread", lambda _: first + 1 + chance.randrange(1000), first, count)
        await wait_for(broker, "spread", count)
    result = await asyncio.to_thread(delivered, broker.store, "spread", count, None)
    await asyncio.to_thread(shutil.rmtree, directory)
    return {"timers_spread_s": max(0, result.last_ms - first - 1000) / 1000}


async def random_times(bench: TimerBench) -> Figures:
    """1 KiB messages at a steady rate, for times from 1 s ahead."""
    sizes, directory = bench.sizes, bench.directory / "random"
    async with running(bench.make, directory, _PROPERTIES) as broker:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.bench.paced", str(broker.port), "random", str(sizes.random_rate),
            str(sizes.random_seconds), "1000", str(sizes.random_spread_ms),
            stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        output, _ = await process.communicate()
        if process.returncode != 0:
            raise RuntimeError("the paced client failed")
        paced = json.loads(output)
        if paced["failed"]:
            raise RuntimeError(f"{paced['failed']} timers were refused")
        await wait_for(broker, "random", paced["count"])
    result = await asyncio.to_thread(delivered, broker.store, "random", paced["count"], None)
    await asyncio.to_thread(shutil.rmtree, directory)
    return {"timers_late_p50_ms": part(result.late_ms, 0.5), "timers_late_p99_ms": part(result.late_ms, 0.99)}


async def accept(bench: TimerBench) -> Figures:
    """1 KiB sends over four raw sockets, 512 unanswered at a time, alternating without and with a timer; the third run
    of each counts. CPU is measured until the messages are in the wheel."""
    sizes, directory = bench.sizes, bench.directory / "accept"
    chance, figures = random.Random(1), {}
    dues = [now_ms() + _DAY_MS + chance.randrange(_SPREAD_MS) for _ in range(sizes.accepted_dues)]
    async with running(bench.make, directory, _PROPERTIES) as broker:
        for _ in range(3):
            for name, times in (("timers_accepted_plain", []), ("timers_accepted", dues)):
                before = cpu_seconds(broker.pid)
                send = partial(blast, (HOST, broker.port), name, sizes.accepted, dues=times)
                result = await asyncio.to_thread(send)
                if result.failed:
                    raise RuntimeError(f"{result.failed} sends were refused")
                await asyncio.to_thread(wait_until_in_wheel, broker)
                figures[name] = result.per_second
                figures[f"{name}_cpu_us"] = (cpu_seconds(broker.pid) - before) / sizes.accepted * 1e6
    await asyncio.to_thread(shutil.rmtree, directory)
    return figures | {"timers_accepted_share": figures["timers_accepted"] / figures["timers_accepted_plain"]}


async def pending_timers(bench: TimerBench) -> Figures:
    """100-byte messages for times from tomorrow on, and a start after SIGKILL."""
    return await _pending(bench, bench.sizes.pending, "timers_pending")


async def pending_timers_big(bench: TimerBench) -> Figures:
    """Ten times as many, for duemq only."""
    if bench.make is not ours:
        return {}
    return await _pending(bench, bench.sizes.pending_big, "timers_pending_big")


async def _pending(bench: TimerBench, count: int, name: str) -> Figures:
    directory = bench.directory / name
    tomorrow = now_ms() + _DAY_MS
    frames = TimedFrames("pending", lambda number: tomorrow + number * 7919 % _SPREAD_MS, size=100)
    broker = bench.make(directory, _PROPERTIES)
    await broker.start()
    try:
        await asyncio.to_thread(blast_delayed, (HOST, broker.port), frames, count)
        await asyncio.to_thread(wait_until_in_wheel, broker)
        await asyncio.sleep(bench.sizes.settle_seconds)
        before = memory(broker.pid)
        await broker.kill()
        started = await start_timed(broker)
        await asyncio.to_thread(wait_until_in_wheel, broker)
        await asyncio.sleep(bench.sizes.settle_seconds)
        after = memory(broker.pid)
        with Remote((HOST, broker.port)) as remote:
            (waiting,) = remote.max_offsets("rmq_sys_wheel_timer", 1)
    finally:
        await broker.kill()
    if waiting != count:
        raise RuntimeError(f"{waiting} of {count} messages wait after the crash")
    await asyncio.to_thread(shutil.rmtree, directory)
    return {
        f"{name}_open_s": started.open_s,
        f"{name}_answer_s": started.answer_s,
        f"{name}_before_mib": before.anonymous,
        f"{name}_after_mib": after.anonymous,
    }


CASES: tuple[Callable[[TimerBench], Awaitable[Figures]], ...] = (
    one_second,
    spread_second,
    random_times,
    accept,
    pending_timers,
    pending_timers_big,
)
NAMES = tuple(case.__name__ for case in CASES)


async def run(
    make: MakeBroker, directory: Path, sizes: Sizes, only: Collection[str], say: Callable[[str], None]
) -> Figures:
    """Return the figures of the cases whose names are in `only`, for one broker."""
    bench = TimerBench(apache_with_timers if make is apache else make, directory / "timers", sizes)
    bench.directory.mkdir(parents=True)
    return await figures_of(CASES, bench, only, say)
