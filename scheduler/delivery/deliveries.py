"""Finds the scheduled messages that are done, from the commitlog alone, even if RocketMQ's broker wrote it.

Deliveries of duemq name their origin, the record that waited (`storage.log.origins`). RocketMQ's deliveries do not. But
its broker copies a waiting message as it is: a delivery has the real topic and queue, the unique key, the producer's
time and the number of retries of the record that waited, and lies behind it. These fields together are the key by which
the two are matched: the first record that still waits under a key belongs to the next delivery with that key. A
delivery without a match is a repeated one, or a message that an application received and sent on.

    record                                                          effect
    of any other topic, with REAL_TOPIC of that name, and a         delivers the message that has its key
    level (DELAY) or a slot of the timer wheel (TIMER_OUT_MS)
    of the timer topic, with TIMER_ROLL_TIMES                       replaces the message that has its key
    of the timer topic, with TIMER_DEL_UNIQKEY                      cancels the message of this real topic and unique
                                                                    key in the slot of TIMER_OUT_MS

Memory: 16 bytes for each message that waits at a time, and 8 for each that is done.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

import numpy as np

from duemq.protocol.records import properties
from duemq.protocol.records.properties import NAME_END
from duemq.protocol.records.record import FLAG_TRANSACTION, TRANSACTION_COMMIT, TRANSACTION_NONE, head_for
from duemq.protocol.records.timer_properties import PRECISION_MS, deleted_message
from duemq.protocol.topics import SCHEDULE_TOPIC, TIMER_TOPIC
from duemq.scheduler.timers.index.sorted_offsets import is_among, union
from duemq.storage.log.commitlog import Commitlog
from duemq.storage.log.origins import Origins
from duemq.storage.log.scan import ScannedRecord, read_record

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Integers = NDArray[np.int64]

_SCHEDULE_TOPIC: Final = SCHEDULE_TOPIC.encode()
_TIMER_TOPIC: Final = TIMER_TOPIC.encode()
_REAL_TOPIC: Final = f"{properties.REAL_TOPIC}{NAME_END}".encode()
_REAL, _REAL_QID, _UNIQ_KEY, _DELAY, _OUT_MS = (
    name.encode()
    for name in (
        properties.REAL_TOPIC,
        properties.REAL_QID,
        properties.UNIQ_KEY,
        properties.DELAY,
        properties.TIMER_OUT_MS,
    )
)
_READ_PROPERTIES: Final = re.compile(
    rb"(?:^|\x02)(" + b"|".join((_REAL, _REAL_QID, _UNIQ_KEY, _DELAY, _OUT_MS)) + rb")\x01([^\x02]+)"
)
_DELETE_KEY: Final = f"{properties.TIMER_DEL_UNIQKEY}{NAME_END}".encode()
_ROLL_TIMES: Final = f"{properties.TIMER_ROLL_TIMES}{NAME_END}".encode()
_BATCH: Final = 1 << 16
"""Number of events that are matched at a time."""


class Deliveries(Origins):
    """Finds the messages that are done by looking at the records of a whole commitlog in their order; after the last
    one, call `finish`. The messages that are done are then in `delivered` and `withdrawn`. Messages that RocketMQ
    rolled or cancelled, and its cancelling records, are in `delivered`, since none of them is to be put into the
    wheel."""

    def __init__(self, log: Commitlog) -> None:
        super().__init__()
        self._log = log
        self._waits_keys = np.empty(0, np.int64)
        self._waits_at = np.empty(0, np.int64)
        """Physical offsets of the waiting messages' records. `_waits_keys` has the hashes of their keys, ascending, in
        the same order."""
        self._keys, self._at = array("q"), array("q")
        """The events since the last match: the hash of the key (`_keys`), and twice the physical offset, plus 1 if a
        message begins to wait (`_at`)."""
        self._named = 0, 0
        """Number of entries of `delivered` and of `withdrawn` that were already removed from the waiting messages."""
        self._deletes = array("q")
        """Physical offsets of records that cancel and name no origin."""

    def look(self, record: ScannedRecord) -> None:
        """Note which message a record delivers or moves. May wait for the disk. Raises OSError."""
        if record.topic == _SCHEDULE_TOPIC:
            self._event(record, _properties(record), waits=True)
            return
        text = record.properties
        is_timer = record.topic == _TIMER_TOPIC
        is_named = False
        if record.prepared_transaction_offset:
            before = len(self.delivered) + len(self.withdrawn)
            super().look(record)
            is_named = len(self.delivered) + len(self.withdrawn) != before
        if not is_timer:
            if not is_named and _REAL_TOPIC in text:
                found = _properties(record)
                if _looks_delivered(record, found):
                    self._event(record, found, waits=False)
                    self.newest_ms = max(self.newest_ms, record.store_timestamp)
        elif _DELETE_KEY in text:
            if not is_named:
                self._deletes.append(record.physical_offset)
        else:
            found = _properties(record)
            if _ROLL_TIMES in text and not is_named:
                self._event(record, found, waits=False)
            self._event(record, found, waits=True)

    def _event(self, record: ScannedRecord, found: Mapping[bytes, bytes], *, waits: bool) -> None:
        unique = found.get(_UNIQ_KEY) or self._body(record)
        key = found.get(_REAL), found.get(_REAL_QID), unique, record.born_timestamp, record.reconsume_times
        self._keys.append(hash(key))
        self._at.append(record.physical_offset << 1 | waits)
        if len(self._keys) >= _BATCH:
            self._match()

    def _body(self, record: ScannedRecord) -> tuple[int, int, int]:
        """Return a substitute for a missing unique key: the body's checksum and size, and the record's flag. Reads the
        record's head."""
        layout = head_for(record.sys_flag)
        head = layout.unpack(self._log.read_raw(record.physical_offset, layout.size))
        return head[2], head[14], head[4]

    def finish(self) -> None:
        """Match the remaining events, and apply RocketMQ's cancellations. May wait for the disk."""
        self._match()
        self._cancel()

    # --- matching

    def _match(self) -> None:
        keys = np.frombuffer(self._keys, np.int64) if self._keys else np.empty(0, np.int64)
        at = np.frombuffer(self._at, np.int64) if self._at else np.empty(0, np.int64)
        waiting_keys = np.concatenate([self._waits_keys, keys[at & 1 == 1]])
        waiting_at = np.concatenate([self._waits_at, at[at & 1 == 1] >> 1])
        ends_keys, ends_at = keys[at & 1 == 0], at[at & 1 == 0] >> 1
        # Messages that later records name as their origins are removed first; that needs no key.
        named = self._newly_named()
        if len(named):
            left = ~is_among(waiting_at, named)
            waiting_keys, waiting_at = waiting_keys[left], waiting_at[left]
        order = np.lexsort((waiting_at, waiting_keys))
        waiting_keys, waiting_at = waiting_keys[order], waiting_at[order]
        if len(ends_keys) and len(waiting_keys):
            is_done = _matched(waiting_keys, waiting_at, ends_keys, ends_at)
            self.delivered.frombytes(np.sort(waiting_at[is_done]).astype(np.int64).tobytes())
            self._named = len(self.delivered), len(self.withdrawn)
            waiting_keys, waiting_at = waiting_keys[~is_done], waiting_at[~is_done]
        self._waits_keys, self._waits_at = waiting_keys, waiting_at
        self._keys, self._at = array("q"), array("q")

    def _newly_named(self) -> Integers:
        delivered, withdrawn = self._named
        self._named = len(self.delivered), len(self.withdrawn)
        return union([self.delivered[delivered:], self.withdrawn[withdrawn:]])

    # --- RocketMQ's cancellations

    def _cancel(self) -> None:
        """Apply the records that cancel without an origin: each cancels only messages in its own slot."""
        named = set[tuple[tuple[str, str], int]]()
        for physical in self._deletes:
            record = read_record(self._log, physical, check_crc=False)
            if record is not None:
                text = record.properties.decode("utf-8", "replace")
                if (message := deleted_message(text)) is not None:
                    named.add((message, _slot(text)))
        found = array("q")
        for physical in np.sort(self._waits_at).tolist() if named else ():
            record = read_record(self._log, physical, check_crc=False)
            if record is None or record.topic != _TIMER_TOPIC:
                continue
            text = record.properties.decode("utf-8", "replace")
            topic, unique = properties.get(text, properties.REAL_TOPIC), properties.get(text, properties.UNIQ_KEY)
            if topic is not None and unique is not None and ((topic, unique), _slot(text)) in named:
                found.append(physical)
        self.delivered += found + self._deletes
        self._deletes = array("q")
        if found:
            left = ~is_among(self._waits_at, union([found]))
            self._waits_keys, self._waits_at = self._waits_keys[left], self._waits_at[left]


def _properties(record: ScannedRecord) -> dict[bytes, bytes]:
    """Return the properties of a record that are needed here. If one occurs twice, the last counts, as in RocketMQ."""
    return dict(_READ_PROPERTIES.findall(record.properties))


def _looks_delivered(record: ScannedRecord, found: Mapping[bytes, bytes]) -> bool:
    """Whether a record looks like a delivery: it is in its real topic, and has a level or a slot of the wheel."""
    if record.sys_flag & FLAG_TRANSACTION not in (TRANSACTION_NONE, TRANSACTION_COMMIT):
        return False
    return found.get(_REAL) == record.topic and (_DELAY in found or _OUT_MS in found)


def _slot(text: str) -> int:
    value = properties.get(text, properties.TIMER_OUT_MS) or ""
    return int(value) // PRECISION_MS if value.isascii() and value.isdecimal() else -1


def _matched(waiting_keys: Integers, waiting_at: Integers, ends_keys: Integers, ends_at: Integers) -> NDArray[np.bool_]:
    """Return, for each waiting message, in the order of keys and then of offsets, whether a record that has its key and
    lies behind it ends its waiting. Each such record ends the waiting of one message."""
    order = np.lexsort((ends_at, ends_keys))
    ends_keys, ends_at = ends_keys[order], ends_at[order]
    first = np.searchsorted(ends_keys, waiting_keys, "left")
    last = np.searchsorted(ends_keys, waiting_keys, "right")
    is_alone = np.ones(len(waiting_keys), bool)
    is_alone[1:] &= waiting_keys[1:] != waiting_keys[:-1]
    is_alone[:-1] &= waiting_keys[1:] != waiting_keys[:-1]
    # If any record with the key lies behind the message, the last one does. A replacing record does not end itself.
    newest = ends_at[np.maximum(last, 1) - 1]
    done: NDArray[np.bool_] = (last > first) & is_alone & (newest > waiting_at)
    at = np.flatnonzero((last > first) & ~is_alone)
    for group in np.split(at, np.flatnonzero(np.diff(waiting_keys[at])) + 1) if len(at) else ():
        following = ends_at[first[group[0]] : last[group[0]]].tolist()
        waiting = group.tolist()
        for end in following:
            if waiting and waiting_at[waiting[0]] < end:
                done[waiting.pop(0)] = True
    return done
