"""Locks on queues: who of a consumer group may consume a queue in order. Held in memory, as in RocketMQ: a lock ends
60 s after it was last renewed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from protocol.bodies import MessageQueue
from storage.clock import Clock

EXPIRE_SECONDS: Final = 60.0


class QueueLocks:
    """All locks, by group and queue."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._locks: dict[str, dict[MessageQueue, tuple[str, float]]] = {}

    def lock(self, group: str, client_id: str, queues: Iterable[MessageQueue]) -> list[MessageQueue]:
        """Lock queues, or renew; gives those that the client holds now."""
        now = self._clock.monotonic()
        locks = self._locks.setdefault(group, {})
        held = []
        for queue in queues:
            owner, renewed = locks.get(queue, ("", 0.0))
            if owner in ("", client_id) or now - renewed > EXPIRE_SECONDS:
                locks[queue] = (client_id, now)
                held.append(queue)
        return held

    def unlock(self, group: str, client_id: str, queues: Iterable[MessageQueue]) -> None:
        """Give up what the client holds of some queues."""
        locks = self._locks.get(group, {})
        for queue in queues:
            if queue in locks and locks[queue][0] == client_id:
                del locks[queue]

    def expire(self) -> None:
        """Forget locks that nobody renews."""
        now = self._clock.monotonic()
        for group, locks in list(self._locks.items()):
            for queue in [queue for queue, (_, renewed) in locks.items() if now - renewed > EXPIRE_SECONDS]:
                del locks[queue]
            if not locks:
                del self._locks[group]
