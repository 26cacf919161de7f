"""The outcome of each scheduled message: one case for each.

Matching has two rounds, each over buckets that fit in memory, of arrays rather than rows. The first matches records
that name their origin, by physical offset. Messages then still open are matched by what a waiting message has in common
with its delivery (see `events`), the n-th delivery with the n-th message if several have the same key. Messages that
were closed by origin also take part, since another broker may have delivered them as well, and its deliveries name no
origin. A message that was rolled or given another time is one message, represented by its last record.

    status     delivered    once
               twice        more often than once
               cancelled    cancelled before it was delivered
               pending      the broker has not passed it yet
               lost         the broker has passed it, and there is no delivery

If results are kept for the next run (`incremental`), the second round leaves each bucket in two parts: groups of which
every message is closed, as figures; and the others, as they are.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa

from duemq.scheduler.timers.index.sorted_offsets import is_among
from duemq.spark_jobs.analyse.usage import RangeUsage, UsageObserver
from duemq.spark_jobs.audit.events import CANCELLED as WAS_CANCELLED
from duemq.spark_jobs.audit.events import CONTINUED, DONE, WAITS, RangeEvents
from duemq.spark_jobs.audit.events import DELIVERED as WAS_DELIVERED
from duemq.spark_jobs.audit.figures import CANCELLED, CASE, DELIVERED, LOST, PENDING, TWICE, UNCLAIMED, Figures
from duemq.spark_jobs.audit.shuffle import PART
from duemq.spark_jobs.columns.hashes import hash_ints

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from duemq.spark_jobs.audit.shuffle import Shuffle
    from duemq.spark_jobs.store.progress import Progress
    from duemq.spark_jobs.store.store_files import StoreFiles
    from duemq.spark_jobs.store.walks import Range

_K_WAITS: Final = 0
_K_DONE: Final = 1
_K_CASES: Final = 2
_K_READ: Final = 3
_K_USAGE: Final = 4
_K_UNIQUE: Final = 5
_K_FIGURES: Final = 6
_K_MORE: Final = 7
_K_LEFT: Final = 8
_K_NOTE: Final = 9
_K_CLOSED: Final = 10
HASHES: Final = np.dtype("<i8")
BUCKET_BYTES: Final = 256 << 20
"""Bytes of the commitlog in a bucket."""
_READ_BUCKET: Final = -1
AHEAD: Final = np.dtype([("queue_offset", "<i8"), ("level", "<i2")])
"""A delivered message of a level that the broker's progress has not passed."""
CLOSED: Final = np.dtype([*CASE.descr, ("message", "<i8"), ("key", "<i8"), ("again", "?")])
"""A case closed by a record that names its origin, with the last three fields of its WAITS, since more records may
belong to it. A row with the status GONE is not a case, but a record that waited in place of another that it does not
name, until a third record named it."""
GONE: Final = -1
"""The status of a record that is not a case of its own, see CLOSED."""


class StoreFindings(NamedTuple):
    """The result of one pass over a store."""

    reads: list[dict[str, Any]]
    """For each range, in order: start, end, sha256, records, damaged, damages, last_ms, hashed, corrupt, corruptions,
    and the names of topics by hash."""
    figures: Figures
    usage: list[RangeUsage]
    """The usage of each range, in order, or of several together; empty if not asked for."""
    duplicates: int
    """Number of messages that producers sent once more, by topic and unique key."""


class RangeFound(NamedTuple):
    """The result for a range."""

    read: dict[str, Any]
    """The range's entry in `StoreFindings.reads`."""
    waits: NDArray[Any]
    """The range's WAITS."""
    done: NDArray[Any]
    """The range's DONE."""
    unique: NDArray[np.int64]
    """Hashes of topic and unique key of the messages that producers sent; empty without the usage."""
    usage: bytes | None
    note: bytes | None = None
    """A note from the loader of the range, passed on in `FindResult.notes`, once for each range."""


class Matching(NamedTuple):
    """The parameters of matching."""

    begin: int
    """The physical offset where the log begins."""
    step_ms: int
    """Step of curves over time, ms."""
    buckets: int
    """Number of buckets in the second round."""
    bucket_bytes: int = BUCKET_BYTES
    """Bytes of the commitlog in a bucket of the first round."""
    begin_ms: int = 0
    """Store time of the log's first record, ms since the epoch; 0 if that is unknown, or if no record is gone before
    it."""
    compacted_to: int = 0
    """The physical offset where the log ended when a compaction made it; 0 if none did."""

    def figures(self, cases: NDArray[Any]) -> Figures:
        """Return the figures of cases (CASE)."""
        return Figures.of(cases, self.step_ms, self.begin, self.begin_ms, self.compacted_to)


class KeptBucket(msgspec.Struct):
    """The results of a bucket that the next run continues with. Keys of groups are hashes of messages, see `events`."""

    low: int
    """The least hash in the bucket."""
    waits: bytes
    """WAITS of the open groups, in which a message has no delivery."""
    done: bytes
    """DONE of the open groups."""
    named: bytes
    """CLOSED of the open groups."""
    ahead: bytes
    """AHEAD of the closed groups."""
    matched: bytes
    """Keys of closed groups that have messages, ascending."""
    stray: bytes
    """Keys of closed groups that only have deliveries or marks, ascending."""
    keys: bytes
    """For messages closed by their origins alone: the keys that they share with their deliveries, ascending."""
    unique: bytes
    """Hashes of the messages that producers sent, each once, ascending."""


Load = Callable[[int], RangeFound]
"""A function that returns the contents of a range, by its number."""


class FindResult(NamedTuple):
    """The result of `find`, with the returned bytes of `leave` and the notes of loaders."""

    found: StoreFindings
    left: list[bytes]
    notes: list[bytes]


def find(
    shuffle: Shuffle, load: Load, count: int, matching: Matching, *, leave: Callable[[KeptBucket], bytes] | None = None
) -> FindResult:
    """Match the contents of some ranges, usually all of a store. `leave`: called in the task with a bucket's results
    for the next run; its return values are in `FindResult.left`. The figures are then only of the closed cases, see
    `Settled`."""
    buckets = matching.buckets

    def scan(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for number in batch.column(0).to_pylist():
                if number < count:
                    yield from _parts(load(number), matching)

    def by_origin(table: pa.Table) -> pa.Table:
        matched = match_by_origin(_of_kind(table, _K_WAITS, WAITS), _of_kind(table, _K_DONE, DONE))
        return pa.concat_tables([_as_they_are(table), _to_parts(matched, buckets)])

    def by_key(table: pa.Table) -> pa.Table:
        unique = _of_kind(table, _K_UNIQUE, HASHES)
        distinct = np.unique(unique)
        waits, done = _of_kind(table, _K_WAITS, WAITS), _of_kind(table, _K_DONE, DONE)
        named = _of_kind(table, _K_CLOSED, CLOSED)
        kinds, data = [_K_MORE], [(len(unique) - len(distinct)).to_bytes(8, "little")]
        closed = _of_kind(table, _K_CASES, CASE)
        if leave is None:
            figures = matching.figures(np.concatenate([closed, match_by_key(waits, done, named)]))
        else:
            numbers = table["bucket"].to_numpy()
            settled = settle(waits, done, named)
            closed = np.concatenate([closed, settled.closed])
            figures = closed_figures(closed, matching)
            number = int(numbers[0]) if len(numbers) else _READ_BUCKET
            if number != _READ_BUCKET:
                kinds.append(_K_LEFT)
                data.append(leave(_left(number, buckets, settled, ahead_of(closed), distinct)))
        kinds.append(_K_FIGURES)
        data.append(figures.encode())
        whole = np.isin(table["kind"].to_numpy(), (_K_READ, _K_USAGE, _K_NOTE))
        return pa.concat_tables(
            [table.filter(pa.array(whole)).cast(PART), pa.Table.from_batches([_batch([0] * len(kinds), kinds, data)])]
        )

    of_kind: dict[int, list[bytes]] = {}
    for kind, data in shuffle(max(1, count), scan, by_origin, by_key):
        of_kind.setdefault(kind, []).append(data)
    reads = [json.loads(text) for text in of_kind.get(_K_READ, [])]
    found = StoreFindings(
        sorted(reads, key=lambda read: int(read["start"])),
        Figures.added([Figures.decode(data) for data in of_kind.get(_K_FIGURES, [])]),
        # Each begins with the number of its range. They are sorted, since in another order ties between equally
        # frequent values would be broken differently.
        [RangeUsage.decode(data[8:]) for data in sorted(of_kind.get(_K_USAGE, []), key=_start_of)],
        sum(int.from_bytes(data, "little") for data in of_kind.get(_K_MORE, [])),
    )
    return FindResult(found, of_kind.get(_K_LEFT, []), of_kind.get(_K_NOTE, []))


def _start_of(data: bytes) -> int:
    return int.from_bytes(data[:8], "little")


# --- the scan


def read_range(
    store: StoreFiles, part: Range, progress: Progress, *, with_usage: bool = False, check: bool = False
) -> RangeFound:
    """Read a range. `with_usage`: also collect its usage. `check`: also look for corrupt records."""
    observer = UsageObserver() if with_usage else None
    events = RangeEvents(store, part, progress, observer, check=check)
    waits, done = [np.empty(0, WAITS)], [np.empty(0, DONE)]
    topics: dict[int, str] = {}
    for found in events:
        waits.append(found.waits)
        done.append(found.done)
        topics |= found.topics
    assert events.read is not None
    read = events.read._asdict() | {"topics": {str(key): name for key, name in topics.items()}}
    return RangeFound(
        read,
        np.concatenate(waits),
        np.concatenate(done),
        observer.unique_hashes() if observer is not None else np.empty(0, HASHES),
        observer.usage() if observer is not None else None,
    )


def _parts(found: RangeFound, matching: Matching) -> Iterator[pa.RecordBatch]:
    """Yield the events of a range: a row for each bucket that some belong to."""
    waits, done = found.waits, found.done
    yield from _bucketed(_K_WAITS, waits, waits["offset"] // matching.bucket_bytes)
    # Records that name no origin take no part in the first round, wherever they go.
    where = np.where(done["origin"] >= 0, done["origin"], done["offset"]) // matching.bucket_bytes
    yield from _bucketed(_K_DONE, done, where)
    yield from _bucketed(_K_UNIQUE, found.unique, bucket_of(found.unique, matching.buckets))
    if found.usage is not None:
        start = int(found.read["start"]).to_bytes(8, "little")
        yield _batch([_READ_BUCKET], [_K_USAGE], [start + found.usage])
    yield _batch([_READ_BUCKET], [_K_READ], [json.dumps(found.read).encode()])
    if found.note is not None:
        yield _batch([_READ_BUCKET], [_K_NOTE], [found.note])


def bucket_of(hashes: NDArray[np.int64], buckets: int) -> NDArray[np.int64]:
    """Return the buckets of hashes (63 bits): each bucket has a contiguous span of them."""
    found: NDArray[np.int64] = (hashes >> 31) * buckets >> 32
    return found


def low_of(bucket: int, buckets: int) -> int:
    """Return the least hash in a bucket."""
    return -(-(bucket << 32) // buckets) << 31


def _bucketed(kind: int, rows: NDArray[Any], bucket: NDArray[np.int64]) -> Iterator[pa.RecordBatch]:
    if not len(rows):
        return
    order = np.argsort(bucket, kind="stable")
    distinct, first = np.unique(bucket[order], return_index=True)
    for number, part in zip(distinct.tolist(), np.split(rows[order], first[1:]), strict=True):
        yield _batch([number], [kind], [part.tobytes()])


def _batch(buckets: list[int], kinds: list[int], data: list[bytes]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"bucket": buckets, "kind": kinds, "data": data}, schema=PART)


def _of_kind(table: pa.Table, kind: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return all rows of a kind in some parts."""
    kinds = table["kind"].to_numpy()
    column = table["data"].combine_chunks() if table["data"].num_chunks != 1 else table["data"].chunk(0)
    found = [np.frombuffer(column[int(i)].as_buffer(), dtype) for i in np.flatnonzero(kinds == kind)]
    return np.concatenate(found) if found else np.empty(0, dtype)


def _as_they_are(table: pa.Table) -> pa.Table:
    """Return the parts that skip the first round."""
    kinds = table["kind"].to_numpy()
    return table.filter(pa.array((kinds != _K_WAITS) & (kinds != _K_DONE))).cast(PART)


# --- by origin


class OriginMatches(NamedTuple):
    """The result of the first round."""

    closed: NDArray[Any]
    """CLOSED: cases closed by records that name their origins."""
    stray: NDArray[Any]
    """CASE of deliveries whose origin is not in the log."""
    waits: NDArray[Any]
    """WAITS that are open."""
    done: NDArray[Any]
    """DONE that name no origin."""


def match_by_origin(waits: NDArray[Any], done: NDArray[Any]) -> OriginMatches:
    """Match records that name their origin. `waits`, `done`: WAITS and DONE of a bucket, in any order."""
    waits = waits[np.argsort(waits["offset"])]
    nameless = done["origin"] < 0
    named = done[~nameless]
    at = np.searchsorted(waits["offset"], named["origin"])
    known = at < len(waits)
    known[known] = waits["offset"][at[known]] == named["origin"][known]
    mine, at = named[known].copy(), at[known]
    # A message that replaces another one by its timer key names it as if it continued it; but it is another message.
    mine["what"][(mine["what"] == CONTINUED) & (mine["key"] != waits["key"][at])] = WAS_CANCELLED
    counts = {what: np.bincount(at[mine["what"] == what], minlength=len(waits)) for what in (1, 2, 3)}
    deliveries = mine["what"] == WAS_DELIVERED
    cases = _cases(waits)
    _add_deliveries(cases, at[deliveries], mine[deliveries])
    is_final = counts[CONTINUED] == 0
    is_closed = is_final & ((counts[WAS_DELIVERED] > 0) | (counts[WAS_CANCELLED] > 0))
    cases["status"] = _status(cases["deliveries"], counts[WAS_CANCELLED] > 0, waits["passed"])
    stray = named[~known]
    is_gone = ~is_final & waits["again"]
    cases["status"][is_gone] = GONE
    is_told = is_closed | is_gone
    return OriginMatches(
        _closed(cases[is_told], waits[is_told]),
        unclaimed(stray[stray["what"] == WAS_DELIVERED]),
        waits[is_final & ~is_closed],
        done[nameless],
    )


def _closed(cases: NDArray[Any], waits: NDArray[Any]) -> NDArray[Any]:
    rows = np.zeros(len(cases), CLOSED)
    for name in CASE.names or ():
        rows[name] = cases[name]
    for name in ("message", "key", "again"):
        rows[name] = waits[name]
    return rows


def closed_of(waits: NDArray[Any], status: int) -> NDArray[Any]:
    """Return CLOSED for waiting messages (WAITS), as if all of them had `status`."""
    cases = _cases(waits)
    cases["status"] = status
    return _closed(cases, waits)


def cases_of(closed: NDArray[Any]) -> NDArray[Any]:
    """Return the CASE of CLOSED rows."""
    cases = np.empty(len(closed), CASE)
    for name in CASE.names or ():
        cases[name] = closed[name]
    return cases


def _cases(waits: NDArray[Any]) -> NDArray[Any]:
    cases = np.zeros(len(waits), CASE)
    for name, source in (
        ("physical_offset", "offset"),
        ("size", "size"),
        ("at_ms", "at_ms"),
        ("due_ms", "due_ms"),
        ("delay_level", "level"),
        ("topic_hash", "topic"),
        ("queue_offset", "queue_offset"),
        ("passed", "passed"),
    ):
        cases[name] = waits[source]
    cases["origin"] = -1
    return cases


def cases_without(waits: NDArray[Any]) -> NDArray[Any]:
    """Return the cases of messages without any other record."""
    cases = _cases(waits)
    cases["status"] = np.where(waits["passed"], LOST, PENDING)
    return cases


def unclaimed(done: NDArray[Any]) -> NDArray[Any]:
    """Return the cases of deliveries whose messages are not in the log."""
    cases = np.zeros(len(done), CASE)
    cases["physical_offset"], cases["origin"] = done["offset"], done["origin"]
    cases["at_ms"] = cases["first_ms"] = cases["last_ms"] = done["at_ms"]
    cases["due_ms"] = done["slot"]
    cases["first_offset"] = cases["last_offset"] = done["offset"]
    cases["deliveries"] = 1
    cases["status"] = UNCLAIMED
    return cases


def _add_deliveries(cases: NDArray[Any], at: NDArray[np.int64], deliveries: NDArray[Any]) -> None:
    """Count deliveries (DONE), and note the first and the last of each case. `at`: index of each delivery's case."""
    had_some = cases["deliveries"] > 0
    for first, last, source in (("first_ms", "last_ms", "at_ms"), ("first_offset", "last_offset", "offset")):
        low = np.where(had_some, cases[first], np.iinfo(np.int64).max)
        high = np.where(had_some, cases[last], 0)
        np.minimum.at(low, at, deliveries[source])
        np.maximum.at(high, at, deliveries[source])
        low[low == np.iinfo(np.int64).max] = 0
        cases[first], cases[last] = low, high
    cases["deliveries"] += np.bincount(at, minlength=len(cases)).astype(np.int32)


def _status(
    deliveries: NDArray[Any], is_cancelled: NDArray[np.bool_], is_passed: NDArray[np.bool_]
) -> NDArray[np.int8]:
    without = np.where(is_cancelled, CANCELLED, np.where(is_passed, LOST, PENDING))
    return np.where(deliveries > 1, TWICE, np.where(deliveries == 1, DELIVERED, without)).astype(np.int8)


def _to_parts(matched: OriginMatches, buckets: int) -> pa.Table:
    """Return the parts for the second round, bucketed by the hash of the message."""
    batches: list[pa.RecordBatch] = []
    if len(matched.stray):
        batches.append(
            _batch([int(matched.stray["physical_offset"][0]) % buckets], [_K_CASES], [matched.stray.tobytes()])
        )
    for kind, rows in ((_K_WAITS, matched.waits), (_K_DONE, matched.done), (_K_CLOSED, matched.closed)):
        batches += _bucketed(kind, rows, bucket_of(rows["message"], buckets))
    return pa.Table.from_batches(batches, PART)


# --- by key


def match(waits: NDArray[Any], done: NDArray[Any]) -> NDArray[Any]:
    """Run both rounds on all WAITS and DONE of a store, in any order. Return CASE."""
    first = match_by_origin(waits, done)
    return np.concatenate([first.stray, match_by_key(first.waits, first.done, first.closed)])


def match_by_key(waits: NDArray[Any], done: NDArray[Any], closed: NDArray[Any] | None = None) -> NDArray[Any]:
    """Match records that name no origin. `waits`, `done`: WAITS and DONE of a bucket, and `closed` its CLOSED, in any
    order. Return CASE."""
    closed = np.empty(0, CLOSED) if closed is None else closed
    has_more = _has_more(waits, done, closed)
    groups = _match_groups(waits, done, closed[has_more])
    return np.concatenate([groups.cases, cases_of(closed[~has_more])])


def _has_more(waits: NDArray[Any], done: NDArray[Any], closed: NDArray[Any]) -> NDArray[np.bool_]:
    """Return which CLOSED have, or may have, more records: a delivery that names no origin, or another record."""
    keys = np.concatenate([waits["key"], done["key"][done["what"] == WAS_DELIVERED], closed["key"][closed["again"]]])
    return is_among(closed["key"], np.unique(keys))


class _Groups(NamedTuple):
    """Cases, and for each the key of its group: the hash of its message."""

    cases: NDArray[Any]
    messages: NDArray[np.int64]


def _match_groups(waits: NDArray[Any], done: NDArray[Any], closed: NDArray[Any]) -> _Groups:
    marks = done[done["what"] == WAS_CANCELLED]
    is_cancelled = np.zeros(len(waits), np.bool_)
    if len(marks):
        named = hash_ints(marks["message"], marks["slot"])
        is_cancelled = np.isin(hash_ints(waits["message"], waits["slot"]), named) & (waits["level"] == 0)
    cases = _cases(waits)
    cases["status"] = _status(cases["deliveries"], is_cancelled, waits["passed"])
    rows = np.concatenate([_closed(cases, waits), closed])
    is_closed = np.arange(len(rows)) >= len(waits)
    # Within a key the open ones come first, each in the log's order.
    order = np.lexsort((rows["physical_offset"], is_closed, rows["key"]))
    rows = _messages(rows[order])
    deliveries = _in_order(done[done["what"] == WAS_DELIVERED])
    keys, first, counts = np.unique(rows["key"], return_index=True, return_counts=True)
    at = np.searchsorted(keys, deliveries["key"])
    known = at < len(keys)
    known[known] = keys[at[known]] == deliveries["key"][known]
    mine, at = deliveries[known], at[known]
    # The n-th delivery of a key belongs to the n-th message; surplus ones belong to the last message.
    number = np.arange(len(mine)) - np.searchsorted(mine["key"], mine["key"])
    _add_deliveries(rows, first[at] + np.minimum(number, counts[at] - 1), mine)
    count = rows["deliveries"]
    rows["status"] = np.where(count > 1, TWICE, np.where(count == 1, DELIVERED, rows["status"]))
    stray = deliveries[~known & ~deliveries["sent_again"]]
    return _Groups(
        np.concatenate([cases_of(rows), unclaimed(stray)]), np.concatenate([rows["message"], stray["message"]])
    )


class Settled(NamedTuple):
    """The result of matching records that name no origin, in two parts: open groups, which have a message that was
    neither delivered nor cancelled, and closed ones. A group is all records with one hash of a message: no other
    group's cases depend on it."""

    closed: NDArray[Any]
    """CASE of the closed groups."""
    open: NDArray[Any]
    """CASE of the open groups."""
    waits: NDArray[Any]
    """WAITS of the open groups."""
    done: NDArray[Any]
    """DONE of the open groups."""
    named: NDArray[Any]
    """CLOSED of the open groups, if there are more records than these."""
    matched: NDArray[np.int64]
    """Keys of the closed groups that have messages, ascending."""
    stray: NDArray[np.int64]
    """Keys of the closed groups that only have deliveries or marks, ascending."""
    keys: NDArray[np.int64]
    """For CLOSED without more records: the keys that they share with their deliveries, ascending."""


def settle(waits: NDArray[Any], done: NDArray[Any], closed: NDArray[Any]) -> Settled:
    """Match records that name no origin, and separate the groups that later records may change. `waits`, `done`,
    `closed` as for `match_by_key`."""
    has_more = _has_more(waits, done, closed)
    named, alone = closed[has_more], closed[~has_more]
    cases, messages = _match_groups(waits, done, named)
    waiting = np.unique(messages[(cases["status"] == PENDING) | (cases["status"] == LOST)])
    is_open, waits_open, done_open, named_open = (
        is_among(keys, waiting) for keys in (messages, waits["message"], done["message"], named["message"])
    )
    matched = np.unique(np.concatenate([waits["message"][~waits_open], named["message"][~named_open]]))
    rest = np.unique(done["message"][~done_open])
    return Settled(
        np.concatenate([cases[~is_open], cases_of(alone)]),
        cases[is_open],
        waits[waits_open],
        done[done_open],
        named[named_open],
        matched,
        rest[~is_among(rest, matched)],
        np.unique(alone["key"]),
    )


def closed_figures(cases: NDArray[Any], matching: Matching) -> Figures:
    """Return the figures of closed cases, without those that depend on the broker's progress at each run
    (`ahead_of`)."""
    figures = matching.figures(cases)
    figures.again = figures.again[:0]
    return figures


def ahead_of(cases: NDArray[Any]) -> NDArray[Any]:
    """Return the messages of closed cases that the broker's progress has not passed (AHEAD)."""
    delivered = (cases["status"] == DELIVERED) | (cases["status"] == TWICE)
    found = cases[delivered & (cases["delay_level"] > 0) & ~cases["passed"]]
    rows = np.zeros(len(found), AHEAD)
    rows["queue_offset"], rows["level"] = found["queue_offset"], found["delay_level"]
    return rows


def _left(number: int, buckets: int, settled: Settled, ahead: NDArray[Any], distinct: NDArray[np.int64]) -> KeptBucket:
    return KeptBucket(
        low_of(number, buckets),
        *(rows.tobytes() for rows in (settled.waits, settled.done, settled.named, ahead)),
        *(hashes.tobytes() for hashes in (settled.matched, settled.stray, settled.keys, distinct)),
    )


def _in_order(rows: NDArray[Any]) -> NDArray[Any]:
    """Return the rows ordered by key and offset."""
    return rows[np.lexsort((rows["offset"], rows["key"]))]


def _messages(rows: NDArray[Any]) -> NDArray[Any]:
    """Return the records (CLOSED, by key) that count, one for each message. A key has as many messages as it has
    records that were not rolled, and at least one, since the first record may have expired. The last records stand for
    these messages, and deliveries of the other records are added to the first record that counts."""
    if not rows["again"].any():
        return rows
    is_gone = rows["status"] == GONE
    gone, rows = rows["key"][is_gone], rows[~is_gone]  # in order
    keys, group, counts = np.unique(rows["key"], return_inverse=True, return_counts=True)
    heads = np.bincount(group[~rows["again"]], minlength=len(keys))
    # A record that named a gone one was not rolled itself, and belongs to the message of the gone one.
    heads -= np.searchsorted(gone, keys, "right") - np.searchsorted(gone, keys)
    in_order = np.lexsort((rows["physical_offset"], group))
    number = np.empty(len(rows), np.int64)
    number[in_order] = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    counted = number >= (counts - np.maximum(heads, 1))[group]
    kept, others = rows[counted], rows[~counted & (rows["deliveries"] > 0)]
    at = np.searchsorted(kept["key"], others["key"])
    for first, last in (("first_ms", "last_ms"), ("first_offset", "last_offset")):
        low = np.where(kept["deliveries"] > 0, kept[first], np.iinfo(np.int64).max)
        np.minimum.at(low, at, others[first])
        np.maximum.at(kept[last], at, others[last])
        low[low == np.iinfo(np.int64).max] = 0
        kept[first] = low
    np.add.at(kept["deliveries"], at, others["deliveries"])
    return kept
