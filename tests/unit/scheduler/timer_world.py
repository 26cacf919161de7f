"""A store in memory with timers and levels, and a clock that tests move."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TypeVar

from duemq.protocol.records import properties
from duemq.protocol.records.record import StoredMessage
from duemq.scheduler.levels.delivery import DeliveryConfig
from duemq.scheduler.levels.table import DelayLevels
from duemq.scheduler.search import WaitingMessages
from duemq.scheduler.timers.config import Cancelled, TimerConfig
from duemq.scheduler.timers.service import TimerState
from duemq.storage.budget import UNLIMITED, Budget
from duemq.storage.clock import ManualClock, look
from duemq.storage.current import Current
from duemq.storage.durability.retention import RetentionConfig
from duemq.storage.queues.pull import ColdRead
from duemq.storage.store import StoreConfig
from tests.crash.simulated_files import SimulatedFiles
from tests.support.messages import HOST
from tests.support.store import NOTHING_GOES, Assembly

T = TypeVar("T")

START_MS = 1_700_000_000_000
ANY_HOUR = ";".join(f"{hour:02}" for hour in range(24))
"""For `RetentionConfig.delete_when`: files may be deleted in each hour of the day."""


class TimerWorld:
    """A store with timers, and with levels for tests that want some."""

    def __init__(
        self,
        config: TimerConfig | None = None,
        *,
        segment_size: int = 1 << 20,
        start_ms: int = START_MS,
        levels: str = "1s",
        retention: RetentionConfig = NOTHING_GOES,
    ) -> None:
        self.files = SimulatedFiles()
        self.clock = ManualClock(start_ms)
        self.settings = Current(config or TimerConfig(log_segment_size=5200))
        self.delivery = Current(DeliveryConfig())
        self.segment_size = segment_size
        self.table = DelayLevels(levels)
        self.retention = retention
        self.budget: Callable[[], Budget] = lambda: UNLIMITED
        """The budget of each step."""
        self.wakes = 0
        self.sent = 0
        self.last_physical_offset = 0
        self.open()

    @property
    def config(self) -> TimerConfig:
        """The settings in force."""
        return self.settings.value

    def open(self) -> None:
        """Open, also after a kill -9: written data is there, data in memory is lost."""
        self.files.after_kill()
        config = StoreConfig("/s", commitlog_segment_size=self.segment_size, queue_segment_size=2000)
        opened = Assembly(
            self.files,
            config,
            self.clock,
            table=self.table,
            delivery=self.delivery,
            timers=self.settings,
            wake=self.wake,
            retention=self.retention,
        )
        opened.take_over()
        self.store, self.recovered, self.owned = opened.store, opened.recovered, opened.owned
        self.levels, self.timers, self.sender = opened.levels, opened.timers, opened.sender
        self.pending = WaitingMessages(self.store, self.timers, self.levels)

    def close(self) -> None:
        """Stop cleanly."""
        self.hand_over()
        self.owned.stop()
        self.timers.close()

    def hand_over(self) -> None:
        """Leave the timers' files so that Apache's broker can go on with them."""
        while self.levels.hand_over_next() or self.timers.hand_over_next(self.now_ms):
            pass

    def wake(self) -> None:
        self.wakes += 1

    def checkpoint(self) -> None:
        self.owned.checkpoint()

    def checkpoint_or_not(self) -> None:
        """Make a checkpoint, unless a file cannot be read."""
        with suppress(OSError):
            self.owned.checkpoint()

    @property
    def now_ms(self) -> int:
        return self.clock.now_ms()

    # --- sending

    def send(self, due_ms: int, body: bytes | None = None, text: str = "", topic: str = "orders") -> int:
        """Schedule a message as the send handler does; return its physical offset."""
        assert self.timers.refusal(due_ms, self.now_ms) is None
        body = self._body(body)
        return self.sender.timer(due_ms, body, f"{text}UNIQ_KEY\x01K{self.sent}", topic, born_ms=self.now_ms)

    def schedule(self, level: int, body: bytes | None = None, text: str = "", topic: str = "orders") -> int:
        """Put a message into a level as the send handler does; return its physical offset."""
        body = self._body(body)
        return self.sender.level(level, body, f"{text}UNIQ_KEY\x01K{self.sent}", topic)

    def _body(self, body: bytes | None) -> bytes:
        """The body of the next message."""
        self.sent += 1
        return f"m{self.sent}".encode() if body is None else body

    def put(self, text: str, body: bytes = b"0") -> None:
        """Append a record to the timer topic as Apache's broker does: its unit has the hash of its tags."""
        appender = self.store.appender
        appender.begin(self.now_ms)
        appender.add(self.timers.queue, body, text.encode(), 77, 7, HOST)
        appender.commit()

    def send_instead(self, due_ms: int, key: str, body: bytes | None = None, topic: str = "orders") -> int:
        """Schedule a message that replaces those of its key, as the send handler does; return the number replaced."""
        self.timers.count()
        while not self.timers.is_counted:
            self.step()
        body = self._body(body)
        replaced, self.last_physical_offset = self.sender.replace(due_ms, key, f"K{self.sent}", body, topic)
        return replaced

    # --- changing and listing

    def cancel(self, physical_offset: int) -> Cancelled:
        return self._outcome(lambda: self.pending.cancel(physical_offset, self.now_ms))

    def reschedule(self, physical_offset: int, due_ms: int) -> tuple[Cancelled, int | None]:
        """Reschedule a message; return the outcome and the physical offset of the record by which it waits then."""
        result = self._outcome(lambda: self.pending.reschedule(physical_offset, due_ms, self.now_ms))
        return result, self.store.appender.last_physical_offset if result is Cancelled.CANCELLED else None

    def _outcome(self, change: Callable[[], Cancelled | None]) -> Cancelled:
        """Run a change as the handlers do it; return its outcome."""
        while (result := change()) is None:
            while not self.timers.changes.ids.is_complete:
                read = self.timers.changes.ids.look(self.now_ms)
                if read is not None:
                    read.run()
        return result

    def keep(self) -> int:
        """Append all waiting messages once more, as if all files were about to go; return their number."""
        count = 0
        while (was_needed := self.timers.keep_next(self.store.log.end, look(self.clock))) is not None:
            count += was_needed
        return count

    def curve(self, begin_ms: int, step_ms: int, steps: int, topic: str | None = None) -> list[int]:
        """The number of due messages per interval, as operators see it."""
        return last(self.pending.curve(begin_ms, step_ms, steps, self.now_ms, topic))

    def state(self) -> TimerState:
        return self.timers.state(self.now_ms)

    # --- time

    def step(self, budget: Budget | None = None) -> int | None:
        """Take one step of the timers; return the time of their next work."""
        return self.timers.step(look(self.clock), budget or self.budget())

    def step_levels(self) -> int | None:
        """Take one step of the levels; return the time of their next work."""
        return self.levels.step(look(self.clock), self.budget())

    def run(self) -> int | None:
        """Step until there is no work left now; return the time of the next work."""
        for _ in range(100_000):
            dues = [due for due in (self.step(), self.step_levels()) if due is not None]
            if not dues or min(dues) > self.now_ms:
                return min(dues, default=None)
        raise AssertionError("never done")

    def pass_time(self, ms: int) -> None:
        """Let time pass, doing all work at its time."""
        end = self.now_ms + ms
        while (due := self.run()) is not None and due <= end:
            self.clock.advance(due - self.now_ms)
        self.clock.advance(end - self.now_ms)
        self.run()

    # --- results

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
        """Lateness of each stored message, ms."""
        result = []
        for message in self.delivered(topic):
            due = properties.get(message.properties_text, "TIMER_DELIVER_MS")
            assert due is not None
            result.append(message.store_timestamp - int(due))
        return result


def last(steps: Iterator[T | ColdRead | None]) -> T:
    """Return the result at the end of a search, and check that there is none before."""
    *nothing, result = steps
    assert nothing == [None] * len(nothing)
    assert result is not None
    assert not isinstance(result, ColdRead)
    return result
