"""Durations as people write them: 250ms, 5s, 1h30m, 1.5h, 2d."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Final

from duemq.errors import ArgumentError

_UNITS: Final = {"d": 86_400_000, "h": 3_600_000, "m": 60_000, "s": 1_000, "ms": 1}
_PART: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ms|[dhms])")
_MAX_LENGTH: Final = 64


def parse_duration(text: str) -> int:
    """Parse a duration in milliseconds, from numbers with units: d, h, m, s, ms, each unit at most once, largest first.

    A number may have a fraction; a rest below a millisecond is rounded up, so that a delay is never shortened.
    Raises ArgumentError.
    """
    total, last, position = Fraction(0), "", 0
    units = list(_UNITS)
    while position < len(text) <= _MAX_LENGTH:
        match = _PART.match(text, position)
        if match is None or (last and units.index(match[2]) <= units.index(last)):
            break
        total += Fraction(match[1]) * _UNITS[match[2]]
        last, position = match[2], match.end()
    if not text or position < len(text):
        raise ArgumentError(f"{text[:_MAX_LENGTH]!r} is no duration; write it as 250ms, 5s, 1h30m or 2d")
    return -(-total.numerator // total.denominator)


def format_duration(milliseconds: int) -> str:
    """Format a duration of 0 or more milliseconds for `parse_duration`: the shortest text without a fraction."""
    if milliseconds == 0:
        return "0s"
    parts = []
    for unit, size in _UNITS.items():
        count, milliseconds = divmod(milliseconds, size)
        if count:
            parts.append(f"{count}{unit}")
    return "".join(parts)
