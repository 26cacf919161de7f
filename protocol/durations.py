"""Durations as people write them: 250ms, 5s, 1h30m, 1.5h, 2d."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Final

UNITS: Final = {"d": 86_400_000, "h": 3_600_000, "m": 60_000, "s": 1_000, "ms": 1}
"""The units, the largest first, and their lengths in ms."""
MAX_LENGTH: Final = 64
"""Maximum number of characters of a duration."""
_PART: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ms|[dhms])")


def parse(text: str) -> int | None:
    """Return a duration in ms; None if the text is not a duration. A duration consists of numbers with units, each unit
    at most once, the largest first. A number may have a fraction; a remainder below a millisecond is rounded up, so
    that a delay is never shortened."""
    total, last, position = Fraction(0), "", 0
    units = list(UNITS)
    while position < len(text) <= MAX_LENGTH:
        match = _PART.match(text, position)
        if match is None or (last and units.index(match[2]) <= units.index(last)):
            break
        total += Fraction(match[1]) * UNITS[match[2]]
        last, position = match[2], match.end()
    if not text or position < len(text):
        return None
    return -(-total.numerator // total.denominator)
