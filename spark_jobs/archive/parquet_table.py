"""A table of several stores as directories of Parquet.

    <table>/day=2026-11-22/topic=orders/store=<name>/<run>-<range>.parquet    names by `folder_name`; `run` is the
                                    number of the commit, `range` the physical offsets that a task read
            _duemq/<name>/<run>.json    a commit: see `Commit`. The files that it names are in the table
            _duemq/<name>/begun         exists while a run appends, and after one that was killed
            _duemq/<name>/lock          locked while a run appends, on this machine

A run writes its files, and then its commit, which is one file: before that, its files are not part of the table. The
next run removes the files of a killed one. After that, readers that look only at the directories, not at the commits,
find each row once too.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Collection, Sequence
from typing import Any, Final

import msgspec

from duemq.spark_jobs.archive.rows import folder_name
from duemq.spark_jobs.archive.table import COLUMNS, DataFile, Mark
from duemq.spark_jobs.errors import JobError
from duemq.spark_jobs.store.directories import Directory
from duemq.spark_jobs.store.local_files import local_path, reason

VERSION: Final = 1
_NOTES: Final = "_duemq"


class Commit(msgspec.Struct):
    """A run's commit. `begin`, `end`: physical offsets; `tail`: see `known_again`; `expired`: number of bytes that
    expired before they could be appended; `damaged`: offset, size and reason of damaged stretches."""

    version: int
    store: str
    path: str
    begin: int
    end: int
    tail: int
    records: int
    expired: int
    files: list[str]
    damaged: list[tuple[int, int, str]]


class ParquetTable:
    """A table of several stores as directories of Parquet, laid out as the module describes."""

    in_directories = True

    def __init__(self, path: str) -> None:
        self.directory = Directory(path)
        # Partitions are read from the names of directories. The topic is in the files too, as in an archive.
        self.columns: Sequence[str] = [name for name in COLUMNS.names if name not in ("store", "day")]
        self._path = path
        self._run = 0
        self._lock = -1

    def _note(self, name: str, file: str) -> str:
        return f"{_NOTES}/{folder_name(name)}/{file}"

    def known(self, names: Collection[str]) -> dict[str, Mark]:
        """Return the marks of the stores that have a committed run; none for a new table. Raises JobError."""
        last = {os.path.dirname(file): file for file in self.directory.names(_NOTES) if file.endswith(".json")}
        commits = [_commit(self.directory, file) for file in last.values()]
        return {commit.store: Mark(commit.end, commit.tail) for commit in commits}

    def begin(self, name: str) -> Mark | None:
        """Prepare to append a store: take its lock, where the table is local, and remove files of a run that was
        killed. Return the store's mark in the table, None for a new one. Raises JobError."""
        names = self.directory.names()  # in one listing: another run may be making the table
        if names and not any(name.startswith(f"{_NOTES}/") for name in names):
            raise JobError(f"{self.directory.path}: has files, but is not a table of duemq's; give another directory")
        self._hold(name)
        runs = self._runs(name)
        self._run = (runs[-1] if runs else 0) + 1
        self._remove_left(name, runs)
        if not runs:
            return None
        last = self._commit(name, runs[-1])
        return Mark(last.end, last.tail)

    def _remove_left(self, name: str, runs: list[int]) -> None:
        """Remove the files of a run that was killed or failed."""
        if self.directory.read(self._note(name, "begun")) is None:
            return
        committed = {file for run in runs for file in self._commit(name, run).files}
        mine = f"/{folder_name(name, 'store=')}/"
        for file in self.directory.names():
            if mine in file and file not in committed:
                self.directory.remove(file)
        self.directory.remove(self._note(name, "begun"))

    def _runs(self, name: str) -> list[int]:
        found = [os.path.basename(file) for file in self.directory.names(f"{_NOTES}/{folder_name(name)}")]
        return sorted(int(file[:-5]) for file in found if file.endswith(".json") and file[:-5].isdecimal())

    def _commit(self, name: str, run: int) -> Commit:
        return _commit(self.directory, self._note(name, f"{run:06}.json"))

    def _hold(self, name: str) -> None:
        if not self.directory.is_local:
            return
        path = local_path(self.directory.below(self._note(name, "lock")))
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            self._lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise JobError(f"{self.directory.path}: another run is appending {name}; wait for it to end") from None
        except OSError as error:
            raise JobError(f"{path}: {reason(error)}") from None

    def prefix(self, name: str) -> str:
        """Return the prefix of the names of this run's files, and note that the run has begun. Raises JobError."""
        self.directory.write(self._note(name, "begun"), b"a run appends, or was killed\n")
        return f"{self._run:06}"

    def commit(self, name: str, before: Mark | None, after: Mark, files: list[DataFile], about: dict[str, Any]) -> None:
        """Add files and set the store's mark, by writing the run's JSON file. Raises JobError."""
        commit = Commit(version=VERSION, tail=after.tail, files=[file.name for file in files], **about)
        text = msgspec.json.format(msgspec.json.encode(commit), indent=1)
        self.directory.write(self._note(name, f"{self._run:06}.json"), text)
        self.directory.remove(self._note(name, "begun"))

    def abandon(self, name: str, before: Mark | None, *, is_commit: bool) -> None:
        """After a failed run, remove the files that it wrote, unless its JSON file was written. Raises JobError."""
        self._remove_left(name, self._runs(name))

    def close(self) -> None:
        """Release the lock that `begin` took."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def committed_files(path: str) -> list[str]:
    """Return the committed files of a table, by path or URI: for readers while a run appends, or after one was killed.
    Raises JobError."""
    directory = Directory(path)
    found = []
    for note in directory.names(_NOTES):
        if note.endswith(".json"):
            found += _commit(directory, note).files
    return sorted(directory.below(name) for name in found)


def _commit(directory: Directory, file: str) -> Commit:
    """Return the commit in a file. Raises JobError."""
    try:
        commit = msgspec.json.decode(directory.read(file) or b"", type=Commit)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise JobError(f"{directory.path}: {file}: {error}") from None
    if commit.version != VERSION:
        raise JobError(
            f"{directory.path}: {file}: is of version {commit.version}; this program reads version {VERSION}"
        )
    return commit
