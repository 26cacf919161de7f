"""The three header codecs: every command survives them, and any other bytes are a FrameError."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgpack
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from duemq.protocol.codes import FLAG_ONEWAY, FLAG_RESPONSE
from duemq.protocol.errors import FrameError, LocalProtocolError
from duemq.protocol.frames import binary_header, codec, json_header, msgpack_header
from duemq.protocol.frames.command import Command
from duemq.protocol.frames.frame import BINARY, CODECS, JSON, MSGPACK, FrameReader, join_frame
from tests.unit.protocol.strategies import COMMANDS, TEXT, WIDE_COMMANDS

DECODERS: dict[int, Callable[[bytes], Command]] = {
    JSON: json_header.decode,
    BINARY: binary_header.decode,
    MSGPACK: msgpack_header.decode,
}


def over_the_wire(command: Command, frame_codec: int) -> Command:
    (frame,) = FrameReader().receive_data(codec.encode(command, frame_codec))
    assert frame[0] == frame_codec
    return codec.decode(frame)


def command_or_frame_error(header: bytes, frame_codec: int) -> Command | None:
    try:
        command = DECODERS[frame_codec](header)
    except FrameError:
        return None
    assert isinstance(command, Command)
    assert all(type(name) is str and type(value) is str for name, value in command.ext.items())
    return command


# --- every command survives


@given(COMMANDS)
@example(Command(code=0, version=-1, opaque=0, ext={}))
def test_a_command_survives_each_codec_and_all_decode_to_the_same_value(command: Command) -> None:
    assert [over_the_wire(command, frame_codec) for frame_codec in CODECS] == [command] * 3


@pytest.mark.parametrize("frame_codec", [JSON, MSGPACK])
@given(command=WIDE_COMMANDS)
def test_json_and_msgpack_carry_empty_texts_and_numbers_of_32_bits(frame_codec: int, command: Command) -> None:
    assert over_the_wire(command, frame_codec) == command


@pytest.mark.parametrize("frame_codec", CODECS)
@given(command=COMMANDS)
def test_what_was_decoded_can_be_answered(frame_codec: int, command: Command) -> None:
    """Any decoded request can be answered: the answer has a known code and the request's opaque, whatever that is."""
    received = over_the_wire(command, frame_codec)
    answer = Command(code=0, opaque=received.opaque, flag=FLAG_RESPONSE)
    assert over_the_wire(answer, frame_codec).opaque == command.opaque


def test_flags_are_bits() -> None:
    for flag in range(8):
        command = Command(code=1, flag=flag)
        assert command.is_response == bool(flag & FLAG_RESPONSE)
        assert command.is_oneway == bool(flag & FLAG_ONEWAY)


# --- the binary header


def test_the_binary_header_loses_empty_texts() -> None:
    command = Command(code=1, remark="", ext={"empty": "", "": "nameless", "kept": "x"})
    received = over_the_wire(command, BINARY)
    assert received.remark is None
    assert received.ext == {"kept": "x"}


def test_the_binary_header_knows_languages_by_number_only() -> None:
    assert over_the_wire(Command(code=1, language="PYTHON"), BINARY).language == "PYTHON"
    assert over_the_wire(Command(code=1, language="BASIC"), BINARY).language == "OTHER"
    assert over_the_wire(Command(code=1, language=None), BINARY).language == "OTHER"
    unknown = bytearray(binary_header.encode(Command(code=1)))
    for number in (14, 127, 255):
        unknown[2] = number
        assert binary_header.decode(bytes(unknown)).language is None


@pytest.mark.parametrize("code", [2**15, -(2**15) - 1, 200_050, 2**31])
def test_a_code_beyond_16_bits_does_not_fit_the_binary_header(code: int) -> None:
    with pytest.raises(LocalProtocolError, match=str(code)):
        binary_header.encode(Command(code=code))


def test_a_key_beyond_16_bits_does_not_fit_the_binary_header() -> None:
    with pytest.raises(LocalProtocolError):
        binary_header.encode(Command(code=1, ext={"k" * 2**15: "v"}))
    assert over_the_wire(Command(code=1, ext={"k" * (2**15 - 1): "v"}), BINARY).ext == {"k" * (2**15 - 1): "v"}


@given(COMMANDS, st.data())
def test_a_binary_header_cut_short_is_a_frame_error(command: Command, data: st.DataObject) -> None:
    header = binary_header.encode(command)
    size = data.draw(st.integers(0, len(header) - 1))
    with pytest.raises(FrameError):
        binary_header.decode(header[:size])


@pytest.mark.parametrize("length", [b"\xff\xff\xff\xff", b"\x80\x00\x00\x00", b"\x7f\xff\xff\xff", b"\x00\x00\x00\x7f"])
@pytest.mark.parametrize("at", [13, 17, 23], ids=["remark", "extension fields", "value"])
def test_lengths_in_a_binary_header_are_checked(at: int, length: bytes) -> None:
    header = bytearray(binary_header.encode(Command(code=1, ext={"ab": "c"})))
    header[at + (2 if at == 23 else 0) : at + (6 if at == 23 else 4)] = length
    with pytest.raises(FrameError):
        binary_header.decode(bytes(header))


# --- too large, or no text


@pytest.mark.parametrize("frame_codec", CODECS)
def test_a_frame_over_the_limit_is_not_encoded(frame_codec: int) -> None:
    with pytest.raises(LocalProtocolError, match="16777216"):
        codec.encode(Command(code=1, body=bytes(16_777_216 - 20)), frame_codec)
    with pytest.raises(LocalProtocolError):
        codec.encode(Command(code=1, ext={"k": "v" * 0x1000000}), frame_codec)


@pytest.mark.parametrize("frame_codec", CODECS)
@pytest.mark.parametrize("field", ["remark", "ext"])
def test_text_that_is_no_unicode_is_not_encoded(frame_codec: int, field: str) -> None:
    command = Command(code=1, remark="\ud800") if field == "remark" else Command(code=1, ext={"k": "\ud800"})
    with pytest.raises(LocalProtocolError):
        codec.encode(command, frame_codec)


# --- anything else is a FrameError


@pytest.mark.parametrize("frame_codec", CODECS)
@given(header=st.binary(max_size=80))
@example(header=b"")
@example(header=b"null")
@example(header=b"\xc1")
def test_any_bytes_are_a_command_or_a_frame_error(frame_codec: int, header: bytes) -> None:
    command_or_frame_error(header, frame_codec)


@pytest.mark.parametrize("frame_codec", CODECS)
@given(command=COMMANDS, data=st.data())
def test_a_damaged_header_is_a_command_or_a_frame_error(
    frame_codec: int, command: Command, data: st.DataObject
) -> None:
    (frame,) = FrameReader().receive_data(codec.encode(command, frame_codec))
    header = bytearray(frame[1])
    for _ in range(data.draw(st.integers(1, 4))):
        header[data.draw(st.integers(0, len(header) - 1))] = data.draw(st.integers(0, 255))
    command_or_frame_error(bytes(header), frame_codec)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
FIELDS = ("code", "extFields", "flag", "language", "opaque", "remark", "version", "serializeTypeCurrentRPC", "other")


@given(st.dictionaries(st.sampled_from(FIELDS), JSON_VALUES), st.dictionaries(TEXT, JSON_VALUES))
def test_any_json_object_is_a_command_or_a_frame_error(head: dict[str, Any], ext: dict[str, Any]) -> None:
    command_or_frame_error(json.dumps(head).encode(), JSON)
    header = json.dumps({**head, "code": 1, "extFields": ext}, ensure_ascii=False).encode("utf-8", "surrogatepass")
    command_or_frame_error(header, JSON)


MSGPACK_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | TEXT | st.binary(max_size=9)
    | st.builds(msgpack.ExtType, st.integers(0, 127), st.binary(max_size=9)),
    lambda inner: st.lists(inner, max_size=7) | st.dictionaries(TEXT | st.binary(max_size=4), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


@given(st.lists(MSGPACK_VALUES, min_size=7, max_size=7) | MSGPACK_VALUES)
def test_any_msgpack_value_is_a_command_or_a_frame_error(value: Any) -> None:
    command_or_frame_error(msgpack.packb(value), MSGPACK)


@pytest.mark.parametrize(
    ("frame_codec", "header"),
    [
        (JSON, b'{"code":1,"other":' + b"[" * 200_000),
        (JSON, b'{"code":1,"other":' + b'{"a":' * 200_000),
        (JSON, b'{"code":1,"extFields":{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}}"),
        (MSGPACK, b"\x91" * 200_000),
        (MSGPACK, b"\x97" + b"\x81\xa1a" * 200_000),
    ],
    ids=["json array", "json object", "json extension field", "msgpack array", "msgpack map"],
)
def test_deep_nesting_is_a_frame_error(frame_codec: int, header: bytes) -> None:
    with pytest.raises(FrameError):
        DECODERS[frame_codec](header)


@pytest.mark.parametrize(
    ("frame_codec", "header"),
    [
        (JSON, b'{"code":1,"remark":"\\ud800"}'),
        (JSON, b'{"code":1,"extFields":{"\\udfff":"x"}}'),
        (JSON, b'{"code":1,"remark":"\xed\xa0\x80"}'),
        (BINARY, binary_header.encode(Command(code=1, remark="abc")).replace(b"abc", b"\xed\xa0\x80")),
        (MSGPACK, msgpack.packb([1, "JAVA", 1, 1, 0, "abc", {}]).replace(b"abc", b"\xed\xa0\x80")),
    ],
)
def test_lone_surrogates_are_a_frame_error(frame_codec: int, header: bytes) -> None:
    with pytest.raises(FrameError):
        DECODERS[frame_codec](header)


@pytest.mark.parametrize("field", ["code", "opaque", "flag", "version"])
@pytest.mark.parametrize(
    "value",
    [2**31, -(2**31) - 1, 2**63, 10**30, 10**5000],
    ids=lambda value: f"{value:.0e}" if value < 10**300 else "1e5000",
)
def test_numbers_beyond_32_bits_are_a_frame_error(field: str, value: int) -> None:
    """Numbers beyond 32 bits are a FrameError: an answer could not repeat such an opaque in 4 bytes."""
    digits = "1" + "0" * 5000 if value > 10**300 else str(value)
    head = {"code": "1", field: digits}
    text = "{" + ",".join(f'"{name}":{number}' for name, number in head.items()) + "}"
    with pytest.raises(FrameError):
        json_header.decode(text.encode())
    if -(2**63) <= value < 2**64:
        numbers = {"code": 1, "version": 0, "opaque": 0, "flag": 0, field: value}
        code, version, opaque, flag = numbers.values()
        with pytest.raises(FrameError):
            msgpack_header.decode(msgpack.packb([code, "JAVA", version, opaque, flag, None, {}]))


def test_of_json_keys_that_come_twice_the_last_counts() -> None:
    header = b'{"code":1,"code":2,"extFields":{"a":"x","a":"y"},"extFields":{"a":"z","a":"w"}}'
    command = json_header.decode(header)
    assert command.code == 2
    assert command.ext == {"a": "w"}


# --- JSON as Java reads it


@pytest.mark.parametrize(
    ("value", "text"),
    [("12", "12"), ("-7", "-7"), ("true", "true"), ("false", "false"), ('"x"', "x"), ("1.5", "1.5"), ("[1]", "[1]"),
     ('{"a":1}', '{"a":1}'), (str(10**30), str(10**30))],
)  # fmt: skip
def test_an_extension_field_that_is_no_text_is_read_as_its_text(value: str, text: str) -> None:
    command = json_header.decode(b'{"code":1,"extFields":{"f":%b,"g":"y"}}' % value.encode())
    assert command.ext == {"f": text, "g": "y"}


def test_null_extension_fields_are_left_out() -> None:
    assert json_header.decode(b'{"code":1,"extFields":{"f":null,"g":"y"}}').ext == {"g": "y"}
    assert json_header.decode(b'{"code":1,"extFields":null}').ext == {}


def test_missing_json_fields_have_javas_defaults() -> None:
    command = json_header.decode(b'{"code":105}')
    assert command == Command(code=105, language=None, version=0, opaque=0, flag=0, remark=None, ext={})


def test_a_json_header_without_a_code_is_a_frame_error() -> None:
    with pytest.raises(FrameError, match="code"):
        json_header.decode(b'{"opaque":1}')


def test_json_is_written_as_fastjson_writes_it() -> None:
    command = Command(code=105, language="JAVA", ext={"topic": "grün"}, version=407)
    assert json_header.encode(command).decode() == (
        '{"code":105,"extFields":{"topic":"grün"},"flag":0,"language":"JAVA","opaque":0,'
        '"serializeTypeCurrentRPC":"JSON","version":407}'
    )
    command.remark = 'a "b"'
    assert b'"opaque":0,"remark":"a \\"b\\"","serial' in json_header.encode(command)


def test_the_body_of_a_decoded_command_is_the_frames_view() -> None:
    data = join_frame(JSON, b'{"code":1}', b"body")
    (frame,) = FrameReader().receive_data(data)
    body = codec.decode(frame).body
    assert isinstance(body, memoryview)
    assert body.obj is data
