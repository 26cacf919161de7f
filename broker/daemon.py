"""The broker put together: the one place where configuration, store, scheduler, handlers and servers meet.

Start: bind the ports, open and recover the store, read the tables, listen. Stop: take no more connections, finish what
is being handled, answer who waits, flush, save the tables, close the store.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import os
import resource
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import structlog

from broker.admission import Admission
from broker.clients import Clients
from broker.config import BrokerConfig, Origin, parse_addresses
from broker.connection import Connection, InputBudget, OutputBudget
from broker.errors import ConfigError
from broker.flusher import Flusher
from broker.groups import Groups
from broker.handlers.admin import AdminHandlers
from broker.handlers.clients import ClientHandlers
from broker.handlers.clock import ClockHandlers
from broker.handlers.offsets import OffsetHandlers
from broker.handlers.pending import PendingHandlers
from broker.handlers.pull import PullHandlers
from broker.handlers.reset_offset import ResetOffsetHandlers
from broker.handlers.send import SendHandlers
from broker.handlers.send_back import SendBackHandlers
from broker.handlers.settings import SettingsHandlers
from broker.handlers.staging import Staging
from broker.handlers.timers import TimerHandlers
from broker.housekeeping import Housekeeping
from broker.limits import Limits
from broker.live import follow, retention_config
from broker.locks import QueueLocks
from broker.nameserver import NameServer
from broker.offsets import ConsumerOffsets
from broker.persister import Persister
from broker.registration import Registration
from broker.router import Router
from broker.runtime_info import Sources
from broker.settings import LiveSettings
from broker.stats import Stats
from broker.topics import Topics
from broker.turns import Budget, TimeBudget, Turns
from protocol.headers import BrokerIdentity
from scheduler.delay_levels import DelayLevels
from scheduler.level_delivery import DeliveryConfig
from scheduler.level_queues import LevelQueues
from scheduler.pending import Pending
from scheduler.timer_config import TimerConfig
from scheduler.timers import Timers
from storage.ahead import AllocateJob
from storage.clock import Clock, MovableClock, SystemClock
from storage.config_file import ConfigFile
from storage.errors import StoreError
from storage.files import Files, OsFiles
from storage.pull import ColdRead, ReadAhead
from storage.store import MessageStore, StoreConfig

log = structlog.get_logger(__name__)

VIP_PORT_OFFSET: Final = 2
BACKLOG: Final = 4096
STOP_SECONDS: Final = 5.0
DELIVERY_SETTINGS: Final = (
    "enableScheduleAsyncDeliver",
    "scheduleAsyncDeliverMaxPendingLimit",
    "scheduleAsyncDeliverMaxResendNum2Blocked",
    "scheduleDeliverBatchSize",
    "scheduleLatenessWarnMillis",
)
TIMER_SETTINGS: Final = (
    "timerMaxDelaySec",
    "timerRollWindowSlot",
    "timerCongestNumEachSlot",
    "timerStopEnqueue",
    "timerStopDequeue",
)
MAX_ROLL_WINDOW: Final = 7 * 86_400 - 60
"""Seconds: how far ahead the timer wheel reaches, but for a minute that stays empty between its end and its begin."""


class Broker:
    """One broker. `start` and `stop` run in the event loop."""

    def __init__(
        self,
        config: BrokerConfig,
        *,
        origin: Origin | None = None,
        clock: Clock | None = None,
        files: Files | None = None,
        budget: Budget | None = None,
    ) -> None:
        """`budget`: of each turn of the loop, for requests; a time by default."""
        self._turn_budget = budget or TimeBudget()
        self.config = config
        """The settings at the start."""
        self.settings = LiveSettings(config, origin)
        self._real_clock = clock or SystemClock()
        """What clients, connections and files live by..."""
        self._clock: Clock = MovableClock(self._real_clock) if config.test_clock else self._real_clock
        """...and what messages do: two hours for those must not throw clients out or delete files."""
        self._files = files or OsFiles(_descriptor_limit() // 4)
        self._levels_table = DelayLevels(config.delay_levels)
        self.store = MessageStore(
            store_config(config),
            self._files,
            self._clock,
            (config.advertised_host, config.listen_port),
            self._levels_table.deliver_time,
            self._real_clock,
        )
        self._sockets: list[socket.socket] = []
        self._servers: list[asyncio.Server] = []

    # --- start

    async def start(self) -> None:
        """Start; listening when done. Raises ConfigError, StoreError, OSError."""
        began = time.monotonic()
        loop = asyncio.get_running_loop()
        self._bind()
        try:
            recovered = self._recovered = self.store.open()
            log.info(
                "store_opened",
                path=self.config.store_root,
                commitlog_end=recovered.end,
                records_read=recovered.records,
                cut_because=recovered.torn,
                consume_queues_rebuilt=recovered.rebuilt,
            )
            self._assemble(loop)
        except BaseException:
            self._close_sockets()
            self.store.close()
            raise
        for bound in self._sockets:
            self._servers.append(await loop.create_server(self._connect, sock=bound, backlog=BACKLOG))
        self.flusher.start()
        self.housekeeping.start()
        if self.registration is not None:
            self.registration.start()
        # What exists now stays: the collector need not look at it again, and rarely has anything to find.
        gc.collect()
        gc.freeze()
        gc.set_threshold(100_000, 50, 50)
        log.info(
            "listening",
            broker=f"{self.config.host}:{self.config.listen_port}",
            name_server=self.config.nameserver_addresses or f"{self.config.host}:{self.config.nameserver_port}",
            vip=f"{self.config.host}:{self.config.listen_port - VIP_PORT_OFFSET}",
            advertised=f"{self.config.advertised_host}:{self.config.listen_port}",
            store=self.config.store_root,
            seconds=round(time.monotonic() - began, 3),
        )

    def _bind(self) -> None:
        config = self.config
        ports = [config.listen_port, config.listen_port - VIP_PORT_OFFSET]
        if not config.nameserver_addresses:
            ports.append(config.nameserver_port)
        try:
            for port in ports:
                self._sockets.append(_bound(config.host, port))
        except BaseException:
            self._close_sockets()
            raise

    def _assemble(self, loop: asyncio.AbstractEventLoop) -> None:
        config, store, clock, real_clock = self.config, self.store, self._clock, self._real_clock
        address = _join(config.advertised_host, config.listen_port)

        def table(name: str) -> ConfigFile:
            return ConfigFile(self._files, os.path.join(config.store_root, "config", name))

        self._blocking = ThreadPoolExecutor(2, thread_name_prefix="blocking")
        self._allocator = ThreadPoolExecutor(1, thread_name_prefix="allocate")
        self._persister = persister = Persister(loop)
        limits = Limits(self.settings)
        self.topics = topics = Topics(config, store, table("topics.json"), real_clock, persister, limits)
        self.groups = groups = Groups(
            table("subscriptionGroup.json"), real_clock, persister, limits, auto_create=config.auto_create_group
        )
        self.offsets = offsets = ConsumerOffsets(table("consumerOffset.json"), persister)
        self.flusher = flusher = Flusher(
            store,
            loop,
            config.flush_interval_ms / 1000,
            config.sync_flush_timeout_ms / 1000,
            config.send_queue_capacity,
        )
        self.levels = levels = LevelQueues(
            store,
            table("delayOffset.json"),
            clock,
            self._levels_table,
            delivery_config(config),
            flusher.call_when_flushed if config.sync_flush else None,
            self._read_cold,
        )
        self.timers = timers = Timers(store, clock, timer_config(config), self._read_cold, levels)
        self.nameserver = NameServer(
            config.cluster_name,
            config.broker_name,
            address,
            topics,
            table("kvConfig.json"),
            real_clock,
            persister,
            limits,
        )
        for loaded in (topics, groups, offsets, self.nameserver):
            loaded.load()
        levels.load(self._recovered)
        timers.load(self._recovered)
        topics.on_policy = timers.set_policy
        topics.tell_policies()

        self._turns = turns = Turns(loop, self._turn_budget)
        self.clients = clients = Clients(real_clock, limits, turns, notify=config.notify_consumers)
        locks = QueueLocks(real_clock, limits)
        stats = Stats(store.appender, real_clock)
        self.router = router = Router(
            store.appender,
            flusher,
            stats,
            real_clock,
            Admission(loop, config.max_waiting_request_bytes),
            sync_flush=config.sync_flush,
        )
        self._budget = InputBudget(loop, config.max_unfinished_request_bytes)
        self._output = OutputBudget(config.max_unread_response_bytes)
        self._loop = loop

        self.registration: Registration | None = None
        if config.nameserver_addresses:
            self.registration = Registration(
                BrokerIdentity(config.broker_name, address, config.cluster_name, config.broker_id),
                parse_addresses(config.nameserver_addresses),
                topics,
                config.register_period_ms / 1000,
                self._connect_to,
            )
        self._pulls = PullHandlers(
            config, store, topics, groups, clients, offsets, stats, router, self._output, loop, turns, limits
        )
        sources = Sources(config, store, stats, levels, timers, flusher, self._pulls.polls, real_clock)
        staging = Staging(store, topics.table, levels, timers)
        send = SendHandlers(
            config, store, topics, groups, levels, timers, staging, flusher, router, self._read_apart, limits
        )
        send_back = SendBackHandlers(config, store, topics, groups, staging, router)
        timer_handlers = TimerHandlers(config, store, topics, timers, router, clock)
        pending = Pending(store, timers, levels, clock)
        self._pending = PendingHandlers(store, timers, pending, timer_handlers, router, clock, self._read_apart)
        admin = AdminHandlers(
            config, store, topics, groups, offsets, clients, stats, sources, self._blocking, self._register_now, limits
        )
        for handlers in (
            send,
            send_back,
            self._pulls,
            OffsetHandlers(store, topics, groups, offsets, levels),
            ResetOffsetHandlers(config.broker_name, store, topics, offsets, clients),
            ClientHandlers(topics, groups, clients, locks),
            admin,
            timer_handlers,
            self._pending,
            SettingsHandlers(self.settings, persister.thread),
            self.nameserver,
        ):
            handlers.register(router)
        topics.on_change = self._register_soon
        store.run_allocate = self._allocate
        store.on_unflushed = flusher.flush_soon
        self.settings.on_change(DELIVERY_SETTINGS, self._change_delivery)
        self.settings.on_change("messageDelayLevel", self._change_levels)
        self.settings.on_change(TIMER_SETTINGS, self._change_timers)
        self.housekeeping = Housekeeping(
            loop,
            config,
            store,
            levels,
            timers,
            offsets,
            clients,
            locks,
            self.nameserver,
            stats,
            flusher,
            persister,
            self._blocking,
            lambda: list(router.connections),
            clock,
        )
        ClockHandlers(clock, self.housekeeping.clock_moved).register(router)
        follow(
            self.settings,
            store,
            topics,
            groups,
            clients,
            flusher,
            send,
            send_back,
            self._pulls,
            admin,
            timer_handlers,
            self.housekeeping,
        )

    def _allocate(self, job: AllocateJob) -> None:
        """Allocate space ahead; nothing is lost where that fails."""
        self._run_apart(self._allocator, job.run, self.store.ahead.done)

    def _change_delivery(self, config: BrokerConfig) -> None:
        self.levels.delivery.config = delivery_config(config)
        self.levels.on_earlier()

    def _change_levels(self, config: BrokerConfig) -> None:
        self.levels.set_table(DelayLevels(config.delay_levels))

    def _change_timers(self, config: BrokerConfig) -> None:
        self.timers.config = timer_config(config)
        self.timers.on_earlier()

    def _read_cold(self, job: ColdRead | ReadAhead, done: Callable[[], None]) -> None:
        """Read where it may wait; whoever asked reads again, and finds the records in memory, or what is wrong."""
        self._run_apart(self._blocking, job.run, done)

    async def _read_apart(self, job: ColdRead) -> None:
        """As `_read_cold`, for a coroutine."""
        with contextlib.suppress(OSError):
            await self._loop.run_in_executor(self._blocking, job.run)

    def _run_apart(self, threads: ThreadPoolExecutor, work: Callable[[], object], done: Callable[[], None]) -> None:
        """Run something in a thread and call back after it, also when it failed, which is nobody's loss."""

        def finished(future: asyncio.Future[object]) -> None:
            future.exception()
            done()

        self._loop.run_in_executor(threads, work).add_done_callback(finished)

    def _connect(self) -> Connection:
        return Connection(self.router, self._loop, self._budget, self._output, self._turns)

    async def _connect_to(self, address: tuple[str, int]) -> Connection:
        _, connection = await self._loop.create_connection(self._connect, *address)
        return connection

    def _register_now(self) -> asyncio.Future[None] | None:
        return self.registration.register_now() if self.registration is not None else None

    def _register_soon(self) -> None:
        if self.registration is not None:
            self.registration.register_now()

    # --- stop

    async def stop(self) -> None:
        """Stop; everything acknowledged is durable when done."""
        for server in self._servers:
            server.close()
        if self.registration is not None:
            await self.registration.stop()
        self.housekeeping.stop()
        self._pending.stop()
        await self.router.finish(STOP_SECONDS)
        self._pulls.stop()
        await self.flusher.stop()
        for connection in list(self.router.connections):
            connection.close()
        await asyncio.sleep(0)
        self._persister.stop()
        self._blocking.shutdown(wait=True)
        self._allocator.shutdown(wait=True)
        if self.flusher.failure is None:
            try:
                self.timers.hand_over()
            except (StoreError, OSError) as error:  # recovery does without; what was acknowledged is yet to be flushed
                log.error("timers_not_handed_over", reason=str(error))
            job = self.store.plan_flush()
            job.run()
            self.store.note_flushed(job)
            self.levels.note_flushed(job.target)
            self.levels.save(self.levels.to_json())
        self.offsets.save_now()
        self.store.close()
        self.timers.close()
        log.info("stopped")

    def _close_sockets(self) -> None:
        for bound in self._sockets:
            bound.close()
        self._sockets.clear()


def delivery_config(config: BrokerConfig) -> DeliveryConfig:
    """The scheduler's part of the settings."""
    return DeliveryConfig(
        is_async=config.async_delivery,
        pending_limit=config.async_delivery_pending,
        max_resends=config.async_delivery_resends,
        batch_size=config.delivery_batch,
        warn_ms=config.lateness_warn_ms,
    )


def timer_config(config: BrokerConfig) -> TimerConfig:
    """The timers' part of the settings. A window that the wheel cannot have is the longest it can, as in RocketMQ."""
    window = config.timer_roll_window
    return TimerConfig(
        log_segment_size=config.timer_log_segment_size,
        is_enabled=config.timer_wheel,
        roll_window=window if 2 <= window <= MAX_ROLL_WINDOW else MAX_ROLL_WINDOW,
        max_delay=config.timer_max_delay_seconds,
        congest_limit=config.timer_congest_limit,
        stop_enqueue=config.timer_stop_enqueue,
        stop_dequeue=config.timer_stop_dequeue,
    )


def store_config(config: BrokerConfig) -> StoreConfig:
    """The store's part of the settings."""
    return StoreConfig(
        root=config.store_root,
        commitlog_directory=config.commitlog_directory,
        commitlog_segment_size=config.commitlog_segment_size,
        queue_segment_size=config.queue_segment_size,
        max_message_size=config.max_message_size,
        cached_size=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") * config.memory_ratio // 100,
        retention=retention_config(config),
    )


def _descriptor_limit() -> int:
    """How many files and sockets this process may have open, after asking for as many as it may get."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return min(hard, 1 << 20) if hard != resource.RLIM_INFINITY else 1 << 20


def _bound(host: str, port: int) -> socket.socket:
    """A socket bound to a port. Raises ConfigError where that is taken or impossible."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.setblocking(False)
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(f"port {port} on {host} is taken by another process") from None
        raise ConfigError(f"cannot listen on {host}, port {port}: {error.strerror}") from None
    return bound


def _join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
