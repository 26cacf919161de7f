"""Writing the consume queues of a new commitlog. Queue offsets stay, so that consumer groups continue at their own; a
removed record leaves a unit that stands for no record. One task for some queues.

    unit:  | physical offset: int64 | record size: int32 | tags code: int64 |   as in `storage.queues.consume_queue`

    before the queue's first record   (0, 0x7fffffff, 0), as RocketMQ fills the first file of a queue that does not
                                      start at 0; files before that one are not made
    in the middle of the queues of    (physical offset of the queue's next record, 1, its tags code): the size is no
    delay levels and timers           record's, so that nothing is found there. Only brokers read these queues; they
                                      decode what they find, and continue with the next; and physical offsets ascend
    in the middle of another queue    (the start of the file before that of the queue's next record, 0x7fffffff, a tags
                                      code that names the next record): a pull does not find that many bytes there, and
                                      continues with the records of the next file, which has the next record. The first
                                      files have no records, so that these units lie behind the start of the
                                      commitlog: see `compact`
    behind the last record, where     (the record's last byte, 1, tags code): likewise
    messages were cancelled
    a queue without any record        its last file, all units (the last byte before the commitlog, 1, 0): no records
                                      are left, as after retention
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from duemq.protocol.topics import SCHEDULE_TOPIC, TIMER_TOPIC
from duemq.spark_jobs.store.store_files import QueueFile, StoreFiles
from duemq.spark_jobs.writers.spill import OffsetMap
from duemq.storage.log.copies import UNITS
from duemq.storage.queues.consume_queue import FOLLOWING, PADDING_SIZE, WITHDRAWN_SIZE

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Integers = NDArray[np.int64]

_DECODED: Final = (SCHEDULE_TOPIC, TIMER_TOPIC)
"""Queues that only brokers read, message by message."""


class QueueTask(NamedTuple):
    """Some queues, each given by its files in order. `directory`: that of the new consume queues; `begin`: where the
    new commitlog begins; `segment_size`: that of its files."""

    store: StoreFiles
    queues: list[list[QueueFile]]
    scratch: str
    directory: str
    begin: int
    segment_size: int


class Written(NamedTuple):
    """The result for the queues of a task: units that stand for records, and units in the middle that stand for
    none."""

    units: int
    holes: int


def write(task: QueueTask) -> Written:
    """Write queues. Raises OSError."""
    offsets = OffsetMap(task.scratch)
    units = holes = 0
    for files in task.queues:
        more, empty = _write_queue(task, files, offsets)
        units += more
        holes += empty
    return Written(units, holes)


def _write_queue(task: QueueTask, files: list[QueueFile], offsets: OffsetMap) -> tuple[int, int]:
    topic, queue_id = files[0].topic, files[0].queue_id
    folder = os.path.join(task.directory, topic, str(queue_id))
    os.makedirs(folder, exist_ok=True)
    new: list[Integers] = []
    for file in files:
        units = task.store.units(file)
        is_record = (units["size"] > 0) & (units["size"] != PADDING_SIZE)
        new.append(np.where(is_record, offsets.new(units["physical_offset"].astype(np.int64)), -1))
    with_units = [at for at, mine in enumerate(new) if len(mine)]
    if not with_units:
        return 0, 0
    first = next((at for at in with_units if (new[at] >= 0).any()), None)
    if first is None:
        last = with_units[-1]
        units = np.zeros(len(new[last]), UNITS)
        units["physical_offset"], units["size"] = task.begin - 1, WITHDRAWN_SIZE
        _write_file(folder, files[last], units)
        return 0, 0
    last = max(at for at in with_units if (new[at] >= 0).any())
    row = int(np.flatnonzero(new[last] >= 0)[-1])
    end = int(new[last][row] + task.store.units(files[last])["size"][row])
    units_written = holes = 0
    following, code = -1, 0
    for at in range(with_units[-1], first - 1, -1):
        units, more, empty = _file_of(task, files[at], new[at], (following, code), end, is_first=at == first)
        if len(found := np.flatnonzero(new[at] >= 0)):
            following, code = int(new[at][found[0]]), int(units["tags_code"][found[0]])
        units_written += more
        holes += empty
        _write_file(folder, files[at], units)
    return units_written, holes


def _file_of(
    task: QueueTask, file: QueueFile, new: Integers, behind: tuple[int, int], end: int, *, is_first: bool
) -> tuple[NDArray[Any], int, int]:
    """Return the units of one file, with the numbers of those that stand for records and for none. `behind`: physical
    offset of the first record in the files behind, -1 without one, and its tags code; `end`: the end of the queue's
    last record."""
    following, code = behind
    old = task.store.units_to_copy(file)
    units = np.empty(len(old), UNITS)
    is_there = new >= 0
    next_there = _next(new, following, is_there)
    is_decoded = file.topic in _DECODED
    gone = next_there if is_decoded else next_there - next_there % task.segment_size - task.segment_size
    gone_size = np.where(next_there < 0, WITHDRAWN_SIZE, WITHDRAWN_SIZE if is_decoded else PADDING_SIZE)
    gone = np.where(next_there < 0, end - 1, gone)
    units["physical_offset"] = np.where(is_there, new, gone)
    units["size"] = np.where(is_there, old["size"], gone_size)
    codes = old["tags_code"].astype(np.int64)
    if is_decoded:  # as in a rebuilt queue, see `duemq store repair`
        codes = np.where(next_there < 0, codes, _next(codes, code, is_there))
    units["tags_code"] = np.where(units["size"] == PADDING_SIZE, FOLLOWING + next_there, codes)
    holes = int((~is_there).sum())
    if is_first:
        begin = int(np.argmax(is_there))
        units[:begin] = (0, PADDING_SIZE, 0)
        holes -= begin
    return units, int(is_there.sum()), holes


def _next(values: Integers, following: int, is_there: NDArray[np.bool_]) -> Integers:
    """Return for each unit the value at the next record at or behind it; `following` without one."""
    count = len(values)
    at = np.where(is_there, np.arange(count), count)
    at = np.minimum.accumulate(at[::-1])[::-1]
    return np.where(at < count, values[np.minimum(at, count - 1)], following)


def _write_file(folder: str, file: QueueFile, units: NDArray[Any]) -> None:
    with open(os.path.join(folder, f"{file.first_unit * UNITS.itemsize:020}"), "wb") as out:
        out.write(np.ascontiguousarray(units).view(np.uint8).data)
        out.truncate(file.size)
