"""White lists: patterns of addresses, in RocketMQ's forms.

    *                          every address; so do *.*.*.* and *:*:*:*:*:*:*:*
    192.168.1.7                one address
    192.168.1.7,192.168.1.8    several
    192.168.1.{7,8}            several that differ in the last part
    192.168.1-9.*              parts that may be anything (*) or in a range; the first part is a number
    2001:db8::7                IPv6, in any of its spellings; 2001:db8::{7,8} and lists as above
    2001:db8::5:1-ff:*         the last part may be *, and the last, or the one before *, a range (hexadecimal)
    2001:db8:*                 without :: and with fewer than eight parts: what comes behind may be anything

An empty pattern matches nothing. duemq differs from RocketMQ where RocketMQ lets in more addresses than the pattern
says: RocketMQ ignores the parts behind a range (192.168.1-9.5 lets in all of 192.168.1.0 and so on), and takes 1::* to
mean all addresses that begin with 1:0.

Source: apache/rocketmq acl/plain/RemoteAddressStrategyFactory.java, acl/common/AclUtils.java at 4.9.7.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from typing import Final, NamedTuple

_EVERYTHING: Final = ("*", "*.*.*.*", "*:*:*:*:*:*:*:*")
# These are texts, which are compiled at their first use: most brokers have no such pattern.
_DECIMAL: Final = r"(0|[1-9][0-9]{0,2})(?:-(0|[1-9][0-9]{0,2}))?"
_HEX: Final = r"([0-9a-fA-F]{1,4})(?:-([0-9a-fA-F]{1,4}))?"
_V4_PARTS: Final = 4
_V6_PARTS: Final = 8

Parts = tuple[int, ...]
"""An address: the four numbers of IPv4, or the eight of IPv6."""


class _Range(NamedTuple):
    low: int
    high: int


class AddressPattern:
    """Addresses that a pattern matches."""

    def __init__(self, text: str) -> None:
        """Raises ValueError, in RocketMQ's words."""
        self.text = text
        self.matches_all = text.strip() in _EVERYTHING
        self._boxes = () if self.matches_all or not text.strip() else tuple(_boxes(text))

    def matches(self, address: Parts | None) -> bool:
        """Whether the pattern matches an address. None, an unknown address, is matched only by a pattern for every
        address."""
        if self.matches_all:
            return True
        return address is not None and any(_is_in(address, box) for box in self._boxes)


def parts_of(host: str) -> Parts | None:
    """Return an address as numbers, None if the text is not an address. An IPv4-mapped IPv6 address counts as IPv4."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is None:
            return tuple(int.from_bytes(address.packed[at : at + 2], "big") for at in range(0, 2 * _V6_PARTS, 2))
        address = address.ipv4_mapped
    return tuple(address.packed)


def _is_in(address: Parts, box: tuple[_Range, ...]) -> bool:
    return len(box) == len(address) and all(low <= part <= high for (low, high), part in zip(box, address, strict=True))


def _boxes(text: str) -> Iterable[tuple[_Range, ...]]:
    if text.endswith("}"):
        head, separator, last = text[:-1].rpartition("{")
        if not separator or "{" in head or not head.endswith((":", ".")):
            raise _wrong(text)
        return [_one(f"{head}{part}") for part in last.split(",") if part]
    if "," in text:
        return [_one(part) for part in text.split(",") if part]
    if "*" in text or "-" in text:
        return [_range_v6(text) if ":" in text else _range_v4(text)]
    return [_one(text)]


def _one(text: str) -> tuple[_Range, ...]:
    parts = parts_of(text)
    if parts is None or "%" in text:
        raise _wrong(text)
    return tuple(_Range(part, part) for part in parts)


def _range_v4(text: str) -> tuple[_Range, ...]:
    parts = [part.strip() for part in text.split(".")]
    if len(parts) != _V4_PARTS or not parts[0].isdecimal():
        raise _wrong(text)
    return tuple(_part(part, _DECIMAL, 10, 0xFF, text) for part in parts)


def _range_v6(text: str) -> tuple[_Range, ...]:
    head, separator, tail = text.partition("::")
    before, after = (side.split(":") if side else [] for side in (head, tail))
    parts = before + after
    missing = _V6_PARTS - len(parts)
    fixed = parts[:-2] if parts[-1] == "*" else parts[:-1]
    if (
        missing < bool(separator)
        or text.count("*") > 1
        or not all(re.fullmatch(_HEX, part) and "-" not in part for part in fixed)
    ):
        raise _wrong(text)
    ranges = [_part(part, _HEX, 16, 0xFFFF, text) for part in parts]
    if separator:
        filler = [_Range(0, 0)] * missing
        return (*ranges[: len(before)], *filler, *ranges[len(before) :])
    if missing and len(parts) < 2:
        raise _wrong(text)
    return (*ranges, *[_Range(0, 0xFFFF)] * missing)


def _part(part: str, pattern: str, base: int, most: int, text: str) -> _Range:
    if part == "*":
        return _Range(0, most)
    found = re.fullmatch(pattern, part)
    if found is None:
        raise _wrong(text)
    low = int(found[1], base)
    high = int(found[2], base) if found[2] is not None else low
    if not low <= high <= most:
        raise _wrong(text)
    return _Range(low, high)


def _wrong(text: str) -> ValueError:
    return ValueError(f"Netaddress examine Exception netaddress is {text}")
