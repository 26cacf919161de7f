"""Pulls that wait for messages. The append itself wakes them, once for all messages of one turn of the event loop;
nothing polls.

A held pull costs about a kilobyte. Their number is bounded, and a pull beyond it is answered immediately. A client that
does not read its responses gets no messages pushed into its buffer: its pulls stay held until it reads again or their
time is up.

Up to 100,000 pulls may belong to one queue, to one second, or to one client that leaves: work for many pulls is
therefore done in turns (see `request_turns`).

A held pull belongs to a queue object. When its topic is deleted, that object never gets a message again: a later topic
of the same name has new queue objects. So the pulls of a deleted topic end immediately.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final, TypeVar

from duemq.broker.net.connection import Connection
from duemq.broker.net.request_turns import IsOver, RequestTurns
from duemq.protocol.requests.headers import PullMessage, Request
from duemq.storage.queues.consume_queue import ConsumeQueue

MAX_HOLD_SECONDS: Final = 60.0


class HeldPull:
    """A waiting pull. `offset` is where to look next, at first the pull's own offset: the messages before it have been
    looked at and did not match."""

    __slots__ = ("codes", "connection", "deadline", "is_held", "offset", "queue", "request")

    def __init__(
        self,
        connection: Connection,
        request: Request[PullMessage],
        queue: ConsumeQueue,
        codes: frozenset[int] | None,
        deadline: float,
    ) -> None:
        self.connection = connection
        self.request = request
        self.queue = queue
        self.offset = request.header.queue_offset
        self.codes = codes
        self.deadline = deadline
        self.is_held = False
        """Whether the pull waits now."""

    @property
    def second(self) -> int:
        """The second at whose end the pull is answered at the latest."""
        return int(self.deadline) + 1


class LongPolls:
    """All held pulls. `serve` answers a pull if there are messages for it, and returns whether it did; `expire` answers
    that there are none; `check` raises if the pull is no longer allowed; `fail` answers with the error that one of
    these three raised."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        turns: RequestTurns,
        *,
        capacity: Callable[[], int],
        serve: Callable[[HeldPull], bool],
        expire: Callable[[HeldPull], None],
        check: Callable[[HeldPull], None],
        fail: Callable[[HeldPull, Exception], None],
    ) -> None:
        self._loop = loop
        self._turns = turns
        self._capacity = capacity
        """Returns how many pulls may wait at present; pulls that already wait stay."""
        self._serve = serve
        self._expire = expire
        self._check = check
        self._fail = fail
        self._held: dict[ConsumeQueue, dict[HeldPull, None]] = {}
        self._queues: dict[str, dict[ConsumeQueue, None]] = {}
        """The queues that pulls wait for, by topic."""
        self._by_second: dict[int, dict[HeldPull, None]] = {}
        self._by_connection: dict[Connection, dict[HeldPull, None]] = {}
        self._passed_over: dict[Connection, dict[HeldPull, None]] = {}
        """Pulls to serve when their connections take answers again, because messages arrived meanwhile."""
        self._woken: dict[ConsumeQueue, None] = {}
        self._to_wake: deque[ConsumeQueue] = deque()
        """Queues that got messages; refilled with all of `_woken` when it is empty. As in the queues of work below, a
        pull may no longer be held when its turn comes."""
        self._to_serve: deque[HeldPull] = deque()
        """The pulls of one woken queue that are still to be served."""
        self._to_leave: deque[ConsumeQueue] = deque()
        """Queues that can no longer be pulled from."""
        self._to_end: deque[HeldPull] = deque()
        """Pulls of such queues, and pulls whose time is up; they are still to be answered."""
        self._to_check: deque[HeldPull] = deque()
        """Pulls that may no longer be allowed. None is answered before all of them are checked."""
        self._to_forget: deque[HeldPull] = deque()
        """Pulls of lost connections that are still to be removed."""
        self._has_work = False
        self._timer: asyncio.TimerHandle | None = None
        self.count = 0
        """The number of waiting pulls."""

    def hold(self, pull: HeldPull) -> bool:
        """Let a pull wait for its queue; return False if too many wait already."""
        if self.count >= self._capacity():
            return False
        self.count += 1
        pull.is_held = True
        held = self._held.get(pull.queue)
        if held is None:
            self._held[pull.queue] = {pull: None}
            self._queues.setdefault(pull.queue.topic, {})[pull.queue] = None
            pull.queue.watch(self._arrived)
        else:
            held[pull] = None
        self._by_second.setdefault(pull.second, {})[pull] = None
        self._by_connection.setdefault(pull.connection, {})[pull] = None
        if self._timer is None:
            self._timer = self._loop.call_later(1.0, self._tick)
        return True

    def connection_lost(self, connection: Connection) -> None:
        """Remove the pulls of a lost connection."""
        self._passed_over.pop(connection, None)
        pulls = self._by_connection.pop(connection, None)
        if pulls is not None:
            self._to_forget.extend(pulls)
            self._begin()

    def end(self, topic: str, first_queue_id: int = 0) -> None:
        """Answer the pulls that wait for a topic's queues from a queue id on, because these can no longer be pulled
        from."""
        queues = [queue for queue in self._queues.get(topic, ()) if queue.queue_id >= first_queue_id]
        if queues:
            self._to_leave.extend(queues)
            self._begin()

    def check_all(self) -> None:
        """Answer the pulls that are no longer allowed, because accounts have changed."""
        self._to_check.clear()
        for pulls in self._held.values():
            self._to_check.extend(pulls)
        if self._to_check:
            self._begin()

    def stop(self) -> None:
        """Answer all pulls."""
        if self._timer is not None:
            self._timer.cancel()
        for pulls in list(self._held.values()):
            for pull in list(pulls):
                self._end(pull)

    def work(self, is_over: IsOver) -> bool:
        """Serve, end or remove pulls until `is_over`. Returns False: if pulls are left, this has queued itself again,
        as little work. Does not raise."""
        while True:
            if self._to_forget:
                self._forget(self._to_forget.popleft())
            if self._to_check:
                self._check_one(self._to_check.popleft())
                if is_over():
                    self._turns.add(self, is_little=True)
                    return False
                continue
            if self._to_end:
                self._end(self._to_end.popleft())
            elif self._to_leave:
                self._to_end.extend(self._held.get(self._to_leave.popleft(), ()))
            if self._to_serve:
                self._serve_one(self._to_serve.popleft())
            elif self._to_wake:
                self._to_serve.extend(self._held.get(self._to_wake.popleft(), ()))
            elif self._woken:
                self._to_wake.extend(self._woken)
                self._woken = {}
            elif not self._to_forget and not self._to_end and not self._to_leave:
                self._has_work = False
                return False
            if is_over():
                # Each waiting pull is little work, however many there are.
                self._turns.add(self, is_little=True)
                return False

    # ---

    def _begin(self) -> None:
        if not self._has_work:
            self._has_work = True
            self._turns.add(self, is_little=True)

    def _arrived(self, queue: ConsumeQueue) -> None:
        self._woken[queue] = None
        self._begin()

    def _check_one(self, pull: HeldPull) -> None:
        if not pull.is_held:
            return
        try:
            self._check(pull)
        except Exception as error:
            self._forget(pull)
            self._fail(pull, error)

    def _serve_one(self, pull: HeldPull) -> None:
        if not pull.is_held:
            return
        if not pull.connection.takes_answers:
            self._pass_over(pull)
            return
        try:
            is_served = self._serve(pull)
        except Exception as error:  # the other pulls must still be served
            self._fail(pull, error)
            is_served = True
        if is_served:
            self._forget(pull)

    def _pass_over(self, pull: HeldPull) -> None:
        pulls = self._passed_over.get(pull.connection)
        if pulls is None:
            self._passed_over[pull.connection] = {pull: None}
            pull.connection.when_takes_answers(self._takes_answers)
        else:
            pulls[pull] = None

    def _takes_answers(self, connection: Connection) -> None:
        self._to_serve.extend(self._passed_over.pop(connection, ()))
        if self._to_serve:
            self._begin()

    def _forget(self, pull: HeldPull) -> None:
        if not pull.is_held:
            return
        pull.is_held = False
        self.count -= 1
        _take_out(self._by_second, pull.second, pull)
        _take_out(self._by_connection, pull.connection, pull)
        _take_out(self._passed_over, pull.connection, pull)
        if _take_out(self._held, pull.queue, pull):
            _take_out(self._queues, pull.queue.topic, pull.queue)
            pull.queue.unwatch(self._arrived)

    def _tick(self) -> None:
        """Run once a second while pulls wait: queue those whose time is up for their answer."""
        now = self._loop.time()
        for second in [second for second in self._by_second if second <= now]:
            self._to_end.extend(self._by_second.pop(second))
        if self._to_end:
            self._begin()
        self._timer = self._loop.call_later(1.0, self._tick) if self._by_second else None

    def _end(self, pull: HeldPull) -> None:
        if not pull.is_held:
            return
        self._forget(pull)
        try:
            self._expire(pull)
        except Exception as error:
            self._fail(pull, error)


K = TypeVar("K")
T = TypeVar("T")


def _take_out(table: dict[K, dict[T, None]], key: K, member: T) -> bool:
    """Take a pull or a queue out of its group in a table, if the group exists; return whether the group is now
    empty."""
    members = table.get(key)
    if members is None:
        return False
    members.pop(member, None)
    if members:
        return False
    del table[key]
    return True
