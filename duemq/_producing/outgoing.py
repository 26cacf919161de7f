"""A message ready to be sent: checked, with its id, in the form that requests need."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

from duemq._net import compression
from duemq._values import checks
from duemq.errors import ArgumentError
from duemq.messages import SHARDING_KEY
from duemq.protocol.records import properties
from duemq.protocol.records.record import FLAG_COMPRESSED

COMPRESS_IN_THREAD_BYTES: Final = 128 * 1024
"""Bodies of this size or more are compressed in a thread: it takes a millisecond or more, which would block the event
loop."""


class Outgoing(msgspec.Struct, frozen=True):
    """A message ready to be sent, to whichever broker."""

    topic: str
    body: bytes
    sys_flag: int
    properties: Mapping[str, str]
    message_id: str

    def property_text(self, more: Mapping[str, str]) -> str:
        """Return all properties in their wire form; `more`: those that apply to one attempt only. Raises
        ArgumentError."""
        text = properties.format_properties({**self.properties, **more})
        checks.check_property_size(text)
        return text


def prepare(
    topic: str,
    body: bytes | str,
    tags: str | None,
    keys: str | Iterable[str],
    user_properties: Mapping[str, str] | None,
    *,
    message_id: str,
    max_body_bytes: int,
    sharding_key: str | None = None,
) -> Outgoing:
    """Check a message and add its system properties. Raises ArgumentError."""
    checks.check_topic_to_send(topic)
    data = _as_bytes(body)
    checks.check_body(data, max_body_bytes)
    fields = dict[str, str]()
    if user_properties:
        fields.update(user_properties)
        checks.check_properties(fields)
    if tags is not None:
        checks.check_tags(tags)
        fields[properties.TAGS] = tags
    if keys:
        joined = _join_keys(keys)
        if joined:
            fields[properties.KEYS] = joined
    if sharding_key is not None:
        checks.check_property_text(sharding_key, "a sharding key")
        fields[SHARDING_KEY] = sharding_key
    fields[properties.UNIQ_KEY] = message_id
    return Outgoing(topic, data, 0, fields, message_id)


def one_key(keys: str | Iterable[str]) -> str:
    """Return the only key of a message that replaces another. Raises ArgumentError."""
    found = _join_keys(keys).split()
    if len(found) != 1:
        raise ArgumentError(f"`replace` finds the message by its key: give exactly one in `keys`, not {len(found)}")
    return found[0]


async def compressed(message: Outgoing, from_bytes: int | None) -> Outgoing:
    """Return the message with its body compressed, if the body has at least `from_bytes` and gets smaller; otherwise
    unchanged. `from_bytes`: None for no compression."""
    if from_bytes is None or len(message.body) < from_bytes:
        return message
    if len(message.body) >= COMPRESS_IN_THREAD_BYTES:
        packed = await asyncio.to_thread(compression.compress, message.body)
    else:
        packed = compression.compress(message.body)
    if len(packed) >= len(message.body):
        return message
    return Outgoing(message.topic, packed, FLAG_COMPRESSED, message.properties, message.message_id)


def _as_bytes(body: bytes | str) -> bytes:
    if type(body) is bytes:
        return body
    if isinstance(body, str):
        return checks.encoded(body, "the body")
    if not isinstance(body, bytes | bytearray | memoryview):
        raise ArgumentError(f"a body must be bytes or str, not {type(body).__name__}")
    return bytes(body)


def _join_keys(keys: str | Iterable[str]) -> str:
    parts = [keys] if isinstance(keys, str) else list(keys)
    for key in parts:
        if keys != "":
            checks.check_property_text(key, "a key")
    if not isinstance(keys, str) and any(" " in key for key in parts):
        raise ArgumentError("a key contains a blank; RocketMQ would treat it as several keys")
    return " ".join(parts)
