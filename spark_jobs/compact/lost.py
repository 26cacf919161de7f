"""A step between those of compacting: finds the messages that are lost although the broker's progress counts them as
done.

The progress says how far the broker came, not whether it delivered the messages that it passed. duemq's deliveries name
their messages. To find the messages that RocketMQ delivered, and those that no broker delivered, the commitlog is read
once more and matched as in the audit (`audit.matching`), except for records that are named. That is only done for
stores with such messages: a store that only duemq had has none, unless some were lost.

    read     a task a range     <n>.waits, <n>.done        WAITS and DONE, by bucket of `cases.bucket_of`
                                <n>.again                  WAITS of records that are done, and waited in place of others
                                                           that they do not name: the others are done, too
                                <n>.waits.at, ...          int64, where each bucket begins in them, and the last ends
    match    a task a bucket
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from duemq.scheduler.timers.index.sorted_offsets import is_among
from duemq.spark_jobs.audit.events import DONE, WAITS
from duemq.spark_jobs.audit.figures import CANCELLED, LOST, PENDING
from duemq.spark_jobs.audit.matching import bucket_of, closed_of, match_by_key, read_range
from duemq.spark_jobs.writers.spill import load, save

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from duemq.spark_jobs.store.progress import Progress
    from duemq.spark_jobs.store.store_files import StoreFiles
    from duemq.spark_jobs.store.walks import Range

    Integers = NDArray[np.int64]

_ROWS: Final = {"waits": WAITS, "done": DONE, "again": WAITS}


class ReadTask(NamedTuple):
    """A range to read. `buckets`: their number."""

    store: StoreFiles
    part: Range
    number: int
    scratch: str
    progress: Progress
    buckets: int


class MatchTask(NamedTuple):
    """A bucket to match. `ranges`: their number; `asked`: physical offsets, ascending, of messages whose deliveries are
    wanted."""

    bucket: int
    ranges: int
    scratch: str
    asked: Integers


class MatchResult(NamedTuple):
    """Physical offsets of messages that were neither delivered nor cancelled; and of the delivered messages among those
    in `MatchTask.asked`, with the offsets of their first deliveries."""

    undelivered: Integers
    asked: Integers
    deliveries: Integers


def read(task: ReadTask) -> None:
    """Save the rows of a range that are to be matched: those that no record names. Raises JobError, OSError."""
    found = read_range(task.store, task.part, task.progress)
    is_done = is_among(found.waits["offset"], load(task.scratch, "delivered"))
    is_done |= is_among(found.waits["offset"], load(task.scratch, "withdrawn"))
    again = found.waits[is_done & found.waits["again"]]
    for name, rows in (
        ("waits", found.waits[~is_done]),
        ("done", found.done[found.done["origin"] < 0]),
        ("again", again),
    ):
        bucket = bucket_of(rows["message"], task.buckets)
        order = np.argsort(bucket, kind="stable")
        save(task.scratch, f"{task.number}.{name}", rows[order])
        save(task.scratch, f"{task.number}.{name}.at", np.searchsorted(bucket[order], np.arange(task.buckets + 1)))


def match_bucket(task: MatchTask) -> MatchResult:
    """Match a bucket. Raises OSError."""
    cases = match_by_key(_rows(task, "waits"), _rows(task, "done"), closed_of(_rows(task, "again"), CANCELLED))
    is_open = (cases["status"] == LOST) | (cases["status"] == PENDING)
    physical = cases["physical_offset"].astype(np.int64)
    asked = is_among(physical, task.asked) & (cases["deliveries"] > 0)
    return MatchResult(np.sort(physical[is_open]), physical[asked], cases["first_offset"][asked].astype(np.int64))


def _rows(task: MatchTask, name: str) -> NDArray[Any]:
    parts: list[NDArray[Any]] = [np.empty(0, _ROWS[name])]
    for number in range(task.ranges):
        begin, end = load(task.scratch, f"{number}.{name}.at")[task.bucket : task.bucket + 2].tolist()
        parts.append(load(task.scratch, f"{number}.{name}")[begin:end])
    return np.concatenate(parts)
