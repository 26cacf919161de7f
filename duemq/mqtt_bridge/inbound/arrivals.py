"""Packets from MQTT that wait in the bridge, and which of these messages supersede others.

A message with a key is superseded by a later recall with this key, and by a later replacement if it was itself sent
with `replace`, provided that the later one was received before the message was due. While RocketMQ is away, both wait
in the bridge. The earlier message is then not sent: it may be overdue when RocketMQ comes back, and would be delivered
before the later one could cancel or replace it.

Which message is later is decided by the order of the first receipts. The MQTT broker sends messages with QoS 1 and 2
again over a new connection, where they then follow messages with QoS 0 that were received after them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple

from duemq.mqtt_bridge.rules.model import Delay
from duemq.mqtt_bridge.session.client import Session
from duemq.mqtt_bridge.session.packets import Ack, Publish


class Keyed(NamedTuple):
    """A message with a key, before it is in a batch."""

    order: int
    """Its place among all packets in the order of their receipt."""
    qos: int
    delay: Delay


Due = Callable[[float, Delay], float]
"""A function from the time of receipt of a delayed message and its delay to its deliver time. Both times are by the
monotonic clock, in seconds."""


@dataclass(slots=True, eq=False)
class Arrival:
    """The packets of one read of the socket."""

    items: Sequence[Publish | Ack]
    at: float
    """Time of the read, by the monotonic clock, in seconds; for a message that was sent again, of the first read."""
    session: Session | None
    """The connection over which they arrived; None if they need no acknowledgements."""
    order: int = 0
    """Place of the first of `items` among all packets in the order of their receipt; the others follow one by one. For
    a message that was sent again, the place of its first receipt."""
    is_lost: bool = False
    """Whether the MQTT broker has lost the session in which they arrived, or never sends them again for another reason.
    They must not be acknowledged: it would take that for the acknowledgement of another message."""
    keyed: list[Keyed] | None = None
    """The messages of `items` that have a key; None until `Decisions.read_keyed` determines them."""

    def messages(self) -> Iterator[tuple[int, Publish]]:
        """Yield the messages, each with its place in the order of the receipt."""
        for order, each in enumerate(self.items, self.order):
            if isinstance(each, Publish):
                yield order, each

    def without(self, orders: Set[int]) -> Iterator[Arrival]:
        """Yield arrivals with the packets that are not at these places. `keyed` must be known."""
        begin = 0
        for number in range(len(self.items) + 1):
            if number == len(self.items) or self.order + number in orders:
                if begin < number:
                    first, end = self.order + begin, self.order + number
                    keyed = [each for each in self.keyed or () if first <= each.order < end]
                    yield Arrival(self.items[begin:number], self.at, self.session, first, self.is_lost, keyed)
                begin = number + 1

    def only(self, order: int, publish: Publish) -> Arrival:
        """Return one of the messages as an arrival of its own."""
        return Arrival([publish], self.at, self.session, order, self.is_lost)


def comes_again(publish: Publish, arrival: Arrival) -> bool:
    """Return whether the MQTT broker sends a message again over the next connection, if it keeps the session."""
    return publish.qos > 0 and not arrival.is_lost


def can_supersede(later: Delay | None, earlier: Delay | None) -> bool:
    """Return whether a message cancels or replaces an earlier one that is not due."""
    return (
        later is not None
        and earlier is not None
        and later.key is not None
        and later.key == earlier.key
        and not earlier.recall
        and (later.recall or (later.replace and earlier.replace))
    )


def superseded(arrivals: Iterable[Arrival], begun: Iterable[tuple[Delay, float]], due: Due) -> set[int]:
    """Return the places of messages with QoS 0 among arrivals that other messages supersede. The arrivals' `keyed` must
    be known.

    A message that itself supersedes an earlier message stays if the others arrived after that earlier message was due.
    `begun`: the earlier messages of a batch, with their deliver times. All times are by the monotonic clock, in
    seconds.
    """
    in_order = [(each, arrival.at) for arrival in arrivals for each in arrival.keyed or ()]
    in_order.sort(key=lambda found: found[0].order)
    recalls: dict[str | None, list[tuple[int, float]]] = {}
    later: dict[str | None, list[tuple[int, float]]] = {}
    dues: dict[str | None, list[float]] = {}
    for each, at in in_order:
        if each.delay.recall:
            recalls.setdefault(each.delay.key, []).append((each.order, at))
        if each.delay.recall or each.delay.replace:
            later.setdefault(each.delay.key, []).append((each.order, at))
    for delay, due_at in begun:
        if delay.replace:
            dues.setdefault(delay.key, []).append(due_at)
    gone: set[int] = set()
    for (order, qos, delay), at in in_order:
        if delay.recall:
            continue
        due_at, others = due(at, delay), (later if delay.replace else recalls).get(delay.key, ())
        place = bisect_right(others, order, key=itemgetter(0))
        then = others[place][1] if place < len(others) else due_at
        earlier = dues.setdefault(delay.key, [])
        is_needed = delay.replace and any(at < each <= then for each in earlier)
        if qos == 0 and then < due_at and not is_needed:
            gone.add(order)
        elif delay.replace:
            earlier.append(due_at)
    return gone
