"""A broker that is killed and started again while a client sends: that costs time, and neither errors nor messages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

from duemq import Consumer, Message, Producer
from tests.peers.brokers.duemq import DuemqBroker

COUNT = 6000
KILLED_AT = (1500, 3500)


async def test_many_messages_over_kills(tmp_path: Path) -> None:
    """Half of the messages are bound to a queue, and keep their order there although batches are sent again."""
    broker = DuemqBroker(tmp_path / "broker", is_warm=True)
    await broker.start()

    async def source() -> AsyncIterator[Message]:
        for number in range(COUNT):
            if number in KILLED_AT:
                await broker.kill()
                await broker.start()
            yield Message("orders", b"%d" % number, sharding_key="k" if number % 2 else None)

    async with Producer(broker.nameserver, timeout=60, retries=10, max_in_flight=1000) as producer:
        await producer.send("orders", b"makes the topic")
        results = await producer.send_many(source())
        bound = {result.queue for number, result in enumerate(results) if number % 2}
    assert len(results) == COUNT
    assert len(bound) == 1
    consumer = Consumer("readers", nameserver=broker.nameserver, from_="first")
    consumer.subscribe("orders")
    seen: dict[int, tuple[int, str]] = {}
    async with consumer, asyncio.timeout(60):
        while len(seen) < COUNT:
            for message in await consumer.receive_many(1000):
                if message.body.isdigit():
                    place = (message.queue_offset, message.message_id)
                    number = int(message.body)
                    seen[number] = min(seen.get(number, place), place)
                await message.ack()
    assert [seen[number][1] for number in range(COUNT)] == [result.message_id for result in results]
    offsets = [seen[number][0] for number in range(COUNT) if number % 2]
    assert offsets == sorted(offsets), "by where each lies first"
    await broker.stop()
