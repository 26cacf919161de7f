"""Arrays that tasks leave for each other in the scratch directory, as numpy files, read without copying."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Integers = NDArray[np.int64]

_SMALL: Final = 1 << 20


def save(directory: str, name: str, array: NDArray[Any]) -> None:
    """Save an array under a name."""
    np.save(os.path.join(directory, f"{name}.npy"), array)


def load(directory: str, name: str) -> NDArray[Any]:
    """Return the array of a name; a large one is mapped, so that only the parts in use are read."""
    path = os.path.join(directory, f"{name}.npy")
    array: NDArray[Any] = np.load(path, mmap_mode="r" if os.path.getsize(path) > _SMALL else None)
    return array


class OffsetMap:
    """A map from physical offsets of the old log to those of the new one, as two parallel arrays, both ascending."""

    def __init__(self, directory: str) -> None:
        self._old = load(directory, "map.old")
        self._new = load(directory, "map.new")

    @staticmethod
    def make(directory: str, count: int) -> None:
        """Make room for `count` offsets."""
        for name in ("map.old", "map.new"):
            if count:
                path = os.path.join(directory, f"{name}.npy")
                np.lib.format.open_memmap(path, "w+", np.int64, (count,))
            else:
                save(directory, name, np.empty(0, np.int64))

    @staticmethod
    def fill(directory: str, at: int, old: Integers, new: Integers) -> None:
        """Write a part, from index `at` on."""
        for name, values in (("map.old", old), ("map.new", new)):
            if len(values):
                array = np.load(os.path.join(directory, f"{name}.npy"), mmap_mode="r+")
                array[at : at + len(values)] = values

    def new(self, old: Integers) -> Integers:
        """Return the new physical offsets of records; -1 for those that are gone."""
        if not len(self._old):
            return np.full(len(old), -1, np.int64)
        at = np.searchsorted(self._old, old)
        at[at == len(self._old)] = 0
        return np.where(self._old[at] == old, self._new[at], -1)
