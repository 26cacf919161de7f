"""queuecheck: a file that notes how many units each file of a consume queue has, and a checksum of them, so that a
start finds missing and wrong files. It also notes the removed topics.

    0           8                   12
    | DUEMQQC1  | queue file size   | block | block | ... | zeros, room for more blocks |
    | 8 bytes   | uint32, in bytes  |

    block:  | size: uint32 | recovery offset: int64 | items, `size` bytes | crc32 of all before: uint32 |
    items:  | 1 | topic size: uint8 | topic | queue: int32 | file: int64 | units: uint32 | last: int64 | crc32: uint32 |
            | sizes: int64 |
            | 2 | topic size: uint8 | topic | end: int64 |
            | 3 | topic size: uint8 | topic | queue: int32 |
    all integers big-endian

1, a file of a queue: `file` is its name, the offset of its first byte. The file begins with `units` units, of records
before the recovery offset; `last` is the physical offset in the last of them, `crc32` is the checksum of these units.
In SCHEDULE_TOPIC_XXXX the sizes in units change when messages are withdrawn. So there the sizes count as 0 for the
checksum, and `sizes` is the sum of the original sizes, -1 if it is not known.
2, a removed topic: its records before the physical offset `end` belong to no queue.
3, a queue: earlier items about its files are void; unless later items follow, its units are unknown.

The items of a block replace earlier items about the same file or topic. A block is valid for the checkpoint with its
recovery offset and for later ones: blocks with a later offset than the checkpoint's, as a crash leaves them, are
ignored. Each checkpoint adds a block with the changes since the previous one, and has a note, `queues`, that says so.
At each start, and when there is no room for another block, a new file is begun, whose blocks have everything.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import structlog

from duemq.protocol.topics import SCHEDULE_TOPIC
from duemq.storage.errors import QueueCheckDamaged
from duemq.storage.files import File, Files
from duemq.storage.log.copies import UNITS
from duemq.storage.queues.consume_queue import MARK_SIZES, UNIT_SIZE, ConsumeQueue

if TYPE_CHECKING:
    from numpy.typing import NDArray

log = structlog.get_logger(__name__)

NAME: Final = "queues"
"""Name of the checkpoint's note that says that there is a block for the checkpoint."""
NOTE: Final = b"\x01"
MAGIC: Final = b"DUEMQQC1"
HEAD: Final = struct.Struct(">8sI")
_BLOCK: Final = struct.Struct(">Iq")
_CRC: Final = struct.Struct(">I")
_SEGMENT_ITEM: Final = struct.Struct(">iqIqIq")
_REMOVED_ITEM: Final = struct.Struct(">q")
_FORGOTTEN_ITEM: Final = struct.Struct(">i")
_SEGMENT, _REMOVED, _FORGOTTEN = 1, 2, 3
_NEVER: Final = -1
"""A recovery offset before all others."""
_UNKNOWN: Final = -1
_ROOM: Final = 64 << 10
_READ_SIZE: Final = 13_000 * UNIT_SIZE
"""Bytes of units in one read: few enough to stay in the processor's cache until they have been summed."""

Key = tuple[str, int]
"""Topic and queue id."""

SizeOf = Callable[[int], int | None]
"""Returns the size of the record at a physical offset, None if that cannot be read; called in any thread."""


class SegmentSummary(NamedTuple):
    """The noted facts about one file of a queue: number of units, physical offset in the last unit, checksum, and sum
    of the original sizes; see the module."""

    units: int
    last: int
    crc: int
    sizes: int


_EMPTY: Final = SegmentSummary(0, 0, 0, 0)


class _Planned(NamedTuple):
    """A queue to be noted up to a queue offset; `files_begin`: the offset of the first byte of its first file."""

    topic: str
    queue_id: int
    directory: str
    files_begin: int
    offset: int

    @property
    def key(self) -> Key:
        """Topic and queue id."""
        return self.topic, self.queue_id


class Wrong(NamedTuple):
    """A file of a consume queue that differs from its note. `base`: the offset of its first byte; `why`: the rest of a
    sentence that begins with the file's path."""

    path: str
    base: int
    why: str


class QueueCheck:
    """The file queuecheck, and the facts that it notes. Once the store is open, a worker adds to it, one job at a
    time."""

    def __init__(
        self, files: Files, path: str, queue_directory: str, segment_size: int, size_of: SizeOf = lambda physical: None
    ) -> None:
        """Make a check without facts; `load` reads the file. `segment_size`: bytes of a consume queue's file. `size_of`
        is called for records whose units are already marked when the units are noted."""
        self._files = files
        self._size_of = size_of
        self._path = path
        self._queue_directory = queue_directory
        self._segment_size = segment_size
        self.segments: dict[Key, dict[int, SegmentSummary]] = {}
        """The noted files of each queue, by the offset of a file's first byte."""
        self.removed: dict[str, int] = {}
        """Removed topics, and the physical offset before which their records belong to no queue."""
        self.recovery_offset = _NEVER
        """Recovery offset of the last valid block."""
        self.damage = ""
        """Why the file is not usable, as the rest of a sentence about it; empty if it is usable."""
        self._outdated: set[Key] = set()
        """Queues whose noted facts are all invalid."""
        self.unknown: set[Key] = set()
        """Queues without valid notes that may have units."""
        self._unread: dict[Key, _Planned] = {}
        """Queues whose units could not be read when they were to be noted."""
        self._at = 0
        """Position of the next block; 0 if a new file is to be begun."""
        self._capacity = 0

    # --- reading

    def load(self, recovery_offset: int) -> None:
        """Read the blocks that are valid for a checkpoint with the note `queues`, which says that a block was written
        for it. `recovery_offset`: the checkpoint's. Raises OSError."""
        data = self._files.read_whole(self._path)
        why = "is missing"
        try:
            for offset, items in blocks(data, self._segment_size) if data is not None else ():
                if offset <= recovery_offset:
                    self.take(items)
                    self.recovery_offset = max(offset, self.recovery_offset)
            why = f"has no block for the checkpoint at {recovery_offset}" if data is not None else why
        except QueueCheckDamaged as error:
            why = str(error)
        # A block that a power cut left torn may lie behind the checkpoint's block: that is no damage.
        self.damage = why if self.recovery_offset != recovery_offset else ""

    @property
    def is_whole(self) -> bool:
        """Whether the file is complete for the checkpoint: for each queue that is not `unknown`, it notes the units of
        all records before the recovery offset."""
        return self.recovery_offset != _NEVER and not self.damage

    def take(self, items: bytes) -> None:
        """Apply the items of a block to the facts in memory."""
        at = 0
        while at < len(items):
            kind, size = items[at], items[at + 1]
            topic = items[at + 2 : at + 2 + size].decode()
            at += 2 + size
            if kind == _SEGMENT:
                queue_id, base, *segment = _SEGMENT_ITEM.unpack_from(items, at)
                self.segments.setdefault((topic, queue_id), {})[base] = SegmentSummary(*segment)
                self.unknown.discard((topic, queue_id))
                at += _SEGMENT_ITEM.size
            elif kind == _FORGOTTEN:
                (queue_id,) = _FORGOTTEN_ITEM.unpack_from(items, at)
                self.segments.pop((topic, queue_id), None)
                self.unknown.add((topic, queue_id))
                at += _FORGOTTEN_ITEM.size
            else:
                (self.removed[topic],) = _REMOVED_ITEM.unpack_from(items, at)
                self._forget_queues(topic)
                at += _REMOVED_ITEM.size

    def next_offset(self, key: Key) -> int:
        """Return the queue offset up to which a queue's units were noted."""
        return max(
            (base // UNIT_SIZE + segment.units for base, segment in self.segments.get(key, {}).items()), default=0
        )

    def durable_offset(self, key: Key) -> int | None:
        """Return the queue offset up to which a queue's units, and the names of its files, are durable; None if it is
        not known."""
        is_known = self.is_whole and key in self.segments and key not in self._outdated
        return self.next_offset(key) if is_known else None

    # --- comparing

    def wrong(self, key: Key, queue: ConsumeQueue | None, begin: int, size_of: SizeOf) -> list[Wrong]:
        """Return the files of a queue that differ from their notes, oldest first. `queue`: the loaded queue, None if
        loading failed. `begin`: the commitlog's begin; a file whose records all lie before it may be missing, unless it
        is the last file, whose name tells where the queue continues. `size_of` returns the size of the record at a
        physical offset, if that record still exists. Raises OSError."""
        topic, queue_id = key
        noted = self.segments[key]
        directory = os.path.join(self._queue_directory, topic, str(queue_id))
        files = self._files_in(directory) if queue is None else {file.path: file for file in queue.files()}
        newest = max(noted)
        found = []
        for base in sorted({*noted, *(int(os.path.basename(path)) for path in files)}):
            path = os.path.join(directory, f"{base:020}")
            segment, file = noted.get(base), files.get(path)
            if file is None:
                if base == newest or (segment is not None and segment.last >= begin):
                    found.append(Wrong(path, base, "is missing"))
            elif queue is None and (size := file.size()) != self._segment_size:
                if size or base <= newest:
                    found.append(Wrong(path, base, f"has {size} bytes instead of {self._segment_size}"))
            elif segment is not None and not _agree(segment, self._summed(topic, segment.units, file, size_of)):
                found.append(Wrong(path, base, "has other units than those that were written"))
        return found

    def _files_in(self, directory: str) -> dict[str, File]:
        paths = [os.path.join(directory, name) for name in self._files.list(directory) if name.isdecimal()]
        return {path: self._files.open(path) for path in paths}

    @staticmethod
    def _summed(topic: str, units: int, file: File, size_of: SizeOf) -> SegmentSummary:
        found = _EMPTY
        for start in range(0, units * UNIT_SIZE, _READ_SIZE):
            data = file.read(start, min(_READ_SIZE, units * UNIT_SIZE - start))
            found = _add(found, data, is_level=topic == SCHEDULE_TOPIC, size_of=size_of)
        return found

    # --- writing

    def outdate(self, key: Key) -> None:
        """Drop the facts about a queue at the next checkpoint, because its files were rebuilt or cut."""
        self._outdated.add(key)

    def start_over(self) -> None:
        """Do what `outdate` does, for all queues."""
        self._outdated.update(self.segments)

    def clamp(self, end: int) -> None:
        """Adapt the removed topics to a commitlog that was cut: records that are stored behind its new end from now on
        are not those of topics that were removed before the cut. May wait for the disk. Raises OSError."""
        beyond = [topic for topic, limit in self.removed.items() if limit > end]
        if beyond:
            self.removed.update(dict.fromkeys(beyond, end))
            self._begin_file()

    def plan(
        self, queues: Iterable[ConsumeQueue], offsets: Mapping[ConsumeQueue, int], recovery_offset: int, begin: int
    ) -> Callable[[], None]:
        """Return the work that notes queues for a checkpoint, up to the queue offsets in `offsets`; queues without an
        offset there are left out. A worker runs it once their units are durable. `recovery_offset`: the checkpoint's;
        `begin`: the commitlog's begin. Neither collection may be changed after the call. The work raises OSError, and
        then has noted nothing."""

        def run() -> None:
            planned = [
                _Planned(queue.topic, queue.queue_id, queue.directory, queue.files_begin, offsets[queue])
                for queue in queues
                if queue in offsets
            ]
            changed: dict[Key, dict[int, SegmentSummary]] = {}
            unread: dict[Key, _Planned] = {}
            items = bytearray()
            for queue in {**self._unread, **{queue.key: queue for queue in planned}}.values():
                key = queue.key
                noted = self.next_offset(key)
                if noted == queue.offset and key not in self._outdated:
                    continue
                is_new = key in self._outdated or noted > queue.offset
                old = self.segments.get(key, {}) if not is_new else {}
                changed[key] = known = {base: segment for base, segment in old.items() if base >= queue.files_begin}
                items += _forgotten_item(*key) if is_new else b""
                try:
                    for item in self._read_on(queue, known):
                        items += item
                except OSError as error:
                    log.warning("queue_not_noted", topic=queue.topic, queue=queue.queue_id, reason=str(error))
                    items += _forgotten_item(*key)
                    changed[key], unread[key] = {}, queue
            self.removed = {topic: end for topic, end in self.removed.items() if end > begin}
            self._append(bytes(items), recovery_offset, changed)
            self._outdated.clear()
            self.unknown = (self.unknown - changed.keys()) | unread.keys()
            self._unread = unread

        return run

    def remove_topic(self, topic: str, end: int) -> None:
        """Note, durably, that a topic's records before a physical offset belong to no queue. May wait for the disk.
        Raises OSError."""
        before = self.removed.get(topic)
        self.removed[topic] = max(end, before or 0)
        try:
            # A block whose offset is before those of all checkpoints is valid immediately.
            self._append(_removed_item(topic, self.removed[topic]), _NEVER, {})
        except OSError:
            self.removed.pop(topic)
            if before is not None:
                self.removed[topic] = before
            raise
        self._forget_queues(topic)

    def _forget_queues(self, topic: str) -> None:
        for known in (self.segments, self._unread):
            for key in [key for key in known if key[0] == topic]:
                del known[key]
        self._outdated = {key for key in self._outdated if key[0] != topic}
        self.unknown = {key for key in self.unknown if key[0] != topic}

    def _read_on(self, queue: _Planned, known: dict[int, SegmentSummary]) -> Iterator[bytes]:
        """Read the units of a queue that are not noted yet, and add them to the queue's known facts; yield the items
        that note them. Raises OSError."""
        is_level = queue.topic == SCHEDULE_TOPIC
        start = max((base + segment.units * UNIT_SIZE for base, segment in known.items()), default=queue.files_begin)
        end = queue.offset * UNIT_SIZE
        while start < end:
            base = start - start % self._segment_size
            stop = min(end, base + self._segment_size)
            file = self._files.open(os.path.join(queue.directory, f"{base:020}"))
            segment = known.get(base, _EMPTY)
            for at in range(start, stop, _READ_SIZE):
                size = min(_READ_SIZE, stop - at)
                units = file.read_apart([(at - base, size)])
                segment = _add(segment, units, is_level=is_level, size_of=self._size_of)
            known[base] = segment
            yield _segment_item(queue.topic, queue.queue_id, base, segment)
            start = stop

    def _append(self, items: bytes, recovery_offset: int, changed: dict[Key, dict[int, SegmentSummary]]) -> None:
        block = _block(items, recovery_offset)
        if self._at and self._at + len(block) <= self._capacity and self._files.exists(self._path):
            self._files.open(self._path).write_apart([(self._at, block)])
            self._at += len(block)
        else:
            self._begin_file(block)
        self.segments.update(changed)
        for key in [key for key, known in changed.items() if not known]:
            del self.segments[key]
        self.recovery_offset = max(recovery_offset, self.recovery_offset)

    def _begin_file(self, block: bytes = b"") -> None:
        """Write all facts into a new file, with a new block behind them: until the checkpoint to which that block
        belongs exists, the earlier facts are valid. Raises OSError."""
        removed = b"".join([_removed_item(topic, end) for topic, end in self.removed.items()])
        items = b"".join([_forgotten_item(*key) for key in self.unknown])
        items += b"".join(
            [
                _segment_item(topic, queue_id, base, segment)
                for (topic, queue_id), known in self.segments.items()
                for base, segment in known.items()
            ]
        )
        # The items about removed topics are valid for every recovery offset of a checkpoint.
        data = HEAD.pack(MAGIC, self._segment_size) + _block(removed, _NEVER)
        data += _block(items, self.recovery_offset) + block
        self._at = 0
        self._capacity = 2 * len(data) + _ROOM
        self._files.write_whole(self._path, data.ljust(self._capacity, b"\0"))
        self._at = len(data)


# --- the format


def blocks(data: bytes, segment_size: int) -> Iterator[tuple[int, bytes]]:
    """Yield the recovery offset and the items of each block. `segment_size`: bytes of a consume queue's file. Raises
    QueueCheckDamaged if the file is for another size, or when it comes to a block that is not whole."""
    if data[: HEAD.size] != HEAD.pack(MAGIC, segment_size):
        raise QueueCheckDamaged(f"does not begin as one for consume-queue files of {segment_size} bytes")
    at = HEAD.size
    while at + _BLOCK.size + _CRC.size <= len(data):
        size, offset = _BLOCK.unpack_from(data, at)
        if not size and not offset and not any(data[at : at + _BLOCK.size + _CRC.size]):
            return
        end = at + _BLOCK.size + size
        if data[end : end + _CRC.size] != _CRC.pack(zlib.crc32(data[at:end])):
            raise QueueCheckDamaged(f"has a wrong checksum at byte {at}")
        yield offset, data[at + _BLOCK.size : end]
        at = end + _CRC.size
    if any(data[at:]):
        raise QueueCheckDamaged(f"ends {len(data) - at} bytes behind its last block")


def _block(items: bytes, recovery_offset: int) -> bytes:
    data = _BLOCK.pack(len(items), recovery_offset) + items
    return data + _CRC.pack(zlib.crc32(data))


def _segment_item(topic: str, queue_id: int, base: int, segment: SegmentSummary) -> bytes:
    name = topic.encode()
    return bytes((_SEGMENT, len(name))) + name + _SEGMENT_ITEM.pack(queue_id, base, *segment)


def _removed_item(topic: str, end: int) -> bytes:
    name = topic.encode()
    return bytes((_REMOVED, len(name))) + name + _REMOVED_ITEM.pack(end)


def _forgotten_item(topic: str, queue_id: int) -> bytes:
    name = topic.encode()
    return bytes((_FORGOTTEN, len(name))) + name + _FORGOTTEN_ITEM.pack(queue_id)


# --- sums


def _add(
    segment: SegmentSummary, units: bytes, *, is_level: bool, size_of: SizeOf = lambda physical: None
) -> SegmentSummary:
    """Return the facts about a file with more units added. `is_level`: for a queue of the schedule topic."""
    count = len(units) // UNIT_SIZE
    if not is_level:
        last = int.from_bytes(units[-UNIT_SIZE : -UNIT_SIZE + 8], "big", signed=True) if count else segment.last
        return SegmentSummary(segment.units + count, last, zlib.crc32(units, segment.crc), 0)
    array = np.frombuffer(units[: count * UNIT_SIZE], UNITS).copy()
    sizes = _sum_of_sizes(array, size_of)
    array["size"] = 0
    return SegmentSummary(
        segment.units + count,
        int(array["physical_offset"][-1]) if count else segment.last,
        zlib.crc32(array.tobytes(), segment.crc),
        _UNKNOWN if _UNKNOWN in (sizes, segment.sizes) else segment.sizes + sizes,
    )


def _sum_of_sizes(units: NDArray[np.void], size_of: SizeOf) -> int:
    """Return the sum of the original sizes in units; _UNKNOWN if the original size of a marked unit is not known."""
    is_marked = np.isin(units["size"], MARK_SIZES)
    sizes = [size_of(int(physical)) for physical in units["physical_offset"][is_marked]]
    known = [size for size in sizes if size is not None]
    if len(known) < len(sizes):
        return _UNKNOWN
    return int(units["size"][~is_marked].astype(np.int64).sum()) + sum(known)


def _agree(noted: SegmentSummary, found: SegmentSummary) -> bool:
    is_same_size = _UNKNOWN in (noted.sizes, found.sizes) or noted.sizes == found.sizes
    return is_same_size and (noted.units, noted.crc) == (found.units, found.crc)
