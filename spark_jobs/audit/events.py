"""The events of waiting messages: the records of a range that schedule, deliver, continue or cancel, as arrays.

    scheduled   a message waits, for a delay level or in the wheel                                          WAITS
    done        a message was delivered or cancelled, or now waits by this record in place of another       DONE

A record of the second kind names its origin if duemq wrote it. RocketMQ's records name none, and are matched by hashes:

    message   of real topic and unique key (without one: the body's checksum and size)
    key       of that, real queue, producer's time and retries: the same in a waiting message and in its delivery
    slot      the second of the wheel's slot: RocketMQ's cancellations only hold in their own slot
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from duemq.protocol.records.timer_properties import MAX_DELIVER_AHEAD_MS
from duemq.spark_jobs.audit.agreement import Agreement
from duemq.spark_jobs.columns.hashes import hash_ints, hash_slices
from duemq.spark_jobs.columns.records import Damage, joined_damages
from duemq.spark_jobs.store.roles import CANCEL, DELIVERY, LEVEL, TIMER, Roles
from duemq.spark_jobs.store.walks import Range, walks

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from duemq.spark_jobs.analyse.usage import UsageObserver
    from duemq.spark_jobs.columns.records import Records
    from duemq.spark_jobs.store.progress import Progress
    from duemq.spark_jobs.store.store_files import StoreFiles

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
        ("queue_offset", "<i8"),
        ("size", "<i4"),
        ("level", "<i2"),
        ("again", "?"),
        ("passed", "?"),
    ]
)
"""`offset`: physical. `at_ms`: store time. `topic`: hash of the topic that it is for. `level`: 0 for a timer. `again`:
waits in place of another record that it does not name. `passed`: the broker's progress has passed it (`are_passed`)."""
DONE: Final = np.dtype(
    [
        ("origin", "<i8"),
        ("offset", "<i8"),
        ("at_ms", "<i8"),
        ("message", "<i8"),
        ("key", "<i8"),
        ("slot", "<i8"),
        ("what", "<i1"),
        ("sent_again", "?"),
    ]
)
"""`origin`: physical offset of the record that waited, NO_ORIGIN if none is named. `slot`: for a delivery that names no
origin, the latest time, ms since the epoch, at which its message can have been scheduled. `sent_again`: the record
looks like a delivery, but cannot have waited, since its producer made it when it would already have been due. If an
application forwards a received message, it also sends the properties of the delivery."""
DELIVERED: Final = 1
CANCELLED: Final = 2
CONTINUED: Final = 3
MAX_DAMAGES: Final = 1000
"""Most damages of a range that are listed."""


class Events(NamedTuple):
    """The events of some records."""

    waits: NDArray[Any]
    done: NDArray[Any]
    topics: dict[int, str]
    """Names of the topics by their hash."""


class RangeRead(NamedTuple):
    """The result of reading a range. `damages`: the first MAX_DAMAGES of the `damaged` stretches; `corruptions`: the
    first of the `corrupt` records, whose number is None if that was not checked."""

    start: int
    end: int
    sha256: str
    records: int
    damaged: int
    damages: list[Damage]
    last_ms: int
    hashed: int
    """Number of bytes, from `start` on, in the SHA-256: up to the end of the last record, or of damage."""
    corrupt: int | None = None
    corruptions: tuple[Damage, ...] = ()


class RangeEvents:
    """The events of a range: iterate over them, then use `read`. An observer sees the records too. `check`: also look
    for records with wrong checksums, or that disagree with their consume queues; their events count anyway."""

    def __init__(
        self,
        store: StoreFiles,
        part: Range,
        progress: Progress,
        observer: UsageObserver | None = None,
        *,
        check: bool = False,
    ) -> None:
        self._check = check
        self._store = store
        self._part = part
        self._progress = progress
        self._observer = observer
        self.read: RangeRead | None = None

    def __iter__(self) -> Iterator[Events]:
        digest, damages, count, last_ms, hashed = hashlib.sha256(), [], 0, 0, 0
        corrupt, corruptions = 0, list[Damage]()
        agreement = Agreement(self._store) if self._check else None
        for found in walks(self._store, self._part, check_crc=False):
            records = found.records
            digest.update(memoryview(records.data)[: found.end])  # type: ignore[arg-type]
            hashed += found.end
            damages += found.damages
            count += len(records)
            if agreement is not None and (wrong := {**agreement.wrong(records), **records.corrupt()}):
                corrupt += len(wrong)
                extents = zip(records.physical_offset.tolist(), records.sizes.tolist(), strict=True)
                told = [Damage(*extent, wrong[i]) for i, extent in enumerate(extents) if i in wrong]
                corruptions += told[: MAX_DAMAGES - len(corruptions)]
            if len(records):
                last_ms = int(records.store_ms[-1])
                roles = Roles(records)
                if self._observer is not None:
                    self._observer.look(records, roles)
                yield events_of(records, roles, self._progress)
        damages = joined_damages(damages)
        self.read = RangeRead(
            *self._part,
            digest.hexdigest(),
            count,
            len(damages),
            damages[:MAX_DAMAGES],
            last_ms,
            hashed,
            corrupt if self._check else None,
            tuple(corruptions),
        )


def events_of(records: Records, roles: Roles, progress: Progress) -> Events:
    """Return the events of some records."""
    role = roles.role
    topics: dict[int, str] = {}
    waits = _waits(records.take(np.flatnonzero((role == LEVEL) | (role == TIMER))), progress, topics)
    done = [
        _delivered(records.take(np.flatnonzero(role == DELIVERY)), progress.delays_ms),
        _done(records.take(np.flatnonzero(role == CANCEL)), CANCELLED),
        _done(records.take(np.flatnonzero(roles.is_again)), CONTINUED),
    ]
    # RocketMQ's rolled messages name no origin: only their key identifies them.
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
    rows["slot"], rows["queue_offset"] = slot, records.queue_offset
    rows["level"], rows["again"] = level, roles.is_again & (roles.origin < 0)
    rows["passed"] = are_passed(rows, progress)
    return rows


def are_passed(waits: NDArray[Any], progress: Progress) -> NDArray[np.bool_]:
    """Return which waiting messages (WAITS) the broker's progress has passed."""
    levels = progress.is_level_done(waits["level"], waits["queue_offset"])
    wheel = progress.is_timer_done(waits["slot"], waits["queue_offset"], waits["offset"])
    return np.where(waits["level"] > 0, levels, wheel)


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


def _delivered(records: Records, delays_ms: list[int]) -> NDArray[Any]:
    rows = _done(records, DELIVERED)
    if (rows["origin"] < 0).any():
        out_ms, is_timer = records.property_ints("TIMER_OUT_MS")
        waited_ms = records.store_ms - records.born_ms
        rows["sent_again"] = np.where(is_timer, records.born_ms >= out_ms, waited_ms < min(delays_ms))
        rows["slot"] = _scheduled_by(records, np.array(delays_ms, np.int64))
    return rows


def _scheduled_by(records: Records, delays_ms: Integers) -> Integers:
    """Return the latest times, ms since the epoch, at which the messages of deliveries can have been scheduled: their
    delay before the delivery, or the producer's time if that is earlier."""
    waited = np.zeros(len(records), np.int64)
    # The last of these properties that is present counts; `Roles.due_ms` has the opposite order.
    level, has_level = records.property_ints("DELAY")
    known = has_level & (level > 0)
    waited = np.where(known, delays_ms[np.clip(level, 1, len(delays_ms)) - 1], waited)
    for name, factor in (("TIMER_DELAY_SEC", 1000), ("TIMER_DELAY_MS", 1), ("TIMER_DELIVER_MS", 0)):
        values, present = records.property_ints(name)
        waited = np.where(present, np.clip(values, 0, MAX_DELIVER_AHEAD_MS) * factor, waited)
    found: Integers = np.minimum(records.store_ms - waited, records.born_ms)
    return found


def _named(records: Records) -> Integers:
    """Return hashes of the messages that cancellations name: TIMER_DEL_UNIQKEY is real topic + unique key, in older
    versions of RocketMQ only the unique key."""
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
    """Return hashes of the topics that messages wait for; note their names in `topics`."""
    hashes = records.texts.hashes("REAL_TOPIC")
    distinct, first = np.unique(hashes, return_index=True)
    names = records.take(first).property_strings("REAL_TOPIC").to_pylist()
    topics.update(zip(distinct.tolist(), [name or "" for name in names], strict=True))
    return hashes
