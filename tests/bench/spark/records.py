"""The records of the stores that benchmarks generate (tests.bench.spark.stores): many of one layout at a time, as the
rows of a matrix."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]
Bytes = NDArray[np.uint8]

BODY: Final = 1024
HEAD: Final = np.dtype(
    [
        ("size", ">i4"),
        ("magic", ">u4"),
        ("crc", ">u4"),
        ("queue_id", ">i4"),
        ("flag", ">i4"),
        ("queue_offset", ">i8"),
        ("physical_offset", ">i8"),
        ("sys_flag", ">i4"),
        ("born_ms", ">i8"),
        ("born_host", "V8"),
        ("store_ms", ">i8"),
        ("store_host", "V8"),
        ("reconsume_times", ">i4"),
        ("prepared", ">i8"),
        ("body_size", ">i4"),
    ]
)
_MAGIC: Final = 0xDAA320A7
_HOST: Final = bytes((127, 0, 0, 1, 0, 0, 0x2A, 0x9F))
TEXT_AT: Final = HEAD.itemsize + BODY
HEX: Final = np.frombuffer(b"0123456789ABCDEF", np.uint8)
_HEXES: Final = HEX[np.arange(1 << 16)[:, None] >> np.array([12, 8, 4, 0]) & 15]
_DECIMALS: Final = (48 + np.arange(10_000)[:, None] // np.array([1000, 100, 10, 1]) % 10).astype(np.uint8)


class Kind(NamedTuple):
    """The common fields of all messages of one kind."""

    topic: str
    tag: str
    level: int
    """0 for plain messages, -1 for timers."""


class Messages(NamedTuple):
    """Messages, or their deliveries, one in each row of every array."""

    store_ms: Integers
    born_ms: Integers
    kind: Integers
    """Index of the message's kind."""
    number: Integers
    body: Integers
    """Index in the pool of bodies."""
    queue_id: Integers
    """Queue id in the real topic."""
    due_ms: Integers
    """Deliver time, 0 for plain messages."""
    origin: Integers
    """Physical offset of the record that scheduled a delivery, else -1."""

    def part(self, which: Any) -> Messages:
        return Messages(*(column[which] for column in self))

    @staticmethod
    def joined(parts: Sequence[Messages]) -> Messages:
        return Messages(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))


class Template:
    """The layout of the records of one kind, in their own topic or where they wait, with the variable fields left
    open."""

    def __init__(self, kind: Kind, topic: str) -> None:
        key, number = b"7F000001" * 3 + b"\0" * 8, b"\0" * 10
        parts: list[bytes] = [b"UNIQ_KEY\x01", key, f"\x02TAGS\x01{kind.tag}\x02KEYS\x01order-".encode(), number]
        parts.append(b"\x02CLUSTER\x01DefaultCluster\x02WAIT\x01true")
        self.due_at = self.out_at = self.queue_at = -1
        topic_field = bytes((len(topic),)) + topic.encode()
        start = HEAD.itemsize + BODY + len(topic_field) + 2
        if kind.level > 0:
            parts.append(f"\x02DELAY\x01{kind.level}".encode())
        elif kind.level < 0:
            parts.append(b"\x02TIMER_DELIVER_MS\x01")
            self.due_at = start + len(b"".join(parts))
            parts += [b"\0" * 13, b"\x02TIMER_OUT_MS\x01"]
            self.out_at = start + len(b"".join(parts))
            parts.append(b"\0" * 13)
        if kind.level:
            parts.append(f"\x02REAL_TOPIC\x01{kind.topic}\x02REAL_QID\x01".encode())
            self.queue_at = start + len(b"".join(parts))
            parts.append(b"\0")
        text = b"".join(parts)
        self.key_at = start + text.index(key)
        self.number_at = start + text.index(b"order-") + 6
        row = bytes(HEAD.itemsize + BODY) + topic_field + len(text).to_bytes(2, "big") + text
        self.size = len(row)
        self.row = np.frombuffer(row, np.uint8).copy()
        head = self.row[: HEAD.itemsize].view(HEAD)
        head["size"], head["magic"], head["body_size"] = self.size, _MAGIC, BODY
        head["born_host"] = head["store_host"] = np.void(_HOST)

    def rows(self, messages: Messages) -> tuple[Bytes, NDArray[Any]]:
        """Return records without the fields that depend on their position, and a view of their heads."""
        rows = np.empty((len(messages.kind), self.size), np.uint8)
        rows[:, : HEAD.itemsize] = self.row[: HEAD.itemsize]
        rows[:, TEXT_AT:] = self.row[TEXT_AT:]
        head = rows[:, : HEAD.itemsize].view(HEAD)[:, 0]
        head["born_ms"], head["store_ms"] = messages.born_ms, messages.store_ms
        _digits(rows, self.number_at, 10, messages.number)
        rows[:, self.key_at + 24 : self.key_at + 28] = _HEXES[messages.number >> 16]
        rows[:, self.key_at + 28 : self.key_at + 32] = _HEXES[messages.number & 0xFFFF]
        if self.due_at >= 0:
            _digits(rows, self.due_at, 13, messages.due_ms)
            _digits(rows, self.out_at, 13, out_ms(messages.due_ms))
        if self.queue_at >= 0:
            rows[:, self.queue_at] = 48 + messages.queue_id
        return rows, head


def _digits(rows: Bytes, at: int, count: int, numbers: Integers) -> None:
    """Write numbers with a fixed number of decimal digits, four at a time."""
    for end in range(at + count, at, -4):
        width = min(4, end - at)
        numbers, low = np.divmod(numbers, 10_000)
        rows[:, end - width : end] = _DECIMALS[low, 4 - width :]


def out_ms(due_ms: Integers) -> Integers:
    """RocketMQ's TIMER_OUT_MS, the start of the second in whose slot a message waits."""
    result: Integers = (due_ms - 1) // 1000 * 1000
    return result
