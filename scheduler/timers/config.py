"""Settings of the timers, and what they answer."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

from duemq.scheduler.timers.files.log import DEFAULT_SEGMENT_SIZE

DAY_SECONDS: Final = 86_400
OVERDUE_MS: Final = 10_000
"""What is later than this is overdue by more than a busy moment."""


@dataclass
class TimerConfig:
    """Settings, by RocketMQ's names; may be changed while running, but for the first two."""

    log_segment_size: int = DEFAULT_SEGMENT_SIZE
    """mappedFileSizeTimerLog, bytes."""
    is_enabled: bool = True
    """timerWheelEnable."""
    roll_window: int = 2 * DAY_SECONDS
    """timerRollWindowSlot, seconds: how far ahead a slot may be."""
    max_delay: int = 366 * DAY_SECONDS
    """timerMaxDelaySec, seconds: a later time is refused."""
    congest_limit: int = 2**31 - 1
    """timerCongestNumEachSlot: so many messages the slot of a second takes, with those that were cancelled since."""
    stop_enqueue: bool = False
    """timerStopEnqueue."""
    stop_dequeue: bool = False
    """timerStopDequeue."""


class Refusal(Enum):
    """Why a timer message is not taken."""

    DISABLED = "disabled"
    TOO_FAR = "too far"
    CONGESTED = "congested"
    STALLED = "the timer log cannot be written"


class Cancelled(Enum):
    """What became of a request to cancel."""

    CANCELLED = "cancelled"
    DELIVERED = "already delivered"
    CANCELLED_BEFORE = "already cancelled"
    NO_LONGER_WAITS = "delivered or cancelled, nobody knows which any more"
    UNKNOWN = "never existed"
