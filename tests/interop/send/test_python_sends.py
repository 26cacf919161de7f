"""duemq's own producer and admin with duemq's broker and both of Apache's: the same tests, read by Apache's Java
client.

What RocketMQ's brokers cannot do has to be refused by a typed error, with the message as it was.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
import pytest_asyncio

from duemq import (
    Admin,
    ChangeResult,
    DelayError,
    Message,
    MessageHandle,
    NotSupportedError,
    Producer,
    SendResult,
)
from tests.interop.environment import ClientPool
from tests.interop.support import make_topic
from tests.peers.brokers.broker import Broker
from tests.peers.clients import JavaClient, PushConsumer, unique

HOUR_MS = 3_600_000
PRECISION_MS = {"duemq": 0, "apache-4.9.7": 0, "apache-5.3.3": 1000}
"""By how much later than asked for a broker delivers by its design; all have some time more for the work."""
OLD, NEW = "apache-4.9.7", "apache-5.3.3"


@pytest_asyncio.fixture(loop_scope="session")
async def topic(peer: Broker, java: JavaClient) -> str:
    return await make_topic(java.admin(peer.nameserver), peer)


@pytest_asyncio.fixture(loop_scope="session")
async def consumer(peer: Broker, java: JavaClient, topic: str) -> AsyncIterator[PushConsumer]:
    async with await java.consumer(peer.nameserver, unique("group"), topic) as consumer:
        yield consumer


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def wrong_clock(wrong_ms: int) -> Callable[[], int]:
    return lambda: now_ms() + wrong_ms


def handle_of(result: SendResult) -> MessageHandle:
    """The handle, as an application has it that kept it as a text."""
    assert result.handle is not None
    return MessageHandle.parse(str(result.handle))


async def test_a_delay_counts_by_the_brokers_clock(
    peer: Broker, topic: str, consumer: PushConsumer, clients: ClientPool
) -> None:
    """Producers whose clocks are an hour slow and fast: the message comes two seconds after its send."""
    begun = now_ms()
    for name, wrong in (("slow", -HOUR_MS), ("fast", HOUR_MS)):
        async with Producer(peer.nameserver, _clock=wrong_clock(wrong)) as producer:
            await producer.send(topic, name, delay="2s")
    received = await consumer.receive(2)
    for message in received:
        assert 2000 <= message.store_time - begun <= 2000 + PRECISION_MS[peer.kind] + 5000, message.body


async def test_any_delay_is_kept_or_refused_and_never_early(
    peer: Broker, topic: str, producer: Producer, consumer: PushConsumer
) -> None:
    at = now_ms() / 1000 + 1.7
    wishes: dict[str, dict[str, Any]] = {"1500ms": {"delay": "1500ms"}, "at": {"deliver_at": at}, "1s": {"delay": 1}}
    not_before: dict[bytes, int] = {}
    for name, wish in wishes.items():
        begun = now_ms()
        if peer.kind == OLD and name != "1s":
            with pytest.raises(DelayError) as refused:
                await producer.send(topic, name, **wish)
            assert refused.value.levels_ms[:2] == (1000, 2000)
            continue
        await producer.send(topic, name, **wish)
        due = {"1500ms": begun + 1500, "at": int(at * 1000), "1s": begun + 1000}
        not_before[name.encode()] = due[name]
    assert set(not_before) == ({b"1s"} if peer.kind == OLD else {b"1500ms", b"at", b"1s"})
    for message in await consumer.receive_bodies(list(not_before)):
        late = message.store_time - not_before[message.body]
        assert 0 <= late <= PRECISION_MS[peer.kind] + 5000, message.body


@pytest.mark.parametrize("kind", [Producer, Admin])
async def test_one_changes_ones_mind_by_handle(
    peer: Broker, topic: str, producer: Producer, consumer: PushConsumer, kind: type[Producer | Admin]
) -> None:
    async with kind(peer.nameserver) as changer:
        level = await producer.send(topic, b"level", level=6)  # 3 s
        expected = [b"level"]
        if peer.kind == OLD:
            for work in (
                changer.cancel(handle_of(level)),
                changer.reschedule(handle_of(level), delay="1h"),
                changer.deliver_now(handle_of(level)),
            ):
                with pytest.raises(NotSupportedError, match="not a duemq broker"):
                    await work
            await consumer.receive_bodies(expected)
            return
        cancelled = await producer.send(topic, b"cancelled", delay="2500ms")
        assert (await changer.cancel(handle_of(cancelled))).result is ChangeResult.CANCELLED
        moved = await producer.send(topic, b"moved", delay="1h")
        if peer.kind == NEW:
            with pytest.raises(NotSupportedError, match="without a recall handle"):
                await changer.cancel(handle_of(level))
            for work in (changer.reschedule(handle_of(moved), delay=1), changer.deliver_now(str(moved.handle))):
                with pytest.raises(NotSupportedError, match="not a duemq broker"):
                    await work
        else:
            assert (await changer.cancel(handle_of(cancelled))).result is ChangeResult.ALREADY_CANCELLED
            assert (await changer.cancel(handle_of(level))).result is ChangeResult.CANCELLED
            at_level = await producer.send(topic, b"level moved", level=6)
            assert (await changer.reschedule(handle_of(at_level), delay=2)).result is ChangeResult.RESCHEDULED
            assert (await changer.reschedule(handle_of(moved), delay=1)).result is ChangeResult.RESCHEDULED
            assert (await changer.deliver_now(handle_of(at_level))).result is ChangeResult.DELIVERED_NOW
            expected = [b"moved", b"level moved"]
        # What is due after the cancelled message comes after it: that one is not on its way any more.
        delivered = await producer.send(topic, b"last", delay=4)
        await consumer.receive_bodies([*expected, b"last"])
        assert sorted(consumer.bodies) == sorted([*expected, b"last"])
        late = await changer.cancel(handle_of(delivered))
        # RocketMQ does not know whether a message whose time is over was cancelled before that.
        assert late.result is (ChangeResult.NO_LONGER_WAITS if peer.kind == NEW else ChangeResult.ALREADY_DELIVERED)


@pytest.mark.parametrize("kind", [Producer, Admin])
async def test_one_changes_ones_mind_by_id_key_and_time(
    peer: Broker, topic: str, producer: Producer, kind: type[Producer | Admin]
) -> None:
    at = now_ms() / 1000 + 3600
    async with kind(peer.nameserver) as changer:
        sent = [await producer.send(topic, b"x", level=6)]
        if peer.kind != OLD:
            sent += [await producer.send(topic, b"x", keys=f"k{number}", deliver_at=at + number) for number in range(4)]
        by_id = changer.cancel(sent[0].offset_message_id)
        selections = [
            changer.cancel(topic=topic, key="k0"),
            changer.cancel(topic=topic, key=sent[-1].message_id),
            changer.cancel(topic=topic, begin=at, end=at + 2),
        ]
        if peer.kind != "duemq":
            for work in (by_id, *selections):
                with pytest.raises(NotSupportedError, match="not a duemq broker"):
                    await work
            return
        assert (await by_id).result is ChangeResult.CANCELLED
        assert [(await work).counts for work in selections] == [{ChangeResult.CANCELLED: 1}] * 3
        assert (await changer.reschedule(topic=topic, begin=at, delay="1h")).done == 1


async def test_many_are_stored_once_each_in_order(
    peer: Broker, topic: str, producer: Producer, consumer: PushConsumer, java: JavaClient
) -> None:
    """A thousand messages of all kinds; the results name the places where Java finds them."""
    count = 1000

    def given() -> Iterator[Message]:
        for number in range(count):
            body = b"%d " % number + b"x" * (6000 if number % 97 == 0 else 100)
            if number % 50 == 7:
                yield Message(topic, body, level=1)
            elif number % 5 == 0:
                yield Message(topic, body, sharding_key=f"shard {number % 3}")
            else:
                yield Message(topic, body, keys=["k", f"{number}"])

    messages = list(given())
    results = await producer.send_many(messages)
    bodies = [bytes(message.body) for message in messages if isinstance(message.body, bytes)]
    received = await consumer.receive_bodies(bodies)
    assert sorted(message.body for message in received) == sorted(bodies), "none twice"
    found = {message.body: message for message in received}
    places: dict[str, list[tuple[int, int]]] = {}
    for message, body, result in zip(messages, bodies, results, strict=True):
        got = found[body]
        assert got.msg_id == result.message_id
        assert got.queue_id == result.queue.queue_id
        if message.level is None:
            assert got.queue_offset == result.queue_offset
        if message.sharding_key is not None and message.level is None:
            places.setdefault(message.sharding_key, []).append((got.queue_id, got.queue_offset))
    for key, each in places.items():
        assert each == sorted(each), key
        assert len({queue_id for queue_id, _ in each}) == 1, key
