"""What of a store is done, as its own books say: which scheduled messages were delivered or cancelled, and which half
messages have ended.

    delay levels   written last by duemq: the note "levels" in the checkpoint (a cursor for each run, `scheduler.runs`);
                   by Apache's: config/delayOffset.json. And units of size 1 in SCHEDULE_TOPIC_XXXX: cancelled
    timers         the timer log: a message that is in the wheel has a unit in a slot that is not past, and what is not
                   in the wheel yet lies behind timercheck's (duemq's: the note's) queue offset
    transactions   half and op messages below the offsets of CID_RMQ_SYS_TRANS in config/consumerOffset.json

Besides, a record that names an origin says that that one is done, whatever the books say (`compact_scan` finds those).
Where a book is missing nothing of its kind is taken to be done but what origins say.
"""

from __future__ import annotations

import os
import struct
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from scheduler import runs, timer_files
from scheduler.timer_log import DELETE, UNIT, UNIT_SIZE, WITHDRAWN, seconds_of
from scheduler.timer_superseded import marked, positions_of
from spark_jobs.errors import JobError
from spark_jobs.writers.spill import save
from storage import checkpoint
from storage.consume_queue import PADDING_SIZE, SCHEDULE_TOPIC, TIMER_TOPIC, WITHDRAWN_SIZE
from storage.files import OsFiles

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from spark_jobs.store_files import QueueFile, StoreFiles
    from storage.checkpoint import Checkpoint

    Integers = NDArray[np.int64]

HALF_TOPIC: Final = "RMQ_SYS_TRANS_HALF_TOPIC"
OP_TOPIC: Final = "RMQ_SYS_TRANS_OP_HALF_TOPIC"
_OFFSETS: Final = struct.Struct(">qq")
"""Queue offset and physical offset of a record, from its byte 20 on."""
_TRANSACTIONS_GROUP: Final = "CID_RMQ_SYS_TRANS"


class Timers(NamedTuple):
    """The books of the timer wheel. `enqueued`: queue offset in rmq_sys_wheel_timer up to which messages are in the
    wheel. `second`: slots before it are past. `live`: the units (UNIT) that stand for something, in the log's order.
    `check`, `note`: what timercheck and the checkpoint's note said; `segment_size`: of the timer log's files."""

    enqueued: int
    second: int
    live: NDArray[Any]
    check: timer_files.TimerCheck | None
    note: timer_files.TimerNote | None
    segment_size: int


class Books(NamedTuple):
    """What is done. `levels`: of each delay level its runs, as (first queue offset, cursor), ascending. `half_offset`,
    `op_offset`: what is below has ended. `forced`: physical offsets of records that stay whatever they are, ascending.
    `anchors`: of each queue of the schedule topic its last record's physical offset, to stay if anything of the queue
    does; so that the queue ends where it did. `withdrawn`: physical offsets of cancelled level messages."""

    checkpoint: Checkpoint
    levels: dict[int, list[tuple[int, int]]]
    timers: Timers | None
    half_offset: int
    op_offset: int
    forced: Integers
    anchors: dict[int, int]
    withdrawn: Integers


class Rules(NamedTuple):
    """What the tasks need of them; small. `timers_enqueued`: None where there is no timer log to go by."""

    levels: dict[int, list[tuple[int, int]]]
    timers_enqueued: int | None
    half_offset: int
    op_offset: int
    expired_before: int
    """Records of messages before this physical offset have expired."""


def read_books(store: StoreFiles) -> Books:
    """The books of a store at rest. Raises JobError where they are of a kind that is not understood."""
    files = OsFiles()
    root = store.local_path
    found = checkpoint.load(files, os.path.join(root, "checkpoint"))
    if store.written_by != "duemq":
        found.is_foreign, found.notes = True, {}
    queues: dict[tuple[str, int], list[QueueFile]] = {}
    for file in store.queue_files():
        queues.setdefault((file.topic, file.queue_id), []).append(file)
    timers = _timers(store, found)
    forced: list[int] = []
    timer_files_of_queue = queues.get((TIMER_TOPIC, 0), [])
    if timer_files_of_queue:
        last = _last_unit(store, timer_files_of_queue)
        forced += [last] if last >= 0 else []
        if timers is not None and timers.enqueued > 0:
            unit = store.unit(TIMER_TOPIC, 0, timers.enqueued - 1)
            forced += [unit[0]] if unit is not None else []
    anchors = {}
    withdrawn = []
    for (topic, queue_id), mine in queues.items():
        if topic != SCHEDULE_TOPIC:
            continue
        last = _last_unit(store, mine)
        if last >= 0:
            anchors[queue_id] = last
        for file in mine:
            units = store.units(file)
            cancelled = units["size"] == WITHDRAWN_SIZE
            if cancelled.any():
                withdrawn.append(units["physical_offset"][cancelled].astype(np.int64))
    half, op = _transactions(store)
    return Books(
        found,
        _levels(store, found),
        timers,
        half,
        op,
        np.unique(np.array(forced, np.int64)),
        anchors,
        np.unique(np.concatenate([np.empty(0, np.int64), *withdrawn])),
    )


def _last_unit(store: StoreFiles, files: list[QueueFile]) -> int:
    """The physical offset in a queue's last unit; -1 where that stands for no record."""
    for file in reversed(files):
        units = store.units(file)
        if len(units):
            # Of a size that no record has: the unit was withdrawn, or fills the queue up to its first message.
            is_record = WITHDRAWN_SIZE < units["size"][-1] < PADDING_SIZE
            return int(units["physical_offset"][-1]) if is_record else -1
    return -1


def _levels(store: StoreFiles, found: Checkpoint) -> dict[int, list[tuple[int, int]]]:
    note = runs.decode(found.notes.get("levels", b"")) if not found.is_foreign else None
    if note is not None:
        return {level: sorted((run.start, run.cursor) for run in of_level) for level, of_level in note.runs.items()}
    table = (store.json("config/delayOffset.json") or {}).get("offsetTable")
    if not isinstance(table, dict):
        return {}
    return {
        int(level): [(0, int(offset))]
        for level, offset in table.items()
        if str(level).isdecimal() and str(offset).isdecimal()
    }


def _transactions(store: StoreFiles) -> tuple[int, int]:
    table = (store.json("config/consumerOffset.json") or {}).get("offsetTable")
    offsets = []
    for topic in (HALF_TOPIC, OP_TOPIC):
        of_group = table.get(f"{topic}@{_TRANSACTIONS_GROUP}") if isinstance(table, dict) else None
        value = next((v for k, v in of_group.items() if str(k) == "0"), 0) if isinstance(of_group, dict) else 0
        offsets.append(int(value) if isinstance(value, int) else 0)
    # Op messages say which half messages have ended: without the offset of the one the other is worth nothing.
    return (offsets[0], offsets[1]) if min(offsets) > 0 else (0, 0)


def _timers(store: StoreFiles, found: Checkpoint) -> Timers | None:
    names = store.sizes("timerlog")
    check = timer_files.load_check(OsFiles(), os.path.join(store.local_path, "config/timercheck"))
    note = timer_files.decode_note(found.notes.get("timers", b"")) if not found.is_foreign else None
    names = [(name, size) for name, size in names if size]
    if not names or (check is None and note is None):
        return None
    segment_size = names[0][1]
    superseded = positions_of(note.superseded if note is not None else b"")
    parts = []
    for name, size in names:
        if size != segment_size:
            raise JobError(f"{store.path}/timerlog/{name}: has {size} bytes, the first file has {segment_size}")
        # The note tells of some that their messages got others; the files may not say so yet.
        parts.append(marked(int(name), _units_of_log(store, name, size), superseded))
    units = np.concatenate(parts)
    if note is not None:
        enqueued, second = note.queue_offset, note.second
    else:
        assert check is not None
        enqueued, second = _behind_last(store, units, check), check.read_ms // 1000
    live = units[(seconds_of(units) >= second) & (units["magic"] & WITHDRAWN == 0)]
    if note is not None:
        # A message that got a later slot has a unit behind the one in its old slot. Marks of ours have done their work.
        live = live[live["magic"] & DELETE == 0]
        _, last = np.unique(live["physical_offset"][::-1], return_index=True)
        live = live[np.sort(len(live) - 1 - last)]
    return Timers(enqueued, second, live, check, note, segment_size)


def _behind_last(store: StoreFiles, units: NDArray[Any], check: timer_files.TimerCheck) -> int:
    """Where Apache's broker goes on in the timer topic's queue: behind the message that the log's last unit is of."""
    physical = int(units["physical_offset"][-1]) if len(units) else -1
    segment = store.segment_of(physical)
    if segment is not None:
        queue_offset, stored = _OFFSETS.unpack(store.read(segment.path, physical - segment.first_offset + 20, 16))
        if stored == physical:
            return min(int(queue_offset) + 1, check.master_queue_offset)
    return check.queue_offset


def _units_of_log(store: StoreFiles, name: str, size: int) -> NDArray[Any]:
    """The units of one file of the timer log, up to its end marker or the first that is none."""
    data = store.read_whole(f"timerlog/{name}") or b""
    units = np.frombuffer(data, UNIT, len(data) // UNIT_SIZE)
    good = (units["size"] == UNIT_SIZE) & (units["magic"] >= 0) & (units["magic"] < 16)
    return units if good.all() else units[: int(np.argmin(good))]


def leave_for_tasks(books: Books, scratch: str) -> None:
    """Leave the arrays for the tasks."""
    save(scratch, "forced", books.forced)
    save(scratch, "withdrawn.units", books.withdrawn)
    live = books.timers.live if books.timers is not None else np.empty(0, UNIT)
    save(scratch, "live", np.unique(live["physical_offset"].astype(np.int64)))


def is_past(levels: dict[int, list[tuple[int, int]]], level: int, queue_offsets: Integers) -> NDArray[np.bool_]:
    """Of queue offsets of a level, whether its cursors are behind them: delivered, or given up."""
    of_level = levels.get(level)
    if not of_level:
        return np.zeros(len(queue_offsets), np.bool_)
    starts = np.array([start for start, _ in of_level], np.int64)
    cursors = np.array([cursor for _, cursor in of_level], np.int64)
    run = np.searchsorted(starts, queue_offsets, "right") - 1
    # Before the first run everything is done: a run goes when all of it is delivered.
    return np.where(run < 0, True, queue_offsets < cursors[np.maximum(run, 0)])
