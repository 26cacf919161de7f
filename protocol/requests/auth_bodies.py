"""Bodies of the requests about users and policies, AUTH_CREATE_USER (3001) to AUTH_LIST_ACL (3010).

    {"password":"...","userStatus":"enable","userType":"Normal","username":"orders"}

    {"policies":[{"entries":[{"actions":["Pub","Sub"],"decision":"Allow","resource":"Topic:orders",
     "sourceIps":["10.0.0.0/8"]}],"policyType":"Custom"}],"subject":"User:orders"}

A missing field is null. The fields are in the order in which RocketMQ writes them.

Source: apache/rocketmq remoting/protocol/body/{UserInfo,AclInfo}.java at 5.3.3.
"""

from __future__ import annotations

import msgspec


class UserInfo(msgspec.Struct, rename="camel", omit_defaults=True, gc=False):
    """A user. `user_type`: Super or Normal; `user_status`: enable or disable."""

    password: str | None = None
    user_status: str | None = None
    user_type: str | None = None
    username: str | None = None

    def __repr__(self) -> str:
        return f"UserInfo({self.username!r}, {self.user_type!r}, {self.user_status!r})"


class PolicyEntryInfo(msgspec.Struct, rename="camel", omit_defaults=True):
    """The entry of a policy for one resource, such as `Topic:orders`, `Group:orders*`, `Cluster:*` or `*`."""

    actions: list[str] | None = None
    decision: str | None = None
    resource: str | None = None
    source_ips: list[str] | None = None


class PolicyInfo(msgspec.Struct, rename="camel", omit_defaults=True):
    """A policy. `policy_type`: Custom or Default."""

    entries: list[PolicyEntryInfo] | None = None
    policy_type: str | None = None


class AclInfo(msgspec.Struct, rename="camel", omit_defaults=True):
    """The policies of a subject, which is `User:` and a name."""

    policies: list[PolicyInfo] | None = None
    subject: str | None = None
