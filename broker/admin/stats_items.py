"""Counts by topic and group over the last minute, hour and day, as VIEW_BROKER_STATS_DATA (315) shows them.

The names of the counts and their keys are those of RocketMQ's BrokerStatsManager. Nothing is counted per message:
stored messages are counted once a second from the units of the consume queues, delivered ones once per pull.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any, Final

import numpy as np

from duemq.broker.net.cold_reads import ColdReads
from duemq.storage.clock import Clock
from duemq.storage.errors import NotInMemory
from duemq.storage.log.append import Appender
from duemq.storage.log.copies import UNITS
from duemq.storage.queues.consume_queue import ConsumeQueue

TOPIC_PUT_NUMS: Final = "TOPIC_PUT_NUMS"
"""Messages stored for a topic. As in RocketMQ, a delayed message counts for SCHEDULE_TOPIC_XXXX or the timer topic when
it is sent, and for its own topic when it is delivered."""
TOPIC_PUT_SIZE: Final = "TOPIC_PUT_SIZE"
GROUP_GET_NUMS: Final = "GROUP_GET_NUMS"
"""Messages that a group pulled of a topic; the key is topic@group."""
GROUP_GET_SIZE: Final = "GROUP_GET_SIZE"
SEND_BACK_NUMS: Final = "SNDBCK_PUT_NUMS"
"""Messages of a topic that a group sent back; the key is topic@group."""
BROKER_PUT_NUMS: Final = "BROKER_PUT_NUMS"
"""Messages stored by the broker; the key is the name of its cluster."""
BROKER_GET_NUMS: Final = "BROKER_GET_NUMS"

_PERIODS: Final = ((10.0, 6), (600.0, 6), (3600.0, 24))
"""The windows minute, hour and day: the length of their periods in seconds, and the number of past periods kept."""
_FIRST_ROWS: Final = 16


class _Window:
    """Where a window's counts are in the table. `current`: the column of its current period; `past`: those of past
    periods, used in turn."""

    def __init__(self, seconds: float, current: int, past: range, now: float) -> None:
        self.seconds = seconds
        self.current = current
        self.past = past
        self.begins = deque([now], maxlen=len(past) + 1)
        """When the kept periods began; the last one is the current period."""
        self._ended = 0

    def end_period(self, now: float) -> int:
        """Begin a new period; return the column for the counts of the one that ends."""
        self.begins.append(now)
        self._ended += 1
        return self.past[self._ended % len(self.past)]


class CountTable:
    """Counts of messages, bytes and calls by key, in the last minute, hour and day. A key takes about 1 KB, for a day
    after its last count. Times are by the monotonic clock, in s."""

    def __init__(self, now: float) -> None:
        self._current: dict[str, list[int]] = {}
        """The counts since the current period of ten seconds began."""
        self._rows: dict[str, int] = {}
        self._free: list[int] = []
        self._windows: list[_Window] = []
        columns = 0
        for seconds, periods in _PERIODS:
            self._windows.append(_Window(seconds, columns, range(columns + 1, columns + 1 + periods), now))
            columns += 1 + periods
        # By row and column: messages, bytes, calls. The column of the minute's current period stays empty.
        self._counts = np.zeros((0, columns, 3), np.int64)

    def __len__(self) -> int:
        """Return the number of keys that take memory."""
        return len(self._rows.keys() | self._current.keys())

    def add(self, key: str, messages: int, size: int, calls: int) -> None:
        """Add to the counts of a key."""
        counts = self._current.get(key)
        if counts is None:
            self._current[key] = [messages, size, calls]
        else:
            counts[0] += messages
            counts[1] += size
            counts[2] += calls

    def step(self, now: float) -> None:
        """End the periods whose time has passed; to be called each second. The counts of a period that ends are added
        to the current period of the next longer window."""
        minute, hour, day = self._windows
        if now - minute.begins[-1] < minute.seconds:
            return
        self._end_ten_seconds(minute.end_period(now), hour.current)
        for window, longer in ((hour, day), (day, None)):
            if now - window.begins[-1] < window.seconds:
                return
            ended = self._counts[:, window.current]
            if longer is not None:
                self._counts[:, longer.current] += ended
            self._counts[:, window.end_period(now)] = ended
            ended[:] = 0
        self._free_rows()

    def _end_ten_seconds(self, column: int, longer: int) -> None:
        self._counts[:, column] = 0
        if self._current:
            rows = np.fromiter(map(self._row, self._current), np.intp, len(self._current))
            counts = np.array(list(self._current.values()), np.int64)
            self._counts[rows, column] = counts
            self._counts[rows, longer] += counts
            self._current = {}

    def _row(self, key: str) -> int:
        row = self._rows.get(key)
        if row is None:
            if not self._free:
                old = len(self._counts)
                more = np.zeros((max(_FIRST_ROWS, old), *self._counts.shape[1:]), np.int64)
                self._counts = np.concatenate((self._counts, more))
                self._free = list(range(len(self._counts) - 1, old - 1, -1))
            self._rows[key] = row = self._free.pop()
        return row

    def _free_rows(self) -> None:
        used = set(np.flatnonzero(self._counts.any(axis=(1, 2))).tolist())
        for key in [key for key, row in self._rows.items() if row not in used]:
            self._free.append(self._rows.pop(key))

    def remove(self, key: str) -> None:
        """Forget the counts of a key."""
        self._current.pop(key, None)
        row = self._rows.pop(key, None)
        if row is not None:
            self._counts[row] = 0
            self._free.append(row)

    def windows(self, key: str, now: float) -> list[tuple[list[int], float]] | None:
        """Return the messages, bytes and calls of a key in the last minute, hour and day, each with the seconds that
        it covers; None for a key that was not counted."""
        row = self._rows.get(key)
        current = np.array(self._current.get(key, (0, 0, 0)), np.int64)
        found = []
        for window in self._windows:
            past = 0
            if row is not None:
                # The counts of a shorter window's current period reach the longer windows only when that period ends.
                current = current + self._counts[row, window.current]
                past = self._counts[row, window.past].sum(axis=0)
            found.append(((current + past).tolist(), now - window.begins[0]))
        return found if any(counts[2] for counts, _ in found) else None


class StatsItems:
    """The tables of counts of one broker."""

    def __init__(self, appender: Appender, clock: Clock, reads: ColdReads, cluster: str) -> None:
        """`cluster`: the name of the broker's cluster, which is the key of the counts of the whole broker."""
        self._appender = appender
        self._reads = reads
        self._uncounted: list[tuple[ConsumeQueue, int]] = []
        """Queues with messages that are not counted yet, and the queue offset of the first of these."""
        self._clock = clock
        self._cluster = cluster
        now = clock.monotonic()
        self._put = CountTable(now)
        self._got = CountTable(now)
        self._sent_back = CountTable(now)
        self._broker_put = CountTable(now)
        self._broker_got = CountTable(now)
        self._tables = (self._put, self._got, self._sent_back, self._broker_put, self._broker_got)
        # By name: the table, and which of the counts of a key in it is shown.
        self._named = {
            TOPIC_PUT_NUMS: (self._put, 0),
            TOPIC_PUT_SIZE: (self._put, 1),
            GROUP_GET_NUMS: (self._got, 0),
            GROUP_GET_SIZE: (self._got, 1),
            SEND_BACK_NUMS: (self._sent_back, 0),
            BROKER_PUT_NUMS: (self._broker_put, 0),
            BROKER_GET_NUMS: (self._broker_got, 0),
        }

    def pulled(self, topic: str, group: str, messages: int, size: int) -> None:
        """Count a pull of a group that found messages; `size` in bytes."""
        self._got.add(f"{topic}@{group}", messages, size, 1)
        self._broker_got.add(self._cluster, messages, size, 1)

    def sent_back(self, topic: str, group: str) -> None:
        """Count a message that a group sent back."""
        self._sent_back.add(f"{topic}@{group}", 1, 0, 1)

    def step(self) -> None:
        """Count the messages that were stored since the last step, and end periods whose time has passed; to be called
        each second."""
        self._uncounted += self._appender.take_uncounted()
        for queue, start in self._uncounted:
            messages = queue.next_offset - start
            size = self._size(queue, start, messages)
            self._put.add(queue.topic, messages, size, messages)
            self._broker_put.add(self._cluster, messages, size, messages)
        self._uncounted.clear()
        now = self._clock.monotonic()
        for table in self._tables:
            table.step(now)

    def _size(self, queue: ConsumeQueue, start: int, messages: int) -> int:
        """Return the bytes of new records, from their units. Those units were in memory a second ago. If they no longer
        are, the event loop does not wait for them: the size is computed from the mean size of records."""
        try:
            units = self._reads.at_once(queue.read, start, messages)
            return int(np.frombuffer(units, UNITS)["size"].sum())
        except NotInMemory:
            return messages * self._appender.appended_bytes // max(1, self._appender.appended)

    def remove_topic(self, topic: str, groups: Iterable[str]) -> None:
        """Forget the counts of a topic that is about to be deleted, and those of the groups that have read it."""
        self._uncounted += self._appender.take_uncounted()
        self._uncounted = [(queue, start) for queue, start in self._uncounted if queue.topic != topic]
        self._put.remove(topic)
        for group in groups:
            self._got.remove(f"{topic}@{group}")
            self._sent_back.remove(f"{topic}@{group}")

    def group_rate(self, topic: str, group: str) -> float:
        """Return the messages per second delivered to a group over the last minute."""
        now = self._clock.monotonic()
        windows = self._got.windows(f"{topic}@{group}", now)
        if windows is None or windows[0][1] <= 0:
            return 0.0
        counts, seconds = windows[0]
        return counts[0] / seconds

    def view(self, name: str, key: str) -> dict[str, dict[str, Any]] | None:
        """Return a count as RocketMQ's BrokerStatsData: statsMinute, statsHour and statsDay, each with `sum` (messages
        or bytes), `tps` (the same per second) and `avgpt` (the same per call; a stored message counts as a call).
        Returns None for a name or key that was not counted in the last day."""
        if name not in self._named:
            return None
        self.step()
        table, which = self._named[name]
        windows = table.windows(key, self._clock.monotonic())
        if windows is None:
            return None
        return {
            f"stats{window}": {
                "avgpt": counts[which] / counts[2] if counts[2] else 0.0,
                "sum": counts[which],
                "tps": counts[which] / seconds if seconds > 0 else 0.0,
            }
            for window, (counts, seconds) in zip(("Day", "Hour", "Minute"), reversed(windows), strict=True)
        }
