"""Periodic work: statistics samples, reports, saving consumer offsets, dropping silent clients."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

import structlog

from duemq.broker.admin.stats import SAMPLE_SECONDS, Stats
from duemq.broker.names.nameserver import NameServer
from duemq.broker.net.connection import Connection
from duemq.broker.settings.config import BrokerConfig
from duemq.broker.tables.clients import Clients
from duemq.broker.tables.locks import QueueLocks
from duemq.broker.tables.offsets import ConsumerOffsets
from duemq.scheduler.levels.service import LevelQueues
from duemq.scheduler.timers.service import Timers
from duemq.storage.clock import Clock, look

log = structlog.get_logger(__name__)

CLEAN_SECONDS: Final = 10.0
REPORT_SECONDS: Final = 1.0


class Housekeeping:
    """The periodic timers of one broker."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        config: BrokerConfig,
        levels: LevelQueues,
        timers: Timers,
        offsets: ConsumerOffsets,
        clients: Clients,
        locks: QueueLocks,
        nameserver: NameServer,
        stats: Stats,
        connections: Callable[[], list[Connection]],
        clock: Clock,
    ) -> None:
        """`clock`: the messages' clock."""
        self._loop = loop
        self._config = config
        self._levels = levels
        self._timer_wheel = timers
        self._offsets = offsets
        self._clients = clients
        self._locks = locks
        self._nameserver = nameserver
        self._stats = stats
        self._connections = connections
        self._clock = clock
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._is_stopped = False

    def start(self) -> None:
        """Start all timers."""
        self._write_regularly()
        self._every("stats", SAMPLE_SECONDS, self._stats.sample)
        self._every("levels", REPORT_SECONDS, lambda: self._levels.report(look(self._clock)))
        self._every("timers", REPORT_SECONDS, lambda: self._timer_wheel.report(look(self._clock)))
        self._every("clean", CLEAN_SECONDS, self._clean)

    def reconfigure(self, config: BrokerConfig) -> None:
        """Apply a changed setting: the interval at which consumer offsets are written."""
        self._config = config
        if not self._is_stopped:
            self._write_regularly()

    def _write_regularly(self) -> None:
        self._every("offsets", self._config.offset_flush_interval_ms / 1000, self._offsets.save_if_changed)

    def stop(self) -> None:
        """Stop all timers."""
        self._is_stopped = True
        for timer in self._timers.values():
            timer.cancel()

    def _clean(self) -> None:
        self._clients.expire()
        self._locks.expire()
        self._nameserver.expire()
        limit = self._loop.time() - self._config.idle_seconds
        for connection in self._connections():
            if connection.last_read < limit:
                connection.abort()

    def _every(self, name: str, seconds: float, work: Callable[[], None]) -> None:
        """Run `work` every `seconds` seconds from now on; replaces the timer of the same name."""

        def run() -> None:
            self._timers[name] = self._loop.call_later(seconds, run)
            try:
                work()
            except Exception:  # one failure must not end the timer
                log.exception("housekeeping_failed", work=name)

        if name in self._timers:
            self._timers[name].cancel()
        self._timers[name] = self._loop.call_later(seconds, run)
