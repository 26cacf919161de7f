"""Delayed messages: how waiting ones are found and cancelled, and the rule that publishes them when they are due.

A delayed message waits in the bridge's own RocketMQ topic. When it is due, a rule from RocketMQ to MQTT publishes it to
its plain topic. RocketMQ's consumers get it if a rule from MQTT to RocketMQ then matches it, as with any other message.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from duemq._net.routes import parse_nameservers
from duemq.admin import Admin
from duemq.errors import (
    AccessDeniedError,
    ArgumentError,
    BrokerError,
    NoPermissionError,
    NotSupportedError,
    RequestTimeoutError,
)
from duemq.handles import MessageHandle
from duemq.messages import MessageQueue, ReceivedMessage
from duemq.mqtt_bridge import translation
from duemq.mqtt_bridge.rules.filters import check_topic
from duemq.mqtt_bridge.rules.model import Delayed, Outbound, QoS, Rules, RulesError, TemplateError
from duemq.pending import ChangeResult
from duemq.protocol.codes import ResponseCode

_NO_ID: Final = "0" * 32
"""An id that no message has."""


class DelayedMessages:
    """The messages that wait at duemq brokers. `admin` is open."""

    def __init__(self, admin: Admin) -> None:
        self._admin = admin

    async def cancel_key(self, topic: str, key: str) -> int:
        """Cancel the messages with a key that wait for a topic; return their number. Raises the errors of
        `Admin.cancel`."""
        changes = await self._admin.cancel(topic=topic, key=key)
        return changes.counts.get(ChangeResult.CANCELLED, 0)

    async def is_any(self, topic: str) -> bool:
        """Return whether any message waits for a topic. Raises the errors of `Admin.pending`."""
        async for _ in self._admin.pending(topic):
            return True
        return False

    async def waits(self, topic: str, message_id: str) -> bool:
        """Return whether a message waits for a topic. Raises the errors of `Admin.pending`."""
        async for message in self._admin.pending(topic, key=message_id):
            if message.message_id == message_id:
                return True
        return False

    async def is_durable(self, queue: MessageQueue) -> bool:
        """Return whether all messages that the broker of a queue has stored are as durable as its settings promise.
        With SYNC_FLUSH, a duemq broker answers a request to cancel a message, here one that does not exist, only then.
        Other brokers do not have this request: True. Raises the errors of `Admin.cancel`."""
        try:
            await self._admin.cancel(MessageHandle(queue.topic, queue.broker, _NO_ID, _NO_ID))
        except (NotSupportedError, AccessDeniedError, NoPermissionError):
            # Not a duemq broker's refusal: it allows the request to accounts that may send to the topic.
            return True
        except RequestTimeoutError:
            return False
        except BrokerError as error:
            if error.code == ResponseCode.FLUSH_DISK_TIMEOUT:
                return False
            raise
        return True


def check_group(rules: Rules, known: Mapping[str, str]) -> None:
    """Check that the topic of delayed messages keeps its group: another group would publish the messages of the last
    days again. `known`: groups by topic, of earlier rules. Raises RulesError."""
    found = rules.delayed
    group = known.get(found.topic) if found is not None else None
    if found is not None and group is not None and group != found.group:
        raise RulesError(
            f"{rules.file}:{rules.delayed_group_line}: the delayed messages in {found.topic} belong to the group "
            f"{group}; {found.group} would publish those of the last days again: keep the old group with [delayed] "
            f'group = "{group}", or give another topic as well'
        )


def left_behind(topic: str, group: str) -> str:
    """Return what to do about messages that wait in a topic which the rules no longer name."""
    return (
        f'they are published only while the rules name both: [delayed] topic = "{topic}", group = "{group}"; '
        "keep these names until no message waits (duemq pending list)"
    )


def is_elsewhere(old: Rules, new: Rules) -> bool:
    """Return whether new rules name other brokers of RocketMQ: none of their name servers is one of the old rules."""
    return not set(parse_nameservers(old.nameserver)) & set(parse_nameservers(new.nameserver))


def left_at(old: str, new: str) -> str:
    """Return what to do about messages that wait at the brokers of the name servers `old`, when new rules name `new`
    and none of these."""
    return (
        f'they are published only while the rules name the name server: nameserver = "{old}"; keep it until no message '
        f'waits (duemq pending list). If both are name servers of the same brokers, give nameserver = "{old};{new}" '
        "first"
    )


def as_outbound(delayed: Delayed) -> Outbound:
    """Return the rule by which delayed messages are published when they are due."""
    return Outbound(
        topic=delayed.topic,
        mqtt_topic=_plain_topic,
        group=delayed.group,
        tags="*",
        qos=delayed.qos,
        retain=False,  # not used: each message keeps the flag with which it arrived
        start="first",
    )


def _plain_topic(message: ReceivedMessage) -> str:
    topic = translation.mqtt_topic(message.properties)
    if topic is None:
        raise TemplateError("the message has no property MQTT_TOPIC: it was not sent by a bridge")
    try:
        check_topic(topic)
    except ArgumentError as error:
        raise TemplateError(f"the property MQTT_TOPIC is not a topic to publish to: {error}") from None
    return topic


def qos_of(message: ReceivedMessage, highest: QoS) -> int:
    """Return the QoS with which a delayed message came, or the highest that the rules allow."""
    text = message.properties.get(translation.QOS, "")
    return min(int(text), highest) if text in ("0", "1", "2") else highest
