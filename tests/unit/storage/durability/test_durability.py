"""The owner of durability: data that it calls durable is durable, whatever fails, and in whatever order its jobs
run."""

from __future__ import annotations

import dataclasses
import errno
import random
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from structlog.testing import capture_logs

from duemq.storage.budget import UNLIMITED, Pieces
from duemq.storage.clock import ManualClock, Moment
from duemq.storage.durability import checkpoint as checkpoint_file
from duemq.storage.durability import owner
from duemq.storage.durability.health import Verdict
from duemq.storage.durability.jobs import Lane
from duemq.storage.durability.owner import (
    EXPIRE_SECONDS,
    FIRST_CHECKPOINT_SECONDS,
    RETRY_SECONDS,
    STOP_TRIES,
    DurabilityConfig,
)
from duemq.storage.durability.recovery import Recovered
from duemq.storage.durability.retention import RetentionConfig
from duemq.storage.errors import NotDurable, StoreBroken, StoreClosed, StoreError, StoreFull
from duemq.storage.store import MessageStore
from tests.crash.simulated_files import Call, SimulatedFiles, Sync
from tests.soak import sampled
from tests.support.store import NOTHING_GOES, OwnedStore
from tests.support.store_problems import problems
from tests.unit.storage.conftest import append, make_store

SEGMENT = 8192
LOG = "/s/commitlog"
QUEUES = "/s/consumequeue"
CHECKPOINT = "/s/checkpoint"
RETRY_MS = int(RETRY_SECONDS * 1000)
ALWAYS_GOES = RetentionConfig(reserved_hours=-1, delete_when=";".join(f"{hour:02}" for hour in range(24)))
"""Every file that is no longer needed expires."""


def owned_store(
    files: SimulatedFiles | None = None,
    *,
    parts: dict[str, Any] | None = None,
    config: DurabilityConfig | None = None,
    retention: RetentionConfig = NOTHING_GOES,
    on_released: Callable[[int], None] = lambda position: None,
) -> OwnedStore:
    store = make_store("/s", files or SimulatedFiles(), segment_size=SEGMENT)
    store.open()
    return OwnedStore(store, ManualClock(), parts, config=config, retention=retention, on_released=on_released)


def files_of(owned: OwnedStore) -> SimulatedFiles:
    assert isinstance(owned.store.files, SimulatedFiles)
    return owned.store.files


def reopened(files: SimulatedFiles) -> tuple[MessageStore, Recovered]:
    """The store as the next process finds it."""
    files.after_kill()
    store = make_store("/s", files, segment_size=SEGMENT)
    return store, store.open()


def after_power_cut(files: SimulatedFiles, style: str = "nothing") -> tuple[MessageStore, Recovered]:
    """The store after a power cut, by default without any unsynced data."""
    return reopened(files.after_crash(len(files.operations), random.Random(0), style))


def recovery_offset(files: SimulatedFiles) -> int:
    """The recovery offset in the checkpoint file."""
    return checkpoint_file.load(files, CHECKPOINT).recovery_offset or 0


def is_clean(store: MessageStore, recovered: Recovered) -> bool:
    """Whether a start found everything in order, and had nothing to read."""
    assert list(problems(store)) == []
    return (recovered.records, recovered.torn, recovered.rebuilt) == (0, None, False)


# --- flushes


def test_all_who_want_are_released_by_one_flush() -> None:
    owned = owned_store()
    files, ends = files_of(owned), []
    for number in range(3):
        append(owned.store, "t", number, b"x")
        owned.wanted.raise_to(owned.store.log.end)
        ends.append(owned.store.log.end)
    owned.step()
    assert owned.workers.held(Lane.FLUSH) == 1
    assert owned.releases == []
    before = len(files.operations)
    owned.workers.run_one(Lane.FLUSH)
    assert owned.releases == [ends[-1]] == [owned.durability.released]
    assert sum(isinstance(operation, Sync) for operation in files.operations[before:]) == 1
    assert not owned.workers.held(Lane.FLUSH)


def test_those_who_come_while_a_flush_runs_share_the_next() -> None:
    owned = owned_store()
    ends = []
    for number in range(5):
        append(owned.store, "t", number, b"x")
        owned.wanted.raise_to(owned.store.log.end)
        owned.step()
        ends.append(owned.store.log.end)
        assert owned.workers.held(Lane.FLUSH) == 1, "one at a time: a kernel tells of a failed write-back once"
    owned.workers.run_one(Lane.FLUSH)
    assert owned.releases == [ends[0]], "of the others the disk may have nothing"
    assert owned.workers.held(Lane.FLUSH) == 1
    owned.workers.run_one(Lane.FLUSH)
    assert owned.releases == [ends[0], ends[4]]
    assert not owned.workers.held(Lane.FLUSH)


def test_what_is_released_survives_a_power_cut_at_that_moment() -> None:
    """Released data survives a power cut at that moment, over several files, whose names have to survive as well."""
    files = SimulatedFiles()
    released: list[int] = []

    def on_released(position: int) -> None:
        released.append(position)
        store, recovered = after_power_cut(files)
        assert recovered.end >= position
        assert list(problems(store)) == []

    owned = owned_store(files, on_released=on_released)
    for _ in range(12):
        append(owned.store, "t", 0, bytes(3000))
        assert owned.flush()
    assert owned.store.log.end > 3 * SEGMENT
    assert released == owned.releases
    assert len(released) == 12


def test_a_commitlog_outside_the_root_survives_a_power_cut() -> None:
    files = SimulatedFiles()

    def opened(files: SimulatedFiles) -> MessageStore:
        config = make_store("/s", segment_size=SEGMENT).config
        config = type(config)("/s", "/elsewhere/logs/of/this", config.commitlog_segment_size, config.queue_segment_size)
        store = MessageStore(config, files, ("127.0.0.1", 10911), lambda level, stored: stored)
        store.open()
        return store

    owned = OwnedStore(opened(files))
    append(owned.store, "t", 0, b"x")
    assert owned.flush()
    image = files.after_crash(len(files.operations), random.Random(0), "nothing")
    assert opened(image).log.end == owned.store.log.end


def test_nobody_waits_and_nothing_is_new_so_nothing_is_flushed() -> None:
    owned = owned_store()
    append(owned.store, "t", 0, b"x")
    owned.step()
    owned.workers.run(Lane.FILES)
    assert not owned.workers.held(Lane.FLUSH) or owned.flush()
    owned.flush()
    owned.wanted.raise_to(owned.durability.released)
    owned.step()
    assert not owned.workers.held(Lane.FLUSH)


def test_what_nobody_waits_for_is_flushed_now_and_then() -> None:
    owned = owned_store(config=DurabilityConfig(flush_interval=0.5, queue_interval=1.0))
    owned.settle()
    append(owned.store, "t", 0, b"x")
    owned.clock.advance(200)
    wait = owned.step()
    assert wait is not None
    assert 0 < wait <= 0.3
    assert owned.releases == []
    owned.clock.advance(300)
    owned.step()
    owned.workers.run(Lane.FLUSH)
    assert owned.releases == [owned.store.log.end]


def test_much_that_is_not_flushed_is_flushed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, "UNFLUSHED_BYTES", 1000)
    owned = owned_store()
    owned.settle()
    append(owned.store, "t", 0, bytes(500))
    owned.step()
    assert not owned.workers.held(Lane.FLUSH)
    append(owned.store, "t", 0, bytes(500))
    owned.step()
    assert owned.workers.held(Lane.FLUSH) == 1


# --- failures that poison


def assert_dead(owned: OwnedStore) -> None:
    """Check that nothing is appended, released, noted or removed any more, whatever happens."""
    files, store = files_of(owned), owned.store
    assert store.health.verdict is Verdict.POISONED
    releases, noted, operations = list(owned.releases), store.checkpoint, len(files.operations)
    files.heal()
    for _ in range(5):
        with pytest.raises(StoreBroken):
            append(store, "t", 0, b"x")
        owned.wanted.raise_to(store.log.end)
        assert owned.step() is None
        owned.clock.advance(10_000)
    assert owned.poison is not None
    assert owned.releases == releases
    assert store.checkpoint is noted
    assert len(files.operations) == operations
    assert not owned.workers.jobs


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EMFILE])
def test_a_failed_sync_of_the_commitlog_is_the_end(number: int) -> None:
    """A failed sync of the commitlog, with any error, ends the store: the content of the disk is unknown, and a later
    sync that succeeds proves nothing."""
    owned = owned_store()
    owned.settle()
    append(owned.store, "t", 0, b"x")
    files_of(owned).fail("sync", number, LOG)
    assert not owned.flush()
    assert owned.releases == []
    assert "flushing the commitlog failed" in (owned.poison or "")
    assert_dead(owned)


FAILURES: list[tuple[Call, str]] = [
    ("sync", QUEUES),
    ("sync", f"{QUEUES}/t/0"),
    ("sync", CHECKPOINT),
    ("sync", "/s"),
    ("write", CHECKPOINT),
    ("open", CHECKPOINT),
    ("write", QUEUES),
    ("name", QUEUES),
]


@pytest.mark.parametrize(("call", "where"), FAILURES)
def test_an_error_of_the_disk_in_a_checkpoint_is_the_end(call: Call, where: str) -> None:
    owned = owned_store()
    owned.settle()
    append(owned.store, "t", 0, b"x")
    append(owned.store, "new", 0, b"x")
    assert owned.flush(Pieces(1))
    noted = recovery_offset(files_of(owned))
    files_of(owned).fail(call, errno.EIO, where)
    with pytest.raises((OSError, StoreBroken)):
        owned.checkpoint()
    files_of(owned).heal()
    assert owned.poison is not None
    assert recovery_offset(files_of(owned)) == noted
    assert_dead(owned)
    store, _ = after_power_cut(files_of(owned))
    assert list(problems(store)) == []
    assert store.log.end == owned.durability.released


def test_a_flush_that_began_before_a_poison_and_ends_well_after_it_releases_nothing() -> None:
    owned = owned_store()
    owned.settle()
    append(owned.store, "t", 0, b"x")
    owned.wanted.raise_to(owned.store.log.end)
    owned.step()
    assert owned.workers.held(Lane.FLUSH) == 1
    files_of(owned).fail("write", errno.EIO, LOG)
    with pytest.raises(StoreBroken):
        append(owned.store, "t", 0, b"y")
    files_of(owned).heal()
    assert owned.workers.run_one(Lane.FLUSH)
    assert owned.workers.failures == []
    assert owned.releases == []
    assert owned.durability.released == 0
    assert_dead(owned)


def test_a_checkpoint_that_began_before_a_poison_and_ends_well_after_it_is_not_noted() -> None:
    owned = owned_store()
    append(owned.store, "t", 0, b"x")
    for _ in owned.writing():
        pass
    noted = owned.store.checkpoint
    owned.store.health.poison("somebody else failed")
    assert owned.workers.run_one(Lane.FILES)
    assert owned.workers.failures == []
    assert owned.store.checkpoint is noted
    assert_dead(owned)


@pytest.mark.parametrize("pieces", range(8))
def test_at_whatever_step_it_is_poisoned_there_is_no_next_one(pieces: int) -> None:
    owned = owned_store(retention=ALWAYS_GOES)
    for number in range(9):
        append(owned.store, "t", number, bytes(3000))
    owned.checkpoint()
    owned.clock.advance(int(EXPIRE_SECONDS * 1000))
    append(owned.store, "u", 0, b"x")
    for _ in range(pieces):
        owned.step(Pieces(1))
        owned.workers.run(Lane.FLUSH)
    owned.store.health.poison("somebody else failed")
    while owned.workers.run_one():
        pass
    assert_dead(owned)


def test_what_fails_in_a_step_ends_that_step() -> None:
    """A failure in a step ends that step, before it removes files: files go only while the store is known to be
    good."""
    owned = owned_store(retention=ALWAYS_GOES)
    for _ in range(9):
        append(owned.store, "t", 0, bytes(3000))
    owned.checkpoint()
    names = files_of(owned).list(LOG)
    append(owned.store, "t", 0, b"x")
    owned.clock.advance(int(EXPIRE_SECONDS * 1000))
    files_of(owned).fail("write", errno.EIO, QUEUES)
    assert owned.step() is None
    assert owned.poison is not None
    while owned.workers.run_one():
        pass
    assert files_of(owned).list(LOG) == names
    assert owned.store.log.begin == 0
    assert_dead(owned)


def test_who_waits_is_told_once() -> None:
    owned = owned_store()
    owned.store.health.poison("first")
    owned.store.health.poison("second")
    assert owned.step() is None
    assert owned.step() is None
    assert owned.poison == "first"
    assert owned.ends == []


# --- failures that pass


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC])
def test_a_flush_that_could_not_begin_is_tried_again_and_nobody_is_told_meanwhile(number: int) -> None:
    owned = owned_store()
    owned.settle()
    append(owned.store, "t", 0, b"x")
    files_of(owned).fail("open", number, LOG)
    for _ in range(3):
        assert not owned.flush()
        failed = len(owned.workers.failures)
        owned.clock.advance(RETRY_MS // 2)
        assert not owned.flush()
        assert len(owned.workers.failures) == failed, "not before some time has passed"
        owned.clock.advance(RETRY_MS // 2)
    assert len(owned.workers.failures) == 3
    assert owned.store.health.verdict is Verdict.HEALTHY
    assert owned.releases == []
    files_of(owned).heal()
    append(owned.store, "t", 0, b"y")
    assert owned.flush()
    assert owned.releases == [owned.store.log.end]


def test_whoever_steps_is_told_when_a_failed_flush_is_tried_again() -> None:
    """A step returns the time of the retry after a failed flush, although no other work is due for long."""
    owned = owned_store()
    owned.settle()
    owned.clock.advance(1)
    append(owned.store, "t", 0, b"x")
    files_of(owned).fail("open", errno.EMFILE, LOG)
    assert not owned.flush()
    files_of(owned).heal()
    for _ in range(100):
        wait = owned.step()
        if owned.workers.run_one(Lane.FLUSH):
            break
        assert wait is not None
        owned.clock.advance(max(1, round(wait * 1000)))
    assert owned.releases == [owned.store.log.end]
    assert owned.clock.monotonic() <= 1000.0 + 0.002 + RETRY_SECONDS


PASSING: list[tuple[Call, str, int]] = [
    ("write", QUEUES, errno.ENOSPC),
    ("write", QUEUES, errno.EDQUOT),
    ("name", QUEUES, errno.ENOSPC),
    ("open", QUEUES, errno.EMFILE),
    ("write", CHECKPOINT, errno.ENOSPC),
    ("name", CHECKPOINT, errno.ENOSPC),
    ("open", CHECKPOINT, errno.ENFILE),
    ("open", "/s", errno.ENOMEM),
]


@pytest.mark.parametrize(("call", "where", "number"), PASSING)
def test_a_checkpoint_that_fails_in_passing_is_made_later_with_all_that_it_had(
    call: Call, where: str, number: int
) -> None:
    owned = owned_store()
    files = files_of(owned)
    append(owned.store, "t", 0, b"a", b"b")
    owned.checkpoint()
    noted = owned.store.checkpoint
    for name in ("t", "new"):
        append(owned.store, name, 0, b"c" * 200)
        append(owned.store, name, 1, b"d" * 200)
    assert owned.flush(Pieces(1))
    files.fail(call, number, where)
    for _ in range(3):
        owned.urgent.wants_checkpoint = True
        owned.settle()
        owned.clock.advance(RETRY_MS)
        append(owned.store, "t", 0, b"e")
    assert owned.store.checkpoint is noted
    assert owned.store.health.verdict is Verdict.HEALTHY
    files.heal()
    owned.clock.advance(10_000)
    owned.settle()
    assert owned.store.checkpoint is not noted
    assert owned.store.checkpoint.recovery_offset == owned.store.log.end
    store, recovered = after_power_cut(files)
    assert is_clean(store, recovered), "the queues of the checkpoint that failed are durable with the next one"


def test_memory_that_runs_out_in_a_checkpoint_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    owned = owned_store()
    append(owned.store, "t", 0, b"a")
    with monkeypatch.context() as patch:
        patch.setattr(files_of(owned), "write_whole", lambda *_, **__: no_memory())
        owned.urgent.wants_checkpoint = True
        with capture_logs() as logs:
            owned.settle()
    assert [(line["event"], line["reason"]) for line in logs] == [("tried_again_later", "MemoryError()")]
    assert owned.store.health.verdict is Verdict.HEALTHY
    owned.clock.advance(RETRY_MS)
    owned.checkpoint()
    assert owned.store.checkpoint.recovery_offset == owned.store.log.end


def no_memory() -> None:
    raise MemoryError


def test_what_a_failed_checkpoint_did_not_sync_the_next_one_does() -> None:
    """The next checkpoint syncs everything that a failed one did not: the first file of a queue that has gone on in the
    second since, and the names of new directories."""
    owned = owned_store()
    files = files_of(owned)
    append(owned.store, "t", 0, *[b"x"] * 25)
    append(owned.store, "u", 0, b"x")
    for _ in owned.writing():
        pass
    assert files.list(f"{QUEUES}/t/0") == [f"{0:020}", f"{400:020}"]
    append(owned.store, "t", 0, b"y")
    files.fail("open", errno.EMFILE, f"{QUEUES}/t/0")
    with pytest.raises(OSError, match="Too many open files"):
        owned.sync()
    files.heal()
    owned.clock.advance(RETRY_MS)
    owned.checkpoint()
    store, recovered = after_power_cut(files)
    assert is_clean(store, recovered)


def test_trouble_is_told_once_not_each_time() -> None:
    owned = owned_store()
    owned.checkpoint()
    append(owned.store, "t", 0, b"x")
    files_of(owned).fail("write", errno.ENOSPC, CHECKPOINT)
    with capture_logs() as lines:
        for _ in range(10):
            owned.clock.advance(10_000)
            owned.settle()
    assert len(owned.workers.failures) >= 10
    assert [line["event"] for line in lines] == ["tried_again_later"]
    files_of(owned).heal()
    owned.clock.advance(10_000)
    owned.settle()
    append(owned.store, "t", 0, b"x")
    files_of(owned).fail("write", errno.ENOSPC, CHECKPOINT)
    with capture_logs() as lines:
        owned.clock.advance(10_000)
        owned.settle()
    assert [line["event"] for line in lines] == ["tried_again_later"], "after it went well it is news again"


@pytest.mark.parametrize("where", [CHECKPOINT, QUEUES])
def test_a_wish_for_a_checkpoint_outlives_one_that_failed(where: str) -> None:
    """A request for a checkpoint outlives a failed checkpoint, although it would not be due for a while: a crash would
    otherwise go by the state before."""
    owned = owned_store()
    for _ in range(10):
        owned.clock.advance(10_000)
        append(owned.store, "t", 0, b"x")
        owned.settle()
    files_of(owned).fail("write", errno.ENOSPC, where)
    append(owned.store, "t", 0, b"x")
    owned.urgent.wants_checkpoint = True
    owned.settle()
    assert not owned.urgent.wants_checkpoint, "it was taken up"
    noted = owned.store.checkpoint
    files_of(owned).heal()
    owned.clock.advance(RETRY_MS)
    owned.settle()
    assert owned.store.checkpoint is not noted
    noted = owned.store.checkpoint
    owned.clock.advance(RETRY_MS)
    owned.settle()
    assert owned.store.checkpoint is noted, "one was enough"


# --- coverage of a checkpoint


def test_a_checkpoint_covers_what_there_was_when_it_began() -> None:
    owned = owned_store()
    append(owned.store, "t", 0, b"before")
    end = owned.store.log.end
    sent = 0
    for _ in owned.writing():
        append(owned.store, "t", sent % 3, b"meanwhile")
        sent += 1
    append(owned.store, "new", 0, b"later")
    owned.flush(Pieces(1))
    owned.sync()
    assert owned.store.checkpoint.recovery_offset == recovery_offset(files_of(owned)) == end
    for style in ("nothing", "everything"):
        store, recovered = after_power_cut(files_of(owned), style)
        assert (recovered.start, recovered.records, recovered.rebuilt) == (end, sent + 1, False)
        assert list(problems(store)) == []


def test_a_checkpoint_waits_for_the_flush_of_what_it_covers() -> None:
    owned = owned_store()
    append(owned.store, "t", 0, b"x")
    owned.step()
    assert owned.workers.held(Lane.FLUSH) == 1
    assert not owned.workers.held(Lane.FILES)
    owned.workers.run_one(Lane.FLUSH)
    owned.step()
    assert owned.workers.held(Lane.FILES) == 1


def test_where_nothing_is_new_there_is_no_checkpoint() -> None:
    owned = owned_store()
    owned.urgent.note = lambda: b"the same"  # type: ignore[method-assign]
    append(owned.store, "t", 0, b"x")
    owned.settle()
    operations = len(files_of(owned).operations)
    for _ in range(10):
        owned.clock.advance(10_000)
        owned.settle()
    assert len(files_of(owned).operations) == operations
    append(owned.store, "t", 0, b"x")
    owned.clock.advance(10_000)
    owned.settle()
    assert len(files_of(owned).operations) > operations


def test_where_nothing_is_appended_notes_are_made_once_in_an_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without appends notes are made once per interval, although the disk gets checkpoints more often soon after a
    start."""
    owned = owned_store(config=DurabilityConfig(flush_interval=0.5, queue_interval=1.0))
    made: list[None] = []

    def note() -> bytes:
        made.append(None)
        return b""

    monkeypatch.setattr(owned.urgent, "note", note)
    owned.settle()
    made.clear()
    for _ in range(100):
        owned.clock.advance(100)
        owned.settle()
    assert 5 < len(made) <= 12
    append(owned.store, "t", 0, b"x")
    for _ in range(10):
        owned.clock.advance(100)
        owned.settle()
    assert owned.store.checkpoint.recovery_offset == owned.store.log.end


def test_after_a_start_checkpoints_come_soon_and_then_less_often() -> None:
    owned = owned_store(config=DurabilityConfig(flush_interval=0.5, queue_interval=0.25))
    found: list[float] = []
    tick_ms = 10
    begun = owned.clock.monotonic()
    for _ in range(25_000 // tick_ms):
        append(owned.store, "t", 0, b"x")
        before = owned.store.checkpoint
        owned.settle()
        if owned.store.checkpoint is not before:
            found.append(round(owned.clock.monotonic() - begun, 3))
        owned.clock.advance(tick_ms)
    assert found[0] == 0.0
    gaps = [after - before for before, after in pairwise(found)]
    expected = [0.25, 0.5, 1.0, 2.0, 4.0, 5.0, 5.0, 5.0]
    assert expected[0] == FIRST_CHECKPOINT_SECONDS
    assert len(gaps) <= len(expected)
    for gap, ideal in zip(gaps, expected, strict=False):
        assert ideal <= gap <= ideal + 0.25, f"{gaps}: within the interval at which queues are written"


def test_each_start_after_a_kill_reads_only_what_the_life_before_wrote_last() -> None:
    files = SimulatedFiles()
    for life in range(12):
        store, recovered = reopened(files)
        assert recovered.records <= 30 * (life > 0), "what was written since 0.25 s after the start"
        owned = OwnedStore(store, ManualClock(), config=DurabilityConfig(flush_interval=0.5, queue_interval=1.0))
        for _ in range(300 // 5):
            append(store, "t", 0, b"x", b"y")
            owned.settle()
            owned.clock.advance(5)


def test_a_checkpoint_comes_sooner_where_much_was_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, "CHECKPOINT_BYTES", 10_000)
    owned = owned_store(config=DurabilityConfig(flush_interval=0.5, queue_interval=0.1))
    for _ in range(30):
        owned.clock.advance(1000)
        append(owned.store, "t", 0, b"x")
        owned.settle()
    before = owned.store.checkpoint
    append(owned.store, "t", 0, bytes(3000))
    owned.clock.advance(300)
    owned.settle()
    assert owned.store.checkpoint is before
    for _ in range(4):
        append(owned.store, "t", 0, bytes(3000))
    owned.clock.advance(300)
    owned.settle()
    assert owned.store.checkpoint.recovery_offset == owned.store.log.end


# --- topics that are removed


class Removal:
    """A removal of a topic, and its outcome."""

    def __init__(self, owned: OwnedStore, topic: str) -> None:
        self.results: list[Exception | None] = []
        owned.durability.remove_topic(topic, self.results.append)


def test_a_topic_that_is_not_there_is_gone_at_once() -> None:
    owned = owned_store()
    assert Removal(owned, "none").results == [None]
    assert not owned.workers.jobs


def test_a_topic_may_go_while_a_checkpoint_of_its_files_runs() -> None:
    owned = owned_store()
    append(owned.store, "t", 0, b"x")
    append(owned.store, "u", 0, b"x")
    for _ in owned.writing():
        pass
    removal = Removal(owned, "t")
    assert removal.results == []
    assert owned.workers.held(Lane.FILES) == 2, "one behind the other"
    owned.settle()
    assert removal.results == [None]
    assert owned.workers.failures == []
    assert owned.store.health.verdict is Verdict.HEALTHY
    assert files_of(owned).list(QUEUES) == ["u"]
    append(owned.store, "u", 0, b"y")
    owned.checkpoint()


def test_a_topic_may_go_while_a_checkpoint_of_its_files_fails() -> None:
    owned = owned_store()
    append(owned.store, "t", 0, b"x")
    append(owned.store, "u", 0, b"x")
    for _ in owned.writing():
        pass
    removal = Removal(owned, "t")
    files_of(owned).fail("open", errno.EMFILE, QUEUES)
    assert owned.workers.run_one(Lane.FILES)
    assert len(owned.workers.failures) == 1
    files_of(owned).heal()
    owned.settle()
    assert removal.results == [None]
    owned.clock.advance(RETRY_MS)
    owned.checkpoint()
    assert owned.poison is None
    assert files_of(owned).list(QUEUES) == ["u"]


def test_a_removal_whose_sync_fails_is_the_end() -> None:
    owned = owned_store()
    append(owned.store, "t", 0, b"x")
    owned.checkpoint()
    removal = Removal(owned, "t")
    files_of(owned).fail("sync", errno.EIO, QUEUES)
    owned.workers.run(Lane.FILES)
    assert [type(error) for error in removal.results] == [NotDurable]
    assert "removing a topic failed" in (owned.poison or "")
    assert_dead(owned)


def test_two_removals_of_a_topic_may_fail() -> None:
    owned = owned_store()
    files = files_of(owned)
    append(owned.store, "t", 0, b"old")
    owned.checkpoint()
    files.fail("remove", errno.EACCES, f"{QUEUES}/t")
    for body in (b"older", b"new"):
        removal = Removal(owned, "t")
        append(owned.store, "t", 0, body)
        owned.settle()
        assert [type(error) for error in removal.results] == [PermissionError]
    files.heal()
    for _ in range(2):
        owned.expire()
    assert owned.store.ensure_queue("t", 0).written_offset == 1
    assert bodies(owned.store, "t") == [b"new"]


@pytest.mark.parametrize("pieces", range(12))
def test_a_topic_may_go_at_any_step_of_a_checkpoint(pieces: int) -> None:
    owned = owned_store()
    for name in "tuv":
        append(owned.store, name, 0, b"x")
        append(owned.store, name, 1, b"x")
    writing = owned.writing()
    for _ in range(pieces):
        next(writing, None)
    removal = Removal(owned, "u")
    for _ in writing:
        pass
    owned.settle()
    owned.checkpoint()
    assert removal.results == [None]
    assert owned.workers.failures == []
    assert files_of(owned).list(QUEUES) == ["t", "v"]
    store, recovered = after_power_cut(files_of(owned), "everything")
    assert recovered.records == 0
    assert sorted(store.queues) == ["t", "v"]


def test_a_topic_that_is_made_again_at_once_keeps_its_units_in_memory_until_the_old_files_are_gone() -> None:
    owned = owned_store()
    append(owned.store, "t", 0, b"old", b"older")
    owned.checkpoint()
    removal = Removal(owned, "t")
    append(owned.store, "t", 0, b"new")
    queue = owned.store.ensure_queue("t", 0)
    assert queue.next_offset == 1
    old = files_of(owned).names[f"{QUEUES}/t/0/{0:020}"]
    for _ in range(10):
        owned.step()
        owned.workers.run(Lane.FLUSH)
        owned.clock.advance(100)
    assert removal.results == []
    assert files_of(owned).names[f"{QUEUES}/t/0/{0:020}"] is old
    assert queue.written_offset == 0
    owned.settle()
    assert removal.results == [None]
    owned.clock.advance(RETRY_MS)
    owned.checkpoint()
    assert queue.written_offset == 1
    store, recovered = after_power_cut(files_of(owned))
    assert recovered.records == 0
    assert bodies(store, "t") == [b"new"]


def bodies(store: MessageStore, topic: str, queue_id: int = 0) -> list[bytes]:
    """The bodies that a consumer reads from a queue."""
    queue = store.queue(topic, queue_id)
    if queue is None:
        return []
    units = [queue.unit(offset) for offset in range(queue.min_offset, queue.next_offset)]
    messages = [store.message_at(unit[0], unit[1]) if unit is not None else None for unit in units]
    return [message.body if message is not None else b"?" for message in messages]


@pytest.mark.parametrize("removing", ["held", "failing"])
def test_no_checkpoint_is_ahead_of_units_that_wait_for_old_files_to_go(removing: str) -> None:
    """No checkpoint is ahead of units that wait for old files to go, or the start after it would not find acknowledged
    messages."""
    owned = owned_store()
    files = files_of(owned)
    append(owned.store, "t", 0, b"old", b"older")
    owned.checkpoint()
    if removing == "failing":
        files.fail("remove", errno.EACCES, f"{QUEUES}/t")
    Removal(owned, "t")
    append(owned.store, "t", 0, b"new")
    append(owned.store, "u", 0, b"other")
    for _ in range(20):
        owned.clock.advance(1000)
        assert owned.flush()
        if removing == "failing":
            owned.workers.run(Lane.FILES)
    for style in ("nothing", "everything"):
        store, _ = after_power_cut(files, style)
        assert bodies(store, "t") == [b"new"]
        assert bodies(store, "u") == [b"other"]
    files.heal()
    owned.expire()
    owned.expire()
    assert owned.store.checkpoint.recovery_offset == owned.store.log.end
    store, recovered = after_power_cut(files)
    assert recovered.records == 0
    assert bodies(store, "t") == [b"new"]


def test_a_removal_that_fails_is_told_and_tried_again() -> None:
    owned = owned_store()
    files = files_of(owned)
    append(owned.store, "t", 0, b"old")
    owned.checkpoint()
    files.fail("remove", errno.EACCES, f"{QUEUES}/t")
    removal = Removal(owned, "t")
    owned.settle()
    assert [type(error) for error in removal.results] == [PermissionError]
    assert owned.store.health.verdict is Verdict.HEALTHY
    append(owned.store, "t", 0, b"new")
    for _ in range(3):
        owned.expire()
        assert files.list(QUEUES) == ["t"]
    files.heal()
    owned.expire()
    owned.expire()
    assert owned.store.ensure_queue("t", 0).written_offset == 1
    assert removal.results[1:] == [], "whoever removed it has an answer already"
    assert owned.store.health.verdict is Verdict.HEALTHY


@pytest.mark.parametrize("seed", range(30))
def test_a_topic_may_go_and_come_many_times(seed: int) -> None:
    """A topic may be removed and made again many times, while no, some or all removals of it fail."""
    chance = random.Random(seed)
    owned = owned_store()
    files = files_of(owned)
    append(owned.store, "another", 0, b"x")
    expected: list[bytes] = []
    for number in range(30):
        action = chance.random()
        if action < 0.4:
            expected.append(b"%d" % number)
            append(owned.store, "t", 0, expected[-1])
        elif action < 0.6:
            Removal(owned, "t")
            expected = []
        elif action < 0.7:
            files.fail("remove", errno.EBUSY, f"{QUEUES}/t")
        elif action < 0.8:
            files.heal()
        elif action < 0.9:
            owned.step(Pieces(chance.randrange(1, 4)))
        else:
            owned.workers.run_one()
        owned.clock.advance(chance.choice((1, 500, 10_000)))
    assert bodies(owned.store, "t") == expected
    files.heal()
    owned.settle()
    for _ in range(2):
        owned.expire()
    append(owned.store, "another", 0, b"the last one, or the start would read again what was in the topic")
    owned.checkpoint()
    assert bodies(owned.store, "t") == expected
    store, recovered = after_power_cut(files)
    assert recovered.records == 0
    assert bodies(store, "t") == expected


def send_until_full(owned: OwnedStore) -> tuple[int, str]:
    """Send one message per second until one is refused; return the number accepted and the text of the refusal."""
    for sent in range(100):
        try:
            append(owned.store, "t", sent % 3, b"%d" % sent)
        except StoreFull as error:
            return sent, str(error)
        owned.clock.advance(RETRY_MS)
        owned.settle()
    raise AssertionError("all were taken")


def test_units_that_wait_for_old_files_to_go_are_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, "MAX_TAIL_BYTES", 20 * 10)
    owned = owned_store()
    append(owned.store, "t", 0, b"old")
    owned.checkpoint()
    files_of(owned).fail("remove", errno.EACCES, f"{QUEUES}/t")
    Removal(owned, "t")
    sent, reason = send_until_full(owned)
    assert 10 <= sent <= 12
    assert "former files of a topic are still there" in reason
    files_of(owned).heal()
    owned.expire()
    owned.expire()
    append(owned.store, "t", 0, b"goes on")


# --- files that expire


class Keeper:
    """A `CheckpointPart` of the owner of durability that needs the commitlog from a position on, and keeps some
    messages."""

    def __init__(self, store: MessageStore) -> None:
        self.store = store
        self.needed = 2**62
        self.to_keep = 0
        self.error: Exception | None = None
        self.wants_checkpoint = False
        self.limits: list[int] = []

    def note(self) -> bytes:
        return b""

    def begin_write(self) -> None:
        pass

    def write_next(self, now: Moment) -> bool:
        return False

    def plan_sync(self, now: Moment, *, is_last: bool) -> Callable[[], None]:
        return lambda: None

    def plan_after(self) -> Callable[[], None]:
        return lambda: None

    def needed_from(self) -> int:
        return self.needed

    def keep_next(self, limit: int, now: Moment) -> bool | None:
        self.limits.append(limit)
        if self.error is not None:
            raise self.error
        if not self.to_keep:
            return None
        self.to_keep -= 1
        append(self.store, "kept", 0, b"kept", now_ms=now.wall_ms)
        return True

    def expire_next(self) -> list[str] | None:
        return None


def aged(**settings: Any) -> tuple[OwnedStore, Keeper]:
    """A store with ten files that are old enough to go, none of which is flushed or covered."""
    store = make_store("/s", SimulatedFiles(), segment_size=SEGMENT)
    store.open()
    keeper = Keeper(store)
    owned = OwnedStore(store, ManualClock(), {"keeper": keeper}, retention=ALWAYS_GOES, **settings)
    while store.log.end < 9 * SEGMENT + 100:
        append(store, "t", 0, bytes(3000))
    return owned, keeper


def test_no_file_goes_that_recovery_would_read() -> None:
    owned, _ = aged()
    owned.step()
    assert owned.store.log.begin == 0, "no checkpoint covers anything"
    owned.workers.run(Lane.FLUSH)
    owned.clock.advance(int(EXPIRE_SECONDS * 1000))
    owned.step()
    assert owned.store.log.begin == 0, "the job of the checkpoint has not run"
    covered = owned.store.log.end
    owned.workers.run(Lane.FILES)
    for _ in range(6):
        append(owned.store, "t", 0, bytes(3000))
    owned.clock.advance(int(EXPIRE_SECONDS * 1000))
    owned.step(UNLIMITED)
    assert 0 < owned.store.log.begin <= covered
    store, recovered = after_power_cut(files_of(owned), "everything")
    assert list(problems(store)) == []
    assert not recovered.rebuilt


@pytest.mark.parametrize("needed", [0, 1, SEGMENT, 3 * SEGMENT + 5])
def test_no_file_goes_that_a_part_needs(needed: int) -> None:
    owned, keeper = aged()
    keeper.needed = needed
    owned.checkpoint()
    for _ in range(3):
        owned.expire()
    assert owned.store.log.begin == needed // SEGMENT * SEGMENT
    keeper.needed = 2**62
    owned.expire()
    assert owned.store.log.begin > needed


def test_files_go_at_any_hour_on_request_also_when_something_is_kept_of_them_first() -> None:
    owned, keeper = aged()
    owned.retention.value = dataclasses.replace(ALWAYS_GOES, delete_when="")
    owned.checkpoint()
    keeper.to_keep = 3
    owned.expire()
    assert owned.store.log.begin == 0, "it is not the hour"
    owned.durability.expire_now(at_any_hour=True)
    for _ in range(3):
        owned.expire()
        owned.checkpoint()
    begin = owned.store.log.begin
    assert begin > 0
    owned.expire()  # nothing is left to go, so the hours count again
    while owned.store.log.end < begin + 9 * SEGMENT:
        append(owned.store, "t", 0, bytes(3000))
    owned.checkpoint()
    owned.expire()
    assert owned.store.log.begin == begin


def test_files_go_when_what_was_kept_of_them_is_durable() -> None:
    owned, keeper = aged()
    owned.checkpoint()
    keeper.to_keep = 3
    owned.clock.advance(int(EXPIRE_SECONDS * 1000))
    while owned.step() == 0:
        pass
    assert keeper.to_keep == 0
    assert set(keeper.limits) == {9 * SEGMENT}
    assert owned.store.log.begin == 0, "a power cut would take what was kept"
    assert len(files_of(owned).list(LOG)) == 10
    owned.settle()
    owned.flush()
    owned.expire()
    assert owned.store.log.begin == 9 * SEGMENT
    assert files_of(owned).list(LOG) == [f"{9 * SEGMENT:020}"]
    store, _ = after_power_cut(files_of(owned))
    assert bodies(store, "kept") == [b"kept"] * 3


@pytest.mark.parametrize("error", [OSError(errno.EIO, "unreadable"), StoreError("no"), StoreFull("full")])
def test_files_stay_where_what_is_needed_of_them_cannot_be_kept(error: Exception) -> None:
    owned, keeper = aged()
    owned.checkpoint()
    keeper.error = error
    with capture_logs() as lines:
        owned.expire()
    assert [line["event"] for line in lines if line["event"] == "nothing_expired"]
    assert owned.store.log.begin == 0
    assert owned.store.health.verdict is Verdict.HEALTHY
    keeper.error = None
    owned.expire()
    assert owned.store.log.begin == 9 * SEGMENT


def test_files_that_cannot_be_removed_harm_nobody() -> None:
    owned, _ = aged()
    owned.checkpoint()
    files_of(owned).fail("remove", errno.EIO, LOG)
    owned.expire()
    assert owned.store.log.begin == 9 * SEGMENT
    assert len(files_of(owned).list(LOG)) == 10
    append(owned.store, "t", 0, b"x")
    owned.checkpoint()
    store, recovered = reopened(files_of(owned))
    assert is_clean(store, recovered)
    again = OwnedStore(store, owned.clock, {"keeper": Keeper(store)}, retention=ALWAYS_GOES)
    again.checkpoint()
    again.expire()
    assert len(files_of(again).list(LOG)) == 1, "the next start finds them"


def test_what_waits_is_kept_beyond_the_watermark_too() -> None:
    """Waiting messages are kept beyond the watermark too, or no file would go and no message be accepted ever again."""
    owned, keeper = aged()
    owned.checkpoint()
    files_of(owned).used = 0.95
    keeper.to_keep = 3
    owned.expire()
    with pytest.raises(StoreFull):
        append(owned.store, "t", 0, b"x")
    assert (keeper.to_keep, owned.store.log.begin) == (0, 0), "not durable yet"
    owned.checkpoint()
    owned.expire()
    assert owned.store.log.begin > 0
    with pytest.raises(StoreFull):
        append(owned.store, "t", 0, b"x")


def test_a_file_that_cannot_be_removed_leaves_no_gap() -> None:
    """A file that cannot be removed leaves no gap: the files behind it stay until it is gone, whatever expires
    meanwhile; files in other directories go."""
    owned, keeper = aged()
    keeper.needed = 3 * SEGMENT
    owned.checkpoint()
    files = files_of(owned)
    files.fail("remove", errno.EPERM, f"{LOG}/{SEGMENT:020}")
    owned.expire()
    assert files.list(LOG)[0] == f"{SEGMENT:020}"
    keeper.needed = 6 * SEGMENT
    files.fail("remove", errno.EPERM, f"{LOG}/{SEGMENT:020}")
    owned.expire()
    assert owned.store.log.begin == 6 * SEGMENT
    assert [int(name) for name in files.list(LOG)] == [base * SEGMENT for base in range(1, 10)]
    assert reopened(files)[0].log.begin == SEGMENT, "a start may come at any moment"
    owned.expire()
    assert [int(name) for name in files.list(LOG)] == [base * SEGMENT for base in range(6, 10)]


@pytest.mark.parametrize("seed", sampled(range(60), range(7)))
def test_files_may_go_at_any_moment_and_a_power_cut_may_follow(seed: int) -> None:
    chance = random.Random(seed)
    owned, keeper = aged()
    files = files_of(owned)
    for _ in range(120):
        action = chance.random()
        if action < 0.3:
            append(owned.store, "t", 0, bytes(chance.choice((10, 3000))))
        elif action < 0.4:
            keeper.to_keep += 1
        elif action < 0.8:
            owned.step(Pieces(chance.randrange(1, 5)))
        else:
            owned.workers.run_one()
        owned.clock.advance(chance.choice((1, 1000, 10_000)))
        style = chance.choice(("nothing", "some", "everything"))
        store, recovered = reopened(files.after_crash(len(files.operations), chance, style))
        assert recovered.end >= owned.durability.released
        assert not recovered.rebuilt
        assert store.log.begin <= owned.store.log.begin
        # Names whose removal was not durable return: those of the commitlog's files rather than those of the queues'.
        store.log.drop_before(owned.store.log.begin)
        store.log.note_flushed(store.log.end, 0)
        for queue in store.all_queues():
            queue.advance_min(store.log.begin)
        assert list(problems(store)) == []
    keeper.to_keep = 0
    owned.settle()
    for _ in range(2):
        owned.expire()
    assert owned.store.log.begin > 0


# --- queues that cannot be written


def test_consume_queues_that_cannot_be_written_fill_the_memory_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, "MAX_TAIL_BYTES", 20 * 10)
    owned = owned_store()
    owned.checkpoint()
    files_of(owned).fail("write", errno.ENOSPC, QUEUES)
    sent, reason = send_until_full(owned)
    assert 10 <= sent <= 12
    assert "the consume queues cannot be written" in reason
    assert owned.flush(), "what was taken before is released all the same"
    owned.clock.advance(RETRY_MS)
    owned.settle()
    with pytest.raises(StoreFull):
        append(owned.store, "t", 0, b"x")
    files_of(owned).heal()
    owned.clock.advance(RETRY_MS)
    owned.settle()
    append(owned.store, "t", 0, b"x")
    owned.checkpoint()
    store, recovered = after_power_cut(files_of(owned))
    assert is_clean(store, recovered)
    assert sum(queue.next_offset for queue in store.all_queues()) == sent + 1


def test_a_store_is_full_as_long_as_either_disk_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, "MAX_TAIL_BYTES", 20)
    owned = owned_store(retention=RetentionConfig(delete_when="", clean_forcibly=False))
    owned.checkpoint()
    files = files_of(owned)
    append(owned.store, "t", 0, b"x", b"y")
    files.fail("write", errno.ENOSPC, QUEUES)
    files.used = 0.95
    owned.expire()
    files.used = 0.5
    owned.expire()
    with pytest.raises(StoreFull, match="consume queues"):
        append(owned.store, "t", 0, b"x")
    files.used = 0.95
    owned.expire()
    files.heal()
    owned.clock.advance(RETRY_MS)
    owned.settle()
    with pytest.raises(StoreFull, match="95% full"):
        append(owned.store, "t", 0, b"x")
    files.used = 0.5
    owned.expire()
    append(owned.store, "t", 0, b"x")


# --- the end


@pytest.mark.parametrize("pieces", range(14))
@pytest.mark.parametrize("jobs", ["held", "run"])
def test_a_stop_is_clean_in_whatever_the_store_is_about(pieces: int, jobs: str) -> None:
    owned, keeper = aged()
    files = files_of(owned)
    owned.checkpoint()
    keeper.to_keep = 2
    append(owned.store, "u", 0, b"x")
    append(owned.store, "v", 0, b"x")
    owned.clock.advance(int(EXPIRE_SECONDS * 1000))
    removal = Removal(owned, "v")
    append(owned.store, "v", 0, b"again")
    for _ in range(pieces):
        owned.step(Pieces(1))
        if jobs == "run":
            owned.workers.run_one()
    append(owned.store, "u", 0, b"y")
    owned.durability.stop()
    with pytest.raises(StoreClosed):
        append(owned.store, "u", 0, b"z")
    stages = 0
    while not owned.ends:
        owned.step(Pieces(1))
        stages += 1
        assert stages < 100
        if stages % 2:
            owned.workers.run_one()
    assert owned.ends == [None]
    assert removal.results == [None]
    assert not owned.workers.jobs, "nothing goes on after the end"
    assert owned.step() is None
    assert owned.releases[-1] == owned.store.log.end
    assert not files.exists("/s/abort")
    for image in (files, files.after_crash(len(files.operations), random.Random(0), "nothing")):
        store, recovered = reopened(image)
        assert (recovered.records, recovered.torn, recovered.rebuilt) == (0, None, False)
        assert bodies(store, "u") == [b"x", b"y"]
        assert bodies(store, "v") == [b"again"]


STOP_FAILURES: list[tuple[Call, int, str]] = [
    ("sync", errno.EIO, LOG),
    ("sync", errno.EIO, QUEUES),
    ("sync", errno.EIO, CHECKPOINT),
    ("write", errno.EIO, QUEUES),
    ("write", errno.ENOSPC, QUEUES),
    ("write", errno.ENOSPC, CHECKPOINT),
    ("open", errno.EMFILE, CHECKPOINT),
    ("remove", errno.EIO, "/s/abort"),
]


@pytest.mark.parametrize(("call", "number", "where"), STOP_FAILURES)
def test_a_stop_on_a_failing_disk_ends_and_the_next_start_recovers(call: Call, number: int, where: str) -> None:
    owned = owned_store()
    files = files_of(owned)
    append(owned.store, "t", 0, b"x")
    owned.checkpoint()
    append(owned.store, "t", 0, b"y")
    append(owned.store, "u", 0, b"z")
    files.fail(call, number, where)
    with pytest.raises((OSError, StoreError)):
        owned.stop()
    assert (owned.poison is not None) == (number == errno.EIO)
    assert files.exists("/s/abort")
    store, _ = reopened(files)
    assert list(problems(store)) == []
    assert (bodies(store, "t"), bodies(store, "u")) == ([b"x", b"y"], [b"z"])


def test_a_flush_that_cannot_begin_at_a_stop_is_tried_again() -> None:
    owned = owned_store()
    files = files_of(owned)
    append(owned.store, "t", 0, b"x")
    files.fail("open", errno.EMFILE, LOG)
    owned.durability.stop()
    for turn in range(20):
        wait = owned.step()
        while owned.workers.run_one():
            pass
        if owned.ends:
            break
        assert wait is not None
        owned.clock.advance(RETRY_MS)
        if turn == 5:
            files.heal()
    assert owned.ends == [None]
    assert turn > 5
    assert not files.exists("/s/abort")


def test_a_stop_ends_also_where_no_flush_can_begin() -> None:
    """A stop ends even if no flush can begin: no message acknowledged by a flush is lost, and the others are in the
    files as long as the power is on."""
    owned = owned_store()
    files = files_of(owned)
    append(owned.store, "t", 0, b"x")
    files.fail("open", errno.EMFILE, LOG)
    owned.durability.stop()
    for _ in range(3 * STOP_TRIES):
        owned.step()
        while owned.workers.run_one():
            pass
        owned.clock.advance(RETRY_MS)
    (end,) = owned.ends
    assert len(owned.workers.failures) == STOP_TRIES
    assert isinstance(end, OSError)
    assert end.errno == errno.EMFILE
    assert owned.step() is None
    assert files.exists("/s/abort")
    store, _ = reopened(files)
    assert bodies(store, "t") == [b"x"]


def test_a_stop_tries_again_to_remove_what_could_not_be() -> None:
    owned = owned_store()
    files = files_of(owned)
    append(owned.store, "t", 0, b"old")
    owned.checkpoint()
    files.fail("remove", errno.EBUSY, f"{QUEUES}/t")
    removal = Removal(owned, "t")
    owned.settle()
    assert isinstance(removal.results[0], OSError)
    append(owned.store, "t", 0, b"new")
    files.heal()
    owned.stop()
    assert not files.exists("/s/abort")
    store, recovered = reopened(files)
    assert recovered.records == 0
    assert bodies(store, "t") == [b"new"]


def test_a_poisoned_store_is_left_as_it_is() -> None:
    owned = owned_store()
    files = files_of(owned)
    append(owned.store, "t", 0, b"x")
    files.fail("sync", errno.EIO, LOG)
    assert not owned.flush()
    files.heal()
    operations = len(files.operations)
    with pytest.raises(StoreBroken):
        owned.stop()
    assert len(files.operations) == operations
    assert files.exists("/s/abort")


def test_a_store_that_was_poisoned_just_before_the_stop_is_left_as_it_is() -> None:
    """A store poisoned just before the stop is left as it is, although no step has run since."""
    owned = owned_store()
    files = files_of(owned)
    append(owned.store, "t", 0, b"x")
    files.fail("write", errno.EIO, LOG)
    with pytest.raises(StoreBroken):
        append(owned.store, "t", 0, b"y")
    files.heal()
    operations = len(files.operations)
    with pytest.raises(StoreBroken):
        owned.stop()
    assert owned.poison is not None
    assert len(files.operations) == operations
    assert files.exists("/s/abort")


def test_what_poisons_during_a_stop_ends_it() -> None:
    owned = owned_store()
    append(owned.store, "t", 0, b"x")
    owned.durability.stop()
    owned.step()
    files_of(owned).fail("sync", errno.EIO, LOG)
    owned.workers.run(Lane.FLUSH)
    assert owned.poison is not None
    assert [type(end) for end in owned.ends] == [StoreBroken]
    assert owned.step() is None
    assert files_of(owned).exists("/s/abort")


def test_a_stop_waits_for_old_files_to_go() -> None:
    owned = owned_store()
    append(owned.store, "t", 0, b"old")
    owned.checkpoint()
    removal = Removal(owned, "t")
    append(owned.store, "t", 0, b"new")
    owned.durability.stop()
    for _ in range(5):
        owned.step()
        assert owned.ends == []
    owned.settle()
    assert (removal.results, owned.ends) == ([None], [None])
    store, recovered = reopened(files_of(owned))
    assert recovered.records == 0
    assert bodies(store, "t") == [b"new"]


def test_a_stop_does_not_pass_over_a_topic_whose_old_files_do_not_go() -> None:
    owned = owned_store()
    files = files_of(owned)
    append(owned.store, "t", 0, b"old", b"older")
    owned.checkpoint()
    files.fail("remove", errno.EACCES, f"{QUEUES}/t")
    Removal(owned, "t")
    append(owned.store, "t", 0, b"new")
    owned.settle()
    with pytest.raises((OSError, StoreError)):
        owned.stop()
    assert files.exists("/s/abort")
    store, _ = reopened(files)
    assert bodies(store, "t") == [b"new"]


# --- everything at once


TOPICS = "abc"
FAULTS: list[tuple[Call, int, str]] = [
    ("open", errno.EMFILE, "/s"),
    ("open", errno.EMFILE, LOG),
    ("write", errno.ENOSPC, QUEUES),
    ("write", errno.ENOSPC, CHECKPOINT),
    ("write", errno.ENOSPC, "/s"),
    ("name", errno.ENOSPC, QUEUES),
    ("remove", errno.EBUSY, QUEUES),
    ("remove", errno.EBUSY, f"{QUEUES}/a/0"),
]
POISONS: list[tuple[Call, int, str]] = [
    ("sync", errno.EIO, LOG),
    ("sync", errno.EIO, QUEUES),
    ("sync", errno.EIO, "/s"),
    ("write", errno.EIO, "/s"),
]


class Life:
    """A store in which any events may happen in any order, with a model: the messages sent to each queue since its
    topic was made, each with its end in the commitlog."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.files = SimulatedFiles()
        self.sent: dict[tuple[str, int], list[tuple[bytes, int]]] = {}
        self.number = 0
        self.going: Counter[str] = Counter()
        """Topics with the number of their unfinished removals."""
        self.open()

    def open(self) -> None:
        store, _ = reopened(self.files)
        config = DurabilityConfig(self.chance.choice((0.1, 0.5)), self.chance.choice((0.1, 1.0)))
        self.owned = OwnedStore(store, ManualClock(), config=config)
        # An unfinished removal of topics has no answer when the process ends, and is repeated by its caller. Recovery
        # may also have found records of a removed topic.
        found = {(queue.topic, queue.queue_id) for queue in store.all_queues()}
        again = set(self.going) | {topic for topic, _ in found - self.sent.keys()}
        self.going = Counter()
        for topic in sorted(again):
            self.remove(topic)
        self.is_poisoned = False
        self.noted = store.checkpoint

    def send(self) -> None:
        topic, queue_id = self.chance.choice(TOPICS), self.chance.randrange(2)
        batch = []
        for _ in range(self.chance.randrange(1, 4)):
            self.number += 1
            batch.append(b"%d " % self.number + bytes(self.chance.choice((0, 100, 1500))))
        try:
            append(self.owned.store, topic, queue_id, *batch)
        except StoreError:
            return
        end = self.owned.store.log.end
        self.sent.setdefault((topic, queue_id), []).extend((body, end) for body in batch)

    def remove(self, topic: str) -> None:
        self.going[topic] += 1
        going = self.going

        def done(error: Exception | None) -> None:
            if error is None:
                going.subtract((topic,))
                if not going[topic]:
                    del going[topic]

        self.owned.durability.remove_topic(topic, done)
        for queue_id in range(2):
            self.sent.pop((topic, queue_id), None)

    def act(self) -> None:
        chance, owned = self.chance, self.owned
        action = chance.random()
        if action < 0.3:
            self.send()
        elif action < 0.35:
            self.remove(chance.choice(TOPICS))
        elif action < 0.45:
            owned.wanted.raise_to(owned.store.log.end)
        elif action < 0.65:
            owned.step(chance.choice((UNLIMITED, Pieces(1), Pieces(3))))
        elif action < 0.85:
            owned.workers.run_one(chance.choice((Lane.FLUSH, Lane.FILES, None)))
        elif action < 0.88:
            self.files.fail(*chance.choice(FAULTS))
        elif action < 0.885:
            self.files.fail(*chance.choice(POISONS))
        elif action < 0.93:
            self.files.heal()
        else:
            owned.clock.advance(chance.choice((10, 300, 1000, 10_000)))

    def check(self) -> None:
        owned, store = self.owned, self.owned.store
        released = owned.durability.released
        assert owned.releases == sorted(set(owned.releases))
        assert released <= store.log.end
        if store.checkpoint is not self.noted:
            self.noted = store.checkpoint
            assert recovery_offset(self.files) == self.noted.recovery_offset
            assert recovery_offset(self.files) <= released
        if store.health.verdict is Verdict.POISONED and not self.is_poisoned:
            self.is_poisoned = True
            self.frozen = list(owned.releases), store.checkpoint, store.log.end
        if self.is_poisoned:
            assert (owned.releases, store.checkpoint, store.log.end) == self.frozen

    def check_image(self, files: SimulatedFiles, durable_to: int, *, is_kill: bool) -> None:
        """Check the state that a process finds when it opens the store."""
        store, recovered = reopened(files)
        assert recovered.end >= durable_to
        for (topic, queue_id), sent in self.sent.items():
            expected = [body for body, end in sent if is_kill or end <= durable_to]
            found = bodies(store, topic, queue_id)
            if expected:
                assert [body[:20] for body in found[: len(expected)]] == [body[:20] for body in expected]
                assert not is_kill or len(found) == len(expected)
        append(store, "a", 0, b"goes on")
        store.abandon()

    def stop(self) -> None:
        """Stop cleanly, or as far as the disk allows; faults stay for a while."""
        owned = self.owned
        owned.durability.stop()
        for turn in range(400):
            if owned.ends:
                break
            owned.step()
            owned.workers.run_one()
            self.check()
            owned.clock.advance(100)
            if turn == 100:
                self.files.heal()
        assert owned.ends
        assert self.files.exists("/s/abort") == (owned.ends[0] is not None)
        owned.store.abandon()


@pytest.mark.parametrize("seed", sampled(range(200), range(20)))
def test_whatever_happens_in_whatever_order(seed: int) -> None:
    life = Life(seed)
    for turn in range(300):
        life.act()
        life.check()
        if turn % 20 == 19:
            released, operations = life.owned.durability.released, len(life.files.operations)
            for style in ("nothing", "some", "everything"):
                image = life.files.after_crash(operations, life.chance, style)
                life.check_image(image, released, is_kill=style == "everything")
        chance = life.chance.random()
        if chance < 0.004:
            life.open()
        elif chance < 0.008:
            life.stop()
            life.open()
