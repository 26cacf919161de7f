"""What can go wrong with a store.

StoreError
├── StoreLocked         another process has the store open
├── StoreFormatError    a file is not what its name says: wrong size, wrong place, unreadable text
│   ├── StoreFileMissing    a file of a sequence is not there
│   └── StoreFileSize       a file of a sequence has not the size that all have
├── StoreFull           the disk has no room; nothing of the write remains
├── StoreBroken         a write or a flush failed: no more appends until the store is opened anew
├── StoreClosed         the store is not open
├── NotInMemory         a read would have to wait for the disk, and may not: see `Files.may_wait`
├── NotDurable          a sync failed: what the disk holds of what was written before is unknown, and a second sync that
│                       succeeds says nothing about it; an OSError, too
├── QueueCheckDamaged   queuecheck, or the rest of it, cannot be believed; never leaves those who read it
└── RecordIllegal       a message is not of a kind that the store takes
    └── RecordTooLarge  it is larger than the store takes
"""

from __future__ import annotations

from collections.abc import Callable, Hashable


class StoreError(Exception):
    """Base of everything this package raises."""


class StoreLocked(StoreError):
    """Another process has the store open, or a store with the same commitlog. Attribute: `path` of the lock file, or of
    the commitlog."""

    def __init__(self, path: str) -> None:
        super().__init__(f"the store is in use by another process: {path} is locked")
        self.path = path


class StoreFormatError(StoreError):
    """A file of the store is not as it has to be. Attributes: `path`, `why`."""

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
    """A write or a flush failed, so what is on the disk is unknown. Only opening the store anew helps."""


class StoreClosed(StoreError):
    """The store is closed."""


class RecordIllegal(StoreError):
    """A message that the store does not take."""


class RecordTooLarge(RecordIllegal):
    """A message does not fit. Attributes: `size` and `limit` in bytes, `what` of the message is too large."""

    def __init__(self, what: str, size: int, limit: int) -> None:
        super().__init__(f"{what} of {size} bytes; at most {limit} are taken")
        self.what = what
        self.size = size
        self.limit = limit


class NotInMemory(StoreError):
    """A read would have to wait for the disk. `read` makes it, in any thread; it raises OSError. What was read is in
    memory then, for a while. `place` tells it from other reads, wherever they are made."""

    def __init__(self, path: str, place: Hashable, read: Callable[[], object]) -> None:
        super().__init__(f"{path}: not in memory")
        self.place = place
        self.read = read


class NotDurable(StoreError, OSError):
    """A sync failed. Has the errno of the system's error, and `filename`."""
