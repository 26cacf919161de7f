"""Handlers of consumers' requests."""

from __future__ import annotations

from dataclasses import dataclass

from duemq.broker.access.guard import Guard
from duemq.broker.assembly.core import Core, Handlers
from duemq.broker.assembly.net import Net
from duemq.broker.assembly.tables import Tables
from duemq.broker.consume.members import ClientHandlers
from duemq.broker.consume.offsets import OffsetHandlers
from duemq.broker.consume.pull import PullHandlers
from duemq.broker.consume.pull_checks import PullChecks
from duemq.broker.consume.queue_locks import QueueLockHandlers
from duemq.broker.consume.reset_offset import ResetOffsetHandlers
from duemq.scheduler.levels.service import LevelQueues


@dataclass(frozen=True)
class Consume:
    """The handlers of pulls, which hold some of them, and all handlers of consumers' requests."""

    pulls: PullHandlers
    handlers: tuple[Handlers, ...]


def assemble_consume(core: Core, tables: Tables, levels: LevelQueues, net: Net, guard: Guard | None) -> Consume:
    """Return the handlers of consumers' requests. `guard`: None without access control."""
    topics, groups, offsets, clients = tables.topics, tables.groups, tables.offsets, tables.clients
    pulls = PullHandlers(
        settings=core.settings,
        store=core.store,
        offsets=offsets,
        stats=net.stats,
        router=net.router,
        loop=core.loop,
        turns=core.request_turns,
        workers=core.workers,
        reads=core.reads,
        checks=PullChecks(
            settings=core.settings, topics=topics, groups=groups, clients=clients, limits=core.limits, guard=guard
        ),
    )
    reset = ResetOffsetHandlers(
        broker_name=core.config.broker_name,
        store=core.store,
        topics=topics,
        offsets=offsets,
        clients=clients,
        reads=core.reads,
    )
    return Consume(
        pulls,
        (
            pulls,
            OffsetHandlers(core.store, topics, groups, offsets, levels),
            reset,
            ClientHandlers(topics, groups, clients),
            QueueLockHandlers(offsets, tables.locks),
        ),
    )
