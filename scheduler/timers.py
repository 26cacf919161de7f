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

from protocol import properties, timer_properties
from protocol.record import StoredMessage
from protocol.timer_properties import PRECISION_MS, slot_second
from scheduler import timer_files
from scheduler.batches import Batches, Kind
from scheduler.level_queues import LevelQueues, ReadCold
from scheduler.timer_config import Cancelled, Refusal, TimerConfig
from scheduler.timer_files import TimerCheck, TimerNote
from scheduler.timer_log import APPLIED, DELETE, NORMAL, ROLL, UNIT, WITHDRAWN, TimerLog, seconds_of
from scheduler.timer_policies import Policies, Split, TimerPolicy
from scheduler.timer_records import TimerRecords
from scheduler.timer_recovery import Start, TimerRecovery
from scheduler.timer_second import WAIT, Second, signed_due, slot_second_of, waits_of
from scheduler.timer_topics import TimerTopics
from scheduler.timer_wheel import HOUR, SLOTS, TimerWheel
from storage.clock import Clock
from storage.consume_queue import PADDING_SIZE, SCHEDULE_TOPIC, TIMER_TOPIC, ConsumeQueue
from storage.copies import UNITS
from storage.errors import StoreError
from storage.recovery import Recovered
from storage.store import MessageStore

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from scheduler.timer_second import Waits

log = structlog.get_logger(__name__)

SLICE_SECONDS: Final = 0.002
"""How long one step goes on."""
PRELOAD_SECONDS: Final = 10
"""Slots are loaded so long before their time."""
REFUSED_RETRY_MS: Final = 100
"""When the store takes nothing, it is tried again after this."""
WARN_MS: Final = 1000
WARN_AGAIN_SECONDS: Final = 60.0
_ENQUEUE_UNITS: Final = 4096
_DELIVER_UNITS: Final = 512
_ROLL_UNITS: Final = 4096
_LOOK_UNITS: Final = 32
_MAX_HASH: Final = 2**32
"""Tags codes up to here are hashes, beyond they are deliver times."""
_DELETED: Final = DELETE | WITHDRAWN
_MAX_LAG_SECONDS: Final = 20 * 86_400
_MAX_SINCE_BYTES: Final = 16 * 1024 * 1024
_NOTHING: Final = Start(0, 0, 0, 0, {})
_SOON_MS: Final = 100
_NEVER_MS: Final = 2**62
_NEAR_SECONDS: Final = 8


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
        self.config = config
        self._read_cold = read_cold
        root = store.config.root
        self._log = TimerLog(store.files, os.path.join(root, "timerlog"), config.log_segment_size)
        self._wheel = TimerWheel(store.files, os.path.join(root, "timerwheel"))
        self._check_path = os.path.join(root, "config", "timercheck")
        self._metrics_path = os.path.join(root, "config", "timermetrics")
        self._check = TimerCheck()
        self._batches = Batches(store)
        self.queue = store.ensure_queue(TIMER_TOPIC, 0)
        """Where a message is staged, with its deliver time as tags code and as prepared-transaction offset."""

        self._second = 0
        """The second whose turn it is: everything in slots before it is done."""
        self._since = 0
        self._log_since = 0
        """Where commitlog and timer log ended when its turn came."""
        self._enqueued = 0
        """Next queue offset to put into the wheel."""
        self._resident: dict[int, Second] = {}
        """The current second, and those up to `_preloaded` that have messages."""
        self._preloaded = 0
        self._synced = 0
        """The timer log is durable up to here, but for marks of withdrawn units."""
        self._noted_log_since = self._kept_from = 0
        """`_log_since` as of the last note, and as of the last that is durable: recovery may need what is behind."""

        self._start = _NOTHING
        """What recovery found, as long as it matters..."""
        self._replayed_to = 0
        """...which for messages from this queue offset on it does not."""

        self._topics = TimerTopics()
        self._records = TimerRecords(store, self.queue, self._topics)
        self.policies = Policies()
        self._held_to = 0
        """No second beyond has a message whose time a policy chose."""
        self._retry_ms = 0
        self._is_reading = False
        self._is_warm = False
        self._soonest_ms = _NEVER_MS
        """When the first of the messages is due that came since the last step."""
        self._is_called = self._is_called_soon = False
        self._trouble: str | None = None
        self.enqueued = self.dequeued = self.lost = self.dropped = 0
        """Messages put into the wheel, delivered, found missing, and cancelled by their topic's policy, since start."""
        self._sampled = (0, 0, clock.monotonic())
        self._rates = (0.0, 0.0)
        self._warned_at: float | None = None
        self.on_earlier: Callable[[], None] = lambda: None
        """Called when `step` has something to do before the time it gave..."""
        self.on_arrived: Callable[[], None] | None = None
        """...or when messages came that are not due soon: some ms later will do, with more of them."""

    # --- start

    def load(self, recovered: Recovered) -> None:
        """Open the files, or make them, and find out what waits. Raises StoreFormatError, OSError."""
        files = self._store.files
        files.make_directories(os.path.dirname(self._check_path))
        check = timer_files.load_check(files, self._check_path)
        note = None if recovered.is_foreign else timer_files.decode_note(recovered.notes.get("timers", b""))
        recovery = TimerRecovery(self._store, self.queue, self._log, self._wheel, self._clock.now_ms(), recovered)
        start = recovery.run(note, check)
        self._check = check or TimerCheck()
        self._second, self._since, self._log_since = start.second, start.since, start.log_since
        self._enqueued = start.queue_offset
        self._topics.load(timer_files.load_topics(files, self._metrics_path), start.waiting)
        self._start = start
        self._held_to = note.held_to if note is not None else 0
        self._replayed_to = self.queue.next_offset
        self._preloaded = self._second
        self._synced = self._log.begin
        for physical in recovered.origins.withdrawn:
            self._withdraw_again(physical)
        self._open(self._second)
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
        if config.congest_limit < 2**31 - 1 and self._is_congested(self._slot_for(slot_second(deliver_ms)), now_ms):
            return Refusal.CONGESTED
        return None

    def _is_congested(self, second: int, now_ms: int) -> bool:
        """Whether a second has as many messages as it may have, with those that came just now."""
        limit = self.config.congest_limit
        if self._wheel.count(second) + self.queue.next_offset - self._enqueued < limit:
            return False
        self.gather(now_ms)
        units = self._batches.read(self.queue, self._enqueued, self.queue.next_offset - self._enqueued)
        seconds = slot_second_of(units["tags_code"].astype(np.int64))
        return self._wheel.count(second) + int((seconds == second).sum()) >= limit

    def gather(self, now_ms: int) -> None:
        """Put into the wheel what came just now, rather than with the next step, which says so where that fails."""
        if not self.config.stop_enqueue:
            with contextlib.suppress(OSError):
                self._enqueue(now_ms)

    def _slot_for(self, second: int) -> int:
        """The second whose slot takes what is due in a second, as of now."""
        base = max(self._clock.now_ms() // PRECISION_MS, self._second)
        excess = second - base - self.config.roll_window
        return second if excess <= 0 else second + -(-excess // self.config.roll_window) * -self.config.roll_window

    def staged(self, queue_offset: int, topic: str) -> None:
        """A message for a topic was staged at a queue offset of `queue`. To be called right after the staging."""
        self._topics.staged(queue_offset, topic)

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
        self.policies.set(self._topics.hash_of(topic), policy)

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
        if hashes is None or not (codes > _MAX_HASH).all():
            units = units[:_LOOK_UNITS]
            waits, magic = self._look(units)
        else:
            waits = np.zeros(len(units), WAIT)
            waits["physical"], waits["size"] = units["physical_offset"], units["size"]
            waits["due"], waits["hash"] = codes, hashes
            magic = np.full(len(units), NORMAL, np.int32)
        if self._enqueued < self._replayed_to:
            magic |= np.where(np.isin(waits["physical"], self._start.withdrawn), WITHDRAWN, 0).astype(np.int32)
            kept = ~np.isin(waits["physical"], self._start.done)
            waits, magic = waits[kept], magic[kept]
        if len(waits):
            self._put(waits, magic, now_ms)
            is_message = magic == NORMAL
            self._topics.count(waits[is_message], 1)
            self.enqueued += int(is_message.sum())
        self._enqueued += len(units)
        self._topics.drop_staged(self._enqueued)
        return True

    def _look(self, units: NDArray[Any]) -> tuple[Waits, NDArray[np.int32]]:
        """As of `_enqueue`, for messages of which only their records tell when they are due."""
        waits = np.zeros(len(units), WAIT)
        magic = np.zeros(len(units), np.int32)
        for at, (physical, size, code) in enumerate(units.tolist()):
            message = self._store.message_at(physical, size) if 0 < size != PADDING_SIZE else None
            due_ms = self._due_of(message) if message is not None else None
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
            elif code > _MAX_HASH:
                due_ms = code
            waits[at] = (physical, due_ms, 0, size, topic_hash, False)
        known = magic != 0
        return waits[known], magic[known]

    @staticmethod
    def _due_of(message: StoredMessage) -> int | None:
        text, promise = message.properties_text, message.prepared_transaction_offset
        return timer_properties.due_of(text, message.store_timestamp, promise)

    def _put(self, waits: Waits, magic: NDArray[np.int32], now_ms: int) -> None:
        """Write units for messages and link them to their slots. Raises OSError; then nothing changed."""
        window = self.config.roll_window
        now_second = now_ms // PRECISION_MS
        seconds = np.maximum((waits["due"] - 1) // PRECISION_MS, self._second)
        excess = seconds - (max(now_second, self._second) + window)
        is_far = excess > 0
        if is_far.any():
            # Less a multiple of the window, so that it can be told where a message waits.
            nearer = seconds - -(-excess // window) * window
            seconds = np.where(is_far, np.minimum(nearer, self._second + SLOTS - HOUR), seconds)
            magic = np.where(is_far, magic | ROLL, magic)
        write_second = min(max(now_second, self._second - _MAX_LAG_SECONDS), self._second + _MAX_LAG_SECONDS)
        positions = self._log.positions(len(waits))
        plan = self._wheel.plan(seconds, positions)
        units = np.zeros(len(waits), UNIT)
        units["size"] = UNIT.itemsize
        units["previous"] = plan.previous
        units["magic"] = magic
        units["write_ms"] = write_second * PRECISION_MS
        units["delay_ms"] = (seconds - write_second) * PRECISION_MS
        units["physical_offset"], units["record_size"] = waits["physical"], waits["size"]
        units["topic_hash"] = waits["hash"]
        units["due_ms"] = np.where(magic & _DELETED == _DELETED, APPLIED, signed_due(waits))
        self._log.append(units, positions)
        self._wheel.put(plan)
        waits["position"] = positions
        if int(plan.seconds[0]) <= self._preloaded:
            self._add_resident(waits, magic, seconds)

    def _add_resident(self, waits: Waits, magic: NDArray[np.int32], seconds: NDArray[np.int64]) -> None:
        """Seconds that are loaded already get their messages at once."""
        near = seconds <= self._preloaded
        for number in np.unique(seconds[near]).tolist():
            second = self._resident.get(number)
            if second is None:
                second = self._resident[number] = Second(number)
            mine = seconds == number
            self._sort_in(second, waits[mine], magic[mine], second.add)

    @staticmethod
    def _sort_in(second: Second, waits: Waits, magic: NDArray[np.int32], add: Callable[[Waits], None]) -> None:
        """Give a second units of its slot, by what they are: `add` for messages."""
        if (magic == NORMAL).all() and (waits["due"] <= (second.number + 1) * PRECISION_MS).all():
            add(waits)
            return
        for physical, size in waits[magic & (DELETE | ROLL | WITHDRAWN) == DELETE][["physical", "size"]].tolist():
            second.deletes.append((physical, size))
        waits, magic = waits[magic & WITHDRAWN == 0], magic[magic & WITHDRAWN == 0]
        later = (magic & ROLL != 0) | (slot_second_of(waits["due"]) > second.number)
        if later.any():
            second.again.append((waits[later], magic[later] & ~ROLL))
        now = ~later & (magic & DELETE == 0)
        if now.any():
            add(waits[now])

    # --- slots

    def _open(self, number: int) -> None:
        """Begin to load a second."""
        second = self._resident.get(number)
        if second is not None:
            return
        second = self._resident[number] = Second(number)
        last = self._wheel.last(number)
        if last >= 0:
            second.loader = self._load(second, last)

    def _load(self, second: Second, last: int) -> Iterator[None]:
        for positions, units in self._log.chain(last):
            if int(seconds_of(units[-1:])[0]) != second.number:
                break
            magic = units["magic"].astype(np.int32)
            waits = waits_of(units, positions)
            kept = magic & WITHDRAWN == 0
            if second.number < self._start.recovered_to:
                done = kept & np.isin(waits["physical"], self._start.done)
                self._topics.count(waits[done & (magic & DELETE == 0)], -1)
                kept &= ~done
                if second.number == self._start.second:
                    moved = np.isin(waits["physical"], self._start.superseded)
                    kept &= ~(moved & (positions < self._start.log_since))
            if not kept.all():
                waits, magic = waits[kept], magic[kept]
            unknown = np.flatnonzero((waits["due"] == 0) & (magic & (DELETE | ROLL) != DELETE))
            for at in unknown.tolist():
                physical, size = waits[["physical", "size"]][at].item()
                message = self._store.message_at(physical, size)
                due_ms = self._due_of(message) if message is not None else None
                waits["due"][at] = due_ms if due_ms is not None else (second.number + 1) * PRECISION_MS
                if at % _LOOK_UNITS == 0:
                    yield
            self._sort_in(second, waits, magic, second.add_older)
            yield

    def _loaded(self, number: int) -> Second:
        """A second that is in memory, wholly."""
        second = self._resident[number]
        for _ in second.loader or ():
            pass
        second.loader = None
        return second

    def _delete_by_key(self, second: Second) -> Iterator[None]:
        """Take out of a second what its deleting records name, by topic and unique key, or by the key alone as older
        brokers wrote it."""
        keys = set()
        for physical, size in second.deletes:
            message = self._store.message_at(physical, size)
            if message is not None:
                keys.add(properties.get(message.properties_text, properties.TIMER_DEL_UNIQKEY))
            yield
        second.deletes = []
        deleted = []
        for physical, size in second.remaining()[["physical", "size"]].tolist():
            message = self._store.message_at(physical, size)
            text = message.properties_text if message is not None else ""
            key = properties.get(text, properties.UNIQ_KEY)
            if key is not None and not keys.isdisjoint((key, f"{properties.get(text, properties.REAL_TOPIC)}+{key}")):
                deleted.append(physical)
            yield
        for physical in deleted:
            waits = second.remaining()
            self._topics.count(waits[waits["physical"] == physical], -1)
            second.remove(physical)

    def _advance(self, now_ms: int) -> bool:
        """Give the next second its turn, if this one is done and over; whether there was one."""
        frontier = slot_second(now_ms)
        if self._second >= frontier or not self._resident[self._second].is_done:
            return False
        following = self._wheel.next_second(self._second + 1, frontier + 1)
        del self._resident[self._second]
        self._turn_to(following if following is not None else frontier)
        return True

    def _turn_to(self, number: int) -> None:
        self._second = number
        self._note_turn()
        self._preloaded = max(self._preloaded, number)
        self._open(number)

    def _note_turn(self) -> None:
        """What has been delivered until now need not be known any more, since it was not of this second or a later
        one; but for what recovery found, which may be."""
        if self._enqueued >= self._replayed_to and self._second >= self._start.recovered_to:
            self._start = _NOTHING
            self._since, self._log_since = self._store.log.end, self._log.end

    # --- time

    def step(self) -> int | None:
        """Do what is due, for a few ms; gives when to call again, ms since the epoch, or None for "when a message
        comes"."""
        self._is_called = self._is_called_soon = False
        self._soonest_ms = _NEVER_MS
        now_ms = self._clock.now_ms()
        until = time.perf_counter() + SLICE_SECONDS
        try:
            while time.perf_counter() < until:
                worked = not self.config.stop_enqueue and now_ms >= self._retry_ms and self._enqueue(now_ms)
                if not self.config.stop_dequeue:
                    worked |= self._dequeue(now_ms)
                if not worked:
                    break
        except (StoreError, OSError) as error:
            if self._trouble != str(error):
                log.warning("timer_delivery_refused", reason=str(error))
            self._trouble = str(error)
            self._retry_ms = now_ms + REFUSED_RETRY_MS
        return self._next_ms(now_ms)

    def _dequeue(self, now_ms: int) -> bool:
        """A bit of what is to be done by the clock; whether there was anything."""
        if self._is_reading or now_ms < self._retry_ms:
            return False
        if self._advance(now_ms):
            return True
        second = self._resident[self._second]
        if second.loader is not None:
            if next(second.loader, _END) is _END:
                second.loader = None
            return True
        if second.deletes:
            second.loader = self._delete_by_key(second)
            return True
        if second.again:
            self._put_again(second, now_ms)
            return True
        return self._deliver(second, now_ms) or self._preload(now_ms)

    def _put_again(self, second: Second, now_ms: int) -> None:
        """Give messages that are due later another slot."""
        waits, magic = second.again[-1]
        self._put(waits[:_ROLL_UNITS].copy(), magic[:_ROLL_UNITS], max(now_ms, (second.number + 1) * PRECISION_MS))
        if len(waits) > _ROLL_UNITS:
            second.again[-1] = waits[_ROLL_UNITS:], magic[_ROLL_UNITS:]
        else:
            second.again.pop()
            if not second.again:
                self._mark_newest(now_ms)

    def _deliver(self, second: Second, now_ms: int) -> bool:
        """Deliver a batch of a second; whether there was one. Raises StoreError."""
        waits = second.due(now_ms, _DELIVER_UNITS)
        if not len(waits):
            return False
        split = self.policies.split(waits, now_ms) if self.policies else None
        if split is not None:
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
        self._topics.count(waits[: outcome.units], -1)
        second.is_touched = True
        second.drop(outcome.units)
        return True

    def _apply(self, second: Second, split: Split, count: int, now_ms: int) -> None:
        """Do with the first messages of a second what their topics' policies say; those that are delivered now are the
        first again."""
        if len(split.later):
            self._held_to = max(self._held_to, slot_second(int(split.later["due"].max())))
            self._put(split.later, np.full(len(split.later), NORMAL, np.int32), now_ms)
        for physical, size in split.dropped[["physical", "size"]].tolist():
            message = self._store.message_at(physical, size)
            if message is not None:
                self._records.delete(message, self._due_of(message) or now_ms)
        if len(split.dropped):
            self.dropped += len(split.dropped)
            self._topics.count(split.dropped, -1)
            log.warning("overdue_messages_dropped", messages=len(split.dropped), second=second.number)
        second.drop(count)
        split.now["held"] = True  # their turn has come
        second.add(split.now)

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

    def _preload(self, now_ms: int) -> bool:
        """Load a bit of the seconds that come next; whether there was anything to do."""
        for second in self._resident.values():
            if second.loader is not None:
                if next(second.loader, _END) is _END:
                    second.loader = None
                return True
        start, end = max(self._preloaded, self._second) + 1, now_ms // PRECISION_MS + PRELOAD_SECONDS
        if start > end:
            return False
        following = self._wheel.next_second(start, end + 1)
        self._preloaded = following if following is not None else end
        if following is not None:
            self._open(following)
        return following is not None

    def _next_ms(self, now_ms: int) -> int | None:
        """When there will be something to do."""
        config = self.config
        if now_ms < self._retry_ms:
            return self._retry_ms
        if not config.stop_enqueue and self._enqueued < self.queue.next_offset:
            return now_ms
        if config.stop_dequeue or self._is_reading:
            return None
        times = []
        for number in sorted(self._resident):
            second = self._resident[number]
            if second.loader is not None or (number == self._second and (second.again or second.deletes)):
                return now_ms
            head = second.head_ms
            if number != self._second and (head is not None or second.again or second.deletes):
                head = max(head or 0, number * PRECISION_MS + 1)
            if head is not None:
                times.append(head)
                break
        following = self._wheel.next_second(self._preloaded + 1, self._second + SLOTS)
        if following is not None:
            times.append((following - PRELOAD_SECONDS) * PRECISION_MS)
        return max(now_ms, min(times)) if times else None

    # --- cancelling

    def cancel(self, physical_offset: int, deliver_ms: int | None = None) -> Cancelled:
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
        if message is None or message.topic != TIMER_TOPIC:
            return Cancelled.UNKNOWN
        due_ms = self._due_of(message)
        is_mark = properties.get(message.properties_text, properties.TIMER_DEL_UNIQKEY) is not None
        if due_ms is None or is_mark:
            return Cancelled.UNKNOWN
        now_ms = self._clock.now_ms()
        while self._enqueued <= message.queue_offset and self._enqueue(now_ms):
            pass
        found = self._find_unit(physical_offset, slot_second(due_ms), slot_second(message.store_timestamp))
        if found is None:
            return Cancelled.DELIVERED
        position, second = found
        if int(self._log.read(position, 1)["magic"][0]) & WITHDRAWN:
            return Cancelled.CANCELLED_BEFORE
        is_delivered = second < self._second or (self._start.done == physical_offset).any()
        if is_delivered or not self._is_waiting(second, physical_offset):
            return Cancelled.DELIVERED
        append(message, due_ms)
        self._withdraw(position, second, message)
        return Cancelled.CANCELLED

    def _take_out_of_level(self, message: StoredMessage, append: Callable[[StoredMessage, int], None]) -> Cancelled:
        is_waiting = self.levels.is_waiting(message) if self.levels is not None else False
        if is_waiting is None:
            return Cancelled.CANCELLED_BEFORE
        if self.levels is None or not is_waiting:
            return Cancelled.DELIVERED
        append(message, self._clock.now_ms())
        self.levels.withdraw(message)
        return Cancelled.CANCELLED

    def _find_unit(self, physical_offset: int, second: int, stored: int) -> tuple[int, int] | None:
        """Position and second of the newest unit of a message that is due in a second and was stored in another; None
        where it has none."""
        window = self.config.roll_window
        slot = second
        if second > self._second:
            slot -= (second - self._second - 1) // window * window
        found = []
        # A clean stop hands what is left of a second over to the next one.
        candidates = [slot, min(slot + window, second), self._second, slot + 1, slot + 2]
        if second <= stored:  # late already when it came
            candidates += range(max(second, stored - _NEAR_SECONDS), stored + 2)
        for candidate in dict.fromkeys(candidates):
            for positions, units in self._log.chain(self._wheel.last(candidate)):
                hits = np.flatnonzero(units["physical_offset"] == physical_offset)
                if len(hits):
                    found.append((int(positions[hits[-1]]), candidate))
                    break
            if found and candidate > self._second:
                break  # it has one unit in a slot to come
        if self._held_to >= self._second:
            return self._scan_for_unit(physical_offset)
        if found:
            return max(found)
        return self._scan_for_unit(physical_offset) if second >= self._second else None

    def _scan_for_unit(self, physical_offset: int) -> tuple[int, int] | None:
        """As `_find_unit`, in the whole log: the roll window was changed, or the clock set."""
        found = None
        for position, units in self._log.scan(self._log.begin, self._log.end):
            hits = np.flatnonzero((units["physical_offset"] == physical_offset) & (units["due_ms"] != APPLIED))
            if len(hits):
                found = position + int(hits[-1]) * UNIT.itemsize, int(seconds_of(units[hits[-1] :])[0])
        return found

    def _is_waiting(self, number: int, physical_offset: int) -> bool:
        """Whether a message of a second, whose unit is there, is still to be delivered."""
        if number not in self._resident:
            return True
        second = self._loaded(number)
        return bool((second.remaining()["physical"] == physical_offset).any()) or any(
            (waits["physical"] == physical_offset).any() for waits, _ in second.again
        )

    def _withdraw(self, position: int, number: int, message: StoredMessage) -> None:
        """A message is not to be delivered from its slot any more. Raises OSError."""
        self._log.withdraw(position)
        second = self._resident.get(number)
        if second is not None:
            second.remove(message.physical_offset)
        self._topics.count_one(properties.get(message.properties_text, properties.REAL_TOPIC) or "", -1)

    def _withdraw_again(self, physical_offset: int) -> None:
        """Recovery found that a message was withdrawn: the mark at its unit may not have been durable."""
        message = self._store.message_at(physical_offset)
        due_ms = self._due_of(message) if message is not None and message.topic == TIMER_TOPIC else None
        if message is None or due_ms is None:
            return
        found = self._find_unit(physical_offset, slot_second(due_ms), slot_second(message.store_timestamp))
        if found is not None:
            self._withdraw(*found, message)

    def find(self, topic: str, unique_key: str, deliver_ms: int) -> int | None:
        """The physical offset of the message of a topic with this UNIQ_KEY that waits for a time whose slot is that
        of `deliver_ms`; None where there is none. Looks at each message of the slot."""
        second = slot_second(deliver_ms)
        window = self.config.roll_window
        if second > self._second:
            second -= (second - self._second - 1) // window * window
        topic_hash = self._topics.hash_of(topic)
        for candidate in (second, second + window):
            for _, units in self._log.chain(self._wheel.last(candidate)):
                for unit in units[units["topic_hash"] == topic_hash][["physical_offset", "record_size"]].tolist():
                    message = self._store.message_at(*unit)
                    if (
                        message is not None
                        and properties.get(message.properties_text, properties.UNIQ_KEY) == unique_key
                    ):
                        return message.physical_offset
        return None

    def units_waiting(self, start: int = 0) -> Iterator[Waits]:
        """The messages in the wheel, in parts of bounded size, in the order of the timer log, from a position of it
        on."""
        for position, units in self._log.scan(start, self._log.end):
            seconds = seconds_of(units)
            live = (seconds >= self._second) & (units["magic"] & (DELETE | WITHDRAWN) == 0)
            at = np.flatnonzero(live)
            waits = waits_of(units[at], position + at * UNIT.itemsize)
            current = seconds[at] == self._second
            if current.any():
                # Of the current second the unit does not tell.
                there = np.isin(waits["physical"], self._loaded(self._second).physical())
                waits = waits[~current | there]
            for number in np.flatnonzero(waits["due"] == 0).tolist():
                message = self._store.message_at(*waits[["physical", "size"]][number].item())
                waits["due"][number] = (self._due_of(message) if message is not None else None) or 0
            yield waits

    # --- messages whose commitlog files expire

    def _keep_before(self, limit: int) -> Iterator[bool]:
        """See `storage.store.MessageStore.keep_before`: append messages once more that still wait when their file is
        about to go, those of delay levels too, which wait on in the wheel."""
        count = 0
        for position, units in self._log.scan(self._log.begin, self._log.end):
            seconds = seconds_of(units)
            live = (units["physical_offset"] < limit) & (seconds >= self._second)
            live &= units["magic"] & (DELETE | WITHDRAWN) == 0
            for at in np.flatnonzero(live).tolist():
                message = self._store.message_at(int(units["physical_offset"][at]), int(units["record_size"][at]))
                second, due_ms = int(seconds[at]), abs(int(units["due_ms"][at]))
                if message is None or second < self._second or not self._is_waiting(second, message.physical_offset):
                    continue
                self._again(message, due_ms or self._due_of(message) or second * PRECISION_MS)
                self._withdraw(position + at * UNIT.itemsize, second, message)
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
        head = self._resident[self._second].head_ms
        late_ms = max(0, self._clock.now_ms() - head) if head is not None else 0
        behind = self.queue.next_offset - self._enqueued
        pending = self._topics.total
        return TimerState(self._second * PRECISION_MS, self._enqueued, behind, pending, *self._rates, late_ms)

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

    # --- the files

    def _note(self) -> bytes:
        """See `storage.store.MessageStore.notes`."""
        if self._store.log.end - self._since > _MAX_SINCE_BYTES:
            # Nothing is due, and recovery would read all that came meanwhile.
            self._advance(self._clock.now_ms())
        self._noted_log_since = self._log_since
        return TimerNote(
            self._second,
            self._since,
            self._log_since,
            self._log.end,
            self._log.crc(self._log.end),
            self._enqueued,
            self._held_to,
            self._topics.waiting(),
        ).encode()

    def write(self) -> Iterator[None]:
        """See `storage.store.Beside`."""
        yield from self._wheel.write(self._second)

    def plan_sync(self) -> Callable[[], None]:
        """See `storage.store.Beside`."""
        files = self._store.files
        end, wheel = self._log.end, self._wheel.file
        to_sync = {*self._log.files_between(self._synced, end), *self._log.take_marked()}
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
                files.sync_directory(self._log.directory)
            files.sync_directory(root)
            timer_files.save_check(files, self._check_path, check)
            files.write_whole(self._metrics_path, metrics, durable=False)
            self._synced = max(self._synced, end)
            self._kept_from = noted_log_since

        return sync

    def _check_now(self) -> TimerCheck:
        check = self._check
        return TimerCheck(
            self._second * PRECISION_MS,
            self._log.end,
            self._enqueued,
            self._enqueued,
            check.state_version,
            check.version_ms,
            check.counter,
        )

    def hand_over(self) -> None:
        """Before the store is closed for good: leave the files so that Apache's broker can go on with them. It reads
        a slot as a whole: what is left of one that is partly delivered goes into the next."""
        now_ms = self._clock.now_ms()
        second = self._loaded(self._second)
        if second.is_touched:
            remaining = second.remaining()
            self._second += 1
            for waits, magic in [(remaining, np.full(len(remaining), NORMAL, np.int32)), *second.again]:
                if len(waits):
                    self._put(waits.copy(), magic, now_ms)
            self._note_turn()
        self._mark_newest(now_ms)

    def _mark_newest(self, now_ms: int) -> None:
        """Let the last unit of the log be of the newest message: Apache's broker goes on behind that one."""
        unit = self.queue.unit(self._enqueued - 1) if self._enqueued > self.queue.min_offset else None
        end = self._log.end
        if unit is None or end == self._log.begin:
            return
        last = self._log.last()
        if last is None or int(last["physical_offset"]) == unit[0]:
            return
        positions = self._log.positions(1)
        mark = np.zeros(1, UNIT)
        mark["size"], mark["previous"], mark["magic"] = UNIT.itemsize, -1, NORMAL | WITHDRAWN
        mark["due_ms"] = APPLIED
        mark["write_ms"] = now_ms // PRECISION_MS * PRECISION_MS
        # In a slot of the past, which nobody reads any more.
        mark["delay_ms"] = (self._second - 3600) * PRECISION_MS - mark["write_ms"]
        mark["physical_offset"], mark["record_size"] = unit[0], unit[1]
        self._log.append(mark, positions)

    def expire(self) -> Iterator[list[str]]:
        """Forget the files of the timer log whose slots are all past; each step gives paths for the caller to
        remove."""
        for end in self._log.file_ends():
            if end > self._kept_from:
                return
            start = self._log.begin
            for _, units in self._log.scan(start, end):
                if int(seconds_of(units).max()) >= self._second:
                    return
                yield []
            yield self._log.drop_before(end)

    def close(self) -> None:
        """Close the descriptors."""
        self._log.close()
        self._wheel.close()


_END: Final = object()
