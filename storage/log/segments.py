"""A sequence of files of one size, which together are one long array of bytes.

    <directory>/00000000000000000000  00000000001073741824  ...     each name: the offset of its first byte, 20 digits

Every file has exactly the configured size (RocketMQ refuses a store in which a file has another) and is sparse: bytes
that are not written yet are zeros. RocketMQ makes files ahead of need; such a file, with nothing but zeros, is kept and
used in its turn.
"""

from __future__ import annotations

import os
from typing import Final

from duemq.storage.errors import StoreFileMissing, StoreFileSize, StoreFormatError
from duemq.storage.files import File, Files

NAME_DIGITS: Final = 20


class Segments:
    """The files of one directory. Offsets are absolute: `begin` is the offset of the first file's first byte."""

    def __init__(self, files: Files, directory: str, segment_size: int, *, for_reading: bool = False) -> None:
        """`for_reading`: nothing will be written, so the files need not be writable."""
        self._for_reading = for_reading
        self.directory = directory
        self.segment_size = segment_size
        self._files = files
        self._segments: dict[int, File] = {}
        self._empty: str | None = None
        """Path of a file of 0 bytes behind the last one, as a crash of RocketMQ may leave it."""
        self.has_names = False
        """Whether `load` found a directory with anything in it."""
        self.names_made = 0
        """Number of files made so far, and 1 more if `load` found files."""
        self._names_synced = 0
        """The value of `names_made` up to which the files' names survive a power cut."""
        self.begin = 0
        """Offset of the first existing byte."""
        self.end = 0
        """Offset after the last byte of the last file; equals `begin` when there is no file."""

    @property
    def has_unsynced_names(self) -> bool:
        """Whether a file's name in the directory is not durable yet."""
        return self.names_made != self._names_synced

    def note_names_synced(self, names: int) -> None:
        """Note that the names of the first `names` files made have been synced."""
        self._names_synced = max(self._names_synced, names)

    def load(self, *, passes_over_others: bool = False) -> list[str]:
        """Find the files, changing nothing. Raises StoreFormatError for a name that is not an offset, except
        lost+found, which ext4 has in its root; StoreFileSize for a wrong size; StoreFileMissing if the sequence has a
        gap; OSError. `passes_over_others`: names that are not offsets are no error; their paths are returned."""
        names = [name for name in self._files.list(self.directory) if name != "lost+found"]
        self.has_names = bool(names)
        others = [os.path.join(self.directory, name) for name in names if not _is_offset(name)]
        if others and not passes_over_others:
            raise StoreFormatError(others[0], f"is not named by an offset of {NAME_DIGITS} digits; move it away")
        names = [name for name in names if _is_offset(name)]
        for name in names:
            path = os.path.join(self.directory, name)
            if int(name) % self.segment_size:
                raise StoreFormatError(path, f"is not named by a multiple of the file size {self.segment_size}")
            file = self._files.open(path, for_reading=self._for_reading)
            size, base = file.size(), int(name)
            if size == 0 and name == names[-1]:
                self._empty = path
                return others
            if size != self.segment_size:
                raise StoreFileSize(path, f"has {size} bytes, but the configured file size is {self.segment_size}")
            if self._segments and base != self.end:
                raise StoreFileMissing(
                    path,
                    f"the file before it, {self.end:020}, is missing. Put it back; or, to continue without the data "
                    "before the gap, move the files before the gap elsewhere, too",
                )
            if not self._segments:
                self.begin = base
            self._segments[base] = file
            self.end = base + self.segment_size
            # The process that made the file may have died before the name was durable.
            self.names_made = 1
        return others

    def __len__(self) -> int:
        return len(self._segments)

    def base_of(self, offset: int) -> int:
        """Return the offset of the first byte of the file that has (or would have) this offset."""
        return offset - offset % self.segment_size

    def ensure(self, offset: int) -> None:
        """Make the file for an offset at the end, or the very first file. Raises OSError."""
        base = self.base_of(offset)
        if base in self._segments:
            return
        self._remove_empty()
        if not self._segments:
            self._files.make_directories(self.directory)
            self.begin = self.end = base
        assert base == self.end, f"{base} does not follow {self.end}"
        self._segments[base] = self._files.create(os.path.join(self.directory, f"{base:020}"), self.segment_size)
        self.names_made += 1
        self.end = base + self.segment_size

    def read(self, offset: int, size: int) -> bytes:
        """Return `size` bytes of one or more files: fewer where the files end, none outside them. Raises NotInMemory,
        OSError as `File.read` does."""
        if not self.begin <= offset < self.end:
            return b""
        base = self.base_of(offset)
        if offset + size <= base + self.segment_size:
            return self._segments[base].read(offset - base, size)
        pieces = []
        size = min(size, self.end - offset)
        while size > 0:
            count = min(size, base + self.segment_size - offset)
            pieces.append(self._segments[base].read(offset - base, count))
            offset, size, base = offset + count, size - count, base + self.segment_size
        return b"".join(pieces)

    def file_at(self, offset: int) -> tuple[File, int] | None:
        """Return the file with an offset, and the position in it; None outside the files."""
        base = self.base_of(offset)
        file = self._segments.get(base)
        return (file, offset - base) if file is not None else None

    def write(self, offset: int, data: bytes) -> None:
        """Write into existing files. Raises OSError."""
        base = self.base_of(offset)
        while len(data) > base + self.segment_size - offset:
            count = base + self.segment_size - offset
            self._segments[base].write(offset - base, data[:count])
            data, offset, base = data[count:], offset + count, base + self.segment_size
        self._segments[base].write(offset - base, data)

    def clear_from(self, offset: int) -> None:
        """Zero the rest of the file with this offset and remove the files after it, the last one first. The first file
        is kept, even if it is zeroed completely: its name is the offset that the next byte gets. Raises OSError."""
        base = self.base_of(offset)
        self._remove_empty()
        for later in sorted((other for other in self._segments if other > base), reverse=True):
            self._remove(later)
            self.end = later
        if base not in self._segments:
            return
        if offset > base or base == self.begin:
            self._segments[base].clear(offset - base)
        else:
            self._remove(base)
            self.end = base

    def drop_before(self, offset: int) -> list[str]:
        """Forget the files that end at or before an offset, but never the last one: its name says where the sequence
        continues. Returns their paths, oldest first, for the caller to remove: removing a large file may take long."""
        paths = []
        while len(self._segments) > 1 and self.begin + self.segment_size <= offset:
            file = self._segments.pop(self.begin)
            file.close()
            paths.append(file.path)
            self.begin += self.segment_size
        return paths

    def files_between(self, start: int, end: int) -> list[File]:
        """Return the files with bytes in a range, oldest first."""
        base = max(self.base_of(start), self.begin)
        return [self._segments[at] for at in range(base, end, self.segment_size) if at in self._segments]

    def close(self) -> None:
        """Close the descriptors."""
        for file in self._segments.values():
            file.close()

    def forget_all(self) -> str:
        """Close the files and forget them. Returns their directory, for the caller to remove."""
        self.close()
        self._segments.clear()
        self.begin = self.end = 0
        return self.directory

    def remove_all(self) -> None:
        """Remove the files and the directory. Raises OSError."""
        self._files.remove_tree(self.forget_all())

    def remove_from(self, base: int) -> None:
        """Remove the file whose first byte has the offset `base` and all files after it, and forget all files; `load`
        may follow. The directory, which may be a link or a mount point, is kept, and so is any other file in it. Raises
        OSError."""
        self.forget_all()
        self._empty = None
        for name in reversed(self._files.list(self.directory)):
            if _is_offset(name) and int(name) >= base:
                path = os.path.join(self.directory, name)
                try:
                    self._files.remove(path)
                except IsADirectoryError:
                    self._files.remove_tree(path)

    def _remove_empty(self) -> None:
        if self._empty is not None:
            self._files.remove(self._empty)
            self._empty = None

    def _remove(self, base: int) -> None:
        file = self._segments.pop(base)
        file.close()
        self._files.remove(file.path)


def _is_offset(name: str) -> bool:
    return len(name) == NAME_DIGITS and name.isdecimal()
