"""Recurring messages: the client and the command line against a broker, and kills of a real one."""

from __future__ import annotations

import asyncio
import json
import random
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import pytest

from duemq import Admin, ArgumentError, Consumer, MessageRejectedError, Producer, RecurringResult
from duemq.testing import BrokerClock, TestBroker
from tests.peers.brokers.duemq import DuemqBroker
from tests.process.pages.test_readme import run, start

COUNT = 20
KILLS = 4


async def test_a_message_recurs(duemq_broker: TestBroker, duemq_clock: BrokerClock) -> None:
    address = duemq_broker.nameserver
    consumer = Consumer("g", nameserver=address, from_="first")
    consumer.subscribe("beats")
    async with Producer(address) as producer, Admin(address) as admin, consumer:
        await producer.schedule("beats", b"tick", name="n", every="10m", count=3, tags="t", properties={"a": "b"})
        await producer.schedule("beats", b"never", name="other", cron="0 9 * * *", zone="Europe/Paris")
        (found,) = [message async for message in admin.recurring(name="n")]
        assert (found.recurrence.every_ms, found.recurrence.count, found.recurrence.is_paused) == (600_000, 3, False)
        assert await admin.pause_recurring("beats", "other") is RecurringResult.PAUSED
        messages = []
        for _ in range(3):
            duemq_clock.advance("10m")
            async with asyncio.timeout(30):
                messages.append(await consumer.receive())
        for message in messages:
            assert (message.body, message.keys, message.tags, message.properties["a"]) == (b"tick", ("n",), "t", "b")
            await message.ack()
        due = [message.due_time_ms or 0 for message in messages]
        assert [later - sooner for sooner, later in pairwise(due)] == [600_000] * 2
        assert len({message.message_id for message in messages}) == 3
        assert [message.keys async for message in admin.recurring()] == [("other",)]
        assert await admin.resume_recurring("beats", "other") is RecurringResult.RESUMED
        assert await admin.remove_recurring("beats", "other") is RecurringResult.REMOVED
        assert await admin.remove_recurring("beats", "other") is RecurringResult.NOT_FOUND
        with pytest.raises(MessageRejectedError, match="is not a cron expression"):
            await producer.schedule("beats", b"x", name="n", cron="61 * * * *")
        for wrong in ({}, {"every": "1h", "cron": "* * * * *"}, {"every": "1h", "count": 0}):
            with pytest.raises(ArgumentError):
                await producer.schedule("beats", b"x", name="n", **wrong)


async def test_the_commands(duemq_broker: TestBroker) -> None:
    address = duemq_broker.nameserver
    options = ["--name", "nightly", "--cron", "0 3 * * *", "--zone", "Europe/Paris"]
    assert "reports" in await run(address, ["schedule", "add", "reports", "go", *options])
    added = await run(
        address, ["schedule", "add", "beats", "tick", "--name", "tick", "--every", "1h30m", "-n", "7", "--json"]
    )
    assert json.loads(added)["message_id"]
    lines = (await run(address, ["schedule", "list"])).splitlines()
    assert {line.split("  ", 1)[1] for line in lines} == {
        "reports  nightly  cron '0 3 * * *' Europe/Paris",
        "beats  tick  every 1h30m  7 times",
    }
    assert await run(address, ["schedule", "pause", "beats", "tick"]) == "paused\n"
    assert (await run(address, ["schedule", "list", "--topic", "beats"])).startswith("paused  beats  tick")
    assert await run(address, ["schedule", "resume", "beats", "tick"]) == "resumed\n"
    assert await run(address, ["schedule", "remove", "beats", "tick", "--json"]) == '{"result":"REMOVED"}\n'
    child = await start(address, ["schedule", "remove", "beats", "tick"])
    out, _ = await child.communicate()
    assert (child.returncode, b"beats has no recurring message with the name tick" in out) == (1, True)


async def test_each_delivery_comes_once_over_kills(tmp_path: Path) -> None:
    broker = DuemqBroker(tmp_path / "broker", is_warm=True)
    await broker.start()
    chance = random.Random(7)
    first: dict[str, int] = {}
    async with Producer(broker.nameserver) as producer, Admin(broker.nameserver) as admin:
        for number in range(COUNT):
            await producer.schedule("beats", b"x", name=f"n{number}", every=1.0)
        async for waiting in admin.recurring("beats"):
            first[waiting.keys[0]] = waiting.due_time_ms
    for _ in range(KILLS):
        await asyncio.sleep(chance.uniform(0.5, 2.0))
        await broker.kill()
        await broker.start()
    times: dict[str, list[int]] = defaultdict(list)
    consumer = Consumer("g", nameserver=broker.nameserver, from_="first")
    consumer.subscribe("beats")
    async with consumer, asyncio.timeout(60):
        while len(times) < COUNT or min(map(len, times.values())) < 6:
            message = await consumer.receive()
            times[message.keys[0]].append(message.due_time_ms or 0)
            await message.ack()
    await broker.stop()
    for name, found in times.items():
        assert found == list(range(first[name], first[name] + 1000 * len(found), 1000)), name
