"""Header codec 0: a JSON object, as RocketMQ's clients send it by default.

    {"code":105,"extFields":{"topic":"T"},"flag":0,"language":"JAVA","opaque":0,"serializeTypeCurrentRPC":"JSON","version":0}

Fields may be in any order. Values of extFields are text; a number or boolean there is read as its text, as Java does.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from duemq.protocol.errors import FrameError
from duemq.protocol.frames.command import Command
from duemq.protocol.frames.integers import Int32


class _Head(msgspec.Struct, gc=False):
    code: Int32
    extFields: dict[str, str] | None = None  # noqa: N815
    flag: Int32 = 0
    language: str | None = None
    opaque: Int32 = 0
    remark: str | None = None
    version: Int32 = 0


class _LooseHead(_Head):
    extFields: dict[str, Any] | None = None  # noqa: N815


class _Out(msgspec.Struct, gc=False, omit_defaults=True):
    """Fields in alphabetical order, as fastjson writes them: clients have been seen to depend on `code` being first."""

    code: int
    extFields: dict[str, str]  # noqa: N815
    flag: int
    language: str | None
    opaque: int
    remark: str | None = None
    # The default is UNSET, so that these two are always written: a value equal to its default would be left out.
    serializeTypeCurrentRPC: str | UnsetType = UNSET  # noqa: N815
    version: int | UnsetType = UNSET


_decode = msgspec.json.Decoder(_Head).decode
_decode_loose = msgspec.json.Decoder(_LooseHead).decode
_encode = msgspec.json.Encoder().encode


def decode(header: bytes) -> Command:
    """Decode the command in a JSON header, without its body. Raises FrameError."""
    try:
        head = _decode(header)
    except msgspec.ValidationError:
        head = _loosely(header)
    except msgspec.DecodeError as error:
        raise FrameError(f"a JSON header that does not parse: {error}") from None
    except UnicodeDecodeError as error:
        raise FrameError(f"a JSON header that is not UTF-8: {error}") from None
    except RecursionError:
        raise FrameError("a JSON header that is nested too deeply") from None
    return Command(
        code=head.code,
        language=head.language,
        version=head.version,
        opaque=head.opaque,
        flag=head.flag,
        remark=head.remark,
        ext=head.extFields or {},
    )


def _loosely(header: bytes) -> _Head:
    try:
        head = _decode_loose(header)
        if head.extFields:
            head.extFields = {name: as_text(value) for name, value in head.extFields.items() if value is not None}
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise FrameError(f"a JSON header that is not a command: {error}") from None
    return head


def as_text(value: object) -> str:
    """Return a JSON value as the text that RocketMQ would read in its place."""
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value) if isinstance(value, int | float) else _encode(value).decode()


def encode(command: Command) -> bytes:
    """Encode the JSON header of a command."""
    return _encode(
        _Out(
            command.code,
            command.ext,
            command.flag,
            command.language,
            command.opaque,
            command.remark,
            "JSON",
            command.version,
        )
    )
