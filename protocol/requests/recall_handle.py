"""The handle of a waiting message: the answer to its send has the handle, and RECALL_MESSAGE names the message by it.

    base64url of    v1 <topic> <broker name> <TIMER_OUT_MS + 1> <UNIQ_KEY> [<physical offset>-<deliver time>]

Words are separated by one blank; numbers are decimal. The last word is duemq's own: RocketMQ's clients read the first
five words and send the handle back unchanged. A handle of Apache's broker has no sixth word.
Mirrors apache/rocketmq common/producer/RecallMessageHandle.java (5.3.3).
"""

from __future__ import annotations

import re
from binascii import Error, a2b_base64, b2a_base64
from typing import Final, NamedTuple

from duemq.protocol.errors import RemoteProtocolError

DELIVERED_REMARK: Final = "recall failed, the message is already delivered"
NO_LONGER_WAITS_REMARK: Final = "recall failed, it was delivered or cancelled, or the store was compacted since"
UNKNOWN_REMARK: Final = "recall failed, no such message"
"""The remarks with which a duemq broker answers ILLEGAL_OPERATION. Clients tell the cases apart by them, so they do not
change."""

_VERSION: Final = "v1"
_TO_URL: Final = bytes.maketrans(b"+/", b"-_")
_FROM_URL: Final = str.maketrans("-_", "+/")
_STORED: Final = re.compile(r"([0-9]{1,19})-([0-9]{1,16})", re.ASCII)
_NUMBER: Final = re.compile(r"-?[0-9]{1,19}", re.ASCII)


class RecallHandle(NamedTuple):
    """A decoded handle. Times are ms since the epoch."""

    topic: str
    broker_name: str
    slot_ms: int
    """A time in the second in whose slot the message waits; -1 if the handle has no number there."""
    unique_key: str
    stored: tuple[int, int] | None = None
    """Physical offset and deliver time, in a handle that duemq made; else None."""


def encode(topic: str, broker_name: str, out_ms: int, unique_key: str, physical_offset: int, deliver_ms: int) -> bytes:
    """Encode the handle of a message; `out_ms` is its TIMER_OUT_MS. The topic, the broker name and the unique key must
    not contain blanks."""
    text = f"v1 {topic} {broker_name} {out_ms + 1} {unique_key} {physical_offset}-{deliver_ms}"
    return b2a_base64(text.encode(), newline=False).translate(_TO_URL)


def decode(handle: str) -> RecallHandle:
    """Decode a handle. Raises RemoteProtocolError."""
    padded = handle.translate(_FROM_URL) + "=" * (-len(handle) % 4)
    try:
        words = a2b_base64(padded, strict_mode=True).decode().split(" ")
    except (Error, ValueError):
        words = []
    if len(words) < 5 or words[0] != _VERSION:
        raise RemoteProtocolError("recall handle is invalid")
    slot_ms = int(words[3]) if _NUMBER.fullmatch(words[3]) else -1
    stored = _STORED.fullmatch(words[5]) if len(words) > 5 else None
    return RecallHandle(
        words[1], words[2], slot_ms, words[4], (int(stored[1]), int(stored[2])) if stored is not None else None
    )
