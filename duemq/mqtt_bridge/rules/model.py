"""The rules as values: what the bridge is told to do, checked, and ready to be asked for each message.

`rules.file` makes them of bridge.toml. What is a template or a filter there is a function here, so that the rest of the
bridge knows neither.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from duemq._values.accounts import Keys
from duemq.errors import DueMQError

if TYPE_CHECKING:
    from duemq.messages import ReceivedMessage

QoS = Literal[0, 1, 2]
Protocol = Literal["5", "3.1.1"]
Retained = Literal["once", "never"]
UserProperties = Sequence[tuple[str, str]]
"""MQTT 5's user properties, in their order. A name may be there several times; with MQTT 3.1.1 there are none."""

NEVER_EXPIRES: Final = 0xFFFFFFFF
"""The session expiry of MQTT 5 that keeps a session for ever, in seconds."""


class RulesError(DueMQError):
    """The file of rules is wrong. The text begins with the file and the line: "bridge.toml:12: ..."."""


class TemplateError(DueMQError):
    """A template makes no topic of this message; the text says why."""


class DelayRefused(DueMQError):
    """A message that asks for a delay and cannot have it; the text says why, for whoever sent it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """How the connection to the MQTT broker is encrypted. Files are PEM."""

    ca_file: Path | None
    """Certificates to trust; None: those that the system trusts."""
    certificate_file: Path | None
    key_file: Path | None
    """The bridge's own certificate and its key, for an MQTT broker that asks for one; None without one."""
    check_host: bool
    """Whether the MQTT broker's certificate is checked. False is for trials."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """The address of the MQTT broker, the bridge's identity there, and the limits of what is on its way."""

    state_directory: Path
    """Directory of the journal; each bridge has its own."""
    host: str
    port: int
    protocol: Protocol
    client_id: str
    """Names the session at the MQTT broker. It stays the same from start to start, and no other client has it."""
    user: str | None
    password: str | None = field(repr=False)
    tls: Tls | None
    """None: the connection is not encrypted."""
    websocket_path: str | None
    """Path of MQTT over WebSocket; None: MQTT over TCP."""
    keepalive: int
    """In seconds."""
    session_expiry: int
    """How long the MQTT broker keeps the session while the bridge is away, in seconds. MQTT 5 only."""
    receive_maximum: int
    """Maximum number of messages from the MQTT broker that are not acknowledged yet, 1 to 65535."""
    receive_maximum_bytes: int
    """Maximum size of these messages together, in bytes; one message is always taken."""
    max_in_flight: int
    """Maximum number of messages to the MQTT broker that it has not acknowledged yet, 1 to 65535. The MQTT broker may
    allow fewer."""
    max_in_flight_bytes: int
    """Maximum size of the messages that were read from RocketMQ and that the MQTT broker has not acknowledged yet,
    together, in bytes; one message of each rule is always read."""
    share: str | None
    """Name of a shared subscription: bridges with the same name share the load. None: not shared."""


@dataclass(frozen=True, slots=True)
class Subscription:
    """A subscription of the bridge. No two of them match a topic in common, since a broker may deliver a message once
    for each subscription that matches."""

    filter: str
    """MQTT filter, without $share."""
    qos: QoS
    retained: Retained
    """Whether it asks for retained messages. Those whose rule says "never" may come all the same, with the retain flag,
    where one subscription serves several rules."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where a message of MQTT goes in RocketMQ."""

    topic: str
    key: str | None = None
    tags: str | None = None
    sharding_key: str | None = None
    """Messages with the same one keep their order."""
    is_chosen_by_sender: bool = False
    """Whether the sender's MQTT topic decides about the RocketMQ topic, and not the rule alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inbound:
    """A rule from MQTT to RocketMQ. The first rule whose filter matches has the message."""

    filter: str
    """MQTT filter, without $share."""
    target: Callable[[str], Target | None]
    """What becomes of an MQTT topic; None where the filter does not match. Raises TemplateError where it does and the
    templates make nothing that RocketMQ takes."""
    qos: QoS
    """The highest QoS of the subscription."""
    retained: Retained
    """Whether messages that the MQTT broker has retained when the bridge subscribes are taken over once, or never."""
    line: int = 0
    """Where the rule begins in its file; 0 for none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outbound:
    """A rule from RocketMQ to MQTT."""

    topic: str
    """RocketMQ's topic."""
    mqtt_topic: Callable[[ReceivedMessage], str]
    """Where a message goes. Raises TemplateError."""
    group: str
    """RocketMQ's consumer group. Each rule has its own, which outlives restarts; bridges that share a load have the
    same."""
    tags: str
    """As of a subscription: "a || b", or "*" for all."""
    qos: QoS
    retain: bool
    start: Literal["first", "last"]
    """Where a new group begins: with the oldest message in the topic, or behind the newest."""
    line: int = 0
    """Where the rule begins in its file; 0 for none."""


@dataclass(frozen=True, slots=True)
class Delay:
    """What a message asks for that is to be delivered later. Exactly one of `delay_ms` and `deliver_at_ms` is set, or
    none where `recall` is."""

    plain_topic: str
    """The MQTT topic that it goes to when it is due."""
    delay_ms: int | None = None
    """Counted from its receipt."""
    deliver_at_ms: int | None = None
    """In ms since the epoch. One that has passed means at once."""
    key: str | None = None
    """By which it can be recalled or replaced. A RocketMQ key: not empty, without blanks."""
    replace: bool = False
    """Whether it takes the place of the one that waits with the same key, which was sent with this, too."""
    recall: bool = False
    """Whether what waits with this key is to be cancelled; then nothing is sent."""


ReadDelay = Callable[[str, UserProperties, int], Delay | None]
"""From a topic as it was published to, its user properties and the time (ms since the epoch) to the delay that was
asked for; None for a plain message. Raises DelayRefused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delayed:
    """How delays are asked for, and where messages wait."""

    read: ReadDelay
    prefixes: tuple[str, ...]
    """First levels of the topics that ask for a delay; the bridge subscribes to each with /#."""
    topic: str
    """RocketMQ's topic in which delayed messages wait."""
    group: str
    """RocketMQ's consumer group that takes them when they are due."""
    qos: QoS
    """The highest QoS of the subscription. When a message is due, it is published with the QoS that it came with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """All that a file of rules says."""

    connection: Connection
    nameserver: str
    """RocketMQ's name servers, "host:port" joined by ;."""
    account: Keys
    """Keys of the bridge's account at RocketMQ's brokers."""
    delayed: Delayed | None
    """None: this bridge has no delays."""
    status_topic: str
    """MQTT topic of the bridge's own state, duemq/bridge/<client id> by default. What is refused is told below it."""
    inbound: tuple[Inbound, ...] = ()
    outbound: tuple[Outbound, ...] = ()
    subscriptions: tuple[Subscription, ...] = ()
    """What the bridge subscribes to: the filters of `inbound` and the prefixes of `delayed`, without those that another
    one covers."""
