"""Recovery of the timers: finds out which messages wait in the timer wheel when a store opens.

If only duemq wrote the store, the result is exact: the timer log is cut at the end in the checkpoint's note, the wheel
is taken back to the same state, and the records behind the note tell which messages were delivered since. Units behind
the noted end are made again from the queue of the timer topic.

    timer wheel missing; hours of it whose checksums     rebuilt from the log, in the same pass that compares the
    differ from the note                                 log with its checksums
    no note yet; timer log missing, or its checksums     both rebuilt from the queue; deliveries are read from the
    differ from the note                                 whole commitlog
    Apache's broker had the store last                   from timercheck and the log, as Apache's broker does:
                                                         messages are delivered at least once. Without these files,
                                                         from the queue as above

Keeps invariant 19 of ARCHITECTURE.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import structlog

from duemq.protocol.records.timer_properties import PRECISION_MS, slot_second
from duemq.protocol.topics import TIMER_TOPIC
from duemq.scheduler import waiting as waits
from duemq.scheduler.timers.files.log import TimerLog
from duemq.scheduler.timers.files.small_files import NO_OFFSETS, StartFacts, Sums, TimerCheck, TimerNote
from duemq.scheduler.timers.files.sums import LogSums
from duemq.scheduler.timers.files.unit import NORMAL, UNIT_SIZE, WITHDRAWN, seconds_of
from duemq.scheduler.timers.files.wheel import HOUR, HOURS, SLOTS, TimerWheel
from duemq.scheduler.timers.index.positions import UnitPositions
from duemq.scheduler.timers.index.sorted_offsets import distinct_of, has, union
from duemq.storage import file_names
from duemq.storage.durability.recovery import Recovered
from duemq.storage.errors import StoreFormatError
from duemq.storage.log.origins import Origins
from duemq.storage.queues.consume_queue import ConsumeQueue
from duemq.storage.store import MessageStore

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from duemq.scheduler.timers.files.unit import Units

    Offsets = NDArray[np.int64]

log = structlog.get_logger(__name__)

_NEAR_SECONDS: Final = 60
"""Slots that are at most this many seconds ahead are not searched for parked messages: their turn comes soon."""
_MAX_NAMED: Final = 20
"""Most paths that a warning lists."""


class Start(NamedTuple):
    """The state with which the timers begin. See `timers.files.small_files` for `second` to `waiting`."""

    second: int
    since: int
    log_since: int
    queue_offset: int
    waiting: dict[int, int]
    counted_at: int = 0
    """Physical offset: messages in the slot of `second` that were delivered by records before it are not included in
    `waiting`."""
    found: StartFacts = StartFacts()
    """The messages that records, and the last start, show to be delivered, withdrawn or moved."""
    parked: frozenset[tuple[int, int]] = frozenset()
    """Slots that may have parked messages: second, and hash of the topic."""
    enqueued: Offsets = NO_OFFSETS
    """Physical offsets, ascending, of messages from `queue_offset` on that already have units in the timer log."""
    enqueued_to: int = 0
    """The queue offset behind the last message in `enqueued`."""

    @property
    def done(self) -> Offsets:
        """Physical offsets, ascending, of the delivered messages in `found`."""
        return self.found.done

    @property
    def withdrawn(self) -> Offsets:
        """Physical offsets, ascending, of the withdrawn messages in `found`."""
        return self.found.withdrawn

    @property
    def recovered_to(self) -> int:
        """The second from which on no slot has a message that was found delivered."""
        return self.found.recovered_to

    def is_done(self, physical_offset: int) -> bool:
        """Whether the message of the record at a physical offset was found delivered."""
        return has(self.done, physical_offset)


class TimerRecovery:
    """One recovery. Opens the files of the timer log and the wheel, or makes them."""

    def __init__(
        self,
        store: MessageStore,
        queue: ConsumeQueue,
        recovered: Recovered,
        now_ms: int,
        *,
        timer_log: TimerLog,
        wheel: TimerWheel,
        positions: UnitPositions,
    ) -> None:
        """Prepare the recovery. `positions`: the index to be filled with the positions of all units, in the same pass
        over the log as everything else."""
        self._store = store
        self._queue = queue
        self._log = timer_log
        self._wheel = wheel
        self._now_second = slot_second(now_ms)
        self._recovered = recovered
        self._positions = positions
        self._parked: set[tuple[int, int]] = set()
        """Slots that may have parked messages, as in `Start.parked`."""
        self._parked_done: dict[int, int] = {}
        """Number of parked messages that were delivered since the note, by the hash of their topic."""
        self._reason = "there is no usable timer log"
        """Why the log cannot be used."""

    def run(self, note: TimerNote | None, check: TimerCheck | None) -> Start:
        """Recover from the note, or from timercheck if RocketMQ had the store last; if neither can be used, from the
        queue. Raises StoreFormatError, OSError."""
        has_wheel = self._open_wheel()
        has_log = self._open_log()
        if not self._queue.next_offset:
            self._log.remove_all()
            if not has_wheel:
                self._wheel.clear()
                self._wheel.establish()
            return Start(second=self._now_second, since=self._store.log.end, log_since=0, queue_offset=0, waiting={})
        start = None
        if note is not None:
            start = self._by_note(note, has_wheel=has_wheel, has_log=has_log)
        elif self._recovered.is_foreign:
            start = self._by_check(check)
        if start is None:
            start = self._by_queue()
        return start

    def _open_wheel(self) -> bool:
        try:
            return self._wheel.open()
        except StoreFormatError as error:
            log.error("timer_wheel_replaced", reason=str(error))
            return False

    def _open_log(self) -> bool:
        files, directory = self._store.files, self._log.directory
        try:
            if files.exists(directory):
                files.make_directories(directory)
            others = self._log.load()
        except FileExistsError as error:  # not a directory
            log.error("timer_log_replaced", reason=str(error))
            files.remove_tree(directory)
        except StoreFormatError as error:
            log.error("timer_log_replaced", reason=str(error))
            self._log.remove_all()
        else:
            if others:
                log.warning("others_in_timer_log", paths=others[:_MAX_NAMED], help="move them away")
        return self._log.end > self._log.begin

    # --- by duemq's note

    def _by_note(self, note: TimerNote, *, has_wheel: bool, has_log: bool) -> Start | None:
        if has_log:
            # The units before the noted end are compared with checksums.
            end = note.log_end
            self._log.recover(end if note.sums is not None else end - end % self._log.segment_size)
        if not waits.is_covered(note, self._log.begin, self._log.end):
            there = f"{self._log.begin} to {self._log.end}"
            self._reason = (
                f"the timer log has positions {there}, but the checkpoint needs {note.log_since} to {note.log_end}"
            )
            return None
        if note.sums is not None:
            is_right = self._check_files(note, note.sums, has_wheel=has_wheel)
        else:
            is_right = self._check_earlier(note, has_wheel=has_wheel)
        if not is_right:
            return None
        counted, others = Origins(), Origins()
        counted_at = min(note.counted_at, self._store.checkpoint.recovery_offset or 0)
        counted.read(self._store.log, note.since, counted_at)
        others.read(self._store.log, max(note.since, counted_at), self._recovered.start)
        found = self._found(note.second, note.found, counted, others)
        found = waits.with_moved(found, note.second, note.found, self._log.scan(note.log_since, note.log_end))
        # The next note includes the deliveries in these records, so none of them is read by another start.
        return Start(
            second=note.second,
            since=self._recovered.end,
            log_since=note.log_end,
            queue_offset=note.queue_offset,
            waiting={key: count - self._parked_done.get(key, 0) for key, count in note.waiting.items()},
            counted_at=counted_at,
            found=found._replace(counted=union([note.found.counted, counted.delivered])),
            parked=frozenset(self._parked),
        )

    def _found(self, second: int, before: StartFacts, *more: Origins) -> StartFacts:
        """Return the messages that are delivered or withdrawn according to the origins that recovery read, to `more`,
        and to the last start (`before`)."""
        origins = (self._recovered.origins, *more)
        return waits.found_since(
            second,
            before,
            delivered=[each.delivered for each in origins],
            withdrawn=[each.withdrawn for each in origins],
            newest_ms=max(each.newest_ms for each in origins),
            end=self._recovered.end,
        )

    def _check_files(self, note: TimerNote, sums: Sums, *, has_wheel: bool) -> bool:
        """Cut the log to the noted end, compare it and the wheel with their checksums in one pass over the log, and
        rebuild the hours of the wheel that differ. Return whether the log agrees with its checksums."""
        # Hours with units behind the noted end have changed since the note: a difference there is no damage.
        changed = np.zeros(HOURS, bool)
        for _, units in self._log.scan(note.log_end, self._log.end):
            changed[seconds_of(units) % SLOTS // HOUR] = True
        self._log.truncate(note.log_end)
        self._log.superseded.load(note.superseded)
        self._drop_before(min(sums.log, default=0))
        delivered = union([self._recovered.origins.delivered])
        if has_wheel and len(sums.wheel) == HOURS:
            hours = self._wheel.check(note.second, sums.wheel)
        else:
            self._wheel.clear()
            hours = np.ones(HOURS, bool)
        has_to_fill = bool(hours.any())
        # Only withdrawals since the checkpoint count: recovery may have read from further back, and the noted sums
        # include the marks of earlier withdrawals.
        since = self._recovered.origins.withdrawn_since(self._store.checkpoint.recovery_offset or 0)
        check = waits.LogCheck(self._log.segment_size, sums.log, union([since]))
        for position, units in self._log.scan(self._log.begin, note.log_end):
            check.add(position, units)
            self._note_positions(position, units)
            self._look_for_parked(position, units, note.second, delivered)
            if has_to_fill:
                self._put_into_wheel(position, units, note.second, hours)
        if check.trouble is not None:
            self._reason = check.trouble
            return False
        if has_wheel:
            damaged = np.flatnonzero(hours & (sums.wheel != 0) & ~changed)
            if len(damaged):
                log.warning(
                    "timer_wheel_rebuilt", file=file_names.TIMER_WHEEL, hours=len(damaged), reason="checksums differ"
                )
        else:
            self._wheel.establish()
            log.warning("timer_wheel_rebuilt", file=file_names.TIMER_WHEEL, hours=HOURS, reason="the file was missing")
        self._log.use_sums(check.sums)
        return True

    def _look_for_parked(self, position: int, units: Units, second: int, delivered: Offsets) -> None:
        """Note the slots of the parked messages among some units. If a record behind the note delivered a parked
        message, a unit that is cut off now had brought the message back: the unit at hand is noted as superseded."""
        seconds = seconds_of(units)
        # The indexes are computed first: hardly any message is parked, so hardly any unit needs to be copied.
        at = np.flatnonzero((seconds > second) & waits.is_parked(units, seconds))
        if not len(at):
            return
        parked, seconds = units[at], seconds[at]
        hashes = parked["topic_hash"].astype(np.int32)
        is_done = waits.is_brought_back(parked, seconds, second, delivered)
        if is_done.any():
            self._log.superseded.add(position + at[is_done] * UNIT_SIZE)
            keys, _, counts = distinct_of(hashes[is_done])
            for key, count in zip(keys.tolist(), counts.tolist(), strict=True):
                self._parked_done[key] = self._parked_done.get(key, 0) + count
        far = ~is_done & (seconds > second + _NEAR_SECONDS)
        seconds, hashes = seconds[far], hashes[far]
        at = distinct_of(seconds << 32 | hashes.astype(np.uint32)).firsts
        self._parked.update(zip(seconds[at].tolist(), hashes[at].tolist(), strict=True))

    def _drop_before(self, position: int) -> None:
        """Forget and remove the files before a position. They have no noted checksums, since they were no longer
        needed, but the broker ended before it removed them."""
        paths = self._log.drop_before(position)
        try:
            for path in paths:
                self._store.files.remove(path)
        except OSError as error:
            log.warning("files_not_removed", first=paths[0], reason=str(error))

    def _check_earlier(self, note: TimerNote, *, has_wheel: bool) -> bool:
        """Do the work of `_check_files` with the note of an earlier version, which has no checksums of files."""
        if self._log.crc(note.log_end) != note.log_crc:
            self._reason = "the end of the timer log differs from what was written: its checksum is wrong"
            return False
        if has_wheel:
            self._take_back(note.log_end)
        self._log.truncate(note.log_end)
        if not has_wheel or not self._wheel.survey(note.second, note.log_end):
            self._rebuild_wheel(note.second)
            log.warning(
                "timer_wheel_rebuilt", file=file_names.TIMER_WHEEL, hours=HOURS, reason="not in line with the timer log"
            )
        self._sum_up()
        return True

    def _note_positions(self, position: int, units: Units) -> None:
        self._positions.note(position + np.arange(len(units)) * UNIT_SIZE, units)

    def _sum_up(self) -> None:
        """Compute the checksums of the log, for which none were noted, and note the positions of its units."""
        sums = LogSums(self._log.segment_size)
        for position, units in self._log.scan(self._log.begin, self._log.end):
            sums.add(position, units)
            self._note_positions(position, units)
        self._log.use_sums(sums)

    def _take_back(self, end: int) -> None:
        parts = list(self._log.scan(end, self._log.end))
        for position, units in reversed(parts):
            positions = position + np.arange(len(units)) * UNIT_SIZE
            self._wheel.take_back(seconds_of(units), positions, units["previous"].astype(np.int64))

    def _rebuild_wheel(self, second: int) -> dict[int, int]:
        """Rebuild the wheel from the log. Return the number of waiting messages by topic hash."""
        self._wheel.clear()
        waiting: dict[int, int] = {}
        for position, units in self._log.scan(self._log.begin, self._log.end):
            hashes = self._put_into_wheel(position, units, second, np.ones(HOURS, bool))
            self._look_for_parked(position, units, second, NO_OFFSETS)
            keys, _, counts = distinct_of(hashes)
            for key, count in zip(keys.tolist(), counts.tolist(), strict=True):
                waiting[key] = waiting.get(key, 0) + count
        self._wheel.establish()
        return waiting

    def _put_into_wheel(
        self, position: int, units: Units, second: int, hours: NDArray[np.bool_]
    ) -> NDArray[np.signedinteger]:
        """Put the units whose slots are in the given hours into the wheel. Return the topic hashes of those that stand
        for messages in slots of `second` or later."""
        seconds = seconds_of(units)
        # Units in past slots count, too, since they tell what became of a message. They do not if the slot is in use
        # for a later second: after a long stop the current second is far behind, and a slot may be nearly a whole turn
        # of the wheel ahead.
        known = (seconds >= second - SLOTS // 2) & (seconds < second + SLOTS)
        past = np.flatnonzero(known & (seconds < second))
        if len(past):
            known[past[self._wheel.is_taken_later(seconds[past])]] = False
        known &= (units["magic"] != NORMAL | WITHDRAWN) | (units["due_ms"] > 0)
        known &= hours[seconds % SLOTS // HOUR]
        if known.any():
            positions = (position + np.arange(len(units)) * UNIT_SIZE)[known]
            self._wheel.put(self._wheel.plan(seconds[known], positions))
        hashes: NDArray[np.signedinteger] = units["topic_hash"][known & waits.is_live(units, seconds, second)]
        return hashes

    # --- by RocketMQ's timercheck

    def _by_check(self, check: TimerCheck | None) -> Start | None:
        if check is None:
            self._reason = "RocketMQ had the store last, and config/timercheck, which has its progress, cannot be read"
            return None
        size = self._log.segment_size
        self._log.recover(max(self._log.begin, min(check.log_position, self._log.end) // size * size - size))
        second = max(waits.second_of(check), self._now_second - SLOTS // 2)
        begin, end = self._log.begin, self._log.end
        links = (waits.first_link(units, seconds_of(units), second) for _, units in self._log.scan(begin, end))
        if not waits.is_covering(check, begin, end, size, links):
            self._reason = f"the timer log, from {begin} to {end}, lacks units that config/timercheck refers to"
            return None
        waiting = self._rebuild_wheel(second)
        self._sum_up()
        offset = waits.enqueued_to(check, self._offset_behind_last())
        low, high = self._queue.min_offset, self._queue.next_offset
        offset = min(max(offset, low), high)
        log.info("timers_taken_over", read_ms=second * PRECISION_MS, queue_offset=offset, waiting=sum(waiting.values()))
        enqueued, enqueued_to = self._enqueued(offset)
        return Start(
            second=second,
            since=self._store.log.end,
            log_since=self._log.end,
            queue_offset=offset,
            waiting=waiting,
            found=self._found(self._now_second, StartFacts()),
            parked=frozenset(self._parked),
            enqueued=enqueued,
            enqueued_to=enqueued_to,
        )

    def _enqueued(self, queue_offset: int) -> tuple[Offsets, int]:
        """Return the physical offsets of the messages from a queue offset on that have units in the log, and the queue
        offset behind the last of them: RocketMQ's timercheck is up to a second behind the log. A message between them
        that was already due when it came has no unit, and may not have been delivered."""
        queue = self._queue
        first = queue.unit(queue_offset)
        if first is None:
            return NO_OFFSETS, 0
        parts = (units["physical_offset"] for _, units in self._log.scan(self._log.begin, self._log.end))
        found = union([part[part >= first[0]].astype(np.int64) for part in parts])
        if not len(found):
            return NO_OFFSETS, 0
        last = int(found[-1])
        return found, queue.first_where(queue_offset, queue.next_offset, lambda physical, size, code: physical > last)

    def _offset_behind_last(self) -> int | None:
        """Return the queue offset behind the message of the log's last unit; None if that message is not in the timer
        topic, or if the log has no unit."""
        last = self._log.last()
        if last is None:
            return None
        message = self._store.message_at(int(last["physical_offset"]), int(last["record_size"]))
        return message.queue_offset + 1 if message is not None and message.topic == TIMER_TOPIC else None

    # --- by the queue, as the last resort

    def _by_queue(self) -> Start:
        log.warning("timers_rebuilt", reason=f"{self._reason}: the whole commitlog is read")
        self._store.forget_note("timers")
        self._log.remove_all()
        self._positions.clear()
        self._wheel.clear()
        self._wheel.establish()
        origins = Origins()
        origins.read(self._store.log, self._store.log.begin, self._recovered.start)
        found = self._found(self._now_second, StartFacts(), origins)
        return Start(
            second=self._now_second,
            since=self._recovered.end,
            log_since=0,
            queue_offset=self._queue.min_offset,
            waiting={},
            found=found,
        )
