"""Results that go to a URI (s3://, hdfs://): jobs write them into a directory of this machine, from which they are
copied once all of them are there."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from duemq.spark_jobs.store.directories import Directory
from duemq.spark_jobs.store.local_files import is_local

_LAST: Final = ("report.html", "audit.json", "history.jsonl")
"""Files that people and the next run open are replaced last, in this order."""
_NOT_READ: Final = {"parquet", "report.html"}
"""Files and directories of the previous run that no run reads."""


@contextmanager
def published(out: str | None) -> Iterator[str | None]:
    """Yield where a job writes its results for `out`: `out` itself where it is on this machine, or None; else a
    temporary directory with the files that the previous run left there. In the end changed files are copied to `out`
    and removed ones deleted there, unless the job failed. Raises JobError."""
    if out is None or is_local(out):
        yield out
        return
    there = Directory(out)
    with tempfile.TemporaryDirectory(prefix="duemq-") as here:
        known: dict[str, bytes] = {}
        if there.read("audit.json") is not None:
            for name in there.names():
                if not _NOT_READ & set(name.split("/")):
                    known[name] = there.read(name) or b""
                    path = os.path.join(here, name)
                    os.makedirs(os.path.dirname(path), exist_ok=True)
                    with open(path, "wb") as file:
                        file.write(known[name])
        yield here
        names = Directory(here).names()
        for name in sorted(names, key=lambda name: _LAST.index(name) if name in _LAST else -1):
            with open(os.path.join(here, name), "rb") as file:
                data = file.read()
            if known.get(name) != data:
                there.write(name, data)
        for name in known.keys() - set(names):
            there.remove(name)
