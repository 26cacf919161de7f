"""Converts frames to commands and back: one `Command`, three header codecs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from duemq.protocol.errors import LocalProtocolError
from duemq.protocol.frames import binary_header, json_header, msgpack_header
from duemq.protocol.frames.command import Command
from duemq.protocol.frames.frame import BINARY, JSON, MAX_FRAME_BYTES, MSGPACK, Frame, join_frame

_DECODERS: Final[dict[int, Callable[[bytes], Command]]] = {
    JSON: json_header.decode,
    BINARY: binary_header.decode,
    MSGPACK: msgpack_header.decode,
}
_ENCODERS: Final[dict[int, Callable[[Command], bytes]]] = {
    JSON: json_header.encode,
    BINARY: binary_header.encode,
    MSGPACK: msgpack_header.encode,
}


def decode(frame: Frame) -> Command:
    """Decode the command in a frame; its body is the frame's view. Raises FrameError if the header does not parse."""
    codec, header, body = frame
    command = _DECODERS[codec](header)
    command.body = body
    return command


def encode(command: Command, codec: int = JSON) -> bytes:
    """Encode a command as the bytes of one frame. Raises LocalProtocolError if it does not fit into a frame, or has
    text that UTF-8 cannot express."""
    try:
        header = _ENCODERS[codec](command)
    except UnicodeEncodeError as error:
        raise LocalProtocolError(f"a header with text that UTF-8 cannot carry: {error}") from None
    if len(header) > 0xFFFFFF or len(header) + len(command.body) + 8 > MAX_FRAME_BYTES:
        raise LocalProtocolError(
            f"a frame of {len(header) + len(command.body) + 8} bytes; the largest has {MAX_FRAME_BYTES}"
        )
    return join_frame(codec, header, command.body)
