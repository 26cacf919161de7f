"""How far a broker is with the messages that wait, as its own files say.

duemq      the checkpoint's notes (`scheduler.runs`, `scheduler.timer_files`): exact as of the recovery offset; what
           was delivered since, the records behind that offset say
RocketMQ   config/delayOffset.json, each level's next queue offset; config/timercheck, the time up to which slots
           of the wheel are done. Both are written every second or ten: after a kill -9 they are behind
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

import numpy as np

from protocol.timer_properties import PRECISION_MS
from scheduler import runs, timer_files
from scheduler.delay_levels import DelayLevels
from scheduler.runs import Run
from scheduler.timer_log import APPLIED, DELETE, MAX_DUE_MS, NO_MESSAGE, ROLL, UNIT_SIZE, WITHDRAWN, seconds_of
from scheduler.timer_log import UNIT as TIMER_UNIT
from scheduler.timer_superseded import marked, positions_of
from spark_jobs.ranges import at_offsets, plan, walks
from spark_jobs.roles import NO_ORIGIN, SCHEDULE_TOPIC, TIMER_TOPIC, Roles
from storage import checkpoint
from storage.files import Files

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from spark_jobs.store_files import StoreFiles

    Integers = NDArray[np.int64]

_TIMER_BLANK_SIZE: Final = 16
_WITHDRAWN_SIZE: Final = 1
_CHECK: Final = struct.Struct(">7q")
_SCAN_UNITS: Final = 1 << 18
_NONE: Final = np.empty(0, np.int64)


class Progress(NamedTuple):
    """Small enough to go to every task. Times are ms since the epoch, seconds since the epoch."""

    levels: dict[int, list[Run]]
    """Of each level the runs of its queue; within a run what lies before the cursor is done."""
    timer_second: int
    """Messages in slots before this one are done."""
    timer_queue_offset: int
    """Messages of the timer topic from this queue offset on are not in the timer log."""
    delays_ms: list[int]
    """The delays of the levels, from level 1 on."""
    since: int
    """Records from this physical offset on may say that more is done than this."""
    held: Integers
    """Physical offsets, ascending, of messages that wait in a later slot than their record says: what was left of a
    second, or what a topic's policy holds."""

    def is_timer_done(self, slot: Integers, queue_offset: Integers, physical_offset: Integers) -> NDArray[np.bool_]:
        """Whether the wheel has passed messages, by the slot that their records say."""
        passed = (slot < self.timer_second) & (queue_offset < self.timer_queue_offset)
        if len(self.held) and passed.any():
            passed &= ~np.isin(physical_offset, self.held)
        return passed

    def is_level_done(self, level: Integers, queue_offset: Integers) -> NDArray[np.bool_]:
        """Whether the levels' cursors have passed messages at queue offsets."""
        done = np.zeros(len(level), np.bool_)
        for number, parts in self.levels.items():
            mine = level == number
            if not mine.any():
                continue
            starts = np.array([run.start for run in parts], np.int64)
            cursors = np.array([run.cursor for run in parts], np.int64)
            run = np.maximum(np.searchsorted(starts, queue_offset[mine], "right") - 1, 0)
            done[mine] = queue_offset[mine] < cursors[run]
        return done


def read_progress(store: StoreFiles, delay_levels: str | None = None) -> Progress:
    """The progress of a store. `delay_levels`: the broker's messageDelayLevel, by default told by the store itself.

    Raises ValueError for a table that is none."""
    known = checkpoint.load(cast(Files, store), "checkpoint")
    is_ours = store.written_by == "duemq"
    delays = _delays(store, delay_levels)
    levels = None
    second, queue_offset = 0, 0
    since = store.readable_end
    if is_ours and known.recovery_offset is not None:
        since = min(known.recovery_offset, since)
        level_note = runs.decode(known.notes.get("levels", b""))
        levels = level_note.runs if level_note is not None else None
        timer_note = timer_files.decode_note(known.notes.get("timers", b""))
        if timer_note is not None:
            second, queue_offset = timer_note.second, timer_note.queue_offset
            since = min(since, timer_note.since)
    if levels is None:
        levels = _levels_of_table(store)
    if not second:
        second, queue_offset = _timercheck(store)
    return Progress(levels, second, queue_offset, delays, since, _held(store, second) if is_ours else _NONE)


def _held(store: StoreFiles, second: int) -> Integers:
    found = [_NONE]
    for _, units in timer_units(store):
        waits = (seconds_of(units) >= second) & (units["magic"] & NO_MESSAGE == 0) & (units["due_ms"] != APPLIED)
        # A time that a policy chose says nothing of the record's own slot.
        early = (_due_ms(units) - 1) // PRECISION_MS < second
        found.append(units["physical_offset"][waits & (early | (units["due_ms"] < 0))].astype(np.int64))
    return np.unique(np.concatenate(found))


def _due_ms(units: Any) -> Integers:
    """The exact deliver times in units of duemq's, 0 in RocketMQ's (see `scheduler.timer_log`)."""
    due: Integers = np.abs(units["due_ms"].astype(np.int64)) & MAX_DUE_MS
    return due


def _levels_of_table(store: StoreFiles) -> dict[int, list[Run]]:
    table = (store.json("config/delayOffset.json") or {}).get("offsetTable") or {}
    return {int(level): [Run(0, int(offset))] for level, offset in table.items()}


def _timercheck(store: StoreFiles) -> tuple[int, int]:
    data = store.read_whole("config/timercheck")
    if data is None or len(data) < _CHECK.size:
        return 0, 0
    read_ms, _, queue_offset, *_ = _CHECK.unpack_from(data)
    return read_ms // 1000, queue_offset


def _delays(store: StoreFiles, delay_levels: str | None) -> list[int]:
    table = DelayLevels(delay_levels) if delay_levels is not None else DelayLevels()
    delays = [table.delay_ms(level) for level in range(1, table.maximum + 1)]
    if delay_levels is not None:
        return delays
    # RocketMQ's consume queue has the deliver time of each message of a level: that tells the table that was used.
    for file in store.queue_files():
        if file.topic != SCHEDULE_TOPIC:
            continue
        units = store.units(file)
        units = units[units["size"] > _WITHDRAWN_SIZE][-1:]
        for records in at_offsets(store, units["physical_offset"].astype(np.int64), units["size"].astype(np.int64)):
            delay = int(units["tags_code"][0]) - int(records.store_ms[0])
            if records.prepared_offset[0] or delay < 0:
                continue
            while len(delays) <= file.queue_id:
                delays.append(delays[-1])
            delays[file.queue_id] = delay
    return delays


class Waiting(NamedTuple):
    """Messages that wait: where their records lie, ascending, and how many bytes they have."""

    offsets: Integers
    sizes: Integers


def waiting(store: StoreFiles, progress: Progress) -> Waiting:
    """The messages that a broker that opens the store would still deliver. Takes 16 bytes of memory for each."""
    offsets, sizes = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for found in (*_waiting_levels(store, progress), *_waiting_timers(store, progress)):
        offsets.append(found.offsets)
        sizes.append(found.sizes)
    all_offsets, first = np.unique(np.concatenate(offsets), return_index=True)
    all_sizes = np.concatenate(sizes)[first]
    done = _done_since(store, progress)
    keep = ~np.isin(all_offsets, done) & (all_sizes > _WITHDRAWN_SIZE) & (all_offsets < store.readable_end)
    return Waiting(all_offsets[keep], all_sizes[keep])


def _waiting_levels(store: StoreFiles, progress: Progress) -> list[Waiting]:
    found = []
    for file in store.queue_files():
        if file.topic != SCHEDULE_TOPIC:
            continue
        units = store.units(file)
        number = np.arange(len(units), dtype=np.int64) + file.first_unit
        level = np.full(len(units), file.queue_id + 1, np.int64)
        left = units[~progress.is_level_done(level, number) & (units["size"] != 0x7FFFFFFF)]
        found.append(Waiting(left["physical_offset"].astype(np.int64), left["size"].astype(np.int64)))
    return found


def _waiting_timers(store: StoreFiles, progress: Progress) -> list[Waiting]:
    offsets, sizes, deletes = [], [], []
    for _, units in timer_units(store):
        due = seconds_of(units) >= progress.timer_second
        is_message = units["magic"] & NO_MESSAGE == 0
        # The last unit of a log that duemq wrote for RocketMQ's sake stands for no message.
        mine = units[due & is_message & (units["due_ms"] != APPLIED)]
        offsets.append(mine["physical_offset"].astype(np.int64))
        sizes.append(mine["record_size"].astype(np.int64))
        # Of ours they have done what they are for, or mark a unit whose message got another one.
        marks = units[due & (units["magic"] & NO_MESSAGE == DELETE)]
        deletes.append(Waiting(marks["physical_offset"].astype(np.int64), marks["record_size"].astype(np.int64)))
    found = [Waiting(a, b) for a, b in zip(offsets, sizes, strict=True)]
    for file in store.queue_files():
        if file.topic == TIMER_TOPIC and file.queue_id == 0:
            units = store.units(file)
            number = np.arange(len(units)) + file.first_unit
            units = units[(number >= progress.timer_queue_offset) & (units["size"] != 0x7FFFFFFF)]
            found.append(Waiting(units["physical_offset"].astype(np.int64), units["size"].astype(np.int64)))
    cancelled = _cancelled(store, found, deletes)
    if len(cancelled):
        found = [Waiting(w.offsets[keep], w.sizes[keep]) for w in found for keep in [~np.isin(w.offsets, cancelled)]]
    return found


def _cancelled(store: StoreFiles, found: list[Waiting], deletes: list[Waiting]) -> Integers:
    """Messages of RocketMQ's wheel that a deleting unit of their slot takes back when its time comes, and the records
    that ask for it: by topic and unique key."""
    marks = [w for w in deletes if len(w.offsets)]
    if not marks:
        return np.empty(0, np.int64)
    keys: set[str] = set()
    asked = []
    for mark in marks:
        order = np.argsort(mark.offsets)
        for records in at_offsets(store, mark.offsets[order], mark.sizes[order]):
            keys.update(key for key in records.property_strings("TIMER_DEL_UNIQKEY").to_pylist() if key)
            asked.append(records.physical_offset)
    gone = list(asked)
    for part in found:
        order = np.argsort(part.offsets)
        for records in at_offsets(store, part.offsets[order], part.sizes[order]):
            topics = records.property_strings("REAL_TOPIC").to_pylist()
            uniques = records.property_strings("UNIQ_KEY").to_pylist()
            named = [f"{t}+{u}" in keys or u in keys for t, u in zip(topics, uniques, strict=True)]
            gone.append(records.physical_offset[np.array(named, np.bool_)])
    return np.unique(np.concatenate(gone)) if gone else np.empty(0, np.int64)


def _done_since(store: StoreFiles, progress: Progress) -> Integers:
    """Origins that the records behind the progress name: delivered, cancelled, or waiting on in another record."""
    done = [np.empty(0, np.int64)]
    if progress.since < store.readable_end and store.written_by == "duemq":
        for part in plan(store, start=progress.since):
            for found in walks(store, part, check_crc=False):
                origin = Roles(found.records).origin
                done.append(origin[origin != NO_ORIGIN])
    return np.unique(np.concatenate(done))


def timer_columns(units: Any, position: int) -> dict[str, Any]:
    """The columns of the table `timers` for units that lie one after the other from a position on."""
    magic = units["magic"]
    return {
        "position": position + np.arange(len(units), dtype=np.int64) * UNIT_SIZE,
        "previous": units["previous"].astype(np.int64),
        "magic": magic.astype(np.int32),
        "is_rolled": magic & ROLL != 0,
        "is_delete": magic & DELETE != 0,
        "is_withdrawn": magic & WITHDRAWN != 0,
        "write_ms": units["write_ms"].astype(np.int64),
        "slot_ms": seconds_of(units) * 1000,
        "due_ms": np.where(units["due_ms"] == APPLIED, 0, _due_ms(units)),
        "physical_offset": units["physical_offset"].astype(np.int64),
        "record_size": units["record_size"].astype(np.int32),
        "topic_hash": units["topic_hash"].astype(np.int32),
    }


def timer_units(store: StoreFiles) -> Iterator[tuple[int, Any]]:
    """The units of the timer log, in order, a part at a time, as `scheduler.timer_log.UNIT`, and their position. Those
    whose messages got others are marked, as the checkpoint says, also where the files do not say so yet."""
    known = checkpoint.load(cast(Files, store), "checkpoint")
    note = timer_files.decode_note(known.notes.get("timers", b"")) if store.written_by == "duemq" else None
    superseded = positions_of(note.superseded if note is not None else b"")
    for name, size in store.sizes("timerlog"):
        if not name.isdecimal():
            continue
        room = (size - UNIT_SIZE - _TIMER_BLANK_SIZE) // UNIT_SIZE * UNIT_SIZE + UNIT_SIZE
        for at in range(0, room, _SCAN_UNITS * UNIT_SIZE):
            data = store.read(f"timerlog/{name}", at, min(_SCAN_UNITS * UNIT_SIZE, room - at))
            units = np.frombuffer(data, TIMER_UNIT, len(data) // UNIT_SIZE)
            wrong = np.flatnonzero(units["size"] != UNIT_SIZE)
            if len(wrong):
                units = units[: wrong[0]]
            if len(units):
                yield int(name) + at, marked(int(name) + at, units, superseded)
            if len(wrong):
                break
