"""Batches of messages from MQTT that are being sent to RocketMQ."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from itertools import islice

from duemq.mqtt_bridge.inbound.arrivals import Arrival, Due, can_supersede
from duemq.mqtt_bridge.rules.model import Delay, Target
from duemq.mqtt_bridge.session import packets
from duemq.mqtt_bridge.session.journal import Taken
from duemq.mqtt_bridge.session.packets import Publish


@dataclass(slots=True, eq=False)
class Transfer:
    """A message that is being sent to RocketMQ."""

    publish: Publish
    arrival: Arrival
    order: int
    """Its place among all packets in the order of their first receipt."""
    target: Target | None = None
    delay: Delay | None = None
    taken: Taken | None = None
    """Its row in the journal; None without QoS 2."""
    is_new: bool = True
    """Whether it was never sent before. Otherwise RocketMQ may have it."""
    is_done: bool = False
    """Whether RocketMQ has it, or it need not be sent, or no longer."""
    is_superseded: bool = False
    """Whether it is in `supersedes` of another message."""
    supersedes: tuple[Transfer, ...] = ()
    """Messages that are not sent unless this one is refused."""
    reason: int = packets.SUCCESS
    """Reason code of the acknowledgement."""

    @property
    def at(self) -> float:
        """Time of the receipt, by the monotonic clock, in seconds."""
        return self.arrival.at

    @property
    def is_lost(self) -> bool:
        """`is_lost` of the arrival."""
        return self.arrival.is_lost

    @property
    def is_recall(self) -> bool:
        """Whether it cancels other messages, and is not sent itself."""
        return self.delay is not None and self.delay.recall


class Batch:
    """Messages that are sent, and acknowledged when all are done. More may be added in the meantime.

    `settled`: recalls and replacements of earlier batches that arrived after messages that the MQTT broker may send
    again.
    """

    def __init__(self, settled: Iterable[Transfer] = ()) -> None:
        self.transfers: list[Transfer] = []
        """The messages in the order of their arrival; one that was sent again over a new connection appears twice."""
        self.to_send: deque[Transfer] = deque()
        """The messages whose sending has not begun yet. Those that arrived together are in the order of their first
        receipt."""
        self._begun_with: int | None = None
        """Number of messages with which the batch began."""
        self._recalls: dict[str, list[Transfer]] = {}
        self._later: dict[str, list[Transfer]] = {}
        """By key, in the order of their first receipt: in `_recalls` the recalls, in `_later` the recalls and the
        replacements."""
        for transfer in settled:
            self._keep(transfer)

    def add(self, arrivals: Sequence[Arrival]) -> list[Transfer]:
        """Move the messages of arrivals into the batch; return them."""
        begin = len(self.transfers)
        self.transfers += [Transfer(each, arrival, order) for arrival in arrivals for order, each in arrival.messages()]
        for arrival in arrivals:
            arrival.items, arrival.keyed = (), None
        if self._begun_with is None:
            self._begun_with = len(self.transfers)
        return self.transfers[begin:]

    @property
    def grown(self) -> int:
        """Number of messages that were added since the batch began and were not dropped."""
        return max(0, len(self.transfers) - (self._begun_with or 0))

    def will_send(self, transfers: Iterable[Transfer]) -> None:
        """Add messages to those that are to be sent, after all others."""
        transfers = sorted(transfers, key=_order)
        self.to_send += transfers
        for transfer in transfers:
            self._keep(transfer)

    def _keep(self, transfer: Transfer) -> None:
        delay = transfer.delay
        if delay is None or delay.key is None or not (delay.recall or delay.replace):
            return
        if delay.recall:
            insort(self._recalls.setdefault(delay.key, []), transfer, key=_order)
        insort(self._later.setdefault(delay.key, []), transfer, key=_order)

    def superseder(self, transfer: Transfer, due: float) -> Transfer | None:
        """Return the message that supersedes `transfer`, or None. It may already be done. `due`: the deliver time of
        `transfer`, by the monotonic clock, in seconds."""
        assert transfer.delay is not None
        assert transfer.delay.key is not None
        candidates = (self._later if transfer.delay.replace else self._recalls).get(transfer.delay.key, ())
        for each in islice(candidates, bisect_right(candidates, transfer.order, key=_order), None):
            if each.at >= due:
                return None
            if each.reason == packets.SUCCESS and can_supersede(each.delay, transfer.delay):
                return each
        return None

    def settled(self, first: int | None, most: int) -> list[Transfer]:
        """Return the recalls and replacements with QoS 0, of this batch and of earlier ones, that were received after
        the place `first`; none if that is None. They have no payloads, and only the last `most` are returned. The MQTT
        broker never sends them again, but it may send the messages again that they cancel or replace. All messages of
        the batch must be done."""
        if first is None:
            return []
        new = [
            replace(transfer, publish=replace(transfer.publish, payload=b""), supersedes=())
            for same_key in self._later.values()
            for transfer in same_key
            if transfer.publish.qos == 0 and transfer.order > first and transfer.reason == packets.SUCCESS
        ]
        return sorted(new, key=_order)[-most:]

    def begun(self, due: Due) -> Iterator[tuple[Delay, float]]:
        """Yield the messages with a key that are neither done nor superseded, and their deliver times."""
        for transfer in self.transfers:
            if (
                not transfer.is_done
                and not transfer.is_superseded
                and transfer.delay is not None
                and transfer.delay.key is not None
            ):
                yield transfer.delay, due(transfer.at, transfer.delay)

    def drop_superseded(self, due: Due) -> list[Transfer]:
        """Drop the messages with QoS 0 that another message supersedes, although that one may still be refused; return
        them."""
        for transfer in self.to_send:
            # Also for messages with QoS 1 and 2, since the message that supersedes one may be dropped itself.
            if transfer.delay is not None and transfer.delay.key is not None and not transfer.is_recall:
                superseder = self.superseder(transfer, due(transfer.at, transfer.delay))
                if superseder is not None and not superseder.is_done:
                    superseder.supersedes += (transfer,)
                    transfer.is_superseded = True
        dropped = [
            transfer
            for transfer in self.transfers
            if transfer.is_superseded and not transfer.is_done and transfer.publish.qos == 0
        ]
        if not dropped:
            return []
        for transfer in dropped:
            transfer.is_done = True
        gone = set(dropped)
        for transfer in self.transfers:
            if transfer.supersedes and transfer not in gone:
                transfer.supersedes = tuple(_without(transfer.supersedes, gone))
        self.transfers = [transfer for transfer in self.transfers if transfer not in gone]
        self.to_send = deque(transfer for transfer in self.to_send if transfer not in gone)
        for table in (self._recalls, self._later):
            for key in {transfer.delay.key for transfer in dropped if transfer.delay is not None}:
                if key in table:
                    table[key] = [transfer for transfer in table[key] if transfer not in gone]
        return dropped


def _without(transfers: Iterable[Transfer], gone: Set[Transfer]) -> Iterator[Transfer]:
    """Yield transfers, and in place of those in `gone`, the ones that they supersede."""
    left = [*transfers]
    while left:
        transfer = left.pop()
        if transfer in gone:
            left += transfer.supersedes
        else:
            yield transfer


def _order(transfer: Transfer) -> int:
    return transfer.order
