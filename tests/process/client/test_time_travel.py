"""Time travel as users' tests do it: a broker process with a movable clock, and duemq's client."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from duemq import Admin, Consumer, Producer, ReceivedMessage
from duemq._values.durations import parse_duration
from duemq._values.times import now_ms
from duemq.errors import NoPermissionError
from duemq.testing import TestClock
from tests.peers.brokers.duemq import DuemqBroker

DUEMQ = str(Path(sys.executable).with_name("duemq"))
TOPIC = "reminders"
TWO_HOURS = 18
"""The delay level of two hours."""


async def test_two_hours_take_no_time(tmp_path: Path) -> None:
    broker = DuemqBroker(tmp_path, {"testClock": "true"}, is_warm=True)
    await broker.start()
    clock = TestClock(broker.nameserver)
    consumer = Consumer("g", nameserver=broker.nameserver)
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
        # The broker has dropped no connected client.
        await producer.send(TOPIC, b"after")
        assert await received() == b"after"
    await broker.stop()
    assert broker.returncode == 0
    assert "client_expired" not in broker.stderr.read_text()


async def test_a_delay_counts_by_the_brokers_clock(tmp_path: Path) -> None:
    """The broker counts a delay by its own clock, here three hours ahead of the sender's. An earlier client sent the
    time by its own clock, which had already passed at the broker."""
    broker = DuemqBroker(tmp_path, {"testClock": "true"}, is_warm=True)
    await broker.start()
    clock = TestClock(broker.nameserver)
    consumer = Consumer("g", nameserver=broker.nameserver)
    consumer.subscribe(TOPIC)

    async def received() -> ReceivedMessage:
        message = await consumer.receive()
        await message.ack()
        return message

    async with Producer(broker.nameserver) as producer, consumer, Admin(broker.nameserver) as admin:
        await producer.send(TOPIC, b"now")
        assert (await received()).body == b"now"
        await clock.advance("3h")
        begin_ms = int((await clock.now()).timestamp() * 1000)
        sent = await producer.send(TOPIC, b"in 90 minutes", delay="90m")
        assert sent.due_time_ms is not None
        assert 0 <= sent.due_time_ms - begin_ms - 90 * 60_000 < 60_000
        level = await producer.send(TOPIC, b"in an hour", level=17)
        moved = await producer.send(TOPIC, b"to be moved", delay="4h1m")
        recalled = await producer.send(TOPIC, b"to be recalled", delay="61m")
        replaced = await producer.send(TOPIC, b"older", delay="62m", keys="k", replace=True)
        newer = await producer.send(TOPIC, b"newer", delay="63m", keys="k", replace=True)
        waiting = {each.message_id: each.due_time_ms async for each in admin.pending(TOPIC)}
        assert waiting[sent.message_id] == sent.due_time_ms
        assert set(waiting) == {each.message_id for each in (sent, level, moved, recalled, newer)}
        assert replaced.due_time_ms is not None
        assert recalled.recall_handle is not None
        assert await producer.recall(TOPIC, recalled.recall_handle) == recalled.message_id
        assert (await admin.reschedule([moved.offset_message_id], delay="64m")).counts == {"RESCHEDULED": 1}
        await producer.send(TOPIC, b"not yet")
        assert (await received()).body == b"not yet"
        for minutes, body in ((61, b"in an hour"), (3, b"newer"), (1, b"to be moved"), (26, b"in 90 minutes")):
            await clock.advance(f"{minutes}m")
            message = await received()
            assert message.body == body
            assert message.due_time_ms is not None
            # Due by the broker's clock, which is hours ahead, so the lateness by this machine's clock is negative.
            assert message.lateness_ms == message.receive_time_ms - message.due_time_ms
            assert 0 <= message.store_time_ms - message.due_time_ms < 2 * 60_000
    await broker.stop()


@pytest.mark.parametrize("skew_ms", [-10_000, 10_000])
async def test_a_sender_whose_clock_is_wrong_keeps_its_delays(tmp_path: Path, skew_ms: int) -> None:
    """A message is delivered after its full delay although its sender's clock is 10 s slow or fast. With an earlier
    client the delays of a slow sender were 10 s short."""
    broker = DuemqBroker(tmp_path, is_warm=True)
    await broker.start()
    consumer = Consumer("g", nameserver=broker.nameserver, from_="first")
    consumer.subscribe(TOPIC)
    producer = Producer(broker.nameserver, _clock=lambda: now_ms() + skew_ms)
    async with producer, consumer:
        for delay in ("1s", "1s1ms", "1s500ms"):
            begin = now_ms()
            sent = await producer.send(TOPIC, delay, delay=delay)
            message = await consumer.receive()
            waited = message.receive_time_ms - begin
            assert waited >= parse_duration(delay)
            assert message.due_time_ms is not None
            assert begin <= message.due_time_ms - parse_duration(delay) <= begin + waited
            assert sent.due_time_ms == message.due_time_ms
            assert message.lateness_ms == message.receive_time_ms - message.due_time_ms >= 0
            await message.ack()
    await broker.stop()


async def test_the_command_moves_a_broker_for_tests_only(tmp_path: Path) -> None:
    broker = DuemqBroker(tmp_path, is_warm=True)
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
