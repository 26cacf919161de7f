"""The users and their policies in memory, by which requests are checked.

A user is looked up for each request, and a change replaces its `Subject`, with the decisions kept in it, by a new one.
So a change counts from the next request on. Changes are made one after another: each is on the disk before it counts.

Keeps invariants 30 and 32 of ARCHITECTURE.md.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any, Final, NoReturn, TypeVar

import msgspec
import structlog

from duemq.broker.access.accounts import refused
from duemq.broker.access.auth.model import (
    MAX_NAME,
    Acl,
    Decision,
    Policy,
    PolicyType,
    Resource,
    ResourceType,
    User,
    UserStatus,
    UserType,
    empty_acl,
    network,
    read_policies,
    word,
)
from duemq.broker.access.auth.needs import OF_ACTION, NeededActions, Needs, of_topic
from duemq.broker.access.auth.rules import PreparedPolicies
from duemq.broker.access.auth.store import AuthStore
from duemq.broker.access.permission import Permission, PlainAction
from duemq.broker.errors import AuthStoreError, Refused
from duemq.broker.limits import MAX_NAME_LENGTH
from duemq.broker.workers import Background, Workers
from duemq.protocol.codes import ResponseCode
from duemq.protocol.requests.auth_bodies import AclInfo
from duemq.protocol.requests.headers import Request
from duemq.protocol.requests.signature import SecretKey
from duemq.protocol.topics import HALF_TOPIC, SCHEDULE_TOPIC, TIMER_TOPIC

log = structlog.get_logger(__name__)

T = TypeVar("T")

MAX_USERS: Final = 100_000
_MAX_DECISIONS: Final = 10_000
"""Maximum number of decisions that are kept for one user."""
_OF_ALL_TOPICS: Final = frozenset({SCHEDULE_TOPIC, TIMER_TOPIC, HALF_TOPIC})
"""Topics with messages for all topics: a policy that allows something on them has to name them."""


class Authorization:
    """The scope of authorization: the cluster, and the request codes that need none."""

    def __init__(self, cluster: str, free_codes: frozenset[int] = frozenset(), *, is_on: bool = True) -> None:
        self.needs = Needs(cluster)
        self.free_codes = free_codes
        self.is_on = is_on


class Subject:
    """A user with its policies; a change of either replaces the object. See `guard.Account`."""

    __slots__ = ("_allowed", "_authorization", "_rules", "acl", "key", "may_all", "user")

    def __init__(self, user: User, acl: Acl, authorization: Authorization) -> None:
        self.user = user
        self.acl = acl
        self.key = SecretKey(user.password)
        self.may_all = user.is_super or not authorization.is_on
        self._authorization = authorization
        self._rules = PreparedPolicies(acl)
        self._allowed: set[tuple[object, ...]] = set()
        """Needs of requests that were allowed. None can become wrong, since neither the user nor its policies change.
        Names are at most MAX_NAME_LENGTH characters long, so the number of entries bounds the memory."""

    @property
    def name(self) -> str:
        """The user's name. It stays the same when the user's password, type or policies change."""
        return self.user.username

    def check(self, code: int, permission: Permission, request: Request[Any], host: str) -> None:
        """Check that the policies allow all that a request needs, except for a record's topic. Raises Refused if a name
        is too long, AccessRefused, ProtocolError."""
        if not self._may(code):
            for need in self._authorization.needs.of_request(permission, request):
                self._require(need, host)

    def check_role(self, code: int, permission: Permission, host: str) -> None:
        """Check that the policies allow requests of a code, whatever they are about. Raises AccessRefused."""
        if not self._may(code):
            for need in self._authorization.needs.of_role(code, permission):
                self._require(need, host)

    def check_topic(self, code: int, topic: str, action: int, host: str) -> None:
        """Check one action on one topic: the fast path for requests that need nothing else. Raises Refused if the name
        is too long, AccessRefused."""
        key = (topic, action, host)
        if key not in self._allowed and not self._may(code):
            self._require(of_topic(topic, OF_ACTION[PlainAction(action)]), host)
            self._note(key)

    def check_record(self, code: int, topic: str, host: str) -> None:
        """Check that the policies allow the user to read a record of a topic. Raises Refused if the topic's name is too
        long, AccessRefused."""
        if not self._may(code):
            self._require(self._authorization.needs.of_record(code, topic), host)

    def _may(self, code: int) -> bool:
        return self.may_all or code in self._authorization.free_codes

    def _require(self, need: NeededActions, host: str) -> None:
        key = (need, host)
        if key in self._allowed:
            return
        kind, name, actions = need
        if len(name) > MAX_NAME_LENGTH:  # before anything is kept of it
            raise Refused(
                ResponseCode.SYSTEM_ERROR,
                f"The specified {word(kind).lower()} is longer than {MAX_NAME_LENGTH} characters",
            )
        has_to_be_named = kind is ResourceType.TOPIC and name in _OF_ALL_TOPICS
        decision = self._rules.decide(kind, name, actions, host, has_to_be_named=has_to_be_named)
        if decision is not Decision.ALLOW:
            resource = f"{word(kind)}:{name[:MAX_NAME]}"
            detail = "no matched policies." if decision is None else "the decision is deny."
            why = f"User:{self.user.username} has no permission to access {resource} from {host}, {detail}"
            raise refused("permission", why, code=ResponseCode.NO_PERMISSION)
        self._note(key)

    def _note(self, key: tuple[object, ...]) -> None:
        if len(self._allowed) >= _MAX_DECISIONS:
            self._allowed.clear()
        self._allowed.add(key)


class Users:
    """All users. Belongs to the event loop; the store is written by a thread."""

    def __init__(self, store: AuthStore, workers: Workers, authorization: Authorization) -> None:
        """Read all users and policies. Raises AuthStoreError."""
        self._store = store
        self._workers = workers
        self._authorization = authorization
        self._one_at_a_time = asyncio.Lock()
        self._on_change: list[Callable[[], None]] = []
        users, acls = store.load()
        self.acls = {acl.subject.username: acl for acl in acls}
        """The policies by user name; a user may have policies before it exists."""
        self.by_name: dict[str, Subject] = {}
        for user in users:
            self._use(user)
        log.info("users_read", users=len(users), policies=len(acls), supers=sum(user.is_super for user in users))
        for acl in acls:
            _warn(acl)

    def on_change(self, callback: Callable[[], None]) -> None:
        """Call `callback` after each change."""
        self._on_change.append(callback)

    def close(self) -> None:
        """Close the store. Nothing may be changed afterwards."""
        self._store.close()

    @property
    def supers(self) -> list[str]:
        """The names of the super users that are enabled."""
        return [name for name, subject in self.by_name.items() if subject.user.is_super and subject.user.is_enabled]

    # --- changes. They raise Refused, in RocketMQ's words, and AuthStoreError.

    def add_at_start(self, users: Iterable[User], acls: Iterable[Acl]) -> list[str]:
        """Create the users among these that do not exist yet, with their policies, before any request comes. Return the
        names of the new users. Raises AuthStoreError."""
        table = {acl.subject.username: acl for acl in acls}
        added = []
        for user in users:
            if user.username in self.by_name:
                continue
            acl = table.get(user.username)
            if acl is not None:  # before the user, so that a crash leaves none without its policies
                self._store.put_acl(acl)
                self.acls[user.username] = acl
            self._store.put_user(user)
            self._use(user)
            added.append(user.username)
        return added

    async def create_user(self, user: User) -> None:
        """Create a user."""
        async with self._one_at_a_time:
            name = user.username
            if name in self.by_name:
                _refuse("The user is existed")
            if len(self.by_name) >= MAX_USERS:
                _refuse(f"There are {MAX_USERS} users, which is the maximum")
            await self._write_user(user)

    async def update_user(
        self, username: str, password: str | None, user_type: UserType | None, status: UserStatus | None
    ) -> None:
        """Change those properties of a user that are not None here."""
        async with self._one_at_a_time:
            old = self.by_name.get(username)
            if old is None:
                _refuse("The user is not exist")
            user = msgspec.structs.replace(
                old.user,
                password=password or old.user.password,
                user_type=user_type or old.user.user_type,
                user_status=status or old.user.user_status,
            )
            if not (user.is_super and user.is_enabled):
                self._check_not_last(username)
            await self._write_user(user)

    async def delete_user(self, username: str) -> None:
        """Remove a user and its policies."""
        async with self._one_at_a_time:
            self._check_not_last(username)
            await self._in_thread(lambda: self._store.delete_user(username))
            self.by_name.pop(username, None)
            self.acls.pop(username, None)
            self._changed()

    async def update_acl(self, username: str, info: AclInfo) -> list[Policy]:
        """Add the entries of a request to a user's policies, replacing those for the same resources; return them."""
        async with self._one_at_a_time:
            policies = await self._in_thread(lambda: read_policies(info))
            if username not in self.by_name:
                _refuse(f"The subject of User:{username[:MAX_NAME]} is not exist.")
            old = self.acls.get(username, empty_acl(username))
            await self._write_acl(username, await self._in_thread(lambda: old.changed(policies)))
            return policies

    async def delete_acl(self, username: str, kind: PolicyType, resource: Resource | None) -> None:
        """Remove the entry for a resource, or all entries."""
        async with self._one_at_a_time:
            if username not in self.by_name:
                _refuse("The subject is not exist.")
            if username not in self.acls:
                _refuse("The acl is not exist.")
            acl = self.acls[username].without(kind, resource) if resource is not None else empty_acl(username)
            await self._write_acl(username, acl)

    # ---

    async def _write_user(self, user: User) -> None:
        """Write a user and use it. Its policies are prepared in the thread too, as there may be thousands."""
        name = user.username
        acl = self.acls.get(name, empty_acl(name))

        def write() -> Subject:
            self._store.put_user(user)
            return Subject(user, acl, self._authorization)

        self.by_name[name] = await self._in_thread(write)
        self._changed()

    async def _write_acl(self, username: str, acl: Acl) -> None:
        """Write the policies of a user, or remove them if there are none, and use them."""
        user = self.by_name[username].user

        def write() -> Subject:
            if acl.policies:
                self._store.put_acl(acl)
            else:
                self._store.delete_acl(username)
            return Subject(user, acl, self._authorization)

        self.by_name[username] = await self._in_thread(write)
        if acl.policies:
            self.acls[username] = acl
        else:
            self.acls.pop(username, None)
        self._changed()

    async def _in_thread(self, work: Callable[[], T]) -> T:
        try:
            return await self._workers.run(Background.TABLES, work)
        except AuthStoreError as error:
            log.error("users_not_written", reason=str(error))
            raise

    def _use(self, user: User) -> None:
        """At the start, make a user known that is already on the disk."""
        name = user.username
        self.by_name[name] = Subject(user, self.acls.get(name, empty_acl(name)), self._authorization)

    def _changed(self) -> None:
        for callback in self._on_change:
            callback()

    def _check_not_last(self, username: str) -> None:
        """Raise Refused if this is the last enabled super user: only a super user can create another one."""
        if self.supers == [username]:
            _refuse(f"{username} is the last super user that is enabled, create another one first")


def _warn(acl: Acl) -> None:
    for policy in acl.policies:
        for entry in policy.entries:
            wrong = [source for source in entry.sources if network(source) is None]
            if wrong:
                effect = "everywhere" if entry.decision is Decision.DENY else "nowhere"
                log.warning(
                    "policy_doubtful",
                    user=acl.subject.username,
                    resource=entry.resource.key,
                    reason=f"{', '.join(wrong)} is neither an address nor a network, and counts as {effect}",
                )


def _refuse(why: str) -> NoReturn:
    raise Refused(ResponseCode.NO_PERMISSION, why)
