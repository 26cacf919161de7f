"""Records: encoding and decoding agree, and damaged bytes are a RecordError or another record, never any other
error."""

from __future__ import annotations

import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from duemq.protocol.errors import RecordError
from duemq.protocol.records import record
from duemq.protocol.records.message_id import pack_host
from duemq.protocol.records.record import (
    FLAG_BORN_IPV6,
    FLAG_STORE_IPV6,
    MAGIC_END,
    MAGIC_V1,
    MAGIC_V2,
    MIN_SIZE,
    PHYSICAL_OFFSET_AT,
    STORE_TIME_AT_IPV4,
    SYS_FLAG_AT,
    StoredMessage,
)
from tests.unit.protocol.strategies import INT32, MESSAGES

HOST = pack_host("127.0.0.1", 10911)
HOST_V6 = pack_host("2001:db8::1", 10911)
MESSAGE = StoredMessage(
    queue_id=3, queue_offset=11, physical_offset=4321, born_timestamp=1, born_host=HOST, store_timestamp=2,
    store_host=HOST, body=b"body", topic="T", properties_text="TAGS\x01a\x02KEYS\x01k",
)  # fmt: skip


def decoded(data: bytes) -> StoredMessage | None:
    try:
        return record.decode(data)
    except RecordError:
        return None


@given(MESSAGES)
def test_a_message_survives_as_a_record(message: StoredMessage) -> None:
    """A message survives as a record, with the IPv6 flags that follow from the lengths of its hosts."""
    data = record.encode(message)
    flags = FLAG_BORN_IPV6 * (len(message.born_host) == 20) | FLAG_STORE_IPV6 * (len(message.store_host) == 20)
    message.sys_flag = message.sys_flag & ~(FLAG_BORN_IPV6 | FLAG_STORE_IPV6) | flags
    message.size = len(data)
    assert record.decode(data) == message
    assert record.decode(memoryview(b"before" + data + b"after"), 6) == message
    assert record.encode(record.decode(data)) == data


def test_named_places_are_where_the_fields_are() -> None:
    data = record.encode(MESSAGE)
    assert struct.unpack_from(">q", data, PHYSICAL_OFFSET_AT) == (4321,)
    assert struct.unpack_from(">q", data, STORE_TIME_AT_IPV4) == (2,)
    assert struct.unpack_from(">i", data, SYS_FLAG_AT) == (0,)
    assert struct.unpack_from(">iI", data) == (len(data), MAGIC_V1)


def test_every_damaged_byte_is_noticed_or_gives_another_record() -> None:
    """Every byte changed to every value is noticed or gives another record: lengths, magic, flags, body and texts, in a
    record with each kind of host."""
    for born, store in ((HOST, HOST), (HOST_V6, HOST), (HOST, HOST_V6), (HOST_V6, HOST_V6)):
        good = record.encode(StoredMessage(**{**{f: getattr(MESSAGE, f) for f in MESSAGE.__struct_fields__},
                                              "born_host": born, "store_host": store}))  # fmt: skip
        body_at = good.index(b"\0\0\0\4body")
        for at in range(len(good)):
            bad = bytearray(good)
            for value in range(256):
                bad[at] = value
                read = decoded(bytes(bad))
                if value == good[at]:
                    assert read is not None
                elif at < 12 or body_at <= at < body_at + 8:
                    assert read is None, f"byte {at}, which the size, the magic and the checksum cover"


@given(MESSAGES, st.data())
def test_any_damage_is_a_record_error_or_a_record(message: StoredMessage, data: st.DataObject) -> None:
    bad = bytearray(record.encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        bad[data.draw(st.integers(0, len(bad) - 1))] = data.draw(st.integers(0, 255))
    decoded(bytes(bad))
    decoded(bytes(bad)[: data.draw(st.integers(0, len(bad)))])


@given(st.binary(max_size=200), INT32, st.sampled_from([MAGIC_V1, MAGIC_V2, MAGIC_END, 0]))
def test_any_bytes_are_a_record_error_or_a_record(tail: bytes, size: int, magic: int) -> None:
    for head in (b"", struct.pack(">iI", size, magic), struct.pack(">iI", len(tail) + 8, magic)):
        decoded(head + tail)


@given(MESSAGES)
def test_a_record_cut_short_is_a_record_error(message: StoredMessage) -> None:
    data = record.encode(message)
    for size in {0, 1, 8, MIN_SIZE - 1, len(data) // 2, len(data) - 1}:
        if size < len(data):
            with pytest.raises(RecordError):
                record.decode(data[:size])


def test_the_error_says_where_and_why() -> None:
    data = bytearray(record.encode(MESSAGE))
    data[data.index(b"body")] ^= 1
    with pytest.raises(RecordError, match=r"record at byte 5: checksum") as caught:
        record.decode(b"xxxxx" + data, 5)
    assert caught.value.offset == 5
    assert record.decode(bytes(data), check_crc=False).topic == "T"


def test_properties_that_rocketmqs_clients_cannot_read_are_a_record_error() -> None:
    """The size is a signed 16-bit number for them."""
    for size in (32_767, 32_768):
        data = bytearray(record.encode(MESSAGE))
        text = b"K\x01" + bytes([ord("v")]) * (size - 2)
        old = MESSAGE.properties_text.encode()
        data = data[: len(data) - len(old) - 2] + size.to_bytes(2, "big") + text
        data[:4] = len(data).to_bytes(4, "big")
        if size == 32_767:
            assert len(record.decode(bytes(data)).properties["K"]) == size - 2
        else:
            with pytest.raises(RecordError, match="properties of 32768 bytes"):
                record.decode(bytes(data))


def test_text_that_is_not_utf8_is_a_record_error() -> None:
    data = record.encode(MESSAGE)
    for old, new in ((b"\x01T\x00", b"\x01\xff\x00"), (b"KEYS", b"KE\xffS")):
        with pytest.raises(RecordError, match="UTF-8"):
            record.decode(data.replace(old, new))


def version_2(topic: str) -> bytes:
    """A record as RocketMQ 5 writes it for long topics: the topic's length takes two bytes."""
    data = record.encode(MESSAGE)
    at = record.HEAD_SIZE_IPV4 + len(MESSAGE.body)
    name = topic.encode()
    grown = len(name) - len(MESSAGE.topic) + 1
    head = struct.pack(">iI", len(data) + grown, MAGIC_V2)
    return head + data[8:at] + struct.pack(">H", len(name)) + name + data[at + 2 :]


@pytest.mark.parametrize("length", [0, 1, 127, 128, 255, 256, 1000])
def test_version_2_is_read(length: int) -> None:
    message = record.decode(version_2("t" * length))
    assert (message.magic, message.topic, message.body) == (MAGIC_V2, "t" * length, MESSAGE.body)
    assert message.properties_text == MESSAGE.properties_text


def test_every_damaged_byte_of_version_2_is_noticed_or_gives_another_record() -> None:
    good = version_2("topic")
    for at in range(len(good)):
        for value in range(256):
            decoded(good[:at] + bytes((value,)) + good[at + 1 :])


def test_a_message_without_a_body_has_checksum_0() -> None:
    assert record.body_crc(b"") == 0
    assert record.body_crc(memoryview(b"body")) == record.body_crc(b"body") < 2**31


def test_the_records_of_a_response_are_read_one_after_the_other() -> None:
    data = record.encode(MESSAGE) * 3
    assert [message.queue_offset for message in record.decode_all(data)] == [11, 11, 11]
    assert record.decode_all(b"") == []
    with pytest.raises(RecordError):
        record.decode_all(data + b"x")


def test_what_a_message_says_of_itself() -> None:
    assert MESSAGE.properties == {"TAGS": "a", "KEYS": "k"}
    assert MESSAGE.get_property("KEYS") == "k"
    assert MESSAGE.get_property("WAIT") is None
    assert MESSAGE.offset_message_id == "7F00000100002A9F00000000000010E1"
    message = record.decode(record.encode(MESSAGE))
    message.sys_flag = 0b1011
    assert message.transaction_type == record.TRANSACTION_COMMIT


def test_what_a_record_cannot_hold_is_refused() -> None:
    def with_size(topic: int, text: int) -> bytes:
        return record.encode(msgspec.structs.replace(MESSAGE, topic="t" * topic, properties_text="p" * text))

    assert record.decode(with_size(127, 32_767)).topic == "t" * 127
    for topic, text in ((256, 0), (1, 32_768)):
        with pytest.raises(ValueError, match="too long"):
            with_size(topic, text)
