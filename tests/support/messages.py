"""Scheduled messages, stored as the broker's handlers store them: through the broker's own staging."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, cast

from duemq.broker.produce.message import ByLevel, ByTimer, Due, NewMessage
from duemq.broker.produce.staging import Staging
from duemq.protocol.records import properties
from duemq.scheduler.timers.index.keys import key_hash
from tests.support.wire import ADDED_TEXT

if TYPE_CHECKING:
    from duemq.scheduler.levels.service import LevelQueues
    from duemq.scheduler.timers.service import Timers
    from duemq.storage.clock import Clock
    from duemq.storage.store import MessageStore

HOST: Final = b"\x7f\0\0\x01\0\0\x04\xd2"
"""127.0.0.1:1234 in the form of records."""

TOPIC: Final = "orders"
QUEUE: Final = 3


class Sender:
    """Stores messages into an open store. Without levels, or without timers, it cannot send messages of that kind."""

    def __init__(
        self, store: MessageStore, clock: Clock, levels: LevelQueues | None = None, timers: Timers | None = None
    ) -> None:
        self._store = store
        self._clock = clock
        self._levels = levels
        self._timers = timers
        self._staging = Staging(store, cast("LevelQueues", levels), cast("Timers", timers), ADDED_TEXT)

    def stage(
        self,
        body: bytes,
        due: Due = None,
        text: str = "",
        topic: str = TOPIC,
        queue_id: int = QUEUE,
        *,
        born_ms: int = 7,
        host: bytes = HOST,
        flag: int = 0,
        sys_flag: int = 0,
        tries: int = 0,
    ) -> int:
        """Stage a message that arrives now, and return its physical offset. The appender stores it at its next commit.
        `text`: the properties set by the producer."""
        queue = self._store.ensure_queue(topic, queue_id)
        self._staging.stage(
            NewMessage(queue, due, text, body, born_ms, host, flag, sys_flag, tries), self._clock.now_ms()
        )
        return self._store.appender.last_physical_offset

    def timer(self, due_ms: int, body: bytes, text: str = "", topic: str = TOPIC, *, born_ms: int = 7) -> int:
        """Store a message with a time; return its physical offset."""
        offset = self.stage(body, ByTimer(due_ms), with_time(text, due_ms), topic, born_ms=born_ms)
        self._store.appender.commit()
        return offset

    def level(self, level: int, body: bytes, text: str = "", topic: str = TOPIC) -> int:
        """Store a message with a delay level; return its physical offset."""
        offset = self.stage(body, ByLevel(level), text, topic)
        self._store.appender.commit()
        return offset

    def replace(
        self, due_ms: int, key: str, unique_key: str, body: bytes, topic: str = TOPIC, queue_id: int = QUEUE
    ) -> tuple[int, int]:
        """Store a message that replaces the waiting messages with its key; return the number replaced and its physical
        offset. Needs a complete index of waiting messages by key."""
        assert self._timers is not None
        changes, now_ms, offset = self._timers.changes, self._clock.now_ms(), 0

        def stage(origin: int) -> None:
            nonlocal offset
            due = max(due_ms, self._store.appender.begin(now_ms))
            text = f"{properties.UNIQ_KEY}\x01{unique_key}\x02{properties.KEYS}\x01{key}\x02TIMER_REPLACE\x01true"
            by_timer = ByTimer(due, origin=origin, key=key_hash(key))
            offset = self.stage(body, by_timer, with_time(text, due), topic, queue_id)

        places = changes.to_replace(topic, key, now_ms)
        return changes.replace(places, unique_key, due_ms, now_ms, stage), offset


def with_time(text: str, due_ms: int) -> str:
    """Return properties with a deliver time, ms since the epoch."""
    separator = properties.PROPERTY_END if text and not text.endswith(properties.PROPERTY_END) else ""
    return f"{text}{separator}{properties.TIMER_DELIVER_MS}\x01{due_ms}"
