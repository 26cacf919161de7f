"""Reads the timers' files before a start changes anything. The start is stopped by a file that cannot be read, and by
anything that is not a file in the place of the wheel, timercheck or timermetrics. `timers.recovery` compares checksums
later, and rebuilds lost and wrong files.
"""

from __future__ import annotations

import os
from typing import Final

from duemq.storage import file_names
from duemq.storage.errors import StoreFormatError
from duemq.storage.files import Files

_READ_SIZE: Final = 1 << 18
"""Number of bytes in one read: few enough that the buffer stays in the processor's cache."""
_ZEROS: Final = bytes(_READ_SIZE)
_FREE: Final = 1 << 20
"""Number of zero bytes behind the noted end of the log after which reading may stop: `TimerLog.recover`, which reads
from the noted end on, takes them for the end of the log, since it reads in parts that are no longer than this."""


def inspect(files: Files, root: str, log_end: int | None) -> None:
    """Read the timers' files in a store's directory, only to find errors. `log_end`: the end of the timer log at the
    checkpoint, behind which a start reads only as long as units follow; None if a start may read all of the log. Raises
    StoreFormatError, OSError."""
    for name in (file_names.TIMER_WHEEL, file_names.TIMER_CHECK, file_names.TIMER_METRICS):
        path = os.path.join(root, name)
        files.require_file(path)
        if files.exists(path):
            _read(files, path)
    directory = os.path.join(root, file_names.TIMER_LOG)
    for name in files.list(directory):
        noted = log_end - int(name) if log_end is not None and name.isdecimal() else None
        try:
            _read_log(files, os.path.join(directory, name), noted)
        except StoreFormatError:
            return  # not a file: the whole log will be rebuilt


def _read(files: Files, path: str) -> None:
    """Read a file, except for its holes: in most wheels nearly all hours are holes."""
    file, at = files.open(path), 0
    size = file.size()
    while (at := file.next_data(at)) < size:
        file.read(at, _READ_SIZE)
        at += _READ_SIZE
    file.close()


def _read_log(files: Files, path: str, noted: int | None) -> None:
    """Read a file of the timer log, up to the free space behind its first `noted` bytes."""
    file, at, free = files.open(path), 0, 0
    size = file.size()
    while at < size and free < _FREE:
        data = file.read(at, _READ_SIZE)
        is_free = noted is not None and at >= noted and data == _ZEROS
        free = free + _READ_SIZE if is_free else 0
        at += _READ_SIZE
    file.close()
