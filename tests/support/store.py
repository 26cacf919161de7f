"""A store with its durability owner, whose jobs run when a test asks for it; and a store with levels and timers, put
together as the broker puts them together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import count

from duemq.scheduler.levels import service as level_service
from duemq.scheduler.levels.delay_offsets import read_delay_offsets
from duemq.scheduler.levels.delivery import DeliveryConfig
from duemq.scheduler.levels.service import LevelQueues
from duemq.scheduler.levels.table import DelayLevels
from duemq.scheduler.timers import service as timer_service
from duemq.scheduler.timers.config import TimerConfig
from duemq.scheduler.timers.service import Timers
from duemq.storage.budget import UNLIMITED, Budget, Pieces
from duemq.storage.clock import ManualClock, Moment, look
from duemq.storage.config_file import ConfigFile
from duemq.storage.current import Current
from duemq.storage.durability.jobs import Lane
from duemq.storage.durability.owner import EXPIRE_SECONDS, CheckpointPart, Durability, DurabilityConfig
from duemq.storage.durability.recovery import Recovered
from duemq.storage.durability.retention import Retention, RetentionConfig
from duemq.storage.durability.wanted import WantedPosition
from duemq.storage.files import Files
from duemq.storage.store import MessageStore, StoreConfig
from tests.support.messages import Sender

Job = tuple[Lane, Callable[[], None], Callable[[Exception | None], None]]

ADDRESS = ("127.0.0.1", 10911)
"""The address of the broker that has the store."""
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
        self.wanted = WantedPosition()
        self._on_released = on_released
        self.retention = Current(retention)
        self.durability = Durability(
            store,
            {**(parts or {}), "urgent": self.urgent},
            Retention(self.retention, store.files, store.log),
            self.workers,
            Current(config or DurabilityConfig(flush_interval=1e9, queue_interval=1e9)),
            self,
            self.wanted,
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
        self.wanted.raise_to(end)
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


class Assembly:
    """An open store with levels, timers or both. `sender` stores scheduled messages into it as the broker does, and
    `owned` is its durability owner, whose jobs run when a test asks for it."""

    def __init__(
        self,
        files: Files,
        config: StoreConfig,
        clock: ManualClock,
        *,
        table: DelayLevels | None = None,
        delivery: Current[DeliveryConfig] | None = None,
        is_awaited: bool = False,
        timers: Current[TimerConfig] | None = None,
        wake: Callable[[], None] = lambda: None,
        retention: RetentionConfig = NOTHING_GOES,
    ) -> None:
        """Open the store. `table`: of the levels; None: without levels. `timers`: their settings; None: without timers.
        Raises StoreError, OSError."""
        self._clock = clock
        self.store = MessageStore(
            config, files, ADDRESS, table.deliver_time if table is not None else lambda level, stored_ms: stored_ms
        )
        self.recovered: Recovered = self.store.open()
        self._levels: LevelQueues | None = None
        self._timers: Timers | None = None
        parts: dict[str, CheckpointPart] = {}
        now = look(clock)
        if table is not None:
            is_needed = self.recovered.is_foreign or level_service.NAME not in self.recovered.notes
            saved = read_delay_offsets(delay_offsets_file(files, config), is_needed=is_needed)
            delivery = delivery or Current(DeliveryConfig())
            self._levels = parts[level_service.NAME] = LevelQueues(
                self.store, saved, table, self.recovered, now, config=delivery, is_awaited=is_awaited, wake=wake
            )
        if timers is not None:
            self._timers = parts[timer_service.NAME] = Timers(
                self.store, timers, self.recovered, now, levels=self._levels, wake=wake
            )
        self.sender = Sender(self.store, clock, self._levels, self._timers)
        self.owned = OwnedStore(
            self.store,
            clock,
            parts,
            retention=retention,
            on_released=self._levels.note_flushed if self._levels is not None else lambda position: None,
        )

    @property
    def levels(self) -> LevelQueues:
        """The levels, if there are any."""
        assert self._levels is not None
        return self._levels

    @property
    def timers(self) -> Timers:
        """The timers, if there are any."""
        assert self._timers is not None
        return self._timers

    def take_over(self) -> None:
        """Make the store duemq's, if another broker had it last."""
        if self.recovered.is_foreign:
            self.owned.durability.take_over(look(self._clock))

    def abandon(self) -> None:
        """Let go of the files, as a kill does."""
        self.store.abandon()
        if self._timers is not None:
            self._timers.close()


def delay_offsets_file(files: Files, config: StoreConfig) -> ConfigFile:
    """The file of the levels' progress."""
    return ConfigFile(files, f"{config.root}/config/delayOffset.json")
