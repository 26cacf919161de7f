"""The deliver times that the old queues of the delay levels promise.

RocketMQ's records do not contain the times at which they are due, only their levels, and the table of the delays may
have changed since. Each unit in the queue of a level has the deliver time of its message.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from duemq.broker.repair.differences import ExtensionFiles, numbered, written_units
from duemq.protocol.topics import SCHEDULE_TOPIC
from duemq.scheduler.waiting import is_message
from duemq.storage import file_names
from duemq.storage.log.commitlog import Commitlog
from duemq.storage.log.scan import read_record
from duemq.storage.queues import extension

if TYPE_CHECKING:
    from numpy.typing import NDArray

_LOOK_UNITS: Final = 100
"""Number of units at the end of each file in which the newest delay is looked for."""
_DELAYED: Final = np.dtype([("stored", np.int64), ("delay_ms", np.int64)])
"""A store time, in ms since the epoch, and a delay in ms."""


class _Run(NamedTuple):
    """Messages of a level that were stored one after another and have the same delay; times in ms since the epoch."""

    first_stored: int
    last_stored: int
    delay_ms: int


class PromisedDelays:
    """The delays, in ms, that a store's queues promise to messages of RocketMQ's. The queues are read when they are
    first needed: a store that only duemq wrote needs none, since its records contain their deliver times."""

    def __init__(self, root: str, log: Commitlog) -> None:
        """`root`: the store's directory, whose old queues are read. `log`: its commitlog."""
        self._queues = os.path.join(root, file_names.CONSUME_QUEUES, SCHEDULE_TOPIC)
        self._extensions = os.path.join(root, file_names.QUEUE_EXTENSIONS, SCHEDULE_TOPIC)
        self._log = log
        self._runs: dict[int, list[_Run]] = {}

    def find(self, level: int, stored_ms: int) -> int | None:
        """Return the delay, in ms, of a message of a level, by its store time in ms since the epoch; None if the queue
        does not show it. Messages between two with the same delay have that delay too. Raises OSError."""
        if level not in self._runs:
            self._runs[level] = _runs(self._delays(level, self._names(level)))
        runs = self._runs[level]
        at = bisect_right(runs, stored_ms, key=lambda run: run.first_stored) - 1
        if at < 0:
            return None
        run = runs[at]
        if stored_ms <= run.last_stored or (at + 1 < len(runs) and runs[at + 1].delay_ms == run.delay_ms):
            return run.delay_ms
        return None

    def newest(self, level: int) -> int | None:
        """Return the delay, in ms, that the last unit of a level's queue with a delay shows; None if there is no such
        unit. Raises OSError."""
        for name in reversed(self._names(level)):
            found = [delay for _, delay in self._delays(level, [name], last=_LOOK_UNITS)]
            if found:
                return found[-1]
        return None

    def levels(self) -> list[int]:
        """Return the levels that have a queue, ascending."""
        return sorted(int(name) + 1 for name in numbered(self._queues))

    def _names(self, level: int) -> list[str]:
        return numbered(os.path.join(self._queues, str(level - 1)))

    def _delays(self, level: int, names: list[str], last: int | None = None) -> Iterator[tuple[int, int]]:
        """Yield store times and delays of RocketMQ's messages, in the order of their units in some of the files of a
        level's queue. `last`: only this number of units at the end of each file."""
        read = ExtensionFiles(os.path.join(self._extensions, str(level - 1))).read
        for name in names:
            units = written_units(os.path.join(self._queues, str(level - 1), name))
            used = units[is_message(units["size"].astype(np.int64))]
            for physical, size, code in used[-last if last is not None else 0 :].tolist():
                record = read_record(self._log, physical, check_crc=False)
                if record is None or record.size != size or record.topic != SCHEDULE_TOPIC.encode():
                    continue
                due = _extended(code, record.store_timestamp, read) if code <= extension.EXT_ADDRESS_MAX else code
                delay = due - record.store_timestamp
                if not record.prepared_transaction_offset and extension.is_delay(delay):
                    yield record.store_timestamp, delay


def _extended(address: int, stored_ms: int, read: extension.Read) -> int:
    """Return the deliver time in a unit of an extension; 0 if the unit is not that of the message."""
    head: NDArray[Any] = extension.heads(np.array([address], np.int64), read)[0]
    return int(head["tags_code"]) if head["store_time"] == stored_ms else 0


def _runs(delays: Iterator[tuple[int, int]]) -> list[_Run]:
    """Join store times and delays into runs, ascending. Of several delays at one time, `find` returns the longest."""
    found = np.fromiter(delays, _DELAYED)
    found = found[np.lexsort((found["delay_ms"], found["stored"]))]
    begins = np.flatnonzero(np.diff(found["delay_ms"], prepend=-1))
    firsts = found[begins]
    lasts = found["stored"][np.append(begins[1:], len(found)) - 1] if len(found) else begins
    rows = zip(firsts["stored"].tolist(), lasts.tolist(), firsts["delay_ms"].tolist(), strict=True)
    return [_Run(*row) for row in rows]
