"""The file layer: every byte the store writes or reads goes through here, so that a test can put a recording or a
failing layer in its place.

Files are written with pwrite and read with pread, never mapped. A full disk or a broken one is then an exception,
where a mapped file would kill the process with SIGBUS; and on this path pwrite costs a third of what the page faults
of a mapping cost (1.3 KB records into a sparse file: 0.26 to 1.9 us each, against 1.0 to 3.7).
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
"""Copying so much costs about as much as another call."""
_MAX_BUFFERS: Final = 1000
"""The system takes 1024."""
_WRITE_SIZE: Final = 32 * 1024
"""Larger writes to new pages make the system look for larger pieces of memory: two to three times the cost a byte
(ext4, Linux 6; measured)."""
_AHEAD_SIZE: Final = 128 << 10
"""Linux reads no more than its readahead window for one order, which is this by default, and drops the rest."""
_VOID: Final = memoryview(bytearray(_MAX_GAP))


Ranges = Sequence[tuple[int, int]]
"""Offsets and sizes, ascending."""


class File(Protocol):
    """One file of fixed size. One thread owns it; only `sync`, `read_ahead` and `..._apart` may be called from
    others."""

    path: str

    def read(self, offset: int, size: int) -> bytes:
        """Up to `size` bytes; fewer at the end of the file. May wait for the disk, unless `Files.may_wait` says no:
        then it raises NotInMemory."""

    def read_ranges(self, ranges: Ranges) -> bytes:
        """The bytes of ranges, joined; zeros beyond the end of the file. May wait for the disk. Raises OSError."""

    def read_cached(self, ranges: Ranges) -> bytes | bytearray | None:
        """The bytes of ranges, joined, or None where they cannot all be had without waiting for the disk."""

    def read_apart(self, ranges: Ranges) -> bytes:
        """As `read_ranges`, from any thread. Raises OSError."""

    def read_ahead(self, ranges: Ranges) -> None:
        """Have ranges in memory soon, from any thread; waits for no more than that the disk takes the order. Raises
        OSError."""

    def write(self, offset: int, data: bytes) -> None:
        """Write all of `data`. Raises OSError; part of it may have been written then."""

    def write_apart(self, writes: Sequence[tuple[int, bytes]]) -> None:
        """Write at several offsets and make the file durable, from any thread. Raises OSError as `write`, NotDurable as
        `sync`."""

    def allocate(self, offset: int, size: int) -> None:
        """Have space on the disk for a range, whose content stays, from any thread. Raises OSError."""

    def clear(self, offset: int) -> None:
        """Zero everything from `offset` on; the size stays."""

    def sync(self) -> None:
        """Make the written bytes durable (fdatasync); may be called from any thread. Raises NotDurable."""

    def size(self) -> int:
        """Size in bytes. Raises StoreFormatError where it is not a regular file, OSError."""

    def close(self) -> None:
        """Release the descriptor; the file opens again by itself."""


class Files(Protocol):
    """A file system, as much of it as a store needs. Paths are absolute or relative to the process."""

    may_wait: bool
    """Whether `File.read` may wait for the disk. Belongs to the thread that owns the files."""

    def create(self, path: str, size: int) -> File:
        """A new sparse file of zeros. Its name appears only once it has its full size."""

    def open(self, path: str) -> File:
        """An existing file."""

    def exists(self, path: str) -> bool:
        """Whether there is a file or directory."""

    def require_file(self, path: str) -> None:
        """See that a path can be read and replaced as a small file; nothing at all is right. Raises StoreFormatError
        where there is a directory, a pipe or a link to nothing; OSError."""

    def list(self, path: str) -> list[str]:
        """Names in a directory, sorted; none where there is no directory."""

    def make_directories(self, path: str, *, durable: bool = False) -> None:
        """Make a directory and those above it, as far as they are not there. `durable`: their names survive a power cut
        when this is done. Raises OSError, NotDurable."""

    def remove(self, path: str) -> None:
        """Remove a file, if it is there."""

    def remove_tree(self, path: str) -> None:
        """Remove a directory and all in it, if it is there. Raises OSError; it may be called again."""

    def read_whole(self, path: str) -> bytes | None:
        """The bytes of a small file, or None where there is none. Raises StoreFormatError where it is not a regular
        file, OSError."""

    def write_whole(self, path: str, data: bytes, *, durable: bool = True, mode: int = 0o666) -> None:
        """Replace a small file; readers and crashes see the old or the new text, never a part. `mode`: who may read and
        write it, less the process's umask, as at `os.open`."""

    def copy(self, source: str, target: str) -> None:
        """Give a file a second name, replacing what had that name; a crash leaves the old or the new."""

    def sync_directory(self, path: str) -> None:
        """Make the names in a directory durable. Raises NotDurable."""

    def lock(self, path: str) -> Lock:
        """Hold a store's lock file, which is made where it is not there, and its directory. Raises StoreLocked,
        OSError."""

    def lock_directory(self, path: str) -> Callable[[], None]:
        """Hold a directory that is there, in which nothing is changed; gives what lets go of it. For another store
        that has the same directory for its commitlog. Raises StoreLocked, OSError."""

    def used_ratio(self, path: str) -> float:
        """How full the file system of a directory is, 0 to 1."""

    def space(self, path: str) -> tuple[int, int]:
        """Size and free bytes of the file system of a directory. Raises OSError."""

    def blocks_read(self) -> int:
        """How much this thread has had read from disks, in some unit. What it found in memory does not count; what
        it only had begun (`read_cached`) may."""


class Lock(Protocol):
    """A held lock."""

    @property
    def was_theirs(self) -> bool:
        """Whether RocketMQ had it since we last claimed it."""

    @property
    def was_ours(self) -> bool:
        """Whether nobody else had it since."""

    def claim(self) -> None:
        """Note in the file that we have the lock, and that the checkpoint is ours, durably. Raises OSError."""

    def release(self) -> None:
        """Give it up. The file and directories made for a lock that was never claimed are removed."""


class OsFile:
    """A file of the operating system. Its descriptor opens on demand and closes when many others are in use."""

    __slots__ = ("_fd", "_owner", "path")

    def __init__(self, owner: OsFiles, path: str) -> None:
        self.path = path
        self._owner = owner
        self._fd = -1

    def read(self, offset: int, size: int) -> bytes:
        """See File."""
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
        """See File."""
        fd, pread = self._descriptor(), os.pread
        try:
            data = b"".join([pread(fd, size, offset) for offset, size in ranges])
        except OSError as error:
            raise _named(error, self.path) from error
        return data if len(data) == sum([size for _, size in ranges]) else _read_all(fd, ranges, self.path)

    def read_cached(self, ranges: Ranges) -> bytes | bytearray | None:
        """See File. Where the file system cannot tell, it reads and waits.

        Ranges that lie close together cost one call, which also reads what is between them, into the void: messages
        of one queue usually lie between those of others.
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
        """Read a range of the file into buffers, if that needs no disk."""
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
        """See File. Opens the file anew: the owner may close its descriptor meanwhile."""
        fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return _read_all(fd, ranges, self.path)
        finally:
            os.close(fd)

    def read_ahead(self, ranges: Ranges) -> None:
        """See File. Opens the file anew: the owner may close its descriptor meanwhile."""
        fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            for offset, size in ranges:
                for start in range(offset, offset + size, _AHEAD_SIZE):
                    os.posix_fadvise(fd, start, min(_AHEAD_SIZE, offset + size - start), os.POSIX_FADV_WILLNEED)
        finally:
            os.close(fd)

    def write(self, offset: int, data: bytes) -> None:
        """See File."""
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
        """See File. Opens the file anew: the owner may close its descriptor meanwhile."""
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
        """See File. Opens the file anew: the owner may close its descriptor meanwhile."""
        fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        try:
            os.posix_fallocate(fd, offset, size)
        finally:
            os.close(fd)

    def clear(self, offset: int) -> None:
        """See File. Holes stay holes."""
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
        """See File. Opens the file anew: the owner may close its descriptor meanwhile."""
        fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            _sync(fd, self.path)
        finally:
            os.close(fd)

    def size(self) -> int:
        """See File."""
        status = _status(self.path)
        if status is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self.path)
        return status.st_size

    def close(self) -> None:
        """See File."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            self._owner.closed(self)

    def _descriptor(self) -> int:
        if self._fd < 0:
            self._fd = self._owner.open_descriptor(self.path, os.O_RDWR)
            self._owner.opened(self)
        return self._fd


class OsFiles:
    """The operating system's files. At most `max_open` descriptors of segments are held at a time."""

    def __init__(self, max_open: int = _DEFAULT_OPEN_FILES) -> None:
        self.can_tell_cached = hasattr(os, "RWF_NOWAIT")
        self.may_wait = True
        self._max_open = max_open
        self._open: OrderedDict[OsFile, None] = OrderedDict()

    def opened(self, file: OsFile) -> None:
        """A file took a descriptor: take one from the file that opened first, if they are too many."""
        self._open[file] = None
        if len(self._open) > self._max_open:
            next(iter(self._open)).close()

    def closed(self, file: OsFile) -> None:
        """A file gave its descriptor back."""
        self._open.pop(file, None)

    def open_descriptor(self, path: str, flags: int, mode: int = 0o644) -> int:
        """A new descriptor. Where there is none left, the files that have one and are not in use just now give theirs
        back first. For the thread that owns the files. Raises OSError."""
        try:
            return os.open(path, flags | os.O_CLOEXEC, mode)
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE) or not self._open:
                raise
        for file in list(self._open):
            file.close()
        return os.open(path, flags | os.O_CLOEXEC, mode)

    def create(self, path: str, size: int) -> OsFile:
        """See Files. An unnamed file gets its size first; where the file system has none (O_TMPFILE), a file beside
        the directory is renamed into it."""
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
            except OSError as error:  # it may be larger than a file of this process may be (ulimit -f)
                raise _named(error, path) from error
            # Only with a directory descriptor given does Python call linkat, which can follow the symbolic link.
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

    def open(self, path: str) -> OsFile:
        """See Files."""
        return OsFile(self, path)

    def exists(self, path: str) -> bool:
        """See Files."""
        return os.path.exists(path)

    def require_file(self, path: str) -> None:
        """See Files."""
        _status(path)
        if os.path.isdir(f"{path}.tmp"):
            raise StoreFormatError(f"{path}.tmp", "is a directory, where files are made; move it away")

    def list(self, path: str) -> list[str]:
        """See Files."""
        try:
            return sorted(os.listdir(path))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def make_directories(self, path: str, *, durable: bool = False) -> None:
        """See Files."""
        missing = _missing(path) if durable else []
        os.makedirs(path, exist_ok=True)
        for made in missing:
            self.sync_directory(os.path.dirname(made))

    def remove(self, path: str) -> None:
        """See Files."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)

    def remove_tree(self, path: str) -> None:
        """See Files."""
        while os.path.lexists(path):
            # A file that disappears meanwhile is no error, and no reason to leave the rest.
            with contextlib.suppress(FileNotFoundError):
                if os.path.isdir(path) and not os.path.islink(path):
                    shutil.rmtree(path)
                else:
                    os.unlink(path)

    def read_whole(self, path: str) -> bytes | None:
        """See Files."""
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe would wait for who writes into it
        except FileNotFoundError:
            return None
        try:
            _check_kind(path, os.fstat(fd))
            with open(fd, "rb", closefd=False) as file:
                return file.read()
        finally:
            os.close(fd)

    def write_whole(self, path: str, data: bytes, *, durable: bool = True, mode: int = 0o666) -> None:
        """See Files."""
        temporary = f"{path}.tmp"
        self.remove(temporary)  # it may be a pipe, or a link
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
            if error.filename is None:  # the system names no file where a write fails
                raise OSError(error.errno, error.strerror, path) from error
            raise
        if durable:
            self.sync_directory(os.path.dirname(path))

    def copy(self, source: str, target: str) -> None:
        """See Files. A hard link: the text is not read."""
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
        """See Files."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            _sync(fd, path, os.fsync)
        finally:
            os.close(fd)

    def lock(self, path: str) -> OsLock:
        """See Files."""
        directory = os.path.dirname(path)
        made = _missing(directory)
        self.make_directories(directory, durable=True)
        return OsLock(path, made)

    def lock_directory(self, path: str) -> Callable[[], None]:
        """See Files."""
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
        """See Files. As `df` counts: what only root may still use counts as used."""
        disk = os.statvfs(path)
        used = disk.f_blocks - disk.f_bfree
        return used / max(1, used + disk.f_bavail)

    def space(self, path: str) -> tuple[int, int]:
        """See Files."""
        disk = os.statvfs(path)
        return disk.f_blocks * disk.f_frsize, disk.f_bavail * disk.f_frsize

    def blocks_read(self) -> int:
        """See Files. File systems of a network do not count."""
        return resource.getrusage(resource.RUSAGE_THREAD).ru_inblock


def _read_on(fd: int, offset: int, size: int) -> bytes:
    """Up to `size` bytes; fewer only at the end of the file. The system gives fewer where a page behind them cannot be
    read, and says why when it is asked for that page. Raises OSError."""
    pieces = []
    while size and (piece := os.pread(fd, size, offset)):
        pieces.append(piece)
        offset, size = offset + len(piece), size - len(piece)
    return b"".join(pieces)


def _read_all(fd: int, ranges: Ranges, path: str) -> bytes:
    """The bytes of ranges, joined. What a file that was cut off does not have any more are zeros, as in a file into
    which it was never written. Raises OSError with the path."""
    try:
        return b"".join([_read_on(fd, offset, size).ljust(size, b"\0") for offset, size in ranges])
    except OSError as error:
        raise _named(error, path) from error


def _named(error: OSError, path: str) -> OSError:
    """An error of the system, which names no file where a descriptor is read, with the file's path."""
    return OSError(error.errno, error.strerror, path)


def _status(path: str) -> os.stat_result | None:
    """The status of a file, None where there is none. Raises StoreFormatError where it is not a regular file."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        if os.path.islink(path):
            why = f"is a link to {os.readlink(path)}, which is not there"
            raise StoreFormatError(path, f"{why}; mount the disk that has it, or remove the link") from None
        return None
    _check_kind(path, status)
    return status


def _check_kind(path: str, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = "a directory" if stat.S_ISDIR(status.st_mode) else "a pipe, a socket or a device"
        raise StoreFormatError(path, f"is {kind}, where a file has to be; move it away")


def _missing(path: str) -> list[str]:
    """A directory and those above it, as far as they are not there, the highest first."""
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
    except KeyboardInterrupt:  # of a command line: it ends the process
        raise
    except BaseException as error:  # for want of memory, say: the result of the call is not known
        raise NotDurable(errno.EIO, f"a sync ended with {error!r}", path) from error


_NO_LOCKS: Final = frozenset((errno.EBADF, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP))
"""What file systems say that have no locks for directories, some network ones for example."""


class OsLock:
    """RocketMQ's lock: an exclusive POSIX record lock on the first byte of the file `lock`. RocketMQ writes "lock" into
    it at every start, we something else: so it tells who had the store last.

    The descriptor stays open as long as the lock is held: closing any descriptor of the file would drop it.
    """

    _THEIRS: Final = b"lock"
    _OURS: Final = b"duemq"

    def __init__(self, path: str, made: Sequence[str] = ()) -> None:
        """`made`: directories that were made for the file, the highest first."""
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
    def was_theirs(self) -> bool:
        """See Lock."""
        return self._text.startswith(self._THEIRS)

    @property
    def was_ours(self) -> bool:
        """See Lock."""
        return self._text == self._OURS

    def claim(self) -> None:
        """See Lock."""
        if self._text != self._OURS:
            os.pwrite(self._fd, self._OURS, 0)
            os.fdatasync(self._fd)
            self._text = self._OURS
        self._is_new = False

    def release(self) -> None:
        """See Lock."""
        if self._is_new:
            os.unlink(self._path)
            for directory in reversed(self._made):
                with contextlib.suppress(OSError):  # another process put a file there
                    os.rmdir(directory)
        os.close(self._fd)
