"""Consume queues in an archive: their units as rows, and files made from these.

file                                       string, of the store: consumequeue/<topic>/<queue>/<name>
file_size                                  int64, in bytes
topic, queue_id, queue_offset              string, int32, int64
physical_offset, record_size, tags_code    int64, int32, int64

A tags code that is an address in consumequeue_ext stays an address: the archive has the files of that directory, too.
"""

from __future__ import annotations

import os
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa

from duemq.spark_jobs.errors import JobError
from duemq.spark_jobs.store.directories import Directory
from duemq.spark_jobs.store.store_files import QueueFile, StoreFiles, is_segment
from duemq.storage import file_names
from duemq.storage.log.copies import UNITS

_RESTORED: Final = ["file", "file_size", "queue_offset", "physical_offset", "record_size", "tags_code"]
"""Columns that a restore reads."""


class QueuesTask(NamedTuple):
    """Files of consume queues that go into one file of the archive."""

    store: StoreFiles
    files: list[QueueFile]
    directory: Directory
    name: str


def archive_queues(task: QueuesTask) -> int:
    """Archive some files; return the number of units. Raises JobError, OSError."""
    tables = []
    for file in task.files:
        units = task.store.stored_units(file)
        count = len(units)
        columns = {
            "file": pa.DictionaryArray.from_arrays(pa.array(np.zeros(count, np.int32)), pa.array([file.path])),
            "file_size": pa.array(np.full(count, file.size, np.int64)),
            "topic": pa.DictionaryArray.from_arrays(pa.array(np.zeros(count, np.int32)), pa.array([file.topic])),
            "queue_id": pa.array(np.full(count, file.queue_id, np.int32)),
            "queue_offset": pa.array(file.first_unit + np.arange(count)),
            "physical_offset": pa.array(units["physical_offset"].astype(np.int64)),
            "record_size": pa.array(units["size"].astype(np.int32)),
            "tags_code": pa.array(units["tags_code"].astype(np.int64)),
        }
        tables.append(pa.table({name: _plain(column) for name, column in columns.items()}))
    table = pa.concat_tables(tables)
    task.directory.write_table(task.name, table, compression="zstd")
    return int(table.num_rows)


def _plain(column: pa.Array) -> pa.Array:
    return column.cast(pa.string()) if pa.types.is_dictionary(column.type) else column


class RestoreQueuesTask(NamedTuple):
    """A file of an archive to restore the files of consume queues from. `name`: of the file in the archive; `files`:
    those of the store in it, by the manifest; `directory`: that of the new consume queues."""

    archive: Directory
    name: str
    files: list[str]
    directory: str


def restore_queues(task: RestoreQueuesTask) -> int:
    """Restore the files of consume queues in one file of the archive; return the number of units. Raises JobError,
    OSError."""
    path, directory = f"{task.archive.path}/{task.name}", task.directory
    table = task.archive.read_table(task.name, _RESTORED)
    codes = table["file"].combine_chunks().dictionary_encode()
    indices = codes.indices.to_numpy()
    for code, name in enumerate(codes.dictionary.to_pylist()):
        if name not in task.files:
            raise JobError(f"{path}: has the file {name}, which the manifest does not have there")
        rows = table.filter(pa.array(indices == code))
        target = os.path.normpath(os.path.join(directory, os.path.relpath(name, file_names.CONSUME_QUEUES)))
        is_below = target.startswith(os.path.join(os.path.normpath(directory), ""))
        if not is_below or not is_segment(os.path.basename(name)):
            raise JobError(f"{path}: names the file {name}, which is not part of a consume queue")
        units = np.zeros(rows.num_rows, UNITS)
        units["physical_offset"] = rows["physical_offset"].to_numpy()
        units["size"] = rows["record_size"].to_numpy()
        units["tags_code"] = rows["tags_code"].to_numpy()
        offsets = rows["queue_offset"].to_numpy()
        first = int(os.path.basename(name)) // UNITS.itemsize
        if len(offsets) and (offsets != first + np.arange(len(offsets))).any():
            raise JobError(f"{path}: units of {name} are missing")
        os.makedirs(os.path.dirname(target), exist_ok=True)
        with open(target, "wb") as file:
            file.write(units.view(np.uint8).data)
            file.truncate(int(rows["file_size"][0].as_py()))
    return int(table.num_rows)
