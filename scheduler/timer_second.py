"""One second of the timer wheel whose messages are in memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from protocol.timer_properties import PRECISION_MS
from scheduler.timer_log import APPLIED, DUE_BITS, MAX_DUE_MS

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from scheduler.timer_log import Units

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
    ]
)
"""A message that waits: physical offset and size of its record, when it is due (ms), its unit's position in the timer
log, the hash of its topic, that of its key if it is to be replaced by the next one of that (`timer_keys`, else 0);
whether its topic's policy has chosen the time."""
NONE: Final = np.empty(0, WAIT)
_END: Final = object()


class Second:
    """The messages of one second, in the order of their deliver times."""

    __slots__ = ("_cursor", "_fresh", "_waits", "again", "deletes", "is_touched", "loader", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        """Seconds since the epoch; the messages are due after it, and not after the next one."""
        self.loader: Iterator[None] | None = None
        """Loads the messages, a part a step; None when it is done."""
        self.again: list[tuple[Waits, Magic]] = []
        """Units of what is due later than this second, and has to get another slot."""
        self.deletes: list[tuple[int, int]] = []
        """Records, physical offset and size, that ask for messages of this second to be deleted, by unique key."""
        self.is_touched = False
        """Whether a message of this second has been delivered."""
        self._waits: Waits = NONE
        self._cursor = 0
        self._fresh: list[Waits] = []

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to do for it."""
        return self.loader is None and not self.again and not self._fresh and self._cursor == len(self._waits)

    def load_some(self) -> bool:
        """Load a part of the messages; whether there was anything to load."""
        if self.loader is None:
            return False
        if next(self.loader, _END) is _END:
            self.loader = None
        return True

    def add(self, waits: Waits) -> None:
        """More messages."""
        self._fresh.append(waits)

    def add_older(self, waits: Waits) -> None:
        """More messages, which came before all others."""
        self._fresh.insert(0, waits)

    def remaining(self) -> Waits:
        """All messages, by deliver time."""
        if self._fresh:
            waits = np.concatenate((self._waits[self._cursor :], *self._fresh))
            due = waits["due"] - waits["due"].min() if len(waits) else waits["due"]
            if (due[1:] < due[:-1]).any():
                # Few bits are sorted ten times as fast; those of one ms keep the order in which they came.
                narrow = due.astype(np.uint16) if int(due.max()) < 2**16 else due
                waits = waits[np.argsort(narrow, kind="stable")]
            self._waits, self._cursor = waits, 0
            self._fresh = []
        return self._waits[self._cursor :]

    def physical(self) -> NDArray[np.int64]:
        """Where the records of all messages lie, also of those that get another slot."""
        return np.concatenate([waits["physical"] for waits in (self.remaining(), *(part for part, _ in self.again))])

    def due(self, now_ms: int, limit: int) -> Waits:
        """The first messages that are due, at most `limit`."""
        waits = self.remaining()[:limit]
        return waits[: int(np.searchsorted(waits["due"], now_ms, "right"))]

    def drop(self, count: int) -> None:
        """The first messages are done."""
        self._cursor += count

    def remove(self, physical: int) -> bool:
        """Take a message out; whether it was to be delivered in this second."""
        waits = self.remaining()
        is_it = waits["physical"] == physical
        is_there = bool(is_it.any())
        if is_there:
            self._waits, self._cursor = waits[~is_it], 0
        self.again = [(waits[kept], magic[kept]) for waits, magic, kept in self._again_without(physical) if kept.any()]
        return is_there

    def _again_without(self, physical: int) -> Iterator[tuple[Waits, Magic, NDArray[np.bool_]]]:
        return ((waits, magic, waits["physical"] != physical) for waits, magic in self.again)

    @property
    def head_ms(self) -> int | None:
        """When the first message is due; None without one."""
        waits = self.remaining()
        return int(waits["due"][0]) if len(waits) else None


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
    return waits
