"""Faults put into a copy of a store, each with the result that a correct reader or audit must then give.

Faults as if by a broker, for the audit; the commitlog stays readable:

    remove_delivery   a delivered record becomes another message: its scheduled one is lost, if the broker has passed it
    double_delivery   a delivered record is appended once more
    delay_delivery    a delivered record was stored later

Faults of the disk, for the readers:

    flip_byte         in a body: the checksum is wrong, the records before and behind are not touched
    tear_tail         the last records are cut, by zeros or by the end of the file
    zero_stretch      zeros from the middle of one record to the middle of another
    zero_record       zeros over one record

They need a store that no other test uses (`WrittenStore.copy`, the fixture `writable`).
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

from tests.spark.world import oracle
from tests.spark.world.audit import Scheduled, Verdict
from tests.spark.world.oracle import END_MAGIC, END_SIZE, Record
from tests.spark.world.stores import SEGMENT

_QUEUE_OFFSET_AT, _PHYSICAL_OFFSET_AT = 20, 28


@dataclass(frozen=True)
class AuditFault:
    """The verdict that an audit must give for one scheduled message. All other verdicts stay."""

    origin_offset: int
    """Physical offset of the record that scheduled it."""
    unique_key: str | None
    verdict: Verdict
    late_ms: int | None
    """Lateness of its first delivery; None without one."""
    deliveries: tuple[int, ...]
    """Physical offsets of the records that deliver it now."""


@dataclass(frozen=True)
class DiskFault:
    """The damage that a reader must report of the commitlog. All other records are there as before."""

    lost: tuple[int, ...]
    """Physical offsets of the records that are not whole any more."""
    damage_at: int
    """Begin of the damage: at the first of the lost records."""
    resumes_at: int | None
    """Begin of the next whole record, or end marker; None if nothing follows."""


# --- faults as if by a broker


def remove_delivery(store: Path, message: Scheduled) -> AuditFault:
    """Turn the only delivery into another message of the same size, in a topic that does not exist. The unit in the
    consume queue stays, and points to it. For a message that the broker has passed; the verdict is "lost"."""
    (delivery,) = message.deliveries
    assert len(delivery.topic) == len(delivery.topic.encode()), "topics of the same length are made of ASCII ones"
    with _at(store, delivery.physical_offset) as (file, at):
        _put(file, at + _prepared_at(delivery), ">q", 0)
        file.seek(at + _topic_at(delivery))
        file.write(b"x" * len(delivery.topic))
    return AuditFault(message.origin.physical_offset, message.unique_key, "lost", None, ())


def double_delivery(store: Path, message: Scheduled) -> AuditFault:
    """Append the first delivery once more, as the next of its queue."""
    delivery = message.deliveries[0]
    units = oracle.consume_queue(store, delivery.topic, delivery.queue_id)
    with _at(store, delivery.physical_offset) as (file, at):
        file.seek(at)
        data = bytearray(file.read(delivery.size))
    struct.pack_into(">q", data, _QUEUE_OFFSET_AT, len(units))
    twin = _append(store, data)
    tags_code = next(unit.tags_code for unit in units if unit.physical_offset == delivery.physical_offset)
    unit = struct.pack(">qiq", twin, delivery.size, tags_code)
    _append_unit(store, delivery.topic, delivery.queue_id, len(units), unit)
    offsets = (*(one.physical_offset for one in message.deliveries), twin)
    return AuditFault(message.origin.physical_offset, message.unique_key, "twice", message.late_ms, offsets)


def delay_delivery(store: Path, message: Scheduled, by_ms: int) -> AuditFault:
    """Make the only delivery look as if stored `by_ms` later. Store times do not ascend any more then."""
    (delivery,) = message.deliveries
    assert message.late_ms is not None
    with _at(store, delivery.physical_offset) as (file, at):
        _put(file, at + _store_ms_at(delivery), ">q", delivery.store_ms + by_ms)
    return AuditFault(
        message.origin.physical_offset,
        message.unique_key,
        "delivered",
        message.late_ms + by_ms,
        (delivery.physical_offset,),
    )


# --- faults as if by a disk


def flip_byte(store: Path, record: Record) -> DiskFault:
    """Change one byte in the middle of a body."""
    assert record.body, "a record without a body has no checksum"
    with _at(store, record.physical_offset) as (file, at):
        position = at + _body_at(record) + len(record.body) // 2
        file.seek(position)
        (byte,) = file.read(1)
        file.seek(position)
        file.write(bytes((byte ^ 0x40,)))
    end = record.physical_offset + record.size
    return DiskFault((record.physical_offset,), record.physical_offset, end)


def tear_tail(store: Path, how: Literal["zeros", "cut"], records: int = 3) -> DiskFault:
    """End the commitlog in the body of one of the last records, and remove the records behind it: with zeros, as a
    crash leaves a file of full size, or by a shorter file, as an interrupted copy."""
    found = oracle.contents(store).records
    first = max(number for number in range(len(found) - records + 1) if len(found[number].body) > 1)
    torn = found[first]
    with _at(store, torn.physical_offset) as (file, at):
        size = file.seek(0, os.SEEK_END)
        file.truncate(at + _body_at(torn) + len(torn.body) // 2)
        if how == "zeros":
            file.truncate(size)
        base = torn.physical_offset - at
    for path in (store / "commitlog").iterdir():
        if int(path.name) > base:
            path.unlink()
    return DiskFault(tuple(record.physical_offset for record in found[first:]), torn.physical_offset, None)


def stretches(records: list[Record], count: int) -> Iterator[tuple[Record, Record]]:
    """Yield the first and the last of each `count` records that lie one after the other in one file."""
    for first, last in zip(records, records[count - 1 :], strict=False):
        if first.physical_offset // SEGMENT == last.physical_offset // SEGMENT:
            yield first, last


def zero_stretch(store: Path, first: Record, last: Record) -> DiskFault:
    """Put zeros from the middle of one record to the middle of a later one in the same file."""
    found = oracle.contents(store)
    with _at(store, first.physical_offset) as (file, at):
        begin = first.size // 2
        end = last.physical_offset + last.size // 2 - first.physical_offset
        size = file.seek(0, os.SEEK_END)
        assert at + end < size, "the two are not in one file"
        file.seek(at + begin)
        file.write(bytes(end - begin))
    gone = [one.physical_offset for one in found.records if first.physical_offset <= one.physical_offset]
    gone = [offset for offset in gone if offset <= last.physical_offset]
    return DiskFault(tuple(gone), first.physical_offset, last.physical_offset + last.size)


def zero_record(store: Path, record: Record) -> DiskFault:
    """Put zeros over one record."""
    with _at(store, record.physical_offset) as (file, at):
        file.seek(at)
        file.write(bytes(record.size))
    return DiskFault((record.physical_offset,), record.physical_offset, record.physical_offset + record.size)


# --- helpers


@contextmanager
def _at(store: Path, physical_offset: int) -> Iterator[tuple[BinaryIO, int]]:
    """Open the file with a physical offset for changes; return it and the position in it."""
    path = max(path for path in (store / "commitlog").iterdir() if int(path.name) <= physical_offset)
    with path.open("r+b") as file:
        yield file, physical_offset - int(path.name)


def _put(file: BinaryIO, at: int, layout: str, value: int) -> None:
    file.seek(at)
    file.write(struct.pack(layout, value))


def _store_ms_at(record: Record) -> int:
    return 48 + len(record.born_host)


def _prepared_at(record: Record) -> int:
    return _store_ms_at(record) + 8 + len(record.store_host) + 4


def _body_at(record: Record) -> int:
    return _prepared_at(record) + 12


def _topic_at(record: Record) -> int:
    return _body_at(record) + len(record.body) + (1 if record.magic == 0xDAA320A7 else 2)


def _append(store: Path, data: bytearray) -> int:
    """Append a record with its physical offset filled in; return that offset. The next file is made if there is no
    room."""
    end = oracle.contents(store).end
    first = min((store / "commitlog").iterdir())
    size = first.stat().st_size
    base = end - end % size
    if base + size - end < len(data) + END_SIZE:
        with _at(store, end) as (file, at):
            file.seek(at)
            file.write(struct.pack(">i", base + size - end) + END_MAGIC)
        base = end = base + size
    path = store / "commitlog" / f"{base:020d}"
    struct.pack_into(">q", data, _PHYSICAL_OFFSET_AT, end)
    with path.open("r+b" if path.exists() else "w+b") as file:
        file.truncate(size)
        file.seek(end - base)
        file.write(data)
    return end


def _append_unit(store: Path, topic: str, queue_id: int, queue_offset: int, unit: bytes) -> None:
    directory = store / "consumequeue" / topic / str(queue_id)
    size = min(directory.iterdir()).stat().st_size
    base, at = divmod(queue_offset * len(unit), size)
    path = directory / f"{base * size:020d}"
    with path.open("r+b" if path.exists() else "w+b") as file:
        file.truncate(size)
        file.seek(at)
        file.write(unit)
