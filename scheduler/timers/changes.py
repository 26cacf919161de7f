"""Messages that wait and are to wait no longer, or otherwise: cancelled, given another time, replaced by the next one
of their key, appended once more because their file goes.

Each such change is one record in the timer topic that names the message it takes the place of (`timers.records`), and a
mark at the message's unit in the timer log, so that it is not delivered. The record decides: where a crash took the
mark, recovery sets it again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import structlog

from duemq.protocol.records import properties
from duemq.protocol.records.record import StoredMessage
from duemq.protocol.records.timer_properties import PRECISION_MS, slot_second, stored_key
from duemq.scheduler import waiting as decided
from duemq.scheduler.delivery.moves import Moves
from duemq.scheduler.levels.service import LevelQueues
from duemq.scheduler.timers.config import Cancelled
from duemq.scheduler.timers.enqueuer import Enqueuer
from duemq.scheduler.timers.files.log import MAX_DUE_MS, UNIT, WITHDRAWN, seconds_of
from duemq.scheduler.timers.files.sums import is_superseded
from duemq.scheduler.timers.index.ids import TimerIds, first_place
from duemq.scheduler.timers.index.keys import key_hash, tag_of
from duemq.scheduler.timers.policy.catch_up import CatchUp
from duemq.scheduler.timers.records import TimerRecords
from duemq.scheduler.timers.search import LOOK_UNITS
from duemq.scheduler.timers.slots import Slots, due_of
from duemq.scheduler.timers.topics import TimerTopics
from duemq.storage.errors import NotInMemory
from duemq.storage.log.copies import ORIGIN_ZERO
from duemq.storage.queues.consume_queue import SCHEDULE_TOPIC, TIMER_TOPIC
from duemq.storage.queues.pull import ColdRead, Range, patiently
from duemq.storage.store import MessageStore

if TYPE_CHECKING:
    from duemq.scheduler.timers.second import Waits

log = structlog.get_logger(__name__)


class _Place(NamedTuple):
    """Where a message waits in the wheel: what its unit says, and the second whose slot that is in."""

    message: StoredMessage
    due_ms: int
    waits: Waits
    second: int


class TimerChanges:
    """Changes what waits in the wheel, and in the levels where there are any. The caller holds his answer until what
    was appended is durable enough, as for a send.

    A message is named by the physical offset of its first record, whose id its sender was given, or by that of the
    record by which it waits now."""

    def __init__(
        self,
        store: MessageStore,
        enqueuer: Enqueuer,
        slots: Slots,
        topics: TimerTopics,
        records: TimerRecords,
        ids: TimerIds,
        catch_up: CatchUp,
        expect: Callable[[int], None],
        levels: LevelQueues | None,
    ) -> None:
        """`expect` is called with the deliver time of each message that is appended, before it is."""
        self._store = store
        self._enqueuer = enqueuer
        self._slots = slots
        self._topics = topics
        self._records = records
        self.ids = ids
        """Leads from a message's first record to the one by which it waits."""
        self._catch_up = catch_up
        self._expect = expect
        self.levels = levels
        """Where messages with a level wait, which can be changed as well."""
        self.moves = Moves()
        self._keeping: Iterator[bool | ColdRead] | None = None
        self._now_ms = 0
        """When the last bit of that was done."""

    # --- one message, by its place

    def cancel(self, physical_offset: int, now_ms: int) -> Cancelled | None:
        """Cancel a message that waits, with a timer or a level; None where `ids` have to be complete to tell what
        became of it: nothing was done then. Raises StoreError, OSError."""
        return self._take_out(
            physical_offset, now_ms, lambda message, due_ms, _: self._records.delete(message, due_ms, now_ms)
        )

    def reschedule(self, physical_offset: int, deliver_ms: int, now_ms: int) -> Cancelled | None:
        """Give a message that waits, with a timer or a level, another time, one that is past for "at once": CANCELLED
        says that it was done. None as of `cancel`. Raises StoreError, OSError."""
        due_ms = max(deliver_ms, now_ms)
        return self._take_out(
            physical_offset, now_ms, lambda message, _, position: self._again(message, position, due_ms, now_ms)
        )

    def record_of(self, physical_offset: int) -> StoredMessage | None:
        """The newest record of a message that is there still, as far as `ids` know it; None without one."""
        message = self._store.message_at(physical_offset)
        newest = self.ids.newest(physical_offset) if message is None else None
        return self._store.message_at(newest) if newest is not None else message

    def _take_out(
        self, physical_offset: int, now_ms: int, append: Callable[[StoredMessage, int, int | None], object]
    ) -> Cancelled | None:
        """Withdraw a message that waits, after `append` has put down what becomes of it, given its deliver time and the
        position of its unit in the timer log, None without one."""
        while True:
            message = self._store.message_at(physical_offset)
            place = self._place_of(message, physical_offset, now_ms)
            if isinstance(place, _Place):
                append(place.message, place.due_ms, int(place.waits["position"][0]))
                with self._store.health.noting():
                    self._slots.withdraw(place.waits, place.second)
                return Cancelled.CANCELLED
            if isinstance(place, StoredMessage):
                assert self.levels is not None
                append(place, now_ms, None)
                with self._store.health.noting():
                    self.levels.withdraw(place)
                return Cancelled.CANCELLED
            if place not in (Cancelled.CANCELLED_BEFORE, Cancelled.NO_LONGER_WAITS):
                return place
            if not self.ids.is_complete:
                return None
            newest = self.ids.newest(first_place(message) if message is not None else physical_offset)
            if newest is None or newest <= physical_offset:
                return place
            physical_offset = newest

    def _place_of(
        self, message: StoredMessage | None, physical_offset: int, now_ms: int
    ) -> _Place | StoredMessage | Cancelled:
        """Where a message waits by the record at a physical offset, in the wheel, or (the message itself) in a level;
        else what became of it, unless it was appended again: then CANCELLED_BEFORE, or NO_LONGER_WAITS where there is
        nothing left to tell. Raises OSError."""
        if message is None:
            return Cancelled.NO_LONGER_WAITS if physical_offset < self._store.log.begin else Cancelled.UNKNOWN
        if message.topic == SCHEDULE_TOPIC:
            return self._place_in_level(message)
        if message.topic != TIMER_TOPIC:
            return Cancelled.DELIVERED
        return self._place_in_wheel(message, now_ms)

    def _place_in_level(self, message: StoredMessage) -> StoredMessage | Cancelled:
        is_waiting = self.levels.is_waiting(message) if self.levels is not None else False
        if is_waiting:
            return message
        if is_waiting is False:
            return Cancelled.DELIVERED
        return Cancelled.CANCELLED_BEFORE if self._has_units_since(message) else Cancelled.NO_LONGER_WAITS

    def _has_units_since(self, message: StoredMessage) -> bool:
        """Whether the timer log surely has the units of all records that were appended behind a message, so that one
        by which it waited on would be found there. Raises OSError."""
        if self._slots.log.begin == 0:
            return True
        first = self._slots.log.first()
        if first is None:
            return False
        # Records come into the log in their order, and units know the second in which they were written. The first
        # unit may be an old message's second one, which its place does not tell, or be written by a clock that was
        # set back, which its time does not tell.
        is_before = int(first["write_ms"]) < message.store_timestamp // PRECISION_MS * PRECISION_MS
        return is_before and int(first["physical_offset"]) < message.physical_offset

    def _place_in_wheel(self, message: StoredMessage, now_ms: int) -> _Place | Cancelled:
        physical_offset, due_ms = message.physical_offset, due_of(message)
        is_mark = properties.get(message.properties_text, properties.TIMER_DEL_UNIQKEY) is not None
        if due_ms is None or is_mark:
            return Cancelled.UNKNOWN
        self._enqueuer.enqueue_through(message.queue_offset, now_ms)
        found = self._slots.places.find(physical_offset)
        if found is None:
            is_done = self._slots.start.is_done(physical_offset)
            return Cancelled.DELIVERED if is_done else Cancelled.NO_LONGER_WAITS
        position, unit = found
        if is_superseded(unit)[0]:  # by a unit that a crash cut off, after it was delivered
            return Cancelled.DELIVERED
        if int(unit["magic"][0]) & WITHDRAWN:
            return Cancelled.CANCELLED_BEFORE
        second = int(seconds_of(unit)[0])
        if second < self._slots.second:
            return Cancelled.DELIVERED
        waits = self._slots.search.wait_at(position, second)
        if not self._slots.search.is_waiting(waits, second):
            return Cancelled.DELIVERED
        return _Place(message, due_ms, waits, second)

    def find(self, topic: str, unique_key: str, deliver_ms: int) -> Iterator[int | ColdRead | None]:
        """Look for the message of a topic with this UNIQ_KEY that waits for a time whose slot is that of `deliver_ms`:
        gives its physical offset, once, if there is one. It looks at the record of each message of the topic in the
        slot, at a bounded number of them in each step, and gives None in between; or a read for a thread to do before
        the next step (`patiently`). Raises OSError."""
        second, window = slot_second(deliver_ms), self._slots.window
        if second > self._slots.second:
            second -= (second - self._slots.second - 1) // window * window
        topic_hash = properties.java_hash(topic)
        for candidate in (second, second + window):
            last = yield from patiently(partial(self._slots.wheel.last, candidate))
            chain = self._slots.log.chain(last)
            while (found := (yield from patiently(partial(next, chain, None)))) is not None:
                units = found[1]
                mine = units[units["topic_hash"] == topic_hash][["physical_offset", "record_size"]]
                yield None
                for start in range(0, len(mine), LOOK_UNITS):
                    ranges: list[Range] = mine[start : start + LOOK_UNITS].tolist()
                    if not self._store.is_cached(ranges):
                        yield ColdRead(self._store.log, sorted(ranges))
                    for each in ranges:
                        message = yield from patiently(partial(self._store.message_at, *each))
                        text = message.properties_text if message is not None else ""
                        is_it = properties.get(text, properties.UNIQ_KEY) == unique_key
                        if is_it and properties.get(text, properties.REAL_TOPIC) == topic:
                            yield each[0]
                            return
                    yield None

    # --- all messages of a key

    def replaced_by(self, topic: str, key: str, now_ms: int) -> list[Range]:
        """Where the records of messages lie that the next one of a topic and key may replace: of all that it will, and
        of some with other keys. What waits is counted (`Timers.is_counted`). Raises OSError."""
        units = [self._slots.log.read(position, 1) for position in self._with_key(topic, key, now_ms)]
        return [unit[["physical_offset", "record_size"]][0].item() for unit in units]

    def _with_key(self, topic: str, key: str, now_ms: int) -> list[int]:
        """The positions of their units."""
        self._enqueuer.enqueue_all(now_ms)
        return self._slots.census.keys.find(tag_of(self._topics.hash_of(topic), key_hash(key)))

    def to_replace(self, topic: str, key: str, now_ms: int) -> list[_Place]:
        """The messages that the next one of a topic and key replaces, for `replace` to be given before anything else
        happens. All that has to be read for it is read here. Raises StoreError, OSError."""
        assert self._slots.census.is_complete
        places = []
        for position in self._with_key(topic, key, now_ms):
            place = self._place_at(position)
            text = place.message.properties_text if place is not None else ""
            if place is not None and properties.get(text, properties.REAL_TOPIC) == topic and stored_key(text) == key:
                places.append(place)
        return places

    def replace(
        self, places: list[_Place], unique_key: str | None, due_ms: int, now_ms: int, stage: Callable[[int], None]
    ) -> int:
        """Have a message written in the place of those that wait to be replaced by it (`to_replace`); gives how many
        those were. `stage` stages it, with the origin that it is given for prepared-transaction offset, and
        TIMER_ROLL_TIMES, so that the one record says both: 0 where nothing waits. Nothing else is staged before. It
        reads nothing. Raises what `stage` does, StoreError; then nothing was replaced."""
        stage((places[0].message.physical_offset or ORIGIN_ZERO) if places else 0)
        for place in places:
            # For Apache's broker, and where more than one is replaced. It would take one with the same UNIQ_KEY, a
            # client's second try, for both.
            if place.message.get_property(properties.UNIQ_KEY) != unique_key:
                self._records.stage_deletion(place.message, place.due_ms, now_ms)
        self._expect(due_ms)
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
        if message is None or due_ms is None or second < self._slots.second:
            return None
        waits = self._slots.search.wait_at(position, second)
        return _Place(message, due_ms, waits, second) if self._slots.search.is_waiting(waits, second) else None

    # --- messages whose commitlog files expire

    def keep_some(self, limit: int, now_ms: int) -> bool | None:
        """See `storage.durability.owner.Part`: append messages once more that still wait when their file is about to
        go, those of delay levels too, which wait on in the wheel."""
        self._now_ms = now_ms
        if self._keeping is None:
            self._keeping = self._keep_before(limit)
        try:
            was_needed = next(self._keeping, None)
        except BaseException:
            self._keeping = None  # the next search begins anew, and finds what is withdrawn already
            raise
        if isinstance(was_needed, ColdRead):
            raise NotInMemory("what still waits", was_needed.place, was_needed.run)
        if was_needed is None:
            self._keeping = None
        return was_needed

    def _keep_before(self, limit: int) -> Iterator[bool | ColdRead]:
        count, slots = 0, self._slots
        begin = slots.log.begin
        # To the end there is then: what gets another slot meanwhile has its unit there.
        while (part := (yield from patiently(partial(slots.log.part, begin, slots.log.end)))) is not None:
            position, units = part
            begin = position + len(units) * UNIT.itemsize
            seconds = seconds_of(units)
            live = (units["physical_offset"] < limit) & decided.is_live(units, seconds, slots.second)
            for at in np.flatnonzero(live).tolist():
                place = int(units["physical_offset"][at]), int(units["record_size"][at])
                message = yield from patiently(partial(self._store.message_at, *place))
                second, due_ms = int(seconds[at]), abs(int(units["due_ms"][at])) & MAX_DUE_MS
                if message is None or second < slots.second:
                    continue
                look = partial(slots.search.wait_at, position + at * UNIT.itemsize, second)
                waits = yield from patiently(look)
                if second < slots.second or not slots.search.is_waiting(waits, second):
                    continue
                due_ms = due_ms or due_of(message) or second * PRECISION_MS
                at_unit = int(waits["position"][0])
                again = self._again(message, at_unit, due_ms, self._now_ms, is_as_promised=True)
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
                self._again(found[0], None, found[1], self._now_ms, is_as_promised=True)
                self.levels.withdraw(found[0])
                count += 1
            yield found is not None
        if count:
            log.info("scheduled_messages_rolled", messages=count, before=limit)

    def _again(
        self, message: StoredMessage, position: int | None, due_ms: int, now_ms: int, *, is_as_promised: bool = False
    ) -> int:
        self._expect(due_ms)
        again = self._records.again(message, due_ms, now_ms, is_as_promised=is_as_promised)
        self.ids.appended(message, again)
        self.moves.add(message, position, again, due_ms)
        return again

    # --- after a start

    def withdraw_again(self, physical_offsets: Iterable[int]) -> None:
        """Recovery found that messages were withdrawn: the marks at their units may not have been durable."""
        for physical_offset in dict.fromkeys(physical_offsets):  # two records may say so of one message
            found = self._slots.places.find(physical_offset)
            if found is not None:
                second = int(seconds_of(found[1])[0])
                self._slots.withdraw(self._slots.search.wait_at(found[0], second), second)
