"""One delay level: its queue, its progress, and its puts whose results are not known yet."""

from __future__ import annotations

from collections import deque
from enum import Enum, auto
from typing import Final

from duemq.scheduler.levels.runs import Run
from duemq.storage.queues.consume_queue import ConsumeQueue

MAX_RETRY_MS: Final = 60_000
"""Longest pause before a failed put is tried again, in ms."""
_RETRY_STEP_MS: Final = 100
MAX_RESENDS: Final = 6
"""Number of retries of a put whose records are gone, after which it is given up."""


class PutStatus(Enum):
    """The state of a put, by RocketMQ's names."""

    RUNNING = auto()
    """Appended, and not known to be on the disk."""
    SUCCESS = auto()
    """Delivered."""
    EXCEPTION = auto()
    """Not appended; to be tried again."""
    SKIP = auto()
    """Given up: the records to be delivered are gone."""


class Put:
    """The delivery of messages `start` to `end` (queue offsets) of a level in one append.

    `due_ms`: when the first of them was due. `position`: the physical offset up to which the commitlog must be durable
    for the put to be a SUCCESS. `resends`: number of failed tries. `retry_ms`: when an EXCEPTION is tried again.
    `is_gone`: whether the last try failed because the records to be delivered are gone. Times are ms since the epoch.
    """

    __slots__ = ("due_ms", "end", "is_gone", "position", "resends", "retry_ms", "start", "status")

    def __init__(self, start: int, end: int, due_ms: int) -> None:
        self.start = start
        self.end = end
        self.due_ms = due_ms
        self.is_gone = False
        self.status = PutStatus.RUNNING
        self.position = 0
        self.resends = 0
        self.retry_ms = 0


class OpenRun:
    """A run (see `runs.Run`) with the state of its delivery. `due_ms`: when its head, the message at its cursor, is
    due, ms since the epoch; None without a head. `delay_limit_ms`: for messages of an older table with longer delays,
    the longest time from being stored to being due, in ms."""

    __slots__ = ("cursor", "delay_limit_ms", "due_ms", "shift_ms", "start")

    def __init__(self, start: int, cursor: int, shift_ms: int = 0, delay_limit_ms: int | None = None) -> None:
        self.start = start
        self.cursor = cursor
        self.shift_ms = shift_ms
        self.delay_limit_ms = delay_limit_ms
        self.due_ms: int | None = None


class Level:
    """The state of one level. Times are ms since the epoch, offsets are queue offsets."""

    __slots__ = (
        "delivered",
        "failed",
        "is_reading",
        "is_warm",
        "late_by_ms",
        "low",
        "number",
        "pending",
        "puts",
        "queue",
        "rate",
        "retry_ms",
        "runs",
        "sampled",
        "skipped",
        "trouble",
        "warned_at",
        "withdrawn",
    )

    def __init__(self, number: int, queue: ConsumeQueue, runs: list[OpenRun]) -> None:
        self.number = number
        self.queue = queue
        self.low = queue.min_offset
        """The queue's first offset at the time when runs and puts were last cut to its bounds."""
        self.runs = runs
        self.puts: deque[Put] = deque()
        """Puts in the order in which they were made, from the first unsettled one on."""
        self.failed: dict[Put, None] = {}
        """The puts in state EXCEPTION."""
        self.pending = 0
        """Number of messages in `puts`."""
        self.is_reading = False
        """Whether a thread is reading the level's records from the disk."""
        self.is_warm = False
        """Whether a thread has read the next records."""
        self.retry_ms = 0
        """Time before which nothing is delivered, because the store refused the last put."""
        self.trouble: str | None = None
        """Why the level is late, if it is."""
        self.delivered = 0
        """Number of messages delivered since start."""
        self.skipped = 0
        """Number of messages, since start, that could not be delivered: their record was missing, or did not name a
        queue that accepts messages."""
        self.late_by_ms = 0
        """Lateness of the last delivery, ms."""
        self.rate = 0.0
        """Messages delivered per second."""
        self.sampled = 0
        self.warned_at: float | None = None
        self.withdrawn = 0
        """Number of units within `untried` whose messages were withdrawn, or were found delivered by recovery."""

    @property
    def offset(self) -> int:
        """Queue offset before which every message is delivered, and durably so if the level waits for that."""
        waiting = [put.start for put in self.puts if put.status in (PutStatus.RUNNING, PutStatus.EXCEPTION)]
        return min(self.runs[0].cursor, *waiting) if waiting else self.runs[0].cursor

    @property
    def waiting(self) -> int:
        """Number of undelivered messages."""
        return max(0, sum(end - start for start, end in self.untried()) - self.withdrawn)

    def untried(self, low: int = 0) -> list[tuple[int, int]]:
        """Return the ranges (start, end) of units that were not tried yet, or whose put failed; none before `low`."""
        found = [(run.cursor, end) for run, end in self.spans()]
        found += [(put.start, put.end) for put in self.failed]
        return [(max(low, start), end) for start, end in found if max(low, start) < end]

    @property
    def due_ms(self) -> int | None:
        """The time when the first message that was not tried yet is due; None if there is none."""
        return min((run.due_ms for run in self.runs if run.due_ms is not None), default=None)

    @property
    def late_since_ms(self) -> int | None:
        """The time when the first undelivered message was or will be due; None if there is none."""
        times = [put.due_ms for put in self.failed]
        if self.due_ms is not None:
            times.append(self.due_ms)
        return min(times, default=None)

    def spans(self) -> list[tuple[OpenRun, int]]:
        """Return the runs, each with its end: the start of the next run, or the end of the queue."""
        ends = [*(run.start for run in self.runs[1:]), self.queue.next_offset]
        return list(zip(self.runs, ends, strict=True))

    def end_of(self, run: OpenRun) -> int:
        """Return the queue offset at which a run ends."""
        at = self.runs.index(run) + 1
        return self.runs[at].start if at < len(self.runs) else self.queue.next_offset

    def waiting_from(self, offset: int) -> tuple[OpenRun, int] | None:
        """Return the first offset, at or behind `offset`, at which a message may wait, with its run; None if no message
        waits there. A search calls this again for each of its parts, since runs come and go in the meantime."""
        # Expired units lie before the queue's first unit, and so may the cursor, until the run's head is due.
        offset = max(offset, self.queue.min_offset)
        for run, end in self.spans():
            if offset < end:
                # Units that will be retried lie before the cursor.
                first = min([run.cursor, *(put.start for put in self.failed if run.start <= put.start < end)])
                if max(offset, first) < end:
                    return run, max(offset, first)
        return None

    def is_held_back(self, max_resends: int) -> bool:
        """Whether a failed put blocks the level. A put that the store refused does, so that messages stay in order; a
        put whose records are gone does after more than `max_resends` failed tries."""
        return any(not put.is_gone or put.resends > max_resends for put in self.failed)

    def add(self, put: Put) -> None:
        """Append a put."""
        self.puts.append(put)
        self.pending += put.end - put.start

    def fail(self, put: Put, now_ms: int, *, origin_is_gone: bool) -> None:
        """Note a failed try of a put. The pause before the next try grows with each failure; if the records are gone,
        the put is given up after MAX_RESENDS retries."""
        put.resends += 1
        put.is_gone = origin_is_gone
        if origin_is_gone and put.resends > MAX_RESENDS:
            put.status = PutStatus.SKIP
            self.failed.pop(put, None)
            return
        put.status = PutStatus.EXCEPTION
        put.retry_ms = now_ms + min(put.resends * _RETRY_STEP_MS, MAX_RETRY_MS)
        self.failed[put] = None

    def take_part(self, put: Put, count: int) -> Put:
        """Split the first `count` messages off a failed put, which may be all of them. Return the put that has them; it
        is not in `failed`."""
        if put.start + count == put.end:
            del self.failed[put]
            return put
        part = Put(put.start, put.start + count, put.due_ms)
        part.resends = put.resends
        put.start = part.end
        self.puts.insert(self.puts.index(put), part)
        return part

    def leave_out_before(self, low: int) -> None:
        """Cut runs and failed puts to the bounds of the queue, which now begins at `low`."""
        high = self.queue.next_offset
        for run in self.runs:
            run.start = min(max(run.start, low), high)
            run.cursor = min(max(run.cursor, run.start), high)
        for put in [put for put in self.failed if put.start < low]:
            self.take_part(put, min(put.end, low) - put.start).status = PutStatus.SKIP
        self.low = low
        self.drop_finished()

    def drop_finished(self) -> None:
        """Drop the finished puts before the first unfinished one, and the finished runs at the beginning."""
        puts = self.puts
        while puts and puts[0].status in (PutStatus.SUCCESS, PutStatus.SKIP):
            put = puts.popleft()
            self.pending -= put.end - put.start
        while len(self.runs) > 1 and self.runs[0].cursor >= self.runs[1].start and not self._has_put_before(1):
            del self.runs[0]

    def _has_put_before(self, run: int) -> bool:
        return any(put.start < self.runs[run].start for put in self.puts)

    def appended(self) -> list[Run]:
        """Return the runs as the checkpoint keeps them: appended messages count as delivered, and the cursor of a run
        stops at a failed put, behind which another run begins."""
        if not self.failed:
            return [Run(run.start, max(run.start, run.cursor), run.shift_ms, run.delay_limit_ms) for run in self.runs]
        failed = sorted((put.start, put.end) for put in self.failed)
        result = []
        for run, end in self.spans():
            start = run.start
            for put_start, put_end in failed:
                if run.start <= put_start < end:
                    result.append(Run(start, put_start, run.shift_ms, run.delay_limit_ms))
                    start = put_end
            result.append(Run(start, max(start, run.cursor), run.shift_ms, run.delay_limit_ms))
        return result

    @property
    def appended_offset(self) -> int:
        """Queue offset before which every message is delivered once all appended records are durable."""
        runs = self.appended()
        ends = [run.start for run in runs[1:]]
        return next((run.cursor for run, end in zip(runs, ends, strict=False) if run.cursor < end), runs[-1].cursor)

    def split(self, offset: int) -> None:
        """Begin another run at an offset. Its messages follow the present clock and table, unlike those before it."""
        for at, (run, end) in enumerate(self.spans()):
            if run.start <= offset and (offset < end or at == len(self.runs) - 1):
                if offset == run.start:
                    run.shift_ms = 0
                    run.delay_limit_ms = None
                else:
                    self.runs.insert(at + 1, OpenRun(offset, max(offset, run.cursor)))
                    run.cursor = min(run.cursor, offset)
                return
