"""Where a message that comes in is put: into its queue, or where it waits, which is the queue of a delay level or that
of the timers. What its properties ask for is refused here where it cannot be had."""

from __future__ import annotations

from typing import Final

from duemq.broker.errors import Refused
from duemq.broker.tables.topics import Topic
from duemq.protocol.codes import ResponseCode
from duemq.protocol.errors import TimerIllegal
from duemq.protocol.frames.command import Body
from duemq.protocol.records import checksum, properties, timer_properties
from duemq.protocol.records.record import FLAG_BORN_IPV6, FLAG_STORE_IPV6
from duemq.protocol.records.timer_properties import AGAIN_ROOM, deliver_time, out_ms
from duemq.scheduler.levels.service import LevelQueues
from duemq.scheduler.levels.table import queue_id_of
from duemq.scheduler.timers.config import Refusal
from duemq.scheduler.timers.service import Timers
from duemq.storage.queues.consume_queue import SCHEDULE_TOPIC, ConsumeQueue
from duemq.storage.store import MessageStore

TIMER_NAMES: Final = (
    *properties.TIMERS,
    *properties.TIMER_STATE,
    properties.TIMER_DEL_UNIQKEY,
    properties.TIMER_REPLACE,
)
HOST_FLAGS: Final = FLAG_BORN_IPV6 | FLAG_STORE_IPV6
"""How long the hosts in a record are: that is ours to say, and not what a client's sysflag says of it."""


class Staging:
    """Stages messages that may have to wait, see `storage.log.append`."""

    def __init__(self, store: MessageStore, topics: dict[str, Topic], levels: LevelQueues, timers: Timers) -> None:
        self._store = store
        self._appender = store.appender
        self._table = topics
        self._levels = levels
        self._timers = timers

    def timer_of(self, text: str, now_ms: int) -> tuple[int | None, str]:
        """The time for which a message that comes now has to wait, None for one that need not; and its properties
        without what another broker, or an earlier delivery, added about that, but with the time that a delay comes to.
        Raises Refused."""
        now_ms = self._appender.begin(now_ms)
        try:
            deliver_ms = deliver_time(text, now_ms)
        except TimerIllegal as error:
            raise Refused(ResponseCode.MESSAGE_ILLEGAL, f"timer message illegal, {error}") from None
        if deliver_ms is None:
            return None, text
        is_to_come = deliver_ms > now_ms
        if is_to_come:
            refusal = self._timers.refusal(deliver_ms, now_ms)
            if refusal is not None:
                raise self.refused(refusal, deliver_ms - now_ms)
        elif properties.get(text, properties.TIMER_DEL_UNIQKEY) is not None:
            raise Refused(ResponseCode.MESSAGE_ILLEGAL, self._timer_illegal())
        text = properties.without_all(text, properties.TIMER_STATE)
        if is_to_come and "TIMER_DELAY_" in text:
            text = properties.with_property(text, properties.TIMER_DELIVER_MS, str(deliver_ms))
        return deliver_ms if is_to_come else None, text

    def refused(self, refusal: Refusal, delay_ms: int) -> Refused:
        """The error for a message that the timers do not take; `delay_ms` is how long it would have to wait."""
        config = self._timers.config
        if refusal is Refusal.DISABLED:
            return Refused(
                ResponseCode.SYSTEM_ERROR, "accurate timer message is not enabled, timerWheelEnable is false"
            )
        if refusal is Refusal.TOO_FAR:
            return Refused(
                ResponseCode.MESSAGE_ILLEGAL,
                f"{self._timer_illegal()}. It asks for {delay_ms // 1000} s, and timerMaxDelaySec is "
                f"{config.max_delay}",
            )
        return Refused(
            ResponseCode.SYSTEM_ERROR,
            f"timer message is under flow control, max num limit is {config.congest_limit} for each second "
            "(timerCongestNumEachSlot): ask for another time",
        )

    def _timer_illegal(self) -> str:
        return (
            "timer message illegal, the delay time should not be bigger than the max delay "
            f"{self._timers.config.max_delay * 1000}ms; or if set del msg, the delay time should be bigger than the "
            "current time"
        )

    def stage(
        self,
        queue: ConsumeQueue,
        level: int,
        deliver_ms: int | None,
        body: Body,
        property_bytes: bytes,
        born_timestamp: int,
        born_host: bytes,
        flag: int,
        sys_flag: int,
        reconsume_times: int,
        now_ms: int,
        origin: int = 0,
        key: int = 0,
        *,
        is_stored: bool = False,
    ) -> int:
        """Stage a message that comes now for a queue: at once, by way of a delay level, or by way of the timers for a
        time. With a timer, `origin` is the physical offset of a message that it replaces, and `key` see
        `Timers.staged`. `is_stored`: it was stored before, and comes once more."""
        property_bytes = checksum.without(property_bytes)
        text = property_bytes.decode()
        topic_name, real_queue = queue.topic, queue.queue_id
        if level > 0:
            level = self.level_for(topic_name, level)
            text = properties.with_property(text, properties.DELAY, str(level))
            queue = self._store.ensure_queue(SCHEDULE_TOPIC, queue_id_of(level))
        elif deliver_ms is not None:
            text = properties.with_property(text, properties.TIMER_OUT_MS, str(out_ms(deliver_ms)))
            if origin:
                text = properties.with_property(text, properties.TIMER_ROLL_TIMES, "1")
            queue = self._timers.queue
        is_delayed = level > 0 or deliver_ms is not None
        if is_delayed:
            text = properties.with_property(text, properties.REAL_TOPIC, topic_name)
            text = properties.with_property(text, properties.REAL_QID, str(real_queue))
            property_bytes = text.encode()
        # A retry takes what room there is. It has properties of brokers', which it goes without if need be.
        room = AGAIN_ROOM if is_delayed and not is_stored else 0
        self._appender.check(body, property_bytes, room, is_stored=is_stored)
        store_timestamp = self._appender.begin(now_ms)
        promise = 0
        if level > 0:
            code = promise = self._levels.table.deliver_time(level, store_timestamp)
        elif deliver_ms is not None and properties.get(text, properties.TIMER_DEL_UNIQKEY) is None:
            code = promise = deliver_ms
        else:
            # One that deletes another is to be looked at, by its unique key: it has no time, and names no record.
            code = properties.tags_code_of(text)
        offset = self._appender.add(
            queue,
            body,
            property_bytes,
            code,
            born_timestamp,
            born_host,
            flag,
            sys_flag & ~HOST_FLAGS,
            reconsume_times,
            origin or promise,  # see MessageStore.tags_code
        )
        if queue is self._timers.queue:
            self._timers.staged(offset, topic_name, key)
        return offset

    def level_for(self, topic_name: str, level: int) -> int:
        """The level of the broker's table for the level that a message asks for. Raises Refused where the topic has a
        table of its own with a delay that the broker's has not: that would have no queue."""
        table = self._levels.table
        topic = self._table.get(topic_name)
        if topic is None or topic.delay_levels is None:
            return table.cap(level)
        own = topic.delay_levels
        delay_ms = own.delay_ms(own.cap(level))
        found = table.level_of(delay_ms)
        if found is None:
            raise Refused(
                ResponseCode.MESSAGE_ILLEGAL,
                f"level {own.cap(level)} of the topic {topic_name} is {delay_ms // 1000} s, which "
                f"messageDelayLevel has not ({table.text}): add it there",
            )
        return found


def level_of(text: str) -> int:
    """The delay level that a message asks for, 0 without. Raises Refused where it is no number, or nothing: RocketMQ
    passes over properties without a value, and would deliver the message at once."""
    level = properties.get(text, properties.DELAY)
    if level is None:
        if properties.is_empty(text, properties.DELAY):
            raise Refused(ResponseCode.MESSAGE_ILLEGAL, f"the property {properties.DELAY} has no value")
        return 0
    try:
        return int(level)
    except ValueError:
        raise Refused(ResponseCode.MESSAGE_ILLEGAL, f"the property DELAY={level} is no delay level") from None


def is_delayed(text: str) -> bool:
    """Whether the properties of a message ask for a level or a time, be it illegal. Raises Refused for a level that is
    no number."""
    return level_of(text) > 0 or any(
        properties.get(text, name) is not None or properties.is_empty(text, name) for name in properties.TIMERS
    )


def is_special(text: str) -> bool:
    """Whether they ask for a level, a time, or for a message to be replaced. Raises Refused."""
    return is_delayed(text) or replace_key_of(text) is not None


def replace_key_of(text: str) -> str | None:
    """See `timer_properties.replace_key`. Raises Refused."""
    if properties.TIMER_REPLACE not in text:
        return None
    try:
        key = timer_properties.replace_key(text)
    except TimerIllegal as error:
        raise Refused(ResponseCode.MESSAGE_ILLEGAL, f"timer message illegal, {error}") from None
    if key is not None and properties.get(text, properties.TIMER_DEL_UNIQKEY) is not None:
        raise Refused(
            ResponseCode.MESSAGE_ILLEGAL,
            f"timer message illegal, {properties.TIMER_REPLACE} and {properties.TIMER_DEL_UNIQKEY} contradict each "
            "other",
        )
    return key
