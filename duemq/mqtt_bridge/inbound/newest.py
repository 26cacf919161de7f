"""The newest values for which there was no room: for each key, the last replacement with QoS 0.

If a value is replaced again and again, the newest one must arrive even when the limit of waiting messages is reached,
perhaps because of other messages.
"""

from __future__ import annotations

from duemq.mqtt_bridge.inbound.arrivals import Arrival
from duemq.mqtt_bridge.session.packets import Publish


class NewestValues:
    """Arrivals of one message each, by key, with their own limits: `most` arrivals with `most_bytes` in total."""

    def __init__(self, most: int, most_bytes: int) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._by_key: dict[str, Arrival] = {}
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._by_key)

    def __contains__(self, key: str | None) -> bool:
        return key in self._by_key

    def has_room(self, key: str, publish: Publish) -> bool:
        """Return whether a value can be kept, in place of an earlier one or in addition to the others."""
        size = self._bytes + publish.size - _size(self._by_key.get(key))
        return (key in self._by_key or len(self._by_key) < self._most) and size <= self._most_bytes

    def keep(self, key: str, arrival: Arrival) -> bool:
        """Keep a value for which there is room. Return whether it replaces an earlier one."""
        earlier = self._by_key.pop(key, None)
        self._by_key[key] = arrival
        self._bytes += _size(arrival) - _size(earlier)
        return earlier is not None

    def pop(self, key: str) -> Arrival:
        """Remove and return the value of a key. Raises KeyError."""
        found = self._by_key.pop(key)
        self._bytes -= _size(found)
        return found

    def pop_oldest(self, count: int | None = None) -> list[Arrival]:
        """Remove and return the oldest `count` values, or all if `count` is None."""
        return [self.pop(key) for key in list(self._by_key)[:count]]

    def first_order(self) -> int | None:
        """Return the place of the oldest value in the order of the receipt of all packets; None if there is none."""
        return next((each.order for each in self._by_key.values()), None)


def _size(arrival: Arrival | None) -> int:
    return sum(publish.size for _, publish in arrival.messages()) if arrival is not None else 0
