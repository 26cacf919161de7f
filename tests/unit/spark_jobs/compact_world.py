"""A store in files, written by duemq's storage and scheduler in this process, with a clock that tests move."""

from __future__ import annotations

import json
from pathlib import Path
from typing import ClassVar

from duemq.protocol.records import properties
from duemq.protocol.records.record import StoredMessage
from duemq.scheduler.levels.table import DelayLevels
from duemq.scheduler.timers.config import Cancelled, TimerConfig
from duemq.storage.budget import UNLIMITED
from duemq.storage.clock import ManualClock, look
from duemq.storage.current import Current
from duemq.storage.files import OsFiles
from duemq.storage.queues.consume_queue import PADDING_SIZE, UNIT_SIZE, WITHDRAWN_SIZE
from duemq.storage.store import StoreConfig
from tests.support.messages import HOST
from tests.support.store import Assembly

HOST_V6 = bytes(15) + b"\x01\0\0\x04\xd2"
START_MS = 1_700_000_000_000
SEGMENT = 64 << 10
QUEUE_UNITS = 50
TABLE = DelayLevels("1s 5s 30s 1h")


ODD_MS = (-(1 << 63), -(10**15), -1, 0, 253_402_300_800_000, 10**15, (1 << 52) + 1, 10**16, (1 << 63) - 1)
"""Times that a producer may send, or a damaged record may have: from the far past to the far future."""


def with_odd_times(root: Path, born: int = 40, stored: int = 56) -> None:
    """Give the records of a closed store's first file, whose hosts are IPv4 addresses, the times ODD_MS: one after the
    other as born times, and then as store times."""
    path = min((root / "commitlog").iterdir())
    data = bytearray(path.read_bytes())
    at = 0
    for field in (born, stored):
        for ms in ODD_MS:
            data[at + field : at + field + 8] = ms.to_bytes(8, "big", signed=True)
            at += int.from_bytes(data[at : at + 4], "big")
    path.write_bytes(data)


class Broker:
    """An open store, with its level queues and timers."""

    opened: ClassVar[list[Broker]] = []
    """Brokers that tests have made: a test that makes many, or kills some, lets go of their files with
    `let_go_of_all`."""

    def __init__(self, root: Path, clock: ManualClock, segment_size: int = SEGMENT) -> None:
        self.opened.append(self)
        self.root = root
        self.clock = clock
        self.files = OsFiles()
        config = StoreConfig(str(root), commitlog_segment_size=segment_size, queue_segment_size=QUEUE_UNITS * UNIT_SIZE)
        (root / "config").mkdir(parents=True, exist_ok=True)
        opened = Assembly(self.files, config, clock, table=TABLE, timers=Current(TimerConfig(log_segment_size=5200)))
        self.store, self.recovered, self.owned = opened.store, opened.recovered, opened.owned
        self.levels, self.timers, self.sender = opened.levels, opened.timers, opened.sender

    @classmethod
    def let_go_of_all(cls) -> None:
        """Let go of the files of all brokers that were not closed, as kills do."""
        for broker in cls.opened:
            store = getattr(broker, "store", None)
            if store is not None:
                store.abandon()
            if hasattr(broker, "timers"):
                broker.timers.close()
        cls.opened.clear()

    def close(self) -> None:
        """Stop cleanly."""
        while self.timers.hand_over_next(self.clock.now_ms()):
            pass
        self.owned.stop()
        self.timers.close()

    def send(
        self, topic: str, body: bytes, text: str = "", queue_id: int = 0, *, host: bytes = HOST, prepared: int = 0
    ) -> int:
        """Store a message; return its physical offset."""
        appender = self.store.appender
        now_ms = appender.begin(self.clock.now_ms())
        queue = self.store.ensure_queue(topic, queue_id)
        flag = 16 if len(host) == 20 else 0
        code = properties.tags_code(properties.get(text, properties.TAGS))
        appender.add(queue, body, text.encode(), code, now_ms, host, 3, flag, 0, prepared)
        appender.commit()
        return appender.last_physical_offset

    def schedule(self, level: int, body: bytes, key: str = "k", topic: str = "orders") -> int:
        """Store a message with a delay level; return its physical offset."""
        return self.sender.level(level, body, f"UNIQ_KEY\x01{key}", topic)

    def timer(self, due_ms: int, body: bytes, key: str = "k", topic: str = "orders", born_ms: int = 7) -> int:
        """Store a message with a timer."""
        assert self.timers.refusal(due_ms, self.clock.now_ms()) is None
        return self.sender.timer(due_ms, body, f"UNIQ_KEY\x01{key}", topic, born_ms=born_ms)

    def cancel(self, physical_offset: int) -> None:
        """Cancel a waiting message."""
        self.run()
        assert self.timers.changes.cancel(physical_offset, self.clock.now_ms()) is Cancelled.CANCELLED

    def run(self) -> int | None:
        """Do all work that is due now; return the time of the next work."""
        for _ in range(100_000):
            now = look(self.clock)
            steps = self.levels.step(now, UNLIMITED), self.timers.step(now, UNLIMITED)
            due = [time for time in steps if time is not None]
            if not due or min(due) > self.clock.now_ms():
                return min(due, default=None)
        raise AssertionError("never done")

    def pass_time(self, ms: int) -> None:
        """Let time pass, doing all work at its time."""
        end = self.clock.now_ms() + ms
        while (due := self.run()) is not None and due <= end:
            self.clock.advance(max(0, due - self.clock.now_ms()))
        self.clock.advance(end - self.clock.now_ms())
        self.run()

    def messages(self, topic: str, queue_id: int = 3) -> dict[int, StoredMessage]:
        """The messages of a queue by queue offset."""
        queue = self.store.queue(topic, queue_id)
        if queue is None:
            return {}
        result = {}
        for offset in range(queue.min_offset, queue.next_offset):
            physical, size, _ = queue.unit(offset) or (0, 0, 0)
            if size in (WITHDRAWN_SIZE, PADDING_SIZE):
                continue
            message = self.store.message_at(physical, size)
            assert message is not None, (topic, offset, physical, size)
            result[offset] = message
        return result

    def bodies(self, topic: str = "orders", queue_id: int = 3) -> list[bytes]:
        """The bodies of the messages of a queue."""
        return [message.body for message in self.messages(topic, queue_id).values()]


def new_broker(root: Path, segment_size: int = SEGMENT) -> Broker:
    """A broker with a new store."""
    root.mkdir(parents=True, exist_ok=True)
    return Broker(root, ManualClock(START_MS), segment_size)


def save_offsets(root: Path, table: dict[str, dict[str, int]]) -> None:
    """Write the offsets of consumer groups."""
    (root / "config").mkdir(parents=True, exist_ok=True)
    (root / "config/consumerOffset.json").write_text(json.dumps({"offsetTable": table}))


def as_apache(root: Path) -> None:
    """Make the store look as if RocketMQ's broker had it last: its word in the lock, no notes."""
    (root / "lock").write_bytes(b"lock")
    path = root / "checkpoint"
    path.write_bytes(path.read_bytes()[:24].ljust(4096, b"\0"))
