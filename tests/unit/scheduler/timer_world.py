"""A store in memory with timers, and a clock that tests move."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from protocol import properties, timer_properties
from protocol.record import StoredMessage
from scheduler.pending import Pending
from scheduler.timer_config import TimerConfig
from scheduler.timer_keys import key_hash
from scheduler.timers import Timers
from storage.clock import ManualClock
from storage.store import MessageStore, StoreConfig
from tests.crash.simulated_files import SimulatedFiles

HOST = b"\x7f\0\0\x01\0\0\x04\xd2"
START_MS = 1_700_000_000_000


class _NoLevels:
    def due_times(self) -> Iterator[Any]:
        return iter(())


class TimerWorld:
    """A store with timers."""

    def __init__(
        self,
        config: TimerConfig | None = None,
        *,
        segment_size: int = 1 << 20,
        start_ms: int = START_MS,
    ) -> None:
        self.files = SimulatedFiles()
        self.clock = ManualClock(start_ms)
        self.config = config or TimerConfig(log_segment_size=5200)
        self.segment_size = segment_size
        self.wakes = 0
        self.sent = 0
        self.last_physical_offset = 0
        self.open()

    def open(self) -> None:
        """Open, also after a kill -9: what was written is there, what was in memory is not."""
        self.files.locked.clear()
        config = StoreConfig("/s", commitlog_segment_size=self.segment_size, queue_segment_size=2000)
        self.store = MessageStore(config, self.files, self.clock, ("127.0.0.1", 10911), lambda level, stored: stored)
        self.recovered = recovered = self.store.open()
        self.timers = Timers(self.store, self.clock, self.config)
        self.timers.load(recovered)
        self.timers.on_earlier = self.wake

    def close(self) -> None:
        """Stop cleanly."""
        self.timers.hand_over()
        self.store.close()
        self.timers.close()

    def wake(self) -> None:
        self.wakes += 1

    def checkpoint(self) -> None:
        for _ in self.store.write_queues():
            pass
        job = self.store.plan_checkpoint()
        job.run()
        self.store.note_checkpoint(job)

    def send(self, due_ms: int, body: bytes | None = None, text: str = "", topic: str = "orders") -> int:
        """Schedule a message as the send handler does; gives its physical offset."""
        self.sent += 1
        assert self.timers.refusal(due_ms, self.clock.now_ms()) is None
        body = f"m{self.sent}".encode() if body is None else body
        named = f"{text}UNIQ_KEY\x01K{self.sent}\x02TIMER_DELIVER_MS\x01{due_ms}"
        full = f"{named}\x02TIMER_OUT_MS\x01{timer_properties.out_ms(due_ms)}\x02REAL_TOPIC\x01{topic}\x02REAL_QID\x013"
        appender = self.store.appender
        appender.begin()
        offset = appender.add(
            self.timers.queue,
            body,
            full.encode(),
            due_ms,
            self.clock.now_ms(),
            HOST,
            prepared_transaction_offset=due_ms,
        )
        self.timers.staged(offset, topic)
        appender.commit()
        return appender.last_physical_offset

    def send_instead(self, due_ms: int, key: str, body: bytes | None = None, topic: str = "orders") -> int:
        """Schedule a message that replaces the one of its key as the send handler does; gives how many it replaced."""
        timers, appender = self.timers, self.store.appender
        timers.count()
        while not timers.is_counted:
            timers.step()
        self.sent += 1
        body = f"m{self.sent}".encode() if body is None else body
        unique_key = f"K{self.sent}"

        def stage(origin: int) -> None:
            now_ms = appender.begin()
            due = max(due_ms, now_ms)
            text = f"UNIQ_KEY\x01{unique_key}\x02KEYS\x01{key}\x02TIMER_REPLACE\x01true\x02TIMER_DELIVER_MS\x01{due}"
            text += f"\x02TIMER_OUT_MS\x01{timer_properties.out_ms(due)}\x02REAL_TOPIC\x01{topic}\x02REAL_QID\x013"
            if origin:
                text += "\x02TIMER_ROLL_TIMES\x011"
            offset = appender.add(
                timers.queue, body, text.encode(), due, now_ms, HOST, prepared_transaction_offset=origin or due
            )
            timers.staged(offset, topic, key_hash(key))
            self.last_physical_offset = appender.last_physical_offset

        return timers.changes.replace(topic, key, unique_key, due_ms, stage)

    def curve(self, begin_ms: int, step_ms: int, steps: int) -> list[int]:
        """How many messages are due when, as operators see it."""
        pending = Pending(self.store, self.timers, _NoLevels(), self.clock)  # type: ignore[arg-type]
        for counts in pending.curve(begin_ms, step_ms, steps):
            if counts is not None:
                return counts
        raise AssertionError("no curve")

    def run(self) -> int | None:
        """Step until there is nothing to do now; gives when there will be."""
        for _ in range(100_000):
            due = self.timers.step()
            if due is None or due > self.clock.now_ms():
                return due
        raise AssertionError("never done")

    def pass_time(self, ms: int) -> None:
        """Let time pass, doing at its time what is to be done."""
        end = self.clock.now_ms() + ms
        while (due := self.run()) is not None and due <= end:
            self.clock.advance(due - self.clock.now_ms())
        self.clock.advance(end - self.clock.now_ms())
        self.run()

    def delivered(self, topic: str = "orders") -> list[StoredMessage]:
        queue = self.store.queue(topic, 3)
        if queue is None:
            return []
        units = [queue.unit(offset) for offset in range(queue.min_offset, queue.next_offset)]
        messages = [self.store.message_at(unit[0], unit[1]) for unit in units if unit is not None]
        return [message for message in messages if message is not None]

    def bodies(self, topic: str = "orders") -> list[bytes]:
        return [message.body for message in self.delivered(topic)]

    def lateness(self, topic: str = "orders") -> list[int]:
        """How late each was stored, ms."""
        result = []
        for message in self.delivered(topic):
            due = properties.get(message.properties_text, "TIMER_DELIVER_MS")
            assert due is not None
            result.append(message.store_timestamp - int(due))
        return result
