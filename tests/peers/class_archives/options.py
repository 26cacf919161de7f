"""The options with which a JVM uses an archive, or writes one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Literal

from tests.peers.cache import cache_directory

Program = Literal["namesrv", "broker", "client", "mqadmin"]
PROGRAMS: tuple[Program, ...] = ("namesrv", "broker", "client", "mqadmin")

# Otherwise Java prints to standard output that an archive is not of its classes.
_QUIET = ("-Xlog:disable", "-Xlog:all=error:stderr")
_written: ContextVar[Path | None] = ContextVar("written", default=None)
"""The directory into which JVMs write archives at their end, while they are made."""


def name_of(version: str) -> str:
    """Return the name of the folder of the peers' cache that has a version's archives."""
    return f"classes-{version}"


def archive(folder: Path, program: Program) -> Path:
    """Return the path of a program's archive in a folder."""
    return folder / f"{program}.jsa"


def options(version: str, program: Program) -> tuple[str, ...]:
    """Return the options of a JVM that runs a program of one version: they name its archive if there is one."""
    folder = _written.get()
    if folder is not None:
        return to_write(archive(folder, program))
    path = archive(cache_directory() / name_of(version), program)
    return to_use(path) if path.exists() else ()


def to_write(path: Path) -> tuple[str, ...]:
    """Return the options of a JVM that writes an archive at its end."""
    return (f"-XX:ArchiveClassesAtExit={path}", *_QUIET)


def to_use(path: Path) -> tuple[str, ...]:
    """Return the options of a JVM that uses an archive."""
    return (f"-XX:SharedArchiveFile={path}", *_QUIET)


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Have each JVM that is made meanwhile write an archive of its classes into `folder` when it ends."""
    token = _written.set(folder)
    try:
        yield
    finally:
        _written.reset(token)
