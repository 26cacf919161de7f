"""Directories that jobs write into: on this machine, or behind a URI of another file system (s3://, hdfs://).

Files appear only as a whole. On this machine a file gets its name once it is on the disk; on HDFS, once it is written;
and an object store shows nothing before the end.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import threading
import uuid
from collections.abc import Callable, Collection, Iterator
from typing import IO, TYPE_CHECKING, Any, Final

from duemq.spark_jobs.errors import CannotRead, JobError, cannot_read
from duemq.spark_jobs.store.local_files import file_system, is_local, local_path, reason, shown
from duemq.spark_jobs.writers.new_directory import sync
from duemq.storage.regular_files import open_regular

if TYPE_CHECKING:
    import pyarrow as pa

_LOCAL: Final = threading.local()
_RENAMING: Final = ("hdfs", "local")
"""File systems that show a file while it is being written, and can rename it."""


class Directory:
    """A directory given by its path or URI. May be sent to tasks. Names are relative to it, with slashes. Each method
    raises JobError where the file system fails."""

    def __init__(self, uri: str, *, is_draft: bool = False) -> None:
        """`is_draft`: a directory of this machine that is renamed and synced later as a whole, so that its files are
        written directly."""
        self.is_local = is_local(uri)
        self._is_draft = is_draft
        self._uri = os.path.abspath(local_path(uri)) if self.is_local else uri
        self.path = shown(self._uri)
        """The path or URI without credentials, for messages."""

    def below(self, name: str) -> str:
        """Return the path or URI of something in the directory, with the credentials and settings that were given."""
        base, mark, query = (self._uri, "", "") if self.is_local else self._uri.partition("?")
        return f"{base.rstrip('/')}/{name}{mark}{query}"

    def write(self, name: str, data: bytes) -> None:
        """Write or replace a file as a whole."""
        self._put(name, lambda file: file.write(data))

    def write_table(self, name: str, table: pa.Table, **options: Any) -> int:
        """Write a table as Parquet; return the size of the file in bytes. `options`: those of
        pyarrow.parquet.write_table."""
        import pyarrow.parquet as pq

        return self._put(name, lambda file: pq.write_table(table, file, **options))

    @contextlib.contextmanager
    def stream(self, name: str, compression: str) -> Iterator[IO[bytes]]:
        """Write a file piece by piece, compressed (`compression`: pyarrow's name). It may be visible before it is
        whole."""
        import pyarrow as pa

        try:
            if self.is_local:
                os.makedirs(os.path.dirname(self._local(name)), exist_ok=True)
                raw = pa.OSFile(self._local(name), "wb")
            else:
                system, root = self._remote()
                raw = system.open_output_stream(f"{root}/{name}", compression=None)
            with raw, pa.CompressedOutputStream(raw, compression) as stream:
                yield stream
        except OSError as error:
            raise self._failed(error) from None

    def read_table(self, name: str, columns: list[str] | None = None, *, may_lack: Collection[str] = ()) -> pa.Table:
        """Read a Parquet file. `columns`: those to read; None: all. `may_lack`: those of them that it need not have.
        Raises JobError if the file or a column is missing, and pa.ArrowException if it is not a Parquet file."""
        table = self._read_table(name, columns)
        lacking = sorted({*(columns or ())} - {*table.column_names, *may_lack})
        if lacking:
            raise JobError(f"{self.path}: {name} has no column {lacking[0]}; use an intact archive")
        return table

    def _read_table(self, name: str, columns: list[str] | None) -> pa.Table:
        """Read a Parquet file, as `read_table` does, with those of the columns that it has. Raises JobError."""
        import pyarrow.parquet as pq

        if self.is_local and os.path.exists(self._local(name)):
            self._check(name)
            return pq.ParquetFile(self._local(name)).read(columns=columns)
        data = self.read(name)
        if data is None:
            raise JobError(f"{self.path}: {name} is missing")
        return pq.ParquetFile(io.BytesIO(data)).read(columns=columns)

    @contextlib.contextmanager
    def open(self, name: str, compression: str) -> Iterator[IO[bytes]]:
        """Read a compressed file piece by piece."""
        import pyarrow as pa

        try:
            if self.is_local:
                self._check(name)
                raw = pa.OSFile(self._local(name), "rb")
            else:
                system, root = self._remote()
                raw = system.open_input_stream(f"{root}/{name}", compression=None)
            with raw, pa.CompressedInputStream(raw, compression) as stream:
                yield stream
        except OSError as error:
            raise self._failed(error) from None

    def size(self) -> int:
        """Return the total size in bytes of all files in the directory, which must be behind a URI."""
        from pyarrow import fs

        try:
            system, root = self._remote()
            found = system.get_file_info(fs.FileSelector(root, allow_not_found=True, recursive=True))
            return sum(info.size for info in found if info.type == fs.FileType.File)
        except OSError as error:
            raise self._failed(error) from None

    def read(self, name: str) -> bytes | None:
        """Read a file; None where it is missing."""
        try:
            if self.is_local:
                with os.fdopen(self._open_local(name), "rb") as file:
                    return file.read()
            system, root = self._remote()
            with system.open_input_file(f"{root}/{name}") as remote:
                return bytes(remote.read())
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self._failed(error) from None

    def names(self, folder: str = "") -> list[str]:
        """Return the names of all files below a folder, sorted; none where the folder is missing."""
        try:
            if self.is_local:
                top = self._local(folder)
                return sorted(
                    os.path.relpath(os.path.join(root, name), self._uri)
                    for root, _, names in os.walk(top)
                    for name in names
                )
            from pyarrow import fs

            system, root = self._remote()
            selector = fs.FileSelector(f"{root}/{folder}".rstrip("/"), allow_not_found=True, recursive=True)
            found = [info.path for info in system.get_file_info(selector) if info.type == fs.FileType.File]
            return sorted(path[len(root) + 1 :] for path in found)
        except OSError as error:
            raise self._failed(error) from None

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""
        try:
            if self.is_local:
                os.unlink(self._local(name))
            else:
                system, root = self._remote()
                system.delete_file(f"{root}/{name}")
        except FileNotFoundError:
            pass
        except OSError as error:
            raise self._failed(error) from None

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Make the directory and hold it exclusively: other callers of this method wait. Does nothing for a directory
        behind a URI."""
        if not self.is_local:
            yield
            return
        try:
            os.makedirs(self._uri, exist_ok=True)
            held = os.open(self._uri, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise self._failed(error) from None
        try:
            fcntl.flock(held, fcntl.LOCK_EX)
            yield
        finally:
            os.close(held)

    def _put(self, name: str, fill: Callable[[IO[bytes]], object]) -> int:
        try:
            if self._is_draft:
                os.makedirs(os.path.dirname(self._local(name)), exist_ok=True)
                return _fill(self._local(name), fill)
            if self.is_local:
                return self._put_here(self._local(name), fill)
            system, root = self._remote()
            path = f"{root}/{name}"
            # Made in memory first: a stream that fails midway would leave an object with part of the data.
            buffer = io.BytesIO()
            fill(buffer)
            if system.type_name in _RENAMING:
                head, _, tail = path.rpartition("/")
                temporary = f"{head}/.{tail}.{uuid.uuid4().hex}.tmp"
                system.create_dir(head, recursive=True)
                with system.open_output_stream(temporary, compression=None) as stream:
                    stream.write(buffer.getbuffer())
                if system.get_file_info(path).is_file:
                    system.delete_file(path)
                system.move(temporary, path)
            else:
                with system.open_output_stream(path, compression=None) as stream:
                    stream.write(buffer.getbuffer())
            return buffer.tell()
        except OSError as error:
            raise self._failed(error) from None

    @staticmethod
    def _put_here(path: str, fill: Callable[[IO[bytes]], object]) -> int:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        head, tail = os.path.split(path)
        # The temporary name begins with a dot, which readers of the directory ignore.
        temporary = os.path.join(head, f".{tail}.{uuid.uuid4().hex}.tmp")
        try:
            size = _fill(temporary, fill)
            sync(temporary)
            os.replace(temporary, path)
        except BaseException:
            if os.path.exists(temporary):
                os.unlink(temporary)
            raise
        sync(head)
        return size

    def _open_local(self, name: str) -> int:
        """Open a file of this machine for reading, and return its descriptor. Raises FileNotFoundError; CannotRead if
        it is not a regular file, such as a FIFO, which would wait for a writer."""
        path = self._local(name)
        try:
            return open_regular(path)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise cannot_read(path, error) from None

    def _check(self, name: str) -> None:
        """Raise the errors of `_open_local`: pyarrow, which opens files by their paths, would wait there."""
        os.close(self._open_local(name))

    def _local(self, name: str) -> str:
        return os.path.join(self._uri, name)

    def _remote(self) -> tuple[Any, str]:
        """Return pyarrow's file system and the path in it. One for each thread, since it cannot be sent to other
        processes. Raises JobError for a URI that pyarrow does not know."""
        known: dict[str, tuple[Any, str]] = _LOCAL.__dict__.setdefault("file_systems", {})
        if self._uri not in known:
            try:
                system, root = file_system(self._uri)
            except ValueError as error:
                raise JobError(f"{self.path}: {error}") from None
            known[self._uri] = system, root.rstrip("/")
        return known[self._uri]

    def _failed(self, error: OSError) -> JobError:
        return error if isinstance(error, CannotRead) else JobError(f"{self.path}: {reason(error)}")


def _fill(path: str, fill: Callable[[IO[bytes]], object]) -> int:
    """Write a file of this machine; return its size in bytes. Raises OSError."""
    import pyarrow as pa

    # Pyarrow writes columns into its own files without holding Python's GIL.
    with pa.OSFile(path, "wb") as file:
        fill(file)
        return int(file.tell())
