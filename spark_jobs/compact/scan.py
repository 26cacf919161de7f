"""First step of compacting: the kind of each record of a range.

One task for each range saves in the scratch directory:

    <n>.starts   int32, position of each record from the start of the range
    <n>.sizes    int32, its bytes
    <n>.kinds    uint8, its kind: PLAIN, LEVEL, ...
    <n>.special  SPECIAL, of each that is neither PLAIN nor KEYED_MESSAGE: its number in the range, queue and queue
                 offset
    <n>.keys     KEYED, of each message of a topic that keeps the newest of each key
    <n>.unowned  UNOWNED, of each message of a topic that was deleted, or may have been: see `compact.deleted`
    <n>.delivered, <n>.withdrawn         int64, physical offsets of scheduled messages that records of this range name
                                         as done
    <n>.delivered_by, <n>.withdrawn_by   int64, physical offsets of the records that name them, in the same order

That is 9 bytes for each record, and 16 more for scheduled ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from duemq.protocol.records.properties import KEYS, TIMER_DEL_UNIQKEY, TIMER_ROLL_TIMES
from duemq.protocol.topics import HALF_TOPIC, OP_HALF_TOPIC, SCHEDULE_TOPIC, TIMER_TOPIC
from duemq.spark_jobs.compact.deleted import UNOWNED, Owners, unowned
from duemq.spark_jobs.store.walks import Range, walks
from duemq.spark_jobs.writers.hashes import key_hashes
from duemq.spark_jobs.writers.spill import save
from duemq.storage.log.origins import NO_ORIGIN, origins_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from duemq.spark_jobs.columns.records import Damage, Records
    from duemq.spark_jobs.store.store_files import StoreFiles

    Integers = NDArray[np.int64]

PLAIN: Final = 0
LEVEL: Final = 1
"""Waits, or waited, for its delay level."""
TIMER: Final = 2
"""Waits, or waited, in the wheel."""
TIMER_AGAIN: Final = 3
"""Waits, or waited, in the wheel, instead of another record."""
TIMER_DELETE: Final = 4
"""Deletes a message with a timer."""
HALF: Final = 5
OP: Final = 6
KEYED_MESSAGE: Final = 7
"""A message of a topic that keeps the newest of each key."""

SPECIAL: Final = np.dtype([("number", "<i4"), ("queue_id", "<i4"), ("queue_offset", "<i8")])
KEYED: Final = np.dtype(
    [
        ("physical_offset", "<i8"),
        ("queue_offset", "<i8"),
        ("queue_id", "<i4"),
        ("topic", "<i4"),
        ("has_key", "?"),
        ("hash1", "<u8"),
        ("hash2", "<u8"),
    ]
)
NAMED: Final = ("delivered", "delivered_by", "withdrawn", "withdrawn_by")
_KINDS: Final = {SCHEDULE_TOPIC: LEVEL, TIMER_TOPIC: TIMER, HALF_TOPIC: HALF, OP_HALF_TOPIC: OP}


class ScanTask(NamedTuple):
    """A range to scan. `keyed_topics`: those that keep the newest message of each key; `cutoff_ms`: messages stored
    before this time, ms since the epoch, have expired, 0 for none; `owners`: the facts about deleted topics."""

    store: StoreFiles
    part: Range
    number: int
    scratch: str
    keyed_topics: tuple[str, ...]
    cutoff_ms: int
    owners: Owners


class Scanned(NamedTuple):
    """The result for a range: number and bytes of records, the physical offset of the first that has not expired (-1:
    all have), the store time of the last, damage, and the names of the topics that <n>.unowned has by index."""

    number: int
    records: int
    size: int
    first_young: int
    last_store_ms: int
    damages: list[Damage]
    topics: list[str]


class _Columns:
    """Arrays of the chunks of a range, to be joined."""

    def __init__(self) -> None:
        self.starts: list[Integers] = []
        self.sizes: list[Integers] = []
        self.kinds: list[NDArray[np.uint8]] = []
        self.special: list[NDArray[np.void]] = []
        self.keys: list[NDArray[np.void]] = []
        self.unowned: list[NDArray[np.void]] = []
        self.topics: list[str] = []
        self.named: dict[str, list[Integers]] = {name: [] for name in NAMED}
        self.count = 0


def scan(task: ScanTask) -> Scanned:
    """Scan a range. Raises JobError, OSError."""
    columns = _Columns()
    damages: list[Damage] = []
    first_young, last_store_ms = -1, 0
    for found in walks(task.store, task.part, check_crc=False):
        damages += found.damages
        records = found.records
        if not len(records):
            continue
        stored = records.store_ms
        last_store_ms = int(stored[-1])
        if first_young < 0:
            young = np.flatnonzero(stored >= task.cutoff_ms)
            if len(young):
                first_young = int(records.physical_offset[young[0]])
        _look(columns, records, task)
    starts = _joined(columns.starts, np.int64)
    sizes = _joined(columns.sizes, np.int64)
    number, scratch = task.number, task.scratch
    save(scratch, f"{number}.starts", (starts - task.part.start).astype(np.int32))
    save(scratch, f"{number}.sizes", sizes.astype(np.int32))
    save(scratch, f"{number}.kinds", _joined(columns.kinds, np.uint8))
    save(scratch, f"{number}.special", _joined(columns.special, SPECIAL))
    save(scratch, f"{number}.keys", _joined(columns.keys, KEYED))
    save(scratch, f"{number}.unowned", _joined(columns.unowned, UNOWNED))
    for name, parts in columns.named.items():
        save(scratch, f"{number}.{name}", _joined(parts, np.int64))
    return Scanned(number, len(starts), int(sizes.sum()), first_young, last_store_ms, damages, columns.topics)


def _joined(parts: list[NDArray], dtype: object) -> NDArray:  # type: ignore[type-arg]
    return np.concatenate(parts) if parts else np.empty(0, dtype)  # type: ignore[call-overload]


def _look(columns: _Columns, records: Records, task: ScanTask) -> None:
    codes, names = records.topics()
    kind_of = [KEYED_MESSAGE if name in task.keyed_topics else _KINDS.get(name, PLAIN) for name in names]
    kinds = np.array(kind_of, np.uint8)[codes]
    origin = origins_of(records.prepared_offset, records.sys_flag, records.physical_offset)
    named = origin != NO_ORIGIN
    timers = np.flatnonzero(kinds == TIMER)
    if len(timers):
        texts = records.take(timers).texts
        deletes = texts.find(TIMER_DEL_UNIQKEY)[0] >= 0
        again = ~deletes & (texts.find(TIMER_ROLL_TIMES)[0] >= 0)
        kinds[timers[deletes]] = TIMER_DELETE
        kinds[timers[again]] = TIMER_AGAIN
    if named.any():
        plain = (kinds == PLAIN) | (kinds == KEYED_MESSAGE)
        is_delivery = named & plain
        is_withdrawal = named & ((kinds == TIMER_AGAIN) | (kinds == TIMER_DELETE))
        for rows, name in ((is_delivery, "delivered"), (is_withdrawal, "withdrawn")):
            if rows.any():
                columns.named[name].append(origin[rows])
                columns.named[f"{name}_by"].append(records.physical_offset[rows])
    special = np.flatnonzero((kinds != PLAIN) & (kinds != KEYED_MESSAGE))
    if len(special):
        rows = np.zeros(len(special), SPECIAL)
        rows["number"] = special + columns.count
        rows["queue_id"] = records.queue_id[special]
        rows["queue_offset"] = records.queue_offset[special]
        columns.special.append(rows)
    keyed = np.flatnonzero(kinds == KEYED_MESSAGE)
    if len(keyed):
        columns.keys.append(_keys(records.take(keyed), task.keyed_topics))
    messages = np.flatnonzero((kinds == PLAIN) | (kinds == KEYED_MESSAGE))
    found = unowned(records.take(messages), task.owners, codes[messages], names)
    if len(found):
        found["topic"] += len(columns.topics)
        columns.topics += names
        columns.unowned.append(found)
    columns.starts.append(records.physical_offset)
    columns.sizes.append(records.sizes)
    columns.kinds.append(kinds)
    columns.count += len(records)


def _keys(records: Records, topics: tuple[str, ...]) -> NDArray[np.void]:
    codes, names = records.topics()
    rows = np.zeros(len(records), KEYED)
    rows["physical_offset"] = records.physical_offset
    rows["queue_offset"] = records.queue_offset
    rows["queue_id"] = records.queue_id
    rows["topic"] = np.array([topics.index(name) if name in topics else -1 for name in names], np.int32)[codes]
    at, size = records.property(KEYS)
    rows["has_key"] = at >= 0
    found = np.flatnonzero(at >= 0)
    rows["hash1"][found], rows["hash2"][found] = key_hashes(records.texts.data, at[found], size[found])
    return rows
