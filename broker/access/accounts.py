"""The accounts of plain_acl.yml, and what they may do. These objects never change: a changed file leads to new ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from duemq.broker.access.addresses import AddressPattern, parts_of
from duemq.broker.access.permission import Permission, PlainAction, ResourceAccess, Role
from duemq.broker.errors import AccessRefused
from duemq.protocol.codes import ResponseCode
from duemq.protocol.records import properties
from duemq.protocol.records.record import StoredMessage
from duemq.protocol.requests.headers import Request
from duemq.protocol.requests.signature import SecretKey
from duemq.protocol.topics import DLQ_PREFIX, HALF_TOPIC, RETRY_PREFIX, SCHEDULE_TOPIC, TIMER_TOPIC

_TRACE_TOPIC: Final = "RMQ_SYS_TRACE_TOPIC"
"""Every account may send to this topic, as in RocketMQ: clients send traces of their messages there."""
_OF_ALL_TOPICS: Final = frozenset({SCHEDULE_TOPIC, TIMER_TOPIC, HALF_TOPIC})
"""Topics with messages for all topics. An account's default permissions therefore do not apply to them."""
_EXCEPTION: Final = "org.apache.rocketmq.acl.common.AclException: "
"""How the remark of a refusal begins, at RocketMQ's brokers and here, since clients and scripts look for it."""
REFUSALS: Final = ("account", "signature", "role", "permission")
"""The kinds of refusals that are counted, by the reason."""
_MAX_HOSTS: Final = 10_000
_MAX_NAME: Final = 255


def refused(kind: str, why: str, reason: str | None = None, *, code: int | None = None) -> AccessRefused:
    """Return a refusal as RocketMQ's brokers answer it. `kind`: one of REFUSALS. `why`: the remark, in their words.
    `reason`: the text for the log, if it differs. `code`: the response code of ACL 2.0; None for plain_acl.yml, whose
    remark has the name of an exception instead."""
    if code is not None:
        return AccessRefused(code, why, kind, reason or why)
    return AccessRefused(ResponseCode.SYSTEM_ERROR, f"{_EXCEPTION}{why}", kind, reason or why)


@dataclass(frozen=True, slots=True)
class PlainAccount:
    """An account of plain_acl.yml, see `guard.Account`. `permissions`: actions by the name of a topic, or of the retry
    topic of a group; None if the account lists none."""

    access_key: str
    key: SecretKey = field(repr=False)
    white_list: AddressPattern
    is_admin: bool
    role: Role
    default_topic: int
    default_group: int
    permissions: Mapping[str, int] | None

    @property
    def name(self) -> str:
        """The access key. It stays the same when the account changes."""
        return self.access_key

    def check(self, code: int, permission: Permission, request: Request[Any], host: str) -> None:
        """Check what a request needs, except for a record's topic. Some requests that need a role are also allowed to
        an account that may do all that the request does. Raises AccessRefused, ProtocolError."""
        try:
            self.check_role(code, permission, host)
        except AccessRefused:
            if permission.instead_of_role is None:
                raise
            for access in permission.instead_of_role.find(request):
                self.check_access(access)
        if self.is_admin and self.permissions is None:
            return
        accesses = permission.accesses(request)
        if any(name == _TRACE_TOPIC and action is PlainAction.PUB for name, action, _ in accesses):
            return
        for access in accesses:
            self.check_access(access)

    def check_role(self, code: int, permission: Permission, host: str) -> None:
        """Check the role that requests of a code need, whatever they are about. Raises AccessRefused."""
        wanted = permission.role
        if wanted > self.role:
            role = "admin permission" if wanted is Role.ADMINISTER else f"the role {wanted.name.lower()}"
            raise refused("role", f"Need {role} for request code={code}, but accessKey={self.access_key} is not")

    def check_topic(self, code: int, topic: str, action: int, host: str) -> None:
        """Check one action on one topic: the fast path for requests that need nothing else. Raises AccessRefused."""
        permissions = self.permissions
        if permissions is not None:
            # For a topic that stands for a group (its name begins with %), other actions count.
            if not permissions.get(topic, 0) & action or topic[:1] == "%":
                self.check_access(ResourceAccess(topic, PlainAction(action)))
        elif not self.is_admin:
            self.check_access(ResourceAccess(topic, PlainAction(action)))

    def check_record(self, code: int, topic: str, host: str) -> None:
        """Check that the account may read a record of a topic: it needs SUB on the topic. Raises AccessRefused."""
        self.check_access(ResourceAccess(topic, PlainAction.SUB))

    def check_access(self, access: ResourceAccess) -> None:
        """Check one action on one topic or group. Raises AccessRefused."""
        name, action, is_group = access
        if name is None or (self.is_admin and self.permissions is None):
            return
        if is_group:
            name = f"{RETRY_PREFIX}{name}"
        elif name == _TRACE_TOPIC and action is PlainAction.PUB:
            return
        listed = self.permissions or {}
        owned = listed.get(name)
        needed: int = action
        group = None
        if name.startswith(RETRY_PREFIX):
            group = name.removeprefix(RETRY_PREFIX)
        elif name.startswith(DLQ_PREFIX) and owned is None:
            group = name.removeprefix(DLQ_PREFIX)
        if group is not None:
            # Consumers send to the retry topic of their group, so sending there is part of consuming.
            needed = action if is_group or action is PlainAction.ANY else PlainAction.SUB
            owned = listed.get(f"{RETRY_PREFIX}{group}", self.default_group)
        elif owned is None:
            owned = self.default_topic if name not in _OF_ALL_TOPICS else PlainAction.DENY
        if not owned & needed:
            what = f"group:{group}" if group is not None else f"topic:{name}" if name else "all topics"
            why = f"No default permission for {what[:_MAX_NAME]}"
            raise refused("permission", why, f"{why}, accessKey={self.access_key}")


def topic_of_message(message: StoredMessage) -> str:
    """Return the topic that a message is for, even while it waits among the messages of other topics."""
    if message.topic in _OF_ALL_TOPICS:
        return message.get_property(properties.REAL_TOPIC) or message.topic
    return message.topic


class Accounts:
    """All accounts, and the addresses that need none."""

    def __init__(self, accounts: Iterable[PlainAccount], white_lists: Iterable[AddressPattern]) -> None:
        self.by_key = {account.access_key: account for account in accounts}
        self._white_lists = tuple(white_lists)
        self._by_address = tuple(account for account in self.by_key.values() if account.white_list.text)
        self.hosts: dict[str, tuple[bool, frozenset[str]]] = {}
        """The results of `of_host`, by host."""

    def __len__(self) -> int:
        return len(self.by_key)

    def of_host(self, host: str) -> tuple[bool, frozenset[str]]:
        """Return whether an address needs no account, and the access keys that need no signature from there."""
        if len(self.hosts) >= _MAX_HOSTS:
            self.hosts.clear()
        parts = parts_of(host)
        found = self.hosts[host] = (
            any(pattern.matches(parts) for pattern in self._white_lists),
            frozenset(account.access_key for account in self._by_address if account.white_list.matches(parts)),
        )
        return found
