"""Handlers of administration and statistics."""

from __future__ import annotations

from duemq.broker.access.guard import Guard
from duemq.broker.admin.bridges import Bridges
from duemq.broker.admin.cleaning import CleaningHandlers
from duemq.broker.admin.connections import ConnectionHandlers
from duemq.broker.admin.consumption import ConsumptionHandlers
from duemq.broker.admin.groups import GroupHandlers
from duemq.broker.admin.move_clock import ClockHandlers
from duemq.broker.admin.runtime_info import RuntimeInfoHandlers, Sources
from duemq.broker.admin.settings import SettingsHandlers
from duemq.broker.admin.topics import TopicHandlers
from duemq.broker.assembly.core import Core, Handlers
from duemq.broker.assembly.net import Net
from duemq.broker.assembly.storage import Storage, Works
from duemq.broker.assembly.tables import Tables
from duemq.broker.consume.long_poll import LongPolls
from duemq.broker.names.registration import Registrar


def assemble_admin(
    core: Core,
    tables: Tables,
    storage: Storage,
    net: Net,
    polls: LongPolls,
    *,
    guard: Guard | None,
    registrar: Registrar | None,
    works: Works,
) -> tuple[Handlers, ...]:
    """Return the handlers. `guard`: None without access control. `registrar`: None without other name servers."""
    settings, store, reads, levels, durability = (
        core.settings,
        core.store,
        core.reads,
        storage.levels,
        storage.durability,
    )
    topics, groups, offsets, clients = tables.topics, tables.groups, tables.offsets, tables.clients
    items, bridges = net.stats.items, Bridges()
    sources = Sources(
        settings=settings,
        store=store,
        stats=net.stats,
        levels=levels,
        timers=storage.timers,
        held=net.held,
        retention=storage.retention,
        polls=polls,
        bridges=bridges,
        clock=core.real_clock,
        messages_clock=core.clock,
        limits=core.limits,
        router=net.router,
        tls=net.tls,
        guard=guard,
    )
    return (
        TopicHandlers(
            settings=settings,
            store=store,
            topics=topics,
            offsets=offsets,
            levels=levels,
            items=items,
            polls=polls,
            durability=durability,
            reads=reads,
            on_topics_changed=registrar.register_now if registrar is not None else lambda: None,
        ),
        ConsumptionHandlers(
            settings=settings,
            store=store,
            topics=topics,
            groups=groups,
            offsets=offsets,
            clients=clients,
            items=items,
            reads=reads,
            address=core.address,
            clock=core.clock,
        ),
        GroupHandlers(groups, offsets, core.limits),
        ConnectionHandlers(settings, store, clients, reads),
        RuntimeInfoHandlers(sources),
        SettingsHandlers(settings, core.workers, storage.noted_levels.wait, guard),
        ClockHandlers(core.clock, works.clock_moved),
        CleaningHandlers(store, topics, durability),
        bridges,
    )
