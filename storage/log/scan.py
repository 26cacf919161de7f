"""Reading the commitlog from a position on, record by record, as far as it holds whole records."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from typing import Final, NamedTuple

from duemq.protocol.records.properties import MAX_BYTES
from duemq.protocol.records.record import (
    FLAG_BORN_IPV6,
    FLAG_STORE_IPV6,
    MAGIC_END,
    MAGIC_V1,
    MAGIC_V2,
    MAGICS,
    MAX_TOPIC_BYTES,
    MIN_SIZE,
    SIZE_AND_MAGIC,
    START,
    crc32,
    head_without,
)
from duemq.storage.log.commitlog import Commitlog

_HEAD: Final = head_without("flag", "born_host", "store_host")
"""The fields that a scan needs."""
_I32: Final = struct.Struct(">i")
_I64: Final = struct.Struct(">q")
_BORN_END: Final = 56
_SECTOR: Final = 512
_HOST_FLAGS: Final = FLAG_BORN_IPV6 | FLAG_STORE_IPV6
CHUNK_SIZE: Final = 1 << 20
"""Bytes of one read: few enough to stay in the processor's cache until they are decoded."""
_ZEROS: Final = bytes(CHUNK_SIZE)

_MAGIC_AND_SIZE: Final = 8
_MAX_ZEROS: Final = 16 << 20
_TOPIC_NAME: Final = re.compile(rb"[%|a-zA-Z0-9_-]{1,255}")


def is_topic_name(topic: bytes) -> bool:
    """Whether these are valid characters of a topic, which becomes the name of a directory."""
    return _TOPIC_NAME.fullmatch(topic) is not None


class ScannedRecord(NamedTuple):
    """The fields of a record that recovery needs. Offsets and times as in `protocol.records.record`."""

    physical_offset: int
    size: int
    queue_id: int
    queue_offset: int
    sys_flag: int
    store_timestamp: int
    topic: bytes
    properties: bytes
    prepared_transaction_offset: int
    born_timestamp: int
    reconsume_times: int

    @property
    def properties_text(self) -> str:
        """The properties as text, decoded again on each access."""
        return self.properties.decode("utf-8", "replace")


class ScanEnd(NamedTuple):
    """Where a scan stopped, and why; `why` is None at the clean end of the written records."""

    physical_offset: int
    why: str | None


class Scanner:
    """Iterates over the records; `end` tells where the last whole record ended.

    A record is whole if its magic number, its lengths, its own physical offset and the checksum of its body are right.
    The first record that is not whole ends the scan: after a crash, nothing behind it was ever acknowledged as flushed.

    The checksum does not cover the properties. `zeros_are_torn`: a record with a sector of zeros within its properties
    also counts as torn. This is for logs that only duemq has written, since duemq refuses zero bytes there.
    """

    def __init__(self, log: Commitlog, start: int, *, zeros_are_torn: bool = False) -> None:
        self._log = log
        self._zeros_are_torn = zeros_are_torn
        self.end = ScanEnd(start, None)
        self._names: set[bytes] = set()

    def __iter__(self) -> Iterator[ScannedRecord]:
        position = self.end.physical_offset
        data, base = b"", position
        while position < self._log.allocated_end:
            yield from self._usual(data, base)
            position = self.end.physical_offset
            if position >= self._log.allocated_end:
                return
            room = self._log.segment_end(position) - position
            data, base = self._bytes_at(data, base, position, min(MIN_SIZE, room))
            size, magic = SIZE_AND_MAGIC.unpack_from(data, position - base)
            if magic == MAGIC_END:
                position = self._log.segment_end(position)
                self.end = ScanEnd(position, None)
                continue
            if magic not in (MAGIC_V1, MAGIC_V2) or not MIN_SIZE <= size <= room:
                why = f"magic {magic:#010x}, size {size}" if size or magic else None
                self.end = ScanEnd(position, why)
                return
            data, base = self._bytes_at(data, base, position, size)
            record = _take(data, position - base, position, check_crc=True)
            if self._zeros_are_torn and isinstance(record, ScannedRecord) and _has_empty_sector(record):
                record = "properties with a sector that was never written"
            if isinstance(record, str):
                self.end = ScanEnd(position, record)
                return
            position += size
            self.end = ScanEnd(position, None)
            yield record

    def _usual(self, data: bytes, base: int) -> Iterator[ScannedRecord]:
        """Yield the correct records of the usual kind (version 1, IPv4 addresses) from `end` on, as far as `data` holds
        them; any other record ends this, and `__iter__` examines it more closely. Recovery spends its time here."""
        unpack, head_size, names, view = _HEAD.unpack_from, _HEAD.size, self._names, memoryview(data)
        at, limit, zeros_are_torn = self.end.physical_offset - base, len(data), self._zeros_are_torn
        new = tuple.__new__  # the class's own `__new__` calls it, in twice the time
        try:
            while at + MIN_SIZE <= limit:
                head = unpack(data, at)
                size, magic, crc, queue_id, queue_offset, offset, flags, born, stored, tries, prepared, body_size = head
                end, topic_at = at + size, at + head_size + body_size + 1
                if magic != MAGIC_V1 or flags & _HOST_FLAGS or end > limit or offset != base + at or body_size < 0:
                    return
                if topic_at + 2 > end or queue_id < 0:
                    return
                topic_end = topic_at + data[topic_at - 1]
                if topic_end > topic_at + MAX_TOPIC_BYTES:
                    return
                if topic_end + 2 > end or (data[topic_end] << 8 | data[topic_end + 1]) != end - topic_end - 2:
                    return
                topic, text = data[topic_at:topic_end], data[topic_end + 2 : end]
                if topic not in names:
                    if not is_topic_name(topic):
                        return
                    names.add(topic)
                if (zeros_are_torn and 0 in text) or len(text) > MAX_BYTES:
                    return
                if body_size and crc32(view[at + head_size : topic_at - 1]) & 0x7FFFFFFF != crc:
                    return
                at = end
                fields = offset, size, queue_id, queue_offset, flags, stored, topic, text, prepared, born, tries
                yield new(ScannedRecord, fields)
        finally:
            self.end = ScanEnd(base + at, None)

    def _bytes_at(self, data: bytes, base: int, position: int, size: int) -> tuple[bytes, int]:
        """Return bytes that include `size` bytes at `position`, and the physical offset at which they start."""
        if position + size <= base + len(data):
            return data, base
        room = self._log.segment_end(position) - position
        return self._log.read_raw(position, min(room, max(size, CHUNK_SIZE))), position


class Behind(NamedTuple):
    """Whole records behind the end of a scan."""

    records: int
    end: int
    """Physical offset behind the last of the records."""


def behind(log: Commitlog, start: int) -> Behind:
    """Count the whole records behind the position at which a scan ended (`whole_records`)."""
    count, end = 0, start
    for record in whole_records(log, start):
        count, end = count + 1, record.physical_offset + record.size
    return Behind(count, end)


def whole_records(log: Commitlog, start: int) -> Iterator[ScannedRecord]:
    """Yield the whole records behind the position at which a scan ended, whatever bytes lie between them. A record is
    recognized because it names its own physical offset. In each file the search ends at a run of zeros that is longer
    than any gap between records."""
    end, position = start, start
    while position < log.allocated_end:
        stop, at, zeros = log.segment_end(position), position, 0
        while at < stop and zeros < _MAX_ZEROS:
            data = log.read_raw(at, min(CHUNK_SIZE, stop - at))
            if not data:
                break
            if data == (_ZEROS if len(data) == CHUNK_SIZE else bytes(len(data))):
                at, zeros = at + len(data), zeros + len(data)
                continue
            zeros = 0
            following = max(at + 1, at + len(data) - _MAGIC_AND_SIZE)
            for found in MAGICS.finditer(data):
                start_of_record = at + found.start() - 4
                record = read_record(log, start_of_record) if start_of_record >= max(end, start) else None
                if record is not None:
                    end = start_of_record + record.size
                    yield record
            at = max(following, end) if following < stop - _MAGIC_AND_SIZE else stop
        position = stop


def _take(data: bytes, at: int, position: int, *, check_crc: bool) -> ScannedRecord | str:
    """Decode the record at byte `at` of `data`, which lies at physical offset `position`. For a record that is wrong,
    return a text that describes the fault."""
    size, magic, crc, queue_id, _, queue_offset, physical_offset, sys_flag = START.unpack_from(data, at)
    if physical_offset != position:
        return f"a record that says it lies at {physical_offset}"
    store_time_at = at + _BORN_END + (12 if sys_flag & FLAG_BORN_IPV6 else 0)
    body_size_at = store_time_at + 28 + (12 if sys_flag & FLAG_STORE_IPV6 else 0)
    end = at + size
    if body_size_at + 7 > end:
        return f"a size of {size} is too small for its hosts"
    body_at = body_size_at + 4
    body_size = _I32.unpack_from(data, body_size_at)[0]
    topic_at = body_at + body_size + (1 if magic == MAGIC_V1 else 2)
    if body_size < 0 or topic_at + 2 > end:
        return f"a body of {body_size} bytes in a record of {size}"
    topic_size = data[topic_at - 1] if magic == MAGIC_V1 else int.from_bytes(data[topic_at - 2 : topic_at], "big")
    topic_end = topic_at + topic_size
    if topic_end + 2 > end or (magic == MAGIC_V1 and topic_size > MAX_TOPIC_BYTES):
        return f"a topic of {topic_size} bytes in a record of {size}"
    properties_size = end - topic_end - 2
    if int.from_bytes(data[topic_end : topic_end + 2], "big") != properties_size or properties_size > MAX_BYTES:
        return "properties that do not end at the record's end"
    if not is_topic_name(data[topic_at:topic_end]) or queue_id < 0:
        return f"topic {data[topic_at:topic_end]!r}, queue {queue_id}"
    if check_crc and body_size and crc32(memoryview(data)[body_at : body_at + body_size]) & 0x7FFFFFFF != crc:
        return "a wrong checksum"
    return ScannedRecord(
        position,
        size,
        queue_id,
        queue_offset,
        sys_flag,
        _I64.unpack_from(data, store_time_at)[0],
        data[topic_at:topic_end],
        data[topic_end + 2 : end],
        _I64.unpack_from(data, body_size_at - 8)[0],
        _I64.unpack_from(data, at + _BORN_END - 16)[0],
        _I32.unpack_from(data, body_size_at - 12)[0],
    )


def _has_empty_sector(record: ScannedRecord) -> bool:
    text = record.properties
    start = -(record.physical_offset + record.size - len(text)) % _SECTOR
    return any(not any(text[at : at + _SECTOR]) for at in range(start, len(text), _SECTOR))


def read_record(log: Commitlog, offset: int, *, check_crc: bool = True) -> ScannedRecord | None:
    """Return the record at a physical offset, or None if there is no whole record. `check_crc`: whether the checksum of
    its body has to be right."""
    head = log.read_raw(offset, SIZE_AND_MAGIC.size)
    if len(head) < SIZE_AND_MAGIC.size:
        return None
    size, magic = SIZE_AND_MAGIC.unpack(head)
    if magic not in (MAGIC_V1, MAGIC_V2) or not MIN_SIZE <= size <= log.segment_end(offset) - offset:
        return None
    record = _take(log.read_raw(offset, size), 0, offset, check_crc=check_crc)
    return record if isinstance(record, ScannedRecord) else None
