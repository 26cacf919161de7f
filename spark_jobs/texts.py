"""The property texts of many records at once: name \\x01 value \\x02 name \\x01 value ... (see `protocol.properties`).

All separators are found in one go; a property is then a comparison of names as arrays. As in RocketMQ, a part without
\\x01, without a name or with an empty value is no property, and where a name comes twice the last counts.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa

from spark_jobs.slices import column, gather, joined, offsets_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]
    Integers = NDArray[np.int64]
    Flags = NDArray[np.bool_]

_NAME_END: Final = 1
_PROPERTY_END: Final = 2
_MAX_DIGITS: Final = 18


class Texts:
    """Property texts of n records. `data` holds them one after the other; positions count from its start."""

    def __init__(self, data: Bytes, at: Integers, size: Integers) -> None:
        # A \x02 behind each text, so that a text ends like a property.
        starts = np.zeros(len(at) + 1, np.int64)
        np.cumsum(size + 1, out=starts[1:])
        flat = np.empty(int(starts[-1]) + 8, np.uint8)
        flat[-8:] = 0
        inside = np.ones(int(starts[-1]), np.bool_)
        inside[starts[1:] - 1] = False
        flat[: len(inside)][inside] = joined(data, at, size)
        flat[starts[1:] - 1] = _PROPERTY_END
        self.data = flat
        self._starts = starts
        self._count = len(at)
        self._found: dict[str, tuple[Integers, Integers]] = {}

    @cached_property
    def _parts(self) -> tuple[Integers, Integers, Integers, Integers]:
        """Of all properties: position of the name, of the value, end of the value, and the record's index."""
        data = self.data[:-8]
        separators = np.flatnonzero((data == _NAME_END) | (data == _PROPERTY_END))
        is_end = data[separators] == _PROPERTY_END
        # Each name's separator is the first one behind the end of a property.
        ends = np.flatnonzero(is_end)
        before = np.empty(len(ends), np.int64)
        if len(ends):
            before[0], before[1:] = -1, ends[:-1]
        has_name = ends - before > 1
        name_at = np.where(before >= 0, separators[np.maximum(before, 0)] + 1, 0)[has_name]
        name_end = separators[(before + 1)[has_name]]
        value_end = separators[ends[has_name]]
        real = (name_end > name_at) & (value_end > name_end + 1)
        name_at, name_end, value_end = name_at[real], name_end[real], value_end[real]
        record = np.searchsorted(self._starts, name_at, "right") - 1
        return name_at, name_end, value_end, record

    @cached_property
    def _words(self) -> NDArray[np.uint64]:
        windows = np.ndarray((len(self.data) - 7,), "V8", self.data, strides=(1,))
        return windows[self._parts[0]].view("<u8")

    def find(self, name: str) -> tuple[Integers, Integers]:
        """Position and size of the value of one property in each text; position -1 where there is none."""
        known = self._found.get(name)
        if known is not None:
            return known
        name_at, name_end, value_end, record = self._parts
        encoded = name.encode()
        size = len(encoded)
        head = encoded[:8]
        mask = np.uint64((1 << 8 * len(head)) - 1)
        rows = np.flatnonzero((name_end - name_at == size) & (self._words & mask == int.from_bytes(head, "little")))
        if size > 8 and len(rows):
            rest = np.frombuffer(encoded[8:], np.uint8)
            rows = rows[(self.data[name_at[rows][:, None] + np.arange(8, size)] == rest).all(axis=1)]
        at, sizes = np.full(self._count, -1, np.int64), np.zeros(self._count, np.int64)
        at[record[rows]] = name_end[rows] + 1
        sizes[record[rows]] = (value_end - name_end)[rows] - 1
        self._found[name] = at, sizes
        return at, sizes

    def strings(self, name: str) -> pa.StringArray:
        """The values of one property; null where there is none."""
        at, size = self.find(name)
        return gather(self.data, at, size, missing=at < 0, kind=pa.string())

    def ints(self, name: str) -> tuple[Integers, Flags]:
        """The values of a property that is a decimal number, and where there is one. What is no number, or has more
        than 18 digits, counts as absent."""
        at, size = self.find(name)
        present = (at >= 0) & (size > 0)
        values = np.zeros(self._count, np.int64)
        rows = np.flatnonzero(present)
        if not len(rows):
            return values, present
        start, left = at[rows].copy(), size[rows].copy()
        negative = self.data[start] == ord("-")
        start += negative
        left -= negative
        wrong = (left > _MAX_DIGITS) | (left < 1)
        result = np.zeros(len(rows), np.int64)
        for i in range(int(min(left.max(), _MAX_DIGITS))):
            active = (i < left) & ~wrong
            digits = self.data[np.where(active, start + i, 0)].astype(np.int64) - ord("0")
            wrong |= active & ((digits < 0) | (digits > 9))
            result = np.where(active, result * 10 + digits, result)
        values[rows] = np.where(wrong, 0, np.where(negative, -result, result))
        present[rows] = ~wrong
        return values, present

    def maps(self) -> pa.MapArray:
        """All properties as map<string, string>. Where a name comes twice both are there, in order."""
        name_at, name_end, value_end, record = self._parts
        counts = np.bincount(record, minlength=self._count).astype(np.int64)
        name_size, value_size = name_end - name_at, value_end - name_end - 1
        names = column(joined(self.data, name_at, name_size), offsets_of(name_size), kind=pa.string())
        values = column(joined(self.data, name_end + 1, value_size), offsets_of(value_size), kind=pa.string())
        return pa.MapArray.from_arrays(pa.array(offsets_of(counts), pa.int32()), names, values)
