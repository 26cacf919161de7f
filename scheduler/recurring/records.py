"""Recurring messages: when one is delivered or dropped, the record for its next delivery is staged in the same batch.

The delivered copy names the record that it delivers, and the next record is a message of the timer topic's queue like
any other. After a power cut only the first part of the last batch may be left, with a delivery but without the next
record, which the start then makes (`left_out`). So there is always exactly one waiting record.

Keeps invariant 35 of ARCHITECTURE.md.

See `protocol.records.recurrence` for the properties, and `recurring.times` for the times.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import Final

import structlog

from duemq.protocol.errors import TimerIllegal
from duemq.protocol.records import checksum, properties, recurrence
from duemq.protocol.records.record import StoredMessage
from duemq.protocol.records.recurrence import FLAG_RECURS, RecurrenceRule
from duemq.protocol.records.timer_properties import MAX_MS, out_ms
from duemq.protocol.topics import TIMER_TOPIC
from duemq.scheduler.delivery.moves import Moves
from duemq.scheduler.recurring.times import next_ms
from duemq.scheduler.timers.config import OVERDUE_MS
from duemq.scheduler.timers.index.keys import key_of
from duemq.scheduler.timers.policy.policies import TimerPolicy
from duemq.scheduler.timers.topics import TimerTopics
from duemq.storage.log.copies import origin_of
from duemq.storage.log.origins import Origins
from duemq.storage.queues.consume_queue import ConsumeQueue
from duemq.storage.store import MessageStore

log = structlog.get_logger(__name__)

PAUSED_MS: Final = 10 * 366 * 86_400_000
"""How far ahead a paused message waits, in ms: the most that any message may."""
_REPLACED: Final = (
    checksum.NAME,
    *properties.TIMERS,
    *properties.TIMER_STATE,
    properties.TIMER_COUNT,
    properties.TIMER_PAUSED,
    properties.UNIQ_KEY,
    properties.REAL_TOPIC,
    properties.REAL_QID,
)


def is_recurring(message: StoredMessage) -> bool:
    """Whether a waiting record is that of a recurring message."""
    return bool(message.sys_flag & FLAG_RECURS)


class Recurring:
    """Stages the next records of recurring messages."""

    def __init__(
        self,
        store: MessageStore,
        queue: ConsumeQueue,
        topics: TimerTopics,
        *,
        policy_of: Callable[[str], TimerPolicy | None],
        expect: Callable[[int], None],
        moves: Moves,
        is_deleted: Callable[[str], bool],
    ) -> None:
        """`queue`: the timer topic's. `policy_of`: returns a topic's policy, which decides about missed deliveries.
        `expect`: called with the deliver time, ms since the epoch, of each record before it is staged. `moves`: tells
        searches in progress about the records. `is_deleted`: returns whether a topic was deleted, which ends its
        messages."""
        self._appender = store.appender
        self._queue = queue
        self._topics = topics
        self._policy_of = policy_of
        self._expect = expect
        self._moves = moves
        self._is_deleted = is_deleted

    def stage_next(self, message: StoredMessage, now_ms: int) -> None:
        """Stage the record for the delivery after the one for which `message` waited; nothing if that was the last one.
        Call `Appender.begin` before, and `commit` after. Stages nothing but logs an error if the topic was deleted, or
        if the properties have become invalid, for example because this machine does not know the time zone. Raises
        StoreError."""
        text = message.properties_text
        topic = properties.get(text, properties.REAL_TOPIC) or ""
        try:
            found = recurrence.read(text)
            due_ms = self._following(found, _due_of(message), topic, now_ms)
        except TimerIllegal as error:
            _log_end(text, topic, str(error))
            return
        if due_ms is None or found.left == 1:
            return
        if self._is_deleted(topic):
            # It would be delivered forever to queues that nobody can read.
            _log_end(text, topic, "the topic was deleted")
            return
        stored_ms = self._appender.begin(now_ms)
        # A missed delivery goes through the wheel as well, and is due immediately there.
        waits_ms = max(due_ms, stored_ms)
        added = {
            properties.TIMER_COUNT: str(found.left - 1) if found.left is not None else "",
            properties.UNIQ_KEY: _next_unique_key(text),
            properties.TIMER_DELIVER_MS: str(due_ms),
            properties.TIMER_OUT_MS: str(out_ms(waits_ms)),
            properties.REAL_TOPIC: topic,
            properties.REAL_QID: properties.get(text, properties.REAL_QID) or "0",
        }
        kept = properties.without_all(text, _REPLACED).rstrip(properties.PROPERTY_END)
        self._expect(waits_ms)
        offset = self._appender.add(
            self._queue,
            message.body,
            f"{kept}{properties.PROPERTY_END}{properties.format_properties(added)}".encode(),
            waits_ms,
            message.born_timestamp,
            message.born_host,
            message.flag,
            message.sys_flag | FLAG_RECURS,
            message.reconsume_times,
            waits_ms,
        )
        self._topics.staged(offset, topic, key_of(text))
        self._moves.add(message, None, self._appender.last_physical_offset, waits_ms)

    def _following(self, found: RecurrenceRule, due_ms: int, topic: str, now_ms: int) -> int | None:
        """Return the time of the delivery after the one at `due_ms`; None if there is none. Times are ms since the
        epoch. The topic's policy for catching up decides which deliveries that were missed while the broker was down
        are still made. Raises TimerIllegal."""
        after_ms, policy = due_ms, self._policy_of(topic)
        if policy is not None and now_ms - due_ms > OVERDUE_MS:
            if policy.newest:
                after_ms = max(due_ms, now_ms)
            elif policy.drop_after_ms:
                after_ms = max(due_ms, now_ms - max(policy.drop_after_ms, OVERDUE_MS) - 1)
        return next_ms(found, after_ms)


def _log_end(text: str, topic: str, reason: str) -> None:
    log.error("recurring_message_ended", topic=topic, name=properties.get(text, properties.KEYS), reason=reason)


def _due_of(message: StoredMessage) -> int:
    """Return the time of the delivery for which a record waits, ms since the epoch."""
    value = properties.get(message.properties_text, properties.TIMER_DELIVER_MS) or ""
    is_time = value.isascii() and value.isdecimal() and len(value) <= 16 and int(value) <= MAX_MS
    return int(value) if is_time else message.store_timestamp


def _next_unique_key(text: str) -> str:
    """Return the UNIQ_KEY of the record that follows the one with these properties: each delivery is a message of its
    own, and by this key a start recognizes whether a delivery has its next record. It is a hash of several properties,
    since senders may give several messages the same UNIQ_KEY."""
    names = (properties.UNIQ_KEY, properties.REAL_TOPIC, properties.KEYS, properties.TIMER_DELIVER_MS)
    parts = "\0".join(properties.get(text, name) or "" for name in names)
    return hashlib.blake2b(parts.encode("utf-8", "replace"), digest_size=16).hexdigest().upper()


def left_out(origins: Origins, noted: Iterable[int], message_at: Callable[[int], StoredMessage | None]) -> list[int]:
    """Return the physical offsets, ascending, of the records of recurring messages that were delivered or dropped and
    have no next record, which may be because there is none. These are records that are named at the end of the
    commitlog, or that an earlier start `noted`. `message_at`: returns the record at a physical offset, None without
    one. Raises OSError."""
    named = {origin_of(each.prepared_transaction_offset) for each in origins.last_recurring}
    found = []
    for physical_offset in sorted({each for each in named if each is not None} | set(noted)):
        message = message_at(physical_offset)
        if message is None or message.topic != TIMER_TOPIC or not is_recurring(message):
            continue  # made by a client
        if _next_unique_key(message.properties_text) not in origins.recurring_keys:
            found.append(physical_offset)
    return found
