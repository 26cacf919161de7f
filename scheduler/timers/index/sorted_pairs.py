"""Pairs of 64-bit integers, which are found by the first number. A pair takes 16 bytes, and adding one does not sort
all pairs again."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Integers = NDArray[np.int64]

_MAX_UNSORTED: Final = 4096
"""Most new pairs that are collected unsorted."""
_MOST_SORTED: Final = 1 << 17
"""Most pairs in a merged run; a merge of that many takes some ms."""


class _Run(NamedTuple):
    """Pairs in the order of their first numbers, which are distinct."""

    firsts: Integers
    seconds: Integers
    largest: int
    """The largest of the second numbers, including those of pairs that were left out; -1 without any."""


class SortedPairs:
    """A set of pairs. Of pairs with the same first number, only the one that was added last counts."""

    def __init__(self, least: Callable[[], int]) -> None:
        """Begin without pairs. `least`: returns the second number below which pairs are no longer needed; such pairs
        are dropped when others are sorted."""
        self._least = least
        self._unsorted: dict[int, int] = {}
        self._runs: list[_Run] = []
        """The sorted runs, the oldest first."""

    def __len__(self) -> int:
        return len(self._unsorted) + sum(len(run.firsts) for run in self._runs)

    def add(self, firsts: Integers, seconds: Integers) -> None:
        """Add pairs."""
        if len(firsts) + len(self._unsorted) < _MAX_UNSORTED:
            self._unsorted.update(zip(firsts.tolist(), seconds.tolist(), strict=True))
            return
        fresh = np.array(list(self._unsorted.items()), np.int64).reshape(-1, 2)
        self._unsorted = {}
        self._take(np.concatenate((fresh[:, 0], firsts)), np.concatenate((fresh[:, 1], seconds)))

    def add_one(self, first: int, second: int) -> None:
        """Add a pair."""
        self._unsorted[first] = second
        if len(self._unsorted) >= _MAX_UNSORTED:
            self.add(np.empty(0, np.int64), np.empty(0, np.int64))

    def _take(self, firsts: Integers, seconds: Integers) -> None:
        least = self._least()
        runs = [run for run in self._runs if run.largest >= least]
        runs.append(_sorted(firsts, seconds, least))
        while len(runs) > 1 and len(runs[-2].firsts) < 2 * len(runs[-1].firsts):
            older, newer = runs[-2:]
            if len(older.firsts) + len(newer.firsts) > _MOST_SORTED:
                break
            firsts = np.concatenate((older.firsts, newer.firsts))
            runs[-2:] = [_sorted(firsts, np.concatenate((older.seconds, newer.seconds)), least)]
        self._runs = [run for run in runs if len(run.firsts)]

    def newest(self, firsts: Integers, seconds: Integers) -> Integers:
        """Return the second number for each first number; if there is no such pair, the corresponding number in
        `seconds`. `firsts` is ascending."""
        result = seconds.copy()
        fresh = np.array(sorted(self._unsorted.items()), np.int64).reshape(-1, 2)
        for known, theirs in (*((run.firsts, run.seconds) for run in self._runs), (fresh[:, 0], fresh[:, 1])):
            if not len(known) or not len(firsts) or known[-1] < firsts[0] or known[0] > firsts[-1]:
                continue
            at = np.minimum(known.searchsorted(firsts), len(known) - 1)
            has = known[at] == firsts
            result[has] = theirs[at[has]]
        return result

    def between(self, low: int, high: int, limit: int) -> Integers:
        """Return the first numbers between `low` and `high`, both exclusive, ascending, at most `limit`."""
        parts = [run.firsts for run in self._runs]
        parts.append(np.sort(np.fromiter(self._unsorted, np.int64, len(self._unsorted))))
        found = []
        for firsts in parts:
            start, end = np.searchsorted(firsts, (low + 1, high)).tolist()
            found.append(firsts[start : min(end, start + limit)])
        return np.unique(np.concatenate(found))[:limit]

    def find(self, first: int) -> int | None:
        """Return the second number for a first number; None if there is no such pair."""
        if first in self._unsorted:
            return self._unsorted[first]
        for run in reversed(self._runs):
            at = int(run.firsts.searchsorted(first))
            if at < len(run.firsts) and run.firsts[at] == first:
                return int(run.seconds[at])
        return None


def _sorted(firsts: Integers, seconds: Integers, least: int) -> _Run:
    # The sort is stable, so that the last of equal first numbers stays the last; it also merges two runs in a tenth of
    # the time.
    order = np.argsort(firsts, kind="stable")
    firsts, seconds = firsts[order], seconds[order]
    kept = np.append(firsts[1:] != firsts[:-1], True)[: len(firsts)] & (seconds >= least)
    return _Run(firsts[kept], seconds[kept], int(seconds.max()) if len(seconds) else -1)
