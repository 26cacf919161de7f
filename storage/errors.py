"""The errors of a store.

StoreError
├── StoreLocked         another process has the store open
├── StoreFormatError    a file does not match its name: wrong size, wrong place, unreadable text
│   ├── StoreFileMissing    a file of a sequence is not there
│   └── StoreFileSize       a file of a sequence has another size than the configured one
├── StoreFull           the disk has no room; nothing of the write remains
├── StoreBroken         a write or a flush failed: no more appends until the store is opened anew
├── StoreClosed         the store is not open
├── NotInMemory         a read would wait for the disk, and may not: see `Files.may_wait`
├── NotDurable          a sync failed: the disk may lack bytes written before, and a second sync that
│                       succeeds says nothing about those; also an OSError
├── QueueCheckDamaged   the file queuecheck, or the rest of it, is damaged; its readers catch this
└── RecordIllegal       the store does not take messages of this kind
    └── RecordTooLarge  the message is larger than the store takes
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Hashable


class StoreError(Exception):
    """Base of all errors that this package raises."""


class StoreLocked(StoreError):
    """Another process has the store open, or a store with the same commitlog. Attribute: `path` of the lock file, or of
    the commitlog."""

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
    """A file of a sequence has another size than the configured one."""


class QueueCheckDamaged(StoreError):
    """The file queuecheck, or the rest of it, is damaged."""


class StoreFull(StoreError):
    """The disk is full: the write was undone, the store goes on serving reads."""


class StoreBroken(StoreError):
    """A write or a flush failed, so the bytes on the disk are unknown. Only opening the store anew helps."""


class StoreClosed(StoreError):
    """The store is closed."""


class RecordIllegal(StoreError):
    """The store does not take this message."""


class RecordTooLarge(RecordIllegal):
    """A message does not fit. Attributes: `size` and `limit` in bytes; `what`, the part of the message that is too
    large."""

    def __init__(self, what: str, size: int, limit: int) -> None:
        super().__init__(f"{what} of {size} bytes; at most {limit} are taken")
        self.what = what
        self.size = size
        self.limit = limit


class NotInMemory(StoreError):
    """A read would wait for the disk, and may not. `read` does that read, in any thread, and raises OSError; for a
    while the bytes are in memory then. `place` tells this read from other reads, wherever they are made."""

    def __init__(self, path: str, place: Hashable, read: Callable[[], object]) -> None:
        super().__init__(f"{path}: not in memory")
        self.place = place
        self.read = read


class NotDurable(StoreError, OSError):
    """A sync failed. Has the errno of the system's error, and `filename`."""


def has_no_room(error: BaseException) -> bool:
    """Whether an error says that a disk is full, which casts no doubt on the bytes on it."""
    if isinstance(error, NotDurable):
        return False
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
