"""The files of a store that a compaction copies as they are: all besides those of messages, queues and timers.

Links are followed: the new store has what they lead to, and so needs nothing of the old one. What is copied is found
before the work begins: what cannot be copied is then refused at once, and a copy can have no more than what was found.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterable
from typing import NamedTuple

from duemq.spark_jobs.errors import JobError, cannot_read
from duemq.spark_jobs.store.local_files import reason


class OtherFiles(NamedTuple):
    """Names below a store's directory. `copied`: of files and directories, each directory before what is in it;
    `left_out`: of FIFOs, sockets, devices and links to nothing, which have no contents to copy."""

    copied: list[str]
    left_out: list[str]


def find(root: str, names: Iterable[str], target: str) -> OtherFiles:
    """Return what of some files and directories of a root is copied to a target. Raises CannotRead, and JobError for a
    link to a directory that has the link itself, or the target, in it."""
    found = OtherFiles([], [])
    on_the_way = (os.path.realpath(root), os.path.realpath(target))
    for name in names:
        _find(found, root, name, on_the_way)
    return found


def _find(found: OtherFiles, root: str, name: str, on_the_way: tuple[str, ...]) -> None:
    """Add a file, or a directory with what is in it. `on_the_way`: real paths that a linked directory must not have in
    it. Raises CannotRead, JobError."""
    path = os.path.join(root, name)
    try:
        mode = os.stat(path).st_mode
        children = sorted(os.listdir(path)) if stat.S_ISDIR(mode) else []
    except FileNotFoundError:
        found.left_out.append(name)
        return
    except OSError as error:
        raise cannot_read(path, error) from None
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        found.left_out.append(name)
        return
    found.copied.append(name)
    if os.path.islink(path) and stat.S_ISDIR(mode):
        real = os.path.realpath(path)
        on_the_way = (*on_the_way, os.path.realpath(os.path.dirname(path)))
        if any(os.path.commonpath((real, other)) == real for other in on_the_way):
            raise JobError(
                f"{path}: is a link to {os.readlink(path)}, a directory that has this link or the new store in it, so "
                "a copy would have no end; remove the link, or put what it should lead to in its place"
            )
        on_the_way = (*on_the_way, real)
    for child in children:
        _find(found, root, os.path.join(name, child), on_the_way)


def copy(root: str, names: Iterable[str], target: str) -> None:
    """Copy files and directories of a root to a target, with their times and permissions. `names`: those that `find`
    found. Raises JobError."""
    folders = []
    for name in names:
        source, copied = os.path.join(root, name), os.path.join(target, name)
        try:
            if os.path.isdir(source):
                os.makedirs(copied, exist_ok=True)
                folders.append((source, copied))
            else:
                shutil.copy2(source, copied)
        except OSError as error:
            raise _not_copied(source, copied, error) from None
    for source, copied in reversed(folders):  # last, since a directory may be one that nobody may write to
        try:
            shutil.copystat(source, copied)
        except OSError as error:
            raise _not_copied(source, copied, error) from None


def _not_copied(source: str, copied: str, error: OSError) -> JobError:
    return JobError(f"{source}: cannot be copied to {copied}: {reason(error)}")
