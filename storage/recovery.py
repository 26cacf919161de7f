"""Opening a store: where its commitlog ends, and consume queues that agree with it.

The commitlog is the truth. Recovery picks a position before which records and consume-queue units are known to be
durable, cuts every consume queue to it, and reads the commitlog from there, record by record, giving each its unit
again, until the first byte that is no whole record; the commitlog is cut there. Consume queues are made from the
commitlog, never the other way.

Where the position comes from: our own checkpoint, if nobody else wrote the store since; else RocketMQ's rule, the
start of the last file whose first record is three seconds older than RocketMQ's checkpoint, or, after RocketMQ's clean
stop, the end of the last record that a consume queue knows.

On recovery of a torn tail: the record that is torn was not acknowledged under SYNC_FLUSH, and nothing behind it was,
for a flush covers all before its end.

If a record does not follow on its queue's last unit, units before the position are missing (a file or directory was
lost): then all consume queues are made anew from the whole commitlog.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from protocol.record import FLAG_TRANSACTION, TRANSACTION_COMMIT, TRANSACTION_NONE
from storage.checkpoint import REBUILDING, Checkpoint
from storage.commitlog import Commitlog
from storage.consume_queue import PADDING_SIZE, UNIT, WITHDRAWN_SIZE, ConsumeQueue
from storage.errors import StoreFileMissing, StoreFormatError
from storage.files import Files
from storage.origins import Origins
from storage.scan import ScannedRecord, Scanner, read_record

_CLOCK_MARGIN_MS: Final = 3000
_WRITE_TAIL_BYTES: Final = 1 << 18
_MAX_PADDING: Final = 10_000_000

TagsCode = Callable[[str, str, int, int], int]
"""Of topic, property text, store time and prepared-transaction offset: what the consume queue keeps beside a record's
place."""


@dataclass
class Recovered:
    """What recovery found. Offsets are physical offsets."""

    start: int
    """Where reading started."""
    end: int
    """Where the commitlog ends."""
    records: int
    """Records read."""
    torn: str | None
    """What the commitlog was cut for, or None."""
    rebuilt: bool
    """Whether all consume queues were made anew."""
    last_store_timestamp: int
    """Store time of the last record, 0 without one; ms since the epoch."""
    origins: Origins
    """Which scheduled messages are done, as the records read tell."""
    notes: dict[str, bytes] = field(default_factory=dict)
    """The checkpoint's notes, as of `start`, by the names of those who wrote them."""
    is_foreign: bool = False
    """Whether somebody else wrote the store last."""


class _UnfinishedQueues(Exception):
    """A start before this one made the consume queues anew, and did not come as far as a checkpoint."""


class _MissingUnits(Exception):
    """A queue does not reach up to a record's queue offset."""

    def __init__(self, queue: ConsumeQueue, record: ScannedRecord) -> None:
        super().__init__(f"{queue} has no unit before queue offset {record.queue_offset}")


class Recovery:
    """One recovery, in two parts: `inspect` looks, and changes nothing; `run` brings the files in line. `open_queue`
    gives a queue, making it if need be."""

    def __init__(
        self,
        files: Files,
        log: Commitlog,
        queue_directory: str,
        open_queue: Callable[[str, int], ConsumeQueue],
        tags_code: TagsCode,
        before_rebuild: Callable[[], None] = lambda: None,
    ) -> None:
        """`before_rebuild` is called before all consume queues are removed, to be made anew: no checkpoint may say any
        more that they are durable."""
        self._files = files
        self._log = log
        self._queue_directory = queue_directory
        self._open_queue = open_queue
        self._tags_code = tags_code
        self._before_rebuild = before_rebuild
        self._queues: dict[tuple[str, int], ConsumeQueue] = {}
        self._by_topic: dict[tuple[bytes, int], ConsumeQueue] = {}
        """The same, by the topic as records have it."""
        self._is_ours = False
        """Whether only we wrote what is to be read."""
        self._missing: StoreFileMissing | None = None
        """A file of a consume queue that is not there."""

    def inspect(self) -> None:
        """Find the files, and see whether they are such as can be opened; nothing is changed. Raises StoreFormatError,
        OSError."""
        self._log.load()
        for topic in self._files.list(self._queue_directory):
            for name in self._files.list(os.path.join(self._queue_directory, topic)):
                if not name.isdecimal():
                    continue
                queue = self._queues[topic, int(name)] = self._open_queue(topic, int(name))
                try:
                    queue.load()
                except StoreFileMissing as error:
                    self._missing = error

    def run(self, checkpoint: Checkpoint, *, clean: bool) -> Recovered:
        """Recover, after `inspect`. `clean`: the last run removed its abort file. Where it raises, what it has done is
        done again by the next one, which finds the same. Raises StoreFormatError, OSError."""
        try:
            if self._missing is not None:
                raise self._missing
            if REBUILDING in checkpoint.notes:
                raise _UnfinishedQueues
            start = self._start(checkpoint, clean=clean)
            self._is_ours = not checkpoint.is_foreign and start >= (checkpoint.recovery_offset or 0)
            for queue in self._queues.values():
                self._cut(queue, start)
            return self._read_from(max(self._log.begin, min(start, self._end_of_queues())), rebuild=False)
        except (_MissingUnits, _UnfinishedQueues, StoreFileMissing):
            self._is_ours = not checkpoint.is_foreign and checkpoint.recovery_offset is None
            self._before_rebuild()
            for queue in self._queues.values():
                queue.remove()
            return self._read_from(self._log.begin, rebuild=True)

    # --- where to start

    def _start(self, checkpoint: Checkpoint, *, clean: bool) -> int:
        begin, end = self._log.begin, self._log.allocated_end
        if not any(queue.next_offset for queue in self._queues.values()):
            return begin
        ours = checkpoint.recovery_offset
        if ours is not None and begin <= ours <= end:
            return ours
        return end if clean else self._by_timestamp(checkpoint)

    def _by_timestamp(self, checkpoint: Checkpoint) -> int:
        """The start of the last file whose first record is old enough to be covered by RocketMQ's checkpoint."""
        limit = min(checkpoint.physic_timestamp, checkpoint.logic_timestamp) - _CLOCK_MARGIN_MS
        for base in reversed(self._log.segment_bases()):
            first = read_record(self._log, base)
            if first is not None and first.store_timestamp <= limit:
                return base
        return self._log.begin

    def _cut(self, queue: ConsumeQueue, start: int) -> None:
        """Cut a queue to the start; then its last unit has to be the one of a record of this queue. A unit that is
        torn, though it seems to lie before the start, is found out so."""
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
            and size in (record.size, WITHDRAWN_SIZE)
            and record.topic == queue.topic.encode()
            and record.queue_id == queue.queue_id
            and record.queue_offset == queue.next_offset - 1
        )

    def _end_of_queues(self) -> int:
        """The end of the last record that any consume queue knows."""
        last = self._log.begin
        for queue in self._queues.values():
            unit = queue.unit(queue.next_offset - 1)
            if unit is None or unit[1] == PADDING_SIZE:
                continue
            record = read_record(self._log, unit[0], check_crc=False) if unit[1] == WITHDRAWN_SIZE else None
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
        for queue in self._queues.values():
            queue.write_tail()
        self._log.recovered(end)
        for queue in self._queues.values():
            for path in queue.advance_min(self._log.begin):
                self._files.remove(path)
        last_timestamp = last_timestamp or self._timestamp_before(start)
        return Recovered(start, end, count, scanner.end.why, rebuild, last_timestamp, origins)

    def _dispatch(self, record: ScannedRecord, *, complete: bool, rebuild: bool) -> None:
        if record.sys_flag & FLAG_TRANSACTION not in (TRANSACTION_NONE, TRANSACTION_COMMIT):
            return
        queue = self._by_topic.get((record.topic, record.queue_id))
        if queue is None:
            topic = record.topic.decode()
            queue = self._queues.get((topic, record.queue_id))
            if queue is None:
                queue = self._queues[topic, record.queue_id] = self._open_queue(topic, record.queue_id)
            self._by_topic[record.topic, record.queue_id] = queue
        if record.queue_offset != queue.next_offset:
            self._align(queue, record, complete=complete, rebuild=rebuild)
        code = self._tags_code(
            queue.topic,
            record.properties.decode("utf-8", "replace"),
            record.store_timestamp,
            record.prepared_transaction_offset,
        )
        queue.tail += UNIT.pack(record.physical_offset, record.size, code)
        queue.next_offset += 1
        if len(queue.tail) > _WRITE_TAIL_BYTES:
            queue.write_tail()

    def _align(self, queue: ConsumeQueue, record: ScannedRecord, *, complete: bool, rebuild: bool) -> None:
        """A record whose queue offset is not the next one of its queue."""
        gap = record.queue_offset - queue.next_offset
        if gap < 0:
            queue.truncate(record.queue_offset)
        elif complete and queue.next_offset == 0:
            queue.remove()
            queue.start_at(record.queue_offset)
        elif rebuild and gap <= _MAX_PADDING:
            queue.pad_to(record.queue_offset)
        elif rebuild:
            where = f"the record at {record.physical_offset}"
            raise StoreFormatError(self._log.directory, f"{where} has queue offset {record.queue_offset} in {queue}")
        else:
            raise _MissingUnits(queue, record)

    def _timestamp_before(self, start: int) -> int:
        """Store time of the last record that ends at or before a position, by the consume queues; 0 without one."""
        offsets = [unit[0] for queue in self._queues.values() if (unit := queue.unit(queue.next_offset - 1))]
        newest = max((offset for offset in offsets if offset < start), default=-1)
        record = read_record(self._log, newest, check_crc=False) if newest >= 0 else None
        return record.store_timestamp if record is not None else 0
