"""Authenticates requests for the guard: the user that signed a request, with the secret that is its password.

With the stateful strategy of RocketMQ, the first request of a connection has to be signed, and the following requests
of the same user count as signed. This lasts until the user changes. In RocketMQ it lasts for 60 s whatever changes,
even after a wrong signature.

Source: apache/rocketmq auth/authentication/chain/DefaultAuthenticationHandler.java, auth/authentication/strategy/*.java
at 5.3.3.
"""

from __future__ import annotations

from typing import Any, Final

from duemq.broker.access.accounts import refused
from duemq.broker.access.auth.users import Subject, Users
from duemq.broker.access.permission import Permission
from duemq.broker.errors import AccessRefused
from duemq.broker.net.connection import Connection
from duemq.protocol.codes import ResponseCode
from duemq.protocol.frames.command import Body
from duemq.protocol.requests.headers import Request

_MAX_TOLD: Final = 255


class AuthAuthority:
    """Authenticates requests by the users of ACL 2.0."""

    def __init__(self, users: Users, free_codes: frozenset[int], *, is_stateful: bool) -> None:
        """`free_codes`: request codes that need no user."""
        self._users = users
        self._free_codes = free_codes
        self._known: dict[Connection, Subject] | None = {} if is_stateful else None
        """The user that signed a request of a connection last; None with the stateless strategy."""

    def connection_lost(self, connection: Connection) -> None:
        """Forget the user that signed a request of the connection last."""
        if self._known is not None:
            self._known.pop(connection, None)

    def authenticate(self, connection: Connection, code: int, fields: Any, body: Body) -> Subject | None:
        """Return the user that signed a request; None if requests of its code need none. With the stateful strategy, a
        request of the user that signed last over the connection needs no valid signature until that user changes.
        `fields`: those of a SignedRequest. Raises AccessRefused."""
        name = fields.access_key
        subject = self._users.by_name.get(name)
        if subject is None:
            if code in self._free_codes:
                return None
            if not name:
                raise _refused("account", "username cannot be null.")
            # A secret that was put into the wrong place must not get into the log.
            raise _refused("account", f"User:{name[:_MAX_TOLD]} is not found.", "no user has the name")
        if code in self._free_codes:
            return None
        if not subject.user.is_enabled:
            raise _refused("account", f"User:{name} is disabled.")
        known = self._known
        if known is not None and known.get(connection) is subject:
            return subject
        if not fields.are_signed(subject.key, body):
            raise _refused("signature", "check signature failed.", f"check signature failed, user={name}")
        if known is not None:
            known[connection] = subject
        return subject

    def recheck(
        self, connection: Connection, permission: Permission, request: Request[Any], account: Subject | None
    ) -> None:
        """Check again a request that was let in and still waits, by the user's present state, password and policies.
        `account`: the result of `authenticate` for the request. Raises AccessRefused, ProtocolError."""
        if account is None:
            return  # its code needs no user, so no change of a user matters
        name = account.user.username
        subject = self._users.by_name.get(name)
        if subject is None:
            raise _refused("account", f"User:{name} is not found.")
        if not subject.user.is_enabled:
            raise _refused("account", f"User:{name} is disabled.")
        if subject.user.password != account.user.password:
            raise _refused("signature", "check signature failed.", f"the password was changed, user={name}")
        subject.check(request.code, permission, request, connection.host)


def _refused(kind: str, why: str, reason: str | None = None) -> AccessRefused:
    return refused(kind, why, reason, code=ResponseCode.NO_PERMISSION)
