"""Finding the messages of a pull: consume-queue units, filtered by their tags code, and the records they point to."""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections.abc import Callable, Generator, Hashable
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec
import numpy as np

from duemq.protocol.errors import RecordError
from duemq.protocol.frames.command import Body
from duemq.protocol.records.record import StoredMessage, decode
from duemq.storage.errors import NotInMemory
from duemq.storage.files import File
from duemq.storage.log.commitlog import Commitlog
from duemq.storage.log.copies import UNITS
from duemq.storage.queues.consume_queue import MARK_SIZES, PADDING_SIZE, UNIT, UNIT_SIZE, ConsumeQueue
from duemq.storage.queues.extension import EXT_ADDRESS_MAX, has_addresses
from duemq.storage.queues.tag_blocks import BLOCK, hashes

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_UNITS: Final = 800
"""Most units that one pull looks at (as in RocketMQ: 16,000 bytes of units)."""

_LOOKED_ONE_BY_ONE: Final = 32
"""Number of units at the beginning that are looked at one by one, which is faster if the next message is near."""
_CHUNK: Final = 4 * BLOCK
"""Number of units that a search for a tag looks at together."""
_MAX_CHUNKS: Final = 16
"""Most chunks that one pull looks at in search of a tag: 16 chunks of 4,096 units take 1 ms. Skipped blocks do not
count."""
_MAX_SOUGHT: Final = 16
"""Most tags codes that are searched for beyond MAX_UNITS: a subscription to more tags gets messages from the next
MAX_UNITS units only."""
_MAX_RECORDS: Final = 64
"""Most records that a pull reads, with one call, to find the tags codes of units with addresses: 2 ms of work."""

_AHEAD_BYTES: Final = 512 << 20
"""Most bytes that one job reads ahead: if there is more to read, deliveries are late for other reasons."""
_AHEAD_GAP: Final = 16 << 10
"""Largest gap, in bytes, between records that are read with one request to the disk."""

_NO_RECORD: Final = (PADDING_SIZE, *MARK_SIZES)
_units = UNIT.iter_unpack
_SIZE: Final = struct.Struct(">i")


T = TypeVar("T")


class PullStatus(Enum):
    """The outcomes of a pull, by RocketMQ's names; a pull response has the name as its remark."""

    FOUND = auto()
    NO_MATCHED_MESSAGE = auto()
    MESSAGE_WAS_REMOVING = auto()
    OFFSET_FOUND_NULL = auto()
    OFFSET_OVERFLOW_BADLY = auto()
    OFFSET_OVERFLOW_ONE = auto()
    OFFSET_TOO_SMALL = auto()
    NO_MATCHED_LOGIC_QUEUE = auto()
    NO_MESSAGE_IN_QUEUE = auto()


Range = tuple[int, int]
"""Physical offset, and size in bytes, of records that lie one after the other."""


class Pulled(msgspec.Struct, gc=False):
    """The result of a pull. Offsets are queue offsets; `size` is the total of the records in bytes; `ranges` tells
    where the records lie in the commitlog."""

    status: PullStatus
    next_offset: int
    min_offset: int = 0
    max_offset: int = 0
    count: int = 0
    size: int = 0
    ranges: list[Range] = []


def find(
    queue: ConsumeQueue | None, offset: int, max_count: int, max_size: int, codes: frozenset[int] | None, begin: int
) -> Pulled:
    """Look for messages from a queue offset on: at most `max_count`, together at most `max_size` bytes unless the first
    message alone is larger. A message matches if it has one of the tags codes (`codes` None: any), or an address in
    place of the tags code: the consumer then checks the tags itself. `begin`: the commitlog's oldest offset. Raises
    NotInMemory, OSError."""
    if queue is None:
        return Pulled(PullStatus.NO_MATCHED_LOGIC_QUEUE, 0)
    low, high = queue.min_offset, queue.next_offset
    if high == 0:
        return Pulled(PullStatus.NO_MESSAGE_IN_QUEUE, 0, low, high)
    if offset < low:
        return Pulled(PullStatus.OFFSET_TOO_SMALL, low, low, high)
    if offset == high:
        return Pulled(PullStatus.OFFSET_OVERFLOW_ONE, offset, low, high)
    if offset > high:
        return Pulled(PullStatus.OFFSET_OVERFLOW_BADLY, high, low, high)
    result = Pulled(PullStatus.NO_MATCHED_MESSAGE, offset, low, high, ranges=[])
    if codes is None:
        _select(result, queue.read_stored(offset, max_count), max_count, max_size, None, begin)
        return result
    data = _with_codes(queue, offset, min(max_count, MAX_UNITS), max_size)
    if data and UNIT.unpack_from(data)[2] in codes:
        # Most consumers want nearly all messages of a topic: reading and checking MAX_UNITS units for each pull would
        # cost them a fifth of the broker's CPU time.
        _select(result, data, max_count, max_size, codes, begin)
        if result.count == result.next_offset - offset:
            return result
        result = Pulled(PullStatus.NO_MATCHED_MESSAGE, offset, low, high, ranges=[])
    data = _with_codes(queue, offset, MAX_UNITS, max_size)
    if high - offset > _LOOKED_ONE_BY_ONE and len(codes) <= _MAX_SOUGHT:
        candidate = _first_candidate(queue, offset, data, codes)
        if candidate < offset + len(data) // UNIT_SIZE:
            data = data[(candidate - offset) * UNIT_SIZE :]
        else:
            data = _with_codes(queue, candidate, MAX_UNITS, max_size)
        result.next_offset = candidate
    _select(result, data, max_count, max_size, codes, begin)
    return result


def _with_codes(queue: ConsumeQueue, offset: int, count: int, max_size: int) -> bytes:
    """Return units with tags codes in place of addresses. If there are addresses, the record of each unit has to be
    read: then the result ends after _MAX_RECORDS units, or before the records are larger than `max_size` bytes
    together, but has one unit at least. Raises NotInMemory, OSError."""
    stored = queue.read_stored(offset, count)
    if not has_addresses(stored):
        return stored
    sizes = np.frombuffer(stored, UNITS)["size"][:_MAX_RECORDS].astype(np.int64)
    sizes[np.isin(sizes, _NO_RECORD)] = 0
    fitting = int(np.searchsorted(np.cumsum(sizes), max_size, side="right"))
    return queue.read(offset, max(1, fitting))


def _first_candidate(queue: ConsumeQueue, offset: int, data: bytes, codes: frozenset[int]) -> int:
    """Return the queue offset of the first unit, from `offset` on, that may have one of the tags codes; the offset
    behind the units looked at if there is none. `data`: the first units from `offset` on. At most _MAX_CHUNKS chunks
    are looked at, and blocks that are known to have none of the codes are skipped."""
    for *_, code in _units(data[: _LOOKED_ONE_BY_ONE * UNIT_SIZE]):
        if code in codes or code <= EXT_ADDRESS_MAX:
            return offset
    found, at = _search(data, codes)
    if at < len(found):
        return offset + at
    offset += len(found)
    tags = queue.tags
    wanted = hashes(np.array(list(codes), np.int64))
    for _ in range(_MAX_CHUNKS):
        offset = min(max(offset, tags.next_block(offset // BLOCK, wanted) * BLOCK), queue.next_offset)
        try:
            data = queue.read_stored(offset, _CHUNK - offset % BLOCK)  # an address may stand for any tags code
        except NotInMemory:
            break  # the units before this need not be searched again: the search progresses even if reads take long
        found, at = _search(data, codes)
        if at < len(found) or not at:
            return offset + at
        begins = -offset % BLOCK
        tags.looked_at((offset + begins) // BLOCK, found[begins : begins + (at - begins) // BLOCK * BLOCK])
        offset += at
    return offset


def _search(data: bytes, codes: frozenset[int]) -> tuple[NDArray[np.int64], int]:
    """Return the tags codes of units, and the index of the first unit that may have one of the wanted codes; the number
    of units if there is none."""
    found = np.ascontiguousarray(np.frombuffer(data, UNITS)["tags_code"], np.int64)
    may_match = found <= EXT_ADDRESS_MAX
    for code in codes:
        may_match |= found == code
    at = int(may_match.argmax()) if len(found) else 0
    return found, at if len(found) and may_match[at] else len(found)


def _select(
    result: Pulled, data: bytes, max_count: int, max_size: int, codes: frozenset[int] | None, begin: int
) -> None:
    ranges = result.ranges
    start = end = -1
    count = size = looked = 0
    for physical, record_size, code in _units(data):
        if codes is not None and code not in codes and code > EXT_ADDRESS_MAX:
            looked += 1
            continue
        if physical < begin or record_size in _NO_RECORD:
            looked += 1
            if not count:
                result.status = PullStatus.MESSAGE_WAS_REMOVING
            continue
        if count == max_count or (count and size + record_size > max_size):
            break
        looked += 1
        if physical != end:
            if end >= 0:
                ranges.append((start, end - start))
            start = physical
        end = physical + record_size
        count += 1
        size += record_size
    if end >= 0:
        ranges.append((start, end - start))
        result.status = PullStatus.FOUND
    result.next_offset += looked
    result.count = count
    result.size = size


def read(log: Commitlog, ranges: list[Range], hot_from: int) -> Body | None:
    """Return the records of some ranges, joined; None if the commitlog no longer has one of them, or if reading would
    have to wait for the disk. `ranges`: in ascending order. Raises OSError.

    Records from the physical offset `hot_from` on were written recently and are assumed to be in the page cache:
    reading them without checking costs half as much.
    """
    pieces: list[Body] = []
    number = 0
    while number < len(ranges):
        base = ranges[number][0] // log.segment_size * log.segment_size
        located = log.locate(*ranges[number])
        if located is None:
            return None
        end = len(ranges)
        if ranges[-1][0] >= base + log.segment_size:
            end = bisect_left(ranges, (base + log.segment_size, 0), number)
        within = [(offset - base, size) for offset, size in ranges[number:end]]
        number = end
        is_hot = ranges[number - 1][0] >= hot_from and base + within[0][0] >= hot_from
        piece = located[0].read_ranges(within) if is_hot else located[0].read_cached(within)
        if piece is None:
            return None
        pieces.append(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def without_missing(found: Pulled, body: Body, segment_size: int) -> Body:
    """Return the bytes read for a pull, cut off before the first missing record: an older copy of a commitlog file has
    zeros in place of the newest records. The next pull then begins with the missing record, and continues behind the
    missing ones. `found` is changed accordingly."""
    if not body[-1] or found.ranges[0][0] // segment_size != found.ranges[-1][0] // segment_size:
        data = memoryview(body)
        parts = _by_file(found.ranges, segment_size)
        for number, (begin, end) in enumerate(parts):
            if data[end - 1] or _ends_well(data, begin, end):
                continue
            return _before_missing(found, data, parts, number)
    return body


def _by_file(ranges: list[Range], segment_size: int) -> list[Range]:
    """Return, for each commitlog file, the begin and end of its records in the bytes read for some ranges."""
    parts: list[Range] = []
    base, end = -1, 0
    for offset, size in ranges:
        begin = end if offset // segment_size != base else parts.pop()[0]
        base, end = offset // segment_size, end + size
        parts.append((begin, end))
    return parts


def _ends_well(data: memoryview, begin: int, end: int) -> bool:
    """Whether the last record of a part is whole although it ends with a zero, as one without properties does."""
    last = begin
    while begin < end:
        (size,) = _SIZE.unpack_from(data, begin)
        if size <= 0 or begin + size > end:
            return False
        last, begin = begin, begin + size
    return _record_at(data, last) is not None


def _record_at(data: memoryview, at: int) -> StoredMessage | None:
    try:
        message = decode(data, at)
    except RecordError:
        return None
    return message if "\0" not in message.topic and not message.properties_text.endswith("\0") else None


def _before_missing(found: Pulled, data: memoryview, parts: list[Range], number: int) -> Body:
    """Return the records before the first missing one, which lies in the part with the given number."""
    count, at = 0, 0
    for begin, end in parts[: number + 1]:
        at = begin
        while at < end and (message := _record_at(data, at)) is not None:
            at += message.size
            count += 1
            next_offset = message.queue_offset + 1
        if at < end:
            break
    (size,) = _SIZE.unpack_from(data, at)
    if bytes(data[at + max(0, size) : parts[number][1]]).strip(b"\0"):
        return data  # damaged in another way: there are bytes behind the record
    if count:
        found.count, found.size, found.next_offset = count, at, next_offset
        return data[:at]
    found.status, found.count, found.size = PullStatus.MESSAGE_WAS_REMOVING, 0, 0
    for begin, _ in parts[1:]:
        message = _record_at(data, begin)
        if message is not None:
            found.next_offset = message.queue_offset
            break
    return b""


class ColdRead:
    """Records to be read by a thread that may wait for the disk; planned by the store's own thread."""

    def __init__(self, log: Commitlog, ranges: list[Range]) -> None:
        self._files: list[tuple[File, list[Range]]] = []
        for offset, size in ranges:
            located = log.locate(offset, size)
            if located is not None:
                file, position = located
                if not self._files or self._files[-1][0] is not file:
                    self._files.append((file, []))
                self._files[-1][1].append((position, size))

    @property
    def position(self) -> Hashable:
        """Where the read begins: the file's path, and the position in it; None if there is nothing to read. Reads of
        the same bytes have the same position."""
        if not self._files:
            return None
        file, ranges = self._files[0]
        return file.path, ranges[0][0]

    def run(self) -> bytes:
        """Read the records. Raises OSError, FileNotFoundError if retention removed the file meanwhile."""
        return b"".join([file.read_apart(ranges) for file, ranges in self._files])


class _Missing(ColdRead):
    """A single read that cannot be done from memory and has to wait for the disk."""

    def __init__(self, missing: NotInMemory) -> None:
        self.missing = missing

    @property
    def position(self) -> Hashable:
        """Where the read begins, as the error told."""
        return self.missing.position

    def run(self) -> bytes:
        """Do the read. Raises OSError."""
        self.missing.read()
        return b""


def patiently(look: Callable[[], T]) -> Generator[ColdRead, None, T]:
    """Call `look` until it succeeds, and return its result; for a search in steps. Each read for which `look` raises
    NotInMemory is yielded, and the caller of the steps runs it before the next step. `look` must change nothing before
    its last read. Raises the other errors of `look`."""
    while True:
        try:
            return look()
        except NotInMemory as missing:
            yield _Missing(missing)


class ReadAhead:
    """Records that will be read in some seconds, in any order: a thread asks the kernel to load them into memory before
    that. Planned by the store's own thread. `offsets`: their physical offsets; `sizes`: their sizes in bytes."""

    def __init__(self, log: Commitlog, offsets: NDArray[np.int64], sizes: NDArray[np.integer[Any]]) -> None:
        self._offsets, self._sizes = offsets, sizes
        self._segment_size = log.segment_size
        self._files: list[tuple[int, File]] = []
        at, last = max(int(offsets.min()), log.begin), int(offsets.max())
        while at <= last and (located := log.locate(at, 1)) is not None:
            self._files.append((at - located[1], located[0]))
            at += log.segment_size - located[1]

    def run(self) -> None:
        """Ask the kernel for the records. Raises OSError, FileNotFoundError if retention removed a file meanwhile."""
        order = np.argsort(self._offsets)
        starts = self._offsets[order]
        ends = starts + self._sizes[order]
        numbers = starts // self._segment_size
        is_apart = (starts[1:] - ends[:-1] > _AHEAD_GAP) | (numbers[1:] != numbers[:-1])
        breaks = np.flatnonzero(is_apart)
        starts, sizes = starts[np.append(0, breaks + 1)], ends[np.append(breaks, len(ends) - 1)]
        sizes -= starts
        sizes -= np.clip(np.cumsum(sizes) - _AHEAD_BYTES, 0, sizes)
        for base, file in self._files:
            mine = (starts >= base) & (starts < base + self._segment_size)
            file.read_ahead(list(zip((starts[mine] - base).tolist(), sizes[mine].tolist(), strict=True)))


ReadCold = Callable[[ColdRead | ReadAhead, Callable[[], None]], None]
"""Runs a read in a thread that may wait for the disk, and calls back when the read is done."""
