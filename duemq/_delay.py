"""How a message is delayed so that the broker at hand delivers it when it is due, and never early.

RocketMQ has delay levels, a short table of spans, and since 5.0 timers with any time. An older broker ignores a timer
and delivers at once, and any broker takes a level beyond its table for the last one. So the client asks each broker
what it has, for each connection and again from time to time, and refuses what would be delivered early.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from duemq._durations import format_duration, parse_duration
from duemq._message import DUE_MS
from duemq._times import Span, Time, span_ms, time_ms
from duemq.errors import ArgumentError, DelayError
from protocol import properties
from protocol.codes import LANGUAGE
from protocol.command import Command

VERSION_TIMERS: Final = 413
"""From this broker version on (5.0.0) RocketMQ has timers."""


@dataclass(frozen=True, slots=True)
class Delays:
    """The delays that a broker has: its levels in ms, the first being level 1, and whether it takes any time."""

    levels_ms: tuple[int, ...] = ()
    timers: bool = False

    def __str__(self) -> str:
        levels = " ".join(format_duration(level) for level in self.levels_ms)
        return levels or "none"


def read_delays(response: Command) -> Delays:
    """What the answer to GET_BROKER_CONFIG says: Java properties, one `name=value` a line. A broker of ours counts as
    having timers by its setting alone, since it shows clients the version number of RocketMQ 4.9."""
    settings = dict[str, str]()
    for line in bytes(response.body).decode(errors="replace").splitlines():
        name, _, value = line.partition("=")
        settings[name.strip()] = value.strip()
    knows_timers = response.language == LANGUAGE or response.version >= VERSION_TIMERS
    return Delays(
        levels_ms=_read_levels(settings.get("messageDelayLevel", "")),
        timers=knows_timers and settings.get("timerWheelEnable", "").lower() == "true",
    )


def _read_levels(text: str) -> tuple[int, ...]:
    try:
        return tuple(parse_duration(level) for level in text.split())
    except ArgumentError:
        return ()


@dataclass(frozen=True, slots=True)
class Wish:
    """When a caller wants a message delivered. Exactly one of the three is set, or none: at once."""

    level: int | None = None
    delay_ms: int | None = None
    time_ms: int | None = None
    """The due time in ms since the epoch; for a delay as well, then counted from the call."""

    @property
    def at_once(self) -> bool:
        """Whether nothing has to be asked of the broker."""
        return self.level is None and self.time_ms is None


def read_wish(level: int | None, delay: Span | None, deliver_at: Time | None, now_ms: int) -> Wish:
    """Check the arguments of a send. Raises ArgumentError."""
    arguments = {"level": level, "delay": delay, "deliver_at": deliver_at}
    given = [name for name, value in arguments.items() if value is not None]
    if len(given) > 1:
        raise ArgumentError(f"{' and '.join(given)} contradict each other; give one of them")
    if level is not None and (not isinstance(level, int) or isinstance(level, bool) or level < 1):
        raise ArgumentError(f"the delay level {level!r}; the first level is 1")
    if delay is not None:
        milliseconds = span_ms(delay)
        return Wish(delay_ms=milliseconds, time_ms=now_ms + milliseconds) if milliseconds else Wish()
    return Wish(level=level, time_ms=None if deliver_at is None else time_ms(deliver_at))


@dataclass(frozen=True, slots=True)
class Plan:
    """The properties that delay a message at one broker, and when it is due, ms since the epoch."""

    properties: dict[str, str]
    due_time_ms: int | None = None


def make_plan(wish: Wish, delays: Delays, now_ms: int, address: str) -> Plan:
    """How to fulfil a wish at the broker at `address`. Raises DelayError where it cannot."""
    if wish.at_once:
        return Plan({})
    if wish.level is not None:
        return _plan_level(wish.level, delays, now_ms, address)
    due = wish.time_ms
    assert due is not None
    if due <= now_ms and wish.delay_ms is None:
        return Plan({DUE_MS: str(due)}, due)
    if wish.delay_ms in delays.levels_ms:
        return Plan({properties.DELAY: str(delays.levels_ms.index(wish.delay_ms) + 1), DUE_MS: str(due)}, due)
    if delays.timers:
        return Plan({properties.TIMER_DELIVER_MS: str(due)}, due)
    what = "a time of delivery" if wish.delay_ms is None else f"a delay of {format_duration(wish.delay_ms)}"
    raise DelayError(
        f"the broker {address} cannot keep {what}: it has no timers, only the delay levels {delays}", delays.levels_ms
    )


def _plan_level(level: int, delays: Delays, now_ms: int, address: str) -> Plan:
    if not delays.levels_ms:
        # It does not say which levels it has: nothing to check against, and no due time to tell.
        return Plan({properties.DELAY: str(level)})
    if level > len(delays.levels_ms):
        raise DelayError(
            f"the broker {address} has no delay level {level}, only {len(delays.levels_ms)}: {delays}", delays.levels_ms
        )
    due = now_ms + delays.levels_ms[level - 1]
    return Plan({properties.DELAY: str(level), DUE_MS: str(due)}, due)
