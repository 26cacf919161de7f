"""The tags code of a message in its consume queue, computed from its record.

Mirrors apache/rocketmq store/CommitLog.java (4.9.7), checkMessageAndReturnSize.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from duemq.protocol.records import properties, timer_properties
from duemq.protocol.topics import SCHEDULE_TOPIC, TIMER_TOPIC

DeliverTime = Callable[[int, int], int]
"""Returns the time when a message of a delay level is due, from the level and the store time; times are ms since the
epoch."""


class Told(Protocol):
    """The fields of a record that decide its tags code. The text may be decoded on each access: recovery needs it for
    only a few records of the schedule topic."""

    @property
    def store_timestamp(self) -> int:
        """The store time, ms since the epoch."""

    @property
    def prepared_transaction_offset(self) -> int:
        """The record's field of this name."""

    @property
    def properties_text(self) -> str:
        """The properties as text."""


def unit_tags_code(topic: str, told: Told, deliver_time: DeliverTime) -> int:
    """Return the tags code: the deliver time in the schedule topic and the timer topic, else the hash of the tags."""
    if topic == SCHEDULE_TOPIC:
        promised = timer_properties.promised_ms(told.store_timestamp, told.prepared_transaction_offset)
        if promised is not None:
            return promised
    text = told.properties_text
    if topic == TIMER_TOPIC:
        due = timer_properties.queue_code(text, told.store_timestamp, told.prepared_transaction_offset)
        if due is not None:
            return due
    if topic == SCHEDULE_TOPIC:
        level = properties.get(text, properties.DELAY)
        if level is not None and level.isdecimal() and int(level) > 0:
            return deliver_time(int(level), told.store_timestamp)
    return properties.tags_code_of(text)
