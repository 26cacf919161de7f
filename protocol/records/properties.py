"""The property text of a message, on the wire and in the record.

    name \\x01 value \\x02 name \\x01 value ...        UTF-8, at most 32767 bytes; the order means nothing

RocketMQ 4.9.7 writes no \\x02 at the end, 5.x does; both forms are read. A part without \\x01, without a name or with
an empty value is not a property. If a name occurs twice, the last one counts, as in RocketMQ.

The hot path never makes a dictionary of the properties: it searches the text itself for the few names that decide how a
message is handled. Mirrors apache/rocketmq common/message/{MessageDecoder,MessageConst}.java (4.9.7).
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Final

NAME_END: Final = "\x01"
PROPERTY_END: Final = "\x02"
MAX_BYTES: Final = 32767

KEYS: Final = "KEYS"
TAGS: Final = "TAGS"
WAIT: Final = "WAIT"
DELAY: Final = "DELAY"
UNIQ_KEY: Final = "UNIQ_KEY"
CLUSTER: Final = "CLUSTER"
MSG_REGION: Final = "MSG_REGION"
TRACE_ON: Final = "TRACE_ON"
RETRY_TOPIC: Final = "RETRY_TOPIC"
REAL_TOPIC: Final = "REAL_TOPIC"
REAL_QID: Final = "REAL_QID"
ORIGIN_MESSAGE_ID: Final = "ORIGIN_MESSAGE_ID"
_TAGS_KEY: Final = TAGS + NAME_END
_NEXT_TAGS_KEY: Final = PROPERTY_END + _TAGS_KEY
_NEXT_TAGS_KEY_SIZE: Final = len(_NEXT_TAGS_KEY)
TRAN_MSG: Final = "TRAN_MSG"
TIMER_DELIVER_MS: Final = "TIMER_DELIVER_MS"
TIMER_DELAY_MS: Final = "TIMER_DELAY_MS"
TIMER_DELAY_SEC: Final = "TIMER_DELAY_SEC"
TIMER_OUT_MS: Final = "TIMER_OUT_MS"
TIMER_ROLL_TIMES: Final = "TIMER_ROLL_TIMES"
TIMER_ENQUEUE_MS: Final = "TIMER_ENQUEUE_MS"
TIMER_DEQUEUE_MS: Final = "TIMER_DEQUEUE_MS"
TIMER_DEL_UNIQKEY: Final = "TIMER_DEL_UNIQKEY"
TIMER_REPLACE: Final = "TIMER_REPLACE"
TIMER_FIRST_ID: Final = "TIMER_FIRST_ID"
TIMER_FROM_LEVEL: Final = "TIMER_FROM_LEVEL"
"""duemq's own property, as TIMER_REPLACE and TIMER_FIRST_ID are: see `timer_properties`."""
TIMER_EVERY: Final = "TIMER_EVERY"
TIMER_CRON: Final = "TIMER_CRON"
TIMER_ZONE: Final = "TIMER_ZONE"
TIMER_START: Final = "TIMER_START"
TIMER_END: Final = "TIMER_END"
TIMER_COUNT: Final = "TIMER_COUNT"
TIMER_PAUSED: Final = "TIMER_PAUSED"
RECURRENCE: Final = (TIMER_EVERY, TIMER_CRON, TIMER_ZONE, TIMER_START, TIMER_END, TIMER_COUNT, TIMER_PAUSED)
"""duemq's own properties of a message that is delivered again and again: see `recurrence`."""
DUE_MS: Final = "DUE_MS"
"""duemq's own property: the time when a message with a level is due, ms since the epoch, which its record does not tell
otherwise. duemq's producer sets it by the producer's clock, and duemq's broker corrects it by the broker's clock."""
TIMERS: Final = (TIMER_DELAY_SEC, TIMER_DELAY_MS, TIMER_DELIVER_MS)
"""Properties that ask for a time; the first of them that a message has counts."""
TIMER_STATE: Final = (
    TIMER_OUT_MS,
    TIMER_ROLL_TIMES,
    TIMER_FIRST_ID,
    TIMER_FROM_LEVEL,
    TIMER_ENQUEUE_MS,
    TIMER_DEQUEUE_MS,
)
"""Properties that a broker adds to a message while it waits for its time."""
REPLY_TO_CLIENT: Final = "REPLY_TO_CLIENT"

_UTF16: Final = "utf-16-le" if sys.byteorder == "little" else "utf-16-be"
_MAX_KNOWN: Final = 128


def parse(text: str) -> dict[str, str]:
    """Return the properties in a text."""
    result: dict[str, str] = {}
    for part in text.split(PROPERTY_END):
        name, separator, value = part.partition(NAME_END)
        if separator and name and value:
            result[name] = value
    return result


def format_properties(properties: Mapping[str, str]) -> str:
    """Return the text of properties, without a \\x02 at the end. Properties with empty values are left out, as in
    RocketMQ. \\x01 and \\x02 are not escaped: a reader takes them for the ends of a name and of a value."""
    return PROPERTY_END.join(f"{name}{NAME_END}{value}" for name, value in properties.items() if value)


def get(text: str, name: str) -> str | None:
    """Return the value of one property, or None."""
    key = name + NAME_END
    at = text.rfind(key)
    if at < 0:
        return None
    if at and text[at - 1] != PROPERTY_END:
        # The match is the end of a longer name, or part of a value.
        at = text.rfind(PROPERTY_END + key) + 1
        if not at and not text.startswith(key):
            return None
    start = at + len(key)
    end = text.find(PROPERTY_END, start)
    return (text[start:] if end < 0 else text[start:end]) or parse(text).get(name)


def is_empty(text: str, name: str) -> bool:
    """Whether a property occurs without a value, and does not also occur with one."""
    empty = f"{name}{NAME_END}"
    return empty in text and empty in text.split(PROPERTY_END) and get(text, name) is None


def without(text: str, name: str) -> str:
    """Return the text without a property."""
    key = name + NAME_END
    if key not in text:
        return text
    return PROPERTY_END.join(part for part in text.split(PROPERTY_END) if not part.startswith(key))


def without_all(text: str, names: Iterable[str]) -> str:
    """Return the text without some properties."""
    keys = tuple(name + NAME_END for name in names)
    return PROPERTY_END.join(part for part in text.split(PROPERTY_END) if not part.startswith(keys))


def with_property(text: str, name: str, value: str) -> str:
    """Return the text with a property added at its end; an older property with the same name is removed."""
    text = without(text, name)
    if not text or text.endswith(PROPERTY_END):
        return f"{text}{name}{NAME_END}{value}"
    return f"{text}{PROPERTY_END}{name}{NAME_END}{value}"


def java_hash(text: str) -> int:
    """Return Java's String.hashCode of a text: it is computed over UTF-16 units, and wraps to a signed 32-bit
    number."""
    result = 0
    for unit in memoryview(text.encode(_UTF16, "surrogatepass")).cast("H"):
        result = (31 * result + unit) & 0xFFFFFFFF
    return result - 0x1_0000_0000 if result & 0x8000_0000 else result


_JAVA_BLANKS: Final = "".join(map(chr, range(0x21)))
"""The characters that Java's String.trim removes: fewer than all blanks of Unicode."""


def tags_in(expression: str) -> list[str]:
    """Return the tags in a tag expression, "a || b", in its order, as RocketMQ's FilterAPI reads them: trimmed as Java
    does, without empty ones. The expression "*", which stands for all tags, is the caller's to recognize."""
    return [tag for each in expression.split("||") if (tag := each.strip(_JAVA_BLANKS))]


def tags_code_of(text: str) -> int:
    """Return the tags code of a message with these properties."""
    at = text.rfind(_NEXT_TAGS_KEY)
    if at < 0:
        return tags_code(get(text, TAGS)) if _TAGS_KEY in text else 0
    at += _NEXT_TAGS_KEY_SIZE
    end = text.find(PROPERTY_END, at)
    tags = text[at:] if end < 0 else text[at:end]
    return _known_code(tags) if 0 < len(tags) <= _MAX_KNOWN else tags_code(tags or get(text, TAGS))


def tags_code(tags: str | None) -> int:
    """Return the tags code in a consume queue: the hash of the tags as one text, 0 without tags."""
    if not tags:
        return 0
    return _known_code(tags) if len(tags) <= _MAX_KNOWN else java_hash(tags)


_known_code = lru_cache(maxsize=4096)(java_hash)
"""Returns the hash of tags, with a cache. It is called only for tags of usual length, so that clients cannot fill
memory with made-up tags."""
