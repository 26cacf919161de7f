"""The broker: its start, and its public face. The functions of `broker.assembly` build its components; `broker.running`
has its stop.

Start: bind the ports, inspect the store and read the tables, recover, listen."""

from __future__ import annotations

import asyncio
import errno
import resource
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Final

import structlog

from duemq.broker.assembly.access import make_audit, make_guard, open_users, read_accounts, register_access
from duemq.broker.assembly.chores import make_chores, make_housekeeping
from duemq.broker.assembly.core import make_core
from duemq.broker.assembly.handlers import register_handlers
from duemq.broker.assembly.names import make_registrar
from duemq.broker.assembly.net import assemble_net, make_held_answers
from duemq.broker.assembly.steps import make_steps
from duemq.broker.assembly.storage import (
    assemble_storage,
    expect_queues,
    follow_settings,
    inspect_store,
    make_works,
    open_store,
)
from duemq.broker.assembly.tables import read_tables
from duemq.broker.errors import ConfigError
from duemq.broker.net.request_turns import RequestBudget, RequestTime
from duemq.broker.running import Running
from duemq.broker.settings.config import BrokerConfig, Origin
from duemq.broker.settings.live_settings import LiveSettings
from duemq.broker.tls.contexts import TlsContexts
from duemq.broker.turns import TimeBudget, Turns
from duemq.broker.workers import ThreadWorkers, Workers
from duemq.storage.budget import Budget
from duemq.storage.clock import Clock, MovableClock, SystemClock, look
from duemq.storage.durability.wanted import WantedPosition
from duemq.storage.files import Files, OsFiles

if TYPE_CHECKING:
    from duemq.broker.access.auth.store import AuthStore

log = structlog.get_logger(__name__)

BACKLOG: Final = 4096
_OTHER_DESCRIPTORS: Final = 64
"""Maximum number of descriptors that are open besides connections and files of the store."""


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
        self._running: Running | None = None
        self._stopping: asyncio.Task[str | None] | None = None

    @property
    def running(self) -> Running:
        """The parts of the broker once it has started, also after its stop. Raises RuntimeError before that."""
        if self._running is None:
            raise RuntimeError("the broker has not started: call start() first")
        return self._running

    @property
    def failed(self) -> asyncio.Future[str]:
        """Resolved with the reason once the store accepts nothing more: the broker must then be stopped and restarted.
        Raises RuntimeError before the start."""
        return self.running.storage.watcher.failed

    async def start(self) -> None:
        """Start; the broker listens when this returns. A start that fails because of what it reads leaves
        the store unchanged (invariant 6 of ARCHITECTURE). Raises ConfigError, StoreError, OSError, AuthStoreError,
        AclFileError."""
        began = time.monotonic()
        config, settings, loop = self.config, self.settings, asyncio.get_running_loop()
        with ExitStack() as opened:
            used_by_threads = opened.enter_context(ExitStack())  # closed when the threads have ended
            workers = self._make_workers(loop)
            opened.callback(workers.stop)
            sockets = self._bind(opened)
            acl_files = read_accounts(settings, self._files, workers)
            tls = TlsContexts(config, workers, self._real_clock)

            turns = Turns(loop, self._clock, self._make_budget)
            works = make_works(turns)
            wanted = WantedPosition(works.durability.wake)
            core = make_core(
                settings=settings,
                loop=loop,
                workers=workers,
                clock=self._clock,
                real_clock=self._real_clock,
                files=self._files,
                turns=turns,
                request_budget=self._request_budget,
                on_work=works.durability.wake,
            )
            used_by_threads.callback(core.store.abandon)

            # Everything is read before anything in the store is changed: an unreadable table stops the start.
            inspect_store(core)
            tables = read_tables(core)
            expect_queues(core, tables.delay_offsets)
            auth = open_users(core, self._open_auth_store)
            if auth is not None:
                used_by_threads.callback(auth.users.close)
            recovered = open_store(core)

            held = make_held_answers(core, wanted)
            storage = assemble_storage(core, tables, recovered, works=works, wanted=wanted, held=held)
            used_by_threads.callback(storage.timers.close)
            guard = make_guard(core, acl_files, auth)
            audit = make_audit(core, tables, acl_files, auth)
            recorder = audit.recorder if audit is not None else None
            net = assemble_net(core, guard, recorder, tls, held, max_connections=self._max_connections)
            registrar = make_registrar(core, tables.topics, net.connect)
            tables.begin()
            pulls = register_handlers(core, tables, storage, net, works, guard=guard, registrar=registrar)
            access_chores = register_access(core, net.router, acl_files, auth, pulls.polls.check_all)
            chores = make_chores(core, tables, storage, net, audit)
            housekeeping = make_housekeeping(core, [*access_chores, *chores])
            follow_settings(core, storage, works)

            if recovered.is_foreign:
                storage.durability.take_over(look(self._clock))
            servers = []
            for bound in sockets:
                server = await loop.create_server(net.accept, sock=bound, backlog=BACKLOG)
                opened.callback(server.close)
                servers.append(server)
            turns.start(make_steps(core, storage, works, wanted))
            housekeeping.start()
            if registrar is not None:
                registrar.start()
            self._running = Running(
                core=core,
                turns=turns,
                works=works,
                tables=tables,
                storage=storage,
                acl_files=acl_files,
                auth=auth,
                audit=audit,
                net=net,
                pulls=pulls,
                registrar=registrar,
                housekeeping=housekeeping,
                servers=servers,
                opened=opened.pop_all(),
            )
        tls.tell()
        log.info(
            "listening",
            broker=f"{config.host}:{config.listen_port}",
            name_server=config.nameserver_addresses or f"{config.host}:{config.nameserver_port}",
            vip=f"{config.host}:{config.vip_port}",
            advertised=f"{config.advertised_host}:{config.listen_port}",
            tls=config.tls_mode,
            store=config.store_root,
            seconds=round(time.monotonic() - began, 3),
        )

    async def stop(self) -> str | None:
        """Stop the broker. Return None if everything acknowledged is durable, otherwise why it may not be. A stop that
        has begun goes on even if this call is cancelled; further calls wait for it, and return the same. Raises
        RuntimeError if the broker has not started."""
        if self._stopping is None:
            self._stopping = asyncio.create_task(self.running.stop())
        return await asyncio.shield(self._stopping)

    def _bind(self, opened: ExitStack) -> list[socket.socket]:
        """Return sockets bound to the ports, which `opened` closes. Raises ConfigError."""
        sockets = []
        for port in self.config.ports:
            bound = _listening_socket(self.config.host, port)
            opened.callback(bound.close)
            sockets.append(bound)
        return sockets


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
