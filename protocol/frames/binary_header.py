"""Header codec 1: RocketMQ's own binary header.

    0       2          3         5        9       13        13+4        13+4+r    +4
    | code  | language | version | opaque | flag  | r       | remark    | e       | extension fields |
    | int16 | int8     | int16   | int32  | int32 | int32   | r bytes   | int32   | e bytes          |
    an extension field: | int16 key length | key | int32 value length | value |         text is UTF-8

A text of length 0 means "none": empty extension values do not survive a round trip, as in RocketMQ.
Mirrors apache/rocketmq remoting/protocol/RocketMQSerializable.java (4.9.7).
"""

from __future__ import annotations

import struct
from typing import Final

from duemq.protocol.codes import LANGUAGES
from duemq.protocol.errors import FrameError, LocalProtocolError
from duemq.protocol.frames.command import Command

_FIXED: Final = struct.Struct(">hbhiii")
_I16: Final = struct.Struct(">h")
_I32: Final = struct.Struct(">i")
assert _FIXED.size == 17

_LANGUAGE_NUMBERS: Final = {name: number for number, name in enumerate(LANGUAGES)}


def decode(header: bytes) -> Command:
    """Decode the command in a binary header, without its body. Raises FrameError."""
    try:
        code, language, version, opaque, flag, remark_size = _FIXED.unpack_from(header, 0)
        remark, position = _text(header, _FIXED.size, remark_size, "remark")
        (ext_size,) = _I32.unpack_from(header, position)
        position += 4
        end = position + ext_size
        if ext_size < 0 or end > len(header):
            raise FrameError(f"extension fields of {ext_size} bytes in a header of {len(header)}")
        ext: dict[str, str] = {}
        while position < end:
            (size,) = _I16.unpack_from(header, position)
            key, position = _text(header, position + 2, size, "key of an extension field")
            (size,) = _I32.unpack_from(header, position)
            value, position = _text(header, position + 4, size, "value of an extension field")
            if key and value:
                ext[key] = value
        if position != end:
            raise FrameError("an extension field runs over the end of the extension fields")
    except struct.error:
        raise FrameError(f"a binary header of {len(header)} bytes that ends too early") from None
    except UnicodeDecodeError as error:
        raise FrameError(f"a binary header with text that is not UTF-8: {error}") from None
    return Command(
        code=code,
        language=LANGUAGES[language] if 0 <= language < len(LANGUAGES) else None,
        version=version,
        opaque=opaque,
        flag=flag,
        remark=remark or None,
        ext=ext,
    )


def _text(header: bytes, position: int, size: int, what: str) -> tuple[str, int]:
    end = position + size
    if size < 0 or end > len(header):
        raise FrameError(f"the {what} has {size} bytes in a header of {len(header)}")
    return header[position:end].decode(), end


def encode(command: Command) -> bytes:
    """Encode the binary header of a command. Raises LocalProtocolError for a code or version of more than 16 bits, or a
    key of more than 32767 bytes."""
    remark = (command.remark or "").encode()
    fields = []
    try:
        for name, value in command.ext.items():
            key, text = name.encode(), value.encode()
            fields += [_I16.pack(len(key)), key, _I32.pack(len(text)), text]
        ext = b"".join(fields)
        language = _LANGUAGE_NUMBERS.get(command.language or "OTHER", 7)
        fixed = _FIXED.pack(command.code, language, command.version, command.opaque, command.flag, len(remark))
    except struct.error as error:
        raise LocalProtocolError(f"code {command.code} does not fit the binary header: {error}") from None
    return b"".join((fixed, remark, _I32.pack(len(ext)), ext))
