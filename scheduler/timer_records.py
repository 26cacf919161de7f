"""The records that the timers append to their own topic: what deletes a message, and a message once more."""

from __future__ import annotations

from typing import Final

from protocol import properties, timer_properties
from protocol.record import StoredMessage
from scheduler.timer_ids import given_id
from scheduler.timer_keys import key_of
from scheduler.timer_topics import TimerTopics
from storage.consume_queue import ConsumeQueue
from storage.copies import ORIGIN_ZERO
from storage.store import MessageStore

_DELETE_BODY: Final = b"0"
_DELETE_TAG: Final = "_RECALL_TAG_"


class TimerRecords:
    """Appends records to the queue of the timer topic. Each names the record that it takes the place of."""

    def __init__(self, store: MessageStore, queue: ConsumeQueue, topics: TimerTopics) -> None:
        self._appender = store.appender
        self._queue = queue
        self._topics = topics

    def delete(self, message: StoredMessage, due_ms: int, now_ms: int) -> None:
        """Append, now, a record that deletes a message that is due at a time: for Apache's broker by topic and unique
        key, in the slot of that time; for recovery by its origin. Raises StoreError."""
        try:
            self.stage_deletion(message, due_ms, now_ms)
            self._appender.commit()
        except BaseException:
            self._appender.roll_back()
            raise

    def stage_deletion(self, message: StoredMessage, due_ms: int, now_ms: int) -> None:
        """As `delete`, written by the caller's `Appender.commit`."""
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
            prepared_transaction_offset=message.physical_offset or ORIGIN_ZERO,
        )
        self._topics.staged(offset, topic)

    def again(self, message: StoredMessage, due_ms: int, now_ms: int) -> int:
        """Append, now, a message that waits once more, to wait on in the wheel until a time; gives its physical offset.
        Raises StoreError."""
        found = properties.parse(message.properties_text)
        topic, queue_id = found.pop(properties.REAL_TOPIC, ""), found.pop(properties.REAL_QID, "0")
        times = found.get(properties.TIMER_ROLL_TIMES, "0")
        for name in (properties.DELAY, properties.TIMER_DELAY_SEC, properties.TIMER_DELAY_MS):
            found.pop(name, None)
        found[properties.TIMER_DELIVER_MS] = str(due_ms)
        found[properties.TIMER_ROLL_TIMES] = str(int(times) + 1 if times.isdecimal() else 1)
        found[properties.TIMER_OUT_MS] = str(timer_properties.out_ms(due_ms))
        origin = message.physical_offset
        found[properties.TIMER_FIRST_ID] = timer_properties.first_id_value(given_id(message), origin)
        found[properties.REAL_TOPIC], found[properties.REAL_QID] = topic, queue_id
        text = properties.format_properties(found).encode()
        if len(text) > properties.MAX_BYTES:  # it was sent with as many properties as there may be
            del found[properties.TIMER_FIRST_ID]
            text = properties.format_properties(found).encode()
        appender = self._appender
        appender.check(message.body, text)
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
