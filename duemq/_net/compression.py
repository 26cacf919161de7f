"""Compressed bodies. Bit 0 of a message's sysflag says that the body is compressed, bits 8-10 are the format: 0 zlib
(before RocketMQ 5), 1 LZ4 frames, 2 Zstandard, 3 zlib. Mirrors common/sysflag/MessageSysFlag.java (5.3.3)."""

from __future__ import annotations

from importlib import import_module
from typing import Any, Final

from zlib_ng import zlib_ng

from duemq.errors import BodyError
from duemq.protocol import errors as protocol_errors
from duemq.protocol.records.record import FLAG_COMPRESSED
from duemq.protocol.requests import bodies

MAX_UNPACKED_BYTES: Final = 256 * 1024 * 1024
"""Maximum size of a decompressed body, in bytes. It is far above any limit for bodies, and only prevents a few bytes
from being decompressed until they fill the memory."""

_TYPE_SHIFT: Final = 8
_LZ4: Final = 1
_ZSTD: Final = 2
_ZLIB_LEVEL: Final = 5  # RocketMQ's


def compress(body: bytes) -> bytes:
    """Return the body as a zlib stream, which every RocketMQ client can read."""
    packed: bytes = zlib_ng.compress(body, _ZLIB_LEVEL)
    return packed


def unpack(body: bytes, sys_flag: int) -> bytes:
    """Return the body as it was before a producer compressed it. Raises BodyError."""
    if not sys_flag & FLAG_COMPRESSED:
        return body
    kind = sys_flag >> _TYPE_SHIFT & 7
    if kind == _LZ4:
        return _unpack_lz4(body)
    if kind == _ZSTD:
        return _unpack_zstd(body)
    try:
        return bodies.decompress(body, MAX_UNPACKED_BYTES)
    except protocol_errors.BodyFormatError as error:
        raise BodyError(str(error)) from None


def _unpack_lz4(body: bytes) -> bytes:
    frame = _package("lz4.frame", "LZ4", "lz4")
    try:
        unpacker = frame.LZ4FrameDecompressor()
        data: bytes = unpacker.decompress(body, MAX_UNPACKED_BYTES)
    except RuntimeError as error:
        raise BodyError(f"the LZ4 body cannot be decompressed: {error}") from None
    if not unpacker.eof:
        raise BodyError(f"the LZ4 body is incomplete, or has more than {MAX_UNPACKED_BYTES} bytes decompressed")
    return data


def _unpack_zstd(body: bytes) -> bytes:
    zstandard = _package("zstandard", "Zstandard", "zstandard")
    try:
        with zstandard.ZstdDecompressor().stream_reader(body) as reader:
            data: bytes = reader.read(MAX_UNPACKED_BYTES)
            rest: bytes = reader.read(1)
    except zstandard.ZstdError as error:
        raise BodyError(f"the Zstandard body cannot be decompressed: {error}") from None
    if rest:
        raise BodyError(f"the Zstandard body has more than {MAX_UNPACKED_BYTES} bytes decompressed")
    return data


def _package(module: str, what: str, name: str) -> Any:
    try:
        return import_module(module)
    except ImportError:
        raise BodyError(f"the body is compressed with {what}; install the package {name} to read it") from None
