"""Integer types with the widths that integers have on the wire: msgspec refuses a value out of range."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

Int32 = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]


def is_int32(value: object) -> bool:
    """Whether a value is an integer that fits into 32 bits, signed."""
    return type(value) is int and -(2**31) <= value <= 2**31 - 1
