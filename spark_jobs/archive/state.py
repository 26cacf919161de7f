"""The files of a store besides messages and queues, in an archive: a tar whose holes stay holes.

A timer wheel and the last file of a timer log are mostly holes; written out as zeros they would take hundreds of MB and
the time to read them. A file with holes is a member in GNU tar's sparse format 1.0 for PAX archives, which GNU tar,
bsdtar and Python's tarfile read:

    extended header     GNU.sparse.major=1, .minor=0, .name: the member's, .realsize: of the file
    member              "<parts>\\n" and for each part "<offset>\\n<size>\\n", zeros up to a multiple of 512 bytes;
                        then the bytes of the parts. A file that ends in a hole has an empty part at its end
"""

from __future__ import annotations

import errno
import io
import os
import tarfile
from collections.abc import Iterable, Iterator
from typing import IO, Final

Extent = tuple[int, int]
"""Offset and size, in bytes."""
_CHUNK: Final = 1 << 20
_HAS_FILTERS: Final = hasattr(tarfile, "data_filter")
"""Whether this Python has tarfile's filters: Python 3.11 has them from 3.11.4 on, so that of Debian 12 lacks them."""


def write(stream: IO[bytes], root: str, names: Iterable[str]) -> None:
    """Write files and directories of a root as a tar. Raises OSError."""
    with tarfile.open(fileobj=stream, mode="w|", format=tarfile.PAX_FORMAT) as tar:
        for name in names:
            _add(tar, root, name)


def read(stream: IO[bytes], root: str) -> None:
    """Extract a tar below a root. Raises OSError, and TarError also for a member that would lie outside the root."""
    try:
        with tarfile.open(fileobj=stream, mode="r|") as tar:
            if _HAS_FILTERS:
                tar.extractall(root, filter="data")
            else:
                for info in tar:
                    tar.extract(_as_data(info, root), root)
    except (ValueError, KeyError, OverflowError) as error:  # tarfile lets these through for some damaged members
        raise tarfile.TarError(f"a member of the tar is damaged: {error}") from error


def _as_data(info: tarfile.TarInfo, root: str) -> tarfile.TarInfo:
    """Check a member as the filter `data` of later Pythons does, and take from it its owner and the permissions that
    filter removes. Raises TarError for a member or link outside the root, and for a device or a FIFO."""
    below = os.path.join(os.path.realpath(root), "")
    if os.path.isabs(info.name) or os.path.isabs(info.linkname):
        raise tarfile.TarError(f"{info.name}: is absolute, or points to an absolute path")
    if not (info.isreg() or info.isdir() or info.issym() or info.islnk()):
        raise tarfile.TarError(f"{info.name}: is a device or a FIFO")
    paths = [info.name]
    if info.issym():
        paths.append(os.path.join(os.path.dirname(info.name), info.linkname))
    elif info.islnk():
        paths.append(info.linkname)
    for path in paths:
        if not os.path.join(os.path.realpath(os.path.join(root, path)), "").startswith(below):
            raise tarfile.TarError(f"{info.name}: would lie or point outside the directory")
    info.uid, info.gid, info.uname, info.gname = os.getuid(), os.getgid(), "", ""
    info.mode = info.mode & 0o755 | (0o700 if info.isdir() else 0o600)
    return info


def _add(tar: tarfile.TarFile, root: str, name: str) -> None:
    path = os.path.join(root, name)
    info = tar.gettarinfo(path, name)
    if info is None:  # a socket
        return
    if not info.isreg():
        tar.addfile(info)
        for child in sorted(os.listdir(path)) if info.isdir() else ():
            _add(tar, root, os.path.join(name, child))
        return
    with open(path, "rb") as file:
        parts = _data_of(file, info.size)
        if parts == [(0, info.size)] or not info.size:
            file.seek(0)
            tar.addfile(info, file)
        else:
            _add_sparse(tar, info, file, parts)


def _data_of(file: IO[bytes], size: int) -> list[Extent]:
    """Return the parts of a file that hold data; all of it if the file system has no holes."""
    found, end = [], 0
    while end < size:
        try:
            start = os.lseek(file.fileno(), end, os.SEEK_DATA)
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            break
        end = min(os.lseek(file.fileno(), start, os.SEEK_HOLE), size)
        if start < end:
            found.append((start, end - start))
    return found


def _add_sparse(tar: tarfile.TarFile, info: tarfile.TarInfo, file: IO[bytes], parts: list[Extent]) -> None:
    size = info.size
    if not parts or sum(parts[-1]) < size:
        parts = [*parts, (size, 0)]
    table = b"%d\n" % len(parts) + b"".join(b"%d\n%d\n" % part for part in parts)
    table += bytes(-len(table) % tarfile.BLOCKSIZE)
    info.pax_headers = {
        "GNU.sparse.major": "1",
        "GNU.sparse.minor": "0",
        "GNU.sparse.name": info.name,
        "GNU.sparse.realsize": str(size),
    }
    directory, name = os.path.split(info.name)
    info.name = os.path.join(directory, "GNUSparseFile.0", name)
    info.size = len(table) + sum(length for _, length in parts)
    tar.addfile(info, io.BufferedReader(_Chunks(_content(table, file, parts))))


def _content(table: bytes, file: IO[bytes], parts: list[Extent]) -> Iterator[bytes]:
    """Yield the bytes of a member with holes; fewer if the file was cut meanwhile, which tarfile detects."""
    yield table
    for start, size in parts:
        at, end = start, start + size
        while at < end:
            data = os.pread(file.fileno(), min(end - at, _CHUNK), at)
            if not data:
                return
            yield data
            at += len(data)


class _Chunks(io.RawIOBase):
    """A readable file made of chunks of bytes."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        super().__init__()
        self._chunks = chunks
        self._held = memoryview(b"")

    def readable(self) -> bool:
        """Return True: the file can be read."""
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """Fill the buffer with the next bytes, or a part of it; return their number, 0 at the end."""
        if not self._held:
            self._held = memoryview(next(self._chunks, b""))
        taken = self._held[: len(buffer)]
        buffer[: len(taken)] = taken
        self._held = self._held[len(taken) :]
        return len(taken)
