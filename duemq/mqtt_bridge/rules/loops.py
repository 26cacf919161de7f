"""Rules that would lead a message back to where it came from, and the subscriptions that the rules need.

An MQTT broker may deliver a message once for each of a client's subscriptions that match (MQTT 5.0, chapter 3.3.4). The
bridge must get it only once, so no two of its subscriptions may overlap.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from duemq.mqtt_bridge.rules import fields
from duemq.mqtt_bridge.rules.filters import Filter
from duemq.mqtt_bridge.rules.model import QoS, Retained
from duemq.mqtt_bridge.rules.templates import Template

_LEVEL: Final = "\x01"
_LEVELS: Final = "\x02"


@dataclass(frozen=True, slots=True)
class ToRocketmqEdge:
    """The fields of a rule from MQTT to RocketMQ that decide about loops; `line`: the line at which it begins."""

    line: int
    filter: Filter
    topic: Template
    qos: QoS
    retained: Retained


@dataclass(frozen=True, slots=True)
class ToMqttEdge:
    """The fields of a rule from RocketMQ to MQTT that decide about loops; `line`: the line at which it begins."""

    line: int
    topic: str
    mqtt_topic: Template


@dataclass(frozen=True, slots=True)
class Wanted:
    """A subscription that a rule wants. `filter` without $share."""

    filter: Filter
    qos: QoS
    retained: Retained


def find_loop(
    to_rocketmq: Sequence[ToRocketmqEdge], to_mqtt: Sequence[ToMqttEdge]
) -> list[ToRocketmqEdge | ToMqttEdge] | None:
    """Return rules by which a message comes back to the first of them; None if there is no such loop."""
    after: dict[ToRocketmqEdge | ToMqttEdge, list[ToRocketmqEdge | ToMqttEdge]] = {}
    for out in to_mqtt:
        reached = as_filter(out.mqtt_topic)
        after[out] = [back for back in to_rocketmq if back.filter.overlaps(reached)]
    for back in to_rocketmq:
        after[back] = [out for out in to_mqtt if can_make(back, out.topic)]
    for start in to_mqtt:
        way = _way_back(start, after)
        if way is not None:
            return way
    return None


def subscriptions(wanted: Sequence[Wanted]) -> Iterator[Wanted | tuple[Wanted, Wanted]]:
    """Yield the subscriptions that cover all wanted ones, without those that another subscription covers; and the pairs
    that overlap although neither covers the other. A subscription has the highest QoS of those that it covers, and asks
    for retained messages if one of them does."""
    kept: list[Wanted] = []
    for each in wanted:
        if not any(other.filter.covers(each.filter) for other in kept):
            kept = [other for other in kept if not each.filter.covers(other.filter)]
            kept.append(each)
    for number, each in enumerate(kept):
        yield from ((each, other) for other in kept[number + 1 :] if each.filter.overlaps(other.filter))
        covered = [other for other in wanted if each.filter.covers(other.filter)]
        retained: Retained = "once" if any(other.retained == "once" for other in covered) else "never"
        yield Wanted(each.filter, max(other.qos for other in covered), retained)


def can_make(rule: ToRocketmqEdge, topic: str) -> bool:
    """Return whether a rule may send to this RocketMQ topic."""
    text = rule.topic.render(lambda name: _known_level(rule.filter, name))
    return (
        re.fullmatch(".*".join(re.escape(fields.encoded_name(part)) for part in text.split(_LEVEL)), topic) is not None
    )


def as_filter(template: Template) -> Filter:
    """Return a filter that matches all MQTT topics that a template can make, and perhaps more."""
    text = template.render(lambda name: _LEVELS if name.startswith("levels:") else _LEVEL)
    levels: list[str] = []
    for level in text.split("/"):
        if _LEVELS in level:
            levels.append("#")
            break
        levels.append("+" if _LEVEL in level else level)
    return Filter("/".join(levels))


def _known_level(accepts: Filter, name: str) -> str:
    """Return the level that a field stands for, if all topics of the filter have the same level there; else _LEVEL."""
    levels = accepts.text.split("/")
    if not name.isdigit() or int(name) > len(levels) or levels[int(name) - 1] in ("+", "#"):
        return _LEVEL
    return levels[int(name) - 1]


def _way_back(
    start: ToMqttEdge, after: dict[ToRocketmqEdge | ToMqttEdge, list[ToRocketmqEdge | ToMqttEdge]]
) -> list[ToRocketmqEdge | ToMqttEdge] | None:
    """Return the rules by which a message that `start` sends comes back to it, `start` first; None if it does not."""
    ways: list[list[ToRocketmqEdge | ToMqttEdge]] = [[start]]
    seen: set[ToRocketmqEdge | ToMqttEdge] = set()
    while ways:
        way = ways.pop()
        for rule in after[way[-1]]:
            if rule == start:
                return way
            if rule not in seen:
                seen.add(rule)
                ways.append([*way, rule])
    return None
