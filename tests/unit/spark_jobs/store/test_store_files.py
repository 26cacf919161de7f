"""The content of a directory, and the errors for one that is not a store."""

from __future__ import annotations

import os
import pickle
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
from pyarrow import fs

from duemq.spark_jobs.errors import CannotRead, JobError, NoStore
from duemq.spark_jobs.store.local_files import shown
from duemq.spark_jobs.store.progress import read_progress
from duemq.spark_jobs.store.ranges import begin_ms_of, plan
from duemq.spark_jobs.store.store_files import StoreFiles
from tests.support.copies import copy_tree
from tests.unit.spark_jobs.compact_world import SEGMENT, Broker, as_apache, new_broker


def made(root: Path, messages: int = 300, *, close: bool = True) -> Broker:
    """A store of several files."""
    broker = new_broker(root)
    for number in range(messages):
        broker.send("orders", b"x" * 500, f"KEYS\x01{number}", number % 4)
    broker.schedule(4, b"later")
    broker.run()
    if close:
        broker.close()
    return broker


def told(path: Path) -> str:
    with pytest.raises(NoStore) as caught:
        StoreFiles.open(path)
    text = str(caught.value)
    assert text.startswith(str(path))
    assert "\n" not in text
    assert pickle.loads(pickle.dumps(caught.value)).why == caught.value.why
    return caught.value.why


def test_what_is_no_store_is_told_in_one_line(tmp_path: Path) -> None:
    assert "no such directory" in told(tmp_path / "nowhere")
    (tmp_path / "a file").write_bytes(b"x")
    assert "no such directory" in told(tmp_path / "a file")
    (tmp_path / "empty").mkdir()
    assert told(tmp_path / "empty") == "is empty: no broker wrote here"
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "notes.txt").write_text("hello")
    assert told(tmp_path / "foreign") == "has no commitlog/, so it is not a duemq or RocketMQ store"
    (tmp_path / "bare" / "commitlog").mkdir(parents=True)
    (tmp_path / "bare" / "commitlog" / f"{0:020d}").write_bytes(b"PK\3\4" * 1000)
    assert "this is not a RocketMQ commitlog" in told(tmp_path / "bare")


def test_a_level_too_high_or_too_low_is_told(tmp_path: Path) -> None:
    made(tmp_path / "broker" / "store")
    assert f"did you mean {tmp_path}/broker/store?" in told(tmp_path / "broker")
    assert told(tmp_path / "broker" / "store" / "commitlog") == "holds commitlog files; give the directory above it"


def test_what_cannot_be_read_is_told(tmp_path: Path) -> None:
    made(tmp_path / "store")
    path = tmp_path / "store" / "commitlog" / f"{0:020d}"
    path.unlink()
    path.symlink_to(path)
    with pytest.raises(CannotRead, match="is a link that leads back to itself"):
        StoreFiles.open(tmp_path / "store")


def vanishing(monkeypatch: pytest.MonkeyPatch, gone: Path) -> list[Path]:
    """Remove a file right after its directory was listed, as a running broker may; return the removed files."""
    scandir, removed = os.scandir, []

    def listed_and_removed(path: str) -> Any:
        entries = scandir(path)
        if Path(path) == gone.parent and gone.exists():
            found = list(entries)
            gone.unlink()
            removed.append(gone)
            return nullcontext(found)
        return entries

    monkeypatch.setattr(os, "scandir", listed_and_removed)
    return removed


def test_a_file_that_goes_while_its_directory_is_listed_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(tmp_path)
    (tmp_path / "abort").touch()
    removed = vanishing(monkeypatch, tmp_path / "abort")
    assert StoreFiles.open(tmp_path).is_clean
    assert removed


def test_a_commitlog_file_that_expires_while_the_store_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(tmp_path)
    first = tmp_path / "commitlog" / f"{0:020d}"
    read = StoreFiles.read

    def read_too_late(store: StoreFiles, path: str, at: int, size: int) -> bytes:
        first.unlink(missing_ok=True)
        return read(store, path, at, size)

    monkeypatch.setattr(StoreFiles, "read", read_too_late)
    assert StoreFiles.open(tmp_path).segments[0].first_offset == SEGMENT


def test_a_link_that_leads_nowhere_is_told(tmp_path: Path) -> None:
    made(tmp_path)
    link = tmp_path / "commitlog" / f"{0:020d}"
    link.unlink()
    link.symlink_to(tmp_path / "not mounted")
    with pytest.raises(JobError, match=r"0{20}: is a link to .*, which does not exist"):
        StoreFiles.open(tmp_path)


def test_the_files_of_a_store(tmp_path: Path) -> None:
    broker = made(tmp_path)
    store = StoreFiles.open(tmp_path)
    assert [segment.first_offset for segment in store.segments] == list(range(0, broker.store.log.end, SEGMENT))
    assert store.segment_size == SEGMENT
    assert broker.store.log.end <= store.readable_end
    assert store.records_end() == broker.store.log.end
    assert (store.written_by, store.is_clean, store.is_running) == ("duemq", True, False)
    assert store.gaps() == []
    for offset in (0, SEGMENT - 1, SEGMENT, 2 * SEGMENT):
        segment = store.segment_of(offset)
        assert segment is not None
        assert segment.first_offset == offset // SEGMENT * SEGMENT
    assert store.segment_of(10 * SEGMENT) is None
    assert {(file.topic, file.queue_id) for file in store.queue_files()} >= {("orders", 0), ("orders", 3)}
    queue = broker.store.queue("orders", 3)
    assert queue is not None
    units = [
        u for file in store.queue_files() if (file.topic, file.queue_id) == ("orders", 3) for u in store.units(file)
    ]
    assert [tuple(unit) for unit in units] == [queue.unit(number) for number in range(queue.next_offset)]
    assert store.unit("orders", 3, 60) == (queue.unit(60) or ())[:2]
    assert store.unit("orders", 3, queue.next_offset) is None
    assert store.unit("nobody", 0, 0) is None
    again = pickle.loads(pickle.dumps(store))
    assert again.read(again.segments[0].path, 4, 4) == store.read(store.segments[0].path, 4, 4)


@pytest.mark.parametrize("topic", ["", ".", "..", "a\0b", "\0", "../consumequeue/orders", "t" * 300, "\ufffd"])
def test_a_damaged_record_may_say_any_topic(tmp_path: Path, topic: str) -> None:
    made(tmp_path)
    (tmp_path / "consumequeue/0").mkdir()
    shutil.copy(tmp_path / "consumequeue/orders/0/00000000000000000000", tmp_path / "consumequeue/0")
    copy_tree(tmp_path / "consumequeue/0", tmp_path / "0")
    store = StoreFiles.open(tmp_path)
    assert store.unit("orders", 0, 0) is not None
    assert store.unit(topic, 0, 0) is None
    assert not store.units_at(topic, 0, 0, 3)["size"].any()


def test_who_wrote_it_last(tmp_path: Path) -> None:
    made(tmp_path)
    as_apache(tmp_path)
    assert StoreFiles.open(tmp_path).written_by == "rocketmq"


def test_a_store_that_was_killed(tmp_path: Path) -> None:
    broker = made(tmp_path, close=False)
    store = StoreFiles.open(tmp_path)
    assert not store.is_clean
    assert store.queues_whole_to() < broker.store.log.end
    assert store.records_end() == broker.store.log.end
    broker.close()
    assert StoreFiles.open(tmp_path).queues_whole_to() >= broker.store.log.end


def test_a_missing_file_in_the_middle(tmp_path: Path) -> None:
    made(tmp_path)
    (tmp_path / "commitlog" / f"{SEGMENT:020d}").unlink()
    store = StoreFiles.open(tmp_path)
    assert store.gaps() == [(SEGMENT, SEGMENT, "a file is missing")]
    assert store.segment_of(SEGMENT + 5) is None


def test_files_made_ahead_of_need_are_left_out(tmp_path: Path) -> None:
    """Files made ahead of need are left out: RocketMQ makes the next one, or two, before it needs them, and a kill
    leaves them, sparse or of zeros."""
    broker = made(tmp_path)
    before = StoreFiles.open(tmp_path)
    base = before.segments[-1].end
    (tmp_path / "commitlog" / f"{base:020d}").write_bytes(bytes(SEGMENT))
    with (tmp_path / "commitlog" / f"{base + SEGMENT:020d}").open("wb") as file:
        file.truncate(SEGMENT)
    (tmp_path / "commitlog" / f"{base + 2 * SEGMENT:020d}").write_bytes(b"")
    (tmp_path / "commitlog" / "README").write_text("not ours")
    store = StoreFiles.open(tmp_path)
    assert store.segments == before.segments
    assert store.records_end() == broker.store.log.end


@pytest.mark.parametrize("zeros", [100, SEGMENT // 2])
def test_a_last_file_whose_first_records_are_zeros_is_read_to_its_end(tmp_path: Path, zeros: int) -> None:
    """A last file whose first records are zeros is read to its end."""
    made(tmp_path)
    end = StoreFiles.open(tmp_path).readable_end
    last = max((tmp_path / "commitlog").iterdir())
    with last.open("r+b") as file:
        file.write(bytes(zeros))
    (tmp_path / "commitlog" / f"{int(last.name) + SEGMENT:020d}").write_bytes(bytes(SEGMENT))
    store = StoreFiles.open(tmp_path)
    assert store.segments[-1].first_offset == int(last.name)
    assert store.readable_end == end


def test_a_store_of_only_an_empty_file(tmp_path: Path) -> None:
    (tmp_path / "commitlog").mkdir()
    (tmp_path / "commitlog" / f"{0:020d}").write_bytes(bytes(SEGMENT))
    store = StoreFiles.open(tmp_path)
    assert store.records_end() == 0
    assert read_progress(store).levels == {}


def test_a_store_without_a_file(tmp_path: Path) -> None:
    """A store without a commitlog file is empty: RocketMQ's broker makes the first one for the first message, and no
    job may fail before that."""
    (tmp_path / "commitlog").mkdir()
    for _ in range(2):
        store = StoreFiles.open(tmp_path)
        assert (store.records_end(), store.readable_end, store.is_clean) == (0, 0, True)
        assert list(plan(store)) == []
        (tmp_path / "commitlog" / f"{0:020d}").write_bytes(b"")


@pytest.mark.parametrize("kept", ["consumequeue", "checkpoint"])
def test_a_store_whose_files_are_gone_is_no_new_one(tmp_path: Path, kept: str) -> None:
    made(tmp_path)
    for entry in list(tmp_path.iterdir()):
        if entry.name != kept:
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    (tmp_path / "commitlog").mkdir()
    assert told(tmp_path) == "its commitlog/ has no files, but messages were stored: its files are gone"


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Another process that holds the lock of a store, as Java's FileLock and duemq's broker do."""
    code = (
        "import fcntl, sys; file = open(sys.argv[1], 'r+b'); fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1);"
        "print('locked', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == b"locked\n"
        yield
        process.stdin.close()


@contextmanager
def idle(root: Path) -> Iterator[None]:
    """A broker of RocketMQ's that was started on a store and has been idle: its checkpoint has the time of the last
    record, and whether the records of that time are flushed is unknown."""
    last_ms = int(next(StoreFiles.open(root).chunks(0, StoreFiles.open(root).readable_end)).store_ms[-1])
    (root / "checkpoint").write_bytes(struct.pack(">qqq", last_ms, last_ms, last_ms).ljust(4096, b"\0"))
    (root / "lock").write_bytes(b"")
    (root / "abort").touch()
    with locked(root / "lock"):
        yield
    (root / "abort").unlink()


def test_of_a_running_broker_only_what_is_flushed_is_read(tmp_path: Path) -> None:
    broker = made(tmp_path)
    end = broker.store.log.end
    again = Broker(tmp_path, broker.clock)
    recovered = again.store.log.end
    assert recovered == end
    broker.clock.advance(60_000)
    for _ in range(50):
        again.send("orders", b"y" * 500)
    # The lock is this process's, so that another one has to look.
    code = (
        "import sys; from duemq.spark_jobs.store.store_files import StoreFiles;"
        "a, b = (StoreFiles.open(sys.argv[1], unflushed=flag) for flag in (False, True));"
        "print(a.is_running, a.readable_end, b.readable_end)"
    )
    told = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert told.stdout.split() == ["True", str(end), str(again.store.log.end)]
    assert again.store.log.end > end
    again.close()
    assert not StoreFiles.open(tmp_path).is_running


def test_looking_for_a_lock_takes_none(tmp_path: Path) -> None:
    made(tmp_path)
    with locked(tmp_path / "lock"):
        assert StoreFiles.open(tmp_path).is_running
    assert not StoreFiles.open(tmp_path).is_running
    (tmp_path / "lock").unlink()
    assert not StoreFiles.open(tmp_path).is_running


@pytest.mark.parametrize("text", [b"", b"   ", b"[1]", b"{broken", None])
def test_a_table_that_is_broken_has_a_backup(tmp_path: Path, text: bytes | None) -> None:
    made(tmp_path)
    config = tmp_path / "config"
    (config / "consumerOffset.json.bak").write_bytes(b'{"offsetTable":{"t@g":{0:5}}}')
    if text is not None:
        (config / "consumerOffset.json").write_bytes(text)
    assert StoreFiles.open(tmp_path).json("config/consumerOffset.json") == {"offsetTable": {"t@g": {"0": 5}}}
    (config / "consumerOffset.json.bak").unlink()
    if text is None or not text.strip():
        assert StoreFiles.open(tmp_path).json("config/consumerOffset.json") is None
    else:
        with pytest.raises(CannotRead, match=r"config/consumerOffset\.json: .*; restore an intact copy, or move it"):
            StoreFiles.open(tmp_path).json("config/consumerOffset.json")


class Hadoop(fs.FileSystemHandler):  # type: ignore[misc]  # pyarrow has no types
    """A directory behind an interface that answers as pyarrow's HadoopFileSystem does, also if its name node does not
    answer (as seen with a real one): then nothing exists, and optional files are missing."""

    def __init__(self) -> None:
        self.files = fs.LocalFileSystem()
        self.is_down = False

    def get_type_name(self) -> str:
        return "hdfs"

    def get_file_info(self, paths: list[str]) -> list[fs.FileInfo]:
        if self.is_down:
            return [fs.FileInfo(path, fs.FileType.NotFound) for path in paths]
        return list(self.files.get_file_info(paths))

    def get_file_info_selector(self, selector: fs.FileSelector) -> list[fs.FileInfo]:
        if not self.is_down:
            return list(self.files.get_file_info(selector))
        if selector.allow_not_found:
            return []
        raise OSError(255, "HDFS list directory failed")

    def open_input_file(self, path: str) -> object:
        if self.is_down:
            raise OSError(255, f"Opening HDFS file '{path}' failed")
        return self.files.open_input_file(path)


for name in fs.FileSystemHandler.__abstractmethods__ - set(vars(Hadoop)):
    setattr(Hadoop, name, lambda *_: pytest.fail("not to be called"))
Hadoop.__abstractmethods__ = frozenset()


@pytest.fixture
def hadoop(monkeypatch: pytest.MonkeyPatch) -> Hadoop:
    handler = Hadoop()

    def from_uri(uri: str) -> tuple[fs.FileSystem, str]:
        return fs.PyFileSystem(handler), uri.removeprefix("hdfs://name-node")

    monkeypatch.setattr("duemq.spark_jobs.store.hadoop.complete", lambda _: None)
    monkeypatch.setattr("pyarrow.fs.FileSystem", type("FileSystem", (), {"from_uri": staticmethod(from_uri)}))
    return handler


def test_a_file_system_that_does_not_answer_is_not_an_empty_one(tmp_path: Path, hadoop: Hadoop) -> None:
    made(tmp_path / "store")
    (tmp_path / "store/consumequeue/a file").write_bytes(b"x")
    here, there = StoreFiles.open(tmp_path / "store"), StoreFiles.open(f"hdfs://name-node{tmp_path}/store")
    assert there.segments == here.segments
    assert there.queue_files() == here.queue_files() != []
    assert there.sizes("nothing") == []
    hadoop.is_down = True
    with pytest.raises(OSError, match="list directory failed"):
        there.queue_files()
    with pytest.raises(OSError, match="list directory failed"):
        there.sizes("nothing")
    with pytest.raises(JobError, match=r"cannot be read: .*list directory failed"):
        StoreFiles.open(f"hdfs://name-node{tmp_path}/store")


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("/a/b@c?d", "/a/b@c?d"),
        ("file:///a?b", "file:///a?b"),
        ("s3://key:secret@bucket/a@b?region=x&scheme=http", "s3://bucket/a@b"),
        ("s3://bucket/a@b", "s3://bucket/a@b"),
        ("hdfs://name-node:8020/a", "hdfs://name-node:8020/a"),
        ("hdfs:///a", "hdfs:///a"),
    ],
)
def test_keys_in_uris_are_not_told(given: str, told: str) -> None:
    assert shown(given) == told


def test_what_hadoop_needs_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("duemq.spark_jobs.store.hadoop.complete", lambda _: None)
    for name in ("ARROW_LIBHDFS_DIR", "HADOOP_HOME", "CLASSPATH"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(JobError) as caught:
        StoreFiles.open("hdfs://127.0.0.1:1/store")
    assert "pyarrow needs Hadoop's client: JAVA_HOME, HADOOP_HOME" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kept", [0, 1000, SEGMENT - 8])
@pytest.mark.parametrize("number", [0, 1, -1])
def test_a_file_that_was_cut_is_a_gap(tmp_path: Path, number: int, kept: int) -> None:
    """A truncated file is a gap: retention removes files, and leaves none of them empty or short."""
    broker = made(tmp_path)
    files = sorted((tmp_path / "commitlog").iterdir())
    (path := files[number]).open("r+b").truncate(kept)
    store = StoreFiles.open(tmp_path)
    first, end = int(path.name), broker.store.log.end if number == -1 else int(files[number + 1].name)
    if number == -1 and kept > end - first:
        assert store.gaps() == []  # the file's end was never written
        return
    assert store.gaps() == [(first + kept, end - first - kept, f"the file was cut to {kept} bytes")]
    assert store.segment_size == SEGMENT
    assert store.segments[0].first_offset == 0
    assert [part.start for part in plan(store)] == [int(file.name) for file in files if kept or file != path]
    if kept == 0:
        assert store.segment_of(first) is None


def test_the_only_file_that_was_cut_is_a_gap(tmp_path: Path) -> None:
    broker = made(tmp_path, 20)
    assert StoreFiles.open(tmp_path).gaps() == []
    (tmp_path / "commitlog" / f"{0:020d}").open("r+b").truncate(1000)
    assert StoreFiles.open(tmp_path).gaps() == [(1000, broker.store.log.end - 1000, "the file was cut to 1000 bytes")]


def test_a_file_that_a_kill_left_empty_is_no_gap(tmp_path: Path) -> None:
    made(tmp_path)
    end = StoreFiles.open(tmp_path).segments[-1].end
    (tmp_path / "commitlog" / f"{end:020d}").touch()
    assert StoreFiles.open(tmp_path).gaps() == []
    as_apache(tmp_path)
    assert StoreFiles.open(tmp_path).gaps() == []


def test_an_emptied_last_file_of_which_only_the_checkpoint_knows_is_a_gap(tmp_path: Path) -> None:
    """An emptied last file that only the checkpoint knows of is a gap: RocketMQ's checkpoint has the time of the last
    flushed record."""
    broker = made(tmp_path, close=False)
    for _ in range(150):
        broker.clock.advance(1000)
        broker.send("orders", b"y" * 500)
    broker.close()
    last = max((tmp_path / "commitlog").iterdir())
    begin = int(last.name)
    for store_ms, gaps in (
        (broker.clock.now_ms(), [(begin, SEGMENT, "the file was cut to 0 bytes")]),
        (int(next(StoreFiles.open(tmp_path).chunks(begin - SEGMENT, begin)).store_ms[-1]), []),
    ):
        as_apache(tmp_path)
        shutil.rmtree(tmp_path / "consumequeue", ignore_errors=True)
        (tmp_path / "checkpoint").write_bytes(struct.pack(">qqq", store_ms, store_ms, store_ms).ljust(4096, b"\0"))
        last.write_bytes(b"")
        assert StoreFiles.open(tmp_path).gaps() == gaps


def test_an_emptied_file_before_one_that_was_made_ahead_is_a_gap(tmp_path: Path) -> None:
    broker = made(tmp_path)
    last = max((tmp_path / "commitlog").iterdir())
    last.write_bytes(b"")
    (tmp_path / "commitlog" / f"{int(last.name) + SEGMENT:020d}").write_bytes(bytes(SEGMENT))
    as_apache(tmp_path)
    store = StoreFiles.open(tmp_path)
    assert store.segments[-1].end == int(last.name)
    assert store.gaps() == [
        (int(last.name), broker.store.log.end - int(last.name), "the file was cut to 0 bytes"),
    ]


def test_a_store_whose_files_were_all_emptied_is_no_new_one(tmp_path: Path) -> None:
    made(tmp_path)
    for path in (tmp_path / "commitlog").iterdir():
        path.write_bytes(b"")
    assert told(tmp_path) == "its commitlog/ has only files of 0 bytes, but messages were stored: what they had is gone"


def test_a_log_whose_first_file_is_behind_others_and_was_emptied(tmp_path: Path) -> None:
    """A log whose first files were removed by retention, and whose next file was emptied, begins at the time of its
    first remaining record."""
    made(tmp_path)
    files = sorted((tmp_path / "commitlog").iterdir())
    files[0].unlink()
    files[1].write_bytes(b"")
    store = StoreFiles.open(tmp_path)
    assert store.segments[0].first_offset == SEGMENT
    assert store.gaps()[0][:2] == (SEGMENT, SEGMENT)
    assert begin_ms_of(store) > 0


def test_a_queue_whose_first_file_was_cut_is_read_by_the_size_of_the_others(tmp_path: Path) -> None:
    broker = made(tmp_path)
    queue = broker.store.queue("orders", 3)
    assert queue is not None
    for path in (tmp_path / "consumequeue").glob(f"*/*/{0:020d}"):
        path.open("r+b").truncate(40)
    store = StoreFiles.open(tmp_path)
    assert store.unit("orders", 3, 60) == (queue.unit(60) or ())[:2]
