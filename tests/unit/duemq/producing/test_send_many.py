"""`send_many` and `send_each`: what goes in one batch, what is told when some fail, and that no more is taken than goes
on its way."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from duemq import (
    ArgumentError,
    ClosedError,
    DelayError,
    Message,
    MessageQueue,
    MessageRejectedError,
    NoRouteError,
    Producer,
    RequestTimeoutError,
    SendManyError,
    SendOutcome,
    UnavailableError,
)
from duemq._producing.many import BATCH_MESSAGES
from duemq.protocol.codes import RequestCode, ResponseCode
from duemq.protocol.records import batch, properties
from tests.unit.duemq.conftest import INTERVALS
from tests.unit.duemq.fake import FakeBroker, Request, failure

SEND, BATCH = RequestCode.SEND_MESSAGE_V2, RequestCode.SEND_BATCH_MESSAGE


def make_producer(broker: FakeBroker, **options: Any) -> Producer:
    return Producer(broker.address, _intervals=INTERVALS, **options)


@pytest.fixture
async def producer(broker: FakeBroker) -> AsyncIterator[Producer]:
    async with make_producer(broker) as producer:
        yield producer


def batches(broker: FakeBroker) -> list[list[bytes]]:
    """The bodies of each batch, in the order in which they came."""
    return [[body for _, body, _ in batch.decode(request.body)] for request in broker.requests_of(BATCH)]


def messages(count: int, topic: str = "demo", **options: Any) -> list[Message]:
    return [Message(topic, b"%d" % number, **options) for number in range(count)]


class Gate:
    """Holds a broker's answers to one kind of request back until it is opened."""

    def __init__(self, broker: FakeBroker, code: RequestCode) -> None:
        self._broker = broker
        self._opened = asyncio.Event()
        answer: Callable[[FakeBroker, Request], Any] = FakeBroker.send_batch if code == BATCH else FakeBroker.send

        async def later(request: Request) -> Any:
            await self._opened.wait()
            return answer(broker, request)

        broker.on(code, later)

    def open(self) -> None:
        self._opened.set()


# --- batches


async def test_results_are_in_order_and_messages_go_in_batches(broker: FakeBroker, producer: Producer) -> None:
    count = 3 * BATCH_MESSAGES
    results = await producer.send_many(messages(count))
    assert len(broker.requests_of(BATCH)) == 3
    assert not broker.requests_of(SEND)
    stored = {m.offset_message_id: (m.body, m.properties["UNIQ_KEY"]) for q in broker.queues.values() for m in q}
    assert [stored[result.offset_message_id] for result in results] == [
        (b"%d" % number, result.message_id) for number, result in enumerate(results)
    ]
    for result in results:
        assert broker.queues["demo", result.queue.queue_id][result.queue_offset].offset_message_id == (
            result.offset_message_id
        )
    assert await producer.send_many([]) == []


async def test_what_no_batch_takes_is_sent_by_itself(broker: FakeBroker, producer: Producer) -> None:
    given = [
        Message("demo", b"a", tags="t", keys="k", properties={"own": "v"}),
        Message("demo", b"later", level=2),
        Message("other", b"o"),
        Message("demo", bytes(5000)),
        Message("demo", b"b", message_id="MINE"),
    ]
    results = await producer.send_many(given)
    assert batches(broker) == [[b"a", b"b"]]
    assert {request.properties()["UNIQ_KEY"] for request in broker.requests_of(SEND)} == {
        results[number].message_id for number in (1, 2, 3)
    }
    assert [result.queue.topic for result in results] == ["demo", "demo", "other", "demo", "demo"]
    assert [result.handle is not None for result in results] == [False, True, False, False, False]
    assert results[4].message_id == "MINE"
    (request,) = broker.requests_of(BATCH)
    first, _ = (properties.parse(text) for _, _, text in batch.decode(request.body))
    assert first == {"TAGS": "t", "KEYS": "k", "own": "v", "UNIQ_KEY": results[0].message_id}


async def test_a_batch_is_no_larger_than_a_body_may_be(broker: FakeBroker) -> None:
    async with make_producer(broker, max_body_bytes=1000, compress_from_bytes=None) as producer:
        await producer.send_many([Message("demo", bytes(300)) for _ in range(7)])
    sizes = [len(request.body) for request in broker.requests_of(BATCH)]
    assert (len(sizes), max(sizes) <= 1000) == (3, True)


async def test_a_slow_source_is_sent_at_once_and_a_fast_one_fills_batches(
    broker: FakeBroker, producer: Producer
) -> None:
    async def slowly() -> AsyncIterator[Message]:
        for count in (1, 2, 3):
            for number in range(10):
                yield Message("demo", b"%d-%d" % (count, number))
            await broker.until_requests(BATCH, count)

    await producer.send_many(slowly())
    assert [len(bodies) for bodies in batches(broker)] == [10, 10, 10]


async def test_messages_with_a_sharding_key_keep_their_order_over_failures(
    broker: FakeBroker, producer: Producer
) -> None:
    """The batches of a queue go one after the other: the second one may not be stored while the first is tried again.
    Large messages keep their place as well."""
    count = 2 * BATCH_MESSAGES
    given = [Message("demo", b"%d" % number, sharding_key="k") for number in range(count)]
    given[10] = Message("demo", b"10" + bytes(5000), sharding_key="k")
    broker.on(BATCH, failure(ResponseCode.SYSTEM_BUSY), broker.send_batch)
    results = await producer.send_many(given)
    (queue_id,) = {result.queue.queue_id for result in results}
    assert [result.queue_offset for result in results] == list(range(count))
    java_choice = (await producer.choose_queue("demo", "k")).queue_id
    assert queue_id == java_choice


async def test_a_queue_may_be_named(broker: FakeBroker, producer: Producer) -> None:
    queue = MessageQueue("demo", "broker-a", 3)
    results = await producer.send_many(messages(5, queue=queue))
    assert [(result.queue, result.queue_offset) for result in results] == [(queue, number) for number in range(5)]


# --- some fail


async def test_a_message_that_is_refused_keeps_no_other_from_being_sent(broker: FakeBroker, producer: Producer) -> None:
    given = [Message("demo", b"a"), Message("demo", b""), Message("demo", b"c", delay="7s"), Message("demo", b"d")]
    with pytest.raises(SendManyError, match="of 4 messages 2 are stored, 2 are not, and 0 may be") as caught:
        await producer.send_many(given)
    error = caught.value
    assert [each.message for each in error.refused] == given[1:3]
    assert [type(each.error) for each in error.refused] == [ArgumentError, DelayError]
    assert error.outcomes[0] == error.stored[0]
    assert error.outcomes[3] == error.stored[1]
    assert (error.unknown, error.retriable, error.__cause__) == ((), False, error.refused[0].error)


async def test_which_message_of_a_batch_the_broker_rejects_is_found_out(broker: FakeBroker, producer: Producer) -> None:
    broker.on(BATCH, failure(ResponseCode.MESSAGE_ILLEGAL, "a record is too large"))
    broker.on(
        SEND,
        lambda request: broker.send(request) if request.body != b"3" else failure(ResponseCode.MESSAGE_ILLEGAL, "that"),
    )
    with pytest.raises(SendManyError) as caught:
        await producer.send_many(messages(6))
    assert [each.message.body for each in caught.value.refused] == [b"3"]
    assert isinstance(caught.value.refused[0].error, MessageRejectedError)
    assert len(caught.value.stored) == 5


async def test_what_may_be_stored_is_told_from_what_is_not(broker: FakeBroker) -> None:
    async with make_producer(broker, retries=0) as producer:
        await producer.send("demo", b"x")
        broker.on(BATCH, None)
        with pytest.raises(SendManyError) as lost:
            await producer.send_many(messages(2), timeout=0.05)
        assert [type(each.error) for each in lost.value.unknown] == [RequestTimeoutError] * 2
        assert (lost.value.refused, lost.value.retriable) == ((), True)
        broker.on(BATCH, failure(ResponseCode.SERVICE_NOT_AVAILABLE, "disk full"))
        with pytest.raises(SendManyError) as full:
            await producer.send_many(messages(2))
        assert [type(each.error) for each in full.value.refused] == [UnavailableError] * 2
        assert full.value.unknown == ()


async def test_an_earlier_try_that_was_lost_counts(broker: FakeBroker, producer: Producer) -> None:
    """Only the last try's error is told, but the one before may have stored the message."""
    broker.on(SEND, failure(ResponseCode.SYSTEM_ERROR), failure(ResponseCode.MESSAGE_ILLEGAL))
    with pytest.raises(MessageRejectedError) as caught:
        await producer.send("demo", b"x")
    assert caught.value.maybe_stored
    with pytest.raises(MessageRejectedError) as refused:
        await producer.send("demo", b"x")
    assert not refused.value.maybe_stored


async def test_after_another_failure_no_more_is_taken(broker: FakeBroker) -> None:
    async with make_producer(broker, retries=0, max_in_flight=BATCH_MESSAGES) as producer:
        await producer.send("demo", b"x")
        broker.on(BATCH, failure(ResponseCode.SERVICE_NOT_AVAILABLE, "disk full"))
        source = iter(messages(100 * BATCH_MESSAGES))
        with pytest.raises(SendManyError) as caught:
            await producer.send_many(source)
        taken = len(caught.value.outcomes)
        assert BATCH_MESSAGES <= taken <= 3 * BATCH_MESSAGES
        assert next(source).body == b"%d" % taken, "the rest is still there"


async def test_a_topic_without_a_route_is_a_failure(broker: FakeBroker) -> None:
    broker.auto_create = False
    async with make_producer(broker) as producer:
        for given in (Message("demo", b"x"), Message("demo", b"x", sharding_key="k")):
            with pytest.raises(SendManyError) as caught:
                await producer.send_many([given])
            (refused,) = caught.value.refused
            assert isinstance(refused.error, NoRouteError)


async def test_what_the_source_raises_comes_after_what_it_gave_is_sent(broker: FakeBroker, producer: Producer) -> None:
    def source() -> Iterator[Message]:
        yield from messages(3)
        raise RuntimeError("the source")

    with pytest.raises(RuntimeError, match="the source"):
        await producer.send_many(source())
    assert batches(broker) == [[b"0", b"1", b"2"]]
    with pytest.raises(ArgumentError, match="is not a Message"):
        await producer.send_many([b"x"])  # type: ignore[list-item]


# --- back-pressure


async def test_no_more_is_taken_than_goes_on_its_way(broker: FakeBroker) -> None:
    """A source without an end, and a broker that does not answer: what is taken stays within the limits."""
    taken = 0

    async def endless() -> AsyncIterator[Message]:
        nonlocal taken
        for number in itertools.count():
            taken += 1
            yield Message("demo", b"%d" % number)

    async with make_producer(broker, max_in_flight=1000) as producer:
        await producer.send("demo", b"x")
        gate = Gate(broker, BATCH)
        found = producer.send_each(endless())
        first = asyncio.create_task(anext(found))
        await broker.until_requests(BATCH, 4)
        for _ in range(100):
            await asyncio.sleep(0)
        assert 1000 <= taken <= 1001
        gate.open()
        assert (await first).message.body == b"0"
        for number in range(1, 5000):
            outcome = await anext(found)
            assert outcome.message.body == b"%d" % number
            assert outcome.result is not None
        await producer.flush()
        assert taken <= 5000 + 1001, "also if the caller takes his time with the outcomes"
        await found.aclose()


async def test_of_messages_that_are_refused_no_more_is_taken_either(broker: FakeBroker) -> None:
    taken = 0

    def endless() -> Iterator[Message]:
        nonlocal taken
        while True:
            taken += 1
            yield Message("demo", b"")

    async with make_producer(broker, max_in_flight=10) as producer:
        found = producer.send_each(endless())
        for number in range(1, 100):
            assert (await anext(found)).error is not None
            assert taken <= number + 11
        await found.aclose()


@pytest.mark.parametrize("options", [{"max_in_flight": 2}, {"max_in_flight_bytes": 2 * (3 + 256)}])
async def test_single_sends_wait_for_their_turn(broker: FakeBroker, options: dict[str, int]) -> None:
    async with make_producer(broker, **options) as producer:
        gate = Gate(broker, SEND)
        sending = [asyncio.create_task(producer.send("demo", b"abc")) for _ in range(3)]
        await broker.until_requests(SEND, 2)
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(broker.requests_of(SEND)) == 2
        with pytest.raises(RequestTimeoutError, match="own limit of sends in flight") as caught:
            await producer.send("demo", b"abc", timeout=0.01)
        assert not caught.value.maybe_stored
        gate.open()
        assert len(await asyncio.gather(*sending)) == 3


# --- one after the other


async def test_outcomes_go_on_after_a_failure(broker: FakeBroker, producer: Producer) -> None:
    broker.on(SEND, failure(ResponseCode.NO_PERMISSION), broker.send)
    given = [Message("demo", b"a", level=1), Message("demo", b""), Message("demo", b"c"), Message("demo", b"d")]
    found = [outcome async for outcome in producer.send_each(given, retries=0)]
    assert [outcome.message for outcome in found] == given
    assert [outcome.error is None for outcome in found] == [False, False, True, True]
    assert all((outcome.result is None) != (outcome.error is None) for outcome in found)


async def test_who_leaves_the_loop_ends_the_source(broker: FakeBroker, producer: Producer) -> None:
    ended = asyncio.Event()

    async def source() -> AsyncIterator[Message]:
        try:
            yield Message("demo", b"first")
            await asyncio.Event().wait()
        finally:
            ended.set()

    outcomes = producer.send_each(source())
    async for outcome in outcomes:
        assert isinstance(outcome, SendOutcome)
        break
    await outcomes.aclose()
    async with asyncio.timeout(5):
        await ended.wait()
    await producer.flush()
    assert await producer.send("demo", b"x")


async def test_a_call_that_is_cancelled_leaves_nothing_behind(broker: FakeBroker) -> None:
    """What is on its way goes on; what is not is not sent, and holds no place."""
    async with make_producer(broker, max_in_flight=2 * BATCH_MESSAGES) as producer:
        queue = (await producer.send("demo", b"x")).queue
        gate = Gate(broker, BATCH)
        sending = asyncio.create_task(producer.send_many(messages(10 * BATCH_MESSAGES, queue=queue)))
        await broker.until_requests(BATCH)
        for _ in range(20):
            await asyncio.sleep(0)
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        gate.open()
        async with asyncio.timeout(5):
            await producer.flush()
        assert len(batches(broker)) == 1, "the next batch of the queue waited for the first"
        assert len(await producer.send_many(messages(3 * BATCH_MESSAGES))) == 3 * BATCH_MESSAGES


async def test_a_closed_producer_sends_no_more(broker: FakeBroker, producer: Producer) -> None:
    await producer.close()
    with pytest.raises(ClosedError):
        await producer.send_many(messages(1))
    with pytest.raises(ClosedError):
        await anext(producer.send_each(messages(1)))


# --- a message that says all itself


async def test_a_message_says_all_that_a_send_is_told(broker: FakeBroker, producer: Producer) -> None:
    queue = MessageQueue("demo", "broker-a", 2)
    options: dict[str, Any] = {"tags": "t", "keys": ["k"], "properties": {"a": "b"}, "queue": queue, "level": 2}
    by_message = await producer.send(Message("demo", "text", **options))
    by_arguments = await producer.send("demo", "text", **options)
    one, other = (request.properties() for request in broker.requests_of(SEND))
    assert {**one, "UNIQ_KEY": "", "DUE_MS": ""} == {**other, "UNIQ_KEY": "", "DUE_MS": ""}
    assert by_message.queue == by_arguments.queue == queue
    await producer.send_oneway(Message("demo", b"x", sharding_key="k"))
    with pytest.raises(ArgumentError, match="give a Message alone"):
        await producer.send(Message("demo", b"x"), delay=5)  # type: ignore[call-overload]
    with pytest.raises(ArgumentError, match="give a body"):
        await producer.send("demo")  # type: ignore[call-overload]


@pytest.mark.parametrize("options", [{"delay": 5}, {"replace": True, "keys": "k"}, {"deliver_at": 5.0}, {"level": 1}])
async def test_a_batch_takes_no_delayed_message(producer: Producer, options: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match="of a batch cannot"):
        await producer.send_batch([Message("demo", b"x", **options)])


@pytest.mark.parametrize("name", ["duemq.producer.Producer._prepare_job", "duemq._producing.many.Many._put"])
@pytest.mark.parametrize("sharding_key", [None, "k"])
async def test_a_fault_of_the_client_itself_is_raised_and_hangs_nobody(
    broker: FakeBroker, producer: Producer, monkeypatch: pytest.MonkeyPatch, name: str, sharding_key: str | None
) -> None:
    """Whatever goes wrong with a message before it is on its way: the call fails with that, and waits for nothing."""

    def broken(*_: object) -> None:
        raise RuntimeError("injected")

    given = messages(3, sharding_key=sharding_key)
    with monkeypatch.context() as patch:
        patch.setattr(name, broken)
        async with asyncio.timeout(10):
            with pytest.raises(RuntimeError, match="injected"):
                await producer.send_many(given)
            with pytest.raises(RuntimeError, match="injected"):
                async for _ in producer.send_each(given):
                    pass
    assert len(await producer.send_many(given)) == 3
    async with asyncio.timeout(10):
        await producer.flush()
