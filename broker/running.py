"""A broker that has started, and its stop: accept no more connections or requests, finish the requests in progress,
answer the held requests, save the tables, flush, and make a last checkpoint."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import structlog

from duemq.broker.assembly.access import AuditTrail
from duemq.broker.assembly.core import Core
from duemq.broker.assembly.net import Net
from duemq.broker.assembly.storage import Storage, Works
from duemq.broker.assembly.tables import Tables
from duemq.broker.consume.pull import PullHandlers
from duemq.broker.housekeeping import Housekeeping
from duemq.broker.names.registration import Registrar
from duemq.broker.turns import Turns
from duemq.storage.budget import Budget
from duemq.storage.clock import Moment
from duemq.storage.durability.health import Verdict
from duemq.storage.errors import StoreError

if TYPE_CHECKING:
    from duemq.broker.access.acl_files import AclFiles
    from duemq.broker.access.auth.opening import Auth

log = structlog.get_logger(__name__)

STOP_SECONDS: Final = 5.0
"""How long a stop waits for requests in progress."""


@dataclass(frozen=True, kw_only=True)
class Running:
    """The parts of a broker that has started."""

    core: Core
    turns: Turns
    works: Works
    tables: Tables
    storage: Storage
    acl_files: AclFiles | None
    """The accounts; None without aclEnable."""
    auth: Auth | None
    """The users and their policies; None without authenticationEnabled."""
    audit: AuditTrail | None
    """None without auditLogEnable."""
    net: Net
    pulls: PullHandlers
    registrar: Registrar | None
    """None without other name servers."""
    housekeeping: Housekeeping
    servers: Sequence[asyncio.Server]
    opened: ExitStack
    """Closes everything that the start opened: servers and sockets, then the threads, and then what the threads may
    use: the files of the timers, the users, and the store."""

    async def stop(self) -> str | None:
        """Stop the broker. Return None if everything acknowledged is durable, otherwise why it may not be."""
        for server in self.servers:
            server.close()
        if self.registrar is not None:
            await self.registrar.stop()
        self.housekeeping.stop()
        router = self.net.router
        router.stop_taking()
        self.core.slices.stop()
        await router.finish(STOP_SECONDS)
        self.pulls.stop()
        self.works.levels.stop()
        self.works.timers.stop()
        await self._save_tables()
        await self._hand_over()
        failure = await self._stop_store()
        for connection in list(router.connections):
            connection.close()
        await asyncio.sleep(0)
        self.turns.stop()
        self.opened.close()
        log.info("stopped")
        return failure

    async def _save_tables(self) -> None:
        try:
            await self.tables.persister.stop()
            self.tables.offsets.save_now()
        except OSError as error:
            log.error("tables_not_saved", reason=str(error))
        if self.audit is not None:
            await self.audit.log.stop()

    async def _hand_over(self) -> None:
        """Leave the files of levels and timers in a state from which Apache's broker can continue. duemq itself needs
        only the look at the clock, in case the clock was set after the last turn."""
        done: asyncio.Future[None] = self.core.loop.create_future()
        levels, timers = self.storage.levels, self.storage.timers
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
            if not done.done():  # the loop has ended, and cancelled the stop
                done.set_result(None)
            return None

        if self.core.store.health.verdict is Verdict.POISONED:
            return
        work = self.turns.work("hand over", step)
        work.wake()
        await done
        work.stop()

    async def _stop_store(self) -> str | None:
        self.storage.durability.stop()
        self.works.durability.wake()
        error = await self.storage.watcher.end
        if error is not None:
            log.error("not_stopped_cleanly", reason=str(error))
        return str(error) if error is not None else None
