"""Bodies of REGISTER_BROKER, plain and compressed."""

from __future__ import annotations

import contextlib
import json
import struct
import zlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duemq.protocol.errors import BodyFormatError
from duemq.protocol.requests.bodies import DataVersion, TopicConfig
from duemq.protocol.requests.registration import decode_registration, encode_registration
from tests.unit.protocol.strategies import INT32, TEXT

NAMES = st.text("abcXYZ_%-0189", min_size=1, max_size=10)
TOPICS = st.dictionaries(NAMES, st.tuples(INT32, INT32, INT32), max_size=4)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)


def text(data: bytes) -> bytes:
    return struct.pack(">i", len(data)) + data


def compressed(topics: list[str], version: bytes = b'{"counter":2,"timestamp":1}', count: int | None = None) -> bytes:
    parts = [text(version), struct.pack(">i", len(topics) if count is None else count)]
    return zlib.compress(b"".join(parts + [text(topic.encode()) for topic in topics] + [text(b"[]")]))


@given(TOPICS)
def test_both_forms_say_the_same(table: dict[str, tuple[int, int, int]]) -> None:
    expected = {name: TopicConfig(name, read, write, perm) for name, (read, write, perm) in table.items()}
    plain = encode_registration(
        {
            "dataVersion": {"counter": 2, "timestamp": 1},
            "topicConfigTable": {name: config.to_json() for name, config in expected.items()},
        }
    )
    packed = compressed([f"{name} {read} {write} {perm} SINGLE_TAG" for name, (read, write, perm) in table.items()])
    assert decode_registration(plain, compressed=False) == (DataVersion(1, 2), expected, len(plain))
    assert decode_registration(packed, compressed=True) == (DataVersion(1, 2), expected, len(zlib.decompress(packed)))


def test_attributes_after_the_topic_are_passed_over() -> None:
    _, topics, _ = decode_registration(
        compressed(['T 1 2 6 MULTI_TAG {"+message.type":"DELAY MORE"}']), compressed=True
    )
    assert topics == {"T": TopicConfig("T", 1, 2, 6, "MULTI_TAG")}


def test_integer_keys_in_fields_of_5_x_are_no_hindrance() -> None:
    body = (
        b'{"topicConfigSerializeWrapper":{"topicQueueMappingInfoMap":{"T":{"currIdMap":{0:1}}},"topicConfigTable":{}}}'
    )
    assert decode_registration(body, compressed=False) == (DataVersion(), {}, len(body))


@given(VALUES, VALUES, VALUES)
def test_any_json_is_a_registration_or_a_body_error(body: Any, table: Any, version: Any) -> None:
    wrapped = {"topicConfigSerializeWrapper": {"topicConfigTable": table, "dataVersion": version}}
    named = {"topicConfigSerializeWrapper": {"topicConfigTable": {"T": {"perm": table}}}}
    for value in (body, {"topicConfigSerializeWrapper": body}, wrapped, named):
        with contextlib.suppress(BodyFormatError):
            decode_registration(json.dumps(value).encode(), compressed=False)


@given(st.binary(max_size=60), st.binary(max_size=60))
def test_any_bytes_are_a_registration_or_a_body_error(body: bytes, unpacked: bytes) -> None:
    for data in (body, zlib.compress(unpacked), zlib.compress(text(b"{}") + unpacked)):
        for is_compressed in (True, False):
            with contextlib.suppress(BodyFormatError):
                decode_registration(data, compressed=is_compressed)


@pytest.mark.parametrize(
    "topic", ["", "T", "T 1 2", "T 1 2 6", "T x 2 6 S", "T 1 2 99999999999 S", f"T {'9' * 5000} 2 6 S"]
)
def test_a_compressed_topic_that_is_none_is_a_body_error(topic: str) -> None:
    with pytest.raises(BodyFormatError):
        decode_registration(compressed([topic]), compressed=True)


@pytest.mark.parametrize("count", [2**31 - 1, 3])
def test_more_topics_promised_than_there_are_is_a_body_error(count: int) -> None:
    with pytest.raises(BodyFormatError):
        decode_registration(compressed(["T 1 2 6 SINGLE_TAG"], count=count), compressed=True)


def test_a_bomb_is_a_body_error() -> None:
    with pytest.raises(BodyFormatError):
        decode_registration(zlib.compress(bytes(100_000_000)), compressed=True)
