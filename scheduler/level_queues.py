"""Level queues: messages with a delay level wait in SCHEDULE_TOPIC_XXXX, one queue a level, and are delivered into
their topic when they are due.

    queue of level n:  n - 1 of SCHEDULE_TOPIC_XXXX; the tags code of each consume-queue unit is the deliver time,
                       ms since the epoch, which the record has as well, in its prepared-transaction offset
    progress:          config/delayOffset.json, {"offsetTable": {"<level>": next queue offset to deliver}}, for
                       RocketMQ and its tools, and the checkpoint's note (see `runs`), by which recovery knows exactly

Delivery copies a message into a record of its real topic and queue (properties REAL_TOPIC, REAL_QID) with its
properties as they are; the prepared-transaction offset of that record, unused otherwise, names the record that
scheduled it.

Nothing polls: the head of each queue says when to wake, and an append to an empty queue says so too (`on_earlier`).
`step` does a bounded amount and gives the time of the next one; whoever calls it owns the timer. `level_delivery` has
the two paths by which a batch is delivered.

Behaviour after apache/rocketmq store/schedule/ScheduleMessageService.java (4.9.7).
"""

from __future__ import annotations

import contextlib
import time
from array import array
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import structlog

from protocol.record import StoredMessage
from scheduler import runs
from scheduler.batches import Batches
from scheduler.clock_watch import TOLERANCE_MS, ClockWatch
from scheduler.delay_levels import DelayLevels, queue_id_of
from scheduler.level import Level, OpenRun
from scheduler.level_delivery import DeliveryConfig, LevelDelivery
from scheduler.level_times import LevelTimes
from scheduler.runs import Note, Run
from storage.clock import Clock
from storage.config_file import ConfigFile
from storage.consume_queue import SCHEDULE_TOPIC, WITHDRAWN_SIZE, ConsumeQueue
from storage.errors import StoreFormatError
from storage.pull import EXT_ADDRESS_MAX, ReadCold
from storage.recovery import Recovered
from storage.store import MessageStore

if TYPE_CHECKING:
    from numpy.typing import NDArray

log = structlog.get_logger(__name__)

SLICE_SECONDS: Final = 0.002
"""How long one step goes on delivering."""
WARN_AGAIN_SECONDS: Final = 60.0
_SETTLE_UNITS: Final = 65_536

DurableCallback = Callable[[int, Callable[[], None]], None]
"""Calls back when the commitlog is durable up to a physical offset."""


class LevelQueues:
    """Delivers the messages of all levels."""

    def __init__(
        self,
        store: MessageStore,
        file: ConfigFile,
        clock: Clock,
        table: DelayLevels,
        config: DeliveryConfig | None = None,
        when_durable: DurableCallback | None = None,
        read_cold: ReadCold | None = None,
    ) -> None:
        self._store = store
        self._file = file
        self._clock = clock
        self._watch = ClockWatch(clock)
        self._when_durable = when_durable
        self._batches = Batches(store)
        self._times = LevelTimes(store, clock, table)
        self.delivery = LevelDelivery(
            store,
            self._batches,
            self._times,
            config or DeliveryConfig(),
            is_awaited=when_durable is not None,
            read_cold=read_cold,
            on_ready=lambda: self.on_earlier(),  # noqa: PLW0108 (it is set later)
        )
        self.levels: dict[int, Level] = {}
        self._extra: dict[str, Any] = {}
        self._turn = 0
        self._sampled_at = clock.monotonic()
        self.on_earlier: Callable[[], None] = lambda: None
        """Called when something may be due, or have to be tried again, before everything that was waiting."""

        self.on_rules_changed: Callable[[], None] = lambda: None
        """Called when a crash from now on would need a checkpoint made after this: the table or the clock was set."""

    @property
    def table(self) -> DelayLevels:
        """The levels, as they are now."""
        return self._times.table

    # --- start

    def load(self, recovered: Recovered) -> None:
        """Find out how far each level is; `recovered` is what opening the store found. Raises StoreFormatError.

        Exactly, where only we wrote the store: by the checkpoint's note and the deliveries that recovery read behind
        it. Otherwise by delayOffset.json, which may be some seconds behind: then messages come twice, as RocketMQ's.
        """
        data = self._file.read()
        saved = self._saved_offsets(data.pop("offsetTable", None) or {})
        self._extra = data
        note = runs.decode(recovered.notes.get("levels", b"")) if not recovered.is_foreign else None
        known = [queue_id + 1 for queue_id in self._store.queues.get(SCHEDULE_TOPIC, {})]
        for number in sorted({*range(1, self.table.maximum + 1), *known}):
            queue = self._store.ensure_queue(SCHEDULE_TOPIC, queue_id_of(number))
            self.levels[number] = Level(number, queue, self._runs_of(number, queue, note, saved.get(number, 0)))
        self._pass_delivered(recovered.origins.delivered + recovered.origins.withdrawn)
        shift = self._set_back_meanwhile()
        is_new_table = note is None or note.table_crc != runs.table_crc(self.table.text)
        for level in self.levels.values():
            for run in level.runs:
                run.shift_ms += shift
                if is_new_table and level.number <= self.table.maximum:
                    run.delay_limit_ms = self.table.delay_ms(level.number)
            if is_new_table or level.runs[-1].shift_ms:
                level.split(level.queue.next_offset)
            level.settle()
            self._times.look(level)
            if note is not None and saved.get(level.number, level.offset) > level.offset:
                log.warning(
                    "delay_offset_ignored", delay_level=level.number, saved=saved[level.number], delivered=level.offset
                )
            level.queue.watch(self._arrived)
        for physical in recovered.origins.withdrawn:
            # Their units' marks may not have been durable.
            message = self._store.message_at(physical)
            if message is not None and message.topic == SCHEDULE_TOPIC and self.is_waiting(message):
                self.withdraw(message)
        self._store.notes["levels"] = self._note

    def _saved_offsets(self, table: dict[str, Any]) -> dict[int, int]:
        try:
            return {int(level): int(offset) for level, offset in table.items()}
        except (TypeError, ValueError):
            raise StoreFormatError(self._file.path, "offsetTable: levels and offsets are numbers") from None

    @staticmethod
    def _runs_of(number: int, queue: ConsumeQueue, note: Note | None, saved: int) -> list[OpenRun]:
        found = note.runs.get(number, [Run(0, 0)]) if note is not None else [Run(0, saved)]
        low, high = queue.min_offset, queue.next_offset
        result = []
        for run in found:
            start, cursor = (min(max(offset, low), high) for offset in (run.start, run.cursor))
            if cursor != run.cursor:
                log.warning("level_offset_corrected", delay_level=number, offset=run.cursor, corrected=cursor)
            result.append(OpenRun(start, cursor, run.shift_ms))
        return result

    def _pass_delivered(self, origins: array[int]) -> None:
        """Move the cursors over what recovery found delivered; what lies further ahead is passed over later."""
        if not origins:
            return
        self._batches.set_delivered(np.frombuffer(origins, np.int64))
        for level in self.levels.values():
            for run in level.runs:
                end = level.end_of(run)
                while run.cursor < end:
                    units = self._batches.read(level.queue, run.cursor, min(_SETTLE_UNITS, end - run.cursor))
                    done = self._batches.is_delivered(units)
                    count = len(done) if done.all() else int(np.argmin(done))
                    run.cursor += count
                    if count < len(done) or not count:
                        break
        heads = [level.queue.unit(run.cursor) for level in self.levels.values() for run in level.runs]
        if all(unit is None or unit[0] >= self._batches.delivered_end for unit in heads):
            self._batches.set_delivered(np.empty(0, np.int64))

    def _set_back_meanwhile(self) -> int:
        """By how much, at least, the clock was set back while the broker was down: no record can be of the future."""
        ahead = self._store.appender.last_store_timestamp - self._clock.now_ms()
        if ahead < TOLERANCE_MS:
            return 0
        log.warning("clock_set_back", ms=ahead, while_running=False)
        return -ahead

    # --- what comes in

    def _arrived(self, queue: ConsumeQueue) -> None:
        # Into the file at once: RocketMQ, were it to go on with this store after a crash, would make the unit anew, and
        # before it knows its levels.
        with contextlib.suppress(OSError):  # housekeeping will try again, and say so
            queue.write_tail()
        level = self.levels[queue.queue_id + 1]
        run = level.runs[-1]
        if run.due_ms is None:
            run.due_ms = self._times.head(level, run)
            self.on_earlier()

    def set_table(self, table: DelayLevels) -> None:
        """Change the levels. Messages that wait keep the time they were promised."""
        old, self._times.table = self.table, table
        for number in range(1, table.maximum + 1):
            level = self.levels.get(number)
            if level is None:
                queue = self._store.ensure_queue(SCHEDULE_TOPIC, queue_id_of(number))
                level = self.levels[number] = Level(number, queue, [OpenRun(queue.min_offset, queue.min_offset)])
                queue.watch(self._arrived)
            elif table.delay_ms(number) < old.delay_ms(old.cap(number)):
                level.split(level.queue.next_offset)
            self._times.look(level)
        log.info("delay_levels_changed", old=old.text, new=table.text)
        self.on_rules_changed()
        self.on_earlier()

    # --- time

    def _watch_clock(self, now_ms: int) -> None:
        jump = self._watch.jump_ms()
        if not jump:
            return
        log.warning("clock_set_forward" if jump > 0 else "clock_set_back", ms=abs(jump), while_running=True)
        for level in self.levels.values():
            boundary = self._times.first_after(level, now_ms, jump)
            last_shift = 0
            for run in level.runs:
                if run.start < boundary:
                    run.shift_ms += jump
                    last_shift = run.shift_ms
            if last_shift:
                level.split(boundary)
            level.trouble = "the clock was set"
            level.settle()
            self._times.look(level)
        self.on_rules_changed()

    @property
    def next_due_ms(self) -> int | None:
        """When something has to be done next, ms since the epoch; None when nothing waits but for a result."""
        times = [time_ms for level in self.levels.values() for time_ms in self.delivery.next_times(level)]
        return min(times, default=None)

    # --- delivery

    def step(self) -> int | None:
        """Deliver what is due, for a few ms; gives when to call again, ms since the epoch, or None for "when a message
        or a result comes"."""
        now_ms = self._clock.now_ms()
        self._watch_clock(now_ms)
        until = time.perf_counter() + SLICE_SECONDS
        position = self._store.log.end
        try:
            while self._round(now_ms, until):
                if time.perf_counter() >= until:
                    return now_ms
            return self.next_due_ms
        finally:
            end = self._store.log.end
            if self._when_durable is not None and end > position:
                self._when_durable(end, lambda: self.note_flushed(end))

    def _round(self, now_ms: int, until: float) -> bool:
        """A batch of each level that has one, each time beginning with another level; whether there was any."""
        levels = list(self.levels.values())
        any_tried = False
        for _ in levels:
            self._turn = (self._turn + 1) % len(levels)
            level = levels[self._turn]
            any_tried |= self.delivery.deliver(level, now_ms)
            if time.perf_counter() >= until:
                break
        return any_tried

    # --- results

    def note_flushed(self, position: int) -> None:
        """The commitlog is durable up to a physical offset: puts before it are a success."""
        for level in self.levels.values():
            self.delivery.note_flushed(level, position)
        self.on_earlier()

    # --- withdrawing

    def is_waiting(self, message: StoredMessage) -> bool | None:
        """Whether a stored message of a level is still to be delivered; None for one that was withdrawn."""
        level = self.levels.get(message.queue_id + 1)
        offset = message.queue_offset
        unit = level.queue.unit(offset) if level is not None else None
        if level is None or unit is None or unit[0] != message.physical_offset:
            return False
        if unit[1] == WITHDRAWN_SIZE:
            return None
        if self._batches.delivered(message.physical_offset):
            return False
        if any(put.start <= offset < put.end for put in level.failed):
            return True
        return any(run.cursor <= offset < level.end_of(run) for run in level.runs)

    def withdraw(self, message: StoredMessage) -> None:
        """A message that waits is not to be delivered any more. Raises OSError."""
        self._store.withdraw(self.levels[message.queue_id + 1].queue, message.queue_offset)

    def waiting_before(self, limit: int) -> Iterator[tuple[StoredMessage, int] | None]:
        """The messages that wait and whose records lie before a physical offset, each with when it is due (ms); None
        now and then, so that other work can be done."""
        for level in list(self.levels.values()):
            for run in list(level.runs):
                offset = run.cursor
                while run in level.runs and offset < level.end_of(run):
                    unit = level.queue.unit(offset)
                    if unit is None or unit[0] >= limit:
                        break
                    message = self._store.message_at(unit[0], unit[1]) if unit[1] != WITHDRAWN_SIZE else None
                    if message is not None and self.is_waiting(message):
                        yield message, self._times.due_ms(level, run, *unit, self._clock.now_ms())
                    else:
                        yield None
                    offset += 1

    def due_times(self) -> Iterator[NDArray[np.int64]]:
        """When the messages that wait are due, ms since the epoch, in parts of bounded size."""
        for level in list(self.levels.values()):
            for run in list(level.runs):
                if run not in level.runs:
                    continue
                offset, end = run.cursor, level.end_of(run)
                while offset < end:
                    units = self._batches.read(level.queue, offset, min(_SETTLE_UNITS, end - offset))
                    if not len(units):
                        break
                    offset += len(units)
                    kept = units[(units["size"] != WITHDRAWN_SIZE) & (units["tags_code"] > EXT_ADDRESS_MAX)]
                    yield kept["tags_code"].astype(np.int64) + run.shift_ms

    # --- progress

    def _note(self) -> bytes:
        """See `storage.store.MessageStore.notes`."""
        crc = runs.table_crc(self.table.text)
        return runs.encode(crc, {level.number: level.appended() for level in self.levels.values()})

    def progress(self) -> tuple[dict[str, Any], int]:
        """The progress as delayOffset.json has it, and the physical offset up to which the commitlog has to be
        durable before that may be saved: progress must never run ahead of the messages it speaks of."""
        return self.to_json(), self._store.log.end

    def to_json(self) -> dict[str, Any]:
        """The progress as delayOffset.json and GET_ALL_DELAY_OFFSET have it."""
        return {**self._extra, "offsetTable": {str(level.number): level.offset for level in self.levels.values()}}

    def save(self, table: dict[str, Any]) -> None:
        """Write the progress. May wait for the disk. Raises OSError."""
        self._file.write(table)

    # --- what an operator sees

    def report(self) -> None:
        """Once a second or so: take rates, and log levels that are late, with the reason."""
        monotonic, now_ms = self._clock.monotonic(), self._clock.now_ms()
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

    def describe(self, level: Level) -> str:
        """One line for tools: what waits, when the first of it is due (ms since the epoch, - without one), how late
        that is, how late the last delivery was, and messages delivered a second."""
        late_ms = self.lateness_ms(level, self._clock.now_ms())
        return (
            f"pending={level.waiting} nextDue={level.due_ms if level.due_ms is not None else '-'} "
            f"lateMillis={late_ms} lastLateMillis={level.late_by_ms} deliveredTps={level.rate:.1f} "
            f"delivered={level.delivered} skipped={level.skipped}"
        )

    @staticmethod
    def lateness_ms(level: Level, now_ms: int) -> int:
        """For how long the first message of a level that is not delivered has been due; 0 when none is."""
        since_ms = level.late_since_ms
        return max(0, now_ms - since_ms) if since_ms is not None else 0
