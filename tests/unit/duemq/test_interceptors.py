"""Interceptors of producers and consumers: what they see and may change, and that their errors lose no message."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any, NoReturn

import pytest

from duemq import (
    ArgumentError,
    BrokerError,
    ClosedError,
    Consumer,
    ConsumerInterceptor,
    Handling,
    Message,
    MessageRejectedError,
    Producer,
    ProducerInterceptor,
    ReceivedMessage,
    Receiving,
    SendBatch,
    Sending,
    SendManyError,
    sync,
)
from duemq.protocol.codes import RequestCode, ResponseCode
from tests.unit.duemq.conftest import INTERVALS
from tests.unit.duemq.fake import NOW_MS, FakeBroker, failure

SEND, BATCH = RequestCode.SEND_MESSAGE_V2, RequestCode.SEND_BATCH_MESSAGE
LOGGER = "duemq.interceptors"
CALLER = contextvars.ContextVar[str]("CALLER", default="nobody")


def text(body: bytes | str) -> str:
    return body.decode() if isinstance(body, bytes) else body


class Notes(ProducerInterceptor, ConsumerInterceptor):
    """Notes each call of a method in `seen`."""

    def __init__(self, seen: list[tuple[Any, ...]], name: str = "") -> None:
        self.seen = seen
        self.name = name

    def before_send(self, sending: Sending) -> None:
        assert sending.message.message_id
        sending.notes[self] = sending.message.message_id
        self.seen.append((f"{self.name}before", text(sending.message.body), sending.batched))

    def after_send(self, sending: Sending) -> None:
        if sending.result is not None:
            assert sending.result.message_id == sending.notes[self] == sending.message.message_id
        became = "stored" if sending.result else type(sending.error).__name__ if sending.error else "oneway"
        self.seen.append((f"{self.name}after", text(sending.message.body), became))

    def before_batch(self, batch: SendBatch) -> None:
        self.seen.append((f"{self.name}before batch", [text(each.message.body) for each in batch.sendings]))

    def after_batch(self, batch: SendBatch) -> None:
        self.seen.append((f"{self.name}after batch", len(batch.sendings), type(batch.error).__name__))

    def before_handling(self, handling: Handling) -> None:
        self.seen.append((f"{self.name}before", text(handling.message.body), handling.group, handling.model))

    def after_handling(self, handling: Handling) -> None:
        assert not handling.message.settled
        self.seen.append((f"{self.name}after", text(handling.message.body), type(handling.error).__name__))

    def after_receive(self, receiving: Receiving) -> None:
        assert receiving.seconds >= 0
        bodies = [text(each.body) for each in receiving.messages]
        self.seen.append((f"{self.name}received", bodies, receiving.single))


class Stamp(ProducerInterceptor):
    """Gives each message a property and another tag."""

    def before_send(self, sending: Sending) -> None:
        properties = {**sending.message.properties, "stamp": "7"}
        sending.message = replace(sending.message, properties=properties, tags="stamped")


def fail(self: object, _: object) -> NoReturn:
    raise ValueError("a bug of an interceptor")


FAIL: Any = fail


class Broken(ProducerInterceptor, ConsumerInterceptor):
    """Raises in each method."""

    before_send = after_send = before_batch = after_batch = before_handling = after_handling = after_receive = FAIL


class Refusing(ProducerInterceptor):
    """Refuses messages with the body b"no"."""

    def before_send(self, sending: Sending) -> None:
        if sending.message.body == b"no":
            raise ArgumentError("this one is not sent")


@pytest.fixture
def seen() -> list[tuple[Any, ...]]:
    return []


@pytest.fixture
async def producer(broker: FakeBroker, seen: list[tuple[Any, ...]]) -> AsyncIterator[Producer]:
    async with Producer(broker.address, interceptors=[Notes(seen), Stamp()], _intervals=INTERVALS) as producer:
        yield producer


def make_consumer(broker: FakeBroker, on_message: Any = None, *, group: str = "g", **options: Any) -> Consumer:
    options = {"from_": "first", "_intervals": INTERVALS, "_clock": lambda: NOW_MS, **options}
    consumer = Consumer(group, on_message, nameserver=broker.address, **options)
    consumer.subscribe("demo")
    return consumer


# --- producers


async def test_each_kind_of_send_is_seen_and_may_be_changed(
    broker: FakeBroker, producer: Producer, seen: list[tuple[Any, ...]]
) -> None:
    await producer.send("demo", b"one", keys=iter(["a", "b"]), tags="mine", properties={"p": "1"})
    assert seen == [("before", "one", False), ("after", "one", "stored")]
    properties = broker.requests_of(SEND)[-1].properties()
    assert (properties["stamp"], properties["p"], properties["TAGS"], properties["KEYS"]) == (
        "7",
        "1",
        "stamped",
        "a b",
    )
    seen.clear()
    await producer.send(Message("demo", "two"))
    await producer.send_oneway("demo", b"three")
    await broker.until_requests(SEND, 3)
    assert seen == [
        ("before", "two", False),
        ("after", "two", "stored"),
        ("before", "three", False),
        ("after", "three", "oneway"),
    ]
    assert [each.properties()["stamp"] for each in broker.requests_of(SEND)] == ["7"] * 3
    seen.clear()
    await producer.send_batch([Message("demo", b"four"), Message("demo", b"five")])
    assert seen == [
        ("before", "four", True),
        ("before", "five", True),
        ("before batch", ["four", "five"]),
        ("after batch", 2, "NoneType"),
        ("after", "four", "stored"),
        ("after", "five", "stored"),
    ]


async def test_send_many_shows_messages_and_their_batches(
    broker: FakeBroker, producer: Producer, seen: list[tuple[Any, ...]]
) -> None:
    given = [Message("demo", b"0"), Message("demo", b"1"), Message("demo", b""), Message("demo", b"late", level=1)]
    with pytest.raises(SendManyError) as failed:
        await producer.send_many(given)
    assert [each.message for each in failed.value.refused] == [given[2]]
    assert failed.value.refused[0].message is given[2]
    assert sorted(each[1] for each in seen if each[0] == "before") == ["", "0", "1", "late"]
    assert sorted(each[1:] for each in seen if each[0] == "after") == [
        ("", "ArgumentError"),
        ("0", "stored"),
        ("1", "stored"),
        ("late", "stored"),
    ]
    assert sorted(each[1] for each in seen if each[0] == "before batch") == [["0", "1"], ["late"]]
    assert sorted(each[1:] for each in seen if each[0] == "after batch") == [(1, "NoneType"), (2, "NoneType")]
    seen.clear()
    outcomes = [outcome async for outcome in producer.send_each(given[:2])]
    assert [outcome.message for outcome in outcomes] == given[:2]
    assert [each[0] for each in seen] == ["before", "before", "before batch", "after batch", "after", "after"]


async def test_a_batch_that_is_refused_goes_one_by_one(
    broker: FakeBroker, producer: Producer, seen: list[tuple[Any, ...]]
) -> None:
    broker.on(BATCH, failure(ResponseCode.MESSAGE_ILLEGAL))
    await producer.send_many([Message("demo", b"0"), Message("demo", b"1")])
    assert [each[1:] for each in seen if each[0] == "after batch"] == [
        (2, MessageRejectedError.__name__),
        (1, "NoneType"),
        (1, "NoneType"),
    ]
    assert [each[2] for each in seen if each[0] == "after"] == ["stored", "stored"]


async def test_a_failed_and_a_cancelled_send_are_seen(
    broker: FakeBroker, producer: Producer, seen: list[tuple[Any, ...]]
) -> None:
    broker.on(SEND, failure(ResponseCode.NO_PERMISSION), None)
    with pytest.raises(BrokerError):
        await producer.send("demo", b"one", retries=0)
    sending = asyncio.create_task(producer.send("demo", b"two"))
    await broker.until_requests(SEND, 2)
    sending.cancel()
    await asyncio.wait([sending])
    assert [each[1:] for each in seen if each[0] == "after"] == [
        ("one", "NoPermissionError"),
        ("two", "CancelledError"),
    ]


async def test_what_a_caller_who_leaves_send_each_had_taken_is_told(
    broker: FakeBroker, seen: list[tuple[Any, ...]]
) -> None:
    options: dict[str, Any] = {"interceptors": [Notes(seen)], "max_in_flight": 2, "_intervals": INTERVALS}
    broker.on(BATCH, None)
    broker.on(SEND, None)
    async with Producer(broker.address, timeout=1, **options) as producer:
        outcomes = producer.send_each(Message("demo", b"%d" % number, sharding_key="k") for number in range(9))
        first = asyncio.ensure_future(anext(outcomes))
        await broker.until(lambda: bool(broker.requests_of(SEND) or broker.requests_of(BATCH)))
        first.cancel()
        await asyncio.wait([first])
        await outcomes.aclose()
    assert {each[1] for each in seen if each[0] == "before"} == {each[1] for each in seen if each[0] == "after"}


async def test_errors_of_interceptors_lose_nothing_and_are_logged_once(
    broker: FakeBroker, seen: list[tuple[Any, ...]], caplog: pytest.LogCaptureFixture
) -> None:
    interceptors = [Broken(), Notes(seen), Broken()]
    async with Producer(broker.address, interceptors=interceptors, _intervals=INTERVALS) as producer:
        for _ in range(3):
            await producer.send("demo", b"one")
        assert len(await producer.send_many([Message("demo", b"2"), Message("demo", b"3")])) == 2
    assert [each[0] for each in seen] == ["before", "after"] * 3 + [
        *("before", "before", "before batch"),
        *("after batch", "after", "after"),
    ]
    lines = [each for each in caplog.records if each.name == LOGGER]
    assert len(lines) == 2 * 4  # two broken ones with four methods
    assert all(each.exc_info for each in lines)


class Failed(BaseException):
    """As pytest.fail raises it: no Exception."""


@pytest.mark.parametrize("kind", [Failed, asyncio.CancelledError, GeneratorExit, StopIteration])
async def test_interceptors_that_raise_no_exception_lose_nothing_either(
    broker: FakeBroker, caplog: pytest.LogCaptureFixture, kind: type[BaseException]
) -> None:
    def raise_it(*_: object) -> None:
        raise kind()

    fail: Any = raise_it

    class Failing(ProducerInterceptor, ConsumerInterceptor):
        before_send = after_send = before_batch = after_batch = fail
        before_handling = after_handling = after_receive = fail

    handled: list[bytes] = []

    async def on_message(message: ReceivedMessage) -> None:
        handled.append(message.body)

    async with asyncio.timeout(10):
        async with Producer(broker.address, interceptors=[Failing()], _intervals=INTERVALS) as producer:
            await producer.send("demo", b"1")
            await producer.send_oneway("demo", b"2")
            await producer.send_batch([Message("demo", b"3"), Message("demo", b"4")])
            await producer.send_many([Message("demo", b"5"), Message("demo", b"6")])
            assert [each.error async for each in producer.send_each([Message("demo", b"7")])] == [None]
        async with make_consumer(broker, on_message, interceptors=[Failing()]) as consumer:
            await consumer.caught_up()
        async with make_consumer(broker, group="other", interceptors=[Failing()]) as consumer:
            assert await consumer.receive()
    assert sorted(handled) == [b"%d" % number for number in range(1, 8)]
    assert len([each for each in caplog.records if each.name == LOGGER]) == 7


async def test_a_half_changed_message_is_not_sent(broker: FakeBroker) -> None:
    class Half(ProducerInterceptor):
        def before_send(self, sending: Sending) -> None:
            sending.message = replace(sending.message, body=b"half")
            raise ValueError("not finished")

    class Nothing(ProducerInterceptor):
        def before_send(self, sending: Sending) -> None:
            sending.message = None  # type: ignore[assignment]

    async with Producer(broker.address, interceptors=[Half(), Nothing()], _intervals=INTERVALS) as producer:
        await producer.send("demo", b"whole")
    assert [each.body for each in broker.requests_of(SEND)] == [b"whole"]


async def test_an_interceptor_may_refuse_a_message(broker: FakeBroker, seen: list[tuple[Any, ...]]) -> None:
    interceptors = [Notes(seen), Refusing()]
    async with Producer(broker.address, interceptors=interceptors, _intervals=INTERVALS) as producer:
        with pytest.raises(ArgumentError, match="this one is not sent"):
            await producer.send("demo", b"no")
        with pytest.raises(SendManyError) as failed:
            await producer.send_many([Message("demo", b"yes"), Message("demo", b"no")])
        assert len(failed.value.refused) == len(failed.value.stored) == 1
        with pytest.raises(ArgumentError, match="this one is not sent"):
            await producer.send_batch([Message("demo", b"yes"), Message("demo", b"no")])
    refused = [each[1:] for each in seen if each[0] == "after" and each[2] != "stored"]
    assert refused == [
        ("no", "ArgumentError"),
        ("no", "ArgumentError"),
        ("yes", "ArgumentError"),
        ("no", "ArgumentError"),
    ]
    assert not broker.requests_of(BATCH)


async def test_before_is_called_in_the_order_given_and_after_in_the_opposite_one(
    broker: FakeBroker, seen: list[tuple[Any, ...]]
) -> None:
    interceptors = [Notes(seen, "outer "), Notes(seen, "inner ")]
    async with Producer(broker.address, interceptors=interceptors, _intervals=INTERVALS) as producer:
        await producer.send("demo", b"one")
    assert [each[0] for each in seen] == ["outer before", "inner before", "inner after", "outer after"]


def test_what_is_no_interceptor_is_refused() -> None:
    class Slow(ProducerInterceptor):
        async def before_send(self, sending: Sending) -> None:  # type: ignore[override]
            """A method that nobody would await."""

    with pytest.raises(ArgumentError, match=r"before_send .*async"):
        Producer(interceptors=[Slow()])
    with pytest.raises(ArgumentError, match="not of class ProducerInterceptor"):
        Producer(interceptors=[ConsumerInterceptor()])  # type: ignore[list-item]
    with pytest.raises(ArgumentError, match="not of class ConsumerInterceptor"):
        Consumer("g", interceptors=[ProducerInterceptor()])  # type: ignore[list-item]
    with pytest.raises(ArgumentError, match="give a list"):
        Producer(interceptors=ProducerInterceptor())  # type: ignore[arg-type]


async def test_a_producer_that_is_not_started_shows_nothing(broker: FakeBroker, seen: list[tuple[Any, ...]]) -> None:
    producer = Producer(broker.address, interceptors=[Notes(seen)])
    with pytest.raises(ClosedError):
        await producer.send("demo", b"one")
    assert seen == []


# --- consumers


async def test_handling_is_seen(broker: FakeBroker, seen: list[tuple[Any, ...]]) -> None:
    await broker.store("demo", b"a", b"fails")
    done = asyncio.Event()

    async def on_message(message: Any) -> None:
        seen.append(("handler", text(message.body)))
        if message.body == b"fails":
            done.set()
            raise RuntimeError("no")

    async with make_consumer(broker, on_message, interceptors=[Notes(seen)], concurrency=1):
        await done.wait()
        await broker.until_requests(RequestCode.CONSUMER_SEND_MSG_BACK)
    assert seen == [
        ("before", "a", "g", "clustering"),
        ("handler", "a"),
        ("after", "a", "NoneType"),
        ("before", "fails", "g", "clustering"),
        ("handler", "fails"),
        ("after", "fails", "RuntimeError"),
    ]


async def test_errors_of_a_consumers_interceptors_lose_nothing_and_are_logged_once(
    broker: FakeBroker, caplog: pytest.LogCaptureFixture
) -> None:
    await broker.store("demo", b"a", b"b", b"c")
    bodies = []

    async def on_message(message: Any) -> None:
        bodies.append(message.body)

    async with make_consumer(broker, on_message, interceptors=[Broken()]) as consumer:
        await consumer.caught_up()
    async with make_consumer(broker, group="other", interceptors=[Broken()]) as consumer:
        message = await consumer.receive()
        bodies.append(message.body)
    assert sorted(bodies[:3]) == [b"a", b"b", b"c"]
    assert bodies[3:] == [b"a"]
    assert broker.offsets["g", "demo", 0] == 3
    assert not broker.requests_of(RequestCode.CONSUMER_SEND_MSG_BACK)
    lines = [each.getMessage() for each in caplog.records if each.name == LOGGER]
    assert len(lines) == 3


async def test_a_handler_that_is_cancelled_is_seen(broker: FakeBroker, seen: list[tuple[Any, ...]]) -> None:
    await broker.store("demo", b"a")

    async def on_message(_: Any) -> None:
        await asyncio.Event().wait()

    options: dict[str, Any] = {"handler_timeout": 0.01, "interceptors": [Notes(seen)]}
    async with make_consumer(broker, on_message, **options):
        await broker.until_requests(RequestCode.CONSUMER_SEND_MSG_BACK)
    assert [each[0] for each in seen] == ["before", "after"]
    assert seen[1][2] == "CancelledError"


async def test_what_a_caller_receives_is_seen(broker: FakeBroker, seen: list[tuple[Any, ...]]) -> None:
    await broker.store("demo", b"a", b"b", b"c", b"d")
    async with make_consumer(broker, interceptors=[Notes(seen)]) as consumer:
        first = await consumer.receive()
        await consumer.receive_many(2)
        async for message in consumer:
            assert message.body == b"d"
            break
    assert first.body == b"a"
    assert seen == [("received", ["a"], True), ("received", ["b", "c"], False), ("received", ["d"], True)]


async def test_a_handler_that_returns_nothing_to_await_still_fails(
    broker: FakeBroker, seen: list[tuple[Any, ...]], caplog: pytest.LogCaptureFixture
) -> None:
    await broker.store("demo", b"a")
    async with make_consumer(broker, lambda _: None, interceptors=[Notes(seen)]):
        await broker.until_requests(RequestCode.CONSUMER_SEND_MSG_BACK)
    assert seen[1][2] == "TypeError"
    assert "which is not awaitable" in caplog.text


# --- without async


class Context(ProducerInterceptor, ConsumerInterceptor):
    """Notes the caller's variable, and sets it for the handler."""

    def __init__(self) -> None:
        self.callers: list[str] = []

    def before_send(self, sending: Sending) -> None:
        self.callers.append(CALLER.get())

    def before_handling(self, handling: Handling) -> None:
        CALLER.set("an interceptor")


async def test_without_async_context_variables_reach_interceptors_and_handlers(broker: FakeBroker) -> None:
    await broker.store("demo", b"a")
    found: list[str] = []
    context = Context()

    def script() -> None:
        CALLER.set("a script")
        with sync.Producer(broker.address, interceptors=[context], _intervals=INTERVALS) as producer:
            producer.send("demo", b"b")
            producer.send_many([Message("demo", b"c")])
            list(producer.send_each([Message("demo", b"d")]))
        with make_sync(broker, lambda _: found.append(CALLER.get()), interceptors=[context]) as consumer:
            consumer.caught_up()

    await asyncio.to_thread(script)
    assert context.callers == ["a script"] * 3
    assert found == ["an interceptor"] * 4


def make_sync(broker: FakeBroker, on_message: Any, **options: Any) -> sync.Consumer:
    consumer = sync.Consumer(
        "g",
        on_message,
        nameserver=broker.address,
        from_="first",
        _intervals=INTERVALS,
        _clock=lambda: NOW_MS,
        **options,
    )
    consumer.subscribe("demo")
    return consumer
