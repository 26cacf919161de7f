"""How a message is delayed so that its broker delivers it when it is due, and never early.

RocketMQ has delay levels, a short table of spans, and since 5.0 timers for any time. An older broker ignores a timer
and delivers the message immediately, and any broker treats a level beyond its table as the last one. At a duemq broker
a topic may have its own table of levels. Therefore the client asks each broker which delays it has, for each connection
and again from time to time, and refuses delays with which the message would be delivered early. A delay is sent as a
timer, or as a level if the broker has no timers but a level with exactly that delay.

A delay is sent as a delay, not as a time, so that it counts by the broker's clock: this machine's may be wrong.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec
from msgspec.structs import replace

from duemq._values.durations import format_duration, parse_duration
from duemq._values.times import Span, Time, span_ms, time_ms
from duemq.errors import ArgumentError, DelayError, NotSupportedError
from duemq.protocol.codes import LANGUAGE, ResponseCode
from duemq.protocol.frames.command import Command
from duemq.protocol.records import properties
from duemq.protocol.requests.bodies import TopicConfig

VERSION_TIMERS: Final = 413
"""The number of RocketMQ's version 5.0.0, the first one with timers."""

TOPIC_LEVELS: Final = "delay.levels"
"""An attribute of topics, duemq's own: the topic's table of levels, in the format of messageDelayLevel."""

_TOPIC_LEVEL: Final = re.compile(r"[0-9]{1,9}[smhd]")
"""A level as brokers write it; they ignore a table that has anything else."""


class TopicLevels(msgspec.Struct, frozen=True):
    """A topic's own table: its levels in ms; the first is level 1."""

    topic: str
    levels_ms: tuple[int, ...]

    def __str__(self) -> str:
        return _format_levels(self.levels_ms)


class Delays(msgspec.Struct, frozen=True):
    """The delays that a broker has: its levels in ms, the first of which is level 1, and whether it has timers."""

    levels_ms: tuple[int, ...] = ()
    timers: bool = False
    topics_have_levels: bool = False
    """Whether a topic may have its own table, as at duemq brokers. RocketMQ's brokers ignore that attribute, even if a
    topic has it because duemq used the store before."""
    replaces: bool = False
    """Whether a message may replace a waiting one, as at duemq brokers."""
    own: TopicLevels | None = None
    """The own table of the message's topic, which then applies instead of the broker's; None without one."""

    def __str__(self) -> str:
        return _format_levels(self.levels_ms)

    @property
    def valid_levels_ms(self) -> tuple[int, ...]:
        """The levels in ms that apply to the message's topic."""
        return self.levels_ms if self.own is None else self.own.levels_ms


def _format_levels(levels_ms: tuple[int, ...]) -> str:
    return " ".join(format_duration(level) for level in levels_ms) or "none"


def read_delays(response: Command) -> Delays:
    """Return the delays in an answer to GET_BROKER_CONFIG: Java properties, one `name=value` per line. For a duemq
    broker only its setting decides whether it has timers, since it shows clients the version number of RocketMQ 4.9."""
    settings = dict[str, str]()
    for line in bytes(response.body).decode(errors="replace").splitlines():
        name, _, value = line.partition("=")
        settings[name.strip()] = value.strip()
    is_ours = response.language == LANGUAGE
    knows_timers = is_ours or response.version >= VERSION_TIMERS
    return Delays(
        levels_ms=_read_levels(settings.get("messageDelayLevel", "")),
        timers=knows_timers and settings.get("timerWheelEnable", "").lower() == "true",
        topics_have_levels=is_ours,
        replaces=is_ours,
    )


def read_topic_levels(topic: str, config: TopicConfig) -> TopicLevels | None:
    """Return the topic's own levels in an answer to GET_TOPIC_CONFIG. None if it has none, or a wrong table, which the
    broker ignores."""
    levels = (config.attributes or {}).get(TOPIC_LEVELS, "").split()
    if not levels or not all(_TOPIC_LEVEL.fullmatch(level) for level in levels):
        return None
    return TopicLevels(topic, tuple(parse_duration(level) for level in levels))


def _read_levels(text: str) -> tuple[int, ...]:
    try:
        return tuple(parse_duration(level) for level in text.split())
    except ArgumentError:
        return ()


class DelaySpec(msgspec.Struct, frozen=True):
    """When a caller wants a message to be delivered. At most one of `level`, `delay_ms` and `time_ms` is set; if none
    is, immediately."""

    level: int | None = None
    delay_ms: int | None = None
    """The delay in ms, counted from the call."""
    time_ms: int | None = None
    """The time, ms since the epoch."""
    replaces: bool = False
    """Whether the message replaces the waiting message with its topic and key."""

    @property
    def at_once(self) -> bool:
        """Whether the message is to be delivered without a delay."""
        return self.level is None and self.delay_ms is None and self.time_ms is None

    @property
    def is_plain(self) -> bool:
        """Whether the message neither is delayed nor replaces another, so that the broker need not be asked."""
        return self is AT_ONCE or (self.at_once and not self.replaces)

    @property
    def takes_timer(self) -> bool:
        """Whether a broker with timers would use a timer, so that its levels do not matter."""
        return self.level is None


AT_ONCE: Final = DelaySpec()
"""The spec of a message without a delay that replaces no other."""


def read_delay_spec(
    level: int | None, delay: Span | None, deliver_at: Time | None, *, replaces: bool = False
) -> DelaySpec:
    """Return the spec for the arguments of a send. Raises ArgumentError."""
    arguments = {"level": level, "delay": delay, "deliver_at": deliver_at}
    given = [name for name, value in arguments.items() if value is not None]
    if len(given) > 1:
        raise ArgumentError(f"{' and '.join(given)} contradict each other; give one of them")
    if level is not None and (not isinstance(level, int) or isinstance(level, bool) or level < 1):
        raise ArgumentError(f"level={level!r}: give 1 or more")
    if delay is not None:
        return DelaySpec(delay_ms=span_ms(delay) or None, replaces=replaces)
    return DelaySpec(level=level, time_ms=None if deliver_at is None else time_ms(deliver_at), replaces=replaces)


class DelayPlan(msgspec.Struct, frozen=True):
    """The properties that delay a message at one broker, and its deliver time, ms since the epoch. For a delay this is
    an estimate by this machine's clock, since it depends on when the broker receives the message."""

    properties: dict[str, str]
    due_time_ms: int | None = None
    waits: bool = False
    """Whether the message waits at the broker, so that it can be cancelled or rescheduled."""


PLAIN: Final = DelayPlan({})
"""The plan of a message without a delay."""


def make_plan(spec: DelaySpec, delays: Delays, now_ms: int, address: str, elapsed_ms: int = 0) -> DelayPlan:
    """Return how the broker at `address` can delay the message, `elapsed_ms` after the call. Raises DelayError if it
    cannot, and NotSupportedError if it would not replace the waiting message."""
    if spec.replaces:
        if not delays.replaces:
            raise NotSupportedError(
                ResponseCode.REQUEST_CODE_NOT_SUPPORTED,
                "only a duemq broker replaces a waiting message; this one would deliver both",
                address,
            )
        plan = make_plan(replace(spec, replaces=False), delays, now_ms, address, elapsed_ms)
        return replace(plan, properties={**plan.properties, properties.TIMER_REPLACE: "true"})
    if spec.at_once:
        return DelayPlan({})
    if spec.level is not None:
        return _plan_level(spec.level, delays, now_ms, address)
    levels = delays.valid_levels_ms
    if spec.delay_ms is not None:
        if delays.timers:
            # At least 1 ms, so that the message has a timer and the broker reports its deliver time.
            rest = max(1, spec.delay_ms - elapsed_ms)
            return DelayPlan({properties.TIMER_DELAY_MS: str(rest)}, now_ms + rest, waits=True)
        if spec.delay_ms in levels:
            return _plan_level(levels.index(spec.delay_ms) + 1, delays, now_ms, address)
    elif spec.time_ms is not None:
        if delays.timers:
            return DelayPlan({properties.TIMER_DELIVER_MS: str(spec.time_ms)}, spec.time_ms, waits=True)
        if spec.time_ms <= now_ms:
            return DelayPlan({properties.DUE_MS: str(spec.time_ms)}, spec.time_ms)
    what = "a time of delivery" if spec.delay_ms is None else f"a delay of {format_duration(spec.delay_ms)}"
    has = f"the delay levels {delays}"
    if delays.own is not None:
        has = (
            f"the delay levels {delays.own} of the topic {delays.own.topic}; the broker's own levels do not apply to "
            f"it: {delays}"
        )
    raise DelayError(f"the broker {address} cannot keep {what}: it has no timers, only {has}", levels)


def _plan_level(level: int, delays: Delays, now_ms: int, address: str) -> DelayPlan:
    levels = delays.valid_levels_ms
    if not levels:
        # The broker did not report its levels: the level cannot be checked, and the deliver time is not known.
        return DelayPlan({properties.DELAY: str(level)}, waits=True)
    if level > len(levels):
        where = "" if delays.own is None else f" for the topic {delays.own.topic}"
        raise DelayError(
            f"the broker {address} has no delay level {level}{where}, only {len(levels)}: {_format_levels(levels)}",
            levels,
        )
    due = now_ms + levels[level - 1]
    return DelayPlan({properties.DELAY: str(level), properties.DUE_MS: str(due)}, due, waits=True)
