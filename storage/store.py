"""The store as a whole: one directory in RocketMQ's layout, open in one process.

    <root>/commitlog/  consumequeue/  checkpoint  abort  lock  config/*.json (see `config_file`)

    abort: there while the store is open; found at start, it tells that the last run did not end cleanly.
    lock:  locked while the store is open (see `files.OsLock`).

The store belongs to one thread, the broker's event loop. What waits for the disk is planned here as a job and run by
a thread of the broker's (`FlushJob`, `CheckpointJob`, `ColdRead`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final, Protocol

from protocol import properties, record, timer_properties
from protocol.command import Body
from protocol.errors import RecordError
from protocol.record import StoredMessage
from storage import checkpoint, pull
from storage.ahead import AllocateAhead, AllocateJob
from storage.append import Appender
from storage.checkpoint import Checkpoint
from storage.clock import Clock
from storage.commitlog import DEFAULT_SEGMENT_SIZE as COMMITLOG_SEGMENT_SIZE
from storage.commitlog import Commitlog
from storage.consume_queue import DEFAULT_SEGMENT_SIZE as QUEUE_SEGMENT_SIZE
from storage.consume_queue import SCHEDULE_TOPIC, TIMER_TOPIC, UNIT_SIZE, ConsumeQueue
from storage.errors import StoreBroken, StoreClosed, StoreFull
from storage.files import Files, Lock
from storage.flush import CheckpointJob, FlushJob
from storage.recovery import Recovered, Recovery
from storage.retention import Retention, RetentionConfig
from storage.scan import read_record

DeliverTime = Callable[[int, int], int]
"""Of delay level and store time, ms since the epoch: when a message of the level is due."""

UNFLUSHED_BYTES: Final = 8 << 20
"""When so much is not flushed, it is time: beside the flush of half a second's writes, a write may take 75 ms, beside
those of 4 to 16 MiB it took 3 ms (ext4, Linux 6; measured)."""


@dataclass(frozen=True)
class StoreConfig:
    """Where the store is and what its files are like. Sizes in bytes."""

    root: str
    commitlog_directory: str = ""
    """Default: commitlog/ under the root."""
    commitlog_segment_size: int = COMMITLOG_SEGMENT_SIZE
    """Written into the files: a store opens only with the size it was made with."""
    queue_segment_size: int = QUEUE_SEGMENT_SIZE
    """As above; rounded down to whole units."""
    max_message_size: int = 4 * 1024 * 1024
    """Largest body taken."""
    cached_size: int = 1 << 30
    """How much of the newest messages is taken to be in the page cache, until that turns out to be wrong."""
    retention: RetentionConfig = field(default_factory=RetentionConfig)


class Beside(Protocol):
    """Somebody with files of his own beside the store's."""

    def write(self) -> Iterator[None]:
        """Put into the files what is in memory, a bit a step. Raises OSError."""

    def plan_sync(self) -> Callable[[], None]:
        """What makes durable everything written so far; run by any thread. It raises OSError."""


class MessageStore:
    """Opens, appends, finds, deletes. Offsets are physical or queue offsets as named; times ms since the epoch."""

    def __init__(
        self,
        config: StoreConfig,
        files: Files,
        clock: Clock,
        store_host: tuple[str, int],
        deliver_time: DeliverTime,
        file_clock: Clock | None = None,
    ) -> None:
        """`clock` is for store times; by `file_clock`, the same unless given, files expire."""
        self.config = config
        self.files = files
        self._deliver_time = deliver_time
        root = config.root
        self._queue_directory = os.path.join(root, "consumequeue")
        self._abort_path = os.path.join(root, "abort")
        self._checkpoint_path = os.path.join(root, "checkpoint")
        self._lock: Lock | None = None
        self.log = Commitlog(
            files, config.commitlog_directory or os.path.join(root, "commitlog"), config.commitlog_segment_size
        )
        self.appender = Appender(self.log, clock, store_host, config.max_message_size, self._appended)
        self.retention = Retention(config.retention, files, self.log, file_clock or clock)
        self.queues: dict[str, dict[int, ConsumeQueue]] = {}
        """Topic to queue id to queue."""
        self.removals = 0
        """How often queues were removed: whoever keeps some has to look again."""
        self._dirty: dict[ConsumeQueue, int] = {}
        """Queues with units that are not durable, and the queue offset where those start."""
        self._cached_from = 0
        """What lies before it may not be in the page cache: at first, where the commitlog ended when it was opened."""
        self._blocks_read = 0
        """As of the last read."""
        self._checkpoint = Checkpoint()
        self._queues_written: tuple[int, int, dict[str, bytes]] = (0, 0, {})
        """Commitlog end, store time and note when the queues were last put into their files."""
        self.ahead = AllocateAhead(self.log, clock)
        self.run_allocate: Callable[[AllocateJob], None] = lambda job: self.ahead.done()
        """Has a thread run a job, and calls `ahead.done` after it."""
        self.on_unflushed: Callable[[], None] = lambda: None
        """Called when a flush is due, since much has been written since the last."""
        self.notes: dict[str, Callable[[], bytes]] = {}
        """By name, those who have something that a checkpoint keeps for them: what they know of the commitlog as of
        now. See `Recovered.notes`."""
        self.beside: list[Beside] = []
        """Those whose files a checkpoint covers as well."""
        self.keep_before: list[Callable[[int], Iterator[bool]]] = []
        """Called before commitlog files up to an offset go: append once more, in slices, what is still needed of them,
        telling at each whether there was anything. Where one raises, the files stay."""
        self._kept_end = 0
        """Where the commitlog ended after the last of that: the files go when it is durable."""

    # --- opening and closing

    def open(self) -> Recovered:
        """Lock, recover, and take messages. Raises StoreLocked, StoreFormatError, OSError."""
        config, files = self.config, self.files
        files.make_directories(config.root)
        self._lock = files.lock(os.path.join(config.root, "lock"))
        try:
            clean = not files.exists(self._abort_path)
            if self._lock.was_theirs:
                # RocketMQ writes the checkpoint only now and then: its timestamps alone would not tell.
                checkpoint.forget_ours(files, self._checkpoint_path)
            self._lock.claim()
            files.make_directories(self.log.directory)
            files.make_directories(self._queue_directory)
            files.write_whole(self._abort_path, b"%d" % os.getpid())
            self._checkpoint = checkpoint.load(files, self._checkpoint_path)
            recovery = Recovery(files, self.log, self._queue_directory, self.ensure_queue, self.tags_code)
            recovered = recovery.run(self._checkpoint, clean=clean)
        except BaseException:
            self._lock.release()
            self._lock = None
            raise
        self._dirty = {queue: queue.min_offset for queue in self.all_queues()}
        self._cached_from = recovered.end
        self._blocks_read = files.blocks_read()
        self.ahead.opened()
        recovered.notes = self._checkpoint.notes
        recovered.is_foreign = self._checkpoint.is_foreign
        self.appender.open(recovered.last_store_timestamp)
        return recovered

    def close(self) -> None:
        """Make everything durable, and leave as after a clean stop. Waits for the disk. Raises OSError."""
        if self._lock is None:
            return
        broken = isinstance(self.appender.refusal, StoreBroken)
        self.appender.refuse(StoreClosed("the store is closed"))
        try:
            if not broken:
                for _ in self.write_queues():
                    pass
                job = self.plan_checkpoint()
                job.run()
                self.note_checkpoint(job)
                self.files.remove(self._abort_path)
                self.files.sync_directory(self.config.root)
        finally:
            for queue in self.all_queues():
                queue.close()
            self.log.close()
            self._lock.release()
            self._lock = None

    # --- queues

    def queue(self, topic: str, queue_id: int) -> ConsumeQueue | None:
        """A queue that has, or had, a message."""
        queues = self.queues.get(topic)
        return queues.get(queue_id) if queues is not None else None

    def ensure_queue(self, topic: str, queue_id: int) -> ConsumeQueue:
        """A queue, made if it is not there."""
        queues = self.queues.setdefault(topic, {})
        queue = queues.get(queue_id)
        if queue is None:
            size = self.config.queue_segment_size // UNIT_SIZE * UNIT_SIZE
            queue = queues[queue_id] = ConsumeQueue(self.files, self._queue_directory, size, topic, queue_id)
            self.appender.prepare(queue)
        return queue

    def all_queues(self) -> list[ConsumeQueue]:
        """Every queue."""
        return [queue for queues in self.queues.values() for queue in queues.values()]

    def withdraw(self, queue: ConsumeQueue, offset: int) -> None:
        """Mark a unit of the schedule topic as withdrawn, as the next checkpoint will cover. The record that says so is
        in the commitlog."""
        queue.withdraw(offset)
        self._dirty[queue] = min(self._dirty.get(queue, offset), offset)

    def remove_topic(self, topic: str) -> list[ConsumeQueue]:
        """Forget the queues of a topic; the caller removes them (`ConsumeQueue.remove`), which may take long."""
        removed = list(self.queues.pop(topic, {}).values())
        self.removals += 1
        for queue in removed:
            self._dirty.pop(queue, None)
        return removed

    def tags_code(self, topic: str, text: str, store_timestamp: int, promise: int = 0) -> int:
        """What a consume queue keeps of a record: its deliver time in the schedule topic and the timer topic, else the
        tags' hash.

        `promise` is the prepared-transaction offset of the record. RocketMQ does not use it in records of the schedule
        topic; ours have the deliver time there, so that a message keeps it whatever becomes of the table of levels.
        """
        if topic == TIMER_TOPIC:
            due = timer_properties.queue_code(text, store_timestamp, promise)
            if due is not None:
                return due
        if topic == SCHEDULE_TOPIC:
            if store_timestamp <= promise <= store_timestamp + timer_properties.MAX_PROMISE_MS:
                return promise
            level = properties.get(text, properties.DELAY)
            if level is not None and level.isdecimal() and int(level) > 0:
                return self._deliver_time(int(level), store_timestamp)
        return properties.tags_code(properties.get(text, properties.TAGS))

    # --- reading

    def find(
        self, topic: str, queue_id: int, offset: int, max_count: int, max_size: int, codes: frozenset[int] | None
    ) -> pull.Pulled:
        """See `pull.find`."""
        return pull.find(self.queue(topic, queue_id), offset, max_count, max_size, codes, self.log.begin)

    def read(self, ranges: list[pull.Range]) -> Body | None:
        """See `pull.read`."""
        cached_from = max(self._cached_from, self.log.end - self.config.cached_size)
        found = pull.read(self.log, ranges, cached_from)
        if (blocks := self.files.blocks_read()) != self._blocks_read:
            self._blocks_read = blocks
            if ranges[-1][0] >= cached_from:
                # The system keeps less than it might: for others who need memory, or by the limit of a container.
                self._cached_from = (ranges[-1][0] + self.log.end) // 2
        return found

    def is_cached(self, ranges: list[pull.Range]) -> bool:
        """Whether the records of some ranges, in any order, can be read without waiting for the disk."""
        return self.read(sorted(ranges)) is not None

    def record_at(self, physical_offset: int) -> bytes | None:
        """The bytes of the record at a physical offset, or None where there is none. May wait for the disk."""
        found = read_record(self.log, physical_offset)
        return self.log.read(physical_offset, found.size) if found is not None else None

    def message_at(self, physical_offset: int, size: int | None = None) -> StoredMessage | None:
        """The message at a physical offset, or None where there is none (any more). May wait for the disk."""
        data = self.log.read(physical_offset, size) if size is not None else self.record_at(physical_offset)
        if data is None:
            return None
        try:
            return record.decode(data)
        except RecordError:
            return None

    def store_timestamp_of(self, queue: ConsumeQueue, offset: int) -> int:
        """Store time of a message of a queue; -1 where there is none."""
        unit = queue.unit(offset)
        found = read_record(self.log, unit[0], check_crc=False) if unit is not None else None
        return found.store_timestamp if found is not None else -1

    def offset_by_time(self, queue: ConsumeQueue, timestamp: int, *, upper: bool = False) -> int:
        """The first queue offset stored at or after a time (or, `upper`, the last one stored at or before it, if
        any), within the messages that there are."""
        limit = timestamp + 1 if upper else timestamp

        def reached(physical: int, _size: int, _code: int) -> bool:
            found = read_record(self.log, physical, check_crc=False)
            return found is not None and found.store_timestamp >= limit

        first = queue.first_where(queue.min_offset, queue.next_offset, reached)
        return max(queue.min_offset, first - 1) if upper else first

    # --- what waits for the disk

    def plan_flush(self) -> FlushJob:
        """A job after which everything written so far is durable."""
        return FlushJob(self.files, self.config.root, self.log)

    def note_flushed(self, job: FlushJob) -> None:
        """A flush job ran."""
        self.log.note_flushed(job.target, job.names)

    def flush_failed(self, error: OSError) -> None:
        """A flush job failed: what the disk holds is unknown, so nothing is taken any more."""
        self.appender.refuse(StoreBroken(f"flushing failed: {error}"))

    def write_queues(self) -> Iterator[None]:
        """Put the units in memory into the files, a queue a step. Raises OSError."""
        self._queues_written = (self.log.end, self.appender.last_store_timestamp, self._take_notes())
        for queue in list(self._dirty):
            queue.write_tail()
            yield
        for other in self.beside:
            yield from other.write()

    def _take_notes(self) -> dict[str, bytes]:
        return {name: take() for name, take in self.notes.items()}

    def plan_checkpoint(self) -> CheckpointJob:
        """A job after which the records written before the last `write_queues` began, and their units, are durable
        and recovery starts behind them. One at a time."""
        end, timestamp, notes = self._queues_written
        timestamp = timestamp or self._checkpoint.physic_timestamp
        job = CheckpointJob(
            self.files,
            self.config.root,
            self.log,
            self._dirty.items(),
            Checkpoint(timestamp, timestamp, self._checkpoint.index_timestamp, end, notes),
            self._checkpoint_path,
            [
                *(queue.plan_marks() for queue in self._dirty if queue.has_marks),
                *(other.plan_sync() for other in self.beside),
            ],
        )
        self._dirty = {queue: queue.written_offset for queue in self._dirty if queue.tail or queue.has_marks}
        return job

    def note_checkpoint(self, job: CheckpointJob) -> None:
        """A checkpoint job ran."""
        self._checkpoint = job.checkpoint
        self.note_flushed(job)

    def forget_note(self, name: str) -> None:
        """Have the checkpoint without a note: what it tells of is about to be made anew, and a crash in the middle of
        that must not find the new by the old. Waits for the disk. Raises OSError."""
        notes = self._checkpoint.notes
        if name in notes and not self._checkpoint.is_foreign:
            self._checkpoint.notes = {other: note for other, note in notes.items() if other != name}
            checkpoint.save(self.files, self._checkpoint_path, self._checkpoint)

    @property
    def has_checkpoint_work(self) -> bool:
        """Whether there is anything that the checkpoint does not cover."""
        return self._checkpoint.recovery_offset != self.log.end or self._checkpoint.notes != self._take_notes()

    # --- retention

    def expire(self) -> Iterator[list[str]]:
        """Look at the disk, refuse or accept messages by it, and forget what may go; each step gives paths of files
        for the caller to remove."""
        if self.retention.look():
            self.appender.accept()
        else:
            self.appender.refuse(StoreFull(f"the disk is {self.retention.used_ratio:.0%} full"))
        begin, limit = self.log.begin, self.retention.deletable_before()
        if limit > begin:
            for keep in self.keep_before:
                for was_needed in keep(limit):
                    if was_needed:
                        self._kept_end = self.log.end
                    yield []
        if self.log.flushed >= self._kept_end:
            yield self.log.drop_before(limit)
        if self.log.begin > begin:
            for queue in self.all_queues():
                yield queue.advance_min(self.log.begin)

    # ---

    def _wrote_much(self) -> None:
        """Every few MiB."""
        job = self.ahead.plan()
        if job is not None:
            self.run_allocate(job)
        if self.log.end - self.log.flushed >= UNFLUSHED_BYTES:
            self.on_unflushed()

    def _appended(self, touched: list[ConsumeQueue]) -> None:
        dirty = self._dirty
        if self.log.end > self.ahead.look_at:
            self._wrote_much()
        for queue in touched:
            if queue not in dirty:
                dirty[queue] = queue.written_offset
            for watcher in queue.watchers:
                watcher(queue)
