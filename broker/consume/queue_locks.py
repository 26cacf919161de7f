"""Locks on queues, by which one member of an ordered group has a queue for itself: LOCK_BATCH_MQ (41), UNLOCK_BATCH_MQ
(42)."""

from __future__ import annotations

from contextlib import suppress

from duemq.broker.access.permission import LOCKS
from duemq.broker.errors import Refused
from duemq.broker.limits import MAX_CLIENT_ID_LENGTH, MAX_NAME_LENGTH
from duemq.broker.net.connection import Connection
from duemq.broker.net.router import Answer, Router
from duemq.broker.tables.consumer_offsets import ConsumerOffsets
from duemq.broker.tables.locks import QueueLocks
from duemq.protocol.codes import RequestCode, ResponseCode
from duemq.protocol.frames import fastjson
from duemq.protocol.requests import bodies
from duemq.protocol.requests.bodies import LockBatch
from duemq.protocol.requests.headers import NoFields, Request, response


class QueueLockHandlers:
    """Locks and unlocks queues for clients."""

    def __init__(self, offsets: ConsumerOffsets, locks: QueueLocks) -> None:
        self._offsets = offsets
        self._locks = locks

    def register(self, router: Router) -> None:
        """Add the handlers to a router."""
        router.add(RequestCode.LOCK_BATCH_MQ, NoFields, LOCKS, self.lock)
        router.add(RequestCode.UNLOCK_BATCH_MQ, NoFields, LOCKS, self.unlock)

    def lock(self, _: Connection, request: Request[NoFields]) -> Answer:
        """Lock queues for a client; return those that it holds."""
        body = _lock_batch(request)
        held = self._locks.lock(body.consumer_group, body.client_id, body.mq_set or ())
        return response(ResponseCode.SUCCESS, body=fastjson.dumps({"lockOKMQSet": [queue.to_json() for queue in held]}))

    async def unlock(self, _: Connection, request: Request[NoFields]) -> Answer:
        """Unlock queues once the group's offsets are on the disk, so that the next member begins at them even if the
        broker is killed before that member has read them."""
        body = _lock_batch(request)
        held = self._locks.held(body.consumer_group, body.client_id, body.mq_set or ())
        if held:
            with suppress(OSError):  # the failure is in the log, and the table is written again
                await self._offsets.save()
        self._locks.release(held)
        return response(ResponseCode.SUCCESS)


def _lock_batch(request: Request[NoFields]) -> LockBatch:
    """Return the body of a request. Raises Refused for names too long to keep."""
    body = bodies.decode_request(request.body, LockBatch)
    names = [body.consumer_group]
    for queue in body.mq_set or ():
        names += queue.topic, queue.broker_name
    if max(map(len, names)) > MAX_NAME_LENGTH or len(body.client_id) > MAX_CLIENT_ID_LENGTH:
        raise Refused(
            ResponseCode.SYSTEM_ERROR,
            f"the name of a group, a topic or a broker has at most {MAX_NAME_LENGTH} characters, a client id "
            f"{MAX_CLIENT_ID_LENGTH}",
        )
    return body
