"""Reads the outcome of a run with delayed messages from a broker's commitlog, after the broker has stopped.

It reads RocketMQ's files by itself and not with duemq's modules: a benchmark that checks its answers must not share a
mistake with the code that it measures.
"""

from __future__ import annotations

import mmap
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from duemq.protocol.records.record import HEAD_IPV4, MAGIC_END, MAGIC_V1
from tests.bench.blast import DUE_DIGITS, NUMBER_DIGITS

SCHEDULE_TOPIC = b"SCHEDULE_TOPIC_XXXX"
TIMER_TOPIC = b"rmq_sys_wheel_timer"
_NUMBER = b"number\x01"
_DUE = b"\x02due\x01"


class Record(NamedTuple):
    """A numbered message in the commitlog. Times are ms since the epoch."""

    topic: bytes
    store_ms: int
    number: int
    due_ms: int
    """The deliver time that the client wrote into the message."""


def records(store: Path) -> Iterator[Record]:
    """The messages that have a number (see tests.bench.blast), in the order of the commitlog."""
    for path in sorted((store / "commitlog").iterdir()):
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            at = 0
            while at + 8 <= len(data):
                size, magic = int.from_bytes(data[at : at + 4], "big"), int.from_bytes(data[at + 4 : at + 8], "big")
                if magic == MAGIC_END:
                    break
                if magic != MAGIC_V1:
                    return
                head = HEAD_IPV4.unpack_from(data, at)
                topic_at = at + HEAD_IPV4.size + head[14] + 1
                topic = data[topic_at : topic_at + data[topic_at - 1]]
                number_at = data.find(_NUMBER, topic_at, at + size)
                if number_at >= 0:
                    digits_at = number_at + len(_NUMBER)
                    due_at = data.find(_DUE, topic_at, at + size) + len(_DUE)
                    number, due = data[digits_at : digits_at + NUMBER_DIGITS], data[due_at : due_at + DUE_DIGITS]
                    yield Record(topic, head[10], int(number), int(due))
                at += size


@dataclass(frozen=True)
class Delivered:
    """The delivered messages, each once and none early. Times are ms since the epoch, in the messages' order."""

    scheduled: Sequence[int]
    """Time at which each message was stored to wait."""
    stored: Sequence[int]
    """Time at which each message was stored in its topic."""
    due: Sequence[int]

    @property
    def first_ms(self) -> int:
        """Time at which the first message was stored in its topic."""
        return min(self.stored)

    @property
    def last_ms(self) -> int:
        """Time at which the last message was stored in its topic."""
        return max(self.stored)

    @property
    def per_second(self) -> float:
        """Delivery rate from the first to the last message."""
        return _rate(self.stored)

    @property
    def scheduled_per_second(self) -> float:
        """Rate at which the messages were stored to wait."""
        return _rate(self.scheduled)

    @property
    def late_ms(self) -> list[int]:
        """Lateness of each message's storage in its topic."""
        return [stored - due for stored, due in zip(self.stored, self.due, strict=True)]


def _rate(times_ms: Sequence[int]) -> float:
    return len(times_ms) / max(1, max(times_ms) - min(times_ms)) * 1000


def delivered(store: Path, topic: str, count: int, delay_ms: int | None, *, refused: int | None = 0) -> Delivered:
    """Read how messages 0 to `count` - 1, of which the broker refused some (None: number unknown), went to a topic:
    after the same delay for all, or, without one, each at the time of its timer.

    Raises RuntimeError if one was lost, stored twice or delivered early.
    """
    scheduled, stored, due = (array("q", bytes(8 * count)) for _ in range(3))
    waiting, wanted = SCHEDULE_TOPIC if delay_ms is not None else TIMER_TOPIC, topic.encode()
    twice = 0
    for record in records(store):
        times = scheduled if record.topic == waiting else stored if record.topic == wanted else None
        if times is not None:
            twice += times[record.number] != 0
            times[record.number] = record.store_ms
            if times is scheduled:
                due[record.number] = record.due_ms if delay_ms is None else record.store_ms + delay_ms
    there = [number for number in range(count) if scheduled[number] or stored[number]]
    lost = sum(not (scheduled[number] and stored[number]) for number in there)
    if refused is not None:
        lost += abs(len(there) + refused - count)
    if lost or twice:
        raise RuntimeError(f"{topic}: {lost} messages lost, {twice} stored twice, {refused} of {count} refused")
    result = Delivered(*([times[number] for number in there] for times in (scheduled, stored, due)))
    if min(result.late_ms) < 0:
        raise RuntimeError(f"{topic}: messages were {-min(result.late_ms)} ms early")
    return result
