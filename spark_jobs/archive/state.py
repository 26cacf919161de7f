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
import itertools
import os
import stat
import tarfile
from collections.abc import Collection, Iterable, Iterator
from typing import IO, Final, NamedTuple

from duemq.spark_jobs.errors import JobError

Extent = tuple[int, int]
"""Offset and size, in bytes."""
_CHUNK: Final = 1 << 20
_HAS_FILTERS: Final = hasattr(tarfile, "data_filter")
"""Whether this Python has tarfile's filters: Python 3.11 has them from 3.11.4 on, so that of Debian 12 lacks them."""


class Members(NamedTuple):
    """What of some files and directories goes into a tar. `names`: of the members, each directory before what is in
    it; `left_out`: names of FIFOs, sockets and devices, which have no contents to restore."""

    names: list[str]
    left_out: list[str]


def members(root: str, names: Iterable[str]) -> Members:
    """Return what of files and directories of a root goes into a tar. Raises OSError, and JobError for a link that
    `read` would refuse."""
    found = Members([], [])
    for name in names:
        _find(found, root, name)
    return found


def _find(found: Members, root: str, name: str) -> None:
    path = os.path.join(root, name)
    mode = os.lstat(path).st_mode
    if stat.S_ISLNK(mode) and not _stays_inside(name, os.readlink(path)):
        raise JobError(
            f"{path}: is a link to {os.readlink(path)}: only a relative link to a place within the store can be "
            "restored; put what it leads to in its place, or remove it"
        )
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISLNK(mode)):
        found.left_out.append(name)
        return
    found.names.append(name)
    for child in sorted(os.listdir(path)) if stat.S_ISDIR(mode) else ():
        _find(found, root, os.path.join(name, child))


def write(stream: IO[bytes], root: str, names: Iterable[str]) -> None:
    """Write files, directories and links of a root as a tar. `names`: those of `members`. Raises OSError."""
    with tarfile.open(fileobj=stream, mode="w|", format=tarfile.PAX_FORMAT) as tar:
        for name in names:
            _add(tar, root, name)


def read(stream: IO[bytes], root: str, *, but: Collection[str] = ()) -> None:
    """Extract a tar below a root. `but`: names in the root of what others write, of which the tar must have nothing.
    Raises OSError, and TarError also for a member that would lie or lead outside the root."""
    try:
        os.makedirs(root, exist_ok=True)
        with tarfile.open(fileobj=stream, mode="r|") as tar:
            # Each member is checked once those before it are extracted.
            if _HAS_FILTERS:
                tar.extractall(root, _checked(tar, root, but), filter="data")
            else:
                tar.extractall(root, map(_as_data, _checked(tar, root, but), itertools.repeat(root)))
    except (ValueError, KeyError, OverflowError) as error:  # tarfile lets these through for some damaged members
        raise tarfile.TarError(f"a member of the tar is damaged: {error}") from error


def _checked(tar: tarfile.TarFile, root: str, but: Collection[str]) -> Iterator[tarfile.TarInfo]:
    """Yield the members of a tar of `write`. Raises TarError for one that would lie outside the root, passes over a
    link, or leads outside, for a device or a FIFO, and for one that is `but`, or a hard link to it.

    No path is resolved: `os.path.realpath` stops without saying so where a path is longer than the system allows. It
    need not be, since no name passes over a link, and a link goes up only at its beginning, from a real directory."""
    for info in tar:
        if not (info.isreg() or info.isdir() or info.issym() or info.islnk()):
            raise tarfile.TarError(f"{info.name}: is a device or a FIFO")
        _refuse_others(info, info.name, but)
        _refuse_links(info, info.name, root)
        if info.issym():
            info.linkname = os.path.normpath(info.linkname)  # as the filter `data` of later Pythons does
            if not _stays_inside(info.name, info.linkname):
                raise tarfile.TarError(f"{info.name}: would be a link to {info.linkname}, which is outside")
        if info.islnk():
            # A hard link to a symbolic link would be that link in another directory, and lead elsewhere.
            _refuse_links(info, info.linkname, root)
            _refuse_others(info, info.linkname, but)  # a later member of the same name would be written into it
            if not os.path.isfile(os.path.join(root, info.linkname)):
                raise tarfile.TarError(f"{info.name}: would be a link to {info.linkname}, which is not there")
        yield info


def _refuse_others(info: tarfile.TarInfo, name: str, but: Collection[str]) -> None:
    """Check that a name of a member is none of `but`, and not below one. Raises TarError."""
    top = next((part for part in name.split("/") if part not in ("", ".")), "")
    if top in but:
        raise tarfile.TarError(f"{info.name}: a tar of the other files has nothing of {top}; use an intact archive")


def _refuse_links(info: tarfile.TarInfo, name: str, root: str) -> None:
    """Check that a name of a member is one below the root, and passes over no link. Raises TarError."""
    parts = name.split("/")
    if os.path.isabs(name) or ".." in parts:
        raise tarfile.TarError(f"{info.name}: would lie outside the directory")
    for count in range(1, len(parts) + 1):
        try:
            mode = os.lstat(os.path.join(root, *parts[:count])).st_mode
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            raise tarfile.TarError(f"{info.name[:80]}: {error.strerror}") from error
        if stat.S_ISLNK(mode):
            raise tarfile.TarError(f"{info.name}: would lie behind the link {'/'.join(parts[:count])}")


def _stays_inside(name: str, target: str) -> bool:
    """Return whether a symbolic link leads to a place inside the root, whatever other such links there are: it is
    relative, goes up only at its beginning, and no further than the root."""
    if os.path.isabs(target):
        return False
    parts = [part for part in target.split("/") if part not in ("", ".")]
    up = len(list(itertools.takewhile(lambda part: part == "..", parts)))
    return ".." not in parts[up:] and up <= len([part for part in name.split("/") if part not in ("", ".")]) - 1


def _as_data(info: tarfile.TarInfo, root: str) -> tarfile.TarInfo:
    """Take from a member its owner and the permissions that the filter `data` of later Pythons removes."""
    info.uid, info.gid, info.uname, info.gname = os.getuid(), os.getgid(), "", ""
    if info.isdir():
        info.mode = os.stat(root).st_mode & 0o777  # of a new directory
        return info
    executable = 0o111 if info.mode & 0o100 else 0
    info.mode = info.mode & (0o644 | executable) | 0o600
    return info


def _add(tar: tarfile.TarFile, root: str, name: str) -> None:
    path = os.path.join(root, name)
    info = tar.gettarinfo(path, name)
    if info is None:  # a socket, although it is one of the members
        raise OSError(errno.EINVAL, "is not a regular file", path)
    if not info.isreg():
        tar.addfile(info)
        return
    with open(path, "rb", opener=_open_file) as file:
        parts = _data_of(file, info.size)
        if parts == [(0, info.size)] or not info.size:
            file.seek(0)
            tar.addfile(info, file)
        else:
            _add_sparse(tar, info, file, parts)


def _open_file(path: str, flags: int) -> int:
    """Open a file without waiting, as for the writer of a FIFO that is there meanwhile. Raises OSError if it is not a
    regular file."""
    fd = os.open(path, flags | os.O_NONBLOCK | os.O_NOFOLLOW)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "is not a regular file", path)
    return fd


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
