"""Writing a commitlog from the records of another: those of a range that stay are copied to their new offsets, many at
a time. In each record the physical offset changes, and the origin that its prepared-transaction offset may name; all
other bytes are copied as slices of the data read. One task for each range; the files already exist at their full size.

    a record, bytes 28 to 35:   its physical offset
    76 to 83 (12 or 24 further behind with IPv6 hosts): prepared-transaction offset
    its last 20, if the properties end so: its checksum (`protocol.records.checksum`)
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from duemq.protocol.records.checksum import NAME_FIELD, checksum_field
from duemq.protocol.records.checksum import SIZE as CHECKSUM_SIZE
from duemq.protocol.records.record import (
    END_MARKER,
    FLAG_TRANSACTION,
    MAGIC_END,
    PHYSICAL_OFFSET_AT,
    TRANSACTION_COMMIT,
    TRANSACTION_ROLLBACK,
)
from duemq.spark_jobs.columns.records import PADDING, Records
from duemq.spark_jobs.compact.scan import KEYED_MESSAGE, PLAIN, TIMER_AGAIN, TIMER_DELETE
from duemq.spark_jobs.errors import JobError
from duemq.spark_jobs.writers import layout
from duemq.spark_jobs.writers.index import items_of
from duemq.spark_jobs.writers.spill import OffsetMap, load, save
from duemq.storage.log.copies import HEAD, ORIGIN_ZERO

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from duemq.spark_jobs.store.store_files import StoreFiles
    from duemq.spark_jobs.writers.layout import Piece

    Integers = NDArray[np.int64]

CHUNK_SIZE: Final = 4 << 20
_PREPARED_AT: Final = 76
_PROPERTY_END: Final = 2
_MAX_SLICES: Final = 512
_ORIGIN_KINDS: Final = (PLAIN, KEYED_MESSAGE, TIMER_AGAIN, TIMER_DELETE)


class CopyTask(NamedTuple):
    """A range to copy. `start`: its physical offset; `directory`: that of the new commitlog; `with_index`: also save
    the items of the index files."""

    store: StoreFiles
    number: int
    start: int
    scratch: str
    directory: str
    segment_size: int
    pieces: list[Piece]
    with_index: bool


def make_files(directory: str, plan: layout.Layout, segment_size: int) -> None:
    """Make the files, empty except for the end markers. Raises OSError."""
    os.makedirs(directory, exist_ok=True)
    for first in plan.files(segment_size):
        with open(os.path.join(directory, f"{first:020}"), "wb") as file:
            file.truncate(segment_size)
    for offset, left in plan.markers:
        first = offset - offset % segment_size
        with open(os.path.join(directory, f"{first:020}"), "r+b") as file:
            file.seek(offset - first)
            file.write(END_MARKER.pack(left, MAGIC_END))


def copy(task: CopyTask) -> int:
    """Copy the records of a range that stay; return their bytes. Raises JobError, OSError."""
    scratch, number = task.scratch, task.number
    keep = load(scratch, f"{number}.keep")
    starts = load(scratch, f"{number}.starts")[keep].astype(np.int64)
    sizes = load(scratch, f"{number}.sizes")[keep].astype(np.int64)
    kinds = load(scratch, f"{number}.kinds")[keep]
    new = layout.offsets(task.pieces, sizes)
    offsets = OffsetMap(scratch)
    items = []
    written = 0
    for piece in task.pieces:
        base = piece.start - piece.start % task.segment_size
        fd = os.open(os.path.join(task.directory, f"{base:020}"), os.O_WRONLY | os.O_CLOEXEC)
        try:
            for rows, data, at in _chunks(task, starts, sizes, piece):
                records = Records(data, task.start + at, starts[rows] - at)
                _check(task.store, records)
                if task.with_index:
                    items.append(items_of(records, new[rows], TRANSACTION_ROLLBACK))
                patch(records, new[rows], kinds[rows], offsets)
                written += write(fd, int(new[rows.start]) - base, data, records.starts, sizes[rows])
        finally:
            os.close(fd)
    if task.with_index:
        from duemq.storage.queues.index_file import ITEM

        save(scratch, f"{number}.items", np.concatenate([np.empty(0, ITEM), *items]))
    return written


def _chunks(
    task: CopyTask, starts: Integers, sizes: Integers, piece: Piece
) -> Iterator[tuple[slice, NDArray[np.uint8], int]]:
    """Yield the records of a piece, some MiB at a time: their rows, the bytes, and the position in the range where
    these begin. Raises JobError if their file was removed, or has become shorter, since the job began."""
    segment = task.store.segment_of(task.start)
    if segment is None:
        raise JobError(f"{task.store.path}: the file with physical offset {task.start} was removed since the job began")
    buffer = np.zeros(CHUNK_SIZE + PADDING, np.uint8)
    first = piece.begin
    while first < piece.end:
        at = int(starts[first])
        end = int(np.searchsorted(starts[: piece.end], at + CHUNK_SIZE, "right"))
        # As many records as end within the chunk, at least one.
        while end > first + 1 and starts[end - 1] + sizes[end - 1] > at + CHUNK_SIZE:
            end -= 1
        size = int(starts[end - 1] + sizes[end - 1]) - at
        if size > len(buffer) - PADDING:
            buffer = np.zeros(size + PADDING, np.uint8)
        view = memoryview(buffer)[:size]  # type: ignore[arg-type]
        if task.store.read_into(segment.path, task.start + at - segment.first_offset, view) != size:
            raise JobError(f"{task.store.path}/{segment.path}: has become shorter since the job began")
        yield slice(first, end), buffer[: size + PADDING], at
        first = end


def _check(store: StoreFiles, records: Records) -> None:
    """Raise JobError if the records are not those of the scan: something wrote to the store meanwhile."""
    wrong = np.flatnonzero(records.stored_physical_offset != records.physical_offset)
    if len(wrong):
        at = int(records.physical_offset[wrong[0]])
        raise JobError(
            f"{store.path}: the record at {at} has changed since the job began; stop the process that writes there"
        )


def patch(records: Records, new: Integers, kinds: NDArray[np.uint8], offsets: OffsetMap) -> None:
    """Write the new offsets into records, in place: their own and those of their origins.

    The offset of an origin that is gone becomes -1, the value for offset 0, where the new log has no record. So the
    record can still be recognised as a delivery. In a commit record whose half message is gone it becomes 0."""
    prepared = records.prepared_offset
    named = np.flatnonzero((prepared != 0) & np.isin(kinds, _ORIGIN_KINDS))
    if len(named):
        old = prepared[named]
        mapped = offsets.new(np.where(old == ORIGIN_ZERO, 0, old))
        flags = records.sys_flag[named]
        is_commit = flags & FLAG_TRANSACTION == TRANSACTION_COMMIT
        mapped = np.where(is_commit & (mapped < 0), 0, mapped)
        shift = np.where(flags & 16, 12, 0) + np.where(flags & 32, 12, 0)
        _put(records.data, records.starts[named] + _PREPARED_AT + shift, mapped)
    _put(records.data, records.starts + PHYSICAL_OFFSET_AT, new)
    _renew_checksums(records)


def _renew_checksums(records: Records) -> None:
    """Recompute the checksum of each record that ends with one."""
    data, ends = records.data, records.starts + records.sizes
    # Bytes that only look like a checksum do not count: in a body before short properties, or at the end of another
    # name.
    before, size = data[ends - CHECKSUM_SIZE - 1], records.properties_size
    mark = (size == CHECKSUM_SIZE) | (size > CHECKSUM_SIZE) & (before == _PROPERTY_END)
    mark &= data[ends - CHECKSUM_SIZE] == NAME_FIELD[0]
    for row in np.flatnonzero(mark).tolist():
        start, end = int(records.starts[row]), int(ends[row])
        at = end - CHECKSUM_SIZE
        if data[at : at + len(NAME_FIELD)].tobytes() == NAME_FIELD:
            data[at:end] = np.frombuffer(checksum_field([data[start:at].data]), np.uint8)


def _put(data: NDArray[np.uint8], at: Integers, values: Integers) -> None:
    windows: NDArray[Any] = np.ndarray((len(data) - 7,), "V8", data, strides=(1,))
    windows[at] = values.astype(">i8").view("V8")


def write(fd: int, position: int, data: NDArray[np.uint8], starts: Integers, sizes: Integers) -> int:
    """Write slices of `data`, one after the other, from a position in a file on; return the bytes. Slices that follow
    each other in `data` are written as one. Raises OSError."""
    ends = starts + sizes
    breaks = np.flatnonzero(starts[1:] != ends[:-1]) + 1
    first = np.concatenate(([0], breaks))
    last = np.concatenate((breaks, [len(starts)])) - 1
    view = memoryview(data)  # type: ignore[arg-type]
    slices = [view[a:b] for a, b in zip(starts[first].tolist(), ends[last].tolist(), strict=True)]
    total = int(sizes.sum())
    if len(slices) > _MAX_SLICES:
        slices = [memoryview(b"".join(slices))]
    done = 0
    while done < total:
        count = os.pwritev(fd, slices, position + done)
        done += count
        while slices and count >= len(slices[0]):
            count -= len(slices.pop(0))
        if slices and count:
            slices[0] = slices[0][count:]
    return total


assert HEAD.fields is not None
assert HEAD.fields["prepared_offset"][1] == _PREPARED_AT
assert HEAD.fields["physical_offset"][1] == PHYSICAL_OFFSET_AT
