"""The quick way over usual records accepts exactly the records that the close look accepts."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from duemq.protocol.records import record
from duemq.storage.log.scan import Scanner, read_record
from duemq.storage.store import MessageStore
from tests.crash.simulated_files import SimulatedFiles
from tests.unit.storage.conftest import HOST, append, make_store


def store_with(second: bytes) -> MessageStore:
    """A store with one record and then these bytes; the scanner looks closely at the first record in any case."""
    store = make_store("/s", SimulatedFiles())
    store.open()
    append(store, "t", 0, b"first")
    store.log.write(store.log.end, second)
    return store


def second_record(topic: str) -> bytes:
    empty = make_store("/s", SimulatedFiles())
    empty.open()
    append(empty, "t", 0, b"first")
    return record.encode(
        record.StoredMessage(
            queue_id=1,
            physical_offset=empty.log.end,
            born_timestamp=1,
            born_host=HOST,
            store_timestamp=2,
            store_host=HOST,
            body=b"body",
            topic=topic,
            properties_text="TAGS\x01a",
        )
    )


@pytest.mark.parametrize("length", [1, 127, 128, 255])
def test_topics_are_as_long_as_java_reads_them(length: int) -> None:
    """The scanner accepts topics of up to 127 bytes, since Java reads the length as a signed byte."""
    store = store_with(second_record("t" * length))
    assert len(list(Scanner(store.log, 0))) == (2 if length <= 127 else 1)


RECORD = second_record("topic")


@given(st.integers(0, len(RECORD) - 1), st.integers(0, 255))
@example(0, 0)
def test_a_damaged_record_is_judged_as_by_the_close_look(at: int, value: int) -> None:
    data = bytearray(RECORD)
    data[at] = value
    store = store_with(bytes(data))
    scanner = Scanner(store.log, 0)
    found = list(scanner)[1:]
    looked_at = read_record(store.log, store.log.end)
    assert found == ([looked_at] if looked_at is not None else [])
    assert scanner.end.physical_offset == store.log.end + (len(RECORD) if found else 0)
