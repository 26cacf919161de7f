from __future__ import annotations

import errno
from contextlib import suppress
from pathlib import Path
from typing import Never

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from duemq.protocol.records import record
from duemq.protocol.records.message_id import pack_host
from duemq.protocol.records.record import FLAG_BORN_IPV6, FLAG_COMPRESSED, FLAG_STORE_IPV6
from duemq.storage.errors import RecordIllegal, RecordTooLarge, StoreBroken, StoreClosed, StoreFull
from duemq.storage.log.copies import PackedRecords
from duemq.storage.log.scan import Scanner
from tests.crash.simulated_files import SimulatedFiles
from tests.support.store import OwnedStore
from tests.support.store_problems import problems
from tests.unit.storage.conftest import HOST, NOW_MS, append, make_store


def test_a_record_is_what_the_protocol_says(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    store.open()
    appender = store.appender
    assert appender.begin(1_700_000_000_123) == 1_700_000_000_123
    queue = store.ensure_queue("topic", 3)
    assert appender.add(queue, b"body", b"K\x01v", 77, 5, HOST, 6, 1, 8, 9) == 0
    appender.commit()
    expected = record.StoredMessage(
        queue_id=3,
        flag=6,
        sys_flag=1,
        born_timestamp=5,
        born_host=HOST,
        store_timestamp=1_700_000_000_123,
        store_host=pack_host("127.0.0.1", 10911),
        reconsume_times=8,
        prepared_transaction_offset=9,
        body=b"body",
        topic="topic",
        properties_text="K\x01v",
    )
    data = store.log.read(0, store.log.end)
    assert data == record.encode(expected)
    assert queue.unit(0) == (0, len(data), 77)


@pytest.mark.parametrize("born", ["10.1.2.3", "2001:db8::7"])
@pytest.mark.parametrize("stored", ["127.0.0.1", "2001:db8::1"])
def test_addresses_of_both_families(tmp_path: Path, born: str, stored: str) -> None:
    store = make_store(tmp_path, host=stored)
    store.open()
    store.appender.begin(NOW_MS)
    store.appender.add(store.ensure_queue("t", 0), b"x", b"", 0, 1, pack_host(born, 99))
    store.appender.commit()
    message = store.message_at(0)
    assert message is not None
    assert (message.born_host, message.store_host) == (pack_host(born, 99), pack_host(stored, 10911))
    assert message.size == store.log.end
    assert list(problems(store)) == []


@pytest.mark.parametrize("flags", [FLAG_BORN_IPV6, FLAG_STORE_IPV6, FLAG_BORN_IPV6 | FLAG_STORE_IPV6])
@pytest.mark.parametrize("stored", ["127.0.0.1", "2001:db8::1"])
def test_flags_are_of_the_addresses_that_are_written(tmp_path: Path, stored: str, flags: int) -> None:
    """A record that is made of another has the flags of its own addresses: the other may be of a broker with another
    kind of address."""
    store = make_store(tmp_path, host=stored)
    store.open()
    store.appender.begin(NOW_MS)
    store.appender.add(
        store.ensure_queue("t", 0), b"x", b"K\x01v", 0, 1, pack_host("10.1.2.3", 99), 0, flags | FLAG_COMPRESSED
    )
    store.appender.commit()
    message = store.message_at(0)
    assert message is not None
    assert (message.body, message.properties_text, message.store_host) == (b"x", "K\x01v", pack_host(stored, 10911))
    assert message.sys_flag == FLAG_COMPRESSED | (FLAG_STORE_IPV6 if ":" in stored else 0)
    assert list(problems(store)) == []


def test_a_record_never_crosses_files_and_8_bytes_remain_for_the_end_marker(tmp_path: Path) -> None:
    store = make_store(tmp_path, segment_size=32768)
    store.open()
    overhead = store.ensure_queue("t", 0).record_overhead
    fits = 32768 - 8 - overhead
    (first,) = append(store, "t", 0, bytes(10_000))
    (second,) = append(store, "t", 0, bytes(fits - 10_000 - overhead))
    assert (first, store.log.end) == (0, 32760)
    (third,) = append(store, "t", 0, b"next")
    assert third == 32768
    assert store.log.read_raw(32760, 8) == (8).to_bytes(4, "big") + record.MAGIC_END.to_bytes(4, "big")
    (fourth,) = append(store, "t", 0, bytes(16_000))
    (fifth,) = append(store, "t", 0, bytes(fits - 16_000 - 4 - 2 * overhead + 1))
    assert fifth == 65536, "one byte too many for what is left beside the marker"
    assert second < fourth
    assert list(problems(store)) == []


def test_a_batch_over_several_files(tmp_path: Path) -> None:
    store = make_store(tmp_path, segment_size=4096)
    store.open()
    offsets = append(store, "t", 0, *(bytes([number]) * 1500 for number in range(9)))
    assert len({offset // 4096 for offset in offsets}) > 3
    assert [store.message_at(offset).body[0] for offset in offsets] == list(range(9))  # type: ignore[union-attr]
    assert list(problems(store)) == []


@given(
    st.lists(
        st.lists(
            st.tuples(st.integers(0, 2), st.binary(max_size=1800), st.binary(max_size=60)), min_size=1, max_size=6
        ),
        max_size=8,
    )
)
def test_what_was_appended_is_what_a_scan_finds(batches: list[list[tuple[int, bytes, bytes]]]) -> None:
    store = make_store("/s", SimulatedFiles(), segment_size=4096)
    store.open()
    appended = []
    for batch in batches:
        store.appender.begin(NOW_MS)
        for queue_id, body, text in batch:
            store.appender.add(store.ensure_queue("t", queue_id), body, text, 0, 1, HOST)
            appended.append((store.appender.last_physical_offset, queue_id, text))
        store.appender.commit()
    scanner = Scanner(store.log, 0)
    assert [(found.physical_offset, found.queue_id, found.properties) for found in scanner] == appended
    assert scanner.end == (store.log.end, None)
    assert list(problems(store)) == []
    assert store.appender.appended == len(appended)


def test_watchers_are_called_once_a_batch_and_after_the_write() -> None:
    store = make_store("/s", SimulatedFiles())
    store.open()
    calls = []
    queue = store.ensure_queue("t", 0)
    queue.watch(lambda touched: calls.append((touched.next_offset, store.log.end > 0)))
    append(store, "t", 0, b"1", b"2", b"3")
    append(store, "t", 1, b"elsewhere")
    assert calls == [(3, True)]


def test_a_full_disk_undoes_the_batch_and_the_store_goes_on() -> None:
    files = SimulatedFiles()
    store = make_store("/s", files)
    store.open()
    append(store, "t", 0, b"before")
    end = store.log.end
    files.room = 150
    with pytest.raises(StoreFull):
        append(store, "t", 0, b"a" * 100, b"b" * 100)
    assert store.log.end == end
    assert store.ensure_queue("t", 0).next_offset == 1
    assert not any(store.log.read_raw(end, 1000)), "recovery would take what is left there for a message"
    files.room = None
    (after,) = append(store, "t", 0, b"after")
    assert after == end
    assert list(problems(store)) == []


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
def test_a_file_that_cannot_be_made_for_want_of_descriptors_refuses_the_batch(number: int) -> None:
    files = SimulatedFiles()
    store = make_store("/s", files, segment_size=4096)
    store.open()
    append(store, "t", 0, b"x" * 3500)
    end = store.log.end
    files.faults["name", "/s/commitlog"] = number
    with pytest.raises(StoreFull, match="ulimit"):
        append(store, "t", 0, b"y" * 1500)
    assert store.log.end == end
    files.heal()
    append(store, "t", 0, b"y" * 1500)
    assert list(problems(store)) == []


def test_a_full_disk_in_the_second_file_of_a_batch_undoes_all_of_it() -> None:
    files = SimulatedFiles()
    store = make_store("/s", files, segment_size=4096)
    store.open()
    append(store, "t", 0, b"before")
    end = store.log.end
    files.room = 3000
    with pytest.raises(StoreFull):
        append(store, "t", 0, *[b"x" * 1500] * 4)
    files.room = None
    assert (store.log.end, store.log.allocated_end) == (end, 4096)
    assert not any(store.log.read_raw(end, 4096))
    assert list(problems(store)) == []


def test_a_broken_disk_breaks_the_store_for_good() -> None:
    files = SimulatedFiles()
    store = make_store("/s", files)
    store.open()

    files.fail("write", errno.EIO)
    with pytest.raises(StoreBroken):
        append(store, "t", 0, b"x")
    files.heal()
    with pytest.raises(StoreBroken):
        append(store, "t", 0, b"x")
    store.health.has_room()
    with pytest.raises(StoreBroken):
        append(store, "t", 0, b"x")


def test_a_failed_flush_breaks_the_store_for_good() -> None:
    files = SimulatedFiles()
    store = make_store("/s", files)
    store.open()
    owned = OwnedStore(store)
    append(store, "t", 0, b"x")
    files.fail("sync", errno.EIO)
    assert not owned.flush()
    files.heal()
    with pytest.raises(StoreBroken):
        append(store, "t", 0, b"x")


class Short(bytearray):
    """A tail without memory for another unit."""

    def __iadd__(self, other: object) -> Never:
        raise MemoryError


def short_of_memory(*_: object, **__: object) -> Never:
    raise MemoryError


@pytest.mark.parametrize("where", ["tail", "copies", "log", "write", "segment"])
def test_where_memory_runs_out_nothing_of_the_batch_is_written(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """When memory runs out, nothing of the batch is written. Earlier, a batch staged in part was written with the next
    one, whose positions were then wrong."""
    files = SimulatedFiles()
    store = make_store("/s", files, segment_size=32768)
    store.open()
    first = append(store, "t", 0, b"first", b"second")
    appender, queue, other = store.appender, store.ensure_queue("t", 0), store.ensure_queue("t", 1)
    size, end = 20_000 if where == "segment" else 100, store.log.end
    appender.begin(NOW_MS)
    appender.add(other, bytes(size), b"", 0, 1, HOST)
    with monkeypatch.context() as patch:
        if where == "tail":
            tail, queue.tail = queue.tail, Short(queue.tail)
        elif where == "copies":
            patch.setattr(PackedRecords, "copied", short_of_memory)
        elif where == "write":
            patch.setattr(store.log, "write", short_of_memory)
        elif where == "segment":
            patch.setattr(store.log, "segment_end", short_of_memory)
        else:
            patch.setattr(store.log, "ensure_segment", short_of_memory)
            patch.setattr(type(store.log), "allocated_end", 0)
        with suppress(MemoryError):
            if where == "copies":
                records = PackedRecords(store.log.read_raw(0, first[1]), np.array([0]), np.array([first[1]]))
                appender.add_copies(records, [queue], np.zeros(1, np.int64), np.zeros(1, np.int64))
            else:
                appender.add(queue, bytes(size), b"", 0, 1, HOST)
        with pytest.raises(StoreFull, match="memory ran out"):
            appender.commit()
    if where == "tail":
        queue.tail = tail
    assert (queue.next_offset, other.next_offset) == (2, 0)
    assert store.log.end == end
    append(store, "t", 0, b"third")
    append(store, "t", 1, b"fourth")
    assert list(problems(store)) == []
    files.after_kill()
    again = make_store("/s", files, segment_size=32768)
    again.open()
    assert again.log.end == store.log.end
    assert again.ensure_queue("t", 0).next_offset == 3


def test_what_may_not_be_added(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    with pytest.raises(StoreClosed):
        append(store, "t", 0, b"x")
    store.open()
    with pytest.raises(RecordTooLarge, match="16385"):
        store.appender.check(bytes(16385), b"")
    with pytest.raises(RecordTooLarge, match="32768"):
        store.appender.check(b"", b"x" * 32768)
    with pytest.raises(RecordIllegal, match="zero byte"):
        store.appender.check(b"", b"a\0b")
    store.appender.check(bytes(16384), b"x" * 32767)
    OwnedStore(store).stop()
    with pytest.raises(StoreClosed):
        append(store, "t", 0, b"x")


def test_refusing_for_a_while() -> None:
    store = make_store("/s", SimulatedFiles())
    store.open()
    store.health.fill("for now")
    with pytest.raises(StoreFull, match="for now"):
        append(store, "t", 0, b"x")
    store.health.has_room()
    append(store, "t", 0, b"x")
