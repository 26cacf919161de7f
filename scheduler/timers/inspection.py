"""Looking at the timers' files before a start changes anything: what cannot be read, or is no file, stops the start.
What can be read is held against its checksums later, by `timers.recovery`, which makes again what is lost or wrong.
"""

from __future__ import annotations

import os
from typing import Final

from duemq.storage.errors import StoreFormatError
from duemq.storage.files import Files

_READ_SIZE: Final = 1 << 18
"""Bytes: so little is read into memory that the processor has in its cache."""
_ZEROS: Final = bytes(_READ_SIZE)
_FREE: Final = 1 << 20
"""Bytes: behind the noted end of the log so many zeros end it for whoever reads it on from there, a part at a time
(`TimerLog.recover`), and no part is longer."""


def inspect(files: Files, root: str, log_end: int | None) -> None:
    """Look at the files of a store, given by its directory. `log_end`: where the timer log ended when the checkpoint
    was made, from where on a start reads the units that follow; None where it may read all. Raises StoreFormatError,
    OSError."""
    for name in ("timerwheel", os.path.join("config", "timercheck"), os.path.join("config", "timermetrics")):
        path = os.path.join(root, name)
        files.require_file(path)
        if files.exists(path):
            _read(files, path, None)
    directory = os.path.join(root, "timerlog")
    for name in files.list(directory):
        noted = log_end - int(name) if log_end is not None and name.isdecimal() else None
        try:
            _read(files, os.path.join(directory, name), noted)
        except StoreFormatError:
            return  # no file: the whole log is made again


def _read(files: Files, path: str, noted: int | None) -> None:
    """Read a file, without what is free behind its `noted` bytes."""
    file, at, free = files.open(path), 0, 0
    size = file.size()
    while at < size and free < _FREE:
        data = file.read(at, _READ_SIZE)
        is_free = noted is not None and at >= noted and data == _ZEROS
        free = free + _READ_SIZE if is_free else 0
        at += _READ_SIZE
    file.close()
