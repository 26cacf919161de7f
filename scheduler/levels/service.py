"""Level queues: messages with a delay level wait in SCHEDULE_TOPIC_XXXX, in one queue for each level, and are delivered
to their real topics when they are due.

    queue of level n:  n - 1 of SCHEDULE_TOPIC_XXXX; the tags code of each consume-queue unit is the deliver time,
                       ms since the epoch, which is also the prepared-transaction offset of the record
    progress:          config/delayOffset.json, {"offsetTable": {"<level>": next queue offset to deliver}}, for
                       RocketMQ and its tools; and the checkpoint's note (see `runs`), which makes recovery exact

Delivery copies a message into a record of its real topic and queue (properties REAL_TOPIC, REAL_QID). The properties
are unchanged; the prepared-transaction offset of the copy, otherwise unused, names the record that scheduled it.

Nothing polls: the heads of the queues determine when the next step is due, and an append to a queue where nothing waits
calls `wake`.
`step` does a bounded amount of work and returns the time of the next step; its caller owns the timer. `levels.delivery`
has the two paths by which a batch is delivered.

Behaves like apache/rocketmq store/schedule/ScheduleMessageService.java (4.9.7).

Keeps invariants 7 and 17 of ARCHITECTURE.md.
"""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import structlog

from duemq.protocol.records.record import StoredMessage
from duemq.protocol.topics import SCHEDULE_TOPIC
from duemq.scheduler.clock_watch import TOLERANCE_MS, ClockWatch
from duemq.scheduler.delivery.batches import Batches
from duemq.scheduler.levels import runs
from duemq.scheduler.levels.delay_offsets import DelayOffsets
from duemq.scheduler.levels.deliver_times import LevelTimes
from duemq.scheduler.levels.delivery import REFUSED_RETRY_MS, DeliveryConfig, LevelDelivery
from duemq.scheduler.levels.level import Level, OpenRun
from duemq.scheduler.levels.runs import Note, Run, Seen
from duemq.scheduler.levels.table import DelayLevels, queue_id_of
from duemq.scheduler.timers.index.sorted_offsets import is_among
from duemq.scheduler.waiting import is_message, is_passed, runs_of_table
from duemq.storage.budget import Budget
from duemq.storage.clock import Moment
from duemq.storage.current import Current
from duemq.storage.durability.checkpoint import Checkpoint
from duemq.storage.durability.recovery import Recovered
from duemq.storage.errors import NotInMemory
from duemq.storage.log.origins import Origins
from duemq.storage.queues.consume_queue import DELIVERED_SIZE, MARK_SIZES, WITHDRAWN_SIZE, ConsumeQueue
from duemq.storage.queues.extension import EXT_ADDRESS_MAX
from duemq.storage.queues.pull import ColdRead, ReadCold, patiently
from duemq.storage.store import MessageStore

if TYPE_CHECKING:
    from numpy.typing import NDArray

log = structlog.get_logger(__name__)

NAME: Final = "levels"
"""The name of the checkpoint's note."""
WARN_AGAIN_SECONDS: Final = 60.0
_SETTLE_UNITS: Final = 65_536
_LIMITED_UNITS: Final = 64
"""Number of units that are looked at in one part if the record of each may have to be read."""
_UNSEEN_MS: Final = 2000
"""If the wall clock is ahead of its last reading by this much, in ms, when a message arrives, the levels read it
again."""
_MAX_UNNOTED_MS: Final = 60_000
"""Most ms between two notes of the clock and the end of the commitlog by a running broker that stores messages."""
_MOST_RUNS: Final = 1000
"""Most runs of a level that a start distinguishes, since each step looks at each run."""
_HAND_OVER_UNITS: Final = 4096
MAX_HANDED_OVER: Final = 200_000
"""Most messages that are marked for Apache's broker at a clean stop: each needs memory until the store is closed."""
_TOO_MANY: Final = "too many messages were delivered before earlier ones; Apache's broker would deliver some again"


def reached(checkpoint: Checkpoint, saved: DelayOffsets) -> dict[int, int]:
    """Return the queue offset up to which each level was read, by level, according to the checkpoint, or to
    delayOffset.json (`saved`) if RocketMQ had the store last. Empty if that source has none."""
    note = runs.decode(checkpoint.notes.get(NAME, b"")) if not checkpoint.is_foreign else None
    if note is not None:
        return {level: max(run.cursor for run in found) for level, found in note.runs.items()}
    return dict(saved.offsets) if checkpoint.is_foreign else {}


class LevelQueues:
    """Delivers the messages of all levels."""

    def __init__(
        self,
        store: MessageStore,
        saved: DelayOffsets,
        table: DelayLevels,
        recovered: Recovered,
        now: Moment,
        *,
        config: Current[DeliveryConfig] | None = None,
        is_awaited: bool = False,
        read_cold: ReadCold | None = None,
        wake: Callable[[], None] = lambda: None,
        rules: Note | None = None,
    ) -> None:
        """Find out the progress of each level. `recovered`: the result of opening the store. `is_awaited`: whether a
        delivery is a success only after `note_flushed`. `read_cold`: see `LevelDelivery`. `wake`: called when something
        may be due, or is to be tried again, before the time that `step` returned. `rules`: only for a rebuilt store,
        all of whose deliveries `recovered` has found: the former note, which tells which messages follow which table
        and clock; its cursors do not count.

        If only duemq wrote the store, the progress is exact, from the checkpoint's note and the deliveries that
        recovery read behind it. Otherwise it comes from delayOffset.json, which may be some seconds behind: messages
        are then delivered twice, as by RocketMQ.
        """
        self._store = store
        self._saved = saved
        self._watch = ClockWatch(now)
        self._jump_ms = 0
        """Change of the wall clock, in ms, that the levels do not follow yet."""
        self._seen_end = store.log.end
        """The end of the commitlog at the last reading of the clock that found no change: records before it were stored
        before any change that is found later."""
        self._seen = now
        """The last reading of the clock, with both times."""
        self._is_awaited = is_awaited
        self._wake = wake
        self._batches = Batches(store)
        self._times = LevelTimes(store, table)
        self.delivery = LevelDelivery(
            store,
            self._batches,
            self._times,
            config or Current(DeliveryConfig()),
            is_awaited=is_awaited,
            read_cold=read_cold,
            on_ready=wake,
        )
        self.levels: dict[int, Level] = {}
        self._turn = 0
        self._sampled_at = now.monotonic
        self._wants_checkpoint = False
        self._handed_over: dict[int, int] | None = None
        """By level, the queue offset up to which it has been handed over (`hand_over_next`); None before that
        begins."""
        self._marked = 0
        """Number of delivered messages that were marked for handing over."""
        self._trouble = ""
        """Why a read of the last step failed; empty if none did."""
        self._saved_table: dict[str, Any] = {}
        self._saved_at = now.monotonic
        self._noted_table: dict[str, Any] = {}
        """The progress at the last note, for the checkpoint that is being made."""
        self._table_crc = runs.table_crc(table.text)
        """Checksum of the present table, from which new messages get their deliver times."""
        self._load(saved.offsets, recovered, now, rules)

    @property
    def table(self) -> DelayLevels:
        """The present table of levels."""
        return self._times.table

    # --- start

    def _load(self, saved: Mapping[int, int], recovered: Recovered, now: Moment, rules: Note | None) -> None:
        note = runs.decode(recovered.notes.get(NAME, b"")) if not recovered.is_foreign else None
        if rules is not None:
            note, self._table_crc = runs.from_start(rules), rules.table_crc
        known = [queue_id + 1 for queue_id in self._store.queues.get(SCHEDULE_TOPIC, {})]
        for number in sorted({*range(1, self.table.maximum + 1), *known}):
            queue = self._store.ensure_queue(SCHEDULE_TOPIC, queue_id_of(number))
            level = Level(number, queue, self._runs_of(number, queue, note, saved.get(number, 0)))
            self.levels[number] = level
            if note is None or number not in note.runs:
                self._find_runs(level)
        delivered = recovered.origins.delivered + (note.delivered if note is not None else array("q"))
        has_more = recovered.start > self._store.log.begin and any(
            each.queue.next_offset for each in self.levels.values()
        )
        if note is None and not saved and has_more:
            # Neither file has the progress. duemq's deliveries are known from their records; RocketMQ's are repeated.
            path = self._saved.file.path
            log.warning("delay_offsets_missing", reason=f"{path} has no offsets: the whole commitlog is read instead")
            origins = Origins()
            origins.read(self._store.log, self._store.log.begin, recovered.start)
            delivered += origins.delivered
        self._pass_done(delivered, recovered.origins.withdrawn)
        shift = self._follow_meanwhile(now, note.seen if note is not None else None)
        is_new_table = note is None or note.table_crc != self._table_crc
        for level in self.levels.values():
            for run in level.runs:
                run.shift_ms += shift
                if is_new_table and level.number <= self.table.maximum:
                    limit = self.table.delay_ms(level.number)
                    run.delay_limit_ms = min(limit, run.delay_limit_ms or limit)
            if is_new_table or level.runs[-1].shift_ms:
                level.split(level.queue.next_offset)
            level.drop_finished()
            self._times.look(level, now.wall_ms)
            if note is not None and saved.get(level.number, level.offset) > level.offset:
                log.warning(
                    "delay_offset_ignored", delay_level=level.number, saved=saved[level.number], delivered=level.offset
                )
            level.queue.watch(self._arrived)
        for physical in recovered.origins.withdrawn:
            # The marks of their units may not have been durable, and a mark that is read now may be only in the page
            # cache: the last process may have ended in the middle of a checkpoint. The queue may also have been
            # rebuilt: then a unit that a cursor has passed has no mark either, and would count as delivered.
            message = self._store.message_at(physical)
            if message is not None and message.topic == SCHEDULE_TOPIC and not self._has_gone_out(message):
                self.withdraw(message)
        for level in self.levels.values():
            self.delivery.count_withdrawn(level)

    @staticmethod
    def _runs_of(number: int, queue: ConsumeQueue, note: Note | None, saved: int) -> list[OpenRun]:
        found = note.runs.get(number, [Run(0, 0)]) if note is not None else runs_of_table({number: saved})[number]
        low, high = queue.min_offset, queue.next_offset
        result = []
        for run in found:
            start, cursor = (min(max(offset, low), high) for offset in (run.start, run.cursor))
            if cursor != run.cursor:
                log.warning("level_offset_corrected", delay_level=number, offset=run.cursor, corrected=cursor)
            result.append(OpenRun(start, cursor, run.shift_ms, run.limit_ms))
        return result

    def _find_runs(self, level: Level) -> None:
        """Find the runs of a level for which none were noted: another run begins wherever the deliver times go
        down."""
        offset, latest = level.runs[0].cursor, 0
        while len(units := self._batches.read(level.queue, offset, _SETTLE_UNITS)):
            codes = units["tags_code"].astype(np.int64)
            known = np.flatnonzero(codes > EXT_ADDRESS_MAX)
            times = np.concatenate(([latest], codes[known]))
            for at in known[times[1:] < times[:-1]].tolist():
                if len(level.runs) == _MOST_RUNS:
                    log.warning("level_not_in_order", delay_level=level.number, runs=_MOST_RUNS, offset=offset + at)
                    return
                level.split(offset + at)
            offset, latest = offset + len(units), int(times[-1])

    def _pass_done(self, delivered: array[int], withdrawn: array[int]) -> None:
        """Move each cursor over messages that recovery found delivered or withdrawn, up to the first message that
        waits. Such messages behind it are passed over later. The arguments have physical offsets of the messages'
        records."""
        gone = np.sort(np.frombuffer(withdrawn, np.int64))
        if not delivered and not len(gone):
            return
        self._batches.set_delivered(np.frombuffer(delivered, np.int64))
        for level in self.levels.values():
            for run in level.runs:
                end = level.end_of(run)
                while run.cursor < end:
                    units = self._batches.read(level.queue, run.cursor, min(_SETTLE_UNITS, end - run.cursor))
                    done = self._batches.is_delivered(units)
                    done |= is_among(units["physical_offset"].astype(np.int64), gone)
                    count = len(done) if done.all() else int(np.argmin(done))
                    run.cursor += count
                    if count < len(done) or not count:
                        break
        if self._first_waiting() >= self._batches.delivered_end:
            self._batches.set_delivered(np.empty(0, np.int64))
        elif len(delivered) > _SETTLE_UNITS:
            self._batches.set_delivered(self._delivered_ahead())

    def _delivered_ahead(self) -> NDArray[np.int64]:
        """Return the physical offsets of messages that recovery found delivered and no cursor has passed."""
        found = [np.empty(0, np.int64)]
        for level in self.levels.values():
            for run in level.runs:
                offset, end = run.cursor, level.end_of(run)
                while offset < end:
                    units = self._batches.read(level.queue, offset, min(_SETTLE_UNITS, end - offset))
                    if not len(units):
                        break
                    found.append(units["physical_offset"][self._batches.is_delivered(units)].astype(np.int64))
                    offset += len(units)
        return np.concatenate(found)

    def _first_waiting(self) -> int:
        """Return the physical offset of the first waiting record; if none waits, one behind all records that recovery
        found delivered; 0 if recovery found none delivered."""
        if not self._batches.delivered_end:
            return 0
        heads = [level.queue.unit(run.cursor) for level in self.levels.values() for run in level.runs]
        # The cursor may be behind a refused put, whose range may include messages that were found delivered.
        heads += [level.queue.unit(put.start) for level in self.levels.values() for put in level.puts]
        return min((unit[0] for unit in heads if unit is not None), default=self._batches.delivered_end)

    def _follow_meanwhile(self, now: Moment, seen: Seen | None) -> int:
        """Follow a clock that was set since its last noted reading, before or after the process ended. Return a further
        shift, in ms, that all runs get."""
        jump = seen.jump_ms(now) if seen is not None else None
        if seen is None or jump is None:
            self._follow_what_was_stored(seen)
            return self._set_back_meanwhile(now.wall_ms, seen)
        if abs(jump) >= TOLERANCE_MS:
            # Messages that were stored since then may be from before or after the change, and none may be delivered
            # early. Where both are possible, they count as stored before the change if the clock was set forward, and
            # as stored after it if the clock was set back.
            since_ms = min(now.wall_ms - jump - seen.wall_ms, _MAX_UNNOTED_MS)
            latest = seen.wall_ms + since_ms + min(jump, 0)

            def is_after(stored_ms: int) -> bool:
                return stored_ms > latest if jump > 0 else stored_ms <= latest

            is_stored = self._store.log.end > seen.end and is_after(self._store.appender.last_store_timestamp)
            log.warning("clock_set_forward" if jump > 0 else "clock_set_back", ms=abs(jump), while_running=is_stored)
            for level in self.levels.values():
                self._shift(level, self._times.first_after(level, seen.end, is_after), jump)
            self._wants_checkpoint = True
        return 0

    def _follow_what_was_stored(self, seen: Seen | None) -> None:
        """Follow a clock that was set back after its last noted reading and before the process ended: the newest record
        then has an earlier store time than that reading."""
        if seen is None or self._store.log.end <= seen.end:
            return
        stored_ms = self._store.appender.last_store_timestamp
        jump = stored_ms - seen.wall_ms
        if jump > -TOLERANCE_MS:
            return
        log.warning("clock_set_back", ms=-jump, while_running=True)
        for level in self.levels.values():
            boundary = self._times.first_after(
                level, seen.end, lambda each: abs(each - stored_ms) <= abs(each - seen.wall_ms)
            )
            self._shift(level, boundary, jump)

    @staticmethod
    def _shift(level: Level, boundary: int, jump: int) -> None:
        """Shift the deliver times of the messages before the queue offset `boundary`, which were stored before the
        clock was set by `jump` ms: so they keep their delays."""
        last_shift = 0
        for run in level.runs:
            if run.start < boundary:
                run.shift_ms += jump
                last_shift = run.shift_ms
        if last_shift:
            level.split(boundary)

    def _set_back_meanwhile(self, now_ms: int, seen: Seen | None) -> int:
        """Return the shift, in ms, for a clock that was set back while the broker was down; 0 if it was not. The clock
        was set back by at least that much, since neither a record nor a reading of the clock can be from the future.
        Records before the last reading do not count, since the runs already include changes of the clock since then."""
        newest = self._store.appender.last_store_timestamp
        if seen is not None and self._store.log.end <= seen.end:
            newest = seen.wall_ms
        ahead = newest - now_ms
        if ahead < TOLERANCE_MS:
            return 0
        log.warning("clock_set_back", ms=ahead, while_running=False)
        return -ahead

    # --- arriving messages

    def _arrived(self, queue: ConsumeQueue) -> None:
        if not -TOLERANCE_MS < self._store.appender.store_timestamp - self._seen.wall_ms < _UNSEEN_MS:
            self._wake()  # the clock may have been set, and may be set right again before it is read the next time
        level = self.levels[queue.queue_id + 1]
        run = level.runs[-1]
        if run.due_ms is None:
            now_ms = self._store.appender.store_timestamp
            try:
                run.due_ms = self._times.head(level, run, now_ms)
            except (OSError, NotInMemory):
                run.due_ms = now_ms  # the step tries again, and logs a failure
            self._wake()
        # The unit is put into the file immediately: if RocketMQ took over this store after a crash, it would rebuild
        # the unit before it knows its levels.
        with contextlib.suppress(OSError):  # the next checkpoint tries again, and logs a failure
            queue.write_tail()

    def set_table(self, table: DelayLevels, now_ms: int) -> None:
        """Change the table of levels. Waiting messages keep the deliver times that were promised for them."""
        old, self._times.table = self.table, table
        self._table_crc = runs.table_crc(table.text)
        for number in range(1, table.maximum + 1):
            level = self.levels.get(number)
            if level is None:
                queue = self._store.ensure_queue(SCHEDULE_TOPIC, queue_id_of(number))
                level = self.levels[number] = Level(number, queue, [OpenRun(queue.min_offset, queue.min_offset)])
                queue.watch(self._arrived)
            elif number > old.maximum or table.delay_ms(number) < old.delay_ms(number):
                # Messages that wait in a level that was not in the table had a delay that the new table does not have.
                level.split(level.queue.next_offset)
            self._times.forget(level, now_ms)
        log.info("delay_levels_changed", old=old.text, new=table.text)
        self._wants_checkpoint = True
        self._wake()

    # --- time

    def watch_clock(self, now: Moment) -> None:
        """Follow the wall clock if it was set since its last reading: messages that were stored before keep their
        delays. Raises NotInMemory, OSError; the next call then starts over."""
        self._jump_ms += self._watch.jump_ms(now)
        self._seen = now
        if not self._jump_ms:
            self._seen_end = self._store.log.end
            return
        # All reads come first: if one fails, nothing has changed, and the next call starts over.
        jump = self._jump_ms

        def is_after(stored_ms: int) -> bool:
            return abs(stored_ms - now.wall_ms) <= abs(stored_ms - (now.wall_ms - jump))

        boundaries = [
            (level, self._times.first_after(level, self._seen_end, is_after)) for level in self.levels.values()
        ]
        self._jump_ms, self._seen_end = 0, self._store.log.end
        log.warning("clock_set_forward" if jump > 0 else "clock_set_back", ms=abs(jump), while_running=True)
        for level, boundary in boundaries:
            self._shift(level, boundary, jump)
            level.trouble = "the clock was set"
            level.drop_finished()
            self._times.forget(level, now.wall_ms)
        self._wants_checkpoint = True

    @property
    def next_due_ms(self) -> int | None:
        """The time of the next work, ms since the epoch; None if there is none until a message arrives or a result
        comes."""
        times = [time_ms for level in self.levels.values() for time_ms in self.delivery.next_times(level)]
        return min(times, default=None)

    # --- delivery

    def step(self, now: Moment, budget: Budget) -> int | None:
        """Deliver due messages until the budget is spent. Return the time of the next call, ms since the epoch; None if
        there is nothing to do until a message arrives or a result comes. Raises NotInMemory."""
        try:
            self.watch_clock(now)
            while self._round(now.wall_ms, budget):
                if budget.is_spent:
                    return now.wall_ms
        except OSError as error:
            if self._trouble != str(error):
                log.warning("levels_not_read", reason=str(error))
            self._trouble = str(error)
            return now.wall_ms + REFUSED_RETRY_MS
        self._trouble = ""
        return self.next_due_ms

    def _round(self, now_ms: int, budget: Budget) -> bool:
        """Deliver one batch of each level that has due messages, beginning behind the level that was last. Return
        whether any was tried."""
        levels = list(self.levels.values())
        any_tried = False
        for _ in levels:
            self._turn = (self._turn + 1) % len(levels)
            if self.delivery.deliver(levels[self._turn], now_ms):
                any_tried = True
                if budget.is_spent:
                    break
        return any_tried

    # --- results

    def note_flushed(self, position: int) -> None:
        """Note that the commitlog is durable up to a physical offset: puts before it are a SUCCESS."""
        if not self._is_awaited:
            return
        settled = [self.delivery.note_flushed(level, position) for level in self.levels.values()]
        if any(settled):
            self._wake()

    # --- withdrawing

    def is_waiting(self, message: StoredMessage) -> bool | None:
        """Whether a stored message of a level is still to be delivered; None if it was withdrawn. Raises NotInMemory,
        OSError."""
        size = self._size_or_mark(message)
        if size == WITHDRAWN_SIZE:
            return None
        if size is None or size == DELIVERED_SIZE or self._batches.delivered(message.physical_offset):
            return False
        return not is_passed(self.levels[message.queue_id + 1].appended(), message.queue_offset)

    def _has_gone_out(self, message: StoredMessage) -> bool:
        """Whether a stored message of a level has no unit, or was delivered according to its unit's mark or the records
        that recovery read. Cursors are not considered."""
        size = self._size_or_mark(message)
        return size is None or size == DELIVERED_SIZE or self._batches.delivered(message.physical_offset)

    def _size_or_mark(self, message: StoredMessage) -> int | None:
        """Return the size in the unit of a stored message, or the mark in its place; None if the queue of its level has
        no unit of the message."""
        level = self.levels.get(message.queue_id + 1)
        unit = level.queue.unit(message.queue_offset) if level is not None else None
        return unit[1] if unit is not None and unit[0] == message.physical_offset else None

    def withdraw(self, message: StoredMessage) -> None:
        """Withdraw a waiting message. Raises OSError."""
        level = self.levels[message.queue_id + 1]
        self._store.mark(level.queue, message.queue_offset, WITHDRAWN_SIZE)
        level.withdrawn += 1

    def waiting_before(
        self, limit: int, now_ms: int, after: tuple[int, int] = (0, -1)
    ) -> Iterator[tuple[StoredMessage, int] | ColdRead | None]:
        """Iterate over the waiting messages whose records lie before the physical offset `limit`, each with its present
        deliver time (ms since the epoch), in the order of levels and queue offsets, from behind `after` (level, queue
        offset). Yields None now and then, so that other work can be done, and reads to be made before the next step
        (`patiently`)."""
        for number, level in sorted(self.levels.items()):
            if number < after[0]:
                continue
            offset = after[1] + 1 if number == after[0] else 0
            while (found := level.waiting_from(offset)) is not None:
                run, offset = found
                unit = yield from patiently(partial(level.queue.unit, offset))
                if unit is None or unit[0] >= limit:
                    break
                message = None
                if unit[1] not in MARK_SIZES:
                    message = yield from patiently(partial(self._store.message_at, unit[0], unit[1]))
                is_waiting = message is not None and (yield from patiently(partial(self.is_waiting, message)))
                if message is not None and is_waiting:
                    yield message, (yield from patiently(partial(self._times.due_ms, run, unit, now_ms)))
                else:
                    yield None
                offset += 1

    def deliver_times(self, now_ms: int) -> Iterator[tuple[int, int, NDArray[np.int64]] | ColdRead]:
        """Iterate over the present deliver times of waiting messages, ms since the epoch. Yields parts of bounded size,
        as level, last queue offset that was looked at, and times; and reads to be made before the next step
        (`patiently`)."""
        for number, level in sorted(self.levels.items()):
            offset = 0
            while (found := level.waiting_from(offset)) is not None:
                run, offset = found
                most = _SETTLE_UNITS if run.delay_limit_ms is None else _LIMITED_UNITS
                look = partial(self._batches.read, level.queue, offset, min(most, level.end_of(run) - offset))
                units = yield from patiently(look)
                if not len(units):
                    break
                waits = is_message(units["size"]) & ~self._batches.is_delivered(units)
                waits &= ~is_passed(level.appended(), offset + np.arange(len(units)))
                offset += len(units)
                kept = units[waits & (units["tags_code"] > EXT_ADDRESS_MAX)]
                due = kept["tags_code"].astype(np.int64) + run.shift_ms
                if run.delay_limit_ms is not None:
                    for at, unit in enumerate(kept.tolist()):
                        due[at] = yield from patiently(partial(self._times.due_ms, run, unit, now_ms))
                yield number, offset - 1, due

    # --- progress: see `storage.durability.owner.CheckpointPart`

    @property
    def wants_checkpoint(self) -> bool:
        """Whether the table or the clock was set since the last note: a start after a crash would use the former
        table and clock."""
        return self._wants_checkpoint

    def note(self) -> bytes:
        """Return the note for a checkpoint, in the format of `runs`."""
        delivered = self._batches.delivered_from(self._first_waiting())  # comes first, as it may read
        self._wants_checkpoint = False
        self._noted_table = self._saved.table_of({each.number: each.appended_offset for each in self.levels.values()})
        levels = {level.number: level.appended() for level in self.levels.values()}
        # The runs' shifts refer to this reading: to the clock before a jump that is still to be followed.
        wall_ms, monotonic, boot_id = self._seen
        seen = Seen(self._seen_end, wall_ms - self._jump_ms, round(monotonic * 1000), boot_id)
        return runs.encode(self._table_crc, levels, delivered, seen)

    def is_noted(self, checkpoint: Checkpoint) -> bool:
        """Whether a checkpoint has the present table, so that after a crash no waiting message would follow another
        table."""
        note = runs.decode(checkpoint.notes.get(NAME, b""))
        return not self._wants_checkpoint and note is not None and note.table_crc == self._table_crc

    def begin_write(self) -> None:
        """Do nothing: units are in their files already."""

    def write_next(self, now: Moment) -> bool:
        """Return False: there is nothing to write."""
        return False

    def plan_sync(self, now: Moment, *, is_last: bool) -> Callable[[], None]:
        """Return the work that saves the progress of the last note for RocketMQ, if that has changed and saving is due.
        It is done once all records that were appended before the note are durable. It raises OSError."""
        table = self._noted_table
        is_due = is_last or now.monotonic - self._saved_at >= self.delivery.config.save_interval
        if table == self._saved_table or not is_due:
            return lambda: None
        at = now.monotonic

        def save() -> None:
            self._saved.file.write(table)
            self._saved_table, self._saved_at = table, at

        return save

    def plan_after(self) -> Callable[[], None]:
        """Return the work to do once a checkpoint is durable: none for the levels."""
        return lambda: None

    def needed_from(self) -> int:
        """Return the end of the commitlog: for the levels, recovery reads nothing before the checkpoint's recovery
        offset."""
        return self._store.log.end

    def keep_next(self, limit: int, now: Moment) -> None:
        """Do nothing: `timers.changes` also keeps messages that wait in levels."""

    def expire_next(self) -> None:
        """Wake the levels if files of their consume queues have expired, so that the next step cuts the levels to the
        bounds of the queues. The levels have no files of their own."""
        if any(level.low != level.queue.min_offset for level in self.levels.values()):
            self._wake()

    def to_json(self) -> dict[str, Any]:
        """Return the present progress in the form of delayOffset.json and GET_ALL_DELAY_OFFSET."""
        return self._saved.table_of({level.number: level.offset for level in self.levels.values()})

    # --- RocketMQ

    def hand_over_next(self, *, most: int = MAX_HANDED_OVER) -> bool:
        """At a clean stop, do a part of the work that allows Apache's broker to continue with the files. Return whether
        there is more. Apache's broker knows only one offset for each level, before which all messages are delivered. So
        messages that were delivered behind it are marked, at most `most` in all. Raises NotInMemory, OSError; duemq's
        next start is exact even then."""
        if self._handed_over is None:
            self._handed_over = {level.number: level.appended_offset for level in self.levels.values()}
        for number, offset in self._handed_over.items():
            level = self.levels[number]
            appended = level.appended()
            if offset >= level.queue.next_offset or (len(appended) == 1 and not self._batches.delivered_end):
                continue
            units = self._batches.read(level.queue, offset, _HAND_OVER_UNITS)
            offsets = offset + np.arange(len(units))
            done = is_passed(appended, offsets) | self._batches.is_delivered(units)
            found = offsets[done & is_message(units["size"])].tolist()
            self._marked += len(found)
            if self._marked > most:
                log.warning("levels_not_handed_over", delay_level=number, reason=_TOO_MANY)
                return False
            for each in found:
                self._store.mark(level.queue, each, DELIVERED_SIZE)
            self._handed_over[number] = offset + len(units) if len(units) else level.queue.next_offset
            return True
        return False

    # --- for operators

    def report(self, now: Moment) -> None:
        """Compute rates, and log levels that are late, with the reason. Must be called about once a second."""
        now_ms, monotonic, _ = now
        if self._jump_ms or self._watch.has_jumped(now):
            self._wake()
            return  # until a step has followed the change of the clock, lateness would be wrong
        self._seen_end, self._seen = self._store.log.end, now  # the next step may be far ahead
        seconds = max(monotonic - self._sampled_at, 0.001)
        self._sampled_at = monotonic
        for level in self.levels.values():
            level.rate = (level.delivered - level.sampled) / seconds
            level.sampled = level.delivered
            late_ms = self.lateness_ms(level, now_ms)
            if late_ms < self.delivery.config.warn_ms:
                level.warned_at = None
            elif level.warned_at is None or monotonic - level.warned_at >= WARN_AGAIN_SECONDS:
                level.warned_at = monotonic
                log.warning(
                    "level_late",
                    delay_level=level.number,
                    late_ms=late_ms,
                    waiting=level.waiting,
                    delivered_per_second=round(level.rate),
                    reason=level.trouble or "many messages are due at once",
                )

    def describe(self, level: Level, now_ms: int) -> str:
        """Return one line for tools: the number of waiting messages, the time when the first is due (ms since the
        epoch; - if there is none), its lateness in ms, the lateness of the last delivery in ms, messages delivered per
        second, and the numbers delivered and skipped since start."""
        late_ms = self.lateness_ms(level, now_ms)
        return (
            f"pending={level.waiting} nextDue={level.due_ms if level.due_ms is not None else '-'} "
            f"lateMillis={late_ms} lastLateMillis={level.late_by_ms} deliveredTps={level.rate:.1f} "
            f"delivered={level.delivered} skipped={level.skipped}"
        )

    @staticmethod
    def lateness_ms(level: Level, now_ms: int) -> int:
        """Return for how many ms the first undelivered message of a level has been due; 0 if none is due."""
        since_ms = level.late_since_ms
        return max(0, now_ms - since_ms) if since_ms is not None else 0
