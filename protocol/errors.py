"""Errors of the protocol: wrong bytes from the peer, or a value that the protocol cannot express.

ProtocolError
├── LocalProtocolError        the value cannot be encoded: a bug in duemq or in its caller
└── RemoteProtocolError       the peer's bytes are wrong
    ├── FrameError            the stream can no longer be cut into frames: close this connection
    ├── FieldError            a header field is missing or invalid: answer with an error, keep the connection
    ├── BodyFormatError       a body does not parse: answer with an error, keep the connection
    ├── RecordError           a stored message does not parse
    └── TimerIllegal          a message's properties ask for an impossible time: refuse the message
"""

from __future__ import annotations


class ProtocolError(Exception):
    """Base of all errors that this package raises."""


class LocalProtocolError(ProtocolError):
    """A value that the wire format cannot carry was about to be encoded."""


class RemoteProtocolError(ProtocolError):
    """The peer sent bytes that break the protocol."""


class FrameError(RemoteProtocolError):
    """The byte stream is not a sequence of frames; nothing after this point can be trusted."""


class FieldError(RemoteProtocolError):
    """A header field is missing, of the wrong type or out of range.

    Attributes: `field`, the field's name on the wire; `why`, the fault.
    """

    def __init__(self, field: str, why: str) -> None:
        super().__init__(f"the header field {field}: {why}" if field else why)
        self.field = field
        self.why = why


class BodyFormatError(RemoteProtocolError):
    """A request or response body does not parse."""


class RecordError(RemoteProtocolError):
    """A stored message (commitlog record) does not parse.

    Attributes: `offset`, the record's position in the given bytes; `why`.
    """

    def __init__(self, offset: int, why: str) -> None:
        super().__init__(f"record at byte {offset}: {why}")
        self.offset = offset
        self.why = why


class TimerIllegal(RemoteProtocolError):
    """A property of a message that asks for a time is not a number, or not a valid time, or contradicts another
    property."""
