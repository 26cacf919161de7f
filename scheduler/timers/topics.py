"""The topics of messages with a timer, by Java's hashes of their names, which is what units have: who waits for which,
and of what topic the messages are that are staged but not in the wheel yet."""

from __future__ import annotations

import contextlib
from array import array
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from duemq.protocol.records import properties
from duemq.scheduler.timers.index.sorted_offsets import distinct_of
from duemq.storage.errors import StoreError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from duemq.scheduler.timers.second import Waits


class TimerTopics:
    """Names, hashes, and numbers of messages."""

    def __init__(self, topics_of: Callable[[Waits], list[str]]) -> None:
        """`topics_of` reads for which topics messages are."""
        self._topics_of = topics_of
        self._names: dict[int, list[str]] = {}
        """Mostly one."""
        self._shared: dict[int, Counter[str]] = {}
        """Of hashes that several names have: how many messages wait, by topic."""
        self._hashes: dict[str, int] = {}
        self._staged = array("i")
        self._staged_from = 0
        """Topic hashes of messages that are staged, or not in the wheel yet, from this queue offset on."""
        self._staged_keys: dict[int, int] = {}
        """The hashes of their keys, of those that are to be replaced by key, by queue offset."""
        self._staged_again: set[int] = set()
        """Queue offsets of those of them that were appended again."""
        self._waiting: Counter[int] = Counter()

    def load(self, names: Mapping[str, int], waiting: Mapping[int, int]) -> None:
        """What a checkpoint knows: names, with the number of messages of each, and how many wait by hash."""
        self._waiting = Counter(waiting)
        for name in names:
            self.hash_of(name)
        for key, counts in self._shared.items():
            counts.clear()
            counts.update({name: names[name] for name in self._names[key]})
            # A crash may have left names of another checkpoint than the numbers.
            most = max(counts, key=lambda name: counts[name])
            counts[most] += self._waiting[key] - counts.total()

    def hash_of(self, topic: str) -> int:
        """The hash of a topic, whose name is known from now on."""
        found = self._hashes.get(topic)
        if found is None:
            found = self._hashes[topic] = properties.java_hash(topic)
            names = self._names.setdefault(found, [])
            names.append(topic)
            if len(names) == 2:
                self._shared[found] = Counter({names[0]: self._waiting[found]})
        return found

    def is_alone(self, topic: str) -> bool:
        """Whether no other topic that is known has the hash of this one."""
        return self._names.get(properties.java_hash(topic), []) == [topic]

    def is_shared(self, topic_hash: int) -> bool:
        """Whether messages with a hash may be of more than one topic."""
        return len(self._names.get(topic_hash, ())) != 1

    # --- what is staged

    def staged(self, queue_offset: int, topic: str, key: int = 0, *, is_again: bool = False) -> None:
        """A message for a topic was staged at a queue offset; `key` as units have it (`timers.second.WAIT`),
        `is_again`: it was appended again."""
        topic_hash = self._hashes.get(topic)
        if topic_hash is None:
            topic_hash = self.hash_of(topic)
        at = queue_offset - self._staged_from
        if at == len(self._staged):
            self._staged.append(topic_hash)
        elif 0 <= at < len(self._staged):  # what was staged there was not written
            del self._staged[at:]
            self._staged.append(topic_hash)
        else:
            self._staged_from, self._staged = queue_offset, array("i", [topic_hash])
        if key or self._staged_keys:
            self._staged_keys[queue_offset] = key
        if is_again:
            self._staged_again.add(queue_offset)
        elif self._staged_again:
            self._staged_again.discard(queue_offset)

    def hashes(self, queue_offset: int, count: int) -> NDArray[np.int32] | None:
        """The topic hashes of messages from a queue offset on; None where they were not staged since the start."""
        at = queue_offset - self._staged_from
        if at < 0 or at + count > len(self._staged):
            return None
        return np.array(self._staged[at : at + count], np.int32)

    def keys(self, queue_offset: int, count: int) -> NDArray[np.int32] | None:
        """As `hashes`, of their keys; None where none of them has one."""
        if not self._staged_keys:
            return None
        return np.fromiter((self._staged_keys.get(queue_offset + at, 0) for at in range(count)), np.int32, count)

    def again(self, queue_offset: int, count: int) -> NDArray[np.bool_] | bool:
        """As `hashes`, of each whether it was appended again; False where none of them was."""
        if not self._staged_again:
            return False
        return np.fromiter((queue_offset + at in self._staged_again for at in range(count)), bool, count)

    def drop_staged(self, queue_offset: int) -> None:
        """What is before a queue offset is in the wheel."""
        done = queue_offset - self._staged_from
        if done > 0:
            del self._staged[:done]
            self._staged_from = queue_offset
            if self._staged_keys:
                self._staged_keys = {at: key for at, key in self._staged_keys.items() if at >= queue_offset}
            if self._staged_again:
                self._staged_again = {at for at in self._staged_again if at >= queue_offset}

    # --- what waits

    def count(self, waits: Waits, sign: int) -> None:
        """Messages came to wait (1), or wait no more (-1). Never fails: it is called after their units or records were
        written, and whoever wrote them would write them again."""
        if not len(waits):
            return
        hashes = waits["hash"]
        if (hashes == hashes[0]).all():
            self._waiting[int(hashes[0])] += sign * len(waits)
        else:
            keys, _, counts_of = distinct_of(hashes)
            for key, count in zip(keys.tolist(), counts_of.tolist(), strict=True):
                self._waiting[key] += sign * count
        for key, counts in self._shared.items():
            ours = waits[hashes == key]
            if not len(ours):
                continue
            # They are for operators only: of records that are not in memory, or cannot be read, they know nothing.
            with contextlib.suppress(OSError, StoreError):
                for topic in self._topics_of(ours):
                    counts[topic] += sign
            if not self._waiting[key]:
                counts.clear()

    @property
    def total(self) -> int:
        """All messages that wait."""
        return sum(self._waiting.values())

    def waiting(self) -> dict[int, int]:
        """How many wait, by topic hash."""
        return {key: count for key, count in self._waiting.items() if count}

    def metrics(self) -> dict[str, int]:
        """How many wait, by topic, of topics for which any wait. Of topics whose hash others have too the numbers are
        estimates where records could not be read at once."""
        return {topic: count for topic, count in self.numbers().items() if count}

    def numbers(self) -> dict[str, int]:
        """As `metrics`, with all topics that have the hash of waiting messages: the next start has to know their
        names."""
        counts: dict[str, int] = {}
        for key, count in self._waiting.items():
            if count <= 0:
                continue
            if key in self._shared:
                counts.update({name: max(0, self._shared[key][name]) for name in self._names[key]})
            else:
                counts[self._names.get(key, [f"#{key}"])[0]] = count
        return counts
