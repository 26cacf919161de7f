"""What the bridge tells of itself: its state, what it refused, and its counters, on topics of MQTT.

duemq/bridge/<client id>             retained: {"state": "online"}, or {"state": "offline"}, which is its will too
duemq/bridge/<client id>/refused     a message that was not taken: {"topic", "reason", "time_ms"}
duemq/bridge/<client id>/recalled    what a recall found: {"topic", "key", "cancelled", "time_ms"}
duemq/bridge/<client id>/counters    retained: how often what happened, since the start
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Final

from duemq._values.times import Clock
from duemq.mqtt_bridge.session.client import Session
from duemq.mqtt_bridge.session.packets import NO_PROPERTIES, encode_publish
from duemq.protocol.printable import printable

ONLINE: Final = b'{"state":"online"}'
OFFLINE: Final = b'{"state":"offline"}'

LOGGED_REFUSALS: Final = 10
"""So many refusals in a row are logged; then only every thousandth: a device may send a wrong delay each second."""

log = logging.getLogger("duemq.mqtt_bridge")


@dataclass(slots=True)
class Counters:
    """How often what happened since the start."""

    due: int = 0
    """Delayed messages that were published, acknowledged where their QoS is not 0."""
    late_ms: int = 0
    """How late they were published, ms, together: the average is this by `due`."""
    late_max_ms: int = 0
    """How late the latest of them was published, ms."""
    received: int = 0
    """Messages that came from MQTT."""
    stored: int = 0
    """Of them, those that RocketMQ has, delayed ones among them."""
    delayed: int = 0
    """Of them, those that wait or waited."""
    recalled: int = 0
    """Delayed messages that were cancelled by a recall."""
    published: int = 0
    """Messages that went to MQTT, acknowledged where their QoS is not 0."""
    refused: int = 0
    """Messages that cannot be taken; the status topic tells of each."""
    unmatched: int = 0
    """Messages that no rule wants any more."""
    own: int = 0
    """Messages that the bridge itself had published, or that would go back to where they came from."""
    retained: int = 0
    """Retained messages that the rules do not want."""
    expired: int = 0
    """Messages that would expire before they are due, or were expired when they were to be published."""
    dropped: int = 0
    """Messages with QoS 0 beyond what the bridge holds."""
    repeated: int = 0
    """Messages with QoS 2 that came or went again and were known."""

    def count_due(self, late_ms: int) -> None:
        """Count a delayed message that was published this late, in ms."""
        self.due += 1
        self.late_ms += max(0, late_ms)
        self.late_max_ms = max(self.late_max_ms, late_ms)


class Status:
    """Tells of the bridge. `topic`: where. Without a connection nothing is told; counters go on."""

    def __init__(self, topic: str, clock: Clock) -> None:
        self.topic = topic
        self.counters = Counters()
        self._clock = clock
        self._session: Session | None = None
        self._told = Counters()

    def connected(self, session: Session) -> None:
        """The bridge is subscribed."""
        self._session = session
        self._publish(self.topic, ONLINE, retain=True)
        self.tell_counters(even_unchanged=True)

    def leaving(self) -> None:
        """The bridge is about to disconnect."""
        self.tell_counters()
        self._publish(self.topic, OFFLINE, retain=True)
        self._session = None

    def is_own(self, mqtt_topic: str) -> bool:
        """Whether a topic is one of those on which the bridge tells of itself."""
        return mqtt_topic.startswith(self.topic) and mqtt_topic[len(self.topic) :][:1] in ("", "/")

    def refuse(self, topic: str, reason: str) -> None:
        """A message cannot be taken, or not be published. `topic` is as it came or where it was to go."""
        self.counters.refused += 1
        count = self.counters.refused
        if count <= LOGGED_REFUSALS or count % 1000 == 0:
            log.warning("refused a message, number %d: topic %s: %s", count, printable(topic), reason)
        self._tell("refused", {"topic": topic, "reason": reason})

    def recalled(self, topic: str, key: str, count: int) -> None:
        """So many messages to `topic` were cancelled, by their RocketMQ key."""
        self.counters.recalled += count
        self._tell("recalled", {"topic": topic, "key": key, "cancelled": count})

    def tell_counters(self, *, even_unchanged: bool = False) -> None:
        """Publish the counters."""
        if even_unchanged or self.counters != self._told:
            self._told = replace(self.counters)
            self._publish(f"{self.topic}/counters", _json(asdict(self.counters)), retain=True)

    def _tell(self, what: str, fields: Mapping[str, object]) -> None:
        self._publish(f"{self.topic}/{what}", _json({**fields, "time_ms": self._clock()}), retain=False)

    def _publish(self, topic: str, payload: bytes, *, retain: bool) -> None:
        session = self._session
        if session is None or session.is_lost:
            return
        properties = NO_PROPERTIES if session.is_v5 else None
        retain = retain and session.limits.retain
        session.send(encode_publish(topic, payload, qos=0, retain=retain, packet_id=0, properties=properties))


def _json(fields: Mapping[str, object]) -> bytes:
    return json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode()
