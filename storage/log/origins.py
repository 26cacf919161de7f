"""The scheduled messages that no longer wait, according to later records: a record that delivers or withdraws a message
names the record that scheduled it in its prepared-transaction offset (see `copies`).

Keeps invariant 14 of ARCHITECTURE.md.
"""

from __future__ import annotations

from array import array
from collections import deque
from typing import TYPE_CHECKING, Final

import numpy as np

from duemq.protocol.records.properties import (
    NAME_END,
    PROPERTY_END,
    TIMER_CRON,
    TIMER_DEL_UNIQKEY,
    TIMER_EVERY,
    TIMER_ROLL_TIMES,
    UNIQ_KEY,
    get,
)
from duemq.protocol.records.record import FLAG_TRANSACTION
from duemq.protocol.records.recurrence import FLAG_RECURS
from duemq.protocol.topics import SCHEDULE_TOPIC, TIMER_TOPIC
from duemq.storage.log.commitlog import Commitlog
from duemq.storage.log.copies import ORIGIN_ZERO, origin_of
from duemq.storage.log.scan import ScannedRecord, Scanner

if TYPE_CHECKING:
    from numpy.typing import NDArray

NO_ORIGIN: Final = -1
_SCHEDULE_TOPIC: Final = SCHEDULE_TOPIC.encode()
_TIMER_TOPIC: Final = TIMER_TOPIC.encode()
_ROLL_TIMES: Final = f"{TIMER_ROLL_TIMES}{NAME_END}".encode()
_DELETE_KEY: Final = f"{TIMER_DEL_UNIQKEY}{NAME_END}".encode()
_PROPERTY_END: Final = PROPERTY_END.encode()
_EVERY: Final = f"{TIMER_EVERY}{NAME_END}".encode()
_CRON: Final = f"{TIMER_CRON}{NAME_END}".encode()
MAX_RECURRING: Final = 32
"""Most recurring messages that one batch delivers. Computing the time of each next delivery takes some 60 us, in rare
cases 2 ms."""


def origins_of(
    prepared: NDArray[np.int64], sys_flags: NDArray[np.integer], physical_offsets: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return the origins that records may name by their prepared-transaction offsets; NO_ORIGIN where they cannot name
    one. A transaction's record names its half message instead, and a value that does not lie before the record itself
    is a deliver time. Whether a record really names an origin depends on its topic and properties as well: see
    `Origins.look`."""
    origins = np.where(prepared == ORIGIN_ZERO, 0, prepared)
    named = (prepared != 0) & (origins >= 0) & (origins < physical_offsets) & (sys_flags & FLAG_TRANSACTION == 0)
    return np.where(named, origins, NO_ORIGIN)


class Origins:
    """The physical offsets of the scheduled records that later records name."""

    def __init__(self) -> None:
        self.delivered = array("q")
        """Origins whose messages were delivered."""
        self.withdrawn = array("q")
        """Origins whose messages were cancelled, or appended once more to wait on."""
        self.withdrawn_by = array("q")
        """Physical offsets of the records that withdrew the messages, in the order of `withdrawn`."""
        self.newest_ms = 0
        """The latest store time of the records that delivered messages, ms since the epoch."""
        self.last_recurring: deque[ScannedRecord] = deque(maxlen=MAX_RECURRING)
        """The records at the end of the commitlog that deliver or drop recurring messages. After a power cut only the
        first part of the batch that appended them may be left, without the records that wait for the next
        deliveries."""
        self.recurring_keys: set[str] = set()
        """The UNIQ_KEYs of the records that wait for deliveries of recurring messages."""

    def look(self, record: ScannedRecord) -> None:
        """Note the origin that a record names, if it names one. In scheduled records the prepared-transaction offset is
        the deliver time, unless they are of the timer topic and delete another message or put it into a later slot
        (roll)."""
        prepared = record.prepared_transaction_offset
        if record.sys_flag & FLAG_RECURS or self.last_recurring:
            self._look_for_recurring(record)
        if not prepared or record.topic == _SCHEDULE_TOPIC:
            return
        origin = origin_of(prepared)
        if origin is None or not 0 <= origin < record.physical_offset or record.sys_flag & FLAG_TRANSACTION:
            return  # the same rule as in `origins_of`
        if record.topic != _TIMER_TOPIC:
            self.delivered.append(origin)
            if _has(record.properties, _EVERY) or _has(record.properties, _CRON):
                self.last_recurring.append(record)
            self.newest_ms = max(self.newest_ms, record.store_timestamp)
        elif _ROLL_TIMES in record.properties or _DELETE_KEY in record.properties:
            self.withdrawn.append(origin)
            self.withdrawn_by.append(record.physical_offset)

    def _look_for_recurring(self, record: ScannedRecord) -> None:
        """Note a record that waits for the next delivery of a recurring message, or that drops such a message; at a
        record that is not of the same batch, forget the deliveries before it."""
        if record.topic != _TIMER_TOPIC:
            if not record.prepared_transaction_offset:
                self.last_recurring.clear()
        elif not record.sys_flag & FLAG_RECURS:
            self.last_recurring.clear()
        elif _DELETE_KEY in record.properties:
            self.last_recurring.append(record)
        else:
            key = get(record.properties.decode("utf-8", "replace"), UNIQ_KEY)
            self.recurring_keys.add(key or "")

    def withdrawn_since(self, physical_offset: int) -> NDArray[np.int64]:
        """Return the entries of `withdrawn` whose messages were withdrawn by a record at or behind a physical
        offset."""
        by = np.frombuffer(self.withdrawn_by, np.int64)
        return np.frombuffer(self.withdrawn, np.int64)[by >= physical_offset]

    def read(self, log: Commitlog, start: int, end: int) -> None:
        """Note the origins that the records between two physical offsets name. May wait for the disk."""
        if start >= end:
            return
        for record in Scanner(log, start):
            if record.physical_offset >= end:
                return
            self.look(record)


def _has(text: bytes, name: bytes) -> bool:
    """Whether properties include one with this name. `name` ends with NAME_END."""
    return name in text and (text.startswith(name) or _PROPERTY_END + name in text)
