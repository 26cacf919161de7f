"""Requests of administrators about connected clients: lists of clients, and requests that are relayed to a client."""

from __future__ import annotations

import asyncio
from typing import Any, Final

import msgspec

from duemq.broker.access.permission import LOOK, OPERATE
from duemq.broker.errors import Refused
from duemq.broker.net.cold_reads import ColdReads
from duemq.broker.net.connection import Connection
from duemq.broker.net.router import Answer, Router
from duemq.broker.settings.live_settings import LiveSettings
from duemq.broker.tables.clients import Clients, GroupMember
from duemq.protocol.codes import VERSION_RELAY, RequestCode, ResponseCode
from duemq.protocol.errors import RemoteProtocolError
from duemq.protocol.frames import fastjson
from duemq.protocol.frames.command import Command
from duemq.protocol.records.message_id import parse_offset_message_id
from duemq.protocol.records.properties import tags_in
from duemq.protocol.requests import headers
from duemq.protocol.requests.headers import NoFields, Request, response
from duemq.storage.store import MessageStore

RELAY_SECONDS: Final = 10.0


class ConnectionHandlers:
    """Handles the requests of RocketMQ's admin API about connected clients."""

    def __init__(self, settings: LiveSettings, store: MessageStore, clients: Clients, reads: ColdReads) -> None:
        self._settings = settings
        self._store = store
        self._clients = clients
        self._reads = reads

    def register(self, router: Router) -> None:
        """Add the handlers to a router."""
        add = router.add
        add(RequestCode.GET_CONSUMER_CONNECTION_LIST, headers.ConsumerGroupName, LOOK, self.consumer_connections)
        add(RequestCode.GET_PRODUCER_CONNECTION_LIST, headers.ProducerGroupName, LOOK, self.producer_connections)
        add(RequestCode.GET_ALL_PRODUCER_INFO, NoFields, LOOK, self.all_producers)
        add(RequestCode.GET_CONSUMER_RUNNING_INFO, headers.RelayToConsumer, LOOK, self.running_info)
        add(RequestCode.CONSUME_MESSAGE_DIRECTLY, headers.RelayToConsumer, OPERATE, self.consume_directly)

    def consumer_connections(self, _: Connection, request: Request[headers.ConsumerGroupName]) -> Answer:
        """Return the online members of a consumer group, and its subscriptions."""
        group = self._clients.consumers.get(request.header.consumer_group)
        if group is None:
            raise Refused(
                ResponseCode.CONSUMER_NOT_ONLINE, f"the consumer group[{request.header.consumer_group}] not online"
            )
        body = {
            "connectionSet": [_connection(member) for member in group.members.values()],
            "consumeFromWhere": group.consume_from_where,
            "consumeType": group.consume_type,
            "messageModel": group.message_model,
            "subscriptionTable": {
                topic: {
                    **msgspec.to_builtins(subscription.data),
                    "codeSet": sorted(subscription.codes or ()),
                    "tagsSet": _tags(subscription.data.sub_string),
                }
                for topic, subscription in group.subscriptions.items()
            },
        }
        return response(ResponseCode.SUCCESS, body=fastjson.dumps(body))

    def producer_connections(self, _: Connection, request: Request[headers.ProducerGroupName]) -> Answer:
        """Return the online members of a producer group."""
        members = self._clients.producers.get(request.header.producer_group)
        if members is None:
            name = request.header.producer_group
            raise Refused(ResponseCode.SYSTEM_ERROR, f"the producer group[{name}] not exist")
        body = {"connectionSet": [_connection(member) for member in members.values()]}
        return response(ResponseCode.SUCCESS, body=fastjson.dumps(body))

    def all_producers(self, _: Connection, __: Request[NoFields]) -> Answer:
        """Return all online producers."""
        data = {
            group: [
                {
                    "clientId": member.client_id,
                    "language": member.language,
                    "lastUpdateTimestamp": member.last_heartbeat_ms,
                    "remoteIP": member.connection.peer,
                    "version": member.version,
                }
                for member in members.values()
            ]
            for group, members in self._clients.producers.items()
        }
        return response(ResponseCode.SUCCESS, body=fastjson.dumps({"data": data}))

    async def running_info(self, _: Connection, request: Request[headers.RelayToConsumer]) -> Answer:
        """Ask a consumer for its running info."""
        return await self._relay(request, request.header.to_ext(), request.body)

    async def consume_directly(self, _: Connection, request: Request[headers.RelayToConsumer]) -> Answer:
        """Have a consumer process one message now."""
        header = request.header
        try:
            offset = parse_offset_message_id(header.msg_id or "")[2]
        except RemoteProtocolError as error:
            raise Refused(ResponseCode.SYSTEM_ERROR, str(error)) from None
        record = await self._reads.run(self._store.named_record_at, offset)
        if record is None:
            raise Refused(ResponseCode.SYSTEM_ERROR, f"look message by offset failed, {offset}")
        return await self._relay(request, {**header.to_ext(), "brokerName": self._settings.config.broker_name}, record)

    async def _relay(self, request: Request[headers.RelayToConsumer], ext: dict[str, str], body: bytes) -> Answer:
        """Relay a request to a consumer, and return its answer."""
        group, client_id = request.header.consumer_group, request.header.client_id or ""
        client = self._clients.consumer(group, client_id)
        if client is None:
            raise Refused(ResponseCode.SYSTEM_ERROR, f"The Consumer <{group}> <{client_id}> not online")
        if client.version < VERSION_RELAY:
            raise Refused(
                ResponseCode.SYSTEM_ERROR,
                f"The Consumer <{client_id}> is too old to answer this: version {client.version}",
            )
        answered: asyncio.Future[Command | None] = asyncio.get_running_loop().create_future()
        client.connection.request(
            Command(code=request.code, ext=ext, body=body), RELAY_SECONDS, lambda command: _resolve(answered, command)
        )
        answer = await answered
        if answer is None:
            raise Refused(ResponseCode.CONSUME_MSG_TIMEOUT, f"consumer <{group}> <{client_id}> Timeout")
        return Command(code=answer.code, remark=answer.remark, ext=answer.ext, body=bytes(answer.body))


def _connection(member: GroupMember) -> dict[str, Any]:
    return {
        "clientAddr": member.connection.peer,
        "clientId": member.client_id,
        "language": member.language,
        "version": member.version,
    }


def _tags(expression: str | None) -> list[str]:
    return tags_in(expression) if expression and expression != "*" else []


def _resolve(future: asyncio.Future[Command | None], command: Command | None) -> None:
    if not future.done():
        future.set_result(command)
