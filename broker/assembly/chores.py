"""The work that is repeated at intervals, besides that of access control."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from duemq.broker.admin.stats import SAMPLE_SECONDS
from duemq.broker.assembly.access import AuditTrail
from duemq.broker.assembly.core import Core
from duemq.broker.assembly.net import Net
from duemq.broker.assembly.storage import Storage
from duemq.broker.assembly.tables import Tables
from duemq.broker.housekeeping import Chore, Housekeeping
from duemq.broker.net.limits.connections import LOOK_SECONDS as NEW_SECONDS
from duemq.broker.tls.contexts import LOOK_SECONDS as TLS_LOOK_SECONDS
from duemq.broker.tls.contexts import WARN_SECONDS
from duemq.storage.clock import look

_SAVE_OFFSETS: Final = "offsets"
"""The name of the chore that saves consumer offsets."""
_CLEAN_SECONDS: Final = 10.0
_REPORT_SECONDS: Final = 1.0
_AUDIT_SECONDS: Final = 5.0
"""The interval between attempts to write the audit log while it cannot be written."""
_NEW_ROUTES_SECONDS: Final = 0.5
"""The interval at which consumers that have just learned of a topic are notified to rebalance. RocketMQ's clients ask
for routes every 30 s; without the notification they take the topic's queues up to 20 s after that."""


def make_housekeeping(core: Core, chores: Iterable[Chore]) -> Housekeeping:
    """Return what repeats all chores. The interval of the one that saves consumer offsets follows its setting."""
    housekeeping = Housekeeping(core.loop, chores)
    core.settings.on_change("flushConsumerOffsetInterval", lambda _: housekeeping.wait_anew(_SAVE_OFFSETS))
    return housekeeping


def make_chores(core: Core, tables: Tables, storage: Storage, net: Net, audit: AuditTrail | None) -> list[Chore]:
    """Return the chores. `audit`: None without an audit log."""
    settings, clock, clients, nameserver = core.settings, core.clock, tables.clients, tables.nameserver
    levels, timers = storage.levels, storage.timers

    def close_idle() -> None:
        net.router.close_idle(core.loop.time() - settings.config.idle_seconds)

    return [
        *([Chore("audit", lambda: _AUDIT_SECONDS, audit.log.write)] if audit is not None else ()),
        Chore("tls", lambda: TLS_LOOK_SECONDS, net.tls.look),
        Chore("certificates", lambda: WARN_SECONDS, net.tls.warn),
        Chore(_SAVE_OFFSETS, lambda: settings.config.offset_flush_interval_ms / 1000, tables.offsets.save_if_changed),
        Chore("stats", lambda: SAMPLE_SECONDS, net.stats.sample),
        Chore("levels", lambda: _REPORT_SECONDS, lambda: levels.report(look(clock))),
        Chore("timers", lambda: _REPORT_SECONDS, lambda: timers.report(look(clock))),
        Chore("clients", lambda: _CLEAN_SECONDS, clients.expire),
        Chore("new routes", lambda: _NEW_ROUTES_SECONDS, lambda: clients.rebalance(nameserver.take_found())),
        Chore("locks", lambda: _CLEAN_SECONDS, tables.locks.expire),
        Chore("brokers", lambda: _CLEAN_SECONDS, nameserver.expire),
        Chore("connections", lambda: _CLEAN_SECONDS, close_idle),
        Chore("new connections", lambda: NEW_SECONDS, net.limits.close_old),
    ]
