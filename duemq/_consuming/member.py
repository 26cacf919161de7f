"""A member of a consumer group: its queues and its offsets in them.

Each member computes the allocation of queues to members itself (`_consuming.allocation`), periodically and whenever a
broker reports that a member joined or left. Until all members have done so, a queue may be read by two members or by
none, as with RocketMQ's clients.
"""

from __future__ import annotations

import asyncio
import logging
import math
import ssl
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from duemq._consuming.allocation import allocate_averagely
from duemq._consuming.group import BrokerOffsets, GroupApi
from duemq._consuming.inbox import Inbox
from duemq._consuming.lanes import OrderedInbox
from duemq._consuming.locks import HeldLocks
from duemq._consuming.offsets import OffsetStore
from duemq._consuming.reader import FIRST, LAST, QueueReader, ReaderConfig, Start
from duemq._consuming.subscription import ALL_TAGS, Subscription, make_subscription
from duemq._net import timeouts
from duemq._net.client import Client, Tasks
from duemq._net.complaints import Complaints
from duemq._net.connection import Codec
from duemq._net.routes import Route, Routes
from duemq._net.single_flight import SingleFlight
from duemq._values.failures import is_passed_on
from duemq.errors import ArgumentError, ClosedError, DueMQError, NoRouteError
from duemq.messages import MessageQueue
from duemq.protocol.codes import RequestCode
from duemq.protocol.errors import ProtocolError
from duemq.protocol.frames.command import Command
from duemq.protocol.requests import bodies
from duemq.protocol.requests.bodies import ConsumerData, HeartbeatData
from duemq.protocol.requests.headers import ResetOffset, decode_ext
from duemq.protocol.topics import RETRY_PREFIX

if TYPE_CHECKING:
    from duemq.protocol.requests.signature import Signer

_FROM_WHERE: Final = {FIRST: "CONSUME_FROM_FIRST_OFFSET", LAST: "CONSUME_FROM_LAST_OFFSET"}
_FROM_TIME: Final = "CONSUME_FROM_TIMESTAMP"

Listener = Callable[[frozenset[MessageQueue]], Awaitable[object]]
"""A function that is called with the queues that a member gets, or gives up."""

Target = MessageQueue | str
"""A queue, or a topic, which stands for all its queues."""

STORING_OFFSETS: Final = "storing offsets"
"""The name of this activity in complaints."""

log = logging.getLogger("duemq.consumer")


class MemberConfig(ReaderConfig, frozen=True, kw_only=True):
    """The settings that a member gets from its consumer. See `Consumer`."""

    group: str
    nameserver: str
    codec: Codec
    start: Start
    max_cached_messages: int
    max_cached_bytes: int
    exclusive: bool
    """Whether a queue moves to another member only when all its messages that were handed out are finished, by means of
    the locks of an ordered consumer. This must be the same for all members of the group."""
    client_id: str | None
    """The id under which the brokers know the member and its locks; None: a new id. With a constant id, a process that
    was killed and started again has its locks immediately."""
    in_hand: Mapping[MessageQueue, int]
    """For an exclusive member: the offsets of queues before which a former process may have had messages in hand. No
    other member gets such a queue before this member has finished those messages."""
    close_timeout: float
    on_assigned: Listener | None
    on_revoked: Listener | None
    signer: Signer | None = None
    tls: ssl.SSLContext | None = None


class Starts:
    """Where a group begins to read a queue for which it has no offset yet.

    `start` applies to the queues that a topic has when a new group begins with it. Newer queues are read from their
    beginning, since their first messages are new to the group: those of a topic that was created after the start, and
    those that were added to a topic, while this member ran or before (the group then has offsets in other queues).
    """

    def __init__(self, start: Start, routes: Routes, offsets: OffsetStore, api: GroupApi) -> None:
        self._start = start
        self._routes = routes
        self._offsets = offsets
        self._api = api
        self._begins: dict[str, dict[MessageQueue, int]] = {}
        """By topic: for each queue that the topic had when this member began with it, the offset that `start` meant."""
        self._looks = SingleFlight[dict[MessageQueue, int]]()

    def begin_without(self, topic: str) -> None:
        """Note that a topic did not exist when the group began with it."""
        self._begins.setdefault(topic, {})

    async def begin_with(self, topic: str) -> None:
        """Determine where to begin with a topic's queues now, so that all messages sent from now on are read. Raises
        what the requests for offsets raise."""
        if self._start != FIRST and not topic.startswith(RETRY_PREFIX) and topic not in self._begins:
            self._begins[topic] = await self._looks.get(topic, lambda: self._look(topic))

    async def find(self, queue: MessageQueue) -> int:
        """Return the offset at which to begin to read a queue. Raises what the requests for offsets raise."""
        await self.begin_with(queue.topic)
        begin = self._begins.get(queue.topic, {}).get(queue)
        # A retry is never too old: it waited for this group.
        return begin if begin is not None else await self._api.first_offset(queue)

    async def _look(self, topic: str) -> dict[MessageQueue, int]:
        queues = (await self._routes.find(topic)).read_queues
        stored = await asyncio.gather(*(self._offsets.load(queue) for queue in queues))
        if any(offset is not None for offset in stored):
            return {}
        begins = await asyncio.gather(*(self.position(queue, self._start) for queue in queues))
        return dict(zip(queues, begins, strict=True))

    async def position(self, queue: MessageQueue, start: Start) -> int:
        """Return the offset that a `Start` means in a queue now. Raises what the requests for offsets raise."""
        if isinstance(start, int):
            return await self._api.offset_at(queue, start)
        return await (self._api.first_offset(queue) if start == FIRST else self._api.end_offset(queue))


class Member:
    """Reads this member's share of the queues into its inbox.

    Only one task, the rebalance, changes which queues the member has; other tasks only replace the reader of a queue.
    """

    def __init__(self, config: MemberConfig, complaints: Complaints | None = None) -> None:
        """`complaints`: where the failures of the member and of its client are noted; None: they are only logged."""
        self._config = config
        self._ordered_inbox: OrderedInbox | None = None
        if config.ordered:
            self._ordered_inbox = OrderedInbox(config.max_cached_messages, config.max_cached_bytes)
        self.inbox: Inbox = self._ordered_inbox or Inbox(config.max_cached_messages, config.max_cached_bytes)
        """The messages that were read and are unfinished."""
        self._client = Client(
            config.nameserver,
            codec=config.codec,
            heartbeat=self._heartbeat,
            on_request=self._request_received,
            intervals=config.intervals,
            signer=config.signer,
            tls=config.tls,
            client_id=config.client_id,
            on_reconnected=self._reconnected,
            complaints=complaints,
        )
        self._api = GroupApi(self._client, config.group, config.max_reconsume_times)
        self._broker_offsets = BrokerOffsets(self._api)
        self._offsets: OffsetStore = config.local_offsets or self._broker_offsets
        self._subscriptions: dict[str, Subscription] = {}
        self._readers: dict[MessageQueue, tuple[QueueReader, asyncio.Task[None]]] = {}
        self._allocated: set[str] = set()
        self._starts = Starts(config.start, self._client.routes, self._offsets, self._api)
        self._complaints = complaints or Complaints(log)
        self._locks: HeldLocks | None = None
        if (config.ordered or config.exclusive) and not config.broadcasting:
            life = config.intervals.exclusive_lock_life if config.exclusive else config.intervals.lock_life
            self._locks = HeldLocks(self._api, life, config.monotonic, self._complaints)
        self._paused: set[Target] = set()
        """Queues and topics that the application paused."""
        self._resumed: set[MessageQueue] = set()
        """Queues that the application resumed although their topics were paused as a whole."""
        self._held_back: set[MessageQueue] = set()
        """Queues that are being taken or given up: their messages are not handed out. An exclusive member holds a queue
        back until the messages that were handed out are finished."""
        self._revoked = frozenset[MessageQueue]()
        """Queues that are being given up, and with which `on_revoked` was already called."""
        self._reclaimed: set[str] = set()
        """Topics all of whose queues this member has once tried to lock, including those of other members."""
        self._reconnected_at: dict[str, float] = {}
        """By a broker's address: when a connection to it was last reopened, by `monotonic`."""
        self._awaits_retries = False
        """Whether a message was sent back, so that the retry topic must exist soon."""
        self._tasks = Tasks()
        self._lock_tasks = Tasks()
        self._stopped = False
        self._announce = False
        self._change = asyncio.Event()
        self._moving = asyncio.Lock()
        """Held while the readers of queues change and while offsets are stored, so that only offsets of this member's
        queues are stored."""
        self._progress = asyncio.Event()
        if not config.broadcasting:
            self.subscribe(RETRY_PREFIX + config.group, ALL_TAGS)

    # --- called by the consumer -----------------------------------------------------------------------------

    def subscribe(self, topic: str, tags: str) -> None:
        """Subscribe to a topic, or replace its tags. Raises ArgumentError."""
        known = self._subscriptions.get(topic)
        # Brokers keep the newest subscription of the group; a clock that was set back must not make this one older.
        version = max(self._config.clock(), known.version + 1 if known is not None else 0)
        self._subscriptions[topic] = make_subscription(topic, tags, version)
        self._allocated.discard(topic)
        self._announce = True
        self._change.set()

    async def start(self) -> None:
        """Join the group. Raises the error of a failing name server; `start` can then be called again. A topic that
        does not exist is not an error: the member waits for it."""
        try:
            await self._client.start()
            await self._look_up_topics()
        except BaseException:
            await self._client.stop()
            raise
        intervals = self._config.intervals
        self._tasks.supervise(self._rebalance_forever, "duemq rebalance", intervals)
        self._tasks.supervise(self._commit_forever, "duemq commits", intervals)
        if self._locks is not None:
            self._lock_tasks.supervise(self._renew_locks_forever, "duemq locks", intervals)

    async def stop_reading(self) -> None:
        """Keep the queues, but read no more messages."""
        self._stopped = True
        self._progress.set()
        async with self._moving:
            # No task is cancelled while it gives a queue up: the queue's offset would not be stored, and its messages
            # would be delivered again.
            await self._tasks.close()

    async def leave(self) -> None:
        """Give the queues up: store the offsets, notify the brokers, and close all connections. Never raises errors of
        brokers or listeners."""
        queues = frozenset(self._readers)
        try:
            await self._tell(self._config.on_revoked, "on_revoked", queues - self._revoked)
            await self.commit()
            await self._lock_tasks.close()
            if self._locks is not None:
                await self._locks.unlock_all()
            await self._api.leave()
        finally:
            await self._lock_tasks.close()
            await self._client.close()

    def pause(self, targets: Collection[Target]) -> None:
        """Hand out no more messages of these queues or topics until `resume`; none: of all topics with a
        subscription."""
        chosen = set[Target](targets or self._subscriptions)
        self._paused |= chosen
        self._resumed = {queue for queue in self._resumed if not chosen & {queue, queue.topic}}
        self._apply_pauses(self._readers)

    def resume(self, targets: Collection[Target]) -> None:
        """Continue with these queues or topics; none: with all of them."""
        if not targets:
            self._paused.clear()
            self._resumed.clear()
        for target in targets:
            self._paused.discard(target)
            if isinstance(target, str):
                self._paused -= {each for each in self._paused if _topic_of(each) == target}
                self._resumed -= {queue for queue in self._resumed if queue.topic == target}
            elif target.topic in self._paused:
                self._resumed.add(target)
        self._apply_pauses(self._readers)

    async def seek(self, target: Target, position: Start | None, offset: int | None) -> None:
        """Continue elsewhere in a queue, or in this member's queues of a topic: at a queue offset, or at `position`:
        "first", "last", or a time in ms since the epoch. Raises ArgumentError for a topic without subscription and for
        a queue of another member, and the other errors of `Consumer.seek`."""
        topic = _topic_of(target)
        if topic not in self._subscriptions:
            raise ArgumentError(f"{topic} is not subscribed to")
        await self._client.routes.find(topic)
        while topic not in self._allocated and not any(queue.topic == topic for queue in self._readers):
            self._check_running()
            self._progress.clear()
            await self._progress.wait()
        self._check_running()
        queues = [queue for queue in self._readers if target in (queue, queue.topic)]
        if not queues and isinstance(target, MessageQueue):
            raise ArgumentError(f"{target} belongs to another member now, or does not exist: see `assignment`")
        if offset is not None:
            found = [offset] * len(queues)
        else:
            assert position is not None
            found = list(await asyncio.gather(*(self._starts.position(queue, position) for queue in queues)))
        await self._go_elsewhere(dict(zip(queues, found, strict=True)), "as requested by seek")

    @property
    def client_id(self) -> str:
        """The id under which the brokers know this member."""
        return self._client.client_id

    @property
    def assignment(self) -> frozenset[MessageQueue]:
        """The queues that this member has now, without those of the retry topic."""
        return frozenset(queue for queue in self._readers if not queue.topic.startswith(RETRY_PREFIX))

    @property
    def committed(self) -> dict[MessageQueue, int]:
        """The group's offsets in this member's queues that are known to be stored."""
        found = {queue: reader.stored_offset for queue, (reader, _) in self._readers.items()}
        return {queue: offset for queue, offset in found.items() if offset is not None}

    async def caught_up(self) -> None:
        """Wait until all messages are finished that were in this member's queues when it got them. Raises ClosedError
        if the consumer is closed first."""
        while not self._is_caught_up():
            self._check_running()
            self._progress.clear()
            await self._progress.wait()

    async def commit(self, *, even_unchanged: bool = False) -> None:
        """Store the offsets; errors are logged. `even_unchanged`: store also those that were already stored."""
        async with self._moving:
            await self._catch_up_with_group()
            offsets = {}
            for queue, (reader, _) in self._readers.items():
                offset = reader.offset_to_commit(even_unchanged=even_unchanged)
                if offset is not None:
                    offsets[queue] = offset
            await self._save(offsets)

    # --- called by the readers ------------------------------------------------------------------------------------

    def subscription(self, queue: MessageQueue) -> Subscription:
        """Return the present subscription to the topic of a queue."""
        return self._subscriptions[queue.topic]

    async def start_of(self, queue: MessageQueue) -> int:
        """Return the offset at which to begin with a queue in which the group has no offset yet. Raises what the
        requests for offsets raise."""
        return await self._starts.find(queue)

    def overtaken(self, reader: QueueReader) -> None:
        """Replace a reader that has ended because the group has continued without it."""
        self._tasks.start(self._begin_anew_in_turn(reader), f"duemq reader {reader.queue} anew")

    def sent_back(self) -> None:
        """Look for the retry topic if it is not read yet: the broker may just have created it for the message that was
        sent back."""
        if not self._awaits_retries:
            self._awaits_retries = True
            self._change.set()

    # --- rebalance ------------------------------------------------------------------------------------------------

    async def _rebalance_forever(self) -> None:
        intervals, incomplete = self._config.intervals, 0
        while True:
            self._change.clear()
            complete = False
            try:
                complete = await self._rebalance()
            except Exception:
                # Whatever failed, the member keeps the queues that it has, and tries again later.
                log.exception("cannot rebalance %s", self._config.group)
            if self._stopped:
                return  # a listener closed the consumer, within this task
            # After an incomplete rebalance the pause is short: a topic may be created by its first message any time.
            incomplete = 0 if complete else incomplete + 1
            pause = intervals.rebalance if complete else min(intervals.pause(incomplete), intervals.missing_topic)
            with suppress(TimeoutError):
                async with timeouts.timeout(pause):
                    await self._change.wait()

    async def _rebalance(self) -> bool:
        """Update the queues of every topic once. Return whether this is complete, so that there is no hurry to do it
        again."""
        if self._announce:
            self._announce = False
            await self._client.beat(self._client.broker_addresses)
        complete = True
        for topic in list(self._subscriptions):
            if self._stopped:
                return True
            try:
                route = await self._client.routes.find(topic)
                mine = await self._allocate(route)
            except NoRouteError as error:
                if topic.startswith(RETRY_PREFIX):
                    # No message was ever retried, or the name servers do not know the new topic yet.
                    self._allocated.add(topic)
                    complete = complete and not self._awaits_retries
                    continue
                self._starts.begin_without(topic)
                complete = False
                self._complaints.raise_(f"waiting for {topic}", error)
            except DueMQError as error:
                complete = False
                self._complaints.raise_(f"waiting for {topic}", error)
            else:
                complete = await self._update(topic, mine, route) and complete
                self._allocated.add(topic)
                if route.read_queues or topic.startswith(RETRY_PREFIX):
                    self._complaints.resolve(f"waiting for {topic}")
                else:
                    self._complaints.raise_(
                        f"waiting for {topic}", NoRouteError(topic, "none of its queues can be read now")
                    )
        self._progress.set()
        return complete

    async def _allocate(self, route: Route) -> list[MessageQueue]:
        """Return the queues of a topic that are allocated to this member."""
        # All brokers of the topic must know this member, since a member may ask any of them for the group's members.
        await self._client.beat(route.addresses - set(self._client.broker_addresses))
        if self._config.broadcasting:
            return list(route.read_queues)
        members = await self._api.members(route)
        return allocate_averagely(route.read_queues, members, self._client.client_id)

    async def _update(self, topic: str, mine: Iterable[MessageQueue], route: Route) -> bool:
        """Give up and take queues of a topic. `mine`: the queues that are allocated to this member. Return whether it
        has exactly these now. It has not if another member still holds the lock of one, or if this member keeps one
        whose messages are not finished."""
        wanted = set(mine)
        had = {queue for queue in self._readers if queue.topic == topic}
        lost = {queue for queue in had - wanted if self._has_finished_former(queue)}
        kept = (had - lost) & self._held_back
        self._held_back -= kept
        self._apply_pauses(kept)
        if self._locks is not None:
            lost |= {queue for queue in had if self._readers[queue][0].dropped}
        if lost:
            lost = await self._give_away(frozenset(lost))
            if self._stopped:
                return True
        news = wanted - (had - lost)
        if self._config.exclusive:
            news = {queue for queue in news if queue in had or not self._is_new(route.address(queue.broker))}
            if topic not in self._reclaimed:
                # A former process with this client id may have been killed while it held locks of these queues. This
                # member takes them, so that another member gets them only when the messages in hand are finished,
                # rather than when the locks expire.
                news |= set(route.read_queues) - had
                self._reclaimed.add(topic)
        if news and self._locks is not None:
            news = await self._locks.lock(news)
        if news:
            await self._take(frozenset(news))
        has = (had - lost) | news
        if has != had:
            log.info("%s now reads %d queues of %s; before: %d", self._config.group, len(has), topic, len(had))
        return has == wanted

    def _has_finished_former(self, queue: MessageQueue) -> bool:
        """Whether all messages of a queue are finished that a former process may have had in hand."""
        return self._readers[queue][0].has_finished(self._config.in_hand.get(queue, 0))

    async def _give_away(self, queues: frozenset[MessageQueue]) -> set[MessageQueue]:
        """Give queues up. Return the queues that are no longer this member's: an exclusive member keeps those whose
        handed-out messages are not finished within `close_timeout`."""
        self._held_back |= queues
        self._apply_pauses(queues)
        try:
            busy = await self._wait_until_idle(queues)
            if self._config.exclusive:
                queues, busy = queues - busy, set()
            self._revoked = queues
            await self._tell(self._config.on_revoked, "on_revoked", queues)
            if self._stopped:
                return set()  # the listener closed the consumer, which has given up all queues
            async with self._moving:
                await self._catch_up_with_group()
                for queue in queues:
                    await self._drop(queue)
        finally:
            self._held_back -= queues
            self._revoked = frozenset()
        if self._locks is not None:
            if busy:
                # Another member must not handle later messages while the handler runs: it gets the queue only when the
                # lock has expired.
                log.warning("handlers of %s have not ended: the lock is left to expire", ", ".join(map(str, busy)))
            self._locks.forget(busy)
            await self._locks.unlock(queues - busy)
        return set(queues)

    async def _wait_until_idle(self, queues: Iterable[MessageQueue]) -> set[MessageQueue]:
        """Wait until all handed-out messages of queues that are held back are finished, for an ordered or exclusive
        consumer; others do not wait. Return the queues for which this takes longer than `close_timeout`."""
        inbox = self._ordered_inbox
        if inbox is None and not self._config.exclusive:
            return set()
        try:
            async with timeouts.timeout(self._config.close_timeout):
                for queue in queues:
                    if inbox is not None:
                        await inbox.idle(queue)
                    while not self._is_idle(queue):
                        self._progress.clear()
                        await self._progress.wait()
        except TimeoutError:
            return {queue for queue in queues if not self._is_idle(queue)}
        return set()

    def _is_idle(self, queue: MessageQueue) -> bool:
        """Whether no message of a queue that is held back is handed out and unfinished."""
        if self._ordered_inbox is not None:
            return self._ordered_inbox.is_idle(queue)
        return queue not in self._readers or self._readers[queue][0].unfinished <= self.inbox.set_aside(queue)

    async def _take(self, queues: frozenset[MessageQueue]) -> None:
        self._held_back |= queues
        try:
            async with self._moving:
                for queue in sorted(queues):
                    self._add(queue)
            self._progress.set()
            await self._tell(self._config.on_assigned, "on_assigned", queues)
        finally:
            self._held_back -= queues
            self._apply_pauses(queues)

    async def _tell(self, listener: Listener | None, name: str, queues: frozenset[MessageQueue]) -> None:
        """Call a listener with queues, without those of the retry topic. A listener must not hold up the group: if it
        raises, or exceeds `close_timeout`, this is logged."""
        queues = frozenset(queue for queue in queues if not queue.topic.startswith(RETRY_PREFIX))
        if listener is None or not queues:
            return
        try:
            async with timeouts.timeout(self._config.close_timeout):
                await listener(queues)
        except TimeoutError:
            log.warning("%s did not return within %g s, and was cancelled", name, self._config.close_timeout)
        except BaseException as error:
            if is_passed_on(error):
                raise
            # Whatever the listener raises must not keep the queues from moving.
            log.exception("%s failed", name)

    def _reconnected(self, address: str) -> None:
        """Handle that a connection to a broker was reopened, since the broker may have been restarted: the next offset
        of each topic is stored alone again, and an exclusive member claims its queues."""
        self._broker_offsets.forget_tables()
        if self._config.exclusive and not self._stopped:
            self._reconnected_at[address] = self._config.monotonic()
            self._tasks.start(self._claim(), "duemq claims queues")

    def _is_new(self, address: str | None) -> bool:
        """Whether the connection to a broker was reopened so recently that other members may not have claimed their
        queues yet."""
        since = self._reconnected_at.get(address or "", -math.inf)
        return self._config.monotonic() < since + self._config.intervals.claims

    async def _claim(self) -> None:
        """Claim the present queues. A broker that was killed no longer knows locks and members, and its offsets are
        seconds old. Before another member may take a queue, the member that had it locks it and stores its offset, so
        that no message is handed out again by the other member."""
        assert self._locks is not None
        await self._locks.lock(list(self._readers))
        await self.commit(even_unchanged=True)

    async def _renew_locks_forever(self) -> None:
        assert self._locks is not None
        while True:
            await asyncio.sleep(self._config.intervals.lock / (4 if self._locks.is_failing else 1))
            await self._locks.lock(list(self._readers))
            if any(reader.dropped for reader, _ in self._readers.values()):
                self._change.set()  # the rebalance gives these queues up, and requests their locks again

    def _apply_pauses(self, queues: Iterable[MessageQueue]) -> None:
        for queue in queues:
            if queue not in self._readers:
                continue
            reader, _ = self._readers[queue]
            if self._is_paused(queue) or queue in self._held_back:
                reader.pause()
            else:
                reader.resume()

    def _is_paused(self, queue: MessageQueue) -> bool:
        return queue in self._paused or (queue.topic in self._paused and queue not in self._resumed)

    def _add(self, queue: MessageQueue, begin: int | None = None) -> None:
        reader = QueueReader(
            queue,
            self,
            self._config,
            api=self._api,
            offsets=self._offsets,
            inbox=self.inbox,
            locks=self._locks,
            complaints=self._complaints,
            progress=self._progress,
            begin=begin,
        )
        task = self._tasks.supervise(reader.run, f"duemq reader {queue}", self._config.intervals)
        self._readers[queue] = reader, task
        self._apply_pauses((queue,))

    async def _drop(self, queue: MessageQueue) -> None:
        reader, task = self._readers.pop(queue)
        offset = reader.offset_to_commit(even_unchanged=False)
        reader.dropped = True
        task.cancel()
        self.inbox.discard(queue)
        if offset is not None:
            await self._save({queue: offset})

    async def _catch_up_with_group(self) -> None:
        """Before offsets are stored: find queues whose broker was silent for long and in which other members have
        continued in the meantime, and read them from the group's offset on. The caller holds `_moving`."""
        readers = [reader for reader, _ in self._readers.values() if reader.has_to_check]
        who = "requesting the group's offsets"
        try:
            for error in await asyncio.gather(*(reader.check() for reader in readers), return_exceptions=True):
                if error is not None:
                    raise error
        except (DueMQError, OSError) as error:
            self._complaints.raise_(who, error)
        else:
            self._complaints.resolve(who)
        for reader in readers:
            if reader.dropped:
                self._begin_anew(reader)

    async def _begin_anew_in_turn(self, reader: QueueReader) -> None:
        async with self._moving:
            self._begin_anew(reader)

    def _begin_anew(self, reader: QueueReader) -> None:
        """Read a queue from the group's offset on. Does nothing if the queue now has another reader or none. The caller
        holds `_moving`."""
        queue = reader.queue
        if queue not in self._readers or self._readers[queue][0] is not reader:
            return
        if self._locks is not None and not self._locks.holds(queue):
            self._change.set()  # the rebalance requests its lock before it is read again
            return
        log.warning(
            "%s had no answer about %s for over %g s, and the group has continued without this member: reading "
            "continues at the group's offset",
            self._config.group,
            queue,
            self._config.intervals.expiry,
        )
        _, task = self._readers.pop(queue)
        reader.dropped = True
        task.cancel()
        self.inbox.discard(queue)
        self._add(queue)

    async def _look_up_topics(self) -> None:
        """Find the routes of all topics and the offsets at which a new group begins: a wrong address of the name server
        makes the start fail, and all messages sent after the start are read."""
        await asyncio.gather(*(self._look_up(topic) for topic in self._subscriptions))

    async def _look_up(self, topic: str) -> None:
        try:
            await self._client.routes.find(topic)
        except NoRouteError:
            # A topic that is created after this start is read from its beginning, even if `start` is "last".
            self._starts.begin_without(topic)
            return
        try:
            await self._starts.begin_with(topic)
        except DueMQError as error:
            # If a broker does not answer now, the request is repeated when its queues are read.
            log.debug("the offsets at which to begin with %s are not known yet: %s", topic, error)

    def _check_running(self) -> None:
        if self._stopped:
            raise ClosedError("the consumer is closed")

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
            self._complaints.raise_(STORING_OFFSETS, error)
            return
        self._complaints.resolve(STORING_OFFSETS)
        for queue, offset in offsets.items():
            if queue in self._readers:
                self._readers[queue][0].committed(offset)

    async def _go_elsewhere(self, offsets: dict[MessageQueue, int], why: str) -> None:
        """Continue at other offsets in this member's queues. Messages that were read and are unfinished are dropped."""
        async with self._moving:
            mine = {queue: offset for queue, offset in offsets.items() if queue in self._readers}
            for queue in mine:
                reader, task = self._readers.pop(queue)
                reader.dropped = True
                task.cancel()
                self.inbox.discard(queue)
            for queue, offset in sorted(mine.items()):
                log.info("%s now reads %s from offset %d on, %s", self._config.group, queue, offset, why)
                self._add(queue, offset)
            await self._save(mine)

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
            log.error("cannot read a broker's request to reset offsets: %s", error)
            return
        if header.group != self._config.group or self._stopped:
            return
        offsets = {MessageQueue(at.topic, at.broker_name, at.queue_id): offset for at, offset in table.items()}
        self._tasks.start(self._go_elsewhere(offsets, "as requested by an administrator"), "duemq reset of offsets")


def _topic_of(target: Target) -> str:
    return target if isinstance(target, str) else target.topic
