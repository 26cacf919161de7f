"""The values that callers see of messages that wait at brokers: what waits, and what became of a change.

They are apart from `duemq.messages`, since a program that only sends or receives does not need them.
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
    """Delivered or cancelled, so long ago that its broker does not know which any more; or its store was compacted
    since, which ends the life of ids."""
    NEVER_EXISTED = "NEVER_EXISTED"
    """No broker has such a message, or had one."""
    BROKER_UNKNOWN = "BROKER_UNKNOWN"
    """No broker that the name servers know has it, and the one that gave the id is none of them now, by the address in
    the id: where that one is only down, the message may wait there."""

    @property
    def done(self) -> bool:
        """Whether this request changed the message: it is cancelled, rescheduled or delivered now."""
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
    """How many had which result."""
    messages: tuple[ChangedMessage, ...]
    """Those that were named, in that order; of a selection the first 1000 of each broker."""

    @property
    def done(self) -> int:
        """How many were changed by this request."""
        return sum(count for result, count in self.counts.items() if result.done)

    @property
    def result(self) -> ChangeResult:
        """The result for the message, if exactly one was named. Raises ValueError otherwise."""
        if len(self.messages) != 1 or sum(self.counts.values()) != 1:
            raise ValueError(f"{sum(self.counts.values())} messages, and not one: look at counts or messages")
        return self.messages[0].result


@dataclass(frozen=True, slots=True)
class Recurrence:
    """When a message is delivered again and again, see `Producer.schedule`. Times in ms since the epoch."""

    every_ms: int | None
    """The time between two deliveries; None with `cron`."""
    cron: str | None
    """A cron expression; None with `every_ms`."""
    zone: str
    """The time zone of the cron expression."""
    start_ms: int | None
    end_ms: int | None
    """Nothing is delivered before the one and after the other."""
    count: int | None
    """How many deliveries are left; None where their number has no limit."""
    is_paused: bool


class RecurringResult(StrEnum):
    """The result of a request to change a recurring message."""

    PAUSED = "PAUSED"
    RESUMED = "RESUMED"
    REMOVED = "REMOVED"
    UNCHANGED = "UNCHANGED"
    """It was paused before, or it was not paused."""
    NOT_FOUND = "NOT_FOUND"
    """No message of the topic recurs with that name."""


@dataclass(frozen=True, slots=True)
class PendingMessage:
    """A message that waits at a broker. Times in ms since the epoch."""

    message_id: str
    """The sender's id for it; the broker's where the sender made none."""
    offset_message_id: str
    """The broker's id."""
    broker_address: str
    """Where it waits, "host:port"."""
    topic: str
    queue_id: int
    """Topic and queue that it is for."""
    due_time_ms: int
    delay_level: int | None
    """None with a timer."""
    keys: tuple[str, ...]
    tags: str | None
    body_size: int
    """In bytes, as stored: it may be compressed."""
    born_time_ms: int
    store_time_ms: int
    recurrence: Recurrence | None = None
    """Of a message that is delivered again and again; its one key is its name."""


@dataclass(frozen=True, slots=True)
class RecurringMessage(PendingMessage):
    """A message that is delivered again and again, as it waits for its next delivery; its one key is its name."""

    recurrence: Recurrence


@dataclass(frozen=True, slots=True)
class DueCurve:
    """How many messages are due in each span of time."""

    begin_ms: int
    """When the first span begins, ms since the epoch."""
    step_ms: int
    """How long each is."""
    counts: tuple[int, ...]
