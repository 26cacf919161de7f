"""An index from the id that a message's sender got to the newest record of the message.

A message that gets another time, or whose commitlog file expires while it waits, is appended again. The id that its
sender got names its first record. Each later record has that id in TIMER_FIRST_ID (`timer_properties`), and the magic
number of its unit in the timer log says that it is a later record (`timers.files.log`). At the first request with an id
that does not name a waiting record, all such units and their records are read, in slices, to find the newest record of
each message. From then on `appended` is called with each later record.

The index is complete for a record whose unit is in the timer log: the units of its message's later records lie behind
that unit, and the files of the log are removed from the oldest on.
"""

from __future__ import annotations

import contextlib
from typing import Final

import numpy as np

from duemq.protocol.errors import RemoteProtocolError
from duemq.protocol.records.message_id import parse_offset_message_id
from duemq.protocol.records.record import StoredMessage
from duemq.protocol.records.timer_properties import first_id
from duemq.protocol.topics import TIMER_TOPIC
from duemq.scheduler.timers.deliver_times import LOOK_UNITS
from duemq.scheduler.timers.enqueuer import Enqueuer
from duemq.scheduler.timers.files.log import TimerLog
from duemq.scheduler.timers.files.unit import NORMAL, UNIT_SIZE
from duemq.scheduler.timers.index.sorted_pairs import SortedPairs
from duemq.storage.log.copies import origin_of
from duemq.storage.queues.pull import ColdRead, Range
from duemq.storage.store import MessageStore

_SCAN_UNITS: Final = 8192
_NOT_BEGUN: Final = -1
_ALL: Final = 2**63 - 1


def given_id(message: StoredMessage) -> str:
    """Return the id that the sender of a waiting message got."""
    return _first(message)[0]


def first_offset(message: StoredMessage) -> int:
    """Return the physical offset of a waiting message's first record."""
    return _first(message)[1]


def _first(message: StoredMessage) -> tuple[str, int]:
    if message.topic == TIMER_TOPIC:
        found = first_id(message.properties_text, message.prepared_transaction_offset)
        with contextlib.suppress(RemoteProtocolError):
            if found is not None:
                return found, parse_offset_message_id(found)[2]
    return message.offset_message_id, message.physical_offset


class TimerIds:
    """The index from a message's first record to its newest one. Owned by the event loop's thread."""

    def __init__(self, store: MessageStore, timer_log: TimerLog, enqueuer: Enqueuer) -> None:
        self._store = store
        self._log = timer_log
        self._enqueuer = enqueuer
        self._newest = SortedPairs(lambda: store.log.begin)
        self._reached = _NOT_BEGUN
        """Position in the timer log before which all units have been looked at."""
        self._was_read = False
        """Whether a thread has read the records needed next."""

    @property
    def is_complete(self) -> bool:
        """Whether the index has all messages, as `newest` needs."""
        return self._reached == _ALL

    def newest(self, first: int) -> int | None:
        """Return the physical offset of a message's newest record, given the physical offset of its first record or of
        the record before the newest one. Return None if the given record is the newest, as far as the timer log
        reaches."""
        return self._newest.find(first)

    def appended(self, message: StoredMessage, physical_offset: int) -> None:
        """Note that a message was appended again at a physical offset. `message`: the record by which it has waited
        until now."""
        if self._reached != _NOT_BEGUN:
            self._add(first_offset(message), message.physical_offset, physical_offset)

    def _add(self, first: int, origin: int | None, newest: int) -> None:
        for offset in (first, origin):
            # Units of messages that recovery found delivered are not always in the order of their records.
            if offset is not None and offset != newest and (self._newest.find(offset) or 0) < newest:
                self._newest.add_one(offset, newest)

    def look(self, now_ms: int) -> ColdRead | None:
        """Read a part of the units, to complete the index. Return None, or a read for a thread to do before the next
        call, if this part would have to wait for the disk. Raises OSError; then the next call tries the same part
        again."""
        if self._reached == _NOT_BEGUN:
            self._reached = 0
        if self._enqueuer.behind and self._enqueuer.enqueue_next(now_ms):
            return None
        start = max(self._reached, self._log.begin)
        for position, units in self._log.scan(start, min(self._log.end, start + _SCAN_UNITS * UNIT_SIZE)):
            at = np.flatnonzero(units["magic"] & NORMAL == 0)
            behind = len(units) if len(at) <= LOOK_UNITS else int(at[LOOK_UNITS])
            ranges: list[Range] = units[at[:LOOK_UNITS]][["physical_offset", "record_size"]].tolist()
            if ranges and not self._was_read and not self._store.is_cached(ranges):
                self._was_read = True
                return ColdRead(self._store.log, sorted(ranges))
            for each in ranges:
                message = self._store.message_at(*each)
                if message is not None:
                    origin = origin_of(message.prepared_transaction_offset)
                    self._add(first_offset(message), origin, message.physical_offset)
            self._was_read = False
            self._reached = position + behind * UNIT_SIZE
            return None
        # The end of a file, or of the log, is reached.
        file_end = start - start % self._log.segment_size + self._log.segment_size
        self._reached = file_end if file_end < self._log.end else _ALL
        return None
