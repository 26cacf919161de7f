"""One connection to the MQTT broker: aiomqtt's client, with the acknowledgements under the bridge's control."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import aiomqtt
from aiomqtt.types import PahoSocket
from paho.mqtt.client import MQTT_CLEAN_START_FIRST_ONLY, ConnectFlags, DisconnectFlags
from paho.mqtt.client import Client as PahoClient
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties as PahoProperties
from paho.mqtt.reasoncodes import ReasonCode
from paho.mqtt.subscribeoptions import SubscribeOptions

from duemq.errors import DueMQError
from duemq.mqtt_bridge.rules.model import Connection, Subscription
from duemq.mqtt_bridge.session import packets
from duemq.mqtt_bridge.session.wire import Received, Wire

TIMEOUT: Final = 10.0
"""For the answers to CONNECT, SUBSCRIBE and UNSUBSCRIBE, in seconds."""
_UNTOLD_MAXIMUM: Final = 20
"""Messages without acknowledgement with MQTT 3.1.1, whose brokers do not tell their limit: Mosquitto's default, beyond
which it acknowledges messages with QoS 2 and drops them."""
_RETAIN_ONCE, _RETAIN_NEVER = 1, 2
"""Retain handling of a subscription, MQTT 5.0, 3.8.3.1."""


T = TypeVar("T")

_quiet = logging.getLogger("duemq.mqtt_bridge.paho")
"""What paho logs of a lost connection is told once, by whoever waits for it."""
_quiet.setLevel(logging.CRITICAL)


class MqttConnectionError(DueMQError):
    """There is no connection to the MQTT broker, or not any more; the text says why."""


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """What the MQTT broker allows, as its CONNACK says; with MQTT 3.1.1 it says nothing."""

    receive_maximum: int = packets.MAX_PACKET_IDS
    """Maximum number of messages on their way to it without acknowledgement."""
    maximum_qos: int = 2
    retain: bool = True
    packet_bytes: int = packets.MAX_REMAINING


class Session(aiomqtt.Client):
    """A connection, used once: `async with`, which raises MqttConnectionError where there is none.

    `received` gets the packets of messages, also before `async with` has returned: a session that the broker kept goes
    on at once. `new_id` gives packet ids that nobody else has. `limit`: of larger packets only the head is kept, in
    bytes. `will`: what the broker publishes for the bridge, retained, when the connection is lost: topic and payload.
    """

    def __init__(
        self,
        connection: Connection,
        *,
        will: tuple[str, bytes],
        limit: int,
        received: Received,
        new_id: Callable[[], int],
    ) -> None:
        self.is_v5 = connection.protocol == "5"
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
        """Whether the broker still had the session."""
        self.limits = ServerLimits()
        self._address = f"{connection.host}:{connection.port}"
        self._lost: asyncio.Future[str] = self._loop.create_future()
        self._drained = asyncio.Event()
        self._drained.set()
        self._out = bytearray()
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
            self._wire.cut()
            raise

    async def __aexit__(self, *_: object) -> None:
        """Say goodbye, where the connection is there; the broker keeps the session. Does not raise."""
        self._flush()
        try:
            await super().__aexit__(None, None, None)
        except aiomqtt.MqttError:
            pass
        finally:
            self._wire.cut()

    @property
    def is_lost(self) -> bool:
        """Whether the connection is gone."""
        return self._lost.done()

    async def wait_lost(self) -> str:
        """Wait until the connection is gone, and give the reason."""
        return await asyncio.shield(self._lost)

    def send(self, data: bytes | bytearray) -> None:
        """Send packets, together with all others that are sent in this turn of the loop. Nothing happens where the
        connection is gone."""
        if not self._out:
            self._loop.call_soon(self._flush)
        self._out += data

    def pause(self) -> None:
        """Read nothing more until `resume`. A pause of more than twice the keepalive ends the connection, after which
        the broker sends again what is not acknowledged."""
        sock = self._client.socket()
        if sock is not None:
            self._loop.remove_reader(sock.fileno())

    def resume(self) -> None:
        """Read on after a pause."""
        sock = self._client.socket()
        if sock is not None:
            self._loop.add_reader(sock.fileno(), self._wire.read_all)
            self._wire.read_all()  # TLS may have read already what a socket no longer tells of

    async def drained(self) -> None:
        """Wait until all is with the operating system, or the connection is gone."""
        self._flush()
        while self._wire.is_blocked and not self.is_lost:
            self._drained.clear()
            await self._drained.wait()

    async def subscribe_to(self, topic: str, subscription: Subscription) -> str | None:
        """Subscribe; `topic` is the filter as the broker is to see it, with $share. Gives why the broker refuses it, or
        None. Raises MqttConnectionError."""
        options = None
        if self.is_v5:
            is_once = subscription.retained == "once"
            # The flag is kept where it says how a message was published. With "once" it has to say which were retained.
            options = SubscribeOptions(
                subscription.qos,
                retainAsPublished=not is_once,
                retainHandling=_RETAIN_ONCE if is_once else _RETAIN_NEVER,
            )
        try:
            qos = 0 if options is not None else subscription.qos
            codes = await self._unless_lost(self.subscribe(topic, qos, options))
        except (aiomqtt.MqttError, ValueError) as error:
            raise MqttConnectionError(f"cannot subscribe to {topic!r}: {error}") from None
        code = codes[0]
        return str(code) if isinstance(code, ReasonCode) and code.is_failure else None

    async def unsubscribe_from(self, topic: str) -> None:
        """Unsubscribe; `topic` as of `subscribe_to`. Raises MqttConnectionError."""
        try:
            await self._unless_lost(self.unsubscribe(topic))
        except (aiomqtt.MqttError, ValueError) as error:
            raise MqttConnectionError(f"cannot unsubscribe from {topic!r}: {error}") from None

    async def _unless_lost(self, call: Coroutine[Any, Any, T]) -> T:
        """Wait for an answer, but not when the connection is lost, which aiomqtt does not notice while it waits. Raises
        MqttConnectionError."""
        calling = asyncio.create_task(call)
        try:
            await asyncio.wait((calling, self._lost), return_when=asyncio.FIRST_COMPLETED)
            if not calling.done():
                raise MqttConnectionError(self._lost.result())
            return await calling
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
            self._connected.exception()  # looked at, also where nobody waits any more
        if self._disconnected.done() and not self._disconnected.cancelled():
            self._disconnected.exception()  # looked at, since `wait_lost` tells it

    # aiomqtt's own would watch a socket that was closed meanwhile, or the next one with its number.

    def _on_socket_open(self, client: PahoClient, userdata: Any, sock: PahoSocket) -> None:
        # Called in the thread that connects.
        self._loop.call_soon_threadsafe(self._watch, sock)

    def _watch(self, sock: PahoSocket) -> None:
        if self._wire.is_open(sock):
            self._loop.add_reader(sock.fileno(), self._wire.read_all)
            self._misc_task = self._loop.create_task(self._misc_loop())

    def _on_socket_register_write(self, client: PahoClient, userdata: Any, sock: PahoSocket) -> None:
        self._loop.call_soon_threadsafe(self._watch_writing, sock)

    def _watch_writing(self, sock: PahoSocket) -> None:
        if self._wire.wants_to_write(sock):
            self._loop.add_writer(sock.fileno(), self._client.loop_write)

    def _on_socket_unregister_write(self, client: PahoClient, userdata: Any, sock: PahoSocket) -> None:
        super()._on_socket_unregister_write(client, userdata, sock)
        self._drained.set()


def _connect_properties(connection: Connection) -> PahoProperties:
    properties = PahoProperties(PacketTypes.CONNECT)  # type: ignore[no-untyped-call]
    properties.SessionExpiryInterval = connection.session_expiry
    properties.ReceiveMaximum = connection.receive_maximum
    return properties
