"""The reader of one queue: it reads from the group's offset on, as long as this member has the queue."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Final, Literal, Protocol

import msgspec

from duemq._consuming.group import GroupApi, PullAnswer
from duemq._consuming.inbox import Inbox
from duemq._consuming.locks import HeldLocks
from duemq._consuming.offsets import OffsetStore, OffsetTracker
from duemq._consuming.subscription import Subscription
from duemq._net.complaints import Complaints
from duemq._values.intervals import Intervals
from duemq._values.times import Clock, now_ms
from duemq.errors import ArgumentError, DelayError, DueMQError
from duemq.messages import MessageQueue, ReceivedMessage, next_try

log = logging.getLogger("duemq.consumer")

Start = Literal["first", "last"] | int
"""Where a group without an offset begins: at the oldest message, after the newest, or at a time, ms since the epoch."""

FIRST: Final = "first"
LAST: Final = "last"

_CANCELLED: Final = "the call was cancelled"

DEAD_LETTER: Final = -1
"""The delay level with which a broker moves a message to the dead-letter topic instead of retrying it."""


class ReaderConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a consumer that the readers of its queues use. See `Consumer`."""

    ordered: bool
    max_reconsume_times: int
    max_ahead: int
    local_offsets: OffsetStore | None
    """Where a broadcasting member keeps its offsets; None for a clustering member."""
    intervals: Intervals = Intervals()
    clock: Clock = now_ms
    monotonic: Callable[[], float] = time.monotonic
    """A clock in seconds that cannot be set."""

    @property
    def broadcasting(self) -> bool:
        """Whether each member gets all messages."""
        return self.local_offsets is not None


class ReaderOwner(Protocol):
    """The member that a reader reads for."""

    def subscription(self, queue: MessageQueue) -> Subscription:
        """Return the present subscription to the topic of a queue. Called before each pull, since it may change."""

    async def start_of(self, queue: MessageQueue) -> int:
        """Return the offset at which to begin with a queue in which the group has no offset yet. Raises what the
        requests for offsets raise."""

    def overtaken(self, reader: QueueReader) -> None:
        """Called when a reader ends because the group has continued without it."""

    def sent_back(self) -> None:
        """Called when a message was sent back to the broker, for a retry or as a dead letter."""


class QueueReader:
    """Pulls a queue and puts the messages into the inbox.

    A process may stop for minutes: it or its machine is suspended, or a handler blocks the event loop. The broker then
    gives its queues to other members, and perhaps back later. Therefore a reader that has not heard from the broker for
    longer than `Intervals.expiry` requests the group's offset before it hands out messages or stores an offset."""

    def __init__(
        self,
        queue: MessageQueue,
        owner: ReaderOwner,
        config: ReaderConfig,
        *,
        api: GroupApi,
        offsets: OffsetStore,
        inbox: Inbox,
        locks: HeldLocks | None,
        complaints: Complaints,
        progress: asyncio.Event,
        begin: int | None,
    ) -> None:
        """`locks`: the member's locks, if it reads queues only while no other member can have them; otherwise None.
        `progress`: set whenever messages were read or finished. `begin`: the offset at which to begin, whatever the
        group's offset is; None to continue at the group's offset."""
        self.queue = queue
        self._owner = owner
        self._api = api
        self._offsets = offsets
        self._inbox = inbox
        self._locks = locks
        self._complaints = complaints
        self._progressed = progress.set
        self._begin = begin
        self._ordered = config.ordered
        self._broadcasting = config.broadcasting
        self._max_reconsume_times = config.max_reconsume_times
        self._max_ahead = config.max_ahead
        self._intervals = config.intervals
        self._clock = config.clock
        self._monotonic = config.monotonic
        self._dropped = False
        self._may_read = asyncio.Event()
        self._may_read.set()
        self._not_too_far_ahead = asyncio.Event()
        self._tracker: OffsetTracker | None = None
        self._committed = -1
        self._heard_at = config.monotonic()
        """When the broker last answered about this queue, by `monotonic`."""
        self._end: int | None = None
        self._hold = False

    @property
    def dropped(self) -> bool:
        """Whether this reader no longer has the queue, since another member has or had it or another reader replaced
        this one: its messages are no longer handled, nor their offsets committed."""
        if self._locks is not None and not self._dropped and not self._locks.holds(self.queue):
            self._dropped = True
        return self._dropped

    @dropped.setter
    def dropped(self, dropped: bool) -> None:
        self._dropped = dropped

    def pause(self) -> None:
        """Stop reading and handing out messages until `resume`."""
        self._may_read.clear()
        self._inbox.pause(self.queue)

    def resume(self) -> None:
        """Continue to read and to hand out messages."""
        self._may_read.set()
        self._inbox.resume(self.queue)

    @property
    def caught_up(self) -> bool:
        """Whether all messages are finished that were in the queue when this member got it."""
        return self._end is not None and self._tracker is not None and self._tracker.committable >= self._end

    def has_finished(self, offset: int) -> bool:
        """Whether all messages before an offset are finished that were in the queue when this member got it."""
        return not offset or self.caught_up or (self._tracker is not None and self._tracker.committable >= offset)

    @property
    def unfinished(self) -> int:
        """The number of messages that were read and are unfinished; 0 if they are no longer this member's."""
        return 0 if self.dropped or self._tracker is None else len(self._tracker)

    @property
    def is_silent(self) -> bool:
        """Whether the broker was silent for so long that another member may have the queue."""
        return self._monotonic() - self._heard_at > self._intervals.expiry

    @property
    def has_to_check(self) -> bool:
        """Whether there is an offset to be stored, but other members may have stored a newer one."""
        return self._tracker is not None and self._tracker.committable != self._committed and self.is_silent

    async def check(self) -> None:
        """If the broker was silent for long, find out whether the group has continued without this member or was reset
        to an earlier offset; this reader is then `dropped`. Raises what the request for the group's offset raises."""
        if self._tracker is None or not self.is_silent:
            return
        stored = await self._offsets.load(self.queue)
        if stored is not None and not self._committed <= stored <= self._tracker.committable:
            self.dropped = True
        self._heard_at = self._monotonic()

    def offset_to_commit(self, *, even_unchanged: bool) -> int | None:
        """Return the offset to be stored, or None if there is none, if it is already stored (unless `even_unchanged`),
        or if other members may have stored a newer one."""
        if self.dropped or self.is_silent:
            return None
        if self._tracker is None or (self._tracker.committable == self._committed and not even_unchanged):
            return None
        return self._tracker.committable

    def committed(self, offset: int) -> None:
        """Note that an offset was stored."""
        self._committed = offset

    @property
    def stored_offset(self) -> int | None:
        """The offset that this reader last found or stored; None if there is none yet."""
        return self._committed if self._committed >= 0 else None

    def ack(self, message: ReceivedMessage) -> None:
        """Mark a message as consumed; nothing if it is already settled."""
        if not message.settled:
            message.settled = True
            self._finish(message)

    async def retry(self, message: ReceivedMessage, level: int, delay_ms: int | None) -> None:
        """Have a message delivered to the group again, after the delay of a level, or after at least `delay_ms` if that
        is not None; nothing if it is already settled. Raises DelayError, and settles nothing, if no level is that long.
        See `ReceivedMessage.retry` for ordered and broadcasting consumers."""
        if message.settled:
            return
        if self._ordered:
            await self._retry_in_place(message, level, delay_ms)
            return
        message.settled = True
        if self._broadcasting:
            log.warning("dropping %r: a broadcasting consumer has no retries", message)
            self._finish(message)
            return
        if delay_ms is not None and not self.dropped:
            try:
                level = await self._api.retry_level(self.queue, delay_ms)
            except DelayError:
                message.settled = False
                raise
            except DueMQError as error:
                self._keep(message, str(error), delay_ms)
                return
            except asyncio.CancelledError:
                self._keep(message, _CANCELLED, delay_ms)
                raise
        await self._send_back(message, level, delay_ms or 0)

    async def dead_letter(self, message: ReceivedMessage) -> None:
        """Move a message to the dead-letter topic, or drop it for a broadcasting consumer; nothing if it is settled."""
        if message.settled:
            return
        message.settled = True
        if self._broadcasting:
            log.warning("dropping %r: a broadcasting consumer has no dead letters", message)
            self._finish(message)
            return
        await self._send_back(message, DEAD_LETTER, 0)

    async def _retry_in_place(self, message: ReceivedMessage, level: int, delay_ms: int | None) -> None:
        if level:
            raise ArgumentError("an ordered consumer retries a message in place: give delay=, not level=")
        if 0 <= self._max_reconsume_times <= message.reconsume_times:
            await self.dead_letter(message)
            return
        message.settled = True
        if self.dropped:
            self._finish(message)
            return
        pause = self._intervals.retry_in_place if delay_ms is None else delay_ms / 1000
        self._inbox.put_again(message, next_try(message, counts=True), pause)

    async def _send_back(self, message: ReceivedMessage, level: int, delay_ms: int) -> None:
        if not self.dropped:
            try:
                await self._api.send_back(message, level)
            except DueMQError as error:
                self._keep(message, str(error), delay_ms)
                return
            except asyncio.CancelledError:
                # Nobody knows whether the broker has the message; twice is better than never.
                self._keep(message, _CANCELLED, delay_ms)
                raise
            self._owner.sent_back()
        self._finish(message)

    def _keep(self, message: ReceivedMessage, why: str, delay_ms: int) -> None:
        """Have this member handle a message again that cannot be sent back, after at least `delay_ms`."""
        pause = max(self._intervals.retry_here, delay_ms / 1000)
        log.warning("cannot send %r back, handling it again in %g s: %s", message, pause, why)
        # A new object, since code that holds the present one must continue to see it as settled.
        self._inbox.put_again(message, next_try(message, counts=False), pause)

    def _finish(self, message: ReceivedMessage) -> None:
        self._inbox.release(message)
        if self._tracker is not None and not self.dropped:
            self._tracker.finish(message.queue_offset)
            if self._tracker.ahead < self._max_ahead:
                self._not_too_far_ahead.set()
            self._progressed()

    async def run(self) -> None:
        """Read until cancelled, or until the group has continued without this reader. A failure is logged once; reading
        is retried with growing pauses."""
        failures, who = 0, f"reading {self.queue}"
        while True:
            try:
                await self._step()
            except DueMQError as error:
                self._complaints.raise_(who, error)
            except asyncio.CancelledError:
                self._complaints.forget(who)
                self._complaints.forget(f"waiting for a message of {self.queue}")
                raise
            except Exception:
                # Whatever failed, the other queues are not affected, and this one is retried.
                log.exception("cannot read %s", self.queue)
            else:
                self._complaints.resolve(who)
                if self.dropped:
                    self._owner.overtaken(self)
                    return
                failures = 0
                continue
            failures += 1
            self._hold = False
            await asyncio.sleep(self._intervals.pause(failures))

    async def _step(self) -> None:
        if self._tracker is None:
            offset = await self._find_start()
            log.debug("reading %s from offset %d on", self.queue, offset)
            self._tracker = OffsetTracker(offset)
            self._heard_at = self._monotonic()
        await self._wait_for_the_slowest(self._tracker)
        await self._inbox.wait_for_room(self.queue)
        while not self._may_read.is_set():
            await self._may_read.wait()
            # `resume` has put back the messages that were set aside, so the inbox may be full now.
            await self._inbox.wait_for_room(self.queue)
        await self._pull(self._tracker)

    async def _wait_for_the_slowest(self, tracker: OffsetTracker) -> None:
        """Wait while too many messages are finished beyond an unfinished one."""
        who = f"waiting for a message of {self.queue}"
        while tracker.ahead >= self._max_ahead:
            self._complaints.raise_(
                who,
                f"the message at offset {tracker.committable} is unfinished, but {tracker.ahead} after it are "
                "finished. Reading of this queue pauses until it is finished",
            )
            self._not_too_far_ahead.clear()
            await self._not_too_far_ahead.wait()
        self._complaints.resolve(who)

    async def _pull(self, tracker: OffsetTracker) -> None:
        loop = asyncio.get_running_loop()
        begin, asked = loop.time(), tracker.next_offset
        # The broker does not hold the first pull, so that its answer reports the end of the queue immediately; nor the
        # first pull after a failure, so that its answer shows immediately that the failure is over.
        hold, self._hold = self._hold, True
        pulled = await self._api.pull(self.queue, asked, self._owner.subscription(self.queue), hold=hold)
        await self.check()
        if self.dropped:
            return
        self._heard_at = self._monotonic()
        if self._end is None:
            self._end = pulled.end_offset
        if pulled.moved:
            log.warning(
                "%s no longer has a message at offset %d, continuing at %d", self.queue, asked, pulled.next_offset
            )
            tracker.reset(pulled.next_offset)
            self._end = min(self._end, pulled.end_offset)
        else:
            self._take(tracker, pulled)
        self._progressed()
        if hold and tracker.next_offset == asked:
            # If a broker does not hold pulls, do not pull in a tight loop.
            await asyncio.sleep(max(0.0, self._intervals.first_pause - (loop.time() - begin)))

    def _take(self, tracker: OffsetTracker, pulled: PullAnswer) -> None:
        """Note the messages and put them into the inbox, without an await in between, so that no commit sees a state in
        which only one of the two is done."""
        subscription, now = self._owner.subscription(self.queue), self._clock()
        received = [ReceivedMessage(stored, self.queue, now, self) for stored in pulled.messages]
        wanted = received
        if subscription.tags:
            wanted = [message for message in received if subscription.wants(message.tags)]
        tracker.read([message.queue_offset for message in wanted], pulled.next_offset)
        self._inbox.put(wanted)

    async def _find_start(self) -> int:
        if self._begin is not None:
            return self._begin
        stored = await self._offsets.load(self.queue)
        if stored is not None:
            self._committed = stored
            return stored
        return await self._owner.start_of(self.queue)
