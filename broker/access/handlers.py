"""The accounts by request: UPDATE_AND_CREATE_ACL_CONFIG (50), DELETE_ACL_CONFIG (51), GET_BROKER_CLUSTER_ACL_INFO (52),
UPDATE_GLOBAL_WHITE_ADDRS_CONFIG (53), GET_BROKER_CLUSTER_ACL_CONFIG (54).

Answers after apache/rocketmq broker/processor/AdminBrokerProcessor.java at 4.9.7; they never repeat a secret, as
Apache's brokers do in a refusal. 5.x has none of these codes.
"""

from __future__ import annotations

from typing import Final, NoReturn

import structlog

from duemq.broker.access import acl_file
from duemq.broker.access.acl_file import PERMISSIONS, SHORTEST_KEY, Table
from duemq.broker.access.acl_files import AclFiles
from duemq.broker.access.addresses import AddressPattern
from duemq.broker.access.permission import ADMINISTER, LOOK
from duemq.broker.errors import AclFileError, ChangeRefused, Refused
from duemq.broker.net.connection import Connection
from duemq.broker.net.router import Router
from duemq.protocol.codes import RequestCode, ResponseCode
from duemq.protocol.frames import fastjson
from duemq.protocol.frames.command import Command
from duemq.protocol.requests.headers import (
    AclConfigVersion,
    CreateAccessConfig,
    DeleteAccessConfig,
    NoFields,
    Request,
    UpdateGlobalWhiteAddrs,
    response,
)

log = structlog.get_logger(__name__)

_ACCOUNT_FIELDS: Final = (
    "accessKey",
    "admin",
    "defaultGroupPerm",
    "defaultTopicPerm",
    "groupPerms",
    "secretKey",
    "topicPerms",
    "whiteRemoteAddress",
)
"""The entries of an account in the answer to 54: those that RocketMQ knows."""


class AclHandlers:
    """Returns and changes the accounts."""

    def __init__(self, files: AclFiles, cluster: str, broker: str, address: str) -> None:
        """`cluster`, `broker` and `address`: how answers to tools name this broker."""
        self._files = files
        self._cluster = cluster
        self._broker = broker
        self._address = address

    def register(self, router: Router) -> None:
        """Add the handlers to a router."""
        add = router.add
        add(RequestCode.UPDATE_AND_CREATE_ACL_CONFIG, CreateAccessConfig, ADMINISTER, self.update)
        add(RequestCode.DELETE_ACL_CONFIG, DeleteAccessConfig, ADMINISTER, self.delete)
        add(RequestCode.GET_BROKER_CLUSTER_ACL_INFO, NoFields, LOOK, self.versions)
        add(RequestCode.UPDATE_GLOBAL_WHITE_ADDRS_CONFIG, UpdateGlobalWhiteAddrs, ADMINISTER, self.set_white_list)
        # The answer has secrets, so the role look is not enough.
        add(RequestCode.GET_BROKER_CLUSTER_ACL_CONFIG, NoFields, ADMINISTER, self.accounts)

    async def update(self, connection: Connection, request: Request[CreateAccessConfig]) -> Command:
        """Create or change an account. Entries that the request does not name stay as they are. The change counts from
        the next request on."""
        header = request.header
        failed = ResponseCode.UPDATE_AND_CREATE_ACL_CONFIG_FAILED
        fields = _fields(header)
        try:
            await self._files.update_account(header.access_key, fields)
        except (AclFileError, OSError) as error:
            _not_written(failed, error)
        log.info("account_changed", access_key=header.access_key, is_admin=header.admin, peer=connection.peer)
        return response(ResponseCode.SUCCESS)

    async def delete(self, connection: Connection, request: Request[DeleteAccessConfig]) -> Command:
        """Remove an account."""
        key, failed = request.header.access_key, ResponseCode.DELETE_ACL_CONFIG_FAILED
        try:
            await self._files.delete_account(key)
        except ChangeRefused:
            why = f"The accesskey[{key}] corresponding to accessConfig has been deleted failed."
            raise Refused(failed, why) from None
        except (AclFileError, OSError) as error:
            _not_written(failed, error)
        log.info("account_deleted", access_key=key, peer=connection.peer)
        return response(ResponseCode.SUCCESS)

    async def versions(self, _: Connection, __: Request[NoFields]) -> Command:
        """Return the versions of the files."""
        versions = {path: version.to_json() for path, version in self._files.versions.items()}
        default = versions.get(self._files.default_file, {"counter": 0, "timestamp": 0})
        header = AclConfigVersion(
            version=fastjson.dumps(default).decode(),
            all_acl_file_version=fastjson.dumps(versions).decode(),
            broker_name=self._broker,
            broker_addr=self._address,
            cluster_name=self._cluster,
        )
        return response(ResponseCode.SUCCESS, None, header)

    async def set_white_list(self, connection: Connection, request: Request[UpdateGlobalWhiteAddrs]) -> Command:
        """Replace the white list of one of the files."""
        header, failed = request.header, ResponseCode.UPDATE_GLOBAL_WHITE_ADDRS_CONFIG_FAILED
        patterns = _split(header.global_white_addrs) or []
        try:
            for pattern in patterns:
                AddressPattern(pattern)
            await self._files.set_white_list(patterns, header.acl_file_full_path or "")
        except ChangeRefused:
            raise Refused(
                failed, f"The globalWhiteAddresses[{header.global_white_addrs}] has been updated failed."
            ) from None
        except ValueError as error:
            raise Refused(failed, str(error)) from None
        except (AclFileError, OSError) as error:
            _not_written(failed, error)
        log.info("white_list_changed", addresses=patterns, peer=connection.peer)
        return response(ResponseCode.SUCCESS)

    async def accounts(self, _: Connection, __: Request[NoFields]) -> Command:
        """Return all white lists and accounts, with secrets, as the files have them."""
        white_list: list[str] = []
        accounts: dict[str, Table] = {}
        try:
            tables = await self._files.tables()
        except (AclFileError, OSError) as error:
            _not_written(ResponseCode.SYSTEM_ERROR, error)
        for table in tables:
            white_list += table.get(acl_file.WHITE_LIST) or ()
            for account in table.get(acl_file.ACCOUNTS) or ():
                known = {name: account[name] for name in _ACCOUNT_FIELDS if account.get(name) is not None}
                accounts.setdefault(str(account["accessKey"]), {"admin": False, **known})
        body = {"globalWhiteAddrs": white_list, "plainAccessConfigs": list(accounts.values())}
        return response(ResponseCode.SUCCESS, body=fastjson.dumps(body))


def _fields(header: CreateAccessConfig) -> Table:
    """Return the entries of an account that a request has. Raises Refused, in RocketMQ's words."""
    if min(len(header.access_key), len(header.secret_key or "")) < SHORTEST_KEY:
        _refuse(f"The accessKey={header.access_key} and secretKey=*** cannot be null and length should longer than 6")
    fields: Table = {"secretKey": header.secret_key}
    if header.white_remote_address is not None:
        try:
            AddressPattern(header.white_remote_address)
        except ValueError as error:
            _refuse(str(error))
        fields["whiteRemoteAddress"] = header.white_remote_address
    fields["admin"] = header.admin
    for name, default in (
        ("defaultTopicPerm", header.default_topic_perm),
        ("defaultGroupPerm", header.default_group_perm),
    ):
        if default:
            if default.strip() not in PERMISSIONS:
                _refuse(f"{name}={default} is not one of {', '.join(PERMISSIONS)}")
            fields[name] = default
    for name, text in (("topicPerms", header.topic_perms), ("groupPerms", header.group_perms)):
        entries = _split(text)
        if entries is not None:
            for entry in entries:
                _check_entry(entry)
            fields[name] = entries
    return fields


def _check_entry(entry: str) -> None:
    parts = [part for part in entry.split("=") if part]
    if len(parts) != 2:
        _refuse(
            f"Parse Resource format error for {entry}.\n"
            "The expected resource format is 'Res=Perm'. For example: topicA=SUB"
        )
    if parts[1].strip() not in PERMISSIONS:
        _refuse(
            f"Parse resource permission error for {entry}.\n"
            "The expected permissions are 'SUB' or 'PUB' or 'SUB|PUB' or 'PUB|SUB'."
        )


def _split(text: str | None) -> list[str] | None:
    """Return the parts of a list in a header field, None if there is no such field."""
    return [part for part in text.split(",") if part] if text is not None else None


def _refuse(why: str) -> NoReturn:
    raise Refused(ResponseCode.UPDATE_AND_CREATE_ACL_CONFIG_FAILED, why)


def _not_written(code: int, error: AclFileError | OSError) -> NoReturn:
    """Raise the answer for files that could not be read or written."""
    why = str(error) if isinstance(error, AclFileError) else f"{error.filename}: {error.strerror}"
    log.error("accounts_not_written", reason=why)
    raise Refused(code, why) from None
