"""Decides which messages still wait. Recovery, the slots at work, searches, the jobs' table `pending`, the audit and
compaction all use these functions, which work on arrays and read nothing.

A message waits as long as no record behind its own says that it was delivered or withdrawn. To find that out without
reading all records, three indexes cover the records before an offset, and the origins that the records behind it name
tell the rest:

    delay levels    `Run`s: messages of a run before its cursor are done, and all messages before the first run. Units
                    of the schedule topic's queues that are withdrawn, delivered or padding stand for no message
    timer wheel     units of the timer log in slots from the noted second on (`is_live`), except for
                        messages that were delivered since the second's turn began          `StartFacts.done`
                        units whose messages got another unit since then                    `StartFacts.moved`
                        withdrawn units, marked or named by records behind                  `StartFacts.withdrawn`
    timer topic     units of its queue from the noted offset on, which are not in the wheel yet (`is_behind`)

If RocketMQ's broker had the store last, there are no notes and no origins. Its files lag behind if it was killed, so a
message may be delivered twice:

    delay levels    config/delayOffset.json, a run for each level                           `runs_of_table`
    timer wheel     config/timercheck: slots from its read time on                          `second_of`
    timer topic     units behind the message of the timer log's last unit                   `enqueued_to`
    deletions       units that delete other messages, each only in its own slot             `is_deletion`

Offsets are physical or queue offsets, as named; positions are those of the timer log; seconds count from the epoch.

Keeps invariant 27 of ARCHITECTURE.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, overload

import numpy as np

from duemq.protocol.records.timer_properties import MAX_HASH, PRECISION_MS, slot_second
from duemq.scheduler.levels.runs import Run
from duemq.scheduler.timers.files.log import BLANK_SIZE
from duemq.scheduler.timers.files.small_files import StartFacts, TimerCheck, TimerNote
from duemq.scheduler.timers.files.sums import FileSum, LogSums
from duemq.scheduler.timers.files.unit import APPLIED, DELETE, MAX_DUE_MS, NO_MESSAGE, UNIT_SIZE, WITHDRAWN, seconds_of
from duemq.scheduler.timers.index.sorted_offsets import distinct_of, indices_of, is_among, union
from duemq.scheduler.timers.seconds.second import slot_second_of
from duemq.storage import file_names
from duemq.storage.queues.consume_queue import DELIVERED_SIZE, PADDING_SIZE

if TYPE_CHECKING:
    from array import array

    from numpy.typing import NDArray

    from duemq.scheduler.timers.files.log import Positions
    from duemq.scheduler.timers.files.unit import Units

    Integers = NDArray[np.int64]
    Mask = NDArray[np.bool_]


# --- delay levels


@overload
def is_passed(runs: Sequence[Run], queue_offsets: int) -> bool: ...


@overload
def is_passed(runs: Sequence[Run], queue_offsets: Integers) -> Mask: ...


def is_passed(runs: Sequence[Run], queue_offsets: int | Integers) -> bool | Mask:
    """Whether the message at each queue offset of a level is done according to the level's runs, which are in the order
    of their starts. All offsets before the first run are done, since a run is dropped when it is finished. Without
    runs, none is done."""
    if len(runs) <= 1:
        return queue_offsets < (runs[0].cursor if runs else 0)
    starts, cursors, *_ = zip(*runs, strict=True)
    at = np.maximum(np.searchsorted(starts, queue_offsets, "right") - 1, 0)
    passed: Mask = queue_offsets < np.array(cursors)[at]
    return passed


def is_message(sizes: Integers) -> Mask:
    """Whether each unit of a queue stands for a message that may wait, by its size field: the other units are marked as
    withdrawn or delivered, or are padding before the first message."""
    stands: Mask = (sizes > DELIVERED_SIZE) & (sizes != PADDING_SIZE)
    return stands


# --- the timer wheel


def is_live(units: Units, seconds: Integers, second: int) -> Mask:
    """Whether each unit of the timer log stands for a message in a slot that is not past. `seconds`: the seconds of the
    units' slots; `second`: the first second whose slot is not past."""
    live: Mask = (seconds >= second) & (units["magic"] & NO_MESSAGE == 0)
    return live


def is_deletion(magic: NDArray[np.integer]) -> Mask:
    """Whether each unit that is still to be done deletes another message when the turn of that message's slot comes.
    That is the unit's own slot, unless the unit has to roll."""
    deletes: Mask = magic & (DELETE | WITHDRAWN) == DELETE
    return deletes


def is_parked(units: Units, seconds: int | Integers) -> Mask:
    """Whether each unit belongs to a parked message, which waits in the slot of a later second than the one in which it
    is due. `seconds`: the seconds of the units' slots."""
    due = units["due_ms"].astype(np.int64)
    is_one = (due > 0) & (units["magic"] & NO_MESSAGE == 0)
    parked: Mask = is_one & (slot_second_of(due & MAX_DUE_MS) < seconds)
    return parked


def is_brought_back(units: Units, seconds: Integers, second: int, delivered: Integers) -> Mask:
    """Whether each unit belongs to a parked message, in a slot behind that of `second`, that according to records
    behind the note was delivered. `delivered`: physical offsets of delivered messages. A unit that has been cut off
    since had brought such a message back from its slot."""
    behind: Mask = (seconds > second) & is_parked(units, seconds)
    return behind & is_among(units["physical_offset"].astype(np.int64), delivered)


class UnitStates(NamedTuple):
    """The state of units of the timer log."""

    kept: Mask
    """Whether each unit is still to be done."""
    done: Mask
    """Whether each unit's message was delivered."""


def left_of(
    physical: Integers,
    positions: Positions,
    magic: NDArray[np.integer],
    due: Integers,
    seconds: int | Integers,
    *,
    noted: int,
    found: StartFacts,
) -> UnitStates:
    """Decide which units, in slots that are not past, are still to be done. `due`: the units' deliver times, ms since
    the epoch, 0 for units without one; `seconds`: the seconds of their slots, or the one second in whose slot all are;
    `noted`: the second in the checkpoint's note; `found`: the facts that a start found about the time since that
    second's turn began."""
    kept = magic & WITHDRAWN == 0
    kept &= (magic & DELETE == 0) | (due == 0)  # a unit with DELETE and a deliver time is superseded
    done = np.zeros(len(kept), bool)
    if len(found.moved) and np.any(is_noted := seconds == noted):
        # Only a message's newest unit counts, even if that unit is withdrawn.
        at, has_moved = indices_of(physical, found.moved)
        kept &= ~(has_moved & is_noted & (positions < found.moved_by[at]))
    if len(found.done) and np.any(is_early := seconds < found.recovered_to):
        done = kept & is_early & is_among(physical, found.done)
        kept &= ~done
    return UnitStates(kept, done)


def is_behind(units: NDArray[Any], found: StartFacts) -> Mask:
    """Whether each unit of the timer topic's queue that is not in the wheel yet stands for a waiting message. False for
    units whose tags code is a hash, as for messages of RocketMQ's broker and deleting records: only their records show
    that (`is_told_by_record`)."""
    physical = units["physical_offset"].astype(np.int64)
    waits = is_message(units["size"]) & (units["tags_code"] > MAX_HASH)
    waits &= ~is_among(physical, found.done) & ~is_among(physical, found.withdrawn)
    return waits


def is_told_by_record(units: NDArray[Any]) -> Mask:
    """Whether, for each unit of the timer topic's queue, only its record shows if a message waits there."""
    return is_message(units["size"]) & (units["tags_code"] <= MAX_HASH)


# --- the time behind the note


def found_since(
    second: int,
    before: StartFacts,
    *,
    delivered: Sequence[array[int] | Integers],
    withdrawn: Sequence[array[int] | Integers],
    newest_ms: int,
    end: int,
) -> StartFacts:
    """Combine the facts that the last start found (`before`) with the origins of delivered and withdrawn messages that
    records name. `second`: the noted one; `newest_ms`: the latest store time of a delivery; `end`: the end of the
    commitlog."""
    # Messages are delivered only from slots whose turn has come, and no slot has its turn before its time. So a message
    # that a record delivered was in the slot of the record's store time or in an earlier slot; or in the slot of
    # `second`, if that slot was ahead because the clock had been set back. No margin is needed.
    return StartFacts(
        max(slot_second(newest_ms) + 1, second + 1, before.recovered_to),
        # Records that the commitlog lost no longer exist, and other messages will get their offsets.
        _before(end, union([before.done, *delivered])),
        withdrawn=_before(end, union([before.withdrawn, *withdrawn])),
    )


def _before(end: int, offsets: Integers) -> Integers:
    return offsets[: int(np.searchsorted(offsets, end))]


def with_moved(found: StartFacts, second: int, before: StartFacts, parts: Iterable[tuple[int, Units]]) -> StartFacts:
    """Add to `found` the messages that got units in the slot of the noted second or a later one since that second's
    turn began, each with its last unit: a policy may have put a message off within its second. `second`: the noted one;
    `before`: the facts that the last start found; `parts`: the parts of the timer log since the turn began, as
    `TimerLog.scan` yields them."""
    physical, positions = [before.moved], [before.moved_by]
    for position, units in parts:
        # Withdrawn units count as well, so that a message's former unit does not count again.
        later = np.flatnonzero(seconds_of(units) >= second)
        physical.append(units["physical_offset"][later].astype(np.int64))
        positions.append(position + later * UNIT_SIZE)
    # The arrays are reversed, so that the first occurrence of each message is its last unit.
    moved, at, _ = distinct_of(np.concatenate(physical)[::-1])
    return found._replace(moved=moved, moved_by=np.concatenate(positions)[::-1][at])


def first_link(units: Units, seconds: Integers, second: int) -> int:
    """Return the lowest position to which units in slots that are not past link, as each unit links to the preceding
    unit of its slot; 2**62 if there is no link. `seconds`: the seconds of the units' slots; `second`: the first second
    whose slot is not past."""
    links = units["previous"][(seconds >= second) & (units["previous"] >= 0)]
    return int(links.min(initial=2**62))


def is_covering(check: TimerCheck, begin: int, end: int, segment_size: int, links: Iterable[int]) -> bool:
    """Whether a timer log with units from position `begin` to `end` has all units that RocketMQ's broker has put into
    it. `segment_size`: the size of its files, in bytes; `links`: the links of its units (`first_link`)."""
    left = segment_size - end % segment_size
    if left < UNIT_SIZE + BLANK_SIZE:  # the file is full, and RocketMQ's position includes its rest
        end += left
    return check.log_position <= end and all(link >= begin for link in links)


def is_covered(note: TimerNote, begin: int, end: int) -> bool:
    """Whether a timer log with positions from `begin` to `end` has all units that the note refers to."""
    return begin <= note.log_since and note.log_end <= end


class LogCheck:
    """The comparison of the timer log with its noted checksums. If they differ, the log is not used: instead the timer
    topic's queue and the origins in the whole commitlog tell which messages wait."""

    def __init__(self, segment_size: int, noted: Mapping[int, FileSum], withdrawn: Integers) -> None:
        """Begin a comparison. `segment_size`: the size of the log's files, in bytes. `noted`: the checksums;
        `withdrawn`: physical offsets of messages that were withdrawn since, whose marks may or may not be in the files
        yet."""
        self.sums = LogSums(segment_size)
        """Checksums of the present log."""
        self._noted = noted
        self._withdrawn = withdrawn
        self._as_noted = LogSums(segment_size) if len(withdrawn) else self.sums

    def add(self, position: int, units: Units) -> None:
        """Add the units from a position on, as `LogSums.add` does."""
        self.sums.add(position, units)
        if self._as_noted is not self.sums:
            self._as_noted.add(position, _without_marks(units, self._withdrawn))

    @property
    def trouble(self) -> str | None:
        """A text that describes the first difference; None if there is none."""
        there = self._as_noted.by_file
        for base in sorted(there.keys() | self._noted.keys()):
            if self._noted.get(base) != there.get(base):
                what = "differs from what was written: its checksum is wrong" if base in there else "is missing"
                return f"{file_names.TIMER_LOG}/{base:020} {what}"
        return None


def _without_marks(units: Units, physical_offsets: Integers) -> Units:
    """Return units as they were before messages, given by their physical offsets, were withdrawn."""
    # A unit that stood for no message from the beginning may look like one that was withdrawn since: the last unit of a
    # clean stop names the newest message, which may be withdrawn later.
    is_one = (units["magic"] & WITHDRAWN != 0) & (units["due_ms"] != APPLIED)
    is_one &= is_among(units["physical_offset"].astype(np.int64), physical_offsets)
    if not is_one.any():
        return units
    result = units.copy()
    result["magic"][is_one] &= ~NO_MESSAGE  # RocketMQ's 2 is not restored, as it is in no checksum
    return result


# --- RocketMQ's files


def runs_of_table(table: Mapping[int, int]) -> dict[int, list[Run]]:
    """Return the runs of levels according to delayOffset.json. `table`: the next queue offset by level."""
    return {level: [Run(0, offset)] for level, offset in table.items()}


def second_of(check: TimerCheck) -> int:
    """Return the second, since the epoch, whose slot is to be read next; 0 if timercheck has none."""
    return check.read_ms // PRECISION_MS


def enqueued_to(check: TimerCheck, behind_last: int | None) -> int:
    """Return the queue offset of the timer topic's next message to be put into the wheel. `behind_last`: the queue
    offset behind the message of the timer log's last unit, None without one."""
    return min(behind_last, check.master_queue_offset) if behind_last is not None else check.queue_offset
