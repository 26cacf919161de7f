"""Archives, tables and results written to a URI. The file system is S3's, over HTTP (`tests.spark.world.object_store`),
and, for file systems with renames such as HDFS, this machine's under another name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyarrow import fs

from duemq.spark_jobs.archive.append import append, open_table
from duemq.spark_jobs.archive.archive import archive, restore
from duemq.spark_jobs.archive.parquet_table import committed_files
from duemq.spark_jobs.errors import JobError
from duemq.spark_jobs.store import directories
from duemq.spark_jobs.store.directories import Directory
from duemq.spark_jobs.store.published import published
from tests.spark.test_cli import SMALL
from tests.spark.world.commands import Commands
from tests.spark.world.object_store import ObjectStore, serving, serving_apart
from tests.unit.spark_jobs.archive.test_append import READERS, World, keys
from tests.unit.spark_jobs.compact.test_compact import tree


@pytest.fixture
def world(tmp_path: Path) -> World:
    world = World(tmp_path / "store", "a")
    world.grow(60)
    return world


@pytest.fixture
def bucket(tmp_path: Path) -> Path:
    path = tmp_path / "bucket"
    path.mkdir()
    return path


@pytest.fixture
def served(bucket: Path) -> Iterator[ObjectStore]:
    with serving(bucket) as store:
        yield store


@pytest.fixture(params=["s3", "hdfs"])
def there(request: pytest.FixtureRequest, bucket: Path, monkeypatch: pytest.MonkeyPatch) -> Directory:
    """A directory `there` in the bucket."""
    if request.param == "s3":
        served: ObjectStore = request.getfixturevalue("served")
        return Directory(served.uri("there"))
    monkeypatch.setattr(directories, "file_system", lambda uri: (fs.LocalFileSystem(), str(bucket / "there")))
    return Directory(f"hdfs://name-node/{request.node.name}")


def test_files_are_written_read_listed_and_removed(there: Directory, bucket: Path) -> None:
    assert there.names() == []
    assert there.read("a/b") is None
    there.write("a/b", b"one")
    there.write("a/b", b"another")
    there.write("c", b"")
    assert there.read("a/b") == b"another"
    assert (there.names(), there.names("a"), there.names("x")) == (["a/b", "c"], ["a/b"], [])
    assert there.size() == 7
    with there.stream("d.zst", "zstd") as stream:
        stream.write(b"x" * 100_000)
    assert 0 < (bucket / "there/d.zst").stat().st_size < 1000
    for name in ("a/b", "a/b", "d.zst"):
        there.remove(name)
    assert there.names() == ["c"]


def test_what_fails_is_told_without_the_keys(served: ObjectStore) -> None:
    served.fails_after = 0
    with pytest.raises(
        JobError, match=r"^s3://stores/there: .*ACCESS_DENIED|^s3://stores/there: .*AccessDenied"
    ) as caught:
        Directory(served.uri("there")).write("a", b"x")
    assert "secret" not in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("form", ["parquet", "delta"])
def test_a_table_there_grows(world: World, bucket: Path, form: str) -> None:
    with serving_apart(bucket) as served:
        for records in (60, 20):
            done = append(str(world.root), open_table(served.uri("table"), form), name="a", workers=1)
            assert done.records == records
            world.grow(20)
        done = append(str(world.root), open_table(served.uri("table"), form), name="a", workers=1)
        assert done.records == 20
        again = append(str(world.root), open_table(served.uri("table"), form), name="a", workers=1)
        assert again.records == 0
    assert keys(READERS[form](bucket / "table")) == sorted(world.sent)


def test_a_table_there_of_which_a_run_failed(world: World, served: ObjectStore, bucket: Path) -> None:
    uri = served.uri("table")
    append(str(world.root), open_table(uri), name="a", workers=1)
    before, files = list(world.sent), len(committed_files(uri))
    for topic in ("x", "y", "z"):
        world.grow(20, topic)
    served.fails_after = len(served.puts) + 3
    with pytest.raises(JobError, match="s3://stores/table"):
        append(str(world.root), open_table(uri), name="a", workers=1)
    assert len(committed_files(uri)) == files
    assert len(keys(READERS["parquet"](bucket / "table"))) == len(before), "what it wrote is gone again"
    served.fails_after = None
    world.grow(20, "w")
    append(str(world.root), open_table(uri), name="a", workers=1)
    assert keys(READERS["parquet"](bucket / "table")) == sorted(world.sent)


def test_an_archive_there_is_the_same_as_here(world: World, served: ObjectStore, bucket: Path, tmp_path: Path) -> None:
    here = archive(str(world.root), str(tmp_path / "archive"), workers=1)
    there = archive(str(world.root), served.uri("archive"), workers=1)
    assert (there.records, there.files, there.why_not_restorable) == (here.records, here.files, None)
    assert there.disk_after == sum(path.stat().st_size for path in (bucket / "archive").rglob("*") if path.is_file())
    assert served.puts[-1] == "archive/manifest.json"
    names = [
        sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())
        for root in (tmp_path / "archive", bucket / "archive")
    ]
    assert names[0] == names[1]
    for number, archived in enumerate((str(bucket / "archive"), served.uri("archive"))):
        restore(archived, str(tmp_path / f"back-{number}"), workers=1)
        assert tree(world.root) == tree(tmp_path / f"back-{number}", but="index")
    next((bucket / "archive/messages").rglob("*.parquet")).unlink()
    with pytest.raises(JobError, match=r"^s3://stores/archive: messages/.*\.parquet is missing$"):
        restore(served.uri("archive"), str(tmp_path / "back"), workers=1)
    with pytest.raises(JobError, match=r"^s3://stores/nothing: has no manifest\.json, so it is not an archive"):
        restore(served.uri("nothing"), str(tmp_path / "back"), workers=1)
    with pytest.raises(JobError, match=r"^s3://stores/archive: exists and is not empty"):
        archive(str(world.root), served.uri("archive"), workers=1)


def test_an_archive_there_that_was_interrupted(world: World, served: ObjectStore, bucket: Path, tmp_path: Path) -> None:
    path = sorted((world.root / "commitlog").iterdir())[0]
    data = bytearray(path.read_bytes())
    second = int.from_bytes(data[:4], "big")
    data[second : second + 40] = b"\xee" * 40
    path.write_bytes(data)
    served.fails_after = 3
    with pytest.raises(JobError, match="s3://stores/archive"):
        archive(str(world.root), served.uri("archive"), workers=1)
    (bucket / "archive/messages/left.parquet").write_bytes(b"of the run before")
    served.fails_after = None
    assert archive(str(world.root), served.uri("archive"), workers=1).damaged == 1
    assert not (bucket / "archive/messages/left.parquet").exists()
    assert not list((bucket / "archive/.scratch").iterdir())
    restore(str(bucket / "archive"), str(tmp_path / "back"), workers=1)
    assert tree(world.root) == tree(tmp_path / "back", but="index")


def test_results_are_copied_when_all_are_there(served: ObjectStore, bucket: Path) -> None:
    uri = served.uri("out")
    for run in range(2):
        with published(uri) as out:
            assert out is not None
            path = Path(out)
            known = sorted(file.name for file in path.iterdir())
            assert known == ([] if run == 0 else ["audit.json", "comparison.json", "history.jsonl"])
            if run:
                assert (path / "history.jsonl").read_text() == "run 0"
                (path / "comparison.json").unlink()
            else:
                (path / "comparison.json").write_text("old")
            (path / "parquet").mkdir()
            for name in ("audit.json", "history.jsonl", "report.html", "parquet/a.parquet"):
                (path / name).write_text(f"run {run}")
            assert not (bucket / "out/report.html").exists() or run
        assert served.puts[-3:] == ["out/report.html", "out/audit.json", "out/history.jsonl"]
    assert not (bucket / "out/comparison.json").exists()
    assert (bucket / "out/parquet/a.parquet").read_text() == "run 1"
    puts = len(served.puts)

    def fail() -> None:
        with published(uri) as out:
            Path(str(out), "audit.json").write_text("half")
            raise JobError("failed")

    with pytest.raises(JobError, match="failed"):
        fail()
    assert len(served.puts) == puts
    with published("here") as out:
        assert out == "here"


def test_the_commands_write_there(world: World, bucket: Path, commands: Commands, tmp_path: Path) -> None:
    with serving_apart(bucket) as served:
        for night in range(2):
            done = commands.run("spark", "analyse", world.root, "--out", served.uri("report"), *SMALL, cwd=tmp_path)
            assert done.returncode == 0, done.stderr
            assert done.stdout.splitlines()[-1] == "report: s3://stores/report/report.html"
            assert ("since " in done.stdout) == bool(night)
            assert "secret" not in done.stdout + done.stderr
        done = commands.run("spark", "archive", world.root, served.uri("table"), "--append", *SMALL, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    assert len((bucket / "report/history.jsonl").read_text().splitlines()) == 2
    assert json.loads((bucket / "report/audit.json").read_text())["records"] == 60
    assert (bucket / "report/parquet/topics.parquet").exists()
    assert len(keys(READERS["parquet"](bucket / "table"))) == 60
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bucket", "store"]
