"""A table of several stores as a Delta table, with the library `deltalake`.

A commit adds the files of a run and has two of Delta's own transaction ids (`txn`), which stay in the log for good:

    application id              version
    duemq/end/<name>            physical offset up to which the table has the store
    duemq/tail/<name>           see `known_again.tail_of`

Delta refuses a commit with such an id if another run has written it meanwhile.
https://github.com/delta-io/delta/blob/master/PROTOCOL.md#transaction-identifiers
"""

from __future__ import annotations

import contextlib
import datetime
import json
import time
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qs, unquote, urlsplit

from duemq.spark_jobs.archive.table import COLUMNS, DataFile, Mark, NameOf, run_prefix
from duemq.spark_jobs.errors import JobError
from duemq.spark_jobs.store.directories import Directory
from duemq.spark_jobs.store.local_files import reason

if TYPE_CHECKING:
    from deltalake import DeltaTable as Library
    from deltalake.transaction import RemoveAction

_OLDEST: Final = (1, 6)
"""Older versions silently leave the transaction ids out of a commit of files written elsewhere."""
_PARTITIONS: Final = ["day", "topic", "store"]


class DeltaTable:
    """A Delta table, written with the package deltalake. Raises JobError if the library is missing or too old."""

    in_directories = False

    def __init__(self, path: str) -> None:
        try:
            import deltalake  # before Spark is started
        except ImportError:
            raise JobError("Delta tables need the package deltalake: pip install 'duemq[delta]'") from None
        if tuple(map(int, deltalake.__version__.split(".")[:2])) < _OLDEST:
            raise JobError(
                f"Delta tables need deltalake {'.'.join(map(str, _OLDEST))} or newer, and this is "
                f"{deltalake.__version__}: pip install 'duemq[delta]'"
            )
        self.columns: Sequence[str] = [name for name in COLUMNS.names if name not in _PARTITIONS]
        self._directory = Directory(path)
        self.path: str | None = self._directory.path
        self._uri = self._directory.path.rstrip("/")
        self._options = _options(path)

    def known(self, names: Collection[str]) -> dict[str, Mark]:
        """Return the marks of the stores that are named in commits which the log still has, and of those among `names`;
        none for a new table. Raises JobError."""
        from deltalake import DeltaTable as Library
        from deltalake.exceptions import DeltaError

        try:
            if not Library.is_deltatable(self._uri, self._options):
                return {}
            table = Library(self._uri, storage_options=self._options)
            commits = [json.loads(commit["duemq"]) for commit in table.history() if "duemq" in commit]
            found = {name: _mark(table, name) for name in {*names, *(commit["store"] for commit in commits)}}
        except (DeltaError, OSError) as error:
            raise JobError(f"{self._directory.path}: {reason(error)}") from None
        return {name: mark for name, mark in found.items() if mark is not None}

    @contextlib.contextmanager
    def begin(self, name_of: NameOf) -> Iterator[DeltaRun]:
        """Prepare to append a store, and make the table if there is none. Yield the run. Raises JobError."""
        from deltalake import DeltaTable as Library
        from deltalake.exceptions import DeltaError

        name = name_of(self.known)
        try:
            # If two runs begin a table at the same time, one of them makes it.
            with self._directory.alone():
                if not Library.is_deltatable(self._uri, self._options):
                    self._create()
            table = Library(self._uri, storage_options=self._options)
            mark = _mark(table, name)
        except (DeltaError, OSError) as error:
            raise JobError(f"{self._directory.path}: {reason(error)}") from None
        yield DeltaRun(self._directory, table, name, mark)

    def _create(self) -> None:
        from deltalake import DeltaTable as Library
        from deltalake.exceptions import DeltaError

        if self._directory.names(""):
            raise JobError(f"{self._directory.path}: has files, but is not a Delta table; give another directory")
        try:
            Library.create(self._uri, COLUMNS, partition_by=_PARTITIONS, name="messages", storage_options=self._options)
        except DeltaError:
            # Behind a URI another run may have made it meanwhile.
            if not Library.is_deltatable(self._uri, self._options):
                raise


class DeltaRun:
    """A run that appends one store to a Delta table. `table`: the library's."""

    def __init__(self, directory: Directory, table: Library, name: str, mark: Mark | None) -> None:
        self.directory, self.name, self.mark = directory, name, mark
        self.prefix = f"messages/{run_prefix()}"
        self._table = table

    def note_begun(self) -> None:
        """Do nothing: the files of a killed run are in no commit, and so not in the table."""

    def commit(self, mark: Mark, files: list[DataFile], about: dict[str, Any]) -> None:
        """Add files and set the store's mark, by one commit of the Delta log. Raises JobError."""
        from deltalake import CommitProperties, Transaction
        from deltalake.exceptions import DeltaError
        from deltalake.transaction import AddAction

        now = time.time_ns() // 1_000_000
        actions: list[AddAction | RemoveAction] = [
            AddAction(file.name, file.size, _partition(file, self.name), now, True, json.dumps(_statistics(file)))
            for file in files
        ]
        properties = CommitProperties(
            custom_metadata={"duemq": json.dumps(about)},
            app_transactions=[
                Transaction(f"duemq/end/{self.name}", mark.end, now),
                Transaction(f"duemq/tail/{self.name}", mark.tail, now),
            ],
        )
        try:
            self._table.create_write_transaction(
                actions, "append", COLUMNS, partition_by=_PARTITIONS, commit_properties=properties
            )
        except (DeltaError, OSError) as error:
            raise JobError(
                f"{self.directory.path}: nothing was appended: {reason(error)}; "
                "if another run appended to it meanwhile, try again"
            ) from None
        self._table.update_incremental()
        if _mark(self._table, self.name) != mark:
            raise JobError(
                f"{self.directory.path}: has the rows of version {self._table.version()}, but lacks its transaction "
                "ids: restore the version before, and do not append with this version of deltalake"
            )

    def abandon(self, *, is_commit: bool) -> None:
        """After a failed run, remove the files that it wrote, unless they are in the table, or it is unknown whether
        they are. `is_commit`: whether it was the commit that failed. Raises JobError."""
        from deltalake.exceptions import DeltaError

        try:
            self._table.update_incremental()
        except (DeltaError, OSError) as error:
            raise JobError(f"{self.directory.path}: {reason(error)}") from None
        # Another run may have committed; the library's list of files shows whether this one did.
        if is_commit and any(f"/{self.prefix}-" in uri for uri in self._table.file_uris()):
            return
        for file in self.directory.names("messages"):
            if file.startswith(self.prefix):
                self.directory.remove(file)


def _mark(table: Library, name: str) -> Mark | None:
    """Return a store's mark in a table of the library's, None for a new store."""
    end, tail = (table.transaction_version(f"duemq/{what}/{name}") for what in ("end", "tail"))
    return Mark(end, tail) if end is not None and tail is not None else None


def _options(uri: str) -> dict[str, str] | None:
    """Return the settings of S3 for deltalake, which pyarrow takes from the URI itself; None for other URIs."""
    parts = urlsplit(uri)
    if parts.scheme != "s3":
        return None
    asked = {name: values[0] for name, values in parse_qs(parts.query).items()}
    options = {}
    if parts.username and parts.password:
        options = {"AWS_ACCESS_KEY_ID": unquote(parts.username), "AWS_SECRET_ACCESS_KEY": unquote(parts.password)}
    if "region" in asked:
        options["AWS_REGION"] = asked["region"]
    if "endpoint_override" in asked:
        scheme = asked.get("scheme", "https")
        options["AWS_ENDPOINT_URL"] = f"{scheme}://{asked['endpoint_override']}"
        options["AWS_ALLOW_HTTP"] = "true" if scheme == "http" else "false"
    return options


def _partition(file: DataFile, name: str) -> dict[str, str | None]:
    return {"day": file.day.isoformat() if file.day is not None else None, "topic": file.topic, "store": name}


def _statistics(file: DataFile) -> dict[str, Any]:
    """Return the statistics of a file by which readers skip it."""
    ends: list[dict[str, Any]] = [{"physical_offset": offset} for offset in file.offsets]
    for end, ms in zip(ends, file.times or (), strict=False):
        end["store_time"] = _text(ms)
    return {"numRecords": file.rows, "minValues": ends[0], "maxValues": ends[1], "nullCount": {}}


def _text(ms: int) -> str:
    time_of = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC) + datetime.timedelta(milliseconds=ms)
    return time_of.isoformat(timespec="milliseconds").replace("+00:00", "Z")
