"""The code that writes the files of a store: layout, offsets, records, units, index, hashes; each compared with a plain
way."""

from __future__ import annotations

import itertools
import os
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from duemq.protocol.records.properties import java_hash
from duemq.protocol.records.record import MAGIC_END, StoredMessage, decode, encode
from duemq.protocol.topics import SCHEDULE_TOPIC
from duemq.spark_jobs.columns.records import PADDING, Records
from duemq.spark_jobs.compact.decide import find_superseded
from duemq.spark_jobs.compact.scan import KEYED, LEVEL, PLAIN, TIMER_DELETE
from duemq.spark_jobs.errors import JobError
from duemq.spark_jobs.store.store_files import QueueFile
from duemq.spark_jobs.writers import commitlog, index, layout, queues
from duemq.spark_jobs.writers.hashes import key_hashes
from duemq.spark_jobs.writers.new_directory import NewDirectory
from duemq.spark_jobs.writers.spill import OffsetMap, load, save
from duemq.spark_jobs.writers.tasks import Processes
from duemq.storage.log.copies import UNITS
from duemq.storage.queues.consume_queue import FOLLOWING, PADDING_SIZE
from duemq.storage.queues.index_file import ITEM, java_hashes

HOSTS = (b"\x7f\0\0\x01\0\0\x04\xd2", bytes(15) + b"\x01\0\0\x04\xd2")


# --- layout


def laid_out_plainly(sizes: list[int], segment: int, begin: int) -> tuple[list[int], list[tuple[int, int]], int]:
    """The layout by RocketMQ's appends: offsets of the records, end markers, and the offset of the next one."""
    offsets, markers, position = [], [], begin
    for size in sizes:
        left = segment - position % segment
        if size + 8 > left:
            markers.append((position, left))
            position += left
        offsets.append(position)
        position += size
    return offsets, markers, position


@given(
    st.lists(st.lists(st.integers(91, 1000), max_size=12), max_size=8),
    st.integers(1008, 4000),
    st.integers(0, 3),
)
def test_records_go_where_rocketmq_would_append_them(parts: list[list[int]], segment: int, first: int) -> None:
    arrays = [np.array(sizes, np.int64) for sizes in parts]
    asked: list[int] = []

    def sizes_of(number: int) -> np.ndarray:
        asked.append(number)
        return arrays[number]

    found = layout.lay_out([(len(a), int(a.sum())) for a in arrays], sizes_of, segment, first * segment)
    offsets, markers, end = laid_out_plainly([size for sizes in parts for size in sizes], segment, first * segment)
    got = [layout.offsets(pieces, sizes).tolist() for pieces, sizes in zip(found.pieces, arrays, strict=True)]
    assert [offset for part in got for offset in part] == offsets
    assert found.markers == markers
    assert found.end == end
    assert len(asked) == len(set(asked)) <= len(markers)
    files = found.files(segment)
    assert files == list(range(first * segment, max(end, first * segment + 1), segment))


def test_a_record_larger_than_a_file_is_told() -> None:
    with pytest.raises(JobError, match="a record of 993 bytes"):
        layout.lay_out([(1, 993)], lambda _: np.array([993]), 1000, 0)


# --- offsets


@given(st.lists(st.integers(0, 1000), unique=True), st.lists(st.integers(0, 1000)), st.integers(0, 5))
def test_offsets_are_found_or_gone(
    tmp_path_factory: pytest.TempPathFactory, old: list[int], asked: list[int], cut: int
) -> None:
    directory = str(tmp_path_factory.mktemp("map"))
    old.sort()
    new = [offset * 3 + 7 for offset in old]
    OffsetMap.make(directory, len(old))
    cut = min(cut, len(old))
    for start, end in ((cut, len(old)), (0, cut)):
        OffsetMap.fill(directory, start, np.array(old[start:end], np.int64), np.array(new[start:end], np.int64))
    mapped = OffsetMap(directory).new(np.array(asked, np.int64))
    assert mapped.tolist() == [offset * 3 + 7 if offset in old else -1 for offset in asked]


def test_large_arrays_stay_in_their_file(tmp_path: Path) -> None:
    values = np.arange(1 << 18)
    save(str(tmp_path), "large", values)
    found = load(str(tmp_path), "large")
    assert isinstance(found, np.memmap)
    assert (found == values).all()


# --- records

messages = st.builds(
    StoredMessage,
    queue_id=st.integers(0, 9),
    queue_offset=st.integers(0, 1 << 40),
    physical_offset=st.just(0),
    sys_flag=st.sampled_from((0, 1, 8)),
    born_timestamp=st.integers(0, 1 << 42),
    born_host=st.sampled_from(HOSTS),
    store_timestamp=st.integers(0, 1 << 42),
    store_host=st.sampled_from(HOSTS),
    prepared_transaction_offset=st.sampled_from((0, -1, 100, 200, 300)),
    body=st.binary(max_size=300) | st.just(b"__CRC32#\x01"),
    topic=st.sampled_from(("T", "orders", "%RETRY%g")),
    properties_text=st.sampled_from(("", "KEYS\x01k\x02", "A\x01b\x02KEYS\x01x y\x02")),
)


@given(st.lists(st.tuples(messages, st.booleans()), min_size=1, max_size=20))
def test_records_keep_all_but_their_offsets(
    tmp_path_factory: pytest.TempPathFactory, drawn: list[tuple[StoredMessage, bool]]
) -> None:
    directory = tmp_path_factory.mktemp("patch")
    data, starts, sizes, before = b"", [], [], []
    for message, _ in drawn:
        message.physical_offset = 5000 + len(data)
        starts.append(len(data))
        record = encode(message)
        before.append(decode(record))
        sizes.append(len(record))
        data += record
    buffer = np.zeros(len(data) + PADDING, np.uint8)
    buffer[: len(data)] = np.frombuffer(data, np.uint8)
    keep = np.array([kept for _, kept in drawn])
    keep[0] = True
    kept_starts, kept_sizes = np.array(starts)[keep], np.array(sizes)[keep]
    new = 70_000 + np.cumsum(kept_sizes) - kept_sizes
    OffsetMap.make(str(directory), 2)
    OffsetMap.fill(str(directory), 0, np.array([0, 200]), np.array([11, 22]))
    records = Records(buffer, 5000, kept_starts)
    kinds = np.where(np.arange(len(new)) % 3 == 2, LEVEL, PLAIN).astype(np.uint8)
    commitlog.patch(records, new, kinds, OffsetMap(str(directory)))
    path = directory / "file"
    with path.open("wb") as file:
        commitlog.write(file.fileno(), 100, buffer, kept_starts, kept_sizes)
    written = path.read_bytes()[100:]
    assert len(written) == kept_sizes.sum()
    kept = [message for message, is_kept in zip(before, keep.tolist(), strict=True) if is_kept]
    for number, (old, at) in enumerate(zip(kept, new - 70_000, strict=True)):
        found = decode(written, int(at))
        expected = old.prepared_transaction_offset
        if kinds[number] == PLAIN and expected:
            # A removed record is -1, and 0 in a commit, whose field names its half message.
            expected = {-1: 11, 200: 22}.get(expected, 0 if old.sys_flag & 12 == 8 else -1)
        assert found.physical_offset == at + 70_000
        assert found.prepared_transaction_offset == expected
        for name in old.__struct_fields__:
            if name not in ("physical_offset", "prepared_transaction_offset"):
                assert getattr(found, name) == getattr(old, name)


def test_a_mark_keeps_saying_that_it_was_applied(tmp_path: Path) -> None:
    record = encode(
        StoredMessage(
            queue_id=0,
            born_timestamp=0,
            born_host=HOSTS[0],
            store_timestamp=0,
            store_host=HOSTS[0],
            body=b"0",
            topic="rmq_sys_wheel_timer",
            prepared_transaction_offset=300,
        )
    )
    buffer = np.concatenate([np.frombuffer(record, np.uint8), np.zeros(PADDING, np.uint8)])
    OffsetMap.make(str(tmp_path), 0)
    records = Records(buffer, 0, np.zeros(1, np.int64))
    commitlog.patch(records, np.array([9]), np.array([TIMER_DELETE], np.uint8), OffsetMap(str(tmp_path)))
    assert decode(buffer[: len(record)].tobytes()).prepared_transaction_offset == -1


def test_the_checksum_of_a_whole_record_is_renewed(tmp_path: Path) -> None:
    text = "A\x01b\x02__CRC32#\x010000000000\x02"
    message = StoredMessage(
        queue_id=0,
        born_timestamp=0,
        born_host=HOSTS[0],
        store_timestamp=0,
        store_host=HOSTS[0],
        body=b"body",
        topic="T",
        properties_text=text,
    )
    buffer = np.concatenate([np.frombuffer(encode(message), np.uint8), np.zeros(PADDING, np.uint8)])
    size = len(buffer) - PADDING
    OffsetMap.make(str(tmp_path), 0)
    commitlog.patch(
        Records(buffer, 0, np.zeros(1, np.int64)), np.array([77]), np.zeros(1, np.uint8), OffsetMap(str(tmp_path))
    )
    record = buffer[:size].tobytes()
    found = decode(record)
    assert found.physical_offset == 77
    digits = found.properties_text[-11:-1]
    assert int(digits[::-1]) == zlib.crc32(record[:-20]) & 0x7FFFFFFF
    assert found.properties_text[:-11] == text[:-11]


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b"__CRC32#\x01", ""),
        (b"__CRC32#\x010000", "A\x01b\x02"),
        (b"body", "A\x01b\x02X__CRC32#\x010000000000\x02"),
    ],
)
def test_what_only_looks_like_a_checksum_stays(body: bytes, text: str, tmp_path: Path) -> None:
    message = StoredMessage(
        queue_id=0,
        born_timestamp=0,
        born_host=HOSTS[0],
        store_timestamp=0,
        store_host=HOSTS[0],
        body=body,
        topic="%RETRY%g" if len(body) < 10 else "T",
        properties_text=text,
    )
    record = encode(message)
    buffer = np.concatenate([np.frombuffer(record, np.uint8), np.zeros(PADDING, np.uint8)])
    OffsetMap.make(str(tmp_path), 0)
    records = Records(buffer, 0, np.zeros(1, np.int64))
    commitlog.patch(records, np.array([0]), np.zeros(1, np.uint8), OffsetMap(str(tmp_path)))
    assert buffer[: len(record)].tobytes() == record


def test_many_slices_are_written_in_few_calls(tmp_path: Path) -> None:
    data = np.frombuffer(os.urandom(20_000), np.uint8).copy()
    starts = np.arange(0, 20_000, 10)
    with (tmp_path / "file").open("wb") as file:
        commitlog.write(file.fileno(), 0, data, starts, np.full(len(starts), 7))
    expected = b"".join(data[at : at + 7].tobytes() for at in starts)
    assert (tmp_path / "file").read_bytes() == expected


def test_files_have_their_size_and_end_markers(tmp_path: Path) -> None:
    plan = layout.lay_out([(3, 1800)], lambda _: np.full(3, 600), 1000, 1000)
    commitlog.make_files(str(tmp_path), plan, 1000)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{at:020}" for at in (1000, 2000, 3000)]
    data = (tmp_path / f"{1000:020}").read_bytes()
    assert len(data) == 1000
    assert data[600:608] == (400).to_bytes(4, "big") + MAGIC_END.to_bytes(4, "big")
    assert not any((tmp_path / f"{3000:020}").read_bytes())


# --- consume queues

SEGMENT = 1000
BEGIN = 2000
UNITS_A_FILE = 4


@given(st.lists(st.booleans(), min_size=1, max_size=14), st.sampled_from((SCHEDULE_TOPIC, "orders")), st.data())
def test_units_of_queues(
    tmp_path_factory: pytest.TempPathFactory, stays: list[bool], topic: str, data: st.DataObject
) -> None:
    """Units of queues, for any removed records: offsets ascend as searches need it, a removed record is not found, and
    the end stays."""
    if topic != SCHEDULE_TOPIC:
        stays[-1] = stays[-1] or any(stays)  # the last record is always kept
    directory = tmp_path_factory.mktemp("queue")
    old = np.arange(len(stays)) * 300 + 77
    steps = data.draw(st.lists(st.sampled_from((100, 700)), min_size=len(stays), max_size=len(stays)))
    moved = BEGIN + SEGMENT + np.cumsum(steps)
    kept = np.array(stays)
    OffsetMap.make(str(directory), int(kept.sum()))
    OffsetMap.fill(str(directory), 0, old[kept], moved[kept])
    units = np.zeros(len(stays), UNITS)
    units["physical_offset"], units["size"], units["tags_code"] = old, 95, np.arange(len(stays))
    files = [
        QueueFile(topic, 1, first, f"consumequeue/{topic}/1/{first * 20:020}", UNITS_A_FILE * 20)
        for first in range(0, len(stays), UNITS_A_FILE)
    ]

    def of_file(file: QueueFile) -> Any:
        return units[file.first_unit : file.first_unit + UNITS_A_FILE]

    store = SimpleNamespace(units=of_file, units_to_copy=of_file)
    out = directory / "new"
    written = queues.write(
        queues.QueueTask(store, [files], str(directory), str(out), BEGIN, SEGMENT)  # type: ignore[arg-type]
    )
    found = {}
    for path in (out / topic / "1").iterdir():
        assert path.stat().st_size == UNITS_A_FILE * 20
        content = np.frombuffer(path.read_bytes(), UNITS)
        for number, unit in enumerate(content.tolist()):
            if unit[1]:
                found[int(path.name) // 20 + number] = unit
    assert max(found) == len(stays) - 1  # the queue ends where it did
    assert written.units == kept.sum()
    if not any(stays):
        assert all(unit == (BEGIN - 1, 1, 0) for unit in found.values())
        return
    first = stays.index(True)
    assert written.holes == len(stays) - first - kept.sum()
    previous = -1
    for offset in sorted(found):
        physical, size, code = found[offset]
        if offset < first:
            assert (physical, size, code) == (0, PADDING_SIZE, 0)
            continue
        if not any(stays[offset:]):
            # Behind the last record, where cancelled ones are gone: no record, and still in order.
            last = len(stays) - 1 - stays[::-1].index(True)
            assert (physical, size, code) == (moved[last] + 94, 1, offset)
            continue
        following = int(next(at for at, stay in zip(moved[offset:], stays[offset:], strict=True) if stay))
        if stays[offset]:
            assert (physical, size, code) == (following, 95, offset)
        elif topic == SCHEDULE_TOPIC:
            # As the repair fills it in: a level's times stay in order.
            assert (physical, size, code) == (following, 1, stays.index(True, offset))
        else:
            # RocketMQ finds no record of that size from the start of a file on, and goes on with the next file.
            assert (size, code) == (PADDING_SIZE, FOLLOWING + following)
            assert physical % SEGMENT == 0
            assert physical >= BEGIN
            assert physical + SEGMENT <= following < physical + 2 * SEGMENT
        if topic == SCHEDULE_TOPIC:
            assert physical >= previous
            previous = physical


# --- index and hashes

texts = st.lists(st.text(max_size=40), max_size=30)


@given(texts, st.text(max_size=10))
def test_hashes_are_javas(drawn: list[str], start: str) -> None:
    encoded = [text.encode("utf-8", "replace") for text in drawn]
    sizes = np.array([len(text) for text in encoded], np.int64)
    data = np.frombuffer(b"".join(encoded) + b"\0", np.uint8)
    found = java_hashes(data, np.cumsum(sizes) - sizes, sizes, java_hash(start))
    assert found.tolist() == [java_hash(start + text.decode("utf-8")) for text in encoded]


@given(st.lists(st.binary(max_size=30), unique=True, max_size=60))
def test_keys_are_told_apart_by_their_hashes(keys: list[bytes]) -> None:
    sizes = np.array([len(key) for key in keys], np.int64)
    data = np.frombuffer(b"".join(keys) + b"\0", np.uint8)
    one, two = key_hashes(data, np.cumsum(sizes) - sizes, sizes)
    assert len(set(zip(one.tolist(), two.tolist(), strict=True))) == len(keys)
    assert len(set(one.tolist())) == len(keys)
    # The position of a key does not matter.
    moved = np.frombuffer(b"\xff" * 3 + b"".join(keys) + b"\0", np.uint8)
    again, _ = key_hashes(moved, np.cumsum(sizes) - sizes + 3, sizes)
    assert again.tolist() == one.tolist()


def test_an_index_has_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "MOST", 10)
    parts = [7, 0, 9, 12]
    at = itertools.count()
    for number, count in enumerate(parts):
        items = np.zeros(count, ITEM)
        values = np.array(list(itertools.islice(at, count)), np.int64)
        items["hash"], items["physical_offset"], items["store_ms"] = values % 3, 1000 + values, values * 1000
        save(str(tmp_path), f"{number}.items", items)
    tasks = index.plan(str(tmp_path), str(tmp_path), parts, 1_700_000_000.5)
    assert [(task.first, task.end) for task in tasks] == [(0, 10), (10, 20), (20, 28)]
    assert sorted(task.path for task in tasks) == [task.path for task in tasks]
    assert all(len(os.path.basename(task.path)) == 17 for task in tasks)
    for task in tasks:
        index.write(task)
        with open(task.path, "rb") as file:
            header = file.read(40)
            numbers = [int.from_bytes(header[at : at + 8], "big") for at in range(0, 32, 8)]
            last = task.end - 1
            assert numbers == [task.first * 1000, last * 1000, 1000 + task.first, 1000 + last]
            assert int.from_bytes(header[32:36], "big") == 3
            assert int.from_bytes(header[36:40], "big") == task.end - task.first + 1
            for slot in range(3):
                file.seek(40 + slot * 4)
                item = int.from_bytes(file.read(4), "big")
                found = []
                while item:
                    file.seek(40 + 20_000_000 + item * 20)
                    data = file.read(20)
                    assert int.from_bytes(data[:4], "big") == slot
                    found.append(int.from_bytes(data[4:12], "big") - 1000)
                    assert int.from_bytes(data[12:16], "big") == found[-1] - task.first
                    item = int.from_bytes(data[16:20], "big")
                assert found == [value for value in range(last, task.first - 1, -1) if value % 3 == slot]


# --- removals


@given(
    st.lists(st.tuples(st.integers(0, 1), st.one_of(st.none(), st.integers(0, 3))), max_size=25),
    st.integers(0, 10),
    st.booleans(),
)
def test_superseded_messages(
    tmp_path_factory: pytest.TempPathFactory, drawn: list[tuple[int, int | None]], expired: int, holes: bool
) -> None:
    directory = str(tmp_path_factory.mktemp("keys"))
    rows = np.zeros(len(drawn), KEYED)
    offsets = [0, 0]
    for number, (queue_id, key) in enumerate(drawn):
        row = rows[number]
        row["physical_offset"], row["queue_id"], row["queue_offset"] = number, queue_id, offsets[queue_id]
        row["has_key"], row["hash1"], row["hash2"] = key is not None, key or 0, 7
        offsets[queue_id] += 1
    save(directory, "0.keys", rows)
    save(directory, "deleted", np.empty(0, np.int64))
    kept = find_superseded(directory, range(1), expired_before=expired, units_per_file=4, holes=holes)
    found = set(load(directory, "superseded").tolist())
    superseded = {number for number, one in enumerate(drawn) if one[1] is not None and one in drawn[number + 1 :]}
    assert found <= superseded
    for queue_id in (0, 1):
        mine = [number for number, one in enumerate(drawn) if one[0] == queue_id]
        gone = [number in superseded or number < expired for number in mine]
        head = gone.index(False) if False in gone else len(gone)
        assert {mine[at] for at in range(head)} & superseded <= found
        for at, number in enumerate(mine[head:], start=head):
            assert (number in found) == (holes and number in superseded and at % 4 != 3)
    assert kept == len({number for number in superseded - found if number >= expired})


# --- new directories and tasks


def test_a_new_directory_is_whole_or_not_there(tmp_path: Path) -> None:
    new = NewDirectory(str(tmp_path / "a/new"))
    new.begin()
    (tmp_path / "a/new.partial/.scratch/x").write_text("x")
    with open(new.join("sub", "file"), "w") as file:
        file.write("content")
    assert not (tmp_path / "a/new").exists()
    new.finish()
    assert sorted(os.listdir(tmp_path / "a")) == ["new"]
    assert (tmp_path / "a/new/sub/file").read_text() == "content"
    assert os.listdir(tmp_path / "a/new") == ["sub"]
    new.give_up()
    assert (tmp_path / "a/new/sub/file").exists()


def test_what_an_interrupted_run_left_goes(tmp_path: Path) -> None:
    (tmp_path / "new.partial/commitlog").mkdir(parents=True)
    (tmp_path / "new.partial/commitlog/old").write_text("x")
    new = NewDirectory(str(tmp_path / "new"))
    new.begin()
    assert os.listdir(tmp_path / "new.partial") == [".scratch"]
    new.give_up()
    assert os.listdir(tmp_path) == []


def task(number: int) -> int:
    if number == 3:
        raise JobError("three is not wanted")
    return number * 2


def test_results_come_in_order_and_failures_in_one_line() -> None:
    processes = Processes(2)
    try:
        seen: list[int] = []
        assert processes.run(task, [4, 1, 2], seen.append) == [8, 2, 4]
        assert sorted(seen) == [2, 4, 8]
        with pytest.raises(JobError, match="three is not wanted"):
            processes.run(task, [1, 3, 2])
    finally:
        processes.close()
