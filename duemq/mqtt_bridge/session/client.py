"""A connection to the MQTT broker: aiomqtt's client, with the acknowledgements under the bridge's control."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import socket
import ssl
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import aiomqtt
from aiomqtt.types import PahoSocket
from paho.mqtt.client import MQTT_CLEAN_START_FIRST_ONLY, ConnectFlags, DisconnectFlags
from paho.mqtt.client import Client as PahoClient
from paho.mqtt.enums import MQTTErrorCode
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties as PahoProperties
from paho.mqtt.reasoncodes import ReasonCode
from paho.mqtt.subscribeoptions import SubscribeOptions

from duemq.errors import DueMQError
from duemq.mqtt_bridge.rules.model import MqttConnection, MqttSubscription
from duemq.mqtt_bridge.session import packets
from duemq.mqtt_bridge.session.wire import Received, Wire

TIMEOUT: Final = 10.0
"""Maximum time for the answers to CONNECT, SUBSCRIBE and UNSUBSCRIBE, in seconds."""
_MISC_EVERY: Final = 1.0
"""Seconds between two checks whether a ping is due, as in aiomqtt."""
_UNTOLD_MAXIMUM: Final = 20
"""Maximum number of unacknowledged messages with MQTT 3.1.1, whose brokers do not report their limit. This is
Mosquitto's default limit; beyond it, Mosquitto acknowledges and drops messages with QoS 2."""
_RETAIN_ONCE, _RETAIN_NEVER = 1, 2
"""Retain handling of a subscription, MQTT 5.0, 3.8.3.1."""


T = TypeVar("T")

_quiet = logging.getLogger("duemq.mqtt_bridge.paho")
"""paho's messages about lost connections are not shown: the bridge logs one line for each."""
_quiet.setLevel(logging.CRITICAL)


class MqttConnectionError(DueMQError):
    """There is no connection to the MQTT broker; the text is the reason."""


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """Limits of the MQTT broker from its CONNACK. With MQTT 3.1.1 it has none."""

    receive_maximum: int = packets.MAX_PACKET_IDS
    """Maximum number of unacknowledged messages in flight to it."""
    maximum_qos: int = 2
    retain: bool = True
    packet_bytes: int = packets.MAX_REMAINING


@dataclass(frozen=True, slots=True)
class Grant:
    """The MQTT broker's answer to a subscription: the QoS that it grants, or the reason why it refuses."""

    qos: int
    refused: str | None = None


class Session(aiomqtt.Client):
    """One connection, used with `async with`, which raises MqttConnectionError if it cannot be made.

    `received` gets the packets of messages, even before `async with` has returned, since a session that the MQTT
    broker kept continues immediately. `new_id` returns packet ids that are not in use. `limit`: only the head of a
    packet with more bytes is kept. `will`: topic and payload of the retained message that the MQTT broker publishes
    when the connection is lost.
    """

    def __init__(
        self,
        connection: MqttConnection,
        *,
        will: tuple[str, bytes],
        limit: int,
        received: Received,
        new_id: Callable[[], int],
    ) -> None:
        self.is_v5 = connection.is_v5
        tls = connection.tls
        super().__init__(
            connection.host,
            connection.port,
            username=connection.user,
            password=connection.password,
            identifier=connection.client_id,
            logger=_quiet,
            protocol=aiomqtt.ProtocolVersion.V5 if self.is_v5 else aiomqtt.ProtocolVersion.V311,
            will=aiomqtt.Will(will[0], will[1], qos=1, retain=True),
            clean_session=None if self.is_v5 else False,
            clean_start=False if self.is_v5 else MQTT_CLEAN_START_FIRST_ONLY,
            properties=_connect_properties(connection) if self.is_v5 else None,
            transport="websockets" if connection.websocket_path is not None else "tcp",
            websocket_path=connection.websocket_path,
            keepalive=connection.keepalive,
            timeout=TIMEOUT,
            tls_params=None
            if tls is None
            else aiomqtt.TLSParameters(
                ca_certs=str(tls.ca_file) if tls.ca_file else None,
                certfile=str(tls.certificate_file) if tls.certificate_file else None,
                keyfile=str(tls.key_file) if tls.key_file else None,
                cert_reqs=ssl.CERT_REQUIRED if tls.check_host else ssl.CERT_NONE,
            ),
            tls_insecure=None if tls is None else not tls.check_host,
        )
        self.is_present = False
        """Whether the MQTT broker still had the session."""
        self.limits = ServerLimits()
        self._address = f"{connection.host}:{connection.port}"
        self._lost: asyncio.Future[str] = self._loop.create_future()
        self._drained = asyncio.Event()
        self._drained.set()
        self._out = bytearray()
        self._is_given_up = False
        """Whether the connection is no longer wanted, though the thread that makes it may not have ended."""
        self._is_paused = False
        self._pauses = 0
        """Number of pauses."""
        self._why_broken: str | None = None
        self._wire = Wire(
            self._client, is_v5=self.is_v5, limit=limit, received=received, broken=self._set_broken, new_id=new_id
        )

    async def __aenter__(self) -> Session:
        try:
            return await super().__aenter__()
        except (aiomqtt.MqttError, ssl.SSLError, OSError) as error:
            self._wire.cut()
            raise MqttConnectionError(f"no connection to the MQTT broker {self._address}: {error}") from None
        except BaseException:
            self._is_given_up = True
            self._wire.cut()
            raise

    def _client_connect(self) -> None:
        # Runs in a thread, and runs to its end even if the session is cancelled in the meantime.
        try:
            super()._client_connect()
        finally:
            self._loop.call_soon_threadsafe(self._cut_if_given_up)

    def _cut_if_given_up(self) -> None:
        if self._is_given_up:
            self._wire.cut()

    async def __aexit__(self, *_: object) -> None:
        """Send DISCONNECT if there is a connection, and close it. The MQTT broker keeps the session. Does not raise."""
        self._flush()
        try:
            await super().__aexit__(None, None, None)
        except aiomqtt.MqttError:
            pass
        finally:
            self._wire.cut()

    @property
    def is_lost(self) -> bool:
        """Whether the connection is lost or closed."""
        return self._lost.done()

    async def wait_lost(self) -> str:
        """Wait until the connection is lost or closed; return the reason."""
        return await asyncio.shield(self._lost)

    def send(self, data: bytes | bytearray) -> None:
        """Send packets, together with all others that are sent in this turn of the event loop. Does nothing without a
        connection."""
        if not self._out:
            self._loop.call_soon(self._flush)
        self._out += data

    def pause(self) -> None:
        """Stop reading until `resume`. Pings are still sent, so that the MQTT broker keeps the connection."""
        self._is_paused = True
        self._pauses += 1
        sock = self._client.socket()
        if sock is not None:
            self._loop.remove_reader(sock.fileno())

    def resume(self) -> None:
        """Resume reading after a pause."""
        self._is_paused = False
        sock = self._client.socket()
        if sock is not None:
            self._loop.add_reader(sock.fileno(), self._wire.read_all)
            self._wire.read_all()  # TLS may have buffered bytes of which the event loop does not know

    async def drained(self) -> None:
        """Wait until the operating system has accepted all bytes, or the connection is lost."""
        self._flush()
        while self._wire.is_blocked and not self.is_lost:
            self._drained.clear()
            await self._drained.wait()

    async def subscribe_to(self, topic: str, subscription: MqttSubscription) -> Grant:
        """Subscribe to a filter; `topic` is the filter with $share. Raises MqttConnectionError."""
        options = None
        if self.is_v5:
            is_once = subscription.retained == "once"
            # With retainAsPublished, the retain flag means that a message was published as retained. With "once" it
            # must mean that the message is the MQTT broker's retained copy.
            options = SubscribeOptions(
                subscription.qos,
                retainAsPublished=not is_once,
                retainHandling=_RETAIN_ONCE if is_once else _RETAIN_NEVER,
            )
        try:
            qos = 0 if options is not None else subscription.qos
            codes = await self._unless_lost(self.subscribe(topic, qos, options, timeout=math.inf))
        except (aiomqtt.MqttError, ValueError) as error:
            raise MqttConnectionError(f"cannot subscribe to {topic!r}: {error}") from None
        code = codes[0]
        if not isinstance(code, ReasonCode):
            return Grant(code)
        return Grant(0, str(code)) if code.is_failure else Grant(code.value)

    async def unsubscribe_from(self, topic: str) -> None:
        """End a subscription; `topic` as in `subscribe_to`. Raises MqttConnectionError."""
        try:
            await self._unless_lost(self.unsubscribe(topic, timeout=math.inf))
        except (aiomqtt.MqttError, ValueError) as error:
            raise MqttConnectionError(f"cannot unsubscribe from {topic!r}: {error}") from None

    async def _unless_lost(self, call: Coroutine[Any, Any, T]) -> T:
        """Wait for an answer until the connection is lost, which aiomqtt does not notice while it waits, or for at most
        TIMEOUT. Pauses, in which no answer is read, do not count. Raises MqttConnectionError."""
        calling = asyncio.create_task(call)
        try:
            while True:
                pauses, was_paused = self._pauses, self._is_paused
                await asyncio.wait((calling, self._lost), timeout=TIMEOUT, return_when=asyncio.FIRST_COMPLETED)
                if calling.done():
                    return await calling
                if self.is_lost:
                    raise MqttConnectionError(self._lost.result())
                if not was_paused and pauses == self._pauses:
                    raise MqttConnectionError("the MQTT broker does not answer")
        finally:
            calling.cancel()
            await asyncio.wait((calling,))

    def _flush(self) -> None:
        if self._out:
            data, self._out = bytes(self._out), bytearray()
            self._wire.write(data)

    def _set_broken(self, why: str) -> None:
        self._why_broken = f"{self._address} broke the protocol: {why}"

    def _on_connect(
        self,
        client: PahoClient,
        userdata: Any,
        flags: ConnectFlags,
        reason_code: ReasonCode,
        properties: PahoProperties | None = None,
    ) -> None:
        self.is_present = flags.session_present
        found = {} if properties is None else {str(name): value for name, value in vars(properties).items()}
        self.limits = ServerLimits(
            receive_maximum=found.get("ReceiveMaximum", packets.MAX_PACKET_IDS if self.is_v5 else _UNTOLD_MAXIMUM),
            maximum_qos=found.get("MaximumQoS", 2),
            retain=found.get("RetainAvailable", 1) == 1,
            packet_bytes=found.get("MaximumPacketSize", packets.MAX_REMAINING),
        )
        super()._on_connect(client, userdata, flags, reason_code, properties)

    def _on_disconnect(
        self,
        client: PahoClient,
        userdata: Any,
        flags: DisconnectFlags,
        reason_code: ReasonCode,
        properties: PahoProperties | None = None,
    ) -> None:
        if not self._lost.done():
            by_broker = flags.is_disconnect_packet_from_server
            why = f"the MQTT broker said {reason_code}" if by_broker else f"lost the connection to {self._address}"
            self._lost.set_result(self._why_broken or why)
        self._drained.set()
        super()._on_disconnect(client, userdata, flags, reason_code, properties)
        if not self._connected.done():
            # aiomqtt would wait for the CONNACK.
            self._connected.set_exception(aiomqtt.MqttError(self._lost.result()))
            self._connected.exception()  # marks it as retrieved, in case no task waits for it any longer
        if self._disconnected.done() and not self._disconnected.cancelled():
            self._disconnected.exception()  # retrieved here, since `wait_lost` reports it

    # aiomqtt's own methods might watch a socket that has already been closed, or the next one with its descriptor.

    def _on_socket_open(self, client: PahoClient, userdata: Any, sock: PahoSocket) -> None:
        # Runs in the thread that connects.
        self._loop.call_soon_threadsafe(self._watch, sock)

    def _watch(self, sock: PahoSocket) -> None:
        if self._wire.is_open(sock) and not self._is_given_up:
            _set_no_delay(sock.fileno())
            self._loop.add_reader(sock.fileno(), self._wire.read_all)
            self._misc_task = self._loop.create_task(self._misc_loop())

    async def _misc_loop(self) -> None:
        """Send pings. In a pause their answers are not read, so missing answers do not end the connection."""
        while True:
            if self._is_paused:
                self._wire.forgive_ping()
            if self._client.loop_misc() != MQTTErrorCode.MQTT_ERR_SUCCESS:
                return
            await asyncio.sleep(_MISC_EVERY)

    def _on_socket_register_write(self, client: PahoClient, userdata: Any, sock: PahoSocket) -> None:
        self._loop.call_soon_threadsafe(self._watch_writing, sock)

    def _watch_writing(self, sock: PahoSocket) -> None:
        if self._wire.wants_to_write(sock):
            self._loop.add_writer(sock.fileno(), self._client.loop_write)

    def _on_socket_unregister_write(self, client: PahoClient, userdata: Any, sock: PahoSocket) -> None:
        super()._on_socket_unregister_write(client, userdata, sock)
        self._drained.set()


def _set_no_delay(descriptor: int) -> None:
    """Set TCP_NODELAY, so that small packets are sent immediately. Without it the kernel holds a packet back until the
    other side's kernel has acknowledged the previous one, which may take 40 ms. paho does not set the option, and
    aiomqtt cannot set it with WebSocket."""
    with socket.socket(fileno=os.dup(descriptor)) as same:
        same.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _connect_properties(connection: MqttConnection) -> PahoProperties:
    properties = PahoProperties(PacketTypes.CONNECT)  # type: ignore[no-untyped-call]
    properties.SessionExpiryInterval = connection.session_expiry
    properties.ReceiveMaximum = connection.receive_maximum
    return properties
