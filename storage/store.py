"""The store as a whole: one directory with RocketMQ's files (see `file_names`), open in one process.

    abort  exists while the store is open; if it exists at a start, the last run did not end cleanly
    lock   is locked while the store is open (see `files.OsLock`)

The store belongs to one thread, the broker's event loop. Work that waits for the disk is a job that a worker runs
(`storage.durability.jobs`, `pull.ColdRead`).

Keeps invariant 34 of ARCHITECTURE.md.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import structlog

from duemq.protocol.errors import RecordError
from duemq.protocol.frames.command import Body
from duemq.protocol.records import record
from duemq.protocol.records.record import RecordSummary, StoredMessage, summarize
from duemq.protocol.topics import SCHEDULE_TOPIC
from duemq.storage import file_names
from duemq.storage.current import Current
from duemq.storage.durability import checkpoint
from duemq.storage.durability.checkpoint import Checkpoint
from duemq.storage.durability.health import Health
from duemq.storage.durability.recovery import Recovered, Recovery
from duemq.storage.errors import StoreFileMissing, StoreFormatError, has_no_room
from duemq.storage.files import Files, Lock
from duemq.storage.log.append import Appender
from duemq.storage.log.commitlog import DEFAULT_SEGMENT_SIZE as COMMITLOG_SEGMENT_SIZE
from duemq.storage.log.commitlog import Commitlog
from duemq.storage.log.copies import UNITS
from duemq.storage.log.origins import Origins
from duemq.storage.log.preallocation import Preallocation
from duemq.storage.log.scan import read_record, whole_records
from duemq.storage.queues import check, pull
from duemq.storage.queues.check import Key, QueueCheck
from duemq.storage.queues.consume_queue import DEFAULT_SEGMENT_SIZE as QUEUE_SEGMENT_SIZE
from duemq.storage.queues.consume_queue import (
    FOLLOWING,
    MARK_SIZES,
    PADDING_SIZE,
    UNIT_SIZE,
    ConsumeQueue,
    physical_offset_of,
)
from duemq.storage.queues.extension import DEFAULT_SEGMENT_SIZE as EXTENSION_SEGMENT_SIZE
from duemq.storage.queues.extension import Extension, extension_of, tags_codes_of, with_codes
from duemq.storage.queues.tags_codes import Told, unit_tags_code

if TYPE_CHECKING:
    from numpy.typing import NDArray

log = structlog.get_logger(__name__)

_ZEROS: Final = bytes(1 << 20)
_RECORD_END: Final = 16
"""Number of bytes at the end of a record of which at least one is not zero: they belong to its topic or its
properties."""

DeliverTime = Callable[[int, int], int]
"""Returns the time when a message is due, from its delay level and its store time; times are ms since the epoch."""


@dataclass(frozen=True)
class StoreConfig:
    """Path of the store, sizes of its files, and limits. Sizes are in bytes."""

    root: str
    commitlog_directory: str = ""
    """Directory of the commitlog's files; by default commitlog/ under the root."""
    commitlog_segment_size: int = COMMITLOG_SEGMENT_SIZE
    """Size of a commitlog file. A store can be opened only with the size with which its files were made."""
    queue_segment_size: int = QUEUE_SEGMENT_SIZE
    """Size of a consume queue's file, rounded up to whole units. A store can be opened only with the size with which
    its files were made."""
    extension_segment_size: int = EXTENSION_SEGMENT_SIZE
    """Size of a file of a consume queue's extension."""
    is_extended: bool = False
    """Whether the extensions of consume queues are written; they are read in any case."""
    max_message_size: int = 4 * 1024 * 1024
    """The size of the largest body that the store accepts."""
    with_checksums: bool = False
    """Whether each record that is written ends with its checksum."""
    cached_size: int = 1 << 30
    """Bytes of the newest records that are assumed to be in the page cache, until a read shows otherwise."""


def queue_file_size(setting: int) -> int:
    """Return the size in bytes of a consume queue's file for a configured size: whole units, rounded up as RocketMQ
    does."""
    return -(-setting // UNIT_SIZE) * UNIT_SIZE


class MessageStore:
    """Opens the store, finds messages, and owns the `appender`. Offsets are queue offsets unless they are called
    physical; times are ms since the epoch. `durability.owner.Durability` decides which data is made durable, and
    when."""

    def __init__(
        self,
        config: StoreConfig,
        files: Files,
        store_host: tuple[str, int],
        deliver_time: DeliverTime,
        on_work: Callable[[], None] = lambda: None,
        max_message_size: Current[int] | None = None,
    ) -> None:
        """Make a store that is not open yet. `max_message_size`: the most bytes of a body, if that limit may change;
        by default the limit in `config`. `on_work` is called when the store's verdict has changed, or much has been
        written: then the owner of durability has work to do."""
        self.config = config
        self.files = files
        self._deliver_time = deliver_time
        self._on_work = on_work
        self._look_up = self._codes_of_records  # one object for all queues
        root = config.root
        self.queue_directory = os.path.join(root, file_names.CONSUME_QUEUES)
        self.extension_directory = extension_of(self.queue_directory)
        self.abort_path = os.path.join(root, file_names.ABORT)
        self.checkpoint_path = os.path.join(root, file_names.CHECKPOINT)
        self._lock: Lock | None = None
        self._let_go_of_commitlog: Callable[[], None] | None = None
        self._expected: dict[tuple[str, int], int] = {}
        self._was_clean = False
        """Whether the previous run ended cleanly."""
        self._recovery: Recovery | None = None
        self.health = Health(on_work)
        self.log = Commitlog(
            files, config.commitlog_directory or os.path.join(root, file_names.COMMITLOG), config.commitlog_segment_size
        )
        self.appender = Appender(
            self.log,
            self.health,
            store_host,
            max_message_size or Current(config.max_message_size),
            self._appended,
            with_checksums=config.with_checksums,
        )
        self.queues: dict[str, dict[int, ConsumeQueue]] = {}
        """Topic to queue id to queue."""
        self._being_removed: Counter[str] = Counter()
        """Topics with former queues whose files are being removed, and the number of those removals."""
        self.removals = 0
        """Generation counter: a cached ConsumeQueue has to be looked up again once this changes, because queues were
        removed, or a topic's number of queues changed."""
        self.queue_limits: dict[str, int] = {}
        """Number of queues that consumers read, by topic."""
        self.dirty: dict[ConsumeQueue, int] = {}
        """Queues with units that are not durable, and the queue offset where those units start."""
        self.preallocation = Preallocation(self.log)
        """Allocates space ahead of writes; `on_work` is called when the commitlog's end is beyond its `look_at`."""
        self._cached_from = 0
        """Physical offset before which records may not be in the page cache: at first, the end of the commitlog when
        the store was opened."""
        self._blocks_read = 0
        """`Files.blocks_read` after the last read."""
        self.checkpoint = Checkpoint()
        """The checkpoint that is on the disk."""
        self._read_through = 0
        """Physical offset from which on the whole commitlog was found to be readable."""
        self._queue_file_size = queue_file_size(config.queue_segment_size)
        self.queue_check = QueueCheck(
            files,
            os.path.join(root, file_names.QUEUE_CHECK),
            self.queue_directory,
            self._queue_file_size,
            self.log.size_apart,
        )
        """The checksums of consume queues and the removed topics."""

    # --- opening and closing

    def open(self) -> Recovered:
        """Run `inspect` and `recover`. If one of them raises an error, abandons the store and raises that error."""
        try:
            self.inspect()
            return self.recover()
        except BaseException:
            self.abandon()
            raise

    def inspect(self, *, reads: bool = True) -> None:
        """Lock the store and check whether it can be opened, changing nothing else in it. If this or `recover` raises
        an error, the caller has to `abandon` the store. `reads`: whether to read the part of the commitlog that
        `recover` will read, so that unreadable parts are found now. Raises StoreLocked, StoreFormatError, OSError."""
        files, root = self.files, self.config.root
        if files.exists(os.path.join(root, file_names.REPAIR, "old")):
            raise StoreFormatError(root, "a repair of this store was not finished; run `duemq store repair` again")
        for name in (file_names.LOCK, file_names.ABORT, file_names.CHECKPOINT, file_names.QUEUE_CHECK):
            files.require_file(os.path.join(root, name))
        self._lock = files.lock(os.path.join(root, file_names.LOCK))
        self._hold_commitlog()
        self.checkpoint = checkpoint.load(files, self.checkpoint_path, is_ours=self._lock.is_last_owner_duemq)
        if self._lock.is_last_owner_rocketmq:
            # RocketMQ writes the checkpoint only now and then, so unchanged timestamps in it do not mean that RocketMQ
            # did not have the store.
            self.checkpoint = self.checkpoint.without_ours()
        if not self.checkpoint.is_foreign and check.NAME in self.checkpoint.notes:
            self.queue_check.load(self.checkpoint.recovery_offset or 0)
        self._recovery = Recovery(
            files, self.log, self.queue_directory, self.ensure_queue, self.tags_code, self.queue_check, self
        )
        self._recovery.inspect(self.checkpoint)
        self._read_through = self.log.allocated_end
        if not reads:
            return
        if self.checkpoint.recovery_offset is not None:
            self.need(self.checkpoint.recovery_offset, "the checkpoint says that it reached")
            self._need_records_before(self.checkpoint.recovery_offset)
        elif not self.checkpoint.is_foreign:
            self._read_on(self.log.begin)

    def need(self, position: int, why: str) -> None:
        """Check that the commitlog has the file in which a physical offset lies, or ends right before that offset, and
        that it can be read from there on; call this after `inspect`. `why`: what names the position, as the start of a
        clause that the position ends, for the error. Raises StoreFileMissing, OSError."""
        begin, end = self.log.begin, self.log.allocated_end
        if begin <= position <= end:
            self._read_on(position)
            return
        base = position - position % self.log.segment_size
        there = f"bytes {begin} to {end}" if end > begin else "no bytes at all"
        raise StoreFileMissing(
            os.path.join(self.log.directory, f"{base:020}"),
            f"is missing; the commitlog has {there}, but {why} {position}. Put the file back, or mount the disk that "
            f"has it. To continue without its messages, run `duemq store repair {self.config.root}`",
        )

    def _need_records_before(self, position: int) -> None:
        """Check that the commitlog has a record right before a position, up to which the checkpoint says that it is
        whole, or at least a record somewhere behind it: an older copy of the last file has neither. Raises
        StoreFormatError, OSError."""
        log = self.log
        in_file = position % log.segment_size  # a file may end with zeros only
        size = min(in_file, _RECORD_END)
        if not size or any(log.read_raw(position - size, size)) or next(whole_records(log, position), None) is not None:
            return
        raise StoreFormatError(
            os.path.join(log.directory, f"{position - in_file:020}"),
            f"has no record before {position}, but the checkpoint says that there is one: the file is an older copy, "
            f"or its end was destroyed. Put the newer file back. To continue without its messages, run `duemq store "
            f"repair {self.config.root}`",
        )

    def expect(self, topic: str, queue_id: int, offset: int) -> None:
        """Note that another component has read the units of a queue up to a queue offset: `recover` rebuilds all queues
        if this one ends before that offset."""
        self._expected[topic, queue_id] = offset

    def _read_on(self, position: int) -> None:
        """Read the commitlog from a position up to the part that was read before, only to find errors: an unreadable
        part must stop a start before the start has changed anything."""
        log, at = self.log, position
        while at < self._read_through:
            data = log.read_raw(at, min(len(_ZEROS), log.segment_end(at) - at))
            # A run of zeros this long occurs only behind the last record of a file.
            at = log.segment_end(at) if data in (_ZEROS, b"") else at + len(data)
        self._read_through = min(position, self._read_through)

    def recover(self) -> Recovered:
        """Repair the files, and accept messages from then on; call this after `inspect`. Raises StoreFormatError,
        OSError."""
        lock, recovery, files = self._lock, self._recovery, self.files
        assert lock is not None, "a store is inspected before it is recovered"
        assert recovery is not None, "a store is recovered once"
        self._recovery = None
        clean = self._was_clean = not files.exists(self.abort_path)
        if not self.checkpoint.is_foreign:
            lock.claim()
        files.make_directories(self.log.directory, durable=True)
        self._hold_commitlog()
        files.make_directories(self.queue_directory, durable=True)
        self._make_extension_directory()
        self._mark()
        recovered = recovery.run(self.checkpoint, self._expected, clean=clean)
        for topic in self.queue_check.removed:
            if not any(queue.next_offset for queue in self.queues.get(topic, {}).values()):
                self.queues.pop(topic, None)
        self.dirty = dict(self._not_durable())
        self._cached_from = recovered.end
        self._blocks_read = files.blocks_read()
        recovered.notes = self.checkpoint.notes
        recovered.is_foreign = self.checkpoint.is_foreign
        self.appender.last_store_timestamp = recovered.last_store_timestamp
        self.health.opened()
        return recovered

    def make_anew(
        self,
        origins: Origins,
        goes_on_at: Mapping[Key, int],
        left_out: Container[str],
        served_to: int,
        on_position: Callable[[int], None] = lambda position: None,
    ) -> Recovered:
        """Rebuild all derived files under a root that has none of them yet, and accept no messages; call this after
        `inspect`. For the parameters see `Recovery.make_anew`. Raises StoreFormatError, OSError."""
        recovery = self._recovery
        assert recovery is not None, "a store is inspected before it is rebuilt"
        self._recovery = None
        self.files.make_directories(self.queue_directory, durable=True)
        self._make_extension_directory()
        recovered = recovery.make_anew(origins, goes_on_at, left_out, served_to, on_position)
        self.dirty = dict(self._not_durable())
        self._cached_from = recovered.end
        self._blocks_read = self.files.blocks_read()
        self.appender.last_store_timestamp = recovered.last_store_timestamp
        return recovered

    def claim(self) -> None:
        """Note in the lock file that duemq wrote the checkpoint on the disk. If another broker had the store before,
        the lock file names duemq only from now on: a start that is killed earlier leaves the store to that broker. May
        wait for the disk; may be called by any thread. Raises OSError."""
        assert self._lock is not None, "checkpoints are made of an open store"
        self._lock.claim()

    def _hold_commitlog(self) -> None:
        """Lock the commitlog's directory, if it exists: two stores configured with the same commitlog would overwrite
        each other's records. Raises StoreLocked, OSError."""
        if self._let_go_of_commitlog is None and self.files.exists(self.log.directory):
            self._let_go_of_commitlog = self.files.lock_directory(self.log.directory)

    def _mark(self) -> None:
        """Make the abort file; on a full disk, an empty one: there is room for that, and only its existence matters.
        Raises OSError."""
        files = self.files
        try:
            files.write_whole(self.abort_path, b"%d" % os.getpid())
        except OSError as error:
            if not has_no_room(error):
                raise
            if not files.exists(self.abort_path):
                files.create(self.abort_path, 0)
                files.sync_directory(self.config.root)

    def unmark(self) -> None:
        """Remove the abort file if the previous run ended cleanly: this run has appended nothing and will append
        nothing, so the store is still as that clean end left it."""
        if self._was_clean:
            with contextlib.suppress(OSError):
                self.files.remove(self.abort_path)

    def _not_durable(self) -> Iterator[tuple[ConsumeQueue, int]]:
        """Yield, after recovery, the queues with units that may not be durable, and the queue offset where those units
        start."""
        for queue in self.all_queues():
            start = self.queue_check.durable_offset((queue.topic, queue.queue_id))
            if start is None:
                yield queue, queue.min_offset
            elif start < queue.next_offset:
                yield queue, start

    def start_over(self) -> None:
        """Note that all consume queues are about to be removed and rebuilt: no checkpoint may say any longer that they
        are durable. Raises OSError, NotDurable."""
        self.checkpoint = checkpoint.start_over(self.files, self.checkpoint_path, self.checkpoint)

    def remake(self, queues: list[tuple[str, int, int]]) -> None:
        """Note that some queues are about to be rebuilt. `queues`: topic, queue id, and the offset of the first byte of
        the first file to rebuild. The next start rebuilds them again, unless another checkpoint is made before. Raises
        OSError, NotDurable."""
        self.checkpoint = checkpoint.remake(self.files, self.checkpoint_path, self.checkpoint, queues)

    def abandon(self) -> None:
        """Close the store as it is: nothing is written, and the next start recovers. A clean stop
        (`durability.owner.Durability.stop`) ends with this call, too."""
        self.health.closed()
        for queue in self.all_queues():
            queue.close()
        self.log.close()
        if self._let_go_of_commitlog is not None:
            self._let_go_of_commitlog()
            self._let_go_of_commitlog = None
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def forget_note(self, name: str) -> None:
        """Remove a note from the checkpoint. The files that the note describes are about to be rebuilt, and a start
        after a crash in the middle of that must not read the new files according to the old note. Waits for the disk.
        Raises OSError."""
        notes = self.checkpoint.notes
        if name in notes and not self.checkpoint.is_foreign:
            self.checkpoint.notes = {other: note for other, note in notes.items() if other != name}
            checkpoint.save(self.files, self.checkpoint_path, self.checkpoint)

    # --- queues

    def queue(self, topic: str, queue_id: int) -> ConsumeQueue | None:
        """Return a queue that has, or had, a message; None if there is no such queue."""
        queues = self.queues.get(topic)
        return queues.get(queue_id) if queues is not None else None

    def ensure_queue(self, topic: str, queue_id: int) -> ConsumeQueue:
        """Return a queue; make it if it does not exist."""
        queues = self.queues.setdefault(topic, {})
        queue = queues.get(queue_id)
        if queue is None:
            extension = self._extension_for(topic, queue_id)
            queue = queues[queue_id] = ConsumeQueue(
                self.files, self.queue_directory, self._queue_file_size, topic, queue_id, extension, self._look_up
            )
            queue.is_held = topic in self._being_removed
            self.appender.prepare(queue)
        return queue

    def _make_extension_directory(self) -> None:
        if not self.config.is_extended:
            return
        try:
            self.files.make_directories(self.extension_directory, durable=True)
        except OSError as error:
            # Each queue that gets messages then works without its extension.
            log.warning("consumequeue_ext_not_made", directory=self.extension_directory, reason=str(error))

    def _extension_for(self, topic: str, queue_id: int) -> Extension | None:
        """Return the extension of a queue that is about to be made; None if there is none and none is to be written."""
        config = self.config
        directory = os.path.join(self.extension_directory, topic, str(queue_id))
        if not config.is_extended and not self.files.exists(directory):
            return None
        return Extension(
            self.files,
            directory,
            config.extension_segment_size,
            self._summaries,
            partial(self.tags_code, topic),
            partial(self._deliver_time, queue_id + 1, 0) if topic == SCHEDULE_TOPIC else None,
            self._store_times if config.is_extended else None,
        )

    def _codes_of_records(self, topic: str, units: bytes) -> bytes:
        """Return units of a queue whose extension is gone, with the tags codes of their records in place of addresses.
        Raises NotInMemory, OSError."""
        array = np.frombuffer(units, UNITS)
        codes = tags_codes_of(array, self._summaries, partial(self.tags_code, topic), _nothing, is_level=False)
        return with_codes(array, codes).tobytes()

    def _summaries(self, units: NDArray[Any]) -> list[RecordSummary | None]:
        """Return the summary of each unit's record; None for a unit without a record. Raises NotInMemory, OSError."""
        return [
            summarize(data, offset) if (data := self._stored_record(offset, size)) is not None else None
            for offset, size in zip(units["physical_offset"].tolist(), units["size"].tolist(), strict=True)
        ]

    def _stored_record(self, physical_offset: int, size: int) -> bytes | None:
        return self.record_at(physical_offset) if size in MARK_SIZES else self.log.read(physical_offset, size)

    def _store_times(self, physical_offsets: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the store times of records, ms since the epoch; 0 where there is none. Waits for the disk if
        necessary, which is rare: the records were appended or read just before."""
        files, read = self.files, self.log.read_raw
        before, files.may_wait = files.may_wait, True
        try:
            starts = [read(offset, record.HEAD_SIZE_IPV4) for offset in physical_offsets.tolist()]
        finally:
            files.may_wait = before
        return np.fromiter(map(record.store_timestamp, starts), np.int64, len(starts))

    def all_queues(self) -> list[ConsumeQueue]:
        """Return every queue."""
        return [queue for queues in self.queues.values() for queue in queues.values()]

    def mark(self, queue: ConsumeQueue, offset: int, size: int) -> None:
        """Mark a unit of the schedule topic (see `ConsumeQueue.mark`), so that the next checkpoint covers the mark. The
        record that withdraws its message must be in the commitlog."""
        queue.mark(offset, size)
        self.dirty[queue] = min(self.dirty.get(queue, offset), offset)

    def limit_queues(self, topic: str, count: int | None) -> None:
        """Set the number of queues of a topic that consumers read; None if the topic is not known."""
        if self.queue_limits.get(topic) == count:
            return
        if count is None:
            del self.queue_limits[topic]
        else:
            self.queue_limits[topic] = count
        self.removals += 1

    def forget_topic(self, topic: str) -> str | None:
        """Forget the queues of a topic; return their directory, or None if the topic has no queues. The caller removes
        the directory, since that may take long, and then calls `removed_topic`; queues that the topic gets before that
        call keep their units in memory."""
        queues = self.queues.pop(topic, None)
        if queues is None:
            return None
        self.removals += 1
        for queue in queues.values():
            self.dirty.pop(queue, None)
            queue.forget()
        self._being_removed[topic] += 1
        return os.path.join(self.queue_directory, topic)

    def extension_directory_of(self, topic: str) -> str | None:
        """Return the directory of the extensions of a topic's queues; None if there is none."""
        directory = os.path.join(self.extension_directory, topic)
        return directory if self.files.exists(directory) else None

    def removed_topic(self, topic: str) -> None:
        """Note that the directory returned by `forget_topic` has been removed."""
        self._being_removed[topic] -= 1
        if self._being_removed[topic]:
            return
        del self._being_removed[topic]
        for queue in self.queues.get(topic, {}).values():
            queue.is_held = False

    def tags_code(self, topic: str, told: Told) -> int:
        """Return the tags code of a record in its consume queue; see `tags_codes.unit_tags_code`."""
        return unit_tags_code(topic, told, self._deliver_time)

    # --- reading

    def find(
        self, topic: str, queue_id: int, offset: int, max_count: int, max_size: int, codes: frozenset[int] | None
    ) -> pull.Pulled:
        """Look for messages of a queue from a queue offset on: at most `max_count`, together at most `max_size` bytes
        unless the first message alone is larger, with one of the tags codes (None: any). Raises NotInMemory,
        OSError."""
        return pull.find(self.queue(topic, queue_id), offset, max_count, max_size, codes, self.log.begin)

    def read(self, ranges: list[pull.Range]) -> Body | None:
        """Return the records of some ranges, joined; None if the commitlog no longer has one of them, or if reading
        would have to wait for the disk. `ranges`: in ascending order. Raises OSError."""
        cached_from = max(self._cached_from, self.log.end - self.config.cached_size)
        found = pull.read(self.log, ranges, cached_from)
        if (blocks := self.files.blocks_read()) != self._blocks_read:
            self._blocks_read = blocks
            if ranges[-1][0] >= cached_from:
                # The system keeps less in memory than assumed: other processes need it, or a container has a limit.
                self._cached_from = (ranges[-1][0] + self.log.end) // 2
        return found

    def is_cached(self, ranges: list[pull.Range]) -> bool:
        """Whether the records of some ranges, in any order, can be read without waiting for the disk."""
        found = pull.read(
            self.log, sorted(ranges), self.log.end
        )  # so even the newest records are checked, not assumed to be in memory
        self._blocks_read = self.files.blocks_read()
        return found is not None

    def record_at(self, physical_offset: int) -> bytes | None:
        """Return the bytes of the record at a physical offset, or None if there is none. May wait for the disk."""
        found = read_record(self.log, physical_offset)
        return self.log.read(physical_offset, found.size) if found is not None else None

    def message_at(self, physical_offset: int, size: int | None = None) -> StoredMessage | None:
        """Return the message at a physical offset, or None if there is none, or no longer. `size`: the size of its
        record, if the caller knows it. May wait for the disk."""
        data = self.log.read(physical_offset, size) if size is not None else self.record_at(physical_offset)
        return _decoded(data) if data is not None else None

    def named_message_at(self, physical_offset: int) -> StoredMessage | None:
        """Return the message at a physical offset that a client names; see `named_record_at`."""
        data = self.named_record_at(physical_offset)
        return _decoded(data) if data is not None else None

    def named_record_at(self, physical_offset: int) -> bytes | None:
        """Return the bytes of the record at a physical offset that a client names, or None if no record begins there.
        May wait for the disk.

        A sender may have put a whole forged record into the body of a message, with the physical offset at which it
        would come to lie. So a record counts only if its consume queue has it: the unit at its queue offset has to have
        its physical offset and its size, or a mark in place of the size. A record of a deleted topic no longer has a
        unit, and is not returned: nothing distinguishes it from bytes inside another record. Consume queues lose no
        unit before the commitlog loses the record."""
        data = self.record_at(physical_offset)
        message = _decoded(data) if data is not None else None
        if data is None or message is None or message.queue_offset < 0:
            return None
        queue = self.queue(message.topic, message.queue_id)
        unit = queue.unit(message.queue_offset) if queue is not None else None
        is_named = unit is not None and unit[0] == physical_offset and unit[1] in (len(data), *MARK_SIZES)
        return data if is_named else None

    def store_timestamp_of(self, queue: ConsumeQueue, offset: int) -> int:
        """Return the store time of a message of a queue, ms since the epoch; -1 if there is no such message."""
        unit = queue.unit(offset)
        found = read_record(self.log, unit[0], check_crc=False) if unit is not None else None
        return found.store_timestamp if found is not None else -1

    def offset_by_time(self, queue: ConsumeQueue, timestamp: int, *, upper: bool = False) -> int:
        """Return the queue offset of the first message stored at or after a time, ms since the epoch; the queue's next
        offset if there is none. With `upper`, return the offset of the last message stored at or before the time; the
        queue's lowest offset if there is none."""
        limit = timestamp + 1 if upper else timestamp

        def reached(physical: int, size: int, code: int) -> bool:
            found = read_record(self.log, physical_offset_of(physical, size, code), check_crc=False)
            if found is None:
                return size == PADDING_SIZE and code >= FOLLOWING  # nothing follows
            return found.store_timestamp >= limit

        first = queue.first_where(queue.min_offset, queue.next_offset, reached)
        return max(queue.min_offset, first - 1) if upper else first

    # ---

    def _appended(self, touched: list[ConsumeQueue]) -> None:
        dirty = self.dirty
        if self.log.end > self.preallocation.look_at:
            self._on_work()
        for queue in touched:
            if queue not in dirty:
                dirty[queue] = queue.written_offset
            for watcher in queue.watchers:
                watcher(queue)


def _decoded(data: bytes) -> StoredMessage | None:
    try:
        return record.decode(data)
    except RecordError:
        return None


def _nothing(offset: int, size: int) -> bytes:
    """Read nothing: an `extension.Read` for an extension without files."""
    return b""
