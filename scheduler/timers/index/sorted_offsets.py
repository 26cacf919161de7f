"""Membership in arrays of offsets that are in ascending order, by binary search: so that asking costs by how many are
asked for, and not by how many there are. And the distinct values of arrays: numpy has a function for that, whose first
call imports numpy.ma, which takes 15 ms of a start or of the event loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from array import array

    from numpy.typing import NDArray

    Offsets = NDArray[np.int64]


def places_of(values: Offsets, found: Offsets) -> tuple[Offsets, NDArray[np.bool_]]:
    """Where each of some values is in an ascending array, and whether it is there; a place says nothing where not."""
    if not len(found):
        return np.zeros(len(values), np.int64), np.zeros(len(values), bool)
    at = np.minimum(np.searchsorted(found, values), len(found) - 1)
    return at, found[at] == values


def is_among(values: Offsets, found: Offsets) -> NDArray[np.bool_]:
    """Which of some values are in an ascending array."""
    return places_of(values, found)[1]


def has(found: Offsets, value: int) -> bool:
    """Whether one value is in an ascending array."""
    at = int(np.searchsorted(found, value))
    return at < len(found) and int(found[at]) == value


def joined(parts: Sequence[array[int] | Offsets]) -> Offsets:
    """All values of some arrays, each once, ascending."""
    ordered = np.sort(np.concatenate([np.empty(0, np.int64), *(np.array(part, np.int64) for part in parts)]))
    return ordered[_is_first(ordered)]


class Distinct(NamedTuple):
    """The distinct values of an array, ascending..."""

    values: NDArray[Any]
    places: Offsets
    """...where each is for the first time..."""
    counts: Offsets
    """...and how many times it is there."""


def distinct_of(values: NDArray[Any]) -> Distinct:
    """The distinct values of an array, which need not be in order."""
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    starts = np.flatnonzero(_is_first(ordered))
    return Distinct(ordered[starts], order[starts], np.diff(np.append(starts, len(ordered))))


def _is_first(ordered: NDArray[Any]) -> NDArray[np.bool_]:
    result = np.ones(len(ordered), bool)
    np.not_equal(ordered[1:], ordered[:-1], out=result[1:])
    return result
