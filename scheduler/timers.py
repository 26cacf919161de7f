"""Timers: messages for any time wait in RocketMQ 5's timer wheel, and are delivered to the millisecond.

    topic rmq_sys_wheel_timer, queue 0    the records; their consume-queue units have the deliver time as tags code
    timerlog/, timerwheel                 see `timer_log`, `timer_wheel`
    config/timercheck, timermetrics       see `timer_files`

Two stages. Enqueuing follows the queue: each message gets a unit in the timer log, which its second's slot links to the
units before it. Dequeuing follows the clock: the slots of the next seconds are loaded ahead, the messages of the
current one are delivered as copies that name their origin, in slices, and the next slot that is not empty has its
turn when that is over. Nothing ticks while nothing is due: `step` gives the time of the next thing to do.

A slot may be `roll_window` seconds ahead at most, since Apache's broker could not read one further on. What is due
later waits in a slot a multiple of the window before its own, and gets another unit of 52 bytes when that one's turn
comes; its record stays where it is.

What is known after a crash: the checkpoint's note (`timer_files`) says which second had its turn, and where the
timer log ended; units behind that are cut off and made again. What was delivered since that second's turn began, the
delivered records tell. So a message is delivered once, though nothing is written for it at its delivery but itself.

Behaviour after apache/rocketmq store/timer/TimerMessageStore.java (5.3.3).
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import structlog

from protocol import properties
from protocol.record import StoredMessage
from protocol.timer_properties import MAX_HASH, PRECISION_MS, slot_second, stored_key
from scheduler import timer_files
from scheduler.batches import Batches, Kind
from scheduler.level_queues import LevelQueues, ReadCold
from scheduler.timer_catch_up import CatchUp
from scheduler.timer_census import DueCounts
from scheduler.timer_config import Cancelled, Refusal, TimerConfig
from scheduler.timer_files import TimerCheck, TimerNote
from scheduler.timer_keys import key_hash, key_of, tag_of
from scheduler.timer_log import DELETE, MAX_DUE_MS, NORMAL, UNIT, WITHDRAWN, seconds_of
from scheduler.timer_policies import Policies, Split, TimerPolicy
from scheduler.timer_records import TimerRecords
from scheduler.timer_recovery import TimerRecovery
from scheduler.timer_second import WAIT, Second, slot_second_of
from scheduler.timer_slots import Slots, due_of
from scheduler.timer_topics import TimerTopics
from storage.clock import Clock
from storage.consume_queue import PADDING_SIZE, SCHEDULE_TOPIC, TIMER_TOPIC, ConsumeQueue
from storage.copies import ORIGIN_ZERO, UNITS
from storage.errors import StoreError
from storage.pull import Range
from storage.recovery import Recovered
from storage.store import MessageStore

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from scheduler.timer_second import Waits

log = structlog.get_logger(__name__)

SLICE_SECONDS: Final = 0.002
"""How long one step goes on."""
REFUSED_RETRY_MS: Final = 100
"""When the store takes nothing, it is tried again after this."""
WARN_MS: Final = 1000
WARN_AGAIN_SECONDS: Final = 60.0
_ENQUEUE_UNITS: Final = 4096
_DELIVER_UNITS: Final = 512
_DROP_UNITS: Final = 128
_LOOK_UNITS: Final = 32
_MAX_SINCE_BYTES: Final = 16 * 1024 * 1024
_MAX_TURN_SECONDS: Final = 30.0
_SOON_MS: Final = 100
_NEVER_MS: Final = 2**62


class TimerState(NamedTuple):
    """For tools. Times in ms since the epoch."""

    read_ms: int
    """commitReadTimeMs: everything before is delivered."""
    queue_offset: int
    """Next queue offset of the timer topic to put into the wheel."""
    behind_messages: int
    """Messages not yet in the wheel."""
    pending: int
    """Messages in the wheel."""
    enqueue_tps: float
    dequeue_tps: float
    late_ms: int
    """For how long the first message that is not delivered has been due."""


class _Place(NamedTuple):
    """Where a message waits in the wheel: what its unit says, and the second whose slot that is in."""

    message: StoredMessage
    due_ms: int
    waits: Waits
    second: int


class Timers:
    """Keeps and delivers messages with a timer. One thread, the event loop's, owns it."""

    def __init__(
        self,
        store: MessageStore,
        clock: Clock,
        config: TimerConfig,
        read_cold: ReadCold | None = None,
        levels: LevelQueues | None = None,
    ) -> None:
        self._store = store
        self.levels = levels
        self._clock = clock
        self._config = config
        self._read_cold = read_cold
        tables = os.path.join(store.config.root, "config")
        self._check_path = os.path.join(tables, "timercheck")
        self._metrics_path = os.path.join(tables, "timermetrics")
        self._check = TimerCheck()
        self._batches = Batches(store)
        self.queue = store.ensure_queue(TIMER_TOPIC, 0)
        """Where a message is staged, with its deliver time as tags code and as prepared-transaction offset."""

        self._enqueued = 0
        """Next queue offset to put into the wheel."""
        self._replayed_to = 0
        """What recovery found does not matter for messages from this queue offset on."""
        self._synced = 0
        """The timer log is durable up to here, but for marks of withdrawn units."""
        self._turn_seen = (0, 0.0)
        """Where the current second's turn began in the commitlog, and when that was first seen."""
        self._noted_log_since = self._kept_from = 0
        """Where the current second's turn began in the timer log as of the last note, and as of the last that is
        durable: recovery may need what is behind."""

        self._topics = TimerTopics()
        self._slots = Slots(store, self._topics, config)
        self._records = TimerRecords(store, self.queue, self._topics)
        self.policies = Policies()
        self._catch_up = CatchUp(store, self._slots, read_cold)
        self.policies.judge = self._catch_up.judge
        self._slots.on_moving = self._catch_up.passing
        self._retry_ms = 0
        self._is_reading = False
        self._is_warm = False
        self._soonest_ms = _NEVER_MS
        """When the first of the messages is due that came since the last step."""
        self._is_called = self._is_called_soon = False
        self._on_counted: list[Callable[[], None]] = []
        self._trouble: str | None = None
        self.enqueued = self.dequeued = self.lost = self.dropped = 0
        """Messages put into the wheel, delivered, found missing, and cancelled by their topic's policy, since start."""
        self._dropped_told = 0
        self._sampled = (0, 0, clock.monotonic())
        self._rates = (0.0, 0.0)
        self._warned_at: float | None = None
        self.on_earlier: Callable[[], None] = lambda: None
        """Called when `step` has something to do before the time it gave..."""
        self.on_arrived: Callable[[], None] | None = None
        """...or when messages came that are not due soon: some ms later will do, with more of them."""

    @property
    def config(self) -> TimerConfig:
        """The settings."""
        return self._config

    @config.setter
    def config(self, config: TimerConfig) -> None:
        self._config = config
        self._slots.window = config.roll_window

    # --- start

    def load(self, recovered: Recovered) -> None:
        """Open the files, or make them, and find out what waits. Raises StoreFormatError, OSError."""
        files = self._store.files
        slots = self._slots
        files.make_directories(os.path.dirname(self._check_path))
        check = timer_files.load_check(files, self._check_path)
        note = None if recovered.is_foreign else timer_files.decode_note(recovered.notes.get("timers", b""))
        recovery = TimerRecovery(self._store, self.queue, slots.log, slots.wheel, self._clock.now_ms(), recovered)
        start = recovery.run(note, check)
        self._check = check or TimerCheck()
        slots.load(start, note.held_to if note is not None else 0)
        self._enqueued = start.queue_offset
        self._topics.load(timer_files.load_topics(files, self._metrics_path), start.waiting)
        self._replayed_to = self.queue.next_offset
        slots.is_replayed = self._enqueued >= self._replayed_to
        self._synced = slots.log.begin
        slots.open(slots.second)
        self._withdraw_again(set(recovered.origins.withdrawn))
        self._store.notes["timers"] = self._note
        self._store.beside.append(self)
        self._store.keep_before.append(self._keep_before)
        self.queue.watch(self._arrived)

    # --- what comes in

    def refusal(self, deliver_ms: int, now_ms: int) -> Refusal | None:
        """Why a message for a time that is not past cannot be taken now; None where it can. To be asked for each
        message that is taken."""
        config = self.config
        if deliver_ms < self._soonest_ms:  # noqa: PLR1730, for each message: a call costs twice as much
            self._soonest_ms = deliver_ms
        if not config.is_enabled:
            return Refusal.DISABLED
        if deliver_ms - now_ms > config.max_delay * 1000:
            return Refusal.TOO_FAR
        if config.congest_limit < 2**31 - 1 and self._is_congested(deliver_ms, now_ms):
            return Refusal.CONGESTED
        return None

    def _is_congested(self, deliver_ms: int, now_ms: int) -> bool:
        """Whether a second has as many messages as it may have, with those that came just now."""
        limit, second = self.config.congest_limit, self._slots.slot_for(slot_second(deliver_ms), now_ms)
        if self._slots.wheel.count(second) + self.queue.next_offset - self._enqueued < limit:
            return False
        self.gather(now_ms)
        units = self._batches.read(self.queue, self._enqueued, self.queue.next_offset - self._enqueued)
        seconds = slot_second_of(units["tags_code"].astype(np.int64))
        return bool(self._slots.wheel.count(second) + (seconds == second).sum() >= limit)

    def gather(self, now_ms: int) -> None:
        """Put into the wheel what came just now, rather than with the next step, which says so where that fails."""
        if not self.config.stop_enqueue:
            with contextlib.suppress(OSError):
                self._enqueue(now_ms)

    def staged(self, queue_offset: int, topic: str, key: int = 0) -> None:
        """A message for a topic was staged at a queue offset of `queue`. To be called right after the staging; `key` is
        the hash (`timer_keys.key_hash`) of the key by which it is to be replaced."""
        self._topics.staged(queue_offset, topic, key)

    def _arrived(self, _: ConsumeQueue) -> None:
        if self._soonest_ms > self._store.appender.store_timestamp + _SOON_MS:
            if not self._is_called:
                self._is_called = True
                (self.on_arrived or self.on_earlier)()
        elif not self._is_called_soon:
            self._is_called = self._is_called_soon = True
            self.on_earlier()

    def set_policy(self, topic: str, policy: TimerPolicy | None) -> None:
        """Let a topic have a policy, or none, from now on."""
        topic_hash = self._topics.hash_of(topic)
        self.policies.set(topic_hash, policy)
        if policy is None or not policy.newest:
            self._catch_up.forget(topic_hash)

    # --- enqueuing

    def _enqueue(self, now_ms: int) -> bool:
        """Put the next messages of the queue into the wheel; whether there were any. Raises OSError."""
        queue = self.queue
        if self._enqueued < queue.min_offset:
            log.warning("timer_offset_corrected", offset=self._enqueued, corrected=queue.min_offset)
            self._enqueued = queue.min_offset
        end = queue.staged_from if queue.staged_from >= 0 else queue.next_offset
        count = min(end - self._enqueued, _ENQUEUE_UNITS)
        if count <= 0:
            return False
        units = self._batches.read(queue, self._enqueued, count)
        codes = units["tags_code"]
        hashes = self._topics.hashes(self._enqueued, len(units))
        if hashes is None or not (codes > MAX_HASH).all():
            units = units[:_LOOK_UNITS]
            waits, magic = self._look(units)
        else:
            waits = np.zeros(len(units), WAIT)
            waits["physical"], waits["size"] = units["physical_offset"], units["size"]
            waits["due"], waits["hash"] = codes, hashes
            keys = self._topics.keys(self._enqueued, len(units))
            if keys is not None:
                waits["key"] = keys
            magic = np.full(len(units), NORMAL, np.int32)
        if self._enqueued < self._replayed_to:
            magic |= np.where(np.isin(waits["physical"], self._slots.start.withdrawn), WITHDRAWN, 0).astype(np.int32)
            kept = ~np.isin(waits["physical"], self._slots.start.done)
            waits, magic = waits[kept], magic[kept]
        if len(waits):
            self._slots.put(waits, magic, now_ms)
            is_message = magic == NORMAL
            self._topics.count(waits[is_message], 1)
            self.enqueued += int(is_message.sum())
        self._enqueued += len(units)
        self._slots.is_replayed |= self._enqueued >= self._replayed_to
        self._topics.drop_staged(self._enqueued)
        return True

    def _look(self, units: NDArray[Any]) -> tuple[Waits, NDArray[np.int32]]:
        """As of `_enqueue`, for messages of which only their records tell when they are due."""
        waits = np.zeros(len(units), WAIT)
        magic = np.zeros(len(units), np.int32)
        for at, (physical, size, code) in enumerate(units.tolist()):
            message = self._store.message_at(physical, size) if 0 < size != PADDING_SIZE else None
            due_ms = due_of(message) if message is not None else None
            if message is None or due_ms is None:
                log.error("timer_message_illegal", physical_offset=physical, size=size)
                continue
            text = message.properties_text
            topic_hash = self._topics.hash_of(properties.get(text, properties.REAL_TOPIC) or "")
            magic[at] = NORMAL
            if properties.get(text, properties.TIMER_DEL_UNIQKEY) is not None:
                magic[at] = NORMAL | DELETE
                if message.prepared_transaction_offset:
                    magic[at] |= WITHDRAWN
            elif code > MAX_HASH:
                due_ms = code
            waits[at] = (physical, min(due_ms, MAX_DUE_MS), 0, size, topic_hash, key_of(text), False)
        known = magic != 0
        return waits[known], magic[known]

    # --- time

    def step(self) -> int | None:
        """Do what is due, for a few ms; gives when to call again, ms since the epoch, or None for "when a message
        comes"."""
        self._is_called = self._is_called_soon = False
        self._soonest_ms = _NEVER_MS
        now_ms = self._clock.now_ms()
        until = time.perf_counter() + SLICE_SECONDS
        try:
            is_counting = self._slots.take_census()
            if self._catch_up.is_busy and not self.config.stop_dequeue and now_ms >= self._retry_ms:
                self._catch_up.step(now_ms, self._wake)
            while time.perf_counter() < until:
                worked = not self.config.stop_enqueue and now_ms >= self._retry_ms and self._enqueue(now_ms)
                if not self.config.stop_dequeue:
                    worked |= self._dequeue(now_ms)
                if not worked and not (is_counting and self._slots.take_census()):
                    break
        except (StoreError, OSError) as error:
            if self._trouble != str(error):
                log.warning("timer_delivery_refused", reason=str(error))
            self._trouble = str(error)
            self._retry_ms = now_ms + REFUSED_RETRY_MS
        if self._on_counted and self.is_counted:
            waiting, self._on_counted = self._on_counted, []
            for call in waiting:
                call()
        return self._next_ms(now_ms)

    def _dequeue(self, now_ms: int) -> bool:
        """A bit of what is to be done by the clock; whether there was anything."""
        if self._is_reading or now_ms < self._retry_ms:
            return False
        if self._slots.advance(now_ms):
            return True
        second = self._slots.current
        if second.load_some():
            return True
        if second.deletes:
            second.loader = self._slots.delete_by_key(second)
            return True
        if second.again:
            if self._slots.put_again(second, now_ms):
                self._mark_newest(now_ms)
            return True
        if self._deliver(second, now_ms) or self._slots.preload(now_ms):
            return True
        return self._catch_up.is_busy and self._catch_up.step(now_ms, self._wake)

    def _wake(self) -> None:
        self.on_earlier()

    def _deliver(self, second: Second, now_ms: int) -> bool:
        """Deliver a batch of a second; whether there was one. Raises StoreError."""
        waits = second.due(now_ms, _DELIVER_UNITS)
        if not len(waits):
            return False
        split = self.policies.split(waits, now_ms) if self.policies else None
        if split is not None and len(split.dropped) > _DROP_UNITS:
            waits = waits[:_DROP_UNITS]
            split = self.policies.split(waits, now_ms)
        if split is not None:
            if self._is_cold(split.dropped):
                return False
            self._apply(second, split, len(waits), now_ms)
            return True
        units = np.empty(len(waits), UNITS)
        units["physical_offset"], units["size"], units["tags_code"] = waits["physical"], waits["size"], 0
        may_wait = self._is_warm or self._read_cold is None
        self._is_warm = False
        outcome = self._batches.deliver(units, may_wait=may_wait, second=second.number)
        if outcome.kind is Kind.COLD:
            self._warm(units)
            return False
        if outcome.kind is Kind.GONE:
            self.lost += outcome.units
            log.error(
                "timer_messages_missing", messages=outcome.units, physical_offset=int(units["physical_offset"][0])
            )
        self._trouble = None
        self.dequeued += outcome.delivered
        self._slots.gone(waits[: outcome.units])
        second.is_touched = True
        second.drop(outcome.units)
        return True

    def _apply(self, second: Second, split: Split, count: int, now_ms: int) -> None:
        """Do with the first messages of a second what their topics' policies say; those that are delivered now are the
        first again."""
        # Where something raises all of it is tried again: a second record that deletes a message does no harm, a second
        # unit would.
        try:
            for physical, size in split.dropped[["physical", "size"]].tolist():
                message = self._store.message_at(physical, size)
                if message is not None:
                    self._records.stage_deletion(message, due_of(message) or now_ms)
            self._store.appender.commit()
        except BaseException:
            self._store.appender.roll_back()
            raise
        slots, later, held = self._slots, split.later, split.held
        if len(later) or len(held):
            # In one piece: what has another unit must not be tried again.
            slots.on_moving(held)
            not_before = np.zeros(len(later) + len(held), np.int64)
            not_before[len(later) :] = split.held_seconds
            both = np.concatenate((later, held))
            latest = np.maximum(slot_second_of(both["due"]), not_before)
            slots.held_to = max(slots.held_to, int(latest.max()))
            slots.put(both, np.full(len(both), NORMAL, np.int32), now_ms, not_before)
            slots.census.removed(split.moved)
        if len(split.dropped):
            self.dropped += len(split.dropped)
            slots.gone(split.dropped)
        self.policies.took(split)
        second.drop(count)
        split.now["held"] = True  # their turn has come
        second.add(split.now)

    def _is_cold(self, waits: Waits) -> bool:
        """Whether a thread has to read the records of some messages, which it does then."""
        if self._read_cold is None or self._is_warm or not len(waits):
            return False
        if self._store.read(waits[["physical", "size"]].tolist()) is not None:
            return False
        units = np.empty(len(waits), UNITS)
        units["physical_offset"], units["size"], units["tags_code"] = waits["physical"], waits["size"], 0
        self._warm(units)
        return True

    def _warm(self, units: NDArray[Any]) -> None:
        """Have a thread read from the disk what comes next."""
        assert self._read_cold is not None
        self._is_reading = True
        self._trouble = "the disk: old messages are being read"

        def done() -> None:
            self._is_reading = False
            self._is_warm = True
            self.on_earlier()

        self._read_cold(self._batches.warm(units), done)

    def _next_ms(self, now_ms: int) -> int | None:
        """When there will be something to do."""
        config = self.config
        if now_ms < self._retry_ms:
            return self._retry_ms
        if self._slots.census.is_begun and not self._slots.census.is_complete:
            return now_ms
        if self._catch_up.is_busy and not config.stop_dequeue:
            return now_ms
        if not config.stop_enqueue and self._enqueued < self.queue.next_offset:
            return now_ms
        if config.stop_dequeue or self._is_reading:
            return None
        return self._slots.next_ms(now_ms)

    # --- cancelling

    def cancel(self, physical_offset: int) -> Cancelled:
        """Cancel a message that waits, with a timer or a level. The caller holds its answer until what was appended is
        durable enough (as for a send). Raises StoreError, OSError."""
        return self._take_out(physical_offset, self._records.delete)

    def reschedule(self, physical_offset: int, deliver_ms: int) -> tuple[Cancelled, int | None]:
        """Give a message that waits, with a timer or a level, another time; one that is past for "at once". It is
        another record then: CANCELLED says so, and at which physical offset. As for `cancel`."""
        due_ms = max(deliver_ms, self._clock.now_ms())
        places: list[int] = []
        result = self._take_out(physical_offset, lambda message, _: places.append(self._again(message, due_ms)))
        return result, places[0] if places else None

    def _take_out(self, physical_offset: int, append: Callable[[StoredMessage, int], None]) -> Cancelled:
        """Withdraw a message that waits, after `append` has put down what becomes of it."""
        message = self._store.message_at(physical_offset)
        if message is not None and message.topic == SCHEDULE_TOPIC:
            return self._take_out_of_level(message, append)
        place = self._place_of(message)
        if isinstance(place, Cancelled):
            return place
        append(place.message, place.due_ms)
        self._slots.withdraw(place.waits, place.second)
        return Cancelled.CANCELLED

    def _place_of(self, message: StoredMessage | None) -> _Place | Cancelled:
        """Where a message waits in the wheel; else what became of it. Raises OSError."""
        if message is None or message.topic != TIMER_TOPIC:
            return Cancelled.UNKNOWN
        physical_offset, due_ms = message.physical_offset, due_of(message)
        is_mark = properties.get(message.properties_text, properties.TIMER_DEL_UNIQKEY) is not None
        if due_ms is None or is_mark:
            return Cancelled.UNKNOWN
        now_ms = self._clock.now_ms()
        while self._enqueued <= message.queue_offset and self._enqueue(now_ms):
            pass
        found = self._slots.find_unit(physical_offset, slot_second(due_ms), slot_second(message.store_timestamp))
        if found is None:
            return Cancelled.DELIVERED
        position, second = found
        if int(self._slots.log.read(position, 1)["magic"][0]) & WITHDRAWN:
            return Cancelled.CANCELLED_BEFORE
        is_delivered = second < self._slots.second or (self._slots.start.done == physical_offset).any()
        if is_delivered or not self._slots.is_waiting(second, physical_offset):
            return Cancelled.DELIVERED
        return _Place(message, due_ms, self._slots.wait_at(position, second), second)

    def _take_out_of_level(self, message: StoredMessage, append: Callable[[StoredMessage, int], None]) -> Cancelled:
        is_waiting = self.levels.is_waiting(message) if self.levels is not None else False
        if is_waiting is None:
            return Cancelled.CANCELLED_BEFORE
        if self.levels is None or not is_waiting:
            return Cancelled.DELIVERED
        append(message, self._clock.now_ms())
        self.levels.withdraw(message)
        return Cancelled.CANCELLED

    def _withdraw_again(self, physical_offsets: set[int]) -> None:
        """Recovery found that messages were withdrawn: the marks at their units may not have been durable."""
        gone = []
        for physical_offset in physical_offsets:
            message = self._store.message_at(physical_offset)
            if message is None:
                gone.append(physical_offset)
                continue
            due_ms = due_of(message) if message.topic == TIMER_TOPIC else None
            if due_ms is None:
                continue
            found = self._slots.find_unit(physical_offset, slot_second(due_ms), slot_second(message.store_timestamp))
            if found is not None:
                self._slots.withdraw(self._slots.wait_at(*found), found[1])
        if gone:
            # Appended once more, whereupon their files went: nobody knows where they waited.
            for position, second in self._slots.find_units(gone):
                self._slots.withdraw(self._slots.wait_at(position, second), second)

    # --- replacing

    @property
    def is_counted(self) -> bool:
        """Whether it is known what waits for which keys: `replace` may be called."""
        return self._slots.census.is_complete

    @property
    def counts(self) -> DueCounts:
        """How many messages in the wheel are due in each second, as far as `is_counted`."""
        return self._slots.census.counts

    def count(self, then: Callable[[], None] | None = None) -> None:
        """Begin to count what waits, if that is not done; `then` is called when it is."""
        census = self._slots.census
        if not census.is_begun:
            census.begin(self._slots.log.begin)
            self.on_earlier()
        if then is not None:
            self._on_counted.append(then)

    def replaced_by(self, topic: str, key: str) -> list[Range]:
        """Where the records of messages lie that the next one of a topic and key may replace: of all that it will, and
        of some with other keys. Raises OSError."""
        units = [self._slots.log.read(position, 1) for position in self._with_key(topic, key)]
        return [unit[["physical_offset", "record_size"]][0].item() for unit in units]

    def _with_key(self, topic: str, key: str) -> list[int]:
        """The positions of their units."""
        now_ms = self._clock.now_ms()
        while self._enqueue(now_ms):
            pass
        return self._slots.census.keys.find(tag_of(self._topics.hash_of(topic), key_hash(key)))

    def replace(self, topic: str, key: str, unique_key: str | None, due_ms: int, stage: Callable[[int], None]) -> int:
        """Have a message written in the place of those that wait to be replaced by it; gives how many those were.
        `stage` stages it, with the origin that it is given for prepared-transaction offset, and TIMER_ROLL_TIMES, so
        that the one record says both: 0 where nothing waits. Nothing else is staged before. Raises what `stage` does,
        StoreError, OSError; then nothing was replaced."""
        assert self.is_counted
        places = []
        for position in self._with_key(topic, key):
            place = self._place_at(position)
            text = place.message.properties_text if place is not None else ""
            if place is not None and properties.get(text, properties.REAL_TOPIC) == topic and stored_key(text) == key:
                places.append(place)
        stage((places[0].message.physical_offset or ORIGIN_ZERO) if places else 0)
        for place in places:
            # For Apache's broker, and where more than one is replaced. It would take one with the same UNIQ_KEY, a
            # client's second try, for both.
            if place.message.get_property(properties.UNIQ_KEY) != unique_key:
                self._records.stage_deletion(place.message, place.due_ms)
        self._soonest_ms = min(self._soonest_ms, due_ms)
        self._store.appender.commit()
        for place in places:
            self._slots.withdraw(place.waits, place.second)
        return len(places)

    def _place_at(self, position: int) -> _Place | None:
        """The message whose unit is at a position, if it waits."""
        units = self._slots.log.read(position, 1)
        physical_offset, size = units[["physical_offset", "record_size"]][0].item()
        second = int(seconds_of(units)[0])
        message = self._store.message_at(physical_offset, size)
        due_ms = due_of(message) if message is not None else None
        if message is None or due_ms is None or units["magic"][0] & WITHDRAWN:
            return None
        is_delivered = second < self._slots.second or (self._slots.start.done == physical_offset).any()
        if is_delivered or not self._slots.is_waiting(second, physical_offset):
            return None
        return _Place(message, due_ms, self._slots.wait_at(position, second), second)

    def find(self, topic: str, unique_key: str, deliver_ms: int) -> int | None:
        """The physical offset of the message of a topic with this UNIQ_KEY that waits for a time whose slot is that
        of `deliver_ms`; None where there is none. Looks at each message of the slot."""
        second = slot_second(deliver_ms)
        window = self.config.roll_window
        if second > self._slots.second:
            second -= (second - self._slots.second - 1) // window * window
        topic_hash = self._topics.hash_of(topic)
        for candidate in (second, second + window):
            for _, units in self._slots.log.chain(self._slots.wheel.last(candidate)):
                for unit in units[units["topic_hash"] == topic_hash][["physical_offset", "record_size"]].tolist():
                    message = self._store.message_at(*unit)
                    if (
                        message is not None
                        and properties.get(message.properties_text, properties.UNIQ_KEY) == unique_key
                    ):
                        return message.physical_offset
        return None

    # --- messages whose commitlog files expire

    def _keep_before(self, limit: int) -> Iterator[bool]:
        """See `storage.store.MessageStore.keep_before`: append messages once more that still wait when their file is
        about to go, those of delay levels too, which wait on in the wheel."""
        count, slots = 0, self._slots
        for position, units in slots.log.scan(slots.log.begin, slots.log.end):
            seconds = seconds_of(units)
            live = (units["physical_offset"] < limit) & (seconds >= slots.second)
            live &= units["magic"] & (DELETE | WITHDRAWN) == 0
            for at in np.flatnonzero(live).tolist():
                message = self._store.message_at(int(units["physical_offset"][at]), int(units["record_size"][at]))
                second, due_ms = int(seconds[at]), abs(int(units["due_ms"][at])) & MAX_DUE_MS
                if message is None or second < slots.second or not slots.is_waiting(second, message.physical_offset):
                    continue
                waits = slots.wait_at(position + at * UNIT.itemsize, second)
                again = self._again(message, due_ms or due_of(message) or second * PRECISION_MS)
                slots.withdraw(waits, second)
                self._catch_up.repeated(message.physical_offset, again)
                count += 1
                yield True
            yield False
        for found in self.levels.waiting_before(limit) if self.levels is not None else ():
            if found is not None:
                assert self.levels is not None
                self._again(*found)
                self.levels.withdraw(found[0])
                count += 1
            yield found is not None
        if count:
            log.info("scheduled_messages_rolled", messages=count, before=limit)

    def _again(self, message: StoredMessage, due_ms: int) -> int:
        self._soonest_ms = min(self._soonest_ms, due_ms)
        return self._records.again(message, due_ms)

    # --- what tools see

    def state(self) -> TimerState:
        """What tools want to know."""
        head = self._slots.current.head_ms
        late_ms = max(0, self._clock.now_ms() - head) if head is not None else 0
        behind = self.queue.next_offset - self._enqueued
        pending = self._topics.total
        return TimerState(self._slots.second * PRECISION_MS, self._enqueued, behind, pending, *self._rates, late_ms)

    def checkpoint_body(self) -> bytes:
        """The 56 bytes of timercheck, as GET_TIMER_CHECK_POINT answers with."""
        return self._check_now().encode()

    def metrics(self) -> dict[str, int]:
        """Waiting messages by topic."""
        return self._topics.metrics()

    def report(self) -> None:
        """Once a second or so: take rates, log when late."""
        monotonic = self._clock.monotonic()
        seconds = max(monotonic - self._sampled[2], 0.001)
        self._rates = (self.enqueued - self._sampled[0]) / seconds, (self.dequeued - self._sampled[1]) / seconds
        self._sampled = self.enqueued, self.dequeued, monotonic
        self._tell_dropped()
        late_ms = self.state().late_ms
        if late_ms < WARN_MS:
            self._warned_at = None
        elif self._warned_at is None or monotonic - self._warned_at >= WARN_AGAIN_SECONDS:
            self._warned_at = monotonic
            reason = "timerStopDequeue" if self.config.stop_dequeue else self._trouble
            log.warning(
                "timers_late",
                late_ms=late_ms,
                waiting=self._topics.total,
                delivered_per_second=round(self._rates[1]),
                reason=reason or "many messages are due at once",
            )

    def _tell_dropped(self) -> None:
        """Log what was cancelled by policies since the last time."""
        if self.dropped > self._dropped_told:
            log.warning("overdue_messages_dropped", messages=self.dropped - self._dropped_told)
            self._dropped_told = self.dropped

    # --- the files

    def _bound_since(self) -> None:
        """Recovery reads all that came since the current second's turn began. See that this is no more than need be
        where nothing is due, or where the clock was set back and the second is long to come."""
        slots, now_s = self._slots, self._clock.monotonic()
        if slots.since != self._turn_seen[0]:
            self._turn_seen = slots.since, now_s
        if self._store.log.end - slots.since <= _MAX_SINCE_BYTES:
            return
        now_ms = self._clock.now_ms()
        if not slots.advance(now_ms, is_idle=True) and now_s - self._turn_seen[1] > _MAX_TURN_SECONDS:
            self._turn_seen = slots.since, now_s
            with contextlib.suppress(OSError):
                slots.hand_on(now_ms)

    def _note(self) -> bytes:
        """See `storage.store.MessageStore.notes`."""
        self._bound_since()
        self._noted_log_since = self._slots.log_since
        return TimerNote(
            self._slots.second,
            self._slots.since,
            self._slots.log_since,
            self._slots.log.end,
            self._slots.log.crc(self._slots.log.end),
            self._enqueued,
            self._slots.held_to,
            self._topics.waiting(),
        ).encode()

    def write(self) -> Iterator[None]:
        """See `storage.store.Beside`."""
        self._slots.log.write_marks()
        yield from self._slots.wheel.write(self._slots.second)

    def plan_sync(self) -> Callable[[], None]:
        """See `storage.store.Beside`."""
        files = self._store.files
        end, wheel = self._slots.log.end, self._slots.wheel.file
        to_sync = {*self._slots.log.files_between(self._synced, end), *self._slots.log.take_marked()}
        noted_log_since = self._noted_log_since
        if self._check_now() != self._check:
            self._check = self._check_now()
            self._check.state_version, self._check.version_ms = 0, self._clock.now_ms()
            self._check.counter += 1
        check = self._check
        metrics = timer_files.metrics_json(self.metrics(), check.version_ms, check.counter)
        root = self._store.config.root

        def sync() -> None:
            for file in to_sync:
                file.sync()
            if wheel is not None:
                wheel.sync()
            if to_sync:
                files.sync_directory(self._slots.log.directory)
            files.sync_directory(root)
            timer_files.save_check(files, self._check_path, check)
            files.write_whole(self._metrics_path, metrics, durable=False)
            self._synced = max(self._synced, end)
            self._kept_from = noted_log_since

        return sync

    def _check_now(self) -> TimerCheck:
        check = self._check
        return TimerCheck(
            self._slots.second * PRECISION_MS,
            self._slots.log.end,
            self._enqueued,
            self._enqueued,
            check.state_version,
            check.version_ms,
            check.counter,
        )

    def hand_over(self) -> None:
        """Before the store is closed for good: leave the files so that Apache's broker can go on with them. It reads
        a slot as a whole: what is left of one that is partly delivered goes into the next."""
        self._tell_dropped()
        now_ms = self._clock.now_ms()
        if self._slots.loaded(self._slots.second).is_touched:
            self._slots.hand_on(now_ms)
        self._mark_newest(now_ms)

    def _mark_newest(self, now_ms: int) -> None:
        """See `Slots.mark_newest`."""
        unit = self.queue.unit(self._enqueued - 1) if self._enqueued > self.queue.min_offset else None
        if unit is not None:
            self._slots.mark_newest(unit[0], unit[1], now_ms)

    def is_done(self, physical_offset: int) -> bool:
        """Whether recovery found that a message, which is not in the wheel yet, was delivered or withdrawn."""
        start = self._slots.start
        places = ((found, np.searchsorted(found, physical_offset)) for found in (start.done, start.withdrawn))
        return any(at < len(found) and found[at] == physical_offset for found, at in places)

    def units_waiting(self, start: int = 0) -> Iterator[Waits]:
        """See `Slots.units_waiting`."""
        return self._slots.units_waiting(start)

    def expire(self) -> Iterator[list[str]]:
        """Forget files of the timer log that nobody needs; each step gives paths for the caller to remove."""
        return self._slots.expire(self._kept_from)

    def close(self) -> None:
        """Close the descriptors."""
        self._slots.log.close()
        self._slots.wheel.close()
