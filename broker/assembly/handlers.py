"""All handlers of requests."""

from __future__ import annotations

from duemq.broker.access.guard import Guard
from duemq.broker.assembly.admin import assemble_admin
from duemq.broker.assembly.consume import assemble_consume
from duemq.broker.assembly.core import Core
from duemq.broker.assembly.net import Net
from duemq.broker.assembly.produce import assemble_produce
from duemq.broker.assembly.storage import Storage, Works
from duemq.broker.assembly.tables import Tables
from duemq.broker.assembly.waiting import assemble_waiting
from duemq.broker.consume.pull import PullHandlers
from duemq.broker.names.registration import Registrar
from duemq.broker.produce.key_turns import KeyTurns


def register_handlers(
    core: Core,
    tables: Tables,
    storage: Storage,
    net: Net,
    works: Works,
    *,
    guard: Guard | None,
    registrar: Registrar | None,
) -> PullHandlers:
    """Add the handlers of all areas to the router, except those of accounts and users. `guard`: None without access
    control; `registrar`: None without other name servers. Return the handlers of pulls, which hold some of them."""
    key_turns = KeyTurns(core.store, storage.timers, core.clock, core.reads)
    consume = assemble_consume(core, tables, storage.levels, net, guard)
    handlers = (
        *assemble_produce(core, tables, storage, net, key_turns),
        *consume.handlers,
        *assemble_waiting(core, tables.topics, storage, net.router, key_turns),
        tables.values,
        tables.nameserver,
        *assemble_admin(core, tables, storage, net, consume.pulls.polls, guard=guard, registrar=registrar, works=works),
    )
    for each in handlers:
        each.register(net.router)
    return consume.pulls
