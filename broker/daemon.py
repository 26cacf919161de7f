"""The broker: its start and its stop. The functions of `broker.assembly` build its components.

Start: bind the ports, inspect the store and read the tables, recover, listen. Stop: accept no more connections or
requests, finish requests in progress, answer held requests, save the tables, flush, make a last checkpoint."""

from __future__ import annotations

import asyncio
import errno
import resource
import socket
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import structlog

from duemq.broker.assembly.access import make_audit, make_guard, open_users, read_accounts, register_access
from duemq.broker.assembly.admin import assemble_admin
from duemq.broker.assembly.chores import SAVE_OFFSETS, make_chores
from duemq.broker.assembly.consume import assemble_consume
from duemq.broker.assembly.core import Core
from duemq.broker.assembly.names import make_registrar
from duemq.broker.assembly.net import assemble_net, make_held_answers
from duemq.broker.assembly.produce import assemble_produce
from duemq.broker.assembly.steps import make_steps
from duemq.broker.assembly.storage import assemble_storage, expect_queues, inspect_store, make_works
from duemq.broker.assembly.tables import read_tables
from duemq.broker.assembly.waiting import assemble_waiting
from duemq.broker.errors import ConfigError
from duemq.broker.housekeeping import Housekeeping
from duemq.broker.limits import Limits
from duemq.broker.net.cold_reads import ColdReads
from duemq.broker.net.request_turns import RequestBudget, RequestTime, RequestTurns
from duemq.broker.net.slices import Slices
from duemq.broker.produce.key_turns import KeyTurns
from duemq.broker.settings.config import BrokerConfig, Origin
from duemq.broker.settings.live_settings import LiveSettings
from duemq.broker.settings.parts import DELIVERY_SETTINGS, DURABILITY_SETTINGS, TIMER_SETTINGS, store_config
from duemq.broker.tls.contexts import TlsContexts
from duemq.broker.turns import TimeBudget, Turns
from duemq.broker.workers import ThreadWorkers, Workers
from duemq.scheduler.levels.table import DelayLevels
from duemq.storage.budget import Budget
from duemq.storage.clock import Clock, Moment, MovableClock, SystemClock, look
from duemq.storage.durability.health import Verdict
from duemq.storage.durability.recovery import Recovered
from duemq.storage.durability.wanted import WantedPosition
from duemq.storage.errors import StoreError
from duemq.storage.files import Files, OsFiles
from duemq.storage.store import MessageStore

if TYPE_CHECKING:
    from duemq.broker.access.auth.opening import Auth
    from duemq.broker.access.auth.store import AuthStore

log = structlog.get_logger(__name__)

BACKLOG: Final = 4096
_OTHER_DESCRIPTORS: Final = 64
"""Maximum number of descriptors that are open besides connections and files of the store."""
STOP_SECONDS: Final = 5.0


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
        self._sockets: list[socket.socket] = []
        self._servers: list[asyncio.Server] = []
        self._auth: Auth | None = None

    @property
    def failed(self) -> asyncio.Future[str]:
        """Resolved with the reason once the store accepts nothing more: the broker must then be stopped and
        restarted."""
        return self._storage.watcher.failed

    # --- start

    async def start(self) -> None:
        """Start; the broker listens when this returns. A start that fails leaves the store unchanged. Raises
        ConfigError, StoreError, OSError."""
        began = time.monotonic()
        self._loop = loop = asyncio.get_running_loop()
        self._workers = self._make_workers(loop)
        try:
            self._bind()
            self._acl_files = read_accounts(self.settings, self._files, self._workers)
            self._tls = TlsContexts(self.config, self._workers, self._real_clock)
        except BaseException:
            self._close_sockets()
            self._workers.stop()
            raise
        self._turns = Turns(loop, self._clock, self._make_budget)
        self._core = self._make_core()
        try:
            recovered = self._open()
            self._assemble(recovered)
            if recovered.is_foreign:
                self._storage.durability.take_over(look(self._clock))
            for bound in self._sockets:
                self._servers.append(await loop.create_server(self._net.accept, sock=bound, backlog=BACKLOG))
        except BaseException:
            for server in self._servers:
                server.close()
            self._close_sockets()
            self._workers.stop()
            self._close_auth()
            self.store.abandon()
            raise
        self._turns.start(make_steps(self._core, self._storage, self._works, self._wanted))
        self.housekeeping.start()
        if self._registrar is not None:
            self._registrar.start()
        self._tls.tell()
        log.info(
            "listening",
            broker=f"{self.config.host}:{self.config.listen_port}",
            name_server=self.config.nameserver_addresses or f"{self.config.host}:{self.config.nameserver_port}",
            vip=f"{self.config.host}:{self.config.vip_port}",
            advertised=f"{self.config.advertised_host}:{self.config.listen_port}",
            tls=self.config.tls_mode,
            store=self.config.store_root,
            seconds=round(time.monotonic() - began, 3),
        )

    def _make_core(self) -> Core:
        """Make the store, which is not open yet, and what runs work in this process."""
        turns = self._turns
        reads = ColdReads(self._files, self._workers, turns.share)
        self._works = make_works(turns)
        self._wanted = WantedPosition(self._works.durability.wake)
        self.store = MessageStore(
            store_config(self.config),
            self._files,
            (self.config.advertised_host, self.config.listen_port),
            DelayLevels(self.config.delay_levels).deliver_time,
            on_work=self._works.durability.wake,
            max_message_size=self.settings.current(lambda config: config.max_message_size),
        )
        return Core(
            config=self.config,
            settings=self.settings,
            loop=self._loop,
            workers=self._workers,
            clock=self._clock,
            real_clock=self._real_clock,
            files=self._files,
            store=self.store,
            limits=Limits(self.settings),
            reads=reads,
            slices=Slices(turns.share, reads),
            request_turns=RequestTurns(turns, self._request_budget),
        )

    def _bind(self) -> None:
        for port in self.config.ports:
            self._sockets.append(_listening_socket(self.config.host, port))

    def _open(self) -> Recovered:
        """Open the store. Everything is read before anything in the store is changed: an unreadable table stops the
        start. Raises StoreError, OSError, AuthStoreError, AclFileError."""
        core = self._core
        inspect_store(core)
        self._tables = read_tables(core)
        expect_queues(core, self._tables.delay_offsets)
        self._auth = open_users(core, self._open_auth_store)
        self._audit = make_audit(core, self._tables, self._acl_files, self._auth)
        recovered = self.store.recover()
        log.info(
            "store_opened",
            path=self.config.store_root,
            commitlog_end=recovered.end,
            records_read=recovered.records,
            cut_because=recovered.torn,
            consume_queues_rebuilt=recovered.rebuilt,
        )
        return recovered

    def _assemble(self, recovered: Recovered) -> None:
        """Build the components that need an open store, area by area, and connect them."""
        core, tables = self._core, self._tables
        held = make_held_answers(core, self._wanted)
        self._storage = storage = assemble_storage(
            core, tables, recovered, works=self._works, wanted=self._wanted, held=held
        )
        guard = make_guard(core, self._acl_files, self._auth)
        self._net = net = assemble_net(
            core,
            guard,
            self._audit.recorder if self._audit is not None else None,
            self._tls,
            held,
            max_connections=self._max_connections,
        )
        self._registrar = make_registrar(core, tables.topics, net.connect)
        if self._registrar is not None:
            tables.topics.on_change(self._registrar.register_now)
        tables.topics.on_policy(storage.timers.set_policy)
        tables.begin()

        key_turns = KeyTurns(core.store, storage.timers, core.clock, core.reads)
        consume = assemble_consume(core, tables, storage.levels, net, guard)
        self._pulls = consume.pulls
        polls = consume.pulls.polls
        handlers = (
            *assemble_produce(core, tables, storage, net, key_turns),
            *consume.handlers,
            *assemble_waiting(core, tables.topics, storage, net.router, key_turns),
            tables.values,
            tables.nameserver,
            *assemble_admin(
                core,
                tables,
                storage,
                net,
                polls,
                guard=guard,
                registrar=self._registrar,
                works=self._works,
            ),
        )
        for each in handlers:
            each.register(net.router)
        chores = register_access(core, net.router, self._acl_files, self._auth, polls.check_all)
        self.housekeeping = Housekeeping(core.loop, [*chores, *make_chores(core, tables, storage, net, self._audit)])
        self._follow_settings()

    # --- settings

    def _follow_settings(self) -> None:
        """Act on changes for which it is not enough that the components read the settings in force."""
        on = self.settings.on_change
        on(DELIVERY_SETTINGS, lambda _: self._works.levels.wake())
        on("messageDelayLevel", self._change_levels)
        on(TIMER_SETTINGS, lambda _: self._works.timers.wake())
        on(DURABILITY_SETTINGS, lambda _: self._works.durability.wake())
        on("flushConsumerOffsetInterval", lambda _: self.housekeeping.wait_anew(SAVE_OFFSETS))

    def _change_levels(self, config: BrokerConfig) -> None:
        self._storage.levels.set_table(DelayLevels(config.delay_levels), self._clock.now_ms())
        self._works.durability.wake()

    # --- stop

    async def stop(self) -> str | None:
        """Stop the broker. Return None if everything acknowledged is durable, otherwise why it may not be."""
        for server in self._servers:
            server.close()
        if self._registrar is not None:
            await self._registrar.stop()
        self.housekeeping.stop()
        self._net.router.stop_taking()
        self._core.slices.stop()
        await self._net.router.finish(STOP_SECONDS)
        self._pulls.stop()
        self._works.levels.stop()
        self._works.timers.stop()
        await self._save_tables()
        await self._hand_over()
        failure = await self._stop_store()
        for connection in list(self._net.router.connections):
            connection.close()
        await asyncio.sleep(0)
        self._turns.stop()
        self._workers.stop()
        self._close_auth()
        self.store.abandon()
        self._storage.timers.close()
        log.info("stopped")
        return failure

    async def _save_tables(self) -> None:
        try:
            await self._tables.persister.stop()
            self._tables.offsets.save_now()
        except OSError as error:
            log.error("tables_not_saved", reason=str(error))
        if self._audit is not None:
            await self._audit.log.stop()

    async def _hand_over(self) -> None:
        """Leave the files of levels and timers in a state from which Apache's broker can continue. duemq itself needs
        only the look at the clock, in case the clock was set after the last turn."""
        done: asyncio.Future[None] = self._loop.create_future()
        levels, timers = self._storage.levels, self._storage.timers
        parts = deque[Callable[[int], bool]]((lambda _: levels.hand_over_next(), timers.hand_over_next))

        def step(now: Moment, budget: Budget) -> float | None:
            try:
                levels.watch_clock(now)
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
        self._storage.durability.stop()
        self._works.durability.wake()
        error = await self._storage.watcher.end
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
