"""The policy `timer.catch.up=newest`: only the newest of the overdue messages of each key is delivered (see
`timers.policy.policies`).

The first overdue message of a topic with this policy begins a search: the timer log tells which messages of the topic
are overdue, their records have the keys, and for each key the message with the latest deliver time is kept, or the one
that was stored last if two have the same time. In the meantime the messages of the topic are put off: they get other
slots, with their present deliver times. So a crash leaves them as they were, and the search starts over. Other topics
are not affected.

All messages are put off to the same slot, or to a later slot if the search takes longer. The result is applied when
that slot has its turn: then the messages are in the order of their deliver times, so that no message is delivered
before the older messages with its key are cancelled, even if there is a crash.

The search is done in slices. It keeps a hash of 128 bits for each key, and the physical offset of each message that is
not to be delivered: at most `MAX_KEYS` keys and `MAX_OLDER` messages, some 150 MB. Messages beyond that are delivered,
and a log line says so.
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
from duemq.scheduler.timers.deliver_times import due_of
from duemq.scheduler.timers.index.sorted_offsets import is_among
from duemq.scheduler.timers.seconds.slots import Slots
from duemq.storage.log.copies import PackedRecords
from duemq.storage.queues.pull import ColdRead, Range, ReadCold
from duemq.storage.store import MessageStore

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from duemq.scheduler.timers.seconds.second import Waits

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
"""Most seconds for which messages are put off at a time; the first time they are put off for _FIRST_HOLD seconds."""
_OFFSET_BITS: Final = 63


class CatchUpDecision(NamedTuple):
    """A decision on some due messages of a topic: which are dropped, and which are put off; the others are
    delivered."""

    dropped: Mask
    """Mask of the messages that are dropped."""
    held: Mask
    """Mask of the messages that are put off."""
    second: int
    """The second to whose slot they are put off."""


class _Hold:
    """A hold on the messages of a topic: the time since which they have been put off (ms since the epoch), and the
    second to whose slot they are put off."""

    def __init__(self, since_ms: int) -> None:
        self.since_ms = since_ms
        self.second = -1


class _Result(NamedTuple):
    """The result of a search for one topic."""

    horizon_ms: int
    """Time, ms since the epoch: the search looked at the messages that were due until then."""
    second: int
    """The second to whose slot messages were put off. Messages that are due before it start no further search."""
    older: Offsets
    """The records of messages that are not the newest with their key."""


class Offsets:
    """A set of physical offsets, 8 bytes each: sorted arrays, each at least twice as long as the next one."""

    def __init__(self) -> None:
        self._sorted: list[NDArray[np.int64]] = []
        self._unsorted = array("q")

    def __len__(self) -> int:
        return sum(map(len, self._sorted)) + len(self._unsorted)

    def add(self, offset: int) -> None:
        """Add an offset."""
        self._unsorted.append(offset)
        if len(self._unsorted) >= _SORTED_AT_ONCE:
            self._sort()

    def _sort(self) -> None:
        arrays, self._unsorted = [*self._sorted, np.sort(np.array(self._unsorted, np.int64))], array("q")
        while len(arrays) > 1 and len(arrays[-2]) < 2 * len(arrays[-1]):
            # A stable sort merges the two sorted parts.
            arrays[-2:] = [np.sort(np.concatenate(arrays[-2:]), kind="stable")]
        self._sorted = arrays

    def has(self, offsets: NDArray[np.int64]) -> Mask:
        """Whether each offset is in the set."""
        if self._unsorted:
            self._sort()
        found = np.zeros(len(offsets), bool)
        for each in self._sorted:
            found |= is_among(offsets, each)
        return found


class CatchUp:
    """Makes the searches, one at a time, and applies their results. `read_cold`: has a thread read records that are not
    in memory; if it is None, the search itself waits for the disk. `on_read`: called when the thread has read the
    records for which the search waits."""

    def __init__(
        self, store: MessageStore, slots: Slots, read_cold: ReadCold | None, on_read: Callable[[], None]
    ) -> None:
        self._store = store
        self._slots = slots
        self._read_cold = read_cold
        self._asked: dict[str, _Hold] = {}
        """Topics with a search requested or in progress."""
        self._search: _Search | None = None
        self._is_stale = False
        """Whether the search in progress has to be repeated."""
        self._results: dict[str, _Result] = {}
        self._is_reading = False
        self._on_read = on_read

    # --- due messages

    def judge(self, topic: str, waits: Waits, now_ms: int) -> CatchUpDecision | None:
        """Decide which due messages of a topic are dropped or put off; None if all of them are to be delivered."""
        result, due = self._results.get(topic), waits["due"]
        none = np.zeros(len(waits), bool)
        current = self._slots.turns.second
        if result is not None and current < result.second:
            return CatchUpDecision(none, ~none, result.second)
        is_overdue = now_ms - due > OVERDUE_MS
        if result is not None:
            is_overdue &= due > result.second * PRECISION_MS
        if topic not in self._asked and is_overdue.any():
            self._asked[topic] = _Hold(now_ms)
        hold = self._asked.get(topic)
        if hold is None:
            dropped = (due <= result.horizon_ms) & result.older.has(waits["physical"]) if result is not None else none
            return CatchUpDecision(dropped, none, 0) if dropped.any() else None
        if current >= hold.second:
            first, last = (max(now_ms // PRECISION_MS, current) + seconds for seconds in (_FIRST_HOLD, _MAX_HOLD))
            # The slot lies behind all slots to which messages may have been put off before a crash, and at least as far
            # ahead as the search has already taken.
            wanted = max(first, self._slots.policy_end + 1, first + (now_ms - hold.since_ms) // PRECISION_MS)
            hold.second = min(wanted, last)
        return CatchUpDecision(none, ~none, hold.second)

    def repeated(self, old: int, new: int) -> None:
        """Note that a message was appended again. `old`, `new`: physical offsets of its former and its new record."""
        self._is_stale = True
        for older in {id(result.older): result.older for result in self._results.values()}.values():
            if older.has(np.array([old]))[0]:
                older.add(new)

    def forget(self, topic: str) -> None:
        """Forget the result for a topic that no longer has this policy."""
        self._results.pop(topic, None)

    # --- the search

    def step(self, now_ms: int) -> bool:
        """Do a part of the search. Return whether there was anything to do. Raises OSError; then that part is not
        done."""
        if self._is_reading or not self._asked or not self._slots.findings.is_replayed:
            return False
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
        """Keep the result of a search, for `judge`."""
        newest = search.newest
        for topic in search.names:
            hold = self._asked.pop(topic)
            self._results[topic] = _Result(search.horizon_ms, hold.second, newest.older)
        log.info("overdue_messages_looked_at", messages=newest.looked, keys=newest.keys, older=len(newest.older))
        if newest.beyond:
            log.warning("overdue_messages_beyond", delivered=newest.beyond, max_keys=MAX_KEYS, max_older=MAX_OLDER)

    @property
    def is_busy(self) -> bool:
        """Whether `step` has work."""
        return bool(self._asked) and not self._is_reading and self._slots.findings.is_replayed

    def _was_read(self) -> None:
        self._is_reading = False
        self._on_read()


class _Search:
    """One search, which is done in parts. A part that cannot be read is tried again."""

    def __init__(self, store: MessageStore, slots: Slots, topics: list[str], horizon_ms: int) -> None:
        """Begin a search. `topics`: the topics whose messages are looked at if they are due until `horizon_ms`, ms
        since the epoch. Messages of other topics with the same hash are looked at, too. That does no harm, since keys
        are distinguished by topic."""
        self._store = store
        self._slots = slots
        self.names = topics
        self.topics: NDArray[np.int32] = np.array(list(map(properties.java_hash, topics)), np.int32)
        self.horizon_ms = horizon_ms
        self.newest = _Newest()
        self._position, self._end = slots.log.begin, slots.log.end
        """Positions in the timer log: that of the next unit to look at, and the one behind the last unit to look at."""
        self._passed: list[Waits] = []
        """Messages that got other slots before the search came to their units."""
        self._part: Waits | None = None
        """Messages whose records are looked at next, in the order of their physical offsets."""
        self._is_warm = False
        """Whether a thread has read the first of these records."""

    def passing(self, waits: Waits) -> None:
        """Note that messages are about to move to other slots, so that the search will not find them by their present
        units."""
        position = waits["position"]
        mine = (position >= self._position) & (position < self._end) & np.isin(waits["hash"], self.topics)
        if mine.any():
            self._passed.append(waits[mine])

    def wants(self) -> list[Range] | None:
        """Return the records that a thread must read from the disk before the next step; None if there are none. Once
        they have been returned, they count as read."""
        if self._part is None or not len(self._part) or self._is_warm:
            return None
        ranges: list[Range] = self._first()[["physical", "size"]].tolist()
        if self._store.is_cached(ranges):
            return None
        self._is_warm = True
        return ranges

    def step(self) -> bool:
        """Do a part of the search. Return whether there was one left. Raises OSError."""
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
        """Return the first messages of the part: as many as are looked at in one go."""
        assert self._part is not None
        count = max(1, int(np.searchsorted(np.cumsum(self._part["size"][:_LOOK_UNITS]), _LOOK_BYTES, "right")))
        return self._part[:count]

    def _texts(self, waits: Waits) -> Iterator[tuple[int, int, str]]:
        """Iterate over deliver time (ms since the epoch), physical offset and properties of messages. Raises
        OSError."""
        physical, sizes = waits["physical"], waits["size"].astype(np.int64)
        data = b"".join(self._store.log.read(*each) or b"" for each in waits[["physical", "size"]].tolist())
        records = PackedRecords(data, physical, sizes) if len(data) == int(sizes.sum()) else None
        texts = records.properties() if records is not None and records.is_usual.all() else None
        for at, (offset, size, due_ms) in enumerate(waits[["physical", "size", "due"]].tolist()):
            if texts is not None and due_ms:
                yield due_ms, offset, texts[at].decode(errors="replace")
                continue
            message = self._store.message_at(offset, size)
            if message is not None:
                yield due_ms or due_of(message) or 0, offset, message.properties_text


class _Newest:
    """The newest message with each key so far, and the older messages."""

    def __init__(self) -> None:
        self.older = Offsets()
        self.looked = self.keys = self.beyond = 0
        self._tables: list[dict[bytes, int]] = [{} for _ in range(256)]
        """Deliver time, and physical offset in the lower 63 bits, of the newest message, by the hash of the key. There
        is one table for each first byte of the hash, so that no table gets large."""

    def take(self, text: str, due_ms: int, physical: int) -> None:
        """Compare a message with the newest one with its key. Messages without a key are left out, and so are messages
        that wait for the time of a delay level (TIMER_FROM_LEVEL)."""
        self.looked += 1
        keys = properties.get(text, properties.KEYS)
        if not keys or properties.get(text, properties.TIMER_FROM_LEVEL) is not None:
            return
        topic = properties.get(text, properties.REAL_TOPIC)
        digest = blake2b(f"{topic}\0{keys}".encode(errors="replace"), digest_size=16).digest()
        table, packed = self._tables[digest[0]], due_ms << _OFFSET_BITS | physical
        before = table.get(digest)
        if before == packed:
            return
        if before is None and self.keys >= MAX_KEYS:
            self.beyond += 1
            return
        if before is None:
            self.keys += 1
            table[digest] = packed
            return
        if len(self.older) >= MAX_OLDER:
            self.beyond += 1
            table[digest] = max(before, packed)
            return
        self.older.add(min(before, packed) & (1 << _OFFSET_BITS) - 1)
        table[digest] = max(before, packed)
