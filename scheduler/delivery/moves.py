"""Messages that get another record during a search, because they are appended again or get another time.

The new record lies behind the end of the search, and the former record no longer waits: the search would find neither.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from duemq.protocol.records.record import StoredMessage

IsAhead = Callable[[StoredMessage, int | None], bool]
"""Returns whether a message belongs to a search and the search has not come to it yet. Arguments: the record by which
the message has waited until now, and the position of its unit in the timer log, None without one."""


class Missed:
    """The messages that one search would miss."""

    def __init__(self, is_ahead: IsAhead) -> None:
        self._is_ahead = is_ahead
        self._next_records: dict[int, int] = {}
        """The physical offset of a message's next record, by the physical offset of the record before it."""
        self._due_ms: dict[int, int] = {}
        """The deliver time of each missed message, by the physical offset of its newest record."""

    def found(self, physical_offset: int) -> None:
        """Note that the search found a message after all, by the record at this physical offset: the search was already
        reading there when the message got another record."""
        while (again := self._next_records.pop(physical_offset, None)) is not None:
            self._due_ms.pop(again, None)
            physical_offset = again

    def take(self) -> Iterator[tuple[int, int]]:
        """Iterate over missed messages until none is left: the physical offset of the newest record, and the deliver
        time, ms since the epoch. They come in the order of the records; more may be added in the meantime."""
        while self._due_ms:
            for physical_offset in sorted(self._due_ms):
                due_ms = self._due_ms.pop(physical_offset, None)
                if due_ms is not None:
                    yield physical_offset, due_ms

    def add(self, message: StoredMessage, position: int | None, again: int, due_ms: int) -> None:
        """Note a message that got another record, if the search would miss it. For the arguments see `Moves.add`."""
        old = message.physical_offset
        if self._due_ms.pop(old, None) is not None or self._is_ahead(message, position):
            self._next_records[old] = again
            self._due_ms[again] = due_ms


class Moves:
    """Tells searches in progress which messages they would miss. Owned by the event loop's thread."""

    def __init__(self) -> None:
        self._searches: list[Missed] = []

    @contextmanager
    def followed(self, is_ahead: IsAhead) -> Iterator[Missed]:
        """Collect the messages that a search would miss, as long as this context lasts."""
        missed = Missed(is_ahead)
        self._searches.append(missed)
        try:
            yield missed
        finally:
            self._searches.remove(missed)

    def add(self, message: StoredMessage, position: int | None, again: int, due_ms: int) -> None:
        """Note that a waiting message got another record. `message`: its former record; `position`: the position of
        that record's unit in the timer log, None without one; `again`: physical offset of the new record; `due_ms`: its
        deliver time, ms since the epoch."""
        for missed in self._searches:
            missed.add(message, position, again, due_ms)
