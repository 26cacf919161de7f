"""A table of several stores as an Iceberg table, with the library `pyiceberg`.

    path or file://      a warehouse: <path>/catalog.db, a catalog in SQLite, and the table duemq.messages
    namespace.table      with the name of a catalog configured for pyiceberg (~/.pyiceberg.yaml, PYICEBERG_...)

A commit has the files of a run, and the table's property duemq.<name>: {"end": physical offset up to which the table
has the store, "tail": see `known_again.tail_of`}. The snapshot's summary describes the run. Partitions: day, topic,
store.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from duemq.spark_jobs.archive.table import COLUMNS, DataFile, Mark, NameOf, run_prefix
from duemq.spark_jobs.errors import JobError
from duemq.spark_jobs.store.directories import Directory
from duemq.spark_jobs.store.local_files import local_path, reason

if TYPE_CHECKING:
    from pyiceberg.catalog import Catalog
    from pyiceberg.table import Table as Library

_TRIES: Final = 5
_NAMESPACE: Final = "duemq"
_IDENTIFIER: Final = "duemq.messages"
_PARTITIONS: Final = ("day", "topic", "store")


class IcebergTable:
    """An Iceberg table, written with the package pyiceberg. `catalog`: the name of one that pyiceberg knows; None for a
    warehouse at `path`, a directory of this machine. Raises JobError if the library is missing."""

    in_directories = False

    def __init__(self, path: str, catalog: str | None = None) -> None:
        try:
            import pyiceberg  # noqa: F401, before Spark is started
        except ImportError:
            raise JobError("Iceberg tables need the package pyiceberg: pip install 'duemq[iceberg]'") from None
        if catalog is None:
            local_path(path)
        self._path, self._catalog = path, catalog
        self.path = path if catalog is None else None
        self.columns: Sequence[str] = COLUMNS.names

    @contextlib.contextmanager
    def begin(self, name_of: NameOf) -> Iterator[IcebergRun]:
        """Prepare to append a store, and make the table if there is none. Yield the run. Raises JobError."""
        from pyiceberg.exceptions import NoSuchTableError

        with self._alone():
            catalog, identifier = self._open()
        name = name_of(lambda names: self._known(catalog, identifier))
        # If two runs begin a table at the same time, one of them makes it.
        with self._alone():
            try:
                try:
                    table = catalog.load_table(identifier)
                except NoSuchTableError:
                    table = _create(catalog, identifier)
            except Exception as error:  # each catalog has its own
                raise JobError(f"{self._path}: {reason(error)}") from error
        missing = [column for column in COLUMNS.names if column not in table.schema().column_names]
        if missing:
            raise JobError(f"{self._path}: the table has no column {missing[0]}, so it is not an archive; give another")
        yield IcebergRun(self._path, table, name, is_local=self._catalog is None)

    def _known(self, catalog: Catalog, identifier: str) -> dict[str, Mark]:
        """Return the marks of the stores, which are properties of the table; none for a new table. Raises JobError."""
        from pyiceberg.exceptions import NoSuchTableError

        try:
            table = catalog.load_table(identifier)
        except NoSuchTableError:
            return {}
        except Exception as error:  # each catalog has its own
            raise JobError(f"{self._path}: {reason(error)}") from error
        found = {name: _mark(table, name) for key in table.properties if (name := key.removeprefix("duemq.")) != key}
        return {name: mark for name, mark in found.items() if mark is not None}

    def _alone(self) -> contextlib.AbstractContextManager[None]:
        """Make the warehouse and hold it exclusively; does nothing for a catalog that pyiceberg knows."""
        return Directory(self._path).alone() if self._catalog is None else contextlib.nullcontext()

    def _open(self) -> tuple[Catalog, str]:
        """Open the catalog; return it and the table's identifier. Raises JobError."""
        from pyiceberg.catalog import load_catalog

        if self._catalog is not None:
            try:
                return load_catalog(self._catalog), self._path
            except Exception as error:  # each catalog has its own
                raise JobError(f"the catalog {self._catalog}: {reason(error)}") from error
        from pyiceberg.catalog.sql import SqlCatalog

        path = os.path.abspath(local_path(self._path))
        if os.listdir(path) and not os.path.exists(os.path.join(path, "catalog.db")):
            raise JobError(f"{path}: has files, but is not a warehouse of duemq's; give another directory")
        try:
            return SqlCatalog("duemq", uri=f"sqlite:///{path}/catalog.db", warehouse=f"file://{path}"), _IDENTIFIER
        except Exception as error:  # SQLite's, through a library
            raise JobError(f"{path}: {reason(error)}") from error


class IcebergRun:
    """A run that appends one store to an Iceberg table. `path`: the table's, for messages; `table`: the library's;
    `is_local`: whether its catalog is a file of this machine: another one may complete a commit that seems to have
    failed."""

    def __init__(self, path: str, table: Library, name: str, *, is_local: bool) -> None:
        self.name, self.mark = name, _mark(table, name)
        self.directory = Directory(f"{table.location()}/data")
        self.prefix = run_prefix()
        self._path, self._table, self._is_local = path, table, is_local

    def note_begun(self) -> None:
        """Do nothing: the files of a killed run are in no snapshot, and so not in the table."""

    def commit(self, mark: Mark, files: list[DataFile], about: dict[str, Any]) -> None:
        """Add files and set the store's mark, by one transaction of the catalog. Tries again if another commit came
        first. Raises JobError."""
        from pyiceberg.exceptions import CommitFailedException

        about = {**about, "damaged": len(about["damaged"])}
        summary = {f"duemq.{key}": str(value) for key, value in about.items()}
        paths = [self.directory.below(file.name) for file in files]
        paths = [path if "://" in path else f"file://{path}" for path in paths]
        for tries_left in reversed(range(_TRIES)):
            # Without this the library would retry on any newer state of the table, even one that has the files already.
            metadata = self._table.metadata
            properties = {**metadata.properties, "commit.retry.num-retries": "0"}
            self._table.metadata = metadata.model_copy(update={"properties": properties})
            try:
                with self._table.transaction() as transaction:
                    if paths:
                        transaction.add_files(paths, snapshot_properties=summary)
                    transaction.set_properties({f"duemq.{self.name}": json.dumps(mark._asdict())})
                return
            except CommitFailedException as error:
                # Another commit came first: another store's, or maintenance.
                self._table.refresh()
                if _mark(self._table, self.name) != self.mark or not tries_left:
                    raise JobError(
                        f"{self._path}: another run appended {self.name} meanwhile; this one appended nothing: "
                        f"{reason(error)}"
                    ) from None
            except Exception as error:  # each catalog has its own
                if self._is_local and self._is_unchanged():
                    raise JobError(f"{self._path}: nothing was appended: {reason(error)}; run it again") from error
                raise JobError(
                    f"{self._path}: the catalog did not say whether the rows are in the table: {reason(error)}; run it "
                    "again, which continues from what the table has"
                ) from error

    def _is_unchanged(self) -> bool:
        """Return whether the table still has the store's mark with which the run began; False if it cannot be asked."""
        try:
            self._table.refresh()
        except Exception:  # each catalog has its own
            return False
        return _mark(self._table, self.name) == self.mark

    def abandon(self, *, is_commit: bool) -> None:
        """After a failed run, remove the files that it wrote, unless they are in the table, or it is unknown whether
        they are. `is_commit`: whether it was the commit that failed. Raises JobError."""
        # A catalog other than a local one may still complete the commit.
        if is_commit and not (self._is_local and self._is_unchanged()):
            return
        for file in self.directory.names(""):
            if file.startswith(self.prefix):
                self.directory.remove(file)


def _mark(table: Library, name: str) -> Mark | None:
    """Return a store's mark in a table of the library's, None for a new store."""
    text = table.properties.get(f"duemq.{name}")
    if text is None:
        return None
    found = json.loads(text)
    return Mark(found["end"], found["tail"])


def _create(catalog: Catalog, identifier: str) -> Library:
    """Make the table, or load it if another run has made it meanwhile."""
    from pyiceberg.exceptions import NamespaceAlreadyExistsError, TableAlreadyExistsError

    with contextlib.suppress(NamespaceAlreadyExistsError):
        catalog.create_namespace_if_not_exists(identifier.rpartition(".")[0])
    try:
        return catalog.create_table(identifier, *_schema())
    except TableAlreadyExistsError:
        return catalog.load_table(identifier)


def _schema() -> tuple[Any, None, Any]:
    """Return the schema of the table, its location (None: the catalog's choice), and its partitions."""
    from pyiceberg.partitioning import PartitionField, PartitionSpec
    from pyiceberg.schema import Schema
    from pyiceberg.transforms import IdentityTransform
    from pyiceberg.types import (
        BinaryType,
        DateType,
        IntegerType,
        LongType,
        MapType,
        NestedField,
        StringType,
        TimestamptzType,
    )

    plain = {
        pa.string(): StringType(),
        pa.binary(): BinaryType(),
        pa.int32(): IntegerType(),
        pa.int64(): LongType(),
        pa.date32(): DateType(),
        pa.timestamp("us", "UTC"): TimestamptzType(),
    }
    fields, next_id = [], len(COLUMNS) + 1
    for number, field in enumerate(COLUMNS, 1):
        kind: Any = plain.get(field.type)
        if kind is None:
            kind = MapType(
                key_id=next_id,
                key_type=StringType(),
                value_id=next_id + 1,
                value_type=StringType(),
                value_required=False,
            )
            next_id += 2
        fields.append(NestedField(field_id=number, name=field.name, field_type=kind, required=False))
    partitions = [
        PartitionField(
            source_id=COLUMNS.get_field_index(name) + 1, field_id=1000 + n, transform=IdentityTransform(), name=name
        )
        for n, name in enumerate(_PARTITIONS)
    ]
    return Schema(*fields), None, PartitionSpec(*partitions)
