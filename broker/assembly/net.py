"""Connections, and the way from their frames to the handlers."""

from __future__ import annotations

from dataclasses import dataclass

from duemq.broker.access.guard import Guard
from duemq.broker.admin.stats import BrokerStats
from duemq.broker.admin.stats_items import StatsItems
from duemq.broker.assembly.core import Core
from duemq.broker.audit.recorder import Recorder
from duemq.broker.net.connection import Connection
from duemq.broker.net.held_answers import HeldAnswers
from duemq.broker.net.limits.admission import Admission
from duemq.broker.net.limits.connections import ConnectionLimits
from duemq.broker.net.limits.input_budget import InputBudget
from duemq.broker.net.limits.output_budget import OutputBudget
from duemq.broker.net.router import Router
from duemq.broker.tls.contexts import TlsContexts
from duemq.storage.durability.wanted import WantedPosition


@dataclass(frozen=True, kw_only=True)
class Net:
    """What handles the requests of all connections, and what counts and limits them."""

    core: Core
    held: HeldAnswers
    stats: BrokerStats
    limits: ConnectionLimits
    router: Router
    input: InputBudget
    output: OutputBudget
    tls: TlsContexts

    def accept(self) -> Connection:
        """Return the protocol of a connection that a client opens."""
        return Connection(self.router, self.core.loop, self.input, self.output, self.core.request_turns, tls=self.tls)

    async def connect(self, address: tuple[str, int]) -> Connection:
        """Connect to a name server, with TLS if the settings say so. Raises OSError."""

        def make() -> Connection:
            return Connection(
                self.router, self.core.loop, self.input, self.output, self.core.request_turns, is_outgoing=True
            )

        _, connection = await self.core.loop.create_connection(make, *address, ssl=self.tls.client)
        return connection


def make_held_answers(core: Core, wanted: WantedPosition) -> HeldAnswers:
    """Return what holds the answers that wait for the disk, which raise the wanted position."""
    settings = core.settings
    timeout = core.config.sync_flush_timeout_ms / 1000
    return HeldAnswers(core.loop, timeout, lambda: settings.config.send_queue_capacity, wanted.want)


def assemble_net(
    core: Core,
    guard: Guard | None,
    recorder: Recorder | None,
    tls: TlsContexts,
    held: HeldAnswers,
    *,
    max_connections: int,
) -> Net:
    """Return what handles requests. `guard`: None without access control; `recorder`: None without an audit log;
    `max_connections`: how many the process has descriptors for."""
    config, loop, store = core.config, core.loop, core.store
    items = StatsItems(store.appender, core.real_clock, core.reads, config.cluster_name)
    stats = BrokerStats(store.appender, core.real_clock, items)
    limits = ConnectionLimits(loop, core.limits, max_connections)
    router = Router(
        store=store,
        clock=core.clock,
        held=held,
        stats=stats,
        admission=Admission(loop, config.max_waiting_request_bytes),
        reads=core.reads,
        limits=core.limits,
        connection_limits=limits,
        sync_flush=config.sync_flush,
        guard=guard,
        recorder=recorder,
    )
    return Net(
        core=core,
        held=held,
        stats=stats,
        limits=limits,
        router=router,
        input=InputBudget(loop, config.max_unfinished_request_bytes),
        output=OutputBudget(loop, config.max_unread_response_bytes),
        tls=tls,
    )
