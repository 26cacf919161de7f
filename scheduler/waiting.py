"""What still waits: decided here, for whoever asks. Recovery, the slots at work, searches, the jobs' table `pending`,
the audit and the compaction all ask these functions, which are of arrays, and read nothing.

A message waits, as long as no record behind its own says that it was delivered or withdrawn. Nobody reads all records
to know; three books stand for those before a place, and the origins of the records behind it say the rest:

    delay levels    `Run`s: within a run what lies before the cursor is done, and before the first run everything. Units
                    of the schedule topic's queues that are withdrawn, or fill a queue up, stand for no message
    timer wheel     units of the timer log in slots from the noted second on (`is_live`), but for
                        messages that were delivered since the second's turn began          `Found.done`
                        units that their message left for another one since then            `Found.moved`
                        withdrawn ones, which are marked, or are named by records behind    `Found.withdrawn`
    timer topic     units of its queue from the noted offset on are in the wheel not yet (`is_behind`)

Where RocketMQ's broker had the store last there are no notes and no origins to go by, and its books are behind after a
kill; so a message may come twice:

    delay levels    config/delayOffset.json, a run for each level                           `runs_of_table`
    timer wheel     config/timercheck: slots from its read time on                          `second_of`
    timer topic     what lies behind the message of the timer log's last unit               `enqueued_to`
    deletions       units that delete others, each in the slot of those alone               `is_deletion`

Physical and queue offsets, positions in the timer log, seconds since the epoch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, overload

import numpy as np

from duemq.protocol.records.timer_properties import MAX_HASH, PRECISION_MS, slot_second
from duemq.scheduler.levels.runs import Run
from duemq.scheduler.timers.files.formats import Found, TimerCheck, TimerNote
from duemq.scheduler.timers.files.log import (
    APPLIED,
    BLANK_SIZE,
    DELETE,
    MAX_DUE_MS,
    NO_MESSAGE,
    UNIT_SIZE,
    WITHDRAWN,
    seconds_of,
)
from duemq.scheduler.timers.files.sums import FileSum, LogSums
from duemq.scheduler.timers.index.sorted_offsets import distinct_of, is_among, joined, places_of
from duemq.scheduler.timers.second import slot_second_of
from duemq.storage.queues.consume_queue import DELIVERED_SIZE, PADDING_SIZE

if TYPE_CHECKING:
    from array import array

    from numpy.typing import NDArray

    from duemq.scheduler.timers.files.log import Positions, Units

    Integers = NDArray[np.int64]
    Mask = NDArray[np.bool_]


# --- delay levels


@overload
def is_passed(runs: Sequence[Run], queue_offsets: int) -> bool: ...


@overload
def is_passed(runs: Sequence[Run], queue_offsets: Integers) -> Mask: ...


def is_passed(runs: Sequence[Run], queue_offsets: int | Integers) -> bool | Mask:
    """Which queue offsets of a level its runs, in order of their starts, have done with: before the first run
    everything, since a run goes when all of it is done. A level of which nothing is known has one run, at 0."""
    if len(runs) <= 1:
        return queue_offsets < (runs[0].cursor if runs else 0)
    starts, cursors, *_ = zip(*runs, strict=True)
    at = np.maximum(np.searchsorted(starts, queue_offsets, "right") - 1, 0)
    passed: Mask = queue_offsets < np.array(cursors)[at]
    return passed


def is_message(sizes: Integers) -> Mask:
    """Which units of a queue stand for messages that may wait, by the sizes that they say: the others were withdrawn,
    or delivered, or fill the queue up to its first message."""
    stands: Mask = (sizes > DELIVERED_SIZE) & (sizes != PADDING_SIZE)
    return stands


# --- the timer wheel


def is_live(units: Units, seconds: Integers, second: int) -> Mask:
    """Which units of the timer log are of messages, and in slots that are not past. `seconds`: of their slots;
    `second`: all slots before it are past."""
    live: Mask = (seconds >= second) & (units["magic"] & NO_MESSAGE == 0)
    return live


def is_deletion(magic: NDArray[np.integer]) -> Mask:
    """Which units, of those that are still to be done, delete others when the turn of their messages' slot comes, which
    is theirs unless they roll on."""
    deletes: Mask = magic & (DELETE | WITHDRAWN) == DELETE
    return deletes


def is_parked(units: Units, seconds: int | Integers) -> Mask:
    """Which units, in the slots of some seconds, are of messages that are due before those and wait there, as a pause
    lets them."""
    due = units["due_ms"].astype(np.int64)
    is_one = (due > 0) & (units["magic"] & NO_MESSAGE == 0)
    parked: Mask = is_one & (slot_second_of(due & MAX_DUE_MS) < seconds)
    return parked


def is_brought_back(units: Units, seconds: Integers, second: int, delivered: Integers) -> Mask:
    """Which of them, in slots behind that of `second`, are of messages that are `delivered`, as records behind the note
    say: by units that were cut off since."""
    behind: Mask = (seconds > second) & is_parked(units, seconds)
    return behind & is_among(units["physical_offset"].astype(np.int64), delivered)


class Left(NamedTuple):
    """Of units of the timer log..."""

    kept: Mask
    """...those that are still to be done..."""
    done: Mask
    """...and those whose messages were delivered."""


def left_of(
    physical: Integers,
    positions: Positions,
    magic: NDArray[np.integer],
    due: Integers,
    seconds: int | Integers,
    noted: int,
    found: Found,
) -> Left:
    """Which units, in slots that are not past, are still to be done, after what is `found` of the time since the turn
    of the `noted` second began. `due`: their deliver times, 0 where they do not tell; `seconds`: of their slots, or of
    the one in which all are."""
    kept = magic & WITHDRAWN == 0
    kept &= (magic & DELETE == 0) | (due == 0)  # else superseded
    done = np.zeros(len(kept), bool)
    if len(found.moved) and np.any(is_noted := seconds == noted):
        # The newest unit counts, whatever became of it.
        at, has_moved = places_of(physical, found.moved)
        kept &= ~(has_moved & is_noted & (positions < found.moved_by[at]))
    if len(found.done) and np.any(is_early := seconds < found.recovered_to):
        done = kept & is_early & is_among(physical, found.done)
        kept &= ~done
    return Left(kept, done)


def is_behind(units: NDArray[Any], found: Found) -> Mask:
    """Which units of the timer topic's queue that are not in the wheel stand for messages that wait. Of those with a
    hash for tags code, as RocketMQ's broker writes them and as records have that delete, only the record tells: they
    are left out (`is_told_by_record`)."""
    physical = units["physical_offset"].astype(np.int64)
    waits = is_message(units["size"]) & (units["tags_code"] > MAX_HASH)
    waits &= ~is_among(physical, found.done) & ~is_among(physical, found.withdrawn)
    return waits


def is_told_by_record(units: NDArray[Any]) -> Mask:
    """Of which units of the timer topic's queue only the record tells whether a message waits there."""
    return is_message(units["size"]) & (units["tags_code"] <= MAX_HASH)


# --- what is found of the time behind the note


def found_since(
    second: int,
    before: Found,
    delivered: Sequence[array[int] | Integers],
    withdrawn: Sequence[array[int] | Integers],
    newest_ms: int,
    end: int,
) -> Found:
    """What a start knows of messages that its books have as waiting: what the start before it knew, and the origins
    that records name. `second`: the noted one; `newest_ms`: the latest store time of a delivery; `end`: of the
    commitlog."""
    # The slot of a second that has not had its turn has nothing delivered, and none has its turn before its time.
    # So what a record delivered was in a slot of its store time at the latest, or of `second`, where that was
    # ahead because the clock was set back. No margin is needed.
    return Found(
        max(slot_second(newest_ms) + 1, second + 1, before.recovered_to),
        # What the commitlog lost is no more, and other messages will have those places.
        _before(end, joined([before.done, *delivered])),
        withdrawn=_before(end, joined([before.withdrawn, *withdrawn])),
    )


def _before(end: int, offsets: Integers) -> Integers:
    return offsets[: int(np.searchsorted(offsets, end))]


def with_moved(found: Found, second: int, before: Found, parts: Iterable[tuple[int, Units]]) -> Found:
    """`found` with what got units in the slot of the noted second or a later one since that second's turn began, and
    the last of those: a policy may have put a message off within its second. `before`: what the start before knew;
    `parts`: of the timer log since the turn began, as `TimerLog.scan` gives them."""
    physical, positions = [before.moved], [before.moved_by]
    for position, units in parts:
        # Also one that was withdrawn there: what it had before does not come to life again.
        later = np.flatnonzero(seconds_of(units) >= second)
        physical.append(units["physical_offset"][later].astype(np.int64))
        positions.append(position + later * UNIT_SIZE)
    # Of each the last unit, which is the first one backwards.
    moved, at, _ = distinct_of(np.concatenate(physical)[::-1])
    return found._replace(moved=moved, moved_by=np.concatenate(positions)[::-1][at])


def first_link(units: Units, seconds: Integers, second: int) -> int:
    """The lowest position to which units of slots that are not past link, which are those of the same slots before
    them; a high number where none does. `seconds`: of their slots; `second`: all slots before it are past."""
    links = units["previous"][(seconds >= second) & (units["previous"] >= 0)]
    return int(links.min(initial=2**62))


def is_covering(check: TimerCheck, begin: int, end: int, segment_size: int, links: Iterable[int]) -> bool:
    """Whether a timer log that has units from position `begin` to `end` has all that RocketMQ's broker had put into it.
    `segment_size`: of its files, in bytes; `links`: of its units (`first_link`)."""
    left = segment_size - end % segment_size
    if left < UNIT_SIZE + BLANK_SIZE:  # the file is full, and RocketMQ counts its rest
        end += left
    return check.log_position <= end and all(link >= begin for link in links)


def is_covered(note: TimerNote, begin: int, end: int) -> bool:
    """Whether a timer log that has the positions from `begin` to `end` has what the note is of."""
    return begin <= note.log_since and note.log_end <= end


class LogCheck:
    """Whether the timer log is the one that was noted: one that is not says nothing, and the queue and the origins of
    the whole commitlog decide."""

    def __init__(self, segment_size: int, noted: Mapping[int, FileSum], withdrawn: Integers) -> None:
        """`noted`: the checksums; `withdrawn`: physical offsets of messages that were withdrawn since, whose marks may
        be in the files, or not yet."""
        self.sums = LogSums(segment_size)
        """Of the log as it is."""
        self._noted = noted
        self._withdrawn = withdrawn
        self._as_noted = LogSums(segment_size) if len(withdrawn) else self.sums

    def add(self, position: int, units: Units) -> None:
        """Units from a position on, as `LogSums.add`."""
        self.sums.add(position, units)
        if self._as_noted is not self.sums:
            self._as_noted.add(position, _without_marks(units, self._withdrawn))

    @property
    def trouble(self) -> str | None:
        """What is wrong; None where nothing is."""
        there = self._as_noted.by_file
        for base in sorted(there.keys() | self._noted.keys()):
            if self._noted.get(base) != there.get(base):
                what = "is not as it was written: its checksum is another" if base in there else "is missing"
                return f"timerlog/{base:020} {what}"
        return None


def _without_marks(units: Units, physical_offsets: Integers) -> Units:
    """Units as they were before some messages were withdrawn."""
    # A unit that stands for no message may look like one that was withdrawn since, and was written so: the last one of
    # a clean stop is of the newest message, whatever becomes of that.
    is_one = (units["magic"] & WITHDRAWN != 0) & (units["due_ms"] != APPLIED)
    is_one &= is_among(units["physical_offset"].astype(np.int64), physical_offsets)
    if not is_one.any():
        return units
    result = units.copy()
    result["magic"][is_one] &= ~NO_MESSAGE  # but for RocketMQ's 2, which is in no checksum
    return result


# --- RocketMQ's books


def runs_of_table(table: Mapping[int, int]) -> dict[int, list[Run]]:
    """The levels' runs by delayOffset.json, next queue offset by level."""
    return {level: [Run(0, offset)] for level, offset in table.items()}


def second_of(check: TimerCheck) -> int:
    """The second whose slot is read next; 0 where timercheck knows none."""
    return check.read_ms // PRECISION_MS


def enqueued_to(check: TimerCheck, behind_last: int | None) -> int:
    """The next queue offset of the timer topic to be put into the wheel. `behind_last`: the one behind the message of
    the timer log's last unit, None where that has none."""
    return min(behind_last, check.master_queue_offset) if behind_last is not None else check.queue_offset
