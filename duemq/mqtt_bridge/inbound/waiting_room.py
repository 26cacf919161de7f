"""The messages that wait in the bridge between MQTT and RocketMQ, over connections and sessions at the MQTT broker.

While RocketMQ is away, no message is acknowledged, so the MQTT broker keeps the messages and sends them again over each
new connection; those that wait here are then dropped. Only if it loses the session does the bridge alone have the
messages that wait here, and it sends them. Messages with QoS 0 stay, in their place in the order of the first receipts.

The messages here, and those that a batch takes over in the meantime, are limited in number and in bytes. Beyond the
limits, messages with QoS 0 are dropped, superseded ones first, but the newest value of a key is kept. For messages with
QoS 1 and 2, reading of the connection pauses.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter, itemgetter

from duemq.mqtt_bridge.inbound.arrivals import Arrival, comes_again, superseded
from duemq.mqtt_bridge.inbound.batch import Batch, Transfer
from duemq.mqtt_bridge.inbound.decisions import Decisions
from duemq.mqtt_bridge.inbound.newest import NewestValues
from duemq.mqtt_bridge.inbound.receipts import Receipts
from duemq.mqtt_bridge.rules.model import MqttConnection
from duemq.mqtt_bridge.session.client import Session
from duemq.mqtt_bridge.session.journal import Journal
from duemq.mqtt_bridge.session.packets import Ack, Publish
from duemq.mqtt_bridge.status import Counters


class WaitingRoom:
    """The packets that wait, and the batch that is being sent.

    `waiting`: messages that earlier rules have left; `receipts`: those of the session at the MQTT broker, including
    those under earlier rules. `monotonic` is in seconds.
    """

    def __init__(
        self,
        connection: MqttConnection,
        *,
        receipts: Receipts,
        waiting: Sequence[Arrival],
        journal: Journal,
        decisions: Decisions,
        counters: Counters,
        monotonic: Callable[[], float],
    ) -> None:
        self._receipts = receipts
        self._journal = journal
        self._decisions = decisions
        self._counters = counters
        self._monotonic = monotonic
        self._bound = 2 * connection.receive_maximum
        self._bound_bytes = connection.receive_maximum_bytes
        self.session: Session | None = None
        self.session_number = 0
        """Number of sessions that the MQTT broker has begun, after each loss of the one before."""
        self.waiting = list(waiting)
        self.earlier: list[Arrival] = []
        """Messages with QoS 1 and 2 of lost connections, until it is known whether the MQTT broker sends them again;
        and after them, messages with QoS 0 and a key, which must not overtake them."""
        self._newest = NewestValues(max(1, self._bound // 4), self._bound_bytes // 4)
        """Values that are newer than the messages in `waiting`. There was no room for them, so they wait for the end of
        the batch."""
        self.batch = Batch()
        """The batch that is being sent, until it is acknowledged."""
        self._waiting_count = 0
        self._waiting_bytes = 0
        """Number of the packets, and size of the messages, that wait here, including the earlier ones."""
        self._next_look = 0
        """Number of dropped messages at which the next search for superseded messages is made, if there is no room."""
        self._batch_bytes = 0
        """Size of the messages that are being sent to RocketMQ."""
        self.arrived = asyncio.Event()
        """Set when packets wait."""
        if self.waiting:
            self.arrived.set()
        self.is_accepted = asyncio.Event()
        """Whether the MQTT broker has accepted the present connection, or the bridge ends."""
        self.has_forgotten = asyncio.Event()
        """Whether the journal has forgotten rows that are still on the disk."""
        self._is_paused = False

    def connected(self, session: Session) -> None:
        """Begin with a new connection, which the MQTT broker has not accepted yet."""
        self.session = session
        self.is_accepted.clear()
        self._is_paused = False
        self.waiting += self._newest.pop_oldest()
        self._note_all()
        found = {
            order: (each, arrival) for arrival in (*self.earlier, *self.waiting) for order, each in arrival.messages()
        }
        first = min((order for order, each in found.items() if comes_again(*each)), default=None)
        self.earlier, self.waiting = [], []
        for order, (publish, arrival) in sorted(found.items(), key=itemgetter(0)):
            has_to_wait = comes_again(publish, arrival) or (
                first is not None and order > first and self._decisions.has_key(publish)
            )
            (self.earlier if has_to_wait else self.waiting).append(arrival.only(order, publish))
        self._count_waiting()

    def accepted(self, *, is_present: bool) -> None:
        """Continue when the MQTT broker has accepted the connection. `is_present`: whether it still has the session.
        If so, it sends all messages again that are not acknowledged, so those that wait here are dropped."""
        earlier, self.earlier = self.earlier, []
        if is_present:
            earlier = [each for each in earlier if not any(publish.qos for _, publish in each.messages())]
        else:
            self.session_number += 1
            self._receipts.clear()
            for arrival in (*earlier, *(transfer.arrival for transfer in self.batch.transfers)):
                arrival.is_lost = True
        # There may be messages of sessions that were lost before, and newer ones of this connection.
        self.waiting = sorted((*earlier, *self.waiting), key=attrgetter("order"))
        if self.waiting:
            self.arrived.set()
        self.is_accepted.set()
        self._count_waiting()
        self._read_on()

    def received(self, items: Sequence[Publish | Ack]) -> None:
        """Take messages and PUBRELs, in the order of their arrival."""
        if self.held + len(items) <= self._bound:
            self._take(items)
            return
        # The last ones of a large read may supersede the first.
        step = max(1, self._bound // 4)
        for begin in range(0, len(items), step):
            part = items[begin : begin + step]
            if self.held + len(part) > self._bound:
                self._drop_superseded_ones()
            self._take(part)

    def _take(self, items: Iterable[Publish | Ack]) -> None:
        held, held_bytes, most = self.held, self._waiting_bytes, self._bound_bytes - self._batch_bytes
        count, size = held, held_bytes
        known = self._journal.received
        kept: list[Publish | Ack] = []
        renewed: list[int] = []
        for each in items:
            if isinstance(each, Publish):
                if each.qos == 0 and (count >= self._bound or size >= most):
                    if self._keep_newest(each, kept):
                        kept = []
                    continue
                size += each.size
                if each.qos == 2 and not each.dup and each.packet_id in known and known[each.packet_id].is_released:
                    renewed.append(each.packet_id)
            kept.append(each)
            count += 1
        if renewed:
            # If the message is sent again before it has its own row, it must not be mistaken for the old one.
            self._journal.forget_received(renewed)
            self.has_forgotten.set()
        self._add(kept)
        self._waiting_count += count - held
        self._waiting_bytes += size - held_bytes
        if not self._is_paused and not self._has_room() and self.session is not None:
            self._is_paused = True
            self.session.pause()

    def _keep_newest(self, publish: Publish, before: list[Publish | Ack]) -> bool:
        """Keep a message with QoS 0 for which there is no room if it is the newest value of a key; otherwise drop and
        count it. `before`: the packets before it, which are added if it is kept. Return whether it is kept."""
        delay = self._decisions.delay(publish)
        key = delay.key if delay is not None and delay.replace else None
        if key is None or not self._newest.has_room(key, publish):
            self._counters.dropped += 1
            return False
        self._add(before)
        arrival = Arrival([publish], self._monotonic(), self.session, self._receipts.number(1))
        if self._newest.keep(key, arrival):
            self._counters.superseded += 1
            self._counters.received += 1
        return True

    def _add(self, items: list[Publish | Ack]) -> None:
        """Add packets, which the caller counts, to those that wait, and before them the newest values with the same
        keys."""
        if not items:
            return
        if self._newest:
            for each in items:
                delay = self._decisions.delay(each) if isinstance(each, Publish) else None
                if delay is not None and delay.key is not None and delay.key in self._newest:
                    newest = self._newest.pop(delay.key)
                    self.waiting.append(newest)
                    self._waiting_count += 1
                    self._waiting_bytes += sum(publish.size for _, publish in newest.messages())
        self.waiting += self._arrivals(items)
        self.arrived.set()

    def _arrivals(self, items: list[Publish | Ack]) -> list[Arrival]:
        now, session, number = self._monotonic(), self.session, self._receipts.number
        if not self._receipts:
            return [Arrival(items, now, session, number(len(items)))]
        found: list[Arrival] = []
        new: list[Publish | Ack] = []
        for each in items:
            receipt = self._receipts.take(each) if isinstance(each, Publish) and each.qos else None
            if receipt is None:
                new.append(each)
                continue
            assert isinstance(each, Publish)
            if new:
                found.append(Arrival(new, now, session, number(len(new))))
                new = []
            found.append(Arrival([receipt.restored(each)], receipt.at, session, receipt.order))
        if new:
            found.append(Arrival(new, now, session, number(len(new))))
        return found

    def _note_all(self) -> None:
        """Note the receipts of messages that the MQTT broker will send again, since they are not acknowledged."""
        self._note((transfer.publish, transfer.arrival, transfer.order) for transfer in self.batch.transfers)
        self._note((each, arrival, order) for arrival in self.waiting for order, each in arrival.messages())

    def _note(self, messages: Iterable[tuple[Publish, Arrival, int]]) -> None:
        self._receipts.note(
            ((each, arrival.at, order) for each, arrival, order in messages if comes_again(each, arrival)),
            most=4 * self._bound,
        )

    def _first_order(self) -> int | None:
        """Return the first place, in the order of the receipt, of the messages that wait or may come again; None if
        there are none."""
        waiting = min((arrival.order for arrival in (*self.earlier, *self.waiting)), default=None)
        others = self._newest.first_order(), self._receipts.first_order()
        return min((each for each in (waiting, *others) if each is not None), default=None)

    def _count_waiting(self) -> None:
        items = [each for arrival in (*self.earlier, *self.waiting) for each in arrival.items]
        self._waiting_count = len(items)
        self._waiting_bytes = sum(each.size for each in items if isinstance(each, Publish))

    @property
    def held(self) -> int:
        """Number of the packets that wait, or were added to a batch that had already begun."""
        return self._waiting_count + self.batch.grown

    def _drop_superseded_ones(self) -> None:
        """Drop messages with QoS 0 that are superseded by others, since only the newest state of a value is wanted. If
        there were few, the next search is made only after more messages were dropped."""
        if self._counters.dropped < self._next_look:
            return
        dropped = self.batch.drop_superseded(self._decisions.due)
        self._batch_bytes -= sum(transfer.publish.size for transfer in dropped)
        for arrival in self.waiting:
            self._decisions.read_keyed(arrival)
        gone = superseded(self.waiting, self.batch.begun(self._decisions.due), self._decisions.due)
        if gone:
            self.waiting = [each for arrival in self.waiting for each in arrival.without(gone)]
            self._count_waiting()
        count = len(gone) + len(dropped)
        self._counters.superseded += count
        self._counters.received += len(gone)
        if count < self._bound // 10:
            self._next_look = self._counters.dropped + self._bound // 10

    def _has_room(self) -> bool:
        """Whether more may be read. The number of messages is a limit with MQTT 3.1.1 only, which has no receive
        maximum: its brokers send everything that they have."""
        return self.held < 2 * self._bound and self._waiting_bytes + self._batch_bytes < self._bound_bytes

    def _read_on(self) -> None:
        """Resume reading after a pause if there is room again."""
        if self._is_paused and self._has_room() and self.session is not None:
            self._is_paused = False
            self.session.resume()

    def take(self) -> tuple[list[Transfer], list[int]]:
        """Move all waiting messages to the batch. Return them, and the packet ids of the PUBRELs that waited."""
        arrivals, self.waiting = self.waiting, []
        released = [each.packet_id for arrival in arrivals for each in arrival.items if isinstance(each, Ack)]
        transfers = self.batch.add(arrivals)
        self._batch_bytes += sum(each.publish.size for each in transfers)
        self._count_waiting()
        self._read_on()
        return transfers, released

    def begin_batch(self) -> None:
        """Begin a new batch: all messages of the present one are done, and their acknowledgements were sent."""
        session = self.session
        if session is not None and session.is_lost:
            # The acknowledgements did not arrive.
            self._note(
                (transfer.publish, transfer.arrival, transfer.order)
                for transfer in self.batch.transfers
                if transfer.arrival.session is session
            )
        self.batch = Batch(self.batch.settled(self._first_order(), self._bound))

    def make_room(self) -> None:
        """After a batch, resume reading, and add the newest values for which there is room now to `waiting`."""
        self._batch_bytes = self._next_look = 0
        newest = self._newest.pop_oldest(max(0, self._bound - self.held))
        if newest:
            self.waiting = sorted((*self.waiting, *newest), key=attrgetter("order"))
            self._count_waiting()
            self.arrived.set()
        self._read_on()

    def left(self) -> list[Arrival]:
        """When `run` has ended and the session has been left, note the receipts of unacknowledged messages. Return the
        messages that were not sent, since the MQTT broker may lose their session."""
        self.waiting += self._newest.pop_oldest()
        self._note_all()
        in_hand = [each.arrival.only(each.order, each.publish) for each in self.batch.transfers if not each.is_done]
        waiting = [
            arrival.only(order, each)
            for arrival in (*self.earlier, *self.waiting)
            for order, each in arrival.messages()
        ]
        for arrival in (*in_hand, *waiting):
            arrival.session = None
        return sorted(in_hand + waiting, key=attrgetter("order"))
