"""Typed extension fields: every header class reads its own output, by both ways of decoding, and names a wrong
field."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.inspect import BoolType, Field, IntType, StrType, StructType, UnionType, type_info

from duemq.protocol.errors import FieldError, FrameError
from duemq.protocol.frames import codec, json_header
from duemq.protocol.frames.command import Command
from duemq.protocol.frames.frame import BINARY, FrameReader
from duemq.protocol.requests import headers
from duemq.protocol.requests.headers import Header, RequestDecoder, decode_ext
from tests.soak import examples
from tests.unit.protocol.strategies import TEXT

HEADER_TYPES: list[type[Header]] = sorted(
    {value for value in vars(headers).values() if isinstance(value, type) and issubclass(value, Header)} - {Header},
    key=lambda header_type: header_type.__name__,
)


def fields_of(header_type: type[Header]) -> dict[str, Field]:
    info = type_info(header_type)
    assert isinstance(info, StructType)
    return {field.encode_name: field for field in info.fields}


def kind_of(field: Field) -> IntType | BoolType | StrType:
    types = field.type.types if isinstance(field.type, UnionType) else (field.type,)
    (kind,) = [kind for kind in types if isinstance(kind, IntType | BoolType | StrType)]
    return kind


def limits_of(kind: IntType) -> tuple[int, int]:
    assert kind.ge is not None, "a number of the wire has a width"
    assert kind.le is not None
    return kind.ge, kind.le


def valid_texts(field: Field) -> st.SearchStrategy[str]:
    kind = kind_of(field)
    if isinstance(kind, BoolType):
        return st.sampled_from(["true", "false"])
    return st.integers(*limits_of(kind)).map(str) if isinstance(kind, IntType) else TEXT


def exts(header_type: type[Header]) -> st.SearchStrategy[dict[str, str]]:
    fields = fields_of(header_type)
    return st.fixed_dictionaries(
        {name: valid_texts(field) for name, field in fields.items() if field.required},
        optional={name: valid_texts(field) for name, field in fields.items() if not field.required},
    )


def both_ways(header_type: type[Header], ext: dict[str, Any]) -> tuple[Header | None, Header | None]:
    """Return the header by each way of decoding, None where it refuses."""
    text = json.dumps({"code": 1, "extFields": ext, "opaque": 7, "flag": 2, "version": 407, "language": "GO"}).encode()
    decoder = RequestDecoder(header_type)
    quick = slow = None
    with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        quick = decoder.decode_json(text)
    with contextlib.suppress(FieldError, FrameError):
        slow = decoder.from_command(json_header.decode(text), 0)
    for request in (quick, slow):
        if request is not None:
            envelope = (request.code, request.opaque, request.flag, request.version, request.language, request.codec)
            assert envelope == (1, 7, 2, 407, "GO", 0)
    return quick.header if quick is not None else None, slow.header if slow is not None else None


@pytest.mark.parametrize("header_type", HEADER_TYPES)
@examples(1 / 6)
@given(data=st.data())
def test_both_ways_of_decoding_agree_and_give_back_what_was_written(
    header_type: type[Header], data: st.DataObject
) -> None:
    ext = data.draw(exts(header_type))
    quick, slow = both_ways(header_type, ext)
    assert quick is not None
    assert quick == slow == decode_ext(header_type, ext)
    assert {name: value for name, value in quick.to_ext().items() if name in ext} == ext
    assert decode_ext(header_type, quick.to_ext()) == quick


SCALARS = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | TEXT


@pytest.mark.parametrize("header_type", HEADER_TYPES)
@examples(1 / 6)
@given(data=st.data())
def test_what_the_quick_way_takes_the_slow_way_takes_as_the_same(
    header_type: type[Header], data: st.DataObject
) -> None:
    """A header that the quick way accepts, with any JSON value in any field, is the same by the slow way."""
    ext: dict[str, Any] = dict(data.draw(exts(header_type)))
    names = st.sampled_from(sorted(fields_of(header_type)) or ["other"])
    ext.update(data.draw(st.dictionaries(names | TEXT, SCALARS | st.just("+1") | st.just("TRUE"), max_size=3)))
    quick, slow = both_ways(header_type, ext)
    if quick is not None:
        assert quick == slow


@pytest.mark.parametrize("header_type", HEADER_TYPES)
def test_the_field_that_is_missing_is_named(header_type: type[Header]) -> None:
    fields = fields_of(header_type)
    full = {name: "1" if isinstance(kind_of(field), IntType) else "true" for name, field in fields.items()}
    for name in [name for name, field in fields.items() if field.required]:
        with pytest.raises(FieldError) as caught:
            decode_ext(header_type, {other: value for other, value in full.items() if other != name})
        assert (caught.value.field, caught.value.why) == (name, "is missing")
        assert name in str(caught.value)


@pytest.mark.parametrize("header_type", HEADER_TYPES)
def test_the_field_that_is_no_number_or_out_of_range_is_named(header_type: type[Header]) -> None:
    fields = fields_of(header_type)
    full = {name: "1" if isinstance(kind_of(field), IntType) else "true" for name, field in fields.items()}
    for name, field in fields.items():
        kind = kind_of(field)
        if not isinstance(kind, IntType):
            continue
        low, high = limits_of(kind)
        for wrong in ("", "x", "1.5", "0x10", "1 2", str(low - 1), str(high + 1), "9" * 5000):
            with pytest.raises(FieldError) as caught:
                decode_ext(header_type, {**full, name: wrong})
            assert caught.value.field == name
            assert "is missing" not in caught.value.why


def test_the_header_types_were_found() -> None:
    assert headers.SendMessageV2 in HEADER_TYPES
    assert len(HEADER_TYPES) > 30


def test_the_two_send_headers_carry_the_same_fields() -> None:
    v1, v2 = fields_of(headers.SendMessage), fields_of(headers.SendMessageV2)
    assert [field.name for field in v1.values()] == [field.name for field in v2.values()]
    assert list(v2) == list("abcdefghijkml")
    assert v2["m"].name == "batch"
    assert v2["l"].name == "max_reconsume_times"


def test_none_is_left_out_and_booleans_are_words() -> None:
    header = headers.CreateTopic("T", "D", 4, 8, 6, "SINGLE_TAG", None, True)
    assert header.to_ext() == {
        "topic": "T", "defaultTopic": "D", "readQueueNums": "4", "writeQueueNums": "8", "perm": "6",
        "topicFilterType": "SINGLE_TAG", "order": "true",
    }  # fmt: skip


def test_fields_that_are_not_known_are_ignored() -> None:
    ext = {"topic": "T", "queueId": "3", "bname": "b", "lo": "x", "ns": ""}
    assert decode_ext(headers.QueueOfTopic, ext) == headers.QueueOfTopic("T", 3)


@pytest.mark.parametrize(("text", "value"), [("TRUE", True), ("False", False), ("yes", False), ("", False)])
def test_booleans_are_read_as_java_reads_them(text: str, value: bool) -> None:
    ext = {"topic": "T", "acceptStandardJsonOnly": text}
    assert decode_ext(headers.GetRouteInfo, ext).accept_standard_json_only is value


@pytest.mark.parametrize(("text", "value"), [("+3", 3), ("007", 7), ("-0", 0), ("-07", -7)])
def test_numbers_are_read_as_java_reads_them(text: str, value: int) -> None:
    assert decode_ext(headers.QueueOfTopic, {"topic": "T", "queueId": text}).queue_id == value


def test_reading_as_java_does_leaves_texts_alone() -> None:
    """Reading as Java does leaves texts alone: a text that begins with a plus is not a number, also if another field of
    the request is odd."""
    ext = {
        "topic": "+T", "defaultTopic": "D", "readQueueNums": "+4", "writeQueueNums": "4", "perm": "6",
        "topicFilterType": "SINGLE_TAG", "order": "no", "attributes": "+message.type=DELAY",
    }  # fmt: skip
    header = decode_ext(headers.CreateTopic, ext)
    assert (header.topic, header.read_queue_nums, header.order) == ("+T", 4, False)
    assert header.attributes == "+message.type=DELAY"


def test_a_binary_request_is_typed_the_same() -> None:
    header = headers.QueryConsumerOffset("g", "T", -1)
    data = codec.encode(Command(code=14, ext=header.to_ext(), body=b"b"), BINARY)
    (frame,) = FrameReader().receive_data(data)
    request = RequestDecoder(headers.QueryConsumerOffset).from_command(codec.decode(frame), BINARY)
    assert request.header == header
    assert (request.codec, bytes(request.body)) == (BINARY, b"b")


def test_a_response_carries_its_header_in_its_fields() -> None:
    answer = headers.response(0, None, headers.OffsetResponse(5), b"x")
    assert (answer.ext, answer.body, answer.remark) == ({"offset": "5"}, b"x", None)
    assert headers.response(17, "why").ext == {}
