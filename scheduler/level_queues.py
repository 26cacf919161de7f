"""Level queues: messages with a delay level wait in SCHEDULE_TOPIC_XXXX, one queue a level, and are delivered into
their topic when they are due.

    queue of level n:  n - 1 of SCHEDULE_TOPIC_XXXX; the tags code of each consume-queue unit is the deliver time,
                       ms since the epoch; a level's delay is constant, so its queue is in order of deliver times
    progress:          config/delayOffset.json, {"offsetTable": {"<level>": next queue offset to deliver}}

Delivery copies a message into a record of its real topic and queue (properties REAL_TOPIC, REAL_QID) with its
properties as they are; the prepared-transaction offset of that record, unused otherwise, names the record that
scheduled it.

Nothing polls: the head of each queue says when to wake, and an append to an empty queue says so too (`on_earlier`).
`step` does a bounded amount and gives the time of the next one; whoever calls it owns the timer. This is the sync
path: a slice of due messages is written before progress moves over it.

Behaviour after apache/rocketmq store/schedule/ScheduleMessageService.java (4.9.7).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import structlog

from protocol import properties
from protocol.record import StoredMessage
from scheduler.delay_levels import DelayLevels, queue_id_of
from storage.clock import Clock
from storage.config_file import ConfigFile
from storage.consume_queue import PADDING_SIZE, UNIT, ConsumeQueue
from storage.errors import StoreError, StoreFormatError
from storage.pull import EXT_ADDRESS_MAX
from storage.scan import is_topic_name
from storage.store import SCHEDULE_TOPIC, MessageStore

log = structlog.get_logger(__name__)

HALF_TOPIC: Final = "RMQ_SYS_TRANS_HALF_TOPIC"
SLICE: Final = 128
"""Messages of one level delivered in one write."""
STEP_BYTES: Final = 2 * 1024 * 1024
"""About how many bytes one step delivers at most, so that it ends within a few ms."""
RETRY_MS: Final = 100
"""When the store takes nothing, try again after this."""

Unit = tuple[int, int, int]


class Level:
    """One level. `offset` is the next queue offset to deliver; `due_ms` when its head is due, None when empty."""

    __slots__ = ("delivered", "due_ms", "number", "offset", "queue", "skipped")

    def __init__(self, number: int, queue: ConsumeQueue, offset: int) -> None:
        self.number = number
        self.queue = queue
        self.offset = offset
        self.due_ms: int | None = None
        self.delivered = 0
        """Messages delivered since start."""
        self.skipped = 0
        """Messages that could not be delivered since start: their record was missing or said no topic."""


class LevelQueues:
    """Delivers the messages of all levels."""

    def __init__(self, store: MessageStore, file: ConfigFile, clock: Clock, table: DelayLevels) -> None:
        self._store = store
        self._file = file
        self._clock = clock
        self.table = table
        self.levels: dict[int, Level] = {}
        self._extra: dict[str, Any] = {}
        self._turn = 0
        self.on_earlier: Callable[[], None] = lambda: None
        """Called when a message came that may be due before everything that was waiting."""

    def load(self) -> None:
        """Read the progress. Progress outside a queue is moved into it, and said. Raises StoreFormatError."""
        data = self._file.read()
        offsets = data.pop("offsetTable", None) or {}
        self._extra = data
        known = [queue_id + 1 for queue_id in self._store.queues.get(SCHEDULE_TOPIC, {})]
        for number in sorted({*range(1, self.table.maximum + 1), *known}):
            queue = self._store.ensure_queue(SCHEDULE_TOPIC, queue_id_of(number))
            try:
                offset = int(offsets.get(str(number), 0))
            except (TypeError, ValueError):
                raise StoreFormatError(self._file.path, f"the offset of level {number} is no number") from None
            level = self.levels[number] = Level(number, queue, offset)
            self._correct(level)
            queue.watch(self._arrived)
            level.due_ms = self._head(level)

    def _arrived(self, queue: ConsumeQueue) -> None:
        level = self.levels[queue.queue_id + 1]
        if level.due_ms is None:
            level.due_ms = self._head(level)
            self.on_earlier()

    def _correct(self, level: Level) -> None:
        low, high = level.queue.min_offset, level.queue.next_offset
        corrected = min(max(level.offset, low), high)
        if corrected != level.offset:
            log.warning(
                "level_offset_corrected",
                level=level.number,
                offset=level.offset,
                corrected=corrected,
                min=low,
                max=high,
            )
            level.offset = corrected

    # --- time

    def _head(self, level: Level) -> int | None:
        """When the first message that is not delivered is due, or None."""
        unit = level.queue.unit(level.offset)
        return self._due(level, unit, self._clock.now_ms()) if unit is not None else None

    def _due(self, level: Level, unit: Unit, now_ms: int) -> int:
        """When a unit's message is due. A time further ahead than the level's delay cannot be right (the table was
        shortened, the clock set back): then it is due now, as in RocketMQ."""
        physical, size, code = unit
        if size == PADDING_SIZE:
            return now_ms
        if code <= EXT_ADDRESS_MAX:
            message = self._store.message_at(physical, size)
            code = self.table.deliver_time(level.number, message.store_timestamp) if message is not None else now_ms
        return code if code <= now_ms + self.table.delay_ms(self.table.cap(level.number)) else now_ms

    @property
    def next_due_ms(self) -> int | None:
        """When the next message is due, ms since the epoch; None when none waits."""
        return min((level.due_ms for level in self.levels.values() if level.due_ms is not None), default=None)

    # --- delivery

    def step(self) -> int | None:
        """Deliver what is due, a bounded amount; gives when to call again, ms since the epoch, or None for "when a
        message comes"."""
        now_ms = self._clock.now_ms()
        budget = STEP_BYTES
        try:
            for level in self._in_turn():
                while level.due_ms is not None and level.due_ms <= now_ms:
                    budget -= self._deliver_slice(level, now_ms)
                    if budget <= 0:
                        return now_ms
            return self.next_due_ms
        except StoreError as error:
            log.warning("delivery_refused", reason=str(error))
            return now_ms + RETRY_MS

    def _in_turn(self) -> list[Level]:
        """The levels, each time beginning with another one, so that none waits for ever."""
        levels = list(self.levels.values())
        self._turn = (self._turn + 1) % len(levels)
        return levels[self._turn :] + levels[: self._turn]

    def _deliver_slice(self, level: Level, now_ms: int) -> int:
        """Deliver the due messages at the head of a level, up to a slice; gives about how many bytes that were."""
        self._correct(level)
        offset = level.offset
        delivered = skipped = size = 0
        appender = self._store.appender
        for unit in UNIT.iter_unpack(level.queue.read(offset, SLICE)):
            if self._due(level, unit, now_ms) > now_ms or size > STEP_BYTES:
                break
            size += unit[1] if unit[1] != PADDING_SIZE else 0
            offset += 1
            if self._stage(level, unit):
                delivered += 1
            else:
                skipped += 1
        appender.commit()
        level.offset = offset
        level.delivered += delivered
        level.skipped += skipped
        level.due_ms = self._head(level)
        return size

    def _stage(self, level: Level, unit: Unit) -> bool:
        """Stage a due message for its real topic; False where that is impossible for ever."""
        physical, size, _ = unit
        message = self._store.message_at(physical, size) if size != PADDING_SIZE else None
        if message is None:
            log.error("scheduled_message_missing", level=level.number, physical_offset=physical)
            return False
        topic = message.get_property(properties.REAL_TOPIC)
        queue_id = message.get_property(properties.REAL_QID)
        if not topic or not is_topic_name(topic.encode()) or topic == HALF_TOPIC or not _is_queue_id(queue_id):
            log.error("scheduled_message_undeliverable", level=level.number, physical_offset=physical, topic=topic)
            return False
        self._store.appender.begin()
        self._append(self._store.ensure_queue(topic, int(queue_id or 0)), message)
        return True

    def _append(self, queue: ConsumeQueue, message: StoredMessage) -> None:
        self._store.appender.add(
            queue,
            message.body,
            message.properties_text.encode(),
            properties.tags_code(message.get_property(properties.TAGS)),
            message.born_timestamp,
            message.born_host,
            message.flag,
            message.sys_flag,
            message.reconsume_times,
            message.physical_offset,
        )

    # --- progress

    def progress(self) -> tuple[dict[str, Any], int]:
        """The progress as delayOffset.json has it, and the physical offset up to which the commitlog has to be
        durable before that may be saved: progress must never run ahead of the messages it speaks of."""
        return self.to_json(), self._store.log.end

    def to_json(self) -> dict[str, Any]:
        """The progress as delayOffset.json and GET_ALL_DELAY_OFFSET have it."""
        return {**self._extra, "offsetTable": {str(level.number): level.offset for level in self.levels.values()}}

    def save(self, table: dict[str, Any]) -> None:
        """Write the progress. May wait for the disk. Raises OSError."""
        self._file.write(table)


def _is_queue_id(text: str | None) -> bool:
    return text is not None and text.isascii() and text.isdecimal() and int(text) < 2**31
