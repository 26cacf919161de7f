"""Errors of jobs, each with a text of one line for the user."""

from __future__ import annotations

import errno
import os
from typing import Final

from duemq.storage.errors import NotRegular


class JobError(Exception):
    """A job cannot be done. The text says in one line what is wrong and what to do."""


class NoStore(JobError):
    """There is no store at a path. Attributes: `path`, `why`."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(f"{path}: {why}")
        self.path, self.why = path, why

    def __reduce__(self) -> tuple[type[NoStore], tuple[str, str]]:
        return NoStore, (self.path, self.why)


class CannotRead(JobError, OSError):
    """A file or directory cannot be read, or is not of the right kind. The text names it, and says what to do."""


class NotKept(JobError):
    """The results of an earlier run cannot be used; the text says why. The run reads the missing parts again."""


_NOT_REGULAR: Final = (
    "is not a regular file but a FIFO, a socket or a device, which jobs do not read; move it away, or put the file back"
)
_HINTS: Final = {
    errno.EACCES: "this user may not read it; run the job as a user who may",
    errno.EPERM: "this user may not read it; run the job as a user who may",
    errno.EISDIR: "is a directory, and a file belongs there; move it away, or put the file back",
    errno.ENOTDIR: "is a file, and a directory belongs there; move it away, or put the directory back",
    errno.ELOOP: "is a link that leads back to itself; put back what it should lead to, or remove it",
    errno.EIO: "the disk cannot read it (Input/output error); restore it from a copy, or move it away: a job then "
    "reports what it held",
}


def cannot_read(path: str, error: OSError) -> CannotRead:
    """Return the error for a file or directory that cannot be read. `path`: as the user knows it."""
    hint = _HINTS.get(error.errno or 0)
    if error.errno == errno.ENOENT and error.filename and os.path.islink(error.filename):
        hint = f"is a link to {os.readlink(error.filename)}, which does not exist; put that back, or remove the link"
    if isinstance(error, NotRegular):
        hint = _HINTS[errno.EISDIR] if os.path.isdir(error.filename) else _NOT_REGULAR
    lines = str(error.strerror or error).splitlines() or [type(error).__name__]
    return CannotRead(f"{path}: {hint or f'cannot be read: {lines[0]}'}")
