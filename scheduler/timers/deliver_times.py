"""The deliver times of messages, read from their records: units that Apache's broker wrote do not have them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from duemq.protocol.records import timer_properties
from duemq.protocol.records.record import StoredMessage
from duemq.protocol.records.timer_properties import PRECISION_MS
from duemq.scheduler.timers.files.unit import MAX_DUE_MS
from duemq.scheduler.timers.index.keys import key_of
from duemq.storage.store import MessageStore

if TYPE_CHECKING:
    from duemq.scheduler.timers.seconds.second import Waits

LOOK_UNITS: Final = 32
"""Most records that are read in one piece of work if units do not have enough information about their messages."""


def due_of(message: StoredMessage) -> int | None:
    """Return when a stored message of the timer topic is due, ms since the epoch; None if it is not a timer message."""
    text, prepared = message.properties_text, message.prepared_transaction_offset
    return timer_properties.due_of(text, message.store_timestamp, prepared)


def learn(store: MessageStore, waits: Waits, at: int, number: int) -> None:
    """Set deliver time and key of the message at index `at`, whose unit lacks them, from its record. `number`: the
    second of its slot; the end of that second counts as the deliver time if the record has none. Raises OSError."""
    message = store.message_at(*waits[["physical", "size"]][at].item())
    due_ms = due_of(message) if message is not None else None
    waits["due"][at] = min(due_ms, MAX_DUE_MS) if due_ms is not None else (number + 1) * PRECISION_MS
    waits["key"][at] = key_of(message.properties_text) if message is not None else 0
