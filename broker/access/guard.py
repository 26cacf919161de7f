"""Lets requests through or refuses them: the signature of the account, and what the account may do.

A guarded route decodes requests with their fields as they came, since the signature is of those. The account is looked
up again for each request, so a change counts from the next request on. An `Authority` determines who sent a request, by
the accounts of plain_acl.yml (`plain`) or by the users of ACL 2.0 (`auth`).

Keeps invariant 31 of ARCHITECTURE.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Coroutine
from functools import cached_property
from typing import Any, Protocol, TypeVar

import msgspec

from duemq.broker.access.permission import Permission, PlainAction
from duemq.broker.errors import AccessRefused
from duemq.broker.limits import Limits, too_many_requests
from duemq.broker.net.cold_reads import ColdReads
from duemq.broker.net.connection import Connection
from duemq.broker.net.rates import Rates
from duemq.protocol.frames.command import Body, Command
from duemq.protocol.requests.headers import Header, Request, RequestDecoder
from duemq.protocol.requests.signature import Fields, fields_decoder

H = TypeVar("H", bound=Header)

Handler = Callable[[Connection, Request[Any]], Any]


class SignedRequest(Request[H]):
    """A request with its fields as they came (see `signature.Fields`). Once they have been checked, `fields` is None,
    so that a request that is kept, such as a held pull, does not keep them. `account`: the sender, once it is known;
    None if no account is needed, and for requests that need only an action on one topic."""

    fields: Any = None
    account: Any = None


class Account(Protocol):
    """The sender of a request, and what it may do. The checks raise AccessRefused. `host`: the address of the peer."""

    @property
    def name(self) -> str:
        """The access key, or the name of the user. It stays the same when the account changes."""

    def check(self, code: int, permission: Permission, request: Request[Any], host: str) -> None:
        """Check what a request needs, except for a record's topic. Raises ProtocolError too."""

    def check_role(self, code: int, permission: Permission, host: str) -> None:
        """Check what requests of a code need, whatever they are about."""

    def check_topic(self, code: int, topic: str, action: int, host: str) -> None:
        """Check one action on one topic: the fast path for requests that need nothing else."""

    def check_record(self, code: int, topic: str, host: str) -> None:
        """Check that the account may read a record of a topic."""


class Authority(Protocol):
    """Authenticates requests by the accounts that it knows."""

    def authenticate(self, connection: Connection, code: int, fields: Any, body: Body) -> Account | None:
        """Return the account that signed a request; None if it needs no account. If the peer needs none because of its
        address, `is_stranger` of the connection becomes False. `fields`: see SignedRequest. Raises AccessRefused."""

    def recheck(self, connection: Connection, permission: Permission, request: Request[Any], account: Any) -> None:
        """Check again a request that was let in and still waits. `account`: the result of `authenticate` for the
        request. Raises AccessRefused, ProtocolError."""


class SignedDecoder(RequestDecoder[H]):
    """Decodes the requests of one code, with their fields."""

    @cached_property
    def decode_json(self) -> Callable[[bytes], Request[H]]:
        """Returns the request in the JSON header of a frame, with its fields; the caller sets `codec` and `body`.
        Raises msgspec.MsgspecError, RecursionError or UnicodeDecodeError if the slow way, `from_command`, is needed.
        The decoder is made on first use, which takes up to a millisecond."""
        header_type = self.header_type
        decode = msgspec.json.Decoder(SignedRequest[header_type], strict=False).decode  # type: ignore[valid-type]
        decode_fields = fields_decoder(field.encode_name for field in msgspec.structs.fields(header_type))

        def decode_json(header: bytes) -> Request[H]:
            request = decode(header)
            # This fails for other fields and for values that are not texts: the slow path then looks at the request.
            request.fields = decode_fields(header)
            request.account = None  # even if the header has a field of that name
            return request

        return decode_json

    def from_command(self, command: Command, codec: int) -> Request[H]:
        """Return the request in a command, with its fields. Raises FieldError."""
        plain = super().from_command(command, codec)
        return SignedRequest(
            code=plain.code,
            header=plain.header,
            opaque=plain.opaque,
            flag=plain.flag,
            version=plain.version,
            language=plain.language,
            codec=codec,
            body=plain.body,
            fields=Fields(command.ext),
        )


class Guard:
    """Checks the requests of one broker."""

    def __init__(
        self,
        authority: Authority,
        topic_of_record: Callable[[int], str | None],
        reads: ColdReads,
        limits: Limits,
        loop_time: Callable[[], float],
    ) -> None:
        """`topic_of_record`: returns the topic of the record at a physical offset, None if there is none; it may raise
        NotInMemory. `loop_time`: the seconds of the event loop's clock."""
        self._authority = authority
        self._topic_of_record = topic_of_record
        self._reads = reads
        self._limits = limits
        self._loop_time = loop_time
        self._rates: Rates[str] = Rates()
        """The requests that accounts have made, by their names."""
        self.refusals: Counter[str] = Counter()
        """How many requests were refused, by kind: account, signature, role, permission."""

    def guarded(self, permission: Permission, handler: Handler, *, is_async: bool) -> Handler:
        """Return a handler that first checks what a request needs. Its requests come from a SignedDecoder."""
        if permission.is_open:
            return handler
        if permission.only_topic is not None:
            return self._guarded_topic(*permission.only_topic, handler)
        record = permission.record
        if record is None:

            def guarded(connection: Connection, request: Request[Any]) -> Any:
                self._check(permission, connection, request)
                request.fields = None  # type: ignore[attr-defined]
                return handler(connection, request)

        elif is_async:

            def guarded(connection: Connection, request: Request[Any]) -> Any:
                account = self._check(permission, connection, request)
                return self._after_record(account, getattr(request.header, record), handler, connection, request)

        else:

            def guarded(connection: Connection, request: Request[Any]) -> Any:
                account = self._check(permission, connection, request)
                self._check_record(account, request.code, getattr(request.header, record), connection.host)
                request.fields = None  # type: ignore[attr-defined]
                return handler(connection, request)

        return guarded

    def _guarded_topic(self, name: str, action: PlainAction, handler: Handler) -> Handler:
        """Return a handler that first checks one action on one topic, without more work: for the sends."""
        authenticate, needed, limits = self._authority.authenticate, int(action), self._limits

        def guarded(connection: Connection, request: Any) -> Any:
            fields = request.fields
            if fields is not None:
                try:
                    code = request.code
                    account = authenticate(connection, code, fields, request.body)
                    if account is not None:
                        connection.is_stranger = False
                        if limits.requests_per_second_per_account:
                            self._count(account)
                        account.check_topic(code, getattr(request.header, name), needed, connection.host)
                except AccessRefused as error:
                    self.refusals[error.kind] += 1
                    raise
                request.fields = None
            return handler(connection, request)

        return guarded

    def has_role(self, connection: Connection, permission: Permission, request: Any) -> bool:
        """Whether the account of a request that was let in also has the role of another permission."""
        account: Account | None = request.account
        if account is not None:
            try:
                account.check_role(request.code, permission, connection.host)
            except AccessRefused:
                return False
        return True

    def recheck(self, connection: Connection, permission: Permission, request: Any) -> None:
        """Check again a request that was let in and still waits, since the accounts have changed. Raises AccessRefused,
        ProtocolError."""
        try:
            self._authority.recheck(connection, permission, request, request.account)
        except AccessRefused as error:
            raise self._counted(error) from None

    def check_unread(self, connection: Connection, command: Command, permission: Permission) -> None:
        """Check what can be checked of a request that does not decode or has an unknown code: a client that is not let
        in must not learn which requests exist or which fields they have. Raises AccessRefused, LimitReached."""
        if permission.is_open:
            return
        try:
            account = self._authenticate(connection, command.code, Fields(command.ext), command.body)
            if account is not None:
                account.check_role(command.code, permission, connection.host)
        except AccessRefused as error:
            raise self._counted(error) from None

    def _check(self, permission: Permission, connection: Connection, request: Any) -> Account | None:
        """Check what a request needs, except for a record's topic. Raises Refused, ProtocolError."""
        if request.fields is None:
            return None  # it was checked, and is handled again after a read from the disk
        try:
            account = self._authenticate(connection, request.code, request.fields, request.body)
            if account is not None:
                account.check(request.code, permission, request, connection.host)
        except AccessRefused as error:
            raise self._counted(error) from None
        request.account = account
        return account

    def _authenticate(self, connection: Connection, code: int, fields: Any, body: Body) -> Account | None:
        """Return the account that signed a request, see `Authority`, and count the request as one of the account's.
        Raises AccessRefused, LimitReached."""
        account = self._authority.authenticate(connection, code, fields, body)
        if account is not None:
            connection.is_stranger = False
            if self._limits.requests_per_second_per_account:
                self._count(account)
        return account

    def _count(self, account: Account) -> None:
        """Count a request of an account. Raises LimitReached."""
        rate, name = self._limits.requests_per_second_per_account, account.name
        if not self._rates.take(name, 1, rate, self._loop_time()):
            raise too_many_requests("maxRequestsPerSecondPerAccount", rate, name, "account")

    def _check_record(self, account: Account | None, code: int, physical_offset: int, host: str) -> None:
        """Check that an account may read a record. Raises AccessRefused, NotInMemory, OSError."""
        if account is None:
            return
        topic = self._topic_of_record(physical_offset)
        if topic is not None:
            try:
                account.check_record(code, topic, host)
            except AccessRefused as error:
                raise self._counted(error) from None

    async def _after_record(
        self,
        account: Account | None,
        physical_offset: int,
        handler: Callable[[Connection, Request[Any]], Coroutine[Any, Any, Any]],
        connection: Connection,
        request: Request[Any],
    ) -> Any:
        await self._reads.run(self._check_record, account, request.code, physical_offset, connection.host)
        return await handler(connection, request)

    def _counted(self, error: AccessRefused) -> AccessRefused:
        self.refusals[error.kind] += 1
        return error
