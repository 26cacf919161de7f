"""Times of records as timestamps.

Brokers store any time that a producer gives, and a damaged record may have any. Times outside the years 1678 to 2261
are null as timestamps: every program that reads these tables can represent the others. The narrowest range is that of
pandas, which counts nanoseconds in 64 bits.
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
"""The first time, ms since the epoch, that has a timestamp."""
END_MS: Final = (datetime.date(2262, 1, 1) - _EPOCH).days * DAY_MS
"""The first time, ms since the epoch, behind all that have a timestamp."""
NO_DAY: Final = FIRST_MS // DAY_MS - 1
"""The value of `days` for a time without a timestamp."""
_DATES_S: Final = (-62_135_596_800 + 86_400, 253_402_300_800 - 14 * 3600)
"""From the first second to before the second one, since the epoch: times in the years 1 to 9999 in all time zones."""


def is_none(ms: Integers) -> NDArray[np.bool_]:
    """Return which times (ms since the epoch) have no timestamp."""
    return (ms < FIRST_MS) | (ms >= END_MS)


def timestamps(ms: Integers, unit: str) -> pa.Array:
    """Return times (ms since the epoch) as timestamps in UTC, in `unit`: "ms" or "us". Null where they have none."""
    none = is_none(ms)
    return (
        pa.array(np.where(none, 0, ms), pa.int64(), mask=none)
        .cast(pa.timestamp("ms", "UTC"))
        .cast(pa.timestamp(unit, "UTC"))
    )


def others(ms: Integers) -> pa.Array:
    """Return the times (ms since the epoch) that have no timestamp, unchanged; null for the others."""
    return pa.array(ms, pa.int64(), mask=~is_none(ms))


def days(ms: Integers) -> Integers:
    """Return the UTC days, since the epoch, of times (ms since the epoch). NO_DAY where they have no timestamp."""
    found: Integers = np.where(is_none(ms), NO_DAY, ms // DAY_MS)
    return found


def date_of(day: int) -> datetime.date | None:
    """Return the date of a day since the epoch; None for NO_DAY."""
    return None if day == NO_DAY else _EPOCH + datetime.timedelta(days=day)


def with_python_dates(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return a column of timestamps of any unit, with null for those that have no date in Python in some time zone: a
    query can turn any number into a timestamp."""
    units = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 0}[column.type.unit]
    if not units:  # 64 bits of nanoseconds cover less than Python's dates
        return column
    count = column.cast(pa.int64())
    has_date = pc.and_(pc.greater_equal(count, _DATES_S[0] * units), pc.less(count, _DATES_S[1] * units))
    return pc.if_else(has_date, column, pa.scalar(None, column.type))
