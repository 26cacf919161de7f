"""What a store is used for: traffic, sizes, producers, keys, retries, duplicates; counted in the tasks that read it.

A task processes the records of its range as arrays and leaves one small summary; the driver adds these up. Keys are
counted exactly within a range, and its KEYS_KEPT most frequent ones are kept: a key's total is exact up to `key_error`.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np

from duemq.protocol.records.record import FLAG_BORN_IPV6
from duemq.protocol.topics import DLQ_PREFIX, RETRY_PREFIX
from duemq.spark_jobs.audit.steps import is_by_minute
from duemq.spark_jobs.columns.hashes import hash_ints
from duemq.spark_jobs.store.roles import MESSAGE, NAMES

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from duemq.spark_jobs.columns.records import Records
    from duemq.spark_jobs.store.roles import Roles

    Integers = NDArray[np.int64]

HOUR_MS: Final = 3_600_000
KEYS_KEPT: Final = 1000
KEYS: Final = np.dtype([("key", "<i8"), ("count", "<i8"), ("offset", "<i8")])
"""By hash of topic and keys: the count, and the physical offset of a record that has them."""
SIZE_BINS: Final = 28
"""Number of bins of body sizes, by powers of two: bin 0 has empty bodies, bin n sizes below 2^n."""


class RangeUsage(msgspec.Struct):
    """The usage of a range. Counts and bytes of records."""

    traffic: dict[int, list[int]]
    """By second since the epoch, or by the first second of a minute (`steps`): the count for each role, then the bytes
    for each."""
    topics: dict[str, dict[int, list[int]]]
    """By topic and hour since the epoch: the count for each role, then the bytes for each."""
    sizes: dict[str, list[int]]
    """By topic: the number of bodies in each of SIZE_BINS."""
    producers: dict[str, list[int]]
    """By address: count and bytes of the records that producers sent."""
    keys: bytes
    """The most frequent keys, as KEYS."""
    key_error: int
    """Most occurrences of a key that is not in `keys`."""
    retries: dict[str, int]
    """Counts by topic, original topic and number of retries, joined with tabs."""

    @staticmethod
    def decode(data: bytes) -> RangeUsage:
        """Decode the bytes that a task left."""
        return msgspec.msgpack.decode(data, type=RangeUsage)


class _Traffic(defaultdict[int, "Integers"]):
    """Rows of counts and bytes by second, or by the first second of a minute once the data spans long."""

    def __init__(self) -> None:
        super().__init__(lambda: np.zeros(2 * len(NAMES), np.int64))
        self._span: tuple[int, int] | None = None

    def starts(self, seconds: Integers) -> Integers:
        """Return the keys of the rows for some seconds. Merges existing rows into minutes if the span requires it."""
        if not len(seconds):
            return seconds
        low, high = int(seconds.min()), int(seconds.max())
        if self._span is not None:
            low, high = min(low, self._span[0]), max(high, self._span[1])
        if self._span is not None and is_by_minute(low, high) and not is_by_minute(*self._span):
            rows = list(self.items())
            self.clear()
            for second, row in rows:
                self[second // 60 * 60] += row
        self._span = low, high
        return seconds // 60 * 60 if is_by_minute(low, high) else seconds


class UsageObserver:
    """Counts the usage in the records of a range."""

    def __init__(self) -> None:
        self._traffic_of = _Traffic()
        self._topics: dict[tuple[str, int], Integers] = {}
        self._sizes: dict[str, Integers] = {}
        self._producers: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0])
        self._keys: list[tuple[Integers, Integers]] = []
        self._retries: defaultdict[str, int] = defaultdict(int)
        self._unique: list[Integers] = []

    def look(self, records: Records, roles: Roles) -> None:
        """Count some records."""
        role = roles.role.astype(np.int64)
        codes, names = records.topics()
        topic = codes.astype(np.int64)
        self._traffic(records, role, topic, names)
        self._body_sizes(records, topic, names)
        self._producers_of(records, role)
        self._keys_of(records)
        self._retries_of(records, topic, names)
        at, _ = records.property("UNIQ_KEY")
        sent = np.flatnonzero((role == MESSAGE) & (at >= 0))
        if len(sent):
            self._unique.append(hash_ints(records.topic_hashes[sent], records.texts.hashes("UNIQ_KEY")[sent]))

    def _traffic(self, records: Records, role: Integers, topic: Integers, names: list[str]) -> None:
        roles = len(NAMES)
        for columns, counts, size in _grouped(records.sizes, self._traffic_of.starts(records.store_ms // 1000), role):
            row = self._traffic_of[columns[0]]
            row[columns[1]] += counts
            row[roles + columns[1]] += size
        for columns, counts, size in _grouped(records.sizes, topic, records.store_ms // HOUR_MS, role):
            key = (names[columns[0]], columns[1])
            row = self._topics.setdefault(key, np.zeros(2 * roles, np.int64))
            row[columns[2]] += counts
            row[roles + columns[2]] += size

    def _body_sizes(self, records: Records, topic: Integers, names: list[str]) -> None:
        size = np.clip(records.body_size, 0, (1 << SIZE_BINS - 1) - 1)
        bins = np.where(size > 0, np.frexp(size.astype(np.float64))[1], 0)
        for columns, counts, _ in _grouped(size, topic, bins.astype(np.int64)):
            self._sizes.setdefault(names[columns[0]], np.zeros(SIZE_BINS, np.int64))[columns[1]] += counts

    def _producers_of(self, records: Records, role: Integers) -> None:
        sent = records.take(np.flatnonzero(role < 3))  # sent for now or for later; no deliveries
        if not len(sent):
            return
        long = sent.sys_flag & FLAG_BORN_IPV6 != 0
        if long.any():
            import ipaddress

            for i in np.flatnonzero(long).tolist():
                at = int(sent.starts[i]) + 48
                counts = self._producers[str(ipaddress.ip_address(bytes(sent.data[at : at + 16])))]
                counts[0] += 1
                counts[1] += int(sent.sizes[i])
            sent = sent.take(~long)
        if len(sent):
            raw = sent.data[(sent.starts + 48)[:, None] + np.arange(4)].view(">u4").ravel().astype(np.int64)
            for columns, count, size in _grouped(sent.sizes, raw):
                counts = self._producers[".".join(str(columns[0] >> shift & 255) for shift in (24, 16, 8, 0))]
                counts[0] += count
                counts[1] += size

    def _keys_of(self, records: Records) -> None:
        at, _ = records.property("KEYS")
        rows = np.flatnonzero(at >= 0)
        if len(rows):
            keys = hash_ints(records.topic_hashes[rows], records.texts.hashes("KEYS")[rows])
            self._keys.append((keys, records.physical_offset[rows]))

    def _retries_of(self, records: Records, topic: Integers, names: list[str]) -> None:
        special = np.array([name.startswith((RETRY_PREFIX, DLQ_PREFIX)) for name in names] or [False])
        rows = np.flatnonzero(special[topic])
        if not len(rows):
            return
        some = records.take(rows)
        origins = some.property_strings("RETRY_TOPIC").to_pylist()
        for code, origin, times in zip(topic[rows].tolist(), origins, some.reconsume_times.tolist(), strict=True):
            self._retries[f"{names[code]}\t{origin or ''}\t{times}"] += 1

    def usage(self) -> bytes:
        """Return the summary as bytes, for `RangeUsage.decode`."""
        topics: dict[str, dict[int, list[int]]] = {}
        for (name, hour), row in self._topics.items():
            topics.setdefault(name, {})[hour] = row.tolist()
        keys, error = self._frequent()
        return msgspec.msgpack.encode(
            RangeUsage(
                {second: row.tolist() for second, row in self._traffic_of.items()},
                topics,
                {name: row.tolist() for name, row in self._sizes.items()},
                dict(self._producers),
                keys,
                error,
                dict(self._retries),
            )
        )

    def _frequent(self) -> tuple[bytes, int]:
        if not self._keys:
            return b"", 0
        hashes = np.concatenate([part[0] for part in self._keys])
        offsets = np.concatenate([part[1] for part in self._keys])
        distinct, first, counts = np.unique(hashes, return_index=True, return_counts=True)
        error = 0
        if len(distinct) > KEYS_KEPT:
            chosen = np.argpartition(counts, -KEYS_KEPT)[-KEYS_KEPT:]
            error = int(counts[chosen].min())
            distinct, first, counts = distinct[chosen], first[chosen], counts[chosen]
        found = np.zeros(len(distinct), KEYS)
        found["key"], found["count"], found["offset"] = distinct, counts, offsets[first]
        return found.tobytes(), error

    def unique_hashes(self) -> Integers:
        """Return hashes of topic and unique key of the messages that producers sent."""
        return np.concatenate(self._unique) if self._unique else np.empty(0, np.int64)


def _grouped(amounts: Integers, *columns: Integers) -> Iterable[tuple[tuple[int, ...], int, int]]:
    """Yield the distinct rows of some columns, each with its number of occurrences and the sum of its amounts."""
    if not len(amounts):
        return
    lows = [int(column.min()) for column in columns]
    spans = [int(column.max()) - low + 1 for column, low in zip(columns, lows, strict=True)]
    combined = np.zeros(len(amounts), np.int64)
    for column, low, span in zip(columns, lows, spans, strict=True):
        combined = combined * span + (column - low)
    distinct, inverse, counts = np.unique(combined, return_inverse=True, return_counts=True)
    sums = np.bincount(inverse, amounts, len(distinct))
    for value, count, total in zip(distinct.tolist(), counts.tolist(), sums.tolist(), strict=True):
        row = []
        for low, span in zip(reversed(lows), reversed(spans), strict=True):
            value, part = divmod(value, span)  # noqa: PLW2901
            row.append(part + low)
        yield tuple(reversed(row)), count, int(total)


class Usage:
    """The usage of a store: the sum of its ranges. Attributes as in RangeUsage."""

    def __init__(self, parts: Sequence[RangeUsage]) -> None:
        width = 2 * len(NAMES)
        self.traffic = _Traffic()
        self.topics: dict[str, dict[int, Integers]] = defaultdict(
            lambda: defaultdict(lambda: np.zeros(width, np.int64))
        )
        self.sizes: dict[str, Integers] = defaultdict(lambda: np.zeros(SIZE_BINS, np.int64))
        self.producers: dict[str, list[int]] = defaultdict(lambda: [0, 0])
        self.keys = _summed_keys([np.frombuffer(part.keys, KEYS) for part in parts])
        """KEYS, each key once, in the order of their first occurrence."""
        self.retries: dict[str, int] = defaultdict(int)
        self.key_error = sum(part.key_error for part in parts)
        for part in parts:
            self._add(part)

    def _add(self, part: RangeUsage) -> None:
        seconds = np.array(list(part.traffic), np.int64)
        for start, row in zip(self.traffic.starts(seconds).tolist(), part.traffic.values(), strict=True):
            self.traffic[start] += row
        for name, hours in part.topics.items():
            for hour, row in hours.items():
                self.topics[name][hour] += row
        for name, row in part.sizes.items():
            self.sizes[name] += row
        for name, (count, size) in part.producers.items():
            self.producers[name][0] += count
            self.producers[name][1] += size
        for name, count in part.retries.items():
            self.retries[name] += count

    def summary(self) -> RangeUsage:
        """Return the sum in the form of a range's usage: adding to it is the same as adding to all parts."""
        return RangeUsage(
            {second: row.tolist() for second, row in self.traffic.items()},
            {name: {hour: row.tolist() for hour, row in hours.items()} for name, hours in self.topics.items()},
            {name: row.tolist() for name, row in self.sizes.items()},
            dict(self.producers),
            self.keys.tobytes(),
            self.key_error,
            dict(self.retries),
        )


def frequent_keys(usages: Sequence[Usage], count: int) -> list[dict[int, int]]:
    """Return the most frequent keys of some stores together: for each store, by the physical offset of a record that
    has the key, how often it occurs at least, in all stores. A key that several stores have is listed with the first of
    them."""
    rows = np.concatenate([np.empty(0, KEYS), *(one.keys for one in usages)])
    holder = np.repeat(np.arange(len(usages)), [len(one.keys) for one in usages])
    _, first, which = np.unique(rows["key"], return_index=True, return_inverse=True)
    sums = np.zeros(len(first), np.int64)
    np.add.at(sums, which, rows["count"])
    best = np.lexsort((first, -sums))[:count]  # of equally frequent ones the first
    found = []
    for number in range(len(usages)):
        mine = best[holder[first[best]] == number]
        found.append(dict(zip(rows["offset"][first[mine]].tolist(), sums[mine].tolist(), strict=True)))
    return found


def _summed_keys(parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
    rows = np.concatenate([np.empty(0, KEYS), *parts])
    _, first, which = np.unique(rows["key"], return_index=True, return_inverse=True)
    counts = np.zeros(len(first), np.int64)
    np.add.at(counts, which, rows["count"])
    found = rows[first]
    found["count"] = counts
    return found[np.argsort(first)]


def body_percentile(bins: Integers, percent: float) -> int:
    """Return the least power of two that this many percent of the bodies are smaller than; 0 if they are empty."""
    total = int(bins.sum())
    if not total:
        return 0
    at = int(np.searchsorted(np.cumsum(bins), total * percent / 100))
    return 1 << at if at else 0
