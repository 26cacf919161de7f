"""Durations as people write them, see `duemq.protocol.durations`."""

from __future__ import annotations

from duemq.errors import ArgumentError
from duemq.protocol import durations


def parse_duration(text: str) -> int:
    """Parse a duration, see `duemq.protocol.durations.parse`; return milliseconds. Raises ArgumentError."""
    found = durations.parse(text)
    if found is None:
        raise ArgumentError(f"{text[: durations.MAX_LENGTH]!r} is not a duration; write it as 250ms, 5s, 1h30m or 2d")
    return found


def format_duration(milliseconds: int) -> str:
    """Format a duration of 0 or more milliseconds as `parse_duration` reads it: the shortest text without fractions."""
    if milliseconds == 0:
        return "0s"
    parts = []
    for unit, size in durations.UNITS.items():
        count, milliseconds = divmod(milliseconds, size)
        if count:
            parts.append(f"{count}{unit}")
    return "".join(parts)
