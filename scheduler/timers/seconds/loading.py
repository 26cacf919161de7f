"""Work on a second of the timer wheel, done in parts: loading its messages, and taking out those that records delete.

Each kind of work is an object that knows its progress, and continues only when a part is completely done. So a failed
read is tried again, and a second never counts as loaded while a part of it is not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from duemq.protocol.records import properties
from duemq.protocol.records.timer_properties import PRECISION_MS, deleted_message
from duemq.scheduler import waiting as decided
from duemq.scheduler.timers.deliver_times import LOOK_UNITS, learn
from duemq.scheduler.timers.files.log import Chain
from duemq.scheduler.timers.files.unit import DELETE, NORMAL, ROLL, WITHDRAWN, seconds_of
from duemq.scheduler.timers.seconds.findings import Findings
from duemq.scheduler.timers.seconds.second import Second, picked, slot_second_of, waits_of
from duemq.storage.store import MessageStore

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from duemq.scheduler.timers.seconds.second import Magic, Waits


class Loading:
    """Loads the messages of a second from the timer log: one part of its chain at a time, the newest part first."""

    def __init__(
        self,
        store: MessageStore,
        chain: Chain,
        second: Second,
        findings: Findings,
        on_loaded: Callable[[Second], None],
    ) -> None:
        """Begin to load. `chain`: the units in the second's slot; `on_loaded`: called once, when all messages of the
        second are in memory."""
        self._store = store
        self._chain = chain
        self._second = second
        self._findings = findings
        self._on_loaded = on_loaded
        self._is_over = False
        """Whether the chain came to a unit of another second, as it does if the log was damaged."""
        self._part: _ChainPart | None = None
        """A part that was read but is not in the second yet."""

    def step(self) -> bool:
        """Load a part of the second. Return whether there was one left to load. Raises NotInMemory, OSError; the part
        is then not loaded, and the next step tries it again."""
        if self._part is None:
            self._part = self._next_part()
        if self._part is None:
            self._second.was_loaded()
            self._on_loaded(self._second)
            return False
        if self._part.learn(self._store, self._second.number):
            return True
        # From here on nothing is read, so no error can leave the work half done.
        part, self._part = self._part, None
        waits, magic = part.waits, part.magic
        if self._second.removed:  # taken out while the part was being read
            kept = ~np.isin(waits["position"], list(self._second.removed))
            waits, magic = picked(waits, kept), magic[kept]
        self._second.found_delivered(part.done, part.uncounted)
        sort_in(self._second, waits, magic, self._second.add_older)
        return True

    def _next_part(self) -> _ChainPart | None:
        found = next(self._chain, None) if not self._is_over else None
        if found is None:
            return None
        positions, units = found
        others = np.flatnonzero(seconds_of(units) != self._second.number)
        if len(others):
            self._is_over = True
            positions, units = positions[others[-1] + 1 :], units[others[-1] + 1 :]
            if not len(units):
                return None
        magic = units["magic"].astype(np.int32) | NORMAL
        waits = waits_of(units, positions)
        kept, done, uncounted = self._findings.left_of(self._second.number, waits, magic)
        physical, delivered = waits["physical"][done], waits[uncounted]
        if not kept.all():
            if (~kept & (magic & DELETE == 0)).any():  # Apache's broker would deliver messages with unmarked units
                self._second.touch()
            waits, magic = picked(waits, kept), magic[kept]
        return _ChainPart(waits, magic, physical, delivered)


class _ChainPart:
    """Messages of a second, from a part of its chain."""

    def __init__(self, waits: Waits, magic: Magic, done: NDArray[np.int64], uncounted: Waits) -> None:
        self.waits = waits
        self.magic = magic
        self.done = done
        """Physical offsets of messages of the part that recovery found delivered."""
        self.uncounted = uncounted
        """Those messages in `done` that are still counted as waiting."""
        self._unknown: NDArray[np.intp] = np.flatnonzero((waits["due"] == 0) & (magic & (DELETE | ROLL) != DELETE))
        """Indexes of messages whose units do not have their deliver times."""

    def learn(self, store: MessageStore, number: int) -> bool:
        """Read records of some messages in `_unknown`. Return whether there were any. Raises OSError."""
        some = self._unknown[:LOOK_UNITS]
        for at in some.tolist():
            learn(store, self.waits, at, number)
        self._unknown = self._unknown[len(some) :]
        return len(some) > 0


class Deleting:
    """Takes messages out of a loaded second, those that the second's deleting records name; see
    `timer_properties.deleted_message`."""

    def __init__(self, store: MessageStore, second: Second, delete: Callable[[Waits], None]) -> None:
        """Begin with all deleting records of the second. `delete`: withdraws messages that were taken out of the
        second."""
        self._store = store
        self._second = second
        self._delete = delete
        self._deletes = second.take_deletes()
        self._named: set[tuple[str, str] | None] = set()
        """Topics and unique keys of the messages to take out."""
        self._waits: Waits | None = None
        self._at = 0
        """Number of deleting records that were read; after that, number of messages that were looked at."""

    def step(self) -> bool:
        """Read one deleting record, or look at one message. Return whether there was one left. Raises NotInMemory,
        OSError; the next step then tries the same again."""
        if self._waits is None:
            if self._at < len(self._deletes):
                text = self._text(*self._deletes[self._at])
                if text is not None:
                    self._named.add(deleted_message(text))
                self._at += 1
                return True
            self._waits, self._at = self._second.remaining(), 0
        if self._at >= len(self._waits):
            return False
        wait = self._waits[self._at : self._at + 1]
        physical, size = wait[["physical", "size"]][0].item()
        text = self._text(physical, size) or ""
        topic, key = properties.get(text, properties.REAL_TOPIC), properties.get(text, properties.UNIQ_KEY)
        if topic is not None and key is not None and (topic, key) in self._named:
            self._delete(self._second.remove(wait))
        self._at += 1
        return True

    def _text(self, physical: int, size: int) -> str | None:
        message = self._store.message_at(physical, size)
        return message.properties_text if message is not None else None


def sort_in(second: Second, waits: Waits, magic: NDArray[np.int32], add: Callable[[Waits], None]) -> None:
    """Sort messages of a slot into its second by their units' magic numbers and their times: deleting records, messages
    that need another slot, and messages to be delivered, for which `add` is called. Withdrawn messages are left
    out."""
    if (magic == NORMAL).all() and (waits["due"] <= (second.number + 1) * PRECISION_MS).all():
        add(waits)
        return
    second.add_deletes(waits[decided.is_deletion(magic) & (magic & ROLL == 0)][["physical", "size"]].tolist())
    kept = magic & WITHDRAWN == 0
    waits, magic = picked(waits, kept), magic[kept]
    later = (magic & ROLL != 0) | (slot_second_of(waits["due"]) > second.number)
    if later.any():
        second.add_again(picked(waits, later), magic[later] & ~ROLL)
    now = ~later & (magic & DELETE == 0)
    if now.any():
        add(picked(waits, now))
