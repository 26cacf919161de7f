"""Figures of cases: matching tasks compute them, and the driver adds them up.

status      number of cases of each status, levels and timers apart, and their bytes
late_*      histograms of lateness (`lateness`), by topic, level, hour and minute of the day, and over time
delivered   deliveries by second, and how many of them were more than a second late
pending     waiting messages by second of their deliver time; and by second or minute and topic
offenders   the cases themselves that are lost, twice, or without a message in the log
waiting     where the records of the waiting messages lie, 14 bytes each
again       messages of levels that were delivered, and that the broker's progress has not passed
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np

from duemq.spark_jobs.audit import lateness
from duemq.spark_jobs.audit.steps import seconds_kept

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Rows = NDArray[Any]

DELIVERED: Final = 0
TWICE: Final = 1
CANCELLED: Final = 2
PENDING: Final = 3
LOST: Final = 4
UNCLAIMED: Final = 5
STATUSES: Final = ("delivered", "twice", "cancelled", "pending", "lost", "unclaimed")
"""Names of the statuses. UNCLAIMED: a delivery whose message is not in the log."""

CASE: Final = np.dtype(
    [
        ("physical_offset", "<i8"),
        ("size", "<i4"),
        ("at_ms", "<i8"),
        ("due_ms", "<i8"),
        ("delay_level", "<i2"),
        ("topic_hash", "<i8"),
        ("status", "<i1"),
        ("deliveries", "<i4"),
        ("first_ms", "<i8"),
        ("last_ms", "<i8"),
        ("first_offset", "<i8"),
        ("last_offset", "<i8"),
        ("origin", "<i8"),
        ("queue_offset", "<i8"),
        ("passed", "?"),
    ]
)
"""A case. `physical_offset`, `size`, `at_ms`, `due_ms`, ...: of the record that waited; for an unclaimed delivery its
own. `delay_level`: 0 for a timer. `first_ms`, `last_ms`: store times of the first and the last delivery, 0 without one;
`first_offset`, `last_offset`: their physical offsets. `origin`: the origin that an unclaimed delivery names, -1 for
none; `due_ms` then is the latest time at which its message can have been scheduled. `passed`: the broker's progress has
passed it."""

_STATUS: Final = np.dtype([("status", "<i8"), ("is_level", "<i8"), ("count", "<i8"), ("more", "<i8"), ("bytes", "<i8")])
_SECONDS: Final = np.dtype([("second", "<i8"), ("count", "<i8"), ("late", "<i8")])
_BY_TOPIC: Final = np.dtype([("second", "<i8"), ("topic", "<i8"), ("count", "<i8")])
WAITING: Final = np.dtype([("physical_offset", "<i8"), ("size", "<i4"), ("delay_level", "<i2")])
_LEVEL_COUNTS: Final = np.dtype([("level", "<i8"), ("count", "<i8")])
_HISTOGRAMS: Final = ("late_by_topic", "late_by_level", "late_by_hour", "late_by_minute", "late_over_time")
_LATE_MS: Final = 1000


class Figures:
    """Figures of some cases. Attributes are arrays of rows: `status` _STATUS; `late_*` lateness.HISTOGRAM, whose keys
    are topic hashes, delay levels, hours and minutes of the day (UTC) and deliver time // step; `delivered` and
    `pending` _SECONDS; `pending_by_topic` _BY_TOPIC, by seconds or minutes (`steps`); `offenders` CASE; `waiting`
    WAITING, a row for each waiting message; `again` _LEVEL_COUNTS, number of messages of each level that were delivered
    though no progress has passed them."""

    NAMES: Final = (
        "status",
        *_HISTOGRAMS,
        "delivered",
        "pending",
        "pending_by_topic",
        "offenders",
        "waiting",
        "again",
    )
    _TYPES: Final = {
        "status": _STATUS,
        **dict.fromkeys(_HISTOGRAMS, lateness.HISTOGRAM),
        "delivered": _SECONDS,
        "pending": _SECONDS,
        "pending_by_topic": _BY_TOPIC,
        "offenders": CASE,
        "waiting": WAITING,
        "again": _LEVEL_COUNTS,
    }

    status: Rows
    late_by_topic: Rows
    late_by_level: Rows
    late_by_hour: Rows
    late_by_minute: Rows
    late_over_time: Rows
    delivered: Rows
    pending: Rows
    pending_by_topic: Rows
    offenders: Rows
    waiting: Rows
    again: Rows

    @classmethod
    def of(cls, cases: Rows, step_ms: int, begin: int, begin_ms: int = 0, compacted_to: int = 0) -> Figures:
        """Return the figures of CASE. `step_ms`: step of the curve over time. `begin`, `begin_ms`: where the log
        begins, and the store time of its first record, 0 if unknown; a delivery whose message was stored before that is
        not an offender. `compacted_to`: nor is a delivery before this physical offset, since a compaction has removed
        its message."""
        self = cls()
        status = cases["status"]
        more = np.maximum(cases["deliveries"].astype(np.int64) - 1, 0)
        is_level = cases["delay_level"] > 0
        is_before = (cases["due_ms"] < begin_ms) | (cases["physical_offset"] < compacted_to)
        is_before = np.where(cases["origin"] >= 0, cases["origin"] < begin, is_before)
        is_expired = (status == UNCLAIMED) & is_before
        # Expired ones are counted as a separate kind of unclaimed delivery, in the field that has the level in other
        # cases.
        second_key = np.where(status == UNCLAIMED, is_expired, is_level)
        ones = np.ones(len(cases), np.int64)
        self.status = _summed(_STATUS, [status, second_key], [ones, more, cases["size"]])
        done = cases[(status == DELIVERED) | (status == TWICE)]
        late, due = done["first_ms"] - done["due_ms"], done["due_ms"]
        self.late_by_topic = lateness.histogram(done["topic_hash"], late)
        self.late_by_level = lateness.histogram(done["delay_level"], late)
        self.late_by_hour = lateness.histogram(due // 3_600_000 % 24, late)
        self.late_by_minute = lateness.histogram(due // 60_000 % 1440, late)
        self.late_over_time = lateness.histogram(due // step_ms, late)
        ones = np.ones(len(done), np.int64)
        self.delivered = _summed(_SECONDS, [done["first_ms"] // 1000], [ones, late > _LATE_MS])
        # A store may have many waiting messages: columns are taken, not rows.
        waits = np.flatnonzero(status == PENDING)
        seconds, ones = cases["due_ms"][waits] // 1000, np.ones(len(waits), np.int64)
        self.pending = _summed(_SECONDS, [seconds], [ones, ones])
        self.pending_by_topic = _summed(_BY_TOPIC, [seconds_kept(seconds), cases["topic_hash"][waits]], [ones])
        waits = waits[np.argsort(cases["physical_offset"][waits], kind="stable")]
        self.waiting = np.zeros(len(waits), WAITING)
        for name in WAITING.names or ():
            self.waiting[name] = cases[name][waits]
        self.again = again_of(done["delay_level"][(done["delay_level"] > 0) & ~done["passed"]])
        self.offenders = cases[(status == LOST) | (status == TWICE) | ((status == UNCLAIMED) & ~is_expired)]
        return self

    def encode(self) -> bytes:
        """Return the figures as bytes, which `decode` reads."""
        return msgspec.msgpack.encode(
            {name: np.ascontiguousarray(getattr(self, name)).tobytes() for name in self.NAMES}
        )

    @classmethod
    def decode(cls, data: bytes) -> Figures:
        """Return the figures from the bytes of `encode`."""
        self = cls()
        for name, part in msgspec.msgpack.decode(data, type=dict[str, bytes]).items():
            setattr(self, name, np.frombuffer(part, cls._TYPES[name]))
        return self

    @classmethod
    def added(cls, parts: Sequence[Figures]) -> Figures:
        """Return the sum of figures."""
        self = cls()
        for name in _HISTOGRAMS:
            setattr(self, name, lateness.added([getattr(part, name) for part in parts]))
        for name, keys in (("status", 2), ("delivered", 1), ("pending", 1), ("pending_by_topic", 2), ("again", 1)):
            dtype = cls._TYPES[name]
            rows = _joined(dtype, [getattr(part, name) for part in parts])
            fields = list(dtype.names or ())
            columns = [rows[field] for field in fields]
            if name == "pending_by_topic":
                columns[0] = seconds_kept(columns[0])
            setattr(self, name, _summed(dtype, columns[:keys], columns[keys:]))
        waiting = _joined(WAITING, [part.waiting for part in parts])
        self.waiting = waiting[np.argsort(waiting["physical_offset"], kind="stable")]
        self.offenders = np.sort(_joined(CASE, [part.offenders for part in parts]), order="physical_offset")
        return self

    def count(self, status: int, *, is_level: bool | None = None) -> int:
        """Return the number of cases with a status."""
        return self._sum("count", status, is_level)

    def _sum(self, field: str, status: int, second_key: bool | None) -> int:
        rows = self.status[self.status["status"] == status]
        if second_key is not None:
            rows = rows[rows["is_level"] == second_key]
        return int(rows[field].sum())

    def bytes_of(self, *statuses: int) -> tuple[int, int]:
        """Return the number of cases with one of some statuses, and the bytes of their records that waited."""
        rows = self.status[np.isin(self.status["status"], statuses)]
        return int(rows["count"].sum()), int(rows["bytes"].sum())

    @property
    def superfluous(self) -> int:
        """Deliveries beyond the first of a message."""
        return self._sum("more", TWICE, None)

    @property
    def expired(self) -> int:
        """Deliveries whose message was in a file that has expired."""
        return self._sum("count", UNCLAIMED, second_key=True)


def again_of(levels: Rows) -> Rows:
    """Return the rows of `Figures.again` for messages of some levels."""
    return _summed(_LEVEL_COUNTS, [levels], [np.ones(len(levels), np.int64)])


def _joined(dtype: np.dtype[Any], parts: Sequence[Rows]) -> Rows:
    return np.concatenate(parts) if parts else np.zeros(0, dtype)


def _summed(dtype: np.dtype[Any], keys: Sequence[Rows], amounts: Sequence[Rows]) -> Rows:
    """Return rows of a type whose first fields are keys, each once and in order, and whose others are sums."""
    order = np.lexsort(tuple(reversed(keys)))
    result = np.zeros(0, dtype)
    if not len(order):
        return result
    ordered = [np.asarray(key, np.int64)[order] for key in keys]
    changes = np.zeros(len(order), np.bool_)
    changes[0] = True
    for key in ordered:
        changes[1:] |= key[1:] != key[:-1]
    first = np.flatnonzero(changes)
    result = np.zeros(len(first), dtype)
    fields = list(dtype.names or ())
    for field, key in zip(fields, ordered, strict=False):
        result[field] = key[first]
    for field, amount in zip(fields[len(keys) :], amounts, strict=True):
        result[field] = np.add.reduceat(np.asarray(amount, np.int64)[order], first)
    return result
