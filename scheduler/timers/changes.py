"""Changes of waiting messages. They are cancelled, get another time, are replaced by the next message with their key,
or are appended again because their commitlog file expires.

Each change is one record in the timer topic, which names the record that it replaces (`timers.records`), and a mark at
the message's unit, so that it is not delivered. The record decides: if a crash loses the mark, recovery sets it again.

Keeps invariant 20 of ARCHITECTURE.md.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import structlog

from duemq.protocol.errors import TimerIllegal
from duemq.protocol.records import properties, recurrence
from duemq.protocol.records.record import StoredMessage
from duemq.protocol.records.timer_properties import PRECISION_MS, slot_second, stored_key
from duemq.protocol.topics import SCHEDULE_TOPIC, TIMER_TOPIC
from duemq.scheduler import waiting as decided
from duemq.scheduler.delivery.moves import Moves
from duemq.scheduler.levels.service import LevelQueues
from duemq.scheduler.recurring.records import PAUSED_MS, is_recurring
from duemq.scheduler.recurring.times import next_ms
from duemq.scheduler.timers.config import Cancelled
from duemq.scheduler.timers.deliver_times import LOOK_UNITS, due_of
from duemq.scheduler.timers.enqueuer import Enqueuer
from duemq.scheduler.timers.files.sums import is_superseded
from duemq.scheduler.timers.files.unit import MAX_DUE_MS, UNIT, WITHDRAWN, seconds_of
from duemq.scheduler.timers.index.ids import TimerIds, first_offset
from duemq.scheduler.timers.index.keys import key_hash, tag_of
from duemq.scheduler.timers.policy.catch_up import CatchUp
from duemq.scheduler.timers.records import TimerRecords
from duemq.scheduler.timers.seconds.slots import Slots
from duemq.scheduler.timers.topics import TimerTopics
from duemq.storage.errors import NotInMemory
from duemq.storage.log.copies import ORIGIN_ZERO
from duemq.storage.queues.pull import ColdRead, Range, patiently
from duemq.storage.store import MessageStore

if TYPE_CHECKING:
    from duemq.scheduler.timers.seconds.second import Waits

log = structlog.get_logger(__name__)


class _Waiting(NamedTuple):
    """A message that waits in the wheel: its record, deliver time, unit, and the second of the unit's slot."""

    message: StoredMessage
    due_ms: int
    waits: Waits
    second: int


class TimerChanges:
    """Changes messages that wait in the wheel or, if there are levels, in a level. As in a send, the caller holds back
    its answer until the appended records are as durable as the flush mode requires.

    A message is named by the physical offset of its first record, whose id its sender got, or by the physical offset of
    the record by which it waits now."""

    def __init__(
        self,
        *,
        store: MessageStore,
        enqueuer: Enqueuer,
        slots: Slots,
        topics: TimerTopics,
        records: TimerRecords,
        ids: TimerIds,
        catch_up: CatchUp,
        levels: LevelQueues | None,
        moves: Moves,
        expect: Callable[[int], None],
    ) -> None:
        """Prepare the changes. `expect`: called with the deliver time, ms since the epoch, of each message just before
        it is appended."""
        self._store = store
        self._enqueuer = enqueuer
        self._slots = slots
        self._topics = topics
        self._records = records
        self.ids = ids
        """The index from a message's first record to the record by which it waits."""
        self._catch_up = catch_up
        self._expect = expect
        self.levels = levels
        """The queues of messages with a delay level, which can be changed as well; None without levels."""
        self.moves = moves
        self._keeping: Iterator[bool | ColdRead] | None = None
        """The search of `keep_next` in progress."""
        self._now_ms = 0
        """The time of the last call of `keep_next`, ms since the epoch."""

    # --- one message, by its record

    def cancel(self, physical_offset: int, now_ms: int, owner: tuple[str, str] | None = None) -> Cancelled | None:
        """Cancel a message that waits with a timer or a level. Return None, and do nothing, if the result depends on
        `ids` and that index is not complete yet. `owner`: the topic and UNIQ_KEY that the message must have; otherwise
        it counts as UNKNOWN. Raises StoreError, OSError."""
        return self._take_out(
            physical_offset, now_ms, lambda message, due_ms, _: self._records.delete(message, due_ms, now_ms), owner
        )

    def reschedule(
        self, physical_offset: int, deliver_ms: int, now_ms: int, owner: tuple[str, str] | None = None
    ) -> Cancelled | None:
        """Give a message that waits with a timer or a level another time, ms since the epoch; a past time means
        "immediately". Return CANCELLED if that was done, None as `cancel` does. `owner`: see `cancel`. Raises
        StoreError, OSError."""
        due_ms = max(deliver_ms, now_ms)
        return self._take_out(
            physical_offset,
            now_ms,
            lambda message, _, position: self._append_again(message, position, due_ms, now_ms),
            owner,
        )

    def record_of(self, physical_offset: int) -> StoredMessage | None:
        """Return the record at a physical offset or, if that is gone, the message's newest record, as far as `ids` has
        it; None if there is neither. Raises OSError."""
        message = self._store.named_message_at(physical_offset)
        newest = self.ids.newest(physical_offset) if message is None else None
        return self._store.message_at(newest) if newest is not None else message

    def _take_out(
        self,
        physical_offset: int,
        now_ms: int,
        append: Callable[[StoredMessage, int, int | None], object],
        owner: tuple[str, str] | None = None,
    ) -> Cancelled | None:
        """Withdraw a waiting message after `append` has written the record that replaces it. `append` is called with
        the message, its deliver time (for a message of a level: the present time), and the position of its unit in the
        timer log, None without one. `owner`: see `cancel`; it is compared with each record on the way to the one that
        is withdrawn, including the last, since a record itself says to which message it belongs. Raises StoreError,
        OSError."""
        while True:
            message = self._store.named_message_at(physical_offset)
            if message is not None and owner not in (None, owner_of(message)):
                return Cancelled.UNKNOWN
            waiting = self._waiting_of(message, physical_offset, now_ms)
            if isinstance(waiting, _Waiting):
                append(waiting.message, waiting.due_ms, int(waiting.waits["position"][0]))
                with self._store.health.noting():
                    self._slots.withdraw(waiting.waits, waiting.second)
                return Cancelled.CANCELLED
            if isinstance(waiting, StoredMessage):
                assert self.levels is not None
                append(waiting, now_ms, None)
                with self._store.health.noting():
                    self.levels.withdraw(waiting)
                return Cancelled.CANCELLED
            if waiting not in (Cancelled.CANCELLED_BEFORE, Cancelled.NO_LONGER_WAITS):
                return waiting
            if not self.ids.is_complete:
                return None
            newest = self.ids.newest(first_offset(message) if message is not None else physical_offset)
            if newest is None or newest <= physical_offset:
                return waiting
            physical_offset = newest

    def _waiting_of(
        self, message: StoredMessage | None, physical_offset: int, now_ms: int
    ) -> _Waiting | StoredMessage | Cancelled:
        """Return the message that waits in the wheel by the record at a physical offset, or the message
        itself if it waits in a level; otherwise the reason why it does not wait by that record. If it was appended
        again, that is CANCELLED_BEFORE, or NO_LONGER_WAITS if nothing is left that shows this. Raises OSError."""
        if message is None:
            return self._missing(physical_offset)
        if message.topic == SCHEDULE_TOPIC:
            return self._waiting_in_level(message)
        if message.topic != TIMER_TOPIC:
            return Cancelled.DELIVERED
        return self._waiting_in_wheel(message, now_ms)

    def _missing(self, physical_offset: int) -> Cancelled:
        """Return why there is no message at a physical offset. Raises OSError."""
        if physical_offset < self._store.log.begin:
            return Cancelled.NO_LONGER_WAITS
        record = self._store.message_at(physical_offset)
        if record is None or record.topic in (SCHEDULE_TOPIC, TIMER_TOPIC):
            return Cancelled.UNKNOWN
        # A record of a topic that was deleted no longer has a unit, even if the topic was created again since. (Or a
        # client forged the record inside a body; that does no harm here.)
        return Cancelled.DELIVERED

    def _waiting_in_level(self, message: StoredMessage) -> StoredMessage | Cancelled:
        is_waiting = self.levels.is_waiting(message) if self.levels is not None else False
        if is_waiting:
            return message
        if is_waiting is False:
            return Cancelled.DELIVERED
        return Cancelled.CANCELLED_BEFORE if self._has_units_since(message) else Cancelled.NO_LONGER_WAITS

    def _has_units_since(self, message: StoredMessage) -> bool:
        """Whether the timer log certainly has the units of all records behind a message, so that a later record of the
        message would be found there. Raises OSError."""
        if self._slots.log.begin == 0:
            return True
        first = self._slots.log.first()
        if first is None:
            return False
        # Units are written in the order of records, and have the second in which they were written. Both are compared:
        # the first unit may be a later unit of an old message, which only its time shows, or may have been written
        # after the clock was set back, which only its record shows.
        is_before = int(first["write_ms"]) < message.store_timestamp // PRECISION_MS * PRECISION_MS
        return is_before and int(first["physical_offset"]) < message.physical_offset

    def _waiting_in_wheel(self, message: StoredMessage, now_ms: int) -> _Waiting | Cancelled:
        physical_offset, due_ms = message.physical_offset, due_of(message)
        is_mark = properties.get(message.properties_text, properties.TIMER_DEL_UNIQKEY) is not None
        if due_ms is None or is_mark:
            return Cancelled.UNKNOWN
        self._enqueuer.enqueue_through(message.queue_offset, now_ms)
        found = self._slots.positions.find(physical_offset)
        if found is None:
            is_done = self._slots.findings.start.is_done(physical_offset)
            return Cancelled.DELIVERED if is_done else Cancelled.NO_LONGER_WAITS
        position, unit = found
        if is_superseded(unit)[0]:  # by a unit that was cut off after a crash; the message was delivered
            return Cancelled.DELIVERED
        if int(unit["magic"][0]) & WITHDRAWN:
            return Cancelled.CANCELLED_BEFORE
        second = int(seconds_of(unit)[0])
        if second < self._slots.turns.second:
            return Cancelled.DELIVERED
        waits = self._slots.search.wait_at(position, second)
        if not self._slots.search.is_waiting(waits, second):
            return Cancelled.DELIVERED
        return _Waiting(message, due_ms, waits, second)

    def find(self, topic: str, unique_key: str, deliver_ms: int) -> Iterator[int | ColdRead | None]:
        """Look for the message of a topic with this UNIQ_KEY in the slots in which a message due at `deliver_ms` may
        wait, and yield its physical offset if it is found. Reads the record of each message of the topic there, a
        bounded number in each step. In between yields None, or a read for a thread to do before the next step
        (`patiently`). Raises OSError."""
        second, window = slot_second(deliver_ms), self._slots.window.size
        if second > self._slots.turns.second:
            second -= (second - self._slots.turns.second - 1) // window * window
        topic_hash = properties.java_hash(topic)
        for candidate in (second, second + window):
            last = yield from patiently(partial(self._slots.wheel.last, candidate))
            chain = self._slots.log.chain(last)
            while (found := (yield from patiently(partial(next, chain, None)))) is not None:
                units = found[1]
                mine = units[units["topic_hash"] == topic_hash][["physical_offset", "record_size"]]
                yield None
                physical_offset = yield from self._find_among(mine.tolist(), topic, unique_key)
                if physical_offset is not None:
                    yield physical_offset
                    return

    def _find_among(
        self, records: list[Range], topic: str, unique_key: str
    ) -> Generator[ColdRead | None, None, int | None]:
        """Return the physical offset of the record, among some, of a message of a topic with this UNIQ_KEY; None if
        there is none. Yields what `find` yields in between. Raises OSError."""
        for start in range(0, len(records), LOOK_UNITS):
            ranges = records[start : start + LOOK_UNITS]
            if not self._store.is_cached(ranges):
                yield ColdRead(self._store.log, sorted(ranges))
            for each in ranges:
                message = yield from patiently(partial(self._store.message_at, *each))
                text = message.properties_text if message is not None else ""
                is_it = properties.get(text, properties.UNIQ_KEY) == unique_key
                if is_it and properties.get(text, properties.REAL_TOPIC) == topic:
                    return each[0]
            yield None
        return None

    # --- all messages of a key

    def replaced_by(self, topic: str, key: str, now_ms: int) -> list[Range]:
        """Return physical offset and size of the records of messages that the next message with a topic and key may
        replace: all those that it will replace, and perhaps some with other keys. The census must be complete
        (`Timers.is_counted`). Raises OSError."""
        units = [self._slots.log.read(position, 1) for position in self._with_key(topic, key, now_ms)]
        return [unit[["physical_offset", "record_size"]][0].item() for unit in units]

    def _with_key(self, topic: str, key: str, now_ms: int) -> list[int]:
        """Return the positions of the units with the tag of a topic and key, the newest first. Raises OSError."""
        self._enqueuer.enqueue_all(now_ms)
        return self._slots.census.keys.find(tag_of(self._topics.hash_of(topic), key_hash(key)))

    def to_replace(self, topic: str, key: str, now_ms: int) -> list[_Waiting]:
        """Return the messages that the next message with a topic and key replaces. They must be passed to `replace`
        before anything else happens: everything that needs to be read is read here. Raises StoreError, OSError."""
        assert self._slots.census.is_complete
        replaced = []
        for position in self._with_key(topic, key, now_ms):
            waiting = self._waiting_at(position)
            text = waiting.message.properties_text if waiting is not None else ""
            if waiting is not None and properties.get(text, properties.REAL_TOPIC) == topic and stored_key(text) == key:
                replaced.append(waiting)
        return replaced

    def replace(
        self,
        replaced: list[_Waiting],
        unique_key: str | None,
        due_ms: int,
        now_ms: int,
        stage: Callable[[int], None],
    ) -> int:
        """Write a message in place of the messages that it replaces (`to_replace`). Return the number of replaced
        messages. `stage` is called to stage the message. Its argument is the origin that the message must store as
        prepared-transaction offset, together with TIMER_ROLL_TIMES, so that the same record also withdraws the first
        replaced message; it is 0 if no message is replaced. Nothing else may be staged before. Reads nothing. Raises
        the errors of `stage`, StoreError; then nothing was replaced."""
        stage((replaced[0].message.physical_offset or ORIGIN_ZERO) if replaced else 0)
        for waiting in replaced:
            # The deletion record is for Apache's broker, and for the second and further replaced messages. There is
            # none for a message with the same UNIQ_KEY, as after a client's retry: it would make Apache's broker delete
            # the new message as well.
            if waiting.message.get_property(properties.UNIQ_KEY) != unique_key:
                self._records.stage_deletion(waiting.message, waiting.due_ms, now_ms)
        self._expect(due_ms)
        self._store.appender.commit()
        for waiting in replaced:
            self._slots.withdraw(waiting.waits, waiting.second)
        return len(replaced)

    def _waiting_at(self, position: int) -> _Waiting | None:
        """Return the message whose unit is at a position; None if it does not wait. Raises OSError."""
        units = self._slots.log.read(position, 1)
        physical_offset, size = units[["physical_offset", "record_size"]][0].item()
        second = int(seconds_of(units)[0])
        message = self._store.message_at(physical_offset, size)
        due_ms = due_of(message) if message is not None else None
        if message is None or due_ms is None or second < self._slots.turns.second:
            return None
        waits = self._slots.search.wait_at(position, second)
        return _Waiting(message, due_ms, waits, second) if self._slots.search.is_waiting(waits, second) else None

    # --- messages whose commitlog files expire

    def keep_next(self, limit: int, now_ms: int) -> bool | None:
        """Look at a few messages in the commitlog files before a physical offset, `limit`, since these files are about
        to be removed, and append those that still wait once more; those of delay levels, too, which from then on wait
        in the wheel. Returns whether any message was appended; None once all have been looked at. Raises StoreError,
        OSError; the files are then kept."""
        self._now_ms = now_ms
        if self._keeping is None:
            self._keeping = self._keep_before(limit)
        try:
            was_needed = next(self._keeping, None)
        except BaseException:
            self._keeping = None  # the next search starts over, and passes over messages that are withdrawn by then
            raise
        if isinstance(was_needed, ColdRead):
            raise NotInMemory("records of waiting messages", was_needed.position, was_needed.run)
        if was_needed is None:
            self._keeping = None
        return was_needed

    def _keep_before(self, limit: int) -> Iterator[bool | ColdRead]:
        count, slots = 0, self._slots
        begin = slots.log.begin
        # Each step searches up to the log's present end: messages that get another slot in the meantime have their new
        # units there.
        while (part := (yield from patiently(partial(slots.log.part, begin, slots.log.end)))) is not None:
            position, units = part
            begin = position + len(units) * UNIT.itemsize
            seconds = seconds_of(units)
            live = (units["physical_offset"] < limit) & decided.is_live(units, seconds, slots.turns.second)
            for at in np.flatnonzero(live).tolist():
                extent = int(units["physical_offset"][at]), int(units["record_size"][at])
                message = yield from patiently(partial(self._store.message_at, *extent))
                second, due_ms = int(seconds[at]), abs(int(units["due_ms"][at])) & MAX_DUE_MS
                if message is None or second < slots.turns.second:
                    continue
                look = partial(slots.search.wait_at, position + at * UNIT.itemsize, second)
                waits = yield from patiently(look)
                if second < slots.turns.second or not slots.search.is_waiting(waits, second):
                    continue
                due_ms = due_ms or due_of(message) or second * PRECISION_MS
                at_unit = int(waits["position"][0])
                again = self._append_again(message, at_unit, due_ms, self._now_ms, is_as_promised=True)
                slots.withdraw(waits, second)
                self._catch_up.repeated(message.physical_offset, again)
                count += 1
                yield True
            yield False
        for found in self.levels.waiting_before(limit, self._now_ms) if self.levels is not None else ():
            if isinstance(found, ColdRead):
                yield found
                continue
            if found is not None:
                assert self.levels is not None
                self._append_again(found[0], None, found[1], self._now_ms, is_as_promised=True)
                self.levels.withdraw(found[0])
                count += 1
            yield found is not None
        if count:
            log.info("scheduled_messages_rolled", messages=count, before=limit)

    def _append_again(
        self,
        message: StoredMessage,
        position: int | None,
        due_ms: int,
        now_ms: int,
        *,
        is_as_promised: bool = False,
        is_paused: bool = False,
    ) -> int:
        self._expect(due_ms)
        again = self._records.again(message, due_ms, now_ms, is_as_promised=is_as_promised, is_paused=is_paused)
        self.ids.appended(message, again)
        self.moves.add(message, position, again, due_ms)
        return again

    # --- recurring messages

    def recurring(self, topic: str, name: str, now_ms: int) -> list[_Waiting]:
        """Return the waiting messages that recur under a name, nearly always one or none, for `pause`, `resume` and
        `remove`. The rules of `to_replace` apply. Raises StoreError, OSError."""
        return [waiting for waiting in self.to_replace(topic, name, now_ms) if is_recurring(waiting.message)]

    def pause(self, recurring: list[_Waiting], now_ms: int) -> bool:
        """Pause recurring messages until they are resumed. Return whether any was not paused before. Raises StoreError,
        OSError."""
        going_on = [waiting for waiting in recurring if not _is_paused(waiting)]
        for waiting in going_on:
            self._move(waiting, now_ms + PAUSED_MS, now_ms, is_paused=True)
        return bool(going_on)

    def resume(self, recurring: list[_Waiting], now_ms: int) -> int | None:
        """Resume paused recurring messages. Return the time of the next delivery, ms since the epoch; None if none was
        paused. Raises TimerIllegal if no delivery is left; StoreError, OSError."""
        paused = [waiting for waiting in recurring if _is_paused(waiting)]
        due_ms = None
        for waiting in paused:
            found = recurrence.read(waiting.message.properties_text)
            # If the clock was set back meanwhile, no delivery is made a second time.
            due_ms = next_ms(found, max(now_ms, (found.paused_ms or 0) - 1))
            if due_ms is None:
                raise TimerIllegal("its last delivery would have been before now: remove it")
            self._move(waiting, due_ms, now_ms)
        return due_ms

    def remove(self, recurring: list[_Waiting], now_ms: int) -> None:
        """Cancel messages. Raises StoreError, OSError."""
        for waiting in recurring:
            self._records.delete(waiting.message, waiting.due_ms, now_ms)
            with self._store.health.noting():
                self._slots.withdraw(waiting.waits, waiting.second)

    def _move(self, waiting: _Waiting, due_ms: int, now_ms: int, *, is_paused: bool = False) -> None:
        self._append_again(waiting.message, int(waiting.waits["position"][0]), due_ms, now_ms, is_paused=is_paused)
        with self._store.health.noting():
            self._slots.withdraw(waiting.waits, waiting.second)

    # --- after a start

    def withdraw_again(self, physical_offsets: Iterable[int]) -> None:
        """Mark the units of messages that recovery found withdrawn, since their marks may not have been durable.
        `physical_offsets`: of the messages' records. Raises OSError."""
        for physical_offset in dict.fromkeys(physical_offsets):  # two records may withdraw the same message
            found = self._slots.positions.find(physical_offset)
            if found is not None:
                second = int(seconds_of(found[1])[0])
                self._slots.withdraw(self._slots.search.wait_at(found[0], second), second)


def owner_of(message: StoredMessage) -> tuple[str, str | None]:
    """Return the topic that a message is for, and its UNIQ_KEY."""
    text = message.properties_text
    return properties.get(text, properties.REAL_TOPIC) or message.topic, properties.get(text, properties.UNIQ_KEY)


def _is_paused(waiting: _Waiting) -> bool:
    return properties.get(waiting.message.properties_text, properties.TIMER_PAUSED) is not None
