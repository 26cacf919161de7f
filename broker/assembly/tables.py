"""The tables of topics, groups, offsets and clients, and the files in config/ that keep them."""

from __future__ import annotations

import os
from dataclasses import dataclass

from duemq.broker.assembly.core import Core
from duemq.broker.names.key_values import KeyValues
from duemq.broker.names.nameserver import NameServer
from duemq.broker.tables.clients import Clients
from duemq.broker.tables.consumer_offsets import ConsumerOffsets
from duemq.broker.tables.groups import Groups
from duemq.broker.tables.locks import QueueLocks
from duemq.broker.tables.persister import Persister
from duemq.broker.tables.topics import Topics
from duemq.scheduler.levels import service
from duemq.scheduler.levels.delay_offsets import DelayOffsets, read_delay_offsets
from duemq.storage import file_names
from duemq.storage.config_file import ConfigFile


@dataclass(frozen=True, kw_only=True)
class Tables:
    """The tables of the broker."""

    persister: Persister
    topics: Topics
    groups: Groups
    offsets: ConsumerOffsets
    values: KeyValues
    """The key-value configuration of the embedded name server."""
    nameserver: NameServer
    delay_offsets: DelayOffsets
    clients: Clients
    """Unlike those above, the clients and the locks are only in memory."""
    locks: QueueLocks

    def begin(self) -> None:
        """Add the topics and groups that every broker has. The store must be open. Raises OSError."""
        self.topics.begin()
        self.groups.begin()


def read_tables(core: Core) -> Tables:
    """Read all tables, and change nothing. Raises StoreFormatError, OSError."""
    config, settings, store, clock, limits = core.config, core.settings, core.store, core.real_clock, core.limits

    def table(name: str) -> ConfigFile:
        return ConfigFile(core.files, os.path.join(config.store_root, name))

    persister = Persister(core.loop, core.workers)
    topics = Topics(
        settings=settings,
        store=store,
        file=table(file_names.TOPICS),
        clock=clock,
        persister=persister,
        limits=limits,
    )
    groups = Groups(
        settings=settings,
        file=table(file_names.SUBSCRIPTION_GROUPS),
        clock=clock,
        persister=persister,
        limits=limits,
    )
    offsets = ConsumerOffsets(table(file_names.CONSUMER_OFFSETS), persister)
    values = KeyValues(table(file_names.KV_CONFIG), persister, limits)
    nameserver = NameServer(
        cluster=config.cluster_name,
        broker_name=config.broker_name,
        address=core.address,
        topics=topics,
        values=values,
        clock=clock,
        limits=limits,
    )
    for loaded in (topics, groups, offsets, values):
        loaded.load()
    file = table(file_names.DELAY_OFFSETS)
    file.require_files()
    is_needed = store.checkpoint.is_foreign or service.NAME not in store.checkpoint.notes
    return Tables(
        persister=persister,
        topics=topics,
        groups=groups,
        offsets=offsets,
        values=values,
        nameserver=nameserver,
        delay_offsets=read_delay_offsets(file, is_needed=is_needed),
        clients=Clients(settings, clock, limits, core.request_turns),
        locks=QueueLocks(clock, limits),
    )
