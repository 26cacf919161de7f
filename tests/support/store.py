"""A store with its durability owner, whose jobs run when a test asks for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import count

from duemq.storage.budget import UNLIMITED, Budget, Pieces
from duemq.storage.clock import ManualClock, Moment, look
from duemq.storage.current import Current
from duemq.storage.durability.jobs import Lane
from duemq.storage.durability.owner import EXPIRE_SECONDS, CheckpointPart, Durability, DurabilityConfig
from duemq.storage.durability.retention import Retention, RetentionConfig
from duemq.storage.store import MessageStore

Job = tuple[Lane, Callable[[], None], Callable[[Exception | None], None]]

NOTHING_GOES = RetentionConfig(delete_when="", clean_forcibly=False, refuse_ratio=2.0)
"""No file expires, at any time of day and however full the disk."""


_NOTES = count()


class HeldWorkers:
    """Implements storage.durability.jobs.JobWorkers: jobs wait until the test runs them."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []
        self.failures: list[Exception] = []

    def start(self, lane: Lane, work: Callable[[], None], done: Callable[[Exception | None], None]) -> None:
        self.jobs.append((lane, work, done))

    def run_one(self, lane: Lane | None = None) -> bool:
        """Run the job that has waited longest, of any lane or of the given one; return whether there was a job."""
        for at, (of, work, done) in enumerate(self.jobs):
            if lane in (None, of):
                del self.jobs[at]
                try:
                    work()
                except Exception as error:
                    self.failures.append(error)
                    done(error)
                else:
                    done(None)
                return True
        return False

    def run(self, lane: Lane) -> None:
        """Run all jobs of a lane, including those started meanwhile."""
        while self.run_one(lane):
            pass

    def held(self, lane: Lane) -> int:
        """Number of waiting jobs of a lane."""
        return [of for of, _, _ in self.jobs].count(lane)


class Urgent:
    """Implements storage.durability.owner.CheckpointPart: has no state, and wants a checkpoint when the test asks for
    one."""

    def __init__(self) -> None:
        self.wants_checkpoint = False
        self.planned = 0
        """Number of checkpoints that were ready to be synced."""

    def note(self) -> bytes:
        """A new note each time, so that every checkpoint is needed."""
        self.wants_checkpoint = False
        return b"%d" % next(_NOTES)

    def begin_write(self) -> None:
        pass

    def write_next(self, now: Moment) -> bool:
        return False

    def plan_sync(self, now: Moment, *, is_last: bool) -> Callable[[], None]:
        self.planned += 1
        return lambda: None

    def plan_after(self) -> Callable[[], None]:
        return lambda: None

    def needed_from(self) -> int:
        return 2**62

    def keep_next(self, limit: int, now: Moment) -> None:
        pass

    def expire_next(self) -> None:
        pass


class OwnedStore:
    """See the module. Events are recorded in `releases`, `poison` and `ends`. Failures raise only from the methods that
    do a whole operation: `checkpoint` and `stop`."""

    def __init__(
        self,
        store: MessageStore,
        clock: ManualClock | None = None,
        parts: Mapping[str, CheckpointPart] | None = None,
        *,
        config: DurabilityConfig | None = None,
        retention: RetentionConfig = NOTHING_GOES,
        on_released: Callable[[int], None] = lambda position: None,
    ) -> None:
        """`store` is open. `config`: by default, nothing is flushed unless a caller waits for it."""
        self.store = store
        self.clock = clock or ManualClock()
        self.workers = HeldWorkers()
        self.urgent = Urgent()
        self.releases: list[int] = []
        self.poison: str | None = None
        self.ends: list[Exception | None] = []
        self._on_released = on_released
        self.retention = Current(retention)
        self.durability = Durability(
            store,
            {**(parts or {}), "urgent": self.urgent},
            Retention(self.retention, store.files, store.log),
            self.workers,
            Current(config or DurabilityConfig(flush_interval=1e9, queue_interval=1e9)),
            self,
            look(self.clock),
        )

    # --- storage.durability.owner.Watcher

    def released(self, position: int) -> None:
        self.releases.append(position)
        self._on_released(position)

    def noted(self) -> None:
        """The checkpoint has been written: nothing to do here."""

    def poisoned(self, reason: str) -> None:
        assert self.poison is None, "it is told once"
        self.poison = reason

    def stopped(self, error: Exception | None) -> None:
        assert not self.ends, "it is told once"
        self.ends.append(error)

    # --- small steps

    def step(self, budget: Budget = UNLIMITED) -> float | None:
        """Take one step, which may start jobs but runs none."""
        return self.durability.step(look(self.clock), budget, self.clock.now_ms())

    def flush(self, budget: Budget = UNLIMITED) -> bool:
        """Make everything written so far durable, in one step and as many flushes as needed; return whether it is. Jobs
        of other kinds that this starts are held."""
        end = self.store.log.end
        self.durability.want(end)
        self.step(budget)
        self.workers.run(Lane.FLUSH)
        if self.durability.released < end:
            self.step(budget)
        return self.durability.released >= end

    def writing(self) -> Iterator[None]:
        """Write the files of a new checkpoint, one piece per `next`; at the end its job is held. A checkpoint that is
        already under way is finished first."""
        self.urgent.wants_checkpoint = True
        self._go_on()
        while self.urgent.wants_checkpoint:
            self.workers.run(Lane.FILES)
            self._go_on()
        planned = self.urgent.planned
        yield
        while self.urgent.planned == planned:
            self._go_on()
            yield

    def _go_on(self) -> None:
        """The smallest step of a checkpoint, with the flush that it needs."""
        for _ in range(3):
            planned = self.urgent.planned
            wait = self.step(Pieces(1))
            if wait is None:
                raise self.store.health.error()
            if wait == 0 or self.urgent.planned > planned or self.workers.held(Lane.FLUSH):
                self.workers.run(Lane.FLUSH)
                return
            if self.workers.held(Lane.FILES) and self.urgent.wants_checkpoint:
                return
        raise AssertionError(f"the checkpoint does not go on: {self.workers.failures}")

    # --- whole operations

    def settle(self) -> None:
        """Run steps and jobs until nothing more happens at this moment."""
        while True:
            wait = self.step()
            if not self.workers.run_one() and wait != 0:
                return

    def expire(self) -> None:
        """Let time pass until the next search for expired files, and remove those."""
        self.clock.advance(int(EXPIRE_SECONDS * 1000))
        self.settle()

    def checkpoint(self) -> None:
        """Make a checkpoint of now. Raises the error that it fails with."""
        for _ in self.writing():
            pass
        self.sync()

    def sync(self) -> None:
        """Run the job left by `writing`. Raises the error that it fails with."""
        before = self.store.checkpoint
        self.workers.run(Lane.FILES)
        if self.store.checkpoint is before:
            self.step(Pieces(1))
            raise self.workers.failures[-1]

    def stop(self) -> None:
        """Stop, and let go of the store. Raises the error that prevented a clean stop."""
        self.durability.stop()
        while not self.ends:
            wait = self.step()
            assert self.workers.run_one() or wait == 0 or self.ends, "the stop does not go on"
        self.store.abandon()
        if self.ends[0] is not None:
            raise self.ends[0]
