"""What became of each scheduled message: a case each.

Two rounds of matching, each over buckets that fit in memory, of arrays and not of rows. First what names its origin, by
physical offset. What is open then is matched by what a message that waits has in common with its delivery (see
`events`), the n-th delivery with the n-th message where several have the same. A message that was rolled or given
another time is one message: its last record.

    status     delivered    once
               twice        more often than once
               cancelled    taken back before it was delivered
               pending      the broker has not come to it yet
               lost         the broker has passed it, and there is no delivery
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import pyarrow as pa

from spark_jobs.events import CANCELLED as WAS_CANCELLED
from spark_jobs.events import CONTINUED, DONE, WAITS, RangeEvents
from spark_jobs.events import DELIVERED as WAS_DELIVERED
from spark_jobs.figures import CANCELLED, CASE, DELIVERED, LOST, PENDING, TWICE, UNCLAIMED, Figures
from spark_jobs.hashes import hash_ints
from spark_jobs.usage import RangeUsage, UsageObserver
from spark_jobs.worker import settle

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from pyspark.sql import SparkSession

    from spark_jobs.progress import Progress
    from spark_jobs.ranges import Range
    from spark_jobs.store_files import StoreFiles

_PART_DDL: Final = "bucket bigint, kind tinyint, data binary"
_PART: Final = pa.schema([("bucket", pa.int64()), ("kind", pa.int8()), ("data", pa.binary())])
_K_WAITS: Final = 0
_K_DONE: Final = 1
_K_CASES: Final = 2
_K_READ: Final = 3
_K_USAGE: Final = 4
_K_UNIQUE: Final = 5
_K_FIGURES: Final = 6
_K_MORE: Final = 7
_HASHES: Final = np.dtype("<i8")
_BUCKET_BYTES: Final = 256 << 20
"""Of the commitlog, in a bucket."""
_READ_BUCKET: Final = -1


class Found(NamedTuple):
    """What one pass over a store found."""

    reads: list[dict[str, Any]]
    """What was read, in order: of each range start, end, sha256, records, damaged, damages, last_ms, and the names of
    topics by hash."""
    figures: Figures
    usage: list[RangeUsage]
    """What the ranges are used for, where that was asked for..."""
    duplicates: int
    """...and how many messages producers sent once more, by topic and unique key."""


def find(
    session: SparkSession,
    store: StoreFiles,
    progress: Progress,
    ranges: list[Range],
    *,
    step_ms: int,
    with_usage: bool = False,
) -> Found:
    """Read some ranges of a store, all of them as a rule, and match what is in them. `step_ms`: of curves over time.
    `with_usage`: also look at what the store is used for."""
    count, begin = max(1, len(ranges)), store.segments[0].first_offset
    buckets = max(1, (store.readable_end - begin) // _BUCKET_BYTES)

    def scan(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        settle()
        for batch in batches:
            for number in batch.column(0).to_pylist():
                if number < len(ranges):
                    yield from _scan(store, ranges[number], progress, buckets if with_usage else 0)

    def by_origin(table: pa.Table) -> pa.Table:
        settle()
        matched = match_by_origin(_of_kind(table, _K_WAITS, WAITS), _of_kind(table, _K_DONE, DONE))
        return pa.concat_tables([_as_they_are(table), _to_parts(matched, buckets)])

    def by_key(table: pa.Table) -> pa.Table:
        settle()
        matched = match_by_key(_of_kind(table, _K_WAITS, WAITS), _of_kind(table, _K_DONE, DONE))
        figures = Figures.of(np.concatenate([_of_kind(table, _K_CASES, CASE), matched]), step_ms, begin)
        unique = _of_kind(table, _K_UNIQUE, _HASHES)
        more = (len(unique) - len(np.unique(unique))).to_bytes(8, "little")
        ended = _batch([0, 0], [_K_FIGURES, _K_MORE], [figures.encode(), more])
        kinds = table["kind"].to_numpy()
        return pa.concat_tables(
            [table.filter(pa.array((kinds == _K_READ) | (kinds == _K_USAGE))), pa.Table.from_batches([ended])]
        )

    parts = session.range(0, count, 1, count).mapInArrow(scan, _PART_DDL)
    first = parts.groupBy("bucket").applyInArrow(by_origin, _PART_DDL)
    ended = first.groupBy("bucket").applyInArrow(by_key, _PART_DDL).select("kind", "data").collect()
    of_kind: dict[int, list[bytes]] = {}
    for row in ended:
        of_kind.setdefault(row.kind, []).append(bytes(row.data))
    reads = [json.loads(text) for text in of_kind.get(_K_READ, [])]
    return Found(
        sorted(reads, key=lambda read: int(read["start"])),
        Figures.added([Figures.decode(data) for data in of_kind.get(_K_FIGURES, [])]),
        [RangeUsage.decode(data) for data in of_kind.get(_K_USAGE, [])],
        sum(int.from_bytes(data, "little") for data in of_kind.get(_K_MORE, [])),
    )


# --- the scan


def _scan(store: StoreFiles, part: Range, progress: Progress, buckets: int) -> Iterator[pa.RecordBatch]:
    """The events of a range: a row for each bucket that some belong to. With a number of buckets also its usage."""
    observer = UsageObserver() if buckets else None
    events = RangeEvents(store, part, progress, observer)
    waits, done = [np.empty(0, WAITS)], [np.empty(0, DONE)]
    topics: dict[int, str] = {}
    for found in events:
        waits.append(found.waits)
        done.append(found.done)
        topics |= found.topics
    all_waits, all_done = np.concatenate(waits), np.concatenate(done)
    yield from _bucketed(_K_WAITS, all_waits, all_waits["offset"] // _BUCKET_BYTES)
    # What names no origin takes no part in the first round, wherever it goes.
    where = np.where(all_done["origin"] >= 0, all_done["origin"], all_done["offset"]) // _BUCKET_BYTES
    yield from _bucketed(_K_DONE, all_done, where)
    if observer is not None:
        unique = observer.unique_hashes()
        yield from _bucketed(_K_UNIQUE, unique, unique % buckets)
        yield _batch([_READ_BUCKET], [_K_USAGE], [observer.usage()])
    assert events.read is not None
    text = json.dumps(events.read._asdict() | {"topics": {str(key): name for key, name in topics.items()}})
    yield _batch([_READ_BUCKET], [_K_READ], [text.encode()])


def _bucketed(kind: int, rows: NDArray[Any], bucket: NDArray[np.int64]) -> Iterator[pa.RecordBatch]:
    if not len(rows):
        return
    order = np.argsort(bucket, kind="stable")
    distinct, first = np.unique(bucket[order], return_index=True)
    for number, part in zip(distinct.tolist(), np.split(rows[order], first[1:]), strict=True):
        yield _batch([number], [kind], [part.tobytes()])


def _batch(buckets: list[int], kinds: list[int], data: list[bytes]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"bucket": buckets, "kind": kinds, "data": data}, schema=_PART)


def _of_kind(table: pa.Table, kind: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    """All rows of a kind in some parts."""
    kinds = table["kind"].to_numpy()
    column = table["data"].combine_chunks() if table["data"].num_chunks != 1 else table["data"].chunk(0)
    found = [np.frombuffer(column[int(i)].as_buffer(), dtype) for i in np.flatnonzero(kinds == kind)]
    return np.concatenate(found) if found else np.empty(0, dtype)


def _as_they_are(table: pa.Table) -> pa.Table:
    """What takes no part in the first round."""
    kinds = table["kind"].to_numpy()
    return table.filter(pa.array((kinds != _K_WAITS) & (kinds != _K_DONE))).cast(_PART)


# --- by origin


class Matched(NamedTuple):
    """Cases that are closed, and what is open."""

    cases: NDArray[Any]
    waits: NDArray[Any]
    done: NDArray[Any]


def match_by_origin(waits: NDArray[Any], done: NDArray[Any]) -> Matched:
    """Match what names its origin. `waits`, `done`: WAITS and DONE of a bucket, in any order."""
    waits = waits[np.argsort(waits["offset"])]
    nameless = done["origin"] < 0
    named = done[~nameless]
    at = np.searchsorted(waits["offset"], named["origin"])
    known = at < len(waits)
    known[known] = waits["offset"][at[known]] == named["origin"][known]
    mine, at = named[known].copy(), at[known]
    # A message with a key that replaces another names it as if it went on in its place; but it is another message.
    mine["what"][(mine["what"] == CONTINUED) & (mine["key"] != waits["key"][at])] = WAS_CANCELLED
    counts = {what: np.bincount(at[mine["what"] == what], minlength=len(waits)) for what in (1, 2, 3)}
    deliveries = mine["what"] == WAS_DELIVERED
    cases = _cases(waits)
    cases["deliveries"] = counts[WAS_DELIVERED]
    cases["first_ms"], cases["last_ms"] = _times(len(waits), at[deliveries], mine["at_ms"][deliveries])
    is_final = counts[CONTINUED] == 0
    is_closed = is_final & ((counts[WAS_DELIVERED] > 0) | (counts[WAS_CANCELLED] > 0))
    cases["status"] = _status(cases["deliveries"], counts[WAS_CANCELLED] > 0, waits["passed"])
    stray = named[~known]
    closed = np.concatenate([cases[is_closed], _unclaimed(stray[stray["what"] == WAS_DELIVERED])])
    return Matched(closed, waits[is_final & ~is_closed], done[nameless])


def _cases(waits: NDArray[Any]) -> NDArray[Any]:
    cases = np.zeros(len(waits), CASE)
    for name, source in (
        ("physical_offset", "offset"),
        ("size", "size"),
        ("at_ms", "at_ms"),
        ("due_ms", "due_ms"),
        ("delay_level", "level"),
        ("topic_hash", "topic"),
    ):
        cases[name] = waits[source]
    cases["origin"] = -1
    return cases


def _unclaimed(done: NDArray[Any]) -> NDArray[Any]:
    cases = np.zeros(len(done), CASE)
    cases["physical_offset"], cases["origin"] = done["offset"], done["origin"]
    cases["at_ms"] = cases["first_ms"] = cases["last_ms"] = done["at_ms"]
    cases["deliveries"] = 1
    cases["status"] = UNCLAIMED
    return cases


def _times(count: int, at: NDArray[np.int64], ms: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The least and the greatest time of each of `count` messages; 0 for one without any."""
    first, last = np.full(count, np.iinfo(np.int64).max), np.zeros(count, np.int64)
    np.minimum.at(first, at, ms)
    np.maximum.at(last, at, ms)
    first[first == np.iinfo(np.int64).max] = 0
    return first, last


def _status(
    deliveries: NDArray[Any], is_cancelled: NDArray[np.bool_], is_passed: NDArray[np.bool_]
) -> NDArray[np.int8]:
    without = np.where(is_cancelled, CANCELLED, np.where(is_passed, LOST, PENDING))
    return np.where(deliveries > 1, TWICE, np.where(deliveries == 1, DELIVERED, without)).astype(np.int8)


def _to_parts(matched: Matched, buckets: int) -> pa.Table:
    """What goes on to the second round, by what messages and their deliveries have in common."""
    batches: list[pa.RecordBatch] = []
    if len(matched.cases):
        batches.append(
            _batch([int(matched.cases["physical_offset"][0]) % buckets], [_K_CASES], [matched.cases.tobytes()])
        )
    for kind, rows in ((_K_WAITS, matched.waits), (_K_DONE, matched.done)):
        batches += _bucketed(kind, rows, rows["message"] % buckets)
    return pa.Table.from_batches(batches, _PART)


# --- by what they have in common


def match_by_key(waits: NDArray[Any], done: NDArray[Any]) -> NDArray[Any]:
    """Match what names no origin. `waits`, `done`: WAITS and DONE of a bucket, in any order. Gives CASE."""
    waits = _last_records(waits)
    deliveries = _in_order(done[done["what"] == WAS_DELIVERED])
    keys, first, counts = np.unique(waits["key"], return_index=True, return_counts=True)
    at = np.searchsorted(keys, deliveries["key"])
    known = at < len(keys)
    known[known] = keys[at[known]] == deliveries["key"][known]
    mine, at = deliveries[known], at[known]
    # The n-th of a key is the n-th message's, and what comes more often than there are messages is the last one's.
    number = np.arange(len(mine)) - np.searchsorted(mine["key"], mine["key"])
    row = first[at] + np.minimum(number, counts[at] - 1)
    cases = _cases(waits)
    cases["deliveries"] = np.bincount(row, minlength=len(waits))
    cases["first_ms"], cases["last_ms"] = _times(len(waits), row, mine["at_ms"])
    marks = done[done["what"] == WAS_CANCELLED]
    is_cancelled = np.isin(hash_ints(waits["message"], waits["slot"]), hash_ints(marks["message"], marks["slot"])) & (
        waits["level"] == 0
    )
    cases["status"] = _status(cases["deliveries"], is_cancelled, waits["passed"])
    return np.concatenate([cases, _unclaimed(deliveries[~known])])


def _in_order(rows: NDArray[Any]) -> NDArray[Any]:
    """By key and offset."""
    return rows[np.lexsort((rows["offset"], rows["key"]))]


def _last_records(waits: NDArray[Any]) -> NDArray[Any]:
    """The record of each message that counts, by key and offset. Of the records of a key as many are messages as were
    not rolled, at least one (the first may have expired), and the last ones are theirs."""
    waits = _in_order(waits)
    if not len(waits):
        return waits
    _, first, counts = np.unique(waits["key"], return_index=True, return_counts=True)
    heads = np.add.reduceat((~waits["again"]).astype(np.int64), first)
    messages = np.maximum(heads, 1)
    number = np.arange(len(waits)) - np.repeat(first, counts)
    return waits[number >= np.repeat(counts - messages, counts)]
