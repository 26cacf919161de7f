"""Body of REGISTER_BROKER (103): the topics of a broker.

Plain, JSON:
    {"filterServerList":[],"topicConfigSerializeWrapper":{"dataVersion":{...},"topicConfigTable":{"T":{...}}}}
Compressed, a zlib stream of:
    | n     | data version | count | for each topic: | n     | text |
    | int32 | JSON, n B    | int32 |                 | int32 | n B  |
    text: "name readQueues writeQueues perm SINGLE_TAG[ attributes]"

Source: apache/rocketmq common/protocol/body/RegisterBrokerBody.java (4.9.7, 5.3.3).
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import msgspec

from duemq.protocol.errors import BodyFormatError
from duemq.protocol.frames import fastjson
from duemq.protocol.frames.command import Body
from duemq.protocol.requests import bodies
from duemq.protocol.requests.bodies import DataVersion, TopicConfig

_I32: Final = struct.Struct(">i")
_MAX_BYTES: Final = 16 * 1024 * 1024
"""Most bytes of a body after decompression: as many as a plain body can have."""


class _TopicTable(msgspec.Struct, rename="camel"):
    data_version: DataVersion | None = None
    topic_config_table: dict[str, TopicConfig] | None = None


class _Plain(msgspec.Struct, rename="camel"):
    topic_config_serialize_wrapper: _TopicTable | None = None


def encode_registration(topic_table: Mapping[str, Any]) -> bytes:
    """Encode the uncompressed body for a topic table in the form of topics.json."""
    return fastjson.dumps({"filterServerList": [], "topicConfigSerializeWrapper": topic_table})


class Registration(NamedTuple):
    """A broker's registration. `version`: the edition of its topic table; `topics`: by name; `size`: the size of the
    body in bytes, after decompression."""

    version: DataVersion
    topics: dict[str, TopicConfig]
    size: int


def decode_registration(body: Body, *, compressed: bool) -> Registration:
    """Decode the registration in a body. Raises BodyFormatError."""
    if compressed:
        return _decode_compressed(bodies.decompress(body, _MAX_BYTES))
    table = bodies.decode(body, _Plain).topic_config_serialize_wrapper or _TopicTable()
    topics = table.topic_config_table or {}
    for name, config in topics.items():
        config.topic_name = name
    return Registration(table.data_version or DataVersion(), topics, len(body))


def _decode_compressed(data: bytes) -> Registration:
    try:
        text, position = _text(data, 0)
        version = bodies.decode(text, DataVersion)
        (count,) = _I32.unpack_from(data, position)
        position += 4
        topics = {}
        for _ in range(count):
            text, position = _text(data, position)
            name, read, write, perm, kind, *_ = text.decode().split(" ", 5)
            topics[name] = TopicConfig(name, _int32(read), _int32(write), _int32(perm), kind)
    except (struct.error, ValueError) as error:
        raise BodyFormatError(f"a registration of topics that does not parse: {error}") from None
    return Registration(version, topics, len(data))


def _int32(text: str) -> int:
    number = int(text)
    if not -(1 << 31) <= number < 1 << 31:
        raise ValueError(f"{text} has more than 32 bits")
    return number


def _text(data: bytes, position: int) -> tuple[bytes, int]:
    (size,) = _I32.unpack_from(data, position)
    end = position + 4 + size
    if size < 0 or end > len(data):
        raise BodyFormatError(f"a registration of topics with a text of {size} bytes in {len(data)}")
    return data[position + 4 : end], end
