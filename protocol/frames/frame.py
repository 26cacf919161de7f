"""Cuts a byte stream into frames and joins frames into bytes.

    0          4          5               8            8+h
    | length   | codec    | header length | header     | body       |      all integers big-endian
    | int32    | uint8    | uint24 = h    | h bytes    | length-4-h |      length: of everything after itself
    codec of the header: 0 JSON, 1 RocketMQ's binary, 2 MessagePack (duemq's own)

Mirrors apache/rocketmq remoting/protocol/RemotingCommand.java and netty/NettyDecoder.java (4.9.7).
"""

from __future__ import annotations

import struct
from typing import Final

from duemq.protocol.errors import FrameError

_PREFIX: Final = struct.Struct(">iI")
assert _PREFIX.size == 8

MAX_FRAME_BYTES: Final = 16_777_216
"""Largest frame, its length word included: RocketMQ's default of com.rocketmq.remoting.frameMaxLength."""

JSON: Final = 0
BINARY: Final = 1
MSGPACK: Final = 2
CODECS: Final = (JSON, BINARY, MSGPACK)

_BLOCK_BYTES: Final = 64 * 1024
"""Size of the blocks that hold an unfinished frame, whatever the size of the received pieces. Pieces of two bytes must
not need an object each, and the frames that many clients begin and abandon must not leave unusable holes in memory."""

Frame = tuple[int, bytes, memoryview]
"""Codec of the header, header, body. The body is a view of the received bytes: it stays valid while it is referenced,
and keeps everything received with it in memory."""


def join_frame(codec: int, header: bytes, body: bytes | bytearray | memoryview = b"") -> bytes:
    """Return one frame as bytes."""
    size = len(header)
    return b"".join((_PREFIX.pack(4 + size + len(body), codec << 24 | size), header, body))


class FrameReader:
    """Receives bytes in any portions, and returns whole frames.

    It never looks twice at a byte of an unfinished frame, and refuses a frame that is too long on its first four bytes.
    After a `FrameError` (kept in `error`) it ignores its input: the connection must be closed.
    """

    __slots__ = ("_blocks", "_max_length", "_need", "_rest", "buffered", "error")

    def __init__(self, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        self._max_length = max_frame_bytes - 4
        self._blocks: list[bytes] = []
        self._rest: bytes | bytearray = b""
        """The bytes behind the last whole block."""
        self._need = 0
        self.buffered = 0
        """Number of bytes of the unfinished frame that are held."""
        self.error: FrameError | None = None

    @property
    def announced(self) -> int:
        """Size of the unfinished frame in bytes, as far as it is known; 0 if there is none."""
        return self._need if self.buffered else 0

    @property
    def pieces(self) -> int:
        """Number of objects that hold the unfinished frame."""
        return len(self._blocks) + bool(self._rest)

    def receive_data(self, data: bytes) -> list[Frame]:
        """Accept the next bytes, and return the frames that they complete. If the stream is broken, the frames before
        the fault are returned, and `error` is set."""
        if self.buffered:
            if self.buffered + len(data) < self._need:
                self._keep(data)
                return []
            data = b"".join((*self._blocks, self._rest, data))
            if self._blocks:
                self._blocks.clear()
            self._rest, self.buffered = b"", 0
        frames: list[Frame] = []
        if self.error is not None:
            return frames
        view = memoryview(data)
        unpack, max_length = _PREFIX.unpack_from, self._max_length
        position, end, need = 0, len(data), 8
        last = end - 8
        while position <= last:
            length, word = unpack(data, position)
            if not 4 <= length <= max_length:
                self.error = self._bad_length(length)
                return frames
            frame_end = position + 4 + length
            position += 8
            kind = word >> 24
            header_end = position + (word & 0xFFFFFF)
            if header_end > frame_end or kind > MSGPACK:
                self.error = self._bad_header(length, word)
                return frames
            if frame_end > end:
                position -= 8
                need = 4 + length
                break
            frames.append((kind, data[position:header_end], view[header_end:frame_end]))
            position = frame_end
        if position < end:
            if end - position < 4:
                need = 4
            elif need == 8:
                length = int.from_bytes(data[position : position + 4], "big", signed=True)
                if not 4 <= length <= max_length:
                    self.error = self._bad_length(length)
                    return frames
            self._rest = data[position:] if position else data
            self.buffered = end - position
            self._need = need
        return frames

    def receive_eof(self) -> None:
        """Note that the peer closed the connection. Sets `error` if that was in the middle of a frame."""
        if self.buffered and self.error is None:
            self.error = FrameError(f"closed in the middle of a frame, {self.buffered} bytes into it")

    def close(self) -> None:
        """Release the buffered bytes and ignore any that arrive later."""
        self.error = self.error or FrameError("closed")
        self._blocks.clear()
        self._rest, self.buffered = b"", 0

    def _keep(self, data: bytes) -> None:
        """Hold more of a frame that is not whole yet."""
        self.buffered += len(data)
        rest = self._rest
        if isinstance(rest, bytes):
            rest = self._rest = bytearray(rest)
        rest += data
        while len(rest) >= _BLOCK_BYTES:
            with memoryview(rest) as view:
                self._blocks.append(bytes(view[:_BLOCK_BYTES]))
            del rest[:_BLOCK_BYTES]

    def _bad_length(self, length: int) -> FrameError:
        return FrameError(f"a frame of length {length}; allowed are 4 to {self._max_length}")

    @staticmethod
    def _bad_header(length: int, word: int) -> FrameError:
        if word >> 24 > MSGPACK:
            return FrameError(f"header codec {word >> 24}; known are 0 (JSON), 1 (RocketMQ) and 2 (MessagePack)")
        return FrameError(f"a header of {word & 0xFFFFFF} bytes in a frame of length {length}")
