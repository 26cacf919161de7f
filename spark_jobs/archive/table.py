"""A table that `archive.append` appends to, in any format: columns, files, and marks of stores."""

from __future__ import annotations

import datetime
import uuid
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, NamedTuple, Protocol

import pyarrow as pa

from duemq.spark_jobs.archive.rows import SCHEMA
from duemq.spark_jobs.store.directories import Directory

_MICROSECONDS: Final = pa.timestamp("us", "UTC")
COLUMNS: Final = pa.schema(
    [
        ("store", pa.string()),
        ("day", pa.date32()),
        *(
            (field.name, _MICROSECONDS if pa.types.is_timestamp(field.type) else field.type)
            for field in SCHEMA
            if field.name not in ("properties", "store_ms", "born_ms")
        ),
        ("properties", pa.map_(pa.string(), pa.string())),
    ]
)
"""Columns of the table."""


class Mark(NamedTuple):
    """Up to where a table has a store. `end`: a physical offset; `tail`: identifies the bytes before it, see
    `known_again`."""

    end: int
    tail: int


class DataFile(NamedTuple):
    """A file of a table. `name`: below the directory of data; `size` in bytes; `day`: that of store_time, None where
    the records have none; `offsets`, `times`: the least and the greatest physical offset and store time (ms since the
    epoch, None without a day)."""

    name: str
    rows: int
    size: int
    day: datetime.date | None
    topic: str
    offsets: tuple[int, int]
    times: tuple[int, int] | None


MarksOf = Callable[[Collection[str]], dict[str, Mark]]
"""Returns the marks of the stores in a table; none for a new table. A table that keeps no list of its stores must find
those among the given names. Raises JobError."""
NameOf = Callable[[MarksOf], str]
"""Returns the name in a table of the store to append; may look at the stores that the table has."""


class TableRun(Protocol):
    """A run that appends one store to a table. Its methods raise JobError."""

    name: str
    """The store's name in the table."""
    mark: Mark | None
    """The store's mark in the table when the run began, None for a new store."""
    directory: Directory
    """Where tasks write files."""
    prefix: str
    """The prefix of the names of this run's files."""

    def note_begun(self) -> None:
        """Note in the table that the run writes files from now on, if the next run could not remove the files of a
        killed one without such a note."""

    def commit(self, mark: Mark, files: list[DataFile], about: dict[str, Any]) -> None:
        """Add files and set the store's mark, atomically."""

    def abandon(self, *, is_commit: bool) -> None:
        """After a failed run, remove the files that it wrote, unless they are in the table, or it is unknown whether
        they are. `is_commit`: whether it was the commit that failed."""


class Table(Protocol):
    """A table of one of the formats."""

    in_directories: bool
    """Whether files lie in directories by partition."""
    columns: Sequence[str]
    """The columns within the files; the values of the others are given with each file."""
    path: str | None
    """The path or URI of the directory that `begin` makes; None for a table that a catalog finds."""

    def begin(self, name_of: NameOf) -> AbstractContextManager[TableRun]:
        """Prepare to append a store; give a run, which holds what it needs until the context ends. Raises JobError."""


def run_prefix() -> str:
    """Return a prefix for the files of a run that no other run has."""
    return uuid.uuid4().hex
