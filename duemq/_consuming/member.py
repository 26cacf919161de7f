"""A member of a consumer group: its queues and its offsets in them.

Each member computes the allocation of queues to members itself (`_consuming.allocation`), whenever the broker reports
that a member joined or left, and periodically. Between the computations of two members a queue may be read by both, or
by neither, as with RocketMQ's clients.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from duemq._consuming.allocation import allocate_averagely
from duemq._consuming.group import BrokerOffsets, GroupApi
from duemq._consuming.inbox import Inbox
from duemq._consuming.offsets import OffsetStore
from duemq._consuming.reader import FIRST, LAST, QueueReader, Start
from duemq._consuming.subscription import ALL_TAGS, Subscription, make_subscription
from duemq._net.client import Client, Tasks
from duemq._net.complaints import Complaints
from duemq._net.connection import Codec
from duemq._net.routes import Route, Routes
from duemq._net.single_flight import SingleFlight
from duemq._values.intervals import Intervals
from duemq._values.times import Clock, now_ms
from duemq.errors import ClosedError, DueMQError, NoRouteError
from duemq.messages import RETRY_PREFIX, MessageQueue
from duemq.protocol.codes import RequestCode
from duemq.protocol.errors import ProtocolError
from duemq.protocol.frames.command import Command
from duemq.protocol.requests import bodies
from duemq.protocol.requests.bodies import ConsumerData, HeartbeatData
from duemq.protocol.requests.headers import ResetOffset, decode_ext
from duemq.protocol.requests.signature import Signer

_FROM_WHERE: Final = {FIRST: "CONSUME_FROM_FIRST_OFFSET", LAST: "CONSUME_FROM_LAST_OFFSET"}
_FROM_TIME: Final = "CONSUME_FROM_TIMESTAMP"

log = logging.getLogger("duemq.consumer")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberConfig:
    """The settings that a member gets from its consumer. See `PushConsumer`."""

    group: str
    nameserver: str
    codec: Codec
    start: Start
    max_reconsume_times: int
    max_ahead: int
    local_offsets: OffsetStore | None
    """Where a broadcasting member keeps its offsets; None for a clustering one."""
    intervals: Intervals = field(default_factory=Intervals)
    signer: Signer | None = None
    tls: ssl.SSLContext | None = None
    clock: Clock = now_ms
    monotonic: Callable[[], float] = time.monotonic
    """Seconds, by a clock that nobody sets."""

    @property
    def broadcasting(self) -> bool:
        """Whether each member gets all messages."""
        return self.local_offsets is not None


class Starts:
    """Where a group begins with a queue in which it has no offset yet.

    `start` holds for the queues that a topic has when a group that is new to it begins. A queue that is newer than that
    is read from its beginning, since its first messages are new to the group: a queue of a topic that was created after
    the start, or was given more queues, while this member ran or before (the group then has offsets in other queues).
    """

    def __init__(self, start: Start, routes: Routes, offsets: OffsetStore, api: GroupApi) -> None:
        self._start = start
        self._routes = routes
        self._offsets = offsets
        self._api = api
        self._begins: dict[str, dict[MessageQueue, int]] = {}
        """By topic: the offset that `start` meant when this member began with the topic, in each queue of that time."""
        self._looks = SingleFlight[dict[MessageQueue, int]]()

    def begin_without(self, topic: str) -> None:
        """Note that a topic did not exist when the group began with it."""
        self._begins.setdefault(topic, {})

    async def begin_with(self, topic: str) -> None:
        """Find where to begin with a topic's queues, so that all that is sent from now on is read. Raises what the
        requests for offsets raise."""
        if self._start != FIRST and not topic.startswith(RETRY_PREFIX) and topic not in self._begins:
            self._begins[topic] = await self._looks.get(topic, lambda: self._look(topic))

    async def find(self, queue: MessageQueue) -> int:
        """Return the offset at which to begin with a queue. Raises what the requests for offsets raise."""
        await self.begin_with(queue.topic)
        begin = self._begins.get(queue.topic, {}).get(queue)
        # A retry is never too old: it waited for this group.
        return begin if begin is not None else await self._api.first_offset(queue)

    async def _look(self, topic: str) -> dict[MessageQueue, int]:
        queues = (await self._routes.find(topic)).read_queues
        stored = await asyncio.gather(*(self._offsets.load(queue) for queue in queues))
        if any(offset is not None for offset in stored):
            return {}
        begins = await asyncio.gather(*(self._position(queue) for queue in queues))
        return dict(zip(queues, begins, strict=True))

    async def _position(self, queue: MessageQueue) -> int:
        if isinstance(self._start, int):
            return await self._api.offset_at(queue, self._start)
        return await self._api.end_offset(queue)


class Member:
    """Reads this member's share of the queues into `inbox`."""

    def __init__(self, config: MemberConfig, inbox: Inbox) -> None:
        self._config = config
        self._inbox = inbox
        self._client = Client(
            config.nameserver,
            codec=config.codec,
            heartbeat=self._heartbeat,
            on_request=self._request_received,
            intervals=config.intervals,
            signer=config.signer,
            tls=config.tls,
        )
        self._api = GroupApi(self._client, config.group, config.max_reconsume_times)
        self._offsets: OffsetStore = config.local_offsets or BrokerOffsets(self._api)
        self._subscriptions: dict[str, Subscription] = {}
        self._readers: dict[MessageQueue, tuple[QueueReader, asyncio.Task[None]]] = {}
        self._allocated: set[str] = set()
        self._starts = Starts(config.start, self._client.routes, self._offsets, self._api)
        self._complaints = Complaints(log)
        self._tasks = Tasks()
        self._stopped = False
        self._announce = False
        self._change = asyncio.Event()
        self._moving = asyncio.Lock()
        """Held while queues change or offsets are stored, so that only offsets of current queues are stored."""
        self._progress = asyncio.Event()
        if not config.broadcasting:
            self.subscribe(RETRY_PREFIX + config.group, ALL_TAGS)

    # --- called by the consumer -----------------------------------------------------------------------------

    def subscribe(self, topic: str, tags: str) -> None:
        """Read a topic. Raises ArgumentError."""
        known = self._subscriptions.get(topic)
        # Brokers keep the newest subscription of the group: a clock that was set back must not make this one older.
        version = max(self._config.clock(), known.version + 1 if known is not None else 0)
        self._subscriptions[topic] = make_subscription(topic, tags, version)
        self._allocated.discard(topic)
        self._announce = True
        self._change.set()

    async def start(self) -> None:
        """Join the group. Raises the errors of a failing name server; waits for a topic that does not exist."""
        try:
            await self._client.start()
            await self._look_up_topics()
        except BaseException:
            await self._client.close()
            raise
        self._tasks.start(self._rebalance_forever(), "duemq rebalance")
        self._tasks.start(self._commit_forever(), "duemq commits")

    async def stop_reading(self) -> None:
        """Keep the queues, but read nothing more of them."""
        self._stopped = True
        self._progress.set()
        await self._tasks.close()

    async def leave(self) -> None:
        """Store the offsets, tell the brokers, and end all connections. Does not raise."""
        try:
            await self.commit()
            await self._api.leave()
        finally:
            await self._client.close()

    @property
    def queues(self) -> frozenset[MessageQueue]:
        """The queues that this member has now."""
        return frozenset(self._readers)

    @property
    def committed(self) -> dict[MessageQueue, int]:
        """The group's offsets in this member's queues, as far as it knows that they are stored."""
        found = {queue: reader.stored_offset for queue, (reader, _) in self._readers.items()}
        return {queue: offset for queue, offset in found.items() if offset is not None}

    async def caught_up(self) -> None:
        """See `PushConsumer.caught_up`."""
        while not self._is_caught_up():
            if self._stopped:
                raise ClosedError("the consumer is closed")
            self._progress.clear()
            await self._progress.wait()

    async def commit(self, *, even_unchanged: bool = False) -> None:
        """Store the offsets; what goes wrong is logged."""
        async with self._moving:
            await self._catch_up_with_group()
            offsets = {}
            for queue, (reader, _) in self._readers.items():
                offset = reader.offset_to_commit(even_unchanged=even_unchanged)
                if offset is not None:
                    offsets[queue] = offset
            await self._save(offsets)

    # --- rebalance ------------------------------------------------------------------------------------------------

    async def _rebalance_forever(self) -> None:
        intervals, incomplete = self._config.intervals, 0
        while True:
            self._change.clear()
            complete = False
            try:
                complete = await self._rebalance()
            except Exception:
                # Whatever it is, the member goes on with the queues it has and looks again.
                log.exception("cannot rebalance %s", self._config.group)
            # A topic that is about to be created by its first message is found soon.
            incomplete = 0 if complete else incomplete + 1
            pause = intervals.rebalance if complete else min(intervals.pause(incomplete), intervals.missing_topic)
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._change.wait()

    async def _rebalance(self) -> bool:
        """Look once at every topic. Gives whether all is settled, so that the next look may take its time."""
        if self._announce:
            self._announce = False
            await self._client.beat(self._client.broker_addresses)
        complete = True
        for topic in list(self._subscriptions):
            try:
                mine = await self._allocate(await self._client.routes.find(topic))
            except NoRouteError as error:
                if topic.startswith(RETRY_PREFIX):
                    self._allocated.add(topic)  # nothing was ever retried
                    continue
                self._starts.begin_without(topic)
                complete = False
                self._complaints.raise_(f"waiting for {topic}", str(error))
            except DueMQError as error:
                complete = False
                self._complaints.raise_(f"waiting for {topic}", str(error))
            else:
                await self._update(topic, mine)
                self._allocated.add(topic)
                self._complaints.resolve(f"waiting for {topic}")
        self._progress.set()
        return complete

    async def _allocate(self, route: Route) -> list[MessageQueue]:
        """The queues of a topic that are this member's."""
        # Every broker of the topic has to know this member, since any of them may be asked who is in the group.
        await self._client.beat(route.addresses - set(self._client.broker_addresses))
        if self._config.broadcasting:
            return list(route.read_queues)
        members = await self._api.members(route)
        return allocate_averagely(route.read_queues, members, self._client.client_id)

    async def _update(self, topic: str, mine: Iterable[MessageQueue]) -> None:
        wanted = set(mine)
        async with self._moving:
            await self._catch_up_with_group()
            had = {queue for queue in self._readers if queue.topic == topic}
            if wanted == had:
                return
            log.info("%s now reads %d queues of %s, before %d", self._config.group, len(wanted), topic, len(had))
            for queue in had - wanted:
                await self._drop(queue)
            for queue in sorted(wanted - had):
                self._add(queue)

    def _add(self, queue: MessageQueue) -> None:
        reader = QueueReader(
            queue,
            api=self._api,
            offsets=self._offsets,
            inbox=self._inbox,
            subscription=lambda: self._subscriptions[queue.topic],
            start=lambda: self._starts.find(queue),
            broadcasting=self._config.broadcasting,
            intervals=self._config.intervals,
            clock=self._config.clock,
            monotonic=self._config.monotonic,
            progressed=self._progress.set,
            overtaken=self._overtaken,
            complaints=self._complaints,
            max_ahead=self._config.max_ahead,
        )
        self._readers[queue] = reader, self._tasks.start(reader.run(), f"duemq reader {queue}")

    async def _drop(self, queue: MessageQueue) -> None:
        reader, task = self._readers.pop(queue)
        offset = reader.offset_to_commit(even_unchanged=False)
        reader.dropped = True
        task.cancel()
        if offset is not None:
            await self._save({queue: offset})

    async def _catch_up_with_group(self) -> None:
        """Before offsets are stored: where nothing was heard for long, and others have gone on meanwhile, read on from
        where the group is now; `_moving` is held."""
        readers = [reader for reader, _ in self._readers.values() if reader.has_to_check]
        who = "asking for the group's offsets"
        try:
            for error in await asyncio.gather(*(reader.check() for reader in readers), return_exceptions=True):
                if error is not None:
                    raise error
        except (DueMQError, OSError) as error:
            self._complaints.raise_(who, str(error))
        else:
            self._complaints.resolve(who)
        for reader in readers:
            if reader.dropped:
                self._begin_anew(reader)

    def _overtaken(self, reader: QueueReader) -> None:
        """A reader has found out that the group has gone on without it."""
        self._tasks.start(self._begin_anew_in_turn(reader), f"duemq reader {reader.queue} anew")

    async def _begin_anew_in_turn(self, reader: QueueReader) -> None:
        async with self._moving:
            self._begin_anew(reader)

    def _begin_anew(self, reader: QueueReader) -> None:
        """Read a queue from the group's offset on; `_moving` is held. Nothing changes where the queue has another
        reader by now, or none."""
        queue = reader.queue
        if queue not in self._readers or self._readers[queue][0] is not reader:
            return
        log.warning(
            "%s had heard nothing of %s for over %g s, and the group has gone on without it: reading on from the "
            "group's offset",
            self._config.group,
            queue,
            self._config.intervals.expiry,
        )
        _, task = self._readers.pop(queue)
        task.cancel()
        self._add(queue)

    async def _look_up_topics(self) -> None:
        """Look once at all topics: a wrong address of the name server fails the start, and messages that are sent from
        now on are not older than where the group begins."""
        await asyncio.gather(*(self._look_up(topic) for topic in self._subscriptions))

    async def _look_up(self, topic: str) -> None:
        try:
            await self._client.routes.find(topic)
        except NoRouteError:
            # Made after this start: its first messages are new even to those who want only new ones.
            self._starts.begin_without(topic)
            return
        try:
            await self._starts.begin_with(topic)
        except DueMQError as error:
            # A broker that cannot be asked now is asked again when its queues are read.
            log.debug("where to begin with %s is not known yet: %s", topic, error)

    def _is_caught_up(self) -> bool:
        return self._allocated >= set(self._subscriptions) and all(
            reader.caught_up for reader, _ in self._readers.values()
        )

    # --- offsets --------------------------------------------------------------------------------------------------

    async def _commit_forever(self) -> None:
        intervals, number = self._config.intervals, 0
        while True:
            await asyncio.sleep(intervals.commit)
            number += 1
            await self.commit(even_unchanged=number % intervals.commit_all_every == 0)

    async def _save(self, offsets: dict[MessageQueue, int]) -> None:
        if not offsets:
            return
        try:
            await self._offsets.save(offsets)
        except (DueMQError, OSError) as error:
            self._complaints.raise_("storing offsets", str(error))
            return
        self._complaints.resolve("storing offsets")
        for queue, offset in offsets.items():
            if queue in self._readers:
                self._readers[queue][0].committed(offset)

    async def _go_elsewhere(self, offsets: dict[MessageQueue, int]) -> None:
        """Continue at other offsets in the queues of this member, as an administrator asked. Messages that are read and
        not finished are dropped."""
        async with self._moving:
            mine = {queue: offset for queue, offset in offsets.items() if queue in self._readers}
            for queue in mine:
                reader, task = self._readers.pop(queue)
                reader.dropped = True
                task.cancel()
            await self._save(mine)
            for queue, offset in sorted(mine.items()):
                log.info(
                    "%s now reads %s from offset %d on, as an administrator said", self._config.group, queue, offset
                )
                self._add(queue)

    # --- the brokers' side ----------------------------------------------------------------------------------------

    def _heartbeat(self, client_id: str) -> HeartbeatData:
        start = self._config.start
        consumer = ConsumerData(
            group_name=self._config.group,
            message_model=bodies.BROADCASTING if self._config.broadcasting else bodies.CLUSTERING,
            consume_from_where=_FROM_TIME if isinstance(start, int) else _FROM_WHERE[start],
            subscription_data_set=[subscription.to_data() for subscription in self._subscriptions.values()],
        )
        return HeartbeatData(client_id=client_id, producer_data_set=[], consumer_data_set=[consumer])

    def _request_received(self, command: Command) -> Command | None:
        if command.code == RequestCode.NOTIFY_CONSUMER_IDS_CHANGED:
            self._change.set()
        elif command.code == RequestCode.RESET_CONSUMER_CLIENT_OFFSET:
            self._offsets_reset(command)
        return None

    def _offsets_reset(self, command: Command) -> None:
        try:
            header = decode_ext(ResetOffset, command.ext)
            table = bodies.read_reset_offset_body(command.body)
        except ProtocolError as error:
            log.error("cannot read where to go on: %s", error)
            return
        if header.group != self._config.group or self._stopped:
            return
        offsets = {MessageQueue(at.topic, at.broker_name, at.queue_id): offset for at, offset in table.items()}
        self._tasks.start(self._go_elsewhere(offsets), "duemq reset of offsets")
