"""Header codec 2, duemq's own: a MessagePack array, which duemq's client uses; RocketMQ does not know it.

[code, language, version, opaque, flag, remark or nil, {extension field: text}]
"""

from __future__ import annotations

from typing import Any

import msgpack

from duemq.protocol.errors import FrameError
from duemq.protocol.frames.command import Command
from duemq.protocol.frames.integers import is_int32


def decode(header: bytes) -> Command:
    """Decode the command in a MessagePack header, without its body. Raises FrameError."""
    try:
        head: Any = msgpack.unpackb(header, strict_map_key=True)
    except (ValueError, msgpack.UnpackException) as error:
        raise FrameError(f"a MessagePack header that does not parse: {error}") from None
    if not isinstance(head, list) or len(head) != 7:
        raise FrameError("a MessagePack header that is not an array of 7 elements")
    code, language, version, opaque, flag, remark, ext = head
    # Written without generators, since this runs for each frame.
    if not (
        (is_int32(code) and is_int32(version) and is_int32(opaque) and is_int32(flag))
        and (language is None or isinstance(language, str))
        and (remark is None or isinstance(remark, str))
        and isinstance(ext, dict)
    ):
        raise FrameError("a MessagePack header with an element of the wrong type or out of range")
    for name, value in ext.items():
        if not (isinstance(name, str) and isinstance(value, str)):
            raise FrameError("a MessagePack header with an extension field that is not text")
    return Command(code=code, language=language, version=version, opaque=opaque, flag=flag, remark=remark, ext=ext)


def encode(command: Command) -> bytes:
    """Encode the MessagePack header of a command."""
    packed: bytes = msgpack.packb(
        [
            command.code,
            command.language,
            command.version,
            command.opaque,
            command.flag,
            command.remark,
            command.ext,
        ]
    )
    return packed
