"""Users and policies by request: AUTH_CREATE_USER (3001) to AUTH_LIST_ACL (3010).

Passwords are shown to super users only. RocketMQ shows them to every user that may see the cluster (Cluster, Get),
which in effect makes it a super user.

Answers after apache/rocketmq broker/processor/AdminBrokerProcessor.java at 5.3.3; where that fails with a Java error,
the answer says what was wrong.
"""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, Final, NoReturn, TypeVar

import structlog

from duemq.broker.access.auth import model
from duemq.broker.access.auth.model import MAX_NAME, USER_PREFIX, User, UserStatus, UserType
from duemq.broker.access.auth.users import Subject, Users
from duemq.broker.access.permission import ADMINISTER, LOOK
from duemq.broker.errors import AuthStoreError, Refused
from duemq.broker.net.connection import Connection
from duemq.broker.net.router import Router
from duemq.protocol.codes import RequestCode, ResponseCode
from duemq.protocol.frames import fastjson
from duemq.protocol.frames.command import Command
from duemq.protocol.requests import bodies, headers
from duemq.protocol.requests.auth_bodies import AclInfo, UserInfo
from duemq.protocol.requests.headers import Request, response

log = structlog.get_logger(__name__)

T = TypeVar("T")

_ONLY_SUPER: Final = "The super user can only be {} by super user"


class AuthHandlers:
    """Returns and changes users and policies."""

    def __init__(self, users: Users) -> None:
        self._users = users

    def register(self, router: Router) -> None:
        """Add the handlers to a router."""
        add = router.add
        add(RequestCode.AUTH_CREATE_USER, headers.Username, ADMINISTER, self.create_user)
        add(RequestCode.AUTH_UPDATE_USER, headers.Username, ADMINISTER, self.update_user)
        add(RequestCode.AUTH_DELETE_USER, headers.Username, ADMINISTER, self.delete_user)
        add(RequestCode.AUTH_GET_USER, headers.Username, LOOK, self.get_user)
        add(RequestCode.AUTH_LIST_USER, headers.ListUsers, LOOK, self.list_users)
        add(RequestCode.AUTH_CREATE_ACL, headers.SubjectName, ADMINISTER, self.update_acl)
        add(RequestCode.AUTH_UPDATE_ACL, headers.SubjectName, ADMINISTER, self.update_acl)
        add(RequestCode.AUTH_DELETE_ACL, headers.DeleteAcl, ADMINISTER, self.delete_acl)
        add(RequestCode.AUTH_GET_ACL, headers.SubjectName, LOOK, self.get_acl)
        add(RequestCode.AUTH_LIST_ACL, headers.ListAcls, LOOK, self.list_acls)

    # --- users

    async def create_user(self, connection: Connection, request: Request[headers.Username]) -> Command:
        """Create a user; it is a normal one, and enabled, unless the body says otherwise."""
        username, info, kind = _user_of(request)
        if kind is UserType.SUPER and not _is_by_super(request):
            raise Refused(ResponseCode.SYSTEM_ERROR, _ONLY_SUPER.format("create"))
        if not info.password or not info.password.strip():
            _refuse("password can not be blank")
        user = User(
            password=info.password,
            user_status=model.user_status(info.user_status) or UserStatus.ENABLE,
            user_type=kind or UserType.NORMAL,
            username=username,
        )
        await _written(self._users.create_user(user))
        log.info("user_created", user=username, is_super=user.is_super, by=_name_of(request), peer=connection.peer)
        return response(ResponseCode.SUCCESS)

    async def update_user(self, connection: Connection, request: Request[headers.Username]) -> Command:
        """Change the password, the type and the status of a user, as far as the body has them."""
        username, info, kind = _user_of(request)
        if kind is UserType.SUPER and not _is_by_super(request):
            raise Refused(ResponseCode.SYSTEM_ERROR, _ONLY_SUPER.format("update"))
        status = model.user_status(info.user_status)
        self._check_super(request, username)
        password = info.password if info.password and info.password.strip() else None
        await _written(self._users.update_user(username, password, kind, status))
        log.info(
            "user_changed",
            user=username,
            has_new_password=password is not None,
            user_type=model.word(kind) if kind else None,
            user_status=model.word(status) if status else None,
            by=_name_of(request),
            peer=connection.peer,
        )
        return response(ResponseCode.SUCCESS)

    async def delete_user(self, connection: Connection, request: Request[headers.Username]) -> Command:
        """Remove a user and its policies, if there is such a user."""
        username = request.header.username
        if not username.strip():
            _refuse("username can not be blank")
        if username in self._users.by_name:
            self._check_super(request, username)
            await _written(self._users.delete_user(username))
            log.info("user_deleted", user=username, by=_name_of(request), peer=connection.peer)
        return response(ResponseCode.SUCCESS)

    async def get_user(self, _: Connection, request: Request[headers.Username]) -> Command:
        """Return a user; no body if there is none."""
        username = request.header.username
        if not username.strip():
            raise Refused(ResponseCode.INVALID_PARAMETER, "The username is blank")
        subject = self._users.by_name.get(username)
        if subject is None:
            return response(ResponseCode.SUCCESS)
        info = model.user_info(subject.user, with_password=_is_by_super(request))
        return response(ResponseCode.SUCCESS, body=fastjson.dumps(info))

    async def list_users(self, _: Connection, request: Request[headers.ListUsers]) -> Command:
        """Return the users whose names contain a text; no body if there are none."""
        wanted, by_super = _filter(request.header.filter), _is_by_super(request)
        found = [
            model.user_info(subject.user, with_password=by_super)
            for name, subject in sorted(self._users.by_name.items(), key=lambda item: item[0].encode())
            if wanted in name
        ]
        return response(ResponseCode.SUCCESS, body=fastjson.dumps(found) if found else b"")

    def _check_super(self, request: Request[Any], username: str) -> None:
        """Raise Refused if anyone but a super user changes a super user or its policies, which count as soon as it
        becomes a normal user."""
        subject = self._users.by_name.get(username)
        if subject is not None and subject.user.is_super and not _is_by_super(request):
            _refuse(_ONLY_SUPER.format("update"))

    # --- policies

    async def update_acl(self, connection: Connection, request: Request[headers.SubjectName]) -> Command:
        """Add entries to the policies of a user, replacing those for the same resources."""
        info = bodies.decode_request(request.body, AclInfo)
        username = _subject(info.subject or request.header.subject)
        self._check_super(request, username)
        policies = await _written(self._users.update_acl(username, info))
        log.info(
            "policies_changed",
            user=username,
            resources=[entry.resource.key for policy in policies for entry in policy.entries][:20],
            by=_name_of(request),
            peer=connection.peer,
        )
        return response(ResponseCode.SUCCESS)

    async def delete_acl(self, connection: Connection, request: Request[headers.DeleteAcl]) -> Command:
        """Remove the entry for a resource from a user's policies, or all entries if the request names none."""
        header = request.header
        if not header.subject:
            _refuse("The subject is null.")
        username, kind = _subject(header.subject), model.policy_type(header.policy_type)
        has_resource = bool(header.resource and header.resource.strip())
        resource = model.Resource.parse(header.resource or "") if has_resource else None
        self._check_super(request, username)
        await _written(self._users.delete_acl(username, kind, resource))
        log.info(
            "policies_deleted", user=username, resource=header.resource, by=_name_of(request), peer=connection.peer
        )
        return response(ResponseCode.SUCCESS)

    async def get_acl(self, _: Connection, request: Request[headers.SubjectName]) -> Command:
        """Return the policies of a user; no body if it has none."""
        username = _subject(request.header.subject)
        if username not in self._users.by_name:
            _refuse("The subject is not exist.")
        acl = self._users.acls.get(username)
        return response(ResponseCode.SUCCESS, body=fastjson.dumps(model.acl_info(acl)) if acl is not None else b"")

    async def list_acls(self, _: Connection, request: Request[headers.ListAcls]) -> Command:
        """Return the policies of the users whose keys contain the subject filter: their entries whose resources contain
        the resource filter, and, as in RocketMQ, all entries of a user whose own key contains the resource filter. No
        body if there are none."""
        of_subject, of_resource = _filter(request.header.subject_filter), _filter(request.header.resource_filter)
        found = []
        for name, acl in sorted(self._users.acls.items(), key=lambda item: item[0].encode()):
            key = f"{USER_PREFIX}{name}"
            if of_subject in key:
                info = model.acl_info(acl, of_resource if of_resource not in key else "")
                if info.policies:
                    found.append(info)
        return response(ResponseCode.SUCCESS, body=fastjson.dumps(found) if found else b"")


def _user_of(request: Request[headers.Username]) -> tuple[str, UserInfo, UserType | None]:
    """Return the name, the body and the type of a user in a request. Raises Refused, BodyFormatError."""
    username = request.header.username
    if not username:
        raise Refused(ResponseCode.INVALID_PARAMETER, "The username is blank")
    if not username.strip():
        _refuse("username can not be blank")
    info = bodies.decode_request(request.body, UserInfo)
    if max(len(username), len(info.password or "")) > MAX_NAME or not username.isprintable():
        _refuse(f"username and password may have at most {MAX_NAME} characters, and username only printable ones")
    return username, info, model.user_type(info.user_type)


def _subject(key: str) -> str:
    """Return the name of a user in the key of a subject. Raises Refused."""
    kind, _, username = key.partition(":")
    if kind.lower() != "user" or not username:
        _refuse("The subject type is null.")
    return username


def _filter(text: str | None) -> str:
    """Return the text of a filter; without one, the empty text, which matches everything."""
    return text if text is not None and text.strip() else ""


def _asker(request: Request[Any]) -> Subject | None:
    account: Subject | None = getattr(request, "account", None)
    return account


def _name_of(request: Request[Any]) -> str | None:
    asker = _asker(request)
    return asker.user.username if asker is not None else None


def _is_by_super(request: Request[Any]) -> bool:
    asker = _asker(request)
    return asker is not None and asker.user.is_super


async def _written(change: Coroutine[Any, Any, T]) -> T:
    """Make a change. Raises Refused."""
    try:
        return await change
    except AuthStoreError as error:
        raise Refused(ResponseCode.SYSTEM_ERROR, str(error)) from None


def _refuse(why: str) -> NoReturn:
    raise Refused(ResponseCode.NO_PERMISSION, why)
