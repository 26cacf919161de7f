"""The rules as values that are checked and ready to use.

`rules.file` makes them from bridge.toml. Templates and filters become functions, so that the rest of the bridge knows
neither.
"""

from __future__ import annotations

import ssl
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
"""MQTT 5's user properties, in their order. Names may repeat. With MQTT 3.1.1 there are none."""

NEVER_EXPIRES: Final = 0xFFFFFFFF
"""The session expiry of MQTT 5 that keeps a session for ever, in seconds."""


class RulesError(DueMQError):
    """The file of rules is wrong. The text begins with the file and the line: "bridge.toml:12: ..."."""


class TemplateError(DueMQError):
    """A template cannot be filled with the values of a message, or the result is not a topic."""


class DelayRefused(DueMQError):
    """A message asks for a delay that is wrong or too long. The text is for its sender."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """How connections are encrypted, to the MQTT broker or to RocketMQ. Files are PEM."""

    ca_file: Path | None
    """Certificates to trust; None: those that the system trusts."""
    certificate_file: Path | None
    key_file: Path | None
    """The bridge's own certificate and its key, for a broker that asks for one; None without one."""
    check_host: bool
    """Whether the broker's certificate is checked. False is for trials."""

    def context(self) -> ssl.SSLContext:
        """Return a context for connections. Raises OSError (ssl.SSLError is one) if a file cannot be
        used."""
        context = ssl.create_default_context(cafile=self.ca_file)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        # A self-signed certificate may be trusted by itself.
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        if not self.check_host:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        if self.certificate_file is not None:
            # Without a password OpenSSL would ask for one on the terminal.
            context.load_cert_chain(self.certificate_file, self.key_file, password=lambda: "")
        return context


@dataclass(frozen=True, slots=True, kw_only=True)
class MqttConnection:
    """The address of the MQTT broker, the bridge's identity there, and the limits of messages in flight."""

    state_directory: Path
    """Directory of the journal; each bridge has its own."""
    state_line: int
    """Line of the file of rules that gives this directory, for errors."""
    host: str
    port: int
    protocol: Protocol
    client_id: str
    """Identifies the session at the MQTT broker. It stays the same from start to start, and no other client has it."""
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

    @property
    def is_v5(self) -> bool:
        """Whether it speaks MQTT 5, not 3.1.1."""
        return self.protocol == "5"

    @property
    def bridge(self) -> str:
        """The bridge's name in the properties of messages. Bridges that share the load have the same."""
        return self.share or self.client_id


@dataclass(frozen=True, slots=True)
class MqttSubscription:
    """A subscription of the bridge. No two of them match a topic in common, since an MQTT broker may deliver a message
    once for each subscription that matches."""

    filter: str
    """MQTT filter, without $share."""
    qos: QoS
    retained: Retained
    """Whether it asks for retained messages. If several rules share a subscription, retained messages also arrive for
    those with "never"; they have the retain flag."""


@dataclass(frozen=True, slots=True)
class Target:
    """The RocketMQ topic of an MQTT message, and its key, tags and sharding key."""

    topic: str
    key: str | None = None
    tags: str | None = None
    sharding_key: str | None = None
    """Messages with the same one keep their order."""
    is_chosen_by_sender: bool = False
    """Whether `topic` depends on the MQTT topic, which the sender chose."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inbound:
    """A rule from MQTT to RocketMQ. The first rule whose filter matches takes the message."""

    filter: str
    """MQTT filter, without $share."""
    target: Callable[[str], Target | None]
    """Returns the target for an MQTT topic, or None if the filter does not match. Raises TemplateError if it matches
    and the templates make a name that RocketMQ does not accept."""
    qos: QoS
    """The highest QoS of the subscription."""
    retained: Retained
    """Whether messages that the MQTT broker has retained when the bridge subscribes are taken over once, or never."""
    line: int = 0
    """The line at which the rule begins in its file; 0 for none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outbound:
    """A rule from RocketMQ to MQTT."""

    topic: str
    """RocketMQ's topic."""
    mqtt_topic: Callable[[ReceivedMessage], str]
    """Returns the MQTT topic for a message. Raises TemplateError."""
    group: str
    """RocketMQ's consumer group. It stays the same from start to start. Each rule has its own; bridges that share the
    load have the same."""
    tags: str
    """As in a subscription: "a || b", or "*" for all."""
    qos: QoS
    retain: bool
    start: Literal["first", "last"]
    """Where a new group begins: at the oldest message in the topic, or after the newest."""
    line: int = 0
    """The line at which the rule begins in its file; 0 for none."""


@dataclass(frozen=True, slots=True)
class Delay:
    """The delay or the recall that a message asks for. Of `delay_ms` and `deliver_at_ms` exactly one is set, or none if
    `recall` is."""

    plain_topic: str
    """The MQTT topic to which the message is published when it is due."""
    delay_ms: int | None = None
    """Delay in ms, from the receipt of the message."""
    deliver_at_ms: int | None = None
    """Deliver time, ms since the epoch. If it has passed, the message is published immediately."""
    key: str | None = None
    """The RocketMQ key by which the message can be recalled or replaced: not empty, without blanks."""
    replace: bool = False
    """Whether it replaces the waiting message that was also sent with `replace` and has the same key."""
    recall: bool = False
    """Whether the waiting messages with this key are cancelled; nothing is sent then."""


ReadDelay = Callable[[str, UserProperties, int], Delay | None]
"""Returns the delay that a message asks for, from its MQTT topic, its user properties and the time (ms since the
epoch); None for a plain message. Raises DelayRefused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delayed:
    """The rules about delayed messages."""

    read: ReadDelay
    prefixes: tuple[str, ...]
    """First levels of the topics that ask for a delay; the bridge subscribes to each with /#."""
    topic: str
    """RocketMQ's topic in which delayed messages wait."""
    group: str
    """RocketMQ's consumer group that receives them when they are due."""
    qos: QoS
    """The highest QoS of the subscription. A message that is due is published with the QoS with which it arrived."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The contents of a file of rules."""

    file: Path
    """The file, for errors."""
    delayed_topic_line: int
    delayed_group_line: int
    nameserver_line: int
    """Lines that decide on the topic in which delayed messages wait, on the group that takes them, and on where both
    are."""
    connection: MqttConnection
    nameserver: str
    """RocketMQ's name servers, "host:port" joined by ;."""
    account: Keys
    """Keys of the bridge's account at RocketMQ's brokers."""
    tls: Tls | None
    """None: the connections to RocketMQ are not encrypted."""
    delayed: Delayed | None
    """None: the bridge does not delay messages."""
    status_topic: str
    """MQTT topic of the bridge's state, duemq/bridge/<client id> by default. Its other reports are below this topic."""
    inbound: tuple[Inbound, ...] = ()
    outbound: tuple[Outbound, ...] = ()
    subscriptions: tuple[MqttSubscription, ...] = ()
    """The bridge's subscriptions: the filters of `inbound` and the prefixes of `delayed`, without those that another
    one covers."""
