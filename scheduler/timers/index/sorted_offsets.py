"""Membership in ascending arrays of offsets, by binary search: the cost grows with the number of values that are looked
up, not with the length of the array. Also the distinct values of arrays: numpy's own function for that imports numpy.ma
on its first call, which delays a start or the event loop by 15 ms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from array import array

    from numpy.typing import NDArray

    Offsets = NDArray[np.int64]


def indices_of(values: Offsets, found: Offsets) -> tuple[Offsets, NDArray[np.bool_]]:
    """Return the index of each value in the ascending array `found`, and whether the array has it; if not, its index
    means nothing."""
    if not len(found):
        return np.zeros(len(values), np.int64), np.zeros(len(values), bool)
    at = np.minimum(np.searchsorted(found, values), len(found) - 1)
    return at, found[at] == values


def is_among(values: Offsets, found: Offsets) -> NDArray[np.bool_]:
    """Return, for each value, whether it is in the ascending array `found`."""
    return indices_of(values, found)[1]


def has(found: Offsets, value: int) -> bool:
    """Whether a value is in the ascending array `found`."""
    at = int(np.searchsorted(found, value))
    return at < len(found) and int(found[at]) == value


def union(parts: Sequence[array[int] | Offsets]) -> Offsets:
    """Return the values of all arrays, each once, ascending."""
    ordered = np.sort(np.concatenate([np.empty(0, np.int64), *(np.array(part, np.int64) for part in parts)]))
    return ordered[_is_first(ordered)]


class Distinct(NamedTuple):
    """The distinct values of an array, ascending."""

    values: NDArray[Any]
    firsts: Offsets
    """The index of each value's first occurrence in the array."""
    counts: Offsets
    """The number of occurrences of each value."""


def distinct_of(values: NDArray[Any]) -> Distinct:
    """Find the distinct values of an array, which may be in any order."""
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    starts = np.flatnonzero(_is_first(ordered))
    return Distinct(ordered[starts], order[starts], np.diff(np.append(starts, len(ordered))))


def _is_first(ordered: NDArray[Any]) -> NDArray[np.bool_]:
    result = np.ones(len(ordered), bool)
    np.not_equal(ordered[1:], ordered[:-1], out=result[1:])
    return result
