"""One request or response, in any header codec."""

from __future__ import annotations

import msgspec

from duemq.protocol.codes import FLAG_ONEWAY, FLAG_RESPONSE, LANGUAGE, VERSION

Body = bytes | bytearray | memoryview


class Command(msgspec.Struct, gc=False, kw_only=True):
    """A RemotingCommand: a header with untyped extension fields, and a body.

    `code` is a request code, or a response code if FLAG_RESPONSE is set in `flag`. `opaque` is the request id that the
    response repeats: a signed 32-bit number that the sender of the request chooses. `ext` are the extension fields.
    """

    code: int
    language: str | None = LANGUAGE
    version: int = VERSION
    opaque: int = 0
    flag: int = 0
    remark: str | None = None
    ext: dict[str, str] = msgspec.field(default_factory=dict)
    body: Body = b""

    @property
    def is_response(self) -> bool:
        """Whether this is a response."""
        return bool(self.flag & FLAG_RESPONSE)

    @property
    def is_oneway(self) -> bool:
        """Whether the sender expects no answer, not even an error."""
        return bool(self.flag & FLAG_ONEWAY)
