"""Handlers that hang: they are cancelled, and neither other queues nor the memory suffer."""

from __future__ import annotations

import asyncio

import pytest

from duemq import ArgumentError, Consumer, ReceivedMessage
from tests.unit.duemq.consuming.test_consumer import BACK, make_consumer
from tests.unit.duemq.fake import FakeBroker

QUEUES = 40


async def test_a_handler_that_hangs_is_cancelled_and_its_message_retried_by_the_broker(
    broker: FakeBroker, caplog: pytest.LogCaptureFixture
) -> None:
    await broker.store("demo", b"hangs", b"a", b"b")
    cancelled = []

    async def on_message(message: ReceivedMessage) -> None:
        if message.body == b"hangs":
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.append(message)
                raise

    async with make_consumer(broker, on_message, concurrency=1, handler_timeout=0.02) as consumer:
        await consumer.caught_up()
    assert len(cancelled) == 1
    (back,) = broker.requests_of(BACK)
    assert (back.ext["offset"], back.ext["delayLevel"]) == ("0", "0")
    assert broker.offsets["g", "demo", 0] == 3
    lines = [line for line in caplog.messages if "handler" in line]
    assert len(lines) == 1
    assert "did not end within 0.02 s for <ReceivedMessage" in lines[0]


async def test_a_handler_that_ends_at_last_in_spite_of_it_has_succeeded(
    broker: FakeBroker, caplog: pytest.LogCaptureFixture
) -> None:
    """A handler that pays no heed to its cancelling is cancelled again after the same time, and what it returns counts;
    its worker goes on."""
    await broker.store("demo", b"stubborn", b"a")
    times = 0

    async def on_message(message: ReceivedMessage) -> None:
        nonlocal times
        while message.body == b"stubborn" and times < 2:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                times += 1

    async with make_consumer(broker, on_message, concurrency=1, handler_timeout=0.01) as consumer:
        await consumer.caught_up()
    assert times == 2
    assert not broker.requests_of(BACK)
    assert caplog.text.count("did not end within") == 1


async def test_a_handler_with_a_timeout_ends_at_the_close(broker: FakeBroker) -> None:
    await broker.store("demo", b"a")
    started = asyncio.Event()

    async def on_message(_: ReceivedMessage) -> None:
        started.set()
        await asyncio.Event().wait()

    async with make_consumer(broker, on_message, handler_timeout=60, close_timeout=0.01):
        await started.wait()
    assert broker.offsets["g", "demo", 0] == 0
    assert not broker.requests_of(BACK)


async def test_handlers_that_hang_hold_up_their_queues_only_and_bound_what_is_kept(broker: FakeBroker) -> None:
    """Handlers of a few queues of many hang, without a time-out: the other queues go on, and what is kept, and would be
    delivered again, is bounded for each queue that waits."""
    broker.topics["demo"] = QUEUES
    each, ahead, hanging = 200, 50, 5
    for queue_id in range(QUEUES):
        for number in range(each):
            broker.append("demo", queue_id, b"hangs" if number == 0 and queue_id < hanging else b"%d" % number, "")
    handled = 0
    let_go = asyncio.Event()

    async def on_message(message: ReceivedMessage) -> None:
        nonlocal handled
        if message.body == b"hangs":
            await let_go.wait()
        handled += 1

    consumer = make_consumer(broker, on_message, concurrency=hanging + 1, handler_timeout=None, max_ahead=ahead)
    async with consumer:
        done = {("g", "demo", queue_id) for queue_id in range(hanging, QUEUES)}
        await broker.until(lambda: all(broker.offsets.get(key) == each for key in done))
        assert all(broker.offsets.get(("g", "demo", queue_id), 0) == 0 for queue_id in range(hanging))
        trackers = [consumer._member._readers[queue][0]._tracker for queue in consumer.assignment]
        kept = [len(tracker._order) for tracker in trackers if tracker is not None]
        assert len(kept) == QUEUES
        assert max(kept) < ahead + 2 * 32
        assert sum(count > 0 for count in kept) == hanging
        assert consumer._inbox.messages < hanging * (2 * 32 + 1)
        let_go.set()
        await consumer.caught_up()
    assert handled == QUEUES * each
    assert all(broker.offsets["g", "demo", queue_id] == each for queue_id in range(QUEUES))


@pytest.mark.parametrize("timeout", [0, -1, float("nan")])
def test_the_timeout_is_checked(timeout: float) -> None:
    with pytest.raises(ArgumentError, match="handler_timeout"):
        Consumer("g", handler_timeout=timeout)
