"""The slots of the timer wheel at work: messages are put into them, loaded into memory, and taken out.

A message has one unit in a slot that is not past, or is not in the wheel yet. Units in past slots, and withdrawn ones,
stand for no message. The messages of the current second, and of the next seconds that were loaded ahead, are in memory,
in the order of their deliver times.

Keeps invariant 18 of ARCHITECTURE.md.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np

from duemq.protocol.records import timer_properties
from duemq.protocol.records.record import StoredMessage
from duemq.protocol.records.timer_properties import PRECISION_MS, slot_second
from duemq.scheduler import waiting as decided
from duemq.scheduler.timers.config import DAY_SECONDS, TimerConfig
from duemq.scheduler.timers.files.formats import NO_OFFSETS, StartFacts
from duemq.scheduler.timers.files.log import TimerLog
from duemq.scheduler.timers.files.unit import (
    APPLIED,
    DELETE,
    MAX_DUE_MS,
    NO_MESSAGE,
    NORMAL,
    ROLL,
    UNIT,
    WITHDRAWN,
    seconds_of,
    withdrawn,
)
from duemq.scheduler.timers.files.wheel import HOUR, SLOTS, TimerWheel
from duemq.scheduler.timers.index.census import Census
from duemq.scheduler.timers.index.keys import key_of
from duemq.scheduler.timers.index.places import UnitPlaces
from duemq.scheduler.timers.index.sorted_offsets import is_among
from duemq.scheduler.timers.recovery import Start
from duemq.scheduler.timers.search import TimerSearch
from duemq.scheduler.timers.seconds.loading import Deleting, Loading
from duemq.scheduler.timers.seconds.parking import Parking
from duemq.scheduler.timers.seconds.second import NO_WAITS, Second, due_fields, picked, slot_second_of, waits_of
from duemq.scheduler.timers.topics import TimerTopics
from duemq.storage.current import Current
from duemq.storage.queues.pull import ColdRead, Range, patiently
from duemq.storage.store import MessageStore

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from duemq.scheduler.timers.files.unit import Units
    from duemq.scheduler.timers.seconds.second import Waits

PRELOAD_SECONDS: Final = 10
"""Lead, in seconds, with which slots are loaded before their time."""
_ROLL_UNITS: Final = 4096
_MAX_LAG_SECONDS: Final = 20 * DAY_SECONDS


class RunningSearch(Protocol):
    """A search through the units of the timer log that takes more than one step."""

    def passing(self, waits: Waits) -> None:
        """Note that messages are about to move to other slots: their present units will no longer lead the search to
        them."""


class Slots:
    """The timer log, the wheel, and the seconds in memory."""

    def __init__(
        self,
        store: MessageStore,
        topics: TimerTopics,
        config: Current[TimerConfig],
        read_ahead: Callable[[Waits], None],
    ) -> None:
        """Prepare the slots. `config` returns the settings in force. `read_ahead`: called with messages whose records
        will be read soon, many at once."""
        root = store.config.root
        self._store = store
        self._topics = topics
        self._config = config
        self.log = TimerLog(store.files, os.path.join(root, "timerlog"), config.value.log_segment_size)
        self.places = UnitPlaces(self.log)
        """The position of each message's newest unit in the log."""
        self.wheel = TimerWheel(store.files, os.path.join(root, "timerwheel"))
        self.second = 0
        """The current second: everything in slots before it is done."""
        self.since = 0
        """The end of the commitlog when the current second's turn came."""
        self.log_since = 0
        """The end of the timer log when the current second's turn came."""
        self.resident: dict[int, Second] = {}
        """The seconds in memory: the current one, and those up to `preloaded` that have messages."""
        self.preloaded = 0
        """The last second that is loaded, or being loaded, or has no messages."""
        self.start = Start(0, 0, 0, 0, {})
        """The facts that recovery found, as long as they matter."""
        self._met_offsets: list[NDArray[np.int64]] = []
        """Physical offsets in `start.found` that do not matter any more."""
        self.is_replayed = False
        """Whether all messages that were stored when the store opened are in the wheel."""
        self.is_handing_on = False
        """Whether the remaining messages of the current second are being moved to the next one."""
        self.policy_end = 0
        """Second after which no slot has a message whose time a policy chose."""
        self.read_ahead = read_ahead
        """Called with messages whose records will be read soon, many at once."""
        self._passes: list[RunningSearch] = []
        """Searches through the log in progress, which are told of messages that get newer units."""
        self.census = Census()
        """The waiting messages by due second and by key, once a caller has begun the census."""
        self.search = TimerSearch(self)
        """Finds waiting messages."""
        self.parking = Parking(self, topics.is_shared)
        """The parked messages."""

    def load(self, start: Start, places: UnitPlaces, policy_end: int) -> None:
        """Begin with the state that recovery found."""
        self.start, self.places, self.policy_end = start, places, policy_end
        self.second, self.since, self.log_since = start.second, start.since, start.log_since
        self.preloaded = start.second
        self.parking.found(start.parked)

    def was_replayed(self) -> None:
        """Note that all messages stored when the store opened are in the wheel."""
        self.is_replayed = True

    def note_held(self, second: int) -> None:
        """Note that a message whose time a policy chose has a slot of this second."""
        self.policy_end = max(self.policy_end, second)

    def begin_pass(self, search: RunningSearch) -> None:
        """Tell a search, until `end_pass`, of messages that get other slots."""
        self._passes.append(search)

    def end_pass(self, search: RunningSearch) -> None:
        """Note that the search is over."""
        self._passes.remove(search)

    # --- putting

    @property
    def window(self) -> int:
        """The farthest distance of a slot, in seconds."""
        return self._config.value.roll_window

    def slot_for(self, second: int, now_ms: int) -> int:
        """Return the second whose slot, as of now, takes messages due in `second`."""
        excess = second - self.base(now_ms) - self.window
        return second if excess <= 0 else second + -(-excess // self.window) * -self.window

    def slots_for(self, seconds: NDArray[np.int64], now_ms: int) -> NDArray[np.int64]:
        """Return the results of `slot_for` for the due seconds of many messages."""
        # The slot is a multiple of the window earlier, so that it can be computed from the deliver time.
        window = self.window
        excess = np.maximum(seconds - (self.base(now_ms) + window), 0)
        slots: NDArray[np.int64] = seconds - -(-excess // window) * window
        return slots

    def base(self, now_ms: int) -> int:
        """Return the second from which the window reaches ahead: that of `now_ms` or the current one, the later of the
        two, but no more than half a turn of the wheel ahead of the current one, which may be far behind after a long
        stop."""
        return min(max(now_ms // PRECISION_MS, self.second), self.second + SLOTS // 2)

    def put(
        self,
        waits: Waits,
        magic: NDArray[np.int32],
        now_ms: int,
        not_before: NDArray[np.int64] | None = None,
        past: Waits = NO_WAITS,
    ) -> None:
        """Write units for messages and link them to their slots. `magic`: the units' magic numbers; `not_before`: the
        earliest second for each message; `past`: delivered messages, which get units behind the others in the same
        write, see `put_past`. Raises OSError, MemoryError; then nothing changed. Raises StoreBroken if the written
        units could not be noted in memory."""
        if not len(waits):
            self.put_past(past, now_ms)
            return
        now_second = now_ms // PRECISION_MS
        seconds, is_far = self._seconds_for(waits, now_ms, not_before)
        if is_far.any():
            magic = np.where(is_far, magic | ROLL, magic)
        write_second = min(max(now_second, self.second - _MAX_LAG_SECONDS), self.second + _MAX_LAG_SECONDS)
        all_positions = self.log.positions(len(waits) + len(past))
        positions = all_positions[: len(waits)]
        plan = self.wheel.plan(seconds, positions)
        units = np.zeros(len(waits), UNIT)
        units["size"] = UNIT.itemsize
        units["previous"] = plan.previous
        units["magic"] = np.where(waits["again"], magic & ~NORMAL, magic)
        units["due_ms"] = due_fields(waits)
        units["write_ms"] = write_second * PRECISION_MS
        units["delay_ms"] = (seconds - write_second) * PRECISION_MS
        units["physical_offset"], units["record_size"] = waits["physical"], waits["size"]
        units["topic_hash"] = waits["hash"]
        if (magic & NO_MESSAGE).any():
            self._put_no_messages(units, magic)
        if len(past):
            units = np.frombuffer(units.tobytes() + self._units_of_past(past, now_ms).tobytes(), UNIT)
        self.log.append(units, all_positions)
        with self._store.health.noting():
            self.places.note(all_positions, units)
            self.wheel.put(plan)
            waits["position"] = positions
            if self.census.is_complete:
                self.census.added(waits[magic & NO_MESSAGE == 0])
            if int(plan.seconds[0]) <= self.preloaded:
                self._add_resident(waits, magic, seconds)

    def prepare(self, waits: Waits, now_ms: int, not_before: NDArray[np.int64] | None = None) -> None:
        """Read all that `put` will need for the same messages and the same time, so that `put` itself reads nothing.
        Call this if something is written before `put`. Raises OSError."""
        if len(waits):
            self.wheel.prepare(self._seconds_for(waits, now_ms, not_before)[0])

    def _seconds_for(
        self, waits: Waits, now_ms: int, not_before: NDArray[np.int64] | None
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Return the second in whose slot each message is put: that in which it is due, but not before the current one
        or `not_before`, and an earlier one beyond the window; and whether it is beyond the window."""
        seconds = np.maximum((waits["due"] - 1) // PRECISION_MS, self.second)
        if not_before is not None:
            seconds = np.maximum(seconds, not_before)
        is_far = seconds > self.base(now_ms) + self.window
        if is_far.any():
            nearer = self.slots_for(seconds, now_ms)
            seconds = np.where(is_far, np.minimum(nearer, self.second + SLOTS - HOUR), seconds)
        return seconds, is_far

    @staticmethod
    def _put_no_messages(units: Units, magic: NDArray[np.int32]) -> None:
        """Set magic number and deliver time of the units that stand for no waiting message."""
        kind = magic & NO_MESSAGE
        units["magic"][kind == WITHDRAWN] = withdrawn(units["magic"][kind == WITHDRAWN].astype(np.int32))
        units["due_ms"][kind == NO_MESSAGE] = APPLIED
        units["due_ms"][kind == DELETE] = 0  # the value that RocketMQ's broker writes

    def _add_resident(self, waits: Waits, magic: NDArray[np.int32], seconds: NDArray[np.int64]) -> None:
        """Add messages to seconds in memory."""
        near = seconds <= self.preloaded
        for number in sorted(set(seconds[near].tolist())):
            second = self.resident.get(number)
            if second is None:
                second = self.resident[number] = Second(number)
            mine = seconds == number
            self.sort_in(second, waits[mine], magic[mine], second.add)

    @staticmethod
    def sort_in(second: Second, waits: Waits, magic: NDArray[np.int32], add: Callable[[Waits], None]) -> None:
        """Sort messages of a slot into its second by their units' magic numbers: deleting messages, messages that need
        another slot, and messages to be delivered, for which `add` is called. Withdrawn messages are left out."""
        if (magic == NORMAL).all() and (waits["due"] <= (second.number + 1) * PRECISION_MS).all():
            add(waits)
            return
        for physical, size in waits[decided.is_deletion(magic) & (magic & ROLL == 0)][["physical", "size"]].tolist():
            second.deletes.append((physical, size))
        kept = magic & WITHDRAWN == 0
        waits, magic = picked(waits, kept), magic[kept]
        later = (magic & ROLL != 0) | (slot_second_of(waits["due"]) > second.number)
        if later.any():
            second.again.append((picked(waits, later), magic[later] & ~ROLL))
        now = ~later & (magic & DELETE == 0)
        if now.any():
            add(picked(waits, now))

    # --- seconds in memory

    @property
    def current(self) -> Second:
        """The second whose turn it is, with its messages."""
        return self.resident[self.second]

    def open(self, number: int) -> None:
        """Begin to load a second, unless it is in memory. Raises OSError; then nothing changed."""
        if number in self.resident:
            return
        last = self.wheel.last(number)
        second = self.resident[number] = Second(number, self.read_ahead)
        if last >= 0:
            second.is_loaded = False
            second.loader = Loading(self, second, last)

    def left_of(
        self, second: Second, waits: Waits, magic: NDArray[np.int32]
    ) -> tuple[NDArray[np.bool_], NDArray[np.bool_], NDArray[np.bool_]]:
        """Return three masks of units in a second's slot: units still to be done, units that recovery found delivered,
        and those of the latter that are still counted as waiting. Changes nothing, as searches call it too."""
        start = self.start
        left = decided.left_of(
            waits["physical"], waits["position"], magic, waits["due"], second.number, start.second, start.found
        )
        uncounted = left.done
        if len(start.done):
            uncounted = left.done & (magic & DELETE == 0)
            if second.number == start.second:
                uncounted &= ~is_among(waits["physical"], start.found.counted)
        return left.kept, left.done, uncounted

    def was_loaded(self, second: Second) -> None:
        """Note that all messages of a second are in memory."""
        second.is_loaded = True
        self._count_delivered(second)

    def _count_delivered(self, second: Second) -> None:
        """Subtract the messages of a second that recovery found delivered from the counts, once it is loaded and is the
        current one: the note can tell only for the current second whether this was done."""
        if second.number == self.second and second.is_loaded:
            for waits in second.delivered:
                self._topics.count(waits, -1)
            second.delivered = []

    @property
    def counted_at(self) -> int:
        """The present value of the note's `counted at` (`timers.files.formats`)."""
        if self.current.is_loaded:
            return self._store.log.end
        return self.start.counted_at if self.second == self.start.second else 0

    def learn(self, waits: Waits, at: int, number: int) -> None:
        """Read deliver time and key of a message from its record, as a unit written by Apache's broker lacks them.
        `number`: the second of its slot, whose end counts as the deliver time if the record tells none. Raises
        OSError."""
        message = self._store.message_at(*waits[["physical", "size"]][at].item())
        due_ms = due_of(message) if message is not None else None
        waits["due"][at] = min(due_ms, MAX_DUE_MS) if due_ms is not None else (number + 1) * PRECISION_MS
        waits["key"][at] = key_of(message.properties_text) if message is not None else 0

    def loaded(self, number: int) -> Second:
        """Load the rest of a second in memory and return it. Raises OSError."""
        second = self.resident[number]
        while second.load_some():
            pass
        return second

    def delete_by_key(self, second: Second) -> None:
        """Begin to take out the messages that a second's deleting records name. `Second.load_some` goes on with it."""
        second.loader = Deleting(self._store, self, second)

    def delete(self, waits: Waits) -> None:
        """Withdraw cancelled messages by their units. The caller takes them out of the second in memory."""
        for position, is_again in waits[["position", "again"]].tolist():
            self.log.withdraw(position, 0 if is_again else NORMAL)
        self.gone(waits)

    def gone(self, waits: Waits) -> None:
        """Note that messages do not wait any more."""
        self._topics.count(waits, -1)
        if self.census.is_begun:
            self.census.removed(waits)

    def advance(self, now_ms: int, *, is_idle: bool = False) -> bool:
        """Give the next second its turn if the current one is done and over. Return whether a second got its turn.
        Seconds without messages get none, except once an hour, or if `is_idle`: so while nothing happens, nothing
        changes that a checkpoint would note. Raises OSError; then nothing changed."""
        frontier = slot_second(now_ms)
        if self.second >= frontier or not self.current.is_done:
            return False
        following = self.wheel.next_second(self.second + 1, frontier + 1)
        if following is None and not is_idle and frontier - self.second < HOUR:
            return False
        self._turn(following if following is not None else frontier)
        return True

    def begin_handing_on(self) -> None:
        """Deliver nothing of the current second until `end_handing_on`: its remaining messages go to the next
        second."""
        self.is_handing_on = True

    def end_handing_on(self) -> None:
        """Go on with deliveries."""
        self.is_handing_on = False

    def has_to_hand_on(self, beyond: int) -> bool:
        """Whether slots from the current one on, before that of second `beyond`, may have unmarked units of messages
        that are delivered or have newer units: Apache's broker, which goes by the units alone, would deliver them
        again. Raises OSError."""
        has_more = self.second < beyond and len(self.start.done) > 0
        return has_more or self.loaded(self.second).is_touched

    def hand_on(self, now_ms: int, beyond: int = 0) -> bool:
        """Move some remaining messages of the current second to the slot of the next second, or of `beyond` if that is
        later. When none is left, the next second with messages up to that one gets its turn. Return whether some are
        left. The messages are moved from the first to the last, and none is delivered until all are moved: so their
        order is kept. Raises OSError; then this step changed nothing."""
        second = self.current
        if second.load_some():
            return True
        if second.deletes:
            self.delete_by_key(second)
            return True
        if second.again:
            self.put_again(second, now_ms)
            return True
        waits, target = second.first(_ROLL_UNITS), max(second.number + 1, beyond)
        if len(waits):
            self.moving(waits)
            next_second = np.full(len(waits), target)
            self.move(waits, np.full(len(waits), NORMAL, np.int32), now_ms, next_second)
            with self._store.health.noting():
                self.census.removed(waits)
                second.drop(len(waits))
            return True
        following = self.wheel.next_second(second.number + 1, target)
        self._turn(following if following is not None else target)
        return False

    def mark_delivered(self) -> Iterator[None]:
        """Mark the units in future slots whose messages recovery found delivered, as happens if the clock was set back
        since: Apache's broker, which goes by the units alone, would deliver them again. Each step marks some. Raises
        OSError."""
        before = self.second
        while len(self.start.done):
            number = self.wheel.next_second(before + 1, self.start.recovered_to)
            if number is None:
                return
            before = number
            second = self.resident.get(number, Second(number))
            if number in self.resident:
                self.loaded(number)
            for positions, units in self.log.chain(self.wheel.last(number)):
                others = np.flatnonzero(seconds_of(units) != number)
                first = int(others[-1]) + 1 if len(others) else 0
                magic = units["magic"].astype(np.int32)
                waits = waits_of(units, positions)
                _, done, uncounted = self.left_of(second, waits, magic | NORMAL)
                done[:first] = uncounted[:first] = False
                for position, each in zip(positions[done].tolist(), magic[done].tolist(), strict=True):
                    self.log.withdraw(position, each)
                self._topics.count(waits[uncounted], -1)
                self.forget([waits["physical"][done]])
                yield
                if first:
                    break
            second.delivered = []

    def _turn(self, number: int) -> None:
        """Give a second, behind the current one, its turn. Earlier deliveries need not be known any more, as none was
        of a message in this slot or a later one. Deliveries that recovery found may be, and are noted separately.
        Raises OSError; then nothing changed."""
        self.open(number)
        old = self.resident.pop(self.second)
        self.forget(old.found_done)
        self.second = number
        self.preloaded = max(self.preloaded, number)
        self._count_delivered(self.current)
        self.since, self.log_since = self._store.log.end, self.log.end
        if self.is_replayed and self.second >= self.start.recovered_to:
            self.start, self._met_offsets = Start(0, 0, 0, 0, {}), []

    def forget(self, done: Iterable[NDArray[np.int64]]) -> None:
        """Forget that recovery found messages delivered: they have no unit in a future slot. `done`: physical
        offsets."""
        self._met_offsets += [offsets for offsets in done if len(offsets)]
        if sum(map(len, self._met_offsets)) * 4 > len(self.start.done):
            self._drop_settled_findings()

    def _drop_settled_findings(self) -> None:
        if not self._met_offsets:
            return
        found = self.start.found
        met, self._met_offsets = np.concatenate(self._met_offsets), []
        left = [
            np.delete(offsets, np.searchsorted(offsets, met[is_among(met, offsets)]))
            for offsets in (found.done, found.counted)
        ]
        self.start = self.start._replace(found=found._replace(done=left[0], counted=left[1]))

    def found(self) -> StartFacts:
        """Return the facts that recovery found, as far as they matter now: a part of the note
        (`timers.files.formats`)."""
        self._drop_settled_findings()
        found = self.start.found
        if self.current.is_loaded:
            found = found._replace(counted=found.done)
        elif self.second != self.start.second:
            found = found._replace(counted=NO_OFFSETS)
        if self.second != self.start.second:
            found = found._replace(moved=NO_OFFSETS, moved_by=NO_OFFSETS)
        if self.is_replayed:
            found = found._replace(withdrawn=NO_OFFSETS)
        return found

    def move(
        self, waits: Waits, magic: NDArray[np.int32], now_ms: int, not_before: NDArray[np.int64] | None = None
    ) -> None:
        """Put messages that already have units, as `put` does, and tell the searches in progress."""
        moved, kept = waits.copy(), magic & NO_MESSAGE == 0
        self.put(moved, magic, now_ms, not_before)
        with self._store.health.noting():
            self.search.note_moved(waits["position"][kept], moved[kept])

    def moving(self, waits: Waits) -> None:
        """Tell the searches in progress that messages are about to move to other slots."""
        for each in self._passes:
            each.passing(waits)

    def bring_back(self, parked: Waits, waits: Waits, now_ms: int, not_before: NDArray[np.int64]) -> None:
        """Give parked messages new units, by which they are delivered. `waits`: the same messages with their new times
        and flags. Raises OSError; then nothing changed."""
        self.move(waits, np.full(len(waits), NORMAL, np.int32), now_ms, not_before)
        with self._store.health.noting():
            self.log.superseded.add(parked["position"])

    def put_again(self, second: Second, now_ms: int) -> bool:
        """Give some of the messages that are due later than the second another slot. Return whether those were the
        last. Raises OSError."""
        waits, magic = second.again[-1]
        moving = waits[:_ROLL_UNITS][magic[:_ROLL_UNITS] & NO_MESSAGE == 0]
        second.is_touched = True
        self.moving(moving)
        self.move(waits[:_ROLL_UNITS], magic[:_ROLL_UNITS], max(now_ms, (second.number + 1) * PRECISION_MS))
        with self._store.health.noting():
            self.census.removed(moving)
            if len(waits) > _ROLL_UNITS:
                second.again[-1] = waits[_ROLL_UNITS:], magic[_ROLL_UNITS:]
            else:
                second.again.pop()
        return not second.again

    def preload(self, now_ms: int) -> bool:
        """Load a part of the next seconds. Return whether there was anything to do. Raises OSError."""
        for second in self.resident.values():
            if second.load_some():
                return True
        start, end = max(self.preloaded, self.second) + 1, now_ms // PRECISION_MS + PRELOAD_SECONDS
        if start > end:
            return False
        following = self.wheel.next_second(start, end + 1)
        if following is not None:
            self.open(following)
        self.preloaded = following if following is not None else end
        return following is not None

    def next_ms(self, now_ms: int, preload_ms: int = 0) -> int | None:
        """Return when there will be something to deliver or to load, ms since the epoch; None if nothing waits. Future
        seconds are not loaded before `preload_ms`. Raises OSError."""
        current, times = self.current, []
        if current.loader is not None or current.again or current.deletes:
            return now_ms
        if any(second.loader is not None for second in self.resident.values()):
            times.append(preload_ms)
        for number in sorted(self.resident):
            second = self.resident[number]
            head = second.head_ms
            if number != self.second and (head is not None or second.again or second.deletes):
                head = max(head or 0, number * PRECISION_MS + 1)
            if head is not None:
                times.append(head)
                break
        following = self.wheel.next_second(self.preloaded + 1, self.second + SLOTS)
        if following is not None:
            times.append(max(preload_ms, (following - PRELOAD_SECONDS) * PRECISION_MS))
        return max(now_ms, min(times)) if times else None

    # --- taking out

    def withdraw(self, waits: Waits, number: int) -> None:
        """Withdraw a message, as `wait_at` returned it, from the slot of second `number`. Reads nothing: the record
        that withdraws it is written already, and no failed read may come between the two."""
        self.log.withdraw(int(waits["position"][0]), int(waits["magic"][0]))
        self.parking.withdrawn(int(waits["position"][0]))
        second = self.resident.get(number)
        if second is not None:
            second.remove(waits)
        self.gone(waits)

    # --- the files

    def mark_newest(self, newest: Range | None, now_ms: int) -> None:
        """Append a unit of the newest message, unless the log's last unit belongs to its record: Apache's broker goes
        on behind the message of the last unit. `newest`: offset and size of the record, None without one. Raises
        OSError."""
        last = self.log.last_record()
        if last is None or newest is None or last == newest[0]:
            return
        physical, size = newest
        mark = self._past_units(1, now_ms)
        mark["magic"], mark["due_ms"] = NORMAL | WITHDRAWN, APPLIED
        mark["physical_offset"], mark["record_size"] = physical, size
        self.log.append(mark, self.log.positions(1))

    def put_past(self, waits: Waits, now_ms: int) -> None:
        """Write units for messages that were appended again and are delivered, so that a search by id finds them as
        delivered. They lie behind the units of the messages' earlier records, whose files go first. Raises OSError,
        MemoryError; then nothing changed."""
        if not len(waits):
            return
        units = self._units_of_past(waits, now_ms)
        positions = self.log.positions(len(units))
        self.log.append(units, positions)
        self.places.note(positions, units)

    def _units_of_past(self, waits: Waits, now_ms: int) -> Units:
        units = self._past_units(len(waits), now_ms)
        units["magic"], units["due_ms"] = 0, due_fields(waits)
        units["physical_offset"], units["record_size"] = waits["physical"], waits["size"]
        units["topic_hash"] = waits["hash"]
        return units

    def _past_units(self, count: int, now_ms: int) -> Units:
        """Return new units in a past slot, which is not read any more."""
        units = np.zeros(count, UNIT)
        units["size"], units["previous"] = UNIT.itemsize, -1
        units["write_ms"] = now_ms // PRECISION_MS * PRECISION_MS
        units["delay_ms"] = (self.second - HOUR) * PRECISION_MS - units["write_ms"]
        return units

    def expire(self, kept_from: int, second: int) -> Iterator[list[str] | ColdRead]:
        """Forget the files of the timer log that end at or before a position and have no slot of `second` or later.
        Each step yields paths for the caller to remove, or a read to be made before the next step.

        Position and second are those of the checkpoint on the disk: after a crash, recovery cuts off all units behind
        it, and a message that got another slot since then waits by its old unit again."""
        for end in self.log.file_ends():
            if end > kept_from:
                return
            at = self.log.begin
            while (part := (yield from patiently(partial(self.log.part, at, end)))) is not None:
                at = part[0] + len(part[1]) * UNIT.itemsize
                if int(seconds_of(part[1]).max()) >= second:
                    return
                yield []
            yield self.log.drop_before(end)


def due_of(message: StoredMessage) -> int | None:
    """Return when a stored message of the timer topic is due, ms since the epoch; None if it is no timer message."""
    text, prepared = message.properties_text, message.prepared_transaction_offset
    return timer_properties.due_of(text, message.store_timestamp, prepared)
