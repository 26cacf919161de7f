"""Growing tables, written by Spark's tasks and by the command, and read by Spark."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from duemq.spark_jobs.archive.append import FORMATS, append, open_table
from duemq.spark_jobs.archive.parquet_table import committed_files
from tests.spark.test_cli import SMALL
from tests.spark.world import oracle
from tests.spark.world.commands import Commands
from tests.spark.world.stores import WrittenStore
from tests.unit.spark_jobs.archive.test_append import READERS, World, keys


def test_the_command_appends_each_store(spark: SparkSession, commands: Commands, tmp_path: Path) -> None:
    worlds = [World(tmp_path / name / "store", str(tmp_path / name / "store")) for name in ("a", "b")]
    for records in (30, 10):
        for world in worlds:
            world.grow(records)
        done = commands.run("spark", "archive", f"{tmp_path}/[ab]/store", "table", "--append", *SMALL, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert [line.split(" records")[0] for line in done.stdout.splitlines()] == [
            f"{world.name}: {records}" for world in worlds
        ]
    frame = spark.read.parquet(str(tmp_path / "table"))
    kinds = {field.name: field.dataType.simpleString() for field in frame.schema}
    assert (kinds["store_time"], kinds["day"], kinds["body"]) == ("timestamp", "date", "binary")
    assert kinds["properties"] == "map<string,string>"
    # A file left by a killed run.
    path = next((tmp_path / "table").rglob("*.parquet"))
    path.with_name("000009-x.parquet").write_bytes(path.read_bytes())
    committed = spark.read.option("basePath", str(tmp_path / "table")).parquet(*committed_files(f"{tmp_path}/table"))
    path.with_name("000009-x.parquet").unlink()
    for each in (frame, committed):
        rows = each.select("store", "topic", "queue_id", "queue_offset").collect()
        assert sorted(map(tuple, rows)) == sorted(key for world in worlds for key in world.sent)
    assert frame.where("day = '2023-11-14' and store like '%/a/store'").count() == 40


@pytest.mark.parametrize("form", FORMATS)
def test_sparks_tasks_append(spark: SparkSession, tmp_path: Path, form: str) -> None:
    world, target = World(tmp_path / "store", "a"), tmp_path / "table"
    for _ in range(2):
        world.grow(40)
        append(str(world.root), open_table(str(target), form), name="a", spark=spark)
    assert keys(READERS[form](target)) == sorted(world.sent)
    assert not list(target.rglob("*.mark"))


@pytest.mark.interop
def test_a_table_has_what_a_real_brokers_store_has(written: WrittenStore, tmp_path: Path) -> None:
    records = oracle.contents(written.path).records
    for form in FORMATS:
        append(str(written.path), open_table(str(tmp_path / form), form), name="a", workers=1)
        table = READERS[form](tmp_path / form)
        rows = {row["physical_offset"]: row for row in table.to_pylist()}
        assert len(rows) == table.num_rows == len(records)
        for record in records:
            row = rows[record.physical_offset]
            assert (row["topic"], row["queue_id"], row["queue_offset"]) == (
                record.topic,
                record.queue_id,
                record.queue_offset,
            )
            assert (row["body"], dict(row["properties"])) == (record.body, record.properties)
            assert round(row["store_time"].timestamp() * 1000) == record.store_ms
