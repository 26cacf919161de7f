"""From MQTT to RocketMQ: sends messages in batches, and acknowledges each message when RocketMQ has it.

A batch has all messages that arrived while the batch before was sent. Its plain messages go out as batches of
RocketMQ's, one for each topic, and its delayed messages as concurrent requests. Only one batch is sent at a time, since
MQTT wants acknowledgements in the order of the messages. While RocketMQ is away nothing is acknowledged, so the MQTT
broker keeps the messages. Only if it loses the session, the bridge alone has what waits here, and sends it.

Delays and expiry count from the time at which the bridge first read a message, however long it then waits here, and
also if the MQTT broker sends it again over a new connection.

QoS 2 is exactly once: before a message is sent, the journal has its unique key, its queue, and an offset of this queue
before which the message cannot lie. After a failed send, the bridge looks in the queue before it sends again.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
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


@dataclass(slots=True)
class _Arrival:
    """The packets of one read of the socket."""

    items: Sequence[Publish | Ack]
    at: float
    """Time of the read, by the monotonic clock, in seconds; of a message that was sent again, of the first read."""
    is_lost: bool = False
    """Whether the MQTT broker has lost the session over which they came. It sends none of them again, and takes an
    acknowledgement for that of another message."""


@dataclass(slots=True)
class _Work:
    """A message on its way to RocketMQ."""

    publish: Publish
    at: float
    is_lost: bool
    """These two as of its `_Arrival`."""
    target: Target | None = None
    delay: Delay | None = None
    taken: Taken | None = None
    """Its row in the journal; None without QoS 2."""
    is_new: bool = True
    """Whether it was never sent before. Otherwise RocketMQ may have it."""
    reason: int = packets.SUCCESS
    """Reason code of the acknowledgement."""


class FromMqtt:
    """Sends the messages of one bridge to RocketMQ.

    `bridge`: the bridge's name in the properties of messages; `receipts`: those of the session at the MQTT broker, of
    earlier rules too. A session calls `received`; `run` sends until it is
    cancelled. `monotonic` is in seconds.
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
        self._session: Session | None = None
        self._sessions = 0
        """Number of sessions that the MQTT broker has begun, after each loss of the one before."""
        self._waiting: list[_Arrival] = []
        self._earlier: list[_Arrival] = []
        """Messages with QoS 1 and 2 of lost connections, until it is known whether the MQTT broker sends them again."""
        self._in_hand: Sequence[_Arrival] = ()
        """The batch that is being sent, until it is acknowledged."""
        self._waiting_count = 0
        self._waiting_bytes = 0
        """Number of the packets, and size of the messages, that wait here, including the earlier ones."""
        self._batch_bytes = 0
        """Size of the messages that are being sent to RocketMQ."""
        self._arrived = asyncio.Event()
        self._has_forgotten = asyncio.Event()
        self._closing = asyncio.Event()
        self._is_paused = False

    def connected(self, session: Session) -> None:
        """Begin with a new connection, which the MQTT broker has not accepted yet."""
        self._session = session
        self._is_paused = False
        self._note(self._in_hand)
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
                    kept.append(_Arrival(items, arrival.at))
        self._count_waiting()

    def accepted(self, *, is_present: bool) -> None:
        """Continue when the MQTT broker has accepted the connection. `is_present`: whether it still has the session.
        If so, it sends all messages again that are not acknowledged, so those that wait here are dropped."""
        earlier, self._earlier = self._earlier, []
        if not is_present:
            self._sessions += 1
            self._receipts.clear()
            for arrival in (*earlier, *self._in_hand):
                arrival.is_lost = True
            self._waiting[:0] = earlier
            if earlier:
                self._arrived.set()
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

    def _arrivals(self, items: list[Publish | Ack]) -> list[_Arrival]:
        now = self._monotonic()
        if not self._receipts:
            return [_Arrival(items, now)]
        found: list[_Arrival] = []
        new: list[Publish | Ack] = []
        for each in items:
            receipt = self._receipts.take(each) if isinstance(each, Publish) and each.qos else None
            if receipt is None:
                new.append(each)
                continue
            assert isinstance(each, Publish)
            if new:
                found.append(_Arrival(new, now))
                new = []
            found.append(_Arrival([receipt.restored(each)], receipt.at))
        if new:
            found.append(_Arrival(new, now))
        return found

    def _note(self, arrivals: Iterable[_Arrival]) -> None:
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
            batch, self._waiting = self._waiting, []
            self._in_hand = batch
            self._batch_bytes = sum(
                each.size for arrival in batch for each in arrival.items if isinstance(each, Publish)
            )
            self._count_waiting()
            self._read_on()
            if batch and self._session is not None and not self._closing.is_set():
                session = self._session
                with suppress(_LeavingError):
                    await self._handle(batch, session)
                    if session.is_lost and session is self._session:
                        self._note(batch)  # the acknowledgements did not arrive
                    self._in_hand = ()
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

    def left(self) -> None:
        """Keep the times of the messages that have no acknowledgement, when the session has been left."""
        self._note(self._in_hand)
        self._note(self._waiting)

    # --- a batch

    async def _handle(self, batch: Sequence[_Arrival], session: Session) -> None:
        released = [each.packet_id for arrival in batch for each in arrival.items if isinstance(each, Ack)]
        works = [
            _Work(each, arrival.at, arrival.is_lost)
            for arrival in batch
            for each in arrival.items
            if isinstance(each, Publish)
        ]
        self._counters.received += len(works)
        self._journal.release(released)
        to_send = [work for work in works if not self._is_over(work)]
        # The packet id of a message of a lost session is that of another message now.
        await self._make_rows(
            [work for work in to_send if work.publish.qos == 2 and not work.is_lost and not _is_recall(work)]
        )
        to_send = [work for work in to_send if work.reason == packets.SUCCESS]
        await self._journal.saved()
        if released:
            session.send(b"".join(encode_ack(packets.PUBCOMP, each) for each in released))
        await self._send_in_order(to_send)
        self._acknowledge(works, session)

    def _acknowledge(self, works: Iterable[_Work], session: Session) -> None:
        acks = bytearray()
        for work in works:
            qos = work.publish.qos
            if qos and not work.is_lost:
                kind = packets.PUBACK if qos == 1 else packets.PUBREC
                acks += encode_ack(kind, work.publish.packet_id, work.reason if self._is_v5 else packets.SUCCESS)
        if acks:
            session.send(acks)

    # --- the decision about a message

    def _is_over(self, work: _Work) -> bool:
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

    def _has_no_target(self, work: _Work) -> bool:
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

    def _expires_before(self, work: _Work, delay: Delay) -> bool:
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

    def _has_expired(self, work: _Work) -> bool:
        """Return whether a message expired while it waited here; count it if so. A recall does not expire."""
        expiry = work.publish.properties.expiry
        if expiry is None or _is_recall(work) or self._monotonic() - work.at < expiry:
            return False
        self._counters.expired += 1
        return True

    def _received_ms(self, work: _Work) -> int:
        """Return the time at which a message was read, ms since the epoch."""
        return round(self._zero_ms() + work.at * 1000)

    def _zero_ms(self) -> float:
        """Return the time at which the monotonic clock was 0, ms since the epoch."""
        return self._clock() - self._monotonic() * 1000

    def _refuse(self, work: _Work, reason: str, code: int = packets.IMPLEMENTATION_ERROR) -> None:
        work.reason = code
        self._status.refuse(work.publish.topic, reason)

    # --- QoS 2

    async def _make_rows(self, works: Iterable[_Work]) -> None:
        """Find or make the journal's rows of messages with QoS 2. A message whose sender chose a forbidden topic is
        refused."""
        sessions = self._sessions
        new: list[tuple[_Work, bytes]] = []
        for work in works:
            publish = work.publish
            digest = _digest(publish)
            known = self._journal.received.get(publish.packet_id)
            # Only a broker that lost its last seconds sends a released message again, and it marks it as sent again.
            if known is not None and known.digest == digest and (publish.dup or not known.is_released):
                self._counters.repeated += 1
                work.taken, work.is_new = known, False
                if not known.is_stored and known.queue.topic != self._topic(work):
                    new.append((work, digest))  # the rules have changed
            else:
                new.append((work, digest))
        taken = [await self._insist_on_row(work, digest) for work, digest in new]
        if sessions == self._sessions:
            self._journal.take(each for each in taken if each is not None)

    async def _insist_on_row(self, work: _Work, digest: bytes) -> Taken | None:
        """Return the new row of a message, or None if the message is refused."""
        failures = 0
        while True:
            try:
                taken = await self._make_row(work, digest)
            except DueMQError as error:
                if _is_final(error, work):
                    self._refuse(work, str(error), _reason_of(error))
                    return None
                failures += 1
                await self._wait_for_rocketmq(error, failures)
            else:
                self._complaints.resolve(_SENDING)
                return taken

    async def _make_row(self, work: _Work, digest: bytes) -> Taken:
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

    def _topic(self, work: _Work) -> str:
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

    async def _not_stored(self, works: Sequence[_Work]) -> list[_Work]:
        """Return the messages of one queue that RocketMQ does not have; mark the others as stored."""
        rows = {work.taken.unique_key: work.taken for work in works if work.taken is not None}
        known = self._journal.received
        done = {key for key, row in rows.items() if row.is_stored or known.get(row.packet_id, row).is_stored}
        missing = [row for key, row in rows.items() if key not in done]
        if missing:
            done |= await self._search(missing)
            self._set_stored([rows[key] for key in done])
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

    def _set_stored(self, rows: Iterable[Taken]) -> None:
        self._journal.set_stored(row.packet_id for row in rows)

    # --- sending

    async def _send_in_order(self, works: Iterable[_Work]) -> None:
        """Send messages concurrently, except that those with a key, which may replace or cancel others, keep their
        place in the order."""
        together: list[_Work] = []
        for work in works:
            if work.delay is not None and work.delay.key is not None:
                await self._send_concurrently(together)
                together = []
                await self._send_concurrently([work])
            else:
                together.append(work)
        await self._send_concurrently(together)

    async def _send_concurrently(self, works: Sequence[_Work]) -> None:
        groups = list(_groups(works))
        if len(groups) == 1:
            await self._send_until_over(groups[0])
        elif groups:
            ends = await asyncio.gather(*(self._send_until_over(each) for each in groups), return_exceptions=True)
            for end in ends:
                if end is not None:
                    raise end

    async def _send_until_over(self, works: list[_Work]) -> None:
        """Send the messages of one group until RocketMQ has them or they are refused. Raises ClosedError."""
        has_to_look = not all(work.is_new for work in works)
        failures = 0
        while works:
            try:
                if has_to_look:
                    works = await self._not_stored(works)
                works = [
                    work for work in works if work.publish.properties.expiry is None or not self._has_expired(work)
                ]
                if works:
                    await self._send(works)
            except DueMQError as error:
                if not _is_final(error, works[0]):
                    failures += 1
                    has_to_look = works[0].taken is not None
                    await self._wait_for_rocketmq(error, failures)
                    continue
                if len(works) > 1:
                    for work in works:
                        await self._send_until_over([work])
                    return
                await self._refuse_sent(works[0], error)
            self._complaints.resolve(_SENDING)
            return

    async def _refuse_sent(self, work: _Work, error: DueMQError) -> None:
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

    async def _send(self, works: list[_Work]) -> None:
        first = works[0]
        if first.delay is not None and first.delay.recall:
            await self._recall(first.delay)
            return
        if first.delay is not None:
            await self._send_delayed(first, first.delay)
            self._counters.delayed += 1
        else:
            await self._send_plain(works)
        self._counters.stored += len(works)
        if first.taken is not None:
            self._set_stored(work.taken for work in works if work.taken is not None)

    async def _send_plain(self, works: list[_Work]) -> None:
        zero_ms, taken = self._zero_ms(), works[0].taken
        queue, retries = (None, None) if taken is None else (taken.queue, 0)
        messages = [self._message(work, round(zero_ms + work.at * 1000)) for work in works]
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

    def _message(self, work: _Work, received_ms: int) -> Message:
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

    async def _send_delayed(self, work: _Work, delay: Delay) -> None:
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
        await self._producer.send(
            self._rules.delayed.topic,
            translation.to_body(publish.payload),
            keys=delay.key or (),
            properties=fields,
            delay=rest,
            deliver_at=delay.deliver_at_ms / 1000 if delay.deliver_at_ms is not None else None,
            replace=delay.replace,
            queue=taken.queue if taken is not None else None,
            message_id=taken.unique_key if taken is not None else None,
            retries=0 if taken is not None else None,
        )

    async def _recall(self, delay: Delay) -> None:
        assert self._rules.delayed is not None
        assert delay.key is not None
        count = await self._recaller.cancel_key(self._rules.delayed.topic, delay.key)
        self._status.recalled(delay.plain_topic, delay.key, count)


_SENDING: Final = "sending messages from MQTT to RocketMQ"


def _is_final(error: DueMQError, work: _Work) -> bool:
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


def _groups(works: Iterable[_Work]) -> Iterable[list[_Work]]:
    """Iterate over groups of messages that can be sent in one request: plain messages to one queue."""
    open_groups: dict[object, tuple[list[_Work], int]] = {}
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


def _is_recall(work: _Work) -> bool:
    return work.delay is not None and work.delay.recall


def _digest(publish: Publish) -> bytes:
    properties = publish.properties
    known = hashlib.blake2b(publish.payload, digest_size=16)
    known.update(repr((publish.topic, publish.retain, properties.user, properties.correlation_data)).encode())
    return known.digest()
