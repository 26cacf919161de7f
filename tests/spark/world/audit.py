"""The outcome of each scheduled message of a store, found by the plainest means: the rules that an audit has to follow.

**Scheduled** is a record of SCHEDULE_TOPIC_XXXX (a delay level), or of rmq_sys_wheel_timer (a timer) that neither
deletes another (TIMER_DEL_UNIQKEY) nor repeats one (TIMER_ROLL_TIMES). A retry of a consumer is scheduled too. A record
with TIMER_ROLL_TIMES repeats its origin: RocketMQ rolls this way, duemq reschedules this way. If the origin's record is
gone, it counts as the origin. But if it names an origin and is another message, by UNIQ_KEY, target or the producer's
time, it has replaced that message (TIMER_REPLACE): it is a message of its own, and its origin is cancelled.

**A delivery names its origin** in the prepared-transaction offset if duemq delivered it (-1 means 0), unless it belongs
to a committed transaction; duemq's records that delete and repeat name the record that they replace in the same way.
**Otherwise keys decide**: a record delivers if its topic and queue are those of its REAL_TOPIC and REAL_QID, and it has
a level (DELAY above 0) or was a timer (TIMER_OUT_MS), and an undelivered origin has the same UNIQ_KEY, target and
reconsume times. The retries of one message have the same UNIQ_KEY, and differ in the others.

**Due** is, for a level: the deliver time in the record (duemq) or in the tags code of its unit (RocketMQ). For a timer:
the deliver time in the record (duemq), else the time in its properties: TIMER_DELAY_SEC, TIMER_DELAY_MS after the store
time, or TIMER_DELIVER_MS. Lateness is the store time of the delivery minus the deliver time.

**The verdict**: twice, or delivered, by the number of deliveries. Without a delivery: cancelled, if a record deletes it
(by origin; RocketMQ's by topic and key and the same TIMER_OUT_MS), or its level's unit is withdrawn (size 1). Lost, if
the broker has passed it, else pending. A level has passed the queue offsets before its progress: by the checkpoint's
note if that is valid, else by delayOffset.json. The wheel has passed messages without a unit in the slot of that note's
second or a later one (RocketMQ: timercheck's read time), unless it has not reached them in the timer topic's queue. The
deliver time does not decide: duemq, stopped in the middle of a second, gives the rest of it units in the next one, and
a topic's policy may hold messages beyond their time.
"""

from __future__ import annotations

import struct
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tests.spark.world import oracle
from tests.spark.world.oracle import COMMIT, SCHEDULE_TOPIC, TIMER_TOPIC, TRANSACTION, Contents, Record, Unit

_DELETE = 4
_WITHDRAWN = 8

Verdict = Literal["delivered", "twice", "cancelled", "pending", "lost"]
Key = tuple[str, str, str, int]


@dataclass
class Scheduled:
    """One scheduled message and its outcome."""

    origin: Record
    last: Record
    """The record that waits, or waited last: the origin, or the record that repeats it."""
    due_ms: int | None
    """The deliver time, ms since the epoch; None if unknown: for a level of RocketMQ's without its unit."""
    deliveries: list[Record] = field(default_factory=list)
    cancelled_by: Record | None = None
    verdict: Verdict = "pending"

    @property
    def level(self) -> int:
        """The delay level it was sent with; 0 for a timer."""
        return self.origin.queue_id + 1 if self.origin.topic == SCHEDULE_TOPIC else 0

    @property
    def real_topic(self) -> str:
        return self.origin.properties["REAL_TOPIC"]

    @property
    def unique_key(self) -> str | None:
        return self.origin.unique_key

    @property
    def late_ms(self) -> int | None:
        """Lateness of the first delivery."""
        return self.deliveries[0].store_ms - self.due_ms if self.deliveries and self.due_ms is not None else None


@dataclass
class Audit:
    """All scheduled messages, in the order of their origins."""

    scheduled: list[Scheduled]
    orphans: list[Record]
    """Deliveries of messages whose origin is missing."""

    @property
    def totals(self) -> Counter[Verdict]:
        """Number of messages per verdict; they add up to the number scheduled."""
        return Counter(message.verdict for message in self.scheduled)

    def of(self, verdict: Verdict) -> list[Scheduled]:
        return [message for message in self.scheduled if message.verdict == verdict]

    def by_key(self, unique_key: str) -> list[Scheduled]:
        return [message for message in self.scheduled if message.unique_key == unique_key]


@dataclass
class _Progress:
    """The positions that the broker says it has passed."""

    runs: dict[int, list[tuple[int, int]]] | None
    """duemq's note: for each level, the start and the progress of each run."""
    delay_offsets: dict[int, int]
    second: int
    """Slots before that of this second have no meaning any more."""
    timer_queue: int
    """The queue offset of the timer topic to be put into the wheel next."""
    in_wheel: set[int]
    """Physical offsets that have a unit in a slot that counts."""

    def has_passed(self, message: Scheduled) -> bool:
        record = message.last
        if record.topic == SCHEDULE_TOPIC:
            level = record.queue_id + 1
            if self.runs is None:
                return record.queue_offset < self.delay_offsets.get(level, 0)
            before = [cursor for start, cursor in self.runs.get(level, []) if start <= record.queue_offset]
            return bool(before) and record.queue_offset < before[-1]
        return record.queue_offset < self.timer_queue and record.physical_offset not in self.in_wheel


def audit(store: Path, contents: Contents | None = None) -> Audit:
    """Return the audit of a store; `contents`: its records, if they were read already."""
    records = (contents or oracle.contents(store)).records
    levels: dict[int, dict[int, Unit]] = defaultdict(dict)
    for topic, queue_id in oracle.queues(store):
        if topic == SCHEDULE_TOPIC:
            levels[queue_id] = {unit.physical_offset: unit for unit in oracle.consume_queue(store, topic, queue_id)}
    result = Audit([], [])
    by_offset: dict[int, Scheduled] = {}
    by_key: dict[Key, list[Scheduled]] = defaultdict(list)
    deletes: list[Record] = []

    def begin(record: Record) -> None:
        message = Scheduled(record, record, _due(record, record, levels))
        result.scheduled.append(message)
        by_offset[record.physical_offset] = message
        by_key[_key(record)].append(message)

    for record in records:
        origin = _origin_of(record)
        if record.topic == SCHEDULE_TOPIC:
            begin(record)
        elif record.topic == TIMER_TOPIC and "TIMER_DEL_UNIQKEY" in record.properties:
            if origin in by_offset:
                by_offset[origin].cancelled_by = record
            else:
                deletes.append(record)
        elif record.topic == TIMER_TOPIC and "TIMER_ROLL_TIMES" in record.properties:
            found = by_offset.get(origin) if origin is not None else None
            if found is not None and _is_other(found.last, record):
                found.cancelled_by = record
                begin(record)
                continue
            found = found or next((one for one in by_key[_key(record)] if not one.deliveries), None)
            if found is None:
                begin(record)
                continue
            found.last = record
            found.due_ms = _due(found.origin, record, levels)
            by_offset[record.physical_offset] = found
        elif record.topic == TIMER_TOPIC:
            begin(record)
        elif origin in by_offset:
            by_offset[origin].deliveries.append(record)
        elif _looks_delivered(record):
            same = by_key.get(_key(record), [])
            found = next((one for one in same if not one.deliveries), same[-1] if same else None)
            if found is not None:
                found.deliveries.append(record)
            else:
                result.orphans.append(record)
    for record in deletes:
        _delete(record, result.scheduled)
    progress = _progress(store)
    for message in result.scheduled:
        unit = levels[message.origin.queue_id].get(message.last.physical_offset) if message.level else None
        if message.deliveries:
            message.verdict = "delivered" if len(message.deliveries) == 1 else "twice"
        elif message.cancelled_by is not None or (unit is not None and unit.size == 1):
            message.verdict = "cancelled"
        else:
            message.verdict = "lost" if progress.has_passed(message) else "pending"
    return result


def _origin_of(record: Record) -> int | None:
    """The physical offset of the record that a record names, if any. Scheduled records have their deliver time in that
    field, and a committed message its half's offset."""
    number = record.prepared_offset
    if record.topic == SCHEDULE_TOPIC or number == 0 or record.sys_flag & TRANSACTION == COMMIT:
        return None
    return 0 if number == -1 else number


def _looks_delivered(record: Record) -> bool:
    found = record.properties
    is_there = (record.topic, str(record.queue_id)) == (found.get("REAL_TOPIC"), found.get("REAL_QID"))
    return is_there and (int(found.get("DELAY", "0")) > 0 or "TIMER_OUT_MS" in found)


def _key(record: Record) -> Key:
    found = record.properties
    return found.get("REAL_TOPIC", ""), found.get("REAL_QID", ""), record.unique_key or "", record.reconsume_times


def _is_other(one: Record, record: Record) -> bool:
    return (_key(one), one.born_ms) != (_key(record), record.born_ms)


def _due(origin: Record, last: Record, levels: dict[int, dict[int, Unit]]) -> int | None:
    if last.topic == SCHEDULE_TOPIC:
        unit = levels[last.queue_id].get(last.physical_offset)
        return last.prepared_offset or (unit.tags_code if unit is not None else None)
    found = last.properties
    if last is origin and last.prepared_offset > 0 and "TIMER_ROLL_TIMES" not in found:
        return last.prepared_offset
    if "TIMER_DELAY_SEC" in found:
        return origin.store_ms + int(found["TIMER_DELAY_SEC"]) * 1000
    if "TIMER_DELAY_MS" in found:
        return origin.store_ms + int(found["TIMER_DELAY_MS"])
    return int(found["TIMER_DELIVER_MS"]) if "TIMER_DELIVER_MS" in found else None


def _delete(record: Record, scheduled: list[Scheduled]) -> None:
    """Cancel the message that a record of RocketMQ's deletes, unless it had been delivered."""
    found = record.properties
    names = found["TIMER_DEL_UNIQKEY"]
    for message in scheduled:
        is_meant = names in (f"{message.real_topic}+{message.unique_key}", message.unique_key)
        if is_meant and message.last.properties.get("TIMER_OUT_MS") == found["TIMER_OUT_MS"]:
            message.cancelled_by = record


def _progress(store: Path) -> _Progress:
    read_ms, _, timer_queue = oracle.timer_check(store)
    notes = oracle.checkpoint(store).notes
    second = read_ms // 1000
    if notes.get("timers"):
        # See scheduler/timers/files/small_files.py:
        # | version 1 | second | since | log since | log end | log crc | queue offset | ...
        _, second, _, _, _, _, timer_queue = struct.unpack_from(">BqqqqIq", notes["timers"])
    runs = _runs(notes["levels"]) if notes.get("levels") else None
    units = [
        unit
        for unit in oracle.timer_units(store)
        if not unit.magic & _WITHDRAWN and not (unit.magic & _DELETE and unit.last_field)
    ]
    in_wheel = {unit.physical_offset for unit in units if (unit.write_ms + unit.delay_ms) // 1000 >= second}
    return _Progress(runs, oracle.delay_offsets(store), second, timer_queue, in_wheel)


def _runs(note: bytes) -> dict[int, list[tuple[int, int]]]:
    """The note of the levels: start and cursor of each run (its layout is in scheduler/levels/runs.py)."""
    _, count = struct.unpack_from(">IH", note)
    at, result = 6, {}
    for _ in range(count):
        level, number = struct.unpack_from(">HH", note, at)
        at += 4
        runs = [struct.unpack_from(">qqq", note, at + 24 * run) for run in range(number)]
        result[level] = [(start, cursor) for start, cursor, _ in runs]
        at += 24 * number
    return result
