"""The locks on the queues of an ordered consumer: while a member holds one, no other member gets the queue.

The broker keeps a lock for one member of a group, for 60 s from its last renewal. Like RocketMQ's clients
(ProcessQueue.java, RebalanceImpl.java at 4.9.7), a member renews its locks every 20 s, and trusts each for 30 s from
the time when it requested it: if the process stops for minutes, other members get its queues. An exclusive member
trusts a lock for 55 s, since losing a queue needlessly costs it more.
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


class HeldLocks:
    """The locks that this member holds."""

    def __init__(self, api: GroupApi, life: float, monotonic: Callable[[], float], complaints: Complaints) -> None:
        """`life`: how long this member trusts a lock after its last request, in seconds. `monotonic`: a clock in
        seconds that cannot be set."""
        self._api = api
        self._life = life
        self._monotonic = monotonic
        self._complaints = complaints
        self._since: dict[MessageQueue, float] = {}
        """When this member last requested each lock that it has, by `monotonic`."""
        self._to_release: set[MessageQueue] = set()
        """Queues whose locks the broker may keep for this member: it was asked for them, and has not confirmed that it
        refused or released them, perhaps since the request was cancelled."""
        self._failing: set[str] = set()
        """The names of the brokers that did not answer the last request."""

    @property
    def is_failing(self) -> bool:
        """Whether a broker did not answer the last request, so that the locks there will soon expire."""
        return bool(self._failing)

    def holds(self, queue: MessageQueue) -> bool:
        """Whether this member holds the lock of a queue, so that no other member can have the queue now."""
        since = self._since.get(queue)
        return since is not None and self._monotonic() - since < self._life

    async def lock(self, queues: Iterable[MessageQueue]) -> set[MessageQueue]:
        """Lock queues, or renew their locks; return the queues whose locks this member holds. Errors of a broker are
        logged; the locks there stay as they were until they expire."""
        wanted = _by_broker(queues)
        await asyncio.gather(*(self._lock(broker, each) for broker, each in wanted.items()))
        return {queue for each in wanted.values() for queue in each if self.holds(queue)}

    async def unlock(self, queues: Iterable[MessageQueue]) -> None:
        """Release locks, so that other members get the queues immediately. Errors of brokers are logged, not raised:
        the locks then expire by themselves."""
        wanted = _by_broker(queues)
        for each in wanted.values():
            for queue in each:
                self._since.pop(queue, None)
        unlocking = (self._api.unlock(broker, each) for broker, each in wanted.items())
        for each, error in zip(wanted.values(), await asyncio.gather(*unlocking, return_exceptions=True), strict=True):
            if error is None:
                self._to_release -= each
            elif isinstance(error, DueMQError):
                log.warning("cannot unlock queues; other members get them when the locks expire: %s", error)
            else:
                raise error

    async def unlock_all(self) -> None:
        """Release all locks that the broker may keep for this member. Errors are logged, as by `unlock`."""
        await self.unlock(self._to_release)

    def forget(self, queues: Iterable[MessageQueue]) -> None:
        """Count these locks as not held. The broker is not notified: it keeps them until they expire."""
        for queue in queues:
            self._since.pop(queue, None)
            self._to_release.discard(queue)

    async def _lock(self, broker: str, queues: set[MessageQueue]) -> None:
        asked, who = self._monotonic(), f"locking queues of {broker}"
        self._to_release |= queues
        try:
            held = await self._api.lock(broker, queues)
        except DueMQError as error:
            self._complaints.raise_(who, error)
            self._failing.add(broker)
            return
        self._failing.discard(broker)
        self._complaints.resolve(who)
        for queue in queues:
            if queue in held:
                self._since[queue] = asked
            else:
                self._since.pop(queue, None)
                self._to_release.discard(queue)


def _by_broker(queues: Iterable[MessageQueue]) -> dict[str, set[MessageQueue]]:
    found = defaultdict[str, set[MessageQueue]](set)
    for queue in queues:
        found[queue.broker].add(queue)
    return found
