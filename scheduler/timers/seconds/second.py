"""One second of the timer wheel, with its messages in memory."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np

from duemq.protocol.records.timer_properties import PRECISION_MS
from duemq.scheduler.timers.files.unit import APPLIED, DUE_BITS, MAX_DUE_MS, NORMAL

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from duemq.scheduler.timers.files.unit import Units

    Waits = NDArray[Any]
    Magic = NDArray[np.int32]

WAIT: Final = np.dtype(
    [
        ("physical", "i8"),
        ("due", "i8"),
        ("position", "i8"),
        ("size", "i4"),
        ("hash", "i4"),
        ("key", "i4"),
        ("held", "?"),
        ("again", "?"),
        ("magic", "u1"),
    ]
)
"""A waiting message: `physical` offset of its record; deliver time (`due`, ms since the epoch); `position` of its unit
in the timer log; `size` of its record in bytes; `hash` of its topic; hash of its `key` if the next message with that
key replaces it (`timers.index.keys`), else 0; whether its topic's policy chose the time (`held`); whether it was
appended `again`; `magic` number of the unit from which it was read, 0 if it was not read from a unit."""
NO_WAITS: Final = np.empty(0, WAIT)
_BYTES: Final = np.dtype((np.void, WAIT.itemsize))
_NEVER_MS: Final = 2**62
_RUN: Final = 32_768
"""Number of messages that are sorted in one go."""
_RATIO: Final = 4
"""Ratio of lengths: a new run is merged with the run before it while the latter is shorter than this many times the new
run, and than _RUN."""
_TAKEN: Final = 64
"""A run is compacted when more messages were taken out than this number plus one in this many of all its messages."""
_MIN_GIVEN: Final = 64
"""Least number of messages to return from one run: if a run can return fewer, runs are merged instead."""


class Loader(Protocol):
    """Work on a second, done in parts."""

    def step(self) -> bool:
        """Do a part of the work. Return whether there was one left to do. Raises OSError; then the part is not done,
        and the next step tries it again."""


class _SortedRun:
    """Messages sorted by deliver time. The array itself is not rearranged: messages are copied when they are
    requested."""

    __slots__ = ("_cursor", "_due", "_order", "_taken", "_waits")

    def __init__(self, waits: Waits) -> None:
        self._waits = waits
        self._order: NDArray[np.intp] | None = None
        """Indexes into the array in the order of deliver times; None if the array is in that order."""
        self._cursor = 0
        self._taken: list[int] = []
        """Indexes, behind the cursor, of messages that were taken out, ascending; always few, see `take`."""
        self._due: NDArray[np.int64] = np.ascontiguousarray(waits["due"])
        """Deliver times in order. Indexes of messages are indexes into this array."""
        if (self._due[1:] < self._due[:-1]).any():
            # 16-bit numbers are sorted ten times as fast. The sort is stable, so messages due in the same ms stay in
            # the order of arrival.
            due = self._due - self._due.min()
            narrow = due.astype(np.uint16) if int(due.max()) < 2**16 else due
            self._order = np.argsort(narrow, kind="stable")
            self._due = self._due[self._order]

    def __len__(self) -> int:
        return len(self._due) - self._cursor - len(self._taken)

    @property
    def head_ms(self) -> int:
        return int(self._due[self._cursor])

    def first(self, limit: int) -> Waits:
        """Return the first `limit` messages."""
        part = slice(self._cursor, self._end(limit))
        if not self._taken:
            return self._waits[part] if self._order is None else picked(self._waits, self._order[part])
        indexes = self._left(part)
        return picked(self._waits, indexes if self._order is None else self._order[indexes])

    def first_due(self, limit: int) -> NDArray[np.int64]:
        """Return the deliver times of the first `limit` messages."""
        part = slice(self._cursor, self._end(limit))
        return self._due[part] if not self._taken else self._due[self._left(part)]

    def drop(self, count: int) -> None:
        """Drop the first messages, which are done."""
        self._cursor = self._end(count)
        self._pass_taken()

    def _end(self, count: int) -> int:
        """Return the index behind the first `count` messages, or behind all."""
        end = self._cursor + count
        for index in self._taken:
            if index >= end:
                break
            end += 1
        return min(end, len(self._due))

    def _left(self, part: slice) -> NDArray[np.intp]:
        """Return the indexes of a part that begins at the cursor, without the taken ones."""
        taken = self._taken[: bisect_left(self._taken, part.stop)]
        return np.delete(np.arange(part.start, part.stop), np.array(taken, np.intp) - part.start)

    def _pass_taken(self) -> None:
        """Move the cursor past taken messages."""
        passed = 0
        while passed < len(self._taken) and self._taken[passed] <= self._cursor:
            self._cursor += self._taken[passed] == self._cursor
            passed += 1
        del self._taken[:passed]

    def unordered(self) -> Waits:
        """Return all messages of the run, unordered, including those that are done or taken out."""
        return self._waits

    def positions(self) -> NDArray[np.int64]:
        """Return the positions of the units of all remaining messages."""
        positions: NDArray[np.int64] = self._waits["position"]
        indexes = self._left(slice(self._cursor, len(self._due)))
        return positions[indexes] if self._order is None else positions[self._order[indexes]]

    def find(self, due: int, position: int) -> int | None:
        """Return the index of the message with this deliver time whose unit has this position; None if it does not
        exist, is done or is taken out. Messages due in the same ms are in the order of their units."""
        positions, order = self._waits["position"], self._order
        indexes = range(
            max(self._cursor, int(self._due.searchsorted(due, "left"))), int(self._due.searchsorted(due, "right"))
        )
        at = bisect_left(indexes, position, key=lambda index: positions[index if order is None else order[index]])
        if at == len(indexes):
            return None
        index = indexes[at]
        if self._taken and self._taken[bisect_left(self._taken, index) :][:1] == [index]:
            return None
        return index if positions[index if order is None else order[index]] == position else None

    def take(self, index: int) -> Waits:
        """Take out the message at an index that `find` returned, and return it. The run is compacted only once for many
        calls."""
        at = index if self._order is None else self._order[index]
        taken = self._waits[at : at + 1].copy()
        insort(self._taken, index)
        self._pass_taken()
        if len(self._taken) > _TAKEN + len(self._due) // _TAKEN:
            indexes = self._left(slice(self._cursor, len(self._due)))
            self._order = indexes if self._order is None else self._order[indexes]
            self._due = self._due[indexes]
            self._cursor, self._taken = 0, []
        return taken


class Second:
    """The messages of one second, in the order of their deliver times; those due in the same ms in the order of
    arrival.

    They are kept in runs, which are made and sorted in pieces of a few ms while the second is loaded and as messages
    come, so that a new message need not be sorted in among all others.
    """

    __slots__ = (
        "_given",
        "_is_read_again",
        "_older",
        "_older_count",
        "_read_ahead",
        "_runs",
        "_uncounted",
        "_unsorted",
        "_unsorted_ms",
        "again",
        "deletes",
        "found_done",
        "is_loaded",
        "is_touched",
        "loader",
        "number",
        "removed",
    )

    def __init__(self, number: int, read_ahead: Callable[[Waits], None] = lambda waits: None) -> None:
        """Make a second. `read_ahead`: called with loaded messages, many at a time, whose records will be needed in
        memory."""
        self.number = number
        """The second, since the epoch. Its messages are due after it begins, and not after the next one begins."""
        self.loader: Loader | None = None
        """The work that loads messages, or takes deleted messages out; None once that is done. Until then the second is
        not done."""
        self._read_ahead = read_ahead
        self.again: list[tuple[Waits, Magic]] = []
        """Messages that are due later than this second, with their units' magic numbers: they need another slot."""
        self.deletes: list[tuple[int, int]] = []
        """Records (physical offset, size) that delete messages of this second by unique key."""
        self.is_loaded = True
        """Whether all messages of the second are in memory."""
        self.removed: set[int] = set()
        """Positions of the units of messages that were taken out while the second was being loaded."""
        self._uncounted: list[Waits] = []
        """Messages found delivered by recovery, as long as the counts of waiting messages still include them."""
        self.found_done: list[NDArray[np.int64]] = []
        """Physical offsets of all messages that recovery found delivered, in the loaded part of the second."""
        self.is_touched = False
        """Whether the slot has unmarked units of messages that are delivered or have newer units."""
        self._runs: list[_SortedRun] = []
        """The runs. Of messages due in the same ms, those of an earlier run come first."""
        self._unsorted: list[Waits] = []
        """Messages that arrived and are in no run yet."""
        self._unsorted_ms = _NEVER_MS
        """The earliest deliver time in `_unsorted`."""
        self._older: list[Waits] = []
        """Messages that were loaded or put back and are in no run yet, the newest part first."""
        self._older_count = 0
        """Number of messages in `_older`."""
        self._is_read_again = False
        self._given: int | NDArray[np.intp] = 0
        """The run (an index) of the messages returned last by `first`, or the run of each of them."""

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to do for this second, apart from `deletes`."""
        return self.loader is None and not (self.again or self._unsorted or self._older or self._runs)

    def begin_loading(self, loader: Loader) -> None:
        """Have a loader bring the messages of the second into memory. `load_next` continues its work; when it calls
        `was_loaded`, all messages are in memory."""
        self.is_loaded = False
        self.loader = loader

    def was_loaded(self) -> None:
        """Note that all messages of the second are in memory."""
        self.is_loaded = True

    def begin_deleting(self, loader: Loader) -> None:
        """Have a loader take messages out of the second. `load_next` continues its work."""
        self.loader = loader

    def load_next(self) -> bool:
        """Do a part of the loader's work. Return whether there was a loader. Raises OSError; then the part is not
        done."""
        if self.loader is None:
            return False
        if not self.loader.step():
            self.loader = None
            self._take_in_older()
        return True

    def touch(self) -> None:
        """Note that messages of the slot were delivered or got newer units while their units are not marked: Apache's
        broker would deliver them again."""
        self.is_touched = True

    def found_delivered(self, physical: NDArray[np.int64], uncounted: Waits) -> None:
        """Note messages that recovery found delivered. `physical`: their physical offsets; `uncounted`: those of them
        that are still counted as waiting."""
        self.found_done.append(physical)
        self._uncounted.append(uncounted)

    def take_uncounted(self) -> list[Waits]:
        """Return the messages noted by `found_delivered` that are still counted as waiting, for the caller to subtract
        them from the counts. They are returned only once."""
        uncounted, self._uncounted = self._uncounted, []
        return uncounted

    def add_deletes(self, records: list[tuple[int, int]]) -> None:
        """Add records (physical offset, size) that delete messages of this second."""
        self.deletes += records

    def take_deletes(self) -> list[tuple[int, int]]:
        """Return the records that delete messages of this second, for the caller to carry out the deletions. They are
        returned only once."""
        deletes, self.deletes = self.deletes, []
        return deletes

    def add_again(self, waits: Waits, magic: Magic) -> None:
        """Add messages that need another slot, with their units' magic numbers."""
        self.again.append((waits, magic))

    def first_again(self, limit: int) -> tuple[Waits, Magic]:
        """Return some of the messages that need another slot, at most `limit`. There must be some."""
        waits, magic = self.again[-1]
        return waits[:limit], magic[:limit]

    def drop_again(self, count: int) -> None:
        """Drop the first `count` of the messages that `first_again` returned last: they have another slot."""
        waits, magic = self.again[-1]
        if len(waits) > count:
            self.again[-1] = waits[count:], magic[count:]
        else:
            self.again.pop()

    def add(self, waits: Waits) -> None:
        """Add messages that arrive."""
        if len(waits):
            self._unsorted.append(waits)
            self._unsorted_ms = min(self._unsorted_ms, int(waits["due"].min()))

    def add_older(self, waits: Waits) -> None:
        """Add messages that arrived before all others."""
        if len(waits):
            self._older.append(waits)
            self._older_count += len(waits)
            if self._older_count >= _RUN:
                self._take_in_older()

    def put_back(self, waits: Waits) -> None:
        """Put back messages that were the first ones and were dropped: they come before all others that are due in the
        same ms."""
        if len(waits):
            self._older.append(waits)
            self._older_count += len(waits)

    def _take_in(self) -> None:
        """Sort messages that are in no run yet into runs."""
        self._take_in_older()
        if not self._unsorted:
            return
        run, runs = _SortedRun(joined(self._unsorted)), list(self._runs)
        while runs and len(runs[-1]) < min(_RATIO * len(run), _RUN):
            older = runs.pop()
            run = _SortedRun(joined([older.first(len(older)), run.first(len(run))]))
        runs.append(run)
        # These are assigned last: if memory runs out before that, nothing has changed.
        self._runs, self._unsorted, self._unsorted_ms = runs, [], _NEVER_MS

    def _take_in_older(self) -> None:
        if self._older:
            waits = joined(self._older[::-1])
            self._read_ahead(waits)
            self._runs.insert(0, _SortedRun(waits))
            self._older, self._older_count = [], 0

    def read_again(self, given: int) -> None:
        """Call `read_ahead` again with the messages of all runs, since records of the first `given` messages are no
        longer in memory. This is done at most once, and only if there are more messages than those."""
        if not self._is_read_again and sum(map(len, self._runs)) > given:
            self._is_read_again = True
            for run in self._runs:
                self._read_ahead(run.unordered())

    def remaining(self) -> Waits:
        """Return all messages in the order of their deliver times. The cost grows with their number."""
        self._take_in()
        return self._merged(sum(map(len, self._runs)))

    def positions_between(self, first: int, last: int) -> NDArray[np.int64]:
        """Return those positions of the messages' units that lie between `first` and `last`, both inclusive. Messages
        that need another slot are included."""
        self._take_in()
        parts = [*(run.positions() for run in self._runs), *(waits["position"] for waits, _ in self.again)]
        within = [part[(part >= first) & (part <= last)] for part in parts]
        return np.concatenate([NO_WAITS["position"], *within])

    def has(self, wait: Waits) -> bool:
        """Whether this second has a message, by its unit. The second must be loaded."""
        due, position = wait[["due", "position"]][0].item()
        self._take_in()
        is_due_here = any(run.find(due, position) is not None for run in self._runs)
        return is_due_here or any(_at(waits, position) is not None for waits, _ in self.again)

    def first(self, limit: int) -> Waits:
        """Return some of the first messages, at most `limit`; none only if there are none."""
        self._take_in()
        if not self._runs:
            return NO_WAITS
        heads = [run.head_ms for run in self._runs]
        at = heads.index(min(heads))
        waits = self._runs[at].first(limit)
        due = waits["due"]
        count = min(
            int(due.searchsorted(min(heads[:at], default=_NEVER_MS), "left")),
            int(due.searchsorted(min(heads[at + 1 :], default=_NEVER_MS), "right")),
        )
        if count < min(len(waits), _MIN_GIVEN):
            return self._merged(limit)
        self._given = at
        return waits[:count]

    def _merged(self, limit: int) -> Waits:
        """Return the first `limit` messages of all runs."""
        if not self._runs:
            return NO_WAITS
        dues = [run.first_due(limit) for run in self._runs]
        order = np.argsort(np.concatenate(dues), kind="stable")[:limit]
        self._given = np.repeat(np.arange(len(dues)), [len(due) for due in dues])[order]
        # Each count is the number of messages of a run among the first messages of all runs.
        counts = np.bincount(self._given, minlength=len(dues)).tolist()
        waits = joined([run.first(count) for run, count in zip(self._runs, counts, strict=True) if count])
        return picked(waits, np.argsort(waits["due"], kind="stable"))

    def due(self, now_ms: int, limit: int) -> Waits:
        """Return some of the first due messages, at most `limit`; none only if none is due."""
        waits = self.first(limit)
        return waits[: int(np.searchsorted(waits["due"], now_ms, "right"))]

    def drop(self, count: int) -> None:
        """Drop the first `count` of the messages that `first` returned last: they are done."""
        if isinstance(self._given, int):
            self._runs[self._given].drop(count)
        else:
            counts = np.bincount(self._given[:count], minlength=len(self._runs))
            for run, of_it in zip(self._runs, counts.tolist(), strict=True):
                run.drop(of_it)
        self._runs = [run for run in self._runs if len(run)]

    def remove(self, wait: Waits) -> Waits:
        """Take out a message, by its unit. Return it if it was to be delivered in this second, else an empty array."""
        due, position = wait[["due", "position"]][0].item()
        if not self.is_loaded:
            self.removed.add(position)
        self._take_in()
        for number, run in enumerate(self._runs):
            index = run.find(due, position)
            if index is not None:
                taken = run.take(index)
                if not len(run):
                    del self._runs[number]
                return taken
        for number, (waits, magic) in enumerate(self.again):
            at = _at(waits, position)
            if at is not None:
                self.again[number] = np.delete(waits, at), np.delete(magic, at)
                if len(waits) == 1:
                    del self.again[number]
                break
        return NO_WAITS

    def __len__(self) -> int:
        """Return the number of messages in memory that are to be delivered in this second."""
        return sum(map(len, self._runs)) + sum(map(len, self._unsorted)) + self._older_count

    @property
    def head_ms(self) -> int | None:
        """The time when the first message is due, ms since the epoch; None if there is none. While the second is being
        loaded, only the messages that are loaded count."""
        self._take_in_older()
        head = min((run.head_ms for run in self._runs), default=_NEVER_MS)
        return min(head, self._unsorted_ms) if self._runs or self._unsorted else None


def _at(waits: Waits, position: int) -> int | None:
    """Return the index of the message whose unit is at a position, None without one. `waits` is in the order of
    units."""
    positions = waits["position"]
    at = bisect_left(positions, position)
    return at if at < len(positions) and positions[at] == position else None


def joined(parts: list[Waits]) -> Waits:
    """Concatenate arrays of messages. This is done as bytes, since field by field it would take twenty times as
    long."""
    waits: Waits = np.concatenate([part.view(_BYTES) for part in parts]).view(WAIT)
    return waits


def picked(waits: Waits, at: NDArray[Any]) -> Waits:
    """Pick messages by indexes or a mask; as bytes, see `joined`."""
    chosen: Waits = waits.view(_BYTES)[at].view(WAIT)
    return chosen


def slot_second_of(due: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return `timer_properties.slot_second` for an array of deliver times."""
    result: NDArray[np.int64] = (due - 1) // PRECISION_MS
    return result


def due_fields(waits: Waits) -> NDArray[np.int64]:
    """Return the deliver-time field of units: it includes the hash of the key, and is negative where a policy chose the
    time."""
    fields: NDArray[np.int64] = waits["due"]
    if waits["key"].any():
        fields = fields | waits["key"].astype(np.int64) << DUE_BITS
    return np.where(waits["held"], -fields, fields)


def waits_of(units: Units, positions: NDArray[np.int64]) -> Waits:
    """Return the messages of units, as far as the units tell: the deliver time is 0 for units of Apache's broker."""
    due = units["due_ms"].astype(np.int64)
    waits = np.empty(len(units), WAIT)
    waits["physical"], waits["size"] = units["physical_offset"], units["record_size"]
    waits["held"] = due < APPLIED
    due = np.abs(due)
    waits["due"], waits["key"] = due & MAX_DUE_MS, due >> DUE_BITS
    waits["hash"], waits["position"] = units["topic_hash"], positions
    waits["again"] = units["magic"] & NORMAL == 0
    waits["magic"] = units["magic"]
    return waits
