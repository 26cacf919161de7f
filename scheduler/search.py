"""Searches for waiting messages, in the timer wheel and in the delay levels, and changes of such messages.

Nothing is kept in memory for this. Messages in the wheel are found by the timer log, whose units have topic and time;
messages of levels are found by their consume queues. Records are read only for messages that may be selected. A search
is a generator that does a bounded amount of work at each step, so that other work can be done in between.

Messages have an order, so that a search can continue after one of them (`SearchPosition`): first the messages of the
levels in the order of their queues, then those with a timer in the order of their records. A message keeps its position
as long as it waits by the same record. So a list of many pages has it once, whatever slots of the wheel it gets in the
meantime. If it gets another record, which always has a timer and lies behind all other records, the list may have the
message twice, once by each record, but never omits it.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from duemq.protocol.records import properties
from duemq.protocol.records.record import StoredMessage
from duemq.protocol.records.recurrence import recurs
from duemq.protocol.topics import SCHEDULE_TOPIC
from duemq.scheduler.levels.service import LevelQueues
from duemq.scheduler.timers.config import Cancelled
from duemq.scheduler.timers.service import Timers
from duemq.scheduler.waiting import is_behind
from duemq.storage.queues.pull import ColdRead, Range, patiently
from duemq.storage.store import MessageStore

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Times = NDArray[np.int64]

_LEVELS: Final = 0
_TIMERS: Final = 1
_SLICE_UNITS: Final = 128
"""Number of messages with a timer whose records are read, and whose fields become Python values, in one go."""
_MAX_NUMBER: Final = 2**63
_MAX_CURSOR: Final = 64


class SearchPosition(NamedTuple):
    """The position of a message in a search. Positions compare in the order of the search."""

    part: int
    """0 for the levels, 1 for timers."""
    level: int
    """The delay level, 0 for timers."""
    offset: int
    """The queue offset in the level's queue; for timers the record's physical offset."""

    def __str__(self) -> str:
        return ".".join(map(str, self))

    @classmethod
    def parse(cls, text: str) -> SearchPosition:
        """Parse the text of a position, as `str` makes it. Raises ValueError."""
        numbers = text.split(".") if len(text) <= _MAX_CURSOR and text.isascii() else []
        if len(numbers) != 3 or not all(map(str.isdecimal, numbers)):
            raise ValueError(f"{text[:_MAX_CURSOR]!r} is not a valid position")
        search_position = cls(*map(int, numbers))
        if search_position.part > _TIMERS or max(search_position) >= _MAX_NUMBER:
            raise ValueError(f"{text!r} is not a valid position")
        return search_position


_FIRST: Final = SearchPosition(_LEVELS, 0, -1)


def _search_position_of(message: StoredMessage) -> SearchPosition:
    """Return the search position of a message that waits by this record."""
    if message.topic == SCHEDULE_TOPIC:
        return SearchPosition(_LEVELS, message.queue_id + 1, message.queue_offset)
    return SearchPosition(_TIMERS, 0, message.physical_offset)


class WaitingMessage(NamedTuple):
    """A waiting message that a search found."""

    message: StoredMessage
    """The stored record; its topic is the one in which it waits."""
    due_ms: int
    """The deliver time, ms since the epoch."""
    topic: str
    """The real topic."""
    search_position: SearchPosition

    @property
    def delay_level(self) -> int:
        """The delay level; 0 for a message with a timer."""
        return self.message.queue_id + 1 if self.message.topic == SCHEDULE_TOPIC else 0


class Selection(NamedTuple):
    """Conditions on waiting messages; None means no condition. Times are ms since the epoch, `end_ms` is exclusive."""

    topic: str | None = None
    key: str | None = None
    """One of the message's KEYS, or its UNIQ_KEY."""
    begin_ms: int | None = None
    end_ms: int | None = None
    recurring: bool = False
    """Whether to select only recurring messages."""

    def has_time(self, due: Times) -> NDArray[np.bool_]:
        """Return, for each deliver time, whether it is within the selection's times."""
        right = np.ones(len(due), bool)
        if self.begin_ms is not None:
            right &= due >= self.begin_ms
        if self.end_ms is not None:
            right &= due < self.end_ms
        return right

    def has(self, text: str, due_ms: int) -> bool:
        """Whether a message with these properties and this deliver time is selected."""
        if self.begin_ms is not None and due_ms < self.begin_ms:
            return False
        if self.end_ms is not None and due_ms >= self.end_ms:
            return False
        if self.topic is not None and properties.get(text, properties.REAL_TOPIC) != self.topic:
            return False
        if self.recurring and not recurs(text):
            return False
        if self.key is None or properties.get(text, properties.UNIQ_KEY) == self.key:
            return True
        return self.key in (properties.get(text, properties.KEYS) or "").split(" ")


class _Counting:
    """The progress of a count. `wheel_end`: the end of the timer log when the count began."""

    def __init__(self, end: int, wheel_end: int) -> None:
        self.end = end
        """The end of the commitlog when the count began: messages with later records are not counted."""
        self._wheel_end = wheel_end
        self.position = 0
        """Position of the timer log from which on the units up to `_wheel_end` are still to be counted."""
        self.search_position = _FIRST
        """The search position of the last message of a level that was counted."""

    def is_ahead(self, message: StoredMessage, position: int | None) -> bool:
        """Return whether the count has not come to a message yet. `position`: of its unit in the timer log; None if it
        has none."""
        if message.topic == SCHEDULE_TOPIC:
            return message.physical_offset < self.end and _search_position_of(message) > self.search_position
        # Messages with units behind `_wheel_end` are counted as not in the wheel yet, wherever they move.
        return position is not None and self.position <= position < self._wheel_end


class WaitingMessages:
    """Searches for and changes waiting messages. Owned by the event loop's thread."""

    def __init__(self, store: MessageStore, timers: Timers, levels: LevelQueues) -> None:
        self._store = store
        self._timers = timers
        self._levels = levels

    def select(
        self, selection: Selection, now_ms: int, after: SearchPosition | None = None
    ) -> Iterator[WaitingMessage | ColdRead | None]:
        """Iterate over the messages that are selected at the time of this call, each once, in the order of their search
        positions, from behind `after`. Yields None now and then, so that other work can be done, and reads that would
        wait for the disk: if a thread does them before the next step, nothing else has to wait. Messages that are sent,
        delivered or changed in the meantime may or may not be included."""
        for found in self._candidates(selection, now_ms, after or _FIRST):
            if isinstance(found, ColdRead):
                yield found
                continue
            search_position, message, due_ms = found
            if message is None or not selection.has(message.properties_text, due_ms):
                yield None
            else:
                topic = properties.get(message.properties_text, properties.REAL_TOPIC) or ""
                yield WaitingMessage(message, due_ms, topic, search_position)

    def _candidates(
        self, selection: Selection, now_ms: int, after: SearchPosition
    ) -> Iterator[tuple[SearchPosition, StoredMessage | None, int] | ColdRead]:
        """Iterate over the messages behind a search position that may be selected, each with its position and deliver
        time (ms since the epoch); None instead of the message if it is not selected or no longer exists. Yields reads
        as `select` does."""
        self._timers.gather(now_ms)
        end, come_to = self._store.log.end, after

        def is_ahead(message: StoredMessage, _: int | None) -> bool:
            return message.physical_offset < end and _search_position_of(message) > come_to

        with self._timers.changes.moves.followed(is_ahead) as missed:
            for found in self._places_before(selection, now_ms, after, end):
                if not isinstance(found, ColdRead) and found[1] is not None:
                    come_to = found[0]
                    missed.found(found[1].physical_offset)
                yield found
            # Messages that would be missed come last, since their new records lie behind all others.
            for physical, due_ms in missed.take():
                message = yield from patiently(partial(self._store.message_at, physical))
                yield SearchPosition(_TIMERS, 0, physical), message, due_ms

    def _places_before(
        self, selection: Selection, now_ms: int, after: SearchPosition, end: int
    ) -> Iterator[tuple[SearchPosition, StoredMessage | None, int] | ColdRead]:
        """Iterate as `_places` does, but only over messages that wait by a record before the physical offset `end`."""
        if after.part == _LEVELS and not selection.recurring:
            for one in self._levels.waiting_before(end, now_ms, (after.level, after.offset)):
                if isinstance(one, ColdRead):
                    yield one
                elif one is not None:
                    yield _search_position_of(one[0]), *one
                else:
                    yield after, None, 0
        reached = after.offset if after.part == _TIMERS else -1
        for waits in self._timers.waiting_by_record(reached, end):
            if isinstance(waits, ColdRead):
                yield waits
                continue
            found = self._right(selection, waits)
            for start in range(0, len(found), _SLICE_UNITS):
                part = found[start : start + _SLICE_UNITS]
                yield from self._cold(part[["physical", "size"]].tolist())
                for physical, size, due_ms in part[["physical", "size", "due"]].tolist():
                    message = yield from patiently(partial(self._store.message_at, physical, size))
                    yield SearchPosition(_TIMERS, 0, physical), message, due_ms
            yield after, None, 0
        # The records of messages that are not in the wheel yet lie behind those of all messages that are.
        for waiting in self._behind(reached):
            if isinstance(waiting, ColdRead):
                yield waiting
                continue
            _, physical, size, due_ms = waiting
            if physical >= end:
                return
            yield from self._cold([(physical, size)])
            message = yield from patiently(partial(self._store.message_at, physical, size))
            yield SearchPosition(_TIMERS, 0, physical), message, due_ms

    def _cold(self, ranges: list[Range]) -> Iterator[ColdRead]:
        """Yield the read that brings records into memory, if they are not in memory."""
        if ranges and not self._store.is_cached(ranges):
            yield ColdRead(self._store.log, ranges)

    @staticmethod
    def _right(selection: Selection, waits: NDArray[Any]) -> NDArray[Any]:
        """Return those messages in the wheel that, as far as their units tell, may be selected."""
        right = selection.has_time(waits["due"])
        if selection.topic is not None:
            right &= waits["hash"] == properties.java_hash(selection.topic)
        if selection.recurring:
            right &= waits["key"] != 0
        return waits[right]

    def _behind(self, reached: int = -1) -> Iterator[tuple[int, int, int, int] | ColdRead]:
        """Iterate over the messages that are not in the wheel at the time of this call and whose records lie behind a
        physical offset: queue offset, physical offset, size and deliver time. Deleting records and messages that
        Apache's broker stored are left out, since their units do not have enough information. Yields reads as `select`
        does."""
        queue = self._timers.queue
        return self._units_behind(max(self._timers.queue_offset, queue.min_offset), queue.next_offset, reached)

    def _units_behind(self, start: int, end: int, reached: int) -> Iterator[tuple[int, int, int, int] | ColdRead]:
        high = end if reached >= 0 else start
        while start < high:
            middle = (start + high) // 2
            units = yield from patiently(partial(self._timers.units_behind, middle, middle + 1))
            if len(units) and int(units["physical_offset"][0]) <= reached:
                start = middle + 1
            else:
                high = middle
        while start < end:
            units = yield from patiently(partial(self._timers.units_behind, start, min(end, start + _SLICE_UNITS)))
            if not len(units):
                return
            for at in np.flatnonzero(is_behind(units, self._timers.found)).tolist():
                yield start + at, *units[at].item()
            start += len(units)

    # --- counting

    def count(self, selection: Selection, now_ms: int) -> Iterator[int | ColdRead | None]:
        """Count the messages that are selected at the time of this call: yields None and reads, as `select` does, and
        the number at the end. Without a key, no records of messages in the wheel are read, unless another topic has the
        same hash, or only recurring messages are counted."""
        if selection.key is not None or selection.recurring:
            number = 0
            for found in self.select(selection, now_ms):
                number += isinstance(found, WaitingMessage)
                yield found if isinstance(found, ColdRead) else None
            yield number
            return
        number = 0
        for due in self._deliver_times(selection.topic, now_ms):
            if due is None or isinstance(due, ColdRead):
                yield due
                continue
            number += int(selection.has_time(due).sum())
            yield None
        yield number

    def curve(
        self, begin_ms: int, step_ms: int, steps: int, now_ms: int, topic: str | None = None
    ) -> Iterator[list[int] | ColdRead | None]:
        """Count the messages due in each of `steps` spans of `step_ms` from `begin_ms` on: yields None and reads, as
        `count` does, and the list of counts at the end. Overdue messages count as due now. If no topic is given and the
        times are in whole seconds, the first call begins a census of the wheel (`timers.index.census`); once the census
        is complete, calls use its counts instead of looking at the messages."""
        counts = np.zeros(steps, np.int64)
        is_counted = topic is None and not begin_ms % 1000 and not step_ms % 1000
        if is_counted:
            self._timers.gather(now_ms)
            self._timers.count()
            is_counted = self._timers.is_counted

        def in_wheel() -> Iterator[None]:
            nonlocal counts
            for counted in self._timers.counts.curve(begin_ms // 1000, step_ms // 1000, steps, now_ms // 1000):
                yield None
                counts = counted

        for due in self._deliver_times(topic, now_ms, in_wheel() if is_counted else None):
            if due is None or isinstance(due, ColdRead):
                yield due
                continue
            numbers = (np.maximum(due, now_ms) - begin_ms) // step_ms
            counts += np.bincount(numbers[(numbers >= 0) & (numbers < steps)], minlength=steps)
            yield None
        yield counts.tolist()

    def _is_alone(self, topic: str | None) -> bool:
        """Whether units of the timer log are enough to recognize the messages of a topic. They are not if another topic
        has the same hash."""
        return topic is None or self._timers.is_alone(topic)

    def _deliver_times(
        self, topic: str | None, now_ms: int, wheel: Iterator[None] | None = None
    ) -> Iterator[Times | ColdRead | None]:
        """Iterate over the deliver times of the messages of a topic, or of all topics, in parts of bounded size; yields
        None and reads as `select` does. Messages not in the wheel come last. A message that gets another record in the
        meantime counts once nevertheless. `wheel`: an iterator that counts the messages in the wheel in another way;
        it is iterated in place of those messages."""
        ours = Selection(topic)
        if not self._is_alone(topic):
            for each in self.select(ours, now_ms):
                yield np.array([each.due_ms]) if isinstance(each, WaitingMessage) else each
            return
        self._timers.gather(now_ms)
        behind = self._behind()
        counting = _Counting(self._store.log.end, self._timers.log_end if wheel is None else 0)
        with self._timers.changes.moves.followed(counting.is_ahead) as missed:
            yield from wheel if wheel is not None else self._due_in_wheel(ours, counting)
            yield from self._due_in_levels(ours, now_ms, counting)
            for waiting in behind:
                if isinstance(waiting, ColdRead):
                    yield waiting
                else:
                    yield from self._due_of(ours, *waiting[1:])
            for physical, due_ms in missed.take():
                yield from self._due_of(ours, physical, None, due_ms)

    def _due_in_wheel(self, ours: Selection, counting: _Counting) -> Iterator[Times | ColdRead]:
        for waits in self._timers.units_waiting():
            if isinstance(waits, ColdRead):
                yield waits
                continue
            if len(waits):
                counting.position = max(counting.position, int(waits["position"].max()) + 1)
            yield self._right(ours, waits)["due"]

    def _due_in_levels(self, ours: Selection, now_ms: int, counting: _Counting) -> Iterator[Times | ColdRead | None]:
        if ours.topic is None:
            for part in self._levels.deliver_times(now_ms):
                if isinstance(part, ColdRead):
                    yield part
                else:
                    counting.search_position = SearchPosition(_LEVELS, part[0], part[1])
                    yield part[2]
            return
        for found in self._levels.waiting_before(counting.end, now_ms):
            if found is None or isinstance(found, ColdRead):
                yield found
            else:
                counting.search_position = _search_position_of(found[0])
                yield np.array([found[1]]) if ours.has(found[0].properties_text, found[1]) else None

    def _due_of(self, ours: Selection, physical: int, size: int | None, due_ms: int) -> Iterator[Times | ColdRead]:
        """Yield the deliver time of a record's message if it is selected. The record is read only if the selection has
        a topic. Yields reads as `select` does."""
        if ours.topic is not None:
            message = yield from patiently(partial(self._store.message_at, physical, size))
            if message is None or not ours.has(message.properties_text, due_ms):
                return
        yield np.array([due_ms])

    # --- changing

    def cancel(self, physical_offset: int, now_ms: int, owner: tuple[str, str] | None = None) -> Cancelled | None:
        """Cancel a message that waits with a timer or a level, given the physical offset of its record, or of the
        record that its id names. Return None, and do nothing, if the outcome depends on the index of ids, and that is
        not complete yet. `owner`: the topic and UNIQ_KEY that the message must have; otherwise the outcome is UNKNOWN.
        Raises StoreError, OSError."""
        return self._timers.changes.cancel(physical_offset, now_ms, owner)

    def reschedule(
        self, physical_offset: int, due_ms: int, now_ms: int, owner: tuple[str, str] | None = None
    ) -> Cancelled | None:
        """Give a message that waits with a timer or a level another time, ms since the epoch; a past time means
        "immediately". Return CANCELLED if that was done, None as `cancel` does. `owner`: as for `cancel`. Raises
        StoreError, OSError."""
        return self._timers.changes.reschedule(physical_offset, due_ms, now_ms, owner)
