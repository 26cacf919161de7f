"""The connection of paho's client, where the bridge itself handles the packets of messages. Only this module uses
private names of paho.

paho acknowledges a message with QoS 2 before the application sees it, chooses packet ids itself, forgets them when the
process ends, reads a byte at a time and makes one system call per packet. Therefore all packets that carry messages,
and their acknowledgements, are read and written here: one read of the socket yields one list, and all packets that are
sent in one turn of the loop are sent in one write. paho and aiomqtt handle the rest (CONNECT, SUBSCRIBE, PINGREQ, TLS,
WebSocket).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, TypeGuard

from aiomqtt.types import PahoSocket
from paho.mqtt.client import Client
from paho.mqtt.enums import MQTTErrorCode
from paho.mqtt.exception import MalformedPacket

from duemq.mqtt_bridge.session import packets
from duemq.mqtt_bridge.session.packets import Ack, Cutter, PacketError, Publish

if TYPE_CHECKING:
    from paho.mqtt.client import SocketLike

NAMES_OF_PAHO: Final = (
    "_sock_recv",
    "_sock_close",
    "_loop_rc_handle",
    "_packet_handle",
    "_in_packet",
    "_out_packet",
    "_mid_generate",
    "_registered_write",
    "_msgtime_mutex",
    "_last_bytes_received",
    "_ping_t",
    "loop_read",
    "loop_write",
    "want_write",
)
"""Private names of paho that are used or replaced here."""

READ_BYTES: Final = 65_536
TURN_BYTES: Final = 262_144
"""Maximum number of bytes that are read before other tasks have their turn."""

_OURS: Final = frozenset((packets.PUBLISH, packets.PUBACK, packets.PUBREC, packets.PUBREL, packets.PUBCOMP))

Received = Callable[[list[Publish | Ack]], None]
"""A function that gets the packets of one read, in their order."""


class Wire:
    """Reads and writes the packets of messages over the connection of a paho client.

    `received` gets the packets. `broken` is called with the reason when the MQTT broker breaks the protocol, which ends
    the connection. `new_id` returns packet ids for the packets that paho itself sends. `limit`: only the head of a
    packet with more bytes is kept.
    """

    def __init__(
        self,
        client: Client,
        *,
        is_v5: bool,
        limit: int,
        received: Received,
        broken: Callable[[str], None],
        new_id: Callable[[], int],
    ) -> None:
        self._client = client
        self._is_v5 = is_v5
        self._received = received
        self._broken = broken
        self._cutter = Cutter(limit)
        client.loop_read = self._read  # type: ignore[method-assign]
        client._mid_generate = new_id  # type: ignore[method-assign]

    def write(self, data: bytes) -> None:
        """Send packets as soon as the socket accepts them. Does nothing without a connection."""
        client = self._client
        if client.socket() is None:
            return
        # The entry that paho makes for an acknowledgement: paho does nothing after sending it.
        client._out_packet.append(
            {
                "command": packets.PUBACK,
                "mid": 0,
                "qos": 1,
                "pos": 0,
                "to_process": len(data),
                "packet": data,
                "info": None,
            }
        )
        client.loop_write()

    @property
    def is_blocked(self) -> bool:
        """Whether bytes still have to be written, since the MQTT broker reads slowly."""
        return self._client.want_write()

    def is_open(self, sock: PahoSocket) -> TypeGuard[SocketLike]:
        """Whether this is the present connection's socket."""
        return sock is not None and self._client.socket() is sock

    def wants_to_write(self, sock: PahoSocket) -> TypeGuard[SocketLike]:
        """Whether this is the present connection's socket, and bytes wait for it."""
        return self.is_open(sock) and self._client._registered_write

    def cut(self) -> None:
        """Close the connection without a DISCONNECT."""
        self._client._sock_close()

    def forgive_ping(self) -> None:
        """Do not wait for the answer to the last ping."""
        self._client._ping_t = 0

    def read_all(self) -> None:
        """Read everything that has arrived, including the buffer of TLS."""
        while self._read() == MQTTErrorCode.MQTT_ERR_SUCCESS:
            pending = getattr(self._client.socket(), "pending", None)
            if pending is None or not pending():
                return

    def _read(self, max_packets: int = 1) -> MQTTErrorCode:
        """Replace paho's `loop_read`: read the socket, and pass the packets on."""
        client = self._client
        if client.socket() is None:
            return MQTTErrorCode.MQTT_ERR_NO_CONN
        found: list[Publish | Ack] = []
        total = 0
        try:
            while total < TURN_BYTES:
                try:
                    data = client._sock_recv(READ_BYTES)
                except BlockingIOError:
                    break
                except OSError:
                    data = b""
                if not data:
                    self._hand_over(found)
                    return client._loop_rc_handle(MQTTErrorCode.MQTT_ERR_CONN_LOST)
                total += len(data)
                self._cut(data, found)
                if len(data) < READ_BYTES or client.socket() is None:
                    break
        except PacketError as error:
            self._broken(str(error))
            return client._loop_rc_handle(MQTTErrorCode.MQTT_ERR_PROTOCOL)
        with client._msgtime_mutex:
            client._last_bytes_received = time.monotonic()
        self._hand_over(found)
        return MQTTErrorCode.MQTT_ERR_SUCCESS

    def _hand_over(self, found: list[Publish | Ack]) -> None:
        if found:
            self._received(found)

    def _cut(self, data: bytes, found: list[Publish | Ack]) -> None:
        is_v5 = self._is_v5
        for first, body, missing in self._cutter.feed(data):
            kind = first & 0xF0
            if kind == packets.PUBLISH:
                found.append(packets.decode_publish(first, body, is_v5=is_v5, missing=missing))
            elif kind in _OURS:
                found.append(packets.decode_ack(first, body))
            else:
                self._leave_to_paho(first, body)

    def _leave_to_paho(self, first: int, body: bytes) -> None:
        client = self._client
        client._in_packet = {
            "command": first,
            "have_remaining": 1,
            "remaining_count": [],
            "remaining_mult": 1,
            "remaining_length": len(body),
            "packet": bytearray(body),
            "to_process": 0,
            "pos": 0,
        }
        try:
            result = client._packet_handle()
        except MalformedPacket as error:
            raise PacketError(f"a packet of the kind 0x{first & 0xF0:02x} cannot be read: {error}") from None
        if result > 0:
            raise PacketError(f"a packet of the kind 0x{first & 0xF0:02x} was refused: {result.name}")
