"""Enqueuing: messages of the timer topic's queue are put into the wheel in order, each with a unit in the timer
log."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import structlog

from duemq.protocol.records import properties
from duemq.protocol.records.timer_properties import MAX_HASH, first_id
from duemq.scheduler.delivery.batches import Batches
from duemq.scheduler.delivery.targets import TopicHashes
from duemq.scheduler.timers.deliver_times import LOOK_UNITS, due_of
from duemq.scheduler.timers.files.unit import DELETE, MAX_DUE_MS, NORMAL, WITHDRAWN
from duemq.scheduler.timers.index.keys import key_of
from duemq.scheduler.timers.index.sorted_offsets import is_among
from duemq.scheduler.timers.seconds.second import WAIT, slot_second_of
from duemq.scheduler.timers.seconds.slots import Slots
from duemq.scheduler.timers.topics import TimerTopics
from duemq.storage.log.copies import PackedRecords, origin_of
from duemq.storage.queues.consume_queue import PADDING_SIZE, ConsumeQueue
from duemq.storage.queues.pull import Range
from duemq.storage.store import MessageStore

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from duemq.scheduler.timers.seconds.second import Waits

log = structlog.get_logger(__name__)

_UNITS: Final = 4096
_FIRST_ID: Final = properties.TIMER_FIRST_ID.encode()
_LOOK_BYTES: Final = 1 << 20
"""Approximate number of bytes of records that are read in one go if units do not have enough information. Reading them
takes a few ms."""


class Enqueuer:
    """Puts the messages of the timer topic's queue into the wheel, and keeps track of its progress. Messages that
    recovery found delivered, withdrawn, or already in the timer log do not wait again."""

    def __init__(
        self, store: MessageStore, queue: ConsumeQueue, slots: Slots, topics: TimerTopics, batches: Batches
    ) -> None:
        self._store = store
        self._queue = queue
        self._slots = slots
        self._topics = topics
        self._batches = batches
        self._hashes = TopicHashes(topics.hash_of)
        self.next_offset = 0
        """The next queue offset to put into the wheel."""
        self._replayed_to = 0
        """The end of the queue at the start: recovery has no information on messages from this queue offset on."""
        self.messages = 0
        """Number of messages put into the wheel since start."""
        self.refused_ms: int | None = None
        """The earliest deliver time, ms since the epoch, of the messages that the last try failed to write; None if the
        last try did not fail."""

    def load(self, next_offset: int) -> None:
        """Begin at a queue offset. Call this once `slots` are loaded."""
        self.next_offset = next_offset
        self._replayed_to = self._queue.next_offset
        self._note_replayed()

    def _note_replayed(self) -> None:
        if self.next_offset >= self._replayed_to:
            self._slots.findings.was_replayed()

    @property
    def behind(self) -> int:
        """Number of messages not yet in the wheel."""
        return self._queue.next_offset - self.next_offset

    @property
    def needed_from(self) -> int:
        """The physical offset of the first message that is not in the wheel yet; the end of the commitlog if all
        messages are in the wheel. Raises OSError."""
        first = max(self.next_offset, self._queue.min_offset)
        if first >= self._queue.next_offset:
            return self._store.log.end
        unit = self._queue.unit(first)
        return unit[0] if unit is not None else self._store.log.begin

    def behind_for(self, second: int, now_ms: int) -> int:
        """Return the number of messages not yet in the wheel that would now get the slot of a second. Raises
        OSError."""
        units = self._batches.read(self._queue, self.next_offset, self.behind)
        due = slot_second_of(units["tags_code"].astype(np.int64))
        return int((self._slots.window.slots_for(due, now_ms) == second).sum())

    def enqueue_through(self, queue_offset: int, now_ms: int) -> None:
        """Put all messages up to and including a queue offset into the wheel. Raises OSError."""
        while self.next_offset <= queue_offset and self.enqueue_next(now_ms):
            pass

    def enqueue_all(self, now_ms: int) -> None:
        """Put all messages into the wheel. Raises OSError."""
        while self.enqueue_next(now_ms):
            pass

    def enqueue_next(self, now_ms: int) -> bool:
        """Put the next messages into the wheel. Return whether there were any. Raises OSError."""
        queue = self._queue
        if self.next_offset < queue.min_offset:
            log.warning("timer_offset_corrected", offset=self.next_offset, corrected=queue.min_offset)
            self.next_offset = queue.min_offset
        end = queue.staged_from if queue.staged_from >= 0 else queue.next_offset
        count = min(end - self.next_offset, _UNITS)
        if count <= 0:
            return False
        units = self._batches.read(queue, self.next_offset, count)
        count, codes = len(units), units["tags_code"]
        hashes = self._topics.hashes(self.next_offset, len(units))
        if hashes is None or not (codes > MAX_HASH).all():
            looked = self._look(units)
            count = len(looked.waits)
            known = looked.magic != 0
            waits, magic = looked.waits[known], looked.magic[known]
        else:
            waits = np.zeros(len(units), WAIT)
            waits["physical"], waits["size"] = units["physical_offset"], units["size"]
            waits["due"], waits["hash"] = codes, hashes
            keys = self._topics.keys(self.next_offset, len(units))
            if keys is not None:
                waits["key"] = keys
            waits["again"] = self._topics.again(self.next_offset, len(units))
            magic = np.full(len(units), NORMAL, np.int32)
        met, past, findings = None, waits[:0], self._slots.findings
        if len(enqueued := findings.start.enqueued) and self.next_offset < self._replayed_to:
            is_new = ~is_among(waits["physical"], enqueued)
            waits, magic = waits[is_new], magic[is_new]
        if self.next_offset < self._replayed_to and len(waits):
            magic |= np.where(is_among(waits["physical"], findings.start.withdrawn), WITHDRAWN, 0).astype(np.int32)
            done = is_among(waits["physical"], findings.start.done)
            met = waits["physical"][done]
            # A search by the id of the first record must find that the message was appended again and then delivered.
            past, waits, magic = waits[done & waits["again"]], waits[~done], magic[~done]
        try:
            self._slots.put(waits, magic, now_ms, past=past)
        except OSError:
            self.refused_ms = int(waits["due"].min()) if len(waits) else None
            raise
        self.refused_ms = None
        self.next_offset += count  # the messages are in the wheel now, even if the lines below fail
        if len(waits):
            is_message = magic == NORMAL
            self._topics.count(waits[is_message], 1)
            self.messages += int(is_message.sum())
        if met is not None:
            findings.forget([met])
        self._note_replayed()
        self._topics.drop_staged(self.next_offset)
        return True

    def newest(self) -> Range | None:
        """Return physical offset and size of the record of the message that was last put into the wheel; None if there
        is none. Raises OSError."""
        unit = self._queue.unit(self.next_offset - 1) if self.next_offset > self._queue.min_offset else None
        return unit[:2] if unit is not None else None

    def _look(self, units: NDArray[Any]) -> _ReadUnits:
        """Return the messages of units, reading records for topics or deliver times that the units do not have. Covers
        as many units, from the first one on, as one piece of work allows. Raises OSError."""
        codes, sizes = units["tags_code"].astype(np.int64), units["size"].astype(np.int64)
        physical = units["physical_offset"].astype(np.int64)
        # In the usual case, duemq's own, the unit has the deliver time, and the record is in the commitlog.
        is_usual = (codes > MAX_HASH) & (sizes > 0) & (sizes != PADDING_SIZE)
        is_usual &= (physical >= self._store.log.begin) & (physical + sizes <= self._store.log.end)
        special = np.flatnonzero(~is_usual)
        count = int(special[LOOK_UNITS]) if len(special) > LOOK_UNITS else len(units)
        total = np.cumsum(np.where(is_usual, sizes, 0))
        count = max(1, min(count, int(np.searchsorted(total, _LOOK_BYTES, "right"))))
        at = np.flatnonzero(is_usual[:count])
        waits = np.zeros(count, WAIT)
        magic = np.zeros(count, np.int32)
        records = self._batches.records(physical[at], sizes[at]) if len(at) else None
        if records is not None:
            if not records.is_usual.all():
                at = at[records.is_usual]
                records = records.part(np.flatnonzero(records.is_usual))
            if len(at):
                waits["physical"][at], waits["size"][at] = physical[at], sizes[at]
                waits["due"][at] = np.minimum(codes[at], MAX_DUE_MS)
                waits["hash"][at], waits["key"][at] = self._hashes.find(records)
                waits["again"][at] = _were_again(records)
                magic[at] = NORMAL
        special = np.flatnonzero(magic == 0)
        if len(special) > LOOK_UNITS:  # records of another form (IPv6), or records that are being removed
            count = int(special[LOOK_UNITS])
        for each in special[:LOOK_UNITS].tolist():
            self._look_at(units[each].item(), waits, magic, each)
        return _ReadUnits(waits[:count], magic[:count])

    def _look_at(self, unit: tuple[int, int, int], waits: Waits, magic: NDArray[np.int32], at: int) -> None:
        """Set the message and magic number at index `at` from a unit's record. If the record is missing or is not a
        timer message, they stay 0, and an error is logged."""
        physical, size, code = unit
        message = self._store.message_at(physical, size) if 0 < size != PADDING_SIZE else None
        due_ms = due_of(message) if message is not None else None
        if message is None or due_ms is None:
            log.error("timer_message_illegal", physical_offset=physical, size=size)
            return
        text = message.properties_text
        topic_hash = self._topics.hash_of(properties.get(text, properties.REAL_TOPIC) or "")
        magic[at] = NORMAL
        if properties.get(text, properties.TIMER_DEL_UNIQKEY) is not None:
            magic[at] = NORMAL | DELETE
            origin = origin_of(message.prepared_transaction_offset)
            if origin is not None and origin < physical:  # in clients' records, earlier versions stored the time there
                magic[at] |= WITHDRAWN
        elif code > MAX_HASH:
            due_ms = code
        is_again = first_id(text, message.prepared_transaction_offset) is not None
        waits[at] = (physical, min(due_ms, MAX_DUE_MS), 0, size, topic_hash, key_of(text), False, is_again, 0)


def _were_again(records: PackedRecords) -> NDArray[np.bool_]:
    """Return, for each record, whether it is one with which its message was appended again."""
    result = np.zeros(len(records), bool)
    if _FIRST_ID in bytes(records.data):
        origins = records.heads["prepared_offset"].tolist()
        for at, text in enumerate(records.properties()):
            if _FIRST_ID in text:
                result[at] = first_id(text.decode("utf-8", "replace"), origins[at]) is not None
    return result


class _ReadUnits(NamedTuple):
    """The messages of units, and the units' magic numbers: 0 for a unit that stands for no message."""

    waits: Waits
    magic: NDArray[np.int32]
