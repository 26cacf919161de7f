"""The slots of the timer wheel at work: messages are put into them, moved to others, and taken out.

A waiting message has one unit in a slot that is not past, or is not in the wheel yet. Units in past slots, and
withdrawn units, stand for no message.

Keeps invariant 18 of ARCHITECTURE.md.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np

from duemq.protocol.records.timer_properties import PRECISION_MS
from duemq.scheduler.timers.config import DAY_SECONDS, TimerConfig
from duemq.scheduler.timers.files.log import TimerLog
from duemq.scheduler.timers.files.unit import (
    APPLIED,
    DELETE,
    NO_MESSAGE,
    NORMAL,
    ROLL,
    UNIT,
    WITHDRAWN,
    seconds_of,
    withdrawn,
)
from duemq.scheduler.timers.files.wheel import HOUR, TimerWheel
from duemq.scheduler.timers.index.census import Census
from duemq.scheduler.timers.index.positions import UnitPositions
from duemq.scheduler.timers.recovery import Start
from duemq.scheduler.timers.search import TimerSearch
from duemq.scheduler.timers.seconds.findings import Findings
from duemq.scheduler.timers.seconds.loading import Deleting
from duemq.scheduler.timers.seconds.parking import Parking
from duemq.scheduler.timers.seconds.roll_window import RollWindow
from duemq.scheduler.timers.seconds.second import NO_WAITS, Second, due_fields, waits_of
from duemq.scheduler.timers.seconds.turns import SecondTurns
from duemq.scheduler.timers.topics import TimerTopics
from duemq.storage import file_names
from duemq.storage.current import Current
from duemq.storage.queues.pull import ColdRead, Range, patiently
from duemq.storage.store import MessageStore

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from duemq.scheduler.timers.files.unit import Units
    from duemq.scheduler.timers.seconds.second import Waits

_ROLL_UNITS: Final = 4096
_MAX_LAG_SECONDS: Final = 20 * DAY_SECONDS


class RunningSearch(Protocol):
    """A search through the units of the timer log that takes more than one step."""

    def passing(self, waits: Waits) -> None:
        """Note that messages are about to move to other slots, so that the search will not find them by their present
        units."""


class Slots:
    """Changes the timer log and the wheel, and keeps the seconds in memory, the census and the searches consistent with
    them. Owned by one thread."""

    def __init__(
        self,
        store: MessageStore,
        topics: TimerTopics,
        config: Current[TimerConfig],
        read_ahead: Callable[[Waits], None],
    ) -> None:
        """Prepare the slots. `read_ahead`: called with messages, many at a time, whose records will be read soon."""
        root = store.config.root
        self._store = store
        self._topics = topics
        self.log = timer_log = TimerLog(
            store.files, os.path.join(root, file_names.TIMER_LOG), config.value.log_segment_size
        )
        self.wheel = wheel = TimerWheel(store.files, os.path.join(root, file_names.TIMER_WHEEL))
        self.positions = UnitPositions(timer_log)
        """The position of each message's newest unit in the log."""
        self.findings = findings = Findings()
        """The facts that recovery found, for as long as they matter."""
        self.turns = turns = SecondTurns(store, timer_log, wheel, findings, topics, read_ahead=read_ahead)
        """The current second, and the next ones in memory."""
        self.window = window = RollWindow(config, turns)
        """How far ahead slots may be."""
        self.census = Census()
        """The waiting messages by due second and by key, once a caller has begun the census."""
        self.search = TimerSearch(store, timer_log, self.positions, turns, findings=findings, census=self.census)
        """Finds waiting messages."""
        self.parking = Parking(
            timer_log, wheel, turns, window, findings, is_shared=topics.is_shared, read_ahead=read_ahead
        )
        """The parked messages."""
        self.is_handing_on = False
        """Whether the remaining messages of the current second are being moved to the next one."""
        self.policy_end = 0
        """The second after which no slot has a message whose time a policy chose."""
        self._passes: list[RunningSearch] = []
        """Searches through the log that are in progress; they are notified of messages that get newer units."""

    def load(self, start: Start, policy_end: int) -> None:
        """Begin with the state that recovery found."""
        self.policy_end = policy_end
        self.findings.load(start)
        self.turns.load(start)
        self.parking.found(start.parked)

    def note_held(self, second: int) -> None:
        """Note that a message whose time a policy chose has a slot of this second."""
        self.policy_end = max(self.policy_end, second)

    def begin_pass(self, search: RunningSearch) -> None:
        """Notify a search, until `end_pass`, of messages that get other slots."""
        self._passes.append(search)

    def end_pass(self, search: RunningSearch) -> None:
        """Note that the search is over."""
        self._passes.remove(search)

    # --- putting

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
        write (`put_past`). Raises OSError, MemoryError; then nothing has changed. Raises StoreBroken if the units were
        written but could not be noted in memory."""
        if not len(waits):
            self.put_past(past, now_ms)
            return
        now_second = now_ms // PRECISION_MS
        seconds, is_far = self.window.seconds_for(waits["due"], now_ms, not_before)
        if is_far.any():
            magic = np.where(is_far, magic | ROLL, magic)
        current = self.turns.second
        write_second = min(max(now_second, current - _MAX_LAG_SECONDS), current + _MAX_LAG_SECONDS)
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
            self.positions.note(all_positions, units)
            self.wheel.put(plan)
            waits["position"] = positions
            if self.census.is_complete:
                self.census.added(waits[magic & NO_MESSAGE == 0])
            if int(plan.seconds[0]) <= self.turns.preloaded:
                self.turns.add(waits, magic, seconds)

    def prepare(self, waits: Waits, now_ms: int, not_before: NDArray[np.int64] | None = None) -> None:
        """Read everything that `put` will need for the same messages at the same time, so that `put` itself reads
        nothing. Call this if something is written before `put`. Raises OSError."""
        if len(waits):
            self.wheel.prepare(self.window.seconds_for(waits["due"], now_ms, not_before)[0])

    @staticmethod
    def _put_no_messages(units: Units, magic: NDArray[np.int32]) -> None:
        """Set magic number and deliver time of the units that stand for no waiting message."""
        kind = magic & NO_MESSAGE
        units["magic"][kind == WITHDRAWN] = withdrawn(units["magic"][kind == WITHDRAWN].astype(np.int32))
        units["due_ms"][kind == NO_MESSAGE] = APPLIED
        units["due_ms"][kind == DELETE] = 0  # the value that RocketMQ's broker writes

    # --- the current second

    def delete_by_key(self, second: Second) -> None:
        """Begin to take out the messages that a second's deleting records name. `Second.load_next` continues that."""
        second.begin_deleting(Deleting(self._store, second, self.delete))

    def delete(self, waits: Waits) -> None:
        """Withdraw cancelled messages by their units. The caller takes them out of the second in memory."""
        for position, is_again in waits[["position", "again"]].tolist():
            self.log.withdraw(position, 0 if is_again else NORMAL)
        self.gone(waits)

    def gone(self, waits: Waits) -> None:
        """Note that messages no longer wait."""
        self._topics.count(waits, -1)
        if self.census.is_begun:
            self.census.removed(waits)

    def begin_handing_on(self) -> None:
        """Deliver nothing of the current second until `end_handing_on`: its remaining messages are moved to the next
        second."""
        self.is_handing_on = True

    def end_handing_on(self) -> None:
        """Allow deliveries again."""
        self.is_handing_on = False

    def has_to_hand_on(self, beyond: int) -> bool:
        """Whether the slots from the current one to before that of the second `beyond` may have unmarked units of
        messages that are delivered or have newer units. Apache's broker, which goes by the units alone, would deliver
        these messages again. Raises OSError."""
        turns = self.turns
        has_more = turns.second < beyond and len(self.findings.start.done) > 0
        return has_more or turns.loaded(turns.second).is_touched

    def hand_on(self, now_ms: int, beyond: int = 0) -> bool:
        """Move some of the remaining messages of the current second to the slot of the next second, or of `beyond` if
        that is later. When none is left, the next second with messages, up to that target, gets its turn. Return
        whether some are left. The messages are moved from the first to the last, and none is delivered until all are
        moved, so that their order is kept. Raises OSError; then this step has changed nothing."""
        second = self.turns.current
        if second.load_next():
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
        self.turns.turn_up_to(target)
        return False

    def mark_delivered(self) -> Iterator[None]:
        """Mark the units in future slots whose messages recovery found delivered. There are such units if the clock was
        set back after the deliveries. Apache's broker, which goes by the units alone, would deliver these messages
        again. Each step marks some. Raises OSError."""
        findings, turns = self.findings, self.turns
        before = turns.second
        while len(findings.start.done):
            number = self.wheel.next_second(before + 1, findings.start.recovered_to)
            if number is None:
                return
            before = number
            second = turns.loaded(number) if number in turns.resident else Second(number)
            for positions, units in self.log.chain(self.wheel.last(number)):
                others = np.flatnonzero(seconds_of(units) != number)
                first = int(others[-1]) + 1 if len(others) else 0
                magic = units["magic"].astype(np.int32)
                waits = waits_of(units, positions)
                _, done, uncounted = findings.left_of(number, waits, magic | NORMAL)
                done[:first] = uncounted[:first] = False
                for position, each in zip(positions[done].tolist(), magic[done].tolist(), strict=True):
                    self.log.withdraw(position, each)
                self._topics.count(waits[uncounted], -1)
                findings.forget([waits["physical"][done]])
                yield
                if first:
                    break
            second.take_uncounted()  # they are subtracted above

    def move(
        self, waits: Waits, magic: NDArray[np.int32], now_ms: int, not_before: NDArray[np.int64] | None = None
    ) -> None:
        """Put messages that already have units into other slots, as `put` does, and notify the searches in progress."""
        moved, kept = waits.copy(), magic & NO_MESSAGE == 0
        self.put(moved, magic, now_ms, not_before)
        with self._store.health.noting():
            self.search.note_moved(waits["position"][kept], moved[kept])

    def moving(self, waits: Waits) -> None:
        """Notify the searches in progress that messages are about to move to other slots."""
        for each in self._passes:
            each.passing(waits)

    def bring_back(self, parked: Waits, waits: Waits, now_ms: int, not_before: NDArray[np.int64]) -> None:
        """Give parked messages new units, by which they will be delivered. `waits`: these messages with their new times
        and flags. Raises OSError; then nothing has changed."""
        self.move(waits, np.full(len(waits), NORMAL, np.int32), now_ms, not_before)
        with self._store.health.noting():
            self.log.superseded.add(parked["position"])

    def put_again(self, second: Second, now_ms: int) -> bool:
        """Give some of the messages that are due later than the second another slot. Return whether these were the last
        of them. Raises OSError."""
        waits, magic = second.first_again(_ROLL_UNITS)
        moving = waits[magic & NO_MESSAGE == 0]
        second.touch()
        self.moving(moving)
        self.move(waits, magic, max(now_ms, (second.number + 1) * PRECISION_MS))
        with self._store.health.noting():
            self.census.removed(moving)
            second.drop_again(len(waits))
        return not second.again

    # --- taking out

    def withdraw(self, waits: Waits, number: int) -> None:
        """Withdraw a message, as `wait_at` returned it, from the slot of the second `number`. Reads nothing: the record
        that withdraws the message is written already, and no failed read may come between the two."""
        self.log.withdraw(int(waits["position"][0]), int(waits["magic"][0]))
        self.parking.withdrawn(int(waits["position"][0]))
        second = self.turns.resident.get(number)
        if second is not None:
            second.remove(waits)
        self.gone(waits)

    # --- the files

    def mark_newest(self, newest: Range | None, now_ms: int) -> None:
        """Append a unit for the newest message, unless the log's last unit belongs to its record: Apache's broker
        continues behind the message of the last unit. `newest`: physical offset and size of the record, None without
        one. Raises OSError."""
        last = self.log.last_record()
        if last is None or newest is None or last == newest[0]:
            return
        physical, size = newest
        mark = self._past_units(1, now_ms)
        mark["magic"], mark["due_ms"] = NORMAL | WITHDRAWN, APPLIED
        mark["physical_offset"], mark["record_size"] = physical, size
        self.log.append(mark, self.log.positions(1))

    def put_past(self, waits: Waits, now_ms: int) -> None:
        """Write units for messages that were appended again and are already delivered, so that a search by id finds
        that they are delivered. These units lie behind those of the messages' earlier records, whose files are removed
        first. Raises OSError, MemoryError; then nothing has changed."""
        if not len(waits):
            return
        units = self._units_of_past(waits, now_ms)
        positions = self.log.positions(len(units))
        self.log.append(units, positions)
        self.positions.note(positions, units)

    def _units_of_past(self, waits: Waits, now_ms: int) -> Units:
        units = self._past_units(len(waits), now_ms)
        units["magic"], units["due_ms"] = 0, due_fields(waits)
        units["physical_offset"], units["record_size"] = waits["physical"], waits["size"]
        units["topic_hash"] = waits["hash"]
        return units

    def _past_units(self, count: int, now_ms: int) -> Units:
        """Return new units in a past slot, which is no longer read."""
        units = np.zeros(count, UNIT)
        units["size"], units["previous"] = UNIT.itemsize, -1
        units["write_ms"] = now_ms // PRECISION_MS * PRECISION_MS
        units["delay_ms"] = (self.turns.second - HOUR) * PRECISION_MS - units["write_ms"]
        return units

    def expire(self, kept_from: int, second: int) -> Iterator[list[str] | ColdRead]:
        """Forget the files of the timer log that end at or before a position and have no unit in a slot of `second` or
        later. Each step yields paths for the caller to remove, or a read to be made before the next step.

        Position and second are those of the checkpoint on the disk: after a crash, recovery cuts off all units behind
        that checkpoint, and a message that got another slot since then waits by its old unit again."""
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
