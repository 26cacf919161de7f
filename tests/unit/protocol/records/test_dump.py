"""Frames as lines of text: complete, and never an error, whatever the frames hold."""

from __future__ import annotations

import base64
import io
import os
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duemq.protocol import dump
from duemq.protocol.codes import FLAG_RESPONSE, RequestCode, ResponseCode
from duemq.protocol.dump_output import shown_path
from duemq.protocol.frames import codec
from duemq.protocol.frames.command import Command
from duemq.protocol.frames.frame import CODECS, join_frame
from duemq.protocol.records import batch
from duemq.protocol.records.record import FLAG_COMPRESSED, TRANSACTION_COMMIT, StoredMessage, encode
from tests.support import wire

SEND = wire.send("orders", b"hello", queue_id=2, properties="KEYS\x01order 1\x02TAGS\x01red")
STORED = StoredMessage(
    queue_id=3,
    queue_offset=7,
    physical_offset=4711,
    sys_flag=FLAG_COMPRESSED | TRANSACTION_COMMIT,
    born_timestamp=1_700_000_000_000,
    born_host=b"\x7f\0\0\x01\0\0\x04\xd2",
    store_timestamp=1_700_000_000_123,
    store_host=bytes(15) + b"\x01\0\0\x2a\x9f",
    reconsume_times=2,
    prepared_transaction_offset=99,
    body=b"hello \x1b[31m",
    topic="orders",
    properties_text="KEYS\x01order 1\x02TAGS\x01red\x02title\x01a\x1bb",
)


def lines(data: bytes, *, with_bodies: bool = False) -> list[str]:
    return list(dump.frames(data, with_bodies=with_bodies))


def answer(body: bytes, code: int = ResponseCode.SUCCESS) -> bytes:
    return codec.encode(Command(code=code, flag=FLAG_RESPONSE, opaque=5, remark="FOUND it", body=body))


@pytest.mark.parametrize("kind", CODECS)
def test_a_request_with_its_fields(kind: int) -> None:
    data = codec.encode(SEND, kind)
    head, what, *rest = lines(data)
    assert head == f"frame 1, bytes 0 to {len(data)}"
    name = ("JSON", "RocketMQ's binary", "MessagePack")[kind]
    assert what.startswith(f"  request 310 SEND_MESSAGE_V2, {name} header of ")
    assert what.endswith(", body of 5 bytes")
    assert f"  opaque={SEND.opaque} flag=0 language=JAVA version=407" in rest
    assert {"  a(producerGroup)=producers", "  b(topic)=orders", "  e(queueId)=2"} <= set(rest)
    assert r'  i(properties)="KEYS\u0001order 1\u0002TAGS\u0001red"' in rest
    assert rest[-1] == '  body "hello"'


def test_an_answer_with_records() -> None:
    records = encode(STORED) + encode(STORED)
    _, what, fields, first, second = lines(answer(records), with_bodies=True)
    assert what.startswith("  answer 0 SUCCESS, JSON header of ")
    assert 'remark="FOUND it"' in fields
    assert first == second
    assert first == (
        f"  offset=4711 size={len(records) // 2} topic=orders queue=3 queueOffset=7 stored=2023-11-14T22:13:20.123Z "
        "born=2023-11-14T22:13:20.000Z sysFlag=0x29(compressed,store-ipv6,commit) retries=2 prepared=99 "
        'bornHost=127.0.0.1:1234 storeHost=[::1]:10911 keys="order 1" '
        'properties={"TAGS": "red", "title": "a\\u001bb"} bodySize=11 body=0x68656c6c6f201b5b33316d'
    )
    assert " body=" not in lines(answer(records))[3]


def test_records_behind_a_damaged_one() -> None:
    whole = encode(STORED)
    torn = bytearray(whole)
    torn[100] ^= 1
    good, damaged, again = dump.records(whole + torn + whole[:50] + whole)
    assert good == again
    assert re.fullmatch(rf"damaged at byte {len(whole)}: checksum .*; {len(whole) + 50} bytes are passed over", damaged)


def test_a_batch_and_what_is_broken_in_it() -> None:
    parts = batch.encode([(0, b"a", "TAGS\x01red"), (1, b"b", ""), (0, b"c", "")])
    command = wire.send("orders", parts, code=RequestCode.SEND_BATCH_MESSAGE, batch=True)
    found = lines(codec.encode(command), with_bodies=True)[-3:]
    assert found == [
        '  message 0 flag=0 properties={"TAGS": "red"} bodySize=1 body="a"',
        '  message 1 flag=1 properties={} bodySize=1 body="b"',
        '  message 2 flag=0 properties={} bodySize=1 body="c"',
    ]
    command.body = parts[:-1]
    *_, first, second, damaged = lines(codec.encode(command))
    assert first.startswith("  message 0 ")
    assert second.startswith("  message 1 ")
    assert damaged == "  damaged: part 2 of the batch: size 23, body 1, with 22 there"


def test_bodies_of_json_and_of_other_bytes() -> None:
    assert lines(answer(b'{0:"a",{"b":1}:[]}'))[-1] == '  body {"0": "a", "{\\"b\\":1}": []}'
    assert lines(answer(b'{"a":'))[-2].startswith("  body damaged: JSON that ends or breaks at ")
    assert lines(answer(bytes(300)))[-1] == f"  body 0x{'00' * 256} and 44 bytes more"
    assert lines(answer(bytes(300)), with_bodies=True)[-1] == f"  body 0x{'00' * 300}"


def test_the_exit_code_counts_damage_and_reads_no_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "frames"
    command = Command(code=10, ext={"damaged": "5", "body damaged": ""}, remark="damaged at byte 5")
    path.write_bytes(codec.encode(command))
    assert dump.main([str(path)]) == 0
    assert "  damaged=5\n" in capsys.readouterr().out
    parts = batch.encode([(0, b"a", "")])
    torn = wire.send("orders", parts[:-1], code=RequestCode.SEND_BATCH_MESSAGE, batch=True)
    for data in (join_frame(0, b"{", b"x"), answer(b'{"a":'), answer(encode(STORED)[:-1]), codec.encode(torn)):
        path.write_bytes(data)
        assert dump.main([str(path)]) == 1


def test_a_code_of_no_name() -> None:
    assert lines(answer(b"", 4711))[1].startswith("  answer 4711 of no known name, ")


def test_a_header_that_does_not_parse_and_what_follows() -> None:
    broken, good = join_frame(0, b"{", b"x"), codec.encode(SEND)
    found = lines(broken + good)
    assert found[1].startswith("  damaged: ")
    assert found[2:4] == ['  header "{"', '  body "x"']
    assert found[4] == f"frame 2, bytes 10 to {10 + len(good)}"


@pytest.mark.parametrize(
    ("word", "why"), [(7 << 24 | 2, "header codec 7; known are "), (9, "a header of 9 bytes in a frame of length 7")]
)
def test_a_frame_that_is_unknown_is_passed_over_by_its_length(word: int, why: str) -> None:
    good = codec.encode(SEND)
    bad = struct.pack(">iI", 7, word) + b"{}x"
    found = lines(bad + good + bad + bad + good)
    _, *rest = lines(good)
    damaged = [line for line in found if line.startswith("damaged ")]
    starts = [0, 11 + len(good), 22 + len(good)]
    assert [line.partition(": ")[0] for line in damaged] == [f"damaged at byte {at}" for at in starts]
    assert all(why in line and line.endswith("; 11 bytes are passed over") for line in damaged)
    assert f"frame 2, bytes 11 to {11 + len(good)}" in found
    assert found[-len(rest) - 1 :] == [f"frame 5, bytes {33 + len(good)} to {33 + 2 * len(good)}", *rest]


def test_a_stream_that_is_cut_off_or_broken() -> None:
    data = codec.encode(SEND)
    damaged, rest = lines(data + data[:20])[-2:]
    assert damaged.startswith(f"damaged at byte {len(data)}: closed in the middle of a frame")
    assert damaged.endswith("; 20 bytes are left")
    assert rest == "  " + dump.shown(data[:20])
    assert lines(data + bytes(8))[-2].startswith(f"damaged at byte {len(data)}: a frame of length 0")


@given(st.binary() | st.builds(lambda a, b: codec.encode(SEND)[:a] + b, st.integers(0, 300), st.binary()))
def test_any_bytes_are_lines(data: bytes) -> None:
    for line in dump.frames(data, with_bodies=True):
        assert line.isprintable()


@given(st.binary(max_size=200), st.integers(0, 130), st.integers(0, 255))
def test_any_bytes_of_a_body_are_lines(data: bytes, at: int, value: int) -> None:
    record = bytearray(encode(STORED))
    record[at] = value
    for body in (bytes(record) + data, encode(STORED)[:at] + data):
        for line in dump.frames(answer(body), with_bodies=True):
            assert line.isprintable()


@pytest.mark.parametrize("form", [None, "raw", "hex", "base64"])
def test_the_command_takes_raw_bytes_hex_and_base64(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], form: str | None
) -> None:
    data = codec.encode(SEND)
    texts = {
        "raw": data,
        "hex": data.hex(" ", 4).encode() + b"\n",
        "base64": base64.encodebytes(data),
    }
    wanted = "\n".join(lines(data)) + "\n"
    for name, text in texts.items():
        if form not in (None, name):
            continue
        path = tmp_path / name
        path.write_bytes(text)
        options = ["--as", form] if form is not None else []
        assert dump.main([str(path), *options]) == 0
        assert capsys.readouterr().out == wanted
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text)))
        assert dump.main(options) == 0
        assert capsys.readouterr().out == wanted


def test_the_command_goes_on_behind_what_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "good").write_bytes(codec.encode(SEND).hex().encode())
    (tmp_path / "bad").write_text("no hex")
    paths = [str(tmp_path / name) for name in ("missing", "bad", "good")]
    assert dump.main([*paths, "--as", "hex"]) == 1
    told = capsys.readouterr()
    assert [line.partition(": ")[0] for line in told.err.splitlines()] == paths[:2]
    assert told.out.startswith(f"== {paths[2]}\nframe 1, ")


@pytest.mark.parametrize(
    ("form", "text", "why"),
    [
        ("hex", "00 0g", 'this is not hex: byte 4 is "g"'),
        ("hex", "\u00fc", "this is not hex: byte 0 is 0xc3"),
        ("hex", "00 0", "this is not hex of whole bytes: there are 3 digits"),
        ("base64", "AA?A", 'this is not base64: byte 2 is "?"'),
        ("base64", "AAA", "this is not base64: Incorrect padding"),
    ],
)
def test_text_of_another_form(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], form: str, text: str, why: str
) -> None:
    path = tmp_path / "frames"
    path.write_text(text)
    assert dump.main([str(path), "--as", form]) == 1
    assert capsys.readouterr().err == f"{path}: {why}\n"


def shell(command: str, directory: Path) -> tuple[int, str, str]:
    """Run a command line in a directory; return its exit code, output and errors."""
    command = command.replace("DUMP", f"{sys.executable} -m duemq.protocol.dump")
    paths = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, shell=True, cwd=directory, env=paths, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


def test_the_command_s_files_may_be_closed_full_or_of_another_encoding(tmp_path: Path) -> None:
    command = Command(code=10, ext={"name": "J\u00f6rg"}, body=b"x" * 100_000)
    (tmp_path / "f").write_bytes(codec.encode(command))
    (tmp_path / "small").write_bytes(codec.encode(SEND))
    closed = "standard output is closed: nothing can be shown\n"
    full = "standard output cannot be written: No space left on device\n"
    for line, wanted in {
        "DUMP f >&-": (1, "", closed),
        "DUMP - <&-": (1, "", "-: standard input is closed\n"),
        "DUMP f f --body > /dev/full": (1, "", full),
        "DUMP small > /dev/full": (1, "", full),
        "DUMP missing 2>&-": (1, "", ""),
    }.items():
        assert shell(line, tmp_path) == wanted, line
    code, out, err = shell("PYTHONIOENCODING=ascii DUMP f", tmp_path)
    assert (code, err) == (0, "")
    assert "  name=J\\xf6rg\n" in out


def test_a_missing_package_is_named(tmp_path: Path) -> None:
    (tmp_path / "hide").mkdir()
    (tmp_path / "hide" / "sitecustomize.py").write_text("import sys; sys.modules['msgspec'] = None\n")
    run = "PYTHONPATH=$PWD/hide:$PYTHONPATH DUMP f"
    assert shell(run, tmp_path) == (
        1,
        "",
        "python -m duemq.protocol.dump needs the package msgspec: pip install duemq\n",
    )


def test_names_of_files_are_escaped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = {
        b"a b": "a b",
        b"a\n\x1b[31m": r"$'a\n\x1b[31m'",
        b"x\xff\xfe'\\": r"$'x\xff\xfe\'\\'",
        "\u00fc\u200b".encode(): "$'\u00fc\\xe2\\x80\\x8b'",
    }
    for name, shown in names.items():
        path = os.fsdecode(name)
        assert shown_path(path) == shown
        (tmp_path / path).write_bytes(codec.encode(SEND))
        before = "" if shown == path else "$'"
        wanted = f"{before}{tmp_path}/{shown.removeprefix('$' + chr(39))}"
        assert dump.main([str(tmp_path / path)] * 2) == 0
        assert capsys.readouterr().out.startswith(f"== {wanted}\n")
        (tmp_path / path).unlink()
        assert dump.main([str(tmp_path / path)]) == 1
        assert capsys.readouterr().err == f"{wanted}: No such file or directory\n"


@pytest.mark.parametrize(
    ("ms", "text"),
    [
        (0, "1970-01-01T00:00:00.000Z"),
        (253_402_300_799_999, "9999-12-31T23:59:59.999Z"),
        (253_402_300_800_000, "253402300800000"),
        (-1, "-1"),
        (2**63 - 1, str(2**63 - 1)),
        (-(2**63), str(-(2**63))),
    ],
)
def test_times(ms: int, text: str) -> None:
    assert dump.when(ms) == text


def test_too_many_bytes_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(dump, "MAX_BYTES", 10)
    (tmp_path / "frames").write_bytes(bytes(11))
    assert dump.main([str(tmp_path / "frames")]) == 1
    assert "more than 10 bytes" in capsys.readouterr().err


def test_the_exit_code_and_stderr_say_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = codec.encode(SEND)
    for name, content, out, err in (
        ("missing", None, "", "No such file or directory"),
        ("empty", b"", "", "there are no bytes"),
        ("text", b"hello world", "", "this is text, but neither hex nor base64"),
        ("hexdump", b"00000000: 0000 001c 0000 00aa  ........\n", "", "this is text, but neither hex nor base64"),
        ("cut", whole[:-1], "damaged at byte 0", ""),
        ("broken", whole + b"\0\0\0\x01", "damaged at byte", ""),
    ):
        path = tmp_path / name
        if content is not None:
            path.write_bytes(content)
        assert dump.main([str(path)]) == 1
        told = capsys.readouterr()
        assert out in told.out
        assert told.err.startswith(f"{path}: {err}") if err else told.err == ""
        assert told.err.count(str(path)) == bool(err)
