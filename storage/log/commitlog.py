"""The commitlog: every message of the broker in one append-only sequence of records.

    commitlog/00000000000000000000, ...   files of 1 GiB (mappedFileSizeCommitLog); see `segments`
    a file: | record | record | ... | end marker: int32 space left, uint32 0xCBD43194, undefined |

A record (see `protocol.records.record`) never crosses files: when it and the 8 bytes of an end marker do not fit into
the rest of a file, an end marker takes up the rest, and the record starts the next file. Physical offsets count bytes
over all files.

Always begin <= flushed <= end. Only `append.Appender` and recovery move `end`; only `note_flushed` and recovery move
`flushed`. The bytes from `end` on are zeros, so that recovery, which reads up to the first bytes that are not a record,
stops there.

Mirrors apache/rocketmq store/CommitLog.java (4.9.7). The format is RocketMQ's and frozen.

Keeps invariants 1 and 2 of ARCHITECTURE.md.
"""

from __future__ import annotations

import os
from typing import Final

from duemq.protocol.records.record import END_MARKER, END_MARKER_SIZE, MAGIC_END
from duemq.storage.errors import StoreError, StoreFileSize, StoreFormatError
from duemq.storage.files import File, Files
from duemq.storage.log.segments import Segments

DEFAULT_SEGMENT_SIZE: Final = 1 << 30


class Commitlog:
    """The files, and the three positions begin, flushed and end. All offsets are physical offsets, in bytes."""

    def __init__(self, files: Files, directory: str, segment_size: int = DEFAULT_SEGMENT_SIZE) -> None:
        self._segments = Segments(files, directory, segment_size)
        self._files = files
        self.segment_size = segment_size
        self.end = 0
        """Physical offset of the next record."""
        self.flushed = 0
        """Physical offset before which everything survives a power cut."""

    @property
    def begin(self) -> int:
        """Offset of the oldest byte that still exists."""
        return self._segments.begin

    @property
    def directory(self) -> str:
        """The directory of the files."""
        return self._segments.directory

    @property
    def allocated_end(self) -> int:
        """Offset after the last byte of the last file, written or not."""
        return self._segments.end

    def load(self) -> None:
        """Find the files, changing nothing; recovery sets the positions. Raises StoreFormatError, OSError."""
        try:
            self._segments.load()
        except StoreFileSize as error:
            raise StoreFileSize(
                error.path,
                f"{error.why}. If all files of the commitlog have that size, set mappedFileSizeCommitLog to it; "
                "if only this one has, it was truncated or added to: put a whole copy of it in its place",
            ) from None
        if self.segment_size <= 1024:
            raise StoreFormatError(self.directory, f"a file size of {self.segment_size} is too small for a commitlog")

    def segment_end(self, offset: int) -> int:
        """Return the offset after the last byte of the file that contains, or would contain, this offset."""
        return self._segments.base_of(offset) + self.segment_size

    def ensure_segment(self, offset: int) -> None:
        """Make the file for an offset, if it does not exist. Raises OSError."""
        self._segments.ensure(offset)

    def write(self, offset: int, data: bytes) -> None:
        """Write into one file. Raises OSError."""
        self._segments.write(offset, data)

    def write_end_marker(self, offset: int) -> None:
        """End the records of the file with this offset: the next record goes into the next file. Raises OSError."""
        self._segments.write(offset, END_MARKER.pack(self.segment_end(offset) - offset, MAGIC_END))

    def read(self, offset: int, size: int) -> bytes | None:
        """Return `size` bytes of records; None if not all of them exist (deleted, or not written yet). May wait for the
        disk. Raises NotInMemory, OSError as `File.read` does."""
        if offset < self.begin or offset + size > self.end:
            return None
        return self._segments.read(offset, size)

    def size_apart(self, offset: int) -> int | None:
        """Return the size of the record at a physical offset, from any thread; None if its file cannot be read."""
        base = self._segments.base_of(offset)
        try:
            data = self._files.open(os.path.join(self.directory, f"{base:020}")).read_apart([(offset - base, 4)])
        except (OSError, StoreError):
            return None
        return int.from_bytes(data, "big", signed=True) if len(data) == 4 else None

    def read_raw(self, offset: int, size: int) -> bytes:
        """Return up to `size` bytes of the files, whether they are records or not, for recovery."""
        return self._segments.read(offset, size)

    def locate(self, offset: int, size: int) -> tuple[File, int] | None:
        """Return the file that holds `size` bytes of records at an offset, and the position in it; None as for
        `read`."""
        if offset < self.begin or offset + size > self.end:
            return None
        return self._segments.file_at(offset)

    def locate_space(self, offset: int) -> tuple[File, int] | None:
        """Return the file with an offset that is not written yet, and the position in it; None if there is no such
        file."""
        return self._segments.file_at(offset) if offset < self._segments.end else None

    def recovered(self, end: int) -> None:
        """Set the positions after recovery, and clear what a torn write left behind `end`. Raises OSError."""
        self._segments.clear_from(end)
        self.end = end
        self.flushed = self.begin

    def read_up_to(self, end: int) -> None:
        """Set the positions of a log that is only read: the bytes behind `end` are not changed."""
        self.end = end
        self.flushed = self.begin

    def unflushed_files(self) -> list[File]:
        """Return the files that have to be synced to make everything up to `end` durable, oldest first."""
        return self._segments.files_between(self.flushed, self.end)

    @property
    def names_made(self) -> int:
        """Number of files made so far, as `Segments.names_made` counts them."""
        return self._segments.names_made

    @property
    def has_unsynced_names(self) -> bool:
        """Whether a file's name in the directory is not durable yet."""
        return self._segments.has_unsynced_names

    def note_flushed(self, offset: int, names: int) -> None:
        """Note that everything before `offset`, and the names of the first `names` files made, have been synced."""
        self.flushed = max(self.flushed, offset)
        self._segments.note_names_synced(names)

    def clear_tail(self) -> None:
        """Zero the bytes that a failed write left behind `end`. Raises OSError."""
        if self.end < self._segments.end:
            self._segments.clear_from(self.end)

    def segment_bases(self) -> list[int]:
        """Return the first offsets of the files, oldest first."""
        return list(range(self.begin, self._segments.end, self.segment_size))

    def drop_before(self, offset: int) -> list[str]:
        """Forget files that end at or before an offset, never the one being written. Returns their paths, for the
        caller to remove."""
        return self._segments.drop_before(min(offset, self._segments.base_of(self.end)))

    def close(self) -> None:
        """Close the descriptors."""
        self._segments.close()


assert END_MARKER_SIZE == 8
