"""Users and policies of ACL 2.0 for tests: a store in memory, and requests about them.

The bodies are written here as RocketMQ writes them, not by the code under test.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from duemq.broker.access.auth.model import Acl, User
from duemq.broker.errors import AuthStoreError
from duemq.protocol.frames.command import Command
from tests.support.canary import CANARY
from tests.support.wire import request

SUPER = ("root", f"{CANARY}-of-root")
USER = ("orders", f"{CANARY}-of-orders")
ON = (
    "authenticationEnabled=true",
    "authorizationEnabled=true",
    f'initAuthenticationUser={{"username":"{SUPER[0]}","password":"{SUPER[1]}"}}',
)
"""Settings that turn ACL 2.0 on, with a super user."""


class MemoryStore:
    """Users and policies in memory. Implements `store.AuthStore`. `fails`: no change is written."""

    def __init__(self, users: Iterable[User] = (), acls: Iterable[Acl] = ()) -> None:
        self.users = {user.username: user for user in users}
        self.acls = {acl.subject.username: acl for acl in acls}
        self.fails = False
        self.is_closed = False

    def load(self) -> tuple[list[User], list[Acl]]:
        return list(self.users.values()), list(self.acls.values())

    def put_user(self, user: User) -> None:
        self._check()
        self.users[user.username] = user

    def delete_user(self, username: str) -> None:
        self._check()
        self.acls.pop(username, None)
        self.users.pop(username, None)

    def put_acl(self, acl: Acl) -> None:
        self._check()
        self.acls[acl.subject.username] = acl

    def delete_acl(self, username: str) -> None:
        self._check()
        self.acls.pop(username, None)

    def close(self) -> None:
        assert not self.is_closed
        self.is_closed = True

    def _check(self) -> None:
        if self.fails:
            raise AuthStoreError("users and policies cannot be written (no space)")


def ask(code: int, ext: dict[str, str] | None = None, body: Any = None) -> Command:
    """A request with a body in JSON; None: with none."""
    command = request(code, None, json.dumps(body).encode() if body is not None else b"")
    command.ext = dict(ext or {})
    return command


def create_user(account: tuple[str, str], **fields: str) -> Command:
    """AUTH_CREATE_USER."""
    return ask(3001, {"username": account[0]}, {"username": account[0], "password": account[1], **fields})


def update_user(username: str, **fields: str) -> Command:
    """AUTH_UPDATE_USER."""
    return ask(3002, {"username": username}, fields)


def entry(resource: str, *actions: str, decision: str = "Allow", source_ips: list[str] | None = None) -> dict[str, Any]:
    """What a policy says of a resource."""
    fields = {"resource": resource, "actions": list(actions), "decision": decision}
    return fields if source_ips is None else fields | {"sourceIps": source_ips}


def update_acl(username: str, *entries: dict[str, Any], policy_type: str = "Custom", code: int = 3007) -> Command:
    """AUTH_UPDATE_ACL, or AUTH_CREATE_ACL, which is the same."""
    body = {"policies": [{"policyType": policy_type, "entries": list(entries)}]}
    return ask(code, {"subject": f"User:{username}"}, body)
