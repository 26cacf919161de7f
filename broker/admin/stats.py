"""Counters, and rates over the last 10 s, minute and ten minutes, as shown by brokerStatus.

Nothing is counted per stored message: the number follows from the appender.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from typing import Final, NamedTuple

from duemq.broker.admin.stats_items import StatsItems
from duemq.protocol.requests.headers import PullMessage
from duemq.storage.clock import Clock
from duemq.storage.log.append import Appender
from duemq.storage.queues.pull import Pulled, PullStatus

SAMPLE_SECONDS: Final = 1.0
_WINDOWS: Final = (10, 60, 600)
_DAY_MS: Final = 86_400_000
PUT_TIME_LIMITS_MS: Final = (0, 10, 50, 100, 200, 500, 1000, 2000, 3000, 4000, 5000, 10_000)
"""Bounds, in ms, of the buckets in which RocketMQ counts write times; the first bucket is for writes below 1 ms."""


class _Sample(NamedTuple):
    time: float
    put: int
    found: int
    missed: int
    transferred: int


class BrokerStats:
    """The broker's activity since its start. Times are in ms since the epoch."""

    def __init__(self, appender: Appender, clock: Clock, items: StatsItems) -> None:
        self._appender = appender
        self._clock = clock
        self.start_ms = clock.now_ms()
        self._started = clock.monotonic()
        self.found = 0
        """Pulls that found messages."""
        self.missed = 0
        """Pulls that found none."""
        self.transferred = 0
        """Messages delivered to consumers."""
        self.put_times = [0] * (len(PUT_TIME_LIMITS_MS) + 1)
        """Number of writes to the commitlog in each bucket of write time."""
        self.put_time_max_ms = 0
        self.put_failed = 0
        """Messages refused because a write failed."""
        self._samples: deque[_Sample] = deque(maxlen=_WINDOWS[-1] + 1)
        self.items = items
        """Counts by topic and group."""
        self._day_starts = [(0, 0), (0, 0)]
        self._day = self.start_ms // _DAY_MS
        self.sample()

    @property
    def running_ms(self) -> int:
        """How long the broker has been running, in ms."""
        return int((self._clock.monotonic() - self._started) * 1000)

    def pulled(self, header: PullMessage, found: Pulled) -> None:
        """Count a pull."""
        if found.status is not PullStatus.FOUND:
            self.missed += 1
            return
        self.found += 1
        self.transferred += found.count
        self.items.pulled(header.topic, header.consumer_group, found.count, found.size)

    def add_write(self, seconds: float) -> None:
        """Count a write to the commitlog."""
        if seconds < 0.001:
            self.put_times[0] += 1
            return
        ms = int(seconds * 1000)
        self.put_times[bisect_right(PUT_TIME_LIMITS_MS, ms)] += 1
        self.put_time_max_ms = max(self.put_time_max_ms, ms)

    def put_time_percentile(self, part: float) -> float:
        """Return an upper bound, in ms, of the time that this fraction of all writes took, from the buckets."""
        rest = sum(self.put_times) * (1 - part)
        for bucket in range(len(self.put_times) - 1, 0, -1):
            rest -= self.put_times[bucket]
            if rest < 0:
                return float(PUT_TIME_LIMITS_MS[bucket] if bucket < len(PUT_TIME_LIMITS_MS) else self.put_time_max_ms)
        return 0.0

    def sample(self) -> None:
        """Take a sample; called every SAMPLE_SECONDS."""
        now = self._clock.monotonic()
        self._samples.append(_Sample(now, self._appender.appended, self.found, self.missed, self.transferred))
        self.items.step()
        day = self._clock.now_ms() // _DAY_MS
        if day > self._day:
            self._day = day
            self._day_starts = [self._day_starts[1], (self._appender.appended, self.transferred)]

    def rates(self, field: str) -> str:
        """Return the rates of put, found, missed, transferred or total, over the three windows: "a b c"."""
        return " ".join(str(self._rate(field, window)) for window in _WINDOWS)

    def _rate(self, field: str, window: int) -> float:
        last = self._samples[-1]
        first = self._samples[max(0, len(self._samples) - 1 - window)]
        elapsed = last.time - first.time
        if elapsed <= 0:
            return 0.0
        if field == "total":
            return (last.found + last.missed - first.found - first.missed) / elapsed
        return float((getattr(last, field) - getattr(first, field)) / elapsed)

    def day_starts(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return the messages stored and delivered up to yesterday's morning, and up to today's."""
        return self._day_starts[0], self._day_starts[1]
