"""A consume queue: the index of one queue of one topic, derived from the commitlog.

    consumequeue/<topic>/<queue id>/00000000000000000000, ...     files of 300,000 units (mappedFileSizeConsumeQueue)
    0                 8       12              20
    | physical offset | size  | tags code     |     size: of the whole record
    | int64           | int32 | int64         |     tags code: hash of the tags, 0 without tags; in SCHEDULE_TOPIC_XXXX
                                                    the deliver time, ms since the epoch; duemq writes the deliver time
                                                    in rmq_sys_wheel_timer as well, where RocketMQ does not read it
    all integers big-endian; unit i of the queue lies at byte 20 i over all files; zeros after the last unit.

Where enableConsumeQueueExt is set, in RocketMQ or in duemq, the files have addresses in place of tags codes. Users of
this class see tags codes, except where an address leads nowhere (see `extension`).

A message of a delay level that was withdrawn (cancelled, or appended once more to wait on) has the size 1 in its unit:
RocketMQ finds no record of that size and continues with the next unit. It does the same where the size is 2: in a
stopped store, such a unit is that of a message that was delivered before others in front of it.

In a queue whose first message is not number 0, since earlier ones are deleted, the first file is filled up to that
message with units (0, 0x7fffffff, 0). That size with another offset stands for a message in the middle or at the end
whose record is gone: destroyed, or removed by an offline job. Consumers of RocketMQ's broker that meet such a unit
continue with the commitlog file behind its physical offset, so that offset is best in a file before the messages that
follow. Binary searches cannot use such an offset. So the tags code has 2^62 plus the physical offset where the
following messages begin.

New units stay in memory, in `tail`, until `write_tail` puts them into the files, many at a time. They can be rebuilt
from the commitlog, so a crash that loses them loses no messages. Consumers that keep up are served from memory.

Invariants: every unit's record lies before the commitlog's end; physical offsets ascend.
Mirrors apache/rocketmq store/ConsumeQueue.java (4.9.7). The format is RocketMQ's and frozen.

Keeps invariant 3 of ARCHITECTURE.md.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from typing import Final

from duemq.storage.errors import has_no_room
from duemq.storage.files import File, Files
from duemq.storage.log.marks import Marks
from duemq.storage.log.segments import Segments
from duemq.storage.queues.extension import Extension, addresses_in, has_addresses
from duemq.storage.queues.tag_blocks import TagBlocks

UNIT: Final = struct.Struct(">qiq")
UNIT_SIZE: Final = 20
assert UNIT.size == UNIT_SIZE
DEFAULT_SEGMENT_SIZE: Final = 300_000 * UNIT_SIZE
PADDING_SIZE: Final = 0x7FFFFFFF
WITHDRAWN_SIZE: Final = 1
DELIVERED_SIZE: Final = 2
MARK_SIZES: Final = (WITHDRAWN_SIZE, DELIVERED_SIZE)
"""Sizes that mark a unit; no record is that small."""
_SIZE_AT: Final = 8
FOLLOWING: Final = 1 << 62
"""In a unit that stands for no record, the tags code is this value plus the physical offset where the following records
begin. No hash is as large."""
_PADDING: Final = UNIT.pack(0, PADDING_SIZE, 0)
_LOOKED_AT: Final = 1 << 16
"""Number of units that are searched for addresses at a time."""

Watcher = Callable[["ConsumeQueue"], None]
LookUp = Callable[[str, bytes], bytes]
"""Returns units of a topic's queue with the tags codes of their records in place of addresses. Raises NotInMemory,
OSError."""


def hole(physical: int, following: int) -> bytes:
    """Return a unit that stands for a message whose record is gone. `physical`: the physical offset in the unit, by
    which RocketMQ finds the next commitlog file; `following`: the physical offset where later records of the queue
    begin."""
    return UNIT.pack(physical, PADDING_SIZE, FOLLOWING + following)


def physical_offset_of(physical: int, size: int, code: int) -> int:
    """Return the physical offset of a unit's record, or, if the unit stands for no record, the physical offset where
    the following records begin. The results ascend along a queue."""
    return code - FOLLOWING if size == PADDING_SIZE and code >= FOLLOWING else physical


class ConsumeQueue:
    """The units of one queue, in its files and in memory. Queue offsets count units."""

    __slots__ = (
        "_extension",
        "_is_padded",
        "_look_up",
        "_looked_to",
        "_marks",
        "_names_synced",
        "_segments",
        "is_held",
        "min_offset",
        "next_offset",
        "queue_id",
        "record_overhead",
        "staged_from",
        "tags",
        "tail",
        "topic",
        "topic_field",
        "uncounted_from",
        "watchers",
    )

    def __init__(
        self,
        files: Files,
        directory: str,
        segment_size: int,
        topic: str,
        queue_id: int,
        extension: Extension | None = None,
        look_up: LookUp | None = None,
    ) -> None:
        """Make a queue without units; `load` finds those in its files. `segment_size`: bytes of a file. `extension`:
        None if the store has none for this queue and none is to be written. `look_up` then finds the tags codes of
        units that have addresses nevertheless."""
        self.topic = topic
        self.queue_id = queue_id
        encoded = topic.encode()
        self.topic_field = bytes((len(encoded),)) + encoded
        """The topic after its length, in the layout of a record."""
        self.record_overhead = 0
        """Bytes of a record of this queue without body and properties; set by the appender (`Appender.prepare`)."""
        self.next_offset = 0
        """Queue offset of the next message."""
        self.min_offset = 0
        """Queue offset of the oldest message that the commitlog still has."""
        self._marks: Marks | None = None
        """Marks of units that the files do not have yet."""
        self.tail = bytearray()
        """Units that are not in the files yet: the last ones before `next_offset`."""
        self._is_padded = True
        """Whether the first file is filled up to the first unit."""
        self.staged_from = -1
        """Queue offset of the first unit of an append that is not written yet, or -1."""
        self.uncounted_from = -1
        """Queue offset of the first record that statistics have not counted, or -1 (`Appender.take_uncounted`)."""
        self.is_held = False
        """Whether units stay in memory for now, because files of a former queue of this name are being removed."""
        self.tags = TagBlocks()
        """The filters of blocks at which pulls have looked. They are replaced when units are cut off, since other units
        may follow at the same offsets."""
        self.watchers: tuple[Watcher, ...] = ()
        """Functions called once after each append to this queue; they must not raise."""
        self._segments = Segments(files, os.path.join(directory, topic, str(queue_id)), segment_size)
        self._extension = extension
        self._look_up = look_up
        self._looked_to = 0
        """Queue offset up to which `advance_min` has looked and found no unit with an address."""
        self._names_synced = 0
        """The value of `names_made` up to which the files' names are durable."""

    def __repr__(self) -> str:
        return f"ConsumeQueue({self.topic!r}, {self.queue_id}, {self.min_offset}..{self.next_offset})"

    @property
    def written_offset(self) -> int:
        """Queue offset up to which the units are in the files."""
        return self.next_offset - len(self.tail) // UNIT_SIZE

    def watch(self, watcher: Watcher) -> None:
        """Add a watcher."""
        self.watchers += (watcher,)

    def unwatch(self, watcher: Watcher) -> None:
        """Remove a watcher."""
        self.watchers = tuple(other for other in self.watchers if other != watcher)

    # --- reading

    def read(self, offset: int, count: int) -> bytes:
        """Return up to `count` units from a queue offset on, as bytes; none outside the queue. Raises NotInMemory,
        OSError."""
        return self._read(offset, count, is_stored=False)

    def read_stored(self, offset: int, count: int) -> bytes:
        """Read as `read` does, but with addresses as they are stored: for readers that do not look at tags codes."""
        return self._read(offset, count, is_stored=True)

    def _read(self, offset: int, count: int, *, is_stored: bool) -> bytes:
        """Return units as `read` does. `is_stored`: with addresses as they are stored."""
        count = min(count, self.next_offset - offset)
        if count <= 0:
            return b""
        written = self.next_offset - len(self.tail) // UNIT_SIZE
        if offset >= written:
            at = (offset - written) * UNIT_SIZE
            units = bytes(self.tail[at : at + count * UNIT_SIZE])
        else:
            units = self._segments.read(offset * UNIT_SIZE, min(count, written - offset) * UNIT_SIZE)
            if not is_stored:
                if self._extension is not None:
                    units = self._extension.translate(units)
                elif self._look_up is not None and has_addresses(units):
                    units = self._look_up(self.topic, units)
            if offset + count > written:
                units += self.tail[: (offset + count - written) * UNIT_SIZE]
        return units if self._marks is None else self._marks.over(offset * UNIT_SIZE, units)

    def unit(self, offset: int) -> tuple[int, int, int] | None:
        """Return the physical offset, size and tags code of one unit, or None outside the queue."""
        units = self._read(offset, 1, is_stored=False)
        return UNIT.unpack(units) if units else None

    def _stored_unit(self, offset: int) -> tuple[int, int, int] | None:
        """Return what `unit` does, but with an address as it is stored."""
        units = self._read(offset, 1, is_stored=True)
        return UNIT.unpack(units) if units else None

    def mark(self, offset: int, size: int) -> None:
        """Mark the unit of a message as withdrawn (WITHDRAWN_SIZE), or, for RocketMQ, as delivered before others in
        front of it (DELIVERED_SIZE). Every reader sees the mark immediately; the work of `plan_marks` puts it into the
        files (see `storage.log.marks`)."""
        if self._marks is None:
            self._marks = Marks(self._segments)
        self._marks.set(offset * UNIT_SIZE + _SIZE_AT, size.to_bytes(4, "big"))

    @property
    def has_marks(self) -> bool:
        """Whether there are marks that the files may not have yet."""
        return bool(self._marks)

    def begin_marks(self) -> None:
        """Begin another checkpoint: it covers the records stored so far, and the marks set so far."""
        if self._marks is not None:
            self._marks.begin()

    def plan_marks(self, before: int) -> Callable[[], None]:
        """Plan the writing of marks as `Marks.plan` does, for the units before a queue offset, which are in the
        files."""
        assert self._marks is not None
        return self._marks.plan(before * UNIT_SIZE)

    def first_where(self, low: int, high: int, holds: Callable[[int, int, int], bool]) -> int:
        """Return the first queue offset in [low, high) for whose unit `holds` is true; `high` if there is none. Along
        the queue, `holds` must be false up to some unit and true from there on. It gets physical offset, size and tags
        code, with addresses as they are stored."""
        while low < high:
            middle = (low + high) // 2
            unit = self._stored_unit(middle)
            if unit is not None and holds(*unit):
                high = middle
            else:
                low = middle + 1
        return low

    # --- writing

    def write_tail(self) -> None:
        """Put the units in memory into the files, unless they are held (`is_held`). Raises OSError; the units then stay
        in memory."""
        if not self.tail or self.is_held:
            return
        position = self.written_offset * UNIT_SIZE
        data = bytes(self.tail)
        extension = self._extension
        is_extended = extension is not None and extension.is_written
        if extension is not None and is_extended:
            data = self._extended(extension, data)
        if not len(self._segments):
            self._is_padded = False
            self._segments.ensure(position)
        if not self._is_padded:
            self._segments.write(self._segments.begin, _PADDING * ((position - self._segments.begin) // UNIT_SIZE))
            self._is_padded = True
        end = position + len(data)
        while self._segments.end < end:
            self._segments.ensure(self._segments.end)
        self._segments.write(position, data)
        if extension is not None and is_extended:
            extension.wrote()
        self.tail.clear()

    def _extended(self, extension: Extension, units: bytes) -> bytes:
        """Write the tags codes of units into the extension, and return the units with addresses in their place. If the
        extension cannot be written, units keep their tags codes: only these units if there is no room, otherwise all
        further units as well."""
        try:
            if not extension.is_end_known:
                extension.go_on_behind(self._last_address)
            return extension.write(units) if extension.is_written else units
        except OSError as error:
            if not has_no_room(error):
                extension.write_no_more(error)
            return units

    def _last_address(self) -> int | None:
        """Return the last address in the files; None if there is none. Raises OSError."""
        end = self.written_offset
        first = self._segments.begin // UNIT_SIZE
        while end > first:
            start = max(first, end - _LOOKED_AT)
            addresses = addresses_in(self._segments.read(start * UNIT_SIZE, (end - start) * UNIT_SIZE))
            if len(addresses):
                return int(addresses.max())  # a damaged last one may be lower
            end = start
        return None

    def files_between(self, start: int, end: int) -> list[File]:
        """Return the files with the units of a range of queue offsets: the files of the extension first. Raises
        NotInMemory, OSError."""
        files = self._segments.files_between(start * UNIT_SIZE, end * UNIT_SIZE)
        extension = self._extension
        if extension is None or not extension.is_written:
            return files
        for at in range(start, end, _LOOKED_AT):
            count = min(end - at, _LOOKED_AT)
            addresses = addresses_in(self._segments.read(at * UNIT_SIZE, count * UNIT_SIZE))
            if len(addresses):
                return extension.files_from(int(addresses.min())) + files
        return files

    @property
    def directory(self) -> str:
        """The directory of the files."""
        return self._segments.directory

    @property
    def extension_directory(self) -> str | None:
        """The directory of the extension's files; None if there are no such files: the directory may then be missing,
        too."""
        return self._extension.directory if self._extension is not None and self._extension.has_files else None

    def files(self) -> list[File]:
        """Return all files, oldest first."""
        return self._segments.files_between(self._segments.begin, self._segments.end)

    @property
    def has_names(self) -> bool:
        """Whether `load` found a directory with anything in it."""
        return self._segments.has_names

    @property
    def files_begin(self) -> int:
        """The offset of the first byte of the first file, in bytes."""
        return self._segments.begin

    @property
    def names_made(self) -> int:
        """Number of files made so far, including those of the extension."""
        return self._segments.names_made + (self._extension.names_made if self._extension is not None else 0)

    @property
    def has_unsynced_names(self) -> bool:
        """Whether a file's name in the directory is not durable yet."""
        return self.names_made != self._names_synced

    def note_names_synced(self, names: int) -> None:
        """Note that the files' names are durable up to a value of `names_made`."""
        self._names_synced = max(self._names_synced, names)

    def start_at(self, offset: int) -> None:
        """Set the first queue offset of an empty queue."""
        assert not len(self._segments), "only an empty queue can be given its first offset"
        self.min_offset = self.next_offset = offset

    def pad_to(self, offset: int, unit: bytes = _PADDING) -> None:
        """Fill the queue up to a queue offset with copies of a unit that stands for no record."""
        self.tail += unit * (offset - self.next_offset)
        self.next_offset = offset

    # --- loading and cutting

    def load(self) -> None:
        """Find the files, changing nothing. The end of the units in them is not known until `cut`: `next_offset` is the
        end of the last file. Raises StoreFormatError."""
        self._segments.load()
        self._load_extension()
        self.tail.clear()
        self.tags = TagBlocks()
        self.min_offset = self._segments.begin // UNIT_SIZE
        self.next_offset = self._segments.end // UNIT_SIZE

    def _load_extension(self) -> None:
        if self._extension is not None:
            self._extension.load()
        self._looked_to = 0

    def _note_cut(self) -> None:
        """Note that units were removed at the end: the extension then continues behind the last of its units that is
        still used."""
        self.tags = TagBlocks()
        self._looked_to = 0
        if self._extension is not None:
            self._extension.note_cut()

    def cut(self, before: int) -> None:
        """Remove the units whose records do not end at or before a physical offset. Raises OSError."""
        assert not self.tail, "units in memory are not cut: write them first"

        def beyond(physical: int, size: int, _: int) -> bool:
            return size != PADDING_SIZE and not (size > 0 and 0 <= physical <= before - size)

        first = self._segments.begin // UNIT_SIZE
        self.next_offset = self.first_where(first, self.next_offset, beyond)
        self._note_cut()
        self._segments.clear_from(self.next_offset * UNIT_SIZE)
        self.min_offset = min(self.min_offset, self.next_offset)

    def truncate(self, offset: int) -> None:
        """Remove the units from a queue offset on. Raises OSError."""
        self.write_tail()
        self.next_offset = offset
        self._note_cut()
        self.min_offset = min(self.min_offset, offset)
        self._segments.clear_from(offset * UNIT_SIZE)

    def advance_min(self, begin: int) -> list[str]:
        """Raise `min_offset` after the commitlog has dropped the records before the physical offset `begin`. Returns
        the paths of files for the caller to remove."""

        def is_left(physical: int, size: int, code: int) -> bool:
            return physical_offset_of(physical, size, code) >= begin and (size != PADDING_SIZE or physical > 0)

        first = self._stored_unit(self.min_offset)
        if first is None or not is_left(*first):
            self.min_offset = self.first_where(self.min_offset, self.next_offset, is_left)
        paths = self._segments.drop_before(min(self.min_offset, self.written_offset) * UNIT_SIZE)
        return paths + self._drop_extension()

    def _drop_extension(self) -> list[str]:
        """Forget the files of the extension that no unit needs any longer, judging by the next _LOOKED_AT units.
        Returns the paths of these files."""
        extension = self._extension
        if extension is None or not extension.has_files:
            return []
        start = max(self._looked_to, self.min_offset)
        count = max(0, min(_LOOKED_AT, self.written_offset - start))
        addresses = addresses_in(self._segments.read(start * UNIT_SIZE, count * UNIT_SIZE) if count else b"")
        if len(addresses):
            return extension.drop_before(int(addresses.min()))
        self._looked_to = start + count
        is_needed = self._looked_to < self.written_offset or extension.is_written
        return [] if is_needed else extension.drop_before(None)

    def keep_before(self, base: int, offset: int) -> None:
        """Remove the file whose first byte has the offset `base`, all files after it, and all units from a queue offset
        on; the files before are correct. Raises StoreFormatError, OSError."""
        self.tail.clear()
        self._marks = None
        self._segments.remove_from(base)
        self.load()
        if len(self._segments):
            self.truncate(offset)
        else:
            self.next_offset = self.min_offset = 0

    def close(self) -> None:
        """Close the descriptors."""
        self._segments.close()
        if self._extension is not None:
            self._extension.close()

    def forget(self) -> None:
        """Close and forget the files of a queue that no longer exists; the caller removes them. Code that still has
        this object writes nothing more through it."""
        self.tail.clear()
        self._marks = None
        self.is_held = True
        self._segments.forget_all()
        if self._extension is not None:
            self._extension.forget()

    def remove(self) -> None:
        """Remove the files, and start over at queue offset 0. Raises OSError."""
        self.tail.clear()
        self._marks = None
        self.next_offset = self.min_offset = 0
        self._note_cut()
        self._segments.remove_all()
        if self._extension is not None:
            self._extension.remove()
