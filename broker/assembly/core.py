"""What all areas of the broker are built on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from duemq.broker.limits import Limits
from duemq.broker.net.cold_reads import ColdReads
from duemq.broker.net.request_turns import RequestBudget, RequestTurns
from duemq.broker.net.router import Router
from duemq.broker.net.slices import Slices
from duemq.broker.settings.config import BrokerConfig
from duemq.broker.settings.live_settings import LiveSettings
from duemq.broker.settings.parts import store_config
from duemq.broker.turns import Turns
from duemq.broker.workers import Workers
from duemq.scheduler.levels.table import DelayLevels
from duemq.storage.clock import Clock
from duemq.storage.files import Files
from duemq.storage.store import MessageStore


@dataclass(frozen=True, kw_only=True)
class Core:
    """The store, and what runs work in the broker's process. Only the functions of this package receive it: they give
    each component the parts that it needs."""

    config: BrokerConfig
    """The settings at the start."""
    settings: LiveSettings
    loop: asyncio.AbstractEventLoop
    workers: Workers
    clock: Clock
    """The clock of messages."""
    real_clock: Clock
    """The clock of clients, connections and files."""
    files: Files
    store: MessageStore
    limits: Limits
    reads: ColdReads
    slices: Slices
    request_turns: RequestTurns

    @property
    def address(self) -> str:
        """The broker's HOST:PORT as it is advertised."""
        return joined(self.config.advertised_host, self.config.listen_port)


def make_core(
    *,
    settings: LiveSettings,
    loop: asyncio.AbstractEventLoop,
    workers: Workers,
    clock: Clock,
    real_clock: Clock,
    files: Files,
    turns: Turns,
    request_budget: RequestBudget,
    on_work: Callable[[], None],
) -> Core:
    """Make the store, which is not open yet, and what runs work in this process. `clock`: that of messages;
    `real_clock`: that of clients, connections and files. `on_work`: called when the store has work for the owner of its
    durability."""
    config = settings.config
    reads = ColdReads(files, workers, turns.share)
    store = MessageStore(
        store_config(config),
        files,
        (config.advertised_host, config.listen_port),
        DelayLevels(config.delay_levels).deliver_time,
        on_work=on_work,
        max_message_size=settings.current(lambda config: config.max_message_size),
    )
    return Core(
        config=config,
        settings=settings,
        loop=loop,
        workers=workers,
        clock=clock,
        real_clock=real_clock,
        files=files,
        store=store,
        limits=Limits(settings),
        reads=reads,
        slices=Slices(turns.share, reads),
        request_turns=RequestTurns(turns, request_budget),
    )


class Handlers(Protocol):
    """Handlers of requests."""

    def register(self, router: Router) -> None:
        """Add the handlers to a router."""


def joined(host: str, port: int) -> str:
    """Return HOST:PORT, with brackets around the host if it is an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
