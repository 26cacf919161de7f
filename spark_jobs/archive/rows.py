"""Records as rows of Parquet, and back. One task for each range of the commitlog.

topic, day (in the directory)   string; `day` is the UTC day of store_time, null without one; see `folder_name`
queue_id, queue_offset          int32, int64
physical_offset, size           int64, int32: where the record lies, and its bytes
store_time, born_time           timestamp[ms, UTC]; null outside the years 1678 to 2261, see `instants`
store_ms, born_ms               int64: ms since the epoch where store_time and born_time are null, null elsewhere
store_host, born_host           binary: the address, 4 or 16 bytes, and the port, 4 bytes
keys, tags, unique_key          string: the properties KEYS, TAGS and UNIQ_KEY
properties                      map<string, string>
body                            binary, as stored: sys_flag says whether it is compressed
flag, sys_flag, reconsume_times int32
prepared_offset                 int64
body_crc, magic                 int64
properties_text                 binary: the properties as the record has them, byte for byte
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple
from urllib.parse import quote

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from duemq.protocol.records.properties import KEYS, TAGS, UNIQ_KEY
from duemq.protocol.records.record import MAGIC_V1, TRANSACTION_ROLLBACK
from duemq.spark_jobs.columns import instants
from duemq.spark_jobs.columns.records import PADDING, Records
from duemq.spark_jobs.columns.slices import gather
from duemq.spark_jobs.errors import JobError
from duemq.spark_jobs.store.directories import Directory
from duemq.spark_jobs.store.walks import Range, walks
from duemq.spark_jobs.writers.index import items_of
from duemq.spark_jobs.writers.spill import save
from duemq.storage.log.copies import HEAD
from duemq.storage.queues.index_file import ITEM

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from duemq.spark_jobs.columns.records import Damage
    from duemq.spark_jobs.store.store_files import StoreFiles

    Integers = NDArray[np.int64]

_BORN_IPV6: Final = 1 << 4
_STORE_IPV6: Final = 1 << 5
_TIME: Final = pa.timestamp("ms", "UTC")
SCHEMA: Final = pa.schema(
    [
        ("topic", pa.string()),
        ("queue_id", pa.int32()),
        ("queue_offset", pa.int64()),
        ("physical_offset", pa.int64()),
        ("size", pa.int32()),
        ("store_time", _TIME),
        ("born_time", _TIME),
        ("store_host", pa.binary()),
        ("born_host", pa.binary()),
        ("keys", pa.string()),
        ("tags", pa.string()),
        ("unique_key", pa.string()),
        ("properties", pa.map_(pa.string(), pa.string())),
        ("body", pa.binary()),
        ("flag", pa.int32()),
        ("sys_flag", pa.int32()),
        ("reconsume_times", pa.int32()),
        ("prepared_offset", pa.int64()),
        ("body_crc", pa.int64()),
        ("magic", pa.int64()),
        ("properties_text", pa.binary()),
        ("store_ms", pa.int64()),
        ("born_ms", pa.int64()),
    ]
)
_NULL: Final = "__HIVE_DEFAULT_PARTITION__"
"""Hive's value for null in names of directories."""
_MAX_NAME: Final = 255
"""Largest number of bytes in a name in a directory, by ext4, XFS and HDFS."""
_HASH: Final = 16
"""Hexadecimal digits of the hash that distinguishes shortened names."""
PARQUET: Final[dict[str, Any]] = {
    "compression": "zstd",
    "compression_level": 1,
    "use_dictionary": ["topic", "tags", "store"],
}
"""Options for writing files of messages."""
_LATER: Final = ("store_ms", "born_ms")
"""Columns that older archives do not have."""
_RESTORED: Final = [name for name in SCHEMA.names if name not in ("keys", "tags", "unique_key", "properties")]


Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
"""A number of things or bytes, or a physical offset, in the manifest."""


class ArchivePart(NamedTuple):
    """A range in the manifest. `files`: number of rows by name below messages/. `marker`: physical offset of the end
    marker that closes the file behind the range, -1 without one. `damaged`: the task's file of damaged stretches, empty
    without. `topics`: records, bytes, first and last store time by topic."""

    start: Count
    end: Count
    records: Count
    size: Count
    marker: Annotated[int, msgspec.Meta(ge=-1, le=2**63 - 1)]
    files: dict[str, Count]
    damaged: str
    topics: dict[str, tuple[int, int, int, int]]


class WriteTask(NamedTuple):
    """A range to archive into a directory. `scratch`: a directory within it for files that only the job reads."""

    store: StoreFiles
    part: Range
    number: int
    directory: Directory
    scratch: str


def write(task: WriteTask) -> ArchivePart:
    """Archive a range. Raises JobError, OSError."""
    tables, damages, marker = [], [], -1
    topics: dict[str, tuple[int, int, int, int]] = {}
    days: list[Integers] = []
    last_end = task.part.start
    at = task.part.start
    for found in walks(task.store, task.part, check_crc=False):
        damages += found.damages
        records = found.records
        if len(records):
            tables.append(table_of(records))
            days.append(instants.days(records.store_ms))
            _count(topics, records)
            last_end = int(records.physical_offset[-1] + records.sizes[-1])
        if found.at_end_marker:
            damaged_end = max((d.physical_offset + d.size for d in damages), default=0)
            marker = max(last_end, damaged_end)
        at += found.end
    files = {}
    size = count = 0
    if tables:
        table = pa.concat_tables(tables).combine_chunks()
        count, size = table.num_rows, int(table["size"].to_numpy().astype(np.int64).sum())
        files = _write_files(task, table, np.concatenate(days))
    damaged = _write_damages(task, damages)
    return ArchivePart(task.part.start, task.part.end, count, size, marker, files, damaged, topics)


def table_of(records: Records) -> pa.Table:
    """Return the rows of some records, as copies."""
    data, flags = records.data, records.sys_flag
    codes, names = records.topics()
    topic = pa.DictionaryArray.from_arrays(pa.array(codes), pa.array(names, pa.string())).cast(pa.string())
    born_size = np.where(flags & _BORN_IPV6, 20, 8).astype(np.int64)
    store_size = np.where(flags & _STORE_IPV6, 20, 8).astype(np.int64)
    columns = {
        "topic": topic,
        "queue_id": _ints(records.queue_id),
        "queue_offset": pa.array(records.queue_offset),
        "physical_offset": pa.array(records.physical_offset),
        "size": _ints(records.sizes),
        "store_time": instants.timestamps(records.store_ms, "ms"),
        "born_time": instants.timestamps(records.born_ms, "ms"),
        "store_host": gather(data, records.starts + 48 + born_size + 8, store_size),
        "born_host": gather(data, records.starts + 48, born_size),
        "keys": records.property_strings(KEYS),
        "tags": records.property_strings(TAGS),
        "unique_key": records.property_strings(UNIQ_KEY),
        "properties": records.texts.maps(),
        "body": gather(data, records.body_at, records.body_size),
        "flag": _ints(records.flag),
        "sys_flag": _ints(flags),
        "reconsume_times": _ints(records.reconsume_times),
        "prepared_offset": pa.array(records.prepared_offset),
        "body_crc": pa.array(records.body_crc),
        "magic": pa.array(records.magic),
        "properties_text": gather(data, records.properties_at, records.properties_size),
        "store_ms": instants.others(records.store_ms),
        "born_ms": instants.others(records.born_ms),
    }
    return pa.table([columns[name] for name in SCHEMA.names], SCHEMA)


def _ints(values: Integers) -> pa.Array:
    return pa.array(values.astype(np.int32))


def _count(topics: dict[str, tuple[int, int, int, int]], records: Records) -> None:
    codes, names = records.topics()
    stored = records.store_ms
    for code, name in enumerate(names):
        mine = codes == code
        if not mine.any():
            continue
        times = stored[mine]
        known = topics.get(name, (0, 0, int(times.min()), int(times.max())))
        topics[name] = (
            known[0] + int(mine.sum()),
            known[1] + int(records.sizes[mine].sum()),
            min(known[2], int(times.min())),
            max(known[3], int(times.max())),
        )


def by_day_and_topic(table: pa.Table, days: Integers) -> Iterator[tuple[int, str, pa.Table]]:
    """Yield the rows of each day and topic, in the order of the table. `days`: that of each row, by `instants.days`."""
    codes = table["topic"].combine_chunks().dictionary_encode()
    names = codes.dictionary.to_pylist()
    keys = days * len(names) + codes.indices.to_numpy()
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    firsts = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1])))
    for first, end in zip(firsts.tolist(), [*firsts[1:].tolist(), len(ordered)], strict=True):
        day, code = divmod(int(ordered[first]), len(names))
        rows = table if end - first == table.num_rows else table.take(pa.array(order[first:end]))
        yield day, names[code], rows


def folder_of(day: int, topic: str) -> str:
    """Return the directory of a day, by `instants.days`, and a topic."""
    date = instants.date_of(day)
    return f"day={_NULL if date is None else date.isoformat()}/{folder_name(topic, 'topic=')}"


def folder_name(text: str, before: str = "") -> str:
    """Return the name of a directory for a text, percent-encoded, with a prefix. A name longer than file systems allow
    is cut, and ends with a hash of the text: different texts have different names, and a text always has the same
    one."""
    name = before + quote(text, safe="")
    if len(name) <= _MAX_NAME:
        return name
    digest = hashlib.sha256(text.encode()).hexdigest()[:_HASH]
    name = before
    for sign in text:  # no character is cut in two
        encoded = quote(sign, safe="")
        if len(name) + len(encoded) > _MAX_NAME - 1 - _HASH:
            break
        name += encoded
    return f"{name}~{digest}"


def _write_files(task: WriteTask, table: pa.Table, days: Integers) -> dict[str, int]:
    files = {}
    for day, topic, rows in by_day_and_topic(table, days):
        name = f"{folder_of(day, topic)}/part-{task.number:05}.parquet"
        task.directory.write_table(f"messages/{name}", rows, **PARQUET)
        files[name] = rows.num_rows
    return files


def _write_damages(task: WriteTask, damages: list[Damage]) -> str:
    if not damages:
        return ""
    segment = task.store.segment_of(task.part.start)
    assert segment is not None
    rows = [
        (d.physical_offset, d.reason, task.store.read(segment.path, d.physical_offset - segment.first_offset, d.size))
        for d in damages
    ]
    name = f"{task.number}.damaged.parquet"
    offsets, reasons, data = zip(*rows, strict=True)
    table = pa.table(
        {
            "physical_offset": pa.array(offsets, pa.int64()),
            "reason": pa.array(reasons, pa.string()),
            "bytes": pa.array(data, pa.binary()),
        }
    )
    task.directory.write_table(f"{task.scratch}/{name}", table, compression="zstd")
    return name


# --- restoring


class RestoreTask(NamedTuple):
    """A range to restore from an archive. `directory`: that of the new commitlog, whose files exist; `with_index`: also
    save the items of the index files."""

    archive: Directory
    part: ArchivePart
    number: int
    directory: str
    segment_size: int
    scratch: str
    with_index: bool


def read(task: RestoreTask) -> int:
    """Restore a range; return its bytes. Raises JobError, OSError."""
    part = task.part
    items: NDArray[Any] = np.empty(0, ITEM)
    if part.records:
        tables = []
        for name, rows in part.files.items():
            table = task.archive.read_table(f"messages/{name}", _RESTORED, may_lack=_LATER)
            if table.num_rows != rows:
                raise JobError(
                    f"{task.archive.path}: messages/{name} has {table.num_rows} rows, the manifest says {rows}"
                )
            tables.append(table)
        offsets = np.concatenate([table["physical_offset"].to_numpy() for table in tables])
        sizes = np.concatenate([table["size"].to_numpy() for table in tables]).astype(np.int64)
        order = np.argsort(offsets, kind="stable")
        offsets, sizes = offsets[order], sizes[order]
        if int(sizes.sum()) != part.size or (offsets[1:] < offsets[:-1] + sizes[:-1]).any():
            raise JobError(f"{task.archive.path}: the records from {part.start} on are not those of the manifest")
        file_end = part.start - part.start % task.segment_size + task.segment_size
        if offsets[0] < part.start or offsets[-1] >= part.end or offsets[-1] + sizes[-1] > file_end:
            raise JobError(f"{task.archive.path}: there are other records than those from {part.start} to {part.end}")
        records = [record for table in tables for record in _records(table)]
        data = b"".join([records[at] for at in order.tolist()])
        if len(data) != part.size:
            raise JobError(f"{task.archive.path}: the records from {part.start} on have other sizes than they say")
        _write(task, data, offsets, sizes)
        if task.with_index:
            items = _items(data, offsets, sizes)
    if task.with_index:
        save(task.scratch, f"{task.number}.items", items)
    return part.size


def _write(task: RestoreTask, data: bytes, offsets: Integers, sizes: Integers) -> None:
    first = int(offsets[0]) - int(offsets[0]) % task.segment_size
    breaks = np.flatnonzero(offsets[1:] != offsets[:-1] + sizes[:-1]) + 1
    starts = np.cumsum(sizes) - sizes
    view = memoryview(data)
    fd = os.open(os.path.join(task.directory, f"{first:020}"), os.O_WRONLY | os.O_CLOEXEC)
    try:
        for begin, end in zip([0, *breaks.tolist()], [*breaks.tolist(), len(offsets)], strict=True):
            at, stop = int(starts[begin]), int(starts[end - 1] + sizes[end - 1])
            position = int(offsets[begin]) - first
            while at < stop:
                count = os.pwrite(fd, view[at:stop], position)
                at += count
                position += count
    finally:
        os.close(fd)


def _items(data: bytes, offsets: Integers, sizes: Integers) -> NDArray[Any]:
    buffer = np.zeros(len(data) + PADDING, np.uint8)
    buffer[: len(data)] = np.frombuffer(data, np.uint8)
    records = Records(buffer, 0, np.cumsum(sizes) - sizes)
    return items_of(records, offsets, TRANSACTION_ROLLBACK)


def _records(table: pa.Table) -> list[bytes]:
    """Return the bytes of a table's records."""
    count = table.num_rows
    columns = {
        field.name: table[field.name].to_numpy()
        for field in table.schema
        if pa.types.is_integer(field.type) and field.name not in ("born_ms", "store_ms")
    }
    born_ms, store_ms = (_ms_of(table, name) for name in ("born", "store"))
    body, body_at = _slices(table["body"])
    topic, topic_at = _slices(table["topic"].cast(pa.binary()))
    text, text_at = _slices(table["properties_text"])
    born_host, born_at = _slices(table["born_host"])
    store_host, store_at = _slices(table["store_host"])
    flags = columns["sys_flag"]
    records: list[bytes] = []
    is_usual = (flags & (_BORN_IPV6 | _STORE_IPV6) == 0) & (columns["magic"] == MAGIC_V1)
    heads = np.zeros(count, HEAD)
    for name in ("size", "magic", "body_crc", "queue_id", "flag", "queue_offset", "physical_offset", "sys_flag"):
        heads[name] = columns[name]
    heads["born_ms"], heads["store_ms"] = born_ms, store_ms
    heads["reconsume_times"], heads["prepared_offset"] = columns["reconsume_times"], columns["prepared_offset"]
    heads["body_size"] = body_at[1:] - body_at[:-1]
    if is_usual.all():
        heads["born_host"] = np.frombuffer(born_host, "V8", count)
        heads["store_host"] = np.frombuffer(store_host, "V8", count)
    packed = memoryview(heads.tobytes())
    bodies, topics, texts = body_at.tolist(), topic_at.tolist(), text_at.tolist()
    all_usual = bool(is_usual.all())
    for i in range(count):
        length_size = 1
        if all_usual:
            head: Any = packed[i * HEAD.itemsize : (i + 1) * HEAD.itemsize]
        else:
            length_size = 1 if columns["magic"][i] == MAGIC_V1 else 2
            head = _head(
                packed[i * HEAD.itemsize : (i + 1) * HEAD.itemsize],
                born_host[born_at[i] : born_at[i + 1]],
                store_host[store_at[i] : store_at[i + 1]],
            )
        records.append(
            b"".join(
                (
                    head,
                    body[bodies[i] : bodies[i + 1]],
                    (topics[i + 1] - topics[i]).to_bytes(length_size, "big"),
                    topic[topics[i] : topics[i + 1]],
                    (texts[i + 1] - texts[i]).to_bytes(2, "big"),
                    text[texts[i] : texts[i + 1]],
                )
            )
        )
    return records


def _ms_of(table: pa.Table, name: str) -> Integers:
    """Return the times "born" or "store" of records, in ms since the epoch. Older archives only have timestamps."""
    ms = table[f"{name}_time"].cast(pa.int64())
    if f"{name}_ms" in table.column_names:
        ms = pc.coalesce(ms, table[f"{name}_ms"])
    found: Integers = ms.to_numpy()
    return found


def _head(packed: memoryview, born_host: memoryview, store_host: memoryview) -> bytes:
    """Return a head with hosts of any length, from one with IPv4 hosts."""
    return b"".join((packed[:48], born_host, packed[56:64], store_host, packed[72:]))


def _slices(column: pa.ChunkedArray) -> tuple[memoryview, Integers]:
    """Return the bytes of a binary column, and where each value begins in them, and the last ends."""
    array = column.combine_chunks()
    if isinstance(array, pa.ChunkedArray):
        array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], column.type)
    offsets = np.frombuffer(array.buffers()[1], np.int32)[array.offset : array.offset + len(array) + 1]
    data = memoryview(array.buffers()[2]) if array.buffers()[2] is not None else memoryview(b"")
    return data[int(offsets[0]) :], (offsets - offsets[0]).astype(np.int64)
