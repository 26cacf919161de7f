"""Computes when the messages of a level are due, according to the table and the clock at the time when they were
stored.

Keeps invariant 12 of ARCHITECTURE.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from duemq.scheduler.levels.level import Level, OpenRun
from duemq.scheduler.levels.table import DelayLevels
from duemq.storage.queues.consume_queue import MARK_SIZES, PADDING_SIZE
from duemq.storage.queues.extension import EXT_ADDRESS_MAX
from duemq.storage.store import MessageStore

if TYPE_CHECKING:
    from numpy.typing import NDArray


class LevelTimes:
    """Computes when units of a level's queue are due. Times are ms since the epoch."""

    def __init__(self, store: MessageStore, table: DelayLevels) -> None:
        self._store = store
        self.table = table

    def look(self, level: Level, now_ms: int) -> None:
        """Compute when the heads of a level's runs are due."""
        for run in level.runs:
            run.due_ms = self.head(level, run, now_ms)

    @staticmethod
    def forget(level: Level, now_ms: int) -> None:
        """Have the next step compute when the heads of a level are due; this itself reads nothing."""
        for run, end in level.spans():
            run.due_ms = now_ms if run.cursor < end else None

    def head(self, level: Level, run: OpenRun, now_ms: int) -> int | None:
        """Return when the first message of a run that was not tried yet is due; None if there is none."""
        unit = level.queue.unit(run.cursor) if run.cursor < level.end_of(run) else None
        return self.due_ms(run, unit, now_ms) if unit is not None else None

    def due_ms(self, run: OpenRun, unit: tuple[int, int, int], now_ms: int) -> int:
        """Return when a unit's message is due; `now_ms` for padding, or if a record is needed for that but missing.
        `unit`: physical offset, size and tags code."""
        physical, size, code = unit
        if size == PADDING_SIZE:
            return now_ms
        # Withdrawn units get a time, too: the binary search of `due_count` reads them.
        if code <= EXT_ADDRESS_MAX:
            return now_ms  # the address was left because there is no record: see `storage.queues.extension`
        due = code + run.shift_ms
        limit = run.delay_limit_ms
        if limit is not None:
            # Like RocketMQ's correctDeliverTimestamp after the table was shortened, except that RocketMQ delivers such
            # a message immediately.
            stored = self._store_timestamp(physical, size)
            return min(due, stored + run.shift_ms + limit) if stored is not None else now_ms
        return due

    def due_count(self, level: Level, run: OpenRun, units: NDArray[Any], now_ms: int) -> int:
        """Return the number of due units at the beginning of `units`, which are consecutive units of a run."""
        codes = units["tags_code"]
        if run.delay_limit_ms is None:
            late = (codes > now_ms - run.shift_ms) | (codes <= EXT_ADDRESS_MAX)
            if not late.any():
                return len(units)
            count = int(np.argmax(late))
            if count:
                return count
        low, high = 0, len(units)
        while low < high:
            middle = (low + high) // 2
            if self.due_ms(run, units[middle].item(), now_ms) <= now_ms:
                low = middle + 1
            else:
                high = middle
        return low

    def first_after(self, level: Level, seen_end: int, is_after: Callable[[int], bool]) -> int:
        """Return the queue offset of the first message of a level that was stored after the clock was set; the level's
        next offset if there is none. The record of such a message lies at or behind `seen_end`, the end of the
        commitlog when the clock was last read, and `is_after` holds for its store time."""
        offset = level.queue.next_offset
        while (unit := level.queue.unit(offset - 1)) is not None and unit[0] >= seen_end:
            if unit[1] != PADDING_SIZE:
                stored = self._store_timestamp(unit[0], unit[1])
                if stored is None or not is_after(stored):
                    break
            offset -= 1
        return offset

    def _store_timestamp(self, physical: int, size: int) -> int | None:
        message = self._store.message_at(physical, size if size not in MARK_SIZES else None)
        return message.store_timestamp if message is not None else None
