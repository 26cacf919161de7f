"""Users and policies, as they are stored: JSON, with the fields in the order in which RocketMQ writes them.

    users  key: the name          {"password":"...","subjectType":1,"userStatus":1,"userType":2,"username":"orders"}
    acls   key: User:<the name>   {"policies":[{"entries":[ENTRY, ...],"policyType":1}, ...],
                                   "subject":{"subjectType":1,"username":"orders"}}
    ENTRY = {"actions":[3,4],"decision":1,"environment":{"sourceIps":["10.0.0.0/8"]},
             "resource":{"resourceName":"orders","resourcePattern":2,"resourceType":4}}

Numbers are the codes of the enums below. Null values are left out. Requests have words in place of the numbers, see
`protocol.requests.auth_bodies`.

Source: apache/rocketmq auth/authentication/model/User.java, auth/authorization/model/*.java, auth/*/enums/*.java,
common/action/Action.java, common/resource/*.java, broker/auth/converter/*.java at 5.3.3.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from enum import IntEnum
from typing import Final, NoReturn, Self, TypeVar

import msgspec

from duemq.broker.errors import Refused
from duemq.protocol.codes import ResponseCode
from duemq.protocol.requests.auth_bodies import AclInfo, PolicyEntryInfo, PolicyInfo, UserInfo

USER_PREFIX: Final = "User:"
"""How the key of a subject begins; there are no other kinds of subjects."""
MAX_NAME: Final = 255
"""Maximum length of a user's name, of a password, and of a resource, in characters."""
MAX_ENTRIES: Final = 10_000
"""Maximum number of entries of one user's policies."""


class UserType(IntEnum):
    """The types of users. A super user may do everything."""

    SUPER = 1
    NORMAL = 2


class UserStatus(IntEnum):
    """Whether a user may do anything at all."""

    ENABLE = 1
    DISABLE = 2


class PolicyType(IntEnum):
    """A default policy counts for a request only if no entry of the custom policy is about it."""

    CUSTOM = 1
    DEFAULT = 2


class Decision(IntEnum):
    """Whether an entry allows its actions or denies them."""

    ALLOW = 1
    DENY = 2


class ResourceType(IntEnum):
    """The types of resources that an entry may be about."""

    UNKNOWN = 0
    ANY = 1
    CLUSTER = 2
    NAMESPACE = 3
    TOPIC = 4
    GROUP = 5


class Pattern(IntEnum):
    """Which resources an entry means: all of a type, the one of a name, or those whose names begin with a prefix."""

    ANY = 1
    LITERAL = 2
    PREFIXED = 3


class Action(IntEnum):
    """The actions on a resource. ALL is only for entries; ANY and UNKNOWN are for neither entries nor requests."""

    UNKNOWN = 0
    ALL = 1
    ANY = 2
    PUB = 3
    SUB = 4
    CREATE = 5
    UPDATE = 6
    DELETE = 7
    GET = 8
    LIST = 9


E = TypeVar("E", bound=IntEnum)


class _Stored(msgspec.Struct, rename="camel", frozen=True):
    """Base of what is stored as JSON."""


class Resource(_Stored, frozen=True, omit_defaults=True, kw_only=True):
    """One resource, all of a type, or all whose names begin with a prefix. `resource_name`: the name or the prefix;
    None for all."""

    resource_name: str | None = None
    resource_pattern: Pattern
    resource_type: ResourceType

    @classmethod
    def parse(cls, key: str) -> Self:
        """Read a key: `*`, `Topic:*`, `Topic:orders` or `Topic:orders*`. Raises Refused."""
        if key == "*":
            return cls(resource_pattern=Pattern.ANY, resource_type=ResourceType.ANY)
        kind, _, name = key.partition(":")
        found = _by_name(ResourceType, kind)
        if found is None:
            _refuse("The resource is null.")
        if found is ResourceType.ANY:
            _refuse("The resource type is Any: write * for everything.")
        if name == "*":
            return cls(resource_pattern=Pattern.ANY, resource_type=found)
        if "*" in name[:-1] or len(name) > MAX_NAME:
            _refuse(f"The resource name may have * only at its end, and at most {MAX_NAME} characters.")
        if name.endswith("*"):
            return cls(resource_name=name[:-1], resource_pattern=Pattern.PREFIXED, resource_type=found)
        return cls(resource_name=name, resource_pattern=Pattern.LITERAL, resource_type=found)

    @property
    def key(self) -> str:
        """The resource as requests have it."""
        if self.resource_type is ResourceType.ANY:
            return "*"
        name = self.resource_name or ""
        if self.resource_pattern is not Pattern.LITERAL:
            name = "*" if self.resource_pattern is Pattern.ANY else f"{name}*"
        return f"{word(self.resource_type)}:{name}"


class Environment(_Stored, frozen=True, omit_defaults=True, kw_only=True):
    """Where a request comes from: addresses, and networks such as 10.0.0.0/8. None: anywhere."""

    source_ips: tuple[str, ...] | None = None


class Entry(_Stored, frozen=True, kw_only=True):
    """A decision of a policy: it allows or denies some actions on one resource."""

    actions: tuple[Action, ...]
    decision: Decision
    environment: Environment | msgspec.UnsetType = msgspec.UNSET
    resource: Resource

    @property
    def sources(self) -> tuple[str, ...]:
        """The addresses and networks to which the entry applies; empty if it applies to all."""
        return self.environment.source_ips or () if isinstance(self.environment, Environment) else ()


class Policy(_Stored, frozen=True, kw_only=True):
    """A policy of a user: its entries of one type, custom or default."""

    entries: tuple[Entry, ...]
    policy_type: PolicyType

    def changed(self, entries: Iterable[Entry]) -> Policy:
        """Return the policy with these entries added. Each replaces the entry for the same resource, as in RocketMQ's
        brokers."""
        table = {entry.resource: entry for entry in self.entries}
        table.update((entry.resource, entry) for entry in entries)
        return Policy(entries=tuple(table.values()), policy_type=self.policy_type)


class Named(_Stored, frozen=True, kw_only=True):
    """The subject of policies: a user, by its name."""

    subject_type: int = 1
    username: str


class Acl(_Stored, frozen=True, kw_only=True):
    """The policies of one user."""

    policies: tuple[Policy, ...] = ()
    subject: Named

    def policy(self, kind: PolicyType) -> Policy | None:
        """Return the policy of a type, None if there is none."""
        return next((policy for policy in self.policies if policy.policy_type is kind), None)

    def changed(self, policies: Iterable[Policy]) -> Acl:
        """Return the policies with the entries of these policies added, replacing those for the same resources. Raises
        Refused."""
        table = {policy.policy_type: policy for policy in self.policies}
        for policy in policies:
            old = table.get(policy.policy_type)
            table[policy.policy_type] = old.changed(policy.entries) if old is not None else policy.changed(())
        if sum(len(policy.entries) for policy in table.values()) > MAX_ENTRIES:
            _refuse(f"The policies of a user may have at most {MAX_ENTRIES} entries.")
        return Acl(policies=tuple(table.values()), subject=self.subject)

    def without(self, kind: PolicyType, resource: Resource) -> Acl:
        """Return the policies without the entry for a resource in the policy of this type."""
        policies = []
        for policy in self.policies:
            entries = policy.entries
            if policy.policy_type is kind:
                entries = tuple(entry for entry in entries if entry.resource != resource)
            if entries:
                policies.append(Policy(entries=entries, policy_type=policy.policy_type))
        return Acl(policies=tuple(policies), subject=self.subject)


class User(_Stored, frozen=True, kw_only=True):
    """A user. Neither `repr` nor `str` has the password."""

    password: str
    subject_type: int = 1
    user_status: UserStatus = UserStatus.ENABLE
    user_type: UserType = UserType.NORMAL
    username: str

    def __repr__(self) -> str:
        return f"User({self.username!r}, {self.user_type.name}, {self.user_status.name})"

    @property
    def is_super(self) -> bool:
        """Whether the user may do everything."""
        return self.user_type is UserType.SUPER

    @property
    def is_enabled(self) -> bool:
        """Whether the user may do anything at all."""
        return self.user_status is UserStatus.ENABLE


def empty_acl(username: str) -> Acl:
    """Return empty policies for a user that has none."""
    return Acl(subject=Named(username=username))


# --- words


def word(value: IntEnum) -> str:
    """Return the word of an enum's value, as requests have it."""
    return value.name.lower() if isinstance(value, UserStatus) else value.name.capitalize()


def _by_name(kind: type[E], text: str | None) -> E | None:
    """Return the value that a word stands for, in any case."""
    return kind.__members__.get(text.upper()) if text is not None else None


def _refuse(why: str) -> NoReturn:
    raise Refused(ResponseCode.NO_PERMISSION, why)


def user_type(text: str | None) -> UserType | None:
    """Return the type in a request, None if there is none. Raises Refused."""
    return _optional(UserType, text, "userType")


def user_status(text: str | None) -> UserStatus | None:
    """Return the status in a request, None if there is none. Raises Refused."""
    return _optional(UserStatus, text, "userStatus")


def policy_type(text: str | None) -> PolicyType:
    """Return the type in a request, CUSTOM if there is none. Raises Refused."""
    return _optional(PolicyType, text, "policyType") or PolicyType.CUSTOM


def _optional(kind: type[E], text: str | None, name: str) -> E | None:
    found = _by_name(kind, text)
    if found is None and text:
        words = ", ".join(word(value) for value in kind)
        raise Refused(ResponseCode.INVALID_PARAMETER, f"The {name} is not one of {words}")
    return found


# --- requests


def read_policies(info: AclInfo) -> list[Policy]:
    """Return the policies in a request's body. They are checked as RocketMQ's brokers do, with errors in their words;
    text that those brokers would take for something other than what is written is refused as well. Raises Refused."""
    policies = [
        Policy(
            entries=tuple(_read_entry(entry) for entry in policy.entries), policy_type=policy_type(policy.policy_type)
        )
        for policy in info.policies or ()
        if policy.entries
    ]
    if not policies:
        _refuse("The policies is empty.")
    return policies


def _read_entry(info: PolicyEntryInfo) -> Entry:
    if not info.resource or not info.resource.strip():
        _refuse("The resource is null.")
    resource = Resource.parse(info.resource)
    actions = []
    for text in info.actions or ():
        action = _by_name(Action, text)
        if action is Action.ANY:
            _refuse("The actions can not be Any.")
        if not action:  # UNKNOWN is 0
            _refuse(f"The action {text[:MAX_NAME]} is unknown.")
        actions.append(action)
    if not actions:
        _refuse("The actions is empty.")
    for source in info.source_ips or ():
        if not source.strip():
            _refuse("The source ip is empty.")
        if network(source) is None:
            _refuse("The source ip is invalid.")
    decision = _by_name(Decision, info.decision)
    if decision is None:
        _refuse("The decision is null or illegal.")
    environment = Environment(source_ips=tuple(info.source_ips) if info.source_ips else None)
    return Entry(actions=tuple(dict.fromkeys(actions)), decision=decision, environment=environment, resource=resource)


Network = ipaddress.IPv4Network | ipaddress.IPv6Network


def network(text: str) -> Network | None:
    """Return an address, or the network that an address with a prefix length is in; None for other texts."""
    try:
        if "%" in text or not (text.rpartition("/")[2].isdecimal() or "/" not in text):
            return None
        return ipaddress.ip_network(text, strict=False)
    except ValueError:
        return None


def user_info(user: User, *, with_password: bool) -> UserInfo:
    """Return a user as answers have it."""
    return UserInfo(
        user.password if with_password else None, word(user.user_status), word(user.user_type), user.username
    )


def acl_info(acl: Acl, resource_filter: str = "") -> AclInfo:
    """Return the policies of a user as answers have them, with only those entries whose resource key contains
    `resource_filter`."""
    policies = []
    for policy in acl.policies:
        entries = [
            PolicyEntryInfo(
                [word(action) for action in entry.actions],
                word(entry.decision),
                entry.resource.key,
                list(entry.sources) or None,
            )
            for entry in policy.entries
            if resource_filter in entry.resource.key
        ]
        if entries:
            policies.append(PolicyInfo(entries, word(policy.policy_type)))
    return AclInfo(policies or None, f"{USER_PREFIX}{acl.subject.username}")
