"""The property texts of many records as arrays: name \\x01 value \\x02 name \\x01 value ... (see
`protocol.records.properties`).

All separators are found in one pass; finding a property then compares names as arrays. As in RocketMQ, a part without
\\x01, without a name or with an empty value is not a property, and of two properties of one name the last counts.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa

from duemq.spark_jobs.columns.hashes import hash_slices
from duemq.spark_jobs.columns.slices import column, gather, joined_slices, offsets_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]
    Integers = NDArray[np.int64]
    Flags = NDArray[np.bool_]

_NAME_END: Final = 1
_PROPERTY_END: Final = 2
_MAX_DIGITS: Final = 18
_SPREAD: Final = 2
"""Texts are laid out in rows of one length, the fastest way, if that takes at most this many times their bytes."""

_MAX_COUNTED: Final = 1 << 24
"""Up to this many pairs of record and name are counted with one counter each; more are sorted instead."""


class Texts:
    """The property texts of n records, in `data` one after the other. Positions count from its start."""

    def __init__(self, data: Bytes, at: Integers, size: Integers) -> None:
        self._count = len(at)
        self._found: dict[str, tuple[Integers, Integers]] = {}
        self._hashed: dict[str, Integers] = {}
        longest = int(size.max()) if len(size) else 0
        is_even = longest * len(at) <= _SPREAD * int(size.sum()) and len(at) > 1
        if is_even and int(at.max()) + longest <= len(data):
            self.data, self._starts = _rows(data, at, size, longest)
        else:
            self.data, self._starts = _one_after_the_other(data, at, size)

    def take(self, which: Integers | Flags) -> Texts:
        """Return the texts of the records chosen by a mask or by indices."""
        return _Some(self, np.arange(self._count)[which])

    @cached_property
    def _parts(self) -> tuple[Integers, Integers, Integers, Integers]:
        """For all properties: positions of the names, ends of the names, ends of the values, and indexes of the
        records."""
        data = self.data[:-8]
        separators = np.flatnonzero((data == _NAME_END) | (data == _PROPERTY_END))
        is_end = data[separators] == _PROPERTY_END
        # The separator behind a name is the first one behind the end of the property before.
        ends = np.flatnonzero(is_end)
        before = np.empty(len(ends), np.int64)
        if len(ends):
            before[0], before[1:] = -1, ends[:-1]
        has_name = ends - before > 1
        name_at = np.where(before >= 0, separators[np.maximum(before, 0)] + 1, 0)[has_name]
        name_end = separators[(before + 1)[has_name]]
        value_end = separators[ends[has_name]]
        record = np.searchsorted(self._starts, value_end, "right") - 1
        # The first name of a text begins with the text, not where the text before has ended.
        name_at = np.maximum(name_at, self._starts[record])
        real = (name_end > name_at) & (value_end > name_end + 1)
        return name_at[real], name_end[real], value_end[real], record[real]

    @cached_property
    def _words(self) -> NDArray[np.uint64]:
        windows = np.ndarray((len(self.data) - 7,), "V8", self.data, strides=(1,))
        return windows[self._parts[0]].view("<u8")

    def find(self, name: str) -> tuple[Integers, Integers]:
        """Return position and size of the value of one property in each text; position -1 where there is none."""
        known = self._found.get(name)
        if known is None:
            known = self._found[name] = self._look_for(name)
        return known

    def _look_for(self, name: str) -> tuple[Integers, Integers]:
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
        return at, sizes

    def hashes(self, name: str) -> Integers:
        """Return hashes of the values of one property (`hashes.hash_slices`); the hash of an empty value where there is
        none."""
        known = self._hashed.get(name)
        if known is None:
            known = self._hashed[name] = self._hash(name)
        return known

    def _hash(self, name: str) -> Integers:
        at, size = self.find(name)
        return hash_slices(self.data, np.maximum(at, 0), size)

    def strings(self, name: str) -> pa.StringArray:
        """Return the values of one property; null where there is none."""
        at, size = self.find(name)
        return gather(self.data, at, size, missing=at < 0, kind=pa.string())

    def ints(self, name: str) -> tuple[Integers, Flags]:
        """Return the values of a property that is a decimal number, and where there is one. A value that is not a
        number, or has more than 18 digits, counts as absent."""
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
        """Return all properties as map<string, string>. Of two properties of one name in a text the last counts, as in
        RocketMQ."""
        name_at, name_end, value_end, record = self._parts
        names = _texts_of(self.data, name_at, name_end)
        last = _last_of_each(names, record)
        if last is not None:
            name_end, value_end, record = name_end[last], value_end[last], record[last]
            names = names.take(pa.array(last))
        counts = np.bincount(record, minlength=self._count).astype(np.int64)
        values = _texts_of(self.data, name_end + 1, value_end)
        return pa.MapArray.from_arrays(pa.array(offsets_of(counts), pa.int32()), names, values)


def _texts_of(data: Bytes, at: Integers, ends: Integers) -> pa.Array:
    sizes = ends - at
    return column(joined_slices(data, at, sizes), offsets_of(sizes), kind=pa.string())


def _last_of_each(names: pa.Array, record: Integers) -> Integers | None:
    """Return the indexes of the properties that are the last of their name in their record; None where all are.
    Properties are given by their names and their records."""
    encoded = names.dictionary_encode()
    number = len(encoded.dictionary)
    keys = record * number + encoded.indices.to_numpy()
    if not len(keys):
        return None
    if (int(record[-1]) + 1) * number <= _MAX_COUNTED:
        is_twice = bool(np.bincount(keys).max() > 1)
    else:
        is_twice = len(np.unique(keys)) < len(keys)
    if not is_twice:
        return None
    _, from_the_end = np.unique(keys[::-1], return_index=True)
    return np.sort(len(keys) - 1 - from_the_end)


class _Some(Texts):
    """The texts of some of another object's records. Properties already looked up there are not looked up again."""

    def __init__(self, whole: Texts, which: Integers) -> None:
        self._whole = whole
        self._which = which
        self._count = len(which)
        self._found = {}
        self._hashed = {}
        self.data = whole.data
        self._starts = whole._starts

    @cached_property
    def _parts(self) -> tuple[Integers, Integers, Integers, Integers]:
        name_at, name_end, value_end, record = self._whole._parts
        index = np.full(self._whole._count, -1, np.int64)
        index[self._which] = np.arange(self._count)
        mine = index[record]
        # The properties come in the order of the original records; they are sorted by the order in which records were
        # taken.
        order = np.argsort(mine, kind="stable")
        order = order[np.searchsorted(mine[order], 0) :]
        return name_at[order], name_end[order], value_end[order], mine[order]

    def _look_for(self, name: str) -> tuple[Integers, Integers]:
        at, size = self._whole.find(name)
        return at[self._which], size[self._which]

    def _hash(self, name: str) -> Integers:
        return self._whole.hashes(name)[self._which]


def _rows(data: Bytes, at: Integers, size: Integers, longest: int) -> tuple[Bytes, Integers]:
    """Return texts in rows of one length, each ending with a \x02 and zeros, and where the rows start."""
    width = longest + 1
    rows = np.zeros((len(at) + 1, width), np.uint8)
    windows = np.ndarray((len(data) - longest + 1,), f"V{longest}", data, strides=(1,))
    inside = np.arange(longest, dtype=np.int32) < size[:, None].astype(np.int32)
    np.multiply(windows[at].view(np.uint8).reshape(len(at), longest), inside, out=rows[:-1, :longest])
    rows[np.arange(len(at)), size] = _PROPERTY_END
    # The last row leaves room for readers that take eight bytes at a time.
    flat = np.ascontiguousarray(rows.reshape(-1)[: len(at) * width + 8]) if width >= 8 else _padded(rows)
    return flat, np.arange(len(at) + 1, dtype=np.int64) * width


def _padded(rows: Bytes) -> Bytes:
    return np.concatenate([rows[:-1].reshape(-1), np.zeros(8, np.uint8)])


def _one_after_the_other(data: Bytes, at: Integers, size: Integers) -> tuple[Bytes, Integers]:
    """Return texts one after the other, each ending with a \x02, and where they start."""
    starts = np.zeros(len(at) + 1, np.int64)
    np.cumsum(size + 1, out=starts[1:])
    flat = np.zeros(int(starts[-1]) + 8, np.uint8)
    inside = np.ones(int(starts[-1]), np.bool_)
    inside[starts[1:] - 1] = False
    flat[: len(inside)][inside] = joined_slices(data, at, size)
    flat[starts[1:] - 1] = _PROPERTY_END
    return flat, starts
