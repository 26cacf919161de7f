"""INVOKE_BROKER_TO_RESET_OFFSET (222): an administrator moves an online consumer group to other offsets.

The broker computes the offsets and sends them to every member (RESET_CONSUMER_CLIENT_OFFSET, 220); the members drop
what they have pulled, commit the new offsets, and continue there. The broker itself changes nothing: a member that was
not notified would commit the old offset again.

Behaviour after apache/rocketmq broker/client/net/Broker2Client.java (4.9.7).
"""

from __future__ import annotations

from functools import partial
from typing import Final

import structlog

from duemq.broker.access.permission import OPERATE
from duemq.broker.errors import Refused
from duemq.broker.net.cold_reads import ColdReads
from duemq.broker.net.connection import Connection
from duemq.broker.net.router import Answer, Router
from duemq.broker.tables.clients import Clients, GroupMember
from duemq.broker.tables.consumer_offsets import ConsumerOffsets
from duemq.broker.tables.topics import Topics
from duemq.protocol.codes import VERSION_RESET_OFFSET, RequestCode, ResponseCode
from duemq.protocol.frames.command import Command
from duemq.protocol.requests.bodies import BrokerQueue, reset_offset_body
from duemq.protocol.requests.headers import Request, ResetOffset, response
from duemq.storage.store import MessageStore

log = structlog.get_logger(__name__)

_TO_THE_END: Final = -1
_ALL_QUEUES: Final = -1
_NO_OFFSET: Final = -1


class ResetOffsetHandlers:
    """Resets the offsets of consumer groups."""

    def __init__(
        self,
        *,
        broker_name: str,
        store: MessageStore,
        topics: Topics,
        offsets: ConsumerOffsets,
        clients: Clients,
        reads: ColdReads,
    ) -> None:
        self._broker_name = broker_name
        self._store = store
        self._topics = topics
        self._offsets = offsets
        self._clients = clients
        self._reads = reads

    def register(self, router: Router) -> None:
        """Add the handler to a router."""
        router.add(RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, ResetOffset, OPERATE, self.reset)

    async def reset(self, connection: Connection, request: Request[ResetOffset]) -> Answer:
        """Send all members of a group their new offsets, and answer with these."""
        header = request.header
        offsets = await self._new_offsets(header)
        members = self._members(header)
        notice = ResetOffset(header.topic, header.group, header.timestamp, header.is_force)
        for member in members:
            # The C++ client reads only lists. If the admin client is a C++ one, RocketMQ sends lists to all members.
            as_list = "CPP" in (request.language, member.language)
            body = reset_offset_body(offsets, as_list=as_list)
            member.connection.notify(
                Command(code=RequestCode.RESET_CONSUMER_CLIENT_OFFSET, ext=notice.to_ext(), body=body)
            )
        log.info(
            "offsets_reset",
            group=header.group,
            topic=header.topic,
            timestamp=header.timestamp,
            offsets={queue.queue_id: offset for queue, offset in offsets.items()},
            members=len(members),
            peer=connection.peer,
        )
        return response(ResponseCode.SUCCESS, body=reset_offset_body(offsets))

    async def _new_offsets(self, header: ResetOffset) -> dict[BrokerQueue, int]:
        """Return the group's new offset in each requested queue of the topic. Raises Refused."""
        topic = self._topics.get(header.topic)
        if topic is None:
            raise Refused(
                ResponseCode.SYSTEM_ERROR,
                f"[reset-offset] reset offset failed, no topic in this broker. topic={header.topic}",
            )
        queue_ids = range(topic.config.write_queue_nums)
        if header.queue_id is not None and header.queue_id > _ALL_QUEUES:
            if header.queue_id not in queue_ids:
                raise Refused(
                    ResponseCode.SYSTEM_ERROR, f"queueId={header.queue_id}: the topic has {len(queue_ids)} queues"
                )
            queue_ids = range(header.queue_id, header.queue_id + 1)
        offsets = await self._reads.each(partial(self._new_offset, header, queue_id) for queue_id in queue_ids)
        return {
            BrokerQueue(self._broker_name, queue_id, header.topic): offset
            for queue_id, offset in zip(queue_ids, offsets, strict=True)
        }

    def _new_offset(self, header: ResetOffset, queue_id: int) -> int:
        current = self._offsets.get(header.group, header.topic, queue_id)
        if current is None:
            raise Refused(ResponseCode.SYSTEM_ERROR, f"THe consumer group <{header.group}> not exist")
        queue = self._store.queue(header.topic, queue_id)
        low, high = (queue.min_offset, queue.next_offset) if queue is not None else (0, 0)
        if header.queue_id == queue_id and header.offset is not None and header.offset != _NO_OFFSET:
            if not low <= header.offset <= high:
                raise Refused(
                    ResponseCode.SYSTEM_ERROR,
                    f"Target offset {header.offset} not in consume queue range [{low}-{high}]",
                )
            return header.offset
        if queue is None or header.timestamp == _TO_THE_END:
            wanted = high
        else:
            wanted = self._store.offset_by_time(queue, header.timestamp)
        return wanted if header.is_force or wanted < current else current

    def _members(self, header: ResetOffset) -> list[GroupMember]:
        """Return the members of the group, all of which understand the notice. Raises Refused."""
        group = self._clients.consumers.get(header.group)
        members = list(group.members.values()) if group is not None else []
        if not members:
            raise Refused(
                ResponseCode.CONSUMER_NOT_ONLINE,
                f"Consumer not online, so can not reset offset, Group: {header.group} Topic: {header.topic} "
                f"Timestamp: {header.timestamp}",
            )
        for member in members:
            if member.version < VERSION_RESET_OFFSET:
                raise Refused(
                    ResponseCode.SYSTEM_ERROR,
                    f"the client does not support this feature. version={member.version}, client={member.client_id}",
                )
        return members
