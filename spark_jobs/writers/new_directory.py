"""Where a new store is written: a directory beside the target, which is renamed to the target once it is whole and
synced. An interrupted run leaves the target as it was, and its remains are removed by the next one.

    <target>.partial/            the new store
    <target>.partial/.scratch/   files that tasks leave for each other; removed before the end
    <target>.partial.lock        locked while a run writes there

Keeps invariant 23 of ARCHITECTURE.md.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import struct
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from duemq.spark_jobs.errors import JobError, cannot_read
from duemq.spark_jobs.store.local_files import local_path, reason, size_text
from duemq.storage import file_names
from duemq.storage.errors import NotRegular
from duemq.storage.regular_files import open_regular

_SYNC_THREADS: Final = 4
_SPARE_BYTES: Final = 64 << 20
SCRATCH: Final = ".scratch"
_FLOCK: Final = struct.Struct("hhqqi4x")


class NewDirectory:
    """A new directory of this machine in the making. `begin` makes it. Raises JobError for a URI."""

    def __init__(self, target: str) -> None:
        self.target = os.path.abspath(local_path(target))
        self.path = f"{self.target}.partial"
        """Where files are written until `finish`."""
        self.scratch = os.path.join(self.path, SCRATCH)
        self.mark = os.path.join(self.scratch, f"{uuid.uuid4().hex}.mark")
        """A file whose name exists in no other directory of this path, on any machine."""
        self._lock_path = f"{self.path}.lock"
        self._lock = -1

    def begin(self) -> None:
        """Make the directory, without the remains of an interrupted run. Raises JobError."""
        with _as_job_error(self.target):
            if os.path.exists(self.target) and (not os.path.isdir(self.target) or os.listdir(self.target)):
                raise JobError(f"{self.target}: exists and is not empty; give another path, or remove it first")
            os.makedirs(os.path.dirname(self.target), exist_ok=True)
            self._lock = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(self._lock)
                self._lock = -1
                raise JobError(f"{self.path}: another run is writing there; wait for it to end") from None
            shutil.rmtree(self.path, ignore_errors=True)
            os.makedirs(self.scratch)
            with open(self.mark, "xb"):
                pass

    def join(self, *names: str) -> str:
        """Return a path in the directory, and make the directory it lies in."""
        path = os.path.join(self.path, *names)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        return path

    def need(self, size: int) -> None:
        """Check that there is room for `size` more bytes. Raises JobError."""
        free = shutil.disk_usage(self.path).free
        if free < size + _SPARE_BYTES:
            raise JobError(
                f"{self.target}: {size_text(size + _SPARE_BYTES)} are needed there, {size_text(free)} are free; "
                "make room, or give a path on another disk"
            )

    def finish(self) -> None:
        """Sync everything and rename the directory to the target. Raises JobError."""
        with _as_job_error(self.target):
            shutil.rmtree(self.scratch)
            files, directories = [], []
            for root, _, names in os.walk(self.path):
                directories.append(root)
                # A link has nothing to sync besides its directory, and may lead nowhere.
                files += [path for name in names if not os.path.islink(path := os.path.join(root, name))]
            with ThreadPoolExecutor(_SYNC_THREADS) as threads:
                list(threads.map(sync, files))
            for directory in directories:
                sync(directory)
            os.rename(self.path, self.target)
            sync(os.path.dirname(self.target))
            self._unlock()

    def give_up(self) -> None:
        """Remove what was written, unless `finish` is done."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            self._unlock()

    def _unlock(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._lock_path)
        os.close(self._lock)
        self._lock = -1


def sync(path: str) -> None:
    """Sync a file or a directory. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def held(store_path: str) -> Iterator[None]:
    """Keep brokers from opening a store meanwhile. Raises JobError if one has it open, CannotRead if the lock file is
    not a regular file."""
    path = os.path.join(store_path, file_names.LOCK)
    try:
        fd = open_regular(path, os.O_RDWR)
    except FileNotFoundError:
        # Without the file no broker ever had the store open, and a starting broker makes it before it writes anything.
        yield
        return
    except PermissionError:
        raise JobError(
            f"{path}: cannot be opened, so the job cannot tell whether a broker has the store open; run it as a user "
            "who may"
        ) from None
    except NotRegular as error:
        raise cannot_read(path, error) from None
    try:
        try:
            # Java's FileChannel.tryLock is an fcntl lock on the first byte, and so is duemq's. This one belongs to the
            # descriptor, not to the process: closing the file elsewhere in this process does not release it.
            fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0))
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                raise JobError(f"{store_path}: a broker has this store open; stop it first") from None
            raise
        yield
    finally:
        os.close(fd)


@contextlib.contextmanager
def _as_job_error(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise JobError(f"{path}: {reason(error)}") from None
