"""Finds the files of a store, through symbolic links: a store's commitlog, config or the queues of a topic may be on
another disk."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator

from duemq.broker.dump.databases import is_database
from duemq.protocol.dump_output import shown_path


def walk(path: str) -> Iterator[tuple[str, str | OSError]]:
    """Yield each path to be shown, and why nothing can be shown there: an empty text for a file, and for the directory
    of a RocksDB database; a sentence for a directory that is empty, or that was shown under another path, as links
    lead there; an OSError for what cannot be listed or does not exist. `path` may be a file. The files of a directory
    come before its subdirectories, both by their names."""
    shown: dict[tuple[int, int], str] = {}
    waiting = [path]
    while waiting:
        path = waiting.pop()
        try:
            status = os.stat(path)
            if not stat.S_ISDIR(status.st_mode) or is_database(path):
                yield path, ""
                continue
            before = shown.setdefault((status.st_dev, status.st_ino), path)
            if before != path:
                yield path, f"the same directory as {shown_path(before)}"
                continue
            names = sorted(os.listdir(path))
        except OSError as error:
            yield path, error
            continue
        if not names:
            yield path, "no files"
        found = [os.path.join(path, name) for name in names]
        found.sort(key=os.path.isdir)
        waiting += reversed(found)
