"""Copies of stores that keep holes as holes. Nearly all of the 38 MB of a timer wheel is a hole: writing it out takes
longer than most tests."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path


def copy_tree(source: Path, target: Path) -> Path:
    """Copy a directory, as shutil.copytree does; return `target`."""
    shutil.copytree(source, target, copy_function=copy_file)
    return target


def copy_file(source: str | Path, target: str | Path) -> None:
    """Copy a file, as shutil.copy2 does, which follows links."""
    with open(source, "rb") as old, open(target, "wb") as new:
        size = os.fstat(old.fileno()).st_size
        new.truncate(size)
        at = 0
        while at < size:
            try:
                at = os.lseek(old.fileno(), at, os.SEEK_DATA)
            except OSError as error:
                if error.errno == errno.ENXIO:  # only a hole is left
                    break
                raise
            end = os.lseek(old.fileno(), at, os.SEEK_HOLE)
            os.lseek(new.fileno(), at, os.SEEK_SET)
            while at < end:
                at += os.sendfile(new.fileno(), old.fileno(), at, end - at)
    shutil.copystat(source, target)
