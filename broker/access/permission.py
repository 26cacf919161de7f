"""What a request needs: each handler is registered with a `Permission`.

A request needs the signature of an account, and beyond that, depending on its code:

- a role: LOOK, OPERATE or ADMINISTER, each of which includes those before it;
- an action on each topic and group that it names in its header or body: PUB, SUB, or ANY, which is either;
- SUB for the topic of a record, for a request that names a physical offset.

What RocketMQ checks is checked here too: topics and groups by PlainAccessValidator, administration by
Permission.ADMIN_CODE. For the other codes 5.3.3 says in annotations of its request headers which resource and which
action they are about; 4.9.7 lets every account use them.

Source: apache/rocketmq acl/plain/PlainAccessValidator.java, acl/common/Permission.java at 4.9.7, remoting
protocol/header/*.java at 5.3.3.

Keeps invariant 29 of ARCHITECTURE.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Final, NamedTuple

from duemq.protocol.requests import bodies
from duemq.protocol.requests.bodies import HeartbeatData, LockBatch
from duemq.protocol.requests.headers import Request


class PlainAction(IntEnum):
    """The actions on a topic or a group in 4.9's access control, as bits. ACL 2.0 has `auth.model.Action`."""

    DENY = 0
    PUB = 4
    SUB = 8
    ANY = PUB | SUB
    """As a need of a request: one of the two will do. As a permission of an account: both, PUB|SUB in the file."""


class Role(IntEnum):
    """The rights of an account in addition to sending and receiving. Each role includes those before it."""

    NONE = 0
    LOOK = 1
    """See lists, counts, statistics and settings."""
    OPERATE = 2
    """Cancel and reschedule messages, reset offsets, have a consumer process a message."""
    ADMINISTER = 3
    """Change topics, groups, settings, accounts, and what a name server knows."""


class ResourceAccess(NamedTuple):
    """A topic or a group, and what a request does with it. `name` is None if the request names none after all."""

    name: str | None
    action: PlainAction
    is_group: bool = False


Find = Callable[[Request[Any]], Iterable[ResourceAccess]]
"""Returns the resources that a request is about, each with the action. Raises ProtocolError for a body that does not
parse."""


@dataclass(frozen=True)
class ResourceNeed:
    """A need of requests of a code for the resources that they are about. `text` says what is needed and where a
    request names the resource. `topic`: the attribute of the header, if the need is one action on the topic in it."""

    text: str
    find: Find = field(compare=False)
    action: PlainAction = PlainAction.ANY
    topic: str | None = None


@dataclass(frozen=True)
class Permission:
    """What requests of one code need. `record`: the attribute of the header with the physical offset of a record, for
    whose topic SUB is needed. `is_open`: nothing is needed, not even a signature. `instead_of_role`: an account that
    meets this need does not need the role."""

    role: Role = Role.NONE
    needs: tuple[ResourceNeed, ...] = ()
    record: str | None = None
    is_open: bool = False
    instead_of_role: ResourceNeed | None = None

    def __str__(self) -> str:
        """The permission in words."""
        if self.is_open:
            return "nothing"
        parts = ["an account"] if not self.role else [f"the role {self.role.name.lower()}"]
        if self.instead_of_role is not None:
            parts[0] += f" or {self.instead_of_role.text}"
        parts += [need.text for need in self.needs]
        if self.record is not None:
            parts.append(f"SUB for the topic of the record at {self.record}")
        return ", ".join(parts)

    @property
    def only_topic(self) -> tuple[str, PlainAction] | None:
        """The attribute of the header and the action, if one action on one topic is all that is needed."""
        if self.role or self.record is not None or self.is_open or len(self.needs) != 1:
            return None
        (need,) = self.needs
        return (need.topic, need.action) if need.topic is not None else None

    def accesses(self, request: Request[Any]) -> list[ResourceAccess]:
        """Return the resources that a request is about, each with the action. Raises ProtocolError."""
        return [access for need in self.needs for access in need.find(request)]


def needs(*wanted: ResourceNeed, role: Role = Role.NONE, record: str | None = None) -> Permission:
    """Return a permission that needs several things; see `Permission`."""
    return Permission(role, wanted, record)


def topic(action: PlainAction, name: str = "topic") -> ResourceNeed:
    """Return the need of an action on the topic that the header names in its attribute `name`."""
    return ResourceNeed(
        f"{action.name} for the topic in {name}",
        lambda request: (ResourceAccess(getattr(request.header, name), action),),
        action,
        name,
    )


def topic_or_all(action: PlainAction, name: str = "topic") -> ResourceNeed:
    """Return the need of one action on the topic in a field of the header. A request that names none is about all
    topics: the account's default permission counts."""
    return ResourceNeed(
        f"{action.name} for the topic in {name}, or by default for all",
        lambda request: (ResourceAccess(getattr(request.header, name) or "", action),),
        action,
    )


def group(action: PlainAction, name: str = "consumer_group") -> ResourceNeed:
    """Return the need of an action on the group that the header names in its attribute `name`, if it names one."""
    return ResourceNeed(
        f"{action.name} for the group in {name}",
        lambda request: (ResourceAccess(getattr(request.header, name), action, is_group=True),),
        action,
    )


def _of_heartbeat(request: Request[Any]) -> Iterable[ResourceAccess]:
    for consumer in bodies.decode_request(request.body, HeartbeatData).consumer_data_set or ():
        yield ResourceAccess(consumer.group_name, PlainAction.SUB, is_group=True)
        for subscription in consumer.subscription_data_set or ():
            yield ResourceAccess(subscription.topic, PlainAction.SUB)


def _of_locks(request: Request[Any]) -> Iterable[ResourceAccess]:
    batch = bodies.decode_request(request.body, LockBatch)
    yield ResourceAccess(batch.consumer_group, PlainAction.SUB, is_group=True)
    for name in {queue.topic for queue in batch.mq_set or ()}:
        yield ResourceAccess(name, PlainAction.SUB)


OPEN: Final = Permission(is_open=True)
"""Anyone may make the request. Only for routes, as in RocketMQ's name server, which checks nothing."""
ACCOUNT: Final = Permission()
"""Every account may make the request."""
LOOK: Final = Permission(Role.LOOK)
OPERATE: Final = Permission(Role.OPERATE)
ADMINISTER: Final = Permission(Role.ADMINISTER)

SEND: Final = needs(topic(PlainAction.PUB))
CONSUME: Final = needs(topic(PlainAction.SUB), group(PlainAction.SUB))
ASK_TOPIC: Final = needs(topic(PlainAction.ANY))
SEE_TOPIC: Final = Permission(Role.LOOK, instead_of_role=topic(PlainAction.ANY))
"""An account that may send to a topic, or consume from it, may see its settings: a producer has to know the delay
levels of the topic."""
HEARTBEAT: Final = needs(
    ResourceNeed("SUB for the consumer groups in the body and their topics", _of_heartbeat, PlainAction.SUB)
)
LOCKS: Final = needs(ResourceNeed("SUB for the group and the topics in the body", _of_locks, PlainAction.SUB))
