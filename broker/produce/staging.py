"""Where an incoming message is stored: in its queue, or in the queue of a delay level or of the timers, where it waits.
`broker.produce.send` stages plain messages itself, and those of its other fast paths; all others are staged here.
Property requests that cannot be fulfilled are refused here."""

from __future__ import annotations

from typing import Final

from duemq.broker.errors import Refused
from duemq.broker.produce.message import ByLevel, ByTimer, NewMessage
from duemq.broker.tables.topics import Topic
from duemq.protocol.codes import ResponseCode
from duemq.protocol.errors import TimerIllegal
from duemq.protocol.records import checksum, properties
from duemq.protocol.records.record import FLAG_BORN_IPV6, FLAG_STORE_IPV6
from duemq.protocol.records.recurrence import FLAG_RECURS, RecurrenceRule
from duemq.protocol.records.timer_properties import AGAIN_ROOM, deliver_time, out_ms
from duemq.protocol.topics import SCHEDULE_TOPIC
from duemq.scheduler.levels.service import LevelQueues
from duemq.scheduler.levels.table import queue_id_of
from duemq.scheduler.recurring.times import next_ms
from duemq.scheduler.timers.config import Refusal
from duemq.scheduler.timers.service import Timers
from duemq.storage.store import MessageStore

TIMER_NAMES: Final = (
    *properties.TIMERS,
    *properties.TIMER_STATE,
    properties.TIMER_DEL_UNIQKEY,
    properties.TIMER_REPLACE,
    *properties.RECURRENCE,
)
_DELAY: Final = f"{properties.DELAY}{properties.NAME_END}"
DUE_NAME: Final = f"{properties.DUE_MS}{properties.NAME_END}"
"""The beginning of DUE_MS in a property text, as the producer of duemq's client sets it."""
BROKERS_FLAGS: Final = FLAG_BORN_IPV6 | FLAG_STORE_IPV6 | FLAG_RECURS
"""The flags for the size of the hosts in a record, and for recurring messages. The broker sets them itself and ignores
those of a client's sysflag."""


class Staging:
    """Stages messages that may have to wait, see `storage.log.append`."""

    def __init__(self, store: MessageStore, levels: LevelQueues, timers: Timers, added: str) -> None:
        """`added`: the properties that the broker adds to new messages, see `message.of_broker`."""
        self.added = added
        self._store = store
        self._appender = store.appender
        self._levels = levels
        self._timers = timers

    def by_level(self, topic: Topic, asked: int, *, tells_due: bool = False) -> ByLevel:
        """Return the level of the broker's table for the requested level, above 0, of a message to a topic. Raises
        Refused if the topic's own table has a delay that the broker's table lacks, because there is no queue for it."""
        table, own = self._levels.table, topic.delay_levels
        if own is None:
            return ByLevel(table.cap(asked), tells_due)
        level = own.cap(asked)
        delay_ms = own.delay_ms(level)
        found = table.level_of(delay_ms)
        if found is None:
            raise Refused(
                ResponseCode.MESSAGE_ILLEGAL,
                f"level {level} of the topic {topic.name} is {delay_ms // 1000} s, which messageDelayLevel "
                f"({table.text}) does not have: add it there",
            )
        return ByLevel(found, tells_due)

    def by_timer(self, text: str, now_ms: int) -> tuple[ByTimer | None, str]:
        """Return when a message that arrives now is due, None if it need not wait; and its properties, without those
        that another broker or an earlier delivery added about waiting, and with the time computed from a delay. Raises
        Refused."""
        now_ms = self._appender.begin(now_ms)
        try:
            deliver_ms = deliver_time(text, now_ms)
        except TimerIllegal as error:
            raise Refused(ResponseCode.MESSAGE_ILLEGAL, f"timer message illegal, {error}") from None
        if deliver_ms is None:
            return None, text
        deletes = properties.get(text, properties.TIMER_DEL_UNIQKEY) is not None
        if deliver_ms > now_ms:
            refusal = self._timers.refusal(deliver_ms, now_ms)
            if refusal is not None:
                raise self.refused(refusal, deliver_ms - now_ms)
        elif deletes:
            raise Refused(ResponseCode.MESSAGE_ILLEGAL, self._timer_illegal())
        text = properties.without_all(text, properties.TIMER_STATE)
        if deliver_ms <= now_ms:
            return None, text
        if "TIMER_DELAY_" in text:
            text = properties.with_property(text, properties.TIMER_DELIVER_MS, str(deliver_ms))
        return ByTimer(deliver_ms, deletes), text

    def recurring(self, recurrence: RecurrenceRule, text: str, now_ms: int) -> tuple[ByTimer, str]:
        """Return when a recurring message that arrives now is delivered first, and its properties with that time.
        Raises Refused."""
        now_ms = self._appender.begin(now_ms)
        try:
            deliver_ms = next_ms(recurrence, now_ms)
        except TimerIllegal as error:
            raise Refused(ResponseCode.MESSAGE_ILLEGAL, f"timer message illegal, {error}") from None
        if deliver_ms is None:
            raise Refused(
                ResponseCode.MESSAGE_ILLEGAL, "timer message illegal, the recurring message would never be delivered"
            )
        refusal = self._timers.refusal(deliver_ms, now_ms)
        if refusal is not None:
            raise self.refused(refusal, deliver_ms - now_ms)
        text = properties.without_all(text, (*properties.TIMER_STATE, properties.TIMER_PAUSED))
        text = properties.with_property(text, properties.TIMER_REPLACE, "true")
        if recurrence.every_ms and recurrence.start_ms is None:
            # The times of all deliveries count from the first one, whatever becomes of those in between.
            text = properties.with_property(text, properties.TIMER_START, str(deliver_ms))
        text = properties.with_property(text, properties.TIMER_DELIVER_MS, str(deliver_ms))
        return ByTimer(deliver_ms, recurs=True), text

    def refused(self, refusal: Refusal, delay_ms: int) -> Refused:
        """Return the error for a message that the timers refuse; `delay_ms` is how long it would have to wait."""
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
        if refusal is Refusal.STALLED:
            return Refused(
                ResponseCode.SERVICE_NOT_AVAILABLE,
                f"service not available now: the timer log cannot be written: {self._timers.enqueue_failure}",
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

    def stage(self, message: NewMessage, now_ms: int, *, is_stored: bool = False) -> int:
        """Stage a message that arrives now; return its queue offset. `is_stored`: it was stored before and is stored
        once more. Raises RecordIllegal, StoreError."""
        queue, due, text = message.queue, message.due, message.text
        appender = self._appender
        if checksum.NAME in text:
            text = properties.without(text, checksum.NAME)
        prepared, room, flags = 0, 0, 0
        store_timestamp = appender.begin(now_ms)
        if due is None:
            code = properties.tags_code_of(text)
        else:
            if isinstance(due, ByLevel):
                code = prepared = self._levels.table.deliver_time(due.level, store_timestamp)
                text = _level_text(due, text, prepared)
                waits_in = self._store.ensure_queue(SCHEDULE_TOPIC, queue_id_of(due.level))
            else:
                text = properties.with_property(text, properties.TIMER_OUT_MS, str(out_ms(due.deliver_ms)))
                if due.origin:
                    text = properties.with_property(text, properties.TIMER_ROLL_TIMES, "1")
                if due.recurs:
                    flags = FLAG_RECURS
                if due.deletes:
                    # Found by its unique key: it has no deliver time, and names no record except one that it replaces.
                    code, prepared = properties.tags_code_of(text), due.origin
                else:
                    code, prepared = due.deliver_ms, due.origin or due.deliver_ms
                waits_in = self._timers.queue
            text = _with_real_queue(text, queue.topic, queue.queue_id)
            # A retry uses the room that is left. It can drop properties that brokers added, if necessary.
            room = 0 if is_stored else AGAIN_ROOM
            queue = waits_in
        property_bytes = text.encode()
        appender.check(message.body, property_bytes, room, is_stored=is_stored)
        offset = appender.add(
            queue,
            message.body,
            property_bytes,
            code,
            message.born_timestamp,
            message.born_host,
            message.flag,
            message.sys_flag & ~BROKERS_FLAGS | flags,
            message.reconsume_times,
            prepared,  # see MessageStore.tags_code
        )
        if isinstance(due, ByTimer):
            self._timers.staged(offset, message.queue.topic, due.key)
        return offset


def _level_text(due: ByLevel, text: str, due_ms: int) -> str:
    """Return the properties of a message that waits by a level until `due_ms`."""
    level = str(due.level)
    if text.count(_DELAY) != 1 or properties.get(text, properties.DELAY) != level:
        text = properties.with_property(text, properties.DELAY, level)
    if due.tells_due:
        text = properties.with_property(text, properties.DUE_MS, str(due_ms))
    return text


def _with_real_queue(text: str, topic: str, queue_id: int) -> str:
    """Return properties with REAL_TOPIC and REAL_QID at the end, where deliveries look first."""
    if "REAL_" in text:
        text = properties.without_all(text, (properties.REAL_TOPIC, properties.REAL_QID))
    separator = properties.PROPERTY_END if text and text[-1] != properties.PROPERTY_END else ""
    return f"{text}{separator}REAL_TOPIC\x01{topic}\x02REAL_QID\x01{queue_id}"


def check_deletes(text: str, topic: str) -> None:
    """Check a message that deletes another (TIMER_DEL_UNIQKEY): the message that it names has to be of the same topic,
    since the sender's permission is for that one. `topic`: the topic of the deleting message. Raises Refused."""
    named, plus, _ = (properties.get(text, properties.TIMER_DEL_UNIQKEY) or "").partition("+")
    if plus and named != topic:
        raise Refused(
            ResponseCode.MESSAGE_ILLEGAL,
            f"timer message illegal, a message to the topic {topic} cannot delete one of another topic: "
            f"{properties.TIMER_DEL_UNIQKEY} is {topic}+ and the unique key of the message",
        )
