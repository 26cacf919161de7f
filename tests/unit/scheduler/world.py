"""A store in memory with level queues, and a clock that tests move."""

from __future__ import annotations

from collections import Counter

from duemq.broker.produce.message import ByLevel
from duemq.protocol.records.record import StoredMessage
from duemq.protocol.topics import SCHEDULE_TOPIC
from duemq.scheduler.levels.delivery import DeliveryConfig
from duemq.scheduler.levels.service import MAX_HANDED_OVER
from duemq.scheduler.levels.table import DelayLevels
from duemq.storage.budget import UNLIMITED, Budget
from duemq.storage.clock import ManualClock, look
from duemq.storage.current import Current
from duemq.storage.log.copies import origin_of
from duemq.storage.store import StoreConfig
from tests.crash.simulated_files import SimulatedFiles
from tests.support.messages import HOST
from tests.support.store import Assembly, delay_offsets_file

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
        with_checksums: bool = False,
        is_extended: bool = False,
    ) -> None:
        self.files = files or SimulatedFiles()
        self.clock = ManualClock(1_000_000)
        self.delivery = Current(delivery or DeliveryConfig())
        self.sync_flush = sync_flush
        self.segment_size = segment_size
        self.with_checksums = with_checksums
        self.is_extended = is_extended
        self.wakes = 0
        self.open()

    def open(self, table: DelayLevels = TABLE) -> None:
        """Open, also after a kill -9: written data is there, data in memory is lost."""
        self.files.after_kill()
        config = StoreConfig(
            "/s",
            commitlog_segment_size=self.segment_size,
            queue_segment_size=2000,
            with_checksums=self.with_checksums,
            is_extended=self.is_extended,
        )
        opened = Assembly(
            self.files,
            config,
            self.clock,
            table=table,
            delivery=self.delivery,
            is_awaited=self.sync_flush,
            wake=self.wake,
        )
        opened.take_over()
        self.store, self.levels, self.sender, self.owned = opened.store, opened.levels, opened.sender, opened.owned
        self.file = delay_offsets_file(self.files, config)

    def flush(self) -> None:
        """Complete the flushes that are awaited."""
        assert self.owned.flush()

    def checkpoint(self) -> None:
        self.owned.checkpoint()

    def save(self) -> None:
        """Write the present progress into its file, which otherwise happens with a checkpoint now and then."""
        self.file.write(self.levels.to_json())

    def stop(self, most_handed_over: int = MAX_HANDED_OVER) -> None:
        """Stop cleanly."""
        self.levels.watch_clock(look(self.clock))
        while self.levels.hand_over_next(most=most_handed_over):
            pass
        self.owned.stop()

    def wake(self) -> None:
        self.wakes += 1

    def set_table(self, text: str) -> DelayLevels:
        """Change the table of levels."""
        table = DelayLevels(text)
        self.levels.set_table(table, self.clock.now_ms())
        return table

    def schedule(self, level: int, body: bytes = b"x", text: str = "TAGS\x01t", *, host: bytes = HOST) -> int:
        """Put a message into a level's queue, as the send handler does; return its deliver time."""
        self.sender.stage(body, ByLevel(level), text, host=host, flag=8, sys_flag=1, tries=2)
        self.store.appender.commit()
        return self.levels.table.deliver_time(level, self.store.appender.last_store_timestamp)

    def put(self, level: int, body: bytes, text: str) -> int:
        """Put a record with any properties into a level's queue, as a producer can make Apache's broker do it, without
        a deliver time in it. Return its deliver time."""
        appender = self.store.appender
        due = self.levels.table.deliver_time(level, appender.begin(self.clock.now_ms()))
        queue = self.store.ensure_queue(SCHEDULE_TOPIC, level - 1)
        appender.add(queue, body, f"DELAY\x01{level}\x02{text}".encode(), due, 7, HOST)
        appender.commit()
        return due

    def delivered(self, topic: str = "orders", queue_id: int = 3, *, first: int = 0) -> list[StoredMessage]:
        """Messages of a queue from a queue offset on."""
        queue = self.store.queue(topic, queue_id)
        if queue is None:
            return []
        units = [queue.unit(offset) for offset in range(first, queue.next_offset)]
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
        """Let time pass, and deliver the messages due within it at their times."""
        end = self.clock.now_ms() + ms
        while (due := self.run()) is not None and due <= end:
            self.clock.advance(max(0, due - self.clock.now_ms()))
        self.clock.advance(end - self.clock.now_ms())
        self.run()

    def step(self, budget: Budget = UNLIMITED) -> int | None:
        """Deliver due messages, or some of them; return the time of the next call."""
        return self.levels.step(look(self.clock), budget)

    def run(self) -> int | None:
        """Step until no message is due."""
        while (due := self.step()) is not None and due <= self.clock.now_ms():
            pass
        return due
