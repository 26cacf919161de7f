"""Opening stores: duemq's and Apache's, after clean and unclean ends, whole and damaged."""

from __future__ import annotations

import errno
import random
import shutil
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from duemq.protocol.records import record
from duemq.storage.durability import recovery
from duemq.storage.durability.health import Verdict
from duemq.storage.errors import StoreFileMissing, StoreFormatError, StoreLocked
from duemq.storage.files import OsFiles
from duemq.storage.store import MessageStore, StoreConfig
from tests.crash.simulated_files import SimulatedFiles, Write
from tests.support.store import OwnedStore
from tests.support.store_problems import problems
from tests.unit.storage.conftest import HOST, LEVELS, NOW_MS, append, make_store


def filled(root: Path | str, files: SimulatedFiles | None = None, count: int = 60) -> MessageStore:
    """An open store with messages over several files of each kind."""
    store = make_store(root, files, segment_size=8192)
    store.open()
    for number in range(count):
        append(store, "a", number % 2, b"%d" % number * 100, properties=b"TAGS\x01t")
        append(store, "b", 0, b"")
    return store


def checkpoint(store: MessageStore) -> None:
    OwnedStore(store).checkpoint()


def stop(store: MessageStore) -> None:
    OwnedStore(store).stop()


def reopened(files: SimulatedFiles) -> MessageStore:
    files.after_kill()
    store = make_store("/s", files, segment_size=8192)
    store.open()
    return store


@pytest.mark.parametrize(("reached", "is_made_again"), [(0, False), (5, True), (99, True)])
def test_a_queue_that_does_not_reach_where_somebody_was_is_made_again(reached: int, *, is_made_again: bool) -> None:
    """A queue that ends before a known progress in it is made again. A store that RocketMQ had last has no note, so
    nothing else shows that units are missing."""
    files = SimulatedFiles()
    store = make_store("/s", files, segment_size=8192)
    store.open()
    append(store, "t", 0, *[b"x"] * 5)
    append(store, "u", 0, b"its queue reaches the end")
    OwnedStore(store).stop()
    files.write_whole("/s/lock", b"lock")
    files.remove_tree("/s/consumequeue/t")
    files.after_kill()
    store = make_store("/s", files, segment_size=8192)
    store.inspect()
    store.expect("t", 0, reached)
    recovered = store.recover()
    assert recovered.rebuilt is is_made_again
    assert store.ensure_queue("t", 0).next_offset == (5 if is_made_again else 0)


# --- Apache's stores


def files_of(root: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(root)): path.read_bytes()
        for directory in ("commitlog", "consumequeue")
        for path in (root / directory).rglob("*")
        if path.is_file()
    }


def test_apaches_store_after_a_clean_stop(apache_store: Path) -> None:
    before = files_of(apache_store)
    store = make_store(apache_store)
    recovered = store.open()
    assert (recovered.records, recovered.torn, recovered.rebuilt) == (0, None, False)
    assert list(problems(store)) == []
    assert sum(queue.next_offset for queue in store.queues["gold"].values()) == 172
    delayed = store.queues["SCHEDULE_TOPIC_XXXX"][17]
    assert delayed.next_offset == 10
    stop(store)
    assert files_of(apache_store) == before, "opening and closing changes no byte of theirs"


def test_apaches_store_after_a_kill(apache_store: Path) -> None:
    before = files_of(apache_store)
    (apache_store / "abort").touch()
    store = make_store(apache_store)
    recovered = store.open()
    assert recovered.records > 80, "by RocketMQ's rule: from the start of a file that its checkpoint covers"
    assert list(problems(store)) == []
    stop(store)
    assert files_of(apache_store) == before


def test_apaches_consume_queues_are_made_again_byte_for_byte(apache_store: Path) -> None:
    before = files_of(apache_store)
    shutil.rmtree(apache_store / "consumequeue")
    store = make_store(apache_store)
    assert store.open().records == 183
    stop(store)
    assert files_of(apache_store) == before


def test_apaches_records_are_encoded_again_to_the_same_bytes(apache_store: Path) -> None:
    store = make_store(apache_store)
    store.open()
    for queue in store.all_queues():
        for offset in range(queue.next_offset):
            unit = queue.unit(offset)
            assert unit is not None
            message = store.message_at(unit[0], unit[1])
            assert message is not None
            assert record.encode(message) == store.log.read(unit[0], unit[1])


def test_what_is_appended_to_apaches_store_follows_on(apache_store: Path) -> None:
    store = make_store(apache_store)
    store.open()
    end, offset = store.log.end, store.ensure_queue("gold", 1).next_offset
    assert append(store, "gold", 1, b"ours") == [end]
    assert store.ensure_queue("gold", 1).next_offset == offset + 1
    stop(store)
    again = make_store(apache_store)
    again.open()
    assert list(problems(again)) == []


# --- duemq's own


def test_after_a_clean_stop_nothing_is_read() -> None:
    files = SimulatedFiles()
    store = filled("/s", files)
    end, last = store.log.end, store.appender.last_store_timestamp
    stop(store)
    assert not files.exists("/s/abort")
    store = make_store("/s", files, segment_size=8192)
    recovered = store.open()
    assert (recovered.records, recovered.end, recovered.last_store_timestamp) == (0, end, last)
    assert list(problems(store)) == []


def test_after_a_kill_only_what_the_checkpoint_does_not_cover_is_read() -> None:
    files = SimulatedFiles()
    store = filled("/s", files)
    checkpoint(store)
    append(store, "a", 0, b"1", b"2")
    files.after_kill()
    again = make_store("/s", files, segment_size=8192)
    recovered = again.open()
    assert (recovered.records, recovered.end) == (2, store.log.end)
    assert list(problems(again)) == []


def test_units_of_messages_that_came_while_queues_were_written_are_not_lost() -> None:
    files = SimulatedFiles()
    store = filled("/s", files)
    owned = OwnedStore(store)
    pieces = 0
    for _ in owned.writing():
        append(store, "a", pieces % 2, b"meanwhile")
        pieces += 1
    append(store, "b", 0, b"later")
    owned.sync()
    assert pieces > 3
    assert list(problems(reopened(files))) == []


def test_a_torn_record_is_cut_off_and_nothing_of_it_comes_back() -> None:
    # Goal: bytes behind a cut must not be taken for records later. Two records have one size: the first is torn, the
    # second whole; after the cut a new record of the same size takes the first one's place.
    files = SimulatedFiles()
    store = filled("/s", files)
    checkpoint(store)
    first, second = append(store, "a", 0, b"x" * 50, b"y" * 50)
    node = files.names[f"/s/commitlog/{first // 8192 * 8192:020}"]
    node.data[first % 8192 + 100] ^= 0xFF
    again = reopened(files)
    assert again.log.end == first
    assert list(problems(again)) == []
    assert append(again, "a", 0, b"z" * 50) == [first]
    once_more = reopened(files)
    assert once_more.log.end == second
    assert list(problems(once_more)) == []


@pytest.mark.parametrize("lost", ["/s/consumequeue/a/0", "/s/consumequeue/a", "/s/consumequeue"])
def test_lost_consume_queues_are_made_again(lost: str) -> None:
    files = SimulatedFiles()
    stop(filled("/s", files))
    store = reopened(files)
    append(store, "a", 0, b"so that a record follows on the lost unit")
    files.remove_tree(lost)
    again = reopened(files)
    assert list(problems(again)) == []
    assert again.ensure_queue("a", 0).next_offset == 31


@pytest.mark.parametrize("is_noted", [True, False])
@pytest.mark.parametrize("style", ["nothing", "some", "everything"])
def test_a_power_cut_after_queues_were_made_again_loses_nothing(style: str, is_noted: bool) -> None:
    """A power cut after queues were made again loses nothing, although the new files are not durable yet and the
    checkpoint is of the old ones."""
    files = SimulatedFiles()
    stop(filled("/s", files))
    store = reopened(files)
    append(store, "a", 0, b"so that a record follows on the lost unit", now_ms=NOW_MS + 60_000)
    assert OwnedStore(store).flush()
    files.remove_tree("/s/consumequeue/a/0")
    if not is_noted:
        files.remove("/s/queuecheck")
    files.after_kill()
    again = make_store("/s", files, segment_size=8192)
    assert again.open().rebuilt is not is_noted
    for seed in range(10):
        image = files.after_crash(len(files.operations), random.Random(seed), style)
        assert list(problems(reopened(image))) == []
    checkpoint(again)
    image = files.after_crash(len(files.operations), random.Random(0), "nothing")
    last = make_store("/s", image, segment_size=8192)
    assert not last.open().rebuilt
    assert list(problems(last)) == []


def test_a_lost_consume_queue_file_is_made_again() -> None:
    files = SimulatedFiles()
    stop(filled("/s", files))
    files.remove("/s/consumequeue/b/0/" + f"{400:020}")
    assert list(problems(reopened(files))) == []


def test_a_lost_or_foreign_checkpoint_is_no_harm() -> None:
    for data in (None, b"", b"short", bytes(4096), b"\xff" * 4096):
        files = SimulatedFiles()
        filled("/s", files)
        if data is None:
            files.names.pop("/s/checkpoint", None)
        else:
            files.write_whole("/s/checkpoint", data)
        assert list(problems(reopened(files))) == []


@pytest.mark.parametrize("kept", [0, 1])
def test_the_end_of_the_log_must_not_be_gone_unless_somebody_says_so(kept: int) -> None:
    files = SimulatedFiles()
    stop(filled("/s", files))
    names = files.list("/s/commitlog")
    for name in names[kept:]:
        files.remove(f"/s/commitlog/{name}")
    before = {path: bytes(node.data) for path, node in files.names.items()}
    with pytest.raises(StoreFileMissing, match=f"/s/commitlog/{names[-1]}: is missing.*`duemq store repair /s`"):
        reopened(files)
    assert {path: bytes(node.data) for path, node in files.names.items()} == before
    if not kept:
        return
    files.remove("/s/checkpoint")
    again = reopened(files)
    assert 0 < again.log.end <= 8192
    assert list(problems(again)) == []


def test_a_missing_commitlog_file_stops_the_start_and_is_named() -> None:
    files = SimulatedFiles()
    stop(filled("/s", files))
    files.remove("/s/commitlog/" + f"{8192:020}")
    with pytest.raises(StoreFormatError, match=f"{8192:020}"):
        reopened(files)


def test_a_changed_file_size_stops_the_start() -> None:
    files = SimulatedFiles()
    stop(filled("/s", files))
    told = f"/s/commitlog/{0:020}: has 8192 bytes, but the configured file size is 65536.*set mappedFileSizeCommitLog"
    with pytest.raises(StoreFormatError, match=told):
        make_store("/s", files).open()
    assert "/s/lock" not in files.locked, "the failed start gives the lock back"


def test_the_head_of_the_log_may_be_gone() -> None:
    # After retention: queues start late, and are made again from the rest of the log.
    files = SimulatedFiles()
    stop(filled("/s", files))
    for name in files.list("/s/commitlog")[:2]:
        files.remove(f"/s/commitlog/{name}")
    again = reopened(files)
    assert again.ensure_queue("a", 0).min_offset > 0
    assert list(problems(again)) == []
    stop(again)
    files.remove_tree("/s/consumequeue")
    assert list(problems(reopened(files))) == []


def test_a_topic_deleted_and_made_again_has_its_new_messages_only() -> None:
    files = SimulatedFiles()
    store = filled("/s", files)
    owned = OwnedStore(store)
    owned.durability.remove_topic("a", lambda error: None)
    owned.settle()
    append(store, "a", 0, b"new")
    files.remove_tree("/s/consumequeue")
    queue = reopened(files).ensure_queue("a", 0)
    assert (queue.min_offset, queue.next_offset) == (0, 1)


def test_records_of_half_messages_have_no_unit() -> None:
    files = SimulatedFiles()
    store = filled("/s", files)
    store.appender.begin(NOW_MS)
    queue = store.ensure_queue("half", 0)
    store.appender.add(queue, b"prepared", b"", 0, 1, HOST, 0, record.TRANSACTION_PREPARED)
    store.appender.commit()
    assert reopened(files).ensure_queue("half", 0).next_offset == 0


@pytest.mark.parametrize("how", ["another size", "a missing file", "a broken disk", "something else"])
def test_a_start_that_fails_leaves_the_files_as_they_are(how: str) -> None:
    """A failed start leaves the files as they are, also after a kill -9: the next successful start has to find the
    state that the kill left."""
    files = SimulatedFiles()
    store = filled("/s", files)
    checkpoint(store)
    append(store, "a", 0, b"behind the checkpoint")
    files.after_kill()
    if how == "a missing file":
        files.remove("/s/commitlog/" + f"{8192:020}")
    before = {path: bytes(node.data) for path, node in files.names.items()}
    again = make_store("/s", files, segment_size=65536 if how == "another size" else 8192)
    if how == "a broken disk":
        files.fail("open", errno.EIO, "/s/consumequeue/b")
    if how == "something else":
        again.inspect()
        again.abandon()
    else:
        with pytest.raises((StoreFormatError, OSError)):
            again.open()
    assert not files.locked
    assert {path: bytes(node.data) for path, node in files.names.items()} == before
    assert again.health.verdict is Verdict.CLOSED


def test_a_start_that_fails_leaves_nothing_where_nothing_was() -> None:
    files = SimulatedFiles()
    files.make_directories("/s/commitlog")
    files.write_whole("/s/commitlog/of another program", b"")
    with pytest.raises(StoreFormatError):
        make_store("/s", files).open()
    assert list(files.names) == ["/s/commitlog/of another program"]


def test_a_store_is_open_once(tmp_path: Path) -> None:
    files = SimulatedFiles()
    store = make_store("/s", files)
    store.open()
    with pytest.raises(StoreLocked, match="/s/lock"):
        make_store("/s", files).open()
    stop(store)
    make_store("/s", files).open()


def test_two_stores_cannot_have_one_commitlog(tmp_path: Path) -> None:
    """Two stores cannot have one commitlog. Earlier they wrote over each other: 100 acknowledged messages were gone,
    and no log said so."""
    for root in ("one", "other"):
        (tmp_path / root).mkdir()
    configs = [StoreConfig(str(tmp_path / root), str(tmp_path / "log")) for root in ("one", "other")]
    one, other = (MessageStore(config, OsFiles(), ("127.0.0.1", 10911), LEVELS.deliver_time) for config in configs)
    one.open()
    with pytest.raises(StoreLocked, match=str(tmp_path / "log")):
        other.open()
    assert not list((tmp_path / "other").iterdir())
    stop(one)
    other.open()
    assert not (tmp_path / "log" / "lock").exists(), "RocketMQ's broker takes each file there for one of its log"
    stop(other)


def test_the_abort_file_is_there_while_the_store_is_open(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    store.open()
    assert (tmp_path / "abort").exists()
    assert OsFiles().exists(str(tmp_path / "lock"))
    stop(store)
    assert not (tmp_path / "abort").exists()


def test_store_times_survive_for_the_checkpoint() -> None:
    files = SimulatedFiles()
    store = make_store("/s", files)
    store.open()
    append(store, "a", 0, b"x", now_ms=5_000_000)
    stop(store)
    data = files.read_whole("/s/checkpoint")
    assert data is not None
    assert int.from_bytes(data[:8], "big") == int.from_bytes(data[8:16], "big") == 5_000_000


class CountingFiles(SimulatedFiles):
    """Counts the listings of each directory."""

    listed: Counter[str]

    def list(self, path: str) -> list[str]:
        self.listed[path] += 1
        return super().list(path)


def test_a_start_lists_each_directory_once() -> None:
    """A start lists each directory once, since with 26,500 topics listings take most of its time. Empty directories,
    and files in place of a directory, are removed."""
    files = CountingFiles()
    files.listed = Counter()
    stop(filled("/s", files))
    for path in ("/s/consumequeue/empty", "/s/consumequeue/a/7", "/s/consumequeue/c/0"):
        files.make_directories(path)
    for path in ("/s/consumequeue/c/1", "/s/consumequeue/d", "/s/consumequeue/b/note"):
        files.write_whole(path, b"")
    files.make_directories("/s/consumequeue/b/1")
    files.after_kill()
    files.listed.clear()
    store = make_store("/s", files, segment_size=8192)
    store.open()
    directories = [path for path in files.listed if path.startswith("/s/consumequeue")]
    assert len(directories) > 10
    assert max(files.listed.values()) == 1
    assert files.list("/s/consumequeue") == ["a", "b"]
    assert (files.list("/s/consumequeue/a"), files.list("/s/consumequeue/b")) == (["0", "1"], ["0", "note"])
    assert list(problems(store)) == []


@pytest.mark.parametrize("is_known", [True, False], ids=["a checkpoint", "no checkpoint"])
def test_a_start_after_a_kill_writes_again_what_a_failed_sync_can_have_lost_and_no_more(
    is_known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start after a kill writes again everything that the last checkpoint does not cover; without a checkpoint only
    the last two files, or as much as can be written before a sync begins, however long the commitlog is."""
    monkeypatch.setattr(recovery, "_WRITE_AGAIN_BYTES", 3 * 8192 + 100)
    files = SimulatedFiles()
    store = filled("/s", files, count=200)
    checkpoint(store)
    covered = store.log.end
    append(store, "a", 0, b"behind the checkpoint")
    end = store.log.end
    assert end > 10 * 8192
    if not is_known:
        files.remove("/s/checkpoint")
    nodes = {node: path for path, node in files.names.items() if path.startswith("/s/commitlog/")}
    files.operations.clear()
    again = reopened(files)
    written = sorted(
        (int(nodes[operation.node][-20:]) + operation.offset, len(operation.data))
        for operation in files.operations
        if isinstance(operation, Write) and operation.node in nodes
    )
    start = written[0][0]
    assert start == (covered if is_known else end - 3 * 8192 - 100)
    for (position, size), (following, _) in pairwise([*written, (end, 0)]):
        assert position + size == following
    assert list(problems(again)) == []


def test_without_a_checkpoint_the_last_two_files_are_written_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "_WRITE_AGAIN_BYTES", 100)
    files = SimulatedFiles()
    end = filled("/s", files, count=200).log.end
    assert not files.exists("/s/checkpoint")
    files.operations.clear()
    reopened(files)
    log_files = {node for path, node in files.names.items() if path.startswith("/s/commitlog/")}
    written = [each for each in files.operations if isinstance(each, Write) and each.node in log_files]
    assert sum(len(each.data) for each in written) == 8192 + end % 8192


@pytest.mark.parametrize("damage", ["a flipped bit", "zeros", "a whole sector of other bytes"])
@pytest.mark.parametrize("files_behind", [0, 2])
def test_whole_records_behind_a_damaged_one_are_kept_and_told(damage: str, files_behind: int) -> None:
    """Whole records behind a damaged one are kept and reported, for they may have been acknowledged. The named files
    have exactly the bytes that were cut."""
    files = SimulatedFiles()
    store = filled("/s", files)
    checkpoint(store)
    damaged, *others = append(store, "a", 0, *(b"%d" % number * 50 for number in range(4)))
    while (store.log.end - damaged) // 8192 < files_behind:
        others += append(store, "a", 1, b"y" * 1000)
    node = files.names[f"/s/commitlog/{damaged // 8192 * 8192:020}"]
    position = damaged % 8192
    if damage == "a flipped bit":
        node.data[position + 100] ^= 1
    else:
        node.data[position : position + 120] = (b"\0" if damage == "zeros" else b"\xa5") * 120
    end = store.log.end
    before = store.log.read_raw(damaged, end - damaged)
    files.after_kill()
    again = make_store("/s", files, segment_size=8192)
    with capture_logs() as lines:
        assert again.open().end == damaged
    (told,) = [line for line in lines if line["event"] == "commitlog_cut"]
    assert told["log_level"] == "error"
    assert (told["physical_offset"], told["bytes"], told["whole_records"]) == (damaged, end - damaged, len(others))
    assert b"".join(files.read_whole(path) or b"" for path in told["kept_in"]) == before
    assert told["kept_in"] == [
        f"/s/cut/{damaged if not at else (damaged // 8192 + at) * 8192:020}" for at in range(len(told["kept_in"]))
    ]
    assert list(problems(again)) == []
    # The same position once more: the files kept before stay.
    append(again, "a", 0, b"z" * 200, b"behind")
    node.data[position + 100] ^= 1
    files.after_kill()
    with capture_logs() as lines:
        make_store("/s", files, segment_size=8192).open()
    (once_more,) = [line for line in lines if line["event"] == "commitlog_cut"]
    assert once_more["kept_in"] == [f"/s/cut/{damaged:020}.1"]
    assert b"".join(files.read_whole(path) or b"" for path in told["kept_in"]) == before


def test_a_torn_tail_is_cut_without_a_word() -> None:
    """A torn last record, with no whole record behind it, is cut without a warning."""
    files = SimulatedFiles()
    store = filled("/s", files)
    checkpoint(store)
    (torn,) = append(store, "a", 0, b"x" * 50)
    files.names[f"/s/commitlog/{torn // 8192 * 8192:020}"].data[torn % 8192 + 100] ^= 1
    with capture_logs() as lines:
        assert reopened(files).log.end == torn
    assert "commitlog_cut" not in {line["event"] for line in lines}
    assert "/s/cut" not in files.folders


def test_what_is_cut_and_cannot_be_kept_stops_the_start() -> None:
    files = SimulatedFiles()
    store = filled("/s", files)
    checkpoint(store)
    damaged, _ = append(store, "a", 0, b"x" * 50, b"y" * 50)
    files.names[f"/s/commitlog/{damaged // 8192 * 8192:020}"].data[damaged % 8192 + 100] ^= 1
    files.after_kill()
    log = {path: bytes(node.data) for path, node in files.names.items() if "commitlog" in path}
    files.fail("write", errno.ENOSPC, "/s/cut")
    with pytest.raises(OSError, match="No space left"):
        make_store("/s", files, segment_size=8192).open()
    assert {path: bytes(node.data) for path, node in files.names.items() if "commitlog" in path} == log


@pytest.mark.parametrize("queues", ["lost", "there"])
def test_an_older_copy_of_the_last_commitlog_file_stops_the_start(queues: str) -> None:
    """An older copy of the last commitlog file stops the start, as a missing file does: acknowledged messages are
    missing, which must be noticed."""
    files = SimulatedFiles()
    store = filled("/s", files, 5)
    last = store.log.segment_bases()[-1]
    path = f"/s/commitlog/{last:020}"
    older = bytes(files.names[path].data)
    for number in range(8):
        append(store, "a", 0, b"%d" % number * 30)
    assert store.log.segment_bases()[-1] == last
    stop(store)
    files.names[path].data[:] = older
    if queues == "lost":
        files.remove_tree("/s/consumequeue")
    before = {path: bytes(node.data) for path, node in files.names.items()}
    with pytest.raises(StoreFormatError, match=f"{path}: has no record before .* older copy.*`duemq store repair /s`"):
        reopened(files)
    assert {path: bytes(node.data) for path, node in files.names.items()} == before
    files.remove("/s/checkpoint")
    again = reopened(files)
    assert list(problems(again)) == []
    assert again.ensure_queue("b", 0).next_offset == 5


@pytest.mark.parametrize("expired_files", [0, 1, 2])
def test_what_lies_before_records_that_are_gone_stays_visible(expired_files: int) -> None:
    """Messages before missing records stay visible. The consume queues are made again from a commitlog that ends before
    their old units: their offsets continue, and the messages in the commitlog can be read, also when its first files
    go, and be found by time."""
    files = SimulatedFiles()
    store = make_store("/s", files, segment_size=8192)
    store.open()
    told = {}
    for number in range(80):
        [physical] = append(store, "a", 0, b"%d" % number * 150, now_ms=NOW_MS + number)
        told[number] = physical
    last, damaged = store.log.segment_bases()[-1], 70
    assert told[damaged] > last, "the files before the last one have whole records only"
    stop(store)
    base = told[damaged] // 8192 * 8192
    files.names[f"/s/commitlog/{base:020}"].data[told[damaged] - base + 100] ^= 1
    files.remove_tree("/s/consumequeue")
    for base in range(0, expired_files * 8192, 8192):
        files.remove(f"/s/commitlog/{base:020}")
    for _ in range(3):
        store = reopened(files)
        queue = store.ensure_queue("a", 0)
        first = min(number for number, physical in told.items() if physical >= store.log.begin)
        assert (queue.min_offset, queue.next_offset) == (first, 80)
        for number in range(first, damaged):
            unit = queue.unit(number)
            assert unit is not None
            assert unit[0] == told[number]
        for number in (first, first + 5, damaged - 1):
            assert store.offset_by_time(queue, NOW_MS + number) == number
        assert store.offset_by_time(queue, NOW_MS + 1000) == damaged
        stop(store)
    queue.advance_min(last)
    assert queue.min_offset == min(number for number, physical in told.items() if physical >= last)


def test_the_size_of_consume_queue_files_is_rounded_up_to_whole_units_as_rocketmq_does() -> None:
    files = SimulatedFiles()
    store = make_store("/s", files, queue_size=1999)
    store.open()
    append(store, "a", 0, b"x")
    stop(store)
    assert len(files.names[f"/s/consumequeue/a/0/{0:020}"].data) == 2000
