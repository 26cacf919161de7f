"""One stored message, as the commitlog keeps it and as a pull response carries it.

    0       4        8       12         16      20             28                36        40
    | size  | magic  | crc   | queue id | flag  | queue offset | physical offset | sysflag | born time | ...
    | int32 | uint32 | int32 | int32    | int32 | int64        | int64           | int32   | int64     |

    ... | born host | store time | store host | reconsume times | prepared transaction offset | ...
        | 8 or 20 B | int64      | 8 or 20 B  | int32           | int64                       |

    ... | n     | body | t        | topic | p     | properties |
        | int32 | n B  | 1 or 2 B | t B   | int16 | p B        |

All integers big-endian. size: of the whole record. crc: CRC32 of the body with the top bit cleared, 0 without a body.
Times are ms since the epoch. The length of the topic takes 1 byte in version 1 and 2 bytes in version 2. RocketMQ 5
writes version 2 for topics of more than 127 bytes, and 4.9.7 takes such a record for the end of its log. duemq reads
both versions, and writes version 1 only. Hosts have 20 bytes if the sysflag says IPv6.

A segment of the commitlog ends with an end marker: int32 space left, uint32 magic, the rest undefined.

In a plain message the prepared transaction offset is unused by RocketMQ; in a message that duemq delivered from a
schedule it is the physical offset of the record that scheduled it.

Mirrors apache/rocketmq store/CommitLog.java and common/message/MessageDecoder.java (4.9.7, 5.3.3). The layout is
RocketMQ's and frozen.
"""

from __future__ import annotations

import re
import struct
from typing import Final, NamedTuple

import msgspec
from zlib_ng import zlib_ng

from duemq.protocol.errors import RecordError
from duemq.protocol.frames.command import Body
from duemq.protocol.records import properties
from duemq.protocol.records.message_id import offset_message_id

MAGIC_V1: Final = 0xDAA320A7
MAGIC_V2: Final = 0xDAA320AB
MAGIC_END: Final = 0xCBD43194

FLAG_COMPRESSED: Final = 1
FLAG_MULTI_TAGS: Final = 1 << 1
FLAG_TRANSACTION: Final = 3 << 2
TRANSACTION_NONE: Final = 0
TRANSACTION_PREPARED: Final = 1 << 2
TRANSACTION_COMMIT: Final = 2 << 2
TRANSACTION_ROLLBACK: Final = 3 << 2
FLAG_BORN_IPV6: Final = 1 << 4
FLAG_STORE_IPV6: Final = 1 << 5
FLAG_COMPRESSION_TYPE: Final = 7 << 8
"""Bits that say how a compressed body is compressed, since RocketMQ 5.0."""

MAGICS: Final = re.compile(
    re.escape(MAGIC_V1.to_bytes(4, "big")[:3])
    + b"["
    + b"".join(re.escape(magic.to_bytes(4, "big")[3:]) for magic in (MAGIC_V1, MAGIC_V2))
    + b"]"
)
"""Matches the magic of a record of either version; the two differ only in their last byte."""

HEAD_FIELDS: Final = (
    ("size", "i"),
    ("magic", "I"),
    ("body_crc", "I"),
    ("queue_id", "i"),
    ("flag", "i"),
    ("queue_offset", "q"),
    ("physical_offset", "q"),
    ("sys_flag", "i"),
    ("born_ms", "q"),
    ("born_host", "8s"),
    ("store_ms", "q"),
    ("store_host", "8s"),
    ("reconsume_times", "i"),
    ("prepared_offset", "q"),
    ("body_size", "i"),
)
"""All fields up to the body, for IPv4 hosts: the name of each, and its code in the module struct."""


def head_without(*names: str) -> struct.Struct:
    """Return the layout of all fields up to the body, for IPv4 hosts, that skips the fields with these names."""
    codes = (f"{struct.calcsize(f'>{code}')}x" if name in names else code for name, code in HEAD_FIELDS)
    return struct.Struct(">" + "".join(codes))


HEAD_IPV4: Final = head_without()
"""Layout of all fields up to the body, for IPv4 hosts: the layout that the hot path packs."""
HEAD_SIZE_IPV4: Final = 88
assert HEAD_IPV4.size == HEAD_SIZE_IPV4
FIXED_SIZE_IPV4: Final = HEAD_SIZE_IPV4 + 1 + 2
"""Number of bytes of a version 1 record with IPv4 hosts, not counting body, topic and properties."""
SIZE_AND_MAGIC: Final = struct.Struct(">iI")
END_MARKER: Final = SIZE_AND_MAGIC
END_MARKER_SIZE: Final = 8
assert END_MARKER.size == END_MARKER_SIZE

SYS_FLAG_AT: Final = 36
PHYSICAL_OFFSET_AT: Final = 28
STORE_TIME_AT_IPV4: Final = 56

START: Final = struct.Struct(">" + "".join(code for _, code in HEAD_FIELDS[:8]))
"""Layout of the fields up to and including the sysflag, the same for all hosts."""
assert START.size == SYS_FLAG_AT + 4
_IPV6_HOSTS: Final = {"born_host": FLAG_BORN_IPV6, "store_host": FLAG_STORE_IPV6}
_HEADS: Final = {
    (born, store): struct.Struct(
        ">" + "".join("20s" if _IPV6_HOSTS.get(name, 0) & (born | store) else code for name, code in HEAD_FIELDS)
    )
    for born in (0, FLAG_BORN_IPV6)
    for store in (0, FLAG_STORE_IPV6)
}
_MAGIC_AND_FLAG: Final = struct.Struct(">I28xi")
assert _MAGIC_AND_FLAG.size == SYS_FLAG_AT
_U16: Final = struct.Struct(">H")
MAX_TOPIC_BYTES: Final = 127
MIN_SIZE: Final = FIXED_SIZE_IPV4

crc32 = zlib_ng.crc32


def head_for(sys_flag: int) -> struct.Struct:
    """Return the layout of all fields up to the body, for the address families in a sysflag."""
    return _HEADS[sys_flag & FLAG_BORN_IPV6, sys_flag & FLAG_STORE_IPV6]


def store_timestamp(start: bytes) -> int:
    """Return the store time, ms since the epoch, from the first HEAD_SIZE_IPV4 bytes of a record; 0 if they are not the
    beginning of a record."""
    if len(start) < HEAD_SIZE_IPV4:
        return 0
    magic, flag = _MAGIC_AND_FLAG.unpack_from(start, 4)
    if magic not in (MAGIC_V1, MAGIC_V2):
        return 0
    at = STORE_TIME_AT_IPV4 + (12 if flag & FLAG_BORN_IPV6 else 0)
    return int.from_bytes(start[at : at + 8], "big", signed=True)


class RecordSummary(NamedTuple):
    """The fields of a record that decide its tags code in a consume queue. The time is in ms since the epoch."""

    store_timestamp: int
    prepared_transaction_offset: int
    properties_text: str


def summarize(data: bytes, physical_offset: int) -> RecordSummary | None:
    """Return the summary of the record in `data`, without checking its checksum; None if `data` is not exactly one
    record with this physical offset."""
    if len(data) < MIN_SIZE:
        return None
    magic, flag = _MAGIC_AND_FLAG.unpack_from(data, 4)
    head = head_for(flag)
    if magic not in (MAGIC_V1, MAGIC_V2) or len(data) < head.size + 4:
        return None
    fields = head.unpack_from(data)
    topic_at = head.size + fields[14] + (1 if magic == MAGIC_V1 else 2)
    if (fields[0], fields[6]) != (len(data), physical_offset) or fields[14] < 0 or topic_at + 2 > len(data):
        return None
    at = topic_at + int.from_bytes(data[head.size + fields[14] : topic_at], "big") + 2
    if at + int.from_bytes(data[at - 2 : at], "big") != len(data):
        return None
    return RecordSummary(fields[10], fields[13], data[at:].decode("utf-8", "replace"))


class StoredMessage(msgspec.Struct, gc=False, kw_only=True):
    """A decoded record. The attributes are the fields that the module draws; `body` is as stored, so it may be
    compressed."""

    size: int = 0
    magic: int = MAGIC_V1
    queue_id: int
    flag: int = 0
    queue_offset: int = 0
    physical_offset: int = 0
    sys_flag: int = 0
    born_timestamp: int
    born_host: bytes
    store_timestamp: int
    store_host: bytes
    reconsume_times: int = 0
    prepared_transaction_offset: int = 0
    body: bytes
    topic: str
    properties_text: str = ""

    @property
    def properties(self) -> dict[str, str]:
        """The properties as a dictionary, which is made again on each access."""
        return properties.parse(self.properties_text)

    def get_property(self, name: str) -> str | None:
        """Return one property, or None."""
        return properties.get(self.properties_text, name)

    @property
    def offset_message_id(self) -> str:
        """The broker's id of this message."""
        return offset_message_id(self.store_host, self.physical_offset)

    @property
    def transaction_type(self) -> int:
        """The transaction part of the sysflag: one of the TRANSACTION_* values."""
        return self.sys_flag & FLAG_TRANSACTION


def body_crc(body: Body) -> int:
    """Return the checksum of a body as a record has it."""
    return crc32(body) & 0x7FFFFFFF if body else 0


def encode(message: StoredMessage) -> bytes:
    """Encode a record of version 1; `size` and `magic` of the message are ignored. The flags for IPv6 follow from the
    lengths of the hosts. Raises ValueError for properties of more than `properties.MAX_BYTES` bytes, and for a topic of
    more than 255 bytes, the most that the layout has room for; `decode` accepts at most MAX_TOPIC_BYTES."""
    topic, property_bytes = message.topic.encode(), message.properties_text.encode()
    if len(topic) > 255 or len(property_bytes) > properties.MAX_BYTES:
        raise ValueError(f"a topic of {len(topic)} bytes, properties of {len(property_bytes)} bytes: too long")
    born_v6 = FLAG_BORN_IPV6 if len(message.born_host) == 20 else 0
    store_v6 = FLAG_STORE_IPV6 if len(message.store_host) == 20 else 0
    head = _HEADS[born_v6, store_v6]
    return b"".join(
        (
            head.pack(
                head.size + len(message.body) + 1 + len(topic) + 2 + len(property_bytes),
                MAGIC_V1,
                body_crc(message.body),
                message.queue_id,
                message.flag,
                message.queue_offset,
                message.physical_offset,
                message.sys_flag & ~(FLAG_BORN_IPV6 | FLAG_STORE_IPV6) | born_v6 | store_v6,
                message.born_timestamp,
                message.born_host,
                message.store_timestamp,
                message.store_host,
                message.reconsume_times,
                message.prepared_transaction_offset,
                len(message.body),
            ),
            message.body,
            bytes((len(topic),)),
            topic,
            _U16.pack(len(property_bytes)),
            property_bytes,
        )
    )


def decode(data: bytes | memoryview, offset: int = 0, *, check_crc: bool = True) -> StoredMessage:
    """Decode the record that starts at byte `offset` of `data`.

    Raises RecordError if there is no whole record: too few bytes, a wrong magic number, lengths that do not add up to
    the record's size, a wrong checksum of the body (unless `check_crc` is false), or text that is not UTF-8.
    """
    end_of_data = len(data)
    if end_of_data - offset < MIN_SIZE:
        raise RecordError(offset, f"{end_of_data - offset} bytes are not a record")
    size, magic, crc, _, _, _, _, sys_flag = START.unpack_from(data, offset)
    if magic not in (MAGIC_V1, MAGIC_V2):
        raise RecordError(offset, f"magic {magic:#010x}")
    if size < MIN_SIZE or offset + size > end_of_data:
        raise RecordError(offset, f"size {size} with {end_of_data - offset} bytes there")
    end = offset + size
    head = head_for(sys_flag)
    topic_length_size = 1 if magic == MAGIC_V1 else 2
    position = offset + head.size
    if position + topic_length_size + 2 > end:
        raise RecordError(offset, f"size {size} is too small for its hosts")
    fields = head.unpack_from(data, offset)
    body_size = fields[14]
    topic_at = position + body_size + topic_length_size
    if body_size < 0 or topic_at + 2 > end:
        raise RecordError(offset, f"a body of {body_size} bytes in a record of {size}")
    body = bytes(data[position : position + body_size])
    topic_size = int.from_bytes(data[topic_at - topic_length_size : topic_at], "big")
    properties_at = topic_at + topic_size + 2
    if properties_at > end or (magic == MAGIC_V1 and topic_size > MAX_TOPIC_BYTES):
        raise RecordError(offset, f"a topic of {topic_size} bytes in a record of {size}")
    (properties_size,) = _U16.unpack_from(data, properties_at - 2)
    if properties_at + properties_size != end or properties_size > properties.MAX_BYTES:
        raise RecordError(offset, f"properties of {properties_size} bytes do not end at the record's end")
    if check_crc and body_crc(body) != crc:
        raise RecordError(offset, f"checksum {crc:#x} of the body, which has {body_crc(body):#x}")
    try:
        topic = bytes(data[topic_at : topic_at + topic_size]).decode()
        text = bytes(data[properties_at:end]).decode()
    except UnicodeDecodeError as error:
        raise RecordError(offset, f"text that is not UTF-8: {error}") from None
    return StoredMessage(
        size=size,
        magic=magic,
        queue_id=fields[3],
        flag=fields[4],
        queue_offset=fields[5],
        physical_offset=fields[6],
        sys_flag=sys_flag,
        born_timestamp=fields[8],
        born_host=fields[9],
        store_timestamp=fields[10],
        store_host=fields[11],
        reconsume_times=fields[12],
        prepared_transaction_offset=fields[13],
        body=body,
        topic=topic,
        properties_text=text,
    )


def decode_all(data: bytes | memoryview) -> list[StoredMessage]:
    """Decode the records of a pull response's body. Raises RecordError."""
    messages, position = [], 0
    while position < len(data):
        message = decode(data, position)
        messages.append(message)
        position += message.size
    return messages
