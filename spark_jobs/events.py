"""What happens to messages that wait: the records of a range that schedule, deliver, continue or take back, as arrays.

    scheduled   has a message wait, for a delay level or in the wheel                        WAITS
    done        delivers one, takes one back, or has it wait on in place of another record   DONE

A record that is done names its origin where duemq wrote it; RocketMQ's name none, and are matched by hashes:

    message   of real topic and unique key (without one: the body's checksum and size)
    key       of that, real queue, producer's time and retries: the same in a message that waits and in its delivery
    slot      the second of the wheel's slot: RocketMQ's cancellations count in their own slot only
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from spark_jobs.hashes import hash_ints, hash_slices
from spark_jobs.ranges import Range, walks
from spark_jobs.records import Damage, joined_damages
from spark_jobs.roles import CANCEL, DELIVERY, LEVEL, TIMER, Roles

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from spark_jobs.progress import Progress
    from spark_jobs.records import Records
    from spark_jobs.store_files import StoreFiles
    from spark_jobs.usage import UsageObserver

    Integers = NDArray[np.int64]

WAITS: Final = np.dtype(
    [
        ("offset", "<i8"),
        ("at_ms", "<i8"),
        ("due_ms", "<i8"),
        ("topic", "<i8"),
        ("message", "<i8"),
        ("key", "<i8"),
        ("slot", "<i8"),
        ("size", "<i4"),
        ("level", "<i2"),
        ("again", "?"),
        ("passed", "?"),
    ]
)
"""`offset`: physical. `at_ms`: store time. `topic`: hash of the topic that it is for. `level`: 0 for a timer.
`again`: waits in place of another record. `passed`: the broker's progress has passed it."""
DONE: Final = np.dtype(
    [
        ("origin", "<i8"),
        ("offset", "<i8"),
        ("at_ms", "<i8"),
        ("message", "<i8"),
        ("key", "<i8"),
        ("slot", "<i8"),
        ("what", "<i1"),
    ]
)
"""`origin`: physical offset of the record that waited, NO_ORIGIN where none is named."""
DELIVERED: Final = 1
CANCELLED: Final = 2
CONTINUED: Final = 3
MAX_DAMAGES: Final = 1000
"""Of a range, told one by one."""


class Events(NamedTuple):
    """Of some records."""

    waits: NDArray[Any]
    done: NDArray[Any]
    topics: dict[int, str]
    """Names of the topics by their hash."""


class RangeRead(NamedTuple):
    """What was read of a range. `damages`: the first MAX_DAMAGES of `damaged`."""

    start: int
    end: int
    sha256: str
    records: int
    damaged: int
    damages: list[Damage]
    last_ms: int


class RangeEvents:
    """The events of a range; iterate, then look at `read`. An observer sees its records as well."""

    def __init__(
        self, store: StoreFiles, part: Range, progress: Progress, observer: UsageObserver | None = None
    ) -> None:
        self._store = store
        self._part = part
        self._progress = progress
        self._observer = observer
        self.read: RangeRead | None = None

    def __iter__(self) -> Iterator[Events]:
        digest, damages, count, last_ms = hashlib.sha256(), [], 0, 0
        for found in walks(self._store, self._part, check_crc=False):
            records = found.records
            digest.update(memoryview(records.data)[: found.end])  # type: ignore[arg-type]
            damages += found.damages
            count += len(records)
            if len(records):
                last_ms = int(records.store_ms[-1])
                roles = Roles(records)
                if self._observer is not None:
                    self._observer.look(records, roles)
                yield events_of(records, roles, self._progress)
        damages = joined_damages(damages)
        self.read = RangeRead(*self._part, digest.hexdigest(), count, len(damages), damages[:MAX_DAMAGES], last_ms)


def events_of(records: Records, roles: Roles, progress: Progress) -> Events:
    """The events of some records."""
    role = roles.role
    topics: dict[int, str] = {}
    waits = _waits(records.take(np.flatnonzero((role == LEVEL) | (role == TIMER))), progress, topics)
    done = [
        _done(records.take(np.flatnonzero(role == DELIVERY)), DELIVERED),
        _done(records.take(np.flatnonzero(role == CANCEL)), CANCELLED),
        _done(records.take(np.flatnonzero(roles.is_again)), CONTINUED),
    ]
    # RocketMQ's rolled messages name no origin: they are told by their key alone.
    done[2] = done[2][done[2]["origin"] >= 0]
    return Events(waits, np.concatenate(done), topics)


def _waits(records: Records, progress: Progress, topics: dict[int, str]) -> NDArray[Any]:
    rows = np.zeros(len(records), WAITS)
    if not len(rows):
        return rows
    roles = Roles(records)
    level, slot = roles.level, roles.slot_second
    rows["offset"], rows["size"] = records.physical_offset, records.sizes
    rows["at_ms"] = records.store_ms
    rows["due_ms"] = roles.due_ms(np.array(progress.delays_ms, np.int64))
    rows["topic"] = _topic_hashes(records, topics)
    rows["message"], rows["key"] = roles.message_hash, roles.key_hash
    rows["slot"] = slot
    rows["level"], rows["again"] = level, roles.is_again
    passed = progress.is_level_done(level, records.queue_offset)
    wheel = progress.is_timer_done(slot, records.queue_offset, records.physical_offset)
    rows["passed"] = np.where(level > 0, passed, wheel)
    return rows


def _done(records: Records, what: int) -> NDArray[Any]:
    rows = np.zeros(len(records), DONE)
    if not len(rows):
        return rows
    roles = Roles(records)
    rows["origin"], rows["offset"], rows["at_ms"], rows["what"] = (
        roles.origin,
        records.physical_offset,
        records.store_ms,
        what,
    )
    if what == CONTINUED or (rows["origin"] < 0).any():
        if what == CANCELLED:
            rows["message"], rows["slot"] = _named(records), roles.slot_second
        else:
            rows["message"], rows["key"] = roles.message_hash, roles.key_hash
    return rows


def _named(records: Records) -> Integers:
    """Which messages cancellations name: TIMER_DEL_UNIQKEY is real topic + unique key, in older versions of RocketMQ
    the unique key alone."""
    at, size = records.property("TIMER_DEL_UNIQKEY")
    topic_at, topic_size = records.property("REAL_TOPIC")
    data = records.texts.data
    topic = records.texts.hashes("REAL_TOPIC")
    has_room = (topic_at >= 0) & (size > topic_size + 1)
    start = hash_slices(data, at, np.where(has_room, topic_size, 0))
    has_topic = has_room & (start == topic) & (data[at + np.where(has_room, topic_size, 0)] == ord("+"))
    skip = np.where(has_topic, topic_size + 1, 0)
    return hash_ints(topic, hash_slices(data, at + skip, size - skip))


def _topic_hashes(records: Records, topics: dict[int, str]) -> Integers:
    """Hashes of the topics that messages wait for; their names are noted."""
    hashes = records.texts.hashes("REAL_TOPIC")
    distinct, first = np.unique(hashes, return_index=True)
    names = records.take(first).property_strings("REAL_TOPIC").to_pylist()
    topics.update(zip(distinct.tolist(), [name or "" for name in names], strict=True))
    return hashes
