"""Opens files that people and programs replace: accounts, certificates and settings while the broker runs, and the
files of stores and archives that jobs read.

A path may have become something else: opening a FIFO waits for a writer, and a device may have no end. So a file that
is not a regular one is refused, without waiting.
"""

from __future__ import annotations

import errno
import os
import stat

from duemq.storage.errors import NotRegular


def open_regular(path: str, flags: int = os.O_RDONLY, mode: int = 0o600) -> int:
    """Open a regular file, and return its descriptor. `flags`, `mode`: as for os.open. Raises OSError with the
    path and the reason, NotRegular if the path is not a regular file."""
    try:
        descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, mode)
    except OSError as error:
        if error.errno == errno.ENXIO:  # a FIFO that nobody reads, or a socket
            raise _not_regular(path) from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _not_regular(path)
    return descriptor


def read_regular(path: str, limit: int = -1) -> bytes:
    """Return the content of a regular file, up to `limit` bytes, or all of it. Raises OSError as `open_regular`
    does."""
    with os.fdopen(open_regular(path), "rb") as file:
        return file.read(limit)


def _not_regular(path: str) -> NotRegular:
    return NotRegular(errno.EINVAL, "is not a regular file", path)
