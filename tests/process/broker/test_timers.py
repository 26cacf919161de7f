"""Timers from a user's view: a broker process, duemq's client, and time travel over weeks."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from duemq import Admin, ChangeResult, Consumer, Producer
from duemq.testing import TestClock
from tests.peers.brokers.duemq import DuemqBroker

TOPIC = "reminders"


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[DuemqBroker]:
    broker = DuemqBroker(tmp_path, {"testClock": "true"}, is_warm=True)
    await broker.start()
    yield broker
    await broker.stop()


async def test_a_message_in_forty_days_is_on_time_over_a_kill(broker: DuemqBroker) -> None:
    clock = TestClock(broker.nameserver)
    async with Producer(broker.nameserver) as producer:
        sent = await producer.send(TOPIC, b"in forty days", delay="960h")
        recalled = await producer.send(TOPIC, b"never", delay="960h")
        cancelled = await producer.send(TOPIC, b"never either", delay="960h")
        assert recalled.recall_handle is not None
        await producer.recall(TOPIC, recalled.recall_handle)
        found = await producer.cancel(cancelled.handle)
        assert found.result is ChangeResult.CANCELLED
    await broker.kill()
    await broker.start()
    async with Admin(broker.nameserver) as admin:
        waiting = [message async for message in admin.pending(topic=TOPIC)]
        assert [message.message_id for message in waiting] == [sent.message_id]
    consumer = Consumer("g", nameserver=broker.nameserver)
    consumer.subscribe(TOPIC)
    async with consumer:
        # The test clock starts anew with each process, so this time still has to pass.
        await clock.advance("960h")
        message = await consumer.receive()
        await message.ack()
    assert message.body == b"in forty days"
    assert sent.due_time_ms is not None
    assert message.store_time_ms >= sent.due_time_ms


async def test_the_last_message_of_a_key_is_delivered_over_kills(broker: DuemqBroker) -> None:
    clock = TestClock(broker.nameserver)
    for number in range(3):
        async with Producer(broker.nameserver) as producer:
            for key in ("a", "b"):
                body = f"{key}{number}".encode()
                await producer.send(TOPIC, body, keys=key, delay=f"{40 - number}m", replace=True)
        if number < 2:
            await broker.kill()
            await broker.start()
    async with Admin(broker.nameserver) as admin:
        assert await admin.count(topic=TOPIC) == 2
    consumer = Consumer("g", nameserver=broker.nameserver)
    consumer.subscribe(TOPIC)
    async with consumer:
        await clock.advance("2h")
        messages = [await consumer.receive() for _ in range(2)]
        for message in messages:
            await message.ack()
    assert sorted(message.body for message in messages) == [b"a2", b"b2"]
