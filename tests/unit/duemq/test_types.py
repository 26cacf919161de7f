"""What a type checker makes of a user's code: `assert_type` is checked by `make type`, strictly, and the code runs."""

from __future__ import annotations

from typing import assert_type

import duemq
from duemq import (
    Admin,
    ChangeResult,
    Changes,
    Message,
    MessageHandle,
    MessageQueue,
    PendingMessage,
    Producer,
    RecurringMessage,
    Retries,
    SendManyError,
    SendOutcome,
    SendResult,
    sync,
)
from duemq.protocol.codes import RequestCode
from duemq.protocol.frames import fastjson
from duemq.protocol.requests import bodies
from duemq.protocol.requests.bodies import BrokerData
from tests.unit.duemq.conftest import INTERVALS
from tests.unit.duemq.fake import FakeBroker, success


def handle(message: sync.ReceivedMessage) -> None:
    """A handler of a user."""


async def test_a_users_code(broker: FakeBroker) -> None:
    table = [BrokerData({0: broker.address}, broker.name, "c")]
    told = {"counts": {"CANCELLED": 1}, "messages": [{"msgId": "0" * 32, "result": "CANCELLED"}]}
    broker.on(RequestCode.GET_BROKER_CLUSTER_INFO, success(body=bodies.cluster_info(table, {"c": [broker.name]})))
    broker.on(RequestCode.CHANGE_BY_HANDLE, success(body=fastjson.dumps(told)))
    broker.on(RequestCode.LIST_PENDING, success(body=fastjson.dumps({"messages": [], "cursor": None, "counted": 0})))
    async with (
        Producer(broker.address, retries=Retries(times=1), _intervals=INTERVALS) as producer,
        Admin(broker.address, _intervals=INTERVALS) as admin,
    ):
        result = assert_type(await producer.send("demo", b"x", level=2, keys=["k"]), SendResult)
        assert_type(await producer.send(Message("demo", "x")), SendResult)
        assert_type(await producer.send_oneway("demo", "x"), str)
        assert_type(await producer.send_many([Message("demo", "x")]), list[SendResult])
        async for outcome in producer.send_each(Message("demo", "x") for _ in range(1)):
            assert_type(outcome, SendOutcome)
        assert_type(result.handle, MessageHandle | None)
        assert result.handle is not None
        for changer in (producer, admin):
            changes = assert_type(await changer.cancel(result.handle), Changes)
            assert_type(changes.result, ChangeResult)
            assert_type(await changer.reschedule(str(result.handle), delay="1h"), Changes)
        async for waiting in admin.pending("demo"):
            assert_type(waiting, PendingMessage)
        async for recurring in admin.recurring("demo"):
            assert_type(recurring, RecurringMessage)
            assert_type(recurring.recurrence.every_ms, int | None)


def of_the_facade(error: SendManyError) -> None:
    """Not run: the types of the objects whose methods wait."""
    producer = assert_type(sync.Producer("127.0.0.1:9876", retries=Retries(times=1)), sync.Producer)
    admin = assert_type(sync.Admin(timeout=5), sync.Admin)
    consumer = assert_type(sync.Consumer("g", handle, from_="first", concurrency=2), sync.Consumer)
    sync.Producer(no_such=1)  # type: ignore[call-arg]
    sync.Admin(no_such=1)  # type: ignore[call-arg]
    sync.Consumer("g", no_such=1)  # type: ignore[call-arg]
    sync.Consumer("g", lambda: None)  # type: ignore[arg-type, misc]
    with producer as producer, admin as admin, consumer as consumer:
        assert_type(producer, sync.Producer)
        assert_type(admin, sync.Admin)
        assert_type(consumer, sync.Consumer)
    assert_type(consumer.receive(timeout=1), sync.ReceivedMessage)
    assert_type(consumer.receive().ack(), None)
    assert_type(consumer.receive_many(9), list[sync.ReceivedMessage])
    assert_type(consumer.commit(), dict[MessageQueue, int])
    assert_type(consumer.seek("demo", "first"), None)
    assert_type(consumer.assignment, frozenset[MessageQueue])
    for message in consumer:
        assert_type(message, sync.ReceivedMessage)
        assert_type(message.body, bytes)
    for outcome in producer.send_each([]):
        assert_type(outcome, SendOutcome)
    for waiting in admin.pending("demo", key="k"):
        assert_type(waiting, PendingMessage)
    for recurring in admin.recurring("demo", name="n"):
        assert_type(recurring, RecurringMessage)
    assert_type(admin.count("demo"), int)
    admin.pending(no_such=1)  # type: ignore[call-arg]
    producer.close(timeout=1)
    producer.schedule("demo", b"x", name="n", every="90s")
    assert_type(producer.send("demo", b"x", delay=5), SendResult)
    assert_type(producer.send(Message("demo", b"x")), SendResult)
    assert_type(producer.send_many([]), list[SendResult])
    assert_type(producer.cancel("0" * 32), Changes)
    assert_type(admin.reschedule(topic="demo", key="k", delay=5), Changes)
    assert_type(error.stored, tuple[SendResult, ...])
    assert_type(error.refused, tuple[SendOutcome, ...])


def of_the_package() -> None:
    """Not run: names that are imported at their first use have types, and wrong ones are errors."""
    assert_type(duemq.errors.BusyError(2, "no", "h:1"), duemq.BusyError)
    assert_type(duemq.sync.Producer(), sync.Producer)
    assert_type(duemq.testing.TestBroker().nameserver, str)
    assert_type(duemq.__version__, str)
    duemq.Consumr  # type: ignore[attr-defined]  # noqa: B018
    duemq.error  # type: ignore[attr-defined]  # noqa: B018
    from duemq import Prodcer  # type: ignore[attr-defined]  # noqa: F401
    from duemq.spark import laod  # type: ignore[attr-defined]  # noqa: F401
