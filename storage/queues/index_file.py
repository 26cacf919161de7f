"""RocketMQ's index files, which lead from a key to the records that have it. Apache's brokers read them.

    index/yyyyMMddHHmmssSSS, 420,000,040 bytes, sparse
    0            8          16           24         32         36      40              20,000,040
    | begin time | end time | begin offs | end offs | slots    | next  | slots         | items                  |
    | int64, ms  | int64    | int64      | int64    | int32    | int32 | 5,000,000 x   | 20,000,000 x           |
    |            |          | physical   | physical | in use   | item  | int32         | 20 bytes               |

    slot: number of the newest item whose hash falls into it, 0 without one
    item: | key hash | physical offset | seconds since begin time | previous item of the slot |     counted from 1
          | int32    | int64           | int32                    | int32                     |

The key is `<topic>#<key>`, once for a message's UNIQ_KEY and once for each word of its KEYS; its hash is the absolute
value of Java's String.hashCode. All integers big-endian. A file's name is a local time; the files are in the order of
their names.
Mirrors apache/rocketmq store/index/IndexFile.java (4.9.7, 5.3.3).
"""

from __future__ import annotations

import struct
import time
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from duemq.protocol.records.properties import java_hash

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Integers = NDArray[np.int64]

ITEM: Final = np.dtype([("hash", "<i4"), ("physical_offset", "<i8"), ("store_ms", "<i8")])
"""An item of a file that is to be written; items are in the order of physical offsets. `hash`: see `item_hashes`.
`store_ms`: the record's store time, ms since the epoch."""
STORED: Final = np.dtype([("hash", ">i4"), ("physical_offset", ">i8"), ("seconds", ">i4"), ("previous", ">i4")])
HEADER: Final = struct.Struct(">qqqqii")
SLOTS: Final = 5_000_000
ITEMS: Final = 4 * SLOTS
_SLOTS_AT: Final = HEADER.size
ITEMS_AT: Final = _SLOTS_AT + 4 * SLOTS
FILE_SIZE: Final = ITEMS_AT + ITEMS * STORED.itemsize
MOST: Final = ITEMS - 1
"""Most items that fit into one file: number 0 is not used."""
_BLOCK: Final = 1 << 14


def file_name(seconds: float, number: int) -> str:
    """Return the name of a file that is made at a time, seconds since the epoch. `number`: its number among the files
    made at that time."""
    stamp = seconds + number / 1000
    return f"{time.strftime('%Y%m%d%H%M%S', time.localtime(stamp))}{int(stamp * 1000) % 1000:03}"


def write(path: str, items: NDArray[Any]) -> int:
    """Make a file of at least one ITEM; return the number of bytes in use in it. Needs 60 bytes of memory per item.
    Raises OSError."""
    count = len(items)
    slots = (items["hash"].astype(np.int64) % SLOTS).astype(np.int32)
    numbers = np.arange(1, count + 1, dtype=np.int32)
    order = np.argsort(slots, kind="stable")
    ordered = slots[order]
    is_same = ordered[1:] == ordered[:-1]
    previous = np.zeros(count, np.int32)
    previous[order[1:][is_same]] = numbers[order[:-1][is_same]]
    table = np.zeros(SLOTS, ">i4")
    table[ordered] = numbers[order]  # if a slot has several items, the last assignment wins: the newest item
    begin_ms, end_ms = int(items["store_ms"][0]), int(items["store_ms"][-1])
    stored = np.empty(count, STORED)
    stored["hash"], stored["physical_offset"] = items["hash"], items["physical_offset"]
    stored["seconds"] = np.clip((items["store_ms"] - begin_ms) // 1000, 0, 2**31 - 1)
    stored["previous"] = previous
    used = int(1 + is_same.size - is_same.sum())
    with open(path, "wb") as file:
        file.truncate(FILE_SIZE)
        offsets = items["physical_offset"]
        file.write(HEADER.pack(begin_ms, end_ms, int(offsets[0]), int(offsets[-1]), used, count + 1))
        file.write(table.view(np.uint8).data)
        file.seek(ITEMS_AT + STORED.itemsize)
        file.write(stored.view(np.uint8).data)
    return ITEMS_AT + count * STORED.itemsize


def item_hashes(hashes: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return the hashes that items have, from the hashes of their keys (`java_hashes`)."""
    # Java's Math.abs leaves the smallest int negative, and RocketMQ then uses 0.
    found: NDArray[np.int32] = np.where(hashes == -(2**31), 0, np.abs(hashes)).astype(np.int32)
    return found


def java_hashes(data: NDArray[np.uint8], at: Integers, size: Integers, start: int = 0) -> NDArray[np.int32]:
    """Return Java's String.hashCode of UTF-8 texts in `data`, as if a text with the hash `start` stood before each.
    `at` and `size`: their positions and sizes in bytes."""
    result = np.empty(len(at), np.uint32)
    for length in np.unique(size).tolist():
        rows = np.flatnonzero(size == length)
        for first in range(0, len(rows), _BLOCK):
            mine = rows[first : first + _BLOCK]
            hashes = np.full(len(mine), start & 0xFFFFFFFF, np.uint32)
            beyond_ascii = np.zeros(len(mine), np.uint8)
            for i in range(length):
                values = data[at[mine] + i]
                beyond_ascii |= values
                hashes = hashes * np.uint32(31) + values
            result[mine] = hashes
            for row in mine[beyond_ascii > 127].tolist():
                text = bytes(data[at[row] : at[row] + length]).decode("utf-8", "replace")
                result[row] = _continued(start, text)
    return result.view(np.int32)


def _continued(start: int, text: str) -> int:
    units = len(text.encode("utf-16-be")) // 2
    return (start * pow(31, units, 1 << 32) + java_hash(text)) & 0xFFFFFFFF
