"""Settings of the timers, and the answers to sends and cancellations."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

from duemq.scheduler.timers.files.log import DEFAULT_SEGMENT_SIZE

DAY_SECONDS: Final = 86_400
OVERDUE_MS: Final = 10_000
"""Lateness, in ms, beyond which a message counts as overdue, and not just as delayed by a busy moment."""


@dataclass
class TimerConfig:
    """The settings of the timers, each with RocketMQ's name and its unit."""

    log_segment_size: int = DEFAULT_SEGMENT_SIZE
    """mappedFileSizeTimerLog, bytes: the size of the timer log's files."""
    is_enabled: bool = True
    """timerWheelEnable: whether messages with a timer are accepted."""
    roll_window: int = 2 * DAY_SECONDS
    """timerRollWindowSlot, seconds: how far ahead a slot may be."""
    max_delay: int = 366 * DAY_SECONDS
    """timerMaxDelaySec, seconds: a message with a longer delay is refused."""
    congest_limit: int = 2**31 - 1
    """timerCongestNumEachSlot: most messages in the slot of a second, including those that were cancelled since."""
    stop_enqueue: bool = False
    """timerStopEnqueue: whether to stop putting messages into the wheel."""
    stop_dequeue: bool = False
    """timerStopDequeue: whether to stop delivering messages from the wheel."""


class Refusal(Enum):
    """Why a timer message is refused."""

    DISABLED = "disabled"
    TOO_FAR = "too far"
    CONGESTED = "congested"
    STALLED = "the timer log cannot be written"


class Cancelled(Enum):
    """The result of a request to cancel a message."""

    CANCELLED = "cancelled"
    DELIVERED = "already delivered"
    CANCELLED_BEFORE = "already cancelled"
    NO_LONGER_WAITS = "delivered or cancelled; which of the two is no longer known"
    UNKNOWN = "never existed"
