"""The file layer: every byte the store writes or reads goes through here, so that a test can put a recording or a
failing layer in its place.

Files are written with pwrite and read with pread, never mapped. A full or broken disk then raises an exception, where a
mapped file would kill the process with SIGBUS. On this path pwrite also costs only a third of the page faults of a
mapping (1.3 KB records into a sparse file: 0.26 to 1.9 us each, against 1.0 to 3.7 us).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import resource
import shutil
import stat
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, Protocol

from duemq.storage.errors import NotDurable, NotInMemory, StoreFormatError, StoreLocked

_ZEROS: Final = bytes(1 << 20)
_DEFAULT_OPEN_FILES: Final = 512
_MAX_GAP: Final = 16 * 1024
"""Number of bytes whose copying costs about as much as another call."""
_MAX_BUFFERS: Final = 1000
"""Most buffers of one call; the system accepts 1024."""
_WRITE_SIZE: Final = 32 * 1024
"""Most bytes of one write. Larger writes to new pages make the system look for larger pieces of memory, which costs two
to three times as much per byte (ext4, Linux 6; measured)."""
_AHEAD_SIZE: Final = 128 << 10
"""Bytes of one request to read ahead. Linux reads no more for one request than its readahead window, by default this
size, and drops the rest."""
_VOID: Final = memoryview(bytearray(_MAX_GAP))


Ranges = Sequence[tuple[int, int]]
"""Offsets and sizes in bytes, ascending by offset."""


class File(Protocol):
    """One file of fixed size. One thread owns it. Other threads may call only the methods that say so: `sync`,
    `allocate`, `read_ahead`, `read_apart` and `write_apart`."""

    path: str

    def read(self, offset: int, size: int) -> bytes:
        """Return up to `size` bytes; fewer at the end of the file. May wait for the disk, unless `Files.may_wait` is
        False: then raises NotInMemory instead of waiting, where the file system can tell whether bytes are in memory.
        Raises OSError."""

    def read_ranges(self, ranges: Ranges) -> bytes:
        """Return the bytes of ranges, joined; zeros beyond the end of the file. May wait for the disk. Raises
        OSError."""

    def read_cached(self, ranges: Ranges) -> bytes | bytearray | None:
        """Return the bytes of ranges, joined, or None if reading them all would have to wait for the disk."""

    def read_apart(self, ranges: Ranges) -> bytes:
        """Read as `read_ranges` does, from any thread. Raises OSError."""

    def read_ahead(self, ranges: Ranges) -> None:
        """Ask the system to load ranges into memory soon, from any thread; waits only until the disk accepts the
        request. Raises OSError."""

    def next_data(self, offset: int) -> int:
        """Return the first offset, from `offset` on, of a byte that may be other than zero; the size of the file if no
        such byte follows. Where the file system does not report holes, that is `offset` itself. Raises OSError."""

    def write(self, offset: int, data: bytes) -> None:
        """Write all of `data`. Raises OSError; part of the data may then have been written."""

    def write_apart(self, writes: Sequence[tuple[int, bytes]]) -> None:
        """Write at several offsets and make the file durable, from any thread. Raises OSError as `write` does,
        NotDurable as `sync` does."""

    def allocate(self, offset: int, size: int) -> None:
        """Allocate disk space for a range, from any thread; its content does not change. Raises OSError."""

    def clear(self, offset: int) -> None:
        """Zero everything from `offset` on; the size does not change. Raises OSError."""

    def sync(self) -> None:
        """Make the written bytes durable (fdatasync), from any thread. Raises NotDurable; OSError if the file cannot be
        opened."""

    def size(self) -> int:
        """Return the size in bytes. Raises StoreFormatError if the file is not a regular one, OSError."""

    def close(self) -> None:
        """Release the descriptor; the next access opens the file again."""


class Files(Protocol):
    """The part of a file system that a store needs. Paths are absolute, or relative to the working directory."""

    may_wait: bool
    """Whether `File.read` may wait for the disk. Only the thread that owns the files uses this."""

    def create(self, path: str, size: int) -> File:
        """Make a sparse file of zeros. Its name appears only once it has its full size. Raises OSError."""

    def open(self, path: str, *, for_reading: bool = False) -> File:
        """Return an existing file. `for_reading`: it need not be writable, and its writes fail."""

    def exists(self, path: str) -> bool:
        """Whether a file or directory exists at a path."""

    def require_file(self, path: str) -> None:
        """Check that a path can be read and replaced as a small file, or does not exist. Raises StoreFormatError if the
        path is a directory, a pipe, a socket, a device or a broken link, or if a directory has the name of its
        temporary file, PATH.tmp; OSError."""

    def require_directory(self, path: str) -> None:
        """Check that a path is a directory or a link to one, or does not exist. Raises StoreFormatError."""

    def list(self, path: str) -> list[str]:
        """Return the names in a directory, sorted; an empty list where there is no directory. Raises OSError."""

    def make_directories(self, path: str, *, durable: bool = False) -> None:
        """Make a directory and its parents, as far as they do not exist. `durable`: the new names survive a power cut
        once this returns. Raises OSError, NotDurable."""

    def remove(self, path: str) -> None:
        """Remove a file, if it exists."""

    def remove_tree(self, path: str) -> None:
        """Remove a directory and its content, or a file, if it exists. Raises OSError; the call may be repeated."""

    def read_whole(self, path: str) -> bytes | None:
        """Return the bytes of a small file, or None if it does not exist. Raises StoreFormatError if the path is not
        a regular file, OSError."""

    def write_whole(self, path: str, data: bytes, *, durable: bool = True, mode: int = 0o666) -> None:
        """Replace a small file. Readers, and a start after a crash, see the old or the new content, never a part of it.
        `durable`: the new content survives a power cut once this returns. `mode`: the file's permission bits, less the
        process's umask, as for `os.open`. Raises OSError, NotDurable."""

    def link(self, source: str, target: str) -> None:
        """Give a file a second name, `target`; a file that had this name before loses it. After a crash `target` is the
        old or the new file. Raises OSError."""

    def sync_directory(self, path: str) -> None:
        """Make the names in a directory durable. Raises NotDurable; OSError if the directory cannot be opened."""

    def lock(self, path: str) -> Lock:
        """Take the lock of a store's lock file. Makes the file and its directory where they do not exist. Raises
        StoreLocked, OSError."""

    def lock_directory(self, path: str) -> Callable[[], None]:
        """Lock an existing directory, without changing anything in it, against another store that uses the same
        directory for its commitlog; return a function that releases the lock. Raises StoreLocked, OSError."""

    def used_ratio(self, path: str) -> float:
        """Return the used part of the file system of a directory, 0 to 1. Raises OSError."""

    def space(self, path: str) -> tuple[int, int]:
        """Return the size and the free bytes of the file system of a directory. Raises OSError."""

    def blocks_read(self) -> int:
        """Return the amount of data that was read from disks for this thread so far, in an unspecified unit: only
        changes of the value mean something. Reads from memory do not count; reads that were only begun (`read_cached`)
        may count."""


class Lock(Protocol):
    """A held lock."""

    @property
    def is_last_owner_rocketmq(self) -> bool:
        """Whether RocketMQ has held the lock since duemq last claimed it."""

    @property
    def is_last_owner_duemq(self) -> bool:
        """Whether only duemq has held the lock since it last claimed it."""

    def claim(self) -> None:
        """Note in the file, durably, that duemq holds the lock and wrote the checkpoint. Raises OSError."""

    def release(self) -> None:
        """Release the lock. The file and directories made for a lock that was never claimed are removed."""


class OsFile:
    """A file of the operating system. Its descriptor is opened on demand, and closed when too many others are open."""

    __slots__ = ("_fd", "_flags", "_owner", "path")

    def __init__(self, owner: OsFiles, path: str, flags: int = os.O_RDWR) -> None:
        self.path = path
        self._owner = owner
        self._flags = flags
        self._fd = -1

    def read(self, offset: int, size: int) -> bytes:
        """Return up to `size` bytes; fewer at the end of the file. May wait for the disk, unless `OsFiles.may_wait` is
        False: then raises NotInMemory instead of waiting, where the file system can tell whether bytes are in memory.
        Raises OSError."""
        if self._owner.may_wait or not self._owner.can_tell_cached:
            try:
                data = os.pread(fd := self._descriptor(), size, offset)
                return data if len(data) == size else data + _read_on(fd, offset + len(data), size - len(data))
            except OSError as error:
                raise _named(error, self.path) from error
        buffer = bytearray(size)
        if self._fill_cached([memoryview(buffer)], offset, offset + size):
            return bytes(buffer)
        if offset + size > (end := os.fstat(self._descriptor()).st_size):
            return self.read(offset, end - offset) if offset < end else b""
        raise NotInMemory(self.path, (self.path, offset), lambda: self.read_apart([(offset, size)]))

    def read_ranges(self, ranges: Ranges) -> bytes:
        """Return the bytes of ranges, joined; zeros beyond the end of the file. May wait for the disk. Raises
        OSError."""
        fd, pread = self._descriptor(), os.pread
        try:
            data = b"".join([pread(fd, size, offset) for offset, size in ranges])
        except OSError as error:
            raise _named(error, self.path) from error
        return data if len(data) == sum([size for _, size in ranges]) else _read_all(fd, ranges, self.path)

    def read_cached(self, ranges: Ranges) -> bytes | bytearray | None:
        """Return the bytes of ranges, joined, or None if reading them all would have to wait for the disk. Where the
        file system cannot tell whether bytes are in memory, this reads and waits. Raises OSError.

        Ranges that lie close together are read with one call, which also reads the bytes between them, into a scratch
        buffer: messages of one queue usually lie between those of other queues.
        """
        if not self._owner.can_tell_cached:
            return self.read_ranges(ranges)
        result = bytearray(sum([size for _, size in ranges]))
        view = memoryview(result)
        start = end = ranges[0][0]
        buffers: list[memoryview] = []
        filled = 0
        for offset, size in ranges:
            gap = offset - end
            if gap > _MAX_GAP or len(buffers) > _MAX_BUFFERS:
                if not self._fill_cached(buffers, start, end):
                    return None
                buffers, start = [], offset
            elif gap:
                buffers.append(_VOID[:gap])
            buffers.append(view[filled : filled + size])
            filled += size
            end = offset + size
        return result if self._fill_cached(buffers, start, end) else None

    def _fill_cached(self, buffers: list[memoryview], start: int, end: int) -> bool:
        """Read a range of the file into buffers, if that needs no disk; return whether it was read."""
        try:
            return os.preadv(self._descriptor(), buffers, start, os.RWF_NOWAIT) == end - start
        except OSError as error:
            if error.errno == errno.EOPNOTSUPP:
                self._owner.can_tell_cached = False
                return os.preadv(self._descriptor(), buffers, start) == end - start
            if error.errno != errno.EAGAIN:
                raise _named(error, self.path) from error
            return False

    def read_apart(self, ranges: Ranges) -> bytes:
        """Read as `read_ranges` does, from any thread. Opens the file again: the owner may close its descriptor
        meanwhile. Raises OSError."""
        fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return _read_all(fd, ranges, self.path)
        finally:
            os.close(fd)

    def read_ahead(self, ranges: Ranges) -> None:
        """Ask the system to load ranges into memory soon, from any thread; waits only until the disk accepts the
        request. Opens the file again: the owner may close its descriptor meanwhile. Raises OSError."""
        fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            for offset, size in ranges:
                for start in range(offset, offset + size, _AHEAD_SIZE):
                    os.posix_fadvise(fd, start, min(_AHEAD_SIZE, offset + size - start), os.POSIX_FADV_WILLNEED)
        finally:
            os.close(fd)

    def next_data(self, offset: int) -> int:
        """Return the first offset, from `offset` on, of a byte that may be other than zero; the size of the file if no
        such byte follows. Where the file system does not report holes, that is `offset` itself. Raises OSError."""
        fd = self._descriptor()
        try:
            return os.lseek(fd, offset, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:
                return os.fstat(fd).st_size
            return offset

    def write(self, offset: int, data: bytes) -> None:
        """Write all of `data`. Raises OSError; part of the data may then have been written."""
        fd = self._descriptor()
        size = len(data)
        if size <= _WRITE_SIZE:
            written = os.pwrite(fd, data, offset)
            if written == size:
                return
        else:
            written = 0
        view = memoryview(data)
        while written < size:
            end = min(size, written + _WRITE_SIZE - (offset + written) % _WRITE_SIZE)
            written += os.pwrite(fd, view[written:end], offset + written)

    def write_apart(self, writes: Sequence[tuple[int, bytes]]) -> None:
        """Write at several offsets and make the file durable, from any thread. Opens the file again: the owner may
        close its descriptor meanwhile. Raises OSError, after which part of the data may have been written;
        NotDurable."""
        fd = os.open(self.path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            for offset, data in writes:
                while data:
                    written = os.pwrite(fd, data, offset)
                    data, offset = data[written:], offset + written  # noqa: PLW2901
            _sync(fd, self.path)
        finally:
            os.close(fd)

    def allocate(self, offset: int, size: int) -> None:
        """Allocate disk space for a range, from any thread; its content does not change. Opens the file again: the
        owner may close its descriptor meanwhile. Raises OSError."""
        fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        try:
            os.posix_fallocate(fd, offset, size)
        finally:
            os.close(fd)

    def clear(self, offset: int) -> None:
        """Zero everything from `offset` on; the size does not change, and holes stay holes. Raises OSError."""
        fd = self._descriptor()
        end = os.fstat(fd).st_size
        while offset < end:
            try:
                start = os.lseek(fd, offset, os.SEEK_DATA)
                stop = os.lseek(fd, start, os.SEEK_HOLE)
            except OSError as error:
                if error.errno == errno.ENXIO:
                    return
                start, stop = offset, end
            while start < stop:
                start += os.pwrite(fd, _ZEROS[: stop - start], start)
            offset = stop

    def sync(self) -> None:
        """Make the written bytes durable (fdatasync), from any thread. Opens the file again: the owner may close its
        descriptor meanwhile. Raises NotDurable; OSError if the file cannot be opened."""
        fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            _sync(fd, self.path)
        finally:
            os.close(fd)

    def size(self) -> int:
        """Return the size in bytes. Raises StoreFormatError if the file is not a regular one, OSError."""
        status = _status(self.path)
        if status is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self.path)
        return status.st_size

    def close(self) -> None:
        """Release the descriptor; the next access opens the file again."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            self._owner.closed(self)

    def _descriptor(self) -> int:
        if self._fd < 0:
            self._fd = self._owner.open_descriptor(self.path, self._flags)
            self._owner.opened(self)
        return self._fd


class OsFiles:
    """The operating system's files. At most `max_open` OsFiles hold a descriptor at the same time."""

    def __init__(self, max_open: int = _DEFAULT_OPEN_FILES) -> None:
        self.can_tell_cached = hasattr(os, "RWF_NOWAIT")
        self.may_wait = True
        self._max_open = max_open
        self._open: OrderedDict[OsFile, None] = OrderedDict()

    def opened(self, file: OsFile) -> None:
        """Note that a file has opened its descriptor; close the file that was opened first if too many are open."""
        self._open[file] = None
        if len(self._open) > self._max_open:
            next(iter(self._open)).close()

    def closed(self, file: OsFile) -> None:
        """Note that a file has closed its descriptor."""
        self._open.pop(file, None)

    def open_descriptor(self, path: str, flags: int, mode: int = 0o644) -> int:
        """Open a path and return the new descriptor. If the process or the system has none left, all files that hold
        one close it first. Must be called in the thread that owns the files. Raises OSError."""
        try:
            return os.open(path, flags | os.O_CLOEXEC, mode)
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE) or not self._open:
                raise
        for file in list(self._open):
            file.close()
        return os.open(path, flags | os.O_CLOEXEC, mode)

    def create(self, path: str, size: int) -> OsFile:
        """Make a sparse file of zeros. The file gets its size while it is still unnamed (O_TMPFILE). Where the file
        system has no unnamed files, the file is made beside the directory and then renamed into it. Raises OSError."""
        directory = os.path.dirname(path)
        try:
            fd = self.open_descriptor(directory, os.O_TMPFILE | os.O_RDWR)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
                raise
            self._create_beside(path, size)
            return OsFile(self, path)
        try:
            try:
                os.ftruncate(fd, size)
            except OSError as error:  # for example, because the size exceeds this process's limit (ulimit -f)
                raise _named(error, path) from error
            # Python calls linkat, which can follow the symbolic link, only if a directory descriptor is given.
            os.link(f"/proc/self/fd/{fd}", path, src_dir_fd=fd, follow_symlinks=True)
        finally:
            os.close(fd)
        return OsFile(self, path)

    @staticmethod
    def _create_beside(path: str, size: int) -> None:
        temporary = f"{os.path.dirname(path)}.{os.path.basename(path)}.new"
        with open(temporary, "wb") as file:
            file.truncate(size)
        os.rename(temporary, path)

    def open(self, path: str, *, for_reading: bool = False) -> OsFile:
        """Return an existing file, which its first access opens. `for_reading`: it need not be writable, and its writes
        fail."""
        return OsFile(self, path, os.O_RDONLY if for_reading else os.O_RDWR)

    def exists(self, path: str) -> bool:
        """Whether a file or directory exists at a path."""
        return os.path.exists(path)

    def require_file(self, path: str) -> None:
        """Check that a path can be read and replaced as a small file, or does not exist. Raises StoreFormatError if the
        path is a directory, a pipe, a socket, a device or a broken link, or if a directory has the name of its
        temporary file, PATH.tmp; OSError."""
        _status(path)
        if os.path.isdir(f"{path}.tmp"):
            raise StoreFormatError(f"{path}.tmp", "is a directory, but temporary files get this name; move it away")

    def require_directory(self, path: str) -> None:
        """Check that a path is a directory or a link to one, or does not exist. Raises StoreFormatError."""
        if os.path.lexists(path) and not os.path.isdir(path):
            raise StoreFormatError(path, "is neither a directory nor a link to one; move it away")

    def list(self, path: str) -> list[str]:
        """Return the names in a directory, sorted; an empty list where there is no directory. Raises OSError."""
        try:
            return sorted(os.listdir(path))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def make_directories(self, path: str, *, durable: bool = False) -> None:
        """Make a directory and its parents, as far as they do not exist. `durable`: the new names survive a power cut
        once this returns. Raises OSError, NotDurable."""
        missing = _missing(path) if durable else []
        os.makedirs(path, exist_ok=True)
        for made in missing:
            self.sync_directory(os.path.dirname(made))

    def remove(self, path: str) -> None:
        """Remove a file, if it exists. Raises OSError."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)

    def remove_tree(self, path: str) -> None:
        """Remove a directory and its content, or a file, if it exists. Raises OSError; the call may be repeated."""
        while os.path.lexists(path):
            # A file that disappears meanwhile is not an error, and no reason to leave the rest.
            with contextlib.suppress(FileNotFoundError):
                if os.path.isdir(path) and not os.path.islink(path):
                    shutil.rmtree(path)
                else:
                    os.unlink(path)

    def read_whole(self, path: str) -> bytes | None:
        """Return the bytes of a small file, or None if it does not exist. Raises StoreFormatError if the path is not a
        regular file, OSError."""
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # opening a pipe would wait for its writer
        except FileNotFoundError:
            return None
        try:
            _check_kind(path, os.fstat(fd))
            with open(fd, "rb", closefd=False) as file:
                return file.read()
        finally:
            os.close(fd)

    def write_whole(self, path: str, data: bytes, *, durable: bool = True, mode: int = 0o666) -> None:
        """Replace a small file. Readers, and a start after a crash, see the old or the new content, never a part of it.
        `durable`: the new content survives a power cut once this returns. `mode`: the file's permission bits, less the
        process's umask, as for `os.open`. Raises OSError, NotDurable."""
        temporary = f"{path}.tmp"
        self.remove(temporary)  # the path may be a pipe or a link
        try:
            with open(temporary, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
                file.write(data)
                file.flush()
                if durable:
                    _sync(file.fileno(), path)
            os.rename(temporary, path)
        except OSError as error:
            with contextlib.suppress(OSError):
                self.remove(temporary)
            if error.filename is None:  # when a write fails, the system does not name the file
                raise OSError(error.errno, error.strerror, path) from error
            raise
        if durable:
            self.sync_directory(os.path.dirname(path))

    def link(self, source: str, target: str) -> None:
        """Give a file a second name, `target`, by a hard link, so the content is not read; a file that had this name
        before loses it. After a crash `target` is the old or the new file. Raises OSError."""
        temporary = f"{target}.tmp"
        self.remove(temporary)
        os.link(source, temporary)
        try:
            os.rename(temporary, target)
        except OSError:
            with contextlib.suppress(OSError):
                self.remove(temporary)
            raise

    def sync_directory(self, path: str) -> None:
        """Make the names in a directory durable. Raises NotDurable; OSError if the directory cannot be opened."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            _sync(fd, path, os.fsync)
        finally:
            os.close(fd)

    def lock(self, path: str) -> OsLock:
        """Take the lock of a store's lock file. Makes the file and its directory where they do not exist. Raises
        StoreLocked, OSError."""
        directory = os.path.dirname(path)
        made = _missing(directory)
        self.make_directories(directory, durable=True)
        return OsLock(path, made)

    def lock_directory(self, path: str) -> Callable[[], None]:
        """Lock an existing directory, without changing anything in it, against another store that uses the same
        directory for its commitlog; return a function that releases the lock. Raises StoreLocked, OSError."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            raise StoreLocked(path) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                os.close(fd)
                raise
        return partial(os.close, fd)

    def used_ratio(self, path: str) -> float:
        """Return the used part of the file system of a directory, 0 to 1. Counts as `df` does: space that is reserved
        for root counts as used. Raises OSError."""
        disk = os.statvfs(path)
        used = disk.f_blocks - disk.f_bfree
        return used / max(1, used + disk.f_bavail)

    def space(self, path: str) -> tuple[int, int]:
        """Return the size and the free bytes of the file system of a directory. Raises OSError."""
        disk = os.statvfs(path)
        return disk.f_blocks * disk.f_frsize, disk.f_bavail * disk.f_frsize

    def blocks_read(self) -> int:
        """Return the number of blocks that this thread has had to read from disks so far. Reads from network file
        systems do not count."""
        return resource.getrusage(resource.RUSAGE_THREAD).ru_inblock


def _read_on(fd: int, offset: int, size: int) -> bytes:
    """Return up to `size` bytes; fewer only at the end of the file. Where a page cannot be read, the system returns
    only the bytes before it, and reports the error when a read begins with that page. Raises OSError."""
    pieces = []
    while size and (piece := os.pread(fd, size, offset)):
        pieces.append(piece)
        offset, size = offset + len(piece), size - len(piece)
    return b"".join(pieces)


def _read_all(fd: int, ranges: Ranges, path: str) -> bytes:
    """Return the bytes of ranges, joined. Bytes beyond the end of a truncated file read as zeros, as in a file into
    which they were never written. Raises OSError with the path."""
    try:
        return b"".join([_read_on(fd, offset, size).ljust(size, b"\0") for offset, size in ranges])
    except OSError as error:
        raise _named(error, path) from error


def _named(error: OSError, path: str) -> OSError:
    """Return a system error with the file's path: for reads by descriptor, the system does not name the file."""
    return OSError(error.errno, error.strerror, path)


def _status(path: str) -> os.stat_result | None:
    """Return the status of a file; None if it does not exist. Raises StoreFormatError if the path is not a regular
    file, or is a broken link; OSError."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        if os.path.islink(path):
            why = f"is a link to {os.readlink(path)}, which does not exist"
            raise StoreFormatError(path, f"{why}; mount the disk that has it, or remove the link") from None
        return None
    _check_kind(path, status)
    return status


def _check_kind(path: str, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = "a directory" if stat.S_ISDIR(status.st_mode) else "a pipe, a socket or a device"
        raise StoreFormatError(path, f"is {kind}, where a file has to be; move it away")


def _missing(path: str) -> list[str]:
    """Return a directory and those of its parents that do not exist, topmost first; nothing if it exists."""
    missing = []
    at = os.path.abspath(path)
    while not os.path.isdir(at):
        missing.append(at)
        at = os.path.dirname(at)
    return missing[::-1]


def _sync(fd: int, path: str, sync: Callable[[int], None] = os.fdatasync) -> None:
    try:
        sync(fd)
    except OSError as error:
        raise NotDurable(error.errno, error.strerror, path) from error
    except KeyboardInterrupt:  # Ctrl-C at the command line ends the process
        raise
    except BaseException as error:  # for example, no memory: the result of the call is not known
        raise NotDurable(errno.EIO, f"a sync ended with {error!r}", path) from error


_NO_LOCKS: Final = frozenset((errno.EBADF, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP))
"""Errors of file systems that cannot lock directories, such as some network file systems."""


class OsLock:
    """RocketMQ's lock: an exclusive POSIX record lock on the first byte of the file `lock`. RocketMQ writes "lock" into
    the file at every start, and duemq writes "duemq" when it claims the store: so the text tells which of them had the
    store last.

    The descriptor stays open as long as the lock is held: if the process closed any descriptor of the file, the system
    would drop the lock.
    """

    _THEIRS: Final = b"lock"
    _OURS: Final = b"duemq"

    def __init__(self, path: str, made: Sequence[str] = ()) -> None:
        """Take the lock. `made`: directories that were made for the file, topmost first. Raises StoreLocked,
        OSError."""
        self._path = path
        self._made = made
        self._is_new = not os.path.exists(path)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 0)
        except OSError as error:
            os.close(self._fd)
            if error.errno in (errno.EACCES, errno.EAGAIN):
                raise StoreLocked(path) from None
            raise
        self._text = os.pread(self._fd, 16, 0)

    @property
    def is_last_owner_rocketmq(self) -> bool:
        """Whether RocketMQ has held the lock since duemq last claimed it."""
        return self._text.startswith(self._THEIRS)

    @property
    def is_last_owner_duemq(self) -> bool:
        """Whether only duemq has held the lock since it last claimed it."""
        return self._text == self._OURS

    def claim(self) -> None:
        """Note in the file, durably, that duemq holds the lock and wrote the checkpoint. Raises OSError."""
        if self._text != self._OURS:
            os.pwrite(self._fd, self._OURS, 0)
            os.fdatasync(self._fd)
            self._text = self._OURS
        self._is_new = False

    def release(self) -> None:
        """Release the lock. The file and directories made for a lock that was never claimed are removed."""
        if self._is_new:
            os.unlink(self._path)
            for directory in reversed(self._made):
                with contextlib.suppress(OSError):  # another process put a file there
                    os.rmdir(directory)
        os.close(self._fd)
