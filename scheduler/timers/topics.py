"""The topics of messages with a timer. They are known by Java's hashes of their names, as units have them: the number
of waiting messages of each topic, and the topics of messages that are staged but not in the wheel yet."""

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

    from duemq.scheduler.timers.seconds.second import Waits


class TimerTopics:
    """Names and hashes of topics, and numbers of waiting messages."""

    def __init__(self, topics_of: Callable[[Waits], list[str]]) -> None:
        """Begin without topics. `topics_of`: reads the real topics of messages from their records."""
        self._topics_of = topics_of
        self._names: dict[int, list[str]] = {}
        """The names of topics by hash; a hash nearly always has only one."""
        self._shared: dict[int, Counter[str]] = {}
        """For each hash of several names, the number of waiting messages by topic."""
        self._hashes: dict[str, int] = {}
        self._staged = array("i")
        """Topic hashes of messages that are staged and not in the wheel yet, one for each queue offset from
        `_staged_from` on."""
        self._staged_from = 0
        """The queue offset of the first message in `_staged`."""
        self._staged_keys: dict[int, int] = {}
        """The hash of the key, by queue offset, for messages in `_staged` that are replaced by key. May be 0 for other
        messages."""
        self._staged_again: set[int] = set()
        """Queue offsets of messages in `_staged` that were appended again."""
        self._waiting: Counter[int] = Counter()
        """Number of waiting messages by hash."""

    def load(self, names: Mapping[str, int], waiting: Mapping[int, int]) -> None:
        """Begin with the state of a checkpoint: the number of waiting messages by topic name, and by hash."""
        self._waiting = Counter(waiting)
        for name in names:
            self.hash_of(name)
        for key, counts in self._shared.items():
            counts.clear()
            counts.update({name: names[name] for name in self._names[key]})
            # After a crash, the names may be of another checkpoint than the numbers by hash.
            most = max(counts, key=lambda name: counts[name])
            counts[most] += self._waiting[key] - counts.total()

    def hash_of(self, topic: str) -> int:
        """Return the hash of a topic, and remember its name."""
        found = self._hashes.get(topic)
        if found is None:
            found = self._hashes[topic] = properties.java_hash(topic)
            names = self._names.setdefault(found, [])
            names.append(topic)
            if len(names) == 2:
                self._shared[found] = Counter({names[0]: self._waiting[found]})
        return found

    def is_alone(self, topic: str) -> bool:
        """Whether this topic is known, and no other known topic has the same hash."""
        return self._names.get(properties.java_hash(topic), []) == [topic]

    def is_shared(self, topic_hash: int) -> bool:
        """Whether messages with this hash may belong to more than one topic. True for an unknown hash."""
        return len(self._names.get(topic_hash, ())) != 1

    # --- staged messages

    def staged(self, queue_offset: int, topic: str, key: int = 0, *, is_again: bool = False) -> None:
        """Note that a message for a topic was staged at a queue offset. `key`: the hash of its key
        (`timers.seconds.second.WAIT`), 0 without one; `is_again`: whether it was appended again."""
        topic_hash = self._hashes.get(topic)
        if topic_hash is None:
            topic_hash = self.hash_of(topic)
        at = queue_offset - self._staged_from
        if at == len(self._staged):
            self._staged.append(topic_hash)
        elif 0 <= at < len(self._staged):  # messages staged earlier from this offset on were not written
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
        """Return the topic hashes of messages from a queue offset on; None if some were not staged since the start."""
        at = queue_offset - self._staged_from
        if at < 0 or at + count > len(self._staged):
            return None
        return np.array(self._staged[at : at + count], np.int32)

    def keys(self, queue_offset: int, count: int) -> NDArray[np.int32] | None:
        """Return the hashes of keys of messages from a queue offset on, 0 for a message without one; None if no staged
        message has a key."""
        if not self._staged_keys:
            return None
        return np.fromiter((self._staged_keys.get(queue_offset + at, 0) for at in range(count)), np.int32, count)

    def again(self, queue_offset: int, count: int) -> NDArray[np.bool_] | bool:
        """Return, for messages from a queue offset on, whether each was appended again; False if no staged message
        was."""
        if not self._staged_again:
            return False
        return np.fromiter((queue_offset + at in self._staged_again for at in range(count)), bool, count)

    def drop_staged(self, queue_offset: int) -> None:
        """Forget staged messages before a queue offset, which are in the wheel."""
        done = queue_offset - self._staged_from
        if done > 0:
            del self._staged[:done]
            self._staged_from = queue_offset
            if self._staged_keys:
                self._staged_keys = {at: key for at, key in self._staged_keys.items() if at >= queue_offset}
            if self._staged_again:
                self._staged_again = {at for at in self._staged_again if at >= queue_offset}

    # --- waiting messages

    def count(self, waits: Waits, sign: int) -> None:
        """Add (`sign` 1) or subtract (-1) waiting messages. Never fails: this is called after units or records were
        written, and an error would make the caller write them again."""
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
            # These numbers are only for operators: messages whose records are not in memory, or cannot be read, are
            # left out.
            with contextlib.suppress(OSError, StoreError):
                for topic in self._topics_of(ours):
                    counts[topic] += sign
            if not self._waiting[key]:
                counts.clear()

    @property
    def total(self) -> int:
        """Number of all waiting messages."""
        return sum(self._waiting.values())

    def waiting(self) -> dict[int, int]:
        """Return the number of waiting messages by topic hash."""
        return {key: count for key, count in self._waiting.items() if count}

    def metrics(self) -> dict[str, int]:
        """Return the number of waiting messages by topic, without topics that have none. For topics that share a hash,
        the numbers are estimates if some records were not in memory when they were needed."""
        return {topic: count for topic, count in self.numbers().items() if count}

    def numbers(self) -> dict[str, int]:
        """Return the numbers of `metrics`, but including those with 0 for topics that share their hash with a topic of
        waiting messages: the next start needs their names."""
        counts: dict[str, int] = {}
        for key, count in self._waiting.items():
            if count <= 0:
                continue
            if key in self._shared:
                counts.update({name: max(0, self._shared[key][name]) for name in self._names[key]})
            else:
                counts[self._names.get(key, [f"#{key}"])[0]] = count
        return counts
