"""Enqueuing: from the timer topic's queue into the wheel, in the queue's order, a unit in the timer log a message."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
import structlog

from protocol import properties
from protocol.timer_properties import MAX_HASH, first_id
from scheduler.batches import Batches
from scheduler.timer_keys import key_of
from scheduler.timer_log import DELETE, MAX_DUE_MS, NORMAL, WITHDRAWN
from scheduler.timer_search import LOOK_UNITS
from scheduler.timer_second import WAIT, slot_second_of
from scheduler.timer_slots import Slots, due_of
from scheduler.timer_topics import TimerTopics
from storage.consume_queue import PADDING_SIZE, ConsumeQueue
from storage.store import MessageStore

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from scheduler.timer_second import Waits

log = structlog.get_logger(__name__)

_UNITS: Final = 4096


class Enqueuer:
    """Knows how far the queue is in the wheel. What recovery found delivered or withdrawn behind that place is not put
    there again."""

    def __init__(
        self, store: MessageStore, queue: ConsumeQueue, slots: Slots, topics: TimerTopics, batches: Batches
    ) -> None:
        self._store = store
        self._queue = queue
        self._slots = slots
        self._topics = topics
        self._batches = batches
        self.next_offset = 0
        """Next queue offset to put into the wheel."""
        self._replayed_to = 0
        """What recovery found does not matter for messages from this queue offset on."""
        self.messages = 0
        """Put into the wheel since start."""

    def load(self, next_offset: int) -> None:
        """Go on at a queue offset; `slots` are loaded."""
        self.next_offset = next_offset
        self._replayed_to = self._queue.next_offset
        self._slots.is_replayed = self.next_offset >= self._replayed_to

    @property
    def behind(self) -> int:
        """Messages not yet in the wheel."""
        return self._queue.next_offset - self.next_offset

    def behind_for(self, second: int) -> int:
        """How many of them are for a second."""
        units = self._batches.read(self._queue, self.next_offset, self.behind)
        return int((slot_second_of(units["tags_code"].astype(np.int64)) == second).sum())

    def is_done(self, physical_offset: int) -> bool:
        """Whether recovery found that a message, which is not in the wheel yet, was delivered or withdrawn."""
        start = self._slots.start
        places = ((found, np.searchsorted(found, physical_offset)) for found in (start.done, start.withdrawn))
        return any(at < len(found) and found[at] == physical_offset for found, at in places)

    def through(self, queue_offset: int, now_ms: int) -> None:
        """Put all messages up to one, and it too, into the wheel. Raises OSError."""
        while self.next_offset <= queue_offset and self.some(now_ms):
            pass

    def all(self, now_ms: int) -> None:
        """Put all messages into the wheel. Raises OSError."""
        while self.some(now_ms):
            pass

    def some(self, now_ms: int) -> bool:
        """Put the next messages into the wheel; whether there were any. Raises OSError."""
        queue = self._queue
        if self.next_offset < queue.min_offset:
            log.warning("timer_offset_corrected", offset=self.next_offset, corrected=queue.min_offset)
            self.next_offset = queue.min_offset
        end = queue.staged_from if queue.staged_from >= 0 else queue.next_offset
        count = min(end - self.next_offset, _UNITS)
        if count <= 0:
            return False
        units = self._batches.read(queue, self.next_offset, count)
        codes = units["tags_code"]
        hashes = self._topics.hashes(self.next_offset, len(units))
        if hashes is None or not (codes > MAX_HASH).all():
            units = units[:LOOK_UNITS]
            waits, magic = self._look(units)
        else:
            waits = np.zeros(len(units), WAIT)
            waits["physical"], waits["size"] = units["physical_offset"], units["size"]
            waits["due"], waits["hash"] = codes, hashes
            keys = self._topics.keys(self.next_offset, len(units))
            if keys is not None:
                waits["key"] = keys
            waits["again"] = self._topics.again(self.next_offset, len(units))
            magic = np.full(len(units), NORMAL, np.int32)
        if self.next_offset < self._replayed_to:
            magic |= np.where(np.isin(waits["physical"], self._slots.start.withdrawn), WITHDRAWN, 0).astype(np.int32)
            kept = ~np.isin(waits["physical"], self._slots.start.done)
            # By the first record's id one has to learn that its message was appended again, and then delivered.
            self._slots.put_past(waits[~kept & waits["again"]], now_ms)
            waits, magic = waits[kept], magic[kept]
        if len(waits):
            self._slots.put(waits, magic, now_ms)
            is_message = magic == NORMAL
            self._topics.count(waits[is_message], 1)
            self.messages += int(is_message.sum())
        self.next_offset += len(units)
        self._slots.is_replayed |= self.next_offset >= self._replayed_to
        self._topics.drop_staged(self.next_offset)
        return True

    def mark_newest(self, now_ms: int) -> None:
        """See `Slots.mark_newest`: of the message that came into the wheel last. Raises OSError."""
        unit = self._queue.unit(self.next_offset - 1) if self.next_offset > self._queue.min_offset else None
        if unit is not None:
            self._slots.mark_newest(unit[0], unit[1], now_ms)

    def _look(self, units: NDArray[Any]) -> tuple[Waits, NDArray[np.int32]]:
        """What units wait for of which only the records tell when they are due, and the magic numbers of their own."""
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
            is_again = first_id(text, message.prepared_transaction_offset) is not None
            waits[at] = (physical, min(due_ms, MAX_DUE_MS), 0, size, topic_hash, key_of(text), False, is_again, 0)
        known = magic != 0
        return waits[known], magic[known]
