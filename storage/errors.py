"""The errors of a store.

StoreError
├── StoreLocked         another process has the store open
├── StoreFormatError    a file does not match its name: wrong size, wrong name, unreadable text
│   ├── StoreFileMissing    a file of a sequence is missing
│   └── StoreFileSize       the size of a file of a sequence is not the configured one
├── StoreFull           no room on the disk, no memory, or no free file descriptor; nothing of the write remains
├── StoreBroken         a write or a flush failed: no more appends until the store is reopened
├── StoreClosed         the store is not open
├── NotInMemory         a read would have to wait for the disk, which is not allowed now: see `Files.may_wait`
├── NotDurable          a sync failed: bytes written before it may be missing on the disk, even if a later
│                       sync succeeds; also an OSError
├── NotRegular          a path that a caller gave is not a regular file; also an OSError
├── QueueCheckDamaged   the file queuecheck is damaged, from some byte on; its readers catch this
└── RecordIllegal       the store does not accept messages of this kind
    └── RecordTooLarge  the message is larger than the store accepts
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Hashable


class StoreError(Exception):
    """Base of all errors that this package raises."""


class StoreLocked(StoreError):
    """Another process has this store open, or another store with the same commitlog. Attribute: `path`, of the lock
    file or of the commitlog's directory."""

    def __init__(self, path: str) -> None:
        super().__init__(f"the store is in use by another process: {path} is locked")
        self.path = path


class StoreFormatError(StoreError):
    """A file of the store has a wrong kind, name, size or content. Attributes: `path`, `why`."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(f"{path}: {why}")
        self.path = path
        self.why = why


class StoreFileMissing(StoreFormatError):
    """A file in the middle of a sequence is missing or empty."""


class StoreFileSize(StoreFormatError):
    """The size of a file of a sequence is not the configured one."""


class QueueCheckDamaged(StoreError):
    """The file queuecheck is damaged, from some byte on."""


class StoreFull(StoreError):
    """There is no room on the disk, no memory, or no free file descriptor: the write was undone, and the store still
    serves reads."""


class StoreBroken(StoreError):
    """A write or a flush failed, so the bytes on the disk are unknown. Only reopening the store helps."""


class StoreClosed(StoreError):
    """The store is closed."""


class RecordIllegal(StoreError):
    """The store does not accept this message."""


class RecordTooLarge(RecordIllegal):
    """A message does not fit. Attributes: `size` and `limit` in bytes; `what`, the part of the message that is too
    large."""

    def __init__(self, what: str, size: int, limit: int) -> None:
        super().__init__(f"{what} of {size} bytes; the limit is {limit}")
        self.what = what
        self.size = size
        self.limit = limit


class NotInMemory(StoreError):
    """A read would have to wait for the disk, which is not allowed now. `read` does that read, in any thread, and
    raises OSError; afterwards the bytes are in memory for a while. `position`: the path of a file and the position in
    it at which the bytes begin, or another value that is the same for all reads of the same bytes."""

    def __init__(self, path: str, position: Hashable, read: Callable[[], object]) -> None:
        super().__init__(f"{path}: not in memory")
        self.position = position
        self.read = read


class NotDurable(StoreError, OSError):
    """A sync failed. Has the errno of the system's error, and `filename`."""


class NotRegular(StoreError, OSError):
    """A path that a caller gave is not a regular file. Has `filename`."""


def has_no_room(error: BaseException) -> bool:
    """Whether an error means that a disk, or a quota, is full. Such an error casts no doubt on the bytes on the
    disk."""
    if isinstance(error, NotDurable):
        return False
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
