"""The fields that templates may have, and how a message's values are written in names of the other side.

RocketMQ's topics, keys and tags, and the levels of MQTT's topics, cannot have some characters of the other side's
names. These characters are written as in URLs, % and two hex digits for each byte of their UTF-8. So no name is refused
because of an unusual character, and none gets a meaning that its sender did not give it: a key such as "a/#" makes
neither a second level nor a wildcard.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from duemq._values import checks
from duemq.errors import ArgumentError
from duemq.mqtt_bridge.rules.filters import OUTSIDE, Filter, check_topic
from duemq.mqtt_bridge.rules.model import Target, TemplateError
from duemq.mqtt_bridge.rules.templates import Template

if TYPE_CHECKING:
    from duemq.messages import ReceivedMessage

_LEVEL: Final = re.compile(r"([1-9][0-9]?)(-)?")
_PROPERTY: Final = re.compile(r"(property|levels):(.+)", re.DOTALL)
_NOT_IN_TOPICS: Final = re.compile(r"[^%|a-zA-Z0-9_-]")
_NOT_IN_KEYS: Final = re.compile(r"[\s\x00-\x20\x7f]")
_NOT_IN_TAGS: Final = re.compile(r"[\s\x00-\x20\x7f|*]")
_NOT_IN_LEVELS: Final = re.compile(f"[/+#{OUTSIDE}]")
_NOT_IN_MQTT: Final = re.compile(f"[+#{OUTSIDE}]")
_NOT_IN_TEXTS: Final = re.compile(f"[{OUTSIDE}]")

INBOUND_FIELDS: Final = "{1}, {2} ... (a level of the MQTT topic), {2-} (the levels from the second on), {topic} (all)"
OUTBOUND_FIELDS: Final = (
    "{topic}, {key}, {tags}, {id}, {property:NAME}, and {levels:NAME} for a property that may have several levels"
)


def is_inbound_field(name: str) -> bool:
    """Whether a template from MQTT to RocketMQ may have this field."""
    return name == "topic" or _LEVEL.fullmatch(name) is not None


def is_outbound_field(name: str) -> bool:
    """Whether a template from RocketMQ to MQTT may have this field."""
    return name in ("topic", "key", "tags", "id") or _PROPERTY.fullmatch(name) is not None


def target_maker(
    accepts: Filter, topic: Template, key: Template | None, tags: Template | None, sharding_key: Template | None
) -> Callable[[str], Target | None]:
    """Return a function from an MQTT topic to the target of its messages. It returns None for a topic that the filter
    does not match, and raises TemplateError."""

    def target(mqtt_topic: str) -> Target | None:
        if not accepts.matches(mqtt_topic):
            return None
        levels = mqtt_topic.split("/")

        def value(name: str) -> str:
            return _level(mqtt_topic, levels, name)

        name = encoded(topic.render(value), _NOT_IN_TOPICS)
        try:
            checks.check_topic_to_send(name)
        except ArgumentError as error:
            raise TemplateError(
                f"the template {topic.text!r} does not make a topic from {mqtt_topic!r}: {error}"
            ) from None
        return Target(
            name,
            _rendered(key, value, _NOT_IN_KEYS),
            _rendered(tags, value, _NOT_IN_TAGS),
            _rendered(sharding_key, value, _NOT_IN_KEYS),
            is_chosen_by_sender=not topic.is_constant,
        )

    return target


def mqtt_topic_maker(template: Template, refused_levels: tuple[str, ...]) -> Callable[[ReceivedMessage], str]:
    """Return a function from a message to its MQTT topic. It raises TemplateError if the message lacks a field, or if
    its values, rather than the template itself, would make the first level begin with "$" or be one of
    `refused_levels`."""
    first = template.text.partition("/")[0]
    is_first_constant = "{" not in first

    def mqtt_topic(message: ReceivedMessage) -> str:
        topic = template.render(lambda name: _field(message, name))
        try:
            check_topic(topic)
        except ArgumentError as error:
            raise TemplateError(
                f"the template {template.text!r} does not make a topic from {message!r}: {error}"
            ) from None
        level = topic.partition("/")[0]
        if not is_first_constant and (level.startswith("$") or level in refused_levels):
            raise TemplateError(
                f"the template {template.text!r} makes {topic!r} from {message!r}: its first level has a special "
                "meaning; write that level into the template if it is intended"
            )
        return topic

    return mqtt_topic


def encoded(text: str, outside: re.Pattern[str]) -> str:
    """Return a text with the characters that match `outside` as % and hex digits."""
    return outside.sub(lambda match: "".join(f"%{byte:02X}" for byte in match[0].encode(errors="surrogatepass")), text)


def encoded_name(text: str) -> str:
    """Return a text as a part of a name of a RocketMQ topic or group."""
    return encoded(text, _NOT_IN_TOPICS)


def encoded_text(text: str) -> str:
    """Return a text as a valid string of MQTT's."""
    return encoded(text, _NOT_IN_TEXTS)


def encoded_key(text: str) -> str:
    """Return a text as a RocketMQ key, which cannot contain blanks."""
    return encoded(text, _NOT_IN_KEYS)


def _rendered(template: Template | None, value: Callable[[str], str], outside: re.Pattern[str]) -> str | None:
    """Return the text that a template makes; None without a template, or for an empty text."""
    return encoded(template.render(value), outside) or None if template is not None else None


def _level(mqtt_topic: str, levels: list[str], name: str) -> str:
    if name == "topic":
        return mqtt_topic
    match = _LEVEL.fullmatch(name)
    assert match is not None
    number = int(match[1])
    if number > len(levels):
        raise TemplateError(f"{mqtt_topic!r} has no level {number}, which {{{name}}} needs")
    return "/".join(levels[number - 1 :]) if match[2] else levels[number - 1]


def _field(message: ReceivedMessage, name: str) -> str:
    match = _PROPERTY.fullmatch(name)
    if match is not None:
        value = message.properties.get(match[2])
    elif name == "topic":
        value = message.topic
    elif name == "id":
        value = message.message_id
    elif name == "tags":
        value = message.tags
    else:
        value = next(iter(message.keys), None)
    if not value:
        raise TemplateError(f"{message!r} has no {match[2] if match is not None else name}, which {{{name}}} needs")
    is_one_level = match is None or match[1] == "property"
    return encoded(value, _NOT_IN_LEVELS if is_one_level else _NOT_IN_MQTT)
