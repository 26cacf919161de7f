"""The bridge's reports about itself: state, refused messages, recalls and counters, published to MQTT topics.

duemq/bridge/<client id>             retained: {"state": "online"}, while the bridge is connected on both sides and has
                                     its subscriptions, or {"state": "offline"}, also the bridge's will; with
                                     "refused_filters" if the MQTT broker refuses subscriptions, and with
                                     "lowered_filters" if it grants a lower QoS: {filter: QoS}
duemq/bridge/<client id>/refused     a refused message: {"topic", "reason", "time_ms"}
duemq/bridge/<client id>/recalled    the result of a recall: {"topic", "key", "cancelled", "time_ms"}
duemq/bridge/<client id>/counters    retained: the `Counters`
"""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Final

from duemq._values.times import Clock
from duemq.mqtt_bridge.rules.filters import is_at_or_below
from duemq.mqtt_bridge.session.client import Session
from duemq.mqtt_bridge.session.packets import NO_PROPERTIES, encode_publish
from duemq.protocol.printable import printable

OFFLINE: Final = b'{"state":"offline"}'

LOGGED_REFUSALS: Final = 10
"""Number of refusals that are logged individually. After these, only every thousandth is logged, since a device may
send a wrong delay every second."""

KEPT: Final = 100
"""Maximum number of reports that are kept while there is no connection."""
SHOWN: Final = 500
"""Maximum number of characters of a topic, key or reason in a report."""

log = logging.getLogger("duemq.mqtt_bridge")


@dataclass(slots=True)
class Counters:
    """Numbers of messages since the start of the process, and the lateness of delayed ones."""

    due: int = 0
    """Delayed messages that were published; with QoS 1 and 2 they are acknowledged."""
    late_ms: int = 0
    """Lateness of all of these together, in ms; divided by `due`, it is the average."""
    late_max_ms: int = 0
    """Greatest lateness of one of these, in ms."""
    received: int = 0
    """Messages from MQTT."""
    stored: int = 0
    """Messages from MQTT that RocketMQ has stored, including delayed ones."""
    delayed: int = 0
    """Messages from MQTT that wait or waited."""
    recalled: int = 0
    """Delayed messages that were cancelled by a recall."""
    superseded: int = 0
    """Delayed messages that RocketMQ never got, since a recall or a replacement came while they waited in the bridge,
    and before they were due."""
    published: int = 0
    """Messages that were published to MQTT; with QoS 1 and 2 they are acknowledged."""
    refused: int = 0
    """Messages that were refused; each is reported on the status topic."""
    unmatched: int = 0
    """Messages from MQTT that match no rule, perhaps since the rules have changed."""
    own: int = 0
    """Messages that the bridge itself has published, or that would go back to where they came from."""
    retained: int = 0
    """Retained messages that no rule takes over."""
    expired: int = 0
    """Messages that would have expired before they were due, or had expired when they were to be published."""
    refused_subscriptions: int = 0
    """Subscriptions that the MQTT broker refuses now."""
    dropped: int = 0
    """Messages with QoS 0 that exceeded the limits of what the bridge holds, or were sent over a lost connection."""
    repeated: int = 0
    """Messages with QoS 2 that one side sent again and that the journal had."""

    def count_due(self, late_ms: int) -> None:
        """Count a delayed message that was published, and its lateness in ms."""
        self.due += 1
        self.late_ms += max(0, late_ms)
        self.late_max_ms = max(self.late_max_ms, late_ms)


class Status:
    """Publishes the reports below `topic`. Reports that are made without a connection are published over the next one,
    the last `KEPT` of them. `counters`: those of the process so far."""

    def __init__(self, topic: str, clock: Clock, counters: Counters | None = None) -> None:
        self.topic = topic
        self.counters = counters if counters is not None else Counters()
        self._clock = clock
        self._session: Session | None = None
        self._is_online = False
        """Whether the bridge is online while it has all subscriptions at the MQTT broker."""
        self._refused: tuple[str, ...] = ()
        """Filters of the subscriptions that the MQTT broker refuses."""
        self._lowered: dict[str, int] = {}
        """The QoS of the subscriptions for which the MQTT broker grants a lower one than asked for, by filter."""
        self._published = Counters()
        self._kept: deque[tuple[str, bytes]] = deque(maxlen=KEPT)

    def connected(self, session: Session) -> None:
        """Report the state to the MQTT broker, which has answered to the subscriptions. The broker may still have the
        state from before a kill."""
        self._session = session
        self._publish_state()
        while self._kept:
            topic, payload = self._kept.popleft()
            self._publish(topic, payload, retain=False)
        self.publish_counters(even_unchanged=True)

    def set_online(self, is_online: bool) -> None:
        """Report whether RocketMQ's clients are started, and the brokers have accepted the account."""
        if is_online != self._is_online:
            self._is_online = is_online
            self._publish_state()

    def set_subscriptions(self, refused: Iterable[str], lowered: Mapping[str, int]) -> None:
        """Report the filters that the MQTT broker refuses, and those with a lower QoS than asked for, with that QoS."""
        refused = tuple(sorted(refused))
        self.counters.refused_subscriptions = len(refused)
        if refused != self._refused or lowered != self._lowered:
            self._refused, self._lowered = refused, dict(lowered)
            self._publish_state()

    def leaving(self) -> None:
        """Report that the bridge is about to disconnect."""
        self.publish_counters()
        self._publish(self.topic, OFFLINE, retain=True)
        self._session = None

    def is_own(self, mqtt_topic: str) -> bool:
        """Return whether a topic is one of the bridge's own reports."""
        return is_at_or_below(mqtt_topic, self.topic)

    def refuse(self, topic: str, reason: str) -> None:
        """Report a message that is not accepted or cannot be published. `topic`: its MQTT topic, or its place in
        RocketMQ."""
        self.counters.refused += 1
        count = self.counters.refused
        if count <= LOGGED_REFUSALS or count % 1000 == 0:
            log.warning("refused a message, number %d: topic %s: %s", count, printable(_short(topic)), _short(reason))
        self._report("refused", {"topic": _short(topic), "reason": _short(reason)})

    def recalled(self, topic: str, key: str, count: int) -> None:
        """Report a recall: `count` messages to an MQTT topic, with this RocketMQ key, were cancelled."""
        self.counters.recalled += count
        self._report("recalled", {"topic": _short(topic), "key": _short(key), "cancelled": count})

    def publish_counters(self, *, even_unchanged: bool = False) -> None:
        """Publish the counters. `even_unchanged`: also if they have not changed since the last time."""
        if even_unchanged or self.counters != self._published:
            self._published = replace(self.counters)
            self._publish(f"{self.topic}/counters", _json(asdict(self.counters)), retain=True)

    def _publish_state(self) -> None:
        state: dict[str, object] = {"state": "online" if self._is_online and not self._refused else "offline"}
        if self._refused:
            state["refused_filters"] = [_short(each) for each in self._refused]
        if self._lowered:
            state["lowered_filters"] = {_short(name): qos for name, qos in sorted(self._lowered.items())}
        self._publish(self.topic, _json(state), retain=True)

    def _report(self, kind: str, fields: Mapping[str, object]) -> None:
        topic, payload = f"{self.topic}/{kind}", _json({**fields, "time_ms": self._clock()})
        if self._session is None or self._session.is_lost:
            self._kept.append((topic, payload))
        else:
            self._publish(topic, payload, retain=False)

    def _publish(self, topic: str, payload: bytes, *, retain: bool) -> None:
        session = self._session
        if session is None or session.is_lost:
            return
        properties = NO_PROPERTIES if session.is_v5 else None
        retain = retain and session.limits.retain
        packet = encode_publish(topic, payload, qos=0, retain=retain, packet_id=0, properties=properties)
        # An MQTT broker would close the connection on a larger packet.
        if len(packet) <= session.limits.packet_bytes:
            session.send(packet)


def _short(text: str) -> str:
    """Return a text for people, cut to SHOWN characters, since its length is decided by a sender."""
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def _json(fields: Mapping[str, object]) -> bytes:
    return json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode()
