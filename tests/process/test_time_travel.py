"""Time travel as users' tests do it: a broker process whose clock is moved, and our client."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from duemq import Producer, PushConsumer
from duemq.errors import NoPermissionError
from duemq.testing import TestClock
from tests.peers.duemq_broker import DuemqBroker

DUEMQ = str(Path(sys.executable).with_name("duemq"))
TOPIC = "reminders"
TWO_HOURS = 18
"""The delay level."""


async def test_two_hours_take_no_time(tmp_path: Path) -> None:
    broker = DuemqBroker(tmp_path, {"testClock": "true"})
    await broker.start()
    clock = TestClock(broker.nameserver)
    consumer = PushConsumer("g", nameserver=broker.nameserver)
    consumer.subscribe(TOPIC)

    async def received() -> bytes:
        message = await consumer.receive()
        await message.ack()
        return message.body

    async with Producer(broker.nameserver) as producer, consumer:
        await producer.send(TOPIC, b"now")
        assert await received() == b"now"
        begin = await clock.now()
        await producer.send(TOPIC, b"in two hours", level=TWO_HOURS)
        assert (await clock.advance("1h59m") - begin).total_seconds() >= 119 * 60
        await producer.send(TOPIC, b"a minute too early")
        assert await received() == b"a minute too early"
        await clock.advance(ms=60_000)
        assert await received() == b"in two hours"
        # Nobody was thrown out: whoever was connected goes on.
        await producer.send(TOPIC, b"after")
        assert await received() == b"after"
    await broker.stop()
    assert broker.returncode == 0
    assert "client_expired" not in broker.stderr.read_text()


async def test_the_command_moves_a_broker_for_tests_only(tmp_path: Path) -> None:
    broker = DuemqBroker(tmp_path)
    await broker.start()
    done = subprocess.run(
        [DUEMQ, "clock", "advance", "2h", "--nameserver", broker.nameserver],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 1
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert "this broker's clock cannot be moved: for tests, start one with --set testClock=true" in line
    with pytest.raises(NoPermissionError):
        await TestClock(broker.nameserver).advance("2h")
    await broker.stop()
