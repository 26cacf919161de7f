"""Which scheduled messages are done, as later records tell: a record that delivers a message, or takes it back, names
the one that scheduled it in its prepared-transaction offset (see `copies`)."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Final

import numpy as np

from duemq.protocol.records.properties import NAME_END, TIMER_DEL_UNIQKEY, TIMER_ROLL_TIMES
from duemq.protocol.records.record import FLAG_TRANSACTION
from duemq.storage.log.commitlog import Commitlog
from duemq.storage.log.copies import ORIGIN_ZERO, origin_of
from duemq.storage.log.scan import ScannedRecord, Scanner
from duemq.storage.queues.consume_queue import SCHEDULE_TOPIC, TIMER_TOPIC

if TYPE_CHECKING:
    from numpy.typing import NDArray

NO_ORIGIN: Final = -1
_SCHEDULE_TOPIC: Final = SCHEDULE_TOPIC.encode()
_TIMER_TOPIC: Final = TIMER_TOPIC.encode()
_ROLL_TIMES: Final = f"{TIMER_ROLL_TIMES}{NAME_END}".encode()
_DELETE_KEY: Final = f"{TIMER_DEL_UNIQKEY}{NAME_END}".encode()


def origins_of(
    prepared: NDArray[np.int64], sys_flags: NDArray[np.integer], physical_offsets: NDArray[np.int64]
) -> NDArray[np.int64]:
    """The origins that records would name by their prepared-transaction offsets, NO_ORIGIN where they name none: a
    transaction's record names its half message, and what is not before the record is a deliver time. Whether a record
    is one that names an origin its topic and properties say, see `Origins.look`."""
    origins = np.where(prepared == ORIGIN_ZERO, 0, prepared)
    named = (prepared != 0) & (origins >= 0) & (origins < physical_offsets) & (sys_flags & FLAG_TRANSACTION == 0)
    return np.where(named, origins, NO_ORIGIN)


class Origins:
    """Physical offsets of scheduled records."""

    def __init__(self) -> None:
        self.delivered = array("q")
        """Their messages were delivered."""
        self.withdrawn = array("q")
        """Their messages were cancelled, or appended once more to wait on..."""
        self.withdrawn_by = array("q")
        """...by the records that lie there."""
        self.newest_ms = 0
        """The latest store time of the records that delivered them, ms since the epoch."""

    def look(self, record: ScannedRecord) -> None:
        """Take the origin that a record names, if it names one. Records that are scheduled have their deliver time
        in that field, unless they are of the timer topic and say that they delete or repeat another."""
        prepared = record.prepared_transaction_offset
        if not prepared or record.topic == _SCHEDULE_TOPIC:
            return
        origin = origin_of(prepared)
        if origin is None or not 0 <= origin < record.physical_offset or record.sys_flag & FLAG_TRANSACTION:
            return  # as `origins_of` has it
        if record.topic != _TIMER_TOPIC:
            self.delivered.append(origin)
            self.newest_ms = max(self.newest_ms, record.store_timestamp)
        elif _ROLL_TIMES in record.properties or _DELETE_KEY in record.properties:
            self.withdrawn.append(origin)
            self.withdrawn_by.append(record.physical_offset)

    def withdrawn_since(self, position: int) -> NDArray[np.int64]:
        """Those of `withdrawn` whose messages were taken back by a record at a physical offset or behind."""
        by = np.frombuffer(self.withdrawn_by, np.int64)
        return np.frombuffer(self.withdrawn, np.int64)[by >= position]

    def read(self, log: Commitlog, start: int, end: int) -> None:
        """Take those of the records between two physical offsets. May wait for the disk."""
        if start >= end:
            return
        for record in Scanner(log, start):
            if record.physical_offset >= end:
                return
            self.look(record)
