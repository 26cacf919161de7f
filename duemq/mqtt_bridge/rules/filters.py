"""MQTT topic filters: which topics they match, and whether two of them match a topic in common.

As in MQTT 5.0, chapter 4.7: levels are separated by "/". "+" stands for one level, and "#" at the end for any number of
levels, including none. Neither stands for a first level that begins with "$". MQTT 3.1.1 has the same rules.
"""

from __future__ import annotations

import re
from typing import Final

from duemq.errors import ArgumentError

MAX_TOPIC_BYTES: Final = 65_535
"""Maximum size of a topic or filter in UTF-8."""

OUTSIDE: Final = "\x00-\x1f\x7f-\x9f\ud800-\udfff\ufdd0-\ufdef" + "".join(
    f"{chr(plane | 0xFFFE)}{chr(plane | 0xFFFF)}" for plane in range(0, 0x110000, 0x10000)
)
"""Characters that MQTT's strings must not have, for the brackets of a regular expression: U+0000 and surrogates, which
are forbidden, and control characters and non-characters, on which Mosquitto closes the connection (MQTT 5.0, 1.5.4)."""
_OUTSIDE: Final = re.compile(f"[{OUTSIDE}]")


class Filter:
    """A topic filter. Raises ArgumentError if the text is not one."""

    __slots__ = ("_levels", "_matches", "text")

    def __init__(self, text: str) -> None:
        _check(text, "the MQTT filter")
        levels = text.split("/")
        for number, level in enumerate(levels):
            if "#" in level and (level != "#" or number < len(levels) - 1):
                raise ArgumentError(f"the MQTT filter {text!r}: # stands alone and in the last level only")
            if "+" in level and level != "+":
                raise ArgumentError(f"the MQTT filter {text!r}: + stands alone in its level")
        if levels[0] == "$share":
            raise ArgumentError(f"the MQTT filter {text!r}: a shared subscription is made by `share` in [mqtt]")
        self.text = text
        # A topic name has a level at least, and is not empty: "#" is "+/#", and "/#" is "/+/#".
        self._levels = {"#": ["+", "#"], "/#": ["", "+", "#"]}.get(text, levels)
        self._matches = re.compile(_pattern(levels), re.DOTALL).fullmatch

    def __repr__(self) -> str:
        return f"Filter({self.text!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Filter) and self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)

    def matches(self, topic: str) -> bool:
        """Whether a topic name matches the filter."""
        return self._matches(topic) is not None

    def covers(self, other: Filter) -> bool:
        """Whether the filter matches every topic name that the other filter matches."""
        mine, theirs = self._levels, other._levels
        return not (mine[0] in ("+", "#") and theirs[0].startswith("$")) and _covers(mine, theirs)

    def overlaps(self, other: Filter) -> bool:
        """Whether there is a topic name that matches both filters."""
        mine, theirs = self._levels, other._levels
        for levels, against in ((mine, theirs), (theirs, mine)):
            if levels[0].startswith("$") and against[0] in ("+", "#"):
                return False
        for left, right in zip(mine, theirs, strict=False):
            if "#" in (left, right):
                return True
            if left != right and "+" not in (left, right):
                return False
        longer = mine if len(mine) > len(theirs) else theirs
        rest = longer[min(len(mine), len(theirs)) :]
        return not rest or rest == ["#"]


def _covers(mine: list[str], theirs: list[str]) -> bool:
    for left, right in zip(mine, theirs, strict=False):
        if left == "#":
            return True
        if right == "#" or left not in ("+", right):
            return False
    return len(mine) == len(theirs) or mine[len(theirs) :] == ["#"]


def check_topic(topic: str) -> None:
    """Raise ArgumentError if a text is not a topic name to which a message can be published."""
    _check(topic, "the MQTT topic")
    if "+" in topic or "#" in topic:
        raise ArgumentError(f"the MQTT topic {topic!r} has + or #, which only filters may have")


def _check(text: str, name: str) -> None:
    if not text:
        raise ArgumentError(f"{name} is empty")
    if _OUTSIDE.search(text):
        raise ArgumentError(f"{name} has a control character or another character that MQTT brokers refuse: {text!r}")
    if len(text.encode()) > MAX_TOPIC_BYTES:
        raise ArgumentError(f"{name} has more than {MAX_TOPIC_BYTES} bytes")


def _pattern(levels: list[str]) -> str:
    """Return a regular expression for the topics that a filter matches."""
    pattern = "".join("/[^/]*" if level == "+" else f"/{re.escape(level)}" for level in levels if level != "#")[1:]
    if levels[-1] == "#":
        pattern = f"{pattern}(?:/.*)?" if len(levels) > 1 else ".*"
    return f"(?!\\$){pattern}" if levels[0] in ("+", "#") else pattern


def is_at_or_below(topic: str, other: str) -> bool:
    """Return whether an MQTT topic is the same as another topic or below it."""
    return topic.startswith(other) and topic[len(other) :][:1] in ("", "/")
