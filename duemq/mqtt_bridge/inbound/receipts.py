"""The times of the first receipt of messages from MQTT that the MQTT broker may send again.

An MQTT broker sends an unacknowledged message again over each new connection of the session. Its delay and its expiry
nevertheless count from the first receipt. Therefore the times of unacknowledged messages are kept here over lost
connections and changes of the rules, until the process ends.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

from duemq.mqtt_bridge.session.packets import Publish

MARKED_BYTES: Final = 4096
"""Number of bytes of a payload by which a message is recognized, besides its packet id, its size and so on."""


@dataclass(frozen=True, slots=True)
class Receipt:
    """The first receipt of a message."""

    mark: bytes
    """Digest of the message."""
    at: float
    """Time by the monotonic clock, in seconds."""
    order: int
    """The place of the message among all packets in the order of their receipt."""
    expiry: int | None
    """The message expiry at the first receipt, in seconds."""

    def restored(self, again: Publish) -> Publish:
        """Return a message that was sent again, with its first expiry, which counts from `at`. The MQTT broker
        subtracts from the expiry the time that a message has waited there."""
        if again.properties.expiry == self.expiry:
            return again
        return replace(again, properties=replace(again.properties, expiry=self.expiry))


class Receipts:
    """The first receipts of unacknowledged messages in one session at the MQTT broker; and the numbers of all packets
    in the order of their receipt, which are never reused."""

    def __init__(self) -> None:
        self._next_order = 0
        self._by_id: dict[int, Receipt] = {}
        """Receipts by packet id; the one that was noted last is at the end."""

    def __len__(self) -> int:
        return len(self._by_id)

    def number(self, count: int) -> int:
        """Take the next `count` places in the order of the receipt, for new packets, and return the first of them."""
        first = self._next_order
        self._next_order += count
        return first

    def first_order(self) -> int | None:
        """Return the lowest place of a receipt in the order of the receipt of all packets; None if there is none."""
        return min((each.order for each in self._by_id.values()), default=None)

    def note(self, messages: Iterable[tuple[Publish, float, int]], most: int) -> None:
        """Keep messages with QoS 1 and 2, each with the time of its first receipt by the monotonic clock, in seconds,
        and its place in the order of the receipt. Of all receipts, the `most` that were noted last are kept."""
        by_id = self._by_id
        for publish, at, order in messages:
            by_id.pop(publish.packet_id, None)
            by_id[publish.packet_id] = Receipt(_mark(publish), at, order, publish.properties.expiry)
        while len(by_id) > most:
            del by_id[next(iter(by_id))]

    def take(self, publish: Publish) -> Receipt | None:
        """Remove and return the first receipt of a message with QoS 1 or 2 that has arrived; None if it is new. A
        receipt of another message with its packet id is removed too, since that message is no longer sent again."""
        found = self._by_id.pop(publish.packet_id, None)
        return found if found is not None and publish.dup and found.mark == _mark(publish) else None

    def clear(self) -> None:
        """Forget all receipts, since the session is a new one."""
        self._by_id.clear()


def _mark(publish: Publish) -> bytes:
    properties = publish.properties
    mark = hashlib.blake2b(publish.payload[:MARKED_BYTES], digest_size=16)
    fields = (
        publish.topic,
        len(publish.payload),
        publish.qos,
        publish.retain,
        properties.user,
        properties.correlation_data,
    )
    mark.update(repr(fields).encode(errors="surrogatepass"))
    return mark.digest()
