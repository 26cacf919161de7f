"""Requests of administrators about consumer groups: to create, change, delete and list them."""

from __future__ import annotations

from duemq.broker.access.permission import ADMINISTER, LOOK
from duemq.broker.errors import LimitReached, Refused
from duemq.broker.limits import Limits
from duemq.broker.net.connection import Connection
from duemq.broker.net.router import Answer, Router
from duemq.broker.tables.consumer_offsets import ConsumerOffsets
from duemq.broker.tables.groups import Groups
from duemq.broker.tables.topics import check_name
from duemq.protocol.codes import RequestCode, ResponseCode
from duemq.protocol.frames import fastjson
from duemq.protocol.requests import bodies, headers
from duemq.protocol.requests.bodies import SubscriptionGroupConfig
from duemq.protocol.requests.headers import NoFields, Request, response


class GroupHandlers:
    """Handles the requests of RocketMQ's admin API about consumer groups."""

    def __init__(self, groups: Groups, offsets: ConsumerOffsets, limits: Limits) -> None:
        self._groups = groups
        self._offsets = offsets
        self._limits = limits

    def register(self, router: Router) -> None:
        """Add the handlers to a router."""
        add = router.add
        add(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, NoFields, ADMINISTER, self.create_group)
        add(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST, NoFields, ADMINISTER, self.create_groups)
        add(RequestCode.DELETE_SUBSCRIPTIONGROUP, headers.DeleteSubscriptionGroup, ADMINISTER, self.delete_group)
        add(RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG, NoFields, LOOK, self.all_groups)
        add(RequestCode.GET_SUBSCRIPTIONGROUP_CONFIG, headers.Group, LOOK, self.group_config)

    async def create_group(self, _: Connection, request: Request[NoFields]) -> Answer:
        """Create or change a consumer group."""
        group = bodies.decode_request(request.body, SubscriptionGroupConfig)
        self._check_group(group, bodies.decode_request(request.body, bodies.GroupAttributes))
        self._groups.put(group)
        await self._groups.save()
        return response(ResponseCode.SUCCESS)

    async def create_groups(self, _: Connection, request: Request[NoFields]) -> Answer:
        """Create or change several consumer groups, or none of them if one is refused."""
        groups = bodies.decode_request(request.body, bodies.GroupConfigList).group_config_list
        changes = bodies.decode_request(request.body, bodies.GroupAttributesList).group_config_list
        for group, attributes in zip(groups, changes, strict=True):
            self._check_group(group, attributes)
        for group in groups:
            self._groups.put(group)
        await self._groups.save()
        return response(ResponseCode.SUCCESS)

    def _check_group(self, group: SubscriptionGroupConfig, changes: bodies.GroupAttributes) -> None:
        """Raise Refused for a group that may not be created with these properties."""
        check_name(group.group_name)
        for name in changes.attributes or {}:
            # Neither this broker nor RocketMQ 5.3 has attributes of groups.
            raise Refused(ResponseCode.SYSTEM_ERROR, f"unsupported key: {name[1:] or name}")
        most = self._limits.queues_per_topic
        if group.retry_queue_nums > most:
            raise LimitReached(
                "maxQueuesPerTopic",
                ResponseCode.SYSTEM_ERROR,
                f"retryQueueNums={group.retry_queue_nums}, and maxQueuesPerTopic={most}: use fewer, or raise that "
                "setting",
            )

    async def delete_group(self, _: Connection, request: Request[headers.DeleteSubscriptionGroup]) -> Answer:
        """Remove a consumer group, and its offsets if requested."""
        header = request.header
        self._groups.remove(header.group_name)
        if header.remove_offset or header.clean_offset:
            self._offsets.remove_group(header.group_name)
        await self._groups.save()
        if header.remove_offset or header.clean_offset:
            await self._offsets.save()
        return response(ResponseCode.SUCCESS)

    def all_groups(self, _: Connection, __: Request[NoFields]) -> Answer:
        """Return the table of groups."""
        return response(ResponseCode.SUCCESS, body=fastjson.dumps(self._groups.to_json()))

    def group_config(self, _: Connection, request: Request[headers.Group]) -> Answer:
        """Return one group."""
        group = self._groups.get(request.header.group)
        if group is None:
            raise Refused(ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, f"no group {request.header.group}")
        return response(ResponseCode.SUCCESS, body=fastjson.dumps(group))
