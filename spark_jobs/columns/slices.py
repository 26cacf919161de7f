"""Makes one Arrow string or binary column from many slices of one buffer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa

if TYPE_CHECKING:
    from numpy.typing import NDArray

_SHORT: Final = 96
"""Up to this many bytes in the longest slice, masking windows of that length costs less than slicing one by one."""
_SPREAD: Final = 4


def joined_slices(data: NDArray[np.uint8], at: NDArray[np.int64], size: NDArray[np.int64]) -> NDArray[np.uint8]:
    """Return the bytes of the slices, one after the other. Positions and sizes in bytes, all within `data`."""
    total = int(size.sum())
    if not total:
        return np.empty(0, np.uint8)
    longest = int(size.max())
    if longest <= _SHORT and longest * len(at) <= _SPREAD * total + 64 and int(at.max()) + longest <= len(data):
        windows: NDArray[Any] = np.ndarray((len(data) - longest + 1,), f"V{longest}", data, strides=(1,))
        rows = windows[at].view(np.uint8).reshape(len(at), longest)
        if longest * len(at) == total:
            return rows.reshape(-1)
        return rows[np.arange(longest, dtype=np.int16) < size[:, None].astype(np.int16)]
    view = memoryview(data)  # type: ignore[arg-type]
    parts = [view[a:b] for a, b in zip(at.tolist(), (at + size).tolist(), strict=True)]
    return np.frombuffer(b"".join(parts), np.uint8)


def offsets_of(size: NDArray[np.int64]) -> NDArray[np.int32]:
    """Return where each of the joined slices begins, and where the last one ends: n + 1 positions. Raises ValueError
    for more than 2 GiB."""
    offsets = np.zeros(len(size) + 1, np.int64)
    np.cumsum(size, out=offsets[1:])
    if offsets[-1] > 0x7FFFFFFF:
        raise ValueError("more than 2 GiB in one column of a batch")
    return offsets.astype(np.int32)


def gather(
    data: NDArray[np.uint8],
    at: NDArray[np.int64],
    size: NDArray[np.int64],
    *,
    missing: NDArray[np.bool_] | None = None,
    kind: pa.DataType | None = None,
) -> pa.Array:
    """Return the slices as a binary column (or of `kind`: pa.string()); null where `missing`."""
    if missing is not None:
        at, size = np.where(missing, 0, at), np.where(missing, 0, size)
    offsets = offsets_of(size)
    return column(joined_slices(data, at, size), offsets, missing=missing, kind=kind)


def column(
    values: NDArray[np.uint8],
    offsets: NDArray[np.int32],
    *,
    missing: NDArray[np.bool_] | None = None,
    kind: pa.DataType | None = None,
) -> pa.Array:
    """Return joined bytes and offsets as a column. Text that is not UTF-8 gets replacement characters, as in
    RocketMQ."""
    valid = None if missing is None else pa.py_buffer(np.packbits(~missing, bitorder="little"))
    kind = kind or pa.binary()
    array = pa.Array.from_buffers(
        kind, len(offsets) - 1, [valid, pa.py_buffer(offsets), pa.py_buffer(np.ascontiguousarray(values))]
    )
    if kind == pa.string() and len(values) and int(values.max()) > 127:
        array = _repaired(array)
    return array


def _repaired(array: pa.StringArray) -> pa.StringArray:
    try:
        array.validate(full=True)
    except pa.ArrowInvalid:
        texts = [None if v is None else v.decode("utf-8", "replace") for v in array.cast(pa.binary()).to_pylist()]
        return pa.array(texts, pa.string())
    return array
