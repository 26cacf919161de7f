"""Large stores for the benchmarks of the Spark jobs, written as files, without a broker, at the speed of the disk.

    python -m tests.bench.spark.stores PATH --gb N [--seed 1]

A store looks as if a broker had run with delayed messages for some hours: bodies of 1 KiB; 30% of the messages are
plain, 50% have a delay level and 20% a timer; each delayed message is there twice, once waiting and once delivered, a
few ms late, unless it is due after the end. Records lie in the order of their store times, 1000 messages sent per
second; the end is now. Delivered records name their origins, as duemq's do. Consume queues, timer log and wheel, the
JSON tables and the checkpoint fit. duemq's broker and Apache's open such a store and go on with it: see
tests/spark/tables/test_generated.py.

Records are made as the rows of matrices, all records of one layout (`Template`) at a time, and then put in order.
Bodies and their checksums come from a pool.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import time
import zlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
from numpy.typing import NDArray

from tests.bench.spark.records import BODY, HEAD, HEX, TEXT_AT, Integers, Kind, Messages, Template, out_ms
from tests.spark.world.oracle import SCHEDULE_TOPIC, TIMER_TOPIC, java_hash

SEGMENT: Final = 1 << 30
QUEUE_SEGMENT: Final = 300_000 * 20
TIMER_SEGMENT: Final = 100 << 20
TICK_MS: Final = 10_000
"""Records are made in ticks of this length; no delay is shorter."""
SENDS: Final = 10_000
"""Messages sent in a tick, unless fewer are asked for."""
TOPICS: Final = {"orders": 4, "payments": 4, "mail": 2, "reminders_of_customers": 8}
"""Topics with their numbers of queues."""
TAGS: Final = ("new", "changed", "cancelled")
LEVELS: Final = {3: 10, 4: 30, 5: 60, 6: 120, 9: 300, 16: 1800}
"""Levels of RocketMQ's own table, with seconds."""
TIMER_MS: Final = 600_000
"""Timers are due up to this far ahead, one in a thousand some days later."""
GROUPS: Final = ("billing", "notifications", "search")
_POOL: Final = 4096
_RECORD: Final = 1280
"""Approximate bytes of a record."""
_UNIT: Final = np.dtype([("physical_offset", ">i8"), ("size", ">i4"), ("tags_code", ">i8")])
_TIMER_UNIT: Final = np.dtype(
    [
        ("size", ">i4"),
        ("previous", ">i8"),
        ("magic", ">i4"),
        ("write_ms", ">i8"),
        ("delay_ms", ">i4"),
        ("physical_offset", ">i8"),
        ("record_size", ">i4"),
        ("topic_hash", ">i4"),
        ("due_ms", ">i8"),
    ]
)
_SLOT: Final = np.dtype([("second", ">i8"), ("first", ">i8"), ("last", ">i8"), ("count", ">i4"), ("zero", ">i4")])
_SLOTS_A_DAY: Final = 86_400
_SLOTS: Final = 14 * _SLOTS_A_DAY
_END_MAGIC: Final = 0xCBD43194
_MAX_PARTS: Final = 1024
"""Linux's limit for one writev."""


@dataclass
class Generated:
    """A generated store, and the figures that any job must find in it."""

    path: Path
    size: int = 0
    """Bytes of the commitlog up to its end."""
    begun_ms: int = 0
    ended_ms: int = 0
    records: int = 0
    plain: int = 0
    levels: int = 0
    timers: int = 0
    """Scheduled timers, delivered or not."""
    delivered: int = 0
    late_ms: int = 0
    """Sum of the lateness of all delivered messages."""
    offsets: dict[str, int] = field(default_factory=dict)
    """The end of each queue, by `topic@queue`."""

    @property
    def scheduled(self) -> int:
        return self.levels + self.timers

    @property
    def pending(self) -> int:
        return self.scheduled - self.delivered


_KINDS: Final = [Kind(topic, tag, level) for topic in TOPICS for tag in TAGS for level in (0, -1, *LEVELS)]


class _Writer:
    """Writes the commitlog and, at the end, all files derived from it."""

    def __init__(self, path: Path, seed: int, segment: int) -> None:
        self.result = Generated(path)
        self._segment = segment
        self._file: BinaryIO | None = None
        self._end = 0
        chance = np.random.default_rng(seed)
        # Hexadecimal digits take twice the size of the bytes.
        self._pool = HEX[chance.integers(0, 16, (_POOL, BODY), np.uint8)]
        self._crcs = np.array([zlib.crc32(body.tobytes()) & 0x7FFFFFFF for body in self._pool], np.int64)
        self._queues = [(SCHEDULE_TOPIC, level - 1) for level in LEVELS] + [(TIMER_TOPIC, 0)]
        self._queues += [(topic, queue) for topic, count in TOPICS.items() for queue in range(count)]
        numbers = {queue: number for number, queue in enumerate(self._queues)}
        self._waiting = np.array([numbers.get((SCHEDULE_TOPIC, k.level - 1), numbers[TIMER_TOPIC, 0]) for k in _KINDS])
        self._first_queue = np.array([numbers[kind.topic, 0] for kind in _KINDS])
        self._queue_ids = np.array([queue for _, queue in self._queues])
        self._ends = np.zeros(len(self._queues), np.int64)
        self._units: list[list[NDArray[Any]]] = [[] for _ in self._queues]
        self._timer_units: list[NDArray[Any]] = []
        self._delivered = defaultdict[int, int](int)
        self._templates = [Template(kind, kind.topic) for kind in _KINDS]
        self._templates += [Template(kind, TIMER_TOPIC if kind.level < 0 else SCHEDULE_TOPIC) for kind in _KINDS]
        self._sizes = np.array([template.size for template in self._templates])
        self._is_plain = np.array([kind.level == 0 for kind in _KINDS])
        self._is_timer = np.array([kind.level < 0 for kind in _KINDS])
        self._tags = np.array([java_hash(kind.tag) for kind in _KINDS])
        self._topics = np.array([java_hash(kind.topic) for kind in _KINDS])
        (path / "commitlog").mkdir(parents=True)

    @property
    def end(self) -> int:
        return self._end

    def append(self, messages: Messages) -> Integers:
        """Append messages in the order of their store times; return their physical offsets."""
        count = len(messages.kind)
        waits = (messages.origin < 0) & ~self._is_plain[messages.kind]
        template = messages.kind + len(_KINDS) * waits
        sizes = self._sizes[template]
        queue = np.where(waits, self._waiting[messages.kind], self._first_queue[messages.kind] + messages.queue_id)
        ends = self._end + np.cumsum(sizes)
        starts: Integers = ends - sizes
        limit = self._end - self._end % self._segment + self._segment
        split = int(np.searchsorted(ends, limit - 8, "right"))
        if split < count:
            starts[split:] += limit - starts[split]
        # Queue offset: the position of a record among those of its queue.
        order = np.argsort(queue, kind="stable")
        bounds = np.searchsorted(queue[order], np.arange(len(self._queues) + 1))
        queue_offset = np.empty(count, np.int64)
        tags = np.where(waits, messages.due_ms, self._tags[messages.kind])
        for number in range(len(self._queues)):
            which = order[bounds[number] : bounds[number + 1]]
            queue_offset[which] = self._ends[number] + np.arange(len(which))
            self._ends[number] += len(which)
            units = np.empty(len(which), _UNIT)
            units["physical_offset"], units["size"], units["tags_code"] = starts[which], sizes[which], tags[which]
            self._units[number].append(units)
        prepared = np.where(waits, messages.due_ms, np.where(messages.origin == 0, -1, messages.origin))
        prepared[self._is_plain[messages.kind]] = 0
        parts: list[memoryview] = [memoryview(b"")] * count
        by_template = np.argsort(template, kind="stable")
        bounds = np.searchsorted(template[by_template], np.arange(len(self._templates) + 1))
        sorted_messages = messages.part(by_template)
        head_fields = {
            "queue_id": self._queue_ids[queue],
            "queue_offset": queue_offset,
            "physical_offset": starts,
            "prepared": prepared,
            "crc": self._crcs[messages.body],
        }
        head_fields = {name: values[by_template] for name, values in head_fields.items()}
        places = by_template.tolist()
        for number in np.flatnonzero(np.diff(bounds)).tolist():
            begin, end = bounds[number : number + 2].tolist()
            part = slice(begin, end)
            rows, head = self._templates[number].rows(sorted_messages.part(part))
            for name, values in head_fields.items():
                head[name] = values[part]
            rows[:, HEAD.itemsize : TEXT_AT] = self._pool[sorted_messages.body[part]]
            view, size = memoryview(rows.reshape(-1)), rows.shape[1]  # type: ignore[arg-type]
            for at, place in enumerate(places[part]):
                parts[place] = view[at * size : (at + 1) * size]
        self._write(parts[:split])
        if split < count:
            left = limit - self._end
            self._write([memoryview(left.to_bytes(4, "big") + _END_MAGIC.to_bytes(4, "big"))])
            self._end = limit
            self._write(parts[split:])
        self._keep_timers(messages, waits, starts, sizes)
        self._count(messages, waits)
        return starts

    def _write(self, parts: Sequence[memoryview]) -> None:
        if self._end % self._segment == 0:
            if self._file is not None:
                self._file.close()
            self._file = (self.result.path / "commitlog" / f"{self._end:020d}").open("wb", buffering=0)
            self._file.truncate(self._segment)
        assert self._file is not None
        for first in range(0, len(parts), _MAX_PARTS):
            some = parts[first : first + _MAX_PARTS]
            size = sum(map(len, some))
            if os.writev(self._file.fileno(), some) != size:
                raise OSError(errno.ENOSPC, "not all was written", str(self.result.path))
            self._end += size

    def _keep_timers(self, messages: Messages, waits: NDArray[np.bool_], starts: Integers, sizes: Integers) -> None:
        which = np.flatnonzero(waits & self._is_timer[messages.kind])
        units = np.zeros(len(which), _TIMER_UNIT)
        write_ms = messages.store_ms[which] // 1000 * 1000
        units["size"], units["magic"], units["write_ms"] = 52, 1, write_ms
        slot_ms = out_ms(messages.due_ms[which])
        # Beyond a window of two days a unit is put into an earlier slot, to be put in again then.
        is_far = slot_ms - write_ms >= 172_800_000
        units["magic"] += 2 * is_far
        units["delay_ms"] = np.where(is_far, 172_800_000, slot_ms - write_ms)
        units["physical_offset"], units["record_size"] = starts[which], sizes[which]
        units["topic_hash"], units["due_ms"] = self._topics[messages.kind[which]], messages.due_ms[which]
        self._timer_units.append(units)

    def _count(self, messages: Messages, waits: NDArray[np.bool_]) -> None:
        result, is_timer = self.result, self._is_timer[messages.kind]
        is_delivery = messages.origin >= 0
        result.records += len(messages.kind)
        result.plain += int(self._is_plain[messages.kind].sum())
        result.timers += int((waits & is_timer).sum())
        result.levels += int((waits & ~is_timer).sum())
        result.delivered += int(is_delivery.sum())
        result.late_ms += int((messages.store_ms - messages.due_ms)[is_delivery].sum())
        for number in np.unique(messages.kind[is_delivery & ~is_timer]).tolist():
            self._delivered[_KINDS[number].level] += int((is_delivery & (messages.kind == number)).sum())

    # --- derived files

    def finish(self, begun_ms: int, ended_ms: int) -> Generated:
        """Write all other files. `ended_ms`: timers due before it are delivered."""
        assert self._file is not None
        self._file.close()
        result, path = self.result, self.result.path
        result.size, result.begun_ms, result.ended_ms = self._end, begun_ms, ended_ms
        for number, (topic, queue_id) in enumerate(self._queues):
            result.offsets[f"{topic}@{queue_id}"] = int(self._ends[number])
            data = b"".join(units.tobytes() for units in self._units[number])
            _write_files(path / "consumequeue" / topic / str(queue_id), data, QUEUE_SEGMENT)
        self._write_timers(ended_ms)
        _write_config(result, dict(self._delivered))
        times = np.array([ended_ms, ended_ms, 0], ">i8").tobytes()
        (path / "checkpoint").write_bytes(times.ljust(4096, b"\0"))
        (path / "lock").write_text("duemq")
        return result

    def _write_timers(self, ended_ms: int) -> None:
        units = np.concatenate(self._timer_units).astype(_TIMER_UNIT)  # concatenate changes the byte order
        per_file = (TIMER_SEGMENT - 68) // 52 + 1
        numbers = np.arange(len(units))
        positions = numbers // per_file * TIMER_SEGMENT + numbers % per_file * 52
        seconds = (units["write_ms"].astype(np.int64) + units["delay_ms"]) // 1000
        order = np.argsort(seconds, kind="stable")
        is_first = np.concatenate(([True], np.diff(seconds[order]) != 0))
        placed = positions[order]
        units["previous"][order] = np.where(is_first, -1, np.concatenate(([-1], placed[:-1])))
        slots = np.zeros(_SLOTS, _SLOT)
        firsts = np.flatnonzero(is_first)
        lasts = np.concatenate((firsts[1:], [len(units)])) - 1
        unique = seconds[order][firsts]
        at = unique % _SLOTS
        slots["second"][at], slots["first"][at], slots["last"][at] = unique, placed[firsts], placed[lasts]
        slots["count"][at] = lasts - firsts + 1
        path = self.result.path
        with (path / "timerwheel").open("wb") as file:
            file.truncate(slots.nbytes)
            for first in range(0, _SLOTS, _SLOTS_A_DAY):
                some = slots[first : first + _SLOTS_A_DAY]
                if some["count"].any():
                    file.seek(first * _SLOT.itemsize)
                    file.write(some.tobytes())
        (path / "timerlog").mkdir()
        for base in range(0, max(1, len(units)), per_file):
            data = units[base : base + per_file].tobytes()
            if base + per_file < len(units):
                left = TIMER_SEGMENT - len(data)
                data += left.to_bytes(4, "big") + bytes(8) + _END_MAGIC.to_bytes(4, "big")
            with (path / "timerlog" / f"{base // per_file * TIMER_SEGMENT:020d}").open("wb") as file:
                file.truncate(TIMER_SEGMENT)
                file.write(data)
        end = int(positions[-1]) + 52 if len(units) else 0
        count = self.result.timers
        check = np.array([ended_ms // 1000 * 1000, end, count, count, 0, ended_ms, 1], ">i8").tobytes()
        (path / "config").mkdir()
        (path / "config" / "timercheck").write_bytes(check.ljust(4096, b"\0"))


def _write_files(directory: Path, data: bytes, size: int) -> None:
    """Write data as files of one size, the last of them filled with a hole."""
    directory.mkdir(parents=True)
    for base in range(0, max(1, len(data)), size):
        with (directory / f"{base:020d}").open("wb") as file:
            file.truncate(size)
            file.write(data[base : base + size])


def _write_config(result: Generated, delivered: dict[int, int]) -> None:
    """Write the JSON tables. Groups are at the ends of their queues, except the last one, which is halfway."""
    version = {"counter": 1, "timestamp": result.begun_ms}
    topics = {**TOPICS, SCHEDULE_TOPIC: 18, TIMER_TOPIC: 1}
    config = {"order": False, "perm": 6, "topicFilterType": "SINGLE_TAG", "topicSysFlag": 0}
    table = {
        name: {**config, "readQueueNums": queues, "topicName": name, "writeQueueNums": queues}
        for name, queues in topics.items()
    }
    offsets: dict[str, dict[str, int]] = defaultdict(dict)
    for name, end in result.offsets.items():
        topic, queue_id = name.split("@")
        for group in GROUPS if topic in TOPICS else ():
            offsets[f"{topic}@{group}"][queue_id] = end if group != GROUPS[-1] else end // 2
    files = {
        "topics": {"dataVersion": version, "topicConfigTable": table},
        "consumerOffset": {"dataVersion": version, "offsetTable": offsets},
        "delayOffset": {"dataVersion": version, "offsetTable": delivered},
    }
    for name, content in files.items():
        (result.path / "config" / f"{name}.json").write_text(json.dumps(content, indent="\t"))


def write(
    path: Path, gigabytes: float, *, seed: int = 1, segment: int = SEGMENT, sends: int = SENDS, ticks_ago: int = 0
) -> Generated:
    """Write a store of about `gigabytes` GiB into a new or empty directory. `segment`: the size of a commitlog file,
    which must be set for a broker if it differs from RocketMQ's. `sends`: messages sent in a tick. `ticks_ago`: the
    ticks between the end of the store's time and now. Raises OSError."""
    wanted = int(gigabytes * (1 << 30))
    writer = _Writer(path, seed, segment)
    chance = np.random.default_rng(seed)
    delays = np.array([LEVELS.get(kind.level, 0) * 1000 for kind in _KINDS])
    queues = np.array([TOPICS[kind.topic] for kind in _KINDS])
    levels = np.array([kind.level for kind in _KINDS])
    share = np.where(levels == 0, 0.3, np.where(levels < 0, 0.2, 0.5 / len(LEVELS)))
    share /= share.sum()
    ticks = _ticks(wanted, sends)
    begun = (time.time_ns() // 1_000_000 // TICK_MS - ticks_ago - ticks) * TICK_MS
    waiting: dict[int, list[Messages]] = defaultdict(list)
    number = 0
    for now in range(begun, begun + ticks * TICK_MS, TICK_MS):
        kind = chance.choice(len(_KINDS), sends, p=share)
        store_ms = now + np.sort(chance.integers(0, TICK_MS, sends))
        ahead = TICK_MS + chance.integers(0, TIMER_MS, sends)
        ahead += (chance.random(sends) < 0.001) * chance.integers(1, 30, sends) * 86_400_000
        due = store_ms + np.where(levels[kind] < 0, ahead, delays[kind])
        # A timer of a whole second waits in the slot before. At the end of the store that slot is done while its timers
        # are not, so avoid whole seconds.
        due += (levels[kind] < 0) & (due % 1000 == 0)
        sent = Messages(
            store_ms=store_ms,
            born_ms=store_ms - chance.integers(0, 5, sends),
            kind=kind,
            number=np.arange(number, number + sends),
            body=chance.integers(0, _POOL, sends),
            queue_id=chance.integers(0, queues[kind]),
            due_ms=np.where(levels[kind] == 0, 0, due),
            origin=np.full(sends, -1),
        )
        number += sends
        is_sent = np.ones(sends, bool)
        everything = sent
        if due_now := waiting.pop(now // TICK_MS, None):
            found = Messages.joined(due_now)
            found = found.part(np.argsort(found.due_ms, kind="stable"))
            # A few ms late, in the order of their times, all before the tick ends.
            stored = np.maximum.accumulate(found.due_ms + np.minimum(chance.geometric(0.5, len(found.kind)) - 1, 20))
            found = found._replace(store_ms=np.minimum(stored, now + TICK_MS - 1))
            everything = Messages.joined([sent, found])
            order = np.argsort(everything.store_ms, kind="stable")
            everything = everything.part(order)
            is_sent = order < sends
        offsets = writer.append(everything)
        waits = is_sent & (everything.due_ms > 0)
        later = everything.part(waits)._replace(origin=offsets[waits])
        ticks_due = later.due_ms // TICK_MS
        for tick in np.unique(ticks_due).tolist():
            waiting[tick].append(later.part(ticks_due == tick))
    return writer.finish(begun, begun + ticks * TICK_MS)


def _ticks(wanted: int, sends: int) -> int:
    """Return the number of ticks for `wanted` bytes. Each has `sends` new messages and deliveries of earlier ones."""
    size, ticks = 0.0, 0
    while size < wanted:
        due = [ticks * TICK_MS >= seconds * 1000 for seconds in LEVELS.values()]
        delivered = 0.5 * sum(due) / len(LEVELS) + 0.2 * min(1.0, ticks * TICK_MS / TIMER_MS)
        size += sends * (1 + delivered) * _RECORD
        ticks += 1
    return ticks


class Cut:
    """A store whose commitlog lacks its end, which can be put back: the commitlog as a broker would have left it
    earlier; the other files are complete. Files are changed in place."""

    def __init__(self, store: Path, size: int) -> None:
        """`size`: about how many bytes to cut."""
        from duemq.spark_jobs.store.ranges import boundary
        from duemq.spark_jobs.store.store_files import StoreFiles

        files = StoreFiles.open(store)
        first = files.segment_of(files.readable_end - size) or files.segments[0]
        place = boundary(files, first, files.readable_end - size, first.end, known=first.first_offset)
        end = place if place is not None else first.end
        self._parts: list[tuple[Path, int, bytes]] = []
        for segment in files.segments:
            if segment.end > end:
                path, at = store / segment.path, max(0, end - segment.first_offset)
                with path.open("r+b") as file:
                    file.seek(at)
                    self._parts.append((path, at, file.read().rstrip(b"\0")))
                    file.truncate(at)
                    file.truncate(segment.size)

    def put_back(self) -> None:
        """Put the end back."""
        for path, at, data in self._parts:
            with path.open("r+b") as file:
                file.seek(at)
                file.write(data)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.spark.stores", description=__doc__)
    parser.add_argument("path", type=Path)
    parser.add_argument("--gb", type=float, required=True)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    start = time.perf_counter()
    made = write(arguments.path, arguments.gb, seed=arguments.seed)
    seconds = time.perf_counter() - start
    print(f"{made.records} records, {made.size / 1e6:.0f} MB in {seconds:.1f} s, {made.size / 1e6 / seconds:.0f} MB/s")
    print(f"{made.plain} plain, {made.levels} levels, {made.timers} timers, {made.pending} of them pending")


if __name__ == "__main__":
    main()
