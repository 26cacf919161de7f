"""Times of records as timestamps.

Brokers keep whatever time a producer says, and a damaged record may say any. What lies outside the years 1678 to 2261
is null as a timestamp: that is what all programs can have that read these tables, of which pandas, which counts
nanoseconds in 64 bits, goes the least far.
"""

from __future__ import annotations

import datetime
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Integers = NDArray[np.int64]

DAY_MS: Final = 86_400_000
_EPOCH: Final = datetime.date(1970, 1, 1)
FIRST_MS: Final = (datetime.date(1678, 1, 1) - _EPOCH).days * DAY_MS
"""The first ms that is a timestamp."""
END_MS: Final = (datetime.date(2262, 1, 1) - _EPOCH).days * DAY_MS
"""The first ms behind all that are."""
NO_DAY: Final = FIRST_MS // DAY_MS - 1
"""What `days` says of a time that is no timestamp."""
_DATES_S: Final = (-62_135_596_800 + 86_400, 253_402_300_800 - 14 * 3600)
"""Seconds since the epoch that are in the years 1 to 9999 in all time zones."""


def is_none(ms: Integers) -> NDArray[np.bool_]:
    """Which times (ms since the epoch) are no timestamps."""
    return (ms < FIRST_MS) | (ms >= END_MS)


def timestamps(ms: Integers, unit: str) -> pa.Array:
    """Times (ms since the epoch) as timestamps in UTC, in `unit`: "ms" or "us". Null where they are none."""
    none = is_none(ms)
    return (
        pa.array(np.where(none, 0, ms), pa.int64(), mask=none)
        .cast(pa.timestamp("ms", "UTC"))
        .cast(pa.timestamp(unit, "UTC"))
    )


def others(ms: Integers) -> pa.Array:
    """Of times (ms since the epoch) those that are no timestamps, as they are; null for the others."""
    return pa.array(ms, pa.int64(), mask=~is_none(ms))


def days(ms: Integers) -> Integers:
    """The UTC days of times (ms since the epoch), since the epoch. NO_DAY where they are no timestamps."""
    found: Integers = np.where(is_none(ms), NO_DAY, ms // DAY_MS)
    return found


def date_of(day: int) -> datetime.date | None:
    """The date of a day since the epoch, None for NO_DAY."""
    return None if day == NO_DAY else _EPOCH + datetime.timedelta(days=day)


def with_dates(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """A column of timestamps of any unit, those null that Python has no date for in some time zone: a query can make
    any time of a number."""
    units = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 0}[column.type.unit]
    if not units:  # 64 bits of ns are less than what Python has
        return column
    count = column.cast(pa.int64())
    has_date = pc.and_(pc.greater_equal(count, _DATES_S[0] * units), pc.less(count, _DATES_S[1] * units))
    return pc.if_else(has_date, column, pa.scalar(None, column.type))
