"""The tables of a store: their columns, and how a batch of each column is made.

A column is computed only if it is asked for. Times are ms since the epoch (`*_ms`) and timestamps (`*_time`).

    messages        every record
    schedules       one row for each record that waits, or waited, for its time, of levels and of the wheel
    pending         the rows of `schedules` that the broker would still deliver, by its own files (`progress`)
    consume_queue   the units of all consume queues
    timers          the units of the timer log
    offsets         how far consumer groups and delay levels are
    damaged         stretches of the commitlog that are not records, and files that are missing

The last column of each is `store`: the path or URI of the row's store.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa

from duemq.protocol.records.record import FLAG_BORN_IPV6, FLAG_STORE_IPV6
from duemq.spark_jobs.columns.instants import timestamps
from duemq.spark_jobs.columns.slices import gather
from duemq.spark_jobs.errors import JobError
from duemq.spark_jobs.store.roles import NAMES, Roles
from duemq.storage.log.origins import NO_ORIGIN

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from duemq.spark_jobs.columns.records import Records
    from duemq.spark_jobs.store.progress import Progress

    Integers = NDArray[np.int64]

STORE: Final = "store"
"""The column that tells the rows of several stores apart. Readers add it; records do not have it."""
_RECORD: Final = {
    "physical_offset": "bigint",
    "size": "int",
}
_MESSAGE: Final = {
    **_RECORD,
    "topic": "string",
    "queue_id": "int",
    "queue_offset": "bigint",
    "store_ms": "bigint",
    "store_time": "timestamp",
    "born_ms": "bigint",
    "born_time": "timestamp",
    "role": "string",
    "real_topic": "string",
    "real_queue_id": "int",
    "origin": "bigint",
    "delay_level": "int",
    "unique_key": "string",
    "keys": "string",
    "tags": "string",
    "reconsume_times": "int",
    "flag": "int",
    "sys_flag": "int",
    "prepared_offset": "bigint",
    "born_host": "string",
    "store_host": "string",
    "body_size": "int",
    "body_crc": "bigint",
    "properties": "map<string,string>",
    "body": "binary",
    STORE: "string",
}
_SCHEDULE: Final = {
    **_RECORD,
    "kind": "string",
    "delay_level": "int",
    "real_topic": "string",
    "real_queue_id": "int",
    "queue_offset": "bigint",
    "store_ms": "bigint",
    "store_time": "timestamp",
    "due_ms": "bigint",
    "due_time": "timestamp",
    "is_again": "boolean",
    "origin": "bigint",
    "unique_key": "string",
    "keys": "string",
    "tags": "string",
    "reconsume_times": "int",
    "born_ms": "bigint",
    "properties": "map<string,string>",
    "body": "binary",
    "key_hash": "bigint",
    "slot_second": "bigint",
    "is_passed": "boolean",
    STORE: "string",
}
COLUMNS: Final[dict[str, dict[str, str]]] = {
    "messages": _MESSAGE,
    "schedules": _SCHEDULE,
    "pending": _SCHEDULE,
    "consume_queue": {
        "topic": "string",
        "queue_id": "int",
        "queue_offset": "bigint",
        "physical_offset": "bigint",
        "size": "int",
        "tags_code": "bigint",
        STORE: "string",
    },
    "timers": {
        "position": "bigint",
        "previous": "bigint",
        "magic": "int",
        "is_rolled": "boolean",
        "is_delete": "boolean",
        "is_withdrawn": "boolean",
        "write_ms": "bigint",
        "slot_ms": "bigint",
        "due_ms": "bigint",
        "physical_offset": "bigint",
        "record_size": "int",
        "topic_hash": "int",
        STORE: "string",
    },
    "offsets": {
        "kind": "string",
        "consumer_group": "string",
        "topic": "string",
        "queue_id": "int",
        "next_offset": "bigint",
        "min_offset": "bigint",
        "max_offset": "bigint",
        "lag": "bigint",
        STORE: "string",
    },
    "damaged": {
        "physical_offset": "bigint",
        "size": "bigint",
        "reason": "string",
        "path": "string",
        STORE: "string",
    },
}
_ARROW: Final = {
    "bigint": pa.int64(),
    "int": pa.int32(),
    "boolean": pa.bool_(),
    "string": pa.string(),
    "binary": pa.binary(),
    "timestamp": pa.timestamp("us", "UTC"),
    "map<string,string>": pa.map_(pa.string(), pa.string()),
}
"""Arrow's types by Spark's names."""
NOT_BY_DEFAULT: Final = {"key_hash", "slot_second", "is_passed"}
"""Columns meant for jobs: given only if asked for by name, or by `*`."""
_BY_NAME: Final = NOT_BY_DEFAULT | {"body", "properties", "born_host", "store_host", STORE}
"""Columns that `select *` on the command line leaves out: they are long, or only for jobs, and the store is the same in
most rows."""


def ddl(table: str, columns: str | None = None) -> str:
    """Return the schema of a table as DDL. `columns`: names with commas; `*` stands for all. Raises JobError."""
    known = COLUMNS.get(table)
    if known is None:
        raise JobError(f"there is no table {table!r}; there are {', '.join(COLUMNS)}")
    if columns is None:
        chosen = [name for name in known if name not in NOT_BY_DEFAULT]
    else:
        chosen = []
        for part in columns.split(","):
            name = part.strip()
            chosen += known if name == "*" else [name]
    chosen = list(dict.fromkeys(chosen))
    unknown = [name for name in chosen if name not in known]
    if unknown:
        raise JobError(f"the table {table} has no column {unknown[0]!r}; it has {', '.join(known)}")
    return ", ".join(f"{name} {known[name]}" for name in chosen)


def arrow_schema(columns: Mapping[str, str]) -> pa.Schema:
    """Return the Arrow schema of columns, given as Spark's types by name."""
    return pa.schema([(name, _ARROW[kind]) for name, kind in columns.items()])


def columns_named(table: str, query: str) -> list[str]:
    """Return the columns of a table that a query in SQL may need, at least one: those that it names, and for `*` all
    except the long ones and those for jobs."""
    words = set(re.findall(r"\w+", query.lower()))
    named = [name for name in COLUMNS[table] if name in words]
    if re.search(r"(?<!count\()\*", re.sub(r"\s", "", query.lower())):
        named = [name for name in COLUMNS[table] if name not in _BY_NAME or name in words]
    return named or [next(iter(COLUMNS[table]))]


class RecordColumns:
    """The columns of `messages`, `schedules` and `pending` for some records."""

    def __init__(self, records: Records, progress: Progress | None = None) -> None:
        self.records = records
        self.roles = Roles(records)
        self._progress = progress

    def take(self, which: NDArray[Any]) -> RecordColumns:
        """Return the rows chosen by a mask or by indices."""
        return RecordColumns(self.records.take(which), self._progress)

    @cached_property
    def due_ms(self) -> Integers:
        """When the messages are due, ms since the epoch."""
        assert self._progress is not None
        return self.roles.due_ms(np.array(self._progress.delays_ms, np.int64))

    @cached_property
    def is_passed(self) -> NDArray[np.bool_]:
        """Whether the broker's progress has passed the messages. A passed message that has not been delivered by now
        never will be."""
        assert self._progress is not None
        roles = self.roles
        level = roles.level
        passed = self._progress.is_level_done(level, self.records.queue_offset)
        records = self.records
        timer = self._progress.is_timer_done(roles.slot_second, records.queue_offset, records.physical_offset)
        return np.where(level > 0, passed, timer)

    def column(self, name: str) -> pa.Array:
        """Return a column by its name."""
        return _MAKERS[name](self)


def record_batch(batch: RecordColumns, schema: pa.Schema) -> pa.RecordBatch:
    """Return some records' columns that `schema` names, with its types."""
    arrays = []
    for field in schema:
        array = batch.column(field.name)
        arrays.append(array if array.type == field.type else array.cast(field.type))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _timestamps(ms: Integers) -> pa.Array:
    return timestamps(ms, "us")


def _names(codes: NDArray[Any], names: list[str]) -> pa.Array:
    return pa.DictionaryArray.from_arrays(pa.array(codes), pa.array(names, pa.string())).cast(pa.string())


def _or_null(values: Integers) -> pa.Array:
    return pa.array(values, mask=values == NO_ORIGIN)


def _hosts(batch: RecordColumns, *, of_store: bool) -> pa.Array:
    """Return addresses as text, each distinct one formatted once."""
    import ipaddress

    records = batch.records
    shift = np.where(records.sys_flag & FLAG_BORN_IPV6, 12, 0)
    at = records.starts + 48 if not of_store else records.starts + 64 + shift
    is_long = records.sys_flag & (FLAG_STORE_IPV6 if of_store else FLAG_BORN_IPV6) != 0
    raw = gather(records.data, at, np.where(is_long, 20, 8)).dictionary_encode()
    texts = []
    for value in raw.dictionary.to_pylist():
        address = ipaddress.ip_address(value[:-4])
        port = int.from_bytes(value[-4:], "big")
        texts.append(f"[{address}]:{port}" if address.version == 6 else f"{address}:{port}")
    return _names(raw.indices, texts)


def _role_names(batch: RecordColumns) -> pa.Array:
    return _names(batch.roles.role, list(NAMES))


_MAKERS: Final[dict[str, Callable[[RecordColumns], pa.Array]]] = {
    "physical_offset": lambda b: pa.array(b.records.physical_offset),
    "size": lambda b: pa.array(b.records.sizes.astype(np.int32)),
    "topic": lambda b: _names(*b.records.topics()),
    "queue_id": lambda b: pa.array(b.records.queue_id.astype(np.int32)),
    "queue_offset": lambda b: pa.array(b.records.queue_offset),
    "store_ms": lambda b: pa.array(b.records.store_ms),
    "store_time": lambda b: _timestamps(b.records.store_ms),
    "born_ms": lambda b: pa.array(b.records.born_ms),
    "born_time": lambda b: _timestamps(b.records.born_ms),
    "role": _role_names,
    "kind": _role_names,
    "real_topic": lambda b: b.roles.real_topics(),
    "real_queue_id": lambda b: pa.array(b.roles.real_queues().astype(np.int32)),
    "origin": lambda b: _or_null(b.roles.origin),
    "delay_level": lambda b: pa.array(b.roles.level.astype(np.int32)),
    "unique_key": lambda b: b.records.property_strings("UNIQ_KEY"),
    "keys": lambda b: b.records.property_strings("KEYS"),
    "tags": lambda b: b.records.property_strings("TAGS"),
    "reconsume_times": lambda b: pa.array(b.records.reconsume_times.astype(np.int32)),
    "flag": lambda b: pa.array(b.records.flag.astype(np.int32)),
    "sys_flag": lambda b: pa.array(b.records.sys_flag.astype(np.int32)),
    "prepared_offset": lambda b: pa.array(b.records.prepared_offset),
    "born_host": lambda b: _hosts(b, of_store=False),
    "store_host": lambda b: _hosts(b, of_store=True),
    "body_size": lambda b: pa.array(b.records.body_size.astype(np.int32)),
    "body_crc": lambda b: pa.array(b.records.body_crc),
    "properties": lambda b: b.records.texts.maps(),
    "body": lambda b: gather(b.records.data, b.records.body_at, b.records.body_size),
    "due_ms": lambda b: pa.array(b.due_ms),
    "due_time": lambda b: _timestamps(b.due_ms),
    "is_again": lambda b: pa.array(b.roles.is_again),
    "key_hash": lambda b: pa.array(b.roles.key_hash),
    "slot_second": lambda b: pa.array(b.roles.slot_second),
    "is_passed": lambda b: pa.array(b.is_passed),
}
