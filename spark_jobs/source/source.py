"""The files of a store as tables in Spark: `spark.read.format("rocketmq").load("/path/to/store")`.

    option           default      meaning
    path             (load's)     the store, or its URI (hdfs://, s3://); with wildcards (*, [...]) all that match,
                                  and load() takes a list as well. The column `store` tells them apart
    table            messages     messages, schedules, pending, consume_queue, timers, offsets, damaged
    columns          all          names with commas: columns not named cost nothing. `.schema(...)` does the same; *
                                  stands for all, including those meant for jobs
    topics           all          names with commas. In `schedules` and `pending` they are real topics
    startingTimestamp, endingTimestamp    ms since the epoch: records stored then or later, and before then
    startingOffsets, endingOffsets        queue offsets, as for Spark's source for Kafka: earliest, latest, or
                                  {"orders": {"0": 23, "1": -2}}, a number for each queue of a topic; -2 is the
                                  earliest, -1 the latest. See `queue_offsets`
    startingOffsetsByTimestamp, endingOffsetsByTimestamp    the same with ms since the epoch
    startingOffset, endingOffset          physical offsets: records that lie there or behind, and before there
    checkCrc         false        leave out records with a wrong checksum or unwritten properties (always so in
                                  `damaged`)
    rangeBytes       134217728    bytes of the commitlog that a task reads
    delayLevels      by the store the broker's messageDelayLevel
    timeSlackMs      600000       by how much the broker's clock may have been set back: a range is left out by store
                                  time only if it is that far away from the timestamps that are asked for
    unflushed        false        also read what a running broker on this machine has not flushed yet
    maxBytesPerTrigger   all      streams: bytes of the commitlog in a micro-batch (maxBytesPerBatch is the same)
    maxOffsetsPerTrigger all      streams: most records in a micro-batch. Spark before 4.2 ends a query with
                                  Trigger.AvailableNow after one micro-batch, and so with either limit before the end
    failOnDataLoss   true         streams stop if files expired before they were read, and if the store is not the
                                  one of the checkpoint; offsets that a queue does not have are refused. With false
                                  they continue with what there is

The starting* options hold for a new stream; a restart from its checkpoint ignores them.

Ranges of the commitlog that cannot match topics, timestamps and offsets are not read. Conditions of a query (`where`)
do not reduce what is read: Spark applies them to the rows that the options leave. `spark_jobs.source.filters` explains
why.
Register with `spark_jobs.source.source.register(spark)`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition

from duemq.protocol.records.record import END_MARKER, END_MARKER_SIZE, MAGIC_END
from duemq.scheduler.timers.files.unit import UNIT_SIZE
from duemq.spark_jobs.columns.records import Damage, joined_damages
from duemq.spark_jobs.compact.state import compacted_to
from duemq.spark_jobs.errors import JobError
from duemq.spark_jobs.source import tables
from duemq.spark_jobs.source.filters import ALL, Filters, Span, only
from duemq.spark_jobs.source.offset_rows import offset_rows
from duemq.spark_jobs.source.queue_offsets import EARLIEST, LATEST, Asked, parse
from duemq.spark_jobs.spark_errors import with_short_errors, with_short_errors_each
from duemq.spark_jobs.store.known_again import tail_of, why_not
from duemq.spark_jobs.store.local_files import each_once, expand, real_path
from duemq.spark_jobs.store.progress import Progress, WaitingRecords, read_progress, timer_columns, timer_units, waiting
from duemq.spark_jobs.store.ranges import RANGE_SIZE, at_offsets, first_store_ms, plan
from duemq.spark_jobs.store.store_files import StoreFiles
from duemq.spark_jobs.store.walks import Range, damages_of, walks
from duemq.spark_jobs.worker import prepare_worker
from duemq.storage.queues.consume_queue import MARK_SIZES, PADDING_SIZE

try:
    from pyspark.sql.streaming.datasource import (
        ReadAllAvailable,
        ReadMaxBytes,
        ReadMaxRows,
        SupportsTriggerAvailableNow,
    )
except ImportError:
    # Spark before 4.2 runs such a query as one micro-batch, and asks the source for it as for any other.
    ENDS_AFTER_ONE = True

    class SupportsTriggerAvailableNow:  # type: ignore[no-redef]
        """A stand-in without methods: Spark before 4.2 has no such class."""

else:
    ENDS_AFTER_ONE = False
    """Whether Trigger.AvailableNow is one micro-batch."""


if TYPE_CHECKING:
    from numpy.typing import NDArray
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.datasource import ReadLimit
    from pyspark.sql.types import StructType

    from duemq.spark_jobs.columns.records import Records
    from duemq.spark_jobs.store.store_files import QueueFile

_MAX_ZEROS: Final = 1 << 20
"""Number of bytes at the end of the log that are searched for records that no queue lists. With more than that, the
range is read."""
_MOST_MARKED: Final = 4096
"""Reading the sizes of this many records costs about as much as reading a range."""
_WAITING_PART: Final = 200_000
_ROWS: Final = 1 << 16
_QUEUE_BYTES: Final = 64 << 20
_OPTIONS: Final = (
    "path",
    "table",
    "columns",
    "topics",
    "startingTimestamp",
    "endingTimestamp",
    "startingOffsets",
    "endingOffsets",
    "startingOffsetsByTimestamp",
    "endingOffsetsByTimestamp",
    "startingOffset",
    "endingOffset",
    "checkCrc",
    "rangeBytes",
    "delayLevels",
    "timeSlackMs",
    "unflushed",
    "maxBytesPerTrigger",
    "maxOffsetsPerTrigger",
    "failOnDataLoss",
)
_KNOWN: Final = {name.lower() for name in (*_OPTIONS, "paths", "maxBytesPerBatch")}
"""`paths` is Spark's option for a list of paths."""
_OF_QUEUES: Final = ("Offsets", "OffsetsByTimestamp")
"""With starting or ending in front: options that give offsets by queue, and exclude the other starting or ending
options."""
_COUNTED_BYTES: Final = 1 << 30
"""Most bytes of the commitlog that are read to count the records of a micro-batch."""
_RECORDS: Final = ("messages", "schedules", "pending")
TABLES_OF_OPTION: Final = {
    "topics": (*_RECORDS, "consume_queue"),
    "startingTimestamp": _RECORDS,
    "endingTimestamp": _RECORDS,
    "startingOffset": _RECORDS,
    "endingOffset": _RECORDS,
    "startingOffsets": ("messages",),
    "endingOffsets": ("messages",),
    "startingOffsetsByTimestamp": ("messages",),
    "endingOffsetsByTimestamp": ("messages",),
}
"""The tables that an option applies to. Other tables refuse it, since its user expects an effect."""


def register(session: SparkSession) -> None:
    """Make the data source known to a session."""
    session.dataSource.register(RocketmqSource)


class Options:
    """The checked options of the data source. The constructor raises JobError."""

    def __init__(self, options: Mapping[str, str]) -> None:
        for name in options:
            if name.lower() not in _KNOWN:
                raise JobError(f"there is no option {name}; there are {', '.join(_OPTIONS)}")
        self.paths = json.loads(options["paths"]) if "paths" in options else [options.get("path") or ""]
        if not all(self.paths):
            raise JobError("no store is given: call load() with its path")
        self.table = options.get("table", "messages")
        self.columns = options.get("columns")
        self.check_crc = _flag(options, "checkCrc", default=False)
        self.range_bytes = _number(options, "rangeBytes", RANGE_SIZE)
        self.delay_levels = options.get("delayLevels")
        self.time_slack_ms = _number(options, "timeSlackMs", 600_000)
        self.unflushed = _flag(options, "unflushed", default=False)
        name = "maxBytesPerTrigger" if "maxBytesPerTrigger" in options else "maxBytesPerBatch"
        self.max_bytes = _number(options, name, 0)
        self.max_records = _number(options, "maxOffsetsPerTrigger", 0)
        self.fail_on_data_loss = _flag(options, "failOnDataLoss", default=True)
        self.starting_offset = options.get("startingOffset", "earliest")
        for edge, others in (("starting", ("Timestamp", "Offset")), ("ending", ("Timestamp", "Offset"))):
            given = [edge + name for name in (*_OF_QUEUES, *others) if edge + name in options]
            if len(given) > 1 and given[0] in (edge + name for name in _OF_QUEUES):
                raise JobError(f"the options {given[0]} and {given[1]} both say where to begin or end: give one")
        starts, ends = options.get("startingOffsets"), options.get("endingOffsets")
        if starts is not None and starts.strip().lower() in ("earliest", "latest"):
            self.starting_offset, starts = starts.strip().lower(), None
        if ends is not None and ends.strip().lower() == "latest":
            ends = None
        times = [options.get(f"{edge}OffsetsByTimestamp") for edge in ("starting", "ending")]
        self.asked = Asked(
            parse("startingOffsets", starts, lowest=EARLIEST) if starts is not None else None,
            parse("endingOffsets", ends, lowest=LATEST) if ends is not None else None,
            parse("startingOffsetsByTimestamp", times[0], lowest=0) if times[0] is not None else None,
            parse("endingOffsetsByTimestamp", times[1], lowest=0) if times[1] is not None else None,
        )
        self._topics = _names(options, "topics")
        self.filters = Filters(
            topics=self._topics or frozenset(self.asked.topics()) or None,
            store_ms=(
                _number(options, "startingTimestamp", ALL[0]),
                _number(options, "endingTimestamp", ALL[1]),
            ),
            physical_offset=(
                _number(options, "startingOffset", ALL[0], besides=("earliest", "latest")),
                _number(options, "endingOffset", ALL[1], besides=("latest",)),
            ),
        )
        for name, (start, end) in (("Timestamp", self.filters.store_ms), ("Offset", self.filters.physical_offset)):
            if start > end:
                raise JobError(f"the option starting{name}={start} is behind ending{name}={end}")
        for name, tables_with in TABLES_OF_OPTION.items():
            if name in options and self.table in tables.COLUMNS and self.table not in tables_with:
                raise JobError(f"the table {self.table} has no option {name}; {', '.join(tables_with)} have it")

    def filters_of(self, store: StoreFiles, *, is_one: bool) -> Filters:
        """Return the filters for a store. `is_one`: whether no other store is read. Raises JobError."""
        spans = self.asked.spans(store, topics=self._topics, is_strict=self.fail_on_data_loss, is_one=is_one)
        topics = self.filters.topics
        if self._topics is None and topics is not None:
            topics = frozenset(spans)
        return replace(self.filters, topics=topics, queues=spans)

    def stores(self) -> list[str]:
        """Return the paths and URIs of the stores to read, each once (see `local_files.each_once`). Raises JobError
        where a pattern matches none."""
        return each_once(store for path in self.paths for store in expand(path))


def _number(options: Mapping[str, str], name: str, default: int, *, besides: tuple[str, ...] = ()) -> int:
    text = options.get(name)
    if text is None or text in besides:
        return default
    if not (text.isascii() and text.isdecimal()) or int(text) >= 1 << 63:
        hint = f"; {name}s takes queue offsets" if name in ("startingOffset", "endingOffset") and "{" in text else ""
        why = f"neither {' nor '.join(besides)} nor a number" if besides else "not a number"
        raise JobError(f"the option {name}={text} is {why}{hint}")
    return int(text)


def _names(options: Mapping[str, str], name: str) -> frozenset[str] | None:
    text = options.get(name)
    if text is None:
        return None
    found = frozenset(part.strip() for part in text.split(",")) - {""}
    if not found:
        raise JobError(f"the option {name} is empty: leave it out to read all")
    return found


def _flag(options: Mapping[str, str], name: str, *, default: bool) -> bool:
    text = options.get(name, str(default)).lower()
    if text not in ("true", "false"):
        raise JobError(f"the option {name}={text} is neither true nor false")
    return text == "true"


class RocketmqSource(DataSource):
    """The data source `rocketmq`; the module describes its options."""

    @classmethod
    def name(cls) -> str:
        """Return the name for format()."""
        return "rocketmq"

    @with_short_errors
    def schema(self) -> str:
        """Return the schema that the options ask for."""
        prepare_worker()
        options = Options(self.options)
        return tables.ddl(options.table, options.columns)

    @with_short_errors
    def reader(self, schema: StructType) -> DataSourceReader:
        """Return a reader of a table. Raises JobError for invalid options, such as a start at the latest record, and
        for a schema that is not the table's."""
        prepare_worker()
        options = Options(self.options)
        if options.starting_offset == "latest":
            name = "startingOffsets" if "startingOffsets" in self.options else "startingOffset"
            raise JobError(f"the option {name}=latest is for streams: there is nothing behind it yet")
        if options.asked.starts is not None and LATEST in options.asked.starts.values():
            raise JobError("the option startingOffsets has -1, the latest, which is for streams: nothing is behind it")
        _check_schema(options.table, schema)
        return StoreReader(options, schema)

    @with_short_errors
    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802, Spark's name
        """Return a reader of a stream. Raises JobError for a table that cannot be a stream, for invalid options, such
        as an end, and for a schema that is not the table's."""
        prepare_worker()
        options = Options(self.options)
        if options.table not in ("messages", "schedules"):
            raise JobError(f"the table {options.table} cannot be read as a stream; messages and schedules can")
        for name in _OPTIONS:
            if name.startswith("ending") and name in self.options:
                raise JobError(f"a stream has no option {name}: it continues until it is stopped")
        _check_schema(options.table, schema)
        return StoreStreamReader(options, schema)


def _check_schema(table: str, schema: StructType) -> None:
    """Check that the columns of a schema given by the user exist, with these types. Raises JobError."""
    tables.ddl(table, ",".join(schema.fieldNames()))
    for field in schema.fields:
        wanted, given = tables.COLUMNS[table][field.name], field.dataType.simpleString()
        if given != wanted:
            raise JobError(f"the column {field.name} of {table} is {wanted}, not {given}")


def _arrow(schema: StructType) -> pa.Schema:
    return tables.arrow_schema({field.name: field.dataType.simpleString() for field in schema})


class RangePart(InputPartition):
    """A range of the commitlog."""

    def __init__(self, part: Range) -> None:
        super().__init__(None)
        self.part = part


class StorePart(InputPartition):
    """A part of one of several stores."""

    def __init__(self, number: int, part: InputPartition) -> None:
        super().__init__(None)
        self.number = number
        self.part = part


class StreamPart(RangePart):
    """A range with the files that existed when it was planned, and its filters: tasks get the reader as it was at the
    start of the query, which knows nothing newer."""

    def __init__(self, part: Range, store: StoreFiles, filters: Filters) -> None:
        super().__init__(part)
        self.store = store
        self.filters = filters


class WaitingPart(InputPartition):
    """Waiting messages."""

    def __init__(self, found: WaitingRecords) -> None:
        super().__init__(None)
        self.found = found


class FilePart(InputPartition):
    """A file by its name in the store, and what to read: a list of files for consume queues, a gap for `damaged`."""

    def __init__(self, name: str, of: Any) -> None:
        super().__init__(None)
        self.file = name
        self.of = of


class NothingPart(InputPartition):
    """Nothing to read: Spark asks for at least one partition."""

    def __init__(self) -> None:
        super().__init__(None)


def _packed(files: list[QueueFile]) -> list[list[QueueFile]]:
    """Group files into parts of about _QUEUE_BYTES: a store may have ten thousand of them, most with little in it."""
    parts: list[list[QueueFile]] = []
    size = _QUEUE_BYTES
    for file in files:
        if size >= _QUEUE_BYTES:
            parts.append([])
            size = 0
        parts[-1].append(file)
        size += file.size
    return parts


class _Reading:
    """The part common to batch and stream: reads rows of one store. Sent to the tasks."""

    options: Options
    progress: Progress | None
    store: StoreFiles

    def __init__(self, options: Options, schema: StructType) -> None:
        self.options = options
        self.filters = options.filters
        self.whole = _arrow(schema)
        """The columns that are asked for."""
        fields = [field for field in self.whole if field.name != tables.STORE]
        known = tables.COLUMNS[options.table]
        # A batch needs a column, or its number of rows is unknown.
        self.columns = pa.schema(fields) if fields else tables.arrow_schema(dict(list(known.items())[:1]))
        """The columns that are computed from the store's files."""

    def _with_store(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        if tables.STORE not in self.whole.names:
            return batch
        store = pa.repeat(pa.scalar(self.store.path, pa.string()), batch.num_rows)
        arrays = [store if field.name == tables.STORE else batch.column(field.name) for field in self.whole]
        return pa.RecordBatch.from_arrays(arrays, schema=self.whole)

    def _read_range(self, part: Range) -> Iterator[pa.RecordBatch]:
        damages: list[Damage] = []
        for found in walks(self.store, part, check_crc=self.options.check_crc):
            damages += found.damages
            yield from self._batches(found.records)
        self._tell_of_missing(joined_damages(damages))

    def _tell_of_missing(self, damages: Sequence[tuple[int, int, str]]) -> None:
        """Write one line to standard error for stretches of the commitlog (offset, bytes, reason) without rows."""
        if damages:
            offset, size, why = damages[0]
            more = f"; and {len(damages) - 1} more" if len(damages) > 1 else ""
            sys.stderr.write(
                f"duemq: {self.store.path}: {size:,} bytes of the commitlog from physical offset {offset} on could not "
                f"be read, and have no rows ({why}){more}: see the table damaged\n"
            )
            sys.stderr.flush()

    def _batches(self, records: Records) -> Iterator[pa.RecordBatch]:
        filters = self.filters
        records = self._kept(records, filters)
        if not len(records):
            return
        batch = tables.RecordColumns(records, self.progress)
        if self.options.table != "messages":
            batch = only(batch, batch.roles.is_scheduled)
            if filters.topics is not None and len(batch.records):
                wanted = pc.is_in(batch.column("real_topic"), value_set=pa.array(sorted(filters.topics)))
                batch = only(batch, wanted.to_numpy(zero_copy_only=False))
        if len(batch.records):
            yield self._with_store(tables.record_batch(batch, self.columns))

    def _kept(self, records: Records, filters: Filters) -> Records:
        """Return the records that pass the filters, as far as the records themselves tell."""
        records = filters.keep(records)
        if filters.topics is not None and self.options.table == "messages" and len(records):
            codes, names = records.topics()
            records = only(records, np.array([name in filters.topics for name in names], np.bool_)[codes])
        return records


class StoreReader(DataSourceReader):
    """Reads a table of one or several stores once."""

    def __init__(self, options: Options, schema: StructType) -> None:
        paths = options.stores()
        options.asked.check_stores(paths)
        self._stores = [_TableReading(options, schema, path, is_one=len(paths) == 1) for path in paths]

    @with_short_errors
    def partitions(self) -> list[InputPartition]:
        """Return the partitions for tasks."""
        parts: list[InputPartition] = [
            StorePart(number, part) for number, store in enumerate(self._stores) for part in store.parts()
        ]
        return parts or [NothingPart()]

    @with_short_errors_each
    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield a partition's rows."""
        prepare_worker()
        if isinstance(partition, StorePart):
            yield from self._stores[partition.number].read(partition.part)


def _ranges(store: StoreFiles, options: Options, filters: Filters) -> list[Range]:
    """Return the ranges of a store that may have wanted records."""
    low, high = filters.physical_offset
    if filters.queues and filters.topics is not None and filters.topics == set(filters.queues):
        low = max(low, min(span.start for queues in filters.queues.values() for span in queues.values()))
    ranges = [part for part in plan(store, options.range_bytes) if part.end > low and part.start < high]
    low, high = filters.store_ms
    if ranges and filters.store_ms != ALL:
        slack = options.time_slack_ms
        firsts = [first_store_ms(store, part) for part in ranges]
        nexts = [*firsts[1:], None]
        ranges = [
            part
            for part, first, after in zip(ranges, firsts, nexts, strict=True)
            if (first is None or first < high + slack) and (after is None or after >= low - slack)
        ]
    if filters.topics is not None and ranges and options.table == "messages":
        ranges = _with_topics(store, ranges, filters, filters.topics)
    return ranges


def _with_topics(store: StoreFiles, ranges: list[Range], filters: Filters, topics: frozenset[str]) -> list[Range]:
    """Return the ranges that may have records of some topics. A range is left out if no queue of the topics has a unit
    in it and the units of all queues together account for each of its bytes, so that missing units hide nothing."""
    files = store.queue_files()
    mine = [file for file in files if file.topic in topics]
    if {file.topic for file in mine} != topics:
        return ranges  # The topic was deleted with its queues, or never existed: only the records show which.
    starts = np.array([part.start for part in ranges], np.int64)
    ends = np.array([part.end for part in ranges], np.int64)
    wanted = ends > store.queues_whole_to()
    for file in mine:
        units = store.units(file)
        span = filters.queues.get(file.topic, {}).get(file.queue_id, Span())
        first = min(max(span.start_queue - file.first_unit, 0), len(units))
        end = min(max(span.end_queue - file.first_unit, 0), len(units))
        offsets = np.sort(units["physical_offset"][first:end].astype(np.int64))
        wanted |= np.searchsorted(offsets, ends) > np.searchsorted(offsets, starts)
    if not wanted.all():
        sizes, marked = _listed(store, files, starts, ends)
        for number in np.flatnonzero(~wanted).tolist():
            others = _sizes_of_marked(store, marked[number])
            wanted[number] = others is None or not _is_listed(store, ranges[number], int(sizes[number]) + others)
    return [part for part, is_wanted in zip(ranges, wanted, strict=True) if is_wanted]


def _listed(
    store: StoreFiles, files: list[QueueFile], starts: NDArray[np.int64], ends: NDArray[np.int64]
) -> tuple[NDArray[np.int64], list[list[int]]]:
    """Return for each range, given by `starts` and `ends`, the total size of the records that consume queues list
    there, and the physical offsets of records whose units have a mark instead of the size."""
    sizes = np.zeros(len(starts), np.int64)
    marked: list[list[int]] = [[] for _ in starts]
    for file in files:
        units = store.units(file)
        offsets = units["physical_offset"].astype(np.int64)
        at = np.searchsorted(starts, offsets, "right") - 1
        within = (at >= 0) & (offsets < ends[at]) & (units["size"] != PADDING_SIZE)
        is_marked = within & np.isin(units["size"], MARK_SIZES)
        within &= ~is_marked
        sizes += np.bincount(at[within], units["size"][within], len(starts)).astype(np.int64)
        for number, offset in zip(at[is_marked].tolist(), offsets[is_marked].tolist(), strict=True):
            marked[number].append(offset)
    return sizes, marked


def _sizes_of_marked(store: StoreFiles, offsets: list[int]) -> int | None:
    """Return the total size of records whose units, of withdrawn or delivered messages, have a mark instead of the
    size; None if these are too many to read each size. The units tell that records begin there."""
    if len(offsets) > (_MOST_MARKED if store.is_local else 0):
        return None
    total = 0
    for offset in offsets:
        segment = store.segment_of(offset)
        if segment is None:
            return None
        total += int.from_bytes(store.read(segment.path, offset - segment.first_offset, 4), "big")
    return total


def _is_listed(store: StoreFiles, part: Range, size: int) -> bool:
    """Return whether records of a total size fill a range: what follows them is the end of the range, an end marker of
    the file, or bytes that are not written yet."""
    at, left = part.start + size, part.end - part.start - size
    if left <= 0:
        return left == 0
    segment = store.segment_of(part.start)
    if segment is None:
        return False
    marker = store.read(segment.path, at - segment.first_offset, END_MARKER_SIZE)
    if marker == END_MARKER.pack(left, MAGIC_END):
        return part.end == segment.end
    if part.end != store.readable_end or left > _MAX_ZEROS:
        return False
    return not any(store.read(segment.path, at - segment.first_offset, left))


class _TableReading(_Reading):
    """A table of one store. Raises JobError if the store cannot be read, or if the option delayLevels is wrong."""

    def __init__(self, options: Options, schema: StructType, path: str, *, is_one: bool) -> None:
        super().__init__(options, schema)
        self.store = StoreFiles.open(path, unflushed=options.unflushed)
        self.filters = options.filters_of(self.store, is_one=is_one)
        self.progress = None
        if options.table in ("schedules", "pending"):
            try:
                self.progress = read_progress(self.store, options.delay_levels)
            except ValueError as error:
                raise JobError(f"the option delayLevels: {error}") from None
            if self.store.is_running:
                # The end of the commitlog is looked up after the progress, so that it has every delivery that the
                # progress counts.
                self.store = StoreFiles.open(path, unflushed=options.unflushed)

    def parts(self) -> list[InputPartition]:
        """Return the partitions for tasks."""
        table, store = self.options.table, self.store
        if table in ("messages", "schedules"):
            self._tell_of_missing(store.gaps_between())
            found: list[InputPartition] = [RangePart(part) for part in _ranges(self.store, self.options, self.filters)]
        elif table == "pending":
            assert self.progress is not None
            waits = waiting(store)
            step = _WAITING_PART
            found = [
                WaitingPart(WaitingRecords(waits.offsets[at : at + step], waits.sizes[at : at + step]))
                for at in range(0, len(waits.offsets), step)
            ]
        elif table == "consume_queue":
            wanted = self.filters.topics
            files = [file for file in store.queue_files() if wanted is None or file.topic in wanted]
            found = [FilePart(part[0].path, part) for part in _packed(files)]
        elif table == "damaged":
            found = [RangePart(part) for part in plan(store, self.options.range_bytes)]
            found += [FilePart("", gap) for gap in store.gaps()]
        else:
            found = [FilePart("", None)]
        return found

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield a partition's rows."""
        table = self.options.table
        if table == "damaged":
            yield from self._read_damaged(partition)
        elif isinstance(partition, RangePart):
            yield from self._read_range(partition.part)
        elif isinstance(partition, WaitingPart):
            for records in at_offsets(self.store, *partition.found):
                yield from self._batches(records)
        elif isinstance(partition, FilePart) and table == "consume_queue":
            for file in partition.of:
                yield from self._read_queue(file)
        elif table == "timers":
            yield from self._read_timers()
        else:
            yield from self._read_offsets()

    def _emit(self, columns: dict[str, Any]) -> pa.RecordBatch:
        arrays = [pa.array(columns[field.name], field.type) for field in self.columns]
        return self._with_store(pa.RecordBatch.from_arrays(arrays, schema=self.columns))

    def _read_damaged(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if isinstance(partition, FilePart):
            rows = [(*partition.of, "")]
        else:
            assert isinstance(partition, RangePart)
            segment = self.store.segment_of(partition.part.start)
            path = segment.path if segment is not None else ""
            rows = [(*damage, path) for damage in damages_of(self.store, partition.part, check_crc=True)]
        if rows:
            names = ("physical_offset", "size", "reason", "path")
            yield self._emit(dict(zip(names, zip(*rows, strict=True), strict=True)))

    def _read_queue(self, file: Any) -> Iterator[pa.RecordBatch]:
        units = self.store.units(file)
        number = np.arange(len(units), dtype=np.int64) + file.first_unit
        real = units["size"] != PADDING_SIZE
        units, number = units[real], number[real]
        for at in range(0, len(units), _ROWS):
            part = units[at : at + _ROWS]
            yield self._emit(
                {
                    "topic": [file.topic] * len(part),
                    "queue_id": np.full(len(part), file.queue_id, np.int32),
                    "queue_offset": number[at : at + _ROWS],
                    "physical_offset": part["physical_offset"].astype(np.int64),
                    "size": part["size"].astype(np.int32),
                    "tags_code": part["tags_code"].astype(np.int64),
                }
            )

    def _read_timers(self) -> Iterator[pa.RecordBatch]:
        for position, units in timer_units(self.store):
            for at in range(0, len(units), _ROWS):
                yield self._emit(timer_columns(units[at : at + _ROWS], position + at * UNIT_SIZE))

    def _read_offsets(self) -> Iterator[pa.RecordBatch]:
        rows = offset_rows(self.store)
        if rows:
            yield self._emit({name: [row[name] for row in rows] for name in rows[0]})


class _StreamReading(_Reading):
    """Reads a store, and then the records appended to it, up to where it is flushed.

    An offset is JSON: `physical_offset`, at which a record starts, or will; and up to where the store ended when the
    stream was new, `from`: the options for records before that end (`until`, a physical offset): `store_ms`, the
    earliest store time, and `queues`, a `Span` by topic and queue. So a restart needs no options. `tail`: identifies
    the store (`known_again`); missing in offsets of earlier versions, and at the log's first record.
    """

    def __init__(self, options: Options, schema: StructType, path: str, *, of: int) -> None:
        """`of`: number of stores that are read."""
        super().__init__(options, schema)
        self._path = path
        self._is_one = of == 1
        self._max_bytes, self._max_records = (-(-limit // of) for limit in (options.max_bytes, options.max_records))
        self._until: int | None = None
        """The physical offset at which a query that reads only the present records ends; None for one that
        continues."""
        self._planned: dict[str, Any] | None = None
        """The end of the last micro-batch: the start of the next, for a Spark version that does not give it. None
        before the first of a new query; a query that continues from a checkpoint first asks for the partitions of an
        empty batch."""
        self._open(0)

    def end_now(self) -> None:
        """End the query at the present end of the store: later records are for the next query."""
        self._open(0)
        self._until = self.store.records_end()

    def _open(self, since: int) -> None:
        self.store = StoreFiles.open(self._path, since=since)
        self.progress = None
        if self.options.table == "schedules":
            self.progress = read_progress(self.store, self.options.delay_levels)

    def initial(self) -> dict[str, Any]:
        """Return where a new query starts."""
        wanted, end = self.options.starting_offset, self.store.records_end()
        filters = replace(self.options.filters_of(self.store, is_one=self._is_one), physical_offset=ALL)
        if wanted == "latest":
            self._planned = self._at(end)
        elif wanted != "earliest":
            self._planned = self._at(int(wanted))
        elif not filters.queues and filters.store_ms == ALL:
            self._planned = self.earliest()
        else:
            ranges = _ranges(self.store, self.options, replace(filters, topics=None))
            if filters.queues:
                start = min(span.start for queues in filters.queues.values() for span in queues.values())
                ranges = [Range(max(part.start, start), part.end) for part in ranges if part.end > start]
            self._planned = self._at(ranges[0].start if ranges else end)
        if self._planned["physical_offset"] < end and (filters.queues or filters.store_ms != ALL):
            self._planned["from"] = {"until": end, "store_ms": filters.store_ms[0], "queues": filters.queues}
        return self._planned

    def earliest(self) -> dict[str, Any]:
        """Return the offset of the first record."""
        return self._at(self.store.segments[0].first_offset)

    def latest(self, start: dict[str, Any] | None, *, is_limited: bool = True) -> dict[str, Any]:
        """Return the end of the next micro-batch. Spark before 4.2 gives no start. `is_limited`: whether the options'
        limits apply."""
        begin = start or self._planned or self.initial()
        self._open(begin["physical_offset"])
        begin = self._going_on(begin)
        at = begin["physical_offset"]
        end = self.store.records_end(at)
        if self._until is not None:
            end = min(end, self._until)
        if is_limited and self._max_bytes and end - at > self._max_bytes:
            parts = plan(self.store, max(self._max_bytes, 4 << 20), start=at, end=end)
            end = next((part.end for part in parts if part.end < end), end)
        if is_limited and self._max_records:
            end = self._counted(at, end, self._filters_at(begin))
        if end <= at:
            return begin  # The same offset: any other, even with only another tail, would be a micro-batch.
        found = self._at(end)
        if "from" in begin and end < begin["from"]["until"]:
            found["from"] = begin["from"]
        return found

    def _at(self, physical: int) -> dict[str, Any]:
        """Return the stream's offset for a physical offset."""
        tail = tail_of(self.store, physical) if physical <= self.store.readable_end else None
        return {"physical_offset": physical} | ({"tail": tail} if tail is not None else {})

    def _why_not(self, offset: dict[str, Any]) -> str | None:
        """Return why an offset is not one of the store as it is now; None if it is, or if this cannot be decided."""
        return why_not(self.store, offset["physical_offset"], offset["tail"]) if "tail" in offset else None

    def _going_on(self, start: dict[str, Any]) -> dict[str, Any]:
        """Return where to continue from an offset: at the offset, or at the beginning of the store if it replaced the
        one that the offset is from. Raises JobError in the latter case unless failOnDataLoss is false."""
        why = self._why_not(start)
        if why is None:
            return start
        if self.options.fail_on_data_loss:
            raise JobError(
                f"{self.store.path}: {why}, and the checkpoint's offsets mean nothing in it: give the query a new "
                "checkpoint, or set failOnDataLoss=false, which reads all of this store"
            )
        self._open(0)  # the end in an offset of another store means nothing here
        return self.earliest()

    def _counted(self, at: int, end: int, filters: Filters) -> int:
        """Return the physical offset behind the last record of a micro-batch of at most `_max_records` records."""
        left, looked_to = self._max_records, at + _COUNTED_BYTES
        for part in plan(self.store, start=at, end=end):
            for found in self.store.chunks(part.start, part.end):
                records = self._kept(found, filters)
                if len(records) > left:
                    return int(records.physical_offset[left])
                left -= len(records)
            if part.end >= looked_to:
                return part.end
        return end

    def _filters_at(self, start: dict[str, Any]) -> Filters:
        """Return the filters from an offset of the stream on."""
        filters, begun = Filters(topics=self.options.filters.topics), start.get("from")
        if begun is None:
            return filters
        queues = {
            topic: {int(queue): Span(*span) for queue, span in spans.items()}
            for topic, spans in begun["queues"].items()
        }
        return replace(filters, store_ms=(begun["store_ms"], ALL[1]), queues=queues, until=begun["until"])

    def parts(self, start: dict[str, Any], end: dict[str, Any]) -> list[StreamPart]:
        """Return the partitions of a micro-batch. Raises JobError if some of its records can no longer be read, unless
        failOnDataLoss is false."""
        last = end["physical_offset"]
        if self._planned is None or last > self._planned["physical_offset"] or self._why_not(self._planned) is not None:
            self._planned = end
        start = self._going_on(start)
        # A micro-batch planned for a store that was replaced has no rows, if failOnDataLoss is false.
        if self._going_on(end) is not end or (first := start["physical_offset"]) >= last:
            return []
        begin = self.store.segments[0].first_offset
        if first < begin and self.options.fail_on_data_loss:
            # Both are possible: a compacted store begins behind the first file of the old one.
            also = ", or the store was compacted since" if compacted_to(self.store) else ""
            raise JobError(
                f"{self.store.path}: records from physical offset {first} to {begin} have expired before they were "
                f"read{also}; set failOnDataLoss=false to continue behind them"
            )
        for offset, size, why in self.store.gaps_between() if self.options.fail_on_data_loss else ():
            if offset < last and offset + size > first:
                raise JobError(
                    f"{self.store.path}: records from physical offset {offset} to {offset + size} can no longer be "
                    f"read ({why}): put the file back, or set failOnDataLoss=false to continue behind them"
                )
        filters = self._filters_at(start)
        ranges = plan(self.store, self.options.range_bytes, start=first, end=last)
        return [StreamPart(part, self.store, filters) for part in ranges]

    def has_behind(self, offset: dict[str, Any]) -> bool:
        """Return whether there is something to read behind an offset, by the last look at the store."""
        at = int(offset["physical_offset"])
        return self.store.records_end(at) > at

    def read(self, partition: StreamPart) -> Iterator[pa.RecordBatch]:
        """Return a partition's rows."""
        self.store, self.filters = partition.store, partition.filters
        return self._read_range(partition.part)


class StoreStreamReader(SupportsTriggerAvailableNow, DataSourceStreamReader):
    """Reads stores as they grow. The stream's offset is that of its store (`_StreamReading`); {"stores": {path:
    offset}} if the stores are given by a list or a pattern. Raises JobError if a store cannot be read, or if the URIs
    of two stores differ only behind the question mark."""

    def __init__(self, options: Options, schema: StructType) -> None:
        paths = options.stores()
        self._fail_on_data_loss, self._asked = options.fail_on_data_loss, options.asked
        self._max_bytes, self._max_records = options.max_bytes, options.max_records
        self._is_told = False
        streams = [_StreamReading(options, schema, path, of=len(paths)) for path in paths]
        self._streams = {stream.store.path: stream for stream in streams}
        if len(self._streams) < len(streams):
            raise JobError("two of the stores have the same URI except for the part behind the question mark")
        self._is_plain = paths == options.paths and len(paths) == 1

    @with_short_errors
    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802, Spark's name
        """End the query at the present end of each store: later records are for the next query."""
        for stream in self._streams.values():
            stream.end_now()

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802, Spark's name
        """Return the default limit of a micro-batch. Spark passes it to `latestOffset`, or asks for everything in one
        batch, as with Trigger.Once. If both limits are set, both apply."""
        if self._max_records:
            return ReadMaxRows(self._max_records)
        return ReadMaxBytes(self._max_bytes) if self._max_bytes else ReadAllAvailable()

    @with_short_errors
    def initialOffset(self) -> dict[str, Any]:  # noqa: N802, Spark's name
        """Return where a new query starts."""
        self._asked.check_stores(self._streams)
        return self._offset({path: stream.initial() for path, stream in self._streams.items()})

    @with_short_errors
    def latestOffset(  # noqa: N802, Spark's name
        self, start: dict[str, Any] | None = None, limit: ReadLimit | None = None
    ) -> dict[str, Any]:
        """Return the end of the next micro-batch. Spark before 4.2 gives no start."""
        starts = self._starts(start) if start is not None else {}
        is_limited = ENDS_AFTER_ONE or not isinstance(limit, ReadAllAvailable)
        return self._offset(
            {path: stream.latest(starts.get(path), is_limited=is_limited) for path, stream in self._streams.items()}
        )

    @with_short_errors
    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """Return the partitions of a micro-batch."""
        starts, ends = self._starts(start), self._starts(end)
        found: list[InputPartition] = [
            StorePart(number, part)
            for number, (path, stream) in enumerate(self._streams.items())
            for part in stream.parts(starts[path], ends[path])
        ]
        if ENDS_AFTER_ONE and start != end:
            self._tell_of_rest(ends)
        return found

    def _tell_of_rest(self, ends: dict[str, dict[str, Any]]) -> None:
        """Write once to Spark's log that the query may end after this micro-batch although there is more to read. Spark
        before 4.2 ends it silently, and does not tell a source which trigger a query has."""
        rest = [] if self._is_told else [path for path, each in self._streams.items() if each.has_behind(ends[path])]
        if rest:
            self._is_told = True
            sys.stderr.write(
                f"duemq: {rest[0]}: this micro-batch ends before the store does, and Spark before 4.2 ends a query "
                "with the trigger availableNow after one: start it again until nothing comes, or leave out "
                "maxOffsetsPerTrigger and maxBytesPerTrigger. With processingTime it continues\n"
            )
            sys.stderr.flush()

    @with_short_errors_each
    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield a partition's rows."""
        assert isinstance(partition, StorePart)
        assert isinstance(partition.part, StreamPart)
        prepare_worker()
        yield from list(self._streams.values())[partition.number].read(partition.part)

    def _offset(self, offsets: dict[str, dict[str, Any]]) -> dict[str, Any]:
        return next(iter(offsets.values())) if self._is_plain else {"stores": offsets}

    def _starts(self, offset: dict[str, Any]) -> dict[str, dict[str, Any]]:
        """Return the offset of each store at an offset of the stream; a store that was added since is at its beginning.
        Raises JobError."""
        if self._is_plain != ("stores" not in offset):
            raise JobError("the checkpoint is of another list of stores: one path, or a list or pattern, as before")
        if self._is_plain:
            return dict.fromkeys(self._streams, offset)
        # The checkpoint may have the store by another name, or by two.
        names = {real_path(path): path for path in self._streams}
        known: dict[str, dict[str, Any]] = {}
        gone = []
        for path, at in sorted(offset["stores"].items(), key=lambda item: item[0] in self._streams):
            name = path if path in self._streams else names.get(real_path(path))
            if name is None:
                gone.append(path)
            else:
                known[name] = at  # the store's present name comes last and wins
        if gone and self._fail_on_data_loss:
            raise JobError(f"{gone[0]}: the checkpoint has this store, which is no longer among those that are read")
        return {path: known.get(path) or stream.earliest() for path, stream in self._streams.items()}
