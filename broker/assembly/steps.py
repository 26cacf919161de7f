"""The steps of the work on the store."""

from __future__ import annotations

from typing import Final

from duemq.broker.assembly.core import Core
from duemq.broker.assembly.storage import Storage, Works
from duemq.broker.turns import SlicedWork, Step
from duemq.storage.budget import Budget
from duemq.storage.clock import Moment
from duemq.storage.durability.wanted import WantedPosition

MAX_WAIT_SECONDS: Final = 10.0
"""The wall clock may be set, so it is read at least this often while a message waits."""


def make_steps(core: Core, storage: Storage, works: Works, wanted: WantedPosition) -> dict[SlicedWork, Step]:
    """Return the steps by their work, for the start of the turns. `wanted`: the position that deliveries raise, since
    they count only once they are on the disk."""
    log, sync_flush = core.store.log, core.config.sync_flush

    def step_durability(now: Moment, budget: Budget) -> float | None:
        return storage.durability.step(now, budget, core.real_clock.now_ms())

    def step_levels(now: Moment, budget: Budget) -> float | None:
        before = log.end
        try:
            return _wait(storage.levels.step(now, budget), now)
        finally:
            if sync_flush and log.end > before:
                wanted.want(log.end)

    def step_timers(now: Moment, budget: Budget) -> float | None:
        return _wait(storage.timers.step(now, budget), now)

    steps = {works.durability: step_durability, works.levels: step_levels, works.timers: step_timers}
    return {work: core.reads.step(step, work.wake) for work, step in steps.items()}


def _wait(due_ms: int | None, now: Moment) -> float | None:
    """Return the seconds until `due_ms`, at most MAX_WAIT_SECONDS, because the wall clock may be set meanwhile."""
    if due_ms is None:
        return None
    return min(max(0.0, (due_ms - now.wall_ms) / 1000), MAX_WAIT_SECONDS)
