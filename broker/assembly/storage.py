"""The store's durability, and the delivery of the messages that wait in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import structlog

from duemq.broker.assembly.core import Core
from duemq.broker.assembly.tables import Tables
from duemq.broker.net.held_answers import HeldAnswers
from duemq.broker.settings.config import BrokerConfig
from duemq.broker.settings.parts import (
    DELIVERY_SETTINGS,
    DURABILITY_SETTINGS,
    TIMER_SETTINGS,
    delivery_config,
    durability_config,
    retention_config,
    timer_config,
)
from duemq.broker.store_watcher import NotedLevels, StoreWatcher
from duemq.broker.turns import SlicedWork, Turns
from duemq.broker.workers import Background, Workers
from duemq.protocol.topics import SCHEDULE_TOPIC, TIMER_TOPIC
from duemq.scheduler.levels import service
from duemq.scheduler.levels.delay_offsets import DelayOffsets
from duemq.scheduler.levels.service import LevelQueues
from duemq.scheduler.levels.table import DelayLevels, queue_id_of
from duemq.scheduler.timers import inspection
from duemq.scheduler.timers import service as timers_module
from duemq.scheduler.timers.files import small_files
from duemq.scheduler.timers.service import Timers
from duemq.storage.clock import look
from duemq.storage.durability.jobs import Lane
from duemq.storage.durability.owner import Durability
from duemq.storage.durability.recovery import Recovered
from duemq.storage.durability.retention import Retention
from duemq.storage.durability.wanted import WantedPosition
from duemq.storage.queues.pull import ColdRead, ReadAhead

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Works:
    """The work on the store that is done in slices. It is made before the store, whose components wake it, and has its
    steps from `assembly.steps` when the turns start."""

    durability: SlicedWork
    levels: SlicedWork
    timers: SlicedWork

    def clock_moved(self) -> None:
        """Wake the work that waits by the messages' clock, which was moved: its timers run by another clock."""
        self.levels.wake()
        self.timers.wake()


@dataclass(frozen=True)
class Storage:
    """The components that work on an open store."""

    levels: LevelQueues
    timers: Timers
    retention: Retention
    durability: Durability
    watcher: StoreWatcher
    noted_levels: NotedLevels


def make_works(turns: Turns) -> Works:
    """Make the kinds of work, in the order of their slices in a turn."""
    return Works(turns.work("durability"), turns.work("levels"), turns.work("timers"))


def inspect_store(core: Core) -> None:
    """Look at the files of the store before anything is changed. Raises StoreError, OSError."""
    store = core.store
    store.inspect()
    since = small_files.needed_from(store.checkpoint.notes)
    if since is not None:
        store.need(since, "timers that are due, or were just delivered, are known from")
    checkpoint = store.checkpoint
    log_end = small_files.log_end_of(checkpoint.notes) if not checkpoint.is_foreign else None
    inspection.inspect(core.files, core.config.store_root, log_end)


def expect_queues(core: Core, delay_offsets: DelayOffsets) -> None:
    """Tell the store how far levels and timers had read their consume queues."""
    store = core.store
    for level, offset in service.reached(store.checkpoint, delay_offsets).items():
        store.expect(SCHEDULE_TOPIC, queue_id_of(level), offset)
    offset = small_files.reached(store.checkpoint, core.files, store.config.root)
    store.expect(TIMER_TOPIC, 0, offset)


def open_store(core: Core) -> Recovered:
    """Recover the store, and open it: this is the first change of its files. Raises StoreError, OSError."""
    recovered = core.store.recover()
    log.info(
        "store_opened",
        path=core.config.store_root,
        commitlog_end=recovered.end,
        records_read=recovered.records,
        cut_because=recovered.torn,
        consume_queues_rebuilt=recovered.rebuilt,
    )
    return recovered


def assemble_storage(
    core: Core, tables: Tables, recovered: Recovered, *, works: Works, wanted: WantedPosition, held: HeldAnswers
) -> Storage:
    """Find the waiting messages, and take over the durability of a store that is open. `recovered`: the result of
    opening it. `works`: woken when there is something to do. `wanted`: the position up to which answers want the
    commitlog durable; `held`: holds those answers. Raises StoreFormatError, OSError."""
    config, settings, store, now = core.config, core.settings, core.store, look(core.clock)

    def read_cold(job: ColdRead | ReadAhead, done: Callable[[], None]) -> None:
        # `done` is called after an error, too: the caller then reads again, and meets the error itself.
        core.workers.start(Background.READS, job.run, lambda error: done())

    levels = LevelQueues(
        store,
        tables.delay_offsets,
        DelayLevels(config.delay_levels),
        recovered,
        now,
        config=settings.current(delivery_config),
        is_awaited=config.sync_flush,
        read_cold=read_cold,
        wake=works.levels.wake,
    )
    timers = Timers(
        store,
        settings.current(timer_config),
        recovered,
        now,
        read_cold=read_cold,
        levels=levels,
        wake=works.timers.wake,
        wake_later=works.timers.wake_later,
        is_deleted=tables.topics.is_deleted,
    )
    tables.topics.on_policy(timers.set_policy)
    retention = Retention(settings.current(retention_config), core.files, store.log)
    noted_levels = NotedLevels(store, levels, config.sync_flush_timeout_ms / 1000)
    watcher = StoreWatcher(core.loop, held, levels, noted_levels)
    durability = Durability(
        store=store,
        parts={service.NAME: levels, timers_module.NAME: timers},
        retention=retention,
        workers=_Waking(core.workers, works.durability.wake),
        config=settings.current(durability_config),
        watcher=watcher,
        wanted=wanted,
        now=now,
    )
    return Storage(levels, timers, retention, durability, watcher, noted_levels)


def follow_settings(core: Core, storage: Storage, works: Works) -> None:
    """Act on changes for which it is not enough that the components read the settings in force."""
    on = core.settings.on_change

    def change_levels(config: BrokerConfig) -> None:
        storage.levels.set_table(DelayLevels(config.delay_levels), core.clock.now_ms())
        works.durability.wake()

    on(DELIVERY_SETTINGS, lambda _: works.levels.wake())
    on("messageDelayLevel", change_levels)
    on(TIMER_SETTINGS, lambda _: works.timers.wake())
    on(DURABILITY_SETTINGS, lambda _: works.durability.wake())


class _Waking:
    """Workers that call `wake` after each job."""

    def __init__(self, workers: Workers, wake: Callable[[], None]) -> None:
        self._workers = workers
        self._wake = wake

    def start(self, lane: Lane, work: Callable[[], None], done: Callable[[Exception | None], None]) -> None:
        """Run `work` in a thread that may wait. In the thread that owns the store, and never before `start` has
        returned, `done` is called with None, or with the exception if `work` failed or could not be run; then `wake` is
        called. Raises nothing."""

        def finished(error: Exception | None) -> None:
            done(error)
            self._wake()

        self._workers.start(lane, work, finished)
