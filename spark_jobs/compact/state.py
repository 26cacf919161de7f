"""The messages that are done by a store's own files of progress: the scheduled messages that were delivered or
cancelled, and the half messages that have ended.

    delay levels   if duemq had the store last: the checkpoint's note "levels" (a cursor for each run,
                   `scheduler.levels.runs`); if Apache's broker: config/delayOffset.json. And units of size 1 in
                   SCHEDULE_TOPIC_XXXX: withdrawn
    timers         the timer log: a message in the wheel has a unit in a slot that is not past, and one that is not in
                   the wheel yet lies at or behind timercheck's (duemq's: the note's) queue offset
    transactions   half and op messages below the offsets of CID_RMQ_SYS_TRANS in config/consumerOffset.json

Also, a record that names an origin says that the origin is done, whatever these files say (`compact.scan` finds those).
Where a file is missing, only the messages named as origins count as done.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from duemq.protocol.records.record import MIN_SIZE
from duemq.protocol.topics import HALF_TOPIC, OP_HALF_TOPIC, SCHEDULE_TOPIC, TIMER_TOPIC
from duemq.scheduler import waiting
from duemq.scheduler.levels.runs import Run
from duemq.scheduler.timers.files import small_files
from duemq.scheduler.timers.files.unit import UNIT, UNIT_SIZE, seconds_of
from duemq.scheduler.timers.index.sorted_offsets import union
from duemq.spark_jobs.errors import JobError
from duemq.spark_jobs.store import progress
from duemq.spark_jobs.store.ranges import at_offsets
from duemq.spark_jobs.writers.spill import save
from duemq.storage import file_names
from duemq.storage.queues.consume_queue import MARK_SIZES, PADDING_SIZE, WITHDRAWN_SIZE

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from duemq.spark_jobs.store.store_files import QueueFile, StoreFiles
    from duemq.storage.durability.checkpoint import Checkpoint

    Integers = NDArray[np.int64]

_TRANSACTIONS_GROUP: Final = "CID_RMQ_SYS_TRANS"


class TimerProgress(NamedTuple):
    """The progress of the timers, and the messages that wait in the wheel. `enqueued`: queue offset in
    rmq_sys_wheel_timer up to which messages are in the wheel. `second`: slots before it are past. `live`: the units
    (UNIT) that are still to be done, in the log's order. `check`, `note`: timercheck and the checkpoint's note;
    `segment_size`: that of the timer log's files."""

    enqueued: int
    second: int
    live: NDArray[Any]
    check: small_files.TimerCheck | None
    note: small_files.TimerNote | None
    segment_size: int


class StoreState(NamedTuple):
    """The messages of a store that are done. `levels`: the runs of each delay level. `half_offset`, `op_offset`:
    messages below have ended. `forced`: physical offsets, ascending, of records that must stay. `anchors`: the physical
    offset of the last record of each queue of the schedule topic, which stays if anything of the queue does, so that
    the queue ends where it did. `withdrawn`: physical offsets of withdrawn level messages; `level_delivered`: of
    delivered ones that no cursor has passed."""

    checkpoint: Checkpoint
    levels: dict[int, list[Run]]
    timers: TimerProgress | None
    half_offset: int
    op_offset: int
    forced: Integers
    anchors: dict[int, int]
    withdrawn: Integers
    level_delivered: Integers


class DoneRules(NamedTuple):
    """The part of `StoreState` that each task gets; small. `timers_enqueued`: None where no timer log can be used."""

    levels: dict[int, list[Run]]
    timers_enqueued: int | None
    half_offset: int
    op_offset: int
    expired_before: int
    """Records of messages before this physical offset have expired."""


def read_store_state(store: StoreFiles) -> StoreState:
    """Read the progress of a store at rest. Raises JobError if the files of the timer log differ in size."""
    files = progress.read_progress_files(store)
    queues: dict[tuple[str, int], list[QueueFile]] = {}
    for file in store.queue_files():
        queues.setdefault((file.topic, file.queue_id), []).append(file)
    timers = _timers(store, files)
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
    return StoreState(
        files.checkpoint,
        files.levels,
        timers,
        half,
        op,
        np.unique(np.array(forced, np.int64)),
        anchors,
        union(withdrawn),
        files.level_delivered,
    )


def _last_unit(store: StoreFiles, files: list[QueueFile]) -> int:
    """Return the physical offset in a queue's last unit; -1 where that stands for no record."""
    for file in reversed(files):
        units = store.units(file)
        if not len(units):
            continue
        physical, size = int(units["physical_offset"][-1]), int(units["size"][-1])
        if size in MARK_SIZES:
            size = _size_at(store, physical)
        if size == PADDING_SIZE or not size:
            return -1
        for records in at_offsets(store, np.array([physical], np.int64), np.array([size], np.int64)):
            queue = records.topics()[1][0], int(records.queue_id[0]), int(records.queue_offset[0])
            if queue == (file.topic, file.queue_id, file.first_unit + len(units) - 1):
                return physical
        return -1
    return -1


def _size_at(store: StoreFiles, physical: int) -> int:
    """Return the size that the record at a physical offset states; 0 where there is none. A marked unit does not tell
    it."""
    segment = store.segment_of(physical)
    data = store.read(segment.path, physical - segment.first_offset, 4) if segment is not None else b""
    size = int.from_bytes(data, "big", signed=True)
    return size if segment is not None and MIN_SIZE <= size <= segment.end - physical else 0


def _transactions(store: StoreFiles) -> tuple[int, int]:
    table = store.table(file_names.CONSUMER_OFFSETS, "offsetTable")
    offsets = []
    for topic in (HALF_TOPIC, OP_HALF_TOPIC):
        of_group = table.get(f"{topic}@{_TRANSACTIONS_GROUP}")
        value = next((v for k, v in of_group.items() if str(k) == "0"), 0) if isinstance(of_group, dict) else 0
        offsets.append(int(value) if isinstance(value, int) else 0)
    # Op messages tell which half messages have ended: either offset is useless without the other.
    return (offsets[0], offsets[1]) if min(offsets) > 0 else (0, 0)


def _timers(store: StoreFiles, files: progress.ProgressFiles) -> TimerProgress | None:
    names = [(name, size) for name, size in store.sizes(file_names.TIMER_LOG) if size]
    if not names or not files.has_log or (files.check is None and files.note is None):
        return None
    segment_size = names[0][1]
    for name, size in names:
        if size != segment_size:
            raise JobError(
                f"{store.path}/{file_names.TIMER_LOG}/{name}: has {size} bytes, the first file has {segment_size}"
            )
    note, second, found = files.note, files.second, small_files.StartFacts()
    log_end = progress.EVERYTHING
    if note is not None:
        log_end = note.log_end
        since_turn = progress.timer_units(store, note.log_since, log_end)
        found = waiting.with_moved(note.found, second, note.found, since_turn)
    parts = [np.empty(0, UNIT)]
    for position, units in progress.timer_units(store, 0, log_end):
        seconds = seconds_of(units)
        positions = position + np.arange(len(units)) * UNIT_SIZE
        physical = units["physical_offset"].astype(np.int64)
        live = (seconds >= second) & waiting.left_of(
            physical,
            positions,
            units["magic"],
            units["due_ms"].astype(np.int64),
            seconds,
            noted=second,
            found=found,
        ).kept
        if note is not None:
            live &= waiting.is_live(units, seconds, second)  # duemq's marks for deletions have done their work
        parts.append(units[live])
    return TimerProgress(files.queue_offset, second, np.concatenate(parts), files.check, note, segment_size)


def compacted_to(store: StoreFiles) -> int:
    """Return the physical offset where the log of a store ended when a compaction made it; 0 if none did. RocketMQ's
    deliveries before it do not tell that their messages were removed."""
    end = (store.json(file_names.COMPACTED) or {}).get("end")
    return end if isinstance(end, int) else 0


def leave_for_tasks(found: StoreState, scratch: str) -> None:
    """Save the arrays for the tasks."""
    save(scratch, "forced", found.forced)
    save(scratch, "withdrawn.units", found.withdrawn)
    save(scratch, "delivered.known", found.level_delivered)
    live = found.timers.live if found.timers is not None else np.empty(0, UNIT)
    save(scratch, "live", np.unique(live["physical_offset"].astype(np.int64)))
