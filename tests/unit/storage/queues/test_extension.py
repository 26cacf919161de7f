"""Goal: consumequeue_ext has RocketMQ's layout, and whatever became of it, no reader sees a wrong tags code.

Method: stores in memory with small files. A reader of its own, written after RocketMQ's ConsumeQueueExt.java, looks
addresses up in the files, and the records of the commitlog tell the right tags codes.
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from duemq.protocol.records.properties import tags_code
from duemq.protocol.records.record import RecordSummary, decode_all
from duemq.protocol.topics import SCHEDULE_TOPIC, TIMER_TOPIC
from duemq.storage.durability.retention import RetentionConfig
from duemq.storage.errors import NotInMemory
from duemq.storage.files import OsFiles
from duemq.storage.log.copies import UNITS
from duemq.storage.log.segments import Segments
from duemq.storage.queues import extension
from duemq.storage.queues.consume_queue import UNIT, ConsumeQueue
from duemq.storage.queues.extension import EXT_ADDRESS_MAX
from duemq.storage.queues.pull import PullStatus
from duemq.storage.store import MessageStore
from tests.crash.simulated_files import SimulatedFiles
from tests.support.store import OwnedStore
from tests.support.store_problems import problems
from tests.unit.storage.conftest import LEVELS, NOW_MS, append, make_store

ROOT: Final = "/s/consumequeue_ext"
SIZE: Final = 1024
"""Bytes of a file of an extension here: room for 51 units."""
FIRST: Final = -(2**63)
DEFAULT_MS: Final = 10_000
"""The delay of a level by the table of those that do not know the broker's."""


def opened(files: SimulatedFiles, *, is_extended: bool = True, size: int = SIZE) -> MessageStore:
    files.after_kill()
    store = make_store("/s", files, segment_size=16384, is_extended=is_extended, extension_size=size)
    store.open()
    return store


def send(store: MessageStore, count: int, tags: str = "t", topic: str = "a", now_ms: int = NOW_MS) -> ConsumeQueue:
    for number in range(count):
        append(store, topic, 0, b"%d" % number, properties=f"TAGS\x01{tags}\x02".encode(), now_ms=now_ms)
    queue = store.ensure_queue(topic, 0)
    queue.write_tail()
    return queue


def stored_codes(files: SimulatedFiles, topic: str = "a", queue_id: int = 0) -> list[int]:
    """The tags codes of a queue's units as they are stored."""
    prefix = f"/s/consumequeue/{topic}/{queue_id}/"
    data = b"".join(bytes(files.names[path].data) for path in sorted(files.names) if path.startswith(prefix))
    return [code for _, size, code in UNIT.iter_unpack(data[: len(data) // 20 * 20]) if size]


def found_at(files: SimulatedFiles, address: int, topic: str = "a", queue_id: int = 0, size: int = SIZE) -> int | None:
    """The tags code at an address, as RocketMQ finds it."""
    number, at = divmod(address - FIRST, size)
    node = files.names.get(f"{ROOT}/{topic}/{queue_id}/{number * size:020}")
    if node is None:
        return None
    unit_size, code, _, _ = struct.unpack(">hqqh", bytes(node.data[at : at + 20]).ljust(20, b"\0"))
    return int(code) if unit_size > 0 else None


def walk(files: SimulatedFiles, topic: str = "a", queue_id: int = 0) -> Iterator[int]:
    """The addresses of all units, as RocketMQ's recovery finds them."""
    prefix = f"{ROOT}/{topic}/{queue_id}/"
    for path in sorted(path for path in files.names if path.startswith(prefix)):
        data, at = bytes(files.names[path].data), 0
        assert len(data) == SIZE
        while (size := int.from_bytes(data[at : at + 2], "big", signed=True)) > 0:
            yield int(path[-20:]) + at + FIRST
            at += size
        assert size in (0, -1)
        assert at <= SIZE - 4


def codes(queue: ConsumeQueue, offset: int = 0) -> list[int]:
    return [code for _, _, code in UNIT.iter_unpack(queue.read(offset, 10_000))]


# --- the layout


@given(batches=st.lists(st.integers(1, 70), min_size=1, max_size=6), restarts=st.sets(st.integers(0, 5)))
def test_units_lie_one_after_the_other_and_never_cross_files(batches: list[int], restarts: set[int]) -> None:
    files = SimulatedFiles()
    store = opened(files)
    for number, count in enumerate(batches):
        if number in restarts:
            store.abandon()
            store = opened(files)
        send(store, count, f"t{number}")
    addresses = stored_codes(files)
    assert addresses == list(walk(files))
    expected = [tags_code(f"t{number}") for number, count in enumerate(batches) for _ in range(count)]
    assert [found_at(files, address) for address in addresses] == expected
    assert codes(store.ensure_queue("a", 0)) == expected
    assert list(problems(store)) == []


def test_a_unit_has_the_store_time_of_its_record_whatever_the_hosts_are() -> None:
    files = SimulatedFiles()
    store = opened(files)
    send(store, 1, now_ms=NOW_MS + 5)
    store.appender.begin(NOW_MS + 9)
    store.appender.add(store.ensure_queue("a", 0), b"", b"", 0, 1 | 1 << 4, bytes(20))
    store.appender.commit()
    store.ensure_queue("a", 0).write_tail()
    data = bytes(files.names[f"{ROOT}/a/0/{0:020}"].data)
    assert struct.unpack_from(">hqqh", data) == (20, tags_code("t"), NOW_MS + 5, 0)
    assert struct.unpack_from(">hqqh", data, 20) == (20, 0, NOW_MS + 9, 0)


def test_without_the_property_nothing_is_written_and_what_is_there_is_read() -> None:
    files = SimulatedFiles()
    store = opened(files, is_extended=False)
    send(store, 3)
    assert not any("consumequeue_ext" in path for path in files.names)
    OwnedStore(store).stop()
    store = opened(files)
    send(store, 3)
    OwnedStore(store).stop()
    store = opened(files, is_extended=False)
    queue = send(store, 3)
    assert codes(queue) == [tags_code("t")] * 9
    stored = stored_codes(files)
    assert [code <= EXT_ADDRESS_MAX for code in stored] == [False] * 3 + [True] * 3 + [False] * 3


def test_units_with_bitmaps_as_rocketmq_writes_them_are_found() -> None:
    data, addresses = b"", []
    for number in range(30):
        bitmap = bytes([0xFF]) * (number % 9)
        addresses.append(len(data) + FIRST)
        data += struct.pack(">hqqh", 20 + len(bitmap), number % 2, NOW_MS, len(bitmap)) + bitmap
    found = extension.heads(np.array(addresses), lambda at, size: data[at : at + size])
    assert found["tags_code"].tolist() == [0, 1] * 15


@pytest.mark.parametrize(("at", "size"), [(0, 100), (5, 60), (12, 8), (20, 40), (35, 50), (60, 10)])
def test_files_with_gaps_read_as_zeros_in_between(at: int, size: int) -> None:
    files = {"b": bytes(range(10, 20)), "c": bytes(range(30, 40)), "d": bytes(range(40, 50))}
    names = [(10, "b"), (30, "c"), (40, "d")]
    whole = bytes(10) + files["b"] + bytes(10) + files["c"] + files["d"]
    found = extension.read_of(names, lambda path, at, size: files[path][at : at + size], at, size)
    assert found[: max(0, 50 - at)].rstrip(b"\0") == whole[at : at + size].rstrip(b"\0")
    assert len(found) <= size


def level_codes(
    content: bytes,
    records: Sequence[RecordSummary | None],
    delay_ms: int | None,
    addresses: Sequence[int] | None = None,
) -> list[int]:
    """The codes of a level's units, one for each record; `content`: of the extension."""

    def own(told: RecordSummary) -> int:
        stored, prepared, _ = told
        return prepared if prepared > stored else stored + (delay_ms if delay_ms is not None else DEFAULT_MS)

    units = np.zeros(len(records), UNITS)
    units["tags_code"] = addresses if addresses is not None else FIRST + 20 * np.arange(len(records))
    found = extension.tags_codes_of(
        units, lambda _: records, own, lambda at, size: content[at : at + size], is_level=True, delay_ms=delay_ms
    )
    return [int(code) for code in found]


@given(
    st.lists(
        st.tuples(
            st.sampled_from([NOW_MS, NOW_MS + 1, 0, -5]),  # the record's store time
            st.sampled_from([NOW_MS, NOW_MS + 1, 0, -5]),  # that in the extension
            st.sampled_from([5000, 3_600_000, 1000, 0, -5000, 4999, 5001, 2**40]),  # the delay there
            st.sampled_from([0, 0, 0, 1, -20]),  # what is wrong with the size
            st.sampled_from([0, 0, 1234]),  # a promise in the record, behind its store time
            st.booleans(),
        ),
        max_size=12,
    )
)
def test_a_levels_deliver_time_is_that_in_the_record_or_the_extension_or_is_computed_anew(
    drawn: list[tuple[int, int, int, int, int, bool]],
) -> None:
    content, records, expected = b"", list[RecordSummary | None](), list[int]()
    for number, (stored, time, delay, wrong, promise, is_there) in enumerate(drawn):
        content += struct.pack(">hqqh", 20 + wrong, time + delay, time, 0)
        records.append(RecordSummary(stored, stored + (promise or -1), "") if is_there else None)
        is_right = stored == time > 0 and wrong == 0 and delay in (5000, 3_600_000, 1000)
        if not is_there:
            expected.append(FIRST + 20 * number)
        elif promise:
            expected.append(stored + promise)
        else:
            expected.append(stored + delay if is_right else stored + 5000)
    assert level_codes(content, records, 5000) == expected


def test_where_the_delay_of_the_level_is_not_known_whole_seconds_are_believed() -> None:
    content = struct.pack(">hqqh", 20, NOW_MS + 7000, NOW_MS, 0) + struct.pack(">hqqh", 20, NOW_MS + 7001, NOW_MS, 0)
    assert level_codes(content, [RecordSummary(NOW_MS, 0, "")] * 2, None) == [NOW_MS + 7000, NOW_MS + DEFAULT_MS]


@pytest.mark.parametrize("seconds", [92, 28, 124, 8252])
def test_the_deliver_times_of_another_table_are_believed_however_alike_they_are(seconds: int) -> None:
    """For most store times, one byte tells a delay of 60 s from one that differs by 32 s."""
    stored = [NOW_MS + 16 * n for n in range(2000)]
    content = b"".join(struct.pack(">hqqh", 20, at + 1000 * seconds, at, 0) for at in stored)
    found = level_codes(content, [RecordSummary(at, 0, "") for at in stored], 60_000)
    assert found == [at + 1000 * seconds for at in stored]


# --- cuts, damage, failures


@pytest.mark.parametrize("lost", ["all", "queue"])
@pytest.mark.parametrize("is_extended", [True, False])
def test_a_lost_extension_changes_no_code(lost: str, *, is_extended: bool) -> None:
    """Also where nothing is to be written, so that no extension is looked for."""
    files = SimulatedFiles()
    store = opened(files)
    append(store, SCHEDULE_TOPIC, 1, b"", properties=b"DELAY\x012\x02")
    store.ensure_queue(SCHEDULE_TOPIC, 1).write_tail()
    send(store, 3)
    OwnedStore(store).stop()
    for topic, queue_id in [("a", 0), (SCHEDULE_TOPIC, 1)]:
        assert stored_codes(files, topic, queue_id)[0] <= EXT_ADDRESS_MAX
        files.remove_tree(ROOT if lost == "all" else f"{ROOT}/{topic}/{queue_id}")
    store = opened(files, is_extended=is_extended)
    level = store.ensure_queue(SCHEDULE_TOPIC, 1)
    assert codes(level) == [NOW_MS + LEVELS.delay_ms(2)]
    unit = level.unit(0)
    assert unit is not None
    assert unit[2] == NOW_MS + LEVELS.delay_ms(2)
    assert codes(store.ensure_queue("a", 0)) == [tags_code("t")] * 3
    OwnedStore(store).stop()


def test_where_the_last_files_are_lost_the_others_stay_and_nothing_more_is_written() -> None:
    files = SimulatedFiles()
    store = opened(files)
    send(store, 120)
    OwnedStore(store).stop()
    paths = sorted(path for path in files.names if path.startswith(f"{ROOT}/a/0/"))
    files.remove(paths[-1])
    store = opened(files)
    queue = send(store, 3, "u")
    assert sorted(path for path in files.names if path.startswith(f"{ROOT}/a/0/")) == paths[:-1]
    assert codes(queue) == [tags_code("t")] * 120 + [tags_code("u")] * 3
    assert stored_codes(files)[-3:] == [tags_code("u")] * 3, "written without the extension"
    OwnedStore(store).stop()


@pytest.mark.parametrize("is_extended", [True, False])
def test_files_that_cannot_be_written_are_read(tmp_path: Path, *, is_extended: bool) -> None:
    """A deliver time of RocketMQ's that nothing else tells is in them."""
    store = make_store(tmp_path, segment_size=16384, is_extended=True)
    store.open()
    append(store, SCHEDULE_TOPIC, 1, b"", properties=b"DELAY\x012\x02")
    store.ensure_queue(SCHEDULE_TOPIC, 1).write_tail()
    OwnedStore(store).stop()
    (path,) = (tmp_path / "consumequeue_ext" / SCHEDULE_TOPIC / "1").iterdir()
    data = bytearray(path.read_bytes())
    data[2:10] = struct.pack(">q", NOW_MS + 3_600_000)
    path.write_bytes(data)

    class ReadOnly(OsFiles):
        def open_descriptor(self, path: str, flags: int, mode: int = 0o644) -> int:
            if "consumequeue_ext" in path and flags & os.O_ACCMODE != os.O_RDONLY:
                raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)
            return super().open_descriptor(path, flags, mode)

    store = make_store(tmp_path, ReadOnly(), segment_size=16384, is_extended=is_extended)
    store.open()
    level = store.ensure_queue(SCHEDULE_TOPIC, 1)
    assert codes(level) == [NOW_MS + 3_600_000]
    append(store, SCHEDULE_TOPIC, 1, b"", properties=b"DELAY\x012\x02")
    level.write_tail()
    assert codes(level) == [NOW_MS + 3_600_000, NOW_MS + LEVELS.delay_ms(2)]
    OwnedStore(store).stop()


def test_without_room_for_the_extension_the_queue_goes_on() -> None:
    files = SimulatedFiles()
    store = opened(files)
    send(store, 5)
    files.fail("write", errno.ENOSPC, ROOT)
    assert codes(send(store, 5, "u")) == [tags_code("t")] * 5 + [tags_code("u")] * 5
    owned = OwnedStore(store)
    owned.flush()
    owned.checkpoint()
    files.heal()
    send(store, 5, "v")
    stored = stored_codes(files)
    assert [code <= EXT_ADDRESS_MAX for code in stored] == [True] * 5 + [False] * 5 + [True] * 5
    assert [code for code in stored if code <= EXT_ADDRESS_MAX] == list(walk(files))
    owned.stop()


@given(st.lists(st.sampled_from(["send", "send", "write", "kill", "checkpoint", "off", "on", "cut"]), max_size=25))
def test_whatever_happens_the_addresses_lead_to_the_right_tags(steps: list[str]) -> None:
    files = SimulatedFiles()
    is_extended = True
    store = opened(files)
    owned = OwnedStore(store)
    for number, step in enumerate(steps):
        if step == "send":
            append(store, "a", 0, *[b"x"] * (1 + number % 40), properties=f"TAGS\x01t{number}\x02".encode())
        elif step == "write":
            store.ensure_queue("a", 0).write_tail()
        elif step == "checkpoint":
            owned.flush()
            owned.checkpoint()
        else:
            is_extended = {"off": False, "on": True}.get(step, is_extended)
            store.abandon()
            if step == "cut" and (paths := [path for path in files.names if "/consumequeue/a/" in path]):
                files.remove(paths[-1])
            store = opened(files, is_extended=is_extended)
            owned = OwnedStore(store)
    owned.flush()
    owned.checkpoint()
    assert list(problems(store)) == []
    addresses = [code for code in stored_codes(files) if code <= EXT_ADDRESS_MAX]
    assert addresses == sorted(set(addresses))


def test_a_checkpoint_after_the_extension_went_with_its_queue() -> None:
    """The queue is made again without it, as the property is off by then: no directory is left to sync."""
    files = SimulatedFiles()
    store = opened(files)
    send(store, 1)
    OwnedStore(store).stop()
    files.remove(f"/s/consumequeue/a/0/{0:020}")
    store = opened(files, is_extended=False)
    OwnedStore(store).stop()
    assert list(problems(store)) == []
    assert not files.exists("/s/consumequeue_ext/a/0")


@given(at=st.integers(0, 20 * 40 - 1), mask=st.integers(1, 255))
def test_a_wrong_byte_changes_no_tags(at: int, mask: int) -> None:
    files = SimulatedFiles()
    store = opened(files)
    send(store, 20)
    queue = send(store, 20, "u")
    files.names[f"{ROOT}/a/0/{0:020}"].data[at] ^= mask
    assert codes(queue) == [tags_code("t")] * 20 + [tags_code("u")] * 20


@given(at=st.integers(0, 20 * 40 - 1), mask=st.integers(1, 255), delay_ms=st.sampled_from([1000, 5000, 7_200_000]))
def test_no_level_sees_a_due_time_of_a_flipped_byte(at: int, mask: int, delay_ms: int) -> None:
    data = bytearray(b"".join(struct.pack(">hqqh", 20, NOW_MS + n + delay_ms, NOW_MS + n, 0) for n in range(40)))
    data[at] ^= mask
    found = level_codes(bytes(data), [RecordSummary(NOW_MS + n, 0, "") for n in range(40)], delay_ms)
    right = [NOW_MS + n + delay_ms for n in range(40)]
    changed = int.from_bytes(data[at // 20 * 20 + 2 :][:8], "big", signed=True)
    if 2 <= at % 20 < 10 and not (changed - right[at // 20]) % 1000 and 0 < changed - NOW_MS < 3 * 365 * 86_400_000:
        right[at // 20] = changed  # as a table whose level is 32 s longer or shorter, or a multiple, would make it
    assert found == right


def test_files_that_were_exchanged_change_no_tags() -> None:
    files = SimulatedFiles()
    store = opened(files)
    for number in range(40):
        for queue_id in (0, 1):
            tags = "ab"[(number + queue_id) % 2]
            append(store, "a", queue_id, b"x", properties=f"TAGS\x01{tags}\x02".encode())
    OwnedStore(store).stop()
    first, second = (files.names[f"{ROOT}/a/{queue_id}/{0:020}"].data for queue_id in (0, 1))
    first[:], second[:] = bytes(second), bytes(first)
    store = opened(files)
    for queue_id in (0, 1):
        assert store.find("a", queue_id, 0, 100, 1 << 20, frozenset({tags_code("a")})).count == 20


@pytest.mark.parametrize("bit", [3, 6, 11, 14])
def test_a_wrong_size_of_the_last_unit_makes_the_extension_go_on_with_a_new_file(bit: int) -> None:
    files = SimulatedFiles()
    store = opened(files)
    send(store, 5)
    OwnedStore(store).stop()
    files.names[f"{ROOT}/a/0/{0:020}"].data[4 * 20 + 1 - bit // 8] ^= 1 << bit % 8
    store = opened(files)
    queue = send(store, 100, "u")
    assert codes(queue) == [tags_code("t")] * 5 + [tags_code("u")] * 100
    assert stored_codes(files)[5] == FIRST + SIZE
    OwnedStore(store).stop()


@pytest.mark.parametrize("is_extended", [True, False])
def test_files_that_cannot_be_read_stop_no_message(*, is_extended: bool) -> None:
    files = SimulatedFiles()
    store = opened(files)
    append(store, SCHEDULE_TOPIC, 1, b"", properties=b"DELAY\x012\x02")
    level = store.ensure_queue(SCHEDULE_TOPIC, 1)
    level.write_tail()
    send(store, 5)
    OwnedStore(store).stop()
    files.fail("read", errno.EIO, ROOT)
    store = opened(files, is_extended=is_extended)
    queue = send(store, 5, "u")
    assert codes(queue) == [tags_code("t")] * 5 + [tags_code("u")] * 5
    assert codes(store.ensure_queue(SCHEDULE_TOPIC, 1)) == [NOW_MS + LEVELS.delay_ms(2)]
    files.heal()
    OwnedStore(store).stop()


@pytest.mark.parametrize("at", ["", "a", "a/0"])
def test_a_file_in_the_place_of_a_directory_stops_no_message(tmp_path: Path, at: str) -> None:
    wrong = tmp_path / "consumequeue_ext" / at
    wrong.parent.mkdir(parents=True, exist_ok=True)
    wrong.write_bytes(b"x")
    for number, tags in enumerate("tu"):
        store = make_store(tmp_path, segment_size=16384, is_extended=True)
        with capture_logs() as logs:
            store.open()
            queue = send(store, 3, tags)
        assert [line["event"] for line in logs].count("consumequeue_ext_passed_over") == 1
        owned = OwnedStore(store)
        owned.flush()
        owned.checkpoint()
        assert codes(queue) == [tags_code(each) for each in "tu"[: number + 1] for _ in range(3)]
        assert queue.read_stored(0, 9) == queue.read(0, 9)
        owned.stop()
    store = make_store(tmp_path, segment_size=16384, is_extended=True)
    store.open()
    owned = OwnedStore(store)
    results: list[Exception | None] = []
    owned.durability.remove_topic("a", results.append)
    while owned.workers.run_one():
        pass
    assert results == [None]
    assert not (tmp_path / "consumequeue" / "a").exists()
    assert wrong.exists() == (at == "")


@pytest.mark.parametrize("damage", ["removed", "zeroed", "end zeroed"])
def test_where_the_end_is_lost_the_extension_goes_on_without_using_an_address_twice(damage: str) -> None:
    files = SimulatedFiles()
    store = opened(files)
    send(store, 120)
    OwnedStore(store).stop()
    paths = sorted(path for path in files.names if path.startswith(f"{ROOT}/a/0/"))
    for path in paths[1 if damage != "end zeroed" else 2 :]:
        if damage == "removed":
            files.remove(path)
        else:
            files.names[path].data[:] = bytes(SIZE)
    store = opened(files)
    queue = send(store, 60, "u")
    addresses = [code for code in stored_codes(files) if code <= EXT_ADDRESS_MAX]
    assert addresses == sorted(set(addresses))
    assert codes(queue)[-60:] == [tags_code("u")] * 60, damage
    assert {code for code in codes(queue)[:-60] if code > EXT_ADDRESS_MAX} <= {tags_code("t")}


@pytest.mark.parametrize("last", [EXT_ADDRESS_MAX, EXT_ADDRESS_MAX - 2000, -(2**40), FIRST + 2**50, FIRST])
def test_a_damaged_last_address_does_no_harm(last: int) -> None:
    files = SimulatedFiles()
    store = opened(files)
    send(store, 10)
    OwnedStore(store).stop()
    data = files.names[f"/s/consumequeue/a/0/{0:020}"].data
    data[9 * 20 + 12 : 10 * 20] = struct.pack(">q", last)
    files.remove("/s/queuecheck")
    store = opened(files)
    queue = send(store, 60, "u")
    assert codes(queue)[-60:] == [tags_code("u")] * 60
    new = [code for code in stored_codes(files)[10:] if code <= EXT_ADDRESS_MAX]
    assert new == sorted(set(new))
    assert not set(new) & set(stored_codes(files)[:10])


def test_the_first_write_after_a_start_waits_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is made by watchers, which must not raise, also where a step may not wait."""
    files = SimulatedFiles()
    store = opened(files)
    send(store, 10)
    OwnedStore(store).stop()
    store = opened(files)
    read = Segments.read

    def read_cold(segments: Segments, offset: int, size: int) -> bytes:
        if not files.may_wait:
            raise NotInMemory(segments.directory, None, lambda: b"")
        return read(segments, offset, size)

    monkeypatch.setattr(Segments, "read", read_cold)
    files.may_wait = False
    append(store, "a", 0, b"x", properties=b"TAGS\x01t\x02")
    store.ensure_queue("a", 0).write_tail()
    assert not files.may_wait
    assert stored_codes(files) == list(walk(files))


@pytest.mark.parametrize("fault", ["size", "gap", "name"])
def test_files_that_are_not_as_they_should_be_are_passed_over(fault: str) -> None:
    files = SimulatedFiles()
    store = opened(files)
    send(store, 120)
    OwnedStore(store).stop()
    paths = sorted(path for path in files.names if path.startswith(f"{ROOT}/a/0/"))
    if fault == "gap":
        files.remove(paths[1])
    elif fault == "name":
        files.create(f"{ROOT}/a/0/notes", 3)
    with capture_logs() as logs:
        store = opened(files, size=2048 if fault == "size" else SIZE)
    assert [line["event"] for line in logs].count("consumequeue_ext_passed_over") == 1
    queue = send(store, 3)
    assert codes(queue) == [tags_code("t")] * 123
    assert stored_codes(files)[-3:] == [tags_code("t")] * 3, "written without the extension"


def test_a_failed_write_of_the_queue_is_repeated_at_the_same_position() -> None:
    files = SimulatedFiles()
    store = opened(files)
    send(store, 10)
    append(store, "a", 0, *[b"x"] * 45, properties=b"TAGS\x01t\x02")
    queue = store.ensure_queue("a", 0)
    files.fail("write", errno.ENOSPC, "/s/consumequeue/a")
    with pytest.raises(OSError, match=r".*"):
        queue.write_tail()
    files.heal()
    queue.write_tail()
    assert stored_codes(files) == list(walk(files))
    assert list(problems(store)) == []


def test_a_read_that_may_not_wait_says_so() -> None:
    read = NotInMemory("x", None, lambda: b"")

    def fail(*_: object) -> Any:
        raise read

    units = np.zeros(2, UNITS)
    units["tags_code"] = FIRST
    with pytest.raises(NotInMemory):
        extension.tags_codes_of(units, fail, lambda _: 0, lambda *_: b"", is_level=False)
    with pytest.raises(NotInMemory):
        extension.tags_codes_of(units, lambda _: [None, None], lambda _: 0, fail, is_level=True)


@given(st.lists(st.one_of(st.integers(-(2**63), 2**63 - 1), st.integers(-(2**31) - 3, 2**31)), max_size=40))
def test_addresses_are_the_codes_that_no_int_has(codes: list[int]) -> None:
    units = b"".join(UNIT.pack(7, 100, code) for code in codes)
    assert extension.has_addresses(units) == any(code <= -(2**31) - 1 for code in codes)


# --- what uses it


def pulled(store: MessageStore, tags: str, max_size: int = 1 << 20) -> tuple[list[int], int]:
    """The queue offsets of all messages with a tag, and the number of pulls that it takes to find them."""
    offset, pulls, found = 0, 0, list[int]()
    while (result := store.find("a", 0, offset, 100, max_size, frozenset({tags_code(tags)}))).next_offset > offset:
        if result.status is PullStatus.FOUND:
            found += [message.queue_offset for message in decode_all(bytes(store.read(result.ranges) or b""))]
        offset, pulls = result.next_offset, pulls + 1
    assert result.status is PullStatus.OFFSET_OVERFLOW_ONE
    return found, pulls


def test_pulls_with_tags_skip_other_messages_also_where_the_extension_is_lost() -> None:
    files = SimulatedFiles()
    store = opened(files)
    send(store, 40)
    send(store, 40, "u")
    send(store, 1)
    assert pulled(store, "u") == (list(range(40, 80)), 2)
    for path in [path for path in files.names if path.startswith(ROOT)]:
        files.names[path].data[:] = bytes(SIZE)
    assert pulled(store, "u") == (list(range(40, 80)), 2)


def test_a_pull_reads_few_records_to_find_tags(monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened(SimulatedFiles())
    queue = send(store, 300)
    send(store, 1, "u")
    read, counts = ConsumeQueue.read, list[int]()

    def counted(queue: ConsumeQueue, offset: int, count: int) -> bytes:
        counts.append(count)
        return read(queue, offset, count)

    monkeypatch.setattr(ConsumeQueue, "read", counted)
    assert pulled(store, "u")[0] == [300]
    assert max(counts) == 64
    counts.clear()
    unit = queue.unit(0)
    assert unit is not None
    assert pulled(store, "u", max_size=3 * unit[1] + 1)[0] == [300]
    assert max(counts) == 3
    counts.clear()
    assert pulled(store, "t", max_size=1) == (list(range(300)), 301)
    assert set(counts) == {1}


def test_units_that_would_not_be_believed_stay_as_they_are() -> None:
    files = SimulatedFiles()
    store = opened(files)
    append(store, SCHEDULE_TOPIC, 1, b"", properties=b"DELAY\x012\x02")
    level = store.ensure_queue(SCHEDULE_TOPIC, 1)
    store.appender.begin(NOW_MS)
    store.appender.add(level, b"", b"", NOW_MS + 4999, 1, bytes(8))
    timers = store.ensure_queue(TIMER_TOPIC, 0)
    store.appender.add(timers, b"", b"", NOW_MS + 77, 1, bytes(8))
    store.appender.commit()
    level.write_tail()
    timers.write_tail()
    first, second = stored_codes(files, SCHEDULE_TOPIC, 1)
    assert (first, second) == (FIRST, NOW_MS + 4999)
    assert codes(level) == [NOW_MS + LEVELS.delay_ms(2), NOW_MS + 4999]
    assert [level.unit(number) for number in (0, 1, 2)] == [*UNIT.iter_unpack(level.read(0, 2)), None]
    assert stored_codes(files, TIMER_TOPIC) == [NOW_MS + 77]


ALWAYS_GOES: Final = RetentionConfig(reserved_hours=-1, delete_when=";".join(f"{hour:02}" for hour in range(24)))


@pytest.mark.parametrize("is_extended", [True, False])
def test_retention_removes_the_files_that_no_unit_needs(*, is_extended: bool) -> None:
    files = SimulatedFiles()
    store = opened(files)
    send(store, 200)
    OwnedStore(store).stop()
    store = opened(files, is_extended=is_extended)
    send(store, 400)
    owned = OwnedStore(store, retention=ALWAYS_GOES)
    owned.flush()
    owned.checkpoint()
    owned.expire()
    begin = store.ensure_queue("a", 0).min_offset
    assert begin > 200
    names = sorted(path[-20:] for path in files.names if path.startswith(f"{ROOT}/a/0/"))
    if is_extended:
        address = stored_codes(files)[begin - min(int(p[-20:]) // 20 for p in files.names if "/consumequeue/a" in p)]
        assert names[0] == f"{(address - FIRST) // SIZE * SIZE:020}"
    else:
        assert names == []
    assert list(problems(store)) == []


def test_a_removed_topic_takes_its_extension_with_it() -> None:
    files = SimulatedFiles()
    store = opened(files)
    send(store, 3)
    send(store, 3, topic="b")
    owned = OwnedStore(store)
    owned.checkpoint()
    results: list[Exception | None] = []
    owned.durability.remove_topic("a", results.append)
    while owned.workers.run_one():
        pass
    assert results == [None]
    assert {path.split("/")[3] for path in files.names if path.startswith(ROOT)} == {"b"}
    queue = send(store, 2)
    assert stored_codes(files) == [FIRST, FIRST + 20]
    assert codes(queue) == [tags_code("t")] * 2


def test_what_is_left_of_a_removed_topics_extension_goes_at_the_next_start() -> None:
    files = SimulatedFiles()
    store = opened(files)
    send(store, 3)
    owned = OwnedStore(store)
    owned.flush()
    owned.checkpoint()
    files.fail("remove", errno.EACCES, f"{ROOT}/a")
    owned.durability.remove_topic("a", lambda error: None)
    owned.workers.run_one()
    assert any(path.startswith(f"{ROOT}/a/") for path in files.names)
    files.heal()
    store.abandon()
    opened(files)
    assert not any(path.startswith((f"{ROOT}/a/", "/s/consumequeue/a/")) for path in files.names)


def test_consume_queues_that_are_made_anew_begin_their_extensions_anew() -> None:
    files = SimulatedFiles()
    store = opened(files)
    send(store, 60)
    store.abandon()
    for path in [path for path in files.names if "/consumequeue/" in path]:
        files.remove(path)
    store = opened(files)
    assert stored_codes(files) == list(walk(files))
    assert len(stored_codes(files)) == 60
    assert list(problems(store)) == []
