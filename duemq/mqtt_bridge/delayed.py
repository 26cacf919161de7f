"""Messages that wait for their time: how they are found and cancelled, and which rule publishes them when they are due.

A delayed message waits in a RocketMQ topic of the bridge's own, and is published to its plain topic by a rule as any
other from RocketMQ to MQTT. Whether RocketMQ's consumers get it too is decided by the rules that would take a message
published to that topic at that time.
"""

from __future__ import annotations

from duemq.admin import Admin
from duemq.messages import ChangeResult, ReceivedMessage
from duemq.mqtt_bridge import translation
from duemq.mqtt_bridge.rules.model import Delayed, Outbound, QoS, TemplateError


class Waiting:
    """What waits at duemq brokers. `admin` is open."""

    def __init__(self, admin: Admin) -> None:
        self._admin = admin

    async def cancel_key(self, topic: str, key: str) -> int:
        """Cancel what waits for a topic with a key, and give how many messages that were. Raises what `Admin.cancel`
        does."""
        changes = await self._admin.cancel(topic=topic, key=key)
        return changes.counts.get(ChangeResult.CANCELLED, 0)

    async def waits(self, topic: str, message_id: str) -> bool:
        """Whether a message waits for a topic. Raises what `Admin.pending` does."""
        async for message in self._admin.pending(topic, key=message_id):
            if message.message_id == message_id:
                return True
        return False


def as_outbound(delayed: Delayed) -> Outbound:
    """Return the rule by which delayed messages are published when they are due."""
    return Outbound(
        topic=delayed.topic,
        mqtt_topic=_plain_topic,
        group=delayed.group,
        tags="*",
        qos=delayed.qos,
        retain=False,  # each has the flag that it came with
        start="first",
    )


def _plain_topic(message: ReceivedMessage) -> str:
    topic = translation.mqtt_topic(message.properties)
    if topic is None:
        raise TemplateError("the message has no property MQTT_TOPIC: no bridge sent it here")
    return topic


def qos_of(message: ReceivedMessage, highest: QoS) -> int:
    """The QoS with which a delayed message came, or the highest that the rules allow."""
    text = message.properties.get(translation.QOS, "")
    return min(int(text), highest) if text in ("0", "1", "2") else highest
