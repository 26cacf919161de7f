"""Measures the time and memory of queries and jobs in one Spark session over one store. Each session runs in a process
of its own, since a JVM keeps its master and its heap.

    python -m tests.bench.spark.run STORE --master local[2] --processors 2 --jobs aggregate audit analyse grown compact

A task keeps Python and Java busy at the same time, so one task alone on two processors says nothing about scaling.

Each job runs once to warm up the session, and then several times, of which the best counts; compact, which writes, runs
once. The result is printed as JSON: wall-clock and CPU seconds and findings of each job, and the memory of all
processes.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_TICK = os.sysconf("SC_CLK_TCK")
_INTERVAL_S = 0.1
QUERIES = {"aggregate", "roles"}
"""Jobs that are not measured in the session of other jobs, which has other settings."""
BY_TOPIC = "select topic, count(*) as number, sum(size) as bytes, max(store_ms) as last from messages group by topic"
BY_ROLE = "select role, real_topic, count(*) as number, sum(size) as bytes from messages group by role, real_topic"


@dataclass
class Processes:
    """This process and all its descendants: their CPU time, and their peak memory, in MiB. Pages that a forked worker
    shares with others are counted for each."""

    jvm: float = 0.0
    worker: float = 0.0
    workers: float = 0.0
    _done: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Processes:
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(_INTERVAL_S):
            sizes = [(name, _anonymous(pid)) for pid, (name, _) in _family().items() if pid != os.getpid()]
            workers = [size for name, size in sizes if not name.startswith("java")]
            self.jvm = max([self.jvm, *(size for name, size in sizes if name.startswith("java"))])
            self.worker, self.workers = max([self.worker, *workers]), max(self.workers, sum(workers))

    @staticmethod
    def cpu_seconds() -> float:
        """CPU seconds of all processes, including children that they waited for."""
        return sum(seconds for _, seconds in _family().values())


def _family() -> dict[int, tuple[str, float]]:
    """Return this process and its descendants: name, and CPU seconds."""
    found: dict[int, tuple[int, str, float]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            try:
                name, fields = Path(f"/proc/{entry}/stat").read_text().split("(", 1)[1].rsplit(")", 1)
            except OSError:
                continue
            numbers = fields.split()
            found[int(entry)] = (int(numbers[1]), name, sum(map(int, numbers[11:15])) / _TICK)
    mine = {os.getpid()}
    while more := {pid for pid, (parent, _, _) in found.items() if parent in mine} - mine:
        mine |= more
    return {pid: found[pid][1:] for pid in mine if pid in found}


def _anonymous(pid: int) -> float:
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in text.splitlines() if line.startswith("RssAnon")), 0.0)


class Jobs:
    """The jobs to measure; each returns its findings."""

    def __init__(self, session: SparkSession, store: Path) -> None:
        self._session, self._store = session, store

    def _query(self, columns: str, query: str) -> list[list[Any]]:
        reader = self._session.read.format("rocketmq").option("columns", columns)
        reader.load(str(self._store)).createOrReplaceTempView("messages")
        return [list(row) for row in self._session.sql(query).collect()]

    def aggregate(self) -> Any:
        return self._query("topic,size,store_ms", BY_TOPIC)

    def roles(self) -> Any:
        return self._query("role,real_topic,size", BY_ROLE)

    def audit(self) -> Any:
        from duemq.spark_jobs.audit.audit import audit

        found = audit(self._session, str(self._store))
        return {name: getattr(found, name) for name in ("scheduled", "delivered", "pending", "lost", "twice")}

    def analyse(self) -> Any:
        from duemq.spark_jobs.analyse.analyse import analyse

        found = analyse(self._session, str(self._store))
        return {"bytes": found.bytes, "delivered": found.audit.delivered}

    def grown(self) -> Any:
        """Analyse a store that has grown by 1 % since an earlier analysis."""
        from duemq.spark_jobs.analyse.analyse import analyse
        from tests.bench.spark.stores import Cut

        before, state = self._store.parent / "before", self._store.parent / "state"
        if not before.exists():
            cut = Cut(self._store, sum(path.stat().st_blocks for path in self._store.glob("commitlog/*")) * 512 // 100)
            analyse(self._session, str(self._store), state=str(before))
            cut.put_back()
        shutil.rmtree(state, ignore_errors=True)
        # Files that are kept are never changed in place.
        shutil.copytree(before, state, copy_function=os.link)
        found = analyse(self._session, str(self._store), state=str(state), tell=_fail)
        return {"bytes": found.bytes, "delivered": found.audit.delivered}

    def compact(self) -> Any:
        from duemq.spark_jobs.compact.compact import compact

        new = self._store.parent / "compacted"
        try:
            found = compact(str(self._store), str(new), spark=self._session)
        finally:
            shutil.rmtree(new, ignore_errors=True)
        return {"kept": found.kept, "saved": found.saved}


def _fail(text: str) -> None:
    raise RuntimeError(text)


def measure(store: Path, master: str, jobs: list[str], *, rounds: int) -> dict[str, Any]:
    """Run jobs; see the module."""
    from duemq.spark_jobs.session import make_session

    session = make_session("duemq benchmark", master=master, for_jobs=not QUERIES & {*jobs})
    result: dict[str, Any] = {}
    work = Jobs(session, store)
    try:
        for name in jobs:
            job: Callable[[], Any] = getattr(work, name)
            job()
            with Processes() as processes:
                best: dict[str, Any] = {}
                for _ in range(1 if name == "compact" else rounds):
                    cpu, start = processes.cpu_seconds(), time.perf_counter()
                    found = job()
                    wall = time.perf_counter() - start
                    if not best or wall < best["wall_s"]:
                        best = {"wall_s": wall, "cpu_s": processes.cpu_seconds() - cpu, "found": found}
            memory = {"jvm_mib": processes.jvm, "worker_mib": processes.worker, "workers_mib": processes.workers}
            result[name] = best | memory
    finally:
        session.stop()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.spark.run", description=__doc__)
    parser.add_argument("store", type=Path)
    parser.add_argument("--master", default="local[2]")
    parser.add_argument("--processors", type=int, default=2, help="that all processes together may use")
    parser.add_argument("--jobs", nargs="+", default=["aggregate"])
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: arguments.processors])
    print(json.dumps(measure(arguments.store, arguments.master, arguments.jobs, rounds=arguments.rounds)))


if __name__ == "__main__":
    main()
