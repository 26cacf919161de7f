"""What happens by the clock: levels and timers delivering, tables and consume queues going to the disk, old files and
silent clients going away. Long work is cut into slices; what waits for the disk runs in a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from itertools import chain
from typing import Any, Final

import structlog

from broker.clients import Clients
from broker.config import BrokerConfig
from broker.connection import Connection
from broker.flusher import Flusher
from broker.locks import QueueLocks
from broker.nameserver import NameServer
from broker.offsets import ConsumerOffsets
from broker.persister import Persister
from broker.stats import SAMPLE_SECONDS, Stats
from scheduler.level_queues import LevelQueues
from scheduler.timers import Timers
from storage.clock import Clock
from storage.store import MessageStore

log = structlog.get_logger(__name__)

SLICE_SECONDS: Final = 0.003
CHECKPOINT_SECONDS: Final = 5.0
"""At most this long after a record was written, recovery need not read it any more..."""
CHECKPOINT_BYTES: Final = 32 * 1024 * 1024
"""...or sooner, when so much was written since."""
MAX_WAIT_SECONDS: Final = 10.0
"""The wall clock may be set: look at it at least this often while a message waits."""
CLEAN_SECONDS: Final = 10.0
FAILED_STEP_MS: Final = 1000
REPORT_SECONDS: Final = 1.0
GATHER_SECONDS: Final = 0.01
"""So long messages that are not due soon are gathered before they are put into the timer wheel."""


class Housekeeping:
    """Owns the timers of one broker."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        config: BrokerConfig,
        store: MessageStore,
        levels: LevelQueues,
        timers: Timers,
        offsets: ConsumerOffsets,
        clients: Clients,
        locks: QueueLocks,
        nameserver: NameServer,
        stats: Stats,
        flusher: Flusher,
        persister: Persister,
        blocking: Executor,
        connections: Callable[[], list[Connection]],
        clock: Clock,
    ) -> None:
        self._loop = loop
        self._config = config
        self._store = store
        self._levels = levels
        self._timer_wheel = timers
        self._offsets = offsets
        self._clients = clients
        self._locks = locks
        self._nameserver = nameserver
        self._stats = stats
        self._flusher = flusher
        self._persister = persister
        self._blocking = blocking
        self._connections = connections
        self._clock = clock
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._deliveries = [
            Deliveries(loop, clock, levels.step, "levels"),
            Deliveries(loop, clock, timers.step, "timers"),
        ]
        self._is_stopped = False
        self._saved_progress: dict[str, Any] = levels.to_json()
        self._is_writing_queues = self._is_expiring = False
        self._last_checkpoint = loop.time()
        self._checkpoint_end = store.log.end

    def start(self) -> None:
        """Start all timers."""
        self._write_regularly()
        self._every("stats", SAMPLE_SECONDS, self._stats.sample)
        self._every("levels", REPORT_SECONDS, self._levels.report)
        self._every("timers", REPORT_SECONDS, self._timer_wheel.report)
        self._every("clean", CLEAN_SECONDS, self._clean)
        self._levels.on_earlier, self._timer_wheel.on_earlier = (each.step_soon for each in self._deliveries)
        self._timer_wheel.on_arrived = self._deliveries[1].step_later
        self._levels.on_rules_changed = self._checkpoint_soon
        for each in self._deliveries:
            each.step()
        self._expire()

    def reconfigure(self, config: BrokerConfig) -> None:
        """Take over settings that changed: how often queues, offsets and progress are written."""
        self._config = config
        if not self._is_stopped:
            self._write_regularly()

    def _write_regularly(self) -> None:
        config = self._config
        self._every("queues", config.queue_flush_interval_ms / 1000, self._write_queues)
        self._every("offsets", config.offset_flush_interval_ms / 1000, self._offsets.save_if_changed)
        self._every("progress", config.delay_offset_flush_interval_ms / 1000, self._save_progress)

    def stop(self) -> None:
        """Stop all timers."""
        self._is_stopped = True
        for timer in self._timers.values():
            timer.cancel()
        for each in self._deliveries:
            each.stop()

    # --- deliveries

    def clock_moved(self) -> None:
        """Somebody moved the clock: look at what waits by it, whose timer knows nothing of that."""
        for each in self._deliveries:
            each.step_soon()

    def _save_progress(self) -> None:
        """Save how far the levels are, after the commitlog has what they delivered."""
        table, position = self._levels.progress()
        if table == self._saved_progress:
            return
        self._saved_progress = table
        self._flusher.call_when_flushed(position, lambda: self._run("delay offsets", self._levels.save, table))

    # --- files

    def _write_queues(self) -> None:
        """Put consume-queue units into their files, and make them durable from time to time."""
        if self._is_writing_queues or not self._store.has_checkpoint_work:
            return
        self._is_writing_queues = True
        self._sliced(self._store.write_queues(), self._queues_written, self._queues_not_written)

    def _checkpoint_soon(self) -> None:
        """Make a checkpoint now, or when the one that is being made is done."""
        self._last_checkpoint = -CHECKPOINT_SECONDS
        self._loop.call_soon(self._write_queues)

    def _queues_not_written(self) -> None:
        self._is_writing_queues = False

    def _queues_written(self) -> None:
        written = self._store.log.end - self._checkpoint_end
        if self._loop.time() - self._last_checkpoint < CHECKPOINT_SECONDS and written < CHECKPOINT_BYTES:
            self._is_writing_queues = False
            return
        job = self._store.plan_checkpoint()
        self._last_checkpoint = self._loop.time()
        self._checkpoint_end = self._store.log.end

        def done(work: asyncio.Future[None]) -> None:
            self._is_writing_queues = False
            error = work.exception()
            if error is None:
                self._store.note_checkpoint(job)
            else:
                log.error("checkpoint_failed", reason=str(error))
                self._store.flush_failed(OSError(str(error)))

        self._loop.run_in_executor(self._blocking, job.run).add_done_callback(done)

    def _expire(self) -> None:
        """Remove files that are not needed any more; one such search at a time."""
        if not self._is_expiring:
            self._is_expiring = True
            steps = self._remove_each(chain(self._store.expire(), self._timer_wheel.expire()))
            self._sliced(steps, self._expired, self._expired)

    def _expired(self) -> None:
        self._is_expiring = False

    def _remove_each(self, steps: Iterator[list[str]]) -> Iterator[None]:
        """Remove, in the thread, the files that each step gives."""
        for paths in steps:
            if paths:
                log.info("files_expired", files=len(paths), first=paths[0])
                self._run("expired files", self._remove, paths)
            yield

    def _remove(self, paths: list[str]) -> None:
        for path in paths:
            self._store.files.remove(path)

    # --- the rest

    def _clean(self) -> None:
        self._clients.expire()
        self._locks.expire()
        self._nameserver.expire()
        limit = self._loop.time() - self._config.idle_seconds
        for connection in self._connections():
            if connection.last_read < limit:
                connection.abort()
        was_refusing = self._store.appender.refusal
        self._expire()
        if self._store.appender.refusal is not was_refusing:
            log.warning("store_state", refusing=str(self._store.appender.refusal or "nothing"))

    def _every(self, name: str, seconds: float, work: Callable[[], None]) -> None:
        """Do something regularly from now on; what had the name is replaced."""

        def run() -> None:
            self._timers[name] = self._loop.call_later(seconds, run)
            try:
                work()
            except Exception:  # one bad turn must not end the timer
                log.exception("housekeeping_failed", work=name)

        if name in self._timers:
            self._timers[name].cancel()
        self._timers[name] = self._loop.call_later(seconds, run)

    def _sliced(self, steps: Iterator[None], done: Callable[[], None], failed: Callable[[], None]) -> None:
        """Run the steps of a generator, a few ms in each turn of the loop, and then one of the two others."""

        def run() -> None:
            end = self._loop.time() + SLICE_SECONDS
            try:
                for _ in steps:
                    if self._loop.time() > end:
                        self._loop.call_soon(run)
                        return
            except Exception:
                log.exception("housekeeping_failed", work="slice")
                failed()
                return
            if not self._is_stopped:
                done()

        run()

    def _run(self, what: str, work: Callable[..., None], *arguments: Any) -> None:
        """Run something in the tables' thread, and say when it fails."""

        def done(future: asyncio.Future[None]) -> None:
            if future.exception() is not None:
                log.error("not_written", what=what, reason=str(future.exception()))

        self._loop.run_in_executor(self._persister.thread, work, *arguments).add_done_callback(done)


class Deliveries:
    """Calls what delivers messages when it asks for it. `step` does some of what is due, and gives when it wants to be
    called again, ms since the epoch by `clock`, or None for "when `step_soon` is called"."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, clock: Clock, step: Callable[[], int | None], name: str
    ) -> None:
        self._loop = loop
        self._clock = clock
        self._step = step
        self._name = name
        self._timer: asyncio.TimerHandle | None = None
        self._at = 0.0
        """When the timer is up, by the loop's clock; uvloop's handles do not tell."""
        self._is_stopped = False

    def step_soon(self) -> None:
        """Something may be due earlier than it was said."""
        self._call_in(0)

    def step_later(self) -> None:
        """There is something to do that can wait for some ms."""
        if self._timer is None or self._at > self._loop.time() + GATHER_SECONDS:
            self._call_in(GATHER_SECONDS)

    def _call_in(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._at = self._loop.time() + seconds
        self._timer = self._loop.call_later(seconds, self.step)

    def step(self) -> None:
        """Deliver what is due, and set the timer."""
        self._timer = None
        if self._is_stopped:
            return
        try:
            due_ms = self._step()
        except Exception:  # no other message may wait for that of one
            log.exception("delivery_failed", of=self._name)
            due_ms = self._clock.now_ms() + FAILED_STEP_MS
        if due_ms is not None and self._timer is None:
            wait = (due_ms - self._clock.now_ms()) / 1000
            self._call_in(min(max(0.0, wait), MAX_WAIT_SECONDS))

    def stop(self) -> None:
        """Deliver no more."""
        self._is_stopped = True
        if self._timer is not None:
            self._timer.cancel()
