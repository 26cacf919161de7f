"""From RocketMQ to MQTT: publishes the messages of the consumers, and acknowledges them to RocketMQ when the MQTT
broker has acknowledged them.

Each rule has its own consumer. All rules share one window of messages without acknowledgement (`PublishWindow`). It
belongs to the session at the MQTT broker: after a lost connection its messages are sent again, in their order and with
the same packet ids. If the MQTT broker has lost the session, they are sent as new messages.

QoS 2 is exactly once: before a PUBLISH is sent, the journal has its packet id and the message's position in RocketMQ,
and before a PUBREL is sent, the journal has the PUBREC. A message that RocketMQ delivers again after a kill continues
from there. One that was completed is skipped until the group's offset has passed it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Set
from dataclasses import dataclass
from typing import Any, Final

from duemq._values.intervals import Intervals
from duemq._values.times import Clock
from duemq.consumer import Consumer
from duemq.errors import BodyError, DueMQError
from duemq.messages import MessageQueue, ReceivedMessage
from duemq.mqtt_bridge import delayed, translation
from duemq.mqtt_bridge.rules.model import MqttConnection, Outbound, TemplateError
from duemq.mqtt_bridge.session import packets
from duemq.mqtt_bridge.session.client import Session
from duemq.mqtt_bridge.session.journal import Journal, MessagePosition, Published, State, fingerprint_of
from duemq.mqtt_bridge.session.packet_ids import PacketIds
from duemq.mqtt_bridge.session.packets import Ack, PacketError, clear_dup, encode_ack, encode_publish, set_dup
from duemq.mqtt_bridge.status import Status

BATCH: Final = 100
"""Maximum number of messages that are taken from a consumer in one call."""
LOST_CONNECTIONS: Final = 3
"""Number of connections in a row that are lost without an acknowledgement before messages are sent one at a time; and
number of connections that a single message loses before it is refused."""
CLOSES_CONNECTION: Final = 0x100
"""Used as a reason code: the MQTT broker closed the connection each time it got the message."""
GIVE_UP: Final = -1
"""Level of a retry that sends the message to the dead-letter topic."""

log = logging.getLogger("duemq.mqtt_bridge")


@dataclass(slots=True, eq=False)
class Flight:
    """A message with QoS 1 or 2 in flight to MQTT."""

    packet_id: int
    packet: bytearray
    message: ReceivedMessage
    qos: int
    position: MessagePosition
    is_released: bool = False
    """Whether its PUBREC has arrived. From then on only PUBREL is sent again."""
    is_sent: bool = False
    """Whether it was sent over the present connection."""
    is_noted: bool = False
    """Whether the journal has it on the disk. With QoS 2 it is not sent before that."""
    was_over_quota: bool = False
    """Whether the MQTT broker has refused it once because the broker's quota was exceeded."""
    reason: int = packets.SUCCESS
    """Reason code of the last acknowledgement."""


class PublishWindow:
    """The messages in flight to MQTT: at most `most`. At most one less than the MQTT broker allows are sent and
    unacknowledged: Mosquitto counts messages with QoS 2 of an earlier connection, and closes a connection that sends
    one of them again while the count is at its maximum.

    Some MQTT brokers close the connection on a message that they do not accept, since MQTT 3.1.1 has no other way to
    refuse one. Such a message must not hold up all others. Therefore, after some connections without an
    acknowledgement, messages are sent one at a time, and the one that loses further connections is refused.

    An MQTT broker that goes back to an earlier state of its session, for instance after a kill, may again have messages
    with QoS 2 that were completed long ago. It counts them, and refuses new ones because of them, until they get a
    PUBREL.

    A message with QoS 2 of an earlier process may never be sent again: its rule no longer exists, or its offset was
    skipped. The MQTT broker may have it, and then also counts it until it gets a PUBREL. `comes_again` says whether
    RocketMQ may deliver the message at a position again.

    `finished` is called with messages that the MQTT broker has accepted or refused, in the order of its
    acknowledgements.
    """

    def __init__(
        self,
        *,
        most: int,
        journal: Journal,
        ids: PacketIds,
        comes_again: Callable[[MessagePosition], bool],
        finished: Callable[[list[Flight]], None],
    ) -> None:
        self._most = most
        self._journal = journal
        self._ids = ids
        self._finished = finished
        self._flights: dict[int, Flight] = {}
        """By packet id, in the order in which they were first to be sent."""
        self._unsent: deque[Flight] = deque()
        self._on_way = 0
        self._missing = {each.packet_id for each in journal.published.values() if each.state is not State.DONE}
        """Packet ids of an earlier process whose messages RocketMQ has not delivered again yet. The MQTT broker counts
        them."""
        self._abandoned = {
            each.packet_id: position
            for position, each in journal.published.items()
            if each.state is State.PUBLISHED and not comes_again(position)
        }
        """Those of the missing messages, by packet id, that are never sent again."""
        self._session: Session | None = None
        self._lost_in_a_row = 0
        """Number of connections in a row that were lost without progress while messages were in flight."""
        self._one_at_a_time = 0
        """Number of messages that are still to be sent one at a time."""
        self._may_send = False
        """Whether messages may be sent over the present connection. When they are sent one at a time, the subscriptions
        must be complete first, so that only a message can be the reason for the loss of the connection."""
        self._has_released_unknown = False
        """Whether a PUBREL was sent over the present connection for each packet id that no message has."""
        self._may_be_full = False
        """Whether, since the last connection began, the MQTT broker has refused messages because of its quota, or
        closed the connection without accepting any: packets that it sends just before it closes one may never
        arrive."""
        self._has_taken = False
        """Whether the MQTT broker has accepted a message of the present connection, or refused one for another reason
        than its quota."""
        self._released: list[int] = []
        self._has_work = asyncio.Event()
        self._is_closing = False
        self._is_empty = asyncio.Event()
        self._is_empty.set()
        self._has_room = asyncio.Event()

    @property
    def session(self) -> Session | None:
        """The present connection, or None."""
        return self._session

    # --- the connection

    async def connected(self, session: Session) -> None:
        """Continue over a new connection with the messages in flight. Raises JournalError."""
        journal, flights = self._journal, self._flights
        if session.is_present:
            # PUBRECs of the last connection may not be on the disk yet.
            journal.set_published(
                (each.position, Published(each.packet_id, State.RELEASED))
                for each in flights.values()
                if each.is_released
            )
        else:
            self._begin_anew()
        await journal.saved()
        self._session = session
        self._may_send = not self._one_at_a_time
        self._on_way = 0
        # Brokers do not report a quota to clients of MQTT 3.1.1.
        self._has_released_unknown = session.is_present and (self._may_be_full or not session.is_v5)
        self._may_be_full = self._has_taken = False
        if self._has_released_unknown:
            self._release_unknown(session)
        unreleased = [each for each in flights.values() if not each.is_released]
        # The MQTT broker may already have some of them: these are sent first.
        self._unsent = deque(sorted(unreleased, key=lambda each: not (each.is_noted or each.is_sent)))
        for flight in self._unsent:
            if flight.is_sent:
                set_dup(flight.packet)
            flight.is_sent = False
        released = [each.packet_id for each in flights.values() if each.is_released]
        released += self._abandoned
        # Also those of messages that RocketMQ has not delivered again yet.
        released += [
            each.packet_id
            for each in journal.published.values()
            if each.state is State.RELEASED and each.packet_id not in flights and each.packet_id not in self._abandoned
        ]
        for packet_id in released:
            session.send(encode_ack(packets.PUBREL, packet_id))
        self._send_unsent()
        self._update_room()

    def subscribed(self) -> None:
        """Continue when the MQTT broker has acknowledged the subscriptions, too."""
        self._may_send = True
        self._send_unsent()

    def _begin_anew(self) -> None:
        """Prepare for an MQTT broker that has lost the session: messages without acknowledgement are sent as new ones,
        and may arrive twice."""
        journal, flights = self._journal, self._flights
        lost = {position: each for position, each in journal.published.items() if each.state is not State.DONE}
        journal.forget_published(lost)
        for published in lost.values():
            if published.packet_id not in flights:
                self._ids.give_back(published.packet_id)
        self._missing.clear()
        self._abandoned.clear()
        for flight in flights.values():
            flight.is_released = flight.is_sent = False
            clear_dup(flight.packet)
        journal.set_published(
            (each.position, Published(each.packet_id, State.PUBLISHED)) for each in flights.values() if each.is_noted
        )

    def _release_unknown(self, session: Session) -> None:
        """Send a PUBREL for each packet id that no message has: the MQTT broker publishes its messages with these ids,
        and forgets them."""
        known = {each.packet_id for each in self._journal.published.values()} | self._flights.keys()
        unknown = (each for each in range(1, packets.MAX_PACKET_IDS + 1) if each not in known)
        session.send(b"".join(encode_ack(packets.PUBREL, each) for each in unknown))

    def disconnected(self) -> bool:
        """Take no messages until there is a connection again. Return whether the MQTT broker accepted messages over the
        last connection."""
        has_taken = self._session is not None and self._has_taken
        if self._session is not None:
            if self._on_way and not self._has_taken:
                self._may_be_full = True
            self._look_for_culprit()
        self._session = None
        self._released.clear()
        self._update_room()
        return has_taken

    def _look_for_culprit(self) -> None:
        """After a lost connection, decide whether messages are sent one at a time, or a single one is refused."""
        sent = [each for each in self._flights.values() if each.is_sent and not each.is_released]
        if self._has_taken or not sent:
            self._lost_in_a_row = 0
            return
        self._lost_in_a_row += 1
        if self._lost_in_a_row < LOST_CONNECTIONS:
            return
        self._lost_in_a_row = 0
        if len(sent) > 1:
            self._one_at_a_time = len(self._flights)
            log.warning(
                "%d connections to the MQTT broker were lost without an acknowledgement; sending messages one at a "
                "time",
                LOST_CONNECTIONS,
            )
            return
        [culprit] = sent
        culprit.reason = CLOSES_CONNECTION
        self._remove(culprit)
        self._end([culprit])

    def _remove(self, flight: Flight) -> None:
        del self._flights[flight.packet_id]
        self._on_way -= flight.is_sent
        self._one_at_a_time = max(0, self._one_at_a_time - 1)
        self._ids.give_back(flight.packet_id)

    # --- messages

    async def room(self) -> int:
        """Wait for a connection and for room; return the number of messages that there is room for."""
        while (free := self._free()) <= 0:
            await self._has_room.wait()
        return free

    def _free(self) -> int:
        session = self._session
        if session is None or self._is_closing:
            return 0
        # Missing messages must be read, even if other messages come before them.
        most = self._most if self._missing else min(self._most, self._limit(session))
        return most - len(self._flights)

    def _limit(self, session: Session) -> int:
        """Return the maximum number of messages in flight, without the missing ones."""
        return 1 if self._one_at_a_time else max(1, session.limits.receive_maximum - 1 - len(self._missing))

    def _update_room(self) -> None:
        if self._free() > 0:
            self._has_room.set()
        else:
            self._has_room.clear()
        if self._flights:
            self._is_empty.clear()
        else:
            self._is_empty.set()

    async def drain(self) -> None:
        """Take no more messages, and wait until none is in flight."""
        self._is_closing = True
        self._update_room()
        await self._is_empty.wait()

    def send(self, flights: Iterable[Flight]) -> None:
        """Send messages that have their packet ids. They are sent later if there is no connection, if the MQTT broker
        does not allow more now, and, with QoS 2, until the journal has them on the disk."""
        done: list[Flight] = []
        for flight in flights:
            known = self._journal.published.get(flight.position) if flight.qos == 2 else None
            if known is not None and known.state is State.DONE:
                done.append(flight)  # it was completed after its consumer had delivered it
                continue
            present = self._flights.get(flight.packet_id)
            if present is not None and present.position == flight.position:
                # It is in flight, and RocketMQ has delivered it again: acknowledge the new delivery, not the first.
                present.message = flight.message
                continue
            flight.is_released = flight.is_released or (known is not None and known.state is State.RELEASED)
            self._flights[flight.packet_id] = flight
            self._missing.discard(flight.packet_id)
            self._abandoned.pop(flight.packet_id, None)
            if flight.is_released:
                if self._session is not None:
                    self._session.send(encode_ack(packets.PUBREL, flight.packet_id))
            elif flight.is_noted and self._session is not None and self._may_send:
                # The MQTT broker may already have it. It was counted among the missing messages, so it needs no room.
                self._send(flight, self._session)
            else:
                self._unsent.append(flight)
        if done:
            self._finished(done)
        self._send_unsent()
        self._update_room()

    def _send_unsent(self) -> None:
        session = self._session
        if session is None or not self._may_send:
            return
        unsent, most = self._unsent, self._limit(session)
        while unsent and self._on_way < most:
            flight = unsent[0]
            if flight.qos == 2 and not flight.is_noted:
                self._has_work.set()
                return
            self._send(unsent.popleft(), session)

    def _send(self, flight: Flight, session: Session) -> None:
        flight.is_sent = True
        self._on_way += 1
        session.send(flight.packet)

    def received(self, acks: Iterable[Ack]) -> None:
        """Take PUBACKs, PUBRECs and PUBCOMPs, in the order of their arrival."""
        finished: list[Flight] = []
        over_quota: list[Flight] = []
        without_message: set[int] = set()
        for ack in acks:
            flight = self._flights.get(ack.packet_id)
            if ack.reason == packets.QUOTA_EXCEEDED:
                self._quota_exceeded()
            if ack.reason == packets.QUOTA_EXCEEDED and flight is not None and not flight.was_over_quota:
                over_quota.append(flight)
            elif ack.kind == packets.PUBREC and not ack.is_error:
                self._has_taken = True
                if flight is not None:
                    flight.is_released = True
                self._released.append(ack.packet_id)
                self._has_work.set()
            elif flight is None:
                if ack.kind == packets.PUBCOMP:
                    without_message.add(ack.packet_id)
            elif _ends(ack, flight):
                # A PUBCOMP with an error means that the MQTT broker does not know the id: it was already completed.
                flight.reason = ack.reason if ack.kind != packets.PUBCOMP else packets.SUCCESS
                self._remove(flight)
                finished.append(flight)
                self._has_taken = True
        if without_message:
            self._finish(without_message)
        if over_quota:
            self._send_again(over_quota)
        if finished:
            self._end(finished)
            self._send_unsent()
        self._update_room()

    def _end(self, finished: list[Flight]) -> None:
        """Note in the journal that messages are completed or refused, and pass them on."""
        noted = [flight for flight in finished if flight.qos == 2]
        self._journal.set_published(
            (flight.position, Published(0, State.DONE)) for flight in noted if flight.reason < packets.FIRST_ERROR
        )
        # A refused message is sent back to RocketMQ. If the bridge ends before that, RocketMQ delivers it again.
        self._journal.forget_published(flight.position for flight in noted if flight.reason >= packets.FIRST_ERROR)
        self._finished(finished)

    def _quota_exceeded(self) -> None:
        """Handle a refusal because of the messages that the broker already has, some of which may be unknown here."""
        self._may_be_full = True
        session = self._session
        if session is not None and not self._has_released_unknown:
            self._has_released_unknown = True
            self._release_unknown(session)

    def _send_again(self, over_quota: list[Flight]) -> None:
        """Send messages once more that the broker refused because its quota was exceeded."""
        for flight in over_quota:
            flight.was_over_quota = True
            self._on_way -= flight.is_sent
            flight.is_sent = False
            clear_dup(flight.packet)
        self._unsent.extendleft(reversed(over_quota))
        self._send_unsent()

    @property
    def missing(self) -> Set[int]:
        """Packet ids of messages that the MQTT broker may have and that RocketMQ has not delivered again."""
        return self._missing

    def abandon(self, positions: Iterable[MessagePosition]) -> None:
        """Send a PUBREL for messages that will not be sent again, if the MQTT broker may have them."""
        for position in positions:
            known = self._journal.find(position)
            if known is not None and known.state is State.PUBLISHED and known.packet_id not in self._flights:
                self._abandoned[known.packet_id] = position
                if self._session is not None:
                    self._session.send(encode_ack(packets.PUBREL, known.packet_id))

    def _finish(self, packet_ids: set[int]) -> None:
        """Complete messages that RocketMQ has not delivered again yet, by the packet ids of their PUBCOMPs."""
        done = [
            (position, published)
            for position, published in self._journal.published.items()
            if published.packet_id in packet_ids and published.state is State.RELEASED
        ]
        for _, published in done:
            self._ids.give_back(published.packet_id)
            self._missing.discard(published.packet_id)
        self._journal.set_published((position, Published(0, State.DONE)) for position, _ in done)
        over = {each: position for each in packet_ids if (position := self._abandoned.pop(each, None)) is not None}
        # Nobody knows whether the MQTT broker had them: if RocketMQ delivers one after all, it is sent as a new one.
        without_row = {each for each, position in over.items() if self._is_published(position)}
        self._journal.forget_published(over[each] for each in without_row)
        for packet_id in without_row:
            self._ids.give_back(packet_id)
            self._missing.discard(packet_id)

    def _is_published(self, position: MessagePosition) -> bool:
        known = self._journal.published.get(position)
        return known is not None and known.state is State.PUBLISHED

    async def run(self) -> None:
        """Until cancelled, send packets that have to be in the journal first: messages with QoS 2, and a PUBREL for
        each PUBREC. Raises JournalError."""
        while True:
            await self._has_work.wait()
            self._has_work.clear()
            session, released = self._session, self._released
            self._released = []
            positions = self._positions_of(released)
            self._journal.set_published(
                (position, Published(each, State.RELEASED)) for each, position in positions.items()
            )
            room = self._limit(session) - self._on_way if session is not None else 0
            new = [each for each in itertools.islice(self._unsent, max(0, room)) if each.qos == 2 and not each.is_noted]
            self._journal.set_published((each.position, Published(each.packet_id, State.PUBLISHED)) for each in new)
            await self._journal.saved()
            for flight in new:
                flight.is_noted = True
            if session is not None:
                for packet_id in released:
                    session.send(encode_ack(packets.PUBREL, packet_id))
            self._send_unsent()

    def _positions_of(self, packet_ids: Iterable[int]) -> dict[int, MessagePosition]:
        """Return the positions of messages by packet id, also of those that RocketMQ has not delivered again yet: an
        MQTT broker may repeat a PUBREC when a connection begins."""
        flights = self._flights
        positions = {each: flights[each].position for each in packet_ids if each in flights}
        unknown = set(packet_ids) - positions.keys()
        if unknown:
            for position, published in self._journal.published.items():
                if published.packet_id in unknown and published.state is not State.DONE:
                    positions[published.packet_id] = position
        return positions


def _ends(ack: Ack, flight: Flight) -> bool:
    """Return whether an acknowledgement completes a message. A late acknowledgement, for an earlier message with the
    same packet id, does not."""
    if flight.qos == 1:
        return ack.kind == packets.PUBACK
    return ack.kind == (packets.PUBCOMP if flight.is_released else packets.PUBREC)


class ToMqtt:
    """One rule from RocketMQ to MQTT. `consumer`, which is started, receives its messages.

    `is_delayed`: whether this is the rule of delayed messages, which are published as they arrived. All others get the
    user property `MARK` with the bridge's name. `run` publishes until cancelled.
    """

    def __init__(
        self,
        rule: Outbound,
        *,
        connection: MqttConnection,
        is_delayed: bool,
        consumer: Consumer,
        window: PublishWindow,
        journal: Journal,
        ids: PacketIds,
        status: Status,
        intervals: Intervals,
        clock: Clock,
    ) -> None:
        self.rule = rule
        self._is_delayed = is_delayed
        self._bridge = connection.bridge
        self._is_v5 = connection.is_v5
        self._window = window
        self._journal = journal
        self._ids = ids
        self._status = status
        self._clock = clock
        self._intervals = intervals
        self._finished: list[Flight] = []
        self._has_finished = asyncio.Event()
        self._consumer = consumer
        self._publishing: asyncio.Task[None] | None = None
        self._is_closing = False
        self._is_receiving = False
        """Whether `_publishing` is waiting for messages, and has none in hand."""

    def close(self) -> None:
        """Take no more messages. Messages that were already taken are published."""
        self._is_closing = True
        if self._is_receiving and self._publishing is not None:
            self._publishing.cancel()

    def finished(self, flights: Iterable[Flight]) -> None:
        """Accept messages of this rule that the MQTT broker has accepted or refused, for `settle`."""
        self._finished += flights
        self._has_finished.set()

    async def run(self) -> None:
        """Publish until cancelled. Raises JournalError."""
        async with asyncio.TaskGroup() as tasks:
            self._publishing = tasks.create_task(self._publish_forever(), name=f"duemq to MQTT {self.rule.topic}")
            tasks.create_task(self._settle_forever(), name=f"duemq settle {self.rule.topic}")
            tasks.create_task(self._forget_forever(), name=f"duemq forget {self.rule.topic}")

    # --- publishing

    async def _publish_forever(self) -> None:
        while True:
            room = await self._window.room()
            if self._is_closing:
                return
            self._is_receiving = True
            messages = await self._consumer.receive_many(min(room, BATCH))
            self._is_receiving = False
            await self._publish(messages)

    async def _publish(self, messages: Iterable[ReceivedMessage]) -> None:
        now = self._clock()
        flights: list[Flight] = []
        at_most_once: list[ReceivedMessage] = []
        out = bytearray()
        for message in messages:
            try:
                found = self._prepare(message, now)
            except (TemplateError, BodyError, PacketError, UnicodeEncodeError) as error:
                self._status.refuse(f"{message.queue} offset {message.queue_offset}", str(error))
                await message.retry(GIVE_UP)
                self._window.abandon([self._position_of(message)])
                continue
            if found is None:
                await message.ack()
                self._window.abandon([self._position_of(message)])
            elif isinstance(found, Flight):
                flights.append(found)
            else:
                out += found
                at_most_once.append(message)
        self._window.send(flights)
        if at_most_once:
            await self._send_once(out, at_most_once)

    async def _send_once(self, out: bytearray, messages: Iterable[ReceivedMessage]) -> None:
        """Send messages with QoS 0, and acknowledge them to RocketMQ when the operating system has accepted them."""
        await self._window.room()
        session = self._window.session
        if session is not None:
            session.send(out)
            await session.drained()
        for message in messages:
            if session is None or session.is_lost:
                self._status.counters.dropped += 1
            else:
                self._count(message)
            await message.ack()

    def _prepare(self, message: ReceivedMessage, now_ms: int) -> Flight | bytearray | None:
        """Return a flight for a message with QoS 1 or 2, a packet for one with QoS 0, or None if it is not to be
        published. Raises TemplateError, BodyError, PacketError, UnicodeEncodeError."""
        fields = message.properties
        counters = self._status.counters
        topic = self.rule.mqtt_topic(message)
        if not self._is_delayed and (
            fields.get(translation.BRIDGE) == self._bridge and translation.mqtt_topic(fields) == topic
        ):
            counters.own += 1
            return None
        qos = self._qos(message)
        position = self._position_of(message)
        known = self._journal.find(position) if qos == 2 else None
        if qos == 2 and self._is_over(position, known, now_ms):
            counters.repeated += 1
            return None
        expires = translation.expires_at_ms(fields)
        if known is None and expires is not None and expires <= now_ms:
            counters.expired += 1
            return None
        packet_id = 0
        if known is not None:
            packet_id = known.packet_id
        elif qos:
            packet_id = self._ids.take()
        try:
            packet = self._encode(message, topic, qos, packet_id, now_ms)
        except BaseException:
            self._ids.give_back(packet_id)
            raise
        if not qos:
            return packet
        flight = Flight(packet_id, packet, message, qos, position, is_noted=known is not None)
        if known is not None:
            counters.repeated += 1
            set_dup(packet)
            flight.is_released = known.state is State.RELEASED
        return flight

    def _position_of(self, message: ReceivedMessage) -> MessagePosition:
        fingerprint = fingerprint_of(message.message_id, message.store_time_ms)
        return MessagePosition(self.rule.group, message.queue, message.queue_offset, fingerprint)

    def _is_over(self, position: MessagePosition, known: Published | None, now_ms: int) -> bool:
        """Return whether a message with QoS 2 was published before."""
        return known.state is State.DONE if known is not None else self._journal.is_passed(position, now_ms)

    def _encode(self, message: ReceivedMessage, topic: str, qos: int, packet_id: int, now_ms: int) -> bytearray:
        fields = message.properties
        properties = None
        if self._is_v5:
            properties = translation.to_mqtt(fields, now_ms)
            if not self._is_delayed:
                properties.user += ((translation.MARK, self._bridge),)
        retain = fields.get(translation.RETAIN) == "true" if self._is_delayed else self.rule.retain
        session = self._window.session
        if session is not None and not session.limits.retain:
            retain = False
        payload = translation.to_payload(message.body, fields)
        packet = encode_publish(topic, payload, qos=qos, retain=retain, packet_id=packet_id, properties=properties)
        if session is not None and len(packet) > session.limits.packet_bytes:
            raise PacketError(
                f"the packet has {len(packet)} bytes; the MQTT broker accepts {session.limits.packet_bytes}"
            )
        return packet

    def _qos(self, message: ReceivedMessage) -> int:
        qos = delayed.qos_of(message, self.rule.qos) if self._is_delayed else self.rule.qos
        session = self._window.session
        return qos if session is None else min(qos, session.limits.maximum_qos)

    # --- completed messages

    async def _settle_forever(self) -> None:
        while True:
            await self._has_finished.wait()
            await self.settle()

    def _count(self, message: ReceivedMessage) -> None:
        """Count a message that was published."""
        self._status.counters.published += 1
        if not self._is_delayed:
            return
        due_ms = translation.due_at_ms(message.properties)
        if due_ms is None:
            due_ms = message.due_time_ms
        if due_ms is not None:
            self._status.counters.count_due(self._clock() - due_ms)

    async def settle(self) -> None:
        """Acknowledge to RocketMQ the messages that the MQTT broker has accepted, and send back those that it refused.
        If this is cancelled, the message that is being sent back is finished first, and the others are left for the
        next call. The offset in RocketMQ stays before each unfinished message, and another bridge would publish all
        messages after it again."""
        self._has_finished.clear()
        finished, self._finished = self._finished, []
        refused = deque[Flight]()
        for flight in finished:
            if flight.reason < packets.FIRST_ERROR:
                self._count(flight.message)
                await flight.message.ack()
            else:
                refused.append(flight)
        try:
            while refused:
                await _to_its_end(self._send_back(refused.popleft()))
        finally:
            self._finished = [*refused, *self._finished]

    async def _send_back(self, flight: Flight) -> None:
        """Send a message back that the MQTT broker refused."""
        where = f"{flight.message.queue} offset {flight.message.queue_offset}"
        if flight.reason != CLOSES_CONNECTION:
            self._status.refuse(where, f"the MQTT broker refused the message: reason code 0x{flight.reason:02x}")
            await flight.message.retry()
            return
        self._status.refuse(where, "the MQTT broker refused the message: it closed the connection each time")
        # It is retried once, since the network may have been at fault. Not more often: all other messages have to wait.
        await flight.message.retry(GIVE_UP if flight.message.reconsume_times else 0)

    async def is_behind(self, end_offset: Callable[[MessageQueue], Awaitable[int]]) -> bool:
        """Return whether RocketMQ has messages for this rule that MQTT does not have yet. `end_offset` returns the end
        offset of a queue. Raises the errors of `end_offset`."""
        for queue, offset in (await self._consumer.commit()).items():
            if await end_offset(queue) > offset:
                return True
        return False

    async def _forget_forever(self) -> None:
        """Store the group's offsets often, so that the journal has few completed messages with QoS 2."""
        while True:
            await asyncio.sleep(self._intervals.first_pause * 10)
            missing = self._window.missing
            if any(
                position.group == self.rule.group and (published.state is State.DONE or published.packet_id in missing)
                for position, published in self._journal.published.items()
            ):
                try:
                    offsets = await self._consumer.commit()
                except DueMQError as error:
                    log.debug("cannot store offsets: %s", error)
                    continue
                skipped = self._journal.forget_before(self.rule.group, offsets, self._clock())
                self._window.abandon(skipped)
                await self._journal.saved()


async def _to_its_end(work: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine to its end, even if the caller is cancelled in the meantime."""
    task = asyncio.create_task(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait((task,))
        raise
