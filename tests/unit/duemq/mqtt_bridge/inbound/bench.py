"""The inbound part of a bridge with a scripted RocketMQ, for tests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

from duemq._values.intervals import Intervals
from duemq.mqtt_bridge.inbound.arrivals import Arrival
from duemq.mqtt_bridge.inbound.from_mqtt import FromMqtt
from duemq.mqtt_bridge.inbound.receipts import Receipts
from duemq.mqtt_bridge.session.journal import Journal, open_journal
from duemq.mqtt_bridge.session.packets import (
    NO_PROPERTIES,
    Ack,
    Properties,
    Publish,
)
from duemq.mqtt_bridge.status import Status
from tests.unit.duemq.mqtt_bridge.fakes import FakeProducer, FakeRecaller, FakeSession, rules

RULES = """
[[to_rocketmq]]
filter = "in/#"
topic = "In"
key = "{2}"
qos = 2
"""
INTERVALS = Intervals(first_pause=0.001, longest_pause=0.002)
NOW = 1_800_000_000_000


class Bench:
    """The inbound part of a bridge, and the fakes around it."""

    def __init__(
        self,
        inbound: FromMqtt,
        producer: FakeProducer,
        recaller: FakeRecaller,
        status: Status,
        journal: Journal,
        passed: list[float],
        running: asyncio.Task[None],
    ) -> None:
        self.inbound = inbound
        self.journal = journal
        self.passed = passed
        """Seconds that have passed; their sum is the time."""
        self.running = running
        self.producer = producer
        self.recaller = recaller
        self.status = status
        self.session = FakeSession()
        self.connect(self.session)

    def connect(self, session: FakeSession) -> None:
        self.session = session
        self.inbound.connected(cast("Any", session))
        self.inbound.accepted(is_present=session.is_present)

    async def acks(self, *items: Publish | Ack, count: int | None = None) -> list[tuple[int, int, int]]:
        """Hand these over, and return the acknowledgements as soon as there are `count`, by default one for each."""
        before = len(self.session.sent)
        self.inbound.received(items)
        await self.session.until(before + (len(items) if count is None else count))
        return self.session.acks()[before:]


@asynccontextmanager
async def bench(
    directory: Path,
    text: str = RULES,
    mqtt: str = "",
    producer: FakeProducer | None = None,
    receipts: Receipts | None = None,
    passed: list[float] | None = None,
    waiting: Sequence[Arrival] = (),
) -> AsyncIterator[Bench]:
    journal = await open_journal(directory / "state")
    producer = producer or FakeProducer()
    recaller = FakeRecaller(producer)
    passed = passed if passed is not None else []
    found = rules(text, directory, mqtt)
    status = Status(found.status_topic, lambda: NOW)
    inbound = FromMqtt(
        found,
        producer=cast("Any", producer),
        recaller=recaller,
        journal=journal,
        receipts=receipts if receipts is not None else Receipts(),
        status=status,
        waiting=waiting,
        intervals=INTERVALS,
        clock=lambda: NOW + round(sum(passed) * 1000),
        monotonic=lambda: sum(passed),
    )
    running = [asyncio.create_task(each) for each in (inbound.run(), inbound.save_forever())]
    try:
        yield Bench(inbound, producer, recaller, status, journal, passed, running[0])
    finally:
        for task in running:
            task.cancel()
        await asyncio.wait(running)
        await journal.close()


def message(
    packet_id: int = 1, payload: bytes = b"x", qos: int = 1, topic: str = "in/a", dup: bool = False, **more: Any
) -> Publish:
    properties = Properties(**more) if more else NO_PROPERTIES
    return Publish(topic, payload, qos, False, dup, packet_id if qos else 0, properties, len(payload))


def at_time(kind: str, qos: int, number: int, dup: bool = False) -> Publish:
    """A message that is due 3 s after the beginning, its recall, or its replacement."""
    due = f"@{NOW + 3000}" if "at" in kind else "3"
    option = {"recall": "recall;key=k", "plain": f"{due};key=k"}.get(kind, f"{due};key=k;replace")
    return message(number, kind.encode(), qos, f"delayed/{option}/a", dup)


async def while_rocketmq_is_away(at: Bench, batches: list[list[Publish]], seconds: float) -> None:
    """Hand over batches, each after a second, while nothing can be sent; RocketMQ comes back after `seconds` more."""
    at.producer.may_go.clear()
    at.inbound.received(batches[0])
    await at.producer.has_begun.wait()
    for batch in batches[1:]:
        at.passed.append(1)
        at.inbound.received(batch)
    at.passed.append(seconds)
    at.producer.may_go.set()


def producer_bodies(at: Bench) -> list[bytes]:
    return [body for body in at.producer.bodies if body != b"x"]
