"""The one owner of durability: flushes, checkpoints, retention, the removal of topics, the allocation of disk space,
and the clean stop are all planned here and run by workers, and one verdict (`health`) covers the failures of all.

    flush        the commitlog is synced; then `released` advances, the one position for which answers, deliveries and
                 checkpoints wait
    checkpoint   writing: the units and tables in memory are put into their files, a few in each step
                 flushing: until `released` has reached the end of the records that the checkpoint covers
                 syncing: a job syncs those files, then writes the checkpoint
    taking over  the first checkpoint of a store that another broker had, made before anything is delivered
    retention    messages that still wait are appended once more, a few in each step; then whole files are dropped, and
                 removed by a job
    stop         a last checkpoint, then the abort file is removed

Syncs of the commitlog have a lane of their own, in which one job runs at a time: the kernel reports a failed write-back
only once. Checkpoints and removals share a second lane, so that no checkpoint syncs a file that is being removed. Disk
space is allocated ahead in a third.

    invariants   released <= end; nothing is released, noted in a checkpoint or removed after the verdict is POISONED
                 a checkpoint's recovery offset <= released
                 a commitlog file is removed only when recovery would read nothing of it

An operation that fails for lack of room, descriptors or memory is tried again, and is reported as done only after it
has succeeded. A failed sync, and any other error of a write, poisons the store.

Keeps invariants 6 and 21 of ARCHITECTURE.md.
"""

from __future__ import annotations

import errno
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from typing import Final, NamedTuple, Protocol

import structlog

from duemq.storage.budget import UNLIMITED, Budget
from duemq.storage.clock import Moment
from duemq.storage.current import Current
from duemq.storage.durability.checkpoint import Checkpoint
from duemq.storage.durability.health import Verdict
from duemq.storage.durability.jobs import CheckpointJob, FlushJob, JobWorkers, Lane, RemoveJob
from duemq.storage.durability.retention import Retention
from duemq.storage.durability.wanted import WantedPosition
from duemq.storage.errors import NotDurable, NotInMemory, StoreError, StoreFull, has_no_room
from duemq.storage.queues import check
from duemq.storage.queues.consume_queue import UNIT, ConsumeQueue
from duemq.storage.store import MessageStore

log = structlog.get_logger(__name__)

CHECKPOINT_SECONDS: Final = 5.0
"""Longest interval between checkpoints, in seconds: recovery need not read the records that a checkpoint covers."""
CHECKPOINT_BYTES: Final = 32 * 1024 * 1024
"""Number of bytes written since a checkpoint that starts the next one early."""
FIRST_CHECKPOINT_SECONDS: Final = 0.25
"""Seconds between the first checkpoint after a start and the second. The first is made immediately, and each later
interval is twice the previous one, up to CHECKPOINT_SECONDS: so if the broker soon crashes again, the next start has
less to do than this one had."""
EXPIRE_SECONDS: Final = 10.0
"""Seconds between two looks for expired files."""
RETRY_SECONDS: Final = 1.0
"""Seconds until an operation that failed is tried again."""
STOP_TRIES: Final = 10
"""Number of flushes that may fail for lack of descriptors, memory or room while the store stops. After that many the
store is left as it is, and the next start recovers."""
UNFLUSHED_BYTES: Final = 8 << 20
"""Number of unflushed bytes that starts a flush early. A write took up to 75 ms during a flush of half a second's
writes, and 3 ms during a flush of 4 to 16 MiB (measured; ext4, Linux 6)."""
MAX_TAIL_BYTES: Final = 64 << 20
"""Most bytes of consume-queue units that are kept in memory because they cannot be written to the disk; beyond that the
store accepts nothing."""
_PASSING: Final = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.EINTR))
_DISK: Final = "disk"
_QUEUES: Final = "queues"


@dataclass(frozen=True)
class DurabilityConfig:
    """Intervals of flushes and checkpoints, in seconds."""

    flush_interval: float = 0.5
    """Seconds between flushes of the commitlog that no answer waits for."""
    queue_interval: float = 1.0
    """Seconds between the times when units are put into the files of the consume queues."""


class CheckpointPart(Protocol):
    """A component whose state must be made durable with every checkpoint. Positions are physical offsets."""

    @property
    def wants_checkpoint(self) -> bool:
        """Whether recovery from a crash after this moment needs a checkpoint with a newer note."""

    def note(self) -> bytes:
        """Return the note for a checkpoint made now: the state from which recovery continues."""

    def begin_write(self) -> None:
        """Prepare to write for a new checkpoint, whose note was taken just now; the next `write_next` begins."""

    def write_next(self, now: Moment) -> bool:
        """Write some of the state in memory into files; return whether there is more to write. Raises OSError; writing
        then starts over."""

    def plan_sync(self, now: Moment, *, is_last: bool) -> Callable[[], None]:
        """Return the work, run by a worker, that makes durable everything that was put into files so far. `is_last`:
        the store is closed after this. The work raises OSError."""

    def plan_after(self) -> Callable[[], None]:
        """Return the work to do once the checkpoint for which `plan_sync` was called just before is durable; the same
        worker runs it. The work raises OSError; then the checkpoint is made again."""

    def needed_from(self) -> int:
        """Return the physical offset from which on recovery may read the commitlog if it starts from the checkpoint
        that is on the disk."""

    def keep_next(self, limit: int, now: Moment) -> bool | None:
        """Look at a few messages in the commitlog files before a position, since these files are about to be removed,
        and append those that still wait once more. Returns whether any message was appended; None once all have been
        looked at. Raises StoreError, OSError; the files are then kept."""

    def expire_next(self) -> list[str] | None:
        """Look at some files, and forget those that nothing needs any longer. Returns their paths, for the caller to
        remove, or None when there is nothing left to look at. Raises OSError."""


class Watcher(Protocol):
    """Receives the events of the owner, in the thread of the store."""

    def released(self, position: int) -> None:
        """Note that everything in the commitlog before a physical offset is durable."""

    def noted(self) -> None:
        """Note that a new checkpoint is on the disk."""

    def poisoned(self, reason: str) -> None:
        """Note that the store no longer accepts or releases anything: answers that wait will never be released."""

    def stopped(self, error: Exception | None) -> None:
        """Note that a stop is over. `error`: why it did not end cleanly; None if it did."""


class _Stage(Enum):
    IDLE = auto()
    WRITING = auto()
    FLUSHING = auto()
    SYNCING = auto()


class _Covered(NamedTuple):
    """The state that a checkpoint covers, taken when its writing began."""

    end: int
    queues: dict[ConsumeQueue, int]
    """Queues with units that are not durable, and the queue offset behind the units of records before `end`."""
    timestamp: int
    notes: dict[str, bytes]
    is_wanted: bool
    """Whether a part wants this checkpoint, or wanted a previous one that failed: it is then not put off until its
    usual time."""


class _Steps:
    """Pieces of work, done in order, a little at a time. Each piece is a function that does a part of its work and
    returns whether it has more to do."""

    def __init__(self, steps: Iterable[Callable[[Moment], bool]]) -> None:
        self._steps = deque(steps)

    def run(self, now: Moment, budget: Budget) -> bool:
        """Do some of the work; return whether all is done. Raises the errors of the pieces."""
        while self._steps:
            if not self._steps[0](now):
                self._steps.popleft()
            if budget.is_spent:
                break
        return not self._steps


class Durability:
    """Plans all work that makes a store durable; see the module. Only the store's thread calls this class."""

    def __init__(
        self,
        store: MessageStore,
        parts: Mapping[str, CheckpointPart],
        retention: Retention,
        workers: JobWorkers,
        config: Current[DurabilityConfig],
        watcher: Watcher,
        wanted: WantedPosition,
        now: Moment,
    ) -> None:
        """Own the durability of a store that is open. `parts`: by name, the components whose state each checkpoint
        keeps. `wanted`: the position up to which others want the commitlog durable."""
        self._store = store
        self._parts = dict(parts)
        self.retention = retention
        self._workers = workers
        self._config = config
        """The intervals; a changed interval counts from the next step."""
        self._watcher = watcher

        self._wanted = wanted
        self._flushing: FlushJob | None = None
        self._has_flush_failed = False
        self._flush_asked = -math.inf
        self._no_flush_before = now.monotonic

        self._stage = _Stage.IDLE
        self._covered = _Covered(0, {}, 0, {}, False)
        self._writing = _Steps(())
        self._written_at, self._write_after = -math.inf, 0.0
        self._retry_at = now.monotonic
        self._checkpointed_at = now.monotonic
        self._idle_to = now.monotonic
        """Monotonic time before which there is nothing new to note unless something is appended. Until then no notes
        are made for a comparison: making them takes a millisecond."""
        self._checkpointed_end = store.log.end
        self._checkpoint_interval = 0.0
        self._has_checkpoint_failed = False
        self._trouble = ""

        self._expiring: _Steps | None = None
        self._expire_at = now.monotonic
        self._expires_at_any_hour = False
        self._kept_end = 0
        """End of the commitlog after the last append of a kept message: files are dropped once the commitlog is durable
        up to there."""
        self._no_room: dict[str, str] = {}
        """Reasons why there is no room, by the part of the store that has none (_DISK, _QUEUES)."""
        self._removing = 0
        """Number of removals in progress."""
        self._expired: dict[str, None] = {}
        """Files that nothing needs, each directory's oldest first. One job at a time removes them: a start refuses a
        directory in which a file between others is missing."""
        self._is_removing_expired = False
        self._not_removed: dict[str, tuple[str, int]] = {}
        """Topics' directories that could not be removed. By directory: its topic, and the end of the commitlog when the
        topic was removed."""
        self._is_stopping = self._is_over = False
        self._stop_failures = 0
        """Flushes that failed since the stop began."""

    # --- the released position

    @property
    def released(self) -> int:
        """Physical offset before which everything is durable."""
        return self._store.log.flushed

    def expire_now(self, *, at_any_hour: bool) -> None:
        """Look for expired files at the next step. `at_any_hour`: also outside the hours of deleteWhen. That holds
        until there is no file left to drop, since messages that still wait are appended again first, and the files may
        be dropped only at a later look."""
        self._expire_at = -math.inf
        self._expires_at_any_hour |= at_any_hour

    # --- a step

    def step(self, now: Moment, budget: Budget, machine_ms: int) -> float | None:
        """Do the work that is due, within the budget; return the seconds until the next call, None once the store is
        stopped. Call this sooner when a job has ended, after `stop`, when the wanted position is raised, and when
        `MessageStore` calls `on_work`. `machine_ms`: the wall time by which files age, ms since the epoch; it differs
        from the messages' clock if a test moves that clock."""
        self._tell_if_poisoned()
        if self._is_over:
            return None
        self._note_failures(now)
        self._allocate(now)
        if now.monotonic >= self._flush_due or self._store.log.end - self.released >= UNFLUSHED_BYTES:
            self._flush_asked = now.monotonic
            self._wanted.raise_to(self._store.log.end)
        self._flush_again(now)
        self._checkpoint(now, budget)
        if not (self._is_stopping or self._is_over):
            self._run_retention(now, budget, machine_ms)
        return self._wait(now)

    @property
    def _flush_due(self) -> float:
        return self._flush_asked + self._config.value.flush_interval

    @property
    def _write_due(self) -> float:
        return self._written_at + min(self._config.value.queue_interval, self._write_after)

    def _wait(self, now: Moment) -> float | None:
        if self._is_over:
            return None
        if self._expiring is not None:
            return 0.0
        times = [self._flush_due]
        if self._flushing is None and self._wanted.offset > self.released:
            times.append(self._no_flush_before)
        if not self._is_stopping:
            times.append(self._expire_at)
        if self._stage is _Stage.WRITING:
            times.append(self._retry_at)
        elif self._stage is _Stage.IDLE and not (self._is_stopping and self._removing):
            times.append(self._retry_at if self._is_stopping else max(self._write_due, self._retry_at))
        return max(0.0, min(times) - now.monotonic)

    # --- failures

    def _failed(self, what: str, error: Exception) -> None:
        """Handle a failure. A passing one (`is_passing`) is logged once, and the work is tried again; any other poisons
        the store."""
        reason = str(error) or repr(error)
        if not is_passing(error):
            log.error("store_poisoned", what=what, reason=reason)
            self._store.health.poison(f"{what} failed: {reason}")
        elif self._trouble != (trouble := f"{what}: {reason}"):
            self._trouble = trouble
            log.warning("tried_again_later", what=what, reason=reason)

    def _note_failures(self, now: Moment) -> None:
        """Set the times at which jobs that failed are tried again: the jobs' callbacks do not know the time."""
        if self._has_flush_failed:
            self._has_flush_failed = False
            self._no_flush_before = now.monotonic + RETRY_SECONDS
        if self._has_checkpoint_failed:
            self._has_checkpoint_failed = False
            self._retry_at = now.monotonic + RETRY_SECONDS

    def _tell_if_poisoned(self) -> None:
        if self._store.health.verdict is not Verdict.POISONED or self._is_over:
            return
        self._is_over = True
        self._watcher.poisoned(self._store.health.reason)
        if self._is_stopping:
            self._watcher.stopped(self._store.health.error())

    # --- flushing

    def _flush_again(self, now: Moment) -> None:
        """Flush, unless a flush has just failed."""
        if now.monotonic >= self._no_flush_before:
            self._flush()

    def _flush(self) -> None:
        store = self._store
        if self._flushing is not None or self._wanted.offset <= store.log.flushed or self._is_over:
            return
        self._flushing = job = FlushJob(store.files, store.log)
        self._workers.start(Lane.FLUSH, job.run, self._flushed)

    def _flushed(self, error: Exception | None) -> None:
        job, self._flushing = self._flushing, None
        assert job is not None, "a flush ended that had not begun"
        if error is not None:
            self._has_flush_failed = True
            self._failed("flushing the commitlog", error)
            self._tell_if_poisoned()
            self._stop_failures += self._is_stopping
            if self._stop_failures == STOP_TRIES and not self._is_over:
                self._end(error)
            return
        if self._store.health.verdict is Verdict.POISONED:
            return
        self._store.log.note_flushed(job.target, job.names)
        self._watcher.released(job.target)
        self._flush()

    def _allocate(self, now: Moment) -> None:
        preallocation = self._store.preallocation
        if self._store.log.end <= preallocation.look_at:
            return
        job = preallocation.plan(now.wall_ms)
        if job is not None:
            self._workers.start(Lane.ALLOCATE, job.run, lambda error: preallocation.done())

    # --- checkpoints

    def _checkpoint(self, now: Moment, budget: Budget) -> None:
        """Continue the checkpoint, or begin one if it is due."""
        if now.monotonic < self._retry_at:
            return
        if self._stage is _Stage.IDLE and self._is_writing_due(now):
            self._begin(now)
        if self._stage is _Stage.WRITING:
            self._write(now, budget)
        if self._stage is _Stage.FLUSHING and self.released >= self._covered.end:
            self._sync(now)

    def _is_writing_due(self, now: Moment) -> bool:
        if self._is_stopping:
            return not self._removing
        return now.monotonic >= self._write_due or self._is_checkpoint_wanted()

    def _is_checkpoint_wanted(self) -> bool:
        return self._covered.is_wanted or any(part.wants_checkpoint for part in self._parts.values())

    def _begin(self, now: Moment) -> None:
        store, parts = self._store, self._parts
        self._written_at, self._write_after = now.monotonic, max(self._checkpoint_interval, FIRST_CHECKPOINT_SECONDS)
        is_wanted, covered = self._is_checkpoint_wanted(), store.checkpoint.recovery_offset
        if store.log.end == covered and now.monotonic < self._idle_to and not (is_wanted or self._is_stopping):
            return
        notes = {name: part.note() for name, part in parts.items()}
        notes[check.NAME] = check.NOTE
        if (store.log.end, notes) == (covered, store.checkpoint.notes) and not self._is_stopping:
            self._idle_to = now.monotonic + self._config.value.queue_interval
            return
        queues = {queue: queue.next_offset for queue in store.dirty}
        self._covered = _Covered(store.log.end, queues, store.appender.last_store_timestamp, notes, is_wanted)
        for queue in queues:
            queue.begin_marks()
        for part in parts.values():
            part.begin_write()
        to_write = iter(queues)
        self._writing = _Steps((lambda _: _write_next(to_write), *(part.write_next for part in parts.values())))
        self._stage = _Stage.WRITING

    def _write(self, now: Moment, budget: Budget) -> None:
        try:
            is_done = self._writing.run(now, budget)
        except OSError as error:
            self._stage = _Stage.IDLE
            self._retry_at = now.monotonic + RETRY_SECONDS
            self._failed("writing the consume queues", error)
            self._tell_if_poisoned()
            self._note_unwritten_queues(error)
            if self._is_stopping and not self._is_over:
                self._end(error)
            return
        if is_done:
            self._wrote(now)

    def _wrote(self, now: Moment) -> None:
        if self._has_units_before(self._covered.end):
            self._stage = _Stage.IDLE
            self._retry_at = now.monotonic + RETRY_SECONDS
            waits = OSError(errno.EBUSY, "former files of a topic are still there")
            self._note_unwritten_queues(waits)
            if self._is_stopping:
                self._end(waits)
            return
        self._note_room(_QUEUES, None)
        is_due = now.monotonic - self._checkpointed_at >= self._checkpoint_interval
        is_due |= self._covered.end - self._checkpointed_end >= CHECKPOINT_BYTES
        if not (is_due or self._is_stopping or self._covered.is_wanted):
            self._stage = _Stage.IDLE
            return
        self._stage = _Stage.FLUSHING
        self._wanted.raise_to(self._covered.end)
        self._flush_again(now)

    def _has_units_before(self, position: int) -> bool:
        """Whether units of records before a physical offset are still in memory, in queues that are held."""
        return any(queue.tail and UNIT.unpack_from(queue.tail)[0] < position for queue in self._store.dirty)

    def _note_unwritten_queues(self, error: OSError) -> None:
        """Refuse messages once too many units wait in memory because they cannot be written."""
        if sum(len(queue.tail) for queue in self._store.dirty) > MAX_TAIL_BYTES:
            self._note_room(_QUEUES, f"the consume queues cannot be written: {error}")

    def take_over(self, now: Moment) -> None:
        """Make the first checkpoint of a store that another broker had last, before anything else is done with the
        store. Until now only that broker's files tell which messages it delivered, and duemq is about to change those
        files; from here on the checkpoint tells. If it cannot be written, the next start relies on those files again.
        Waits for the disk. Raises StoreFull, NotDurable, OSError; the store then still belongs to the other broker and
        must be closed."""
        try:
            self._take_over(now)
        except BaseException as error:
            self._store.unmark()
            if has_no_room(error):
                raise StoreFull(f"no room to take over the store from RocketMQ's broker: {error}. Make room") from error
            raise

    def _take_over(self, now: Moment) -> None:
        store = self._store
        flush = FlushJob(store.files, store.log)
        flush.run()
        store.log.note_flushed(flush.target, flush.names)
        self._begin(now)
        self._writing.run(now, UNLIMITED)
        if self._has_units_before(self._covered.end):
            raise OSError(errno.ENOSPC, "no room for the units of the consume queues", store.queue_directory)
        job, dirty = self._plan_sync(now)
        job.run()
        self._synced(job, dirty, None, is_last=False)

    def _sync(self, now: Moment) -> None:
        is_last = self._is_stopping
        job, dirty = self._plan_sync(now)
        self._workers.start(Lane.FILES, job.run, lambda error: self._synced(job, dirty, error, is_last=is_last))

    def _plan_sync(self, now: Moment) -> tuple[CheckpointJob, Mapping[ConsumeQueue, int]]:
        store, (end, covered, timestamp, notes, _) = self._store, self._covered
        timestamp = timestamp or store.checkpoint.physic_timestamp
        dirty, is_last = store.dirty, self._is_stopping
        syncs = [part.plan_sync(now, is_last=is_last) for part in self._parts.values()]
        after = [part.plan_after() for part in self._parts.values()]

        def finish() -> None:
            store.claim()
            for each in after:
                each()
            if is_last:
                self._remove_abort()

        job = CheckpointJob(
            store.files,
            store.queue_directory,
            dirty.items(),
            Checkpoint(timestamp, timestamp, store.checkpoint.index_timestamp, end, notes),
            store.checkpoint_path,
            [
                # Before the marks are written: the check notes units as they were made.
                store.queue_check.plan(dirty, covered, end, store.log.begin),
                *(queue.plan_marks(covered.get(queue, 0)) for queue in dirty if queue.has_marks),
                *syncs,
            ],
            finish,
        )
        store.dirty = {
            queue: queue.written_offset
            for queue in dirty
            if queue.has_marks or queue.next_offset != covered.get(queue)  # the next checkpoint notes the rest
        }
        self._stage = _Stage.SYNCING
        self._checkpointed_at = now.monotonic
        self._checkpointed_end = end
        self._checkpoint_interval = min(
            max(FIRST_CHECKPOINT_SECONDS, 2 * self._checkpoint_interval), CHECKPOINT_SECONDS
        )
        return job, dirty

    def _remove_abort(self) -> None:
        store = self._store
        store.files.remove(store.abort_path)
        store.files.sync_directory(store.config.root)

    def _synced(
        self, job: CheckpointJob, dirty: Mapping[ConsumeQueue, int], error: Exception | None, *, is_last: bool
    ) -> None:
        store = self._store
        self._stage = _Stage.IDLE
        if error is not None:
            for queue, start in dirty.items():
                if store.queue(queue.topic, queue.queue_id) is queue:
                    store.dirty[queue] = min(start, store.dirty.get(queue, start))
            self._has_checkpoint_failed = True
            self._checkpointed_end = store.checkpoint.recovery_offset or 0
            self._failed("the checkpoint", error)
            self._tell_if_poisoned()
            if is_last and not self._is_over:
                self._end(error)
            return
        if store.health.verdict is Verdict.POISONED:
            return
        self._trouble = ""
        self._covered = self._covered._replace(is_wanted=False)
        store.checkpoint = job.checkpoint
        self._watcher.noted()
        for queue, names in job.names:
            queue.note_names_synced(names)
        if is_last:
            self._end(None)

    # --- room, and files to remove

    def _note_room(self, what: str, reason: str | None) -> None:
        """Note why a part of the store is full; `reason` None: that it is not. `what`: _DISK or _QUEUES."""
        health = self._store.health
        if reason is None:
            self._no_room.pop(what, None)
        else:
            self._no_room[what] = reason
        before = health.verdict
        if self._no_room:
            health.fill(next(iter(self._no_room.values())))
        else:
            health.has_room()
        if health.verdict is not before:
            log.warning("store_state", refusing=health.reason or "nothing")

    def _run_retention(self, now: Moment, budget: Budget, machine_ms: int) -> None:
        try:
            if self._expiring is None:
                if now.monotonic < self._expire_at:
                    return
                self._expiring = self._begin_expiry(machine_ms)
            if not self._expiring.run(now, budget):
                return
        except NotInMemory:
            raise  # the caller has the bytes read, and calls again
        except (OSError, StoreError) as error:
            # Whatever has failed, the files still exist, and the next look finds them.
            log.warning("nothing_expired", reason=str(error))
        self._expiring = None
        self._expire_at = now.monotonic + EXPIRE_SECONDS

    def _begin_expiry(self, machine_ms: int) -> _Steps:
        """Check the disk; return the work to do. Raises OSError."""
        store, retention, parts = self._store, self.retention, list(self._parts.values())
        has_room = retention.look()
        self._note_room(_DISK, None if has_room else f"the disk is {retention.used_ratio:.0%} full")
        self._remove_again()
        limit = min(
            retention.deletable_before(machine_ms, at_any_hour=self._expires_at_any_hour),
            store.checkpoint.recovery_offset or 0,
            *(part.needed_from() for part in parts),
        )
        steps: list[Callable[[Moment], bool]] = [partial(self._expire_part, part) for part in parts]
        if limit > store.log.begin:
            queues = iter(store.all_queues())
            steps = [
                *(partial(self._keep, part, limit) for part in parts),
                partial(self._drop, limit),
                lambda _: self._advance_next(queues),
                *steps,
            ]
        else:
            self._expires_at_any_hour = False
        return _Steps(steps)

    def _keep(self, part: CheckpointPart, limit: int, now: Moment) -> bool:
        # Beyond the watermark the store refuses messages, but only these appends make room again. A disk that is really
        # full takes none of them.
        is_watermark = self._no_room.keys() == {_DISK}
        with self._store.health.making_room() if is_watermark else nullcontext():
            was_needed = part.keep_next(limit, now)
        if was_needed:
            self._kept_end = self._store.log.end
        return was_needed is not None

    def _drop(self, limit: int, _: Moment) -> bool:
        """Drop commitlog files, unless messages that were kept from them are not durable yet: the next expiry then
        drops the files."""
        if self.released >= self._kept_end:
            self._remove(self._store.log.drop_before(min(limit, self.released)))
        return False

    def _advance_next(self, queues: Iterator[ConsumeQueue]) -> bool:
        queue = next(queues, None)
        if queue is not None:
            self._remove(queue.advance_min(self._store.log.begin))
        return queue is not None

    def _expire_part(self, part: CheckpointPart, _: Moment) -> bool:
        paths = part.expire_next()
        self._remove(paths or [])
        return paths is not None

    def _remove(self, paths: list[str]) -> None:
        if paths:
            log.info("files_expired", files=len(paths), first=paths[0])
            self._expired.update(dict.fromkeys(paths))
            self._remove_expired()

    def _remove_expired(self) -> None:
        """Remove the expired files."""
        if not self._expired or self._is_removing_expired:
            return
        job = RemoveJob(self._store.files, self._expired)

        def done(error: Exception | None) -> None:
            self._removing -= 1
            self._is_removing_expired = False
            for path in job.removed:
                self._expired.pop(path, None)
            if error is None:
                self._remove_expired()
            else:
                log.warning("files_not_removed", files=len(self._expired), reason=str(error))

        self._removing += 1
        self._is_removing_expired = True
        self._workers.start(Lane.FILES, job.run, done)

    def remove_topic(self, topic: str, done: Callable[[Exception | None], None]) -> None:
        """Remove the queues of a topic and their files. `done` is called with None when the files are gone, or with the
        error; the removal of files that could not be removed is tried again from time to time."""
        directory = self._store.forget_topic(topic)
        if directory is None:
            done(None)
        else:
            self._remove_directory(topic, self._store.log.end, directory, done)

    def _remove_again(self) -> None:
        """Try again to remove files and directories that could not be removed."""
        self._remove_expired()
        for directory, (topic, end) in list(self._not_removed.items()):
            del self._not_removed[directory]
            self._remove_directory(topic, end, directory, lambda error: None)

    def _remove_directory(self, topic: str, end: int, directory: str, done: Callable[[Exception | None], None]) -> None:
        """Remove the directory of a topic that was forgotten when the commitlog ended at `end`."""
        extension = self._store.extension_directory_of(topic)
        # The directory of the queues goes last: as long as it exists, the next start removes the rest of both.
        directories = [directory] if extension is None else [extension, directory]
        # Files of a new topic may have these names.
        for path in [path for path in self._expired if path.startswith(tuple(f"{each}/" for each in directories))]:
            del self._expired[path]
        job = RemoveJob(self._store.files, (), directories)

        def remove() -> None:
            # First, so that no start takes the topic's records for messages if a part of the directory is left.
            self._store.queue_check.remove_topic(topic, end)
            job.run()

        def finished(error: Exception | None) -> None:
            self._removing -= 1
            if error is None:
                self._store.removed_topic(topic)
            elif isinstance(error, NotDurable):
                self._failed("removing a topic", error)
                self._tell_if_poisoned()
            else:
                log.warning("topic_not_removed", topic=topic, reason=str(error))
                if directory in self._not_removed:
                    self._store.removed_topic(topic)  # the next try counts for both removals
                self._not_removed[directory] = topic, end
            done(error)

        self._removing += 1
        self._workers.start(Lane.FILES, remove, finished)

    # --- the end

    def stop(self) -> None:
        """Begin a clean stop: accept nothing more, make everything durable, and leave the files as after a clean stop.
        The following calls of `step` do that, and `Watcher.stopped` reports the end. A poisoned store is left as it
        is."""
        self._tell_if_poisoned()
        self._is_stopping = True
        if self._is_over:
            self._watcher.stopped(self._store.health.error())
            return
        self._store.health.closed()
        self._remove_again()
        self._expiring = None
        self._retry_at = 0.0
        if self._stage in (_Stage.WRITING, _Stage.FLUSHING):
            self._stage = _Stage.IDLE

    def _end(self, error: Exception | None) -> None:
        self._is_over = True
        self._watcher.stopped(error)


def is_passing(error: Exception) -> bool:
    """Whether an error casts no doubt on the bytes on the disk, so that the work may be tried again: no room, no
    memory, too many open files, or an interrupted call."""
    if has_no_room(error) or isinstance(error, MemoryError):
        return True
    return isinstance(error, OSError) and not isinstance(error, NotDurable) and error.errno in _PASSING


def _write_next(queues: Iterator[ConsumeQueue]) -> bool:
    """Put the units of the next queue into its files; return whether there was one. Raises OSError."""
    queue = next(queues, None)
    if queue is not None:
        queue.write_tail()
    return queue is not None
