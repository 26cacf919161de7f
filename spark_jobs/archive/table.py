"""A table that `archive.append` appends to, in any format: columns, files, and marks of stores."""

from __future__ import annotations

import datetime
import uuid
from collections.abc import Collection, Sequence
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


class Table(Protocol):
    """A table of one of the formats. Its methods raise JobError."""

    directory: Directory
    """Where tasks write files."""
    in_directories: bool
    """Whether files lie in directories by partition."""
    columns: Sequence[str]
    """The columns within the files; the values of the others are given with each file."""

    def known(self, names: Collection[str]) -> dict[str, Mark]:
        """Return the marks of the stores in the table; none for a new one. A table that keeps no list of its stores
        must find those among `names`."""

    def begin(self, name: str) -> Mark | None:
        """Prepare to append a store; return its mark in the table, None for a new one."""

    def prefix(self, name: str) -> str:
        """Return the prefix of the names of this run's files."""

    def commit(self, name: str, before: Mark | None, after: Mark, files: list[DataFile], about: dict[str, Any]) -> None:
        """Add files and set the store's mark, atomically."""

    def abandon(self, name: str, before: Mark | None, *, is_commit: bool) -> None:
        """After a failed run, remove the files that it wrote, unless they are in the table, or it is unknown whether
        they are. `is_commit`: whether it was the commit that failed."""

    def close(self) -> None:
        """Release what `begin` acquired."""


def run_prefix() -> str:
    """Return a prefix for the files of a run that no other run has."""
    return uuid.uuid4().hex
