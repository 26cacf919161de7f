"""Numbers, times and names as people read them; the template escapes HTML."""

from __future__ import annotations

import math
import unicodedata
from datetime import UTC, datetime
from typing import Final

MAX_NAME: Final = 90
"""Characters of a name that are shown; longer names lose their middle."""
MAX_ID: Final = 18
"""Characters of an id that are shown; of a longer id, only its two ends are."""
_ID_HEAD, _ID_TAIL = 6, 8
MAX_COPIED: Final = 512
"""Longest id that can be copied, in characters."""
MAX_TIME_MS: Final = 253_402_300_799_999
"""The end of the year 9999, the last one that has four digits."""
_MINUS: Final = "\u2212"
_LONG: Final = (
    ("min", "s", 1000, 60, 3600),
    ("h", "min", 60_000, 60, 1440),
    ("d", "h", 3_600_000, 24, 24_000),
    ("y", "d", 86_400_000, 365, math.inf),
)
"""For each unit: its name, the next smaller unit, ms in the smaller one, how many of the smaller one make the unit, and
below how many of the smaller one this unit is used."""
_SPELLED: Final = {"Cc", "Cf", "Co", "Cs", "Cn", "Zl", "Zp"}
"""Characters that are invisible, or change how others look: written as escapes."""


def count(value: int | float) -> str:
    """Return a number with separators of thousands."""
    return f"{value:,.0f}".replace("-", _MINUS)


def rate(value: float) -> str:
    """Return messages per second, with three significant digits below 100."""
    return count(value) if value >= 100 else f"{value:,.3g}"


def duration(ms: float | None) -> str:
    """Return a duration in ms as ms, s, min and s, h and min, d and h, y and d; a dash for None."""
    if ms is None:
        return "\u2013"
    sign, value = (_MINUS, -ms) if ms < 0 else ("", ms)
    if value < 999.5:
        return f"{sign}{value:.0f}\u00a0ms"
    if value < 59_995:
        return f"{sign}{_digits(value / 1000)}\u00a0s"
    for unit, part, part_ms, per, below in _LONG:
        parts = round(value / part_ms)
        if parts < below:
            whole, rest = divmod(parts, per)
            more = f"\u00a0{rest}\u00a0{part}" if rest and whole < 100 else ""
            return f"{sign}{whole:,}\u00a0{unit}{more}"
    raise AssertionError


def size(value: float) -> str:
    """Return bytes as B, KiB, MiB, ..."""
    if value < 1024:
        return f"{value:.0f}\u00a0B"
    for unit in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        value /= 1024
        if value < 1024 or unit == "PiB":
            return f"{_digits(value)}\u00a0{unit}"
    raise AssertionError


def _digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def share(part: float, whole: float) -> str:
    """Return a part of something in percent; 0 % or 100 % only if exact."""
    if not whole:
        return "\u2013"
    percent = part * 100 / whole
    if 0 < percent < 0.1:
        return "<\u202f0.1\u00a0%"
    if 99.9 < percent < 100:
        return ">\u202f99.9\u00a0%"
    return f"{percent:.3g}\u00a0%"


def moment(ms: int | None, *, exact: bool = False) -> str:
    """Return a time in UTC, to the second, or to the ms if `exact`; a number if no calendar has it."""
    if ms is None:
        return "\u2013"
    if not -62_135_596_800_000 <= ms <= MAX_TIME_MS:
        return f"{ms} ms"
    at = datetime.fromtimestamp(ms // 1000, UTC)
    return f"{at:%Y-%m-%d %H:%M:%S}" + (f".{ms % 1000:03}" if exact else "")


def name(text: str | None) -> str:
    """Return a name from the store, which may be anything that a producer sent: invisible characters are spelled out,
    and the middle of a long one is left out."""
    if not text:
        return "\u2013"
    if len(text) > MAX_NAME:
        text = f"{text[: MAX_NAME - 21]}\u2026{text[-20:]}"
    return whole(text)


def whole(text: str) -> str:
    """Return a text of any length, with invisible characters spelled out."""
    return "".join(_spelled(char) if unicodedata.category(char) in _SPELLED else char for char in text)


def short(text: str | None) -> str:
    """Return an id from the store; only the ends of a long one, whose last characters are the most distinctive."""
    if not text or len(text) <= MAX_ID:
        return name(text)
    return f"{name(text[:_ID_HEAD])}\u2026{name(text[-_ID_TAIL:])}"


def copied(text: str) -> str | None:
    """Return an id for copying, unchanged; None if it is too long for an id, or has characters that no page can
    hold."""
    if len(text) > MAX_COPIED or any(unicodedata.category(char) in {"Cc", "Cs"} for char in text):
        return None
    return text


def _spelled(char: str) -> str:
    code = ord(char)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
