"""A table that `archive.append` appends to, whatever its format: columns, files, and what it says of a store."""

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
"""Of the table."""


class Mark(NamedTuple):
    """Up to where a table has a store. `end`: a physical offset; `tail`: what lies before it, see `known_again`."""

    end: int
    tail: int


class DataFile(NamedTuple):
    """A file of a table. `name`: below the directory of data; `size` in bytes; `day`: of store_time, None where
    the records have none; the least and the greatest offset and store time (ms since the epoch, None without a day)."""

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
    """What is in the files; the others are told with each file."""

    def known(self, names: Collection[str]) -> dict[str, Mark]:
        """The stores in the table, and up to where it has them; none of a new one. A table that keeps no list of them
        has to find those of the names that are given."""

    def begin(self, name: str) -> Mark | None:
        """Make ready to append a store; gives up to where the table has it, None for a new one."""

    def prefix(self, name: str) -> str:
        """What the names of this run's files begin with."""

    def commit(self, name: str, before: Mark | None, after: Mark, files: list[DataFile], about: dict[str, Any]) -> None:
        """Add files, and say up to where the table has the store, at once."""

    def abandon(self, name: str, before: Mark | None, *, is_commit: bool) -> None:
        """After a run that failed: remove the files that it has written, unless they are in the table, or nobody can
        tell. `is_commit`: whether it was the commit that failed."""

    def close(self) -> None:
        """Let go of what `begin` took."""


def run_prefix() -> str:
    """What the files of a run begin with that no other's do."""
    return uuid.uuid4().hex
