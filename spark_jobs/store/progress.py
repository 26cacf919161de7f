"""A broker's progress with waiting messages, from its own files. `scheduler.waiting` decides what waits, as it does for
a broker that starts.

duemq      the checkpoint's notes (`scheduler.levels.runs`, `scheduler.timers.files.small_files`): exact as of the
           recovery offset; the records behind that offset show what was delivered since. If the note of the timers is
           missing, or the timer log differs from the note, all records are read
RocketMQ   config/delayOffset.json, each level's next queue offset; config/timercheck, the time up to which slots
           of the wheel are done. The former is written every ten seconds, the latter every second: after a kill -9
           they are behind
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

import numpy as np

from duemq.protocol.records.timer_properties import PRECISION_MS, deleted_key
from duemq.protocol.topics import SCHEDULE_TOPIC, TIMER_TOPIC
from duemq.scheduler import waiting as waits
from duemq.scheduler.levels import runs, service
from duemq.scheduler.levels.runs import Run
from duemq.scheduler.levels.table import DelayLevels
from duemq.scheduler.timers.files import small_files
from duemq.scheduler.timers.files.log import BLANK_SIZE
from duemq.scheduler.timers.files.small_files import StartFacts, TimerCheck, TimerNote
from duemq.scheduler.timers.files.sums import is_superseded
from duemq.scheduler.timers.files.superseded import marked, positions_of
from duemq.scheduler.timers.files.unit import (
    ANY_MAGIC,
    APPLIED,
    DELETE,
    MAX_DUE_MS,
    ROLL,
    UNIT_SIZE,
    WITHDRAWN,
    seconds_of,
)
from duemq.scheduler.timers.files.unit import UNIT as TIMER_UNIT
from duemq.scheduler.timers.index.sorted_offsets import is_among, union
from duemq.spark_jobs.store.ranges import at_offsets, plan
from duemq.spark_jobs.store.roles import CANCEL, DELIVERY, LEVEL, TIMER, Roles
from duemq.spark_jobs.store.walks import walks
from duemq.storage import file_names
from duemq.storage.durability import checkpoint
from duemq.storage.durability.checkpoint import Checkpoint
from duemq.storage.files import Files
from duemq.storage.log.origins import NO_ORIGIN

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from duemq.spark_jobs.columns.records import Records
    from duemq.spark_jobs.store.store_files import QueueFile, StoreFiles

    Integers = NDArray[np.int64]
    Mask = NDArray[np.bool_]

_LOOKED_AT: Final = 8
"""Number of units of a level that are read together if some of their records may be damaged."""
_SAMPLES: Final = 3
"""Number of messages of a level whose delays are compared."""
_FIRST_UNITS: Final = 1 << 12
_SCAN_UNITS: Final = 1 << 18
"""Most units of the timer log that are read at once. The first read is shorter, since of RocketMQ's files, which have
100 MB from the start, usually only the beginning is written."""
_NONE: Final = np.empty(0, np.int64)
EVERYTHING: Final = 2**62


class Progress(NamedTuple):
    """The progress of a broker, small enough to be sent to every task. Queue offsets, physical offsets, and seconds
    since the epoch."""

    levels: dict[int, list[Run]]
    """The runs of each level's queue; within a run, messages before the cursor are done."""
    timer_second: int
    """Messages in slots before this second (since the epoch) are done."""
    timer_queue_offset: int
    """Messages of the timer topic from this queue offset on are not in the timer log."""
    delays_ms: list[int]
    """The delays of the levels, ms, from level 1 on."""
    held: Integers
    """Physical offsets, ascending, of messages that may wait in a later slot than their record says: the rest of a
    second whose turn has begun, and messages held by a topic's policy."""

    def is_timer_done(self, slot: Integers, queue_offset: Integers, physical_offset: Integers) -> Mask:
        """Return whether the wheel has passed messages, by the slots that their records say."""
        passed = (slot < self.timer_second) & (queue_offset < self.timer_queue_offset)
        if len(self.held) and passed.any():
            passed &= ~is_among(physical_offset, self.held)
        return passed

    def is_level_done(self, level: Integers, queue_offset: Integers) -> Mask:
        """Return whether the levels' cursors have passed messages at queue offsets."""
        done = np.zeros(len(level), np.bool_)
        for number, parts in self.levels.items():
            mine = level == number
            if mine.any():
                done[mine] = waits.is_passed(parts, queue_offset[mine])
        return done


class ProgressFiles(NamedTuple):
    """The contents of the files by which a broker that opens the store would decide what waits."""

    checkpoint: Checkpoint
    """Without notes where RocketMQ's broker had the store last."""
    levels: dict[int, list[Run]]
    level_delivered: Integers
    """Physical offsets of messages of levels that were delivered, though no cursor has passed them."""
    note: TimerNote | None
    check: TimerCheck | None
    has_log: bool
    """Whether the timer log can be used. If not, messages of the timer topic wait unless records say otherwise."""
    second: int
    """Slots before this second (since the epoch) are past."""
    queue_offset: int
    """Messages of the timer topic from this queue offset on are not in the timer log."""
    queues_to: int
    """The physical offset up to which the consume queues' files can be relied on."""
    since: int
    """The physical offset from which on records may say that more is done than these files do."""


def read_progress_files(store: StoreFiles) -> ProgressFiles:
    """Read the files of a store's progress. Raises OSError."""
    known = checkpoint.load(cast(Files, store), file_names.CHECKPOINT)
    check = small_files.load_check(cast(Files, store), file_names.TIMER_CHECK)
    begin = store.segments[0].first_offset
    since = end = store.readable_end
    if store.written_by != "duemq":
        known.is_foreign, known.notes = True, {}
        second = queue_offset = 0
        has_log = check is not None and _is_covering(store, check)
        if check is not None and has_log:
            second, queue_offset = waits.second_of(check), waits.enqueued_to(check, behind_last(store))
        elif any(file.topic == TIMER_TOPIC for file in store.queue_files()):
            since = begin  # then only records that name their origins show what is done
        levels = waits.runs_of_table(_offset_table(store))
        return ProgressFiles(known, levels, _NONE, None, check, has_log, second, queue_offset, EVERYTHING, since)
    level_note = runs.decode(known.notes.get("levels", b""))
    levels, delivered = waits.runs_of_table(_offset_table(store)), _NONE
    if level_note is not None:
        levels, delivered = level_note.runs, union([level_note.delivered])
    recovery = known.recovery_offset
    is_whole = recovery is not None and not known.notes.keys() & {checkpoint.REBUILDING, checkpoint.REMAKING}
    queues_to = min(recovery, end) if recovery is not None and is_whole else begin
    note = small_files.decode_note(known.notes.get("timers", b""))
    if note is None or recovery is None or not _is_as_noted(store, note, recovery):
        return ProgressFiles(
            known,
            levels,
            delivered,
            None,
            check,
            has_log=False,
            second=0,
            queue_offset=0,
            queues_to=queues_to,
            since=begin,
        )
    since = min(note.since, queues_to)
    return ProgressFiles(known, levels, delivered, note, check, True, note.second, note.queue_offset, queues_to, since)


def _is_covering(store: StoreFiles, check: TimerCheck) -> bool:
    """Return whether the timer log has everything that RocketMQ's broker had put into it."""
    end, second, links = 0, waits.second_of(check), []
    for position, units in timer_units(store):
        end = position + len(units) * UNIT_SIZE
        links.append(waits.first_link(units, seconds_of(units), second))
    begin, size = next(iter(_timer_files(store)), (0, 1))
    return waits.is_covering(check, begin, end, size, links)


def _is_as_noted(store: StoreFiles, note: TimerNote, recovery: int) -> bool:
    """Return whether the timer log is the one that the note describes."""
    files = _timer_files(store)
    size = files[0][1] if files else 0
    begin, end = (files[0][0], files[-1][0] + size) if files else (0, 0)
    if not waits.is_covered(note, begin, end):
        return False
    if note.sums is None or store.is_running:  # a running broker has compared them, and continues to write
        return True
    withdrawn = union([_read_outcomes(store, min(recovery, store.readable_end)).withdrawn])
    check = waits.LogCheck(size or 1, note.sums.log, withdrawn)
    for position, units in timer_units(store, min(note.sums.log, default=0), note.log_end):
        check.add(position, units)
    return check.trouble is None


def read_progress(store: StoreFiles, delay_levels: str | None = None) -> Progress:
    """Read the progress of a store. `delay_levels`: the broker's messageDelayLevel; without it, the delays are those
    that the store itself shows, or else RocketMQ's defaults.

    Raises ValueError for a wrong table."""
    delays = _delays(store, delay_levels)
    files = read_progress_files(store)
    return Progress(files.levels, files.second, files.queue_offset, delays, _in_later_slots(store, files))


def _in_later_slots(store: StoreFiles, files: ProgressFiles) -> Integers:
    found = [_NONE]
    if files.note is not None:
        for _, units in timer_units(store, 0, files.note.log_end):
            live = waits.is_live(units, seconds_of(units), files.second)
            # Where a policy, or a topic's pause, chose the time, the unit does not tell the slot that the record says.
            due_second = (_due_ms(units) - 1) // PRECISION_MS
            is_chosen = (units["due_ms"] < 0) | (due_second <= files.note.policy_end)
            found.append(units["physical_offset"][live & (is_chosen | (due_second < files.second))].astype(np.int64))
    elif files.has_log:
        # RocketMQ puts no message into a later slot, but duemq may have had the store before.
        for _, units in timer_units(store):
            seconds = seconds_of(units)
            is_later = waits.is_parked(units, seconds) | (units["due_ms"] < 0)
            at = waits.is_live(units, seconds, files.second) & is_later
            found.append(units["physical_offset"][at].astype(np.int64))
    return union(found)


def _due_ms(units: Any) -> Integers:
    """Return the exact deliver times in duemq's units, 0 in RocketMQ's (see `scheduler.timers.files.log`)."""
    due: Integers = np.abs(units["due_ms"].astype(np.int64)) & MAX_DUE_MS
    return due


def _offset_table(store: StoreFiles) -> dict[int, int]:
    table = store.table(file_names.DELAY_OFFSETS, "offsetTable")
    return {int(level): int(at) for level, at in table.items() if str(level).isdecimal() and str(at).isdecimal()}


def behind_last(store: StoreFiles) -> int | None:
    """Return the queue offset behind the message of the timer log's last unit; None if the unit does not point to a
    readable message of the timer topic."""
    last = None
    for base, _ in reversed(_timer_files(store)):
        for _, units in timer_units(store, base):
            last = units[-1]
        if last is not None:
            break
    segment = store.segment_of(int(last["physical_offset"])) if last is not None else None
    if last is None or segment is None:
        return None
    physical, size = np.array([last["physical_offset"]], np.int64), np.array([last["record_size"]], np.int64)
    for records in at_offsets(store, physical, size):
        if records.topics()[1] == [TIMER_TOPIC] and records.physical_offset[0] == physical[0]:
            return int(records.queue_offset[0]) + 1
    return None


def _delays(store: StoreFiles, delay_levels: str | None) -> list[int]:
    table = DelayLevels(delay_levels) if delay_levels is not None else DelayLevels()
    delays = [table.delay_ms(level) for level in range(1, table.maximum + 1)]
    if delay_levels is not None:
        return delays
    for file in store.queue_files():
        if file.topic == SCHEDULE_TOPIC:
            delay = _delay_told(store, store.units(file))
            if delay is not None:
                delays += [delays[-1]] * (file.queue_id + 1 - len(delays))
                delays[file.queue_id] = delay
    return delays


def _delay_told(store: StoreFiles, units: Any) -> int | None:
    """Return the delay, ms, by the newest of RocketMQ's units of a level whose record can be read. RocketMQ's consume
    queue has each message's deliver time, and so shows which table was used. None if no unit shows it: duemq's records
    have the deliver time themselves.

    Reads only a few records, however many there are: those of one broker lie together, and a binary search finds where
    they begin."""
    units = units[waits.is_message(units["size"])]
    units = units[units["physical_offset"].astype(np.int64) >= store.segments[0].first_offset]
    size, end = 1, len(units)
    last: list[_Read] = []
    while end > 0 and not last:
        # From the end, in ever larger parts: usually the last record can be read.
        last = _read(store, units, max(0, end - size), end)
        size, end = size * 8, end - size
    if not last or last[-1].delay_ms is not None:
        return last[-1].delay_ms if last else None
    first = _read(store, units, 0, min(_LOOKED_AT, len(units)))
    if not first or first[0].delay_ms is None:
        return None
    low, high = first[0], last[-1].at
    while high - low.at > 1:
        middle = (low.at + high) // 2
        begin = max(low.at + 1, middle + 1 - _LOOKED_AT)
        found = _read(store, units, begin, middle + 1)
        if not found:
            high = begin
        elif found[-1].delay_ms is None:
            high = found[-1].at
        else:
            low = found[-1]
    return low.delay_ms


def known_delays(store: StoreFiles, delay_levels: str | None = None) -> dict[int, int]:
    """Return the delays of the store's levels, ms, where all messages of a level are known to have the same delay: from
    some messages of each, or else from the table. `delay_levels`: as for `read_progress`; without it, RocketMQ's
    default if duemq had the store last and noted that table."""
    table = _noted_table(store) if delay_levels is None else DelayLevels(delay_levels)
    units: dict[int, list[Any]] = {}
    for file in store.queue_files():
        if file.topic == SCHEDULE_TOPIC:
            units.setdefault(file.queue_id + 1, []).append(store.units(file))
    known = dict(enumerate(table.delays_ms, 1)) if table is not None else {}
    for level, parts in units.items():
        delays = _some_delays(store, np.concatenate(parts))
        if len(delays) == 1:
            known[level] = next(iter(delays))
        elif delays:
            known.pop(level, None)  # the table was another one before
    return known


def _noted_table(store: StoreFiles) -> DelayLevels | None:
    """Return the broker's table if it is known to be RocketMQ's default, else None: duemq notes only its checksum."""
    note = runs.decode(read_progress_files(store).checkpoint.notes.get(service.NAME, b""))
    table = DelayLevels()
    return table if note is not None and note.table_crc == runs.table_crc(table.text) else None


def _some_delays(store: StoreFiles, units: Any) -> set[int]:
    """Return the delays, ms, of a few sample records of a level, from the first to the last one."""
    units = units[waits.is_message(units["size"])]
    units = units[units["physical_offset"].astype(np.int64) >= store.segments[0].first_offset]
    delays = set()
    for at in np.unique(np.linspace(0, len(units) - 1, _SAMPLES).astype(int)).tolist() if len(units) else ():
        physical, size = (units[name][at : at + 1].astype(np.int64) for name in ("physical_offset", "size"))
        with suppress(OSError):  # a running broker may have removed the file
            for records in at_offsets(store, physical, size):
                promise = int(records.prepared_offset[0])
                delay = (promise or int(units["tags_code"][at])) - int(records.store_ms[0])
                delays.update([delay] if delay >= 0 else [])
    return delays


class _Read(NamedTuple):
    """A unit of a level whose record can be read: its index, and the delay that it shows, ms; None if the record is
    duemq's."""

    at: int
    delay_ms: int | None


def _read(store: StoreFiles, units: Any, begin: int, end: int) -> list[_Read]:
    """Return the units with indexes from `begin` to `end` that have a readable record, in order."""
    part = units[begin:end]
    order = np.argsort(part["physical_offset"], kind="stable")
    physical = part["physical_offset"][order].astype(np.int64)
    found = []
    for records in at_offsets(store, physical, part["size"][order].astype(np.int64)):
        at = order[np.searchsorted(physical, records.physical_offset)]
        delay = part["tags_code"].astype(np.int64)[at] - records.store_ms
        is_ours = records.prepared_offset != 0
        for i in np.flatnonzero(is_ours | (delay >= 0)).tolist():
            found.append(_Read(begin + int(at[i]), None if is_ours[i] else int(delay[i])))
    return sorted(found, key=lambda read: read.at)


# --- waiting messages


class WaitingRecords(NamedTuple):
    """Waiting messages: the physical offsets of their records, ascending, and their sizes in bytes."""

    offsets: Integers
    sizes: Integers


class _Outcomes(NamedTuple):
    """The outcomes in a range: the physical offsets of delivered and withdrawn messages, and scheduled messages."""

    delivered: Integers
    withdrawn: Integers
    newest_ms: int
    """The latest store time of a delivery."""
    levels: list[_Queued]
    timers: list[_Queued]


class _Queued(NamedTuple):
    """Messages in queues of the schedule topic or of the timer topic."""

    level: Integers
    queue_offset: Integers
    physical: Integers
    sizes: Integers


def waiting(store: StoreFiles) -> WaitingRecords:
    """Return the messages that a broker that opens the store would still deliver. Needs 16 bytes of memory for each."""
    found = _listed(store, read_progress_files(store))
    # Records that expired, or were lost with the end of the log, cannot be read.
    there = (found.offsets >= store.segments[0].first_offset) & (found.offsets < store.readable_end)
    return WaitingRecords(found.offsets[there], found.sizes[there])


def _listed(store: StoreFiles, files: ProgressFiles) -> WaitingRecords:
    """Return the messages that wait by the broker's files, wherever their records lie."""
    said = _read_outcomes(store, files.since)
    found = [*_waiting_levels(store, files, said), *_waiting_timers(store, files, said)]
    offsets, first = np.unique(np.concatenate([_NONE, *(each.offsets for each in found)]), return_index=True)
    return WaitingRecords(offsets, np.concatenate([_NONE, *(each.sizes for each in found)])[first])


DESTROYED: Final = np.dtype([("physical_offset", "<i8"), ("size", "<i4"), ("delay_level", "<i2"), ("due_ms", "<i8")])
"""A message whose record cannot be read. `delay_level`: 0 for a timer. `due_ms`: 0 where its queue does not tell."""
_LEAST_MS: Final = 10**11
"""A smaller tags code is not a deliver time but the hash of a tag, which RocketMQ has in the timer topic's queue."""


def destroyed(store: StoreFiles, stretches: Iterable[tuple[int, int]], since: int = 0) -> NDArray[Any]:
    """Return the messages (`DESTROYED`) that wait by the broker's queues, timer log and progress, and whose records lie
    in unreadable `stretches` of the commitlog, each from a physical offset to another, or in files before the first
    one. Also those that the queues list behind the last record, though no broker has the store open: some of these may
    have been delivered. `since`: a physical offset at which a record starts, the last one or one before it.

    Where the broker's files do not tell how far it is with a level, or with the timers, messages before the first file
    count as delivered: retention leaves such entries behind for all of them."""
    begin = store.segments[0].first_offset
    bounds = np.array(sorted([*stretches, *([(0, begin)] if begin else [])]), np.int64).reshape(-1, 2)
    gone = WaitingRecords(_NONE, _NONE)
    known, has_log = set[int](), True
    if len(bounds):
        files = read_progress_files(store)
        known, has_log = set(files.levels), files.has_log
        found = _listed(store, files)
        before = np.searchsorted(bounds[:, 0], found.offsets, "right") - 1
        inside = (before >= 0) & (found.offsets < np.maximum.accumulate(bounds[:, 1])[before])
        gone = WaitingRecords(found.offsets[inside], found.sizes[inside])
    end = store.records_end(since) if not store.is_running else EVERYTHING
    rows = [np.empty(0, DESTROYED)]
    for file in store.queue_files():
        if file.topic not in (SCHEDULE_TOPIC, TIMER_TOPIC):
            continue
        units = store.units(file)
        physical = units["physical_offset"].astype(np.int64)
        units = units[waits.is_message(units["size"]) & (is_among(physical, gone.offsets) | (physical >= end))]
        more = np.zeros(len(units), DESTROYED)
        more["physical_offset"], more["size"] = units["physical_offset"], units["size"]
        codes = units["tags_code"].astype(np.int64)
        more["due_ms"] = np.where(codes >= _LEAST_MS, codes, 0)
        more["delay_level"] = file.queue_id + 1 if file.topic == SCHEDULE_TOPIC else 0
        rows.append(more)
    # The timer topic's queue may have lost its first files as well; the timer log still has the waiting messages.
    left = ~is_among(gone.offsets, np.unique(np.concatenate(rows)["physical_offset"].astype(np.int64)))
    more = np.zeros(int(left.sum()), DESTROYED)
    more["physical_offset"], more["size"] = gone.offsets[left], gone.sizes[left]
    every = np.unique(np.concatenate([*rows, more]))
    is_told = np.where(every["delay_level"] > 0, np.isin(every["delay_level"], list(known)), has_log)
    return every[(every["physical_offset"] >= begin) | is_told]


def _read_outcomes(store: StoreFiles, since: int) -> _Outcomes:
    """Return the outcomes that duemq's records from a physical offset on state."""
    delivered, withdrawn, newest_ms = [_NONE], [_NONE], 0
    levels: list[_Queued] = []
    timers: list[_Queued] = []
    if since < store.readable_end:
        for part in plan(store, start=since):
            for found in walks(store, part, check_crc=False):
                roles = Roles(found.records)
                named = roles.origin != NO_ORIGIN
                is_delivery = named & (roles.role == DELIVERY)
                delivered.append(roles.origin[is_delivery])
                withdrawn.append(roles.origin[named & ~is_delivery])
                newest_ms = max(newest_ms, int(found.records.store_ms[is_delivery].max(initial=0)))
                levels.append(_queued(found.records, roles.role == LEVEL))
                timers.append(_queued(found.records, roles.role == TIMER))
    return _Outcomes(union(delivered), union(withdrawn), newest_ms, levels, timers)


def _queued(records: Records, rows: Mask) -> _Queued:
    return _Queued(
        records.queue_id[rows].astype(np.int64) + 1,
        records.queue_offset[rows].astype(np.int64),
        records.physical_offset[rows],
        records.sizes[rows].astype(np.int64),
    )


def _units(store: StoreFiles, file: QueueFile, files: ProgressFiles) -> tuple[Any, Integers]:
    """Return the good units of a file of a consume queue, and their queue offsets."""
    units = store.units(file)
    good = units["physical_offset"] < files.queues_to
    return units[good], np.flatnonzero(good) + file.first_unit


def _waiting_levels(store: StoreFiles, files: ProgressFiles, said: _Outcomes) -> Iterator[WaitingRecords]:
    done = union([files.level_delivered, said.delivered, said.withdrawn])
    queued = [each for each in said.levels if len(each.physical)]
    for file in store.queue_files():
        if file.topic == SCHEDULE_TOPIC:
            units, numbers = _units(store, file, files)
            kept = waits.is_message(units["size"])
            level = np.full(int(kept.sum()), file.queue_id + 1, np.int64)
            physical, sizes = units["physical_offset"].astype(np.int64), units["size"].astype(np.int64)
            queued.append(_Queued(level, numbers[kept], physical[kept], sizes[kept]))
    for each in queued:
        left = ~is_among(each.physical, done)
        for level in np.unique(each.level).tolist():
            mine = each.level == level
            left[mine] &= ~waits.is_passed(files.levels.get(level, []), each.queue_offset[mine])
        yield WaitingRecords(each.physical[left], each.sizes[left])


def _waiting_timers(store: StoreFiles, files: ProgressFiles, said: _Outcomes) -> list[WaitingRecords]:
    note, second = files.note, files.second
    found = waits.found_since(
        second,
        note.found if note is not None else StartFacts(),
        delivered=[said.delivered],
        withdrawn=[said.withdrawn],
        newest_ms=said.newest_ms,
        end=store.readable_end,
    )
    log_end = note.log_end if note is not None else EVERYTHING
    if note is not None:
        found = waits.with_moved(found, second, note.found, timer_units(store, note.log_since, log_end))
    result: list[WaitingRecords] = []
    deletions: list[tuple[Integers, Integers]] = []
    for position, part in timer_units(store, 0, log_end) if files.has_log else ():
        seconds = seconds_of(part)
        at = np.flatnonzero(seconds >= second)
        units, positions = part[at], position + at * UNIT_SIZE
        physical, sizes = units["physical_offset"].astype(np.int64), units["record_size"].astype(np.int64)
        due = units["due_ms"].astype(np.int64)
        kept = waits.left_of(physical, positions, units["magic"], due, seconds[at], noted=second, found=found).kept
        kept &= ~is_among(physical, found.withdrawn)
        kept &= ~waits.is_brought_back(units, seconds[at], second, said.delivered)
        live = kept & waits.is_live(units, seconds[at], second)
        result.append(WaitingRecords(physical[live], sizes[live]))
        deletes = kept & waits.is_deletion(units["magic"])
        deletions.append((physical[deletes], sizes[deletes]))
    queued, more = _behind(store, files, found)
    result += queued
    result += [
        WaitingRecords(each.physical[left], each.sizes[left])
        for each in said.timers
        for left in [
            (each.queue_offset >= files.queue_offset)
            & ~is_among(each.physical, found.done)
            & ~is_among(each.physical, found.withdrawn)
        ]
    ]
    cancelled = _cancelled(store, result, [*deletions, *more])
    return [
        WaitingRecords(w.offsets[keep], w.sizes[keep]) for w in result for keep in [~is_among(w.offsets, cancelled)]
    ]


def _behind(
    store: StoreFiles, files: ProgressFiles, found: StartFacts
) -> tuple[list[WaitingRecords], list[tuple[Integers, Integers]]]:
    """Return the messages of the timer topic that are not in the wheel yet, by its queue, and RocketMQ's records that
    delete others, as (physical offsets, sizes)."""
    result, deletions = [], []
    for file in store.queue_files():
        if file.topic != TIMER_TOPIC or file.queue_id != 0:
            continue
        units, numbers = _units(store, file, files)
        units = units[numbers >= files.queue_offset]
        left = units[waits.is_behind(units, found)]
        result.append(WaitingRecords(left["physical_offset"].astype(np.int64), left["size"].astype(np.int64)))
        unknown = units[waits.is_told_by_record(units)]
        for records in at_offsets(store, unknown["physical_offset"].astype(np.int64), unknown["size"].astype(np.int64)):
            roles = Roles(records)
            rows = (roles.role == TIMER) & ~is_among(records.physical_offset, found.done)
            rows &= ~is_among(records.physical_offset, found.withdrawn)
            result.append(WaitingRecords(records.physical_offset[rows], records.sizes[rows].astype(np.int64)))
            rows = (roles.role == CANCEL) & (roles.origin == NO_ORIGIN)
            deletions.append((records.physical_offset[rows], records.sizes[rows].astype(np.int64)))
    return result, deletions


def _cancelled(store: StoreFiles, found: list[WaitingRecords], deletions: list[tuple[Integers, Integers]]) -> Integers:
    """Return the physical offsets of messages that RocketMQ's deletions remove when the turn of their slot comes. A
    deletion names a message of its own topic, see `timer_properties.deleted_key`."""
    named: set[tuple[int, str, str]] = set()
    for offsets, sizes in deletions:
        order = np.argsort(offsets)
        for records in at_offsets(store, offsets[order], sizes[order]):
            keys = records.property_strings("TIMER_DEL_UNIQKEY").to_pylist()
            topics = records.property_strings("REAL_TOPIC").to_pylist()
            slots = Roles(records).slot_second.tolist()
            named.update(
                (slot, topic, deleted_key(key, topic))
                for slot, key, topic in zip(slots, keys, topics, strict=True)
                if key and topic
            )
    gone = [_NONE]
    for part in found if named else ():
        order = np.argsort(part.offsets)
        for records in at_offsets(store, part.offsets[order], part.sizes[order]):
            topics = records.property_strings("REAL_TOPIC").to_pylist()
            uniques = records.property_strings("UNIQ_KEY").to_pylist()
            slots = Roles(records).slot_second.tolist()
            rows = [
                t is not None and u is not None and (slot, t, u) in named
                for t, u, slot in zip(topics, uniques, slots, strict=True)
            ]
            gone.append(records.physical_offset[np.array(rows, np.bool_)])
    return union(gone)


# --- the timer log


def timer_columns(units: Any, position: int) -> dict[str, Any]:
    """Return the columns of the table `timers` for units that follow one another from a position on."""
    magic, is_applied = units["magic"], units["due_ms"] == APPLIED
    return {
        "position": position + np.arange(len(units), dtype=np.int64) * UNIT_SIZE,
        "previous": units["previous"].astype(np.int64),
        "magic": magic.astype(np.int32),
        "is_rolled": magic & ROLL != 0,
        "is_delete": (magic & DELETE != 0) & (is_applied | (units["due_ms"] == 0) & (magic & WITHDRAWN == 0)),
        "is_withdrawn": (magic & WITHDRAWN != 0) | is_superseded(units),
        "write_ms": units["write_ms"].astype(np.int64),
        "slot_ms": seconds_of(units) * 1000,
        "due_ms": np.where(is_applied, 0, _due_ms(units)),
        "physical_offset": units["physical_offset"].astype(np.int64),
        "record_size": units["record_size"].astype(np.int32),
        "topic_hash": units["topic_hash"].astype(np.int32),
    }


def _timer_files(store: StoreFiles) -> list[tuple[int, int]]:
    """Return where each file of the timer log begins, and its bytes."""
    return [(int(name), size) for name, size in store.sizes(file_names.TIMER_LOG) if name.isdecimal() and size]


def timer_units(store: StoreFiles, start: int = 0, end: int = EVERYTHING) -> Iterator[tuple[int, Any]]:
    """Yield the units of the timer log between two positions, in order, a part at a time, as
    `scheduler.timers.files.unit.UNIT`, with the position of the first; of each file, the units before the first invalid
    one. Units of messages that got newer units are marked as the checkpoint's note says, even if they are not marked in
    the files yet."""
    known = checkpoint.load(cast(Files, store), file_names.CHECKPOINT)
    note = small_files.decode_note(known.notes.get("timers", b"")) if store.written_by == "duemq" else None
    superseded = positions_of(note.superseded if note is not None else b"")
    for base, size in _timer_files(store):
        if base + size <= start:
            continue
        room = (size - UNIT_SIZE - BLANK_SIZE) // UNIT_SIZE * UNIT_SIZE + UNIT_SIZE
        stop = min(room, end - base)
        at, count = max(0, start - base), _FIRST_UNITS
        while at < stop:
            data = store.read(f"{file_names.TIMER_LOG}/{base:020}", at, min(count * UNIT_SIZE, stop - at))
            units = np.frombuffer(data, TIMER_UNIT, len(data) // UNIT_SIZE)
            wrong = np.flatnonzero((units["size"] != UNIT_SIZE) | (units["magic"] < 0) | (units["magic"] > ANY_MAGIC))
            if len(wrong):
                units = units[: wrong[0]]
            if len(units):
                yield base + at, marked(base + at, units, superseded)
            if len(wrong):
                break
            at, count = at + count * UNIT_SIZE, min(2 * count, _SCAN_UNITS)
