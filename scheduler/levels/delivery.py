"""The two paths by which the due messages of a level are delivered, and the results of their puts.

Sync: after each put, the level waits for its result. Async: further puts follow while results are awaited, up to a
limit; they are settled in order. If results are not awaited (ASYNC_FLUSH), each is known immediately.

Keeps invariant 13 of ARCHITECTURE.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import structlog

from duemq.scheduler.delivery.batches import Batches, Kind, Outcome
from duemq.scheduler.levels.deliver_times import LevelTimes
from duemq.scheduler.levels.level import Level, OpenRun, Put, PutStatus
from duemq.scheduler.waiting import is_message
from duemq.storage.current import Current
from duemq.storage.errors import NotInMemory, StoreError
from duemq.storage.queues.pull import ReadCold
from duemq.storage.store import MessageStore

if TYPE_CHECKING:
    from numpy.typing import NDArray

log = structlog.get_logger(__name__)

REFUSED_RETRY_MS: Final = 100
"""Time, in ms, after which the sync path tries again when the store has refused a put."""
_WARM_UNITS: Final = 8192
_COUNT_UNITS: Final = 32_768
"""Number of units that are counted in one go: few enough to stay in the processor's cache."""


@dataclass
class DeliveryConfig:
    """Settings of the delivery, which may change while the broker runs. RocketMQ's names are given where they
    exist."""

    is_async: bool = False
    """enableScheduleAsyncDeliver: whether to use the async path."""
    pending_limit: int = 2000
    """scheduleAsyncDeliverMaxPendingLimit: most messages of a level whose results are awaited."""
    max_resends: int = 3
    """scheduleAsyncDeliverMaxResendNum2Blocked: a put whose records are gone blocks its level after more resends."""
    batch_size: int = 512
    """scheduleDeliverBatchSize: most messages in one put."""
    warn_ms: int = 1000
    """scheduleLatenessWarnMillis: lateness in ms from which on a warning about a level is logged."""
    save_interval: float = 10.0
    """flushDelayOffsetInterval, but in seconds: delayOffset.json is written with the first checkpoint after this
    time."""


class LevelDelivery:
    """Delivers the due messages of a level, one batch (put) in each call."""

    def __init__(
        self,
        store: MessageStore,
        batches: Batches,
        times: LevelTimes,
        config: Current[DeliveryConfig],
        *,
        is_awaited: bool,
        read_cold: ReadCold | None,
        on_ready: Callable[[], None],
    ) -> None:
        """Prepare the delivery. `is_awaited`: whether a put is a SUCCESS only after `note_flushed`. `read_cold`: has a
        thread read records from the disk; if it is None, delivery itself waits for the disk. `on_ready`: called when
        such a read is done and a level can continue."""
        self._store = store
        self._batches = batches
        self._times = times
        self._config = config
        self._is_awaited = is_awaited
        self._read_cold = read_cold
        self._on_ready = on_ready

    @property
    def config(self) -> DeliveryConfig:
        """The settings in force."""
        return self._config.value

    def next_times(self, level: Level) -> Iterator[int]:
        """Yield the times at which a level has work, ms since the epoch."""
        due_ms = level.due_ms
        if due_ms is not None and self._is_free(level):
            yield max(due_ms, level.retry_ms)
        if not level.is_reading:
            for put in level.failed:
                yield put.retry_ms

    def _is_free(self, level: Level) -> bool:
        """Whether further messages of a level may be put now."""
        if level.is_reading:
            return False
        if not level.puts:
            return True
        if not self._config.value.is_async:
            return False
        if level.pending >= self._config.value.pending_limit:
            level.trouble = "flow control: scheduleAsyncDeliverMaxPendingLimit"
            return False
        return not level.is_held_back(self._config.value.max_resends)

    def deliver(self, level: Level, now_ms: int) -> bool:
        """Put one batch of a level, or resend a failed one. Return whether anything was tried."""
        if level.low != level.queue.min_offset:
            self._correct(level, now_ms)
        if level.failed:
            failed = self._to_resend(level, now_ms)
            if failed is not None:
                self._resend(level, failed, now_ms)
                return True
        due_ms = level.due_ms
        if due_ms is None or due_ms > now_ms or level.retry_ms > now_ms or not self._is_free(level):
            return False
        run = next(run for run in level.runs if run.due_ms == due_ms)
        if run.cursor > level.queue.next_offset:
            self._correct(level, now_ms)
            return True
        limit = self._config.value.batch_size
        if level.puts:
            limit = max(1, min(limit, self._config.value.pending_limit - level.pending))
        units = self._batches.read(level.queue, run.cursor, min(limit, level.end_of(run) - run.cursor))
        units = units[: self._times.due_count(level, run, units, now_ms)]
        if not len(units):
            run.due_ms = self._times.head(level, run, now_ms)
            return True
        level.late_by_ms = now_ms - due_ms
        put = Put(run.cursor, run.cursor + len(units), due_ms)
        try:
            outcome = self._append(level, units, now_ms)
        except NotInMemory:
            raise  # the caller has the data read, and calls again
        except StoreError as error:
            self._refused(level, run, put, now_ms, error)
        else:
            self._note_outcome(level, run, put, outcome, now_ms, units=units)
        return True

    def _append(self, level: Level, units: NDArray[Any], now_ms: int) -> Outcome:
        """Deliver units by `Batches.deliver`."""
        outcome = self._batches.deliver(
            units, now_ms, may_wait=level.is_warm or self._read_cold is None, delay_level=level.number
        )
        level.is_warm = False
        return outcome

    def _note_outcome(
        self, level: Level, run: OpenRun, put: Put, outcome: Outcome, now_ms: int, *, units: NDArray[Any]
    ) -> None:
        """Note the outcome of a put of some units, or of its first part."""
        put.end = put.start + outcome.units
        if outcome.kind is Kind.COLD:
            self._warm(level, put.start, level.end_of(run))
            return
        if outcome.kind is Kind.GONE:
            log.error(
                "scheduled_messages_missing",
                delay_level=level.number,
                messages=outcome.units,
                queue_offset=put.start,
                physical_offset=int(units["physical_offset"][0]),
            )
        with self._store.health.noting():  # a failure after the append must not lead to a second append
            self._note(level, put, outcome, now_ms)
            run.cursor = put.end
        run.due_ms = self._times.head(level, run, now_ms)
        if len(level.runs) > 1:
            level.drop_finished()

    def _note(self, level: Level, put: Put, outcome: Outcome, now_ms: int) -> None:
        if outcome.kind is Kind.GONE:
            level.trouble = "records are missing"
            if self._config.value.is_async:
                level.add(put)
                level.fail(put, now_ms, origin_is_gone=True)
            else:
                level.skipped += outcome.units
            return
        self._count(level, outcome)
        if outcome.delivered and self._is_awaited:
            put.position = self._store.log.end
            level.add(put)
            level.trouble = "waits for a flush to the disk"
        elif not level.puts:
            level.trouble = None

    @staticmethod
    def _count(level: Level, outcome: Outcome) -> None:
        level.delivered += outcome.delivered
        if outcome.kind is Kind.PASSED:
            level.withdrawn = max(0, level.withdrawn - outcome.units)
        else:
            level.skipped += outcome.units - outcome.delivered

    def count_withdrawn(self, level: Level) -> None:
        """Count those untried and failed units whose messages do not wait, because they were withdrawn, or were found
        delivered by recovery. Raises OSError."""
        level.withdrawn = self._withdrawn_in(level, level.untried(level.queue.min_offset))

    def _withdrawn_in(self, level: Level, ranges: list[tuple[int, int]]) -> int:
        found = 0
        for start, end in ranges:
            offset = start
            while offset < end:
                units = self._batches.read(level.queue, offset, min(_COUNT_UNITS, end - offset))
                if not len(units):
                    break
                waits = is_message(units["size"])
                if self._batches.delivered_end:
                    waits &= ~self._batches.is_delivered(units)
                found += len(units) - int(np.count_nonzero(waits))
                offset += len(units)
        return found

    def _refused(self, level: Level, run: OpenRun, put: Put, now_ms: int, error: StoreError) -> None:
        """Note that the store refused a put."""
        if level.trouble != str(error):
            log.warning("delivery_refused", delay_level=level.number, reason=str(error))
        level.trouble = str(error)
        if not self._config.value.is_async:
            level.retry_ms = now_ms + REFUSED_RETRY_MS
            return
        level.add(put)
        level.fail(put, now_ms, origin_is_gone=False)
        run.cursor = put.end
        run.due_ms = self._times.head(level, run, now_ms)

    def _correct(self, level: Level, now_ms: int) -> None:
        """Cut a level to the bounds of its queue after files have expired or the queue has lost its end, and compute
        when its heads are due. Normally no message is lost with expired files, since waiting messages are appended
        again before. Raises OSError."""
        low, high = level.queue.min_offset, level.queue.next_offset
        waited = level.waiting
        withdrawn = self._withdrawn_in(level, level.untried(low))
        offset = level.runs[0].cursor
        is_behind = any(run.cursor > high for run in level.runs)
        level.leave_out_before(low)
        level.withdrawn = withdrawn
        lost = max(0, waited - level.waiting)
        level.skipped += lost
        if lost or is_behind:
            log.warning(
                "level_offset_corrected",
                delay_level=level.number,
                offset=offset,
                corrected=level.runs[0].cursor,
                min=low,
                max=high,
                lost=lost,
            )
        self._times.look(level, now_ms)

    # --- puts that failed

    @staticmethod
    def _to_resend(level: Level, now_ms: int) -> Put | None:
        if level.is_reading:
            return None
        return next((put for put in level.failed if put.retry_ms <= now_ms), None)

    def _resend(self, level: Level, put: Put, now_ms: int) -> None:
        """Try a failed put again."""
        units = self._batches.read(level.queue, put.start, put.end - put.start)
        try:
            outcome = self._append(level, units, now_ms)
        except NotInMemory:
            raise
        except StoreError as error:
            level.trouble = str(error)
            level.fail(put, now_ms, origin_is_gone=False)
            return
        if outcome.kind is Kind.COLD:
            self._warm(level, put.start, put.end)
        elif outcome.kind is Kind.GONE:
            part = level.take_part(put, outcome.units)
            level.fail(part, now_ms, origin_is_gone=True)
            if part.status is PutStatus.SKIP:
                level.skipped += outcome.units
                log.error("scheduled_messages_skipped", delay_level=level.number, messages=outcome.units)
        else:
            with self._store.health.noting():
                self._resent(level, put, outcome)
        level.drop_finished()

    def _resent(self, level: Level, put: Put, outcome: Outcome) -> None:
        """Note that a failed put, or its first part, was appended or passed over."""
        self._count(level, outcome)
        part = level.take_part(put, outcome.units)
        part.status, part.position = PutStatus.RUNNING, self._store.log.end
        if not outcome.delivered or not self._is_awaited:
            part.status = PutStatus.SUCCESS

    # --- results

    @staticmethod
    def note_flushed(level: Level, position: int) -> bool:
        """Note that the commitlog is durable up to a physical offset: puts before it are a SUCCESS. Return whether the
        level had any puts whose results were awaited."""
        if not level.puts:
            return False
        for put in level.puts:
            if put.status is PutStatus.RUNNING and put.position <= position:
                put.status = PutStatus.SUCCESS
        level.drop_finished()
        if not level.puts:
            level.trouble = None
        return True

    def _warm(self, level: Level, start: int, end: int) -> None:
        """Have a thread read the next records from the disk."""
        assert self._read_cold is not None
        job = self._batches.warm(self._batches.read(level.queue, start, min(_WARM_UNITS, end - start)))
        level.is_reading = True
        level.trouble = "old messages are being read from the disk"

        def done() -> None:
            level.is_reading = False
            level.is_warm = True
            self._on_ready()

        self._read_cold(job, done)
