"""Work on a second of the timer wheel, done in parts: loading its messages, and taking out those that records delete.

Each kind of work is an object that knows its progress, and goes on only when a part is completely done. So a failed
read is tried again, and a second never counts as loaded while a part of it is not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from duemq.protocol.records import properties
from duemq.protocol.records.timer_properties import deleted_message
from duemq.scheduler.timers.files.unit import DELETE, NORMAL, ROLL, seconds_of
from duemq.scheduler.timers.search import LOOK_UNITS
from duemq.scheduler.timers.seconds.second import picked, waits_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from duemq.scheduler.timers.seconds.second import Magic, Second, Waits
    from duemq.scheduler.timers.seconds.slots import Slots
    from duemq.storage.store import MessageStore


class Loading:
    """Loads the messages of a second from the timer log: one part of its chain at a time, the newest part first."""

    def __init__(self, slots: Slots, second: Second, last: int) -> None:
        """Begin to load. `last`: the position of the second's last unit."""
        self._slots = slots
        self._second = second
        self._chain = slots.log.chain(last)
        self._is_over = False
        """Whether the chain came to a unit of another second, as it does if the log was damaged."""
        self._part: _ChainPart | None = None
        """A part that was read and is not in the second yet."""

    def step(self) -> bool:
        """See `timers.seconds.second.Loader`."""
        if self._part is None:
            self._part = self._next_part()
        if self._part is None:
            self._slots.was_loaded(self._second)
            return False
        if self._part.learn(self._slots, self._second.number):
            return True
        # From here on nothing is read, so no error can leave the work half done.
        waits, magic, delivered = self._part.waits, self._part.magic, self._part.delivered
        self._part = None
        if self._second.removed:  # taken out while the part was being read
            kept = ~np.isin(waits["position"], list(self._second.removed))
            waits, magic = picked(waits, kept), magic[kept]
        self._second.delivered.append(delivered)
        self._slots.sort_in(self._second, waits, magic, self._second.add_older)
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
        kept, done, uncounted = self._slots.left_of(self._second, waits, magic)
        self._second.found_done.append(waits["physical"][done])
        delivered = waits[uncounted]
        if not kept.all():
            # Apache's broker would deliver unmarked ones.
            self._second.is_touched |= bool((~kept & (magic & DELETE == 0)).any())
            waits, magic = picked(waits, kept), magic[kept]
        return _ChainPart(waits, magic, delivered)


class _ChainPart:
    """Messages of a second, from a part of its chain."""

    def __init__(self, waits: Waits, magic: Magic, delivered: Waits) -> None:
        self.waits = waits
        self.magic = magic
        self.delivered = delivered
        """Messages that recovery found delivered, and that are still counted as waiting."""
        self._unknown: NDArray[np.intp] = np.flatnonzero((waits["due"] == 0) & (magic & (DELETE | ROLL) != DELETE))
        """Indexes of messages whose units do not tell their deliver times."""

    def learn(self, slots: Slots, number: int) -> bool:
        """Read records of some messages in `_unknown`. Return whether there were any. Raises OSError."""
        some = self._unknown[:LOOK_UNITS]
        for at in some.tolist():
            slots.learn(self.waits, at, number)
        self._unknown = self._unknown[len(some) :]
        return len(some) > 0


class Deleting:
    """Takes out of a loaded second the messages that its deleting records name, see
    `timer_properties.deleted_message`."""

    def __init__(self, store: MessageStore, slots: Slots, second: Second) -> None:
        self._store = store
        self._slots = slots
        self._second = second
        self._deletes, second.deletes = second.deletes, []
        self._named: set[tuple[str, str] | None] = set()
        """Topics and unique keys of the messages to take out."""
        self._waits: Waits | None = None
        self._at = 0
        """Number of deleting records that were read; then, number of messages that were looked at."""

    def step(self) -> bool:
        """See `timers.seconds.second.Loader`."""
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
            self._slots.delete(self._second.remove(wait))
        self._at += 1
        return True

    def _text(self, physical: int, size: int) -> str | None:
        message = self._store.message_at(physical, size)
        return message.properties_text if message is not None else None
