"""From MQTT to RocketMQ: sends messages in batches, and acknowledges each message when RocketMQ has it.

A batch has all messages that arrived while the previous batch was sent. Its plain messages are sent in RocketMQ
batches, one for each topic, and its delayed messages as concurrent requests. Only one batch is sent at a time, since
MQTT requires acknowledgements in the order of the messages. While RocketMQ is away, no message is acknowledged, so the
MQTT broker keeps the messages. Only if it loses the session does the bridge alone have the messages that wait here, and
it sends them.

Delays and expiry count from the time at which the bridge first read a message, however long it then waits here, and
also if the MQTT broker sends it again over a new connection.

QoS 2 is exactly once: before a message is sent, the journal has its unique key, its queue, and an offset of this queue
before which the message cannot lie. After a failed send, the bridge searches the queue before it sends again. The
journal also records which delayed messages are stored and which recalls are done: a message that has been cancelled or
replaced since is found nowhere, and a recall must not cancel messages that came after it.

A delayed message that a later one supersedes is not sent (`batch`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Final

from duemq._values.intervals import Intervals
from duemq._values.times import Clock
from duemq.errors import DueMQError
from duemq.messages import Message, SendStatus
from duemq.mqtt_bridge import translation
from duemq.mqtt_bridge.inbound.arrivals import Arrival, can_supersede
from duemq.mqtt_bridge.inbound.batch import Batch, Transfer
from duemq.mqtt_bridge.inbound.decisions import Decisions
from duemq.mqtt_bridge.inbound.patience import Patience, Recaller, is_final, reason_of
from duemq.mqtt_bridge.inbound.receipts import Receipts
from duemq.mqtt_bridge.inbound.rows import Rows
from duemq.mqtt_bridge.inbound.waiting_room import WaitingRoom
from duemq.mqtt_bridge.rules.delays import PROPERTIES as DELAY_PROPERTIES
from duemq.mqtt_bridge.rules.model import Delay, Rules
from duemq.mqtt_bridge.session import packets
from duemq.mqtt_bridge.session.client import Session
from duemq.mqtt_bridge.session.journal import Journal
from duemq.mqtt_bridge.session.packets import Ack, Publish, encode_ack
from duemq.mqtt_bridge.status import Status
from duemq.producer import Producer

BATCH_BYTES: Final = 131_072
"""Approximate maximum size of the payloads in one RocketMQ batch, in bytes."""
BATCH_MESSAGES: Final = 500
"""Maximum number of messages in one RocketMQ batch."""
SINGLE_FROM_BYTES: Final = 4096
"""Payloads of this size or more, in bytes, are sent singly, since the client compresses only single messages."""
OVERDUE: Final = 0.1
"""Time after which a message that waits in the bridge counts as overdue, in seconds. Before that, later messages find
it in RocketMQ, as if there were no bridge."""
MOST_OVERDUE: Final = 10_000
"""Maximum number of overdue replacements that are remembered."""
OVERDUE_CHECKS: Final = 500
"""Maximum number of checks whether RocketMQ has delivered an overdue replacement."""


class FromMqtt:
    """Sends the messages of one bridge to RocketMQ.

    `receipts`: those of the session at the MQTT broker, including those under earlier rules; `waiting`: messages that
    earlier rules have left. A session calls `received`; `run` sends until it is cancelled. `monotonic` is in seconds.
    """

    def __init__(
        self,
        rules: Rules,
        *,
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
        self._bridge = rules.connection.bridge
        self._producer = producer
        self._recaller = recaller
        self._journal = journal
        self._status = status
        self._counters = status.counters
        self._intervals = intervals
        self._monotonic = monotonic
        self._is_v5 = rules.connection.is_v5
        self._decisions = Decisions(rules, status=status, clock=clock, monotonic=monotonic)
        self._patience = Patience(recaller, intervals)
        self._room = WaitingRoom(
            rules.connection,
            receipts=receipts,
            waiting=waiting,
            journal=journal,
            decisions=self._decisions,
            counters=status.counters,
            monotonic=monotonic,
        )
        self._rows = Rows(
            journal=journal,
            producer=producer,
            recaller=recaller,
            decisions=self._decisions,
            patience=self._patience,
            counters=status.counters,
            session_number=lambda: self._room.session_number,
            monotonic=monotonic,
        )
        self._overdue: dict[str, str] = {}
        """Message ids by key, of replacements that were sent after they were due and may not be delivered yet."""

    def connected(self, session: Session) -> None:
        """Begin with a new connection, which the MQTT broker has not accepted yet."""
        self._room.connected(session)

    def accepted(self, *, is_present: bool) -> None:
        """Continue when the MQTT broker has accepted the connection. `is_present`: whether it still has the session."""
        self._room.accepted(is_present=is_present)

    def received(self, items: Sequence[Publish | Ack]) -> None:
        """Take messages and PUBRELs, in the order of their arrival."""
        self._room.received(items)

    @property
    def held(self) -> int:
        """Number of the packets that wait, or were added to a batch that had already begun."""
        return self._room.held

    def left(self) -> list[Arrival]:
        """When `run` has ended and the session has been left, return the messages that were not sent."""
        return self._room.left()

    async def run(self) -> None:
        """Send messages until cancelled, or until `close` is called and the present batch is sent, or cannot be sent.
        Raises JournalError."""
        room, closing = self._room, self._patience.closing
        while not closing.is_set():
            await room.arrived.wait()
            room.arrived.clear()
            if room.waiting and room.session is not None and not closing.is_set():
                with self._patience.until_leaving():
                    await self._handle(room.batch)
                    room.begin_batch()
            room.make_room()

    async def save_forever(self) -> None:
        """Until cancelled, write to the disk which rows the journal forgets while messages wait. Raises
        JournalError."""
        while True:
            await self._room.has_forgotten.wait()
            # If a batch begins in the meantime, it writes this with its own rows.
            await asyncio.sleep(self._intervals.first_pause)
            self._room.has_forgotten.clear()
            await self._journal.saved()

    def close(self) -> None:
        """Begin no further batch: messages that are not acknowledged stay with the MQTT broker."""
        self._patience.closing.set()
        self._room.arrived.set()
        self._room.is_accepted.set()

    async def _handle(self, batch: Batch) -> None:
        await self._take_waiting(batch)
        await self._send_in_order(batch)
        await self._note_done(batch.transfers)
        self._acknowledge(batch.transfers)

    async def _take_waiting(self, batch: Batch) -> None:
        """Add all waiting messages to a batch, decide about each, and make the rows of those with QoS 2."""
        session = self._room.session
        transfers, released = self._room.take()
        self._counters.received += len(transfers)
        self._journal.release(released)
        to_send = []
        for transfer in transfers:
            if self._decisions.is_over(transfer):
                transfer.is_done = True
            else:
                to_send.append(transfer)
        # The packet id of a message of a lost session now belongs to another message.
        await self._rows.make([transfer for transfer in to_send if transfer.publish.qos == 2 and not transfer.is_lost])
        batch.will_send([transfer for transfer in to_send if not transfer.is_done])
        await self._journal.saved()
        if released and session is not None:
            session.send(b"".join(encode_ack(packets.PUBCOMP, each) for each in released))

    async def _note_done(self, transfers: Iterable[Transfer]) -> None:
        """Write to the disk which delayed messages with QoS 2 are stored or superseded, and which recalls are done."""
        done = [
            transfer.taken
            for transfer in transfers
            if transfer.taken is not None and transfer.delay is not None and transfer.reason == packets.SUCCESS
        ]
        if done:
            self._journal.note_stored(done)
            await self._journal.saved()

    def _acknowledge(self, transfers: Iterable[Transfer]) -> None:
        acks: dict[Session, bytearray] = {}
        for transfer in transfers:
            qos, session = transfer.publish.qos, transfer.arrival.session
            if qos and session is not None and not transfer.arrival.is_lost:
                kind = packets.PUBACK if qos == 1 else packets.PUBREC
                reason = transfer.reason if self._is_v5 else packets.SUCCESS
                acks.setdefault(session, bytearray()).extend(encode_ack(kind, transfer.publish.packet_id, reason))
        for session, data in acks.items():
            session.send(data)

    async def _send_in_order(self, batch: Batch) -> None:
        """Send messages concurrently, except that those with a key, which may replace or cancel others, keep their
        place in the order. The batch may grow in the meantime."""
        together: list[Transfer] = []
        while batch.to_send:
            transfer = batch.to_send.popleft()
            if transfer.is_superseded:
                continue
            if transfer.delay is not None and transfer.delay.key is not None:
                await self._send_concurrently(together, batch)
                together = []
                await self._send_with_key(transfer, batch)
            else:
                together.append(transfer)
        await self._send_concurrently(together, batch)

    async def _send_with_key(self, transfer: Transfer, batch: Batch) -> None:
        """Send a message that may supersede others or be superseded. If it is refused, the messages that it supersedes
        are sent after all."""
        transfers = [transfer]
        while transfers:
            one = transfers.pop()
            await self._send_until_over([one], batch)
            if one.reason != packets.SUCCESS:
                transfers += reversed(one.supersedes)
                for each in one.supersedes:
                    each.is_superseded = False
                one.supersedes = ()
            elif not one.is_superseded:
                self._drop_superseded(one)

    def _drop_superseded(self, transfer: Transfer) -> None:
        over = [transfer]
        while over:
            one = over.pop()
            for each in one.supersedes:
                each.is_done = True
                self._counters.superseded += each.is_new
                if each.taken is not None:
                    self._journal.set_stored([each.taken])
            over += one.supersedes
            one.supersedes = ()

    async def _is_superseded(self, transfer: Transfer, batch: Batch) -> bool:
        """Return whether a later message supersedes this one, so that it must not be sent. The later one then has it in
        `supersedes`."""
        delay = transfer.delay
        if delay is None or delay.key is None or delay.recall:
            return False
        due = self._decisions.due(transfer.at, delay)
        while True:
            if self._is_superseded_by(self._room.waiting, transfer, due):
                await self._take_waiting(batch)
            elif self._is_superseded_by(self._room.earlier, transfer, due):
                await self._room.is_accepted.wait()
                self._patience.check()
            else:
                break
        superseder = batch.superseder(transfer, due)
        if superseder is None:
            return False
        superseder.supersedes += (transfer,)
        transfer.is_superseded = True
        if superseder.is_done:
            self._drop_superseded(superseder)
        return True

    def _is_superseded_by(self, arrivals: Iterable[Arrival], transfer: Transfer, due: float) -> bool:
        """Return whether one of the messages that wait may supersede a message of a batch."""
        for arrival in arrivals:
            if arrival.at >= due:
                continue
            for order, _, delay in self._decisions.read_keyed(arrival):
                if order > transfer.order and can_supersede(delay, transfer.delay):
                    return True
        return False

    async def _send_concurrently(self, transfers: Sequence[Transfer], batch: Batch) -> None:
        groups = list(_groups(transfers))
        if len(groups) == 1:
            await self._send_until_over(groups[0], batch)
        elif groups:
            sending = (self._send_until_over(each, batch) for each in groups)
            ends = await asyncio.gather(*sending, return_exceptions=True)
            for end in ends:
                if end is not None:
                    raise end

    async def _send_until_over(self, transfers: list[Transfer], batch: Batch) -> None:
        """Send the messages of one group until RocketMQ has them or they are refused. A message with a key, which is
        alone, may also turn out to be superseded. Raises ClosedError."""
        group, left = transfers, transfers
        has_to_look = not all(transfer.is_new for transfer in transfers)
        failures = 0
        while left:
            if await self._is_superseded(left[0], batch):
                return
            try:
                if has_to_look:
                    left = await self._rows.not_stored(left)
                left = [
                    transfer
                    for transfer in left
                    if transfer.publish.properties.expiry is None or not self._decisions.has_expired(transfer)
                ]
                if left:
                    await self._send(left)
            except DueMQError as error:
                if not is_final(error, left[0]):
                    failures += 1
                    has_to_look = left[0].taken is not None
                    await self._patience.wait(error, failures)
                    continue
                if len(left) > 1:
                    for transfer in left:
                        await self._send_until_over([transfer], batch)
                else:
                    await self._refuse_sent(left[0], error)
            self._patience.resolve()
            break
        for transfer in group:
            transfer.is_done = True

    async def _refuse_sent(self, transfer: Transfer, error: DueMQError) -> None:
        self._decisions.refuse(transfer, str(error), reason_of(error))
        if transfer.taken is not None:
            self._journal.forget_received([transfer.taken.packet_id])
            await self._journal.saved()

    async def _send(self, transfers: list[Transfer]) -> None:
        first = transfers[0]
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
            await self._send_plain(transfers)
        self._counters.stored += len(transfers)
        if first.taken is not None:
            self._journal.set_stored(transfer.taken for transfer in transfers if transfer.taken is not None)

    async def _send_plain(self, transfers: list[Transfer]) -> None:
        zero_ms, taken = self._decisions.zero_ms(), transfers[0].taken
        queue, retries = (None, None) if taken is None else (taken.queue, 0)
        messages = [self._message(transfer, round(zero_ms + transfer.arrival.at * 1000)) for transfer in transfers]
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
        if last.status is SendStatus.FLUSH_DISK_TIMEOUT:
            await self._patience.until_durable(last.queue)
        if queue is not None:
            self._rows.stored_before(queue, last.queue_offset + 1)

    def _message(self, transfer: Transfer, received_ms: int) -> Message:
        target, publish = transfer.target, transfer.publish
        assert target is not None
        return Message(
            target.topic,
            translation.to_body(publish.payload),
            tags=target.tags,
            keys=target.key or (),
            properties=translation.to_properties(publish, publish.topic, self._bridge, received_ms),
            sharding_key=target.sharding_key,
            message_id=transfer.taken.unique_key if transfer.taken is not None else None,
        )

    async def _send_delayed(self, transfer: Transfer, delay: Delay) -> None:
        assert self._rules.delayed is not None
        publish, taken = transfer.publish, transfer.taken
        fields = translation.to_properties(
            publish, delay.plain_topic, self._bridge, self._decisions.received_ms(transfer), without=DELAY_PROPERTIES
        )
        fields[translation.QOS] = str(publish.qos)
        rest = None
        if delay.delay_ms is not None:
            elapsed_ms = round((self._monotonic() - transfer.at) * 1000)
            rest = timedelta(milliseconds=max(0, delay.delay_ms - elapsed_ms))
            if not rest:
                fields[translation.DUE_AT] = str(self._decisions.received_ms(transfer) + delay.delay_ms)
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
            # No retries by the producer: between attempts the bridge must check for a recall or a replacement, or
            # whether the message is already stored.
            retries=0 if taken is not None or delay.key is not None else None,
        )
        if result.status is SendStatus.FLUSH_DISK_TIMEOUT:
            await self._patience.until_durable(result.queue)
        if (
            delay.replace
            and delay.key is not None
            and self._monotonic() - self._decisions.due(transfer.at, delay) > OVERDUE
        ):
            if len(self._overdue) >= MOST_OVERDUE:
                self._overdue.clear()
            self._overdue[delay.key] = result.message_id

    async def _let_pass(self, key: str) -> None:
        """Wait until RocketMQ has delivered an overdue replacement, which waits there for a moment. A message that was
        received after the replacement was due must not cancel or replace it."""
        assert self._rules.delayed is not None
        for _ in range(OVERDUE_CHECKS):
            if self._patience.closing.is_set() or not await self._recaller.waits(
                self._rules.delayed.topic, self._overdue[key]
            ):
                break
            await asyncio.sleep(self._intervals.first_pause / 10)
        del self._overdue[key]

    async def _recall(self, transfer: Transfer, delay: Delay) -> None:
        assert self._rules.delayed is not None
        assert delay.key is not None
        count = await self._recaller.cancel_key(self._rules.delayed.topic, delay.key)
        count += sum(each.is_new for each in transfer.supersedes)
        self._status.recalled(delay.plain_topic, delay.key, count)


def _groups(transfers: Iterable[Transfer]) -> Iterable[list[Transfer]]:
    """Yield groups of messages that can be sent in one request: plain messages to one queue."""
    open_groups: dict[object, tuple[list[Transfer], int]] = {}
    for transfer in transfers:
        size = len(transfer.publish.payload)
        if transfer.delay is not None or size >= SINGLE_FROM_BYTES or transfer.target is None:
            yield [transfer]
            continue
        where: object = (
            transfer.taken.queue
            if transfer.taken is not None
            else (transfer.target.topic, transfer.target.sharding_key)
        )
        group, total = open_groups.get(where, ([], 0))
        if group and (total + size > BATCH_BYTES or len(group) >= BATCH_MESSAGES):
            yield group
            group, total = [], 0
        group.append(transfer)
        open_groups[where] = group, total + size
    for group, _ in open_groups.values():
        yield group
