"""The role of each record: a message, a message that waits for its time, the delivery of one, a half message, ...

    in the topic                 with                                 the record is
    SCHEDULE_TOPIC_XXXX          DELAY, REAL_TOPIC                    LEVEL: waits for a delay level
    rmq_sys_wheel_timer          TIMER_OUT_MS, REAL_TOPIC             TIMER: waits in the timer wheel
    rmq_sys_wheel_timer          TIMER_DEL_UNIQKEY                    CANCEL: withdraws a waiting message
    RMQ_SYS_TRANS_HALF_TOPIC                                          HALF: a transaction that was begun
    RMQ_SYS_TRANS_OP_HALF_TOPIC                                       HALF_END: half messages that were ended
    any other                    an origin, or REAL_TOPIC itself      DELIVERY: of a message that waited
    any other                                                         MESSAGE

duemq names the origin of a delivery, of a cancellation and of a message that waits once more in the
prepared-transaction offset (`storage.log.copies`). RocketMQ does not: there a delivery is recognised by the unique key,
the real topic and queue, the producer's time and the number of retries, none of which the broker changes; `key_hash` is
a hash of these.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa

from duemq.protocol.records.record import FLAG_TRANSACTION, TRANSACTION_COMMIT
from duemq.protocol.records.timer_properties import MAX_DELIVER_AHEAD_MS, PRECISION_MS
from duemq.protocol.topics import HALF_TOPIC, OP_HALF_TOPIC, SCHEDULE_TOPIC, TIMER_TOPIC
from duemq.spark_jobs.columns.hashes import hash_ints
from duemq.storage.log.origins import NO_ORIGIN, origins_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from duemq.spark_jobs.columns.records import Records

    Integers = NDArray[np.int64]
    Flags = NDArray[np.bool_]

MESSAGE: Final = 0
LEVEL: Final = 1
TIMER: Final = 2
CANCEL: Final = 3
DELIVERY: Final = 4
HALF: Final = 5
HALF_END: Final = 6
NAMES: Final = ("message", "level", "timer", "cancel", "delivery", "half", "half_end")

_BY_TOPIC: Final = {SCHEDULE_TOPIC: LEVEL, TIMER_TOPIC: TIMER, HALF_TOPIC: HALF, OP_HALF_TOPIC: HALF_END}


class Roles:
    """The roles of n records; all columns are arrays of n. Times are ms since the epoch."""

    def __init__(self, records: Records) -> None:
        self._records = records

    @cached_property
    def role(self) -> NDArray[np.int8]:
        """MESSAGE, LEVEL, ..."""
        records = self._records
        codes, names = records.topics()
        role = np.array([_BY_TOPIC.get(name, MESSAGE) for name in names] or [MESSAGE], np.int8)[codes]
        timers = role == TIMER
        if timers.any():
            role[timers & (records.property("TIMER_DEL_UNIQKEY")[0] >= 0)] = CANCEL
        plain = role == MESSAGE
        if plain.any():
            role[plain & ((self._origin != NO_ORIGIN) | self._looks_delivered)] = DELIVERY
        return role

    @cached_property
    def _origin(self) -> Integers:
        """The origin that the prepared-transaction offset would name, computed for every record."""
        records = self._records
        return origins_of(records.prepared_offset, records.sys_flag, records.physical_offset)

    @cached_property
    def _looks_delivered(self) -> Flags:
        """Whether a record is in its real topic after it waited. Records of committed transactions look like this too;
        they waited in the half topic only, unless a property says that they were scheduled as well."""
        records = self._records
        is_commit = records.sys_flag & FLAG_TRANSACTION == TRANSACTION_COMMIT
        found = self._is_of_real_topic
        if (found & is_commit).any():
            level, has_level = records.property_ints("DELAY")
            found &= ~is_commit | (has_level & (level > 0)) | (records.property("TIMER_OUT_MS")[0] >= 0)
        return found

    @cached_property
    def _is_of_real_topic(self) -> Flags:
        records = self._records
        at, size = records.property("REAL_TOPIC")
        same: Flags = (at >= 0) & (size == records.topic_size)
        if same.any():
            same &= records.texts.hashes("REAL_TOPIC") == records.topic_hashes
        return same

    @cached_property
    def is_scheduled(self) -> Flags:
        """Whether the record waits, or waited, for its time."""
        scheduled: Flags = (self.role == LEVEL) | (self.role == TIMER)
        return scheduled

    @cached_property
    def is_again(self) -> Flags:
        """Whether the record is in the timer topic and waits in place of another: rolled, or given another time."""
        timers: Flags = self.role == TIMER
        if timers.any():
            timers = timers & (self._records.property("TIMER_ROLL_TIMES")[0] >= 0)
        return timers

    @cached_property
    def origin(self) -> Integers:
        """The physical offset of the origin that a delivery, a cancellation or a record that waits once more names;
        NO_ORIGIN where none is named."""
        names_one = (self.role == DELIVERY) | (self.role == CANCEL) | self.is_again
        return np.where(names_one, self._origin, NO_ORIGIN)

    @cached_property
    def level(self) -> Integers:
        """The delay level; 0 where there is none."""
        return np.where(self.role == LEVEL, self._records.queue_id + 1, 0)

    @cached_property
    def slot_second(self) -> Integers:
        """The second (since the epoch) in whose slot a message waits, by its record; 0 where there is none."""
        if not ((self.role == TIMER) | (self.role == CANCEL)).any():
            return np.zeros(len(self._records), np.int64)
        out, present = self._records.property_ints("TIMER_OUT_MS")
        return np.where(present, out // PRECISION_MS, 0)

    def due_ms(self, delays_ms: Integers) -> Integers:
        """Return when waiting messages are due; 0 for other records. `delays_ms`: those of the delay levels, from level
        1 on.

        Exact for duemq's own records, and where a property tells the time; else by the store time and the delay; else
        by the end of the slot (see `protocol.records.timer_properties`)."""
        records = self._records
        stored, promise = records.store_ms, records.prepared_offset
        due = np.zeros(len(records), np.int64)
        promised = self.is_scheduled & ~self.is_again & (promise >= stored) & (promise <= stored + MAX_DELIVER_AHEAD_MS)
        levels = (self.role == LEVEL) & ~promised
        if levels.any():
            level = np.clip(self.level, 1, len(delays_ms))
            due = np.where(levels, stored + delays_ms[level - 1], due)
        timers = (self.role == TIMER) & ~promised
        if timers.any():
            due = np.where(timers, self._timer_due(), due)
        return np.where(promised, promise, due)

    def _timer_due(self) -> Integers:
        records = self._records
        latest = (self.slot_second + 1) * PRECISION_MS
        asked = np.zeros(len(records), np.int64)
        # A later property in this list takes precedence.
        for name, factor in (("TIMER_DELIVER_MS", 0), ("TIMER_DELAY_MS", 1), ("TIMER_DELAY_SEC", 1000)):
            values, present = records.property_ints(name)
            asked = np.where(present, records.store_ms + values * factor if factor else values, asked)
        return np.where((asked > latest - PRECISION_MS) & (asked <= latest), asked, latest)

    @cached_property
    def message_hash(self) -> Integers:
        """A 63-bit hash of real topic and unique key; without a unique key, of the body's checksum and size and the
        flag instead."""
        records = self._records
        has_key = records.property("UNIQ_KEY")[0] >= 0
        name = records.texts.hashes("UNIQ_KEY")
        if not has_key.all():
            name = np.where(has_key, name, hash_ints(records.body_crc, records.body_size, records.flag))
        is_real = records.property("REAL_TOPIC")[0] >= 0
        topic = records.texts.hashes("REAL_TOPIC")
        if not is_real.all():
            topic = np.where(is_real, topic, records.topic_hashes)
        return hash_ints(topic, name)

    @cached_property
    def key_hash(self) -> Integers:
        """A 63-bit hash of what a waiting message and its delivery have in common: `message_hash`, real queue,
        producer's time and retries."""
        records = self._records
        queue, has_queue = records.property_ints("REAL_QID")
        queue = np.where(has_queue, queue, records.queue_id)
        return hash_ints(self.message_hash, queue, records.born_ms, records.reconsume_times)

    def real_topics(self) -> pa.StringArray:
        """Return the topic that a message is for: REAL_TOPIC while it waits, else its own."""
        import pyarrow.compute as pc

        codes, names = self._records.topics()
        own = pa.DictionaryArray.from_arrays(pa.array(codes), pa.array(names, pa.string())).cast(pa.string())
        waits = pa.array(np.isin(self.role, (LEVEL, TIMER, CANCEL, HALF)))
        return pc.if_else(waits, pc.coalesce(self._records.property_strings("REAL_TOPIC"), own), own)

    def real_queues(self) -> Integers:
        """Return the queue that a message is for: REAL_QID while it waits, else its own."""
        queue, has_queue = self._records.property_ints("REAL_QID")
        waits = np.isin(self.role, (LEVEL, TIMER, CANCEL, HALF)) & has_queue
        return np.where(waits, queue, self._records.queue_id)
