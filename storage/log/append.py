"""Appending: records are staged one by one and written in one go.

This is the hot path of the broker. A batch holds the messages of one read of a socket, one slice of a drain, or one
batch send; it costs one write to the commitlog, and some packing for each message. While a batch is staged, nothing
else may happen to the store: the code that stages runs to `commit` without waiting for anything.

A batch is written as a whole or not at all: when a write fails, nothing of the batch is in the commitlog or in a queue.
That holds for every error, including lack of memory in the middle of staging: then the batch is torn, and is not
written.

Keeps invariant 4 of ARCHITECTURE.md.
"""

from __future__ import annotations

import errno
import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import numpy as np

from duemq.protocol.frames.command import Body
from duemq.protocol.records import checksum, properties
from duemq.protocol.records.message_id import pack_host
from duemq.protocol.records.record import (
    END_MARKER_SIZE,
    FIXED_SIZE_IPV4,
    FLAG_BORN_IPV6,
    FLAG_STORE_IPV6,
    HEAD_IPV4,
    MAGIC_V1,
    crc32,
    head_for,
)
from duemq.storage.current import Current
from duemq.storage.durability.health import Health, Verdict
from duemq.storage.errors import RecordIllegal, RecordTooLarge, StoreError, StoreFull
from duemq.storage.log.commitlog import Commitlog
from duemq.storage.log.copies import ORIGIN_ZERO, UNITS, PackedRecords
from duemq.storage.queues.consume_queue import UNIT, UNIT_SIZE, ConsumeQueue

if TYPE_CHECKING:
    from duemq.storage.log.copies import Integers

_U16: Final = struct.Struct(">H").pack
_HEAD: Final = HEAD_IPV4.pack
_UNIT: Final = UNIT.pack
_IPV6: Final = FLAG_BORN_IPV6 | FLAG_STORE_IPV6
_IPV6_EXTRA: Final = 12


class Appender:
    """The one writer of the commitlog. `store_host` is the (address, port) that records name as their store.
    `with_checksums`: each record ends with its checksum (`protocol.records.checksum`). A write that cannot be undone
    poisons the store's `health`."""

    def __init__(
        self,
        commitlog: Commitlog,
        health: Health,
        store_host: tuple[str, int],
        max_body_size: Current[int],
        on_append: Callable[[list[ConsumeQueue]], None],
        *,
        with_checksums: bool = False,
    ) -> None:
        self._log = commitlog
        self._health = health
        self._store_host = pack_host(*store_host)
        self._store_flag = FLAG_STORE_IPV6 if len(self._store_host) == 20 else 0
        self._overhead = FIXED_SIZE_IPV4 + (_IPV6_EXTRA if self._store_flag else 0)
        self.max_body_size = max_body_size
        """The most bytes that a body may have; the appender only reads it."""
        self._with_checksums = with_checksums
        self.max_properties_size = properties.MAX_BYTES - (checksum.ROOM if with_checksums else 0)
        """The most bytes that the properties of a sent message may have."""
        self._on_append = on_append
        self._parts: list[Body] = []
        self._chunks: list[tuple[int, list[Body]]] = []
        self._touched: list[ConsumeQueue] = []
        self._position = self._limit = 0
        self.has_begun = False
        """Whether a batch is staged: `begin` then continues it instead of starting another."""
        self._is_torn = False
        self.store_timestamp = 0
        """Store time of the records of this batch, ms since the epoch; set by `begin`."""
        self.last_store_timestamp = 0
        """Store time of the newest record."""
        self.last_physical_offset = 0
        """Physical offset of the record staged last."""
        self.appended = 0
        """Records written since start."""
        self.appended_bytes = 0
        """Bytes of records written since start."""
        self._uncounted: list[ConsumeQueue] = []
        """Queues with records that `take_uncounted` has not returned yet."""

    @property
    def store_host(self) -> bytes:
        """The store host as records contain it."""
        return self._store_host

    def prepare(self, queue: ConsumeQueue) -> None:
        """Prepare a queue, once, before the first record for it is staged."""
        queue.record_overhead = self._overhead + len(queue.topic_field) - 1

    def begin(self, now_ms: int) -> int:
        """Start a batch, or continue the staged one; return the store time of its records, ms since the epoch.
        `now_ms`: the store time for a new batch. Raises StoreError if the store accepts nothing now."""
        if self.has_begun:
            return self.store_timestamp
        if self._health.verdict is not Verdict.HEALTHY:
            raise self._health.error()
        self.has_begun = True
        self._position = self._log.end
        self._limit = self._log.segment_end(self._position) - END_MARKER_SIZE
        self.store_timestamp = now_ms
        return self.store_timestamp

    def check(self, body: Body, property_bytes: bytes, room: int = 0, *, is_stored: bool = False) -> None:
        """Raise RecordIllegal for a message that must not be passed to `add`. Zero bytes in properties are refused:
        after a power cut, recovery would take a sector of zeros there for one that was not written. `room`: bytes that
        must be left for more properties. `is_stored`: the store has the message already, so its body was not too large
        when it was stored."""
        if len(body) > self.max_body_size.value and not is_stored:
            raise RecordTooLarge("a body", len(body), self.max_body_size.value)
        limit = (properties.MAX_BYTES if is_stored else self.max_properties_size) - room
        if len(property_bytes) > limit:
            raise RecordTooLarge("properties", len(property_bytes), limit)
        if len(body) + len(property_bytes) + 512 > self._log.segment_size:
            raise RecordTooLarge("a message", len(body) + len(property_bytes), self._log.segment_size - 512)
        if b"\0" in property_bytes:
            raise RecordIllegal("properties with a zero byte")

    def add(
        self,
        queue: ConsumeQueue,
        body: Body,
        property_bytes: bytes,
        tags_code: int,
        born_timestamp: int,
        born_host: bytes,
        flag: int = 0,
        sys_flag: int = 0,
        reconsume_times: int = 0,
        prepared_transaction_offset: int = 0,
    ) -> int:
        """Stage one message for a queue; return its queue offset. Call `begin` before, and `commit` after. The message
        must have passed `check`, or be known to be small. If the properties are those of another record, that record's
        checksum is left out."""
        properties_size = len(property_bytes)
        if self._with_checksums:
            property_bytes, properties_size = _before_checksum(property_bytes)
        body_size = len(body)
        size = queue.record_overhead + body_size + properties_size
        pack_head = _HEAD
        if len(born_host) != 8 or sys_flag & _IPV6 or self._store_flag:  # for a record appended again, hosts may differ
            sys_flag, head = self._with_ipv6(sys_flag, born_host)
            pack_head = head.pack
            size += _IPV6_EXTRA if len(born_host) == 20 else 0
        position = self._position
        if position + size > self._limit:
            position = self._next_segment()
        offset = queue.next_offset
        packed = pack_head(
            size,
            MAGIC_V1,
            crc32(body) & 0x7FFFFFFF if body_size else 0,
            queue.queue_id,
            flag,
            offset,
            position,
            sys_flag,
            born_timestamp,
            born_host,
            self.store_timestamp,
            self._store_host,
            reconsume_times,
            prepared_transaction_offset,
            body_size,
        )
        unit = _UNIT(position, size, tags_code)
        following, end = offset + 1, position + size
        if queue.staged_from < 0:
            self._touched.append(queue)
            queue.staged_from = offset
        self._parts += (packed, body, queue.topic_field, _U16(properties_size), property_bytes)
        try:
            if self._with_checksums and properties_size > len(property_bytes):
                self._parts.append(checksum.checksum_field(self._parts[-5:]))
            queue.tail += unit
        except BaseException:
            self._is_torn = True
            raise
        # The following lines need no memory: the record, its unit and the offsets behind them change together.
        queue.next_offset = following
        self.last_physical_offset = position
        self._position = end
        return offset

    @property
    def can_copy(self) -> bool:
        """Whether `add_copies` may be used: it writes IPv4 store hosts only, and no checksums."""
        return not self._store_flag and not self._with_checksums

    def add_copies(self, records: PackedRecords, queues: list[ConsumeQueue], which: Integers, codes: Integers) -> None:
        """Stage a copy of each record; all records must be of the usual kind. `which`: for each copy, the index of its
        queue in `queues`; `codes`: its tags code. Call `begin` before, and `commit` after."""
        try:
            self._add_copies(records, queues, which, codes)
        except BaseException:
            self._is_torn = True
            raise

    def _add_copies(self, records: PackedRecords, queues: list[ConsumeQueue], which: Integers, codes: Integers) -> None:
        field_sizes = np.array([len(queue.topic_field) for queue in queues])
        sizes = records.sizes - (records.texts - records.topics) + field_sizes[which]
        ends = self._position + np.cumsum(sizes)
        if ends[-1] > self._limit:
            fitting = int(np.searchsorted(ends, self._limit, "right"))
            if fitting:
                self._add_copies(records.part(slice(0, fitting)), queues, which[:fitting], codes[:fitting])
            self._next_segment()
            self._add_copies(records.part(slice(fitting, None)), queues, which[fitting:], codes[fitting:])
            return
        units = np.empty(len(sizes), UNITS)
        units["physical_offset"] = ends - sizes
        units["size"] = sizes
        units["tags_code"] = codes
        heads = records.heads
        origins = heads["physical_offset"]
        heads["prepared_offset"] = np.where(origins == 0, ORIGIN_ZERO, origins)
        heads["size"] = sizes
        heads["physical_offset"] = units["physical_offset"]
        heads["store_ms"] = self.store_timestamp
        heads["store_host"] = np.void(self._store_host)
        for number, queue in enumerate(queues):
            mine = slice(None) if len(queues) == 1 else np.flatnonzero(which == number)
            taken = units[mine]
            if not len(taken):
                continue
            if queue.staged_from < 0:
                self._touched.append(queue)
                queue.staged_from = queue.next_offset
            heads["queue_id"][mine] = queue.queue_id
            following = queue.next_offset + len(taken)
            heads["queue_offset"][mine] = np.arange(queue.next_offset, following)
            queue.tail += taken.tobytes()
            queue.next_offset = following
        self._parts += records.copied([queue.topic_field for queue in queues], which)
        self.last_physical_offset = int(ends[-1] - sizes[-1])
        self._position = int(ends[-1])

    def commit(self) -> None:
        """Write the staged batch. Raises StoreFull or StoreBroken; nothing of the batch then remains, unless it was
        written but could not be noted in memory: that poisons the store, and the next start finds the batch."""
        if not self.has_begun:
            return
        self.has_begun = False
        if self._is_torn:
            raise self._undo(MemoryError("a batch could not be staged as a whole"))
        touched = self._touched
        if not touched:
            return
        log = self._log
        try:
            if self._chunks:
                self._write_chunks()
            else:
                if self._position > log.allocated_end:
                    log.ensure_segment(log.end)
                log.write(log.end, b"".join(self._parts))
        except BaseException as error:
            raise self._undo(error) from error
        try:
            self.appended_bytes += self._position - log.end
            log.end = self._position
            self.last_store_timestamp = self.store_timestamp
            self._parts.clear()
            self._touched = []
            for queue in touched:
                self.appended += queue.next_offset - queue.staged_from
                if queue.uncounted_from < 0:
                    self._uncounted.append(queue)
                    queue.uncounted_from = queue.staged_from
                queue.staged_from = -1
        except BaseException as error:  # the batch is written, but this process does not know it: only a start finds it
            raise self._health.not_noted(error) from error
        self._on_append(touched)

    def take_uncounted(self) -> list[tuple[ConsumeQueue, int]]:
        """Return the queues that got records since the last call, each with the queue offset of its first new record.
        Statistics count from these, so that counting costs nothing per message and little per batch."""
        queues, self._uncounted = self._uncounted, []
        taken = [(queue, queue.uncounted_from) for queue in queues]
        for queue in queues:
            queue.uncounted_from = -1
        return taken

    def roll_back(self) -> None:
        """Drop the staged batch."""
        self.has_begun = self._is_torn = False
        self._parts.clear()
        self._chunks.clear()
        for queue in self._touched:
            del queue.tail[len(queue.tail) - (queue.next_offset - queue.staged_from) * UNIT_SIZE :]
            queue.next_offset = queue.staged_from
            queue.staged_from = -1
        self._touched = []

    def _with_ipv6(self, sys_flag: int, born_host: bytes) -> tuple[int, struct.Struct]:
        flags = self._store_flag | (FLAG_BORN_IPV6 if len(born_host) == 20 else 0)
        return sys_flag & ~_IPV6 | flags, head_for(flags)

    def _next_segment(self) -> int:
        """End the current file after the staged records; return the position of the next file, which gets the records
        that follow."""
        try:
            if not self._chunks:
                self._chunks.append((self._log.end, self._parts))
            position = self._log.segment_end(self._chunks[-1][0])
            parts: list[Body] = []
            self._chunks.append((position, parts))
            self._limit = position + self._log.segment_size - END_MARKER_SIZE
        except BaseException:
            self._is_torn = True
            raise
        self._parts, self._position = parts, position
        return position

    def _write_chunks(self) -> None:
        log, chunks = self._log, self._chunks
        for number, (start, parts) in enumerate(chunks):
            log.ensure_segment(start)
            data = b"".join(parts)
            if data:
                log.write(start, data)
            if number + 1 < len(chunks):
                log.write_end_marker(start + len(data))
        self._chunks = []
        self._parts = []

    def _undo(self, error: BaseException) -> StoreError:
        """Undo a failed write; return the error to raise. The bytes on the disk are cleared as well: recovery would
        otherwise take their records for acknowledged ones."""
        try:
            self.roll_back()
            self._log.clear_tail()
        except BaseException as second:
            self._health.poison(f"a failed write could not be undone: {second!r}")
            return self._health.error()
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return StoreFull(f"the disk is full: {error}")
        if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
            return StoreFull("memory ran out: send again, and give the broker more memory")
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
            return StoreFull(f"too many files are open: {error}. Raise the broker's limit (ulimit -n)")
        self._health.poison(f"writing the commitlog failed: {error}")
        return self._health.error()


def _before_checksum(property_bytes: bytes) -> tuple[bytes, int]:
    """Return properties without the checksum of another record, and their size including the checksum that is to
    follow. A message that has waited since before checksums were switched on may leave no room for one, and then gets
    none: the size is then that of the properties alone."""
    bare = checksum.without(property_bytes)
    ended = checksum.ended(bare)
    size = len(ended) + checksum.SIZE
    return (ended, size) if size <= properties.MAX_BYTES else (bare, len(bare))
