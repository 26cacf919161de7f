"""Clients and their groups: heartbeats (34, 35, 46), members of a group (38)."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from duemq.broker.access.permission import ACCOUNT, HEARTBEAT, PlainAction, group, needs
from duemq.broker.errors import Refused
from duemq.broker.net.connection import Connection
from duemq.broker.net.router import Answer, Router
from duemq.broker.tables.clients import Clients, check_expression_type
from duemq.broker.tables.groups import Groups, is_group_name
from duemq.broker.tables.topics import FLAG_UNIT_SUB, Topics, check_name
from duemq.protocol.codes import RequestCode, ResponseCode
from duemq.protocol.frames import fastjson
from duemq.protocol.requests import bodies
from duemq.protocol.requests.bodies import ConsumerData, ConsumerIdList, HeartbeatData, SubscriptionData
from duemq.protocol.requests.headers import ConsumerGroupName, NoFields, Request, UnregisterClient, response
from duemq.protocol.topics import RETRY_PREFIX


class _ClientConfig(msgspec.Struct, rename="camel"):
    """Body of CHECK_CLIENT_CONFIG."""

    subscription_data: SubscriptionData | None = None


class ClientHandlers:
    """Maintains the members of groups."""

    def __init__(self, topics: Topics, groups: Groups, clients: Clients) -> None:
        self._topics = topics
        self._groups = groups
        self._clients = clients

    def register(self, router: Router) -> None:
        """Add the handlers to a router."""
        router.add(RequestCode.HEART_BEAT, NoFields, HEARTBEAT, self.heartbeat)
        router.add(RequestCode.UNREGISTER_CLIENT, UnregisterClient, needs(group(PlainAction.SUB)), self.unregister)
        router.add(RequestCode.CHECK_CLIENT_CONFIG, NoFields, ACCOUNT, self.check_config)
        router.add(
            RequestCode.GET_CONSUMER_LIST_BY_GROUP, ConsumerGroupName, needs(group(PlainAction.SUB)), self.members
        )
        router.add_clients(self._clients)

    def heartbeat(self, connection: Connection, request: Request[NoFields]) -> Answer:
        """Note the groups of a client. A consumer group's retry topic is created with its first heartbeat."""
        data = bodies.decode_request(request.body, HeartbeatData)
        self._clients.check(connection, data)
        self._check_groups(data.consumer_data_set or ())
        connection.last_codec = request.codec
        quiet = []
        for consumer in data.consumer_data_set or ():
            if not self._make_group(consumer):
                quiet.append(consumer.group_name)
        self._clients.heartbeat(connection, data, request.language, request.version, quiet)
        return response(ResponseCode.SUCCESS)

    def _check_groups(self, consumers: Sequence[ConsumerData]) -> None:
        """Check that all consumer groups of a heartbeat, and their retry topics, exist or can be created, so that a
        heartbeat that is refused creates nothing. Raises Refused."""
        queues = {}
        for consumer in consumers:
            if not is_group_name(consumer.group_name):
                raise Refused(
                    ResponseCode.SYSTEM_ERROR,
                    "The specified group is blank, longer than 255 or contains characters other than %|a-zA-Z0-9_-",
                )
            name = f"{RETRY_PREFIX}{consumer.group_name}"
            check_name(name)
            queues[name] = self._groups.retry_queues(consumer.group_name)
        self._groups.check_all(consumer.group_name for consumer in consumers)
        self._topics.check_for_groups({name: count for name, count in queues.items() if count is not None})

    def _make_group(self, consumer: ConsumerData) -> bool:
        """Create a consumer group and its retry topic if missing; return whether its members want to be notified of
        changes. Raises Refused."""
        group = self._groups.get(consumer.group_name)
        if group is None:
            return True
        name = f"{RETRY_PREFIX}{consumer.group_name}"
        topic = self._topics.create_for_group(name, group.retry_queue_nums, FLAG_UNIT_SUB if consumer.unit_mode else 0)
        if not topic.is_saved:
            self._topics.save_later()
        return group.notify_consumer_ids_changed_enable

    def unregister(self, connection: Connection, request: Request[UnregisterClient]) -> Answer:
        """Remove a client from its groups. A client that is in none of them is not an error, as in RocketMQ."""
        header = request.header
        self._clients.unregister(connection, header.client_id, header.producer_group, header.consumer_group)
        return response(ResponseCode.SUCCESS)

    def check_config(self, _: Connection, request: Request[NoFields]) -> Answer:
        """Check that a subscription can be served: only tags can. Raises Refused."""
        subscription = bodies.decode_request(request.body, _ClientConfig).subscription_data
        if subscription is not None:
            check_expression_type(subscription.expression_type)
        return response(ResponseCode.SUCCESS)

    def members(self, _: Connection, request: Request[ConsumerGroupName]) -> Answer:
        """Return the client ids of a group's members."""
        group = self._clients.consumers.get(request.header.consumer_group)
        if group is None or not group.members:
            raise Refused(ResponseCode.SYSTEM_ERROR, f"no consumer for this group, {request.header.consumer_group}")
        return response(ResponseCode.SUCCESS, body=fastjson.dumps(ConsumerIdList(list(group.members))))
