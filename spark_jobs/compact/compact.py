"""Compacting: makes a new store from an old one, without records that will never be read again.

    1. scan      the kind of each record                 a task per range    `compact.scan`
    2. decide    which records stay, by the store's      a task per range    `compact.decide`, `compact.state`,
                 files of progress                                           `compact.deleted`
                 records about which those files         a task per range    `compact.lost`; if there may be any
                 are wrong
    3. lay out   their new offsets                       from sums alone     `writers.layout`
    4. write     commitlog; consume queues, index,       a task per range,   `writers.commitlog`, `queues`, `index`,
                 timer files, checkpoint, config         queues, or file     `timers`
    5. finish    sync, and rename                        in one step         `writers.new_directory`

The old store is only read. Records keep their bytes except the physical offset and the origin; queues keep their queue
offsets. `writers.queues` describes how brokers treat the units of removed records.

The new commitlog begins at the second file's offset or later, never at 0. So units that stand for no record can always
point before it, and offset 0 is free to mean "no record".

Memory: arrays of delivered messages (8 bytes each), of messages waiting in the wheel (60 bytes each), of keys (41 bytes
for each message of a keyed topic), and for an index file up to 1.2 GB (60 bytes for each key); everything else takes a
few MiB in each task.

Keeps invariant 26 of ARCHITECTURE.md.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from duemq.protocol.topics import TIMER_TOPIC
from duemq.scheduler.levels import runs, service
from duemq.scheduler.timers.files.small_files import StartFacts
from duemq.scheduler.timers.index.sorted_offsets import is_among
from duemq.spark_jobs.audit.matching import BUCKET_BYTES
from duemq.spark_jobs.compact import decide, deleted, other_files, scan, state
from duemq.spark_jobs.compact import lost as compact_lost
from duemq.spark_jobs.compact.decide import Decided, DecideTask, MapTask
from duemq.spark_jobs.compact.deleted import Owners
from duemq.spark_jobs.compact.lost import MatchTask, ReadTask
from duemq.spark_jobs.compact.other_files import OtherFiles
from duemq.spark_jobs.compact.scan import Scanned, ScanTask
from duemq.spark_jobs.compact.state import DoneRules, StoreState
from duemq.spark_jobs.errors import JobError
from duemq.spark_jobs.store.local_files import reason, refuse_within
from duemq.spark_jobs.store.progress import read_progress
from duemq.spark_jobs.store.ranges import RANGE_SIZE, plan
from duemq.spark_jobs.store.store_files import QueueFile, StoreFiles
from duemq.spark_jobs.store.walks import Range
from duemq.spark_jobs.writers import commitlog, index, layout, queues, spill, timers
from duemq.spark_jobs.writers.commitlog import CopyTask
from duemq.spark_jobs.writers.layout import Layout
from duemq.spark_jobs.writers.new_directory import NewDirectory, held
from duemq.spark_jobs.writers.queues import QueueTask
from duemq.spark_jobs.writers.tasks import Runner, runner
from duemq.storage import file_names
from duemq.storage.durability import checkpoint
from duemq.storage.durability.checkpoint import Checkpoint
from duemq.storage.files import OsFiles
from duemq.storage.log.copies import UNITS
from duemq.storage.queues import index_file

if TYPE_CHECKING:
    from numpy.typing import NDArray

BytesDone = Callable[[int, int], None]
"""Called with the number of bytes done and their total."""

_HOUR_MS: Final = 3_600_000
_QUEUE_BYTES_A_TASK: Final = 24 << 20
_WRITTEN_ANEW: Final = {
    file_names.COMMITLOG,
    file_names.CONSUME_QUEUES,
    file_names.INDEX,
    file_names.TIMER_LOG,
    file_names.TIMER_WHEEL,
    file_names.CHECKPOINT,
    file_names.LOCK,
}
_LEFT_OUT: Final = {
    file_names.ABORT,
    file_names.ABORT + file_names.BACKUP,
    file_names.EPOCHS,
    file_names.QUEUE_CHECK,
    file_names.QUEUE_EXTENSIONS,
}


@dataclass(frozen=True)
class CompactOptions:
    """Which records are removed. By default delivered and cancelled scheduled messages, ended transactions, and the
    records of deleted topics."""

    reserved_hours: float | None = None
    """fileReservedTime: messages stored longer ago are removed too, unless they wait for delivery. None: they stay."""
    keyed_topics: tuple[str, ...] = ()
    """Topics that keep the newest message of each key, besides those whose attribute cleanup.policy is COMPACTION."""
    holes: bool = False
    """Whether messages of keyed topics may be removed from the middle of a queue; if not, only from its beginning, up
    to the first message that stays. Consumers of both brokers pass over the holes (see `writers.queues`). But once
    retention removes the two empty files that such a log begins with, a broker may take a queue to begin at a hole in
    the commitlog's oldest file: the messages before it in that file then count as expired somewhat earlier. And offsets
    found by time are inexact on Apache's brokers."""
    index: bool = True
    """Whether to make index files."""
    skip_damaged: bool = False
    """Whether to leave damaged stretches out of the new store, instead of refusing to compact."""
    range_size: int = RANGE_SIZE
    """Bytes of the commitlog for each task."""
    now_ms: int | None = None
    """The time from which `reserved_hours` count, ms since the epoch; None: now."""


@dataclass
class CompactResult:
    """The result of a compaction. Sizes in bytes; `disk_*`: bytes allocated on the disk by all files."""

    log_before: int = 0
    log_after: int = 0
    disk_before: int = 0
    disk_after: int = 0
    kept: int = 0
    """Number of records that stay."""
    removed: dict[str, int] = field(default_factory=dict)
    """Number of removed records, by reason (see `compact.decide`)."""
    removed_bytes: dict[str, int] = field(default_factory=dict)
    lost: int = 0
    """Number of scheduled messages that were kept although the broker has passed them, or no longer has them in its
    files: they were neither delivered nor cancelled."""
    superseded_kept: int = 0
    """Number of messages with a newer one of the same key that had to stay (see `CompactOptions.holes`)."""
    damaged: int = 0
    """Number of damaged stretches left out."""
    holes: int = 0
    """Number of units in the middle of queues that no longer stand for a record."""
    index_files: int = 0
    left_out: list[str] = field(default_factory=list)
    """Names in the store of FIFOs, sockets, devices and links to nothing, which are not in the new store."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds by step."""

    @property
    def saved(self) -> float:
        """Share of the commitlog that was removed, 0 to 1."""
        return 1 - self.log_after / self.log_before if self.log_before else 0.0


def compact(
    store_path: str,
    out_path: str,
    *,
    spark: Any = None,
    workers: int | None = None,
    options: CompactOptions | None = None,
    progress: BytesDone | None = None,
) -> CompactResult:
    """Compact a store that no broker has open into a new directory.

    Tasks run in Spark if a session is given, else in `workers` processes (1: in this one). Raises JobError; then there
    is no new store, and the old one is unchanged.
    """
    store = open_at_rest(store_path)
    refuse_within(store_path, out_path)
    new = NewDirectory(out_path)
    tasks = None
    try:
        new.begin()
        with held(store.local_path):
            tasks = runner(new, spark, workers)
            job = _Compaction(store, new, tasks, options or CompactOptions(), progress or (lambda done, total: None))
            return job.run()
    except JobError:
        raise
    except OSError as error:
        raise JobError(f"{error.filename or new.path}: {reason(error)}") from None
    finally:
        if tasks is not None:
            tasks.close()
        new.give_up()


def open_at_rest(store_path: str) -> StoreFiles:
    """Return a store on this machine that no broker has open and that the last one left in order. Raises JobError."""
    store = StoreFiles.open(store_path)
    if not store.is_local:
        raise JobError(f"{store_path}: compact a store, and restore one, on a local disk of the broker's machine")
    if store.is_running:
        raise JobError(f"{store_path}: a broker has this store open; stop it first")
    if not store.is_clean:
        raise JobError(f"{store_path}: its broker was not stopped in order; start it once and stop it, then try again")
    refuse_unknown_queues(store)
    return store


def refuse_unknown_queues(store: StoreFiles) -> None:
    """Raise JobError if a store has queues of an unknown kind."""
    for name in file_names.NOT_SUPPORTED:
        if store.names(name):
            raise JobError(f"{store.path}/{name}: queues of this kind are not understood; such a store stays as it is")


class _Compaction:
    """One run of a compaction."""

    def __init__(
        self, store: StoreFiles, new: NewDirectory, tasks: Runner, options: CompactOptions, report: BytesDone
    ) -> None:
        self._store = store
        self._new = new
        self._tasks = tasks
        self._options = options
        self._report = report
        self._ranges: list[Range] = []
        self._other_files = OtherFiles([], [])
        self._result = CompactResult()
        self._done = self._total = 0
        self._step_began = time.perf_counter()
        self._kept_done = np.empty(0, np.int64)
        """Physical offsets of records that must stay although they are done, and of the records that say that they are
        done."""
        self._delivered = self._deliveries = np.empty(0, np.int64)
        """Physical offsets of the delivered messages in `_kept_done`, and of their deliveries, which do not name
        them."""
        self._has_holes = False
        """Whether a kept message lies in a queue from whose middle others may be removed."""

    def run(self) -> CompactResult:
        store, result = self._store, self._result
        # First, since a link may be refused.
        names = [name for name in store.names("") if name not in _WRITTEN_ANEW and name not in _LEFT_OUT]
        self._other_files = other_files.find(store.local_path, names, self._new.path)
        result.left_out = self._other_files.left_out
        result.disk_before = disk_usage(store.local_path)
        self._ranges = plan(store, self._options.range_size)
        size = sum(part.end - part.start for part in self._ranges)
        self._new.need(size // 20)
        self._total = 2 * size
        store_state = state.read_store_state(store)
        self._step("books")
        owners = deleted.owners_of(store, store_state.checkpoint)
        scanned = self._scan(owners)
        result.log_before = sum(found.size for found in scanned)
        self._step("scan")
        decided = self._decide(store_state, owners, scanned)
        self._step("decide")
        laid_out = self._lay_out(decided)
        self._map(decided, laid_out)
        self._step("lay out")
        self._write_log(laid_out)
        self._step("write commitlog")
        self._write_queues(laid_out)
        self._step("write queues")
        index_ms = self._write_index(decided)
        self._step("write index")
        self._write_small(store_state, laid_out, scanned, decided, index_ms)
        self._new.finish()
        self._step("finish")
        result.disk_after = disk_usage(self._new.target)
        self._report(self._total, self._total)
        return result

    def _step(self, name: str) -> None:
        now = time.perf_counter()
        self._result.seconds[name] = round(now - self._step_began, 3)
        self._step_began = now

    def _advance(self, size: int) -> None:
        self._done += size
        self._report(min(self._done, self._total), self._total)

    # --- which records stay

    def _keyed_topics(self) -> tuple[str, ...]:
        found = set(self._options.keyed_topics)
        for name, config in self._store.table(file_names.TOPICS, "topicConfigTable").items():
            attributes = config.get("attributes") if isinstance(config, dict) else None
            policy = attributes.get("cleanup.policy") if isinstance(attributes, dict) else None
            if policy == "COMPACTION":
                found.add(str(name))
        return tuple(sorted(found))

    def _scan(self, owners: Owners) -> list[Scanned]:
        options = self._options
        cutoff = 0
        if options.reserved_hours is not None:
            now_ms = options.now_ms if options.now_ms is not None else int(time.time() * 1000)
            cutoff = now_ms - int(options.reserved_hours * _HOUR_MS)
        topics = self._keyed_topics()
        requests = [
            ScanTask(self._store, part, number, self._new.scratch, topics, cutoff, owners)
            for number, part in enumerate(self._ranges)
        ]
        scanned = self._tasks.run(
            scan.scan,
            requests,
            lambda found: self._advance(self._ranges[found.number].end - self._ranges[found.number].start),
        )
        damages = [damage for found in scanned for damage in found.damages]
        gaps = self._store.gaps()
        if (damages or gaps) and not self._options.skip_damaged:
            at, why = (damages[0].physical_offset, damages[0].reason) if damages else (gaps[0][0], gaps[0][2])
            raise JobError(
                f"{self._store.path}: damaged at {at} ({why}), {len(damages) + len(gaps)} stretches in all; to "
                "continue without what is damaged, give --skip-damaged (skip_damaged=True)"
            )
        self._result.damaged = len(damages) + len(gaps)
        return scanned

    def _decide(self, store_state: StoreState, owners: Owners, scanned: list[Scanned]) -> list[Decided]:
        scratch = self._new.scratch
        numbers = range(len(scanned))
        state.leave_for_tasks(store_state, scratch)
        decide.join_done(scratch, numbers)
        topics = [found.topics for found in scanned]
        spill.save(scratch, "deleted", deleted.deleted(scratch, topics, owners))
        young = [found.first_young for found in scanned if found.first_young >= 0]
        expired_before = young[0] if young else self._store.readable_end
        self._result.superseded_kept = decide.find_superseded(
            scratch,
            numbers,
            expired_before=expired_before,
            units_per_file=self._units_per_file(),
            holes=self._options.holes,
        )
        rules = DoneRules(
            store_state.levels,
            store_state.timers.enqueued if store_state.timers is not None else None,
            store_state.half_offset,
            store_state.op_offset,
            expired_before,
        )
        requests = [DecideTask(number, self._ranges[number].start, scratch, rules) for number in numbers]
        spill.save(scratch, "undelivered", np.empty(0, np.int64))
        decided = self._tasks.run(decide.decide, requests)
        if any(found.unnamed for found in decided):
            spill.save(scratch, "undelivered", self._find_undelivered(store_state))
            kept = sum(found.kept for found in decided)
            decided = self._tasks.run(decide.decide, requests)
            self._result.lost = sum(found.kept for found in decided) - kept
        return self._keep_anchors(store_state, decided)

    def _find_undelivered(self, store_state: StoreState) -> NDArray[np.int64]:
        """Return the physical offsets, ascending, of messages that neither wait by the store's files nor were delivered
        or cancelled by the records. Sets `_delivered` and `_deliveries` for the records that must stay."""
        store, scratch, count = self._store, self._new.scratch, len(self._ranges)
        progress = read_progress(store)
        buckets = max(1, sum(part.end - part.start for part in self._ranges) // BUCKET_BYTES)
        self._tasks.run(
            compact_lost.read,
            [ReadTask(store, part, number, scratch, progress, buckets) for number, part in enumerate(self._ranges)],
        )
        asked = np.unique(np.array([*store_state.anchors.values(), *store_state.forced.tolist()], np.int64))
        found = self._tasks.run(
            compact_lost.match_bucket, [MatchTask(bucket, count, scratch, asked) for bucket in range(buckets)]
        )
        self._delivered = np.concatenate([part.asked for part in found])
        self._deliveries = np.concatenate([part.deliveries for part in found])
        return np.sort(np.concatenate([part.undelivered for part in found]))

    def _keep_anchors(self, store_state: StoreState, decided: list[Decided]) -> list[Decided]:
        """Keep the last record of each queue of the schedule topic that keeps any record. For all records that must
        stay although they are done, also keep the records that say that they are done. The latter may be done
        themselves, since a message may have replaced another."""
        scratch, starts = self._new.scratch, [part.start for part in self._ranges]
        anchors = [at for level, at in store_state.anchors.items() if any(found.levels.get(level) for found in decided)]
        self._keep(decided, starts, anchors)
        done = np.unique(np.array([*anchors, *store_state.forced.tolist()], np.int64))
        while len(done):
            self._kept_done = np.union1d(self._kept_done, done)
            claimed = self._deliveries[is_among(self._delivered, done)]
            done = np.union1d(decide.done_by(scratch, range(len(decided)), done), claimed)
            done = done[~is_among(done, self._kept_done)]
            self._keep(decided, starts, done.tolist())
        result = self._result
        for found in decided:
            result.kept += found.kept
            for why, (count, size) in found.removed.items():
                result.removed[why] = result.removed.get(why, 0) + count
                result.removed_bytes[why] = result.removed_bytes.get(why, 0) + size
        return decided

    def _keep(self, decided: list[Decided], starts: list[int], physical: Iterable[int]) -> None:
        """Keep records, by their physical offsets, that were to be removed."""
        for offset in physical:
            kept = decide.keep_one(self._new.scratch, starts, offset)
            if kept is None:
                continue
            found = decided[kept.number]
            count, size = found.removed[kept.reason]
            removed = found.removed | {kept.reason: (count - 1, size - kept.size)}
            if count == 1:
                del removed[kept.reason]
            decided[kept.number] = found._replace(
                kept=found.kept + 1, kept_size=found.kept_size + kept.size, removed=removed
            )
            self._has_holes |= kept.is_message

    def _units_per_file(self) -> int:
        return next((file.size for file in self._store.queue_files()), UNITS.itemsize) // UNITS.itemsize

    # --- new offsets

    def _lay_out(self, decided: list[Decided]) -> Layout:
        store, scratch, size = self._store, self._new.scratch, self._store.segment_size
        begin = max(store.segments[0].first_offset, size)
        first = begin
        is_by_key = self._options.holes and self._result.removed.get("superseded")
        if is_by_key or self._has_holes or self._result.damaged:
            # Two files without records come first, for units that stand for no record: their offsets must lie behind
            # the start of the first file, or a broker that finds a queue's first message by binary search (5.3.3 does)
            # would skip others.
            first = begin + 2 * size
        laid_out = layout.lay_out(
            [(found.kept, found.kept_size) for found in decided],
            lambda number: decide.kept_sizes(scratch, number),
            size,
            first,
        )
        if first > begin:
            empty = [(start, size) for start in range(begin, first, size)]
            laid_out = laid_out._replace(begin=begin, markers=[*empty, *laid_out.markers])
        self._result.log_after = laid_out.end - first
        queue_bytes = sum(file.size for file in store.queue_files())
        index_bytes = index_file.FILE_SIZE // 20 + 48 * self._result.kept if self._options.index else 0
        self._new.need(laid_out.end - first + queue_bytes + index_bytes)
        return laid_out

    def _map(self, decided: list[Decided], laid_out: Layout) -> None:
        scratch = self._new.scratch
        spill.OffsetMap.make(scratch, self._result.kept)
        before = np.cumsum([0, *(found.kept for found in decided)]).tolist()
        self._tasks.run(
            decide.write_map,
            [
                MapTask(number, self._ranges[number].start, before[number], scratch, pieces)
                for number, pieces in enumerate(laid_out.pieces)
            ],
        )

    # --- writing

    def _write_log(self, laid_out: Layout) -> None:
        directory = self._new.join(file_names.COMMITLOG)
        size = self._store.segment_size
        commitlog.make_files(directory, laid_out, size)
        scratch, with_index = self._new.scratch, self._options.index
        requests = [
            CopyTask(self._store, number, self._ranges[number].start, scratch, directory, size, pieces, with_index)
            for number, pieces in enumerate(laid_out.pieces)
        ]
        share = self._total / 2 / max(1, self._result.log_after)
        self._tasks.run(commitlog.copy, requests, lambda written: self._advance(int(written * share)))

    def _write_queues(self, laid_out: Layout) -> None:
        by_queue: dict[tuple[str, int], list[QueueFile]] = {}
        for file in self._store.queue_files():
            by_queue.setdefault((file.topic, file.queue_id), []).append(file)
        groups: list[list[list[QueueFile]]] = []
        room = 0
        for files in by_queue.values():
            size = sum(file.size for file in files)
            if room < size or not groups:
                groups.append([])
                room = _QUEUE_BYTES_A_TASK
            groups[-1].append(files)
            room -= size
        directory = self._new.join(file_names.CONSUME_QUEUES)
        os.makedirs(directory, exist_ok=True)
        requests = [
            QueueTask(self._store, group, self._new.scratch, directory, laid_out.begin, self._store.segment_size)
            for group in groups
        ]
        self._result.holes = sum(written.holes for written in self._tasks.run(queues.write, requests))

    def _write_index(self, decided: list[Decided]) -> int:
        """Make the index files. Return the store time up to which they have all messages, ms since the epoch; 0 without
        any."""
        if not self._options.index:
            return 0
        scratch = self._new.scratch
        counts = [len(spill.load(scratch, f"{found.number}.items")) for found in decided]
        directory = self._new.join(file_names.INDEX)
        os.makedirs(directory, exist_ok=True)
        requests = index.plan(scratch, directory, counts, time.time())
        for request in requests:  # one at a time, for their memory
            self._tasks.run(index.write, [request])
        self._result.index_files = len(requests)
        with_items = [number for number, count in enumerate(counts) if count]
        return int(spill.load(scratch, f"{with_items[-1]}.items")["store_ms"][-1]) if with_items else 0

    def _write_small(
        self, store_state: StoreState, laid_out: Layout, scanned: list[Scanned], decided: list[Decided], index_ms: int
    ) -> None:
        new = self._new
        other_files.copy(self._store.local_path, self._other_files.copied, new.path)
        os.makedirs(new.join(file_names.CONFIG), exist_ok=True)
        # The old checkpoint's notes on consume queues are about the old files: the broker makes new ones.
        offsets = spill.OffsetMap(new.scratch)
        notes: dict[str, bytes] = {}
        level_note = runs.decode(store_state.checkpoint.notes.get(service.NAME, b""))
        if level_note is not None:
            delivered = self._kept(np.array(sorted(store_state.anchors.values()), np.int64), "delivered", offsets)
            seen = level_note.seen
            if seen is not None:
                seen = seen._replace(end=laid_out.end) if seen.end >= self._store.readable_end else None
            notes[service.NAME] = runs.encode(level_note.table_crc, level_note.runs, delivered.tolist(), seen)
        if store_state.timers is not None:
            newest = self._newest_timer(store_state, offsets)
            done, withdrawn = (self._kept(self._kept_done, name, offsets) for name in ("delivered", "withdrawn"))
            found = StartFacts(done=done, withdrawn=withdrawn)
            note = timers.write(new.path, store_state.timers, offsets, newest, laid_out.end, found)
            if note is not None:
                notes["timers"] = note.encode()
        else:
            for name in (file_names.TIMER_CHECK, file_names.TIMER_METRICS):
                OsFiles().remove(new.join(name))
        stored = [found.last_store_ms for found, of in zip(scanned, decided, strict=True) if of.kept]
        last_ms = max(stored, default=0)
        path = new.join(file_names.CHECKPOINT)
        if store_state.checkpoint.is_foreign:
            OsFiles().write_whole(path, checkpoint.encode_theirs(Checkpoint(last_ms, last_ms, index_ms)))
        else:
            checkpoint.save(OsFiles(), path, Checkpoint(last_ms, last_ms, index_ms, laid_out.end, notes))
        said = json.dumps({"end": laid_out.end}).encode()
        OsFiles().write_whole(new.join(file_names.COMPACTED), said)
        lock = self._store.read_whole(file_names.LOCK)
        if lock is not None:
            OsFiles().write_whole(new.join(file_names.LOCK), lock)

    def _kept(self, physical: NDArray[np.int64], what: str, offsets: spill.OffsetMap) -> NDArray[np.int64]:
        """Return the new physical offsets of those of `physical` that were "delivered" or "withdrawn" (`what`), for
        records that stay although they are done."""
        moved = offsets.new(physical[is_among(physical, spill.load(self._new.scratch, what))])
        return np.unique(moved[moved >= 0])

    def _newest_timer(self, store_state: StoreState, offsets: spill.OffsetMap) -> tuple[int, int]:
        """Return the new physical offset and the size of the record that was put into the wheel last; (-1, 0) without
        one."""
        assert store_state.timers is not None
        unit = (
            self._store.unit(TIMER_TOPIC, 0, store_state.timers.enqueued - 1) if store_state.timers.enqueued else None
        )
        if unit is None:
            return -1, 0
        physical = int(offsets.new(np.array([unit[0]]))[0])
        return (physical, unit[1]) if physical >= 0 else (-1, 0)


def disk_usage(root: str) -> int:
    """Return the bytes that the files below a directory take on the disk."""
    total = 0
    for directory, _, names in os.walk(root):
        for name in names:
            total += os.lstat(os.path.join(directory, name)).st_blocks * 512
    return total
