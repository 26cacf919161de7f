"""Lines of the files that are named by offsets: commitlog, consume queue, its extension, timer log.

`start`, `end`: the first position and the one to stop before, as physical offsets, queue offsets, offsets in the
extension or positions in the timer log. Damage is reported, and the readable data behind it is shown.

The functions raise OSError.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from duemq.broker.dump.source import Source
from duemq.protocol.dump import MAGIC_AT, MAGIC_SIZE, DamageLine, fields, prefixed, record, when
from duemq.protocol.errors import RecordError
from duemq.protocol.records.record import (
    END_MARKER,
    END_MARKER_SIZE,
    MAGIC_END,
    MAGIC_V1,
    MAGIC_V2,
    MAGICS,
    MIN_SIZE,
    PHYSICAL_OFFSET_AT,
    StoredMessage,
    decode,
)
from duemq.protocol.topics import SCHEDULE_TOPIC, TIMER_TOPIC
from duemq.scheduler.timers.files import unit as timer_unit
from duemq.scheduler.timers.files.sums import is_superseded
from duemq.storage.queues import consume_queue
from duemq.storage.queues import extension as extended

if TYPE_CHECKING:
    from numpy.typing import NDArray

_UNITS: Final = 16_384
"""Number of units that are read together."""
_MARKER_SIZE, _MARKER_MAGIC_AT = 16, 12
"""Size of the marker that ends a file of the timer log, and the position of its magic number, both in bytes."""
_MAGIC_NAMES: Final = {
    timer_unit.NORMAL: "normal",
    timer_unit.ROLL: "roll",
    timer_unit.DELETE: "delete",
    timer_unit.WITHDRAWN: "withdrawn",
}
_MARKS: Final = {consume_queue.WITHDRAWN_SIZE: "withdrawn", consume_queue.DELIVERED_SIZE: "delivered"}


# --- the commitlog


def commitlog(source: Source, start: int, end: int, *, with_bodies: bool) -> Iterator[str]:
    """Yield the records of a file, and the marker that ends it."""
    base = source.base
    at = _following(source, start - base) if start > base else 0
    while at < source.size and base + at < end:
        size, magic = END_MARKER.unpack(source.read(at, END_MARKER_SIZE).ljust(END_MARKER_SIZE, b"\0"))
        if magic == MAGIC_END:
            yield f"{fields(offset=base + at)} end of the file: {size} bytes are free"
            return
        if (behind := source.after_zeros(at)) >= at + END_MARKER_SIZE:
            zeros = f"zeros, {behind - at} bytes"
            place = fields(offset=base + at)
            yield f"{place} {zeros}" if behind == source.size else DamageLine(f"{place} damaged: {zeros}")
            at = behind if behind == source.size else _following(source, max(at, behind - END_MARKER_SIZE))
            if behind < at:
                yield DamageLine(f"{fields(offset=base + behind)} damaged: {at - behind} bytes that are not a record")
            continue
        found = _record(source, at)
        if isinstance(found, StoredMessage):
            line = record(found, with_body=with_bodies)
            is_elsewhere = found.physical_offset != base + at
            yield DamageLine(f"misplaced: lies at {base + at} {line}") if is_elsewhere else line
            at += found.size
        else:
            following = _following(source, at + 1)
            yield DamageLine(f"{fields(offset=base + at)} damaged: {found}; {following - at} bytes are passed over")
            at = following


def _record(source: Source, at: int) -> StoredMessage | str:
    """Return the record at a byte of the file, or the reason why there is none."""
    size, magic = END_MARKER.unpack(source.read(at, END_MARKER_SIZE).ljust(END_MARKER_SIZE, b"\0"))
    if magic not in (MAGIC_V1, MAGIC_V2) or not MIN_SIZE <= size <= source.size - at:
        return f"magic {magic:#010x}, size {size}, with {source.size - at} bytes left"
    try:
        return decode(source.read(at, size))
    except RecordError as error:
        return error.why


def _following(source: Source, at: int) -> int:
    """Return the position, from a byte of the file on, of the next record whose own physical offset matches; the file's
    size if there is none."""
    at = max(0, at) + MAGIC_AT
    while (at_magic := source.find(MAGICS, at, MAGIC_SIZE)) is not None:
        place = at_magic - MAGIC_AT
        told = source.read(place + PHYSICAL_OFFSET_AT, 8)  # first, since the size may be wrong, and large
        if int.from_bytes(told, signed=True) == source.base + place and isinstance(
            _record(source, place), StoredMessage
        ):
            return place
        at = at_magic + 1
    return source.size


# --- consume queues


def queue(source: Source, start: int, end: int) -> Iterator[str]:
    """Yield the units of a file, by queue offset."""
    unit, unit_size = consume_queue.UNIT, consume_queue.UNIT_SIZE
    topic = source.parents[1] if len(source.parents) > 1 else ""
    first = source.base // unit_size
    if source.base % unit_size:
        yield DamageLine(f"damaged: {source.name} is not a multiple of {unit_size} bytes")
    last = min(end, first + source.size // unit_size)
    number = max(start, first)
    while number < last:
        at = (number - first) * unit_size
        behind = source.after_zeros(at)
        if behind >= at + unit_size:
            empty = min(last, first + behind // unit_size) - number
            is_end = first + behind // unit_size >= last
            place = fields(queueOffset=number)
            yield f"{place} free, {empty} units" if is_end else DamageLine(f"{place} damaged: zeros, {empty} units")
            number += empty
            continue
        line = _unit(topic, *unit.unpack(source.read(at, unit_size)))
        yield prefixed(f"{fields(queueOffset=number)} ", line)
        number += 1
    if source.size % unit_size and end > last:
        yield DamageLine(f"damaged: {source.size % unit_size} bytes behind the last unit")


def _unit(topic: str, physical: int, size: int, code: int) -> str:
    if size == consume_queue.PADDING_SIZE:
        place = consume_queue.physical_offset_of(physical, size, code)
        return "no message" + (f" {fields(offset=physical, following=place)}" if place or physical else "")
    is_timed, is_extended = topic in (SCHEDULE_TOPIC, TIMER_TOPIC), code <= extended.EXT_ADDRESS_MAX
    told = fields(
        offset=physical,
        size=size if size not in _MARKS else None,
        due=when(code) if is_timed and not is_extended else None,
        tagsCode=None if is_timed or is_extended else code,
        address=code if is_extended else None,
    )
    if physical < 0 or (size not in _MARKS and size < MIN_SIZE):
        return DamageLine(f"damaged: {told}")
    return f"{told} {_MARKS[size]}" if size in _MARKS else told


def extension(source: Source, start: int, end: int) -> Iterator[str]:
    """Yield the units of a file of a consume queue's extension. Behind a wrong size, the next unit is looked for where
    it lies if no unit has a bitmap."""
    topic = source.parents[1] if len(source.parents) > 1 else ""
    at, first = 0, start - source.base
    while at < source.size and source.base + at < end:
        head, left = source.read(at, extended.HEAD_SIZE), source.size - at
        size = int.from_bytes(head[:2], signed=True)
        if size == extended.END_OF_FILE and len(head) >= extended.END_SIZE:
            if at >= first:
                yield f"{_place(source, at)} end of the file: {left} bytes are free"
            return
        if not size and (behind := source.after_zeros(at)) >= at + min(left, extended.HEAD_SIZE):
            begin = max(at, first)
            if behind >= source.size:
                if begin < behind:
                    yield f"{_place(source, begin)} free, {behind - begin} bytes"
                return
            at += (behind - at) // extended.HEAD_SIZE * extended.HEAD_SIZE
            if begin < at:
                yield DamageLine(f"{_place(source, begin)} damaged: zeros, {at - begin} bytes")
            continue
        if left < extended.HEAD_SIZE:
            if at >= first:
                yield DamageLine(f"{_place(source, at)} damaged: {left} bytes behind the last unit")
            return
        (unit,) = np.frombuffer(head, extended.HEAD)
        if not 0 <= size - extended.HEAD_SIZE == int(unit["bitmap_size"]) or size > left:
            if at >= first:
                what = f"size {size}, and a bitmap of {unit['bitmap_size']} bytes, with {left} bytes left"
                yield DamageLine(f"{_place(source, at)} damaged: {what}")
            at += extended.HEAD_SIZE
            continue
        code = int(unit["tags_code"])
        is_timed = topic == SCHEDULE_TOPIC
        told = fields(
            due=when(code) if is_timed else None,
            tagsCode=None if is_timed else code,
            stored=when(int(unit["store_time"])),
            bitmap=source.read(at + extended.HEAD_SIZE, size - extended.HEAD_SIZE).hex() or None,
        )
        if at >= first:
            yield f"{_place(source, at)} {told}"
        at += size


def _place(source: Source, at: int) -> str:
    """Return the address and the offset of a unit of the extension at a byte of the file, as fields."""
    return fields(address=source.base + at + extended.FIRST_ADDRESS, offset=source.base + at)


# --- the timer log


def timers(source: Source, start: int, end: int) -> Iterator[str]:
    """Yield the units of a timer log file, and the marker that ends it, whose size may be less than that of a unit."""
    base, unit_size = source.base, timer_unit.UNIT_SIZE
    at = batch_at = -(-max(0, start - base) // unit_size) * unit_size
    units, superseded = np.empty(0, timer_unit.UNIT), np.empty(0, np.bool_)
    while at < source.size and base + at < end:
        place = fields(position=base + at)
        head = source.read(at, _MARKER_SIZE)
        if int.from_bytes(head[_MARKER_MAGIC_AT:_MARKER_SIZE]) == MAGIC_END:
            yield f"{place} end of the file: {int.from_bytes(head[:4], signed=True)} bytes are free"
            return
        left = min(unit_size, source.size - at)
        if not any(head[:4]) and (behind := source.after_zeros(at)) >= at + left:
            zeros = f"zeros, {behind - at} bytes"
            yield f"{place} {zeros}" if behind == source.size else DamageLine(f"{place} damaged: {zeros}")
            at = behind // unit_size * unit_size if behind < source.size else source.size
            continue
        if left < unit_size:
            yield DamageLine(f"{place} damaged: {left} bytes behind the last unit")
            return
        if not batch_at <= at < batch_at + len(units) * unit_size:
            batch_at, data = at, source.read(at, min(_UNITS, (source.size - at) // unit_size) * unit_size)
            units = np.frombuffer(data[: len(data) // unit_size * unit_size], timer_unit.UNIT)
            if not len(units):  # the file became shorter
                return
            superseded = is_superseded(units)
        number = (at - batch_at) // unit_size
        yield prefixed(f"{place} ", _timer(units[number], is_superseded=bool(superseded[number])))
        at += unit_size


def _timer(unit: NDArray[Any] | np.void, *, is_superseded: bool) -> str:
    magic = int(unit["magic"])
    names = [name for bit, name in _MAGIC_NAMES.items() if magic & bit] if 0 <= magic <= timer_unit.ANY_MAGIC else []
    second = (int(unit["write_ms"]) + int(unit["delay_ms"])) // 1000
    told_due = int(unit["due_ms"])
    due = abs(told_due) if told_due != timer_unit.APPLIED else 0
    told = fields(
        second=second,
        slot=when(second * 1000),
        previous=int(unit["previous"]),
        magic=f"{magic:#x}({','.join(names)})",
        written=when(int(unit["write_ms"])),
        offset=int(unit["physical_offset"]),
        size=int(unit["record_size"]),
        topicHash=int(unit["topic_hash"]),
        due=when(due & timer_unit.MAX_DUE_MS) if due else told_due,
        chosenBy="policy" if due and told_due < 0 else None,
        key=due >> timer_unit.DUE_BITS or None,
    )
    if int(unit["size"]) != timer_unit.UNIT_SIZE or not 0 <= magic <= timer_unit.ANY_MAGIC:
        return DamageLine(f"damaged: unitSize={int(unit['size'])} {told}")
    return f"{told} superseded" if is_superseded else told
