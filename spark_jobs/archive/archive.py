"""Archiving a store as Parquet, and restoring it.

    <archive>/manifest.json            the contents: see `ArchiveManifest`
              messages/day=2026-11-21/topic=orders/part-00000.parquet ...    the records, see `archive.rows`: by the
                                       UTC day of their store time and by topic, one file a range of the commitlog
              damaged.parquet          stretches of the commitlog that are not records: where, why, their bytes
              consume_queue/part-00000.parquet ...     the units of the consume queues
              state.tar.zst            all other files of the store: config/, checkpoint, timers; see `archive.state`

All readers of Parquet can read the messages; pyarrow, Spark and DuckDB take the directories as columns. All files are
compressed with zstd.

Restoring returns the store: every record with the same bytes at the same physical offset, the same consume queues, and
the other files as they were, except index files, which are rebuilt. An archive made while a broker had the store open
has only the records, up to where they are durable, and cannot be restored.

Each task needs memory for three times the size of a range (64 MiB).
"""

from __future__ import annotations

import contextlib
import os
import tarfile
import time
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, NamedTuple

import msgspec
import pyarrow as pa

from duemq.protocol.records.record import END_MARKER, MAGIC_END
from duemq.spark_jobs.archive import rows, state
from duemq.spark_jobs.archive.rows import ArchivePart, Count, RestoreTask, WriteTask
from duemq.spark_jobs.compact.compact import BytesDone, disk_usage, refuse_unknown_queues
from duemq.spark_jobs.errors import JobError
from duemq.spark_jobs.store.directories import Directory
from duemq.spark_jobs.store.local_files import is_local, real_path, reason, refuse_within
from duemq.spark_jobs.store.ranges import plan
from duemq.spark_jobs.store.store_files import QueueFile, StoreFiles
from duemq.spark_jobs.writers import archived_queues, index
from duemq.spark_jobs.writers.archived_queues import QueuesTask, RestoreQueuesTask
from duemq.spark_jobs.writers.new_directory import SCRATCH, NewDirectory, held
from duemq.spark_jobs.writers.new_remote_directory import NewRemoteDirectory
from duemq.spark_jobs.writers.spill import load
from duemq.spark_jobs.writers.tasks import Runner, SharedDirectory, runner
from duemq.storage import file_names

VERSION: Final = 1
RANGE_SIZE: Final = 64 << 20
_QUEUE_FILES_A_PART: Final = 16
_NOT_STATE: Final = {
    file_names.COMMITLOG,
    file_names.CONSUME_QUEUES,
    file_names.INDEX,
    file_names.ABORT,
    file_names.ABORT + file_names.BACKUP,
    SCRATCH,
}
"""Names in a store that state.tar.zst has nothing of: a restore writes the first three, and its tasks have SCRATCH."""
_DAMAGED: Final = pa.schema([("physical_offset", pa.int64()), ("reason", pa.string()), ("bytes", pa.binary())])


class ArchiveManifest(msgspec.Struct):
    """manifest.json. Sizes in bytes, times in ms since the epoch."""

    version: int
    store: str
    """The path or URI of the store."""
    written_by: str
    """The broker that had the store last: duemq or rocketmq."""
    archived_ms: int
    is_restorable: bool
    segment_size: Annotated[int, msgspec.Meta(ge=1, le=1 << 31)]
    """Size of the commitlog's files."""
    segments: list[Count]
    """First physical offsets of the commitlog's files."""
    records: Count
    size: Count
    """Size of all records."""
    parts: list[ArchivePart]
    """The ranges, in the order of their physical offsets."""
    topics: dict[str, dict[str, int]]
    """For each topic: records, size, first_store_ms, last_store_ms."""
    queue_files: list[list[str]]
    """For each part of consume_queue/, the files of the store in it."""


@dataclass
class ArchiveResult:
    """The result of archiving. Sizes in bytes: `size` of the records, `disk_before` of all files of a store on this
    machine, `disk_after` of the archive. `damaged`: number of damaged stretches, which are kept as they are; `missing`:
    number of stretches for which there is no file, or only a file that was cut; `left_out`: names in the store of the
    FIFOs, sockets and devices, which are not in the archive."""

    records: int = 0
    size: int = 0
    damaged: int = 0
    missing: int = 0
    files: int = 0
    disk_before: int | None = None
    disk_after: int = 0
    why_not_restorable: str | None = None
    left_out: list[str] = field(default_factory=list)


@dataclass
class RestoreResult:
    """The result of restoring."""

    records: int = 0
    size: int = 0
    index_files: int = 0
    seconds: dict[str, float] = field(default_factory=dict)


def archive(
    store_path: str,
    out_path: str,
    *,
    spark: Any = None,
    workers: int | None = None,
    range_size: int = RANGE_SIZE,
    progress: BytesDone | None = None,
) -> ArchiveResult:
    """Archive a store into a new directory, on this machine or behind a URI. Tasks run as those of `compact.compact`.
    Raises JobError if the store cannot be archived; then there is no new archive, and the store is unchanged."""
    store = StoreFiles.open(store_path)
    refuse_within(store_path, out_path)
    refuse_unknown_queues(store)
    why_not = _why_not_at_rest(store)
    new = NewDirectory(out_path) if is_local(out_path) else NewRemoteDirectory(out_path)
    tasks = None
    try:
        new.begin()
        with held(store.local_path) if why_not is None else contextlib.nullcontext():
            tasks = runner(new if isinstance(new, NewDirectory) else SharedDirectory(new.path), spark, workers)
            result = _archive(store, new, tasks, range_size, progress or (lambda done, total: None), why_not is None)
            result.why_not_restorable = why_not
            return result
    except JobError:
        raise
    except OSError as error:
        raise JobError(f"{error.filename or new.path}: {reason(error)}") from None
    finally:
        if tasks is not None:
            tasks.close()
        new.give_up()


def _why_not_at_rest(store: StoreFiles) -> str | None:
    """Return why a store's files may change, or may not fit together; None if they neither change nor disagree."""
    if not store.is_local:
        return "the store was read from another machine"
    if store.is_running:
        return "a broker has the store open"
    return None if store.is_clean else "its broker was not stopped in order"


def _archive(
    store: StoreFiles,
    new: NewDirectory | NewRemoteDirectory,
    tasks: Runner,
    range_size: int,
    report: BytesDone,
    is_at_rest: bool,
) -> ArchiveResult:
    # First, since a link may be refused.
    members = state.members(store.local_path, _state_of(store)) if is_at_rest else None
    ranges = plan(store, range_size)
    total = sum(part.end - part.start for part in ranges)
    new.need(total // 10)
    done = 0

    def advance(part: ArchivePart) -> None:
        nonlocal done
        done += part.end - part.start
        report(done, total)

    directory = new.directory if isinstance(new, NewRemoteDirectory) else Directory(new.path, is_draft=True)
    if isinstance(new, NewDirectory):
        new.join("messages", "")
    parts = tasks.run(
        rows.write,
        [WriteTask(store, part, number, directory, SCRATCH) for number, part in enumerate(ranges)],
        advance,
    )
    result = ArchiveResult(sum(part.records for part in parts), sum(part.size for part in parts))
    result.files = sum(len(part.files) for part in parts)
    result.damaged, result.missing = _write_damaged(directory, parts), len(store.gaps())
    queue_files: list[list[str]] = []
    if members is not None:
        queue_files = _archive_queues(store, directory, tasks)
        with directory.stream("state.tar.zst", "zstd") as stream:
            state.write(stream, store.local_path, members.names)
        result.left_out = members.left_out
    manifest = ArchiveManifest(
        VERSION,
        os.path.abspath(store.path) if store.is_local else store.path,
        store.written_by,
        time.time_ns() // 1_000_000,
        is_at_rest,
        store.segment_size,
        [segment.first_offset for segment in store.segments],
        result.records,
        result.size,
        [part._replace(topics={}) for part in parts],
        _topics(parts),
        queue_files,
    )
    text = msgspec.json.format(msgspec.json.encode(manifest), indent=1)
    directory.write("manifest.json", text)
    if store.is_local:
        result.disk_before = disk_usage(store.local_path)
    new.finish()
    result.disk_after = disk_usage(new.target) if isinstance(new, NewDirectory) else directory.size()
    report(total, total)
    return result


def _write_damaged(directory: Directory, parts: list[ArchivePart]) -> int:
    """Join the damaged stretches that the tasks found; return their number."""
    tables = [directory.read_table(f"{SCRATCH}/{part.damaged}") for part in parts if part.damaged]
    table = pa.concat_tables(tables) if tables else _DAMAGED.empty_table()
    directory.write_table("damaged.parquet", table, compression="zstd")
    return int(table.num_rows)


def _topics(parts: list[ArchivePart]) -> dict[str, dict[str, int]]:
    topics: dict[str, dict[str, int]] = {}
    for part in parts:
        for name, (records, size, first_ms, last_ms) in part.topics.items():
            known = topics.setdefault(
                name, {"records": 0, "size": 0, "first_store_ms": first_ms, "last_store_ms": last_ms}
            )
            known["records"] += records
            known["size"] += size
            known["first_store_ms"] = min(known["first_store_ms"], first_ms)
            known["last_store_ms"] = max(known["last_store_ms"], last_ms)
    return dict(sorted(topics.items()))


def _archive_queues(store: StoreFiles, directory: Directory, tasks: Runner) -> list[list[str]]:
    files = store.queue_files()
    groups = [files[at : at + _QUEUE_FILES_A_PART] for at in range(0, len(files), _QUEUE_FILES_A_PART)]
    tasks.run(
        archived_queues.archive_queues,
        [
            QueuesTask(store, group, directory, f"consume_queue/part-{number:05}.parquet")
            for number, group in enumerate(groups)
        ],
    )
    return [[file.path for file in group] for group in groups]


def _state_of(store: StoreFiles) -> list[str]:
    """Return the names of the files and directories of a store that are archived as they are."""
    return [name for name in store.names("") if name not in _NOT_STATE]


def read_manifest(archive_path: str) -> ArchiveManifest:
    """Read the manifest of an archive. Raises JobError if there is none, or one of another version."""
    directory = Directory(archive_path)
    path = f"{directory.path}/manifest.json"
    text = directory.read("manifest.json")
    if text is None:
        raise JobError(f"{directory.path}: has no manifest.json, so it is not an archive; give the archive's directory")
    try:
        manifest = msgspec.json.decode(text, type=ArchiveManifest)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise JobError(f"{path}: {error}") from None
    if manifest.version != VERSION:
        raise JobError(f"{path}: is of version {manifest.version}; this program reads version {VERSION}")
    return manifest


def _why_not_whole(manifest: ArchiveManifest) -> str | None:
    """Return which statements of a manifest contradict each other; None if none do."""
    size, segments, parts = manifest.segment_size, manifest.segments, manifest.parts
    if any(first % size for first in segments) or segments != sorted(set(segments)):
        return f"its segments are not the offsets of files of {size} bytes"
    if sum(part.records for part in parts) != manifest.records or sum(part.size for part in parts) != manifest.size:
        return "its parts have other records than it says in all"
    last = 0
    for part in parts:
        first = part.start - part.start % size
        if first not in segments or not last <= part.start <= part.end <= first + size:
            return f"its part from {part.start} to {part.end} does not fit its segments and other parts"
        if part.marker != -1 and not part.start <= part.marker <= part.end:
            return f"its part from {part.start} on has a marker at {part.marker}"
        if sum(part.files.values()) != part.records or (part.size and not part.records):
            return f"its part from {part.start} on has other records than its files"
        last = part.end
    return None


def restore(
    archive_path: str,
    out_path: str,
    *,
    spark: Any = None,
    workers: int | None = None,
    with_index: bool = True,
    progress: BytesDone | None = None,
) -> RestoreResult:
    """Restore an archive, on this machine or behind a URI, as a store in a new directory. Tasks and failures as for
    `compact.compact`; also raises JobError if a file of the archive is missing, or does not have the contents that the
    manifest states."""
    directory = Directory(archive_path)
    manifest = read_manifest(archive_path)
    why = _why_not_whole(manifest)
    if why is not None:
        raise JobError(f"{directory.path}/manifest.json: {why}; use an intact archive")
    if not manifest.is_restorable:
        raise JobError(
            f"{directory.path}: was made from another machine's store, while a broker had it open, or after a crash: "
            "it has only the records, not the store's other files"
        )
    if is_local(archive_path) and f"{real_path(out_path)}/".startswith(f"{real_path(archive_path)}/"):
        raise JobError(f"{out_path}: lies in the archive that is restored; give a path outside it")
    new = NewDirectory(out_path)
    tasks = None
    try:
        new.begin()
        tasks = runner(new, spark, workers)
        return _restore(directory, manifest, new, tasks, with_index, progress or (lambda done, total: None))
    except JobError:
        raise
    except (OSError, pa.ArrowException, tarfile.TarError) as error:
        raise JobError(f"{directory.path}: cannot be restored: {reason(error)}") from None
    finally:
        if tasks is not None:
            tasks.close()
        new.give_up()


class _Marker(NamedTuple):
    offset: int
    left: int


def _restore(
    archived: Directory,
    manifest: ArchiveManifest,
    new: NewDirectory,
    tasks: Runner,
    with_index: bool,
    report: BytesDone,
) -> RestoreResult:
    result = RestoreResult(manifest.records, manifest.size)
    began = time.perf_counter()

    def step(name: str) -> None:
        nonlocal began
        now = time.perf_counter()
        result.seconds[name] = round(now - began, 3)
        began = now

    new.need(manifest.size + manifest.size // 20)
    size = manifest.segment_size
    directory = new.join(file_names.COMMITLOG, "")
    for first in manifest.segments:
        with open(os.path.join(directory, f"{first:020}"), "wb") as file:
            file.truncate(size)
    done = 0

    def advance(restored: int) -> None:
        nonlocal done
        done += restored
        report(done, manifest.size)

    requests = [
        RestoreTask(archived, part, number, directory, size, new.scratch, with_index)
        for number, part in enumerate(manifest.parts)
    ]
    tasks.run(rows.read, requests, advance)
    _restore_damaged(archived, directory, size)
    for part in manifest.parts:
        if part.marker >= 0:
            _write_at(directory, size, part.marker, END_MARKER.pack(size - part.marker % size, MAGIC_END))
    step("commitlog")
    queue_directory = new.join(file_names.CONSUME_QUEUES, "")
    tasks.run(
        archived_queues.restore_queues,
        [
            RestoreQueuesTask(archived, f"consume_queue/part-{number:05}.parquet", files, queue_directory)
            for number, files in enumerate(manifest.queue_files)
        ],
    )
    step("consume queues")
    with archived.open("state.tar.zst", "zstd") as stream:
        state.read(stream, new.path, but=_NOT_STATE)
    if with_index:
        counts = [len(load(new.scratch, f"{number}.items")) for number in range(len(manifest.parts))]
        for task in index.plan(new.scratch, new.join(file_names.INDEX, ""), counts, time.time()):
            tasks.run(index.write, [task])
            result.index_files += 1
    step("other files")
    new.finish()
    step("finish")
    return result


def _restore_damaged(archived: Directory, directory: str, segment_size: int) -> None:
    table = archived.read_table("damaged.parquet", _DAMAGED.names)
    for row in table.to_pylist():
        if row["physical_offset"] % segment_size + len(row["bytes"]) > segment_size:
            raise JobError(
                f"{archived.path}/damaged.parquet: what it has from {row['physical_offset']} on fits no file"
            )
        _write_at(directory, segment_size, row["physical_offset"], row["bytes"])


def _write_at(directory: str, segment_size: int, offset: int, data: bytes) -> None:
    first = offset - offset % segment_size
    with open(os.path.join(directory, f"{first:020}"), "r+b") as file:
        file.seek(offset - first)
        file.write(data)


__all__ = ["ArchiveManifest", "ArchiveResult", "QueueFile", "RestoreResult", "archive", "read_manifest", "restore"]
