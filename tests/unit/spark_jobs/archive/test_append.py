"""Appending to a table of several stores: each record once, whatever happens to the runs and to the stores."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from duemq.spark_jobs.archive.append import FORMATS, AppendResult, append, open_table
from duemq.spark_jobs.archive.delta_table import _options
from duemq.spark_jobs.archive.parquet_table import ParquetTable, committed_files
from duemq.spark_jobs.archive.table import COLUMNS, Mark, NameOf, Table, TableRun
from duemq.spark_jobs.compact.compact import compact
from duemq.spark_jobs.errors import JobError
from duemq.spark_jobs.store.directories import Directory
from duemq.spark_jobs.store.store_files import StoreFiles
from tests.soak import examples, sampled
from tests.unit.spark_jobs import forked
from tests.unit.spark_jobs.compact_world import ODD_MS, START_MS, Broker, new_broker, with_odd_times
from tests.unit.spark_jobs.forked import exit_code
from tests.unit.spark_jobs.store.test_store_files import idle

RANGE = 4 << 20
Key = tuple[str, str, int, int]
"""Store, topic, queue id and queue offset."""


class World:
    """A store that grows, and the records it has had."""

    def __init__(self, root: Path, name: str) -> None:
        self.root, self.name = root, name
        broker = new_broker(root)
        self.clock = broker.clock
        broker.close()
        self.sent: list[Key] = []

    def grow(self, count: int, topic: str = "orders", size: int = 2000, days: int = 0) -> None:
        self.clock.advance(days * 86_400_000)
        broker = Broker(self.root, self.clock)
        for number in range(count):
            offset = broker.store.ensure_queue(topic, number % 2).next_offset
            broker.send(topic, b"%d" % number * size, f"KEYS\x01{number}\x02a\x01b", number % 2)
            self.sent.append((self.name, topic, number % 2, offset))
            self.clock.advance(1)
        broker.close()

    def append(self, target: Path, form: str, **options: Any) -> AppendResult:
        name = options.pop("name", self.name)
        return append(str(self.root), open_table(str(target), form), name=name, workers=1, range_size=RANGE, **options)


def parquet(target: Path) -> pa.Table:
    partitions = ds.partitioning(pa.schema([("day", pa.string()), ("store", pa.string())]), flavor="hive")
    return ds.dataset(target, partitioning=partitions, format="parquet").to_table()


def delta(target: Path) -> pa.Table:
    import deltalake

    return pa.table(deltalake.DeltaTable(str(target)).to_pyarrow_dataset().to_table())


def iceberg_table(target: Path) -> Any:
    from pyiceberg.catalog.sql import SqlCatalog

    catalog = SqlCatalog("duemq", uri=f"sqlite:///{target}/catalog.db", warehouse=f"file://{target}")
    return catalog.load_table("duemq.messages")


def iceberg(target: Path) -> pa.Table:
    return iceberg_table(target).scan().to_arrow()


READERS: dict[str, Callable[[Path], pa.Table]] = {"parquet": parquet, "iceberg": iceberg, "delta": delta}
every_format = pytest.mark.parametrize("form", FORMATS)


def keys(table: pa.Table) -> list[Key]:
    names = ("store", "topic", "queue_id", "queue_offset")
    return sorted(zip(*(table[name].to_pylist() for name in names), strict=True))


def check(target: Path, form: str, *worlds: World) -> pa.Table:
    table = READERS[form](target)
    assert keys(table) == sorted(key for world in worlds for key in world.sent)
    return table


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path / "store", "a")


@every_format
def test_what_came_since_is_appended(world: World, tmp_path: Path, form: str) -> None:
    target = tmp_path / "table"
    world.grow(100)
    first = world.append(target, form)
    assert (first.begin, first.records) == (0, 100)
    world.grow(30, "a%b/c", days=1)
    second = world.append(target, form)
    assert (second.begin, second.records) == (first.end, 30)
    again = world.append(target, form)
    assert (again.begin, again.end, again.records, again.files) == (second.end, second.end, 0, 0)
    table = check(target, form, world)
    row = max(table.to_pylist(), key=lambda row: row["physical_offset"])
    assert (row["store"], str(row["day"]), row["topic"]) == ("a", "2023-11-15", "a%b/c")
    assert row["store_time"].timestamp() * 1000 == world.clock.now_ms() - 1
    assert row["body"] == b"29" * 2000
    assert dict(row["properties"]) == {"KEYS": "29", "a": "b"}
    assert row["properties_text"] == b"KEYS\x0129\x02a\x01b"
    types = {field.name: field.type for field in COLUMNS}
    for field in table.schema:
        if field.name in ("day", "store", "topic"):
            continue  # from the directories, or of the library's own type
        assert field.type in (types[field.name], _large(types[field.name])), field


def _large(kind: pa.DataType) -> pa.DataType:
    return {pa.string(): pa.large_string(), pa.binary(): pa.large_binary()}.get(
        kind, pa.map_(pa.large_string(), pa.large_string()) if pa.types.is_map(kind) else kind
    )


def test_a_broker_of_rocketmq_that_was_started_since(world: World, tmp_path: Path) -> None:
    """Appending from a store that RocketMQ's broker has started on neither cuts nor repeats anything: that broker holds
    its last record back from readers, but the table has it."""
    target = tmp_path / "table"
    world.grow(40)
    end = world.append(target, "parquet").end
    with idle(world.root):
        assert StoreFiles.open(world.root).readable_end < end
        again = world.append(target, "parquet")
        assert (again.begin, again.end, again.records) == (end, end, 0)
        assert world.append(target, "parquet", adopt=True).end == end
    assert world.append(target, "parquet").records == 0
    check(target, "parquet", world)


@every_format
def test_several_stores_in_one_table(tmp_path: Path, form: str) -> None:
    one, other = World(tmp_path / "one", "a=b/c"), World(tmp_path / "other", "d")
    target = tmp_path / "table"
    for world in (one, other, one, other):
        world.grow(20)
        assert world.append(target, form).records == 20
    check(target, form, one, other)


@every_format
def test_what_has_expired_stays(world: World, tmp_path: Path, form: str) -> None:
    target = tmp_path / "table"
    world.grow(150)
    end = world.append(target, form).end
    world.grow(150)
    files = sorted((world.root / "commitlog").iterdir())
    for path in files:
        if int(path.name) + path.stat().st_size < end:
            path.unlink()
    assert world.append(target, form).records == 150
    check(target, form, world)


@every_format
def test_a_gap_is_refused_unless_it_is_allowed(world: World, tmp_path: Path, form: str) -> None:
    target = tmp_path / "table"
    world.grow(50)
    end = world.append(target, form).end
    world.grow(200)
    files = sorted((world.root / "commitlog").iterdir())
    begin = int(files[-2].name)
    for path in files[:-2]:
        path.unlink()
    with pytest.raises(
        JobError, match=rf"the table has a up to physical offset {end}, but the store begins at {begin}"
    ):
        world.append(target, form)
    result = world.append(target, form, allow_gap=True)
    assert (result.begin, result.expired) == (begin, begin - end)
    found = keys(READERS[form](target))
    assert len(found) == len(set(found)) == 50 + result.records
    assert world.append(target, form).records == 0


@every_format
def test_another_store_behind_the_same_path_is_refused(world: World, tmp_path: Path, form: str) -> None:
    target = tmp_path / "table"
    world.grow(100)
    end = world.append(target, form).end
    for count, why in ((30, rf"the table has a up to {end}: it was cut"), (120, "it was exchanged, compacted")):
        other = World(tmp_path / f"other-{count}", "a")
        other.clock.advance(7)
        other.grow(count)
        with pytest.raises(JobError, match=why) as caught:
            other.append(target, form)
        assert "--store-name" in str(caught.value)
        assert "\n" not in str(caught.value)
    check(target, form, world)
    other.name, other.sent = "b", [("b", *key[1:]) for key in other.sent]
    other.append(target, form)
    check(target, form, world, other)


@every_format
def test_a_compacted_store_goes_on(world: World, tmp_path: Path, form: str) -> None:
    target = tmp_path / "table"
    broker = Broker(world.root, world.clock)
    for number in range(20):
        broker.schedule(2, b"later" * 200, str(number))
    broker.pass_time(60_000)
    broker.close()
    world.grow(50)
    before = world.append(target, form)
    assert compact(str(world.root), str(tmp_path / "new"), workers=1).kept < before.records
    world.root = tmp_path / "new"
    with pytest.raises(JobError, match="--adopt"):
        world.append(target, form)
    adopted = world.append(target, form, adopt=True)
    assert (adopted.records, adopted.files) == (0, 0)
    world.grow(40)
    assert world.append(target, form).records == 40
    found = keys(READERS[form](target))
    assert len(found) == len(set(found)) == before.records + 40
    with pytest.raises(JobError, match="has no store c for this one to continue"):
        world.append(target, form, name="c", adopt=True)


def failing_after(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make writes of files fail after a number of them."""
    write, left = Directory.write_table, [count]

    def fail(directory: Directory, name: str, table: pa.Table, **options: Any) -> int:
        if not left[0]:
            raise OSError(28, "No space left on device")
        left[0] -= 1
        return write(directory, name, table, **options)

    monkeypatch.setattr(Directory, "write_table", fail)


@every_format
@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_run_that_fails_leaves_nothing_that_counts(
    world: World, tmp_path: Path, form: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "table"
    world.grow(40)
    world.append(target, form)
    before = list(world.sent)
    for topic in ("x", "y", "z", "orders"):
        world.grow(20, topic)
    with monkeypatch.context() as patch:
        failing_after(count, patch)
        with pytest.raises(JobError, match="No space left"):
            world.append(target, form)
    if form == "parquet":
        files = committed_files(str(target))
        assert sum(pq.ParquetFile(path).metadata.num_rows for path in files) == len(before)
    else:
        assert keys(READERS[form](target)) == sorted(before)
    world.grow(10, "later")
    world.append(target, form)
    check(target, form, world)


@pytest.mark.parametrize(
    ("old", "new"), [(b"{", b""), (b'"version": 1', b'"version": 9'), (b'"version": 1', b'"version": "\xff"')]
)
def test_a_commit_that_cannot_be_read_is_an_error_for_its_readers(
    world: World, tmp_path: Path, old: bytes, new: bytes
) -> None:
    world.grow(3)
    world.append(tmp_path / "table", "parquet")
    (commit,) = (tmp_path / "table" / "_duemq").rglob("*.json")
    assert old in commit.read_bytes()
    commit.write_bytes(commit.read_bytes().replace(old, new))
    for read in (committed_files, lambda path: ParquetTable(path).known(())):
        with pytest.raises(JobError, match=r"000001\.json: "):
            read(str(tmp_path / "table"))


def commit_by(table: Table, commit: Callable[..., None]) -> None:
    """Make the runs of a table commit by a function, which is given the run's own `commit` and its arguments."""
    begin = table.begin

    @contextlib.contextmanager
    def begin_it(name_of: NameOf) -> Iterator[TableRun]:
        with begin(name_of) as run:
            run.commit = functools.partial(commit, run.commit)  # type: ignore[method-assign]
            yield run

    table.begin = begin_it  # type: ignore[method-assign]


def append_and_die(store: str, target: str, form: str, at: str) -> None:
    """Append, and be killed at that point."""
    table, write, left = open_table(target, form), Directory.write_table, [2]

    def die(*_: Any, **__: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)

    def some(*args: Any, **options: Any) -> int:
        left[0] -= 1
        return write(*args, **options) if left[0] else die()

    def commit_and_die(commit: Callable[..., None], *args: Any) -> None:
        commit(*args)
        die()

    if at == "file 2":
        Directory.write_table = some  # type: ignore[method-assign]
    elif at == "commit":
        commit_by(table, die)
    else:
        commit_by(table, commit_and_die)
    append(store, table, name="a", workers=1)


@pytest.mark.parametrize(
    ("form", "at"),
    sampled(
        [(form, at) for form in FORMATS for at in ("file 2", "commit", "after")],
        [("parquet", "file 2"), ("parquet", "commit"), ("parquet", "after"), ("iceberg", "commit"), ("delta", "after")],
    ),
)
def test_a_killed_run(world: World, tmp_path: Path, form: str, at: str) -> None:
    """A run killed with SIGKILL after some files, right before the commit, or right after it, leaves a table that the
    next run completes."""
    target = tmp_path / "table"
    world.grow(20)
    world.append(target, form)
    for topic in ("x", "y", "z"):
        world.grow(20, topic)
    assert exit_code(append_and_die, str(world.root), str(target), form, at) == -signal.SIGKILL
    world.grow(5, "x")
    assert world.append(target, form).records == (5 if at == "after" else 65)
    check(target, form, world)
    names = [path.name for path in target.rglob("*.tmp")]
    assert names == [] or form != "parquet"


@every_format
def test_two_runs_at_once(world: World, tmp_path: Path, form: str) -> None:
    """Of two runs at once of one store the first wins; of two stores both do."""
    target = tmp_path / "table"
    world.grow(20)
    world.append(target, form)
    world.grow(20)
    other = World(tmp_path / "other", "b")
    other.grow(20)
    late = open_table(str(target), form)

    def meanwhile() -> None:
        if form != "parquet":
            world.append(target, form)
        else:
            with pytest.raises(JobError, match="another run is appending a; wait for it"):
                world.append(target, form)
        other.append(target, form)

    def commit_late(commit: Callable[..., None], *args: Any) -> None:
        meanwhile()
        commit(*args)

    commit_by(late, commit_late)
    if form == "parquet":
        append(str(world.root), late, name="a", workers=1)
    else:
        with pytest.raises(JobError, match=r"nothing was appended|another run appended a meanwhile"):
            append(str(world.root), late, name="a", workers=1)
    check(target, form, world, other)


def test_a_run_opens_its_catalog_once(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pyiceberg.catalog.sql import SqlCatalog

    opened, open_it = [], SqlCatalog.__init__

    def counted(catalog: SqlCatalog, name: str, **options: str) -> None:
        opened.append(name)
        open_it(catalog, name, **options)

    world.grow(5)
    monkeypatch.setattr(SqlCatalog, "__init__", counted)
    for number in (1, 2):  # the first one makes the table
        assert append_as(str(world.root), tmp_path / "table", "iceberg").records == (5 if number == 1 else 0)
        assert len(opened) == number


def test_an_iceberg_commit_that_another_stores_overtakes(world: World, tmp_path: Path) -> None:
    target, other = tmp_path / "table", World(tmp_path / "other", "b")
    other.grow(10)
    other.append(target, "iceberg")
    world.grow(20)
    late = open_table(str(target), "iceberg")

    def commit_late(commit: Callable[..., None], *args: Any) -> None:
        other.grow(10)
        other.append(target, "iceberg")
        commit(*args)

    commit_by(late, commit_late)
    append(str(world.root), late, name="a", workers=1)
    check(target, "iceberg", world, other)


def test_what_the_tables_say_of_themselves(world: World, tmp_path: Path) -> None:
    import deltalake

    world.grow(20)
    for form in FORMATS:
        world.append(tmp_path / form, form)
    table = iceberg_table(tmp_path / "iceberg")
    assert [field.name for field in table.spec().fields] == ["day", "topic", "store"]
    assert table.current_snapshot().summary["duemq.records"] == "20"
    assert Mark(**json.loads(table.properties["duemq.a"])).end > 0
    assert table.scan(row_filter="topic = 'nothing'").to_arrow().num_rows == 0
    found = deltalake.DeltaTable(str(tmp_path / "delta"))
    assert found.metadata().partition_columns == ["day", "topic", "store"]
    (row,) = pa.table(found.get_add_actions(flatten=True)).to_pylist()
    assert (row["num_records"], row["partition.topic"], row["partition.store"]) == (20, "orders", "a")
    times = [row[f"{edge}.store_time"].timestamp() * 1000 for edge in ("min", "max")]
    assert times == [START_MS, START_MS + 19]
    assert found.history(1)[0]["duemq"]


@every_format
def test_what_is_no_such_table_is_refused(world: World, tmp_path: Path, form: str) -> None:
    world.grow(5)
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign/notes.txt").write_text("mine")
    with pytest.raises(JobError, match="foreign: has files, but is not"):
        world.append(tmp_path / "foreign", form)
    assert [path.name for path in (tmp_path / "foreign").iterdir()] == ["notes.txt"]


@every_format
def test_a_table_in_the_store_is_refused_before_anything_is_made(world: World, tmp_path: Path, form: str) -> None:
    """A refused run left the directory of the table, with its lock, in the store."""
    world.grow(5)
    before = sorted(world.root.rglob("*"))
    with pytest.raises(JobError, match="table: lies in the store that is read"):
        world.append(world.root / "table", form)
    assert sorted(world.root.rglob("*")) == before


@pytest.mark.parametrize(("form", "library"), [("iceberg", "pyiceberg"), ("delta", "deltalake")])
def test_a_library_that_is_missing(
    world: World, tmp_path: Path, form: str, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == library] + [library]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(JobError, match=rf"need the package {library}: pip install 'duemq\[{form}\]'"):
        world.append(tmp_path / "table", form)


@pytest.mark.parametrize("is_done", [True, False])
def test_a_catalog_that_does_not_answer(
    world: World, tmp_path: Path, is_done: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a catalog that does not answer, before or after it has done its work, the next run knows the state."""
    from pyiceberg.catalog.sql import SqlCatalog

    world.grow(10)
    world.append(tmp_path / "table", "iceberg")
    world.grow(10)
    commit = SqlCatalog.commit_table

    def break_off(*args: Any, **options: Any) -> None:
        if is_done:
            commit(*args, **options)
        raise ConnectionError("gone")

    with monkeypatch.context() as patch:
        patch.setattr(SqlCatalog, "commit_table", break_off)
        told = "did not say whether the rows are in the table" if is_done else "nothing was appended"
        with pytest.raises(JobError, match=f"{told}: gone; run it again"):
            world.append(tmp_path / "table", "iceberg")
    assert len(list(tmp_path.glob("table/**/*.parquet"))) == (2 if is_done else 1)
    assert world.append(tmp_path / "table", "iceberg").records == (0 if is_done else 10)
    check(tmp_path / "table", "iceberg", world)


def test_a_deltalake_that_forgets_transactions(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A deltalake that forgets transactions, as before 1.6, is refused: the next run would append all rows again."""
    import deltalake

    monkeypatch.setattr(deltalake, "__version__", "1.5.2")
    with pytest.raises(JobError, match=r"^Delta tables need deltalake 1\.6 or newer, and this is 1\.5\.2: pip install"):
        open_table(str(tmp_path), "delta")
    monkeypatch.undo()
    world.grow(5)
    commit = deltalake.CommitProperties
    monkeypatch.setattr(deltalake, "CommitProperties", lambda app_transactions, **others: commit(**others))
    with pytest.raises(JobError, match="has the rows of version 1, but lacks its transaction ids"):
        world.append(tmp_path / "table", "delta")


def test_a_file_that_is_missing_is_told_once_as_damage(world: World, tmp_path: Path) -> None:
    while len(files := sorted((world.root / "commitlog").iterdir())) < 4:
        world.grow(20)
    files[1].unlink()
    assert world.append(tmp_path / "table", "parquet").damages == 1
    assert world.append(tmp_path / "table", "parquet").damages == 0


def test_damage_is_told_and_passed_over(world: World, tmp_path: Path) -> None:
    world.grow(20)
    path = sorted((world.root / "commitlog").iterdir())[0]
    data = bytearray(path.read_bytes())
    second = int.from_bytes(data[:4], "big")
    data[second : second + 40] = b"\xee" * 40
    path.write_bytes(data)
    result = world.append(tmp_path / "table", "parquet")
    assert (result.records, result.damages) == (19, 1)
    assert world.append(tmp_path / "table", "parquet").records == 0


@every_format
def test_names_too_long_for_directories(
    world: World, tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names of topics or of a store may be too long for directories, also in a run that follows a killed one."""
    world.name = "/é" * 90
    for topic in ("%" * 100, "%" * 101):
        world.grow(3, topic)
    world.append(tmp_path / "table", form)
    world.grow(4, "%" * 101)
    with monkeypatch.context() as patch:
        failing_after(0, patch)
        with pytest.raises(JobError, match="No space left"):
            world.append(tmp_path / "table", form)
    assert world.append(tmp_path / "table", form).records == 4
    assert world.append(tmp_path / "table", form).records == 0
    table = READERS[form](tmp_path / "table")
    if form != "parquet":
        check(tmp_path / "table", form, world)
        return
    (name,) = set(table["store"].to_pylist())
    assert name.startswith("/é/é/é")
    assert len(table) == 10
    (commit, *_) = sorted((tmp_path / "table/_duemq").glob("*/*.json"))
    assert json.loads(commit.read_text())["store"] == world.name


@every_format
def test_any_time_is_appended(world: World, tmp_path: Path, form: str) -> None:
    world.grow(30)
    with_odd_times(world.root)
    world.append(tmp_path / "table", form)
    world.grow(5)
    assert world.append(tmp_path / "table", form).records == 5
    table = check(tmp_path / "table", form, world).sort_by("physical_offset")
    none = [not 0 <= -ms <= 1 for ms in ODD_MS]
    assert [value is None for value in table["born_time"].to_pylist()] == none + [False] * 26
    assert [value is None for value in table["store_time"].to_pylist()] == [False] * 9 + none + [False] * 17
    assert [value is None for value in table["day"].to_pylist()] == [False] * 9 + none + [False] * 17
    table.to_pandas()


def append_as(path: str, target: Path, form: str, name: str | None = None) -> AppendResult:
    return append(path, open_table(str(target), form), name=name, workers=1, range_size=RANGE)


@every_format
def test_a_store_is_one_by_whatever_path(
    world: World, tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.name, target = str(world.root), tmp_path / "table"
    (tmp_path / "link").symlink_to("store")
    other = World(tmp_path / "else/store", "")
    other.name = str(other.root)
    monkeypatch.chdir(tmp_path)
    for path in (
        "store",
        "store/",
        "./store",
        str(world.root),
        f"{tmp_path}/else/../store//",
        "link",
        "file://" + world.name,
    ):
        world.grow(3)
        result = append_as(path, target, form)
        assert (result.name, result.records) == (world.name, 3)
    monkeypatch.chdir(tmp_path / "else")
    other.grow(5)
    assert append_as("store", target, form).name == other.name
    check(target, form, world, other)


PATHS = ("store", "store/", "./store/", "{}/", "{}/../link", "../store", "x/../store")
OTHERS_PATHS = ("store/", "../store")
"""Of tables of other formats than Parquet: the name is found by the same code, the same in its presence and absence."""


@pytest.mark.parametrize(
    ("form", "old"),
    [
        pytest.param(form, old, marks=() if form == "parquet" or old in OTHERS_PATHS else pytest.mark.soak)
        for form in FORMATS
        for old in PATHS
    ],
)
def test_a_table_of_before_goes_on(
    world: World, tmp_path: Path, form: str, old: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A table of an earlier version goes on: earlier versions named a store as its path was given; the store keeps the
    name that is found in the table."""
    (tmp_path / "link").symlink_to("store")
    (tmp_path / "x").mkdir()
    target, world.name = tmp_path / "table", old.format(world.root)
    other = World(tmp_path / "other/store", "")
    other.name = str(other.root)
    world.grow(20)
    append_as(str(world.root), target, form, world.name)
    monkeypatch.chdir(tmp_path / "x")
    for path in (str(world.root), "../store/"):
        world.grow(3)
        result = append_as(path, target, form)
        assert (result.name, result.records) == (world.name, 3)
    other.grow(20)
    assert append_as("../other/store", target, form).name == other.name, "another one whose path ends the same"
    check(target, form, world, other)


@every_format
def test_of_a_store_that_was_appended_by_several_paths_the_furthest_goes_on(
    world: World, tmp_path: Path, form: str
) -> None:
    target, world.name = tmp_path / "table", f"{world.root}/"
    world.grow(5)
    append_as(str(world.root), target, form, "store")
    before, world.sent = [("store", *key[1:]) for key in world.sent], []
    world.grow(5)
    world.sent = [(world.name, *key[1:]) for key in before] + world.sent
    assert append_as(str(world.root), target, form, world.name).records == 10
    world.grow(2)
    result = append_as(str(world.root), target, form)
    assert (result.name, result.records) == (world.name, 2)
    world.sent += before
    check(target, form, world)


@every_format
def test_a_store_of_a_table_of_before_that_was_exchanged(
    world: World, tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replaced store is refused, as before, when a table of an earlier version names it by its path."""
    monkeypatch.chdir(tmp_path)
    world.grow(30)
    append_as("store", tmp_path / "table", form, "store")
    shutil.rmtree(world.root)
    World(world.root, "a").grow(40, size=1000)
    with pytest.raises(JobError, match="exchanged"):
        append_as("store", tmp_path / "table", form)


def test_a_new_store_has_nothing_yet(world: World, tmp_path: Path) -> None:
    for form in FORMATS:
        result = world.append(tmp_path / form, form)
        assert (result.records, result.files) == (0, 0)
    world.grow(3)
    for form in FORMATS:
        world.append(tmp_path / form, form)
        check(tmp_path / form, form, world)


def test_a_catalog_of_ones_own(world: World, tmp_path: Path) -> None:
    """A catalog of the user's own is used as pyiceberg is configured for it, here by variables that it reads on
    import."""
    world.grow(30)
    code = (
        "import sys\n"
        "from duemq.spark_jobs.archive.append import append, open_table\n"
        "from pyiceberg.catalog import load_catalog\n"
        "for _ in range(2):\n"
        "    done = append(sys.argv[1], open_table('logs.messages', 'iceberg', catalog='ours'), name='a', workers=1)\n"
        "    print(done.records, load_catalog('ours').load_table('logs.messages').scan().to_arrow().num_rows)\n"
        "try:\n"
        "    append(sys.argv[1], open_table('logs.messages', 'iceberg', catalog='theirs'), workers=1)\n"
        "except Exception as error:\n"
        "    print(type(error).__name__, str(error).partition(':')[0])\n"
    )
    own = {
        "PYICEBERG_CATALOG__OURS__TYPE": "sql",
        "PYICEBERG_CATALOG__OURS__URI": f"sqlite:///{tmp_path}/ours.db",
        "PYICEBERG_CATALOG__OURS__WAREHOUSE": f"file://{tmp_path}/warehouse",
    }
    run = subprocess.run(
        [sys.executable, "-c", code, str(world.root)],
        env={**os.environ, **own}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.stdout.splitlines() == ["30 30", "0 30", "JobError the catalog theirs"], run.stderr


def test_what_delta_is_told_of_s3() -> None:
    uri = "s3://a%2Bb:c%2Fd@bucket/t?endpoint_override=host:9000&scheme=http&region=eu-west-1"
    assert _options(uri) == {
        "AWS_ACCESS_KEY_ID": "a+b",
        "AWS_SECRET_ACCESS_KEY": "c/d",
        "AWS_REGION": "eu-west-1",
        "AWS_ENDPOINT_URL": "http://host:9000",
        "AWS_ALLOW_HTTP": "true",
    }
    assert _options("s3://bucket/t") == {}, "the library finds keys where AWS's own tools do"
    assert _options("/bucket/t") is None


@examples(1 / 6)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 40), st.none() | st.integers(0, 2)), max_size=6))
def test_any_order_of_nights(
    tmp_path_factory: pytest.TempPathFactory, nights: list[tuple[int, int, int | None]]
) -> None:
    """In any order of nights, with some messages of some topics each and some nights that fail, the table has each
    record once."""
    root = tmp_path_factory.mktemp("nights")
    world, target = World(root / "store", "a"), root / "table"
    for topic, count, fails_after in nights:
        world.grow(count, f"t{topic}", days=1)
        with pytest.MonkeyPatch.context() as patch:
            if fails_after is not None:
                failing_after(fails_after, patch)
            try:
                world.append(target, "parquet")
            except JobError:
                assert fails_after is not None
    world.append(target, "parquet")
    assert Counter(keys(parquet(target)) if world.sent else []) == Counter(world.sent)
    shutil.rmtree(root)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int | None], Path]]:
    """A small disk; the test sets its free space, in pages beyond the used ones; None for plenty."""
    disk = tmp_path / "disk"
    disk.mkdir()

    def mount(*words: str) -> bool:
        return subprocess.run(["mount", *words, str(disk)], check=False, capture_output=True).returncode == 0

    def set_room(pages: int | None) -> Path:
        used = os.statvfs(disk)
        size = "64m" if pages is None else f"{max(1, used.f_blocks - used.f_bfree + pages) * used.f_frsize}"
        assert mount("-o", f"remount,size={size}")
        return disk

    if shutil.which("mount") is None or not mount("-t", "tmpfs", "-o", "size=64m", "none"):
        pytest.skip("file systems cannot be mounted here")
    try:
        yield set_room
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


ROOMS = (0, 2, 5, 9, 13, 18, 24, 31, None)
"""Pages that are free."""


@every_format
@pytest.mark.parametrize(
    ("is_new", "rooms"),
    [
        pytest.param(True, ROOMS[::2], id="new"),
        pytest.param(False, (*ROOMS[1::2], None), id="old"),
        pytest.param(True, ROOMS[1::2], id="new, others", marks=pytest.mark.soak),
        pytest.param(False, ROOMS[::2], id="old, others", marks=pytest.mark.soak),
    ],
)
def test_a_disk_that_is_full(
    world: World,
    tmp_path: Path,
    form: str,
    small_disk: Callable[[int | None], Path],
    rooms: tuple[int | None, ...],
    *,
    is_new: bool,
) -> None:
    """A full disk at any write gives one line, leaves nothing that takes room, and the next run appends the missing
    records."""
    target, told = small_disk(None) / "table", set[str]()
    world.grow(5)
    for pages in rooms:
        before: list[Key] = []
        if target.exists():
            shutil.rmtree(target)
        if not is_new:
            world.append(target, form)
            before = list(world.sent)
        world.grow(5, "x", size=400)
        world.grow(5, "y", days=1)
        small_disk(pages)
        why = ""
        try:
            world.append(target, form)
        except JobError as error:
            why = str(error)
        if why:
            assert why.startswith(str(target))
            assert "\n" not in why
            told.add(why.partition("; ")[0].rpartition(": ")[2])
            assert pages is not None
            if not is_new:
                assert keys(READERS[form](target)) == sorted(before)
            else:
                assert list(target.rglob("*.parquet")) == []
        small_disk(None)
        world.append(target, form)
        check(target, form, world)
    assert told - {"(sqlite3.OperationalError) database or disk is full"} == {"No space left on device"}


def append_at_once(begin: Barrier, store: str, target: str, form: str, name: str, told: str) -> None:
    """Append as soon as all are ready; write down why it was refused."""
    table = open_table(target, form)
    begin.wait()
    with open(told, "w") as file:
        try:
            append(store, table, name=name, workers=1)
        except JobError as error:
            print(error, file=file)


@every_format
@pytest.mark.parametrize("names", ["aa", pytest.param("ab", marks=pytest.mark.soak)])
def test_two_runs_that_begin_a_table(tmp_path: Path, form: str, names: str) -> None:
    """Of two runs that begin a table at the same time, one makes it. Two stores are both in it; one store is in it
    once, by the first run or the other."""
    worlds = {name: World(tmp_path / name, name) for name in names}
    for world in worlds.values():
        world.grow(5)
    for attempt in range(2):
        target = tmp_path / f"table-{attempt}"
        told = [tmp_path / f"told-{attempt}-{number}" for number in range(len(names))]
        begin = forked.barrier(len(names))
        runs = [
            forked.start(append_at_once, begin, str(worlds[name].root), str(target), form, name, str(path))
            for name, path in zip(names, told, strict=True)
        ]
        for run in runs:
            run.join()
        assert [run.exitcode for run in runs] == [0, 0]
        refused = "".join(path.read_text() for path in told)
        assert refused.count("\n") <= (names == "aa")
        assert not refused or any(f"another run {does}" in refused for does in ("appended", "is appending")), refused
        check(target, form, *worlds.values())
