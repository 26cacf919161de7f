"""The cases of the Spark jobs: queries, audit, analysis and compaction of a generated store (tests.bench.spark.stores),
and naive programs for the same tasks. MB and GB are 10^6 and 10^9 bytes of commitlog.

Sessions are warm, and so is the page cache, so that the cases measure the jobs and not the disk. Every answer is
compared with the figures of the store's generator. The naive programs:

    loop     a Python loop with struct over part of the file, which computes the same sums as the query by topic
    client   a push consumer of this project that drains the store's topics from its broker, and writes Parquet: some
             hundred thousand messages, scaled up to all. It does not receive schedule copies, so it reads less.
"""

from __future__ import annotations

import asyncio
import json
import mmap
import shutil
import struct
import sys
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from duemq import Consumer
from tests.bench.brokers import MakeBroker, ours
from tests.bench.figures import Figure, Figures, figures_of
from tests.bench.spark import stores as spark_stores
from tests.bench.spark.stores import TOPICS, Generated
from tests.interop.environment import make_broker

GROWTH_GB = (1, 2, 4, 8)
FIGURES: Mapping[str, Figure] = {
    "spark_query_1": Figure("Spark, a query by topic, one task at a time", "MB/s", True),
    "spark_query_2": Figure("  two tasks at a time", "MB/s", True),
    "spark_query_one_processor": Figure("  one task at a time on one processor", "MB/s", True),
    "spark_query_share": Figure("  time of two tasks on two processors, of one on one", "", False),
    "spark_query_cpu_s": Figure("  CPU of all processes a GB", "s", False),
    "spark_roles_2": Figure("a query by role and real topic, two tasks", "MB/s", True),
    "spark_audit": Figure("audit, two tasks", "MB/s", True),
    "spark_analyse": Figure("analyse, two tasks", "MB/s", True),
    "spark_grown_s": Figure("  analyse after 1 % more, with what the run before kept", "s", False),
    "spark_grown_share": Figure("  of the time of a full one", "%", False),
    "spark_compact": Figure("compact, two tasks, from and to one disk", "MB/s", True),
    "spark_compact_saved": Figure("  less than before", "%", True),
    "spark_jvm_mib": Figure("most anonymous memory: JVM", "MiB", False),
    "spark_workers_mib": Figure("  Python workers together", "MiB", False),
    "spark_naive_loop": Figure("the query as a Python loop over struct", "MB/s", True),
    "spark_naive_client": Figure("a consumer that drains into Parquet", "MB/s", True),
    **{
        f"spark_growth_{size}_{name}": figure
        for size in GROWTH_GB
        for name, figure in (
            ("query_s", Figure(f"{size} GB: the query by topic, two tasks", "s", False)),
            ("audit_s", Figure("  audit", "s", False)),
            ("analyse_s", Figure("  analyse", "s", False)),
            ("grown_s", Figure("  analyse after 1 % more", "s", False)),
            ("jvm_mib", Figure("  most anonymous memory: JVM", "MiB", False)),
            ("workers_mib", Figure("  Python workers together", "MiB", False)),
        )
    },
}
BIG = "spark_growth"


@dataclass(frozen=True)
class Sizes:
    """The size of each case."""

    gigabytes: float
    """GiB of the store."""
    growth: tuple[float, ...]
    """GiB of the stores that grow, for the figures of GROWTH_GB."""
    rounds: int
    loop_bytes: int
    """Bytes of the commitlog that the naive loop reads."""
    client_messages: int
    """Messages that the naive client drains."""
    segment: int = spark_stores.SEGMENT


REAL = Sizes(gigabytes=2, growth=GROWTH_GB, rounds=3, loop_bytes=256 << 20, client_messages=200_000)
TINY = Sizes(
    gigabytes=0.04,
    growth=(0.03, 0.04, 0.05, 0.06),
    rounds=1,
    loop_bytes=8 << 20,
    client_messages=3000,
    segment=16 << 20,
)


@dataclass(frozen=True)
class SparkBench:
    """The directory and the sizes of the stores."""

    directory: Path
    sizes: Sizes

    def generated(self, gigabytes: float) -> Generated:
        """Return a new store, in the page cache."""
        shutil.rmtree(self.directory, ignore_errors=True)
        store = spark_stores.write(self.directory / "store", gigabytes, segment=self.sizes.segment)
        for path in (store.path / "commitlog").iterdir():
            with path.open("rb", buffering=0) as file:
                while file.read(16 << 20):
                    pass
        return store


async def _run(store: Generated, master: str, jobs: list[str], rounds: int, processors: int = 2) -> dict[str, Any]:
    """Run jobs in a process of their own, and check their results."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.bench.spark.run", str(store.path), "--master", master, "--rounds", str(rounds),
        "--processors", str(processors), "--jobs", *jobs, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    output, _ = await process.communicate()
    if process.returncode != 0:
        raise RuntimeError(f"the Spark jobs over {store.path} failed")
    result: dict[str, Any] = json.loads(output.splitlines()[-1])
    for name, one in result.items():
        _check(store, name, one["found"])
    return result


def _check(store: Generated, name: str, found: Any) -> None:
    expected: Any = None
    told: Any = None
    if name == "aggregate":
        expected, told = _ends(store), {row[0]: row[1] for row in found}
    elif name == "roles":
        expected, told = store.records, sum(row[2] for row in found)
    elif name == "audit":
        told = found
        expected = {
            "scheduled": store.scheduled, "delivered": store.delivered, "pending": store.pending, "lost": 0, "twice": 0,
        }  # fmt: skip
    elif name in ("analyse", "grown"):
        expected, told = store.delivered, found["delivered"]
    elif name == "compact":
        expected, told = store.records - store.delivered, found["kept"]
    if told != expected:
        raise RuntimeError(f"{name}: {told} and not {expected}")


def _ends(store: Generated) -> dict[str, int]:
    """Number of records of each topic."""
    ends: dict[str, int] = {}
    for name, end in store.offsets.items():
        topic = name.split("@")[0]
        ends[topic] = ends.get(topic, 0) + end
    return {topic: end for topic, end in ends.items() if end}


async def spark_jobs(bench: SparkBench) -> Figures:
    """Queries, audit, analysis and compaction of one store."""
    store = await asyncio.to_thread(bench.generated, bench.sizes.gigabytes)
    alone = await _run(store, "local[1]", ["aggregate"], bench.sizes.rounds, processors=1)
    one = await _run(store, "local[1]", ["aggregate"], bench.sizes.rounds)
    two = await _run(store, "local[2]", ["aggregate", "roles"], bench.sizes.rounds)
    two |= await _run(store, "local[2]", ["audit", "analyse", "grown", "compact"], bench.sizes.rounds)
    size = store.size / 1e6
    shutil.rmtree(bench.directory)
    return {
        "spark_query_1": size / one["aggregate"]["wall_s"],
        "spark_query_2": size / two["aggregate"]["wall_s"],
        "spark_query_one_processor": size / alone["aggregate"]["wall_s"],
        "spark_query_share": two["aggregate"]["wall_s"] / alone["aggregate"]["wall_s"],
        "spark_query_cpu_s": two["aggregate"]["cpu_s"] / size * 1000,
        "spark_roles_2": size / two["roles"]["wall_s"],
        "spark_audit": size / two["audit"]["wall_s"],
        "spark_analyse": size / two["analyse"]["wall_s"],
        "spark_grown_s": two["grown"]["wall_s"],
        "spark_grown_share": two["grown"]["wall_s"] / two["analyse"]["wall_s"] * 100,
        "spark_compact": size / two["compact"]["wall_s"],
        "spark_compact_saved": two["compact"]["found"]["saved"] * 100,
        "spark_jvm_mib": max(job["jvm_mib"] for job in two.values()),
        "spark_workers_mib": max(job["workers_mib"] for job in two.values()),
    }


async def spark_naive(bench: SparkBench) -> Figures:
    """The same as the query by topic, without Spark, and without access to the files."""
    # A store of its own, since the broker writes to it.
    store = await asyncio.to_thread(bench.generated, bench.sizes.gigabytes)
    loop = await asyncio.to_thread(_loop, store, bench.sizes.loop_bytes)
    messages = await _drained(store, bench.directory, bench.sizes.client_messages)
    in_topics = sum(end for name, end in store.offsets.items() if name.split("@")[0] in TOPICS)
    shutil.rmtree(bench.directory)
    return {"spark_naive_loop": loop, "spark_naive_client": store.size / 1e6 / (in_topics / messages)}


def _loop(store: Generated, limit: int) -> float:
    """MB/s of a straightforward Python loop that knows the record format."""
    totals: dict[bytes, list[int]] = {}
    head = struct.Struct(">iIiiiqqiq8sq8siqi")
    path = min((store.path / "commitlog").iterdir())
    at = 0
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        start = time.perf_counter()
        end = min(limit, len(data), store.size)
        while at < end:
            size, magic, _, _, _, _, _, _, _, _, store_ms, _, _, _, body_size = head.unpack_from(data, at)
            if magic != 0xDAA320A7:
                break
            topic_at = at + head.size + body_size
            topic = data[topic_at + 1 : topic_at + 1 + data[topic_at]]
            total = totals.setdefault(topic, [0, 0, 0])
            total[0] += 1
            total[1] += size
            total[2] = max(total[2], store_ms)
            at += size
        seconds = time.perf_counter() - start
    if sum(total[1] for total in totals.values()) != at or not at:
        raise RuntimeError("the loop read something else than records")
    return at / 1e6 / seconds


async def _drained(store: Generated, directory: Path, wanted: int) -> float:
    """Messages per second that a consumer receives from a broker and writes to Parquet."""
    broker = make_broker("duemq", directory / "broker", {"mappedFileSizeCommitLog": _segment(store)}, store=store.path)
    await broker.start()
    names = ("topic", "queue_id", "queue_offset", "store_ms", "tags", "body")
    try:
        consumer = Consumer("drain", nameserver=broker.nameserver, from_="first", max_cached_messages=20_000)
        for topic in TOPICS:
            consumer.subscribe(topic)
        rows: list[tuple[Any, ...]] = []
        count, start, writer = 0, 0.0, None
        async with consumer:
            async for message in consumer:
                # The first messages wait until the consumer has its group's state.
                start = start or time.perf_counter()
                place = (message.topic, message.queue.queue_id, message.queue_offset)
                rows.append((*place, message.store_time_ms, message.tags, message.body))
                await message.ack()
                count += 1
                if len(rows) == 20_000 or count >= wanted:
                    batch = pa.record_batch([pa.array(column) for column in zip(*rows, strict=True)], names)
                    writer = writer or pq.ParquetWriter(directory / "drained.parquet", batch.schema, compression="zstd")
                    writer.write_batch(batch)
                    rows = []
                if count >= wanted:
                    break
            seconds = time.perf_counter() - start
        if writer is not None:
            writer.close()
    finally:
        await broker.stop()
    if pq.read_metadata(directory / "drained.parquet").num_rows != wanted:
        raise RuntimeError("not all messages are in the file")
    return count / seconds


def _segment(store: Generated) -> int:
    return min((store.path / "commitlog").iterdir()).stat().st_size


async def spark_growth(bench: SparkBench) -> Figures:
    """The same jobs over growing stores: the time should be proportional, and the memory constant."""
    figures: Figures = {}
    for label, gigabytes in zip(GROWTH_GB, bench.sizes.growth, strict=True):
        store = await asyncio.to_thread(bench.generated, gigabytes)
        found = await _run(store, "local[2]", ["aggregate"], bench.sizes.rounds)
        found |= await _run(store, "local[2]", ["audit", "analyse", "grown"], bench.sizes.rounds)
        figures |= {
            f"spark_growth_{label}_query_s": found["aggregate"]["wall_s"],
            f"spark_growth_{label}_audit_s": found["audit"]["wall_s"],
            f"spark_growth_{label}_analyse_s": found["analyse"]["wall_s"],
            f"spark_growth_{label}_grown_s": found["grown"]["wall_s"],
            f"spark_growth_{label}_jvm_mib": max(job["jvm_mib"] for job in found.values()),
            f"spark_growth_{label}_workers_mib": max(job["workers_mib"] for job in found.values()),
        }
    shutil.rmtree(bench.directory)
    return figures


CASES: tuple[Callable[[SparkBench], Awaitable[Figures]], ...] = (spark_jobs, spark_naive, spark_growth)
NAMES = tuple(case.__name__ for case in CASES)


async def run(
    make: MakeBroker, directory: Path, sizes: Sizes, only: Collection[str], say: Callable[[str], None]
) -> Figures:
    """Return the figures of the cases whose names are in `only`. They are of duemq only: Apache has no such jobs, and
    most of the cases need no broker."""
    if make is not ours:
        return {}
    bench = SparkBench(directory / "spark", sizes)
    return await figures_of(CASES, bench, only, say)
