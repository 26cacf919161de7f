"""The files of the audit log.

    audit/audit.log       the newest entries, a line of JSON each
    audit/audit.log.1     the entries before those, and so on up to the number of files that the settings allow

A thread writes the lines in the order of the entries; each write has all entries that came since the last one. A file
that has reached its size gets a number, and the oldest file is removed. Only the broker's user may read the files.

While the files cannot be written, entries are kept in memory. Once MAX_KEPT entries wait (`is_full`), requests whose
changes would have to be recorded are refused: the log exists to prevent changes without an entry.

Keeps invariant 33 of ARCHITECTURE.md.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from typing import Any, Final

import structlog

from duemq.broker.settings.live_settings import LiveSettings
from duemq.broker.workers import Background, Workers
from duemq.protocol.frames import fastjson
from duemq.storage.regular_files import open_regular

log = structlog.get_logger(__name__)

MAX_KEPT: Final = 10_000
"""Maximum number of entries that wait to be written."""
_MODE: Final = 0o600
_DIRECTORY_MODE: Final = 0o700

Entry = dict[str, Any]


class AuditLog:
    """The audit log of one broker. Belongs to the event loop; a thread writes."""

    def __init__(self, settings: LiveSettings, path: str, workers: Workers) -> None:
        """`path`: the path of the newest file; its directory is created with the first entry."""
        self.path = path
        self._settings = settings
        self._workers = workers
        self._lines: list[bytes] = []
        self._is_writing = False
        self._why = ""
        """Why the last write failed, so that this is logged only once."""
        self._stopped: asyncio.Future[None] | None = None
        """Resolved when no write runs any longer."""
        self.written = 0
        """Entries written since the start."""

    @property
    def is_full(self) -> bool:
        """Whether no more entries can be kept, because the files cannot be written."""
        return len(self._lines) >= MAX_KEPT

    def add(self, entry: Entry) -> int:
        """Record an entry; return the bytes of its line."""
        line = fastjson.dumps(entry) + b"\n"
        self._lines.append(line)
        self.write()
        return len(line)

    def write(self) -> None:
        """Write the waiting entries in the background; to be called again after a failure."""
        if not self._lines or self._is_writing:
            return
        self._is_writing = True
        lines = list(self._lines)
        config = self._settings.config
        size, files = config.audit_file_size, config.audit_files

        def done(error: Exception | None) -> None:
            self._is_writing = False
            self._written(len(lines), error)
            if not self._is_writing and self._stopped is not None and not self._stopped.done():
                self._stopped.set_result(None)

        self._workers.start(Background.TABLES, lambda: _append(self.path, b"".join(lines), size, files), done)

    async def stop(self) -> None:
        """Write the waiting entries. If that fails, they are lost, which is logged."""
        self.write()
        while self._is_writing:
            stopped = self._stopped = asyncio.get_running_loop().create_future()
            await stopped
        if self._lines:
            log.error("audit_lost", path=self.path, reason=self._why, entries=len(self._lines))

    def _written(self, count: int, error: Exception | None) -> None:
        if error is None:
            del self._lines[:count]
            self.written += count
            if self._why:
                self._why = ""
                log.info("audit_written_again", path=self.path)
            self.write()
            return
        why = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else str(error)
        if why != self._why:
            self._why = why
            log.error("audit_not_written", path=self.path, reason=why, entries=len(self._lines))


def _append(path: str, data: bytes, size: int, files: int) -> None:
    """Append lines to the newest file; if that already has `size` bytes or more, begin a new file first. Raises
    OSError; then none of the lines is in the file, so that they can be written again."""
    os.makedirs(os.path.dirname(path), mode=_DIRECTORY_MODE, exist_ok=True)
    with suppress(FileNotFoundError):
        if os.path.getsize(path) >= size:
            _shift(path, files)
    descriptor = open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, _MODE)
    try:
        before = os.fstat(descriptor).st_size
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(descriptor, view) :]
        except OSError:
            with suppress(OSError):
                os.ftruncate(descriptor, before)
            raise
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from None
    finally:
        os.close(descriptor)


def _shift(path: str, files: int) -> None:
    """Give each file the next number and remove the oldest ones, so that with a new file there are `files` of them.
    Raises OSError."""
    last = files - 1
    number = last or 1
    with suppress(FileNotFoundError):
        while True:
            os.unlink(f"{path}.{number}")
            number += 1  # the setting may have been larger
    if not last:
        os.unlink(path)
        return
    for number in range(last - 1, 0, -1):
        with suppress(FileNotFoundError):
            os.rename(f"{path}.{number}", f"{path}.{number + 1}")
    os.rename(path, f"{path}.1")
