"""The body of a batch send: messages one after the other.

    | size  | 0 (magic) | 0 (crc) | flag  | n     | body | p     | properties |
    | int32 | int32     | int32   | int32 | int32 | n    | int16 | p          |        size: of this part; big-endian

Mirrors apache/rocketmq common/message/MessageDecoder.java, encodeMessage (4.9.7).
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterable
from typing import Final

from duemq.protocol.errors import BodyFormatError
from duemq.protocol.records import properties

_HEAD: Final = struct.Struct(">iiiii")
_U16: Final = struct.Struct(">H")

BatchPart = tuple[int, bytes, str]
"""Flag, body, and property text of one message."""


def decode(data: bytes | memoryview, most: int = sys.maxsize) -> list[BatchPart]:
    """Decode the messages of a batch, at most the first `most`. Raises BodyFormatError, which names the broken part."""
    parts: list[BatchPart] = []
    position, end = 0, len(data)
    while position < end and len(parts) < most:
        number = len(parts)
        if end - position < _HEAD.size + 2:
            raise BodyFormatError(f"part {number} of the batch: {end - position} bytes are too few")
        size, _, _, flag, body_size = _HEAD.unpack_from(data, position)
        body_at = position + _HEAD.size
        part_end = position + size
        if part_end > end or body_size < 0 or body_at + body_size + 2 > part_end:
            raise BodyFormatError(
                f"part {number} of the batch: size {size}, body {body_size}, with {end - position} there"
            )
        (properties_size,) = _U16.unpack_from(data, body_at + body_size)
        properties_at = body_at + body_size + 2
        if properties_at + properties_size != part_end:
            raise BodyFormatError(f"part {number} of the batch: properties of {properties_size} bytes do not end it")
        try:
            text = bytes(data[properties_at:part_end]).decode()
        except UnicodeDecodeError:
            raise BodyFormatError(f"part {number} of the batch: properties that are not UTF-8") from None
        parts.append((flag, bytes(data[body_at : body_at + body_size]), text))
        position = part_end
    return parts


def encode(parts: Iterable[BatchPart]) -> bytes:
    """Encode the body of a batch. Raises ValueError for properties of more than `properties.MAX_BYTES` bytes."""
    pieces = []
    for flag, body, text in parts:
        encoded = text.encode()
        if len(encoded) > properties.MAX_BYTES:
            raise ValueError(f"properties of {len(encoded)} bytes; a message has at most {properties.MAX_BYTES}")
        size = _HEAD.size + len(body) + 2 + len(encoded)
        pieces += [_HEAD.pack(size, 0, 0, flag, len(body)), body, _U16.pack(len(encoded)), encoded]
    return b"".join(pieces)
