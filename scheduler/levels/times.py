"""When the messages of a level are due, by the tables and clocks that they were promised their times by."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from duemq.scheduler.levels.level import Level, OpenRun
from duemq.scheduler.levels.table import DelayLevels
from duemq.storage.queues.consume_queue import MARK_SIZES, PADDING_SIZE
from duemq.storage.queues.pull import EXT_ADDRESS_MAX
from duemq.storage.store import MessageStore

if TYPE_CHECKING:
    from numpy.typing import NDArray


class LevelTimes:
    """Knows when units of a level's queue are due. Times are ms since the epoch."""

    def __init__(self, store: MessageStore, table: DelayLevels) -> None:
        self._store = store
        self.table = table

    def look(self, level: Level, now_ms: int) -> None:
        """Find the heads of a level anew."""
        for run in level.runs:
            run.due_ms = self.head(level, run, now_ms)

    @staticmethod
    def forget(level: Level, now_ms: int) -> None:
        """Have the next step find the heads of a level anew: nothing is read here."""
        for run, end in level.spans():
            run.due_ms = now_ms if run.cursor < end else None

    def head(self, level: Level, run: OpenRun, now_ms: int) -> int | None:
        """When the first message of a run that was not tried is due, or None."""
        unit = level.queue.unit(run.cursor) if run.cursor < level.end_of(run) else None
        return self.due_ms(level, run, *unit, now_ms) if unit is not None else None

    def due_ms(self, level: Level, run: OpenRun, physical: int, size: int, code: int, now_ms: int) -> int:
        """When a unit's message is due; now, where there is none."""
        if size == PADDING_SIZE:
            return now_ms
        # One that was withdrawn has its time as well: a search by halves looks at it.
        if code <= EXT_ADDRESS_MAX:
            stored = self._store_timestamp(physical, size)
            return self.table.deliver_time(level.number, stored) + run.shift_ms if stored is not None else now_ms
        due = code + run.shift_ms
        limit = run.delay_limit_ms
        if limit is not None:
            # RocketMQ's correctDeliverTimestamp: the table was shortened. RocketMQ delivers such a message at once.
            stored = self._store_timestamp(physical, size)
            return min(due, stored + run.shift_ms + limit) if stored is not None else now_ms
        return due

    def due_count(self, level: Level, run: OpenRun, units: NDArray[Any], now_ms: int) -> int:
        """How many of the first units of a run, as they follow one another, are due."""
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
            physical, size, code = units[middle].item()
            if self.due_ms(level, run, physical, size, code, now_ms) <= now_ms:
                low = middle + 1
            else:
                high = middle
        return low

    def first_after(self, level: Level, seen_end: int, is_after: Callable[[int], bool]) -> int:
        """The first message of a level that was stored after the clock was set: behind what was there when it was last
        looked at (`seen_end`, a physical offset), and with a store time, ms, that `is_after` says so of."""
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
