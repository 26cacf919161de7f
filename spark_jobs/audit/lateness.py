"""Lateness as histograms: compact, for any number of deliveries, by any key, and additive.

A bin holds one value of ms up to 255, and 1/128 of a power of two beyond: percentiles are right to less than 1 %;
counts, the sum and the greatest value are exact. Negative values (early) have bins of their own.

    row: | key int64 | bin int32 | count int64 | sum int64, ms | greatest int64, ms |    sorted by key and bin
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Integers = NDArray[np.int64]

HISTOGRAM: Final = np.dtype([("key", "<i8"), ("bin", "<i4"), ("count", "<i8"), ("sum", "<i8"), ("greatest", "<i8")])
_EXACT: Final = 256
_PARTS: Final = 128


class LatenessStats(NamedTuple):
    """Statistics of the deliveries of one key. Times in ms; a percentile is the greatest value of its bin."""

    number: int
    early: int
    mean: float
    percentiles: list[int]
    greatest: int


def bins_of(ms: Integers) -> NDArray[np.int32]:
    """Return the bins of some values."""
    size = np.abs(ms)
    exponent = np.maximum(np.frexp(size.astype(np.float64))[1] - 8, 0).astype(np.int64)
    bins = np.where(size < _EXACT, size, (exponent + 1) * _PARTS + (size >> exponent) - _PARTS + _EXACT - 2 * _PARTS)
    return np.where(ms < 0, -bins, bins).astype(np.int32)


def value_of(bins: NDArray[Any]) -> Integers:
    """Return the value of each bin that is farthest from 0, in ms."""
    size = np.abs(bins.astype(np.int64))
    exponent = np.maximum(size // _PARTS - 1, 0)
    part = size - exponent * _PARTS
    value: Integers = np.where(size < _EXACT, size, ((part + 1) << exponent) - 1)
    return np.where(bins < 0, -value, value)


def histogram(key: Integers, ms: Integers) -> NDArray[Any]:
    """Return the histogram of some values, each with a key."""
    rows = np.zeros(len(key), HISTOGRAM)
    rows["key"], rows["bin"], rows["count"], rows["sum"], rows["greatest"] = key, bins_of(ms), 1, ms, ms
    return added([rows])


def added(parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Return the sum of histograms."""
    rows = np.concatenate(parts) if parts else np.zeros(0, HISTOGRAM)
    if not len(rows):
        return rows
    rows = rows[np.lexsort((rows["bin"], rows["key"]))]
    first = np.flatnonzero(
        np.concatenate([[True], (rows["key"][1:] != rows["key"][:-1]) | (rows["bin"][1:] != rows["bin"][:-1])])
    )
    result = rows[first]
    result["count"] = np.add.reduceat(rows["count"], first)
    result["sum"] = np.add.reduceat(rows["sum"], first)
    result["greatest"] = np.maximum.reduceat(rows["greatest"], first)
    return result


def stats(rows: NDArray[Any], percents: Sequence[float]) -> Iterator[tuple[int, LatenessStats]]:
    """Yield each key of a histogram with the statistics of its deliveries, in order of the keys."""
    if not len(rows):
        return
    keys, first = np.unique(rows["key"], return_index=True)
    for key, part in zip(keys.tolist(), np.split(rows, first[1:]), strict=True):
        total = int(part["count"].sum())
        up_to = np.cumsum(part["count"])
        greatest = int(part["greatest"].max())
        at = np.searchsorted(up_to, np.ceil(np.array(percents) / 100 * total).clip(1))
        values = np.minimum(value_of(part["bin"][at]), greatest).tolist()
        early = int(part["count"][part["bin"] < 0].sum())
        yield key, LatenessStats(total, early, float(part["sum"].sum() / total), values, greatest)
