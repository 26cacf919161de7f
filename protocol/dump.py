"""Prints captured frames of the remoting protocol as lines of text, for finding faults.

    python -m duemq.protocol.dump [FILE...]      files of consecutive frames, as raw bytes, hex or base64;
                                                 without FILE, or for -, standard input
        --as raw|hex|base64                      the encoding, if the bytes themselves do not tell
        --body                                   show the bodies of messages as well, and bodies of frames in full

Exit code: 0; 1 if a file could not be read, has no frames, is not in the given encoding, or is damaged, or if standard
output could not be written; 2 for wrong options.

Each frame is shown with its code and the code's name, the kind of header, its fields, and the body: the records of an
answer to a pull, the messages of a batch, JSON, or its first bytes. Damage is reported with the reason. Readable bytes
behind it are shown, except for frames behind a wrong length: nothing tells where they begin.

`DamageLine`, `fields`, `value`, `when` and `record` format values and stored messages for other dumps, too. Control
characters in the bytes are escaped, so that a terminal does not act on them.
"""

from __future__ import annotations

import argparse
import base64
import binascii
import contextlib
import json
import re
import sys
from bisect import bisect_left
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from duemq.protocol.dump_output import needs_package, report, run, shown_path, write_line

try:
    from duemq.protocol.codes import RequestCode, ResponseCode
    from duemq.protocol.errors import BodyFormatError, FrameError, RecordError
    from duemq.protocol.frames import codec, fastjson
    from duemq.protocol.frames.command import Body, Command
    from duemq.protocol.frames.frame import BINARY, JSON, MAX_FRAME_BYTES, MSGPACK, Frame, FrameReader
    from duemq.protocol.records import batch, properties
    from duemq.protocol.records.message_id import unpack_host
    from duemq.protocol.records.record import (
        FLAG_BORN_IPV6,
        FLAG_COMPRESSED,
        FLAG_MULTI_TAGS,
        FLAG_STORE_IPV6,
        FLAG_TRANSACTION,
        MAGIC_V2,
        MAGICS,
        TRANSACTION_COMMIT,
        TRANSACTION_PREPARED,
        TRANSACTION_ROLLBACK,
        StoredMessage,
        decode,
    )
    from duemq.protocol.requests.headers import SendMessage, SendMessageV2
except ModuleNotFoundError as error:
    if __name__ != "__main__":
        raise
    needs_package("duemq.protocol.dump", error, "duemq")

FORMATS: Final = ("raw", "hex", "base64")
MAX_BYTES: Final = 1 << 27
"""Maximum size, in bytes, of a file of frames."""
MAGIC_AT: Final = 4
MAGIC_SIZE: Final = 4

_PREFIX_SIZE: Final = 8
"""Bytes of a frame in front of its header."""
_SHOWN: Final = 256
"""Number of bytes that are shown of a body that is shown in part."""
_CONTROL: Final = re.compile(rb"[^\t\r\n -~]")
_NOT_HEX: Final = re.compile(rb"[^\s0-9a-fA-F]")
_NOT_BASE64: Final = re.compile(rb"[^\s0-9a-zA-Z+/=]")
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_PLAIN: Final = re.compile(r"[^\s\"'=]+")
_HEADERS: Final = {JSON: "JSON", BINARY: "RocketMQ's binary", MSGPACK: "MessagePack"}
_LETTERS: Final = dict(zip(SendMessageV2.__struct_encode_fields__, SendMessage.__struct_encode_fields__, strict=True))
_WITH_LETTERS: Final = (
    RequestCode.SEND_MESSAGE_V2,
    RequestCode.SEND_BATCH_MESSAGE,
    RequestCode.SEND_REPLY_MESSAGE_V2,
)
_TRANSACTIONS: Final = {
    TRANSACTION_PREPARED: "prepared",
    TRANSACTION_COMMIT: "commit",
    TRANSACTION_ROLLBACK: "rollback",
}
_FLAGS: Final = {
    FLAG_COMPRESSED: "compressed",
    FLAG_MULTI_TAGS: "multi-tags",
    FLAG_BORN_IPV6: "born-ipv6",
    FLAG_STORE_IPV6: "store-ipv6",
}


class DamageLine(str):
    """A line that reports damage: commands end with exit code 1 for it."""

    __slots__ = ()


def prefixed(prefix: str, line: str) -> str:
    """Return a line behind a prefix; a DamageLine remains one."""
    return type(line)(prefix + line)


# --- values


def fields(**values: object) -> str:
    """Return `name=value` for each value that is not None, joined by blanks. Text with blanks, quotes or unprintable
    characters is shown as a JSON string, bytes as in `shown`, and other values as JSON."""
    return " ".join(f"{name}={value(each)}" for name, each in values.items() if each is not None)


def when(ms: int) -> str:
    """Return a time in ms since the epoch as UTC; as the number if it is before the epoch or beyond the year 9999."""
    try:
        moment = _EPOCH + timedelta(milliseconds=ms)
    except OverflowError:
        return str(ms)
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{ms % 1000:03}Z" if ms >= 0 else str(ms)


def shown(data: Body, most: int | None = None) -> str:
    """Return bytes as a JSON string if they are printable text, else as hex digits after 0x. If there are more than
    `most` bytes, return the first ones, and the number of the others."""
    part = bytes(data) if most is None else bytes(data[:most])
    more = f" and {len(data) - len(part)} bytes more" if len(part) < len(data) else ""
    try:
        text = part.decode()
    except UnicodeDecodeError:
        text = "\0"
    is_text = all(each.isprintable() or each in "\t\r\n" for each in text)
    return (json.dumps(text, ensure_ascii=False) if is_text else f"0x{part.hex()}") + more


def value(of: object) -> str:
    """Return one value as `fields` writes it."""
    if isinstance(of, bytes | bytearray | memoryview):
        return shown(of)
    if isinstance(of, str):
        return of if _PLAIN.fullmatch(of) and of.isprintable() else _json(of)
    return _json(of)


def _json(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if text.isprintable() else json.dumps(value, default=str)


def _host(host: bytes) -> str:
    address, port = unpack_host(host)
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


# --- stored messages


def record(message: StoredMessage, *, with_body: bool = False) -> str:
    """Return a stored message as one line. Times are in UTC; `prepared` is the prepared transaction offset."""
    found = properties.parse(message.properties_text)
    keys = found.pop(properties.KEYS, None)
    return fields(
        offset=message.physical_offset,
        size=message.size,
        topic=message.topic,
        queue=message.queue_id,
        queueOffset=message.queue_offset,
        stored=when(message.store_timestamp),
        born=when(message.born_timestamp),
        flag=message.flag or None,
        sysFlag=_sys_flag(message.sys_flag) if message.sys_flag else None,
        version=2 if message.magic == MAGIC_V2 else None,
        retries=message.reconsume_times or None,
        prepared=message.prepared_transaction_offset or None,
        bornHost=_host(message.born_host),
        storeHost=_host(message.store_host),
        keys=keys,
        properties=found,
        bodySize=len(message.body),
        body=message.body if with_body else None,
    )


def _sys_flag(flag: int) -> str:
    names = [name for bit, name in _FLAGS.items() if flag & bit]
    names += [_TRANSACTIONS[flag & FLAG_TRANSACTION]] if flag & FLAG_TRANSACTION else []
    return f"{flag:#x}({','.join(names)})"


def records(data: Body, *, with_bodies: bool = False) -> Iterator[str]:
    """Yield the records in the body of a pull's answer, one line each. Other bytes are reported, and skipped up to the
    next record."""
    view, at = memoryview(data), 0
    while at < len(view):
        try:
            message = decode(view, at)
        except RecordError as error:
            following = next((place for place in _places(data, at + 1) if _is_record(view, place)), len(view))
            yield DamageLine(f"damaged at byte {at}: {error.why}; {following - at} bytes are passed over")
            at = following
        else:
            yield record(message, with_body=with_bodies)
            at += message.size


def _places(data: Body, start: int) -> Iterator[int]:
    return (found.start() - MAGIC_AT for found in MAGICS.finditer(data, start + MAGIC_AT))


def _is_record(data: memoryview, at: int) -> bool:
    try:
        decode(data, at)
    except RecordError:
        return False
    return True


# --- frames


def frames(data: bytes, *, with_bodies: bool = False) -> Iterator[str]:
    """Yield the frames in some bytes, as lines. Never raises because of the content of the bytes."""
    at = number = 0
    while at < len(data):
        # A frame of its own for each reader, which reads nothing behind a fault.
        end = at + 4 + int.from_bytes(data[at : at + 4], signed=True)
        is_whole = at + _PREFIX_SIZE <= end <= min(len(data), at + MAX_FRAME_BYTES)
        end = end if is_whole else len(data)
        reader = FrameReader()
        found = reader.receive_data(data[at:end])
        reader.receive_eof()
        number += 1
        if found:
            yield f"frame {number}, bytes {at} to {end}"
            yield from (prefixed("  ", line) for line in _frame(found[0], with_bodies=with_bodies))
        else:
            what = f"{end - at} bytes are " + ("passed over" if is_whole else "left")
            yield DamageLine(f"damaged at byte {at}: {reader.error}; {what}")
            yield f"  {shown(data[at:end], _SHOWN)}"
        at = end


def _frame(frame: Frame, *, with_bodies: bool) -> Iterator[str]:
    kind, header, body = frame
    sizes = f"{_HEADERS[kind]} header of {len(header)} bytes, body of {len(body)} bytes"
    try:
        command = codec.decode(frame)
    except FrameError as error:
        yield DamageLine(f"damaged: {error}; {sizes}")
        yield f"header {shown(header, _SHOWN)}"
        if body:
            yield f"body {shown(body, None if with_bodies else _SHOWN)}"
        return
    yield f"{_headline(command)}, {sizes}"
    yield fields(
        opaque=command.opaque,
        flag=command.flag,
        language=command.language,
        version=command.version,
        remark=command.remark,
    )
    names = _LETTERS if not command.is_response and command.code in _WITH_LETTERS else {}
    for name, text in command.ext.items():
        yield f"{value(name)}{f'({names[name]})' if name in names else ''}={value(text)}"
    yield from _body(command, with_bodies=with_bodies)


def _headline(command: Command) -> str:
    codes: type[RequestCode] | type[ResponseCode] = ResponseCode if command.is_response else RequestCode
    kind = "answer" if command.is_response else "one-way request" if command.is_oneway else "request"
    try:
        name = codes(command.code).name
    except ValueError:
        name = "of no known name"
    return f"{kind} {command.code} {name}"


def _body(command: Command, *, with_bodies: bool) -> Iterator[str]:
    body = command.body
    if MAGICS.match(body, MAGIC_AT):
        yield from records(body, with_bodies=with_bodies)
    elif command.code == RequestCode.SEND_BATCH_MESSAGE and not command.is_response:
        yield from _parts(body, with_bodies=with_bodies)
    elif bytes(body[:1]) in (b"{", b"["):
        try:
            yield f"body {_json(fastjson.loads(body))}"
        except BodyFormatError as error:
            yield DamageLine(f"body damaged: {error}")
            yield f"body {shown(body, None if with_bodies else _SHOWN)}"
    elif body:
        yield f"body {shown(body, None if with_bodies else _SHOWN)}"


def _parts(body: Body, *, with_bodies: bool) -> Iterator[str]:
    data, why = bytes(body), ""

    def fails(most: int) -> bool:
        try:
            batch.decode(data, most)
        except BodyFormatError:
            return True
        return False

    try:
        parts = batch.decode(data)
    except BodyFormatError as error:
        why = str(error)
        first = bisect_left(range(len(data)), True, key=fails)  # number of messages up to and with the first broken one
        parts = batch.decode(data, first - 1)
    for number, (flag, content, text) in enumerate(parts):
        yield f"message {number} " + fields(
            flag=flag,
            properties=properties.parse(text),
            bodySize=len(content),
            body=content if with_bodies else None,
        )
    if why:
        yield DamageLine(f"damaged: {why}")


# --- the command


def unpacked(data: bytes, form: str | None = None) -> bytes:
    """Return the bytes of frames from data in one of FORMATS. If no format is given, the data counts as hex or base64
    if all of it can be, and if the result begins like a frame, whose length is below 2**24. Raises ValueError if the
    data is not in the given format, or is text in none of them."""
    text = b"".join(data.split())
    if form == "hex":
        if wrong := _NOT_HEX.search(data):
            raise ValueError(f"this is not hex: byte {wrong.start()} is {shown(wrong[0])}")
        if len(text) % 2:
            raise ValueError(f"this is not hex of whole bytes: there are {len(text)} digits")
        return bytes.fromhex(text.decode("ascii"))
    if form == "base64":
        if wrong := _NOT_BASE64.search(data):
            raise ValueError(f"this is not base64: byte {wrong.start()} is {shown(wrong[0])}")
        try:
            return base64.b64decode(text, validate=True)
        except binascii.Error as error:
            raise ValueError(f"this is not base64: {error}") from None
    if form is None and text:
        for each in ("hex", "base64"):
            try:
                found = unpacked(text, each)
            except ValueError:
                continue
            if found[:1] == b"\0":
                return found
        if data.isascii() and not _CONTROL.search(data):
            raise ValueError(
                "this is text, but neither hex nor base64 of frames. A hex dump must have only the columns with the "
                "bytes, without offsets and characters: make one with xxd -p"
            )
    return data


def _read(name: str) -> bytes:
    """Return the content of a file, or of standard input for "-". Raises OSError; ValueError if there are too many
    bytes."""
    if name == "-" and sys.stdin is None:
        raise OSError("standard input is closed")
    with contextlib.nullcontext(sys.stdin.buffer) if name == "-" else Path(name).open("rb") as file:
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise ValueError(f"more than {MAX_BYTES} bytes; cut out the frames to look at")
    return data


def main(arguments: list[str] | None = None) -> int:
    """Run the command (see the module) and return its exit code: 1 if a file could not be read, has no frames, is not
    in the given format, or is damaged."""
    parser = argparse.ArgumentParser(
        prog="python -m duemq.protocol.dump", description="Show captured frames of the remoting protocol as text."
    )
    parser.add_argument("files", nargs="*", metavar="FILE", default=["-"], help="- is standard input, the default")
    parser.add_argument("--as", dest="form", choices=FORMATS, help="the encoding, if the bytes themselves do not tell")
    parser.add_argument("--body", action="store_true", help="show bodies of messages, too, and other bodies in full")
    given = parser.parse_args(arguments)
    failed = False
    for name in given.files:
        try:
            data = unpacked(_read(name), given.form)
        except (OSError, ValueError) as error:
            report(name, error)
            failed = True
            continue
        if not data:
            report(name, ValueError("there are no bytes"))
            failed = True
            continue
        if len(given.files) > 1:
            write_line(f"== {shown_path(name)}")
        for line in frames(data, with_bodies=given.body):
            write_line(line)
            failed = failed or isinstance(line, DamageLine)
    return int(failed)


if __name__ == "__main__":
    run(main)
