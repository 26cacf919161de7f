"""Timers: messages with any deliver time wait in RocketMQ 5's timer wheel, and are delivered to the millisecond.

    topic rmq_sys_wheel_timer, queue 0    the records; the tags code of their consume-queue units is the deliver time
    timerlog/, timerwheel                 see `timers.files.log`, `timers.files.wheel`
    config/timercheck, timermetrics       see `timers.files.small_files`

There are two stages. Enqueuing follows the queue: each message gets a unit in the timer log, linked to the preceding
units of its second's slot. Dequeuing follows the clock: the slots of the next seconds are loaded ahead; the messages of
the current second are delivered in slices, as copies that name their origin; then the next slot that is not empty has
its turn. There is no periodic work while nothing is due: `step` returns the time at which to call it again.

A slot may be at most `roll_window` seconds ahead, since Apache's broker could not read one beyond that. A message that
is due later waits in a slot that is a multiple of the window before its own. When that slot's turn comes, the message
gets another unit, of 52 bytes; its record stays where it is.

After a crash, the checkpoint's note (`timers.files.small_files`) tells which second was the current one, and where the
timer log ended; units behind that end are cut off and made again. The delivered records tell which messages were
delivered since that second's turn began. So each message is delivered exactly once, although a delivery writes nothing
but the delivered message.

Behaves like apache/rocketmq store/timer/TimerMessageStore.java (5.3.3).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import structlog

from duemq.protocol.records import properties
from duemq.protocol.records.timer_properties import PRECISION_MS, slot_second
from duemq.protocol.topics import TIMER_TOPIC
from duemq.scheduler.delivery.batches import Batches, Kind
from duemq.scheduler.delivery.moves import Moves
from duemq.scheduler.levels.service import LevelQueues
from duemq.scheduler.recurring.records import Recurring, is_recurring, left_out
from duemq.scheduler.retry import Retry
from duemq.scheduler.timers.changes import TimerChanges
from duemq.scheduler.timers.checkpoint import TimerCheckpoint
from duemq.scheduler.timers.config import Refusal, TimerConfig
from duemq.scheduler.timers.deliver_times import due_of
from duemq.scheduler.timers.enqueuer import Enqueuer
from duemq.scheduler.timers.files.small_files import StartFacts
from duemq.scheduler.timers.files.unit import NORMAL
from duemq.scheduler.timers.index.census import DueCounts
from duemq.scheduler.timers.index.ids import TimerIds
from duemq.scheduler.timers.index.names import RealTopics
from duemq.scheduler.timers.policy.catch_up import CatchUp
from duemq.scheduler.timers.policy.policies import Policies, Split, TimerPolicy
from duemq.scheduler.timers.records import TimerRecords
from duemq.scheduler.timers.recovery import TimerRecovery
from duemq.scheduler.timers.seconds.second import Second, slot_second_of
from duemq.scheduler.timers.seconds.slots import Slots
from duemq.scheduler.timers.topics import TimerTopics
from duemq.storage.budget import Budget
from duemq.storage.clock import Moment
from duemq.storage.current import Current
from duemq.storage.durability.health import Verdict
from duemq.storage.durability.recovery import Recovered
from duemq.storage.errors import NotInMemory
from duemq.storage.log.copies import UNITS
from duemq.storage.queues.consume_queue import ConsumeQueue
from duemq.storage.queues.pull import ColdRead, ReadAhead, ReadCold
from duemq.storage.store import MessageStore

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from duemq.scheduler.timers.seconds.second import Waits

log = structlog.get_logger(__name__)

NAME: Final = "timers"
"""The name of the checkpoint's note."""
WARN_MS: Final = 1000
WARN_AGAIN_SECONDS: Final = 60.0
_DELIVER_UNITS: Final = 512
_DROP_UNITS: Final = 128
_BRING_BACK_UNITS: Final = 4096
"""Parked messages are brought back while fewer messages than this are left in the current second."""
_SOON_MS: Final = 100
_NEVER_MS: Final = 2**62
_STALLED_MS: Final = 3000
"""If enqueuing has been failing for this time, in ms, the timers refuse messages, since these could not be
delivered."""
_NO_LIMIT: Final = 2**31 - 1
"""RocketMQ's default of timerCongestNumEachSlot, which stands for no limit."""


class TimerState(NamedTuple):
    """The state of the timers, for tools."""

    read_ms: int
    """commitReadTimeMs: the time, ms since the epoch, before which all slots are done."""
    queue_offset: int
    """The next queue offset of the timer topic to put into the wheel."""
    behind_messages: int
    """Number of messages not yet in the wheel."""
    pending: int
    """Number of messages waiting in the wheel."""
    enqueue_tps: float
    """Messages put into the wheel per second."""
    dequeue_tps: float
    """Messages delivered per second."""
    late_ms: int
    """Time, in ms, for which the first undelivered message has been due; 0 if none is due."""


class Timers:
    """Keeps and delivers messages with a timer. Owned by the event loop's thread."""

    def __init__(
        self,
        store: MessageStore,
        config: Current[TimerConfig],
        recovered: Recovered,
        now: Moment,
        *,
        read_cold: ReadCold | None = None,
        levels: LevelQueues | None = None,
        wake: Callable[[], None] = lambda: None,
        wake_later: Callable[[], None] | None = None,
        is_deleted: Callable[[str], bool] = lambda topic: False,
    ) -> None:
        """Open the files, or make them, and find the waiting messages. `recovered`: the result of opening the store.
        `read_cold`: has a thread read records from the disk; if it is None, delivery itself waits for the disk. `wake`:
        called when `step` has work before the time that it returned. `wake_later`: called instead when messages came
        that are not due soon: `step` may then be called some ms later, when there are more of them. `is_deleted`:
        returns whether a topic was deleted, which ends its recurring messages. Raises StoreFormatError, OSError."""
        self._store = store
        self._config = config
        self._wake = wake
        self._wake_later = wake_later or wake
        self._read_cold = read_cold
        self.queue = store.ensure_queue(TIMER_TOPIC, 0)
        """The queue in which messages are staged, with the deliver time as tags code and as prepared-transaction
        offset."""

        real_topics = RealTopics(store)
        self._topics = topics = TimerTopics(real_topics.of)
        self._slots = slots = Slots(store, topics, config, self._read_ahead)
        self._catch_up = catch_up = CatchUp(store, slots, read_cold, wake)
        self.policies = Policies(real_topics.with_policies, catch_up.judge)
        moves = Moves()
        self._recurring = Recurring(
            store,
            self.queue,
            topics,
            policy_of=self.policies.of,
            expect=self._expect,
            moves=moves,
            is_deleted=is_deleted,
        )
        self._batches = Batches(store, self._recurring.stage_next)
        self._enqueuer = enqueuer = Enqueuer(store, self.queue, slots, topics, self._batches)
        self._records = records = TimerRecords(store, self.queue, topics)
        ids = TimerIds(store, slots.log, enqueuer)
        self._unfollowed: list[int] = []
        """The physical offsets of the records of recurring messages that were delivered or dropped and whose next
        records are missing."""
        self._cancelled: set[int] = set()
        """The physical offsets of messages that policies dropped, until the rest of their split has been carried out,
        too."""
        self._checkpoint = TimerCheckpoint(store, enqueuer, slots, topics, wake=wake, unfollowed=self._unfollowed)
        self.changes = TimerChanges(
            store=store,
            enqueuer=enqueuer,
            slots=slots,
            topics=topics,
            records=records,
            ids=ids,
            catch_up=catch_up,
            levels=levels,
            moves=moves,
            expect=self._expect,
        )
        """Cancels, reschedules and replaces waiting messages."""
        self._enqueuing, self._dequeuing = Retry("timers_not_enqueued"), Retry("timer_delivery_refused")
        self._preloading, self._counting = Retry("timers_not_read_ahead"), Retry("timers_not_counted")
        self._searching = Retry("overdue_messages_not_looked_at")
        self._following = Retry("recurring_messages_not_appended")
        self._is_reading = False
        self._is_warm = False
        self._soonest_ms = _NEVER_MS
        """The earliest deliver time, ms since the epoch, of the messages that came since the last step."""
        self._is_called = self._is_called_soon = False
        self._on_counted: list[Callable[[], None]] = []
        self._trouble: str | None = None
        self._expiring: Iterator[list[str] | ColdRead] | None = None
        self._marking: Iterator[None] | None = None
        self.dequeued = self.lost = self.dropped = 0
        """Numbers of messages, since start, that were delivered, found missing, and cancelled by their topics'
        policies."""
        self._dropped_told = 0
        self._sampled = (0, 0, now.monotonic)
        self._rates = (0.0, 0.0)
        self._warned_at: float | None = None
        self._load(recovered, now.wall_ms)

    @property
    def config(self) -> TimerConfig:
        """The settings in force."""
        return self._config.value

    @property
    def is_limited(self) -> bool:
        """Whether the number of messages in the slot of a second is limited."""
        return self._config.value.congest_limit < _NO_LIMIT

    # --- start

    def _load(self, recovered: Recovered, now_ms: int) -> None:
        slots, enqueuer = self._slots, self._enqueuer
        note, check = self._checkpoint.load(recovered)
        if not recovered.is_foreign:
            noted = note.unfollowed if note is not None else ()
            self._unfollowed += left_out(recovered.origins, noted, self._store.message_at)
        recovery = TimerRecovery(
            self._store,
            self.queue,
            recovered,
            now_ms,
            timer_log=slots.log,
            wheel=slots.wheel,
            positions=slots.positions,
        )
        start = recovery.run(note, check)
        slots.load(start, note.policy_end if note is not None else 0)
        enqueuer.load(start.queue_offset)
        self._topics.load(self._checkpoint.topic_names(), start.waiting)
        slots.turns.open(start.second)
        self.changes.withdraw_again(recovered.origins.withdrawn)
        if len(start.enqueued):  # the checkpoint's note cannot list these
            enqueuer.enqueue_through(start.enqueued_to - 1, now_ms)
        self._checkpoint.begin()
        self.queue.watch(self._arrived)

    # --- arriving messages

    def refusal(self, deliver_ms: int, now_ms: int) -> Refusal | None:
        """Return why a message with this deliver time, which must not be past, is refused now; None if it is not
        refused. Call this for each message before it is stored. Times are ms since the epoch. If slots are limited
        (`is_limited`), this may read, and raises OSError, NotInMemory."""
        config = self._config.value
        if deliver_ms < self._soonest_ms:  # noqa: PLR1730, runs for each message: a call of min costs twice as much
            self._soonest_ms = deliver_ms
        if not config.is_enabled:
            return Refusal.DISABLED
        if deliver_ms - now_ms > config.max_delay * 1000:
            return Refusal.TOO_FAR
        if self._enqueuing.reason is not None and self._enqueuing.has_failed_for(_STALLED_MS, now_ms):
            return Refusal.STALLED
        if config.congest_limit < _NO_LIMIT and self._is_congested(deliver_ms, now_ms):
            return Refusal.CONGESTED
        return None

    @property
    def enqueue_failure(self) -> str | None:
        """Why the last try to put messages into the wheel failed; None if it did not fail."""
        return self._enqueuing.reason

    def _is_congested(self, deliver_ms: int, now_ms: int) -> bool:
        """Whether the slot for a deliver time is full, including messages that are not in the wheel yet. Raises
        OSError, NotInMemory."""
        limit, second = self._config.value.congest_limit, self._slots.window.slot_for(slot_second(deliver_ms), now_ms)
        if self._slots.wheel.count(second) + self._enqueuer.behind < limit:
            return False
        self.gather(now_ms)
        return self._slots.wheel.count(second) + self._enqueuer.behind_for(second, now_ms) >= limit

    def gather(self, now_ms: int) -> None:
        """Put messages that have just come into the wheel, without waiting for the next step. If this fails or needs a
        read from the disk, it stops: the next step tries again and logs the failure. The caller finds the remaining
        messages in `queue`, from `queue_offset` on."""
        if not self._config.value.stop_enqueue:
            with contextlib.suppress(OSError, NotInMemory):
                self._enqueuer.enqueue_next(now_ms)

    def staged(self, queue_offset: int, topic: str, key: int = 0) -> None:
        """Note that a message for a topic was staged at a queue offset of `queue`. Call this directly after staging.
        `key`: the hash (`timers.index.keys.key_hash`) of the key by which the message is to be replaced, 0 if it has
        none."""
        self._topics.staged(queue_offset, topic, key)

    def _expect(self, due_ms: int) -> None:
        """Note the deliver time of a message that is appended without a call of `refusal`."""
        self._soonest_ms = min(self._soonest_ms, due_ms)

    def _arrived(self, _: ConsumeQueue) -> None:
        if self._soonest_ms > self._store.appender.store_timestamp + _SOON_MS:
            if not self._is_called:
                self._is_called = True
                self._wake_later()
        elif not self._is_called_soon:
            self._is_called = self._is_called_soon = True
            self._wake()

    def set_policy(self, topic: str, policy: TimerPolicy | None) -> None:
        """Set or remove the policy of a topic."""
        self.policies.set(topic, policy)
        if policy is None or not policy.newest:
            self._catch_up.forget(topic)
        if policy is None or not policy.is_paused:
            self._slots.parking.ask(properties.java_hash(topic))
        self._wake()

    # --- time

    def step(self, now: Moment, budget: Budget) -> int | None:
        """Do the work that is due, until the budget is spent. Return the time of the next call, ms since the epoch;
        None if there is nothing to do until a message or a read comes. Raises NotInMemory."""
        self._is_called = self._is_called_soon = False
        self._soonest_ms = _NEVER_MS
        now_ms = now.wall_ms
        if self._unfollowed:
            self._following.run(now_ms, lambda: self.follow(now_ms))
        take_census = self._slots.search.take_census
        is_counting = self._counting.run(now_ms, take_census)
        if not self._config.value.stop_dequeue:
            self._search_overdue(now_ms)
        while True:
            worked = not self._config.value.stop_enqueue and self._enqueuing.run(
                now_ms, lambda: self._enqueuer.enqueue_next(now_ms)
            )
            if not self._config.value.stop_dequeue:
                worked |= self._dequeue(now_ms)
            if not worked and not (is_counting and self._counting.run(now_ms, take_census)):
                break
            if budget.is_spent:
                break
        if self._on_counted and self.is_counted:
            waiting, self._on_counted = self._on_counted, []
            for call in waiting:
                call()
        return self._next_ms(now_ms)

    def follow(self, now_ms: int) -> bool:
        """Append the next records of recurring messages that are missing after a power cut, unless this was done
        before. Return whether there were any. Raises StoreError, OSError; then nothing was appended."""
        if not self._unfollowed:
            return False
        try:
            for physical_offset in self._unfollowed:
                message = self._store.message_at(physical_offset)
                if message is not None:
                    self._recurring.stage_next(message, now_ms)
            self._store.appender.commit()
        except BaseException:
            self._store.appender.roll_back()
            raise
        self._unfollowed.clear()
        return True

    def _dequeue(self, now_ms: int) -> bool:
        """Do a part of the dequeuing. Return whether there was anything to do."""
        if self._is_reading or self._slots.is_handing_on:
            return False
        return (
            self._dequeuing.run(now_ms, lambda: self._work_on_second(now_ms))
            or self._preloading.run(now_ms, lambda: self._slots.turns.preload(now_ms))
            or self._search_overdue(now_ms)
        )

    def _search_overdue(self, now_ms: int) -> bool:
        """Do a part of the search for the newest overdue messages. Return whether there was anything to do."""
        catch_up = self._catch_up
        return catch_up.is_busy and self._searching.run(now_ms, lambda: catch_up.step(now_ms))

    def _work_on_second(self, now_ms: int) -> bool:
        """Do a part of the current second's work, or begin the turn of the next second. Return whether there was
        anything to do. Raises StoreError, OSError; then that part is still to be done."""
        if self._slots.turns.advance(now_ms):
            return True
        second = self._slots.turns.current
        if second.load_next():
            return True
        if second.deletes:
            self._slots.delete_by_key(second)
            return True
        if second.again:
            newest = self._enqueuer.newest()  # before the move: if the read failed after it, nothing would repeat it
            if self._slots.put_again(second, now_ms):
                self._slots.mark_newest(newest, now_ms)
            return True
        return self._bring_back(second, now_ms) or self._deliver(second, now_ms)

    def _deliver(self, second: Second, now_ms: int) -> bool:
        """Deliver a batch of a second. Return whether there was one. Raises StoreError, OSError."""
        waits = second.due(now_ms, _DELIVER_UNITS)
        if not len(waits):
            return False
        if self._store.health.verdict is not Verdict.HEALTHY:
            # Nothing can be appended now, and each try would read records for their topics in vain.
            raise self._store.health.error()
        queued = self._slots.parking.going_on(self.policies.is_paused)
        if self.policies or queued:
            if self._is_cold(waits[self.policies.concerns(waits)]):
                second.read_again(len(waits))
                return False
            split = self.policies.split(waits, now_ms, queued)
            if split is not None and len(split.dropped) > _DROP_UNITS:
                waits = waits[:_DROP_UNITS]
                split = self.policies.split(waits, now_ms, queued)
            if split is not None:
                self._is_warm = False
                self._apply(second, split, len(waits), now_ms)
                return True
        units = np.empty(len(waits), UNITS)
        units["physical_offset"], units["size"], units["tags_code"] = waits["physical"], waits["size"], 0
        may_wait = self._is_warm or self._read_cold is None
        self._is_warm = False
        outcome = self._batches.deliver(units, now_ms, may_wait=may_wait, second=second.number)
        if outcome.kind is Kind.COLD:
            self._warm(units)
            second.read_again(len(units))
            return False
        if outcome.kind is Kind.GONE:
            self.lost += outcome.units
            log.error(
                "timer_messages_missing", messages=outcome.units, physical_offset=int(units["physical_offset"][0])
            )
        with self._store.health.noting():  # a failure after the append must not lead to a second append
            self._trouble = None
            second.touch()
            second.drop(outcome.units)
            self.dequeued += outcome.delivered
            self._slots.gone(waits[: outcome.units])
        return True

    def _bring_back(self, second: Second, now_ms: int) -> bool:
        """Bring back some parked messages whose topics are no longer paused, by the topics' present policies, unless
        the current second has enough messages left. Return whether there was anything to do. Raises StoreError,
        OSError."""
        parking = self._slots.parking
        waits = (
            parking.next_messages(_DELIVER_UNITS, self.policies.is_paused) if len(second) < _BRING_BACK_UNITS else None
        )
        if waits is None or not len(waits):
            return waits is not None
        if self._is_cold(waits[self.policies.concerns(waits)]):
            return False
        split = self.policies.split(waits, now_ms)
        if split is not None and len(split.dropped) > _DROP_UNITS:
            waits = waits[:_DROP_UNITS]
            split = self.policies.split(waits, now_ms)
        self._is_warm = False
        if split is None:
            none, no_seconds = waits[:0], np.empty(0, np.int64)
            split = Split(
                now=waits.copy(),
                later=none,
                held=none,
                held_seconds=no_seconds,
                parked=none,
                moved=none,
                dropped=none,
                turns={},
            )
        slots, now, later, held = self._slots, split.now, split.later, split.held
        now["held"] = True  # the policy does not apply to them again
        back = np.concatenate((now, later, held))
        not_before = np.zeros(len(back), np.int64)
        not_before[len(now) + len(later) :] = split.held_seconds
        # All reads come first: if one failed after some messages had got new units, these messages would be moved
        # again.
        slots.prepare(back, now_ms, not_before)
        self._cancel(split.dropped, now_ms)
        slots.moving(held)
        # Messages stay parked if their topic is paused and only another topic with the same hash is not.
        others = np.concatenate((split.dropped, split.parked))
        moved = waits[~np.isin(waits["position"], others["position"])]
        if len(moved):
            self._note_held(back[len(now) :], not_before[len(now) :])
            slots.bring_back(moved, back, now_ms, not_before)
        with self._store.health.noting():
            slots.census.removed(moved)
            self._carried_out(split)
            parking.finished(len(waits))
        return True

    def _note_held(self, waits: Waits, not_before: NDArray[np.int64]) -> None:
        """Note that messages get slots for times that policies chose, so that `Slots.policy_end` covers these slots."""
        if len(waits):
            latest = np.maximum(slot_second_of(waits["due"]), not_before)
            self._slots.note_held(int(latest.max()))

    def _cancel(self, waits: Waits, now_ms: int) -> None:
        """Append records that delete messages dropped by policies, and withdraw these messages immediately: a
        checkpoint must not say that they wait, and the rest of their split may fail and is then tried again. Call
        `_carried_out` after that. Raises StoreError, OSError."""
        left = waits[~np.isin(waits["physical"], list(self._cancelled))]
        try:
            for physical, size in left[["physical", "size"]].tolist():
                message = self._store.message_at(physical, size)
                if message is not None:
                    recurs = is_recurring(message)
                    self._records.stage_deletion(message, due_of(message) or now_ms, now_ms, is_followed=recurs)
                    if recurs:
                        self._recurring.stage_next(message, now_ms)
            self._store.appender.commit()
        except BaseException:
            self._store.appender.roll_back()
            raise
        with self._store.health.noting():
            self._slots.delete(left)
            self.dropped += len(left)
            self._cancelled.update(left["physical"].tolist())

    def _carried_out(self, split: Split) -> None:
        """Note that a split was carried out."""
        self._cancelled.difference_update(split.dropped["physical"].tolist())
        self.policies.carried_out(split)

    def _apply(self, second: Second, split: Split, count: int, now_ms: int) -> None:
        """Carry out a split of the first `count` messages of a second. Messages to be delivered now are put back, in
        front of all others. Raises StoreError, OSError."""
        slots, later, held, parked = self._slots, split.later, split.held, split.parked
        moved = np.concatenate((later, held, parked))
        # As in `_bring_back`: all reads come first.
        park_in = slots.parking.second_for(now_ms) if len(parked) else 0
        not_before = np.zeros(len(moved), np.int64)
        not_before[len(later) : len(later) + len(held)] = split.held_seconds
        not_before[len(later) + len(held) :] = park_in
        slots.prepare(moved, now_ms, not_before)
        self._cancel(split.dropped, now_ms)
        if len(moved):
            slots.moving(np.concatenate((held, parked)))
            self._note_held(np.concatenate((later, held)), not_before[: len(later) + len(held)])
            slots.move(moved, np.full(len(moved), NORMAL, np.int32), now_ms, not_before)
        with self._store.health.noting():
            if len(moved):
                slots.parking.added(park_in, parked)
                second.touch()
                slots.census.removed(split.moved)
            self._carried_out(split)
            second.drop(count)
            split.now["held"] = True  # the policy does not apply to them again
            second.put_back(split.now)

    def _is_cold(self, waits: Waits) -> bool:
        """Whether the records of messages are not in memory; if so, has a thread read them."""
        if self._read_cold is None or self._is_warm or not len(waits):
            return False
        if self._store.is_cached(waits[["physical", "size"]].tolist()):
            return False
        units = np.empty(len(waits), UNITS)
        units["physical_offset"], units["size"], units["tags_code"] = waits["physical"], waits["size"], 0
        self._warm(units)
        return True

    def _read_ahead(self, waits: Waits) -> None:
        """Have a thread read records of a second into memory before its turn. Messages that have waited long are only
        on the disk, each in a different place."""
        if self._read_cold is not None:
            self._read_cold(ReadAhead(self._store.log, waits["physical"], waits["size"]), lambda: None)

    def _warm(self, units: NDArray[Any]) -> None:
        """Have a thread read the records of these units from the disk; dequeuing waits for it."""
        assert self._read_cold is not None
        self._is_reading = True
        self._trouble = "old messages are being read from the disk"

        def done() -> None:
            self._is_reading = False
            self._is_warm = True
            self._wake()

        self._read_cold(self._batches.warm(units), done)

    def _next_ms(self, now_ms: int) -> int | None:
        """Return when there will be work, ms since the epoch; None if there is none until a message or a read comes."""
        config, times = self._config.value, []
        if self._unfollowed:
            times.append(self._following.at_ms)
        if self._slots.census.is_begun and not self._slots.census.is_complete:
            times.append(self._counting.at_ms)
        if self._catch_up.is_busy and not config.stop_dequeue:
            times.append(self._searching.at_ms)
        if not config.stop_enqueue and self._enqueuer.behind > 0:
            times.append(self._enqueuing.at_ms)
        if not (config.stop_dequeue or self._is_reading or self._slots.is_handing_on):
            if self._slots.parking.is_busy(self.policies.is_paused):
                times.append(self._dequeuing.at_ms)
            try:
                due_ms = self._slots.turns.next_ms(now_ms, self._preloading.at_ms)
            except OSError as error:
                self._preloading.failed(now_ms, error)
                due_ms = self._preloading.at_ms
            if due_ms is not None:
                times.append(max(due_ms, self._dequeuing.at_ms))
        return max(now_ms, min(times)) if times else None

    # --- the census

    @property
    def is_counted(self) -> bool:
        """Whether the census is complete, so that `TimerChanges.to_replace` may be called."""
        return self._slots.census.is_complete

    @property
    def counts(self) -> DueCounts:
        """The number of messages in the wheel due in each second; complete if `is_counted`."""
        return self._slots.census.counts

    def count(self, then: Callable[[], None] | None = None) -> None:
        """Begin the census, unless it was begun before. `then`: called by the first `step` that finds the census
        complete."""
        census = self._slots.census
        if not census.is_begun:
            census.begin(self._slots.log.begin)
            self._wake()
        if then is not None:
            self._on_counted.append(then)

    # --- for tools

    @property
    def queue_offset(self) -> int:
        """The next queue offset of the timer topic to put into the wheel."""
        return self._enqueuer.next_offset

    def state(self, now_ms: int) -> TimerState:
        """Return the present state of the timers."""
        head = self._slots.turns.current.head_ms
        first = min((due for due in (head, self._enqueuer.refused_ms) if due is not None), default=now_ms)
        late_ms = max(0, now_ms - first)
        enqueue_tps, dequeue_tps = self._rates
        return TimerState(
            read_ms=self._slots.turns.second * PRECISION_MS,
            queue_offset=self._enqueuer.next_offset,
            behind_messages=self._enqueuer.behind,
            pending=self._topics.total,
            enqueue_tps=enqueue_tps,
            dequeue_tps=dequeue_tps,
            late_ms=late_ms,
        )

    def checkpoint_body(self) -> bytes:
        """Return the 56 bytes of timercheck, the body of the answer to GET_TIMER_CHECK_POINT."""
        return self._checkpoint.check().encode()

    def is_alone(self, topic: str) -> bool:
        """Whether this topic is known, and no other known topic has the same hash."""
        return self._topics.is_alone(topic)

    def metrics(self) -> dict[str, int]:
        """Return the number of waiting messages by topic. See `TimerTopics.metrics`."""
        return self._topics.metrics()

    def report(self, now: Moment) -> None:
        """Compute rates, and log lateness. Must be called about once a second."""
        monotonic = now.monotonic
        seconds = max(monotonic - self._sampled[2], 0.001)
        enqueued, dequeued = self._enqueuer.messages, self.dequeued
        self._rates = (enqueued - self._sampled[0]) / seconds, (dequeued - self._sampled[1]) / seconds
        self._sampled = enqueued, dequeued, monotonic
        self._tell_dropped()
        late_ms = self.state(now.wall_ms).late_ms
        if late_ms < WARN_MS:
            self._warned_at = None
        elif self._warned_at is None or monotonic - self._warned_at >= WARN_AGAIN_SECONDS:
            self._warned_at = monotonic
            reason = "timerStopDequeue" if self._config.value.stop_dequeue else self._reason()
            log.warning(
                "timers_late",
                late_ms=late_ms,
                waiting=self._topics.total,
                delivered_per_second=round(self._rates[1]),
                reason=reason or "many messages are due at once",
            )

    def _reason(self) -> str | None:
        """Return why messages are late, if some work fails or waits for the disk; else None."""
        reasons = (each.reason for each in (self._dequeuing, self._enqueuing, self._preloading))
        return next((reason for reason in reasons if reason is not None), self._trouble)

    def _tell_dropped(self) -> None:
        """Log the number of messages cancelled by policies since the last call."""
        if self.dropped > self._dropped_told:
            log.warning("overdue_messages_dropped", messages=self.dropped - self._dropped_told)
            self._dropped_told = self.dropped

    # --- the files

    def hand_over_next(self, now_ms: int) -> bool:
        """At a clean stop, do a part of the work that allows Apache's broker to continue with the files. Return whether
        there is more. Apache's broker reads a slot as a whole, so the rest of a partly delivered slot is moved into the
        next one. Raises OSError; duemq's next start is exact even then."""
        slots = self._slots
        # Apache's broker would put these messages into the wheel itself, including those delivered or withdrawn before
        # a crash.
        if not slots.findings.is_replayed and self._enqueuer.enqueue_next(now_ms):
            return True
        # Not beyond the present second: if the clock was set back, messages that are not due yet would come late.
        beyond = min(slots.findings.start.recovered_to, slot_second(now_ms) + 1)
        if slots.has_to_hand_on(beyond):
            slots.hand_on(now_ms, beyond)
            return True
        if self._marking is None:
            self._marking = slots.mark_delivered()
        for _ in self._marking:
            return True
        self._tell_dropped()
        self._slots.mark_newest(self._enqueuer.newest(), now_ms)
        return False

    # --- see `storage.durability.owner.CheckpointPart`

    @property
    def wants_checkpoint(self) -> bool:
        """Whether a checkpoint is needed early: never for the timers."""
        return False

    def note(self) -> bytes:
        """Return the note for a checkpoint made now: the state from which recovery continues."""
        return self._checkpoint.note()

    def begin_write(self) -> None:
        """Prepare to write for a new checkpoint, whose note was taken just now; the next `write_next` begins."""
        self._checkpoint.begin_write()

    def write_next(self, now: Moment) -> bool:
        """First limit how much recovery has to read, then write some of the wheel's changed slots into its file; return
        whether there is more to do. Raises OSError; writing then starts over."""
        return self._checkpoint.write_next(now)

    def plan_sync(self, now: Moment, *, is_last: bool) -> Callable[[], None]:
        """Return the work, run by a worker, that makes durable everything that was put into files so far. `is_last`:
        the store is closed after this. The work raises OSError, NotDurable."""
        return self._checkpoint.plan_sync(now)

    def plan_after(self) -> Callable[[], None]:
        """Return the work to do once the checkpoint for which `plan_sync` was called just before is durable; the same
        worker runs it. The work raises OSError; then the checkpoint is made again."""
        return self._slots.log.superseded.plan()

    def needed_from(self) -> int:
        """Return the physical offset from which on recovery may read the commitlog if it starts from the checkpoint on
        the disk."""
        return self._checkpoint.needed_from

    def keep_next(self, limit: int, now: Moment) -> bool | None:
        """Look at a few messages in the commitlog files before a physical offset, `limit`, since these files are about
        to be removed, and append those that still wait once more; those of delay levels, too, which from then on wait
        in the wheel. Returns whether any message was appended; None once all have been looked at. Raises StoreError,
        OSError; the files are then kept."""
        return self.changes.keep_next(limit, now.wall_ms)

    def expire_next(self) -> list[str] | None:
        """Forget files of the timer log that recovery does not need. Return their paths, for the caller to remove; None
        when there is nothing left to look at. Raises OSError, NotInMemory."""
        if self._expiring is None:
            self._expiring = self._slots.expire(*self._checkpoint.kept_from)
        try:
            paths = next(self._expiring, None)
        except BaseException:
            self._expiring = None  # the next call starts over
            raise
        if isinstance(paths, ColdRead):
            raise NotInMemory("the timer log", paths.position, paths.run)
        if paths is None:
            self._expiring = None
        return paths

    @property
    def found(self) -> StartFacts:
        """The messages that recovery found delivered, withdrawn or moved, as long as that matters."""
        return self._slots.findings.start.found

    def units_behind(self, start: int, end: int) -> NDArray[Any]:
        """Return the units of `queue` between two queue offsets. Raises OSError."""
        return self._batches.read(self.queue, start, end - start)

    @property
    def log_end(self) -> int:
        """The position behind the last unit of the timer log."""
        return self._slots.log.end

    def units_waiting(self, start: int = 0) -> Iterator[Waits | ColdRead]:
        """Iterate over the messages in the wheel whose units lie in the timer log from position `start` on. Yields each
        message once, in parts of bounded size, in the order of the log; and reads to be made before the next step
        (`patiently`). Messages that get another slot before the search comes to their units come last, with their new
        units."""
        return self._slots.search.units_waiting(start)

    def waiting_by_record(self, after: int, end: int) -> Iterator[Waits | ColdRead]:
        """Iterate as `units_waiting` does, but in the order of the messages' records, and only over records between two
        physical offsets, both exclusive. A message keeps its position if it gets another unit in the meantime, or
        before a search is continued."""
        return self._slots.search.by_record(after, end)

    def close(self) -> None:
        """Close the files."""
        self._slots.log.close()
        self._slots.wheel.close()
