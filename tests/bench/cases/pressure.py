"""The cases of promptness under other load, for one broker at a time; beside Apache's 5.3.3, since 4.9.7 has no timers.
Every case has a broker of its own."""

from __future__ import annotations

import asyncio
import json
import random
import select
import shutil
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from duemq.protocol.codes import RequestCode, ResponseCode
from duemq.protocol.frames.fastjson import loads
from tests.bench.blast import Pipeline, TimedFrames, blast, blast_delayed
from tests.bench.brokers import MakeBroker, apache, apache_with_timers, ours, running, start_timed
from tests.bench.cases.levels import wait_for
from tests.bench.cases.timers import now_ms, wait_until_in_wheel
from tests.bench.figures import Figure, Figures, figures_of, part
from tests.bench.probe import pull_regularly, send_regularly
from tests.bench.remote import Remote
from tests.bench.stored import delivered
from tests.peers.brokers.broker import HOST, Broker

FIGURES: Mapping[str, Figure] = {
    "beside_p50_ms": Figure("timers at 200/s beside 50,000/s plain sends: lateness p50", "ms", False),
    "beside_p99_ms": Figure("  p99", "ms", False),
    "beside_max_ms": Figure("  max", "ms", False),
    "beside_behind_ms": Figure("  the most that the plain sends' client was late itself", "ms", False),
    "beside_refused": Figure("  sends that the broker refused, of both", "", False),
    "kills_backlog_s": Figure("10 kills under 10,000/s timers, SYNC_FLUSH: port open to backlog stored", "s", False),
    "kills_backlog": Figure("  messages that were overdue then", "", True),
    "kills_read_mib": Figure("  the most that a start read, beyond that of an empty store", "MiB", False),
    "mix_send_p50_ms": Figure("sends at 100/s beside a drain, pulls and removals of topics: p50", "ms", False),
    "mix_send_p999_ms": Figure("  p99.9", "ms", False),
    "mix_send_max_ms": Figure("  max", "ms", False),
}


@dataclass(frozen=True)
class Sizes:
    """The size of each case."""

    plain_rate: int
    timer_rate: int
    seconds: int
    drain: int
    """Messages that become due, 10,000 per second."""
    drain_rate: int
    lead_seconds: int
    backlog: int
    """Messages that are pulled meanwhile."""
    kills: int
    kill_rate: int
    """Messages per second between kills."""


REAL = Sizes(
    50_000, 200, 20, drain=150_000, drain_rate=10_000, lead_seconds=12, backlog=200_000, kills=10, kill_rate=10_000
)
TINY = Sizes(
    plain_rate=1000,
    timer_rate=50,
    seconds=1,
    drain=900,
    drain_rate=900,
    lead_seconds=3,
    backlog=3200,
    kills=2,
    kill_rate=500,
)

_PROPERTIES = {"timerWheelEnable": "true"}
_DELAY_MS, _SPREAD_MS = 1000, 3000
_PATIENCE = 120


@dataclass(frozen=True)
class PressureBench:
    """One broker's run."""

    make: MakeBroker
    directory: Path
    sizes: Sizes


async def _paced(broker: Broker, topic: str, rate: int, seconds: int, *delay: int | str) -> dict[str, float]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.bench.paced", str(broker.port), topic, str(rate), str(seconds), *map(str, delay),
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    output, _ = await process.communicate()
    if process.returncode != 0:
        raise RuntimeError("the paced client failed")
    result: dict[str, float] = json.loads(output)
    return result


async def beside_plain(bench: PressureBench) -> Figures:
    """A few messages with timers beside many without, 1 KiB each."""
    sizes, directory = bench.sizes, bench.directory / "beside"
    async with running(bench.make, directory, _PROPERTIES) as broker:
        await asyncio.to_thread(blast, (HOST, broker.port), "plain", 3200)
        timers, plain = await asyncio.gather(
            _paced(broker, "timers", sizes.timer_rate, sizes.seconds, _DELAY_MS, _SPREAD_MS),
            _paced(broker, "plain", sizes.plain_rate, sizes.seconds + (_DELAY_MS + _SPREAD_MS) // 1000, "plain"),
        )
        refused = int(timers["failed"])
        await wait_for(broker, "timers", int(timers["count"]) - refused)
    result = await asyncio.to_thread(delivered, broker.store, "timers", int(timers["count"]), None, refused=refused)
    await asyncio.to_thread(shutil.rmtree, directory)
    return {
        "beside_p50_ms": part(result.late_ms, 0.5),
        "beside_p99_ms": part(result.late_ms, 0.99),
        "beside_max_ms": max(result.late_ms),
        "beside_behind_ms": plain["behind_ms"],
        "beside_refused": timers["failed"] + plain["failed"],
    }


async def mix(bench: PressureBench) -> Figures:
    """One send every 10 ms, while timers become due, a backlog is pulled, and topics are made, used and removed. The
    checkpoints happen by themselves."""
    sizes, directory = bench.sizes, bench.directory / "mix"
    async with running(bench.make, directory, _PROPERTIES) as broker:
        address, done = (HOST, broker.port), threading.Event()
        await asyncio.to_thread(blast, address, "probe", 32)
        await asyncio.to_thread(blast, address, "backlog", sizes.backlog)
        first = (now_ms() // 1000 + sizes.lead_seconds) * 1000
        frames = TimedFrames("drain", lambda number: first + number * 1000 // sizes.drain_rate)
        await asyncio.to_thread(blast_delayed, address, frames, sizes.drain)
        await asyncio.to_thread(wait_until_in_wheel, broker)
        sending = asyncio.create_task(asyncio.to_thread(send_regularly, address, "probe", done))
        others = [
            asyncio.create_task(asyncio.to_thread(work, address, name, done))
            for work, name in ((pull_regularly, "backlog"), (pull_regularly, "drain"), (_use_topics, "removed"))
        ]
        try:
            await wait_for(broker, "drain", sizes.drain)
        finally:
            done.set()
            samples = await sending
            await asyncio.gather(*others)
    result = await asyncio.to_thread(delivered, broker.store, "drain", sizes.drain, None)
    await asyncio.to_thread(shutil.rmtree, directory)
    latencies = [sample.latency_ms for sample in samples if first <= sample.wall_ms <= result.last_ms]
    latencies = latencies or [samples[-1].latency_ms]
    return {
        "mix_send_p50_ms": part(latencies, 0.5),
        "mix_send_p999_ms": part(latencies, 0.999),
        "mix_send_max_ms": max(latencies),
    }


async def kills(bench: PressureBench) -> Figures:
    """200-byte messages due 0.5 to 4 s later, and SIGKILL every 0.8 to 3.5 s; then a start without further sends. For
    duemq only: Apache's broker neither keeps all acknowledged messages nor delivers them once."""
    if bench.make is not ours:
        return {}
    sizes, directory, chance = bench.sizes, bench.directory / "kills", random.Random(1)
    broker = bench.make(directory, _PROPERTIES | {"flushDiskType": "SYNC_FLUSH"})
    due: list[int] = []
    read = []
    try:
        least = (await start_timed(broker)).bytes_read
        await asyncio.to_thread(blast, (HOST, broker.port), "kills", 32)
        acknowledged = 0
        for _ in range(sizes.kills):
            sending = asyncio.create_task(
                asyncio.to_thread(_send_until_it_ends, (HOST, broker.port), due, sizes.kill_rate, chance)
            )
            await asyncio.sleep(chance.uniform(0.8, 3.5))
            await broker.kill()
            acknowledged += await sending
            started = await start_timed(broker)
            read.append(started.bytes_read - least)
        await asyncio.to_thread(_wait_until_nothing_waits, broker)
    finally:
        await broker.stop()
    result = await asyncio.to_thread(delivered, broker.store, "kills", len(due), None, refused=None)
    if len(result.stored) < acknowledged:
        raise RuntimeError(f"{acknowledged} messages were acknowledged, {len(result.stored)} are there")
    await asyncio.to_thread(shutil.rmtree, directory)
    opened = started.opened_ms
    backlog = [at for at, due_ms in zip(result.stored, result.due, strict=True) if due_ms <= opened <= at]
    return {
        "kills_backlog_s": (max(backlog, default=opened) - opened) / 1000,
        "kills_backlog": len(backlog),
        "kills_read_mib": max(read) / 1024 / 1024,
    }


def _send_until_it_ends(address: tuple[str, int], due: list[int], rate: int, chance: random.Random) -> int:
    """Send messages with timers until the connection breaks; `due` gets the time of each. Return the number
    acknowledged."""
    frames = TimedFrames("kills", due.__getitem__, size=200)
    pipeline = Pipeline(address)
    start, first = time.perf_counter(), len(due)
    try:
        while True:
            count = int((time.perf_counter() - start) * rate) - (len(due) - first)
            if count > 0:
                at = len(due)
                due += [now_ms() + chance.randrange(500, 4000) for _ in range(count)]
                pipeline.add(frames.block(at, count))
            if pipeline.waiting and select.select([pipeline.socket], [], [], 0.005)[0]:
                pipeline.read()
    except ConnectionError:
        return pipeline.good


def _wait_until_nothing_waits(broker: Broker) -> None:
    deadline = time.monotonic() + _PATIENCE
    with Remote((HOST, broker.port)) as remote:
        while True:
            (answer,) = remote.requests(RequestCode.GET_BROKER_RUNTIME_INFO, [{}])
            table = loads(answer.body)["table"]
            if table["timerOffsetBehind"] == table["timerCongestNum"] == "0":
                return
            if time.monotonic() > deadline:
                raise TimeoutError(f"{table['timerCongestNum']} messages wait after {_PATIENCE} s")
            time.sleep(0.05)


def _use_topics(address: tuple[str, int], name: str, done: threading.Event) -> None:
    """Make a topic, send to it, and remove it, over and over."""
    number = 0
    with Remote(address) as remote:
        while not done.is_set():
            number += 1
            topic = f"{name}_{number}"
            blast(address, topic, 64, connections=1)
            (answer,) = remote.requests(RequestCode.DELETE_TOPIC_IN_BROKER, [{"topic": topic}])
            if answer.code != ResponseCode.SUCCESS:
                raise RuntimeError(f"{topic} was not removed: {answer.code} {answer.remark}")


Case = Callable[[PressureBench], Awaitable[Figures]]
CASES: tuple[Case, ...] = (beside_plain, mix, kills)
NAMES = tuple(case.__name__ for case in CASES)


async def run(
    make: MakeBroker, directory: Path, sizes: Sizes, only: Collection[str], say: Callable[[str], None]
) -> Figures:
    """Return the figures of the cases whose names are in `only`, for one broker."""
    bench = PressureBench(apache_with_timers if make is apache else make, directory / "pressure", sizes)
    bench.directory.mkdir(parents=True)
    return await figures_of(CASES, bench, only, say)
