"""Locks on queues: which member of a consumer group may consume a queue in order. They are kept only in memory, as in
RocketMQ, and a lock ends 60 s after it was last renewed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Final

from duemq.broker.errors import LimitReached
from duemq.broker.limits import Limits
from duemq.protocol.codes import ResponseCode
from duemq.protocol.requests.bodies import BrokerQueue
from duemq.storage.clock import Clock

EXPIRE_SECONDS: Final = 60.0

HeldLock = tuple[tuple[str, BrokerQueue], tuple[str, float]]
"""The group and the queue of a lock; its owner (a client id) and renewal time (seconds, monotonic)."""


class QueueLocks:
    """All locks on queues of one broker."""

    def __init__(self, clock: Clock, limits: Limits) -> None:
        self._clock = clock
        self._limits = limits
        self._locks: OrderedDict[tuple[str, BrokerQueue], tuple[str, float]] = OrderedDict()
        """The owner and renewal time (seconds, monotonic) of each lock, by group and queue; the longest unrenewed
        first."""

    def lock(self, group: str, client_id: str, queues: Iterable[BrokerQueue]) -> list[BrokerQueue]:
        """Lock or renew queues; return those that the client now holds. Raises Refused if there would be too many locks
        in all."""
        now = self._clock.monotonic()
        locks = self._locks
        wanted = [(group, queue) for queue in queues]
        count = len(locks) + sum(key not in locks for key in wanted)
        if count > max(len(locks), self._limits.queue_locks):
            raise LimitReached(
                "maxQueueLocks",
                ResponseCode.SYSTEM_BUSY,
                f"[OVERLOAD]broker busy: {len(locks)} queues are locked, and maxQueueLocks={self._limits.queue_locks}. "
                "Try again later, or raise that setting",
            )
        held = []
        for key in wanted:
            owner, renewed = locks.get(key, ("", 0.0))
            if owner in ("", client_id) or now - renewed > EXPIRE_SECONDS:
                locks[key] = (client_id, now)
                locks.move_to_end(key)
                held.append(key[1])
        return held

    def held(self, group: str, client_id: str, queues: Iterable[BrokerQueue]) -> list[HeldLock]:
        """Return those locks on the queues that the client holds."""
        keys = [(group, queue) for queue in queues]
        found = [(key, self._locks[key]) for key in keys if key in self._locks]
        return [(key, lock) for key, lock in found if lock[0] == client_id]

    def release(self, held: Iterable[HeldLock]) -> None:
        """Release locks as `held` returned them, except those that have been renewed or have another owner since."""
        for key, lock in held:
            if self._locks.get(key) is lock:
                del self._locks[key]

    def expire(self) -> None:
        """Remove locks that are no longer renewed."""
        limit = self._clock.monotonic() - EXPIRE_SECONDS
        while self._locks:
            key, (_, renewed) = next(iter(self._locks.items()))
            if renewed >= limit:
                break
            del self._locks[key]
