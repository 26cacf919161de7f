"""A store in memory with level queues, and a clock that tests move."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from protocol.record import StoredMessage
from scheduler.delay_levels import DelayLevels
from scheduler.level_delivery import DeliveryConfig
from scheduler.level_queues import LevelQueues
from storage.clock import ManualClock
from storage.config_file import ConfigFile
from storage.consume_queue import SCHEDULE_TOPIC
from storage.copies import origin_of
from storage.store import MessageStore, StoreConfig
from tests.crash.simulated_files import SimulatedFiles

HOST = b"\x7f\0\0\x01\0\0\x04\xd2"
TABLE = DelayLevels("1s 5s 30s")


class World:
    """A store with level queues."""

    def __init__(
        self,
        files: SimulatedFiles | None = None,
        delivery: DeliveryConfig | None = None,
        *,
        sync_flush: bool = False,
        segment_size: int = 1 << 20,
    ) -> None:
        self.files = files or SimulatedFiles()
        self.clock = ManualClock(1_000_000)
        self.delivery = delivery or DeliveryConfig()
        self.sync_flush = sync_flush
        self.segment_size = segment_size
        self.wakes = 0
        self.open()

    def open(self, table: DelayLevels = TABLE) -> None:
        """Open, also after a kill -9: what was written is there, what was in memory is not."""
        self.files.locked.clear()
        self.table = table
        self.awaited: list[tuple[int, Callable[[], None]]] = []
        config = StoreConfig("/s", commitlog_segment_size=self.segment_size, queue_segment_size=2000)
        self.store = MessageStore(config, self.files, self.clock, ("127.0.0.1", 10911), table.deliver_time)
        recovered = self.store.open()
        self.levels = LevelQueues(
            self.store,
            ConfigFile(self.files, "/s/config/delayOffset.json"),
            self.clock,
            table,
            self.delivery,
            (lambda position, done: self.awaited.append((position, done))) if self.sync_flush else None,
        )
        self.levels.load(recovered)
        self.levels.on_earlier = self.wake

    def flush(self) -> None:
        """What is awaited of the disk happens."""
        awaited, self.awaited = self.awaited, []
        for _, done in awaited:
            done()

    def checkpoint(self) -> None:
        for _ in self.store.write_queues():
            pass
        job = self.store.plan_checkpoint()
        job.run()
        self.store.note_checkpoint(job)

    def wake(self) -> None:
        self.wakes += 1

    def schedule(
        self,
        level: int,
        body: bytes = b"x",
        text: str = "TAGS\x01t\x02REAL_TOPIC\x01orders\x02REAL_QID\x013",
        *,
        host: bytes = HOST,
        promises: bool = True,
    ) -> int:
        """Put a message into a level's queue, as the send handler does; gives when it is due. RocketMQ's records do not
        say that (`promises`)."""
        appender = self.store.appender
        due = self.levels.table.deliver_time(level, appender.begin())
        queue = self.store.ensure_queue(SCHEDULE_TOPIC, level - 1)
        text = f"DELAY\x01{level}\x02{text}"
        appender.add(queue, body, text.encode(), due, 7, host, 8, 1, 2, due if promises else 0)
        appender.commit()
        return due

    def delivered(self, topic: str = "orders", queue_id: int = 3) -> list[StoredMessage]:
        queue = self.store.queue(topic, queue_id)
        if queue is None:
            return []
        units = [queue.unit(offset) for offset in range(queue.next_offset)]
        messages = [self.store.message_at(unit[0], unit[1]) for unit in units if unit is not None]
        return [message for message in messages if message is not None]

    def bodies(self, topic: str = "orders", queue_id: int = 3) -> list[bytes]:
        return [message.body for message in self.delivered(topic, queue_id)]

    def twice(self) -> list[int | None]:
        """Origins that more than one delivery names."""
        origins = Counter(
            origin_of(message.prepared_transaction_offset)
            for topic, queues in self.store.queues.items()
            if topic != SCHEDULE_TOPIC
            for queue_id in queues
            for message in self.delivered(topic, queue_id)
        )
        return [origin for origin, count in origins.items() if count > 1]

    def pass_time(self, ms: int) -> None:
        """Let time pass, and what falls due within it be delivered at its time."""
        end = self.clock.now_ms() + ms
        while (due := self.run()) is not None and due <= end:
            self.clock.advance(max(0, due - self.clock.now_ms()))
        self.clock.advance(end - self.clock.now_ms())
        self.run()

    def run(self) -> int | None:
        """Step until nothing more is due."""
        while (due := self.levels.step()) is not None and due <= self.clock.now_ms():
            pass
        return due

    def save(self) -> None:
        self.levels.save(self.levels.to_json())
