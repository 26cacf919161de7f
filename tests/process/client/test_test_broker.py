"""The broker in a test's process, and the fixtures of the pytest plugin, as users have them."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path

import pytest

from duemq import Consumer, Producer
from duemq.testing import BrokerClock, TestBroker
from duemq.testing.broker import TestBrokerError


async def receive(consumer: Consumer, count: int) -> list[bytes]:
    """The bodies of the next messages, which are acknowledged."""
    found = []
    async with asyncio.timeout(30):
        for _ in range(count):
            message = await consumer.receive()
            await message.ack()
            found.append(message.body)
    return found


async def test_delays_levels_and_times_come_when_the_clock_has_moved(
    duemq_broker: TestBroker, duemq_clock: BrokerClock
) -> None:
    consumer = Consumer("readers", nameserver=duemq_broker.nameserver)
    consumer.subscribe("reminders")
    async with Producer(duemq_broker.nameserver) as producer, consumer:
        await producer.send("reminders", b"level", level=17)
        await producer.send("reminders", b"delay", delay="1h30m")
        await producer.send("reminders", b"time", deliver_at=duemq_clock.now() + timedelta(hours=1, minutes=45))
        for minutes, body in ((59, b"level"), (29, b"delay"), (14, b"time")):
            duemq_clock.advance(timedelta(minutes=minutes))
            marker = b"not %s yet" % body
            await producer.send("reminders", marker)
            assert await receive(consumer, 1) == [marker]
            duemq_clock.advance("1m")
            assert await receive(consumer, 1) == [body]


def test_it_works_without_a_loop(duemq_broker: TestBroker, duemq_clock: BrokerClock) -> None:
    before = duemq_clock.now()
    assert duemq_clock.advance(ms=5000) - before >= timedelta(seconds=5)

    async def send_and_receive() -> list[bytes]:
        consumer = Consumer("readers", nameserver=duemq_broker.nameserver)
        consumer.subscribe("now")
        async with Producer(duemq_broker.nameserver) as producer, consumer:
            await producer.send("now", b"x")
            return await receive(consumer, 1)

    assert asyncio.run(send_and_receive()) == [b"x"]


class TestSettings:
    @pytest.fixture
    def duemq_settings(self) -> Mapping[str, object]:
        return {"messageDelayLevel": "7m", "autoCreateTopicEnable": "true"}

    async def test_settings_are_a_fixture_of_the_users(
        self, duemq_broker: TestBroker, duemq_clock: BrokerClock
    ) -> None:
        async with Producer(duemq_broker.nameserver) as producer:
            sent = await producer.send("reminders", b"x", level=1)
        assert sent.due_time_ms is not None
        assert 415 < sent.due_time_ms / 1000 - duemq_clock.now().timestamp() <= 420


def test_several_run_at_once_and_a_store_may_be_kept(tmp_path: Path) -> None:
    with TestBroker(store=tmp_path) as first, TestBroker() as second:
        assert first.nameserver != second.nameserver
        for broker in (first, second):
            for address in (broker.nameserver, broker.address):
                host, port = address.split(":")
                socket.create_connection((host, int(port))).close()
        with pytest.raises(TestBrokerError, match="is already started"):
            first.start()
    assert (tmp_path / "commitlog").is_dir()
    with TestBroker(store=tmp_path):
        pass
    first.stop()


def test_a_start_that_fails_says_why(tmp_path: Path) -> None:
    with pytest.raises(TestBrokerError, match="messageDelayLevel"):
        TestBroker({"messageDelayLevel": "soon"}).start()
    with TestBroker(store=tmp_path), pytest.raises(TestBrokerError, match="in use"):
        TestBroker(store=tmp_path).start()


def test_another_project_has_the_fixtures_too(tmp_path: Path) -> None:
    (tmp_path / "test_theirs.py").write_text(
        textwrap.dedent("""
            import asyncio
            from duemq import Producer

            def test_theirs(duemq_broker, duemq_clock):
                async def send():
                    async with Producer(duemq_broker.nameserver) as producer:
                        return await producer.send("reminders", b"call back", delay="2h")
                assert asyncio.run(send()).due_time_ms > duemq_clock.now().timestamp() * 1000
        """)
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
