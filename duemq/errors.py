"""The errors of the client.

DueMQError
├── ArgumentError             invalid arguments; nothing was sent. Also a ValueError
│   └── DelayError            the broker does not support the delay and would deliver the message too early
├── ClosedError               a producer or consumer was used before its start or after its close
├── SendManyError             some messages of a `send_many` were not stored, or may not have been
├── NoRouteError              the name servers know no broker that has the topic
├── ConnectError *            nothing answers at an address. Also a ConnectionError
├── ConnectionLostError *     the connection broke during a request. Also a ConnectionError
├── RequestTimeoutError *     no answer in time; the request may have been carried out. Also a TimeoutError
├── PeerError                 a broker or name server broke the protocol
├── BodyError                 the body of a received message cannot be decompressed
└── BrokerError               a broker or name server refused, with a code and usually a reason
    ├── BrokerFailureError *          1  an internal failure
    ├── BusyError *                   2  too many requests at the moment
    ├── NotSupportedError             3  an unknown kind of request
    ├── MessageRejectedError         13  a message that is never accepted: too large, a delay too long ...
    ├── UnavailableError *           14  no messages are accepted now: disk full, a replica, shutting down
    ├── NoPermissionError *          16  topic, group or client lack the permission at this broker
    ├── AccessDeniedError         1, 16  keys are missing or wrong, or their account lacks the permission
    ├── TopicNotFoundError *         17  no such topic
    ├── NotFoundError                22  the requested data does not exist
    ├── SubscriptionError         23-25  an invalid or unknown subscription
    ├── GroupNotFoundError           26  no such consumer group
    └── IllegalOperationError       604  an operation that is not, or no longer, possible, such as the recall of
                                         a delivered message

SendManyError is in `duemq.messages`, since it holds results; the others are in this module.

* `retriable`: the same request may succeed at another broker or a little later. A producer raises such an error only
after the retries that its `retries` allow. The set is that of RocketMQ's own clients, so it includes the code 16.
"""

from __future__ import annotations

import re
from typing import ClassVar, Final

from duemq.protocol.frames.command import Command


class DueMQError(Exception):
    """Base of all errors that this package defines.

    Attributes: `retriable`: whether the same request may succeed at another broker or a little later. `maybe_stored`:
    on the error of a send, whether the message may have been stored, since an answer was lost; if it is False, the
    message is certainly not stored.
    """

    retriable: ClassVar[bool] = False
    maybe_stored: bool = False


class ArgumentError(DueMQError, ValueError):
    """Invalid arguments of a call; nothing was sent."""


class DelayError(ArgumentError):
    """The broker does not support the delay: it would deliver the message too early, so the message was not sent.

    Attribute: `levels_ms`, the delays of the topic's levels at the broker in milliseconds, the first being level 1.
    """

    def __init__(self, why: str, levels_ms: tuple[int, ...] = ()) -> None:
        super().__init__(why)
        self.levels_ms = levels_ms


class ClosedError(DueMQError):
    """A producer or consumer was used before its start or after its close."""


class NoRouteError(DueMQError):
    """The name servers know no broker that has the topic. Attribute: `topic`."""

    def __init__(self, topic: str, why: str) -> None:
        super().__init__(f"no route to the topic {topic}: {why}")
        self.topic = topic


class ConnectError(DueMQError, ConnectionError):
    """Nothing answers at an address. Attribute: `address`, "host:port"."""

    retriable = True

    def __init__(self, address: str, why: str) -> None:
        super().__init__(f"cannot connect to {address}: {why}")
        self.address = address


class ConnectionLostError(DueMQError, ConnectionError):
    """The connection broke during a request, which may have been carried out. Attribute: `address`."""

    retriable = True

    def __init__(self, address: str, why: str) -> None:
        super().__init__(f"lost the connection to {address}: {why}")
        self.address = address


class RequestTimeoutError(DueMQError, TimeoutError):
    """No answer came in time; the request may have been carried out. Attributes: `address`; `request`, the request's
    name; `timeout` in seconds."""

    retriable = True

    def __init__(self, address: str, request: str, timeout: float) -> None:
        super().__init__(f"no answer from {address} to {request} within {timeout:g} s")
        self.address = address
        self.request = request
        self.timeout = timeout


class PeerError(DueMQError):
    """A broker or name server sent bytes that the protocol does not allow. Attribute: `address`."""

    def __init__(self, address: str, why: str) -> None:
        super().__init__(f"{address} broke the protocol: {why}")
        self.address = address


class BodyError(DueMQError):
    """The body of a received message cannot be decompressed: it is damaged or too large, or the Python package for its
    format is not installed."""


class BrokerError(DueMQError):
    """A broker or name server answered with an error.

    Attributes: `code`, RocketMQ's response code; `remark`, the peer's own words, possibly empty; `address`.
    """

    codes: ClassVar[tuple[int, ...]] = ()
    summary: ClassVar[str] = "refused"

    def __init__(self, code: int, remark: str, address: str) -> None:
        super().__init__(f"{address}: {self.summary} (code {code}){': ' if remark else ''}{remark}")
        self.code = code
        self.remark = remark
        self.address = address

    def __init_subclass__(cls) -> None:
        for code in cls.codes:
            if code in _CLASS_OF_CODE:
                raise TypeError(f"the code {code} already belongs to {_CLASS_OF_CODE[code].__name__}")
            _CLASS_OF_CODE[code] = cls


_CLASS_OF_CODE: dict[int, type[BrokerError]] = {}
_ACCESS_DENIED: Final = "org.apache.rocketmq.acl.common.AclException: "
_DENIED_TO_USER: Final = re.compile(
    "username cannot be null|check signature failed|User:.* (is not found|is disabled|has no permission to access .*)"
)
"""The remarks of refusals by brokers with ACL 2.0; the code is 16."""


class BrokerFailureError(BrokerError):
    """An internal failure of the broker."""

    codes = (1,)
    summary = "failed"
    retriable = True


class BusyError(BrokerError):
    """The broker has too many requests at the moment."""

    codes = (2,)
    summary = "is too busy"
    retriable = True


class NotSupportedError(BrokerError):
    """The broker does not know this kind of request."""

    codes = (3,)
    summary = "does not support the request"


class MessageRejectedError(BrokerError):
    """The broker never accepts this message: it is too large, has too many properties, a delay beyond the limit ..."""

    codes = (13,)
    summary = "rejects the message"


class UnavailableError(BrokerError):
    """The broker accepts no messages now: its disk is full, it is a replica, or it is shutting down."""

    codes = (14,)
    summary = "accepts no messages now"
    retriable = True


class NoPermissionError(BrokerError):
    """Topic, group or client lack the permission at this broker."""

    codes = (16,)
    summary = "permission denied"
    retriable = True


class AccessDeniedError(BrokerError):
    """The keys of this client are missing or wrong, or their account lacks the permission. Brokers with the accounts of
    RocketMQ 4.9 report this with the code of other failures and a remark that begins with the name of an exception;
    brokers with the users of 5.3 report it with the code 16 and certain remarks."""

    summary = "access denied"


class TopicNotFoundError(BrokerError):
    """The broker has no such topic."""

    codes = (17,)
    summary = "has no such topic"
    retriable = True


class NotFoundError(BrokerError):
    """The requested data does not exist, for example a group's stored offset."""

    codes = (22,)
    summary = "found nothing"


class SubscriptionError(BrokerError):
    """The broker cannot parse the subscription, does not have it, or has an older version of it."""

    codes = (23, 24, 25)
    summary = "refuses the subscription"


class GroupNotFoundError(BrokerError):
    """The broker has no such consumer group and does not create groups automatically."""

    codes = (26,)
    summary = "has no such consumer group"


class IllegalOperationError(BrokerError):
    """The requested operation is not, or no longer, possible, such as the recall of a message that was delivered."""

    codes = (604,)
    summary = "cannot do that"


def error_of(response: Command, address: str) -> BrokerError:
    """Return the error for a response. No other function turns response codes into exceptions."""
    kind = _CLASS_OF_CODE.get(response.code, BrokerError)
    line = _first_line(response.remark)
    if kind is BrokerFailureError and line.startswith(_ACCESS_DENIED):
        kind, line = AccessDeniedError, line.removeprefix(_ACCESS_DENIED)
    elif kind is NoPermissionError and _DENIED_TO_USER.fullmatch(line):
        kind = AccessDeniedError
    return kind(response.code, line, address)


def _first_line(remark: str | None) -> str:
    """Return the part of a remark that is useful to a person: Java brokers add a stack trace, a link and class
    names."""
    line = (remark or "").partition("\n")[0].partition(", org.apache.rocketmq")[0]
    return line.removeprefix("CODE: ").strip(" .")
