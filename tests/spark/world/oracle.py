"""A store as a plain reader sees it: one record at a time, with struct, from the files alone.

The tables of spark_jobs are compared with it, so it shares no code with them, with `storage` or with `protocol`: a
mistake in one of those must show here. The layouts are RocketMQ's:

    commitlog/NNN          | size 4 | magic 4 | crc 4 | queue id 4 | flag 4 | queue offset 8 | physical offset 8 |
                           | sysflag 4 | born ms 8 | born host 8 or 20 | store ms 8 | store host 8 or 20 |
                           | reconsume times 4 | prepared offset 8 | body size 4, body | topic size 1 or 2, topic |
                           | properties size 2, properties |
                           and at the end of each full file: | space left 4 | magic 4 |
    consumequeue/T/Q/NNN   | physical offset 8 | size 4 | tags code 8 |
    timerlog/NNN           | 52 | previous 8 | magic 4 | write ms 8 | delay ms 4 | physical offset 8 | size 4 |
                           | topic hash 4 | deliver ms (ours) 8 |
    checkpoint             | physic ms 8 | logic ms 8 | index ms 8 | ... ours from byte 2048 on
    config/timercheck      | read ms 8 | log position 8 | queue offset 8 | ...

All integers big-endian, times ms since the epoch.
"""

from __future__ import annotations

import json
import mmap
import re
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

MAGICS = (b"\xda\xa3\x20\xa7", b"\xda\xa3\x20\xab")
END_MAGIC = b"\xcb\xd4\x31\x94"
END_SIZE = 8
COMPRESSED = 1
TRANSACTION = 3 << 2
COMMIT = 2 << 2
BORN_IPV6, STORE_IPV6 = 1 << 4, 1 << 5
SCHEDULE_TOPIC = "SCHEDULE_TOPIC_XXXX"
TIMER_TOPIC = "rmq_sys_wheel_timer"
HALF_TOPIC = "RMQ_SYS_TRANS_HALF_TOPIC"
OP_TOPIC = "RMQ_SYS_TRANS_OP_HALF_TOPIC"


class BrokenError(Exception):
    """There is no whole record at a position; the text gives the reason."""


@dataclass(frozen=True)
class Record:
    """One record, all of its fields."""

    physical_offset: int
    """The actual position of the record; `stored_physical_offset` is the one in its head."""
    size: int
    magic: int
    body_crc: int
    queue_id: int
    flag: int
    queue_offset: int
    stored_physical_offset: int
    sys_flag: int
    born_ms: int
    born_host: bytes
    store_ms: int
    store_host: bytes
    reconsume_times: int
    prepared_offset: int
    body: bytes
    """The body as stored, maybe compressed; see `content`."""
    topic: str
    properties_text: bytes

    @cached_property
    def properties(self) -> dict[str, str]:
        """The properties; of a repeated name the last one."""
        found = {}
        for part in self.properties_text.split(b"\x02"):
            name, separator, value = part.partition(b"\x01")
            if name and separator and value:
                found[name.decode()] = value.decode()
        return found

    @property
    def unique_key(self) -> str | None:
        return self.properties.get("UNIQ_KEY")

    @property
    def content(self) -> bytes:
        """The producer's body (zlib is the only compression in the stores of these tests)."""
        return zlib.decompress(self.body) if self.sys_flag & COMPRESSED else self.body


@dataclass(frozen=True)
class DamagedStretch:
    """A stretch of the commitlog without whole records, up to the next record, or to the end if only zeros follow."""

    physical_offset: int
    size: int
    reason: str


@dataclass(frozen=True)
class Unit:
    """A unit of a consume queue."""

    queue_offset: int
    physical_offset: int
    size: int
    tags_code: int


@dataclass(frozen=True)
class TimerUnit:
    """A unit of the timer log."""

    position: int
    previous: int
    magic: int
    write_ms: int
    delay_ms: int
    physical_offset: int
    record_size: int
    topic_hash: int
    last_field: int
    """The field that duemq fills; 0 in a log of RocketMQ's."""

    @property
    def due_ms(self) -> int:
        """duemq's exact deliver time, in the lower 43 bits of the last field, all of which is negative if a policy
        chose the time. 0 for a unit of RocketMQ's, and for one of duemq's that stands for no message."""
        return abs(self.last_field) & ((1 << 43) - 1) if self.last_field != -1 else 0


@dataclass(frozen=True)
class Checkpoint:
    """The checkpoint file. `recovery_offset` and `notes` are duemq's, None and empty if RocketMQ wrote it last."""

    physic_ms: int
    logic_ms: int
    index_ms: int
    recovery_offset: int | None = None
    notes: dict[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True)
class Contents:
    """The commitlog of a store."""

    records: list[Record]
    damages: list[DamagedStretch]
    begin: int
    end: int
    """Physical offset behind the last record, or damage."""
    end_markers: int


def decode(data: bytes, at: int, physical_offset: int) -> Record:
    """Decode the record at a position in the bytes of a file. Raises BrokenError."""
    if len(data) - at < 91:
        raise BrokenError("too few bytes")
    size = int.from_bytes(data[at : at + 4], "big", signed=True)
    magic = data[at + 4 : at + 8]
    if magic not in MAGICS:
        raise BrokenError(f"magic {magic.hex()}")
    if size < 91 or at + size > len(data):
        raise BrokenError(f"size {size}")
    sys_flag = int.from_bytes(data[at + 36 : at + 40], "big")
    born = 20 if sys_flag & BORN_IPV6 else 8
    store = 20 if sys_flag & STORE_IPV6 else 8
    head = struct.Struct(f">i4xIiiqqiq{born}sq{store}siqi")
    if head.size > size:
        raise BrokenError(f"size {size} is too small for its hosts")
    _, crc, queue, flag, queue_offset, stored, _, *others = head.unpack_from(data, at)
    born_ms, born_host, store_ms, store_host, times, prepared, length = others
    end, at_topic = at + size, at + head.size + length
    topic_bytes = 1 if magic == MAGICS[0] else 2
    if length < 0 or at_topic + topic_bytes > end:
        raise BrokenError(f"a body of {length} bytes")
    body = data[at + head.size : at_topic]
    topic_at = at_topic + topic_bytes
    properties_at = topic_at + int.from_bytes(data[at_topic:topic_at], "big") + 2
    if properties_at > end or properties_at + int.from_bytes(data[properties_at - 2 : properties_at], "big") != end:
        raise BrokenError("topic and properties do not end with the record")
    if stored != physical_offset:
        raise BrokenError(f"it says that it lies at {stored}")
    if body and zlib.crc32(body) & 0x7FFFFFFF != crc:
        raise BrokenError("checksum of the body")
    text = data[properties_at:end]
    if 0 in text:
        raise BrokenError("zeros in the properties")
    try:
        topic = data[topic_at : properties_at - 2].decode()
        text.decode()
    except UnicodeDecodeError:
        raise BrokenError("text that is not UTF-8") from None
    return Record(
        physical_offset=physical_offset,
        size=size,
        magic=int.from_bytes(magic, "big"),
        body_crc=crc,
        queue_id=queue,
        flag=flag,
        queue_offset=queue_offset,
        stored_physical_offset=stored,
        sys_flag=sys_flag,
        born_ms=born_ms,
        born_host=born_host,
        store_ms=store_ms,
        store_host=store_host,
        reconsume_times=times,
        prepared_offset=prepared,
        body=body,
        topic=topic,
        properties_text=text,
    )


def _is_end_marker(data: bytes, at: int) -> bool:
    left = len(data) - at
    return data[at + 4 : at + 8] == END_MAGIC and int.from_bytes(data[at : at + 4], "big") == left


def _next_start(data: bytes, at: int, base: int) -> int | None:
    """Return the first whole record, or end marker, from a position on."""
    for found in re.compile(rb"\xda\xa3\x20[\xa7\xab]|\xcb\xd4\x31\x94").finditer(data, at + 4):
        position = found.start() - 4
        if found[0] == END_MAGIC:
            if _is_end_marker(data, position):
                return position
            continue
        try:
            decode(data, position, base + position)
        except BrokenError:
            continue
        return position
    return None


@dataclass(frozen=True)
class _File:
    """One file of the commitlog by itself."""

    records: list[Record]
    damages: list[DamagedStretch]
    is_used: bool
    """Whether it has any byte that is not zero."""
    end: int
    """Physical offset behind the last record, damage or end marker; the file's own without any."""
    is_full: bool
    """Whether it ends with an end marker."""


@lru_cache(maxsize=64)
def _read_file(data: bytes, base: int) -> _File:
    """Read a file at a physical offset. Known by its bytes: tests ask often, and copy stores."""
    records: list[Record] = []
    damages: list[DamagedStretch] = []
    used = len(data.rstrip(b"\0"))
    at = 0
    while at < used:
        if _is_end_marker(data, at):
            return _File(records, damages, is_used=True, end=base + len(data), is_full=True)
        try:
            record = decode(data, at, base + at)
        except BrokenError as error:
            found = _next_start(data, at + 1, base)
            stop = used if found is None else found
            damages.append(DamagedStretch(base + at, stop - at, str(error)))
            at = stop
            continue
        records.append(record)
        at += record.size
    return _File(records, damages, is_used=used > 0, end=base + at, is_full=False)


def contents(store: Path) -> Contents:
    """Read all records of a store in order, and the damage between them."""
    records: list[Record] = []
    damages: list[DamagedStretch] = []
    markers = 0
    gap: int | None = None  # zeros from here on: the end, unless a record follows
    files = sorted((store / "commitlog").iterdir())
    end = begin = int(files[0].name) if files else 0
    for path in files:
        base = int(path.name)
        file = _read_file(path.read_bytes(), base)
        if file.is_used and gap is not None:
            damages.append(DamagedStretch(gap, base - gap, "zeros"))
            gap = None
        records += file.records
        damages += file.damages
        end = file.end if file.is_used else end
        markers += file.is_full
        if not file.is_full and gap is None:
            gap = file.end
    return Contents(records, damages, begin, end, markers)


def read_json(path: Path) -> Any:
    """Read a file in config/: JSON, with numbers as keys if fastjson wrote it."""
    text = path.read_text()

    def quoted(found: re.Match[str]) -> str:
        return found[1] or f'{found[2]}"{found[3]}"{found[4]}'

    return json.loads(re.sub(r'("(?:[^"\\]|\\.)*")|([{,]\s*)(-?\d+)(\s*:)', quoted, text))


def delay_offsets(store: Path) -> dict[int, int]:
    """Read delayOffset.json: for each level, the queue offset of the next message to deliver."""
    path = store / "config" / "delayOffset.json"
    return {int(level): at for level, at in read_json(path)["offsetTable"].items()} if path.exists() else {}


def consumer_offsets(store: Path) -> dict[str, dict[int, int]]:
    """Read consumerOffset.json: offsets by `topic@group` and queue."""
    path = store / "config" / "consumerOffset.json"
    table = read_json(path)["offsetTable"] if path.exists() else {}
    return {name: {int(queue): at for queue, at in queues.items()} for name, queues in table.items()}


def queues(store: Path) -> list[tuple[str, int]]:
    """List the consume queues."""
    found = [path for path in (store / "consumequeue").glob("*/*") if path.is_dir()]
    return sorted((path.parent.name, int(path.name)) for path in found)


def consume_queue(store: Path, topic: str, queue_id: int) -> list[Unit]:
    """Read the units of one queue, without fillers for deleted ones."""
    units = []
    for path in sorted((store / "consumequeue" / topic / str(queue_id)).iterdir()):
        data, first = path.read_bytes(), int(path.name) // 20
        for number, (physical_offset, size, tags_code) in enumerate(struct.iter_unpack(">qiq", data)):
            if size <= 0:
                break
            if size != 0x7FFFFFFF:
                units.append(Unit(first + number, physical_offset, size, tags_code))
    return units


def timer_units(store: Path) -> list[TimerUnit]:
    """Read the units of the timer log."""
    directory = store / "timerlog"
    return [unit for path in sorted(directory.iterdir()) for unit in _timer_units(path)] if directory.exists() else []


def _timer_units(path: Path) -> Iterator[TimerUnit]:
    base = int(path.name)
    if not path.stat().st_size:
        return
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        for at in range(0, len(data) - 52 + 1, 52):
            size, *fields = struct.unpack_from(">iqiqiqiiq", data, at)
            if size != 52:  # RocketMQ's files have 100 MB from the start, nearly all of it zeros
                return
            yield TimerUnit(base + at, *fields)


def timer_check(store: Path) -> tuple[int, int, int]:
    """Read timercheck: the slot to be read next (ms), the flushed end of the timer log, the timer topic's next
    offset."""
    path = store / "config" / "timercheck"
    if not path.exists():
        return 0, 0, 0
    read_ms, position, offset = struct.unpack_from(">3q", path.read_bytes())
    return read_ms, position, offset


def checkpoint(store: Path) -> Checkpoint:
    """Read the checkpoint file."""
    data = (store / "checkpoint").read_bytes() if (store / "checkpoint").exists() else bytes(24)
    physic, logic, index = struct.unpack_from(">3q", data)
    if data[2048:2056] != b"DUEMQCP3":
        return Checkpoint(physic, logic, index)
    offset, our_physic, our_logic, size = struct.unpack_from(">qqqI", data, 2056)
    end = 2084 + size
    is_whole = data[end : end + 4] == zlib.crc32(data[2048:end]).to_bytes(4, "big")
    if not is_whole or (our_physic, our_logic) != (physic, logic):
        return Checkpoint(physic, logic, index)
    notes, at = {}, 2084
    while at < end:
        name_end = at + 1 + data[at]
        start = name_end + 4
        at_next = start + int.from_bytes(data[name_end:start], "big")
        notes[data[at + 1 : name_end].decode()] = data[start:at_next]
        at = at_next
    return Checkpoint(physic, logic, index, offset, notes)


def java_hash(text: str) -> int:
    """Java's String.hashCode: of tags in consume queues, and of topics in timer logs."""
    result = 0
    for unit in struct.iter_unpack("<H", text.encode("utf-16-le")):
        result = (31 * result + unit[0]) & 0xFFFFFFFF
    return result - (1 << 32) if result >> 31 else result
