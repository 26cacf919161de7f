"""Appends the records that a store got since the last run to a table that several stores share: Parquet, Iceberg or
Delta.

Rows are those of `archive.rows`, with `store`, the store's name in the table, and `day`, the UTC day of store_time. The
table itself records up to where it has a store (`Mark`), in the same commit as the rows. So a run that is killed or
repeated neither leaves a row out nor adds one twice. Records that expired from the store stay in the table.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import pyarrow as pa

from duemq.spark_jobs.archive.rows import PARQUET, by_day_and_topic, folder_name, folder_of, table_of
from duemq.spark_jobs.archive.table import COLUMNS, DataFile, Mark, MarksOf, Table, TableRun
from duemq.spark_jobs.columns import instants
from duemq.spark_jobs.columns.records import joined_damages
from duemq.spark_jobs.compact.compact import BytesDone, refuse_unknown_queues
from duemq.spark_jobs.errors import JobError
from duemq.spark_jobs.store.directories import Directory
from duemq.spark_jobs.store.known_again import is_known, tail_of
from duemq.spark_jobs.store.local_files import is_local, local_path, real_path, reason, refuse_within
from duemq.spark_jobs.store.ranges import plan
from duemq.spark_jobs.store.store_files import StoreFiles
from duemq.spark_jobs.store.walks import Range, walks
from duemq.spark_jobs.writers.tasks import Runner, SharedDirectory, runner

if TYPE_CHECKING:
    from duemq.spark_jobs.columns.records import Damage

FORMATS: Final = ("parquet", "iceberg", "delta")
RANGE_SIZE: Final = 64 << 20


@dataclass
class AppendResult:
    """The result of a run. `begin`, `end`: physical offsets; `size` in bytes, of the records; `damages`: number of
    damaged stretches between them; `expired`: number of bytes that expired before they could be appended."""

    store: str
    name: str
    begin: int
    end: int
    records: int = 0
    size: int = 0
    files: int = 0
    damages: int = 0
    expired: int = 0


class AppendTask(NamedTuple):
    """A range of a store that becomes files."""

    store: StoreFiles
    part: Range
    name: str
    prefix: str
    directory: Directory
    in_directories: bool
    columns: Sequence[str]


class Appended(NamedTuple):
    """The result of a task. `damages`: offset, size, reason."""

    bytes: int
    records: int
    size: int
    files: list[DataFile]
    damages: list[tuple[int, int, str]]


def write(task: AppendTask) -> Appended:
    """Write the records of a range. Raises OSError, JobError."""
    tables, days = [], []
    damages: list[Damage] = []
    for found in walks(task.store, task.part, check_crc=False):
        damages += found.damages
        if len(found.records):
            tables.append(table_of(found.records))
            days.append(instants.days(found.records.store_ms))
    files: list[DataFile] = []
    records = size = 0
    if tables:
        whole = pa.concat_tables(tables).combine_chunks()
        records, size = whole.num_rows, int(whole["size"].to_numpy().astype(np.int64).sum())
        for number, (day, topic, rows) in enumerate(by_day_and_topic(whole, np.concatenate(days))):
            name = f"{task.prefix}-{task.part.start:020}-{task.part.end:020}"
            if task.in_directories:
                name = f"{folder_of(day, topic)}/{folder_name(task.name, 'store=')}/{name}.parquet"
            else:
                name = f"{name}-{number:05}.parquet"
            date = instants.date_of(day)
            offsets = rows["physical_offset"].to_numpy()
            written = task.directory.write_table(name, _of_table(rows, task, date), **PARQUET)
            span, ms = (int(offsets.min()), int(offsets.max())), None
            if date is not None:
                times = rows["store_time"].cast(pa.int64()).to_numpy()
                ms = int(times.min()), int(times.max())
            files.append(DataFile(name, rows.num_rows, written, date, topic, span, ms))
    found_damages = [(d.physical_offset, d.size, d.reason) for d in joined_damages(damages)]
    return Appended(task.part.end - task.part.start, records, size, files, found_damages)


def _of_table(rows: pa.Table, task: AppendTask, day: datetime.date | None) -> pa.Table:
    known = {
        "store": pa.repeat(pa.scalar(task.name, pa.string()), rows.num_rows),
        "day": pa.repeat(pa.scalar(day, pa.date32()), rows.num_rows),
    }
    schema = pa.schema([COLUMNS.field(name) for name in task.columns])
    arrays = [known[field.name] if field.name in known else rows[field.name].cast(field.type) for field in schema]
    return pa.Table.from_arrays(arrays, schema=schema)


def open_table(target: str, table_format: str = "parquet", *, catalog: str | None = None) -> Table:
    """Return a table to append to. `target`: a directory by path or URI; for Iceberg a warehouse on this machine, or
    with `catalog`, the name of one configured for pyiceberg, a table's identifier. Raises JobError."""
    if catalog is not None and table_format != "iceberg":
        raise JobError("a catalog is for Iceberg tables")
    if table_format == "iceberg":
        from duemq.spark_jobs.archive.iceberg_table import IcebergTable

        return IcebergTable(target, catalog)
    if table_format == "delta":
        from duemq.spark_jobs.archive.delta_table import DeltaTable

        return DeltaTable(target)
    if table_format == "parquet":
        from duemq.spark_jobs.archive.parquet_table import ParquetTable

        return ParquetTable(target)
    raise JobError(f"there is no table format {table_format}; there are {', '.join(FORMATS)}")


@contextlib.contextmanager
def _tasks(directory: Directory, spark: Any, workers: int | None) -> Iterator[Runner]:
    """Yield a runner for tasks that write into a directory. Spark's tasks check that they see it by a file in it."""
    mark = f".{uuid.uuid4().hex}.mark" if spark is not None and directory.is_local else None
    if mark is not None:
        directory.write(mark, b"")
    tasks = runner(SharedDirectory(directory.path, local_path(directory.below(mark)) if mark else None), spark, workers)
    try:
        yield tasks
    finally:
        tasks.close()
        if mark is not None:
            directory.remove(mark)


def append(
    store_path: str,
    table: Table,
    *,
    name: str | None = None,
    adopt: bool = False,
    allow_gap: bool = False,
    spark: Any = None,
    workers: int | None = None,
    range_size: int = RANGE_SIZE,
    progress: BytesDone | None = None,
) -> AppendResult:
    """Append the records that a store got since the last run to a table.

    `name`: the store's name in the table, by default its URI or its absolute path without links, or the name that an
    earlier version used. `adopt`: nothing is appended, and all present records of the store count as appended: for a
    store that was compacted or restored since. `allow_gap`: continue if records expired before they were appended.
    Tasks as for `compact.compact`. Raises JobError if the store is not the one that was appended under this name, was
    cut, or has lost records to expiry that the table does not have."""
    store = StoreFiles.open(store_path)
    refuse_within(store_path, table.path)  # before anything is made there
    refuse_unknown_queues(store)
    try:
        with table.begin(lambda marks_of: name or _name_of(store, store_path, marks_of)) as run:
            refuse_within(store_path, run.directory.path)  # a catalog may have the table anywhere
            if adopt:
                begin, expired = _adopted_end(store, run.mark), 0
            else:
                begin, expired = _begin(store, run.name, run.mark, allow_gap=allow_gap)
            end = store.records_end(begin)
            result = AppendResult(store.path, run.name, begin, end, expired=expired)
            if adopt and run.mark is None:
                raise JobError(f"{store.path}: the table has no store {run.name} for this one to continue")
            if end > begin or adopt:
                with _tasks(run.directory, spark, workers) as tasks:
                    _append(store, table, run, result, tasks, range_size, progress or (lambda done, total: None))
            return result
    except JobError:
        raise
    except OSError as error:
        raise JobError(f"{store.path}: {reason(error)}") from None


def _name_of(store: StoreFiles, path: str, marks_of: MarksOf) -> str:
    """Return the name of a store in a table."""
    real = real_path(path)
    also = {store.path, store.path.rstrip("/")}
    if store.is_local:
        absolute = os.path.abspath(local_path(path))
        also |= {absolute, f"{absolute}/", f"{real}/"}
    known = marks_of({real, *also})
    if real in known:
        return real
    # Earlier versions took the path as it was given: with a slash, relative, through a link. A relative one may have
    # been relative to any directory; the records decide.
    same = [
        name
        for name, mark in known.items()
        if name in also
        or (real_path(name) == real and not _is_relative(name))
        or (_may_be(name, real) and is_known(store, mark.end, mark.tail))
    ]
    return max(same, key=lambda name: known[name].end, default=real)


def _is_relative(name: str) -> bool:
    return is_local(name) and not os.path.isabs(local_path(name))


def _may_be(name: str, real: str) -> bool:
    """Return whether a relative path as given to an earlier run may have been one of this real path."""
    parts = [part for part in os.path.normpath(name).split("/") if part not in (".", "..")]
    return f"{real}/".endswith("".join(f"/{part}" for part in parts) + "/")


def _begin(store: StoreFiles, name: str, mark: Mark | None, *, allow_gap: bool) -> tuple[int, int]:
    """Return the physical offset from which to continue, and how many bytes expired before it was reached. Raises
    JobError."""
    first = store.segments[0].first_offset
    if mark is None:
        return first, 0
    advice = (
        "If it is another store, give it a name of its own (--store-name). If it is the same after a compaction or a "
        "restore, and the table has all of its records, run once with --adopt"
    )
    if mark.end > store.written_end:
        raise JobError(
            f"{store.path}: ends at physical offset {store.written_end}, but the table has {name} up to {mark.end}: "
            f"it was cut or exchanged. {advice}"
        )
    tail = tail_of(store, mark.end)
    if tail is None:
        if not allow_gap:
            raise JobError(
                f"{store.path}: the table has {name} up to physical offset {mark.end}, but the store begins at "
                f"{first}: what was between expired before it was appended. --allow-gap continues behind it"
            )
        return first, first - mark.end
    if tail != mark.tail:
        raise JobError(
            f"{store.path}: has other records before physical offset {mark.end} than what the table has as {name}: it "
            f"was exchanged, compacted or restored. {advice}"
        )
    return mark.end, 0


def _adopted_end(store: StoreFiles, mark: Mark | None) -> int:
    """Return the physical offset up to which an adopted store counts as appended: the store's end. But if it is the
    store that the table has, and a running broker holds readers back before the table's end, return the table's end:
    rows in the table must not be appended again."""
    end = store.records_end()
    if mark is not None and end < mark.end and is_known(store, mark.end, mark.tail):
        return mark.end
    return end


def _append(
    store: StoreFiles,
    table: Table,
    run: TableRun,
    result: AppendResult,
    tasks: Runner,
    range_size: int,
    report: BytesDone,
) -> None:
    ranges = plan(store, range_size, start=result.begin, end=result.end)
    total, done = result.end - result.begin, 0

    def advance(found: Appended) -> None:
        nonlocal done
        done += found.bytes
        report(min(done, total), total)

    run.note_begun()
    is_commit = False
    requests = [
        AppendTask(store, part, run.name, run.prefix, run.directory, table.in_directories, table.columns)
        for part in ranges
    ]
    try:
        written = tasks.run(write, requests, advance)
        mark, files, about = _sum_up(store, result, written)
        is_commit = True
        run.commit(mark, files, about)
    except JobError:
        # On a full disk their files would be in the way of the next run.
        with contextlib.suppress(JobError):
            run.abandon(is_commit=is_commit)
        raise
    report(total, total)


def _sum_up(
    store: StoreFiles, result: AppendResult, written: list[Appended]
) -> tuple[Mark, list[DataFile], dict[str, Any]]:
    """Return the mark, files and description to commit for a run. Raises JobError."""
    files = [file for found in written for file in found.files]
    damages = [damage for found in written for damage in found.damages]
    gaps = [gap for gap in store.gaps_between() if gap[0] < result.end and gap[0] + gap[1] > result.begin]
    damages = sorted([*damages, *gaps])
    result.records, result.size = sum(found.records for found in written), sum(found.size for found in written)
    result.files, result.damages = len(files), len(damages)
    tail = tail_of(store, result.end)
    if tail is None:
        raise JobError(f"{store.path}: its files were removed while they were read; nothing was appended. Try again")
    about = {
        "store": result.name,
        "path": store.path,
        "begin": result.begin,
        "end": result.end,
        "records": result.records,
        "expired": result.expired,
        "damaged": damages,
    }
    return Mark(result.end, tail), files, about
