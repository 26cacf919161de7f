"""What each request code needs in ACL 2.0: on each of some resources, any one of some actions.

RocketMQ's brokers say that in DefaultAuthorizationContextBuilder and in annotations of the request headers. Where they
check nothing, or something that does not protect what a request does, the permission of 4.9's access control with which
each handler is registered says what is needed:

    PUB, SUB for a topic or group     Pub, Sub on it
    either of the two for a topic     Sub or Get on it
    SUB for a record's topic          Sub on it; for VIEW_MESSAGE_BY_ID Sub or Get
    the role look                     Get or List on the cluster
    the roles operate, administer     Update on the cluster

A retry topic, %RETRY% and a group's name, stands for its group, and sending to it counts as Sub.

Source: apache/rocketmq auth/authorization/builder/DefaultAuthorizationContextBuilder.java,
remoting/protocol/header/**/*.java at 5.3.3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, NamedTuple

from duemq.broker.access.auth.model import Action, ResourceType
from duemq.broker.access.auth.rules import bits
from duemq.broker.access.permission import Permission, PlainAction, Role
from duemq.protocol.codes import RequestCode
from duemq.protocol.requests import bodies
from duemq.protocol.requests.bodies import SubscriptionGroupConfig
from duemq.protocol.requests.headers import Request
from duemq.protocol.topics import RETRY_PREFIX

PUB: Final = bits([Action.PUB])
SUB: Final = bits([Action.SUB])
CREATE: Final = bits([Action.CREATE])
UPDATE: Final = bits([Action.UPDATE])
DELETE: Final = bits([Action.DELETE])
GET: Final = bits([Action.GET])
SUB_OR_GET: Final = SUB | GET
SUB_OR_UPDATE: Final = SUB | UPDATE
GET_OR_LIST: Final = bits([Action.GET, Action.LIST])

OF_ACTION: Final = {PlainAction.PUB: PUB, PlainAction.SUB: SUB, PlainAction.ANY: SUB_OR_GET}
"""By action of 4.9: the actions that correspond to it."""
_OF_ROLE: Final = {Role.NONE: 0, Role.LOOK: GET_OR_LIST, Role.OPERATE: UPDATE, Role.ADMINISTER: UPDATE}


class NeededActions(NamedTuple):
    """A resource, and the actions on it of which any one will do (see `rules.bits`)."""

    kind: ResourceType
    name: str
    actions: int


def of_topic(name: str, actions: int) -> NeededActions:
    """Return what is needed for a topic, or for the group that it stands for."""
    if name.startswith(RETRY_PREFIX):
        return NeededActions(ResourceType.GROUP, name.removeprefix(RETRY_PREFIX), SUB if actions == PUB else actions)
    return NeededActions(ResourceType.TOPIC, name, actions)


def of_group(name: str, actions: int) -> NeededActions:
    """Return what is needed for a group."""
    return NeededActions(ResourceType.GROUP, name.removeprefix(RETRY_PREFIX), actions)


class Needs:
    """Determines which actions requests need on which resources of one cluster."""

    def __init__(self, cluster: str) -> None:
        self._cluster = cluster

    def of_request(self, permission: Permission, request: Request[Any]) -> Iterable[NeededActions]:
        """Yield what a request needs, except for a record's topic. Raises ProtocolError for a body that does not
        parse."""
        special = _SPECIAL.get(request.code)
        if special is not None:
            yield from special(request)
        else:
            for name, action, is_group in permission.accesses(request):
                if name is not None:
                    yield (of_group if is_group else of_topic)(name, OF_ACTION[action])
        yield from self.of_role(request.code, permission)

    def of_role(self, code: int, permission: Permission) -> Iterator[NeededActions]:
        """Yield what a request needs whatever it is about: actions on the cluster."""
        actions = _OF_CLUSTER.get(code)
        if actions is None:
            actions = _OF_ROLE[permission.role] if code not in _SPECIAL else 0
        if actions:
            yield NeededActions(ResourceType.CLUSTER, self._cluster, actions)

    def of_record(self, code: int, topic: str) -> NeededActions:
        """Return what is needed for the topic of a record."""
        return of_topic(topic, SUB_OR_GET if code == RequestCode.VIEW_MESSAGE_BY_ID else SUB)


def _topic(actions: int) -> Callable[[Request[Any]], Iterable[NeededActions]]:
    return lambda request: (of_topic(request.header.topic, actions),)


def _group(actions: int, name: str = "consumer_group") -> Callable[[Request[Any]], Iterable[NeededActions]]:
    return lambda request: (of_group(getattr(request.header, name), actions),)


def _both(
    actions: int, name: str = "consumer_group", *, group_first: bool = False
) -> Callable[[Request[Any]], Iterable[NeededActions]]:
    """Return a function for requests that need actions on a group, and on a topic if they name one. `group_first`:
    which of the two is checked first, as in RocketMQ."""

    def find(request: Request[Any]) -> Iterable[NeededActions]:
        needs = [of_group(getattr(request.header, name), actions)]
        if request.header.topic:
            needs.append(of_topic(request.header.topic, actions))
        return needs if group_first else reversed(needs)

    return find


def _topic_or_all(request: Request[Any]) -> Iterable[NeededActions]:
    """Return what is needed for one topic or for all. The name of all topics is empty, and only an entry for all topics
    is about it."""
    return (NeededActions(ResourceType.TOPIC, request.header.topic or "", SUB_OR_GET),)


def _created_group(request: Request[Any]) -> Iterable[NeededActions]:
    return (of_group(bodies.decode_request(request.body, SubscriptionGroupConfig).group_name, CREATE),)


def _created_groups(request: Request[Any]) -> Iterable[NeededActions]:
    groups = bodies.decode_request(request.body, bodies.GroupConfigList).group_config_list
    return (of_group(group.group_name, CREATE) for group in groups)


def _created_topics(request: Request[Any]) -> Iterable[NeededActions]:
    topics = bodies.decode_request(request.body, bodies.TopicConfigList).topic_config_list
    return (of_topic(topic.topic_name, CREATE) for topic in topics)


_SPECIAL: Final[dict[int, Callable[[Request[Any]], Iterable[NeededActions]]]] = {
    RequestCode.QUERY_CONSUMER_OFFSET: _both(SUB_OR_GET),
    RequestCode.UPDATE_CONSUMER_OFFSET: _both(SUB_OR_UPDATE),
    RequestCode.GET_CONSUMER_LIST_BY_GROUP: _group(SUB_OR_GET),
    RequestCode.UPDATE_AND_CREATE_TOPIC: _topic(CREATE),
    RequestCode.UPDATE_AND_CREATE_TOPIC_LIST: _created_topics,
    RequestCode.DELETE_TOPIC_IN_BROKER: _topic(DELETE),
    # RocketMQ: Get. A producer has to know the delay levels of a topic that it may send to.
    RequestCode.GET_TOPIC_CONFIG: _topic(PUB | SUB | GET),
    RequestCode.GET_TOPIC_STATS_INFO: _topic(GET),
    RequestCode.QUERY_TOPIC_CONSUME_BY_WHO: _topic(GET),
    RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP: _created_group,
    RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST: _created_groups,
    RequestCode.DELETE_SUBSCRIPTIONGROUP: _group(DELETE, "group_name"),
    RequestCode.GET_SUBSCRIPTIONGROUP_CONFIG: _group(GET, "group"),
    RequestCode.GET_CONSUME_STATS: _both(GET, group_first=True),
    RequestCode.QUERY_TOPICS_BY_CONSUMER: _group(GET, "group"),
    RequestCode.QUERY_SUBSCRIPTION_BY_CONSUMER: _both(GET, "group", group_first=True),
    RequestCode.QUERY_CONSUME_TIME_SPAN: _both(GET, "group"),
    RequestCode.QUERY_CORRECTION_OFFSET: _both(GET, "compare_group", group_first=True),
    RequestCode.QUERY_CONSUME_QUEUE: _topic(GET),
    RequestCode.CLONE_GROUP_OFFSET: _both(UPDATE, "dest_group", group_first=True),
    RequestCode.GET_CONSUMER_CONNECTION_LIST: _group(GET),
    RequestCode.GET_CONSUMER_RUNNING_INFO: _group(GET),
    RequestCode.CONSUME_MESSAGE_DIRECTLY: _group(SUB),
    RequestCode.INVOKE_BROKER_TO_RESET_OFFSET: _both(UPDATE, "group", group_first=True),
    RequestCode.LIST_PENDING: _topic_or_all,
    RequestCode.DUE_CURVE: _topic_or_all,
}
"""The needs of requests by code, where these differ from the permission and its role."""
_OF_CLUSTER: Final[dict[int, int]] = {
    # The request passes any record to a consumer. RocketMQ allows that to every user that may consume with the group.
    RequestCode.CONSUME_MESSAGE_DIRECTLY: UPDATE,
    RequestCode.REPORT_BRIDGE: GET_OR_LIST,
    RequestCode.QUERY_DATA_VERSION: UPDATE | GET,
}
"""The actions on the cluster that requests need by code, where these differ from the role's."""
