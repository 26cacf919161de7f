"""The entries of the audit log: one for each request that changes something, even if it is refused.

    {"time":"2026-11-25T19:30:00.123Z","action":"UPDATE_AND_CREATE_TOPIC","code":17,"account":"administrator",
     "peer":"10.0.0.5:40000","topic":"orders","fields":{"perm":6,...},"result":0}

`account` is the access key that the request names, if such an account or user exists: another name may be a secret that
was put into the wrong place. If a request was refused for its signature, which `result` and `remark` show, `account` is
only what the client claims. An entry never has bodies, values of the name server's key-value configuration, secret
keys, passwords or signatures: fields of a header with such names are left out, and of a body an entry takes only what
`_of_body` returns. `result` is RocketMQ's response code, or "waits" if the answer waits for the disk.

Topics and groups that a send or a heartbeat creates are recorded too. Registrations of brokers, which are repeated all
the time, are recorded only when they change something: a new broker, another address or account, another result.

Refusals for the account or the signature, which any client can cause, have no fields. Their entries per second and
their bytes per minute are limited, so that a client without an account cannot push other entries out of the files
within weeks; an entry says how many were left out. Refusals for a permission or a role have limits of their own.

Keeps invariants 31 and 33 of ARCHITECTURE.md.
"""

from __future__ import annotations

import datetime
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Final, Protocol

import msgspec

from duemq.broker.access.permission import Permission, Role
from duemq.broker.audit.log import AuditLog, Entry
from duemq.broker.errors import AccessRefused, ConfigError, NotNow, Refused
from duemq.broker.settings import broker_conf
from duemq.broker.settings.config import LIVE
from duemq.protocol.codes import RequestCode, ResponseCode
from duemq.protocol.frames import codec
from duemq.protocol.frames.command import Command
from duemq.protocol.frames.frame import FrameReader
from duemq.protocol.requests.headers import Request
from duemq.storage.clock import Clock
from duemq.storage.errors import NotInMemory

_CHANGES_WITHOUT_ROLE: Final = frozenset(
    {RequestCode.RECALL_MESSAGE, RequestCode.CHANGE_RECURRING, RequestCode.CHANGE_BY_HANDLE}
)
_CHANGES_NOTHING: Final = frozenset({RequestCode.QUERY_DATA_VERSION, RequestCode.REPORT_BRIDGE})
_MAX_TEXT: Final = 256
"""Maximum number of characters of a field, a remark or a name in an entry."""
_MAX_NAMES: Final = 100
"""Maximum number of settings, topics or groups in an entry."""
_LISTS: Final[dict[int, tuple[str, str, str]]] = {
    RequestCode.UPDATE_AND_CREATE_TOPIC_LIST: ("topics", "topicConfigList", "topicName"),
    RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST: ("groups", "groupConfigList", "groupName"),
}
"""Requests that create several things: the field of an entry that has their names, and where a body has the names."""
_NOT_DECODED: Final = (msgspec.MsgspecError, UnicodeDecodeError, KeyError, TypeError, RecursionError)
_MAX_REGISTRATIONS: Final = 2000
MAX_REFUSALS_A_SECOND: Final = 20
MAX_REFUSAL_BYTES_A_MINUTE: Final = 16 * 1024
"""Maximum number of bytes of entries about refusals in a minute. At this rate, the ten files of 64 MiB last for four
weeks."""
_OF_STRANGERS: Final = ("account", "signature")
"""The kinds of refusals that a client without an account can cause."""
_HEAD: Final = ("time", "action", "code", "account", "peer")
"""The fields of entries about strangers, apart from the result."""
_RESOURCES: Final = (("topic", "topic"), ("consumer_group", "group"), ("group_name", "group"), ("group", "group"))
"""Fields of headers that name a topic or a group."""
_SECRET: Final = ("secret", "password", "signature", "value", "credential", "token")
"""A field whose name contains one of these words is left out."""

Handler = Callable[[Any, Request[Any]], Any]


class Peer(Protocol):
    """A connection, as a source of requests."""

    peer: str


def is_recorded(code: int, permission: Permission) -> bool:
    """Whether requests of a code are recorded: those that need the role operate or administer, except for two that
    change nothing, and those without a role that withdraw or change something already sent."""
    if code in _CHANGES_NOTHING:
        return False
    return permission.role >= Role.OPERATE or code in _CHANGES_WITHOUT_ROLE


class Recorder:
    """Records the requests of one broker."""

    def __init__(self, log: AuditLog, clock: Clock, is_account: Callable[[str], bool]) -> None:
        """`clock`: the machine's. `is_account`: returns whether an account or a user with a name exists."""
        self._log = log
        self._clock = clock
        self._is_account = is_account
        self._peer: str | None = None
        """The peer whose requests are handled now."""
        self._registrations: OrderedDict[tuple[str, str], tuple[str, ...]] = OrderedDict()
        """The last registrations, by broker name and address: the host and account that made each, and the result."""
        self._strangers = _Refusals()
        """Refusals of requests without an account."""
        self._accounts = _Refusals()
        """Refusals of requests of accounts."""

    def handle_requests_of(self, peer: str) -> None:
        """Note whose requests are handled from now on."""
        self._peer = peer

    def recorded(self, code: int, handler: Handler, *, is_async: bool) -> Handler:
        """Return a handler whose requests are recorded. `handler` includes the guard's check of permissions."""
        if is_async:

            def recorded(connection: Any, request: Request[Any]) -> Any:
                entry = self._begin(code, connection, request)
                try:
                    work = handler(connection, request)
                except Exception as error:
                    self._end_with(entry, request, error)
                    raise
                return _RecordedWork(work, self._recorded(entry, request, work))

        else:

            def recorded(connection: Any, request: Request[Any]) -> Any:
                entry = self._begin(code, connection, request)
                try:
                    answer = handler(connection, request)
                except Exception as error:
                    self._end_with(entry, request, error)
                    raise
                self._end(entry, request, answer)
                return answer

        return recorded

    def created(self, kind: str, name: str) -> None:
        """Record that a topic or group was created because a client used it. `kind`: "topic" or "group"."""
        action = f"{kind}_created"
        self._log.add({"time": self._now(), "action": action, "peer": self._peer, kind: name[:_MAX_TEXT]})

    # ---

    async def _recorded(self, entry: Entry, request: Request[Any], work: Coroutine[Any, Any, Any]) -> Any:
        try:
            answer = await work
        except Exception as error:
            self._end_with(entry, request, error)
            raise
        self._end(entry, request, answer)
        return answer

    def _begin(self, code: int, connection: Peer, request: Request[Any]) -> Entry:
        """Return the entry of a request, as far as it is known before it is handled. Raises Refused if the log takes no
        more entries."""
        if self._log.is_full:
            # Without the reason, which has a path: no account has been looked up yet. The broker's log has it.
            raise Refused(
                ResponseCode.SERVICE_NOT_AVAILABLE, "service not available now: the audit log cannot be written"
            )
        fields = getattr(request, "fields", None)
        name = fields.access_key if fields is not None else ""
        entry: Entry = {
            "time": self._now(),
            "action": RequestCode(code).name,
            "code": code,
            "account": name[:_MAX_TEXT] if self._is_account(name) else None,
            "peer": connection.peer,
        }
        header = _fields(request.header)
        for name, kind in _RESOURCES:
            if name in header:
                entry[kind] = header.pop(name)
        if header:
            entry["fields"] = header
        return entry

    def _end(self, entry: Entry, request: Request[Any], answer: Any) -> None:
        entry |= _of_body(entry["code"], request)
        if isinstance(answer, bytes):
            (frame,) = FrameReader().receive_data(answer)
            answer = codec.decode(frame)
        if isinstance(answer, Command):
            self._add(entry, int(answer.code), answer.remark)
        else:
            self._add(entry, "waits", None)

    def _end_with(self, entry: Entry, request: Request[Any], error: Exception) -> None:
        if isinstance(error, NotNow | NotInMemory):
            return  # it is handled again
        if isinstance(error, AccessRefused):
            self._add_refusal(entry, error)
            return
        entry |= _of_body(entry["code"], request)
        if isinstance(error, Refused):
            self._add(entry, error.code, error.remark)
        else:
            self._add(entry, int(ResponseCode.SYSTEM_ERROR), str(error))

    def _add_refusal(self, entry: Entry, error: AccessRefused) -> None:
        """Record a refusal, unless there are too many of its kind."""
        is_stranger = error.kind in _OF_STRANGERS
        refusals = self._strangers if is_stranger else self._accounts
        if not refusals.may_add(self._clock.monotonic()):
            return
        if refusals.left_out:
            refusals.size += self._log.add(
                {"time": self._now(), "action": "refusals_left_out", "count": refusals.left_out}
            )
            refusals.left_out = 0
        if is_stranger:
            entry = {name: entry[name] for name in _HEAD}
        refusals.size += self._add(entry, error.code, error.reason)

    def _add(self, entry: Entry, result: int | str, remark: str | None) -> int:
        """Add an entry, unless it is a repeated registration; return the bytes of its line."""
        if entry["code"] == RequestCode.REGISTER_BROKER and not self._is_new(entry, result):
            return 0
        entry["result"] = result
        if remark and result != ResponseCode.SUCCESS:
            entry["remark"] = remark[:_MAX_TEXT]
        return self._log.add(entry)

    def _is_new(self, entry: Entry, result: int | str) -> bool:
        fields = entry.get("fields", {})
        broker = (str(fields.get("broker_name")), str(fields.get("broker_addr")))
        host = entry["peer"].rpartition(":")[0]
        now = (host, str(entry["account"]), str(result))
        if self._registrations.get(broker) == now:
            self._registrations.move_to_end(broker)
            return False
        self._registrations[broker] = now
        if len(self._registrations) > _MAX_REGISTRATIONS:
            self._registrations.popitem(last=False)
        return True

    def _now(self) -> str:
        time = datetime.datetime.fromtimestamp(self._clock.now_ms() / 1000, datetime.UTC)
        return time.isoformat(timespec="milliseconds").replace("+00:00", "Z")


class _Refusals:
    """Counts entries about refusals, to limit them."""

    def __init__(self) -> None:
        self.left_out = 0
        """Refusals without an entry since the last one with an entry."""
        self.size = 0
        """Bytes of the entries in the current minute."""
        self._second = self._minute = self._count = 0

    def may_add(self, now: float) -> bool:
        """Count a refusal at a time, in seconds of the monotonic clock; return whether it gets an entry."""
        second = int(now)
        if second // 60 != self._minute:
            self._minute, self.size = second // 60, 0
        if second != self._second:
            self._second, self._count = second, 0
        self._count += 1
        if self._count > MAX_REFUSALS_A_SECOND or self.size >= MAX_REFUSAL_BYTES_A_MINUTE:
            self.left_out += 1
            return False
        return True


class _RecordedWork(Coroutine[Any, Any, Any]):
    """A handler's coroutine, recorded. If it is closed before it has begun, because too much is under way, both
    coroutines are closed."""

    def __init__(self, work: Coroutine[Any, Any, Any], recorded: Coroutine[Any, Any, Any]) -> None:
        self._work = work
        self._recorded = recorded

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._recorded.__await__()

    def send(self, value: Any) -> Any:
        """Resume the recorded coroutine with a value."""
        return self._recorded.send(value)

    def throw(self, *error: Any) -> Any:
        """Raise an exception in the recorded coroutine."""
        return self._recorded.throw(*error)

    def close(self) -> None:
        """Close both coroutines."""
        self._recorded.close()
        self._work.close()


def _fields(header: msgspec.Struct) -> dict[str, Any]:
    """Return the fields of a header that are set and are not secrets."""
    fields: dict[str, Any] = {}
    for name in header.__struct_fields__:
        value = getattr(header, name)
        if value is None or any(word in name.lower() for word in _SECRET):
            continue
        fields[name] = value[:_MAX_TEXT] if isinstance(value, str) else value
    return fields


def _of_body(code: int, request: Request[Any]) -> Entry:
    """Return the part of a body that goes into an entry: names, and the values of live settings."""
    if code == RequestCode.UPDATE_BROKER_CONFIG:
        try:
            values = broker_conf.parse(bytes(request.body).decode(), "")
        except (ConfigError, UnicodeDecodeError):
            return {}
        names = list(values)[:_MAX_NAMES]
        return {"settings": {name[:_MAX_TEXT]: values[name][:_MAX_TEXT] if name in LIVE else "..." for name in names}}
    if code == RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP:
        try:
            return {"group": str(msgspec.json.decode(request.body)["groupName"])[:_MAX_TEXT]}
        except _NOT_DECODED:
            return {}
    if code in _LISTS:
        kind, listed, name_of = _LISTS[code]
        try:
            found = msgspec.json.decode(request.body)[listed][:_MAX_NAMES]
            return {kind: [str(each[name_of])[:_MAX_TEXT] for each in found]}
        except _NOT_DECODED:
            return {}
    return {}
