"""From MQTT to RocketMQ: sends messages in batches, and acknowledges each message when RocketMQ has it.

A batch has all messages that arrived while the batch before was sent. Its plain messages go out as batches of
RocketMQ's, one for each topic, and its delayed messages as concurrent requests. Only one batch is sent at a time, since
MQTT wants acknowledgements in the order of the messages. While RocketMQ is away nothing is acknowledged, so the MQTT
broker keeps the messages. Only if it loses the session, the bridge alone has what waits here, and sends it.

Delays and expiry count from the time at which the bridge first read a message, however long it then waits here, and
also if the MQTT broker sends it again over a new connection.

QoS 2 is exactly once: before a message is sent, the journal has its unique key, its queue, and an offset of this queue
before which the message cannot lie. After a failed send, the bridge looks in the queue before it sends again. The
journal also has which delayed messages are stored and which recalls are done: a message that was cancelled or replaced
since is found nowhere, and a recall must not cancel what came after it.

A delayed message that a later one supersedes is not sent (`works`).
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from operator import attrgetter
from typing import Final, Protocol

from duemq._net.complaints import Complaints
from duemq._values.intervals import Intervals
from duemq._values.times import Clock
from duemq.errors import (
    AccessDeniedError,
    ArgumentError,
    ClosedError,
    DueMQError,
    MessageRejectedError,
    NoRouteError,
    NotSupportedError,
)
from duemq.messages import Message, MessageQueue
from duemq.mqtt_bridge import translation
from duemq.mqtt_bridge.receipts import Receipts
from duemq.mqtt_bridge.rules.delays import PROPERTIES as DELAY_PROPERTIES
from duemq.mqtt_bridge.rules.filters import Filter
from duemq.mqtt_bridge.rules.model import Delay, DelayRefused, Inbound, Rules, Target, TemplateError
from duemq.mqtt_bridge.session import packets
from duemq.mqtt_bridge.session.client import Session
from duemq.mqtt_bridge.session.journal import Journal, Taken
from duemq.mqtt_bridge.session.packets import Ack, Publish, encode_ack
from duemq.mqtt_bridge.status import Status
from duemq.mqtt_bridge.works import Arrival, Batch, Work, can_supersede
from duemq.producer import Producer

BATCH_BYTES: Final = 131_072
"""Approximate maximum size of the payloads in one batch of RocketMQ's, in bytes."""
BATCH_MESSAGES: Final = 500
"""Maximum number of messages in one batch of RocketMQ's."""
SINGLE_FROM_BYTES: Final = 4096
"""Payloads from this size on are sent alone, in bytes: the client compresses single messages only."""
KNOWN_TOPICS: Final = 10_000
"""Maximum number of MQTT topics in the cache of rules by topic."""
FLOOR_AGE: Final = 60.0
"""Age in seconds from which the known end of a queue is asked for again. The search after a failed send begins there,
so an old one makes the search long."""

OVERDUE: Final = 0.1
"""Time after which a message that waits in the bridge counts as overdue, in seconds. Otherwise what comes behind it
finds it in RocketMQ, as if there were no bridge."""
MOST_OVERDUE: Final = 10_000
"""Maximum number of overdue replacements that are remembered."""
OVERDUE_CHECKS: Final = 500
"""Maximum number of questions whether RocketMQ has delivered an overdue replacement."""

log = logging.getLogger("duemq.mqtt_bridge")

_FINAL: Final = (ArgumentError, MessageRejectedError, NotSupportedError)
"""Errors that a later attempt would get as well; all others may pass."""


class Recaller(Protocol):
    """Cancels and finds waiting messages."""

    async def cancel_key(self, topic: str, key: str) -> int:
        """Cancel the messages with a key that wait for a topic; return their number."""

    async def waits(self, topic: str, message_id: str) -> bool:
        """Return whether a message waits for a topic."""


class _LeavingError(Exception):
    """The bridge ends while RocketMQ is away."""


class FromMqtt:
    """Sends the messages of one bridge to RocketMQ.

    `bridge`: the bridge's name in the properties of messages; `receipts`: those of the session at the MQTT broker, of
    earlier rules too; `waiting`: messages that earlier rules have left. A session calls `received`; `run` sends until
    it is cancelled. `monotonic` is in seconds.
    """

    def __init__(
        self,
        rules: Rules,
        *,
        bridge: str,
        producer: Producer,
        recaller: Recaller,
        journal: Journal,
        receipts: Receipts,
        status: Status,
        waiting: Sequence[Arrival] = (),
        intervals: Intervals,
        clock: Clock,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rules = rules
        self._bridge = bridge
        self._producer = producer
        self._recaller = recaller
        self._journal = journal
        self._receipts = receipts
        self._status = status
        self._counters = status.counters
        self._intervals = intervals
        self._clock = clock
        self._monotonic = monotonic
        self._complaints = Complaints(log)
        self._is_v5 = rules.connection.protocol == "5"
        self._once = tuple(
            Filter(each.filter) for each in rules.subscriptions if each.retained == "once" or not self._is_v5
        )
        self._bound = 2 * rules.connection.receive_maximum
        self._bound_bytes = rules.connection.receive_maximum_bytes
        self._known: dict[str, tuple[Inbound, Target] | None] = {}
        self._floors: dict[MessageQueue, tuple[int, float]] = {}
        self._overdue: dict[str, str] = {}
        """Message ids by key: replacements that were sent after their time, and may not be delivered yet."""
        self._session: Session | None = None
        self._sessions = 0
        """Number of sessions that the MQTT broker has begun, after each loss of the one before."""
        self._waiting = list(waiting)
        self._earlier: list[Arrival] = []
        """Messages with QoS 1 and 2 of lost connections, until it is known whether the MQTT broker sends them again."""
        self._batch = Batch()
        """The batch that is being sent, until it is acknowledged."""
        self._waiting_count = 0
        self._waiting_bytes = 0
        """Number of the packets, and size of the messages, that wait here, including the earlier ones."""
        self._batch_bytes = 0
        """Size of the messages that are being sent to RocketMQ."""
        self._arrived = asyncio.Event()
        if self._waiting:
            self._arrived.set()
        self._is_accepted = asyncio.Event()
        """Whether the MQTT broker has accepted the present connection, or the bridge ends."""
        self._has_forgotten = asyncio.Event()
        self._closing = asyncio.Event()
        self._is_paused = False

    def connected(self, session: Session) -> None:
        """Begin with a new connection, which the MQTT broker has not accepted yet."""
        self._session = session
        self._is_accepted.clear()
        self._is_paused = False
        self._note(self._batch.arrivals)
        self._note(self._waiting)
        waiting, self._waiting = self._waiting, []
        for arrival in waiting:
            if arrival.is_lost:
                self._waiting.append(arrival)
                continue
            publishes = [each for each in arrival.items if isinstance(each, Publish)]
            for kept, items in (
                (self._waiting, [each for each in publishes if each.qos == 0]),
                (self._earlier, [each for each in publishes if each.qos]),
            ):
                if items:
                    kept.append(Arrival(items, arrival.at, arrival.session))
        self._count_waiting()

    def accepted(self, *, is_present: bool) -> None:
        """Continue when the MQTT broker has accepted the connection. `is_present`: whether it still has the session.
        If so, it sends all messages again that are not acknowledged, so those that wait here are dropped."""
        earlier, self._earlier = self._earlier, []
        if not is_present:
            self._sessions += 1
            self._receipts.clear()
            for arrival in (*earlier, *self._batch.arrivals):
                arrival.is_lost = True
            # There may be messages of sessions that were lost before, and newer ones of this connection.
            self._waiting = sorted((*earlier, *self._waiting), key=attrgetter("at"))
        if self._waiting:
            self._arrived.set()
        self._is_accepted.set()
        self._count_waiting()
        self._read_on()

    def received(self, items: Iterable[Publish | Ack]) -> None:
        """Take messages and PUBRELs, in the order of their arrival."""
        count, size, most = self._waiting_count, self._waiting_bytes, self._bound_bytes - self._batch_bytes
        known = self._journal.received
        kept: list[Publish | Ack] = []
        renewed: list[int] = []
        for each in items:
            if isinstance(each, Publish):
                if each.qos == 0 and (count >= self._bound or size >= most):
                    self._counters.dropped += 1
                    continue
                size += each.size
                if each.qos == 2 and not each.dup and each.packet_id in known and known[each.packet_id].is_released:
                    renewed.append(each.packet_id)
            kept.append(each)
            count += 1
        self._waiting_count, self._waiting_bytes = count, size
        if renewed:
            # If the message has to be sent again before it has a row of its own, it must not be taken for the old one.
            self._journal.forget_received(renewed)
            self._has_forgotten.set()
        if not self._is_paused and not self._has_room() and self._session is not None:
            self._is_paused = True
            self._session.pause()
        if kept:
            self._waiting += self._arrivals(kept)
            self._arrived.set()

    def _arrivals(self, items: list[Publish | Ack]) -> list[Arrival]:
        now, session = self._monotonic(), self._session
        if not self._receipts:
            return [Arrival(items, now, session)]
        found: list[Arrival] = []
        new: list[Publish | Ack] = []
        for each in items:
            receipt = self._receipts.take(each) if isinstance(each, Publish) and each.qos else None
            if receipt is None:
                new.append(each)
                continue
            assert isinstance(each, Publish)
            if new:
                found.append(Arrival(new, now, session))
                new = []
            found.append(Arrival([receipt.restored(each)], receipt.at, session))
        if new:
            found.append(Arrival(new, now, session))
        return found

    def _note(self, arrivals: Iterable[Arrival]) -> None:
        """Keep the times of messages that the MQTT broker sends again, since they get no acknowledgement."""
        self._receipts.note(
            (
                (each, arrival.at)
                for arrival in arrivals
                if not arrival.is_lost
                for each in arrival.items
                if isinstance(each, Publish) and each.qos
            ),
            most=4 * self._bound,
        )

    def _count_waiting(self) -> None:
        items = [each for arrival in (*self._earlier, *self._waiting) for each in arrival.items]
        self._waiting_count = len(items)
        self._waiting_bytes = sum(each.size for each in items if isinstance(each, Publish))

    def _has_room(self) -> bool:
        """Whether more may be read. The number of messages is a limit with MQTT 3.1.1 only, which has no receive
        maximum: its brokers send everything that they have."""
        return self._waiting_count < 2 * self._bound and self._waiting_bytes + self._batch_bytes < self._bound_bytes

    def _read_on(self) -> None:
        """Read on after a pause if there is room again."""
        if self._is_paused and self._has_room() and self._session is not None:
            self._is_paused = False
            self._session.resume()

    async def run(self) -> None:
        """Send messages until cancelled, or until `close` is called and the present batch is sent, or cannot be sent.
        Raises JournalError."""
        while not self._closing.is_set():
            await self._arrived.wait()
            self._arrived.clear()
            if self._waiting and self._session is not None and not self._closing.is_set():
                with suppress(_LeavingError):
                    await self._handle(self._batch)
                    session = self._session
                    if session.is_lost:
                        # The acknowledgements did not arrive.
                        self._note(each for each in self._batch.arrivals if each.session is session)
                    self._batch = Batch()
            self._batch_bytes = 0
            self._read_on()

    async def save_forever(self) -> None:
        """Until cancelled, write to the disk what the journal forgets while messages wait. Raises JournalError."""
        while True:
            await self._has_forgotten.wait()
            # A batch that begins meanwhile writes it with its own rows.
            await asyncio.sleep(self._intervals.first_pause)
            self._has_forgotten.clear()
            await self._journal.saved()

    def close(self) -> None:
        """Begin no further batch: messages that are not acknowledged stay with the MQTT broker."""
        self._closing.set()
        self._arrived.set()
        self._is_accepted.set()

    def left(self) -> list[Arrival]:
        """When `run` has ended and the session has been left, keep the times of the messages that have no
        acknowledgement. Return the messages that are not sent: the MQTT broker may have lost their session."""
        self._note(self._batch.arrivals)
        self._note(self._waiting)
        in_hand = [
            Arrival([each.publish], each.at, None, each.is_lost) for each in self._batch.works if not each.is_done
        ]
        waiting = [
            Arrival([each for each in arrival.items if isinstance(each, Publish)], arrival.at, None, arrival.is_lost)
            for arrival in (*self._earlier, *self._waiting)
        ]
        return sorted(in_hand + waiting, key=attrgetter("at"))

    # --- a batch

    async def _handle(self, batch: Batch) -> None:
        await self._take_waiting(batch)
        await self._send_in_order(batch)
        await self._note_done(batch.works)
        self._acknowledge(batch.works)

    async def _take_waiting(self, batch: Batch) -> None:
        """Add all messages that wait to a batch, and make what they need before they can be sent."""
        session, (arrivals, self._waiting) = self._session, (self._waiting, [])
        released = [each.packet_id for arrival in arrivals for each in arrival.items if isinstance(each, Ack)]
        works = batch.add(arrivals)
        self._batch_bytes += sum(each.publish.size for each in works)
        self._count_waiting()
        self._read_on()
        self._counters.received += len(works)
        self._journal.release(released)
        to_send = []
        for work in works:
            if self._is_over(work):
                work.is_done = True
            else:
                to_send.append(work)
        # The packet id of a message of a lost session is that of another message now.
        await self._make_rows([work for work in to_send if work.publish.qos == 2 and not work.is_lost])
        batch.will_send([work for work in to_send if not work.is_done])
        await self._journal.saved()
        if released and session is not None:
            session.send(b"".join(encode_ack(packets.PUBCOMP, each) for each in released))

    async def _note_done(self, works: Iterable[Work]) -> None:
        """Write to the disk which delayed messages with QoS 2 are stored, or superseded, and which recalls are done."""
        done = [
            work.taken
            for work in works
            if work.taken is not None and work.delay is not None and work.reason == packets.SUCCESS
        ]
        if done:
            self._journal.note_stored(done)
            await self._journal.saved()

    def _acknowledge(self, works: Iterable[Work]) -> None:
        acks: dict[Session, bytearray] = {}
        for work in works:
            qos, session = work.publish.qos, work.arrival.session
            if qos and session is not None and not work.arrival.is_lost:
                kind = packets.PUBACK if qos == 1 else packets.PUBREC
                reason = work.reason if self._is_v5 else packets.SUCCESS
                acks.setdefault(session, bytearray()).extend(encode_ack(kind, work.publish.packet_id, reason))
        for session, data in acks.items():
            session.send(data)

    # --- the decision about a message

    def _is_over(self, work: Work) -> bool:
        """Find the target or the delay of a message. Return True if there is nothing to send."""
        publish, counters = work.publish, self._counters
        user = publish.properties.user
        if self._status.is_own(publish.topic) or (user and (translation.MARK, self._bridge) in user):
            counters.own += 1
            return True
        if publish.missing:
            size = len(publish.payload) + publish.missing
            self._refuse(work, f"a message of more than {size} bytes, which RocketMQ does not take")
            return True
        try:
            if self._rules.delayed is not None:
                work.delay = self._rules.delayed.read(publish.topic, user, self._clock())
            if work.delay is None:
                return self._has_no_target(work)
        except (DelayRefused, TemplateError) as error:
            self._refuse(work, str(error), packets.IMPLEMENTATION_ERROR)
            return True
        if publish.retain and self._is_stored_copy(publish.topic):
            counters.retained += 1
            return True
        return self._expires_before(work, work.delay)

    def _has_no_target(self, work: Work) -> bool:
        topic = work.publish.topic
        try:
            found = self._known[topic]
        except KeyError:
            found = self._find(topic)
            if len(self._known) >= KNOWN_TOPICS:
                self._known.clear()
            self._known[topic] = found
        if found is None:
            self._counters.unmatched += 1
            return True
        rule, work.target = found
        if work.publish.retain and rule.retained == "never" and self._is_stored_copy(topic):
            self._counters.retained += 1
            return True
        return False

    def _find(self, topic: str) -> tuple[Inbound, Target] | None:
        for rule in self._rules.inbound:
            target = rule.target(topic)
            if target is not None:
                return rule, target
        return None

    def _is_stored_copy(self, topic: str) -> bool:
        """Return whether the retain flag of a message to this topic means that the MQTT broker had retained it.
        Otherwise the flag means that it was published as retained."""
        return any(each.matches(topic) for each in self._once)

    def _expires_before(self, work: Work, delay: Delay) -> bool:
        expiry = work.publish.properties.expiry
        if expiry is None or delay.recall:
            return False
        wait_ms = delay.delay_ms
        if wait_ms is None:
            wait_ms = (delay.deliver_at_ms or 0) - self._received_ms(work)
        if wait_ms < expiry * 1000:
            return False
        self._counters.expired += 1
        return True

    def _has_expired(self, work: Work) -> bool:
        """Return whether a message expired while it waited here; count it if so. A recall does not expire."""
        expiry = work.publish.properties.expiry
        if expiry is None or work.is_recall or self._monotonic() - work.at < expiry:
            return False
        self._counters.expired += 1
        return True

    def _received_ms(self, work: Work) -> int:
        """Return the time at which a message was read, ms since the epoch."""
        return round(self._zero_ms() + work.at * 1000)

    def _zero_ms(self) -> float:
        """Return the time at which the monotonic clock was 0, ms since the epoch."""
        return self._clock() - self._monotonic() * 1000

    def _refuse(self, work: Work, reason: str, code: int = packets.IMPLEMENTATION_ERROR) -> None:
        work.reason = code
        self._status.refuse(work.publish.topic, reason)

    # --- QoS 2

    async def _make_rows(self, works: Iterable[Work]) -> None:
        """Find or make the journal's rows of messages with QoS 2. A message whose sender chose a forbidden topic is
        refused."""
        sessions = self._sessions
        new: list[tuple[Work, bytes]] = []
        for work in works:
            publish = work.publish
            digest = _digest(publish)
            known = self._journal.received.get(publish.packet_id)
            # Only a broker that lost its last seconds sends a released message again, and it marks it as sent again.
            if known is not None and known.digest == digest and (publish.dup or not known.is_released):
                self._counters.repeated += 1
                work.taken, work.is_new = known, False
                if not known.is_stored and not work.is_recall and known.queue.topic != self._topic(work):
                    new.append((work, digest))  # the rules have changed
            else:
                new.append((work, digest))
        taken = [await self._insist_on_row(work, digest) for work, digest in new]
        if sessions == self._sessions:
            self._journal.take(each for each in taken if each is not None)

    async def _insist_on_row(self, work: Work, digest: bytes) -> Taken | None:
        """Return the new row of a message, or None if the message is refused."""
        if work.is_recall:
            work.taken = Taken(
                packet_id=work.publish.packet_id,
                unique_key=self._producer.new_message_id(),
                digest=digest,
                queue=MessageQueue(self._topic(work), "", 0),  # a recall is in none
                floor=0,
                is_delayed=True,
            )
            return work.taken
        failures = 0
        while True:
            try:
                taken = await self._make_row(work, digest)
            except DueMQError as error:
                if _is_final(error, work):
                    self._refuse(work, str(error), _reason_of(error))
                    work.is_done = True
                    return None
                failures += 1
                await self._wait_for_rocketmq(error, failures)
            else:
                self._complaints.resolve(_SENDING)
                return taken

    async def _make_row(self, work: Work, digest: bytes) -> Taken:
        if work.taken is not None:
            if await self._is_stored_elsewhere(work.taken):
                work.taken = replace(work.taken, is_stored=True)
                return work.taken
            work.taken, work.is_new = None, True
        sharding_key = None
        if work.target is not None:
            sharding_key = work.target.sharding_key
        elif work.delay is not None and work.delay.replace:
            sharding_key = work.delay.key
        queue = await self._producer.choose_queue(self._topic(work), sharding_key)
        work.taken = Taken(
            packet_id=work.publish.packet_id,
            unique_key=self._producer.new_message_id(),
            digest=digest,
            queue=queue,
            floor=await self._floor(queue),
            is_delayed=work.delay is not None,
        )
        return work.taken

    def _topic(self, work: Work) -> str:
        """Return the RocketMQ topic to which a message is sent."""
        if work.target is not None:
            return work.target.topic
        assert self._rules.delayed is not None
        return self._rules.delayed.topic

    async def _is_stored_elsewhere(self, row: Taken) -> bool:
        """Return whether RocketMQ has a message in the topic to which earlier rules sent it."""
        try:
            return row.unique_key in await self._search([row])
        except (AccessDeniedError, NoRouteError):
            # The topic is gone, or no longer the bridge's. To come twice is better than to hold up all others.
            return False

    async def _floor(self, queue: MessageQueue) -> int:
        now = self._monotonic()
        offset, asked = self._floors.get(queue, (0, 0.0))
        if queue not in self._floors or now - asked > FLOOR_AGE:
            offset = await self._producer.end_offset(queue)
            self._floors[queue] = offset, now
        return offset

    async def _not_stored(self, works: Sequence[Work]) -> list[Work]:
        """Return the messages of one queue that RocketMQ does not have; mark the others as stored."""
        rows = {work.taken.unique_key: work.taken for work in works if work.taken is not None}
        done = {key for key, row in rows.items() if row.is_stored or self._journal.is_stored(row)}
        missing = [row for key, row in rows.items() if key not in done and not works[0].is_recall]
        if missing:
            done |= await self._search(missing)
            self._journal.set_stored(rows[key] for key in done)
        return [work for work in works if work.taken is None or work.taken.unique_key not in done]

    async def _search(self, rows: Sequence[Taken]) -> set[str]:
        """Return the unique keys of those messages of one queue that RocketMQ has."""
        queue, floor = rows[0].queue, min(row.floor for row in rows)
        done = set(await self._producer.stored({row.unique_key for row in rows}, queue, floor))
        waiting = [row.unique_key for row in rows if row.is_delayed and row.unique_key not in done]
        for key in waiting:
            if await self._recaller.waits(queue.topic, key):
                done.add(key)
        # Messages that were delivered between the two searches are in the queue now.
        left = set(waiting) - done
        if left:
            done |= (await self._producer.stored(left, queue, floor)).keys()
        return done

    # --- sending

    async def _send_in_order(self, batch: Batch) -> None:
        """Send messages concurrently, except that those with a key, which may replace or cancel others, keep their
        place in the order. The batch may grow meanwhile."""
        together: list[Work] = []
        for work in batch.to_send:
            if work.delay is not None and work.delay.key is not None:
                await self._send_concurrently(together, batch)
                together = []
                await self._send_with_key(work, batch)
            else:
                together.append(work)
        await self._send_concurrently(together, batch)

    async def _send_with_key(self, work: Work, batch: Batch) -> None:
        """Send a message that may supersede others, or be superseded. If it is refused, those are sent after all."""
        works = [work]
        while works:
            one = works.pop()
            await self._send_until_over([one], batch)
            if one.reason != packets.SUCCESS:
                works += reversed(one.supersedes)
                for each in one.supersedes:
                    each.is_superseded = False
                one.supersedes = ()
            elif not one.is_superseded:
                self._drop_superseded(one)

    def _drop_superseded(self, work: Work) -> None:
        over = [work]
        while over:
            one = over.pop()
            for each in one.supersedes:
                each.is_done = True
                self._counters.superseded += each.is_new
                if each.taken is not None:
                    self._journal.set_stored([each.taken])
            over += one.supersedes

    async def _is_superseded(self, work: Work, batch: Batch) -> bool:
        """Return whether a later message, which RocketMQ gets, makes it wrong to send this one. The later one then has
        it in `supersedes`."""
        delay = work.delay
        if delay is None or delay.key is None or delay.recall:
            return False
        due = self._due(work, delay)
        while True:
            if self._is_superseded_by(self._waiting, work, due, batch):
                await self._take_waiting(batch)
            elif self._is_superseded_by(self._earlier, work, due, batch):
                await self._is_accepted.wait()
                if self._closing.is_set():
                    raise _LeavingError
            else:
                break
        superseder = batch.superseder(work, due)
        if superseder is None:
            return False
        superseder.supersedes += (work,)
        work.is_superseded = True
        return True

    def _due(self, work: Work, delay: Delay) -> float:
        """Return when a delayed message is due, by the monotonic clock, in seconds."""
        if delay.delay_ms is not None:
            return work.at + delay.delay_ms / 1000
        return ((delay.deliver_at_ms or 0) - self._zero_ms()) / 1000

    def _is_superseded_by(self, arrivals: Iterable[Arrival], work: Work, due: float, batch: Batch) -> bool:
        """Return whether one of the messages that wait may supersede a message of a batch."""
        for arrival in arrivals:
            if arrival.at >= due:
                return False
            if arrival.later is None:
                arrival.later = list(self._later_ones(arrival.items))
            for publish, delay in arrival.later:
                if can_supersede(delay, work.delay) and (work.is_repeated or not batch.repeats(publish)):
                    return True
        return False

    def _later_ones(self, items: Iterable[Publish | Ack]) -> Iterable[tuple[Publish, Delay]]:
        """Iterate over the recalls and replacements among packets."""
        if self._rules.delayed is None:
            return
        for each in items:
            if isinstance(each, Publish):
                with suppress(DelayRefused, TemplateError):
                    delay = self._rules.delayed.read(each.topic, each.properties.user, self._clock())
                    if delay is not None and (delay.recall or delay.replace):
                        yield each, delay

    async def _send_concurrently(self, works: Sequence[Work], batch: Batch) -> None:
        groups = list(_groups(works))
        if len(groups) == 1:
            await self._send_until_over(groups[0], batch)
        elif groups:
            sending = (self._send_until_over(each, batch) for each in groups)
            ends = await asyncio.gather(*sending, return_exceptions=True)
            for end in ends:
                if end is not None:
                    raise end

    async def _send_until_over(self, works: list[Work], batch: Batch) -> None:
        """Send the messages of one group until RocketMQ has them or they are refused. A message with a key, which is
        alone, may also turn out to be superseded. Raises ClosedError."""
        group, left = works, works
        has_to_look = not all(work.is_new for work in works)
        failures = 0
        while left:
            if await self._is_superseded(left[0], batch):
                return
            try:
                if has_to_look:
                    left = await self._not_stored(left)
                left = [work for work in left if work.publish.properties.expiry is None or not self._has_expired(work)]
                if left:
                    await self._send(left)
            except DueMQError as error:
                if not _is_final(error, left[0]):
                    failures += 1
                    has_to_look = left[0].taken is not None
                    await self._wait_for_rocketmq(error, failures)
                    continue
                if len(left) > 1:
                    for work in left:
                        await self._send_until_over([work], batch)
                else:
                    await self._refuse_sent(left[0], error)
            self._complaints.resolve(_SENDING)
            break
        for work in group:
            work.is_done = True

    async def _refuse_sent(self, work: Work, error: DueMQError) -> None:
        self._refuse(work, str(error), _reason_of(error))
        if work.taken is not None:
            self._journal.forget_received([work.taken.packet_id])
            await self._journal.saved()

    async def _wait_for_rocketmq(self, error: DueMQError, failures: int) -> None:
        if isinstance(error, ClosedError):
            raise error
        self._complaints.raise_(_SENDING, str(error))
        with suppress(TimeoutError):
            async with asyncio.timeout(self._intervals.pause(failures)):
                await self._closing.wait()
        if self._closing.is_set():
            raise _LeavingError

    async def _send(self, works: list[Work]) -> None:
        first = works[0]
        if first.delay is not None and first.delay.key in self._overdue:
            await self._let_pass(first.delay.key)
        if first.delay is not None and first.delay.recall:
            await self._recall(first, first.delay)
            if first.taken is not None:
                self._journal.set_stored([first.taken])
            return
        if first.delay is not None:
            await self._send_delayed(first, first.delay)
            self._counters.delayed += 1
        else:
            await self._send_plain(works)
        self._counters.stored += len(works)
        if first.taken is not None:
            self._journal.set_stored(work.taken for work in works if work.taken is not None)

    async def _send_plain(self, works: list[Work]) -> None:
        zero_ms, taken = self._zero_ms(), works[0].taken
        queue, retries = (None, None) if taken is None else (taken.queue, 0)
        messages = [self._message(work, round(zero_ms + work.arrival.at * 1000)) for work in works]
        if len(messages) > 1 or len(messages[0].body) < SINGLE_FROM_BYTES:
            results = await self._producer.send_batch(messages, queue=queue, retries=retries)
            last = results[-1]
        else:
            message = messages[0]
            last = await self._producer.send(
                message.topic,
                message.body,
                tags=message.tags,
                keys=message.keys,
                properties=message.properties,
                sharding_key=message.sharding_key if queue is None else None,
                queue=queue,
                message_id=message.message_id,
                retries=retries,
            )
        if queue is not None:
            self._floors[queue] = max(self._floors.get(queue, (0, 0.0)), (last.queue_offset + 1, self._monotonic()))

    def _message(self, work: Work, received_ms: int) -> Message:
        target, publish = work.target, work.publish
        assert target is not None
        return Message(
            target.topic,
            translation.to_body(publish.payload),
            tags=target.tags,
            keys=target.key or (),
            properties=translation.to_properties(publish, publish.topic, self._bridge, received_ms),
            sharding_key=target.sharding_key,
            message_id=work.taken.unique_key if work.taken is not None else None,
        )

    async def _send_delayed(self, work: Work, delay: Delay) -> None:
        assert self._rules.delayed is not None
        publish, taken = work.publish, work.taken
        fields = translation.to_properties(
            publish, delay.plain_topic, self._bridge, self._received_ms(work), without=DELAY_PROPERTIES
        )
        fields[translation.QOS] = str(publish.qos)
        rest = None
        if delay.delay_ms is not None:
            elapsed_ms = round((self._monotonic() - work.at) * 1000)
            rest = timedelta(milliseconds=max(0, delay.delay_ms - elapsed_ms))
            if not rest:
                fields[translation.DUE_AT] = str(self._received_ms(work) + delay.delay_ms)
        result = await self._producer.send(
            self._rules.delayed.topic,
            translation.to_body(publish.payload),
            keys=delay.key or (),
            properties=fields,
            delay=rest,
            deliver_at=delay.deliver_at_ms / 1000 if delay.deliver_at_ms is not None else None,
            replace=delay.replace,
            queue=taken.queue if taken is not None else None,
            message_id=taken.unique_key if taken is not None else None,
            # While the producer tries again, nobody looks for a recall or a replacement.
            retries=0 if taken is not None or delay.key is not None else None,
        )
        if delay.replace and delay.key is not None and self._monotonic() - self._due(work, delay) > OVERDUE:
            if len(self._overdue) >= MOST_OVERDUE:
                self._overdue.clear()
            self._overdue[delay.key] = result.message_id

    async def _let_pass(self, key: str) -> None:
        """Wait until RocketMQ has delivered an overdue replacement, which waits there for a moment. What was received
        after its time must not overtake the delivery."""
        assert self._rules.delayed is not None
        for _ in range(OVERDUE_CHECKS):
            if self._closing.is_set() or not await self._recaller.waits(self._rules.delayed.topic, self._overdue[key]):
                break
            await asyncio.sleep(self._intervals.first_pause / 10)
        del self._overdue[key]

    async def _recall(self, work: Work, delay: Delay) -> None:
        assert self._rules.delayed is not None
        assert delay.key is not None
        count = await self._recaller.cancel_key(self._rules.delayed.topic, delay.key)
        count += sum(each.is_new for each in work.supersedes)
        self._status.recalled(delay.plain_topic, delay.key, count)


_SENDING: Final = "sending messages from MQTT to RocketMQ"


def _is_final(error: DueMQError, work: Work) -> bool:
    """Return whether a message has to be refused. An account that must not send to the topic of a rule may get the
    permission, and until then the MQTT broker keeps the messages. But a sender that chooses a forbidden topic must not
    hold up all the others. Wrong keys are no reason to refuse anything: then the brokers of RocketMQ 4.9 and 5.3 do not
    speak of a permission."""
    if isinstance(error, AccessDeniedError):
        return work.target is not None and work.target.is_chosen_by_sender and "permission" in str(error)
    return isinstance(error, _FINAL)


def _reason_of(error: DueMQError) -> int:
    """Return the reason code for a message that is refused for an error."""
    return packets.NOT_AUTHORIZED if isinstance(error, AccessDeniedError) else packets.IMPLEMENTATION_ERROR


def _groups(works: Iterable[Work]) -> Iterable[list[Work]]:
    """Iterate over groups of messages that can be sent in one request: plain messages to one queue."""
    open_groups: dict[object, tuple[list[Work], int]] = {}
    for work in works:
        size = len(work.publish.payload)
        if work.delay is not None or size >= SINGLE_FROM_BYTES or work.target is None:
            yield [work]
            continue
        where: object = work.taken.queue if work.taken is not None else (work.target.topic, work.target.sharding_key)
        group, total = open_groups.get(where, ([], 0))
        if group and (total + size > BATCH_BYTES or len(group) >= BATCH_MESSAGES):
            yield group
            group, total = [], 0
        group.append(work)
        open_groups[where] = group, total + size
    for group, _ in open_groups.values():
        yield group


def _digest(publish: Publish) -> bytes:
    properties = publish.properties
    known = hashlib.blake2b(publish.payload, digest_size=16)
    known.update(repr((publish.topic, publish.retain, properties.user, properties.correlation_data)).encode())
    return known.digest()
