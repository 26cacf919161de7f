"""Handlers and listeners that fail in other ways than by an Exception, and consumers that are closed meanwhile."""

from __future__ import annotations

import asyncio
import sys
import threading

import pytest
from msgspec.structs import replace

from duemq import ArgumentError, ClosedError, MessageQueue, ReceivedMessage
from duemq.protocol.codes import RequestCode
from tests.unit.duemq.conftest import INTERVALS
from tests.unit.duemq.consuming.test_consumer import BACK, make_consumer
from tests.unit.duemq.fake import FakeBroker

LEAVE = RequestCode.UNREGISTER_CLIENT


class Failed(BaseException):
    """As pytest.fail raises it: no Exception."""


# --- failures -----------------------------------------------------------------------------------------------------


async def test_a_handler_that_raises_no_exception_has_failed_like_any_other(
    broker: FakeBroker, caplog: pytest.LogCaptureFixture
) -> None:
    """Its message is retried, and its worker goes on."""
    await broker.store("demo", b"bad", b"bad", b"good")
    handled = []

    async def on_message(message: ReceivedMessage) -> None:
        if message.body == b"bad":
            raise Failed("no more")
        handled.append(message.body)

    async with make_consumer(broker, on_message, concurrency=1) as consumer:
        await consumer.caught_up()
    assert handled == [b"good"]
    assert len(broker.requests_of(BACK)) == 2
    assert caplog.text.count("the handler failed for") == 2


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()], ids=["exit", "interrupt"])
def test_an_exit_in_a_handler_ends_the_program(error: BaseException) -> None:
    """By asyncio's own rule, where the event loop runs in the main thread."""

    async def on_message(_: ReceivedMessage) -> None:
        raise error

    async def program() -> None:
        async with FakeBroker() as broker:
            await broker.store("demo", b"a")
            async with make_consumer(broker, on_message, close_timeout=0.01) as consumer:
                await consumer.wait_closed()

    with pytest.raises(type(error)):
        asyncio.run(program())


def test_an_exit_in_a_handler_of_another_threads_loop_is_a_failure() -> None:
    """It would end that loop, and the program would never know."""
    requests = []

    async def on_message(message: ReceivedMessage) -> None:
        if message.body == b"bad":
            sys.exit(3)

    async def program() -> None:
        async with FakeBroker() as broker:
            await broker.store("demo", b"bad", b"good")
            async with make_consumer(broker, on_message, concurrency=1) as consumer:
                await consumer.caught_up()
            requests.extend(broker.requests_of(BACK))

    thread = threading.Thread(target=lambda: asyncio.run(program()))
    thread.start()
    thread.join(30)
    assert len(requests) == 1


@pytest.mark.parametrize("error", [Failed(), asyncio.CancelledError()], ids=["failed", "cancelled"])
async def test_a_listener_that_raises_no_exception_holds_up_nothing(
    broker: FakeBroker, caplog: pytest.LogCaptureFixture, error: BaseException
) -> None:
    await broker.store("demo", b"a")

    async def listen(_: frozenset[MessageQueue]) -> None:
        raise error

    async with make_consumer(broker, on_assigned=listen, on_revoked=listen) as consumer:
        message = await consumer.receive()
        await message.ack()
    assert broker.offsets["g", "demo", message.queue.queue_id] == 1
    assert broker.requests_of(LEAVE)
    assert caplog.text.count("on_assigned failed") == caplog.text.count("on_revoked failed") == 1


# --- closing ------------------------------------------------------------------------------------------------------


async def test_a_close_that_is_cancelled_cancels_the_handlers(broker: FakeBroker) -> None:
    """They would go on unwatched, while other members get their messages."""
    await broker.store("demo", *(b"%d" % number for number in range(5)))
    began, ended = 0, 0
    started = asyncio.Event()

    async def on_message(_: ReceivedMessage) -> None:
        nonlocal began, ended
        began += 1
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended += 1

    consumer = make_consumer(broker, on_message, concurrency=3)
    await consumer.start()
    await started.wait()
    closing = asyncio.create_task(consumer.close())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert (began, ended) == (3, 3)
    assert broker.requests_of(LEAVE)
    assert broker.offsets["g", "demo", 0] == 0
    await consumer.close()


async def test_a_close_does_not_wait_for_ever_for_a_handler_that_cannot_be_cancelled(
    broker: FakeBroker, caplog: pytest.LogCaptureFixture
) -> None:
    await broker.store("demo", b"a")
    started, let_go = asyncio.Event(), asyncio.Event()

    async def on_message(_: ReceivedMessage) -> None:
        started.set()
        while not let_go.is_set():
            try:
                await let_go.wait()
            except asyncio.CancelledError:
                continue

    intervals = replace(INTERVALS, cancelled_handlers=0.01)
    async with make_consumer(broker, on_message, close_timeout=0.01, _intervals=intervals):
        await started.wait()
    assert broker.requests_of(LEAVE)
    assert "1 handlers did not end although they were cancelled" in caplog.text
    let_go.set()


async def test_several_handlers_may_close_their_consumer(broker: FakeBroker) -> None:
    """None of them waits for another."""
    await broker.store("demo", b"a", b"b", b"c")
    together = asyncio.Barrier(3)

    async def on_message(message: ReceivedMessage) -> None:
        await together.wait()
        await message.ack()
        await consumer.close()

    consumer = make_consumer(broker, on_message, concurrency=3, close_timeout=3600)
    async with asyncio.timeout(10), consumer:
        await consumer.wait_closed()
    assert broker.offsets["g", "demo", 0] == 3


async def test_a_consumer_that_is_closed_while_it_starts_does_not_run(broker: FakeBroker) -> None:
    await broker.store("demo", b"a")
    before = asyncio.all_tasks()
    consumer = make_consumer(broker)
    starting = asyncio.create_task(consumer.start())
    await broker.until(lambda: bool(broker.requests))
    await consumer.close()
    with pytest.raises(ClosedError):
        await starting
    await broker.until(lambda: not broker.connections)
    assert asyncio.all_tasks() - broker.tasks == before - broker.tasks


def test_a_consumer_belongs_to_the_event_loop_of_its_start() -> None:
    with asyncio.Runner() as first, asyncio.Runner() as second:
        broker = first.run(FakeBroker().__aenter__())
        consumer = make_consumer(broker)
        first.run(consumer.start())
        for call in (consumer.receive, consumer.commit, consumer.caught_up, consumer.wait_closed, consumer.close):
            with pytest.raises(ArgumentError, match="another event loop"):
                second.run(call())
        first.run(consumer.close())
        second.run(consumer.close())
        first.run(broker.__aexit__())
