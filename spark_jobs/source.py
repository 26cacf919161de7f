"""The files of a store as tables in Spark: `spark.read.format("rocketmq").load("/path/to/store")`.

    option           default      meaning
    path             (load's)     the store, or its URI (hdfs://, s3://)
    table            messages     messages, schedules, pending, consume_queue, timers, offsets, damaged
    columns          the cheap    names with commas; * for all, body and properties too. `.schema(...)` does the same
    checkCrc         false        leave out records whose body does not have its checksum (always so in `damaged`)
    rangeBytes       134217728    bytes of the commitlog a task reads
    delayLevels      by the store the broker's messageDelayLevel
    timeSlackMs      600000       by how much the broker's clock may have been set back: ranges are left out by store
                                  time only that far away from what a filter asks for
    unflushed        false        of a running broker's store on this machine, read also what is not flushed yet
    maxBytesPerBatch all          streams: bytes of the commitlog a micro-batch takes
    startingOffset   earliest     streams: earliest, latest, or a physical offset at which a record starts
    failOnDataLoss   true         streams: stop where files that were not read yet have expired

Filters on topic, queue, times and offsets are pushed down: ranges that cannot have such records are not read. Register
with `spark_jobs.source.register(spark)`, which allows that as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableMapping
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, Filter, InputPartition

from scheduler.timer_log import UNIT_SIZE
from spark_jobs import tables
from spark_jobs.errors import JobError
from spark_jobs.filters import Filters
from spark_jobs.offsets import offset_rows
from spark_jobs.progress import Progress, Waiting, read_progress, timer_columns, timer_units, waiting
from spark_jobs.ranges import RANGE_SIZE, Range, at_offsets, damages_of, first_store_ms, plan, walks
from spark_jobs.store_files import StoreFiles
from spark_jobs.worker import settle

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.datasource import ReadLimit
    from pyspark.sql.types import StructType

    from spark_jobs.records import Records
    from spark_jobs.store_files import QueueFile

_WAITING_PART: Final = 200_000
_ROWS: Final = 1 << 16
_QUEUE_BYTES: Final = 64 << 20


def register(session: SparkSession) -> None:
    """Make the data source known to a session."""
    session.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    session.dataSource.register(RocketmqSource)


class Options:
    """The options, checked. Raises JobError."""

    def __init__(self, options: MutableMapping[str, str]) -> None:
        path = options.get("path")
        if not path:
            raise JobError("which store? give load() its path")
        self.path = path
        self.table = options.get("table", "messages")
        self.columns = options.get("columns")
        self.check_crc = _flag(options, "checkCrc", default=False)
        self.range_bytes = _number(options, "rangeBytes", RANGE_SIZE)
        self.delay_levels = options.get("delayLevels")
        self.time_slack_ms = _number(options, "timeSlackMs", 600_000)
        self.unflushed = _flag(options, "unflushed", default=False)
        self.max_bytes = _number(options, "maxBytesPerBatch", 0)
        self.starting_offset = options.get("startingOffset", "earliest")
        self.fail_on_data_loss = _flag(options, "failOnDataLoss", default=True)


def _number(options: MutableMapping[str, str], name: str, default: int) -> int:
    text = options.get(name, str(default))
    if not text.isdecimal():
        raise JobError(f"the option {name}={text} is no number")
    return int(text)


def _flag(options: MutableMapping[str, str], name: str, *, default: bool) -> bool:
    text = options.get(name, str(default)).lower()
    if text not in ("true", "false"):
        raise JobError(f"the option {name}={text} is neither true nor false")
    return text == "true"


class RocketmqSource(DataSource):
    """See the module."""

    @classmethod
    def name(cls) -> str:
        """What format() calls it."""
        return "rocketmq"

    def schema(self) -> str:
        """The columns that the options ask for."""
        options = Options(self.options)
        return tables.ddl(options.table, options.columns)

    def reader(self, schema: StructType) -> DataSourceReader:
        """A reader of a table."""
        settle()
        options = Options(self.options)
        _check_schema(options.table, schema)
        return StoreReader(options, schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802, Spark's name
        """A reader of what is appended."""
        options = Options(self.options)
        if options.table not in ("messages", "schedules"):
            raise JobError(f"the table {options.table} is no stream; messages and schedules are")
        _check_schema(options.table, schema)
        return StoreStreamReader(options, schema)


def _check_schema(table: str, schema: StructType) -> None:
    """Whether the columns that a user's own schema names are there, with these types. Raises JobError."""
    tables.ddl(table, ",".join(schema.fieldNames()))
    for field in schema.fields:
        wanted, given = tables.COLUMNS[table][field.name], field.dataType.simpleString()
        if given != wanted:
            raise JobError(f"the column {field.name} of {table} is {wanted}, not {given}")


def _arrow(schema: StructType) -> pa.Schema:
    from pyspark.sql.pandas.types import to_arrow_schema

    return to_arrow_schema(schema, timezone="UTC")


class RangePart(InputPartition):
    """A range of the commitlog."""

    def __init__(self, part: Range) -> None:
        super().__init__(None)
        self.part = part


class StreamPart(RangePart):
    """A range, and the files that there were when it was planned: tasks have the reader as it was at the start of the
    query, which knows no newer ones."""

    def __init__(self, part: Range, store: StoreFiles) -> None:
        super().__init__(part)
        self.store = store


class WaitingPart(InputPartition):
    """Messages that wait."""

    def __init__(self, found: Waiting) -> None:
        super().__init__(None)
        self.found = found


class FilePart(InputPartition):
    """A file, by its name in the store; what it is of: for consume queues several."""

    def __init__(self, name: str, of: Any) -> None:
        super().__init__(None)
        self.file = name
        self.of = of


class NothingPart(InputPartition):
    """Nothing to read: Spark asks for at least one partition."""

    def __init__(self) -> None:
        super().__init__(None)


def _packed(files: list[QueueFile]) -> list[list[QueueFile]]:
    """Files in parts of about _QUEUE_BYTES: a store may have ten thousand of them, most with little in it."""
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
    """What batch and stream share. Goes to the tasks."""

    options: Options
    schema: StructType
    filters: Filters
    progress: Progress | None
    store: StoreFiles

    def _read_range(self, part: Range) -> Iterator[pa.RecordBatch]:
        schema = _arrow(self.schema)
        for found in walks(self.store, part, check_crc=self.options.check_crc):
            yield from self._batches(found.records, schema)

    def _batches(self, records: Records, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        records = self.filters.keep(records)
        if not len(records):
            return
        batch = tables.Batch(records, self.progress)
        if self.options.table != "messages":
            scheduled = batch.roles.is_scheduled
            if not scheduled.all():
                batch = batch.take(scheduled)
        if self.filters.roles is not None and len(batch.records):
            wanted = self.filters.role_mask(batch.roles.role)
            if wanted is not None and not wanted.all():
                batch = batch.take(wanted)
        if len(batch.records):
            yield tables.record_batch(batch, schema)


class StoreReader(_Reading, DataSourceReader):
    """Reads a table once."""

    def __init__(self, options: Options, schema: StructType) -> None:
        self.options = options
        self.schema = schema
        self.filters = Filters()
        self.store = StoreFiles.open(options.path, unflushed=options.unflushed)
        self.progress = None
        if options.table in ("schedules", "pending"):
            try:
                self.progress = read_progress(self.store, options.delay_levels)
            except ValueError as error:
                raise JobError(f"the option delayLevels: {error}") from None
            if self.store.is_running:
                # What was done by then is in the commitlog, if one looks for its end after that.
                self.store = StoreFiles.open(options.path, unflushed=options.unflushed)

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802, Spark's name
        """Take note of all; Spark applies them again, which costs little on what is left."""
        self.filters.add(filters)
        return filters

    def partitions(self) -> list[InputPartition]:
        """What tasks read."""
        table, store = self.options.table, self.store
        if table in ("messages", "schedules"):
            found: list[InputPartition] = [RangePart(part) for part in self._ranges()]
        elif table == "pending":
            assert self.progress is not None
            waits = waiting(store)
            step = _WAITING_PART
            found = [
                WaitingPart(Waiting(waits.offsets[at : at + step], waits.sizes[at : at + step]))
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
        return found or [NothingPart()]

    def _ranges(self) -> list[Range]:
        store, filters = self.store, self.filters
        low, high = filters.span("physical_offset")
        ranges = [part for part in plan(store, self.options.range_bytes) if part.end > low and part.start <= high]
        low, high = filters.span("store_ms")
        if ranges and (low, high) != Filters().span("store_ms"):
            slack = self.options.time_slack_ms
            firsts = [first_store_ms(store, part) for part in ranges]
            nexts = [*firsts[1:], None]
            ranges = [
                part
                for part, first, after in zip(ranges, firsts, nexts, strict=True)
                if (first is None or first <= high + slack) and (after is None or after >= low - slack)
            ]
        if filters.topics is not None and ranges:
            ranges = self._with_topics(ranges, filters.topics)
        return ranges

    def _with_topics(self, ranges: list[Range], topics: frozenset[str]) -> list[Range]:
        """Ranges that have records of some topics, by the consume queues as far as these are known to be whole."""
        store = self.store
        files = [file for file in store.queue_files() if file.topic in topics]
        if {file.topic for file in files} != topics:
            return ranges  # Deleted with its queues, or never there: only the records can tell.
        offsets = [store.units(file)["physical_offset"].astype(np.int64) for file in files]
        known = np.sort(np.concatenate(offsets)) if offsets else np.empty(0, np.int64)
        whole_to = store.queues_whole_to()
        starts = np.array([part.start for part in ranges], np.int64)
        ends = np.array([part.end for part in ranges], np.int64)
        has = np.searchsorted(known, ends) > np.searchsorted(known, starts)
        return [part for part, wanted in zip(ranges, has | (ends > whole_to), strict=True) if wanted]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """A partition's rows."""
        settle()
        if isinstance(partition, NothingPart):
            return
        table = self.options.table
        if table == "damaged":
            yield from self._read_damaged(partition)
        elif isinstance(partition, RangePart):
            yield from self._read_range(partition.part)
        elif isinstance(partition, WaitingPart):
            schema = _arrow(self.schema)
            for records in at_offsets(self.store, *partition.found):
                yield from self._batches(records, schema)
        elif isinstance(partition, FilePart) and table == "consume_queue":
            for file in partition.of:
                yield from self._read_queue(file)
        elif table == "timers":
            yield from self._read_timers()
        else:
            yield from self._read_offsets()

    def _emit(self, columns: dict[str, Any]) -> pa.RecordBatch:
        schema = _arrow(self.schema)
        return pa.RecordBatch.from_arrays([pa.array(columns[f.name], f.type) for f in schema], schema=schema)

    def _read_damaged(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if isinstance(partition, FilePart):
            offset, size = partition.of
            rows = [(offset, size, "a file is missing", "")]
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
        real = units["size"] != 0x7FFFFFFF
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


class StoreStreamReader(_Reading, DataSourceStreamReader):
    """Reads what a store has, and then what is appended to it, up to where it is flushed. A stream's offset is a
    physical offset at which a record starts, or will."""

    def __init__(self, options: Options, schema: StructType) -> None:
        self.options = options
        self.schema = schema
        self.filters = Filters()
        self._open(0)

    def _open(self, since: int) -> None:
        self.store = StoreFiles.open(self.options.path, since=since)
        self.progress = None
        if self.options.table == "schedules":
            self.progress = read_progress(self.store, self.options.delay_levels)

    def initialOffset(self) -> dict[str, int]:  # noqa: N802, Spark's name
        """Where a new query starts."""
        wanted = self.options.starting_offset
        if wanted == "earliest":
            return {"physical_offset": self.store.segments[0].first_offset}
        if wanted == "latest":
            return {"physical_offset": self.store.records_end()}
        if not wanted.isdecimal():
            raise JobError(f"the option startingOffset={wanted} is neither earliest, latest nor a physical offset")
        return {"physical_offset": int(wanted)}

    def latestOffset(self, start: dict[str, int], limit: ReadLimit) -> dict[str, int]:  # noqa: N802
        """Up to where there is something to read now."""
        at = start["physical_offset"]
        self._open(at)
        end = self.store.records_end(at)
        if self.options.max_bytes and end - at > self.options.max_bytes:
            for part in plan(self.store, max(self.options.max_bytes, 4 << 20), start=at, end=end):
                if part.end < end:
                    return {"physical_offset": part.end}
        return {"physical_offset": max(end, at)}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> list[InputPartition]:
        """What tasks read of a micro-batch."""
        first, last = start["physical_offset"], end["physical_offset"]
        if first >= last:
            return []
        begin = self.store.segments[0].first_offset
        if first < begin and self.options.fail_on_data_loss:
            raise JobError(
                f"records from physical offset {first} to {begin} have expired before they were read; "
                "set failOnDataLoss=false to go on behind them"
            )
        ranges = plan(self.store, self.options.range_bytes, start=first, end=last)
        return [StreamPart(part, self.store) for part in ranges]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """A partition's rows."""
        assert isinstance(partition, StreamPart)
        settle()
        self.store = partition.store
        return self._read_range(partition.part)
