"""Rebuilds RocketMQ's index while a commitlog is read; `storage.queues.index_file` describes the layout."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from duemq.protocol.records import properties
from duemq.protocol.records.properties import java_hash
from duemq.protocol.records.record import FLAG_TRANSACTION, TRANSACTION_ROLLBACK
from duemq.storage.queues import index_file
from duemq.storage.queues.index_file import ITEM, item_hashes, java_hashes

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from duemq.storage.log.scan import ScannedRecord

_BATCH: Final = 1 << 15
"""Number of items whose hashes are computed together."""
MOST: Final = 5_000_000
"""Maximum number of items in a file. A file could hold four times as many, but that would take memory."""
_UNIQ_KEY, _KEYS = properties.UNIQ_KEY.encode(), properties.KEYS.encode()
_KEY_PROPERTIES: Final = re.compile(rb"(?:^|\x02)(" + _UNIQ_KEY + b"|" + _KEYS + rb")\x01([^\x02]+)")


class IndexMaker:
    """Looks at a commitlog's records in order, keeps their items in a file, and makes the index from it."""

    def __init__(self, scratch: str) -> None:
        """`scratch`: path of the file of items, 20 bytes each. Raises OSError."""
        self._path = scratch
        self._file = open(scratch, "wb")  # noqa: SIM115, it is closed by `close`
        self._texts: list[bytes] = []
        self._topics: list[bytes] = []
        self._records: list[tuple[int, int]] = []
        self._hashes: dict[bytes, int] = {}
        """Hashes of the topics, including the separator that follows a topic in a key."""
        self.end_ms = 0
        """Store time of the last record that is indexed, in ms since the epoch."""

    def look(self, record: ScannedRecord) -> None:
        """Take the keys of a record. Raises OSError."""
        if record.sys_flag & FLAG_TRANSACTION == TRANSACTION_ROLLBACK:
            return
        found = dict(_KEY_PROPERTIES.findall(record.properties))
        if not found:
            return
        at = record.physical_offset, record.store_timestamp
        unique = found.get(_UNIQ_KEY)
        if unique is not None:
            self._add(record.topic, unique, at)
        for key in found.get(_KEYS, b"").split(b" "):
            if key:
                self._add(record.topic, key, at)
        if len(self._texts) >= _BATCH:
            self._flush()

    def _add(self, topic: bytes, key: bytes, record: tuple[int, int]) -> None:
        self._texts.append(key)
        self._topics.append(topic)
        self._records.append(record)

    def _flush(self) -> None:
        texts, topics = self._texts, self._topics
        items = np.zeros(len(texts), ITEM)
        if not texts:
            return
        sizes = np.array([len(text) for text in texts], np.int64)
        data = np.frombuffer(b"".join(texts), np.uint8)
        at = np.cumsum(sizes) - sizes
        codes: dict[bytes, int] = {}
        of_topic = np.array([codes.setdefault(topic, len(codes)) for topic in topics], np.int64)
        for topic, code in codes.items():
            start = self._hashes.get(topic)
            if start is None:
                start = self._hashes[topic] = java_hash(f"{topic.decode()}#")
            mine = np.flatnonzero(of_topic == code)
            items["hash"][mine] = item_hashes(java_hashes(data, at[mine], sizes[mine], start))
        records: NDArray[Any] = np.array(self._records, np.int64)
        items["physical_offset"], items["store_ms"] = records[:, 0], records[:, 1]
        self.end_ms = int(records[-1, 1])
        items.tofile(self._file)
        self._texts, self._topics, self._records = [], [], []

    def write(self, directory: str, seconds: float) -> int:
        """Write the files, named by a time in seconds since the epoch; return their number. Raises OSError."""
        self._flush()
        self._file.flush()
        os.makedirs(directory, exist_ok=True)
        count = os.path.getsize(self._path) // ITEM.itemsize
        for number, first in enumerate(range(0, count, MOST)):
            items = np.fromfile(self._path, ITEM, min(MOST, count - first), offset=first * ITEM.itemsize)
            index_file.write(os.path.join(directory, index_file.file_name(seconds, number)), items)
        return -(-count // MOST)

    def close(self) -> None:
        """Remove the file of items."""
        self._file.close()
        os.unlink(self._path)
