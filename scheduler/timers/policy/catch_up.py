"""Of what is overdue, the newest of each key: `timer.catch.up=newest` (see `timers.policy.policies`).

The first overdue message of a topic that asks for it begins the search: the timer log tells which messages of the topic
are overdue, their records tell the keys, and of each key the one with the latest deliver time counts, the one that came
last where two have the same. Meanwhile the messages of the topic are put off, by other slots, with the deliver times
that they have; so a crash finds them as they were, and the search begins anew. Other topics go on.

All of them are put off to one slot, which moves on if the search takes longer. What it found holds when that slot has
its turn: then the messages are in the order of their deliver times, and whenever a crash comes, none is delivered
before the older ones of its key are cancelled.

The search is done in slices. It remembers each key, by a hash of 128 bits, and where the messages lie that are not to
be delivered: at most so many keys and messages (`MAX_KEYS`, `MAX_OLDER`), some 150 MB; what is beyond is delivered, and
a line in the log says so.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from hashlib import blake2b
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import structlog

from duemq.protocol.records import properties
from duemq.protocol.records.timer_properties import PRECISION_MS
from duemq.scheduler.timers.config import OVERDUE_MS
from duemq.scheduler.timers.index.sorted_offsets import is_among
from duemq.scheduler.timers.slots import Slots, due_of
from duemq.storage.log.copies import Records
from duemq.storage.queues.pull import ColdRead, Range, ReadCold
from duemq.storage.store import MessageStore

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from duemq.scheduler.timers.second import Waits

    Mask = NDArray[np.bool_]

log = structlog.get_logger(__name__)

MAX_KEYS: Final = 500_000
MAX_OLDER: Final = 2_000_000
_LOOK_UNITS: Final = 128
_LOOK_BYTES: Final = 1024 * 1024
_SCAN_UNITS: Final = 4096
_SORTED_AT_ONCE: Final = 8192
_FIRST_HOLD: Final = 2
_MAX_HOLD: Final = 30
"""So many seconds messages are put off at first, and at most."""
_PLACE_BITS: Final = 63


class Verdict(NamedTuple):
    """What becomes of some messages of one topic that are due; the others are delivered."""

    dropped: Mask
    held: Mask
    """They are put off."""
    second: int
    """To the slot of that second."""


class _Hold:
    """To which second's slot the messages of a topic are put off, and since when that was asked for."""

    def __init__(self, since_ms: int) -> None:
        self.since_ms = since_ms
        self.second = -1


class _Result(NamedTuple):
    """What a search found."""

    horizon_ms: int
    """It looked at what was due until then..."""
    second: int
    """...and what was due in between was put off to this second's slot, and is not overdue for that."""
    older: Offsets


class Offsets:
    """A set of physical offsets, 8 bytes each: sorted arrays, each at least twice as long as the next."""

    def __init__(self) -> None:
        self._sorted: list[NDArray[np.int64]] = []
        self._fresh = array("q")

    def __len__(self) -> int:
        return sum(map(len, self._sorted)) + len(self._fresh)

    def add(self, offset: int) -> None:
        """Add one."""
        self._fresh.append(offset)
        if len(self._fresh) >= _SORTED_AT_ONCE:
            self._sort()

    def _sort(self) -> None:
        arrays, self._fresh = [*self._sorted, np.sort(np.array(self._fresh, np.int64))], array("q")
        while len(arrays) > 1 and len(arrays[-2]) < 2 * len(arrays[-1]):
            # Two runs, which a stable sort merges.
            arrays[-2:] = [np.sort(np.concatenate(arrays[-2:]), kind="stable")]
        self._sorted = arrays

    def has(self, offsets: NDArray[np.int64]) -> Mask:
        """Which of some are there."""
        if self._fresh:
            self._sort()
        found = np.zeros(len(offsets), bool)
        for each in self._sorted:
            found |= is_among(offsets, each)
        return found


class CatchUp:
    """Searches, one at a time. `read_cold` has a thread read what is not in memory; None: the search itself waits."""

    def __init__(self, store: MessageStore, slots: Slots, read_cold: ReadCold | None) -> None:
        self._store = store
        self._slots = slots
        self._read_cold = read_cold
        self._asked: dict[str, _Hold] = {}
        """Topics whose overdue messages are to be looked at, or are."""
        self._search: _Search | None = None
        self._is_stale = False
        """Whether it has to be done once more."""
        self._results: dict[str, _Result] = {}
        self._is_reading = False
        self._on_read: Callable[[], None] = lambda: None

    # --- what comes due

    def judge(self, topic: str, waits: Waits, now_ms: int) -> Verdict | None:
        """What becomes of messages of a topic that are due; None where all of them are delivered."""
        result, due = self._results.get(topic), waits["due"]
        none = np.zeros(len(waits), bool)
        current = self._slots.second
        if result is not None and current < result.second:
            return Verdict(none, ~none, result.second)
        is_overdue = now_ms - due > OVERDUE_MS
        if result is not None:
            is_overdue &= due > result.second * PRECISION_MS
        if topic not in self._asked and is_overdue.any():
            self._asked[topic] = _Hold(now_ms)
        hold = self._asked.get(topic)
        if hold is None:
            dropped = (due <= result.horizon_ms) & result.older.has(waits["physical"]) if result is not None else none
            return Verdict(dropped, none, 0) if dropped.any() else None
        if current >= hold.second:
            first, last = (max(now_ms // PRECISION_MS, current) + seconds for seconds in (_FIRST_HOLD, _MAX_HOLD))
            # As far ahead as something may have been put off before a crash, or than the search has taken so far.
            wanted = max(first, self._slots.held_to + 1, first + (now_ms - hold.since_ms) // PRECISION_MS)
            hold.second = min(wanted, last)
        return Verdict(none, ~none, hold.second)

    def repeated(self, old: int, new: int) -> None:
        """A message was appended once more, at another physical offset."""
        self._is_stale = True
        for older in {id(result.older): result.older for result in self._results.values()}.values():
            if older.has(np.array([old]))[0]:
                older.add(new)

    def forget(self, topic: str) -> None:
        """A topic asks for it no more."""
        self._results.pop(topic, None)

    # --- the search

    def step(self, now_ms: int, on_read: Callable[[], None]) -> bool:
        """Do a bit of the search; whether there was anything to do. `on_read` is called when a thread has read what it
        waits for. Raises OSError: then it is where it was."""
        if self._is_reading or not self._asked or not self._slots.is_replayed:
            return False
        self._on_read = on_read
        if self._search is None:
            self._is_stale = False
            self._search = _Search(self._store, self._slots, list(self._asked), now_ms - OVERDUE_MS)
            self._slots.begin_pass(self._search)
        wanted = self._search.wants() if self._read_cold is not None else None
        if wanted is not None:
            assert self._read_cold is not None
            self._is_reading = True
            self._read_cold(ColdRead(self._store.log, wanted), self._was_read)
        elif not self._search.step():
            search, self._search = self._search, None
            self._slots.end_pass(search)
            if not self._is_stale:
                self._take(search)
        return True

    def _take(self, search: _Search) -> None:
        """Go by what a search found."""
        newest = search.newest
        for topic in search.names:
            hold = self._asked.pop(topic)
            self._results[topic] = _Result(search.horizon_ms, hold.second, newest.older)
        log.info("overdue_messages_looked_at", messages=newest.looked, keys=newest.keys, older=len(newest.older))
        if newest.beyond:
            log.warning("overdue_messages_beyond", delivered=newest.beyond, max_keys=MAX_KEYS, max_older=MAX_OLDER)

    @property
    def is_busy(self) -> bool:
        """Whether `step` has something to do."""
        return bool(self._asked) and not self._is_reading and self._slots.is_replayed

    def _was_read(self) -> None:
        self._is_reading = False
        self._on_read()


class _Search:
    """One search. It is where it was when something cannot be read, and tries that again."""

    def __init__(self, store: MessageStore, slots: Slots, topics: list[str], horizon_ms: int) -> None:
        """`topics`: whose messages that were due until `horizon_ms` are looked at. Those of others whose names have the
        same hash are, too, which does no harm: keys are of one topic each."""
        self._store = store
        self._slots = slots
        self.names = topics
        self.topics: NDArray[np.int32] = np.array(list(map(properties.java_hash, topics)), np.int32)
        self.horizon_ms = horizon_ms
        self.newest = _Newest()
        self._position, self._end = slots.log.begin, slots.log.end
        """It has looked at the units before one position of those before another."""
        self._passed: list[Waits] = []
        """Messages that got other slots before it came to their units."""
        self._part: Waits | None = None
        """Messages whose records it is looking at, by physical offset."""
        self._is_warm = False
        """Whether a thread has read the first of those."""

    def passing(self, waits: Waits) -> None:
        """See `timers.slots.Pass`."""
        position = waits["position"]
        mine = (position >= self._position) & (position < self._end) & np.isin(waits["hash"], self.topics)
        if mine.any():
            self._passed.append(waits[mine])

    def wants(self) -> list[Range] | None:
        """What a thread has to read from the disk before the next step; asked for once, it is taken to be read."""
        if self._part is None or not len(self._part) or self._is_warm:
            return None
        ranges: list[Range] = self._first()[["physical", "size"]].tolist()
        if self._store.is_cached(ranges):
            return None
        self._is_warm = True
        return ranges

    def step(self) -> bool:
        """Do a part; whether there was one. Raises OSError."""
        if self._part is None or not len(self._part):
            return self._next_part()
        first = self._first()
        texts = list(self._texts(first))
        for due_ms, physical, text in texts:
            if due_ms <= self.horizon_ms:
                self.newest.take(text, due_ms, physical)
        self._part, self._is_warm = self._part[len(first) :], False
        return True

    def _next_part(self) -> bool:
        found = self._slots.search.look_on(self._position, _SCAN_UNITS, self._end)
        if found is not None:
            waits, _, self._position = found
        elif self._passed:
            waits = self._passed.pop()
        else:
            return False
        mine = waits[np.isin(waits["hash"], self.topics) & ~waits["held"] & (waits["due"] <= self.horizon_ms)]
        self._part = mine[np.argsort(mine["physical"], kind="stable")]
        return True

    def _first(self) -> Waits:
        """The first messages, so many as are looked at in one piece."""
        assert self._part is not None
        count = max(1, int(np.searchsorted(np.cumsum(self._part["size"][:_LOOK_UNITS]), _LOOK_BYTES, "right")))
        return self._part[:count]

    def _texts(self, waits: Waits) -> Iterator[tuple[int, int, str]]:
        """Deliver time, physical offset and properties of messages."""
        physical, sizes = waits["physical"], waits["size"].astype(np.int64)
        data = b"".join(self._store.log.read(*each) or b"" for each in waits[["physical", "size"]].tolist())
        records = Records(data, physical, sizes) if len(data) == int(sizes.sum()) else None
        texts = records.properties() if records is not None and records.is_usual.all() else None
        for at, (offset, size, due_ms) in enumerate(waits[["physical", "size", "due"]].tolist()):
            if texts is not None and due_ms:
                yield due_ms, offset, texts[at].decode(errors="replace")
                continue
            message = self._store.message_at(offset, size)
            if message is not None:
                yield due_ms or due_of(message) or 0, offset, message.properties_text


class _Newest:
    """The newest message of each key so far, and those that are not."""

    def __init__(self) -> None:
        self.older = Offsets()
        self.looked = self.keys = self.beyond = 0
        self._tables: list[dict[bytes, int]] = [{} for _ in range(256)]
        """By the first byte of the hash, so that none gets large: the deliver time, and in the lower bits the physical
        offset."""

    def take(self, text: str, due_ms: int, physical: int) -> None:
        """Take a message; one without a key, or that has waited for a delay level, is nobody's older or newer one."""
        self.looked += 1
        keys = properties.get(text, properties.KEYS)
        if not keys or properties.get(text, properties.TIMER_FROM_LEVEL) is not None:
            return
        topic = properties.get(text, properties.REAL_TOPIC)
        digest = blake2b(f"{topic}\0{keys}".encode(errors="replace"), digest_size=16).digest()
        table, place = self._tables[digest[0]], due_ms << _PLACE_BITS | physical
        before = table.get(digest)
        if before == place:
            return
        if before is None and self.keys >= MAX_KEYS:
            self.beyond += 1
            return
        if before is None:
            self.keys += 1
            table[digest] = place
            return
        if len(self.older) >= MAX_OLDER:
            self.beyond += 1
            table[digest] = max(before, place)
            return
        self.older.add(min(before, place) & (1 << _PLACE_BITS) - 1)
        table[digest] = max(before, place)
