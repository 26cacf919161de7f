"""Writing the timer log, the wheel and timercheck of a new commitlog: the waiting messages, in the slots in which they
waited, with the new offsets of their records. `scheduler.timers.files.log`, `timers.files.wheel` and
`timers.files.small_files` own the layouts and write them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

import numpy as np

from duemq.scheduler.timers.files import small_files
from duemq.scheduler.timers.files.log import TimerLog
from duemq.scheduler.timers.files.small_files import StartFacts
from duemq.scheduler.timers.files.unit import APPLIED, DELETE, NORMAL, UNIT, UNIT_SIZE, WITHDRAWN, seconds_of
from duemq.scheduler.timers.files.wheel import HOUR, TimerWheel
from duemq.scheduler.timers.index.sorted_offsets import is_among, union
from duemq.storage import file_names
from duemq.storage.files import OsFiles

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from duemq.spark_jobs.compact.state import TimerProgress
    from duemq.spark_jobs.writers.spill import OffsetMap

    Integers = NDArray[np.int64]

_AT_ONCE: Final = 1 << 16


def write(
    root: str, timers: TimerProgress, offsets: OffsetMap, newest: tuple[int, int], log_end: int, found: StartFacts
) -> small_files.TimerNote | None:
    """Write the timers' files into a store. `newest`: new physical offset and size of the message that was put into the
    wheel last, (-1, 0) without one; `log_end`: where the new commitlog ends; `found`: records that stay though their
    messages do not wait, by new physical offsets. Return the checkpoint's note if the old store had one. Raises
    OSError."""
    files = OsFiles()
    log = TimerLog(files, os.path.join(root, file_names.TIMER_LOG), timers.segment_size)
    wheel = TimerWheel(files, os.path.join(root, file_names.TIMER_WHEEL))
    wheel.clear()
    waiting: dict[int, int] = {}
    for first in range(0, len(timers.live), _AT_ONCE):
        units = timers.live[first : first + _AT_ONCE]
        physical = offsets.new(units["physical_offset"].astype(np.int64))
        # Joined arrays have the machine's byte order; UNIT has that of the file.
        waits = (physical >= 0) & ~is_among(physical, union([found.done, found.withdrawn]))
        units, physical = units[waits].astype(UNIT), physical[waits]
        if not len(units):
            continue
        positions = log.positions(len(units))
        plan = wheel.plan(seconds_of(units), positions)
        units["previous"], units["physical_offset"] = plan.previous, physical
        log.append(units, positions)
        wheel.put(plan)
        is_message = units["magic"] & DELETE == 0
        for key, count in zip(*np.unique(units["topic_hash"][is_message], return_counts=True), strict=True):
            waiting[int(key)] = waiting.get(int(key), 0) + int(count)
    _mark_newest(log, timers, newest)
    wheel.establish()
    check = timers.check or small_files.TimerCheck()
    check = small_files.TimerCheck(
        check.read_ms or timers.second * 1000,
        log.end,
        timers.enqueued,
        timers.enqueued,
        check.state_version,
        check.version_ms,
        check.counter,
    )
    small_files.save_check(files, os.path.join(root, file_names.TIMER_CHECK), check)
    note = None
    if timers.note is not None:
        old = timers.note
        sums = small_files.Sums(log.sums.by_file, wheel.sums)
        note = small_files.TimerNote(
            old.second,
            log_end,
            log.end,
            log.end,
            old.queue_offset,
            old.policy_end,
            log_end,
            waiting,
            found,
            sums=sums,
        )
    log.close()
    wheel.close()
    return note


def _mark_newest(log: TimerLog, timers: TimerProgress, newest: tuple[int, int]) -> None:
    """Append a unit that points to the message put into the wheel last, since Apache's broker continues behind the
    message of the log's last unit. It stands for no message, and lies in a slot of the past. duemq does the same at
    each clean stop."""
    physical, size = newest
    last = log.last() if log.end else None
    if physical < 0 or (last is not None and int(last["physical_offset"]) == physical):
        return
    mark = np.zeros(1, UNIT)
    write_ms = timers.second * 1000
    mark["size"], mark["previous"], mark["magic"] = UNIT_SIZE, -1, NORMAL | WITHDRAWN
    mark["write_ms"], mark["delay_ms"] = write_ms, -HOUR * 1000
    mark["physical_offset"], mark["record_size"] = physical, size
    mark["due_ms"] = APPLIED
    log.append(mark, log.positions(1))
