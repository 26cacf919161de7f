"""Delays that MQTT clients ask for: in the topic, as with EMQX's delayed publish, or by MQTT 5's user properties.

    $delayed/10/home/door                           in 10 s, as with EMQX
    $delayed/1735689600/home/door                   at that time: numbers from 42,949,670 on are seconds since the epoch
    delayed/1500ms/home/door                        any span: 250ms, 5s, 1h30m, 2d
    delayed/@2027-01-01T00:00:00Z/home/door         at that time; with @ also seconds or ms since the epoch
    delayed/10s;key=door;replace/home/door          replaces the message that waits with that key for that topic
    delayed/recall;key=door/home/door               cancels that message

A key names a message among those that wait for its topic: in RocketMQ it is `home/door#door`.

The same by user properties of a message to the plain topic: `delay`, `deliver-at`, `key`, `replace`, `recall`.

The two meanings of a number are EMQX's, see "Delayed Publish" in its documentation.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Final
from urllib.parse import unquote

from duemq._values.durations import format_duration, parse_duration
from duemq.errors import ArgumentError
from duemq.mqtt_bridge.rules import fields
from duemq.mqtt_bridge.rules.filters import check_topic, is_at_or_below
from duemq.mqtt_bridge.rules.model import Delay, DelayRefused

MAX_INTERVAL_SECONDS: Final = 42_949_670
"""This number and larger ones are times, in seconds since the epoch, and smaller ones are delays, as in EMQX's present
version. In its earlier versions times began at a tenth of this; those times are all in the year 1970."""

PROPERTIES: Final = ("delay", "deliver-at", "key", "replace", "recall")
"""The names of the user properties that are read here."""

_DIGITS: Final = re.compile(r"[0-9]{1,16}")
_MS_FROM: Final = 100_000_000_000
"""A time of this number or more is in ms since the epoch: in seconds it would be in the year 5138."""
_YES: Final = ("1", "true", "yes")
_NO: Final = ("", "0", "false", "no")


def read_delay(
    topic: str,
    properties: Iterable[tuple[str, str]],
    prefixes: Sequence[str],
    now_ms: int,
    longest_ms: int,
    own_topic: str,
) -> Delay | None:
    """Return the delay or recall that a message to `topic` with these user properties asks for; None for a plain one.

    `prefixes`: first levels of topics that ask for a delay, such as "$delayed". `now_ms`: the time, ms since the epoch.
    `longest_ms`: the longest delay of a message. `own_topic`: the topic of the bridge's state, below which its other
    reports are; delayed messages to them are refused. Raises DelayRefused.
    """
    asked = _of_properties(properties)
    prefix, _, rest = topic.partition("/")
    if prefix not in prefixes:
        if not asked.keys() & {"delay", "deliver-at", "replace", "recall"}:
            return None
        plain, when = topic, asked
    else:
        segment, slash, plain = rest.partition("/")
        if not slash or not plain:
            raise DelayRefused(f"{topic!r} has no topic after the delay; write {prefix}/10/home/door")
        when = _of_segment(segment)
        twice = sorted(asked.keys() & when.keys() | ({"delay"} if _times(asked) and _times(when) else set()))
        if twice:
            raise DelayRefused(f"{twice[0]} is given by the topic {topic!r} and by a user property; give it once")
        when |= asked
    if plain.partition("/")[0] in prefixes:
        raise DelayRefused(f"{topic!r} delays a delayed message; give only one delay")
    try:
        check_topic(plain)
    except ArgumentError as error:
        raise DelayRefused(str(error)) from None
    if is_at_or_below(plain, own_topic):
        raise DelayRefused(f"{plain!r} is a topic of the bridge's own reports, which only the bridge publishes")
    return _delay(plain, when, now_ms, longest_ms)


def _of_properties(properties: Iterable[tuple[str, str]]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, value in properties:
        if name in PROPERTIES:
            if name in found:
                raise DelayRefused(f"the user property {name} is given twice")
            found[name] = value
    return found


def _of_segment(segment: str) -> dict[str, str]:
    """Read the level between prefix and topic: a delay or `recall`, and options after semicolons. Raises DelayRefused
    for an unknown option, and for one that is given twice."""
    when, *options = segment.split(";")
    found = {"recall": "true"} if when == "recall" else _time_of(when)
    for option in options:
        name, _, value = option.partition("=")
        if name not in ("key", "replace") or name in found or (name == "key") != bool(value):
            raise DelayRefused(f"{option!r} is not an option of a delay; write key=NAME or replace, each once at most")
        found[name] = unquote(value) if name == "key" else "true"
    return found


def _time_of(text: str) -> dict[str, str]:
    if text.startswith("@"):
        return {"deliver-at": text[1:]}
    if _DIGITS.fullmatch(text):
        return {"deliver-at": text} if int(text) >= MAX_INTERVAL_SECONDS else {"delay": f"{text}s"}
    return {"delay": text}


def _times(asked: dict[str, str]) -> bool:
    return "delay" in asked or "deliver-at" in asked


def _delay(topic: str, asked: dict[str, str], now_ms: int, longest_ms: int) -> Delay:
    key = f"{fields.encoded_key(topic)}#{fields.encoded_key(asked['key'])}" if asked.get("key") else None
    replace, recall = (_is_set(name, asked.get(name, "")) for name in ("replace", "recall"))
    if (replace or recall) and not key:
        raise DelayRefused(f"{'recall' if recall else 'replace'} needs a key, which names the waiting message")
    if recall:
        if replace or _times(asked):
            raise DelayRefused("recall cancels a waiting message, and cannot be combined with a delay or with replace")
        return Delay(topic, key=key, recall=True)
    if "delay" in asked and "deliver-at" in asked:
        raise DelayRefused("give delay or deliver-at, not both")
    if "delay" in asked:
        delay_ms = _span_ms(asked["delay"])
        _check_reach(delay_ms, longest_ms)
        return Delay(topic, delay_ms=delay_ms, key=key, replace=replace)
    if "deliver-at" not in asked:
        raise DelayRefused("replace needs a delay: when is the message to be published?")
    at_ms = _moment_ms(asked["deliver-at"])
    _check_reach(at_ms - now_ms, longest_ms)
    return Delay(topic, deliver_at_ms=at_ms, key=key, replace=replace)


def _is_set(name: str, value: str) -> bool:
    if value not in _YES and value not in _NO:
        raise DelayRefused(f"{name} is {value!r}; write true or false")
    return value in _YES


def _span_ms(text: str) -> int:
    try:
        return parse_duration(f"{text}s" if _DIGITS.fullmatch(text) else text)
    except ArgumentError:
        raise DelayRefused(
            f"{text!r} is not a delay; write seconds (10), a span (1500ms, 1h30m) or a time (@...)"
        ) from None


def _moment_ms(text: str) -> int:
    if _DIGITS.fullmatch(text):
        number = int(text)
        return number if number >= _MS_FROM else number * 1000
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise DelayRefused(
            f"{text!r} is not a time; write it as 2027-01-01T00:00:00Z, or as seconds or ms since the epoch"
        ) from None
    if moment.tzinfo is None:
        raise DelayRefused(f"the time {text!r} has no time zone; write {text}Z for UTC, or {text}+01:00")
    span = moment - datetime(1970, 1, 1, tzinfo=UTC)
    return -(-(span.days * 86_400_000_000 + span.seconds * 1_000_000 + span.microseconds) // 1000)


def _check_reach(delay_ms: int, longest_ms: int) -> None:
    if delay_ms > longest_ms:
        raise DelayRefused(
            f"the delay of {format_duration(delay_ms)} is too long; the longest is {format_duration(longest_ms)}"
        )
