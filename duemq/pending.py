"""Messages that wait at brokers, and the results of changes to them.

They are in a module of their own, since a program that only sends or receives does not need them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class ChangeResult(StrEnum):
    """The result of a request to change a waiting message."""

    CANCELLED = "CANCELLED"
    RESCHEDULED = "RESCHEDULED"
    DELIVERED_NOW = "DELIVERED_NOW"
    ALREADY_DELIVERED = "ALREADY_DELIVERED"
    ALREADY_CANCELLED = "ALREADY_CANCELLED"
    NO_LONGER_WAITS = "NO_LONGER_WAITS"
    """It was delivered or cancelled so long ago that its broker no longer knows which; or its store was compacted
    since, after which old ids are no longer valid."""
    NEVER_EXISTED = "NEVER_EXISTED"
    """No broker has such a message, or had one."""
    BROKER_UNKNOWN = "BROKER_UNKNOWN"
    """No broker that the name servers know has it, and the broker whose address is in the id is not among them. If that
    broker is only down, the message may wait there."""

    @property
    def done(self) -> bool:
        """Whether this request changed the message: cancelled it, rescheduled it or delivered it now."""
        return self in _DONE


_DONE: Final = (ChangeResult.CANCELLED, ChangeResult.RESCHEDULED, ChangeResult.DELIVERED_NOW)


@dataclass(frozen=True, slots=True)
class ChangedMessage:
    """The result for one message that was to be changed."""

    offset_message_id: str
    result: ChangeResult


@dataclass(frozen=True, slots=True)
class Changes:
    """The results for messages that were to be cancelled, rescheduled or delivered now."""

    counts: Mapping[ChangeResult, int]
    """The number of messages with each result."""
    messages: tuple[ChangedMessage, ...]
    """The messages that were named, in that order; for a selection, the first 1000 of each broker."""

    @property
    def done(self) -> int:
        """The number of messages that this request changed."""
        return sum(count for result, count in self.counts.items() if result.done)

    @property
    def result(self) -> ChangeResult:
        """The result for the message, if exactly one was named. Otherwise raises ValueError."""
        if len(self.messages) != 1 or sum(self.counts.values()) != 1:
            raise ValueError(f"there are {sum(self.counts.values())} messages, not one: read counts or messages")
        return self.messages[0].result


@dataclass(frozen=True, slots=True)
class Recurrence:
    """When a recurring message is delivered, see `Producer.schedule`. Times in ms since the epoch."""

    every_ms: int | None
    """The time between two deliveries, in ms; None if `cron` is set."""
    cron: str | None
    """A cron expression; None if `every_ms` is set."""
    zone: str
    """The time zone of the cron expression."""
    start_ms: int | None
    """No delivery is earlier; None: no limit."""
    end_ms: int | None
    """No delivery is later; None: no limit."""
    count: int | None
    """The number of deliveries that are left; None: no limit."""
    is_paused: bool


class RecurringResult(StrEnum):
    """The result of a request to change a recurring message."""

    PAUSED = "PAUSED"
    RESUMED = "RESUMED"
    REMOVED = "REMOVED"
    UNCHANGED = "UNCHANGED"
    """The message was already paused, or there was nothing to resume."""
    NOT_FOUND = "NOT_FOUND"
    """The topic has no recurring message of that name."""


@dataclass(frozen=True, slots=True)
class PendingMessage:
    """A message that waits at a broker. Times in ms since the epoch."""

    message_id: str
    """The sender's id of the message; the broker's id if the sender made none."""
    offset_message_id: str
    """The broker's id of the message."""
    broker_address: str
    """The broker where it waits, "host:port"."""
    topic: str
    """The topic to which it will be delivered."""
    queue_id: int
    """The queue to which it will be delivered."""
    due_time_ms: int
    delay_level: int | None
    """The delay level, the first being 1; None for a message with a timer."""
    keys: tuple[str, ...]
    tags: str | None
    body_size: int
    """Size of the stored body in bytes; the body may be compressed."""
    born_time_ms: int
    store_time_ms: int
    recurrence: Recurrence | None = None
    """The recurrence of a recurring message, whose only key is its name; None for other messages."""


@dataclass(frozen=True, slots=True)
class RecurringMessage(PendingMessage):
    """A recurring message that waits for its next delivery. Its only key is its name."""

    recurrence: Recurrence


@dataclass(frozen=True, slots=True)
class DueCurve:
    """The number of messages that are due in each span of time."""

    begin_ms: int
    """When the first span begins, ms since the epoch."""
    step_ms: int
    """Length of each span, in ms."""
    counts: tuple[int, ...]
    """The number of messages due in each span, in order."""
