"""Users and policies created from plain_acl.yml (`migrateAuthFromV1Enabled`): at a start, from the accounts that are
not users yet.

    admin: true            a super user, whatever the account lists
    topicPerms, groupPerms entries of the custom policy; DENY denies all actions
    default...Perm         entries of the default policy for all topics and groups; none if the file has none

White lists and duemq's `role` have no equivalent in ACL 2.0. An unknown permission counts as DENY, as in plain_acl.yml;
RocketMQ turns it into one that allows everything.

Source: apache/rocketmq auth/migration/AuthMigrator.java, auth/migration/v1/PlainPermissionManager.java at 5.3.3.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, NamedTuple

import structlog

from duemq.broker.access import acl_files
from duemq.broker.access.auth.model import (
    Acl,
    Action,
    Decision,
    Entry,
    Named,
    Pattern,
    Policy,
    PolicyType,
    Resource,
    ResourceType,
    User,
    UserType,
)
from duemq.broker.errors import AclFileError
from duemq.protocol.topics import RETRY_PREFIX

log = structlog.get_logger(__name__)

_ACTIONS: Final = {
    "PUB": (Action.PUB,),
    "SUB": (Action.SUB,),
    "PUB|SUB": (Action.PUB, Action.SUB),
    "SUB|PUB": (Action.PUB, Action.SUB),
}


class Migrated(NamedTuple):
    """Users, and the policies of those users that have any."""

    users: list[User]
    acls: list[Acl]


def read(directory: str) -> Migrated:
    """Return the users and policies for the files of accounts in RocketMQ's conf; none if there are no such files.
    Raises AclFileError."""
    migrated = Migrated([], [])
    known = set()
    try:
        for path in acl_files.paths(directory):
            table = acl_files.parsed(path).table
            if table.get("globalWhiteRemoteAddresses"):
                log.warning("not_migrated", file=path, what="globalWhiteRemoteAddresses: ACL 2.0 has no white list")
            for account in table.get("accounts") or ():
                if account["accessKey"] not in known:
                    known.add(account["accessKey"])
                    _migrate(path, account, migrated)
    except OSError as error:
        raise AclFileError(f"{error.filename}: {error.strerror}") from None
    return migrated


def _migrate(path: str, account: dict[str, Any], migrated: Migrated) -> None:
    name = str(account["accessKey"])
    for field in ("whiteRemoteAddress", "role"):
        if account.get(field):
            log.warning("not_migrated", file=path, account=name, what=f"{field}: ACL 2.0 has none")
    kind = UserType.SUPER if account.get("admin") else UserType.NORMAL
    migrated.users.append(User(password=str(account["secretKey"]), user_type=kind, username=name))
    policies = [
        Policy(entries=tuple(entries), policy_type=kind)
        for kind, entries in ((PolicyType.CUSTOM, _custom(account)), (PolicyType.DEFAULT, _default(account)))
        if entries
    ]
    if policies:
        migrated.acls.append(Acl(policies=tuple(policies), subject=Named(username=name)))


def _custom(account: dict[str, Any]) -> list[Entry]:
    entries = []
    for field, kind in (("topicPerms", ResourceType.TOPIC), ("groupPerms", ResourceType.GROUP)):
        for text in account.get(field) or ():
            name, permission = (part.strip() for part in text.split("=") if part)
            if kind is ResourceType.GROUP:
                name = name.removeprefix(RETRY_PREFIX)
            resource = Resource(resource_name=name, resource_pattern=Pattern.LITERAL, resource_type=kind)
            entries.append(_entry(resource, permission))
    return entries


def _default(account: dict[str, Any]) -> Iterable[Entry]:
    return [
        _entry(Resource(resource_pattern=Pattern.ANY, resource_type=kind), str(account[field]).strip())
        for field, kind in (("defaultTopicPerm", ResourceType.TOPIC), ("defaultGroupPerm", ResourceType.GROUP))
        if str(account.get(field) or "").strip()
    ]


def _entry(resource: Resource, permission: str) -> Entry:
    actions = _ACTIONS.get(permission)
    if actions is None:
        return Entry(actions=(Action.ALL,), decision=Decision.DENY, resource=resource)
    return Entry(actions=actions, decision=Decision.ALLOW, resource=resource)
