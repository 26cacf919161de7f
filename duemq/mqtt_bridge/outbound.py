"""From RocketMQ to MQTT: publishes what the consumers receive, many messages a write, and acknowledges to RocketMQ what
the MQTT broker has acknowledged.

A rule has a consumer of its own, and all share one window of messages without acknowledgement (`Window`), which belongs
to the session at the broker: after a lost connection its messages are sent again, in their order, with the same packet
ids. Where the broker has no session any more they are sent anew.

QoS 2 is exactly once: before a message is sent the journal has its packet id and its place in RocketMQ, and so it has a
PUBREC before the PUBREL. A message that RocketMQ gives again after a kill goes on from there, and one that was done is
passed over until the group's offset has passed it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from duemq._values.intervals import Intervals
from duemq._values.times import Clock
from duemq.consumer import PushConsumer
from duemq.errors import BodyError, DueMQError
from duemq.messages import ReceivedMessage
from duemq.mqtt_bridge import delayed, translation
from duemq.mqtt_bridge.rules.model import Outbound, TemplateError
from duemq.mqtt_bridge.session import packets
from duemq.mqtt_bridge.session.client import Session
from duemq.mqtt_bridge.session.journal import Journal, Place, Published, State
from duemq.mqtt_bridge.session.packet_ids import PacketIds
from duemq.mqtt_bridge.session.packets import Ack, PacketError, clear_dup, encode_ack, encode_publish, set_dup
from duemq.mqtt_bridge.status import Status

BATCH: Final = 100
"""Messages that are taken from a consumer at once."""
GIVE_UP: Final = -1
"""Level of a retry: to the dead-letter topic."""

log = logging.getLogger("duemq.mqtt_bridge")


@dataclass(slots=True, eq=False)
class Flight:
    """A message with QoS 1 or 2 on its way to MQTT."""

    packet_id: int
    packet: bytearray
    message: ReceivedMessage
    qos: int
    place: Place
    is_released: bool = False
    """Whether PUBREC came, so that only PUBREL is sent again."""
    is_sent: bool = False
    """Whether it was sent over the present connection."""
    is_noted: bool = False
    """Whether the journal has it on the disk; with QoS 2 it is sent only then."""
    was_over_quota: bool = False
    """Whether the broker has refused it once because it had too many messages."""
    reason: int = packets.SUCCESS


class Window:
    """The messages on their way to MQTT: at most `most`, of which as many are sent as the broker allows, less one.

    Mosquitto counts messages with QoS 2 that it has from an earlier connection, and ends a connection that sends one of
    them again while there are as many as it allows: so the last one is never used.

    A broker that goes back to an earlier state of its session, after a kill for instance, may have messages with QoS 2
    there that were finished long ago. It counts them, and refuses new ones for them, until they get a PUBREL.

    `finished` is told of messages that the broker has or refuses, in the order in which it said so.
    """

    def __init__(
        self, *, most: int, journal: Journal, ids: PacketIds, finished: Callable[[list[Flight]], None]
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
        """Packet ids of an earlier process whose messages RocketMQ has not given again yet; the broker counts them."""
        self._session: Session | None = None
        self._has_released_unknown = False
        """Whether the present connection has had a PUBREL for each packet id that no message has."""
        self._may_be_full = False
        """Whether the broker has refused messages for its quota, or ended the connection without taking any, since the
        last connection began: what it said just before it ends one may never arrive."""
        self._has_taken = False
        """Whether the broker has taken a message of the present connection."""
        self._released: list[int] = []
        self._has_work = asyncio.Event()
        self._is_closing = False
        self._is_empty = asyncio.Event()
        self._is_empty.set()
        self._has_room = asyncio.Event()

    @property
    def session(self) -> Session | None:
        """The present connection."""
        return self._session

    # --- the connection

    async def connected(self, session: Session) -> None:
        """A connection begins: go on with what is on its way. Raises JournalError."""
        journal, flights = self._journal, self._flights
        if session.is_present:
            # What the last connection brought may not be on the disk yet.
            journal.set_published(
                (each.place, Published(each.packet_id, State.RELEASED)) for each in flights.values() if each.is_released
            )
        else:
            self._begin_anew()
        await journal.saved()
        self._session = session
        self._on_way = 0
        # Brokers tell clients of MQTT 3.1.1 nothing of a quota.
        self._has_released_unknown = session.is_present and (self._may_be_full or not session.is_v5)
        self._may_be_full = self._has_taken = False
        if self._has_released_unknown:
            self._release_unknown(session)
        unreleased = [each for each in flights.values() if not each.is_released]
        # First those that the broker may have.
        self._unsent = deque(sorted(unreleased, key=lambda each: not (each.is_noted or each.is_sent)))
        for flight in self._unsent:
            if flight.is_sent:
                set_dup(flight.packet)
            flight.is_sent = False
        released = [each.packet_id for each in flights.values() if each.is_released]
        # Those whose messages RocketMQ has not given again yet.
        released += [
            each.packet_id
            for each in journal.published.values()
            if each.state is State.RELEASED and each.packet_id not in flights
        ]
        for packet_id in released:
            session.send(encode_ack(packets.PUBREL, packet_id))
        self._send_unsent()
        self._update_room()

    def _begin_anew(self) -> None:
        """The broker has no session: what it has not acknowledged is sent as new, and may come twice."""
        journal, flights = self._journal, self._flights
        lost = {place: each for place, each in journal.published.items() if each.state is not State.DONE}
        journal.forget_published(lost)
        for published in lost.values():
            if published.packet_id not in flights:
                self._ids.give_back(published.packet_id)
        self._missing.clear()
        for flight in flights.values():
            flight.is_released = flight.is_sent = False
            clear_dup(flight.packet)
        journal.set_published(
            (each.place, Published(each.packet_id, State.PUBLISHED)) for each in flights.values() if each.is_noted
        )

    def _release_unknown(self, session: Session) -> None:
        """Send a PUBREL for each packet id that no message has, which has the broker publish what it has with that id
        and forget it."""
        known = {each.packet_id for each in self._journal.published.values()} | self._flights.keys()
        unknown = (each for each in range(1, packets.MAX_PACKET_IDS + 1) if each not in known)
        session.send(b"".join(encode_ack(packets.PUBREL, each) for each in unknown))

    def disconnected(self) -> None:
        """The connection is gone: nothing more is taken."""
        if self._session is not None and self._on_way and not self._has_taken:
            self._may_be_full = True
        self._session = None
        self._released.clear()
        self._update_room()

    # --- messages

    async def room(self) -> int:
        """Wait for a connection and for room, and give for how many messages there is."""
        while (free := self._free()) <= 0:
            await self._has_room.wait()
        return free

    def _free(self) -> int:
        session = self._session
        if session is None or self._is_closing:
            return 0
        # What is missing has to be read, whatever comes before it.
        most = self._most if self._missing else min(self._most, self._limit(session))
        return most - len(self._flights)

    def _limit(self, session: Session) -> int:
        """How many may be on their way without those that are missing."""
        return max(1, session.limits.receive_maximum - 1 - len(self._missing))

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
        """Take nothing more, and wait until nothing is on its way."""
        self._is_closing = True
        self._update_room()
        await self._is_empty.wait()

    def send(self, flights: Iterable[Flight]) -> None:
        """Send messages, whose packet ids are theirs. What the broker does not allow yet, what the journal has to have
        before, and all without a connection, goes out later."""
        done: list[Flight] = []
        for flight in flights:
            known = self._journal.published.get(flight.place) if flight.qos == 2 else None
            if known is not None and known.state is State.DONE:
                done.append(flight)  # while it was on its way to here
                continue
            flight.is_released = flight.is_released or (known is not None and known.state is State.RELEASED)
            self._flights[flight.packet_id] = flight
            self._missing.discard(flight.packet_id)
            if flight.is_released:
                if self._session is not None:
                    self._session.send(encode_ack(packets.PUBREL, flight.packet_id))
            elif flight.is_noted and self._session is not None:
                # The broker may have it, and was counted with it: it takes nobody's place.
                self._send(flight, self._session)
            else:
                self._unsent.append(flight)
        if done:
            self._finished(done)
        self._send_unsent()
        self._update_room()

    def _send_unsent(self) -> None:
        session = self._session
        if session is None:
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
        """PUBACK, PUBREC and PUBCOMP, as they came."""
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
                # A PUBCOMP with an error says that the broker does not know the id any more: it was done before.
                flight.reason = ack.reason if ack.kind != packets.PUBCOMP else packets.SUCCESS
                del self._flights[ack.packet_id]
                self._on_way -= flight.is_sent
                self._ids.give_back(flight.packet_id)
                finished.append(flight)
                self._has_taken = True
        if without_message:
            self._finish(without_message)
        if over_quota:
            self._send_again(over_quota)
        if finished:
            noted = [flight for flight in finished if flight.qos == 2]
            self._journal.set_published(
                (flight.place, Published(0, State.DONE)) for flight in noted if flight.reason < packets.FIRST_ERROR
            )
            # One that is refused goes back to RocketMQ; until it has, it may be given again.
            self._journal.forget_published(flight.place for flight in noted if flight.reason >= packets.FIRST_ERROR)
            self._finished(finished)
            self._send_unsent()
        self._update_room()

    def _quota_exceeded(self) -> None:
        """The broker refuses a message for those it has already, some of which may be unknown here."""
        self._may_be_full = True
        session = self._session
        if session is not None and not self._has_released_unknown:
            self._has_released_unknown = True
            self._release_unknown(session)

    def _send_again(self, over_quota: list[Flight]) -> None:
        """Send messages once more that were refused by a broker whose quota was exceeded."""
        for flight in over_quota:
            flight.was_over_quota = True
            self._on_way -= flight.is_sent
            flight.is_sent = False
            clear_dup(flight.packet)
        self._unsent.extendleft(reversed(over_quota))
        self._send_unsent()

    def _finish(self, packet_ids: set[int]) -> None:
        """PUBCOMPs of messages that RocketMQ has not given again yet."""
        done = [
            (place, published)
            for place, published in self._journal.published.items()
            if published.packet_id in packet_ids and published.state is State.RELEASED
        ]
        for _, published in done:
            self._ids.give_back(published.packet_id)
            self._missing.discard(published.packet_id)
        self._journal.set_published((place, Published(0, State.DONE)) for place, _ in done)

    async def run(self) -> None:
        """Send what the journal has to have before, once that is so: messages with QoS 2, and PUBREL for each PUBREC.
        Until cancelled. Raises JournalError."""
        while True:
            await self._has_work.wait()
            self._has_work.clear()
            session, released = self._session, self._released
            self._released = []
            places = self._places(released)
            self._journal.set_published((place, Published(each, State.RELEASED)) for each, place in places.items())
            room = self._limit(session) - self._on_way if session is not None else 0
            new = [each for each in itertools.islice(self._unsent, max(0, room)) if each.qos == 2 and not each.is_noted]
            self._journal.set_published((each.place, Published(each.packet_id, State.PUBLISHED)) for each in new)
            await self._journal.saved()
            for flight in new:
                flight.is_noted = True
            if session is not None:
                for packet_id in released:
                    session.send(encode_ack(packets.PUBREL, packet_id))
            self._send_unsent()

    def _places(self, packet_ids: Iterable[int]) -> dict[int, Place]:
        """The messages with these packet ids, also those that RocketMQ has not given again yet: a broker may send a
        PUBREC again when a connection begins."""
        flights = self._flights
        places = {each: flights[each].place for each in packet_ids if each in flights}
        unknown = set(packet_ids) - places.keys()
        if unknown:
            for place, published in self._journal.published.items():
                if published.packet_id in unknown and published.state is not State.DONE:
                    places[published.packet_id] = place
        return places


def _ends(ack: Ack, flight: Flight) -> bool:
    """Whether it ends this message's way. One that comes late, for an earlier message with the id, does not."""
    if flight.qos == 1:
        return ack.kind == packets.PUBACK
    return ack.kind == (packets.PUBCOMP if flight.is_released else packets.PUBREC)


class ToMqtt:
    """One rule from RocketMQ to MQTT. `consumer` receives its messages; it is started.

    `is_delayed`: the rule of the messages that were delayed: they go out as they came. `bridge`: the mark of what goes
    out otherwise. `run` does the work until cancelled.
    """

    def __init__(
        self,
        rule: Outbound,
        *,
        is_delayed: bool,
        bridge: str,
        consumer: PushConsumer,
        is_v5: bool,
        window: Window,
        journal: Journal,
        ids: PacketIds,
        status: Status,
        intervals: Intervals,
        clock: Clock,
    ) -> None:
        self.rule = rule
        self._is_delayed = is_delayed
        self._bridge = bridge
        self._is_v5 = is_v5
        self._window = window
        self._journal = journal
        self._ids = ids
        self._status = status
        self._clock = clock
        self._intervals = intervals
        self._finished: list[Flight] = []
        self._has_finished = asyncio.Event()
        self._consumer = consumer

    def finished(self, flights: Iterable[Flight]) -> None:
        """The MQTT broker has these messages of this rule, or refuses them."""
        self._finished += flights
        self._has_finished.set()

    async def run(self) -> None:
        """Publish until cancelled. Raises JournalError."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._publish_forever(), name=f"duemq to MQTT {self.rule.topic}")
            tasks.create_task(self._settle_forever(), name=f"duemq settle {self.rule.topic}")
            tasks.create_task(self._forget_forever(), name=f"duemq forget {self.rule.topic}")

    # --- publishing

    async def _publish_forever(self) -> None:
        while True:
            room = await self._window.room()
            await self._publish(await self._consumer.receive_many(min(room, BATCH)))

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
                continue
            if found is None:
                await message.ack()
            elif isinstance(found, Flight):
                flights.append(found)
            else:
                out += found
                at_most_once.append(message)
        self._window.send(flights)
        if at_most_once:
            await self._send_once(out, at_most_once)

    async def _send_once(self, out: bytearray, messages: Iterable[ReceivedMessage]) -> None:
        """QoS 0: what the operating system has taken is gone."""
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
        """What is to be sent for a message; None for nothing. Raises TemplateError, BodyError, PacketError."""
        fields = message.properties
        counters = self._status.counters
        topic = self.rule.mqtt_topic(message)
        if not self._is_delayed and (
            fields.get(translation.BRIDGE) == self._bridge and translation.mqtt_topic(fields) == topic
        ):
            counters.own += 1
            return None
        qos = self._qos(message)
        place = Place(self.rule.group, message.queue, message.queue_offset)
        known = self._journal.published.get(place) if qos == 2 else None
        if qos == 2 and self._is_over(place, known, now_ms):
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
        flight = Flight(packet_id, packet, message, qos, place, is_noted=known is not None)
        if known is not None:
            counters.repeated += 1
            set_dup(packet)
            flight.is_released = known.state is State.RELEASED
        return flight

    def _is_over(self, place: Place, known: Published | None, now_ms: int) -> bool:
        """Whether a message with QoS 2 was published before."""
        return known.state is State.DONE if known is not None else self._journal.is_passed(place, now_ms)

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
            raise PacketError(f"a packet of {len(packet)} bytes; the MQTT broker takes {session.limits.packet_bytes}")
        return packet

    def _qos(self, message: ReceivedMessage) -> int:
        qos = delayed.qos_of(message, self.rule.qos) if self._is_delayed else self.rule.qos
        session = self._window.session
        return qos if session is None else min(qos, session.limits.maximum_qos)

    # --- what is over

    async def _settle_forever(self) -> None:
        while True:
            await self._has_finished.wait()
            await self.settle()

    def _count(self, message: ReceivedMessage) -> None:
        """Count a message that was published."""
        self._status.counters.published += 1
        if self._is_delayed and message.due_time_ms is not None:
            self._status.counters.count_due(self._clock() - message.due_time_ms)

    async def settle(self) -> None:
        """Tell RocketMQ what the MQTT broker has said so far."""
        self._has_finished.clear()
        finished, self._finished = self._finished, []
        for flight in finished:
            if flight.reason < packets.FIRST_ERROR:
                self._count(flight.message)
                await flight.message.ack()
                continue
            where = f"{flight.message.queue} offset {flight.message.queue_offset}"
            self._status.refuse(where, f"the MQTT broker refuses it: reason 0x{flight.reason:02x}")
            await flight.message.retry()

    async def _forget_forever(self) -> None:
        """Store offsets often enough that few messages with QoS 2 have to be remembered as done."""
        while True:
            await asyncio.sleep(self._intervals.first_pause * 10)
            if any(
                place.group == self.rule.group and published.state is State.DONE
                for place, published in self._journal.published.items()
            ):
                try:
                    offsets = await self._consumer.commit()
                except DueMQError as error:
                    log.debug("no offsets were stored: %s", error)
                    continue
                for packet_id in self._journal.forget_before(self.rule.group, offsets, self._clock()):
                    self._ids.give_back(packet_id)
                await self._journal.saved()
