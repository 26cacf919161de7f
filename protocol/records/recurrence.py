"""Recurring messages, which are duemq's own.

Such a message is delivered again and again. Its properties:

    TIMER_EVERY     a duration of at least 1 s, such as 90s or 1h30m       exactly one of
    TIMER_CRON      five fields of cron, or six with seconds in front      these two
    TIMER_ZONE      the time zone of TIMER_CRON, such as Europe/Paris; UTC by default
    TIMER_START     ms since the epoch: nothing is delivered before. With TIMER_EVERY it is the time of the first
                    delivery, and the broker sets it if the sender does not
    TIMER_END       ms since the epoch: nothing is delivered after
    TIMER_COUNT     the number of deliveries that are left, this one included
    TIMER_PAUSED    nothing is delivered until the message is resumed: the time, ms since the epoch, of the delivery for
                    which the message waited when it was paused. Set by the broker
    KEYS            exactly one key: the name, by which the next message of the same topic replaces this one
    TIMER_REPLACE   true. Set by the broker

Each recurring message has one waiting record, with the time of the next delivery in TIMER_DELIVER_MS, and with
`FLAG_RECURS` in its sysflag. When it is delivered, the record for the delivery after that is written in the same batch.
A delivered copy has these properties as well, but not the flag.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from duemq.protocol import durations
from duemq.protocol.errors import TimerIllegal
from duemq.protocol.records import properties

FLAG_RECURS: Final = 1 << 20
"""The bit in the sysflag of a waiting record that recurs. RocketMQ gives no meaning to this bit and keeps it."""
MIN_EVERY_MS: Final = 1000
MAX_EVERY_MS: Final = 10 * 366 * 86_400_000
MAX_CRON: Final = 256
"""Maximum number of characters of TIMER_CRON."""
MAX_ZONE: Final = 64
"""Maximum number of characters of TIMER_ZONE."""
UTC: Final = "UTC"
_MAX_MS: Final = 2**53
_ASKING: Final = (properties.TIMER_EVERY, properties.TIMER_CRON)
_OPTIONS: Final = (properties.TIMER_ZONE, properties.TIMER_START, properties.TIMER_END, properties.TIMER_COUNT)


class RecurrenceRule(NamedTuple):
    """The times at which a message recurs. Times are ms since the epoch; `every_ms` is a duration in ms. Either
    `every_ms` is above 0, or `cron` is not empty."""

    every_ms: int
    cron: str
    zone: str
    start_ms: int | None
    end_ms: int | None
    left: int | None
    """The number of deliveries that are left, this one included."""
    paused_ms: int | None
    """The time of the delivery for which the message waited when it was paused; None if it is not paused."""


def recurs(text: str) -> bool:
    """Whether these properties ask for a recurring message, even if their values are invalid."""
    return "TIMER_" in text and any(
        properties.get(text, name) is not None or properties.is_empty(text, name) for name in _ASKING
    )


def read(text: str) -> RecurrenceRule:
    """Return the recurrence of a message with these properties, for which `recurs` is true. Raises TimerIllegal."""
    every, cron = (properties.get(text, name) for name in _ASKING)
    if (every is None) == (cron is None):
        raise TimerIllegal(f"exactly one of the properties {_ASKING[0]} and {_ASKING[1]} must have a value")
    every_ms = 0
    if every is not None:
        found = durations.parse(every)
        if found is None:
            raise TimerIllegal(
                f"the property {_ASKING[0]}={every[:40]} is not a duration; write it as 90s, 1h30m or 2d"
            )
        if not MIN_EVERY_MS <= found <= MAX_EVERY_MS:
            raise TimerIllegal(f"the property {_ASKING[0]}={every[:40]} is not between 1 s and 3660 days")
        every_ms = found
    zone = properties.get(text, properties.TIMER_ZONE)
    if every is not None and zone is not None:
        raise TimerIllegal(f"the property {properties.TIMER_ZONE} has no meaning with {_ASKING[0]}")
    for name, value, limit in ((_ASKING[1], cron, MAX_CRON), (properties.TIMER_ZONE, zone, MAX_ZONE)):
        if value is not None and len(value) > limit:
            raise TimerIllegal(f"the property {name} has {len(value)} characters, {limit} at most")
    start_ms, end_ms, count = (_number(text, name) for name in _OPTIONS[1:])
    if count is not None and count < 1:
        raise TimerIllegal(f"the property {properties.TIMER_COUNT}={count} is not above 0")
    return RecurrenceRule(
        every_ms,
        cron or "",
        zone or UTC,
        start_ms,
        end_ms,
        count,
        _number(text, properties.TIMER_PAUSED),
    )


def name_of(text: str) -> str:
    """Return the name of a recurring message: its one key. Raises TimerIllegal."""
    keys = (properties.get(text, properties.KEYS) or "").split()
    if len(keys) != 1:
        raise TimerIllegal(
            f"a recurring message needs a name, exactly one key in {properties.KEYS}; it has {len(keys)} keys"
        )
    return keys[0]


def _number(text: str, name: str) -> int | None:
    value = properties.get(text, name)
    if value is None:
        return None
    if not (value.isascii() and value.isdecimal()) or len(value) > 16 or int(value) > _MAX_MS:
        raise TimerIllegal(f"the property {name}={value[:40]} is not a number, or is too large")
    return int(value)
