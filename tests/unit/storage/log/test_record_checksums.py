"""Checksums of whole records, as RocketMQ 5 writes them with enabledAppendPropCRC."""

from __future__ import annotations

import zlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duemq.protocol.records import checksum, properties, record
from duemq.protocol.records.message_id import pack_host
from duemq.storage.errors import RecordTooLarge, StoreFull
from duemq.storage.store import MessageStore
from tests.crash.simulated_files import SimulatedFiles
from tests.unit.storage.conftest import HOST, NOW_MS, make_store

STALE = "__CRC32#\x011234567890\x02"


def is_right(data: bytes) -> bool:
    """Whether a record's last 20 bytes are its checksum, by the layout and Python's CRC32."""
    value = zlib.crc32(data[:-20]) & 0x7FFFFFFF
    return data[-20:] == b"__CRC32#\x01" + f"{value:010}"[::-1].encode() + b"\x02"


def test_a_record_of_apaches_broker() -> None:
    data = (Path(__file__).parents[1] / "golden" / "record-checksum.bin").read_bytes()
    assert is_right(data)
    assert checksum.is_right(data)
    assert checksum.is_there(record.decode(data).properties_text.encode())
    assert not checksum.is_right(data.replace(b"KEYS\x01", b"KEYZ\x01"))


def added(store: MessageStore, body: bytes, text: bytes, host: bytes = HOST) -> bytes:
    """Append a message; return its record."""
    store.appender.begin(NOW_MS)
    store.appender.add(store.ensure_queue("topic", 3), body, text, 0, 5, host)
    store.appender.commit()
    at = store.appender.last_physical_offset
    data = store.log.read(at, store.log.end - at)
    assert data is not None
    return bytes(data)


NAMES = st.sampled_from(["A", "KEYS", "__CRC32#", "X__CRC32#"])
VALUES = st.text(st.characters(codec="utf-8", exclude_characters="\0\x01\x02"), min_size=1, max_size=20)
TEXTS = st.builds(
    lambda found, end: "\x02".join(f"{name}\x01{value}" for name, value in found) + (end if found else ""),
    st.lists(st.tuples(NAMES, VALUES)),
    st.sampled_from(["", "\x02", "\x02" + STALE]),
)


@given(
    st.binary(max_size=300),
    TEXTS,
    st.sampled_from(["10.1.2.3", "2001:db8::7"]),
    st.sampled_from(["127.0.0.1", "2001:db8::1"]),
)
def test_each_record_ends_with_its_checksum(body: bytes, text: str, born: str, stored: str) -> None:
    store = make_store("/s", SimulatedFiles(), host=stored, with_checksums=True)
    store.open()
    for _ in range(2):
        data = added(store, body, text.encode(), pack_host(born, 99))
        assert is_right(data)
        found = record.decode(data)
        assert found.body == body
        assert len(found.properties_text.split("__CRC32#\x01")) == 2 + text.count("X__CRC32#\x01")
        wanted = properties.parse(text)
        wanted.pop("__CRC32#", None)
        told = found.properties
        assert told.pop("__CRC32#")
        assert told == wanted


def test_where_memory_runs_out_for_a_checksum_nothing_of_the_batch_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    store = make_store("/s", SimulatedFiles(), with_checksums=True)
    store.open()
    queue = store.ensure_queue("topic", 3)
    store.appender.begin(NOW_MS)
    store.appender.add(queue, b"first", b"A\x01a", 0, 5, HOST)

    def fails(parts: object) -> bytes:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(checksum, "checksum_field", fails)
        with pytest.raises(MemoryError):
            store.appender.add(queue, b"second", b"A\x01a", 0, 5, HOST)
    with pytest.raises(StoreFull):
        store.appender.commit()
    assert (store.log.end, queue.next_offset) == (0, 0)
    assert is_right(added(store, b"third", b"A\x01a"))


def test_properties_have_room_for_it() -> None:
    store = make_store("/s", SimulatedFiles(), with_checksums=True)
    store.open()
    most = b"A\x01".ljust(32767 - 21, b"a")
    store.appender.check(b"", most)
    assert is_right(added(store, b"", most))
    with pytest.raises(RecordTooLarge):
        store.appender.check(b"", most + b"a")
    with pytest.raises(RecordTooLarge):
        store.appender.check(b"", most[:-99], 100)


@pytest.mark.parametrize("more", [0, 1, 2, 21])
def test_what_waits_since_before_the_setting_and_leaves_no_room_is_written_without(more: int) -> None:
    store = make_store("/s", SimulatedFiles(), with_checksums=True)
    store.open()
    text = b"A\x01".ljust(32767 - 21 + more, b"a")
    store.appender.check(b"body", text, is_stored=True)
    data = added(store, b"body", text)
    found = record.decode(data)
    assert is_right(data) == (more == 0)
    assert properties.get(found.properties_text, "A") == text[2:].decode()
