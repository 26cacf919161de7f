"""Opening a store: recovery finds the end of the commitlog, and makes the consume queues agree with it.

The commitlog is the truth: consume queues are made from the commitlog, never the other way round. Recovery picks a
position before which records and consume-queue units are known to be durable, and cuts every consume queue to it. From
there it reads the commitlog record by record, and makes each record's unit again, up to the first bytes that are not a
whole record. There it cuts off the commitlog.

The position comes from duemq's checkpoint, if no other broker has written the store since. Otherwise it follows
RocketMQ's rule: the start of the last file whose first record is at least three seconds older than RocketMQ's
checkpoint, or, after RocketMQ's clean stop, the end of the last record that a consume queue knows.

About a torn tail: neither the torn record nor any record behind it was acknowledged under SYNC_FLUSH, since a flush
covers all bytes before its end. Where whole records lie behind it nevertheless, they are kept in files beside the
commitlog, and a log line names these files.

Before the queues are cut, their files are compared with the noted checksums (see `queues.check`). From the first file
that is missing or differs, a queue is rebuilt from the commitlog up to the position, with the queue offsets that it
had; a warning names the files and the reason. Where there is no such note (a store of RocketMQ or of an earlier version
of duemq), units before the position are known to be missing if a record does not follow its queue's last unit: then all
consume queues are rebuilt from the whole commitlog.

Keeps invariant 6 of ARCHITECTURE.md.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Final, NamedTuple, Protocol

import structlog

from duemq.protocol.records.record import FLAG_TRANSACTION, TRANSACTION_COMMIT, TRANSACTION_NONE
from duemq.protocol.topics import NAME, SCHEDULE_TOPIC, TIMER_TOPIC
from duemq.storage import file_names
from duemq.storage.durability.checkpoint import REBUILDING, Checkpoint, being_remade
from duemq.storage.errors import StoreFileMissing, StoreFileSize, StoreFormatError, has_no_room
from duemq.storage.files import Files
from duemq.storage.log.commitlog import Commitlog
from duemq.storage.log.origins import Origins
from duemq.storage.log.scan import ScannedRecord, Scanner, behind, read_record, whole_records
from duemq.storage.queues.check import Key, QueueCheck, Wrong
from duemq.storage.queues.consume_queue import (
    MARK_SIZES,
    PADDING_SIZE,
    UNIT,
    WITHDRAWN_SIZE,
    ConsumeQueue,
    hole,
    physical_offset_of,
)
from duemq.storage.queues.extension import extension_of
from duemq.storage.queues.tags_codes import Told

log = structlog.get_logger(__name__)

_CLOCK_MARGIN_MS: Final = 3000
_WRITE_TAIL_BYTES: Final = 1 << 18
_WRITE_SIZE: Final = 1 << 20
_WRITE_AGAIN_BYTES: Final = 64 << 20
_MAX_PADDING: Final = 10_000_000
_MAX_NAMED: Final = 10
"""Most files that a warning lists by name."""
_CHECKED_FILES: Final = 3
"""Number of files at the end of the commitlog that RocketMQ reads at a start that follows a clean stop."""
_REPORT_RECORDS: Final = 1 << 14
_WITH_UNITS: Final = (TRANSACTION_NONE, TRANSACTION_COMMIT)
"""The values of the transaction bits with which a record has a unit."""

TagsCode = Callable[[str, Told], int]
"""Returns the tags code of a record of a topic."""


@dataclass
class Recovered:
    """The result of recovery. Offsets are physical offsets."""

    start: int
    """Physical offset where reading started."""
    end: int
    """End of the commitlog."""
    records: int
    """Number of records read."""
    torn: str | None
    """Why the commitlog was cut; None if it was not."""
    rebuilt: bool
    """Whether all consume queues were rebuilt."""
    last_store_timestamp: int
    """Store time of the last record, ms since the epoch; 0 if there is none."""
    origins: Origins
    """The scheduled messages that no longer wait, according to the records read."""
    notes: dict[str, bytes] = field(default_factory=dict)
    """The checkpoint's notes, by the names of the parts that wrote them."""
    is_foreign: bool = False
    """Whether another broker wrote the store last."""
    damages: list[SkippedStretch] = field(default_factory=list)
    """For a store that was rebuilt (`Recovery.make_anew`): the stretches of the commitlog that were skipped."""
    behind: int = 0
    """For a store that was rebuilt: number of whole records behind `end`, which the next start of a broker cuts off."""


class SkippedStretch(NamedTuple):
    """A stretch of the commitlog without a whole record, from one physical offset to before another."""

    start: int
    end: int
    why: str


class _UnfinishedQueues(Exception):
    """An earlier start began to rebuild the consume queues, and ended before its next checkpoint."""

    def __init__(self) -> None:
        super().__init__("an earlier start began to rebuild them and did not finish")


class _LostEnd(Exception):
    """Files of consume queues are wrong, and the commitlog does not reach up to the checkpoint."""


class _LostUnits(Exception):
    """A queue ends before an offset up to which another component has read it, according to that component's files."""

    def __init__(self, key: Key, end: int, offset: int) -> None:
        super().__init__(f"queue {key[1]} of {key[0]} has units up to {end}, and was read up to {offset}")


class _MissingUnits(Exception):
    """A queue does not reach up to a record's queue offset."""

    def __init__(self, queue: ConsumeQueue, record: ScannedRecord) -> None:
        super().__init__(f"{queue} has no unit before queue offset {record.queue_offset}")


class Notes(Protocol):
    """Keeps the checkpoint. Both methods raise OSError."""

    def start_over(self) -> None:
        """Note that all consume queues are about to be removed and rebuilt: no checkpoint may say any longer that they
        are durable."""

    def remake(self, queues: list[tuple[str, int, int]]) -> None:
        """Note that some queues are about to be rebuilt. `queues`: topic, queue id, and the offset of the first byte of
        the first file to rebuild. The next start rebuilds them again, unless another checkpoint is made before."""


class Recovery:
    """One recovery, in two parts: `inspect` looks, and changes nothing; `run` repairs the files."""

    def __init__(
        self,
        files: Files,
        log: Commitlog,
        queue_directory: str,
        open_queue: Callable[[str, int], ConsumeQueue],
        tags_code: TagsCode,
        check: QueueCheck,
        notes: Notes,
    ) -> None:
        """Prepare a recovery. `open_queue` returns a queue, and makes it if it does not exist. `check`: the noted
        checksums of the consume queues, as far as they are valid."""
        self._files = files
        self._log = log
        self._queue_directory = queue_directory
        self._open_queue = open_queue
        self._tags_code = tags_code
        self._check = check
        self._notes = notes
        self._queues: dict[tuple[str, int], ConsumeQueue] = {}
        self._by_topic: dict[tuple[bytes, int], ConsumeQueue] = {}
        """The queues of `_queues`, by the topic's bytes as in records."""
        self._is_ours = False
        """Whether duemq alone wrote the records that are to be read."""
        self._missing: StoreFileMissing | None = None
        """The error for a missing file of a consume queue about which nothing was noted."""
        self._wrong: dict[Key, list[Wrong]] = {}
        """By queue, the files that differ from their notes, or have to be rebuilt for another reason; oldest first."""
        self._removed = {topic.encode(): end for topic, end in check.removed.items()}
        """By removed topic, the physical offset before which its records belong to no queue."""
        self._is_full = False
        """Whether the disk has no room for units."""
        self._to_go: list[str] = []
        """Paths to remove: directories of removed topics' queues whose removal was not finished; empty directories; and
        files in the place of a topic's or a queue's directory."""

    def inspect(self, checkpoint: Checkpoint) -> None:
        """Find the files, and check whether they can be opened, changing nothing. Raises StoreFormatError, OSError."""
        self._log.load()
        check = self._check
        removed = {topic for topic, end in check.removed.items() if end > self._log.begin and check.is_whole}
        failed: dict[Key, StoreFileMissing | StoreFileSize] = {}
        for topic in self._files.list(self._queue_directory):
            if not NAME.fullmatch(topic):
                continue  # not a topic's directory: an operator's copy, or lost+found
            directory = os.path.join(self._queue_directory, topic)
            names = self._files.list(directory)
            to_go = []
            for name in names:
                if not name.isdecimal():
                    continue
                key = topic, int(name)
                if topic in removed and key not in check.segments and key not in check.unknown:
                    # If a new queue of the same name has units, they are noted, or their records lie behind the
                    # checkpoint.
                    to_go.append(os.path.join(directory, name))
                    continue
                queue = self._queues[key] = self._open_queue(*key)
                try:
                    queue.load()
                except (StoreFileMissing, StoreFileSize) as error:
                    failed[key] = error
                if not queue.has_names:
                    to_go.append(os.path.join(directory, name))
            self._to_go += to_go if len(to_go) < len(names) else [directory]
        self._compare(checkpoint, failed)

    def _compare(self, checkpoint: Checkpoint, failed: dict[Key, StoreFileMissing | StoreFileSize]) -> None:
        """Compare the queues with their noted checksums. `failed`: queues whose files are incomplete. Raises
        StoreFileSize if a file of such a queue has the wrong size, unless the queue will be rebuilt."""
        check = self._check
        for key in check.segments:
            loaded = self._queues.get(key) if key not in failed else None
            if wrong := check.wrong(key, loaded, self._log.begin, self._size_at):
                self._wrong[key] = wrong
        for topic, queue_id, base in being_remade(checkpoint):
            wrong = self._wrong.get((topic, queue_id), [])
            if (topic, queue_id) in check.segments and (not wrong or base < wrong[0].base):
                path = os.path.join(self._queue_directory, topic, str(queue_id), f"{base:020}")
                unfinished = Wrong(path, base, "was being rebuilt by an earlier start, which did not finish")
                self._wrong[topic, queue_id] = [unfinished, *wrong]
        for key in check.unknown if check.is_whole else ():
            # The units of these queues can be known only from the commitlog.
            path = os.path.join(self._queue_directory, key[0], str(key[1]))
            self._wrong[key] = [Wrong(path, 0, "could not be read when its units were to be noted")]
        for key, error in failed.items():
            if key in self._wrong:
                continue
            if check.is_whole and key not in check.unknown:
                # Nothing was noted about this queue, so all records of its units lie behind the checkpoint.
                self._wrong[key] = [Wrong(error.path, 0, error.why)]
            elif isinstance(error, StoreFileSize):
                raise StoreFileSize(
                    error.path,
                    f"{error.why}. If all files of consume queues have that size, set mappedFileSizeConsumeQueue to "
                    "it, or rebuild them in the configured size with `duemq store repair`",
                )
            else:
                self._missing = error

    def _size_at(self, physical: int) -> int | None:
        """Return the size of the record at a physical offset; None if the commitlog does not reach there."""
        data = self._log.read_raw(physical, 4)
        return int.from_bytes(data, "big", signed=True) if len(data) == 4 else None

    def run(self, checkpoint: Checkpoint, expected: Mapping[Key, int], *, clean: bool) -> Recovered:
        """Recover; call this after `inspect`. `expected`: queue offsets that queues must reach, since other components
        have read that far. `clean`: whether the previous run of the broker removed its abort file. If this raises an
        error, the next start does the same work again, with the same result. Raises StoreFormatError, OSError."""
        if self._check.damage:
            log.warning("queuecheck_passed_over", reason=f"the file queuecheck {self._check.damage}")
        for path in self._to_go:
            extension = extension_of(self._queue_directory)
            self._files.remove_tree(os.path.join(extension, os.path.relpath(path, self._queue_directory)))
            self._files.remove_tree(path)
        try:
            if self._missing is not None:
                raise self._missing
            if REBUILDING in checkpoint.notes:
                raise _UnfinishedQueues
            start = self._start(checkpoint, clean=clean)
            is_noted = self._check.is_whole and start == checkpoint.recovery_offset
            if self._wrong and start != checkpoint.recovery_offset:
                raise _LostEnd(f"{_describe(self._wrong)}, and the commitlog ends before the checkpoint")
            self._is_ours = not checkpoint.is_foreign and start >= (checkpoint.recovery_offset or 0)
            for key, queue in self._queues.items():
                if key not in self._wrong:
                    if is_noted:
                        self._cut_to_noted(queue, self._check.next_offset(key))
                    self._cut(queue, start)
            if self._wrong:
                self._make_again(start)
            if not is_noted or self._check.unknown:
                start = min(start, self._end_of_queues())
            recovered = self._read_from(max(self._log.begin, start), rebuild=False)
            self._check_reach(expected)
        except (_MissingUnits, _UnfinishedQueues, _LostEnd, _LostUnits, StoreFileMissing) as error:
            log.warning("consume_queues_made_again", queues="all", reason=str(error))
            self._is_ours = not checkpoint.is_foreign and checkpoint.recovery_offset is None
            self._notes.start_over()
            self._check.start_over()
            for queue in self._queues.values():
                queue.remove()
            recovered = self._read_from(self._log.begin, rebuild=True)
        for key in self._check.segments.keys() | self._wrong.keys():
            found = self._queues.get(key)
            if found is None or key in self._wrong or found.next_offset < self._check.next_offset(key):
                self._check.outdate(key)
        self._check.clamp(recovered.end)
        if not clean:
            self._write_again(self._durable_before(checkpoint, recovered), recovered.end)
        return recovered

    def make_anew(
        self,
        origins: Origins,
        goes_on_at: Mapping[Key, int],
        left_out: Container[str],
        served_to: int,
        on_position: Callable[[int], None] = lambda position: None,
    ) -> Recovered:
        """Rebuild all consume queues from the commitlog, in a directory that has none; call this after `inspect`. The
        commitlog is not changed: the next start cuts off its torn end.

        `origins` looks at each record. `goes_on_at`: next queue offsets of queues whose records have all expired.
        `left_out`: topics that get no queues. `served_to`: a start of duemq would serve the records before this
        physical offset, since its checkpoint says that they are durable. `on_position` is called now and then with the
        physical offset reached.

        A damaged stretch is skipped if it lies before the last files, which a broker's start reads, or before
        `served_to`. Otherwise the commitlog ends at the damaged stretch, since every broker would cut it off there. A
        record whose only fault is the checksum of its body keeps its place in its queue. Raises StoreFormatError,
        OSError."""
        log, damages = self._log, list[SkippedStretch]()
        position, count, last_timestamp, end, torn = log.begin, 0, 0, log.begin, None
        checked_from = max(log.begin, log.allocated_end - _CHECKED_FILES * log.segment_size, served_to)
        left_out_bytes: dict[bytes, bool] = {}

        def take(record: ScannedRecord) -> None:
            origins.look(record)
            is_left_out = left_out_bytes.get(record.topic)
            if is_left_out is None:
                is_left_out = left_out_bytes[record.topic] = record.topic.decode() in left_out
            if not is_left_out:
                self._dispatch(record, complete=True, rebuild=True)

        while True:
            scanner = Scanner(log, position)
            for record in scanner:
                take(record)
                count += 1
                last_timestamp = record.store_timestamp
                if not count % _REPORT_RECORDS:
                    on_position(record.physical_offset)
            end, torn = scanner.end
            following = next(whole_records(log, end), None) if end < log.allocated_end else None
            if following is None or end >= checked_from:
                break
            damages.append(SkippedStretch(end, following.physical_offset, torn or "zeros where a record has to begin"))
            position = following.physical_offset
            broken = read_record(log, end, check_crc=False)
            if broken is not None and end + broken.size == position:
                take(broken)
        more = behind(log, end).records if following is not None else 0
        for key, offset in goes_on_at.items():
            queue = self._queues.get(key)
            if queue is None and key[0] not in left_out:
                queue = self._queues[key] = self._open_queue(*key)
                queue.start_at(max(0, offset - 1))
                queue.pad_to(offset)
        for queue in self._queues.values():
            self._write_tail(queue)
        log.read_up_to(end)
        for queue in self._queues.values():
            for path in queue.advance_min(log.begin):
                self._files.remove(path)
        on_position(end)
        if more:
            torn = torn or "zeros where a record has to begin"
        return Recovered(log.begin, end, count, torn, True, last_timestamp, origins, damages=damages, behind=more)

    def _check_reach(self, expected: Mapping[Key, int]) -> None:
        for key, offset in expected.items():
            queue = self._queues.get(key)
            end = queue.next_offset if queue is not None else 0
            if end < offset:
                raise _LostUnits(key, end, offset)

    def _durable_before(self, checkpoint: Checkpoint, recovered: Recovered) -> int:
        """Return the physical offset before which no sync can have failed, after an unclean end.

        A checkpoint names that offset. Without one, it is estimated: nothing is appended after a failed sync, so only
        bytes that had not been synced when that sync began can be missing on the disk. A new file does not wait for a
        sync of the file before it, but a sync begins after every 8 MiB (`durability.owner.UNFLUSHED_BYTES`; in
        RocketMQ, twice a second). So the last two files, or the last 64 MiB if that is more, include all of those
        bytes, unless the disk was far behind the writes. Writing the whole log again would take as long as copying
        it."""
        if not checkpoint.is_foreign and checkpoint.recovery_offset is not None:
            return checkpoint.recovery_offset
        log, end = self._log, recovered.end
        before_last = log.segment_end(max(end - 1, log.begin)) - 2 * log.segment_size
        return max(recovered.start, min(before_last, end - _WRITE_AGAIN_BYTES))

    def _write_again(self, start: int, end: int) -> None:
        """Write the bytes that may not be durable once more. The previous process may have ended because a sync failed.
        Linux then has these bytes only in memory but considers them written, so that no sync by this process would
        write them."""
        position = max(start, self._log.begin)
        while position < end:
            size = min(_WRITE_SIZE, end - position, self._log.segment_end(position) - position)
            self._log.write(position, self._log.read_raw(position, size))
            position += size

    # --- the noted checksums of the consume queues

    def _cut_to_noted(self, queue: ConsumeQueue, offset: int) -> None:
        """Remove the bytes behind the noted units: units of records behind the checkpoint, or garbage. They are kept if
        they begin with the unit of a record before the checkpoint. `offset`: queue offset behind the noted units."""
        if 0 < offset < queue.next_offset:
            physical, size, _ = queue.unit(offset) or (0, 0, 0)
            is_before = 0 <= physical < self._check.recovery_offset
            record = read_record(self._log, physical, check_crc=False) if size > 0 and is_before else None
            if record is None or not self._is_of(record, queue, offset):
                queue.truncate(offset)

    def _make_again(self, start: int) -> None:
        """Rebuild the wrong files, and those behind them, up to a physical offset from which everything is read anyway.
        If this does not finish, the next start finds the same files wrong."""
        check, wanted, position = self._check, dict[tuple[bytes, int], int](), start
        self._notes.remake([(*key, wrong[0].base) for key, wrong in self._wrong.items()])
        for key, wrong in self._wrong.items():
            queue = self._queues[key] = self._open_queue(*key)
            first = wrong[0].base
            noted = check.segments.get(key)
            if noted is None:
                queue.keep_before(0, 0)
                if key in check.unknown:
                    wanted[key[0].encode(), key[1]] = -1
                    position = self._log.begin
                continue
            kept = {base: segment for base, segment in noted.items() if base < first}
            newest = max(kept, default=0)
            last = kept[newest].last if kept else -1
            queue.keep_before(first, newest // UNIT.size + kept[newest].units if kept else 0)
            wanted[key[0].encode(), key[1]] = last
            position = min(position, max(last, self._log.begin))
        origins, count = Origins(), 0
        for record in self._records(position, start):
            origins.look(record)
            if record.physical_offset > wanted.get((record.topic, record.queue_id), start):
                self._dispatch(record, complete=True, rebuild=True)
                count += 1
        for key in self._wrong:
            queue = self._queues[key]
            self._go_on_as_noted(queue, start)
            self._write_tail(queue)
            if key[0] == SCHEDULE_TOPIC:
                self._withdraw(queue, origins)
        log.warning(
            "consume_queues_made_again",
            queues=len(self._wrong),
            reason=_describe(self._wrong),
            messages=count,
            bytes_read=start - position,
        )

    def _records(self, position: int, end: int) -> Iterator[ScannedRecord]:
        """Yield the records between two physical offsets. If a record is damaged, the rest of its file is skipped, with
        a warning."""
        while position < end:
            scanner = Scanner(self._log, position)
            for record in scanner:
                if record.physical_offset >= end:
                    return
                yield record
            found = scanner.end
            if found.physical_offset < end:
                log.warning("commitlog_damaged", physical_offset=found.physical_offset, reason=found.why)
            position = self._log.segment_end(found.physical_offset)

    def _withdraw(self, queue: ConsumeQueue, origins: Origins) -> None:
        """Restore the marks of a queue's messages that later records have withdrawn."""
        for physical in origins.withdrawn:
            offset = queue.first_where(queue.min_offset, queue.next_offset, partial(_is_from, physical))
            unit = queue.unit(offset)
            if unit is not None and unit[0] == physical:
                queue.mark(offset, WITHDRAWN_SIZE)

    # --- the start of reading

    def _start(self, checkpoint: Checkpoint, *, clean: bool) -> int:
        begin, end = self._log.begin, self._log.allocated_end
        if not any(queue.next_offset for queue in self._queues.values()) and not self._wrong:
            return begin
        ours = checkpoint.recovery_offset
        if ours is not None and begin <= ours <= end:
            return ours
        return end if clean else self._by_timestamp(checkpoint)

    def _by_timestamp(self, checkpoint: Checkpoint) -> int:
        """Return the start of the last file whose first record is old enough to be covered by RocketMQ's checkpoint."""
        limit = min(checkpoint.physic_timestamp, checkpoint.logic_timestamp) - _CLOCK_MARGIN_MS
        for base in reversed(self._log.segment_bases()):
            first = read_record(self._log, base)
            if first is not None and first.store_timestamp <= limit:
                return base
        return self._log.begin

    def _cut(self, queue: ConsumeQueue, start: int) -> None:
        """Cut a queue at a physical offset, then also remove last units that do not belong to a record of this queue: a
        torn unit may seem to lie before that offset."""
        queue.cut(start)
        while queue.next_offset > queue.min_offset:
            physical, size, _ = queue.unit(queue.next_offset - 1) or (0, 0, 0)
            is_deleted = size > 0 and physical < self._log.begin
            if size == PADDING_SIZE or is_deleted or self._is_last_unit_of(queue, physical, size):
                return
            queue.truncate(queue.next_offset - 1)

    def _is_last_unit_of(self, queue: ConsumeQueue, physical: int, size: int) -> bool:
        record = read_record(self._log, physical, check_crc=False)
        return (
            record is not None
            and size in (record.size, *MARK_SIZES)
            and self._is_of(record, queue, queue.next_offset - 1)
        )

    @staticmethod
    def _is_of(record: ScannedRecord, queue: ConsumeQueue, offset: int) -> bool:
        """Whether a record belongs to a queue and has the given queue offset."""
        found = (record.topic, record.queue_id, record.queue_offset)
        return found == (queue.topic.encode(), queue.queue_id, offset)

    def _end_of_queues(self) -> int:
        """Return the physical offset behind the last record that any consume queue knows."""
        last = self._log.begin
        for queue in self._queues.values():
            unit = queue.unit(queue.next_offset - 1)
            if unit is None or unit[1] == PADDING_SIZE:
                continue
            record = read_record(self._log, unit[0], check_crc=False) if unit[1] in MARK_SIZES else None
            last = max(last, unit[0] + (record.size if record is not None else unit[1]))
        return last

    # --- reading

    def _read_from(self, start: int, *, rebuild: bool) -> Recovered:
        complete = start == self._log.begin
        scanner = Scanner(self._log, start, zeros_are_torn=self._is_ours)
        count, last_timestamp = 0, 0
        origins = Origins()
        for record in scanner:
            origins.look(record)
            self._dispatch(record, complete=complete, rebuild=rebuild)
            count += 1
            last_timestamp = record.store_timestamp
        end = scanner.end.physical_offset
        if rebuild:
            for key in self._check.segments:
                if key in self._queues:
                    self._go_on_as_noted(self._queues[key], end)
        for queue in self._queues.values():
            self._write_tail(queue)
        self._keep_what_is_cut(end, scanner.end.why)
        self._log.recovered(end)
        for queue in self._queues.values():
            for path in queue.advance_min(self._log.begin):
                self._files.remove(path)
        last_timestamp = last_timestamp or self._timestamp_before(start)
        return Recovered(start, end, count, scanner.end.why, rebuild, last_timestamp, origins)

    def _keep_what_is_cut(self, end: int, why: str | None) -> None:
        """If whole records lie behind the end of the commitlog, keep the bytes that are cut off, durably, in files of
        their own, and log that. A tail that a power cut tore seldom has whole records, and never flushed ones; but if a
        record was damaged in another way, those behind it may have been acknowledged. Raises OSError."""
        found = behind(self._log, end)
        if not found.records:
            return
        files, directory = self._files, os.path.join(os.path.dirname(self._log.directory.rstrip("/")), file_names.CUT)
        files.make_directories(directory, durable=True)
        kept, position = list[str](), end
        while position < found.end:
            stop = min(found.end, self._log.segment_end(position))
            kept.append(self._keep(position, stop, directory))
            position = stop
        files.sync_directory(directory)
        log.error(
            "commitlog_cut",
            physical_offset=end,
            reason=why or "zeros where a record has to begin",
            bytes=found.end - end,
            whole_records=found.records,
            kept_in=kept,
            help="these records are no longer served; the files in kept_in have them as they were",
        )

    def _keep(self, start: int, stop: int, directory: str) -> str:
        """Copy a range of one commitlog file into a new file of a directory; return the path of the new file."""
        files, number = self._files, 0
        path = name = os.path.join(directory, f"{start:020}")
        while files.exists(path):
            number += 1
            path = f"{name}.{number}"
        file = files.create(path, stop - start)
        for at in range(start, stop, _WRITE_SIZE):
            file.write(at - start, self._log.read_raw(at, min(_WRITE_SIZE, stop - at)))
        file.sync()
        file.close()
        return path

    def _go_on_as_noted(self, queue: ConsumeQueue, end: int) -> None:
        """Make a queue that was rebuilt from the commitlog up to a physical offset continue at the noted queue offset,
        even if its last records are gone: no queue offset is used twice."""
        noted = self._check.next_offset((queue.topic, queue.queue_id))
        if noted and not queue.next_offset:
            queue.start_at(noted - 1)
            queue.pad_to(noted)
        elif queue.next_offset < noted <= queue.next_offset + _MAX_PADDING:
            if queue.topic in (SCHEDULE_TOPIC, TIMER_TOPIC):
                # At a start RocketMQ cuts off units whose physical offset is at or behind the commitlog's end.
                queue.pad_to(noted, UNIT.pack(max(end - 1, 1), PADDING_SIZE, 0))
            else:
                queue.pad_to(noted, hole(self._file_before(end), end))

    def _dispatch(self, record: ScannedRecord, *, complete: bool, rebuild: bool) -> None:
        # One slice is faster than reading each field by its name, and recovery spends its time here and in the scanner.
        physical, size, queue_id, queue_offset, sys_flag, _, topic = record[:7]
        if sys_flag & FLAG_TRANSACTION not in _WITH_UNITS:
            return
        if self._removed and physical < self._removed.get(topic, 0):
            return
        queue = self._by_topic.get((topic, queue_id))
        if queue is None:
            queue = self._by_topic[topic, queue_id] = self._queue(topic.decode(), queue_id)
        if queue_offset != queue.next_offset:
            self._align(queue, record, complete=complete, rebuild=rebuild)
        queue.tail += UNIT.pack(physical, size, self._tags_code(queue.topic, record))
        queue.next_offset += 1
        if len(queue.tail) > _WRITE_TAIL_BYTES and not self._is_full:
            self._write_tail(queue)

    def _queue(self, topic: str, queue_id: int) -> ConsumeQueue:
        queue = self._queues.get((topic, queue_id))
        if queue is None:
            queue = self._queues[topic, queue_id] = self._open_queue(topic, queue_id)
        return queue

    def _write_tail(self, queue: ConsumeQueue) -> None:
        """Put units into a queue's files. If there is no room, they stay in memory until there is, and the messages can
        still be read. Raises OSError for any other failure."""
        try:
            queue.write_tail()
        except OSError as error:
            if not has_no_room(error):
                raise
            if not self._is_full:
                log.warning("queues_not_written", queue=str(queue), reason=str(error))
            self._is_full = True

    def _align(self, queue: ConsumeQueue, record: ScannedRecord, *, complete: bool, rebuild: bool) -> None:
        """Adapt a queue to a record whose queue offset is not the queue's next one. `complete`: whether the whole
        commitlog is read; `rebuild`: whether the queue is being rebuilt, so that gaps are filled. Raises
        StoreFormatError, _MissingUnits."""
        gap = record.queue_offset - queue.next_offset
        if gap < 0:
            queue.truncate(record.queue_offset)
        elif complete and queue.next_offset == 0:
            queue.remove()
            queue.start_at(record.queue_offset)
        elif rebuild and gap <= _MAX_PADDING:
            queue.pad_to(record.queue_offset, self._hole_before(queue, record))
        elif rebuild:
            where = f"the record at {record.physical_offset}"
            raise StoreFormatError(self._log.directory, f"{where} has queue offset {record.queue_offset} in {queue}")
        else:
            raise _MissingUnits(queue, record)

    def _hole_before(self, queue: ConsumeQueue, record: ScannedRecord) -> bytes:
        """Return the unit that stands for each missing message before a record, whose own record the commitlog no
        longer has. Physical offsets stay in order, so that binary searches still work. In queues that only brokers
        read, message by message, the unit has a size that no record has: brokers continue with the next unit. For other
        queues see `consume_queue`."""
        if queue.topic in (SCHEDULE_TOPIC, TIMER_TOPIC):
            return UNIT.pack(record.physical_offset, WITHDRAWN_SIZE, self._tags_code(queue.topic, record))
        return hole(self._file_before(record.physical_offset), record.physical_offset)

    def _file_before(self, physical: int) -> int:
        """Return the start of the commitlog file before the one with a physical offset, or the begin of the log if
        there is none; never 0."""
        log = self._log
        return max(log.segment_end(physical) - 2 * log.segment_size, log.begin, 1)

    def _timestamp_before(self, start: int) -> int:
        """Return the store time, ms since the epoch, of the newest record before a physical offset that is the last one
        of a consume queue; 0 if there is none."""
        offsets = [unit[0] for queue in self._queues.values() if (unit := queue.unit(queue.next_offset - 1))]
        newest = max((offset for offset in offsets if offset < start), default=-1)
        record = read_record(self._log, newest, check_crc=False) if newest >= 0 else None
        return record.store_timestamp if record is not None else 0


def _is_from(wanted: int, physical: int, size: int, code: int) -> bool:
    """Whether a unit belongs to a record at or behind the physical offset `wanted`."""
    return physical_offset_of(physical, size, code) >= wanted and (size != PADDING_SIZE or physical > 0)


def _describe(wrong: dict[Key, list[Wrong]]) -> str:
    """Return a text that names the wrong files and their faults, _MAX_NAMED files at most."""
    files = [f"{file.path} {file.why}" for of_queue in wrong.values() for file in of_queue]
    more = f"; and {len(files) - _MAX_NAMED} more" if len(files) > _MAX_NAMED else ""
    return "; ".join(files[:_MAX_NAMED]) + more
