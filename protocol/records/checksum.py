"""The checksum of a whole record, as its last property.

    | ... properties | __CRC32# | \\x01 | digits | \\x02 |
    |                | 8        | 1    | 10     | 1    |   bytes; the end of the record

The digits are those of the CRC32 of all bytes of the record before the property, with the top bit cleared: always ten
digits, the last one first. The checksum of the body, in the record's head, covers neither the head nor the properties.

RocketMQ 5 writes this checksum if enabledAppendPropCRC is set. If forceVerifyPropCRC is set, it also refuses records
without a checksum when it starts after a crash. Mirrors apache/rocketmq store/CommitLog.java and
common/message/MessageDecoder.java (5.3.3).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from duemq.protocol.frames.command import Body
from duemq.protocol.records.record import crc32

NAME: Final = "__CRC32#"
NAME_FIELD: Final = b"__CRC32#\x01"
_END: Final = b"\x02"
SIZE: Final = len(NAME_FIELD) + 11
"""Number of bytes of the property."""
ROOM: Final = SIZE + 1
"""Most bytes that adding the property takes: the properties before it may need an end (\\x02)."""


def without(properties: bytes) -> bytes:
    """Return properties without any checksum, for a record other than the one to which the checksum belonged."""
    if NAME_FIELD not in properties:
        return properties
    return _END.join(part for part in properties.split(_END) if not part.startswith(NAME_FIELD))


def ended(properties: bytes) -> bytes:
    """Return properties, which must have no checksum, with an end (\\x02) after which a checksum may follow."""
    return properties if not properties or properties.endswith(_END) else properties + _END


def checksum_field(parts: Iterable[Body]) -> bytes:
    """Return the checksum property for a record, from the parts of its bytes before the property, in order."""
    value = 0
    for part in parts:
        value = crc32(part, value)
    return NAME_FIELD + (b"%010d" % (value & 0x7FFFFFFF))[::-1] + _END


def is_there(properties: bytes) -> bool:
    """Whether the last property is a checksum. The byte that ends the property before it may be damaged, which the
    checksum then shows."""
    return len(properties) >= SIZE and properties[-SIZE:].startswith(NAME_FIELD)


def is_right(record: Body) -> bool:
    """Whether a record whose last property is a checksum has the checksum of its bytes."""
    view = memoryview(record)
    return bytes(view[-SIZE:]) == checksum_field([view[:-SIZE]])
