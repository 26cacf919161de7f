"""With Spark: a run that goes on where the last one ended finds the same as a run that reads everything, byte for
byte."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest

from duemq.spark_jobs.analyse.analyse import analyse
from duemq.spark_jobs.audit import kept
from duemq.spark_jobs.audit.audit import audit
from duemq.spark_jobs.audit.incremental import Kept
from tests.bench.spark import stores as spark_stores

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SEGMENT = 4 << 20
GIGABYTES = 0.012
SENDS = 1000
MADE_MS = 1_800_000_000_000


@pytest.mark.parametrize("is_by_tasks", [True, False], ids=["tasks", "here"])
def test_it_finds_what_a_whole_run_finds(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_by_tasks: bool
) -> None:
    """An incremental analysis of some new ranges finds the same as a whole one, matched in Spark's tasks, or in this
    process as usual for a store of this size."""
    store, state, told = tmp_path / "store", str(tmp_path / "state"), list[str]()
    made = spark_stores.write(store, GIGABYTES, segment=SEGMENT, sends=SENDS)
    if is_by_tasks:
        monkeypatch.setattr(Kept, "_shuffle_for", lambda self, _: self._shuffle())
    cut = spark_stores.Cut(store, 3 << 20)
    analyse(spark, str(store), state=state, tell=told.append)
    cut.put_back()
    expected = msgspec.json.encode(analyse(spark, str(store), made_ms=MADE_MS))

    def no_spark() -> SparkSession:
        pytest.fail("Spark was wanted")

    found = analyse(no_spark, str(store), state=state, tell=told.append, made_ms=MADE_MS)
    assert msgspec.json.encode(found) == expected
    assert found.audit.delivered == made.delivered
    # If the matched state is gone, it is matched anew from the kept results of the ranges.
    for path in Path(kept.directory_of(state, str(store))).glob("open-*"):
        os.unlink(path)
    assert told == []
    found = analyse(spark, str(store), state=state, tell=told.append, made_ms=MADE_MS)
    assert msgspec.json.encode(found) == expected
    assert len(told) == 1
    summary = audit(no_spark, str(store), state=state, tell=told.append, made_ms=MADE_MS)
    assert msgspec.json.encode(summary) == msgspec.json.encode(audit(spark, str(store), made_ms=MADE_MS))
    assert len(told) == 1


def test_where_tasks_cannot_write_nothing_is_kept(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, state, told = tmp_path / "store", tmp_path / "state", list[str]()
    spark_stores.write(store, GIGABYTES / 2, segment=SEGMENT, sends=SENDS)
    monkeypatch.setattr(Kept, "_shuffle_for", lambda self, _: self._shuffle())
    monkeypatch.setattr(spark.sparkContext, "master", "spark://elsewhere:7077")
    monkeypatch.setattr(kept, "directory_of", lambda state, _: state)
    expected = audit(spark, str(store), made_ms=MADE_MS)
    assert audit(spark, str(store), state=str(state), tell=told.append, made_ms=MADE_MS) == expected
    assert told == []
    monkeypatch.setattr("duemq.spark_jobs.audit.shuffle.BySpark.sees", lambda *_: False)
    assert audit(spark, str(store), state=str(state), tell=told.append, made_ms=MADE_MS, anew=True) == expected
    assert ["do not see it" in line for line in told] == [True]
