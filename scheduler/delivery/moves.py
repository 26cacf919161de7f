"""Messages that get another record while a search goes on: appended once more, or given another time.

Such a record lies behind where the search ends, and the one before waits no more: the search would tell of neither.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from duemq.protocol.records.record import StoredMessage

IsAhead = Callable[[StoredMessage, int | None], bool]
"""Whether a search is to tell of a message and has not come to it: to the record given, or to the position given in the
timer log, None without a unit there, by which the message waited until now."""


class Missed:
    """The messages that one search is to tell of, and would not come to any more."""

    def __init__(self, is_ahead: IsAhead) -> None:
        self._is_ahead = is_ahead
        self._again: dict[int, int] = {}
        """By the physical offset of a record that of the next one of its message."""
        self._due_ms: dict[int, int] = {}
        """By the physical offset of a message's newest record."""

    def told(self, physical_offset: int) -> None:
        """The search told of a message all the same, by this record: it had come so far when the message moved."""
        while (again := self._again.pop(physical_offset, None)) is not None:
            self._due_ms.pop(again, None)
            physical_offset = again

    def take(self) -> Iterator[tuple[int, int]]:
        """Physical offsets of the newest records and deliver times, ms since the epoch, in the order of the records,
        until there are none; more may come meanwhile."""
        while self._due_ms:
            for physical_offset in sorted(self._due_ms):
                due_ms = self._due_ms.pop(physical_offset, None)
                if due_ms is not None:
                    yield physical_offset, due_ms

    def add(self, message: StoredMessage, position: int | None, again: int, due_ms: int) -> None:
        """See `Moves.add`."""
        old = message.physical_offset
        if self._due_ms.pop(old, None) is not None or self._is_ahead(message, position):
            self._again[old] = again
            self._due_ms[again] = due_ms


class Moves:
    """Tells searches that are under way of the messages they have not come to. One thread, the event loop's, owns
    it."""

    def __init__(self) -> None:
        self._searches: list[Missed] = []

    @contextmanager
    def followed(self, is_ahead: IsAhead) -> Iterator[Missed]:
        """For as long as a search goes on, what it would miss."""
        missed = Missed(is_ahead)
        self._searches.append(missed)
        try:
            yield missed
        finally:
            self._searches.remove(missed)

    def add(self, message: StoredMessage, position: int | None, again: int, due_ms: int) -> None:
        """A waiting message, whose record this was, and whose unit is at a position of the timer log if it has one,
        waits by the record at a physical offset now, until a time."""
        for missed in self._searches:
            missed.add(message, position, again, due_ms)
