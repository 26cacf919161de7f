"""63-bit hashes of many values in one call. The same value has the same hash in every process, however the input is
divided."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Words = NDArray[np.uint64]
    Integers = NDArray[np.int64]

_STEP: Final = np.uint64(0x9E3779B97F4A7C15)
_MIX: Final = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2: Final = np.uint64(0x94D049BB133111EB)
_MASK: Final = np.uint64(0x7FFFFFFFFFFFFFFF)
_LOW_BYTES: Final = np.array([(1 << 8 * n) - 1 for n in range(9)], np.uint64)


def _mixed(values: Words) -> Words:
    """Return `values` after the finishing steps of SplitMix64: every bit of the input changes half the bits."""
    values = (values ^ (values >> np.uint64(30))) * _MIX
    values = (values ^ (values >> np.uint64(27))) * _MIX_2
    return values ^ (values >> np.uint64(31))


def hash_ints(*columns: Integers) -> Integers:
    """Return a hash of each row of the given columns, each of n integers."""
    result = np.zeros(len(columns[0]), np.uint64)
    for column in columns:
        result = _mixed(result * _STEP + np.ascontiguousarray(column, np.int64).view(np.uint64) + _STEP)
    hashes: Integers = (result & _MASK).view(np.int64)
    return hashes


def hash_slices(data: NDArray[np.uint8], at: Integers, size: Integers) -> Integers:
    """Return a hash of each of n slices of `data`, which has at least 8 bytes behind the last slice. Positions and
    sizes in bytes."""
    result = _mixed(size.astype(np.uint64) + _STEP)
    if len(at):
        windows: NDArray[Any] = np.ndarray((max(len(data) - 7, 0),), "V8", data, strides=(1,))
        rows: Any = slice(None)
        for i in range((int(size.max()) + 7) // 8):
            if i and (size[rows] <= 8 * i).any():
                rows = np.flatnonzero(size > 8 * i)
            if not i and not size.all():
                rows = np.flatnonzero(size)
            words = windows[at[rows] + 8 * i].view("<u8") & _LOW_BYTES[np.minimum(size[rows] - 8 * i, 8)]
            result[rows] = _mixed(result[rows] * _STEP + words + _STEP)
    hashes: Integers = (result & _MASK).view(np.int64)
    return hashes
