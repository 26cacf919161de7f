"""One second of the timer wheel whose messages are in memory."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np

from duemq.protocol.records.timer_properties import PRECISION_MS
from duemq.scheduler.timers.files.log import APPLIED, DUE_BITS, MAX_DUE_MS, NORMAL

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from duemq.scheduler.timers.files.log import Units

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
"""A message that waits: physical offset and size of its record, when it is due (ms), its unit's position in the timer
log, the hash of its topic, that of its key if it is to be replaced by the next one of that (`timers.index.keys`, else
0); whether its topic's policy has chosen the time, and whether it was appended again; the magic number of the unit that
it was read from, 0 where it was not read from one."""
NONE: Final = np.empty(0, WAIT)
_BYTES: Final = np.dtype((np.void, WAIT.itemsize))
_NEVER_MS: Final = 2**62
_RUN: Final = 32_768
"""So many messages are sorted at once."""
_RATIO: Final = 4
"""What comes is sorted in among a run that is shorter than so many times its number."""
_TAKEN: Final = 64
"""So many messages are taken out of a run, and as many for each so many that it has, before the others move up."""
_FEW: Final = 64
"""Fewer than so many from one run are not worth while."""


class Loader(Protocol):
    """Work on a second that is done in parts."""

    def step(self) -> bool:
        """Do a part; whether there was one left to do. Where it raises, that part is not done, and the next step tries
        it again. Raises OSError."""


class _Run:
    """Messages that were sorted once. They stay where they are: copies of a few are made as these are asked for."""

    __slots__ = ("_cursor", "_due", "_order", "_taken", "_waits")

    def __init__(self, waits: Waits) -> None:
        self._waits = waits
        self._order: NDArray[np.intp] | None = None
        """Their places by deliver time; None where that is how they are."""
        self._cursor = 0
        self._taken: list[int] = []
        """Places behind the cursor of messages that were taken out, ascending: few, see `take`."""
        self._due: NDArray[np.int64] = np.ascontiguousarray(waits["due"])
        """Deliver times by their places."""
        if (self._due[1:] < self._due[:-1]).any():
            # Few bits are sorted ten times as fast; those of one ms keep the order in which they came.
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
        """The first messages, at most `limit`."""
        part = slice(self._cursor, self._end(limit))
        if not self._taken:
            return self._waits[part] if self._order is None else picked(self._waits, self._order[part])
        places = self._left(part)
        return picked(self._waits, places if self._order is None else self._order[places])

    def first_due(self, limit: int) -> NDArray[np.int64]:
        """When the first messages are due, at most `limit`."""
        part = slice(self._cursor, self._end(limit))
        return self._due[part] if not self._taken else self._due[self._left(part)]

    def drop(self, count: int) -> None:
        """The first messages are done."""
        self._cursor = self._end(count)
        self._pass_taken()

    def _end(self, count: int) -> int:
        """The place behind so many of the first messages, or behind all."""
        end = self._cursor + count
        for place in self._taken:
            if place >= end:
                break
            end += 1
        return min(end, len(self._due))

    def _left(self, part: slice) -> NDArray[np.intp]:
        """The places in a part, from the cursor on, that were not taken."""
        taken = self._taken[: bisect_left(self._taken, part.stop)]
        return np.delete(np.arange(part.start, part.stop), np.array(taken, np.intp) - part.start)

    def _pass_taken(self) -> None:
        """Have the cursor at a message that is there."""
        passed = 0
        while passed < len(self._taken) and self._taken[passed] <= self._cursor:
            self._cursor += self._taken[passed] == self._cursor
            passed += 1
        del self._taken[:passed]

    def unordered(self) -> Waits:
        """All messages in no order, with some that are done."""
        return self._waits

    def positions(self) -> NDArray[np.int64]:
        """Where the units of all messages lie."""
        positions: NDArray[np.int64] = self._waits["position"]
        places = self._left(slice(self._cursor, len(self._due)))
        return positions[places] if self._order is None else positions[self._order[places]]

    def find(self, due: int, position: int) -> int | None:
        """The place in this order of the message that is due at a time and has its unit at a position; None where it is
        not there, or done. Those that are due in the same ms are in the order of their units."""
        positions, order = self._waits["position"], self._order
        places = range(
            max(self._cursor, int(self._due.searchsorted(due, "left"))), int(self._due.searchsorted(due, "right"))
        )
        at = bisect_left(places, position, key=lambda place: positions[place if order is None else order[place]])
        if at == len(places):
            return None
        place = places[at]
        if self._taken and self._taken[bisect_left(self._taken, place) :][:1] == [place]:
            return None
        return place if positions[place if order is None else order[place]] == position else None

    def take(self, place: int) -> Waits:
        """Take out the message that `find` found. All others are copied once for many such."""
        at = place if self._order is None else self._order[place]
        taken = self._waits[at : at + 1].copy()
        insort(self._taken, place)
        self._pass_taken()
        if len(self._taken) > _TAKEN + len(self._due) // _TAKEN:
            places = self._left(slice(self._cursor, len(self._due)))
            self._order = places if self._order is None else self._order[places]
            self._due = self._due[places]
            self._cursor, self._taken = 0, []
        return taken


class Second:
    """The messages of one second, in the order of their deliver times; those of one ms in that in which they came.

    They are kept in runs, which are made and sorted a few ms at a time: while it is loaded, and as messages come, which
    are then not sorted in among all the others.
    """

    __slots__ = (
        "_fresh",
        "_fresh_ms",
        "_given",
        "_is_read_again",
        "_older",
        "_older_count",
        "_read_ahead",
        "_runs",
        "again",
        "deletes",
        "delivered",
        "found_done",
        "is_loaded",
        "is_touched",
        "loader",
        "number",
        "removed",
    )

    def __init__(self, number: int, read_ahead: Callable[[Waits], None] = lambda waits: None) -> None:
        """`read_ahead` is called with messages that were loaded, many at once, whose records are wanted in memory."""
        self.number = number
        """Seconds since the epoch; the messages are due after it, and not after the next one."""
        self.loader: Loader | None = None
        """Loads the messages, or deletes some; None when that is done. The second is not over before."""
        self._read_ahead = read_ahead
        self.again: list[tuple[Waits, Magic]] = []
        """Units of what is due later than this second, and has to get another slot."""
        self.deletes: list[tuple[int, int]] = []
        """Records, physical offset and size, that ask for messages of this second to be deleted, by unique key."""
        self.is_loaded = True
        """Whether all of its messages are here."""
        self.removed: set[int] = set()
        """Where units lie of messages that were taken out while it was loaded."""
        self.delivered: list[Waits] = []
        """What recovery found delivered of it, as long as the counts of what waits have that."""
        self.found_done: list[NDArray[np.int64]] = []
        """Physical offsets of all that recovery found delivered of it, as far as it is loaded."""
        self.is_touched = False
        """Whether its slot has units of messages that were delivered or have other units since, and does not say so."""
        self._runs: list[_Run] = []
        """Of messages that are due in the same ms those of an earlier run are first."""
        self._fresh: list[Waits] = []
        """What came, and is not in a run yet..."""
        self._fresh_ms = _NEVER_MS
        """...and when the first of it is due."""
        self._older: list[Waits] = []
        """What was loaded, and is not in a run yet, the newest part first..."""
        self._older_count = 0
        """...and how many messages these are."""
        self._is_read_again = False
        self._given: int | NDArray[np.intp] = 0
        """Of what was given last: the run it is of, or those that the messages are of."""

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to do for it."""
        return self.loader is None and not (self.again or self._fresh or self._older or self._runs)

    def load_some(self) -> bool:
        """Load a part of the messages; whether there was anything to load. Raises OSError; then there is still."""
        if self.loader is None:
            return False
        if not self.loader.step():
            self.loader = None
            self._take_in_older()
        return True

    def add(self, waits: Waits) -> None:
        """More messages."""
        if len(waits):
            self._fresh.append(waits)
            self._fresh_ms = min(self._fresh_ms, int(waits["due"].min()))

    def add_older(self, waits: Waits) -> None:
        """More messages, which came before all others."""
        if len(waits):
            self._older.append(waits)
            self._older_count += len(waits)
            if self._older_count >= _RUN:
                self._take_in_older()

    def put_back(self, waits: Waits) -> None:
        """Messages that were the first, and dropped, are the first again: of what is due in the same ms nothing comes
        before them."""
        if len(waits):
            self._older.append(waits)
            self._older_count += len(waits)

    def _take_in(self) -> None:
        """Sort what is in no run yet."""
        self._take_in_older()
        if not self._fresh:
            return
        run, runs = _Run(joined(self._fresh)), list(self._runs)
        while runs and len(runs[-1]) < min(_RATIO * len(run), _RUN):
            older = runs.pop()
            run = _Run(joined([older.first(len(older)), run.first(len(run))]))
        runs.append(run)
        # Where memory runs out before, all of them are where they were.
        self._runs, self._fresh, self._fresh_ms = runs, [], _NEVER_MS

    def _take_in_older(self) -> None:
        if self._older:
            waits = joined(self._older[::-1])
            self._read_ahead(waits)
            self._runs.insert(0, _Run(waits))
            self._older, self._older_count = [], 0

    def read_again(self, given: int) -> None:
        """Records of the first messages, so many as given, are not in memory any more: tell once more of all that were
        loaded, if there are others, and if that was done only once."""
        if not self._is_read_again and sum(map(len, self._runs)) > given:
            self._is_read_again = True
            for run in self._runs:
                self._read_ahead(run.unordered())

    def remaining(self) -> Waits:
        """All messages, by deliver time. That costs as much as there are."""
        self._take_in()
        return self._merged(sum(map(len, self._runs)))

    def positions_between(self, first: int, last: int) -> NDArray[np.int64]:
        """Where the units of messages lie, also of those that get another slot, as far as between two positions."""
        self._take_in()
        parts = [*(run.positions() for run in self._runs), *(waits["position"] for waits, _ in self.again)]
        within = [part[(part >= first) & (part <= last)] for part in parts]
        return np.concatenate([NONE["position"], *within])

    def has(self, wait: Waits) -> bool:
        """Whether a message is here, by the unit that it has; of a second that is loaded."""
        due, position = wait[["due", "position"]][0].item()
        self._take_in()
        is_due_here = any(run.find(due, position) is not None for run in self._runs)
        return is_due_here or any(_at(waits, position) is not None for waits, _ in self.again)

    def first(self, limit: int) -> Waits:
        """The first messages, at most `limit`, none only where there are none."""
        self._take_in()
        if not self._runs:
            return NONE
        heads = [run.head_ms for run in self._runs]
        at = heads.index(min(heads))
        waits = self._runs[at].first(limit)
        due = waits["due"]
        count = min(
            int(due.searchsorted(min(heads[:at], default=_NEVER_MS), "left")),
            int(due.searchsorted(min(heads[at + 1 :], default=_NEVER_MS), "right")),
        )
        if count < min(len(waits), _FEW):
            return self._merged(limit)
        self._given = at
        return waits[:count]

    def _merged(self, limit: int) -> Waits:
        """The first messages of all runs."""
        if not self._runs:
            return NONE
        dues = [run.first_due(limit) for run in self._runs]
        order = np.argsort(np.concatenate(dues), kind="stable")[:limit]
        self._given = np.repeat(np.arange(len(dues)), [len(due) for due in dues])[order]
        # Of each run the first ones, so many as are among the first of all.
        counts = np.bincount(self._given, minlength=len(dues)).tolist()
        waits = joined([run.first(count) for run, count in zip(self._runs, counts, strict=True) if count])
        return picked(waits, np.argsort(waits["due"], kind="stable"))

    def due(self, now_ms: int, limit: int) -> Waits:
        """The first messages that are due, at most `limit`, none only where there are none."""
        waits = self.first(limit)
        return waits[: int(np.searchsorted(waits["due"], now_ms, "right"))]

    def drop(self, count: int) -> None:
        """The first messages are done, of those that were given last."""
        if isinstance(self._given, int):
            self._runs[self._given].drop(count)
        else:
            counts = np.bincount(self._given[:count], minlength=len(self._runs))
            for run, of_it in zip(self._runs, counts.tolist(), strict=True):
                run.drop(of_it)
        self._runs = [run for run in self._runs if len(run)]

    def remove(self, wait: Waits) -> Waits:
        """Take a message out, by the unit that it has; gives it, if it was to be delivered in this second."""
        due, position = wait[["due", "position"]][0].item()
        if not self.is_loaded:
            self.removed.add(position)
        self._take_in()
        for number, run in enumerate(self._runs):
            place = run.find(due, position)
            if place is not None:
                taken = run.take(place)
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
        return NONE

    def __len__(self) -> int:
        """How many messages are here that have not been given another slot."""
        return sum(map(len, self._runs)) + sum(map(len, self._fresh)) + self._older_count

    @property
    def head_ms(self) -> int | None:
        """When the first message is due; None without one. Of a second that is being loaded, of what is there."""
        self._take_in_older()
        head = min((run.head_ms for run in self._runs), default=_NEVER_MS)
        return min(head, self._fresh_ms) if self._runs or self._fresh else None


def _at(waits: Waits, position: int) -> int | None:
    """Which of some messages, in the order of their units, has its unit at a position."""
    positions = waits["position"]
    at = bisect_left(positions, position)
    return at if at < len(positions) and positions[at] == position else None


def joined(parts: list[Waits]) -> Waits:
    """All of them, one behind the other. As bytes: field by field it would take twenty times as long."""
    waits: Waits = np.concatenate([part.view(_BYTES) for part in parts]).view(WAIT)
    return waits


def picked(waits: Waits, at: NDArray[Any]) -> Waits:
    """Some of them, by places or a mask; as bytes, too."""
    some: Waits = waits.view(_BYTES)[at].view(WAIT)
    return some


def slot_second_of(due: NDArray[np.int64]) -> NDArray[np.int64]:
    """As `timer_properties.slot_second`, of many."""
    result: NDArray[np.int64] = (due - 1) // PRECISION_MS
    return result


def due_fields(waits: Waits) -> NDArray[np.int64]:
    """Deliver times as units have them, with the hashes of keys; negative where a policy chose them."""
    fields: NDArray[np.int64] = waits["due"]
    if waits["key"].any():
        fields = fields | waits["key"].astype(np.int64) << DUE_BITS
    return np.where(waits["held"], -fields, fields)


def waits_of(units: Units, positions: NDArray[np.int64]) -> Waits:
    """What units say of their messages."""
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
