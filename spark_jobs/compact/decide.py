"""Second step of compacting: which records stay, and why the others are removed.

One task for each range works from the results of `compact.scan` and the store's files of progress (`compact.state`);
the commitlog is not read again. Adds to the scan's arrays:

    <n>.keep     bool, whether each record stays
    <n>.reasons  uint8, why each record is removed, as its index in REASONS + 1; 0 for one that stays

    why a record goes   "delivered"    a scheduled message that was delivered, or that the broker has passed
                        "cancelled"    a scheduled message that was cancelled or waits by another record, or a
                                       deletion that is done
                        "ended"        a half message, or an op message, of a transaction that is over
                        "expired"      a message older than asked for
                        "superseded"   a newer message of its queue has the same key
                        "deleted"      a message of a topic that was deleted
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from duemq.scheduler.timers.index.sorted_offsets import is_among, union
from duemq.scheduler.waiting import is_passed
from duemq.spark_jobs.compact.scan import (
    HALF,
    KEYED,
    KEYED_MESSAGE,
    LEVEL,
    OP,
    PLAIN,
    TIMER,
    TIMER_AGAIN,
    TIMER_DELETE,
)
from duemq.spark_jobs.compact.state import DoneRules
from duemq.spark_jobs.writers.spill import OffsetMap, load, save

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from duemq.spark_jobs.writers.layout import Piece

    Integers = NDArray[np.int64]
    Flags = NDArray[np.bool_]

REASONS: Final = ("delivered", "cancelled", "ended", "expired", "superseded", "deleted")


class DecideTask(NamedTuple):
    """A range to decide on. `start`: its physical offset."""

    number: int
    start: int
    scratch: str
    rules: DoneRules


class Decided(NamedTuple):
    """The decision on a range: number and bytes of records that stay; (records, bytes) to remove by reason; number of
    records that stay by queue of the schedule topic; and number of messages removed because the broker has passed them,
    although no record names them as delivered. The last may be lost (see `compact.lost`)."""

    number: int
    kept: int
    kept_size: int
    removed: dict[str, tuple[int, int]]
    levels: dict[int, int]
    unnamed: int


def decide(task: DecideTask) -> Decided:
    """Decide on a range. Raises OSError."""
    number, scratch, rules = task.number, task.scratch, task.rules
    sizes = load(scratch, f"{number}.sizes").astype(np.int64)
    kinds = np.asarray(load(scratch, f"{number}.kinds"))
    physical = load(scratch, f"{number}.starts").astype(np.int64) + task.start
    reasons = np.zeros(len(sizes), np.uint8)  # 0: it stays; else its index in REASONS + 1

    def remove(rows: Integers, gone: Flags, reason: str) -> None:
        rows = rows[gone]
        reasons[rows[reasons[rows] == 0]] = REASONS.index(reason) + 1

    unnamed = 0
    special = load(scratch, f"{number}.special")
    of_kind = kinds[special["number"]]
    for kind in (LEVEL, TIMER, TIMER_AGAIN, TIMER_DELETE, HALF, OP):
        mine = special[of_kind == kind]
        if not len(mine):
            continue
        rows, offsets = mine["number"].astype(np.int64), mine["queue_offset"]
        here = physical[rows]
        if kind in (HALF, OP):
            remove(rows, offsets < (rules.half_offset if kind == HALF else rules.op_offset), "ended")
            continue
        remove(rows, is_among(here, load(scratch, "withdrawn")), "cancelled")
        remove(rows, is_among(here, load(scratch, "delivered")), "delivered")
        left = int((reasons[rows] == 0).sum())
        if kind == LEVEL:
            for queue_id in np.unique(mine["queue_id"]).tolist():
                of_queue = mine["queue_id"] == queue_id
                remove(rows[of_queue], is_passed(rules.levels.get(queue_id + 1, []), offsets[of_queue]), "delivered")
        elif rules.timers_enqueued is not None:
            is_waiting = (offsets >= rules.timers_enqueued) | is_among(here, load(scratch, "live"))
            remove(rows, ~is_waiting, "cancelled" if kind == TIMER_DELETE else "delivered")
        if kind != TIMER_DELETE:
            unnamed += left - int((reasons[rows] == 0).sum())
    messages = np.flatnonzero((kinds == PLAIN) | (kinds == KEYED_MESSAGE))
    remove(messages, is_among(physical[messages], load(scratch, "deleted")), "deleted")
    if rules.expired_before > task.start:
        remove(messages, physical[messages] < rules.expired_before, "expired")
    keyed = np.flatnonzero(kinds == KEYED_MESSAGE)
    if len(keyed):
        remove(keyed, is_among(physical[keyed], load(scratch, "superseded")), "superseded")
    for name in ("forced", "undelivered"):
        reasons[is_among(physical, load(scratch, name))] = 0
    keep = reasons == 0
    save(scratch, f"{number}.keep", keep)
    save(scratch, f"{number}.reasons", reasons)
    counts = np.bincount(reasons, minlength=len(REASONS) + 1)
    bytes_of = np.bincount(reasons, sizes, minlength=len(REASONS) + 1)
    removed = {reason: (int(counts[at]), int(bytes_of[at])) for at, reason in enumerate(REASONS, start=1) if counts[at]}
    levels = special[(of_kind == LEVEL) & keep[special["number"]]]["queue_id"]
    found, of_queue_counts = np.unique(levels, return_counts=True)
    kept_levels = dict(zip(found.tolist(), of_queue_counts.tolist(), strict=True))
    return Decided(number, int(counts[0]), int(bytes_of[0]), removed, kept_levels, unnamed)


def join_done(scratch: str, numbers: range) -> None:
    """Join the physical offsets of done messages from all ranges and the files of progress."""
    for name, known in (("delivered", "delivered.known"), ("withdrawn", "withdrawn.units")):
        more = load(scratch, known)
        parts = [np.asarray(load(scratch, f"{number}.{name}")) for number in numbers]
        save(scratch, name, union([np.asarray(more), *parts]))


def find_superseded(scratch: str, numbers: range, *, expired_before: int, units_per_file: int, holes: bool) -> int:
    """Find the messages superseded by a newer one with the same key in the same queue, and save those that may be
    removed. Return the number of those that must stay anyway.

    A message may be removed if everything before it in its queue is: the queue then begins later, as it does when files
    expire. With `holes` others may be removed too, except the last in each file of the queue, by which brokers
    determine the file's age.
    """
    rows = np.concatenate([np.empty(0, KEYED), *(np.asarray(load(scratch, f"{number}.keys")) for number in numbers)])
    # Queues of a topic that was deleted and created again are not continuations of the earlier ones.
    rows = rows[~is_among(rows["physical_offset"], load(scratch, "deleted"))]
    if not len(rows):
        save(scratch, "superseded", np.empty(0, np.int64))
        return 0
    identity = ("hash1", "hash2", "has_key", "queue_id", "topic")
    order = np.lexsort((rows["queue_offset"], *(rows[name] for name in identity)))
    ordered = rows[order]
    is_same = np.ones(len(rows) - 1, np.bool_)
    for name in identity:
        is_same &= ordered[name][1:] == ordered[name][:-1]
    superseded = np.zeros(len(rows), np.bool_)
    superseded[order[:-1][is_same]] = True
    superseded &= rows["has_key"]
    expired = rows["physical_offset"] < expired_before
    gone = superseded | expired
    by_queue = np.lexsort((rows["queue_offset"], rows["queue_id"], rows["topic"]))
    queue = rows[["topic", "queue_id"]][by_queue]
    firsts = np.flatnonzero(np.concatenate(([True], queue[1:] != queue[:-1])))
    may_go = np.zeros(len(rows), np.bool_)
    for first, end in zip(firsts.tolist(), [*firsts[1:].tolist(), len(rows)], strict=True):
        mine = by_queue[first:end]
        prefix = np.logical_and.accumulate(gone[mine])
        may_go[mine] = prefix
        if holes:
            is_last_of_file = rows["queue_offset"][mine] % units_per_file == units_per_file - 1
            may_go[mine] |= gone[mine] & ~is_last_of_file
    removed = superseded & may_go
    save(scratch, "superseded", np.sort(rows["physical_offset"][removed]))
    return int((superseded & ~may_go & ~expired).sum())


class KeptAfterAll(NamedTuple):
    """A record that stays although it was to be removed: its range, its size in bytes, the reason for its removal, and
    whether it is a message of a queue that consumers read."""

    number: int
    size: int
    reason: str
    is_message: bool


def keep_one(scratch: str, starts: list[int], physical: int) -> KeptAfterAll | None:
    """Keep the record at a physical offset. `starts`: those of the ranges. None if it stays anyway, or there is no
    record."""
    number = int(np.searchsorted(starts, physical, "right")) - 1
    if number < 0:
        return None
    positions = load(scratch, f"{number}.starts")
    row = int(np.searchsorted(positions, physical - starts[number]))
    keep = np.array(load(scratch, f"{number}.keep"))
    if row == len(positions) or positions[row] != physical - starts[number] or keep[row]:
        return None
    keep[row] = True
    save(scratch, f"{number}.keep", keep)
    reason = REASONS[int(load(scratch, f"{number}.reasons")[row]) - 1]
    is_message = int(load(scratch, f"{number}.kinds")[row]) in (PLAIN, KEYED_MESSAGE)
    return KeptAfterAll(number, int(load(scratch, f"{number}.sizes")[row]), reason, is_message)


def done_by(scratch: str, numbers: range, physical: Integers) -> Integers:
    """Return the physical offsets of the records that say that the records at some physical offsets, ascending, are
    done. If one of the latter stays, the record that says so must stay too, since audits and rebuilt queues rely on the
    records."""
    parts = [np.empty(0, np.int64)]
    for number in numbers:
        for name in ("delivered", "withdrawn"):
            named = load(scratch, f"{number}.{name}")
            parts.append(load(scratch, f"{number}.{name}_by")[is_among(named, physical)])
    return np.unique(np.concatenate(parts))


class MapTask(NamedTuple):
    """A range whose new offsets are to be saved. `at`: number of records before it that stay."""

    number: int
    start: int
    at: int
    scratch: str
    pieces: list[Piece]


def write_map(task: MapTask) -> None:
    """Save the new offsets of a range's records. Raises OSError."""
    from duemq.spark_jobs.writers.layout import offsets

    keep = load(task.scratch, f"{task.number}.keep")
    old = load(task.scratch, f"{task.number}.starts")[keep].astype(np.int64) + task.start
    sizes = kept_sizes(task.scratch, task.number)
    OffsetMap.fill(task.scratch, task.at, old, offsets(task.pieces, sizes))


def kept_sizes(scratch: str, number: int) -> Integers:
    """Return the sizes in bytes of a range's records that stay."""
    kept: Integers = load(scratch, f"{number}.sizes")[load(scratch, f"{number}.keep")].astype(np.int64)
    return kept
