"""Random queries of one view of a store, each compared with the same query over a copy in Parquet.

    python -m tests.spark.world.queries STORE SCRATCH --seed 0 --steps 60 [--pushdown]

The view, and DataFrames made of it, stay the same over all steps: one query must not change the answer of another.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

COLUMNS: Final = "physical_offset,size,topic,queue_id,queue_offset,store_ms,born_ms,role,tags"

KINDS: Final = ("sql", "sql", "sql", "frame", "union", "explain", "cache", "view")
"""Each run of so many steps has all of them, in some order."""


class Conditions:
    """Random conditions on rows, with values that occur in them."""

    def __init__(self, copy: DataFrame, rng: random.Random) -> None:
        rows = copy.collect()
        self._rng = rng
        self._topics = sorted({row.topic for row in rows})
        self._tags = sorted({row.tags for row in rows if row.tags})
        self._rows = rng.sample(rows, min(200, len(rows)))

    def _simple(self) -> str:
        rng, row = self._rng, self._rng.choice(self._rows)
        topics = [f"'{topic}'" for topic in rng.sample(self._topics, min(len(self._topics), rng.randint(1, 3)))]
        return rng.choice(
            [
                f"topic = {topics[0]}",
                f"topic in ({', '.join(topics)})",
                f"topic != {topics[0]}",
                f"physical_offset {rng.choice(['<', '<=', '>', '>=', '='])} {row.physical_offset}",
                f"store_ms {rng.choice(['<', '>='])} {row.store_ms}",
                f"born_ms between {row.born_ms} and {row.born_ms + rng.randint(0, 2000)}",
                f"queue_id = {row.queue_id}",
                f"queue_offset < {row.queue_offset}",
                f"role = '{row.role}'",
                "tags is null",
                f"tags = '{rng.choice(self._tags)}'" if self._tags else "tags is not null",
            ]
        )

    def any(self) -> str:
        """Return one condition, or two joined."""
        join = self._rng.choice(["", "", " and ", " or "])
        return f"({self._simple()}{join}{self._simple()})" if join else self._simple()


def _queries(ask: Callable[[], str]) -> list[str]:
    """Return some queries over a table {t}."""
    one, other = (f"(select * from {{t}} where {ask()})" for _ in range(2))
    return [
        "select count(*), sum(size) from {t}",
        f"select count(*), min(physical_offset), sum(size) from {one}",
        f"select topic, role, count(*), max(store_ms) from {one} group by topic, role",
        f"select (select count(*) from {one}), (select count(*) from {other}), (select sum(size) from {{t}})",
        f"select count(*), sum(size) from (select * from {one} union all select * from {other})",
        f"select count(*), sum(a.size) from {one} a join {other} b on a.physical_offset = b.physical_offset",
        f"select count(*) from {one} where physical_offset in (select physical_offset from {other})",
        f"with some as {one} select count(*), (select count(*) from some where {ask()}) from some",
        f"select physical_offset, topic from {one} except select physical_offset, topic from {other}",
    ]


def check(session: SparkSession, store: Path, scratch: Path, seed: int, steps: int) -> Iterator[str]:
    """Ask `steps` random questions; yield each one, after its answer was compared. Raises AssertionError."""
    rng = random.Random(seed)
    reader = session.read.format("rocketmq").option("columns", COLUMNS).option("rangeBytes", str(4 << 20))
    frame = reader.load(str(store))
    path = str(scratch / f"copy-{seed}")
    frame.write.parquet(path)
    copy = session.read.parquet(path)
    conditions = Conditions(copy, rng)
    views = {"m": frame, "p": copy}
    for name, view in views.items():
        view.createOrReplaceTempView(name)
    kinds: list[str] = []
    for _ in range(steps):
        kinds = kinds or rng.sample(KINDS, len(KINDS))
        kind = kinds.pop()
        one, other = conditions.any(), conditions.any()
        query = rng.choice(_queries(conditions.any))
        if kind == "sql":
            answers = [sorted(map(str, session.sql(query.replace("{t}", name)).collect())) for name in views]
        elif kind == "frame":
            query = f"where {one}, then all"
            answers = [[str(view.where(one).count()), str(view.count())] for view in views.values()]
        elif kind == "union":
            query = f"where {one} union where {other}"
            answers = [
                sorted(map(str, view.where(one).union(view.where(other)).select("physical_offset").collect()))
                for view in views.values()
            ]
        elif kind == "explain":
            with redirect_stdout(StringIO()):
                frame.where(one).explain()
            query = f"explain {one}, then all"
            answers = [[str(view.count())] for view in views.values()]
        elif kind == "cache":
            query = f"cache where {one}, then {other} of all and of what is cached"
            answers = []
            for view in views.values():
                cached = view.where(one).cache()
                answers.append([str(each.count()) for each in (cached, view.where(other), cached.where(other), view)])
                cached.unpersist()
        else:
            text = query
            answers = []
            for name, view in views.items():
                view.where(one).createOrReplaceTempView(f"{name}_some")
                answers.append(sorted(map(str, session.sql(text.replace("{t}", f"{name}_some")).collect())))
            query = f"{text} of a view where {one}"
        assert answers[0] == answers[1], f"seed {seed}: {query}: {answers[0][:5]}, and of the copy {answers[1][:5]}"
        yield query


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("store", type=Path)
    parser.add_argument("scratch", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--pushdown", action="store_true", help="as where other data sources have it switched on")
    given = parser.parse_args()
    import pyspark

    from duemq.spark_jobs.session import make_session

    settings = {
        "spark.sql.python.filterPushdown.enabled": str(given.pushdown).lower(),
        "spark.sql.shuffle.partitions": "2",
        "spark.local.dir": str(given.scratch),
        "spark.sql.warehouse.dir": str(given.scratch),
    }
    session = make_session("queries", master="local[2]", memory="768m", settings=settings, for_jobs=True)
    count = sum(1 for _ in check(session, given.store, given.scratch, given.seed, given.steps))
    print(f"{count} queries with pyspark {pyspark.__version__} agree")
    session.stop()


if __name__ == "__main__":
    main()
