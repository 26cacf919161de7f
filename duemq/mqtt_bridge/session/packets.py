"""The packets that carry messages and their acknowledgements, as bytes: PUBLISH, PUBACK, PUBREC, PUBREL, PUBCOMP.

    | kind 4 bits, flags 4 bits | remaining length 1-4 bytes | rest |

As in MQTT 5.0 (OASIS, 2019), chapters 2 and 3.3 to 3.7, and MQTT 3.1.1 (OASIS, 2014), which has no properties and no
reason codes. Made for many packets at a time: the bytes of one read of a socket are cut into all their packets.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from duemq.errors import DueMQError

PUBLISH: Final = 0x30
PUBACK: Final = 0x40
PUBREC: Final = 0x50
PUBREL: Final = 0x60
PUBCOMP: Final = 0x70

SUCCESS: Final = 0x00
FIRST_ERROR: Final = 0x80
"""Reason codes of this value or more are errors: the message was not accepted."""
IMPLEMENTATION_ERROR: Final = 0x83
NOT_AUTHORIZED: Final = 0x87
QUOTA_EXCEEDED: Final = 0x97

MAX_PACKET_IDS: Final = 65_535
MAX_REMAINING: Final = 268_435_455
"""Maximum size of a packet without its head, in bytes."""
HEAD_OF_LARGE: Final = 65_535 + 65_536
"""Size of the part that is kept of a packet that exceeds the limit, in bytes: enough for its topic, and for properties
of common size."""

_U16: Final = struct.Struct("!H")
_U32: Final = struct.Struct("!I")
_HEAD_AND_ID: Final = struct.Struct("!BBH")

# Identifiers of the properties that a PUBLISH may have, MQTT 5.0, 2.2.2.2.
_PAYLOAD_FORMAT: Final = 0x01
_MESSAGE_EXPIRY: Final = 0x02
_CONTENT_TYPE: Final = 0x03
_RESPONSE_TOPIC: Final = 0x08
_CORRELATION_DATA: Final = 0x09
_SUBSCRIPTION_ID: Final = 0x0B
_TOPIC_ALIAS: Final = 0x23
_USER_PROPERTY: Final = 0x26


class PacketError(DueMQError):
    """The MQTT broker sent bytes that are not a packet or a packet that it must not send; or a packet cannot be
    encoded."""


@dataclass(slots=True)
class Properties:
    """The properties of a PUBLISH. MQTT 3.1.1 has none of them."""

    is_text: bool = False
    """Payload format indicator: whether the payload is UTF-8."""
    expiry: int | None = None
    """Message expiry interval in seconds; None: it does not expire."""
    content_type: str | None = None
    response_topic: str | None = None
    correlation_data: bytes | None = None
    user: tuple[tuple[str, str], ...] = ()
    subscription_ids: tuple[int, ...] = ()
    """Ids of the receiver's subscriptions that match. Brokers send them, clients do not."""


NO_PROPERTIES: Final = Properties()
"""The properties of a PUBLISH that has none. Shared, so it must not be changed."""


@dataclass(slots=True)
class Publish:
    """A PUBLISH as it was received."""

    topic: str
    payload: bytes
    qos: int
    retain: bool
    dup: bool
    packet_id: int
    """The packet id; 0 with QoS 0."""
    properties: Properties
    size: int
    """Size of the part of the packet that is kept, without its head, in bytes."""
    missing: int = 0
    """Number of bytes of the packet that were beyond the limit and are not kept. Unless it is 0, `payload` is
    incomplete."""


@dataclass(slots=True)
class Ack:
    """A PUBACK, PUBREC, PUBREL or PUBCOMP."""

    kind: int
    packet_id: int
    reason: int = SUCCESS

    @property
    def is_error(self) -> bool:
        """Whether it reports an error: the message was not accepted."""
        return self.reason >= FIRST_ERROR


class Cutter:
    """Cuts a stream of bytes into packets. Of a packet of more than `limit` bytes only the beginning is kept."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._left = bytearray()
        self._needed = 0
        self._to_skip = 0
        self._large: tuple[int, bytes, int] | None = None

    def feed(self, data: bytes) -> Iterator[tuple[int, bytes, int]]:
        """Yield the packets that are now complete: the first byte, the bytes after the length, and the number of bytes
        that are not kept. Raises PacketError for bytes that are not a packet."""
        if self._to_skip:
            skipped = min(self._to_skip, len(data))
            self._to_skip -= skipped
            if self._to_skip:
                return
            data = data[skipped:]
            assert self._large is not None
            yield self._large
            self._large = None
        if self._left:
            self._left += data
            if len(self._left) < self._needed:
                return
            data = bytes(self._left)
            self._left.clear()
        self._needed = 0
        position, end = 0, len(data)
        while end - position >= 2:
            begin, length = position + 2, data[position + 1]
            if length & 0x80:
                found = _read_length(data, position + 1, end)
                if found is None:
                    break
                length, begin = found
            if begin + length > end:
                if length > self._limit and end - begin >= HEAD_OF_LARGE:
                    kept = data[begin:end]
                    self._to_skip = length - len(kept)
                    self._large = (data[position], kept[:HEAD_OF_LARGE], length - HEAD_OF_LARGE)
                    return
                # Wait for this many bytes, so that a large packet is not copied at each read.
                self._needed = begin - position + min(length, max(self._limit, HEAD_OF_LARGE))
                break
            if length > self._limit:
                kept = data[begin : begin + min(length, HEAD_OF_LARGE)]
                yield data[position], kept, length - len(kept)
            else:
                yield data[position], data[begin : begin + length], 0
            position = begin + length
        self._left += data[position:]


def _read_length(data: bytes, position: int, end: int) -> tuple[int, int] | None:
    """Return the variable byte integer at a position and the position of its end; None if it is incomplete. Raises
    PacketError if it has more than 4 bytes."""
    value = shift = 0
    for at in range(position, min(position + 4, end)):
        value |= (data[at] & 0x7F) << shift
        if data[at] < 0x80:
            return value, at + 1
        shift += 7
    if end - position >= 4:
        raise PacketError("a length of more than 4 bytes")
    return None


def decode_publish(first: int, body: bytes, *, is_v5: bool, missing: int = 0) -> Publish:
    """Decode a PUBLISH from its first byte and the bytes after its length. Raises PacketError."""
    try:
        qos = first >> 1 & 3
        at = 2 + _U16.unpack_from(body)[0]
        if at > len(body):
            raise PacketError("a PUBLISH that ends within its topic")
        topic = str(body[2:at], "utf-8")
        packet_id = 0
        if qos:
            packet_id = _U16.unpack_from(body, at)[0]
            at += 2
            if qos == 3 or not packet_id:
                raise PacketError(f"a PUBLISH with QoS {qos} and the packet id {packet_id}")
        properties = NO_PROPERTIES
        if is_v5:
            if body[at] == 0:
                at += 1
            elif missing:
                # The properties may be cut off, and the message is refused anyway.
                at = len(body)
            else:
                properties, at = _decode_properties(body, at)
    except (struct.error, IndexError, UnicodeDecodeError) as error:
        raise PacketError(f"a PUBLISH that cannot be read: {error}") from None
    return Publish(topic, body[at:], qos, bool(first & 1), bool(first & 8), packet_id, properties, len(body), missing)


def decode_ack(first: int, body: bytes) -> Ack:
    """Decode an acknowledgement from its first byte and the bytes after its length. Raises PacketError."""
    if len(body) < 2:
        raise PacketError("an acknowledgement without a packet id")
    return Ack(first & 0xF0, body[0] << 8 | body[1], body[2] if len(body) > 2 else SUCCESS)


def _decode_properties(body: bytes, position: int) -> tuple[Properties, int]:
    found = _read_length(body, position, len(body))
    if found is None:
        raise PacketError("properties without an end")
    length, at = found
    end = at + length
    if end > len(body):
        raise PacketError("properties that are longer than their packet")
    properties = Properties()
    user: list[tuple[str, str]] = []
    while at < end:
        kind = body[at]
        at += 1
        if kind == _USER_PROPERTY:
            name, at = _text(body, at)
            value, at = _text(body, at)
            user.append((name, value))
        elif kind == _MESSAGE_EXPIRY:
            properties.expiry = _U32.unpack_from(body, at)[0]
            at += 4
        elif kind == _CONTENT_TYPE:
            properties.content_type, at = _text(body, at)
        elif kind == _RESPONSE_TOPIC:
            properties.response_topic, at = _text(body, at)
        elif kind == _CORRELATION_DATA:
            properties.correlation_data, at = _binary(body, at)
        elif kind == _PAYLOAD_FORMAT:
            properties.is_text = body[at] == 1
            at += 1
        elif kind == _SUBSCRIPTION_ID:
            number = _read_length(body, at, end)
            if number is None:
                raise PacketError("a subscription id without an end")
            properties.subscription_ids += (number[0],)
            at = number[1]
        elif kind == _TOPIC_ALIAS:
            raise PacketError("a topic alias, which this client did not allow")
        else:
            raise PacketError(f"a PUBLISH with the property 0x{kind:02x}")
    properties.user = tuple(user)
    if at != end:
        raise PacketError("a property that is longer than all properties")
    return properties, end


def _text(body: bytes, at: int) -> tuple[str, int]:
    data, at = _binary(body, at)
    return str(data, "utf-8"), at


def _binary(body: bytes, at: int) -> tuple[bytes, int]:
    begin = at + 2
    end = begin + _U16.unpack_from(body, at)[0]
    if end > len(body):
        raise PacketError("a property that is longer than its packet")
    return body[begin:end], end


def encode_publish(
    topic: str,
    payload: bytes,
    *,
    qos: int,
    retain: bool,
    packet_id: int,
    properties: Properties | None,
) -> bytearray:
    """Encode a PUBLISH; `set_dup` marks it as sent again. `properties`: None for MQTT 3.1.1. Raises PacketError if it
    exceeds the limits of a packet: 65,535 bytes for the topic and for each property, 268,435,455 for the packet."""
    name = topic.encode()
    try:
        rest = _U16.pack(len(name)) + name
        if qos:
            rest += _U16.pack(packet_id)
        if properties is not None:
            rest += _encode_properties(properties)
    except struct.error:
        raise PacketError("a topic or property of more than 65535 bytes") from None
    length = len(rest) + len(payload)
    if length > MAX_REMAINING:
        raise PacketError(f"a packet of {length} bytes")
    packet = bytearray((PUBLISH | qos << 1 | retain,))
    packet += _encode_length(length)
    packet += rest
    packet += payload
    return packet


def set_dup(packet: bytearray) -> None:
    """Mark a PUBLISH as sent again."""
    packet[0] |= 8


def clear_dup(packet: bytearray) -> None:
    """Mark a PUBLISH as sent for the first time."""
    packet[0] &= 0xF7


def encode_ack(kind: int, packet_id: int, reason: int = SUCCESS) -> bytes:
    """Encode an acknowledgement. Reasons other than success are for MQTT 5 only."""
    first = kind | 2 if kind == PUBREL else kind
    if reason == SUCCESS:
        return _HEAD_AND_ID.pack(first, 2, packet_id)
    return _HEAD_AND_ID.pack(first, 3, packet_id) + bytes((reason,))


def _encode_properties(properties: Properties) -> bytes:
    data = bytearray()
    if properties.is_text:
        data += bytes((_PAYLOAD_FORMAT, 1))
    if properties.expiry is not None:
        data += bytes((_MESSAGE_EXPIRY,)) + _U32.pack(properties.expiry)
    if properties.content_type is not None:
        _add(data, _CONTENT_TYPE, properties.content_type.encode())
    if properties.response_topic is not None:
        _add(data, _RESPONSE_TOPIC, properties.response_topic.encode())
    if properties.correlation_data is not None:
        _add(data, _CORRELATION_DATA, properties.correlation_data)
    for name, value in properties.user:
        _add(data, _USER_PROPERTY, name.encode())
        text = value.encode()
        data += _U16.pack(len(text)) + text
    return _encode_length(len(data)) + bytes(data)


def _add(data: bytearray, kind: int, value: bytes) -> None:
    data.append(kind)
    data += _U16.pack(len(value))
    data += value


def _encode_length(length: int) -> bytes:
    if length < 0x80:
        return bytes((length,))
    data = bytearray()
    while length >= 0x80:
        data.append(length & 0x7F | 0x80)
        length >>= 7
    data.append(length)
    return bytes(data)
