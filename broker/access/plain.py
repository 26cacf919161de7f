"""Authenticates requests for the guard by the accounts of plain_acl.yml.

The checks have RocketMQ's order: addresses that need no account, the account, addresses from which it needs no
signature, the signature. A client that is let in because of its address may do everything, as in RocketMQ.
"""

from __future__ import annotations

from typing import Any, Final

from duemq.broker.access.accounts import PlainAccount, refused
from duemq.broker.access.acl_files import AclFiles
from duemq.broker.access.permission import Permission
from duemq.broker.net.connection import Connection
from duemq.protocol.frames.command import Body
from duemq.protocol.requests.headers import Request

_MAX_TOLD: Final = 255
"""Maximum length of an unknown access key that an answer repeats."""


class PlainAuthority:
    """Authenticates requests by the accounts of plain_acl.yml and their white lists."""

    def __init__(self, files: AclFiles) -> None:
        self._files = files

    def authenticate(self, connection: Connection, code: int, fields: Any, body: Body) -> PlainAccount | None:
        """Return the account that signed a request; None if the peer's address is on a white list. `is_stranger` of
        such a connection becomes False. `fields`: those of a SignedRequest. Raises AccessRefused."""
        accounts = self._files.accounts
        is_free, keys_without_signature = accounts.hosts.get(connection.host) or accounts.of_host(connection.host)
        if is_free:
            connection.is_stranger = False
            return None
        access_key = fields.access_key
        account = accounts.by_key.get(access_key)
        if account is None:
            if not access_key:
                raise refused("account", "No accessKey is configured")
            # A secret that was put into the wrong place must not get into the log.
            raise refused("account", f"No acl config for {access_key[:_MAX_TOLD]}", "no account has the access key")
        if access_key in keys_without_signature:
            connection.is_stranger = False
            return None
        if not fields.are_signed(account.key, body):
            raise refused("signature", f"Check signature failed for accessKey={access_key}")
        return account

    def recheck(
        self, connection: Connection, permission: Permission, request: Request[Any], account: PlainAccount | None
    ) -> None:
        """Check again a request that was let in and still waits, by the accounts and white lists that are in force now.
        `account`: the result of `authenticate` for the request. Raises AccessRefused, ProtocolError."""
        accounts = self._files.accounts
        is_free, keys_without_signature = accounts.hosts.get(connection.host) or accounts.of_host(connection.host)
        if is_free:
            return
        if account is None:  # the request was let in because of its address
            if not keys_without_signature:
                raise refused("account", f"No white list has {connection.host} any more")
            return
        key = account.access_key
        now = accounts.by_key.get(key)
        if now is None:
            raise refused("account", f"No acl config for {key}")
        if key in keys_without_signature:
            return
        if now.key != account.key:
            raise refused("signature", f"Check signature failed for accessKey={key}")
        now.check(request.code, permission, request, connection.host)
