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

import contextlib
import fcntl
import os
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Final

import msgspec

from duemq.spark_jobs.archive.rows import folder_name
from duemq.spark_jobs.archive.table import COLUMNS, DataFile, Mark, NameOf
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
        # Partitions are read from the names of directories. The topic is in the files too, as in an archive.
        self.columns: Sequence[str] = [name for name in COLUMNS.names if name not in ("store", "day")]
        self._directory = Directory(path)
        self.path: str | None = self._directory.path

    def known(self, names: Collection[str]) -> dict[str, Mark]:
        """Return the marks of the stores that have a committed run; none for a new table. Raises JobError."""
        last = {os.path.dirname(file): file for file in self._directory.names(_NOTES) if file.endswith(".json")}
        commits = [_commit(self._directory, file) for file in last.values()]
        return {commit.store: Mark(commit.end, commit.tail) for commit in commits}

    @contextlib.contextmanager
    def begin(self, name_of: NameOf) -> Iterator[ParquetRun]:
        """Prepare to append a store: take its lock, where the table is local, until the context ends, and remove files
        of a run that was killed. Yield the run. Raises JobError."""
        name = name_of(self.known)
        names = self._directory.names()  # in one listing: another run may be making the table
        if names and not any(file.startswith(f"{_NOTES}/") for file in names):
            raise JobError(f"{self._directory.path}: has files, but is not a table of duemq's; give another directory")
        with _held(self._directory, name):
            runs = _runs(self._directory, name)
            _remove_left(self._directory, name, runs)
            last = _commit(self._directory, _note(name, f"{runs[-1]:06}.json")) if runs else None
            mark = Mark(last.end, last.tail) if last is not None else None
            yield ParquetRun(self._directory, name, mark, (runs[-1] if runs else 0) + 1)


class ParquetRun:
    """A run that appends one store to a table of Parquet. `number`: the run's."""

    def __init__(self, directory: Directory, name: str, mark: Mark | None, number: int) -> None:
        self.directory, self.name, self.mark = directory, name, mark
        self.prefix = f"{number:06}"

    def note_begun(self) -> None:
        """Note that the run writes files from now on. Raises JobError."""
        self.directory.write(_note(self.name, "begun"), b"a run appends, or was killed\n")

    def commit(self, mark: Mark, files: list[DataFile], about: dict[str, Any]) -> None:
        """Add files and set the store's mark, by writing the run's JSON file. Raises JobError."""
        commit = Commit(version=VERSION, tail=mark.tail, files=[file.name for file in files], **about)
        text = msgspec.json.format(msgspec.json.encode(commit), indent=1)
        self.directory.write(_note(self.name, f"{self.prefix}.json"), text)
        self.directory.remove(_note(self.name, "begun"))

    def abandon(self, *, is_commit: bool) -> None:
        """After a failed run, remove the files that it wrote, unless its JSON file was written. Raises JobError."""
        _remove_left(self.directory, self.name, _runs(self.directory, self.name))


def _note(name: str, file: str) -> str:
    return f"{_NOTES}/{folder_name(name)}/{file}"


def _runs(directory: Directory, name: str) -> list[int]:
    """Return the numbers of a store's committed runs, in order. Raises JobError."""
    found = [os.path.basename(file) for file in directory.names(f"{_NOTES}/{folder_name(name)}")]
    return sorted(int(file[:-5]) for file in found if file.endswith(".json") and file[:-5].isdecimal())


def _remove_left(directory: Directory, name: str, runs: list[int]) -> None:
    """Remove the files of a run that was killed or failed. `runs`: the store's committed ones. Raises JobError."""
    if directory.read(_note(name, "begun")) is None:
        return
    committed = {file for run in runs for file in _commit(directory, _note(name, f"{run:06}.json")).files}
    mine = f"/{folder_name(name, 'store=')}/"
    for file in directory.names():
        if mine in file and file not in committed:
            directory.remove(file)
    directory.remove(_note(name, "begun"))


@contextlib.contextmanager
def _held(directory: Directory, name: str) -> Iterator[None]:
    """Hold a store's lock, where the table is local. Raises JobError if another run has it."""
    if not directory.is_local:
        yield
        return
    path = local_path(directory.below(_note(name, "lock")))
    with contextlib.ExitStack() as held:
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            held.callback(os.close, lock)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise JobError(f"{directory.path}: another run is appending {name}; wait for it to end") from None
        except OSError as error:
            raise JobError(f"{path}: {reason(error)}") from None
        yield


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
