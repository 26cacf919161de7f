"""The settings of the layers below the broker: which properties they come from, and their values."""

from __future__ import annotations

import os
from typing import Final

from duemq.broker.settings.config import BrokerConfig
from duemq.scheduler.levels.delivery import DeliveryConfig
from duemq.scheduler.timers.config import TimerConfig
from duemq.storage.durability.owner import DurabilityConfig
from duemq.storage.durability.retention import RetentionConfig
from duemq.storage.store import StoreConfig

READ_WHERE_USED: Final = frozenset(
    {
        "auditLogFileNumber",
        "auditLogFileSize",
        "autoCreateSubscriptionGroup",
        "brokerPermission",
        "longPollingEnable",
        "maxMessageSize",
        "maxTransferBytesOnMessageInMemory",
        "maxTransferCountOnMessageInMemory",
        "notifyConsumerIdsChangedEnable",
        "pullThreadPoolQueueCapacity",
        "recallAlwaysSucceeds",
        "recallMessageEnable",
        "sendThreadPoolQueueCapacity",
        "serverChannelMaxIdleTimeSeconds",
        "shortPollingTimeMills",
    }
)
"""Live properties that need no callback: handlers read them from `LiveSettings` on each use."""
DELIVERY_SETTINGS: Final = (
    "enableScheduleAsyncDeliver",
    "scheduleAsyncDeliverMaxPendingLimit",
    "scheduleAsyncDeliverMaxResendNum2Blocked",
    "scheduleDeliverBatchSize",
    "scheduleLatenessWarnMillis",
    "flushDelayOffsetInterval",
)
TIMER_SETTINGS: Final = (
    "timerMaxDelaySec",
    "timerRollWindowSlot",
    "timerCongestNumEachSlot",
    "timerStopEnqueue",
    "timerStopDequeue",
)
MAX_ROLL_WINDOW: Final = 7 * 86_400 - 60
"""The longest roll window, in seconds: the reach of the timer wheel, less one minute that stays empty between its end
and its beginning."""
RETENTION_SETTINGS: Final = (
    "fileReservedTime",
    "deleteWhen",
    "diskMaxUsedSpaceRatio",
    "diskSpaceCleanForciblyRatio",
    "diskSpaceWarningLevelRatio",
    "cleanFileForciblyEnable",
)
"""These settings need no callback either: the next look at the disk reads them."""
DURABILITY_SETTINGS: Final = ("flushIntervalCommitLog", "flushIntervalConsumeQueue")


def delivery_config(config: BrokerConfig) -> DeliveryConfig:
    """Return the part of the settings for deliveries by delay levels."""
    return DeliveryConfig(
        is_async=config.async_delivery,
        pending_limit=config.async_delivery_pending,
        max_resends=config.async_delivery_resends,
        batch_size=config.delivery_batch,
        warn_ms=config.lateness_warn_ms,
        save_interval=config.delay_offset_flush_interval_ms / 1000,
    )


def timer_config(config: BrokerConfig) -> TimerConfig:
    """Return the timers' part of the settings. A roll window that the wheel cannot hold becomes the longest possible
    one, as in RocketMQ."""
    window = config.timer_roll_window
    return TimerConfig(
        log_segment_size=config.timer_log_segment_size,
        is_enabled=config.timer_wheel,
        roll_window=window if 2 <= window <= MAX_ROLL_WINDOW else MAX_ROLL_WINDOW,
        max_delay=config.timer_max_delay_seconds,
        congest_limit=config.timer_congest_limit,
        stop_enqueue=config.timer_stop_enqueue,
        stop_dequeue=config.timer_stop_dequeue,
    )


def store_config(config: BrokerConfig) -> StoreConfig:
    """Return the store's part of the settings."""
    return StoreConfig(
        root=config.store_root,
        commitlog_directory=config.commitlog_directory,
        commitlog_segment_size=config.commitlog_segment_size,
        queue_segment_size=config.queue_segment_size,
        extension_segment_size=config.extension_segment_size,
        is_extended=config.is_extended,
        max_message_size=config.max_message_size,
        with_checksums=config.record_checksums,
        cached_size=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") * config.memory_ratio // 100,
    )


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
