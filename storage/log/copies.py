"""Copies of stored records for other queues, many at a time.

A delivery copies a record. Body, properties and the checksum of the body are copied byte for byte; topic, queue,
offsets and store time are those of the copy, whose prepared-transaction offset names the source record. None of that
needs a look at the body, so records are handled as arrays: all heads together, and the rest as slices.

Only records of the usual kind are copied this way (version 1, IPv4 addresses, without a checksum of the whole record);
`is_usual` says which records are. The layout is that of `protocol.records.record`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from duemq.protocol.frames.command import Body
from duemq.protocol.records import record
from duemq.protocol.records.checksum import NAME_FIELD
from duemq.protocol.records.checksum import SIZE as CHECKSUM_SIZE
from duemq.protocol.records.record import (
    FLAG_BORN_IPV6,
    FLAG_STORE_IPV6,
    HEAD_FIELDS,
    HEAD_SIZE_IPV4,
    MAGIC_V1,
    StoredMessage,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Integers = NDArray[np.int64]

_NUMPY_CODES: Final = {"i": ">i4", "I": ">u4", "q": ">i8", "8s": "V8"}
HEAD: Final = np.dtype([(name, _NUMPY_CODES[code]) for name, code in HEAD_FIELDS])
"""All fields of a record up to its body, for IPv4 hosts; see `protocol.records.record.HEAD_FIELDS`."""
assert HEAD.itemsize == HEAD_SIZE_IPV4
UNITS: Final = np.dtype([("physical_offset", ">i8"), ("size", ">i4"), ("tags_code", ">i8")])
ORIGIN_ZERO: Final = -1
"""The prepared-transaction offset of a copy of the record at physical offset 0, since 0 would mean "no origin"."""
_HEAD_BYTES: Final = np.arange(HEAD.itemsize)


def origin_of(prepared_transaction_offset: int) -> int | None:
    """Return the physical offset of the record from which a record was copied; None for a record that is not a copy."""
    if prepared_transaction_offset == ORIGIN_ZERO:
        return 0
    return prepared_transaction_offset or None


class PackedRecords:
    """Whole records of given sizes, one after the other in `data`, which the caller keeps."""

    def __init__(self, data: Body, physical_offsets: Integers, sizes: Integers) -> None:
        self.data = memoryview(data)
        self._bytes = np.frombuffer(data, np.uint8)
        self.sizes = sizes
        self.starts = np.cumsum(sizes) - sizes
        if (sizes == sizes[0]).all():
            head_bytes = self._bytes.reshape(len(sizes), sizes[0])[:, : HEAD.itemsize].copy()
        else:
            head_bytes = self._bytes[self.starts[:, None] + _HEAD_BYTES]
        self.heads: NDArray[Any] = head_bytes.view(HEAD)[:, 0]
        heads = self.heads
        self.topics = self.starts + HEAD.itemsize + heads["body_size"].astype(np.int64)
        """Positions of the topics' lengths, in bytes from the start of `data`."""
        last = len(self._bytes) - 1
        self.texts = self.topics + 1 + self._bytes[np.clip(self.topics, 0, last)]
        """Positions of the properties' lengths, in bytes from the start of `data`."""
        self.ends = self.starts + sizes
        at = np.clip(self.texts, 0, last - 1)
        text_sizes = self._bytes[at].astype(np.int64) << 8 | self._bytes[at + 1]
        self.is_usual = (
            (heads["magic"] == MAGIC_V1)
            & (heads["size"] == sizes)
            & (heads["physical_offset"] == physical_offsets)
            & (heads["sys_flag"] & (FLAG_BORN_IPV6 | FLAG_STORE_IPV6) == 0)
            & (heads["body_size"] >= 0)
            & (self.texts + 2 + text_sizes == self.ends)
            & ~self._have_checksums()
        )
        """For each record, whether it is of the usual kind, and whole as far as its head tells."""

    def __len__(self) -> int:
        return len(self.sizes)

    def _have_checksums(self) -> NDArray[np.bool_]:
        """Return, for each record, whether its last property is its checksum: a copy would need a different one."""
        at = np.clip(self.ends - CHECKSUM_SIZE, 0, len(self._bytes) - len(NAME_FIELD))
        found: NDArray[np.bool_] = (self._bytes[at] == NAME_FIELD[0]) & (
            self._bytes[at + len(NAME_FIELD) - 1] == NAME_FIELD[-1]
        )
        for row in np.flatnonzero(found).tolist():
            found[row] = bytes(self.data[at[row] : at[row] + len(NAME_FIELD)]) == NAME_FIELD
        return found

    def properties(self) -> list[bytes]:
        """Return the property texts."""
        data, starts, ends = self.data, (self.texts + 2).tolist(), self.ends.tolist()
        return [bytes(data[start:end]) for start, end in zip(starts, ends, strict=True)]

    def decoded(self, which: int) -> StoredMessage:
        """Return one of the records, by its number, as it was read. Raises RecordError."""
        return record.decode(self.data[int(self.starts[which]) : int(self.ends[which])])

    def text_rows(self) -> NDArray[np.uint8] | None:
        """Return the property texts as the rows of a matrix if all records have the same layout; else None."""
        if not self._are_alike():
            return None
        return self._rows()[:, int(self.texts[0] - self.starts[0]) + 2 :]

    def part(self, which: slice | NDArray[np.int64]) -> PackedRecords:
        """Return some of the records."""
        result = PackedRecords.__new__(PackedRecords)
        result.data, result._bytes = self.data, self._bytes
        for name in ("sizes", "starts", "heads", "topics", "texts", "ends", "is_usual"):
            setattr(result, name, getattr(self, name)[which])
        return result

    def reordered(self, order: NDArray[np.int64]) -> PackedRecords:
        """Return all records in another order; none may have been left out by `part` before. Records of one size are
        moved, so that they stay the rows of a matrix: moving costs less than the slower code for records that are
        not."""
        result = self.part(order)
        size = int(self.sizes[0])
        if (self.sizes == size).all():
            result._bytes = self._bytes.reshape(len(self), size)[order].reshape(-1)
            result.data = result._bytes.data
            for name in ("topics", "texts", "ends"):
                setattr(result, name, getattr(result, name) - result.starts + self.starts)
            result.starts = self.starts
        return result

    def copied(self, topic_fields: list[bytes], which: Integers) -> list[Body]:
        """Return the records as parts to be joined, with their present heads and new topics. `topic_fields`: the
        topics, each after its length; `which`: for each record, the index of its topic there."""
        if len(set(topic_fields)) == 1 and self._are_alike():
            return [self._encode_alike(topic_fields[0])]
        heads, data, size = memoryview(self.heads.tobytes()), self.data, HEAD.itemsize
        columns = ((self.starts + size).tolist(), self.topics.tolist(), self.texts.tolist(), self.ends.tolist())
        parts: list[Body] = []
        at = 0
        for body, topic, text, end, number in zip(*columns, which.tolist(), strict=True):
            parts += (heads[at : at + size], data[body:topic], topic_fields[number], data[text:end])
            at += size
        return parts

    def _are_alike(self) -> bool:
        """Whether all records have the same layout and follow each other directly: then they are the rows of a
        matrix."""
        size = self.sizes[0]
        return bool(
            (self.sizes == size).all()
            and (self.starts[1:] - self.starts[:-1] == size).all()
            and (self.topics - self.starts == self.topics[0] - self.starts[0]).all()
            and (self.texts - self.starts == self.texts[0] - self.starts[0]).all()
        )

    def _rows(self) -> NDArray[np.uint8]:
        count, size, start = len(self), int(self.sizes[0]), int(self.starts[0])
        return self._bytes[start : start + count * size].reshape(count, size)

    def _encode_alike(self, topic_field: bytes) -> Body:
        rows = self._rows()
        count, size = rows.shape
        topic, text = int(self.topics[0] - self.starts[0]), int(self.texts[0] - self.starts[0])
        copies = np.empty((count, size - (text - topic) + len(topic_field)), np.uint8)
        copies[:, : HEAD.itemsize] = np.frombuffer(self.heads.tobytes(), np.uint8).reshape(count, HEAD.itemsize)
        copies[:, HEAD.itemsize : topic] = rows[:, HEAD.itemsize : topic]
        copies[:, topic : topic + len(topic_field)] = np.frombuffer(topic_field, np.uint8)
        copies[:, topic + len(topic_field) :] = rows[:, text:]
        return copies.data.cast("B")
