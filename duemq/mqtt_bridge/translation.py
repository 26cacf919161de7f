"""Translates MQTT messages to RocketMQ messages, and back.

The payload is the body. RocketMQ has no empty bodies: an empty payload becomes one zero byte and the property
MQTT_EMPTY. All other fields of an MQTT message become properties:

    MQTT_TOPIC              the topic that the message was published to; of a delayed one, its plain topic
    MQTT_BRIDGE             the bridge that sent it to RocketMQ: the name of its share, or its client id
    MQTT_QOS                the QoS of a delayed message
    MQTT_RETAIN             "true" if it was published as retained
    MQTT_TEXT               "true" if the payload format indicator is 1: the payload is UTF-8
    MQTT_CONTENT_TYPE       content type
    MQTT_RESPONSE_TOPIC     response topic
    MQTT_CORRELATION_DATA   correlation data: 0x and hexadecimal digits
    MQTT_EXPIRES_AT         time at which it expires, ms since the epoch
    MQTT_DUE_AT             time at which a delayed message was due, ms since the epoch, if it passed in the bridge
    MQTT_USER_PROPERTIES    user properties that RocketMQ cannot have: JSON, [[name, value], ...]

A user property becomes a property of the same name, with these exceptions: the name has a meaning in RocketMQ or begins
with MQTT_, the name or the value is empty or has a separator of RocketMQ's, or the name is repeated. A topic, content
type or response topic that is empty or has a separator becomes JSON, in a property with the suffix _JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Final

from duemq._values.checks import STEERING_PROPERTIES
from duemq.errors import ArgumentError
from duemq.mqtt_bridge.rules.fields import encoded_text
from duemq.mqtt_bridge.rules.filters import check_topic
from duemq.mqtt_bridge.session.packets import NO_PROPERTIES, Properties, Publish
from duemq.protocol.records.properties import NAME_END, PROPERTY_END

PREFIX: Final = "MQTT_"
TOPIC: Final = "MQTT_TOPIC"
BRIDGE: Final = "MQTT_BRIDGE"
QOS: Final = "MQTT_QOS"
EMPTY: Final = "MQTT_EMPTY"
RETAIN: Final = "MQTT_RETAIN"
TEXT: Final = "MQTT_TEXT"
CONTENT_TYPE: Final = "MQTT_CONTENT_TYPE"
RESPONSE_TOPIC: Final = "MQTT_RESPONSE_TOPIC"
CORRELATION_DATA: Final = "MQTT_CORRELATION_DATA"
EXPIRES_AT: Final = "MQTT_EXPIRES_AT"
DUE_AT: Final = "MQTT_DUE_AT"
USER_PROPERTIES: Final = "MQTT_USER_PROPERTIES"

EMPTY_BODY: Final = b"\0"
MARK: Final = "duemq-bridge"
"""User property of messages that a bridge publishes, with the name of its share or its client id, so that it does not
take them back."""
_TRUE: Final = "true"
_TIME: Final = re.compile("[0-9]{1,18}")


def to_body(payload: bytes) -> bytes:
    """Return the body for a payload."""
    return payload or EMPTY_BODY


def to_properties(
    publish: Publish, topic: str, bridge: str, received_ms: int, without: Collection[str] = ()
) -> dict[str, str]:
    """Return the RocketMQ properties of an MQTT message. `topic`: its MQTT topic, or the plain topic of a delayed one;
    `without`: names of user properties to leave out; `received_ms`: the time when it arrived, ms since the epoch."""
    fields = {BRIDGE: bridge}
    _put(fields, TOPIC, topic)
    if not publish.payload:
        fields[EMPTY] = _TRUE
    if publish.retain:
        fields[RETAIN] = _TRUE
    properties = publish.properties
    if properties is NO_PROPERTIES:
        return fields
    if properties.is_text:
        fields[TEXT] = _TRUE
    if properties.content_type is not None:
        _put(fields, CONTENT_TYPE, properties.content_type)
    if properties.response_topic is not None:
        _put(fields, RESPONSE_TOPIC, properties.response_topic)
    if properties.correlation_data is not None:
        # A prefix, since RocketMQ has no empty value.
        fields[CORRELATION_DATA] = f"0x{properties.correlation_data.hex()}"
    if properties.expiry is not None:
        fields[EXPIRES_AT] = str(received_ms + properties.expiry * 1000)
    if properties.user:
        _put_user(fields, [pair for pair in properties.user if pair[0] not in without])
    return fields


def _put(fields: dict[str, str], name: str, value: str) -> None:
    if _fits(value):
        fields[name] = value
    else:
        fields[f"{name}_JSON"] = json.dumps(value)


def _put_user(fields: dict[str, str], pairs: Iterable[tuple[str, str]]) -> None:
    rest: list[tuple[str, str]] = []
    names = set[str]()
    for name, value in pairs:
        if (
            name not in names
            and name not in STEERING_PROPERTIES
            and not name.startswith(PREFIX)
            and _fits(name)
            and _fits(value)
        ):
            fields[name] = value
        else:
            rest.append((name, value))
        names.add(name)
    if rest:
        fields[USER_PROPERTIES] = json.dumps(rest)


def _fits(text: str) -> bool:
    return bool(text) and NAME_END not in text and PROPERTY_END not in text


def to_payload(body: bytes, fields: Mapping[str, str]) -> bytes:
    """Return the payload for a body."""
    return b"" if body == EMPTY_BODY and EMPTY in fields else body


def mqtt_topic(fields: Mapping[str, str]) -> str | None:
    """Return the MQTT topic of a message that a bridge sent to RocketMQ; None for other messages."""
    return _get(fields, TOPIC)


def expires_at_ms(fields: Mapping[str, str]) -> int | None:
    """Return the time at which a message expires, ms since the epoch; None if it does not."""
    return _time(fields, EXPIRES_AT)


def due_at_ms(fields: Mapping[str, str]) -> int | None:
    """Return the time at which a delayed message was due, ms since the epoch, if it passed in the bridge, so that
    RocketMQ did not delay it; None for other messages."""
    return _time(fields, DUE_AT)


def to_mqtt(fields: Mapping[str, str], now_ms: int) -> Properties:
    """Return the MQTT properties of a message that has not expired. `now_ms`: the time, ms since the epoch.

    Characters that MQTT's strings must not have become % and hex digits, and an invalid response topic becomes a user
    property, since MQTT brokers close the connection on either.
    """
    properties = Properties()
    user = [
        (name, value)
        for name, value in fields.items()
        if name not in STEERING_PROPERTIES and not name.startswith(PREFIX)
    ]
    user += _user(fields.get(USER_PROPERTIES))
    response_topic = _get(fields, RESPONSE_TOPIC)
    if response_topic is not None:
        try:
            check_topic(response_topic)
        except ArgumentError:
            user.append((RESPONSE_TOPIC, response_topic))
        else:
            properties.response_topic = response_topic
    properties.user = tuple([(encoded_text(name), encoded_text(value)) for name, value in user])
    properties.is_text = fields.get(TEXT) == _TRUE
    content_type = _get(fields, CONTENT_TYPE)
    if content_type is not None:
        properties.content_type = encoded_text(content_type)
    data = fields.get(CORRELATION_DATA)
    if data is not None:
        properties.correlation_data = _binary(data)
    expires = expires_at_ms(fields)
    if expires is not None:
        properties.expiry = min(0xFFFFFFFF, max(1, -(-(expires - now_ms) // 1000)))
    return properties


def _time(fields: Mapping[str, str], name: str) -> int | None:
    text = fields.get(name, "")
    return int(text) if _TIME.fullmatch(text) else None


def _get(fields: Mapping[str, str], name: str) -> str | None:
    text = fields.get(name)
    if text is not None or f"{name}_JSON" not in fields:
        return text
    try:
        found = json.loads(fields[f"{name}_JSON"])
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, str) else None


def _user(text: str | None) -> list[tuple[str, str]]:
    """Return the user properties in a JSON text. Another program may have written it, so anything else in it is
    ignored."""
    try:
        found = json.loads(text) if text else []
    except (ValueError, RecursionError):
        return []
    pairs = found if isinstance(found, list) else []
    return [
        (pair[0], pair[1]) for pair in pairs if isinstance(pair, list) and [type(each) for each in pair] == [str, str]
    ]


def _binary(text: str) -> bytes | None:
    try:
        return bytes.fromhex(text.removeprefix("0x"))
    except ValueError:
        return None
