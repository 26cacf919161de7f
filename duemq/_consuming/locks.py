"""The locks on the queues of an ordered consumer: while a member holds one, no other member gets the queue.

The broker keeps them: 60 s from the last renewal on, for one member of a group. As RocketMQ's clients do (ProcessQueue
.java, RebalanceImpl.java at 4.9.7), a member renews them every 20 s, and trusts one for 30 s from the time at which it
asked for it: a process may stop for minutes, and others have its queues then. An exclusive member trusts one for 55 s:
to lose a queue for nothing costs it more.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable

from duemq._consuming.group import GroupApi
from duemq._net.complaints import Complaints
from duemq.errors import DueMQError
from duemq.messages import MessageQueue

log = logging.getLogger("duemq.consumer")


class QueueLocks:
    """The locks that this member holds. `monotonic` is in seconds."""

    def __init__(self, api: GroupApi, life: float, monotonic: Callable[[], float], complaints: Complaints) -> None:
        """`life`: time in seconds after its renewal for which a lock counts."""
        self._api = api
        self._life = life
        self._monotonic = monotonic
        self._complaints = complaints
        self._since: dict[MessageQueue, float] = {}
        """When the present locks were asked for."""
        self._failing: set[str] = set()
        """Brokers that did not answer last time."""

    @property
    def is_failing(self) -> bool:
        """Whether a broker did not answer when it was last asked, so that locks soon count no more."""
        return bool(self._failing)

    def holds(self, queue: MessageQueue) -> bool:
        """Whether no other member can have the queue now."""
        since = self._since.get(queue)
        return since is not None and self._monotonic() - since < self._life

    async def lock(self, queues: Iterable[MessageQueue]) -> set[MessageQueue]:
        """Lock queues, or renew their locks; return those that this member holds. What goes wrong is logged: the locks
        at that broker stay as they were, until they have expired."""
        wanted = _by_broker(queues)
        await asyncio.gather(*(self._lock(broker, each) for broker, each in wanted.items()))
        return {queue for each in wanted.values() for queue in each if self.holds(queue)}

    async def unlock(self, queues: Iterable[MessageQueue]) -> None:
        """Give locks back, so that another member gets the queues at once. Does not raise: they expire by themselves
        otherwise."""
        wanted = _by_broker(queues)
        self.forget(queue for each in wanted.values() for queue in each)
        unlocking = (self._api.unlock(broker, each) for broker, each in wanted.items())
        for error in await asyncio.gather(*unlocking, return_exceptions=True):
            if isinstance(error, DueMQError):
                log.warning("cannot unlock queues, which other members get when the lock expires: %s", error)
            elif error is not None:
                raise error

    def forget(self, queues: Iterable[MessageQueue]) -> None:
        """Renew the locks no longer."""
        for queue in queues:
            self._since.pop(queue, None)

    async def _lock(self, broker: str, queues: set[MessageQueue]) -> None:
        asked, who = self._monotonic(), f"locking queues of {broker}"
        try:
            held = await self._api.lock(broker, queues)
        except DueMQError as error:
            self._complaints.raise_(who, str(error))
            self._failing.add(broker)
            return
        self._failing.discard(broker)
        self._complaints.resolve(who)
        for queue in queues:
            if queue in held:
                self._since[queue] = asked
            else:
                self._since.pop(queue, None)


def _by_broker(queues: Iterable[MessageQueue]) -> dict[str, set[MessageQueue]]:
    found = defaultdict[str, set[MessageQueue]](set)
    for queue in queues:
        found[queue.broker].add(queue)
    return found
