"""The jobs read a store behind a URI, through pyarrow's file systems, as they read one on this machine. The file system
is S3's, over HTTP, served from the store's own directory (tests/spark/world/object_store.py)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from duemq.spark_jobs.audit import audit as job
from duemq.spark_jobs.errors import JobError, NoStore
from duemq.spark_jobs.source.tables import COLUMNS
from duemq.spark_jobs.store.local_files import expand
from duemq.spark_jobs.store.store_files import StoreFiles
from tests.spark.world import faults, oracle
from tests.spark.world.object_store import ObjectStore, serving
from tests.spark.world.stores import SEGMENT, WrittenStore


@pytest.fixture
def writable(duemq_store: WrittenStore, tmp_path: Path) -> WrittenStore:
    return replace(duemq_store, path=duemq_store.copy(tmp_path / "store"))


@pytest.fixture
def served(writable: WrittenStore) -> Iterator[ObjectStore]:
    """The directory above a store of this test's own, served."""
    with serving(writable.path.parent) as store:
        yield store


def table(spark: SparkSession, path: str, name: str, **options: str) -> DataFrame:
    return spark.read.format("rocketmq").option("table", name).option("columns", "*").options(**options).load(path)


def test_what_is_known_of_the_files_is_the_same(writable: WrittenStore, served: ObjectStore) -> None:
    here, there = StoreFiles.open(writable.path), StoreFiles.open(served.uri("store"))
    assert not there.is_local
    assert there.segments == here.segments
    assert there.queue_files() == here.queue_files()
    assert (there.written_by, there.is_clean, there.is_running) == (here.written_by, here.is_clean, False)
    # There the holes in a file are not known.
    assert there.records_end() == here.records_end()
    for name in ("config/topics.json", "config/nothing.json"):
        assert there.json(name) == here.json(name)
    for file in here.queue_files():
        assert there.units(file).tolist() == here.units(file).tolist()


def test_every_table_is_the_same(spark: SparkSession, writable: WrittenStore, served: ObjectStore) -> None:
    before = oracle.contents(writable.path)
    faults.flip_byte(writable.path, next(record for record in before.records if len(record.body) > 100))
    for name in COLUMNS:
        here, there = (table(spark, path, name).toArrow() for path in (str(writable.path), served.uri("store")))
        assert there.schema == here.schema
        assert set(there["store"].to_pylist()) <= {served.uri("store").replace("key:secret@", "").partition("?")[0]}
        here, there = here.drop("store"), there.drop("store")
        key = [(column, "ascending") for column in ("physical_offset", "topic", "queue_id", "position")]
        key = [item for item in key if item[0] in here.column_names]
        rows = [one.take(order_of(one, key)).to_pylist() for one in (here, there)]
        assert rows[0] == rows[1], name
        assert rows[0] or name in ("timers", "pending")


def order_of(table: object, key: list[tuple[str, str]]) -> object:
    import pyarrow.compute as pc

    return pc.sort_indices(table, key)


def test_wildcards_in_a_uri(writable: WrittenStore, served: ObjectStore) -> None:
    (writable.path.parent / "stone").mkdir()
    (writable.path.parent / "stone" / "file").write_text("x")
    assert expand(served.uri("st*")) == [served.uri("stone"), served.uri("store")]
    assert expand(served.uri("s*re/commit[kl]og")) == [served.uri("store/commitlog")]
    assert expand(served.uri("s*/commitlog")) == [served.uri("store/commitlog")]
    with pytest.raises(JobError, match=r"^s3://stores/x\*: there is no such directory$"):
        expand(served.uri("x*"))


def test_options_save_reading(spark: SparkSession, writable: WrittenStore, served: ObjectStore) -> None:
    uri = served.uri("store")
    assert table(spark, uri, "messages").count() > 0
    everything, served.read = served.read, 0
    found = table(spark, uri, "messages", endingOffset=str(SEGMENT)).count()
    assert found == sum(record.physical_offset < SEGMENT for record in oracle.contents(writable.path).records)
    assert served.read < everything - SEGMENT


def test_an_audit_is_the_same(spark: SparkSession, writable: WrittenStore, served: ObjectStore) -> None:
    here, there = job.audit(spark, str(writable.path)), job.audit(spark, served.uri("store"))
    assert there.store == "s3://stores/store", "the keys of the URI are not written down"
    for name in ("records", "scheduled", "delivered", "cancelled", "pending", "lost", "twice", "lateness", "begin"):
        assert getattr(there, name) == getattr(here, name)
    # All but the last file, where only zeros follow, have the same hash.
    assert [part.sha256 for part in there.inputs[:-1]] == [part.sha256 for part in here.inputs[:-1]]


def test_what_is_no_store_there_is_told(spark: SparkSession, tmp_path: Path) -> None:
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "notes.txt").write_text("hello")
    with serving(tmp_path) as served:
        with pytest.raises(NoStore, match="there is no such directory"):
            StoreFiles.open(served.uri("nowhere"))
        with pytest.raises(NoStore, match=r"^s3://stores/foreign: has no commitlog/"):
            StoreFiles.open(served.uri("foreign"))
        with pytest.raises(PySparkException) as caught:
            table(spark, served.uri("foreign"), "messages").count()
        assert "has no commitlog/" in str(caught.value)
