"""The users and policies of ACL 2.0, at all brokers of a cluster: duemq's, and RocketMQ's from 5.3 on."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from types import TracebackType
from typing import Final, Literal, Self, TypeVar

import msgspec

from duemq._net.client import Client, typed_body
from duemq._net.connection import Codec
from duemq._net.keys import signer_of
from duemq._net.tls import Tls, context_of
from duemq._values import checks
from duemq._values.intervals import CONNECT_TIMEOUT, Intervals, with_timeouts
from duemq.errors import ArgumentError, ClosedError
from duemq.protocol.codes import RequestCode
from duemq.protocol.requests import headers
from duemq.protocol.requests.auth_bodies import AclInfo, PolicyEntryInfo, PolicyInfo, UserInfo
from duemq.protocol.requests.bodies import HeartbeatData

T = TypeVar("T")

UserType = Literal["Super", "Normal"]
PolicyType = Literal["Custom", "Default"]
Decision = Literal["Allow", "Deny"]
ACTIONS: Final = ("All", "Pub", "Sub", "Create", "Update", "Delete", "Get", "List")


class AuthAdmin:
    """Shows and changes users and policies, at all brokers that the name servers know.

        async with AuthAdmin("127.0.0.1:9876", access_key="admin", secret_key=...) as admin:
            await admin.create_user("orders", secret)
            await admin.set_policy("orders", ["Topic:orders"], ["Pub"])

    The arguments are those of `Admin`. Brokers do not copy users from each other: for a broker that is down, or is
    added later, the changes must be repeated (`mqadmin copyUser`, `copyAcl`). If a change fails at one broker, it may
    have been made at others.

    Raises ArgumentError for invalid arguments, as the methods do. These also raise ClosedError, BrokerError
    (AccessDeniedError for a refused request, NotSupportedError if a broker has no ACL 2.0), ConnectError,
    ConnectionLostError, PeerError and RequestTimeoutError.
    """

    def __init__(
        self,
        nameserver: str = "127.0.0.1:9876",
        *,
        codec: Codec = "auto",
        timeout: float = 30.0,
        access_key: str | None = None,
        secret_key: str | None = None,
        tls: Tls = False,
        connect_timeout: float = CONNECT_TIMEOUT,
        _intervals: Intervals | None = None,
    ) -> None:
        self._timeout = checks.check_timeout(timeout)
        self._client = Client(
            nameserver,
            codec=codec,
            heartbeat=lambda client_id: HeartbeatData(client_id, [], []),
            intervals=with_timeouts(
                _intervals, checks.check_timeout(connect_timeout, "connect_timeout"), self._timeout
            ),
            signer=signer_of(access_key, secret_key),
            tls=context_of(tls),
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_open = False

    async def __aenter__(self) -> Self:
        await self._client.start()
        self._loop, self._is_open = asyncio.get_running_loop(), True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        checks.check_loop(self._loop, "admin")
        self._is_open = False
        await self._client.close()

    # --- users

    async def users(self) -> dict[str, list[UserInfo]]:
        """Return the users of each broker, by its address."""

        async def ask(address: str) -> list[UserInfo]:
            answer = await self._client.call(
                address, RequestCode.AUTH_LIST_USER, headers.ListUsers(), timeout=self._timeout
            )
            return typed_body(answer, list[UserInfo], address) if answer.body else []

        return await self._of_all(ask)

    async def create_user(self, name: str, password: str, user_type: UserType = "Normal") -> None:
        """Create a user. Clients sign with the user's name as access key and its password as secret key."""
        _check_text(password, "password")
        _check_text(user_type, "user_type")
        await self._change_user(RequestCode.AUTH_CREATE_USER, name, UserInfo(password, None, user_type, name))

    async def update_user(
        self,
        name: str,
        *,
        password: str | None = None,
        user_type: UserType | None = None,
        is_enabled: bool | None = None,
    ) -> None:
        """Change the given attributes of a user. A user that is not enabled has no permissions."""
        if password is not None:
            _check_text(password, "password")
        if user_type is not None:
            _check_text(user_type, "user_type")
        if is_enabled is not None:
            checks.check_flag(is_enabled, "is_enabled")
        status = None if is_enabled is None else "enable" if is_enabled else "disable"
        await self._change_user(RequestCode.AUTH_UPDATE_USER, name, UserInfo(password, status, user_type, name))

    async def delete_user(self, name: str) -> None:
        """Remove a user and its policies. Does nothing if the user does not exist."""
        await self._change(RequestCode.AUTH_DELETE_USER, headers.Username(_named(name)))

    async def _change_user(self, code: RequestCode, name: str, info: UserInfo) -> None:
        await self._change(code, headers.Username(_named(name)), msgspec.json.encode(info))

    # --- policies

    async def policies(self, name: str | None = None) -> dict[str, list[AclInfo]]:
        """Return the policies of all users, or of one, for each broker by its address."""
        if name is not None:
            _check_text(name, "name")

        async def ask(address: str) -> list[AclInfo]:
            answer = await self._client.call(
                address, RequestCode.AUTH_LIST_ACL, headers.ListAcls(name), timeout=self._timeout
            )
            found = typed_body(answer, list[AclInfo], address) if answer.body else []
            return [each for each in found if name is None or each.subject == f"User:{name}"]

        return await self._of_all(ask)

    async def set_policy(
        self,
        name: str,
        resources: Iterable[str],
        actions: Iterable[str],
        *,
        decision: Decision = "Allow",
        source_ips: Sequence[str] = (),
        policy_type: PolicyType = "Custom",
    ) -> None:
        """Allow or deny a user actions on resources: `Topic:orders`, `Group:orders*`, `Cluster:*` or `*`. The policy
        replaces the user's earlier ones for these resources. `actions`: some of ACTIONS; `source_ips`: the addresses
        and networks to which the policy is limited."""
        wanted, sources = _texts(actions, "actions"), _texts(source_ips, "source_ips")
        _check_text(decision, "decision")
        _check_text(policy_type, "policy_type")
        info = AclInfo(
            [
                PolicyInfo(
                    [
                        PolicyEntryInfo(wanted, decision, resource, sources or None)
                        for resource in _texts(resources, "resources")
                    ],
                    policy_type,
                )
            ],
            f"User:{_named(name)}",
        )
        await self._change(RequestCode.AUTH_UPDATE_ACL, headers.SubjectName(f"User:{name}"), msgspec.json.encode(info))

    async def delete_policy(self, name: str, resource: str | None = None, policy_type: PolicyType = "Custom") -> None:
        """Remove a user's policy for a resource, or all policies of the user."""
        if resource is not None:
            _check_text(resource, "resource")
        _check_text(policy_type, "policy_type")
        await self._change(
            RequestCode.AUTH_DELETE_ACL, headers.DeleteAcl(f"User:{_named(name)}", policy_type, resource)
        )

    # --- all brokers

    async def _change(self, code: RequestCode, header: headers.Header, body: bytes = b"") -> None:
        async def ask(address: str) -> None:
            await self._client.call(address, code, header, body, timeout=self._timeout)

        await self._of_all(ask)

    async def _of_all(self, ask: Callable[[str], Awaitable[T]]) -> dict[str, T]:
        """Return the answers of all brokers. Raises ClosedError if the admin is not open, and the first broker's error
        once all have answered."""
        if not self._is_open:
            raise ClosedError("the admin is closed, or was not opened: async with ...")
        checks.check_loop(self._loop, "admin")
        addresses = await self._client.all_brokers()
        found = await asyncio.gather(*map(ask, addresses), return_exceptions=True)
        answers = {}
        for address, each in zip(addresses, found, strict=True):
            if isinstance(each, BaseException):
                raise each
            answers[address] = each
        return answers


def _check_text(text: str, name: str) -> None:
    """Check an argument that is a text, given by its name. Raises ArgumentError if it is not a str, or if UTF-8 cannot
    carry it. No error contains the text, which may be a password."""
    if not isinstance(text, str):
        raise ArgumentError(f"{name} is of type {type(text).__name__}: give a str")
    checks.encoded(text, name)


def _texts(texts: Iterable[str], name: str) -> list[str]:
    """Return an argument that is several texts, given by its name. Raises ArgumentError also for a single str, whose
    characters would be taken for the texts."""
    if isinstance(texts, str) or not isinstance(texts, Iterable):
        raise ArgumentError(f"{name}={texts!r}: give a list of str")
    found = list(texts)
    for each in found:
        _check_text(each, f"an element of {name}")
    return found


def _named(name: str) -> str:
    _check_text(name, "name")
    if not name.strip():
        raise ArgumentError("the name of a user must not be blank")
    return name
