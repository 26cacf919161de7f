"""Index files: from a key to the records that have it, as Apache's brokers read them.

    index/yyyyMMddHHmmssSSS, 420,000,040 bytes, sparse
    0            8          16           24         32         36      40              20,000,040
    | begin time | end time | begin offs | end offs | slots    | next  | slots         | items                  |
    | int64, ms  | int64    | int64      | int64    | int32    | int32 | 5,000,000 x   | 20,000,000 x           |
    |            |          | physical   | physical | in use   | item  | int32         | 20 bytes               |

    slot: number of the newest item whose hash falls there, 0 without one
    item: | key hash | physical offset | seconds since begin time | item before in the slot |     counted from 1
          | int32    | int64           | int32                    | int32                   |

The key is `<topic>#<key>`, once for a message's UNIQ_KEY and once for each word of its KEYS; its hash is the absolute
value of Java's String.hashCode. All integers big-endian. The name is a local time, and files are in its order.
Mirrors apache/rocketmq store/index/IndexFile.java (4.9.7, 5.3.3).
"""

from __future__ import annotations

import os
import struct
import time
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from protocol.properties import KEYS, UNIQ_KEY
from protocol.record import FLAG_TRANSACTION
from spark_jobs.writers.hashes import java_hashes
from spark_jobs.writers.spill import load

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from spark_jobs.records import Records

    Integers = NDArray[np.int64]

ITEM: Final = np.dtype([("hash", "<i4"), ("physical_offset", "<i8"), ("store_ms", "<i8")])
_STORED: Final = np.dtype([("hash", ">i4"), ("physical_offset", ">i8"), ("seconds", ">i4"), ("previous", ">i4")])
_HEADER: Final = struct.Struct(">qqqqii")
SLOTS: Final = 5_000_000
ITEMS: Final = 4 * SLOTS
_SLOTS_AT: Final = _HEADER.size
_ITEMS_AT: Final = _SLOTS_AT + 4 * SLOTS
FILE_SIZE: Final = _ITEMS_AT + ITEMS * _STORED.itemsize
MOST: Final = ITEMS - 1
"""Items that go into one file: number 0 is not used."""


def items_of(records: Records, new: Integers, without: int) -> NDArray[np.void]:
    """The items of records, in their order; none for those whose transaction flag is `without`. `new`: the physical
    offsets that they get."""
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
        # Java's Math.abs leaves the smallest int negative, and RocketMQ makes that 0.
        part["hash"] = np.where(hashes == -(2**31), 0, np.abs(hashes))
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
    from protocol.properties import java_hash

    return java_hash(f"{topic}#")


def _words(
    data: NDArray[np.uint8], rows: Integers, at: Integers, size: Integers
) -> tuple[Integers, Integers, Integers]:
    """The words of texts: of each its row, position and size."""
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
    """A file to make of items `first` to `end`, which lie in the parts `counts` of the scratch directory. `name`: of
    the file."""

    scratch: str
    counts: list[int]
    first: int
    end: int
    path: str


def plan(scratch: str, directory: str, counts: list[int], now_s: float) -> list[IndexTask]:
    """The files for so many items, in parts: none without items."""
    total = sum(counts)
    tasks = []
    for number, first in enumerate(range(0, total, MOST)):
        stamp = now_s + number / 1000
        name = f"{time.strftime('%Y%m%d%H%M%S', time.localtime(stamp))}{int(stamp * 1000) % 1000:03}"
        tasks.append(IndexTask(scratch, counts, first, min(first + MOST, total), os.path.join(directory, name)))
    return tasks


def write(task: IndexTask) -> int:
    """Make a file; gives the bytes of it that are in use. Memory: 60 bytes an item. Raises OSError."""
    items = _items(task)
    count = len(items)
    slots = (items["hash"].astype(np.int64) % SLOTS).astype(np.int32)
    numbers = np.arange(1, count + 1, dtype=np.int32)
    order = np.argsort(slots, kind="stable")
    ordered = slots[order]
    is_same = ordered[1:] == ordered[:-1]
    previous = np.zeros(count, np.int32)
    previous[order[1:][is_same]] = numbers[order[:-1][is_same]]
    table = np.zeros(SLOTS, ">i4")
    table[ordered] = numbers[order]  # where a slot comes more than once the last counts
    begin_ms, end_ms = int(items["store_ms"][0]), int(items["store_ms"][-1])
    stored = np.empty(count, _STORED)
    stored["hash"], stored["physical_offset"] = items["hash"], items["physical_offset"]
    stored["seconds"] = np.clip((items["store_ms"] - begin_ms) // 1000, 0, 2**31 - 1)
    stored["previous"] = previous
    used = int(1 + is_same.size - is_same.sum())
    with open(task.path, "wb") as file:
        file.truncate(FILE_SIZE)
        offsets = items["physical_offset"]
        file.write(_HEADER.pack(begin_ms, end_ms, int(offsets[0]), int(offsets[-1]), used, count + 1))
        file.write(table.view(np.uint8).data)
        file.seek(_ITEMS_AT + _STORED.itemsize)
        file.write(stored.view(np.uint8).data)
    return _ITEMS_AT + count * _STORED.itemsize


def _items(task: IndexTask) -> NDArray[np.void]:
    parts, at = [], 0
    for number, count in enumerate(task.counts):
        if at + count > task.first and at < task.end:
            parts.append(load(task.scratch, f"{number}.items")[max(0, task.first - at) : task.end - at])
        at += count
    return np.concatenate(parts)
