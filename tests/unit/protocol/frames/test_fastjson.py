"""fastjson's JSON: it reads integer and object keys and everything strict, and garbage is a BodyFormatError."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from duemq.protocol.errors import BodyFormatError
from duemq.protocol.frames import fastjson
from tests.unit.protocol.strategies import TEXT

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)


def loose(value: Any) -> str:
    """Return JSON that is not strict: an object around it, whose keys are an integer and an object."""
    return f'{{7:{json.dumps(value)}, {{"a":1}} : {json.dumps(value, ensure_ascii=False)}}}'


@given(VALUES)
def test_strict_json_is_read(value: Any) -> None:
    text = json.dumps(value)
    assert fastjson.loads(text) == value
    assert fastjson.loads(memoryview(text.encode())) == value
    assert fastjson.loads(fastjson.dumps(value)) == value


@given(VALUES)
def test_json_with_other_keys_is_read(value: Any) -> None:
    assert fastjson.loads(loose(value)) == {"7": value, '{"a":1}': value}


@given(st.dictionaries(st.integers(-(2**31), 2**31), TEXT, max_size=4))
def test_integer_keys_survive(entries: dict[int, str]) -> None:
    text = fastjson.dump_int_keys(entries)
    assert fastjson.loads(text) == {str(key): value for key, value in entries.items()}


@given(st.lists(st.tuples(st.dictionaries(TEXT, TEXT | st.integers(0, 9), max_size=3), TEXT), max_size=4))
def test_object_keys_survive_as_their_json_text(entries: list[tuple[dict[str, Any], str]]) -> None:
    read = fastjson.loads(fastjson.dump_object_keys(entries))
    assert read == {
        json.dumps(key, ensure_ascii=False, separators=(",", ":")): value for key, value in entries
    } or read == {fastjson.dumps(key).decode(): value for key, value in entries}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{0:"127.0.0.1:10911"}', {"0": "127.0.0.1:10911"}),
        ('{ 0 : "a" , -1 : {2:[{3:4}]} }', {"0": "a", "-1": {"2": [{"3": 4}]}}),
        ('{{"queueId":1,"topic":"T"}:{"n":1}}', {'{"queueId":1,"topic":"T"}': {"n": 1}}),
        ('{"a":1,}', {"a": 1}),
        ('{true:1,null:2}', {"true": 1, "null": 2}),
        ('{\n\t"offsetTable":{\n\t\t"T@g":{0:5,1:6\n\t\t}\n\t}\n}', {"offsetTable": {"T@g": {"0": 5, "1": 6}}}),
        ('{0:"}{][\\",:"}', {"0": '}{]["' + ",:"}),
    ],
)  # fmt: skip
def test_forms_that_rocketmq_writes(text: str, value: object) -> None:
    assert fastjson.loads(text) == value


@pytest.mark.parametrize(
    "text",
    ["", " ", "{", "}", "[", "{0", "{0:", "{0:1", "{0:1]", "{0:1}x", "{0 1}", "{0:1 2:3}", "{0:1,,}", "[1,]", "{:1}",
     "{0:}", "{0:'a'}", '{0:"a}', '{0:"\\x"}', "nul", "{[1]}", "{0:1}}", "{,}", "0:1", "{0:01}", "{0:NaN}", "\ufeff{}"],
)  # fmt: skip
def test_what_is_no_json_of_either_kind_is_a_body_error(text: str) -> None:
    with pytest.raises(BodyFormatError):
        fastjson.loads(text)


TOKENS = st.sampled_from(
    ["{", "}", "[", "]", ",", ":", '"', "\\", "1", "a", "null", '"a"', " ", "-", "{{", "}}", "\x00", "é"]
)


@given(st.lists(TOKENS, max_size=30).map("".join) | st.text(max_size=30))
@example('"' * 3)
def test_any_text_is_a_value_or_a_body_error(text: str) -> None:
    for given_as in (text, text.encode("utf-8", "surrogatepass")):
        with contextlib.suppress(BodyFormatError):
            fastjson.loads(given_as)


@given(st.binary(max_size=30))
def test_any_bytes_are_a_value_or_a_body_error(data: bytes) -> None:
    with contextlib.suppress(BodyFormatError):
        fastjson.loads(data)


@given(VALUES, st.data())
def test_damaged_json_is_a_value_or_a_body_error(value: Any, data: st.DataObject) -> None:
    text = bytearray(loose(value).encode())
    for _ in range(data.draw(st.integers(1, 4))):
        text[data.draw(st.integers(0, len(text) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(BodyFormatError):
        fastjson.loads(bytes(text))


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "{0:" * 100_000, "{0:[" * 100_000, "{" * 100_000])
def test_deep_nesting_is_a_body_error(text: str) -> None:
    with pytest.raises(BodyFormatError):
        fastjson.loads(text)


def test_keys_within_keys_are_a_body_error() -> None:
    """Object keys within object keys are a BodyFormatError: each becomes a text whose quotes are escaped, so they would
    double at each level, and a body of a hundred bytes would take all memory."""
    assert fastjson.loads('{{"a":1}:1}') == {'{"a":1}': 1}
    with pytest.raises(BodyFormatError, match="key"):
        fastjson.loads('{{{"a":1}:1}:1}')
    with pytest.raises(BodyFormatError, match="key"):
        fastjson.loads("{" * 60 + '"a":1' + "}:1" * 59 + "}")
    with pytest.raises(BodyFormatError, match="key"):
        fastjson.loads("{{[" * 20 + "1" + "]:1}:1" * 20 + "}")


def test_text_that_is_not_utf8_is_a_body_error() -> None:
    for data in (b"\xff", b'{0:"\xed\xa0\x80"}', b'{"a":"\xff"}'):
        with pytest.raises(BodyFormatError):
            fastjson.loads(data)


def test_loose_json_beyond_the_limit_is_a_body_error() -> None:
    """Loose JSON beyond the limit is a BodyFormatError, since reading it takes long; strict JSON of any size is read at
    once."""
    entries = ",".join(f'"{number}":1' for number in range(1000))
    assert len(fastjson.loads("{" + entries + "}", loose_limit=100)) == 1000
    assert fastjson.loads("{0:1}", loose_limit=100) == {"0": 1}
    with pytest.raises(BodyFormatError, match="100"):
        fastjson.loads("{0:1," + entries + "}", loose_limit=100)
