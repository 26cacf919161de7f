"""duemq's own consumer with duemq's broker and both of Apache's: the same tests."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable

import pytest
import pytest_asyncio
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind

from duemq import Consumer, DelayError, Message, MessageQueue, Producer, ReceivedMessage
from duemq.otel import Telemetry
from tests.interop.support import make_topic
from tests.peers.brokers.broker import Broker
from tests.peers.clients import JavaClient, unique

QUEUES = 4
KEYS = 8


@pytest_asyncio.fixture(loop_scope="session")
async def topic(peer: Broker, java: JavaClient) -> str:
    return await make_topic(java.admin(peer.nameserver), peer)


async def next_of(consumer: Consumer) -> ReceivedMessage:
    async with asyncio.timeout(60):
        return await consumer.receive()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(90):
        while not condition():
            await asyncio.sleep(0.05)  # another process's client gives no event


async def test_a_retry_is_never_early_and_a_dead_letter_is_there_at_once(
    peer: Broker, producer: Producer, topic: str
) -> None:
    group = unique("group")
    consumer = Consumer(group, nameserver=peer.nameserver, from_="first")
    consumer.subscribe(topic)
    async with consumer:
        await producer.send(topic, b"later")
        message = await next_of(consumer)
        with pytest.raises(DelayError, match="longest delay level is 3s"):
            await message.retry(delay="4s")
        assert not message.settled
        asked = time.time_ns() // 1_000_000
        await message.retry(delay=1.5)
        again = await next_of(consumer)
        assert (again.body, again.topic, again.reconsume_times) == (b"later", topic, 1)
        assert again.store_time_ms - asked >= 1500
        assert again.store_time_ms - asked < 30_000
        await again.dead_letter()
    undertaker = Consumer(unique("undertaker"), nameserver=peer.nameserver, from_="first")
    undertaker.subscribe(f"%DLQ%{group}")
    async with undertaker:
        dead = await next_of(undertaker)
        assert (dead.body, dead.message_id) == (b"later", message.message_id)


async def test_the_context_of_a_trace_goes_along(peer: Broker, topic: str) -> None:
    """Alone, in a batch, and over a delay, with a level as with whatever the broker has for a time."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    telemetry = Telemetry(tracer_provider=provider, meter_provider=MeterProvider(shutdown_on_exit=False))
    handled = []

    async def on_message(message: ReceivedMessage) -> None:
        handled.append(message.body)

    consumer = Consumer(
        unique("group"), on_message, nameserver=peer.nameserver, from_="first", interceptors=[telemetry]
    )
    consumer.subscribe(topic)
    async with Producer(peer.nameserver, interceptors=[telemetry]) as producer, consumer:
        await producer.send(topic, b"alone")
        await producer.send(topic, b"level", level=1)
        await producer.send(topic, b"delay", delay="1s")
        await producer.send_many([Message(topic, b"first"), Message(topic, b"second")])
        await until(lambda: len(handled) == 5)
    spans = exporter.get_finished_spans()
    sent = [span.context for span in spans if span.kind == SpanKind.PRODUCER]
    linked = [link.context for span in spans if span.kind == SpanKind.CONSUMER for link in span.links]
    assert sorted((each.trace_id, each.span_id) for each in linked) == sorted(
        (each.trace_id, each.span_id) for each in sent if each is not None
    )
    assert len(linked) == 5


async def test_a_consumer_goes_to_offsets_and_times(peer: Broker, producer: Producer, topic: str) -> None:
    queue = (await producer.send(topic, b"old", sharding_key="k")).queue
    await asyncio.sleep(0.01)
    for number in range(3):
        await producer.send(topic, b"%d" % number, queue=queue)
    group = unique("group")
    consumer = Consumer(group, nameserver=peer.nameserver)
    consumer.subscribe(topic)
    async with consumer:

        async def come() -> list[bytes]:
            return [(await next_of(consumer)).body for _ in range(3)]

        await consumer.seek(topic, "first")
        stored = [await next_of(consumer) for _ in range(4)]
        # The very time: between two messages, RocketMQ 4.9.7 takes the nearer one.
        await consumer.seek(topic, time=stored[1].store_time_ms / 1000)
        assert await come() == [b"0", b"1", b"2"]
        await consumer.seek(queue, offset=1)
        assert await come() == [b"0", b"1", b"2"]
        await consumer.seek(topic, "first")
        assert (await next_of(consumer)).body == b"old"
        consumer.pause(queue)
        await consumer.seek(queue, "last")
        assert consumer.assignment == {MessageQueue(topic, queue.broker, number) for number in range(QUEUES)}
        await producer.send(topic, b"new", queue=queue)
        consumer.resume(queue)
        news = await next_of(consumer)
        assert news.body == b"new"
        await news.ack()
        assert (await consumer.commit())[queue] == news.queue_offset + 1
    again = Consumer(group, nameserver=peer.nameserver)
    again.subscribe(topic)
    async with again:
        await producer.send(topic, b"newest", queue=queue)
        assert (await next_of(again)).body == b"newest"


async def test_an_ordered_group_keeps_the_order_over_a_rebalance_with_a_java_member(
    peer: Broker, producer: Producer, topic: str, java: JavaClient
) -> None:
    """Our member has all queues; one of Java's joins and takes half of them, and leaves again. Each member handles the
    messages of a key in their order, and none is handled twice: a queue changes hands when its lock is free, and
    that is when the offset of what was handled is stored."""
    group = unique("group")
    handled: dict[str, list[int]] = defaultdict(list)
    sent = 0

    async def on_message(message: ReceivedMessage) -> None:
        key, _, number = message.body.decode().partition("/")
        await asyncio.sleep(0.001)
        if number == "1" and message.reconsume_times < 2:
            raise ValueError("tried again in its place")
        handled[key].append(int(number))

    async def send(count: int) -> None:
        nonlocal sent
        for number in range(sent, sent + count):
            for key in range(KEYS):
                await producer.send(Message(topic, f"{key}/{number}", sharding_key=f"key-{key}"))
        sent += count

    def ours() -> int:
        return sum(map(len, handled.values()))

    consumer = Consumer(group, on_message, nameserver=peer.nameserver, from_="first", ordered=True)
    consumer.subscribe(topic)
    async with consumer:
        await send(10)
        await until(lambda: ours() == 10 * KEYS)
        async with await java.consumer(peer.nameserver, group, topic, orderly=True) as other:
            await until(lambda: len(consumer.assignment) == QUEUES // 2)
            await send(10)
            await until(lambda: ours() + len(other.messages) == 20 * KEYS)
            theirs: dict[str, list[int]] = defaultdict(list)
            for message in other.messages:
                key, _, number = message.body.decode().partition("/")
                theirs[key].append(int(number))
            assert theirs, "it had queues with keys"
        await until(lambda: len(consumer.assignment) == QUEUES)
        await send(10)
        await until(lambda: ours() + len(other.messages) == 30 * KEYS)
        await consumer.caught_up()
    for key in map(str, range(KEYS)):
        assert handled[key] == sorted(handled[key])
        assert theirs[key] == sorted(theirs[key])
        assert sorted(handled[key] + theirs[key]) == list(range(30)), key
        assert not theirs[key] or theirs[key] == list(range(10, 20)), key
