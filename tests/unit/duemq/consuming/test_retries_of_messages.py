"""What a consumer can make of a message that it cannot handle: a retry after a delay, or a dead letter."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest

from duemq import ArgumentError, DelayError, ReceivedMessage
from duemq._values.times import Span
from duemq.protocol.codes import RequestCode, ResponseCode
from tests.unit.duemq.consuming.test_consumer import BACK, make_consumer, take
from tests.unit.duemq.fake import FakeBroker, failure

CONFIG = RequestCode.GET_BROKER_CONFIG


def levels(broker: FakeBroker) -> list[str]:
    return [back.ext["delayLevel"] for back in broker.requests_of(BACK)]


@pytest.mark.parametrize(
    ("delay", "level"),
    [(0, "1"), ("1s", "1"), ("1001ms", "2"), (timedelta(seconds=5), "2"), (29.9, "4"), ("2m", "6")],
)
async def test_a_retry_comes_by_the_shortest_level_that_is_not_early(
    broker: FakeBroker, delay: Span, level: str
) -> None:
    await broker.store("demo", b"a")
    async with make_consumer(broker) as consumer:
        (message,) = await take(consumer, 1)
        await message.retry(delay=delay)
        assert message.settled
    assert levels(broker) == [level]
    assert broker.offsets["g", "demo", 0] == 1


async def test_levels_need_not_be_sorted(broker: FakeBroker) -> None:
    broker.config = "messageDelayLevel=1h 10s 20s\n"
    await broker.store("demo", b"a")
    async with make_consumer(broker) as consumer:
        await (await take(consumer, 1))[0].retry(delay="9s")
    assert levels(broker) == ["2"]


async def test_the_retry_topics_own_levels_count(broker: FakeBroker) -> None:
    broker.language = "PYTHON"
    broker.topics |= {"demo": 1, "%RETRY%g": 1}
    broker.attributes = {"%RETRY%g": {"delay.levels": "1m 3s"}, "demo": {"delay.levels": "3s"}}
    await broker.store("demo", b"a")
    async with make_consumer(broker) as consumer:
        await (await take(consumer, 1))[0].retry(delay="2s")
    assert levels(broker) == ["2"]


@pytest.mark.parametrize("config", ["messageDelayLevel=1s 5s\n", ""])
async def test_where_no_level_is_long_enough_nothing_is_settled(broker: FakeBroker, config: str) -> None:
    broker.config = config
    await broker.store("demo", b"a")
    async with make_consumer(broker) as consumer:
        (message,) = await take(consumer, 1)
        with pytest.raises(DelayError, match="level") as caught:
            await message.retry(delay="6s")
        assert caught.value.levels_ms == ((1000, 5000) if config else ())
        assert not message.settled
        await message.ack()
    assert levels(broker) == []
    assert broker.offsets["g", "demo", 0] == 1


async def test_a_handler_that_asks_for_too_long_a_delay_has_failed(broker: FakeBroker) -> None:
    await broker.store("demo", b"a")

    async def on_message(message: ReceivedMessage) -> None:
        await message.retry(delay="1d")

    async with make_consumer(broker, on_message) as consumer:
        await consumer.caught_up()
    assert levels(broker) == ["0"]


async def test_level_and_delay_are_checked(broker: FakeBroker) -> None:
    await broker.store("demo", b"a")
    async with make_consumer(broker) as consumer:
        (message,) = await take(consumer, 1)
        for wrong in ({"level": 3, "delay": "5s"}, {"delay": -1}, {"delay": "soon"}):
            with pytest.raises(ArgumentError):
                await message.retry(**wrong)
        assert not message.settled


async def test_a_handler_chooses_what_becomes_of_its_message(broker: FakeBroker) -> None:
    await broker.store("demo", b"dead", b"later", b"done")

    async def on_message(message: ReceivedMessage) -> None:
        if message.body == b"dead":
            await message.dead_letter()
        if message.body == b"later":
            await message.retry(delay="10s")

    async with make_consumer(broker, on_message, concurrency=1) as consumer:
        await consumer.caught_up()
    assert levels(broker) == ["-1", "3"]
    assert broker.offsets["g", "demo", 0] == 3


@pytest.mark.parametrize("where", ["the levels", "the retry", "the dead letter"])
async def test_where_the_broker_cannot_be_asked_the_message_is_handled_again_here(
    broker: FakeBroker, where: str
) -> None:
    """A handler that has a message sent back, and returns, has not consumed it if that failed."""
    await broker.store("demo", b"a")
    if where == "the levels":
        broker.on(CONFIG, lambda request: request.connection.transport.abort())
    else:
        broker.on(BACK, failure(ResponseCode.SYSTEM_ERROR))
    handled: asyncio.Queue[ReceivedMessage] = asyncio.Queue()

    async def on_message(message: ReceivedMessage) -> None:
        handled.put_nowait(message)
        if where == "the dead letter":
            await message.dead_letter()
        else:
            await message.retry(delay=0)

    async with make_consumer(broker, on_message), asyncio.timeout(10):
        first, second = await handled.get(), await handled.get()
        assert (first.queue_offset, second.queue_offset, first is second) == (0, 0, False)
        assert broker.offsets.get(("g", "demo", 0), 0) == 0
        del broker.overrides[CONFIG if where == "the levels" else BACK]
        await broker.until(lambda: broker.offsets.get(("g", "demo", 0)) == 1)


async def test_a_broadcasting_consumer_has_no_dead_letters(
    broker: FakeBroker, caplog: pytest.LogCaptureFixture
) -> None:
    await broker.store("demo", b"a")
    options: dict[str, Any] = {"model": "broadcasting"}
    async with make_consumer(broker, **options) as consumer:
        await (await take(consumer, 1))[0].dead_letter()
        await consumer.caught_up()
    assert levels(broker) == []
    assert "has no dead letters" in caplog.text


async def test_lost_messages_are_not_sent_back(broker: FakeBroker) -> None:
    await broker.store("demo", b"a", b"b")
    async with make_consumer(broker) as consumer:
        first, second = await take(consumer, 2)
        await consumer.seek("demo", "last")
        await first.retry(delay="1s")
        await second.dead_letter()
        assert first.settled
        assert second.settled
    assert levels(broker) == []


async def test_a_retry_topic_that_was_made_for_the_first_retry_is_found_soon(broker: FakeBroker) -> None:
    broker.topics["demo"] = 1
    await broker.store("demo", b"a")
    async with make_consumer(broker) as consumer:
        (message,) = await take(consumer, 1)
        asked = len(broker.requests_of(RequestCode.GET_ROUTEINFO_BY_TOPIC))
        await message.retry(delay="1s")
        await broker.until_requests(RequestCode.GET_ROUTEINFO_BY_TOPIC, asked + 2)
        await broker.store("%RETRY%g", b"a", text="RETRY_TOPIC\x01demo", reconsume_times=1)
        (again,) = await take(consumer, 1)
        assert (again.topic, again.reconsume_times) == ("demo", 1)
