"""Handlers that list, change and recall waiting messages."""

from __future__ import annotations

from duemq.broker.assembly.core import Core, Handlers
from duemq.broker.assembly.storage import Storage
from duemq.broker.net.router import Router
from duemq.broker.produce.key_turns import KeyTurns
from duemq.broker.tables.topics import Topics
from duemq.broker.waiting.changes_by_id import ChangesById
from duemq.broker.waiting.pending import PendingHandlers
from duemq.broker.waiting.recall_and_cancel import RecallHandlers
from duemq.broker.waiting.recurring import RecurringHandlers
from duemq.broker.waiting.timer_status import TimerStatusHandlers
from duemq.scheduler.search import WaitingMessages


def assemble_waiting(
    core: Core, topics: Topics, storage: Storage, router: Router, key_turns: KeyTurns
) -> tuple[Handlers, ...]:
    """Return the handlers. `key_turns`: lets one change of messages with a key follow the other."""
    settings, store, clock, slices, reads = core.settings, core.store, core.clock, core.slices, core.reads
    timers = storage.timers
    changes = ChangesById(settings=settings, store=store, timers=timers, clock=clock, slices=slices, reads=reads)
    return (
        RecallHandlers(
            settings=settings,
            store=store,
            topics=topics,
            timers=timers,
            router=router,
            slices=slices,
            changes=changes,
        ),
        TimerStatusHandlers(timers),
        PendingHandlers(
            timers=timers,
            messages=WaitingMessages(store, timers, storage.levels),
            changes=changes,
            router=router,
            clock=clock,
            slices=slices,
            reads=reads,
        ),
        RecurringHandlers(timers, key_turns, changes, router, clock),
    )
