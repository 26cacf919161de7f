"""The records that the timers append to their own topic: records that delete a message, and messages that are appended
again."""

from __future__ import annotations

from typing import Final

from duemq.protocol.records import checksum, properties, timer_properties
from duemq.protocol.records.record import StoredMessage
from duemq.protocol.records.recurrence import FLAG_RECURS
from duemq.protocol.topics import SCHEDULE_TOPIC
from duemq.scheduler.timers.index.ids import given_id
from duemq.scheduler.timers.index.keys import key_of
from duemq.scheduler.timers.topics import TimerTopics
from duemq.storage.log.copies import ORIGIN_ZERO
from duemq.storage.queues.consume_queue import ConsumeQueue
from duemq.storage.store import MessageStore

_REPLACED: Final = (
    checksum.NAME,
    properties.DELAY,
    *properties.TIMERS,
    properties.TIMER_OUT_MS,
    properties.TIMER_ROLL_TIMES,
    properties.TIMER_FIRST_ID,
    properties.TIMER_FROM_LEVEL,
    properties.TIMER_PAUSED,
    properties.REAL_TOPIC,
    properties.REAL_QID,
)
"""Properties that get new values, or are removed, when a message is appended again."""
_SPARED: Final = (
    properties.TIMER_FIRST_ID,
    properties.CLUSTER,
    properties.TRACE_ON,
    properties.MSG_REGION,
    properties.ORIGIN_MESSAGE_ID,
    properties.TIMER_DELIVER_MS,
    properties.TIMER_FROM_LEVEL,
)
"""Properties that a message appended again loses, one after the other, as long as its properties are too long. Brokers
added all of them. Every waiting message must fit: if one did not, no commitlog file before it could expire."""
_DELETE_BODY: Final = b"0"
_DELETE_TAG: Final = "_RECALL_TAG_"


class TimerRecords:
    """Appends records to the queue of the timer topic. Each names, as its origin, the record that it replaces."""

    def __init__(self, store: MessageStore, queue: ConsumeQueue, topics: TimerTopics) -> None:
        self._appender = store.appender
        self._queue = queue
        self._topics = topics

    def delete(self, message: StoredMessage, due_ms: int, now_ms: int) -> None:
        """Append a record that deletes a message due at `due_ms`. Apache's broker finds the message by topic and unique
        key, in the slot of that time; recovery finds it by its origin. Times are ms since the epoch. Raises
        StoreError."""
        try:
            self.stage_deletion(message, due_ms, now_ms)
            self._appender.commit()
        except BaseException:
            self._appender.roll_back()
            raise

    def stage_deletion(self, message: StoredMessage, due_ms: int, now_ms: int, *, is_followed: bool = False) -> None:
        """Stage the record of `delete`: the caller's `Appender.commit` writes the record. `is_followed`: whether the
        message recurs and continues with a further record in the same batch."""
        text = message.properties_text
        topic = properties.get(text, properties.REAL_TOPIC) or ""
        key = properties.get(text, properties.UNIQ_KEY) or ""
        mark = {
            properties.TIMER_DEL_UNIQKEY: f"{topic}+{key}",
            properties.UNIQ_KEY: key,
            properties.TAGS: _DELETE_TAG,
            properties.TIMER_OUT_MS: str(timer_properties.out_ms(due_ms)),
            properties.REAL_TOPIC: topic,
            properties.REAL_QID: "0",
        }
        appender = self._appender
        stored_ms = appender.begin(now_ms)
        offset = appender.add(
            self._queue,
            _DELETE_BODY,
            properties.format_properties(mark).encode(),
            properties.tags_code(_DELETE_TAG),
            stored_ms,
            appender.store_host,
            sys_flag=FLAG_RECURS if is_followed else 0,
            prepared_transaction_offset=message.physical_offset or ORIGIN_ZERO,
        )
        self._topics.staged(offset, topic)

    def again(
        self,
        message: StoredMessage,
        due_ms: int,
        now_ms: int,
        *,
        is_as_promised: bool = False,
        is_paused: bool = False,
    ) -> int:
        """Append a waiting message again, to wait in the wheel until `due_ms`. Return the physical offset of the new
        record. `is_as_promised`: whether that is the time that was promised to its sender, by a delay level if it has
        one. `is_paused`: whether this is a recurring message that is paused from now on. Times are ms since the epoch.
        Raises StoreError."""
        before, origin = message.properties_text, message.physical_offset
        topic = properties.get(before, properties.REAL_TOPIC) or ""
        times = properties.get(before, properties.TIMER_ROLL_TIMES) or "0"
        level = properties.get(before, properties.TIMER_FROM_LEVEL)
        if message.topic == SCHEDULE_TOPIC:
            level = str(message.queue_id + 1)
        paused = properties.get(before, properties.TIMER_PAUSED) or "" if is_as_promised else ""
        if is_paused:
            paused = properties.get(before, properties.TIMER_DELIVER_MS) or str(now_ms)
        added = {
            properties.TIMER_DELIVER_MS: str(due_ms),
            properties.TIMER_ROLL_TIMES: str(int(times) + 1 if times.isdecimal() else 1),
            properties.TIMER_OUT_MS: str(timer_properties.out_ms(due_ms)),
            properties.TIMER_FROM_LEVEL: level or "" if is_as_promised else "",
            properties.TIMER_PAUSED: paused,
            properties.TIMER_FIRST_ID: timer_properties.first_id_value(given_id(message), origin),
            properties.REAL_TOPIC: topic,
            properties.REAL_QID: properties.get(before, properties.REAL_QID) or "0",
        }
        # All other properties stay as they are, even those that have no value or that occur twice.
        kept = properties.without_all(before, _REPLACED).rstrip(properties.PROPERTY_END)
        text = _joined(kept, added)
        for name in _SPARED:
            if len(text) <= properties.MAX_BYTES:
                break
            added.pop(name, None)
            kept = properties.without(kept, name).rstrip(properties.PROPERTY_END)
            text = _joined(kept, added)
        appender = self._appender
        appender.check(message.body, text, is_stored=True)
        appender.begin(now_ms)
        try:
            offset = appender.add(
                self._queue,
                message.body,
                text,
                due_ms,
                message.born_timestamp,
                message.born_host,
                message.flag,
                message.sys_flag,
                message.reconsume_times,
                origin or ORIGIN_ZERO,
            )
            self._topics.staged(offset, topic, key_of(message.properties_text), is_again=True)
            appender.commit()
        except BaseException:
            appender.roll_back()
            raise
        return appender.last_physical_offset


def _joined(kept: str, added: dict[str, str]) -> bytes:
    """Return properties, unchanged, followed by added ones."""
    more = properties.format_properties(added)
    return (f"{kept}{properties.PROPERTY_END}{more}" if kept else more).encode()
