"""Checks that records and the units of their consume queues agree: both store some fields that no checksum covers.

    field of a record                  in its unit, in consumequeue/<topic>/<queue id>/
    topic, queue id, queue offset      directory and queue offset of the unit
    physical offset                    physical offset
    TAGS                               hash of the tags (of a waiting message the deliver time, which is not compared)

If a record's unit lies elsewhere, one of the first three fields is wrong, or the queue is. A record without a unit is
not reported: its queue's files may have expired, or its topic may have been deleted and created again since.
"""

from __future__ import annotations

from bisect import bisect_left
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from duemq.protocol.records import properties
from duemq.protocol.topics import SCHEDULE_TOPIC, TIMER_TOPIC
from duemq.storage.log.copies import UNITS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from duemq.spark_jobs.columns.records import Records
    from duemq.spark_jobs.store.store_files import StoreFiles

    Integers = NDArray[np.int64]

_GAP: Final = 1024
"""Largest gap in queue offsets, in units, that is read along with the units around it, to save another read."""
_MAX_SEARCHED: Final = 100
"""Most records that are searched for in the queues of all topics. If there are more, they usually belong to a deleted
topic."""
_LEAST_HASH: Final = -(1 << 31)
"""The least hash: lower tags codes are addresses in RocketMQ's extended queues."""
_DUE: Final = frozenset((SCHEDULE_TOPIC, TIMER_TOPIC))
_ALSO_IN: Final = "%LMQ%"
"""Prefix of queues that list records of other topics (RocketMQ 5's light message queues)."""


class _File(NamedTuple):
    """A file of a consume queue: its first `units` units are in use, with physical offsets from `first` to `last`."""

    topic: str
    queue_id: int
    first_unit: int
    path: str
    units: int
    first: int
    last: int


class Agreement:
    """Compares records with the consume queues of their store, one part of the commitlog after the other."""

    def __init__(self, store: StoreFiles) -> None:
        self._store = store
        self._searched = 0

    def wrong(self, records: Records) -> dict[int, str]:
        """Return the reasons why records disagree with their queues, by index. Reads about as many units as there are
        records. Raises OSError."""
        codes, names = records.topics()
        physical, tags_codes = self._listed(records, codes, names)
        is_listed = physical == records.physical_offset
        has_hash = np.array([name not in _DUE for name in names], np.bool_)[codes]
        wrong = _other_tags(records, np.flatnonzero(is_listed & has_hash), tags_codes)
        for row in np.flatnonzero(~is_listed).tolist():
            topic, queue_id, offset = names[codes[row]], int(records.queue_id[row]), int(records.queue_offset[row])
            unit = self._unit_that_lists(int(records.physical_offset[row]), topic)
            if unit is not None:
                wrong[row] = f"says that it is {topic}/{queue_id}/{offset}, but the queue that lists it says {unit}"
        return wrong

    def _listed(self, records: Records, codes: NDArray[np.int32], names: list[str]) -> tuple[Integers, Integers]:
        """Return the contents of the units that records name: physical offsets, -1 where there is no unit, and tags
        codes."""
        physical, tags_codes = np.full(len(records), -1, np.int64), np.zeros(len(records), np.int64)
        queue_id, offset = records.queue_id, records.queue_offset
        order = np.lexsort((offset, queue_id, codes))
        if not len(order):
            return physical, tags_codes
        is_next = (np.diff(codes[order]) != 0) | (np.diff(queue_id[order]) != 0) | (np.diff(offset[order]) > _GAP)
        for rows in np.split(order, np.flatnonzero(is_next) + 1):
            first, last = int(offset[rows[0]]), int(offset[rows[-1]])
            if first < 0 or queue_id[rows[0]] < 0:
                continue
            units = self._store.units_at(names[codes[rows[0]]], int(queue_id[rows[0]]), first, last - first + 1)
            found = units[offset[rows] - first]
            physical[rows] = np.where(found["size"] != 0, found["physical_offset"], -1)
            tags_codes[rows] = found["tags_code"]
        return physical, tags_codes

    def _unit_that_lists(self, physical_offset: int, topic: str) -> str | None:
        """Return the unit that points to a record, as <topic>/<queue id>/<queue offset>; None without
        one."""
        self._searched += 1
        files = self._files if self._searched <= _MAX_SEARCHED else {topic: self._files.get(topic, [])}
        for file in chain.from_iterable(files.values()):
            if file.first <= physical_offset <= file.last:
                at = bisect_left(range(file.units), physical_offset, key=lambda at: self._unit(file.path, at)[0])
                if at < file.units and self._unit(file.path, at)[0] == physical_offset:
                    return f"{file.topic}/{file.queue_id}/{file.first_unit + at}"
        return None

    @cached_property
    def _files(self) -> dict[str, list[_File]]:
        """The files of consume queues by topic."""
        found: dict[str, list[_File]] = {}
        for file in self._bounds():
            found.setdefault(file.topic, []).append(file)
        return found

    def _bounds(self) -> Iterator[_File]:
        for file in self._store.queue_files():
            if file.topic.startswith(_ALSO_IN):
                continue
            room = file.size // UNITS.itemsize
            units = bisect_left(range(room), True, key=lambda at: not self._unit(file.path, at)[1])
            if units:
                first, last = self._unit(file.path, 0)[0], self._unit(file.path, units - 1)[0]
                yield _File(file.topic, file.queue_id, file.first_unit, file.path, units, first, last)

    def _unit(self, path: str, at: int) -> tuple[int, int]:
        """Return the physical offset and the size in a unit; zeros behind the end of the file."""
        data = self._store.read(path, at * UNITS.itemsize, UNITS.itemsize)
        if len(data) < UNITS.itemsize:
            return 0, 0
        found = np.frombuffer(data, UNITS)[0]
        return int(found["physical_offset"]), int(found["size"])


def _other_tags(records: Records, rows: Integers, tags_codes: Integers) -> dict[int, str]:
    """Return the records whose tags do not have the hash that their units state, as reasons by index."""
    told = records.take(rows).property_strings("TAGS").dictionary_encode()
    codes = np.array([properties.tags_code(tags) for tags in told.dictionary.to_pylist()] + [0], np.int64)
    of_record = codes[told.indices.fill_null(len(codes) - 1).to_numpy(zero_copy_only=False)]
    listed = tags_codes[rows]
    wrong = rows[(of_record != listed) & (listed >= _LEAST_HASH)]
    return dict.fromkeys(wrong.tolist(), "has other tags than its consume queue")
