"""The journal's rows of messages from MQTT with QoS 2, and the search for messages that RocketMQ may already have."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Final

from duemq.errors import AccessDeniedError, DueMQError, NoRouteError
from duemq.messages import MessageQueue
from duemq.mqtt_bridge.inbound.batch import Transfer
from duemq.mqtt_bridge.inbound.decisions import Decisions
from duemq.mqtt_bridge.inbound.patience import Patience, Recaller, is_final, reason_of
from duemq.mqtt_bridge.session.journal import Journal, Taken
from duemq.mqtt_bridge.session.packets import Publish
from duemq.mqtt_bridge.status import Counters
from duemq.producer import Producer

FLOOR_AGE: Final = 60.0
"""Age in seconds at which the known end of a queue is requested again. The search after a failed send begins there, so
an old one makes the search long."""


class Rows:
    """Finds and makes the rows. `session_number` returns how many sessions the MQTT broker has begun; a row of an
    earlier session is not valid in the present one. `monotonic` is in seconds."""

    def __init__(
        self,
        *,
        journal: Journal,
        producer: Producer,
        recaller: Recaller,
        decisions: Decisions,
        patience: Patience,
        counters: Counters,
        session_number: Callable[[], int],
        monotonic: Callable[[], float],
    ) -> None:
        self._journal = journal
        self._producer = producer
        self._recaller = recaller
        self._decisions = decisions
        self._patience = patience
        self._counters = counters
        self._session_number = session_number
        self._monotonic = monotonic
        self._floors: dict[MessageQueue, tuple[int, float]] = {}

    def stored_before(self, queue: MessageQueue, end: int) -> None:
        """Note that a message was stored in a queue before the offset `end`."""
        self._floors[queue] = max(self._floors.get(queue, (0, 0.0)), (end, self._monotonic()))

    async def make(self, transfers: Iterable[Transfer]) -> None:
        """Find or make the journal's rows of messages with QoS 2. A message whose sender chose a forbidden topic is
        refused."""
        sessions = self._session_number()
        new: list[tuple[Transfer, bytes]] = []
        for transfer in transfers:
            publish = transfer.publish
            digest = _digest(publish)
            known = self._journal.received.get(publish.packet_id)
            # Only an MQTT broker that lost its last seconds sends a released message again, and it sets the DUP flag.
            if known is not None and known.digest == digest and (publish.dup or not known.is_released):
                self._counters.repeated += 1
                transfer.taken, transfer.is_new = known, False
                if (
                    not known.is_stored
                    and not transfer.is_recall
                    and known.queue.topic != self._decisions.topic_of(transfer)
                ):
                    new.append((transfer, digest))  # the rules have changed
            else:
                new.append((transfer, digest))
        taken = [await self._insist_on_row(transfer, digest) for transfer, digest in new]
        if sessions == self._session_number():
            self._journal.take(each for each in taken if each is not None)

    async def _insist_on_row(self, transfer: Transfer, digest: bytes) -> Taken | None:
        """Return the new row of a message, or None if the message is refused."""
        if transfer.is_recall:
            transfer.taken = Taken(
                packet_id=transfer.publish.packet_id,
                unique_key=self._producer.new_message_id(),
                digest=digest,
                queue=MessageQueue(self._decisions.topic_of(transfer), "", 0),  # a recall is in no queue
                floor=0,
                is_delayed=True,
            )
            return transfer.taken
        failures = 0
        while True:
            try:
                taken = await self._make_row(transfer, digest)
            except DueMQError as error:
                if is_final(error, transfer):
                    self._decisions.refuse(transfer, str(error), reason_of(error))
                    transfer.is_done = True
                    return None
                failures += 1
                await self._patience.wait(error, failures)
            else:
                self._patience.resolve()
                return taken

    async def _make_row(self, transfer: Transfer, digest: bytes) -> Taken:
        if transfer.taken is not None:
            if await self._is_stored_elsewhere(transfer.taken):
                transfer.taken = replace(transfer.taken, is_stored=True)
                return transfer.taken
            transfer.taken, transfer.is_new = None, True
        sharding_key = None
        if transfer.target is not None:
            sharding_key = transfer.target.sharding_key
        elif transfer.delay is not None and transfer.delay.replace:
            sharding_key = transfer.delay.key
        queue = await self._producer.choose_queue(self._decisions.topic_of(transfer), sharding_key)
        transfer.taken = Taken(
            packet_id=transfer.publish.packet_id,
            unique_key=self._producer.new_message_id(),
            digest=digest,
            queue=queue,
            floor=await self._floor(queue),
            is_delayed=transfer.delay is not None,
        )
        return transfer.taken

    async def _is_stored_elsewhere(self, row: Taken) -> bool:
        """Return whether RocketMQ has a message in the topic to which earlier rules sent it."""
        try:
            return row.unique_key in await self._search([row])
        except (AccessDeniedError, NoRouteError):
            # The topic no longer exists, or the bridge may no longer use it. The message may arrive twice, which is
            # better than holding up all others.
            return False

    async def _floor(self, queue: MessageQueue) -> int:
        now = self._monotonic()
        offset, asked = self._floors.get(queue, (0, 0.0))
        if queue not in self._floors or now - asked > FLOOR_AGE:
            offset = await self._producer.end_offset(queue)
            self._floors[queue] = offset, now
        return offset

    async def not_stored(self, transfers: Sequence[Transfer]) -> list[Transfer]:
        """Return the messages of one queue that RocketMQ does not have; mark the others as stored."""
        rows = {transfer.taken.unique_key: transfer.taken for transfer in transfers if transfer.taken is not None}
        done = {key for key, row in rows.items() if row.is_stored or self._journal.is_stored(row)}
        missing = [row for key, row in rows.items() if key not in done and not transfers[0].is_recall]
        if missing:
            if found := await self._search(missing):
                await self._patience.until_durable(missing[0].queue)
                done |= found
            self._journal.set_stored(rows[key] for key in done)
        return [transfer for transfer in transfers if transfer.taken is None or transfer.taken.unique_key not in done]

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


def _digest(publish: Publish) -> bytes:
    properties = publish.properties
    known = hashlib.blake2b(publish.payload, digest_size=16)
    known.update(repr((publish.topic, publish.retain, properties.user, properties.correlation_data)).encode())
    return known.digest()
