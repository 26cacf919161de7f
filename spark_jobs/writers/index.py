"""Index files of a new commitlog, from the items that tasks saved. The format is that of
`storage.queues.index_file`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from duemq.protocol.records.properties import KEYS, UNIQ_KEY
from duemq.protocol.records.record import FLAG_TRANSACTION
from duemq.spark_jobs.writers.spill import load
from duemq.storage.queues import index_file
from duemq.storage.queues.index_file import ITEM, MOST, item_hashes, java_hashes

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from duemq.spark_jobs.columns.records import Records

    Integers = NDArray[np.int64]


def items_of(records: Records, new: Integers, without: int) -> NDArray[np.void]:
    """Return the items of records, in their order; none for records whose transaction flag is `without`. `new`: their
    new physical offsets."""
    codes, names = records.topics()
    texts = records.texts
    is_indexed = records.sys_flag & FLAG_TRANSACTION != without
    parts = []
    for name, is_list in ((UNIQ_KEY, False), (KEYS, True)):
        at, size = texts.find(name)
        rows = np.flatnonzero((at >= 0) & (size > 0) & is_indexed)
        if not len(rows):
            continue
        at, size = at[rows], size[rows]
        if is_list:
            rows, at, size = _words(texts.data, rows, at, size)
        hashes = np.empty(len(rows), np.int32)
        for code in np.unique(codes[rows]).tolist():
            mine = np.flatnonzero(codes[rows] == code)
            hashes[mine] = java_hashes(texts.data, at[mine], size[mine], _topic_hash(names[code]))
        part = np.empty(len(rows), [("row", "<i8"), ("order", "<i4"), *ITEM.descr])
        part["row"], part["order"] = rows, np.arange(len(rows)) + (1 if is_list else 0) * (1 << 30)
        part["hash"] = item_hashes(hashes)
        part["physical_offset"], part["store_ms"] = new[rows], records.store_ms[rows]
        parts.append(part)
    if not parts:
        return np.empty(0, ITEM)
    joined = np.concatenate(parts)
    joined = joined[np.lexsort((joined["order"], joined["row"]))]
    result = np.empty(len(joined), ITEM)
    for field in ITEM.names or ():
        result[field] = joined[field]
    return result


def _topic_hash(topic: str) -> int:
    from duemq.protocol.records.properties import java_hash

    return java_hash(f"{topic}#")


def _words(
    data: NDArray[np.uint8], rows: Integers, at: Integers, size: Integers
) -> tuple[Integers, Integers, Integers]:
    """Return the words of texts: the row, position and size of each."""
    starts = np.cumsum(size) - size
    total = int(size.sum())
    positions = np.repeat(at - starts, size) + np.arange(total)
    owner = np.repeat(np.arange(len(rows)), size)
    is_space = data[positions] == ord(" ")
    if not is_space.any():
        return rows, at, size
    before_is_end = np.ones(total, np.bool_)
    before_is_end[1:] = is_space[:-1] | (owner[1:] != owner[:-1])
    begins = np.flatnonzero(before_is_end & ~is_space)
    after_is_end = np.ones(total, np.bool_)
    after_is_end[:-1] = is_space[1:] | (owner[1:] != owner[:-1])
    ends = np.flatnonzero(after_is_end & ~is_space)
    return rows[owner[begins]], positions[begins], ends - begins + 1


class IndexTask(NamedTuple):
    """A file to make of the items `first` to `end`. `counts`: number of items in each part in the scratch directory;
    `path`: the file."""

    scratch: str
    counts: list[int]
    first: int
    end: int
    path: str


def plan(scratch: str, directory: str, counts: list[int], now_s: float) -> list[IndexTask]:
    """Return the index files to make for the items in all parts: none without items."""
    total = sum(counts)
    tasks = []
    for number, first in enumerate(range(0, total, MOST)):
        name = index_file.file_name(now_s, number)
        tasks.append(IndexTask(scratch, counts, first, min(first + MOST, total), os.path.join(directory, name)))
    return tasks


def write(task: IndexTask) -> int:
    """Make a file; return the number of its bytes in use. Needs 60 bytes of memory for each item. Raises OSError."""
    return index_file.write(task.path, _items(task))


def _items(task: IndexTask) -> NDArray[np.void]:
    parts, at = [], 0
    for number, count in enumerate(task.counts):
        if at + count > task.first and at < task.end:
            parts.append(load(task.scratch, f"{number}.items")[max(0, task.first - at) : task.end - at])
        at += count
    return np.concatenate(parts)
