"""What all areas of the broker are built on."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Protocol

from duemq.broker.limits import Limits
from duemq.broker.net.cold_reads import ColdReads
from duemq.broker.net.request_turns import RequestTurns
from duemq.broker.net.router import Router
from duemq.broker.net.slices import Slices
from duemq.broker.settings.config import BrokerConfig
from duemq.broker.settings.live_settings import LiveSettings
from duemq.broker.workers import Workers
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


class Handlers(Protocol):
    """Handlers of requests."""

    def register(self, router: Router) -> None:
        """Add the handlers to a router."""


def joined(host: str, port: int) -> str:
    """Return HOST:PORT, with brackets around the host if it is an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
