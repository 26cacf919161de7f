"""Conversion of callers' times and spans to whole milliseconds. They are rounded up: messages come later, not
earlier."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Final

from duemq._values.checks import shown
from duemq._values.durations import parse_duration
from duemq.errors import ArgumentError

Span = float | timedelta | str
"""Seconds, a timedelta, or text such as "1h30m"."""

Time = float | datetime
"""Seconds since the epoch as from `time.time()`, or a datetime with a time zone."""

Clock = Callable[[], int]
"""A function that returns the time, in ms since the epoch."""

_MICROSECOND: Final = timedelta(microseconds=1)
_LATEST: Final = 1e11
"""The latest valid time, in seconds since the epoch (the year 5138): a larger number is milliseconds by mistake."""


def now_ms() -> int:
    """Return the time, in ms since the epoch."""
    return time.time_ns() // 1_000_000


def span_ms(span: Span) -> int:
    """Return a span in milliseconds. Raises ArgumentError if it is negative or not a span."""
    if isinstance(span, str):
        return parse_duration(span)
    try:
        if isinstance(span, timedelta):
            return _checked_span(-(-(span // _MICROSECOND) // 1000), span)
        if not isinstance(span, int | float) or isinstance(span, bool) or not math.isfinite(span):
            raise ArgumentError(f"{span!r} is not a span of time; give seconds, a timedelta or text such as '1h30m'")
        return _checked_span(_up(span), span)
    except OverflowError:
        raise ArgumentError("the span of time is too long: no float can hold it in milliseconds") from None


def time_ms(moment: Time) -> int:
    """Return a time in ms since the epoch. Raises ArgumentError if it has no time zone or is not a time."""
    return _up(_seconds(moment))


def begin_ms(moment: Time) -> int:
    """Return a time in ms since the epoch, rounded down, as the beginning of a range. Store times are whole ms, so
    rounding up would leave out messages that were stored in the rest of that ms. Raises ArgumentError like `time_ms`.
    """
    return math.floor(round(_seconds(moment) * 1000, 3))


def _seconds(moment: Time) -> float:
    if isinstance(moment, datetime):
        if moment.tzinfo is None:
            raise ArgumentError(f"{moment} has no time zone; use datetime.now(timezone.utc) or .astimezone()")
        return moment.timestamp()
    # Python compares integers of any size with floats; `math.isfinite` raises OverflowError for large ones.
    if not isinstance(moment, int | float) or isinstance(moment, bool) or not 0 <= moment < math.inf:
        raise ArgumentError(
            f"{shown(moment)} is not a time; give seconds since the epoch or a datetime with a time zone"
        )
    if moment > _LATEST:
        raise ArgumentError(f"{shown(moment)} looks like milliseconds; give seconds since the epoch")
    return moment


def _up(seconds: float) -> int:
    # Rounded to the microsecond first: 1.1 * 1000 is 1100.0000000000002, which must not become 1101.
    return math.ceil(round(seconds * 1000, 3))


def _checked_span(milliseconds: int, span: object) -> int:
    if milliseconds < 0:
        raise ArgumentError(f"{span!r} is negative; a span of time must be 0 or more")
    return milliseconds
