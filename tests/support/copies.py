"""Copies of stores that keep holes as holes. Nearly all of the 38 MB of a timer wheel is a hole: writing it out takes
longer than most tests."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

_BLOCK = 4096


def copy_tree(source: Path, target: Path) -> Path:
    """Copy a directory, as shutil.copytree does; return `target`."""
    shutil.copytree(source, target, copy_function=copy_file)
    return target


def copy_file(source: str | Path, target: str | Path) -> None:
    """Copy a file, as shutil.copy2 does, which follows links."""
    with open(source, "rb") as old, open(target, "wb") as new:
        new.truncate(os.fstat(old.fileno()).st_size)
        for start, end in _written(old):
            at = start
            os.lseek(new.fileno(), at, os.SEEK_SET)
            while at < end:
                at += os.sendfile(new.fileno(), old.fileno(), at, end - at)
    shutil.copystat(source, target)


def data_of(path: Path) -> tuple[int, dict[int, bytes]]:
    """The size of a file, and its blocks that have other bytes than zeros. Two files have the same if their bytes are
    the same, wherever they have holes."""
    blocks = {}
    with path.open("rb") as file:
        for start, end in _written(file):
            for at in range(start - start % _BLOCK, end, _BLOCK):
                data = os.pread(file.fileno(), _BLOCK, at)
                if data.count(0) < len(data):
                    blocks[at] = data
        return os.fstat(file.fileno()).st_size, blocks


def _written(file: BinaryIO) -> Iterator[tuple[int, int]]:
    """The stretches of a file between its holes."""
    size, at = os.fstat(file.fileno()).st_size, 0
    while at < size:
        try:
            at = os.lseek(file.fileno(), at, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # only a hole is left
                return
            raise
        end = os.lseek(file.fileno(), at, os.SEEK_HOLE)
        yield at, end
        at = end
