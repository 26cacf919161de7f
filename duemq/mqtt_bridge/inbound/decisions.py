"""The decision about each message from MQTT: its target in RocketMQ, its delay, or the reason why it is not sent."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Final

from duemq._values.times import Clock
from duemq.mqtt_bridge import translation
from duemq.mqtt_bridge.inbound.arrivals import Arrival, Keyed
from duemq.mqtt_bridge.inbound.batch import Transfer
from duemq.mqtt_bridge.rules.filters import Filter
from duemq.mqtt_bridge.rules.model import Delay, DelayRefused, Inbound, Rules, Target, TemplateError
from duemq.mqtt_bridge.session import packets
from duemq.mqtt_bridge.session.packets import Publish
from duemq.mqtt_bridge.status import Status

KNOWN_TOPICS: Final = 10_000
"""Maximum number of MQTT topics in the cache of rules by topic."""


class Decisions:
    """Decides about messages by the rules. `monotonic` is in seconds."""

    def __init__(self, rules: Rules, *, status: Status, clock: Clock, monotonic: Callable[[], float]) -> None:
        self._rules = rules
        self._bridge = rules.connection.bridge
        self._status = status
        self._counters = status.counters
        self._clock = clock
        self._monotonic = monotonic
        is_v5 = rules.connection.is_v5
        self._once = tuple(Filter(each.filter) for each in rules.subscriptions if each.retained == "once" or not is_v5)
        self._known: dict[str, tuple[Inbound, Target] | None] = {}

    def is_over(self, transfer: Transfer) -> bool:
        """Find the target or the delay of a message. Return True if there is nothing to send."""
        publish, counters = transfer.publish, self._counters
        user = publish.properties.user
        if self._status.is_own(publish.topic) or (user and (translation.MARK, self._bridge) in user):
            counters.own += 1
            return True
        if publish.missing:
            size = len(publish.payload) + publish.missing
            self.refuse(transfer, f"the message has more than {size} bytes, which RocketMQ does not accept")
            return True
        try:
            if self._rules.delayed is not None:
                transfer.delay = self._rules.delayed.read(publish.topic, user, self._clock())
            if transfer.delay is None:
                return self._has_no_target(transfer)
        except (DelayRefused, TemplateError) as error:
            self.refuse(transfer, str(error), packets.IMPLEMENTATION_ERROR)
            return True
        if publish.retain and self._is_stored_copy(publish.topic):
            counters.retained += 1
            return True
        return self._expires_before(transfer, transfer.delay)

    def _has_no_target(self, transfer: Transfer) -> bool:
        topic = transfer.publish.topic
        try:
            found = self._known[topic]
        except KeyError:
            found = self._find(topic)
            if len(self._known) >= KNOWN_TOPICS:
                self._known.clear()
            self._known[topic] = found
        if found is None:
            self._counters.unmatched += 1
            return True
        rule, transfer.target = found
        if transfer.publish.retain and rule.retained == "never" and self._is_stored_copy(topic):
            self._counters.retained += 1
            return True
        return False

    def _find(self, topic: str) -> tuple[Inbound, Target] | None:
        for rule in self._rules.inbound:
            target = rule.target(topic)
            if target is not None:
                return rule, target
        return None

    def _is_stored_copy(self, topic: str) -> bool:
        """Return whether the retain flag of a message to this topic means that it is the MQTT broker's retained copy.
        Otherwise the flag means that the message was published as retained."""
        return any(each.matches(topic) for each in self._once)

    def _expires_before(self, transfer: Transfer, delay: Delay) -> bool:
        expiry = transfer.publish.properties.expiry
        if expiry is None or delay.recall:
            return False
        wait_ms = delay.delay_ms
        if wait_ms is None:
            wait_ms = (delay.deliver_at_ms or 0) - self.received_ms(transfer)
        if wait_ms < expiry * 1000:
            return False
        self._counters.expired += 1
        return True

    def has_expired(self, transfer: Transfer) -> bool:
        """Return whether a message expired while it waited here; if so, count it. A recall does not expire."""
        expiry = transfer.publish.properties.expiry
        if expiry is None or transfer.is_recall or self._monotonic() - transfer.at < expiry:
            return False
        self._counters.expired += 1
        return True

    def refuse(self, transfer: Transfer, reason: str, code: int = packets.IMPLEMENTATION_ERROR) -> None:
        """Refuse a message: it is acknowledged with a reason code, and the reason is reported."""
        transfer.reason = code
        self._status.refuse(transfer.publish.topic, reason)

    def topic_of(self, transfer: Transfer) -> str:
        """Return the RocketMQ topic to which a message is sent."""
        if transfer.target is not None:
            return transfer.target.topic
        assert self._rules.delayed is not None
        return self._rules.delayed.topic

    def delay(self, publish: Publish) -> Delay | None:
        """Return the delay that a message asks for; None if it asks for none or for a wrong one."""
        with suppress(DelayRefused, TemplateError):
            if self._rules.delayed is not None:
                return self._rules.delayed.read(publish.topic, publish.properties.user, self._clock())
        return None

    def has_key(self, publish: Publish) -> bool:
        """Return whether a message asks for a delay or a recall with a key."""
        delay = self.delay(publish)
        return delay is not None and delay.key is not None

    def read_keyed(self, arrival: Arrival) -> list[Keyed]:
        """Return the messages of an arrival that have a key."""
        if arrival.keyed is None:
            arrival.keyed = [
                Keyed(order, each.qos, delay)
                for order, each in arrival.messages()
                if (delay := self.delay(each)) is not None and delay.key is not None
            ]
        return arrival.keyed

    def due(self, at: float, delay: Delay) -> float:
        """Return the deliver time of a delayed message that was received at `at`, both by the monotonic clock, in
        seconds."""
        if delay.delay_ms is not None:
            return at + delay.delay_ms / 1000
        return ((delay.deliver_at_ms or 0) - self.zero_ms()) / 1000

    def received_ms(self, transfer: Transfer) -> int:
        """Return the time at which a message was read, ms since the epoch."""
        return round(self.zero_ms() + transfer.at * 1000)

    def zero_ms(self) -> float:
        """Return the time at which the monotonic clock was 0, ms since the epoch."""
        return self._clock() - self._monotonic() * 1000
