"""Lines of a store's other files: those of fixed layout, the JSON tables, and the audit log. Damage is reported.

`start`, `end`: seconds since the epoch in the wheel, numbers of items in an index file. Raises OSError."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from typing import Any, Final

import numpy as np

from duemq.broker.dump.source import Source
from duemq.protocol.dump import DamageLine, fields, prefixed, shown, value, when
from duemq.protocol.errors import BodyFormatError
from duemq.protocol.frames import fastjson
from duemq.scheduler.levels import runs
from duemq.scheduler.timers.files import small_files, superseded, wheel
from duemq.scheduler.timers.files.small_files import TimerCheck, TimerNote
from duemq.storage.config_file import decode_table
from duemq.storage.durability import checkpoint
from duemq.storage.errors import QueueCheckDamaged
from duemq.storage.files import OsFiles
from duemq.storage.queues import check, index_file

_SHOWN: Final = 1024
"""Bytes shown of unknown content."""
_LINE_END: Final = re.compile(rb"\n")
_MAX_ENTRY: Final = 1 << 20
"""Maximum size, in bytes, of an entry of the audit log that is shown."""


# --- the wheel and the index


def timer_wheel(source: Source, start: int, end: int) -> Iterator[str]:
    """Yield the slots that were ever used, by their seconds."""
    if source.size != wheel.FILE_SIZE:
        yield DamageLine(f"damaged: {source.size} bytes; a timer wheel has {wheel.FILE_SIZE}")
    data = source.whole()
    slots = np.frombuffer(data, wheel.SLOT, len(data) // wheel.SLOT.itemsize)
    seconds = slots["second"].astype(np.int64)
    used = np.flatnonzero(seconds | slots["count"] | slots["first"] | slots["last"])
    for number in used[np.argsort(seconds[used], kind="stable")].tolist():
        slot, second = slots[number], int(seconds[number])
        if not start <= second < end:
            continue
        told = fields(
            second=second,
            slot=when(second * 1000),
            first=int(slot["first"]),
            last=int(slot["last"]),
            count=int(slot["count"]),
            magic=int(slot["magic"]) or None,
        )
        is_elsewhere = second % wheel.SLOTS != number
        yield DamageLine(f"misplaced: in slot {number} {told}") if is_elsewhere and second else told


def index(source: Source, start: int, end: int) -> Iterator[str]:
    """Yield the head of an index file, and its items."""
    header, item = index_file.HEADER, index_file.STORED
    if source.size != index_file.FILE_SIZE:
        yield DamageLine(f"damaged: {source.size} bytes; an index file has {index_file.FILE_SIZE}")
    if source.size < header.size:
        return
    begin_ms, end_ms, first, last, used, following = header.unpack(source.read(0, header.size))
    yield fields(
        begin=when(begin_ms),
        end=when(end_ms),
        beginOffset=first,
        endOffset=last,
        slots=used,
        items=max(following, 1) - 1,
    )
    at = index_file.ITEMS_AT
    room = (source.size - at) // item.itemsize
    if not 0 <= following <= room:
        yield DamageLine(f"damaged: {following - 1} items in a file that has room for {max(0, room - 1)}")
    for number in range(max(1, start), min(following, room, end)):
        each = np.frombuffer(source.read(at + number * item.itemsize, item.itemsize), item)[0]
        yield fields(
            item=number,
            hash=int(each["hash"]),
            offset=int(each["physical_offset"]),
            stored=when(begin_ms + 1000 * int(each["seconds"])),
            previous=int(each["previous"]),
        )


# --- the checkpoint and the notes


def checkpoint_file(source: Source) -> Iterator[str]:
    """Yield the times of a checkpoint, and the content of its notes."""
    data = source.whole()
    fault = checkpoint.fault_in(data)
    if fault:
        yield DamageLine(f"damaged: {fault}")
    if len(data) < checkpoint.THEIR_SIZE:
        return
    found = checkpoint.decode(data)
    yield fields(
        physic=when(found.physic_timestamp),
        logic=when(found.logic_timestamp),
        index=when(found.index_timestamp),
        recoveryOffset=found.recovery_offset,
    )
    if found.is_foreign and not fault:
        yield "what duemq adds is missing, or older than what RocketMQ has written"
    for name, note in found.notes.items():
        yield f"note {name}, {len(note)} bytes"
        try:
            yield from (prefixed("  ", line) for line in _note(name, note))
        except (ValueError, LookupError, struct.error) as error:
            yield DamageLine(f"  damaged: {error}")


def _note(name: str, note: bytes) -> Iterator[str]:
    if name == "levels" and (levels := runs.decode(note)) is not None:
        yield from _levels(levels)
    elif name == "timers" and (timers := small_files.decode_note(note)) is not None:
        yield from _timers(timers)
    elif note:
        yield shown(note, _SHOWN)


def _levels(note: runs.Note) -> Iterator[str]:
    yield fields(tableCrc=note.table_crc, delivered=list(note.delivered))
    if note.seen is not None:
        seen = note.seen
        yield fields(
            seenEnd=seen.end, clock=when(seen.wall_ms), monotonicMs=seen.monotonic_ms, bootId=seen.boot_id.hex() or None
        )
    for level, found in note.runs.items():
        for run in found:
            yield fields(
                level=level, start=run.start, cursor=run.cursor, shiftMs=run.shift_ms or None, limitMs=run.limit_ms
            )


def _timers(note: TimerNote) -> Iterator[str]:
    yield fields(
        second=note.second,
        slot=when(note.second * 1000),
        since=note.since,
        logSince=note.log_since,
        logEnd=note.log_end,
        queueOffset=note.queue_offset,
        heldTo=note.policy_end,
        countedAt=note.counted_at,
    )
    for topic_hash, count in note.waiting.items():
        yield fields(topicHash=topic_hash, waiting=count)
    found = note.found
    moved = dict(zip(found.moved.tolist(), found.moved_by.tolist(), strict=True))
    yield fields(recoveredTo=found.recovered_to, done=found.done.tolist(), counted=found.counted.tolist())
    yield fields(withdrawn=found.withdrawn.tolist(), moved=moved)
    yield fields(superseded=superseded.positions_of(note.superseded).tolist())
    if note.sums is not None:
        for base, each in note.sums.log.items():
            yield fields(timerlog=f"{base:020}", crc32=f"{each.crc:#010x}", magicSum=f"{each.magic:#018x}")
        yield fields(wheelHours=len(note.sums.wheel))


def timer_check(source: Source) -> Iterator[str]:
    """Yield the content of timercheck."""
    if source.size != small_files.CHECK_SIZE:
        yield DamageLine(f"damaged: {source.size} bytes instead of {small_files.CHECK_SIZE}")
    found = small_files.decode_check(source.read(0, small_files.CHECK_SIZE))
    if found is None:
        return
    yield fields(read=when(found.read_ms), versionAt=when(found.version_ms), **_numbers(found))


def _numbers(found: TimerCheck) -> dict[str, int]:
    return {
        "logPosition": found.log_position,
        "queueOffset": found.queue_offset,
        "masterQueueOffset": found.master_queue_offset,
        "stateVersion": found.state_version,
        "counter": found.counter,
    }


def queue_check(source: Source) -> Iterator[str]:
    """Yield the blocks of queuecheck, and the content of each."""
    data = source.whole()
    if len(data) < check.HEAD.size or not data.startswith(check.MAGIC):
        yield DamageLine(
            f"damaged: it does not begin with {check.MAGIC.decode()} and the size of a consume queue's file"
        )
        return
    segment_size = check.HEAD.unpack_from(data)[1]
    yield fields(queueFileSize=segment_size)
    try:
        for offset, items in check.blocks(data, segment_size):
            yield f"block {fields(recoveryOffset=offset, size=len(items))}"
            yield from (prefixed("  ", line) for line in _describe_items(items, segment_size))
    except QueueCheckDamaged as error:
        yield DamageLine(f"damaged: {error}")


def _describe_items(items: bytes, segment_size: int) -> Iterator[str]:
    found = check.QueueCheck(OsFiles(), "", "", segment_size)
    why: Exception | None = None
    try:
        found.take(items)
    except (ValueError, LookupError, struct.error) as error:
        why = error
    for topic, end in found.removed.items():
        yield fields(removed=topic, before=end)
    for topic, queue_id in found.unknown:
        yield fields(topic=topic, queue=queue_id) + " unknown from here on"
    for (topic, queue_id), segments in found.segments.items():
        for base, each in segments.items():
            yield fields(
                topic=topic,
                queue=queue_id,
                file=f"{base:020}",
                units=each.units,
                last=each.last,
                crc32=f"{each.crc:#010x}",
                sizes=each.sizes or None,
            )
    if why is not None:
        yield DamageLine(f"damaged: {why}")


# --- text


def table(source: Source) -> Iterator[str]:
    """Yield the entries of a JSON table, RocketMQ's or duemq's, one per line."""
    data = source.whole()
    try:
        found: Any = decode_table(data, source.path)
    except BodyFormatError as error:
        yield DamageLine(f"damaged: {error}")
        try:
            found = fastjson.loads(data)
        except BodyFormatError:
            yield shown(data, _SHOWN)
            return
    if not isinstance(found, dict):
        yield fields(value=found)
        return
    for name, content in found.items():
        if isinstance(content, dict) and any(isinstance(each, dict) for each in content.values()):
            for key, entry in content.items():
                yield f"{fields(table=name, name=key)} {_entry(entry)}"
        else:
            yield f"{fields(table=name)} {_entry(content)}"


def audit(source: Source) -> Iterator[str]:
    """Yield the entries of a file of the audit log, one per line. Memory: that of one entry."""
    at = 0
    while at < source.size:
        end = source.find(_LINE_END, at, 1)
        stop = source.size if end is None else end
        try:
            if stop - at > _MAX_ENTRY:
                raise BodyFormatError(f"a line of {stop - at} bytes; entries are shown up to {_MAX_ENTRY} bytes")
            if end is None:
                raise BodyFormatError("the last line has no end")
            entry: Any = fastjson.loads(source.read(at, stop - at))
            if not isinstance(entry, dict):
                raise BodyFormatError("this is no JSON object")
            yield " ".join(f"{value(key)}={value(each)}" for key, each in entry.items())
        except BodyFormatError as error:
            part = shown(source.read(at, min(stop - at, _SHOWN)))
            yield DamageLine(f"damaged at byte {at}: {error}: {part}")
        at = stop + 1


def _entry(entry: object) -> str:
    if entry and isinstance(entry, dict) and not any(isinstance(each, dict | list) for each in entry.values()):
        return " ".join(f"{value(key)}={value(each)}" for key, each in entry.items() if each != "")
    return value(entry)


def unknown(source: Source) -> Iterator[str]:
    """Yield the first bytes of a file that is not one of a store's, or has no layout, such as `lock` and `abort`."""
    if source.size:
        yield shown(source.read(0, _SHOWN), _SHOWN) + (f" of {source.size} bytes" if source.size > _SHOWN else "")
