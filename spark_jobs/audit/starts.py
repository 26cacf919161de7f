"""Finds out whether a broker that starts on a store as it is finds the waiting messages.

Records say what waits, but a broker relies on the files that it has derived from them. At a start, brokers repair these
files as follows:

    4.9.7, 5.3.3   Some records get their units again, except in queues that have later ones: all records behind the
                   last one that the consume queues know; or after a kill, all records from the start of the last file
                   whose first record is three seconds older than the checkpoint. From a queue's last three files these
                   brokers use the units before the first invalid one
    5.3.3          Without timercheck the timer topic's queue is put into the wheel again, from its beginning. Slots of
                   the wheel are rebuilt from the timer log's last two files
    all            They do not start if a file of the commitlog differs in size from the others. A last file of 0 bytes,
                   which a kill leaves, is skipped, but not by 4.9.7. Nor does duemq start if a file between others is
                   missing
    duemq          It repairs all of its own files. But if the commitlog lacks a position that its checkpoint refers to,
                   it does not start. It rebuilds all of another broker's files if they do not fit together
                   (`storage.durability.recovery`, `scheduler.timers.recovery`)

Apache's brokers end the commitlog at the first damaged stretch in its last three files.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

import msgspec
import numpy as np

from duemq.protocol.topics import SCHEDULE_TOPIC, TIMER_TOPIC
from duemq.scheduler import waiting as waits
from duemq.scheduler.levels.table import queue_id_of
from duemq.scheduler.timers.files import small_files
from duemq.scheduler.timers.files.unit import UNIT_SIZE, seconds_of
from duemq.scheduler.timers.files.wheel import SLOT, SLOTS
from duemq.scheduler.timers.index.sorted_offsets import is_among, union
from duemq.spark_jobs.store.progress import behind_last, timer_units
from duemq.spark_jobs.store.ranges import at_offsets, records_at
from duemq.spark_jobs.store.store_files import is_segment
from duemq.storage import file_names
from duemq.storage.durability import checkpoint
from duemq.storage.files import Files

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from duemq.spark_jobs.audit.figures import Figures
    from duemq.spark_jobs.store.store_files import QueueFile, StoreFiles

    Integers = NDArray[np.int64]
    Mask = NDArray[np.bool_]

OLD: Final = "4.9.7"
NEW: Final = "5.3.3"
OURS: Final = "duemq"
BROKERS: Final = (OLD, NEW, OURS)
_CHECKED_FILES: Final = 3
_CLOCK_MARGIN_MS: Final = 3000
_TIMESTAMPS: Final = 16
_NONE: Final = np.empty(0, np.int64)
_OF_5: Final = (file_names.TIMER_CHECK, file_names.QUEUE_MAPPINGS, file_names.LMQ_OFFSETS)


class StartOutcome(msgspec.Struct, omit_defaults=True):
    """What a broker that starts on the store would do with the waiting messages."""

    broker: str
    """4.9.7, 5.3.3 or duemq."""
    wrote_it: bool
    """Whether this broker had the store last."""
    finds: int
    misses: int
    again: int
    """Messages of levels that were delivered, and would be delivered once more."""
    reasons: list[str]
    """Why it would not find some messages, or deliver some again."""
    store: str | None = None
    """In a cluster's audit, the store."""


class _Waiting(NamedTuple):
    """Waiting messages: physical offsets and sizes of their records."""

    physical: Integers
    sizes: Integers

    def where(self, mask: Mask) -> _Waiting:
        return _Waiting(self.physical[mask], self.sizes[mask])


class _Queue(NamedTuple):
    """A queue as Apache's broker reads it."""

    there: Integers
    """Physical offsets of its messages, ascending."""
    last: int
    """Physical offset of its last message; -1 without one."""
    end: int
    """The queue offset behind its last message."""


def starts(store: StoreFiles, figures: Figures, damages: list[tuple[int, int, str]]) -> list[StartOutcome]:
    """Return what each broker would do. `damages`: stretches of the commitlog, as physical offset, bytes and reason.
    Raises OSError."""
    if store.is_running:  # the broker has read its files, and works from memory
        return []
    return [each.judge() for each in _Judges(store, figures, damages)]


class _Judges:
    """The data by which all brokers are judged, each part read when it is first needed."""

    def __init__(self, store: StoreFiles, figures: Figures, damages: list[tuple[int, int, str]]) -> None:
        self.store = store
        self.figures = figures
        rows = figures.waiting  # in the order of their physical offsets
        self.levels = {
            int(level): _Waiting(
                *(rows[name][rows["delay_level"] == level].astype(np.int64) for name in _OFFSET_AND_SIZE)
            )
            for level in np.unique(rows["delay_level"]).tolist()
            if level
        }
        self.timers = _Waiting(*(rows[name][rows["delay_level"] == 0].astype(np.int64) for name in _OFFSET_AND_SIZE))
        self.by_queue: dict[tuple[str, int], list[QueueFile]] = {}
        for file in store.queue_files():
            self.by_queue.setdefault((file.topic, file.queue_id), []).append(file)
        last = store.segments[-1].end
        self.checked_from = last - _CHECKED_FILES * store.segment_size
        torn = [offset for offset, _, _ in damages if offset >= self.checked_from]
        self.cut_at = min(torn, default=last)
        self._queues: dict[tuple[str, int], _Queue] = {}

    def __iter__(self) -> Iterator[_Judge]:
        wrote = OURS if self.store.written_by == "duemq" else NEW if self._is_of_5() else OLD
        for broker in BROKERS:
            yield _Judge(self, broker, wrote)

    def _is_of_5(self) -> bool:
        return bool(
            len(self.timers.physical)
            or (TIMER_TOPIC, 0) in self.by_queue
            or any(self.store.read_whole(name) is not None for name in _OF_5)
        )

    def queue(self, topic: str, queue_id: int) -> _Queue:
        """Return one of the scheduler's queues."""
        key = topic, queue_id
        if key not in self._queues:
            self._queues[key] = self._read_queue(self.by_queue.get(key, []))
        return self._queues[key]

    def _read_queue(self, files: list[QueueFile]) -> _Queue:
        found, last, end = [_NONE], -1, 0
        for number, file in enumerate(files):
            units = self.store.units(file)
            physical, sizes = units["physical_offset"].astype(np.int64), units["size"].astype(np.int64)
            if number >= len(files) - _CHECKED_FILES:
                wrong = np.flatnonzero((sizes <= 0) | (physical < 0))
                if len(wrong):
                    physical, sizes = physical[: wrong[0]], sizes[: wrong[0]]
            found.append(physical[waits.is_message(sizes)])
            if len(physical):
                last, end = int(physical[-1]), file.first_unit + len(physical)
            if len(physical) < len(units):
                break
        return _Queue(union(found), last, end)

    @cached_property
    def dispatched_from(self) -> int:
        """The physical offset from which on records get their units again."""
        return self.end_of_queues if self.store.is_clean else self._by_timestamp()

    @cached_property
    def end_of_queues(self) -> int:
        """The physical offset behind the last record that any consume queue knows."""
        end = 0
        for files in self.by_queue.values():
            for file in reversed(files):
                units = self.store.units(file)
                if len(units):
                    end = max(end, int(units[-1]["physical_offset"]) + 1)
                    break
        return end

    def _by_timestamp(self) -> int:
        checkpoint = self.store.read_whole(file_names.CHECKPOINT) or b""
        times = np.frombuffer(checkpoint[:_TIMESTAMPS].ljust(_TIMESTAMPS, b"\0"), ">i8")
        limit = int(times.min()) - _CLOCK_MARGIN_MS
        for segment in reversed(self.store.segments):
            for records in records_at(self.store, np.array([segment.first_offset], np.int64)):
                if int(records.store_ms[0]) <= limit:
                    return segment.first_offset
        return 0


_OFFSET_AND_SIZE: Final = ("physical_offset", "size")


class _Judge:
    """Judges one broker."""

    def __init__(self, known: _Judges, broker: str, wrote: str) -> None:
        self._known = known
        self._store = known.store
        self._broker = broker
        self._wrote = wrote
        self._reasons: list[str] = []
        self._misses = 0
        self._redelivered = 0

    def judge(self) -> StartOutcome:
        """Return the broker's `StartOutcome`."""
        known = self._known
        waiting = sum(len(each.physical) for each in known.levels.values()) + len(known.timers.physical)
        is_ours = self._broker == self._wrote == OURS
        if (refusal := self._refusal_of_files() or (self._refusal() if is_ours else None)) is not None:
            self._misses = waiting
            self._reasons.append(refusal)
        elif not is_ours:
            self._judge_levels()
            self._judge_timers()
        return StartOutcome(
            self._broker,
            self._broker == self._wrote,
            waiting - self._misses,
            self._misses,
            self._redelivered,
            self._reasons,
        )

    def _refusal_of_files(self) -> str | None:
        """Return why a broker does not start, by the sizes of the commitlog's files (`MappedFileQueue.load`,
        `SegmentFiles.load`); None if it starts."""
        size = self._store.segment_size
        files = [(name, found) for name, found in self._store.sizes(file_names.COMMITLOG) if is_segment(name)]
        if self._broker != OLD and files and not files[-1][1]:
            files.pop()
        expected = int(files[0][0]) if files else 0
        for name, found in files:
            if found != size:
                why = f"{file_names.COMMITLOG}/{name} has {found} bytes, but others have {size}"
                return f"{why}: {self._broker} does not start. Put the whole file back"
            if self._broker == OURS and int(name) != expected:
                return f"{file_names.COMMITLOG}/{expected:020} is missing: duemq does not start. Put the file back"
            expected += size
        return None

    def _refusal(self) -> str | None:
        """Return why duemq does not start on its own store: the commitlog lacks a position that the checkpoint refers
        to (`MessageStore.need`). None if it starts."""
        store = self._store
        known = checkpoint.load(cast(Files, store), file_names.CHECKPOINT)
        files = [(int(name), size) for name, size in store.sizes(file_names.COMMITLOG) if name.isdecimal() and size]
        begin, end = store.segments[0].first_offset, max(base + size for base, size in files)
        for position in (known.recovery_offset, small_files.needed_from(known.notes)):
            if position is not None and not begin <= position <= end:
                base = position - position % store.segment_size
                has = "has 0 bytes" if f"{base:020}" in store.names(file_names.COMMITLOG) else "is missing"
                return (
                    f"{file_names.COMMITLOG}/{base:020} {has}, but the checkpoint refers to position {position} in it: "
                    "duemq does not start. Put the file back, or see what `duemq store repair --dry-run` says"
                )
        return None

    # --- levels

    def _judge_levels(self) -> None:
        missing = {}
        for level, waiting in self._known.levels.items():
            lacks = self._not_in(waiting, SCHEDULE_TOPIC, queue_id_of(level))
            if len(lacks.physical):
                missing[level] = lacks
        if self._broker == OURS and self._makes_all_again(list(missing.values())):
            missing = {}
        for level, lacks in sorted(missing.items()):
            self._misses += len(lacks.physical)
            self._reasons.append(
                f"{file_names.CONSUME_QUEUES}/{SCHEDULE_TOPIC}/{queue_id_of(level)} lacks {self._units(lacks)}, "
                f"of messages that wait in level {level}"
            )
        self._judge_cut()
        self._judge_offsets()

    def _not_in(self, waiting: _Waiting, topic: str, queue_id: int) -> _Waiting:
        """Return the messages that have no unit in their queue, and will not get one at a start."""
        known, queue = self._known, self._known.queue(topic, queue_id)
        lacks = waiting.where(~is_among(waiting.physical, queue.there) & (waiting.physical < known.cut_at))
        if not len(lacks.physical) or self._broker == OURS:
            return lacks
        made_again = (lacks.physical >= known.dispatched_from) & (lacks.physical > queue.last)
        return lacks.where(~made_again)

    def _makes_all_again(self, missing: list[_Waiting]) -> bool:
        """Return whether duemq, when it takes the store over, finds that the consume queues do not fit the other
        files."""
        known, store = self._known, self._store
        start = min(known.dispatched_from, known.end_of_queues)
        if any((each.physical >= start).any() for each in missing):
            return True
        for level, offset in store.table(file_names.DELAY_OFFSETS, "offsetTable").items():
            if int(offset) > known.queue(SCHEDULE_TOPIC, queue_id_of(int(level))).end:
                return True
        check = _check(store)
        return check is not None and check.queue_offset > known.queue(TIMER_TOPIC, 0).end

    def _judge_cut(self) -> None:
        """Count the messages behind damage in the last files, which are cut off with it."""
        known = self._known
        behind = sum(int((each.physical > known.cut_at).sum()) for each in (*known.levels.values(), known.timers))
        if behind:
            self._misses += behind
            self._reasons.append(
                f"the commitlog is damaged at {known.cut_at}: a start cuts off what lies behind that, with {behind:,} "
                "messages that wait. Copy its files first"
            )

    def _judge_offsets(self) -> None:
        """Count the messages of levels that are delivered again, since their level begins at an earlier offset."""
        if self._broker == OURS and self._wrote == OURS:
            return
        store = self._store
        is_there = any(
            store.read_whole(file_names.DELAY_OFFSETS + more) is not None for more in ("", file_names.BACKUP)
        )
        again = {int(level): int(count) for level, count in self._known.figures.again.tolist() if count}
        # The file is exact as of duemq's last stop, and messages that were delivered before earlier ones are marked.
        if self._wrote == OURS and is_there:
            return
        self._redelivered = sum(again.values())
        if not is_there and again:
            parts = [f"level {level} at 0 and delivers {count:,} again" for level, count in sorted(again.items())]
            self._reasons.append(f"{file_names.DELAY_OFFSETS} is missing: {self._broker} starts {', '.join(parts)}")

    def _units(self, lacks: _Waiting) -> str:
        """Describe briefly which units a queue lacks."""
        ends = lacks if len(lacks.physical) == 1 else lacks.where(_first_and_last(len(lacks.physical)))
        offsets = [int(each) for found in at_offsets(self._store, *ends) for each in found.queue_offset]
        if len(offsets) < len(ends.physical):
            return f"{len(lacks.physical):,} units"
        first, last = min(offsets), max(offsets)
        if len(lacks.physical) == 1:
            return f"unit {first}"
        if last - first + 1 == len(lacks.physical):
            return f"units {first} to {last}"
        return f"{len(lacks.physical):,} units from {first} to {last}"

    # --- timers

    def _judge_timers(self) -> None:
        known, store = self._known, self._store
        timers = known.timers.where(known.timers.physical < known.cut_at)
        if not len(timers.physical):
            return
        if self._broker == OLD:
            self._misses += len(timers.physical)
            self._reasons.append(f"4.9.7 has no timers: {len(timers.physical):,} messages wait in the timer wheel")
            return
        check = _check(store)
        not_queued = self._not_in(timers, TIMER_TOPIC, 0)
        if self._broker == OURS and self._makes_all_again([not_queued]):
            return
        if check is None:
            why = "is missing: the timer topic is read from its start, and what was delivered comes again"
            self._reasons.append(f"{file_names.TIMER_CHECK} {why}")
            self._miss_timers(not_queued)
            return
        in_log, links, log_end = self._in_log(check)
        is_whole = self._is_whole(check, links, log_end)
        if self._broker == OURS and not is_whole:
            self._miss_timers(not_queued)
            return
        offset = waits.enqueued_to(check, behind_last(store))
        queued = self._queued_from(offset)
        lost = timers.where(~is_among(timers.physical, union([in_log, queued])))
        # Messages that are dispatched again get into the queue, and from there into the wheel.
        made_again = (lost.physical >= known.dispatched_from) & (lost.physical > known.queue(TIMER_TOPIC, 0).last)
        lost = lost.where(~made_again)
        if len(lost.physical):
            self._misses += len(lost.physical)
            is_there = any(name.isdecimal() for name in store.names(file_names.TIMER_LOG))
            what = "lacks" if is_there else "is missing, and with it"
            self._reasons.append(f"{file_names.TIMER_LOG}/ {what} {len(lost.physical):,} messages that wait")
        if self._broker == NEW and not len(known.queue(TIMER_TOPIC, 0).there):
            rest = len(timers.physical) - len(lost.physical)
            if rest and not (timers.physical >= known.dispatched_from).all():
                self._misses += rest
                self._reasons.append(
                    f"{file_names.CONSUME_QUEUES}/{TIMER_TOPIC}/0 is missing: 5.3.3 delivers nothing from the wheel"
                )

    def _miss_timers(self, lacks: _Waiting) -> None:
        if len(lacks.physical):
            self._misses += len(lacks.physical)
            self._reasons.append(
                f"{file_names.CONSUME_QUEUES}/{TIMER_TOPIC}/0 lacks {self._units(lacks)}, of messages that wait"
            )

    def _in_log(self, check: small_files.TimerCheck) -> tuple[Integers, list[int], int]:
        """Return the physical offsets, ascending, of the messages that a start finds in the timer log; the links of
        units; and the position behind the last unit."""
        second, end = waits.second_of(check), 0
        found, links = [_NONE], list[int]()
        files = [
            (int(name), size) for name, size in self._store.sizes(file_names.TIMER_LOG) if name.isdecimal() and size
        ]
        size = files[0][1] if files else 1
        remade_from = check.log_position // size * size - size
        for position, units in timer_units(self._store):
            end = position + len(units) * UNIT_SIZE
            seconds = seconds_of(units)
            live = waits.is_live(units, seconds, second)
            links.append(waits.first_link(units, seconds, second))
            if self._broker == NEW and position < remade_from:
                positions = position + np.arange(len(units)) * UNIT_SIZE
                live &= (positions >= remade_from) | self._is_in_wheel(seconds, positions)
            found.append(units["physical_offset"][live].astype(np.int64))
        return union(found), links, end

    def _is_in_wheel(self, seconds: Integers, positions: Integers) -> Mask:
        """Return which units can be reached from the wheel's slot of their second, directly or through later units."""
        try:
            data = self._store.read(file_names.TIMER_WHEEL, 0, SLOTS * SLOT.itemsize)
        except FileNotFoundError:
            data = b""
        slots = np.frombuffer(data[: len(data) // SLOT.itemsize * SLOT.itemsize], SLOT)
        at = seconds % SLOTS
        known = at < len(slots)
        leads = np.zeros(len(seconds), np.bool_)
        found = slots[at[known]]
        leads[known] = (found["second"] == seconds[known]) & (found["last"] >= positions[known])
        return leads

    def _is_whole(self, check: small_files.TimerCheck, links: list[int], end: int) -> bool:
        """Return whether duemq, when it takes the store over, uses the timer log."""
        files = [
            (int(name), size) for name, size in self._store.sizes(file_names.TIMER_LOG) if name.isdecimal() and size
        ]
        begin, size = files[0] if files else (0, 1)
        return waits.is_covering(check, begin, end, size, links)

    def _queued_from(self, offset: int) -> Integers:
        """Return the physical offsets of the messages in the timer topic's queue from a queue offset on."""
        found = [_NONE]
        for file in self._known.by_queue.get((TIMER_TOPIC, 0), []):
            units: NDArray[Any] = self._store.units(file)
            numbers = np.arange(len(units)) + file.first_unit
            at = (numbers >= offset) & waits.is_message(units["size"].astype(np.int64))
            found.append(units["physical_offset"][at].astype(np.int64))
        return union(found)


def _check(store: StoreFiles) -> small_files.TimerCheck | None:
    return small_files.load_check(cast(Files, store), file_names.TIMER_CHECK)


def _first_and_last(count: int) -> Mask:
    mask = np.zeros(count, np.bool_)
    mask[[0, -1]] = True
    return mask
