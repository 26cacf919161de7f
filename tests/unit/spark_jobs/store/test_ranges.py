"""Ranges of the commitlog start with records, whatever the bodies of messages contain."""

from __future__ import annotations

import itertools
import random
import struct
from pathlib import Path

import numpy as np
import pytest

from duemq.protocol.records import record
from duemq.protocol.records.record import END_MARKER, MAGIC_END, StoredMessage
from duemq.spark_jobs.columns.records import joined_damages, starts_in
from duemq.spark_jobs.errors import JobError
from duemq.spark_jobs.store.ranges import at_offsets, first_store_ms, plan, records_at
from duemq.spark_jobs.store.store_files import StoreFiles
from duemq.spark_jobs.store.walks import CHUNK_SIZE, Range, damages_of, walks

SEGMENT = 24 << 20
FIRST = 3 * SEGMENT
UNITS = 1000


def message(number: int, body: bytes, topic: str = "orders") -> StoredMessage:
    return StoredMessage(
        queue_id=0, queue_offset=number, born_timestamp=number, born_host=bytes(8), store_timestamp=1000 + number,
        store_host=bytes(8), body=body, topic=topic, properties_text=f"KEYS\x01{number}\x02",
    )  # fmt: skip


class Writer:
    """A store written record by record. `offsets`: the position of each."""

    def __init__(self, root: Path, first: int = FIRST, *, with_queues: bool = True) -> None:
        self.root, self.at, self.offsets = root, first, list[int]()
        self._base, self._data, self._with_queues = first, bytearray(), with_queues
        self._queues: dict[str, dict[int, bytes]] = {}
        (root / "commitlog").mkdir(parents=True)

    def add(self, one: StoredMessage) -> int:
        one.physical_offset = self.at
        data = record.encode(one)
        if self.at + len(data) + 8 > self._base + SEGMENT:
            left = self._base + SEGMENT - self.at
            self._data += END_MARKER.pack(left, MAGIC_END) + bytes(left - 8)
            self.finish_file()
            return self.add(one)
        self._data += data
        self.offsets.append(self.at)
        units = self._queues.setdefault(one.topic, {})
        units[one.queue_offset] = struct.pack(">qiq", self.at, len(data), 0)
        self.at += len(data)
        return self.offsets[-1]

    def finish_file(self) -> None:
        with (self.root / "commitlog" / f"{self._base:020d}").open("wb") as file:
            file.write(self._data)
            file.truncate(SEGMENT)
        self._base += SEGMENT
        self.at, self._data = self._base, bytearray()

    def close(self) -> StoreFiles:
        if self._data:
            self.finish_file()
        for topic, units in self._queues.items() if self._with_queues else ():
            folder = self.root / "consumequeue" / topic / "0"
            folder.mkdir(parents=True)
            for base in range(0, max(units) + 1, UNITS):
                part = b"".join(units.get(number, bytes(20)) for number in range(base, base + UNITS))
                (folder / f"{base * 20:020d}").write_bytes(part)
        return StoreFiles.open(self.root)


def found_in(store: StoreFiles, parts: list[Range]) -> list[int]:
    return [
        offset
        for part in parts
        for walk in walks(store, part, check_crc=True)
        for offset in walk.records.physical_offset.tolist()
    ]


def check(store: StoreFiles, writer: Writer, parts: list[Range]) -> None:
    """Check that ranges cover the log, each starts with a record, and all records are found through them."""
    assert {part.start for part in parts} <= set(writer.offsets)
    assert found_in(store, parts) == writer.offsets
    for one, following in itertools.pairwise(parts):
        assert one.end == following.start or following.start % SEGMENT == 0


@pytest.mark.parametrize("with_queues", [True, False])
def test_several_files_are_cut_at_records(tmp_path: Path, *, with_queues: bool) -> None:
    chance, writer = random.Random(1), Writer(tmp_path, with_queues=with_queues)
    for number in range(400):
        writer.add(message(number, chance.randbytes(chance.choice((0, 10, 5000, 300_000)))))
    store = writer.close()
    parts = plan(store, 4 << 20)
    assert len(parts) >= 7
    assert all(part.end - part.start <= 6 << 20 or part.end % SEGMENT == 0 for part in parts)
    check(store, writer, parts)
    assert all(damages_of(store, part, check_crc=True) == [] for part in parts)
    assert plan(store, 1 << 30) == [
        Range(base, min(base + SEGMENT, store.readable_end)) for base in range(FIRST, store.readable_end, SEGMENT)
    ]


def fill(writer: Writer, to: int, number: int = 0) -> int:
    """Append plain messages until the log ends behind a physical offset; return the next queue offset."""
    while writer.at < to:
        writer.add(message(number, b"\x11" * 3000))
        number += 1
    return number


def forged_in(writer: Writer, number: int, one: StoredMessage, *, count: int = 1) -> int:
    """Append a message whose body has whole records, each with the physical offset that it gets there; return that of
    the first."""
    at = first = writer.at + 88 + 500
    body = bytearray(b"\x11" * 500)
    for _ in range(count):
        one.physical_offset = at
        body += record.encode(one)
        at += len(record.encode(one))
    assert writer.add(message(number, bytes(body) + b"\x11" * 500)) == first - 588
    return first


@pytest.mark.parametrize(
    ("topic", "queue_offset", "with_queues", "count"),
    [
        ("orders", 3, True, 1),  # the consume queue has another record there
        ("orders", 999_999, True, 1),  # it has none there
        ("nobody", 0, True, 1),  # there is no such queue
        ("nobody", 0, True, 30),  # and records follow it that look as right
        ("orders", 3, False, 1),  # there are no consume queues at all
        ("orders", 3, False, 30),
        ("nobody", 0, True, 400),  # more of them than anybody would follow
        ("orders", 3, False, 400),
        ("compacted", 0, True, 1),  # its queue has a unit there of a record that is gone
        ("no\0body", 0, True, 1),  # a topic that can be no directory
        ("../orders", 0, True, 1),
        ("n" * 250, 0, True, 1),
    ],
)
def test_a_record_in_a_body_is_no_boundary(
    tmp_path: Path, topic: str, queue_offset: int, count: int, *, with_queues: bool
) -> None:
    writer = Writer(tmp_path, with_queues=with_queues)
    writer._queues["compacted"] = {0: struct.pack(">qiq", FIRST, 1, 0)}
    # The cut is looked for from 4 MiB on, in the middle of the message with the forged record.
    number = fill(writer, FIRST + CHUNK_SIZE - 3300)
    while writer.at + 500 < FIRST + CHUNK_SIZE - 88:
        writer.add(message(number, b"\x22" * 50))
        number += 1
    assert writer.at < FIRST + CHUNK_SIZE < writer.at + 588 + 100
    forged = forged_in(writer, number, message(queue_offset, b"I am a record", topic), count=count)
    assert forged >= FIRST + CHUNK_SIZE
    fill(writer, FIRST + 3 * CHUNK_SIZE, number + 1)
    store = writer.close()
    parts = plan(store, CHUNK_SIZE)
    assert len(parts) >= 2
    assert forged not in {part.start for part in parts}
    check(store, writer, parts)
    # It looks like a record, or the test would prove nothing.
    data = np.zeros(4096, np.uint8)
    segment = store.segments[0]
    data[:3000] = np.frombuffer(store.read(segment.path, forged - FIRST, 3000), np.uint8)
    assert next(starts_in(data, forged, 3000)) == 0


def test_bodies_full_of_records_are_no_boundaries(tmp_path: Path) -> None:
    """Bodies full of records are no boundaries, as written by a client that sends the largest messages one after the
    other; it knows the offsets from the answers."""
    writer = Writer(tmp_path)
    number = fill(writer, FIRST + 1_000_000)
    forged = message(0, b"", "nobody")
    for _ in range(4):
        forged_in(writer, number, forged, count=3_500_000 // len(record.encode(forged)))
        number += 1
    fill(writer, FIRST + SEGMENT - 3500, number)
    store = writer.close()
    for size in (CHUNK_SIZE, 5 << 20, 7 << 20):
        check(store, writer, plan(store, size))


def test_a_damaged_boundary_is_stepped_over(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    fill(writer, FIRST + 3 * CHUNK_SIZE)
    at = next(offset for offset in writer.offsets if offset >= FIRST + CHUNK_SIZE)
    following = writer.offsets[writer.offsets.index(at) + 1]
    store = writer.close()
    path = tmp_path / "commitlog" / f"{FIRST:020d}"
    with path.open("r+b") as file:
        file.seek(at - FIRST)
        file.write(b"\xff" * 40)
    parts = plan(store, CHUNK_SIZE)
    assert parts[1].start == following
    writer.offsets.remove(at)
    check(store, writer, parts)
    (damage,) = [damage for part in parts for damage in damages_of(store, part, check_crc=True)]
    assert (damage.physical_offset, damage.size) == (at, following - at)


def test_damage_over_whole_ranges_is_told(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    fill(writer, FIRST + 4 * CHUNK_SIZE)
    store = writer.close()
    first, last = writer.offsets[10], writer.offsets[-20]
    with (tmp_path / "commitlog" / f"{FIRST:020d}").open("r+b") as file:
        file.seek(first - FIRST)
        file.write(bytes(last - first))
    parts = plan(store, CHUNK_SIZE)
    (damage,) = joined_damages([one for part in parts for one in damages_of(store, part, check_crc=True)])
    assert (damage.physical_offset, damage.size) == (first, last - first)
    assert found_in(store, parts) == writer.offsets[:10] + writer.offsets[-20:]


def test_zeros_are_damage_wherever_something_follows(tmp_path: Path) -> None:
    """Zeros are damage wherever records follow, also if they are larger than a read and end at the end of a range:
    within a file, and over a whole file."""
    writer = Writer(tmp_path)
    number = fill(writer, FIRST + CHUNK_SIZE)
    first = writer.at
    writer.at += 3 * CHUNK_SIZE
    writer._data += bytes(3 * CHUNK_SIZE)
    number = fill(writer, FIRST + 2 * SEGMENT + 100_000, number)
    store = writer.close()
    expected = [(first, 3 * CHUNK_SIZE)]
    for with_file_of_zeros in (False, True):
        if with_file_of_zeros:
            (tmp_path / "commitlog" / f"{FIRST + SEGMENT:020d}").write_bytes(bytes(SEGMENT))
            expected.append((FIRST + SEGMENT, SEGMENT))
            writer.offsets = [at for at in writer.offsets if not FIRST + SEGMENT <= at < FIRST + 2 * SEGMENT]
        for size in (CHUNK_SIZE, 2 * CHUNK_SIZE, 1 << 30):
            parts = plan(store, size)
            found = joined_damages([one for part in parts for one in damages_of(store, part, check_crc=True)])
            assert [(one.physical_offset, one.size) for one in found] == expected
            assert found_in(store, parts) == writer.offsets


def test_a_part_of_the_log_can_be_asked_for(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    fill(writer, FIRST + 2 * CHUNK_SIZE)
    store = writer.close()
    start, end = writer.offsets[100], writer.offsets[2000]
    parts = plan(store, CHUNK_SIZE, start=start, end=end)
    assert (parts[0].start, parts[-1].end) == (start, end)
    assert found_in(store, parts) == writer.offsets[100:2000]
    assert plan(store, CHUNK_SIZE, start=store.readable_end) == []


def test_records_at_offsets(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    fill(writer, FIRST + SEGMENT + 100_000)
    store = writer.close()
    wanted = [*writer.offsets[5:8], writer.offsets[900], writer.offsets[-1]]
    sizes = [int(next(records_at(store, np.array([at]))).sizes[0]) for at in wanted]
    found = [at for records in at_offsets(store, np.array(wanted), np.array(sizes)) for at in records.physical_offset]
    assert found == wanted
    # An offset without a record gives none, and does not hide the others.
    wrong = np.array([FIRST - SEGMENT, wanted[0], wanted[1] + 7, wanted[3], FIRST + 9 * SEGMENT])
    assert [at for records in records_at(store, wrong) for at in records.physical_offset] == [wanted[0], wanted[3]]
    held = at_offsets(store, wrong, np.full(5, sizes[3]))
    assert [at for records in held for at in records.physical_offset] == [wanted[0], wanted[3]]


def test_the_time_of_a_range_is_its_first_records(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    writer.add(message(0, bytes(200_000)))  # more than is looked at first
    writer.add(message(1, b"x"))
    store = writer.close()
    assert first_store_ms(store, Range(FIRST, store.readable_end)) == 1000
    assert first_store_ms(store, Range(writer.offsets[1], store.readable_end)) == 1001
    assert first_store_ms(store, Range(writer.offsets[1] + 5, store.readable_end)) is None


def test_small_ranges_and_files_that_are_gone_are_told(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    writer.add(message(0, b"x"))
    store = writer.close()
    with pytest.raises(JobError, match="too small; at least 4194304"):
        plan(store, 1 << 20)
    with pytest.raises(JobError, match="was removed since the job was planned"):
        next(walks(store, Range(0, 100), check_crc=False))
