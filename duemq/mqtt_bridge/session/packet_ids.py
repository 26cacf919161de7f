"""The packet ids of the bridge's messages and of the packets that paho sends."""

from __future__ import annotations

from collections.abc import Iterable

from duemq.errors import DueMQError
from duemq.mqtt_bridge.session.packets import MAX_PACKET_IDS


class NoPacketIdError(DueMQError):
    """All packet ids are in use."""


class PacketIds:
    """Packet ids from 1 to 65535, each used once at a time. They are taken in turn, so that none is reused soon."""

    def __init__(self, in_use: Iterable[int] = ()) -> None:
        self._in_use = set(in_use)
        self._last = max(self._in_use, default=0)

    def take(self) -> int:
        """Return an id, which is in use until `give_back`. Raises NoPacketIdError."""
        number = self.lend()
        self._in_use.add(number)
        return number

    def lend(self) -> int:
        """Return an id for a packet whose answer comes soon; it is not given back. Raises NoPacketIdError."""
        if len(self._in_use) >= MAX_PACKET_IDS:
            raise NoPacketIdError("all 65535 packet ids are in use")
        while True:
            self._last = self._last % MAX_PACKET_IDS + 1
            if self._last not in self._in_use:
                return self._last

    def give_back(self, number: int) -> None:
        """Free an id."""
        self._in_use.discard(number)
