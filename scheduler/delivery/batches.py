"""Delivery of one batch: the records of due units are read in the longest possible ranges, copied for their real
queues, and appended in one write."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import structlog

from duemq.protocol.errors import RecordError
from duemq.protocol.frames.command import Body
from duemq.protocol.records import checksum, properties
from duemq.protocol.records.record import StoredMessage
from duemq.protocol.records.recurrence import FLAG_RECURS
from duemq.scheduler.delivery.targets import Targets
from duemq.scheduler.timers.index.sorted_offsets import has, is_among, union
from duemq.storage.durability.health import Verdict
from duemq.storage.errors import StoreError
from duemq.storage.log.copies import ORIGIN_ZERO, UNITS, PackedRecords
from duemq.storage.log.origins import MAX_RECURRING
from duemq.storage.queues.consume_queue import DELIVERED_SIZE, PADDING_SIZE, UNIT_SIZE, WITHDRAWN_SIZE, ConsumeQueue
from duemq.storage.queues.pull import ColdRead, Range
from duemq.storage.store import MessageStore

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Units = NDArray[Any]

log = structlog.get_logger(__name__)

BATCH_BYTES: Final = 256 * 1024
"""Most bytes of records in one batch, unless a single record is larger. A batch of this size takes a few ms at most."""
WARM_BYTES: Final = 4 * 1024 * 1024
"""Approximate number of bytes that a thread reads ahead if records are no longer in memory."""


class Kind(Enum):
    """The outcome of a batch."""

    APPENDED = auto()
    """The deliveries were appended, except for messages that cannot be delivered."""
    PASSED = auto()
    """The units stand for no waiting message: it was cancelled or delivered before, or the unit is padding."""
    SKIPPED = auto()
    """The messages cannot be delivered."""
    GONE = auto()
    """The records are not in the commitlog."""
    COLD = auto()
    """The records are not in memory, and have to be read from the disk first."""


class Outcome(NamedTuple):
    """The outcome for the first units of a batch. `units`: their number; `delivered`: how many of them were
    appended."""

    kind: Kind
    units: int
    delivered: int = 0


class Batches:
    """Delivers the messages of consume-queue units, a batch at a time."""

    def __init__(self, store: MessageStore, follow: Callable[[StoredMessage, int], None] | None = None) -> None:
        """`follow`: called with each record that recurs (`FLAG_RECURS`) when its delivery has been staged, and with the
        store time (ms since the epoch); it stages the record for the next delivery. None if no record recurs."""
        self._store = store
        self._follow = follow
        self._targets = Targets(store)
        self._done: NDArray[np.int64] = np.empty(0, np.int64)
        self._done_end = 0

    def set_delivered(self, origins: NDArray[np.int64]) -> None:
        """Set the scheduled records that recovery found delivered, so that their units are passed over. `origins`:
        their physical offsets."""
        self._done = union([origins])
        self._done_end = int(self._done[-1]) + 1 if len(self._done) else 0

    def delivered_from(self, physical_offset: int) -> list[int]:
        """Return the physical offsets, from a given one on, of the records that recovery found delivered, ascending."""
        found: list[int] = self._done[np.searchsorted(self._done, physical_offset) :].tolist()
        return found

    @property
    def delivered_end(self) -> int:
        """A physical offset behind all records that recovery found delivered; 0 if there are none."""
        return self._done_end

    def is_delivered(self, units: Units) -> NDArray[np.bool_]:
        """Return, for each unit, whether recovery found its message delivered."""
        physical = units["physical_offset"].astype(np.int64)
        return is_among(physical, self._done)

    def delivered(self, physical_offset: int) -> bool:
        """Whether recovery found the message of a record delivered."""
        return has(self._done, physical_offset)

    def read(self, queue: ConsumeQueue, offset: int, count: int) -> Units:
        """Return at most `count` units from a queue offset on. Raises NotInMemory, OSError."""
        data = queue.read(offset, count)
        return np.frombuffer(data, UNITS, len(data) // UNIT_SIZE)

    def records(self, physical: NDArray[np.int64], sizes: NDArray[np.int64]) -> PackedRecords | None:
        """Read records in the longest possible ranges; None if not all of them are in the commitlog. May wait for the
        disk. Raises OSError."""
        parts = [self._store.log.read(*each) for each in _ranges(physical, sizes)]
        data = b"".join([part for part in parts if part is not None])
        return PackedRecords(data, physical, sizes) if len(data) == int(sizes.sum()) else None

    def deliver(self, units: Units, now_ms: int, *, may_wait: bool, **source: object) -> Outcome:
        """Deliver one batch of due units, in the given order; there must be at least one unit. `now_ms`: the store
        time, ms since the epoch. `may_wait`: whether to wait for the disk if records are not in memory, instead of
        returning COLD. `source`: fields for log lines that tell where the messages waited. Raises StoreError if the
        store refuses the batch; then nothing of it was appended."""
        physical, sizes = units["physical_offset"].astype(np.int64), units["size"].astype(np.int64)
        skipped = (sizes == PADDING_SIZE) | ((sizes >= WITHDRAWN_SIZE) & (sizes <= DELIVERED_SIZE))
        if self._done_end and physical[0] < self._done_end:
            skipped |= self.is_delivered(units)
        if skipped[0]:
            return Outcome(Kind.PASSED, _leading(skipped))
        begin, end = self._store.log.begin, self._store.log.end
        gone = (physical < begin) | (sizes <= 0) | (physical + sizes > end)
        if gone[0]:
            return Outcome(Kind.GONE, _leading(gone))
        count = min(_leading(~(skipped | gone)), max(1, int(np.searchsorted(np.cumsum(sizes), BATCH_BYTES, "right"))))
        physical, sizes = physical[:count], sizes[:count]
        if self._store.health.verdict is not Verdict.HEALTHY:
            raise self._store.health.error()  # else each try would read records in vain while the disk is full
        order = None
        if (physical[1:] < physical[:-1]).any():
            order = np.argsort(physical)
            physical, sizes = physical[order], sizes[order]
        data = self._read_records(_ranges(physical, sizes), may_wait=may_wait)
        if data is None:
            return Outcome(Kind.COLD, count)
        if len(data) != int(sizes.sum()):
            return Outcome(Kind.GONE, 1) if count == 1 else self.deliver(units[:1], now_ms, may_wait=may_wait, **source)
        records = PackedRecords(data, physical, sizes)
        return self._append(records.reordered(np.argsort(order)) if order is not None else records, now_ms, source)

    def _read_records(self, ranges: list[Range], *, may_wait: bool) -> Body | None:
        """Read records; None if that would have to wait for the disk, fewer bytes if a file is gone. Raises
        StoreError."""
        try:
            return ColdRead(self._store.log, ranges).run() if may_wait else self._store.read(ranges)
        except FileNotFoundError:
            return b""
        except OSError as error:
            raise StoreError(f"reading the commitlog failed: {error}") from error

    def warm(self, units: Units) -> ColdRead:
        """Return a job that reads the records of units from the disk, so that they are in memory for the next
        batches."""
        physical, sizes = units["physical_offset"].astype(np.int64), units["size"].astype(np.int64)
        usual = _leading((sizes > DELIVERED_SIZE) & (sizes != PADDING_SIZE) & (physical >= self._store.log.begin))
        count = max(1, min(usual, int(np.searchsorted(np.cumsum(sizes[:usual]), WARM_BYTES, "right"))))
        return ColdRead(self._store.log, _ranges(physical[:count], sizes[:count]))

    # ---

    def _append(self, records: PackedRecords, now_ms: int, source: dict[str, object]) -> Outcome:
        appender = self._store.appender
        usual = records.is_usual & appender.can_copy
        if not usual[0]:
            return self._append_apart(records, now_ms, source)
        if not usual.all():
            records = records.part(slice(0, _leading(usual)))
        recurring: list[tuple[int, StoredMessage]] = []
        recurs = records.heads["sys_flag"] & FLAG_RECURS != 0
        follow = self._follow
        if follow is not None and recurs.any():
            which_recur = np.flatnonzero(recurs)
            if len(which_recur) > MAX_RECURRING:
                records = records.part(slice(0, int(which_recur[MAX_RECURRING])))
                which_recur = which_recur[:MAX_RECURRING]
            recurring = [(at, records.decoded(at)) for at in which_recur.tolist()]
            records.heads["sys_flag"][which_recur] &= ~FLAG_RECURS
        count = len(records)
        found, codes = self._targets.find(records)
        numbers = {queue: number for number, queue in enumerate(dict.fromkeys(found))}
        which = np.zeros(count, np.int64)
        if len(numbers) > 1:
            which = np.fromiter(map(numbers.__getitem__, found), np.int64, count)
        tags_codes = np.array(codes)
        if None in numbers:
            known = np.flatnonzero(which != numbers[None])
            self._complain(records, np.flatnonzero(which == numbers[None]), source)
            if not len(known):
                return Outcome(Kind.SKIPPED, count)
            which, tags_codes = which[known], tags_codes[known]
            which -= which > numbers.pop(None)
            records = records.part(known)
            recurring = [each for each in recurring if found[each[0]] is not None]
        appender.begin(now_ms)
        try:
            appender.add_copies(records, [queue for queue in numbers if queue is not None], which, tags_codes)
            if follow is not None:
                for _, message in recurring:
                    follow(message, now_ms)
            appender.commit()
        except BaseException:
            appender.roll_back()
            raise
        return Outcome(Kind.APPENDED, count, len(records))

    def _append_apart(self, records: PackedRecords, now_ms: int, source: dict[str, object]) -> Outcome:
        """Deliver the first record alone, since it has an unusual form (such as IPv6 addresses or a long topic), or is
        not a record at all."""
        try:
            message = records.decoded(0)
        except RecordError:
            return Outcome(Kind.GONE, 1)
        text = checksum.without(message.properties_text.encode())
        queue = self._targets.queue(text)
        if queue is None:
            self._complain(records, np.arange(1), source)
            return Outcome(Kind.SKIPPED, 1)
        appender = self._store.appender
        appender.begin(now_ms)
        try:
            appender.add(
                queue,
                message.body,
                text,
                properties.tags_code(message.get_property(properties.TAGS)),
                message.born_timestamp,
                message.born_host,
                message.flag,
                message.sys_flag & ~FLAG_RECURS,
                message.reconsume_times,
                message.physical_offset or ORIGIN_ZERO,
            )
            if self._follow is not None and message.sys_flag & FLAG_RECURS:
                self._follow(message, now_ms)
            appender.commit()
        except BaseException:
            appender.roll_back()
            raise
        return Outcome(Kind.APPENDED, 1, 1)

    @staticmethod
    def _complain(records: PackedRecords, which: NDArray[np.int64], source: dict[str, object]) -> None:
        log.error(
            "scheduled_messages_undeliverable",
            **source,
            messages=len(which),
            physical_offset=int(records.heads["physical_offset"][which[0]]),
            reason="REAL_TOPIC and REAL_QID do not name a queue that accepts messages",
        )


def _leading(mask: NDArray[np.bool_]) -> int:
    """Return the number of true elements before the first false one."""
    return len(mask) if mask.all() else int(np.argmin(mask))


def _ranges(physical: NDArray[np.int64], sizes: NDArray[np.int64]) -> list[Range]:
    """Return records as the longest possible ranges (physical offset, size): adjacent records make one range."""
    ends = physical + sizes
    breaks = np.flatnonzero(physical[1:] != ends[:-1]) + 1
    firsts, lasts = np.concatenate(([0], breaks)), np.concatenate((breaks, [len(physical)])) - 1
    return list(zip(physical[firsts].tolist(), (ends[lasts] - physical[firsts]).tolist(), strict=True))
