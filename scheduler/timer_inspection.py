"""Looking at the timers' files before a start changes anything: what cannot be read, or is no file, stops the start.
What can be read is held against its checksums later, by `timer_recovery`, which makes again what is lost or wrong.
"""

from __future__ import annotations

import os
from typing import Final

from storage.errors import StoreFormatError
from storage.files import Files

_READ_SIZE: Final = 4 << 20


def inspect(files: Files, root: str) -> None:
    """Look at the files of a store, given by its directory. Raises StoreFormatError, OSError."""
    for name in ("timerwheel", os.path.join("config", "timercheck"), os.path.join("config", "timermetrics")):
        path = os.path.join(root, name)
        files.require_file(path)
        if files.exists(path):
            _read(files, path)
    directory = os.path.join(root, "timerlog")
    for name in files.list(directory):
        try:
            _read(files, os.path.join(directory, name))
        except StoreFormatError:
            return  # no file: the whole log is made again


def _read(files: Files, path: str) -> None:
    file, at = files.open(path), 0
    size = file.size()
    while at < size:
        file.read(at, _READ_SIZE)
        at += _READ_SIZE
    file.close()
