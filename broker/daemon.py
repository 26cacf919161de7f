"""The broker assembled: the one place where configuration, store, scheduler, handlers and servers meet.

Start: bind the ports, inspect the store and read the tables, recover, listen. Stop: accept no more connections or
requests, finish requests in progress, answer held requests, save the tables, flush, make a last checkpoint."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import resource
import socket
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import structlog

from duemq.broker.access.accounts import topic_of_message
from duemq.broker.access.guard import Authority, Guard
from duemq.broker.admin.bridges import Bridges
from duemq.broker.admin.cleaning import CleaningHandlers
from duemq.broker.admin.connections import ConnectionHandlers
from duemq.broker.admin.consumption import ConsumptionHandlers
from duemq.broker.admin.groups import GroupHandlers
from duemq.broker.admin.move_clock import ClockHandlers
from duemq.broker.admin.runtime_info import RuntimeInfoHandlers, Sources
from duemq.broker.admin.settings import SettingsHandlers
from duemq.broker.admin.stats import SAMPLE_SECONDS, BrokerStats
from duemq.broker.admin.stats_items import StatsItems
from duemq.broker.admin.topics import TopicHandlers
from duemq.broker.audit.log import AuditLog
from duemq.broker.audit.recorder import Recorder
from duemq.broker.consume.members import ClientHandlers
from duemq.broker.consume.offsets import OffsetHandlers
from duemq.broker.consume.pull import PullHandlers
from duemq.broker.consume.pull_checks import PullChecks
from duemq.broker.consume.queue_locks import QueueLockHandlers
from duemq.broker.consume.reset_offset import ResetOffsetHandlers
from duemq.broker.errors import ConfigError
from duemq.broker.housekeeping import Chore, Housekeeping
from duemq.broker.limits import Limits
from duemq.broker.names.nameserver import NameServer
from duemq.broker.names.registration import Registrar
from duemq.broker.net.admission import Admission
from duemq.broker.net.cold_reads import ColdReads
from duemq.broker.net.connection import Connection, InputBudget
from duemq.broker.net.connection_limits import LOOK_SECONDS as NEW_SECONDS
from duemq.broker.net.connection_limits import ConnectionLimits
from duemq.broker.net.held_answers import HeldAnswers
from duemq.broker.net.idle_connections import close_idle
from duemq.broker.net.output_budget import OutputBudget
from duemq.broker.net.request_turns import RequestBudget, RequestTime, RequestTurns
from duemq.broker.net.router import Router
from duemq.broker.net.slices import Slices
from duemq.broker.produce.answers import SendAnswers
from duemq.broker.produce.batches import BatchHandlers
from duemq.broker.produce.key_turns import KeyTurns
from duemq.broker.produce.message import of_broker
from duemq.broker.produce.replace import Replacements
from duemq.broker.produce.retries_and_dead_letters import RetriesAndDeadLetters
from duemq.broker.produce.send import SendHandlers
from duemq.broker.produce.send_back import SendBackHandlers
from duemq.broker.produce.send_topics import SendTopics
from duemq.broker.produce.special_sends import SpecialSends
from duemq.broker.produce.staging import Staging
from duemq.broker.produce.when_ready import WhenReady
from duemq.broker.settings.config import BrokerConfig, Origin, credentials_of, parse_addresses
from duemq.broker.settings.live_settings import LiveSettings
from duemq.broker.settings.parts import (
    DELIVERY_SETTINGS,
    DURABILITY_SETTINGS,
    TIMER_SETTINGS,
    delivery_config,
    durability_config,
    retention_config,
    store_config,
    timer_config,
)
from duemq.broker.tables.clients import Clients
from duemq.broker.tables.consumer_offsets import ConsumerOffsets
from duemq.broker.tables.groups import Groups
from duemq.broker.tables.locks import QueueLocks
from duemq.broker.tables.persister import Persister
from duemq.broker.tables.topics import Topics
from duemq.broker.tls.contexts import LOOK_SECONDS as TLS_LOOK_SECONDS
from duemq.broker.tls.contexts import WARN_SECONDS, TlsContexts
from duemq.broker.turns import TimeBudget, Turns
from duemq.broker.waiting.changes_by_id import ChangesById
from duemq.broker.waiting.pending import PendingHandlers
from duemq.broker.waiting.recall_and_cancel import RecallHandlers
from duemq.broker.waiting.recurring import RecurringHandlers
from duemq.broker.waiting.timer_status import TimerStatusHandlers
from duemq.broker.workers import Background, ThreadWorkers, Workers
from duemq.protocol.requests.headers import BrokerIdentity
from duemq.protocol.requests.signature import Signer
from duemq.protocol.topics import SCHEDULE_TOPIC, TIMER_TOPIC
from duemq.scheduler.levels import service
from duemq.scheduler.levels.delay_offsets import read_delay_offsets
from duemq.scheduler.levels.service import LevelQueues
from duemq.scheduler.levels.table import DelayLevels, queue_id_of
from duemq.scheduler.search import WaitingMessages
from duemq.scheduler.timers import inspection
from duemq.scheduler.timers import service as timers_module
from duemq.scheduler.timers.files import small_files
from duemq.scheduler.timers.policy.policies import TimerPolicy
from duemq.scheduler.timers.service import Timers
from duemq.storage import file_names
from duemq.storage.budget import Budget
from duemq.storage.clock import Clock, Moment, MovableClock, SystemClock, look
from duemq.storage.config_file import ConfigFile
from duemq.storage.durability.health import Verdict
from duemq.storage.durability.jobs import Lane
from duemq.storage.durability.owner import Durability
from duemq.storage.durability.recovery import Recovered
from duemq.storage.durability.retention import Retention
from duemq.storage.errors import StoreError
from duemq.storage.files import Files, OsFiles
from duemq.storage.queues.pull import ColdRead, ReadAhead
from duemq.storage.store import MessageStore

if TYPE_CHECKING:
    from duemq.broker.access.acl_files import AclFiles
    from duemq.broker.access.auth.opening import Auth
    from duemq.broker.access.auth.store import AuthStore

log = structlog.get_logger(__name__)

VIP_PORT_OFFSET: Final = 2
BACKLOG: Final = 4096
_OTHER_DESCRIPTORS: Final = 64
"""Maximum number of descriptors that are open besides connections and files of the store."""
STOP_SECONDS: Final = 5.0
CLEAN_SECONDS: Final = 10.0
REPORT_SECONDS: Final = 1.0
AUDIT_SECONDS: Final = 5.0
"""The interval between attempts to write the audit log while it cannot be written."""
_NEW_ROUTES_SECONDS: Final = 0.5
"""The interval at which consumers that have just learned of a topic are notified to rebalance. RocketMQ's clients ask
for routes every 30 s; without the notification they take the topic's queues up to 20 s after that."""
_SAVE_OFFSETS: Final = "offsets"
MAX_WAIT_SECONDS: Final = 10.0
"""The wall clock may be set, so it is read at least this often while a message waits."""


class Broker:
    """One broker. `start` and `stop` run in the event loop."""

    def __init__(
        self,
        config: BrokerConfig,
        *,
        origin: Origin | None = None,
        clock: Clock | None = None,
        files: Files | None = None,
        workers: Callable[[asyncio.AbstractEventLoop], Workers] = ThreadWorkers,
        budget: Callable[[float], Budget] = TimeBudget,
        request_budget: RequestBudget | None = None,
        open_auth_store: Callable[[str], AuthStore] | None = None,
    ) -> None:
        """`clock`, `files`, `workers`, `budget` and `request_budget` default to the machine's; a simulation passes its
        own. `open_auth_store` opens the users and policies of ACL 2.0 in a directory; the default is RocksStore."""
        self._open_auth_store = open_auth_store
        self._request_budget = request_budget or RequestTime()
        self.config = config
        """The settings at the start."""
        self.settings = LiveSettings(config, origin)
        self._real_clock = clock or SystemClock()
        """The clock of clients, connections and files."""
        self._clock: Clock = MovableClock(self._real_clock) if config.test_clock else self._real_clock
        """The clock of messages. It is separate because moving it by two hours in a test must not expire clients or
        files."""
        descriptors = _descriptor_limit()
        self._files = files or OsFiles(descriptors // 4)
        self._max_connections = max(4, descriptors // 4 * 3 - min(_OTHER_DESCRIPTORS, descriptors // 4))
        self._make_workers = workers
        self._make_budget = budget
        self._levels_table = DelayLevels(config.delay_levels)
        self._sockets: list[socket.socket] = []
        self._servers: list[asyncio.Server] = []
        self._auth: Auth | None = None
        self._stopped_store: asyncio.Future[Exception | None] | None = None
        self._waiting_for_checkpoint: list[asyncio.Future[None]] = []

    # --- start

    async def start(self) -> None:
        """Start; the broker listens when this returns. A start that fails leaves the store unchanged. Raises
        ConfigError, StoreError, OSError."""
        began = time.monotonic()
        self._loop = loop = asyncio.get_running_loop()
        self.failed: asyncio.Future[str] = loop.create_future()
        """Resolved with the reason once the store accepts nothing more: the broker must then be stopped and
        restarted."""
        self._workers = self._make_workers(loop)
        try:
            self._bind()
            self._acl_files = self._read_accounts()
            self._tls = TlsContexts(self.config, self._workers, self._real_clock)
        except BaseException:
            self._close_sockets()
            self._workers.stop()
            raise
        self._turns = turns = Turns(loop, self._clock, self._make_budget)
        self._request_turns = RequestTurns(turns, self._request_budget)
        self._reads = ColdReads(self._files, self._workers, turns.share)
        self._durability_work, self._levels_work, self._timers_work = (
            turns.work(name, step, self._reads.step)
            for name, step in (
                ("durability", self._step_durability),
                ("levels", self._step_levels),
                ("timers", self._step_timers),
            )
        )
        self.store = MessageStore(
            store_config(self.config),
            self._files,
            (self.config.advertised_host, self.config.listen_port),
            self._levels_table.deliver_time,
            self._durability_work.wake,
            self.settings.current(lambda config: config.max_message_size),
        )
        try:
            self.store.inspect()
            since = small_files.needed_from(self.store.checkpoint.notes)
            if since is not None:
                self.store.need(since, "timers that are due, or were just delivered, are known from")
            checkpoint = self.store.checkpoint
            log_end = small_files.log_end_of(checkpoint.notes) if not checkpoint.is_foreign else None
            inspection.inspect(self._files, self.config.store_root, log_end)
            self._read_tables()
            self._expect_queues()
            if self.config.authentication:
                self._auth = self._open_auth()
            recovered = self.store.recover()
            log.info(
                "store_opened",
                path=self.config.store_root,
                commitlog_end=recovered.end,
                records_read=recovered.records,
                cut_because=recovered.torn,
                consume_queues_rebuilt=recovered.rebuilt,
            )
            self._assemble(recovered)
            if recovered.is_foreign:
                self.durability.take_over(look(self._clock))
            for bound in self._sockets:
                self._servers.append(await loop.create_server(self._connect, sock=bound, backlog=BACKLOG))
        except BaseException:
            for server in self._servers:
                server.close()
            self._close_sockets()
            self._workers.stop()
            self._close_auth()
            self.store.abandon()
            raise
        turns.start()
        self.housekeeping.start()
        if self.registration is not None:
            self.registration.start()
        self._tls.tell()
        log.info(
            "listening",
            broker=f"{self.config.host}:{self.config.listen_port}",
            name_server=self.config.nameserver_addresses or f"{self.config.host}:{self.config.nameserver_port}",
            vip=f"{self.config.host}:{self.config.listen_port - VIP_PORT_OFFSET}",
            advertised=f"{self.config.advertised_host}:{self.config.listen_port}",
            tls=self.config.tls_mode,
            store=self.config.store_root,
            seconds=round(time.monotonic() - began, 3),
        )

    def _bind(self) -> None:
        config = self.config
        ports = [config.listen_port, config.listen_port - VIP_PORT_OFFSET]
        if not config.nameserver_addresses:
            ports.append(config.nameserver_port)
        for port in ports:
            self._sockets.append(_listening_socket(config.host, port))

    # The modules of access control, and YAML with them, are imported only if access control is on: a start without them
    # takes a tenth less time.

    def _read_accounts(self) -> AclFiles | None:
        """Read the accounts if aclEnable is on; otherwise return None. Raises ConfigError."""
        if not self.config.acl:
            return None
        from duemq.broker.access.acl_files import AclFiles

        directory = self._plain_directory()
        if directory is None:
            raise ConfigError(
                "aclEnable=true: say where the accounts are. With rocketmqHome=DIRECTORY, they are in "
                "DIRECTORY/conf/plain_acl.yml"
            )
        return AclFiles(directory, self._files, self._workers)

    def _open_auth(self) -> Auth:
        """Open the users and policies of ACL 2.0. Raises AuthStoreError, AclFileError."""
        from duemq.broker.access.auth.opening import open_auth
        from duemq.broker.access.auth.store import RocksStore

        return open_auth(self.config, self._plain_directory(), self._workers, self._open_auth_store or RocksStore)

    def _plain_directory(self) -> str | None:
        """Return the directory of plain_acl.yml, None if no setting says where it is."""
        home, file = self.config.rocketmq_home, self.settings.origin.file
        if home:
            return os.path.join(home, "conf")
        return os.path.dirname(os.path.abspath(file)) if file is not None else None

    def _topic_of_record(self, physical_offset: int) -> str | None:
        message = self.store.named_message_at(physical_offset)
        return topic_of_message(message) if message is not None else None

    def _is_account(self, name: str) -> bool:
        """Whether an account or a user with this name exists."""
        files, auth = self._acl_files, self._auth
        return (files is not None and name in files.accounts.by_key) or (
            auth is not None and name in auth.users.by_name
        )

    def _read_tables(self) -> None:
        """Read all tables before anything in the store is changed: an unreadable table stops the start. Raises
        StoreFormatError, OSError."""
        config, store, real_clock = self.config, self.store, self._real_clock
        address = _join(config.advertised_host, config.listen_port)

        def table(name: str) -> ConfigFile:
            return ConfigFile(self._files, os.path.join(config.store_root, name))

        self._limits = limits = Limits(self.settings)
        self._audit: AuditLog | None = None
        self._recorder: Recorder | None = None
        if config.audit:
            self._audit = AuditLog(self.settings, config.audit_path, self._workers)
            self._recorder = Recorder(self._audit, real_clock, self._is_account)
        created = self._recorder.created if self._recorder is not None else _ignore
        self._persister = persister = Persister(self._loop, self._workers)
        self.topics = topics = Topics(
            self.settings,
            store,
            table(file_names.TOPICS),
            real_clock,
            persister,
            limits,
            self._register_soon,
            self._policy_changed,
            created,
        )
        self.groups = groups = Groups(
            self.settings, table(file_names.SUBSCRIPTION_GROUPS), real_clock, persister, limits, created
        )
        self.offsets = offsets = ConsumerOffsets(table(file_names.CONSUMER_OFFSETS), persister)
        self.nameserver = nameserver = NameServer(
            config.cluster_name,
            config.broker_name,
            address,
            topics,
            table(file_names.KV_CONFIG),
            real_clock,
            persister,
            limits,
        )
        for loaded in (topics, groups, offsets, nameserver):
            loaded.load()
        file = table(file_names.DELAY_OFFSETS)
        file.require_files()
        is_needed = store.checkpoint.is_foreign or service.NAME not in store.checkpoint.notes
        self._delay_offsets = read_delay_offsets(file, is_needed=is_needed)

    def _expect_queues(self) -> None:
        """Tell the store how far levels and timers had read their consume queues."""
        store = self.store
        for level, offset in service.reached(store.checkpoint, self._delay_offsets).items():
            store.expect(SCHEDULE_TOPIC, queue_id_of(level), offset)
        offset = small_files.reached(store.checkpoint, self._files, store.config.root)
        store.expect(TIMER_TOPIC, 0, offset)

    def _assemble(self, recovered: Recovered) -> None:
        config, store, clock, real_clock, loop = self.config, self.store, self._clock, self._real_clock, self._loop
        limits, turns = self._limits, self._request_turns
        topics, groups, offsets, now = self.topics, self.groups, self.offsets, look(clock)
        self.levels = levels = LevelQueues(
            store,
            self._delay_offsets,
            self._levels_table,
            recovered,
            now,
            self.settings.current(delivery_config),
            is_awaited=config.sync_flush,
            read_cold=self._read_cold,
            wake=self._levels_work.wake,
        )
        self.timers = timers = Timers(
            store,
            self.settings.current(timer_config),
            recovered,
            now,
            self._read_cold,
            levels,
            self._timers_work.wake,
            self._timers_work.wake_later,
            self.topics.is_deleted,
        )
        retention = Retention(self.settings.current(retention_config), self._files, store.log)
        self.durability = durability = Durability(
            store,
            {service.NAME: levels, timers_module.NAME: timers},
            retention,
            _Waking(self._workers, self._durability_work.wake),
            self.settings.current(durability_config),
            self,
            now,
        )
        self.held = held = HeldAnswers(
            loop, config.sync_flush_timeout_ms / 1000, lambda: self.settings.config.send_queue_capacity, self._want
        )
        self.registration: Registrar | None = None
        if config.nameserver_addresses:
            keys = credentials_of(
                "innerClientAuthenticationCredentials", config.inner_credentials, ("accessKey", "secretKey")
            )
            self.registration = Registrar(
                BrokerIdentity(
                    config.broker_name,
                    _join(config.advertised_host, config.listen_port),
                    config.cluster_name,
                    config.broker_id,
                ),
                parse_addresses(config.nameserver_addresses),
                topics,
                config.register_period_ms / 1000,
                self._connect_to,
                Signer(*keys) if keys is not None else None,
            )
        topics.begin()
        groups.begin()

        self.clients = clients = Clients(self.settings, real_clock, limits, turns)
        locks = QueueLocks(real_clock, limits)
        reads = self._reads
        items = StatsItems(store.appender, real_clock, reads, config.cluster_name)
        stats = BrokerStats(store.appender, real_clock, items)
        admission = Admission(loop, config.max_waiting_request_bytes)
        acl_files, auth = self._acl_files, self._auth
        authority: Authority | None = auth.authority if auth is not None else None
        if acl_files is not None:
            from duemq.broker.access.plain import PlainAuthority

            authority = PlainAuthority(acl_files)
        guard = Guard(authority, self._topic_of_record, reads, limits, loop.time) if authority is not None else None
        self._connection_limits = connection_limits = ConnectionLimits(loop, limits, self._max_connections)
        self.router = router = Router(
            store,
            clock,
            held,
            stats,
            admission,
            reads,
            limits,
            connection_limits,
            sync_flush=config.sync_flush,
            guard=guard,
            recorder=self._recorder,
        )
        self._budget = InputBudget(loop, config.max_unfinished_request_bytes)
        self._output = OutputBudget(loop, config.max_unread_response_bytes)
        pull_checks = PullChecks(self.settings, topics, groups, clients, limits, guard)
        self._pulls = PullHandlers(
            self.settings, store, offsets, stats, router, loop, turns, self._workers, reads, pull_checks
        )
        bridges = Bridges()
        sources = Sources(
            settings=self.settings,
            store=store,
            stats=stats,
            levels=levels,
            timers=timers,
            held=held,
            retention=retention,
            polls=self._pulls.polls,
            bridges=bridges,
            clock=real_clock,
            messages_clock=clock,
            limits=limits,
            router=router,
            tls=self._tls,
            guard=guard,
        )
        added = of_broker(config.cluster_name, config.region, is_traced=config.trace_on)
        staging = Staging(store, levels, timers, added)
        send_topics = SendTopics(self.settings, topics, held)
        when_ready = WhenReady(topics, store.appender, router, clock, reads)
        answers = SendAnswers(config, store.appender.store_host)
        retries = RetriesAndDeadLetters(topics, groups)
        batches = BatchHandlers(self.settings, store.appender, send_topics, when_ready, answers, limits, added)
        key_turns = KeyTurns(store, timers, clock, reads)
        replacements = Replacements(store, send_topics, levels, timers, staging, answers, router, clock, key_turns)
        special = SpecialSends(store.appender, send_topics, retries, staging, batches, replacements, answers, reads)
        send = SendHandlers(store, send_topics, levels, timers, staging, when_ready, special, answers, reads)
        send_back = SendBackHandlers(
            self.settings, store, topics, groups, retries, staging, router, clock, reads, stats
        )
        self._slices = slices = Slices(self._turns.share, reads)
        changes_by_id = ChangesById(self.settings, store, timers, clock, slices, reads)
        messages = WaitingMessages(store, timers, levels)
        pending_handlers = PendingHandlers(timers, messages, changes_by_id, router, clock, slices, reads)
        recurring_handlers = RecurringHandlers(timers, key_turns, changes_by_id, router, clock)
        topic_handlers = TopicHandlers(
            self.settings,
            store,
            topics,
            offsets,
            levels,
            items,
            self._pulls.polls,
            durability,
            reads,
            self._register_now,
        )
        consumption = ConsumptionHandlers(
            self.settings,
            store,
            topics,
            groups,
            offsets,
            clients,
            items,
            reads,
            _join(config.advertised_host, config.listen_port),
            clock,
        )
        for handlers in (
            send,
            batches,
            send_back,
            self._pulls,
            OffsetHandlers(store, topics, groups, offsets, levels),
            ResetOffsetHandlers(config.broker_name, store, topics, offsets, clients, reads),
            ClientHandlers(topics, groups, clients),
            QueueLockHandlers(offsets, locks),
            topic_handlers,
            GroupHandlers(groups, offsets, limits),
            ConnectionHandlers(self.settings, store, clients, reads),
            RuntimeInfoHandlers(sources),
            RecallHandlers(self.settings, store, topics, timers, router, slices, changes_by_id),
            TimerStatusHandlers(timers),
            pending_handlers,
            recurring_handlers,
            SettingsHandlers(self.settings, self._workers, self._levels_noted, guard),
            self.nameserver,
            ClockHandlers(clock, self._clock_moved),
            consumption,
            CleaningHandlers(store, topics, durability),
            bridges,
        ):
            handlers.register(router)
        chores = []
        if acl_files is not None:
            from duemq.broker.access.acl_files import LOOK_SECONDS
            from duemq.broker.access.handlers import AclHandlers

            address = _join(config.advertised_host, config.listen_port)
            AclHandlers(acl_files, config.cluster_name, config.broker_name, address).register(router)
            chores.append(Chore("accounts", lambda: LOOK_SECONDS, acl_files.look))
            acl_files.on_change(self._pulls.polls.check_all)
        if auth is not None:
            from duemq.broker.access.auth.handlers import AuthHandlers

            AuthHandlers(auth.users).register(router)
            router.add_clients(auth.authority)
            auth.users.on_change(self._pulls.polls.check_all)
        if self._audit is not None:
            chores.append(Chore("audit", lambda: AUDIT_SECONDS, self._audit.write))
        self._follow_settings()
        self.housekeeping = Housekeeping(
            loop,
            (
                *chores,
                Chore("tls", lambda: TLS_LOOK_SECONDS, self._tls.look),
                Chore("certificates", lambda: WARN_SECONDS, self._tls.warn),
                Chore(_SAVE_OFFSETS, self._offsets_interval, offsets.save_if_changed),
                Chore("stats", lambda: SAMPLE_SECONDS, stats.sample),
                Chore("levels", lambda: REPORT_SECONDS, lambda: levels.report(look(clock))),
                Chore("timers", lambda: REPORT_SECONDS, lambda: timers.report(look(clock))),
                Chore("clients", lambda: CLEAN_SECONDS, clients.expire),
                Chore(
                    "new routes", lambda: _NEW_ROUTES_SECONDS, lambda: clients.rebalance(self.nameserver.take_found())
                ),
                Chore("locks", lambda: CLEAN_SECONDS, locks.expire),
                Chore("brokers", lambda: CLEAN_SECONDS, self.nameserver.expire),
                Chore("connections", lambda: CLEAN_SECONDS, self._close_idle),
                Chore("new connections", lambda: NEW_SECONDS, connection_limits.close_old),
            ),
        )

    # --- turns

    def _step_durability(self, now: Moment, budget: Budget) -> float | None:
        return self.durability.step(now, budget, self._real_clock.now_ms())

    def _step_levels(self, now: Moment, budget: Budget) -> float | None:
        before = self.store.log.end
        try:
            return _wait(self.levels.step(now, budget), now)
        finally:
            if self.config.sync_flush and self.store.log.end > before:
                self._want(self.store.log.end)  # a delivery counts only once it is on the disk

    def _step_timers(self, now: Moment, budget: Budget) -> float | None:
        return _wait(self.timers.step(now, budget), now)

    def _want(self, position: int) -> None:
        self.durability.want(position)
        self._durability_work.wake()

    def _clock_moved(self) -> None:
        """Wake the work that waits by the messages' clock, which was moved: its timers run by another clock."""
        self._levels_work.wake()
        self._timers_work.wake()

    # --- see `storage.durability.owner.Watcher`

    def released(self, position: int) -> None:
        """Send the answers and count the deliveries up to a position."""
        self.held.released(position)
        self.levels.note_flushed(position)

    def noted(self) -> None:
        """Wake those waiting for a checkpoint, so that each checks whether this was the one."""
        waiting, self._waiting_for_checkpoint = self._waiting_for_checkpoint, []
        for waiter in waiting:
            if not waiter.done():
                waiter.set_result(None)

    async def _levels_noted(self) -> bool:
        """Wait for a checkpoint with the current table of levels, at most syncFlushTimeout. Return whether there is
        one."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.config.sync_flush_timeout_ms / 1000):
                while not self.levels.is_noted(self.store.checkpoint):
                    waiter: asyncio.Future[None] = self._loop.create_future()
                    self._waiting_for_checkpoint.append(waiter)
                    await waiter
        return self.levels.is_noted(self.store.checkpoint)

    def poisoned(self, reason: str) -> None:
        """Give up the held answers, and resolve `failed`, which ends the process."""
        log.error("store_broken", reason=reason)
        self.held.give_up()
        if not self.failed.done():
            self.failed.set_result(reason)

    def stopped(self, error: Exception | None) -> None:
        """Note that the store has stopped. `error`: why it may not be durable; None if it is."""
        if self._stopped_store is not None and not self._stopped_store.done():
            self._stopped_store.set_result(error)

    # --- settings

    def _follow_settings(self) -> None:
        """Act on changes for which it is not enough that the components read the settings in force."""
        on = self.settings.on_change
        on(DELIVERY_SETTINGS, lambda _: self._levels_work.wake())
        on("messageDelayLevel", self._change_levels)
        on(TIMER_SETTINGS, lambda _: self._timers_work.wake())
        on(DURABILITY_SETTINGS, lambda _: self._durability_work.wake())
        on("flushConsumerOffsetInterval", lambda _: self.housekeeping.wait_anew(_SAVE_OFFSETS))

    def _policy_changed(self, topic: str, policy: TimerPolicy | None) -> None:
        self.timers.set_policy(topic, policy)

    def _change_levels(self, config: BrokerConfig) -> None:
        self.levels.set_table(DelayLevels(config.delay_levels), self._clock.now_ms())
        self._durability_work.wake()

    # --- chores

    def _offsets_interval(self) -> float:
        return self.settings.config.offset_flush_interval_ms / 1000

    def _close_idle(self) -> None:
        close_idle(self.router.connections, self._loop.time() - self.settings.config.idle_seconds)

    # --- work that waits for the disk

    def _read_cold(self, job: ColdRead | ReadAhead, done: Callable[[], None]) -> None:
        """Run a read in a thread, then call `done`, also after an error. The caller then reads again, and finds the
        records in memory, or meets the error itself."""
        self._workers.start(Background.READS, job.run, lambda error: done())

    def _connect(self) -> Connection:
        return Connection(self.router, self._loop, self._budget, self._output, self._request_turns, self._tls)

    async def _connect_to(self, address: tuple[str, int]) -> Connection:
        """Connect to a name server, with TLS if the settings say so."""

        def make() -> Connection:
            return Connection(
                self.router, self._loop, self._budget, self._output, self._request_turns, is_outgoing=True
            )

        _, connection = await self._loop.create_connection(make, *address, ssl=self._tls.client)
        return connection

    def _register_now(self) -> asyncio.Future[None] | None:
        return self.registration.register_now() if self.registration is not None else None

    def _register_soon(self) -> None:
        if self.registration is not None:
            self.registration.register_now()

    # --- stop

    async def stop(self) -> str | None:
        """Stop the broker. Return None if everything acknowledged is durable, otherwise why it may not be."""
        for server in self._servers:
            server.close()
        if self.registration is not None:
            await self.registration.stop()
        self.housekeeping.stop()
        self.router.stop_taking()
        self._slices.stop()
        await self.router.finish(STOP_SECONDS)
        self._pulls.stop()
        self._levels_work.stop()
        self._timers_work.stop()
        await self._save_tables()
        await self._hand_over()
        failure = await self._stop_store()
        for connection in list(self.router.connections):
            connection.close()
        await asyncio.sleep(0)
        self._turns.stop()
        self._workers.stop()
        self._close_auth()
        self.store.abandon()
        self.timers.close()
        log.info("stopped")
        return failure

    async def _save_tables(self) -> None:
        try:
            await self._persister.stop()
            self.offsets.save_now()
        except OSError as error:
            log.error("tables_not_saved", reason=str(error))
        if self._audit is not None:
            await self._audit.stop()

    async def _hand_over(self) -> None:
        """Leave the files of levels and timers in a state from which Apache's broker can continue. duemq itself needs
        only the look at the clock, in case the clock was set after the last turn."""
        done: asyncio.Future[None] = self._loop.create_future()
        parts = deque((self.levels.hand_over_next, self.timers.hand_over_next))

        def step(now: Moment, budget: Budget) -> float | None:
            try:
                self.levels.watch_clock(now)
            except (StoreError, OSError) as error:
                log.error("clock_not_followed", reason=str(error))
            while parts:
                try:
                    has_more = parts[0](now.wall_ms)
                except (StoreError, OSError) as error:  # the other part is still handed over
                    log.error("not_handed_over", reason=str(error))
                    has_more = False
                if not has_more:
                    parts.popleft()
                if parts and budget.is_spent:
                    return 0.0
            done.set_result(None)
            return None

        if self.store.health.verdict is Verdict.POISONED:
            return
        work = self._turns.work("hand over", step)
        work.wake()
        await done
        work.stop()

    async def _stop_store(self) -> str | None:
        self._stopped_store = self._loop.create_future()
        self.durability.stop()
        self._durability_work.wake()
        error = await self._stopped_store
        if error is not None:
            log.error("not_stopped_cleanly", reason=str(error))
        return str(error) if error is not None else None

    def _close_auth(self) -> None:
        if self._auth is not None:
            self._auth.users.close()

    def _close_sockets(self) -> None:
        for bound in self._sockets:
            bound.close()
        self._sockets.clear()


class _Waking:
    """Workers that call `wake` after each job."""

    def __init__(self, workers: Workers, wake: Callable[[], None]) -> None:
        self._workers = workers
        self._wake = wake

    def start(self, lane: Lane, work: Callable[[], None], done: Callable[[Exception | None], None]) -> None:
        """See `storage.durability.jobs.JobWorkers`."""

        def finished(error: Exception | None) -> None:
            done(error)
            self._wake()

        self._workers.start(lane, work, finished)


def _ignore(kind: str, name: str) -> None:
    """Record nothing."""


def _wait(due_ms: int | None, now: Moment) -> float | None:
    """Return the seconds until `due_ms`, at most MAX_WAIT_SECONDS, because the wall clock may be set meanwhile."""
    if due_ms is None:
        return None
    return min(max(0.0, (due_ms - now.wall_ms) / 1000), MAX_WAIT_SECONDS)


def _descriptor_limit() -> int:
    """Return how many files and sockets this process may have open, after raising the soft limit to the hard one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return min(hard, 1 << 20) if hard != resource.RLIM_INFINITY else 1 << 20


def _listening_socket(host: str, port: int) -> socket.socket:
    """Return a socket bound to a port. Raises ConfigError if the port is taken or cannot be bound."""
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
