"""One delay level: its queue, how far it is, and the puts whose result is not known yet."""

from __future__ import annotations

from collections import deque
from enum import Enum, auto
from typing import Final

from duemq.scheduler.levels.runs import Run
from duemq.storage.queues.consume_queue import ConsumeQueue

MAX_RETRY_MS: Final = 60_000
_RETRY_STEP_MS: Final = 100
MAX_RESENDS: Final = 6
"""So often a put whose origin is gone is tried again before it is given up."""


class Status(Enum):
    """RocketMQ's names for how a put stands."""

    RUNNING = auto()
    """Appended, and not known to be on the disk."""
    SUCCESS = auto()
    """Delivered."""
    EXCEPTION = auto()
    """Not appended: it will be sent again."""
    SKIP = auto()
    """Given up, since what was to be delivered is gone."""


class Put:
    """The delivery of messages `start` to `end` (queue offsets) of a level in one append.

    `due_ms`: when the first of them was due. `position`: physical offset that has to be durable for it to be a success.
    `retry_ms`: when an EXCEPTION is sent again; `is_gone`: it failed for want of what was to be delivered. Times in ms
    since the epoch.
    """

    __slots__ = ("due_ms", "end", "is_gone", "position", "resends", "retry_ms", "start", "status")

    def __init__(self, start: int, end: int, due_ms: int) -> None:
        self.start = start
        self.end = end
        self.due_ms = due_ms
        self.is_gone = False
        self.status = Status.RUNNING
        self.position = 0
        self.resends = 0
        self.retry_ms = 0


class OpenRun:
    """A run with the state of its delivery. See `runs.Run`; `due_ms` is when its head is due, None when it has none.
    `delay_limit_ms`: messages of an older, longer table: none is due later than this after it was stored."""

    __slots__ = ("cursor", "delay_limit_ms", "due_ms", "shift_ms", "start")

    def __init__(self, start: int, cursor: int, shift_ms: int = 0, delay_limit_ms: int | None = None) -> None:
        self.start = start
        self.cursor = cursor
        self.shift_ms = shift_ms
        self.delay_limit_ms = delay_limit_ms
        self.due_ms: int | None = None


class Level:
    """See the module. Times are ms since the epoch, offsets queue offsets."""

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
        """The queue's first offset when runs and puts were last brought into its bounds."""
        self.runs = runs
        self.puts: deque[Put] = deque()
        """In order of their puts; those at the head are not settled."""
        self.failed: dict[Put, None] = {}
        """Those of them that are EXCEPTION."""
        self.pending = 0
        """Messages in them."""
        self.is_reading = False
        """Whether a thread reads its records from the disk."""
        self.is_warm = False
        """Whether a thread has read the records that come next."""
        self.retry_ms = 0
        """Before this nothing is delivered: the store takes nothing."""
        self.trouble: str | None = None
        """Why it is late, if it is."""
        self.delivered = 0
        """Messages delivered since start."""
        self.skipped = 0
        """Messages that could not be delivered since start: their record was missing or said no topic."""
        self.late_by_ms = 0
        """How late the last delivery was."""
        self.rate = 0.0
        """Messages delivered a second."""
        self.sampled = 0
        self.warned_at: float | None = None
        self.withdrawn = 0
        """Units in `untried` of messages that were withdrawn, or that recovery found delivered."""

    @property
    def offset(self) -> int:
        """Up to here all is delivered and known to be on the disk, where that is waited for."""
        waiting = [put.start for put in self.puts if put.status in (Status.RUNNING, Status.EXCEPTION)]
        return min(self.runs[0].cursor, *waiting) if waiting else self.runs[0].cursor

    @property
    def waiting(self) -> int:
        """Messages that are not delivered."""
        return max(0, sum(end - start for start, end in self.untried()) - self.withdrawn)

    def untried(self, low: int = 0) -> list[tuple[int, int]]:
        """Where units lie that were not tried yet, or failed: from offsets to others, none before `low`."""
        found = [(run.cursor, end) for run, end in self.spans()]
        found += [(put.start, put.end) for put in self.failed]
        return [(max(low, start), end) for start, end in found if max(low, start) < end]

    @property
    def due_ms(self) -> int | None:
        """When the first message that was not tried yet is due; None without one."""
        return min((run.due_ms for run in self.runs if run.due_ms is not None), default=None)

    @property
    def late_since_ms(self) -> int | None:
        """When the first message that is not delivered was or is due; None without one."""
        times = [put.due_ms for put in self.failed]
        if self.due_ms is not None:
            times.append(self.due_ms)
        return min(times, default=None)

    def spans(self) -> list[tuple[OpenRun, int]]:
        """The runs, each with where it ends: where the next one begins, or the queue ends."""
        ends = [*(run.start for run in self.runs[1:]), self.queue.next_offset]
        return list(zip(self.runs, ends, strict=True))

    def end_of(self, run: OpenRun) -> int:
        """Where a run ends."""
        at = self.runs.index(run) + 1
        return self.runs[at].start if at < len(self.runs) else self.queue.next_offset

    def waiting_from(self, offset: int) -> tuple[OpenRun, int] | None:
        """The first offset from one on, in the queue, at which a message may wait, and the run that has it; None where
        nothing waits behind. A search asks for each of its parts, since runs come and go beside it."""
        # What expired lies before the queue's first unit, and the cursor there as well until the run's head is due.
        offset = max(offset, self.queue.min_offset)
        for run, end in self.spans():
            if offset < end:
                # What was tried and is to be tried again lies before the cursor.
                first = min([run.cursor, *(put.start for put in self.failed if run.start <= put.start < end)])
                if max(offset, first) < end:
                    return run, max(offset, first)
        return None

    def is_held_back(self, max_resends: int) -> bool:
        """Whether nothing more is tried before a put is through that failed: one that the store refused, so that no
        message overtakes another, or one whose record is gone and that failed too often."""
        return any(not put.is_gone or put.resends > max_resends for put in self.failed)

    def add(self, put: Put) -> None:
        """Another put."""
        self.puts.append(put)
        self.pending += put.end - put.start

    def fail(self, put: Put, now_ms: int, *, origin_is_gone: bool) -> None:
        """A try of a put failed. The next comes the later, the more there were; there are only so many where what was
        to be delivered is gone."""
        put.resends += 1
        put.is_gone = origin_is_gone
        if origin_is_gone and put.resends > MAX_RESENDS:
            put.status = Status.SKIP
            self.failed.pop(put, None)
            return
        put.status = Status.EXCEPTION
        put.retry_ms = now_ms + min(put.resends * _RETRY_STEP_MS, MAX_RETRY_MS)
        self.failed[put] = None

    def take_part(self, put: Put, count: int) -> Put:
        """Take the first `count` messages out of a put that failed, or all of it; gives the put that has them, which
        is none of the failed ones any more."""
        if put.start + count == put.end:
            del self.failed[put]
            return put
        part = Put(put.start, put.start + count, put.due_ms)
        part.resends = put.resends
        put.start = part.end
        self.puts.insert(self.puts.index(put), part)
        return part

    def leave_out_before(self, low: int) -> None:
        """Bring runs and failed puts into a queue that begins at `low` now."""
        high = self.queue.next_offset
        for run in self.runs:
            run.start = min(max(run.start, low), high)
            run.cursor = min(max(run.cursor, run.start), high)
        for put in [put for put in self.failed if put.start < low]:
            self.take_part(put, min(put.end, low) - put.start).status = Status.SKIP
        self.low = low
        self.drop_finished()

    def drop_finished(self) -> None:
        """Take what is finished from the head of the puts, never past one that is not, and runs that are done."""
        puts = self.puts
        while puts and puts[0].status in (Status.SUCCESS, Status.SKIP):
            put = puts.popleft()
            self.pending -= put.end - put.start
        while len(self.runs) > 1 and self.runs[0].cursor >= self.runs[1].start and not self._has_put_before(1):
            del self.runs[0]

    def _has_put_before(self, run: int) -> bool:
        return any(put.start < self.runs[run].start for put in self.puts)

    def appended(self) -> list[Run]:
        """The runs as the checkpoint keeps them: what has been appended counts, and what failed starts a run that goes
        no further."""
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
        """Up to here all is delivered once what has been appended is on the disk."""
        runs = self.appended()
        ends = [run.start for run in runs[1:]]
        return next((run.cursor for run, end in zip(runs, ends, strict=False) if run.cursor < end), runs[-1].cursor)

    def split(self, offset: int) -> None:
        """Begin another run at an offset, for messages that follow other rules than those before: today's clock and
        table."""
        for at, (run, end) in enumerate(self.spans()):
            if run.start <= offset and (offset < end or at == len(self.runs) - 1):
                if offset == run.start:
                    run.shift_ms = 0
                    run.delay_limit_ms = None
                else:
                    self.runs.insert(at + 1, OpenRun(offset, max(offset, run.cursor)))
                    run.cursor = min(run.cursor, offset)
                return
