"""Applies live settings to running components: all of them except the scheduler's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from duemq.broker.housekeeping import Housekeeping
from duemq.broker.net.held_answers import HeldAnswers
from duemq.broker.settings.changes import LiveSettings
from duemq.broker.settings.config import BrokerConfig
from duemq.broker.tables.clients import Clients
from duemq.broker.tables.groups import Groups
from duemq.broker.tables.topics import Topics
from duemq.storage.durability.owner import Durability, DurabilityConfig
from duemq.storage.durability.retention import RetentionConfig
from duemq.storage.store import MessageStore

READ_WHERE_USED: Final = frozenset(
    {
        "brokerPermission",
        "longPollingEnable",
        "maxTransferBytesOnMessageInMemory",
        "maxTransferCountOnMessageInMemory",
        "pullThreadPoolQueueCapacity",
        "recallMessageEnable",
        "shortPollingTimeMills",
    }
)
"""Live properties that need no callback: handlers read them from `LiveSettings` on each use."""


def retention_config(config: BrokerConfig) -> RetentionConfig:
    """Return the settings that govern the deletion of files."""
    return RetentionConfig(
        reserved_hours=config.file_reserved_hours,
        delete_when=config.delete_when,
        max_used_ratio=config.disk_max_used_ratio / 100,
        clean_forcibly=config.clean_files_forcibly,
        forcible_ratio=config.disk_clean_forcibly_ratio,
        refuse_ratio=config.disk_warning_ratio,
    )


def durability_config(config: BrokerConfig) -> DurabilityConfig:
    """Return the flush intervals of the settings."""
    return DurabilityConfig(config.flush_interval_ms / 1000, config.queue_flush_interval_ms / 1000)


def follow(
    settings: LiveSettings,
    store: MessageStore,
    topics: Topics,
    groups: Groups,
    clients: Clients,
    held: HeldAnswers,
    durability: Durability,
    housekeeping: Housekeeping,
    wake_durability: Callable[[], None],
) -> None:
    """Make the components of a broker follow its settings. `wake_durability` asks for a step of `durability`."""

    def retain(config: BrokerConfig) -> None:
        durability.retention.config = retention_config(config)

    def limit_messages(config: BrokerConfig) -> None:
        store.appender.max_body_size = config.max_message_size

    def make_groups(config: BrokerConfig) -> None:
        groups.auto_create = config.auto_create_group

    def notify(config: BrokerConfig) -> None:
        clients.notify = config.notify_consumers

    def limit_waiting(config: BrokerConfig) -> None:
        held.reconfigure(config.send_queue_capacity)

    def flush_as_often(config: BrokerConfig) -> None:
        durability.reconfigure(durability_config(config))
        wake_durability()

    on = settings.on_change
    on(
        (
            "fileReservedTime",
            "deleteWhen",
            "diskMaxUsedSpaceRatio",
            "diskSpaceCleanForciblyRatio",
            "diskSpaceWarningLevelRatio",
            "cleanFileForciblyEnable",
        ),
        retain,
    )
    on("maxMessageSize", limit_messages)
    on(("brokerPermission", "autoCreateTopicEnable", "defaultTopicQueueNums"), topics.reconfigure)
    on("autoCreateSubscriptionGroup", make_groups)
    on("notifyConsumerIdsChangedEnable", notify)
    on("sendThreadPoolQueueCapacity", limit_waiting)
    on("flushConsumerOffsetInterval", housekeeping.reconfigure)
    on(("flushIntervalCommitLog", "flushIntervalConsumeQueue"), flush_as_often)
