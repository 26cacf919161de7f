"""The errors of the client.

DueMQError
├── ArgumentError             a call that cannot be carried out; nothing was sent. Also a ValueError
│   └── DelayError            the broker has no such delay, and would deliver the message too early
├── ClosedError               used before its start or after its close
├── SendManyError             some messages of a `send_many` were not stored, or may not have been
├── NoRouteError              the name servers know no broker with such a topic
├── ConnectError *            nothing answers at an address. Also a ConnectionError
├── ConnectionLostError *     the connection broke while a request was under way. Also a ConnectionError
├── RequestTimeoutError *     no answer in time; the request may have been carried out. Also a TimeoutError
├── PeerError                 the answer breaks the protocol
├── BodyError                 the body of a received message cannot be unpacked
└── BrokerError               a broker or name server refused, with a code and mostly a reason
    ├── BrokerFailureError *          1  something failed inside
    ├── BusyError *                   2  too many requests; it will pass
    ├── NotSupportedError             3  it does not know this kind of request
    ├── MessageRejectedError         13  it will never take this message: too large, a delay too long ...
    ├── UnavailableError *           14  it takes no messages now: disk full, a replica, being shut down
    ├── NoPermissionError *          16  topic, group or client lack the permission at this broker
    ├── AccessDeniedError         1, 16  keys are missing or wrong, or their account lacks the permission
    ├── TopicNotFoundError *         17  it has no such topic
    ├── NotFoundError                22  the requested data does not exist
    ├── SubscriptionError         23-25  it does not understand or does not have the subscription
    ├── GroupNotFoundError           26  it has no such consumer group
    └── IllegalOperationError       604  it is not possible, or not any more: the message to recall is delivered

SendManyError is in `duemq.messages`, since it holds results; the others are in this module.

* `retriable`: the same request may succeed at another broker or a little later. A producer has then already tried as
often as its `retries` say. The set is that of RocketMQ's own clients, which is why it includes the code 16.
"""

from __future__ import annotations

import re
from typing import ClassVar, Final

from duemq.protocol.frames.command import Command


class DueMQError(Exception):
    """Base of all errors that this package defines.

    Attributes: `retriable`, see above; `maybe_stored`, on the error of a send: whether the message may be stored all
    the same, since an answer was lost. Without it, the message is certainly not stored.
    """

    retriable: ClassVar[bool] = False
    maybe_stored: bool = False


class ArgumentError(DueMQError, ValueError):
    """A call that cannot be carried out as given; nothing was sent."""


class DelayError(ArgumentError):
    """The broker has no such delay; if sent nevertheless, the message would be delivered too early.

    Attribute: `levels_ms`, the delays in milliseconds that the broker does have for the topic, the first being level 1.
    """

    def __init__(self, why: str, levels_ms: tuple[int, ...] = ()) -> None:
        super().__init__(why)
        self.levels_ms = levels_ms


class ClosedError(DueMQError):
    """A producer or consumer was used before its start or after its close."""


class NoRouteError(DueMQError):
    """The name servers know no broker with such a topic. Attribute: `topic`."""

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
    """The connection broke while a request was under way; it may have been carried out. Attribute: `address`."""

    retriable = True

    def __init__(self, address: str, why: str) -> None:
        super().__init__(f"lost the connection to {address}: {why}")
        self.address = address


class RequestTimeoutError(DueMQError, TimeoutError):
    """No answer came in time; the request may have been carried out. Attributes: `address`; `request`, its name;
    `timeout` in seconds."""

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
    """The body of a received message cannot be unpacked: torn, too large, or in a format without its package here."""


class BrokerError(DueMQError):
    """A broker or name server answered with an error.

    Attributes: `code`, RocketMQ's response code; `remark`, the peer's own words, maybe empty; `address`.
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
                raise TypeError(f"the code {code} belongs to {_CLASS_OF_CODE[code].__name__} already")
            _CLASS_OF_CODE[code] = cls


_CLASS_OF_CODE: dict[int, type[BrokerError]] = {}
_ACCESS_DENIED: Final = "org.apache.rocketmq.acl.common.AclException: "
_DENIED_TO_USER: Final = re.compile(
    "username cannot be null|check signature failed|User:.* (is not found|is disabled|has no permission to access .*)"
)
"""The remarks with which brokers with ACL 2.0 refuse, with the code 16."""


class BrokerFailureError(BrokerError):
    """Something failed inside the broker."""

    codes = (1,)
    summary = "failed"
    retriable = True


class BusyError(BrokerError):
    """The broker has too many requests now."""

    codes = (2,)
    summary = "is too busy"
    retriable = True


class NotSupportedError(BrokerError):
    """The broker does not know this kind of request."""

    codes = (3,)
    summary = "does not support the request"


class MessageRejectedError(BrokerError):
    """The broker will never take this message: too large, too many properties, a delay beyond its limit ..."""

    codes = (13,)
    summary = "rejects the message"


class UnavailableError(BrokerError):
    """The broker takes no messages now: its disk is full, it is a replica, or it is being shut down."""

    codes = (14,)
    summary = "takes no messages now"
    retriable = True


class NoPermissionError(BrokerError):
    """Topic, group or client lack the permission at this broker."""

    codes = (16,)
    summary = "permission denied"
    retriable = True


class AccessDeniedError(BrokerError):
    """The keys of this client are missing or wrong, or their account may not do this. With the accounts of 4.9, brokers
    tell it with the code of any other failure and with a remark that begins with the name of an exception; with the
    users of 5.3, with the code 16 and certain remarks."""

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
    """The broker does not understand, does not have, or has an older edition of the subscription."""

    codes = (23, 24, 25)
    summary = "refuses the subscription"


class GroupNotFoundError(BrokerError):
    """The broker has no such consumer group, and creates none by itself."""

    codes = (26,)
    summary = "has no such consumer group"


class IllegalOperationError(BrokerError):
    """The requested operation is not possible, or not any more, such as recalling a message that is delivered."""

    codes = (604,)
    summary = "cannot do that"


def error_of(response: Command, address: str) -> BrokerError:
    """Return the error for a response: only this function turns response codes into exceptions."""
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
