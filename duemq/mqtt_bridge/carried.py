"""The state that a bridge passes on to the next one when the rules change, within one process."""

from __future__ import annotations

from dataclasses import dataclass, field

from duemq.mqtt_bridge.inbound.arrivals import Arrival
from duemq.mqtt_bridge.inbound.receipts import Receipts
from duemq.mqtt_bridge.status import Counters


@dataclass(slots=True)
class Carried:
    """State that outlives a change of the rules, as long as the process lives."""

    receipts: Receipts = field(default_factory=Receipts)
    """The receipts of the session at the MQTT broker."""
    counters: Counters = field(default_factory=Counters)
    waiting: list[Arrival] = field(default_factory=list)
    """Messages that the MQTT broker does not send again: those of lost sessions, and those with QoS 0."""
