"""Records as columns, compared with the record codec of `protocol`."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from duemq.protocol.records import properties, record
from duemq.protocol.records.record import END_MARKER, MAGIC_END, StoredMessage
from duemq.spark_jobs.columns.records import PADDING, Walk, walk_records
from duemq.spark_jobs.source.tables import COLUMNS, STORE, RecordColumns

HOSTS = st.one_of(st.binary(min_size=8, max_size=8), st.binary(min_size=20, max_size=20))
NAMES = st.text("abcXYZ_012", min_size=1, max_size=20)
VALUES = st.text(st.characters(exclude_characters="\0\x01\x02", exclude_categories=["Cs"]), max_size=12)
MESSAGES = st.builds(
    StoredMessage,
    queue_id=st.integers(0, 2**31 - 1),
    flag=st.integers(-(2**31), 2**31 - 1),
    queue_offset=st.integers(0, 2**62),
    sys_flag=st.sampled_from((0, 1, 8)),
    born_timestamp=st.integers(0, 2**45),
    born_host=HOSTS,
    store_timestamp=st.integers(0, 2**45),
    store_host=HOSTS,
    reconsume_times=st.integers(0, 16),
    prepared_transaction_offset=st.integers(-1, 2**62),
    body=st.binary(max_size=300),
    topic=st.text("abcDEF%_-0", min_size=1, max_size=127),
    properties_text=st.dictionaries(NAMES, VALUES, max_size=6).map(properties.format_properties),
)
BASE = 1 << 40


def log_of(messages: list[StoredMessage], base: int = BASE) -> bytes:
    """Records one after the other, each with its own position."""
    data = b""
    for message in messages:
        message.physical_offset = base + len(data)
        data += record.encode(message)
    return data


def walked(data: bytes, *, base: int = BASE, check_crc: bool = True, is_last: bool = True) -> Walk:
    array = np.zeros(len(data) + PADDING, np.uint8)
    array[: len(data)] = np.frombuffer(data, np.uint8)
    return walk_records(array, base, len(data), check_crc=check_crc, is_last=is_last)


@given(st.lists(MESSAGES, max_size=8))
def test_columns_are_what_the_codec_says(messages: list[StoredMessage]) -> None:
    data = log_of(messages)
    found = walked(data)
    assert found.damages == []
    assert found.end == len(data)
    records = found.records
    expected = [record.decode(data, at) for at in records.starts.tolist()]
    assert len(expected) == len(messages)
    for column, attribute in (
        ("sizes", "size"),
        ("magic", "magic"),
        ("queue_id", "queue_id"),
        ("flag", "flag"),
        ("queue_offset", "queue_offset"),
        ("physical_offset", "physical_offset"),
        ("stored_physical_offset", "physical_offset"),
        ("sys_flag", "sys_flag"),
        ("born_ms", "born_timestamp"),
        ("store_ms", "store_timestamp"),
        ("reconsume_times", "reconsume_times"),
        ("prepared_offset", "prepared_transaction_offset"),
    ):
        assert getattr(records, column).tolist() == [getattr(message, attribute) for message in expected], column
    batch = RecordColumns(records)
    codes, names = records.topics()
    assert [names[code] for code in codes] == [message.topic for message in expected]
    assert batch.column("body").to_pylist() == [message.body for message in expected]
    assert [dict(row) for row in batch.column("properties").to_pylist()] == [message.properties for message in expected]


@given(st.lists(MESSAGES, min_size=1, max_size=5), st.data())
def test_a_property_is_found_as_the_codec_finds_it(messages: list[StoredMessage], data: st.DataObject) -> None:
    known = [name for message in messages for name in message.properties]
    name = data.draw(st.sampled_from([*known, "abc", "a", "TAGS"]))
    records = walked(log_of(messages)).records
    assert records.property_strings(name).to_pylist() == [message.get_property(name) or None for message in messages]


@pytest.mark.parametrize(
    "text",
    ["", "a", "a\x01", "\x01b", "a\x01b", "a\x01b\x02", "\x02\x02a\x01b", "x\x02a\x01b\x01c\x02y", "a\x01b\x02a\x01c"],
)
def test_odd_properties_are_read_as_rocketmq_reads_them(text: str) -> None:
    message = StoredMessage(
        queue_id=0, born_timestamp=1, born_host=bytes(8), store_timestamp=1, store_host=bytes(8), body=b"", topic="t",
        properties_text=text,
    )  # fmt: skip
    records = walked(log_of([message])).records
    assert records.property_strings("a").to_pylist() == [message.properties.get("a")]
    assert dict(records.texts.maps().to_pylist()[0]) == message.properties


@pytest.mark.parametrize(
    ("text", "value"), [("12", 12), ("-3", -3), ("0", 0), ("", None), ("1x", None), ("-", None), ("9" * 19, None)]
)
def test_a_property_that_is_a_number(text: str, value: int | None) -> None:
    message = StoredMessage(
        queue_id=0, born_timestamp=1, born_host=bytes(8), store_timestamp=1, store_host=bytes(8), body=b"x", topic="t",
        properties_text=f"n\x01{text}\x02m\x017",
    )  # fmt: skip
    values, present = walked(log_of([message])).records.property_ints("n")
    assert (int(values[0]) if present[0] else None) == value


@given(st.lists(MESSAGES, min_size=2, max_size=6), st.data())
def test_a_flipped_bit_costs_one_record_and_is_told(messages: list[StoredMessage], data: st.DataObject) -> None:
    log = bytearray(log_of(messages))
    starts = walked(bytes(log)).records.starts.tolist()
    victim = data.draw(st.integers(0, len(messages) - 1))
    # Of the head: the size, the magic, the position; of the rest: the length of the body.
    head = record.head_for(messages[victim].sys_flag | _hosts(messages[victim])).size
    at = data.draw(st.sampled_from([*range(8), *range(28, 36), *range(head - 4, head)]))
    log[starts[victim] + at] ^= 1 << data.draw(st.integers(0, 7))
    found = walked(bytes(log))
    kept = found.records.starts.tolist()
    assert kept == starts[:victim] + starts[victim + 1 :]
    assert [(damage.physical_offset, damage.size) for damage in found.damages] == [
        (BASE + starts[victim], messages_size(starts, victim, len(log)))
    ]


def _hosts(message: StoredMessage) -> int:
    return (16 if len(message.born_host) == 20 else 0) | (32 if len(message.store_host) == 20 else 0)


def messages_size(starts: list[int], i: int, end: int) -> int:
    return (starts[i + 1] if i + 1 < len(starts) else end) - starts[i]


@given(st.lists(MESSAGES, min_size=1, max_size=5), st.integers(0, 4), st.data())
def test_a_wrong_body_is_told_by_its_checksum(messages: list[StoredMessage], victim: int, data: st.DataObject) -> None:
    victim %= len(messages)
    messages[victim].body = messages[victim].body or b"body"
    log = bytearray(log_of(messages))
    starts = walked(bytes(log)).records.starts.tolist()
    records = walked(bytes(log)).records
    at = int(records.body_at[victim]) + data.draw(st.integers(0, len(messages[victim].body) - 1))
    log[at] ^= 0x40
    found = walked(bytes(log))
    if record.body_crc(messages[victim].body) == 0:
        return  # RocketMQ takes 0 for "not computed".
    assert found.records.starts.tolist() == starts[:victim] + starts[victim + 1 :]
    assert [damage.reason for damage in found.damages] == ["a wrong checksum of the body"]
    assert len(walked(bytes(log), check_crc=False).records) == len(messages)


@pytest.mark.parametrize(("left", "zeros", "is_torn"), [(20, 12, True), (5, 25, True), (4, 4, False), (1, 1, False)])
def test_properties_that_were_not_written_to_their_end_are_damage(left: int, zeros: int, is_torn: bool) -> None:
    """Properties that were not written to their end are damage, although no checksum covers them. `zeros` bytes from
    `left` before a record's end on may go on into the next one."""
    message = StoredMessage(
        queue_id=0, born_timestamp=1, born_host=bytes(8), store_timestamp=1, store_host=bytes(8), body=b"x", topic="t",
        properties_text="KEYS\x01a key that is long enough",
    )  # fmt: skip
    log = bytearray(log_of([message, message, message]))
    size = len(log) // 3
    log[2 * size - left : 2 * size - left + zeros] = bytes(zeros)
    found = walked(bytes(log))
    lost = [size] * is_torn + [2 * size] * (zeros > left)
    assert found.records.starts.tolist() == [start for start in (0, size, 2 * size) if start not in lost]
    assert bool(found.damages) == bool(lost)
    if is_torn:
        assert found.damages[0] == (BASE + size, size, "zeros in the properties")


@given(st.lists(MESSAGES, min_size=1, max_size=5), st.data())
def test_a_torn_tail_is_damage_and_zeros_behind_are_not(messages: list[StoredMessage], data: st.DataObject) -> None:
    log = log_of(messages)
    starts = walked(log).records.starts.tolist()
    cut = data.draw(st.integers(starts[-1] + 8, len(log) - 1))
    found = walked(log[:cut])
    assert found.records.starts.tolist() == starts[:-1]
    assert [damage.physical_offset for damage in found.damages] == [BASE + starts[-1]]
    clean = walked(log + bytes(data.draw(st.integers(0, 200))))
    assert clean.records.starts.tolist() == starts
    assert clean.damages == []


def test_an_end_marker_ends_the_file() -> None:
    message = StoredMessage(
        queue_id=0, born_timestamp=1, born_host=bytes(8), store_timestamp=1, store_host=bytes(8), body=b"x", topic="t"
    )
    log = log_of([message]) + END_MARKER.pack(500, MAGIC_END) + b"\xff" * 492
    found = walked(log)
    assert len(found.records) == 1
    assert found.damages == []
    assert found.at_end_marker


def test_zeros_between_records_are_told() -> None:
    random.seed(1)
    head = StoredMessage(
        queue_id=0, born_timestamp=1, born_host=bytes(8), store_timestamp=1, store_host=bytes(8), body=b"x", topic="t"
    )
    first = log_of([head])
    second = log_of([head], BASE + len(first) + 4096)
    found = walked(first + bytes(4096) + second)
    assert found.records.starts.tolist() == [0, len(first) + 4096]
    assert found.damages == [(BASE + len(first), 4096, "zeros where a record should be")]


@given(st.lists(MESSAGES, min_size=1, max_size=6), st.integers(100, 3000))
def test_bytes_that_come_in_pieces_give_the_same_records(messages: list[StoredMessage], step: int) -> None:
    log = log_of(messages)
    at, starts, size = 0, [], step
    while at < len(log):
        piece = log[at : at + size]
        found = walked(piece, base=BASE + at, is_last=at + len(piece) >= len(log))
        assert found.damages == []
        starts += (found.records.starts + at).tolist()
        size = size * 2 if found.end == 0 else step
        at += found.end
    assert starts == walked(log).records.starts.tolist()


def test_every_column_can_be_made() -> None:
    message = StoredMessage(
        queue_id=0, born_timestamp=1, born_host=bytes(8), store_timestamp=1, store_host=bytes(8), body=b"x", topic="t"
    )
    batch = RecordColumns(walked(log_of([message])).records)
    for name in set(COLUMNS["messages"]) - {STORE}:
        assert len(batch.column(name)) == 1, name


WITH_CHECKSUM = bytes.fromhex(
    "000000ecdaa320a7516fa58a00000003000000000000000000000000000000000000000000000000000001a20a62fbe97f000001000082fa"
    "000001a20a62fc677f00000100004ef300000000000000000000000000000005626f6479300154008b4d53475f524547494f4e0144656661"
    "756c74526567696f6e02554e49515f4b45590137463030303030313537374135334644383337343735464231334343324137420243"
    "4c55535445520144656661756c74436c757374657202544147530161024b455953016b300254524143455f4f4e0174727565025f5f4352"
    "43333223013838343433313836353102"
)
"""A record of Apache's 5.3.3 with enabledAppendPropCRC, at physical offset 0."""


def test_a_checksum_of_the_record_covers_each_byte_of_it() -> None:
    assert walked(WITH_CHECKSUM, base=0).damages == []
    for at in range(len(WITH_CHECKSUM)):
        changed = bytearray(WITH_CHECKSUM)
        changed[at] ^= 0x01
        found = walked(bytes(changed), base=0)
        # The property's own name is not covered: without it there is no checksum.
        is_name = len(WITH_CHECKSUM) - 20 <= at < len(WITH_CHECKSUM) - 11
        assert bool(found.damages) or is_name, at
    changed = bytearray(WITH_CHECKSUM)
    changed[150] ^= 0x01  # in a property
    assert [damage.reason for damage in walked(bytes(changed), base=0).damages] == ["a wrong checksum of the record"]
